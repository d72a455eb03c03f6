"""What a valid configuration says that its author can hardly mean.

Owns: the judgement of tag rules and of mappings beside each other. May not know: YAML, places, levels.
Invariant: it speaks only where no content of any registry could prove it wrong, but for names of tags that move by
custom and for ranges without an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from _regsync.tags import TagRule, check_glob, compile_glob, select

__all__ = ["of_tags", "shadowed"]

# Simple enough that one pattern can be matched against the text of another.
_SIMPLE = r"[A-Za-z0-9._*-]+"
# By custom: names, and versions that leave something out.
_MOVING = (r"(?:latest|current|stable|lts|mainline|main|master|trunk|head|edge|nightly|canary|rolling|snapshot"
    r"|dev|develop|testing|unstable|next|v?[0-9]{1,3}(?:\.[0-9]{1,3})?)(?:-[a-z]+)*")
# A mapping is compared with so many before it: lists of thousands stay linear.
_MOST_COMPARED = 50


# Large configurations repeat a few rules.
@lru_cache(256)
def of_tags(rule: TagRule) -> Sequence[tuple[str, str]]:
    """Return the fields of a valid rule that are to be doubted, and why, with the remedy."""
    found: list[tuple[str, str]] = []
    immutable = rule.immutable_tags or ""
    for field, patterns in (("glob", rule.glob), ("exclude", rule.exclude), ("immutable_tags", [immutable])):
        why = "matches no tag: tags are letters, digits, _ . - and begin with no . or -"
        found += [(field, f"{pattern!r} {why}") for pattern in patterns if _matches_nothing(pattern)]
    literals = [tag for pattern in rule.glob if (tag := check_glob(pattern)) is not None]
    if literals and (rule.exclude or rule.chooses_versions):
        dropped = select(literals, rule._replace(latest=None, min_tags=None)).dropped.items()
        lost = [(tag, reason) for tag, reason in dropped if reason == "exclude" or not rule.min_tags]
        found += [("glob", f"{tag!r} is never copied: the {reason} rule drops it") for tag, reason in lost]
    for pattern in rule.glob or ("*",):
        if check_glob(pattern) is None and any(_covers(wide, pattern) for wide in rule.exclude):
            found.append(("exclude", f"drops every tag that the glob {pattern!r} takes: narrow it"))
    if rule.semver is not None:
        empty, endless = _extent(rule.semver)
        if empty:
            found.append(("semver", f"{rule.semver!r} admits no version: its comparators exclude each other"))
        elif endless and rule.latest is None and set(rule.glob) <= {"*", "v*"}:
            remedy = "add `latest`, or an upper bound such as '<2'"
            found.append(("semver", f"{rule.semver!r} has no end, so that all versions are copied for ever: {remedy}"))
    if immutable:
        single = check_glob(immutable)
        moving = [tag for tag in ([single] if single else literals) if re.fullmatch(_MOVING, tag)]
        why = "moves as a rule, and would never be copied again: leave it out"
        found += [("immutable_tags", f"{tag!r} {why}") for tag in filter(compile_glob(immutable), moving)]
    return found


def _extent(text: str) -> tuple[bool, bool]:
    """Say whether a range admits nothing, and whether there is no end to it."""
    from _regsync.semver import Version, parse_range

    found = parse_range(text)
    # Where anything is admitted, then something at a bound or right after it.
    bounds = {bound for one in found.sets for each in one for bound in (each.low, each.high)}
    releases = {(major, minor, patch + more) for (major, minor, patch), *_ in bounds for more in (0, 1)}
    near = {bound for bound in bounds if bound.is_prerelease} | {Version(each) for each in releases | {(0, 0, 0)}}
    return not any(found.admits(version, "include") for version in near), found.admits(Version((10**9, 0, 0)))


def _matches_nothing(pattern: str) -> bool:
    """Say whether a pattern asks for a character that tags cannot have, outside of braces and sets."""
    bare = re.sub(r"\{.*\}|\[(?:\\.|[^\]\\])*\]", "*", pattern, flags=re.DOTALL).replace("\\", "")
    return re.fullmatch(r"(?:[A-Za-z0-9_*?][A-Za-z0-9_.*?-]*)?", bare) is None


def _covers(wide: str, narrow: str) -> bool:
    """Say whether all that one glob takes is sure to be taken by another."""
    if wide in (narrow, "*"):
        return not narrow.startswith("sha256-") or wide == narrow
    return bool(re.fullmatch(_SIMPLE, wide) and re.fullmatch(_SIMPLE, narrow)) and compile_glob(wide)(narrow)


def shadowed(routes: Sequence[tuple[Sequence[object], TagRule]]) -> Iterator[tuple[int, int]]:
    """Give the mappings that earlier ones leave nothing to do, each with the first of those.

    A route is a key for each pair of content and place that a mapping joins, and its tags.
    """
    earlier: dict[object, list[tuple[int, TagRule]]] = {}
    for index, (keys, tags) in enumerate(routes):
        before = [earlier.setdefault(key, []) for key in keys]
        owners = [next((i for i, wide in each if _leaves_nothing(wide, tags)), None) for each in before]
        if owners[0] is not None and None not in owners:
            yield index, owners[0]
        for each in before:
            if len(each) < _MOST_COMPARED:
                each.append((index, tags))


def _leaves_nothing(first: TagRule, rule: TagRule) -> bool:
    wide, narrow = first._replace(immutable_tags=None), rule._replace(immutable_tags=None)
    return wide == narrow or (wide.latest is None and not narrow.min_tags
        and all(any(_covers(a, b) for a in wide.glob or ("*",)) for b in narrow.glob or ("*",))
        and set(wide.exclude) <= set(narrow.exclude) and (wide.semver, wide.semver_prerelease)
        in ((None, None), (narrow.semver, narrow.semver_prerelease)))
