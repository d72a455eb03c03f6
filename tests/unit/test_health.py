"""The health probes: what a request gets, and that slow clients cannot block one."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest

from _regsync.app import health
from _regsync.errors import ConfigError


def answer(path: str) -> tuple[int, dict[str, object]]:
    return (200 if path == "/healthz" else 503), {"path": path}


@pytest.mark.parametrize(
    ("head", "status", "is_answered"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200, True),
        (b"GET /readyz?x=1 HTTP/1.0\r\n\r\n", 503, True),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 405, False),
        (b"GET /healthz/ HTTP/1.1\r\n\r\n", 404, False),
        (b"GET / HTTP/1.1\r\n\r\n", 404, False),
        (b"GET /healthz\r\n\r\n", 400, False),
        (b"GET  /healthz HTTP/1.1\r\n\r\n", 400, False),
        (b"GET /healthz HTTP/2\r\n\r\n", 400, False),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, False),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 404, False),
        (b"GET /healthz HTTP/1.1\r\n" + b"x" * 9000, 400, False),
    ],
)
def test_a_request_gets_one_response_with_nothing_of_it(
    head: bytes, status: int, is_answered: bool
) -> None:
    response = health.respond(head, answer)
    first, _, rest = response.partition(b"\r\n")
    fields, _, body = rest.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nContent-Length: %d\r\n" % len(body) in b"\r\n" + fields
    assert (b"\r\nAllow: GET, HEAD" in fields) is (status == 405)
    assert ("path" in json.loads(body)) is is_answered


def test_head_has_no_body() -> None:
    got = health.respond(b"GET /healthz HTTP/1.1\r\n\r\n", answer)
    head = health.respond(b"HEAD /healthz HTTP/1.1\r\n\r\n", answer)
    assert head == got.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def asked(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status


def test_clients_that_say_nothing_neither_keep_a_place_nor_block_a_probe() -> None:
    threads = threading.active_count()
    with health.serving("127.0.0.1", 0, answer) as port, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(health.PLACES + 10)
        ]
        began = time.monotonic()
        assert asked(port) == 200
        assert time.monotonic() - began < health.CLIENT_SECONDS / 2
        assert threading.active_count() <= threads + health.PLACES + 15
        for client in silent:
            client.settimeout(2 * health.CLIENT_SECONDS)
            assert client.recv(100) == b"", "it is disconnected in time"
        assert asked(port) == 200
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_a_client_that_trickles_has_its_time_and_no_more() -> None:
    with health.serving("127.0.0.1", 0, answer) as port:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as client, contextlib.suppress(OSError):
            while time.monotonic() - began < 3 * health.CLIENT_SECONDS:
                client.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < 2 * health.CLIENT_SECONDS


@pytest.mark.parametrize("bind", ["", "::1", "[::1]", "localhost", "127.0.0.1"])
def test_it_listens_where_it_is_told(bind: str) -> None:
    host = "::1" if ":" in bind else "127.0.0.1"
    try:
        with health.serving(bind, 0, answer) as port:
            socket.create_connection((host, port)).close()
    except ConfigError as error:
        if "family" in str(error) or "assign" in str(error):
            pytest.skip("this machine has no IPv6")
        raise


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        health.serving("127.0.0.1", 0, answer) as port,
        pytest.raises(
            ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: address already"
        ),
        health.serving("127.0.0.1", port, answer),
    ):
        pass
