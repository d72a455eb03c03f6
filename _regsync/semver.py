"""Versions as tags spell them, and the ranges that choose among them.

Owns: when a tag counts as a version, precedence, the range grammar, what a pre-release needs to be
admitted. May not know: tag rules, registries, any other module of the program. Invariant: `parse_range`
either returns a range or raises `RangeError` with one line that says what to write instead.
Follows SemVer 2.0.0 section 11 (precedence), node-semver (operators and partials) and design.md section 4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

__all__ = ["ANY", "Prerelease", "Range", "RangeError", "Version", "parse_range", "parse_version"]

Prerelease = Literal["include", "exclude", "only"]

_SUFFIX = r"(?:-(?P<pre>[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:[+_][0-9A-Za-z._+-]+)?"
_VERSION = re.compile(rf"v?([0-9]+)(?:\.([0-9]+))?(?:\.([0-9]+))?{_SUFFIX}")
_COMPARATOR = re.compile(
    r"(?P<op>==|!=|>=|<=|[=<>^~])?[ \t]*"
    rf"v?(?P<major>[0-9]+|[xX*])(?:\.(?P<minor>[0-9]+|[xX*]))?(?:\.(?P<patch>[0-9]+|[xX*]))?{_SUFFIX}"
)
_HYPHEN_RANGE = re.compile(r"([^ \t,|]+)[ \t]+-[ \t]+([^ \t,|]+)")
_BLANK_BETWEEN = re.compile(r"[^ \t=<>^~!][ \t]+[^ \t]")
# A tag has at most 128 characters (protocol-facts.md section 1.1) and a range is written by hand;
# far longer ones are no versions, and int() refuses them with an exception of its own.
_LONGEST_VERSION = 256
_LONGEST_RANGE = 1024


class RangeError(ValueError):
    """A range expression that does not follow the grammar; the message says the remedy."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A version as far as precedence goes: spelling and build metadata are not part of it.

    `stage` is 1 for a release and 0 for its pre-releases, which sort before it; `identifiers` hold
    (0, number, "") or (1, 0, word): numbers below words, a longer list last when all before is equal.
    """

    release: tuple[int, int, int]
    stage: int = 1
    identifiers: tuple[tuple[int, int, str], ...] = ()

    @property
    def is_prerelease(self) -> bool:
        return not self.stage


def parse_version(tag: str) -> Version | None:
    """Return the version that a tag spells, or None when it spells none."""
    match = _VERSION.fullmatch(tag) if len(tag) <= _LONGEST_VERSION else None
    if match is None:
        return None
    return _version([int(part or 0) for part in match.group(1, 2, 3)], match["pre"])


def _version(numbers: list[int], prerelease: str | None = None) -> Version:
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    if prerelease is None:
        return Version((major, minor, patch))
    parts = prerelease.split(".")
    identifiers = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)
    return Version((major, minor, patch), 0, identifiers)


_Op = Literal[">=", ">", "<", "<=", "==", "!=", "outside"]


@dataclass(frozen=True, slots=True)
class _Bound:
    """One primitive comparison; `outside` the half-open span low..high is what `!=1.2` means."""

    op: _Op
    low: Version
    high: Version | None = None

    def admits(self, version: Version) -> bool:
        if self.op == "outside":
            return version < self.low or (self.high is not None and version >= self.high)
        if version == self.low:
            return self.op in (">=", "<=", "==")
        return self.op == "!=" or (self.op in (">", ">=") if version > self.low else self.op in ("<", "<="))

    def names_prerelease_of(self, version: Version) -> bool:
        return self.low.is_prerelease and self.low.release == version.release


_Bounds = tuple[_Bound, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """What `||` and `,` joined: alternatives of conjunctions."""

    sets: tuple[_Bounds, ...]

    def admits(self, version: Version, prerelease: Prerelease = "exclude") -> bool:
        """Say whether the range, under the rule for pre-releases, takes a version.

        Where a set names a pre-release of the same M.m.p, pre-releases of it are compared in full;
        elsewhere M.m.p is compared in their place (`include`, `only`) or they are refused (`exclude`).
        """
        if version.is_prerelease:
            by_release = prerelease != "exclude"
            return any(_admits_prerelease(bounds, version, by_release) for bounds in self.sets)
        return prerelease != "only" and any(
            all(bound.admits(version) for bound in bounds) for bounds in self.sets
        )


ANY = Range(((),))


def _admits_prerelease(bounds: _Bounds, version: Version, by_release: bool) -> bool:
    # `!=1.0.0-rc.1` says what is unwanted: it invites no other pre-release of 1.0.0.
    in_full = any(bound.op != "!=" and bound.names_prerelease_of(version) for bound in bounds)
    if not in_full and not by_release:
        return False
    release = Version(version.release)
    return all(
        bound.admits(version if in_full or bound.names_prerelease_of(version) else release)
        for bound in bounds
    )


def parse_range(text: str) -> Range:
    """Parse a range; RangeError says what is wrong and what to write instead."""
    if len(text) > _LONGEST_RANGE:
        raise RangeError(f"a range of more than {_LONGEST_RANGE} characters")
    return Range(tuple(_parse_set(part) for part in text.split("||")))


def _parse_set(part: str) -> _Bounds:
    if match := _HYPHEN_RANGE.search(part):
        raise RangeError(f"hyphen ranges are not supported: write '>={match[1]},<={match[2]}'")
    bounds: list[_Bound] = []
    for piece in part.split(","):
        word = piece.strip(" \t")
        if not word:
            raise RangeError("a comparator is missing: write '*' for any version")
        if _BLANK_BETWEEN.search(word):
            raise RangeError(f"a blank inside {word!r}: join comparators with a comma, as in '>=1.2,<2'")
        bounds.extend(_parse_comparator(word))
    return tuple(bounds)


def _parse_comparator(word: str) -> _Bounds:
    match = _COMPARATOR.fullmatch(word)
    if match is None:
        raise RangeError(
            f"{word!r} is no comparator: write 1.2.3, 1.2 or 1.x, if need be after = == != > >= < <= ^ ~"
        )
    numbers: list[int] = []
    for part in match.group("major", "minor", "patch"):
        # As in node-semver, nothing counts after the first part that is open.
        if part is None or part in "xX*":
            break
        numbers.append(int(part))
    if match["pre"] is not None and len(numbers) < 3:
        raise RangeError(f"{word!r} names a pre-release of a partial version: write all three numbers")
    return _bounds(match["op"] or "==", numbers, match["pre"])


def _bounds(op: str, numbers: list[int], prerelease: str | None) -> _Bounds:
    """Turn one comparator into primitive ones, as node-semver does."""
    low = _version(numbers, prerelease)
    op = "==" if op == "=" else op
    if op == "^":
        # The leftmost number that is not zero stays: 0.2.x for ^0.2.3, 0.0.x for ^0.0.
        fixed = next((i for i, number in enumerate(numbers) if number), len(numbers) - 1)
        return _span(low, _above(numbers[: fixed + 1]))
    if op == "~":
        return _span(low, _above(numbers[:2]))
    if len(numbers) == 3:
        return (_Bound(cast(_Op, op), low),)
    above = _above(numbers)
    if op == "==":
        return _span(low, above)
    if op in ("<", ">="):
        return (_Bound(cast(_Op, op), low),)
    if op == "<=":
        return (_Bound("<", above),) if above else ()
    if op == ">":
        return (_Bound(">=", above),) if above else _NOTHING
    return (_Bound("outside", low, above),)


def _above(numbers: list[int]) -> Version | None:
    """Return the first version past all that begin with `numbers`; None when there is none."""
    return _version([*numbers[:-1], numbers[-1] + 1]) if numbers else None


def _span(low: Version, above: Version | None) -> _Bounds:
    return (_Bound(">=", low), _Bound("<", above)) if above else ()


# What `>*` leaves: no release is below 0.0.0.
_NOTHING: _Bounds = (_Bound("<", Version((0, 0, 0))),)
