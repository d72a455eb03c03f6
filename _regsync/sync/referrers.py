"""Which artifacts refer to an image, and which targets lack them.

Owns: the search for artifacts of docs/specification.md section 1.1, "Artifacts" (lists of referrers,
cosign's tags, artifacts of artifacts), and its filters.
May not know: how anything is copied.
Invariants: what could not be asked is an error, never "none".
Follows: docs/design.md section 6, rule 15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import anyio

from _regsync.config.model import MappingRule
from _regsync.errors import ContentError, RegistryError
from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.oci.reference import referrers_tag
from _regsync.registry.repository import Repository
from _regsync.state.archive import NO_CHECK, digest_like, hashed_key, key_of
from _regsync.state.knowledge import Knowledge
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

# The type of an artifact's config that has no content. As the type of the artifact it says nothing:
# cosign 3 writes that of its bundles where no list looks (docs/protocol-facts.md section 1.10).
_EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"

# Levels of artifacts on artifacts. Real chains have up to three; a longer one is somebody's trap.
MOST_LEVELS = 8

# Artifacts of one image.
MOST_ARTIFACTS = 10_000

# Searches for the artifacts of a subject that are kept, for other tags of the same image.
_MOST_KEPT = 1024

# Subjects that are asked about at the same time. They are few, because each answer may name 10,000
# artifacts.
_MOST_ASKED = 32


class Artifact(NamedTuple):
    """One artifact, as it is named at the source."""

    # The digest that it refers to.
    subject: str
    # Its digest, or the tag that cosign gave it.
    reference: str
    # Its entry in a list of referrers; None for a tag of cosign's.
    entry: Descriptor | None
    # Which targets lack it; None where it was not looked up, because it is known that none does.
    lookup: TagLookup | None
    # Its artifact type; of a tag of cosign's, the media types of config and layers. Empty where
    # they are not known.
    types: frozenset[str]

    @property
    def source_digest(self) -> str:
        """Its digest at the source."""
        if self.entry is not None:
            return self.entry.digest
        assert self.lookup is not None
        return self.lookup.source_digest

    def __str__(self) -> str:
        return f"{self.reference} ({', '.join(sorted(self.types)) or 'no type'}) of {self.subject}"


class FoundArtifacts(NamedTuple):
    """The artifacts of an image."""

    # The artifacts that the targets are to hold.
    copied: tuple[Artifact, ...] = ()
    # The artifacts of the source's own index where the image is trimmed: the target has no such index,
    # so they stay behind. For a dry run, all that the mapping never copies.
    stripped: tuple[Artifact, ...] = ()


class SearchedTarget(NamedTuple):
    """What is known of an image's artifacts at one target before it is asked for any."""

    repository: Repository
    # Whether the target lacks the image itself: then it lacks the artifacts too.
    is_new: bool
    # Whether it held all artifacts after the last look: then the state is believed of each.
    is_complete: bool
    # Whether that look found no referrer of the image itself, and no tag of cosign's for it. What is
    # found now has come to the source since, so that the target lacks it.
    had_no_referrers: bool
    had_no_tags: bool
    # The digests in the source's list for the image, if that is the list of the last look: the target
    # holds them. Empty where the list has changed.
    listed_before: frozenset[str] = frozenset()


class Search(NamedTuple):
    """Where the artifacts of an image are looked for, and which targets may lack them."""

    # With the platform filter off, because artifacts are copied whole.
    mapping: MappingRule
    source: Repository
    targets: tuple[SearchedTarget, ...] = ()
    # The image's digest at the source.
    top: str = ""

    @property
    def repositories(self) -> tuple[Repository, ...]:
        """The repositories of the targets."""
        return tuple(target.repository for target in self.targets)

    @property
    def is_filtered(self) -> bool:
        rule = self.mapping.artifacts
        return bool(rule.include or rule.exclude)

    def targets_for(self, subject: str) -> tuple[SearchedTarget, ...]:
        """Return what is known about the artifacts of one subject in the image."""
        if subject == self.top:
            return self.targets
        # The last look was at the list of the image itself, not at those of the manifests below it.
        return tuple(
            target._replace(had_no_referrers=False, had_no_tags=False) for target in self.targets
        )

    def wants(self, types: frozenset[str]) -> bool:
        """Say whether the filters take an artifact of these types."""
        rule = self.mapping.artifacts
        if rule.include and types.isdisjoint(rule.include):
            return False
        return types.isdisjoint(rule.exclude)


def name_of_check(
    mapping: MappingRule, source: Repository, target: Repository, *keys: bytes
) -> bytes:
    """Return the name under which the state keeps the last look at an image's artifacts at a target.

    `keys` are the keys of the image's digests at source and target. The name is empty for a directory,
    of which no state is kept.
    """
    if target.is_local:
        return b""
    # With other filters the last look says nothing, so they are in the name.
    rule = mapping.artifacts
    filters = [",".join(sorted(rule.include)), ",".join(sorted(rule.exclude))]
    digests = [key.hex() for key in keys]
    return hashed_key("artifacts", *source.key, *target.key, *digests, *filters)


class Referrers:
    """The artifacts of the images of one run; `lists` reads and writes lists of referrers."""

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
        """`wall` gives the time in seconds since 1970; `has_state` says whether this run knows what
        earlier runs left. With `recheck` all images are looked at, whatever the state says. In a run
        that `never_lists_tags` an image's tags of cosign's are asked for one by one.
        """
        self._discovery = discovery
        self._knowledge = knowledge
        self._wall = wall
        self._has_state = has_state
        self._recheck = recheck
        self._never_lists_tags = never_lists_tags
        self.lists = ReferrerLists(discovery, knowledge)

        # The artifacts of one subject, for all tags of its image (rule 7). The key has all that the
        # answer depends on.
        self._artifacts = defaultdict[object, Once[list[Artifact]]](Once)
        self._permits = anyio.CapacityLimiter(_MOST_ASKED)

    # When to look.

    def listed_cosign_tags(self, source: Repository, digest: str) -> list[str]:
        """Return the tags of cosign's for a digest that the source's listing shows."""
        listed = self._discovery.known_listing(source) or ()
        return [tag for tag in _cosign_tags(digest) if tag in listed]

    def listed_tag_bits(self, source: Repository, digest: str) -> int:
        """Return which tags with artifacts of a digest the source's listing shows, as the bits that the
        state keeps: 1 for the fallback tag, 2, 4 and 8 for cosign's. 0 where nothing was listed.
        """
        listed = self._discovery.known_listing(source) or ()
        bits = 0
        for number, tag in enumerate((referrers_tag(digest), *_cosign_tags(digest))):
            if tag in listed:
                bits |= 1 << number
        return bits

    def plan_search(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> SearchDepth:
        """Decide how much of an image is looked at for artifacts, for all its targets.

        Sets `artifact_search` of each copy without an error.
        """
        usable = self.recall_looks(mapping, copies)
        if not usable:
            return SearchDepth.NONE
        listed_tag_bits = self.listed_tag_bits(lookup.source, lookup.source_digest)
        for copy in usable:
            copy.artifact_search = copy.artifact_search._replace(listed_tag_bits=listed_tag_bits)
        if self._recheck or not all(copy.already_at_target for copy in usable):
            return SearchDepth.DEEP

        depth = self._decide_by_schedule(usable)
        was_looked_at = any(copy.artifact_search.last_check.last for copy in usable)
        was_copied = any(tag.was_copied for tag in lookup.targets)
        is_from_others = not (was_looked_at or was_copied)
        if is_from_others and lookup.is_by_digest:
            # Whoever copied the image is believed to have copied what refers to the manifests below
            # it. Only the image's digest is at hand, and a deep look would cost a GET (rule 4).
            return min(depth, SearchDepth.TOP)
        return depth

    def _decide_by_schedule(self, copies: Sequence[ImageCopy]) -> SearchDepth:
        """Decide on an image that all targets hold, by what the state says of the last looks at it."""
        now = self._wall()
        # The state knows nothing of directories.
        checks = [copy.artifact_search.last_check for copy in copies if not copy.target.is_local]
        if self._has_state and checks:
            return decide_depth(checks, copies[0].artifact_search.listed_tag_bits, now)
        is_due = is_due_without_state(copies[0].source_digest, now)
        return SearchDepth.DEEP if is_due else SearchDepth.NONE

    def recall_looks(self, mapping: MappingRule, copies: Sequence[ImageCopy]) -> list[ImageCopy]:
        """Return the copies without an error, each with what the state says of the last look at it."""
        usable = [copy for copy in copies if copy.error is None]
        for copy in usable:
            keys = (key_of(copy.source_digest), key_of(copy.digest))
            key = name_of_check(mapping, copy.source, copy.target, *keys)
            is_in_state = self._knowledge.is_manifest_believed(copy.target.pool, copy.digest)
            # A look at an image that the target has lost since does not count.
            counts = copy.already_at_target or is_in_state
            last = self._knowledge.artifact_check(key) if counts else NO_CHECK
            copy.artifact_search = ArtifactSearch(key, last)
        return usable

    def may_have_new_artifacts(
        self, mapping: MappingRule, source: Repository, target: Repository, *keys: bytes
    ) -> bool:
        """Say whether a tag that never moves may have artifacts that the target lacks. No request is
        made. `keys` are the keys of the tag's digests at source and target.
        """
        check = self._knowledge.artifact_check(name_of_check(mapping, source, target, *keys))
        listed_tag_bits = self.listed_tag_bits(source, digest_like(keys[0]))
        return depth_without_schedule(check, listed_tag_bits) is not SearchDepth.NONE

    # What is there.

    async def find(
        self,
        mapping: MappingRule,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        depth: SearchDepth,
    ) -> FoundArtifacts:
        """Return the artifacts of an image. Raises SyncError when one may be missed.

        Notes the hash of the list in the look of each copy. If a required artifact is missing, sets the error of the
        copies whose targets do not hold the image yet.
        """
        source = lookup.source
        is_deep = depth is SearchDepth.DEEP
        # A trimmed image has another top than the source's index.
        is_trimmed = lookup.digest != lookup.source_digest
        subjects = list[str]()
        if not is_trimmed:
            subjects.append(lookup.source_digest)
        if is_deep:
            subjects += await self._discovery.child_subjects(mapping, lookup)
        # The own index of a trimmed image is asked about too.
        self.lists.expect_subjects(source, len(subjects) + (1 if is_trimmed else 0))

        listed = list[str]()
        if not is_trimmed:
            referrers = await self.lists.read(source, lookup.source_digest)
            listed += [entry.digest for entry in referrers.entries]
        listing_hash = hash_of_list(listed)
        for copy in copies:
            copy.artifact_search = copy.artifact_search._replace(listing_hash=listing_hash)
        # A look is deep where the last one does not count (`decide`).
        listed_before = frozenset[str]() if is_deep else frozenset(listed)

        search = self.search_for(mapping, source, copies, listed_before)
        found = await self._artifacts_of(search, subjects, deep=is_deep)
        stripped = list[Artifact]()
        if is_trimmed:
            stripped = await self._find_stripped(search, lookup.source_digest)
        if not found:
            fail_without_artifact(mapping, lookup, copies, has_stripped=bool(stripped))
        return FoundArtifacts(tuple(found), tuple(stripped))

    async def _find_stripped(self, search: Search, index_digest: str) -> list[Artifact]:
        """Return the artifacts of an index that is trimmed on its way, and warn of them: they refer to
        an index that the target does not get.
        """
        for_no_target = search._replace(targets=())
        stripped = await self._artifacts_of(for_no_target, [index_digest], deep=False)
        if stripped:
            text = "artifacts of an index that is trimmed to `platforms` are not copied: the target has another index"
            place = f"{search.source} -> {search.mapping.target_repository}"
            self._discovery.log_once("warning", "artifacts_stripped", f"{place}: {text}")
        return stripped

    async def find_for_subject(
        self, mapping: MappingRule, tag: str, subject: str
    ) -> list[Artifact]:
        """Return the artifacts of one subject that a mapping takes; no target is asked.

        The tag does not matter here, only in a lock, where each tag's image has its own artifacts.
        """
        search = Search(mapping._replace(platforms=None), self._discovery.source_of(mapping))
        return await self._direct_artifacts(search, subject)

    def may_be_subject(self, mapping: MappingRule, tag: str, artifact: Artifact) -> bool:
        """Say whether an artifact in an image may have artifacts itself, so that it is asked about.

        What cosign's tag names may have some only where a listing shows their tags.
        """
        source = self._discovery.source_of(mapping)
        return artifact.entry is not None or bool(
            self.listed_tag_bits(source, artifact.source_digest)
        )

    async def is_at_source(self, mapping: MappingRule, artifact: Artifact) -> bool:
        """Say whether the source holds an artifact that it lists."""
        if artifact.entry is None:
            return True  # its tag has just answered
        source = self._discovery.source_of(mapping)
        return await source.head_manifest(artifact.entry.digest) is not None

    async def list_all(self, mapping: MappingRule, lookup: TagLookup) -> list[Artifact]:
        """Return the artifacts of an image that a mapping takes, each behind its subject, whatever
        targets hold. Raises SyncError when one may be missed.
        """
        subjects = await self._subjects_copied(mapping, lookup)
        self.lists.expect_subjects(lookup.source, len(subjects))
        search = Search(mapping._replace(platforms=None), lookup.source)
        return await self._artifacts_of(search, subjects, deep=True)

    async def find_left_behind(
        self, mapping: MappingRule, lookup: TagLookup
    ) -> tuple[Artifact, ...]:
        """Return the artifacts of an image that a mapping never copies, whatever the targets hold: a
        dry run names them. Raises SyncError when one may be missed.

        An artifact stays behind when the mapping takes none, when the filters refuse the artifact or
        its subject, or when its subject is left out by the platform filter.
        """
        rule = mapping.artifacts
        has_filters = bool(rule.include or rule.exclude)
        takes_all = rule.enabled and not has_filters
        if takes_all and not mapping.platforms:
            return ()

        source = lookup.source
        top = await self._discovery.manifest(source, lookup.source_digest)
        subjects = await self._subjects_below(source, top)
        copied_subjects = list[str]()
        if rule.enabled:
            copied_subjects = await self._subjects_copied(mapping, lookup)
        if takes_all:
            # Only the artifacts of what the platform filter leaves out stay behind.
            copied = set(copied_subjects)
            subjects = [digest for digest in subjects if digest not in copied]

        self.lists.expect_subjects(source, len(subjects))
        without_filters = rule._replace(include=(), exclude=())
        search = Search(mapping._replace(platforms=None, artifacts=without_filters), source)
        artifacts = await self._artifacts_of(search, subjects, deep=True)
        if takes_all:
            return tuple(artifacts)

        filtered_search = Search(mapping._replace(platforms=None), source)
        wanted = await self._artifacts_of(filtered_search, copied_subjects, deep=True)
        references = {artifact.reference for artifact in wanted}
        return tuple(artifact for artifact in artifacts if artifact.reference not in references)

    async def _subjects_copied(self, mapping: MappingRule, lookup: TagLookup) -> list[str]:
        """Return the digests that targets get of an image and that artifacts may refer to."""
        subjects = await self._discovery.child_subjects(mapping, lookup)
        if lookup.digest == lookup.source_digest:
            subjects.insert(0, lookup.source_digest)
        return subjects

    async def _subjects_below(self, source: Repository, top: Manifest) -> list[str]:
        """Return the digests of a manifest and of all below it, but for attestations.

        Only indexes are fetched: they name the others.
        """
        subjects = {top.digest: None}
        indexes = [top]
        for index in indexes:  # the list grows by the indexes that each index names
            for entry in index.children:
                if entry.attested_digest or entry.digest in subjects:
                    continue
                subjects[entry.digest] = None
                if entry.is_index and len(subjects) <= MOST_ARTIFACTS:
                    indexes.append(await self._discovery.manifest(source, entry.digest, entry))
        return list(subjects)

    def search_for(
        self,
        mapping: MappingRule,
        source: Repository,
        copies: Sequence[ImageCopy],
        listed_before: frozenset[str] = frozenset(),
    ) -> Search:
        """Return the search for an image's artifacts at the targets of these copies.

        `listed_before` has the digests of the source's list for the image. A target whose last look
        saw the same list holds them.
        """
        targets = list[SearchedTarget]()
        for copy in copies:
            if copy.error is not None:
                continue
            check = copy.artifact_search.last_check
            # With --recheck the state is believed of no artifact: targets are asked.
            is_complete = copy.already_at_target and check.is_complete and not self._recheck
            is_same_list = check.listing_hash == copy.artifact_search.listing_hash
            target = SearchedTarget(
                copy.target,
                is_new=not copy.already_at_target,
                is_complete=is_complete,
                had_no_referrers=is_complete and found_no_referrers(check),
                had_no_tags=is_complete
                and found_no_tags(check, copy.artifact_search.listed_tag_bits),
                listed_before=listed_before if is_same_list else frozenset(),
            )
            targets.append(target)
        return Search(
            mapping._replace(platforms=None), source, tuple(targets), top=copies[0].source_digest
        )

    async def _artifacts_of(
        self, search: Search, subjects: Iterable[str], *, deep: bool
    ) -> list[Artifact]:
        """Return the artifacts of these subjects that the filters take, and the artifacts of these
        artifacts, and so on. Raises SyncError.

        Without `deep` an artifact's own artifacts are not asked for when every target holds it.
        """
        source = search.source
        # The subjects of one level: first those of the image, then the artifacts of these, and so on.
        level = list(dict.fromkeys(subjects))
        # All subjects that were asked about: a chain may lead back to one.
        seen = set[str]()
        # An artifact of several subjects is in here several times.
        found = list[Artifact]()
        by_reference = dict[str, Artifact]()  # each once

        async def ask(subject: str) -> None:
            async with self._permits:
                if len(found) <= MOST_ARTIFACTS:  # else the search has failed already
                    found.extend(await self._direct_artifacts(search, subject))

        for _ in range(MOST_LEVELS):
            seen.update(level)
            await gather(partial(ask, subject) for subject in level)
            # The order does not depend on which answer came first.
            found.sort(key=lambda artifact: (artifact.subject, artifact.reference))
            by_reference.update((artifact.reference, artifact) for artifact in found)

            below = list[str]()
            for artifact in by_reference.values():
                below += await self._subjects_in(source, artifact, deep=deep)
            level = [digest for digest in dict.fromkeys(below) if digest not in seen]
            if len(found) > MOST_ARTIFACTS or len(level) > MOST_ARTIFACTS:
                break
            if not level:
                return list(by_reference.values())
            self.lists.expect_subjects(source, len(level))

        raise too_many_artifacts().with_place(source.side, "list referrers in", str(source))

    async def _subjects_in(
        self, source: Repository, artifact: Artifact, *, deep: bool
    ) -> list[str]:
        """Return the digests of an artifact that may have artifacts themselves: its own, and for an
        index those below it.
        """
        if artifact.entry is None:
            # What cosign's tag names is asked about only where a listing shows artifacts of it.
            has_tags = self.listed_tag_bits(source, artifact.source_digest) != 0
            return [artifact.source_digest] if has_tags else []
        is_at_all_targets = artifact.lookup is None
        if is_at_all_targets and not deep:
            return []
        if not artifact.entry.is_index:
            return [artifact.entry.digest]
        index = await self._discovery.manifest(source, artifact.entry.digest, artifact.entry)
        return await self._subjects_below(source, index)

    async def _direct_artifacts(self, search: Search, subject: str) -> list[Artifact]:
        """Return the artifacts of one subject, asked for once for all its tags (rule 7)."""
        if len(self._artifacts) > _MOST_KEPT:
            self._artifacts.pop(next(iter(self._artifacts)))
        targets = search.targets_for(subject)
        once = self._artifacts[search.mapping.index, search.is_filtered, targets, subject]
        return await once.get(partial(self._ask_for_artifacts, search, subject))

    async def _ask_for_artifacts(self, search: Search, subject: str) -> list[Artifact]:
        """Ask the source what refers to a subject, and the targets which of that they lack."""
        source = search.source
        entries = (await self.lists.read(source, subject)).entries
        tags = await self._cosign_tags_of(search, subject)
        if not (entries or tags or self.lists.has_api(source)):
            text = f"{source}: no artifacts found (no referrers API, no fallback tag); images are copied without"
            self._discovery.log_once("info", "no_referrers", text)

        examine = partial(self._examine, search, subject)
        questions = [
            partial(examine, entry.digest, entry)
            for entry in entries
            if entry.digest != subject  # a list may name its own subject, which is no artifact
        ]
        questions += [partial(examine, tag, None) for tag in tags]
        artifacts = await gather(questions)
        return [artifact for artifact in artifacts if artifact is not None]

    async def _cosign_tags_of(self, search: Search, subject: str) -> list[str]:
        """Return the tags of cosign's for a subject that its source has, or may have."""
        source = search.source
        cosign_tags = _cosign_tags(subject)
        listed = await self.lists.tags(source)
        if listed is not None:
            return [tag for tag in cosign_tags if tag in listed]
        if self.lists.has_api(source) is False:
            return cosign_tags  # each may be there, and is asked for
        if self._never_lists_tags and subject == search.top:
            return await self._existing_tags(source, cosign_tags)
        # A source with the API may have them as well. They are left to the runs that list it.
        return []

    async def _existing_tags(self, source: Repository, tags: Iterable[str]) -> list[str]:
        """Return those of these tags that the source has, each asked for by one HEAD."""

        async def ask(tag: str) -> str:
            try:
                await self._discovery.resolve_digest(source, tag, by_head=True)
            except RegistryError as error:
                if error.status != 404:
                    raise
                return ""
            return tag

        answers = await gather(partial(ask, tag) for tag in tags)
        return [tag for tag in answers if tag]

    async def _examine(
        self, search: Search, subject: str, reference: str, entry: Descriptor | None
    ) -> Artifact | None:
        """Find out what an artifact is and which targets lack it. None where the filters refuse it, or
        the source does not hold it. `entry` is None for a tag of cosign's.
        """
        try:
            if entry is not None:
                return await self._examine_entry(search, subject, entry)
            return await self._examine_tag(search, subject, reference)
        except RegistryError as error:
            if error.status != 404:
                raise

        # A tag of cosign's may have been asked for without a listing, or be gone since.
        if entry is not None:
            text = f"{reference} is listed as a referrer of {subject}, but missing: it is left out"
            self._discovery.log_once("warning", "referrer_missing", f"{search.source}: {text}")
        return None

    async def _examine_entry(
        self, search: Search, subject: str, entry: Descriptor
    ) -> Artifact | None:
        """Find out which targets lack an entry of a list of referrers; None where the filters refuse
        the entry, by the type in the list or by that in its manifest.
        """
        types = frozenset[str]()  # not known
        if entry.artifact_type is not None and entry.artifact_type != _EMPTY_CONFIG:
            types = frozenset({entry.artifact_type})
        elif search.is_filtered:
            # Lists of old tools have no types, and that of an empty config says nothing.
            manifest = await self._discovery.manifest(search.source, entry.digest, entry)
            types = types_of(manifest)
        if not search.wants(types):
            return None

        known_to_lack = [
            target.repository
            for target in search.targets_for(subject)
            if target.is_new or target.had_no_referrers
        ]
        lookup = await self.look_up_digest(search, entry.digest, entry, known_to_lack=known_to_lack)
        if lookup is not None and lookup.tree is not None:
            # A target lacks it, so that its manifest was fetched: what that says counts, not the list.
            manifest = lookup.tree.root
            types = types_of(manifest)
            if not search.wants(types):
                return None
            entry = entry._replace(
                artifact_type=manifest.artifact_type, annotations=manifest.annotations
            )
        return Artifact(subject, reference=entry.digest, entry=entry, lookup=lookup, types=types)

    async def look_up_digest(
        self,
        search: Search,
        digest: str,
        expected: Descriptor | None = None,
        *,
        known_to_lack: Collection[Repository] = (),
    ) -> TagLookup | None:
        """SearchDepth up an artifact by its digest; None where all targets hold it and none has to be asked.

        `expected` is its entry in a list of referrers. A target in `known_to_lack` is not asked either,
        unless the state says that it holds the artifact.
        """
        targets = [
            target.repository for target in search.targets if not self._holds(target, digest)
        ]
        if not targets:
            return None
        lacking = [
            repository
            for repository in targets
            if repository in known_to_lack
            and not self._knowledge.is_manifest_believed(repository.pool, digest)
        ]
        # The state keeps no snapshot of what is put by its digest.
        tags = [TargetTag(target, digest, snapshot_key=b"") for target in targets]
        return await self._discovery.look_up(
            search.mapping, digest, tags, known_to_lack=lacking, expected=expected
        )

    def _holds(self, target: SearchedTarget, digest: str) -> bool:
        """Say whether it is certain, without a request, that a target holds an artifact."""
        pool = target.repository.pool
        if self._knowledge.is_confirmed(pool, digest):
            return True  # this run has put or seen it there
        if digest in target.listed_before:
            return True
        # An earlier run has put or seen it there. Somebody may have removed it since, unless the last
        # look found all artifacts there.
        return target.is_complete and self._knowledge.is_manifest_believed(pool, digest)

    async def _examine_tag(self, search: Search, subject: str, tag: str) -> Artifact | None:
        """Find out which targets lack what a tag of cosign's names; None where the filters refuse it."""
        known_to_lack = [
            target.repository
            for target in search.targets_for(subject)
            if target.is_new or target.had_no_tags
        ]
        tags = self._discovery.new_target_tags(search.repositories, search.mapping, tag, tag)
        self._discovery.load_snapshots(tags)
        lookup = await self._discovery.look_up(
            search.mapping, tag, tags, known_to_lack=known_to_lack
        )
        types = frozenset[str]()
        # Where a target lacks it, its manifest is at hand. Else only filters are worth the request.
        if lookup.tree is not None or search.is_filtered:
            manifest = await self._discovery.manifest(search.source, lookup.source_digest)
            types = types_of_parts(manifest)
        if not search.wants(types):
            return None
        return Artifact(subject, reference=tag, entry=None, lookup=lookup, types=types)


def _cosign_tags(digest: str) -> list[str]:
    """Return the tags under which cosign keeps signatures, attestations and SBOMs of a digest."""
    return [referrers_tag(digest) + suffix for suffix in _COSIGN_SUFFIXES]


def types_of_parts(manifest: Manifest) -> frozenset[str]:
    """Return the types of what has a tag of cosign's: the media types of config and layers."""
    parts = (*manifest.dependencies, manifest.config)
    return frozenset(part.media_type for part in parts if part is not None)


def types_of(manifest: Manifest) -> frozenset[str]:
    """Return the artifact type of a manifest; where that is an empty config's, the media types of the
    layers as well.
    """
    if manifest.artifact_type == _EMPTY_CONFIG:
        return types_of_parts(manifest)
    if manifest.artifact_type:
        return frozenset({manifest.artifact_type})
    return frozenset()


def too_many_artifacts() -> ContentError:
    """Return the error of an image with more artifacts, or longer chains of them, than any real one."""
    limits = f"more than {MOST_ARTIFACTS} artifacts, or artifacts on artifacts more than {MOST_LEVELS} deep"
    return ContentError(limits)


def fail_without_artifact(
    mapping: MappingRule,
    lookup: TagLookup,
    copies: Sequence[ImageCopy],
    *,
    has_stripped: bool = False,
) -> None:
    """Fail the copies of an image that has no artifact, if the mapping requires one.

    A copy that its target holds already does not fail (docs/specification.md section 3).
    """
    rule = mapping.artifacts
    if not rule.require_artifacts:
        return
    text = "require_artifacts: the image has no artifact"
    if rule.include or rule.exclude:
        text += " that include and exclude allow"
    if has_stripped:
        text += "; those of the index before it is trimmed do not count"

    error = RegistryError(text, status=404)
    error.hint = "sign the image (with `platforms`, each platform's), or remove require_artifacts"
    reference = lookup.source.reference(lookup.source_digest)
    error.with_place(lookup.source.side, "list referrers of", reference)
    for copy in copies:
        if not copy.already_at_target:
            copy.error = copy.error or error
