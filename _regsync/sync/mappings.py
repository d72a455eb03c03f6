"""Which mapping copies which tag, and which mappings are one process's share.

Owns: what happens when two mappings name one target tag; shards.
May not know: how tags are found, how anything is copied, clocks, tasks.
Invariants:
- I10: on a conflict the earlier mapping wins.
- Shards are disjoint and together the whole. Mappings with a source or target repository in common
  are in one shard, so that the repository is listed once and conflicts are seen.
Follows: docs/design.md sections 2 and 3.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from _regsync.config.model import Config, MappingRule, Registry
from _regsync.errors import ConfigError
from _regsync.text import printable

# Kubernetes sets this variable in the pods of an Indexed Job.
_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"

# In a report and a retry this stands in place of a tag for all that a mapping selects, where its source
# was not listed.
ALL_TAGS = "*"

_SHARD_NUMBER = re.compile("[0-9]{1,3}")


def grouped(
    mappings: Iterable[MappingRule], keys: Callable[[MappingRule], list[object]]
) -> list[list[MappingRule]]:
    """Group mappings that have a key in common, directly or through a chain of mappings; the members
    of a group are in the order of the configuration.
    """
    ordered = list(mappings)
    mappings_of_key = defaultdict[object, list[MappingRule]](list)
    for mapping in ordered:
        for key in keys(mapping):
            mappings_of_key[key].append(mapping)

    groups = list[list[MappingRule]]()
    grouped_indices = set[int]()
    for first in ordered:
        if first.index in grouped_indices:
            continue
        grouped_indices.add(first.index)
        group = [first]
        for mapping in group:  # the list grows by all that are linked to its members
            for key in keys(mapping):
                for linked in mappings_of_key.pop(key, ()):
                    if linked.index not in grouped_indices:
                        grouped_indices.add(linked.index)
                        group.append(linked)
        groups.append(sorted(group, key=lambda mapping: mapping.index))
    return groups


class WantedTag(NamedTuple):
    """One tag of a mapping and the targets that it is copied to."""

    mapping: MappingRule
    tag: str
    targets: tuple[Registry, ...]


class Conflict(NamedTuple):
    """A tag that is not copied, because an earlier mapping, the owner, writes the same target tag from
    another source.
    """

    wanted: WantedTag
    owner: MappingRule


def assign(
    selected: Iterable[tuple[MappingRule, Iterable[str]]],
) -> tuple[list[WantedTag], list[Conflict]]:
    """Give each target tag to the first mapping that names it (docs/design.md section 3).

    `selected` has mappings with the tags that they select. Returns the tags to look up, and the
    conflicts. A later mapping of the same source repository gets neither: the tag is copied already.
    """
    # By target repository and tag.
    owners = dict[tuple[object, str], MappingRule]()
    wanted = list[WantedTag]()
    conflicts = list[Conflict]()

    for mapping, tags in selected:
        for tag in _versions_first(tags):
            targets = list[Registry]()
            for target, repository in zip(mapping.targets, mapping.target_keys, strict=True):
                owner = owners.get((repository, tag))
                if owner is None:
                    owners[repository, tag] = mapping
                    targets.append(target)
                elif owner.source_key != mapping.source_key:
                    conflicts.append(Conflict(WantedTag(mapping, tag, (target,)), owner))
            if targets:
                wanted.append(WantedTag(mapping, tag, tuple(targets)))

    return wanted, conflicts


def _versions_first(tags: Iterable[str]) -> list[str]:
    """Order tags so that `1.2.3` is put before `latest`, which may name the same image (I2)."""
    # Among versions, and among the others, the order of `tags` stays.
    return sorted(tags, key=lambda tag: not tag.removeprefix("v")[:1].isdigit())


def share(config: Config, number: int, total: int) -> Config:
    """Return the configuration with the mappings of shard `number` of `total`, in their order, and
    with a `cache_dir` of its own.
    """
    groups = grouped(config.mappings, _repositories_of)

    # The largest group goes first, and each group to the shard with the fewest mappings. Every shard
    # computes the same.
    shards: list[list[MappingRule]] = [[] for _ in range(total)]
    for group in sorted(groups, key=len, reverse=True):
        smallest = min(shards, key=len)
        smallest.extend(group)

    own = tuple(sorted(shards[number], key=lambda mapping: mapping.index))
    cache_dir = config.cache_dir and f"{config.cache_dir}/shard-{number}-of-{total}"
    return config._replace(mappings=own, cache_dir=cache_dir)


def _repositories_of(mapping: MappingRule) -> list[object]:
    return [mapping.source.repository_key(mapping.source_repository), *mapping.target_keys]


def parse_shard(text: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return I and N of `--shard I/N`, where I counts from 0; `/N` takes I from the environment.

    Raises ConfigError.
    """
    number, _, total = text.partition("/")
    shown = printable(text, 40)
    if text.startswith("/"):
        value = environ.get(_INDEX_VARIABLE)
        number = value or ""
        shown_value = "not set" if value is None else printable(value, 40)
        shown = f"{shown} ({_INDEX_VARIABLE}: {shown_value})"

    are_numbers = all(_SHARD_NUMBER.fullmatch(part) is not None for part in (number, total))
    if are_numbers and int(number) < int(total):
        return int(number), int(total)

    hint = "write 0/4 for the first of four, 3/4 for the last, or /4 in the pods of an Indexed Job"
    raise ConfigError(f"--shard {shown}: expected I/N with I from 0 to N-1", hint=hint)
