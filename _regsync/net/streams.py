"""Byte streams to a peer: own non-blocking sockets, plain or TLS, TLS inside TLS. Owns: name
resolution, the race between addresses, handshakes. May not know: HTTP, registries, credentials.
Invariants: who waits on a socket is told before it is closed, it is never half-closed, nobody waits
for a close_notify; after WANT_WRITE the same memory comes again. Follows docs/design.md section 9;
docs/bodies.md sections 2, 3, traps 1, 4, 7, 8."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import anyio.to_thread

from _regsync.addresses import Origin
from _regsync.errors import ConnectFailed, Disconnected
from _regsync.net.tls import explain
from _regsync.text import clean

# what `recv_into` and `send` answer instead of a count when nothing can move now
WANT_READ = -1


WANT_WRITE = -2


_WANTS: dict[type[OSError], int] = {
    ssl.SSLWantReadError: WANT_READ,
    ssl.SSLWantWriteError: WANT_WRITE,
}


_ATTEMPT_DELAY = 0.25  # between attempts, as RFC 8305 section 5 recommends


_TLS_PORTION = (
    64 * 1024
)  # how much is encrypted before a TLS proxy has taken what was encrypted before


class Timeouts(NamedTuple):
    """How long each wait may take, in seconds (docs/design.md section 9); tests pass others."""

    connect: float = 10.0
    tls: float = 10.0
    head: float = 60.0
    manifest_put: float = 300.0
    finish: float = 300.0
    finish_bytes_per_second: float = 20e6
    idle: float = 60.0
    slowest_bytes_per_second: float = 1024.0
    slow_window: float = 300.0
    idle_connection: float = 50.0


class Stream(Protocol):
    """Two directions of bytes; only `wait` sleeps. `recv_into` and `send` return the bytes moved
    (none read: the end), WANT_READ or WANT_WRITE, or raise Disconnected. `close` is at once;
    whoever waits gets Disconnected."""

    def recv_into(self, buffer: memoryview) -> int: ...
    def send(self, data: memoryview) -> int: ...
    async def wait(self, want: int) -> None: ...
    def close(self) -> None: ...


def _answer(error: OSError, blocked: int) -> int:
    """Put an error into what `recv_into` or `send` answers: `blocked` when nothing can move; or
    Disconnected.
    """
    if isinstance(error, BlockingIOError) or type(error) in _WANTS:
        return _WANTS.get(type(error), blocked)
    if blocked == WANT_READ and isinstance(error, (ssl.SSLZeroReturnError, ssl.SSLEOFError)):
        return (
            0  # common without close_notify: lengths and digests decide whether anything is missing
        )
    # In TLS 1.3 a peer says what it thinks of our certificate when the handshake is over for us.
    alert = isinstance(error, ssl.SSLError) and "_ALERT_" in (error.reason or "")
    if alert and (refused := _refused(error, "the registry")).hint:
        raise refused from error
    raise Disconnected(
        f"the connection broke: {clean(error.strerror or type(error).__name__, 100)}"
    ) from error


def _refused(error: OSError, host: str) -> ConnectFailed:
    message, hint = explain(error, host)
    refused = ConnectFailed(message, hint=hint)
    # A peer that merely went away may be there again; what it says in TLS stays as it is.
    refused.retryable = not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError)
    return refused


class SocketStream:
    """A connected socket or SSLSocket in non-blocking mode."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self._socket: Any = own  # no type but Any can shake hands and be a plain socket

    def secure(self, context: Any, host: str) -> SocketStream:
        """Begin TLS; `handshake` goes on with it."""
        if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(
                code, os.strerror(code)
            )  # of a connection that is gone `wrap_socket` loses the descriptor
        self._socket = context.wrap_socket(
            self._socket, server_hostname=host, do_handshake_on_connect=False
        )
        return self

    def handshake(self) -> int:
        """Go on with the handshake: 0 when done, else what to wait for; OSError when it failed."""
        try:
            self._socket.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            return _WANTS[type(error)]
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        try:
            return int(self._socket.recv_into(buffer))
        except OSError as error:
            return _answer(error, WANT_READ)

    def send(self, data: memoryview) -> int:
        try:
            return int(self._socket.send(data))
        except OSError as error:
            return _answer(error, WANT_WRITE)

    async def wait(self, want: int) -> None:
        try:
            await (anyio.wait_readable if want == WANT_READ else anyio.wait_writable)(self._socket)
        except anyio.BusyResourceError:
            await anyio.sleep(
                0.01
            )  # both directions of TLS may want the same (a key update): look again soon
        except (anyio.ClosedResourceError, ValueError) as error:
            raise Disconnected("the connection was closed") from error

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()


class TlsInsideStream:
    """TLS inside a TLS proxy's; only `send` waits for room, only `recv_into` for bytes, so both may
    go on at once.
    """

    def __init__(self, inner: Stream, context: Any, server_hostname: str) -> None:
        self._inner = inner
        self.wait = inner.wait
        self.close = inner.close
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_hostname=server_hostname
        )
        # Ciphertext that the inner stream has not taken, and how much of `send`'s data it stands
        # for.
        self._unsent = memoryview(b"")
        self._encrypted = 0
        self._scratch = memoryview(bytearray(64 * 1024))

    def _flush(self) -> int:
        while self._unsent or self._outgoing.pending:
            self._unsent = self._unsent or memoryview(self._outgoing.read())
            if (sent := self._inner.send(self._unsent)) < 0:
                return sent
            self._unsent = self._unsent[sent:]
        return 0

    def _turn(self, step: Callable[[], int | None]) -> int:
        while True:
            try:
                return step() or 0
            except ssl.SSLWantReadError:
                try:
                    self._flush()  # what has no room now goes with the next `send`
                except Disconnected:
                    # what the peer said before it left is still to be read; the next `send` fails
                    pass
                if (got := self._inner.recv_into(self._scratch)) < 0:
                    return got
                if got:
                    self._incoming.write(self._scratch[:got])
                else:
                    self._incoming.write_eof()

    def handshake(self) -> int:
        done = self._turn(self._object.do_handshake)
        return self._flush() or done

    def recv_into(self, buffer: memoryview) -> int:
        try:
            return self._turn(lambda: self._object.read(len(buffer), buffer))
        except OSError as error:
            return _answer(error, WANT_READ)

    def send(self, data: memoryview) -> int:
        try:
            self._encrypted = self._encrypted or self._object.write(data[:_TLS_PORTION])
        except OSError as error:
            return _answer(error, WANT_WRITE)
        if (blocked := self._flush()) < 0:
            return blocked  # the same memory comes again, and is not encrypted twice
        sent = self._encrypted
        self._encrypted = 0
        return sent


def _interleave(found: list[Any]) -> list[tuple[int, Any]]:
    """Order addresses by family in turn, IPv6 first, as RFC 8305 section 4 asks."""
    families = [
        [(family, address) for family, _, _, _, address in found if family == wanted]
        for wanted in (socket.AF_INET6, socket.AF_INET)
    ]
    return list(
        dict.fromkeys(each for turn in itertools.zip_longest(*families) for each in turn if each)
    )


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(
        OSError, ValueError
    ):  # an address needs no thread, nor the tables of international names
        socket.inet_pton(family, host)
        return [(family, (host, port))]
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        own = anyio.CapacityLimiter(
            1
        )  # one thread each: behind names whose servers are silent all others would wait
        return _interleave(
            await anyio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=own)
        )
    except (OSError, ValueError) as error:
        reason = clean(getattr(error, "strerror", None) or str(error), 100)
        hint = "check the name and this machine's name servers; set HTTPS_PROXY where a proxy leads out"
        raise ConnectFailed(
            f"the name {clean(host, 100)} could not be resolved: {reason}", hint=hint
        ) from error


async def _connect_one(family: int, address: Any) -> SocketStream:
    own = socket.socket(family, socket.SOCK_STREAM)
    attempt = SocketStream(own)
    try:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = own.connect_ex(address)
        if code in (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN):
            await attempt.wait(WANT_WRITE)
            code = own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        attempt.close()
        raise
    return attempt


async def _race(addresses: list[tuple[int, Any]]) -> SocketStream:
    """Return the first stream that connects, attempts 250 ms apart; the last OSError when none
    does.
    """
    connected: list[SocketStream] = []
    refused = OSError("the name has no address that can be used")

    async def attempt(family: int, address: Any, failed: anyio.Event) -> None:
        nonlocal refused
        try:
            connected.append(await _connect_one(family, address))
            group.cancel_scope.cancel()
        except OSError as error:
            refused = error
            failed.set()

    try:
        async with anyio.create_task_group() as group:
            for family, address in addresses:
                failed = anyio.Event()
                group.start_soon(attempt, family, address, failed)
                with anyio.move_on_after(_ATTEMPT_DELAY):
                    await failed.wait()
        if not connected:
            raise refused
        return connected.pop(0)
    finally:  # two may connect in the same turn of the loop; none may stay when this is cancelled
        for loser in connected:
            loser.close()


async def connect(host: str, port: int, timeouts: Timeouts) -> SocketStream:
    """Connect to the first address of a name that answers; ConnectFailed when none does."""
    try:
        with anyio.fail_after(timeouts.connect):
            return await _race(await _resolve(host, port))
    except OSError as error:
        said = clean(error.strerror or str(error), 100).lower()
        cause = (
            f" within {timeouts.connect:g} s" if isinstance(error, TimeoutError) else f": {said}"
        )
        hint = "check host and port; does a firewall stand in between, or is HTTPS_PROXY needed?"
        raise ConnectFailed(
            f"no connection to {Origin('', host, port).authority}{cause}", hint=hint
        ) from error


async def start_tls(below: Stream, context: Any, host: str, timeouts: Timeouts) -> Stream:
    """Shake hands over a plain socket, or inside another stream; the caller closes `below` when it
    fails.
    """
    try:
        if isinstance(below, SocketStream) and not isinstance(below._socket, ssl.SSLSocket):
            secured: SocketStream | TlsInsideStream = below.secure(context, host)
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
        raise _refused(error, host) from error
    except ValueError as error:
        raise ConnectFailed(f"TLS with {host} cannot begin: {clean(str(error), 200)}") from error
    except Disconnected as error:
        raise ConnectFailed(f"{host} ended the TLS handshake: {error.message}") from error
    return secured
