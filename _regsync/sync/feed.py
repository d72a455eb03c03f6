"""One reading of a blob feeds several targets at their common pace, where it is not staged.

Owns: which targets share a reading, their pace, who is left behind.
May not know: upload sessions, how a body is sent, what is done about a failure.
Invariants: both ends of a reading are admitted in one step, one read at the source and one write at
    each target; whoever waits for others holds nothing (I8). A piece stays as it is until all who
    were given it have asked for the next one, so that one piece is all the memory, beside the chunks
    of targets that take chunks.
Follows: docs/design.md section 8 ("Staging").
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from _regsync.errors import SyncError
from _regsync.net.http1 import Pieces
from _regsync.net.pool import Lease
from _regsync.registry.admission import Gate
from _regsync.registry.throttle import Demand, refresh_next_opening
from _regsync.state.archive import RepositoryKey
from _regsync.sync.image import BlobResult
from _regsync.sync.relay import Relay
from _regsync.sync.staging import MemoryPieces, Staging
from _regsync.text import Secrets, redacting

# Seconds for which a reading waits for one target, before it begins and at each piece.
PATIENCE = 30.0


class LeftBehind(SyncError):
    """A target took nothing for so long that the others went on: it needs a reading of its own."""


class FeedBody(Pieces):
    """The body of one target's request, filled from a feed."""

    def __init__(self, feed: Feed, offset: int, length: int) -> None:
        self.length = length
        # Whether the last piece was returned.
        self.complete = False
        # Whether the request waits for a piece. The feed reads on when all its bodies ask.
        self.is_asking = False
        # When it last got a piece. A target that asks for none for PATIENCE seconds is stalled.
        self.moved_at = anyio.current_time()
        # Cancelled where the target is left behind.
        self.request = anyio.CancelScope()

        self._feed = feed
        # The target has what comes before this byte of the blob.
        self._offset = offset
        # What the feed has given last, or why it gives no more.
        self._piece = memoryview(b"")
        self._is_last = False
        self._error: SyncError | None = None
        self._is_given = anyio.Event()

        # Of `read_until`: the byte of the blob that it returns next, and what it has left of a piece.
        self._position = offset
        self._unused = memoryview(b"")

    async def next(self) -> memoryview:
        """Return the next piece that the target lacks; empty at the end.

        Raises what the source of the blob raised, as `Relay.next` does.
        """
        while not self.complete:
            self._is_given = anyio.Event()
            self.is_asking = True
            self._feed.wake()
            await self._is_given.wait()
            if self._error is not None:
                raise self._error
            self.complete = self._is_last
            # A piece is empty here where the target has all of it already: the next one is asked for.
            if self._piece:
                return self._piece
        return memoryview(b"")

    async def read_until(self, end: int, room: bytearray) -> memoryview:
        """Read up to byte `end` of the blob, into `room`; return those bytes, as `Relay` does. What a
        piece has behind `end` is kept for the next call.
        """
        filled = 0
        while self._position < end:
            if not self._unused:
                self._unused = await self.next()
            taken = self._unused[: end - self._position]
            room[filled : filled + len(taken)] = taken
            filled += len(taken)
            self._position += len(taken)
            self._unused = self._unused[len(taken) :]
        return memoryview(room)[:filled]

    def chunk_body(self, body: memoryview, start: int, offset: int) -> MemoryPieces:
        """Return the body of a request that sends what `read_until` has returned, as `Relay` does."""
        return _Chunk(self, body, offset - start)

    def give(self, piece: memoryview, start: int, *, is_last: bool) -> None:
        """Give the piece of the blob that begins at byte `start`."""
        self._piece = piece[max(0, self._offset - start) :]
        self._is_last = is_last
        self._go_on()

    def fail(self, error: SyncError) -> None:
        """Have the request end with a failure of the source."""
        self._error = error
        self._go_on()

    def _go_on(self) -> None:
        self.is_asking = False
        self.moved_at = anyio.current_time()
        self._is_given.set()


class _Chunk(MemoryPieces):
    """A part of a blob in memory. While it is sent its target counts as moving, although the feed
    gives it nothing.
    """

    def __init__(self, feed_body: FeedBody, body: memoryview, offset: int) -> None:
        super().__init__(body, offset)
        self._feed_body = feed_body

    async def next(self) -> memoryview:
        """Return the next piece; empty at the end."""
        self._feed_body.moved_at = anyio.current_time()
        return await super().next()


class Feed:
    """One reading of a blob, and the bodies that it fills."""

    def __init__(self, relay: Relay, offset: int, size: int) -> None:
        self._relay = relay
        # The byte of the blob at which the next piece begins.
        self._position = offset
        self._size = size
        self._bodies = list[FeedBody]()
        # Set when a body asks for a piece or is removed.
        self._changed = anyio.Event()

    def body(self, offset: int) -> FeedBody:
        """Return the body for a target that has the blob's first `offset` bytes."""
        body = FeedBody(self, offset, self._size - offset)
        self._bodies.append(body)
        return body

    def remove(self, body: FeedBody) -> None:
        """Fill a body no longer: its request has ended."""
        self._bodies.remove(body)
        self.wake()

    def wake(self) -> None:
        """Let `pump` look again."""
        self._changed.set()

    async def pump(self) -> None:
        """Read the blob to its end, or until no body is left. Raises what `Relay.next` raises."""
        while True:
            # The relay's next piece overwrites the last one, which all have to be done with.
            await self._wait_until_all_ask()
            if not self._bodies:
                return
            piece = await self._relay.next()
            for body in self._bodies:
                body.give(piece, self._position, is_last=self._relay.complete)
            self._position += len(piece)
            if self._relay.complete:
                return

    def fail(self, error: SyncError) -> None:
        """End all requests with a failure of the source."""
        for body in self._bodies:
            body.fail(copy_error(error))

    async def _wait_until_all_ask(self) -> None:
        """Wait for the slowest target. One that takes nothing for PATIENCE seconds is left behind,
        unless no other waits for it.
        """
        while lagging := [body for body in self._bodies if not body.is_asking]:
            now = anyio.current_time()
            stalled = [body for body in lagging if body.moved_at + PATIENCE <= now]
            others_wait = len(self._bodies) > len(lagging)
            if others_wait:
                for body in stalled:
                    body.request.cancel()  # `remove` follows: its piece is not touched until then

            deadlines = [body.moved_at + PATIENCE for body in lagging if body not in stalled]
            self._changed = anyio.Event()
            with anyio.move_on_after(min(deadlines) - now if deadlines else None):
                await self._changed.wait()


class _State(enum.Enum):
    """Where a subscriber stands.

    from        to          when
    EXPECTED    WAITING     it has an open session, and wants the blob (`Feeds.send`)
    WAITING     FED         a reading begins that serves it
    FED         EXPECTED    its request has ended; after a failure it may come again
    all         GONE        it needs no shared reading (`Feeds.unsubscribe`)
    """

    EXPECTED = enum.auto()
    WAITING = enum.auto()
    FED = enum.auto()
    GONE = enum.auto()


@dataclass
class Needs:
    """What one target needs of a reading, and what the reading has to be admitted for."""

    relay: Relay
    # The target has the blob's first bytes, up to here.
    offset: int
    reading: Demand
    writing: Demand
    # Bytes of memory for a chunk; 0 where the body is sent in one request.
    chunk: int
    # The lowest is admitted first.
    rank: float
    lease: Lease
    # Of the target's login.
    secrets: Secrets
    # Sends the body, and says what became of the blob.
    send: Callable[[FeedBody], Awaitable[BlobResult]]


class Subscriber:
    """One target's copy of a blob, which may share a reading with others."""

    needs: Needs

    def __init__(self, blob: tuple[RepositoryKey, str], size: int) -> None:
        self.blob = blob
        self.size = size
        self.state = _State.EXPECTED
        self._forget_last()

    def _forget_last(self) -> None:
        # Set when this one is to begin a reading, or is served by another's.
        self.is_called = anyio.Event()
        # Set when its part of the reading has ended: with a result, with an error, or with neither
        # where all of the reading was cancelled.
        self.has_ended = anyio.Event()
        self.body: FeedBody | None = None
        self.result: BlobResult | None = None
        self.error: SyncError | None = None

    def wait_for_reading(self, needs: Needs) -> None:
        """Begin to wait. An earlier reading may have failed, of which nothing counts any more."""
        self._forget_last()
        self.needs = needs
        self.state = _State.WAITING


class Feeds:
    """The readings that several targets share.

    A copy that may share one subscribes first; then it calls `send` when its session is open. A
    reading begins when no other subscriber is expected to come, or PATIENCE seconds after one came.
    """

    def __init__(self, gate: Gate, staging: Staging) -> None:
        self._gate = gate
        self._staging = staging
        # By source repository and digest, in the order in which they subscribed.
        self._subscribers = defaultdict[tuple[RepositoryKey, str], list[Subscriber]](list)

    def subscribe(self, source: RepositoryKey, digest: str, size: int) -> Subscriber:
        """Let readings of a blob wait for one more copy, until it is unsubscribed."""
        subscriber = Subscriber((source, digest), size)
        self._subscribers[subscriber.blob].append(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Let no reading wait for a copy: it has ended, or its bytes come from somewhere else."""
        if subscriber.state is _State.GONE:
            return
        subscriber.state = _State.GONE
        self._subscribers[subscriber.blob].remove(subscriber)
        if not self._subscribers[subscriber.blob]:
            del self._subscribers[subscriber.blob]
        else:
            self._call_first(subscriber.blob)

    async def send(self, subscriber: Subscriber, needs: Needs) -> BlobResult:
        """Send a blob from a reading that others may share; raises what `needs.send` raises, what
        `Relay` raises, and LeftBehind.
        """
        if subscriber.state is _State.GONE:  # staging has failed, from which it would have come
            self._subscribers[subscriber.blob].append(subscriber)
        subscriber.wait_for_reading(needs)
        self._call_first(subscriber.blob)
        try:
            with anyio.move_on_after(PATIENCE):
                await subscriber.is_called.wait()
            # Nobody else has begun a reading that serves this one: it begins one.
            if subscriber.state is _State.WAITING:
                await self._feed(self._choose(subscriber))
            await subscriber.has_ended.wait()
        finally:
            if subscriber.body is not None:
                subscriber.body.request.cancel()
            subscriber.state = _State.EXPECTED
        if subscriber.result is None:
            raise subscriber.error or LeftBehind("the reading was given up")
        return subscriber.result

    def _call_first(self, blob: tuple[RepositoryKey, str]) -> None:
        """Have the first one that waits begin a reading, if nobody else is expected."""
        subscribers = self._subscribers[blob]
        waiting = [each for each in subscribers if each.state is _State.WAITING]
        is_one_expected = any(each.state is _State.EXPECTED for each in subscribers)
        if waiting and not is_one_expected:
            waiting[0].is_called.set()

    def _choose(self, first: Subscriber) -> list[Subscriber]:
        """Choose those that wait and share a reading with `first`; they count as fed from now on.

        One for each target host, because a small `max_concurrent` may never admit two at once. As
        many as have room for their chunks. None whose host asks for a longer pause than PATIENCE: the
        others would wait for it.
        """
        chosen = {first.needs.writing.host: first}
        room = self._staging.memory.size - first.needs.chunk
        if not self._is_paused(first):
            for other in self._subscribers[first.blob]:
                if other.state is not _State.WAITING or self._is_paused(other):
                    continue
                host = other.needs.writing.host
                if host not in chosen and other.needs.chunk <= room:
                    chosen[host] = other
                    room -= other.needs.chunk

        for subscriber in chosen.values():
            subscriber.state = _State.FED
            subscriber.is_called.set()
        self._call_first(first.blob)
        return list(chosen.values())

    def _is_paused(self, subscriber: Subscriber) -> bool:
        """Say whether a target's host has asked for a pause of more than PATIENCE seconds."""
        now = anyio.current_time()
        opens = refresh_next_opening(self._gate.limits, (subscriber.needs.writing,), now)
        # Infinite where all its permits are in use: an answer frees one.
        return now + PATIENCE < opens < math.inf

    async def _feed(self, subscribers: list[Subscriber]) -> None:
        """Read a blob for these, and send it to each; a failure goes to those that it concerns."""
        needs = [subscriber.needs for subscriber in subscribers]
        relay = needs[0].relay
        offset = min(each.offset for each in needs)
        rank = min(each.rank for each in needs)
        feed = Feed(relay, offset, subscribers[0].size)
        # One read at the source and one write at each target, admitted in one step (I8).
        demands = (needs[0].reading, *(each.writing for each in needs))
        try:
            async with (
                self._staging.memory.reserving(sum(each.chunk for each in needs), rank),
                self._gate.admitted(demands, rank),
                anyio.create_task_group() as requests,
            ):
                self._staging.make_room_for_chunks()  # the chunks take the room of blobs that are kept in memory
                try:
                    async with relay.opened(offset):
                        for subscriber in subscribers:
                            subscriber.body = feed.body(subscriber.needs.offset)
                            requests.start_soon(self._serve, feed, subscriber, subscriber.body)
                        await feed.pump()
                except SyncError as error:
                    for subscriber in subscribers:
                        subscriber.error = subscriber.error or copy_error(error)
                    feed.fail(error)
        finally:
            for subscriber in subscribers:
                # Its next reading may be one of its own, which goes on where this one stopped.
                subscriber.needs.relay.adopt_checkpoints(relay)
                subscriber.has_ended.set()

    async def _serve(self, feed: Feed, subscriber: Subscriber, body: FeedBody) -> None:
        """Send the blob to one target. Its failure is kept for it, and ends no other request."""
        needs = subscriber.needs
        try:
            with body.request, redacting(needs.secrets):
                subscriber.result = await needs.send(body)
        except SyncError as error:
            subscriber.error = error
        finally:
            feed.remove(body)
        if body.request.cancelled_caught:
            text = f"the target took nothing for {PATIENCE:.0f} s while others waited for it"
            subscriber.error = LeftBehind(text)
        # The connection goes back to the pool now: other targets of this reading may take longer.
        await needs.lease.settle()
        subscriber.has_ended.set()


def copy_error(error: SyncError) -> SyncError:
    """Return an error for another target, about the same place at the source."""
    copy = error.without_place()
    return copy.with_place(error.side, error.operation or "", error.reference or "")
