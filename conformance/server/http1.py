"""The server's side of HTTP/1.1: a Site answers the requests of one connection.

Owns: heads, framing, keep-alive, when a connection ends.
May not know: sockets, TLS, what a registry is.
Invariants: one exchange at a time per connection. A body of known length is received into the
buffer of `Exchange.room`, and sent from the stored pieces, without another buffer. h11 parses heads
and chunked bodies only, because its buffer costs two copies (docs/design.md, "Body path"). Each exchange has a
parser of its own.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import NamedTuple

import h11

from ..faults.wire import bodiless, head_of, with_framing
from ..journal import Entry, Journal
from ..messages import Request, Response
from .connection import Connection, Gone
from .exchange import Dropped, Exchange, Site, Wire

__all__ = ["Endpoint"]

# Maximum size of a head in bytes. It is generous, because signed URLs and tokens may be long.
_HEAD_LIMIT = 1 << 20
_HELLO = 0x16  # the first byte of a TLS handshake, with which no HTTP request begins
_JOINED = 1 << 14  # a body of at most this many bytes is sent in one write with its head


class _Head(NamedTuple):
    """A request's head, and the state that is needed to read its body."""

    request: Request
    behind: bytes  # bytes that were received after the head
    parser: h11.Connection  # the parser of the head
    is_last: bool  # whether the connection ends after this exchange


def _unread(parser: h11.Connection) -> bytes:
    """Return the bytes that the parser has received but not parsed."""
    data, _ = parser.trailing_data
    return bytes(data)


def _ends_connection(request: Request) -> bool:
    return "close" in request.header("connection").lower()


class Endpoint:
    """A Site at an address."""

    def __init__(self, site: Site, scheme: str, host: str, port: int) -> None:
        self.app = site
        self.scheme = scheme
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"

    @property
    def journal(self) -> Journal:
        return self.app.journal

    async def converse(self, connection: Connection, number: int) -> None:
        """Answer the requests of a connection until either side ends it, then close the connection.

        `number` identifies the connection in the journal.
        """
        try:
            await connection.handshake()
            left: bytes | None = b""
            while left is not None:
                left = await self._exchange(connection, number, left)
        except Dropped as problem:
            if problem.reset:
                connection.reset()
        except (Gone, OSError):
            pass  # a client may end its connection at any time; the journal has its requests
        finally:
            connection.close()

    async def _exchange(self, connection: Connection, number: int, left: bytes) -> bytes | None:
        """Run one exchange. Returns the bytes that were received after it, or None to close.

        `left` holds the bytes that were received after the previous exchange.
        """
        head = await self._read_head(connection, number, left)
        if head is None:
            return None

        exchange = self.app.open(head.request)
        override = exchange.ask_hooks()
        exchange.start(await override if inspect.isawaitable(override) else override)
        is_early = exchange.is_early
        rest = b""
        if not is_early:
            try:
                rest = await self._receive_body(connection, head, exchange)
            except (Gone, h11.RemoteProtocolError) as problem:
                exchange.abort()
                raise Gone(str(problem)) from None
            except BaseException:
                exchange.abort()
                raise

        connection.answered = exchange.entry
        finished = exchange.finish()
        answer = finished if isinstance(finished, (Response, bytes)) else await finished
        if isinstance(answer, bytes):
            await connection.send(answer)
            return None

        is_closing = answer.close or is_early or head.is_last
        if isinstance(answer, Wire):
            async with contextlib.aclosing(answer.pieces) as pieces:
                async for piece in pieces:
                    await connection.send(piece)
            return None if is_closing else rest

        answer.close = is_closing
        await self._send(connection, answer, head.request.method, exchange.entry)
        if is_early:
            await connection.linger()
        return None if is_closing else rest

    async def _read_head(self, connection: Connection, number: int, left: bytes) -> _Head | None:
        """Read a head. Returns None if there is no valid head. A refusal has been sent then."""
        data = left
        if not left:
            data = await connection.receive()
            # This check comes first, because a TLS greeting may contain an empty line by chance.
            if data[0] == _HELLO:
                self.journal.hellos += 1
                return None

        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_LIMIT)
        try:
            parser.receive_data(data)
            while (event := parser.next_event()) is h11.NEED_DATA:
                parser.receive_data(await connection.receive())
        except h11.RemoteProtocolError as problem:
            self.journal.violations.append(f"not HTTP: {problem}")
            refusal = Response(problem.error_status_hint or 400, close=True)
            await self._send(connection, refusal, "GET")
            return None

        assert isinstance(event, h11.Request)
        request = Request(
            event.method.decode(),
            event.target.decode(),
            [(name.decode(), value.decode("latin-1")) for name, value in event.headers],
            scheme=self.scheme,
            connection=number,
        )
        is_last = event.http_version != b"1.1" or _ends_connection(request)
        return _Head(request, _unread(parser), parser, is_last)

    async def _receive_body(self, connection: Connection, head: _Head, exchange: Exchange) -> bytes:
        """Receive the body into the exchange. Returns the bytes that were received after it."""
        if exchange.request.is_chunked:
            return await self._receive_chunks(connection, head.parser, exchange)

        missing = exchange.request.length() or 0
        rest = head.behind
        if rest and missing:
            exchange.feed(rest[:missing])
            if exchange.pace is not None:
                await exchange.pace()
            used = min(missing, len(rest))
            rest = rest[used:]
            missing -= used

        while missing:
            room = exchange.room(missing)[:missing]
            count = await connection.receive_into(room)
            exchange.advance(count)
            if exchange.pace is not None:
                await exchange.pace()
            missing -= count

        return rest

    @staticmethod
    async def _receive_chunks(
        connection: Connection, parser: h11.Connection, exchange: Exchange
    ) -> bytes:
        """Receive a chunked body into the exchange.

        Returns the bytes that were received after it.
        """
        event = parser.next_event()
        while not isinstance(event, h11.EndOfMessage):
            if event is h11.NEED_DATA:
                parser.receive_data(await connection.receive())
            elif isinstance(event, h11.Data):
                exchange.feed(bytes(event.data))
                if exchange.pace is not None:
                    await exchange.pace()
            event = parser.next_event()
        return _unread(parser)

    @staticmethod
    async def _send(
        connection: Connection, answer: Response, method: str, entry: Entry | None = None
    ) -> None:
        head = head_of(answer.status, with_framing(answer))
        if bodiless(method, answer.status):
            await connection.send(head)
            return
        if answer.size <= _JOINED:
            if entry:
                entry.response_bytes = answer.size
            await connection.send(head + answer.data)
            return

        await connection.send(head)
        for piece in answer.pieces():
            await connection.send(piece, entry)
