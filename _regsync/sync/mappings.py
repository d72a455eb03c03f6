"""Which run copies which tag: of mappings that select the same, of shards, and after a failed run.

Owns: what happens if two mappings write the same target tag; retries; shards.
May not know: how tags are found, how anything is copied, clocks, tasks.
Invariants:
- I10: on a conflict the earlier mapping wins.
- An image that is not in the report of a retry is not copied.
- Each mapping is in exactly one shard. Mappings with a common target repository are in the same
  shard, so that conflicts are detected.
Follows: docs/design.md sections 2 ("Retry") and 3, docs/operations.md "How much at the same time".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from zlib import adler32

from _regsync.config import Config, MappingRule, Registry
from _regsync.errors import ConfigError, Side, SyncError
from _regsync.text import printable

# Kubernetes sets this variable in the pods of an Indexed Job.
_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"

# In a report and in a retry, stands for all tags of a mapping whose source was not listed.
ALL_TAGS = "*"

# I and N of `--shard I/N`.
_SHARD_NUMBER = re.compile("[0-9]{1,3}")


def group_mappings(mappings: Iterable[MappingRule]) -> list[list[MappingRule]]:
    """Group mappings by the name of their target repository, in the order of the configuration.

    So mappings with a common target repository are in one group.
    """
    groups = defaultdict[str, list[MappingRule]](list)
    for mapping in mappings:
        groups[_target_name(mapping)].append(mapping)
    return list(groups.values())


def _target_name(mapping: MappingRule) -> str:
    # At Docker Hub `library/alpine` is another name of `alpine`.
    return mapping.target_repository.removeprefix("library/")


class WantedTag(NamedTuple):
    """One tag of a mapping, and the targets that the tag is copied to."""

    mapping: MappingRule
    tag: str
    targets: tuple[Registry, ...]


def assign_tags(
    selections: Iterable[tuple[MappingRule, Iterable[str]]],
) -> tuple[list[WantedTag], list[tuple[WantedTag, SyncError]]]:
    """Assign each target tag to the first mapping that selects it (docs/design.md section 3).

    `selections` has each mapping with the tags that it selects, in the order of the configuration.
    Returns the assigned tags, and those that an earlier mapping copies from another source, each
    with its error. If an earlier mapping of the same source writes the same target tag, the later
    mapping is ignored for this target: it would copy the same image.
    """
    # By target repository and tag, the mapping that copies the tag.
    owners = dict[tuple[object, str], MappingRule]()
    assigned = list[WantedTag]()
    conflicts = list[tuple[WantedTag, SyncError]]()

    for mapping, tags in selections:
        for tag in _order_versions_first(tags):
            free_targets = list[Registry]()
            # `target_keys` has the key of the mapping's repository at each of `targets`.
            for target, repository in zip(mapping.targets, mapping.target_keys, strict=True):
                owner = owners.get((repository, tag))
                if owner is None:
                    owners[repository, tag] = mapping
                    free_targets.append(target)
                elif owner.source_key != mapping.source_key:
                    text = f"mappings[{owner.index}] writes this tag too, from another source or other platforms"
                    hint = "give one of the two mappings another `to`, or narrow its tags"
                    error = SyncError(text, hint=hint)
                    error.side = Side.TARGET
                    conflicts.append((WantedTag(mapping, tag, (target,)), error))
                # Otherwise the owner copies the same tag of the same source.
            if free_targets:
                assigned.append(WantedTag(mapping, tag, tuple(free_targets)))

    return assigned, conflicts


def _order_versions_first(tags: Iterable[str]) -> list[str]:
    """Order versions such as `1.2.3` before other tags, such as `latest` for the same image (I2)."""
    # `sorted` is stable: versions keep their order, and so do other tags.
    return sorted(tags, key=lambda tag: not tag.removeprefix("v")[:1].isdigit())


# Retries.


class Retry:
    """The images of a report that failed or were left undone, to which a run is narrowed.

    The run selects tags as ever, so that a conflict of mappings ends as in a run of all mappings
    (I10). Of what it selects, only these images are copied.
    """

    def __init__(self, images: Iterable[tuple[str, str]], mappings: Iterable[MappingRule]) -> None:
        """`images` are pairs of source and target, as full references with host. `mappings` are
        those of the configuration.
        """
        # By the full names of source and target repository, the tags to retry. ALL_TAGS is among
        # them if the tags of a mapping could not be listed.
        self._tags = defaultdict[tuple[str, str], set[str]](set)
        for source, target in images:
            source_repository, _, tag = source.rpartition(":")
            target_repository, _, target_tag = target.rpartition(":")
            if tag == target_tag:  # no mapping copies a tag to another tag
                self._tags[source_repository, target_repository].add(tag)

        # The mappings that write a repository of the images: those that the retry needs.
        repositories = {target for _, target in self._tags}
        self.mappings = tuple(
            mapping
            for mapping in mappings
            if any(_names_of(mapping, target)[1] in repositories for target in mapping.targets)
        )

    def tags_of(self, mapping: MappingRule) -> list[str]:
        """Return the tags of a mapping to retry, at any of its targets."""
        names = [_names_of(mapping, target) for target in mapping.targets]
        return sorted(set().union(*(self._tags.get(each, ()) for each in names)))

    def filter_tags(self, tags: Iterable[WantedTag]) -> list[WantedTag]:
        """Return the tags to retry, each with only the targets at which it is retried."""
        filtered = list[WantedTag]()
        for wanted in tags:
            targets = tuple(target for target in wanted.targets if self._includes(wanted, target))
            if targets:
                filtered.append(wanted._replace(targets=targets))
        return filtered

    def _includes(self, wanted: WantedTag, target: Registry) -> bool:
        """Report whether a tag is retried at a target.

        ALL_TAGS, the tag of a mapping that could not be listed, is retried if any tag is retried.
        """
        tags = self._tags.get(_names_of(wanted.mapping, target), ())
        return wanted.tag in tags or ALL_TAGS in tags or (wanted.tag == ALL_TAGS and bool(tags))


def _names_of(mapping: MappingRule, target: Registry) -> tuple[str, str]:
    """Return the full names of the source and the target repository, as in a report."""
    source = mapping.source.name_of(mapping.source_repository)
    return source, target.name_of(mapping.target_repository)


# Shards.


def config_of_shard(config: Config, number: int, total: int) -> Config:
    """Return the configuration of shard `number` of `total`. Shards are numbered from 0.

    The result has the mappings of the shard, in the order of `config`, and a `cache_dir` of its
    own. The name of its target repository decides about the shard of a mapping. So it stays in its
    shard, whose state knows it, whatever becomes of the other mappings.
    """

    # Names that differ in a number, or in one letter, are spread evenly by this checksum.
    def shard_of(mapping: MappingRule) -> int:
        return adler32(_target_name(mapping).encode()) % total

    own_mappings = tuple(each for each in config.mappings if shard_of(each) == number)
    # Shards run at the same time, and only one process may write a state. None stays None.
    cache_dir = config.cache_dir and f"{config.cache_dir}/shard-{number}-of-{total}"
    return config._replace(mappings=own_mappings, cache_dir=cache_dir)


def parse_shard(text: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Parse the value of `--shard`: `I/N`, or `/N` if JOB_COMPLETION_INDEX is I.

    Returns I and N. I is at least 0 and less than N. Raises ConfigError if the value is not valid.
    """
    number, _, total = text.partition("/")
    shown = printable(text, 40)
    if text.startswith("/"):
        number = environ.get(_INDEX_VARIABLE, "")
        shown = f"{shown} ({_INDEX_VARIABLE}: {printable(number, 40) or 'not set'})"

    are_numbers = all(_SHARD_NUMBER.fullmatch(part) is not None for part in (number, total))
    # This also refuses a total of 0.
    if are_numbers and int(number) < int(total):
        return int(number), int(total)

    hint = "write 0/4 for the first of four, 3/4 for the last, or /4 in the pods of an Indexed Job"
    raise ConfigError(f"--shard {shown}: expected I/N with I from 0 to N-1", hint=hint)
