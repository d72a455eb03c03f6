"""Which tags of a listing are copied: globs, versions, exclusion, order, limits.

Owns: the glob language, the tag rule, the selection with a reason for every tag that it drops. May not
know: where a listing comes from, configuration files. Invariant: the selection is a function of the
listing and the rule alone, and matching is linear in tag times pattern, whatever the pattern.
Follows design.md section 4 (globs) and section 5 (the order of the steps).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from _regsync.oci import is_referrer_tag, is_tag

if TYPE_CHECKING:
    from _regsync.semver import Prerelease

__all__ = [
    "LATEST_NEEDS", "Reason", "Selection", "TagRule", "check_glob", "compile_glob", "literal_tags", "select"
]  # fmt: skip

# What a rule with `latest` alone is told, here and by `config`.
LATEST_NEEDS = "needs `sort`, or `semver`, to say which tags are the highest"

Reason = Literal["glob", "semver", "prerelease", "exclude", "latest", "referrer_tag"]
_Order = Literal["semver", "alpha"]

# Thirty times what a tag can hold, for alternatives in braces; a longer one is a mistake.
_LONGEST_PATTERN = 4096
# So many steps of a pattern are remembered: memory stays bounded, answers stay the same.
_MOST_STEPS = 4096


_Accepts = Callable[[str], bool]
_TOKEN = (
    r"\\(?P<escaped>.)|\[(?P<set>(?:\\.|[^\]\\])*)\]|(?P<unfinished>[\[\\])|(?P<mark>[*?{},])|(?P<plain>.)"
)
_SET_MEMBER = r"(\\.|.)(?:-(\\.|.))?"


class _State(NamedTuple):
    """What the next character has to be, and the state after it; `free` are reached without any."""

    accepts: _Accepts | None
    after: int = 0
    free: Sequence[int] = ()


def _automaton(pattern: str) -> tuple[list[_State], str | None]:
    """Return the states, the first of which starts and the last accepts, and the text of a literal."""
    if not pattern:
        raise ValueError("an empty pattern matches nothing: remove it, or write '*' for every tag")
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"a pattern of more than {_LONGEST_PATTERN} characters: write several")
    states: list[_State] = []
    literals: list[str] = []
    # For each open brace: where its alternatives begin, and the states of its commas.
    braces: list[tuple[list[int], list[int]]] = []
    for match in re.finditer(_TOKEN, pattern, re.DOTALL):
        kind, text = match.lastgroup, match[match.lastgroup or 0]
        here = len(states)
        if kind == "unfinished":
            trouble = "'[' without ']'" if text == "[" else "a backslash at its end"
            raise ValueError(f"{pattern!r} has {trouble}: write \\{text} for the character itself")
        if kind == "set":
            states.append(_State(_character_set(pattern, text), here + 1))
        elif kind != "mark" or (text == "," and not braces):
            states.append(_State(text.__eq__, here + 1))
            literals.append(text)
        elif text in "?*":
            # Every character is true.
            states.append(_State(bool, here + 1) if text == "?" else _State(bool, here, [here + 1]))
        elif text == "{":
            braces.append(([here + 1], []))
            states.append(_State(None, free=braces[-1][0]))
        elif text == ",":
            braces[-1][0].append(here + 1)
            braces[-1][1].append(here)
            states.append(_State(None))
        else:
            if not braces:
                raise ValueError(f"{pattern!r} has a '}}' without '{{'")
            for comma in braces.pop()[1]:
                states[comma] = _State(None, free=[here])
            states.append(_State(None, free=[here + 1]))
    if braces:
        raise ValueError(f"{pattern!r} has a '{{' without '}}'")
    states.append(_State(None))
    if len(literals) < len(states) - 1:
        return states, None
    # It will stand in a request as it is (design.md section 5), so it has to be a tag.
    if not is_tag(literal := "".join(literals)):
        raise ValueError(f"{literal!r} can never be a tag: letters, digits and . _ - only, 128 at most")
    return states, literal


def _character_set(pattern: str, members: str) -> _Accepts:
    negated = members.startswith("!")
    members = members[negated:]
    if not members:
        raise ValueError(f"{pattern!r} has an empty set of characters")
    if members[0] == "^" and not negated:
        raise ValueError(f"{pattern!r}: a set is negated by '!', as in [!a-z]")
    ranges = [(low[-1], (high or low)[-1]) for low, high in re.findall(_SET_MEMBER, members, re.DOTALL)]
    for low, high in ranges:
        if low > high:
            raise ValueError(f"{pattern!r}: the range {low}-{high} is the wrong way round")
    return lambda character: any(low <= character <= high for low, high in ranges) is not negated


def _closure(states: Sequence[_State], numbers: Iterable[int]) -> frozenset[int]:
    """Return these states and all that are reached from them without a character."""
    reached: set[int] = set()
    waiting = list(numbers)
    while waiting:
        number = waiting.pop()
        if number not in reached:
            reached.add(number)
            waiting += states[number].free
    return frozenset(reached)


def _step(states: Sequence[_State], current: Iterable[int], character: str) -> frozenset[int]:
    entered = (states[number] for number in current)
    return _closure(states, [one.after for one in entered if one.accepts and one.accepts(character)])


def compile_glob(pattern: str) -> Callable[[str], bool]:
    """Return a case-sensitive test of whole tags; ValueError for a malformed pattern.

    The pattern becomes a nondeterministic automaton that is run on all its states at once
    (Thompson's construction): no input makes it go back.
    """
    states, literal = _automaton(pattern)
    if literal is not None:
        return literal.__eq__
    start = _closure(states, [0])

    @lru_cache(_MOST_STEPS)
    def step(current: frozenset[int], character: str) -> frozenset[int]:
        return _step(states, current, character)

    def matches(tag: str) -> bool:
        current = start
        for character in tag:
            current = step(current, character)
        return len(states) - 1 in current

    return matches


def check_glob(pattern: str) -> str | None:
    """Return the only tag that a pattern without wildcards matches; ValueError when it is malformed."""
    return _automaton(pattern)[1]


class TagRule(NamedTuple):
    """The rule of one mapping (specification section 2.5); empty and None mean that a field is not set."""

    glob: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    semver: str | None = None
    semver_prerelease: Prerelease | None = None
    sort: _Order | None = None
    latest: int | None = None
    min_tags: int | None = None
    immutable_tags: str | None = None

    @property
    def order(self) -> _Order | None:
        """How the result is sorted: a range without `sort` implies versions.

        ValueError when `latest` is set and nothing says which tags are the highest.
        """
        if self.latest and not (self.sort or self.semver):
            raise ValueError(f"latest {LATEST_NEEDS}")
        return self.sort or ("semver" if self.semver else None)

    @property
    def chooses_versions(self) -> bool:
        return self.semver is not None or self.semver_prerelease is not None


def literal_tags(rule: TagRule) -> tuple[str, ...] | None:
    """Return the tags that the rule names one by one, so that no listing is needed; else None."""
    if not rule.glob or rule.exclude or rule.chooses_versions or rule.latest:
        return None
    names = [check_glob(pattern) for pattern in dict.fromkeys(rule.glob)]
    literals = [name for name in names if name is not None]
    return _ordered(literals, rule.order) if len(literals) == len(names) else None


class Selection(NamedTuple):
    """What a rule keeps of a listing, and why each other tag was dropped.

    `shortfall` holds (kept, min_tags) when even tags that could come back were too few.
    """

    kept: tuple[str, ...]
    dropped: Mapping[str, Reason]
    shortfall: tuple[int, int] | None = None


def select(tags: Iterable[str], rule: TagRule) -> Selection:
    """Apply a rule to a listing, in the order of design.md section 5."""
    wanted, excluded = _any_of(rule.glob or ("*",)), _any_of(rule.exclude)
    referrers_are_images = any(pattern.startswith("sha256-") for pattern in rule.glob)
    dropped: dict[str, Reason] = {}
    candidates = []
    for tag in dict.fromkeys(tags):
        if not referrers_are_images and is_referrer_tag(tag):
            dropped[tag] = "referrer_tag"
        elif not wanted(tag):
            dropped[tag] = "glob"
        else:
            candidates.append(tag)
    refused = _refused(candidates, rule)
    dropped |= {tag: refused.get(tag, "exclude") for tag in candidates if tag in refused or excluded(tag)}
    kept = _ordered([tag for tag in candidates if tag not in dropped], rule.order)
    cut = () if rule.latest is None else kept[rule.latest :]
    dropped |= dict.fromkeys(cut, "latest")
    # design.md section 5, step 6: what `latest` cut comes back first, then what versions dropped.
    floor, order = rule.min_tags or 0, rule.order or "semver"
    kept = kept[: len(kept) - len(cut)]
    if len(kept) < floor:
        versions = _ordered([tag for tag in refused if not excluded(tag)], order)
        if back := (*cut, *versions)[: floor - len(kept)]:
            kept = _ordered((*kept, *back), order)
    for tag in kept:
        dropped.pop(tag, None)
    return Selection(kept, MappingProxyType(dropped), (len(kept), floor) if len(kept) < floor else None)


def _refused(tags: Iterable[str], rule: TagRule) -> dict[str, Reason]:
    """Return the tags that `semver` and `semver_prerelease` drop, and which of the two."""
    if not rule.chooses_versions:
        return {}
    from _regsync.semver import ANY, parse_range, parse_version

    allowed = parse_range(rule.semver) if rule.semver is not None else ANY
    refused: dict[str, Reason] = {}
    for tag in tags:
        version = parse_version(tag)
        if version is None or not allowed.admits(version, rule.semver_prerelease or "exclude"):
            # The rule for pre-releases is the reason where another rule would have let the tag in.
            refused[tag] = "prerelease" if version and allowed.admits(version, "include") else "semver"
    return refused


def _any_of(patterns: Sequence[str]) -> _Accepts:
    tests = [compile_glob(pattern) for pattern in patterns]
    return lambda tag: any(test(tag) for test in tests)


def _ordered(tags: Sequence[str], order: _Order | None) -> tuple[str, ...]:
    """Return tags highest first; ties of versions, and what is no version, by descending code points."""
    if order is None:
        return tuple(tags)
    by_text = sorted(tags, reverse=True)
    if order == "alpha":
        return tuple(by_text)
    from _regsync.semver import parse_version

    # The sort is stable. No version is below the empty tuple, which stands for what is none.
    return tuple(sorted(by_text, key=lambda tag: parse_version(tag) or (), reverse=True))
