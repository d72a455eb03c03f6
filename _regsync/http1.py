"""HTTP/1.1 exchanges over streams: heads and framing by h11, bodies with the fewest copies.

Owns: connections, their keep-alive, the pool, time-outs of an exchange, streaming uploads and the
answer that may come in the middle of one. May not know: registries, authentication, redirects,
retries (the one exception: an idle connection that turns out dead is replaced, since no answer of the
peer was lost). Invariants: I7 (a body that cannot begin again is sent once), I9 (a connection that was
left in any other state than "one whole exchange done" is closed, never reused). Follows RFC 9112,
design.md section 9 "Body path", throughput.md section 8.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import anyio
import anyio.lowlevel
import h11

from _regsync.errors import ContentError, Disconnected, ProtocolBroken, SyncError, TimedOut, WireError, clean
from _regsync.streams import WANT_READ, WANT_WRITE, Origin, Stream, Timeouts

__all__ = ["PIECE", "Connection", "Headers", "Lease", "Pieces", "Pool", "Request", "Response"]

# One piece of a body. throughput.md section 1: 64 KiB costs 12 % more CPU, 1 MiB four times the memory.
PIECE = 256 * 1024
# Signed redirect locations and fat challenges exceed h11's 16 KiB (protocol-facts.md section 2.5).
_LONGEST_HEAD = 64 * 1024
# Draining more than this to save a connection costs more than a new one.
_WORTH_DRAINING = 64 * 1024
# How long a peer's refusal may still be in flight after our write failed.
_LAST_WORDS = 2.0
_IDLE_PER_ORIGIN = 64


class Headers:
    """Response headers; names in lower case, repeated ones kept apart."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in pairs]

    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the first value of `name` (given in lower case)."""
        return next((value for key, value in self._pairs if key == name), default)

    def all(self, name: str) -> list[str]:
        """Return every value of `name`, in order."""
        return [value for key, value in self._pairs if key == name]


@dataclass(frozen=True, slots=True)
class Request:
    """One request to an origin; `target` is path and query, `headers` are without Host and length."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Pieces(Protocol):
    """The body of an upload, piece by piece; `length` bytes in all."""

    length: int

    async def next(self) -> memoryview:
        """Return the next piece, valid until the next call; empty at the end. May refuse by raising."""
        ...

    def rewind(self) -> bool:
        """Begin again with the first piece, if that is still possible."""
        ...


class _Pulse:
    """Says that a body is stalled: less than the slowest rate over a window (design.md section 9).

    Only time spent waiting for this peer counts: a source must not be blamed for a slow target.
    """

    __slots__ = ("_bytes", "_timeouts", "_waited")

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts, self._bytes, self._waited = timeouts, 0, 0.0

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def moved(self, count: int) -> None:
        self._bytes += count
        if self._waited < self._timeouts.slow_window:
            return
        if self._bytes < self._waited * self._timeouts.slowest_bytes_per_second:
            raise TimedOut(f"the body moved only {self._bytes} bytes in {self._waited:.0f} s")
        self._bytes, self._waited = 0, 0.0


class Response:
    """An answer whose head has arrived; its body is read by exactly one of `read` and `read_into`."""

    __slots__ = ("_connection", "_ended", "_tail", "early", "headers", "left", "length", "reusable", "status")

    def __init__(self, connection: Connection, head: h11.Response, method: str) -> None:
        self._connection = connection
        # Whether it came before the whole body of its request was sent.
        self.early = False
        self.status = head.status_code
        self.headers = Headers(head.headers.raw_items())
        self._tail = memoryview(b"")
        self._ended = False
        # None when h11 frames the body; else the bytes still to come.
        self.left: int | None = None
        declared = self.headers.get("content-length")
        self.length = int(declared) if declared is not None and method != "HEAD" else None
        coded = self.headers.get("transfer-encoding") is not None
        closing = "close" in ",".join(self.headers.all("connection")).lower()
        # Both framings at once is a smuggling shape: use the one that h11 uses, then close (R17).
        self.reusable = (
            head.http_version == b"1.1" and not closing and not (coded and self.length is not None)
        )
        if self.length is not None and not coded and self.status in (200, 206):
            trailing, closed = connection.take_trailing()
            self.left = self.length
            self._tail = memoryview(trailing)
            if len(trailing) > self.length or closed:
                self.reusable = False
            self._tail = self._tail[: self.length]

    async def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` from the body; 0 only at its end. Disconnected when the body is cut short.

        Called once a piece, it lets other tasks run once a piece (throughput.md trap 1).
        """
        if self.left is None:
            return await self._read_framed(buffer)
        wanted = min(len(buffer), self.left)
        if not wanted:
            self._ended = True
            return 0
        if self._tail:
            count = min(wanted, len(self._tail))
            buffer[:count] = self._tail[:count]
            self._tail = self._tail[count:]
        else:
            count = await self._connection.fill(buffer[:wanted])
            if not count:
                raise Disconnected(f"the body ended {self.left} bytes too early")
        self.left -= count
        self._ended = not self.left
        self._connection.pulse.moved(count)
        return count

    async def _read_framed(self, buffer: memoryview) -> int:
        """Read a body that has no usable Content-Length through h11."""
        while not self._tail and not self._ended:
            event = await self._connection.next_event(self._connection.idle_limit)
            if isinstance(event, h11.Data):
                self._tail = memoryview(bytes(event.data))
            elif isinstance(event, (h11.EndOfMessage, h11.PAUSED)):
                self._ended = True
                if self._connection.take_trailing()[0]:
                    self.reusable = False
            else:
                raise Disconnected("the connection ended in the middle of a body")
        count = min(len(buffer), len(self._tail))
        buffer[:count] = self._tail[:count]
        self._tail = self._tail[count:]
        self._connection.pulse.moved(count)
        await anyio.lowlevel.checkpoint()
        return count

    async def read(self, limit: int) -> bytes:
        """Return the whole body; ProtocolBroken when it is longer than `limit` bytes.

        The body of an error may be cut short or too long: what came is returned, it is still that error.
        """
        whole = bytearray()
        failed = self.status >= 400
        if self.length is not None and self.length > limit and not failed:
            raise ProtocolBroken(f"the answer is {self.length} bytes long, more than {limit} are not read")
        scratch = memoryview(bytearray(min(PIECE, limit + 1, (self.length or 16 * 1024) + 1)))
        try:
            while count := await self.read_into(scratch):
                whole += scratch[:count]
                if len(whole) > limit:
                    if failed:
                        return bytes(whole[:limit])
                    raise ProtocolBroken(f"the answer is longer than {limit} bytes")
        except WireError:
            if not failed:
                raise
            self.reusable = False
        return bytes(whole)

    async def finish(self) -> bool:
        """Read what little is left; return whether the connection is good for another exchange."""
        if not self.reusable:
            return False
        scratch = memoryview(bytearray(8192))
        budget = _WORTH_DRAINING
        try:
            while not self._ended and (self.left or 0) <= budget and budget > 0:
                budget -= await self.read_into(scratch)
        except WireError:
            return False
        return self._ended and self.reusable


class Connection:
    """One stream, one exchange at a time."""

    def __init__(self, origin: Origin, stream: Stream, timeouts: Timeouts) -> None:
        self.origin, self.idle_since = origin, 0.0
        # Whether the peer has said anything in the present exchange.
        self.heard = False
        self._stream, self._timeouts = stream, timeouts
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        self._scratch = memoryview(bytearray(16 * 1024))
        self.pulse = _Pulse(timeouts)

    def close(self) -> None:
        self._stream.close()

    def is_alive(self) -> bool:
        """Ask the socket, without waiting, whether an idle peer has left or spoken out of turn.

        A fresh TLS 1.3 connection is readable because of its session tickets: only reading tells.
        """
        try:
            return self._stream.recv_into(self._scratch[:1]) in (WANT_READ, WANT_WRITE)
        except WireError:
            return False

    @property
    def idle_limit(self) -> float:
        """How long a body may stand still, in seconds."""
        return self._timeouts.idle

    async def _wait(self, want: int, seconds: float | None) -> None:
        began = anyio.current_time()
        try:
            with anyio.fail_after(seconds):
                await self._stream.wait(want)
        except TimeoutError as error:
            raise TimedOut(f"{self.origin.authority} moved nothing for {seconds:g} s") from error
        self.pulse.waited(anyio.current_time() - began)

    async def fill(self, buffer: memoryview) -> int:
        """Read what there is, up to the buffer, after one wait at most; 0 at the end of the stream.

        SSL_read gives 16 KiB a call, so whole pieces are gathered before they are hashed and sent.
        """
        await anyio.lowlevel.checkpoint()
        receive = self._stream.recv_into
        while (count := receive(buffer)) < 0:
            await self._wait(count, self._timeouts.idle)
        filled = count
        while count > 0 and filled < len(buffer):
            if (count := receive(buffer[filled:])) > 0:
                filled += count
        return filled

    async def next_event(self, seconds: float | None = None) -> object:
        """Return h11's next event, reading as much as it needs; `seconds` bound each single wait."""
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                while (count := self._stream.recv_into(self._scratch)) < 0:
                    await self._wait(count, seconds)
                self.heard = self.heard or count > 0
                self._h11.receive_data(bytes(self._scratch[:count]))
        except h11.RemoteProtocolError as error:
            raise self._not_http(error) from error
        return event

    def _not_http(self, error: h11.RemoteProtocolError) -> WireError:
        text = clean(str(error), 150)
        if any(
            said in text
            for said in ("peer unexpectedly closed", "peer closed connection", "ConnectionClosed")
        ):
            return Disconnected("the connection ended in the middle of an answer")
        if "too long" in text or "too much" in text:
            return ProtocolBroken(f"the head of the answer is longer than {_LONGEST_HEAD} bytes")
        return ProtocolBroken(f"{self.origin.authority} does not speak HTTP/1.1: {text}")

    def take_trailing(self) -> tuple[bytes, bool]:
        """Return what h11 has buffered behind the head, and whether the peer has ended the stream."""
        return self._h11.trailing_data

    async def _send(self, data: memoryview) -> None:
        while data:
            if (sent := self._stream.send(data)) < 0:
                await self._wait(sent, self._timeouts.idle)
            else:
                self.pulse.moved(sent)
                data = data[sent:]

    def _head(self, request: Request, length: int) -> bytes:
        headers = [("Host", self.origin.authority), *request.headers]
        if length or request.method not in ("GET", "HEAD", "DELETE"):
            headers.append(("Content-Length", str(length)))
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        self.pulse, self.heard = _Pulse(self._timeouts), False
        try:
            return (
                self._h11.send(h11.Request(method=request.method, target=request.target, headers=headers))
                or b""
            )
        except h11.LocalProtocolError as error:
            raise ProtocolBroken(f"a request cannot be written: {clean(str(error), 150)}") from error

    async def read_head(self, method: str, seconds: float | None) -> Response:
        """Wait for the final answer's head; interim answers say nothing."""
        try:
            with anyio.fail_after(seconds):
                while True:
                    event = await self.next_event()
                    if isinstance(event, h11.Response):
                        return Response(self, event, method)
                    if not isinstance(event, h11.InformationalResponse):
                        raise Disconnected("the connection ended before an answer")
        except TimeoutError as error:
            raise TimedOut(f"no answer from {self.origin.authority} within {seconds:g} s") from error

    async def exchange(self, request: Request, seconds: float) -> Response:
        """Send a request whose body is in memory, in one write, and wait for the head of its answer."""
        data = self._head(request, len(request.body)) + (self._h11.send(h11.Data(data=request.body)) or b"")
        self._h11.send(h11.EndOfMessage())
        try:
            await self._send(memoryview(data))
        except Disconnected as error:
            # A peer that refuses says so before it closes.
            try:
                return await self.read_head(request.method, _LAST_WORDS)
            except WireError:
                raise error from None
        return await self.read_head(request.method, seconds)

    async def upload(self, request: Request, first: memoryview, pieces: Pieces, seconds: float) -> Response:
        """Stream `pieces` (the first of which is in hand) and return the final answer.

        The answer may come before the last piece: it is then `early` and the connection is not reusable.
        While pieces are sent, one reader waits on the same socket. An error of `pieces` itself is raised
        as it is; a failed write is raised only when the peer says nothing about it.
        """
        head = self._head(request, pieces.length)
        self._h11.send_with_data_passthrough(h11.Data(data=first))  # type: ignore[arg-type]
        lead = memoryview(head + bytes(first))
        try:
            sent = self._stream.send(lead)
        except Disconnected:
            # The longer way meets the same failure, and hears the peer before it raises.
            sent = 0
        if sent == len(lead) and len(first) == pieces.length:
            self._h11.send(h11.EndOfMessage())
            return await self.read_head(request.method, seconds)
        answer = _Answer()
        failure: BaseException | None = None

        async def listen() -> None:
            await answer.listen(self, request.method)
            sending.cancel()

        sending = anyio.CancelScope()
        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            try:
                with sending:
                    await self._send_rest(lead[max(sent, 0) :], pieces.length - len(first), pieces, answer)
            except SyncError as error:
                failure = error
            else:
                with anyio.move_on_after(_LAST_WORDS if answer.write_error else seconds):
                    await answer.arrived.wait()
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return answer.conclude(self.origin, seconds)

    async def _send_rest(self, lead: memoryview, left: int, pieces: Pieces, answer: _Answer) -> None:
        piece = lead
        while True:
            try:
                await self._send(piece)
            except WireError as error:
                answer.write_error = error
                return
            # Nothing is awaited between the last byte and `complete`: the answer may be there already.
            piece = await pieces.next() if left else memoryview(b"")
            left -= len(piece)
            try:
                if not piece:
                    self._h11.send(h11.EndOfMessage())
                    answer.complete = True
                    return
                # h11 refuses more than the declared length; the memory itself goes out uncopied.
                self._h11.send_with_data_passthrough(h11.Data(data=piece))  # type: ignore[arg-type]
            except h11.LocalProtocolError as error:
                raise ContentError("the body does not have its declared length") from error


class _Answer:
    """What is known of the answer to an upload while its body is being sent."""

    __slots__ = ("arrived", "complete", "error", "response", "write_error")

    def __init__(self) -> None:
        self.arrived = anyio.Event()
        self.response: Response | None = None
        self.error: WireError | None = None
        self.write_error: WireError | None = None
        self.complete = False

    async def listen(self, connection: Connection, method: str) -> None:
        """Read the one final answer, whenever it comes."""
        try:
            self.response = await connection.read_head(method, None)
        except WireError as error:
            self.error = error
        if self.response is not None and not self.complete:
            self.response.early, self.response.reusable = True, False
        self.arrived.set()

    def conclude(self, origin: Origin, seconds: float) -> Response:
        """Return the answer, or raise what stood in its way: the write's failure before the read's."""
        if self.response is not None:
            return self.response
        if error := self.write_error or self.error:
            raise error
        raise TimedOut(f"no answer from {origin.authority} within {seconds:g} s after the body")


class Pool:
    """Idle connections by origin: last in, first out, bounded and aged. It bounds nothing in use (I8)."""

    def __init__(self, dial: Callable[[Origin], Awaitable[Stream]], timeouts: Timeouts) -> None:
        self._dial, self.timeouts = dial, timeouts
        self._idle: dict[Origin, list[Connection]] = {}
        self.opened = 0

    def __repr__(self) -> str:
        idle = ", ".join(f"{origin}: {len(found)} idle" for origin, found in self._idle.items() if found)
        return f"<Pool opened={self.opened} [{idle}]>"

    async def connect(self, origin: Origin) -> Connection:
        """Open a new connection."""
        stream = await self._dial(origin)
        self.opened += 1
        return Connection(origin, stream, self.timeouts)

    def take(self, origin: Origin) -> Connection | None:
        """Take the idle connection that was used last and still lives; close those that do not."""
        idle = self._idle.get(origin, [])
        while idle:
            connection = idle.pop()
            fresh = anyio.current_time() - connection.idle_since < self.timeouts.idle_connection
            if fresh and connection.is_alive():
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose last exchange ended in order; the oldest goes when there are too many."""
        connection.idle_since = anyio.current_time()
        idle = self._idle.setdefault(connection.origin, [])
        idle.append(connection)
        if len(idle) > _IDLE_PER_ORIGIN:
            idle.pop(0).close()

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    def lease(self, origin: Origin) -> Lease:
        """Return a context in which exchanges with `origin` use one connection after another's answer."""
        return Lease(self, origin)


class Lease:
    """The use of one connection at a time for exchanges that belong together.

    A PUT goes on the connection that answered its POST; a connection that turns out dead before it gave
    any answer is replaced once.
    """

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self._pool, self.origin = pool, origin
        self._connection: Connection | None = None
        self._response: Response | None = None

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if await self._settle():
            assert self._connection is not None
            self._pool.give_back(self._connection)
            self._connection = None

    async def _settle(self) -> bool:
        """Bring the connection to rest: True when it may serve again, else it is closed."""
        connection, response = self._connection, self._response
        if connection is None:
            return False
        good = False
        try:
            good = response is not None and await response.finish()
        finally:
            if not good:
                connection.close()
                self._connection = None
        self._response = None
        return good

    async def _ready(self) -> tuple[Connection, bool]:
        """Return a connection at rest, and whether it has served before."""
        if await self._settle():
            assert self._connection is not None
            if self._connection.is_alive():
                return self._connection, True
            self._connection.close()
        self._connection = self._pool.take(self.origin)
        if self._connection is not None:
            return self._connection, True
        self._connection = await self._pool.connect(self.origin)
        return self._connection, False

    async def _replace(self) -> Connection:
        assert self._connection is not None
        self._connection.close()
        self._connection = await self._pool.connect(self.origin)
        return self._connection

    async def exchange(self, request: Request, seconds: float | None = None) -> Response:
        """Do one exchange with a body in memory; `seconds` bound the wait for the answer's head."""
        seconds = self._pool.timeouts.head if seconds is None else seconds
        connection, served = await self._ready()
        try:
            self._response = await connection.exchange(request, seconds)
        except Disconnected:
            if not served or connection.heard:
                raise
            self._response = await (await self._replace()).exchange(request, seconds)
        return self._response

    async def upload(self, request: Request, pieces: Pieces, seconds: float) -> Response:
        """Stream a body; `seconds` bound the wait for the answer after its last piece."""
        first = await pieces.next()
        connection, served = await self._ready()
        try:
            self._response = await connection.upload(request, first, pieces, seconds)
        except Disconnected as error:
            if not served or connection.heard or error.side is not None or not pieces.rewind():
                raise
            first = await pieces.next()
            self._response = await (await self._replace()).upload(request, first, pieces, seconds)
        return self._response
