"""."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from _regsync.semver import Version, admits, parse_range
from _regsync.tags import TagRule, check_glob, compile_glob, select

_SIMPLE = r"[A-Za-z0-9._*-]+"  # one such glob can be matched against the text of another


# Tags that move by custom: names, and versions that leave something out.
_MOVING = (
    r"(?:latest|current|stable|lts|mainline|main|master|trunk|head|edge|nightly|canary|rolling|snapshot"
    r"|dev|develop|testing|unstable|next|v?[0-9]{1,3}(?:\.[0-9]{1,3})?)(?:-[a-z]+)*"
)


@lru_cache(256)  # large configurations repeat a few rules
def _doubts_of(rule: TagRule) -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    immutable = rule.immutable_tags or ""
    for field, patterns in (
        ("glob", rule.glob),
        ("exclude", rule.exclude),
        ("immutable_tags", [immutable]),
    ):
        why = "matches no tag: tags are letters, digits, _ . - and begin with no . or -"
        found += [
            (field, f"{pattern!r} {why}") for pattern in patterns if _matches_nothing(pattern)
        ]
    literals = [tag for pattern in rule.glob if (tag := check_glob(pattern)) is not None]
    if literals and (rule.exclude or rule.chooses_versions):
        dropped = select(literals, rule._replace(latest=None, min_tags=None)).dropped.items()
        lost = [
            (tag, reason) for tag, reason in dropped if reason == "exclude" or not rule.min_tags
        ]
        found += [
            ("glob", f"{tag!r} is never copied: the {reason} rule drops it") for tag, reason in lost
        ]
    for pattern in rule.glob or ("*",):
        if check_glob(pattern) is None and any(_covers(wide, pattern) for wide in rule.exclude):
            found.append(("exclude", f"drops every tag that the glob {pattern!r} takes: narrow it"))
    if rule.semver is not None:
        versions = parse_range(rule.semver)
        # Where anything is admitted, then something at a bound or right after it.
        bounds = {bound for one in versions for each in one for bound in each[:2]}
        releases = {
            (major, minor, patch + more) for (major, minor, patch), *_ in bounds for more in (0, 1)
        }
        near = {bound for bound in bounds if bound.is_prerelease} | {
            Version(each) for each in releases | {(0, 0, 0)}
        }
        if not any(admits(versions, version, "include") for version in near):
            found.append(
                ("semver", f"{rule.semver!r} admits no version: its comparators exclude each other")
            )
        elif (
            rule.latest is None
            and set(rule.glob) <= {"*", "v*"}
            and admits(versions, Version((10**9, 0, 0)))
        ):
            remedy = "add `latest`, or an upper bound such as '<2'"
            found.append(
                (
                    "semver",
                    f"{rule.semver!r} has no end, so that all versions are copied for ever: {remedy}",
                )
            )
    if immutable:
        single = check_glob(immutable)
        moving = [tag for tag in ([single] if single else literals) if re.fullmatch(_MOVING, tag)]
        why = "moves as a rule, and would never be copied again: leave it out"
        found += [
            ("immutable_tags", f"{tag!r} {why}") for tag in filter(compile_glob(immutable), moving)
        ]
    return found


def _matches_nothing(pattern: str) -> bool:
    """Say whether a pattern asks for a character that tags cannot have, outside of braces and sets."""
    bare = re.sub(r"\{.*\}|\[(?:\\.|[^\]\\])*\]", "*", pattern, flags=re.DOTALL).replace("\\", "")
    return re.fullmatch(r"(?:[A-Za-z0-9_*?][A-Za-z0-9_.*?-]*)?", bare) is None


def _covers(wide: str, narrow: str) -> bool:
    if wide in (narrow, "*"):
        return not narrow.startswith(("sha256-", "sha512-")) or wide == narrow
    return bool(re.fullmatch(_SIMPLE, wide) and re.fullmatch(_SIMPLE, narrow)) and compile_glob(
        wide
    )(narrow)


def _leaves_nothing(first: TagRule, rule: TagRule) -> bool:
    wide = first._replace(immutable_tags=None)
    narrow = rule._replace(immutable_tags=None)
    return wide == narrow or (
        wide.latest is None
        and not narrow.min_tags
        and all(any(_covers(a, b) for a in wide.glob or ("*",)) for b in narrow.glob or ("*",))
        and set(wide.exclude) <= set(narrow.exclude)
        and (wide.semver, wide.semver_prerelease)
        in ((None, None), (narrow.semver, narrow.semver_prerelease))
    )
