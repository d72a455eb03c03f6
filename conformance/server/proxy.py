"""A proxy that puts faults in front of another registry, the upstream.

Owns: the exchange with the upstream; which of the upstream's URLs are rewritten.
May not know: what the registry holds, what the faults do.
Invariants: requests are forwarded unchanged. No body is held as a whole: each direction has one
buffer. If an answer contains the upstream's origin (in Location, Link or the realm of a challenge),
it is replaced by the proxy's origin, so that the client continues to use the proxy. Each exchange
has its own connection to the upstream. The journal has the number of the client's connection.
Follows: RFC 9110 section 7.6 (hop-by-hop fields).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeAlias
from urllib.parse import urlsplit

import anyio.to_thread
import h11

from ..faults.wire import Dropped, Pieces, Streamed, bodiless
from ..messages import Answer, Request, error
from .connection import Connection, Gone, SocketConnection
from .exchange import Reception, Site

__all__ = ["Proxy", "origin"]

_BUFFER = 1 << 17  # bytes
_HEAD_LIMIT = 1 << 20  # maximum size of a head in bytes, as in `http1`
# Headers that are not forwarded.
_HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"}
# Headers of answers in which the upstream's origin is replaced.
_REWRITTEN = {"location", "link", "www-authenticate"}

# Opens a connection to a host and port.
Connect: TypeAlias = "Callable[[str, int], Awaitable[Connection]]"


def origin(url: str) -> str:
    """Return the origin of a URL. Raises ValueError if the URL is more than an origin."""
    parts = urlsplit(url)
    has_path = url.count("/") > (3 if url.endswith("/") else 2)
    if parts.scheme not in ("http", "https") or not parts.hostname or has_path:
        raise ValueError(f"not http://HOST[:PORT] or https://HOST[:PORT]: {url}")
    return f"{parts.scheme}://{parts.netloc}"


class _Upstream:
    """One exchange with the upstream."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_LIMIT)
        self._buffer = bytearray(_BUFFER)
        # Bytes of the request's body that were received but not forwarded.
        self._unsent = b""
        # Whether the upstream no longer accepts bytes.
        self._is_broken = False

    # `exchange.Body`: the destination of the request's body.

    def room(self, expected: int) -> memoryview:
        return memoryview(self._buffer)

    def advance(self, count: int) -> None:
        self._unsent = bytes(memoryview(self._buffer)[:count])

    def feed(self, data: bytes) -> None:
        self._unsent += data

    async def flush(self) -> None:
        """Forward the bytes that were received."""
        data = self._unsent
        self._unsent = b""
        if data:
            await self.send(h11.Data(data=data))

    async def send(self, event: h11.Event) -> None:
        """Send an event unless the upstream no longer accepts bytes.

        It may have answered already.
        """
        data = self._parser.send(event)
        if data and not self._is_broken:
            try:
                await self._connection.send(data)
            except Gone:
                self._is_broken = True

    async def answer(self) -> h11.Response:
        """Return the head of the final answer. Raises h11.RemoteProtocolError if there is none."""
        event = await self._next()
        while not isinstance(event, h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("the upstream gave no answer")
            event = await self._next()
        return event

    async def _next(self) -> object:
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            try:
                self._parser.receive_data(await self._connection.receive())
            except Gone as problem:
                if self._parser.their_state is h11.SEND_BODY and "end" not in str(problem):
                    raise h11.RemoteProtocolError(f"the upstream: {problem}") from problem
                self._parser.receive_data(b"")
        return event

    async def body(self) -> Pieces:
        """Yield the pieces of the answer's body, then close the connection."""
        try:
            event = await self._next()
            while isinstance(event, h11.Data):
                yield bytes(event.data)
                event = await self._next()
        except h11.RemoteProtocolError as problem:
            # The upstream has not completed its answer, so the proxy must not complete it either.
            raise Dropped from problem
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection, even during an exchange."""
        self._connection.close()


class Proxy(Site):
    """A Site that forwards requests to another registry.

    `upstream` is its origin, as in https://registry.test:5000. `token_path` is the path of the
    upstream's token service. `context` is for TLS to the upstream. `connect` replaces the system's
    sockets.
    """

    def __init__(
        self,
        upstream: str,
        *,
        token_path: str = "/token",
        context: ssl.SSLContext | None = None,
        connect: Connect | None = None,
    ) -> None:
        super().__init__()
        self.upstream = origin(upstream)
        parts = urlsplit(self.upstream)
        self._authority = parts.netloc
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._context = context or (
            ssl.create_default_context() if parts.scheme == "https" else None
        )
        self._connect = connect or self._open_socket
        self.token_path = token_path

    def kind_of(self, request: Request) -> str:
        """Return "token" for `token_path`, else the request's own kind."""
        return "token" if request.path == self.token_path else request.kind

    async def _open_socket(self, host: str, port: int) -> Connection:
        sock = await anyio.to_thread.run_sync(socket.create_connection, (host, port))
        sock.setblocking(False)
        if self._context is not None:
            sock = self._context.wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
        connection = SocketConnection(sock)
        try:
            await connection.handshake()
        except BaseException:
            connection.close()
            raise
        return connection

    async def start_later(self, request: Request) -> Answer | Reception:
        """Forward a head to the upstream.

        The Reception forwards the body and returns the answer.
        """
        request.kind = self.kind_of(request)
        try:
            upstream = _Upstream(await self._connect(self._host, self._port))
        except (OSError, Gone) as problem:
            return error(502, "UNAVAILABLE", f"the upstream {self.upstream}: {problem}")
        forwarded = [
            (name, value)
            for name, value in request.headers
            if name not in _HOP_BY_HOP and name != "host"
        ]
        headers = [("host", self._authority), *forwarded, ("connection", "close")]
        try:
            await upstream.send(
                h11.Request(method=request.method, target=request.target, headers=headers)
            )
        except h11.LocalProtocolError as problem:
            upstream.close()
            return error(400, "UNSUPPORTED", f"cannot be passed on: {problem}")

        return Reception(
            upstream,
            lambda _: self._receive_answer(upstream, request),
            upstream.close,
            flush=upstream.flush,
        )

    async def _receive_answer(self, upstream: _Upstream, request: Request) -> Answer:
        try:
            await upstream.flush()
            await upstream.send(h11.EndOfMessage())
            answer = await upstream.answer()
        except (h11.RemoteProtocolError, h11.LocalProtocolError) as problem:
            upstream.close()
            return error(502, "UNAVAILABLE", str(problem))
        except BaseException:
            upstream.close()
            raise

        headers = []
        for raw_name, raw_value in answer.headers.raw_items():
            name = raw_name.decode()
            if name.lower() not in _HOP_BY_HOP:
                value = self._with_own_origin(name.lower(), raw_value.decode("latin-1"), request)
                headers.append((name, value))

        if bodiless(request.method, answer.status_code):
            upstream.close()
            return Streamed(answer.status_code, headers)
        return Streamed(answer.status_code, headers, stream=upstream.body())

    def _with_own_origin(self, name: str, value: str, request: Request) -> str:
        """Return the value of a header with this proxy's origin in place of the upstream's."""
        if name not in _REWRITTEN:
            return value
        for end in ("/", '"', ">", "?"):
            value = value.replace(self.upstream + end, request.origin + end)
        return request.origin if value == self.upstream else value
