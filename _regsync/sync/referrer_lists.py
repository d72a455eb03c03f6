"""The list of what refers to a manifest: from the referrers API, or under a fallback tag.

Owns: whether a registry has the API, the reading of a list at a source, the merging of one at a
target.
May not know: which artifacts are wanted, how anything is copied.
Invariants: what could not be asked is an error, never "none"; an entry that somebody else wrote into
a fallback list stays.
Follows: docs/design.md section 6, rule 15; docs/protocol-facts.md section 1.10.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import anyio

from _regsync.errors import ContentError, RegistryError
from _regsync.oci.manifest import Descriptor, Manifest, extend_referrers_list, referrer_entry
from _regsync.oci.reference import referrers_tag
from _regsync.registry.repository import Repository, is_immutable
from _regsync.state.archive import RepositoryKey
from _regsync.state.knowledge import Knowledge
from _regsync.sync.discovery import Discovery
from _regsync.sync.once import Once

# Other writers may replace a fallback list that we put. After so many puts that is an error.
_MOST_PUTS = 5

# A longer list is not kept in memory, because each of 20,000 images may have one.
_LONGEST_KEPT_LIST = 64 * 1024  # characters
# What an entry counts for, beside its annotations.
_CHARACTERS_OF_ENTRY = 100

# Statuses that say nothing about the API, only about our rights.
_ACCESS_REFUSED = (401, 403)

# A registry without the API answers with one of these statuses (docs/design.md section 6, rule 15):
# 200 is a page of HTML.
_NO_API_STATUSES = (200, 404, 405, 501)
# An answer with one of these codes is about the manifest or the repository, not about the API.
_OTHER_CODES = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN"})


class ReferrerList(NamedTuple):
    """What a source lists for a subject."""

    entries: tuple[Descriptor, ...]
    # The manifest under the fallback tag, if the list is from there.
    fallback: Manifest | None = None


class ReferrerLists:
    """The lists of one run: read at sources, written at targets without the API."""

    def __init__(self, discovery: Discovery, knowledge: Knowledge) -> None:
        self._discovery = discovery
        self._knowledge = knowledge
        # The answers of sources, by source and subject.
        self._lists = defaultdict[tuple[RepositoryKey, str], Once[ReferrerList]](Once)
        # How many subjects each source is asked about.
        self._subjects = Counter[RepositoryKey]()

        # By area (`RepositoryKey.area`): held while the area's API is asked for the first time.
        self._first_requests = defaultdict[str, anyio.Lock](anyio.Lock)
        # By target and fallback tag: held while the list is written.
        self._writing = defaultdict[tuple[RepositoryKey, str], anyio.Lock](anyio.Lock)
        # By target and fallback tag: the digests in the list that this run put or read last.
        self._listed_digests = dict[tuple[RepositoryKey, str], set[str]]()

    def has_api(self, where: Repository) -> bool | None:
        """Say whether a repository's registry has the referrers API, None where that is not known."""
        return self._knowledge.has_referrers_api(where.key)

    # At a source.

    def expect_subjects(self, source: Repository, count: int) -> None:
        """Note that a source will be asked about `count` more subjects (see `tags`)."""
        self._subjects[source.key] += count

    async def tags(self, source: Repository) -> Collection[str] | None:
        """Return a source's tags; None where it was not listed, and a listing is refused or would cost
        more requests than it saves.
        """
        tags = self._discovery.known_listing(source)
        if tags is not None:
            return tags
        # Without the API each subject has four tags to be asked for: the fallback tag and cosign's.
        # From the second subject on one listing costs less.
        if self.has_api(source) is not False or self._subjects[source.key] < 2:
            return None
        try:
            return await self._discovery.list_tags(source)
        except RegistryError as error:
            if error.retryable:
                raise
        return None

    async def read(self, source: Repository, subject: str) -> ReferrerList:
        """Return what a source lists for a subject. It is asked once a run, unless the list is long."""
        key = (source.key, subject)
        answer = await self._lists[key].get(partial(self._ask, source, subject))

        characters = len(answer.entries) * _CHARACTERS_OF_ENTRY
        for entry in answer.entries:
            characters += sum(len(value) for value in entry.annotations.values())
        if characters > _LONGEST_KEPT_LIST:
            self._lists.pop(key, None)
        return answer

    async def _ask(self, source: Repository, subject: str) -> ReferrerList:
        """Ask the API, and without it the fallback tag."""
        entries = await self._ask_api(source, subject)
        if entries is not None:
            return ReferrerList(entries)

        index = await self._get_fallback(source, subject, await self.tags(source))
        if index is None or not index.is_index:  # somebody's image may have such a tag
            return ReferrerList(())
        return ReferrerList(index.children, index)

    async def _ask_api(self, where: Repository, subject: str) -> tuple[Descriptor, ...] | None:
        """Ask the referrers API; None where there is none, or it refuses this digest."""
        if self.has_api(where) is None:
            # Other questions to the area wait: where there is no API, one request shows it for all.
            async with self._first_requests[where.key.area]:
                if self.has_api(where) is None:
                    return await self._try_api(where, subject)
        if not self.has_api(where):
            return None
        return await self._try_api(where, subject)

    async def _try_api(self, where: Repository, subject: str) -> tuple[Descriptor, ...] | None:
        """Ask the referrers API, and learn whether there is one (rule 15).

        None where there is none, or where it refuses this digest. An error that may be another one next
        time is raised.
        """
        try:
            entries = await where.list_referrers(subject)
        except RegistryError as error:
            if error.retryable or error.status in _ACCESS_REFUSED:
                raise
            if self.has_api(where):
                # It has answered before. So a 200 that is no index is a broken answer, and any other
                # refusal is about this digest alone.
                if error.status == 200:
                    raise
                return None
            is_about_api = _OTHER_CODES.isdisjoint(error.codes)
            if is_about_api and error.status in _NO_API_STATUSES:
                self._knowledge.learn_referrers_api(where.key, False)
            return None
        self._knowledge.learn_referrers_api(where.key, True)
        return entries

    async def _get_fallback(
        self, where: Repository, subject: str, tags: Collection[str] | None
    ) -> Manifest | None:
        """Return what the fallback tag of a subject names, None where the tag is absent.

        `tags` are all tags of the repository, or None where it was not listed. They save the request
        where the tag is not among them.
        """
        tag = referrers_tag(subject)
        # This run may have put the tag after the listing.
        is_newer = (where.key, tag) in self._listed_digests
        if tags is not None and tag not in tags and not is_newer:
            return None
        try:
            return await where.get_manifest(tag)
        except RegistryError as error:
            if error.status != 404:
                raise
        return None

    # At a target.

    async def ensure_listed(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> set[str]:
        """Add referrers to a target's list for a subject; return the digests that the list lacked.

        A target with the API makes its list itself: nothing is added, and nothing was lacking.
        """
        # One question shows whether the area has the API, while other artifacts wait.
        async with self._first_requests[target.key.area]:
            if self.has_api(target) is None:
                await self._try_api(target, subject)
        if self.has_api(target):
            return set()

        place = (target.key, referrers_tag(subject))
        async with self._writing[place]:
            listed = self._listed_digests.get(place, set())
            if listed.issuperset(entry.digest for entry in entries):
                return set()
            return await self._add_to_list(source, target, subject, entries)

    async def _add_to_list(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> set[str]:
        """Put the list under the fallback tag until it has these entries; return the digests added.

        Few registries can be told to move a tag only where nobody else has moved it. So the list is
        read, extended, put and looked at again (docs/protocol-facts.md section 1.10).
        """
        tag = referrers_tag(subject)
        place = (target.key, tag)
        added = set[str]()
        immutable_tag: RegistryError | None = None
        for _ in range(_MOST_PUTS):
            held = await self._get_held_list(target, subject)
            listed = set[str]()
            if held is not None:
                listed.update(entry.digest for entry in held.children)
            self._listed_digests[place] = listed
            lacking = [entry for entry in entries if entry.digest not in listed]
            if not lacking:
                return added
            # The registry does not let us move the tag, and the list that it names lacks some.
            if immutable_tag is not None:
                raise immutable_tag
            lacking = [await self._full_entry(source, entry) for entry in lacking]
            added |= {entry.digest for entry in lacking}

            merged = self._merged_list(source, subject, held, lacking, added)
            try:
                await target.put_manifest(tag, merged)
            except RegistryError as error:
                if not is_immutable(error):
                    raise
                # The list may be complete all the same: another writer has put it, or an attempt of
                # ours whose answer was lost. It is read again.
                immutable_tag = error
                continue
            # Another writer may have replaced our list.
            if await target.head_manifest(tag) == merged.digest:
                listed.update(entry.digest for entry in merged.children)
                return added

        text = "another client keeps replacing this list of referrers"
        conflict = RegistryError(text, status=409)
        raise conflict.with_place(target.side, "list referrers in", target.reference(tag))

    async def _full_entry(self, source: Repository, entry: Descriptor) -> Descriptor:
        """Return an entry as a list has it: that of a lock has only its digest."""
        if entry.media_type:
            return entry
        return referrer_entry(await self._discovery.manifest(source, entry.digest))

    async def _get_held_list(self, target: Repository, subject: str) -> Manifest | None:
        """Return the list that a target holds for a subject, None where it holds none."""
        held = await self._get_fallback(target, subject, self._discovery.known_listing(target))
        if held is not None and not held.is_index:
            text = "this fallback tag does not hold a list of referrers, and is left as it is"
            error = ContentError(text)
            reference = target.reference(referrers_tag(subject))
            raise error.with_place(target.side, "list referrers in", reference)
        return held

    def _merged_list(
        self,
        source: Repository,
        subject: str,
        held: Manifest | None,
        lacking: Sequence[Descriptor],
        added: Collection[str],
    ) -> Manifest:
        """Return the list that the target holds, if any, with the entries that it lacks.

        Where it holds none, and the source's list names just the digests `added`, it gets the source's
        list byte for byte: the list has the same digest at both then.
        """
        answer = self._lists[source.key, subject].answer
        source_list = answer[0].fallback if answer else None
        if held is None and source_list is not None:
            names_just_these = {entry.digest for entry in source_list.dependencies} == added
            if names_just_these:
                return source_list
        return extend_referrers_list(held, lacking)
