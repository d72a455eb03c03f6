"""Which artifacts refer to an image, and which targets lack them.

Owns: the question of docs/specification.md section 1.1, "Artifacts" (lists of referrers, cosign's
tags, artifacts of artifacts), and its filters.
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
from _regsync.oci.manifest import Descriptor
from _regsync.oci.reference import referrers_tag
from _regsync.registry.repository import Repository
from _regsync.state.knowledge import Knowledge, RepositoryKey, digest_like, key_of, snapshot_name
from _regsync.sync.artifact_checks import (
    COMPLETE,
    COPIED,
    HAS_ARTIFACTS,
    ArtifactCheck,
    Look,
    decide_artifact_check,
    is_due_without_state,
    look_for_news,
)
from _regsync.sync.discovery import Discovery, Once, TagLookup, gather
from _regsync.sync.image import ImageCopy
from _regsync.sync.referrer_lists import ReferrerLists

_COSIGN_SUFFIXES = (".sig", ".att", ".sbom")

# Signatures of attestations of signatures have been seen; a chain that goes on is somebody's trap.
_DEEPEST = 8

# Artifacts of one image.
_MOST_ARTIFACTS = 10_000

# Digests whose artifacts are kept, for other tags of the same image.
_MOST_KEPT = 1024

# Digests of one image that are asked about at the same time: each answer may name 10,000.
_MOST_ASKED = 32


class Artifact(NamedTuple):
    """One artifact, as it is named at the source."""

    # the digest that it refers to
    subject: str
    # its digest, or cosign's tag
    reference: str
    # its entry in a list of referrers; None: it is a tag of cosign's
    entry: Descriptor | None
    # None: every target has it
    lookup: TagLookup | None
    types: frozenset[str]

    def __str__(self) -> str:
        return f"{self.reference} ({', '.join(sorted(self.types)) or 'no type'}) of {self.subject}"


class FoundArtifacts(NamedTuple):
    """The artifacts of an image: those that are copied, and those of an index that is trimmed."""

    copied: tuple[Artifact, ...] = ()
    stripped: tuple[Artifact, ...] = ()


class _Question(NamedTuple):
    """Whose artifacts are asked for, and for which targets.

    `new_targets` did not have the image, so they cannot have its artifacts and are not asked.
    `complete_targets` had the image with all its artifacts, so what the state says of them is
    believed.
    """

    mapping: MappingRule
    source: Repository
    targets: tuple[Repository, ...] = ()
    new_targets: tuple[Repository, ...] = ()
    complete_targets: tuple[Repository, ...] = ()

    def wants(self, types: frozenset[str]) -> bool:
        """Say whether the filters take an artifact of these types."""
        rule = self.mapping.artifacts
        if rule.include and types.isdisjoint(rule.include):
            return False
        return types.isdisjoint(rule.exclude)


def last_check(copy: ImageCopy) -> ArtifactCheck:
    """Return what was remembered of a copy's artifacts when it was decided on."""
    return ArtifactCheck(*copy.last_check)


def flags_after(copy: ImageCopy) -> int:
    """Return what is remembered of a look: the flags of `artifact_checks`, and the tags shown.

    Where something failed the artifacts are not complete, and the next run looks at all of them.
    """
    known = last_check(copy)
    was_copied_now = not copy.already_at_target and copy.immutable_digest is None
    flags = COPIED if was_copied_now or known.was_copied else 0
    if copy.error is not None:
        return flags

    if copy.artifacts_copied or copy.artifacts_skipped:
        flags |= HAS_ARTIFACTS
    return flags | copy.flags | COMPLETE


class Referrers:
    """The questions of one run about artifacts; `lists` are those of its registries."""

    def __init__(
        self, discovery: Discovery, knowledge: Knowledge, wall: Callable[[], float], kept: bool
    ) -> None:
        """`wall` gives the time in seconds since 1970; `kept`: there is a state."""
        self._discovery = discovery
        self._knowledge = knowledge
        self._wall = wall
        self._has_state = kept
        self.lists = ReferrerLists(discovery, knowledge)

        self._artifacts = defaultdict[object, Once[list[Artifact]]](Once)
        self._asking = anyio.CapacityLimiter(_MOST_ASKED)

        # Artifacts that a target has, by target and digest: the source's list has not changed since the
        # look that found them all there.
        self._settled = set[tuple[RepositoryKey, str]]()

    # When to look.

    def shown(self, source: Repository, digest: str) -> int:
        """Return as bits which tags with artifacts of a digest the source's listing shows: the
        fallback tag, then cosign's. 0 where nothing was listed.
        """
        names = self._discovery.names(source) or ()
        bits = 0
        for number, suffix in enumerate(("", *_COSIGN_SUFFIXES)):
            if referrers_tag(digest) + suffix in names:
                bits |= 1 << number
        return bits

    @staticmethod
    def record(mapping: MappingRule, source: Repository, target: Repository, *keys: bytes) -> bytes:
        """Name what the state remembers of an image's artifacts: its source and target, the keys
        of its digests there, and the filters.
        """
        rule = mapping.artifacts
        filters = (",".join(sorted(types)) for types in (rule.include, rule.exclude))
        return snapshot_name(
            "artifacts", *source.key, *target.key, *(key.hex() for key in keys), *filters
        )

    def _last_check(self, record: bytes) -> ArtifactCheck:
        return ArtifactCheck(*self._knowledge.look(record))

    def decide(self, mapping: MappingRule, copies: Sequence[ImageCopy]) -> Look:
        """Decide whether the artifacts of an image are looked at, for all its targets.

        Each copy gets its record and what is known by it.
        """
        usable = [copy for copy in copies if copy.error is None]
        if not usable:
            return Look.NONE

        for copy in usable:
            keys = (key_of(copy.source_digest), key_of(copy.digest))
            copy.check_key = self.record(mapping, copy.source, copy.target, *keys)
            copy.last_check = self._last_check(copy.check_key)
            copy.flags = self.shown(copy.source, copy.source_digest)
        if not all(copy.already_at_target for copy in usable):
            return Look.DEEP

        now = self._wall()
        required = mapping.artifacts.require_artifacts
        one = usable[0]
        if not self._has_state and not required:
            return Look.DEEP if is_due_without_state(one.source_digest, now) else Look.NONE
        checks = [last_check(copy) for copy in usable]
        return decide_artifact_check(checks, one.flags, now, required=required)

    def has_news(
        self, mapping: MappingRule, source: Repository, target: Repository, *keys: bytes
    ) -> bool:
        """Say whether a tag that never moves has artifacts that are not known to be complete.

        `keys` are those of its digests at source and target. No request is made.
        """
        check = self._last_check(self.record(mapping, source, target, *keys))
        shown = self.shown(source, digest_like(keys[0]))
        required = mapping.artifacts.require_artifacts
        return look_for_news(check, shown, required=required) is not Look.NONE

    # What is there.

    async def find(
        self, mapping: MappingRule, lookup: TagLookup, copies: Sequence[ImageCopy], look: Look
    ) -> FoundArtifacts:
        """Return the artifacts of an image; SyncError when one may be missed, or a required one is.

        Each copy learns what its source lists.
        """
        is_trimmed = lookup.digest != lookup.source_digest
        await self._compare_lists(lookup, copies, look, is_trimmed=is_trimmed)

        subjects = list[str]()
        if not is_trimmed:
            subjects.append(lookup.source_digest)
        if look is Look.DEEP:
            subjects += await self._discovery.below(mapping, lookup)
        question = _question(mapping, lookup.source, copies)
        found = await self._all_of(question, subjects, deep=look is Look.DEEP)

        stripped = list[Artifact]()
        if is_trimmed:
            nowhere = _Question(question.mapping, lookup.source)
            stripped = await self._all_of(nowhere, [lookup.source_digest], deep=False)
        if stripped:
            text = "what hangs on an index that is trimmed to its platforms stays behind: the target has another index"
            place = f"{lookup.source} -> {mapping.target_repository}"
            self._discovery.say("warning", "artifacts_stripped", f"{place}: {text}")

        is_known = look is not Look.DEEP and any(last_check(copy).has_artifacts for copy in copies)
        if mapping.artifacts.require_artifacts and not found and not is_known:
            raise _missing(mapping, lookup, has_stripped=bool(stripped))
        if not mapping.artifacts.enabled:  # a dry run says what stays behind
            return FoundArtifacts(stripped=(*found, *stripped))
        return FoundArtifacts(tuple(found), tuple(stripped))

    async def _compare_lists(
        self, lookup: TagLookup, copies: Sequence[ImageCopy], look: Look, *, is_trimmed: bool
    ) -> None:
        """Compare what the source lists with the last look: what it listed then is at the target."""
        digests = list[str]()
        if not is_trimmed:
            listed = await self.lists.listed(lookup.source, lookup.source_digest)
            digests = [entry.digest for entry in listed.entries]
        listing_hash = snapshot_name(*sorted(digests))[:8]

        for copy in copies:
            copy.listing_hash = listing_hash
            if look is Look.DEEP:
                continue
            # There may be some below the top, which is not asked for.
            known = last_check(copy)
            copy.flags |= known.flags & HAS_ARTIFACTS
            # The state's entries of these manifests may be too old to be believed; this never is.
            if known.listing_hash == listing_hash:
                self._settled.update((copy.target.key, digest) for digest in digests)

    async def _all_of(
        self, question: _Question, digests: Iterable[str], *, deep: bool
    ) -> list[Artifact]:
        """Return the artifacts of these digests that the filters take, and theirs in turn.

        Theirs are asked for where a target lacks the artifact, if `deep` everywhere. Raises SyncError.
        """
        source = question.source
        level = list(dict.fromkeys(digests))
        seen = set[str]()
        # An artifact may refer to more than one digest: it is in the first list for each of them.
        every = list[Artifact]()
        by_reference = dict[str, Artifact]()

        async def ask(subject: str) -> None:
            async with self._asking:
                if len(every) <= _MOST_ARTIFACTS:
                    every.extend(await self._artifacts_of(question, subject))

        for _ in range(_DEEPEST):
            self.lists.expect(source, len(level))
            seen.update(level)
            await gather(partial(ask, subject) for subject in level)
            by_reference.update((artifact.reference, artifact) for artifact in every)

            below = list[str]()
            for artifact in by_reference.values():
                below += await self._subjects_in(source, artifact, deep=deep)
            level = [digest for digest in dict.fromkeys(below) if digest not in seen]
            if max(len(every), len(level)) > _MOST_ARTIFACTS:
                break
            if not level:
                return list(by_reference.values())

        limits = (
            f"more than {_MOST_ARTIFACTS} artifacts, or artifacts on artifacts"
            f" more than {_DEEPEST} deep"
        )
        raise ContentError(limits).with_place(source.side, "list referrers in", str(source))

    async def _subjects_in(
        self, source: Repository, artifact: Artifact, *, deep: bool
    ) -> list[str]:
        """Return the digests of an artifact that other artifacts may refer to."""
        is_copied = artifact.lookup is not None
        if artifact.entry is None or not (deep or is_copied):
            # What a tag of cosign's names is asked about only if a listing shows something.
            digest = artifact.lookup.source_digest if artifact.lookup is not None else ""
            return [digest] if digest and self.shown(source, digest) else []

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

    async def _artifacts_of(self, question: _Question, subject: str) -> list[Artifact]:
        """Return the artifacts of one digest, asked for once whatever tags it has (rule 7)."""
        if len(self._artifacts) > _MOST_KEPT:
            self._artifacts.pop(next(iter(self._artifacts)))
        targets = (question.targets, question.new_targets, question.complete_targets)
        once = self._artifacts[question.mapping.index, targets, subject]
        return await once.get(partial(self._ask_for_artifacts, question, subject))

    async def _ask_for_artifacts(self, question: _Question, subject: str) -> list[Artifact]:
        source = question.source
        listed = await self.lists.listed(source, subject)
        names = await self.lists.names(source)

        # Where nothing was listed, cosign's tags are worth a question only where no API would tell.
        is_probed = names is None and self.lists.has_api(source) is False
        cosign_tags = [referrers_tag(subject) + suffix for suffix in _COSIGN_SUFFIXES]
        tags = [tag for tag in cosign_tags if is_probed or tag in (names or ())]
        if not (listed.entries or tags or self.lists.has_api(source)):
            text = f"{source}: no referrers API and no fallback tag, images without artifacts are copied as they are"
            self._discovery.say("info", "no_referrers", text)

        look_at = partial(self._look_at, question, subject)
        found = await gather(
            [
                *(
                    partial(look_at, entry.digest, entry)
                    for entry in listed.entries
                    if entry.digest != subject
                ),
                *(partial(look_at, tag, None) for tag in tags),
            ]
        )
        return [
            artifact
            for artifact in found
            if artifact is not None and question.wants(artifact.types)
        ]

    async def _look_at(
        self, question: _Question, subject: str, reference: str, entry: Descriptor | None
    ) -> Artifact | None:
        """Find out what an artifact is and which targets lack it.

        Returns None where the filters refuse it, or it is gone.
        """
        try:
            if entry is not None:
                return await self._look_at_entry(question, subject, entry)
            return await self._look_at_tag(question, subject, reference)
        except RegistryError as error:
            if error.status != 404:
                raise

        if entry is not None:
            text = (
                f"{reference} is listed as a referrer of {subject} and is not there: it is left out"
            )
            self._discovery.say("warning", "referrer_missing", f"{question.source}: {text}")
        return None

    async def _look_at_entry(
        self, question: _Question, subject: str, entry: Descriptor
    ) -> Artifact | None:
        """Find out about an entry of a list of referrers."""
        types = frozenset({entry.artifact_type} if entry.artifact_type else ())
        if types and not question.wants(types):
            return None

        believed = [
            target
            for target in question.targets
            if self._knowledge.is_committed(target.key, entry.digest)
        ]
        lacking = tuple(
            target
            for target in question.targets
            if not self._has(target, entry.digest)
            and not (target in believed and target in question.complete_targets)
        )
        if lacking or not types:
            manifest = await self._discovery.manifest(question.source, entry.digest, entry)
            types = frozenset({manifest.artifact_type} if manifest.artifact_type else ())
            entry = entry._replace(
                artifact_type=manifest.artifact_type, annotations=manifest.annotations
            )
        if not lacking or not question.wants(types):
            return Artifact(subject, entry.digest, entry, None, types)

        silent = [target for target in question.new_targets if target not in believed]
        lookup = await self._discovery.look_up(
            question.mapping, entry.digest, entry.digest, lacking, silent=silent
        )
        return Artifact(subject, entry.digest, entry, lookup, types)

    def _has(self, target: Repository, digest: str) -> bool:
        """Say whether a target is sure to have an artifact."""
        if (target.key, digest) in self._settled:
            return True
        return self._knowledge.is_confirmed(target.key, digest)

    async def _look_at_tag(self, question: _Question, subject: str, tag: str) -> Artifact:
        """Find out about a tag of cosign's. Its types are those of its config and layers."""
        lookup = await self._discovery.look_up(
            question.mapping, tag, tag, question.targets, silent=question.new_targets
        )
        rule = question.mapping.artifacts
        types = frozenset[str]()
        if lookup.tree is not None or rule.include or rule.exclude:
            manifest = await self._discovery.manifest(question.source, lookup.source_digest)
            named_in_it = (*manifest.dependencies, manifest.config)
            types = frozenset(each.media_type for each in named_in_it if each is not None)
        return Artifact(subject, tag, None, lookup, types)


def _question(mapping: MappingRule, source: Repository, copies: Sequence[ImageCopy]) -> _Question:
    """Return the question for an image's artifacts. They are not filtered by platform."""
    is_enabled = mapping.artifacts.enabled
    return _Question(
        mapping._replace(platforms=None),
        source,
        targets=tuple(copy.target for copy in copies if copy.error is None and is_enabled),
        new_targets=tuple(copy.target for copy in copies if not copy.already_at_target),
        complete_targets=tuple(
            copy.target
            for copy in copies
            if copy.already_at_target and last_check(copy).is_complete
        ),
    )


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
