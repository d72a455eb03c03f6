"""Rules that inject faults into exchanges, in front of a registry of any kind.

Owns: which exchanges a rule matches, which occurrences it strikes, and the record of its strikes.
May not know: sockets, what the verbs do (verbs.py), what a registry holds.
Invariants: the same seed, rules and requests give the same faults, also if requests of different
names arrive in another order. `check` reports a rule that never struck, and a verb that never took
effect.

Rules read like sentences:

    faults.on("PATCH", "upload", repository="app/web").nth(2).drop(after=64 * 1024)
    faults.on("GET", "blob").first(2).delay(30).status(503, retry_after=5)
    faults.on("GET HEAD", "manifest").chance(0.1).lie("Docker-Content-Digest")

Rules are applied in the order in which they were written. All rules that match an exchange take
effect, up to and including the first rule that ends the exchange, by an answer in the registry's
place or by dropping the connection. Later rules do not count that exchange. So two rules for the
first answer apply to the first two answers.
"""

from __future__ import annotations

import hashlib
import inspect
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

# The parts of a request that are the same in every run (see `_name`).
Name: TypeAlias = tuple[str, ...]

_P = ParamSpec("_P")


def _verb(make: Callable[_P, Effect]) -> Callable[Concatenate[Rule, _P], Rule]:
    """Return a method of Rule that adds a verb. It has the verb's parameters and docstring."""

    def method(self: Rule, /, *arguments: _P.args, **keywords: _P.kwargs) -> Rule:
        return self.add(make(*arguments, **keywords))

    method.__doc__ = inspect.getdoc(make)
    method.__name__ = str(getattr(make, "verb", ""))
    return method


class Rule:
    """Which exchanges to strike, at which occurrences, with which verbs.

    The methods that set a condition or add a verb return the rule, so that calls can be chained.
    Each verb acts at a certain place of the exchange. At one place, verbs that wait act before a
    verb that ends the exchange.
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
        self, selector: Selector, number: int, seed: int, where: Callable[[Request], bool] | None
    ) -> None:
        self.selector = selector
        self.effects: list[Effect] = []  # the verbs, as patterns
        self.matched = 0  # number of exchanges that the selector matched
        # The exchanges that were struck.
        self.struck: list[Entry] = []
        # The verbs that took effect, each with its exchange.
        self.done: list[tuple[Effect, Entry]] = []
        self._number = number  # among the rules of the server, from 1
        self._seed = seed
        self._where = where  # a condition in addition to the selector
        # Reports whether an occurrence is struck. None: all occurrences.
        self._occurrence: Callable[[int], bool] | None = None
        # Probability of a strike. None: 1.
        self._chance: float | None = None
        # Whether `check` passes if the rule never strikes.
        self._is_optional = False
        # The conditions in words, for `str`.
        self._words: list[str] = []
        # Number of random numbers drawn, by the name of the request.
        self._draws: Counter[Name] = Counter()
        # Notified when a verb takes effect. Guards `done`.
        self._changed = threading.Condition()

    # Which occurrence.

    def nth(self, *numbers: int) -> Rule:
        """Strike these occurrences, counted from 1."""
        if not numbers or min(numbers) < 1:
            raise ValueError("occurrences are counted from 1")
        return self._set_occurrence(f"nth={','.join(map(str, numbers))}", lambda n: n in numbers)

    def first(self, number: int = 1) -> Rule:
        """Strike the first `number` occurrences."""
        if number < 1:
            raise ValueError("first takes a number from 1")
        return self._set_occurrence(f"first={number}", lambda n: n <= number)

    def since(self, number: int) -> Rule:
        """Strike the `number`th occurrence and all later ones."""
        if number < 1:
            raise ValueError("occurrences are counted from 1")
        return self._set_occurrence(f"since={number}", lambda n: n >= number)

    def chance(self, probability: float) -> Rule:
        """Strike with a probability.

        Each decision depends on the seed, the name of the request and the number of earlier
        decisions for that name. So it does not depend on the order of different requests.
        """
        if not 0 < probability <= 1 or self._chance is not None:
            raise ValueError("one probability, above 0 and up to 1")
        self._chance = probability
        self._words.append(f"chance={probability:g}")
        return self

    def optional(self) -> Rule:
        """Make `check` pass even if the rule never strikes or a verb never takes effect."""
        self._is_optional = True
        self._words.append("optional")
        return self

    def _set_occurrence(self, words: str, occurrence: Callable[[int], bool]) -> Rule:
        if self._occurrence is not None:
            raise ValueError(f"{self}: which occurrence was said already, now {words}")
        self._occurrence = occurrence
        self._words.append(words)
        return self

    # What happens.

    def add(self, effect: Effect) -> Rule:
        """Add a verb. Raises ValueError if two verbs of the rule would end the exchange."""
        if effect.ends_exchange and self.ends_exchange:
            raise ValueError(f"{self}: an exchange ends once; also {effect}")
        if isinstance(effect, Forget) and self.selector.kinds != ["upload"]:
            raise ValueError("only an upload can be forgotten: on(..., 'upload')")
        self.effects.append(effect)
        return self

    @property
    def ends_exchange(self) -> bool:
        """Whether a strike ends the exchange, so that later rules do not apply to it."""
        return any(effect.ends_exchange for effect in self.effects)

    def try_strike(self, request: Request, entry: Entry) -> bool:
        """Count an exchange if it matches, and record a strike if its occurrence is to be struck.

        Returns whether the exchange is struck.
        """
        if not self.selector.matches(request) or (
            self._where is not None and not self._where(request)
        ):
            return False
        self.matched += 1
        is_due = self._occurrence is None or self._occurrence(self.matched)
        if is_due and self._chance is not None:
            is_due = self._draw(_name(request)) < self._chance
        if not is_due or self._try_admit():
            return False
        self.struck.append(entry)
        return True

    def _draw(self, name: Name) -> float:
        """Return a pseudo-random number in [0, 1) for a name.

        Further calls return other numbers.
        """
        self._draws[name] += 1
        text = "\n".join(map(str, (self._seed, self._number, *name, self._draws[name])))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64

    def _try_admit(self) -> bool:
        """Report whether a throttle of this rule admits one more request, and count it if so."""
        return any(
            isinstance(effect, Throttle) and effect.try_admit(clock()) for effect in self.effects
        )

    def took_place(self, effect: Effect, entry: Entry) -> None:
        """Record that a verb has taken effect in an exchange."""
        with self._changed:
            self.done.append((effect, entry))
            entry.faults.append(str(effect))
            self._changed.notify_all()

    def wait(self, times: int = 1, timeout: float = 30.0) -> None:
        """Block this thread until verbs have taken effect `times` times.

        Raises AssertionError after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.done) >= times, timeout):
                raise AssertionError(f"in {timeout:g} s: {self.report()}")

    def release(self) -> None:
        """End all stalls of this rule, and prevent further ones."""
        for effect in self.effects:
            if isinstance(effect, Stall):
                effect.until.open()

    def problems(self) -> list[str]:
        """Return descriptions of the faults that did not happen."""
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
        """Describe the strikes of this rule and their exchanges."""
        lines = [f"{self}: {self.matched} matched, {len(self.struck)} struck"]
        for entry in tuple(self.struck):
            done = [str(effect) for effect, hit in tuple(self.done) if hit is entry]
            lines.append(f"    {', '.join(done) or 'nothing took place'}: {entry}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return (
            f"{' '.join([str(self.selector), *self._words])}: {', '.join(map(str, self.effects))}"
        )


def _name(request: Request) -> Name:
    """Return the parts of a request that are the same in every run, without sessions and ports."""
    stable = [value for key, value in request.query if key in ("digest", "mount", "last", "scope")]
    reference = "" if request.kind == "upload" else request.reference or request.path
    return (request.method, request.kind, request.repository, reference, *stable)


class Faults:
    """The rules of one server."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.rules: list[Rule] = []
        # Upload sessions that `forget` has struck: repository and session.
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
        """Add a rule for the requests that satisfy all conditions.

        `method` and `kind` may have several values, separated by spaces. `header` and `query` have
        globs for the values of headers and parameters that must be present. The other strings are
        globs. In globs, `*` matches slashes too. `where` is a predicate on the request.
        """
        selector = Selector(
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
        """Return the verbs that strike an exchange, or None if no rule strikes it."""
        struck: list[Effect] = []
        for rule in tuple(self.rules):
            if rule.effects and rule.try_strike(request, entry):
                struck += [
                    effect.copy_for(request, self._notify(rule, entry)) for effect in rule.effects
                ]
                if rule.ends_exchange:
                    break
        if (request.repository, request.reference) in self._forgotten and request.kind == "upload":
            struck = [*(effect for effect in struck if not effect.ends_exchange), Forget()]
        return Injection(request, struck, entry) if struck else None

    def _notify(self, rule: Rule, entry: Entry) -> Callable[[Effect], None]:
        """Return the function that an effect calls when it takes effect in an exchange."""

        def on_effect(effect: Effect) -> None:
            if isinstance(effect, Forget):
                self._forgotten.add((entry.repository, entry.reference))
            rule.took_place(effect, entry)

        return on_effect

    def release(self) -> None:
        """End all stalls, and prevent further ones."""
        for rule in self.rules:
            rule.release()

    def clear(self) -> None:
        """Remove all rules, and end their stalls."""
        self.release()
        self.rules.clear()
        self._forgotten.clear()

    def report(self) -> str:
        """Describe the strikes of all rules."""
        return "\n".join(rule.report() for rule in self.rules)

    def check(self) -> None:
        """Raise AssertionError if a rule never struck, or if one of its verbs never took effect."""
        problems = [problem for rule in self.rules for problem in rule.problems()]
        if problems:
            raise AssertionError("faults that were asked for:\n" + "\n".join(problems))

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))
