"""Find the artifacts that refer to an image, and the targets that lack them.

Owns: the search for artifacts of docs/specification.md section 1.1, "Artifacts" (referrers lists,
cosign tags, artifacts of artifacts), and its filters.
May not know: how anything is copied.
Invariants: a failed request is an error. It never counts as "no artifacts".
Follows: docs/design.md section 6, rule 15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import anyio

from _regsync.config import MappingRule
from _regsync.errors import ContentError, RegistryError, SyncError
from _regsync.oci import Descriptor, Manifest, referrers_tag
from _regsync.registry.repository import Repository
from _regsync.state import (
    NO_CHECK,
    ArtifactCheck,
    Knowledge,
    Snapshot,
    digest_like,
    hashed_key,
    key_of,
)
from _regsync.sync.artifact_checks import (
    SearchDepth,
    decide_depth,
    depth_without_schedule,
    found_no_referrers,
    found_no_tags,
    hash_of_list,
    is_due_without_state,
)
from _regsync.sync.discovery import Discovery, TagLookup, TargetTag
from _regsync.sync.image import ArtifactSearch, ImageCopy
from _regsync.sync.once import Once, gather
from _regsync.sync.referrer_lists import ReferrerLists

_COSIGN_SUFFIXES = (".sig", ".att", ".sbom")

# The media type of an empty config. Registries list it as the artifact type of cosign 3's bundles,
# which set their type elsewhere. So it does not identify the type of an artifact
# (docs/protocol-facts.md section 1.10).
_EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"

# Levels of artifacts on artifacts. Real chains have up to three. A longer chain may be an attack.
MOST_LEVELS = 8

# Artifacts of one image.
MOST_ARTIFACTS = 10_000

# Subjects whose artifacts are cached, for other tags of the same image.
_MOST_CACHED_SUBJECTS = 1024

# Subjects that are searched concurrently. The limit is low because each answer may list 10,000
# artifacts.
_MOST_CONCURRENT_SUBJECTS = 32


class Artifact(NamedTuple):
    """One artifact at the source."""

    # The digest of the manifest that the artifact refers to.
    subject: str
    digest: str
    # The artifact's cosign tag. None for an artifact from a referrers list.
    tag: str | None
    # The artifact's descriptor in a referrers list. None for an artifact with a cosign tag.
    entry: Descriptor | None
    # The targets that lack the artifact. None if every target is known to hold it without a
    # look-up.
    lookup: TagLookup | None
    # The artifact type. For a cosign tag, the media types of config and layers. Empty if unknown.
    types: frozenset[str]
    # The digests in the artifact whose own artifacts were searched for, with those below an index.
    subjects: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The name under which the artifact is copied."""
        return self.tag or self.digest

    def __str__(self) -> str:
        return f"{self.reference} ({', '.join(sorted(self.types)) or 'no type'}) of {self.subject}"


class FoundArtifacts(NamedTuple):
    """The artifacts of an image."""

    # The artifacts that the targets are to hold.
    copied: tuple[Artifact, ...] = ()
    # If the image is trimmed, the artifacts of the source's untrimmed index. They are not copied,
    # because the target does not get that index. In a dry run, all artifacts that are not copied.
    stripped: tuple[Artifact, ...] = ()
    # The hash of the digests in the source's referrers list for the image, or of the artifacts in a
    # lock (`ArtifactCheck.listing_hash`).
    listing_hash: bytes = NO_CHECK.listing_hash


class SearchedTarget(NamedTuple):
    """What is known without a request about an image's artifacts at one target."""

    repository: Repository
    # Whether the target lacks the image. If so, it also lacks the artifacts.
    lacks_image: bool
    # Whether the target held all artifacts after the last search. If so, the state is trusted for
    # each artifact.
    was_complete: bool
    # Whether the target lacks all referrers of the image itself. If the last search found the target
    # complete and found no referrers, then all that are found now are new at the source.
    lacks_referrers: bool
    # The same for cosign tags of the image itself.
    lacks_cosign_tags: bool
    # The digests in the source's referrers list for the image, if the list is unchanged since the
    # last search. The target holds these artifacts. Empty if the list has changed.
    unchanged_list: frozenset[str] = frozenset()


class Search(NamedTuple):
    """The parameters of a search for the artifacts of an image."""

    # Has no platform filter, because artifacts are copied with all their platforms.
    mapping: MappingRule
    source: Repository
    # The targets that may lack artifacts. Empty if only the source is searched.
    targets: tuple[SearchedTarget, ...] = ()
    # The image's digest at the source.
    image_digest: str = ""

    @property
    def repositories(self) -> tuple[Repository, ...]:
        return tuple(target.repository for target in self.targets)

    @property
    def is_filtered(self) -> bool:
        rule = self.mapping.artifacts
        return bool(rule.include or rule.exclude)

    def targets_for(self, subject: str) -> tuple[SearchedTarget, ...]:
        """Return what is known about the artifacts of one subject in the image."""
        if subject == self.image_digest:
            return self.targets
        # Earlier searches recorded only whether the image itself had artifacts, not the manifests
        # below it.
        return tuple(
            target._replace(
                lacks_referrers=target.lacks_image, lacks_cosign_tags=target.lacks_image
            )
            for target in self.targets
        )

    def wants(self, types: frozenset[str]) -> bool:
        """Report whether the mapping's filters accept an artifact with these types."""
        rule = self.mapping.artifacts
        if rule.include and types.isdisjoint(rule.include):
            return False
        return types.isdisjoint(rule.exclude)


def _search_key(
    mapping: MappingRule, source: Repository, target: Repository, snapshot: Snapshot
) -> bytes:
    """Return the key under which the state records searches for an image's artifacts at a target.

    `snapshot` has the image's digests at source and target. The key is empty for a target that is
    an image layout, because the state keeps nothing about layouts.
    """
    if target.is_local:
        return b""
    # A search with other filters does not count, so the filters are part of the key.
    rule = mapping.artifacts
    filters = [",".join(sorted(rule.include)), ",".join(sorted(rule.exclude))]
    digests = [snapshot.source.hex(), snapshot.pushed.hex()]
    return hashed_key("artifacts", *source.key, *target.key, *digests, *filters)


class Referrers:
    """The search for the artifacts of all images of one run."""

    def __init__(
        self,
        discovery: Discovery,
        knowledge: Knowledge,
        wall: Callable[[], float],
        *,
        has_state: bool,
        recheck: bool = False,
        never_lists_tags: bool = False,
    ) -> None:
        """Prepare the searches of one run.

        `wall` returns the time in seconds since 1970. `has_state` says whether the results of
        earlier runs are available. With `recheck` every image is searched, even if the state says
        that its artifacts are complete. With `never_lists_tags` the run does not list the tags of
        sources, so each cosign tag of an image is looked up by a HEAD request.
        """
        self._discovery = discovery
        self._knowledge = knowledge
        self._wall = wall
        self._has_state = has_state
        self._recheck = recheck
        self._never_lists_tags = never_lists_tags
        # Reads and writes referrers lists.
        self.lists = ReferrerLists(discovery, knowledge)

        # The artifacts of a subject, shared by all tags of its image (rule 7). The key is made by
        # `_direct_artifacts`.
        self._cached_artifacts = defaultdict[object, Once[list[Artifact]]](Once)
        # Limits how many subjects are searched concurrently.
        self._permits = anyio.CapacityLimiter(_MOST_CONCURRENT_SUBJECTS)

    # When to search.

    def listed_cosign_tags(self, source: Repository, digest: str) -> list[str]:
        """Return the cosign tags of a digest that are in the source's tag listing.

        The list is empty if the source's tags have not been listed.
        """
        listed = self._discovery.known_listing(source) or ()
        return [tag for tag in _cosign_tags(digest) if tag in listed]

    def listed_tag_bits(self, source: Repository, digest: str) -> int:
        """Return, as bits, which tags with artifacts of a digest the source's tag listing has.

        The bits are those of `ArtifactCheck.flags`: 1 for the fallback tag; 2, 4 and 8 for the
        cosign tags `.sig`, `.att` and `.sbom`. Returns 0 if the source's tags have not been listed.
        """
        listed_tags = self._discovery.known_listing(source) or ()
        tags_with_artifacts = [referrers_tag(digest), *_cosign_tags(digest)]
        bits = 0
        for number, tag in enumerate(tags_with_artifacts):
            if tag in listed_tags:
                bits |= 1 << number
        return bits

    def prepare_search(self, mapping: MappingRule, copy: ImageCopy) -> ArtifactSearch:
        """Return the search for the artifacts of one copy, before any request is sent.

        It has the record of the last search, and the tags with artifacts that the source's listing
        shows now. The hash of the referrers list is not known yet.
        """
        snapshot = Snapshot(key_of(copy.source_digest), key_of(copy.digest))
        key = _search_key(mapping, copy.source, copy.target, snapshot)
        is_in_state = self._knowledge.is_manifest_believed(copy.target.store_key, copy.digest)
        # If the target has lost the image, the record of the last search does not count.
        is_record_valid = copy.already_at_target or is_in_state
        return ArtifactSearch(
            key,
            last_check=self._knowledge.artifact_check(key) if is_record_valid else NO_CHECK,
            listed_tag_bits=self.listed_tag_bits(copy.source, copy.source_digest),
        )

    def choose_depth(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> SearchDepth:
        """Decide how deep to search for the artifacts of an image. One search serves all targets.

        `copies` are the copies without an error, with the result of `prepare_search` in their
        `artifact_search`.

        Returns DEEP with --recheck, or if a target lacks the image. Otherwise the depth follows
        from the records of the last searches (`decide_depth`), or without state from the time of
        day. If another client has copied the image, the depth is at most TOP.
        """
        if self._recheck or not all(copy.already_at_target for copy in copies):
            return SearchDepth.DEEP

        now = self._wall()
        pinned = self._discovery.pinned(lookup.source)
        if pinned is not None:
            # The artifacts change only if the lock does, and cost no request to the source.
            if self._has_state:
                locked = hash_of_list(pinned.artifacts_of(lookup.reference))
                checks = [copy.artifact_search.last_check for copy in copies]
                is_due = not all(_had_all(check, locked) for check in checks)
            else:
                is_due = is_due_without_state(lookup.source_digest, now)
            return SearchDepth.DEEP if is_due else SearchDepth.NONE

        # The state keeps nothing about image layouts.
        checks = [copy.artifact_search.last_check for copy in copies if not copy.target.is_local]
        if self._has_state and checks:
            # The bits are the same for all copies, because they have the same source.
            listed_tag_bits = copies[0].artifact_search.listed_tag_bits
            depth = decide_depth(checks, listed_tag_bits, now)
        else:
            is_due = is_due_without_state(lookup.source_digest, now)
            depth = SearchDepth.DEEP if is_due else SearchDepth.NONE

        is_known_to_state = any(tag.was_copied for tag in lookup.targets) or any(
            copy.artifact_search.last_check.last for copy in copies
        )
        if lookup.needed_no_manifest and not is_known_to_state:
            # Another client has copied the image, and is assumed to have copied the artifacts of
            # the manifests below it. To look for them, the image's manifest would have to be
            # fetched, which the digests have just made unnecessary (rule 4).
            return min(depth, SearchDepth.TOP)
        return depth

    def may_have_new_artifacts(
        self, mapping: MappingRule, source: Repository, tag: TargetTag, snapshot: Snapshot
    ) -> bool:
        """Report whether an immutable tag may have artifacts that the target lacks.

        `snapshot` has the tag's digests at source and target. No request is sent.
        """
        check = self.last_check(mapping, source, tag.target, snapshot)
        pinned = self._discovery.pinned(source)
        if pinned is not None:
            return not _had_all(check, hash_of_list(pinned.artifacts_of(tag.reference)))
        listed_tag_bits = self.listed_tag_bits(source, digest_like(snapshot.source))
        return depth_without_schedule(check, listed_tag_bits) is not SearchDepth.NONE

    def last_check(
        self, mapping: MappingRule, source: Repository, target: Repository, snapshot: Snapshot
    ) -> ArtifactCheck:
        """Return the record of the last search for the artifacts of an image."""
        return self._knowledge.artifact_check(_search_key(mapping, source, target, snapshot))

    # Searches.

    async def find(
        self,
        mapping: MappingRule,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        depth: SearchDepth,
    ) -> FoundArtifacts:
        """Find the artifacts of an image, and look up which targets lack them.

        `copies` and `depth` are those of `choose_depth`. Raises SyncError if a request fails.
        """
        source = lookup.source
        is_deep = depth is SearchDepth.DEEP
        if is_deep:
            subjects = await self._copied_subjects(mapping, lookup)
        else:
            subjects = [] if lookup.is_trimmed else [lookup.source_digest]
        # `_find_stripped` also reads the list of the untrimmed index.
        self.lists.expect_subjects(source, len(subjects) + (1 if lookup.is_trimmed else 0))

        # The digests in the referrers list for the image itself.
        listed_digests = list[str]()
        if not lookup.is_trimmed:
            referrers = await self.lists.read(source, lookup.source_digest)
            listed_digests += [entry.digest for entry in referrers.entries]
        # A deep search looks up each artifact, even if the list is unchanged since the last search.
        trusted_list = [] if is_deep else listed_digests
        search = self.search_for(mapping, lookup, copies, trusted_list)

        copied = await self._find_transitively(search, subjects, is_deep=is_deep)
        stripped = list[Artifact]()
        pinned = self._discovery.pinned(source)
        if pinned is not None:
            listed_digests = pinned.artifacts_of(lookup.reference)
        elif lookup.is_trimmed:
            stripped = await self._find_stripped(search, lookup.source_digest)
        return FoundArtifacts(tuple(copied), tuple(stripped), hash_of_list(listed_digests))

    async def _find_stripped(self, search: Search, index_digest: str) -> list[Artifact]:
        """Find the artifacts of the source's untrimmed index, and warn that they are not copied."""
        for_no_target = search._replace(targets=())
        stripped = await self._find_transitively(for_no_target, [index_digest], is_deep=False)
        if stripped:
            text = "artifacts of an index that is trimmed to `platforms` are not copied: the target has another index"
            mapping_text = f"{search.source} -> {search.mapping.target_repository}"
            self._discovery.log_once("warning", "artifacts_stripped", f"{mapping_text}: {text}")
        return stripped

    async def find_for_subject(self, mapping: MappingRule, subject: str) -> list[Artifact]:
        """Find the artifacts of one subject that a mapping selects. No target is asked."""
        source = self._discovery.source_of(mapping)
        return await self._direct_artifacts(_search_without_targets(mapping, source), subject)

    def may_be_subject(self, mapping: MappingRule, artifact: Artifact) -> bool:
        """Report whether artifacts of an artifact should be searched for.

        They always should for an artifact from a referrers list. For the manifest under a cosign
        tag they should only if the source's tag listing shows such artifacts.
        """
        if artifact.tag is None:
            return True
        source = self._discovery.source_of(mapping)
        return self.listed_tag_bits(source, artifact.digest) != 0

    async def is_at_source(self, mapping: MappingRule, artifact: Artifact) -> bool:
        """Report whether the source holds an artifact that it lists."""
        if artifact.tag is not None:
            return True  # the search has just read the cosign tag
        source = self._discovery.source_of(mapping)
        return await source.head_manifest(artifact.digest) is not None

    async def find_at_source(self, mapping: MappingRule, lookup: TagLookup) -> list[Artifact]:
        """Find all artifacts of an image that a mapping selects. No target is asked.

        Each artifact follows its subject in the list. Raises SyncError if a request fails.
        """
        subjects = await self._copied_subjects(mapping, lookup)
        self.lists.expect_subjects(lookup.source, len(subjects))
        # Of several mappings with equal sources, this may be the client of another one's registry.
        search = _search_without_targets(mapping, lookup.source)
        return await self._find_transitively(search, subjects, is_deep=True)

    async def find_left_behind(
        self, mapping: MappingRule, lookup: TagLookup
    ) -> tuple[Artifact, ...]:
        """Find the artifacts of an image that the mapping does not copy, for a dry run.

        An artifact is not copied if the mapping's `artifacts` are disabled, if a filter rejects the
        artifact or its subject, or if the platform filter removes its subject from the image. No
        target is asked. Raises SyncError if a request fails.
        """
        rule = mapping.artifacts
        takes_all_types = rule.enabled and not (rule.include or rule.exclude)
        if takes_all_types and not mapping.platforms:
            return ()

        source = lookup.source
        pinned = self._discovery.pinned(source)
        if pinned is not None:
            subjects = pinned.subjects_of(lookup.reference)
        else:
            top = await self._discovery.fetch_manifest(source, lookup.source_digest)
            subjects = await self._subjects_below(source, top)
        copied_subjects = await self._copied_subjects(mapping, lookup) if rule.enabled else []
        if takes_all_types:
            # All artifacts of these subjects are copied.
            fully_copied = frozenset(copied_subjects)
            subjects = [digest for digest in subjects if digest not in fully_copied]

        without_filters = mapping._replace(artifacts=rule._replace(include=(), exclude=()))
        self.lists.expect_subjects(source, len(subjects))
        artifacts = await self._find_transitively(
            _search_without_targets(without_filters, source), subjects, is_deep=True
        )
        if takes_all_types:
            return tuple(artifacts)
        copied_artifacts = await self._find_transitively(
            _search_without_targets(mapping, source), copied_subjects, is_deep=True
        )
        copied_references = {artifact.reference for artifact in copied_artifacts}
        return tuple(
            artifact for artifact in artifacts if artifact.reference not in copied_references
        )

    async def _copied_subjects(self, mapping: MappingRule, lookup: TagLookup) -> list[str]:
        """Return the digests of an image's manifests that are copied and may have artifacts."""
        pinned = self._discovery.pinned(lookup.source)
        if pinned is not None:
            return pinned.subjects_of(lookup.reference)
        child_subjects = await self._discovery.child_subjects(mapping, lookup)
        # A trimmed index has a new digest, to which no artifact refers.
        return child_subjects if lookup.is_trimmed else [lookup.source_digest, *child_subjects]

    async def _subjects_below(self, source: Repository, top: Manifest) -> list[str]:
        """Return the digests of a manifest and all manifests below it, except attestations.

        Only indexes are fetched, because other manifests have no children.
        """
        digests = {top.digest: None}  # a dict, because it keeps the order
        indexes = [top]
        for index in indexes:  # the list grows by the indexes that each index names
            for entry in index.children:
                is_attestation = bool(entry.attested_digest)
                if is_attestation or entry.digest in digests:
                    continue
                digests[entry.digest] = None
                # With more digests than the limit, the search fails anyway.
                if entry.is_index and len(digests) <= MOST_ARTIFACTS:
                    indexes.append(
                        await self._discovery.fetch_manifest(source, entry.digest, entry)
                    )
        return list(digests)

    def search_for(
        self,
        mapping: MappingRule,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        trusted_list: Sequence[str] = (),
    ) -> Search:
        """Build the search for an image's artifacts at the targets of its copies.

        `trusted_list` has the digests in the source's referrers list for the image. A target is
        trusted to hold these artifacts if the list is unchanged since the target's last search.
        """
        trusted_hash = hash_of_list(trusted_list)
        targets = list[SearchedTarget]()
        for copy in copies:
            last_check = copy.artifact_search.last_check
            listed_tag_bits = copy.artifact_search.listed_tag_bits
            # With --recheck the state is not trusted, and the targets are asked for each artifact.
            was_complete = copy.already_at_target and last_check.is_complete and not self._recheck
            had_no_referrers = was_complete and found_no_referrers(last_check)
            had_no_tags = was_complete and found_no_tags(last_check, listed_tag_bits)
            is_list_unchanged = last_check.listing_hash == trusted_hash
            lacks_image = not copy.already_at_target
            target = SearchedTarget(
                copy.target,
                lacks_image=lacks_image,
                was_complete=was_complete,
                lacks_referrers=lacks_image or had_no_referrers,
                lacks_cosign_tags=lacks_image or had_no_tags,
                unchanged_list=frozenset(trusted_list if is_list_unchanged else ()),
            )
            targets.append(target)
        return Search(
            mapping._replace(platforms=None),
            lookup.source,
            tuple(targets),
            image_digest=lookup.source_digest,
        )

    async def _find_transitively(
        self, search: Search, subjects: Iterable[str], *, is_deep: bool
    ) -> list[Artifact]:
        """Find the artifacts of these subjects, the artifacts of these artifacts, and so on.

        Returns each artifact once, after its subject. Artifacts that the filters reject are left
        out. Unless the search is deep, an artifact that every target holds is not searched for
        artifacts of its own. Raises SyncError if a request fails, or if there are too many
        artifacts.
        """
        source = search.source
        # The subjects of the current level: first those of the image, then their artifacts.
        level = list(dict.fromkeys(subjects))
        # All subjects of this and earlier levels, because a chain of artifacts may be a cycle.
        seen = set[str]()
        # All artifacts so far. An artifact of several subjects is in the list several times.
        found = list[Artifact]()
        # Each artifact once, by its reference. The order is that of the levels.
        by_reference = dict[str, Artifact]()

        async def collect(subject: str) -> None:
            async with self._permits:
                # Above the limit the search fails anyway.
                if len(found) <= MOST_ARTIFACTS:
                    found.extend(await self._direct_artifacts(search, subject))

        # One level more is searched, to find out that the artifacts of the last level have none.
        for depth in range(MOST_LEVELS + 1):
            seen.update(level)
            await gather(partial(collect, subject) for subject in level)
            # Answers arrive in any order, but the result must not depend on it.
            found.sort(key=lambda artifact: (artifact.subject, artifact.reference))
            count_before = len(by_reference)
            by_reference.update((artifact.reference, artifact) for artifact in found)
            is_too_deep = depth == MOST_LEVELS and len(by_reference) > count_before
            if is_too_deep:
                break

            below = list[str]()
            for reference, artifact in by_reference.items():
                subjects_in = await self._subjects_in(source, artifact, is_deep=is_deep)
                by_reference[reference] = artifact._replace(subjects=tuple(subjects_in))
                below += subjects_in
            level = [digest for digest in dict.fromkeys(below) if digest not in seen]
            has_too_many = len(found) > MOST_ARTIFACTS or len(level) > MOST_ARTIFACTS
            if has_too_many:
                break
            if not level:
                return list(by_reference.values())
            self.lists.expect_subjects(source, len(level))

        raise too_many_artifacts().add_context(source.side, "list referrers in", str(source))

    async def _subjects_in(
        self, source: Repository, artifact: Artifact, *, is_deep: bool
    ) -> list[str]:
        """Return the digests in an artifact whose own artifacts should be searched for.

        These are the artifact's digest and, if it is an index, the digests below it. Unless the
        search is deep, the list is empty for an artifact that every target holds.
        """
        if artifact.entry is None:
            # For a cosign tag, a search is worth its requests only if the listing shows a result.
            has_tags = self.listed_tag_bits(source, artifact.digest) != 0
            return [artifact.digest] if has_tags else []
        is_at_all_targets = artifact.lookup is None
        if is_at_all_targets and not is_deep:
            return []
        if not artifact.entry.is_index:
            return [artifact.entry.digest]
        index = await self._discovery.fetch_manifest(source, artifact.entry.digest, artifact.entry)
        return await self._subjects_below(source, index)

    async def _direct_artifacts(self, search: Search, subject: str) -> list[Artifact]:
        """Find the artifacts that refer to a subject directly. They may be cached (rule 7)."""
        if len(self._cached_artifacts) > _MOST_CACHED_SUBJECTS:
            # Drop the oldest subject.
            self._cached_artifacts.pop(next(iter(self._cached_artifacts)))
        # All inputs of the search. The mapping's index stands for its source.
        key = (search.mapping.index, search.mapping.artifacts, search.targets_for(subject), subject)
        cached = self._cached_artifacts[key]
        return await cached.get(partial(self._fetch_direct_artifacts, search, subject))

    async def _fetch_direct_artifacts(self, search: Search, subject: str) -> list[Artifact]:
        """Ask the source for the artifacts of a subject, and the targets for each artifact."""
        source = search.source
        entries = (await self.lists.read(source, subject)).entries
        tags = await self._possible_cosign_tags(search, subject)
        has_none = not entries and not tags
        if has_none and not self.lists.has_api(source):
            text = f"{source}: no artifacts found (no referrers API, no fallback tag); images are copied without"
            self._discovery.log_once("info", "no_referrers", text)

        # A list may name its own subject, which is not an artifact.
        examinations = [
            partial(self._examine_entry, search, subject, entry)
            for entry in entries
            if entry.digest != subject
        ]
        examinations += [partial(self._examine_tag, search, subject, tag) for tag in tags]
        artifacts = await gather(examinations)
        return [artifact for artifact in artifacts if artifact is not None]

    async def _possible_cosign_tags(self, search: Search, subject: str) -> list[str]:
        """Return the cosign tags of a subject to look up at the source.

        If the source's tags are listed, they are the tags in the listing. Otherwise they are all
        cosign tags if the source lacks the referrers API, or the tags that exist if the run never
        lists tags.
        """
        source = search.source
        cosign_tags = _cosign_tags(subject)
        listed_tags = await self.lists.list_tags_if_cheap(source)
        if listed_tags is not None:
            return [tag for tag in cosign_tags if tag in listed_tags]
        if self.lists.has_api(source) is False:
            return cosign_tags
        if self._never_lists_tags and subject == search.image_digest:
            return await self._existing_tags(source, cosign_tags)
        # A source with the referrers API may also have cosign tags. Asking for them would cost
        # three requests a subject, so only runs that list the source's tags find them.
        return []

    async def _existing_tags(self, source: Repository, tags: Sequence[str]) -> list[str]:
        """Return the tags that exist at the source. Each tag costs a HEAD request."""

        async def tag_exists(tag: str) -> bool:
            try:
                await self._discovery.resolve_digest(source, tag, by_head=True)
            except RegistryError as error:
                if error.status != 404:
                    raise
                return False
            return True

        answers = await gather(partial(tag_exists, tag) for tag in tags)
        return [tag for tag, exists in zip(tags, answers, strict=True) if exists]

    async def _examine_entry(
        self, search: Search, subject: str, entry: Descriptor
    ) -> Artifact | None:
        """Find out the types of an entry of a referrers list, and which targets lack the artifact.

        Returns None if the filters reject the types, or if the source does not hold the artifact.
        """
        targets = search.targets_for(subject)
        known_to_lack = [target.repository for target in targets if target.lacks_referrers]
        try:
            types = await self._types_of_entry(search, entry)
            if not search.wants(types):
                return None
            lookup = await self.look_up_digest(
                search, entry.digest, entry, known_to_lack=known_to_lack
            )
        except RegistryError as error:
            if error.status != 404:
                raise
            text = (
                f"{entry.digest} is listed as a referrer of {subject}, but missing: it is left out"
            )
            self._discovery.log_once("warning", "referrer_missing", f"{search.source}: {text}")
            return None

        # If a target lacks the artifact, its manifest has been fetched. The manifest takes
        # precedence over the list.
        if lookup is not None and lookup.tree is not None:
            manifest = lookup.tree.root
            types = types_of(manifest)
            if not search.wants(types):
                return None
            entry = entry._replace(
                artifact_type=manifest.artifact_type, annotations=manifest.annotations
            )
        return Artifact(subject, entry.digest, None, entry, lookup, types)

    async def _types_of_entry(self, search: Search, entry: Descriptor) -> frozenset[str]:
        """Return the types of an entry, which are empty if the list does not say the type.

        If the search has filters, they need the types, so the manifest is fetched instead.
        """
        pinned = self._discovery.pinned(search.source)
        if pinned is not None and (types := pinned.types_of(entry.digest)):
            return types
        if entry.artifact_type is not None and entry.artifact_type != _EMPTY_CONFIG:
            return frozenset({entry.artifact_type})
        if not search.is_filtered:
            return frozenset()
        return types_of(await self._discovery.fetch_manifest(search.source, entry.digest, entry))

    async def look_up_digest(
        self,
        search: Search,
        digest: str,
        expected: Descriptor | None = None,
        *,
        known_to_lack: Collection[Repository] = (),
    ) -> TagLookup | None:
        """Look up an artifact by its digest at the source and the targets.

        `expected` is the artifact's entry in a referrers list. A target in `known_to_lack` is not
        asked, unless the state says that it holds the artifact. Returns None if all targets are
        known to hold the artifact.
        """
        repositories = [
            target.repository
            for target in search.targets
            if not self._is_known_to_hold(target, digest)
        ]
        if not repositories:
            return None
        not_asked = [
            repository
            for repository in known_to_lack
            if not self._knowledge.is_manifest_believed(repository.store_key, digest)
        ]
        # The state keeps snapshots only of tags, so a digest has no snapshot key.
        target_tags = [
            TargetTag(repository, digest, snapshot_key=b"") for repository in repositories
        ]
        return await self._discovery.look_up(
            search.mapping, digest, target_tags, known_to_lack=not_asked, expected=expected
        )

    def _is_known_to_hold(self, target: SearchedTarget, digest: str) -> bool:
        """Report whether a target is known to hold an artifact. No request is sent."""
        where = target.repository.store_key
        has_been_seen_by_this_run = self._knowledge.is_confirmed(where, digest)
        if has_been_seen_by_this_run or digest in target.unchanged_list:
            return True
        # What earlier runs have put or seen counts only if the last search found all artifacts
        # there.
        return target.was_complete and self._knowledge.is_manifest_believed(where, digest)

    async def _examine_tag(self, search: Search, subject: str, tag: str) -> Artifact | None:
        """Find out which targets lack the manifest under a cosign tag.

        Returns None if the filters reject its types, or if the source does not have the tag.
        """
        targets = search.targets_for(subject)
        known_to_lack = [target.repository for target in targets if target.lacks_cosign_tags]
        target_tags = self._discovery.new_target_tags(search.repositories, search.mapping, tag, tag)
        self._discovery.load_snapshots(target_tags)
        types = frozenset[str]()
        try:
            lookup = await self._discovery.look_up(
                search.mapping, tag, target_tags, known_to_lack=known_to_lack
            )
            digest = lookup.source_digest
            pinned = self._discovery.pinned(search.source)
            if pinned is not None:
                types = pinned.types_of(digest)
            # If a target lacks the artifact, its manifest has been fetched and this sends no
            # request. If not, a request is worthwhile only for filters.
            if lookup.tree is not None or (search.is_filtered and not types):
                types = types_of_parts(await self._discovery.fetch_manifest(search.source, digest))
        except RegistryError as error:
            if error.status != 404:
                raise
            return None
        if not search.wants(types):
            return None
        return Artifact(subject, digest, tag, None, lookup, types)


def _had_all(check: ArtifactCheck, locked: bytes) -> bool:
    """Report whether a target held exactly the artifacts of a lock after the last search.

    `locked` is their `hash_of_list`.
    """
    return check.is_complete and check.listing_hash == locked


def _search_without_targets(mapping: MappingRule, source: Repository) -> Search:
    """Build a search for the artifacts that a mapping selects at a source, which asks no target."""
    return Search(mapping._replace(platforms=None), source)


def _cosign_tags(digest: str) -> list[str]:
    """Return the tags under which cosign stores signatures, attestations and SBOMs of a digest."""
    return [referrers_tag(digest) + suffix for suffix in _COSIGN_SUFFIXES]


def types_of_parts(manifest: Manifest) -> frozenset[str]:
    """Return the media types of a manifest's config, layers and children.

    The filters match these types for a cosign tag, whose manifest has no artifact type.
    """
    parts = (*manifest.dependencies, manifest.config)
    return frozenset(part.media_type for part in parts if part is not None)


def types_of(manifest: Manifest) -> frozenset[str]:
    """Return the types of an artifact that the filters match.

    This is the artifact type. If that is the type of an empty config, the media types of the layers
    are added.
    """
    if manifest.artifact_type == _EMPTY_CONFIG:
        return types_of_parts(manifest)
    if manifest.artifact_type:
        return frozenset({manifest.artifact_type})
    return frozenset()


def too_many_artifacts() -> ContentError:
    """Return the error for an image that exceeds MOST_ARTIFACTS or MOST_LEVELS."""
    limits = f"more than {MOST_ARTIFACTS} artifacts, or artifacts on artifacts more than {MOST_LEVELS} deep"
    return ContentError(limits)


def no_artifact_error(
    mapping: MappingRule, lookup: TagLookup, artifacts: FoundArtifacts
) -> SyncError | None:
    """Return the error for an image without artifacts whose mapping requires an artifact.

    Returns None if the image has an artifact, or if the mapping does not require one.
    """
    rule = mapping.artifacts
    if artifacts.copied or not rule.require_artifacts:
        return None
    text = "require_artifacts: the image has no artifact"
    if rule.include or rule.exclude:
        text += " that include and exclude allow"
    if artifacts.stripped:
        text += "; those of the index before it is trimmed do not count"

    error = RegistryError(text, status=404)
    error.hint = "sign the image (with `platforms`, each platform's), or remove require_artifacts"
    reference = lookup.source.name_of(lookup.source_digest)
    return error.add_context(lookup.source.side, "list referrers of", reference)
