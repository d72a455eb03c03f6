"""Send a blob that is not staged to several targets from one reading of its source.

Owns: which targets share a reading, the pace of the reading, when a slow target is dropped from it.
May not know: upload sessions, how a body is sent, what is done about a failure.
Invariants: both ends of a reading are admitted in one step, one read at the source and one write at
    each target; a target holds nothing while it waits for other targets (I8). A piece is unchanged
    until every target that got it has asked for the next piece. So the only memory is one piece,
    besides the chunks of targets that take chunks.
Follows: docs/design.md section 8 ("Staging").
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from _regsync.errors import SyncError
from _regsync.net.http1 import Pieces
from _regsync.net.pool import Lease
from _regsync.registry.admission import Gate
from _regsync.registry.throttle import Demand, refresh_next_opening
from _regsync.state import RepositoryKey
from _regsync.sync.image import BlobResult
from _regsync.sync.relay import Relay
from _regsync.sync.staging import MemoryPieces, Staging
from _regsync.text import Secrets, redacting

# Seconds that a reading waits for one target, before the reading begins and at each piece.
PATIENCE = 30.0


class LeftBehind(SyncError):
    """A target took no bytes for PATIENCE seconds, so the reading has continued without it.

    The target needs another reading.
    """


class FeedBody(Pieces):
    """The body of the request to one target. A feed delivers its pieces."""

    def __init__(self, feed: Feed, offset: int, length: int) -> None:
        self.length = length
        # Whether the last piece was returned.
        self.complete = False
        # Whether the request waits for a piece. The feed reads the next piece when all its bodies
        # wait.
        self.is_waiting = False
        # When the request last got or sent some bytes, on the clock of the event loop. A target is
        # stalled if that was PATIENCE seconds ago.
        self.last_progress = anyio.current_time()
        # The scope of the request that sends this body. It is cancelled if the target is too slow.
        self.request_scope = anyio.CancelScope()

        self._feed = feed
        # The target has the bytes of the blob before this offset.
        self._offset = offset
        # The piece that the feed has delivered last, without the bytes that the target has.
        self._piece = memoryview(b"")
        self._is_last = False
        # The failure of the source that the feed has delivered instead of a piece.
        self._error: SyncError | None = None
        # Set when the feed has delivered a piece or a failure. Each wait has a new event.
        self._delivered = anyio.Event()

        # For `read_until`: the offset in the blob of the next byte that it returns, and the bytes
        # of the current piece that it has not returned yet.
        self._read_position = offset
        self._unread = memoryview(b"")

    async def next(self) -> memoryview:
        """Return the next piece that the target lacks. Returns an empty piece at the end.

        Raises the errors of the blob's source, as `Relay.next` does.
        """
        while not self.complete:
            self._delivered = anyio.Event()
            self.is_waiting = True
            self._feed.wake()
            await self._delivered.wait()
            if self._error is not None:
                raise self._error
            self.complete = self._is_last
            # The piece is empty if the target has all of its bytes. Then ask for the next piece.
            if self._piece:
                return self._piece
        return memoryview(b"")

    async def read_until(self, end: int, buffer: bytearray) -> memoryview:
        """Copy the bytes of the blob up to byte `end` into `buffer`, as `Relay.read_until` does.

        Returns the filled part of `buffer`. The first call begins at the first byte that the target
        lacks, and each later call at the `end` of the call before.
        """
        filled = 0
        while self._read_position < end:
            if not self._unread:
                self._unread = await self.next()
            count = min(len(self._unread), end - self._read_position)
            buffer[filled : filled + count] = self._unread[:count]
            filled += count
            self._read_position += count
            self._unread = self._unread[count:]
        return memoryview(buffer)[:filled]

    def chunk_body(self, chunk: memoryview, start: int, offset: int) -> MemoryPieces:
        """Return a request body with the bytes of `chunk` from byte `offset` of the blob.

        `chunk` was returned by `read_until`, and begins at byte `start` of the blob.
        """
        return _ChunkBody(self, chunk, offset - start)

    def deliver(self, piece: memoryview, start: int, *, is_last: bool) -> None:
        """Deliver the piece of the blob that begins at byte `start`."""
        self._piece = piece[max(0, self._offset - start) :]
        self._is_last = is_last
        self._end_wait()

    def fail(self, error: SyncError) -> None:
        """Make the request fail with an error of the source."""
        self._error = error
        self._end_wait()

    def _end_wait(self) -> None:
        self.is_waiting = False
        self.last_progress = anyio.current_time()
        self._delivered.set()


class _ChunkBody(MemoryPieces):
    """The body of a request that sends a chunk of a feed body.

    Each piece that is sent counts as progress of the target, because the feed delivers nothing to
    it meanwhile.
    """

    def __init__(self, feed_body: FeedBody, chunk: memoryview, offset: int) -> None:
        super().__init__(chunk, offset)
        self._feed_body = feed_body

    async def next(self) -> memoryview:
        """Return the next piece. Returns an empty piece at the end."""
        self._feed_body.last_progress = anyio.current_time()
        return await super().next()


class Feed:
    """One reading of a blob, which delivers each piece to several bodies."""

    def __init__(self, relay: Relay, offset: int, size: int) -> None:
        self._relay = relay
        # The offset in the blob at which the next piece begins.
        self._position = offset
        self._size = size
        # The bodies of the requests that are under way.
        self._bodies = list[FeedBody]()
        # Set when a body waits for a piece or is removed. Each wait has a new event.
        self._changed = anyio.Event()

    def body(self, offset: int) -> FeedBody:
        """Add and return the body for a target that has the blob's first `offset` bytes."""
        body = FeedBody(self, offset, self._size - offset)
        self._bodies.append(body)
        return body

    def remove(self, body: FeedBody) -> None:
        """Remove a body whose request has ended."""
        self._bodies.remove(body)
        self.wake()

    def wake(self) -> None:
        """Make `pump` check again whether all bodies wait for a piece."""
        self._changed.set()

    async def pump(self) -> None:
        """Read the blob and deliver its pieces, until its end or until no body is left.

        Raises the errors of `Relay.next`.
        """
        while True:
            # The next piece overwrites the buffer of the last piece. No request may still be
            # sending from it.
            await self._wait_for_slowest()
            if not self._bodies:
                return
            piece = await self._relay.next()
            for body in self._bodies:
                body.deliver(piece, self._position, is_last=self._relay.complete)
            self._position += len(piece)
            if self._relay.complete:
                return

    def fail(self, error: SyncError) -> None:
        """Make all requests fail with an error of the source."""
        for body in self._bodies:
            body.fail(copy_error(error))

    async def _wait_for_slowest(self) -> None:
        """Wait until every body waits for a piece, including that of the slowest target.

        If some bodies wait already, the request of a target without progress for PATIENCE seconds
        is cancelled.
        """
        while busy := [body for body in self._bodies if not body.is_waiting]:
            now = anyio.current_time()
            stalled = [body for body in busy if body.last_progress + PATIENCE <= now]
            do_some_bodies_wait = len(self._bodies) > len(busy)
            if do_some_bodies_wait:
                # The loop continues until the request has ended and `remove` was called. So no
                # piece is overwritten while it is sent.
                for body in stalled:
                    body.request_scope.cancel()

            # Check again when the next body may have become stalled. If all busy bodies are stalled
            # already, only a change can end the wait.
            deadlines = [body.last_progress + PATIENCE for body in busy if body not in stalled]
            seconds_to_wait = min(deadlines) - now if deadlines else None
            self._changed = anyio.Event()
            with anyio.move_on_after(seconds_to_wait):
                await self._changed.wait()


class _State(enum.Enum):
    """The state of a subscriber.

    from        to          when
    EXPECTED    WAITING     its session is open, and it needs the blob (`Feeds.send`)
    WAITING     IN_READING  a reading begins that includes it
    IN_READING  EXPECTED    its request has ended; after a failure it may wait for another reading
    """

    EXPECTED = enum.auto()
    WAITING = enum.auto()
    IN_READING = enum.auto()


@dataclass
class Part:
    """The part of one target in one reading, and its outcome."""

    # Reads the blob, if this target's subscriber begins the reading.
    relay: Relay
    # The target has the bytes of the blob before this offset.
    offset: int
    # The permits that the reading takes at the source and at the target.
    reading: Demand
    writing: Demand
    # Bytes of memory for a chunk; 0 if the body is sent in one request.
    chunk_size: int
    # Waiting requests are admitted in order of rank, lowest first.
    rank: float
    # The connection to the target.
    lease: Lease
    # The secrets of the target's login, to be redacted in messages.
    secrets: Secrets
    # Sends the body to the target.
    send: Callable[[FeedBody], Awaitable[BlobResult]]

    # Set when the subscriber has to begin a reading, or when another one includes it in a reading.
    woken: anyio.Event = field(default_factory=anyio.Event)
    # None until then.
    body: FeedBody | None = None
    # Set when the request has ended. Then `result` or `error` is set. Both are None if the whole
    # reading was cancelled.
    ended: anyio.Event = field(default_factory=anyio.Event)
    result: BlobResult | None = None
    error: SyncError | None = None


class Subscriber:
    """One upload of a blob that may share a reading with other uploads."""

    # In the reading that it waits for or that includes it. Each `Feeds.send` sets a new part.
    part: Part

    def __init__(self, blob: tuple[RepositoryKey, str]) -> None:
        # Source repository and digest.
        self.blob = blob
        self.state = _State.EXPECTED


class Feeds:
    """All readings that several targets share.

    An upload that may share a reading subscribes first. It calls `send` when its session is open. A
    reading begins when no other subscriber of the blob is still expected to call `send`, or
    PATIENCE seconds after the first call.
    """

    def __init__(self, gate: Gate, staging: Staging) -> None:
        self._gate = gate
        self._staging = staging
        # By source repository and digest, in the order in which they have subscribed. The values
        # are unused.
        self._subscribers = defaultdict[tuple[RepositoryKey, str], dict[Subscriber, None]](dict)

    def subscribe(self, source: RepositoryKey, digest: str) -> Subscriber:
        """Add an upload for which readings of the blob wait until it is unsubscribed."""
        subscriber = Subscriber((source, digest))
        self._subscribers[subscriber.blob][subscriber] = None
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove an upload that has ended or gets its bytes in another way.

        Does nothing if it was removed before.
        """
        subscribers = self._subscribers[subscriber.blob]
        subscribers.pop(subscriber, None)
        if subscribers:
            self._wake_first(subscriber.blob)
        else:
            del self._subscribers[subscriber.blob]

    async def send(self, subscriber: Subscriber, part: Part) -> BlobResult:
        """Send a blob to one target from a reading that it may share with other targets.

        Waits until the reading begins, and until this target's part of the reading has ended.
        Raises the errors of `part.send` and of `Relay`. Raises LeftBehind if the target was too
        slow for the reading.
        """
        # The upload may have unsubscribed to use the staged blob, which was then not staged.
        self._subscribers[subscriber.blob][subscriber] = None
        subscriber.part = part
        subscriber.state = _State.WAITING
        self._wake_first(subscriber.blob)
        try:
            with anyio.move_on_after(PATIENCE):
                await part.woken.wait()
            if subscriber.state is _State.WAITING:  # no reading of another subscriber includes it
                sharing = self._choose_sharing(subscriber)
                await self._read_for([each.part for each in sharing])
            await part.ended.wait()
        finally:
            # The subscriber that has begun the reading runs the requests of all. If this task is
            # cancelled, its request must end too. A request that has ended is not affected.
            if part.body is not None:
                part.body.request_scope.cancel()
            subscriber.state = _State.EXPECTED
        if part.result is None:
            raise part.error or LeftBehind("the reading was given up")
        return part.result

    def _wake_first(self, blob: tuple[RepositoryKey, str]) -> None:
        """Let the first waiting subscriber of a blob begin a reading.

        Does nothing if no subscriber waits, or if another one is still expected to wait and to
        share the reading.
        """
        subscribers = self._subscribers[blob]
        waiting = [each for each in subscribers if each.state is _State.WAITING]
        is_one_expected = any(each.state is _State.EXPECTED for each in subscribers)
        if waiting and not is_one_expected:
            waiting[0].part.woken.set()

    def _choose_sharing(self, first: Subscriber) -> list[Subscriber]:
        """Choose the waiting subscribers that share a reading with `first`, and wake all of them.

        `first` is the first of the returned subscribers. At most one is chosen for each target
        host, because a small `max_concurrent` may never admit two at the same time. The chunks of
        all chosen subscribers must fit into memory. A host that is paused for longer than PATIENCE
        is not chosen, because the other targets would wait for it.
        """
        # By target host.
        chosen = {first.part.writing.host: first}
        room = self._staging.memory.size - first.part.chunk_size
        if not self._is_paused(first.part):
            for other in self._subscribers[first.blob]:
                if other.state is not _State.WAITING or self._is_paused(other.part):
                    continue
                host = other.part.writing.host
                if host not in chosen and other.part.chunk_size <= room:
                    chosen[host] = other
                    room -= other.part.chunk_size

        for subscriber in chosen.values():
            subscriber.state = _State.IN_READING
            subscriber.part.woken.set()
        self._wake_first(first.blob)  # those that were not chosen
        return list(chosen.values())

    def _is_paused(self, part: Part) -> bool:
        """Report whether the target's host is paused for more than PATIENCE seconds."""
        now = anyio.current_time()
        opens = refresh_next_opening(self._gate.limits, (part.writing,), now)
        # The time is infinite if all permits are in use. In this case any answer frees a permit.
        return now + PATIENCE < opens < math.inf

    async def _read_for(self, parts: list[Part]) -> None:
        """Read a blob from its source once, and send it to several targets.

        A failure of the source is recorded in all parts, a failure of a target in its own part.
        """
        relay = parts[0].relay
        offset = min(part.offset for part in parts)
        rank = min(part.rank for part in parts)
        feed = Feed(relay, offset, relay.blob.size)
        # One read at the source and one write at each target, admitted in one step (I8).
        demands = (parts[0].reading, *(part.writing for part in parts))
        try:
            async with (
                self._staging.memory.reserving(sum(part.chunk_size for part in parts), rank),
                self._gate.admitted(demands, rank),
                anyio.create_task_group() as requests,
            ):
                self._staging.make_room_for_chunks()
                try:
                    async with relay.opened(offset):
                        for part in parts:
                            part.body = feed.body(part.offset)
                            requests.start_soon(self._serve, feed, part, part.body)
                        await feed.pump()
                except SyncError as error:
                    for part in parts:
                        part.error = part.error or copy_error(error)
                    feed.fail(error)
        finally:
            for part in parts:
                # The upload's next reading may use its own relay. It can continue from the
                # checkpoints of this reading.
                part.relay.adopt_checkpoints(relay)
                part.ended.set()

    async def _serve(self, feed: Feed, part: Part, body: FeedBody) -> None:
        """Send the blob to one target.

        A failure is recorded in the target's part, and does not stop the other requests.
        """
        try:
            with body.request_scope, redacting(part.secrets):
                part.result = await part.send(body)
        except SyncError as error:
            part.error = error
        finally:
            feed.remove(body)
        if body.request_scope.cancelled_caught:
            text = f"the target took nothing for {PATIENCE:.0f} s while others waited for it"
            part.error = LeftBehind(text)
        # Return the connection to the pool now: other targets of this reading may take longer.
        await part.lease.release()
        part.ended.set()


def copy_error(error: SyncError) -> SyncError:
    """Return a copy of an error of the source, to be raised for another target."""
    copy = error.copy_without_context()
    return copy.add_context(error.side, error.operation or "", error.reference or "")
