"""What of a configuration can hardly be meant, though it is valid.

Owns: the warnings that `validate` alone gives.
May not know: YAML, places in a file.
Invariants: a warning is certain whatever a registry holds, but for those that go by custom: tags
that are known to move, ranges without an end, repositories that are called as their registry, ages
that no release waits for.
No glob is compared with another, no mapping with another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from _regsync.config.model import ArtifactRule, MappingRule, Registry
from _regsync.providers import canonical_host
from _regsync.semver import Version, admits, parse_range
from _regsync.tags import TagRule, check_glob, compile_glob, select

# Tags that move by custom: names, and versions that leave something out.
_MOVING_TAG = (
    r"(?:latest|current|stable|lts|mainline|main|master|trunk|head|edge|nightly|canary|rolling"
    r"|snapshot|dev|develop|testing|unstable|next|v?[0-9]{1,3}(?:\.[0-9]{1,3})?)(?:-[a-z]+)*"
)

# Tags that move each day by custom, or more often.
_RESTLESS_TAG = (
    r"(?:main|master|trunk|head|edge|nightly|canary|rolling|snapshot|dev|develop|unstable)"
    r"(?:-[a-z]+)*"
)

# Seconds. A shorter age was meant in another unit, as a run that comes later finds it over.
_LEAST_AGE = 60.0
_DAY = 86400.0

# An alternative or a set of a glob. What stands in it is not looked at.
_GROUPS = r"\{.*\}|\[(?:\\.|[^\]\\])*\]"

# A glob that a tag can match, with `*` in place of its groups.
_POSSIBLE = r"(?:[A-Za-z0-9_*?][A-Za-z0-9_.*?-]*)?"

# A version above all that will ever be released.
_FAR_VERSION = Version((1_000_000_000, 0, 0))


class Doubt(NamedTuple):
    """A warning about one field of a section."""

    field: str
    message: str


@lru_cache(256)  # large configurations repeat a few rules
def doubts_of_tags(rule: TagRule) -> Sequence[Doubt]:
    """Return what of a tag rule can hardly be meant."""
    return (
        *_impossible_patterns(rule),
        *_literals_never_copied(rule),
        *_globs_excluded_whole(rule),
        *_endless_range(rule),
        *_immutable_tags_that_move(rule),
    )


def _impossible_patterns(rule: TagRule) -> Iterator[Doubt]:
    """Warn of patterns with a character that no tag can have at its place."""
    patterns = [("glob", pattern) for pattern in rule.glob]
    patterns += [("exclude", pattern) for pattern in rule.exclude]
    if rule.immutable_tags:
        patterns.append(("immutable_tags", rule.immutable_tags))

    why = "matches no tag: tags are letters, digits, _ . - and do not begin with . or -"
    for field, pattern in patterns:
        without_groups = re.sub(_GROUPS, "*", pattern, flags=re.DOTALL)
        unescaped = without_groups.replace("\\", "")
        if re.fullmatch(_POSSIBLE, unescaped) is None:
            yield Doubt(field, f"{pattern!r} {why}")


def _literals_never_copied(rule: TagRule) -> Iterator[Doubt]:
    """Warn of tags that `glob` names in full, and another field drops."""
    literals = _literals(rule)
    if not literals or not (rule.exclude or rule.drops_versions):
        return
    # What `latest` and `min_tags` do depends on all other tags.
    selection = select(literals, rule._replace(latest=None, min_tags=None))
    for tag, reason in selection.dropped.items():
        may_come_back = rule.min_tags and reason != "exclude"
        if not may_come_back:
            yield Doubt("glob", f"{tag!r} is never copied: the {reason} rule drops it")


def _globs_excluded_whole(rule: TagRule) -> Iterator[Doubt]:
    """Warn of an `exclude` that leaves nothing of a glob, as the same pattern stands there too."""
    for pattern in rule.glob or ("*",):
        is_literal = check_glob(pattern) is not None  # `_literals_never_copied` sees these
        if not is_literal and ("*" in rule.exclude or pattern in rule.exclude):
            yield Doubt("exclude", f"drops every tag that the glob {pattern!r} takes: narrow it")


def _endless_range(rule: TagRule) -> Iterator[Doubt]:
    """Warn of a range that takes all versions to come, which nothing else limits."""
    takes_every_version = set(rule.glob) <= {"*", "v*"} and rule.latest is None
    if rule.semver is None or not takes_every_version:
        return
    if admits(parse_range(rule.semver), _FAR_VERSION):
        trouble = f"{rule.semver!r} has no upper bound, so that every future version is copied"
        yield Doubt("semver", f"{trouble}: add `latest`, or a bound such as '<2'")


def _immutable_tags_that_move(rule: TagRule) -> Iterator[Doubt]:
    """Warn of tags known to move that `immutable_tags` matches: those that a field names in full."""
    if not rule.immutable_tags:
        return
    single_tag = check_glob(rule.immutable_tags)
    tags = [single_tag] if single_tag else _literals(rule)
    is_immutable = compile_glob(rule.immutable_tags)
    for tag in tags:
        if re.fullmatch(_MOVING_TAG, tag) and is_immutable(tag):
            why = "usually moves, and would never be updated: leave it out"
            yield Doubt("immutable_tags", f"{tag!r} {why}")


def _literals(rule: TagRule) -> list[str]:
    """Return the tags that `glob` names in full, without wildcards."""
    tags = [check_glob(pattern) for pattern in rule.glob]
    return [tag for tag in tags if tag is not None]


def doubts_of_artifacts(rule: ArtifactRule) -> Sequence[Doubt]:
    """Return what of an artifact rule can hardly be meant."""
    if rule.include and set(rule.include) <= set(rule.exclude):
        return (Doubt("exclude", "drops every type that `include` takes"),)
    return ()


def doubts_of_repositories(rule: MappingRule) -> Iterator[Doubt]:
    """Warn of repositories of a mapping that begin with the host name of their own registry."""
    yield from _host_in_repository("from", rule.source_repository, [rule.source])
    if rule.target_repository != rule.source_repository:
        yield from _host_in_repository("to", rule.target_repository, rule.targets)


def _host_in_repository(
    field: str, repository: str, registries: Sequence[Registry]
) -> Iterator[Doubt]:
    first, _, rest = repository.partition("/")
    hosts = [registry.host for registry in registries]
    # A host without a dot, as `harbor`, may well be the name of a team.
    if "." in first and rest and canonical_host(first) in hosts:
        trouble = f"begins with the registry's own host, which does not belong here: write {rest!r}"
        yield Doubt(field, f"{repository!r} {trouble}")


def doubts_of_age(seconds: float) -> Iterator[Doubt]:
    """Warn of a `min_age` that was meant in another unit."""
    if 0 < seconds < _LEAST_AGE:
        trouble = f"{seconds:.0f} seconds have passed before the next run"
        yield Doubt("min_age", f"{trouble}: write {seconds:.0f}d for days")


def tags_never_old_enough(rule: MappingRule) -> Iterator[Doubt]:
    """Warn of tags under which no digest stands for so long that `min_age` lets it go."""
    if rule.min_age < _DAY:
        return
    for tag in _literals(rule.tags):
        if re.fullmatch(_RESTLESS_TAG, tag):
            why = "usually moves within a day, so that none of its digests gets old enough"
            yield Doubt("min_age", f"{tag!r} {why}: give it a mapping with `min_age: 0`")


def unused_logins(registries: Iterable[Registry], rules: Sequence[MappingRule]) -> list[str]:
    """Return the aliases of registries whose password or token no mapping uses.

    A file without mappings is for `copy -c`, which may use any of them.
    """
    if not rules:
        return []
    used = {registry.alias for rule in rules for registry in (rule.source, *rule.targets)}
    return [
        registry.alias
        for registry in registries
        if registry.alias not in used and (registry.password or registry.token)
    ]
