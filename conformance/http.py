"""Serve sites by HTTP/1.1: one exchange, its bytes by h11, and connections by sockets and TLS.

A `Site` decides on requests. An `Exchange` takes one request through journal, faults, hooks, body
and answer. An `Endpoint` reads requests from a connection and sends the answers: a `Server` listens
on a TCP port, a `Place` of `memory.py` in memory. Requests of one connection are answered one after
the other. What a registry holds is unknown here. Follows RFC 9112 and, for refused bodies,
docs/protocol-facts.md section 1.12.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import anyio
import anyio.abc
import anyio.from_thread
import anyio.lowlevel
import h11

from .faults import Dropped, Faults, Injection, Wire, bodiless, head_of, with_framing
from .journal import Entry, Journal
from .messages import Answer, Content, Headers, Request, Response

__all__ = [
    "DRAINED",
    "Connection",
    "Endpoint",
    "Exchange",
    "Gone",
    "Reception",
    "Server",
    "Site",
    "SocketConnection",
    "cancelled_at_the_end",
    "receive_whole",
    "run_in_thread",
    "serve",
]

# Maximum number of bytes of a refused body that are read before the answer, as in Go's net/http.
DRAINED = 256 << 10
# After an early answer, the rest of the body is received for at most this many seconds. Closing
# earlier would reset the connection, and the client would lose the answer.
_LINGER = 2.0
# Maximum size of a head in bytes. It is generous, because signed URLs and tokens may be long.
_HEAD_LIMIT = 1 << 20
_HELLO = 0x16  # the first byte of a TLS handshake, with which no HTTP request begins
_PIECE = 1 << 16  # maximum number of bytes that are received, or sent, at once
_TURN = 1 << 20  # number of bytes after which a connection lets other tasks run
_FORM = "application/x-www-form-urlencoded"


# One exchange, without a connection.


@dataclass
class Reception:
    """A decision to receive the body before answering."""

    content: Content  # receives the bytes
    # Returns the answer after a complete body. The argument is the number of bytes received.
    finish: Callable[[int], Answer]
    abort: Callable[[], None] | None = None  # called if the body breaks off
    limit: int | None = None  # a piece that begins after this number of bytes is dropped


_Done = TypeVar("_Done")
# The decision on a head: an answer, or a Reception if the body must be received first.
Decision: TypeAlias = "Answer | Reception"
# Returns None, or an awaitable that returns None, to leave the request to the site.
Intercept: TypeAlias = "Callable[[Request], Answer | Awaitable[Answer | None] | None]"


def receive_whole(answer: Callable[[bytes], Response], limit: int = 1 << 16) -> Reception:
    """Return a decision to receive a body as one object, and to call `answer` with it.

    `answer` gets at least `limit` bytes of a body that is longer. Others are dropped.
    """
    content = Content()
    return Reception(content, lambda _: answer(bytes(content)), limit=limit)


class Site:
    """An HTTP service that an Endpoint can serve."""

    def __init__(self) -> None:
        self.journal = Journal()
        # Applied before all else to requests, and after all else to answers.
        self.faults = Faults()
        # Called with each request that no fault has answered. It may answer instead of `start`, and
        # may be asynchronous.
        self.intercept: Intercept | None = None
        # Called with each answer. It returns the answer to send.
        self.amend: Callable[[Request, Answer], Answer] | None = None

    def start(self, request: Request) -> Decision:
        """Decide on a request's head: answer it, or receive the body first."""
        raise NotImplementedError

    def kind_of(self, request: Request) -> str:
        """Return the kind of a request's path. A token service recognises its own path."""
        return request.kind

    def open(self, request: Request) -> Exchange:
        """Begin an exchange."""
        return Exchange(self, request)

    def handle(self, request: Request) -> Answer:
        """Run a whole exchange without a server, with `request.body` as the body.

        Raises TypeError if the exchange would have to wait or to break a connection.
        """
        running = self._handle(request)
        try:
            running.send(None)
        except StopIteration as done:
            answer: Answer = done.value
            return answer
        except (Dropped, anyio.NoEventLoopError) as problem:
            raise TypeError("what waits or ends a connection needs a server") from problem
        running.close()
        raise TypeError("what waits needs a server")

    async def _handle(self, request: Request) -> Answer:
        exchange = self.open(request)
        exchange.start(await exchange.ask_hooks())
        if request.body and not exchange.is_early:
            await exchange.receive(request.body)
        answer = await exchange.shape(exchange.finish())
        if isinstance(answer, Wire):
            raise TypeError("an answer in pieces needs a server")
        if isinstance(answer, Response) and request.method != "HEAD":
            exchange.entry.response_bytes = answer.size
        return answer

    def request(
        self, method: str, target: str, headers: Headers = (), body: bytes | None = None
    ) -> Response:
        """Return the answer to a request without a server.

        Host and Content-Length are added unless `headers` has them.
        """
        names = {name.lower() for name, _ in headers}
        added = [] if "host" in names else [("host", "registry.test")]
        has_body = body is not None or method in ("POST", "PUT", "PATCH")
        if has_body and not names & {"content-length", "transfer-encoding"}:
            added.append(("content-length", str(len(body or b""))))
        answer = self.handle(Request(method, target, [*added, *headers], body or b""))
        assert isinstance(answer, Response), "this request is answered with raw bytes: use a server"
        return answer


class Exchange:
    """The processing of one request.

    Its caller awaits `ask_hooks`, calls `start` with what that returned, awaits `receive` for the
    bytes of the body unless the answer `is_early`, and awaits `shape` for what `finish` returns. It
    calls `abort` if the body breaks off. Every await may raise Dropped, which ends the connection.
    """

    def __init__(self, site: Site, request: Request) -> None:
        self.request = request
        self.entry: Entry = site.journal.open(request)
        self._site = site
        # The decision of `start`: one of the two is set.
        self._reception: Reception | None = None
        self._answer: Answer | None = None
        # The faults that apply to this exchange. None if the site has no fault rules.
        self._injection: Injection | None = None
        if site.faults.rules:
            request.kind = self.entry.kind = site.kind_of(request)
            self._injection = site.faults.injection(request, self.entry)

    async def ask_hooks(self) -> Answer | None:
        """Return the answer of a fault or of the intercept. None leaves it to the site."""
        answer = None if self._injection is None else await self._injection.before()
        if answer is not None or self._site.intercept is None:
            return answer
        intercepted = self._site.intercept(self.request)
        return await intercepted if inspect.isawaitable(intercepted) else intercepted

    def start(self, override: Answer | None) -> None:
        """Decide on the head. `override` is what `ask_hooks` returned, and has precedence."""
        decided = self._site.start(self.request) if override is None else override
        self.entry.tampered = override is not None
        self.entry.kind = self.request.kind  # a token service changes it for its own path
        if isinstance(decided, Reception):
            self._reception = decided
        else:
            self._answer = decided

    @property
    def is_early(self) -> bool:
        """Whether the answer is sent before the body is read."""
        answer = self._answer
        if not isinstance(answer, Response) or answer.early is False:
            return False
        is_long = self.request.is_chunked or (self.request.length() or 0) > DRAINED
        return bool(answer.early) or is_long

    async def receive(self, data: bytes) -> None:
        """Process bytes of the body, and let faults act at their places among them."""
        if self._injection is None:
            self.feed(data)
            return
        while data:
            limit = self._injection.limit(self.entry.request_bytes) or len(data)
            self.feed(data[:limit])
            await self._injection.pace(self.entry.request_bytes)
            data = data[limit:]

    def feed(self, data: bytes) -> None:
        """Process bytes of the body among which no fault acts."""
        received = self.entry.request_bytes
        if self._injection is not None:
            altered = bytearray(data)
            self._injection.alter(memoryview(altered), received)
            data = bytes(altered)
        reception = self._reception
        if reception is not None and (reception.limit is None or received < reception.limit):
            reception.content.feed(data)
        self.entry.request_bytes += len(data)

    def finish(self) -> Answer:
        """Return the answer of the site. The body is complete, or the answer does not need it."""
        answer = self._answer
        if self._reception is not None:
            if self.request.header("content-type").startswith(_FORM):
                self.entry.note_form(bytes(self._reception.content))
            answer = self._reception.finish(self.entry.request_bytes)
            self._reception = None
        assert answer is not None
        before = _substance(answer)
        if self._site.amend is not None:
            answer = self._site.amend(self.request, answer)
        self.entry.tampered |= _substance(answer) != before
        if self._injection is None:
            self._note(answer)
        return answer

    async def shape(self, answer: Answer) -> Answer | Wire:
        """Let faults act on the answer. Returns the form in which it is sent."""
        if self._injection is None:
            return answer
        before = _substance(answer)
        answer, shaped = await self._injection.after(answer)
        self.entry.tampered |= isinstance(shaped, Wire) or _substance(answer) != before
        self._note(answer)
        return shaped

    def _note(self, answer: Answer) -> None:
        """Record in the journal that the request is answered."""
        if isinstance(answer, Response):
            self.entry.codes = _codes(answer)
            headers = {name.lower(): value for name, value in answer.headers}
            self._site.journal.close(self.entry, answer.status, headers)

    def abort(self) -> None:
        """End the exchange without an answer, because the body broke off."""
        if self._reception is not None and self._reception.abort is not None:
            self._reception.abort()
        self._reception = None


def _substance(answer: Answer) -> object:
    """Return a value that changes with an answer's status or body, but not its headers."""
    return answer if isinstance(answer, bytes) else (answer.status, id(answer.body))


def _codes(answer: Response) -> tuple[str, ...]:
    """Return the codes of an error body, or no codes if a hook has given a body of another form."""
    if answer.status < 400:
        return ()
    try:
        return tuple(str(code) for code in answer.codes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ()


# Connections, and the exchanges on one.


class Gone(Exception):
    """The client has ended the connection."""


class Connection:
    """The server's side of a connection. Awaiting its methods raises Gone if the client ended it."""

    # The exchange that is being answered. A connection in memory records lost answers in it.
    answered: Entry | None = None

    async def handshake(self) -> None:
        """Perform the TLS handshake if the connection uses TLS."""

    async def receive(self) -> bytes:
        """Wait until bytes have arrived, and return them."""
        raise NotImplementedError

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of `data`."""
        raise NotImplementedError

    async def linger(self) -> None:
        """Drop received bytes for up to _LINGER seconds, so that the client gets the last answer."""
        with contextlib.suppress(Gone), anyio.move_on_after(_LINGER):
            while True:
                await self.receive()

    def reset(self) -> None:
        """Make the following `close` reset the connection."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection."""
        raise NotImplementedError


class Endpoint:
    """A Site at an address."""

    def __init__(self, site: Site, scheme: str, host: str, port: int) -> None:
        self.app = site
        self.scheme = scheme
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"

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
        except (Gone, OSError, h11.RemoteProtocolError):
            pass  # a client may end its connection at any time; the journal has its requests
        finally:
            connection.close()

    async def _exchange(self, connection: Connection, number: int, left: bytes) -> bytes | None:
        """Run one exchange. Returns the bytes that were received after it, or None to close.

        `left` holds the bytes that were received after the previous exchange. Each exchange has a
        parser of its own, because a fault may answer by bytes that no parser would send.
        """
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_LIMIT)
        data = left or await connection.receive()
        request = await self._read_head(connection, number, parser, data)
        if request is None:
            return None

        exchange = self.app.open(request)
        exchange.start(await exchange.ask_hooks())
        is_early = exchange.is_early
        if not is_early:
            try:
                while isinstance(event := await _next_event(connection, parser), h11.Data):
                    await exchange.receive(event.data)
            except BaseException:
                exchange.abort()
                raise

        connection.answered = exchange.entry
        answer = await exchange.shape(exchange.finish())
        if isinstance(answer, bytes):
            await connection.send(answer)
            return None

        is_last = "close" in request.header("connection").lower()
        is_old = parser.their_http_version != b"1.1"
        is_closing = answer.close or is_early or is_last or is_old
        if isinstance(answer, Wire):
            async with contextlib.aclosing(answer.pieces) as pieces:
                async for piece in pieces:
                    await connection.send(piece)
        else:
            answer.close = is_closing
            await self._send(connection, answer, request.method, exchange.entry)
            if is_early:
                await connection.linger()
        return None if is_closing else parser.trailing_data[0]

    async def _read_head(
        self, connection: Connection, number: int, parser: h11.Connection, data: bytes
    ) -> Request | None:
        """Read a head that begins with `data`.

        Returns None if there is no valid head. A refusal has been sent then.
        """
        # This check comes first, because a TLS greeting may contain an empty line by chance.
        if data[0] == _HELLO:
            self.journal.hellos += 1
            return None
        try:
            parser.receive_data(data)
            event = await _next_event(connection, parser)
        except h11.RemoteProtocolError as problem:
            self.journal.violations.append(f"not HTTP: {problem}")
            refusal = Response(problem.error_status_hint or 400, close=True)
            await connection.send(head_of(refusal.status, with_framing(refusal)))
            return None

        assert isinstance(event, h11.Request)
        return Request(
            event.method.decode(),
            event.target.decode(),
            [(name.decode(), value.decode("latin-1")) for name, value in event.headers],
            scheme=self.scheme,
            connection=number,
        )

    @staticmethod
    async def _send(connection: Connection, answer: Response, method: str, entry: Entry) -> None:
        """Send an answer. Its bytes are counted before the client can read them."""
        head = head_of(answer.status, with_framing(answer))
        if bodiless(method, answer.status):
            await connection.send(head)
            return
        if answer.size <= _PIECE:
            entry.response_bytes = answer.size
            await connection.send(head + answer.data)
            return
        await connection.send(head)
        for piece in answer.pieces():
            for start in range(0, len(piece), _PIECE):
                part = piece[start : start + _PIECE]
                entry.response_bytes += len(part)
                await connection.send(part)


async def _next_event(connection: Connection, parser: h11.Connection) -> object:
    """Return the next event of a request. Raises h11.RemoteProtocolError if it is malformed."""
    while (event := parser.next_event()) is h11.NEED_DATA:
        parser.receive_data(await connection.receive())
    return event


# Sockets and TLS.


class SocketConnection(Connection):
    """A connection over a non-blocking socket, with or without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # Bytes moved since other tasks were last allowed to run.
        self._moved = 0

    async def handshake(self) -> None:
        if isinstance(self.sock, ssl.SSLSocket):
            await self._do(self.sock.do_handshake)

    async def receive(self) -> bytes:
        data = await self._do(self.sock.recv, _PIECE)
        if not data:
            raise Gone("end of stream")
        await self._let_others_work(len(data))
        return data

    async def send(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            count = await self._do(self.sock.send, rest, ready=anyio.wait_writable)
            rest = rest[count:]
            await self._let_others_work(count)

    async def _do(
        self,
        operation: Callable[..., _Done],
        *arguments: Any,
        ready: Callable[[socket.socket], Awaitable[None]] = anyio.wait_readable,
    ) -> _Done:
        """Return what `operation` returns as soon as the socket is `ready` for it.

        TLS may have to write in order to read, and to read in order to write.
        """
        while True:
            try:
                return operation(*arguments)
            except BlockingIOError:
                await ready(self.sock)
            except ssl.SSLWantReadError:
                await anyio.wait_readable(self.sock)
            except ssl.SSLWantWriteError:
                await anyio.wait_writable(self.sock)
            except OSError as problem:
                raise Gone(str(problem)) from None

    async def _let_others_work(self, count: int) -> None:
        self._moved += count
        if self._moved >= _TURN:
            self._moved = 0
            await anyio.lowlevel.checkpoint()

    async def linger(self) -> None:
        if not isinstance(self.sock, ssl.SSLSocket):
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        await super().linger()

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        anyio.notify_closing(self.sock)
        self.sock.close()


class Server(Endpoint):
    """A Site that listens on a TCP port."""

    def __init__(self, site: Site, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        host, port = listener.getsockname()[:2]
        super().__init__(site, "http" if context is None else "https", host, port)
        self._listener = listener
        self._context = context
        self._connections = 0  # number of connections accepted so far
        self._open_connections = 0
        # Guards `_open_connections`. Notified when a connection has ended.
        self._closing = threading.Condition()

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        """Wait until no connection is open. Must not be called in the server's thread.

        By then, all requests of a client that was killed have been processed. Raises TimeoutError
        if a connection is still open after `seconds`.
        """
        with self._closing:
            if not self._closing.wait_for(lambda: self._open_connections == 0, seconds):
                raise TimeoutError(f"{self._open_connections} connections to {self.url} are open")

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
            await self.converse(SocketConnection(sock), number)
        finally:
            with self._closing:
                self._open_connections -= 1
                self._closing.notify_all()


@contextlib.asynccontextmanager
async def cancelled_at_the_end() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Run tasks while the block runs. The error of the block is raised as it is, in no group."""
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as problem:
            failure = problem
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


@contextlib.asynccontextmanager
async def serve(
    site: Site, port: int = 0, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Serve a Site at a port of 127.0.0.1 while the block runs, then close all connections.

    A port of 0 means any free port.
    """
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
        listener.setblocking(False)
        server = Server(site, listener, ssl_context)
        async with cancelled_at_the_end() as tasks:
            tasks.start_soon(server.accept)
            yield server


@contextlib.contextmanager
def run_in_thread(
    site: Site, port: int = 0, ssl_context: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """Serve a Site in another thread while the block runs, for clients that block."""
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve(site, port, ssl_context)) as server,
    ):
        yield server
