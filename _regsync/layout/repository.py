"""Repositories in image layouts, with the interface `registry.repository.Repository`.

Owns: which manifest a tag or digest names in a layout, how blobs are read from and written to it.
May not know: requests, which image is copied when.
Invariants: a manifest that is returned has the requested digest (I3). A manifest is accepted only if
    its blobs and children are in the layout or are known to be at the far side (I1).
Follows: docs/design.md section 13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from io import FileIO
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from _regsync.addresses import Origin
from _regsync.config import Registry
from _regsync.errors import ContentError, RegistryError, Side, SyncError, WrongBytes
from _regsync.files import DiskPace
from _regsync.layout.assumed import read_assumed
from _regsync.layout.directory import BlobFile, Layout
from _regsync.layout.disk import LayoutError
from _regsync.layout.index import Entry, Index, image_entry, unnamed_entry
from _regsync.net.wire import Pieces
from _regsync.oci import Descriptor, Manifest, check_digest, image_name, is_digest, parse_manifest
from _regsync.providers import Dialect
from _regsync.registry.limits import HostLimits, Need, Patience, Turn
from _regsync.registry.transport import Transport
from _regsync.state import RepositoryKey

if TYPE_CHECKING:
    from hashlib import _Hash

# Blobs that are read from or written to one layout at the same time.
_CONCURRENCY = 64

# The properties of a layout, in the form of the dialect of a registry.
_LAYOUT = Dialect(
    None, "docs/design.md section 13", limits=(), probe=None, listing_has_digests=True
)


class LayoutHost:
    """A registry of the configuration that is a layout. Has the interface `registry.host.Host`."""

    def __init__(
        self,
        registry: Registry,
        transport: Transport,
        on_put: Callable[[], None],
        *,
        requires_all_parts: bool,
    ) -> None:
        """Prepare a layout. No file is read or written yet.

        `on_put` is called after each addition that has to be committed. With `requires_all_parts` a
        target holds an image only if it holds all blobs and manifests of the image.
        """
        self.registry = registry
        self.layout = Layout(registry.host, transport.machine.log, on_put)
        # Must be called with the number of bytes after each write.
        self.count_sent = transport.count_sent
        self.requires_all_parts = requires_all_parts

        self.key = registry.authority
        self.origin = Origin(registry.scheme, registry.host, registry.port)

        # The fields of `registry.host.Host`. A layout is never away.
        machine = transport.machine
        reach = (self.key, Patience(), machine.chance, machine.log)
        self.limits = HostLimits(transport.gate, _CONCURRENCY, (), *reach)
        self.limits.is_away = False
        self.can_resume = True

        # The far side is the registry to which the layout will be carried. These are the blobs that
        # it is assumed to hold, so that they are left out of the layout. By digest, a repository of
        # the far side.
        self.assumed = dict[str, str]()
        # The sizes of the blobs that this run has left out, by digest.
        self.left_out_sizes = dict[str, int]()

    def assume(self, paths: Iterable[str]) -> None:
        """Read receipts that name the blobs at the far side.

        Raises ConfigError if a receipt cannot be read.
        """
        self.assumed.update(read_assumed(paths))

    def repository(self, name: str, side: Side) -> LayoutRepository:
        return LayoutRepository(self, name, side)


class LayoutRepository:
    """One repository of a layout, as the source or target of a copy."""

    # The properties of `registry.repository.Repository` that all layouts share.
    dialect = _LAYOUT
    probe_from = None
    is_local = True

    def __init__(self, host: LayoutHost, name: str, side: Side) -> None:
        self.host = host
        self.name = name
        self.api_name = name
        self.side = side
        self.key = RepositoryKey(host.key, name)
        # Names the store of blobs and manifests, which all repositories of a layout share.
        self.store_key = RepositoryKey(host.key, "")
        self._layout = host.layout

    def __str__(self) -> str:
        return f"{self.host.key}//{self.name}"

    def name_of(self, reference: str) -> str:
        """Return the name of a tag or digest in error messages."""
        return image_name(str(self), reference)

    def full_name(self, reference: str) -> str:
        """Return an image's reference at the registry from which it was copied, with the host.

        If the registry is unknown, returns `REPO:TAG` or `REPO@DIGEST`.
        """
        entry = self._find(reference)
        if entry is not None and entry.full_name:
            return entry.full_name
        return image_name(self.name, reference)

    @contextmanager
    def adding_context(self, operation: str, reference: str) -> Iterator[None]:
        """Add side, operation and reference to each SyncError that is raised in the block."""
        try:
            yield
        except SyncError as error:
            is_not_found = isinstance(error, RegistryError) and error.status == 404
            if is_not_found and error.hint is None:
                error.hint = f"check the name: `regsync tags {self}` lists what is there"
            error.add_context(self.side, operation, reference)
            raise

    def reading_needs(self, size: int) -> tuple[Need, ...]:
        return (self.host.limits.reading,)

    def writing_needs(self, size: int, *, in_chunks: bool = False) -> tuple[Need, ...]:
        return (self.host.limits.writing,)

    # Tags.

    async def list_tags(self) -> dict[str, str | None] | None:
        """Return each tag whose manifest is present, with its digest.

        Returns None if there is no such tag, because an empty repository does not exist in a
        layout.
        """
        with self.adding_context("list tags of", str(self)):
            present = dict[str, str | None]()
            for tag, digest in self._index().tags(self.name).items():
                if self._find_present(tag) is not None:
                    present[tag] = digest
            return present or None

    def _index(self) -> Index:
        # The directory of a target becomes a layout with the first write.
        return self._layout.index(may_be_new=self.side is Side.TARGET)

    def _find(self, reference: str) -> Entry | None:
        """Return the entry of a tag or digest in `index.json`. Returns None if there is none."""
        index = self._index()
        if not is_digest(reference):
            return index.find(self.name, reference)
        entries = index.entries_of(reference)
        return entries[0] if entries else None

    def _find_present(self, reference: str) -> Entry | None:
        """Return the entry of a tag or digest in `index.json`.

        Returns None if there is no entry, if its manifest is not in the layout, or, at a target
        with `requires_all_parts`, if any other part of the image is missing.
        """
        entry = self._find(reference)
        if entry is None or not self._holds(entry.descriptor):
            return None
        # Other programs find nothing without `index.json`. To write the entry again brings it back.
        if self.side is Side.TARGET and self._layout.is_rename_lost:
            return None
        # Set by `--recheck`, because the disk may have lost files.
        must_have_all_parts = self.side is Side.TARGET and self.host.requires_all_parts
        if must_have_all_parts and not self._has_all_parts_of(entry.descriptor):
            return None
        return entry

    def _has_all_parts_of(self, image: Descriptor) -> bool:
        """Report whether the layout holds all parts of an image, except blobs that are left out.

        A blob that an earlier run left out counts as missing if `assume` does not name it any more:
        the registry that gets the layout may have removed it.
        """
        manifests = [image]
        seen = {image.digest}  # the digests in `manifests`
        for descriptor in manifests:  # the list grows by the children of each index
            if not self._holds(descriptor):
                return False
            manifest = self._read_manifest(descriptor.digest, descriptor)
            for blob in manifest.blobs:
                if not self._may_leave_out(blob) and not self._holds(blob):
                    return False
            manifests += [child for child in manifest.children if child.digest not in seen]
            seen.update(child.digest for child in manifest.children)
        return True

    # Manifests.

    async def head_manifest(self, reference: str) -> str | None:
        """Return the digest of a manifest. Returns None if the manifest is not present."""
        with self.adding_context("look up", self.name_of(reference)):
            entry = self._find_present(reference)
            if entry is not None:
                return entry.descriptor.digest
            # A digest without an entry in `index.json` may be the child of an index. At a target a
            # child counts as absent, because a run may have been killed before it wrote the index.
            if self.side is Side.SOURCE and is_digest(reference):
                is_in_layout = self._layout.size_of(check_digest(reference)) is not None
                return reference if is_in_layout else None
            return None

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        """Return the manifest of a tag or digest. Its bytes are verified (I3).

        Raises RegistryError with status 404 if the manifest is not present, WrongBytes if its
        digest is wrong, and ContentError if it is invalid.
        """
        with self.adding_context("fetch manifest", self.name_of(reference)):
            entry = self._find(reference)
            if entry is not None:
                return self._read_manifest(entry.descriptor.digest, expected or entry.descriptor)
            # A digest without an entry in `index.json` may be the child of an index.
            if is_digest(reference):
                return self._read_manifest(reference, expected)
            raise RegistryError("no such tag or manifest", status=404)

    def _read_manifest(self, digest: str, expected: Descriptor | None) -> Manifest:
        body = self._layout.read_manifest(digest)
        if body is None:
            raise RegistryError("no such tag or manifest", status=404)
        return parse_manifest(body, content_type=None, digest=digest, expected=expected)

    async def put_child(self, manifest: Manifest) -> None:
        """Write a manifest without an entry in `index.json`. An index that names it follows."""
        await self._put(manifest.digest, manifest, None)

    async def put_manifest(
        self, reference: str, manifest: Manifest, *, full_name: str = ""
    ) -> None:
        """Write a manifest under a tag or digest.

        `full_name` is its reference at its source. Raises RegistryError if one of its blobs or
        children is missing (I1).
        """
        if is_digest(reference):
            entry = unnamed_entry(manifest, self.name)
        else:
            entry = image_entry(manifest, self.name, reference, full_name)
        await self._put(reference, manifest, entry)

    async def _put(self, reference: str, manifest: Manifest, entry: Entry | None) -> None:
        """Write a manifest, with an entry in `index.json` if `entry` is not None.

        Also records which of its blobs are left out because `assume` names them. Raises
        RegistryError if another blob or a child is not in the layout (I1).
        """
        with self.adding_context("write manifest", self.name_of(reference)):
            absent_blobs = [blob for blob in manifest.blobs if not self._holds(blob)]
            left_out = [blob for blob in absent_blobs if self._may_leave_out(blob)]
            missing = [blob for blob in absent_blobs if not self._may_leave_out(blob)]
            missing += [child for child in manifest.children if not self._holds(child)]
            if missing:
                # A registry answers with this error too. The copy then writes the parts again.
                text = f"{missing[0].digest}, which it names, is not there"
                error = RegistryError(text, status=404, codes=("MANIFEST_BLOB_UNKNOWN",))
                error.digests = frozenset(part.digest for part in missing)
                raise error

            self._layout.add_manifest(manifest.digest, manifest.body, entry)
            for blob in left_out:
                self._layout.add_left_out(blob.digest, self.host.assumed[blob.digest])

    def _holds(self, part: Descriptor) -> bool:
        """Report whether the layout has a blob or manifest of the right size. It is not read."""
        return self._layout.size_of(part.digest) == part.size

    async def missing_parts_of(
        self, root: Manifest, children: tuple[Manifest, ...]
    ) -> frozenset[str]:
        """Return the digests of an image's blobs and children that the layout lacks."""
        parts = [part for manifest in (root, *children) for part in manifest.dependencies]
        return frozenset(part.digest for part in parts if not self._holds(part))

    async def list_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return the referrers of a digest, in all repositories of the layout."""
        with self.adding_context("list referrers of", self.name_of(digest)):
            index = self._index()
            if not index.knows_all_subjects:
                self._read_subjects(index)
            # By the digest of the referrer, so that each is returned once.
            referrers = {
                entry.descriptor.digest: entry.referrer for entry in index.referrers(digest)
            }

            # Other tools may have written lists of referrers under fallback tags. The fallback tags
            # of several repositories may name the same list.
            lists = {entry.descriptor.digest: entry for entry in index.fallback_lists(digest)}
            for list_digest, entry in lists.items():
                referrers_list = self._read_manifest(list_digest, entry.descriptor)
                for referrer in referrers_list.children:
                    referrers.setdefault(referrer.digest, referrer)
            return tuple(referrers.values())

    def _read_subjects(self, index: Index) -> None:
        """Read the manifests of other tools' artifacts, and add their subjects to `index`.

        A manifest that cannot be read is only a warning, because it may refer to any image, and an
        error would fail all images.
        """
        # By digest, because a hostile index may have many entries for one manifest.
        entries = {entry.descriptor.digest: entry for entry in index.unnamed_entries()}
        subjects = list[tuple[Entry, str]]()
        unreadable = dict[str, str]()  # by digest, the message of the error
        for digest, entry in entries.items():
            try:
                manifest = self._read_manifest(digest, entry.descriptor)
            except SyncError as error:
                unreadable[digest] = error.message
                continue
            if manifest.subject is not None:
                subjects.append((entry, manifest.subject.digest))
        self._layout.warn_of_unreadable(unreadable)
        index.add_subjects(subjects)

    def has_unsaved(self) -> bool:
        """Report whether there are additions that are not on the disk yet."""
        return self._layout.has_unsaved()

    async def wait_until_saved(self) -> None:
        """Wait until all earlier additions are on the disk. Raises LayoutError if that failed."""
        with self.adding_context("write", str(self)):
            await self._layout.wait_until_saved()

    # Blobs.

    async def has_blob(self, blob: Descriptor, *, with_retries: bool = False) -> bool:
        """Report whether a blob need not be written, because it is present or left out.

        The size of a blob that is left out is recorded for the report.
        """
        with self.adding_context("look up blob", self.name_of(blob.digest)):
            if self._holds(blob):
                return True
            if self._may_leave_out(blob):
                self.host.left_out_sizes[blob.digest] = blob.size
                return True
            return False

    async def blob_size(self, digest: str) -> int | None:
        """Return the size of a blob. Raises RegistryError with status 404 if it is not present."""
        with self.adding_context("look up blob", self.name_of(digest)):
            size = self._layout.size_of(digest)
            if size is None:
                raise RegistryError("no such blob", status=404)
            return size

    def _may_leave_out(self, blob: Descriptor) -> bool:
        """Report whether a target may lack a blob, because `assume` names it."""
        # Configs are always written. They are recognized by their JSON type, which few layers have.
        if self.side is Side.SOURCE or blob.media_type.endswith("json"):
            return False
        return blob.digest in self.host.assumed

    def known_read_error(self, blob: Descriptor) -> SyncError | None:
        """Return the error with which reading a blob would fail, or None if it would succeed."""
        try:
            with self.adding_context("read blob", self.name_of(blob.digest)):
                self._check_present(blob)
        except SyncError as error:
            return error
        return None

    def _check_present(self, blob: Descriptor) -> None:
        """Raise an error unless the layout holds a blob. The target does not hold it either."""
        size = self._layout.size_of(blob.digest)
        if size == blob.size:
            return
        if size is not None:
            raise WrongBytes(f"the blob has {size} bytes, its descriptor says {blob.size}")
        if self.far_repository(blob.digest) is not None:
            raise LayoutError(
                "it was left out of the layout, and the target does not hold it",
                hint="run `sync --recheck` where the layout was made, without `assume` or with a newer receipt",
            )
        raise LayoutError(
            "neither the layout nor the target holds it",
            hint="make the layout again, because a part of it is lost",
        )

    def far_repository(self, digest: str) -> str | None:
        """Return a repository at the far side for a blob that was left out of the layout.

        Returns None if the blob was not left out.
        """
        return self._layout.index().left_out.get(digest)

    async def open_blob(
        self, blob: Descriptor, start: int = 0, *, is_fresh: bool = False, turn: Turn | None = None
    ) -> AbstractAsyncContextManager[_FileBody]:
        """Open a blob at byte `start`. Returns a context that yields its bytes."""
        with self.adding_context("read blob", self.name_of(blob.digest)):
            stream = self._layout.open(blob.digest, blob.size)
        stream.seek(start)
        return _FileBody(self._layout, stream)

    def begin_upload(self, blob: Descriptor) -> _BlobWriter:
        """Return an upload of a blob. No file is created yet."""
        return _BlobWriter(self, blob)


class _FileBody:
    """The bytes of a blob that is read from a layout."""

    def __init__(self, layout: Layout, stream: FileIO) -> None:
        self._layout = layout
        self._stream = stream
        # Decides whether a read is done in a worker thread.
        self._disk_pace = DiskPace()

    async def __aenter__(self) -> _FileBody:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.close()

    async def read_into(self, buffer: memoryview) -> int:
        """Read bytes into `buffer`. Returns how many were read, or 0 at the end of the blob."""
        # A read without a worker thread never waits, so other tasks would not run without this
        # line.
        await anyio.lowlevel.checkpoint()
        with self._layout.disk_errors():
            return await self._disk_pace.run(self._stream.readinto, buffer)


class _BlobWriter:
    """A blob that is written to a layout, with the interface `registry.repository.BlobUpload`.

    The session of the upload is the partial file. If a body breaks, the file keeps the bytes that
    were written, and `resume` continues after them.
    """

    def __init__(self, repository: LayoutRepository, blob: Descriptor) -> None:
        # The fields of `BlobUpload`. The blob's digest stands for the path of a session.
        self.session = ""  # not empty while the partial file waits for a body
        self.broken_session = ""  # not empty after a body broke, if `resume` can continue
        self.offset = 0  # bytes that the partial file had when it was opened last
        self.hash: _Hash | None = None  # of these bytes, if a killed run wrote some of them
        self.in_chunks = False
        self.is_start_refused = False
        self.is_mount_refused = False
        self.has_mount_failed = False
        self.has_begun = False

        self._repository = repository
        self._blob = blob
        # The partial file. None before `start`, and after the blob was finished or given up.
        self._file: BlobFile | None = None

    def _adding_context(self) -> AbstractContextManager[None]:
        reference = self._repository.name_of(self._blob.digest)
        return self._repository.adding_context("write blob", reference)

    async def start(self, mount_from: str | None = None) -> bool:
        """Open the partial file. A file of an earlier `start` is removed first.

        Returns True if no body is needed, because the layout holds the blob, or because a killed
        run has written all of it. Otherwise `offset` is the number of bytes that the file already
        has.
        """
        with self._adding_context():
            if self._repository._holds(self._blob):
                return True
            self._remove_file()
            file = await self._repository.host.layout.begin_blob(self._blob)
            if file.is_complete:
                file.finish()  # verifies the bytes that the killed run has written
                return True

        self._file = file
        self.session = self._blob.digest
        self.offset = file.offset
        self.hash = file.hash
        self.has_begun = False
        return False

    async def try_mount(self, digest: str, mount_from: str) -> bool:
        """Raise an error: only registries are asked for blobs by starting an upload (rule 11)."""
        raise ContentError("a layout is asked for a blob by its name alone")

    async def send(self, pieces: Pieces, *, is_last: bool = True, turn: Turn | None = None) -> bool:
        """Write the remaining bytes of the blob, and add the blob to the layout. Returns True.

        `pieces` must verify the bytes. If a write fails, removes the partial file and raises
        LayoutError. If `pieces` raises an error, keeps the file, so that `resume` can continue. If
        the bytes of a killed run turn out to be wrong, removes the file and raises WrongBytes.
        """
        assert self._file is not None
        self.session = ""
        self.has_begun = True
        count_sent = self._repository.host.count_sent
        try:
            while piece := await pieces.next():
                with self._adding_context():
                    await self._file.write(piece)
                count_sent(len(piece))
        except BaseException as error:
            # A source that is a layout too raises LayoutErrors, of the side SOURCE.
            has_write_failed = isinstance(error, LayoutError) and error.side is Side.TARGET
            if has_write_failed:
                self._remove_file()
            else:
                # The source failed or the run was cancelled. The bytes in the file are good.
                self._file.pause()
                self.broken_session = self._blob.digest
            raise
        with self._adding_context():
            self._file.finish()
        self._file = None
        return True

    async def resume(self) -> None:
        """Reopen the broken session, to write after the bytes that the file has."""
        assert self._file is not None
        with self._adding_context():
            self._file.resume()
        self.session = self.broken_session
        self.broken_session = ""
        self.offset = self._file.offset

    async def cancel_upload(self) -> None:
        """Remove the partial file."""
        self._remove_file()
        self.session = ""

    def _remove_file(self) -> None:
        if self._file is not None:
            self._file.remove()
            self._file = None
