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

__all__ = ["Reason", "Selection", "TagRule", "check_glob", "compile_glob", "literal_tags", "select"]

Reason = Literal["glob", "semver", "prerelease", "exclude", "latest", "referrer_tag"]
_Order = Literal["semver", "alpha"]

_TOKEN = r"\\.|\[(?P<set>(?:\\.|[^\]\\])*)\]|(?P<unfinished>[\[\\])|(?P<mark>[*?{},])|."
_SET_MEMBER = r"(\\.|.)(?:-(\\.|.))?"
_Accepts = Callable[[str], bool]
# What is written and its test of one character; marks have none: `*`, `{`, `,` and `}`.
_Token = tuple[str, "_Accepts | None"]


# A configuration repeats a few patterns in many mappings.
@lru_cache(256)
def _tokens(pattern: str) -> tuple[tuple[_Token, ...], str | None]:
    """Return a pattern's tokens, and the only tag that it matches when it has no wildcards."""
    if not pattern:
        raise ValueError("an empty pattern matches nothing: remove it, or write '*' for every tag")
    tokens: list[_Token] = []
    literals: list[str] = []
    depth = 0
    for match in re.finditer(_TOKEN, pattern, re.DOTALL):
        kind, text = match.lastgroup, match[0][-1]
        if kind == "unfinished":
            trouble = "'[' without ']'" if text == "[" else "a backslash at its end"
            raise ValueError(f"{pattern!r} has {trouble}: write \\{text} for the character itself")
        if kind == "set":
            tokens.append((text, _character_set(pattern, match["set"])))
        elif kind == "mark" and (text != "," or depth):
            depth += (text == "{") - (text == "}")
            if depth < 0:
                raise ValueError(f"{pattern!r} has a '}}' without '{{'")
            # Every character is true.
            tokens.append((text, bool if text == "?" else None))
        else:
            tokens.append((text, text.__eq__))
            literals.append(text)
    if depth:
        raise ValueError(f"{pattern!r} has a '{{' without '}}'")
    literal = "".join(literals) if len(literals) == len(tokens) else None
    # It will stand in a request as it is (design.md section 5), so it has to be a tag.
    if literal is not None and not is_tag(literal):
        raise ValueError(f"{literal!r} can never be a tag: letters, digits and . _ - only, 128 at most")
    return tuple(tokens), literal


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


def _matches(tokens: Iterable[_Token], tag: str) -> bool:
    """Follow all ways to match at once, as the places in the tag that they have reached: none goes back."""
    places = {0}
    # For each open brace: the places before it, and those after the alternatives that are done.
    braces: list[tuple[set[int], set[int]]] = []
    for mark, accepts in tokens:
        if accepts is not None:
            places = {place + 1 for place in places if place < len(tag) and accepts(tag[place])}
        elif mark == "*":
            places = set(range(min(places, default=len(tag) + 1), len(tag) + 1))
        elif mark == "{":
            braces.append((places, set()))
        elif mark == ",":
            braces[-1][1].update(places)
            places = braces[-1][0]
        else:
            places = places | braces.pop()[1]
    return len(tag) in places


def compile_glob(pattern: str) -> Callable[[str], bool]:
    """Return a case-sensitive test of whole tags; ValueError for a malformed pattern."""
    tokens, literal = _tokens(pattern)
    return literal.__eq__ if literal is not None else lambda tag: _matches(tokens, tag)


def check_glob(pattern: str) -> str | None:
    """Return the only tag that a pattern without wildcards matches; ValueError when it is malformed."""
    return _tokens(pattern)[1]


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
        """How the result is sorted; ValueError when `latest` is set and nothing says it."""
        if self.latest and not (self.sort or self.semver):
            raise ValueError("latest needs `sort` or `semver`, to say which tags are the highest")
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
    """What a rule keeps, why it drops the others, and (kept, min_tags) where the floor was not reached."""

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
    from _regsync.semver import parse_range, parse_version

    allowed = parse_range(rule.semver or "*")
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
