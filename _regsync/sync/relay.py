"""Read a blob from its source, as a body that is sent while it comes.

Owns: counting and hashing what comes, and going on where a body broke.
May not know: the target, except how much of the blob it has.
Invariants: the last piece is withheld until size and digest agree (I3).
Follows: docs/design.md section 6, rule 16.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from _regsync.crypto import new_hash
from _regsync.errors import (
    Disconnected,
    ProtocolBroken,
    RegistryError,
    SyncError,
    WireError,
    WrongBytes,
)
from _regsync.files import LONGEST_VISIT
from _regsync.net.http1 import Pieces
from _regsync.oci.manifest import Descriptor
from _regsync.oci.reference import split_digest
from _regsync.registry.repository import BlobBody, Repository
from _regsync.registry.throttle import ATTEMPTS, LARGE_BODY, RetryBudget
from _regsync.registry.transport import Transport
from _regsync.sync.staging import MemoryPieces

if TYPE_CHECKING:
    from hashlib import _Hash

# Seconds for which a broken source is waited for, in all, while a request to the target stays open;
# the time-outs of targets allow it (docs/design.md section 6, rule 16).
SOURCE_GRACE = 20.0

# Bytes between two checkpoints.
_CHECKPOINT = 16 * 1024 * 1024


class _Checkpoint(NamedTuple):
    """The state of the hash after `offset` bytes: a blob can be read again from there."""

    offset: int
    hash: _Hash


class Relay(Pieces):
    """The body of a request to a target: a blob as it comes from its source.

    A body that breaks at the source goes on by Range while the request to the target stays open.
    When the target has lost a part, the blob is read again from the checkpoint before that part.

    `length`: how many bytes the target lacks. `complete`: the last piece has been given.
    """

    length: int
    # The source's answer, and the hash of what was read. Both begin with `opened`.
    _response: BlobBody
    _hash: _Hash

    def __init__(
        self, source: Repository, blob: Descriptor, transport: Transport, *, is_fresh: bool = False
    ) -> None:
        """Prepare to read a blob; with `is_fresh` over connections that no other request has used."""
        self.source = source
        self.is_fresh = is_fresh
        self.complete = False
        self._blob = blob
        self._reference = source.reference(blob.digest)
        self._transport = transport
        # Closes the source's answer.
        self._stack = AsyncExitStack()
        algorithm, self._expected = split_digest(blob.digest)
        self._checkpoints = [_Checkpoint(0, new_hash(algorithm))]

        # In bytes from the blob's beginning: how much was read and hashed, how much the target has
        # already, and where reading stops.
        self._position = 0
        self._at_target = 0
        self._end = 0
        self._buffer = memoryview(b"")
        # A blob that is smaller than the buffer is read to its place in it, from this byte on.
        self._kept_from = 0
        # Whether more has probably come already, because the last read filled the buffer.
        self._more_has_come = False

        # The seconds that are left to wait for a broken source, the attempts that are left, and the
        # position at which attempts are counted from 0 again: a large blob may break more often.
        self._grace = SOURCE_GRACE
        self._attempts = RetryBudget(ATTEMPTS)
        self._renew_attempts_at = 0

    @asynccontextmanager
    async def opened(self, offset: int = 0) -> AsyncIterator[Relay]:
        """Give the body for a target that has the blob's first `offset` bytes."""
        # What the target has lost since is read again.
        while self._checkpoints[-1].offset > offset:
            self._checkpoints.pop()
        self._go_back_to(self._checkpoints[-1])
        self._at_target = offset
        self._end = self._blob.size + 1  # one byte more shows that a blob is too long
        self.length = self._blob.size - offset
        # Of a blob that was verified before, a target may have all: then nothing is read.
        self.complete = self.complete and self.length == 0
        with self._transport.buffers.lending(self._blob.size + 1) as self._buffer:
            self._kept_from = self._position
            async with self._stack:
                if not self.complete:
                    await self._open_first()
                yield self

    def whole_body(self) -> memoryview | None:
        """Return the whole blob while it is `opened`, if it was read to its end, is verified and is
        still in the buffer.
        """
        if self.complete and self._fits and self._kept_from == 0:
            return self._buffer[: self._blob.size]
        return None

    @property
    def _fits(self) -> bool:
        """Whether the buffer holds the whole blob, and the byte that would be too much."""
        return self._blob.size < len(self._buffer)

    def adopt_checkpoints(self, other: Relay) -> None:
        """Take over the checkpoints of another reading of the same blob, if it has come further."""
        if other._checkpoints[-1].offset > self._checkpoints[-1].offset:
            self._checkpoints = list(other._checkpoints)

    def continue_from(self, offset: int, hash: _Hash) -> None:
        """Have a blob read from byte `offset` on: an earlier run has sent what comes before, and `hash`
        is the hash of it.
        """
        if self._checkpoints[-1].offset < offset:
            self._checkpoints.append(_Checkpoint(offset, hash.copy()))

    async def next(self) -> memoryview:
        """Return the next piece that the target lacks, valid until the next call; empty at the end.

        The last piece is returned only when the whole blob is verified. Raises WrongBytes when the
        bytes are not the blob's, and WireError when the source breaks for good.
        """
        piece = memoryview(b"")
        with self.source.adding_place("fetch blob", self._reference):
            # A piece is empty where the target has all of it, or where the body broke.
            while not piece and not self.complete:
                piece = await self._read()
        return piece

    async def pour(self, write: Callable[[memoryview], None]) -> int:
        """Have a worker thread read, hash and write the blob as long as bytes come without waiting;
        return how many bytes `write` got.

        Returns 0 where no more has come yet, or only the last piece is left: `next` gives that.
        Raises what `write` raises, and WireError when the source breaks for good.
        """
        if not self._can_pour():
            return 0

        begin = self._position
        with self.source.adding_place("fetch blob", self._reference):
            try:
                limiter = self._transport.movers
                await anyio.to_thread.run_sync(self._pour_in_thread, write, limiter=limiter)
            except WireError as broken:
                await self._resume(broken)
        self._transport.count_read(self._position - begin)
        # The target may have the first of these bytes already.
        return max(0, self._position - max(begin, self._at_target))

    def _can_pour(self) -> bool:
        """Say whether a thread may go on reading without waiting.

        The last piece is left to `next`: the blob has to be verified before its last byte is sent (I3).
        """
        may_end_with_next_read = self._blob.size - self._position <= len(self._buffer)
        return self._more_has_come and not may_end_with_next_read

    def _pour_in_thread(self, write: Callable[[memoryview], None]) -> None:
        """Read, hash and write until the source is slower than this thread, only the last piece is left,
        or LONGEST_VISIT seconds have passed.
        """
        deadline = time.monotonic() + LONGEST_VISIT
        is_time_up = False
        while self._can_pour() and not is_time_up:
            count = self._response.read_now(self._buffer)
            # After a short read the event loop waits for more, so that no thread has to.
            self._more_has_come = count == len(self._buffer)
            piece = self._hash_read(self._buffer[:count])
            if piece:  # it is empty where the target has all of it
                write(piece)
            self._keep_checkpoint()
            is_time_up = time.monotonic() >= deadline

    async def read_until(self, end: int, room: bytearray) -> memoryview:
        """Read up to byte `end` of the blob, into `room`; return those bytes that the target lacks.

        The blob's last bytes are returned only when all of it is verified (I3).
        """
        filled = 0
        self._end = end
        while self._position < end:
            piece = await self.next()
            room[filled : filled + len(piece)] = piece
            filled += len(piece)
        return memoryview(room)[:filled]

    def chunk(self, body: memoryview, start: int, offset: int) -> MemoryPieces:
        """Return the body of a request: what `read_until` has returned, `body`, begins at byte `start`
        of the blob, and the request's body at byte `offset`.
        """
        return MemoryPieces(body, offset - start)

    def _go_back_to(self, checkpoint: _Checkpoint) -> None:
        self._position = checkpoint.offset
        self._hash = checkpoint.hash.copy()

    async def _open_first(self) -> None:
        """Open the body; a source that gives no ranges gives all of the blob once more."""
        try:
            await self._open()
        except (ProtocolBroken, RegistryError) as error:
            gives_no_range = isinstance(error, ProtocolBroken) or error.status == 416
            asked_for_range = self._position > 0
            if not (asked_for_range and gives_no_range):
                raise
            del self._checkpoints[1:]  # the first one is the blob's beginning
            self._go_back_to(self._checkpoints[0])
            await self._open()

    async def _open(self) -> None:
        """Ask the source for what was not read yet, in place of an answer that has broken."""
        await self._stack.aclose()
        opened = await self.source.open_blob(self._blob, self._position, is_fresh=self.is_fresh)
        self._response = await self._stack.enter_async_context(opened)

    async def _read(self) -> memoryview:
        """Read one more piece and return those bytes of it that the target lacks.

        The piece is empty when the body broke: its rest has been opened then.
        """
        size = self._blob.size
        start = self._position
        room = self._buffer[start:] if self._fits else self._buffer
        try:
            count = await self._response.read_into(room[: self._end - start])
            if not count and start < size:
                raise Disconnected(f"the blob ended after {start} of {size} bytes")
        except WireError as broken:
            await self._resume(broken)
            return memoryview(b"")

        self._more_has_come = count == len(self._buffer)
        piece = self._hash_read(room[:count])
        if self._position > size:
            raise WrongBytes(f"the blob is longer than the {size} bytes of its descriptor")
        if self._position == size and self._hash.hexdigest() != self._expected:
            raise WrongBytes("the blob's bytes do not match its digest")
        self.complete = self._position == size
        self._keep_checkpoint()
        self._transport.count_read(count)
        return piece

    def _hash_read(self, piece: memoryview) -> memoryview:
        """Hash the bytes that were read; return those of them that the target lacks."""
        start = self._position
        self._hash.update(piece)
        self._position += len(piece)
        return piece[max(0, self._at_target - start) :]

    def _keep_checkpoint(self) -> None:
        if self._position - self._checkpoints[-1].offset >= _CHECKPOINT:
            self._checkpoints.append(_Checkpoint(self._position, self._hash.copy()))

    async def _resume(self, broken: WireError) -> None:
        """Open what is left of a body; raise `broken` when the source does not go on in time.

        The request to the target stays open meanwhile, so the time is short: `_grace` seconds are left
        for all waits of this relay.
        """
        if self._position >= self._renew_attempts_at:
            self._attempts = RetryBudget(ATTEMPTS)
            self._renew_attempts_at = self._position + LARGE_BODY

        await self._stack.aclose()
        error: SyncError = broken
        began = anyio.current_time()
        try:
            with anyio.move_on_after(self._grace):
                # When the time is up, or the source refuses for good, `broken` is raised below.
                while error.retryable:
                    pause = self._transport.pause_after(error, self._attempts, self.source.host)
                    await self._transport.rest(error, pause)
                    try:
                        with self._transport.recovery.attempt():
                            return await self._open()
                    except SyncError as caught:
                        error = caught
        finally:
            self._grace -= anyio.current_time() - began
        broken.unreachable_peer = error.unreachable_peer
        if broken.unreachable_peer is not None:
            # When the source is back, another attempt may read on from here.
            self._checkpoints.append(_Checkpoint(self._position, self._hash.copy()))
        raise broken
