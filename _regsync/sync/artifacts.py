"""The artifacts of images: which there are, which targets lack them, and the lists of referrers.

An artifact is found by the referrers API, or without it in the list under the fallback tag of its
subject, or under one of cosign's tags; and so are the artifacts of artifacts.
Invariants: a failed request is an error, and never counts as "no artifacts". What does not name the
subject is not an artifact of it, and an index of platforms is no list of referrers. Entries that
other clients wrote to a list under a fallback tag stay.
Follows: docs/design.md section 6, rule 15; docs/protocol-facts.md section 1.10.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import anyio

from _regsync import edge
from _regsync.config import ArtifactRule, MappingRule
from _regsync.errors import ContentError, RegistryError, SyncError
from _regsync.oci import (
    EMPTY_CONFIG,
    Descriptor,
    Manifest,
    extend_referrers_list,
    is_digest,
    referrer_entry,
    referrers_tag,
)
from _regsync.registry.repository import Repository
from _regsync.state import NO_CHECK, ArtifactCheck, Knowledge, RepositoryKey, Snapshot, hashed_key
from _regsync.sync.discovery import Discovery, TagLookup, TargetTag
from _regsync.sync.image import ImageCopy
from _regsync.sync.looks import SearchDepth, decide_depth, hash_of_list, is_due_without_state
from _regsync.sync.once import Once, gather

_T = TypeVar("_T")

_COSIGN_SUFFIXES = (".sig", ".att", ".sbom")

# Levels of artifacts on artifacts. Real chains have up to three. A longer chain may be an attack.
_MOST_LEVELS = 8

# Artifacts of one image.
_MOST_ARTIFACTS = 10_000

# Characters of the longest list that is cached. Longer lists are not cached, because each of 20,000
# images may have one.
_LONGEST_CACHED_LIST = 64 * 1024

# Attempts to add entries to a fallback list. An attempt fails if another client replaces the list.
_MOST_ATTEMPTS = 5

# These statuses say nothing about the API. The credentials lack a right.
_ACCESS_REFUSED = (401, 403)

# The statuses with which registries without the API answer (docs/design.md section 6, rule 15), but
# for a 200 with an HTML page.
_NO_API_STATUSES = (404, 405, 501)
# With one of these error codes, the answer is about the manifest or the repository, not the API.
_OTHER_CODES = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN"})

# The facts of an area: whether it has the referrers API, and whether that lists artifacts that it did
# not announce by OCI-Subject.
_HAS_API = "has_referrers_api"
_LISTS_UNANNOUNCED = "lists_unannounced"

_HINT_IF_REFUSED = (
    "an artifact, such as a signature, may hide behind what is refused here: grant the right to read"
    " it, or to list the tags, which shows what exists; or copy without artifacts (`enabled: false`"
    " under `artifacts`, `copy --no-artifacts`)"
)
_HINT_IF_NOT_KEPT = (
    "the image and its artifacts have arrived, but clients find the artifacts only by this list: use"
    " a target with the referrers API, or copy without artifacts (`enabled: false` under `artifacts`)"
)


class Artifact(NamedTuple):
    """One artifact at the source."""

    # The digest of the manifest that the artifact refers to.
    subject: str
    digest: str
    # The artifact's cosign tag. None for an artifact from a list of referrers.
    tag: str | None
    # The artifact's descriptor for a list of referrers. None for an artifact with a cosign tag.
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
        return f"{self.reference} ({', '.join(sorted(self.types)) or 'type not read'}) of {self.subject}"


class Search(NamedTuple):
    """The parameters of a search for the artifacts of an image."""

    # Has no platform filter, because artifacts are copied with all their platforms.
    mapping: MappingRule
    source: Repository
    # The copies of the image, whose targets may lack artifacts. Empty if only the source is
    # searched.
    copies: Sequence[ImageCopy] = ()
    # The image's digest at the source.
    image_digest: str = ""
    # The hash of what the source lists for the image. A target holds the artifacts in the list if
    # it is unchanged since the last search. Empty in a deep search, which looks up each artifact,
    # and searches for the artifacts of those that every target holds.
    listing_hash: str = ""

    @property
    def is_filtered(self) -> bool:
        return bool(self.mapping.artifacts.include or self.mapping.artifacts.exclude)

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
    return hashed_key("artifacts", *source.key, *target.key, *snapshot, *filters)


class ReferrerLists:
    """The lists of referrers of one run. They are written only at targets without the API."""

    def __init__(self, discovery: Discovery, knowledge: Knowledge) -> None:
        self._discovery = discovery
        self._knowledge = knowledge
        # The lists that were read, by repository and subject.
        self._lists = defaultdict[tuple[RepositoryKey, str], Once[tuple[Descriptor, ...]]](Once)
        # By area (`RepositoryKey.area`), a lock that is held while a first request finds out
        # whether the registry has the API.
        self._first_requests = defaultdict[str, anyio.Lock](anyio.Lock)
        # By target and fallback tag, a lock that is held while the list is written.
        self._writing = defaultdict[tuple[RepositoryKey, str], anyio.Lock](anyio.Lock)
        # By target and fallback tag, the digests in the list when this run last read or put it.
        self._listed_digests = dict[tuple[RepositoryKey, str], set[str]]()

    def has_api(self, repository: Repository) -> bool | None:
        """Report whether the registry has the referrers API, as a layout has. Returns None if that is
        unknown.
        """
        return repository.is_local or self._knowledge.fact(repository.key.area, _HAS_API)

    # Reading.

    async def list_tags(self, repository: Repository) -> Collection[str] | None:
        """Return the tags of a repository. Returns None if they are not listed.

        Without the API they are listed once, because to ask for the fallback tag and the three
        cosign tags of each subject costs more. Only if that is refused, each tag is asked for.
        """
        tags = self._discovery.known_listing(repository)
        if tags or self.has_api(repository) is not False:
            return tags
        try:
            return await self._discovery.list_tags(repository)
        except RegistryError as error:
            if error.is_temporary:
                raise
            return None

    async def read(self, source: Repository, subject: str) -> tuple[Descriptor, ...]:
        """Return the list of referrers of a subject, and cache it unless it is long."""
        # A lock and a layout are not asked by a request, and teach nothing about a registry.
        if source.known_tags is not None or source.is_local:
            return await source.list_referrers(subject)
        key = (source.key, subject)
        entries = await self._lists[key].get(partial(self._fetch, source, subject))
        if len(str(entries)) > _LONGEST_CACHED_LIST:
            self._lists.pop(key, None)
        return entries

    async def _fetch(self, source: Repository, subject: str) -> tuple[Descriptor, ...]:
        entries = await self._probe_api(source, subject)
        if entries is None and self.has_api(source):
            entries = await self._ask_api(source, subject)
        if entries is not None:
            return entries
        found = await self._get_fallback(source, subject, await self.list_tags(source))
        return found.children if found is not None and _is_list(found, subject) else ()

    async def _probe_api(
        self, repository: Repository, subject: str
    ) -> tuple[Descriptor, ...] | None:
        """Ask the API for the referrers of a subject, if it is unknown whether there is an API.

        Meanwhile, other requests to the area wait: if there is no API, they are not sent. Returns
        None if the API was not asked, and otherwise the result of `_ask_api`.
        """
        if self.has_api(repository) is None:
            async with self._first_requests[repository.key.area]:
                if self.has_api(repository) is None:
                    return await self._ask_api(repository, subject)
        return None

    async def _ask_api(self, repository: Repository, subject: str) -> tuple[Descriptor, ...] | None:
        """Request the referrers of a subject, and learn whether the registry has the API (rule 15).

        Returns None if the registry has no API, or if the API refuses this subject. Raises
        RegistryError for a temporary error, for a lack of rights, and for a broken answer of an API
        that is known to exist.
        """
        has_worked = self.has_api(repository)
        try:
            entries = await repository.list_referrers(subject)
        except RegistryError as error:
            # Of a working API these statuses refuse only this subject.
            is_broken_answer = has_worked and error.status not in _NO_API_STATUSES
            if error.is_temporary or error.status in _ACCESS_REFUSED or is_broken_answer:
                raise
            is_about_api = _OTHER_CODES.isdisjoint(error.codes)
            lacks_api = is_about_api and error.status in (200, *_NO_API_STATUSES)
        else:
            lacks_api = _name_platforms(entries)  # the index of an image, whatever was asked for
            if has_worked or not lacks_api:
                self._knowledge.learn(repository.key.area, _HAS_API, True)
                return entries
        if lacks_api and not has_worked:
            self._knowledge.learn(repository.key.area, _HAS_API, False)
        return None

    async def _get_fallback(
        self, repository: Repository, subject: str, tags: Collection[str] | None
    ) -> Manifest | None:
        """Return what the fallback tag of a subject names. Returns None if the tag is absent.

        `tags` are all tags of the repository, or None if they have not been listed. If they do not
        include the fallback tag, no request is sent, unless this run has read or put the tag.
        """
        tag = referrers_tag(subject)
        # This run may have put the tag since it listed the tags.
        was_used_by_this_run = (repository.key, tag) in self._listed_digests
        if tags is not None and tag not in tags and not was_used_by_this_run:
            return None
        return await unless_absent(repository.get_manifest(tag))

    # Writing.

    async def ensure_listed(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> None:
        """Add entries to a target's list of referrers for a subject, unless it has them already.

        A registry with the API maintains the list itself.
        """
        if await self._is_listed_by_api(target, subject, entries):
            return

        tag = referrers_tag(subject)
        # Tasks of this run write the list in turn, so that no task replaces the entries of another.
        async with self._writing[target.key, tag]:
            listed_digests = self._listed_digests.get((target.key, tag), set())
            if listed_digests.issuperset(entry.digest for entry in entries):
                return
            with target.adding_context("list referrers in", target.name_of(tag)):
                await self._add_to_list(source, target, subject, entries)

    async def _is_listed_by_api(
        self, target: Repository, subject: str, entries: Sequence[Descriptor]
    ) -> bool:
        """Report whether the referrers API of a target lists the artifacts of a subject itself.

        Most registries announce it in their answers to the puts. The others are asked once.
        """
        answered = await self._probe_api(target, subject)
        if not self.has_api(target):
            return False
        area = target.key.area
        if subject not in target.unannounced or self._knowledge.fact(area, _LISTS_UNANNOUNCED):
            return True
        if answered is None:
            answered = await self._ask_api(target, subject) or ()
        listed_digests = {entry.digest for entry in answered}
        is_listed = listed_digests.issuperset(entry.digest for entry in entries)
        if is_listed:
            self._knowledge.learn(area, _LISTS_UNANNOUNCED, True)
        return is_listed

    async def _add_to_list(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> None:
        """Add entries to the list under a target's fallback tag.

        Most registries cannot put a tag on condition that no other client has moved it. So each
        attempt reads the list, puts it with the missing entries, and checks that the tag names this
        list (docs/protocol-facts.md section 1.10). Raises RegistryError if the fallback tag is
        immutable, or if it never names the list, and ContentError if it names something else.
        """
        tag = referrers_tag(subject)
        for _ in range(_MOST_ATTEMPTS):
            present, missing = await self._read_target_list(target, subject, entries)
            # What refers to something else is left out, although the source lists it.
            manifests = [
                await unless_absent(self._discovery.fetch_manifest(source, digest))
                for digest in missing
            ]
            new_entries = [
                referrer_entry(each) for each in manifests if each and _refers_to(each, subject)
            ]
            if not new_entries:
                return

            merged = extend_referrers_list(present, new_entries)
            await target.put_manifest(tag, merged)
            # Another client may have replaced the list since.
            shown = await target.head_manifest(tag)
            if shown == subject:
                break  # the registry resolves the tag as the digest in its name
            if shown == merged.digest:
                self._listed_digests[target.key, tag] = {entry.digest for entry in merged.children}
                text = f"{len(new_entries)} artifacts are added to the list of referrers"
                self._discovery.log_once(
                    "info", "referrers_listed", f"{target.name_of(tag)}: {text}"
                )
                return
        raise _list_is_not_kept()

    async def _read_target_list(
        self, target: Repository, subject: str, entries: Sequence[Descriptor]
    ) -> tuple[Manifest | None, list[str]]:
        """Return the fallback list of a target for a subject, and the digests that it lacks.

        In place of the list, returns None if there is none: the tag is absent, or the registry
        resolves it as the digest in its name, and answers with the subject. Raises ContentError if
        the tag names something else.
        """
        listing = self._discovery.known_listing(target)
        present = await self._get_fallback(target, subject, listing)
        if present is not None and not _is_list(present, subject):
            if present.digest != subject:
                raise _is_no_list()
            present = None

        digests = [entry.digest for entry in present.children] if present else []
        self._listed_digests[target.key, referrers_tag(subject)] = set(digests)
        return present, [entry.digest for entry in entries if entry.digest not in digests]


class Referrers:
    """The search for the artifacts of all images of one run."""

    def __init__(
        self,
        discovery: Discovery,
        knowledge: Knowledge,
        *,
        has_state: bool = False,
        recheck: bool = False,
        never_lists_tags: bool = False,
    ) -> None:
        """Prepare the searches of one run.

        `has_state` says whether the results of earlier runs are available. With `recheck` every
        image is searched, even if the state says that its artifacts are complete. With
        `never_lists_tags` the run does not list the tags of sources, so each cosign tag of an image
        is looked up by a HEAD request.
        """
        self._discovery = discovery
        self._knowledge = knowledge
        self._has_state = has_state
        self._recheck = recheck
        self._never_lists_tags = never_lists_tags
        # Reads and writes lists of referrers.
        self.lists = ReferrerLists(discovery, knowledge)

    # When to search.

    def listed_cosign_tags(self, source: Repository, digest: str) -> list[str]:
        """Return the cosign tags of a digest that are in the source's tag listing.

        The list is empty if the source's tags have not been listed.
        """
        listed_tags = self._discovery.known_listing(source) or ()
        return [tag for tag in _cosign_tags(digest) if tag in listed_tags]

    def listed_tag_bits(self, source: Repository, digest: str) -> int:
        """Return, as bits, which tags with artifacts of a digest the source's tag listing has.

        The bits are 1 for the fallback tag; 2, 4 and 8 for the cosign tags `.sig`, `.att` and
        `.sbom`. Returns 0 if the source's tags have not been listed.
        """
        listed_tags = self._discovery.known_listing(source) or ()
        tags = [referrers_tag(digest), *_cosign_tags(digest)]
        return sum(1 << number for number, tag in enumerate(tags) if tag in listed_tags)

    def _choose_depth(
        self,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        records: Sequence[tuple[bytes, ArtifactCheck]],
    ) -> SearchDepth:
        """Decide how deep to search for the artifacts of an image. One search serves all targets.

        `records` are those of the last searches for the copies. Returns DEEP with --recheck,
        if a target lacks the image, or from a layout. Otherwise the depth follows from the records
        (`decide_depth`), or without state from the time of day. If another client has copied the
        image, the depth is at most TOP.
        """
        if self._recheck or not all(copy.already_at_target for copy in copies):
            return SearchDepth.DEEP

        now = edge.current().wall()
        locked = lookup.source.locked_parts(lookup.reference)
        if locked is not None:
            # The artifacts change only if the lock does, and cost no request to the source.
            if self._has_state:
                is_due = not all(_had_all(check, locked.artifacts) for _, check in records)
            else:
                is_due = is_due_without_state(lookup.source_digest, now)
            return SearchDepth.DEEP if is_due else SearchDepth.NONE

        # It costs no request there, and the next disk may lack what this one has brought.
        if lookup.source.is_local:
            return SearchDepth.DEEP

        kept = [check for key, check in records if key]  # nothing about image layouts
        if self._has_state and kept:
            listed_tag_bits = self.listed_tag_bits(lookup.source, lookup.source_digest)
            depth = decide_depth(kept, listed_tag_bits, now)
        else:
            is_due = is_due_without_state(lookup.source_digest, now)
            depth = SearchDepth.DEEP if is_due else SearchDepth.NONE

        is_known_to_state = any(tag.was_copied for tag in lookup.targets) or any(
            check.last for check in kept
        )
        top = self._discovery.cached_manifest(lookup.source, lookup.source_digest)
        if top is None and not is_known_to_state:
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
        check = self._knowledge.artifact_check(_search_key(mapping, source, tag.target, snapshot))
        locked = source.locked_parts(tag.reference)
        if locked is not None:
            return not _had_all(check, locked.artifacts)
        listed_tag_bits = self.listed_tag_bits(source, snapshot.source)
        return decide_depth([check], listed_tag_bits, now=None) is not SearchDepth.NONE

    # Searches.

    async def find_if_due(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]
    ) -> list[Artifact]:
        """Find the artifacts of an image that are copied, and look up which targets lack them, if that
        is due.

        `copies` are those without an error. Their `check` is set if a search was made. If
        the mapping requires an artifact and the image has none, also sets the error of each copy
        whose target lacks the image. Raises SyncError if a request fails.
        """
        source, digest = lookup.source, lookup.source_digest
        records = [self._last_record(mapping, copy) for copy in copies]
        depth = self._choose_depth(lookup, copies, records)
        if depth is SearchDepth.NONE:
            return []
        for copy, record in zip(copies, records, strict=True):
            copy.check_key, copy.check = record

        is_deep = depth is SearchDepth.DEEP
        listing_hash = hash_of_list(await self._references_of(lookup))
        search = _search_at_source(mapping, source)._replace(
            copies=copies, image_digest=digest, listing_hash="" if is_deep else listing_hash
        )
        # Who signs an image late signs its platforms with it.
        has_news = any(check.last and check.listing_hash != listing_hash for _, check in records)
        subjects = [digest]
        # No artifact refers to a trimmed index itself.
        if is_deep or has_news or lookup.is_trimmed:
            rule, whole = mapping, lookup
            if not is_deep and self._discovery.cached_manifest(source, digest) is None:
                # All targets have it, and to fetch it there uses up no quota of pulls.
                rule = search.mapping
                whole = lookup._replace(source=copies[0].target, source_digest=lookup.digest)
            subjects = await self._copied_subjects(rule, whole)
            if lookup.is_trimmed:
                subjects = [each for each in subjects if each != lookup.digest]
        copied = await self._find_transitively(search, subjects)

        listed_tag_bits = self.listed_tag_bits(source, digest)
        for copy in copies:
            copy.check = copy.check._replace(
                is_complete=True, listed_tag_bits=listed_tag_bits, listing_hash=listing_hash
            )
            # A target that has the image already keeps it (docs/specification.md section 3).
            if not copy.already_at_target and not copied and mapping.artifacts.require_artifacts:
                copy.error = _no_artifact_error(lookup)
        return copied

    def _last_record(self, mapping: MappingRule, copy: ImageCopy) -> tuple[bytes, ArtifactCheck]:
        """Return what the state says about the last search for the artifacts of a copy, and its key
        there.
        """
        snapshot = Snapshot(copy.source_digest, copy.digest)
        key = _search_key(mapping, copy.source, copy.target, snapshot)
        is_in_state = self._knowledge.is_manifest_believed(copy.target.store_key, copy.digest)
        # If the target has lost the image, the record of the last search does not count.
        is_record_valid = copy.already_at_target or is_in_state
        return key, self._knowledge.artifact_check(key) if is_record_valid else NO_CHECK

    async def _references_of(self, lookup: TagLookup) -> list[str]:
        """Return the artifacts that the source lists for an image itself: digests, cosign tags. A lock
        has those of all parts of the image.

        There are none for a trimmed index, to which no artifact refers.
        """
        locked = lookup.source.locked_parts(lookup.reference)
        if locked is not None:
            return locked.artifacts
        if lookup.is_trimmed:
            return []
        entries = await self.lists.read(lookup.source, lookup.source_digest)
        tags = await self._cosign_tags_at(lookup.source, lookup.source_digest, is_image=True)
        return [*(entry.digest for entry in entries), *tags]

    async def find_at_source(self, mapping: MappingRule, lookup: TagLookup) -> list[Artifact]:
        """Find all artifacts of an image that a mapping selects. No target is asked.

        Each artifact follows its subject in the list. Raises SyncError if a request fails.
        """
        # Of several mappings with equal sources, this may be the client of another one's registry.
        search = _search_at_source(mapping, lookup.source)
        return await self._find_transitively(search, await self._copied_subjects(mapping, lookup))

    async def find_left_behind(
        self, mapping: MappingRule, lookup: TagLookup
    ) -> tuple[Artifact, ...]:
        """Find the artifacts of an image that the mapping does not copy, for a dry run.

        An artifact is not copied if the mapping's `artifacts` are disabled, if a filter rejects the
        artifact or its subject, or if the platform filter removes its subject from the image. No
        target is asked. Raises SyncError if a request fails.
        """
        rule = mapping.artifacts
        if rule.enabled and not (rule.include or rule.exclude or mapping.platforms):
            return ()
        # A type that nothing has rejects nothing, and has types read: whoever filters wants to know them.
        no_filter = ArtifactRule(exclude=("",) if rule.include or rule.exclude else ())
        everything = mapping._replace(platforms=None, artifacts=no_filter)
        whole = lookup._replace(tree=None, digest=lookup.source_digest)
        copied = await self.find_at_source(mapping, lookup) if rule.enabled else []
        copied_references = {artifact.reference for artifact in copied}
        artifacts = await self.find_at_source(everything, whole)
        return tuple(each for each in artifacts if each.reference not in copied_references)

    async def _copied_subjects(self, mapping: MappingRule, lookup: TagLookup) -> list[str]:
        """Return the digests of an image's manifests that are copied and may have artifacts."""
        locked = lookup.source.locked_parts(lookup.reference)
        if locked is not None:
            return locked.subjects
        return await self._discovery.subjects_in(mapping, lookup)

    async def _find_transitively(self, search: Search, subjects: Iterable[str]) -> list[Artifact]:
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
        # By reference, in the order of the levels.
        found = dict[str, Artifact]()
        # The artifacts of the subjects of the current level.
        direct = list[Artifact]()

        async def collect(subject: str) -> None:
            # Above the limit the search fails anyway.
            if len(found) + len(direct) <= _MOST_ARTIFACTS:
                direct.extend(await self._direct_artifacts(search, subject))

        # One level more is searched, to find out that the artifacts of the last level have none.
        for _ in range(_MOST_LEVELS + 1):
            seen.update(level)
            direct.clear()
            await gather(partial(collect, subject) for subject in level)
            # Answers arrive in any order, but the result must not depend on it.
            direct.sort(key=lambda artifact: (artifact.subject, artifact.reference))
            new_artifacts = [each for each in direct if each.reference not in found]
            if not new_artifacts:
                return list(found.values())
            if len(found) + len(direct) > _MOST_ARTIFACTS:
                break

            below = list[str]()
            for artifact in new_artifacts:
                subjects_in = await self._subjects_in(search, artifact)
                found[artifact.reference] = artifact._replace(subjects=tuple(subjects_in))
                below += subjects_in
            level = [digest for digest in dict.fromkeys(below) if digest not in seen]
            if len(level) > _MOST_ARTIFACTS:
                break

        text = f"artifacts on artifacts more than {_MOST_LEVELS} deep"
        error = ContentError(f"more than {_MOST_ARTIFACTS} artifacts, or {text}")
        raise error.add_context(source.side, "list referrers in", str(source))

    async def _subjects_in(self, search: Search, artifact: Artifact) -> list[str]:
        """Return the digests in an artifact whose own artifacts should be searched for.

        These are the artifact's digest and, if it is an index, the digests below it. Unless the
        search is deep, the list is empty for an artifact that every target holds.
        """
        is_at_all_targets = artifact.lookup is None
        if is_at_all_targets and search.listing_hash:
            return []
        # Artifacts of the manifest under a cosign tag are worth a search only if the source's tag
        # listing shows some.
        if artifact.tag is not None and not self.listed_tag_bits(search.source, artifact.digest):
            return []
        digest = artifact.digest
        if artifact.entry is None or not artifact.entry.is_index:
            return [digest]
        whole = TagLookup(search.source, digest, None, digest, digest, targets=())
        return await self._discovery.subjects_in(search.mapping, whole)

    # The artifacts of one subject.

    async def _direct_artifacts(self, search: Search, subject: str) -> list[Artifact]:
        """Ask the source for the artifacts of a subject, and the targets for each artifact."""
        source = search.source
        entries = await self.lists.read(source, subject)
        is_image = subject == search.image_digest
        tags = await self._cosign_tags_at(source, subject, is_image=is_image)
        if not entries and not tags and not self.lists.has_api(source):
            text = f"{source}: no artifacts found (no referrers API, no fallback tag); images are copied without"
            self._discovery.log_once("info", "no_referrers", text)

        examinations = [partial(self._examine_entry, search, subject, entry) for entry in entries]
        examinations += [partial(self._examine_tag, search, subject, tag) for tag in tags]
        artifacts = await gather(examinations)
        return [artifact for artifact in artifacts if artifact is not None]

    async def _cosign_tags_at(
        self, source: Repository, subject: str, *, is_image: bool
    ) -> list[str]:
        """Return the cosign tags of a subject that the source has.

        They are looked up in the listing of the source's tags. Without a listing each is asked for,
        if the source lacks the referrers API or is a layout, or if the run never lists tags and
        `is_image` says that the subject is the image itself.
        """
        if await self.lists.list_tags(source) is not None:
            return self.listed_cosign_tags(source, subject)
        # A source with the referrers API may also have cosign tags. Asking for them would cost
        # three requests a subject, so only runs that list the source's tags find them.
        is_asked = source.is_local or (self._never_lists_tags and is_image)
        if self.lists.has_api(source) and not is_asked:
            return []

        async def is_there(tag: str) -> bool:
            request = self._discovery.resolve_digest(source, tag, by_head=True)
            return await unless_absent(request) is not None

        cosign_tags = _cosign_tags(subject)
        answers = await gather(partial(is_there, tag) for tag in cosign_tags)
        return [tag for tag, there in zip(cosign_tags, answers, strict=True) if there]

    async def _examine_entry(
        self, search: Search, subject: str, entry: Descriptor
    ) -> Artifact | None:
        """Find out the types of an entry of a list of referrers, and which targets lack the artifact.

        Returns None if the manifest is not an artifact of the subject, if the filters reject its
        types, or if the source does not hold it.
        """
        source, digest = search.source, entry.digest
        types = source.locked_types(digest)
        # An entry of a list has an artifact type and no platform. Of any other one only the
        # manifest says whether it is an artifact. Filters need the types.
        is_doubtful = not entry.artifact_type or entry.platform is not None
        if not types and entry.artifact_type not in (None, EMPTY_CONFIG):
            types = frozenset({entry.artifact_type})
        try:
            if is_doubtful or (search.is_filtered and not types):
                manifest = await self._discovery.fetch_manifest(source, digest, entry)
                types = types_of(manifest)
                if not _refers_to(manifest, subject):
                    return None
            if not search.wants(types):
                return None
            lookup = await self.look_up(search, subject, digest, entry=entry)
        except RegistryError as error:
            if error.status != 404:
                raise
            text = f"{digest} is listed as a referrer of {subject}, but missing: it is left out"
            self._discovery.log_once("warning", "referrer_missing", f"{source}: {text}")
            return None

        # If a target lacks the artifact, its manifest has been fetched. The manifest takes
        # precedence over the list.
        if lookup is not None and lookup.tree is not None:
            manifest = lookup.tree.root
            types = types_of(manifest)
            if not _refers_to(manifest, subject) or not search.wants(types):
                return None
            entry = referrer_entry(manifest)
        return Artifact(subject, digest, None, entry, lookup, types)

    async def _examine_tag(self, search: Search, subject: str, tag: str) -> Artifact | None:
        """Find out which targets lack the manifest under a cosign tag.

        Returns None if the filters reject its types, or if the source does not have the tag.
        """
        source = search.source
        lookup = await unless_absent(self.look_up(search, subject, tag))
        # A registry that resolves a tag as the digest in its name answers with the subject.
        if lookup is None or lookup.source_digest == subject:
            return None

        types = source.locked_types(lookup.source_digest)
        # If a target lacks the artifact, its manifest has been fetched and this sends no request.
        # If not, a request is worthwhile only for filters.
        if lookup.tree is not None or (search.is_filtered and not types):
            manifest = await self._discovery.fetch_manifest(source, lookup.source_digest)
            types = types_of_parts(manifest)
        if not search.wants(types):
            return None
        return Artifact(subject, lookup.source_digest, tag, None, lookup, types)

    async def look_up(
        self, search: Search, subject: str, reference: str, *, entry: Descriptor | None = None
    ) -> TagLookup | None:
        """Look up an artifact of a subject at the source and the targets.

        `reference` is the cosign tag or digest. `entry` is the artifact's entry in a list of
        referrers. Returns None if all targets are known to hold an artifact that has no cosign tag.
        """
        is_tag = not is_digest(reference)
        is_image = subject == search.image_digest
        asked, lacking = list[Repository](), list[Repository]()
        for copy in search.copies:
            where = copy.target.store_key
            is_believed = not is_tag and self._knowledge.is_manifest_believed(where, reference)
            # What earlier runs have put or seen counts only if the last search found all artifacts
            # there. With --recheck each target is asked for each artifact.
            check = copy.check
            if self._recheck or not copy.already_at_target or not check.is_complete:
                check = NO_CHECK
            is_list_unchanged = is_image and check.listing_hash == search.listing_hash
            is_held = self._knowledge.is_confirmed(where, reference) or (
                check.is_complete and (is_believed or is_list_unchanged)
            )
            if is_held and not is_tag:
                continue
            asked.append(copy.target)
            # If the last search found no artifact of the image itself, all that are found now are
            # new at the source. It has not looked for those of the manifests below the image.
            had_none = is_image and check.listing_hash == hash_of_list(())
            if (had_none or not copy.already_at_target) and not is_believed:
                lacking.append(copy.target)
        if not asked and not is_tag:
            return None

        tags = self._discovery.new_target_tags(asked, search.mapping, reference, reference)
        return await self._discovery.look_up(
            search.mapping, reference, tags, known_to_lack=lacking, expected=entry
        )


def _had_all(check: ArtifactCheck, locked: Iterable[str]) -> bool:
    """Report whether a target held exactly the artifacts of a lock after the last search."""
    return check.is_complete and check.listing_hash == hash_of_list(locked)


def _search_at_source(mapping: MappingRule, source: Repository) -> Search:
    """Build a search for the artifacts that a mapping selects at a source, which asks no target."""
    return Search(mapping._replace(platforms=None), source)


def _cosign_tags(digest: str) -> list[str]:
    """Return the tags under which cosign stores signatures, attestations and SBOMs of a digest."""
    return [referrers_tag(digest) + suffix for suffix in _COSIGN_SUFFIXES]


def _is_list(found: Manifest, subject: str) -> bool:
    """Report whether the fallback tag of a subject names a list of referrers, and not an image.

    A registry may also resolve the tag as the digest that it is made of, and answer with the
    subject.
    """
    return found.is_index and found.digest != subject and not _name_platforms(found.children)


def _name_platforms(entries: Iterable[Descriptor]) -> bool:
    """Report whether entries are those of an image's index. Those of a list have an artifact type."""
    return any(entry.platform is not None and not entry.artifact_type for entry in entries)


def _refers_to(manifest: Manifest, subject: str) -> bool:
    return manifest.subject is not None and manifest.subject.digest == subject


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
    if manifest.artifact_type == EMPTY_CONFIG:
        return types_of_parts(manifest)
    return frozenset({manifest.artifact_type} if manifest.artifact_type else ())


async def unless_absent(answer: Awaitable[_T]) -> _T | None:
    """Await an answer. Returns None if it is a 404."""
    try:
        return await answer
    except RegistryError as error:
        if error.status != 404:
            raise
    return None


def explain_refusal(error: SyncError) -> None:
    """Let the error of a look-up that the registry refuses say why the look-up matters.

    Registries may refuse a look-up only because what it asks for does not exist (Artifactory).
    """
    if isinstance(error, RegistryError) and error.status in _ACCESS_REFUSED:
        error.hint = _HINT_IF_REFUSED


def _is_no_list() -> ContentError:
    text = "this fallback tag does not hold a list of referrers, and is left as it is"
    hint = "if nothing else needs the tag, delete it: the next run puts the list"
    return ContentError(text, hint=hint)


def _list_is_not_kept() -> RegistryError:
    text = "the registry does not show the list of referrers that was put under this tag"
    error = RegistryError(text, status=409)
    error.hint = _HINT_IF_NOT_KEPT
    return error


def _no_artifact_error(lookup: TagLookup) -> SyncError:
    """Return the error for an image without artifacts whose mapping requires an artifact."""
    text = "require_artifacts: the image has no artifact that the mapping copies"
    error = RegistryError(text, status=404)
    error.hint = (
        "sign the image (with `platforms`, each platform's), or change include and exclude, or remove"
        " require_artifacts"
    )
    reference = lookup.source.name_of(lookup.source_digest)
    return error.add_context(lookup.source.side, "list referrers of", reference)
