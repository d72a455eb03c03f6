"""Versions as tags spell them, and the ranges that choose among them.

Owns: when a tag counts as a version, precedence, the range grammar, what a pre-release needs to be admitted. May not
know: any other module of the program. Invariant: `parse_range` returns a range, or raises ValueError with one line that
says what to write instead. Follows SemVer 2.0.0 section 11, node-semver (operators, partials), design.md section 4."""
from __future__ import annotations
import re
from itertools import takewhile
from typing import Literal, NamedTuple
__all__ = ["Prerelease", "Range", "Version", "parse_range", "parse_version"]
Prerelease = Literal["include", "exclude", "only"]
_SUFFIX = r"(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:[+_][0-9A-Za-z._+-]+)?"
_VERSION = rf"v?([0-9]+)(?:\.([0-9]+))?(?:\.([0-9]+))?{_SUFFIX}"
_PART = r"([0-9]+|[xX*])"
_COMPARATOR = rf"(==|!=|>=|<=|[=<>^~])?[ \t]*v?{_PART}(?:\.{_PART})?(?:\.{_PART})?{_SUFFIX}"
_LONGEST = 1024  # of a tag (128 at most) or a range; int() refuses far longer numbers in its own way

class Version(NamedTuple):
    """What precedence sees of a version; `stage` 0: a pre-release, `identifiers` (0, number, "") or (1, 0, word)."""
    release: tuple[int, int, int]
    stage: int = 1
    identifiers: tuple[tuple[int, int, str], ...] = ()
    @property
    def is_prerelease(self) -> bool: return not self.stage
def parse_version(tag: str) -> Version | None:
    """Return the version that a tag spells, or None when it spells none."""
    match = re.fullmatch(_VERSION, tag) if len(tag) <= _LONGEST else None
    return _version([int(part or 0) for part in match.groups()[:3]], match[4]) if match else None
def _version(numbers: list[int], prerelease: str | None = None) -> Version:
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    parts = prerelease.split(".") if prerelease else []
    identifiers = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)
    return Version((major, minor, patch), 0 if parts else 1, identifiers)
_LOWEST, _HIGHEST = Version((0, 0, 0), 0), Version((10**_LONGEST, 0, 0))  # below and above what tags can spell
# From where, to below what, whether it takes what lies between or all but that, the M.m.p of a pre-release in it.
_Comparator = tuple[Version, Version, bool, tuple[int, int, int] | None]

class Range(NamedTuple):
    """What `||` and `,` joined: alternatives of conjunctions."""
    sets: tuple[tuple[_Comparator, ...], ...]
    def admits(self, version: Version, prerelease: Prerelease = "exclude") -> bool:
        """Say whether the range, under the rule for pre-releases, takes a version."""
        is_wanted = version.is_prerelease or prerelease != "only"
        return is_wanted and any(_all_admit(comparators, version, prerelease) for comparators in self.sets)
def _all_admit(comparators: tuple[_Comparator, ...], version: Version, prerelease: Prerelease) -> bool:
    # In full where one of the same M.m.p is named; elsewhere by M.m.p (`include`, `only`), or refused (`exclude`).
    # `!=1.0.0-rc.1` says what is unwanted: it invites no other pre-release of 1.0.0.
    in_full = not version.is_prerelease or any(named == version.release and inside for _, _, inside, named
        in comparators)
    if prerelease == "exclude" and not in_full: return False
    release = version if in_full else Version(version.release)
    return all((low <= (version if named == version.release else release) < high) is inside for low, high, inside, named
        in comparators)
def parse_range(text: str) -> Range:
    """Parse a range; ValueError says what is wrong and what to write instead."""
    if len(text) > _LONGEST: raise ValueError(f"a range of more than {_LONGEST} characters")
    sets = [[_comparator(word.strip(" \t")) for word in part.split(",")] for part in text.split("||")]
    return Range(tuple(map(tuple, sets)))
def _comparator(word: str) -> _Comparator:
    match = re.fullmatch(_COMPARATOR, word)
    if match is None:
        if hyphen := re.fullmatch(r"([^ \t]+)[ \t]+-[ \t]+([^ \t]+)", word):
            raise ValueError(f"hyphen ranges are not supported: write '>={hyphen[1]},<={hyphen[2]}'")
        forms = "write '*', 1.x, 1.2 or 1.2.3, if need be after = == != > >= < <= ^ ~"
        raise ValueError(f"{word!r} is no comparator: {forms}; join comparators with a comma")
    operator, *parts, prerelease = match.groups()
    # As in node-semver, nothing counts after the first part that is open.
    numbers = [int(part) for part in takewhile(lambda part: part and part not in "xX*", parts)]
    if prerelease is not None and len(numbers) < 3:
        raise ValueError(f"{word!r} names a pre-release of a partial version: write all three numbers")
    version = _version(numbers, prerelease)
    # What is written spans low..high: 1.2 all that begin so, 1.2.3 itself and nothing else that a tag can spell.
    low, kept = (version if numbers else _LOWEST), numbers
    if operator == "^":
        # The leftmost number that is not zero stays: 0.2.x for ^0.2.3, 0.0.x for ^0.0.
        kept = numbers[: next((i for i, number in enumerate(numbers, 1) if number), 3)]
    elif operator == "~": kept = numbers[:2]
    high = _version([*kept[:-1], kept[-1] + 1]) if kept else _HIGHEST
    if operator not in ("^", "~") and len(numbers) == 3:
        high = version._replace(identifiers=(*version.identifiers, (-1, 0, "")))
    spans = {">": (high, _HIGHEST), ">=": (low, _HIGHEST), "<": (_LOWEST, low), "<=": (_LOWEST, high)}
    named = version.release if version.is_prerelease else None
    return *spans.get(operator, (low, high)), operator != "!=", named
