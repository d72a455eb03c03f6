"""The registry over real sockets and over the network in memory.

On sockets: framing, connections that are kept or end, TLS. In memory: as slow, as full and as broken
as it says, on the virtual clock.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import anyio
import pytest

from conformance.evidence import Act
from conformance.http import DRAINED, Server, Site, run_in_thread, serve
from conformance.images import Seed
from conformance.memory import End, Link, network
from conformance.messages import Request, Response, digest_of, error
from conformance.registry import App
from conformance.tests.asking import NOWHERE, OCTETS, begin, location, refused

PING = b"GET /v2/ HTTP/1.1\r\nHost: r.test\r\n\r\n"
LAST = PING.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


@pytest.fixture
def server(app: App) -> Iterator[Server]:
    with run_in_thread(app) as running:
        yield running


def talk(server: Server, *pieces: bytes) -> bytes:
    """Send pieces on one connection, each in a segment of its own; return all that is answered."""
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
        return b"".join(iter(lambda: sock.recv(65536), b""))


# Hooks, without a server.


def test_the_intercept_is_asked_first_and_amend_last(app: App) -> None:
    app.intercept = lambda request: (
        error(503, "UNAVAILABLE", "later") if request.kind == "ping" else None
    )
    refused(app.request("GET", "/v2/"), 503, "UNAVAILABLE")
    refused(app.request("GET", "/v2/a/tags/list"), 404, "NAME_UNKNOWN")
    assert [entry.tampered for entry in app.journal.entries] == [True, False]
    app.amend = lambda request, answer: Response(418, body=str(answer.status).encode())  # type: ignore[union-attr]
    assert app.request("GET", "/v2/a/tags/list").data == b"404"
    assert (app.journal.entries[2].status, app.journal.entries[2].tampered) == (418, True)


# Sockets.


def test_the_same_bytes_mean_the_same_however_they_arrive(server: Server, app: App) -> None:
    data = Seed(1).blob(3000)
    image = Seed(2).image().load_into(app, "a/b", tag="v1")
    post = f"POST /v2/a/b/blobs/uploads/?digest={digest_of(data)} HTTP/1.1\r\nHost: x\r\n"
    get = f"GET /v2/a/b/manifests/v1 HTTP/1.1\r\nHost: x\r\nAccept: {image.media_type}\r\n\r\n"
    sent = get.encode() + f"{post}Content-Length: {len(data)}\r\n\r\n".encode() + data
    sent += f"{post}Transfer-Encoding: chunked\r\n\r\nbb8\r\n".encode() + data
    sent += b"\r\n0\r\n\r\n" + LAST.replace(b"GET", b"HEAD")
    answers = set()
    for size in (len(sent), 7, 400, 3500):
        app.journal.clear()
        pieces = [sent[place : place + size] for place in range(0, len(sent), size)]
        answers.add(talk(server, *pieces))
        told = [(each.method, each.status, each.request_bytes) for each in app.journal.entries]
        posted = ("POST", 201, len(data))
        assert told == [("GET", 200, 0), posted, posted, ("HEAD", 200, 0)]
        assert app.journal.connections() == 1
    (answer,) = answers
    assert image.body in answer
    assert b"\r\nContent-Length: 2\r\n" in answer
    assert answer.endswith(b"\r\n\r\n"), "the length of a HEAD's body, and no body"
    assert app.blob("a/b", digest_of(data)) == data
    app.journal.check()


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        (b"Host", b"Hosts", b"400"),
        (b"\r\n\r\n", b"\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"GET /v2/ HTTP/1.1", b"HELO registry", b"400"),
    ],
)
def test_what_is_not_http_is_refused_and_noted(
    server: Server, old: bytes, new: bytes, status: bytes
) -> None:
    answers = talk(server, PING + PING.replace(old, new)).split(b"HTTP/1.1 ")
    assert answers[2].startswith(status)
    assert "not HTTP" in server.journal.violations[0]


def test_a_tls_greeting_on_a_plain_port_is_counted(server: Server) -> None:
    for ending in (b"", b"\n\n\x00"):
        assert talk(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + ending) == b""
    assert server.journal.hellos == 2
    server.journal.check()


@pytest.mark.parametrize("coding", ["Content-Length: 10", "Transfer-Encoding: chunked"])
def test_a_body_that_breaks_is_kept_for_resuming(server: Server, app: App, coding: str) -> None:
    where = begin(app)
    data = b"data" if "Length" in coding else b"4\r\ndata\r\n"
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        sock.sendall(f"PATCH {where} HTTP/1.1\r\nHost: x\r\n{coding}\r\n\r\n".encode() + data)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    status = app.request("GET", where)
    assert status.header("Range") == "0-3"
    assert app.request("PATCH", location(status), [OCTETS], b"rest").status == 202
    assert server.journal.matching("PATCH")[0].status is None


def test_a_large_body_goes_in_and_out_unchanged(server: Server, app: App) -> None:
    data = Seed(9).blob((1 << 20) + 12345)
    target = f"{begin(app)}&digest={digest_of(data)}"
    connection = http.client.HTTPConnection(server.address, timeout=30)
    connection.request("PUT", target, data, dict([OCTETS]))
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (201, b"")
    connection.request("GET", f"/v2/a/b/blobs/{digest_of(data)}")
    assert connection.getresponse().read() == data
    connection.close()
    assert server.journal.bytes_in() == server.journal.bytes_out() == len(data)


@pytest.mark.parametrize(("size", "early"), [(DRAINED, False), (DRAINED + 1, True)])
def test_a_refusal_waits_for_small_bodies_only(server: Server, size: int, early: bool) -> None:
    """Go's servers do so (docs/protocol-facts.md section 1.12)."""
    head = f"PUT /v2/a/b/blobs/uploads/gone?_state=1&digest={NOWHERE} HTTP/1.1\r\nHost: x\r\n"
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        sock.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
        if not early:
            sock.sendall(bytes(size))
        said = sock.recv(65536)
        assert said.startswith(b"HTTP/1.1 404 ")
        assert (b"\r\nConnection: close\r\n" in said) == early
    assert server.journal.bytes_in() == (0 if early else size)


async def test_the_failure_of_the_block_leaves_the_server_as_it_is(app: App) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with serve(app):
            raise KeyError("mine")


def test_a_bug_in_the_registry_is_not_swallowed() -> None:
    class Broken(Site):
        def start(self, request: Request) -> Response:
            raise ZeroDivisionError

    def leaves(problem: BaseException) -> list[BaseException]:
        inner = getattr(problem, "exceptions", None)
        return [problem] if inner is None else [leaf for part in inner for leaf in leaves(part)]

    with pytest.raises(BaseException) as caught, run_in_thread(Broken()) as server:  # noqa: PT011
        talk(server, PING)
    assert "ZeroDivisionError" in repr(leaves(caught.value))


# The network in memory.


def now() -> float:
    return round(anyio.current_time(), 6)


async def read(end: End, count: int = 4096) -> bytes:
    room = memoryview(bytearray(count))
    while (got := end.read_into(room)) is None:
        await end.readable()
    return bytes(room[:got])


@pytest.mark.virtual_time
async def test_an_answer_takes_both_latencies_and_the_bandwidth() -> None:
    async with network() as net:
        net.listen(App(), "r.test", up=Link(latency=0.5), down=Link(latency=1.5, bandwidth=10))
        end = await net.connect("r.test", 80)
        assert now() == 2.0, "a connection takes one round trip"
        assert end.write(PING) == len(PING)
        assert (await read(end, 10), now()) == (b"HTTP/1.1 2", 5.0)
        assert (await read(end, 10), now()) == (b"00 OK\r\nCon", 6.0)


@pytest.mark.virtual_time
async def test_bandwidth_is_shared_by_the_connections_of_a_place(app: App) -> None:
    digest = app.add_blob("app", bytes(900_000))
    ended: list[float] = []
    async with network() as net:
        net.listen(app, "r.test", down=Link(bandwidth=100_000))

        async def pull() -> None:
            end = await net.connect("r.test", 80)
            end.write(LAST.replace(b"/v2/", f"/v2/app/blobs/{digest}".encode()))
            while await read(end):
                pass
            ended.append(now())

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(pull)
    assert min(ended) >= 17
    assert round(max(ended), 1) == 18.0


@pytest.mark.virtual_time
async def test_a_full_window_makes_the_writer_wait_until_the_reader_reads() -> None:
    async with network() as net:
        place = net.listen(App(), "r.test", up=Link(bandwidth=100))
        end = await net.connect("r.test", 80)
        place.fail("silent")
        assert end.write(b"G" * 300) == 100
        assert end.write(b"G") is None
        with anyio.move_on_after(5) as scope:
            await end.writable()
        assert scope.cancelled_caught


@pytest.mark.virtual_time
async def test_a_close_arrives_behind_what_was_written_and_a_reset_at_once() -> None:
    async with network() as net:
        place = net.listen(App(), "r.test", down=Link(latency=3.0))
        end = await net.connect("r.test", 80)
        end.write(LAST)
        whole = b""
        while piece := await read(end):
            whole += piece
        assert (whole.startswith(b"HTTP/1.1 200 OK"), whole.endswith(b"{}")) == (True, True)
        assert now() == 6.0
        other = await net.connect("r.test", 80)
        other.write(PING)
        await anyio.sleep(1)
        place.reset_connections()
        with pytest.raises(ConnectionResetError):
            await read(other)
        with pytest.raises(ConnectionResetError):
            other.write(PING)
    kept, lost = (Act("http://r.test", entry) for entry in place.journal.entries)
    assert [act.status for act in (kept, lost)] == [200, 200]
    assert (kept.is_success, lost.is_success) == (True, False), "nobody has read it"


@pytest.mark.virtual_time
async def test_nobody_listens_under_another_name_or_port_or_in_an_outage() -> None:
    async with network() as net:
        place = net.listen(App(), "r.test")
        with pytest.raises(OSError, match="Name or service not known"):
            await net.connect("other.test", 80)
        with pytest.raises(ConnectionRefusedError):
            await net.connect("r.test", 443)
        assert not place.was_away
        async with place.outage("refused", 60):
            assert place.was_away
            with pytest.raises(ConnectionRefusedError):
                await net.connect("r.test", 80)
        end = await net.connect("r.test", 80)
        place.forget_outages()
        async with place.outage("silent", 60):
            assert place.was_away
            end.write(PING)
            await anyio.sleep(30)
            assert end.read_into(memoryview(bytearray(9))) is None
            await net.connect("r.test", 80)
            assert now() == 120.0, "a silent line takes connections when it is back"
        assert (await read(end)).startswith(b"HTTP/1.1 200 ")
        assert place.open_connections() == 2
