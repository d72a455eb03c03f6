"""Look at what targets hold: tags, manifests, blobs, artifacts.

Owns: what an audit asks, and what the answers show to be wrong.
May not know: how a finding is shown, how anything is copied.
Invariants: nothing is written anywhere. What could not be asked is an error, never a finding.
Follows: docs/design.md section 12.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import anyio

from _regsync.config.model import Config, MappingRule
from _regsync.errors import (
    ContentError,
    MappingConflict,
    RegistryError,
    Side,
    SyncError,
    WrongBytes,
)
from _regsync.oci.manifest import MAX_INDEX_DEPTH, Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.registry.throttle import ATTEMPTS, LARGE_BODY, Demand, RetryBudget
from _regsync.registry.transport import Transport
from _regsync.state.archive import RepositoryKey, digest_like, key_of
from _regsync.state.database import StateFile
from _regsync.state.knowledge import Knowledge
from _regsync.state.seen import FirstSeen
from _regsync.sync.discovery import Discovery, Once, check_tree_size, gather
from _regsync.sync.findings import AuditReport, Finding, Flaw, corrupt, differs, incomplete, missing
from _regsync.sync.image import Traffic
from _regsync.sync.locked import LockedDiscovery, LockedReferrers
from _regsync.sync.lockfile import Lock
from _regsync.sync.mappings import WantedTag, assign, grouped
from _regsync.sync.referrers import MOST_ARTIFACTS, MOST_LEVELS, Artifact, Referrers
from _regsync.sync.relay import Relay
from _regsync.sync.report import Outcome
from _regsync.sync.transfer import known_body


class _AuditedImage(NamedTuple):
    """What a mapping's tag is to be at one target."""

    wanted: WantedTag
    source: Repository
    target: Repository

    @property
    def source_name(self) -> str:
        return self.source.reference(self.wanted.tag)

    @property
    def target_name(self) -> str:
        return self.target.reference(self.wanted.tag)


class _Expected(NamedTuple):
    """What a tag is to name at its target."""

    # Empty where `min_age` holds back an index that was not trimmed yet.
    digest: str
    # The source's own digest, which differs where an index is trimmed to its platforms.
    source_digest: str
    # Whether `min_age` holds the digest back: then what the target has, or has not, is right.
    is_held: bool

    @property
    def is_trimmed(self) -> bool:
        return self.digest != self.source_digest


class _Look:
    """What was found where something was looked at: flaws, and why not all of it could be asked."""

    def __init__(self, image: _AuditedImage) -> None:
        # What is looked at, or a part of it. A part of several images is looked at once, for the first.
        self.image = image
        self.flaws = list[Flaw]()
        self.error: SyncError | None = None
        # The entries of indexes whose manifests are there.
        self.entries = list[Descriptor]()
        # Digests that the source is known to hold: what it lists for them has to be there.
        self.at_source = set[str]()

    def judging(self, what: str, digest: str, absent: Flaw | None = None) -> _Judgement:
        """Return a block in which something is asked for, and which ends where the answer is an error.

        `absent` is the flaw where the answer is 404; `what` and `digest` name what is corrupt where
        the bytes are wrong.
        """
        return _Judgement(self, partial(corrupt, what, digest), absent)

    def add(self, other: _Look) -> None:
        """Add what another look has found."""
        self.flaws += other.flaws
        self.error = self.error or other.error


class _Judgement:
    """A block that asks for something. Its errors become flaws of a look, or the look's error."""

    def __init__(self, look: _Look, corrupt: Callable[[str], Flaw], absent: Flaw | None) -> None:
        """`corrupt` makes the flaw of wrong bytes from what is wrong with them."""
        self._look = look
        self._corrupt = corrupt
        self._absent = absent

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, SyncError):
            return False
        is_absent = isinstance(error, RegistryError) and error.status == 404
        if is_absent and self._absent is not None:
            self._look.flaws.append(self._absent)
        elif isinstance(error, ContentError):
            self._look.flaws.append(self._corrupt(error.message))
        else:
            self._look.error = self._look.error or error
        return True


class _SampledBlob(NamedTuple):
    """A blob to read back, and an image that names it."""

    image: _AuditedImage
    blob: Descriptor


class Audit:
    """One audit of a configuration's targets.

    How it goes, one phase after the other:

        _select_group    which tags do the mappings select?
        _look_at_image   is an image there, with all that it names and all that refers to it?
        _read_back       have some blobs, chosen by chance, the right bytes?
    """

    # What the progress display says of an image at work.
    doing = "looking at"
    # A signal ends an audit at once.
    drain_ends = None
    # Findings are told as they come.
    failures: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        transport: Transport,
        config: Config,
        emit: Callable[[Finding | Outcome], None],
        report: AuditReport,
        *,
        read: int = 0,
        first_seen: FirstSeen | None = None,
        lock: Lock | None = None,
    ) -> None:
        """Prepare to look at all images that `config` selects, and to read back `read` blobs of each
        target's registry. `emit` is called with each finding, and with each failed image.

        `min_age` goes by `first_seen`. With a lock, names and digests of sources are the lock's.
        """
        machine = transport.machine
        self.transport = transport
        self._config = config
        self._emit = emit
        self._report = report
        self._read = read
        self._first_seen = first_seen
        self._log = machine.log

        # The state tells how indexes were trimmed, and how hosts ask for logins. It is not believed
        # of anything that a target holds.
        self._state = StateFile(config.cache_dir, machine.log)
        self._state.load(keep=False)
        knowledge = Knowledge(self._state, now=machine.wall, ttl=config.cache_ttl)
        self._knowledge = knowledge
        make_discovery = Discovery if lock is None else partial(LockedDiscovery, lock)
        make_referrers = Referrers if lock is None else LockedReferrers
        self._discovery = make_discovery(transport, knowledge, reads_only=True)
        self._referrers = make_referrers(
            self._discovery, knowledge, machine.wall, has_state=self._state.is_used
        )

        # By target and digest: what was found below a manifest, for all tags and indexes that name it.
        self._looks = defaultdict[tuple[RepositoryKey, str], Once[_Look]](Once)
        # By target and digest: the size of a blob as the registry tells it.
        self._blobs = defaultdict[tuple[RepositoryKey, str], Once[int | None]](Once)
        # By target and digest: held while one of the tags that probably name it is read.
        self._tag_reads = defaultdict[tuple[RepositoryKey, str], anyio.Lock](anyio.Lock)

        # By target's host: how many blobs were found there, and a fair sample of them.
        self._blobs_found = defaultdict[str, int](int)
        self._samples = defaultdict[str, list[_SampledBlob]](list)

        # For the display.
        self.images_known = 0
        # Blobs that are read back: nothing is sent.
        self.traffic = Traffic()
        self._under_way = dict[str, None]()

    @property
    def images_done(self) -> int:
        return self._report.images_done

    @property
    def bytes_moved(self) -> int:
        return self.transport.blob_bytes

    def under_way(self) -> list[str]:
        """Return the target references of the images that are looked at."""
        return list(self._under_way)

    async def run(self) -> None:
        """Look at all images; findings and failures go to the report."""
        for registry in self._config.in_use:
            self.transport.prepare(registry)  # an unusable file stops all before any request
        try:
            groups = grouped(self._config.mappings, lambda mapping: mapping.target_keys)
            selected = await gather(partial(self._select_group, group) for group in groups)

            # Each target has its own queue, so that one that is away does not hold up the others.
            by_host = defaultdict[str, list[_AuditedImage]](list)
            for image in chain.from_iterable(selected):
                by_host[image.target.host.key].append(image)
            await gather(
                partial(gather, [partial(self._look_at_image, image) for image in images])
                for images in by_host.values()
            )

            samples = list(chain.from_iterable(self._samples.values()))
            self.traffic.expected = sum(sampled.blob.size for sampled in samples)
            await gather(partial(self._read_back, sampled) for sampled in samples)
            self._report.interrupted = False
        finally:
            self._report.images_undone = self.images_known - self.images_done
            self._state.close()

    # Which images.

    async def _select_group(self, group: list[MappingRule]) -> list[_AuditedImage]:
        """Select the tags of mappings that write a common repository (I10)."""
        selected = await gather(partial(self._select, mapping) for mapping in group)
        tags, conflicts = assign(zip(group, selected, strict=True))

        for conflict in conflicts:
            text = f"mappings[{conflict.owner.index}] writes this tag too, from another source"
            self._fail_all(conflict.wanted, MappingConflict(text))
        return [image for wanted in tags for image in self._images_of(wanted)]

    async def _select(self, mapping: MappingRule) -> tuple[str, ...]:
        """Return the tags that a mapping selects. Where its source cannot be listed, one failed image
        for each target stands for them.
        """
        try:
            selection = await self._discovery.select_tags(mapping)
        except SyncError as error:
            self._fail_all(WantedTag(mapping, "*", mapping.targets), error)
            return ()
        for event, text in selection.doubts(str(self._discovery.source_of(mapping))):
            self._log("warning", event, text)
        return selection.kept

    def _images_of(self, wanted: WantedTag) -> list[_AuditedImage]:
        mapping = wanted.mapping
        source = self._discovery.source_of(mapping)
        self.images_known += len(wanted.targets)
        return [
            _AuditedImage(
                wanted,
                source,
                self._discovery.repository(registry, mapping.target_repository, Side.TARGET),
            )
            for registry in wanted.targets
        ]

    def _fail_all(self, wanted: WantedTag, error: SyncError) -> None:
        """Report a tag that is looked at nowhere."""
        for image in self._images_of(wanted):
            self._report.images_done += 1
            self._fail(image, error)

    # One image.

    async def _look_at_image(self, image: _AuditedImage) -> None:
        """Look at what a target holds under a tag, and at all that hangs on it."""
        look = _Look(image)
        self._under_way[image.target_name] = None
        try:
            await self._look_at_tag(look)
        except SyncError as error:
            look.error = look.error or error
        del self._under_way[image.target_name]
        self._report.images_done += 1
        self._end(look)

    async def _look_at_tag(self, look: _Look) -> None:
        image = look.image
        expected = await self._expected(image)
        top: Manifest | None = None
        likely = expected.digest or expected.source_digest
        with look.judging("manifest", likely):
            top = await self._manifest_of_tag(image.target, image.wanted.tag, likely)
            if top is None and not expected.is_held:
                look.flaws.append(missing(expected.digest))
        if top is None:
            return

        is_right = top.digest == expected.digest
        if not is_right and not expected.is_held:
            look.flaws.append(differs("", top.digest, expected.digest))
        # What differs is looked at whole, too.
        below = await self._look_below(image, top)
        look.add(below)
        if not image.wanted.mapping.artifacts.enabled:
            return

        subjects = {entry.digest for entry in below.entries if not entry.attested_digest}
        if not is_right:  # the source may not know these digests
            subjects.add(top.digest)
        elif not expected.is_trimmed:
            subjects.add(top.digest)
            look.at_source |= subjects
        else:  # nothing refers to an index that was made here; those below may be such, too
            indexes = {entry.digest for entry in below.entries if entry.is_index}
            look.at_source |= subjects - indexes
        await self._look_at_artifacts(look, subjects)

    async def _expected(self, image: _AuditedImage) -> _Expected:
        """Find out what the target is to hold under the tag. Raises the source's SyncError."""
        mapping = image.wanted.mapping
        tag = image.wanted.tag
        named = await self._discovery.name_at_source(mapping, tag, by_head=True)
        is_held = self._is_held(image, named.digest)
        if named.pushed is not None:
            return _Expected(named.pushed, named.digest, is_held)

        key = self._discovery.snapshot_key(mapping, image.source, image.target, tag, tag)
        snapshot = self._knowledge.snapshot(key)
        if snapshot is not None and snapshot.source == key_of(named.digest):
            is_trimmed = snapshot.pushed != snapshot.source
            pushed = digest_like(snapshot.pushed) if is_trimmed else named.digest
            return _Expected(pushed, named.digest, is_held)
        if is_held:
            return _Expected("", named.digest, is_held)
        lookup = await self._discovery.name_whole(mapping, tag, named.digest)
        return _Expected(lookup.digest, lookup.source_digest, is_held)

    def _is_held(self, image: _AuditedImage, digest: str) -> bool:
        """Say whether no run copies a digest yet, because of `min_age`."""
        min_age = image.wanted.mapping.min_age
        if not min_age or self._first_seen is None:
            return False
        return self._first_seen.held_until(image.source.key, digest, min_age) is not None

    async def _manifest_of_tag(self, target: Repository, tag: str, likely: str) -> Manifest | None:
        """Return what a tag names, None where it names nothing.

        Of several tags that name one digest, `likely`, the first is read; the others are asked for their
        digest alone. A tag that a listing has shown to be absent is not asked for.
        """
        listed = self._discovery.names(target)
        if listed is not None and tag not in listed:
            return None
        async with self._tag_reads[target.key, likely]:
            if self._discovery.at_hand(target, likely) is None:
                return await _unless_absent(self._discovery.manifest_of_tag(target, tag))
        digest = await target.head_manifest(tag)
        if digest is None:
            return None
        if not digest:  # a registry may answer a HEAD without a digest
            return await _unless_absent(self._discovery.manifest_of_tag(target, tag))
        return await _unless_absent(self._discovery.manifest(target, digest))

    # What a manifest names.

    async def _look_below(self, image: _AuditedImage, top: Manifest) -> _Look:
        """Look at all that a manifest names, at any depth; once for all that name the manifest."""
        once = self._looks[image.target.pool, top.digest]
        return await once.get(partial(self._look_at_parts, image, top))

    async def _look_at_parts(self, image: _AuditedImage, top: Manifest) -> _Look:
        look = _Look(image)
        where = image.target.key
        entries = dict[str, Descriptor]()
        blobs = dict[str, Descriptor]()

        level = {top.digest: top}
        depth = 0
        while level:
            depth += 1
            self._report.manifests_present.update((digest, where) for digest in level)
            new = dict[str, Descriptor]()
            for manifest in level.values():
                blobs.update((blob.digest, blob) for blob in manifest.blobs)
                new.update((child.digest, child) for child in manifest.children)
            new = {digest: child for digest, child in new.items() if digest not in entries}
            entries.update(new)
            try:
                check_tree_size(entries.values())
                if new and depth > MAX_INDEX_DEPTH:
                    raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")
            except ContentError as error:
                look.error = error.with_place(Side.TARGET, "read", image.target_name)
                break
            read = await gather(partial(self._look_at_child, look, child) for child in new.values())
            level = {manifest.digest: manifest for manifest in read if manifest is not None}
            look.entries += [entries[digest] for digest in level]

        await gather(partial(self._look_at_blob, look, blob) for blob in blobs.values())
        return look

    async def _look_at_child(self, look: _Look, child: Descriptor) -> Manifest | None:
        """Return a manifest that an index names, None where it is not there or not right."""
        with look.judging("manifest", child.digest, incomplete("manifest", child)):
            return await self._discovery.manifest(look.image.target, child.digest, child)
        return None

    async def _look_at_blob(self, look: _Look, blob: Descriptor) -> None:
        target = look.image.target
        once = self._blobs[target.pool, blob.digest]
        with look.judging("blob", blob.digest, incomplete("blob", blob)):
            if target.far_repository(blob.digest) is not None:
                return  # left out of a layout, because the far side holds it
            size = await once.get(partial(target.blob_size, blob.digest))
            if size not in (None, blob.size):
                raise ContentError(f"it has {size} bytes, its descriptor says {blob.size}")
            self._record_blob(look.image, blob)

    def _record_blob(self, image: _AuditedImage, blob: Descriptor) -> None:
        """Note that a target has a blob, and by chance take it into the sample that is read back.

        Of all blobs that are found at a host each has the same chance to be in its sample, but for
        those whose bytes are known anyway: `{}`, and what a descriptor embeds.
        """
        place = (blob.digest, image.target.key)
        if place in self._report.blobs_present:
            return
        self._report.blobs_present.add(place)
        if known_body(blob) is not None:
            return

        host = image.target.host.key
        self._blobs_found[host] += 1
        sample = self._samples[host]
        if len(sample) < self._read:
            sample.append(_SampledBlob(image, blob))
            return
        place_in_sample = int(self.transport.machine.chance() * self._blobs_found[host])
        if place_in_sample < self._read:
            sample[place_in_sample] = _SampledBlob(image, blob)

    # What refers to a manifest.

    async def _look_at_artifacts(self, look: _Look, subjects: Collection[str]) -> None:
        """Look at the artifacts of these subjects, at those of these artifacts, and so on."""
        lists = self._referrers.lists
        seen = set[str]()
        level = set(subjects)
        for _ in range(MOST_LEVELS):
            seen |= level
            lists.expect(look.image.target, len(level))
            lists.expect(look.image.source, len(level & look.at_source))
            below = await gather(
                partial(self._look_at_artifacts_of, look, subject) for subject in sorted(level)
            )
            level = set(chain.from_iterable(below)) - seen
            if not level:
                return
            if len(seen) + len(level) > MOST_ARTIFACTS:
                break

        limits = f"more than {MOST_ARTIFACTS} artifacts, or artifacts on artifacts more than {MOST_LEVELS} deep"
        error = ContentError(limits)
        error.with_place(Side.TARGET, "list referrers in", look.image.target_name)
        look.error = look.error or error

    async def _look_at_artifacts_of(self, look: _Look, subject: str) -> list[str]:
        """Look at the artifacts of one subject, those that the source lists and those that the target
        lists; return the digests that may have artifacts in turn.
        """
        image = look.image
        with look.judging("list of referrers of", subject):
            wanted = list[Artifact]()
            if subject in look.at_source:
                wanted = await self._referrers.of_subject(
                    image.wanted.mapping, image.wanted.tag, subject
                )
            listed = (await self._referrers.lists.read(image.target, subject)).entries

            listed_digests = {entry.digest for entry in listed}
            others = listed_digests - {artifact.source_digest for artifact in wanted} - {subject}
            looks: list[Callable[[], Awaitable[list[str]]]] = [
                partial(self._look_at_wanted, look, artifact, listed_digests) for artifact in wanted
            ]
            looks += [
                partial(self._look_at_listed, look, subject, entry)
                for entry in listed
                if entry.digest in others
            ]
            return list(chain.from_iterable(await gather(looks)))
        return []

    async def _look_at_wanted(
        self, look: _Look, artifact: Artifact, listed: Collection[str]
    ) -> list[str]:
        """Look at an artifact that the source has; return the digests that may have artifacts.

        `listed` are the digests that the target lists for its subject.
        """
        image = look.image
        digest = artifact.source_digest
        below = [digest]
        with look.judging("manifest", digest):
            manifest = await self._manifest_of(image.target, artifact)
            if manifest is None:
                # The source may list what it does not hold: no run can bring that.
                if not await self._referrers.is_at_source(image.wanted.mapping, artifact):
                    return []
                look.flaws.append(Flaw("artifact_missing", f"{artifact} is missing", digest))
            else:
                below = await self._look_at_artifact(look, manifest)
                if manifest.digest != digest:
                    what = f"artifact {artifact.reference}: "
                    look.flaws.append(differs(what, manifest.digest, digest))
                    return []
                if artifact.entry is not None and digest not in listed:
                    text = f"{artifact} exists, but the target does not list it"
                    look.flaws.append(Flaw("artifact_missing", text, digest))

        if not self._referrers.is_subject(image.wanted.mapping, image.wanted.tag, artifact):
            return []
        look.at_source.update(below)
        return below

    async def _manifest_of(self, target: Repository, artifact: Artifact) -> Manifest | None:
        """Return the manifest of an artifact, None where the target does not hold it."""
        digest = artifact.source_digest
        if artifact.entry is None:
            return await self._manifest_of_tag(target, artifact.reference, digest)
        # Of an artifact in a lock only the digest is known.
        expected = artifact.entry if artifact.entry.media_type else None
        return await _unless_absent(self._discovery.manifest(target, digest, expected))

    async def _look_at_listed(self, look: _Look, subject: str, entry: Descriptor) -> list[str]:
        """Look at an artifact that only the target lists; return the digests that may have artifacts."""
        text = f"{entry.digest} of {subject} is listed, but missing"
        with look.judging("manifest", entry.digest, Flaw("artifact_missing", text, entry.digest)):
            manifest = await self._discovery.manifest(look.image.target, entry.digest, entry)
            return await self._look_at_artifact(look, manifest)
        return []

    async def _look_at_artifact(self, look: _Look, manifest: Manifest) -> list[str]:
        """Look at what an artifact names; return the digests that may have artifacts."""
        self._report.artifacts_present.add((manifest.digest, look.image.target.key))
        below = await self._look_below(look.image, manifest)
        look.add(below)
        return [manifest.digest, *(entry.digest for entry in below.entries)]

    # Blobs that are read back.

    async def _read_back(self, sampled: _SampledBlob) -> None:
        """Read a blob, and see whether its bytes are right."""
        image = sampled.image
        blob = sampled.blob
        look = _Look(image)
        with look.judging("blob", blob.digest, incomplete("blob", blob)):
            await self._read_blob(image.target, blob)
            self._report.blobs_read += 1
            self._report.bytes_read += blob.size
        if look.flaws:
            self._report.blobs_present.discard((blob.digest, image.target.key))
        self._end(look)

    async def _read_blob(self, target: Repository, blob: Descriptor) -> None:
        """Read a blob to its end, from where it broke. Wrong bytes are read once more, over a fresh
        connection: a cache on the way may have been wrong once.
        """
        is_large = blob.size >= LARGE_BODY
        reading = Demand(target.host.key, "read", is_large)
        relay = Relay(target, blob, self.transport)
        retries = RetryBudget(ATTEMPTS)
        offset = 0
        while True:
            try:
                with self.transport.recovery.attempt():
                    async with self.transport.gate.admitted((reading,)), relay.opened(offset):
                        while piece := await relay.next():
                            offset += len(piece)
                return
            except WrongBytes:
                if relay.is_fresh:
                    raise
                relay = Relay(target, blob, self.transport, fresh=True)
                offset = 0
                continue
            except SyncError as error:
                failure = error
            pause = self.transport.pause_after(failure, retries, target.host)
            await self.transport.rest(failure, pause)

    # Outcomes.

    def _end(self, look: _Look) -> None:
        """Report what a look at an image has found."""
        image = look.image
        for flaw in dict.fromkeys(look.flaws):  # an image and its artifact may lack the same blob
            finding = Finding(image.source_name, image.target_name, flaw)
            self._report.findings.append(finding)
            self._emit(finding)
        if look.error is not None:
            self._fail(image, look.error)

    def _fail(self, image: _AuditedImage, error: SyncError) -> None:
        """Report an image that cannot be looked at whole."""
        error.drop_frames()
        outcome = Outcome(image.source_name, image.target_name, "failed", error=error)
        self._report.failures.append(outcome)
        self._emit(outcome)


async def _unless_absent(answer: Awaitable[Manifest]) -> Manifest | None:
    """Return a manifest, None where the answer is 404."""
    try:
        return await answer
    except RegistryError as error:
        if error.status != 404:
            raise
    return None
