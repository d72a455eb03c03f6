"""Rules that break exchanges on purpose, in front of a registry of any kind.

Owns: which exchanges a rule matches, which occurrence it strikes, and what came of it.
May not know: sockets, what the verbs do (verbs.py), what a registry holds.
Invariants: the same seed, rules and requests give the same faults, in whatever order requests of
different names come. `check` finds a rule that never struck, and a verb that struck and did not
take place.

A test reads as a sentence:

    faults.on("PATCH", "upload", repository="app/web").nth(2).drop(after=64 * 1024)
    faults.on("GET", "blob").first(2).of_each().delay(30).status(503, retry_after=5)
    faults.on("GET HEAD", "manifest").chance(0.1).lie("Docker-Content-Digest")

Rules are taken in the order in which they were written. All that match an exchange take effect, up
to and including the first that ends it (answers in the registry's place, or drops the connection):
later rules do not see that exchange, nor count it. So two rules for the first answer are a queue.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, TypeAlias

from ..journal import Entry, Selector, clock
from ..messages import Request
from .injection import Effect, Gate, Injection
from .verbs import (
    Challenge,
    Corrupt,
    Delay,
    Drop,
    Forget,
    Lie,
    Raw,
    Redirect,
    Stall,
    Status,
    Throttle,
    Truncate,
)

__all__ = ["Faults", "Gate", "KiB", "MiB", "Rule"]

KiB = 1 << 10
MiB = 1 << 20

Name: TypeAlias = tuple[str, ...]

_P = ParamSpec("_P")


def _verb(make: Callable[_P, Effect]) -> Callable[Concatenate[Rule, _P], Rule]:
    """Make a verb's class a method of rules, with its parameters and its documentation."""

    def method(self: Rule, /, *arguments: _P.args, **named: _P.kwargs) -> Rule:
        return self.add(make(*arguments, **named))

    method.__doc__ = inspect.getdoc(make)
    method.__name__ = str(getattr(make, "verb", ""))
    return method


class Rule:
    """What is to be struck, which time, and by which verbs.

    Every method returns the rule, so that they are written one after the other. Verbs are carried
    out at the places that they name; of those that wait and those that end an exchange, the waits
    come first.
    """

    status = _verb(Status)
    delay = _verb(Delay)
    throttle = _verb(Throttle)
    drop = _verb(Drop)
    truncate = _verb(Truncate)
    corrupt = _verb(Corrupt)
    stall = _verb(Stall)
    redirect = _verb(Redirect)
    challenge = _verb(Challenge)
    forget = _verb(Forget)
    lie = _verb(Lie)
    raw = _verb(Raw)

    def __init__(
        self,
        selector: Selector,
        number: int,
        seed: int = 0,
        where: Callable[[Request], bool] | None = None,
    ) -> None:
        self.selector = selector
        self.effects: list[Effect] = []
        self.matched = 0
        # The exchanges that were struck, and what took place in them.
        self.struck: list[Entry] = []
        self.done: list[tuple[Effect, Entry]] = []
        self._number = number
        self._seed = seed
        self._where = where
        self._occurrence: Callable[[int], bool] | None = None
        self._chance: float | None = None
        self._most: float = math.inf
        self._is_of_each = False
        self._is_optional = False
        # The rule's conditions as the text of rules has them.
        self._words: list[str] = []
        # By the name of the request (see `_name`): occurrences, strikes, random numbers drawn.
        self._counts: Counter[Name] = Counter()
        self._hits: Counter[Name] = Counter()
        self._draws: Counter[Name] = Counter()
        self._changed = threading.Condition()

    # Which occurrence.

    def nth(self, *numbers: int) -> Rule:
        """Strike these occurrences; the first is 1."""
        if not numbers or min(numbers) < 1:
            raise ValueError("occurrences are counted from 1")
        return self._occurs(f"nth={','.join(map(str, numbers))}", lambda n: n in numbers)

    def every(self, number: int) -> Rule:
        """Strike every so many: the `number`th, the one at twice that, and so on."""
        if number < 1:
            raise ValueError("every takes a number from 1")
        return self._occurs(f"every={number}", lambda n: n % number == 0)

    def first(self, number: int = 1) -> Rule:
        """Strike the first so many."""
        if number < 1:
            raise ValueError("first takes a number from 1")
        return self._occurs(f"first={number}", lambda n: n <= number)

    def since(self, number: int) -> Rule:
        """Strike the `number`th and all later ones."""
        if number < 1:
            raise ValueError("occurrences are counted from 1")
        return self._occurs(f"since={number}", lambda n: n >= number)

    def chance(self, probability: float) -> Rule:
        """Strike at random.

        The seed, what is asked, and how often it was asked decide, so that the order of requests
        does not matter.
        """
        if not 0 < probability <= 1 or self._chance is not None:
            raise ValueError("one probability, above 0 and up to 1")
        self._chance = probability
        self._words.append(f"chance={probability:g}")
        return self

    def at_most(self, number: int) -> Rule:
        """Strike no more often than that."""
        if number < 1:
            raise ValueError("at_most takes a number from 1")
        self._most = number
        self._words.append(f"at-most={number}")
        return self

    def of_each(self) -> Rule:
        """Count occurrences, and `at_most`, for each method, kind, repository and reference."""
        self._is_of_each = True
        self._words.append("of-each")
        return self

    def optional(self) -> Rule:
        """Let `check` pass when this never strikes or does not take place."""
        self._is_optional = True
        self._words.append("optional")
        return self

    def _occurs(self, words: str, occurrence: Callable[[int], bool]) -> Rule:
        if self._occurrence is not None:
            raise ValueError(f"{self}: which occurrence was said already, now {words}")
        self._occurrence = occurrence
        self._words.append(words)
        return self

    # What happens.

    def add(self, effect: Effect) -> Rule:
        """Add a verb; one of them at most may end the exchange."""
        if effect.ends_exchange and self.ends_exchange:
            raise ValueError(f"{self}: an exchange ends once; also {effect}")
        if isinstance(effect, Forget) and self.selector.kinds != {"upload"}:
            raise ValueError("only an upload can be forgotten: on(..., 'upload')")
        self.effects.append(effect)
        return self

    @property
    def ends_exchange(self) -> bool:
        """Ask whether an exchange that this strikes is over for later rules."""
        return any(effect.ends_exchange for effect in self.effects)

    def strikes(self, request: Request, entry: Entry) -> bool:
        """Decide on an exchange, and count it."""
        if not self.selector.matches(request) or (
            self._where is not None and not self._where(request)
        ):
            return False
        self.matched += 1
        name = _name(request)
        key = name if self._is_of_each else ()
        self._counts[key] += 1
        due = self._occurrence is None or self._occurrence(self._counts[key])
        if due and self._chance is not None:
            due = self._draw(name) < self._chance
        if due and self._hits[key] < self._most and not self._has_room():
            self._hits[key] += 1
            self.struck.append(entry)
            return True
        return False

    def _draw(self, name: Name) -> float:
        """Draw a number in [0, 1), by the name and by how often it was drawn for before."""
        self._draws[name] += 1
        text = "\n".join(map(str, (self._seed, self._number, *name, self._draws[name])))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64

    def _has_room(self) -> bool:
        """Ask whether a request is below the number that a throttle lets pass."""
        return any(
            isinstance(effect, Throttle) and effect.has_room(clock()) for effect in self.effects
        )

    def took_place(self, effect: Effect, entry: Entry) -> None:
        """Note that a verb was carried out."""
        with self._changed:
            self.done.append((effect, entry))
            entry.faults.append(str(effect))
            self._changed.notify_all()

    def wait(self, times: int = 1, timeout: float = 30.0) -> None:
        """Block this thread until verbs took place so often; AssertionError when they do not."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.done) >= times, timeout):
                raise AssertionError(f"in {timeout:g} s: {self.report()}")

    def release(self) -> None:
        """Let everything go on that a `stall` of this rule holds, now and later."""
        for effect in self.effects:
            if isinstance(effect, Stall):
                effect.until.open()

    def problems(self) -> list[str]:
        """Say which faults were asked for and did not happen."""
        if not self.effects:
            return [f"no verb: {self}"]
        if self._is_optional:
            return []
        if not self.struck:
            return [f"never struck: {self.report()}"]
        return [
            f"struck and did not take place: {effect} in {self}"
            for effect in self.effects
            if not any(str(done) == str(effect) for done, _ in self.done)
        ]

    def report(self) -> str:
        """Say what was done to which exchange."""
        lines = [f"{self}: {self.matched} matched, {len(self.struck)} struck"]
        for entry in tuple(self.struck):
            done = [str(effect) for effect, hit in tuple(self.done) if hit is entry]
            lines.append(f"    {', '.join(done) or 'nothing took place'}: {entry}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Write the rule as the text of rules has it (grammar.py)."""
        return (
            f"{' '.join([str(self.selector), *self._words])}: {', '.join(map(str, self.effects))}"
        )


def _name(request: Request) -> Name:
    """Name a request by its parts that are the same in every run: without sessions and ports."""
    stable = [value for key, value in request.query if key in ("digest", "mount", "last", "scope")]
    reference = "" if request.kind == "upload" else request.reference or request.path
    return (request.method, request.kind, request.repository, reference, *stable)


class Faults:
    """The rules of one server, and what they did."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.rules: list[Rule] = []
        self._forgotten: set[tuple[str, str]] = set()

    def on(
        self,
        method: str | None = None,
        kind: str | None = None,
        *,
        repository: str | None = None,
        reference: str | None = None,
        host: str | None = None,
        path: str | None = None,
        header: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        where: Callable[[Request], bool] | None = None,
    ) -> Rule:
        """Begin a rule for the requests that agree with everything that is given.

        `method` and `kind` may be several, separated by spaces; the others are globs, in which `*`
        goes over slashes too. `header` and `query`: the ones that must be there, and a glob for
        each value.
        """
        selector = Selector.of(
            method,
            kind,
            repository=repository,
            reference=reference,
            host=host,
            path=path,
            header=header,
            query=query,
        )
        rule = Rule(selector, len(self.rules) + 1, self.seed, where)
        self.rules.append(rule)
        return rule

    def injection(self, request: Request, entry: Entry) -> Injection | None:
        """Return what an exchange is struck by."""
        struck: list[Effect] = []
        for rule in tuple(self.rules):
            if rule.effects and rule.strikes(request, entry):
                struck += [
                    effect.copy_for(request, self._notify(rule, entry)) for effect in rule.effects
                ]
                if rule.ends_exchange:
                    break
        if (request.repository, request.reference) in self._forgotten and request.kind == "upload":
            struck = [*(effect for effect in struck if not effect.ends_exchange), Forget()]
        return Injection(request, struck, entry) if struck else None

    def _notify(self, rule: Rule, entry: Entry) -> Callable[[Effect], None]:
        """Return what an effect calls when it takes place in an exchange."""

        def on_effect(effect: Effect) -> None:
            if isinstance(effect, Forget):
                self._forgotten.add((entry.repository, entry.reference))
            rule.took_place(effect, entry)

        return on_effect

    def release(self) -> None:
        """Let everything go on that stalls, now and later."""
        for rule in self.rules:
            rule.release()

    def clear(self) -> None:
        """Drop all rules; exchanges that they stall go on."""
        self.release()
        self.rules.clear()
        self._forgotten.clear()

    def report(self) -> str:
        """Say what each rule did to which exchanges."""
        return "\n".join(rule.report() for rule in self.rules)

    def check(self) -> None:
        """Raise AssertionError when a rule never struck, or a verb that struck never took place."""
        problems = [problem for rule in self.rules for problem in rule.problems()]
        if problems:
            raise AssertionError("faults that were asked for:\n" + "\n".join(problems))

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))
