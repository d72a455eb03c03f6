"""Versions and ranges of them: what a tag means as a version, and which versions a range admits.

Owns: when a tag is a version, precedence, the grammar of ranges, the rule for pre-releases.
May not know: tags that are no versions, listings.
Invariants: whatever a tag or a range spells, it is read in bounded time; what is wrong with a range
is one line that says what to write instead.
Follows: docs/design.md section 4, SemVer 2.0.0 section 11, node-semver (operators, partials).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

Prerelease = Literal["include", "exclude", "only"]

# Characters of a version or a range; a tag has 128 at most. int() refuses far longer numbers in
# its own words.
_MAX_LENGTH = 1024

_SUFFIX = r"(?:-(?P<prerelease>[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:[+_][0-9A-Za-z._+-]+)?"

_VERSION = rf"v?([0-9]+)(?:\.([0-9]+))?(?:\.([0-9]+))?{_SUFFIX}"

_PART = r"([0-9]+|[xX*])"
_COMPARATOR = (
    rf"(?P<operator>==|!=|>=|<=|[=<>^~])?[ \t]*v?{_PART}(?:\.{_PART})?(?:\.{_PART})?{_SUFFIX}"
)
_HYPHEN_RANGE = r"(?P<low>[^ \t]+)[ \t]+-[ \t]+(?P<high>[^ \t]+)"

_Release = tuple[int, int, int]


class Version(NamedTuple):
    """What precedence sees of a version: versions are compared field by field.

    A listing may name a million of them, so they are kept small.
    """

    release: _Release
    stage: int = 1  # 0: a pre-release, which comes before its release
    identifiers: str = ""  # of a pre-release, as `_sort_key` writes them

    @property
    def is_prerelease(self) -> bool:
        return self.stage == 0


def parse_version(tag: str) -> Version | None:
    """Return the version that a tag is, None where it is none; missing numbers are 0."""
    if len(tag) > _MAX_LENGTH:
        return None
    match = re.fullmatch(_VERSION, tag)
    if match is None:
        return None
    numbers = [int(number or 0) for number in match.group(1, 2, 3)]
    return _version(numbers, match["prerelease"])


def _version(numbers: Sequence[int], prerelease: str | None = None) -> Version:
    """Return the version of up to three numbers; missing ones are 0."""
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    release = (major, minor, patch)
    if prerelease is None:
        return Version(release)
    identifiers = "".join(_sort_key(identifier) for identifier in prerelease.split("."))
    return Version(release, 0, identifiers)


def _sort_key(identifier: str) -> str:
    """Return a text that sorts as SemVer sorts identifiers of a pre-release.

    Numbers come before words. A number becomes `\\1`, the count of its digits, and the digits. A
    word becomes `\\2`, the word, and `\\0`, so that it sorts below longer words that begin with it.
    """
    if not identifier.isdigit():
        return f"\2{identifier}\0"
    digits = identifier.lstrip("0")
    return f"\1{len(digits):04}{digits}"


# Below and above what tags can spell.
_LOWEST = Version((0, 0, 0), 0)
_HIGHEST = Version((10**_MAX_LENGTH, 0, 0))


class Comparator(NamedTuple):
    """One condition of a range: the version is from `low` to below `high`, or, negated, is not."""

    low: Version
    high: Version
    is_negated: bool  # for `!=`
    # Where it names a pre-release, the release of that: 1.2.0 for `>=1.2.0-rc.1`.
    prerelease_of: _Release | None

    def admits(self, version: Version) -> bool:
        is_between = self.low <= version < self.high
        return not is_between if self.is_negated else is_between


# Alternatives, which `||` joined. Each has comparators, which `,` joined, and all have to hold.
Range = tuple[tuple[Comparator, ...], ...]


def admits(range_: Range, version: Version, prerelease: Prerelease = "exclude") -> bool:
    """Return whether a range, under the rule for pre-releases, takes a version."""
    if prerelease == "only" and not version.is_prerelease:
        return False
    return any(_all_admit(comparators, version, prerelease) for comparators in range_)


def _all_admit(comparators: Sequence[Comparator], version: Version, prerelease: Prerelease) -> bool:
    """Return whether a version satisfies all comparators of one alternative, as in node-semver.

    `>=1.2.0-rc.1` opens the range to all pre-releases of 1.2.0, which are compared as they are. Other
    pre-releases are refused under `exclude`. Under the other two rules their release is compared in
    their place: 1.3.0 for 1.3.0-rc.1.
    """
    opened_releases = [
        comparator.prerelease_of for comparator in comparators if not comparator.is_negated
    ]
    counts_as = version
    is_closed_to_it = version.is_prerelease and version.release not in opened_releases
    if is_closed_to_it:
        if prerelease == "exclude":
            return False
        counts_as = Version(version.release)

    for comparator in comparators:
        # `!=1.2.0-rc.1` opens nothing, but excludes that pre-release and no other of 1.2.0.
        names_this_release = comparator.prerelease_of == version.release
        if not comparator.admits(version if names_this_release else counts_as):
            return False
    return True


def parse_range(text: str) -> Range:
    """Parse a range; ValueError says what is wrong and what to write instead."""
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"a range is limited to {_MAX_LENGTH} characters")
    return tuple(
        tuple(_comparator(word.strip(" \t")) for word in alternative.split(","))
        for alternative in text.split("||")
    )


def _comparator(word: str) -> Comparator:
    """Read one comparator, such as `>=1.2`; ValueError says what is wrong with it."""
    match = re.fullmatch(_COMPARATOR, word)
    if match is None:
        raise ValueError(_trouble_with(word))
    # As in node-semver, no part counts after the first one that is missing, `x` or `*`.
    parts = takewhile(lambda part: part and part not in "xX*", match.group(2, 3, 4))
    numbers = [int(part) for part in parts]
    prerelease = match["prerelease"]
    if prerelease is not None and len(numbers) < 3:
        raise ValueError(
            f"{word!r} names a pre-release of a partial version: write all three numbers"
        )

    # What is written spells versions from `start` to below `end`: all of 1.2.x for `1.2`.
    version = _version(numbers, prerelease)
    operator = match["operator"]
    start = version if numbers else _LOWEST
    end = _end_of_span(version, numbers, operator)
    bounds = {
        ">": (end, _HIGHEST),
        ">=": (start, _HIGHEST),
        "<": (_LOWEST, start),
        "<=": (_LOWEST, end),
    }
    low, high = bounds.get(operator, (start, end))
    prerelease_of = version.release if version.is_prerelease else None
    return Comparator(low, high, operator == "!=", prerelease_of)


def _trouble_with(word: str) -> str:
    """Return what to say of a word that is no comparator."""
    hyphen = re.fullmatch(_HYPHEN_RANGE, word)
    if hyphen is not None:
        instead = f">={hyphen['low']},<={hyphen['high']}"
        return f"hyphen ranges are not supported: write '{instead}'"
    forms = "write '*', 1.x, 1.2 or 1.2.3, optionally after = == != > >= < <= ^ ~"
    return f"{word!r} is not a comparator: {forms}; join comparators with a comma"


def _end_of_span(version: Version, numbers: list[int], operator: str | None) -> Version:
    """Return the lowest version above all versions that a comparator spells.

    `1.2` spells all that begin with 1.2, `^1.2.3` all from 1.2.3 and below 2, `~1.2.3` all from
    1.2.3 and below 1.3; `1.2.3` spells itself alone.
    """
    fixed_numbers = numbers  # those that all versions which it spells have in common
    if operator == "^":
        # The leftmost number that is not zero stays: 0.2.x for ^0.2.3, 0.0.x for ^0.0.
        leading_zeros = len([*takewhile(lambda number: number == 0, numbers)])
        fixed_numbers = numbers[: leading_zeros + 1]
    elif operator == "~":
        fixed_numbers = numbers[:2]
    elif len(numbers) == 3:
        # No tag spells a version between this one and the one that is returned.
        return version._replace(identifiers=version.identifiers + "\0")

    if not fixed_numbers:  # `*`
        return _HIGHEST
    *first, last = fixed_numbers
    return _version([*first, last + 1])
