"""The table of rules, and the decorators that add a rule.

Owns: the forms of rules and findings.
May not know: any rule (`protocol`, `safety`, `discipline`).
Invariants: the name of a mistake is the name of the function that finds it.

A rule is a function that yields the exchanges of each mistake, or a predicate on a single exchange:

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
    """One mistake of the client."""

    name: str  # of the rule
    kind: Class
    text: str  # what is wrong
    acts: tuple[Act, ...]  # the exchanges that show the mistake

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.name}: {self.text}", *map(str, self.acts)])


Check = Callable[[Run], Iterable[tuple[Act, ...]]]


class Rule(NamedTuple):
    """A kind of mistake, and the function that finds it."""

    name: str
    kind: Class
    text: str
    check: Check
    is_always: bool  # whether it holds in a disturbed run too


# All rules by name. Importing a module of rules adds its rules.
RULES: dict[str, Rule] = {}


def rule(kind: Class, text: str, *, after_faults: bool = False) -> Callable[[Check], Check]:
    """Add a function that yields the exchanges of each mistake.

    A rule of `discipline` holds in a disturbed run only with `after_faults`, all others always.
    """

    def add(check: Check) -> Check:
        is_always = after_faults or kind != "discipline"
        RULES[check.__name__] = Rule(check.__name__, kind, text, check, is_always)
        return check

    return add


def single(kind: Class, text: str) -> Callable[[Callable[[Act], bool]], Callable[[Act], bool]]:
    """Add a predicate that reports whether a single exchange is a mistake."""

    def add(is_wrong: Callable[[Act], bool]) -> Callable[[Act], bool]:
        def check(run: Run) -> Iterator[tuple[Act, ...]]:
            return ((act,) for act in run.acts if is_wrong(act))

        check.__name__ = is_wrong.__name__
        rule(kind, text)(check)
        return is_wrong

    return add
