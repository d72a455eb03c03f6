"""Look at what a target holds of an image, part by part: its manifests and its blobs.

Nothing that an earlier run has learnt about the target is believed.
Invariants: nothing is written anywhere. A failed request is an error, never a finding.
Follows: docs/design.md section 12 ("Audit").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Literal, NamedTuple

from _regsync.errors import ContentError, RegistryError, Side, SyncError, WrongBytes
from _regsync.oci import Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.registry.runs import Transport
from _regsync.state import Knowledge, RepositoryKey
from _regsync.sync.blobs import Reading, Tries, known_body
from _regsync.sync.discovery import Discovery
from _regsync.sync.image import Traffic, Tree
from _regsync.sync.once import Once, gather
from _regsync.text import size_text

Kind = Literal["missing", "differs", "incomplete", "artifact_missing", "corrupt"]


class Finding(NamedTuple):
    """A defect of an image at a target: an entry of `findings` of the JSON document."""

    finding: Kind
    # Full references with host.
    source: str
    target: str
    # The digest of the missing or corrupt blob or manifest. If it "differs", the digest at the
    # target. None if it is "missing".
    digest: str | None
    # The digest that the target should have. None unless it is "missing" or "differs".
    expected: str | None
    # Bytes of the missing part. None unless it is "incomplete".
    size: int | None
    message: str

    def line(self) -> str:
        """Return the line for users."""
        return f"{self.finding} {self.source} -> {self.target}: {self.message}"


class Inspection:
    """What was found out about an image at one target."""

    def __init__(self, source_name: str, target: Repository, reference: str) -> None:
        self.source_name = source_name
        self.target = target
        self.target_name = target.name_of(reference)
        # Each finding once, although an image and its artifact may lack the same blob.
        self.findings = dict[Finding, None]()
        # The first error because of which the inspection is incomplete.
        self.error: SyncError | None = None

    def add(
        self,
        kind: Kind,
        message: str,
        digest: str | None,
        *,
        expected: str | None = None,
        size: int | None = None,
    ) -> None:
        """Add a finding. `Finding` has the parameters."""
        names = self.source_name, self.target_name
        self.findings[Finding(kind, *names, digest, expected, size, message)] = None

    def fail(self, error: SyncError) -> None:
        """Record an error."""
        self.error = self.error or error

    @contextmanager
    def looking_at(self, part: str, digest: str, size: int = 0) -> Iterator[None]:
        """Record a SyncError that ends the block, and continue after the block.

        `part` is the word for what is looked at, such as "blob". A ContentError is the finding that
        it is corrupt, a 404 that it is missing. `size` is in bytes, 0 if it is not known.
        """
        try:
            yield
        except ContentError as error:
            self.add("corrupt", f"{part} {digest}: {error.message}", digest)
        except SyncError as error:
            if not isinstance(error, RegistryError) or error.status != 404:
                self.fail(error)
                return
            shown_size = f" ({size_text(size)})" if size else ""
            self.add("incomplete", f"{part} {digest}{shown_size} is missing", digest, size=size)


class Inspector:
    """Looks at manifests and blobs. What several images have in common is asked for once."""

    def __init__(
        self, transport: Transport, discovery: Discovery, *, reads_blobs: bool = False
    ) -> None:
        """With `reads_blobs` all blobs are downloaded, and their digests are verified."""
        self._transport = transport
        self._discovery = discovery
        self._reads_blobs = reads_blobs

        # The manifests and blobs that targets have, by digest and repository.
        self.manifests = set[tuple[str, RepositoryKey]]()
        self.blobs = set[tuple[str, RepositoryKey]]()
        # The blobs that are left out of layouts, by digest and repository at the far side.
        self.left_out = set[tuple[str, RepositoryKey]]()
        # How many blobs were read, their bytes, and the bytes of the blobs that are to be read.
        self.blobs_read = 0
        self.bytes_read = 0
        self.traffic = Traffic()
        # By target, digest and size, the request for a blob. Raises ContentError if it is corrupt.
        self._blob_requests = defaultdict[tuple[RepositoryKey, str, int], Once[None]](Once)

    async def look_below(self, image: Inspection, top: Manifest) -> Tree:
        """Look at all manifests and blobs that a manifest names at any depth.

        Returns it with the manifests that are there.
        """
        target = image.target
        self.manifests.add((top.digest, target.key))
        look = partial(self._look_at_child, image)
        try:
            tree = await self._discovery.fetch_tree(target, top.digest, top, look)
        except ContentError as error:  # it has more parts than are looked at
            image.fail(error)
            tree = Tree(top, (), top.digest)
        await gather(partial(self._look_at_blob, image, blob) for blob in tree.blobs.values())
        return tree

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
        # An empty JSON object, or a blob that is embedded in its descriptor, need not be read.
        if self._reads_blobs and known_body(blob) is None:
            self.traffic.expected_bytes += blob.size
            await self._read_blob(target, blob)
            self.blobs_read += 1
            self.bytes_read += blob.size
        elif not await target.has_blob(blob, with_retries=True):
            # Some registries refuse a HEAD, or answer 404, where a GET finds the blob. So one GET
            # decides, and its body is not read.
            async with await target.open_blob(blob):
                pass

    async def _read_blob(self, target: Repository, blob: Descriptor) -> None:
        """Read a blob to its end and verify its digest. Raises SyncError if that fails.

        If the bytes are wrong, the blob is read once more over a new connection, because a cache may
        have been wrong.
        """
        reading = Reading(self._transport, target, blob)
        tries = Tries(self._transport, target)
        while True:
            try:
                async with aclosing(reading.alone()) as pieces:
                    async for _ in pieces:
                        pass
                return
            except WrongBytes:
                if reading.is_fresh:
                    raise
                reading.start_again()
            except SyncError as error:
                await tries.wait(error)

    async def is_whole(
        self, known: Knowledge, target: Repository, reference: str, digest: str
    ) -> bool:
        """Ask a target for all parts of the image that a tag or digest names there, for `sync
        --verify`.

        What is missing is logged and forgotten, so that the run copies it as it always does. Raises
        SyncError if something cannot be looked at, or if its bytes are wrong: they stay, because a
        registry takes no other bytes under a digest that it has.
        """
        image = Inspection("", target, reference)
        manifests = [digest]
        with image.looking_at("manifest", digest):
            top = await self._discovery.fetch_manifest(target, digest)
            tree = await self.look_below(image, top)
            manifests += [child.digest for child in tree.children]
        if image.error is not None:
            raise image.error

        where = target.store_key
        lost = set[str]()
        for finding in image.findings:
            if finding.finding == "corrupt":
                hint = "delete it at the target, and run `sync --verify` again"
                error = ContentError(finding.message, hint=hint)
                raise error.add_context(Side.TARGET, "verify", image.target_name)
            # This run may have brought it since it was looked for.
            if finding.digest is not None and not known.is_confirmed(where, finding.digest):
                lost.add(finding.digest)
                text = f"{image.target_name}: {finding.message}"
                self._discovery.log_once("warning", "part_missing", text)
        if not lost:
            return True
        for name in (*manifests, *lost):  # nothing is believed of the image now
            known.forget(where, name)
        return False
