"""."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Literal, NamedTuple

Prerelease = Literal["include", "exclude", "only"]


_SUFFIX = r"(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:[+_][0-9A-Za-z._+-]+)?"


_VERSION = rf"v?([0-9]+)(?:\.([0-9]+))?(?:\.([0-9]+))?{_SUFFIX}"


_PART = r"([0-9]+|[xX*])"


_COMPARATOR = rf"(==|!=|>=|<=|[=<>^~])?[ \t]*v?{_PART}(?:\.{_PART})?(?:\.{_PART})?{_SUFFIX}"


_LONGEST = (
    1024  # of a tag (128 at most) or a range; int() refuses far longer numbers in its own way
)


class Version(NamedTuple):
    """What precedence sees of a version; `stage` 0: a pre-release. A listing may name a million."""

    release: tuple[int, int, int]
    stage: int = 1
    identifiers: str = (
        ""  # as text of that order: of each one 1, how many digits, these; or 2, the word, 0
    )

    @property
    def is_prerelease(self) -> bool:
        return not self.stage


def parse_version(tag: str) -> Version | None:
    match = re.fullmatch(_VERSION, tag) if len(tag) <= _LONGEST else None
    return _version([int(part or 0) for part in match.groups()[:3]], match[4]) if match else None


def _version(numbers: list[int], prerelease: str | None = None) -> Version:
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    parts = prerelease.split(".") if prerelease else []
    keys = (
        f"\1{len(part.lstrip('0')):04}{part.lstrip('0')}" if part.isdigit() else f"\2{part}\0"
        for part in parts
    )
    return Version((major, minor, patch), 0 if parts else 1, "".join(keys))


# below and above what tags can spell
_LOWEST = Version((0, 0, 0), 0)


_HIGHEST = Version((10**_LONGEST, 0, 0))


# From where, to below what, whether it takes what lies between or all but that, the M.m.p of a
# pre-release in it.
_Comparator = tuple[Version, Version, bool, tuple[int, int, int] | None]


_Range = tuple[
    tuple[_Comparator, ...], ...
]  # what `||` and `,` joined: alternatives of conjunctions


def admits(versions: _Range, version: Version, prerelease: Prerelease = "exclude") -> bool:
    """Say whether a range, under the rule for pre-releases, takes a version."""
    is_wanted = version.is_prerelease or prerelease != "only"
    return is_wanted and any(
        _all_admit(comparators, version, prerelease) for comparators in versions
    )


def _all_admit(
    comparators: tuple[_Comparator, ...], version: Version, prerelease: Prerelease
) -> bool:
    # In full where one of the same M.m.p is named; elsewhere by M.m.p (`include`, `only`), or
    # refused (`exclude`). `!=1.0.0-rc.1` says what is unwanted: it invites no other pre-release of
    # 1.0.0.
    in_full = not version.is_prerelease or any(
        named == version.release and inside for _, _, inside, named in comparators
    )
    if prerelease == "exclude" and not in_full:
        return False
    release = version if in_full else Version(version.release)
    return all(
        (low <= (version if named == version.release else release) < high) is inside
        for low, high, inside, named in comparators
    )


def parse_range(text: str) -> _Range:
    """Parse a range; ValueError says what is wrong and what to write instead."""
    if len(text) > _LONGEST:
        raise ValueError(f"a range of more than {_LONGEST} characters")
    return tuple(
        tuple(_comparator(word.strip(" \t")) for word in part.split(","))
        for part in text.split("||")
    )


def _comparator(word: str) -> _Comparator:
    match = re.fullmatch(_COMPARATOR, word)
    if match is None:
        if hyphen := re.fullmatch(r"([^ \t]+)[ \t]+-[ \t]+([^ \t]+)", word):
            raise ValueError(
                f"hyphen ranges are not supported: write '>={hyphen[1]},<={hyphen[2]}'"
            )
        forms = "write '*', 1.x, 1.2 or 1.2.3, if need be after = == != > >= < <= ^ ~"
        raise ValueError(f"{word!r} is no comparator: {forms}; join comparators with a comma")
    operator, *parts, prerelease = match.groups()
    # As in node-semver, nothing counts after the first part that is open.
    numbers = [int(part) for part in takewhile(lambda part: part and part not in "xX*", parts)]
    if prerelease is not None and len(numbers) < 3:
        raise ValueError(
            f"{word!r} names a pre-release of a partial version: write all three numbers"
        )
    version = _version(numbers, prerelease)
    # What is written spans low..high: 1.2 all that begin so, 1.2.3 itself and nothing else that a
    # tag can spell.
    low = version if numbers else _LOWEST
    kept = numbers
    if operator == "^":
        # The leftmost number that is not zero stays: 0.2.x for ^0.2.3, 0.0.x for ^0.0.
        kept = numbers[: next((i for i, number in enumerate(numbers, 1) if number), 3)]
    elif operator == "~":
        kept = numbers[:2]
    high = _version([*kept[:-1], kept[-1] + 1]) if kept else _HIGHEST
    if operator not in ("^", "~") and len(numbers) == 3:
        high = version._replace(identifiers=version.identifiers + "\0")
    spans = {
        ">": (high, _HIGHEST),
        ">=": (low, _HIGHEST),
        "<": (_LOWEST, low),
        "<=": (_LOWEST, high),
    }
    named = version.release if version.is_prerelease else None
    return *spans.get(operator, (low, high)), operator != "!=", named
