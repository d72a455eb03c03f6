"""An image layout on a disk: blobs, `index.json`, how both are read and written.

Owns: which files are opened, the blobs that are being written, when they get their names, the lock.
May not know: registries, what is copied, why.
Invariants: a layout is read as a hostile directory: regular files inside of it alone, of the size
    that was asked for, no links. A blob is under its digest's name when it is whole and on the
    disk; `index.json` names what is there (I1, I11). Nothing is deleted but what was begun and is
    not whole.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from _regsync.crypto import DIGEST_HEX_LENGTHS, new_hash
from _regsync.errors import ContentError, Side, SyncError, WrongBytes
from _regsync.files import (
    PARTIAL_SUFFIX,
    SLOW_PIECE,
    WRITE_FLAGS,
    hash_rest,
    lock,
    open_safely,
    remove_if_possible,
)
from _regsync.layout.index import LARGEST_INDEX, Entry, Index, parse_index
from _regsync.layout.room import Reserved
from _regsync.oci.manifest import Descriptor, load_json
from _regsync.oci.reference import split_digest
from _regsync.text import printable, size_text

if TYPE_CHECKING:
    from hashlib import _Hash

_VERSION_FILE = "oci-layout"
_INDEX_FILE = "index.json"
_OLD_INDEX_FILE = "index.json.old"

_VERSION = b'{"imageLayoutVersion":"1.0.0"}\n'
_LARGEST_VERSION_FILE = 64 * 1024

# Others read what is carried to them.
_FOLDER_MODE = 0o755
_FILE_MODE = 0o644

# Files of a group above which the whole system is asked first to write out what it holds: to wait
# for each file by itself takes much longer.
_MANY_FILES = 32

# Seconds without a write after which a blob that is not whole is taken for a killed run's, where the
# file system has no locks.
_ABANDONED_SECONDS = 24 * 3600.0

# What to do about errors of the system.
_REMEDIES = {
    errno.EACCES: "let this user write there, or name another directory",
    errno.EFBIG: "format the device with another file system: exFAT, ext4, NTFS",
    errno.EIO: "check the device, and whether it is still there; then run again",
    errno.ENOSPC: "free space on the device, or copy to a larger one",
    errno.EROFS: "mount the device for writing, or copy to another one",
}


class LayoutError(SyncError):
    """A layout cannot be read or written."""

    @property
    def code(self) -> str:  # type: ignore[override]
        return "SOURCE_ERROR" if self.side is Side.SOURCE else "TARGET_ERROR"


class _Whole(NamedTuple):
    """A complete blob, in a file that does not have the blob's name yet."""

    path: str
    size: int


class _Group:
    """Blobs, manifests and entries of `index.json` that are brought to the disk by one commit."""

    def __init__(self) -> None:
        # By digest.
        self.blobs = dict[str, _Whole]()
        self.manifests = dict[str, bytes]()
        # Whether entries of `index.json` have changed.
        self.has_entries = False
        # Set when the commit has ended; it has failed if there is an error then.
        self.is_over = anyio.Event()
        self.error: SyncError | None = None

    def __bool__(self) -> bool:
        return bool(self.blobs or self.manifests or self.has_entries)


class _Stamp(NamedTuple):
    """The parts of a file's status that change when it is replaced."""

    inode: int
    size: int
    modified: int  # in nanoseconds


class Layout:
    """One layout, for all its repositories in a run."""

    def __init__(
        self, path: str, log: Callable[..., None], on_put: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare to use a directory; `on_put` is called when something waits for `commit`."""
        self.path = path
        self.on_put = on_put
        self.shown = printable(path)
        self._log = log

        # The entries of `index.json` and those that were put since; None before it was read.
        self._index: Index | None = None
        # The stamp and the bytes of `index.json` as it was last read or written.
        self._stamp: _Stamp | None = None
        self._bytes = b""

        # By algorithm, folders that were found to be folders.
        self._folders = dict[str, str]()

        # The open directory, while this process has its lock or its file system has no locks.
        self._lock: int | None = None
        self._is_writing = False
        # Whether a file is replaced in one step here; set when writing begins.
        self._replaces_atomically = True
        # The end of a file's name while it is written, and the time since when somebody may still be
        # writing such a file: with a lock, nobody is.
        self._suffix = PARTIAL_SUFFIX
        self._abandoned_before = math.inf
        # By digest, what an earlier run had written of a blob.
        self._leftovers = dict[str, str]()
        # The files of blobs that are not whole: of this run and of earlier ones.
        self._partials = set[str]()

        # The group to which puts are added, and the group that is being committed.
        self._group = _Group()
        self._under_way: _Group | None = None
        self._committing = anyio.Lock()
        # Why nothing is written any more.
        self._failure: SyncError | None = None
        self._reserved = Reserved()

    def __str__(self) -> str:
        return f"oci-layout:{self.path}"

    # Reading.

    def index(self, *, may_be_new: bool = False) -> Index:
        """Return what the layout names; LayoutError or ContentError where it cannot be read.

        With `may_be_new` a directory without a layout is an empty one.
        """
        if self._index is None:
            self._index = self._read_index(may_be_new=may_be_new)
        return self._index

    def size_of(self, digest: str) -> int | None:
        """Return the size of a blob or manifest, None where it is not there.

        LayoutError for anything but a regular file.
        """
        for group in self._groups():
            if digest in group.manifests:
                return len(group.manifests[digest])
            if digest in group.blobs:
                return group.blobs[digest].size
        path = self._path_of(digest)
        if path is None:
            return None
        with self.disk_errors():
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if not stat.S_ISREG(status.st_mode):
            raise LayoutError(f"{digest} is not a regular file in {self.shown}")
        return status.st_size

    def read(self, digest: str, most: int) -> bytes | None:
        """Return a blob or manifest of at most `most` bytes, not verified; None where it is not there."""
        for group in self._groups():
            if digest in group.manifests:
                return group.manifests[digest]
        size = self.size_of(digest)
        if size is None:
            return None
        if size > most:
            raise ContentError(f"{digest} has {size} bytes, more than {most}")
        with self.disk_errors(), self.open(digest, size) as stream:
            return stream.read(size) or b""

    def open(self, digest: str, size: int) -> FileIO:
        """Open a blob. WrongBytes where it has another size, LayoutError where it is not there."""
        if self.size_of(digest) is None:
            raise LayoutError(f"{self.shown} does not hold {digest}")
        paths = [group.blobs[digest].path for group in self._groups() if digest in group.blobs]
        with self.disk_errors():
            stream = self._open_first(*paths, self._path_of(digest) or "")
            status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            stream.close()
            raise WrongBytes(f"the blob has {status.st_size} bytes, its descriptor says {size}")
        return stream

    @staticmethod
    def _open_first(*paths: str) -> FileIO:
        """Open the first file that is there: one beside its place may get its name meanwhile."""
        *beside, place = paths
        for path in beside:
            with contextlib.suppress(FileNotFoundError):
                return FileIO(path, opener=open_safely)
        return FileIO(place, opener=open_safely)

    def _groups(self) -> Iterator[_Group]:
        yield self._group
        if self._under_way is not None:
            yield self._under_way

    def _path_of(self, digest: str) -> str | None:
        """Return the place of a blob; None where its folder is not there."""
        algorithm, encoded = split_digest(digest)
        folder = self._folder(algorithm)
        return None if folder is None else os.path.join(folder, encoded)

    def _place_for(self, digest: str) -> str:
        """Return the place of a blob, whose folder is made where it is not there."""
        algorithm, encoded = split_digest(digest)
        folder = self._folder(algorithm)
        if folder is None:
            folder = os.path.join(self.path, "blobs", algorithm)
            _make_folder(folder)
        return os.path.join(folder, encoded)

    def _folder(self, algorithm: str) -> str | None:
        """Return the folder of an algorithm's blobs, None where there is none; no link is followed."""
        if algorithm not in self._folders:
            blobs = os.path.join(self.path, "blobs")
            folder = os.path.join(blobs, algorithm)
            for each in (blobs, folder):
                with self.disk_errors():
                    try:
                        status = os.lstat(each)
                    except (FileNotFoundError, NotADirectoryError):
                        return None
                if not stat.S_ISDIR(status.st_mode):
                    raise LayoutError(f"{printable(each)} is not a directory")
            self._folders[algorithm] = folder
        return self._folders[algorithm]

    def _read_index(self, *, may_be_new: bool) -> Index:
        """Return what the layout names by `index.json`, or by `index.json.old` where a disk was pulled
        out. With `may_be_new`, a folder without either is a layout without images.
        """
        version = self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE)
        body = self._read_file(_INDEX_FILE, LARGEST_INDEX)
        has_index = body is not None or self._has_file(_OLD_INDEX_FILE)
        is_new = may_be_new and not has_index
        if version is None and not is_new:
            error = LayoutError(f"{self.shown} is not an image layout: it has no file oci-layout")
            error.hint = "check the path, and whether the disk is mounted"
            raise error
        if version is not None:
            _check_version(version)
        if is_new:  # a new folder, or a run was killed before its first images were there
            return Index()
        if not has_index:
            error = LayoutError(f"{self.shown} is an incomplete image layout: it has no index.json")
            error.hint = "copy the layout again, or name another directory"
            raise error

        try:
            index = parse_index(body) if body is not None else self._read_older_index()
            self._bytes = body or b""
        except ContentError as error:
            if body is None or not self._has_file(_OLD_INDEX_FILE):
                error.hint = "copy the layout again, or name another directory"
                raise
            index = self._read_older_index()
        self._stamp = self._stamp_of_index()
        return index

    def _read_older_index(self) -> Index:
        """Return what `index.json.old` names."""
        index = parse_index(self._read_file(_OLD_INDEX_FILE, LARGEST_INDEX) or b"")
        text = f"{self.shown}: index.json cannot be read, index.json.old is used instead"
        self._log("warning", "layout_index", text)
        return index

    def _read_file(self, name: str, most: int) -> bytes | None:
        """Return a file of the layout, None where it is not there."""
        path = os.path.join(self.path, name)
        with self.disk_errors():
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            if not stat.S_ISREG(status.st_mode):
                raise LayoutError(f"{printable(path)} is not a regular file")
            with FileIO(path, opener=open_safely) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size > most:
                    raise ContentError(f"{printable(path)} has {size} bytes, more than {most}")
                return stream.readall()

    def _has_file(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    def _stamp_of_index(self) -> _Stamp | None:
        try:
            status = os.stat(os.path.join(self.path, _INDEX_FILE))
        except OSError:
            return None
        return _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Raise LayoutError in place of the system's errors."""
        try:
            yield
        except OSError as error:
            place = printable(str(error.filename or self.path))
            why = printable(error.strerror or str(error))
            told = LayoutError(f"{place}: {why}")
            told.hint = _REMEDIES.get(error.errno or 0)
            raise told from error

    # Writing.

    def begin_writing(self) -> None:
        """Take the lock and make what a layout has; LayoutError where it cannot be written."""
        if self._failure is not None:
            raise self._failure.without_place()
        if self._is_writing:
            return
        with self.disk_errors():
            _make_folder(self.path)
            if self._lock is None:
                self._take_lock()
            for name in ("blobs", os.path.join("blobs", "sha256")):
                _make_folder(os.path.join(self.path, name))
            if self._index is not None and self._stamp != self._stamp_of_index():
                # Another process has written meanwhile. What was looked up before is only out of
                # date: the worst is an image that is copied again.
                self._index = None
            self.index(may_be_new=True)
            if self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE) is None:
                self._write_file(_VERSION_FILE, _VERSION)
            self._replaces_atomically = self._has_hard_links()
            self._find_leftovers()
        self._is_writing = True

    async def begin_blob(self, blob: Descriptor) -> BlobFile:
        """Return the file of a blob that is to be written, behind what an earlier run had written of
        it when it was killed: that is read and hashed first. LayoutError where there is no room.
        """
        self.begin_writing()
        begun = None
        leftover = self._leftovers.pop(blob.digest, None)
        if leftover is not None:
            with self.disk_errors():
                begun = await _open_leftover(leftover, blob)

        rest = blob.size - (begun.size if begun is not None else 0)
        room = self._room() + self._reserved.rest_of(blob.digest)
        if rest > room:
            if begun is not None:
                begun.stream.close()
            raise self._too_little_room(f"the blob needs {size_text(rest)}", room)

        if begun is None:
            with self.disk_errors():
                path = self._place_for(blob.digest) + self._suffix
                begun = _Begun(path, FileIO(_create(path), "w"), 0, None)
        return BlobFile(self, blob, begun)

    def reserve(self, sizes: Mapping[str, int]) -> Iterable[str]:
        """Keep room for the blobs and manifests of an image, and return the digests of those that are
        not here yet; LayoutError where there is too little. The caller gives them to `release`.
        """
        self.begin_writing()
        absent = {
            digest: max(size - self._size_of_leftover(digest), 0)
            for digest, size in sizes.items()
            if self.size_of(digest) != size
        }
        needed = sum(size for digest, size in absent.items() if digest not in self._reserved)
        # A new index.json is written beside the old one.
        room = self._room() - len(self._bytes)
        if needed > room:
            raise self._too_little_room(f"the image needs {size_text(needed)}", room)
        self._reserved.add(absent)
        return absent.keys()

    def release(self, digests: Iterable[str]) -> None:
        """Give back what `reserve` has kept."""
        self._reserved.remove(digests)

    def _size_of_leftover(self, digest: str) -> int:
        try:
            return os.lstat(self._leftovers[digest]).st_size
        except (KeyError, OSError):
            return 0

    def _room(self) -> int:
        """Return the bytes that are free and that nobody has reserved."""
        return self.free_bytes() - self._reserved.total

    def _too_little_room(self, needed: str, room: int) -> LayoutError:
        text = f"{self.shown} has room for {size_text(max(room, 0))}, {needed}"
        if self._reserved.total:
            others = size_text(self._reserved.total)
            text += f" ({size_text(self.free_bytes())} are free, {others} are for images under way)"
        error = LayoutError(text)
        error.hint = _REMEDIES[errno.ENOSPC]
        return error

    def free_bytes(self) -> int:
        """Return the bytes that are free on the layout's device, 0 where it cannot be reached."""
        place = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        try:
            return shutil.disk_usage(place).free
        except OSError:
            return 0

    def add_manifest(self, digest: str, body: bytes, entry: Entry | None) -> None:
        """Put a manifest; `entry` names it in `index.json`."""
        self.begin_writing()
        if self.size_of(digest) != len(body):
            self._group.manifests[digest] = body
        if entry is not None:
            self.index().put(entry)
            self._group.has_entries = True
        self.on_put()

    def add_left_out(self, digest: str, repository: str) -> None:
        """Note a blob that a manifest names and that is not in the layout, because the far side has
        it.
        """
        left_out = self.index().left_out
        if digest not in left_out:
            left_out[digest] = repository
            self._group.has_entries = True
            self.on_put()

    def has_unsafe(self) -> bool:
        """Say whether something was put that `index.json` does not name yet."""
        return bool(self._group) or self._under_way is not None

    async def wait_until_safe(self) -> None:
        """Wait until what was put is on the disk and in `index.json`; LayoutError where it failed."""
        for group in list(self._groups()):
            if group:
                await group.is_over.wait()
                if group.error is not None:
                    raise group.error.without_place()
        if self._failure is not None:
            raise self._failure.without_place()

    async def commit(self) -> None:
        """Bring what was put to the disk: blobs and manifests get their names, then `index.json` is
        replaced. An error is raised to those who wait for it.
        """
        async with self._committing:
            if not self._group:
                return
            group = self._group
            self._under_way = group
            self._group = _Group()
            try:
                if self._failure is not None:
                    raise self._failure.without_place()
                with anyio.CancelScope(shield=True):
                    body = self.index().dump() if group.has_entries else self._bytes
                    await anyio.to_thread.run_sync(self._write_group, group, body)
            except SyncError as error:
                self._fail(group, error)
            finally:
                self._under_way = None
                group.is_over.set()

    def _fail(self, group: _Group, error: SyncError) -> None:
        """Write nothing more, because memory and disk may differ now."""
        error.drop_frames()
        error.hint = (
            error.hint or "run again when the cause is removed; the layout's tags are unchanged"
        )
        self._failure = error
        group.error = error

    def close(self, *, sweep: bool = True) -> None:
        """Give back the lock of the directory; nothing more is written.

        `sweep` is for a run that has copied everything: it removes partial blobs. After any other run
        they stay, and the next run goes on with them.
        """
        # Only a process that has the lock may remove files.
        if self._is_writing and sweep:
            for path in self._partials:
                remove_if_possible(path)
            self._partials.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._is_writing = False

    def _take_lock(self) -> None:
        try:
            # Nothing is left behind on the disk by a lock of the directory itself.
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:  # Windows opens no directories
            self._go_without_lock()
            return
        try:
            lock(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            busy = LayoutError(f"another process is writing {self.shown}")
            busy.hint = "wait until it has ended, or copy to another directory"
            raise busy from error
        except OSError:
            self._go_without_lock()
        self._lock = descriptor

    def _go_without_lock(self) -> None:
        """Leave the files of another process alone that may be writing too."""
        self._abandoned_before = time.time() - _ABANDONED_SECONDS
        self._suffix = f".{os.urandom(6).hex()}{PARTIAL_SUFFIX}"
        text = f"{self.shown}: its file system has no locks: let only one process write to it"
        self._log("info", "layout_lock", text)

    def _has_hard_links(self) -> bool:
        """Say whether the file system has hard links. Those that have none (FAT) have no atomic
        replacement of files either.
        """
        link = os.path.join(self.path, f"{_VERSION_FILE}{PARTIAL_SUFFIX}")
        remove_if_possible(link)
        try:
            os.link(os.path.join(self.path, _VERSION_FILE), link)
        except OSError:
            return False
        os.unlink(link)
        return True

    def _find_leftovers(self) -> None:
        """Find what killed runs have left of blobs."""
        for algorithm, length in DIGEST_HEX_LENGTHS.items():
            folder = self._folder(algorithm)
            if folder is None:
                continue
            for name in os.listdir(folder):
                encoded, _, _ = name.partition(".")
                if not name.endswith(PARTIAL_SUFFIX) or len(encoded) != length:
                    continue
                path = os.path.join(folder, name)
                if os.lstat(path).st_mtime < self._abandoned_before:
                    self._leftovers[f"{algorithm}:{encoded}"] = path
                    self._partials.add(path)

    # In a worker thread.

    def _write_group(self, group: _Group, index: bytes) -> None:
        with self.disk_errors():
            self._check_place()
            partials = [(digest, blob.path) for digest, blob in group.blobs.items()]
            for digest, body in group.manifests.items():
                path = self._place_for(digest) + self._suffix
                with FileIO(_create(path), "w") as stream:
                    _write_all(stream, body)
                partials.append((digest, path))

            if len(partials) > _MANY_FILES and hasattr(os, "sync"):
                os.sync()
            for _, path in partials:
                _sync(path)
            for digest, path in partials:
                os.replace(path, self._place_for(digest))
            for folder in self._folders.values():
                _sync_folder(folder)
            if index != self._bytes:
                self._replace_index(index)
                self._bytes = index

    def _check_place(self) -> None:
        """Raise LayoutError where the path leads elsewhere by now: to what lies below a disk."""
        if self._lock is not None and not os.path.samestat(
            os.fstat(self._lock), os.stat(self.path)
        ):
            gone = LayoutError(f"the disk of {self.shown} was removed while it was written")
            gone.hint = _REMEDIES[errno.EIO]
            raise gone

    def _replace_index(self, index: bytes) -> None:
        path = os.path.join(self.path, _INDEX_FILE)
        if self._replaces_atomically:
            self._write_file(_INDEX_FILE, index)
            return
        partial = path + self._suffix
        with FileIO(_create(partial), "w") as stream:
            _write_all(stream, index)
        _sync(partial)
        if os.path.lexists(path):
            os.replace(path, os.path.join(self.path, _OLD_INDEX_FILE))
            _sync_folder(self.path)
        os.replace(partial, path)
        _sync_folder(self.path)

    def _write_file(self, name: str, body: bytes) -> None:
        """Replace a file of the layout, which is whole at each instant."""
        path = os.path.join(self.path, name)
        partial = path + self._suffix
        with FileIO(_create(partial), "w") as stream:
            _write_all(stream, body)
        _sync(partial)
        os.replace(partial, path)
        _sync_folder(self.path)


class _Begun(NamedTuple):
    """The file of a blob that is not whole: an earlier run's, or a new one."""

    path: str
    # Open behind its last byte.
    stream: FileIO
    # Bytes that an earlier run has written, and their hash; None for a new file.
    size: int
    hash: _Hash | None


class BlobFile:
    """A blob that is being written, beside its place.

    `offset` is how much of it there is. `hash` is that of what an earlier run has written and of what
    came behind; None where this run has begun the file, with bytes that were verified on their way.
    """

    def __init__(self, layout: Layout, blob: Descriptor, begun: _Begun) -> None:
        self.offset = begun.size
        self.hash = begun.hash
        self._layout = layout
        self._blob = blob
        self._path = begun.path
        self._stream = begun.stream
        self._is_disk_slow = False
        layout._partials.add(begun.path)
        self._reserve()
        try:
            self._check_size()
        except LayoutError:
            self.remove()
            raise

    @property
    def is_whole(self) -> bool:
        """Say whether nothing is missing: an earlier run had written all of it."""
        return self.offset == self._blob.size

    def _check_size(self) -> None:
        """Raise LayoutError where the file system has no files of the blob's size (FAT: 4 GiB)."""
        try:
            os.lseek(self._stream.fileno(), self._blob.size, os.SEEK_SET)
        except OSError as error:
            size = size_text(self._blob.size)
            text = f"the file system of {self._layout.shown} cannot store a file of {size}"
            too_large = LayoutError(text)
            too_large.hint = _REMEDIES[errno.EFBIG]
            raise too_large from error
        os.lseek(self._stream.fileno(), self.offset, os.SEEK_SET)

    def _reserve(self) -> None:
        self._layout._reserved.add({self._blob.digest: 0})
        self._set_rest()

    def _set_rest(self) -> None:
        self._layout._reserved.set_rest(self._blob.digest, self._blob.size - self.offset)

    async def write(self, piece: memoryview) -> None:
        """Write the next piece of the blob; LayoutError where the disk does not take it."""
        began = anyio.current_time()
        if self._is_disk_slow:
            await anyio.to_thread.run_sync(self.append, piece)
        else:
            self.append(piece)
        self._is_disk_slow = anyio.current_time() - began > SLOW_PIECE
        self._set_rest()

    def append(self, piece: memoryview) -> None:
        """Write the next piece of the blob, in a worker thread, as `write` does."""
        with self._layout.disk_errors():
            while piece:
                written = self._stream.write(piece)
                if self.hash is not None:
                    self.hash.update(piece[:written])
                piece = piece[written:]
                self.offset += written

    def finish(self) -> None:
        """Note that the blob is whole; it gets its name with the next group. WrongBytes where what an
        earlier run has left was not its beginning: nothing of it is left then.
        """
        _, encoded = split_digest(self._blob.digest)
        if self.hash is not None and self.hash.hexdigest() != encoded:
            self.remove()
            raise WrongBytes("what an earlier run has left of the blob is not its beginning")
        self.pause()
        self._layout._partials.discard(self._path)
        self._layout.index().left_out.pop(self._blob.digest, None)
        self._layout._group.blobs[self._blob.digest] = _Whole(self._path, self._blob.size)
        self._layout.on_put()

    def pause(self) -> None:
        """Close the file; the bytes that were written stay."""
        if not self._stream.closed:
            self._layout._reserved.remove([self._blob.digest])
            with self._layout.disk_errors():
                self._stream.close()

    def resume(self) -> None:
        """Open the file again, to write behind the bytes that it has."""
        with self._layout.disk_errors():
            self._stream = FileIO(self._path, "a", opener=open_safely)
        self._reserve()

    def remove(self) -> None:
        """Give the blob up."""
        self.pause()
        self._layout._partials.discard(self._path)
        remove_if_possible(self._path)


def _check_version(body: bytes) -> None:
    version = load_json(body, "oci-layout").get("imageLayoutVersion")
    if not isinstance(version, str) or version.partition(".")[0] != "1":
        shown = printable(str(version), 40)
        raise ContentError(f"the image layout has version {shown}, which is not supported")


async def _open_leftover(path: str, blob: Descriptor) -> _Begun | None:
    """Open and hash what is left of a blob; None where nothing is, or where the file may not be written:
    one with a second name may be outside of the layout.
    """
    algorithm, _ = split_digest(blob.digest)
    running = new_hash(algorithm)
    try:
        stream = FileIO(path, "r+", opener=open_safely)
    except OSError:
        return None  # a link, or a folder
    status = os.fstat(stream.fileno())
    with contextlib.ExitStack() as closing:
        closing.callback(stream.close)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1 and status.st_size <= blob.size:
            size = await hash_rest(stream, running)
            if size:
                closing.pop_all()
                return _Begun(path, stream, size, running)
    return None


def _make_folder(path: str) -> None:
    """Make a folder that others may read, where there is none, and bring its name to the disk. Its
    parent has to be there: else a disk is not mounted.
    """
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    with contextlib.suppress(OSError):
        os.chmod(path, _FOLDER_MODE)
    _sync_folder(os.path.dirname(path))


def _create(path: str) -> int:
    """Create a file that others may read; what was there under its name is removed."""
    remove_if_possible(path)
    descriptor = os.open(path, WRITE_FLAGS | os.O_EXCL, _FILE_MODE)
    if hasattr(os, "fchmod"):
        with contextlib.suppress(OSError):  # FAT has no modes
            os.fchmod(descriptor, _FILE_MODE)  # whatever the umask is
    return descriptor


def _write_all(stream: FileIO, body: bytes) -> None:
    rest = memoryview(body)
    while rest:
        rest = rest[stream.write(rest) :]


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: str) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
