"""Byte streams to a peer: own non-blocking sockets, plain, with TLS, with TLS inside TLS.

Owns: the look-up of names, the race between addresses, handshakes, the policy's time-outs.
May not know: HTTP, registries, credentials.
Invariants: whoever waits for a socket is told before it is closed. A stream is never half-closed,
and nobody waits for a close_notify. After WANT_WRITE the same memory is offered again.
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

from _regsync import IS_STATIC
from _regsync.addresses import Origin
from _regsync.errors import ConnectFailed, Disconnected, WireError
from _regsync.net.tls import explain
from _regsync.text import printable

# What `recv_into`, `send` and `handshake` return when nothing can move now.
WANT_READ = -1
WANT_WRITE = -2

# Seconds between attempts to connect, as RFC 8305 section 5 recommends.
_ATTEMPT_DELAY = 0.25

# How the resolver says that a name does not exist, or has no address.
_UNKNOWN_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

# Seconds within which a name server tells of its troubles; musl waits 5 for one that is silent.
_QUICK_ANSWER = 2.0

# Seconds until two waits for one direction of a socket are tried again.
_BUSY_PAUSE = 0.01

# Bytes of ciphertext that are read at once inside a TLS proxy's stream.
_TLS_SCRATCH = 64 * 1024

# Bytes that are encrypted before a TLS proxy has taken what was encrypted before.
_TLS_PORTION = 64 * 1024


class Timeouts(NamedTuple):
    """How long each wait may take, in seconds (docs/design.md section 9); tests pass others."""

    connect: float = 10.0
    tls: float = 10.0
    head: float = 60.0
    manifest_put: float = 300.0
    finish: float = 60.0  # for the answer to an upload's body, and 1 s for each MiB of the blob
    longest_finish: float = 900.0
    idle: float = 60.0
    slowest_bytes_per_second: float = 1024.0
    slow_window: float = 300.0
    idle_connection: float = 50.0

    # How long a host is waited for that is away: one that has answered before, and one that never
    # has; and the pause before the first probe.
    outage: float = 120.0
    first_answer: float = 15.0
    probe: float = 0.5


class Stream(Protocol):
    """Two directions of bytes; only `wait` sleeps.

    `recv_into`, `send` and `send_file` return how many bytes moved, or WANT_READ or WANT_WRITE; 0
    bytes read is the end. They raise Disconnected when the stream is broken, ConnectFailed when the peer refuses
    our certificate. `wait` takes a WANT_... and raises Disconnected when the stream is closed
    meanwhile. `close` is at once.
    """

    def recv_into(self, buffer: memoryview) -> int: ...
    def send(self, data: memoryview) -> int: ...

    def send_file(self, write: Callable[[int], int]) -> int:
        """Let `write` move bytes from a file into the socket, whose descriptor it gets, and return
        their number; 0 where bytes have to pass through memory, to be encrypted.
        """
        return 0

    async def wait(self, want: int) -> None: ...
    def close(self) -> None: ...


def _broken(error: OSError) -> WireError:
    """Say how a connection broke."""
    # In TLS 1.3 a peer judges our certificate when the handshake is already over for us.
    is_alert = isinstance(error, ssl.SSLError) and "_ALERT_" in (error.reason or "")
    if is_alert:
        refusal = _tls_failure(error, "the registry")
        if refusal.hint:
            return refusal
    reason = printable(error.strerror or type(error).__name__, 100)
    return Disconnected(f"the connection broke: {reason}")


def _tls_failure(error: OSError, host: str) -> ConnectFailed:
    message, hint = explain(error, host)
    failure = ConnectFailed(message, hint=hint)
    # A peer that merely went away may be there again. What it says in TLS stays as it is.
    failure.retryable = not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError)
    return failure


class SocketStream(Stream):
    """A connected socket in non-blocking mode, plain or with TLS."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self._socket = own

    def is_secured(self) -> bool:
        """Ask whether TLS was begun."""
        return isinstance(self._socket, ssl.SSLSocket)

    def secure(self, context: ssl.SSLContext, host: str) -> SocketStream:
        """Begin TLS; `handshake` goes on with it."""
        # Of a connection that is gone wrap_socket() loses the descriptor.
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._socket = context.wrap_socket(
            self._socket, server_hostname=host, do_handshake_on_connect=False
        )
        return self

    def handshake(self) -> int:
        """Go on with the handshake: 0 when done, else what to wait for; OSError when it failed."""
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
            # `ssl` measures a buffer whose length it is not told, for each 16 KiB again.
            return self._socket.recv_into(buffer, len(buffer))
        except (BlockingIOError, ssl.SSLWantReadError):
            return WANT_READ
        except ssl.SSLWantWriteError:
            return WANT_WRITE
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            # An end without close_notify is common. Lengths and digests decide whether anything is
            # missing.
            return 0
        except OSError as error:
            raise _broken(error) from error

    def send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return WANT_WRITE
        except ssl.SSLWantReadError:
            return WANT_READ
        except OSError as error:
            raise _broken(error) from error

    def send_file(self, write: Callable[[int], int]) -> int:
        if self.is_secured():
            return 0
        try:
            return write(self._socket.fileno())
        except BlockingIOError:
            return WANT_WRITE
        except OSError as error:
            raise _broken(error) from error

    async def wait(self, want: int) -> None:
        try:
            if want == WANT_READ:
                await anyio.wait_readable(self._socket)
            else:
                await anyio.wait_writable(self._socket)
        except anyio.BusyResourceError:
            # Both directions of TLS may want the same, in a key update: the caller looks again.
            await anyio.sleep(_BUSY_PAUSE)
        except (anyio.ClosedResourceError, ValueError) as error:
            raise Disconnected("the connection was closed") from error

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()


class TlsInsideStream(Stream):
    """TLS inside another stream, that of a TLS proxy.

    Only `send` waits for room and only `recv_into` for bytes, so both may go on at once.
    """

    def __init__(self, inner: Stream, context: ssl.SSLContext, server_hostname: str) -> None:
        self._inner = inner
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_hostname=server_hostname
        )
        # Ciphertext that the inner stream has not taken.
        self._unsent = memoryview(b"")
        # How many bytes of `send`'s data that stands for.
        self._encrypted = 0
        self._scratch = memoryview(bytearray(_TLS_SCRATCH))

    def handshake(self) -> int:
        """Go on with the handshake: 0 when done, else what to wait for; OSError when it failed."""
        result = self._reading(self._tls.do_handshake)
        blocked = self._flush()
        return blocked or result

    def recv_into(self, buffer: memoryview) -> int:
        # With a buffer it returns a count, which typeshed does not know.
        read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]
        try:
            return self._reading(lambda: read(len(buffer), buffer))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        except OSError as error:
            raise _broken(error) from error

    def send(self, data: memoryview) -> int:
        if not self._encrypted:
            try:
                self._encrypted = self._tls.write(data[:_TLS_PORTION])
            except ssl.SSLWantReadError:
                return WANT_READ
            except OSError as error:
                raise _broken(error) from error

        # The same memory is offered again after this, and is not encrypted twice.
        blocked = self._flush()
        if blocked:
            return blocked
        sent = self._encrypted
        self._encrypted = 0
        return sent

    async def wait(self, want: int) -> None:
        await self._inner.wait(want)

    def close(self) -> None:
        self._inner.close()

    def _reading(self, step: Callable[[], int | None]) -> int:
        """Do a step of OpenSSL, and feed it with ciphertext as long as it wants any."""
        while True:
            try:
                return step() or 0
            except ssl.SSLWantReadError:
                # What has no room now goes with the next `send`. Where that is broken, what the
                # peer said before it left is still to be read.
                with suppress(Disconnected):
                    self._flush()
                count = self._inner.recv_into(self._scratch)
                if count < 0:
                    return count
                if count:
                    self._incoming.write(self._scratch[:count])
                else:
                    self._incoming.write_eof()

    def _flush(self) -> int:
        """Send ciphertext: 0 when all is gone, else what to wait for."""
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            sent = self._inner.send(self._unsent)
            if sent < 0:
                return sent
            self._unsent = self._unsent[sent:]
        return 0


class _Address(NamedTuple):
    """Where a socket may connect to: `place` is the operating system's form of the address."""

    family: int
    place: tuple[Any, ...]


async def connect(host: str, port: int, timeouts: Timeouts) -> SocketStream:
    """Connect to the first address of a name that answers; ConnectFailed when none does."""
    try:
        with anyio.fail_after(timeouts.connect):
            return await _race(await _resolve(host, port))
    except OSError as error:
        authority = Origin("", host, port).authority
        if isinstance(error, TimeoutError):
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


async def _resolve(host: str, port: int) -> list[_Address]:
    """Return the addresses of a host in the order in which they are tried."""
    # An address needs neither a thread nor the tables of international names.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError, ValueError):
        socket.inet_pton(family, host)
        return [_Address(family, (host, port))]

    try:
        rows = await (_look_up_by_family(host, port) if IS_STATIC else _look_up(host, port))
    except (OSError, ValueError) as error:
        reason = printable(getattr(error, "strerror", None) or str(error), 100)
        failure = ConnectFailed(
            f"the name {printable(host, 100)} could not be resolved: {reason}",
            hint="check the name and this machine's name servers;"
            " set HTTPS_PROXY if a proxy leads there",
        )
        # A name server that is silent may come back: that is EAI_AGAIN.
        is_no_name = isinstance(error, ValueError) or error.errno in _UNKNOWN_NAME
        failure.is_unknown_name = is_no_name
        raise failure from error
    return _interleave(rows)


async def _look_up(host: str, port: int, family: int = socket.AF_UNSPEC) -> list[Any]:
    """Return what getaddrinfo() finds; OSError or ValueError when that is nothing."""
    # A thread for each look-up: otherwise names whose servers are silent would hold up all others.
    look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
    own_thread = anyio.CapacityLimiter(1)
    return await anyio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=own_thread)


async def _look_up_by_family(host: str, port: int) -> list[Any]:
    """Return what getaddrinfo() finds where it is musl's, as `_look_up` does.

    Asked for both families, musl finds nothing when one of its two questions stays without an
    answer. So they are asked apart, and again when a name server had trouble; where none answered,
    musl has asked twice. After IPv4's answer the other one has little time left (RFC 8305 section
    3): some servers never give it.
    """
    rows: list[Any] = []
    errors: list[Exception] = []

    async def ask(family: int, patience: float) -> None:
        began = anyio.current_time()
        try:
            try:
                rows.extend(await _look_up(host, port, family))
            except socket.gaierror as error:
                was_quick = anyio.current_time() - began < _QUICK_ANSWER
                if error.errno != socket.EAI_AGAIN or not was_quick:
                    raise
                rows.extend(await _look_up(host, port, family))
            group.cancel_scope.deadline = anyio.current_time() + patience
        except (OSError, ValueError) as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, socket.AF_INET, _ATTEMPT_DELAY)
        group.start_soon(ask, socket.AF_INET6, math.inf)
    if not rows:
        # A name is unknown where both answers say so.
        unsure = [error for error in errors if getattr(error, "errno", 0) == socket.EAI_AGAIN]
        raise (unsure or errors)[0]
    return rows


def _interleave(rows: list[Any]) -> list[_Address]:
    """Order what getaddrinfo() found by family in turn, IPv6 first (RFC 8305 section 4)."""
    addresses = [_Address(family, place) for family, _, _, _, place in rows]
    sixes = [address for address in addresses if address.family == socket.AF_INET6]
    fours = [address for address in addresses if address.family == socket.AF_INET]
    turns = itertools.chain.from_iterable(itertools.zip_longest(sixes, fours))
    return list(dict.fromkeys(address for address in turns if address is not None))


async def _race(addresses: list[_Address]) -> SocketStream:
    """Return the first stream that connects, or raise the last OSError when none does.

    The next attempt begins when the one before has failed, or after 250 ms.
    """
    connected: list[SocketStream] = []
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
        # Two may connect in the same turn of the loop, and none may stay when this is cancelled.
        for loser in connected:
            loser.close()


async def _connect_one(family: int, place: tuple[Any, ...]) -> SocketStream:
    own = socket.socket(family, socket.SOCK_STREAM)
    stream = SocketStream(own)
    try:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = own.connect_ex(place)
        if code in (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN):
            await stream.wait(WANT_WRITE)
            code = own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        stream.close()
        raise
    return stream


async def start_tls(
    below: Stream, context: ssl.SSLContext, host: str, timeouts: Timeouts
) -> Stream:
    """Shake hands over a plain socket, or inside another stream.

    ConnectFailed when that fails; then the caller closes `below`.
    """
    secured: SocketStream | TlsInsideStream
    try:
        if isinstance(below, SocketStream) and not below.is_secured():
            secured = below.secure(context, host)
        else:
            secured = TlsInsideStream(below, context, host)
        with anyio.fail_after(timeouts.tls):
            while (want := secured.handshake()) < 0:
                await secured.wait(want)
    except TimeoutError as error:
        raise ConnectFailed(
            f"the TLS handshake with {host} took longer than {timeouts.tls:g} s"
        ) from error
    except OSError as error:
        raise _tls_failure(error, host) from error
    except ValueError as error:
        raise ConnectFailed(
            f"TLS with {host} cannot begin: {printable(str(error), 200)}"
        ) from error
    except Disconnected as error:
        raise ConnectFailed(f"{host} ended the TLS handshake: {error.message}") from error
    return secured
