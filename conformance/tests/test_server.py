"""The harness's server: the same bytes are the same exchanges, whatever pieces they come in."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from conformance.http import Server, run_in_thread
from conformance.images import Seed
from conformance.messages import digest_of
from conformance.registry import App

CURL = b"GET /v2/ HTTP/1.1\r\nHost: [::1]\r\nAccept: */*\r\n\r\n"


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
