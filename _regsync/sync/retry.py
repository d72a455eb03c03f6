"""Which images a run asks for again, of those that an earlier run's report names.

Owns: which mapping each of them belongs to now, what of the configuration is not needed for them.
May not know: reports, how anything is asked or copied.
Invariants: no image is asked for that the report does not name. A conflict of mappings ends as in a
run of them all (I10).
Follows: docs/design.md section 2 ("Retry").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from _regsync.config.model import Config, MappingRule, Registry
from _regsync.oci.reference import is_tag
from _regsync.sync.mappings import ALL_TAGS, WantedTag
from _regsync.tags import TagRule, select_literals, selectable


class Retry:
    """The images of a report that failed or were left undone."""

    def __init__(self, images: Iterable[tuple[str, str]]) -> None:
        """`images` are pairs of source and target, full references with host."""
        # By the names of source and target repository, the tags; ALL_TAGS may be one.
        self._tags = defaultdict[tuple[str, str], set[str]](set)
        # The other images: a digest, or one tag copied to another. Mappings select tags and keep
        # their names, so no mapping selects these.
        self._outside_mappings = list[tuple[str, str]]()

        for source, target in images:
            source_repository, source_tag = _split_tag(source)
            target_repository, target_tag = _split_tag(target)
            if source_tag and source_tag == target_tag:
                self._tags[source_repository, target_repository].add(source_tag)
            else:
                self._outside_mappings.append((source, target))

    def tags_of(self, mapping: MappingRule) -> list[str]:
        """Return the tags that are wanted of a mapping for any of its targets, ALL_TAGS among them."""
        tags = set[str]()
        for target in mapping.targets:
            tags |= self._tags_at(mapping, target)
        return sorted(tags)

    def _tags_at(self, mapping: MappingRule, target: Registry) -> set[str]:
        """Return the tags that are wanted of a mapping for one target, ALL_TAGS among them."""
        return self._tags.get(_names_of(mapping, target), set())

    def wanted(self, tags: Iterable[WantedTag]) -> list[WantedTag]:
        """Return what is wanted of these tags, each with the targets for which it is wanted."""
        chosen = list[WantedTag]()
        for wanted in tags:
            targets = tuple(target for target in wanted.targets if self._wants(wanted, target))
            if targets:
                chosen.append(wanted._replace(targets=targets))
        return chosen

    def _wants(self, wanted: WantedTag, target: Registry) -> bool:
        tags = self._tags_at(wanted.mapping, target)
        if wanted.tag == ALL_TAGS:
            return bool(tags)
        return wanted.tag in tags or ALL_TAGS in tags

    def narrowed(self, config: Config) -> Config:
        """Return the configuration without the mappings, targets and tags that no wanted image needs.

        Known tags are named one by one, so that their source is not listed; `latest` and `min_tags`
        need a listing and are not applied again. An earlier mapping that may write a wanted tag
        from another source stays as it is: the conflict has to be found again.
        """
        # By their index, the mappings that stay.
        kept = dict[int, MappingRule]()
        for mapping in config.mappings:
            narrowed = self._narrowed_mapping(mapping)
            if narrowed is not None:
                kept[mapping.index] = narrowed

        mappings_of_target = defaultdict[object, list[MappingRule]](list)
        for mapping in config.mappings:
            for target_key in mapping.target_keys:
                mappings_of_target[target_key].append(mapping)
        for narrowed in list(kept.values()):
            for target_key in narrowed.target_keys:
                for rival in mappings_of_target[target_key]:
                    if _may_win(rival, narrowed):
                        kept[rival.index] = rival

        return config._replace(mappings=tuple(kept[index] for index in sorted(kept)))

    def _narrowed_mapping(self, mapping: MappingRule) -> MappingRule | None:
        """Return a mapping with its wanted targets and tags alone; None where nothing of it is wanted."""
        tags = set[str]()
        targets = list[Registry]()
        for target in mapping.targets:
            selected = self._selected(mapping, target)
            tags |= selected
            if selected:
                targets.append(target)

        if not targets:
            return None
        rule = mapping.tags
        if ALL_TAGS not in tags:
            rule = TagRule(glob=tuple(sorted(tags)), immutable_tags=rule.immutable_tags)
        return mapping._replace(targets=tuple(targets), tags=rule)

    def _selected(self, mapping: MappingRule, target: Registry) -> set[str]:
        """Return the wanted tags that a mapping may select; all of them if ALL_TAGS is one."""
        tags = self._tags_at(mapping, target)
        return tags if ALL_TAGS in tags else set(selectable(sorted(tags), mapping.tags))

    def unselected(self, config: Config) -> list[str]:
        """Return the wanted images that no mapping selects any more."""
        selected = defaultdict[tuple[str, str], set[str]](set)
        for mapping in config.mappings:
            for target in mapping.targets:
                selected[_names_of(mapping, target)] |= self._selected(mapping, target)

        lost = [f"{source} -> {target}" for source, target in self._outside_mappings]
        for names, tags in self._tags.items():
            source_repository, target_repository = names
            for tag in sorted(tags - selected[names]):
                lost.append(f"{source_repository}:{tag} -> {target_repository}:{tag}")
        return lost


def _split_tag(reference: str) -> tuple[str, str]:
    """Split REPOSITORY:TAG, where the tag may be ALL_TAGS. The tag is empty in any other reference."""
    repository, _, tag = reference.rpartition(":")
    # Of REPOSITORY@sha256:HEX the last part would pass for a tag.
    if "@" in repository or not (tag == ALL_TAGS or is_tag(tag)):
        return reference, ""
    return repository, tag


def _names_of(mapping: MappingRule, target: Registry) -> tuple[str, str]:
    """Return the names of source and target repository as a report has them."""
    source = mapping.source.name_of(mapping.source_repository)
    return source, target.name_of(mapping.target_repository)


def _may_win(rival: MappingRule, mapping: MappingRule) -> bool:
    """Say whether a mapping that writes the same repository may own a tag that another one wants."""
    is_later = rival.index >= mapping.index
    if is_later or rival.source_key == mapping.source_key:
        return False
    # None: the wanted tags are not known before the source is listed.
    selection = select_literals(mapping.tags)
    return selection is None or bool(selectable(selection.kept, rival.tags))
