"""."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Any

import anyio.lowlevel

from _regsync.addresses import Origin
from _regsync.errors import ConnectFailed, Disconnected, ProtocolBroken, WireError
from _regsync.net.http1 import Connection, Pieces, Request, Response
from _regsync.net.proxy import Proxy
from _regsync.net.streams import Stream, Timeouts, connect, start_tls

# a registry may send us to another host for each blob
_IDLE_PER_ORIGIN = 64


_IDLE_IN_ALL = 256


class Pool:
    """Idle connections, last in, first out, bounded and aged. It bounds nothing in use (I8)."""

    def __init__(self, dial: Callable[[Origin], Awaitable[Stream]], timeouts: Timeouts) -> None:
        self.dial = dial
        self.timeouts = timeouts
        self._idle: list[Connection] = []  # the one used last is at the end

    def take(self, origin: Origin) -> Connection | None:
        """Take the idle connection that was used last and still lives; close those that do not."""
        self.close(
            anyio.current_time() - self.timeouts.idle_connection
        )  # nobody may ever ask for the others again
        while connection := next(
            (each for each in reversed(self._idle) if each.origin == origin), None
        ):
            self._idle.remove(connection)
            if connection.is_alive():
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose last exchange ended in order."""
        connection.idle_since = anyio.current_time()
        self._idle.append(connection)
        same = [each for each in self._idle if each.origin == connection.origin]
        for surplus in same[:-_IDLE_PER_ORIGIN] or self._idle[:-_IDLE_IN_ALL]:
            self._idle.remove(surplus)
            surplus.close()

    def close(self, before: float = math.inf, origin: Origin | None = None) -> None:
        """Close the idle connections that were last used before a time, or all; or those to one
        origin.
        """
        for each in [
            each
            for each in self._idle
            if each.idle_since <= before and origin in (None, each.origin)
        ]:
            self._idle.remove(each)
            each.close()

    def lease(self, origin: Origin) -> Lease:
        return Lease(self, origin)


class Lease:
    """One connection at a time for exchanges that belong together; one found dead is replaced once."""

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self._pool = pool
        self.origin = origin
        self._connection: Connection | None = None
        self._response: Response | None = None

    async def __aenter__(self) -> Lease:
        return self

    def unsent(self) -> int:
        return len(self._connection.piece) + self._connection.left if self._connection else 0

    async def settle(self, *_: object) -> None:
        """Let go of the connection: back to the pool when it may serve again, else it is closed."""
        connection = self._connection
        response = self._response
        self._connection = self._response = None
        try:
            if connection is not None and response is not None and await response.finish():
                self._pool.give_back(connection)
                connection = None
        finally:
            if connection is not None:
                connection.close()

    __aexit__ = settle

    async def exchange(
        self, request: Request, seconds: float | None = None, pieces: Pieces | None = None
    ) -> Response:
        """Do one exchange; `seconds` bound the wait for the answer's head after the whole body."""
        seconds = self._pool.timeouts.head if seconds is None else seconds
        lost: Disconnected | None = None
        first = memoryview(request.body) if pieces is None else await pieces.next()
        while True:
            await (
                self.settle()
            )  # what came back last is taken first: a PUT goes where its POST was answered
            used = self._pool.take(self.origin) if lost is None else None
            connection = used or Connection(
                self.origin, await self._pool.dial(self.origin), self._pool.timeouts
            )
            self._connection = connection
            try:
                self._response = await connection.exchange(request, first, pieces, seconds)
            except Disconnected as error:
                dead = (
                    used is not None and not connection.heard and error.side is None
                )  # the body's source has a side
                if not dead or connection.drawn:
                    raise
                lost = error
            else:
                if (
                    lost is not None
                    and pieces is not None
                    and self._response.status in (400, 404, 416)
                ):
                    # what arrived of the first body closed its upload session, or moved it: asking
                    # tells
                    raise lost
                return self._response


async def _tunnel(stream: Stream, origin: Origin, proxy: Proxy, timeouts: Timeouts) -> None:
    """Ask the proxy for a tunnel (RFC 9110 section 9.3.6); credentials go nowhere else (R7)."""
    target = f"{origin._replace(scheme='http', port=80).authority}:{origin.port}"
    login = b64encode(f"{proxy.username}:{proxy.password or ''}".encode()).decode("ascii")
    headers = () if proxy.username is None else (("Proxy-Authorization", f"Basic {login}"),)
    connection = Connection(Origin(proxy.scheme, proxy.host, proxy.port), stream, timeouts)
    try:
        answer = await connection.exchange(
            Request("CONNECT", target, headers), memoryview(b""), None, timeouts.head
        )
    except WireError as error:
        raise ConnectFailed(
            f"the proxy {proxy} did not open a tunnel: {error.message.partition(': ')[0]}"
        ) from None
    if not 200 <= (status := answer.status) < 300:
        refused = ConnectFailed(f"the proxy {proxy} refused a tunnel to {target} ({status})")
        refused.retryable = status >= 500
        if status == 407:
            told = ", ".join(
                answer.headers.all("proxy-authenticate")
            )  # which may repeat our login: these words alone
            ways = " or ".join(
                re.findall(r"(?i)(?:^|, *)(Basic|Bearer|Digest|Negotiate|NTLM)(?![^ ,])", told)
            )
            refused.message += f", it takes {ways}" * bool(ways)
            refused.hint = (
                "only Basic is spoken here: put a proxy before it"
                if told and "basic" not in ways.lower()
                else "check the user and password in the proxy's URL"
                if proxy.username
                else "put user and password into the proxy's URL, percent-encoded"
            )
        raise refused
    if connection.framing.trailing_data[0]:
        raise ProtocolBroken(f"the proxy {proxy} sent bytes before the tunnel was used")


async def open_stream(
    origin: Origin,
    *,
    context: Any,
    timeouts: Timeouts,
    proxy: Proxy | None = None,
    proxy_context: Any = None,
) -> Stream:
    """Connect to `origin`, through `proxy` if given; `context` is for https only. ConnectFailed
    leaves no socket.
    """
    first = origin if proxy is None else Origin(proxy.scheme, proxy.host, proxy.port)
    stream: Stream = await connect(first.host, first.port, timeouts)
    try:
        if proxy is not None:
            if proxy.scheme == "https":
                stream = await start_tls(stream, proxy_context, proxy.host, timeouts)
            await _tunnel(stream, origin, proxy, timeouts)
        if origin.scheme == "https":
            stream = await start_tls(stream, context, origin.host, timeouts)
    except BaseException:
        stream.close()
        raise
    return stream
