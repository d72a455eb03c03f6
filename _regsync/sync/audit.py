"""Look at what targets hold: tags, manifests, blobs, artifacts.

Owns: what an audit asks, and what the answers show to be wrong.
May not know: how a finding is shown, how anything is copied.
Invariants: nothing is written anywhere. What could not be asked is an error, never a finding.
Follows: docs/design.md section 12.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from _regsync.sync.discovery import Discovery, check_tree_size
from _regsync.sync.findings import AuditReport, Finding, Flaw, corrupt, differs, incomplete, missing
from _regsync.sync.image import Traffic
from _regsync.sync.locked import LockedDiscovery, LockedReferrers
from _regsync.sync.lockfile import Lock
from _regsync.sync.mappings import WantedTag, assign, grouped
from _regsync.sync.once import Once, gather
from _regsync.sync.referrers import (
    MOST_ARTIFACTS,
    MOST_LEVELS,
    Artifact,
    Referrers,
    too_many_artifacts,
)
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

    # Empty where `min_age` holds back an index that no run has trimmed yet.
    digest: str
    # The source's own digest, which differs where an index is trimmed to its platforms.
    source_digest: str
    # Whether `min_age` holds the digest back. Then whatever the target has is right, nothing included.
    is_held: bool

    @property
    def is_trimmed(self) -> bool:
        return self.digest != self.source_digest


class _Check:
    """What was found of one image at one target, or of a part of it.

    A part that several images share, as a child of two indexes, is checked once, for the first one.
    """

    def __init__(self, image: _AuditedImage) -> None:
        self.image = image
        self.flaws = list[Flaw]()
        # Why not all of it could be checked; the first reason.
        self.error: SyncError | None = None

    @contextmanager
    def catching_errors(self, what: str, digest: str, absent: Flaw | None = None) -> Iterator[None]:
        """Run a block that asks for something. A SyncError ends the block, but not the check.

        With `absent` a 404 is that flaw. Wrong content is the flaw that the blob or manifest with this
        digest is corrupt; `what` says which of the two it is. After any other error the check is not
        complete.
        """
        try:
            yield
        except SyncError as error:
            is_absent = isinstance(error, RegistryError) and error.status == 404
            if is_absent and absent is not None:
                self.flaws.append(absent)
            elif isinstance(error, ContentError):
                self.flaws.append(corrupt(what, digest, error.message))
            else:
                self.error = self.error or error

    def add(self, part: _Check) -> None:
        """Add what was found of a part."""
        self.flaws += part.flaws
        self.error = self.error or part.error


class _Contents(NamedTuple):
    """What a manifest names, at any depth, and what was found of it."""

    check: _Check
    # The manifests below it that the target holds, as indexes name them.
    entries: list[Descriptor]


class _Subject(NamedTuple):
    """A digest that may have artifacts."""

    digest: str
    # Whether the source holds it too. Then the target has to hold the artifacts that the source lists
    # for it. Else only what the target itself lists is checked.
    is_at_source: bool


class _SampledBlob(NamedTuple):
    """A blob to read back, and an image that names it."""

    image: _AuditedImage
    blob: Descriptor


class Audit:
    """One audit of a configuration's targets.

    How it goes, one phase after the other:

        _select_group   which tags do the mappings select?
        _check_image    is an image there, with all that it names and all that refers to it?
        _read_back      have some blobs, chosen by chance, the right bytes?
    """

    # What the progress display says of an image at work.
    verb = "looking at"
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
        """Prepare to check all images that `config` selects, and to read back `read` blobs of each
        target's registry. `emit` is called with each finding, and with each failed image.

        `min_age` goes by `first_seen`. With a lock, names and digests of sources are the lock's.
        """
        machine = transport.machine
        self.transport = transport
        self._config = config
        self._emit = emit
        self._report = report
        self._sample_size = read
        self._first_seen = first_seen
        self._log = machine.log

        # The state says to which digest an index was trimmed, and how hosts ask for a login. What it
        # says of the content of targets is not believed: that is what an audit checks.
        self._state = StateFile(config.cache_dir, machine.log)
        self._state.load(may_write=False)
        self._knowledge = Knowledge(self._state, now=machine.wall, ttl=config.cache_ttl)
        make_discovery = Discovery if lock is None else partial(LockedDiscovery, lock)
        make_referrers = Referrers if lock is None else LockedReferrers
        self._discovery = make_discovery(transport, self._knowledge, reads_only=True)
        self._referrers = make_referrers(
            self._discovery, self._knowledge, machine.wall, has_state=self._state.is_used
        )

        # The checks of what manifests name, by target and digest: several tags may name one manifest.
        self._contents = defaultdict[tuple[RepositoryKey, str], Once[_Contents]](Once)
        # The sizes of blobs as registries tell them, by target and digest.
        self._blob_sizes = defaultdict[tuple[RepositoryKey, str], Once[int | None]](Once)
        # By target and digest: held while a tag is read that is likely to name this digest.
        self._tag_reads = defaultdict[tuple[RepositoryKey, str], anyio.Lock](anyio.Lock)

        # By target's host: how many blobs were found there, and which of them are to be read back.
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
        """Return the target references of the images that are being checked."""
        return list(self._under_way)

    async def run(self) -> None:
        """Check all images; findings and failures go to the report."""
        for registry in self._config.registries_in_use:
            self.transport.prepare(registry)  # an unusable file stops all before any request
        try:
            groups = grouped(self._config.mappings, lambda mapping: mapping.target_keys)
            selected = await gather(partial(self._select_group, group) for group in groups)

            # Each target has its own queue, so that one that is away does not hold up the others.
            by_host = defaultdict[str, list[_AuditedImage]](list)
            for image in chain.from_iterable(selected):
                by_host[image.target.host.key].append(image)
            await gather(
                partial(gather, [partial(self._check_image, image) for image in images])
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
            self._fail_tag(conflict.wanted, MappingConflict(text))
        images = [image for wanted in tags for image in self._images_of(wanted)]
        self.images_known += len(images)
        return images

    async def _select(self, mapping: MappingRule) -> tuple[str, ...]:
        """Return the tags that a mapping selects. Where its source cannot be listed, one failed image
        for each target stands for them.
        """
        try:
            selection = await self._discovery.select_tags(mapping)
        except SyncError as error:
            self._fail_tag(WantedTag(mapping, "*", mapping.targets), error)
            return ()
        for event, text in selection.warnings(str(self._discovery.source_of(mapping))):
            self._log("warning", event, text)
        return selection.kept

    def _images_of(self, wanted: WantedTag) -> list[_AuditedImage]:
        """Return the images of a tag, one for each target."""
        mapping = wanted.mapping
        source = self._discovery.source_of(mapping)
        return [
            _AuditedImage(
                wanted,
                source,
                self._discovery.repository(registry, mapping.target_repository, Side.TARGET),
            )
            for registry in wanted.targets
        ]

    def _fail_tag(self, wanted: WantedTag, error: SyncError) -> None:
        """Report a tag that can be checked at none of its targets."""
        for image in self._images_of(wanted):
            self.images_known += 1
            self._report.images_done += 1
            self._fail(image, error)

    # One image.

    async def _check_image(self, image: _AuditedImage) -> None:
        """Check what a target holds under a tag, with all that belongs to it, and report it."""
        check = _Check(image)
        self._under_way[image.target_name] = None
        try:
            await self._check_tag(check)
        except SyncError as error:
            check.error = check.error or error
        del self._under_way[image.target_name]
        self._report.images_done += 1
        self._report_check(check)

    async def _check_tag(self, check: _Check) -> None:
        """Check the tag's digest, what the manifest names, and the artifacts. Raises the SyncError of a
        source that does not say what the tag is to name.
        """
        image = check.image
        expected = await self._find_expected(image)
        likely = expected.digest or expected.source_digest
        top: Manifest | None = None
        with check.catching_errors("manifest", likely):
            top = await self._manifest_of_tag(image.target, image.wanted.tag, likely)
            if top is None and not expected.is_held:
                check.flaws.append(missing(expected.digest))
        if top is None:
            return

        if top.digest != expected.digest and not expected.is_held:
            check.flaws.append(differs("", top.digest, expected.digest))
        # An image with another digest is checked whole, too: clients pull it.
        contents = await self._check_contents(image, top)
        check.add(contents.check)
        if image.wanted.mapping.artifacts.enabled:
            await self._check_artifacts(check, _subjects_in(top, contents.entries, expected))

    async def _find_expected(self, image: _AuditedImage) -> _Expected:
        """Find out what the target is to hold under the tag, at the least cost. Raises the source's
        SyncError.
        """
        mapping = image.wanted.mapping
        tag = image.wanted.tag
        named = await self._discovery.resolve_at_source(mapping, tag, by_head=True)
        is_held = self._is_held(image, named.digest)
        if named.digest_at_target is not None:
            return _Expected(
                digest=named.digest_at_target, source_digest=named.digest, is_held=is_held
            )

        # A run that trimmed the index has left its new digest. Without one it is trimmed here.
        key = self._discovery.snapshot_key(mapping, image.source, image.target, tag, tag)
        entry = self._knowledge.snapshots([key]).get(key)
        if entry is not None and entry.snapshot.source == key_of(named.digest):
            snapshot = entry.snapshot
            is_trimmed = snapshot.pushed != snapshot.source
            pushed = digest_like(snapshot.pushed) if is_trimmed else named.digest
            return _Expected(digest=pushed, source_digest=named.digest, is_held=is_held)
        if is_held:
            # Whatever the target has is right, so nothing is fetched to find out the digest.
            return _Expected(digest="", source_digest=named.digest, is_held=is_held)
        lookup = await self._discovery.look_up_at_source(mapping, tag, named.digest)
        return _Expected(digest=lookup.digest, source_digest=lookup.source_digest, is_held=is_held)

    def _is_held(self, image: _AuditedImage, digest: str) -> bool:
        """Say whether no run copies a digest yet, because of `min_age`."""
        min_age = image.wanted.mapping.min_age
        if not min_age or self._first_seen is None:
            return False
        return self._first_seen.held_until(image.source.key, digest, min_age) is not None

    async def _manifest_of_tag(self, target: Repository, tag: str, likely: str) -> Manifest | None:
        """Return what a tag names, None where it names nothing.

        `likely` is the digest that it probably names. Of several tags with the same likely digest the
        first is read by GET. Its manifest is at hand then, and the others cost a HEAD.
        """
        listed = self._discovery.known_listing(target)
        if listed is not None and tag not in listed:
            return None
        async with self._tag_reads[target.key, likely]:
            if self._discovery.cached_manifest(target, likely) is None:
                return await _unless_absent(self._discovery.manifest_of_tag(target, tag))

        digest = await target.head_manifest(tag)
        if digest is None:
            return None
        if digest == "":
            # A registry may answer a HEAD without a digest.
            return await _unless_absent(self._discovery.manifest_of_tag(target, tag))
        return await _unless_absent(self._discovery.manifest(target, digest))

    # What a manifest names.

    async def _check_contents(self, image: _AuditedImage, top: Manifest) -> _Contents:
        """Check all that a manifest names, at any depth; once for all images that name the manifest."""
        once = self._contents[image.target.pool, top.digest]
        return await once.get(partial(self._check_below, image, top))

    async def _check_below(self, image: _AuditedImage, top: Manifest) -> _Contents:
        """Check all manifests below one, then the blobs of all of them."""
        check = _Check(image)
        manifests, entries = await self._read_tree(check, top)
        blobs = {blob.digest: blob for manifest in manifests for blob in manifest.blobs}
        await gather(partial(self._check_blob, check, blob) for blob in blobs.values())
        return _Contents(check, entries)

    async def _read_tree(
        self, check: _Check, top: Manifest
    ) -> tuple[list[Manifest], list[Descriptor]]:
        """Read what is below a manifest, level by level. Return all manifests that are there and right,
        the top among them, and those below it as indexes name them.
        """
        manifests = list[Manifest]()
        entries = list[Descriptor]()
        named = dict[str, Descriptor]()
        depth = 0
        level = [top]
        while level:
            depth += 1
            manifests += level
            self._report.manifests_present.update(
                (manifest.digest, check.image.target.key) for manifest in level
            )

            children = {
                child.digest: child
                for manifest in level
                for child in manifest.children
                if child.digest not in named
            }
            named.update(children)
            # A hostile registry may serve a tree without an end.
            try:
                check_tree_size(named.values())
                if children and depth > MAX_INDEX_DEPTH:
                    raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")
            except ContentError as error:
                check.error = error.with_place(Side.TARGET, "read", check.image.target_name)
                break

            answers = await gather(
                partial(self._read_child, check, child) for child in children.values()
            )
            level = list(chain.from_iterable(answers))
            entries += [children[manifest.digest] for manifest in level]
        return manifests, entries

    async def _read_child(self, check: _Check, child: Descriptor) -> list[Manifest]:
        """Return the manifest that an index names; none where it is not there or not right."""
        manifests = list[Manifest]()
        with check.catching_errors("manifest", child.digest, incomplete("manifest", child)):
            target = check.image.target
            manifests.append(await self._discovery.manifest(target, child.digest, child))
        return manifests

    async def _check_blob(self, check: _Check, blob: Descriptor) -> None:
        """Check that a blob is there with its size. Its bytes are not read here."""
        target = check.image.target
        once = self._blob_sizes[target.pool, blob.digest]
        with check.catching_errors("blob", blob.digest, incomplete("blob", blob)):
            # A layout may leave out blobs that the far side holds.
            if target.far_repository(blob.digest) is not None:
                return
            size = await once.get(partial(target.blob_size, blob.digest))
            # Some registries answer a HEAD without a length, which says nothing against the blob.
            if size is not None and size != blob.size:
                raise ContentError(f"it has {size} bytes, its descriptor says {blob.size}")
            self._record_blob(check.image, blob)

    def _record_blob(self, image: _AuditedImage, blob: Descriptor) -> None:
        """Note that a target has a blob, and by chance take it into the sample that is read back."""
        digest_and_target = (blob.digest, image.target.key)
        if digest_and_target in self._report.blobs_present:
            return
        self._report.blobs_present.add(digest_and_target)
        # The bytes of `{}`, and of a blob that its descriptor embeds, are known without reading.
        if known_body(blob) is not None:
            return

        # Nobody knows beforehand how many blobs a host has, so this is reservoir sampling: of the
        # blobs found so far each has the same chance to be in the sample.
        host = image.target.host.key
        self._blobs_found[host] += 1
        sample = self._samples[host]
        if len(sample) < self._sample_size:
            sample.append(_SampledBlob(image, blob))
            return
        index = int(self.transport.machine.chance() * self._blobs_found[host])
        if index < self._sample_size:
            sample[index] = _SampledBlob(image, blob)

    # What refers to a manifest.

    async def _check_artifacts(self, check: _Check, subjects: Iterable[_Subject]) -> None:
        """Check the artifacts of these subjects, the artifacts of these artifacts, and so on."""
        lists = self._referrers.lists
        seen = set[str]()
        level = _each_once(subjects)
        for _ in range(MOST_LEVELS):
            seen.update(subject.digest for subject in level)
            lists.expect_subjects(check.image.target, len(level))
            lists.expect_subjects(
                check.image.source, sum(1 for subject in level if subject.is_at_source)
            )
            below = await gather(
                partial(self._check_artifacts_of, check, subject) for subject in level
            )
            found = _each_once(chain.from_iterable(below))
            # A chain of artifacts may lead back to where it began.
            level = [subject for subject in found if subject.digest not in seen]
            if not level:
                return
            if len(seen) + len(level) > MOST_ARTIFACTS:
                break

        error = too_many_artifacts()
        error.with_place(Side.TARGET, "list referrers in", check.image.target_name)
        check.error = check.error or error

    async def _check_artifacts_of(self, check: _Check, subject: _Subject) -> list[_Subject]:
        """Check the artifacts of one subject: those that the source lists have to be at the target,
        and those that only the target lists have to be whole. Returns what may have artifacts in turn.
        """
        image = check.image
        below = list[_Subject]()
        with check.catching_errors("list of referrers of", subject.digest):
            required = list[Artifact]()
            if subject.is_at_source:
                required = await self._referrers.find_for_subject(
                    image.wanted.mapping, image.wanted.tag, subject.digest
                )
            entries = (await self._referrers.lists.read(image.target, subject.digest)).entries

            listed = {entry.digest for entry in entries}
            # A list may name its own subject, which is no artifact.
            checked_otherwise = {artifact.source_digest for artifact in required}
            checked_otherwise.add(subject.digest)
            checks: list[Callable[[], Awaitable[list[_Subject]]]] = [
                partial(self._check_required, check, artifact, listed) for artifact in required
            ]
            checks += [
                partial(self._check_listed, check, subject.digest, entry)
                for entry in entries
                if entry.digest not in checked_otherwise
            ]
            below += chain.from_iterable(await gather(checks))
        return below

    async def _check_required(
        self, check: _Check, artifact: Artifact, listed: Collection[str]
    ) -> list[_Subject]:
        """Check an artifact that the source has; return what may have artifacts in turn.

        `listed` are the digests that the target lists for its subject.
        """
        image = check.image
        digest = artifact.source_digest
        # Where the target lacks it, the artifacts of it are looked for all the same.
        below = [digest]
        with check.catching_errors("manifest", digest):
            manifest = await self._manifest_of(image.target, artifact)
            if manifest is not None:
                below = await self._check_artifact(check, manifest)
                if manifest.digest != digest:
                    prefix = f"artifact {artifact.reference}: "
                    check.flaws.append(differs(prefix, manifest.digest, digest))
                    return []
                # A tag of cosign's is found by its name, any other artifact only by a list.
                if artifact.entry is not None and digest not in listed:
                    text = f"{artifact} exists, but the target does not list it"
                    check.flaws.append(Flaw("artifact_missing", text, digest))
            elif await self._referrers.is_at_source(image.wanted.mapping, artifact):
                check.flaws.append(Flaw("artifact_missing", f"{artifact} is missing", digest))
            else:
                # The source lists what it does not hold itself. No run can bring that.
                return []

        if not self._referrers.may_be_subject(image.wanted.mapping, image.wanted.tag, artifact):
            return []
        return [_Subject(each, is_at_source=True) for each in below]

    async def _manifest_of(self, target: Repository, artifact: Artifact) -> Manifest | None:
        """Return the manifest of an artifact, None where the target does not hold it."""
        digest = artifact.source_digest
        if artifact.entry is None:
            return await self._manifest_of_tag(target, artifact.reference, digest)
        # Of an artifact in a lock only the digest is known.
        expected = artifact.entry if artifact.entry.media_type else None
        return await _unless_absent(self._discovery.manifest(target, digest, expected))

    async def _check_listed(self, check: _Check, subject: str, entry: Descriptor) -> list[_Subject]:
        """Check an artifact that only the target lists; return what may have artifacts in turn."""
        text = f"{entry.digest} of {subject} is listed, but missing"
        absent = Flaw("artifact_missing", text, entry.digest)
        below = list[str]()
        with check.catching_errors("manifest", entry.digest, absent):
            manifest = await self._discovery.manifest(check.image.target, entry.digest, entry)
            below += await self._check_artifact(check, manifest)
        return [_Subject(each, is_at_source=False) for each in below]

    async def _check_artifact(self, check: _Check, manifest: Manifest) -> list[str]:
        """Check what an artifact names; return its digest and those of the manifests below it."""
        self._report.artifacts_present.add((manifest.digest, check.image.target.key))
        contents = await self._check_contents(check.image, manifest)
        check.add(contents.check)
        return [manifest.digest, *(entry.digest for entry in contents.entries)]

    # Blobs that are read back.

    async def _read_back(self, sampled: _SampledBlob) -> None:
        """Read a blob, and check its bytes."""
        image = sampled.image
        blob = sampled.blob
        check = _Check(image)
        with check.catching_errors("blob", blob.digest, incomplete("blob", blob)):
            await self._read_blob(image.target, blob)
            self._report.blobs_read += 1
            self._report.bytes_read += blob.size
        if check.flaws:
            self._report.blobs_present.discard((blob.digest, image.target.key))
        self._report_check(check)

    async def _read_blob(self, target: Repository, blob: Descriptor) -> None:
        """Read a blob to its end. Where a reading breaks, the next one goes on, after a pause.

        Wrong bytes are read once more over a new connection: a cache on the way may have been wrong.
        """
        is_large = blob.size >= LARGE_BODY
        demand = Demand(target.host.key, "read", is_large)
        relay = Relay(target, blob, self.transport)
        retries = RetryBudget(ATTEMPTS)
        offset = 0
        while True:
            try:
                with self.transport.recovery.attempt():
                    async with self.transport.gate.admitted((demand,)), relay.opened(offset):
                        while piece := await relay.next():
                            offset += len(piece)
                return
            except WrongBytes:
                if relay.uses_fresh_connections:
                    raise
                relay = Relay(target, blob, self.transport, uses_fresh_connections=True)
                offset = 0
                continue
            except SyncError as error:
                failure = error
            # This raises the failure where no retry is left.
            pause = self.transport.pause_after(failure, retries, target.host)
            await self.transport.wait_to_retry(failure, pause)

    # Outcomes.

    def _report_check(self, check: _Check) -> None:
        """Report what was found of an image."""
        image = check.image
        for flaw in dict.fromkeys(check.flaws):  # an image and its artifact may lack the same blob
            finding = Finding(image.source_name, image.target_name, flaw)
            self._report.findings.append(finding)
            self._emit(finding)
        if check.error is not None:
            self._fail(image, check.error)

    def _fail(self, image: _AuditedImage, error: SyncError) -> None:
        """Report an image of which not all could be checked."""
        error.drop_frames()
        outcome = Outcome(image.source_name, image.target_name, "failed", error=error)
        self._report.failures.append(outcome)
        self._emit(outcome)


def _subjects_in(
    top: Manifest, entries: Iterable[Descriptor], expected: _Expected
) -> list[_Subject]:
    """Return the manifests of an image that may have artifacts: its top, and `entries` below it."""
    entries = [entry for entry in entries if not entry.attested_digest]
    is_expected = top.digest == expected.digest
    if is_expected and expected.is_trimmed:
        # A run made the trimmed index, and nothing refers to it. The indexes below it may be trimmed
        # too, so that the source may not know them.
        return [_Subject(entry.digest, is_at_source=not entry.is_index) for entry in entries]

    # An image with another digest is not from this source, or is an older one: the source may not
    # know it.
    digests = [top.digest, *(entry.digest for entry in entries)]
    return [_Subject(digest, is_at_source=is_expected) for digest in digests]


def _each_once(subjects: Iterable[_Subject]) -> list[_Subject]:
    """Return each subject once, in the order of the digests: as one of the source's, if it is that too."""
    is_at_source = dict[str, bool]()
    for subject in subjects:
        is_at_source[subject.digest] = (
            is_at_source.get(subject.digest, False) or subject.is_at_source
        )
    return [_Subject(digest, is_at_source[digest]) for digest in sorted(is_at_source)]


async def _unless_absent(answer: Awaitable[Manifest]) -> Manifest | None:
    """Return a manifest, None where the answer is 404."""
    try:
        return await answer
    except RegistryError as error:
        if error.status != 404:
            raise
    return None
