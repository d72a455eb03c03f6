"""Serve the health probes of `watch`: two resources over HTTP/1.1, one request per connection.

Owns: the listener's thread and sockets, the parsing of requests, the framing of responses.
May not know: what the states mean.
Invariants: a response contains nothing of the request. A client takes at most 8 KiB, ten seconds and
one of CLIENT_PLACES places. If all places are taken, the oldest client is disconnected, so that slow
clients cannot block a probe.
Follows: RFC 9112, docs/design.md section 10.
"""

from __future__ import annotations

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

from _regsync.edge import WANT_READ
from _regsync.errors import ConfigError, ProtocolBroken
from _regsync.net.dial import SocketStream
from _regsync.net.wire import check_blanks
from _regsync.text import json_text, printable, reason_of

# Takes the path `/healthz` or `/readyz`. Returns the HTTP status and the JSON document.
AnswerProbe = Callable[[str], tuple[int, dict[str, object]]]

READ_SIZE = 4096  # bytes per read. The head of a request may have up to twice as many, less one.
CLIENT_PLACES = 256  # clients that are served at a time
CLIENT_SECONDS = 5.0  # for request and response, and the same again for the client to disconnect
BACKLOG = 1024  # connections that the system queues for `accept`
NO_FILES_PAUSE = 0.1  # seconds to wait if the process cannot open another socket

# How long another thread may hold Python's lock, in seconds. To serve a probe this thread needs the
# lock some ten times. With the default of 5 ms, a busy run would delay a probe by 50 ms.
SWITCH_INTERVAL = 1e-4


@contextmanager
def serving(bind: str, port: int, answer_probe: AnswerProbe) -> Iterator[list[Any]]:
    """Serve probes while the block is active. Yields the socket addresses of the listeners.

    The server has its own thread and event loop, because the caller's event loop may be busy.
    Raises ConfigError if the server cannot listen.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        with start_blocking_portal() as portal:
            task, addresses = portal.start_task(serve, bind, port, answer_probe)
            try:
                yield addresses
            finally:
                has_failed = not task.cancel()  # only a task that has ended cannot be cancelled
                if has_failed:
                    task.result()  # raises the server's error
    finally:
        sys.setswitchinterval(interval)


async def serve(
    bind: str,
    port: int,
    answer_probe: AnswerProbe,
    *,
    task_status: TaskStatus[list[Any]] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve probes until cancelled, at every address that `bind` resolves to.

    An empty `bind` means all addresses of this machine. The addresses of the open listeners are
    passed to `task_status`. Raises ConfigError if a listener cannot be opened.
    """
    listeners = open_listeners(bind, port)
    async with anyio.create_task_group() as tasks:
        server = Server(answer_probe, tasks)
        for listener in listeners:
            tasks.start_soon(server.accept, listener)
        task_status.started([listener.getsockname() for listener in listeners])


def open_listeners(bind: str, port: int) -> list[socket.socket]:
    """Open a listening socket for each address that `bind` resolves to.

    Raises ConfigError if a socket cannot be opened. All other sockets are then closed.
    """
    listeners: list[socket.socket] = []
    try:
        if not 0 <= port < 65536:
            raise ValueError("the highest port is 65535")
        host = bind.strip("[]") or None  # None, with AI_PASSIVE, means all addresses
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in addresses:
            # A listener at `::` alone accepts IPv4 clients too, if the system supports that.
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
        # The message below has the address already, which `create_server` adds in brackets.
        reason = reason.partition(" (while")[0].lower()
        raise ConfigError(
            f"health probes: cannot listen on {printable(bind, 100) or '*'} port {port}: {reason}",
            hint="choose another address or port with --health-bind and --health-port",
        ) from error
    return listeners


class Server:
    """Accepts connections and serves each client in a task."""

    def __init__(self, answer_probe: AnswerProbe, tasks: TaskGroup) -> None:
        self._answer_probe = answer_probe
        self._tasks = tasks
        # The scopes that cancel the tasks of the clients, oldest first.
        self._scopes = list[anyio.CancelScope]()

    async def accept(self, listener: socket.socket) -> None:
        """Start a task for each new connection, until cancelled."""
        with listener:
            listener.setblocking(False)
            while True:
                await anyio.wait_readable(listener)
                try:
                    # After this many connections, give the tasks of their clients a turn.
                    for _ in range(CLIENT_PLACES):
                        connection, _ = listener.accept()
                        self._tasks.start_soon(self._serve_client, connection)
                except BlockingIOError:
                    pass  # the queue of connections is empty
                except OSError:  # the process has too many open files
                    await anyio.sleep(NO_FILES_PAUSE)

    async def _serve_client(self, connection: socket.socket) -> None:
        """Answer one request, then wait until the client disconnects.

        Returns without an error if the connection breaks, if the time is over, or if the client is
        the oldest of too many.
        """
        with connection, suppress(OSError), anyio.move_on_after(CLIENT_SECONDS) as scope:
            self._scopes.append(scope)
            if len(self._scopes) > CLIENT_PLACES:
                self._scopes.pop(0).cancel()
            client = Client(connection, self._answer_probe)
            await client.answer()
            scope.deadline = anyio.current_time() + CLIENT_SECONDS
            await client.wait_for_end()
        if scope in self._scopes:
            self._scopes.remove(scope)


class Client:
    """One connection: first its request is read, then the response is sent."""

    def __init__(self, connection: socket.socket, answer_probe: AnswerProbe) -> None:
        self._connection = connection
        self._stream = SocketStream(connection)
        self._scratch = memoryview(bytearray(READ_SIZE))  # the buffer of each read
        self._answer_probe = answer_probe
        self._framing = h11.Connection(h11.SERVER, max_incomplete_event_size=READ_SIZE - 1)

    async def answer(self) -> None:
        """Read the request and send the response."""
        unsent = memoryview(await self._response())
        while unsent:
            sent = self._stream.send_now(unsent)
            if sent < 0:  # WANT_WRITE
                await self._stream.wait(sent)
            else:
                unsent = unsent[sent:]

    async def wait_for_end(self) -> None:
        """Wait until the client disconnects, and drop what it still sends.

        If a socket is closed with unread bytes, the system resets the connection, and the client may
        lose the response (RFC 9112 section 9.6).
        """
        self._connection.shutdown(socket.SHUT_WR)
        while self._stream.recv_into(self._scratch):
            await self._stream.wait(WANT_READ)

    async def _response(self) -> bytes:
        """Read the request, and return the bytes of the response.

        Returns no bytes if the client has disconnected without a request. An invalid request gets a
        response too.
        """
        try:
            while (event := self._framing.next_event()) is h11.NEED_DATA:
                while (count := self._stream.recv_into(self._scratch)) < 0:  # WANT_READ
                    await self._stream.wait(count)
                received = bytes(self._scratch[:count])
                self._framing.receive_data(received)
                check_blanks(self._framing.trailing_data[0])  # before h11 parses them
        except h11.RemoteProtocolError as error:
            return self._encode(error.error_status_hint, {})
        except ProtocolBroken:
            return self._encode(400, {})

        if not isinstance(event, h11.Request):
            return b""
        status, document = self._answer_request(event)
        return self._encode(status, document, has_body=event.method != b"HEAD")

    def _answer_request(self, request: h11.Request) -> tuple[int, dict[str, object]]:
        """Return the status and the document for a request.

        The document is empty unless this is a GET or HEAD of `/healthz` or `/readyz`.
        """
        headers = dict(request.headers)
        # Remove the scheme and host that the request target may begin with, and its query.
        path = re.sub(rb"(?i)^https?://[^/?]*", b"", request.target).partition(b"?")[0]
        # Reject requests in which a proxy could see another host or another end of the message than
        # h11 does (RFC 9112 sections 3.2 and 6.3).
        has_two_lengths = b"transfer-encoding" in headers and b"content-length" in headers
        is_host_valid = re.fullmatch(rb"[\w.~:%\[\]-]*", headers.get(b"host", b"")) is not None
        if has_two_lengths or not is_host_valid:
            return 400, {}
        if request.http_version[:2] != b"1.":
            return 505, {}
        if path not in (b"/healthz", b"/readyz"):
            return 404, {}
        if request.method not in (b"GET", b"HEAD"):
            return 405, {}
        return self._answer_probe(path.decode())

    def _encode(self, status: int, document: dict[str, object], *, has_body: bool = True) -> bytes:
        """Return the bytes of a response.

        If the document is empty, the phrase of the status is sent instead. Without `has_body`, only
        the headers are returned, as for HEAD; they still have the length of the body.
        """
        phrase = HTTPStatus(status).phrase
        body = json_text(document or {"status": phrase.lower()}).encode()
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
        return head + body if has_body else head
