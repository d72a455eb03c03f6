"""."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio.lowlevel

from _regsync.crypto import new_hash
from _regsync.errors import ContentError, Disconnected, SyncError, WireError
from _regsync.net.http1 import PIECE
from _regsync.oci.manifest import Descriptor
from _regsync.oci.reference import split_digest
from _regsync.registry.repository import Repository
from _regsync.registry.throttle import ATTEMPTS, LARGE_BODY, Patience
from _regsync.registry.transport import Transport

_SOURCE_GRACE = 20.0


_CHECKPOINT = 16 * 1024 * 1024


class Relay:
    """A blob on its way out of its source: counted, hashed, its last piece withheld until both
    agree. A broken one goes on by Range, so that the target's PUT stays open (rule 16)."""

    def __init__(self, source: Repository, blob: Descriptor, transport: Transport) -> None:
        self.source = source
        self.complete = False
        self._blob = blob
        self._transport = transport
        algorithm, self._expected = split_digest(blob.digest)
        self._checkpoints = [
            (0, new_hash(algorithm))
        ]  # whence a target that lost what followed may be served again
        # What is left of the waits for this source, in seconds; its attempts are counted anew above
        # `_renewed` bytes.
        self._grace = _SOURCE_GRACE
        self._patience = Patience(ATTEMPTS)
        self._renewed = 0
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def opened(self, offset: int = 0) -> AsyncIterator[Relay]:
        """Give what follows `offset`, which the target has: read and hashed on from the checkpoint
        before it.
        """
        while self._checkpoints[-1][0] > offset:
            self._checkpoints.pop()
        self._count, running = self._checkpoints[-1]
        self._hash = running.copy()
        self._skip = offset
        self.length = self._blob.size - offset
        self._until = self._blob.size + 1  # no piece reaches farther
        self.complete = self.complete and not self.length
        self._buffer = memoryview(bytearray(min(PIECE, self._blob.size + 1)))
        async with self._stack:
            if not self.complete:
                await self._open()
            yield self

    async def _open(self) -> None:
        await self._stack.aclose()
        self._response = await self._stack.enter_async_context(
            self.source.open_blob(self._blob, self._count)
        )

    async def next(self) -> memoryview:
        """Return the next verified piece; ContentError when the source lies, WireError when it
        breaks for good.
        """
        piece = memoryview(b"")
        with self.source.located("fetch blob", self.source.reference(self._blob.digest)):
            while not (piece or self.complete):
                piece = await self._read()
        return piece

    async def part(self, end: int, room: bytearray) -> memoryview:
        """Put what comes before an offset into `room`: all that is left is verified before a byte
        of it goes on.
        """
        held = 0
        self._until = end
        while self._count < end:
            piece = await self.next()
            room[held : held + len(piece)] = piece
            held += len(piece)
        return memoryview(room)[:held]

    async def _read(self) -> memoryview:
        """Take in one more piece, or open the rest of a body that broke; return what the target
        lacks of it.
        """
        size = self._blob.size
        began = self._count
        try:
            count = await self._response.read_into(self._buffer[: self._until - began])
            if not count and began < size:
                raise Disconnected(f"the blob ended after {began} of {size} bytes")
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
        if self._count - self._checkpoints[-1][0] >= _CHECKPOINT:
            self._checkpoints.append((self._count, self._hash.copy()))
        self._transport.moved = anyio.current_time()
        self._transport.bytes = self._transport.bytes + count
        return self._buffer[max(0, self._skip - began) : count]

    async def _resume(self, broken: SyncError) -> None:
        began = anyio.current_time()
        error = broken
        if self._count >= self._renewed:
            self._patience = Patience(ATTEMPTS)
            self._renewed = self._count + LARGE_BODY
        try:
            with anyio.move_on_after(self._grace):
                while True:
                    await anyio.sleep(
                        self._transport.pause_after(error, self._patience, self.source.host)
                    )
                    try:
                        return await self._open()
                    except SyncError as caught:
                        error = caught
                    if not error.retryable:
                        break  # to begin again is what is left
            raise broken
        finally:
            self._grace -= anyio.current_time() - began
