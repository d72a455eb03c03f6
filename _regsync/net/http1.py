"""One HTTP/1.1 exchange at a time over one stream.

Owns: requests and responses, the states of a connection, bodies in both directions, their
time-outs, a response that arrives in the middle of an upload.
May not know: registries, logins, redirects, retries, which connection is used.
Invariants: I9 (a connection is reusable only if its exchange ended in order). Nothing is read past
the end of a body of known length.
Follows: RFC 9112, docs/design.md section 9, docs/bodies.md section 8. h11 parses a response except
for a body of known length, which is read from the stream directly into the caller's memory.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import NamedTuple, Protocol

import anyio.lowlevel
import h11

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
from _regsync.text import printable

# Bodies move in pieces of so many bytes. Half the size costs more CPU, twice the size more memory
# (docs/bodies.md sections 1 and 6).
PIECE = 256 * 1024

# The size of the pieces of the first few bodies that move at the same time.
LARGE_PIECE = 512 * 1024

# How many bodies have large pieces at the same time. That takes 4 MiB more than small pieces.
_MOST_LARGE = 16

# Bytes per read if h11 parses them: heads and chunked bodies.
_SCRATCH = 16 * 1024

# The most bytes of a response's head. Signed locations and long challenges exceed h11's own limit
# of 16 KiB (docs/protocol-facts.md section 2.5).
_LONGEST_HEAD = 64 * 1024

# The most blanks in a row in a head, in a line of a chunked body or in its trailers. The time that
# h11's regular expressions take grows with the square: 3 ms for 1 KiB, half a minute for 64 KiB.
_MOST_BLANKS = 1024

# The rest of a body is read, to reuse the connection, only if that takes at most so many bytes and
# seconds. Beyond that a new connection costs less.
_WORTH_DRAINING = 64 * 1024
_WORTH_WAITING = 1.0

# A Retry-After in seconds is cut to so many digits (31 years), because more could be infinite.
_MOST_DIGITS = 9

# How many seconds to wait for the response after a write has failed. A peer that refuses a request
# may close its side first.
_LAST_WORDS = 2.0


class State(enum.Enum):
    """The state of a connection.

    from       to         when
    IDLE       SENDING    an exchange begins
    SENDING    WAITING    the whole request has been written to the stream
    SENDING    STOPPED    a write has failed, or the source of the body has raised an error
    SENDING    ANSWERED   the head of the response arrives too soon: the response is "early"
    STOPPED    ANSWERED   the head of the response arrives all the same: it is "early" too
    WAITING    ANSWERED   the head of the response arrives
    ANSWERED   IDLE       the response was read to its end, and the connection is reusable
    any        CLOSED     otherwise: an error, a time-out, a cancellation, not reusable

    Interim responses (1xx) do not change the state. An early response never leads to IDLE, because
    the peer would take the rest of the body for the next request.
    """

    IDLE = "idle"
    SENDING = "sending"
    STOPPED = "stopped"
    WAITING = "waiting"
    ANSWERED = "answered"
    CLOSED = "closed"


class Headers(dict[str, str]):
    """The headers of a response: values by lower-case name, the first of a repeated header."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        super().__init__(reversed(pairs))
        self._pairs = pairs

    def all(self, name: str) -> list[str]:
        """Return all values of a header, in order."""
        return [value for key, value in self._pairs if key == name]


# A header of a request: name and value.
Header = tuple[str, str]


class Request(NamedTuple):
    """One request to an origin.

    `target` is the path with the query. `headers` exclude Host and Content-Length.
    """

    method: str
    target: str
    headers: tuple[Header, ...] = ()
    body: bytes = b""

    def __repr__(self) -> str:
        return "<Request>"  # it holds secrets


class Pieces(Protocol):
    """The source of a request's body, which has `length` bytes."""

    length: int

    async def next(self) -> memoryview:
        """Return the next piece, which is valid until the next call. It is empty at the end.

        Raises SyncError if the body cannot be read.
        """
        ...

    def write_to(self, socket: int) -> int:
        """Copy the next bytes from a file into a plain socket, within the kernel. Returns how many
        bytes the socket took, or 0 if the caller must use `next` instead.

        Raises OSError if the socket fails, SyncError like `next`.
        """
        return 0

    async def pour(self, write: Callable[[memoryview], None]) -> int:
        """Pass the next pieces to `write` in a worker thread, until reading would have to wait.
        Returns how many bytes that were, or 0 if the caller must use `next` instead.

        Raises the errors of `write`, and SyncError like `next`.
        """
        return 0


class Buffers:
    """Memory for the bodies that are read. The first few bodies get large pieces, more bodies small
    pieces.
    """

    def __init__(self) -> None:
        self._large_lent = 0  # how many large pieces are in use

    @contextmanager
    def lending(self, size: int) -> Iterator[memoryview]:
        """Yield memory of at most `size` bytes, for one piece of a body of that size."""
        if size <= PIECE or self._large_lent == _MOST_LARGE:
            yield memoryview(bytearray(min(PIECE, size)))
            return
        self._large_lent += 1
        try:
            yield memoryview(bytearray(min(LARGE_PIECE, size)))
        finally:
            self._large_lent -= 1


class Response:
    """A response whose head has arrived. Its body is read by either `read` or `read_into`."""

    def __init__(self, connection: Connection, head: h11.Response, method: str) -> None:
        self._connection = connection
        self.came_at = anyio.current_time()  # when the head arrived, in the event loop's time
        self.status = head.status_code
        self.headers = Headers(
            [
                (name.decode("latin-1").lower(), value.decode("latin-1"))
                for name, value in head.headers.raw_items()
            ]
        )
        # The body, as far as `read` has read it.
        self.body = b""
        # Whether the response arrived before the whole body of its request was sent.
        self.is_early = False

        has_content = method != "HEAD" and self.status not in (204, 304)
        if has_content and self.status in (200, 206):
            _check_not_coded(self.headers)

        # The length of the body by its header, None if it has none. A transfer coding overrides the
        # header (RFC 9112 section 6.3).
        self.length: int | None = None
        if method != "HEAD" and not self.headers.get("transfer-encoding"):
            declared = self.headers.get("content-length")
            self.length = int(declared) if declared else None

        # How many bytes of the body `read_into` has not returned yet. None while h11 parses the
        # body, until `_parse_more` sets 0 at its end. h11 parses a body of unknown length, and the
        # body of an error, because h11 returns the beginning of a truncated body.
        self.bytes_left: int | None = None
        if not has_content or self.length == 0:
            self.bytes_left = 0
        elif self.status in (200, 206):
            self.bytes_left = self.length

        # Bytes of the body that have arrived but were not returned to the caller yet.
        self._unreturned = memoryview(b"")
        # Whether the connection can be reused after this response, as far as is known.
        self.is_reusable = head.http_version == b"1.1" and _keeps_connection(self.headers)
        if self.bytes_left is not None:
            # These bytes were read together with the head. More bytes than the body has belong to
            # no request.
            unread = connection.unread()
            if unread:
                self._unreturned = memoryview(unread)[: self.bytes_left]
                self.is_reusable = self.is_reusable and len(unread) <= self.bytes_left

    async def read_into(self, buffer: memoryview) -> int:
        """Read bytes of the body into `buffer`. Returns their number, 0 at the end of the body.

        This is a checkpoint. Raises Disconnected if the body is truncated.
        """
        if self.bytes_left is None:
            await self._parse_more()

        if self._unreturned:
            count = min(len(buffer), len(self._unreturned))
            buffer[:count] = self._unreturned[:count]
            self._unreturned = self._unreturned[count:]
        elif self.bytes_left:
            count = await self._connection.fill(buffer[: self.bytes_left])
            if not count:
                raise Disconnected(f"the body ended {self.bytes_left} bytes too early")
        else:
            return 0

        if self.bytes_left is not None:
            self.bytes_left -= count
        return count

    def read_now(self, buffer: memoryview) -> int:
        """Read the bytes of the body that have arrived into `buffer`, for a worker thread. Returns
        their number, or 0 if the caller must use `read_into` instead.
        """
        if not self.bytes_left or self._unreturned:
            return 0
        # If no bytes have arrived, the number is negative (WANT_READ or WANT_WRITE).
        count = max(self._connection.fill_now(buffer[: self.bytes_left]), 0)
        self.bytes_left -= count
        return count

    async def _parse_more(self) -> None:
        """Fill `_unreturned` with the next part of the body from h11, or set `bytes_left` to 0 at
        the end of the body.
        """
        # h11 may have the next part already. Then the loop below has no checkpoint.
        await anyio.lowlevel.checkpoint()
        while self.bytes_left is None and not self._unreturned:
            event = await self._connection.next_event()
            if isinstance(event, h11.Data):
                self._unreturned = memoryview(event.data)
            else:  # the end of the body; for a truncated body `next_event` raises an error
                self.bytes_left = 0
                has_more = bool(self._connection.unread())
                self.is_reusable = self.is_reusable and not has_more

    async def read(self, limit: int) -> bytes:
        """Return the whole body. Raises ContentError if it is longer than `limit` bytes.

        The body of an error (status 400 and above) may be too long or truncated. Then its beginning
        is returned. A second call returns the same bytes.
        """
        if self.bytes_left == 0:
            return self.body

        is_error = self.status >= 400
        body = bytearray()
        expected = _SCRATCH if self.length is None else self.length
        scratch = memoryview(bytearray(min(PIECE, limit + 1, expected + 1)))
        try:
            # One byte more than `limit` shows that the body is too long.
            while self.bytes_left != 0 and len(body) <= limit:
                count = await self.read_into(scratch)
                body += scratch[:count]
        except WireError:
            if not is_error:
                raise
            self.is_reusable = False

        if len(body) > limit and not is_error:
            raise ContentError(f"the answer is longer than {limit} bytes")
        self.body = bytes(body[:limit])
        return self.body

    async def finish(self) -> bool:
        """End the exchange, after reading the unread bytes of the body if they are few. Returns
        whether the connection can be reused.
        """
        if self.is_reusable and self.bytes_left != 0:
            await self._drain()
        if not self.is_reusable or self.bytes_left != 0:
            return False
        self._connection.state = State.IDLE
        return True

    async def _drain(self) -> None:
        """Read the rest of the body, as far as that is worth the time."""
        scratch = memoryview(bytearray(8192))
        budget = _WORTH_DRAINING  # bytes
        try:
            with anyio.move_on_after(_WORTH_WAITING):
                # If the length is unknown (None), read until the budget is used up.
                while self.bytes_left != 0 and (self.bytes_left or 0) <= budget:
                    budget -= await self.read_into(scratch)
        except WireError:
            self.is_reusable = False


def _check_not_coded(headers: Headers) -> None:
    """Raise ProtocolBroken if the content has a coding: no request asks for one (R15)."""
    coding = headers.get("content-encoding")
    if coding is None or coding.lower() in ("", "identity"):
        return
    raise ProtocolBroken(
        f"the answer has Content-Encoding {printable(coding, 40)!r}, which was not asked for"
    )


def _keeps_connection(headers: Headers) -> bool:
    """Report whether another request may follow this response on its connection.

    A response with both a length and a transfer coding may hide a second response. h11 obeys the
    coding, and the connection is not used again (R17).
    """
    if headers.get("transfer-encoding") and headers.get("content-length"):
        return False
    if "connection" not in headers:
        return True
    return "close" not in ",".join(headers.all("connection")).lower()


class _Outgoing:
    """A request that is being written to the stream."""

    def __init__(self, length: int) -> None:
        # The bytes to write next: first the head with the first piece of the body, then each piece.
        self.offered = memoryview(b"")
        # How many bytes of the body come after `offered`.
        self.bytes_not_offered = length
        # Whether the source has returned a second piece. The first one is gone by then, so the
        # request cannot be repeated (I7).
        self.is_past_first = False
        # Why the request was not written to its end; None if it was, or still is being written.
        self.error: SyncError | None = None

    def offer(self, piece: memoryview, head: bytes = b"") -> None:
        """Set the bytes to write next: `head` and a piece of the body. Raises ContentError if the
        body is shorter or longer than its declared length.
        """
        if len(piece) > self.bytes_not_offered or (self.bytes_not_offered and not piece):
            raise ContentError("the body does not have its declared length")
        self.bytes_not_offered -= len(piece)
        self.offered = memoryview(head + piece) if head else piece


class _Pace:
    """How fast the peer sends and receives the bodies of an exchange."""

    def __init__(self) -> None:
        # Bytes that moved in both directions, and seconds spent waiting for this peer, since the
        # last check.
        self.moved = 0
        self.waited = 0.0

    def fail_if_slow(self, timeouts: Timeouts) -> None:
        """Check the pace once for every `slow_window` seconds of waiting. Raises TimedOut if fewer
        bytes moved than `slowest_bytes_per_second` demands.
        """
        if self.waited < timeouts.slow_window:
            return
        if self.moved < self.waited * timeouts.slowest_bytes_per_second:
            raise TimedOut(f"only {self.moved} bytes of the body moved in {self.waited:.0f} s")
        self.moved = 0
        self.waited = 0.0


class Connection:
    """A stream to an origin, and the exchange that is using it."""

    def __init__(self, origin: Origin, stream: Stream, timeouts: Timeouts) -> None:
        self.origin = origin
        self.timeouts = timeouts
        self.state = State.IDLE
        # When the connection was last taken from the pool, waited for, or sent a whole request, in
        # the event loop's time.
        self.used_at = anyio.current_time()
        self._stream = stream
        self._authority = origin.authority
        # Memory for reading heads, and bodies that h11 parses.
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._begin(0)

    def _begin(self, length: int) -> None:
        """Reset the state of the last exchange. The next request has a body of `length` bytes."""
        # A new h11 connection for each exchange costs no more than `start_next_cycle`.
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        # Bytes that have been read but were not passed to h11 yet.
        self._arrived = b""
        # Whether any byte of a response has arrived.
        self._has_received = False
        self._outgoing = _Outgoing(length)
        self._pace = _Pace()
        # The time by which the head of the response must arrive. It is infinite until the request
        # has been written.
        self._head_deadline = math.inf
        # The scope of the wait for that head, if the wait has begun.
        self._head_scope: anyio.CancelScope | None = None

    def close(self) -> None:
        """Close the stream at once. Tasks that wait for it get Disconnected."""
        self.state = State.CLOSED
        self._stream.close()

    def is_alive(self) -> bool:
        """Report, without waiting, whether the peer has neither closed an idle connection nor sent
        anything on it.
        """
        # A fresh connection may be readable because of TLS 1.3 session tickets. Only a read shows
        # whether there is more.
        try:
            return self._stream.recv_into(self._scratch[:1]) in (WANT_READ, WANT_WRITE)
        except WireError:
            return False

    def can_repeat(self) -> bool:
        """Report whether the failed request may be repeated on another connection (I7)."""
        return not self._has_received and not self._outgoing.is_past_first

    def unread(self) -> bytes:
        """Return the bytes that have arrived after h11's last event."""
        trailing, _ = self._framing.trailing_data
        return trailing + self._arrived

    async def exchange(
        self, request: Request, first: memoryview, pieces: Pieces | None, seconds: float
    ) -> Response:
        """Send a request and return its final response, with the body unread.

        The request's body is `first`, followed by the rest of `pieces` if there are any. The head
        of the response must arrive within `seconds` after the request has been written.

        Raises the errors of `pieces`, ContentError if the body does not have its declared length,
        and WireError if the connection fails. After a failed write, a response is returned if one
        arrives.
        """
        self._begin(len(first) if pieces is None else pieces.length)
        outgoing = self._outgoing
        head = self._format_head(request, outgoing.bytes_not_offered)
        self.state = State.SENDING
        outgoing.offer(first, head)
        self._send_at_once(seconds)

        if self.state is State.SENDING:
            # Send the rest while waiting for the response, because the peer may refuse the request
            # before it has received all of it.
            async with anyio.create_task_group() as group:
                group.start_soon(self._send, pieces, seconds)
                answer = await self._await_head(request.method)
                group.cancel_scope.cancel()
        else:
            answer = await self._await_head(request.method)

        if isinstance(answer, Response):
            return answer
        # An alert about our certificate says more than the write that failed because of it.
        if isinstance(answer, ConnectFailed):
            raise answer
        raise outgoing.error or answer or self._timed_out(seconds)

    def _timed_out(self, seconds: float) -> TimedOut:
        return TimedOut(
            f"no answer from {self.origin.authority} within {seconds:g} s",
            address=(self.origin.host, self.origin.port),
            brief=f"no answer within {seconds:g} s",
        )

    def _format_head(self, request: Request, length: int) -> bytes:
        """Return the head of a request with a body of `length` bytes, and prepare h11 for its
        response. Raises ProtocolBroken if the head has characters that it must not have.

        h11 gets only the method, which decides how it parses the response. If h11 also checked and
        wrote the headers, that would take 4 % of a request's CPU, because most requests have the
        same headers. If it framed each piece of a body, that would take 9 % of a copy's CPU.
        """
        method = request.method
        host = request.target if method == "CONNECT" else self._authority
        _check_written(request.target + host, is_one_word=True)
        headers = _lines_of(request.headers)
        if length or method not in ("GET", "HEAD", "DELETE", "CONNECT"):
            headers += f"Content-Length: {length}\r\n"
        self._framing.send(_request_by(method))
        return f"{method} {request.target} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode(
            "ascii"
        )

    def _send_at_once(self, seconds: float) -> None:
        """Write as much as the stream takes without waiting, which is nearly always all."""
        outgoing = self._outgoing
        try:
            sent = self._stream.send(outgoing.offered)
        except Disconnected as error:
            self._stop_sending(self.used_at, _LAST_WORDS, error)
            return
        if sent > 0:
            outgoing.offered = outgoing.offered[sent:]
        if not outgoing.offered and not outgoing.bytes_not_offered:
            self._stop_sending(self.used_at, seconds)

    async def _send(self, pieces: Pieces | None, seconds: float) -> None:
        """Write the rest of a request, while `_await_head` waits for the response."""
        outgoing = self._outgoing
        try:
            while True:
                try:
                    await self._write_offered(pieces)
                except WireError as error:
                    # The peer may have sent a response before it closed its side.
                    self._stop_sending(anyio.current_time(), _LAST_WORDS, error)
                    return
                if pieces is None or not outgoing.bytes_not_offered:
                    self._stop_sending(anyio.current_time(), seconds)
                    return
                outgoing.offer(await pieces.next())
                outgoing.is_past_first = True
        except SyncError as error:
            # The source of the body has failed. There is no response to wait for.
            self._stop_sending(anyio.current_time(), 0, error)

    async def _write_offered(self, pieces: Pieces | None) -> None:
        """Write the offered bytes, and then the next part of the body if it is in a file: that part
        is copied within the kernel (docs/bodies.md section 2).
        """
        outgoing = self._outgoing
        while outgoing.offered:
            sent = self._stream.send(outgoing.offered)
            if sent < 0:  # WANT_READ or WANT_WRITE
                await self._wait_in_body(sent)
            else:
                outgoing.offered = outgoing.offered[sent:]
                self._pace.moved += sent
        while pieces is not None and (sent := self._stream.send_file(pieces.write_to)):
            if sent < 0:
                await self._wait_in_body(sent)
                continue
            outgoing.bytes_not_offered -= sent
            outgoing.is_past_first = True
            self._pace.moved += sent
            await anyio.lowlevel.checkpoint()

    def _stop_sending(self, now: float, seconds: float, error: SyncError | None = None) -> None:
        """Write no more of the request: it is complete, or `error` is why it is not. The head of
        the response must arrive within `seconds`.
        """
        self.state = State.WAITING if error is None else State.STOPPED
        self._outgoing.offered = memoryview(b"")
        self._outgoing.error = error
        self.used_at = now
        self._head_deadline = now + seconds
        if self._head_scope is not None:  # `_wait_for_head` is waiting already
            self._head_scope.deadline = self._head_deadline

    async def _await_head(self, method: str) -> Response | WireError | None:
        """Return the final response when its head arrives, None if it does not arrive before
        `_head_deadline`, or the error of the connection.

        The error is returned, because a task group would raise it as a part of an ExceptionGroup.
        """
        try:
            # On a busy machine the response has often arrived already. Then no deadline is set up.
            event = self._read_event()
            if not isinstance(event, h11.Response):
                event = await self._wait_for_head(event)
            if event is None:
                return None
            response = Response(self, event, method)
        except WireError as error:
            return error

        if self.state is not State.WAITING:  # the request is not complete
            response.is_early = True
            response.is_reusable = False
        self.state = State.ANSWERED
        return response

    async def _wait_for_head(self, event: object) -> h11.Response | None:
        """Return the head of the final response, or None if it does not arrive before
        `_head_deadline`.

        `event` is the last result of `_read_event`.
        """
        # `_stop_sending` moves the deadline of this scope when the request has been written.
        with anyio.CancelScope(deadline=self._head_deadline) as self._head_scope:
            while not isinstance(event, h11.Response):
                if isinstance(event, int):
                    await self._stream.wait(event)
                else:
                    # Without a checkpoint a flood of interim responses would suspend the deadline.
                    await anyio.lowlevel.checkpoint()
                event = self._read_event()
            return event
        return None  # the deadline has passed

    async def next_event(self) -> object:
        """Return h11's next event of a body. Raises TimedOut if the body arrives too slowly."""
        event = self._read_event()
        while isinstance(event, int):  # WANT_READ or WANT_WRITE
            await self._wait_in_body(event)
            event = self._read_event()
        return event

    def _read_event(self) -> object:
        """Return h11's next event of the response, or WANT_READ or WANT_WRITE if the caller has to
        wait for the stream first.
        """
        try:
            # Before the first byte h11 has no event. To call it then takes 1 % of a request's CPU.
            event: object = h11.NEED_DATA
            if self._has_received:
                event = self._framing.next_event()
            while event is h11.NEED_DATA:
                if not self._arrived:  # h11 has got all bytes that have been read
                    count = self._stream.recv_into(self._scratch)
                    if count < 0:
                        return count
                    self._has_received = self._has_received or count > 0
                    self._pace.moved += count
                    self._arrived = bytes(self._scratch[:count])
                # At the end of the stream this is empty, which is how h11 learns of the end.
                portion = next_portion(self._framing, self._arrived)
                self._arrived = self._arrived[len(portion) :]
                self._framing.receive_data(portion)
                event = self._framing.next_event()
        except h11.RemoteProtocolError as error:
            raise self._broken(error) from error
        return event

    def _broken(self, error: h11.RemoteProtocolError) -> WireError:
        """Return the error for a response that h11 rejects."""
        _, has_ended = self._framing.trailing_data
        if has_ended:
            return Disconnected("the connection ended before the end of an answer")
        if error.error_status_hint == 431:
            return ProtocolBroken(f"the head of the answer is longer than {_LONGEST_HEAD} bytes")
        what = printable(str(error), 150)
        return ProtocolBroken(f"{self.origin.authority} does not speak HTTP/1.1: {what}")

    async def fill(self, buffer: memoryview) -> int:
        """Read bytes of a body into `buffer`; wait if none has arrived. Returns their number, 0 at
        the end of the stream.
        """
        await anyio.lowlevel.checkpoint()
        while (count := self.fill_now(buffer)) < 0:
            await self._wait_in_body(count)
        return count

    def fill_now(self, buffer: memoryview) -> int:
        """Read the bytes of a body that have arrived. Returns their number, 0 at the end of the
        stream, WANT_READ or WANT_WRITE if none has arrived.

        It reads until the buffer is full, because OpenSSL returns at most 16 KiB per read.
        """
        filled = 0
        while filled < len(buffer):
            try:
                count = self._stream.recv_into(buffer[filled:])
            except Disconnected:
                if not filled:
                    raise
                break  # these bytes are valid, and the next call raises the error
            if count <= 0:
                if not filled:
                    return count
                break
            filled += count
        self._pace.moved += filled
        return filled

    async def _wait_in_body(self, want: int) -> None:
        """Wait until the stream can be read (WANT_READ) or written (WANT_WRITE).

        Raises TimedOut if that takes longer than `timeouts.idle`, or if the body is too slow.
        """
        self._pace.fail_if_slow(self.timeouts)
        idle = self.timeouts.idle
        began = anyio.current_time()
        try:
            with anyio.fail_after(idle):
                await self._stream.wait(want)
        except TimeoutError as error:
            raise TimedOut(f"{self.origin.authority} moved nothing for {idle:g} s") from error
        now = anyio.current_time()
        self.used_at = now
        self._pace.waited += now - began


# Nearly all requests to a repository have the same headers.
@lru_cache(maxsize=64)
def _lines_of(headers: tuple[Header, ...]) -> str:
    """Return headers as lines of a request's head. Raises ProtocolBroken like `_check_written`."""
    _check_written("".join(name + value for name, value in headers))
    return "".join(f"{name}: {value}\r\n" for name, value in headers)


def _check_written(text: str, *, is_one_word: bool = False) -> None:
    """Raise ProtocolBroken if a text has a character that must not be in a line of a request, for
    example the end of a line; with `is_one_word` also a space.
    """
    if not (text.isascii() and text.isprintable()) or (is_one_word and " " in text):
        # The text is not shown, because a header may be a credential (I6).
        raise ProtocolBroken("a request cannot be written: its URL or a header is malformed")


@cache
def _request_by(method: str) -> h11.Request:
    """Return a request with this method for h11. Only the method matters; h11 demands a Host."""
    return h11.Request(method=method, target="/", headers=[("Host", "any")])


def next_portion(framing: h11.Connection, arrived: bytes) -> bytes:
    """Return the beginning of `arrived` that may be passed to h11, when h11 needs data.

    Raises ProtocolBroken if a head, a line of a chunked body or its trailers would have more than
    1 KiB of blanks in a row. Bodies may have any number of blanks, but only h11 knows where a body
    begins. So if there are many blanks, h11 gets a short portion at a time. If it leaves bytes
    unparsed, they are the beginning of a head or of a line; if not, it may be in a body.
    """
    unparsed, _ = framing.trailing_data
    if len(unparsed) + len(arrived) <= _MOST_BLANKS:
        return arrived

    # A run of blanks may continue across line ends, because h11 joins the lines of a folded header.
    without_run = unparsed.rstrip(b" \t\r\n")
    trailing_blanks = _count_blanks(unparsed[len(without_run) :])
    if trailing_blanks + _count_blanks(arrived) <= _MOST_BLANKS:
        return arrived

    portion = arrived[:_MOST_BLANKS]  # too short for a longer run
    if not unparsed:
        return portion
    after_blanks = portion.lstrip(b" \t")
    leading_blanks = len(portion) - len(after_blanks)
    if trailing_blanks + leading_blanks > _MOST_BLANKS:
        raise ProtocolBroken(f"the head of the answer has more than {_MOST_BLANKS} blanks in a row")
    if after_blanks.startswith((b"\r", b"\n")):
        # This line ends here, perhaps the head too. A body may begin after it.
        line, newline, _ = portion.partition(b"\n")
        return line + newline
    return portion


def _count_blanks(text: bytes) -> int:
    return text.count(b" ") + text.count(b"\t")


def parse_retry_after(value: str | None, wall_now: float) -> float | None:
    """Return the seconds to wait by a Retry-After header, which has a number or a date (RFC 9110
    section 10.2.3). Returns None if the header is missing or malformed.
    """
    text = (value or "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return float(text[:_MOST_DIGITS])

    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - wall_now)
    except (ValueError, OverflowError):
        return None
