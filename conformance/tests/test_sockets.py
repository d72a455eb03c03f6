"""The registry over real sockets: framing, connections that are kept or end, TLS."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import anyio
import pytest
import trustme

from conformance.http import DRAINED, Server, Site, run_in_thread, serve
from conformance.images import Seed
from conformance.messages import Request, Response, digest_of
from conformance.registry import App
from conformance.tests.asking import NOWHERE, OCTETS, begin
from conformance.walks import fetch_http, identical, push_http


@pytest.fixture
def server(app: App) -> Iterator[Server]:
    with run_in_thread(app) as running:
        yield running


def talk(server: Server, data: bytes) -> bytes:
    """Send bytes on a new connection; return everything until the server closes."""
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        sock.sendall(data)
        received = b""
        while piece := sock.recv(65536):
            received += piece
        return received


def test_a_connection_is_kept_until_asked_otherwise(server: Server) -> None:
    keep = b"GET /v2/ HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /v2/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert talk(server, keep + keep + last).count(b"HTTP/1.1 200 OK") == 3
    assert server.journal.connections() == 1
    assert b"\r\nConnection: close\r\n" in talk(server, b"GET /v2/ HTTP/1.0\r\nHost: x\r\n\r\n")
    assert [entry.connection for entry in server.journal.entries] == [1, 1, 1, 2]


def test_head_has_the_length_but_no_body(server: Server, app: App) -> None:
    digest = app.add_blob("a/b", b"0123456789")
    said = talk(
        server,
        f"HEAD /v2/a/b/blobs/{digest} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(),
    )
    assert b"\r\nContent-Length: 10\r\n" in said
    assert said.endswith(b"\r\n\r\n")


def test_what_is_not_http_is_refused_and_noted(server: Server) -> None:
    assert talk(server, b"HELO registry\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert "not HTTP" in server.journal.violations[0]


def test_a_tls_greeting_on_a_plain_port_is_counted(server: Server) -> None:
    for ending in (b"", b"\n\n\x00"):
        assert talk(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + ending) == b""
    assert server.journal.hellos == 2
    server.journal.check()


def test_chunked_bodies_are_accepted(server: Server, app: App) -> None:
    where = begin(app)
    head = f"PUT {where}&digest={digest_of(b'datadata')} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    last = b"GET /v2/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    said = talk(server, head.encode() + b"\r\n4\r\ndata\r\n4\r\ndata\r\n0\r\n\r\n" + last)
    assert said.startswith(b"HTTP/1.1 201 ")
    assert said.count(b"HTTP/1.1 ") == 2, "what follows a chunked body is the next request"
    assert app.blob("a/b", digest_of(b"datadata")) == b"datadata"
    assert server.journal.bytes_in() == 8


@pytest.mark.parametrize("coding", ["Content-Length: 10", "Transfer-Encoding: chunked"])
def test_a_body_that_breaks_is_kept_for_resuming(server: Server, app: App, coding: str) -> None:
    where = begin(app)
    data = b"data" if "Length" in coding else b"4\r\ndata\r\n"
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        sock.sendall(f"PATCH {where} HTTP/1.1\r\nHost: x\r\n{coding}\r\n\r\n".encode() + data)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert app.request("GET", where).header("Range") == "0-3"
    assert server.journal.matching("PATCH")[0].status is None


def test_a_large_body_goes_in_and_out_unchanged(server: Server, app: App) -> None:
    data = Seed(9).blob((5 << 20) + 12345)
    digest = digest_of(data)
    connection = http.client.HTTPConnection(server.address, timeout=30)
    connection.request("PUT", f"{begin(app)}&digest={digest}", data, dict([OCTETS]))
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (201, b"")
    connection.request("GET", f"/v2/a/b/blobs/{digest}", headers={"Range": "bytes=1048570-"})
    assert connection.getresponse().read() == data[1048570:]
    connection.request("GET", f"/v2/a/b/blobs/{digest}")
    assert connection.getresponse().read() == data
    connection.close()
    assert server.journal.bytes_in() == len(data)
    assert server.journal.bytes_out() == 2 * len(data) - 1048570


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


def test_an_answer_can_be_early_late_raw_or_closing(server: Server, app: App) -> None:
    answers: dict[str, Response | bytes] = {
        "/early": Response(500, early=True),
        "/late": Response(500, early=False),
        "/raw": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        "/close": Response(200, close=True),
    }
    app.intercept = lambda request: answers.get(request.path)
    for path, sent, starts in (
        ("/early", 0, b"HTTP/1.1 500 "),
        ("/late", DRAINED + 1, b"HTTP/1.1 500 "),
        ("/raw", 9, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort"),
        ("/close", 9, b"HTTP/1.1 200 "),
    ):
        length = sent or 5
        with socket.create_connection((server.host, server.port), timeout=10) as sock:
            sock.sendall(
                f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
            )
            sock.sendall(bytes(sent))
            assert sock.recv(65536).startswith(starts)
            if path == "/late":
                continue
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(65536) == b"", "the connection ends behind it"


def test_tls_is_spoken_when_a_context_is_given(app: App, ca: trustme.CA) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    image = Seed(2).image(sizes=(3 << 20,))
    with run_in_thread(app, ssl_context=context) as server:
        assert server.url.startswith("https://")
        push_http(image, server.address, "a/b", "v1", context=trusting)
        assert identical(
            fetch_http(server.address, "a/b", "v1", context=trusting), image.contents()
        )
        with pytest.raises(ssl.SSLCertVerificationError):
            fetch_http(server.address, "a/b", "v1", context=ssl.create_default_context())
        assert (
            server.journal.matching("POST")[0].response_headers["location"].startswith("https://")
        )


@pytest.fixture
async def beside(app: App) -> AsyncIterator[Server]:
    async with serve(app) as running:
        yield running


@pytest.mark.anyio
async def test_many_connections_are_served_at_once_on_one_loop(beside: Server, app: App) -> None:
    """An asynchronous intercept holds all of them until the last has come."""
    here = 0
    everybody = anyio.Event()

    async def hold(request: Request) -> Response | None:
        nonlocal here
        here += 1
        if here == 30:
            everybody.set()
        await everybody.wait()
        return None

    app.intercept = hold
    answers = []

    async def ask() -> None:
        async with await anyio.connect_tcp(beside.host, beside.port) as stream:
            await stream.send(b"GET /v2/ HTTP/1.1\r\nHost: x\r\n\r\n")
            answers.append(await stream.receive())

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                tasks.start_soon(ask)
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert beside.journal.count(status=200) == 30


@pytest.mark.anyio
async def test_the_failure_of_the_block_leaves_the_server_as_it_is(app: App) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with serve(app):
            raise KeyError("mine")


def test_a_bug_in_the_registry_is_not_swallowed() -> None:
    class Broken(Site):
        def start(self, request: Request) -> Response:
            raise ZeroDivisionError

    with pytest.raises(BaseException) as caught, run_in_thread(Broken()) as server:  # noqa: PT011
        talk(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert "ZeroDivisionError" in repr(_leaves(caught.value))


def _leaves(problem: BaseException) -> list[BaseException]:
    inner = getattr(problem, "exceptions", None)
    return [problem] if inner is None else [leaf for part in inner for leaf in _leaves(part)]
