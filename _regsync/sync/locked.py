"""A run from a lock: names, digests and artifacts of sources are the lock's.

Owns: the answers of a lock, which replace the requests for tags and referrers that other runs send
to sources. All else, from the look at a target to the copy by digest, is as in any run.
May not know: how a lock is written, or read from a file.
Invariants: no source is asked what a tag names, which tags it has, or what refers to a digest. What
is copied has the digest that the lock says, or is not copied.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from _regsync.config.model import MappingRule
from _regsync.errors import ContentError, RegistryError
from _regsync.layout.layouts import Layouts
from _regsync.oci.manifest import Descriptor, Manifest, digest_only_descriptor, referrer_entry
from _regsync.oci.reference import is_digest
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Transport
from _regsync.state.knowledge import Knowledge
from _regsync.sync.artifact_checks import SearchDepth, hash_of_list, is_due_without_state
from _regsync.sync.discovery import Discovery, SourceImage, TagLookup, TargetTag
from _regsync.sync.image import ImageCopy
from _regsync.sync.lockfile import Lock, LockedArtifact, LockedImage, source_key
from _regsync.sync.once import gather
from _regsync.sync.referrers import (
    Artifact,
    FoundArtifacts,
    Referrers,
    Search,
    fail_without_artifact,
    types_of,
    types_of_parts,
)
from _regsync.tags import Selection, select

_REMEDY = "run `regsync lock`, and review what has moved"
# A lock made without `--recheck` takes over the line of an image whose tag has not moved.
_REMEDY_FOR_LINE = "run `regsync lock --recheck`, and review what has changed"


class LockedDiscovery(Discovery):
    """The requests of a run from a lock that find out what has to be copied."""

    def __init__(
        self,
        lock: Lock,
        transport: Transport,
        knowledge: Knowledge,
        *,
        layouts: Layouts | None = None,
        reads_only: bool = False,
        wants_all_trees: bool = False,
    ) -> None:
        """Prepare to answer for sources from `lock`; all else is as in `Discovery`."""
        super().__init__(
            transport,
            knowledge,
            layouts=layouts,
            reads_only=reads_only,
            wants_all_trees=wants_all_trees,
        )
        self._lock = lock

    def locked_image(self, mapping: MappingRule, tag: str) -> LockedImage:
        """Return the image of a selected tag."""
        return self._lock.images_of(source_key(mapping))[tag]

    async def select_tags(self, mapping: MappingRule) -> Selection:
        """Return what a mapping selects of the tags in the lock."""
        return select(self._lock.images_of(source_key(mapping)), mapping.tags)

    def is_probably_absent(self, tag: TargetTag) -> bool:
        """Say that a target has the tag, so that it is asked for this one tag.

        A job without a state runs the same lock again and again. It would list its targets each time,
        and find its tags there.
        """
        return False

    async def resolve_at_source(
        self, mapping: MappingRule, reference: str, *, by_head: bool
    ) -> SourceImage:
        """Return what a tag names in the lock; a digest names itself."""
        if is_digest(reference):
            return await super().resolve_at_source(mapping, reference, by_head=by_head)
        image = self.locked_image(mapping, reference)
        return SourceImage(
            digest=image.digest, digest_at_target=image.digest_at_target, manifest=None
        )

    async def top_manifest(
        self, source: Repository, reference: str, digest: str, expected: Descriptor | None
    ) -> Manifest:
        """Fetch the manifest of a digest. If it is gone, the image fails, because what its tag names now
        has not been reviewed.
        """
        try:
            return await self.manifest(source, digest, expected)
        except RegistryError as error:
            if error.status == 404:
                is_artifact = is_digest(reference)
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
        """Fetch the manifests that some target lacks. If the trimmed index is not the one in the lock,
        the image fails.
        """
        lookup = await super()._fetch_missing_manifests(mapping, source, reference, top, tags)
        if is_digest(reference):
            return lookup
        locked_digest = self.locked_image(mapping, reference).digest_at_target
        if lookup.digest != locked_digest:
            text = f"the index trimmed to `platforms` is {lookup.digest}, but {locked_digest} in the lock"
            error = ContentError(text, hint=_REMEDY_FOR_LINE)
            raise error.with_place(source.side, "filter platforms of", source.reference(reference))
        return lookup


class LockedReferrers(Referrers):
    """The artifacts of the images of a run from a lock: those of their lines, no more."""

    # The base class takes any Discovery; this one needs the lock.
    _discovery: LockedDiscovery

    def plan_search(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> SearchDepth:
        """Decide whether targets are asked for an image's artifacts. A target that had all of them
        after an earlier run is not asked again.
        """
        usable = self.load_last_checks(mapping, copies)
        is_at_all_targets = all(copy.already_at_target for copy in usable)
        artifacts = self._locked_artifacts(mapping, lookup)
        if is_at_all_targets and not artifacts:
            return SearchDepth.NONE

        # The lock's list of artifacts takes the place of a source's, for the state too.
        listing_hash = hash_of_list(artifact.digest for artifact in artifacts)
        for copy in usable:
            copy.artifact_search = copy.artifact_search._replace(listing_hash=listing_hash)
        if self._recheck or not is_at_all_targets:
            return SearchDepth.DEEP
        if not self._has_state:
            is_due = is_due_without_state(lookup.source_digest, self._wall())
            return SearchDepth.DEEP if is_due else SearchDepth.NONE
        checks = [copy.artifact_search.last_check for copy in usable]
        had_all = all(check.is_complete and check.listing_hash == listing_hash for check in checks)
        return SearchDepth.NONE if had_all else SearchDepth.DEEP

    async def find(
        self,
        mapping: MappingRule,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        depth: SearchDepth,
    ) -> FoundArtifacts:
        """Return the artifacts of an image that its targets are to hold. Raises SyncError for one
        that is gone from the source and lacking at a target.
        """
        search = self.search_for(mapping, lookup.source, copies)
        artifacts = await gather(
            partial(self._with_types, search, artifact)
            for artifact in self._locked_artifacts(mapping, lookup)
        )
        wanted = _wanted(artifacts, search)  # now by all types
        found = await gather(partial(self._examine_locked, search, artifact) for artifact in wanted)
        if not found:
            fail_without_artifact(mapping, lookup, copies)
        return FoundArtifacts(tuple(found))

    async def find_left_behind(
        self, mapping: MappingRule, lookup: TagLookup
    ) -> tuple[Artifact, ...]:
        """Return the artifacts in an image's line that a mapping does not take."""
        image = self._discovery.locked_image(mapping, lookup.reference)
        wanted = self._locked_artifacts(mapping, lookup) if mapping.artifacts.enabled else []
        return tuple(
            _found_artifact(artifact, None)
            for artifact in image.artifacts
            if artifact not in wanted
        )

    async def find_for_subject(
        self, mapping: MappingRule, tag: str, subject: str
    ) -> list[Artifact]:
        """Return the artifacts of one subject that are in an image's line."""
        source = self._discovery.source_of(mapping)
        image = self._discovery.locked_image(mapping, tag)
        found = list[Artifact]()
        for artifact in _wanted(image.artifacts, Search(mapping, source), takes_unknown=True):
            if artifact.subject == subject:
                # The lock says the digest, and no target is asked here.
                lookup = TagLookup(
                    source,
                    reference=artifact.tag or artifact.digest,
                    tree=None,
                    digest=artifact.digest,
                    source_digest=artifact.digest,
                    targets=(),
                )
                found.append(_found_artifact(artifact, lookup))
        return found

    def may_be_subject(self, mapping: MappingRule, tag: str, artifact: Artifact) -> bool:
        """Say whether an artifact is asked about as a subject. What cosign's tag names is one only where
        the image's line has artifacts of it.
        """
        image = self._discovery.locked_image(mapping, tag)
        return artifact.entry is not None or any(
            other.subject == artifact.source_digest for other in image.artifacts
        )

    async def is_at_source(self, mapping: MappingRule, artifact: Artifact) -> bool:
        """Say that the source holds what the lock names: it is not asked."""
        return True

    def _locked_artifacts(self, mapping: MappingRule, lookup: TagLookup) -> list[LockedArtifact]:
        """Return the artifacts in an image's line that a mapping takes, as far as the lock says it."""
        image = self._discovery.locked_image(mapping, lookup.reference)
        return _wanted(image.artifacts, Search(mapping, lookup.source), takes_unknown=True)

    async def _with_types(self, search: Search, artifact: LockedArtifact) -> LockedArtifact:
        """Return an artifact with its types, if the filters need them."""
        if artifact.types or not search.is_filtered:
            return artifact
        manifest = await self._discovery.manifest(search.source, artifact.digest)
        types = types_of(manifest) if artifact.tag is None else types_of_parts(manifest)
        return artifact._replace(types=tuple(types))

    async def _examine_locked(self, search: Search, artifact: LockedArtifact) -> Artifact:
        """Find out which targets lack an artifact. Targets that lack the image are not asked."""
        digest = artifact.digest
        known_to_lack = [target.repository for target in search.targets if target.lacks_image]
        if artifact.tag is None:
            by_digest = await self.look_up_digest(search, digest, known_to_lack=known_to_lack)
            return _found_artifact(artifact, by_digest)
        # At the source the digest is fetched, whatever the tag names there now.
        tags = self._discovery.new_target_tags(
            search.repositories, search.mapping, digest, artifact.tag
        )
        self._discovery.load_snapshots(tags)
        lookup = await self._discovery.look_up(
            search.mapping, digest, tags, known_to_lack=known_to_lack
        )
        return _found_artifact(artifact, lookup)


def _found_artifact(artifact: LockedArtifact, lookup: TagLookup | None) -> Artifact:
    """Return a locked artifact in the form in which a search at the source finds artifacts."""
    entry: Descriptor | None = None
    if artifact.tag is None:
        # What a list says of it is made of its manifest, which is at hand where a target lacks it.
        entry = digest_only_descriptor(artifact.digest)
        if lookup is not None and lookup.tree is not None:
            entry = referrer_entry(lookup.tree.root)
    reference = artifact.tag or artifact.digest
    return Artifact(artifact.subject, reference, entry, lookup, frozenset(artifact.types))


def _wanted(
    artifacts: Sequence[LockedArtifact], search: Search, *, takes_unknown: bool = False
) -> list[LockedArtifact]:
    """Return the artifacts that the filters take. What refers to a refused one is refused as well.

    With `takes_unknown` an artifact is taken whose type the lock does not say: its manifest may tell.
    """
    refused = set[str]()
    wanted = list[LockedArtifact]()
    for artifact in artifacts:  # each stands behind its subject
        has_no_types = len(artifact.types) == 0
        is_taken = search.wants(frozenset(artifact.types)) or (has_no_types and takes_unknown)
        if is_taken and artifact.subject not in refused:
            wanted.append(artifact)
        else:
            refused.add(artifact.digest)
    return wanted
