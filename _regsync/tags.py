"""Which tags of a listing are copied: globs, versions, exclusion, order, limits.

Owns: the glob language, the tag rule, the selection with a reason for every tag that it drops. May not
know: where a listing comes from, configuration files. Invariant: the selection is a function of the
listing and the rule alone, and matching is linear in tag times pattern, whatever the pattern.
Follows design.md section 4 (globs) and section 5 (the order of the steps).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from _regsync.oci import is_referrer_tag, is_tag
from _regsync.semver import ANY, Prerelease, Range, parse_range, parse_version

__all__ = [
    "LATEST_NEEDS_ORDER",
    "PatternError",
    "Reason",
    "Selection",
    "TagRule",
    "check_glob",
    "compile_glob",
    "literal_tags",
    "select",
]

# What a rule with `latest` alone is told, here and by `config`.
LATEST_NEEDS_ORDER = "latest needs `sort`, or `semver`, to say which tags are the highest"

Reason = Literal["glob", "semver", "prerelease", "exclude", "latest", "referrer_tag"]

# Thirty times what a tag can hold, for alternatives in braces; a longer one is a mistake.
_LONGEST_PATTERN = 4096
# The lazily built automaton starts afresh at this size: memory stays bounded, answers stay the same.
_MOST_TRANSITIONS = 4096


class PatternError(ValueError):
    """A glob that does not follow the grammar; the message says the remedy."""


_Accepts = Callable[[str], bool]
# A test of one character (a run and a brace have none) and the states after it.
_State = tuple["_Accepts | None", tuple[int, ...]]
# A literal character; a test of one character; or one of the marks `*`, `{`, `,` and `}`.
_Token = tuple[Literal["literal", "test", "mark"], str, "_Accepts | None"]

_TOKEN = re.compile(
    r"\\(?P<escaped>.)|\[(?P<not>!?)(?P<set>(?:\\.|[^\]\\])*)\]|(?P<plain>[^\[\\])", re.DOTALL
)
_SET_MEMBER = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)


def _any(character: str) -> bool:
    return True


def _tokens(pattern: str) -> Iterator[_Token]:
    if not pattern:
        raise PatternError("an empty pattern matches nothing: remove it, or write '*' for every tag")
    if len(pattern) > _LONGEST_PATTERN:
        raise PatternError(f"a pattern of more than {_LONGEST_PATTERN} characters: write several")
    depth = at = 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        if match is None:
            trouble = "'[' without ']'" if pattern[at] == "[" else "a backslash at its end"
            raise PatternError(f"{pattern!r} has {trouble}: write \\{pattern[at]} for the character itself")
        at = match.end()
        character = match["plain"]
        if match["set"] is not None:
            yield ("test", "", _character_set(pattern, match["set"], bool(match["not"])))
        elif character == "?":
            yield ("test", "", _any)
        elif character in ("*", "{", "}") or (character == "," and depth):
            depth += (character == "{") - (character == "}")
            if depth < 0:
                raise PatternError(f"{pattern!r} has a '}}' without '{{'")
            yield ("mark", character, None)
        else:
            yield ("literal", character or match["escaped"], None)
    if depth:
        raise PatternError(f"{pattern!r} has a '{{' without '}}'")


def _character_set(pattern: str, members: str, negated: bool) -> _Accepts:
    if not members:
        raise PatternError(f"{pattern!r} has an empty set of characters")
    if members[0] == "^" and not negated:
        raise PatternError(f"{pattern!r}: a set is negated by '!', as in [!a-z]")
    ranges = [(low[-1], (high or low)[-1]) for low, high in _SET_MEMBER.findall(members)]
    for low, high in ranges:
        if low > high:
            raise PatternError(f"{pattern!r}: the range {low}-{high} is the wrong way round")
    return lambda character: any(low <= character <= high for low, high in ranges) is not negated


def _automaton(pattern: str) -> tuple[_State, ...]:
    """Return the states: the first one starts, the last one accepts."""
    states: list[_State] = []
    # For each open brace: its own state, where its alternatives begin, where all but the last end.
    braces: list[tuple[int, list[int], list[int]]] = []
    for kind, text, accepts in _tokens(pattern):
        here = len(states)
        if kind == "literal":
            states.append((text.__eq__, (here + 1,)))
        elif kind == "test":
            states.append((accepts, (here + 1,)))
        elif text == "*":
            states += ((None, (here + 1, here + 2)), (_any, (here,)))
        elif text == "{":
            states.append((None, ()))
            braces.append((here, [here + 1], []))
        elif text == ",":
            states.append((None, ()))
            braces[-1][1].append(here + 1)
            braces[-1][2].append(here)
        else:
            opened, starts, ends = braces.pop()
            states[opened] = (None, tuple(starts))
            for end in ends:
                states[end] = (None, (here,))
    states.append((None, ()))
    return tuple(states)


def compile_glob(pattern: str) -> Callable[[str], bool]:
    """Return a case-sensitive test of whole tags; PatternError for a malformed pattern.

    The pattern becomes a nondeterministic automaton that is run on all its states at once
    (Thompson's construction): no input makes it go back.
    """
    literal = check_glob(pattern)
    if literal is not None:
        return literal.__eq__
    states = _automaton(pattern)
    accepting = len(states) - 1
    start = _closure(states, (0,))
    known: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(tag: str) -> bool:
        current = start
        for character in tag:
            following = known.get((current, character))
            if following is None:
                following = _after(states, current, character)
                if len(known) >= _MOST_TRANSITIONS:
                    known.clear()
                known[current, character] = following
            current = following
            if not current:
                return False
        return accepting in current

    return matches


def _closure(states: Sequence[_State], numbers: Iterable[int]) -> frozenset[int]:
    """Return all states reached without input."""
    reached: set[int] = set()
    waiting = list(numbers)
    while waiting:
        number = waiting.pop()
        if number not in reached:
            reached.add(number)
            accepts, following = states[number]
            if accepts is None:
                waiting.extend(following)
    return frozenset(reached)


def _after(states: Sequence[_State], current: Iterable[int], character: str) -> frozenset[int]:
    """Return all states reached from the current ones by one character."""
    entered = (states[number] for number in current)
    return _closure(states, [n for accepts, to in entered if accepts and accepts(character) for n in to])


def check_glob(pattern: str) -> str | None:
    """Return the only tag that a pattern without wildcards matches; PatternError when it is malformed."""
    tokens = tuple(_tokens(pattern))
    if not all(token[0] == "literal" for token in tokens):
        return None
    literal = "".join(token[1] for token in tokens)
    # It will stand in a request as it is (design.md section 5), so it has to be a tag.
    if not is_tag(literal):
        raise PatternError(f"{literal!r} can never be a tag: letters, digits and . _ - only, 128 at most")
    return literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRule:
    """The rule of one mapping (specification section 2.5); empty and None mean that a field is not set.

    ValueError when `latest` is set and nothing says which tags are the highest.
    """

    glob: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    semver: str | None = None
    semver_prerelease: Prerelease | None = None
    sort: Literal["semver", "alpha"] | None = None
    latest: int | None = None
    min_tags: int | None = None
    immutable_tags: str | None = None

    def __post_init__(self) -> None:
        if self.latest is not None and self.order is None:
            raise ValueError(LATEST_NEEDS_ORDER)

    @property
    def order(self) -> Literal["semver", "alpha"] | None:
        """How the result is sorted: a range without `sort` implies versions."""
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


@dataclass(frozen=True, slots=True)
class Selection:
    """What a rule keeps of a listing, and why each other tag was dropped.

    `shortfall` holds (kept, min_tags) when even tags that could come back were too few.
    """

    kept: tuple[str, ...]
    dropped: Mapping[str, Reason]
    shortfall: tuple[int, int] | None = None


def select(tags: Iterable[str], rule: TagRule) -> Selection:
    """Apply a rule to a listing, in the order of design.md section 5."""
    dropped: dict[str, Reason] = {}
    excluded = _any_of(rule.exclude)
    kept = _ordered(_narrow(tags, rule, excluded, dropped), rule.order)
    versions = [tag for tag in dropped if dropped[tag] in ("semver", "prerelease") and not excluded(tag)]
    kept, cut = kept[: rule.latest], kept[len(kept) if rule.latest is None else rule.latest :]
    dropped.update(dict.fromkeys(cut, "latest"))
    floor = rule.min_tags or 0
    if len(kept) < floor:
        # design.md section 5, step 6: what `latest` cut comes back first, then what versions dropped.
        order = rule.order or "semver"
        back = [*cut, *_ordered(versions, order)][: floor - len(kept)]
        returned = frozenset(back)
        dropped = {tag: reason for tag, reason in dropped.items() if tag not in returned}
        kept = _ordered([*kept, *back], order) if back else kept
    return Selection(kept, MappingProxyType(dropped), (len(kept), floor) if len(kept) < floor else None)


def _narrow(tags: Iterable[str], rule: TagRule, excluded: _Accepts, dropped: dict[str, Reason]) -> list[str]:
    """Do the steps that judge each tag alone, noting the reason of each tag that falls."""
    wanted = _any_of(rule.glob) if rule.glob else _any
    allowed = parse_range(rule.semver) if rule.semver is not None else ANY
    prerelease = rule.semver_prerelease or "exclude"
    referrers_are_images = any(pattern.startswith("sha256-") for pattern in rule.glob)
    kept = []
    for tag in dict.fromkeys(tags):
        if not referrers_are_images and is_referrer_tag(tag):
            dropped[tag] = "referrer_tag"
        elif not wanted(tag):
            dropped[tag] = "glob"
        elif rule.chooses_versions and (reason := _refusal(tag, allowed, prerelease)):
            dropped[tag] = reason
        elif excluded(tag):
            dropped[tag] = "exclude"
        else:
            kept.append(tag)
    return kept


def _refusal(tag: str, allowed: Range, prerelease: Prerelease) -> Reason | None:
    version = parse_version(tag)
    if version is None:
        return "semver"
    if allowed.admits(version, prerelease):
        return None
    # The rule for pre-releases is the reason where another rule would have let the tag in.
    return "prerelease" if allowed.admits(version, "include") else "semver"


def _any_of(patterns: Sequence[str]) -> _Accepts:
    tests = [compile_glob(pattern) for pattern in patterns]
    return lambda tag: any(test(tag) for test in tests)


def _ordered(tags: Sequence[str], order: Literal["semver", "alpha"] | None) -> tuple[str, ...]:
    """Return tags highest first; ties of versions, and what is no version, by descending code points."""
    if order is None:
        return tuple(tags)
    by_text = sorted(tags, reverse=True)
    if order == "alpha":
        return tuple(by_text)
    versions = {tag: parse_version(tag) for tag in by_text}
    numbered = [(version, tag) for tag, version in versions.items() if version is not None]
    return (
        *(tag for _, tag in sorted(numbered, reverse=True)),
        *(tag for tag in by_text if versions[tag] is None),
    )
