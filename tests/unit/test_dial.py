"""From a name to a stream: addresses, attempts, tunnels, handshakes, and what each failure says."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest

from _regsync import edge
from _regsync.addresses import Origin
from _regsync.edge import WANT_READ, WANT_WRITE
from _regsync.errors import ConnectFailed, ProtocolBroken, WireError
from _regsync.net import dial
from _regsync.net.dial import SocketStream, open_stream
from _regsync.net.proxies import Proxy
from _regsync.net.wire import Timeouts
from tests.unit.wires import End, Item, Pause, Wire, answer

pytestmark = pytest.mark.anyio

ORIGIN = Origin("https", "registry.test", 443)
PROXY = Proxy("proxy.test", 3128, "HTTPS_PROXY")
OPEN = b"HTTP/1.1 200 Established\r\n\r\n"


def edge_with(
    connect: Callable[[str, int], Awaitable[Any]],
    start_tls: Callable[..., Awaitable[Any]] | None = None,
) -> edge.Edge:
    async def believe(below: Wire, context: object, host: str) -> Wire:
        return below

    async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    return edge.Edge(connect, start_tls or believe, lambda: 0.0, lambda: 0.5, in_thread, {})


async def failure(
    connect: Callable[[str, int], Awaitable[Any]],
    start_tls: Callable[..., Awaitable[Any]] | None = None,
    *,
    origin: Origin = ORIGIN,
    proxy: Proxy | None = None,
) -> WireError:
    """Return the error with which no stream is opened."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with edge.using(edge_with(connect, start_tls)), pytest.raises(WireError) as caught:
        await open_stream(origin, context=context, timeouts=Timeouts(), proxy=proxy)
    return caught.value


# Names and connections.


@pytest.mark.parametrize(
    ("error", "message", "is_unknown"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "not be resolved: Name or", True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "not be resolved: Temporary", False),
        (UnicodeError("label too long"), "not be resolved: label too long", True),
        (OSError(errno.ECONNREFUSED, "Connection refused"), "registry.test:443: connection refused", False),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "registry.test:443: connection timed out", False),
        (OSError("odd\x1b[31m"), "registry.test:443: odd[31m", False),
    ],
)  # fmt: skip
async def test_why_there_is_no_connection_is_told(
    error: Exception, message: str, is_unknown: bool
) -> None:
    async def connect(host: str, port: int) -> Any:
        raise error

    told = await failure(connect)
    assert message in told.message
    assert isinstance(told, ConnectFailed)
    assert (told.is_unknown_name, told.retryable) == (is_unknown, True)
    assert "HTTPS_PROXY" in (told.hint or "")


@pytest.mark.virtual_time
async def test_a_connection_is_waited_for_ten_seconds() -> None:
    began = anyio.current_time()
    told = await failure(lambda *_: anyio.sleep_forever())
    assert told.message == "no connection to registry.test:443 within 10 s"
    assert anyio.current_time() - began == 10.0


class Attempts:
    """What becomes of the attempts to connect to each address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fates: float | OSError) -> None:
        self.fates = fates
        self.begun: dict[str, float] = {}
        self.closed: list[str] = []
        self.is_too_late_to_cancel = False
        self.began = anyio.current_time()
        monkeypatch.setattr(dial, "_connect_one", self.connect)
        rows = [(socket.AF_INET6, 1, 0, "", (name, 443)) for name in fates]

        async def resolve(*_: object) -> list[Any]:
            return rows

        monkeypatch.setattr(dial, "_resolve", resolve)

    async def connect(self, family: int, address: tuple[str, int]) -> Any:
        name, _ = address
        self.begun[name] = round(anyio.current_time() - self.began, 6)
        fate = self.fates[name]
        if isinstance(fate, OSError):
            raise fate
        try:
            with anyio.CancelScope(shield=self.is_too_late_to_cancel):
                await anyio.sleep(fate)
        except BaseException:
            self.closed.append(name)
            raise
        return Connected(name, self.closed)


class Connected:
    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self._closed = name, closed

    def close(self) -> None:
        self._closed.append(self.name)


NO_ROUTE = OSError(errno.ENETUNREACH, "Network is unreachable")


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("fates", "winner", "begun", "closed"),
    [
        ({"a": 0.1, "b": 0.0}, "a", {"a": 0}, []),
        ({"a": 9.0, "b": 0.1, "c": 0.0}, "b", {"a": 0, "b": 0.25}, ["a"]),
        ({"a": NO_ROUTE, "b": NO_ROUTE, "c": 0.1}, "c", {"a": 0, "b": 0, "c": 0}, []),
    ],
    ids=["first", "second while the first waits", "those that fail take no time"],
)
async def test_the_next_address_is_tried_after_a_quarter_second(
    fates: dict[str, Any],
    winner: str,
    begun: dict[str, float],
    closed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = Attempts(monkeypatch, **fates)
    found: Any = await dial.connect("registry.test", 443)
    assert attempts.begun == begun
    assert (found.name, attempts.closed) == (winner, closed)


@pytest.mark.virtual_time
async def test_of_two_that_connect_at_once_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(monkeypatch, a=0.5, b=0.1)
    attempts.is_too_late_to_cancel = True
    found: Any = await dial.connect("registry.test", 443)
    assert (found.name, attempts.closed) == ("b", ["a"])


@pytest.mark.virtual_time
async def test_if_no_address_answers_the_last_error_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = OSError(errno.ECONNREFUSED, "Connection refused")
    Attempts(monkeypatch, a=NO_ROUTE, b=refused)
    with pytest.raises(OSError, match="refused"):
        await dial.connect("registry.test", 443)
    Attempts(monkeypatch)
    with pytest.raises(OSError, match="no address"):
        await dial.connect("registry.test", 443)


@pytest.mark.virtual_time
async def test_a_cancelled_race_leaves_no_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(monkeypatch, a=5.0, b=5.0, c=5.0)
    with anyio.move_on_after(0.3):
        await dial.connect("registry.test", 443)
    assert sorted(attempts.closed) == sorted(attempts.begun) == ["a", "b"]


V6, V4 = socket.AF_INET6, socket.AF_INET


def rows(*families: int) -> list[Any]:
    return [(family, 1, 0, "", (f"{number}", 443)) for number, family in enumerate(families)]


@pytest.mark.parametrize(
    ("found", "order"),
    [((V4, V4, V6, V6), "2031"), ((V6, V6, V6, V4), "0312"), ((V4,), "0"), ((V6, V6), "01")],
)
async def test_the_families_take_turns(
    found: tuple[int, ...], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: rows(*found))
    resolved = await dial._resolve("registry.test", 443, socket.AF_UNSPEC)
    assert "".join(row[4][0] for row in resolved) == order


@pytest.mark.parametrize(("host", "family"), [("192.0.2.1", V4), ("::1", V6)])
async def test_an_address_is_not_looked_up(
    host: str, family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    for asked in (socket.AF_UNSPEC, V4):
        assert await dial._resolve(host, 443, asked) == [(family, 1, 0, "", (host, 443))]


AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
REFUSED = OSError(errno.ECONNREFUSED, "Connection refused")


@pytest.mark.parametrize(
    ("four", "six", "expected"),
    [
        ("four", None, "four"),
        (NO_NAME, "six", "six"),
        (NO_ROUTE, "six", "six"),
        (REFUSED, NO_NAME, REFUSED),
        (NO_NAME, REFUSED, REFUSED),
        (AGAIN, NO_NAME, AGAIN),
    ],
)
async def test_the_static_program_asks_for_one_family_after_the_other(
    four: OSError | str,
    six: OSError | str | None,
    expected: OSError | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolve(host: str, port: int, family: int) -> Any:
        return four if family == V4 else six

    async def race(rows: Any) -> Any:
        if isinstance(rows, OSError):
            raise rows
        return rows

    monkeypatch.setattr(dial, "_resolve", resolve)
    monkeypatch.setattr(dial, "_race", race)
    monkeypatch.setattr(dial, "IS_STATIC", True)
    if isinstance(expected, str):
        assert await dial.connect("registry.test", 443) == expected
        return
    with pytest.raises(OSError) as caught:  # noqa: PT011
        await dial.connect("registry.test", 443)
    assert caught.value is expected


# Tunnels.


@pytest.mark.rule("R7")
@pytest.mark.parametrize(
    ("proxy", "origin", "login"),
    [
        (PROXY, ORIGIN, None),
        (PROXY, Origin("http", "::1", 5000), None),
        (PROXY._replace(username="user", password="p:w\u00e9"), ORIGIN, "user:p:w\u00e9"),
        (PROXY._replace(username="user"), ORIGIN, "user:"),
    ],
)
async def test_a_tunnel_is_asked_for_with_port_and_login(
    proxy: Proxy, origin: Origin, login: str | None
) -> None:
    wire, asked = Wire(OPEN), []

    async def connect(host: str, port: int) -> Wire:
        asked.append((host, port))
        return wire

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with edge.using(edge_with(connect)):
        opened: Any = await open_stream(origin, context=context, timeouts=Timeouts(), proxy=proxy)
    target = "[::1]:5000" if origin.port == 5000 else "registry.test:443"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if login is not None:
        lines.append(f"Proxy-Authorization: Basic {b64encode(login.encode()).decode()}")
    assert (opened, asked) == (wire, [("proxy.test", 3128)])
    assert b"".join(wire.writes) == "\r\n".join([*lines, "", ""]).encode()


SAID = "the proxy http://proxy.test:3128 "
NEEDED = ("Proxy-Authenticate: %s", 407)


@pytest.mark.parametrize(
    ("said", "message", "hint", "is_retried"),
    [
        ((answer(status=403),), "refused a tunnel to registry.test:443 (403)", None, False),
        ((answer(status=502),), "refused a tunnel to registry.test:443 (502)", None, True),
        ((answer(b"", 'Proxy-Authenticate: Basic realm="x"', status=407),), "accepts Basic", "put user", False),
        ((answer(b"", "Proxy-Authenticate: Negotiate, NTLM", status=407),), "Negotiate or NTLM", "no other", False),
        ((answer(b"", "Proxy-Authenticate: c2VjcmV0", status=407),), "(407)", "no other scheme", False),
        ((answer(status=407),), "(407)", "put user and password", False),
        ((OPEN + b"\x16secret",), "sent bytes before the tunnel was used", None, True),
        ((b"SSH-2.0 secret\r\n\r\n",), "did not open a tunnel: proxy.test", None, True),
        ((End.EOF,), "did not open a tunnel: the connection ended before", None, True),
        ((End.RESET,), "did not open a tunnel: the connection broke", None, True),
    ],
)  # fmt: skip
async def test_why_a_proxy_opens_no_tunnel_is_told_without_its_own_words(
    said: tuple[Item, ...], message: str, hint: str | None, is_retried: bool
) -> None:
    wire = Wire(*said)

    async def connect(host: str, port: int) -> Wire:
        return wire

    told = await failure(connect, proxy=PROXY)
    assert told.message.startswith(SAID)
    assert message in told.message
    assert (hint or "") in (told.hint or "")
    assert (told.hint is None) is (hint is None)
    assert "secret" not in f"{told} {told.hint}"
    assert wire.is_closed
    if isinstance(told, ProtocolBroken):
        return
    assert told.retryable is is_retried


async def test_a_login_that_a_proxy_refuses_is_to_be_checked() -> None:
    async def connect(host: str, port: int) -> Wire:
        return Wire(answer(b"", "Proxy-Authenticate: Basic", status=407))

    told = await failure(connect, proxy=PROXY._replace(username="u", password="hunter2"))
    assert told.hint == "check the user and password in the proxy's URL"


@pytest.mark.virtual_time
async def test_a_tunnel_is_waited_for_a_minute() -> None:
    wire, began = Wire(Pause(61), OPEN), anyio.current_time()

    async def connect(host: str, port: int) -> Wire:
        return wire

    told = await failure(connect, proxy=PROXY)
    assert (
        told.message == f"{SAID}did not open a tunnel: no answer from proxy.test:3128 within 60 s"
    )
    assert (anyio.current_time() - began, wire.is_closed) == (60.0, True)


# TLS.


def eof() -> OSError:
    return ssl.SSLEOFError(8, "EOF occurred in violation of protocol")


def alert() -> OSError:
    error = ssl.SSLError(1, "alert")
    error.reason = "TLSV1_ALERT_UNKNOWN_CA"
    return error


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("error", "message", "is_retried"),
    [
        (eof(), "registry.test closed the connection during the TLS handshake", True),
        (alert(), "registry.test refused this client's certificate", False),
        (ConnectionResetError(104, "Connection reset by peer"), "failed: Connection reset", True),
        (ValueError("no such name"), "TLS with registry.test cannot begin: no such name", True),
        (None, "the TLS handshake with registry.test took longer than 10 s", True),
    ],
)
async def test_why_a_handshake_failed_is_told_and_its_stream_closed(
    error: Exception | None, message: str, is_retried: bool
) -> None:
    wire = Wire()

    async def connect(host: str, port: int) -> Wire:
        return wire

    async def start_tls(below: Wire, context: object, host: str) -> Wire:
        if error is None:
            await anyio.sleep_forever()
            raise AssertionError
        raise error

    told = await failure(connect, start_tls)
    assert message in told.message
    assert (told.retryable, wire.is_closed) == (is_retried, True)


# Sockets.


@pytest.fixture
def pair() -> Iterator[tuple[SocketStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    yield stream, theirs
    ours.close()
    theirs.close()


async def test_a_socket_never_blocks(pair: tuple[SocketStream, socket.socket]) -> None:
    stream, theirs = pair
    room = memoryview(bytearray(100))
    assert stream.recv_into(room) == WANT_READ
    theirs.send(b"abc")
    await stream.wait(WANT_READ)
    assert (stream.recv_into(room), bytes(room[:3])) == (3, b"abc")
    sent = 0
    while (count := stream.send_now(memoryview(bytes(100_000)))) > 0:
        sent += count
    assert count == WANT_WRITE
    received = 0
    while received < sent:
        received += len(theirs.recv(100_000))
    await stream.wait(WANT_WRITE)
    assert stream.send_now(memoryview(b"x")) == 1
    theirs.close()
    await stream.wait(WANT_READ)
    with pytest.raises(OSError, match=os.strerror(errno.EPIPE)):
        stream.send_now(memoryview(b"x"))


async def test_who_waits_for_a_socket_that_is_closed_is_told(
    pair: tuple[SocketStream, socket.socket],
) -> None:
    stream, _ = pair

    async def wait() -> None:
        with pytest.raises(ConnectionAbortedError):
            await stream.wait(WANT_READ)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(0.01)
        await stream.wait(WANT_READ)  # the second task returns soon, to try again
        stream.close()
    with pytest.raises(OSError, match="closed"):
        await stream.wait(WANT_READ)
    stream.close()


async def test_a_name_that_no_certificate_can_have_closes_nothing(
    pair: tuple[SocketStream, socket.socket],
) -> None:
    stream, theirs = pair
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name in ("", "a" * 70):
        with pytest.raises(ValueError, match=r"empty|too long|label|server_hostname"):
            await dial.handshake(stream, context, name)
    theirs.send(b"x")
    assert stream.recv_into(memoryview(bytearray(1))) == 1
