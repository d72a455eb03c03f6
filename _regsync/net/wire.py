"""One HTTP/1.1 exchange at a time over one stream, and the connections that wait for the next one.

h11 parses the heads of answers, and bodies of unknown length. A body with a Content-Length is read
from the stream directly into the caller's memory. While a request is sent, its answer is read
already, because the peer may refuse the request before it has got all of it.

Each connection in use has one deadline. `Pool.watch` closes those that are past it, and the task
that waits gets TimedOut.

Invariants: I7 (a body that cannot begin again is sent once), I9 (only a connection whose exchange
ended in order serves another one). Nothing is read past the end of a body of known length.
Follows: RFC 9112, docs/design.md section 9.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import NamedTuple, Protocol

import anyio
import anyio.lowlevel
import h11

from _regsync import edge
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
from _regsync.net.trust import explain
from _regsync.text import printable

# Bodies move in pieces of so many bytes. Half the size costs more CPU, twice the size more memory
# (docs/design.md section 9, "Body path").
PIECE = 512 * 1024

# Bytes per read of a head, for which each connection keeps memory.
_HEAD_PIECE = 8 * 1024

# Bytes per read of a body that h11 parses, because its length is unknown.
_PARSED_PIECE = 16 * 1024

# The most bytes of an answer's head. Signed locations and long challenges exceed h11's own limit of
# 16 KiB (docs/protocol-facts.md section 2.5).
_LONGEST_HEAD = 64 * 1024

# The most blanks in a row in a head. The time that h11's regular expressions take grows with the
# square: 3 ms for 1 KiB, half a minute for 64 KiB.
_MOST_BLANKS = 1024
_TOO_MANY_BLANKS = b" " * (_MOST_BLANKS + 1)
_TO_BLANKS = bytes.maketrans(b"\t\r\n", b"   ")

# The most bytes of a line of a chunked body, and of its trailers. h11 gets no more at a time, so
# that the time it takes is bounded too.
_LONGEST_LINE = 4 * 1024

# The rest of a body is read, to reuse the connection, only if that takes at most so many bytes and
# seconds. Beyond that a new connection costs less.
_WORTH_DRAINING = 64 * 1024
_WORTH_WAITING = 1.0

# How many seconds to wait for the answer after a write has failed. A peer that refuses a request
# may close its side first.
_LAST_WORDS = 2.0

# The most bytes of a request that is repeated: a first piece from memory or a file, and a head
# before it. A connection that took more was not dead from the beginning, and the rest can be sent
# where it broke off.
_MOST_SENT_TWICE = (256 + 64) * 1024

# The most idle connections that are kept. A registry may redirect each blob to another host.
_MOST_IDLE = 256

# The most seconds between two looks at the deadlines.
_WATCH_PAUSE = 1.0

# Statuses of a body that its upload session does not accept, because an earlier attempt has ended or
# moved the session.
SESSION_GONE = (400, 404, 416)

# A Retry-After in seconds is cut to so many digits (31 years), because more could be infinite.
_MOST_DIGITS = 9


class Timeouts(NamedTuple):
    """The time limits of a run, in seconds (docs/design.md section 9). Tests use shorter ones."""

    connect: float = 10.0  # resolving a name and connecting, over all its addresses
    tls: float = 10.0  # a TLS handshake
    head: float = 60.0  # the head of an answer
    manifest_put: float = 300.0  # the head of the answer to a manifest's PUT
    finish: float = 60.0  # the answer to an upload's body, plus 1 s for each MiB of the blob
    longest_finish: float = 900.0  # the upper bound of that sum
    idle: float = 60.0  # each wait for the next bytes of a body

    # A body that moves fewer bytes per second than this, measured over `slow_window` seconds, has
    # stalled.
    slowest_bytes_per_second: float = 1024.0
    slow_window: float = 300.0

    idle_connection: float = 50.0  # an idle connection is closed after this time

    # How long a host that is away is waited for, from its first failure: one that has answered
    # before, and one that never has, whose service may still be starting.
    outage: float = 120.0
    first_answer: float = 15.0


# A header of a request: name and value.
Header = tuple[str, str]


class Headers(dict[str, str]):
    """The headers of an answer: values by lower-case name, the first of a repeated header."""

    def __init__(self, pairs: Sequence[Header]) -> None:
        super().__init__(reversed(pairs))
        self._pairs = pairs

    def all(self, name: str) -> list[str]:
        """Return all values of a header, in order."""
        return [value for key, value in self._pairs if key == name]


class Request(NamedTuple):
    """One request to an origin.

    `target` is the path with the query. `headers` exclude Host and Content-Length. `body` may be
    the first piece of a longer one.
    """

    method: str
    target: str
    headers: tuple[Header, ...] = ()
    body: bytes | memoryview = b""

    def __repr__(self) -> str:
        return "<Request>"  # it holds secrets


class Pieces(Protocol):
    """The source of a request's body, which has `length` bytes."""

    length: int
    on_taken: Callable[[], None]  # called when the peer has taken more than the first piece

    @property
    def has_begun(self) -> bool:
        """Whether anything may have been sent, because `next` was called."""

    async def next(self) -> memoryview:
        """Return the next piece, which is valid until the next call. It is empty at the end.

        Raises SyncError if the body cannot be read.
        """


class Response:
    """An answer whose head has arrived. Its body is read by either `read` or `read_into`. It holds
    its connection until `close`.
    """

    def __init__(self, connection: Connection, head: h11.Response, method: str) -> None:
        self._connection = connection
        self.status = head.status_code
        self.headers = Headers(
            [
                (name.decode("latin-1").lower(), value.decode("latin-1"))
                for name, value in head.headers.raw_items()
            ]
        )
        self.body = b""  # as far as `read` has read it
        self.is_early = False  # whether it came before the whole request was sent

        has_body = method != "HEAD" and self.status not in (204, 304)

        # The length of the body by its header, None if it has none. A transfer coding overrides the
        # header (RFC 9112 section 6.3).
        self.length: int | None = None
        if method != "HEAD" and not self.headers.get("transfer-encoding"):
            declared = self.headers.get("content-length")
            self.length = int(declared) if declared else None

        # How many bytes of the body `read_into` has not returned yet. None while h11 parses a body
        # of unknown length, until its end.
        self._left = self.length if has_body else 0

        # Bytes of the body that have arrived but were not returned to the caller yet.
        self._unreturned = memoryview(b"")
        # Whether the connection can be reused after this answer, as far as is known.
        self.is_reusable = head.http_version == b"1.1" and _keeps_connection(self.headers)
        if self._left is not None:
            # These bytes were read together with the head. More bytes than the body has belong to
            # no request.
            unread = connection.unread()
            if unread:
                self._unreturned = memoryview(unread)[: self._left]
                self.is_reusable = self.is_reusable and len(unread) <= self._left

    async def read_into(self, buffer: memoryview) -> int:
        """Read bytes of the body into `buffer`. Returns their number, 0 at the end of the body.

        This is a checkpoint. Raises Disconnected if the body is truncated, and TimedOut if it
        arrives too slowly.
        """
        if self._left is None:
            return await self._parse_into(buffer)

        if self._unreturned:
            count = min(len(buffer), len(self._unreturned))
            buffer[:count] = self._unreturned[:count]
            self._unreturned = self._unreturned[count:]
        elif self._left:
            count = await self._connection.fill(buffer[: self._left])
            if not count:
                raise Disconnected(f"the body ended {self._left} bytes too early")
        else:
            return 0

        self._left -= count
        return count

    async def _parse_into(self, buffer: memoryview) -> int:
        """Fill `buffer` with what h11 returns of a body of unknown length: with all that has arrived,
        and wait if nothing has. Sets `_left` to 0 at the end of the body.
        """
        # h11 may have the next part already. Then `next_event` has no checkpoint.
        await anyio.lowlevel.checkpoint()
        filled = 0
        while filled < len(buffer):
            if not self._unreturned:
                event = await self._connection.next_event(may_wait=not filled)
                if event is h11.NEED_DATA:
                    break
                if not isinstance(event, h11.Data):
                    self._left = 0  # the end; of a truncated body `next_event` raises an error
                    has_more = bool(self._connection.unread())
                    self.is_reusable = self.is_reusable and not has_more
                    break
                self._unreturned = memoryview(event.data)
            count = min(len(buffer) - filled, len(self._unreturned))
            buffer[filled : filled + count] = self._unreturned[:count]
            self._unreturned = self._unreturned[count:]
            filled += count
        return filled

    async def read(self, limit: int) -> bytes:
        """Return the whole body. Raises ContentError if it is longer than `limit` bytes.

        The body of an error (status 400 and above) may be too long or truncated. Then its beginning
        is returned. A second call returns the same bytes.
        """
        if self._left == 0:
            return self.body

        is_error = self.status >= 400
        body = bytearray()
        try:
            await self._collect(body, limit)
        except WireError:
            if not is_error:
                raise
            self.is_reusable = False

        if len(body) > limit and not is_error:
            raise ContentError(f"the answer is longer than {limit} bytes")
        self.body = bytes(body[:limit])
        return self.body

    async def close(self) -> None:
        """End the exchange. The connection can serve another one if the rest of the body is short
        and arrives at once.
        """
        try:
            # A length that is unknown (None) may turn out to be short.
            if self.is_reusable and self._left != 0 and (self._left or 0) <= _WORTH_DRAINING:
                with anyio.move_on_after(_WORTH_WAITING), suppress(WireError):
                    await self._collect(bytearray(), _WORTH_DRAINING)
        finally:  # also if the task is cancelled
            self._connection.on_end(self._connection, self.is_reusable and self._left == 0)

    async def _collect(self, body: bytearray, limit: int) -> None:
        """Append the body to `body`, but no more than a byte beyond `limit`, which shows that the
        body is too long.
        """
        expected = _PARSED_PIECE if self.length is None else self.length
        scratch = memoryview(bytearray(min(PIECE, limit + 1, expected + 1)))
        while self._left != 0 and len(body) <= limit:
            count = await self.read_into(scratch)
            body += scratch[:count]

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _keeps_connection(headers: Headers) -> bool:
    """Report whether another request may follow this answer on its connection.

    An answer with both a length and a transfer coding may hide a second answer. h11 obeys the
    coding, and the connection is not used again (R17).
    """
    if headers.get("transfer-encoding") and headers.get("content-length"):
        return False
    if "connection" not in headers:
        return True
    return "close" not in ",".join(headers.all("connection")).lower()


class Connection:
    """A stream to an origin, and the exchange that is using it."""

    def __init__(
        self,
        origin: Origin,
        stream: edge.Stream,
        timeouts: Timeouts,
        on_end: Callable[[Connection, bool], None],
    ) -> None:
        """`on_end` takes the connection when an exchange ends, and whether it is reusable."""
        self.origin = origin
        self.timeouts = timeouts
        # When the wait that is going on has to end, in the event loop's time.
        self.deadline = math.inf
        self._stream = stream
        self.on_end = on_end
        self._authority = origin.authority
        # Memory for reading heads.
        self._scratch = memoryview(bytearray(_HEAD_PIECE))
        # Why the connection was closed, if it was closed while a task used it.
        self._closed_by: WireError | None = None
        self._begin()

    def _begin(self) -> None:
        """Reset the state of the last exchange."""
        # A new h11 connection for each exchange costs no more than `start_next_cycle`.
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        # Bytes of a body that h11 has not got yet.
        self._unparsed = memoryview(b"")
        # Whether any byte of an answer has arrived.
        self.has_received = False
        # Whether the whole request has been written, or why it was not.
        self._is_sent = False
        self._send_error: SyncError | None = None
        # Whether the body's source has returned a second piece. The first one is gone by then.
        self._is_past_first = False
        # In how many seconds the head had to arrive; None if a body is waited for.
        self._head_seconds: float | None = None
        # Bytes of bodies that moved, and seconds spent waiting for them, since the last look.
        self._moved = 0
        self._waited = 0.0

    def close(self, why: WireError | None = None) -> None:
        """Close the stream at once. A task that uses it gets `why`, or Disconnected."""
        self._closed_by = why
        self.deadline = math.inf
        self._stream.close()

    def time_out(self) -> None:
        """Close the stream because `deadline` has passed. The task that waits gets TimedOut."""
        if self._head_seconds is None:
            text = f"{self._authority} moved nothing for {self.timeouts.idle:g} s"
            self.close(TimedOut(text))
            return
        text = f"no answer from {self._authority} within {self._head_seconds:g} s"
        self.close(TimedOut(text))

    def is_alive(self) -> bool:
        """Report, without waiting, whether the peer has neither closed an idle connection nor sent
        anything on it.
        """
        # A fresh connection may be readable because of TLS 1.3 session tickets. Only a read shows
        # whether there is more.
        try:
            return self._stream.recv_into(self._scratch[:1]) < 0
        except OSError:
            return False

    def can_repeat(self) -> bool:
        """Report whether the failed request may be repeated on another connection (I7)."""
        has_moved_little = self._moved <= _MOST_SENT_TWICE
        return has_moved_little and not self.has_received and not self._is_past_first

    def unread(self) -> bytes:
        """Return the bytes that have arrived after h11's last event."""
        trailing, _ = self._framing.trailing_data
        return trailing + self._unparsed

    # The request.

    async def exchange(
        self, request: Request, first: memoryview, pieces: Pieces | None, seconds: float
    ) -> Response:
        """Send a request and return its final answer, with the body unread.

        The request's body is `first`, followed by the rest of `pieces` if there are any. The head
        of the answer must arrive within `seconds` after the request has been written.

        Raises the errors of `pieces`, ContentError if the body does not have its declared length,
        and WireError if the connection fails. After a failed write, an answer is returned if one
        arrives.
        """
        self._begin()
        try:
            head = await self._send_and_read_head(request, first, pieces, seconds)
            response = Response(self, head, request.method)
        except BaseException:
            self.on_end(self, False)
            raise
        self.deadline = math.inf
        self._head_seconds = None
        if not self._is_sent:
            response.is_early = True
            # The peer would take the rest of the body for the next request.
            response.is_reusable = False
        return response

    async def _send_and_read_head(
        self, request: Request, first: memoryview, pieces: Pieces | None, seconds: float
    ) -> h11.Response:
        """Send a request, and return the head of its answer, which may come earlier."""
        length = len(first) if pieces is None else pieces.length
        left = length - len(first)  # bytes of the body after `first`
        if left:
            _check_length(first, length)
        unsent = memoryview(self._format_head(request, length) + first)
        with suppress(OSError):  # of which the next write tells again
            self._moved = max(self._stream.send_now(unsent), 0)  # nearly always all of it
        unsent = unsent[self._moved :]
        if not unsent and not left:
            self._stop_sending(seconds)
            return await self._read_head()

        error: WireError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._send, unsent, left, pieces, seconds)
            try:
                head = await self._read_head()
            except WireError as broken:  # the task group would make it part of an ExceptionGroup
                error = broken
            group.cancel_scope.cancel()
        if error is None:
            return head
        # An alert about our certificate says more than the write that failed because of it.
        if isinstance(error, ConnectFailed):
            raise error
        raise self._send_error or error

    def _format_head(self, request: Request, length: int) -> bytes:
        """Return the head of a request with a body of `length` bytes, and prepare h11 for its
        answer. Raises ProtocolBroken if the head has characters that it must not have.

        h11 gets only the method, which decides how it parses the answer. If h11 also checked and
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

    async def _send(
        self, unsent: memoryview, left: int, pieces: Pieces | None, seconds: float
    ) -> None:
        """Write `unsent`, and then the `left` bytes that `pieces` still has."""
        while True:
            try:
                while unsent:
                    sent = self._stream.send_now(unsent)
                    if sent < 0:  # WANT_READ or WANT_WRITE
                        await self._wait_in_body(sent)
                    else:
                        unsent = unsent[sent:]
                        self._moved += sent
            except (OSError, WireError) as error:
                # The peer may have sent an answer before it closed its side.
                self._send_error = self._failure(error)
                self._stop_sending(_LAST_WORDS)
                return
            if pieces is None or not left:
                self._stop_sending(seconds)
                return

            try:
                unsent = await pieces.next()
                _check_length(unsent, left)
            except SyncError as error:
                # The source of the body has failed. There is no answer to wait for.
                self._send_error = error
                self.close()
                return
            self._is_past_first = True
            left -= len(unsent)

    def _stop_sending(self, seconds: float) -> None:
        """Write no more of the request: it is complete, unless `_send_error` is why it is not. The
        head of the answer must arrive within `seconds`.
        """
        self._is_sent = self._send_error is None
        self._head_seconds = seconds
        self.deadline = anyio.current_time() + seconds

    # The answer.

    async def _read_head(self) -> h11.Response:
        """Return the head of the final answer."""
        while True:
            try:
                while (count := self._stream.recv_into(self._scratch)) < 0:
                    await self._stream.wait(count)  # WANT_READ or WANT_WRITE
            except OSError as error:
                raise self._failure(error) from error
            self.has_received = self.has_received or count > 0
            self._framing.receive_data(bytes(self._scratch[:count]))
            event = self._parse_head()
            while isinstance(event, h11.InformationalResponse):
                # Without a checkpoint a flood of them would keep all other tasks from running.
                await anyio.lowlevel.checkpoint()
                event = self._parse_head()
            if isinstance(event, h11.Response):
                return event

    def _parse_head(self) -> object:
        unread = self.unread()
        if len(unread) > _MOST_BLANKS:
            check_blanks(unread)
        return self._parse()

    async def next_event(self, *, may_wait: bool) -> object:
        """Return h11's next event of a body; NEED_DATA if it has not arrived and this may not wait.
        Raises TimedOut if the body arrives too slowly.
        """
        while (event := self._parse()) is h11.NEED_DATA:
            # What h11 has not parsed is the beginning of a line, or of the trailers.
            if len(self._framing.trailing_data[0]) > _LONGEST_LINE:
                raise ProtocolBroken("a line of the answer's body is too long")
            if not self._unparsed:
                if not may_wait:
                    break
                piece = memoryview(bytearray(_PARSED_PIECE))
                self._unparsed = piece[: await self.fill(piece)]
            self._framing.receive_data(bytes(self._unparsed[:_LONGEST_LINE]))
            self._unparsed = self._unparsed[_LONGEST_LINE:]
        return event

    def _parse(self) -> object:
        try:
            return self._framing.next_event()
        except h11.RemoteProtocolError as error:
            raise self._broken(error) from error

    def _broken(self, error: h11.RemoteProtocolError) -> WireError:
        """Return the error for an answer that h11 rejects."""
        _, has_ended = self._framing.trailing_data
        if has_ended:
            return Disconnected("the connection ended before the end of an answer")
        if error.error_status_hint == 431:
            return ProtocolBroken(f"the head of the answer is longer than {_LONGEST_HEAD} bytes")
        what = printable(str(error), 150)
        return ProtocolBroken(f"{self._authority} does not speak HTTP/1.1: {what}")

    async def fill(self, buffer: memoryview) -> int:
        """Read the bytes of a body that have arrived; wait if there are none. Returns their number,
        0 at the end of the stream.

        It reads until the buffer is full, because OpenSSL returns at most 16 KiB per read.
        """
        await anyio.lowlevel.checkpoint()
        try:
            while (filled := self._stream.recv_into(buffer)) < 0:
                await self._wait_in_body(filled)
        except OSError as error:
            raise self._failure(error) from error
        with suppress(OSError):  # these bytes are valid, and the next call raises the error
            while 0 < filled < len(buffer):
                count = self._stream.recv_into(buffer[filled:])
                if count <= 0:
                    break
                filled += count
        self._moved += filled
        return filled

    async def _wait_in_body(self, want: int) -> None:
        """Wait until the stream can be read (WANT_READ) or written (WANT_WRITE), for at most
        `timeouts.idle`.

        Raises OSError, and TimedOut if the peer sends or takes the body too slowly. That is looked
        at once for every `slow_window` seconds of waiting for this peer.
        """
        timeouts = self.timeouts
        if self._waited >= timeouts.slow_window:
            if self._moved < self._waited * timeouts.slowest_bytes_per_second:
                text = f"only {self._moved} bytes of the body moved in {self._waited:.0f} s"
                raise TimedOut(text)
            self._moved = 0
            self._waited = 0.0
        began = anyio.current_time()
        self.deadline = began + timeouts.idle
        await self._stream.wait(want)
        self.deadline = math.inf  # until the next wait, whatever the other end of the body does
        self._waited += anyio.current_time() - began

    def _failure(self, error: OSError | WireError) -> WireError:
        """Return the error to raise because of an error of the stream."""
        if isinstance(error, WireError):
            return error
        return self._closed_by or _stream_error(error)


def _check_length(piece: memoryview, left: int) -> None:
    """Raise ContentError if `piece` is longer than the `left` bytes of its body, or ends it before
    it has them.
    """
    if len(piece) > left or (left and not piece):
        raise ContentError("the body does not have its declared length")


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


def check_blanks(text: bytes) -> None:
    """Raise ProtocolBroken if the head that `text` begins with, or a part of it, has more than
    1 KiB of blanks in a row.

    The ends of lines count too, because h11 joins the lines of a folded header.
    """
    head = re.split(rb"\n\r?\n", text, maxsplit=1)[0]
    if _TOO_MANY_BLANKS in head.translate(_TO_BLANKS):
        raise ProtocolBroken(f"the head of the answer has more than {_MOST_BLANKS} blanks in a row")


def _stream_error(error: OSError) -> WireError:
    """Convert the error of a stream into ConnectFailed if the peer has refused the client
    certificate, otherwise into Disconnected.
    """
    # In TLS 1.3 the client's handshake is complete before the peer has checked the client
    # certificate. A later operation receives the refusal as an alert.
    is_alert = isinstance(error, ssl.SSLError) and "_ALERT_" in (error.reason or "")
    if is_alert:
        refusal = tls_failure(error, "the registry")
        if refusal.hint:  # the alert is known
            return refusal
    reason = printable(error.strerror or type(error).__name__, 100)
    return Disconnected(f"the connection broke: {reason}")


def tls_failure(error: OSError, host: str) -> ConnectFailed:
    """Return the error for a failure of TLS with `host`."""
    message, hint = explain(error, host)
    failure = ConnectFailed(message, hint=hint)
    # A peer that closed the connection may answer the next time. Other TLS errors are permanent.
    failure.retryable = not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError)
    return failure


class Pool:
    """The connections of a run: those in use, and idle ones. The pool limits how many are idle and
    for how long, but not how many are in use (I8).
    """

    def __init__(
        self, dial: Callable[[Origin], Awaitable[edge.Stream]], timeouts: Timeouts
    ) -> None:
        """`dial` connects to an origin."""
        self.dial = dial
        self.timeouts = timeouts
        self._busy = set[Connection]()
        # In the order in which the connections became idle, with the time at which `watch` first
        # found them idle, or None before.
        self._idle: dict[Connection, float | None] = {}

    async def exchange(
        self,
        origin: Origin,
        request: Request,
        *,
        pieces: Pieces | None = None,
        seconds: float | None = None,
        is_fresh: bool = False,
        check_may_send: Callable[[], None] = lambda: None,
    ) -> Response:
        """Perform one exchange, and return its answer with the body unread. The caller closes it.

        The request's body is `request.body`, and then what `pieces` still has. `seconds` limits the
        wait for the head of the answer after the request is sent (default: `Timeouts.head`). With
        `is_fresh` no connection is used that was used before. If an idle connection turns out to be
        dead, the request is sent again over a new one.

        `check_may_send` is called after each wait for a new connection. If it raises, nothing more
        is sent. Raises ConnectFailed if no connection can be made, and all errors of
        `check_may_send` and of Connection.exchange.
        """
        first = memoryview(request.body)
        seconds = self.timeouts.head if seconds is None else seconds
        lost: Disconnected | None = None
        idle = None if is_fresh else self._take(origin)
        if idle is not None:
            try:
                return await idle.exchange(request, first, pieces, seconds)
            except Disconnected as error:
                # Errors of the connection have no side yet; errors of the body's source have one.
                if error.side is not None or not idle.can_repeat():
                    raise
                lost = error
            except ProtocolBroken as error:
                # A body that no answer may have, such as one to HEAD, may have come behind the last
                # answer, and was taken for this one.
                if error.side is not None or not idle.has_received:
                    raise
                raise Disconnected(error.message) from error

        stream = await self.dial(origin)
        new = Connection(origin, stream, self.timeouts, self._give)
        try:
            check_may_send()
        except BaseException:
            self._keep(new)
            raise
        self._busy.add(new)
        response = await new.exchange(request, first, pieces, seconds)
        # The lost attempt may have completed the upload and ended its session: the registry says so
        # now, or later, when it is not too busy. On this error the caller checks whether the blob
        # exists.
        is_in_doubt = response.status in (*SESSION_GONE, 429) or response.status >= 500
        if lost is not None and pieces is not None and is_in_doubt:
            await response.close()
            raise lost
        return response

    def _take(self, origin: Origin) -> Connection | None:
        """Take the connection to an origin that became idle last out of the pool. Returns None if
        there is none.

        Connections that turn out to be dead are closed.
        """
        while connection := next(
            (each for each in reversed(self._idle) if each.origin == origin), None
        ):
            del self._idle[connection]
            if connection.is_alive():
                self._busy.add(connection)
                return connection
            connection.close()
        return None

    def _give(self, connection: Connection, is_reusable: bool) -> None:
        """End the use of a connection. One that is not reusable is closed."""
        self._busy.remove(connection)
        if is_reusable:
            self._keep(connection)
        else:
            connection.close()

    def _keep(self, connection: Connection) -> None:
        """Keep an idle connection. If there are too many, the one that was idle longest is closed."""
        self._idle[connection] = None
        if len(self._idle) > _MOST_IDLE:
            longest_idle = next(iter(self._idle))
            del self._idle[longest_idle]
            longest_idle.close()

    async def watch(self) -> None:
        """Close connections that are past their deadline, or idle for too long, until cancelled."""
        while True:
            now = anyio.current_time()
            for connection in [each for each in self._busy if each.deadline <= now]:
                connection.time_out()
            for connection, since in [*self._idle.items()]:
                if since is None:
                    self._idle[connection] = now
                elif since + self.timeouts.idle_connection <= now:
                    del self._idle[connection]
                    connection.close()
            next_deadline = min((each.deadline for each in self._busy), default=math.inf)
            await anyio.sleep_until(min(next_deadline, now + _WATCH_PAUSE))

    def close(self, origin: Origin | None = None) -> None:
        """Close the idle connections to an origin, or all idle connections."""
        for connection in [*self._idle]:
            if origin in (None, connection.origin):
                del self._idle[connection]
                connection.close()


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
