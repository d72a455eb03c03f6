"""From a name to a stream: proxies, addresses, attempts, tunnels, handshakes, and what each failure
says. The rules for proxies are Go's (docs/protocol-facts.md section 8.1).
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from base64 import b64encode
from types import SimpleNamespace
from urllib.parse import urlsplit

import anyio
import pytest

from _regsync import edge
from _regsync.addresses import Origin
from _regsync.edge import WANT_READ, WANT_WRITE
from _regsync.errors import ConfigError, ConnectFailed, ProtocolBroken, WireError
from _regsync.net import dial
from _regsync.net.dial import SocketStream, open_stream
from _regsync.net.proxies import Proxy, proxy_for
from _regsync.net.wire import Timeouts
from tests.unit.wires import End, Pause, Wire, answer

ORIGIN = Origin("https", "registry.test", 443)
PROXY = Proxy("proxy.test", 3128, "HTTPS_PROXY")
OPEN = b"HTTP/1.1 200 Established\r\n\r\n"

# Which proxy.


@pytest.mark.parametrize(
    ("no_proxy", "direct", "proxied"),
    [
        ("", "", "a.test"),
        ("b.test, *", "a.test 192.0.2.7", ""),
        ("A.test", "a.test b.a.test a.test:5000", "ba.test test"),
        (".test", "a.test test", "atest"),
        ("*.a.test", "b.a.test a.test", "ba.test"),
        (" b.test ,, a.test ", "a.test b.test", "c.test"),
        ("b.test a.test", "", "a.test b.test"),
        ("a.test:5000", "a.test:5000 b.a.test:5000", "a.test"),
        (":5000", "", "a.test:5000"),
        ("192.0.2.7", "192.0.2.7 [::ffff:192.0.2.7]", "192.0.2.70"),
        ("2.7", "", "192.0.2.7"),
        ("192.0.2.7:5000", "192.0.2.7:5000", "192.0.2.7"),
        ("192.0.2.9/24", "192.0.2.7", "192.0.3.7 a.test [2001:db8::5]"),
        ("192.0.2.0/99", "", "192.0.2.7"),
        ("2001:db8::/32", "[2001:db8::5]", "[2001:db9::5]"),
        ("2001:db8:0::5", "[2001:db8::5]", "[2001:db8::6]"),
    ],
)
def test_no_proxy_names_origins_as_go_does(no_proxy, direct, proxied):
    environ = {"HTTPS_PROXY": "http://proxy.test:3128", "NO_PROXY": no_proxy}
    for places, expected in ((direct, None), (proxied, PROXY)):
        for place in map(urlsplit, (f"//{each}" for each in places.split())):
            assert proxy_for("https", place.hostname, place.port or 443, environ) == expected, place


HERE = """
localhost LOCALHOST localhost. registry.localhost 127.0.0.1 127.8.9.10 127.0.0.1. 127.1 2130706433
0x7f000001 0x7f.1 0177.0.0.1 ::1 0:0:0:0:0:0:0:1 ::ffff:127.0.0.1 fe80::1 fe80::1%eth0
169.254.169.254 169.254.170.2 2852039166 169.254.43518 0xa9fea9fe ::ffff:a9fe:a9fe
fd00:ec2::254 fd00:0ec2:0::23 metadata.google.internal METADATA.google.internal.
"""


@pytest.mark.parametrize("host", HERE.split())
def test_loopback_and_metadata_addresses_never_see_a_proxy(host):
    """However they are written; nor where a registry with a proxy of its own sends us there."""
    proxy = "http://proxy.test:3128"
    for scheme in ("http", "https"):
        assert proxy_for(scheme, host, 80, {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}) is None
    assert proxy_for("https", host, 80, {}, override=proxy, heeds_exemptions=True) is None


@pytest.mark.parametrize("host", ["0x7f.example", "1.example", "127.0.0.1.example", "8.8.8.8"])
def test_names_that_merely_look_like_such_addresses_go_through_the_proxy(host):
    assert proxy_for("https", host, 443, {"HTTPS_PROXY": "http://proxy.test:3128"}) == PROXY


@pytest.mark.parametrize(
    ("environ", "scheme", "found"),
    [
        ({}, "https", None),
        ({"HTTPS_PROXY": "http://up"}, "https", ("up", "HTTPS_PROXY")),
        ({"https_proxy": "http://low", "HTTPS_PROXY": "http://up"}, "https", ("low", "https_proxy")),
        ({"https_proxy": " ", "HTTPS_PROXY": "http://up"}, "https", ("up", "HTTPS_PROXY")),
        ({"HTTP_PROXY": "http://up", "ALL_PROXY": "http://up"}, "https", None),
        ({"HTTP_PROXY": "http://up"}, "http", ("up", "HTTP_PROXY")),
        ({"HTTP_PROXY": "http://up", "REQUEST_METHOD": "GET"}, "http", None),
        ({"http_proxy": "http://low", "REQUEST_METHOD": "GET"}, "http", ("low", "http_proxy")),
        ({"https_proxy": "http://low", "no_proxy": "a.test", "NO_PROXY": "b.test"}, "https", None),
    ],
)  # fmt: skip
def test_the_variable_that_names_the_proxy_is_known(environ, scheme, found):
    proxy = proxy_for(scheme, "a.test", 443, environ)
    assert (proxy and (proxy.host, proxy.setting)) == found


def test_a_registrys_own_proxy_beats_no_proxy_and_loopback_unless_another_host_is_named():
    environ = {"HTTPS_PROXY": "http://other.test:1", "NO_PROXY": "a.test"}
    mine = PROXY._replace(setting="proxy in the configuration")
    for host in ("a.test", "127.0.0.1", "b.test"):
        assert proxy_for("https", host, 5000, environ, override=str(PROXY)) == mine
        named = proxy_for("https", host, 443, environ, str(PROXY), heeds_exemptions=True)
        assert named == (mine if host == "b.test" else None)
    assert proxy_for("https", "b.test", 443, environ, override="").host == "other.test"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("proxy.test:3128", ("proxy.test", 3128)),
        ("proxy.test", ("proxy.test", 80)),
        ("HTTP://Proxy.Test:1", ("proxy.test", 1)),
        ("http://[2001:db8::1]:3128", ("2001:db8::1", 3128)),
        ("u:p@proxy.test:81", ("proxy.test", 81, "u", "p")),
        ("http://do%40main:p%3A%2Fss@proxy.test", ("proxy.test", 80, "do@main", "p:/ss")),
        ("http://u@proxy.test", ("proxy.test", 80, "u")),
    ],
)
def test_proxy_values_parse(value, expected):
    host, port, *login = expected
    found = proxy_for("https", "a.test", 443, {"HTTPS_PROXY": value})
    assert found == Proxy(host, port, "HTTPS_PROXY", *login)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("socks5://user:hunter2@proxy.test:1080", "'socks5' is not supported"),
        ("https://user:hunter2@proxy.test", "'https' is not supported"),
        ("http://user:hunter2@", "not a proxy URL"),
        ("http://user:hunter2@proxy.test:port", "not a proxy URL"),
        ("http://user:hunter2@proxy.test:70000", "not a proxy URL"),
        ("http://user:hunter2@[2001:db8::1:80", "not a proxy URL"),
        ("http://user:hunter2@bad host:80", "not a proxy URL"),
        ("http://user:12/hunter2@proxy.test:80", "not a proxy URL"),
    ],
)
def test_an_unusable_proxy_is_an_error_that_keeps_the_password_secret(value, complaint):
    for environ, override, named in (
        ({"HTTPS_PROXY": value}, None, "HTTPS_PROXY"),
        ({}, value, "proxy in the"),
    ):
        with pytest.raises(ConfigError) as caught:
            proxy_for("https", "registry.example", 443, environ, override)
        assert complaint in caught.value.message
        assert named in caught.value.message
        assert caught.value.hint is not None
        assert "hunter2" not in f"{caught.value!r} {caught.value.hint}"


def test_text_of_a_proxy_shows_no_user_info():
    proxy = Proxy("2001:db8::1", 3128, "HTTPS_PROXY", "someone", "hunter2")
    assert str(proxy) == repr(proxy) == "http://[2001:db8::1]:3128"


# Names and connections.


async def opened(found=None, *, tls=None, origin=ORIGIN, proxy=None, asked=None):
    """Open a stream on an edge whose `connect` gives or raises what is found, or never returns."""

    async def connect(host, port):
        if asked is not None:
            asked.append((host, port))
        if isinstance(found, Exception):
            raise found
        return found or await anyio.sleep_forever()

    async def believe(below, context, host):
        return below

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with edge.using(edge.Edge(connect, tls or believe, None, None, None, {})):
        return await open_stream(origin, context=context, timeouts=Timeouts(), proxy=proxy)


async def failure(*found, **options):
    """Return the error with which no stream is opened."""
    with pytest.raises(WireError) as caught:
        await opened(*found, **options)
    return caught.value


NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
REFUSED = OSError(errno.ECONNREFUSED, "Connection refused")
NO_ROUTE = OSError(errno.ENETUNREACH, "Network is unreachable")


@pytest.mark.parametrize(
    ("error", "message", "is_unknown"),
    [
        (NO_NAME, "the name registry.test could not be resolved: Name or service not known", True),
        (AGAIN, "the name registry.test could not be resolved: Temporary failure", False),
        (UnicodeError("label too long"), "the name registry.test could not be resolved: label too long", True),
        (REFUSED, "no connection to registry.test:443: connection refused", False),
        (OSError("odd\x1b[31m"), "no connection to registry.test:443: odd[31m", False),
        (None, "no connection to registry.test:443 within 10 s", False),
    ],
)  # fmt: skip
@pytest.mark.virtual_time
async def test_why_there_is_no_connection_is_told(error, message, is_unknown):
    began = anyio.current_time()
    told = await failure(error)
    assert (type(told), told.message) == (ConnectFailed, message)
    assert (told.is_unknown_name, told.retryable) == (is_unknown, True)
    assert "HTTPS_PROXY" in told.hint
    assert anyio.current_time() - began == (0.0 if error else 10.0)


class Attempts:
    """What becomes of the attempts to connect to each address."""

    def __init__(self, monkeypatch, **fates):
        self.fates, self.begun, self.closed = fates, {}, []
        self.is_too_late_to_cancel = False
        self.began = anyio.current_time()
        monkeypatch.setattr(dial, "_connect_one", self.connect)
        monkeypatch.setattr(dial, "_resolve", self.resolve)

    async def resolve(self, *_):
        return [(socket.AF_INET6, 1, 0, "", (name, 443)) for name in self.fates]

    async def connect(self, family, address):
        name, _ = address
        self.begun[name] = round(anyio.current_time() - self.began, 6)
        if isinstance(self.fates[name], OSError):
            raise self.fates[name]
        try:
            with anyio.CancelScope(shield=self.is_too_late_to_cancel):
                await anyio.sleep(self.fates[name])
        except BaseException:
            self.closed.append(name)
            raise
        return SimpleNamespace(name=name, close=lambda: self.closed.append(name))


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
    fates, winner, begun, closed, monkeypatch
):
    attempts = Attempts(monkeypatch, **fates)
    found = await dial.connect("registry.test", 443)
    assert (found.name, attempts.begun, attempts.closed) == (winner, begun, closed)


@pytest.mark.virtual_time
async def test_a_race_leaves_no_stream_open_that_did_not_win(monkeypatch):
    attempts = Attempts(monkeypatch, a=0.5, b=0.1)
    attempts.is_too_late_to_cancel = True  # both connect at once
    assert (await dial.connect("registry.test", 443)).name == "b"
    assert attempts.closed == ["a"]
    attempts = Attempts(monkeypatch, a=5.0, b=5.0, c=5.0)
    with anyio.move_on_after(0.3):
        await dial.connect("registry.test", 443)
    assert sorted(attempts.closed) == sorted(attempts.begun) == ["a", "b"]


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("fates", "told"), [({"a": NO_ROUTE, "b": REFUSED}, "refused"), ({}, "no address")]
)
async def test_if_no_address_answers_the_last_error_is_told(fates, told, monkeypatch):
    Attempts(monkeypatch, **fates)
    with pytest.raises(OSError, match=told):
        await dial.connect("registry.test", 443)


V6, V4 = socket.AF_INET6, socket.AF_INET


@pytest.mark.parametrize(
    ("found", "order"),
    [((V4, V4, V6, V6), "2031"), ((V6, V6, V6, V4), "0312"), ((V4,), "0"), ((V6, V6), "01")],
)
async def test_the_families_take_turns(found, order, monkeypatch):
    rows = [(family, 1, 0, "", (f"{number}", 443)) for number, family in enumerate(found)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: rows)
    resolved = await dial._resolve("registry.test", 443, socket.AF_UNSPEC)
    assert "".join(row[4][0] for row in resolved) == order


@pytest.mark.parametrize(("host", "family"), [("192.0.2.1", V4), ("::1", V6)])
async def test_an_address_is_not_looked_up(host, family, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    for asked in (socket.AF_UNSPEC, V4):
        assert await dial._resolve(host, 443, asked) == [(family, 1, 0, "", (host, 443))]


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
    four, six, expected, monkeypatch
):
    async def resolve(host, port, family):
        return four if family == V4 else six

    async def race(rows):
        if isinstance(rows, OSError):
            raise rows
        return rows

    monkeypatch.setattr(dial, "_resolve", resolve)
    monkeypatch.setattr(dial, "_race", race)
    monkeypatch.setattr(dial, "IS_STATIC", True)
    try:
        found = await dial.connect("registry.test", 443)
    except OSError as error:
        found = error
    assert found is expected


# Tunnels.


@pytest.mark.parametrize(
    ("login", "origin", "target", "sent"),
    [
        ((), ORIGIN, "registry.test:443", None),
        ((), Origin("http", "::1", 5000), "[::1]:5000", None),
        (("user", "p:w\u00e9"), ORIGIN, "registry.test:443", "user:p:w\u00e9"),
        (("user",), ORIGIN, "registry.test:443", "user:"),
    ],
)
async def test_a_tunnel_is_asked_for_with_port_and_login(login, origin, target, sent):
    wire, asked = Wire(OPEN), []
    proxy = Proxy("proxy.test", 3128, "HTTPS_PROXY", *login)
    assert await opened(wire, origin=origin, proxy=proxy, asked=asked) is wire
    assert asked == [("proxy.test", 3128)]
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if sent is not None:
        lines.append(f"Proxy-Authorization: Basic {b64encode(sent.encode()).decode()}")
    assert b"".join(wire.writes) == "\r\n".join([*lines, "", ""]).encode()


SAID = "the proxy http://proxy.test:3128 "
REFUSES = f"{SAID}refused a tunnel to registry.test:443 "
OPENS_NONE = f"{SAID}did not open a tunnel: "
PUT = "put user and password into the proxy's URL, percent-encoded; the proxy has to accept Basic"


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("said", "message", "hint", "is_retried"),
    [
        ((answer(status=403),), f"{REFUSES}(403)", None, False),
        ((answer(status=502),), f"{REFUSES}(502)", None, True),
        ((answer(status=407),), f"{REFUSES}(407)", PUT, False),
        ((answer(b"", "Proxy-Authenticate: c2VjcmV0", status=407),), f"{REFUSES}(407)", PUT, False),
        ((OPEN + b"\x16secret",), f"{SAID}sent bytes before the tunnel was used", None, None),
        ((b"SSH-2.0 secret\r\n\r\n",), f"{OPENS_NONE}proxy.test:3128 does not speak HTTP/1.1", None, True),
        ((End.EOF,), f"{OPENS_NONE}the connection ended before the end of an answer", None, True),
        ((End.RESET,), f"{OPENS_NONE}the connection broke", None, True),
        ((Pause(61), OPEN), f"{OPENS_NONE}no answer from proxy.test:3128 within 60 s", None, True),
    ],
)  # fmt: skip
async def test_why_a_proxy_opens_no_tunnel_is_told_without_its_own_words(
    said, message, hint, is_retried
):
    wire, began = Wire(*said), anyio.current_time()
    told = await failure(wire, proxy=PROXY)
    assert (told.message, told.hint, wire.is_closed) == (message, hint, True)
    assert isinstance(told, ProtocolBroken) if is_retried is None else told.retryable is is_retried
    assert anyio.current_time() - began == (60.0 if "within" in message else 0.0)


# TLS and sockets.

ALERT = ssl.SSLError(1, "alert")
ALERT.reason = "TLSV1_ALERT_UNKNOWN_CA"


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("error", "message", "is_retried"),
    [
        (ssl.SSLEOFError(8, "EOF occurred"), "TLS with registry.test failed: EOF occurred", True),
        (ALERT, "failed: tlsv1 alert unknown ca", False),
        (ConnectionResetError(104, "Connection reset by peer"), "failed: Connection reset", True),
        (ValueError("no such name"), "TLS with registry.test cannot begin: no such name", True),
        (None, "the TLS handshake with registry.test took longer than 10 s", True),
    ],
)  # fmt: skip
async def test_why_a_handshake_failed_is_told_and_its_stream_closed(error, message, is_retried):
    async def start_tls(*_):
        if error is None:
            await anyio.sleep_forever()
        raise error

    wire = Wire()
    told = await failure(wire, tls=start_tls)
    assert message in told.message
    assert (told.retryable, wire.is_closed) == (is_retried, True)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield SocketStream(ours), theirs
    ours.close()
    theirs.close()


async def test_a_socket_never_blocks(pair):
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
    while sent > 0:
        sent -= len(theirs.recv(100_000))
    await stream.wait(WANT_WRITE)
    assert stream.send_now(memoryview(b"x")) == 1
    theirs.close()
    await stream.wait(WANT_READ)
    with pytest.raises(OSError, match=os.strerror(errno.EPIPE)):
        stream.send_now(memoryview(b"x"))


async def test_a_system_without_threads_is_an_error_of_that_connection(monkeypatch):
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(OSError, match="can't start new thread"):
        await dial.connect("registry.test", 443)


async def test_who_waits_for_a_socket_that_is_closed_is_told(pair):
    stream, _ = pair

    async def wait():
        with pytest.raises(ConnectionAbortedError):
            await stream.wait(WANT_READ)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await stream.wait(WANT_READ)  # the second task returns soon, to try again
        stream.close()
    with pytest.raises(OSError, match="closed"):
        await stream.wait(WANT_READ)
    stream.close()


async def test_a_name_that_no_certificate_can_have_closes_nothing(pair):
    stream, theirs = pair
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name in ("", "a" * 70):
        with pytest.raises(ValueError, match=r"empty|too long|label|server_hostname"):
            await dial.handshake(stream, context, name)
    theirs.send(b"x")
    assert stream.recv_into(memoryview(bytearray(1))) == 1
