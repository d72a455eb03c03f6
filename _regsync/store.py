"""Disk: staged blobs, for images that go to more than one target; small ones stay in memory.

Owns: files named by digest only (R16). May not know: registries, HTTP. Invariants: a file visible under its digest was
hashed and is whole, whoever else stages in the same directory; what a killed or failed run left is used when it still
verifies, a run that ends well leaves nothing. Follows specification 1.1 "Streaming", design.md 6 (rule 13) and 8."""
from __future__ import annotations
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from io import FileIO
import anyio.to_thread
from _regsync.errors import SyncError, clean
from _regsync.fips import DIGEST_HEX_LENGTHS, new_hash
from _regsync.http1 import PIECE
from _regsync.oci import Descriptor, split_digest
__all__ = ["SMALL_BLOB", "FilePieces", "MemoryPieces", "NoRoom", "Reader", "Staging", "StagingFailed", "read_whole"]

SMALL_BLOB, _MEMORY_BUDGET = 1024 * 1024, 48 * 1024 * 1024  # design.md section 6 rule 13
_PARTIAL = ".partial"
_ABANDONED_SECONDS = 24 * 3600.0  # a partial file is a killed run's then: a living one's is written to all the time
# Something that reads a blob from its source to the end, verified, piece by piece.
Reader = Callable[[Descriptor, Callable[[memoryview], Awaitable[None]]], Awaitable[None]]

class StagingFailed(SyncError):
    """The disk is full or not to be used; no other blob will fare better in this run."""
    code = "CONFIG_ERROR"

class NoRoom(StagingFailed):
    """Only this blob: it is larger than what may be staged, or all that is staged is being read."""

def _remove(path: str) -> None:
    with contextlib.suppress(OSError): os.unlink(path)

@contextlib.contextmanager
def _disk() -> Iterator[None]:
    try: yield
    except OSError as error:
        place, why = clean(str(error.filename or "the staging directory")), clean(error.strerror or str(error))
        hint = "several targets need disk: free space in global.cache_dir, or point it elsewhere"
        raise StagingFailed(f"blobs cannot be staged in {place}: {why}", hint=hint) from error

async def read_whole(blob: Descriptor, read: Reader) -> bytes:
    """Return a blob that is small enough for memory."""
    whole = bytearray()
    async def keep(piece: memoryview) -> None: whole.extend(piece)
    await read(blob, keep)
    return bytes(whole)

class MemoryPieces:
    """A body that is in memory."""
    def __init__(self, body: bytes, offset: int = 0) -> None:
        self.length, self._body, self.complete = len(body) - offset, memoryview(body)[offset:], False
    async def next(self) -> memoryview:
        given, self.complete = self.complete, True
        return memoryview(b"") if given else self._body

class FilePieces:
    """A body read from a staged file."""
    def __init__(self, staged: FileIO, size: int, offset: int) -> None:
        self.length, self.complete, self._size, self._file = size - offset, False, size, staged
        self._buffer = memoryview(bytearray(min(PIECE, max(size, 1))))
        staged.seek(offset)
    async def next(self) -> memoryview:
        with _disk(): count = await anyio.to_thread.run_sync(self._file.readinto, self._buffer)
        self.complete = self._file.tell() == self._size
        return self._buffer[: count or 0]

def _is_whole(path: str, blob: Descriptor) -> bool:
    """Say whether a killed run left a blob whole; what it left otherwise goes."""
    if not os.path.isfile(path) or os.path.islink(path): return False
    algorithm, encoded = split_digest(blob.digest)
    running = new_hash(algorithm)
    with open(path, "rb") as staged:
        while piece := staged.read(PIECE): running.update(piece)
    whole = running.hexdigest() == encoded
    if not whole: os.unlink(path)
    return whole

class Staging:
    """Blobs pulled once for several targets: small ones in memory, the others, at most `limit` bytes, in files."""
    def __init__(self, cache_dir: str | None, limit: int | None = None) -> None:
        self._limit, self._cleanup = limit, contextlib.ExitStack()
        self._directory = "" if cache_dir is None else os.path.join(cache_dir, "blobs")  # if empty, made when needed
        self._folders: set[str] = set()
        self._pulling: dict[str, anyio.Lock] = {}
        self._memory: dict[str, bytes] = {}
        self._memory_size = self._pulled_size = 0
        self._files: dict[str, tuple[str, int]] = {}  # path and size, the least recently used first
        self._readers, self._asked = Counter[str](), Counter[str]()  # how many read a file now, or are about to read
        self._failed: StagingFailed | None = None
    def _folder(self, algorithm: str) -> str:
        if not self._directory:
            import tempfile
            temporary = tempfile.TemporaryDirectory(prefix="regsync-", ignore_cleanup_errors=True)
            self._directory = self._cleanup.enter_context(temporary)
        folder = os.path.join(self._directory, algorithm)
        if folder not in self._folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            for path in (os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(_PARTIAL)):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - os.lstat(path).st_mtime > _ABANDONED_SECONDS: _remove(path)
            self._folders.add(folder)
        return folder
    async def ensure(self, blob: Descriptor, read: Reader, *, disk: bool = True) -> None:
        """Have a blob here, pulled once whoever asks; one asker's failure or cancellation is its own. NoRoom where the
        limit, or memory alone without `disk`, has no place for it."""
        self._asked[blob.digest] += 1
        async with self._pulling.setdefault(blob.digest, anyio.Lock()):
            if blob.digest in self._memory or blob.digest in self._files: return
            # The least recently used goes (rule 13), unless who had it brought has still to read it.
            while (not disk and self._memory_size + blob.size > _MEMORY_BUDGET
                    and (unused := next((each for each in self._memory if not self._asked[each]), None))):
                self._memory_size -= len(self._memory.pop(unused))
            # What memory has no room for goes to disk: it would have to be read from its source again.
            if blob.size > SMALL_BLOB or self._memory_size + blob.size > _MEMORY_BUDGET:
                if not disk: raise NoRoom("memory is full")
                await self._pull_file(blob, read)
                return
            self._memory_size += blob.size
            try: self._memory[blob.digest] = await read_whole(blob, read)
            finally:
                if blob.digest not in self._memory: self._memory_size -= blob.size
    async def _pull_file(self, blob: Descriptor, read: Reader) -> None:
        if self._failed is not None: raise self._failed.again()
        self._make_room(blob)
        self._pulled_size += blob.size
        partial = ""
        try:
            with _disk():
                algorithm, encoded = split_digest(blob.digest)
                path = os.path.join(self._folder(algorithm), encoded)
                if not await anyio.to_thread.run_sync(_is_whole, path, blob):
                    # A name of its own, and O_EXCL, which follows no link: two runs may stage the same blob.
                    name = f"{path}.{os.urandom(6).hex()}{_PARTIAL}"
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
                    with FileIO(os.open(name, flags, 0o600), "w") as staged:
                        partial = name
                        async def write(piece: memoryview) -> None:
                            while piece: piece = piece[await anyio.to_thread.run_sync(staged.write, piece) :]
                        await read(blob, write)
                    os.replace(partial, path)
                self._files[blob.digest] = (path, blob.size)
        except StagingFailed as error:
            self._failed = error
            raise
        finally:
            self._pulled_size -= blob.size
            _remove(partial)
    def _make_room(self, blob: Descriptor) -> None:
        """Remove what was used longest ago and is not being read, until a blob fits (specification 2.7)."""
        if self._limit is None: return
        room = self._limit - self._pulled_size - sum(size for _, size in self._files.values())
        for digest in [each for each in self._files if not self._readers[each]]:
            if room < blob.size <= self._limit:
                path, size = self._files.pop(digest)
                _remove(path)
                room += size
        if room < blob.size: raise NoRoom(f"staging_size_limit has no room for {blob.size} bytes")
    @contextlib.contextmanager
    def opened(self, blob: Descriptor, offset: int = 0) -> Iterator[MemoryPieces | FilePieces | None]:
        """Give a blob that `ensure` has brought, from `offset` on; None when it had to go since: bring it again."""
        self._asked[blob.digest] -= 1
        if (body := self._memory.pop(blob.digest, None)) is not None:
            self._memory[blob.digest] = body
            yield MemoryPieces(body, offset)
            return
        staged = None
        with _disk(), contextlib.suppress(KeyError, FileNotFoundError): staged = FileIO(self._files[blob.digest][0])
        if staged is None:
            self._files.pop(blob.digest, None)  # another run in this directory has ended, and took the file with it
            yield None
            return
        self._files[blob.digest] = self._files.pop(blob.digest)
        self._readers[blob.digest] += 1
        try:
            with staged: yield FilePieces(staged, blob.size, offset)
        finally: self._readers[blob.digest] -= 1
    def close(self, *, sweep: bool = True, leftovers: bool = True) -> None:
        """Remove what this run staged, and what earlier ones left; without `sweep` whole files stay for the next."""
        paths = [path for path, _ in self._files.values()]
        for folder in (os.path.join(self._directory, name) for name in DIGEST_HEX_LENGTHS if leftovers):
            with contextlib.suppress(OSError):  # another's partial files stay; what has no digest's name is not ours
                names = filter(re.compile("[0-9a-f]{64,128}").fullmatch, os.listdir(folder) if self._directory else ())
                paths += [os.path.join(folder, name) for name in names]
        for path in paths if sweep else (): _remove(path)
        self._files.clear()
        self._memory.clear()
        self._cleanup.close()
