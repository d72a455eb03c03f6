"""Narrow a run to the images that failed or were left undone in an earlier run.

Owns: which mapping each of these images belongs to now; which parts of the configuration they need.
May not know: reports, how requests are sent, how images are copied.
Invariants: an image that is not in the report is not copied. A conflict of mappings ends as in a
run of all mappings (I10).
Follows: docs/design.md section 2 ("Retry").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from _regsync.config import Config, MappingRule, Registry
from _regsync.oci import is_tag
from _regsync.sync.mappings import ALL_TAGS, WantedTag
from _regsync.tags import TagRule, select_literals, selectable


class _RepositoryNames(NamedTuple):
    """The full names of a source and a target repository, as in a report."""

    source: str
    target: str


class Retry:
    """The images of a report that failed or were left undone."""

    def __init__(self, images: Iterable[tuple[str, str]]) -> None:
        """`images` are pairs of source and target, as full references with host."""
        # By source and target repository, the tags to retry. ALL_TAGS is among them if the tags of
        # a mapping could not be listed.
        self._tags = defaultdict[_RepositoryNames, set[str]](set)
        # Source and target of each image that no mapping can select: a digest, or a tag that was
        # copied to another tag.
        self._outside_mappings = list[tuple[str, str]]()

        for source, target in images:
            source_repository, source_tag = _split_tag(source)
            target_repository, target_tag = _split_tag(target)
            if source_tag and source_tag == target_tag:
                names = _RepositoryNames(source_repository, target_repository)
                self._tags[names].add(source_tag)
            else:
                self._outside_mappings.append((source, target))

    def tags_of(self, mapping: MappingRule) -> list[str]:
        """Return the tags of a mapping to retry at any target, sorted, perhaps with ALL_TAGS."""
        tags = set[str]()
        for target in mapping.targets:
            tags |= self._tags_at(mapping, target)
        return sorted(tags)

    def _tags_at(self, mapping: MappingRule, target: Registry) -> set[str]:
        """Return the tags of a mapping to retry at one target. ALL_TAGS may be among them."""
        return self._tags.get(_names_of(mapping, target), set())

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
        if wanted.tag == ALL_TAGS:
            return bool(tags)
        return wanted.tag in tags or ALL_TAGS in tags

    def narrow(self, config: Config) -> Config:
        """Return the configuration with only the mappings, targets and tags that the retry needs.

        The tags are listed in the mappings by name, so that sources need not be listed. `latest`
        and `min_tags` need a listing, so they are not applied again. An earlier mapping that may
        write one of the tags from another source is kept whole, so that the conflict is detected
        again.
        """
        narrowed_mappings = list[MappingRule]()
        for mapping in config.mappings:
            narrowed = self._narrow_mapping(mapping)
            if narrowed is not None:
                narrowed_mappings.append(narrowed)

        # By index. If a mapping is both narrowed and a rival, the whole mapping is needed.
        needed_mappings = {mapping.index: mapping for mapping in narrowed_mappings}
        for rival in _rivals_of(narrowed_mappings, config.mappings):
            needed_mappings[rival.index] = rival
        return config._replace(
            mappings=tuple(needed_mappings[index] for index in sorted(needed_mappings))
        )

    def _narrow_mapping(self, mapping: MappingRule) -> MappingRule | None:
        """Return a mapping with only the tags and targets to retry. Returns None if it has none."""
        tags = set[str]()
        targets = list[Registry]()
        for target in mapping.targets:
            target_tags = self._selectable_tags(mapping, target)
            tags |= target_tags
            if target_tags:
                targets.append(target)

        if not targets:
            return None
        rule = mapping.tags
        if ALL_TAGS not in tags:
            # Names without a wildcard, which a run selects without a listing of the source.
            rule = TagRule(glob=tuple(sorted(tags)), immutable_tags=rule.immutable_tags)
        return mapping._replace(targets=tuple(targets), tags=rule)

    def _selectable_tags(self, mapping: MappingRule, target: Registry) -> set[str]:
        """Return the tags to retry at a target that the mapping can select.

        If ALL_TAGS is among the tags to retry, all of them are returned.
        """
        tags = self._tags_at(mapping, target)
        return tags if ALL_TAGS in tags else set(selectable(sorted(tags), mapping.tags))

    def find_unselected(self, config: Config) -> list[str]:
        """Return `SOURCE -> TARGET` for each image to retry that no mapping can select any more."""
        # The tags to retry that a mapping can select, by source and target repository.
        selectable_tags = defaultdict[_RepositoryNames, set[str]](set)
        for mapping in config.mappings:
            for target in mapping.targets:
                names = _names_of(mapping, target)
                selectable_tags[names] |= self._selectable_tags(mapping, target)

        unselected = [f"{source} -> {target}" for source, target in self._outside_mappings]
        for names, tags in self._tags.items():
            for tag in sorted(tags - selectable_tags[names]):
                unselected.append(f"{names.source}:{tag} -> {names.target}:{tag}")
        return unselected


def _split_tag(reference: str) -> tuple[str, str]:
    """Split REPOSITORY:TAG into repository and tag. The tag may be ALL_TAGS.

    Returns an empty tag if the reference does not have this form.
    """
    repository, _, tag = reference.rpartition(":")
    # In REPOSITORY@sha256:HEX the part after the colon is a valid tag.
    if "@" in repository or not (tag == ALL_TAGS or is_tag(tag)):
        return reference, ""
    return repository, tag


def _names_of(mapping: MappingRule, target: Registry) -> _RepositoryNames:
    return _RepositoryNames(
        source=mapping.source.name_of(mapping.source_repository),
        target=target.name_of(mapping.target_repository),
    )


def _rivals_of(
    mappings: Iterable[MappingRule], all_mappings: Iterable[MappingRule]
) -> Iterator[MappingRule]:
    """Yield each mapping that may win a conflict over a tag to retry, perhaps several times."""
    mappings_of_target = defaultdict[object, list[MappingRule]](list)
    for mapping in all_mappings:
        for target_key in mapping.target_keys:
            mappings_of_target[target_key].append(mapping)

    for mapping in mappings:
        for target_key in mapping.target_keys:
            for rival in mappings_of_target[target_key]:
                if _may_win(rival, mapping):
                    yield rival


def _may_win(rival: MappingRule, mapping: MappingRule) -> bool:
    """Report whether `rival` may win a conflict with `mapping` over a tag to retry.

    Both mappings write the same target repository. Of two mappings with different sources the
    earlier one wins.
    """
    if rival.index >= mapping.index or rival.source_key == mapping.source_key:
        return False
    selection = select_literals(mapping.tags)
    if selection is None:
        return True  # the tags to retry are not known before the source is listed
    return bool(selectable(selection.kept, rival.tags))
