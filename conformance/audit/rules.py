"""The table of mistakes, and how a rule enters it.

Owns: what a rule and a finding are.
May not know: any rule (`protocol`, `safety`, `discipline`).
Invariants: the name of a mistake is the name of the function that finds it.

A rule is a function that gives the exchanges of each mistake, or that knows it by one exchange:

    @rule("safety", "something is written to a source")
    def source_written(run: Run) -> Iterator[tuple[Act, ...]]:
        for act in run.acts:
            if act.is_write and act.kind != "token" and act.place in run.readonly:
                yield (act,)

    @single("safety", "a cookie is sent: nobody gave one")
    def cookie_sent(act: Act) -> bool:
        return "cookie" in act.headers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .evidence import Act, Run

__all__ = ["RULES", "Class", "Finding", "Rule", "rule", "single"]

Class = Literal["protocol", "safety", "discipline"]


@dataclass(frozen=True)
class Finding:
    """One mistake of the client: its name, and the exchanges that show it."""

    name: str
    kind: Class
    text: str
    acts: tuple[Act, ...]

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.name}: {self.text}", *map(str, self.acts)])


Check = Callable[[Run], Iterable[tuple[Act, ...]]]


class Rule(NamedTuple):
    """What is a mistake, and where it is said."""

    name: str
    kind: Class
    text: str
    check: Check


RULES: dict[str, Rule] = {}


def rule(kind: Class, text: str) -> Callable[[Check], Check]:
    """Enter a function that gives the exchanges of each mistake; its name is the mistake's."""

    def enter(check: Check) -> Check:
        RULES[check.__name__] = Rule(check.__name__, kind, text, check)
        return check

    return enter


def single(kind: Class, text: str) -> Callable[[Callable[[Act], bool]], Callable[[Act], bool]]:
    """Enter a function that knows a mistake by one exchange alone."""

    def enter(is_wrong: Callable[[Act], bool]) -> Callable[[Act], bool]:
        def check(run: Run) -> Iterator[tuple[Act, ...]]:
            return ((act,) for act in run.acts if is_wrong(act))

        name = is_wrong.__name__
        RULES[name] = Rule(name, kind, text, check)
        return is_wrong

    return enter
