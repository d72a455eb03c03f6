"""The list of what refers to a manifest: by the referrers API, or by the fallback tag without it.

Owns: whether a registry has the API, the reading of a list at a source, the merging of one at a
target.
May not know: which artifacts are wanted, how anything is copied.
Invariants: what could not be asked is an error, never "none"; an entry that somebody else wrote into
a fallback index stays.
Follows: docs/design.md section 6, rule 15; docs/protocol-facts.md section 1.10.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import anyio

from _regsync.errors import ContentError, RegistryError
from _regsync.oci.manifest import Descriptor, Manifest, extend_referrers_list
from _regsync.oci.reference import referrers_tag
from _regsync.registry.repository import Repository
from _regsync.state.knowledge import Knowledge, RepositoryKey, area
from _regsync.sync.discovery import Discovery, Once

# A fallback list that others write too is put so often before that is an error.
_MOST_PUTS = 5

# Characters of annotations in a list, 100 an entry: 20,000 images may have such a list each. A longer
# one is not kept.
_HEAVY_LIST = 64 * 1024

# Statuses that say nothing about the API.
_REFUSALS = (401, 403)

# What a registry without the API answers, when it says nothing of the manifest or the repository
# (docs/design.md section 6, rule 15).
_NO_API_STATUSES = (200, 404, 405, 501)
_ABOUT_THE_MANIFEST = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN"})


class ReferrerList(NamedTuple):
    """What a registry lists for a subject; `fallback` is the index that it is from, if it is."""

    entries: tuple[Descriptor, ...]
    fallback: Manifest | None = None


class ReferrerLists:
    """The lists of one run, at sources and at targets without the API."""

    def __init__(self, discovery: Discovery, knowledge: Knowledge) -> None:
        self._discovery = discovery
        self._knowledge = knowledge
        self._lists = defaultdict[tuple[RepositoryKey, str], Once[ReferrerList]](Once)
        self._questions = Counter[RepositoryKey]()

        # By area: who asks it for the first time. By target and subject: who writes the list.
        self._locks = defaultdict[object, anyio.Lock](anyio.Lock)
        # By target and fallback tag: the digests of the list that this run put or read last.
        self._written = dict[tuple[RepositoryKey, str], set[str]]()

    def has_api(self, where: Repository) -> bool | None:
        """Say whether a repository's registry has the referrers API, None where nobody knows."""
        return self._knowledge.has_referrers_api(where.key)

    # At a source.

    def expect(self, source: Repository, count: int) -> None:
        """Note that so many subjects will be asked about: for several, a listing costs less."""
        self._questions[source.key] += count

    async def names(self, source: Repository) -> Collection[str] | None:
        """Return a source's tags, None where they are not worth a listing.

        Without the API one listing costs less than asking for four tags a digest.
        """
        names = self._discovery.names(source)
        if names is None and self.has_api(source) is False and self._questions[source.key] > 1:
            try:
                names = await self._discovery.list_tags(source)
            except RegistryError as error:
                if error.retryable:
                    raise
        return names

    async def listed(self, source: Repository, subject: str) -> ReferrerList:
        """Return what a source lists for a subject, asked once a run."""
        key = (source.key, subject)
        listed = await self._lists[key].get(partial(self._list, source, subject))

        characters = sum(
            100 + sum(len(value) for value in entry.annotations.values())
            for entry in listed.entries
        )
        if characters > _HEAVY_LIST:
            self._lists.pop(key, None)
        return listed

    async def _list(self, source: Repository, subject: str) -> ReferrerList:
        entries = await self._ask_api(source, subject)
        if entries is not None:
            return ReferrerList(entries)

        names = await self.names(source)
        index = await self._fallback(source, subject, names)
        if index is None or not index.is_index:
            return ReferrerList(())
        return ReferrerList(index.children, index)

    async def _ask_api(self, where: Repository, subject: str) -> tuple[Descriptor, ...] | None:
        """Ask the referrers API; None where there is none."""
        if self.has_api(where) is None:
            # The first answer spares the others of the area the question.
            async with self._locks[area(where.key)]:
                if self.has_api(where) is None:
                    return await self._list_referrers(where, subject)
        if not self.has_api(where):
            return None
        return await self._list_referrers(where, subject)

    async def _list_referrers(
        self, where: Repository, subject: str
    ) -> tuple[Descriptor, ...] | None:
        """Ask the referrers API, and learn whether there is one (docs/design.md section 6, rule 15)."""
        try:
            entries = await where.list_referrers(subject)
        except RegistryError as error:
            # Where the API is known, a page that is no index is an outage, and a 404 is about this
            # digest alone.
            is_known = bool(self.has_api(where))
            if error.retryable or error.status in _REFUSALS or (is_known and error.status == 200):
                raise
            lacks_api = error.status in _NO_API_STATUSES and _ABOUT_THE_MANIFEST.isdisjoint(
                error.codes
            )
            if lacks_api and not is_known:
                self._knowledge.learn_referrers_api(where.key, False)
            return None
        self._knowledge.learn_referrers_api(where.key, True)
        return entries

    async def _fallback(
        self, where: Repository, subject: str, names: Collection[str] | None
    ) -> Manifest | None:
        """Return what the fallback tag of a subject names, None where it is absent.

        `names` are the tags of a listing, None where nothing was listed.
        """
        tag = referrers_tag(subject)
        if names is not None and tag not in names and (where.key, tag) not in self._written:
            return None
        try:
            return await where.get_manifest(tag)
        except RegistryError as error:
            if error.status != 404:
                raise
        return None

    # At a target.

    async def keep(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> set[str]:
        """Have a target without the API list these referrers of a subject.

        Returns the digests that its list lacked; a target with the API needs no list.
        """
        async with self._locks[area(target.key)]:
            if self.has_api(target) is None:
                await self._list_referrers(target, subject)
        if self.has_api(target):
            return set()

        tag = referrers_tag(subject)
        digests = {entry.digest for entry in entries}
        added = set[str]()
        async with self._locks[target.key, subject]:
            if self._written.get((target.key, tag), set()) >= digests:
                return added
            for _ in range(_MOST_PUTS):
                held = await self._held_list(target, subject)
                lacking = [
                    entry for entry in entries if entry.digest not in self._written[target.key, tag]
                ]
                if not lacking:
                    return added
                added |= {entry.digest for entry in lacking}

                merged = self._merged_list(source, subject, held, lacking, added)
                await target.put_manifest(tag, merged)
                # Another writer may have replaced it.
                if await target.head_manifest(tag) == merged.digest:
                    self._written[target.key, tag] |= {entry.digest for entry in merged.children}
                    return added

        text = "another writer replaces this list of referrers again and again"
        error = RegistryError(text, status=409)
        raise error.with_place(target.side, "list referrers in", target.reference(tag))

    async def _held_list(self, target: Repository, subject: str) -> Manifest | None:
        """Return the list that a target holds for a subject, and note what it names."""
        tag = referrers_tag(subject)
        held = await self._fallback(target, subject, self._discovery.names(target))
        if held is not None and not held.is_index:
            text = "this tag is to list referrers and holds something else, which is left as it is"
            error = ContentError(text)
            raise error.with_place(target.side, "list referrers in", target.reference(tag))

        children = held.children if held is not None else ()
        self._written[target.key, tag] = {entry.digest for entry in children}
        return held

    def _merged_list(
        self,
        source: Repository,
        subject: str,
        held: Manifest | None,
        lacking: list[Descriptor],
        added: set[str],
    ) -> Manifest:
        """Return the list to put: the source's own bytes where they say the same, else a merged one."""
        once = self._lists[source.key, subject]
        if held is None and once.answer:
            own = once.answer[0].fallback
            if own is not None and {entry.digest for entry in own.dependencies} == added:
                return own
        return extend_referrers_list(held, lacking)
