"""Warnings about settings that are valid but probably a mistake.

Owns: the warnings that only `validate` prints.
May not know: YAML, places in a file.
Invariants: a warning is correct whatever tags a registry has. The exceptions are warnings that rest on
conventions: tags that usually move, ranges without an upper bound, repositories named like their
registry, ages shorter than any interval between runs.
No glob is compared with another glob, and no mapping with another mapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from _regsync.config.model import ArtifactRule, MappingRule, Registry
from _regsync.providers import canonical_host
from _regsync.semver import Version, admits, parse_range
from _regsync.tags import TagRule, compile_glob, literal_tag, select

# Tags that conventionally move: names such as `latest`, and versions without a minor or patch
# number.
_MOVING_TAG = (
    r"(?:latest|current|stable|lts|mainline|main|master|trunk|head|edge|nightly|canary|rolling"
    r"|snapshot|dev|develop|testing|unstable|next|v?[0-9]{1,3}(?:\.[0-9]{1,3})?)(?:-[a-z]+)*"
)

# Tags that conventionally move every day or more often.
_DAILY_TAG = (
    r"(?:main|master|trunk|head|edge|nightly|canary|rolling|snapshot|dev|develop|unstable)"
    r"(?:-[a-z]+)*"
)

# Seconds. A shorter `min_age` has no effect because the next run starts later. Another unit was
# probably meant.
_MIN_USEFUL_AGE = 60.0
_DAY = 86400.0  # seconds

# An alternative or a character set of a glob. Its contents are not examined.
_GROUPS = r"\{.*\}|\[(?:\\.|[^\]\\])*\]"

# A glob that can match a tag, after its groups have been replaced by `*`.
_POSSIBLE_GLOB = r"(?:[A-Za-z0-9_*?][A-Za-z0-9_.*?-]*)?"

# A version above every version that will ever be released.
_FAR_VERSION = Version((1_000_000_000, 0, 0))


class LintWarning(NamedTuple):
    """A warning about one field of a section."""

    field: str  # the field's name
    message: str


@lru_cache(256)  # large configurations repeat a few rules
def lint_tag_rule(rule: TagRule) -> Sequence[LintWarning]:
    return (
        *_lint_impossible_patterns(rule),
        *_lint_dropped_literal_tags(rule),
        *_lint_excluded_globs(rule),
        *_lint_endless_range(rule),
        *_lint_moving_immutable_tags(rule),
    )


def _lint_impossible_patterns(rule: TagRule) -> Iterator[LintWarning]:
    """Warn of patterns that match no tag because of a character that tags cannot contain."""
    patterns = [("glob", pattern) for pattern in rule.glob]
    patterns += [("exclude", pattern) for pattern in rule.exclude]
    if rule.immutable_tags:
        patterns.append(("immutable_tags", rule.immutable_tags))

    why = "matches no tag: tags are letters, digits, _ . - and do not begin with . or -"
    for field, pattern in patterns:
        # Only the characters outside of groups are examined.
        without_groups = re.sub(_GROUPS, "*", pattern, flags=re.DOTALL)
        unescaped = without_groups.replace("\\", "")
        if re.fullmatch(_POSSIBLE_GLOB, unescaped) is None:
            yield LintWarning(field, f"{pattern!r} {why}")


def _lint_dropped_literal_tags(rule: TagRule) -> Iterator[LintWarning]:
    """Warn of tags that `glob` lists without wildcards but another field of the rule drops."""
    # The effect of `latest` and `min_tags` depends on all tags of the repository, which are
    # unknown.
    selection = select(_literal_tags(rule), rule._replace(latest=None, min_tags=None))
    for tag, reason in selection.dropped.items():
        # `min_tags` may restore tags that `semver` drops.
        if reason == "exclude" or not rule.min_tags:
            yield LintWarning("glob", f"{tag!r} is never copied: the {reason} rule drops it")


def _lint_excluded_globs(rule: TagRule) -> Iterator[LintWarning]:
    """Warn of globs whose pattern is also in `exclude`, so that all their tags are dropped."""
    for pattern in rule.glob or ("*",):
        # `_lint_dropped_literal_tags` checks the patterns without wildcards.
        has_wildcards = literal_tag(pattern) is None
        is_excluded = "*" in rule.exclude or pattern in rule.exclude
        if has_wildcards and is_excluded:
            yield LintWarning(
                "exclude", f"drops every tag that the glob {pattern!r} takes: narrow it"
            )


def _lint_endless_range(rule: TagRule) -> Iterator[LintWarning]:
    """Warn of a range that admits every future version, unless another field limits the tags."""
    takes_every_version = set(rule.glob) <= {"*", "v*"} and rule.latest is None
    if rule.semver is None or not takes_every_version:
        return
    if admits(parse_range(rule.semver), _FAR_VERSION):
        trouble = f"{rule.semver!r} has no upper bound, so that every future version is copied"
        yield LintWarning("semver", f"{trouble}: add `latest`, or a bound such as '<2'")


def _lint_moving_immutable_tags(rule: TagRule) -> Iterator[LintWarning]:
    """Warn of tags that conventionally move although `immutable_tags` matches them.

    Only tags that a field lists without wildcards are examined.
    """
    if not rule.immutable_tags:
        return
    single_tag = literal_tag(rule.immutable_tags)  # None if the pattern has wildcards
    tags = [single_tag] if single_tag else _literal_tags(rule)
    is_immutable = compile_glob(rule.immutable_tags)
    for tag in tags:
        if re.fullmatch(_MOVING_TAG, tag) and is_immutable(tag):
            why = "usually moves, and would never be updated: leave it out"
            yield LintWarning("immutable_tags", f"{tag!r} {why}")


def _literal_tags(rule: TagRule) -> list[str]:
    """Return the tags that `glob` lists without wildcards."""
    tags = [literal_tag(pattern) for pattern in rule.glob]  # None for a pattern with wildcards
    return [tag for tag in tags if tag is not None]


def lint_artifact_rule(rule: ArtifactRule) -> Sequence[LintWarning]:
    if rule.include and set(rule.include) <= set(rule.exclude):
        return (LintWarning("exclude", "drops every type that `include` takes"),)
    return ()


def lint_repositories(rule: MappingRule) -> Iterator[LintWarning]:
    """Warn of repositories that begin with the host name of their own registry."""
    yield from _lint_host_in_repository("from", rule.source_repository, [rule.source])
    if rule.target_repository != rule.source_repository:
        yield from _lint_host_in_repository("to", rule.target_repository, rule.targets)


def _lint_host_in_repository(
    field: str, repository: str, registries: Sequence[Registry]
) -> Iterator[LintWarning]:
    """Warn if the first part of a repository is the host name of one of the registries."""
    first, _, rest = repository.partition("/")
    hosts = [registry.host for registry in registries]
    # A host name without a dot, such as `harbor`, may also be the name of a team.
    looks_like_host = "." in first and rest != ""
    if looks_like_host and canonical_host(first) in hosts:
        trouble = f"begins with the registry's own host, which does not belong here: write {rest!r}"
        yield LintWarning(field, f"{repository!r} {trouble}")


def lint_min_age(seconds: float) -> Iterator[LintWarning]:
    """Warn of a `min_age` that was probably meant in another unit."""
    if 0 < seconds < _MIN_USEFUL_AGE:
        trouble = f"{seconds:.0f} seconds have passed before the next run"
        yield LintWarning("min_age", f"{trouble}: write {seconds:.0f}d for days")


def lint_moving_tags(rule: MappingRule) -> Iterator[LintWarning]:
    """Warn of tags that move so often that none of their digests reaches `min_age`."""
    if rule.min_age < _DAY:
        return
    for tag in _literal_tags(rule.tags):
        if re.fullmatch(_DAILY_TAG, tag):
            why = "usually moves within a day, so that none of its digests gets old enough"
            yield LintWarning("min_age", f"{tag!r} {why}: give it a mapping with `min_age: 0`")


def unused_logins(registries: Iterable[Registry], rules: Sequence[MappingRule]) -> list[str]:
    """Return the aliases of registries that have a password or token but occur in no mapping."""
    if not rules:
        return []  # the file is for `copy -c`, which may use any registry
    used = {registry.alias for rule in rules for registry in (rule.source, *rule.targets)}
    return [
        registry.alias
        for registry in registries
        if registry.alias not in used and (registry.password or registry.token)
    ]
