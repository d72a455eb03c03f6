"""Narrow a run to the images that failed or were left undone in an earlier run.

The run selects tags as ever, so that a conflict of mappings ends as in a run of all mappings (I10).
Of what it selects, only the images of the retry are copied.

Invariants: an image that is not in the report is not copied.
Follows: docs/design.md section 2 ("Retry").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from _regsync.config import MappingRule, Registry
from _regsync.sync.mappings import ALL_TAGS, WantedTag


class Retry:
    """The images of a report that failed or were left undone."""

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
        """Return the tags of a mapping to retry at any target, sorted, perhaps with ALL_TAGS."""
        return sorted({tag for each in mapping.targets for tag in self._tags_at(mapping, each)})

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
        tags = self._tags_at(wanted.mapping, target)
        return wanted.tag in tags or ALL_TAGS in tags or (wanted.tag == ALL_TAGS and bool(tags))

    def _tags_at(self, mapping: MappingRule, target: Registry) -> set[str]:
        """Return the tags of a mapping to retry at one target. ALL_TAGS may be among them."""
        return self._tags.get(_names_of(mapping, target), set())


def _names_of(mapping: MappingRule, target: Registry) -> tuple[str, str]:
    """Return the full names of the source and the target repository, as in a report."""
    source = mapping.source.name_of(mapping.source_repository)
    return source, target.name_of(mapping.target_repository)
