"""Read and write an image layout on a disk: blobs, manifests, and when its index is replaced.

Owns: which files of blobs are opened, the blobs that are being written, when they are renamed.
May not know: registries, which images are copied.
Invariants: a layout is read as a hostile directory: only regular files inside of it, of the expected
    size, never links. A file has the name of a blob only if it is complete and synced to the disk.
    `index.json` names only manifests whose parts are there (I1, I11). Only partial files are deleted.
Follows: OCI image-spec 1.1 image-layout.md, docs/design.md section 13.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from io import FileIO
from typing import TYPE_CHECKING, NamedTuple

import anyio

from _regsync import edge
from _regsync.crypto import DIGEST_HEX_LENGTHS, new_hash
from _regsync.errors import ContentError, SyncError, WrongBytes
from _regsync.files import (
    PARTIAL_SUFFIX,
    DiskPace,
    hash_rest,
    open_safely,
    remove_if_possible,
    sync_folder,
)
from _regsync.layout.disk import (
    REMEDIES,
    DirectoryLock,
    LayoutError,
    create_file,
    disk_errors,
    lstat_or_none,
    make_folder,
    sync_file,
    write_file,
)
from _regsync.layout.index import Entry, Index
from _regsync.layout.saved_index import SavedIndex
from _regsync.oci import Descriptor, split_digest
from _regsync.text import printable, size_text

if TYPE_CHECKING:
    from hashlib import _Hash

_LARGEST_MANIFEST = 4 * 1024 * 1024  # bytes; the limit of registries is the same

# Entries that one warning names.
_MOST_NAMED = 10

# A commit of more files than this calls os.sync first. Syncing only one by one takes much longer.
_MANY_FILES = 32

# If the file system has no locks, a partial file counts as left by a killed run after so many
# seconds without a write.
_ABANDONED_SECONDS = 24 * 3600.0


class _CompleteBlob(NamedTuple):
    """A complete blob, in a file that has not been renamed to the blob's name yet."""

    path: str
    size: int


class _Group:
    """The blobs, manifests and entries of `index.json` that one commit saves."""

    def __init__(self) -> None:
        # The blobs by their digest.
        self.blobs = dict[str, _CompleteBlob]()
        # The bytes of each manifest by its digest.
        self.manifests = dict[str, bytes]()
        # Whether `index.json` must be replaced.
        self.changes_index = False
        # Set when the commit has succeeded or failed.
        self.ended = anyio.Event()

    @property
    def is_empty(self) -> bool:
        return not (self.blobs or self.manifests or self.changes_index)


class Layout:
    """One layout, with all its repositories.

    Blobs and manifests are written in groups:

        add_blob, add_manifest   add to the pending group. From now on reads return the new content
        commit                   syncs the files of the group, renames them to their final names, then
                                 replaces `index.json`. Meanwhile a new group is pending
        wait_until_saved         waits until the groups with all earlier additions are on the disk
    """

    def __init__(
        self, path: str, log: Callable[..., None], on_put: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare to use the directory at `path`. No file is read or written yet.

        `on_put` is called after each addition to the pending group. The caller should then call
        `commit` soon.
        """
        self.path = path
        self._on_put = on_put
        self.display_path = printable(path)
        self._log = log

        self._saved_index = SavedIndex(path, log)
        # By algorithm, the path of the folder of its blobs. Only folders that are known not to be
        # links.
        self._blob_folders = dict[str, str]()

        # The lock of the directory. None until `begin_writing`, which also sets the next field.
        self._lock: DirectoryLock | None = None
        # By digest of a blob, the path of the partial file that a killed run has left.
        self._abandoned_paths = dict[str, str]()
        # The paths of all partial files of blobs, of this run and of killed runs. `close` may
        # remove them.
        self.partial_paths = set[str]()

        # The additions since the last commit began.
        self._pending_group = _Group()
        # The additions that a running commit saves. None if no commit is running.
        self._group_in_commit: _Group | None = None
        self._commit_lock = anyio.Lock()  # held during a commit
        # The error of a failed commit. If it is set, `begin_writing` raises it.
        self._commit_error: SyncError | None = None
        # The blobs that are being written. Space on the disk is promised to them.
        self.open_files = set[BlobFile]()

    # Reading.

    def index(self, *, may_be_new: bool = False) -> Index:
        """Return the entries of `index.json`, with additions that have not been saved yet.

        The file is read by the first call. With `may_be_new` a directory without a layout counts as
        an empty layout. Raises LayoutError or ContentError if the layout cannot be read.
        """
        return self._saved_index.read(may_be_new=may_be_new)

    @property
    def is_rename_lost(self) -> bool:
        """Whether `index.json` is missing until this run writes, and the new index was read."""
        return self._saved_index.is_rename_lost

    def size_of(self, digest: str) -> int | None:
        """Return the size of a blob or manifest. Returns None if the layout does not hold it.

        Raises LayoutError if its file is not a regular file, because a link may lead out of the
        layout.
        """
        # The files of unsaved additions may not have their final names yet.
        for group in self._unsaved_groups():
            if digest in group.manifests:
                return len(group.manifests[digest])
            if digest in group.blobs:
                return group.blobs[digest].size
        path = self._blob_path(digest)
        if path is None:
            return None
        with self.disk_errors():
            status = lstat_or_none(path)
        if status is None:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise LayoutError(f"{digest} is not a regular file in {self.display_path}")
        return status.st_size

    def read_manifest(self, digest: str) -> bytes | None:
        """Return the bytes of a manifest. Their digest is not verified.

        Returns None if the layout does not hold it. Raises ContentError if it is too large.
        """
        # A manifest that has not been saved yet is only in memory.
        for group in self._unsaved_groups():
            if digest in group.manifests:
                return group.manifests[digest]

        size = self.size_of(digest)
        if size is None:
            return None
        if size > _LARGEST_MANIFEST:
            raise ContentError(f"{digest} has {size} bytes, more than {_LARGEST_MANIFEST}")
        with self.disk_errors(), self.open(digest, size) as stream:
            return stream.read(size) or b""  # a blocking file never returns None

    def open(self, digest: str, size: int) -> FileIO:
        """Open a blob for reading.

        Raises LayoutError if the layout does not hold the blob, and WrongBytes if the blob has
        another size.
        """
        if self.size_of(digest) is None:
            raise LayoutError(f"{self.display_path} does not hold {digest}")
        with self.disk_errors():
            stream = self._open_blob(digest)
            # Another program may have replaced the file since `size_of`, so check the open file.
            status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            stream.close()
            raise WrongBytes(f"the blob has {status.st_size} bytes, its descriptor says {size}")
        return stream

    def _open_blob(self, digest: str) -> FileIO:
        """Open the file of a blob under its partial name or, after a commit, under its final name."""
        for group in self._unsaved_groups():
            if digest in group.blobs:
                # If a commit in a worker thread has just renamed the file, open the final name.
                with contextlib.suppress(FileNotFoundError):
                    return FileIO(group.blobs[digest].path, opener=open_safely)
        # If there is no folder, the empty path raises FileNotFoundError.
        return FileIO(self._blob_path(digest) or "", opener=open_safely)

    def _unsaved_groups(self) -> Iterator[_Group]:
        """Yield the groups whose files may not have their final names yet."""
        yield self._pending_group
        if self._group_in_commit is not None:
            yield self._group_in_commit

    def _blob_path(self, digest: str) -> str | None:
        """Return the path of a blob's file. Returns None if the folder does not exist."""
        algorithm, encoded = split_digest(digest)
        folder = self._blob_folder(algorithm)
        return None if folder is None else os.path.join(folder, encoded)

    def _blob_path_for_writing(self, digest: str) -> str:
        """Return the path of a blob's file. Creates the folder if it does not exist."""
        algorithm, encoded = split_digest(digest)
        folder = self._blob_folder(algorithm)
        if folder is None:
            folder = os.path.join(self.path, "blobs", algorithm)
            make_folder(folder)
        return os.path.join(folder, encoded)

    def _blob_folder(self, algorithm: str) -> str | None:
        """Return the folder of an algorithm's blobs. Returns None if it does not exist.

        Raises LayoutError if the folder or its parent is a link, because a link may lead out of the
        layout. Folders without links are remembered and not examined again.
        """
        if algorithm in self._blob_folders:
            return self._blob_folders[algorithm]

        blobs = os.path.join(self.path, "blobs")
        folder = os.path.join(blobs, algorithm)
        for path in (blobs, folder):
            with self.disk_errors():
                status = lstat_or_none(path)
            if status is None:
                return None
            if not stat.S_ISDIR(status.st_mode):
                raise LayoutError(f"{printable(path)} is not a directory")
        self._blob_folders[algorithm] = folder
        return folder

    def warn_of_unreadable(self, reasons: Mapping[str, str]) -> None:
        """Log a warning about entries without a name that cannot be read and may be artifacts.

        `reasons` says by digest why the entry cannot be read.
        """
        if not reasons:
            return
        entries = ", ".join(
            f"{digest} ({reason})" for digest, reason in list(reasons.items())[:_MOST_NAMED]
        )
        if len(reasons) > _MOST_NAMED:
            entries += f" and {len(reasons) - _MOST_NAMED} more"
        text = f"entries without a name cannot be read, and are not copied if they are artifacts: {entries}"
        self._log("warning", "layout_entries", f"{self.display_path}: {text}")

    def disk_errors(self) -> AbstractContextManager[None]:
        """Return a context that converts OSErrors to LayoutErrors with a hint."""
        return disk_errors(self.path)

    # Writing.

    def begin_writing(self) -> DirectoryLock:
        """Lock the directory and create the files of a layout, unless this was done before.

        Returns the lock. Raises LayoutError if the layout cannot be written, or if a commit has
        failed.
        """
        if self._commit_error is not None:
            raise self._commit_error.copy_without_context()
        if self._lock is not None:
            return self._lock
        with self.disk_errors():
            make_folder(self.path)
            lock = DirectoryLock(self.path)
            try:
                self._prepare(lock)
            except BaseException:
                lock.release()
                raise
        if not lock.is_held:
            text = f"{self.display_path}: its file system has no locks: let only one process write to it"
            self._log("info", "layout_lock", text)
        self._lock = lock
        return lock

    def _prepare(self, lock: DirectoryLock) -> None:
        """Create the folders and the version file of a layout, and read its index.

        Also find the partial files that killed runs have left.
        """
        for name in ("blobs", os.path.join("blobs", "sha256")):
            make_folder(os.path.join(self.path, name))

        self._saved_index.prepare_to_write(lock.suffix)

        # Without a lock, a partial file may belong to another running process.
        written_before = math.inf if lock.is_held else time.time() - _ABANDONED_SECONDS
        self._abandoned_paths = self._find_abandoned(written_before)
        self.partial_paths.update(self._abandoned_paths.values())

    async def begin_blob(self, blob: Descriptor) -> BlobFile:
        """Open a file to write a blob to.

        If a killed run has left the beginning of the blob, its file is hashed, and writing
        continues after it. Raises LayoutError if the disk has too little space.
        """
        lock = self.begin_writing()
        abandoned = None
        if blob.digest in self._abandoned_paths:
            # The file is tried once. If it is of no use, a new file replaces it.
            abandoned_path = self._abandoned_paths.pop(blob.digest)
            with self.disk_errors():
                abandoned = await _open_abandoned(abandoned_path, blob)

        # The partial file of a killed run already takes its space on the disk.
        remaining = blob.size - (abandoned.size if abandoned else 0)
        try:
            self._check_space(remaining)
        except LayoutError:
            if abandoned:
                abandoned.stream.close()
            raise

        if abandoned:
            return BlobFile(self, blob, abandoned)
        with self.disk_errors():
            path = self._blob_path_for_writing(blob.digest) + lock.suffix
            new = _PartialFile(path, create_file(path), size=0, hash=None)
        return BlobFile(self, blob, new)

    def _check_space(self, needed: int) -> None:
        """Raise LayoutError if the disk has too little space for so many bytes of another blob."""
        free = self.free_bytes()
        promised = sum(file.remaining for file in self.open_files)
        # The next index.json is written while the present one still exists.
        available = max(free - promised - self._saved_index.size, 0)
        if needed <= available:
            return
        text = f"{self.display_path} has room for {size_text(available)}, the blob needs {size_text(needed)}"
        if promised:
            text += f" ({size_text(free)} are free, {size_text(promised)} are for blobs under way)"
        raise LayoutError(text, hint=REMEDIES[errno.ENOSPC])

    def free_bytes(self) -> int:
        """Return the free bytes on the layout's disk, or 0 if the disk is not available."""
        # The directory may not have been created yet.
        directory = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        try:
            return shutil.disk_usage(directory).free
        except OSError:
            return 0

    def add_blob(self, digest: str, blob: _CompleteBlob) -> None:
        """Add a complete blob to the pending group. The next commit renames its file."""
        self.partial_paths.discard(blob.path)  # a complete blob is not removed by `close`
        self.index().left_out.pop(digest, None)  # an earlier run may have left the blob out
        self._pending_group.blobs[digest] = blob
        self._on_put()

    def add_manifest(self, digest: str, body: bytes, entry: Entry | None) -> None:
        """Add a manifest to the pending group. If `entry` is not None, add it to `index.json`."""
        self.begin_writing()
        # An existing file of another size is damaged. It is replaced.
        if self.size_of(digest) != len(body):
            self._pending_group.manifests[digest] = body
        if entry is not None:
            self.index().put(entry)
            self._pending_group.changes_index = True
        self._on_put()

    def add_left_out(self, digest: str, repository: str) -> None:
        """Record that a blob is left out, and the repository that holds it at the far side."""
        left_out = self.index().left_out
        if digest not in left_out:
            left_out[digest] = repository
            self._pending_group.changes_index = True
            self._on_put()

    def has_unsaved(self) -> bool:
        """Report whether there are additions that no commit has saved yet."""
        return not self._pending_group.is_empty or self._group_in_commit is not None

    async def wait_until_saved(self) -> None:
        """Wait until commits have saved all earlier additions.

        Raises the error of a failed commit.
        """
        for group in list(self._unsaved_groups()):
            if not group.is_empty:  # an empty group is never committed
                await group.ended.wait()
        if self._commit_error is not None:
            raise self._commit_error.copy_without_context()

    async def commit(self) -> None:
        """Save the pending group: rename its blobs and manifests, then replace `index.json`.

        Errors are not raised here, but by `wait_until_saved`. After an error nothing more is
        written.
        """
        async with self._commit_lock:
            if self._pending_group.is_empty:
                return
            group = self._pending_group
            self._group_in_commit = group
            self._pending_group = _Group()
            try:
                lock = self.begin_writing()
                index_bytes = self.index().dump() if group.changes_index else None
                # The shield lets the commit finish if a signal ends the run.
                with anyio.CancelScope(shield=True):
                    await edge.current().in_thread(self._write_group, group, index_bytes, lock)
            except SyncError as error:
                error.drop_frames()
                if error.hint is None:
                    error.hint = (
                        "run again when the cause is removed; the layout's tags are unchanged"
                    )
                # Only some files of the group may have been renamed. No later commit can succeed,
                # because `begin_writing` now raises this.
                self._commit_error = error
            finally:
                self._group_in_commit = None
                group.ended.set()

    def close(self, *, remove_partials: bool = True) -> None:
        """Unlock the directory. Nothing may be written afterwards.

        With `remove_partials` the partial files of blobs are removed. A run that has not copied
        everything keeps them, so that the next run can resume.
        """
        if self._lock is None:  # nothing was written
            return
        if remove_partials:
            for path in self.partial_paths:
                remove_if_possible(path)
            self.partial_paths.clear()
        self._lock.release()
        self._lock = None

    def _find_abandoned(self, written_before: float) -> dict[str, str]:
        """Return the paths of partial files that killed runs have left, by the digest of the blob.

        Only files that were last written before the time `written_before` count.
        """
        abandoned = dict[str, str]()
        for algorithm, hex_length in DIGEST_HEX_LENGTHS.items():
            folder = self._blob_folder(algorithm)
            if folder is None:
                continue
            for name in os.listdir(folder):
                # The name of a partial file is ENCODED.partial or ENCODED.RANDOM.partial.
                encoded = name.partition(".")[0]
                is_partial = name.endswith(PARTIAL_SUFFIX) and len(encoded) == hex_length
                path = os.path.join(folder, name)
                if is_partial and os.lstat(path).st_mtime < written_before:
                    abandoned[f"{algorithm}:{encoded}"] = path
        return abandoned

    # Runs in a worker thread.

    def _write_group(self, group: _Group, index_bytes: bytes | None, lock: DirectoryLock) -> None:
        """Write a group to the disk, then replace `index.json` unless `index_bytes` is None.

        The order keeps the layout intact if the power is cut: a file is synced before it is
        renamed, and renamed before `index.json` names it (I11).
        """
        with self.disk_errors():
            partials = [(digest, blob.path) for digest, blob in group.blobs.items()]
            for digest, body in group.manifests.items():
                path = self._blob_path_for_writing(digest) + lock.suffix
                write_file(path, body)
                partials.append((digest, path))

            if len(partials) > _MANY_FILES and hasattr(os, "sync"):
                os.sync()  # so that `sync_file` takes less time for each file
            for _, path in partials:
                sync_file(path)
            for digest, path in partials:
                os.replace(path, self._blob_path_for_writing(digest))
            # All folders, because an earlier run may have been killed after it had renamed files there,
            # which this run has found in their places.
            for folder in self._blob_folders.values():
                sync_folder(folder)
            if index_bytes is not None:
                self._saved_index.replace(index_bytes, lock.suffix)


class _PartialFile(NamedTuple):
    """An open partial file of a blob. It is new, or a killed run has left it."""

    path: str
    # Positioned at the end of the file.
    stream: FileIO
    # The bytes of the blob that are in the file.
    size: int
    # The hash of these bytes. None for a new file.
    hash: _Hash | None


class BlobFile:
    """A blob that is being written to a partial file in the folder of its final file."""

    def __init__(self, layout: Layout, blob: Descriptor, partial: _PartialFile) -> None:
        self.offset = partial.size  # bytes of the blob that are in the file
        # The hash of these bytes if a killed run wrote the first of them: `finish` compares it.
        # None for a new file, because the caller verifies the bytes that it writes.
        self.hash = partial.hash
        self._layout = layout
        self._blob = blob
        self._path = partial.path
        self._stream = partial.stream
        # Decides whether a write is done in a worker thread.
        self._disk_pace = DiskPace()
        layout.partial_paths.add(partial.path)  # for `Layout.close`
        layout.open_files.add(self)

    @property
    def is_complete(self) -> bool:
        """Report whether the file has all bytes of the blob. They may not be verified yet."""
        return self.offset == self._blob.size

    @property
    def remaining(self) -> int:
        """The bytes of the blob that are still to be written."""
        return self._blob.size - self.offset

    async def write(self, piece: memoryview) -> None:
        """Append the next piece of the blob. Raises LayoutError if the write fails."""
        await self._disk_pace.run(self.append, piece)

    def append(self, piece: memoryview) -> None:
        """Append the next piece of the blob. Blocks until it is written, for worker threads."""
        with self._layout.disk_errors():
            while piece:
                written = self._stream.write(piece)
                if self.hash is not None:
                    self.hash.update(piece[:written])
                piece = piece[written:]
                self.offset += written

    def finish(self) -> None:
        """Close the file and add the complete blob to the layout.

        Removes the file and raises WrongBytes if the digest does not match. This happens if the
        bytes that a killed run left were not the beginning of the blob.
        """
        _, wanted_hash = split_digest(self._blob.digest)
        # If `hash` is None, this run wrote the whole file, and the caller has verified the bytes.
        if self.hash is not None and self.hash.hexdigest() != wanted_hash:
            self.remove()
            raise WrongBytes("what an earlier run has left of the blob is not its beginning")
        self.pause()
        self._layout.add_blob(self._blob.digest, _CompleteBlob(self._path, self._blob.size))

    def pause(self) -> None:
        """Close the file, to which no disk space is promised then. The bytes in the file stay."""
        self._layout.open_files.discard(self)
        if not self._stream.closed:
            with self._layout.disk_errors():
                self._stream.close()

    def resume(self) -> None:
        """Reopen the file after `pause`, to append the remaining bytes."""
        with self._layout.disk_errors():
            self._stream = FileIO(self._path, "a", opener=open_safely)
        self._layout.open_files.add(self)

    def remove(self) -> None:
        """Close and delete the file."""
        self.pause()
        self._layout.partial_paths.discard(self._path)
        remove_if_possible(self._path)


async def _open_abandoned(path: str, blob: Descriptor) -> _PartialFile | None:
    """Open and hash a partial file that a killed run has left.

    Returns None if the file is empty, too long, or must not be written.
    """
    try:
        stream = FileIO(path, "r+", opener=open_safely)
    except OSError:
        return None  # a link, a folder, or not permitted

    algorithm, _ = split_digest(blob.digest)
    running_hash = new_hash(algorithm)
    size = 0  # the bytes that were hashed
    try:
        status = os.fstat(stream.fileno())
        # A hard link to the file may be outside of the layout, so the file must not be written.
        is_only_name = status.st_nlink <= 1
        if stat.S_ISREG(status.st_mode) and is_only_name and status.st_size <= blob.size:
            size = await hash_rest(stream, running_hash)
    finally:
        if size == 0:
            stream.close()
    return _PartialFile(path, stream, size=size, hash=running_hash) if size else None
