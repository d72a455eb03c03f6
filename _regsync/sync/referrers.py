"""Which artifacts hang on an image, and the list of them where a registry keeps none itself. Owns:
the question of docs/specification.md section 1.1 "Artifacts" (referrers API, fallback tag, cosign's
tags), its filters, the fallback index at a target. May not know: when a run looks, how anything is
moved. Invariants: what could not be asked is an error, never "none"; an entry that somebody else
wrote into a fallback index stays. Follows docs/design.md section 6 rule 15, docs/protocol-facts.md
section 1.10."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import anyio

from _regsync.config.model import MappingRule
from _regsync.errors import ContentError, RegistryError
from _regsync.oci.manifest import Descriptor, Manifest, list_referrers
from _regsync.oci.reference import referrers_tag
from _regsync.registry.repository import Repository
from _regsync.state.database import key_of, named
from _regsync.state.knowledge import Knowledge, RepositoryKey, area
from _regsync.sync.discovery import Discovery, Once, Sighting, together
from _regsync.sync.image import Delivery

# of a run's requests, those that ask for late signatures (docs/design.md section 8)
LATE_SHARE = 0.02


# What is noted of a look at an image's artifacts, beside `referrers.Referrers.shown`: it has some,
# they are all there.
HAS = 16


COMPLETE = 32


class Look(enum.IntEnum):
    """How an image's artifacts are looked at: not, when it is its turn, the top's at once, or with
    all below it.
    """

    NOT, LATE, TOP, ALL = range(4)


def look_again(
    record: tuple[int, int, int, bytes], shown: int, now: float, *, required: bool
) -> Look:
    """Decide on an unchanged image by its record (`Knowledge.look`), and by its tags in a listing."""
    if not record[2] & COMPLETE or (required and not record[2] & HAS):
        return Look.ALL
    if shown & ~record[2]:
        return Look.TOP
    pause = min(max(3600.0, (now - record[1]) / 4), 7 * 86400.0)
    return Look.LATE if now - record[0] >= pause else Look.NOT


def look_without_state(digest: str, now: float) -> Look:
    """Decide by digest and day in which hour of the day an unchanged image is looked at."""
    day, rest = divmod(int(now), 86400)
    return Look.ALL if (int(digest[-6:], 16) + day) % 24 == rest // 3600 else Look.NOT


_COSIGN = (".sig", ".att", ".sbom")


# Signatures of attestations of signatures have been seen; a chain that goes on is somebody's trap.
_DEEPEST = 8


_MOST = 10_000


# answers with the manifests of what hangs on a digest; those that were put need no second one
_MOST_HUNG = 1024


_PUTS = 5  # a list that others write too is put so often before that is an error


_HEAVY_LIST = (
    64 * 1024
)  # characters, 100 an entry and its annotations; 20,000 images may have such a list each


class Artifact(NamedTuple):
    """One artifact: what it hangs on, its digest or cosign's tag, its entry in a fallback index
    (None for a tag), what was found out about it (None: every target has it)."""

    subject: str
    reference: str
    entry: Descriptor | None
    sighting: Sighting | None
    types: frozenset[str]

    def __str__(self) -> str:
        return f"{self.reference} ({', '.join(sorted(self.types)) or 'no type'}) of {self.subject}"


class _List(NamedTuple):
    entries: tuple[Descriptor, ...]
    fallback: Manifest | None = None  # the index that they are from


class _Question(NamedTuple):
    """For whom is asked. `silent` targets lacked the image: nobody asks them for what they did not
    get; the `sure` hold it with all that hung on it once: what an earlier run brought needs no
    question."""

    mapping: MappingRule
    source: Repository
    targets: tuple[Repository, ...] = ()
    silent: tuple[Repository, ...] = ()
    sure: tuple[Repository, ...] = ()

    def wants(self, types: frozenset[str]) -> bool:
        rule = self.mapping.artifacts
        return not (rule.include and types.isdisjoint(rule.include)) and types.isdisjoint(
            rule.exclude
        )


class Referrers:
    """The questions of one run about artifacts, and its lists at targets without the API; `kept`:
    there is a state.
    """

    def __init__(
        self, discovery: Discovery, knowledge: Knowledge, wall: Callable[[], float], kept: bool
    ) -> None:
        self._discovery = discovery
        self._knowledge = knowledge
        self._wall = wall
        self._kept = kept
        self._lists = defaultdict[tuple[RepositoryKey, str], Once[_List]](Once)
        self._hung = defaultdict[object, Once[list[Artifact]]](Once)
        # lists: one may name 10,000
        self._asked = Counter[RepositoryKey]()
        self._few = anyio.CapacityLimiter(32)
        # Who asks an area for the first time, who writes a list.
        self._locks = defaultdict[object, anyio.Lock](anyio.Lock)
        # By repository and fallback tag, what a list names that this run has put or read last.
        self._written = dict[tuple[RepositoryKey, str], set[str]]()
        self._settled = set[tuple[RepositoryKey, str]]()

    def shown(self, source: Repository, digest: str) -> int:
        """Return as bits which tags that list or hold artifacts of a digest a listing made already
        shows.
        """
        names = self._discovery.names(source) or ()
        tag = referrers_tag(digest)
        return sum(1 << bit for bit, end in enumerate(("", *_COSIGN)) if tag + end in names)

    def need(self, mapping: MappingRule, whole: Delivery) -> Look:
        """Say whether the artifacts of an image are to be looked at, and give it its record."""
        if whole.error is not None:
            return Look.NOT
        keys = (key_of(whole.source_digest), key_of(whole.digest))
        required = mapping.artifacts.require_artifacts
        whole.record = self.record(mapping, whole.source, whole.target, *keys)
        whole.known = self._knowledge.look(whole.record)
        whole.bits = self.shown(whole.source, whole.source_digest)
        if not whole.there:
            return Look.ALL
        if not self._kept and not required:
            return look_without_state(whole.source_digest, self._wall())
        return look_again(whole.known, whole.bits, self._wall(), required=required)

    @staticmethod
    def record(mapping: MappingRule, source: Repository, target: Repository, *keys: bytes) -> bytes:
        """Name what the state keeps of an image's artifacts: from where and to, which digests,
        under which rules.
        """
        rules = (
            ",".join(sorted(each))
            for each in (mapping.artifacts.include, mapping.artifacts.exclude)
        )
        return named("artifacts", *source.key, *target.key, *(key.hex() for key in keys), *rules)

    async def look(
        self, mapping: MappingRule, sighting: Sighting, wholes: Sequence[Delivery], need: Look
    ) -> tuple[list[Artifact], list[Artifact]]:
        """Return the artifacts of an image that travel and those that cannot; SyncError when one
        may be missed.
        """
        source = sighting.source
        digest = sighting.source_digest
        rule = mapping.artifacts
        deep = need == Look.ALL
        tops = [digest] if sighting.digest == digest else []
        digests = (
            [each.digest for each in (await self._listed(source, digest)).entries] if tops else []
        )
        for whole in wholes:
            whole.listed = named(*sorted(digests))[:8]
            if deep:
                continue
            whole.bits |= whole.known[2] & HAS  # there may be some below, which is not asked for
            if (
                whole.known[3] == whole.listed
            ):  # the entries of the state may be too old, this never is
                self._settled.update((whole.target.key, each) for each in digests)
        asking = _Question(
            mapping._replace(platforms=None),
            source,
            tuple(each.target for each in wholes if each.error is None and rule.enabled),
            tuple(each.target for each in wholes if not each.there),
            tuple(each.target for each in wholes if each.there and each.known[2] & COMPLETE),
        )
        found = await self._of(
            asking, [*tops, *(await self._discovery.below(mapping, sighting) if deep else ())], deep
        )
        stripped = (
            [] if tops else await self._of(_Question(asking.mapping, source), [digest], deep=False)
        )
        if stripped:
            text = "what hangs on an index that is trimmed to its platforms stays behind: the target has another index"
            self._discovery.say(
                "warning", "artifacts_stripped", f"{source} -> {mapping.target_repository}: {text}"
            )
        if (
            rule.require_artifacts
            and not found
            and (deep or not any(each.known[2] & HAS for each in wholes))
        ):
            taken = " that include and exclude take" if rule.include or rule.exclude else ""
            lost = (
                "; what hangs on the index before it is trimmed does not count" if stripped else ""
            )
            missing = RegistryError(
                f"require_artifacts: it has no artifact{taken}{lost}", status=404
            )
            missing.hint = (
                "sign the image (with platforms: each platform's), or leave require_artifacts out"
            )
            raise missing.located(source.side, "list referrers of", source.reference(digest))
        return (found, stripped) if rule.enabled else ([], [*found, *stripped])

    async def _of(self, asking: _Question, digests: Iterable[str], deep: bool) -> list[Artifact]:
        """Return what hangs on these digests as far as the filters take it, and on that in turn:
        where a target lacks it, if `deep` everywhere. Raises SyncError."""
        found = dict[str, Artifact]()
        level = list(dict.fromkeys(digests))
        seen = set[str]()
        source = asking.source
        every = list[Artifact]()  # with those that hang on more than one

        async def ask(subject: str) -> None:
            async with self._few:
                if len(every) <= _MOST:
                    every.extend(await self._hangs_on(asking, subject))

        for _ in range(_DEEPEST):
            self._asked[source.key] += len(level)
            seen.update(level)
            await together(partial(ask, each) for each in level)
            found.update((each.reference, each) for each in every)
            below = [
                digest
                for each in found.values()
                for digest in await self._below(source, each, deep=deep)
            ]
            level = [digest for digest in dict.fromkeys(below) if digest not in seen]
            if max(len(every), len(level)) > _MOST:
                break
            if not level:
                return list(found.values())
        large = f"more than {_MOST} artifacts, or artifacts on artifacts more than {_DEEPEST} deep"
        raise ContentError(large).located(source.side, "list referrers in", str(source))

    async def _below(self, source: Repository, artifact: Artifact, *, deep: bool) -> list[str]:
        """Return on which digests of an artifact more may hang; on what cosign's tags name, if a
        listing shows it.
        """
        if artifact.entry is None or not (deep or artifact.sighting):
            digest = artifact.sighting.source_digest if artifact.sighting else ""
            return [digest] if digest and self.shown(source, digest) else []
        entries = [artifact.entry]
        known = {artifact.entry.digest}
        for each in entries:
            below = (
                (await self._discovery.manifest(source, each.digest, each)).children
                if each.is_index
                else ()
            )
            entries += [child for child in below if not (child.attests or child.digest in known)]
            known.update(child.digest for child in below)
        return [each.digest for each in entries]

    async def _hangs_on(self, asking: _Question, subject: str) -> list[Artifact]:
        """Return what hangs on one digest. Tags of one digest are planned once (rule 7)."""
        if len(self._hung) > _MOST_HUNG:
            self._hung.pop(next(iter(self._hung)))
        key = (asking.mapping.index, asking[2:], subject)
        return await self._hung[key].get(partial(self._on, asking, subject))

    async def _on(self, asking: _Question, subject: str) -> list[Artifact]:
        listed = await self._listed(asking.source, subject)
        source = asking.source
        look = partial(self._look, asking)
        entries = [
            partial(look, subject, each.digest, each)
            for each in listed.entries
            if each.digest != subject
        ]
        names = await self._names(source)
        tag = referrers_tag(subject)
        # Where nothing was listed, cosign's tags are worth a question only where no API would tell.
        probed = names is None and self.has_api(source) is False
        tags = [tag + end for end in _COSIGN if probed or tag + end in (names or ())]
        if not (listed.entries or tags or self.has_api(source)):
            text = f"{source}: no referrers API and no fallback tag, images without artifacts are copied as they are"
            self._discovery.say("info", "no_referrers", text)
        found = await together([*entries, *(partial(look, subject, each, None) for each in tags)])
        return [each for each in found if each and asking.wants(each.types)]

    async def _look(
        self, asking: _Question, subject: str, reference: str, entry: Descriptor | None
    ) -> Artifact | None:
        """Find out what an artifact is and which targets lack it; None when it is gone, or is not
        wanted anyway.
        """
        mapping, source, targets, silent, sure = asking
        types = frozenset({entry.artifact_type} if entry and entry.artifact_type else ())
        if types and not asking.wants(types):
            return None
        believed = [
            each for each in targets if entry and self._knowledge.is_committed(each.key, reference)
        ]
        lacking = tuple(
            each
            for each in targets
            if not (
                (entry and (each.key, reference) in self._settled)
                or self._knowledge.is_confirmed(each.key, reference)
                or (each in believed and each in sure)
            )
        )
        try:
            if entry is not None and (lacking or not types):
                manifest = await self._discovery.manifest(source, reference, entry)
                types = frozenset(filter(None, [manifest.artifact_type]))
                entry = entry._replace(
                    artifact_type=manifest.artifact_type, annotations=manifest.annotations
                )
            if entry is not None and not (lacking and asking.wants(types)):
                return Artifact(subject, reference, entry, None, types)
            sighting = await self._discovery.look_up(
                mapping,
                reference,
                reference,
                lacking,
                silent=[each for each in silent if each not in believed],
            )
            if entry is None and (
                sighting.tree or mapping.artifacts.include or mapping.artifacts.exclude
            ):
                manifest = await self._discovery.manifest(source, sighting.source_digest)
                types = frozenset(
                    each.media_type for each in (*manifest.names, manifest.config) if each
                )
            return Artifact(subject, reference, entry, sighting, types)
        except RegistryError as error:
            if error.status != 404:
                raise
        if entry is not None:
            text = f"{source}: {reference} is listed as a referrer of {subject} and is not there: it is left out"
            self._discovery.say("warning", "referrer_missing", text)
        return None

    async def _names(self, source: Repository) -> Collection[str] | None:
        """Return a source's tags: where no API is, one listing costs less than asking for four tags
        a digest.
        """
        names = self._discovery.names(source)
        if names is None and self.has_api(source) is False and self._asked[source.key] > 1:
            try:
                names = await self._discovery.list_tags(source)
            except RegistryError as error:
                if error.retryable:
                    raise
        return names

    async def _listed(self, source: Repository, subject: str) -> _List:
        found = await self._lists[source.key, subject].get(partial(self._list, source, subject))
        if (
            sum(100 + sum(map(len, each.annotations.values())) for each in found.entries)
            > _HEAVY_LIST
        ):
            self._lists.pop((source.key, subject), None)  # rather asked again than kept
        return found

    async def _list(self, source: Repository, subject: str) -> _List:
        if (found := await self._api(source, subject)) is not None:
            return _List(found)
        names = await self._names(source)
        index = await self._fallback(source, subject, names)
        return _List(index.children, index) if index is not None and index.is_index else _List(())

    def has_api(self, where: Repository) -> bool | None:
        """Say whether a repository's registry has the referrers API, None where that is not known."""
        return self._knowledge.has_referrers_api(where.key)

    async def _api(self, where: Repository, subject: str) -> tuple[Descriptor, ...] | None:
        """Ask the referrers API; None where there is none (docs/design.md section 6 rule 15)."""
        if self.has_api(where) is None:
            async with self._locks[
                area(where.key)
            ]:  # the first answer spares the others the question
                if self.has_api(where) is None:
                    return await self._ask(where, subject)
        return await self._ask(where, subject) if self.has_api(where) else None

    async def _ask(self, where: Repository, subject: str) -> tuple[Descriptor, ...] | None:
        try:
            found = await where.list_referrers(subject)
        except RegistryError as error:
            known = self.has_api(
                where
            )  # then a page is an outage, and a 404 is about this digest alone
            if error.retryable or error.status in (401, 403) or (known and error.status == 200):
                raise
            lacks = error.status in (200, 404, 405, 501) and not {
                "MANIFEST_UNKNOWN",
                "NAME_UNKNOWN",
            } & {*error.codes}
            if lacks and not known:
                self._knowledge.learn_referrers_api(where.key, False)
            return None
        self._knowledge.learn_referrers_api(where.key, True)
        return found

    async def _fallback(
        self, where: Repository, subject: str, names: Collection[str] | None
    ) -> Manifest | None:
        """Return what the fallback tag of a subject names, None where it is absent."""
        tag = referrers_tag(subject)
        if names is not None and tag not in names and (where.key, tag) not in self._written:
            return None
        try:
            return await where.get_manifest(tag)
        except RegistryError as error:
            if error.status != 404:
                raise
        return None

    async def keep(
        self, source: Repository, target: Repository, subject: str, entries: list[Descriptor]
    ) -> set[str]:
        """Have a target without the API list these referrers of a subject; return the digests that
        it lacked.
        """
        async with self._locks[area(target.key)]:
            if self.has_api(target) is None:
                await self._ask(target, subject)
        tag = referrers_tag(subject)
        added = set[str]()
        if self.has_api(target):
            return added
        async with self._locks[target.key, subject]:
            if self._written.get((target.key, tag), set()) >= {each.digest for each in entries}:
                return added
            for _ in range(_PUTS):
                held = await self._fallback(target, subject, self._discovery.names(target))
                if held is not None and not held.is_index:
                    odd = ContentError(
                        "this tag is to list referrers and holds something else, which is left as it is"
                    )
                    raise odd.located(target.side, "list referrers in", target.reference(tag))
                there = self._written[target.key, tag] = (
                    {each.digest for each in held.children} if held else set()
                )
                lacking = [each for each in entries if each.digest not in there]
                if not lacking:
                    return added
                added |= {each.digest for each in lacking}
                whole = self._lists[source.key, subject].answer
                copied = whole[0].fallback if whole and held is None else None
                if copied is None or {each.digest for each in copied.names} != added:
                    copied = list_referrers(held, lacking)
                await target.put_manifest(tag, copied)
                if await target.head_manifest(tag) == copied.digest:
                    there.update(each.digest for each in copied.children)
                    return added
        lost = RegistryError(
            "another writer replaces this list of referrers again and again", status=409
        )
        raise lost.located(target.side, "list referrers in", target.reference(tag))
