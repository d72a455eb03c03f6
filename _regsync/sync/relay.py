"""Read a blob from its source as a body that can be sent at once.

Owns: the way out of the source: counting, hashing, and going on where a body broke.
May not know: the target, but for how much of the blob it has.
Invariants: I3 (the last piece is withheld until size and digest agree), I7.
Follows: docs/design.md section 6, rule 16.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio

from _regsync.crypto import new_hash
from _regsync.errors import ContentError, Disconnected, SyncError, WireError
from _regsync.net.http1 import PIECE, Response
from _regsync.oci.manifest import Descriptor
from _regsync.oci.reference import split_digest
from _regsync.registry.repository import Repository
from _regsync.registry.throttle import ATTEMPTS, LARGE_BODY, RetryBudget
from _regsync.registry.transport import Transport

if TYPE_CHECKING:
    from hashlib import _Hash

# Seconds for which a source is waited for in all while a request to the target stays open; the
# time-outs of targets allow it (docs/design.md section 6, rule 16).
SOURCE_GRACE = 20.0

# Bytes between two kept states of a hash.
_CHECKPOINT = 16 * 1024 * 1024


class _Checkpoint(NamedTuple):
    """The state of the hash after `offset` bytes, from where a blob can be read again."""

    offset: int
    hash: _Hash


class Relay:
    """A blob as it comes from its source, in verified pieces; `complete`: all of it has been given.

    A body that breaks goes on by Range while the target's request stays open. When the target lost
    a part of what it got, the blob is read again from the checkpoint before that part.
    """

    length: int  # what the target lacks, in bytes
    _response: Response
    _hash: _Hash

    def __init__(self, source: Repository, blob: Descriptor, transport: Transport) -> None:
        self.source = source
        self.complete = False
        self._blob = blob
        self._transport = transport
        self._stack = AsyncExitStack()
        algorithm, self._expected = split_digest(blob.digest)
        self._checkpoints = [_Checkpoint(0, new_hash(algorithm))]

        # Of this reading: bytes read and hashed, bytes that the target has, where to stop.
        self._count = 0
        self._skip = 0
        self._until = 0
        self._buffer = memoryview(b"")

        # The waits for this source: seconds left for all, attempts left for the next `LARGE_BODY`
        # bytes, and where those end.
        self._grace = SOURCE_GRACE
        self._patience = RetryBudget(ATTEMPTS)
        self._renewed = 0

    @asynccontextmanager
    async def opened(self, offset: int = 0) -> AsyncIterator[Relay]:
        """Give the body of what follows `offset`; the target has what comes before it."""
        while self._checkpoints[-1].offset > offset:
            self._checkpoints.pop()
        checkpoint = self._checkpoints[-1]
        self._count = checkpoint.offset
        self._hash = checkpoint.hash.copy()

        self._skip = offset
        self._until = self._blob.size + 1  # one more shows that a blob is too long
        self.length = self._blob.size - offset
        self.complete = self.complete and not self.length
        self._buffer = memoryview(bytearray(min(PIECE, self._blob.size + 1)))

        async with self._stack:
            if not self.complete:
                await self._open()
            yield self

    async def next(self) -> memoryview:
        """Return the next verified piece, valid until the next call; empty at the end.

        Raises ContentError when the bytes are not the blob's, and WireError when the source breaks
        for good.
        """
        piece = memoryview(b"")
        with self.source.located("fetch blob", self.source.reference(self._blob.digest)):
            while not piece and not self.complete:
                piece = await self._read()
        return piece

    async def read_until(self, end: int, room: bytearray) -> memoryview:
        """Read on to the offset `end`, into `room`; return the bytes that the target lacks of it.

        At the end of the blob they are returned only when all of it is verified.
        """
        filled = 0
        self._until = end
        while self._count < end:
            piece = await self.next()
            room[filled : filled + len(piece)] = piece
            filled += len(piece)
        return memoryview(room)[:filled]

    async def _open(self) -> None:
        await self._stack.aclose()
        self._response = await self._stack.enter_async_context(
            self.source.open_blob(self._blob, self._count)
        )

    async def _read(self) -> memoryview:
        """Read one more piece and return what the target lacks of it.

        Returns an empty piece when the body broke and its rest has been opened.
        """
        size = self._blob.size
        start = self._count
        try:
            count = await self._response.read_into(self._buffer[: self._until - start])
            if not count and start < size:
                raise Disconnected(f"the blob ended after {start} of {size} bytes")
        except WireError as broken:
            await self._resume(broken)
            return memoryview(b"")

        self._hash.update(self._buffer[:count])
        self._count += count
        if self._count > size:
            raise ContentError(f"the blob is longer than the {size} bytes of its descriptor")
        if self._count == size and self._hash.hexdigest() != self._expected:
            raise ContentError("the blob's bytes do not match its digest")
        self.complete = self._count == size
        if self._count - self._checkpoints[-1].offset >= _CHECKPOINT:
            self._checkpoints.append(_Checkpoint(self._count, self._hash.copy()))

        self._transport.last_progress = anyio.current_time()
        self._transport.blob_bytes += count
        return self._buffer[max(0, self._skip - start) : count]

    async def _resume(self, broken: WireError) -> None:
        """Open what is left of a body; raise `broken` when the source does not go on in time."""
        if self._count >= self._renewed:
            self._patience = RetryBudget(ATTEMPTS)
            self._renewed = self._count + LARGE_BODY

        error: SyncError = broken
        began = anyio.current_time()
        try:
            with anyio.move_on_after(self._grace):
                while error.retryable:
                    pause = self._transport.pause_after(error, self._patience, self.source.host)
                    await anyio.sleep(pause)
                    try:
                        return await self._open()
                    except SyncError as caught:
                        error = caught
        finally:
            self._grace -= anyio.current_time() - began
        raise broken
