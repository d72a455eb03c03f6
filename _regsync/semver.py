"""Versions and ranges: parsing tags as versions, and testing whether a range admits a version.

Owns: which tags are versions, precedence, the grammar of ranges, the rule for pre-releases.
May not know: tags that are not versions, listings.
Invariants: every tag and every range is parsed in bounded time. An error message about a range is
one line with a remedy.
Follows: docs/design.md section 4, SemVer 2.0.0 section 11, node-semver (operators, partials).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

# The rule for pre-releases (docs/design.md section 4).
Prerelease = Literal["include", "exclude", "only"]

# Characters of a version or a range. Tags have 128 at most. For much longer numbers int() would
# raise its own error.
_MAX_LENGTH = 1024

_SUFFIX = r"(?:-(?P<prerelease>[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:[+_][0-9A-Za-z._+-]+)?"

_VERSION = rf"v?(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?(?:\.(?P<patch>[0-9]+))?{_SUFFIX}"

_PART = r"[0-9]+|[xX*]"
_COMPARATOR = (
    r"(?P<operator>==|!=|>=|<=|[=<>^~])?[ \t]*"
    rf"v?(?P<major>{_PART})(?:\.(?P<minor>{_PART}))?(?:\.(?P<patch>{_PART}))?{_SUFFIX}"
)
_HYPHEN_RANGE = r"(?P<low>[^ \t]+)[ \t]+-[ \t]+(?P<high>[^ \t]+)"

_Release = tuple[int, int, int]  # major, minor, patch


class Version(NamedTuple):
    """The parts of a version that determine its precedence. Tuple comparison orders versions.

    A listing may have a million versions, so the record is kept small.
    """

    release: _Release
    is_release: bool = True  # False for a pre-release, which comes before its release
    identifiers: str = ""  # of a pre-release: the concatenated results of `_sort_key`

    @property
    def is_prerelease(self) -> bool:
        return not self.is_release


def parse_version(tag: str) -> Version | None:
    """Parse a tag as a version. Missing numbers are 0. Returns None if the tag is not a version."""
    if len(tag) > _MAX_LENGTH:
        return None
    match = re.fullmatch(_VERSION, tag)
    if match is None:
        return None
    numbers = [int(number or 0) for number in match.group("major", "minor", "patch")]
    return _make_version(numbers, match["prerelease"])


def _make_version(numbers: Sequence[int], prerelease: str | None = None) -> Version:
    """Return the version with up to three numbers. Missing numbers are 0."""
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    release = (major, minor, patch)
    if prerelease is None:
        return Version(release)
    identifiers = "".join(_sort_key(identifier) for identifier in prerelease.split("."))
    return Version(release, is_release=False, identifiers=identifiers)


def _sort_key(identifier: str) -> str:
    """Return a sort key for an identifier of a pre-release.

    The concatenated keys of two pre-releases compare as SemVer compares the pre-releases. Numbers
    sort below words. The key of a number is `\\1`, the count of its digits, and the digits. The key
    of a word is `\\2`, the word, and `\\0`, so that a word sorts below longer words that begin with
    it.
    """
    if not identifier.isdigit():
        return f"\2{identifier}\0"
    digits = identifier.lstrip("0")
    return f"\1{len(digits):04}{digits}"


# Below and above every version that a tag can represent.
_LOWEST = Version((0, 0, 0), is_release=False)
_HIGHEST = Version((10**_MAX_LENGTH, 0, 0))


class Comparator(NamedTuple):
    """One condition of a range, such as `>=1.2`, as a half-open interval of versions."""

    low: Version  # included
    high: Version  # not included
    is_negated: bool  # True for `!=`: versions outside the interval are admitted
    # The release whose pre-release the comparator mentions, if any: 1.2.0 for `>=1.2.0-rc.1`.
    prerelease_of: _Release | None

    def admits(self, version: Version) -> bool:
        is_between = self.low <= version < self.high
        return not is_between if self.is_negated else is_between


# The alternatives of a range, which are joined by `||`. An alternative is a list of comparators,
# which are joined by `,`. A version must satisfy all comparators of at least one alternative.
Range = tuple[tuple[Comparator, ...], ...]


def admits(range_: Range, version: Version, prerelease: Prerelease = "exclude") -> bool:
    """Report whether a version is in a range under a rule for pre-releases."""
    if prerelease == "only" and not version.is_prerelease:
        return False
    return any(_all_admit(comparators, version, prerelease) for comparators in range_)


def _all_admit(comparators: Sequence[Comparator], version: Version, prerelease: Prerelease) -> bool:
    """Report whether a version satisfies all comparators of one alternative, as in node-semver.

    A comparator that mentions a pre-release, such as `>=1.2.0-rc.1` (but not `!=1.2.0-rc.1`),
    permits all pre-releases of that release. The rule `exclude` refuses all other pre-releases.
    """
    permitted_releases = [
        comparator.prerelease_of for comparator in comparators if not comparator.is_negated
    ]
    if not version.is_prerelease or version.release in permitted_releases:
        return all(comparator.admits(version) for comparator in comparators)
    if prerelease == "exclude":
        return False

    # By the other rules the release is compared in place of its pre-release: 1.3.0 for 1.3.0-rc.1.
    # But `!=1.2.0-rc.1` excludes 1.2.0-rc.1, and not 1.2.0-rc.2.
    release = Version(version.release)
    return all(
        comparator.admits(version if comparator.prerelease_of == version.release else release)
        for comparator in comparators
    )


def parse_range(text: str) -> Range:
    """Parse a range. Raises ValueError if it is invalid."""
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"a range is limited to {_MAX_LENGTH} characters")
    return tuple(
        tuple(_parse_comparator(word.strip(" \t")) for word in alternative.split(","))
        for alternative in text.split("||")
    )


def _parse_comparator(word: str) -> Comparator:
    """Parse one comparator, such as `>=1.2`. Raises ValueError if it is invalid."""
    match = re.fullmatch(_COMPARATOR, word)
    if match is None:
        raise ValueError(_explain_invalid(word))
    # As in node-semver, parts after the first missing part, `x` or `*` are ignored.
    parts = takewhile(
        lambda part: part and part not in "xX*", match.group("major", "minor", "patch")
    )
    numbers = [int(part) for part in parts]
    prerelease = match["prerelease"]
    if prerelease is not None and len(numbers) < 3:
        raise ValueError(
            f"{word!r} names a pre-release of a partial version: write all three numbers"
        )

    version = _make_version(numbers, prerelease)
    operator = match["operator"]
    low, high = _bounds(version, numbers, operator)
    prerelease_of = version.release if version.is_prerelease else None
    return Comparator(low, high, is_negated=operator == "!=", prerelease_of=prerelease_of)


def _explain_invalid(word: str) -> str:
    """Return the error message for a text that is not a comparator."""
    hyphen = re.fullmatch(_HYPHEN_RANGE, word)
    if hyphen is not None:
        instead = f">={hyphen['low']},<={hyphen['high']}"
        return f"hyphen ranges are not supported: write '{instead}'"
    forms = "write '*', 1.x, 1.2 or 1.2.3, optionally after = == != > >= < <= ^ ~"
    return f"{word!r} is not a comparator: {forms}; join comparators with a comma"


def _bounds(version: Version, numbers: list[int], operator: str | None) -> tuple[Version, Version]:
    """Return the interval of a comparator. `numbers` are the numbers in the text of `version`."""
    start = version if numbers else _LOWEST
    end = _upper_bound(version, numbers, operator)
    match operator:
        case ">":
            return end, _HIGHEST
        case ">=":
            return start, _HIGHEST
        case "<":
            return _LOWEST, start
        case "<=":
            return _LOWEST, end
    return start, end  # also for `!=`, which admits the versions outside


def _upper_bound(version: Version, numbers: list[int], operator: str | None) -> Version:
    """Return the exclusive upper bound of the versions that `1.2`, `^1.2` or `~1.2` stands for.

    `1.2` stands for the versions from 1.2.0 to below 1.3.0, `^1.2.3` for the versions from 1.2.3 to
    below 2.0.0, and `~1.2.3` for the versions from 1.2.3 to below 1.3.0. `1.2.3` stands only for
    itself.
    """
    if len(numbers) == 3 and operator not in ("^", "~"):
        # The interval contains only `version`, because no tag represents a version between it and
        # this bound.
        return version._replace(identifiers=version.identifiers + "\0")

    fixed_numbers = numbers  # the leading numbers that all these versions have in common
    if operator == "^":
        # The numbers up to the first number that is not zero: ^0.2.3 means 0.2.x, ^0.0 means 0.0.x.
        leading_zeros = len([*takewhile(lambda number: number == 0, numbers)])
        fixed_numbers = numbers[: leading_zeros + 1]
    elif operator == "~":
        fixed_numbers = numbers[:2]
    if not fixed_numbers:  # `*`
        return _HIGHEST
    *first, last = fixed_numbers
    return _make_version([*first, last + 1])
