"""A proxy for faults in front of a registry that is somewhere else.

Owns: the exchange with the upstream, and which names of it are rewritten.
May not know: what the registry holds, what the faults do.
Invariants: requests go on as they came. No body is held as a whole: each direction has one buffer.
Where an answer names the upstream's origin (Location, Link, the realm of a challenge), the client
reads the proxy's, so that it keeps asking the proxy. Each exchange has a connection to the upstream
of its own; the journal says on which connection of the client it came.
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

_BUFFER = 1 << 17
_HEAD_LIMIT = 1 << 20  # as the server's own
_HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"}
_REWRITTEN = {"location", "link", "www-authenticate"}

Connect: TypeAlias = "Callable[[str, int], Awaitable[Connection]]"


def origin(url: str) -> str:
    """Return the origin that a URL is, and is no more than; ValueError otherwise."""
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
        self._unsent = b""
        self._is_broken = False

    # Where the request's body goes: see exchange.Body.

    def room(self, expected: int) -> memoryview:
        return memoryview(self._buffer)

    def advance(self, count: int) -> None:
        self._unsent = bytes(memoryview(self._buffer)[:count])

    def feed(self, data: bytes) -> None:
        self._unsent += data

    async def flush(self) -> None:
        """Send the bytes that have come; an upstream that takes no more may have answered already."""
        data = self._unsent
        self._unsent = b""
        if data:
            await self.send(h11.Data(data=data))

    async def send(self, event: h11.Event) -> None:
        data = self._parser.send(event)
        if data and not self._is_broken:
            try:
                await self._connection.send(data)
            except Gone:
                self._is_broken = True

    async def answer(self) -> h11.Response:
        """Return the final answer's head; h11.RemoteProtocolError when there is none."""
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
        """Give the answer's body, and end the connection behind it."""
        try:
            event = await self._next()
            while isinstance(event, h11.Data):
                yield bytes(event.data)
                event = await self._next()
        except h11.RemoteProtocolError as problem:
            # An answer that the upstream does not end is not ended here either.
            raise Dropped from problem
        finally:
            self.close()

    def close(self) -> None:
        """End the connection, whatever is under way on it."""
        self._connection.close()


class Proxy(Site):
    """A Site that asks another registry.

    `upstream` is its origin, as in https://registry.test:5000. `rewrite` False leaves the names of
    the upstream in answers as they are. `token_path` is the path of the upstream's token service.
    `connect` is for a network that is not the system's.
    """

    def __init__(
        self,
        upstream: str,
        *,
        rewrite: bool = True,
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
        self.rewrite = rewrite
        self.token_path = token_path
        self.start_later = self._start_later

    def kind_of(self, request: Request) -> str:
        """Name a request; the token service is at `token_path`."""
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

    async def _start_later(self, request: Request) -> Answer | Reception:
        """Pass a head on; the answer follows the body."""
        request.kind = self.kind_of(request)
        try:
            upstream = _Upstream(await self._connect(self._host, self._port))
        except (OSError, Gone) as problem:
            return error(502, "UNAVAILABLE", f"the upstream {self.upstream}: {problem}")
        passed_on = [
            (name, value)
            for name, value in request.headers
            if name not in _HOP_BY_HOP and name != "host"
        ]
        headers = [("host", self._authority), *passed_on, ("connection", "close")]
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
        """Name this origin where an answer names the upstream's."""
        if not self.rewrite or name not in _REWRITTEN:
            return value
        for end in ("/", '"', ">", "?"):
            value = value.replace(self.upstream + end, request.origin + end)
        return request.origin if value == self.upstream else value
