"""The repositories of image layouts, as copies see them (`registry.repository.Repository`).

Owns: what a tag or digest names in a layout, how blobs are read from it and written to it.
May not know: requests, which image is copied when.
Invariants: a manifest that is returned has the digest that was asked for (I3); one is taken only
    when all that it names is there or is known to be at the far side (I1).
Follows: docs/design.md section 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from io import FileIO
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from _regsync.addresses import Origin
from _regsync.config.model import Registry
from _regsync.errors import ContentError, RegistryError, Side, SyncError, WrongBytes
from _regsync.files import DiskPace
from _regsync.layout.assumed import read_assumed
from _regsync.layout.directory import BlobFile, Layout
from _regsync.layout.disk import LayoutError
from _regsync.layout.index import Entry, Index, image_entry, unnamed_entry
from _regsync.net.http1 import Pieces
from _regsync.net.pool import Lease
from _regsync.oci.manifest import Descriptor, Manifest, parse_manifest
from _regsync.oci.reference import check_digest, image_name, is_digest
from _regsync.providers import Pace, Product, UploadStyle
from _regsync.registry.throttle import Demand, RegistryLimits
from _regsync.registry.transport import Transport
from _regsync.state.archive import RepositoryKey
from _regsync.text import Secrets

if TYPE_CHECKING:
    from hashlib import _Hash

# Bytes of a manifest, as registries take it.
_MANIFEST_LIMIT = 4 * 1024 * 1024

# Blobs on their way to or from one layout at the same time.
_CONCURRENCY = 64

# A directory is no kind of registry: blobs are looked for by name, and written whole.
_LAYOUT = Product(
    None,
    "docs/design.md section 13",
    paces=(Pace("blob_get upload_body", _CONCURRENCY),),
    fallback=None,
    probe=None,
    listing_has_digests=True,
)


class LayoutHost:
    """The layout that a registry of the configuration is. Copies see it as they see another registry's
    host (`registry.host.Host`).
    """

    def __init__(
        self,
        registry: Registry,
        transport: Transport,
        on_put: Callable[[], None],
        *,
        is_rechecked: bool,
    ) -> None:
        """`on_put` is called when something was put that is not safe yet."""
        self.registry = registry
        self.layout = Layout(registry.host, transport.machine.log, on_put)
        # Called with how many bytes of a blob were written.
        self.count_sent = transport.count_sent
        # Whether a target's images count as there only with all that they name.
        self.is_rechecked = is_rechecked

        self.key = registry.authority
        self.origin = Origin(registry.scheme, registry.host, registry.port)
        limits = RegistryLimits(_CONCURRENCY, _LAYOUT.paces)
        transport.gate.limits[self.key] = limits
        # What one blob on its way to or from the layout takes of these limits.
        self.demand = Demand(self.key, meters=limits.meter_names("", "blob_get", "upload_body"))

        # A disk has no outages and asks for no pause.
        self.peer = self.layout
        self.stop_error: SyncError | None = None
        self.can_resume = True

        # By digest, a repository at the far side that holds the blob.
        self.assumed = dict[str, str]()
        # By digest, the bytes of blobs that were not written because the far side has them.
        self.saved = dict[str, int]()

    @property
    def secrets(self) -> Secrets:
        """A directory has none."""
        return tuple

    def redact(self, text: str) -> str:
        return text

    def stop(self, error: SyncError, until: float = -math.inf) -> None:
        self.stop_error = error.without_place()

    def assume(self, paths: Iterable[str], log: Callable[..., None]) -> None:
        """Read what the far side holds from receipts and layouts; ConfigError where one of them
        cannot be read.
        """
        self.assumed.update(read_assumed(paths, log))

    def repository(self, name: str, side: Side) -> LayoutRepository:
        return LayoutRepository(self, name, side)


class LayoutRepository:
    """One repository of a layout, seen from one side of a copy."""

    product = _LAYOUT
    probe_from = None
    is_local = True

    def __init__(self, host: LayoutHost, name: str, side: Side) -> None:
        self.host = host
        self.name = name
        self.api_name = name
        self.side = side
        self.key = RepositoryKey(host.key, name)
        # All repositories of a layout have their blobs and manifests in one folder.
        self.pool = RepositoryKey(host.key, "")
        self._layout = host.layout

    def __str__(self) -> str:
        return f"{self.host.key}//{self.name}"

    def name_of(self, reference: str) -> str:
        """Return how an error names a tag or digest of this repository."""
        return image_name(str(self), reference)

    def full_name(self, reference: str) -> str:
        """Return what an image was called where it was copied from; else its name here."""
        entry = self._find(reference)
        if entry is not None and entry.full_name:
            return entry.full_name
        return image_name(self.name, reference)

    @contextmanager
    def adding_place(self, operation: str, reference: str) -> Iterator[None]:
        """Add side, operation and reference to every error that the block raises."""
        try:
            yield
        except SyncError as error:
            if isinstance(error, RegistryError) and error.status == 404 and error.hint is None:
                error.hint = f"check the name: `regsync tags {self}` lists what is there"
            error.with_place(self.side, operation, reference)
            raise

    def demand_of_reading(self) -> Demand:
        return self.host.demand

    def demand_of_writing(self) -> Demand:
        return self.host.demand

    # Tags.

    async def list_tags(self) -> dict[str, str | None] | None:
        """Return every tag whose manifest is there, with its digest; None where there is no tag."""
        with self.adding_place("list tags of", str(self)):
            present = dict[str, str | None]()
            for tag, digest in self._index().tags(self.name).items():
                if self._find_present(tag) is not None:
                    present[tag] = digest
            return present or None

    def _index(self) -> Index:
        # A target need not be a layout yet: the first write makes it one.
        return self._layout.index(may_be_new=self.side is Side.TARGET)

    def _find(self, reference: str) -> Entry | None:
        """Return the entry of a tag or digest, None where `index.json` has none."""
        index = self._index()
        if not is_digest(reference):
            return index.find(self.name, reference)
        entries = index.entries_of(reference)
        return entries[0] if entries else None

    def _find_present(self, reference: str) -> Entry | None:
        """Return the entry of an image whose manifest is in the layout, None where it is not.

        At a target that is rechecked, all that the manifest names has to be there too: the disk may
        have lost files.
        """
        entry = self._find(reference)
        if entry is None or not self._holds(entry.descriptor):
            return None
        is_rechecked = self.side is Side.TARGET and self.host.is_rechecked
        if is_rechecked and not self._has_all_of(entry.descriptor):
            return None
        return entry

    def _has_all_of(self, image: Descriptor) -> bool:
        """Say whether all that an image names is here, but for blobs that this run leaves out.

        A blob that an earlier run left out is lacking, unless `assume` still names it: it may be gone at
        the far side.
        """
        manifests = [image]
        seen = {image.digest}
        for descriptor in manifests:  # the list grows by the children of each index
            if not self._holds(descriptor):
                return False
            manifest = self._read_manifest(descriptor.digest, descriptor)
            for blob in manifest.blobs:
                if not self._is_assumed(blob) and not self._holds(blob):
                    return False
            manifests += [child for child in manifest.children if child.digest not in seen]
            seen.update(child.digest for child in manifest.children)
        return True

    # Manifests.

    async def head_manifest(self, reference: str) -> str | None:
        """Return the digest of the manifest that a tag or digest names, None where there is none."""
        with self.adding_place("look up", self.name_of(reference)):
            entry = self._find_present(reference)
            if entry is not None:
                return entry.descriptor.digest
            # `index.json` does not name it, but another index may. At a target such a manifest counts as
            # absent: a killed run may have written it without that index.
            if self.side is Side.SOURCE and is_digest(reference):
                is_on_disk = self._layout.size_of(check_digest(reference)) is not None
                return reference if is_on_disk else None
            return None

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        """Return the manifest of a tag or digest, whose bytes have that digest (I3).

        RegistryError with status 404 where there is none.
        """
        with self.adding_place("fetch manifest", self.name_of(reference)):
            entry = self._find(reference)
            if entry is not None:
                return self._read_manifest(entry.descriptor.digest, expected or entry.descriptor)
            # `index.json` does not name it, but another index may.
            if is_digest(reference):
                return self._read_manifest(reference, expected)
            raise RegistryError("no such tag or manifest", status=404)

    def _read_manifest(self, digest: str, expected: Descriptor | None) -> Manifest:
        body = self._layout.read(digest, _MANIFEST_LIMIT)
        if body is None:
            raise RegistryError("no such tag or manifest", status=404)
        return parse_manifest(body, content_type=None, digest=digest, expected=expected)

    async def put_child(self, manifest: Manifest) -> None:
        """Put a manifest of which `index.json` gets no entry, because an index will name it."""
        await self._put(manifest.digest, manifest, None)

    async def put_manifest(
        self, reference: str, manifest: Manifest, *, full_name: str = ""
    ) -> None:
        """Put a manifest under a tag or digest; `full_name` is what it is called at its source."""
        if is_digest(reference):
            entry = unnamed_entry(manifest, self.name)
        else:
            entry = image_entry(manifest, self.name, reference, full_name)
        await self._put(reference, manifest, entry)

    async def _put(self, reference: str, manifest: Manifest, entry: Entry | None) -> None:
        """Put a manifest under `entry`.

        RegistryError where a blob or child of it is neither here nor at the far side (I1).
        """
        with self.adding_place("write manifest", self.name_of(reference)):
            absent_blobs = [blob for blob in manifest.blobs if not self._holds(blob)]
            left_out = [blob for blob in absent_blobs if self._is_assumed(blob)]
            lacking = [blob for blob in absent_blobs if not self._is_assumed(blob)]
            lacking += [child for child in manifest.children if not self._holds(child)]
            if lacking:
                # The answer that a registry gives makes the copy look for these parts again.
                text = f"{lacking[0].digest}, which it names, is not there"
                error = RegistryError(text, status=404, codes=("MANIFEST_BLOB_UNKNOWN",))
                error.digests = frozenset(part.digest for part in lacking)
                raise error

            self._layout.add_manifest(manifest.digest, manifest.body, entry)
            for blob in left_out:
                self._layout.add_left_out(blob.digest, self.host.assumed[blob.digest])

    def _holds(self, part: Descriptor) -> bool:
        """Say whether the layout has a blob or manifest, with its size. Its bytes are not read."""
        return self._layout.size_of(part.digest) == part.size

    async def missing_parts_of(
        self, root: Manifest, children: tuple[Manifest, ...]
    ) -> frozenset[str]:
        """Return the digests of the blobs and children that an image names and the layout lacks."""
        parts = [part for manifest in (root, *children) for part in manifest.dependencies]
        return frozenset(part.digest for part in parts if not self._holds(part))

    async def list_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return what refers to a digest, in all repositories of the layout: their blobs are one pool."""
        with self.adding_place("list referrers of", self.name_of(digest)):
            index = self._index()
            if not index.knows_all_subjects:
                self._read_subjects(index)
                index.knows_all_subjects = True
            referrers = {
                entry.descriptor.digest: entry.referrer for entry in index.referrers(digest)
            }

            # Other tools may have written fallback tags. Two of them may name the same list.
            lists = {entry.descriptor.digest: entry for entry in index.fallback_lists(digest)}
            for list_digest, entry in lists.items():
                referrers_list = self._read_manifest(list_digest, entry.descriptor)
                for referrer in referrers_list.children:
                    referrers.setdefault(referrer.digest, referrer)
            return tuple(referrers.values())

    def _read_subjects(self, index: Index) -> None:
        """Tell `index` what the artifacts of other tools refer to, which only their manifests say.

        An entry that cannot be read may refer to any image. It only gives a warning: an error would
        fail every image, also those that the entry does not refer to.
        """
        # By digest, because a hostile index may name one manifest many times.
        entries = {entry.descriptor.digest: entry for entry in index.unnamed_entries()}
        unreadable = dict[str, str]()
        for digest, entry in entries.items():
            try:
                manifest = self._read_manifest(digest, entry.descriptor)
            except SyncError as error:
                unreadable[digest] = error.message
                continue
            if manifest.subject is not None:
                index.add_subject(entry, manifest.subject.digest)
        self._layout.warn_of_unreadable(unreadable)

    def has_unsaved(self) -> bool:
        """Say whether something was put that is not on the disk yet."""
        return self._layout.has_unsaved()

    async def wait_until_saved(self) -> None:
        """Wait until what was put is on the disk; LayoutError where that failed."""
        with self.adding_place("write", str(self)):
            await self._layout.wait_until_saved()

    # Blobs.

    async def has_blob(self, blob: Descriptor, *, with_retries: bool = False) -> bool:
        """Say whether a blob need not be copied: it is here with its size, or left out."""
        with self.adding_place("look up blob", self.name_of(blob.digest)):
            if self._holds(blob):
                return True
            if self._is_assumed(blob):
                self.host.saved[blob.digest] = blob.size
                return True
            return False

    async def blob_size(self, digest: str) -> int | None:
        """Return the bytes of a blob. RegistryError with status 404 where there is no such blob."""
        with self.adding_place("look up blob", self.name_of(digest)):
            size = self._layout.size_of(digest)
            if size is None:
                raise RegistryError("no such blob", status=404)
            return size

    def _is_assumed(self, blob: Descriptor) -> bool:
        """Say whether a blob is left out of the layout, because the far side is assumed to hold it."""
        # Configs are always written. They are known by their JSON type, which few layers have.
        if self.side is Side.SOURCE or blob.media_type.endswith("json"):
            return False
        return blob.digest in self.host.assumed

    def known_read_error(self, blob: Descriptor) -> SyncError | None:
        """Return the error of a blob that is not here, or has another size; None where it is here."""
        try:
            with self.adding_place("read blob", self.name_of(blob.digest)):
                size = self._layout.size_of(blob.digest)
                if size is None:
                    raise self._absence_of(blob)
                if size != blob.size:
                    text = f"the blob has {size} bytes, its descriptor says {blob.size}"
                    raise WrongBytes(text)
        except SyncError as error:
            return error
        return None

    def _absence_of(self, blob: Descriptor) -> LayoutError:
        """Return the error of a blob that the target does not hold either."""
        if self.far_repository(blob.digest) is None:
            error = LayoutError("neither the layout nor the target holds it")
            error.hint = "make the layout again, because a part of it is lost"
            return error
        error = LayoutError("it was left out of the layout, and the target does not hold it")
        error.hint = "run `sync --recheck` where the layout was made, without `assume` or with a newer receipt"
        return error

    def far_repository(self, digest: str) -> str | None:
        """Return a repository at a target that is said to hold a blob which was left out here."""
        return self._layout.index().left_out.get(digest)

    async def open_blob(
        self, blob: Descriptor, start: int = 0, *, is_fresh: bool = False
    ) -> AbstractAsyncContextManager[_FileBody]:
        """Open a blob at byte `start`. Returns a context that yields its bytes."""
        with self.adding_place("read blob", self.name_of(blob.digest)):
            stream = self._layout.open(blob.digest, blob.size)
        stream.seek(start)
        return _FileBody(self._layout, stream)

    @contextmanager
    def reserving(
        self, reference: str, blobs: Iterable[Descriptor], manifests: Iterable[Manifest]
    ) -> Iterator[None]:
        """Keep room on the disk for an image; LayoutError where there is too little."""
        sizes = {blob.digest: blob.size for blob in blobs if not self._is_assumed(blob)}
        sizes.update((manifest.digest, manifest.size) for manifest in manifests)
        with self.adding_place("write", self.name_of(reference)):
            reserved = self._layout.reserve(sizes)
        try:
            yield
        finally:
            self._layout.reservations.remove(reserved)

    def begin_upload(self, blob: Descriptor, lease: Lease) -> _BlobWriting:
        """Return the writing of a blob, which has not begun."""
        return _BlobWriting(self, self._layout, lease, blob)


class _FileBody:
    """The bytes of a blob on their way from a layout."""

    def __init__(self, layout: Layout, stream: FileIO) -> None:
        self._layout = layout
        self._stream = stream
        self._disk = DiskPace()

    async def __aenter__(self) -> _FileBody:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.close()

    async def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` and return how many bytes it got, 0 at the end of the blob."""
        # A read that needs no thread waits for nothing: without this no other task would run.
        await anyio.lowlevel.checkpoint()
        with self._layout.disk_errors():
            return await self._disk.run(self._stream.readinto, buffer)

    def read_now(self, buffer: memoryview) -> int:
        """Fill `buffer` at once, however long that takes: for worker threads."""
        with self._layout.disk_errors():
            return self._stream.readinto(buffer)


class _BlobWriting:
    """One blob on its way into a layout, in the form of an upload (`registry.repository.BlobUpload`).

    The upload's session is the file beside the blob's place. When a body breaks, the file keeps what
    came of it, and `resume` goes on behind that.
    """

    def __init__(
        self, repository: LayoutRepository, layout: Layout, lease: Lease, blob: Descriptor
    ) -> None:
        # What a transfer reads of any upload.
        self.lease = lease
        self.session = ""
        self.broken_session = ""
        self.offset = 0
        self.hash: _Hash | None = None
        self.style: UploadStyle = "put"
        self.is_start_refused = False
        self.has_begun = False

        self._repository = repository
        self._layout = layout
        self._blob = blob
        self._file: BlobFile | None = None

    def _place(self) -> AbstractContextManager[None]:
        reference = self._repository.name_of(self._blob.digest)
        return self._repository.adding_place("write blob", reference)

    async def start(self, mount_from: str | None = None) -> bool:
        """Begin the file, again if one was begun. Return whether no body is needed: the layout holds
        the blob, or a killed run had written all of it.
        """
        if self._repository._holds(self._blob):
            return True
        with self._place():
            if self._file is not None:
                self._file.remove()
                self._file = None
            file = await self._layout.begin_blob(self._blob)
            if file.is_complete:
                file.finish()
                return True

        self._file = file
        self.session = self._blob.digest
        self.offset = file.offset
        self.hash = file.hash
        self.has_begun = False
        return False

    async def try_mount(self, digest: str, mount_from: str) -> bool:
        """Never called: only a registry is asked for a blob by the start of an upload (rule 11)."""
        raise ContentError("a layout is asked for a blob by its name alone")

    async def send(self, pieces: Pieces, *, is_last: bool = True) -> bool:
        """Write the rest of the blob, whose bytes were verified; return True.

        Raises what `pieces` raises, and LayoutError.
        """
        assert self._file is not None
        # A session waits for a body. From here on this one either ends, or becomes the broken session.
        self.session = ""
        self.has_begun = True
        count_sent = self._repository.host.count_sent
        try:
            while piece := await pieces.next():
                with self._place():
                    await self._file.write(piece)
                count_sent(len(piece))
                # What follows without a wait for the source goes to the disk by a worker thread.
                count_sent(await pieces.pour(self._append))
        except BaseException as error:
            # The source may be a layout too, whose errors have the other side.
            is_disk_broken = isinstance(error, LayoutError) and error.side is Side.TARGET
            if is_disk_broken:
                self._file.remove()
                self._file = None
            else:
                # The source broke, or the run ends: the bytes so far are good.
                self._file.pause()
                self.broken_session = self._blob.digest
            raise
        with self._place():
            self._file.finish()
        self._file = None
        return True

    def _append(self, piece: memoryview) -> None:
        assert self._file is not None
        with self._place():
            self._file.append(piece)

    async def resume(self) -> None:
        """Open the file again, to send what follows the bytes that it has."""
        assert self._file is not None
        with self._place():
            self._file.resume()
        self.session = self.broken_session
        self.broken_session = ""
        self.offset = self._file.offset

    async def cancel_upload(self) -> None:
        """Give the upload up: nothing of it stays."""
        if self._file is not None:
            self._file.remove()
        self._file = None
        self.session = ""
