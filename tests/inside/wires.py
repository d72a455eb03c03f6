"""Peers for the tests of streams and HTTP: scripted in memory or on a real socket, or a network's
end.

`Wire` is a stream (see `_regsync.net.streams.Stream`) whose peer is a list of what arrives and a
list of how sends fare. It checks what a real socket would punish: two tasks that wait for the same
direction, the use of a stream that was closed, a request that is not HTTP.
"""

from __future__ import annotations

import enum
import math
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import anyio
import anyio.lowlevel
import h11
import hypothesis  # noqa: F401  (its hook for trio warns when trio is there first)

from _regsync.addresses import Origin
from _regsync.config import Registry
from _regsync.errors import Disconnected
from _regsync.net.http1 import Connection, Headers, Pieces, Response
from _regsync.net.pool import Pool
from _regsync.net.streams import WANT_READ, WANT_WRITE, Stream, Timeouts
from _regsync.registry.host import Machine
from _regsync.registry.transport import Transport
from conformance.server.memory import End as MemoryEnd

ORIGIN = Origin("http", "registry.test", 80)


class End(enum.Enum):
    """How a direction ends."""

    EOF = "eof"
    RESET = "reset"


@dataclass
class Pause:
    """Nothing moves for so long after this is reached; 0 ends a packet."""

    seconds: float
    until: float | None = None

    async def over(self) -> None:
        if self.until is None:
            self.until = anyio.current_time() + self.seconds
        if self.until == math.inf:
            await anyio.sleep_forever()
        await anyio.sleep_until(self.until)


NEVER = Pause(math.inf)
Item = bytes | End | Pause | int


def _own(item: Item) -> Item:
    """Give each wire its own pauses: they remember when they began."""
    return replace(item, until=None) if isinstance(item, Pause) else item


@dataclass
class Seen:
    """A request as the peer's own parser read it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""
    whole: bool = False


class Wire(Stream):
    """A stream whose peer follows a script.

    `incoming` are bytes, one packet each, marks, or WANT_WRITE (a TLS read that wants to write).
    `sends` are answers to `send`: at most so many bytes, WANT_READ, WANT_WRITE, Pause (no room for
    so long) or End.RESET (from now on); then everything is taken. `answers` arrive one by one after
    whole requests.
    """

    def __init__(
        self,
        *incoming: Item,
        sends: tuple[Item, ...] = (),
        answers: tuple[tuple[Item, ...], ...] = (),
        keep: bool = True,
    ) -> None:
        self.incoming: deque[Item] = deque(map(_own, incoming))
        self.sends: deque[Item] = deque(map(_own, sends))
        self.answers = deque(answers)
        self.writes: list[bytes] = []  # what each send took
        self.offers: list[memoryview] = []  # what each send was given
        self.reads: list[memoryview] = []  # where each receive was to write
        self.requests: list[Seen] = []
        self.dialled = ""  # by whom
        self.closed = 0
        self.taken = 0
        self.on_sent: Callable[[bytes], None] = self._parse
        self.tick: Callable[[], None] = lambda: None
        self._later: list[tuple[int, tuple[Item, ...]]] = []
        self._keep = keep
        self._arrived = anyio.Event()
        self._waiting: set[int] = set()
        self._parser: h11.Connection | None = None

    def after(self, count: int, *items: Item) -> None:
        """Let `items` arrive once `count` bytes were taken in all."""
        self._later.append((count, items))

    def feed(self, *items: Item) -> None:
        self.incoming.extend(map(_own, items))
        self._arrived.set()
        self._arrived = anyio.Event()

    def recv_into(self, buffer: memoryview) -> int:
        self._check()
        if self._keep:
            self.reads.append(buffer)
        item = self.incoming[0] if self.incoming else WANT_READ
        if isinstance(item, bytes):
            count = min(len(buffer), len(item))
            buffer[:count] = item[:count]
            self.incoming.popleft()
            if count < len(item):
                self.incoming.appendleft(item[count:])
            return count
        if item is End.RESET:
            raise Disconnected("reset")
        if item is End.EOF:
            return 0
        if isinstance(item, int) and self.incoming:
            self.incoming.popleft()
            return item
        return WANT_READ

    def send(self, data: memoryview) -> int:
        self._check()
        if self._keep:
            self.offers.append(data)
        step = self.sends[0] if self.sends else len(data)
        if step is End.RESET:
            raise Disconnected("broken pipe")
        if isinstance(step, Pause):
            return WANT_WRITE
        assert isinstance(step, int)
        if self.sends:
            self.sends.popleft()
        if step < 0:
            return step
        took = bytes(data[:step]) if self._keep else b""
        count = min(step, len(data))
        self.taken += count
        if self._keep:
            self.writes.append(took)
            self.on_sent(took)
        for late in [late for late in self._later if late[0] <= self.taken]:
            self._later.remove(late)
            self.feed(*late[1])
        return count

    async def wait(self, want: int) -> None:
        self._check()
        assert want not in self._waiting, "two tasks wait for one direction"
        self._waiting.add(want)
        try:
            self.tick()
            await anyio.lowlevel.checkpoint()
            if want == WANT_WRITE:
                if self.sends and isinstance(step := self.sends[0], Pause):
                    await step.over()
                    self.sends.popleft()
                return
            while not self.incoming:
                await self._arrived.wait()
            if isinstance(item := self.incoming[0], Pause):
                await item.over()
                self.incoming.popleft()
            self._check()
        finally:
            self._waiting.discard(want)

    def close(self) -> None:
        self.closed += 1
        self._arrived.set()

    def _check(self) -> None:
        if self.closed:
            raise Disconnected("the connection was closed")

    def _parse(self, took: bytes) -> None:
        """Read requests as a server does; a request that is not HTTP fails the test."""
        if self._parser is None:
            self._parser = h11.Connection(h11.SERVER)
        self._parser.receive_data(took)
        while (event := self._parser.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                headers = {name.decode(): value.decode() for name, value in event.headers}
                self.requests.append(Seen(event.method.decode(), event.target.decode(), headers))
            elif isinstance(event, h11.Data):
                self.requests[-1].body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.requests[-1].whole = True
                assert self._parser.trailing_data[0] == b"", "more bytes than the request has"
                self._parser = None
                if self.answers:
                    self.feed(*self.answers.popleft())
                return


def connection(wire: Stream, timeouts: Timeouts | None = None) -> Connection:
    return Connection(ORIGIN, wire, timeouts or Timeouts())


def pool_of(*wires: Wire, timeouts: Timeouts | None = None) -> Pool:
    """Return a pool that opens these wires, in order; one more would fail the test."""
    waiting = deque(wires)

    async def dial(origin: Origin) -> Stream:
        assert waiting, f"a connection to {origin} that was not expected"
        wire = waiting[0]
        wire.tick()
        await anyio.lowlevel.checkpoint()
        wire.dialled = "by the pool"
        return waiting.popleft()

    return Pool(dial, timeouts or Timeouts())


def answer(body: bytes = b"", *headers: str, status: int = 200, version: str = "1.1") -> bytes:
    """Return an answer with a Content-Length."""
    lines = [f"HTTP/{version} {status} Words", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


class Told(Response):
    """An answer that was read, without a connection that it came from."""

    def __init__(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        self.status = status
        self.headers = Headers([*headers])
        self.body = body
        self.is_early = False


class Blob(Pieces):
    """Pieces of an upload."""

    def __init__(self, *pieces: bytes, pause: float = 0.0, length: int | None = None) -> None:
        self.buffers = [bytearray(piece) for piece in pieces]
        self.length = sum(map(len, pieces)) if length is None else length
        self.given = 0
        self.tick: Callable[[], None] = lambda: None
        self._pause = pause

    async def next(self) -> memoryview:
        self.tick()
        await anyio.sleep(self._pause if self.given else 0)
        if self.given == len(self.buffers):
            return memoryview(b"")
        self.given += 1
        return memoryview(self.buffers[self.given - 1])


class MemoryWire(Stream):
    """A stream over one end of a connection in the harness's network in memory."""

    def __init__(self, end: MemoryEnd) -> None:
        self._end = end
        self._waiting: set[int] = set()

    def recv_into(self, buffer: memoryview) -> int:
        try:
            count = self._end.read_into(buffer)
        except ConnectionError as error:
            raise Disconnected(str(error)) from error
        return WANT_READ if count is None else count

    def send(self, data: memoryview) -> int:
        try:
            count = self._end.write(data)
        except ConnectionError as error:
            raise Disconnected(str(error)) from error
        return WANT_WRITE if count is None else count

    async def wait(self, want: int) -> None:
        assert want not in self._waiting, "two tasks wait for one direction"
        self._waiting.add(want)
        try:
            await (self._end.readable() if want == WANT_READ else self._end.writable())
        finally:
            self._waiting.discard(want)
        if self._end.closed:
            raise Disconnected("the connection was closed")

    def close(self) -> None:
        self._end.close()


@contextmanager
def serving(*scripts: Callable[[socket.socket], object], host: str = "127.0.0.1") -> Iterator[int]:
    """Serve one connection per script on a real socket, in a thread; give the port.

    A script that raises fails the test; a read that nobody answers ends after 10 s.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    failures: list[BaseException] = []
    with socket.create_server((host, 0), family=family) as listener:
        listener.settimeout(10)

        def run() -> None:
            for script in scripts:
                try:
                    accepted, _ = listener.accept()
                    with accepted:
                        accepted.settimeout(10)
                        script(accepted)
                except BaseException as error:
                    failures.append(error)
                    return

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            thread.join(15)
    if failures:
        raise failures[0]


def reset(accepted: socket.socket) -> None:
    """Close with RST instead of FIN."""
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()


def read_head(accepted: socket.socket) -> bytes:
    """Read up to the blank line."""
    head = b""
    while b"\r\n\r\n" not in head:
        got = accepted.recv(65536)
        assert got, f"the client left after {head!r}"
        head += got
    return head


def read_rest(accepted: socket.socket) -> bytes:
    """Read until the client leaves, in whichever way."""
    rest = b""
    try:
        while got := accepted.recv(65536):
            rest += got
    except ConnectionError:
        pass
    return rest


def transport_of(wires: dict[Origin, list[Wire]]) -> Transport:
    """Return a transport whose connections are these, of each origin in turn."""

    def log(*_: object, **__: object) -> None:
        pass

    made = Transport(
        Machine(
            environ={},
            home=None,
            read=lambda path: None,
            chance=lambda: 0.5,
            wall=lambda: 0.0,
            log=log,
        )
    )

    async def dial(by: str, origin: Origin) -> Stream:
        await anyio.lowlevel.checkpoint()
        there = wires[Origin(*origin[:3])]
        there[0].dialled = by
        return there.pop(0)

    made.pool.dial, made.foreign_pool.dial = partial(dial, "at home"), partial(dial, "abroad")
    return made


def plain_registry(host: str = "registry.test") -> Registry:
    """Return a registry that is asked by http and by nobody in particular."""
    return Registry(
        alias="r",
        scheme="http",
        host=host,
        port=80,
        kind="unknown",
        auth_type="anonymous",
        max_concurrent=2,
    )
