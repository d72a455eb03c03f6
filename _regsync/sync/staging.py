"""Stage blobs that several uploads need: small blobs in memory, larger blobs on disk.

Owns: the staged files, each named by its digest alone (R16); the staged bodies in memory; the
    memory for chunks that are being sent; how a body is sent from memory or from disk.
May not know: registries, HTTP.
Invariants: a file that is named by its digest is complete and has been hashed, even if other runs
    stage in the same directory. A file that a killed or failed run has left is used if it still has
    its digest. A run that succeeds leaves no file.
Follows: docs/specification.md section 1.1, docs/design.md section 6 (rule 13) and section 8.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from io import FileIO
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel

from _regsync import edge
from _regsync.crypto import DIGEST_HEX_LENGTHS, new_hash
from _regsync.errors import SyncError
from _regsync.files import (
    PARTIAL_SUFFIX,
    DiskPace,
    Stamp,
    hash_rest,
    is_link_free,
    open_safely,
    remove_if_possible,
    replacing,
    stamp_of,
)
from _regsync.net.http1 import LARGE_PIECE, PIECE, Pieces
from _regsync.oci import Descriptor, split_digest
from _regsync.text import printable, reason_of

if TYPE_CHECKING:
    from hashlib import _Hash

# The size in bytes up to which a blob may be staged in memory (docs/design.md section 6, rule 13).
SMALL_BLOB = 1024 * 1024

# Bytes of memory for staged bodies and for chunks together (the same rule).
_MEMORY_BUDGET = 48 * 1024 * 1024

# A partial file that was not written to for so many seconds is considered abandoned by a killed
# run.
_ABANDONED_SECONDS = 24 * 3600.0

# Bytes at each end of a staged file that `next` reads, even if `write_to` sends the bytes between.
# The first bytes are sent in one write with the head of the request. The last bytes are sent only
# after the file has been checked.
_READ_AT_ENDS = 64 * 1024

# The most bytes of a file that one call of sendfile may send before other tasks run.
_LONGEST_WRITE = 4 * 1024 * 1024

# The name of a staged file: the hexadecimal digest of its blob.
_STAGED_NAME = re.compile("[0-9a-f]{64,128}")

# Takes one piece of a blob. The piece is valid until the sink returns.
Sink = Callable[[memoryview], Awaitable[None]]

# Reads a whole blob from its source, verifies it, and passes each piece to a sink.
Reader = Callable[[Sink], Awaitable[None]]


class StagingFailed(SyncError):
    """The disk is full or cannot be used. No later blob of this run is staged on disk."""

    code = "CONFIG_ERROR"


class NoRoom(StagingFailed):
    """There is no room for this blob: it exceeds the limit, or too few other blobs can be removed."""


@contextlib.contextmanager
def _wrapping_disk_errors() -> Iterator[None]:
    """Raise StagingFailed in place of OSError."""
    try:
        yield
    except OSError as error:
        raise _staging_failed(error) from error


def _staging_failed(error: OSError) -> StagingFailed:
    directory = printable(str(error.filename or "the staging directory"))
    hint = "free space in global.cache_dir, or set it to another disk"
    return StagingFailed(f"blobs cannot be staged in {directory}: {reason_of(error)}", hint=hint)


class MemoryPieces(Pieces):
    """The body of a request that is in memory: the bytes of `body` from `offset`."""

    def __init__(self, body: bytes | memoryview, offset: int = 0) -> None:
        self.length = len(body) - offset
        # Whether the last piece has been returned.
        self.complete = False
        # Whether a piece has been returned.
        self._has_begun = False
        # The bytes that have not been returned yet.
        self._rest = memoryview(body)[offset:]

    async def next(self) -> memoryview:
        """Return the next piece. Returns an empty piece at the end."""
        # If the connection breaks within the first piece, the piece is sent again over another
        # connection. The first piece is small, so that few bytes are sent twice.
        size = LARGE_PIECE if self._has_begun else PIECE
        self._has_begun = True
        piece = self._rest[:size]
        self._rest = self._rest[size:]
        self.complete = not self._rest
        return piece


class FilePieces(Pieces):
    """The body of a request that is in a staged file: its bytes from `offset` to `end`.

    `complete` is set when the last piece has been returned. `is_verified` means that this run has
    hashed the file and that the file is unchanged. Any other file must be sent as a whole. It is
    hashed while it is sent, and its last piece is returned only if the digest matches (I3).
    """

    def __init__(
        self, staged: FileIO, digest: str, end: int, offset: int = 0, *, is_verified: bool
    ) -> None:
        self.length = end - offset
        self.complete = False
        self._file = staged
        # The next byte to send, and the end of the body, as offsets in the file.
        self._offset = offset
        self._end = end
        # The file's stamp when it was opened. A different stamp at the end means that it was
        # changed.
        self._stamp = stamp_of(staged.fileno())
        self._digest = digest
        # The hash of the bytes that were read. None if the file is verified.
        self._hash: _Hash | None = None
        if not is_verified:
            algorithm, _ = split_digest(digest)
            self._hash = new_hash(algorithm)
        # Whether a piece has been returned.
        self._has_begun = False
        self._disk = DiskPace()
        self._buffer = memoryview(bytearray())
        # To find out whether the system has a part of the file in memory, one byte of it is read.
        self._one_byte = memoryview(bytearray(1))

    async def next(self) -> memoryview:
        """Return the next piece. Returns an empty piece at the end.

        Raises StagingFailed if the disk cannot be read. Raises it in place of the last piece if the
        file was changed meanwhile or its digest does not match.
        """
        size = PIECE if self._has_begun else _READ_AT_ENDS
        self._has_begun = True
        piece = await self._read_piece(min(size, self._end - self._offset))
        self._offset += len(piece)
        self.complete = self._offset == self._end

        if self._hash is not None:
            self._hash.update(piece)
        has_become_shorter = not piece and not self.complete
        if self.complete or has_become_shorter:
            self._check_file()
        return piece

    async def _read_piece(self, size: int) -> memoryview:
        """Read `size` bytes at `_offset`, or fewer if the file ends before."""
        # The buffer grows only when it has to. If `write_to` sends most of the file, the pieces are
        # small.
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        room = self._buffer[:size]
        # A read from memory never waits, so without this line no other task would run.
        await anyio.lowlevel.checkpoint()
        count = self._read_now(room, self._offset)
        if count is None:
            # `_read_now` returns None for disk errors too. They are raised by this second read.
            with _wrapping_disk_errors(), self._disk.timing():
                count = await edge.current().in_thread(_read, self._file, room, self._offset)
        return room[:count]

    def _read_now(self, room: memoryview, offset: int) -> int | None:
        """Read bytes at `offset` if the system has them in memory, and return their number.

        Returns None if the read would wait for the disk, or if it fails. A staged file was just
        written, so its bytes are nearly always in memory. A worker thread for each piece would cost
        more than the read.
        """
        can_read_without_waiting = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")
        if not can_read_without_waiting or not room:
            return None
        try:
            # Linux returns the bytes that are in memory, and fails with EAGAIN instead of waiting.
            return os.preadv(self._file.fileno(), [room], offset, os.RWF_NOWAIT)
        except OSError as error:
            is_supported = error.errno != errno.EOPNOTSUPP
            if is_supported or self._disk.is_slow:
                return None

        # The file system does not support RWF_NOWAIT, for example tmpfs, which is all in memory, or
        # NFS. The last piece was read quickly, so this piece probably is too.
        try:
            with self._disk.timing():
                return _read(self._file, room, offset)
        except OSError:
            return None

    def _check_file(self) -> None:
        """Raise StagingFailed if the file was changed since it was opened, or its digest is wrong.

        The digest is compared only if the bytes were hashed while they were sent.
        """
        is_same_file = self._stamp == stamp_of(self._file.fileno())
        has_digest = self._hash is None or self._digest.endswith(self._hash.hexdigest())
        if not (is_same_file and has_digest):
            raise StagingFailed(f"{self._digest} was changed on disk after it had been verified")

    def write_to(self, socket: int) -> int:
        """Copy the next bytes from the file to a plain socket by sendfile, and return their number.

        Returns 0 if the caller has to use `next`: if the bytes have to be hashed, if they are the
        last bytes, or if they are not in the system's memory, because the event loop would wait for
        the disk. Raises StagingFailed if the file cannot be read or has become shorter, and OSError
        if the socket cannot be written to.
        """
        size = min(self._end - _READ_AT_ENDS - self._offset, _LONGEST_WRITE)
        if size < PIECE or self._hash is not None:
            return 0
        # If the first and the last byte are in memory, the bytes between usually are as well.
        for offset in (self._offset, self._offset + size - 1):
            if self._read_now(self._one_byte, offset) is None:
                return 0

        try:
            with self._disk.timing():
                count = os.sendfile(socket, self._file.fileno(), self._offset, size)
        except OSError as error:
            if error.errno != errno.EIO:
                raise  # the socket cannot be written to
            raise _staging_failed(error) from error
        if not count:
            raise StagingFailed(f"{self._digest} has become shorter on disk")
        self._offset += count
        return count

    def part(self, start: int, end: int) -> FilePieces:
        """Return the bytes from `start` to `end` as a body of their own."""
        return FilePieces(self._file, self._digest, end, start, is_verified=True)


def _read(file: FileIO, room: memoryview, offset: int) -> int:
    file.seek(offset)
    return file.readinto(room)


class _Waiter(NamedTuple):
    """A reservation that waits for memory. They are sorted by rank, then by number."""

    rank: float
    # A running number, so that among equal ranks the first one is granted first.
    number: int
    # Bytes.
    size: int
    # Set when the memory is reserved.
    granted: anyio.Event


class MemoryBudget:
    """Memory of `size` bytes for chunks that are being sent, of which `reserved` bytes are in use.

    A transfer reserves its memory before it is admitted, because no task may wait for memory while
    it holds a permit of a registry (I8).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.reserved = 0
        # A heap, lowest rank first.
        self._waiters: list[_Waiter] = []
        self._numbers = count()

    @contextlib.asynccontextmanager
    async def reserving(self, size: int, rank: float) -> AsyncIterator[None]:
        """Wait for `size` bytes, and reserve them while the block runs.

        `size` may not exceed the whole budget. Waiting reservations are granted by rank, lowest
        first.
        """
        if size == 0:
            yield
            return

        waiter = _Waiter(rank, number=next(self._numbers), size=size, granted=anyio.Event())
        heapq.heappush(self._waiters, waiter)
        self._grant()
        try:
            await waiter.granted.wait()
            yield
        finally:
            if waiter.granted.is_set():
                self.reserved -= size
            else:  # the wait was cancelled
                self._waiters.remove(waiter)
                heapq.heapify(self._waiters)
            self._grant()

    def _grant(self) -> None:
        """Grant waiting reservations in their order, until the next one does not fit."""
        while self._waiters and self.reserved + self._waiters[0].size <= self.size:
            waiter = heapq.heappop(self._waiters)
            self.reserved += waiter.size
            waiter.granted.set()


class _StagedFile(NamedTuple):
    """A file that holds a verified blob."""

    path: str
    # Bytes.
    size: int
    # The file's stamp when it was verified.
    stamp: Stamp


class Staging:
    """Blobs that are read from their source once, for several uploads.

    An upload enters `ensuring_staged`, which reads the blob from its source unless it is staged
    already. Then it sends the body that `opened` yields. Files are in `cache_dir`, or in a
    temporary directory if there is no `cache_dir`. `limit` bounds their bytes; None means no limit.
    """

    def __init__(self, cache_dir: str | None, limit: int | None = None) -> None:
        self.memory = MemoryBudget(_MEMORY_BUDGET)
        self._limit = limit
        # Removes the temporary directory.
        self._cleanup = contextlib.ExitStack()
        # The directory of the staged files. If it is empty, a temporary directory is made when a
        # file is first staged.
        self._directory = "" if cache_dir is None else os.path.join(cache_dir, "staged")
        # The folders of digest algorithms that this run has made and tidied.
        self._folders = set[str]()

        # By digest, the staged bodies in memory and the staged files. The least recently used ones
        # come first.
        self._bodies = dict[str, bytes]()
        self._files = dict[str, _StagedFile]()
        # Bytes of all bodies in memory, including bodies that are still being read.
        self._memory_size = 0
        # Bytes of all files that are still being written.
        self._incoming_size = 0
        # The first failure of the disk, after which no blob is staged on disk. None: blobs can be
        # staged on disk.
        self._disk_failure: StagingFailed | None = None
        self._disk = DiskPace()

        # By digest: the lock held while the blob is read from its source, how many uploads are
        # inside `ensuring_staged`, and how many of them have the blob's file open.
        self._pull_locks = dict[str, anyio.Lock]()
        self._users = Counter[str]()
        self._readers = Counter[str]()
        # The digests of blobs that were not sent to every target. The next run may need their
        # files.
        self._unsent = set[str]()

    @contextlib.asynccontextmanager
    async def ensuring_staged(
        self, blob: Descriptor, read: Reader, *, may_use_disk: bool = True
    ) -> AsyncIterator[None]:
        """Stage a blob in memory or on disk. A body in memory is not evicted while the block runs.

        The first upload that needs the blob reads it from its source by `read`; the others wait. A
        small blob is staged in memory if there is room, any other blob on disk. If `read` fails,
        the next upload that needs the blob reads it again. Raises NoRoom if there is no room for
        this blob, and StagingFailed if the disk accepts no blob.
        """
        digest = blob.digest
        self._users[digest] += 1
        try:
            async with self._pull_locks.setdefault(digest, anyio.Lock()):
                if digest not in self._bodies and digest not in self._files:
                    await self._pull(blob, read, may_use_disk=may_use_disk)
            try:
                yield
            except BaseException:
                self._unsent.add(digest)  # `close` leaves the file for the next run
                raise
        finally:
            self._users[digest] -= 1

    async def _pull(self, blob: Descriptor, read: Reader, *, may_use_disk: bool) -> None:
        """Read a blob from its source, into memory or into a file.

        Raises NoRoom if neither has room for the blob, and StagingFailed if the disk cannot be
        used.
        """
        is_small = blob.size <= SMALL_BLOB
        # A small blob that may be staged on disk evicts no other blob from memory.
        if is_small and self._make_room_in_memory(blob.size, may_evict=not may_use_disk):
            await self._pull_into_memory(blob, read)
        elif may_use_disk:
            await self._pull_into_file(blob, read)
        else:
            raise NoRoom("memory is full")

    @contextlib.contextmanager
    def opened(
        self, blob: Descriptor, offset: int = 0
    ) -> Iterator[MemoryPieces | FilePieces | None]:
        """Yield the body of a staged blob from byte `offset`.

        The caller must be inside `ensuring_staged`. Yields None if the blob's file has been removed
        to make room, or by another run. Then the caller has to enter `ensuring_staged` again.
        """
        digest = blob.digest
        if digest in self._bodies:
            body = self._bodies.pop(digest)
            self._bodies[digest] = body  # now it is the most recently used body
            yield MemoryPieces(body, offset)
            return

        staged = self._open_file(digest)
        if staged is None:
            yield None
            return

        # Another run in this directory may have replaced the file after this run had verified the
        # file. Then the file is hashed while it is sent. If only a part of the file is sent, its
        # digest cannot be computed from that part. The registry checks the digest of the whole
        # blob.
        is_unchanged = self._files[digest].stamp == stamp_of(staged.fileno())
        must_hash = not is_unchanged and offset == 0
        self._readers[digest] += 1
        try:
            with staged:
                yield FilePieces(staged, digest, blob.size, offset, is_verified=not must_hash)
        finally:
            self._readers[digest] -= 1

    def retain(self, blob: Descriptor, body: memoryview) -> bool:
        """Stage the verified bytes of a small blob in memory, until `release` is called.

        Returns False if there is no room in memory. Returns True if the blob is in memory now, or if
        an upload inside `ensuring_staged` stages it, perhaps on disk.
        """
        digest = blob.digest
        if digest in self._bodies or self._users[digest]:
            return True
        if not self._make_room_in_memory(blob.size, may_evict=True):
            return False
        self._memory_size += blob.size
        self._bodies[digest] = bytes(body)
        return True

    def release(self, blob: Descriptor) -> None:
        """Remove a blob from memory after `retain`, unless an upload uses it."""
        if blob.digest in self._bodies and not self._users[blob.digest]:
            self._memory_size -= len(self._bodies.pop(blob.digest))

    def make_room_for_chunks(self) -> None:
        """Evict bodies from memory to make room for the chunks that have reserved memory."""
        self._make_room_in_memory(0, may_evict=True)

    def close(
        self,
        *,
        remove_files: bool = True,
        remove_leftovers: bool = True,
        has_run_failed: bool = False,
    ) -> None:
        """Drop all staged blobs.

        With `remove_files` the staged files are removed. With `remove_leftovers` the files of
        earlier runs are removed too. If `has_run_failed`, the next run may need the blobs that were
        not sent to every target, so their files are left.
        """
        if remove_files:
            paths = {file.path for file in self._files.values()}
            if remove_leftovers:
                paths |= self._paths_of_all_runs()
            if has_run_failed:
                unsent = self._files.keys() & self._unsent
                paths -= {self._files[digest].path for digest in unsent}
            for path in paths:
                remove_if_possible(path)

        self._files.clear()
        self._bodies.clear()
        self._cleanup.close()

    # Memory.

    def _make_room_in_memory(self, size: int, *, may_evict: bool) -> bool:
        """Report whether memory has room for a body of `size` bytes.

        With `may_evict`, unused bodies are first removed until there is room, the least recently
        used first.
        """
        # Bodies and reserved chunks share one budget. `_memory_size` counts the bodies.
        most_for_staged_bodies = self.memory.size - self.memory.reserved - size
        if may_evict:
            unused = [digest for digest in self._bodies if not self._users[digest]]
            for digest in unused:
                if self._memory_size <= most_for_staged_bodies:
                    break
                self._memory_size -= len(self._bodies.pop(digest))
        return self._memory_size <= most_for_staged_bodies

    async def _pull_into_memory(self, blob: Descriptor, read: Reader) -> None:
        """Read a blob from its source into memory. The caller has checked that there is room."""
        body = bytearray()

        async def extend(piece: memoryview) -> None:
            body.extend(piece)

        self._memory_size += blob.size  # counted before the read, so that the room stays free
        try:
            await read(extend)
            self._bodies[blob.digest] = bytes(body)
        finally:
            if blob.digest not in self._bodies:
                self._memory_size -= blob.size

    # Disk.

    async def _pull_into_file(self, blob: Descriptor, read: Reader) -> None:
        """Read a blob from its source into a file, and add the file to the staged files.

        Raises NoRoom if the blob does not fit into the size limit. Raises StagingFailed if the disk
        is full or cannot be used. After a StagingFailed all later calls raise a copy of this error,
        and do not use the disk. After a NoRoom they may succeed.
        """
        if self._disk_failure is not None:
            # The failure may name the blob that failed first. The caller names its own blob.
            raise self._disk_failure.copy_without_context()
        self._make_room_on_disk(blob)

        self._incoming_size += blob.size  # counts against the limit until the file is complete
        try:
            with _wrapping_disk_errors():
                self._files[blob.digest] = await self._stage(blob, read)
        except StagingFailed as error:
            self._disk_failure = error
            raise
        finally:
            # The file is now counted by its entry in `_files`, or there is no file.
            self._incoming_size -= blob.size

    async def _stage(self, blob: Descriptor, read: Reader) -> _StagedFile:
        """Write a blob to its file, unless an earlier run has left a file with the right digest."""
        algorithm, encoded = split_digest(blob.digest)
        path = os.path.join(self._folder(algorithm), encoded)
        if _is_file(path):
            stamp = await _verify(path, blob)
            if stamp is not None:
                return _StagedFile(path, blob.size, stamp)

        with replacing(path) as descriptor, FileIO(descriptor, "w") as staged:

            async def write(piece: memoryview) -> None:
                while piece:
                    written = await self._disk.run(staged.write, piece)
                    piece = piece[written:]

            await read(write)
            stamp = stamp_of(descriptor)
        return _StagedFile(path, blob.size, stamp)

    def _folder(self, algorithm: str) -> str:
        """Return the folder for the files of a digest algorithm.

        The first call makes the folder and removes abandoned files from it.
        """
        if not self._directory:
            import tempfile  # only a run without a cache_dir needs it

            temporary = tempfile.TemporaryDirectory(prefix="regsync-", ignore_cleanup_errors=True)
            self._directory = self._cleanup.enter_context(temporary)

        folder = os.path.join(self._directory, algorithm)
        if folder not in self._folders:
            # Two calls are needed, because `makedirs` applies the mode only to the last folder.
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if not is_link_free(folder):
                raise OSError(errno.ELOOP, "a symbolic link is not followed", folder)
            _remove_abandoned(folder)
            self._folders.add(folder)
        return folder

    def _make_room_on_disk(self, blob: Descriptor) -> None:
        """Remove files until a blob fits into the size limit (docs/specification.md section 2.7).

        The least recently used files are removed first. A file is not removed while an upload has
        it open. Raises NoRoom if the blob does not fit. A blob that exceeds the whole limit never
        fits, so that no file is removed for it. Does nothing if there is no limit.
        """
        if self._limit is None:
            return
        used = self._incoming_size + sum(file.size for file in self._files.values())
        room = self._limit - used
        if blob.size <= self._limit:
            unread = [digest for digest in self._files if not self._readers[digest]]
            for digest in unread:
                if room >= blob.size:
                    break
                file = self._files.pop(digest)
                remove_if_possible(file.path)
                room += file.size
        if room < blob.size:
            raise NoRoom(f"staging_size_limit has no room for {blob.size} bytes")

    def _open_file(self, digest: str) -> FileIO | None:
        """Open a staged file, and mark it as most recently used. Returns None if it is gone."""
        file = self._files.get(digest)
        if file is None:
            return None
        with _wrapping_disk_errors():
            try:
                staged = FileIO(file.path, opener=open_safely)
            except FileNotFoundError:
                del self._files[digest]  # another run in this directory has removed it
                return None
        self._files[digest] = self._files.pop(digest)  # now it is the most recently used file
        return staged

    def _paths_of_all_runs(self) -> set[str]:
        """Return the paths of all staged files in the directory, whichever run has made them.

        Partial files are left out, because another run may be writing them.
        """
        paths = set[str]()
        if not self._directory:
            return paths
        for algorithm in DIGEST_HEX_LENGTHS:
            folder = os.path.join(self._directory, algorithm)
            if not is_link_free(folder):
                continue
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    if _STAGED_NAME.fullmatch(name):
                        paths.add(os.path.join(folder, name))
        return paths


def _is_file(path: str) -> bool:
    """Report whether a path is a regular file and not a symbolic link."""
    return os.path.isfile(path) and not os.path.islink(path)


async def _verify(path: str, blob: Descriptor) -> Stamp | None:
    """Return the stamp of a file if its digest is that of the blob.

    Otherwise the file is removed, and None is returned.
    """
    algorithm, encoded = split_digest(blob.digest)
    running = new_hash(algorithm)
    with FileIO(path, opener=open_safely) as staged:
        stamp = stamp_of(staged.fileno())
        await hash_rest(staged, running)
    if running.hexdigest() == encoded:
        return stamp
    os.unlink(path)
    return None


def _remove_abandoned(folder: str) -> None:
    """Remove partial files that were not written to for _ABANDONED_SECONDS."""
    for name in os.listdir(folder):
        if not name.endswith(PARTIAL_SUFFIX):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.lstat(path).st_mtime > _ABANDONED_SECONDS:
                remove_if_possible(path)
