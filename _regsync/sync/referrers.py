"""Which artifacts refer to an image, and which targets lack them.

Owns: the search of docs/specification.md section 1.1, "Artifacts" (lists of referrers, cosign's tags,
artifacts of artifacts), and its filters.
May not know: how anything is copied.
Invariants: what could not be asked is an error, never "none".
Follows: docs/design.md section 6, rule 15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import anyio

from _regsync.config.model import MappingRule
from _regsync.errors import ContentError, RegistryError
from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.oci.reference import referrers_tag
from _regsync.registry.repository import Repository
from _regsync.state.knowledge import (
    HAS_ARTIFACTS,
    Knowledge,
    RepositoryKey,
    digest_like,
    key_of,
    snapshot_name,
)
from _regsync.sync.artifact_checks import Look, decide_look, is_due_without_state, look_for_news
from _regsync.sync.discovery import Discovery, Once, TagLookup, gather
from _regsync.sync.image import ImageCopy
from _regsync.sync.referrer_lists import ReferrerLists

_COSIGN_SUFFIXES = (".sig", ".att", ".sbom")

# Levels of artifacts on artifacts. Signatures of attestations of signatures have been seen; a longer
# chain is somebody's trap.
_MOST_LEVELS = 8

# Artifacts of one image.
_MOST_ARTIFACTS = 10_000

# Subjects whose artifacts are kept, for other tags of the same image.
_MOST_KEPT = 1024

# Subjects that are asked about at the same time: each answer may name 10,000 artifacts.
_MOST_ASKED = 32


class Artifact(NamedTuple):
    """One artifact, as it is named at the source."""

    # The digest that it refers to.
    subject: str
    # Its digest, or the tag that cosign gave it.
    reference: str
    # Its entry in a list of referrers; None for a tag of cosign's.
    entry: Descriptor | None
    # None where every target has it.
    lookup: TagLookup | None
    types: frozenset[str]

    def __str__(self) -> str:
        return f"{self.reference} ({', '.join(sorted(self.types)) or 'no type'}) of {self.subject}"


class FoundArtifacts(NamedTuple):
    """The artifacts of an image."""

    copied: tuple[Artifact, ...] = ()
    # Those that stay behind: what refers to an index that is trimmed; in a dry run all others too.
    stripped: tuple[Artifact, ...] = ()


class _Search(NamedTuple):
    """Where the artifacts of an image are looked for, and which targets may lack them."""

    # Its platform filter is off, because artifacts are copied whole.
    mapping: MappingRule
    source: Repository
    targets: tuple[Repository, ...] = ()
    # These did not have the image, so they cannot have its artifacts and are not asked.
    new_targets: tuple[Repository, ...] = ()
    # These had all artifacts after the last look, so the state's entries of them are believed.
    complete_targets: tuple[Repository, ...] = ()

    @property
    def is_filtered(self) -> bool:
        rule = self.mapping.artifacts
        return bool(rule.include or rule.exclude)

    def wants(self, types: frozenset[str]) -> bool:
        """Say whether the filters take an artifact of these types."""
        rule = self.mapping.artifacts
        if rule.include and types.isdisjoint(rule.include):
            return False
        return types.isdisjoint(rule.exclude)


def check_name(mapping: MappingRule, source: Repository, target: Repository, *keys: bytes) -> bytes:
    """Name what the state keeps of an image's artifacts, which depends on the filters too.

    `keys` are those of its digests at source and target.
    """
    rule = mapping.artifacts
    filters = (",".join(sorted(types)) for types in (rule.include, rule.exclude))
    return snapshot_name(
        "artifacts", *source.key, *target.key, *(key.hex() for key in keys), *filters
    )


class Referrers:
    """The artifacts of the images of one run; `lists` are those of its registries."""

    def __init__(
        self,
        discovery: Discovery,
        knowledge: Knowledge,
        wall: Callable[[], float],
        *,
        has_state: bool,
        recheck: bool = False,
    ) -> None:
        """`wall` gives the time in seconds since 1970; `has_state`: earlier runs left something.

        With `recheck` all is asked, whatever the schedule and the state say.
        """
        self._discovery = discovery
        self._knowledge = knowledge
        self._wall = wall
        self._has_state = has_state
        self._recheck = recheck
        self.lists = ReferrerLists(discovery, knowledge)

        # What was found for a subject, by mapping, whether its filters apply, targets and subject.
        self._artifacts = defaultdict[object, Once[list[Artifact]]](Once)
        self._permits = anyio.CapacityLimiter(_MOST_ASKED)

        # Artifacts that need not be asked for at a target: it held all of them after the last look,
        # and the source still lists the same ones.
        self._known_present = set[tuple[RepositoryKey, str]]()

    # When to look.

    def listed_tags(self, source: Repository, digest: str) -> int:
        """Return as bits which tags with artifacts of a digest the source's listing shows: the
        fallback tag, then cosign's. 0 where nothing was listed.
        """
        tags = self._discovery.names(source) or ()
        bits = 0
        for number, suffix in enumerate(("", *_COSIGN_SUFFIXES)):
            if referrers_tag(digest) + suffix in tags:
                bits |= 1 << number
        return bits

    def decide(self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy]) -> Look:
        """Decide how much of an image is looked at for artifacts, for all its targets.

        Each copy gets what the state says of the last look.
        """
        usable = [copy for copy in copies if copy.error is None]
        if not usable:
            return Look.NONE

        for copy in usable:
            keys = (key_of(copy.source_digest), key_of(copy.digest))
            copy.check_key = check_name(mapping, copy.source, copy.target, *keys)
            is_there = copy.already_at_target or self._knowledge.is_committed(
                copy.target.key, copy.digest
            )
            # What is to be copied, maybe again, has had no look yet; another tag of it has.
            if is_there:
                copy.last_check = self._knowledge.artifact_check(copy.check_key)
            copy.flags = self.listed_tags(copy.source, copy.source_digest)
        if self._recheck or not all(copy.already_at_target for copy in usable):
            return Look.DEEP

        now = self._wall()
        checks = [copy.last_check for copy in usable]
        if self._has_state:
            look = decide_look(checks, usable[0].flags, now)
        else:
            is_due = is_due_without_state(usable[0].source_digest, now)
            look = Look.DEEP if is_due else Look.NONE

        # What hangs below the top was asked about when the image was copied. Of an image that no
        # earlier run has seen there, that is believed of whoever has copied it: to ask would cost
        # the manifest (rule 4).
        is_unknown = not any(check.last for check in checks) and not any(
            tag.snapshot for tag in lookup.targets
        )
        if lookup.is_by_digest and is_unknown:
            return min(look, Look.TOP)
        return look

    def has_news(
        self, mapping: MappingRule, source: Repository, target: Repository, *keys: bytes
    ) -> bool:
        """Say whether a tag that never moves has artifacts that are not known to be complete.

        `keys` are those of its digests at source and target. No request is made.
        """
        check = self._knowledge.artifact_check(check_name(mapping, source, target, *keys))
        listed_tags = self.listed_tags(source, digest_like(keys[0]))
        return look_for_news(check, listed_tags) is not Look.NONE

    # What is there.

    async def find(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy], look: Look
    ) -> FoundArtifacts:
        """Return the artifacts of an image; SyncError when one may be missed.

        Each copy learns what its source lists. A copy fails that would be without a required
        artifact; where the target holds the image already, it is skipped as any other is.
        """
        is_trimmed = lookup.digest != lookup.source_digest
        subjects = list[str]()
        if not is_trimmed:
            subjects.append(lookup.source_digest)
        if look is Look.DEEP:
            subjects += await self._discovery.below(mapping, lookup)

        # Of an index that is trimmed: what hangs on the source's own stays behind.
        stays_behind = [lookup.source_digest] if is_trimmed else []
        self.lists.expect(lookup.source, len(subjects) + len(stays_behind))
        await self._compare_lists(lookup, copies, look, is_trimmed=is_trimmed)
        search = self._search_for(mapping, lookup.source, copies)
        found = await self._artifacts_of(search, subjects, deep=look is Look.DEEP)

        without_targets = _Search(search.mapping, lookup.source)
        stripped = await self._artifacts_of(without_targets, stays_behind, deep=False)
        if stripped:
            text = "what hangs on an index that is trimmed to its platforms stays behind: the target has another index"
            place = f"{lookup.source} -> {mapping.target_repository}"
            self._discovery.say("warning", "artifacts_stripped", f"{place}: {text}")

        if mapping.artifacts.require_artifacts and not found:
            missing = _missing(mapping, lookup, has_stripped=bool(stripped))
            for copy in copies:
                if not copy.already_at_target:
                    copy.error = copy.error or missing
        return FoundArtifacts(tuple(found), tuple(stripped))

    async def find_left_behind(
        self, mapping: MappingRule, lookup: TagLookup
    ) -> tuple[Artifact, ...]:
        """Return the artifacts of an image at its source that a mapping never copies, whatever the
        targets hold: a dry run names them. Raises SyncError when one may be missed.

        They stay behind because the mapping takes none, because its filters refuse them or what
        they refer to, or because they refer to what is left out with other platforms.
        """
        rule = mapping.artifacts
        takes_all = rule.enabled and not (rule.include or rule.exclude)
        if takes_all and not mapping.platforms:
            return ()

        subjects = await self._subjects_at_source(lookup)
        copied = set[str]()
        if rule.enabled:
            copied.update(await self._discovery.below(mapping, lookup))
            if lookup.digest == lookup.source_digest:
                copied.add(lookup.source_digest)
        left_out = [digest for digest in subjects if digest not in copied]

        unfiltered = rule._replace(include=(), exclude=())
        everything = _Search(mapping._replace(platforms=None, artifacts=unfiltered), lookup.source)
        if takes_all:
            self.lists.expect(lookup.source, len(left_out))
            return tuple(await self._artifacts_of(everything, left_out, deep=True))

        self.lists.expect(lookup.source, len(subjects))
        found = await self._artifacts_of(everything, subjects, deep=True)
        wanted = _Search(mapping._replace(platforms=None), lookup.source)
        taken = await self._artifacts_of(wanted, sorted(copied), deep=True)
        references = {artifact.reference for artifact in taken}
        return tuple(artifact for artifact in found if artifact.reference not in references)

    async def _subjects_at_source(self, lookup: TagLookup) -> list[str]:
        """Return the digests of an image that artifacts may refer to, before it is trimmed."""
        top = await self._discovery.manifest(lookup.source, lookup.source_digest)
        subjects = [top.digest]
        indexes = [top]
        for index in indexes:  # which grows by those that it names
            for entry in index.children:
                if entry.attested_digest or entry.digest in subjects:
                    continue
                subjects.append(entry.digest)
                if entry.is_index and len(subjects) <= _MOST_ARTIFACTS:
                    child = await self._discovery.manifest(lookup.source, entry.digest, entry)
                    indexes.append(child)
        return subjects

    def _search_for(
        self, mapping: MappingRule, source: Repository, copies: Sequence[ImageCopy]
    ) -> _Search:
        complete_copies = [
            copy for copy in copies if copy.already_at_target and copy.last_check.is_complete
        ]
        return _Search(
            mapping._replace(platforms=None),
            source,
            targets=tuple(copy.target for copy in copies if copy.error is None),
            new_targets=tuple(copy.target for copy in copies if not copy.already_at_target),
            complete_targets=tuple(copy.target for copy in complete_copies if not self._recheck),
        )

    async def _compare_lists(
        self, lookup: TagLookup, copies: Sequence[ImageCopy], look: Look, *, is_trimmed: bool
    ) -> None:
        """Compare the source's list with that of the last look, after which all of it was there."""
        digests = list[str]()
        if not is_trimmed:
            listed = await self.lists.read(lookup.source, lookup.source_digest)
            digests = [entry.digest for entry in listed.entries]
        listing_hash = snapshot_name(*sorted(digests))[:8]

        for copy in copies:
            copy.listing_hash = listing_hash
            if look is Look.DEEP:
                continue
            # There may be some below the top, which this look does not see.
            copy.flags |= copy.last_check.flags & HAS_ARTIFACTS
            # The state's own entries of these artifacts may be too old to be believed.
            if copy.last_check.listing_hash == listing_hash:
                self._known_present.update((copy.target.key, digest) for digest in digests)

    async def _artifacts_of(
        self, search: _Search, subjects: Iterable[str], *, deep: bool
    ) -> list[Artifact]:
        """Return the artifacts of these digests that the filters take, and theirs in turn.

        Theirs are asked for where a target lacks the artifact, with `deep` everywhere. Raises
        SyncError.
        """
        source = search.source
        level = list(dict.fromkeys(subjects))
        seen = set[str]()
        # An artifact of several digests is in the first list once for each of them.
        found = list[Artifact]()
        by_reference = dict[str, Artifact]()

        async def ask(subject: str) -> None:
            async with self._permits:
                if len(found) <= _MOST_ARTIFACTS:
                    found.extend(await self._direct_artifacts(search, subject))

        for _ in range(_MOST_LEVELS):
            seen.update(level)
            await gather(partial(ask, subject) for subject in level)
            by_reference.update((artifact.reference, artifact) for artifact in found)

            below = list[str]()
            for artifact in by_reference.values():
                below += await self._subjects_in(source, artifact, deep=deep)
            level = [digest for digest in dict.fromkeys(below) if digest not in seen]
            if max(len(found), len(level)) > _MOST_ARTIFACTS:
                break
            if not level:
                return list(by_reference.values())
            self.lists.expect(source, len(level))

        limits = (
            f"more than {_MOST_ARTIFACTS} artifacts, or artifacts on artifacts"
            f" more than {_MOST_LEVELS} deep"
        )
        raise ContentError(limits).with_place(source.side, "list referrers in", str(source))

    async def _subjects_in(
        self, source: Repository, artifact: Artifact, *, deep: bool
    ) -> list[str]:
        """Return the digests of an artifact that other artifacts may refer to."""
        if artifact.entry is None or not (deep or artifact.lookup is not None):
            # These digests are asked about only where a listing shows artifacts of theirs.
            digest = artifact.lookup.source_digest if artifact.lookup is not None else ""
            return [digest] if digest and self.listed_tags(source, digest) else []

        entries = [artifact.entry]
        known = {artifact.entry.digest}
        for entry in entries:  # which grows by the children of each index
            if not entry.is_index:
                continue
            index = await self._discovery.manifest(source, entry.digest, entry)
            entries += [
                child
                for child in index.children
                if not (child.attested_digest or child.digest in known)
            ]
            known.update(child.digest for child in index.children)
        return [entry.digest for entry in entries]

    async def _direct_artifacts(self, search: _Search, subject: str) -> list[Artifact]:
        """Return the artifacts of one digest, asked for once whatever tags it has (rule 7)."""
        if len(self._artifacts) > _MOST_KEPT:
            self._artifacts.pop(next(iter(self._artifacts)))
        targets = (search.targets, search.new_targets, search.complete_targets)
        once = self._artifacts[search.mapping.index, search.is_filtered, targets, subject]
        return await once.get(partial(self._ask_for_artifacts, search, subject))

    async def _ask_for_artifacts(self, search: _Search, subject: str) -> list[Artifact]:
        source = search.source
        entries = (await self.lists.read(source, subject)).entries
        source_tags = await self.lists.tags(source)

        # Where no tags were listed, cosign's are tried only if there is no API that would tell.
        is_blind = source_tags is None and self.lists.has_api(source) is False
        cosign_tags = [referrers_tag(subject) + suffix for suffix in _COSIGN_SUFFIXES]
        tags = [tag for tag in cosign_tags if is_blind or tag in (source_tags or ())]
        if not (entries or tags or self.lists.has_api(source)):
            text = f"{source}: no referrers API and no fallback tag, images without artifacts are copied as they are"
            self._discovery.say("info", "no_referrers", text)

        look_at = partial(self._look_at, search, subject)
        artifacts = await gather(
            [
                *(
                    partial(look_at, entry.digest, entry)
                    for entry in entries
                    if entry.digest != subject
                ),
                *(partial(look_at, tag, None) for tag in tags),
            ]
        )
        return [
            artifact
            for artifact in artifacts
            if artifact is not None and search.wants(artifact.types)
        ]

    async def _look_at(
        self, search: _Search, subject: str, reference: str, entry: Descriptor | None
    ) -> Artifact | None:
        """Find out what an artifact is and which targets lack it.

        Returns None where the filters refuse it, or it is gone.
        """
        try:
            if entry is not None:
                return await self._look_at_entry(search, subject, entry)
            return await self._look_at_tag(search, subject, reference)
        except RegistryError as error:
            if error.status != 404:
                raise

        if entry is not None:
            text = (
                f"{reference} is listed as a referrer of {subject} and is not there: it is left out"
            )
            self._discovery.say("warning", "referrer_missing", f"{search.source}: {text}")
        return None

    async def _look_at_entry(
        self, search: _Search, subject: str, entry: Descriptor
    ) -> Artifact | None:
        """Find out about an entry of a list of referrers."""
        types = frozenset({entry.artifact_type} if entry.artifact_type else ())
        if types and not search.wants(types):
            return None

        believed = [
            target
            for target in search.targets
            if self._knowledge.is_committed(target.key, entry.digest)
        ]
        lacking = tuple(
            target
            for target in search.targets
            if not self._is_certainly_at(target, entry.digest)
            and not (target in believed and target in search.complete_targets)
        )
        if not types and search.is_filtered:
            manifest = await self._discovery.manifest(search.source, entry.digest, entry)
            types = _types_of(manifest)
        if not lacking or not search.wants(types):
            return Artifact(subject, entry.digest, entry, None, types)

        silent = [target for target in search.new_targets if target not in believed]
        lookup = await self._discovery.look_up(
            search.mapping, entry.digest, entry.digest, lacking, silent=silent, expected=entry
        )
        if lookup.tree is None:
            return Artifact(subject, entry.digest, entry, lookup, types)

        # It is copied: what it says of itself counts, whatever the list says of it.
        manifest = lookup.tree.root
        types = _types_of(manifest)
        entry = entry._replace(
            artifact_type=manifest.artifact_type, annotations=manifest.annotations
        )
        wanted_lookup = lookup if search.wants(types) else None
        return Artifact(subject, entry.digest, entry, wanted_lookup, types)

    def _is_certainly_at(self, target: Repository, digest: str) -> bool:
        if (target.key, digest) in self._known_present:
            return True
        return self._knowledge.is_confirmed(target.key, digest)

    async def _look_at_tag(self, search: _Search, subject: str, tag: str) -> Artifact:
        """Find out about a tag of cosign's. Its types are those of its config and layers."""
        lookup = await self._discovery.look_up(
            search.mapping, tag, tag, search.targets, silent=search.new_targets
        )
        types = frozenset[str]()
        if lookup.tree is not None or search.is_filtered:
            manifest = await self._discovery.manifest(search.source, lookup.source_digest)
            parts = (*manifest.dependencies, manifest.config)
            types = frozenset(part.media_type for part in parts if part is not None)
        return Artifact(subject, tag, None, lookup, types)


def _types_of(manifest: Manifest) -> frozenset[str]:
    return frozenset({manifest.artifact_type} if manifest.artifact_type else ())


def _missing(mapping: MappingRule, lookup: TagLookup, *, has_stripped: bool) -> RegistryError:
    """Return the error of an image without an artifact that it is required to have."""
    rule = mapping.artifacts
    text = "require_artifacts: it has no artifact"
    if rule.include or rule.exclude:
        text += " that include and exclude take"
    if has_stripped:
        text += "; what hangs on the index before it is trimmed does not count"

    error = RegistryError(text, status=404)
    error.hint = "sign the image (with platforms: each platform's), or leave require_artifacts out"
    reference = lookup.source.reference(lookup.source_digest)
    error.with_place(lookup.source.side, "list referrers of", reference)
    return error
