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
from _regsync.registry.throttle import Demand, next_opening
from _regsync.state.archive import RepositoryKey
from _regsync.sync.image import BlobResult
from _regsync.sync.relay import Relay
from _regsync.sync.staging import MemoryPieces, Staging
from _regsync.text import Secrets, redacting

# Seconds for which a reading waits for one target, before it begins and at each piece.
PATIENCE = 30.0


class LeftBehind(SyncError):
    """A target took nothing for so long that the others went on: it needs a reading of its own."""


class Tap(Pieces):
    """The body of one target's request, from a feed. `complete`: its last piece has been given."""

    def __init__(self, feed: Feed, offset: int, length: int) -> None:
        self.length = length
        self.complete = False
        self.is_asking = False
        self.moved_at = anyio.current_time()  # when its request last moved, or could not
        self.request = anyio.CancelScope()
        self._feed = feed
        self._offset = offset  # the target has what comes before
        self._position = offset  # of what `read_until` has not returned yet
        self._unused = memoryview(b"")  # by `read_until`, of the last piece
        self._piece = memoryview(b"")
        self._is_last = False
        self._error: SyncError | None = None
        self._is_given = anyio.Event()

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
            # It is empty where the target has all of it already: then the next one is asked for.
            if self._piece:
                return self._piece
        return memoryview(b"")

    async def read_until(self, end: int, room: bytearray) -> memoryview:
        """Read up to byte `end` of the blob, into `room`; return those bytes, as `Relay` does."""
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

    def chunk(self, body: memoryview, start: int, offset: int) -> MemoryPieces:
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
    """A part of a blob in memory. Its tap is not stalled while it is sent."""

    def __init__(self, tap: Tap, body: memoryview, offset: int) -> None:
        super().__init__(body, offset)
        self._tap = tap

    async def next(self) -> memoryview:
        """Return the next piece; empty at the end."""
        self._tap.moved_at = anyio.current_time()
        return await super().next()


class Feed:
    """One reading of a blob, and the taps that it fills."""

    def __init__(self, relay: Relay, offset: int, size: int) -> None:
        self._relay = relay
        self._position = offset
        self._size = size
        self._taps = list[Tap]()
        self._changed = anyio.Event()

    def tap(self, offset: int) -> Tap:
        """Return the body for a target that has the blob's first `offset` bytes."""
        tap = Tap(self, offset, self._size - offset)
        self._taps.append(tap)
        return tap

    def remove(self, tap: Tap) -> None:
        """Fill a tap no longer: its request has ended."""
        self._taps.remove(tap)
        self.wake()

    def wake(self) -> None:
        """Let `pump` look again."""
        self._changed.set()

    async def pump(self) -> None:
        """Read the blob to its end, or until no tap is left. Raises what `Relay.next` raises."""
        while True:
            await self._wait_until_all_ask()
            if not self._taps:
                return
            piece = await self._relay.next()
            for tap in self._taps:
                tap.give(piece, self._position, is_last=self._relay.complete)
            self._position += len(piece)
            if self._relay.complete:
                return

    def fail(self, error: SyncError) -> None:
        """End all requests with a failure of the source."""
        for tap in self._taps:
            tap.fail(copy_of(error))

    async def _wait_until_all_ask(self) -> None:
        """Wait for the slowest tap. One that takes nothing for PATIENCE seconds is left behind,
        unless nobody waits for it.
        """
        while lagging := [tap for tap in self._taps if not tap.is_asking]:
            now = anyio.current_time()
            stalled = [tap for tap in lagging if tap.moved_at + PATIENCE <= now]
            if len(self._taps) > len(lagging):
                for tap in stalled:
                    tap.request.cancel()  # `remove` follows: its piece is not touched until then

            deadlines = [tap.moved_at + PATIENCE for tap in lagging if tap not in stalled]
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
class Order:
    """What a target needs of a reading, and what the reading takes for it at either end."""

    relay: Relay
    offset: int
    reading: Demand
    writing: Demand
    chunk: int  # bytes of memory
    rank: float
    lease: Lease
    secrets: Secrets  # of the target's login
    send: Callable[[Tap], Awaitable[BlobResult]]


class Subscriber:
    """One target's copy of a blob, which may share a reading with others."""

    def __init__(self, blob: tuple[RepositoryKey, str], size: int) -> None:
        self.blob = blob
        self.size = size
        self.state = _State.EXPECTED
        self._renew()

    def _renew(self) -> None:
        self.is_called = anyio.Event()  # it is to begin a reading, or is fed by another's
        self.has_ended = anyio.Event()
        self.tap: Tap | None = None
        self.result: BlobResult | None = None
        self.error: SyncError | None = None

    def place(self, order: Order) -> None:
        """Wait for a reading."""
        self._renew()
        self.order = order
        self.state = _State.WAITING


class Feeds:
    """The readings that several targets share.

    A copy that may share one is expected first; then it calls `send` when its session is open. A
    reading begins when nobody else is expected, or PATIENCE seconds after somebody came.
    """

    def __init__(self, gate: Gate, staging: Staging) -> None:
        self._gate = gate
        self._staging = staging
        # By source repository and digest, in the order in which they were expected.
        self._subscribers = defaultdict[tuple[RepositoryKey, str], list[Subscriber]](list)

    def subscribe(self, source: RepositoryKey, digest: str, size: int) -> Subscriber:
        """Expect a copy of a blob; it has to be unsubscribed in the end."""
        subscriber = Subscriber((source, digest), size)
        self._subscribers[subscriber.blob].append(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Wait no longer for a copy: it has ended, or has found another way."""
        if subscriber.state is _State.GONE:
            return
        subscriber.state = _State.GONE
        self._subscribers[subscriber.blob].remove(subscriber)
        if not self._subscribers[subscriber.blob]:
            del self._subscribers[subscriber.blob]
        else:
            self._call_first(subscriber.blob)

    async def send(self, subscriber: Subscriber, order: Order) -> BlobResult:
        """Send a blob from a reading that others may share; raises what `order.send` raises, what
        `Relay` raises, and LeftBehind.
        """
        if subscriber.state is _State.GONE:
            self._subscribers[subscriber.blob].append(subscriber)
        subscriber.place(order)
        self._call_first(subscriber.blob)
        try:
            with anyio.move_on_after(PATIENCE):
                await subscriber.is_called.wait()
            if subscriber.state is _State.WAITING:
                await self._feed(self._choose(subscriber))
            await subscriber.has_ended.wait()
        finally:
            if subscriber.tap is not None:
                subscriber.tap.request.cancel()
            subscriber.state = _State.EXPECTED
        if subscriber.result is None:
            raise subscriber.error or LeftBehind("the reading was given up")
        return subscriber.result

    def _call_first(self, blob: tuple[RepositoryKey, str]) -> None:
        """Have the first one that waits begin a reading, if nobody else is expected."""
        subscribers = self._subscribers[blob]
        waiting = [subscriber for subscriber in subscribers if subscriber.state is _State.WAITING]
        if waiting and all(subscriber.state is not _State.EXPECTED for subscriber in subscribers):
            waiting[0].is_called.set()

    def _choose(self, first: Subscriber) -> list[Subscriber]:
        """Return those that share a reading with `first`: one for each target host, because a small
        `max_concurrent` may never admit two at once; as many as have room for their chunks; and no
        target that asks for a longer pause than the others wait.
        """
        others = [
            subscriber
            for subscriber in self._subscribers[first.blob]
            if subscriber.state is _State.WAITING and not self._is_paused(subscriber)
        ]
        if self._is_paused(first):
            others = []
        chosen = {first.order.writing.host: first}
        room = self._staging.memory.size - first.order.chunk
        for subscriber in others:
            host = subscriber.order.writing.host
            if host not in chosen and subscriber.order.chunk <= room:
                chosen[host] = subscriber
                room -= subscriber.order.chunk
        for subscriber in chosen.values():
            subscriber.state = _State.FED
            subscriber.is_called.set()
        self._call_first(first.blob)
        return list(chosen.values())

    def _is_paused(self, subscriber: Subscriber) -> bool:
        now = anyio.current_time()
        opens = next_opening(self._gate.limits, (subscriber.order.writing,), now)
        return now + PATIENCE < opens < math.inf  # inf: it is busy, and its answers open it

    async def _feed(self, subscribers: list[Subscriber]) -> None:
        """Read a blob for these, and send it to each; a failure goes to those that it concerns."""
        orders = [subscriber.order for subscriber in subscribers]
        relay = orders[0].relay
        offset = min(order.offset for order in orders)
        feed = Feed(relay, offset, subscribers[0].size)
        wants = (orders[0].reading, *(order.writing for order in orders))
        rank = min(order.rank for order in orders)
        try:
            async with (
                self._staging.memory.reserving(sum(order.chunk for order in orders), rank),
                self._gate.admitted(wants, rank),
                anyio.create_task_group() as requests,
            ):
                self._staging.make_way()
                try:
                    async with relay.opened(offset):
                        for subscriber in subscribers:
                            subscriber.tap = feed.tap(subscriber.order.offset)
                            requests.start_soon(self._serve, feed, subscriber, subscriber.tap)
                        await feed.pump()
                except SyncError as error:
                    for subscriber in subscribers:
                        subscriber.error = subscriber.error or copy_of(error)
                    feed.fail(error)
        finally:
            for subscriber in subscribers:
                subscriber.order.relay.adopt_checkpoints(relay)
                subscriber.has_ended.set()

    async def _serve(self, feed: Feed, subscriber: Subscriber, tap: Tap) -> None:
        """Send the blob to one target. Its failure is kept for it, and ends no other request."""
        order = subscriber.order
        try:
            with tap.request, redacting(order.secrets):
                subscriber.result = await order.send(tap)
        except SyncError as error:
            subscriber.error = error
        finally:
            feed.remove(tap)
        if tap.request.cancelled_caught:
            text = f"the target took nothing for {PATIENCE:.0f} s while others waited for it"
            subscriber.error = LeftBehind(text)
        await order.lease.settle()
        subscriber.has_ended.set()


def copy_of(error: SyncError) -> SyncError:
    """Return an error for another target, about the same place at the source."""
    copy = error.without_place()
    return copy.with_place(error.side, error.operation or "", error.reference or "")
