"""Sockets, TLS, proxies and the race between addresses: docs/design.md section 9 "Body path" and
"Time-outs".
"""

from __future__ import annotations

import ast
import base64
import errno
import math
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trustme

import _regsync
from _regsync.addresses import Origin
from _regsync.errors import ConnectFailed, Disconnected, ProtocolBroken
from _regsync.net import pool as net_pool
from _regsync.net import streams
from _regsync.net.http1 import PIECE, Request
from _regsync.net.pool import Pool, open_stream
from _regsync.net.proxy import Proxy
from _regsync.net.streams import WANT_READ, WANT_WRITE, SocketStream, Stream, Timeouts
from _regsync.oci import digest_of
from _regsync.sync.staging import FilePieces, StagingFailed
from tests.inside.wires import (
    NEVER,
    Blob,
    Pause,
    Wire,
    answer,
    connection,
    read_head,
    read_rest,
    reset,
    serving,
)

pytestmark = pytest.mark.anyio

HOST = "127.0.0.1"
PUT = Request("PUT", "/v2/app/blobs/uploads/1")
# Short where a test has to see one pass; no test asserts how long it took.
SHORT = Timeouts(connect=5, tls=0.05, head=0.05)


@pytest.fixture
def server_context(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(HOST, "registry.test", "localhost").configure_cert(context)
    return context


@pytest.fixture
def client_context(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    return context


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Fail a test that leaves a socket behind."""

    def sockets() -> set[str]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
            if target.startswith("socket:"):
                found.add(target)
        return found

    before = sockets()
    yield
    assert sockets() <= before


async def receive(stream: Stream, size: int = 65536) -> bytes:
    buffer = memoryview(bytearray(size))
    while (count := stream.recv_into(buffer)) < 0:
        await stream.wait(count)
    return bytes(buffer[:count])


async def send(stream: Stream, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        if (sent := stream.send(rest)) < 0:
            await stream.wait(sent)
        else:
            rest = rest[sent:]


async def opened(port: int, scheme: str = "http", host: str = HOST, **options: Any) -> Stream:
    options.setdefault("timeouts", Timeouts())
    options.setdefault("context", None)
    return await open_stream(Origin(scheme, host, port), **options)


# Bodies from files.


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_staged_body_is_read_only_where_it_is_encrypted(
    scheme: str,
    server_context: ssl.SSLContext,
    client_context: ssl.SSLContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system sends the others: what is read are the first and the last 64 KiB."""
    body = os.urandom(3_000_000)
    received = bytearray()

    def script(accepted: socket.socket) -> None:
        _, _, behind = read_head(accepted).partition(b"\r\n\r\n")
        received.extend(behind)
        while len(received) < len(body):
            received.extend(accepted.recv(65536))
        accepted.sendall(answer(status=201))

    read = 0
    preadv = os.preadv

    def counting(file: int, rooms: Any, offset: int, _flags: int) -> int:
        nonlocal read
        count = preadv(file, rooms, offset)  # a tmpfs knows no flags
        read += count if len(rooms[0]) > 1 else 0
        return count

    server = script if scheme == "http" else tls_server(server_context, script)
    with serving(server) as port, staged(tmp_path, body) as pieces:
        monkeypatch.setattr(os, "preadv", counting)
        stream = await opened(port, scheme, context=client_context)
        response = await connection(stream).exchange(PUT, await pieces.next(), pieces, 300)
        assert (response.status, response.is_early, pieces.complete) == (201, False, True)
        stream.close()
    assert received == body
    assert read == (2 * 65536 if scheme == "http" else len(body))


async def test_a_peer_that_reads_late_is_waited_for_while_a_file_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = os.urandom(30_000_000)
    received = bytearray()
    is_full = threading.Event()
    sendfile = os.sendfile

    def watched(*arguments: int) -> int:
        try:
            return sendfile(*arguments)
        except BlockingIOError:
            is_full.set()
            raise

    def script(accepted: socket.socket) -> None:
        assert is_full.wait(30)
        _, _, behind = read_head(accepted).partition(b"\r\n\r\n")
        received.extend(behind)
        while len(received) < len(body):
            received.extend(accepted.recv(65536))
        accepted.sendall(answer(status=201))

    monkeypatch.setattr(os, "sendfile", watched)
    with serving(script) as port, staged(tmp_path, body) as pieces:
        stream = await opened(port)
        response = await connection(stream).exchange(PUT, await pieces.next(), pieces, 300)
        assert (response.status, response.is_early) == (201, False)
        stream.close()
    assert received == body


@contextmanager
def staged(directory: Path, body: bytes) -> Iterator[FilePieces]:
    """Give the body of a blob from a file."""
    path = directory / "staged"
    path.write_bytes(body)
    with FileIO(str(path)) as file:
        yield FilePieces(file, digest_of(body), len(body), is_verified=True)


async def test_file_that_breaks_ends_the_request_and_is_told_as_the_files(tmp_path: Path) -> None:
    def script(accepted: socket.socket) -> None:
        read_rest(accepted)

    with serving(script) as port, staged(tmp_path, bytes(3_000_000)) as pieces:
        stream = await opened(port)
        first = await pieces.next()
        os.truncate(tmp_path / "staged", 100_000)
        with pytest.raises(StagingFailed, match="has become shorter"):
            await connection(stream).exchange(PUT, first, pieces, 300)
        stream.close()


async def test_peer_that_leaves_while_a_file_is_sent_is_a_broken_connection(tmp_path: Path) -> None:
    def script(accepted: socket.socket) -> None:
        read = len(read_head(accepted))
        while read < 200_000:  # the first piece has 64 KiB
            read += len(accepted.recv(65536))
        reset(accepted)

    with serving(script) as port, staged(tmp_path, bytes(9_000_000)) as pieces:
        stream = await opened(port)
        wire = connection(stream)
        with pytest.raises(Disconnected, match="broke"):
            await wire.exchange(PUT, await pieces.next(), pieces, 300)
        assert not wire.can_repeat()  # a part of the file is gone already
        stream.close()


# Plain sockets.


async def test_own_sockets_set_nodelay_and_do_not_block() -> None:
    with serving(read_rest) as port:
        stream = await opened(port)
        assert isinstance(stream, SocketStream)
        assert stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not stream._socket.getblocking()
        assert stream.recv_into(memoryview(bytearray(1))) == WANT_READ
        stream.close()


async def test_end_of_the_peer_is_the_end_of_the_body() -> None:
    with serving(lambda accepted: accepted.sendall(b"bye")) as port:
        stream = await opened(port)
        assert [await receive(stream), await receive(stream), await receive(stream)] == [
            b"bye",
            b"",
            b"",
        ]
        stream.close()


async def test_reset_is_a_broken_connection_in_both_directions() -> None:
    def read_and_reset(accepted: socket.socket) -> None:
        accepted.recv(1)
        reset(accepted)

    with serving(read_and_reset) as port:
        stream = await opened(port)
        await send(stream, b"x")
        with pytest.raises(Disconnected, match="reset"):
            await receive(stream)
        with pytest.raises(Disconnected, match="pipe"):
            await send(stream, b"x")
        stream.close()


async def test_refusal_is_read_after_the_peer_reset_the_upload() -> None:
    """The peer answers, does not read the body, and closes: TCP turns that into a reset."""

    def refuse(accepted: socket.socket) -> None:
        read_head(accepted)
        accepted.sendall(answer(b"quota", status=413))

    with serving(refuse) as port:
        stream = await opened(port)
        blob = Blob(*[bytes(PIECE)] * 100)
        response = await connection(stream).exchange(PUT, await blob.next(), blob, 300)
        assert (response.status, response.is_early) == (413, True)
        stream.close()


async def test_full_send_buffer_wants_to_write_and_goes_on() -> None:
    size = 8_000_000

    def read(accepted: socket.socket) -> None:
        count = 0
        while count < size:
            count += len(accepted.recv(1 << 20))
        accepted.sendall(b"all")

    with serving(read) as port:
        stream = await opened(port)
        await send(stream, bytes(size))
        assert await receive(stream) == b"all"
        stream.close()


async def test_whoever_waits_on_a_stream_that_is_closed_is_told() -> None:
    with serving(read_rest) as port:
        stream = await opened(port)

        async def wait() -> None:
            with pytest.raises(Disconnected):
                await stream.wait(WANT_READ)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            stream.close()
            stream.close()
        with pytest.raises(Disconnected):
            await stream.wait(WANT_WRITE)


async def test_socket_is_closed_only_after_the_loop_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    monkeypatch.setattr(anyio, "notify_closing", lambda closing: told.append(closing.fileno()))
    with serving(read_rest) as port:
        stream = await opened(port)
        assert isinstance(stream, SocketStream)
        number = stream._socket.fileno()
        stream.close()
    assert told == [number]


async def test_two_who_wait_for_one_direction_both_go_on() -> None:
    """A TLS key update can make the reader want to write while the sender does."""
    with serving(tunnelling(b"x")) as port:
        stream = await opened(port)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.wait, WANT_READ)
            group.start_soon(stream.wait, WANT_READ)
            await send(stream, b"\r\n\r\n")
        stream.close()


def test_nothing_is_ever_half_closed_or_unwrapped() -> None:
    """Peers take a half-closed connection for a client that has left; a close_notify is never
    awaited.
    """
    called = {
        node.func.attr
        for room in ("net", "registry", "sync")
        for path in (Path(_regsync.__file__).parent / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert called.isdisjoint({"shutdown", "unwrap", "send_eof", "detach"})


# TLS.


def tls_server(
    context: ssl.SSLContext, script: Callable[[Any], object]
) -> Callable[[socket.socket], object]:
    def run(accepted: socket.socket) -> None:
        try:
            with context.wrap_socket(accepted, server_side=True) as secured:
                script(secured)
        except (ssl.SSLError, ConnectionError):
            pass  # the client's view is what counts

    return run


def tls_answer(secured: socket.socket) -> None:
    read_head(secured)
    secured.sendall(answer(b"hello"))
    read_rest(secured)


async def test_exchange_over_tls(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    with serving(tls_server(server_context, tls_answer)) as port:
        stream = await opened(port, "https", context=client_context)
        made = connection(stream)
        response = await made.exchange(Request("GET", "/"), memoryview(b""), None, 60)
        assert await response.read(10) == b"hello"
        assert await response.finish()
        assert made.is_alive()
        stream.close()


async def test_session_tickets_make_a_connection_readable_and_are_not_an_answer(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    received = bytearray()

    def script(secured: ssl.SSLSocket) -> None:
        while len(received) < 200_000:
            received.extend(secured.recv(65536))
        secured.sendall(answer(status=201))
        read_rest(secured)

    server_context.minimum_version = ssl.TLSVersion.TLSv1_3
    with serving(tls_server(server_context, script)) as port:
        stream = await opened(port, "https", context=client_context)
        assert isinstance(stream, SocketStream)
        assert select.select([stream._socket], [], [], 10)[0], "no tickets came"
        assert connection(stream).is_alive()
        blob = Blob(*[bytes(50_000)] * 4)
        response = await connection(stream).exchange(PUT, await blob.next(), blob, 300)
        assert (response.status, response.is_early) == (201, False)
        stream.close()


async def test_peer_that_leaves_without_close_notify_has_ended(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    with serving(tls_server(server_context, lambda secured: secured.sendall(b"bye"))) as port:
        stream = await opened(port, "https", context=client_context)
        assert [await receive(stream), await receive(stream)] == [b"bye", b""]
        stream.close()


def silent(accepted: socket.socket) -> None:
    read_rest(accepted)


def plain_http(accepted: socket.socket) -> None:
    accepted.recv(10)
    accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def leave(accepted: socket.socket) -> None:
    accepted.recv(65536)


@pytest.mark.parametrize(
    ("script", "words", "retryable"),
    [
        (plain_http, "speak TLS", False),
        (leave, "closed .* TLS handshake", True),
        (reset, "reset|TLS handshake", True),
        (silent, "TLS handshake with 127.0.0.1 took longer than 0.05 s", True),
    ],
)
async def test_failed_handshake_has_words(
    script: Callable[[socket.socket], object],
    words: str,
    retryable: bool,
    client_context: ssl.SSLContext,
) -> None:
    with serving(script) as port:
        timeouts = SHORT if script is silent else Timeouts()
        with pytest.raises(ConnectFailed, match=words) as caught:
            await opened(port, "https", context=client_context, timeouts=timeouts)
    assert caught.value.retryable is retryable


async def test_a_connection_that_is_reset_before_the_handshake_leaves_nothing(
    client_context: ssl.SSLContext,
) -> None:
    """CPython moves the descriptor into the new object before it looks whether anybody is there."""
    with serving(reset) as port:
        own = socket.create_connection((HOST, port))
    assert select.select([own], [], [], 10)[0]
    stream = SocketStream(own)
    with pytest.raises(ConnectFailed, match="reset") as caught:
        await streams.start_tls(stream, client_context, HOST, Timeouts())
    stream.close()
    assert own.fileno() == -1
    assert caught.value.retryable


@contextmanager
def connected_to_silence() -> Iterator[SocketStream]:
    """Give a connection to a peer that never says anything."""
    own, others = socket.socketpair()
    stream = SocketStream(own)
    with others:
        yield stream
        stream.close()


async def test_name_that_tls_cannot_take_is_one_error(client_context: ssl.SSLContext) -> None:
    with connected_to_silence() as stream, pytest.raises(ConnectFailed, match="cannot begin"):
        await streams.start_tls(stream, client_context, ".bad", Timeouts())


@pytest.mark.virtual_time
async def test_handshake_takes_ten_seconds_at_most(client_context: ssl.SSLContext) -> None:
    began = anyio.current_time()
    with connected_to_silence() as stream, pytest.raises(ConnectFailed, match="longer than 10 s"):
        await streams.start_tls(stream, client_context, "registry.test", Timeouts())
    assert anyio.current_time() - began == pytest.approx(10)


async def test_handshake_that_the_kernel_gives_up_is_not_told_as_our_time_limit(
    client_context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*_: object) -> int:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(SocketStream, "handshake", give_up)
    failed = pytest.raises(ConnectFailed, match=r"TLS with .* failed: .* timed out")
    with connected_to_silence() as stream, failed as caught:
        await streams.start_tls(stream, client_context, "registry.test", Timeouts())
    assert caught.value.retryable


async def test_cancelled_handshake_leaves_no_socket(client_context: ssl.SSLContext) -> None:
    greeted = threading.Event()

    def listen(accepted: socket.socket) -> None:
        accepted.recv(65536)
        greeted.set()
        read_rest(accepted)

    with serving(listen) as port:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(opened, port, "https", context=client_context))
            while not greeted.is_set():
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()


# Proxies.


def proxy_on(port: int, **login: str) -> Proxy:
    return Proxy(HOST, port, "HTTPS_PROXY", **login)


async def through(proxy: Proxy, context: ssl.SSLContext | None = None, **options: Any) -> Stream:
    """Open a stream to registry.test through a proxy, over TLS where there is a context."""
    scheme, port = ("https", 443) if context else ("http", 80)
    return await opened(port, scheme, "registry.test", context=context, proxy=proxy, **options)


def tunnelling(
    reply: bytes,
    then: Callable[[socket.socket], object] = read_rest,
    seen: list[bytes] | None = None,
) -> Callable[[socket.socket], object]:
    def run(accepted: socket.socket) -> None:
        head = read_head(accepted)
        if seen is not None:
            seen.append(head)
        accepted.sendall(reply)
        then(accepted)

    return run


OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"


def refusing(*challenges: str) -> bytes:
    lines = [f"Proxy-Authenticate: {challenge}\r\n" for challenge in challenges]
    return f"HTTP/1.1 407 No\r\n{''.join(lines)}Content-Length: 0\r\n\r\n".encode()


@pytest.mark.rule("R7")
async def test_exchange_through_a_tunnel_names_the_origin_and_gives_the_login_to_the_proxy_only() -> (
    None
):
    seen: list[bytes] = []

    def registry(accepted: socket.socket) -> None:
        seen.append(read_head(accepted))
        accepted.sendall(answer(b"hello"))
        read_rest(accepted)

    with serving(tunnelling(OPEN, registry, seen)) as port:
        proxy = proxy_on(port, username="me", password="pa:ss")
        stream = await opened(5000, host="::1", proxy=proxy)
        response = await connection(stream).exchange(Request("GET", "/"), memoryview(b""), None, 60)
        assert await response.read(10) == b"hello"
        stream.close()
    login = base64.b64encode(b"me:pa:ss")
    assert seen[0] == (
        b"CONNECT [::1]:5000 HTTP/1.1\r\nHost: [::1]:5000\r\nProxy-Authorization: Basic "
        + login
        + b"\r\n\r\n"
    )
    assert login not in seen[1]


async def test_tls_through_a_plain_proxy(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    with serving(tunnelling(OPEN, tls_server(server_context, tls_answer))) as port:
        stream = await through(proxy_on(port), client_context)
        assert isinstance(stream, SocketStream)
        response = await connection(stream).exchange(Request("GET", "/"), memoryview(b""), None, 60)
        assert await response.read(10) == b"hello"
        stream.close()


@pytest.mark.parametrize(
    ("reply", "words", "retryable"),
    [
        (b"HTTP/1.1 407 Login\r\nContent-Length: 0\r\n\r\n", r"\(407\)$", False),
        (refusing("Basic realm=x"), r"\(407\), it accepts Basic$", False),
        (refusing("negotiate, Basic realm=x"), r"\(407\), it accepts negotiate or Basic$", False),
        (refusing("Negotiate", "NTLM abc"), r"\(407\), it accepts Negotiate or NTLM$", False),
        (b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n", r"\(403\)", False),
        (b"HTTP/1.1 302 Login\r\nLocation: http://x/\r\n\r\n", r"\(302\)", False),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", r"\(503\)", True),
        (b"SOCKS5 here\r\n\r\n", "a tunnel", True),
        (b"", "a tunnel", True),
        (b"HTTP/1.1 200", "a tunnel", True),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, "a tunnel", True),
        (OPEN + b"early", "before the tunnel", False),
    ],
)
async def test_proxy_that_opens_no_tunnel_has_words(
    reply: bytes, words: str, retryable: bool
) -> None:
    with (
        serving(tunnelling(reply, lambda accepted: None)) as port,
        pytest.raises((ConnectFailed, ProtocolBroken), match=words) as caught,
    ):
        await through(proxy_on(port, username="me", password="secret"))
    assert caught.value.retryable is retryable
    assert "secret" not in str(caught.value)
    assert "me:" not in str(caught.value)


async def test_silent_proxy_is_given_up() -> None:
    with (
        serving(silent) as port,
        pytest.raises(ConnectFailed, match=r"tunnel: no answer .* within 0\.05 s"),
    ):
        await through(proxy_on(port), timeouts=SHORT)


async def over(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Open a tunnel through a proxy whose connection is this wire."""

    async def connect(*_: object) -> Wire:
        return wire

    monkeypatch.setattr(net_pool, "connect", connect)
    return await through(proxy_on(1))


@pytest.mark.virtual_time
async def test_proxy_that_floods_interim_answers_does_not_stop_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 200, b"HTTP/1.1 403 No\r\n\r\n", keep=False)
    ran = 0

    async def others() -> None:
        nonlocal ran
        while True:
            await anyio.lowlevel.checkpoint()
            ran += 1

    async with anyio.create_task_group() as group:
        group.start_soon(others)
        with pytest.raises(ConnectFailed):
            await over(wire, monkeypatch)
        group.cancel_scope.cancel()
    assert ran > 150


@pytest.mark.virtual_time
@pytest.mark.parametrize("interim", [True, False])
async def test_proxy_has_sixty_seconds_however_it_drips(
    monkeypatch: pytest.MonkeyPatch, interim: bool
) -> None:
    began = anyio.current_time()
    drip = b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"H"
    wire = Wire(*[item for _ in range(100) for item in (Pause(7), drip)] if interim else [NEVER])
    with pytest.raises(ConnectFailed, match="60 s"):
        await over(wire, monkeypatch)
    assert anyio.current_time() - began == pytest.approx(60)


# Names and addresses.

SIX, FOUR = socket.AF_INET6, socket.AF_INET


def info(family: int, name: str) -> tuple[Any, ...]:
    return (family, socket.SOCK_STREAM, 6, "", (name, 80))


def test_families_take_turns_and_ipv6_begins() -> None:
    found = [
        info(FOUR, "a"),
        info(FOUR, "b"),
        info(FOUR, "c"),
        info(SIX, "x"),
        info(SIX, "x"),
        info(1, "no"),
    ]
    assert streams._interleave(found) == [
        (SIX, ("x", 80)),
        (FOUR, ("a", 80)),
        (FOUR, ("b", 80)),
        (FOUR, ("c", 80)),
    ]


@pytest.mark.parametrize(
    "host", ["a..b", "x" * 70 + ".test", "nul\0.test", "no.such.name.invalid", "\u00e9" * 300]
)
async def test_name_that_cannot_be_resolved_is_one_error_with_a_hint(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host.endswith(".invalid"):  # the test needs no name server

        def missing(*_: object, **__: object) -> list[Any]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", missing)
    with pytest.raises(ConnectFailed, match="resolved") as caught:
        await opened(80, host=host)
    assert caught.value.hint
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "host"), [(FOUR, "127.0.0.1"), (SIX, "::1"), (SIX, "2001:db8:0::A")]
)
async def test_an_address_is_understood_at_once(family: int, host: str) -> None:
    """No name server can be slow about it: no thread, and no tables of international names: 2 ms of
    a start.
    """
    with mock.patch.object(
        anyio.to_thread, "run_sync", side_effect=AssertionError("a thread for an address")
    ):
        assert await streams._resolve(host, 80) == [(family, (host, 80))]


@pytest.mark.parametrize(
    "host", ["1.2.3.4.5", "999.1.1.1", "127.1", "::g", "fe80::1%1", "a:\0", "1.2.3.4\0"]
)
async def test_what_only_looks_like_an_address_is_asked_as_a_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()

    def look_up(name: object, *_: object, **__: object) -> list[Any]:
        asked.append(name)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(socket.gaierror):
        await streams._resolve(host, 80)
    assert asked == [host]


async def test_name_without_a_usable_address_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(*_: object, **__: object) -> list[Any]:
        return [info(1, "x")]

    monkeypatch.setattr(socket, "getaddrinfo", strange)
    with pytest.raises(ConnectFailed, match=r"a\.test:81: .*no address"):
        await opened(81, host="a.test")


async def test_refused_connection_names_host_port_and_cause() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectFailed, match=f"127.0.0.1:{port}: connection refused") as caught:
        await opened(port)
    assert caught.value.retryable
    assert (caught.value.address, caught.value.brief) == ((HOST, port), "connection refused")


async def test_ipv4_is_reached_where_ipv6_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(read_rest) as port:

        def both(*_: object, **__: object) -> list[Any]:
            return [
                (FOUR, socket.SOCK_STREAM, 6, "", (HOST, port)),
                (SIX, 1, 6, "", ("::1", port, 0, 0)),
            ]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        (await opened(port, host="localhost")).close()


async def test_cancelled_connect_leaves_no_socket() -> None:
    """A full backlog leaves further connections in the air."""
    with socket.create_server((HOST, 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = []
        for _ in range(3):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex((HOST, port))
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(streams._connect_one, FOUR, (HOST, port))
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
        for each in waiting:
            each.close()


# Names where getaddrinfo() is musl's, by the virtual clock.


class Names:
    """Answers to the look-ups of one family after the other: after so many seconds, rows or an error."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, **answers: list[tuple[float, int | str]]
    ) -> None:
        self.answers = {int(FOUR): answers["four"], int(SIX): answers["six"]}
        self.asked: list[int] = []
        monkeypatch.setattr(streams, "IS_STATIC", True)
        monkeypatch.setattr(streams, "_look_up", self.look_up)

    async def look_up(self, host: str, port: int, family: int) -> list[Any]:
        self.asked.append(family)
        after, answer = self.answers[family].pop(0)
        await anyio.sleep(after)
        if isinstance(answer, int):
            raise socket.gaierror(answer, "no answer")
        return [info(family, answer)]

    async def found(self) -> list[str]:
        return [address.sockaddr[0] for address in await streams._resolve("a.test", 80)]


SILENT = (math.inf, "")
UNKNOWN = (0.0, socket.EAI_NONAME)
TROUBLE = (0.1, socket.EAI_AGAIN)
NO_ANSWER = (5.0, socket.EAI_AGAIN)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("four", "six", "found", "asked", "seconds"),
    [
        ([(1.0, "4")], [(0.5, "6")], ["6", "4"], 2, 1.0),
        ([(1.0, "4")], [SILENT], ["4"], 2, 1.25),
        ([(1.0, "4")], [TROUBLE, SILENT], ["4"], 3, 1.25),
        ([TROUBLE, (1.0, "4")], [UNKNOWN], ["4"], 3, 1.1),
        ([UNKNOWN], [(4.0, "6")], ["6"], 2, 4.0),
        ([NO_ANSWER], [(6.0, "6")], ["6"], 2, 6.0),
        ([TROUBLE, TROUBLE], [(4.0, "6")], ["6"], 3, 4.0),
    ],
)
async def test_a_family_without_an_answer_hides_no_address_of_the_other(
    monkeypatch: pytest.MonkeyPatch,
    four: list[tuple[float, int | str]],
    six: list[tuple[float, int | str]],
    found: list[str],
    asked: int,
    seconds: float,
) -> None:
    began = anyio.current_time()
    names = Names(monkeypatch, four=[*four], six=[*six])
    assert await names.found() == found
    assert len(names.asked) == asked
    assert anyio.current_time() - began == pytest.approx(seconds)


@pytest.mark.virtual_time
@pytest.mark.parametrize(("answer", "asked"), [(UNKNOWN, 2), (TROUBLE, 4), (NO_ANSWER, 2)])
async def test_a_name_that_has_no_address_is_said_once(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[float, int], asked: int
) -> None:
    names = Names(monkeypatch, four=[answer, answer], six=[answer, answer])
    with pytest.raises(socket.gaierror):
        await names.found()
    assert len(names.asked) == asked


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("four", "six", "is_unknown"),
    [(UNKNOWN, UNKNOWN, True), (UNKNOWN, NO_ANSWER, False), (NO_ANSWER, UNKNOWN, False)],
)
async def test_a_name_is_unknown_where_both_answers_say_so(
    monkeypatch: pytest.MonkeyPatch,
    four: tuple[float, int],
    six: tuple[float, int],
    is_unknown: bool,
) -> None:
    names = Names(monkeypatch, four=[four], six=[six])
    with pytest.raises(socket.gaierror) as caught:
        await names.found()
    assert (caught.value.errno == socket.EAI_NONAME) is is_unknown


# The race, by the virtual clock.


class Racing:
    """Addresses that connect, fail or stay silent after a while; counts what was opened and closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fates: tuple[float, int | None]) -> None:
        self.fates = fates
        self.begun: dict[str, float] = {}
        self.together = anyio.Event()  # what those with a negative time wait for
        self.made: list[Any] = []
        self.cancelled: list[str] = []
        self._origin = anyio.current_time()
        self.addresses: list[tuple[int, Any]] = [(FOUR, name) for name in fates]
        monkeypatch.setattr(streams, "_connect_one", self.connect)

    async def connect(self, family: int, address: str) -> Any:
        self.begun[address] = anyio.current_time() - self._origin
        after, code = self.fates[address]
        try:
            await (anyio.sleep(after) if after >= 0 else self.together.wait())
        except BaseException:
            self.cancelled.append(address)
            raise
        if code is not None:
            raise OSError(code, os.strerror(code))
        made = Made(address)
        self.made.append(made)
        return made


class Made:
    def __init__(self, name: str) -> None:
        self.name, self.open = name, True

    def fileno(self) -> int:
        return -1 if not self.open else 10**6

    def close(self) -> None:
        self.open = False


@pytest.fixture
def quiet_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anyio, "notify_closing", lambda closing: None)


def race(test: Any) -> Any:
    for mark in (pytest.mark.virtual_time, pytest.mark.usefixtures("quiet_closing")):
        test = mark(test)
    return test


@race
async def test_attempts_begin_a_quarter_of_a_second_apart_and_the_first_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    racing = Racing(monkeypatch, a=(9, None), b=(2, None), c=(2, None), d=(9, None))
    won: Any = await streams._race(racing.addresses)
    assert racing.begun == {"a": 0, "b": 0.25, "c": 0.5, "d": 0.75}
    assert (won.name, won.open) == ("b", True)
    assert sorted(racing.cancelled) == ["a", "c", "d"]


@race
async def test_fast_address_is_the_only_one_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    racing = Racing(monkeypatch, a=(0.2, None), b=(0, None))
    won: Any = await streams._race(racing.addresses)
    assert (won.name, list(racing.begun)) == ("a", ["a"])


@race
async def test_failed_attempt_starts_the_next_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    racing = Racing(
        monkeypatch, a=(0.1, errno.ECONNREFUSED), b=(0.1, errno.EHOSTUNREACH), c=(0.1, None)
    )
    won: Any = await streams._race(racing.addresses)
    assert won.name == "c"
    assert racing.begun == pytest.approx({"a": 0, "b": 0.1, "c": 0.2})


@race
async def test_all_fail_as_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    racing = Racing(monkeypatch, a=(0.1, errno.EHOSTUNREACH), b=(0.1, errno.ECONNREFUSED))
    with pytest.raises(OSError, match="refused"):
        await streams._race(racing.addresses)
    assert racing.made == []


@race
async def test_a_connection_that_the_kernel_gives_up_is_not_told_as_our_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    racing = Racing(monkeypatch, a=(2, errno.ETIMEDOUT))

    async def resolve(host: str, port: int) -> list[Any]:
        return racing.addresses

    monkeypatch.setattr(streams, "_resolve", resolve)
    with pytest.raises(ConnectFailed, match=r"a\.test:81: connection timed out") as caught:
        await streams.connect("a.test", 81, Timeouts())
    assert caught.value.brief == "connection timed out"


@race
async def test_losers_that_connect_in_the_same_moment_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    racing = Racing(monkeypatch, a=(-1, None), b=(-1, None), c=(-1, None))
    async with anyio.create_task_group() as group:

        async def connect_all() -> None:
            await anyio.sleep(1)
            racing.together.set()

        group.start_soon(connect_all)
        won: Any = await streams._race(racing.addresses)
    assert len(racing.made) == 3
    assert [each.name for each in racing.made if each.open] == [won.name]


@race
@pytest.mark.parametrize("after", [0.1, 0.3, 1.0])
async def test_cancelled_race_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    racing = Racing(monkeypatch, a=(1.0, None), b=(0.75, None))
    with anyio.move_on_after(after):
        won: Any = await streams._race(racing.addresses)
        won.close()
    assert [each.name for each in racing.made if each.open] == []


@race
async def test_connecting_takes_ten_seconds_over_all_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = anyio.current_time()
    racing = Racing(monkeypatch, **{f"a{number}": (1000, None) for number in range(60)})

    async def resolve(host: str, port: int) -> list[Any]:
        await anyio.sleep(1)
        return racing.addresses

    monkeypatch.setattr(streams, "_resolve", resolve)
    with pytest.raises(ConnectFailed, match=r"a\.test:81 within 10 s") as caught:
        await streams.connect("a.test", 81, Timeouts())
    assert caught.value.address == ("a.test", 81)
    assert caught.value.brief == "no connection within 10 s"
    assert anyio.current_time() - began == pytest.approx(10)
    assert len(racing.begun) == 36
    assert len(racing.cancelled) == 36


@race
async def test_pool_over_a_dial_that_fails_can_be_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(answers=((answer(b"x"),),))
    fates: list[ConnectFailed | Wire] = [ConnectFailed("no"), wire]

    async def dial(origin: Origin) -> Stream:
        await anyio.lowlevel.checkpoint()
        fate = fates.pop(0)
        if isinstance(fate, Wire):
            return fate
        raise fate

    pool = Pool(dial, Timeouts())
    for expected in (None, b"x"):
        async with pool.lease(Origin("http", "a.test", 80)) as lease:
            if expected is None:
                with pytest.raises(ConnectFailed):
                    await lease.exchange(Request("GET", "/"))
            else:
                assert await (await lease.exchange(Request("GET", "/"))).read(9) == expected
