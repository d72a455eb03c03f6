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
from _regsync.errors import ContentError, SyncError, WrongBytes
from _regsync.files import (
    PARTIAL_SUFFIX,
    DiskPace,
    Stamp,
    hash_rest,
    lock,
    open_safely,
    remove_if_possible,
    stamp_of,
)
from _regsync.layout.disk import (
    REMEDIES,
    LayoutError,
    Reserved,
    create_file,
    make_folder,
    status_of,
    sync_file,
    sync_folder,
    write_file,
)
from _regsync.layout.index import LARGEST_INDEX, Entry, Index, parse_index
from _regsync.oci.manifest import Descriptor, load_json
from _regsync.oci.reference import split_digest
from _regsync.text import printable, reason_of, size_text

if TYPE_CHECKING:
    from hashlib import _Hash

_VERSION_FILE = "oci-layout"
_INDEX_FILE = "index.json"
_OLD_INDEX_FILE = "index.json.old"

_VERSION = b'{"imageLayoutVersion":"1.0.0"}\n'
_LARGEST_VERSION_FILE = 64 * 1024

# The remedy for a layout that is damaged.
_COPY_AGAIN = "copy the layout again, or name another directory"

# Entries that one warning names.
_MOST_NAMED = 10

# Files of a group above which the whole system is asked first to write out what it holds: to wait
# for each file by itself takes much longer.
_MANY_FILES = 32

# Seconds without a write after which a blob that is not whole is taken for a killed run's, where the
# file system has no locks.
_ABANDONED_SECONDS = 24 * 3600.0


class _Whole(NamedTuple):
    """A complete blob, in a file that does not have the blob's name yet."""

    path: str
    size: int


class _Group:
    """What one commit brings to the disk."""

    def __init__(self) -> None:
        # By digest.
        self.blobs = dict[str, _Whole]()
        self.manifests = dict[str, bytes]()
        # Whether `index.json` is to be replaced.
        self.changes_index = False
        # Set when the commit has ended. It has failed if there is an error then.
        self.is_over = anyio.Event()
        self.error: SyncError | None = None

    def __bool__(self) -> bool:
        return bool(self.blobs or self.manifests or self.changes_index)


class Layout:
    """One layout, for all its repositories in a run.

    How something is put into it:

        add_blob, add_manifest   it joins the pending group, and reads as if it were in the layout
        commit                   the group's files are synced and get their names, then `index.json`
                                 is replaced; a new group is pending meanwhile
        wait_until_safe          returns when the groups with all earlier puts are on the disk
    """

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
        self._index_stamp: Stamp | None = None
        self._index_bytes = b""

        # The folder of each algorithm's blobs, once it is known to be a folder and no link.
        self._folders = dict[str, str]()

        # Whether `begin_writing` has been called: nothing below holds before that.
        self._is_writing = False
        # The open directory, which is locked where its file system has locks.
        self._locked_folder: int | None = None
        # Whether the file system replaces a file in one step.
        self._replaces_atomically = True
        # What the name of a file ends with while the file is written.
        self._suffix = PARTIAL_SUFFIX
        # A partial file that was written to later may be another process's. With a lock none is.
        self._abandoned_before = math.inf
        # By digest of a blob: the partial file that a killed run has left.
        self._leftovers = dict[str, str]()
        # All partial files of blobs, for `close` to remove: of this run and of killed ones.
        self.partials = set[str]()

        # What was put since the last commit began, and what that commit is writing.
        self._pending = _Group()
        self._in_commit: _Group | None = None
        self._committing = anyio.Lock()
        # The error of a failed commit, after which nothing is written.
        self._failure: SyncError | None = None
        self.reserved = Reserved()

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

        LayoutError for anything but a regular file: a link may lead out of the layout.
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
            status = status_of(path)
        if status is None:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise LayoutError(f"{digest} is not a regular file in {self.shown}")
        return status.st_size

    def read(self, digest: str, limit: int) -> bytes | None:
        """Return the bytes of a blob or manifest, not verified; None where it is not there.

        ContentError where it has more than `limit` bytes.
        """
        # A manifest that was put and not committed yet is in memory alone.
        for group in self._groups():
            if digest in group.manifests:
                return group.manifests[digest]

        size = self.size_of(digest)
        if size is None:
            return None
        if size > limit:
            raise ContentError(f"{digest} has {size} bytes, more than {limit}")
        with self.disk_errors(), self.open(digest, size) as stream:
            return stream.read(size) or b""  # a file never gives None

    def open(self, digest: str, size: int) -> FileIO:
        """Open a blob. WrongBytes where it has another size, LayoutError where it is not there."""
        if self.size_of(digest) is None:
            raise LayoutError(f"{self.shown} does not hold {digest}")
        with self.disk_errors():
            stream = self._open_where_it_is(digest)
            status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            stream.close()
            raise WrongBytes(f"the blob has {status.st_size} bytes, its descriptor says {size}")
        return stream

    def _open_where_it_is(self, digest: str) -> FileIO:
        """Open a blob: beside its place, where it has no name yet, or at its place."""
        # A commit, in a worker thread, may move the file between the two attempts.
        for group in self._groups():
            if digest in group.blobs:
                with contextlib.suppress(FileNotFoundError):
                    return FileIO(group.blobs[digest].path, opener=open_safely)
        return FileIO(self._path_of(digest) or "", opener=open_safely)

    def _groups(self) -> Iterator[_Group]:
        """Give what was put and may not be at its place yet."""
        yield self._pending
        if self._in_commit is not None:
            yield self._in_commit

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
            make_folder(folder)
        return os.path.join(folder, encoded)

    def _folder(self, algorithm: str) -> str | None:
        """Return the folder of an algorithm's blobs, None where there is none; no link is followed."""
        if algorithm not in self._folders:
            blobs = os.path.join(self.path, "blobs")
            folder = os.path.join(blobs, algorithm)
            for each in (blobs, folder):
                with self.disk_errors():
                    status = status_of(each)
                if status is None:
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
        has_old_index = self._has_file(_OLD_INDEX_FILE)

        # Without both: a new folder, or a run was killed before its first images were there.
        has_no_images = body is None and not has_old_index
        is_new = has_no_images and may_be_new
        if version is not None:
            _check_version(version)
        elif not is_new:
            error = LayoutError(f"{self.shown} is not an image layout: it has no file oci-layout")
            error.hint = "check the path, and whether the disk is mounted"
            raise error
        if is_new:
            return Index()
        if has_no_images:
            error = LayoutError(f"{self.shown} is an incomplete image layout: it has no index.json")
            error.hint = _COPY_AGAIN
            raise error

        try:
            index = self._parse(body, has_old_index=has_old_index)
        except ContentError as error:
            error.hint = _COPY_AGAIN
            raise
        self._index_stamp = self._stamp_of_index()
        return index

    def _parse(self, body: bytes | None, *, has_old_index: bool) -> Index:
        """Parse `index.json`; where it is missing or damaged, `index.json.old`."""
        if body is not None:
            try:
                index = parse_index(body)
            except ContentError:
                if not has_old_index:
                    raise
            else:
                self._index_bytes = body
                return index

        index = parse_index(self._read_file(_OLD_INDEX_FILE, LARGEST_INDEX) or b"")
        text = f"{self.shown}: index.json cannot be read, index.json.old is used instead"
        self._log("warning", "layout_index", text)
        return index

    def warn_of_unreadable(self, reasons: Mapping[str, str]) -> None:
        """Warn of entries without a name that may be artifacts: by digest, why they cannot be read."""
        if not reasons:
            return
        shown = ", ".join(f"{digest} ({reasons[digest]})" for digest in [*reasons][:_MOST_NAMED])
        if len(reasons) > _MOST_NAMED:
            shown += f" and {len(reasons) - _MOST_NAMED} more"
        text = f"entries without a name cannot be read, and are not copied if they are artifacts: {shown}"
        self._log("warning", "layout_entries", f"{self.shown}: {text}")

    def _read_file(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a file beside `blobs/`, None where it is not there. LayoutError for a
        link or a pipe, ContentError where it has more than `limit` bytes.
        """
        path = os.path.join(self.path, name)
        with self.disk_errors():
            status = status_of(path)
            if status is None:
                return None
            if not stat.S_ISREG(status.st_mode):
                raise LayoutError(f"{printable(path)} is not a regular file")
            with FileIO(path, opener=open_safely) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size > limit:
                    raise ContentError(f"{printable(path)} has {size} bytes, more than {limit}")
                return stream.readall()

    def _has_file(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    def _stamp_of_index(self) -> Stamp | None:
        try:
            return stamp_of(os.path.join(self.path, _INDEX_FILE))
        except OSError:
            return None

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Raise LayoutError in place of the system's errors."""
        try:
            yield
        except OSError as error:
            place = printable(str(error.filename or self.path))
            why = reason_of(error)
            told = LayoutError(f"{place}: {why}")
            told.hint = REMEDIES.get(error.errno or 0)
            raise told from error

    # Writing.

    def begin_writing(self) -> None:
        """Take the lock and make what a layout has; LayoutError where it cannot be written."""
        if self._failure is not None:
            raise self._failure.without_place()
        if self._is_writing:
            return
        with self.disk_errors():
            make_folder(self.path)
            if self._locked_folder is None:
                self._take_lock()
            for name in ("blobs", os.path.join("blobs", "sha256")):
                make_folder(os.path.join(self.path, name))
            # Before the lock was taken another process may have written. What was looked up by the old
            # index is only out of date then: at worst an image is copied again.
            if self._index is not None and self._index_stamp != self._stamp_of_index():
                self._index = None
            self.index(may_be_new=True)
            if self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE) is None:
                self._replace_file(_VERSION_FILE, _VERSION)
            self._replaces_atomically = self._has_hard_links()
            self._find_leftovers()
        self._is_writing = True

    async def begin_blob(self, blob: Descriptor) -> BlobFile:
        """Return a file to write a blob into; LayoutError where there is no room for it.

        If a killed run has left a part of the blob, that part is hashed, and writing continues behind it.
        """
        self.begin_writing()
        partial = None
        leftover = self._leftovers.pop(blob.digest, None)
        if leftover is not None:
            with self.disk_errors():
                partial = await _open_leftover(leftover, blob)

        rest = blob.size - (partial.size if partial is not None else 0)
        # `_room` leaves out what is reserved, but the part that is reserved for this blob is its own.
        room = self._room() + self.reserved.rest_of(blob.digest)
        if rest > room:
            if partial is not None:
                partial.stream.close()
            raise self._too_little_room(f"the blob needs {size_text(rest)}", room)

        if partial is None:
            with self.disk_errors():
                path = self._place_for(blob.digest) + self._suffix
                partial = _PartialFile(path, create_file(path), size=0, hash=None)
        return BlobFile(self, blob, partial)

    def reserve(self, sizes: Mapping[str, int]) -> Iterable[str]:
        """Reserve room for what the layout lacks of an image; LayoutError where there is too little.

        `sizes` are those of its blobs and manifests, by digest. Returns the digests with room, which
        the caller gives to `release` when the image has ended.
        """
        self.begin_writing()
        # What a killed run has left of a blob is on the disk already.
        absent = {
            digest: max(size - self._size_of_leftover(digest), 0)
            for digest, size in sizes.items()
            if self.size_of(digest) != size
        }
        needed = sum(size for digest, size in absent.items() if digest not in self.reserved)
        # The next index.json is written beside the present one.
        room = self._room() - len(self._index_bytes)
        if needed > room:
            raise self._too_little_room(f"the image needs {size_text(needed)}", room)
        self.reserved.add(absent)
        return absent.keys()

    def release(self, digests: Iterable[str]) -> None:
        """Give back the room of one image."""
        self.reserved.remove(digests)

    def _size_of_leftover(self, digest: str) -> int:
        try:
            return os.lstat(self._leftovers[digest]).st_size
        except (KeyError, OSError):
            return 0

    def _room(self) -> int:
        """Return the bytes that are free and that nobody has reserved."""
        return self.free_bytes() - self.reserved.total

    def _too_little_room(self, needed: str, room: int) -> LayoutError:
        text = f"{self.shown} has room for {size_text(max(room, 0))}, {needed}"
        if self.reserved.total:
            others = size_text(self.reserved.total)
            text += f" ({size_text(self.free_bytes())} are free, {others} are for images under way)"
        error = LayoutError(text)
        error.hint = REMEDIES[errno.ENOSPC]
        return error

    def free_bytes(self) -> int:
        """Return the bytes that are free on the layout's device, 0 where it cannot be reached."""
        place = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        try:
            return shutil.disk_usage(place).free
        except OSError:
            return 0

    def add_blob(self, digest: str, blob: _Whole) -> None:
        """Put a blob; the next commit gives its file the blob's name."""
        self.partials.discard(blob.path)
        self.index().left_out.pop(digest, None)
        self._pending.blobs[digest] = blob
        self.on_put()

    def add_manifest(self, digest: str, body: bytes, entry: Entry | None) -> None:
        """Put a manifest; `entry` names it in `index.json`."""
        self.begin_writing()
        if self.size_of(digest) != len(body):
            self._pending.manifests[digest] = body
        if entry is not None:
            self.index().put(entry)
            self._pending.changes_index = True
        self.on_put()

    def add_left_out(self, digest: str, repository: str) -> None:
        """Note a blob that a manifest names and that is not in the layout, because the far side has
        it.
        """
        left_out = self.index().left_out
        if digest not in left_out:
            left_out[digest] = repository
            self._pending.changes_index = True
            self.on_put()

    def has_unsafe(self) -> bool:
        """Say whether something was put that `index.json` does not name yet."""
        return bool(self._pending) or self._in_commit is not None

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
        replaced. An error is not raised here, but by `wait_until_safe`.
        """
        async with self._committing:
            if not self._pending:
                return
            group = self._pending
            self._in_commit = group
            self._pending = _Group()
            try:
                if self._failure is not None:
                    raise self._failure.without_place()
                # A signal that ends the run does not end a commit halfway.
                with anyio.CancelScope(shield=True):
                    body = self.index().dump() if group.changes_index else self._index_bytes
                    await anyio.to_thread.run_sync(self._write_group, group, body)
            except SyncError as error:
                self._fail(group, error)
            finally:
                self._in_commit = None
                group.is_over.set()

    def _fail(self, group: _Group, error: SyncError) -> None:
        """End a commit that failed. Nothing more is written, because some files of the group may have
        their names and others not.
        """
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
            for path in self.partials:
                remove_if_possible(path)
            self.partials.clear()
        if self._locked_folder is not None:
            os.close(self._locked_folder)
            self._locked_folder = None
        self._is_writing = False

    def _take_lock(self) -> None:
        """Lock the directory; LayoutError where another process has it."""
        try:
            # The directory itself is locked: a file for the lock would stay on the disk.
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
        self._locked_folder = descriptor

    def _go_without_lock(self) -> None:
        """Write files with names of our own, because another process may write the same blobs, and take
        over only what nobody has written to for a day.
        """
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
        """Find the partial files that killed runs have left."""
        for algorithm, length in DIGEST_HEX_LENGTHS.items():
            folder = self._folder(algorithm)
            if folder is None:
                continue
            for name in os.listdir(folder):
                encoded, _, _ = name.partition(".")
                is_partial = name.endswith(PARTIAL_SUFFIX) and len(encoded) == length
                if not is_partial:
                    continue
                path = os.path.join(folder, name)
                if os.lstat(path).st_mtime < self._abandoned_before:
                    self._leftovers[f"{algorithm}:{encoded}"] = path
                    self.partials.add(path)

    # In a worker thread.

    def _write_group(self, group: _Group, index: bytes) -> None:
        """Write a group, in an order that makes a power cut at any instant harmless: bytes are synced
        before a file gets its name, and that name before `index.json` names the file (I11).
        """
        with self.disk_errors():
            self._check_place()
            partials = [(digest, blob.path) for digest, blob in group.blobs.items()]
            for digest, body in group.manifests.items():
                path = self._place_for(digest) + self._suffix
                write_file(path, body)
                partials.append((digest, path))

            if len(partials) > _MANY_FILES and hasattr(os, "sync"):
                os.sync()
            for _, path in partials:
                sync_file(path)
            for digest, path in partials:
                os.replace(path, self._place_for(digest))
            for folder in self._folders.values():
                sync_folder(folder)
            if index != self._index_bytes:
                old_name = None if self._replaces_atomically else _OLD_INDEX_FILE
                self._replace_file(_INDEX_FILE, index, old_name=old_name)
                self._index_bytes = index

    def _check_place(self) -> None:
        """Raise LayoutError where the path leads to another directory than when writing began: a disk
        was removed, and the path is now the folder that it was mounted on.
        """
        if self._locked_folder is None:
            return
        locked = os.fstat(self._locked_folder)
        if not os.path.samestat(locked, os.stat(self.path)):
            gone = LayoutError(f"the disk of {self.shown} was removed while it was written")
            gone.hint = REMEDIES[errno.EIO]
            raise gone

    def _replace_file(self, name: str, body: bytes, *, old_name: str | None = None) -> None:
        """Replace a file of the layout by one that is on the disk whole.

        With `old_name` the file that was there is kept under that name. For a file system that does
        not replace in one step (FAT): at each instant one of the two names has a whole file.
        """
        path = os.path.join(self.path, name)
        partial = path + self._suffix
        write_file(partial, body)
        sync_file(partial)
        if old_name is not None and os.path.lexists(path):
            os.replace(path, os.path.join(self.path, old_name))
            sync_folder(self.path)
        os.replace(partial, path)
        sync_folder(self.path)


class _PartialFile(NamedTuple):
    """An open file of a blob that is not whole: a new one, or one that a killed run has left."""

    path: str
    # Its position is behind its last byte.
    stream: FileIO
    # Bytes of the blob that are in it.
    size: int
    # Their hash; None for a new file.
    hash: _Hash | None


class BlobFile:
    """A blob that is being written, into a file beside the blob's place.

    `offset` is how many bytes of the blob are in the file. `hash` is their hash where an earlier run
    began the file, because nobody verifies those bytes on their way. Else it is None.
    """

    def __init__(self, layout: Layout, blob: Descriptor, partial: _PartialFile) -> None:
        self.offset = partial.size
        self.hash = partial.hash
        self._layout = layout
        self._blob = blob
        self._path = partial.path
        self._stream = partial.stream
        self._disk = DiskPace()
        layout.partials.add(partial.path)
        self._reserve()
        try:
            self._check_size()
        except LayoutError:
            self.remove()
            raise

    @property
    def is_whole(self) -> bool:
        """Say whether an earlier run had written all of the blob."""
        return self.offset == self._blob.size

    def _check_size(self) -> None:
        """Raise LayoutError where the file system has no files of the blob's size (FAT: 4 GiB). A seek
        that far fails there, which shows it before the first byte is asked for.
        """
        try:
            os.lseek(self._stream.fileno(), self._blob.size, os.SEEK_SET)
        except OSError as error:
            size = size_text(self._blob.size)
            text = f"the file system of {self._layout.shown} cannot store a file of {size}"
            too_large = LayoutError(text)
            too_large.hint = REMEDIES[errno.EFBIG]
            raise too_large from error
        os.lseek(self._stream.fileno(), self.offset, os.SEEK_SET)

    def _reserve(self) -> None:
        self._layout.reserved.add({self._blob.digest: self._blob.size})
        self._set_rest()

    def _set_rest(self) -> None:
        self._layout.reserved.set_rest(self._blob.digest, self._blob.size - self.offset)

    async def write(self, piece: memoryview) -> None:
        """Write the next piece of the blob; LayoutError where the disk does not take it."""
        await self._disk.run(self.append, piece)
        self._set_rest()

    def append(self, piece: memoryview) -> None:
        """Write the next piece of the blob at once, however long that takes: for worker threads."""
        with self._layout.disk_errors():
            while piece:
                written = self._stream.write(piece)
                if self.hash is not None:
                    self.hash.update(piece[:written])
                piece = piece[written:]
                self.offset += written

    def finish(self) -> None:
        """Hand the whole blob to the layout, which gives it its name with the next commit.

        WrongBytes where what an earlier run has left was not the blob's beginning. Then the file is
        removed.
        """
        _, encoded = split_digest(self._blob.digest)
        # Bytes that this run has read are verified already.
        if self.hash is not None and self.hash.hexdigest() != encoded:
            self.remove()
            raise WrongBytes("what an earlier run has left of the blob is not its beginning")
        self.pause()
        self._layout.add_blob(self._blob.digest, _Whole(self._path, self._blob.size))

    def pause(self) -> None:
        """Close the file, and give its room back; the bytes that were written stay."""
        if not self._stream.closed:
            self._layout.reserved.remove([self._blob.digest])
            with self._layout.disk_errors():
                self._stream.close()

    def resume(self) -> None:
        """Open the file again, to write behind the bytes that it has."""
        with self._layout.disk_errors():
            self._stream = FileIO(self._path, "a", opener=open_safely)
        self._reserve()

    def remove(self) -> None:
        """Give the blob up: nothing of it stays."""
        self.pause()
        self._layout.partials.discard(self._path)
        remove_if_possible(self._path)


def _check_version(body: bytes) -> None:
    version = load_json(body, "oci-layout").get("imageLayoutVersion")
    if not isinstance(version, str) or version.partition(".")[0] != "1":
        shown = printable(str(version), 40)
        raise ContentError(f"the image layout has version {shown}, which is not supported")


async def _open_leftover(path: str, blob: Descriptor) -> _PartialFile | None:
    """Open and hash a partial file that a killed run has left; None where it is of no use."""
    algorithm, _ = split_digest(blob.digest)
    running = new_hash(algorithm)
    try:
        stream = FileIO(path, "r+", opener=open_safely)
    except OSError:
        return None  # a link, or a folder

    status = os.fstat(stream.fileno())
    # A file with a second name is not written: that name may be outside of the layout.
    has_one_name = status.st_nlink <= 1
    size = 0
    try:
        if stat.S_ISREG(status.st_mode) and has_one_name and status.st_size <= blob.size:
            size = await hash_rest(stream, running)
    finally:
        if size == 0:
            stream.close()
    return _PartialFile(path, stream, size, running) if size else None
