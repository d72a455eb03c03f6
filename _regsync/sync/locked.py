"""Take the tags, digests and artifacts of sources from a lock instead of asking the sources.

Owns: how the lock replaces the requests for tags and referrers that other runs send to sources.
Everything else, such as the look-ups at targets and the copies by digest, is as in any run.
May not know: how a lock is written, or read from a file.
Invariants: no request is sent to a source to list tags, to resolve a tag or to list referrers. An
image is copied with the digest in the lock, or not at all.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from _regsync.config import MappingRule
from _regsync.errors import ContentError, RegistryError
from _regsync.layouts import Layouts
from _regsync.oci import Descriptor, Manifest, digest_only_descriptor, is_digest, referrer_entry
from _regsync.registry.repository import Repository
from _regsync.registry.runs import Transport
from _regsync.state import ArtifactCheck, Knowledge, Snapshot
from _regsync.sync.artifact_checks import SearchDepth, hash_of_list, is_due_without_state
from _regsync.sync.discovery import Discovery, SourceImage, TagLookup, TargetTag
from _regsync.sync.image import ArtifactSearch, ImageCopy
from _regsync.sync.lockfile import Lock, LockedArtifact, LockedImage, source_key
from _regsync.sync.once import gather
from _regsync.sync.referrers import (
    Artifact,
    FoundArtifacts,
    Referrers,
    Search,
    types_of,
    types_of_parts,
)
from _regsync.tags import Selection, select

_REMEDY = "run `regsync lock`, and review what has moved"
# Without `--recheck` a new lock reuses the line of an image whose digest has not changed.
_REMEDY_FOR_LINE = "run `regsync lock --recheck`, and review what has changed"


class LockedDiscovery(Discovery):
    """Discovery that resolves source tags from a lock."""

    def __init__(
        self,
        lock: Lock,
        transport: Transport,
        knowledge: Knowledge,
        *,
        layouts: Layouts | None = None,
        reads_only: bool = False,
    ) -> None:
        """Create a Discovery that uses `lock` for sources. `Discovery` has the other arguments."""
        super().__init__(transport, knowledge, layouts=layouts, reads_only=reads_only)
        self._lock = lock

    def locked_image(self, mapping: MappingRule, tag: str) -> LockedImage:
        """Return the image that the lock has for a selected tag."""
        return self._lock.images_of(source_key(mapping))[tag]

    async def select_tags(self, mapping: MappingRule) -> Selection:
        """Select the tags of a mapping from the tags in the lock."""
        return select(self._lock.images_of(source_key(mapping)), mapping.tags)

    def is_probably_absent(self, tag: TargetTag) -> bool:
        """Return False, so that targets are not listed for absent tags.

        A job without a state runs the same lock many times, and its targets usually have all the
        tags.
        """
        return False

    async def resolve_at_source(
        self, mapping: MappingRule, reference: str, *, by_head: bool
    ) -> SourceImage:
        """Resolve a tag from the lock. A digest resolves to itself."""
        if is_digest(reference):
            return await super().resolve_at_source(mapping, reference, by_head=by_head)
        image = self.locked_image(mapping, reference)
        return SourceImage(
            digest=image.digest, digest_at_target=image.digest_at_target, manifest=None
        )

    async def fetch_top_manifest(
        self, source: Repository, reference: str, digest: str, expected: Descriptor | None
    ) -> Manifest:
        """Fetch the manifest of `digest`.

        Raises SyncError if the manifest is gone. The tag is not resolved again, because only the
        digest in the lock has been reviewed.
        """
        try:
            return await self.fetch_manifest(source, digest, expected)
        except RegistryError as error:
            if error.status == 404:
                is_artifact = is_digest(reference)  # images are looked up by tag
                remedy = _REMEDY_FOR_LINE if is_artifact else _REMEDY
                error.hint = f"{remedy}: the source has removed what the lock names"
            raise

    async def _fetch_missing_manifests(
        self,
        mapping: MappingRule,
        source: Repository,
        reference: str,
        top: Manifest,
        tags: tuple[TargetTag, ...],
    ) -> TagLookup:
        """Fetch the manifests that some target lacks.

        Raises ContentError if the trimmed index does not have the digest in the lock.
        """
        lookup = await super()._fetch_missing_manifests(mapping, source, reference, top, tags)
        is_artifact = is_digest(reference)  # images are looked up by tag
        if is_artifact:
            return lookup  # platforms are filtered only in images
        locked_digest = self.locked_image(mapping, reference).digest_at_target
        if lookup.digest != locked_digest:
            text = f"the index trimmed to `platforms` is {lookup.digest}, but {locked_digest} in the lock"
            error = ContentError(text, hint=_REMEDY_FOR_LINE)
            raise error.add_context(source.side, "filter platforms of", source.name_of(reference))
        return lookup


class LockedReferrers(Referrers):
    """Referrers that takes the artifacts of an image from its line in a lock."""

    # The base class takes any Discovery. This class needs `locked_image`.
    _discovery: LockedDiscovery

    def prepare_search(self, mapping: MappingRule, copy: ImageCopy) -> ArtifactSearch:
        """Return the search of the base class, without the tags in the source's listing.

        The lock replaces that listing.
        """
        return super().prepare_search(mapping, copy)._replace(listed_tag_bits=0)

    def choose_depth(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> SearchDepth:
        """Return DEEP if targets are asked for the artifacts in the lock, and otherwise NONE.

        Targets are asked if a target lacks the image, with --recheck, if the state does not say
        that all targets have exactly these artifacts, or without state at certain times of day.
        They are not asked if all targets have the image and the lock has no artifacts for it.
        """
        if not all(copy.already_at_target for copy in copies):
            return SearchDepth.DEEP
        locked_artifacts = self._locked_artifacts(mapping, lookup.source, lookup.reference)
        if not locked_artifacts:
            return SearchDepth.NONE
        if self._recheck:
            return SearchDepth.DEEP

        if self._has_state:
            last_checks = [copy.artifact_search.last_check for copy in copies]
            is_due = not all(_had_all(check, locked_artifacts) for check in last_checks)
        else:
            is_due = is_due_without_state(lookup.source_digest, self._wall())
        return SearchDepth.DEEP if is_due else SearchDepth.NONE

    def may_have_new_artifacts(
        self, mapping: MappingRule, source: Repository, tag: TargetTag, snapshot: Snapshot
    ) -> bool:
        """Report whether the target may lack one of the artifacts that the lock has for a tag."""
        locked_artifacts = self._locked_artifacts(mapping, source, tag.reference)
        last_check = self.last_check(mapping, source, tag.target, snapshot)
        return bool(locked_artifacts) and not _had_all(last_check, locked_artifacts)

    async def find(
        self,
        mapping: MappingRule,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        depth: SearchDepth,
    ) -> FoundArtifacts:
        """Return the artifacts of an image in the lock, with their look-ups at targets.

        `copies` are those of `choose_depth`. `depth` is not used, because the lock has the
        artifacts of all depths. Raises SyncError if a target lacks an artifact that is gone from
        the source.
        """
        search = self.search_for(mapping, lookup, copies)
        locked_artifacts = self._locked_artifacts(mapping, lookup.source, lookup.reference)
        typed_artifacts = await gather(
            partial(self._with_types, search, artifact) for artifact in locked_artifacts
        )
        # `_locked_artifacts` includes artifacts of unknown type. Now the filters can be applied to
        # them.
        wanted = _filter_artifacts(typed_artifacts, search)
        copied = await gather(
            partial(self._look_up_locked, search, artifact) for artifact in wanted
        )
        return FoundArtifacts(tuple(copied), listing_hash=_hash_of_artifacts(locked_artifacts))

    async def find_left_behind(
        self, mapping: MappingRule, lookup: TagLookup
    ) -> tuple[Artifact, ...]:
        """Return the artifacts in an image's line that a mapping does not select.

        Returns all artifacts in the line if the mapping's `artifacts` are disabled.
        """
        image = self._discovery.locked_image(mapping, lookup.reference)
        selected = list[LockedArtifact]()
        if mapping.artifacts.enabled:
            selected = self._locked_artifacts(mapping, lookup.source, lookup.reference)
        return tuple(
            _artifact_from_lock(artifact, lookup=None)
            for artifact in image.artifacts
            if artifact not in selected
        )

    async def find_for_subject(
        self, mapping: MappingRule, tag: str, subject: str
    ) -> list[Artifact]:
        """Return the artifacts of one subject in the lock's line of a tag's image.

        Artifacts that the mapping does not select are left out.
        """
        source = self._discovery.source_of(mapping)
        # The filters see the artifacts of all subjects, because an artifact of a rejected artifact
        # is rejected too.
        return [
            _artifact_from_lock(artifact, lookup=None)
            for artifact in self._locked_artifacts(mapping, source, tag)
            if artifact.subject == subject
        ]

    def may_be_subject(self, mapping: MappingRule, tag: str, artifact: Artifact) -> bool:
        """Report whether artifacts of an artifact should be searched for.

        They always should for an artifact from a referrers list. For the manifest under a cosign
        tag they should only if the line of the image of `tag` has such artifacts.
        """
        if artifact.tag is None:
            return True
        image = self._discovery.locked_image(mapping, tag)
        return any(locked.subject == artifact.digest for locked in image.artifacts)

    async def is_at_source(self, mapping: MappingRule, artifact: Artifact) -> bool:
        """Return True without a request, because the lock names the artifact."""
        return True

    def _locked_artifacts(
        self, mapping: MappingRule, source: Repository, tag: str
    ) -> list[LockedArtifact]:
        """Return the artifacts in an image's line that a mapping may select.

        An artifact whose type is not in the lock is included, since a filter may select it.
        """
        image = self._discovery.locked_image(mapping, tag)
        return _filter_artifacts(image.artifacts, Search(mapping, source), keeps_unknown=True)

    async def _with_types(self, search: Search, artifact: LockedArtifact) -> LockedArtifact:
        """Return an artifact with its types.

        The types are fetched if the lock does not have them, unless the mapping has no filters.
        """
        if artifact.types or not search.is_filtered:
            return artifact
        manifest = await self._discovery.fetch_manifest(search.source, artifact.digest)
        types = types_of(manifest) if artifact.tag is None else types_of_parts(manifest)
        return artifact._replace(types=tuple(types))

    async def _look_up_locked(self, search: Search, artifact: LockedArtifact) -> Artifact:
        """Look up an artifact at its targets. No request is sent to targets that lack the image."""
        digest = artifact.digest
        known_to_lack = [target.repository for target in search.targets if target.lacks_image]
        if artifact.tag is None:
            by_digest = await self.look_up_digest(search, digest, known_to_lack=known_to_lack)
            return _artifact_from_lock(artifact, by_digest)
        # The artifact is fetched by its digest, because its tag at the source may have been moved.
        target_tags = self._discovery.new_target_tags(
            search.repositories, search.mapping, digest, artifact.tag
        )
        self._discovery.load_snapshots(target_tags)
        lookup = await self._discovery.look_up(
            search.mapping, digest, target_tags, known_to_lack=known_to_lack
        )
        return _artifact_from_lock(artifact, lookup)


def _hash_of_artifacts(artifacts: Iterable[LockedArtifact]) -> bytes:
    """Hash artifacts in a lock for `ArtifactCheck.listing_hash`."""
    return hash_of_list(artifact.digest for artifact in artifacts)


def _had_all(check: ArtifactCheck, artifacts: Iterable[LockedArtifact]) -> bool:
    """Report whether a target held exactly these artifacts after the last search."""
    return check.is_complete and check.listing_hash == _hash_of_artifacts(artifacts)


def _artifact_from_lock(artifact: LockedArtifact, lookup: TagLookup | None) -> Artifact:
    """Convert a locked artifact to an Artifact, as a search at the source returns it."""
    entry: Descriptor | None = None
    if artifact.tag is None:
        # A referrer list needs a complete descriptor, which is made from the manifest. The manifest
        # has been fetched if a target lacks the artifact.
        entry = digest_only_descriptor(artifact.digest)
        if lookup is not None and lookup.tree is not None:
            entry = referrer_entry(lookup.tree.root)
    return Artifact(
        artifact.subject, artifact.digest, artifact.tag, entry, lookup, frozenset(artifact.types)
    )


def _filter_artifacts(
    artifacts: Sequence[LockedArtifact], search: Search, *, keeps_unknown: bool = False
) -> list[LockedArtifact]:
    """Return the artifacts whose types pass the filters of a search.

    An artifact of an artifact that does not pass is left out too. With `keeps_unknown` an artifact
    passes if the lock does not have its types.
    """
    # The digests of the artifacts that are left out.
    refused_digests = set[str]()
    filtered = list[LockedArtifact]()
    # Each artifact follows its subject, so the subject's digest is refused before.
    for artifact in artifacts:
        is_unknown = len(artifact.types) == 0
        passes = search.wants(frozenset(artifact.types)) or (is_unknown and keeps_unknown)
        if passes and artifact.subject not in refused_digests:
            filtered.append(artifact)
        else:
            refused_digests.add(artifact.digest)
    return filtered
