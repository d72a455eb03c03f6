"""Disk: staged blobs, for images that go to more than one target.

Owns: files under a staging directory, named by digest only (R16). May not know: registries, HTTP.
Invariants: a staged file that is visible under its digest was hashed and is whole; nothing is left
behind when a run ends, whichever way. Follows specification section 1.1 "Streaming", design.md
section 8; small blobs stay in memory (design.md section 6 rule 13).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from io import FileIO

import anyio
import anyio.to_thread

from _regsync.errors import ConfigError, SyncError, clean
from _regsync.http1 import PIECE, Pieces
from _regsync.oci import Descriptor, split_digest

__all__ = ["SMALL_BLOB", "FilePieces", "MemoryPieces", "Staging"]

# design.md section 6 rule 13.
SMALL_BLOB = 1024 * 1024
_MEMORY_BUDGET = 48 * 1024 * 1024

# Something that reads a blob from its source to the end, verified, piece by piece.
Reader = Callable[[Descriptor, Callable[[memoryview], Awaitable[None]]], Awaitable[None]]


class MemoryPieces:
    """A body that is in memory."""

    def __init__(self, body: bytes) -> None:
        self.length = len(body)
        self._body, self._given = memoryview(body), False

    async def next(self) -> memoryview:
        given, self._given = self._given, True
        return memoryview(b"") if given else self._body

    def rewind(self) -> bool:
        self._given = False
        return True


class FilePieces:
    """A body read from a staged file."""

    def __init__(self, staged: FileIO, length: int) -> None:
        self.length = length
        self._file = staged
        self._buffer = memoryview(bytearray(min(PIECE, max(length, 1))))

    async def next(self) -> memoryview:
        count = await anyio.to_thread.run_sync(self._file.readinto, self._buffer)
        return self._buffer[: count or 0]

    def rewind(self) -> bool:
        self._file.seek(0)
        return True


class Staging:
    """Blobs pulled once for several targets: small ones in memory, the others in files."""

    def __init__(self, cache_dir: str | None) -> None:
        self._cache_dir, self._directory = cache_dir, ""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._pulling: dict[str, anyio.Lock] = {}
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_size = 0
        self._files: dict[str, str] = {}

    def _path(self, digest: str) -> str:
        if not self._directory:
            try:
                if self._cache_dir is None:
                    self._temporary = tempfile.TemporaryDirectory(prefix="regsync-")
                    self._directory = self._temporary.name
                else:
                    self._directory = os.path.join(self._cache_dir, "blobs")
                    os.makedirs(self._directory, mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the staging directory {clean(self._directory or tempfile.gettempdir())} "
                    f"cannot be used: {clean(error.strerror or str(error))}",
                    hint="several targets need disk: set global.cache_dir to a writable directory",
                ) from error
        algorithm, encoded = split_digest(digest)
        folder = os.path.join(self._directory, algorithm)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return os.path.join(folder, encoded)

    async def ensure(self, blob: Descriptor, read: Reader) -> None:
        """Have a blob here, pulled once whoever asks; one asker's failure or cancellation is its own."""
        async with self._pulling.setdefault(blob.digest, anyio.Lock()):
            if blob.digest in self._memory or blob.digest in self._files:
                return
            if blob.size <= SMALL_BLOB:
                whole = bytearray()

                async def keep(piece: memoryview) -> None:
                    whole.extend(piece)

                await read(blob, keep)
                self._remember(blob.digest, bytes(whole))
            else:
                await self._pull_file(blob, read)

    def _remember(self, digest: str, body: bytes) -> None:
        self._memory[digest] = body
        self._memory_size += len(body)
        while self._memory_size > _MEMORY_BUDGET and len(self._memory) > 1:
            _, dropped = self._memory.popitem(last=False)
            self._memory_size -= len(dropped)

    async def _pull_file(self, blob: Descriptor, read: Reader) -> None:
        path = self._path(blob.digest)
        partial = f"{path}.partial"
        flags = (
            os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        )
        try:
            with open(os.open(partial, flags, 0o600), "wb", buffering=0) as staged:

                async def write(piece: memoryview) -> None:
                    while piece:
                        piece = piece[await anyio.to_thread.run_sync(staged.write, piece) :]

                await read(blob, write)
            os.replace(partial, path)
        except OSError as error:
            raise SyncError(
                f"staging {blob.digest} on disk failed: {clean(error.strerror or str(error))}",
                hint="free space in global.cache_dir, or point it elsewhere",
            ) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
        self._files[blob.digest] = path

    @contextlib.contextmanager
    def opened(self, blob: Descriptor) -> Iterator[Pieces | None]:
        """Give a blob that `ensure` has brought; None when memory had to let it go since."""
        body = self._memory.get(blob.digest)
        if body is not None:
            self._memory.move_to_end(blob.digest)
            yield MemoryPieces(body)
        elif blob.digest in self._files:
            with open(self._files[blob.digest], "rb", buffering=0) as staged:
                yield FilePieces(staged, blob.size)
        else:
            yield None

    def close(self) -> None:
        """Remove every staged file."""
        for path in self._files.values():
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._files.clear()
        self._memory.clear()
        if self._temporary is not None:
            self._temporary.cleanup()
