"""The harness's server: its short way through heads against h11, which decides what is an error."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conformance.content.images import Seed
from conformance.messages import digest_of
from conformance.registry.app import App
from conformance.server.heads import PlainHead, read_plain_head
from conformance.server.sockets import Server, run_in_thread

GO = (
    b"PUT /v2/a/b/blobs/uploads/x?_state=a%3D%3D&digest=sha256%3A00 HTTP/1.1\r\nHost: 127.0.0.1:5000\r\n"
    b"User-Agent: containers/5.29 (github.com/containers/image)\r\nContent-Length: 5\r\n"
    b"Authorization: Bearer a.b-c_d/+==\r\nContent-Type: application/octet-stream\r\nX-Empty:\r\n\r\n"
)
CURL = b"GET /v2/ HTTP/1.1\r\nHost: [::1]\r\nAccept: */*\r\n\r\n"
DOUBLED = (
    b"HEAD /v2/a/manifests/v1 HTTP/1.1\r\nhost:x\r\naccept: a/b, c/d;q=1\r\naccept: e/f\r\n\r\nGET "
)

# What a mutation puts in: all that has a meaning for one reader or the other.
PIECES = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b" ", b"  ", b"\t", b":", b"\x00", b"\x0b", b"\x0c", b"\x1f",
    b"\x7f", b"\x80", b"\xff", b"\xc3\xbc", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"CONNECT", b"OPTIONS",
    b"get", b"Host: y\r\n", b"host: x\r\n", b"Content-Length: 5\r\n", b"content-length: 5, 5\r\n",
    b"Content-Length: 05\r\n", b"Content-Length: +5\r\n", b"Content-Length: 5 \r\n", b"Content-Length:\r\n",
    b"Content-Length: 123456789012345678901\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
    b"transfer-encoding: gzip\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b" folded\r\n",
    b"a:b\r\n", b"a :b\r\n", b"\t: x\r\n", b":x\r\n", b"a\r\n", b"a: b \r\n", b"a:  b\r\n", b"a:\tb\r\n",
    b"a: b\tc\r\n",
)  # fmt: skip


def by_h11(data: bytes) -> PlainHead | None:
    """Read a head as h11 does; None where it refuses or wants more."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    parser.receive_data(data)
    try:
        event = parser.next_event()
    except h11.RemoteProtocolError:
        return None
    if not isinstance(event, h11.Request) or event.http_version != b"1.1":
        return None
    headers = [(name.decode(), value.decode("latin-1")) for name, value in event.headers]
    left = len(parser.trailing_data[0])
    return PlainHead(event.method.decode(), event.target.decode(), headers, len(data) - left)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Take a plain head and put up to three pieces or bytes into it, or take some out."""
    data = draw(st.sampled_from([GO, CURL, DOUBLED]))
    for _ in range(draw(st.integers(0, 3))):
        # Where a line begins is where most can go wrong.
        lines = [place for place in range(len(data)) if data[place - 2 : place] == b"\r\n"]
        place = draw(st.sampled_from(lines) | st.integers(0, len(data))) if lines else 0
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=3))
        data = data[:place] + piece + data[place + draw(st.sampled_from([0, 0, 0, 1, 2, 10])) :]
    return data


@given(mutated())
@settings(max_examples=400, deadline=None)
@example(GO)
@example(CURL)
@example(DOUBLED)
def test_what_is_read_at_once_is_what_h11_reads(data: bytes) -> None:
    read = read_plain_head(data)
    if read is not None:
        assert read == by_h11(data)


def test_no_piece_at_any_place_is_read_otherwise_than_by_h11() -> None:
    taken = 0
    for piece in PIECES:
        for place in range(1, len(CURL) + 1):
            for data in (
                CURL[:place] + piece + CURL[place:],
                CURL[: place - 1] + piece + CURL[place:],
            ):
                read = read_plain_head(data)
                if read is not None:
                    assert read == by_h11(data)
                    taken += 1
    assert taken > 100


@pytest.mark.parametrize(
    "data", [GO, CURL, DOUBLED, GO + b"12345" + CURL], ids=["go", "curl", "twice", "more"]
)
def test_heads_of_clients_are_read_at_once(data: bytes) -> None:
    assert read_plain_head(data) == by_h11(data) is not None


@pytest.mark.parametrize(
    "data",
    [
        CURL[:-1],
        CURL.replace(b"1.1", b"1.0"),
        CURL.replace(b"Host", b"Hosts"),
        CURL.replace(b"GET", b"OPTIONS"),
        CURL.replace(b"\r\n", b"\n"),
        CURL.replace(b"*/*\r\n", b"*/*\r\n folded\r\n"),
        CURL.replace(b"*/*", b"*/* "),
        CURL.replace(b"*/*", b"\xfc"),
        CURL.replace(b"Accept: */*", b"Transfer-Encoding: chunked"),
        CURL.replace(b"Accept: */*", b"Upgrade: h2c"),
        CURL.replace(b"Accept: */*", b"Content-Length: 1, 1"),
        CURL.replace(b"Accept: */*", b"Content-Length: 1\r\nContent-Length: 1"),
        CURL.replace(b"Accept: */*", b"Content-Length: -1"),
        CURL.replace(b"Accept: */*", b"Host: y"),
    ],
)
def test_everything_else_is_left_to_h11(data: bytes) -> None:
    assert read_plain_head(data) is None


# Over sockets: both ways lead to the same exchanges.


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def server(app: App) -> Iterator[Server]:
    with run_in_thread(app) as running:
        yield running


def talk(server: Server, pieces: list[bytes]) -> bytes:
    """Send pieces on one connection, each in a segment of its own; return all that is answered."""
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
        received = b""
        while piece := sock.recv(65536):
            received += piece
        return received


def test_the_same_bytes_mean_the_same_however_they_arrive(server: Server, app: App) -> None:
    """In one piece the heads are read at once, byte by byte they are h11's; pipelined, both in
    turn.
    """
    data = Seed(1).blob(3000)
    image = Seed(2).image().load_into(app, "a/b", tag="v1")
    post = f"POST /v2/a/b/blobs/uploads/?digest={digest_of(data)} HTTP/1.1\r\nHost: x\r\n"
    sent = (
        f"GET /v2/a/b/manifests/v1 HTTP/1.1\r\nHost: x\r\nAccept: {image.media_type}\r\n\r\n".encode()
        + f"{post}Content-Length: {len(data)}\r\n\r\n".encode()
        + data
        + f"{post}Transfer-Encoding: chunked\r\n\r\nbb8\r\n".encode()
        + data
        + b"\r\n0\r\n\r\nHEAD /v2/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    whole = talk(server, [sent])
    assert whole.count(b"HTTP/1.1 20") == 4
    assert image.body in whole
    first = [
        (each.method, each.target, each.status, each.request_bytes) for each in app.journal.entries
    ]
    for size in (1, 7, 400, 3500):
        app.journal.clear()
        assert (
            talk(server, [sent[place : place + size] for place in range(0, len(sent), size)])
            == whole
        )
        again = [
            (each.method, each.target, each.status, each.request_bytes)
            for each in app.journal.entries
        ]
        assert again == first
    assert app.blob("a/b", digest_of(data)) == data
    app.journal.check()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (CURL.replace(b"Host", b"Hosts"), b"400"),
        (CURL.replace(b"Accept: */*", b"Transfer-Encoding: gzip"), b"501"),
        (CURL.replace(b"Accept: */*", b"Content-Length: 1, 2"), b"400"),
    ],
)
def test_refusals_are_those_of_h11(server: Server, sent: bytes, status: bytes) -> None:
    assert talk(server, [CURL + sent]).split(b"HTTP/1.1 ")[2].startswith(status)
    assert len(server.journal.violations) == 1


def test_a_connection_of_http_1_0_ends_behind_its_answer(server: Server) -> None:
    said = talk(server, [CURL.replace(b"1.1\r\n", b"1.0\r\n") + CURL])
    assert said.count(b"HTTP/1.1 200 ") == 1
    assert b"\r\nConnection: close\r\n" in said
