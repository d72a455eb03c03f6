"""Connect to an origin: names, addresses, tunnels through proxies, TLS.

`open_stream` does it over the edge of the run. `connect` and `handshake` are what the process's own
edge does: over real sockets.

Invariants: a stream that is not returned is closed. Tasks that wait for a socket are notified before
it is closed. A stream is never half-closed, and close_notify is not waited for. A proxy's login is
sent to that proxy only (R7).
Follows: docs/design.md section 9 ("Body path"), RFC 8305, RFC 9110 section
9.3.6.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import anyio
import anyio.to_thread

from _regsync import IS_STATIC, edge
from _regsync.addresses import Origin
from _regsync.edge import WANT_READ, WANT_WRITE
from _regsync.errors import ConnectFailed, ProtocolBroken, WireError
from _regsync.net.proxies import Proxy
from _regsync.net.wire import Connection, Request, Timeouts, tls_failure
from _regsync.text import keep_secret, printable

# Seconds between connection attempts to different addresses (RFC 8305 section 5).
_ATTEMPT_DELAY = 0.25

# The resolver's errors for a name that does not exist, or has no address.
_UNKNOWN_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

_LOGIN_HINT = (
    "put user and password into the proxy's URL, percent-encoded; the proxy has to accept Basic"
)

# Seconds until `wait` returns if another task already waits for the same direction of the socket.
_BUSY_PAUSE = 0.01


async def open_stream(
    origin: Origin,
    *,
    context: ssl.SSLContext | None,
    timeouts: Timeouts,
    proxy: Proxy | None = None,
) -> edge.Stream:
    """Connect to an origin, through a proxy if one is given.

    `context` is required if the origin's scheme is https. Raises ConnectFailed, and ProtocolBroken
    if the proxy sends more than its answer.
    """
    first_hop = origin if proxy is None else proxy
    remedy = f"set {origin.scheme.upper()}_PROXY if a proxy leads there"
    stream = await _connect(first_hop.host, first_hop.port, timeouts, remedy)
    try:
        if proxy is not None:
            await _open_tunnel(stream, origin, proxy, timeouts)
        if origin.scheme == "https":
            assert context is not None
            stream = await _start_tls(stream, context, origin.host, timeouts)
    except BaseException:
        stream.close()
        raise
    return stream


async def _connect(host: str, port: int, timeouts: Timeouts, remedy: str) -> edge.Stream:
    """Connect to a port of a host. Raises ConnectFailed if there is no connection in time. `remedy`
    is the end of its hint.
    """
    authority = Origin("", host, port).authority
    message = f"no connection to {authority} within {timeouts.connect:g} s"
    cause: OSError | None = None
    try:
        with anyio.move_on_after(timeouts.connect):
            stream: edge.Stream = await edge.current().connect(host, port)
            return stream
    except (socket.gaierror, ValueError) as error:
        reason = printable(getattr(error, "strerror", None) or str(error), 100)
        failure = ConnectFailed(
            f"the name {printable(host, 100)} could not be resolved: {reason}",
            hint=f"check the name and this machine's name servers; {remedy}",
        )
        # ValueError: the text cannot be a name. A name server that does not answer (EAI_AGAIN) may
        # answer later.
        failure.is_unknown_name = isinstance(error, ValueError) or error.errno in _UNKNOWN_NAME
        raise failure from error
    except OSError as error:
        cause = error
        reason = printable(error.strerror or str(error), 100).lower()
        message = f"no connection to {authority}: {reason}"
    raise ConnectFailed(message, hint=f"check host, port and firewalls; {remedy}") from cause


async def _start_tls(
    below: edge.Stream, context: ssl.SSLContext, host: str, timeouts: Timeouts
) -> edge.Stream:
    """Perform a TLS handshake on a plain stream. Raises ConnectFailed if it fails."""
    try:
        with anyio.move_on_after(timeouts.tls):
            secured: edge.Stream = await edge.current().start_tls(below, context, host)
            return secured
    except OSError as error:
        raise tls_failure(error, host) from error
    except ValueError as error:
        text = f"TLS with {host} cannot begin: {printable(str(error), 200)}"
        raise ConnectFailed(text) from error
    raise ConnectFailed(f"the TLS handshake with {host} took longer than {timeouts.tls:g} s")


# Tunnels.


async def _open_tunnel(
    stream: edge.Stream, origin: Origin, proxy: Proxy, timeouts: Timeouts
) -> None:
    """Request a tunnel to an origin from the proxy at the other end of a stream. Raises
    ConnectFailed if there is no tunnel, and ProtocolBroken if the proxy sends more than its answer.
    """
    # CONNECT needs the port in any case, but `authority` omits the default port of the scheme.
    bracketed = f"[{origin.host}]" if ":" in origin.host else origin.host
    target = f"{bracketed}:{origin.port}"
    headers: tuple[tuple[str, str], ...] = ()
    if proxy.username is not None:
        login = b64encode(f"{proxy.username}:{proxy.password or ''}".encode()).decode("ascii")
        keep_secret(login, proxy.password or "")
        headers = (("Proxy-Authorization", f"Basic {login}"),)

    via = Origin("http", proxy.host, proxy.port)
    connection = Connection(via, stream, timeouts, lambda connection, _: connection.close())
    request = Request("CONNECT", target, headers)
    try:
        with anyio.fail_after(timeouts.head):
            answer = await connection.exchange(request, memoryview(b""), None, timeouts.head)
    except TimeoutError:
        reason = f"no answer from {via.authority} within {timeouts.head:g} s"
        raise ConnectFailed(f"the proxy {proxy} did not open a tunnel: {reason}") from None
    except WireError as error:
        # The text after a colon may be the proxy's own, which may contain our login.
        reason, _, _ = error.message.partition(": ")
        raise ConnectFailed(f"the proxy {proxy} did not open a tunnel: {reason}") from None

    if not 200 <= answer.status < 300:
        # No text of the answer is shown, because it may have our login.
        refusal = f"the proxy {proxy} refused a tunnel to {target} ({answer.status})"
        failure = ConnectFailed(refusal, hint=_LOGIN_HINT if answer.status == 407 else None)
        failure.retryable = answer.status >= 500
        raise failure
    if connection.unread():
        raise ProtocolBroken(f"the proxy {proxy} sent bytes before the tunnel was used")


# The edge of this process.


class SocketStream:
    """A connected socket, plain or with TLS, as a stream of the edge."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self.socket = raw  # an ssl.SSLSocket after `handshake`

    def recv_into(self, buffer: memoryview) -> int:
        try:
            # Without the length, `ssl` would compute it again for each record of 16 KiB. It returns
            # 0 even if the peer has closed without close_notify, as many servers do. Lengths and
            # digests detect a truncated body.
            return self.socket.recv_into(buffer, len(buffer))
        except (BlockingIOError, ssl.SSLWantReadError):
            return WANT_READ
        except ssl.SSLWantWriteError:
            return WANT_WRITE

    def send_now(self, data: memoryview) -> int:
        """Write bytes. After WANT_WRITE the same memory has to be passed again."""
        try:
            return self.socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return WANT_WRITE
        except ssl.SSLWantReadError:
            return WANT_READ

    async def wait(self, want: int) -> None:
        try:
            if want == WANT_READ:
                await anyio.wait_readable(self.socket)
            else:
                await anyio.wait_writable(self.socket)
        except anyio.BusyResourceError:
            # Another task already waits for this direction of the socket. During a TLS key update
            # reading and writing may wait for the same direction. The caller tries again.
            await anyio.sleep(_BUSY_PAUSE)
        except (anyio.ClosedResourceError, ValueError) as error:
            raise ConnectionAbortedError("the connection was closed") from error

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            anyio.notify_closing(self.socket)
            self.socket.close()


async def connect(host: str, port: int) -> SocketStream:
    """Resolve a name and connect to the first of its addresses that answers. Raises OSError, or
    ValueError if the text cannot be a name.
    """
    # When musl's getaddrinfo() is asked for both families, it finds nothing if one of its two
    # queries is not answered. The static program asks for IPv6 addresses only if it needs them.
    families = (socket.AF_INET, socket.AF_INET6) if IS_STATIC else (socket.AF_UNSPEC,)
    errors: list[OSError] = []
    for family in families:
        try:
            return await _race(await _resolve(host, port, family))
        except OSError as error:
            errors.append(error)
    # That an address refused says more than that the other family has none.
    raise next((each for each in errors if not isinstance(each, socket.gaierror)), errors[0])


async def _race(rows: list[Any]) -> SocketStream:
    """Connect to the first address of these rows of getaddrinfo() that answers.

    The next attempt begins when the previous one has failed, or after _ATTEMPT_DELAY. Raises
    OSError if all have failed.
    """
    connected: list[SocketStream] = []  # by all attempts that have succeeded
    last_error = OSError("the name has no address that can be used")

    async def attempt(family: int, address: tuple[Any, ...], failed: anyio.Event) -> None:
        nonlocal last_error
        try:
            connected.append(await _connect_one(family, address))
            group.cancel_scope.cancel()
        except OSError as error:
            last_error = error
            failed.set()

    try:
        async with anyio.create_task_group() as group:
            for family, _, _, _, address in rows:
                failed = anyio.Event()
                group.start_soon(attempt, family, address, failed)
                with anyio.move_on_after(_ATTEMPT_DELAY):
                    await failed.wait()
        if not connected:
            raise last_error
        return connected.pop(0)
    finally:
        # Close all streams but the returned one. Two attempts may succeed in the same iteration of
        # the event loop, and if this task is cancelled, no stream is returned.
        for loser in connected:
            loser.close()


async def _connect_one(family: int, address: tuple[Any, ...]) -> SocketStream:
    """Connect to an address. Raises OSError if that fails."""
    raw = socket.socket(family, socket.SOCK_STREAM)
    stream = SocketStream(raw)
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = raw.connect_ex(address)
        if code in (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN):
            await stream.wait(WANT_WRITE)
            code = raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        stream.close()
        raise
    return stream


async def handshake(stream: SocketStream, context: ssl.SSLContext, host: str) -> SocketStream:
    """Perform a TLS handshake on a plain socket. Raises OSError, and ValueError for a name that no
    certificate can have.
    """
    # wrap_socket() leaks the descriptor of a socket that has an error, and if the name is none.
    host.encode("idna")
    code = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    secured = context.wrap_socket(
        stream.socket, server_hostname=host, do_handshake_on_connect=False
    )
    stream.socket = secured
    while True:
        try:
            secured.do_handshake()
            return stream
        except ssl.SSLWantReadError:
            await stream.wait(WANT_READ)
        except ssl.SSLWantWriteError:
            await stream.wait(WANT_WRITE)


async def in_thread(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in a worker thread. Raises OSError if the system has no thread for it now."""
    try:
        return await anyio.to_thread.run_sync(function, *arguments, **options)
    except RuntimeError as error:
        raise OSError(str(error)) from error


async def _resolve(host: str, port: int, family: int) -> list[Any]:
    """Return rows as of getaddrinfo() in the order in which to try them. Raises OSError or
    ValueError if there are none.
    """
    # A literal address needs no resolver thread and no import of the IDNA codec. If the host is not
    # a literal address, inet_pton() raises an error.
    own_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError, ValueError):
        socket.inet_pton(own_family, host)
        return [(own_family, socket.SOCK_STREAM, 0, "", (host, port))]

    # Each look-up has its own thread. With a shared pool, names whose servers do not answer would
    # delay all others.
    look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
    own_thread = anyio.CapacityLimiter(1)
    rows = await in_thread(look_up, abandon_on_cancel=True, limiter=own_thread)
    # By alternating families, IPv6 first (RFC 8305 section 4).
    sixes = [row for row in rows if row[0] == socket.AF_INET6]
    fours = [row for row in rows if row[0] == socket.AF_INET]
    return [row for row in chain.from_iterable(zip_longest(sixes, fours)) if row is not None]
