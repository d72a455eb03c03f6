"""Keep blobs that several places need: small ones in memory, the others on disk.

Owns: the staged files, each named by its digest alone (R16); the bodies in memory; the memory for
    chunks on their way; how a body is sent from memory or from disk.
May not know: registries, HTTP.
Invariants: a file under its digest's name has been hashed and is whole, even where other runs stage
    in the same directory. A file that a killed or failed run left is used if it still has its
    digest. A run that ends well leaves nothing.
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

import anyio.lowlevel
import anyio.to_thread

from _regsync.crypto import DIGEST_HEX_LENGTHS, new_hash
from _regsync.errors import SyncError
from _regsync.files import (
    PARTIAL_SUFFIX,
    DiskPace,
    Stamp,
    hash_rest,
    is_own_folder,
    open_safely,
    remove_if_possible,
    replacing,
    stamp_of,
)
from _regsync.net.http1 import LARGE_PIECE, PIECE, Pieces
from _regsync.oci.manifest import Descriptor
from _regsync.oci.reference import split_digest
from _regsync.text import printable, reason_of

if TYPE_CHECKING:
    from hashlib import _Hash

# Bytes up to which a blob is kept in memory (docs/design.md section 6, rule 13).
SMALL_BLOB = 1024 * 1024

# Bytes for bodies in memory and chunks together (the same rule).
_MEMORY_BUDGET = 48 * 1024 * 1024

# Seconds without a write after which a partial file is taken for a killed run's.
_ABANDONED_SECONDS = 24 * 3600.0

# Bytes at each end of a staged file that `next` reads, even where `write_to` sends the rest. The first
# ones leave in one write with the head of the request. The last ones leave only when the file has been
# checked.
_READ_AT_ENDS = 64 * 1024

# Bytes of a file that the system is asked to send before other tasks have their turn.
_LONGEST_WRITE = 4 * 1024 * 1024

_STAGED_NAME = re.compile("[0-9a-f]{64,128}")

# Reads a blob from its source to the end, verified, and hands each piece to a sink. A piece is
# valid until the sink returns.
Sink = Callable[[memoryview], Awaitable[None]]
Reader = Callable[[Sink], Awaitable[None]]


class StagingFailed(SyncError):
    """The disk is full or cannot be used; no further blob is tried in this run."""

    code = "CONFIG_ERROR"


class NoRoom(StagingFailed):
    """There is no room for this blob: it is larger than the limit, or nothing can make way for it."""


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise StagingFailed in place of the system's errors."""
    try:
        yield
    except OSError as error:
        place = printable(str(error.filename or "the staging directory"))
        why = reason_of(error)
        hint = "free space in global.cache_dir, or set it to another disk"
        raise StagingFailed(f"blobs cannot be staged in {place}: {why}", hint=hint) from error


class MemoryPieces(Pieces):
    """The body of a request, from memory: `body` from `offset` on.

    `complete`: its last piece has been given.
    """

    def __init__(self, body: bytes | memoryview, offset: int = 0) -> None:
        self.length = len(body) - offset
        self.complete = False
        self._has_begun = False
        self._body = memoryview(body)
        self._rest = self._body[offset:]

    async def next(self) -> memoryview:
        """Return the next piece; empty at the end."""
        # A connection that breaks within the first piece is replaced, and the piece is sent again:
        # it is kept small, so that few bytes are sent twice.
        size = LARGE_PIECE if self._has_begun else PIECE
        self._has_begun = True
        piece = self._rest[:size]
        self._rest = self._rest[size:]
        self.complete = not self._rest
        return piece

    def part(self, start: int, end: int) -> MemoryPieces:
        """Return a part of the body as one of its own."""
        return MemoryPieces(self._body[:end], start)


class FilePieces(Pieces):
    """The body of a request, from a staged file: its bytes from `offset` to `end`.

    `complete`: its last piece has been given. `is_verified`: this very file has been hashed before.
    Any other file is sent as a whole, and hashed on its way: its last piece leaves only when the digest
    is right (I3).
    """

    def __init__(
        self, staged: FileIO, digest: str, end: int, offset: int = 0, *, is_verified: bool
    ) -> None:
        self.length = end - offset
        self.complete = False
        self._file = staged
        self._offset = offset
        self._end = end
        self._stamp = stamp_of(staged.fileno())
        self._digest = digest
        self._hash: _Hash | None = None
        if not is_verified:
            algorithm, _ = split_digest(digest)
            self._hash = new_hash(algorithm)
        self._has_begun = False  # a piece has been given
        self._disk = DiskPace()
        self._buffer = memoryview(bytearray())
        # Takes a byte that is read to see whether the system has it in memory.
        self._probe = memoryview(bytearray(1))

    async def next(self) -> memoryview:
        """Return the next piece; empty at the end.

        Raises StagingFailed when the disk cannot be read, and in place of the last piece when the
        file was changed meanwhile or does not have its digest.
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
        """Read `size` bytes from where the body stands; fewer where the file ends before."""
        # The buffer grows only when it has to: where `write_to` sends the rest, the pieces are small.
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        room = self._buffer[:size]
        # A read from memory waits for nothing: without this no other task would run.
        await anyio.lowlevel.checkpoint()
        count = self._read_now(room, self._offset)
        if count is None:
            # A broken disk is met here: `_read_now` returns None for its errors too.
            with _disk_errors(), self._disk.timing():
                count = await anyio.to_thread.run_sync(_read, self._file, room, self._offset)
        return room[:count]

    def _read_now(self, room: memoryview, offset: int) -> int | None:
        """Read bytes that the system has in memory; None where it would wait for the disk, or fails.

        A staged file was just written, so that its bytes are nearly always in memory; a worker thread
        for each piece would cost more than the reading.
        """
        if not (hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")) or not room:
            return None
        try:
            # Linux gives what it has in memory, and EAGAIN instead of waiting for the disk.
            return os.preadv(self._file.fileno(), [room], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or self._disk.is_slow:
                return None

        # The file system cannot tell: tmpfs, which has all in memory, or NFS. The last piece was quick,
        # so this one probably is too.
        try:
            with self._disk.timing():
                return _read(self._file, room, offset)
        except OSError:
            return None

    def _check_file(self) -> None:
        """Raise StagingFailed if the file was written to since it was opened, or if the bytes that were
        hashed on their way have another digest.
        """
        is_same_file = self._stamp == stamp_of(self._file.fileno())
        has_digest = self._hash is None or self._digest.endswith(self._hash.hexdigest())
        if not (is_same_file and has_digest):
            raise StagingFailed(f"{self._digest} was changed on disk after it had been verified")

    def write_to(self, socket: int) -> int:
        """Have the system copy the next bytes from the file to a plain socket; return how many.

        Returns 0 where the caller has to use `next`: when the bytes have to be hashed, when they are
        the last ones, and when they are not in the system's memory, because the event loop would
        wait for the disk. Raises StagingFailed when the file cannot be read or has become shorter,
        OSError as sending does.
        """
        size = min(self._end - _READ_AT_ENDS - self._offset, _LONGEST_WRITE)
        if size < PIECE or self._hash is not None:
            return 0
        # If the first and the last byte are in memory, so are those between, as a rule.
        for offset in (self._offset, self._offset + size - 1):
            if self._read_now(self._probe, offset) is None:
                return 0

        try:
            with self._disk.timing():
                count = os.sendfile(socket, self._file.fileno(), self._offset, size)
        except OSError as error:
            is_of_disk = error.errno == errno.EIO
            if not is_of_disk:
                raise  # the socket cannot be written to
            with _disk_errors():
                raise
        if not count:
            raise StagingFailed(f"{self._digest} has become shorter on disk")
        self._offset += count
        return count

    def part(self, start: int, end: int) -> FilePieces:
        """Return a part of the file as a body of its own, which can be asked for again."""
        return FilePieces(self._file, self._digest, end, start, is_verified=True)


def _read(file: FileIO, room: memoryview, offset: int) -> int:
    file.seek(offset)
    return file.readinto(room)


class _Waiter(NamedTuple):
    """Somebody who waits for memory; the lowest rank goes first, then who came first."""

    rank: float
    number: int
    size: int
    is_served: anyio.Event


class MemoryBudget:
    """Memory of `size` bytes for chunks on their way, of which `reserved` are taken.

    A transfer reserves its memory before it is admitted: nobody may wait for memory with a permit
    of a registry in hand (I8).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.reserved = 0
        self._waiters: list[_Waiter] = []
        self._numbers = count()

    @contextlib.asynccontextmanager
    async def reserving(self, size: int, rank: float) -> AsyncIterator[None]:
        """Hold `size` bytes, no more than the whole budget; who has the lowest rank gets them first."""
        if size == 0:
            yield
            return

        waiter = _Waiter(rank, next(self._numbers), size, anyio.Event())
        heapq.heappush(self._waiters, waiter)
        self._serve()
        try:
            await waiter.is_served.wait()
            yield
        finally:
            if waiter.is_served.is_set():
                self.reserved -= size
            else:  # the wait was cancelled
                self._waiters.remove(waiter)
                heapq.heapify(self._waiters)
            self._serve()

    def _serve(self) -> None:
        """Serve those who wait, in their order, as far as there is room."""
        while self._waiters and self.reserved + self._waiters[0].size <= self.size:
            waiter = heapq.heappop(self._waiters)
            self.reserved += waiter.size
            waiter.is_served.set()


class _StagedFile(NamedTuple):
    path: str
    size: int
    stamp: Stamp  # when it was verified


class Staging:
    """Blobs that are read from their source once, for all who need them.

    Whoever needs a blob enters `keeping`, which reads the blob from its source if it is not there yet,
    and sends the body that `opened` gives. Files are in `cache_dir`, or in a temporary directory
    without one; `limit` bounds their bytes.
    """

    def __init__(self, cache_dir: str | None, limit: int | None = None) -> None:
        self.memory = MemoryBudget(_MEMORY_BUDGET)
        self._limit = limit
        self._cleanup = contextlib.ExitStack()
        # Empty: a temporary directory is made when it is first needed.
        self._directory = "" if cache_dir is None else os.path.join(cache_dir, "staged")
        self._folders = set[str]()

        # By digest, in the order of their last use.
        self._memory = dict[str, bytes]()
        self._files = dict[str, _StagedFile]()
        self._memory_size = 0  # of bodies in memory, those that are being read from a source too
        self._incoming_size = 0  # of files that are being written
        self._failed: StagingFailed | None = None  # the disk takes no blob any more
        self._disk = DiskPace()

        # By digest: who reads the blob from its source now; how many are inside of `keeping`; and how
        # many of those have its file open.
        self._pulling = dict[str, anyio.Lock]()
        self._users = Counter[str]()
        self._readers = Counter[str]()
        # The digests of blobs that somebody failed to send: the next run may try again.
        self._unsent = set[str]()

    @contextlib.asynccontextmanager
    async def keeping(
        self, blob: Descriptor, read: Reader, *, disk: bool = True
    ) -> AsyncIterator[None]:
        """Have a blob in memory or on disk while the block runs; a body in memory stays that long.

        The first who needs it reads its source by `read`, the others wait. A small blob goes to memory
        while there is room, any other to disk if `disk` allows. A failed read is raised here only: the
        next one who needs the blob reads again. Raises NoRoom when this blob has no place,
        StagingFailed when the disk takes no blob at all.
        """
        digest = blob.digest
        self._users[digest] += 1
        try:
            async with self._pulling.setdefault(digest, anyio.Lock()):
                if digest not in self._memory and digest not in self._files:
                    await self._pull(blob, read, disk)
            try:
                yield
            except BaseException:
                self._unsent.add(digest)  # `close` leaves its file to the next run
                raise
        finally:
            self._users[digest] -= 1

    async def _pull(self, blob: Descriptor, read: Reader, disk: bool) -> None:
        """Read a blob from its source, into memory or to disk."""
        is_small = blob.size <= SMALL_BLOB
        # A small blob that can go to disk evicts nothing from memory.
        if is_small and self._make_room_in_memory(blob.size, evict=not disk):
            await self._pull_into_memory(blob, read)
        elif disk:
            await self._pull_into_file(blob, read)
        else:
            raise NoRoom("memory is full")

    @contextlib.contextmanager
    def opened(
        self, blob: Descriptor, offset: int = 0
    ) -> Iterator[MemoryPieces | FilePieces | None]:
        """Give the body of a blob from `offset` on, inside of `keeping`.

        Gives None when its file had to make way, or another run has removed it: `keeping` brings it
        back.
        """
        digest = blob.digest
        if digest in self._memory:
            body = self._memory.pop(digest)
            self._memory[digest] = body  # now it is the last one used
            yield MemoryPieces(body, offset)
            return

        staged = self._open_file(digest)
        if staged is None:
            yield None
            return

        # Another run in this directory may have replaced the file by its own: then it is hashed on its
        # way. A part of it cannot be; the registry checks the digest of the whole.
        is_same_file = self._files[digest].stamp == stamp_of(staged.fileno())
        is_verified = is_same_file or offset > 0
        self._readers[digest] += 1
        try:
            with staged:
                yield FilePieces(staged, digest, blob.size, offset, is_verified=is_verified)
        finally:
            self._readers[digest] -= 1

    def retain(self, blob: Descriptor, body: memoryview) -> bool:
        """Keep a small blob's verified bytes in memory for one who has yet to send them; `release` ends
        that. False where there is no room.
        """
        digest = blob.digest
        if digest in self._memory or self._users[digest]:
            return True  # whoever is inside of `keeping` has the bytes, or is about to
        if blob.size > SMALL_BLOB or not self._make_room_in_memory(blob.size, evict=True):
            return False
        self._memory_size += blob.size
        self._memory[digest] = bytes(body)
        return True

    def release(self, blob: Descriptor) -> None:
        """Drop what `retain` has kept, unless somebody uses it."""
        if blob.digest in self._memory and not self._users[blob.digest]:
            self._memory_size -= len(self._memory.pop(blob.digest))

    def make_room_for_chunks(self) -> None:
        """Let go of bodies in memory for chunks that have reserved it."""
        self._make_room_in_memory(0, evict=True)

    def close(self, *, sweep: bool = True, failed: bool = False, leftovers: bool = True) -> None:
        """Let go of everything. With `sweep` the staged files are removed, with `leftovers` those of
        earlier runs too. With `failed`, the blobs that could not be sent to every target stay for the
        next run.
        """
        if sweep:
            paths = {file.path for file in self._files.values()}
            if leftovers:
                paths |= self._paths_of_all_runs()
            if failed:
                unsent = self._files.keys() & self._unsent
                paths -= {self._files[digest].path for digest in unsent}
            for path in paths:
                remove_if_possible(path)

        self._files.clear()
        self._memory.clear()
        self._cleanup.close()

    # Memory.

    def _make_room_in_memory(self, size: int, *, evict: bool) -> bool:
        """Return whether memory has room for `size` bytes more.

        With `evict`, bodies that nobody uses make way, the least recently used first.
        """
        most = self.memory.size - self.memory.reserved - size
        if evict:
            unused = [digest for digest in self._memory if not self._users[digest]]
            for digest in unused:
                if self._memory_size <= most:
                    break
                self._memory_size -= len(self._memory.pop(digest))
        return self._memory_size <= most

    async def _pull_into_memory(self, blob: Descriptor, read: Reader) -> None:
        """Read a blob from its source into memory, which has room for it."""
        body = bytearray()

        async def extend(piece: memoryview) -> None:
            body.extend(piece)

        self._memory_size += blob.size  # before its first byte comes, so that nobody takes the room
        try:
            await read(extend)
            self._memory[blob.digest] = bytes(body)
        finally:
            if blob.digest not in self._memory:
                self._memory_size -= blob.size

    # Disk.

    async def _pull_into_file(self, blob: Descriptor, read: Reader) -> None:
        """Read a blob from its source into a file. Raises NoRoom for a blob that is too large, and
        StagingFailed where the disk fails, for all blobs that come later too.
        """
        if self._failed is not None:
            raise self._failed.without_place()
        self._make_room_on_disk(blob)

        self._incoming_size += blob.size
        try:
            with _disk_errors():
                self._files[blob.digest] = await self._stage(blob, read)
        except StagingFailed as error:
            self._failed = error
            raise
        finally:
            self._incoming_size -= blob.size

    async def _stage(self, blob: Descriptor, read: Reader) -> _StagedFile:
        """Write a blob to its file, unless a killed run left it."""
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
        """Return the folder for an algorithm's digests; it is made, and tidied, at the first use."""
        if not self._directory:
            import tempfile  # only a run without a cache_dir needs it

            temporary = tempfile.TemporaryDirectory(prefix="regsync-", ignore_cleanup_errors=True)
            self._directory = self._cleanup.enter_context(temporary)

        folder = os.path.join(self._directory, algorithm)
        if folder not in self._folders:
            # One after the other: `makedirs` gives its mode to the last folder alone.
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if not is_own_folder(folder):
                raise OSError(errno.ELOOP, "a symbolic link is not followed", folder)
            _remove_abandoned(folder)
            self._folders.add(folder)
        return folder

    def _make_room_on_disk(self, blob: Descriptor) -> None:
        """Remove files until a blob fits, the least recently used first (docs/specification.md
        section 2.7).

        A file stays while somebody reads it. Raises NoRoom.
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
        """Open a staged file and note its use; None where it is gone."""
        file = self._files.get(digest)
        if file is None:
            return None
        with _disk_errors():
            try:
                staged = FileIO(file.path, opener=open_safely)
            except FileNotFoundError:
                del self._files[digest]  # another run in this directory has ended, and removed it
                return None
        self._files[digest] = self._files.pop(digest)  # now it is the last one used
        return staged

    def _paths_of_all_runs(self) -> set[str]:
        """Return the staged files of this directory. Partial files stay: somebody may write them."""
        paths = set[str]()
        if not self._directory:
            return paths
        for algorithm in DIGEST_HEX_LENGTHS:
            folder = os.path.join(self._directory, algorithm)
            if not is_own_folder(folder):
                continue
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    if _STAGED_NAME.fullmatch(name):
                        paths.add(os.path.join(folder, name))
        return paths


def _is_file(path: str) -> bool:
    """Say whether a file is at a path: itself, and not by a link."""
    return os.path.isfile(path) and not os.path.islink(path)


async def _verify(path: str, blob: Descriptor) -> Stamp | None:
    """Return the stamp of a file that holds a blob; one that holds something else is removed."""
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
    """Remove partial files that nobody has written to for a day."""
    for name in os.listdir(folder):
        if not name.endswith(PARTIAL_SUFFIX):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.lstat(path).st_mtime > _ABANDONED_SECONDS:
                remove_if_possible(path)
