"""Read and write referrers lists: by the referrers API, or under a fallback tag.

Owns: whether a registry has the API, how a list is read at a source, how entries are added to a
list at a target.
May not know: which artifacts are wanted, how anything is copied.
Invariants: a failed request is an error. It never counts as an empty list. Entries that other
clients wrote to a fallback list stay.
Follows: docs/design.md section 6, rule 15; docs/protocol-facts.md section 1.10.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import anyio

from _regsync.errors import ContentError, RegistryError
from _regsync.oci import Descriptor, Manifest, extend_referrers_list, referrer_entry, referrers_tag
from _regsync.registry.repository import Repository, is_immutable
from _regsync.state import Knowledge, RepositoryKey
from _regsync.sync.discovery import Discovery
from _regsync.sync.once import Once

# Attempts to add entries to a fallback list. An attempt fails if another client replaces the list.
_MOST_ATTEMPTS = 5

# Characters of the longest list that is cached. Longer lists are not cached, because each of 20,000
# images may have one.
_LONGEST_CACHED_LIST = 64 * 1024
# The assumed length of an entry without its annotations.
_CHARACTERS_OF_ENTRY = 100

# These statuses say nothing about the API. The credentials lack a right.
_ACCESS_REFUSED = (401, 403)

# The statuses with which registries without the API answer (docs/design.md section 6, rule 15). The
# body of a 200 is an HTML page.
_NO_API_STATUSES = (200, 404, 405, 501)
# With one of these error codes, the answer is about the manifest or the repository, not the API.
_OTHER_CODES = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN"})


class ReferrerList(NamedTuple):
    """The referrers list of a source for a subject."""

    entries: tuple[Descriptor, ...]
    # The index under the fallback tag. None if the API has returned the list, or if the source has
    # no list.
    fallback: Manifest | None = None


class ReferrerLists:
    """The referrers lists of one run. Lists are written only at targets without the API."""

    def __init__(self, discovery: Discovery, knowledge: Knowledge) -> None:
        self._discovery = discovery
        self._knowledge = knowledge
        # The lists of sources, by source and subject.
        self._lists = defaultdict[tuple[RepositoryKey, str], Once[ReferrerList]](Once)
        # By source, the number of subjects whose lists this run has read or will read.
        self._subject_counts = Counter[RepositoryKey]()

        # By area (`RepositoryKey.area`), a lock that is held while a first request finds out
        # whether the registry has the API.
        self._first_requests = defaultdict[str, anyio.Lock](anyio.Lock)
        # By target and fallback tag, a lock that is held while the list is written.
        self._writing = defaultdict[tuple[RepositoryKey, str], anyio.Lock](anyio.Lock)
        # By target and fallback tag, the digests in the list when this run last read or put the
        # list.
        self._listed_digests = dict[tuple[RepositoryKey, str], set[str]]()

    def has_api(self, repository: Repository) -> bool | None:
        """Report whether the registry has the referrers API. Returns None if that is unknown."""
        return self._knowledge.has_referrers_api(repository.key)

    # At a source.

    def expect_subjects(self, source: Repository, count: int) -> None:
        """Announce that the lists of `count` more subjects will be read at a source.

        `list_tags_if_cheap` lists the tags of a source only if it has several subjects.
        """
        self._subject_counts[source.key] += count

    async def list_tags_if_cheap(self, source: Repository) -> Collection[str] | None:
        """Return the tags of a source.

        Returns None if the tags are unknown: the source has not been listed, and a listing would
        cost more requests than it saves, or the registry refuses it.
        """
        tags = self._discovery.known_listing(source)
        if tags is not None:
            return tags
        # Without the API, each subject costs four requests: for the fallback tag and three cosign
        # tags. If there are two subjects or more, a listing costs less.
        lacks_api = self.has_api(source) is False
        has_several_subjects = self._subject_counts[source.key] >= 2
        if not (lacks_api and has_several_subjects):
            return None
        try:
            return await self._discovery.list_tags(source)
        except RegistryError as error:
            if error.retryable:
                raise
            return None

    async def read(self, source: Repository, subject: str) -> ReferrerList:
        """Return the referrers list of a source for a subject, and cache it unless it is long."""
        pinned = self._discovery.pinned(source)
        if pinned is not None:  # nothing is learnt about the registry
            return ReferrerList(await pinned.list_referrers(subject))
        key = (source.key, subject)
        referrers = await self._lists[key].get(partial(self._fetch, source, subject))

        characters = len(referrers.entries) * _CHARACTERS_OF_ENTRY
        for entry in referrers.entries:
            characters += sum(len(value) for value in entry.annotations.values())
        if characters > _LONGEST_CACHED_LIST:
            self._lists.pop(key, None)
        return referrers

    async def _fetch(self, source: Repository, subject: str) -> ReferrerList:
        entries = await self._fetch_from_api(source, subject)
        if entries is not None:
            return ReferrerList(entries)

        index = await self._get_fallback(source, subject, await self.list_tags_if_cheap(source))
        # An image may happen to have the name of a fallback tag. It is not a list.
        if index is None or not index.is_index:
            return ReferrerList(())
        return ReferrerList(index.children, index)

    async def _fetch_from_api(
        self, repository: Repository, subject: str
    ) -> tuple[Descriptor, ...] | None:
        """Return the referrers that the API lists.

        Returns None if the registry has no API, or if the API refuses this subject. Raises
        RegistryError if a request fails (`_try_api`).
        """
        if self.has_api(repository) is None:
            # While the first request to the area is under way, other requests wait. If the first
            # request shows that there is no API, they are not sent.
            async with self._first_requests[repository.key.area]:
                if self.has_api(repository) is None:
                    return await self._try_api(repository, subject)
        if not self.has_api(repository):
            return None
        return await self._try_api(repository, subject)

    async def _try_api(self, repository: Repository, subject: str) -> tuple[Descriptor, ...] | None:
        """Request the referrers of a subject, and learn whether the registry has the API (rule 15).

        Returns None if the registry has no API, or if the API refuses this subject. Raises
        RegistryError for a temporary error, for a lack of rights, and for a broken answer of an API
        that is known to exist.
        """
        try:
            entries = await repository.list_referrers(subject)
        except RegistryError as error:
            has_worked = self.has_api(repository)
            # A 200 without an index. Any other status of a working API refuses only this subject.
            is_broken_answer = has_worked and error.status == 200
            if error.retryable or error.status in _ACCESS_REFUSED or is_broken_answer:
                raise
            is_about_api = _OTHER_CODES.isdisjoint(error.codes)
            if not has_worked and is_about_api and error.status in _NO_API_STATUSES:
                self._knowledge.record_referrers_api(repository.key, False)
            return None
        self._knowledge.record_referrers_api(repository.key, True)
        return entries

    async def _get_fallback(
        self, repository: Repository, subject: str, tags: Collection[str] | None
    ) -> Manifest | None:
        """Return the manifest under the fallback tag of a subject. Returns None if it is absent.

        `tags` are all tags of the repository, or None if they have not been listed. If they do not
        include the fallback tag, no request is sent, unless this run has read or put the tag.
        """
        tag = referrers_tag(subject)
        # This run may have put the tag since it listed the tags.
        was_used_by_this_run = (repository.key, tag) in self._listed_digests
        if tags is not None and tag not in tags and not was_used_by_this_run:
            return None
        try:
            return await repository.get_manifest(tag)
        except RegistryError as error:
            if error.status != 404:
                raise
        return None

    # At a target.

    async def ensure_listed(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> set[str]:
        """Add entries to a target's referrers list for a subject. Returns the added digests.

        The set is empty if the list has all entries already, or if the registry has the API and so
        maintains the list itself. An entry of a lock, which has only its digest, is completed with
        the source's manifest.
        """
        # Other artifacts wait until one request has shown whether the registry has the API.
        async with self._first_requests[target.key.area]:
            if self.has_api(target) is None:
                await self._try_api(target, subject)
        if self.has_api(target):
            return set()

        list_key = (target.key, referrers_tag(subject))
        # Tasks of this run write the list in turn, so that no task replaces the entries of another.
        async with self._writing[list_key]:
            listed_digests = self._listed_digests.get(list_key, set())
            if listed_digests.issuperset(entry.digest for entry in entries):
                return set()
            return await self._add_to_list(source, target, subject, entries)

    async def _add_to_list(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> set[str]:
        """Add entries to the list under a target's fallback tag. Returns the added digests.

        Most registries cannot put a tag on condition that no other client has moved it. So each
        attempt reads the list, puts it with the missing entries, and checks that the tag names this
        list (docs/protocol-facts.md section 1.10). Raises RegistryError if the fallback tag is
        immutable, or if other clients have replaced the list after each attempt.
        """
        tag = referrers_tag(subject)
        # The digests that were missing in any attempt.
        added_digests = set[str]()
        for _ in range(_MOST_ATTEMPTS):
            present, missing = await self._read_target_list(target, subject, entries)
            if not missing:
                return added_digests
            if self._discovery.reads_only:
                return {entry.digest for entry in missing}

            new_entries = [await self._full_entry(source, entry) for entry in missing]
            added_digests |= {entry.digest for entry in new_entries}
            merged = self._merged_list(source, subject, present, new_entries)
            try:
                await target.put_manifest(tag, merged)
            except RegistryError as refusal:
                if not is_immutable(refusal):
                    raise
                # The list may be complete although the put was refused: another client has put it,
                # or the answer to an earlier put of this run was lost.
                _, missing = await self._read_target_list(target, subject, entries)
                if missing:
                    raise
                return added_digests
            # Another client may have replaced the list since.
            if await target.head_manifest(tag) == merged.digest:
                self._listed_digests[target.key, tag] = {entry.digest for entry in merged.children}
                return added_digests

        text = "another client keeps replacing this list of referrers"
        conflict = RegistryError(text, status=409)
        raise conflict.add_context(target.side, "list referrers in", target.name_of(tag))

    async def _full_entry(self, source: Repository, entry: Descriptor) -> Descriptor:
        """Return an entry with all its fields. An entry from a lock has only its digest."""
        if entry.media_type:
            return entry
        return referrer_entry(await self._discovery.fetch_manifest(source, entry.digest))

    async def _read_target_list(
        self, target: Repository, subject: str, entries: Iterable[Descriptor]
    ) -> tuple[Manifest | None, list[Descriptor]]:
        """Return the fallback list of a target for a subject, and those of `entries` it lacks.

        In place of the list, returns None if there is none. Raises ContentError if the fallback tag
        names an image.
        """
        tag = referrers_tag(subject)
        present = await self._get_fallback(target, subject, self._discovery.known_listing(target))
        if present is not None and not present.is_index:
            text = "this fallback tag does not hold a list of referrers, and is left as it is"
            error = ContentError(text)
            raise error.add_context(target.side, "list referrers in", target.name_of(tag))
        present_entries = present.children if present is not None else ()
        listed_digests = {entry.digest for entry in present_entries}
        self._listed_digests[target.key, tag] = listed_digests
        return present, [entry for entry in entries if entry.digest not in listed_digests]

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
            source_digests = {entry.digest for entry in source_index.dependencies}
            is_same_list = source_digests == {entry.digest for entry in new_entries}
            if is_same_list:
                return source_index
        return extend_referrers_list(present, new_entries)
