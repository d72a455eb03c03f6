"""A stream of the edge whose peer follows a script, and what is sent over it.

`Wire` checks what a real socket would punish: two tasks that wait for the same direction, a request
that is not HTTP. Its peer's own parser is h11.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
import anyio.lowlevel
import h11
import hypothesis  # noqa: F401  (its hook for trio warns when trio is there first)

from _regsync.addresses import Origin
from _regsync.edge import WANT_READ, WANT_WRITE
from _regsync.net.wire import Pieces, Pool, Request, Response, Timeouts

ORIGIN = Origin("http", "registry.test", 80)
GET = Request("GET", "/v2/")
_A_DAY = 86400.0


class End(enum.Enum):
    """How a direction ends."""

    EOF = "eof"
    RESET = "reset"


@dataclass
class Pause:
    """Nothing moves for so many seconds after this is reached; 0 ends a packet."""

    seconds: float
    until: float | None = None

    async def over(self) -> None:
        if self.until is None:
            self.until = anyio.current_time() + self.seconds
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


class Wire:
    """A stream whose peer follows a script.

    `incoming` are bytes, one packet each, marks, or WANT_WRITE (a TLS read that wants to write).
    `sends` are answers to `send_now`: at most so many bytes, WANT_READ, WANT_WRITE, Pause (no room
    for so long) or End.RESET (from now on); then everything is taken. `answers` arrive one by one,
    each after a whole request. `when(count, ...)` lets something arrive after so many bytes.
    """

    def __init__(
        self,
        *incoming: Item,
        sends: tuple[Item, ...] = (),
        answers: tuple[tuple[Item, ...], ...] = (),
    ) -> None:
        self.incoming: deque[Item] = deque(map(_own, incoming))
        self.sends: deque[Item] = deque(map(_own, sends))
        self.answers = deque(answers)
        self.writes: list[bytes] = []  # what each send took
        self.offers: list[memoryview] = []  # what each send was given
        self.requests: list[Seen] = []
        self.is_closed = False
        self.dialled: tuple[Origin, bool] | None = None
        self._later: list[tuple[int, tuple[Item, ...]]] = []
        self._arrived = anyio.Event()
        self._waiting: set[int] = set()
        self._parser: h11.Connection | None = None

    @property
    def taken(self) -> int:
        return sum(map(len, self.writes))

    def when(self, count: int, *items: Item) -> None:
        self._later.append((count, items))

    def feed(self, *items: Item) -> None:
        self.incoming.extend(map(_own, items))
        self._wake()

    def _wake(self) -> None:
        self._arrived.set()
        self._arrived = anyio.Event()

    def recv_into(self, buffer: memoryview) -> int:
        self._check()
        item = self.incoming[0] if self.incoming else WANT_READ
        if isinstance(item, bytes):
            count = min(len(buffer), len(item))
            buffer[:count] = item[:count]
            self.incoming.popleft()
            if count < len(item):
                self.incoming.appendleft(item[count:])
            return count
        if item is End.RESET:
            raise ConnectionResetError(104, "Connection reset by peer")
        if item is End.EOF:
            return 0
        if isinstance(item, int) and self.incoming:
            self.incoming.popleft()
            return item
        return WANT_READ

    def send_now(self, data: memoryview) -> int:
        self._check()
        self.offers.append(data)
        step = self.sends[0] if self.sends else len(data)
        if step is End.RESET:
            raise BrokenPipeError(32, "Broken pipe")
        if isinstance(step, Pause):
            return WANT_WRITE
        assert isinstance(step, int)
        if self.sends:
            self.sends.popleft()
        if step < 0:
            return step
        took = bytes(data[:step])
        self.writes.append(took)
        self._parse(took)
        for late in [late for late in self._later if late[0] <= self.taken]:
            self._later.remove(late)
            self.feed(*late[1])
        return len(took)

    async def wait(self, want: int) -> None:
        self._check()
        assert want not in self._waiting, "two tasks wait for one direction"
        self._waiting.add(want)
        try:
            await anyio.lowlevel.checkpoint()
            if want == WANT_READ:
                await self._until_readable()
            elif self.sends and isinstance(step := self.sends[0], Pause):
                await self._open_until(step)
                self.sends.popleft()
            self._check()
        finally:
            self._waiting.discard(want)

    async def _until_readable(self) -> None:
        while not self.incoming and not self.is_closed:
            await self._arrived.wait()
        if self.incoming and isinstance(item := self.incoming[0], Pause):
            await self._open_until(item)
            self.incoming.popleft()

    async def _open_until(self, pause: Pause) -> None:
        """Wait until a pause is over. Raises OSError if the stream is closed before."""
        async with anyio.create_task_group() as tasks:

            async def leave_when_closed() -> None:
                while not self.is_closed:
                    await self._arrived.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(leave_when_closed)
            await pause.over()
            tasks.cancel_scope.cancel()
        self._check()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _check(self) -> None:
        if self.is_closed:
            raise ConnectionAbortedError("the connection was closed")

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


class Blob(Pieces):
    """Pieces of an upload. `length` is what is declared of them, `tick` is called before each."""

    def __init__(self, *pieces: bytes, pause: float = 0.0, length: int | None = None) -> None:
        self.buffers = [bytearray(piece) for piece in pieces]
        self.length = sum(map(len, pieces)) if length is None else length
        self.given = 0
        self.on_taken = lambda: None
        self.tick: Callable[[], None] = lambda: None
        self._pause = pause
        self._has_ended = False

    async def next(self) -> memoryview:
        self.tick()
        await anyio.sleep(self._pause if self.given else 0)
        if self.given == len(self.buffers):
            assert not self._has_ended, "it is asked for more than it has"
            self._has_ended = True
            return memoryview(b"")
        self.given += 1
        return memoryview(self.buffers[self.given - 1])


def answer(body: bytes = b"", *headers: str, status: int = 200, version: str = "1.1") -> bytes:
    """Return an answer with a Content-Length."""
    lines = [f"HTTP/{version} {status} Words", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def pool_of(*wires: Wire, timeouts: Timeouts | None = None) -> Pool:
    """Return a pool that opens these wires, in order; one more would fail the test."""
    waiting = deque(wires)

    async def dial(origin: Origin) -> Wire:
        await anyio.lowlevel.checkpoint()
        assert waiting, f"a connection to {origin} that was not expected"
        waiting[0].dialled = origin
        return waiting.popleft()

    return Pool(dial, timeouts or Timeouts())


@asynccontextmanager
async def watched(pool: Pool) -> AsyncIterator[Pool]:
    """Yield the pool while its deadlines are watched."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.watch)
        yield pool
        tasks.cancel_scope.cancel()


async def ask(pool: Pool, request: Request = GET, *, limit: int = 10**6) -> Response:
    """Perform an exchange and read its body. What waits for ever fails after a day of its clock."""
    with anyio.fail_after(_A_DAY):
        async with await pool.exchange(ORIGIN, request) as response:
            await response.read(limit)
            return response


async def put(pool: Pool, blob: Blob, *, seconds: float = 60.0) -> Response:
    """Send a body, and read the answer to it."""
    request = Request("PUT", "/v2/app/blobs/uploads/1", body=await blob.next())
    with anyio.fail_after(_A_DAY):
        async with await pool.exchange(ORIGIN, request, pieces=blob, seconds=seconds) as response:
            await response.read(1000)
            return response
