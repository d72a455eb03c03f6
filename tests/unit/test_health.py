"""The health probes: when a watch stands still, what a request gets, and that slow clients cannot
block one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
from dataclasses import replace

import pytest

from _regsync.app import health
from _regsync.app.watch import Health
from _regsync.errors import ConfigError


def test_states_follow_cycles() -> None:
    def told(health: Health, now: float, moved: float = -1e9) -> tuple[int, int, str]:
        (alive, first), (ready, second) = (
            health.answer(path, now, moved) for path in ("/healthz", "/readyz")
        )
        assert first == second
        assert first.keys() == {"status", "version", "cycle", "reload_error"}
        return alive, ready, str(first["status"])

    begun = Health(1000.0)
    assert told(begun, 1899) == (200, 503, "starting")
    assert told(begun, 1900) == (503, 503, "starting")
    assert told(begun, 2798, moved=1899)[0] == 200, "long is not stuck"
    assert told(begun, 2799, moved=1899)[0] == 503
    waits = replace(begun, status="ready", due=5000.0)
    assert told(waits, 3000) == (200, 200, "ready"), "to wait is no illness"
    assert told(waits, 5899) == (200, 200, "ready")
    assert told(waits, 5900) == (503, 200, "ready"), (
        "but a cycle that does not begin when it is due is one"
    )
    assert told(replace(waits, status="stopping"), 5000) == (200, 503, "stopping")


def answer(path: str) -> tuple[int, dict[str, object]]:
    return (200 if path == "/healthz" else 503), {"path": path}


@pytest.mark.parametrize(
    ("head", "status", "is_answered"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200, True),
        (b"GET /readyz?x=1 HTTP/1.0\r\n\r\n", 503, True),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 200, True),
        (b"GET /healthz/ HTTP/1.1\r\n\r\n", 404, False),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 404, False),
        (b"GET\r\n\r\n", 404, False),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 404, False),
    ],
)
def test_a_request_gets_one_response_with_nothing_of_it(
    head: bytes, status: int, is_answered: bool
) -> None:
    first, _, rest = health.respond(head, answer).partition(b"\r\n")
    fields, _, body = rest.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nContent-Length: %d\r\n" % len(body) in b"\r\n" + fields
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


def test_clients_that_say_nothing_neither_keep_a_place_nor_block_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "CLIENT_SECONDS", 60.0)
    threads = threading.active_count()
    with health.serving("127.0.0.1", 0, answer) as port, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(health.PLACES + 10)
        ]
        assert asked(port) == 200
        assert threading.active_count() <= threads + health.PLACES + 15
        for client in silent[:10]:
            assert client.recv(100) == b"", "the oldest gives its place to a newer one"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_probes_that_were_answered_push_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CLIENT_SECONDS", 60.0)
    with (
        health.serving("127.0.0.1", 0, answer) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as slow,
    ):
        assert {asked(port) for _ in range(2 * health.PLACES)} == {200}
        slow.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert slow.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_trickles_has_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CLIENT_SECONDS", 0.2)
    with (
        health.serving("127.0.0.1", 0, answer) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        for _ in range(health.LARGEST_HEAD // 2):
            client.sendall(b"x")
            if select.select([client], [], [], 0.01)[0]:
                break
        else:
            pytest.fail("it is never disconnected")


def test_a_probe_is_answered_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with health.serving("127.0.0.1", 0, answer) as port:
        monkeypatch.setattr(threading.Thread, "start", fail)
        assert [asked(port), asked(port)] == [200, 200]


@pytest.mark.parametrize("bind", ["", "[::1]", "localhost"])
def test_it_listens_where_it_is_told(bind: str) -> None:
    host = "::1" if ":" in bind else "127.0.0.1"
    try:
        with health.serving(bind, 0, answer) as port:
            socket.create_connection((host, port)).close()
    except ConfigError as error:
        if "family" in str(error) or "assign" in str(error):
            pytest.skip("this machine has no IPv6")
        raise
