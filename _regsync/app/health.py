"""The health listener of `watch`: an HTTP/1.1 server of two resources, one request a connection.

Owns: its thread, its sockets, the heads of requests, the framing of answers.
May not know: what the states mean.
Invariants: nothing of a request comes back in an answer; a client holds 8 KiB, ten seconds and one
of a fixed number of places at most; when all are taken the oldest client ends, so that none delays
a probe.
Follows: RFC 9112, docs/design.md section 10.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import anyio
import h11
from anyio.abc import TaskGroup, TaskStatus
from anyio.from_thread import start_blocking_portal

from _regsync.errors import ConfigError, Disconnected, ProtocolBroken
from _regsync.net.http1 import next_portion
from _regsync.net.streams import WANT_READ, SocketStream
from _regsync.text import printable, reason_of

# Takes the path `/healthz` or `/readyz`, returns HTTP status and document.
AnswerProbe = Callable[[str], tuple[int, dict[str, object]]]

READ_SIZE = 4096  # bytes; a head may have twice that size, less one byte
CLIENT_PLACES = 256
CLIENT_SECONDS = 5.0  # for a request and its answer, and once more for the client's close
BACKLOG = 1024
NO_FILES_PAUSE = 0.1  # seconds, when the process can open no further socket

# Seconds that a busy thread may keep others from running. Each answer takes some ten turns, and
# with Python's own 5 ms a probe would wait for the run's thread for 50 ms.
SWITCH_INTERVAL = 1e-4


@contextmanager
def serving(bind: str, port: int, answer_probe: AnswerProbe) -> Iterator[list[Any]]:
    """Serve while the block lasts; give the addresses that are listened at.

    The listener has a thread and an event loop of its own, because the caller's loop may be busy.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        with start_blocking_portal() as portal:
            task, addresses = portal.start_task(serve, bind, port, answer_probe)
            try:
                yield addresses
            finally:
                # A server that has ended by itself cannot be cancelled. Its error is raised.
                has_ended = not task.cancel()
                if has_ended:
                    task.result()
    finally:
        sys.setswitchinterval(interval)


async def serve(
    bind: str,
    port: int,
    answer_probe: AnswerProbe,
    *,
    task_status: TaskStatus[list[Any]] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve at all addresses of `bind` (empty: the machine's own) until cancelled.

    `task_status` gets the addresses; ConfigError where one of them cannot be listened at.
    """
    listeners = open_listeners(bind, port)
    async with anyio.create_task_group() as tasks:
        server = Server(answer_probe, tasks)
        for listener in listeners:
            tasks.start_soon(server.accept, listener)
        task_status.started([listener.getsockname() for listener in listeners])


def open_listeners(bind: str, port: int) -> list[socket.socket]:
    """Open a socket for each address of `bind`; ConfigError with none of them left open."""
    listeners: list[socket.socket] = []
    try:
        if not 0 <= port < 65536:
            raise ValueError("the highest port is 65535")
        addresses = socket.getaddrinfo(
            bind.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in addresses:
            is_only_ipv6 = family == socket.AF_INET6 and len(addresses) == 1
            listeners.append(
                socket.create_server(
                    address,
                    family=family,
                    backlog=BACKLOG,
                    dualstack_ipv6=is_only_ipv6 and socket.has_dualstack_ipv6(),
                )
            )
    except (OSError, ValueError) as error:
        for listener in listeners:
            listener.close()
        reason = reason_of(error, 100)
        reason = reason.partition(" (while")[0].lower()  # `create_server` adds the address
        raise ConfigError(
            f"health probes: cannot listen on {printable(bind, 100) or '*'} port {port}: {reason}",
            hint="choose another address or port with --health-bind and --health-port",
        ) from error
    return listeners


class Server:
    """The clients being served, oldest first."""

    def __init__(self, answer_probe: AnswerProbe, tasks: TaskGroup) -> None:
        self._answer_probe = answer_probe
        self._tasks = tasks
        self._clients = dict[Client, anyio.CancelScope]()  # the scope ends the client's task

    async def accept(self, listener: socket.socket) -> None:
        """Begin a task for each client that comes, until cancelled."""
        with listener:
            listener.setblocking(False)
            while True:
                await anyio.wait_readable(listener)
                try:
                    for _ in range(CLIENT_PLACES):
                        connection, _ = listener.accept()
                        self._tasks.start_soon(
                            self._converse, Client(connection, self._answer_probe)
                        )
                except BlockingIOError:
                    pass  # nobody else is waiting
                except OSError:
                    await anyio.sleep(NO_FILES_PAUSE)

    async def _converse(self, client: Client) -> None:
        """Answer one client and wait for its close. A broken connection ends only this task."""
        with (
            client.connection,
            suppress(Disconnected, OSError),
            anyio.move_on_after(CLIENT_SECONDS) as scope,
        ):
            self._clients[client] = scope
            if len(self._clients) > CLIENT_PLACES:
                oldest = next(iter(self._clients))
                self._clients.pop(oldest).cancel()
            while want := client.step():
                await client.stream.wait(want)
            # A close with bytes unread is a reset, which may take the answer along (RFC 9112
            # section 9.6).
            scope.deadline = anyio.current_time() + CLIENT_SECONDS
            client.connection.shutdown(socket.SHUT_WR)
            while client.stream.recv_into(client.scratch):
                await client.stream.wait(WANT_READ)
        self._clients.pop(client, None)


class Client:
    """One connection: a request that is being read, then an answer that is being sent."""

    def __init__(self, connection: socket.socket, answer_probe: AnswerProbe) -> None:
        self.connection = connection
        self.stream = SocketStream(connection)
        self.scratch = memoryview(bytearray(READ_SIZE))
        self._answer_probe = answer_probe
        self._framing = h11.Connection(h11.SERVER, max_incomplete_event_size=READ_SIZE - 1)
        self._unsent: memoryview | None = None  # the rest of the answer; None before the answer

    def step(self) -> int:
        """Read the request and send the answer, as far as the socket lets us.

        Return 0 when the exchange is over, else what the socket has to become ready for.
        """
        if self._unsent is None:
            want, answer = self._read_request()
            if want < 0:
                return want
            self._unsent = memoryview(answer)
        while self._unsent:
            sent = self.stream.send(self._unsent)
            if sent < 0:  # no count, but what to wait for
                return sent
            self._unsent = self._unsent[sent:]
        return 0

    def _read_request(self) -> tuple[int, bytes]:
        """Return 0 and the answer to the request; while it is not whole, what the socket has to become
        ready for, without an answer.
        """
        try:
            while (event := self._framing.next_event()) is h11.NEED_DATA:
                count = self.stream.recv_into(self.scratch)
                if count < 0:  # no count, but what to wait for
                    return count, b""
                arrived = bytes(self.scratch[:count])
                # Of a head with long runs of blanks, which h11 reads in quadratic time, this is less.
                if next_portion(self._framing, arrived) != arrived:
                    return 0, self._encode(b"", 400, {})
                self._framing.receive_data(arrived)
        except h11.RemoteProtocolError as error:
            return 0, self._encode(b"", error.error_status_hint, {})
        except ProtocolBroken:
            return 0, self._encode(b"", 400, {})

        if not isinstance(event, h11.Request):
            return 0, b""  # the client has closed without a request
        status, document = self._look_up(event)
        return 0, self._encode(event.method, status, document)

    def _look_up(self, request: h11.Request) -> tuple[int, dict[str, object]]:
        """Return status and document for a request; the document of an error is empty."""
        fields = dict(request.headers)
        # A target may have scheme and host in front, and a query behind.
        path = re.sub(rb"(?i)^https?://[^/?]*", b"", request.target).partition(b"?")[0]
        # A proxy on the way could read another host, or another end of the message (RFC 9112
        # sections 3.2 and 6.3).
        has_two_ends = b"transfer-encoding" in fields and b"content-length" in fields
        is_host_valid = re.fullmatch(rb"[\w.~:%\[\]-]*", fields.get(b"host", b"")) is not None
        if has_two_ends or not is_host_valid:
            return 400, {}
        if request.http_version[:2] != b"1.":
            return 505, {}
        if path not in (b"/healthz", b"/readyz"):
            return 404, {}
        if request.method not in (b"GET", b"HEAD"):
            return 405, {}
        return self._answer_probe(path.decode())

    def _encode(self, method: bytes, status: int, document: dict[str, object]) -> bytes:
        """Return the bytes of an answer; without a document its body names the status."""
        phrase = HTTPStatus(status).phrase
        body = json.dumps(document or {"status": phrase.lower()}).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
            ("Date", formatdate(usegmt=True)),
        ]
        if status == 405:
            headers.append(("Allow", "GET, HEAD"))
        response = h11.Response(status_code=status, headers=headers, reason=phrase)
        head = self._framing.send(response) or b""
        return head if method == b"HEAD" else head + body
