"""The artifacts of images: which there are, which targets lack them, and the lists of referrers.

An artifact is found by the referrers API, or without it in the list under the fallback tag of its
subject, or under one of cosign's tags; and so are the artifacts of artifacts.
Invariants: a failed request is an error, and never counts as "no artifacts". What does not name the
subject is not an artifact of it, and an index of platforms is no list of referrers. Entries that
other clients wrote to a list under a fallback tag stay.
Follows: docs/design.md section 6, rule 15; docs/protocol-facts.md section 1.10.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import anyio

from _regsync.config import MappingRule
from _regsync.errors import ContentError, RegistryError, SyncError
from _regsync.oci import (
    Descriptor,
    Manifest,
    extend_referrers_list,
    is_digest,
    referrer_entry,
    referrers_tag,
)
from _regsync.registry.repository import Repository, is_immutable
from _regsync.state import NO_CHECK, ArtifactCheck, Knowledge, RepositoryKey, Snapshot, hashed_key
from _regsync.sync.discovery import Discovery, TagLookup, TargetTag
from _regsync.sync.image import ArtifactSearch, ImageCopy
from _regsync.sync.looks import (
    SearchDepth,
    decide_depth,
    depth_without_schedule,
    hash_of_list,
    is_due_without_state,
)
from _regsync.sync.once import Once, gather

_T = TypeVar("_T")

_COSIGN_SUFFIXES = (".sig", ".att", ".sbom")

# The media type of an empty config. Registries list it as the artifact type of cosign 3's bundles,
# which set their type elsewhere. So it does not identify the type of an artifact
# (docs/protocol-facts.md section 1.10).
_EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"

# Levels of artifacts on artifacts. Real chains have up to three. A longer chain may be an attack.
MOST_LEVELS = 8

# Artifacts of one image.
MOST_ARTIFACTS = 10_000

# Subjects that are searched concurrently. The limit is low because each answer may list 10,000
# artifacts.
_MOST_CONCURRENT_SUBJECTS = 32

# Characters of the longest list that is cached. Longer lists are not cached, because each of 20,000
# images may have one.
_LONGEST_CACHED_LIST = 64 * 1024

# Attempts to add entries to a fallback list. An attempt fails if another client replaces the list.
_MOST_ATTEMPTS = 5

# These statuses say nothing about the API. The credentials lack a right.
_ACCESS_REFUSED = (401, 403)

# The statuses with which registries without the API answer (docs/design.md section 6, rule 15). The
# body of a 200 is an HTML page.
_NO_API_STATUSES = (200, 404, 405, 501)
# With one of these error codes, the answer is about the manifest or the repository, not the API.
_OTHER_CODES = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN"})

# The facts of an area: whether it has the referrers API, and whether that lists artifacts that it did
# not announce by OCI-Subject.
_HAS_API = "has_referrers_api"
_LISTS_UNANNOUNCED = "lists_unannounced"

_HINT_IF_REFUSED = (
    "an artifact, such as a signature, may hide behind what is refused here: grant the right to read"
    " it; or select tags by a pattern, whose listing shows which of these tags exist; or copy"
    " without artifacts (`enabled: false` under `artifacts`, `copy --no-artifacts`)"
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
        return f"{self.reference} ({', '.join(sorted(self.types)) or 'no type'}) of {self.subject}"


class FoundArtifacts(NamedTuple):
    """The artifacts of an image."""

    # The artifacts that the targets are to hold.
    copied: tuple[Artifact, ...] = ()
    # If the image is trimmed, the artifacts of the source's untrimmed index. They are not copied,
    # because the target does not get that index. In a dry run, all artifacts that are not copied.
    stripped: tuple[Artifact, ...] = ()
    # The hash of the digests in the source's list of referrers for the image, or of the artifacts
    # in a lock (`ArtifactCheck.listing_hash`).
    listing_hash: bytes = NO_CHECK.listing_hash


class SearchedTarget(NamedTuple):
    """What is known without a request about an image's artifacts at one target."""

    repository: Repository
    # Whether the target lacks the image. If so, it also lacks the artifacts.
    lacks_image: bool
    # The record of the last search, after which the target held all artifacts. NO_CHECK if it did
    # not, or with --recheck, when the target is asked for each artifact.
    last_check: ArtifactCheck


class Search(NamedTuple):
    """The parameters of a search for the artifacts of an image."""

    # Has no platform filter, because artifacts are copied with all their platforms.
    mapping: MappingRule
    source: Repository
    # The targets that may lack artifacts. Empty if only the source is searched.
    targets: tuple[SearchedTarget, ...] = ()
    # The image's digest at the source, and which tags with artifacts of it the source's listing
    # shows (`Referrers.listed_tag_bits`).
    image_digest: str = ""
    listed_tag_bits: int = 0
    # The hash of the source's list of referrers for the image. A target holds the artifacts in the
    # list if it is unchanged since the last search. Empty in a deep search, which looks up each
    # artifact, and searches for the artifacts of those that every target holds.
    listing_hash: bytes = b""

    @property
    def is_filtered(self) -> bool:
        return bool(self.mapping.artifacts.include or self.mapping.artifacts.exclude)

    def wants(self, types: frozenset[str]) -> bool:
        """Report whether the mapping's filters accept an artifact with these types."""
        rule = self.mapping.artifacts
        if rule.include and types.isdisjoint(rule.include):
            return False
        return types.isdisjoint(rule.exclude)

    def is_list_unchanged(self, target: SearchedTarget, subject: str) -> bool:
        """Report whether the subject is the image, and its list the same as at the last search."""
        is_image = subject == self.image_digest
        return is_image and target.last_check.listing_hash == self.listing_hash

    def is_lacking(self, target: SearchedTarget, subject: str, *, is_tag: bool) -> bool:
        """Report whether a target is known to lack the referrers of a subject, or its cosign tags.

        If the last search found none of the image itself, all that are found now are new at the
        source. It has not looked for those of the manifests below the image.
        """
        if target.lacks_image or subject != self.image_digest:
            return target.lacks_image
        if not is_tag:
            return target.last_check.listing_hash == hash_of_list(())
        # Only a listing shows that there was no tag. If it has none now, the source may not be
        # listed in any run.
        had_none = target.last_check.is_complete and not target.last_check.listed_tag_bits
        return had_none and self.listed_tag_bits != 0


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


class ReferrerList(NamedTuple):
    """The list of referrers of a subject in one repository."""

    entries: tuple[Descriptor, ...]
    # The index under the fallback tag. None if the API has returned the list, or if there is none.
    fallback: Manifest | None = None


class ReferrerLists:
    """The lists of referrers of one run. They are written only at targets without the API."""

    def __init__(self, discovery: Discovery, knowledge: Knowledge) -> None:
        self._discovery = discovery
        self._knowledge = knowledge
        # The lists that were read, by repository and subject.
        self._lists = defaultdict[tuple[RepositoryKey, str], Once[ReferrerList]](Once)
        # By repository, the number of subjects whose lists this run has read or will read.
        self._subject_counts = Counter[RepositoryKey]()
        # By area (`RepositoryKey.area`), a lock that is held while a first request finds out
        # whether the registry has the API.
        self._first_requests = defaultdict[str, anyio.Lock](anyio.Lock)
        # By target and fallback tag, a lock that is held while the list is written.
        self._writing = defaultdict[tuple[RepositoryKey, str], anyio.Lock](anyio.Lock)
        # By target and fallback tag, the digests in the list when this run last read or put it.
        self._listed_digests = dict[tuple[RepositoryKey, str], set[str]]()

    def has_api(self, repository: Repository) -> bool | None:
        """Report whether the registry has the referrers API. Returns None if that is unknown."""
        return self._knowledge.fact(repository.key.area, _HAS_API)

    # Reading.

    def expect_subjects(self, source: Repository, count: int) -> None:
        """Announce that the lists of `count` more subjects will be read at a source."""
        self._subject_counts[source.key] += count

    async def list_tags_if_cheap(self, source: Repository) -> Collection[str] | None:
        """Return the tags of a source. Returns None if they are unknown, and a listing would cost
        more requests than it saves, or is refused.

        Without the API, each subject costs four requests: for the fallback tag and three cosign
        tags. If there are two subjects or more, a listing costs less.
        """
        tags = self._discovery.known_listing(source)
        lacks_api = self.has_api(source) is False
        if tags is not None or not lacks_api or self._subject_counts[source.key] < 2:
            return tags
        try:
            return await self._discovery.list_tags(source)
        except RegistryError as error:
            if error.retryable:
                raise
            return None

    async def read(self, source: Repository, subject: str) -> ReferrerList:
        """Return the list of referrers of a subject, and cache it unless it is long."""
        pinned = self._discovery.pinned(source)
        if pinned is not None:  # nothing is learnt about the registry
            return ReferrerList(await pinned.list_referrers(subject))
        key = (source.key, subject)
        referrers = await self._lists[key].get(partial(self._fetch, source, subject))
        if len(str(referrers.entries)) > _LONGEST_CACHED_LIST:
            self._lists.pop(key, None)
        return referrers

    async def _fetch(self, source: Repository, subject: str) -> ReferrerList:
        with _explaining_refusals():
            entries = await self._probe_api(source, subject)
            if entries is None and self.has_api(source):
                entries = await self._ask_api(source, subject)
            if entries is not None:
                return ReferrerList(entries)

            tags = await self.list_tags_if_cheap(source)
            found = await self._get_fallback(source, subject, tags)
        if found is None or not _is_list(found, subject):
            return ReferrerList(())
        return ReferrerList(found.children, found)

    async def _probe_api(
        self, repository: Repository, subject: str
    ) -> tuple[Descriptor, ...] | None:
        """Ask the API for the referrers of a subject, if it is unknown whether there is an API.

        Meanwhile, other requests to the area wait: if there is no API, they are not sent. Returns
        None if the API was not asked, and otherwise the result of `_ask_api`.
        """
        if self.has_api(repository) is not None:
            return None
        async with self._first_requests[repository.key.area]:
            if self.has_api(repository) is not None:
                return None
            return await self._ask_api(repository, subject)

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
            # A 200 without an index. Any other status of a working API refuses only this subject.
            is_broken_answer = has_worked and error.status == 200
            if error.retryable or error.status in _ACCESS_REFUSED or is_broken_answer:
                raise
            is_about_api = _OTHER_CODES.isdisjoint(error.codes)
            lacks_api = is_about_api and error.status in _NO_API_STATUSES
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
        return await _unless_absent(repository.get_manifest(tag))

    # Writing.

    async def ensure_listed(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> set[str]:
        """Add entries to a target's list of referrers for a subject. Returns the added digests.

        The set is empty if the list has all entries already, or if the registry has the API and so
        maintains the list itself.
        """
        with _explaining_refusals():
            answered = await self._probe_api(target, subject)
            if self.has_api(target) and await self._is_listed(target, subject, entries, answered):
                return set()

        tag = referrers_tag(subject)
        # Tasks of this run write the list in turn, so that no task replaces the entries of another.
        async with self._writing[target.key, tag]:
            listed_digests = self._listed_digests.get((target.key, tag), set())
            if listed_digests.issuperset(entry.digest for entry in entries):
                return set()
            with target.adding_context("list referrers in", target.name_of(tag)):
                return await self._add_to_list(source, target, subject, entries)

    async def _is_listed(
        self,
        target: Repository,
        subject: str,
        entries: Sequence[Descriptor],
        answered: tuple[Descriptor, ...] | None,
    ) -> bool:
        """Report whether the referrers API of a target lists the artifacts of a subject itself.

        Most registries announce it in their answers to the puts. The others are asked once, unless
        they have `answered` just now.
        """
        where = target.key.area
        if subject not in target.unannounced or self._knowledge.fact(where, _LISTS_UNANNOUNCED):
            return True
        if answered is None:
            answered = await target.list_referrers(subject)
        listed_digests = {entry.digest for entry in answered}
        is_listed = listed_digests.issuperset(entry.digest for entry in entries)
        if is_listed:
            self._knowledge.learn(where, _LISTS_UNANNOUNCED, True)
        return is_listed

    async def _add_to_list(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> set[str]:
        """Add entries to the list under a target's fallback tag. Returns the added digests.

        Most registries cannot put a tag on condition that no other client has moved it. So each
        attempt reads the list, puts it with the missing entries, and checks that the tag names this
        list (docs/protocol-facts.md section 1.10). Raises RegistryError if the fallback tag is
        immutable, if other clients have replaced the list after each attempt, or if the registry
        never shows the list, and ContentError if the tag names something else.
        """
        tag = referrers_tag(subject)
        # The digests that were missing in any attempt.
        added_digests = set[str]()
        puts = 0
        refusal: RegistryError | None = None
        shown_digest: str | None = None
        while puts < _MOST_ATTEMPTS:
            present, missing = await self._read_target_list(
                source, target, subject, entries, was_put=puts > 0
            )
            if self._discovery.reads_only:
                return set(missing)
            # What refers to something else is left out, although the source lists it.
            manifests = [await self._manifest_of(source, digest) for digest in missing]
            new_entries = [
                referrer_entry(each) for each in manifests if each and _refers_to(each, subject)
            ]
            if not new_entries:
                return added_digests
            if refusal is not None:
                raise refusal

            added_digests |= {entry.digest for entry in new_entries}
            merged = self._merged_list(source, subject, present, new_entries)
            try:
                await target.put_manifest(tag, merged)
            except RegistryError as error:
                if not is_immutable(error):
                    raise
                # The list may be complete: another client has put it, or the answer to an earlier
                # put of this run was lost.
                refusal = error
                continue
            puts += 1
            # Another client may have replaced the list since.
            shown_digest = await target.head_manifest(tag)
            if shown_digest == merged.digest:
                self._listed_digests[target.key, tag] = {entry.digest for entry in merged.children}
                return added_digests

        if shown_digest is None:
            raise _list_is_not_kept()
        raise RegistryError("another client keeps replacing this list of referrers", status=409)

    async def _manifest_of(self, where: Repository, digest: str) -> Manifest | None:
        return await _unless_absent(self._discovery.fetch_manifest(where, digest))

    async def _read_target_list(
        self,
        source: Repository,
        target: Repository,
        subject: str,
        entries: Sequence[Descriptor],
        *,
        was_put: bool,
    ) -> tuple[Manifest | None, list[str]]:
        """Return the fallback list of a target for a subject, and the digests that it lacks.

        In place of the list, returns None if there is none: the tag is absent, or the registry
        resolves it as the digest in its name, and answers with the subject. Raises ContentError if
        the tag names something else. `was_put` says that this run has put a list under the tag:
        then the registry does not keep it, which is a RegistryError.
        """
        with _explaining_refusals():
            listing = self._discovery.known_listing(target)
            present = await self._get_fallback(target, subject, listing)
        if present is not None and not _is_list(present, subject):
            if was_put:
                raise _list_is_not_kept()
            if present.digest != subject:
                raise _is_no_list()
            present = None

        digests = [entry.digest for entry in present.children] if present else []
        self._listed_digests[target.key, referrers_tag(subject)] = set(digests)
        missing = [entry.digest for entry in entries if entry.digest not in digests]
        if digests and len(missing) == len(entries):
            # It has nothing of what the source lists, and may be the list of another subject.
            first = self._discovery.cached_manifest(source, digests[0])
            first = first or await self._manifest_of(target, digests[0])
            if first is not None and not _refers_to(first, subject):
                raise _list_is_not_kept() if was_put else _is_no_list()
        return present, missing

    def _merged_list(
        self,
        source: Repository,
        subject: str,
        present: Manifest | None,
        new_entries: Sequence[Descriptor],
    ) -> Manifest:
        """Return the target's present list, extended with new entries.

        If the target has no list and the source's list has exactly these entries, returns the
        source's list, so that both lists have the same digest.
        """
        # A tuple of the source's list. It is empty if this run has not read the list or has dropped
        # it.
        cached_list = self._lists[source.key, subject].answer
        source_index = cached_list[0].fallback if cached_list else None
        if present is None and source_index is not None:
            source_entries = {entry.digest: entry for entry in source_index.dependencies}
            if source_entries == {entry.digest: entry for entry in new_entries}:
                return source_index
        return extend_referrers_list(present, new_entries)


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
        # Reads and writes lists of referrers.
        self.lists = ReferrerLists(discovery, knowledge)
        # Limits how many subjects are searched concurrently.
        self._permits = anyio.CapacityLimiter(_MOST_CONCURRENT_SUBJECTS)

    # When to search.

    def listed_cosign_tags(self, source: Repository, digest: str) -> list[str]:
        """Return the cosign tags of a digest that are in the source's tag listing.

        The list is empty if the source's tags have not been listed.
        """
        listed_tags = self._discovery.known_listing(source) or ()
        return [tag for tag in _cosign_tags(digest) if tag in listed_tags]

    def listed_tag_bits(self, source: Repository, digest: str) -> int:
        """Return, as bits, which tags with artifacts of a digest the source's tag listing has.

        The bits are 1 for the fallback tag; 2, 4 and 8 for the
        cosign tags `.sig`, `.att` and `.sbom`. Returns 0 if the source's tags have not been listed.
        """
        listed_tags = self._discovery.known_listing(source) or ()
        tags = [referrers_tag(digest), *_cosign_tags(digest)]
        return sum(1 << number for number, tag in enumerate(tags) if tag in listed_tags)

    def prepare_search(self, mapping: MappingRule, copy: ImageCopy) -> ArtifactSearch:
        """Return the search for the artifacts of one copy, before any request is sent.

        It has the record of the last search, and the tags with artifacts that the source's listing
        shows now. The hash of the list of referrers is not known yet.
        """
        snapshot = Snapshot(copy.source_digest, copy.digest)
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
            depth = decide_depth(checks, copies[0].artifact_search.listed_tag_bits, now)
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
        listed_tag_bits = self.listed_tag_bits(source, snapshot.source)
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
        # Of a trimmed image, the list of the untrimmed index is read too.
        self.lists.expect_subjects(source, len(subjects) + (1 if lookup.is_trimmed else 0))

        # The digests in the list of referrers for the image itself.
        listed_digests = list[str]()
        if not lookup.is_trimmed:
            referrers = await self.lists.read(source, lookup.source_digest)
            listed_digests += [entry.digest for entry in referrers.entries]
        listing_hash = hash_of_list(listed_digests)
        search = self.search_for(mapping, lookup, copies, b"" if is_deep else listing_hash)
        copied = await self._find_transitively(search, subjects)

        stripped = list[Artifact]()
        pinned = self._discovery.pinned(source)
        if pinned is not None:
            listing_hash = hash_of_list(pinned.artifacts_of(lookup.reference))
        elif lookup.is_trimmed:
            # Not deep: the artifacts of what is stripped do not count.
            at_source = search._replace(targets=(), listing_hash=listing_hash)
            stripped = await self._find_transitively(at_source, [lookup.source_digest])
        if stripped:
            text = "artifacts of an index that is trimmed to `platforms` are not copied: the target has another index"
            mapping_text = f"{source} -> {mapping.target_repository}"
            self._discovery.log_once("warning", "artifacts_stripped", f"{mapping_text}: {text}")
        return FoundArtifacts(tuple(copied), tuple(stripped), listing_hash)

    def search_for(
        self,
        mapping: MappingRule,
        lookup: TagLookup,
        copies: Sequence[ImageCopy],
        listing_hash: bytes = b"",
    ) -> Search:
        """Build the search for an image's artifacts at the targets of its copies.

        `listing_hash` is that of the source's list of referrers for the image (`Search`).
        """
        targets = list[SearchedTarget]()
        for copy in copies:
            check = copy.artifact_search.last_check
            is_trusted = copy.already_at_target and check.is_complete and not self._recheck
            trusted_check = check if is_trusted else NO_CHECK
            targets.append(SearchedTarget(copy.target, not copy.already_at_target, trusted_check))
        source, digest = lookup.source, lookup.source_digest
        tag_bits = self.listed_tag_bits(source, digest)
        whole = mapping._replace(platforms=None)
        return Search(whole, source, tuple(targets), digest, tag_bits, listing_hash)

    async def find_for_subject(self, mapping: MappingRule, subject: str) -> list[Artifact]:
        """Find the artifacts of one subject that a mapping selects. No target is asked."""
        source = self._discovery.source_of(mapping)
        return await self._direct_artifacts(_search_without_targets(mapping, source), subject)

    def may_be_subject(self, mapping: MappingRule, artifact: Artifact) -> bool:
        """Report whether artifacts of an artifact should be searched for.

        They always should for an artifact from a list of referrers. For the manifest under a cosign
        tag a search is worth its requests only if the source's tag listing shows such artifacts.
        """
        source = self._discovery.source_of(mapping)
        return artifact.tag is None or self.listed_tag_bits(source, artifact.digest) != 0

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
        return await self._find_of_subjects(mapping, lookup.source, subjects)

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
        whole = mapping._replace(platforms=None, artifacts=rule._replace(include=(), exclude=()))
        pinned = self._discovery.pinned(source)
        if pinned is not None:
            subjects = pinned.subjects_of(lookup.reference)
        else:
            subjects = await self._subjects_in_manifest(whole, source, lookup.source_digest)
        copied_subjects = await self._copied_subjects(mapping, lookup) if rule.enabled else []
        copied = list[Artifact]()
        if takes_all_types:
            # All artifacts of the copied subjects are copied.
            subjects = [digest for digest in subjects if digest not in copied_subjects]
        else:
            copied = await self._find_of_subjects(mapping, source, copied_subjects)
        artifacts = await self._find_of_subjects(whole, source, subjects)
        copied_references = {artifact.reference for artifact in copied}
        return tuple(each for each in artifacts if each.reference not in copied_references)

    async def _find_of_subjects(
        self, mapping: MappingRule, source: Repository, subjects: Sequence[str]
    ) -> list[Artifact]:
        # Of several mappings with equal sources, this may be the client of another one's registry.
        self.lists.expect_subjects(source, len(subjects))
        search = _search_without_targets(mapping, source)
        return await self._find_transitively(search, subjects)

    async def _copied_subjects(self, mapping: MappingRule, lookup: TagLookup) -> list[str]:
        """Return the digests of an image's manifests that are copied and may have artifacts."""
        pinned = self._discovery.pinned(lookup.source)
        if pinned is not None:
            return pinned.subjects_of(lookup.reference)
        child_subjects = await self._discovery.child_subjects(mapping, lookup)
        # A trimmed index has a new digest, to which no artifact refers.
        return child_subjects if lookup.is_trimmed else [lookup.source_digest, *child_subjects]

    async def _subjects_in_manifest(
        self, mapping: MappingRule, source: Repository, digest: str
    ) -> list[str]:
        """Return a digest and those of all manifests below it, except attestations."""
        whole = TagLookup(
            source, digest, tree=None, digest=digest, source_digest=digest, targets=()
        )
        return [digest, *await self._discovery.child_subjects(mapping, whole)]

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
            async with self._permits:
                # Above the limit the search fails anyway.
                if len(found) + len(direct) <= MOST_ARTIFACTS:
                    direct.extend(await self._direct_artifacts(search, subject))

        # One level more is searched, to find out that the artifacts of the last level have none.
        for depth in range(MOST_LEVELS + 1):
            seen.update(level)
            direct.clear()
            await gather(partial(collect, subject) for subject in level)
            # Answers arrive in any order, but the result must not depend on it.
            direct.sort(key=lambda artifact: (artifact.subject, artifact.reference))
            new_artifacts = [each for each in direct if each.reference not in found]
            is_too_deep = depth == MOST_LEVELS and len(new_artifacts) > 0
            if is_too_deep or len(found) + len(direct) > MOST_ARTIFACTS:
                break

            below = list[str]()
            for artifact in new_artifacts:
                subjects_in = await self._subjects_in(search, artifact)
                found[artifact.reference] = artifact._replace(subjects=tuple(subjects_in))
                below += subjects_in
            level = [digest for digest in dict.fromkeys(below) if digest not in seen]
            if not level:
                return list(found.values())
            if len(level) > MOST_ARTIFACTS:
                break
            self.lists.expect_subjects(source, len(level))

        raise too_many_artifacts().add_context(source.side, "list referrers in", str(source))

    async def _subjects_in(self, search: Search, artifact: Artifact) -> list[str]:
        """Return the digests in an artifact whose own artifacts should be searched for.

        These are the artifact's digest and, if it is an index, the digests below it. Unless the
        search is deep, the list is empty for an artifact that every target holds.
        """
        if artifact.entry is None:
            # For a cosign tag, a search is worth its requests only if the listing shows a result.
            is_signed = self.listed_tag_bits(search.source, artifact.digest) != 0
            return [artifact.digest] if is_signed else []
        is_at_all_targets = artifact.lookup is None
        if is_at_all_targets and search.listing_hash:
            return []
        if not artifact.entry.is_index:
            return [artifact.digest]
        return await self._subjects_in_manifest(search.mapping, search.source, artifact.digest)

    # The artifacts of one subject.

    async def _direct_artifacts(self, search: Search, subject: str) -> list[Artifact]:
        """Ask the source for the artifacts of a subject, and the targets for each artifact."""
        source = search.source
        entries = (await self.lists.read(source, subject)).entries
        tags = await self._possible_cosign_tags(search, subject)
        if not entries and not tags and not self.lists.has_api(source):
            text = f"{source}: no artifacts found (no referrers API, no fallback tag); images are copied without"
            self._discovery.log_once("info", "no_referrers", text)

        examinations = [partial(self._examine_entry, search, subject, entry) for entry in entries]
        examinations += [partial(self._examine_tag, search, subject, tag) for tag in tags]
        with _explaining_refusals():
            artifacts = await gather(examinations)
        return [artifact for artifact in artifacts if artifact is not None]

    async def _possible_cosign_tags(self, search: Search, subject: str) -> list[str]:
        """Return the cosign tags of a subject to look up at the source.

        If the source's tags are listed, they are the tags in the listing. Otherwise they are all
        cosign tags, if the source lacks the referrers API or the run never lists tags.
        """
        cosign_tags = _cosign_tags(subject)
        listed_tags = await self.lists.list_tags_if_cheap(search.source)
        if listed_tags is not None:
            return [tag for tag in cosign_tags if tag in listed_tags]
        # A source with the referrers API may also have cosign tags. Asking for them would cost
        # three requests a subject, so only runs that list the source's tags find them.
        is_copied_by_hand = self._never_lists_tags and subject == search.image_digest
        lacks_api = self.lists.has_api(search.source) is False
        return cosign_tags if lacks_api or is_copied_by_hand else []

    async def _examine_entry(
        self, search: Search, subject: str, entry: Descriptor
    ) -> Artifact | None:
        """Find out the types of an entry of a list of referrers, and which targets lack the artifact.

        Returns None if the manifest is not an artifact of the subject, if the filters reject its
        types, or if the source does not hold it.
        """
        source, digest = search.source, entry.digest
        types = frozenset[str]()
        # An entry of a list has an artifact type and no platform. Of any other one only the
        # manifest says whether it is an artifact. Filters need the types.
        is_doubtful = not entry.artifact_type or entry.platform is not None
        pinned = self._discovery.pinned(source)
        if pinned is not None:
            types, is_doubtful = pinned.types_of(digest), False
        elif entry.artifact_type and entry.artifact_type != _EMPTY_CONFIG:
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
        if self._never_lists_tags and self.lists.has_api(source):
            # The source probably has no such tag, and then the targets are not asked.
            request = self._discovery.resolve_digest(source, tag, by_head=True)
            if await _unless_absent(request) is None:
                return None
        lookup = await _unless_absent(self.look_up(search, subject, tag))
        # A registry that resolves a tag as the digest in its name answers with the subject.
        if lookup is None or lookup.source_digest == subject:
            return None

        pinned = self._discovery.pinned(source)
        types = pinned.types_of(lookup.source_digest) if pinned is not None else frozenset[str]()
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
        asked, lacking = list[Repository](), list[Repository]()
        for target in search.targets:
            where = target.repository.store_key
            is_believed = not is_tag and self._knowledge.is_manifest_believed(where, reference)
            # What earlier runs have put or seen counts only if the last search found all artifacts
            # there.
            is_held = (
                self._knowledge.is_confirmed(where, reference)
                or search.is_list_unchanged(target, subject)
                or (target.last_check.is_complete and is_believed)
            )
            if is_held and not is_tag:
                continue
            asked.append(target.repository)
            if search.is_lacking(target, subject, is_tag=is_tag) and not is_believed:
                lacking.append(target.repository)
        if not asked and not is_tag:
            return None

        tags = self._discovery.new_target_tags(asked, search.mapping, reference, reference)
        if is_tag:  # the state keeps snapshots only of tags
            self._discovery.load_snapshots(tags)
        return await self._discovery.look_up(
            search.mapping, reference, tags, known_to_lack=lacking, expected=entry
        )


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
    if manifest.artifact_type == _EMPTY_CONFIG:
        return types_of_parts(manifest)
    return frozenset({manifest.artifact_type} if manifest.artifact_type else ())


async def _unless_absent(answer: Awaitable[_T]) -> _T | None:
    """Await an answer. Returns None if it is a 404."""
    try:
        return await answer
    except RegistryError as error:
        if error.status != 404:
            raise
    return None


@contextmanager
def _explaining_refusals() -> Iterator[None]:
    """Return a context that says why a look-up matters that the registry refuses.

    Registries may refuse a look-up only because what it asks for does not exist (Artifactory).
    """
    try:
        yield
    except RegistryError as error:
        if error.status in _ACCESS_REFUSED:
            error.hint = _HINT_IF_REFUSED
        raise


def _is_no_list() -> ContentError:
    text = "this fallback tag does not hold a list of referrers, and is left as it is"
    hint = "if nothing else needs the tag, delete it: the next run puts the list"
    return ContentError(text, hint=hint)


def _list_is_not_kept() -> RegistryError:
    text = "the registry does not show the list of referrers that was put under this tag"
    error = RegistryError(text, status=409)
    error.hint = _HINT_IF_NOT_KEPT
    return error


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
