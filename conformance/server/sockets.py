"""The thin edge: a Site on a TCP port, by h11 for heads and by hand for bodies.

Owns: sockets, TLS, keep-alive, framing.
May not know: what a registry is.
Invariants: one exchange at a time per connection. A body of known length is received in place
(`Exchange.room`) and sent from the stored pieces, never through a buffer of its own. h11 sees only
chunked bodies and the heads that heads.py leaves to it, because its buffer costs two copies
(docs/bodies.md); each exchange has a Connection object of its own.

`serve` is for tests on the same loop, `run_in_thread` for tests that drive another program.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import anyio
import anyio.from_thread
import anyio.lowlevel
import h11

from ..journal import Entry, Journal
from ..messages import Request, Response
from .exchange import Dropped, Exchange, Site, Wire
from .heads import read_head

__all__ = ["Server", "run_in_thread", "serve"]

_HEAD_LIMIT = 1 << 20  # signed locations and fat tokens are not this registry's problem
_READ = 1 << 16
_HELLO = 0x16  # the first byte of a TLS handshake record, of no HTTP request
_TURN = 1 << 20  # bytes moved before other tasks get their turn
_JOINED = 1 << 14  # a body up to this leaves in one write with its head
# Seconds for which unread bytes are taken after an early answer: a reset would destroy the answer.
_LINGER = 2.0


class _Gone(Exception):
    """The client went away."""


class _Stream:
    """A non-blocking socket, plain or TLS, awaited by readiness."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.answered: Entry | None = None  # the exchange whose answer is sent
        self._moved = 0
        self._room = memoryview(bytearray(_READ))  # for heads: a new one each time has to be zeroed

    async def _wait(self, problem: Exception, *, writing: bool = False) -> None:
        """Wait until the operation can go on; TLS may have to write in order to read."""
        if isinstance(problem, ssl.SSLWantWriteError) or (
            writing and isinstance(problem, BlockingIOError)
        ):
            await anyio.wait_writable(self.sock)
        else:
            await anyio.wait_readable(self.sock)

    async def handshake(self) -> None:
        while isinstance(self.sock, ssl.SSLSocket):
            try:
                return self.sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as problem:
                await self._wait(problem)
        return None

    async def receive_into(self, room: memoryview) -> int:
        """Receive at least one byte; `_Gone` at the end."""
        while True:
            try:
                count = self.sock.recv_into(room)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as problem:
                await self._wait(problem)
                continue
            except OSError as problem:
                raise _Gone(str(problem)) from None
            if not count:
                raise _Gone("end of stream")
            await self._take_turns(count)
            return count

    async def receive(self) -> bytes:
        count = await self.receive_into(self._room)
        return bytes(self._room[:count])

    async def send(self, piece: bytes | memoryview, entry: Entry | None = None) -> None:
        """Send all of `piece`; count it in `entry` before it can have arrived, exactly in the end."""
        rest = memoryview(piece)
        while rest:
            before = entry.response_bytes if entry else 0
            try:
                if entry:
                    entry.response_bytes = before + len(rest)
                count = self.sock.send(rest)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as problem:
                if entry:
                    entry.response_bytes = before
                await self._wait(problem, writing=True)
                continue
            except OSError as problem:
                if entry:
                    entry.response_bytes = before
                raise _Gone(str(problem)) from None

            if entry:
                entry.response_bytes = before + count

            rest = rest[count:]
            await self._take_turns(count)

    async def _take_turns(self, count: int) -> None:
        self._moved += count
        if self._moved >= _TURN:
            self._moved = 0
            await anyio.lowlevel.checkpoint()

    async def linger(self) -> None:
        """Take bytes that still come, for a while, so that no reset destroys the last answer."""
        buffer = memoryview(bytearray(1 << 18))
        with contextlib.suppress(_Gone, OSError), anyio.move_on_after(_LINGER):
            if not isinstance(self.sock, ssl.SSLSocket):
                self.sock.shutdown(socket.SHUT_WR)
            while True:
                await self.receive_into(buffer)

    def reset(self) -> None:
        """Let the end of the connection, which follows, be a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        anyio.notify_closing(self.sock)
        self.sock.close()


@dataclass
class _Body:
    """How a body is to be received.

    `held` are bytes that came with the head, `parser` is h11 where it read the head, `last` says
    that the connection ends after this exchange.
    """

    held: bytes
    parser: h11.Connection | None = None
    last: bool = False


def _unread(parser: h11.Connection) -> bytes:
    """Return the bytes that the parser has received and not used."""
    data, _ = parser.trailing_data
    return bytes(data)


class Server:
    """A Site that is listening."""

    def __init__(self, site: Site, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        self.app = site
        self.host, self.port = listener.getsockname()[:2]
        self.scheme = "http" if context is None else "https"
        self._listener = listener
        self._context = context
        self._connections = 0
        self._open_connections = 0
        self._closing = threading.Condition()  # told of each connection that has ended

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        """Wait, in another thread than the server's, until no connection is open.

        What a client that was killed had sent has been carried out by then. TimeoutError when a
        connection stays open for longer.
        """
        with self._closing:
            if not self._closing.wait_for(lambda: self._open_connections == 0, seconds):
                raise TimeoutError(f"{self._open_connections} connections to {self.url} are open")

    @property
    def address(self) -> str:
        """HOST:PORT, the host in brackets where it has to be."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"

    @property
    def journal(self) -> Journal:
        return self.app.journal

    async def accept(self) -> None:
        """Accept connections until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    sock, _ = self._listener.accept()
                except BlockingIOError:
                    await anyio.wait_readable(self._listener)
                    continue
                self._connections += 1
                with self._closing:
                    self._open_connections += 1
                tasks.start_soon(self._connection, sock, self._connections)

    async def _connection(self, sock: socket.socket, number: int) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
            await self.converse(_Stream(sock), number)
        finally:
            with self._closing:
                self._open_connections -= 1
                self._closing.notify_all()

    async def converse(self, stream: _Stream, number: int) -> None:
        """Answer a connection's requests until either side ends it; the stream is closed then."""
        try:
            await stream.handshake()
            left: bytes | None = b""
            while left is not None:
                left = await self._exchange(stream, number, left)
        except Dropped as problem:
            if problem.reset:
                stream.reset()
        except (_Gone, OSError):
            pass  # clients come and go; what they had asked is in the journal
        finally:
            stream.close()

    async def _exchange(self, stream: _Stream, number: int, left: bytes) -> bytes | None:
        """Carry out one exchange; return the bytes received behind it, None to close."""
        begun = await self._begin(stream, number, left)
        if begun is None:
            return None

        request, body = begun
        exchange = self.app.open(request)
        override = exchange.ask_hooks()
        exchange.start(await override if inspect.isawaitable(override) else override)
        early = exchange.is_early
        rest = b""
        if not early:
            try:
                rest = await self._receive_body(stream, body, exchange)
            except (_Gone, h11.RemoteProtocolError) as problem:
                exchange.abort()
                raise _Gone(str(problem)) from None
            except BaseException:
                exchange.abort()
                raise

        stream.answered = exchange.entry
        finished = exchange.finish()
        answer = finished if isinstance(finished, (Response, bytes)) else await finished
        if isinstance(answer, bytes):
            await stream.send(answer)
            return None
        if isinstance(answer, Wire):
            async with contextlib.aclosing(answer.pieces) as pieces:
                async for piece in pieces:
                    await stream.send(piece)
            return None if answer.close or early or body.last else rest

        answer.close = answer.close or early or body.last
        await self._send(stream, answer, request.method, exchange.entry)
        if early:
            await stream.linger()
        return None if answer.close else rest

    async def _begin(
        self, stream: _Stream, number: int, left: bytes
    ) -> tuple[Request, _Body] | None:
        """Read a head; None when there is none, and then every answer to it has been sent."""
        data = left
        if not left:
            data = await stream.receive()
            # First of all: a TLS greeting may hold an empty line, the end of a head, by chance.
            if data[0] == _HELLO:
                self.journal.hellos += 1
                return None

        plain = read_head(data)
        if plain is not None:
            head = (plain.method, plain.target, plain.headers)
            body = _Body(data[plain.length :])
        else:
            parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_LIMIT)
            try:
                parser.receive_data(data)
                while (event := parser.next_event()) is h11.NEED_DATA:
                    parser.receive_data(await stream.receive())
            except h11.RemoteProtocolError as problem:
                self.journal.violations.append(f"not HTTP: {problem}")
                await self._send(
                    stream, Response(problem.error_status_hint or 400, close=True), "GET"
                )
                return None

            assert isinstance(event, h11.Request)
            headers = [(name.decode(), value.decode("latin-1")) for name, value in event.headers]
            head = (event.method.decode(), event.target.decode(), headers)
            body = _Body(_unread(parser), parser, event.http_version != b"1.1")

        request = Request(*head, scheme=self.scheme, connection=number)
        body.last = body.last or "close" in request.header("connection").lower()
        return request, body

    async def _receive_body(self, stream: _Stream, body: _Body, exchange: Exchange) -> bytes:
        """Receive the body into the exchange; return the bytes that came behind it."""
        if exchange.request.chunked:
            assert body.parser is not None, "a head with a transfer coding is h11's"
            return await self._receive_chunks(stream, body.parser, exchange)

        missing = exchange.request.length() or 0
        rest = body.held
        if rest and missing:
            exchange.feed(rest[:missing])
            if exchange.pace is not None:
                await exchange.pace()
            used = min(missing, len(rest))
            rest = rest[used:]
            missing -= used

        while missing:
            room = exchange.room(missing)[:missing]
            count = await stream.receive_into(room)
            exchange.advance(count)
            if exchange.pace is not None:
                await exchange.pace()
            missing -= count

        return rest

    @staticmethod
    async def _receive_chunks(stream: _Stream, parser: h11.Connection, exchange: Exchange) -> bytes:
        """Receive a chunked body into the exchange; return the bytes that came behind it."""
        event = parser.next_event()
        while not isinstance(event, h11.EndOfMessage):
            if event is h11.NEED_DATA:
                parser.receive_data(await stream.receive())
            elif isinstance(event, h11.Data):
                exchange.feed(bytes(event.data))
                if exchange.pace is not None:
                    await exchange.pace()
            event = parser.next_event()
        return _unread(parser)

    @staticmethod
    async def _send(
        stream: _Stream, answer: Response, method: str, entry: Entry | None = None
    ) -> None:
        headers = list(answer.headers)
        if answer.status not in (204, 304) and not answer.header("content-length"):
            headers.append(("Content-Length", str(answer.size)))
        if answer.close:
            headers.append(("Connection", "close"))

        lines = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if method == "HEAD" or answer.status in (204, 304):
            await stream.send(head)
            return
        if answer.size <= _JOINED:
            if entry:
                entry.response_bytes = answer.size
            await stream.send(head + answer.data)
            return

        await stream.send(head)
        for piece in answer.pieces():
            await stream.send(piece, entry)


_REASONS = {
    200: "OK",
    201: "Created",
    202: "Accepted",
    204: "No Content",
    206: "Partial Content",
    304: "Not Modified",
    307: "Temporary Redirect",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    416: "Range Not Satisfiable",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@contextlib.asynccontextmanager
async def serve(
    app: Site, host: str = "127.0.0.1", port: int = 0, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Serve `app` while the block runs; connections that are still open are closed at its end."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
        server = Server(app, listener, ssl_context)
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.accept)
            try:
                yield server
            except Exception as problem:
                # The block's own failure leaves as it is; only the server's own come as a group.
                failure = problem
            tasks.cancel_scope.cancel()

        if failure is not None:
            raise failure


@contextlib.contextmanager
def run_in_thread(
    app: Site, host: str = "127.0.0.1", port: int = 0, ssl_context: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """Serve `app` from a thread of its own while the block runs."""
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve(app, host, port, ssl_context)) as server,
    ):
        yield server
