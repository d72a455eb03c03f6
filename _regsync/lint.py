"""What a valid configuration says that its author can hardly mean.

Owns: the judgement of tag rules and of mappings beside each other. May not know: YAML, places, levels.
Invariant: it speaks only where no content of any registry could prove it wrong, but for names of tags
that move by custom and for ranges without an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from _regsync.tags import TagRule, check_glob, compile_glob, select, select_literals

__all__ = ["Route", "of_mappings", "of_tags"]

# Simple enough that one pattern can be matched against the text of another.
_SIMPLE = r"[A-Za-z0-9._*-]+"
# By custom: names, and versions that leave something out.
_MOVING = (
    r"(?:latest|current|stable|lts|mainline|main|master|trunk|head|edge|nightly|canary|rolling|snapshot"
    r"|dev|develop|testing|unstable|next|v?[0-9]{1,3}(?:\.[0-9]{1,3})?)(?:-[a-z]+)*"
)
# A mapping is compared with so many before it: lists of thousands stay linear.
_MOST_COMPARED = 50


# Large configurations repeat a few rules.
@lru_cache(256)
def of_tags(rule: TagRule) -> tuple[tuple[str, str], ...]:
    """Return the fields of a valid rule that are to be doubted, and why, with the remedy."""
    return tuple(_doubts(rule))


def _doubts(rule: TagRule) -> Iterator[tuple[str, str]]:
    immutable = rule.immutable_tags or ""
    for field, patterns in (("glob", rule.glob), ("exclude", rule.exclude), ("immutable_tags", [immutable])):
        for pattern in filter(_matches_nothing, patterns):
            yield (field, f"{pattern!r} matches no tag: tags are letters, digits, _ . - and begin with no . or -")
    literals = [tag for pattern in rule.glob if (tag := check_glob(pattern)) is not None]
    if literals and (rule.exclude or rule.chooses_versions):
        for tag, reason in select(literals, rule._replace(latest=None, min_tags=None)).dropped.items():
            if reason == "exclude" or not rule.min_tags:
                yield "glob", f"{tag!r} is never copied: the {reason} rule drops it"
    for pattern in (rule.glob or ("*",)) if rule.exclude else ():
        if check_glob(pattern) is None and any(_covers(wide, pattern) for wide in rule.exclude):
            yield "exclude", f"drops every tag that the glob {pattern!r} takes: narrow it"
    if rule.semver is not None:
        empty, endless = _extent(rule.semver)
        if empty:
            yield "semver", f"{rule.semver!r} admits no version: its comparators exclude each other"
        elif endless and rule.latest is None and set(rule.glob) <= {"*", "v*"}:
            remedy = "add `latest`, or an upper bound such as '<2'"
            yield "semver", f"{rule.semver!r} has no end, so that all versions are copied for ever: {remedy}"
    single = immutable and check_glob(immutable)
    for tag in filter(compile_glob(immutable), [single] if single else literals) if immutable else ():
        if re.fullmatch(_MOVING, tag):
            yield "immutable_tags", f"{tag!r} moves as a rule, and would never be copied again: leave it out"


@lru_cache(256)
def _extent(text: str) -> tuple[bool, bool]:
    """Say whether a range admits nothing, and whether there is no end to it."""
    from _regsync.semver import Version, parse_range

    found = parse_range(text)
    # Where anything is admitted, then something at a bound or right after it.
    bounds = {bound for one in found.sets for each in one for bound in (each.low, each.high)}
    releases = {(major, minor, patch + more) for (major, minor, patch), *_ in bounds for more in (0, 1)}
    near = {bound for bound in bounds if bound.is_prerelease} | {Version(each) for each in releases | {(0, 0, 0)}}
    empty = not any(found.admits(version, "include") for version in near)
    return empty, found.admits(Version((10**9, 0, 0)))


def _matches_nothing(pattern: str) -> bool:
    """Say whether a pattern asks for a character that tags cannot have, outside of braces and sets."""
    if not pattern:
        return False
    bare = re.sub(r"\{.*\}|\[(?:\\.|[^\]\\])*\]", "*", pattern, flags=re.DOTALL).replace("\\", "")
    return re.fullmatch(r"[A-Za-z0-9_*?][A-Za-z0-9_.*?-]*", bare) is None


def _covers(wide: str, narrow: str) -> bool:
    """Say whether all that one glob takes is sure to be taken by another."""
    if wide in (narrow, "*"):
        return not narrow.startswith("sha256-") or wide == narrow
    return bool(re.fullmatch(_SIMPLE, wide) and re.fullmatch(_SIMPLE, narrow)) and compile_glob(wide)(narrow)


class Route(NamedTuple):
    """One mapping: a key of what it copies, a key for each repository that it writes, which tags."""

    content: object
    places: Sequence[object]
    tags: TagRule


def of_mappings(routes: Sequence[Route]) -> Iterator[tuple[int, str]]:
    """Give the mappings that an earlier one leaves nothing to do, or stands in the way of."""
    writers: dict[object, list[tuple[int, Route]]] = {}
    for index, route in enumerate(routes):
        before = [writers.setdefault(place, []) for place in route.places]
        owners = [next((i for i, one in each if _leaves_nothing(one, route)), None) for each in before]
        clash = next((i for each in before for i, one in each if _clash(one, route)), None)
        if clash is not None:
            yield index, f"fails: mappings[{clash}] writes the same tags there from another source"
        elif None not in owners:
            yield index, f"copies nothing: mappings[{owners[0]}] copies all of it to the same place"
        for each in before:
            if len(each) < _MOST_COMPARED:
                each.append((index, route))


def _leaves_nothing(first: Route, route: Route) -> bool:
    wide, narrow = first.tags._replace(immutable_tags=None), route.tags._replace(immutable_tags=None)
    if first.content != route.content or wide == narrow:
        return first.content == route.content
    return (
        wide.latest is None
        and not narrow.min_tags
        and all(any(_covers(a, b) for a in wide.glob or ("*",)) for b in narrow.glob or ("*",))
        and set(wide.exclude) <= set(narrow.exclude)
        and (wide.semver, wide.semver_prerelease) in ((None, None), (narrow.semver, narrow.semver_prerelease))
    )


def _clash(first: Route, route: Route) -> bool:
    """Say whether both are sure to want one tag at one place from different sources."""
    if first.content == route.content:
        return False
    one, other = select_literals(first.tags), select_literals(route.tags)
    return one is not None and other is not None and not set(one.kept).isdisjoint(other.kept)
