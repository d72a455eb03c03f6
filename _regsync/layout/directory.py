"""An image layout on a disk: blobs, `index.json`, how both are read and written.

Owns: which files are opened, the blobs that are being written, when they get their names.
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
    open_safely,
    remove_if_possible,
    stamp_of,
)
from _regsync.layout.disk import (
    REMEDIES,
    DirectoryLock,
    LayoutError,
    Reserved,
    create_file,
    has_hard_links,
    make_folder,
    replace_file,
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
        wait_until_saved         returns when the groups with all earlier puts are on the disk
    """

    def __init__(
        self, path: str, log: Callable[..., None], on_put: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare to use a directory; `on_put` is called when something waits for `commit`."""
        self.path = path
        self._on_put = on_put
        self.shown = printable(path)
        self._log = log

        # The entries of `index.json` and those that were put since; None before it was read.
        self._index: Index | None = None
        # The stamp of `index.json` when it was read, and its bytes when it was last read or written.
        self._index_stamp: Stamp | None = None
        self._index_bytes = b""

        # The folder of each algorithm's blobs, once it is known to be a folder and no link.
        self._folders = dict[str, str]()

        # None before `begin_writing`, which also finds out what the next two say.
        self._lock: DirectoryLock | None = None
        # Whether the file system replaces a file in one step.
        self._replaces_atomically = True
        # By digest of a blob: the partial file that a killed run has left.
        self._leftovers = dict[str, str]()
        # All partial files of blobs, for `close` to remove: of this run and of killed ones.
        self.partials = set[str]()

        # What was put since the last commit began, and what that commit writes at this moment.
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
        # What this run has put may not be at its place yet.
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

        ContentError where a file has more than `limit` bytes.
        """
        # A manifest that was put and is not on the disk yet is in memory alone.
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
            stream = self._open_blob(digest)
            # Of the open file: another program may have replaced it since its size was looked up.
            status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            stream.close()
            raise WrongBytes(f"the blob has {status.st_size} bytes, its descriptor says {size}")
        return stream

    def _open_blob(self, digest: str) -> FileIO:
        """Open the file of a blob, which is under a partial name until a commit gives it its own."""
        for group in self._groups():
            if digest in group.blobs:
                # A commit, in a worker thread, may have renamed the file just now.
                with contextlib.suppress(FileNotFoundError):
                    return FileIO(group.blobs[digest].path, opener=open_safely)
        return FileIO(self._path_of(digest) or "", opener=open_safely)

    def _groups(self) -> Iterator[_Group]:
        """Give the groups that were put and whose files may not have their names yet."""
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
        """Return the folder of an algorithm's blobs, None where there is none.

        LayoutError for a link: it may lead out of the layout.
        """
        if algorithm in self._folders:
            return self._folders[algorithm]

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
        return folder

    def _read_index(self, *, may_be_new: bool) -> Index:
        """Return what `index.json` names. A directory without one is an error, or with `may_be_new` a
        layout without images.
        """
        version = self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE)
        body = self._read_file(_INDEX_FILE, LARGEST_INDEX)
        has_old_index = os.path.lexists(os.path.join(self.path, _OLD_INDEX_FILE))
        has_index = body is not None or has_old_index

        if version is not None:
            _check_version(version)
        if may_be_new and not has_index:
            # A new folder, or a run was killed before its first images were there.
            return Index()
        if version is None:
            error = LayoutError(f"{self.shown} is not an image layout: it has no file oci-layout")
            error.hint = "check the path, and whether the disk is mounted"
            raise error
        if not has_index:
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
        """Parse `body`, the bytes of `index.json`. Where there are none, or damaged ones, because the
        disk was pulled out, parse `index.json.old`.
        """
        if body is not None:
            try:
                index = parse_index(body)
                self._index_bytes = body
                return index
            except ContentError:
                if not has_old_index:
                    raise

        index = parse_index(self._read_file(_OLD_INDEX_FILE, LARGEST_INDEX) or b"")
        text = f"{self.shown}: index.json cannot be read, index.json.old is used instead"
        self._log("warning", "layout_index", text)
        return index

    def warn_of_unreadable(self, reasons: Mapping[str, str]) -> None:
        """Warn of entries that may be artifacts and cannot be read; `reasons` says why, by digest."""
        if not reasons:
            return
        named = [f"{digest} ({reason})" for digest, reason in reasons.items()][:_MOST_NAMED]
        entries = ", ".join(named)
        if len(reasons) > len(named):
            entries += f" and {len(reasons) - len(named)} more"
        text = f"entries without a name cannot be read, and are not copied if they are artifacts: {entries}"
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
            disk_error = LayoutError(f"{place}: {why}")
            disk_error.hint = REMEDIES.get(error.errno or 0)
            raise disk_error from error

    # Writing.

    def begin_writing(self) -> DirectoryLock:
        """Take the lock and make what a layout has, once; return the lock.

        LayoutError where the layout cannot be written, also because an earlier commit failed.
        """
        if self._failure is not None:
            raise self._failure.without_place()
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
            text = f"{self.shown}: its file system has no locks: let only one process write to it"
            self._log("info", "layout_lock", text)
        self._lock = lock
        return lock

    def _prepare(self, lock: DirectoryLock) -> None:
        """Make the folders and the version file of a layout, and find what killed runs have left."""
        for name in ("blobs", os.path.join("blobs", "sha256")):
            make_folder(os.path.join(self.path, name))

        # Before the lock was taken another process may have written. What was looked up by the old
        # index is only out of date then: at worst an image is copied again.
        if self._index is not None and self._index_stamp != self._stamp_of_index():
            self._index = None
        self.index(may_be_new=True)

        version_path = os.path.join(self.path, _VERSION_FILE)
        if self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE) is None:
            replace_file(version_path, _VERSION, lock.suffix)
        self._replaces_atomically = has_hard_links(version_path)

        # Without a lock a partial file may be one that another process is writing.
        latest = math.inf if lock.is_held else time.time() - _ABANDONED_SECONDS
        self._leftovers = self._find_leftovers(latest)
        self.partials.update(self._leftovers.values())

    async def begin_blob(self, blob: Descriptor) -> BlobFile:
        """Return a file to write a blob into; LayoutError where there is no room for it.

        If a killed run has left a part of the blob, that part is hashed, and writing continues behind it.
        """
        lock = self.begin_writing()
        leftover = self._leftovers.pop(blob.digest, None)
        partial = None
        if leftover is not None:
            with self.disk_errors():
                partial = await _open_leftover(leftover, blob)

        rest = blob.size
        if partial is not None:
            rest -= partial.size
        # `_room` leaves out all that is reserved, but what is reserved for this blob is there for it.
        room = self._room() + self.reserved.rest_of(blob.digest)
        if rest > room:
            if partial is not None:
                partial.stream.close()
            raise self._too_little_room(f"the blob needs {size_text(rest)}", room)

        if partial is None:
            with self.disk_errors():
                path = self._place_for(blob.digest) + lock.suffix
                partial = _PartialFile(path, create_file(path), size=0, hash=None)
        return BlobFile(self, blob, partial)

    def reserve(self, sizes: Mapping[str, int]) -> Iterable[str]:
        """Reserve room for what the layout lacks of an image; LayoutError where there is too little.

        `sizes` are those of its blobs and manifests, by digest. Returns the digests that are reserved,
        which the caller gives to `reserved.remove` when the image has ended.
        """
        self.begin_writing()
        rest_of = dict[str, int]()
        for digest, size in sizes.items():
            if self.size_of(digest) != size:
                # What a killed run has left of a blob is on the disk already.
                rest_of[digest] = max(size - self._size_of_leftover(digest), 0)

        # What another image has reserved is written once for both.
        needed = sum(rest for digest, rest in rest_of.items() if digest not in self.reserved)
        # The next index.json is written beside the present one.
        room = self._room() - len(self._index_bytes)
        if needed > room:
            raise self._too_little_room(f"the image needs {size_text(needed)}", room)
        self.reserved.add(rest_of)
        return rest_of.keys()

    def _size_of_leftover(self, digest: str) -> int:
        try:
            return os.lstat(self._leftovers[digest]).st_size
        except (KeyError, OSError):
            return 0

    def _room(self) -> int:
        """Return the bytes that are free and that nobody has reserved."""
        return self.free_bytes() - self.reserved.total

    def _too_little_room(self, what_is_needed: str, room: int) -> LayoutError:
        text = f"{self.shown} has room for {size_text(max(room, 0))}, {what_is_needed}"
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
        self._on_put()

    def add_manifest(self, digest: str, body: bytes, entry: Entry | None) -> None:
        """Put a manifest; `entry` names it in `index.json`."""
        self.begin_writing()
        # A file of another size was cut when an earlier run wrote it.
        if self.size_of(digest) != len(body):
            self._pending.manifests[digest] = body
        if entry is not None:
            self.index().put(entry)
            self._pending.changes_index = True
        self._on_put()

    def add_left_out(self, digest: str, repository: str) -> None:
        """Note a blob that is left out of the layout because a repository at the far side has it."""
        left_out = self.index().left_out
        if digest not in left_out:
            left_out[digest] = repository
            self._pending.changes_index = True
            self._on_put()

    def has_unsaved(self) -> bool:
        """Say whether something was put that `index.json` does not name yet."""
        return bool(self._pending) or self._in_commit is not None

    async def wait_until_saved(self) -> None:
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
        replaced. An error is not raised here, but by `wait_until_saved`.
        """
        async with self._committing:
            if not self._pending:
                return
            group = self._pending
            self._in_commit = group
            self._pending = _Group()
            try:
                lock = self.begin_writing()
                index = self.index().dump() if group.changes_index else self._index_bytes
                # A signal that ends the run does not end a commit halfway.
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._write_group, group, index, lock)
            except SyncError as error:
                error.drop_frames()
                if error.hint is None:
                    error.hint = (
                        "run again when the cause is removed; the layout's tags are unchanged"
                    )
                group.error = error
                # Some files of the group may have their names and others not, so nothing more is
                # written.
                self._failure = error
            finally:
                self._in_commit = None
                group.is_over.set()

    def close(self, *, sweep: bool = True) -> None:
        """Give back the lock of the directory; nothing more is written.

        `sweep` is for a run that has copied everything: it removes partial blobs. After any other run
        they stay, and the next run goes on with them.
        """
        if self._lock is None:  # without it nothing was written
            return
        if sweep:
            for path in self.partials:
                remove_if_possible(path)
            self.partials.clear()
        self._lock.release()
        self._lock = None

    def _find_leftovers(self, latest: float) -> dict[str, str]:
        """Return the partial files that killed runs have left, by digest of the blob: those that were
        last written to before the time `latest`.
        """
        leftovers = dict[str, str]()
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
                if os.lstat(path).st_mtime < latest:
                    leftovers[f"{algorithm}:{encoded}"] = path
        return leftovers

    # In a worker thread.

    def _write_group(self, group: _Group, index: bytes, lock: DirectoryLock) -> None:
        """Bring a group to the disk, and `index`, the bytes of `index.json` that name it.

        A power cut at any instant does no harm: a file is synced before it gets its name, and has its
        name before `index.json` names it (I11).
        """
        with self.disk_errors():
            lock.check_path()
            partials = [(digest, blob.path) for digest, blob in group.blobs.items()]
            for digest, body in group.manifests.items():
                path = self._place_for(digest) + lock.suffix
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
                old_path = None
                if not self._replaces_atomically:
                    old_path = os.path.join(self.path, _OLD_INDEX_FILE)
                index_path = os.path.join(self.path, _INDEX_FILE)
                replace_file(index_path, index, lock.suffix, old_path=old_path)
                self._index_bytes = index


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
        self._reserve_rest()
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

    def _reserve_rest(self) -> None:
        """Keep room on the disk for the rest of the blob, until the file is closed."""
        rest = self._blob.size - self.offset
        self._layout.reserved.add({self._blob.digest: rest})
        # An image may have reserved room for all of it.
        self._layout.reserved.set_rest(self._blob.digest, rest)

    async def write(self, piece: memoryview) -> None:
        """Write the next piece of the blob; LayoutError where the disk does not take it."""
        await self._disk.run(self.append, piece)
        self._layout.reserved.set_rest(self._blob.digest, self._blob.size - self.offset)

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
        """Hand the whole blob to the layout, which gives the file its name with the next commit.

        WrongBytes where what an earlier run has left was not the blob's beginning: the file is removed.
        """
        _, encoded = split_digest(self._blob.digest)
        # The relay has verified what this run alone wrote, and then there is no hash here.
        if self.hash is not None and self.hash.hexdigest() != encoded:
            self.remove()
            raise WrongBytes("what an earlier run has left of the blob is not its beginning")
        self.pause()
        self._layout.add_blob(self._blob.digest, _Whole(self._path, self._blob.size))

    def pause(self) -> None:
        """Close the file, and give back the room of what it lacks; the bytes in it stay."""
        if not self._stream.closed:
            self._layout.reserved.remove([self._blob.digest])
            with self._layout.disk_errors():
                self._stream.close()

    def resume(self) -> None:
        """Open the file again, to write behind the bytes that it has."""
        with self._layout.disk_errors():
            self._stream = FileIO(self._path, "a", opener=open_safely)
        self._reserve_rest()

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
    try:
        stream = FileIO(path, "r+", opener=open_safely)
    except OSError:
        return None  # a link, or a folder

    algorithm, _ = split_digest(blob.digest)
    running_hash = new_hash(algorithm)
    size = 0
    try:
        status = os.fstat(stream.fileno())
        # A file with a second name is not written: that name may be outside of the layout.
        is_only_name = status.st_nlink <= 1
        if stat.S_ISREG(status.st_mode) and is_only_name and status.st_size <= blob.size:
            size = await hash_rest(stream, running_hash)
    finally:
        if size == 0:
            stream.close()
    if size == 0:
        return None
    return _PartialFile(path, stream, size, running_hash)
