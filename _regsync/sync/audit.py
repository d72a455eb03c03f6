"""Check that targets hold the tags, manifests, blobs and artifacts that they should hold.

Owns: which requests an audit makes, and which answers are findings.
May not know: how a finding is shown, how anything is copied.
Invariants: nothing is written anywhere. A failed request is an error, never a finding.
Follows: docs/design.md section 12.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import chain, count
from typing import NamedTuple

import anyio

from _regsync.config import Config, MappingRule
from _regsync.errors import (
    ContentError,
    MappingConflict,
    RegistryError,
    Side,
    SyncError,
    WrongBytes,
)
from _regsync.oci import MAX_INDEX_DEPTH, Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.registry.runs import Transport
from _regsync.state import FirstSeen, Knowledge, RepositoryKey, StateFile, digest_like, key_of
from _regsync.sync.blobs import Reading, Tries, known_body
from _regsync.sync.discovery import Discovery, check_tree_size
from _regsync.sync.findings import AuditReport, Finding, Flaw
from _regsync.sync.image import Traffic
from _regsync.sync.locked import LockedDiscovery, LockedReferrers
from _regsync.sync.lockfile import Lock
from _regsync.sync.mappings import ALL_TAGS, WantedTag, assign_tags, group_mappings
from _regsync.sync.once import Once, gather
from _regsync.sync.referrers import (
    MOST_ARTIFACTS,
    MOST_LEVELS,
    Artifact,
    Referrers,
    too_many_artifacts,
)
from _regsync.sync.report import Outcome


class _AuditedImage(NamedTuple):
    """A tag of a mapping at one target."""

    wanted: WantedTag
    source: Repository
    target: Repository

    @property
    def source_name(self) -> str:
        return self.source.name_of(self.wanted.tag)

    @property
    def target_name(self) -> str:
        return self.target.name_of(self.wanted.tag)


class _Expected(NamedTuple):
    """The digest that a tag should name at its target."""

    # Empty if the digest is held back and no run has trimmed the index yet.
    digest: str
    # The digest at the source. It differs from `digest` if the index is trimmed to its platforms.
    source_digest: str
    # Whether `min_age` holds the digest back. If so, any digest at the target is right, and so is
    # an absent tag.
    is_held_back: bool

    @property
    def is_trimmed(self) -> bool:
        return self.digest != self.source_digest


class _Check:
    """The result of checking an image at one target, or a part of the image."""

    def __init__(self, image: _AuditedImage) -> None:
        # The image for which the check is made. If several images share a part, the part is checked
        # once, for the first of these images.
        self.image = image
        self.flaws = list[Flaw]()
        # The first error because of which the check is incomplete.
        self.error: SyncError | None = None

    @contextmanager
    def catching_errors(
        self, part_type: str, digest: str, absent: Flaw | None = None
    ) -> Iterator[None]:
        """Record a SyncError that ends the block, and continue after the block.

        A 404 is recorded as the flaw `absent`, if `absent` is given. A ContentError is recorded as
        the flaw that the part with this digest is corrupt. `part_type` is the word for the part in
        that flaw, such as "blob" or "manifest". Any other error makes the check incomplete.
        """
        try:
            yield
        except SyncError as error:
            is_absent = isinstance(error, RegistryError) and error.status == 404
            if is_absent and absent is not None:
                self.flaws.append(absent)
            elif isinstance(error, ContentError):
                self.flaws.append(Flaw.corrupt(part_type, digest, error.message))
            else:
                self.error = self.error or error

    def add(self, part: _Check) -> None:
        """Add the result for a part of the image."""
        self.flaws += part.flaws
        self.error = self.error or part.error


class _Contents(NamedTuple):
    """The result of checking all blobs and manifests that a manifest names, at any depth."""

    check: _Check
    # The manifests below it that the target holds, as descriptors in their indexes.
    entries: list[Descriptor]


class _Subject(NamedTuple):
    """A manifest whose artifacts are checked."""

    digest: str
    # Whether the source holds the manifest too. If so, the target must hold the artifacts that the
    # source lists. If not, only artifacts that the target lists are checked.
    is_at_source: bool


class _FoundBlob(NamedTuple):
    """A blob at a target, and an image that names it."""

    image: _AuditedImage
    blob: Descriptor


class Audit:
    """One audit of a configuration's targets.

    The phases of an audit, in this order:

        _select_images   list the sources and select tags
        _check_images    check each tag, the manifests and blobs below it, and its artifacts
        _read_blobs      download all blobs and verify their digests, if that is wanted
    """

    # When a drain after a signal ends. Always None, because a signal ends an audit at once.
    drain_deadline = None

    def __init__(
        self,
        transport: Transport,
        config: Config,
        emit: Callable[[Finding | Outcome], None],
        report: AuditReport,
        state: StateFile,
        *,
        reads_blobs: bool = False,
        first_seen: FirstSeen | None = None,
        lock: Lock | None = None,
    ) -> None:
        """Prepare to check all images that `config` selects.

        `emit` is called with each finding, and with each image that could not be checked.
        With `reads_blobs` all blobs at targets are downloaded and verified. `first_seen` has the
        times for `min_age`. With a lock, tags and digests are those of the lock, and sources are
        not asked.
        """
        machine = transport.machine
        self.transport = transport
        self._config = config
        self._emit = emit
        self._report = report
        self._reads_blobs = reads_blobs
        self._first_seen = first_seen
        self._log = machine.log

        # The state is used for the digests of trimmed indexes and for the login methods of hosts.
        # It is not trusted about the content of targets, because that is what an audit checks.
        self._state = state
        self._state.load(may_write=False)
        self._knowledge = Knowledge(self._state, now=machine.wall, ttl=config.cache_ttl)
        make_discovery = Discovery if lock is None else partial(LockedDiscovery, lock)
        make_referrers = Referrers if lock is None else LockedReferrers
        self._discovery = make_discovery(transport, self._knowledge, reads_only=True)
        self._referrers = make_referrers(
            self._discovery, self._knowledge, machine.wall, has_state=self._state.is_used
        )

        # By target and digest of a manifest, the check of its contents. Shared by all tags that
        # name the manifest.
        self._contents = defaultdict[tuple[RepositoryKey, str], Once[_Contents]](Once)
        # By target and digest of a blob, the size that the registry reports. None if it reports
        # none.
        self._blob_sizes = defaultdict[tuple[RepositoryKey, str], Once[int | None]](Once)
        # By target and digest, a lock that is held while a tag is fetched that probably names this
        # digest.
        self._tag_reads = defaultdict[tuple[RepositoryKey, str], anyio.Lock](anyio.Lock)

        # By target host, the blobs to read back.
        self._blobs_to_read = defaultdict[str, list[_FoundBlob]](list)

        # Images selected so far, at all targets.
        self.images_known = 0
        # The bytes to read back, for the progress line.
        self.traffic = Traffic()

    @property
    def images_done(self) -> int:
        return self._report.images_done

    @property
    def bytes_moved(self) -> int:
        return self.transport.blob_bytes

    async def run(self) -> None:
        """Check all images, and add findings and failures to the report."""
        for registry in self._config.registries_in_use:
            # Raises ConfigError for an unreadable file before any request is sent.
            self.transport.dialer.prepare(registry)
        try:
            images = await self._select_images()
            await self._check_images(images)
            await self._read_blobs()
            self._report.interrupted = False
        finally:
            self._report.images_undone = self.images_known - self.images_done
            self._state.close()

    # Selection.

    async def _select_images(self) -> list[_AuditedImage]:
        groups = group_mappings(self._config.mappings, lambda mapping: mapping.target_keys)
        images_of_groups = await gather(partial(self._select_group, group) for group in groups)
        return list(chain.from_iterable(images_of_groups))

    async def _select_group(self, group: list[MappingRule]) -> list[_AuditedImage]:
        """Select the images of mappings that write to the same target repositories (I10)."""
        selected = await gather(partial(self._select_tags, mapping) for mapping in group)
        tags, conflicts = assign_tags(zip(group, selected, strict=True))

        for conflict in conflicts:
            text = f"mappings[{conflict.owner.index}] writes this tag too, from another source"
            self._fail_tag(conflict.wanted, MappingConflict(text))
        images = [image for wanted in tags for image in self._images_of(wanted)]
        self.images_known += len(images)
        return images

    async def _select_tags(self, mapping: MappingRule) -> tuple[str, ...]:
        """Return the tags that a mapping selects.

        If its source cannot be listed, reports one failed image for each target, with the tag `*`.
        """
        try:
            selection = await self._discovery.select_tags(mapping)
        except SyncError as error:
            self._fail_tag(WantedTag(mapping, ALL_TAGS, mapping.targets), error)
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
        """Report a tag as failed at all its targets."""
        for image in self._images_of(wanted):
            self.images_known += 1
            self._report.images_done += 1
            self._fail(image, error)

    # Images.

    async def _check_images(self, images: Iterable[_AuditedImage]) -> None:
        # Each target host has its own queue, so that a host that does not respond does not delay
        # the checks at other hosts.
        by_host = defaultdict[str, list[_AuditedImage]](list)
        for image in images:
            by_host[image.target.host.key].append(image)
        await gather(
            partial(gather, [partial(self._check_image, image) for image in queue])
            for queue in by_host.values()
        )

    async def _check_image(self, image: _AuditedImage) -> None:
        """Check one image with its artifacts, and report the result."""
        check = _Check(image)
        try:
            await self._check_tag(check)
        except SyncError as error:
            check.error = check.error or error
        self._report.images_done += 1
        self._report_check(check)

    async def _check_tag(self, check: _Check) -> None:
        """Check the tag's digest, the manifests and blobs below it, and the artifacts.

        Adds flaws and the first error at the target to `check`. Raises SyncError if the expected
        digest cannot be found out at the source.
        """
        image = check.image
        expected = await self._find_expected(image)
        likely_digest = expected.digest or expected.source_digest
        top: Manifest | None = None
        with check.catching_errors("manifest", likely_digest):
            top = await self._manifest_of_tag(image.target, image.wanted.tag, likely_digest)
            if top is None and not expected.is_held_back:
                check.flaws.append(Flaw.missing(expected.digest))
        if top is None:
            return  # the tag is absent, or its manifest could not be read

        if top.digest != expected.digest and not expected.is_held_back:
            check.flaws.append(Flaw.differs("", top.digest, expected.digest))
        # The contents are checked even if the digest is wrong, because clients can pull the image.
        contents = await self._check_contents(image, top)
        check.add(contents.check)
        if image.wanted.mapping.artifacts.enabled:
            await self._check_artifacts(check, _subjects_in(top, contents.entries, expected))

    async def _find_expected(self, image: _AuditedImage) -> _Expected:
        """Find out which digest the tag should name at the target, with the fewest requests.

        Raises SyncError if a request to the source fails.
        """
        mapping = image.wanted.mapping
        tag = image.wanted.tag
        at_source = await self._discovery.resolve_at_source(mapping, tag, by_head=True)
        is_held_back = self._record_sighting(image, at_source.digest)
        # It is known without the index if it is from a lock, or if no platforms are filtered.
        digest = at_source.digest_at_target or self._digest_put_for(image, at_source.digest)
        if digest or is_held_back:  # if it is held back, any digest at the target is right
            return _Expected(digest, at_source.digest, is_held_back)
        lookup = await self._discovery.look_up_at_source(mapping, tag, at_source.digest)
        return _Expected(lookup.digest, lookup.source_digest, is_held_back=False)

    def _digest_put_for(self, image: _AuditedImage, source_digest: str) -> str:
        """Return the digest that a run has put for a digest of the source, by the state.

        It is another digest if the run has trimmed the index. It is empty if no run has put one.
        """
        tag = image.wanted.tag
        key = self._discovery.snapshot_key(
            image.wanted.mapping, image.source, image.target, tag, tag
        )
        entry = self._knowledge.snapshots([key]).get(key)
        if entry is None or entry.snapshot.source != key_of(source_digest):
            return ""
        # A key does not hold all of a sha512, so the source's digest is used if it is the same.
        is_trimmed = entry.snapshot.pushed != entry.snapshot.source
        return digest_like(entry.snapshot.pushed) if is_trimmed else source_digest

    def _record_sighting(self, image: _AuditedImage, digest: str) -> bool:
        """Record that the source has a digest now, if the mapping has a `min_age`.

        Returns whether `min_age` holds the digest back, so that no run copies it yet.
        """
        min_age = image.wanted.mapping.min_age
        if not min_age or self._first_seen is None:
            return False
        held_until = self._first_seen.record_sighting(image.source.key, digest, min_age)
        return held_until is not None

    async def _manifest_of_tag(
        self, target: Repository, tag: str, likely_digest: str
    ) -> Manifest | None:
        """Return the manifest under a tag. Returns None if the tag is absent.

        `likely_digest` is the digest that the tag probably names. Of several tags with the same
        likely digest, the first costs a GET. Its manifest is then cached, so each later tag costs
        only a HEAD.
        """
        listed_tags = self._discovery.known_listing(target)
        if listed_tags is not None and tag not in listed_tags:
            return None
        # Tags with the same likely digest wait until the first tag's manifest is cached.
        async with self._tag_reads[target.key, likely_digest]:
            if self._discovery.cached_manifest(target, likely_digest) is None:
                return await _unless_absent(self._discovery.fetch_manifest_of_tag(target, tag))

        digest = await target.head_manifest(tag)
        if digest is None:
            return None
        if digest == "":
            # A registry may answer a HEAD without a digest.
            return await _unless_absent(self._discovery.fetch_manifest_of_tag(target, tag))
        return await _unless_absent(self._discovery.fetch_manifest(target, digest))

    # Manifests and blobs.

    async def _check_contents(self, image: _AuditedImage, top: Manifest) -> _Contents:
        """Check all manifests and blobs below a manifest. The result is shared by all images."""
        once = self._contents[image.target.store_key, top.digest]
        return await once.get(partial(self._check_below, image, top))

    async def _check_below(self, image: _AuditedImage, top: Manifest) -> _Contents:
        check = _Check(image)
        self._report.manifests_present.add((top.digest, image.target.key))
        below = await self._fetch_below(check, top)
        manifests = [top, *(manifest for _, manifest in below)]
        blobs = {blob.digest: blob for manifest in manifests for blob in manifest.blobs}
        await gather(partial(self._check_blob, check, blob) for blob in blobs.values())
        return _Contents(check, [entry for entry, _ in below])

    async def _fetch_below(self, check: _Check, top: Manifest) -> list[tuple[Descriptor, Manifest]]:
        """Fetch all manifests below a manifest, level by level, and count them in the report.

        Returns those that the target holds, with their descriptors. Adds a flaw to `check` for each
        manifest that is absent or corrupt, or an error if the tree is too large.
        """
        below = list[tuple[Descriptor, Manifest]]()
        # By digest, the descriptors of all manifests below the top. They include absent manifests.
        named = dict[str, Descriptor]()
        level = [top]
        for depth in count(1):
            children = {
                child.digest: child
                for manifest in level
                for child in manifest.children
                if child.digest not in named
            }
            if not children:
                break
            named.update(children)
            try:
                _check_bounds(named.values(), depth)
            except ContentError as error:
                check.error = error.add_context(Side.TARGET, "read", check.image.target_name)
                break

            answers = await gather(
                partial(self._fetch_child, check, child) for child in children.values()
            )
            present = [
                (child, manifest)
                for child, manifest in zip(children.values(), answers, strict=True)
                if manifest is not None
            ]
            below += present
            level = [manifest for _, manifest in present]
        return below

    async def _fetch_child(self, check: _Check, child: Descriptor) -> Manifest | None:
        """Fetch a manifest that an index names, and count it in the report.

        Returns None after any error, and adds the flaw or the error to `check`.
        """
        target = check.image.target
        manifest: Manifest | None = None
        with check.catching_errors("manifest", child.digest, Flaw.incomplete("manifest", child)):
            manifest = await self._discovery.fetch_manifest(target, child.digest, child)
            self._report.manifests_present.add((child.digest, target.key))
        return manifest

    async def _check_blob(self, check: _Check, blob: Descriptor) -> None:
        """Check that a blob is present and has the right size. Its bytes are not read."""
        target = check.image.target
        once = self._blob_sizes[target.store_key, blob.digest]
        with check.catching_errors("blob", blob.digest, Flaw.incomplete("blob", blob)):
            # The blob may be left out of a layout, if the registry to which the layout will be
            # carried has the blob.
            far_repository = target.far_repository(blob.digest)
            if far_repository is not None:
                far_key = RepositoryKey(target.key.host, far_repository)
                self._report.blobs_left_out.add((blob.digest, far_key))
                return
            size = await once.get(partial(target.blob_size, blob.digest))
            # The size is None if the registry answers a HEAD without a length. Then it is not
            # checked.
            if size is not None and size != blob.size:
                raise ContentError(f"it has {size} bytes, its descriptor says {blob.size}")
            self._record_blob(check.image, blob)

    def _record_blob(self, image: _AuditedImage, blob: Descriptor) -> None:
        """Record in the report that a target has a blob, and that it is to be read back."""
        digest_and_target = (blob.digest, image.target.key)
        if digest_and_target in self._report.blobs_present:
            return
        self._report.blobs_present.add(digest_and_target)
        # There is no need to read an empty JSON object, or a blob that is embedded in its
        # descriptor.
        if self._reads_blobs and known_body(blob) is None:
            self._blobs_to_read[image.target.host.key].append(_FoundBlob(image, blob))

    # Artifacts.

    async def _check_artifacts(self, check: _Check, subjects: Iterable[_Subject]) -> None:
        """Check the artifacts of these subjects, the artifacts of these artifacts, and so on.

        Adds the flaws to `check`, or an error if there are too many artifacts or levels.
        """
        lists = self._referrers.lists
        # The digests of the subjects of this and earlier levels.
        seen_digests = set[str]()
        level = _distinct(subjects)
        # One level more is checked, to find out that the artifacts of the last level have none.
        for _ in range(MOST_LEVELS + 1):
            seen_digests.update(subject.digest for subject in level)
            # Announced before the lists are read, because several subjects are worth a tag listing.
            lists.expect_subjects(check.image.target, len(level))
            subjects_at_source = sum(1 for subject in level if subject.is_at_source)
            lists.expect_subjects(check.image.source, subjects_at_source)
            below = await gather(
                partial(self._check_artifacts_of, check, subject) for subject in level
            )
            # Subjects that were seen before are skipped, because a chain of artifacts may be a
            # cycle.
            level = [
                subject
                for subject in _distinct(chain.from_iterable(below))
                if subject.digest not in seen_digests
            ]
            if not level:
                return
            if len(seen_digests) + len(level) > MOST_ARTIFACTS:
                break

        error = too_many_artifacts()
        error.add_context(Side.TARGET, "list referrers in", check.image.target_name)
        check.error = check.error or error

    async def _check_artifacts_of(self, check: _Check, subject: _Subject) -> list[_Subject]:
        """Check the artifacts of one subject. Returns the subjects in these artifacts.

        Artifacts that the source lists must be at the target. Artifacts that only the target lists
        must be complete. If a list cannot be read, adds the error to `check` and returns no
        subjects.
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

            listed_digests = {entry.digest for entry in entries}
            artifact_checks = [
                partial(self._check_required, check, artifact, listed_digests)
                for artifact in required
            ]
            # A list may name its own subject, which is not an artifact.
            excluded = {subject.digest, *(artifact.digest for artifact in required)}
            artifact_checks += [
                partial(self._check_listed, check, subject.digest, entry)
                for entry in entries
                if entry.digest not in excluded
            ]
            below += chain.from_iterable(await gather(artifact_checks))
        return below

    async def _check_required(
        self, check: _Check, artifact: Artifact, listed_digests: Collection[str]
    ) -> list[_Subject]:
        """Check an artifact that the source lists. Returns the subjects in the artifact.

        `listed_digests` are the digests that the target lists for the artifact's subject. The
        result is empty if the artifact has another digest at the target, or if the source does not
        hold it.
        """
        image = check.image
        digest = artifact.digest
        # Even if the target lacks the artifact, it may have artifacts of the artifact.
        subject_digests = [digest]
        with check.catching_errors("manifest", digest):
            manifest = await self._manifest_of(image.target, artifact)
            if manifest is None:
                if not await self._referrers.is_at_source(image.wanted.mapping, artifact):
                    # The source lists the artifact but does not hold it, so no run can copy it.
                    return []
                check.flaws.append(Flaw("artifact_missing", f"{artifact} is missing", digest))
            else:
                subject_digests = await self._check_artifact(check, manifest)
                if manifest.digest != digest:
                    prefix = f"artifact {artifact.reference}: "
                    check.flaws.append(Flaw.differs(prefix, manifest.digest, digest))
                    return []
                # Clients find an artifact without a cosign tag only by the list.
                if artifact.tag is None and digest not in listed_digests:
                    text = f"{artifact} exists, but the target does not list it"
                    check.flaws.append(Flaw("artifact_missing", text, digest))

        if not self._referrers.may_be_subject(image.wanted.mapping, image.wanted.tag, artifact):
            return []
        return [_Subject(subject_digest, is_at_source=True) for subject_digest in subject_digests]

    async def _manifest_of(self, target: Repository, artifact: Artifact) -> Manifest | None:
        """Return the manifest of an artifact. Returns None if the target does not hold it."""
        digest = artifact.digest
        if artifact.tag is not None:
            return await self._manifest_of_tag(target, artifact.tag, digest)
        entry = artifact.entry
        # The entry of an artifact in a lock has only a digest, so there is nothing to compare with.
        expected = entry if entry is not None and entry.media_type else None
        return await _unless_absent(self._discovery.fetch_manifest(target, digest, expected))

    async def _check_listed(self, check: _Check, subject: str, entry: Descriptor) -> list[_Subject]:
        """Check an artifact that only the target lists. Returns the subjects in the artifact."""
        text = f"{entry.digest} of {subject} is listed, but missing"
        absent = Flaw("artifact_missing", text, entry.digest)
        below = list[str]()
        with check.catching_errors("manifest", entry.digest, absent):
            manifest = await self._discovery.fetch_manifest(check.image.target, entry.digest, entry)
            below += await self._check_artifact(check, manifest)
        return [_Subject(subject_digest, is_at_source=False) for subject_digest in below]

    async def _check_artifact(self, check: _Check, manifest: Manifest) -> list[str]:
        """Check the contents of an artifact, and count the artifact in the report.

        Returns the digests of the artifact's manifest and of the manifests below it.
        """
        self._report.artifacts_present.add((manifest.digest, check.image.target.key))
        contents = await self._check_contents(check.image, manifest)
        check.add(contents.check)
        return [manifest.digest, *(entry.digest for entry in contents.entries)]

    # Blobs that are read back.

    async def _read_blobs(self) -> None:
        queues = self._blobs_to_read.values()
        self.traffic.expected_bytes = sum(found.blob.size for queue in queues for found in queue)
        # Each target host has its own queue, as in `_check_images`.
        await gather(
            partial(gather, [partial(self._read_back, found) for found in queue])
            for queue in queues
        )

    async def _read_back(self, found: _FoundBlob) -> None:
        """Read a blob, verify its digest, and report the result."""
        image = found.image
        blob = found.blob
        check = _Check(image)
        with check.catching_errors("blob", blob.digest, Flaw.incomplete("blob", blob)):
            await self._read_blob(image.target, blob)
            self._report.blobs_read += 1
            self._report.bytes_read += blob.size
        if check.flaws:
            self._report.blobs_present.discard((blob.digest, image.target.key))
        self._report_check(check)

    async def _read_blob(self, target: Repository, blob: Descriptor) -> None:
        """Read a blob to its end and verify its digest. Raises SyncError if that fails.

        If an attempt fails, the next attempt resumes at the same offset after a pause. If the bytes
        are wrong, the blob is read once more over a new connection, because a cache may have been
        wrong.
        """
        reading = Reading(self.transport, target, blob)
        tries = Tries(self.transport, target)
        offset = 0
        while True:
            try:
                needs = target.reading_needs(blob.size)
                async with (
                    self.transport.gate.admitted(*needs) as given,
                    aclosing(reading.pieces(offset, given.get(needs[0]))) as pieces,
                ):
                    async for piece in pieces:
                        offset += len(piece)
                return
            except WrongBytes:
                if reading.is_fresh:
                    raise
                reading.start_again()
                offset = 0
                continue
            except SyncError as error:
                failure = error
            await tries.wait(failure)

    # Results.

    def _report_check(self, check: _Check) -> None:
        image = check.image
        # Each flaw is reported once, although an image and its artifact may lack the same blob.
        for flaw in dict.fromkeys(check.flaws):
            finding = Finding(image.source_name, image.target_name, flaw)
            self._report.findings.append(finding)
            self._emit(finding)
        if check.error is not None:
            self._fail(image, check.error)

    def _fail(self, image: _AuditedImage, error: SyncError) -> None:
        """Report an image that could not be checked completely."""
        error.drop_frames()
        outcome = Outcome(image.source_name, image.target_name, "failed", error=error)
        self._report.failures.append(outcome)
        self._emit(outcome)


def _check_bounds(entries: Collection[Descriptor], depth: int) -> None:
    """Raise ContentError if a tree of manifests is too large, or its indexes are nested too deep.

    Without bounds, an audit of a hostile registry that returns an endless tree would not end.
    """
    check_tree_size(entries)
    if depth > MAX_INDEX_DEPTH:
        raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")


def _subjects_in(
    top: Manifest, entries: Iterable[Descriptor], expected: _Expected
) -> list[_Subject]:
    """Return the manifests of an image whose artifacts are checked.

    `entries` are the descriptors of the manifests below `top`. Attestations have no artifacts.
    """
    entries = [entry for entry in entries if not entry.attested_digest]
    is_expected = top.digest == expected.digest
    if is_expected and expected.is_trimmed:
        # No artifact refers to a trimmed index, because a run created it. The indexes below it may
        # be trimmed too, so the source may not hold them.
        return [_Subject(entry.digest, is_at_source=not entry.is_index) for entry in entries]

    # An image with another digest is from another source or outdated, so the source may not hold
    # it.
    digests = [top.digest, *(entry.digest for entry in entries)]
    return [_Subject(digest, is_at_source=is_expected) for digest in digests]


def _distinct(subjects: Iterable[_Subject]) -> list[_Subject]:
    """Return one subject for each digest, sorted.

    Its `is_at_source` is True if that of any subject with the digest is True.
    """
    is_at_source = dict[str, bool]()
    for subject in subjects:
        is_at_source[subject.digest] = (
            is_at_source.get(subject.digest, False) or subject.is_at_source
        )
    return [_Subject(digest, is_at_source[digest]) for digest in sorted(is_at_source)]


async def _unless_absent(answer: Awaitable[Manifest]) -> Manifest | None:
    """Await a manifest. Returns None if the answer is a 404."""
    try:
        return await answer
    except RegistryError as error:
        if error.status != 404:
            raise
    return None
