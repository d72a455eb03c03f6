"""The health listener: what it answers, on real sockets; how long it waits and for how many, on a
clock that jumps.
"""

from __future__ import annotations

import concurrent.futures
import errno
import http.client
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import anyio.abc
import anyio.from_thread
import pytest

from _regsync.app import health
from _regsync.errors import ConfigError

Address = tuple[Any, ...]
Listen = Callable[..., Address]
HEAD = b"GET /healthz HTTP/1.1\r\nHost: h\r\n"
OPEN_FILES = "/proc/self/fd"


def tell(path: str) -> tuple[int, dict[str, Any]]:
    """Answer as `watch` does before its first cycle has ended."""
    return (200 if path == "/healthz" else 503), {"status": "here", "path": path, "cycle": None}


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """Where most of these tests find it."""
    with health.serving("127.0.0.1", 0, tell) as (first, *_):
        yield first


def exchange(address: Address, sent: bytes) -> bytes:
    """Send bytes, leave the direction open, and return all that comes until the peer closes."""
    with socket.create_connection(address[:2], timeout=10) as own:
        own.sendall(sent)
        got = b""
        while piece := own.recv(65536):
            got += piece
    return got


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Take the one answer apart; what is behind its body counts as body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    match = re.fullmatch(r"HTTP/1\.1 ([1-5][0-9]{2}) [A-Za-z -]+", first)
    assert match, answer
    fields = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    assert len(fields) == len(lines)
    return int(match[1]), fields, body


def asked(address: Address, sent: bytes) -> int:
    """Return the status of the only answer, whose framing is held to RFC 9112."""
    status, fields, body = parsed(exchange(address, sent))
    assert int(fields["content-length"]) == len(body)
    assert fields["connection"] == "close"
    assert json.loads(body)
    return status


# --- the two resources
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/readyz", 503)])
def test_a_probe_is_told_what_the_program_tells(address: Address, path: str, status: int) -> None:
    connection = http.client.HTTPConnection(address[0], address[1], timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == status
    assert json.loads(answer.read()) == tell(path)[1]
    connection.close()
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert parsedate_to_datetime(answer.headers["Date"]).tzinfo is not None


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/", "/x"])
def test_a_head_has_the_head_of_the_answer_and_no_body(address: Address, path: str) -> None:
    plain = [
        parsed(exchange(address, f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode()))
        for method in ("GET", "HEAD")
    ]
    (status, fields, body), (same, alike, nothing) = plain
    assert (status, nothing) == (same, b"")
    assert int(fields["content-length"]) == len(body)
    assert {**fields, "date": ""} == {**alike, "date": ""}


@pytest.mark.parametrize(
    "path",
    ["/", "/healthz/", "/healthzz", "//healthz", "/HEALTHZ", "/healthz%2f", "*", "x", "/%00"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_paths_are_not_found(address: Address, method: str, path: str) -> None:
    assert asked(address, f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode()) == 404


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "X"]
)
def test_other_methods_are_told_which_there_are(address: Address, method: str) -> None:
    answer = exchange(
        address, f"{method} /readyz HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc".encode()
    )
    status, fields, _ = parsed(answer)
    assert (status, fields["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz?verbose=1 HTTP/1.1\r\nHost: h:8080\r\n",
        b"GET http://other.test:80/healthz HTTP/1.1\r\nHost: [::1]:8080\r\n",
        b"GET HTTPS://other.test/healthz?x HTTP/1.1\r\nHost: h\r\n",
        b"GET /healthz HTTP/1.0\r\n",
        b"GET /healthz HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n",
        b"GET /healthz HTTP/1.1\r\nHost:\r\n",
        b"GET /healthz HTTP/1.2\r\nHost: h\r\n",
        b"GET /healthz HTTP/1.1\nHost: h\n",
        b"GET /healthz HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: h\r\nUpgrade: h2c\r\nConnection: upgrade\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n",
    ],
)
def test_what_the_standard_allows_is_taken(address: Address, head: bytes) -> None:
    """RFC 9112 sections 2.2, 2.3, 3.2.2, 5.2; RFC 9110 section 10.1.1."""
    assert asked(address, head + (b"\n" if b"\r" not in head else b"\r\n")) == 200


def test_a_client_that_has_said_all_it_will_is_answered(address: Address) -> None:
    with socket.create_connection(address[:2], timeout=10) as own:
        own.sendall(HEAD + b"\r\n")
        own.shutdown(socket.SHUT_WR)
        assert own.recv(12) == b"HTTP/1.1 200"


def test_a_head_may_come_in_pieces(address: Address) -> None:
    with socket.create_connection(address[:2], timeout=10) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in re.findall(rb"(?s).{1,7}", HEAD + b"\r\n"):
            own.sendall(piece)
        assert own.recv(12) == b"HTTP/1.1 200"


# --- what others would read otherwise
# ---------------------------------------------------------------------

SECOND = b"GET /readyz HTTP/1.1\r\nHost: h\r\n\r\n"
SHAPES = {
    "both framings": (
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "both, chunked first": (
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
        400,
    ),
    "two lengths": (HEAD + b"Content-Length: 0\r\nContent-Length: 35\r\n\r\n", 400),
    "two lengths in one": (HEAD + b"Content-Length: 0, 35\r\n\r\n", 400),
    "a signed length": (HEAD + b"Content-Length: +0\r\n\r\n", 400),
    "a hexadecimal length": (HEAD + b"Content-Length: 0x10\r\n\r\n", 400),
    "a length of many digits": (HEAD + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n", 400),
    "an unknown coding": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "a coding before chunked": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "chunked twice": (
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        501,
    ),
    "a blank before the colon": (HEAD + b"Transfer-Encoding : chunked\r\n\r\n", 400),
    "a tab before the colon": (HEAD + b"Content-Length\t: 35\r\n\r\n", 400),
    "a name with a control": (HEAD + b"Content\x01-Length: 35\r\n\r\n", 400),
    "a value with a zero": (HEAD + b"X: a\x00b\r\n\r\n", 400),
    "a bare carriage return": (HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n", 400),
    "a header without a colon": (HEAD + b"X\r\n\r\n", 400),
    "a header without a name": (HEAD + b": x\r\n\r\n", 400),
    "a fold before any header": (b"GET /healthz HTTP/1.1\r\n Host: h\r\n\r\n", 400),
    "no host": (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    "two hosts": (HEAD + b"Host: h\r\n\r\n", 400),
    "a host with a path": (b"GET /healthz HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "a host with a user": (b"GET /healthz HTTP/1.1\r\nHost: a@b\r\n\r\n", 400),
    "a host with a blank": (b"GET /healthz HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "a target with a blank": (b"GET /healthz x HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "no target": (b"GET HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "no version": (b"GET /healthz\r\nHost: h\r\n\r\n", 400),
    "a version in small letters": (b"GET /healthz http/1.1\r\nHost: h\r\n\r\n", 400),
    "a version of two digits": (b"GET /healthz HTTP/1.10\r\nHost: h\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/0.9": (b"GET /healthz HTTP/0.9\r\n\r\n", 505),
    "a TLS greeting": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)), 400),
    "no line": (b"\r\n\r\n", 400),
    "an answer": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 400),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_two_could_read_as_two_things_is_refused_and_nothing_after_it_is_read(
    address: Address, shape: str
) -> None:
    """RFC 9112 sections 2.2, 3, 3.2, 5.1, 6.1 to 6.3, 11.2."""
    sent, status = SHAPES[shape]
    assert asked(address, sent + SECOND) == status


def test_a_connection_has_one_request(address: Address) -> None:
    status, _, body = parsed(exchange(address, HEAD + b"\r\n" + SECOND * 50))
    assert status == 200
    assert json.loads(body)["path"] == "/healthz"


@pytest.mark.parametrize("padding", [3000, 3900, 8300, 70_000, 300_000])
@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
def test_a_head_is_bounded(address: Address, padding: int, end: bytes) -> None:
    """The refusal arrives although the client has sent more than is read before it."""
    sent = HEAD + b"X: " + b"a" * padding + end
    if padding < 4000:
        assert not end or asked(address, sent) == 200
    else:
        assert asked(address, sent) == 431


@pytest.mark.parametrize(
    "where", ["method", "path", "query", "host", "name", "value", "body", "version"]
)
def test_nothing_of_a_request_comes_back(address: Address, where: str) -> None:
    places = dict.fromkeys(
        ("method", "path", "query", "host", "name", "value", "body", "version"), ""
    )
    places[where] = "Marker"
    text = "GET{method} /x{path}?{query} HTTP/1.1{version}\r\nHost: {host}\r\nX{name}: {value}\r\n\r\n{body}"
    assert b"marker" not in exchange(address, text.format(**places).encode()).lower()


# --- addresses
# --------------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("bind", "clients"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("localhost", ["localhost"]),
        pytest.param("::1", ["::1"], marks=ipv6),
        pytest.param("[::1]", ["::1"], marks=ipv6),
        pytest.param("::", ["::1", "127.0.0.1"], marks=ipv6),
        ("0.0.0.0", ["127.0.0.1"]),
    ],
)
def test_it_listens_where_it_is_told_to(bind: str, clients: list[str]) -> None:
    with health.serving(bind, 0, tell) as addresses:
        for client in clients:
            assert asked((client, addresses[0][1]), HEAD + b"\r\n") == 200


@ipv6
def test_it_listens_on_every_address_of_the_machine() -> None:
    with health.serving("", 0, tell) as addresses:
        for each in addresses:
            client = "::1" if ":" in each[0] else "127.0.0.1"
            assert asked((client, each[1]), HEAD + b"\r\n") == 200
    assert {":" in each[0] for each in addresses} == {False, True}


def refused(bind: str, port: int) -> ConfigError:
    threads = threading.active_count()
    with pytest.raises(ConfigError) as found, health.serving(bind, port, tell):
        raise AssertionError("it serves")
    assert threading.active_count() <= threads
    assert found.value.exit_status == 3
    assert found.value.message.startswith("health probes: cannot listen on ")
    assert found.value.hint == "choose another address or port with --health-bind and --health-port"
    return found.value


def test_an_address_in_use_is_named(address: Address) -> None:
    assert refused("127.0.0.1", address[1]).message == (
        f"health probes: cannot listen on 127.0.0.1 port {address[1]}: address already in use"
    )


@pytest.mark.parametrize(
    ("bind", "port", "cause"),
    [
        ("no-such-name.invalid", 8080, "no-such-name.invalid port 8080: "),
        ("203.0.113.7", 8080, "203.0.113.7 port 8080: cannot assign requested address"),
        ("127.0.0.1", 65536, "127.0.0.1 port 65536: "),
        ("127.0.0.1", -1, "127.0.0.1 port -1: "),
        ("", 70_000, "* port 70000: "),
        ("x" * 300, 1, "port 1: "),
        ("a\0b\x1b[2J", 1, "port 1: "),
        ("::ffff:999.1.1.1", 1, "::ffff:999.1.1.1 port 1: "),
    ],
)
def test_an_address_that_cannot_be_had_is_named(bind: str, port: int, cause: str) -> None:
    error = refused(bind, port)
    assert cause in error.message
    assert error.message.isprintable()
    assert len(error.message) < 300


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives a name addresses."""

    def resolve(*hosts: str) -> None:
        def look_up(_: str, port: int, **__: Any) -> Any:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return resolve


def test_where_one_address_of_a_name_is_taken_none_is_kept(
    names: Callable[..., None], address: Address
) -> None:
    before = os.listdir(OPEN_FILES)
    names("127.0.0.2", "127.0.0.1")
    with pytest.raises(ConfigError, match="already in use"):
        health.open_listeners("name.test", address[1])
    assert len(os.listdir(OPEN_FILES)) <= len(before)


# --- crowds
# -----------------------------------------------------------------------------------------------


def test_clients_that_say_nothing_do_not_keep_others_out(address: Address) -> None:
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(address[:2], timeout=10))
            for _ in range(400)
        ]
        for each in idle[1::3]:
            each.sendall(b"GET /heal")
        assert asked(address, HEAD + b"\r\n") == 200
        assert idle[0].recv(1) == b"", "the oldest ended"
        for each in idle[-60:]:
            each.settimeout(0)
            with pytest.raises(BlockingIOError):
                each.recv(1)
        idle[-2].settimeout(10)
        idle[-2].sendall(HEAD + b"\r\n")
        assert idle[-2].recv(12) == b"HTTP/1.1 200", "the youngest did not"


def test_garbage_on_many_connections_is_answered_or_cut_off_each_on_its_own(
    address: Address,
) -> None:
    def send(number: int) -> None:
        try:
            exchange(address, bytes(range(256))[number:] * 400)
        except OSError as error:
            failures.append(error.errno or 0)

    failures: list[int] = []
    threads = [threading.Thread(target=send, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    assert asked(address, HEAD + b"\r\n") == 200
    for thread in threads:
        thread.join()
    assert set(failures) <= {errno.ECONNRESET, errno.EPIPE}


def test_who_is_busy_delays_no_probe() -> None:
    """The caller's thread never waits, as an event loop that parses a large file: its turns end by
    themselves.
    """
    answers = list[int]()
    with health.serving("127.0.0.1", 0, tell) as (where, *_):
        probing = threading.Thread(target=lambda: answers.append(asked(where, HEAD + b"\r\n")))
        probing.start()
        while probing.is_alive():
            pass
    assert answers == [200]


def test_a_defect_that_ends_it_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise LookupError("a defect")

    def start(*given: Any) -> Any:
        started.append(plain(*given))
        return started[0]

    plain, started = anyio.from_thread.BlockingPortal.start_task, list[Any]()
    monkeypatch.setattr(anyio.from_thread.BlockingPortal, "start_task", start)
    monkeypatch.setattr(health.Client, "answer", fail)
    with (
        pytest.raises(Exception, match="TaskGroup") as found,
        health.serving("127.0.0.1", 0, tell) as (where, *_),
        socket.create_connection(where[:2], timeout=10),
    ):
        concurrent.futures.wait([started[0][0]])
    group: Any = found.value
    assert [type(each) for each in group.exceptions] == [LookupError]


def test_everything_is_closed_when_it_ends() -> None:
    before = len(os.listdir(OPEN_FILES))
    threads, turn = threading.active_count(), sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    with health.serving("127.0.0.1", 0, tell) as (where, *_):
        assert sys.getswitchinterval() < 0.001
        waiting = [socket.create_connection(where[:2], timeout=10) for _ in range(5)]
        assert asked(where, HEAD + b"\r\n") == 200
    for each in waiting:
        try:
            assert each.recv(1) == b""
        except ConnectionResetError:
            pass  # it had not been accepted
        each.close()
    assert sys.getswitchinterval() == pytest.approx(0.004)
    sys.setswitchinterval(turn)
    # Those of earlier tests may have been closed meanwhile.
    assert len(os.listdir(OPEN_FILES)) <= before
    assert threading.active_count() <= threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where[:2], timeout=10)


# --- time
# -------------------------------------------------------------------------------------------------


class Room:
    """A listener that is reached without a network, whose delays a clock that jumps would not see."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def connect(self) -> anyio.abc.SocketStream:
        return await anyio.connect_unix(self.path)


Enter = Callable[..., AbstractContextManager[Room]]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Room]:
    path = os.path.relpath(tmp_path / "s")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    monkeypatch.setattr(health, "open_listeners", lambda *_: [listener])
    yield Room(path)
    assert listener.fileno() < 0


async def rest_of(stream: anyio.abc.SocketStream) -> tuple[bytes, float]:
    """Read until the peer closes; return what came and when it did."""
    began, got = anyio.current_time(), b""
    try:
        while True:
            got += await stream.receive()
    except anyio.EndOfStream:
        return got, anyio.current_time() - began


@contextmanager
def ended_at_last(tasks: anyio.abc.TaskGroup) -> Iterator[None]:
    yield
    tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("said", [b"", b"G", HEAD, HEAD[:-1]])
async def test_a_head_has_five_seconds(room: Room, said: bytes) -> None:
    async with anyio.create_task_group() as tasks:
        await tasks.start(health.serve, "", 0, tell)
        with ended_at_last(tasks):
            stream = await room.connect()
            if said:
                await stream.send(said)
            assert await rest_of(stream) == (b"", 5.0)
            await stream.aclose()


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_head_that_drips_has_no_more(room: Room) -> None:
    async def drip() -> None:
        for byte in HEAD[:16]:
            await stream.send(bytes([byte]))
            await anyio.sleep(0.3)

    async with anyio.create_task_group() as tasks:
        await tasks.start(health.serve, "", 0, tell)
        with ended_at_last(tasks):
            stream = await room.connect()
            tasks.start_soon(drip)
            assert await rest_of(stream) == (b"", 5.0)
            tasks.cancel_scope.cancel()
        await stream.aclose()


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_an_exchange_has_five_seconds_until_the_answer_is_taken(room: Room) -> None:
    length = 10_000_000
    async with anyio.create_task_group() as tasks:
        await tasks.start(health.serve, "", 0, lambda _: (200, {"status": "x" * length}))
        with ended_at_last(tasks):
            stream = await room.connect()
            await stream.send(HEAD)
            await anyio.sleep(3)
            await stream.send(b"\r\n")
            await anyio.sleep(1.9)
            assert len(await stream.receive(1)) == 1
            await anyio.sleep(0.2)
            got, _ = await rest_of(stream)
            assert 0 < len(got) < length
            await stream.aclose()


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_an_answer_that_is_taken_slowly_arrives_whole(room: Room) -> None:
    length = 1_000_000
    async with anyio.create_task_group() as tasks:
        await tasks.start(health.serve, "", 0, lambda _: (200, {"status": "x" * length}))
        with ended_at_last(tasks):
            stream = await room.connect()
            await stream.send(HEAD + b"\r\n")
            await anyio.sleep(4)
            got, _ = await rest_of(stream)
            assert len(json.loads(got.partition(b"\r\n\r\n")[2])["status"]) == length
            await stream.aclose()


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_client_that_takes_its_answer_and_stays_has_five_seconds(room: Room) -> None:
    async with anyio.create_task_group() as tasks:
        await tasks.start(health.serve, "", 0, tell)
        with ended_at_last(tasks):
            stream = await room.connect()
            await stream.send(HEAD + b"\r\n")
            got, seconds = await rest_of(stream)
            assert (got[:12], seconds) == (b"HTTP/1.1 200", 0), "this direction ends at once"
            await anyio.sleep(4.9)
            await stream.send(b"x")
            await anyio.sleep(0.2)
            with pytest.raises(anyio.BrokenResourceError):
                await stream.send(b"x")
            await stream.aclose()


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_the_places_are_a_fixed_number_and_the_oldest_client_gives_way(room: Room) -> None:
    async with anyio.create_task_group() as tasks:
        await tasks.start(health.serve, "", 0, tell)
        with ended_at_last(tasks):
            streams = []
            for _ in range(258):
                streams.append(await room.connect())
                await anyio.sleep(0.001)
            for stream in streams[:2]:
                assert await rest_of(stream) == (b"", 0)
            got, seconds = await rest_of(streams[2])
            assert (got, round(seconds, 3)) == (b"", 5 - 0.256)
            for stream in streams:
                await stream.aclose()


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_machine_without_files_left_is_asked_again_soon(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept(listener: socket.socket) -> Any:
        asked.append(anyio.current_time() - began)
        if len(asked) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(listener)

    plain, asked = socket.socket.accept, list[float]()
    monkeypatch.setattr(socket.socket, "accept", accept)
    async with anyio.create_task_group() as tasks:
        await tasks.start(health.serve, "", 0, tell)
        with ended_at_last(tasks):
            began = anyio.current_time()
            stream = await room.connect()
            await stream.send(HEAD + b"\r\n")
            got, _ = await rest_of(stream)
            assert got.startswith(b"HTTP/1.1 200")
            assert [round(each, 3) for each in asked[:4]] == [0, 0.1, 0.2, 0.3]
            await stream.aclose()
