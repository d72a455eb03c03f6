"""Disk: staged blobs, for images that go to more than one target (small ones stay in memory); the
state on disk. Owns: files named by digest only (R16); `state.bin`, `state.journal` and
`state.lock`. May not know: registries, HTTP, what a state says. Invariants: a file visible under
its digest was hashed and is whole, whoever else stages in the same directory; what a killed or
failed run left is used when it still verifies, a run that ends well leaves nothing. Without a state
a run goes on, warned once; `state.bin` is replaced whole or not at all; a journal counts only for
the file that it was begun beside: no crash loses or repeats anything. Follows docs/specification.md
1.1, docs/design.md 6 (rule 13), 8."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from io import FileIO

import anyio.to_thread

from _regsync.crypto import DIGEST_HEX_LENGTHS, new_hash
from _regsync.errors import SyncError
from _regsync.files import _PARTIAL, _is_own, _remove, _replacing, _safely
from _regsync.net.http1 import PIECE
from _regsync.oci.manifest import Descriptor
from _regsync.oci.reference import split_digest
from _regsync.registry.throttle import Limit
from _regsync.text import clean

# docs/design.md section 6 rule 13
SMALL_BLOB = 1024 * 1024


_MEMORY_BUDGET = 48 * 1024 * 1024


_ABANDONED_SECONDS = (
    24 * 3600.0
)  # a partial file is a killed run's then: a living one's is written to all the time


# Something that reads a blob from its source to the end, verified, piece by piece.
Reader = Callable[[Descriptor, Callable[[memoryview], Awaitable[None]]], Awaitable[None]]


class StagingFailed(SyncError):
    """The disk is full or not to be used; no other blob will fare better in this run."""

    code = "CONFIG_ERROR"


class NoRoom(StagingFailed):
    """Only this blob: it is larger than what may be staged, or all that is staged is being read."""


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = clean(str(error.filename or "the staging directory"))
        why = clean(error.strerror or str(error))
        hint = "several targets need disk: free space in global.cache_dir, or point it elsewhere"
        raise StagingFailed(f"blobs cannot be staged in {place}: {why}", hint=hint) from error


async def read_whole(blob: Descriptor, read: Reader) -> bytes:
    whole = bytearray()

    async def keep(piece: memoryview) -> None:
        whole.extend(piece)

    await read(blob, keep)
    return bytes(whole)


class MemoryPieces:
    def __init__(self, body: bytes | memoryview, offset: int = 0) -> None:
        self.length = len(body) - offset
        self._body = memoryview(body)[offset:]
        self.complete = False

    async def next(self) -> memoryview:
        given = self._body[:PIECE]
        self._body = self._body[PIECE:]
        self.complete = not self._body
        return given


class FilePieces:
    def __init__(self, staged: FileIO, size: int, offset: int, digest: str = "") -> None:
        self.length = size - offset
        self.complete = False
        self._size = size
        self._file = staged
        # again (I3)
        self._digest = digest
        self._hash = new_hash(split_digest(digest)[0]) if digest else None
        self._buffer = memoryview(bytearray(min(PIECE, max(size, 1))))
        staged.seek(offset)

    async def next(self) -> memoryview:
        left = self._buffer[: self._size - self._file.tell()]
        with _disk():
            count = await anyio.to_thread.run_sync(self._file.readinto, left)
        self.complete = self._file.tell() == self._size
        if self._hash is not None:
            self._hash.update(self._buffer[: count or 0])
        if (
            self._hash is not None
            and (self.complete or not count)
            and not self._digest.endswith(self._hash.hexdigest())
        ):
            raise StagingFailed(f"{self._digest} was changed on disk after it had been verified")
        return self._buffer[: count or 0]

    def cover(self, start: int, end: int) -> FilePieces:
        """Give a part of it, which is read again when it is asked for again."""
        return FilePieces(self._file, end, start)


def _is_whole(path: str, blob: Descriptor) -> bool:
    """Say whether a killed run left a blob whole; what it left otherwise goes."""
    if not os.path.isfile(path) or os.path.islink(path):
        return False
    algorithm, encoded = split_digest(blob.digest)
    running = new_hash(algorithm)
    with open(path, "rb", opener=_safely) as staged:
        while piece := staged.read(PIECE):
            running.update(piece)
    whole = running.hexdigest() == encoded
    if not whole:
        os.unlink(path)
    return whole


class Staging:
    """Blobs pulled once for several targets: small ones in memory, the others, at most `limit`
    bytes, in files.
    """

    def __init__(self, cache_dir: str | None, limit: int | None = None) -> None:
        self._limit = limit
        self._cleanup = contextlib.ExitStack()
        self._directory = (
            "" if cache_dir is None else os.path.join(cache_dir, "staged")
        )  # if empty, made when needed
        self._folders: set[str] = set()
        self._pulling: dict[str, anyio.Lock] = {}
        self._memory: dict[str, bytes] = {}
        self._memory_size = self._pulled_size = 0
        self._files: dict[str, tuple[str, int]] = {}  # path and size, the least recently used first
        # how many read a file now, or are about to read
        self._readers = Counter[str]()
        self._asked = Counter[str]()
        self._failed: StagingFailed | None = None
        self.parts = Limit(
            _MEMORY_BUDGET // SMALL_BLOB
        )  # what parts of others have of that, in small blobs

    def _folder(self, algorithm: str) -> str:
        if not self._directory:
            import tempfile

            temporary = tempfile.TemporaryDirectory(prefix="regsync-", ignore_cleanup_errors=True)
            self._directory = self._cleanup.enter_context(temporary)
        folder = os.path.join(self._directory, algorithm)
        if folder not in self._folders:
            for each in (self._directory, folder):
                os.makedirs(each, mode=0o700, exist_ok=True)  # a parent gets no mode
            if not _is_own(folder):
                raise OSError(errno.ELOOP, "a symbolic link is not followed", folder)
            for path in (
                os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(_PARTIAL)
            ):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - os.lstat(path).st_mtime > _ABANDONED_SECONDS:
                        _remove(path)
            self._folders.add(folder)
        return folder

    async def ensure(self, blob: Descriptor, read: Reader, *, disk: bool = True) -> None:
        """Have a blob here, pulled once; one asker's failure is its own. NoRoom where limit or
        memory has no place.
        """
        self._asked[blob.digest] += 1
        try:
            async with self._pulling.setdefault(blob.digest, anyio.Lock()):
                if blob.digest in self._memory or blob.digest in self._files:
                    return
                # What memory has no room for goes to disk: it would have to be read from its source
                # again.
                if blob.size > SMALL_BLOB or self.make_way(blob.size, evict=not disk) < 0:
                    if not disk:
                        raise NoRoom("memory is full")
                    await self._pull_file(blob, read)
                    return
                self._memory_size += blob.size
                try:
                    self._memory[blob.digest] = await read_whole(blob, read)
                finally:
                    if blob.digest not in self._memory:
                        self._memory_size -= blob.size
        except BaseException:
            self._asked[blob.digest] -= 1
            raise

    def make_way(self, size: int = 0, *, evict: bool = True) -> int:
        """Return the room left in memory; what was used least recently goes for it, unless it is to
        be read.
        """
        room = _MEMORY_BUDGET - self.parts.in_use * SMALL_BLOB - size
        while (
            evict
            and self._memory_size > room
            and (unused := next((each for each in self._memory if not self._asked[each]), None))
        ):
            self._memory_size -= len(self._memory.pop(unused))
        return room - self._memory_size

    async def _pull_file(self, blob: Descriptor, read: Reader) -> None:
        if self._failed is not None:
            raise self._failed.again()
        self._make_room(blob)
        self._pulled_size += blob.size
        try:
            with _disk():
                algorithm, encoded = split_digest(blob.digest)
                path = os.path.join(self._folder(algorithm), encoded)
                if not await anyio.to_thread.run_sync(_is_whole, path, blob):
                    with _replacing(path) as partial, FileIO(partial, "w") as staged:

                        async def write(piece: memoryview) -> None:
                            while piece:
                                piece = piece[await anyio.to_thread.run_sync(staged.write, piece) :]

                        await read(blob, write)
                self._files[blob.digest] = (path, blob.size)
        except StagingFailed as error:
            self._failed = error
            raise
        finally:
            self._pulled_size -= blob.size

    def _make_room(self, blob: Descriptor) -> None:
        """Remove what was used longest ago and is not being read, until a blob fits
        (docs/specification.md 2.7).
        """
        if self._limit is None:
            return
        room = self._limit - self._pulled_size - sum(size for _, size in self._files.values())
        for digest in [each for each in self._files if not self._readers[each]]:
            if room < blob.size <= self._limit:
                path, size = self._files.pop(digest)
                _remove(path)
                room += size
        if room < blob.size:
            raise NoRoom(f"staging_size_limit has no room for {blob.size} bytes")

    @contextlib.contextmanager
    def opened(
        self, blob: Descriptor, offset: int = 0
    ) -> Iterator[MemoryPieces | FilePieces | None]:
        """Give a blob that `ensure` has brought, from `offset` on; None when it had to go since:
        bring it again.
        """
        self._asked[blob.digest] -= 1
        if (body := self._memory.pop(blob.digest, None)) is not None:
            self._memory[blob.digest] = body
            yield MemoryPieces(body, offset)
            return
        staged = None
        with _disk(), contextlib.suppress(KeyError, FileNotFoundError):
            staged = FileIO(self._files[blob.digest][0], opener=_safely)
        if staged is None:
            self._files.pop(
                blob.digest, None
            )  # another run in this directory has ended, and took the file with it
            yield None
            return
        self._files[blob.digest] = self._files.pop(blob.digest)
        for count in (self._readers, self._asked):
            count[blob.digest] += 1
        try:
            with staged:
                yield FilePieces(staged, blob.size, offset, "" if offset else blob.digest)
            self._asked[blob.digest] -= 1
        finally:
            self._readers[blob.digest] -= 1

    def close(self, *, sweep: bool = True, failed: bool = False, leftovers: bool = True) -> None:
        """Remove what runs staged; what is still asked for stays if this one `failed`, all without
        `sweep`.
        """
        paths = {path for path, _ in self._files.values()}
        for folder in filter(
            _is_own,
            (os.path.join(self._directory, name) for name in DIGEST_HEX_LENGTHS if leftovers),
        ):
            with contextlib.suppress(
                OSError
            ):  # another's partial files stay; what has no digest's name is not ours
                names = filter(
                    re.compile("[0-9a-f]{64,128}").fullmatch,
                    os.listdir(folder) if self._directory else (),
                )
                paths.update(os.path.join(folder, name) for name in names)
        paths -= {
            path for digest, (path, _) in self._files.items() if failed and self._asked[digest]
        }
        for path in paths if sweep else ():
            _remove(path)
        for held in (self._files, self._memory):
            held.clear()
        self._cleanup.close()
