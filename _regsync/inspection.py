"""Look at what a target holds of an image: its tag, manifests, blobs and artifacts.

Nothing that an earlier run has learnt about the target is believed.
Invariants: nothing is written anywhere. A failed request is an error, never a finding.
Follows: docs/design.md section 12 ("Audit").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Collection, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import chain, count
from typing import Any, Literal, NamedTuple

import anyio

from _regsync.config import MappingRule
from _regsync.errors import ContentError, RegistryError, Side, SyncError, WrongBytes
from _regsync.oci import MAX_INDEX_DEPTH, Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.registry.runs import Transport
from _regsync.state import RepositoryKey
from _regsync.sync.artifacts import (
    MOST_ARTIFACTS,
    MOST_LEVELS,
    Artifact,
    Referrers,
    too_many_artifacts,
)
from _regsync.sync.blobs import Reading, Tries, known_body
from _regsync.sync.discovery import Discovery, check_tree_size
from _regsync.sync.once import Once, gather
from _regsync.text import size_text

Kind = Literal["missing", "differs", "incomplete", "artifact_missing", "corrupt"]


class Finding(NamedTuple):
    """A defect of an image at a target. Several tags may have the same defect."""

    kind: Kind
    # Full references with host.
    source: str
    target: str
    # The description for users.
    text: str
    # The digest of the missing or corrupt blob or manifest. If `kind` is "differs", the digest at
    # the target. None if `kind` is "missing".
    digest: str | None
    # The digest that the target should have. None unless `kind` is "missing" or "differs".
    expected: str | None = None
    # Bytes of the missing part. None unless `kind` is "incomplete".
    size: int | None = None

    def line(self) -> str:
        """Return the line for users."""
        return f"{self.kind} {self.source} -> {self.target}: {self.text}"

    def as_json(self) -> dict[str, Any]:
        """Return the entry for `findings` of the JSON document."""
        return {
            "finding": self.kind,
            "source": self.source,
            "target": self.target,
            "digest": self.digest,
            "expected": self.expected,
            "size": self.size,
            "message": self.text,
        }


class Expected(NamedTuple):
    """The digest that a tag should name at its target."""

    # Empty if the digest is held back and no run has trimmed the index yet.
    digest: str
    # The digest at the source. It differs from `digest` if the index is trimmed to its platforms.
    source_digest: str
    # Whether `min_age` holds the digest back. If so, any digest at the target is right, and so is
    # an absent tag.
    is_held_back: bool = False

    @property
    def is_trimmed(self) -> bool:
        return self.digest != self.source_digest


class Inspection:
    """What was found out about an image at one target."""

    def __init__(
        self, mapping: MappingRule, source_name: str, target: Repository, tag: str
    ) -> None:
        self.mapping = mapping
        self.source_name = source_name
        self.target = target
        self.target_name = target.name_of(tag)
        # Each finding once, although an image and its artifact may lack the same blob.
        self.findings = dict[Finding, None]()
        # The first error because of which the inspection is incomplete.
        self.error: SyncError | None = None
        # The manifests that the source holds too, as far as is known. The target must hold the
        # artifacts that the source lists for them.
        self.at_source = set[str]()

    def add(
        self,
        kind: Kind,
        text: str,
        digest: str | None,
        *,
        expected: str | None = None,
        size: int | None = None,
    ) -> None:
        """Add a finding. `Finding` has the parameters."""
        names = self.source_name, self.target_name
        self.findings[Finding(kind, *names, text, digest, expected, size)] = None

    def fail(self, error: SyncError) -> None:
        """Record an error."""
        self.error = self.error or error

    @contextmanager
    def looking_at(self, part: str, digest: str, size: int | None = None) -> Iterator[None]:
        """Record a SyncError that ends the block, and continue after the block.

        `part` is the word for what is looked at, such as "blob". A ContentError is the finding that
        it is corrupt. If `size` is given, a 404 is the finding that it is missing.
        """
        try:
            yield
        except ContentError as error:
            self.add("corrupt", f"{part} {digest}: {error.message}", digest)
        except SyncError as error:
            if size is None or not is_absent(error):
                self.fail(error)
                return
            text = f"{part} {digest} ({size_text(size)}) is missing"
            self.add("incomplete", text, digest, size=size)


class Inspector:
    """Inspects images. What several of them have in common is asked for once."""

    def __init__(
        self,
        transport: Transport,
        discovery: Discovery,
        referrers: Referrers,
        *,
        reads_blobs: bool = False,
    ) -> None:
        """With `reads_blobs` all blobs are downloaded, and their digests are verified."""
        self._transport = transport
        self._discovery = discovery
        self._referrers = referrers
        self._reads_blobs = reads_blobs

        # The manifests and blobs that targets have, by digest and repository.
        self.manifests = set[tuple[str, RepositoryKey]]()
        self.blobs = set[tuple[str, RepositoryKey]]()
        # The blobs that are left out of layouts, by digest and repository at the far side.
        self.left_out = set[tuple[str, RepositoryKey]]()
        # The subset of `manifests` that are artifacts.
        self.artifacts = set[tuple[str, RepositoryKey]]()
        # How many blobs were read, their bytes, and the bytes of the blobs that are to be read.
        self.blobs_read = 0
        self.bytes_read = 0
        self.bytes_to_read = 0

        # By target, digest and size, the request for a blob. Raises ContentError if it is corrupt.
        self._blob_requests = defaultdict[tuple[RepositoryKey, str, int], Once[None]](Once)
        # By target and digest, a lock that is held while a tag is fetched that probably names this
        # digest.
        self._tag_reads = defaultdict[tuple[RepositoryKey, str], anyio.Lock](anyio.Lock)

    async def inspect(
        self, mapping: MappingRule, tag: str, target: Repository, expected: Expected
    ) -> Inspection:
        """Look at an image of a mapping at one of its targets.

        The result has the findings, and the first error if something could not be looked at.
        """
        source_name = self._discovery.source_of(mapping).name_of(tag)
        image = Inspection(mapping, source_name, target, tag)
        likely_digest = expected.digest or expected.source_digest
        top: Manifest | None = None
        with image.looking_at("manifest", likely_digest):
            top = await self._manifest_of_tag(target, tag, likely_digest)
            if top is None and not expected.is_held_back:
                digest = expected.digest
                image.add("missing", f"expected {digest}", None, expected=digest)
        if top is None:
            return image  # the tag is absent, or its manifest could not be read

        if top.digest != expected.digest and not expected.is_held_back:
            text = f"found {top.digest}, expected {expected.digest}"
            image.add("differs", text, top.digest, expected=expected.digest)
        # The contents are looked at even if the digest is wrong, because clients can pull the image.
        entries = await self._look_below(image, top)
        if mapping.artifacts.enabled:
            # Attestations have no artifacts.
            entries = [entry for entry in entries if not entry.attested_digest]
            subjects = {top.digest, *(entry.digest for entry in entries)}
            if top.digest != expected.digest:
                pass  # it is outdated or from another source, so the source may not hold it
            elif not expected.is_trimmed:
                image.at_source |= subjects
            else:
                # No artifact refers to a trimmed index, because a run created it. The indexes below
                # it may be trimmed too, so the source may not hold them.
                subjects.remove(top.digest)
                image.at_source.update(entry.digest for entry in entries if not entry.is_index)
            await self._look_at_artifacts(image, subjects)
        return image

    # Manifests and blobs.

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
        if digest:
            return await _unless_absent(self._discovery.fetch_manifest(target, digest))
        # A registry may answer a HEAD without a digest, or with 404 where a GET finds the tag.
        return await _unless_absent(self._discovery.fetch_manifest_of_tag(target, tag))

    async def _look_below(self, image: Inspection, top: Manifest) -> list[Descriptor]:
        """Look at all manifests and blobs that a manifest names at any depth, level by level.

        Returns the descriptors of the manifests that are there.
        """
        target = image.target
        self.manifests.add((top.digest, target.key))
        present = list[Descriptor]()
        named = dict[str, Descriptor]()
        level = [top]
        for depth in count(1):
            blobs = {blob.digest: blob for manifest in level for blob in manifest.blobs}
            await gather(partial(self._look_at_blob, image, blob) for blob in blobs.values())
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
                image.fail(error.add_context(Side.TARGET, "read", image.target_name))
                break
            manifests = await gather(
                partial(self._look_at_child, image, child) for child in children.values()
            )
            level = [manifest for manifest in manifests if manifest is not None]
            present += (children[manifest.digest] for manifest in level)
        return present

    async def _look_at_child(self, image: Inspection, child: Descriptor) -> Manifest | None:
        """Return a manifest that an index names, or None if it is not there or corrupt."""
        manifest: Manifest | None = None
        with image.looking_at("manifest", child.digest, child.size):
            manifest = await self._discovery.fetch_manifest(image.target, child.digest, child)
            self.manifests.add((child.digest, image.target.key))
        return manifest

    async def _look_at_blob(self, image: Inspection, blob: Descriptor) -> None:
        target = image.target
        # The blob may be left out of a layout, if the registry to which the layout will be carried
        # has it.
        far_repository = target.far_repository(blob.digest)
        if far_repository is not None:
            self.left_out.add((blob.digest, RepositoryKey(target.key.host, far_repository)))
            return
        request = self._blob_requests[target.store_key, blob.digest, blob.size]
        with image.looking_at("blob", blob.digest, blob.size):
            await request.get(partial(self._ask_for_blob, target, blob))
            self.blobs.add((blob.digest, target.key))

    async def _ask_for_blob(self, target: Repository, blob: Descriptor) -> None:
        """Find out whether a target has a blob, and read it if that is wanted.

        Raises RegistryError with status 404 if it is absent, and ContentError if it is corrupt.
        """
        size: int | None = None  # None if the registry does not report it
        try:
            size = await target.blob_size(blob.digest)
        except SyncError as error:
            if target.is_local or not is_absent(error):
                raise
            # Some registries answer 404 to a HEAD of what a GET finds. One GET is made for each
            # blob that seems to be missing, and its body is not read.
            async with await target.open_blob(blob):
                pass
        if size is not None and size != blob.size:
            raise ContentError(f"it has {size} bytes, its descriptor says {blob.size}")
        # An empty JSON object, or a blob that is embedded in its descriptor, need not be read.
        if self._reads_blobs and known_body(blob) is None:
            self.bytes_to_read += blob.size
            await self._read_blob(target, blob)
            self.blobs_read += 1
            self.bytes_read += blob.size

    async def _read_blob(self, target: Repository, blob: Descriptor) -> None:
        """Read a blob to its end and verify its digest. Raises SyncError if that fails.

        If an attempt fails, the next attempt resumes at the same offset after a pause. If the bytes
        are wrong, the blob is read once more over a new connection, because a cache may have been
        wrong.
        """
        reading = Reading(self._transport, target, blob)
        tries = Tries(self._transport, target)
        offset = 0
        while True:
            try:
                needs = target.reading_needs(blob.size)
                async with (
                    self._transport.gate.admitted(*needs) as given,
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

    # Artifacts.

    async def _look_at_artifacts(self, image: Inspection, subjects: set[str]) -> None:
        """Look at the artifacts of these subjects, the artifacts of these artifacts, and so on."""
        lists = self._referrers.lists
        source = self._discovery.source_of(image.mapping)
        seen = set[str]()  # a chain of artifacts may be a cycle
        level = subjects
        # One level more is looked at, to find out that the artifacts of the last level have none.
        for _ in range(MOST_LEVELS + 1):
            seen |= level
            # Announced before the lists are read, because several subjects are worth a tag listing.
            lists.expect_subjects(image.target, len(level))
            lists.expect_subjects(source, len(level & image.at_source))
            below = await gather(
                partial(self._look_at_artifacts_of, image, subject) for subject in sorted(level)
            )
            level = set(chain.from_iterable(below)) - seen
            if not level:
                return
            if len(seen) + len(level) > MOST_ARTIFACTS:
                break

        error = too_many_artifacts()
        image.fail(error.add_context(Side.TARGET, "list referrers in", image.target_name))

    async def _look_at_artifacts_of(self, image: Inspection, subject: str) -> list[str]:
        """Look at the artifacts of one subject. Returns the subjects in these artifacts.

        Artifacts that the source lists must be at the target. Artifacts that only the target lists
        must be complete.
        """
        below = list[str]()
        with image.looking_at("list of referrers of", subject):
            required = list[Artifact]()
            if subject in image.at_source:
                required = await self._referrers.find_for_subject(image.mapping, subject)
            entries = (await self._referrers.lists.read(image.target, subject)).entries

            listed = {entry.digest for entry in entries}
            asks = [partial(self._look_at_required, image, each, listed) for each in required]
            # A list may name its own subject, which is not an artifact.
            known = {subject, *(artifact.digest for artifact in required)}
            asks += [
                partial(self._look_at_listed, image, subject, entry)
                for entry in entries
                if entry.digest not in known
            ]
            below += chain.from_iterable(await gather(asks))
        return below

    async def _look_at_required(
        self, image: Inspection, artifact: Artifact, listed: Collection[str]
    ) -> list[str]:
        """Look at an artifact that the source lists. Returns the subjects in the artifact.

        `listed` are the digests that the target lists for the artifact's subject. The result is
        empty if the artifact has another digest at the target, or if the source does not hold it.
        """
        digest = artifact.digest
        # Even if the target lacks the artifact, it may have artifacts of the artifact.
        subjects = [digest]
        with image.looking_at("manifest", digest):
            if artifact.tag is not None:
                manifest = await self._manifest_of_tag(image.target, artifact.tag, digest)
            else:
                entry = artifact.entry
                # The entry of an artifact in a lock has only a digest to compare with.
                expected = entry if entry is not None and entry.media_type else None
                fetched = self._discovery.fetch_manifest(image.target, digest, expected)
                manifest = await _unless_absent(fetched)
            if manifest is None:
                if not await self._referrers.is_at_source(image.mapping, artifact):
                    # The source lists the artifact but does not hold it, so no run can copy it.
                    return []
                image.add("artifact_missing", f"{artifact} is missing", digest)
            else:
                subjects = await self._look_at_artifact(image, manifest)
                if manifest.digest != digest:
                    found = f"found {manifest.digest}, expected {digest}"
                    text = f"artifact {artifact.reference}: {found}"
                    image.add("differs", text, manifest.digest, expected=digest)
                    return []
                # Clients find an artifact without a cosign tag only by the list.
                if artifact.tag is None and digest not in listed:
                    text = f"{artifact} exists, but the target does not list it"
                    image.add("artifact_missing", text, digest)

        if not self._referrers.may_be_subject(image.mapping, artifact):
            return []
        image.at_source.update(subjects)
        return subjects

    async def _look_at_listed(
        self, image: Inspection, subject: str, entry: Descriptor
    ) -> list[str]:
        """Look at an artifact that only the target lists. Returns the subjects in the artifact."""
        digest = entry.digest
        subjects = list[str]()
        with image.looking_at("manifest", digest):
            fetched = self._discovery.fetch_manifest(image.target, digest, entry)
            manifest = await _unless_absent(fetched)
            if manifest is not None:
                subjects += await self._look_at_artifact(image, manifest)
            else:
                text = f"{digest} of {subject} is listed, but missing"
                image.add("artifact_missing", text, digest)
        return subjects

    async def _look_at_artifact(self, image: Inspection, manifest: Manifest) -> list[str]:
        """Look below an artifact. Returns its digest, and those of the manifests below it."""
        self.artifacts.add((manifest.digest, image.target.key))
        entries = await self._look_below(image, manifest)
        return [manifest.digest, *(entry.digest for entry in entries)]


def _check_bounds(entries: Collection[Descriptor], depth: int) -> None:
    """Raise ContentError if a tree of manifests is too large, or its indexes are nested too deep.

    Without bounds, an audit of a hostile registry that returns an endless tree would not end.
    """
    check_tree_size(entries)
    if depth > MAX_INDEX_DEPTH:
        raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")


def is_absent(error: SyncError) -> bool:
    """Report whether an error says that something does not exist."""
    return isinstance(error, RegistryError) and error.status == 404


async def _unless_absent(answer: Awaitable[Manifest]) -> Manifest | None:
    """Await a manifest. Returns None if the answer is a 404."""
    try:
        return await answer
    except RegistryError as error:
        if not is_absent(error):
            raise
    return None
