"""Provide the connection for each exchange: an idle one, a new one, or a tunnel through a proxy.

Owns: the pool, leases, the replacement of dead idle connections, tunnels.
May not know: registries and their logins, redirects, the repetition of requests that a peer may
have received.
Invariants: I7 (a body that cannot begin again is sent once), I9 (only a connection whose exchange
ended in order returns to the pool; every other connection is closed). A proxy's login is sent to
that proxy only (R7).
Follows: docs/design.md section 9, RFC 9110 section 9.3.6.
"""

from __future__ import annotations

import re
import ssl
from base64 import b64encode
from collections import defaultdict
from collections.abc import Awaitable, Callable
from operator import attrgetter

import anyio

from _regsync.addresses import Origin
from _regsync.errors import ConnectFailed, Disconnected, ProtocolBroken, WireError
from _regsync.net.http1 import Connection, Pieces, Request, Response
from _regsync.net.proxies import Proxy
from _regsync.net.streams import Stream, Timeouts, connect, start_tls

# The most idle connections that are kept, per origin and altogether. A registry may redirect each
# blob to another host.
_IDLE_PER_ORIGIN = 64
_IDLE_IN_ALL = 256

# Statuses of a body that its upload session does not accept, because an earlier attempt has ended or
# moved the session.
SESSION_GONE = (400, 404, 416)

# Matches the names of authentication schemes in a Proxy-Authenticate header.
_PROXY_SCHEMES = re.compile(
    r"(?:^|, *)(Basic|Bearer|Digest|Negotiate|NTLM)(?![^ ,])", re.IGNORECASE
)


class Pool:
    """The idle connections. The pool limits how many are kept and for how long, but not how many
    are in use (I8).
    """

    def __init__(self, dial: Callable[[Origin], Awaitable[Stream]], timeouts: Timeouts) -> None:
        self.dial = dial  # connects to an origin
        self.timeouts = timeouts
        # By origin, in the order in which the connections became idle.
        self._idle: defaultdict[Origin, list[Connection]] = defaultdict(list)

    def lease(self, origin: Origin, *, is_fresh: bool = False) -> Lease:
        """Return a lease for exchanges with an origin. The lease takes a connection for each
        exchange.

        If `is_fresh`, an exchange never uses a connection that was used before.
        """
        return Lease(self, origin, is_fresh)

    def reuse(self, origin: Origin, now: float | None = None) -> Connection | None:
        """Take the most recently used live connection to an origin out of the pool. Returns None if
        there is none.

        Connections to the origin that turn out to be dead are closed, and so are connections to any
        origin that have been idle for too long. `now` is the current time, if the caller has just
        read the clock.
        """
        if now is None:
            now = anyio.current_time()
        # All origins are checked, because another origin may never be used again.
        oldest = now - self.timeouts.idle_connection
        for idle in self._idle.values():
            while idle and idle[0].used_at <= oldest:
                idle.pop(0).close()

        idle = self._idle[origin]
        while idle:
            connection = idle.pop()  # the most recently used
            if connection.is_alive():
                connection.used_at = now
                return connection
            connection.close()
        return None

    def keep(self, connection: Connection) -> None:
        """Add a connection to the pool after its last exchange ended in order. If there are too
        many idle connections now, close the one that has been idle for the longest time.
        """
        idle = self._idle[connection.origin]
        idle.append(connection)

        # One connection was added, so at most one has to be closed.
        if len(idle) > _IDLE_PER_ORIGIN:
            idle.pop(0).close()
        elif sum(map(len, self._idle.values())) > _IDLE_IN_ALL:
            # The connections to an origin are in the order in which they became idle.
            firsts = [idle[0] for idle in self._idle.values() if idle]
            longest_idle = min(firsts, key=attrgetter("used_at"))
            self._idle[longest_idle.origin].remove(longest_idle)
            longest_idle.close()

    def close(self, origin: Origin | None = None) -> None:
        """Close the idle connections to an origin, or all idle connections."""
        origins = [*self._idle] if origin is None else [origin]
        for closed in origins:
            for connection in self._idle.pop(closed, ()):
                connection.close()


class Lease:
    """The right to use one connection at a time, for exchanges that belong together."""

    def __init__(self, pool: Pool, origin: Origin, is_fresh: bool) -> None:
        self.origin = origin
        self._pool = pool
        self._is_fresh = is_fresh  # never use a connection that was used before
        # The connection of the last exchange, and its answer when it has arrived.
        self._connection: Connection | None = None
        self._response: Response | None = None

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def release(self) -> None:
        """Release the connection. It returns to the pool if it can serve another exchange, and is
        closed otherwise.
        """
        connection = self._connection
        response = self._response
        if connection is None:
            return
        self._connection = None
        self._response = None

        is_reusable = False
        try:
            is_reusable = response is not None and await response.finish()
        finally:  # also if the task is cancelled
            if is_reusable:
                self._pool.keep(connection)
            else:
                connection.close()

    async def exchange(
        self,
        request: Request,
        seconds: float | None = None,
        pieces: Pieces | None = None,
        *,
        check_may_send: Callable[[], None] | None = None,
        now: float | None = None,
    ) -> Response:
        """Perform one exchange, and return its answer with the body unread.

        The request's body is `request.body`, or the bytes of `pieces`. `seconds` limits the wait
        for the head of the answer after the body is sent (default: `Timeouts.head`). If an idle
        connection turns out to be dead, the request is sent again over a new connection.

        `check_may_send` is called after each wait and before anything is sent. If it raises,
        nothing is sent. `now` is as for Pool.reuse.

        Raises ConnectFailed if no connection can be made, and all errors of `check_may_send` and of
        Connection.exchange.
        """
        if seconds is None:
            seconds = self._pool.timeouts.head
        # The first piece is kept, so that a request that fails on a dead idle connection can be
        # sent again.
        first_piece = memoryview(request.body)
        if pieces is not None:
            first_piece = await pieces.next()
            now = None  # waiting for the source may have taken time

        # The connection of the last exchange returns to the pool, which prefers the most recently
        # used one. Thus a PUT uses the connection of its POST.
        if self._connection is not None:
            await self.release()
            now = None  # reading the rest of the last answer may have taken time
        if pieces is not None and check_may_send is not None:
            check_may_send()
        idle = None if self._is_fresh else self._pool.reuse(self.origin, now)
        if idle is None:
            return await self._exchange_anew(request, first_piece, pieces, seconds, check_may_send)
        self._connection = idle
        try:
            self._response = await idle.exchange(request, first_piece, pieces, seconds)
            return self._response
        except Disconnected as error:
            # Errors of the connection have no side yet; errors of the body's source have one.
            comes_from_pieces = error.side is not None
            if comes_from_pieces or not idle.can_repeat():
                raise
            lost = error

        await self.release()
        response = await self._exchange_anew(request, first_piece, pieces, seconds, check_may_send)
        # The lost attempt may have completed the upload and ended its session. On this error the
        # caller checks whether the blob exists.
        if pieces is not None and response.status in SESSION_GONE:
            raise lost
        return response

    async def _exchange_anew(
        self,
        request: Request,
        first_piece: memoryview,
        pieces: Pieces | None,
        seconds: float,
        check_may_send: Callable[[], None] | None,
    ) -> Response:
        """Perform an exchange over a new connection. If `check_may_send` raises an error, the
        connection goes to the pool unused.
        """
        stream = await self._pool.dial(self.origin)
        new = Connection(self.origin, stream, self._pool.timeouts)
        if check_may_send is not None:
            try:
                check_may_send()
            except BaseException:
                self._pool.keep(new)
                raise
        self._connection = new
        self._response = await new.exchange(request, first_piece, pieces, seconds)
        return self._response


async def open_stream(
    origin: Origin,
    *,
    context: ssl.SSLContext | None,
    timeouts: Timeouts,
    proxy: Proxy | None = None,
) -> Stream:
    """Connect to an origin, through a proxy if one is given.

    `context` is required if the origin's scheme is https. Raises ConnectFailed; no socket stays
    open then.
    """
    first_hop = origin if proxy is None else _origin_of(proxy)
    stream: Stream = await connect(first_hop.host, first_hop.port, timeouts)
    try:
        if proxy is not None:
            await _open_tunnel(stream, origin, proxy, timeouts)
        if origin.scheme == "https":
            assert context is not None
            stream = await start_tls(stream, context, origin.host, timeouts)
    except BaseException:
        stream.close()
        raise
    return stream


def _origin_of(proxy: Proxy) -> Origin:
    return Origin("http", proxy.host, proxy.port)


async def _open_tunnel(stream: Stream, origin: Origin, proxy: Proxy, timeouts: Timeouts) -> None:
    """Request a tunnel to an origin from the proxy at the other end of a stream. Raises
    ConnectFailed if there is no tunnel, and ProtocolBroken if the proxy sends more than its answer.
    """
    # CONNECT needs the port in any case, but `authority` omits the default port of the scheme.
    bracketed = f"[{origin.host}]" if ":" in origin.host else origin.host
    target = f"{bracketed}:{origin.port}"
    headers: tuple[tuple[str, str], ...] = ()
    if proxy.username is not None:
        login = b64encode(f"{proxy.username}:{proxy.password or ''}".encode()).decode("ascii")
        headers = (("Proxy-Authorization", f"Basic {login}"),)

    connection = Connection(_origin_of(proxy), stream, timeouts)
    request = Request("CONNECT", target, headers)
    try:
        answer = await connection.exchange(request, memoryview(b""), None, timeouts.head)
    except WireError as error:
        # The text after a colon may be the proxy's own, which may contain our login.
        reason, _, _ = error.message.partition(": ")
        raise ConnectFailed(f"the proxy {proxy} did not open a tunnel: {reason}") from None

    if not 200 <= answer.status < 300:
        raise _tunnel_error(proxy, target, answer)
    if connection.unread():
        raise ProtocolBroken(f"the proxy {proxy} sent bytes before the tunnel was used")


def _tunnel_error(proxy: Proxy, target: str, answer: Response) -> ConnectFailed:
    """Return the error for a proxy's refusal. It has a hint if the proxy asks for a login."""
    error = ConnectFailed(f"the proxy {proxy} refused a tunnel to {target} ({answer.status})")
    error.retryable = answer.status >= 500
    asks_for_login = answer.status == 407
    if not asks_for_login:
        return error

    # The challenge may contain our login, so only the names of its schemes are shown.
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
