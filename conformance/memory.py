"""A network in memory: sites and their clients in one process, on the clock of the event loop.

Bytes arrive in order, and not earlier than latency and bandwidth allow. Only the event loop waits,
so an outage of ten minutes takes no time on a virtual clock (trio's MockClock). What the bytes say
is unknown here. A client calls `Network.connect`, then reads and writes through the returned `End`.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import anyio
import anyio.abc
import anyio.lowlevel

from .http import Connection, Endpoint, Gone, Site, cancelled_at_the_end
from .journal import Entry

__all__ = ["End", "Link", "MemoryConnection", "Network", "Place", "network"]

# Maximum number of bytes that arrive together. On a slow link the number is smaller, so that they
# take no longer than a second.
_PIECE = 1 << 16


@dataclass(frozen=True)
class Link:
    """One direction of a place's line, which all its connections share."""

    latency: float = 0.0  # seconds
    bandwidth: float = math.inf  # bytes per second

    @property
    def window(self) -> int:
        """Maximum number of bytes of one connection that are in transit or unread.

        It is what arrives within one second plus the latency, at most 256 KiB. So no connection
        waits long behind the bytes of another one.
        """
        return max(1, int(min(1 << 18, self.bandwidth * (1 + self.latency))))


class _Line:
    """The state of a link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        # When all bytes that were sent so far will have left, by the event loop's clock.
        self.free_at = 0.0
        # Whether an outage stops all bytes.
        self.is_silent = False

    def send(self, count: int) -> float:
        """Occupy the link for `count` bytes. Returns when the bytes arrive."""
        self.free_at = max(anyio.current_time(), self.free_at) + count / self.link.bandwidth
        return self.free_at + self.link.latency


@dataclass
class _Piece:
    """Bytes in transit. An empty piece is the end of the connection."""

    arrives_at: float  # by the event loop's clock
    data: memoryview
    entry: Entry | None = None  # the exchange that the bytes answer


class _Pipe:
    """One direction of one connection."""

    def __init__(self, line: _Line) -> None:
        self.pieces: deque[_Piece] = deque()  # that were written but not read
        self._line = line
        self._unread = 0  # bytes of these pieces, for the window
        # Why the connection is broken. Empty while it is not.
        self._problem = ""
        # Set when a waiting reader or writer has to check again. None if nobody waits.
        self._changed: anyio.Event | None = None

    async def _change(self, deadline: float = math.inf) -> None:
        """Wait until something changes, at most until `deadline` by the event loop's clock."""
        if self._changed is None:
            self._changed = anyio.Event()
        with anyio.CancelScope(deadline=deadline):
            await self._changed.wait()

    def wake_waiters(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def write(self, data: bytes | memoryview, entry: Entry | None) -> int | None:
        if self._problem:
            raise ConnectionResetError(self._problem)
        accepted = memoryview(bytes(data[: max(0, self._line.link.window - self._unread)]))
        if not accepted:
            return None if data else 0
        together = max(1, int(min(_PIECE, self._line.link.bandwidth)))
        for start in range(0, len(accepted), together):
            piece = accepted[start : start + together]
            self.pieces.append(_Piece(self._line.send(len(piece)), piece, entry))
        self._unread += len(accepted)
        self.wake_waiters()
        return len(accepted)

    def read_into(self, room: memoryview) -> int | None:
        count = 0
        while count < len(room) and self.pieces and self._has_arrived():
            piece = self.pieces[0]
            if not piece.data:
                return count  # the piece of the end stays in the queue
            used = min(len(piece.data), len(room) - count)
            room[count : count + used] = piece.data[:used]
            count += used
            piece.data = piece.data[used:]
            if not piece.data:
                self.pieces.popleft()

        if count:
            self._unread -= count
            self.wake_waiters()
            return count
        if self._problem and not self.pieces:
            raise ConnectionResetError(self._problem)
        return None

    def _has_arrived(self) -> bool:
        return not self._line.is_silent and self.pieces[0].arrives_at <= anyio.current_time()

    def _is_readable(self) -> bool:
        return self._has_arrived() if self.pieces else bool(self._problem)

    async def readable(self) -> None:
        if self._is_readable():
            await anyio.lowlevel.checkpoint()
        while not self._is_readable():
            is_coming = self.pieces and not self._line.is_silent
            await self._change(self.pieces[0].arrives_at if is_coming else math.inf)

    def _is_writable(self) -> bool:
        return bool(self._problem) or self._unread < self._line.link.window

    async def writable(self) -> None:
        if self._is_writable():
            await anyio.lowlevel.checkpoint()
        while not self._is_writable():
            await self._change()

    def end(self, problem: str) -> None:
        """Make all writes fail. The reader reaches the end after all bytes that were written."""
        if not self._problem:
            self.pieces.append(_Piece(self._line.send(0), memoryview(b"")))
            self._problem = problem
            self.wake_waiters()

    def break_off(self, problem: str) -> None:
        """Make all writes and reads fail. Unread bytes are lost."""
        self._problem = problem
        self.pieces.clear()
        self.wake_waiters()


class End:
    """One side of a connection. `read_into` and `write` never wait."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.closed = False

    def read_into(self, room: memoryview) -> int | None:
        """Read into `room`. Returns the number of bytes.

        Returns 0 at the end of the connection, and None if no bytes have arrived yet.
        Raises ConnectionResetError if the connection is broken.
        """
        return self._incoming.read_into(room)

    def write(self, data: bytes | memoryview, entry: Entry | None = None) -> int | None:
        """Write as many bytes as possible. Returns their number, or None if the window is full.

        A server passes the `entry` of the exchange that the bytes answer. Raises
        ConnectionResetError if the connection is broken.
        """
        return self._outgoing.write(data, entry)

    async def readable(self) -> None:
        """Wait until `read_into` does not return None."""
        await self._incoming.readable()

    async def writable(self) -> None:
        """Wait until `write` does not return None."""
        await self._outgoing.writable()

    def close(self) -> None:
        """Close both directions. The peer can read all bytes up to the end. Its writes fail."""
        if not self.closed:
            self.closed = True
            self._outgoing.end("the connection was closed")
            self._incoming.break_off("the connection was closed")

    def reset(self) -> None:
        """Break the connection at once for both sides. Answers that were not read are "lost"."""
        self.closed = True
        for pipe in (self._incoming, self._outgoing):
            for piece in pipe.pieces:
                if piece.entry is not None:
                    piece.entry.faults.append("lost")
            pipe.break_off("connection reset by peer")

    def wake_waiters(self) -> None:
        """Make waiting readers and writers check again."""
        self._incoming.wake_waiters()
        self._outgoing.wake_waiters()


class MemoryConnection(Connection):
    """The server's side of a connection. There is no TLS in memory, even if the client uses https."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._room = memoryview(bytearray(_PIECE))

    async def receive(self) -> bytes:
        try:
            while (count := self._end.read_into(self._room)) is None:
                await self._end.readable()
        except ConnectionError as problem:
            raise Gone(str(problem)) from None
        if not count:
            raise Gone("end of stream")
        return bytes(self._room[:count])

    async def send(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                count = self._end.write(rest, self.answered)
                if count is None:
                    await self._end.writable()
                else:
                    rest = rest[count:]
        except ConnectionError as problem:
            raise Gone(str(problem)) from None

    def reset(self) -> None:
        self._end.reset()

    def close(self) -> None:
        self._end.close()


class Place(Endpoint):
    """A Site that listens in memory under any name. TLS is left out for https too."""

    def __init__(self, site: Site, scheme: str, host: str, port: int, up: Link, down: Link) -> None:
        super().__init__(site, scheme, host, port)
        self._up = _Line(up)
        self._down = _Line(down)
        self._connections = 0  # number of connections so far
        self._open: list[End] = []  # the server's ends; some may be closed
        self._outage: Literal["refused", "silent"] | None = None
        # Whether it was away, or its connections were reset, since `forget_outages`.
        self.was_away = False
        # Set at the end of the current outage.
        self._over = anyio.Event()

    @property
    def address(self) -> str:
        """HOST, or HOST:PORT if the port is not the scheme's default."""
        default_port = 443 if self.scheme == "https" else 80
        return self.host if self.port == default_port else f"{self.host}:{self.port}"

    def change_links(self, up: Link | None = None, down: Link | None = None) -> None:
        """Change the links for all bytes that are written from now on."""
        self._up.link = up or self._up.link
        self._down.link = down or self._down.link

    def forget_outages(self) -> None:
        """Begin to look for outages anew. One that lasts counts again."""
        self.was_away = self._outage is not None

    def open_connections(self) -> int:
        """Count the connections that neither side has closed."""
        self._open = [end for end in self._open if not end.closed]
        return len(self._open)

    def reset_connections(self) -> None:
        """Reset all open connections."""
        self.was_away = True
        for end in self._open:
            end.reset()
        self._open.clear()

    def fail(self, how: Literal["refused", "silent"]) -> None:
        """Begin an outage: "refused" as by a dead program, "silent" as by a dead line."""
        self._outage = how
        self.was_away = True
        self._over = anyio.Event()
        if how == "refused":
            self.reset_connections()
        self._set_silent(how == "silent")

    def recover(self) -> None:
        """End the outage. Bytes in transit on a silent line continue."""
        self._outage = None
        self.was_away = True
        self._over.set()
        self._set_silent(False)

    def _set_silent(self, is_silent: bool) -> None:
        self._up.is_silent = is_silent
        self._down.is_silent = is_silent
        for end in self._open:
            end.wake_waiters()

    @asynccontextmanager
    async def outage(
        self, how: Literal["refused", "silent"], seconds: float
    ) -> AsyncIterator[None]:
        """Begin an outage that ends after `seconds`, and run the block meanwhile."""

        async def recover_later() -> None:
            await anyio.sleep(seconds)
            self.recover()

        self.fail(how)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(recover_later)
            yield

    async def _connect(self, tasks: anyio.abc.TaskGroup) -> End:
        await anyio.sleep(self._up.link.latency + self._down.link.latency)
        while self._outage == "silent":
            await self._over.wait()
        if self._outage is not None:
            raise ConnectionRefusedError(111, "Connection refused")
        up = _Pipe(self._up)
        down = _Pipe(self._down)
        client_end = End(down, up)
        server_end = End(up, down)
        self._connections += 1
        self.open_connections()  # removes closed ends from `_open`
        self._open.append(server_end)
        tasks.start_soon(self.converse, MemoryConnection(server_end), self._connections)
        return client_end


class Network:
    """A network of places."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._places: dict[tuple[str, int], Place] = {}  # by host and port

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
        """Make a Site listen under a name.

        `up` is the link to the site, `down` the link from it.
        """
        port = port or (443 if scheme == "https" else 80)
        place = Place(site, scheme, host, port, up or Link(), down or Link())
        self.attach(place)
        return place

    def attach(self, place: Place) -> None:
        """Make a place, which may have been in an earlier network, a part of this one."""
        self._places[place.host, place.port] = place

    async def connect(self, host: str, port: int) -> End:
        """Connect to a place.

        Raises OSError if the name is unknown or the connection is refused.
        """
        await anyio.lowlevel.checkpoint()
        place = self._places.get((host, port))
        if place is not None:
            return await place._connect(self._tasks)
        if host in (known for known, _ in self._places):
            raise ConnectionRefusedError(111, "Connection refused")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    """Run a network while the block runs. All connections are closed at the end."""
    async with cancelled_at_the_end() as tasks:
        yield Network(tasks)
