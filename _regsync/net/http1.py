"""One HTTP/1.1 exchange at a time over one stream.

Owns: requests and answers, the states of a connection, bodies in both directions, their time-outs,
an answer that comes in the middle of an upload.
May not know: registries, logins, redirects, repetition, which connection is used.
Invariants: I9 (only a connection whose exchange ended in order says that it is fit for another).
Nothing is read past the end of a body of known length.
Follows: RFC 9112, docs/design.md section 9, docs/bodies.md section 8. h11 reads all of an
answer but a body of known length, which goes straight from the stream into the caller's memory.
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

# One piece of a body, in bytes; and one of the first few bodies that move at a time. Half of it
# costs more CPU, twice as much more memory (docs/bodies.md sections 1 and 6).
PIECE = 256 * 1024
LARGE_PIECE = 512 * 1024

# How many bodies have large pieces at a time: 4 MiB more than with small ones.
_MOST_LARGE = 16

# Bytes read at once where h11 frames what comes.
_SCRATCH = 16 * 1024

# Bytes of a head. Signed locations and long challenges exceed h11's own limit of 16 KiB
# (docs/protocol-facts.md section 2.5).
_LONGEST_HEAD = 64 * 1024

# Blanks in a row within a head, a line of a chunked body or its trailers. h11's expressions take a
# time that grows with the square of it: 1 KiB takes 3 ms, 64 KiB half a minute.
_MOST_BLANKS = 1024

# To keep a connection by reading more bytes than this, or for longer, costs more than a new one.
_WORTH_DRAINING = 64 * 1024
_WORTH_WAITING = 1.0

# Seconds for which a peer's refusal may still be in flight after our write has failed.
_LAST_WORDS = 2.0


class State(enum.Enum):
    """Where a connection stands.

    from       to         when
    IDLE       SENDING    an exchange begins
    SENDING    WAITING    the stream has taken the whole request
    SENDING    STOPPED    a write has failed, or the source of the body has refused
    SENDING    ANSWERED   the head of the answer came first: the answer is "early"
    STOPPED    ANSWERED   the peer says why: the answer is "early" too
    WAITING    ANSWERED   the head of the answer has come
    ANSWERED   IDLE       its body was read to the end, and the connection is fit for another
    all        CLOSED     everything else: an error, a time-out, a cancellation, an unfit connection

    Interim answers (1xx) change nothing. An early answer never leads to IDLE, because the peer
    would take the rest of the body for the next request.
    """

    IDLE = "idle"
    SENDING = "sending"
    STOPPED = "stopped"
    WAITING = "waiting"
    ANSWERED = "answered"
    CLOSED = "closed"


class Headers(dict[str, str]):
    """The headers of an answer: by name in lower case the value, of a repeated header the first."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        super().__init__(reversed(pairs))
        self._pairs = pairs

    def all(self, name: str) -> list[str]:
        """Return the values of all headers of a name, in order."""
        return [value for key, value in self._pairs if key == name]


# A header of a request.
Header = tuple[str, str]


class Request(NamedTuple):
    """One request to an origin.

    `target` is path and query. `headers` are without Host and Content-Length.
    """

    method: str
    target: str
    headers: tuple[Header, ...] = ()
    body: bytes = b""

    def __repr__(self) -> str:
        return "<Request>"  # it holds secrets


class Pieces(Protocol):
    """The source of an upload's body, `length` bytes in all.

    `next` returns a piece, which is valid until the next call, and an empty one at the end. It
    refuses by raising a SyncError.
    """

    length: int

    async def next(self) -> memoryview: ...

    def write_to(self, socket: int) -> int:
        """Move what comes next from a file into a plain socket; return how many bytes it took.

        0 where `next` has to give them. Raises OSError as sending does, and SyncError as `next`.
        """
        return 0

    async def pour(self, write: Callable[[memoryview], None]) -> int:
        """Have a worker thread give what comes next to `write`, as long as it comes without waiting;
        return how many bytes that were.

        0 where `next` has to give them. Raises what `write` raises, and SyncError as `next`.
        """
        return 0


class Buffers:
    """Memory that bodies are read into: large pieces for the first few, smaller ones for the others."""

    def __init__(self) -> None:
        self._large_lent = 0  # large pieces in use

    @contextmanager
    def lending(self, size: int) -> Iterator[memoryview]:
        """Give memory for one piece of a body; the body has `size` bytes, the piece not more."""
        if size <= PIECE or self._large_lent == _MOST_LARGE:
            yield memoryview(bytearray(min(PIECE, size)))
            return
        self._large_lent += 1
        try:
            yield memoryview(bytearray(min(LARGE_PIECE, size)))
        finally:
            self._large_lent -= 1


class Response:
    """An answer whose head has arrived. Its body is read by either `read` or `read_into`."""

    def __init__(self, connection: Connection, head: h11.Response, method: str) -> None:
        self._connection = connection
        self.came_at = anyio.current_time()  # the head, in the event loop's time
        self.status = head.status_code
        self.headers = Headers(
            [
                (name.decode("latin-1").lower(), value.decode("latin-1"))
                for name, value in head.headers.raw_items()
            ]
        )
        # As much of the body as `read` has read.
        self.body = b""
        # Whether the answer came before the whole body of its request was sent.
        self.early = False

        has_content = method != "HEAD" and self.status not in (204, 304)
        if has_content and self.status in (200, 206):
            _check_not_coded(self.headers)

        # How many bytes the body is said to have; None where that is not said. A transfer coding
        # overrides the length (RFC 9112 section 6.3).
        self.length: int | None = None
        if method != "HEAD" and not self.headers.get("transfer-encoding"):
            declared = self.headers.get("content-length")
            self.length = int(declared) if declared else None

        # How many bytes of the body are still to come; None while h11 frames it, then 0. Where an
        # error's body is cut short, h11 still gives what has come.
        self.left: int | None = None
        if not has_content or self.length == 0:
            self.left = 0
        elif self.status in (200, 206):
            self.left = self.length

        # What has come of the body and was not given to the caller yet.
        self._tail = memoryview(b"")
        # Whether the connection is fit for another exchange, as far as is known.
        self.is_reusable = head.http_version == b"1.1" and _keeps_connection(self.headers)
        if self.left is not None:
            unread = connection.unread()
            if unread:
                self._tail = memoryview(unread)[: self.left]
                self.is_reusable = self.is_reusable and len(unread) <= self.left

    async def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` from the body and return how many bytes it got, 0 at the end of the body.

        Other tasks may run meanwhile. Disconnected when the body is cut short.
        """
        if self.left is None:
            await self._read_framed()

        if self._tail:
            count = min(len(buffer), len(self._tail))
            buffer[:count] = self._tail[:count]
            self._tail = self._tail[count:]
        elif self.left:
            count = await self._connection.fill(buffer[: self.left])
            if not count:
                raise Disconnected(f"the body ended {self.left} bytes too early")
        else:
            count = 0

        if self.left:
            self.left -= count
        return count

    def read_now(self, buffer: memoryview) -> int:
        """Fill `buffer` with what has come of the body, and return how many bytes it got; 0 where
        `read_into` has to go on. Serves worker threads.
        """
        if not self.left or self._tail:
            return 0
        count = max(self._connection.fill_now(buffer[: self.left]), 0)
        self.left -= count
        return count

    async def _read_framed(self) -> None:
        """Get the next part of a body from h11, or learn that the body has ended."""
        # h11 may hold the next part already, and then nothing below lets other tasks run.
        await anyio.lowlevel.checkpoint()
        while self.left is None and not self._tail:
            event = await self._connection.next_event()
            if isinstance(event, h11.Data):
                self._tail = memoryview(event.data)
            else:  # the end of the body: one that is cut short is an error of `next_event`
                self.left = 0
                has_more = bool(self._connection.unread())
                self.is_reusable = self.is_reusable and not has_more

    async def read(self, limit: int) -> bytes:
        """Return the whole body; ContentError when it is longer than `limit` bytes.

        The body of an error (status 400 and above) may be too long or cut short: then what has come
        of it is returned.
        """
        if self.left == 0:
            return self.body

        is_error = self.status >= 400
        body = bytearray()
        expected = _SCRATCH if self.length is None else self.length
        scratch = memoryview(bytearray(min(PIECE, limit + 1, expected + 1)))
        try:
            while self.left != 0 and len(body) <= limit:
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
        """Read what little is left; return whether the connection is fit for another exchange."""
        if self.is_reusable and self.left != 0:
            await self._drain()
        if not self.is_reusable or self.left != 0:
            return False
        self._connection.state = State.IDLE
        return True

    async def _drain(self) -> None:
        scratch = memoryview(bytearray(8192))
        budget = _WORTH_DRAINING
        try:
            with anyio.move_on_after(_WORTH_WAITING):
                while self.left != 0 and (self.left or 0) <= budget:
                    budget -= await self.read_into(scratch)
        except WireError:
            self.is_reusable = False


def _check_not_coded(headers: Headers) -> None:
    """Refuse content in a coding, which was not asked for (R15)."""
    coding = headers.get("content-encoding")
    if coding is None or coding.lower() in ("", "identity"):
        return
    raise ProtocolBroken(
        f"the answer has Content-Encoding {printable(coding, 40)!r}, which was not asked for"
    )


def _keeps_connection(headers: Headers) -> bool:
    """Say whether another request may follow an answer over HTTP/1.1.

    An answer with both framings at once may smuggle another one in: h11 follows the coding, and the
    connection is closed (R17).
    """
    if headers.get("transfer-encoding") and headers.get("content-length"):
        return False
    if "connection" not in headers:
        return True
    return "close" not in ",".join(headers.all("connection")).lower()


class _Outgoing:
    """A request on its way to the stream."""

    def __init__(self, length: int) -> None:
        # What is offered to the stream next: the head with the first piece, then each piece.
        self.offered = memoryview(b"")
        # How many bytes of the body follow what is offered.
        self.left = length
        # Whether the source has given a second piece: the first is gone, so the request cannot be
        # sent again (I7).
        self.is_past_first = False
        # Why the request was not sent whole.
        self.error: SyncError | None = None

    def take_off(self, piece: memoryview) -> memoryview:
        """Count a piece of the body and return it; ContentError when it does not fit its length."""
        if len(piece) > self.left or (self.left and not piece):
            raise ContentError("the body does not have its declared length")
        self.left -= len(piece)
        return piece


class _Pace:
    """How fast the peer moves the bodies of an exchange, by windows of waiting."""

    def __init__(self) -> None:
        # Bytes that moved, in both directions, and seconds waited for this peer alone.
        self.moved = 0
        self.waited = 0.0

    def fail_if_slow(self, timeouts: Timeouts) -> None:
        """Judge each `slow_window` seconds of waiting by themselves; TimedOut when too slow."""
        if self.waited < timeouts.slow_window:
            return
        if self.moved < self.waited * timeouts.slowest_bytes_per_second:
            raise TimedOut(f"only {self.moved} bytes of the body moved in {self.waited:.0f} s")
        self.moved = 0
        self.waited = 0.0


class Connection:
    """A stream to an origin, and the exchange that goes over it."""

    def __init__(self, origin: Origin, stream: Stream, timeouts: Timeouts) -> None:
        self.origin = origin
        self.timeouts = timeouts
        self.state = State.IDLE
        # When the peer was last asked for something or waited for, in the event loop's time.
        self.used_at = anyio.current_time()
        self._stream = stream
        self._authority = origin.authority
        # Where heads, and bodies that h11 frames, are read to.
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._begin(0)

    def _begin(self, length: int) -> None:
        """Set what belongs to one exchange, whose request has a body of `length` bytes."""
        # A new h11 connection for each exchange costs no more than its `start_next_cycle`.
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        # What has been read and was not given to h11 yet.
        self._arrived = b""
        # Whether the peer has sent anything.
        self._has_heard = False
        self._outgoing = _Outgoing(length)
        self._pace = _Pace()
        # When the answer's head has to be there, known once nothing more is sent; and the wait for
        # it, which may have begun before.
        self._answer_until = math.inf
        self._answering: anyio.CancelScope | None = None

    def close(self) -> None:
        """Close the stream at once; whoever waits for it gets Disconnected."""
        self.state = State.CLOSED
        self._stream.close()

    def is_alive(self) -> bool:
        """Ask the socket, without waiting, whether an idle peer has left or spoken out of turn."""
        # TLS 1.3 session tickets make a fresh connection readable: only reading tells.
        try:
            return self._stream.recv_into(self._scratch[:1]) in (WANT_READ, WANT_WRITE)
        except WireError:
            return False

    def can_repeat(self) -> bool:
        """Ask whether a request that failed here may be sent over another connection (I7)."""
        return not self._has_heard and not self._outgoing.is_past_first

    def unread(self) -> bytes:
        """Return what has come behind the last event of h11."""
        trailing, _ = self._framing.trailing_data
        return trailing + self._arrived

    async def exchange(
        self,
        request: Request,
        first: memoryview,
        pieces: Pieces | None,
        seconds: float,
        now: float | None = None,
    ) -> Response:
        """Send a request and return its final answer with the body unread.

        The body is `first` and, where there are `pieces`, what they give then. `seconds` bound the
        wait for the answer's head once the whole request is sent. `now` is the time, from a caller
        who has just looked at the clock. Raises what `pieces` raises, ContentError when the body
        does not have its length, WireError when the connection fails; a failed write counts only
        where the peer says nothing about it.
        """
        self._begin(len(first) if pieces is None else pieces.length)
        outgoing = self._outgoing
        head = self._write_head(request, outgoing.left)
        self.state = State.SENDING
        outgoing.offered = memoryview(head + outgoing.take_off(first))
        self._send_at_once(seconds, now)

        if self.state is State.SENDING:
            async with anyio.create_task_group() as group:
                group.start_soon(self._send, pieces, seconds)
                answer = await self._await_head(request.method, seconds)
                group.cancel_scope.cancel()
        else:
            answer = await self._await_head(request.method, seconds)

        if isinstance(answer, Response):
            return answer
        # What a peer thinks of our certificate tells more than that the write failed.
        if isinstance(answer, ConnectFailed):
            raise answer
        raise outgoing.error or answer

    def _write_head(self, request: Request, length: int) -> bytes:
        """Return the head of a request; ProtocolBroken when it cannot be written.

        h11 is told the method alone, because that decides how it reads the answer. To let it check
        and write the headers, the same ones for most requests, would cost 4 % of a request's CPU,
        and to let it frame each piece of a body 9 % of a copy's.
        """
        method = request.method
        host = request.target if method == "CONNECT" else self._authority
        first_lines = f"{method} {request.target} HTTP/1.1\r\nHost: {host}"
        _check_written(request.target + host, is_one_word=True)
        last_line = ""
        if length or method not in ("GET", "HEAD", "DELETE", "CONNECT"):
            last_line = f"Content-Length: {length}\r\n"
        self._framing.send(_request_by(method))
        return f"{first_lines}\r\n{_lines_of(request.headers)}{last_line}\r\n".encode("ascii")

    def _send_at_once(self, seconds: float, now: float | None) -> None:
        """Send what goes without waiting: nearly always the whole request."""
        outgoing = self._outgoing
        try:
            sent = self._stream.send(outgoing.offered)
        except Disconnected as error:
            self._stop(_LAST_WORDS, error)
            return
        if sent > 0:
            outgoing.offered = outgoing.offered[sent:]
        if not outgoing.offered and not outgoing.left:
            self._stop(seconds, now=now)

    async def _send(self, pieces: Pieces | None, seconds: float) -> None:
        """Send the rest of a request while `_await_head` listens."""
        outgoing = self._outgoing
        while True:
            try:
                while outgoing.offered:
                    sent = self._stream.send(outgoing.offered)
                    if sent < 0:
                        await self._wait_in_body(sent)
                    else:
                        outgoing.offered = outgoing.offered[sent:]
                        self._pace.moved += sent
                if pieces is not None:
                    await self._send_file(pieces)
            except WireError as error:
                self._stop(_LAST_WORDS, error)
                return
            except SyncError as error:
                self._stop(0, error)
                return

            if pieces is None or not outgoing.left:
                self._stop(seconds)
                return
            try:
                outgoing.offered = outgoing.take_off(await pieces.next())
                outgoing.is_past_first = True
            except SyncError as error:
                self._stop(0, error)
                return

    async def _send_file(self, pieces: Pieces) -> None:
        """Send what lies in a file without reading it (docs/bodies.md section 2)."""
        while sent := self._stream.send_file(pieces.write_to):
            if sent < 0:
                await self._wait_in_body(sent)
                continue
            self._outgoing.left -= sent
            self._outgoing.is_past_first = True
            self._pace.moved += sent
            await anyio.lowlevel.checkpoint()

    def _stop(
        self, seconds: float, error: SyncError | None = None, *, now: float | None = None
    ) -> None:
        """Send nothing more; the head of the answer has to come within `seconds`."""
        self.state = State.WAITING if error is None else State.STOPPED
        self._outgoing.offered = memoryview(b"")
        self._outgoing.error = error
        self.used_at = anyio.current_time() if now is None else now
        self._answer_until = self.used_at + seconds
        if self._answering is not None:
            self._answering.deadline = self._answer_until

    async def _await_head(self, method: str, seconds: float) -> Response | WireError:
        """Return the final answer, whenever its head comes, or why there is none."""
        try:
            # Where processors are busy, the answer is often there already, and needs no deadline.
            event = self._read_event()
            if not isinstance(event, h11.Response):
                event = await self._wait_for_head(event)
            if event is None:
                origin = self.origin
                return TimedOut(
                    f"no answer from {origin.authority} within {seconds:g} s",
                    address=(origin.host, origin.port),
                    brief=f"no answer within {seconds:g} s",
                )
            response = Response(self, event, method)
        except WireError as error:
            return error

        if self.state is not State.WAITING:
            response.early = True
            response.is_reusable = False
        self.state = State.ANSWERED
        return response

    async def _wait_for_head(self, event: object) -> h11.Response | None:
        """Return the final answer's head, None when its time has passed.

        `event` is what `_read_event` has returned before.
        """
        with anyio.CancelScope(deadline=self._answer_until) as self._answering:
            while not isinstance(event, h11.Response):
                if isinstance(event, int):
                    await self._stream.wait(event)
                else:
                    # A flood of interim answers must not keep the deadline from passing.
                    await anyio.lowlevel.checkpoint()
                event = self._read_event()
            return event
        return None

    async def next_event(self) -> object:
        """Return h11's next event of a body, and read as much as it needs; TimedOut when that takes
        longer than the policy allows.
        """
        event = self._read_event()
        while isinstance(event, int):
            await self._wait_in_body(event)
            event = self._read_event()
        return event

    def _read_event(self) -> object:
        """Return h11's next event of the answer, as far as that has come; WANT_... where the stream has
        to be waited for.
        """
        try:
            # At the beginning h11 has nothing: to ask it then costs 1 % of a request's CPU.
            event: object = h11.NEED_DATA
            if self._has_heard:
                event = self._framing.next_event()
            while event is h11.NEED_DATA:
                if not self._arrived:
                    count = self._stream.recv_into(self._scratch)
                    if count < 0:
                        return count
                    self._has_heard = self._has_heard or count > 0
                    self._pace.moved += count
                    self._arrived = bytes(self._scratch[:count])
                # At the end of the stream this is empty, as h11 wants it.
                portion = next_portion(self._framing, self._arrived)
                self._arrived = self._arrived[len(portion) :]
                self._framing.receive_data(portion)
                event = self._framing.next_event()
        except h11.RemoteProtocolError as error:
            raise self._broken(error) from error
        return event

    def _broken(self, error: h11.RemoteProtocolError) -> WireError:
        """Say what h11 does not like about an answer."""
        _, has_ended = self._framing.trailing_data
        if has_ended:
            return Disconnected("the connection ended before the end of an answer")
        if error.error_status_hint == 431:
            return ProtocolBroken(f"the head of the answer is longer than {_LONGEST_HEAD} bytes")
        what = printable(str(error), 150)
        return ProtocolBroken(f"{self.origin.authority} does not speak HTTP/1.1: {what}")

    async def fill(self, buffer: memoryview) -> int:
        """Read what there is of a body, and wait for its first byte; 0 at the end of the stream."""
        await anyio.lowlevel.checkpoint()
        while (count := self.fill_now(buffer)) < 0:
            await self._wait_in_body(count)
        return count

    def fill_now(self, buffer: memoryview) -> int:
        """Read what there is of a body; 0 at the end of the stream, WANT_... where nothing is there.

        A buffer is filled by several reads, because OpenSSL gives 16 KiB at most by each.
        """
        filled = 0
        while filled < len(buffer):
            try:
                count = self._stream.recv_into(buffer[filled:])
            except Disconnected:
                if not filled:
                    raise
                break  # what has come is good; the next call fails
            if count <= 0:
                if not filled:
                    return count
                break
            filled += count
        self._pace.moved += filled
        return filled

    async def _wait_in_body(self, want: int) -> None:
        """Wait until the stream can be read or written again, as `want` says.

        TimedOut when nothing moves for `timeouts.idle`, and when the body was too slow before.
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
    """Return headers as they are sent; ProtocolBroken when they cannot be."""
    _check_written("".join(name + value for name, value in headers))
    return "".join(f"{name}: {value}\r\n" for name, value in headers)


def _check_written(text: str, *, is_one_word: bool = False) -> None:
    """Raise ProtocolBroken for a text that would end a line of a request, or may not be in one."""
    if not (text.isascii() and text.isprintable()) or (is_one_word and " " in text):
        # The text is not shown, because a header may be a credential (I6).
        raise ProtocolBroken("a request cannot be written: its URL or a header is malformed")


@cache
def _request_by(method: str) -> h11.Request:
    """Return any request by a method; h11 wants a Host."""
    return h11.Request(method=method, target="/", headers=[("Host", "any")])


def next_portion(framing: h11.Connection, arrived: bytes) -> bytes:
    """Return how much of what has arrived h11 may be given next; call it when h11 needs data.

    ProtocolBroken when that would go on with a run of more than 1 KiB of blanks in a head, a line
    of a chunked body or its trailers. Blanks in a body are welcome, but only h11 knows where one
    begins. So where there are many, it gets a little at a time, and what it holds back tells.
    """
    # What h11 holds back is the beginning of a head or of a line. A run goes on over the ends of
    # lines, because a folded header is one line to h11.
    held, _ = framing.trailing_data
    if len(held) + len(arrived) <= _MOST_BLANKS:
        return arrived
    end = held[len(held.rstrip(b" \t\r\n")) :]
    run = _count_blanks(end)
    if run + _count_blanks(arrived) <= _MOST_BLANKS:
        return arrived

    # So short a portion holds no run that is too long, unless it goes on with one.
    portion = arrived[:_MOST_BLANKS]
    if not held:
        return portion
    behind = portion.lstrip(b" \t")
    if run + len(portion) - len(behind) > _MOST_BLANKS:
        raise ProtocolBroken(f"the head of the answer has more than {_MOST_BLANKS} blanks in a row")
    if behind.startswith((b"\r", b"\n")):
        # A body may begin behind the end of the line.
        line, newline, _ = portion.partition(b"\n")
        return line + newline
    return portion


def _count_blanks(text: bytes) -> int:
    return text.count(b" ") + text.count(b"\t")


def parse_retry_after(value: str | None, wall_now: float) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110 section 10.2.3).

    None where there is none that can be read.
    """
    text = (value or "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return float(text[:9])

    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - wall_now)
    except (ValueError, OverflowError):
        return None
