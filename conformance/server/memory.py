"""A network in memory: Sites and their clients in one process, on the event loop's own clock.

Owns: bytes between two ends and when they arrive (latency, bandwidth, a window), where a Site
listens, and outages.
May not know: HTTP, what a registry holds, who the client is.
Invariants: all waiting is the event loop's, so that on a clock which jumps (trio's MockClock) an
outage of ten minutes takes no time. Bytes arrive in order, and never before latency and bandwidth
let them.

A client calls `Network.connect` and moves bytes through the `End` that it gets.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import anyio
import anyio.abc
import anyio.lowlevel

from ..journal import Entry
from .connection import LINGER, Gone
from .exchange import Site
from .http1 import Endpoint

__all__ = ["End", "Link", "MemoryConnection", "Network", "Place", "network"]

# Bytes that arrive together at most; fewer where they would take longer than a second.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Link:
    """One direction of a place's line, shared by all its connections.

    `latency` is in seconds, `bandwidth` in bytes a second. `window`: how many bytes of one
    connection may be under way or unread before its writer has to wait. Its default is what arrives
    within a second and the latency, 256 KiB at most, so that no connection waits long behind the
    queued bytes of another one.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    window: int | None = None

    @property
    def room(self) -> int:
        """The window in bytes."""
        if self.window is not None:
            return self.window
        return max(1, int(min(1 << 18, self.bandwidth * (1 + self.latency))))


class _Line:
    """A link in use: when it is free again, and whether anything gets through."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free = 0.0
        self.is_silent = False

    def arrival(self, count: int) -> float:
        """Send `count` bytes; return when they arrive."""
        self.free = max(anyio.current_time(), self.free) + count / self.link.bandwidth
        return self.free + self.link.latency


class _Piece(NamedTuple):
    """Bytes under way; none at all are the end of the connection."""

    arrives: float  # by the event loop's clock
    data: memoryview
    entry: Entry | None = None  # the exchange that they answer


class _Pipe:
    """One direction of one connection."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._pieces: deque[_Piece] = deque()
        self._held = 0
        self._broken = ""
        self._changed = anyio.Event()

    def change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def write(self, data: bytes | memoryview, entry: Entry | None = None) -> int | None:
        """Take as many bytes as the window has room for; None when it has none."""
        if self._broken:
            raise ConnectionResetError(self._broken)
        accepted = memoryview(bytes(data[: max(0, self._line.link.room - self._held)]))
        if not accepted:
            return None if data else 0
        together = max(1, int(min(_PIECE, self._line.link.bandwidth)))
        for start in range(0, len(accepted), together):
            piece = accepted[start : start + together]
            self._pieces.append(_Piece(self._line.arrival(len(piece)), piece, entry))
        self._held += len(accepted)
        self.change()
        return len(accepted)

    def read_into(self, room: memoryview) -> int | None:
        """Fill `room` with bytes that have arrived: 0 at the end, None when none have."""
        count = 0
        while self._pieces and self._has_arrived() and count < len(room):
            arrived, piece, entry = self._pieces[0]
            if not piece:
                return count  # the end, which stays
            used = min(len(piece), len(room) - count)
            room[count : count + used] = piece[:used]
            count += used
            self._pieces.popleft()
            if used < len(piece):
                self._pieces.appendleft(_Piece(arrived, piece[used:], entry))

        if not count:
            if self._broken and not self._pieces:
                raise ConnectionResetError(self._broken)
            return None

        self._held -= count
        self.change()
        return count

    def _has_arrived(self) -> bool:
        return not self._line.is_silent and self._pieces[0].arrives <= anyio.current_time()

    async def readable(self) -> None:
        await anyio.lowlevel.checkpoint()
        while not (self._has_arrived() if self._pieces else self._broken):
            deadline = math.inf
            if self._pieces and not self._line.is_silent:
                deadline = self._pieces[0].arrives
            with anyio.CancelScope(deadline=deadline):
                await self._changed.wait()

    async def writable(self) -> None:
        await anyio.lowlevel.checkpoint()
        while not self._broken and self._held >= self._line.link.room:
            await self._changed.wait()

    def end(self) -> None:
        """Let the reader come to an end behind what was written."""
        if self._broken:
            return
        self._pieces.append(_Piece(self._line.arrival(0), memoryview(b"")))
        self.change()

    def note_lost_answers(self) -> None:
        """Note with each exchange whose answer is still under way that the client never got it."""
        for piece in self._pieces:
            if piece.entry is not None:
                piece.entry.faults.append("lost")

    def breaks(self, why: str, *, lose: bool = False) -> None:
        """Let every use fail from now on; `lose` also drops bytes that were not read."""
        self._broken = why
        if lose:
            self._pieces.clear()
        self.change()


class End:
    """One side of a connection: neither `read_into` nor `write` ever waits."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.closed = False

    def read_into(self, room: memoryview) -> int | None:
        """Return the bytes read, 0 at the end, None when there are none yet; ConnectionResetError."""
        return self._incoming.read_into(room)

    def write(self, data: bytes | memoryview, entry: Entry | None = None) -> int | None:
        """Return the bytes taken, None when there is no room; ConnectionResetError.

        A server says which exchange they answer.
        """
        return self._outgoing.write(data, entry)

    async def readable(self) -> None:
        """Wait until `read_into` has something to say."""
        await self._incoming.readable()

    async def writable(self) -> None:
        """Wait until `write` has something to say."""
        await self._outgoing.writable()

    def close(self) -> None:
        """Close both directions: the peer reads to the end, and its writes fail."""
        if not self.closed:
            self.closed = True
            self._outgoing.end()
            self._outgoing.breaks("the connection was closed")
            self._incoming.breaks("the connection was closed", lose=True)

    def reset(self) -> None:
        """Break the connection at once for both sides."""
        self.closed = True
        for pipe in (self._incoming, self._outgoing):
            pipe.note_lost_answers()
            pipe.breaks("connection reset by peer", lose=True)

    def change(self) -> None:
        """Let whoever waits look again."""
        self._incoming.change()
        self._outgoing.change()


class MemoryConnection:
    """The server's side of a connection (see `connection.Connection`)."""

    def __init__(self, end: End) -> None:
        self._end = end
        self.answered: Entry | None = None

    async def handshake(self) -> None:
        """There is no TLS here: where a client believes in https, both sides leave it out."""

    async def receive_into(self, room: memoryview) -> int:
        while True:
            try:
                count = self._end.read_into(room)
            except ConnectionError as problem:
                raise Gone(str(problem)) from None
            if count == 0:
                raise Gone("end of stream")
            if count is not None:
                return count
            await self._end.readable()

    async def receive(self) -> bytes:
        room = bytearray(_PIECE)
        count = await self.receive_into(memoryview(room))
        return bytes(room[:count])

    async def send(self, piece: bytes | memoryview, entry: Entry | None = None) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                count = self._end.write(rest, self.answered)
            except ConnectionError as problem:
                raise Gone(str(problem)) from None
            if count is None:
                await self._end.writable()
                continue
            if entry:
                entry.response_bytes += count
            rest = rest[count:]

    async def linger(self) -> None:
        buffer = memoryview(bytearray(1 << 16))
        with anyio.move_on_after(LINGER):
            try:
                while True:
                    await self.receive_into(buffer)
            except Gone:
                pass

    def reset(self) -> None:
        self._end.reset()

    def close(self) -> None:
        self._end.close()


class Place(Endpoint):
    """A Site that listens in memory under any name; there is no TLS, whatever its scheme."""

    def __init__(self, site: Site, scheme: str, host: str, port: int, up: Link, down: Link) -> None:
        super().__init__(site, scheme, host, port)
        self._up = _Line(up)
        self._down = _Line(down)
        self._connections = 0
        self._open: list[End] = []
        self._outage: Literal["refused", "silent"] | None = None
        self._over = anyio.Event()

    @property
    def address(self) -> str:
        """HOST, with its port where that is not the scheme's own."""
        own = 443 if self.scheme == "https" else 80
        return self.host if self.port == own else f"{self.host}:{self.port}"

    def change_links(self, up: Link | None = None, down: Link | None = None) -> None:
        """Change the line for everything that is written from now on."""
        self._up.link = up or self._up.link
        self._down.link = down or self._down.link

    def open_connections(self) -> int:
        """Count the connections that neither side has closed."""
        self._open = [end for end in self._open if not end.closed]
        return len(self._open)

    def reset_connections(self) -> None:
        """Break every connection that is open."""
        for end in self._open:
            end.reset()
        self._open.clear()

    def fail(self, how: Literal["refused", "silent"]) -> None:
        """Begin an outage: "refused" (a dead program) or "silent" (a dead line)."""
        self._outage = how
        self._over = anyio.Event()
        if how == "refused":
            self.reset_connections()
        self._silence(how == "silent")

    def recover(self) -> None:
        """End the outage; bytes under way on a silent line go on."""
        self._outage = None
        self._over.set()
        self._silence(False)

    def _silence(self, silent: bool) -> None:
        self._up.is_silent = silent
        self._down.is_silent = silent
        for end in self._open:
            end.change()

    @asynccontextmanager
    async def outage(
        self, how: Literal["refused", "silent"], seconds: float
    ) -> AsyncIterator[None]:
        """Run the block beside an outage that begins now."""

        async def last() -> None:
            await anyio.sleep(seconds)
            self.recover()

        self.fail(how)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(last)
            yield

    async def _connect(self, tasks: anyio.abc.TaskGroup) -> End:
        await anyio.sleep(self._up.link.latency + self._down.link.latency)
        while self._outage == "silent":
            await self._over.wait()
        if self._outage is not None:
            raise ConnectionRefusedError(111, "Connection refused")
        up = _Pipe(self._up)
        down = _Pipe(self._down)
        ours = End(down, up)
        theirs = End(up, down)
        self._connections += 1
        self.open_connections()
        self._open.append(theirs)
        tasks.start_soon(self.converse, MemoryConnection(theirs), self._connections)
        return ours


class Network:
    """The places that there are, by host and port."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._places: dict[tuple[str, int], Place] = {}
        self.attempts = 0

    def listen(
        self,
        site: Site,
        host: str,
        port: int | None = None,
        *,
        scheme: str = "http",
        up: Link | None = None,
        down: Link | None = None,
    ) -> Place:
        """Let a Site answer under a name; `up` is towards it, `down` away from it."""
        port = port or (443 if scheme == "https" else 80)
        place = Place(site, scheme, host, port, up or Link(), down or Link())
        self._places[host, port] = place
        return place

    async def connect(self, host: str, port: int) -> End:
        """Connect: OSError where nobody has that name or where nobody listens."""
        self.attempts += 1
        await anyio.lowlevel.checkpoint()
        place = self._places.get((host, port))
        if place is not None:
            return await place._connect(self._tasks)
        if host in (known for known, _ in self._places):
            raise ConnectionRefusedError(111, "Connection refused")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    """Give a network; connections that are still open are closed at its end."""
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield Network(tasks)
        except Exception as problem:
            # The block's own failure leaves as it is; only a server's own come as a group.
            failure = problem
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
