"""Byte streams to a peer: own non-blocking sockets, plain or TLS, direct or through a proxy.

Owns: name resolution, the race between addresses, handshakes, CONNECT tunnels, and what a read or a
write on a non-blocking socket may answer. May not know: HTTP exchanges, registries, credentials other
than a proxy's. Invariants: a stream is closed only after everyone who waits on its socket was told
(`anyio.notify_closing`), never half-closed, and nobody waits for a close_notify; after WANT_WRITE the
caller offers exactly the same memory again. Follows design.md section 9 "Body path"; throughput.md
sections 2, 3 and traps 1, 4, 7 and 8 say why sockets are ours and why TLS never goes through a
MemoryBIO except inside a TLS proxy.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import h11

from _regsync import tls
from _regsync.errors import ConnectFailed, Disconnected, ProtocolBroken, TimedOut, WireError, clean
from _regsync.proxy import Proxy

__all__ = [
    "WANT_READ",
    "WANT_WRITE",
    "Origin",
    "SocketStream",
    "Stream",
    "Timeouts",
    "TlsInsideStream",
    "open_stream",
]

# What `recv_into` and `send` answer instead of a count when nothing can move now.
WANT_READ, WANT_WRITE = -1, -2

# RFC 8305 section 5 recommends 250 ms between attempts.
_ATTEMPT_DELAY = 0.25
_LONGEST_HEAD = 64 * 1024


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each wait may take, in seconds (design.md section 9); tests pass others."""

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


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host (lower case, no brackets) and port: what a credential is bound to (R1)."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """The Host header: brackets for IPv6, no default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


class Stream(Protocol):
    """Two directions of bytes that never block; `wait` is the only place where anyone sleeps."""

    def recv_into(self, buffer: memoryview) -> int:
        """Return the bytes read, 0 at the end, WANT_READ or WANT_WRITE; Disconnected when broken."""
        ...

    def send(self, data: memoryview) -> int:
        """Return the bytes taken, WANT_READ or WANT_WRITE; Disconnected when broken."""
        ...

    async def wait(self, want: int) -> None:
        """Wait until what `want` asks for is possible."""
        ...

    def close(self) -> None:
        """Close at once; whoever waits on the stream gets Disconnected."""
        ...


def _broken(error: OSError) -> Disconnected:
    reason = error.strerror or type(error).__name__
    return Disconnected(f"the connection broke: {clean(reason, 100)}")


class SocketStream:
    """A connected socket or SSLSocket in non-blocking mode."""

    __slots__ = ("_socket",)

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected

    def recv_into(self, buffer: memoryview) -> int:
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            return WANT_READ
        except ssl.SSLWantWriteError:
            return WANT_WRITE
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            # A peer that leaves without close_notify is common; lengths and digests decide whether
            # anything is missing.
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

    async def wait(self, want: int) -> None:
        try:
            if want == WANT_READ:
                await anyio.wait_readable(self._socket)
            else:
                await anyio.wait_writable(self._socket)
        except (anyio.ClosedResourceError, anyio.BusyResourceError, ValueError) as error:
            raise Disconnected("the connection was closed") from error

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()


class TlsInsideStream:
    """TLS over another stream, for a registry behind a TLS proxy: the one place that needs memory BIOs."""

    __slots__ = ("_incoming", "_inner", "_object", "_outgoing", "_scratch", "_unsent")

    def __init__(self, inner: Stream, context: Any, server_hostname: str) -> None:
        self._inner = inner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_hostname)
        self._unsent = memoryview(b"")
        self._scratch = memoryview(bytearray(64 * 1024))

    def _flush(self) -> int:
        while True:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
                if not self._unsent:
                    return 0
            sent = self._inner.send(self._unsent)
            if sent < 0:
                return sent
            self._unsent = self._unsent[sent:]

    def _feed(self) -> int:
        """Move ciphertext inwards; 0 when some arrived or the peer left."""
        got = self._inner.recv_into(self._scratch)
        if got < 0:
            return got
        if got:
            self._incoming.write(self._scratch[:got])
        else:
            self._incoming.write_eof()
        return 0

    def _turn(self, step: Callable[[], int]) -> int:
        """Run one TLS operation as far as the inner stream lets it."""
        while True:
            if (blocked := self._flush()) < 0:
                return blocked
            try:
                done = step()
            except ssl.SSLWantReadError:
                if (blocked := self._flush()) < 0 or (blocked := self._feed()) < 0:
                    return blocked
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            except ssl.SSLCertVerificationError:
                raise
            except OSError as error:
                raise _broken(error) from error
            else:
                self._flush()
                return done

    def handshake(self) -> int:
        """Go on with the handshake: 0 when done, else what to wait for."""

        def step() -> int:
            self._object.do_handshake()
            return 0

        return self._turn(step)

    def recv_into(self, buffer: memoryview) -> int:
        return self._turn(lambda: int(self._object.read(len(buffer), buffer)))

    def send(self, data: memoryview) -> int:
        return self._turn(lambda: int(self._object.write(data)))

    async def wait(self, want: int) -> None:
        await self._inner.wait(want)

    def close(self) -> None:
        self._inner.close()


def _interleave(found: list[Any]) -> list[tuple[int, Any]]:
    """Order addresses by family in turn, IPv6 first, as RFC 8305 section 4 asks."""
    six = [(family, address) for family, _, _, _, address in found if family == socket.AF_INET6]
    four = [(family, address) for family, _, _, _, address in found if family == socket.AF_INET]
    ordered: list[tuple[int, Any]] = []
    for index in range(max(len(six), len(four))):
        ordered += six[index : index + 1] + four[index : index + 1]
    return list(dict.fromkeys(ordered))


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    try:
        # A literal needs no resolver thread.
        found: list[Any] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        try:
            found = list(await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            reason = clean(getattr(error, "strerror", None) or str(error), 100)
            raise ConnectFailed(
                f"the name {clean(host, 100)} could not be resolved: {reason}",
                hint="check the host name in the configuration and the name servers of this machine",
            ) from error
    return _interleave(found)


async def _connect_one(family: int, address: Any) -> socket.socket:
    """Connect one address; OSError when refused. The socket is closed when this is cancelled."""
    attempt = socket.socket(family, socket.SOCK_STREAM)
    try:
        attempt.setblocking(False)
        attempt.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = attempt.connect_ex(address)
        if code in (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN):
            await anyio.wait_writable(attempt)
            code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, str(code)))
    except BaseException:
        anyio.notify_closing(attempt)
        attempt.close()
        raise
    return attempt


async def _race(addresses: list[tuple[int, Any]]) -> socket.socket:
    """Return the first socket that connects, attempts 250 ms apart; the last OSError when none does."""
    if len(addresses) == 1:
        return await _connect_one(*addresses[0])
    winner: list[socket.socket] = []
    errors: list[OSError] = []

    async def attempt(family: int, address: Any, failed: anyio.Event) -> None:
        try:
            connected = await _connect_one(family, address)
        except OSError as error:
            errors.append(error)
            failed.set()
            return
        if winner:
            connected.close()
        else:
            winner.append(connected)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for family, address in addresses:
            failed = anyio.Event()
            group.start_soon(attempt, family, address, failed)
            with anyio.move_on_after(_ATTEMPT_DELAY):
                await failed.wait()
    if winner:
        return winner[0]
    raise errors[-1]


async def _connect(host: str, port: int, timeouts: Timeouts) -> socket.socket:
    where = Origin("", host, port).authority
    try:
        with anyio.fail_after(timeouts.connect):
            return await _race(await _resolve(host, port))
    except TimeoutError as error:
        raise ConnectFailed(f"no connection to {where} within {timeouts.connect:g} s") from error
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "") and error.strerror
        words = {errno.ECONNREFUSED: "connection refused", errno.EHOSTUNREACH: "host unreachable"}
        cause = words.get(error.errno or 0) or clean(reason or str(error), 100)
        raise ConnectFailed(f"no connection to {where}: {cause}") from error


async def _shake_hands(step: Callable[[], int], stream: Stream, host: str, timeouts: Timeouts) -> None:
    try:
        with anyio.fail_after(timeouts.tls):
            while (want := step()) < 0:
                await stream.wait(want)
    except TimeoutError as error:
        raise ConnectFailed(f"the TLS handshake with {host} took longer than {timeouts.tls:g} s") from error
    except OSError as error:
        message, hint = tls.explain(error, host)
        refused = ConnectFailed(message, hint=hint)
        refused.retryable = False
        raise refused from error
    except Disconnected as error:
        raise ConnectFailed(f"{host} ended the TLS handshake: {error.message}") from error


async def _wrap_socket(connected: socket.socket, context: Any, host: str, timeouts: Timeouts) -> SocketStream:
    try:
        wrapped = context.wrap_socket(connected, server_hostname=host, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:
        raise ConnectFailed(f"TLS with {host} cannot begin: {clean(str(error), 200)}") from error
    stream = SocketStream(wrapped)

    def step() -> int:
        try:
            wrapped.do_handshake()
        except ssl.SSLWantReadError:
            return WANT_READ
        except ssl.SSLWantWriteError:
            return WANT_WRITE
        return 0

    try:
        await _shake_hands(step, stream, host, timeouts)
    except BaseException:
        stream.close()
        raise
    return stream


async def send_all(stream: Stream, data: memoryview) -> None:
    """Send everything; the same memory is offered again after a wait."""
    while data:
        sent = stream.send(data)
        if sent < 0:
            await stream.wait(sent)
        else:
            data = data[sent:]


async def _tunnel(stream: Stream, origin: Origin, proxy: Proxy, timeouts: Timeouts) -> None:
    """Ask the proxy for a tunnel (RFC 9110 section 9.3.6); credentials go nowhere else (R7)."""
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    target = f"{host}:{origin.port}"
    headers = [("Host", target)]
    if proxy.username is not None:
        from base64 import b64encode

        pair = f"{proxy.username}:{proxy.password or ''}".encode()
        headers.append(("Proxy-Authorization", "Basic " + b64encode(pair).decode("ascii")))
    exchange = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
    head = exchange.send(h11.Request(method="CONNECT", target=target, headers=headers))
    scratch = memoryview(bytearray(4096))
    try:
        with anyio.fail_after(timeouts.head):
            await send_all(stream, memoryview(head or b""))
            while (event := exchange.next_event()) is h11.NEED_DATA or type(
                event
            ) is h11.InformationalResponse:
                if event is not h11.NEED_DATA:
                    continue
                got = stream.recv_into(scratch)
                if got < 0:
                    await stream.wait(got)
                else:
                    exchange.receive_data(bytes(scratch[:got]))
    except TimeoutError as error:
        raise ConnectFailed(f"the proxy {proxy} did not answer within {timeouts.head:g} s") from error
    except (h11.ProtocolError, WireError) as error:
        raise ConnectFailed(f"the proxy {proxy} did not open a tunnel: {clean(str(error), 100)}") from error
    if not isinstance(event, h11.Response):
        raise ConnectFailed(f"the proxy {proxy} did not open a tunnel")
    if event.status_code == 407:
        raise ConnectFailed(
            f"the proxy {proxy} asks for credentials or refuses those it got (407)",
            hint="put user and password into the proxy's URL, percent-encoded",
        )
    if not 200 <= event.status_code < 300:
        raise ConnectFailed(f"the proxy {proxy} refused a tunnel to {target} (status {event.status_code})")
    if exchange.trailing_data[0]:
        raise ProtocolBroken(f"the proxy {proxy} sent bytes before the tunnel was used")


async def open_stream(
    origin: Origin,
    *,
    context: Any,
    timeouts: Timeouts,
    proxy: Proxy | None = None,
    proxy_context: Any = None,
) -> Stream:
    """Connect to `origin`, through `proxy` when one is given; `context` is used for https only.

    Raises ConnectFailed (name, address, proxy, certificate) and never leaves a socket behind.
    """
    first = origin if proxy is None else Origin(proxy.scheme, proxy.host, proxy.port)
    connected = await _connect(first.host, first.port, timeouts)
    stream: Stream = SocketStream(connected)
    done = False
    try:
        if proxy is not None:
            if proxy.scheme == "https":
                stream = await _wrap_socket(connected, proxy_context, proxy.host, timeouts)
            await _tunnel(stream, origin, proxy, timeouts)
        if origin.scheme == "https":
            if proxy is not None and proxy.scheme == "https":
                inside = TlsInsideStream(stream, context, origin.host)
                await _shake_hands(inside.handshake, inside, origin.host, timeouts)
                stream = inside
            else:
                stream = await _wrap_socket(connected, context, origin.host, timeouts)
        done = True
        return stream
    except TimedOut as error:
        raise ConnectFailed(error.message) from error
    finally:
        if not done:
            stream.close()
            # Detached, thus already closed, where wrap_socket succeeded.
            connected.close()
