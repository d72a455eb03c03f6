"""Which connection an exchange goes over: idle ones, new ones, and tunnels through proxies.

Owns: the pool, leases, the replacement of an idle connection found dead, tunnels.
May not know: registries, logins for them, redirects, repetition of what a peer has heard.
Invariants: I7 (a body that cannot begin again is sent once), I9 (only a connection whose exchange
ended in order goes back to the pool, every other is closed). A proxy's login goes to that proxy
only (R7).
Follows: docs/design.md section 9, RFC 9110 section 9.3.6.
"""

from __future__ import annotations

import re
import ssl
from base64 import b64encode
from collections import defaultdict
from collections.abc import Awaitable, Callable

import anyio

from _regsync.addresses import Origin
from _regsync.errors import ConnectFailed, Disconnected, ProtocolBroken, WireError
from _regsync.net.http1 import Connection, Pieces, Request, Response
from _regsync.net.proxy import Proxy
from _regsync.net.streams import Stream, Timeouts, connect, start_tls

# How many connections are kept. A registry may send us to another host for each blob.
_IDLE_PER_ORIGIN = 64
_IDLE_IN_ALL = 256

# What a registry answers to a PUT whose session the lost first attempt has closed or moved.
_SESSION_GONE = (400, 404, 416)

_PROXY_SCHEMES = re.compile(
    r"(?:^|, *)(Basic|Bearer|Digest|Negotiate|NTLM)(?![^ ,])", re.IGNORECASE
)


class Pool:
    """Idle connections. It bounds how many are kept and how long, not how many are in use (I8)."""

    def __init__(self, dial: Callable[[Origin], Awaitable[Stream]], timeouts: Timeouts) -> None:
        self.dial = dial
        self.timeouts = timeouts
        # By origin, in the order in which they became idle.
        self._idle: defaultdict[Origin, list[Connection]] = defaultdict(list)

    def lease(self, origin: Origin, *, is_fresh: bool = False) -> Lease:
        """Return a lease for exchanges with an origin; it takes a connection when one is needed,
        with `is_fresh` never one that was used before.
        """
        return Lease(self, origin, is_fresh)

    def reuse(self, origin: Origin, now: float | None = None) -> Connection | None:
        """Take the connection to an origin that was used last and lives; close what does not.

        `now` is the time, from a caller who has just looked at the clock.
        """
        if now is None:
            now = anyio.current_time()
        # At any origin: nobody may ever ask for one again.
        oldest = now - self.timeouts.idle_connection
        for idle in self._idle.values():
            while idle and idle[0].used_at <= oldest:
                idle.pop(0).close()

        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_alive():
                return connection
            connection.close()
        return None

    def keep(self, connection: Connection) -> None:
        """Keep a connection whose last exchange ended in order."""
        idle = self._idle[connection.origin]
        idle.append(connection)

        # At most one is too many, as one has come.
        if len(idle) > _IDLE_PER_ORIGIN:
            idle.pop(0).close()
        elif sum(map(len, self._idle.values())) > _IDLE_IN_ALL:
            firsts = [idle[0] for idle in self._idle.values() if idle]
            longest_idle = min(firsts, key=lambda connection: connection.used_at)
            self._idle[longest_idle.origin].remove(longest_idle)
            longest_idle.close()

    def close(self, origin: Origin | None = None) -> None:
        """Close the idle connections to an origin, or all."""
        origins = [*self._idle] if origin is None else [origin]
        for closed in origins:
            for connection in self._idle.pop(closed, ()):
                connection.close()


class Lease:
    """The right to one connection at a time, for exchanges that belong together."""

    def __init__(self, pool: Pool, origin: Origin, is_fresh: bool) -> None:
        self.origin = origin
        self._pool = pool
        self._is_fresh = is_fresh
        # The connection of the last exchange, and its answer once there is one.
        self._connection: Connection | None = None
        self._response: Response | None = None

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.settle()

    async def settle(self) -> None:
        """Let go of the connection: it goes back to the pool when it is fit for another exchange."""
        connection = self._connection
        response = self._response
        if connection is None:
            return
        self._connection = None
        self._response = None

        is_fit = False
        try:
            is_fit = response is not None and await response.finish()
        finally:
            if is_fit:
                self._pool.keep(connection)
            else:
                connection.close()

    async def exchange(
        self,
        request: Request,
        seconds: float | None = None,
        pieces: Pieces | None = None,
        *,
        confirm: Callable[[], None] | None = None,
        now: float | None = None,
    ) -> Response:
        """Do one exchange and return its answer with the body unread.

        The body is that of the request or what `pieces` give. `seconds` (by default the policy's)
        bound the wait for the answer's head once the body is sent. An idle connection that turns
        out to be dead is replaced by a new one, once. `confirm` is called after each wait, before
        anything is sent; where it raises, nothing is. `now` is as for Pool.reuse. Raises as
        `confirm` and Connection.exchange, ConnectFailed when no connection can be made.
        """
        if seconds is None:
            seconds = self._pool.timeouts.head
        # It is kept, so that a request that is lost with an idle connection can be sent again.
        first = memoryview(request.body)
        if pieces is not None:
            first = await pieces.next()
            now = None  # the source may have let us wait

        # The connection of the last exchange goes back to the pool, which gives the newest first:
        # a PUT goes over the connection of its POST.
        if self._connection is not None:
            await self.settle()
        if pieces is not None and confirm is not None:
            confirm()
        lost: Disconnected | None = None
        idle = None if self._is_fresh else self._pool.reuse(self.origin, now)
        if idle is not None:
            self._connection = idle
            try:
                self._response = await idle.exchange(request, first, pieces, seconds, now)
                return self._response
            except Disconnected as error:
                # Errors of this connection have no side yet; those of the body's source have one.
                comes_from_pieces = error.side is not None
                if comes_from_pieces or not idle.can_repeat():
                    raise
                lost = error
            await self.settle()

        self._connection = await self._connect(confirm)
        self._response = await self._connection.exchange(request, first, pieces, seconds)
        if lost is not None and pieces is not None and self._response.status in _SESSION_GONE:
            # The lost attempt may have ended the upload and its session. The caller then asks
            # whether the blob is there.
            raise lost
        return self._response

    async def _connect(self, confirm: Callable[[], None] | None) -> Connection:
        """Return a new connection. Where `confirm` raises, the request is no more to be sent."""
        stream = await self._pool.dial(self.origin)
        fresh = Connection(self.origin, stream, self._pool.timeouts)
        if confirm is not None:
            try:
                confirm()
            except BaseException:
                self._pool.keep(fresh)  # it serves the next exchange
                raise
        return fresh


async def open_stream(
    origin: Origin,
    *,
    context: ssl.SSLContext | None,
    timeouts: Timeouts,
    proxy: Proxy | None = None,
    proxy_context: ssl.SSLContext | None = None,
) -> Stream:
    """Connect to an origin, through a proxy if one is given.

    `context` is needed for an origin with https, `proxy_context` for a proxy with https.
    ConnectFailed leaves no socket behind.
    """
    first = origin if proxy is None else _origin_of(proxy)
    stream: Stream = await connect(first.host, first.port, timeouts)
    try:
        if proxy is not None:
            if proxy.scheme == "https":
                assert proxy_context is not None
                stream = await start_tls(stream, proxy_context, proxy.host, timeouts)
            await _open_tunnel(stream, origin, proxy, timeouts)
        if origin.scheme == "https":
            assert context is not None
            stream = await start_tls(stream, context, origin.host, timeouts)
    except BaseException:
        stream.close()
        raise
    return stream


def _origin_of(proxy: Proxy) -> Origin:
    return Origin(proxy.scheme, proxy.host, proxy.port)


async def _open_tunnel(stream: Stream, origin: Origin, proxy: Proxy, timeouts: Timeouts) -> None:
    """Ask the proxy at the other end of a stream for a tunnel to an origin."""
    target = f"{origin._replace(scheme='http', port=80).authority}:{origin.port}"
    headers: tuple[tuple[str, str], ...] = ()
    if proxy.username is not None:
        login = b64encode(f"{proxy.username}:{proxy.password or ''}".encode()).decode("ascii")
        headers = (("Proxy-Authorization", f"Basic {login}"),)

    connection = Connection(_origin_of(proxy), stream, timeouts)
    request = Request("CONNECT", target, headers)
    try:
        answer = await connection.exchange(request, memoryview(b""), None, timeouts.head)
    except WireError as error:
        reason, _, _ = error.message.partition(": ")
        raise ConnectFailed(f"the proxy {proxy} did not open a tunnel: {reason}") from None

    if not 200 <= answer.status < 300:
        raise _refusal_of_tunnel(proxy, target, answer)
    if connection.unread():
        raise ProtocolBroken(f"the proxy {proxy} sent bytes before the tunnel was used")


def _refusal_of_tunnel(proxy: Proxy, target: str, answer: Response) -> ConnectFailed:
    error = ConnectFailed(f"the proxy {proxy} refused a tunnel to {target} ({answer.status})")
    error.retryable = answer.status >= 500
    if answer.status != 407:
        return error

    # The challenge may repeat our login: only the names of schemes are shown.
    challenge = ", ".join(answer.headers.all("proxy-authenticate"))
    schemes = _PROXY_SCHEMES.findall(challenge)
    if schemes:
        error.message += f", it accepts {' or '.join(schemes)}"
    if challenge and "basic" not in [scheme.lower() for scheme in schemes]:
        error.hint = "use a proxy that accepts Basic: no other scheme is supported"
    elif proxy.username:
        error.hint = "check the user and password in the proxy's URL"
    else:
        error.hint = "put user and password into the proxy's URL, percent-encoded"
    return error
