"""Narrow a run to the images that failed or were left undone in an earlier run.

Invariants: an image that is not in the report is not copied. A conflict of mappings ends as in a
run of all mappings (I10).
Follows: docs/design.md section 2 ("Retry").
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable

from _regsync.config import Config, MappingRule, Registry
from _regsync.oci import is_tag
from _regsync.sync.mappings import ALL_TAGS, WantedTag
from _regsync.tags import TagRule, select


class Retry:
    """The images of a report that failed or were left undone."""

    def __init__(self, images: Iterable[tuple[str, str]]) -> None:
        """`images` are pairs of source and target, as full references with host."""
        self._images = list(dict.fromkeys(images))
        self.unselected = list[str]()  # images that are not retried; each is a failure of the run
        # By the full names of source and target repository, the tags to retry. ALL_TAGS is among
        # them if the tags of a mapping could not be listed. What was copied to another tag, no
        # mapping can select.
        self._tags = defaultdict[tuple[str, str], set[str]](set)
        for source, target in self._images:
            source_repository, _, tag = source.rpartition(":")
            target_repository, _, target_tag = target.rpartition(":")
            if tag == target_tag and (is_tag(tag) or tag == ALL_TAGS):
                self._tags[source_repository, target_repository].add(tag)

    def _tags_at(self, mapping: MappingRule, target: Registry) -> set[str]:
        """Return the tags of a mapping to retry at one target. ALL_TAGS may be among them."""
        return self._tags.get(_names_of(mapping, target), set())

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

    def narrow(self, config: Config) -> Config:
        """Return the configuration with only the mappings, targets and tags that the retry needs.

        The tags are listed in the mappings by name, so that sources need not be listed. `latest`
        and `min_tags` need a listing, so they are not applied again. An earlier mapping that writes
        the same target from another source is kept whole, so that a conflict is detected again.
        """
        earlier_mappings = defaultdict[object, list[MappingRule]](list)  # by target repository
        needed = dict[int, MappingRule]()  # by index
        for mapping in config.mappings:
            narrowed = self._narrow_mapping(mapping)
            if narrowed is not None:
                needed[mapping.index] = narrowed
                for key in narrowed.target_keys:
                    for rival in earlier_mappings[key]:
                        if rival.source_key != mapping.source_key:
                            needed[rival.index] = rival
            for key in mapping.target_keys:
                earlier_mappings[key].append(mapping)
        return config._replace(mappings=tuple(needed[index] for index in sorted(needed)))

    def _narrow_mapping(self, mapping: MappingRule) -> MappingRule | None:
        """Return a mapping with only the tags and targets to retry. Returns None if it has none."""
        tags_at = {target: self._selectable_tags(mapping, target) for target in mapping.targets}
        targets = tuple(target for target, tags in tags_at.items() if tags)
        if not targets:
            return None
        tags = set[str]().union(*tags_at.values())
        rule = mapping.tags
        if ALL_TAGS not in tags:
            # Names without a wildcard, which a run selects without a listing of the source.
            rule = TagRule(glob=tuple(sorted(tags)), immutable_tags=rule.immutable_tags)
        return mapping._replace(targets=targets, tags=rule)

    def _selectable_tags(self, mapping: MappingRule, target: Registry) -> set[str]:
        """Return the tags to retry at a target that the mapping can select.

        If ALL_TAGS is among the tags to retry, all of them are returned.
        """
        tags = self._tags_at(mapping, target)
        if ALL_TAGS in tags:
            return tags
        # The source may have other tags, so `latest` may keep each of these, and `min_tags` may
        # restore each that it can.
        rule = mapping.tags._replace(latest=None, min_tags=mapping.tags.min_tags and sys.maxsize)
        return set(select(sorted(tags), rule).kept)

    def find_unselected(self, config: Config) -> list[str]:
        """Return `SOURCE -> TARGET` for each image to retry that no mapping can select any more."""
        selectable = set[tuple[str, str]]()
        for mapping in config.mappings:
            for target in mapping.targets:
                source_name, target_name = _names_of(mapping, target)
                selectable.update(
                    (f"{source_name}:{tag}", f"{target_name}:{tag}")
                    for tag in self._selectable_tags(mapping, target)
                )
        return [" -> ".join(image) for image in self._images if image not in selectable]


def _names_of(mapping: MappingRule, target: Registry) -> tuple[str, str]:
    """Return the full names of the source and the target repository, as in a report."""
    source = mapping.source.name_of(mapping.source_repository)
    return source, target.name_of(mapping.target_repository)
