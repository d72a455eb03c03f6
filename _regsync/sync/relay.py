"""Read a blob from its source, as a request body that is sent while it is received.

Owns: counting and hashing the received bytes, and resuming a body that broke at the source.
May not know: the target, except how many bytes of the blob it has.
Invariants: the last piece is withheld until size and digest agree (I3).
Follows: docs/design.md section 6, rule 16.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio

from _regsync import edge
from _regsync.crypto import new_hash
from _regsync.errors import (
    Disconnected,
    ProtocolBroken,
    RegistryError,
    SyncError,
    WireError,
    WrongBytes,
)
from _regsync.files import LONGEST_THREAD_CALL
from _regsync.net.http1 import Pieces
from _regsync.oci import Descriptor, split_digest
from _regsync.registry.repository import BlobBody, Repository
from _regsync.registry.throttle import ATTEMPTS, LARGE_BODY, RetryBudget
from _regsync.registry.transport import Transport
from _regsync.sync.staging import MemoryPieces

if TYPE_CHECKING:
    from hashlib import _Hash

# Seconds that one blob may wait in all for a broken source, while a request to the target stays
# open. The time-outs of targets allow this (docs/design.md section 6, rule 16).
SOURCE_GRACE = 20.0

# Bytes between two checkpoints.
_CHECKPOINT = 16 * 1024 * 1024


class _Checkpoint(NamedTuple):
    """The hash of the first `offset` bytes. The blob can be read again from that offset."""

    offset: int
    hash: _Hash


class Relay(Pieces):
    """The body of a request to a target: a blob that is read from its source meanwhile.

    If the body breaks at the source, it is resumed by a Range request while the request to the
    target stays open. If the target has lost some bytes, the blob is read again from the last
    checkpoint before those bytes.

    `length` is the number of bytes that the target lacks. `complete` is set when the last piece has
    been returned.
    """

    length: int
    # The source's response and the hash of all bytes read. `opened` sets both.
    _response: BlobBody
    _hash: _Hash

    def __init__(
        self,
        source: Repository,
        blob: Descriptor,
        transport: Transport,
        *,
        uses_fresh_connections: bool = False,
    ) -> None:
        """With `uses_fresh_connections` no connection is used that has served another request."""
        self.source = source
        self.blob = blob
        self.uses_fresh_connections = uses_fresh_connections
        self.complete = False
        self._reference = source.name_of(blob.digest)
        self._transport = transport
        # Closes the source's response.
        self._stack = AsyncExitStack()
        # The expected digest is in hexadecimal, without its algorithm.
        algorithm, self._expected_digest = split_digest(blob.digest)
        # By ascending offset. The first one is the beginning of the blob.
        self._checkpoints = [_Checkpoint(0, new_hash(algorithm))]

        # Offsets in the blob. Bytes before `_position` have been read and hashed. The target has
        # the bytes before `_target_offset`. No byte at or after `_read_limit` is read.
        self._position = 0
        self._target_offset = 0
        self._read_limit = 0
        # If the blob fits into the buffer, the buffer has its bytes from here up to `_position`.
        self._buffered_from = 0
        self._buffer = memoryview(b"")
        # Whether the last read has filled the buffer, so that more bytes have probably arrived.
        self._has_more_arrived = False

        # The seconds that are left to wait for a broken source.
        self._grace = SOURCE_GRACE
        # The attempts that are left to resume the body. They are renewed when `_position` reaches
        # `_renew_attempts_at`, because a large blob may break more often.
        self._attempts = RetryBudget(ATTEMPTS)
        self._renew_attempts_at = 0

    @asynccontextmanager
    async def opened(self, offset: int = 0) -> AsyncIterator[Relay]:
        """Yield the body for a target that has the blob's first `offset` bytes."""
        # The target may have lost bytes that it had before. They are read again from an earlier
        # checkpoint.
        while self._checkpoints[-1].offset > offset:
            self._checkpoints.pop()
        self._go_back_to(self._checkpoints[-1])
        self._target_offset = offset
        self._read_limit = self.blob.size + 1  # one more byte shows that a blob is too long
        self.length = self.blob.size - offset
        # If the blob has been verified before and the target has all of it, nothing is read.
        self.complete = self.complete and self.length == 0
        with self._transport.buffers.lending(self.blob.size + 1) as self._buffer:
            self._buffered_from = self._position
            async with self._stack:
                if not self.complete:
                    await self._open_first()
                yield self

    def whole_body(self) -> memoryview | None:
        """Return all bytes of the blob if they have been verified and are still in the buffer.

        Otherwise it returns None. The body must be `opened`.
        """
        if self.complete and self._fits_in_buffer and self._buffered_from == 0:
            return self._buffer[: self.blob.size]
        return None

    @property
    def _fits_in_buffer(self) -> bool:
        """Whether the buffer has room for the whole blob and for one byte too many."""
        return self.blob.size < len(self._buffer)

    def adopt_checkpoints(self, other: Relay) -> None:
        """Use the checkpoints of another reading of the same blob if they reach further."""
        if other._checkpoints[-1].offset > self._checkpoints[-1].offset:
            self._checkpoints = list(other._checkpoints)

    def continue_from(self, offset: int, hash: _Hash) -> None:
        """Read the blob from byte `offset`, because an earlier run has sent the bytes before it.

        `hash` is the hash of those bytes.
        """
        if self._checkpoints[-1].offset < offset:
            self._checkpoints.append(_Checkpoint(offset, hash.copy()))

    async def next(self) -> memoryview:
        """Return the next piece that the target lacks. Returns an empty piece at the end.

        A piece is valid until the next call. The last piece is returned only after the whole blob
        has been verified. Raises WrongBytes if the bytes do not match the descriptor, and WireError
        if the source has broken for good.
        """
        piece = memoryview(b"")
        with self.source.adding_context("fetch blob", self._reference):
            # A piece is empty if the target has all of its bytes, or if the body broke.
            while not piece and not self.complete:
                piece = await self._read()
        return piece

    async def pour(self, write: Callable[[memoryview], None]) -> int:
        """Read, hash and write the blob in a worker thread, as long as no read has to wait.

        Returns the number of bytes passed to `write`. Returns 0 if no bytes are available or only
        the last piece is left: then the caller has to use `next`. Raises the errors of `write`, and
        WireError if the source has broken for good.
        """
        if not self._can_pour():
            return 0

        start = self._position
        with self.source.adding_context("fetch blob", self._reference):
            try:
                async with self._transport.movers:
                    await edge.current().in_thread(self._pour_in_thread, write)
            except WireError as broken:
                await self._resume(broken)
        self._transport.count_read(self._position - start)
        # Bytes that the target has were read and hashed, but not written.
        return max(0, self._position - max(start, self._target_offset))

    def _can_pour(self) -> bool:
        """Report whether a thread may continue to read.

        The last piece is left to `next`, because the blob has to be verified before its last byte
        is sent (I3).
        """
        may_end_with_next_read = self.blob.size - self._position <= len(self._buffer)
        return self._has_more_arrived and not may_end_with_next_read

    def _pour_in_thread(self, write: Callable[[memoryview], None]) -> None:
        """Read, hash and write while `_can_pour`, for at most LONGEST_THREAD_CALL seconds."""
        deadline = time.monotonic() + LONGEST_THREAD_CALL
        is_time_up = False
        while self._can_pour() and not is_time_up:
            count = self._response.read_now(self._buffer)
            # After a short read the event loop waits for more bytes, so that no thread has to wait.
            self._has_more_arrived = count == len(self._buffer)
            piece = self._hash_read(self._buffer[:count])
            if piece:  # it is empty if the target has all of its bytes
                write(piece)
            self._keep_checkpoint()
            is_time_up = time.monotonic() >= deadline

    async def read_until(self, end: int, buffer: bytearray) -> memoryview:
        """Read the blob up to byte `end`, and copy the bytes that the target lacks into `buffer`.

        Returns the filled part of `buffer`. The last bytes of the blob are returned only after the
        whole blob has been verified (I3).
        """
        filled = 0
        self._read_limit = end  # `next` returns no byte after `end`
        while self._position < end:
            piece = await self.next()
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return memoryview(buffer)[:filled]

    def chunk_body(self, chunk: memoryview, start: int, offset: int) -> MemoryPieces:
        """Return a request body with the bytes of `chunk` from byte `offset` of the blob.

        `chunk` was returned by `read_until`, and begins at byte `start` of the blob.
        """
        return MemoryPieces(chunk, offset - start)

    def _go_back_to(self, checkpoint: _Checkpoint) -> None:
        self._position = checkpoint.offset
        self._hash = checkpoint.hash.copy()

    async def _open_first(self) -> None:
        """Request the blob from `_position`, or from its first byte if the source refuses ranges.

        Bytes that the target has are then read and hashed again, but not sent.
        """
        try:
            await self._open()
        except (ProtocolBroken, RegistryError) as error:
            is_range_refused = isinstance(error, ProtocolBroken) or error.status == 416
            asked_for_range = self._position > 0
            if not (asked_for_range and is_range_refused):
                raise
            del self._checkpoints[1:]
            self._go_back_to(self._checkpoints[0])
            await self._open()

    async def _open(self) -> None:
        """Request the blob from `_position`, and close an earlier response."""
        await self._stack.aclose()
        opened = await self.source.open_blob(
            self.blob, self._position, is_fresh=self.uses_fresh_connections
        )
        self._response = await self._stack.enter_async_context(opened)

    async def _read(self) -> memoryview:
        """Read one piece, and return the bytes of it that the target lacks.

        Returns an empty piece if the body broke. In this case the rest of the body has been opened.
        """
        size = self.blob.size
        start = self._position  # `_hash_read` moves `_position` behind the piece
        # A blob that fits into the buffer is kept there as a whole (`whole_body`).
        room = self._buffer[start:] if self._fits_in_buffer else self._buffer
        try:
            count = await self._response.read_into(room[: self._read_limit - start])
            if not count and start < size:
                raise Disconnected(f"the blob ended after {start} of {size} bytes")
        except WireError as broken:
            await self._resume(broken)
            return memoryview(b"")

        self._has_more_arrived = count == len(self._buffer)
        piece = self._hash_read(room[:count])
        if self._position > size:
            raise WrongBytes(f"the blob is longer than the {size} bytes of its descriptor")
        if self._position == size and self._hash.hexdigest() != self._expected_digest:
            raise WrongBytes("the blob's bytes do not match its digest")
        self.complete = self._position == size
        self._keep_checkpoint()
        self._transport.count_read(count)
        return piece

    def _hash_read(self, piece: memoryview) -> memoryview:
        """Hash a piece that was read, and return the bytes of it that the target lacks."""
        start = self._position
        self._hash.update(piece)
        self._position += len(piece)
        return piece[max(0, self._target_offset - start) :]

    def _keep_checkpoint(self) -> None:
        if self._position - self._checkpoints[-1].offset >= _CHECKPOINT:
            self._checkpoints.append(_Checkpoint(self._position, self._hash.copy()))

    async def _resume(self, broken: WireError) -> None:
        """Open the rest of a body that broke. Raises `broken` if that fails for `_grace` seconds.

        The time is short because the request to the target stays open meanwhile. All waits of this
        relay share it.
        """
        if self._position >= self._renew_attempts_at:
            self._attempts = RetryBudget(ATTEMPTS)
            self._renew_attempts_at = self._position + LARGE_BODY

        await self._stack.aclose()
        began = anyio.current_time()
        try:
            failure = await self._open_rest(broken)
        finally:
            self._grace -= anyio.current_time() - began
        if failure is None:
            return

        # If the source is in an outage, the caller waits for its end before it tries again.
        broken.unreachable_peer = failure.unreachable_peer
        if broken.unreachable_peer is not None:
            # When the source is available again, another attempt may continue from here.
            self._checkpoints.append(_Checkpoint(self._position, self._hash.copy()))
        raise broken

    async def _open_rest(self, broken: WireError) -> SyncError | None:
        """Try to request the rest of a body that broke, for at most `_grace` seconds.

        Returns None if that succeeded, and otherwise the last failure.
        """
        failure: SyncError = broken
        with anyio.move_on_after(self._grace):
            while failure.retryable:
                pause = self._transport.pause_after(failure, self._attempts, self.source.host)
                await self._transport.wait_to_retry(failure, pause)
                try:
                    with self._transport.recovery.attempt():
                        await self._open()
                    return None
                except SyncError as error:
                    failure = error
        return failure
