"""Byte streams to a peer over non-blocking sockets, plain or with TLS.

Owns: name resolution, connecting to the first address that answers, handshakes, the time-outs.
May not know: HTTP, registries, credentials.
Invariants: tasks that wait for a socket are notified before it is closed. A stream is never
half-closed, and close_notify is not waited for. After WANT_WRITE the same memory is passed to
`send` again.
Follows: docs/design.md section 9; docs/bodies.md sections 2 and 3, traps 1, 4, 7 and 8.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import anyio.to_thread

from _regsync import IS_STATIC, edge
from _regsync.addresses import Origin
from _regsync.errors import ConnectFailed, Disconnected, WireError
from _regsync.net.trust import explain
from _regsync.text import printable

# Returned by `recv_into`, `send` and `handshake` if they would block: what to wait for.
WANT_READ = -1
WANT_WRITE = -2

# Seconds between connection attempts to different addresses (RFC 8305 section 5).
_ATTEMPT_DELAY = 0.25

# The resolver's errors for a name that does not exist, or has no address.
_UNKNOWN_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

# A resolver error that arrives within this many seconds is an answer of a name server, and not a
# time-out: musl waits 5 seconds for a name server.
_QUICK_ANSWER = 2.0

# Seconds until `wait` returns if another task already waits for the same direction of the socket.
_BUSY_PAUSE = 0.01


class Timeouts(NamedTuple):
    """The time limits of a run, in seconds (docs/design.md section 9). Tests use shorter ones."""

    connect: float = 10.0  # resolving a name and connecting, over all its addresses
    tls: float = 10.0  # a TLS handshake
    head: float = 60.0  # the head of an answer
    manifest_put: float = 300.0  # the head of the answer to a manifest's PUT
    finish: float = 60.0  # the answer to an upload's body, plus 1 s for each MiB of the blob
    longest_finish: float = 900.0  # the upper bound of that sum
    idle: float = 60.0  # each wait for the next bytes of a body

    # A body that moves fewer bytes per second than this, measured over `slow_window` seconds, has
    # stalled.
    slowest_bytes_per_second: float = 1024.0
    slow_window: float = 300.0

    idle_connection: float = 50.0  # an idle connection is closed after this time

    # How long to wait for an unreachable host that has answered before, and for one that never has;
    # and the pause before its first probe.
    outage: float = 120.0
    first_answer: float = 15.0
    probe: float = 0.5


class Stream(Protocol):
    """A bidirectional byte stream. Only `wait` blocks.

    `recv_into`, `send` and `send_file` return the number of bytes moved, or WANT_READ or WANT_WRITE
    if they would block. `recv_into` returns 0 at the end of the stream. They raise Disconnected if
    the stream is broken, and ConnectFailed if the peer refuses the client certificate.

    `wait` takes WANT_READ or WANT_WRITE. It raises Disconnected if the stream is closed meanwhile.
    `close` closes the stream at once.
    """

    def recv_into(self, buffer: memoryview) -> int: ...
    def send(self, data: memoryview) -> int: ...

    def send_file(self, write: Callable[[int], int]) -> int:
        """Call `write` with the socket's descriptor to copy bytes from a file into the socket.
        Returns the number of bytes copied.

        Returns 0 if the stream does not support it, because the bytes have to be encrypted in
        memory.
        """
        return 0

    async def wait(self, want: int) -> None: ...
    def close(self) -> None: ...


def _connection_error(error: OSError) -> WireError:
    """Convert the error of a socket operation into ConnectFailed if the peer has refused the client
    certificate, otherwise into Disconnected.
    """
    # In TLS 1.3 the client's handshake is complete before the peer has checked the client
    # certificate. A later operation receives the refusal as an alert.
    is_alert = isinstance(error, ssl.SSLError) and "_ALERT_" in (error.reason or "")
    if is_alert:
        refusal = _tls_failure(error, "the registry")
        if refusal.hint:  # the alert is known
            return refusal
    reason = printable(error.strerror or type(error).__name__, 100)
    return Disconnected(f"the connection broke: {reason}")


def _tls_failure(error: OSError, host: str) -> ConnectFailed:
    message, hint = explain(error, host)
    failure = ConnectFailed(message, hint=hint)
    # A peer that closed the connection may answer the next time. Other TLS errors are permanent.
    failure.retryable = not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError)
    return failure


class SocketStream(Stream):
    """A connected socket in non-blocking mode, plain or with TLS."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self._socket = raw  # an ssl.SSLSocket after `secure`

    def secure(self, context: ssl.SSLContext, host: str) -> None:
        """Start TLS on the socket. The caller then calls `handshake`."""
        # wrap_socket() leaks the descriptor of a socket that has an error, and if the name is none.
        host.encode("idna")
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._socket = context.wrap_socket(
            self._socket, server_hostname=host, do_handshake_on_connect=False
        )

    def handshake(self) -> int:
        """Continue the handshake. Returns 0 when it is complete, or else what to wait for.

        Raises OSError if the handshake fails.
        """
        assert isinstance(self._socket, ssl.SSLSocket)
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return WANT_READ
        except ssl.SSLWantWriteError:
            return WANT_WRITE
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        try:
            # Without the length, `ssl` would compute it again for each record of 16 KiB. It returns
            # 0 even if the peer has closed without close_notify, as many servers do. Lengths and
            # digests detect a truncated body.
            return self._socket.recv_into(buffer, len(buffer))
        except (BlockingIOError, ssl.SSLWantReadError):
            return WANT_READ
        except ssl.SSLWantWriteError:
            return WANT_WRITE
        except OSError as error:
            raise _connection_error(error) from error

    def send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return WANT_WRITE
        except ssl.SSLWantReadError:
            return WANT_READ
        except OSError as error:
            raise _connection_error(error) from error

    def send_file(self, write: Callable[[int], int]) -> int:
        if isinstance(self._socket, ssl.SSLSocket):
            return 0
        try:
            return write(self._socket.fileno())
        except BlockingIOError:
            return WANT_WRITE
        except OSError as error:
            raise _connection_error(error) from error

    async def wait(self, want: int) -> None:
        try:
            if want == WANT_READ:
                await anyio.wait_readable(self._socket)
            else:
                await anyio.wait_writable(self._socket)
        except anyio.BusyResourceError:
            # Another task already waits for this direction of the socket. During a TLS key update
            # reading and writing may wait for the same direction. The caller tries again.
            await anyio.sleep(_BUSY_PAUSE)
        except (anyio.ClosedResourceError, ValueError) as error:
            raise Disconnected("the connection was closed") from error

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()


class _Address(NamedTuple):
    """An address to connect to."""

    family: int
    sockaddr: tuple[Any, ...]  # as getaddrinfo() returns it, depending on the family


class EdgeStream(Stream):
    """A stream of another edge than the process's own, with the errors of this module."""

    def __init__(self, inner: edge.Stream) -> None:
        self.inner = inner

    def recv_into(self, buffer: memoryview) -> int:
        try:
            return self.inner.recv_into(buffer)
        except OSError as error:
            raise _connection_error(error) from error

    def send(self, data: memoryview) -> int:
        try:
            return self.inner.send_now(data)
        except OSError as error:
            raise _connection_error(error) from error

    async def wait(self, want: int) -> None:
        try:
            await self.inner.wait(want)
        except OSError as error:
            raise Disconnected("the connection was closed") from error

    def close(self) -> None:
        self.inner.close()


async def connect(host: str, port: int, timeouts: Timeouts) -> Stream:
    """Connect to a port of a host. Raises ConnectFailed if there is no connection in time."""
    try:
        with anyio.fail_after(timeouts.connect):
            stream = await edge.current().connect(host, port)
    except (socket.gaierror, ValueError) as error:
        reason = printable(getattr(error, "strerror", None) or str(error), 100)
        failure = ConnectFailed(
            f"the name {printable(host, 100)} could not be resolved: {reason}",
            hint="check the name and this machine's name servers;"
            " set HTTPS_PROXY if a proxy leads there",
        )
        # ValueError: the text cannot be a name. A name server that does not answer (EAI_AGAIN) may
        # answer later.
        failure.is_unknown_name = isinstance(error, ValueError) or error.errno in _UNKNOWN_NAME
        raise failure from error
    except OSError as error:
        authority = Origin("", host, port).authority
        if _is_own_time_limit(error):
            message = f"no connection to {authority} within {timeouts.connect:g} s"
            brief = f"no connection within {timeouts.connect:g} s"
        else:
            brief = printable(error.strerror or str(error), 100).lower()
            message = f"no connection to {authority}: {brief}"
        raise ConnectFailed(
            message,
            address=(host, port),
            brief=brief,
            hint="check host, port and firewalls; set HTTPS_PROXY if a proxy leads there",
        ) from error
    return stream if isinstance(stream, SocketStream) else EdgeStream(stream)


async def dial(host: str, port: int) -> SocketStream:
    """Resolve a name and connect to the first of its addresses that answers.

    Raises OSError, or ValueError if the text cannot be a name.
    """
    return await _race(await _resolve(host, port))


def _is_own_time_limit(error: OSError) -> bool:
    """Report whether an error is that of `anyio.fail_after`. The kernel's has the number ETIMEDOUT:
    it gives up a connection on its own account.
    """
    return isinstance(error, TimeoutError) and error.errno is None


async def _resolve(host: str, port: int) -> list[_Address]:
    """Return the addresses of a host in the order in which to try them. Raises socket.gaierror or
    ValueError if there are none.
    """
    # A literal address needs no resolver thread and no import of the IDNA codec. If the host is not
    # a literal address, inet_pton() raises an error.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError, ValueError):
        socket.inet_pton(family, host)
        return [_Address(family, (host, port))]

    if IS_STATIC:  # the static program uses musl
        return _interleave(await _look_up_by_family(host, port))
    return _interleave(await _look_up(host, port))


async def _look_up(host: str, port: int, family: int = socket.AF_UNSPEC) -> list[Any]:
    """Return the rows of getaddrinfo(). Raises OSError or ValueError if it finds no address."""
    # Each look-up has its own thread. With a shared pool, names whose servers do not answer would
    # delay all others.
    look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
    own_thread = anyio.CapacityLimiter(1)
    return await anyio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=own_thread)


async def _look_up_by_family(host: str, port: int) -> list[Any]:
    """Resolve a name as `_look_up` does, with one query per address family, for musl's
    getaddrinfo().

    When musl is asked for both families, it finds nothing if one of its two queries is not
    answered. Therefore each family has its own call, which is repeated if a name server reports a
    temporary failure. It is not repeated after a time-out, because musl itself sends each query
    twice. After the IPv4 answer the IPv6 query gets only a short delay (RFC 8305 section 3),
    because some servers never answer it.
    """
    rows: list[Any] = []
    errors: list[Exception] = []

    async def query(family: int, seconds_for_other: float) -> None:
        # After a success, the query for the other family may take so many more seconds.
        try:
            rows.extend(await _look_up_repeatedly(host, port, family))
            group.cancel_scope.deadline = anyio.current_time() + seconds_for_other
        except (OSError, ValueError) as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(query, socket.AF_INET, _ATTEMPT_DELAY)
        group.start_soon(query, socket.AF_INET6, math.inf)
    if rows:
        return rows
    # The name is unknown only if neither family has had a temporary failure.
    temporary = [error for error in errors if getattr(error, "errno", 0) == socket.EAI_AGAIN]
    raise (temporary or errors)[0]


async def _look_up_repeatedly(host: str, port: int, family: int) -> list[Any]:
    """Return the rows of getaddrinfo(). Repeats the query once if a name server reports a temporary
    failure.
    """
    began = anyio.current_time()
    try:
        return await _look_up(host, port, family)
    except socket.gaierror as error:
        was_quick = anyio.current_time() - began < _QUICK_ANSWER  # and so no time-out
        if error.errno != socket.EAI_AGAIN or not was_quick:
            raise
    return await _look_up(host, port, family)


def _interleave(rows: list[Any]) -> list[_Address]:
    """Return the addresses of rows of getaddrinfo(), by alternating families, IPv6 first (RFC 8305
    section 4), without repetitions.
    """
    addresses = [_Address(family, sockaddr) for family, _, _, _, sockaddr in rows]
    sixes = [address for address in addresses if address.family == socket.AF_INET6]
    fours = [address for address in addresses if address.family == socket.AF_INET]
    # zip_longest() fills the shorter list with None.
    turns = itertools.chain.from_iterable(itertools.zip_longest(sixes, fours))
    return list(dict.fromkeys(address for address in turns if address is not None))


async def _race(addresses: list[_Address]) -> SocketStream:
    """Connect to several addresses, and return the first stream that is connected.

    The next attempt begins when the previous one has failed, or after _ATTEMPT_DELAY. Raises the
    last OSError if no attempt succeeds.
    """
    connected: list[SocketStream] = []  # by all attempts that have succeeded
    last_error = OSError("the name has no address that can be used")

    async def attempt(address: _Address, failed: anyio.Event) -> None:
        nonlocal last_error
        try:
            connected.append(await _connect_one(*address))
            group.cancel_scope.cancel()
        except OSError as error:
            last_error = error
            failed.set()

    try:
        async with anyio.create_task_group() as group:
            for address in addresses:
                failed = anyio.Event()
                group.start_soon(attempt, address, failed)
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


async def _connect_one(family: int, sockaddr: tuple[Any, ...]) -> SocketStream:
    """Connect to an address. Raises OSError if that fails."""
    raw = socket.socket(family, socket.SOCK_STREAM)
    stream = SocketStream(raw)
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = raw.connect_ex(sockaddr)
        if code in (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN):
            await stream.wait(WANT_WRITE)
            code = raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        stream.close()
        raise
    return stream


async def start_tls(
    below: Stream, context: ssl.SSLContext, host: str, timeouts: Timeouts
) -> Stream:
    """Perform a TLS handshake on a plain stream.

    Raises ConnectFailed if the handshake fails. The caller then closes `below`.
    """
    secured: Stream
    try:
        with anyio.fail_after(timeouts.tls):
            if isinstance(below, EdgeStream):
                secured = EdgeStream(await edge.current().start_tls(below.inner, context, host))
            else:
                secured = await edge.current().start_tls(below, context, host)
    except OSError as error:
        if _is_own_time_limit(error):
            raise ConnectFailed(
                f"the TLS handshake with {host} took longer than {timeouts.tls:g} s"
            ) from error
        raise _tls_failure(error, host) from error
    except ValueError as error:
        raise ConnectFailed(
            f"TLS with {host} cannot begin: {printable(str(error), 200)}"
        ) from error
    except Disconnected as error:
        raise ConnectFailed(f"{host} ended the TLS handshake: {error.message}") from error
    return secured


async def handshake(stream: SocketStream, context: ssl.SSLContext, host: str) -> SocketStream:
    """Perform a TLS handshake on a plain socket. Raises OSError, and ValueError for a name that no
    certificate can have.
    """
    stream.secure(context, host)
    while (want := stream.handshake()) < 0:
        await stream.wait(want)
    return stream
