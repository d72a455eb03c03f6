"""Disk: staged blobs, for images that go to more than one target (small ones stay in memory); the
state on disk. Owns: files named by digest only (R16); `state.bin`, `state.journal` and
`state.lock`. May not know: registries, HTTP, what a state says. Invariants: a file visible under
its digest was hashed and is whole, whoever else stages in the same directory; what a killed or
failed run left is used when it still verifies, a run that ends well leaves nothing. Without a state
a run goes on, warned once; `state.bin` is replaced whole or not at all; a journal counts only for
the file that it was begun beside: no crash loses or repeats anything. Follows specification 1.1,
design.md 6 (rule 13), 8."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from io import FileIO

import anyio.to_thread

from _regsync import fips, http1, pacing
from _regsync.errors import SyncError, clean
from _regsync.oci import Descriptor, split_digest
from _regsync.state import EMPTY, Archive, Damaged, folded, unframe

# design.md section 6 rule 13
SMALL_BLOB = 1024 * 1024
_MEMORY_BUDGET = 48 * 1024 * 1024
_PARTIAL = ".partial"
_JOURNAL = b"regsyncj"
_LARGEST = 1 << 30
# In a directory where others can write, a name may be a link, or a pipe that would be waited for.
_SAFE = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | _SAFE
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


def _safely(path: str, flags: int) -> int:
    return os.open(path, flags | _SAFE)


def _is_own(folder: str) -> bool:
    return not (os.path.islink(folder) or os.path.islink(os.path.dirname(folder)))


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[int]:
    """Give the descriptor of a file that stands at `path` once it was written, else nowhere."""
    # A name of its own, and O_EXCL, which follows no link: two runs may write the same.
    partial = f"{path}.{os.urandom(6).hex()}{_PARTIAL}"
    descriptor = os.open(partial, _WRITE | os.O_EXCL, 0o600)
    try:
        yield descriptor
        os.replace(partial, path)
    finally:
        _remove(partial)


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
        given = self._body[: http1.PIECE]
        self._body = self._body[http1.PIECE :]
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
        self._hash = fips.new_hash(split_digest(digest)[0]) if digest else None
        self._buffer = memoryview(bytearray(min(http1.PIECE, max(size, 1))))
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
    running = fips.new_hash(algorithm)
    with open(path, "rb", opener=_safely) as staged:
        while piece := staged.read(http1.PIECE):
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
        self.parts = pacing.Limit(
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
        """Remove what was used longest ago and is not being read, until a blob fits (specification
        2.7).
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
            (os.path.join(self._directory, name) for name in fips.DIGEST_HEX_LENGTHS if leftovers),
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


class StateFile:
    """The state on disk between `load` and `close`, nothing noted after `save`; `warn(event,
    message)` tells of it.
    """

    def __init__(
        self, cache_dir: str | None, warn: Callable[[str, str], None], *, remembers: bool = False
    ) -> None:
        """Keep it in a directory; where that cannot be and it `remembers`, for the next `load` of
        this process.
        """
        self._directory = cache_dir
        self._warn = warn
        self._shown = clean(cache_dir or "")
        self.remembers = remembers
        self._image = b""
        self._path, self._journal_path = (
            os.path.join(cache_dir or "", f"state.{end}") for end in ("bin", "journal")
        )
        self._lock: int | None = None
        self._journal: int | None = None
        # what our journal begins with, where an earlier one's whole records end
        self._header = b""
        self._end = 0

    @property
    def is_kept(self) -> bool:
        return self._lock is not None  # whether this run's findings are: the lock is ours

    def load(self, *, keep: bool = True) -> Archive:
        """Take the lock, where findings are to be kept, and read; empty where nothing can be used."""
        if self._directory is None:
            return EMPTY
        self._end = 0
        try:
            if keep:
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                self._lock = os.open(os.path.join(self._directory, "state.lock"), _WRITE, 0o600)
                _lock(self._lock)
        except BlockingIOError:
            self.close()
            self._warn(
                "state_locked", f"another run uses {self._shown}: this one leaves no state behind"
            )
        except OSError as error:
            self._say(f"no state is kept: {self._shown}", error)
            self.close()
            return Archive(self._image) if self._image else EMPTY
        if not self.is_kept and self._image:
            return Archive(self._image)
        try:
            return self._read()
        except Damaged as error:
            # what this run notes counts repositories anew: it belongs to no file that is there
            self._header = b""
            self._warn("state", f"the state in {self._shown} is not used: {error}")
        except OSError as error:
            self._say(f"{self._shown} cannot be read", error)
        return EMPTY

    def _say(self, problem: str, error: OSError) -> None:
        self._warn("state", f"{problem}: {clean(error.strerror or str(error))}")

    def _read(self) -> Archive:
        whole = _content(self._path)
        before = self._header
        self._header = _JOURNAL + zlib.crc32(whole or b"").to_bytes(4, "big")
        if (
            self._image and self._header == before
        ):  # nobody has saved since: the disk may have room for it again
            self.save(self._image)
            if self._image:
                self.close()
            return Archive(self._image) if self._image else self._read()
        self._image = b""
        base = Archive(whole)
        journal = _content(self._journal_path) or b""
        if journal.startswith(self._header):
            records, end = unframe(journal[len(self._header) :])
            base = folded(base, records)
            self._end = len(self._header) + end
        return base

    def note(self, record: bytes) -> None:
        """Append one record to the journal: after a `kill -9` it is all that is left."""
        if self._lock is None:
            return
        try:
            if self._journal is None:
                if not self._end:
                    _remove(self._journal_path)  # it may be another file's name too
                self._journal = os.open(
                    self._journal_path, _WRITE | (os.O_APPEND if self._end else os.O_EXCL), 0o600
                )
                os.ftruncate(self._journal, self._end)
                record = record if self._end else self._header + record
            os.write(self._journal, record)
        except OSError as error:
            self._say(f"no state is kept: {self._shown}", error)
            self.close()

    def save(self, image: bytes | None) -> None:
        """Replace the state file, and let go of the journal that is folded into it."""
        self._image = image or self._image  # until it is saved
        if self._lock is None or image is None:
            return
        try:
            with _replacing(self._path) as partial, open(partial, "wb") as stream:
                stream.write(image)
                stream.flush()
                os.fsync(stream.fileno())
            if self._journal is not None:
                os.close(self._journal)
                self._journal = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._journal_path)
            self._image = b""
        except OSError as error:
            self._say(f"the state in {self._shown} is not saved", error)

    def close(self) -> None:
        for descriptor in (self._journal, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._journal = self._lock = None


def _lock(descriptor: int) -> None:
    """Lock a file for this process alone; BlockingIOError when another one has it."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:
        import msvcrt  # Windows

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            raise BlockingIOError(str(error)) from error
    else:
        flock(descriptor, LOCK_EX | LOCK_NB)


def _content(path: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=_safely) as stream:
        size = os.fstat(stream.fileno()).st_size  # `read` makes room for as much as it is asked for
        if size > _LARGEST:
            raise Damaged(f"it is larger than {_LARGEST} bytes")
        return stream.read(size)
    return None
