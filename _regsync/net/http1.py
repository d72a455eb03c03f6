"""HTTP/1.1 exchanges over streams: heads and framing by h11, bodies with the fewest copies. Owns:
connections, tunnels, pool, time-outs, answers in the middle of an upload. May not know: registries,
logins, redirects, retries (but an idle connection found dead is replaced). Invariants: I7 (a body
that cannot begin again is sent once), I9 (kept only after a whole exchange). Follows RFC 9112,
docs/design.md section 9, docs/bodies.md section 8."""

from __future__ import annotations

import math
import re
from typing import NamedTuple, Protocol

import anyio.lowlevel
import h11
import h11._abnf as _abnf
import h11._readers as _readers

from _regsync.addresses import Origin
from _regsync.errors import (
    ConnectFailed,
    ContentError,
    Disconnected,
    ProtocolBroken,
    SyncError,
    TimedOut,
    WireError,
)
from _regsync.net.streams import WANT_READ, WANT_WRITE, Stream, Timeouts
from _regsync.text import clean

# As h11 0.16 has them, 64 KiB of blanks in a line take half a minute: no way to split those is
# tried twice here.
_readers.header_field_re = re.compile(
    _abnf.header_field.replace(r":[ \t]*", r":[ \t]*(?![ \t])").encode()
)


_readers.chunk_header_re = re.compile(_abnf.chunk_header.replace(r";.*", r";.*(?<![ \t])").encode())


# One piece of a body. docs/bodies.md section 1: 64 KiB costs 12 % more CPU, 1 MiB four times the
# memory.
PIECE = 256 * 1024


_LONGEST_HEAD = (
    64 * 1024
)  # signed locations and fat challenges exceed h11's 16 KiB (docs/protocol-facts.md section 2.5)


# to keep a connection by more than this costs more than a new one
_WORTH_DRAINING = 64 * 1024


_WORTH_WAITING = 1.0


_LAST_WORDS = 2.0  # how long a peer's refusal may still be in flight after our write failed


class Headers(list[tuple[str, str]]):
    """Response headers; names in lower case, repeated ones kept apart: `get` gives the first."""

    def get(self, name: str) -> str | None:
        return next((value for key, value in self if key == name), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self if key == name]


class Request(NamedTuple):
    """One request to an origin; `target` is path and query, `headers` are without Host and length."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def __repr__(self) -> str:
        return "<Request>"  # it holds secrets


class Pieces(Protocol):
    """The body of an upload, `length` bytes in all: `next` returns a piece, valid until the next
    one is returned, empty at the end, or refuses by raising."""

    length: int

    async def next(self) -> memoryview: ...


class Response:
    """An answer whose head has arrived; its body is read by exactly one of `read` and `read_into`."""

    def __init__(self, connection: Connection, head: h11.Response, method: str) -> None:
        self._connection = connection
        self._tail = memoryview(b"")
        self.status = head.status_code
        self.headers = Headers(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers
        )
        self.body = b""  # as far as `read` has read it
        self.early = False  # whether it came before the whole body of its request was sent
        declared = self.headers.get("content-length")
        coded = self.headers.get("transfer-encoding")
        coding = self.headers.get("content-encoding") or "identity"
        if coding.lower() != "identity" and self.status in (200, 206) and method != "HEAD":
            raise ProtocolBroken(
                f"the answer is in the coding {clean(coding, 40)!r}, which was not asked for (R15)"
            )
        # What the body is said to be long; a transfer coding overrides it (RFC 9112 section 6.3).
        self.length = int(declared) if declared and not coded and method != "HEAD" else None
        closing = "close" in ",".join(self.headers.all("connection")).lower()
        # Both framings at once is a smuggling shape: use the one that h11 uses, then close (R17).
        self.reusable = head.http_version == b"1.1" and not closing and not (coded and declared)
        self.left = (
            self.length if self.status in (200, 206) else None
        )  # still to come; None: h11 frames the body
        if self.left is not None:
            trailing, closed = connection.framing.trailing_data
            self._tail = memoryview(trailing)[: self.left]
            self.reusable = self.reusable and not closed and len(trailing) <= self.left

    async def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` from the body, letting others run; 0 only at its end, Disconnected when cut
        short.
        """
        if self.left is None:
            await anyio.lowlevel.checkpoint()
        while self.left is None and not self._tail:
            event = await self._connection.next_event(self._connection.timeouts.idle)
            if isinstance(event, h11.Data):
                self._tail = memoryview(event.data)
            else:
                self.left = 0
                self.reusable = self.reusable and not self._connection.framing.trailing_data[0]
        if self.left and not self._tail:
            count = await self._connection.fill(buffer[: self.left])
            if not count:
                raise Disconnected(f"the body ended {self.left} bytes too early")
        else:
            count = min(len(buffer), len(self._tail))
            buffer[:count] = self._tail[:count]
            self._tail = self._tail[count:]
        if self.left:
            self.left -= count
        return count

    async def read(self, limit: int) -> bytes:
        """Return the whole body; ContentError above `limit` bytes. An error's body may be short or
        long.
        """
        whole = bytearray()
        failed = self.status >= 400
        scratch = memoryview(bytearray(min(PIECE, limit + 1, (self.length or 16 * 1024) + 1)))
        try:
            while len(whole) <= limit and (count := await self.read_into(scratch)):
                whole += scratch[:count]
        except WireError:
            if not failed:
                raise
            self.reusable = False
        if len(whole) > limit and not failed:
            raise ContentError(f"the answer is longer than {limit} bytes")
        self.body = bytes(whole[:limit])
        return self.body

    async def finish(self) -> bool:
        """Read what little is left; return whether the connection is good for another exchange."""
        if self.reusable and self.left != 0:
            scratch = memoryview(bytearray(8192))
            budget = _WORTH_DRAINING
            try:
                with anyio.move_on_after(_WORTH_WAITING):
                    while self.left != 0 and (self.left or 0) <= budget:
                        budget -= await self.read_into(scratch)
            except WireError:
                return False
        return self.reusable and self.left == 0


class Connection:
    """One stream, one exchange at a time."""

    def __init__(self, origin: Origin, stream: Stream, timeouts: Timeouts) -> None:
        self.origin = origin
        self.timeouts = timeouts
        self.idle_since = 0.0
        self._stream = stream
        self.close = stream.close
        self._scratch = memoryview(bytearray(16 * 1024))
        # What is offered to the stream next, and how many bytes of the body follow it.
        self.piece = memoryview(b"")
        self.left = 0

    def _head(self, request: Request, length: int) -> bytes:
        host = request.target if request.method == "CONNECT" else self.origin.authority
        headers = [("Host", host), *request.headers]
        if length or request.method not in ("GET", "HEAD", "DELETE", "CONNECT"):
            headers.append(("Content-Length", str(length)))
        try:
            head = self.framing.send(
                h11.Request(method=request.method, target=request.target, headers=headers)
            )
            # h11 asks for the length only: a call per piece costs 9 % of a copy's CPU; `_take_off`
            # checks the pieces.
            self.framing.send_with_data_passthrough(h11.Data(data=range(length)))  # type: ignore[arg-type]
            self.framing.send(h11.EndOfMessage())
            return head or b""
        except (
            h11.LocalProtocolError,
            UnicodeError,
        ):  # h11 shows the header: it may be a credential (I6)
            raise ProtocolBroken(
                "a request cannot be written: its URL or a header is malformed"
            ) from None

    async def exchange(
        self, request: Request, first: memoryview, pieces: Pieces | None, seconds: float
    ) -> Response:
        """Send a request, whose body begins with `first`, and return its final answer with the body
        unread. An error of `pieces` is raised as it is, a failed write only when the peer says
        nothing about it."""
        self.framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        # Whether the peer has said anything, and a second piece was read; of both bodies: bytes,
        # and seconds waited.
        self.heard = False
        self.drawn = False
        self._moved = 0
        self._waited = 0.0
        self._answering = anyio.CancelScope()  # it gets its deadline when nothing more is sent
        self._failed: SyncError | None = None  # why that came too early
        self.left = length = len(first) if pieces is None else pieces.length
        self.piece = memoryview(self._head(request, length) + self._take_off(first))
        try:
            self.piece = self.piece[max(0, self._stream.send(self.piece)) :]
            if not self.piece and not self.left:
                self._end(seconds)
        except Disconnected as error:
            self._end(_LAST_WORDS, error)
        if self._answering.deadline < math.inf:
            answer = await self._listen(request.method, seconds)
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(self._send, pieces, seconds)
                answer = await self._listen(request.method, seconds)
                group.cancel_scope.cancel()
        if isinstance(answer, Response):
            return answer
        # What a peer thinks of our certificate tells more than that the write broke.
        raise answer if isinstance(answer, ConnectFailed) else self._failed or answer

    def _take_off(self, piece: memoryview) -> memoryview:
        if len(piece) > self.left or (self.left and not piece):
            raise ContentError("the body does not have its declared length")
        self.left -= len(piece)
        return piece

    def _end(self, seconds: float, failed: SyncError | None = None) -> None:
        """Send nothing more; `seconds` bound what is left of the wait for the answer."""
        self.piece = memoryview(b"")
        self._failed = failed
        self._answering.deadline = anyio.current_time() + seconds

    async def _send(self, pieces: Pieces | None, seconds: float) -> None:
        while True:
            try:
                while self.piece:
                    if (sent := self._stream.send(self.piece)) < 0:
                        await self._wait(sent, self.timeouts.idle)
                    else:
                        self.piece = self.piece[sent:]
                        self._moved += sent
            except WireError as error:
                return self._end(_LAST_WORDS, error)
            if pieces is None or not self.left:
                return self._end(seconds)
            try:
                self.piece = self._take_off(await pieces.next())
                self.drawn = True
            except SyncError as error:
                return self._end(0, error)

    async def _listen(self, method: str, seconds: float) -> Response | WireError:
        """Wait for the head of the one final answer, whenever it comes; interim answers say
        nothing.
        """
        try:
            with self._answering:
                while not isinstance(event := await self.next_event(), h11.Response):
                    await anyio.lowlevel.checkpoint()
                response = Response(self, event, method)
                if self._answering.deadline == math.inf or self._failed is not None:
                    response.early = True
                    response.reusable = False
                return response
        except WireError as error:
            return error
        return TimedOut(f"no answer from {self.origin.authority} within {seconds:g} s")

    def is_alive(self) -> bool:
        """Ask the socket, without waiting, whether an idle peer has left or spoken out of turn."""
        # a fresh TLS 1.3 connection is readable because of its session tickets: only reading tells
        try:
            return self._stream.recv_into(self._scratch[:1]) in (WANT_READ, WANT_WRITE)
        except WireError:
            return False

    async def _wait(self, want: int, seconds: float | None) -> None:
        """Wait for the stream, in a body at most `seconds`; a head's wait (None) is bounded
        elsewhere.
        """
        if (
            seconds is not None and self._waited >= self.timeouts.slow_window
        ):  # waited for this peer alone
            if self._moved < self._waited * self.timeouts.slowest_bytes_per_second:
                raise TimedOut(f"the body moved only {self._moved} bytes in {self._waited:.0f} s")
            self._moved = 0
            self._waited = 0.0
        began = anyio.current_time()
        try:
            with anyio.fail_after(seconds):
                await self._stream.wait(want)
        except TimeoutError as error:
            raise TimedOut(f"{self.origin.authority} moved nothing for {seconds:g} s") from error
        if seconds is not None:
            self._waited += anyio.current_time() - began

    async def fill(self, buffer: memoryview) -> int:
        """Gather what there is (SSL_read gives 16 KiB a call), waiting for the first byte; 0 at the
        end.
        """
        await anyio.lowlevel.checkpoint()
        filled = 0
        while filled < len(buffer):
            try:
                count = self._stream.recv_into(buffer[filled:])
            except Disconnected:
                if not filled:
                    raise
                break  # what has come is good; the next call fails
            if count > 0:
                filled += count
            elif count == 0 or filled:
                break
            else:
                await self._wait(count, self.timeouts.idle)
        self._moved += filled
        return filled

    async def next_event(self, seconds: float | None = None) -> object:
        """Return h11's next event, reading as much as it needs; `seconds` as for `_wait`."""
        try:
            while (event := self.framing.next_event()) is h11.NEED_DATA:
                while (count := self._stream.recv_into(self._scratch)) < 0:
                    await self._wait(count, seconds)
                self.heard = self.heard or count > 0
                if seconds is not None:
                    self._moved += count
                self.framing.receive_data(bytes(self._scratch[:count]))
        except h11.RemoteProtocolError as error:
            if self.framing.trailing_data[1]:
                raise Disconnected("the connection ended before the end of an answer") from error
            if error.error_status_hint == 431:
                raise ProtocolBroken(
                    f"the head of the answer is longer than {_LONGEST_HEAD} bytes"
                ) from error
            broken = f"{self.origin.authority} does not speak HTTP/1.1: {clean(str(error), 150)}"
            raise ProtocolBroken(broken) from error
        return event


def parse_retry_after(value: str | None, wall_now: float) -> float | None:
    """Return seconds from a Retry-After header (RFC 9110 section 10.2.3: a number or a date)."""
    if not (value := (value or "").strip()):
        return None
    if value.isascii() and value.isdigit():
        return float(value[:9])
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - wall_now)
    except (ValueError, OverflowError):
        return None
