"""The health listener of `watch`: an HTTP/1.1 server of two resources, one request a connection.
Owns: its thread, its sockets, heads of requests, answers' framing. May not know: what the states
mean. Invariants: nothing of a request comes back in an answer; a client holds 8 KiB, ten seconds
and one of a fixed number of places at most; for the next one the oldest ends, and none delays a
probe. Follows RFC 9112, docs/design.md section 10."""

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
from anyio.from_thread import start_blocking_portal

from _regsync.errors import ConfigError, Disconnected
from _regsync.net.streams import WANT_READ, SocketStream
from _regsync.text import clean

Tell = Callable[
    [str], tuple[int, dict[str, Any]]
]  # what is said at `/healthz` or `/readyz`: status, document


# a head may be twice that, less one byte
_HEAD = 4096


_MOST_CLIENTS = 256


_SECONDS = 5.0


_NO_FILES_PAUSE = 0.1


_TURN_SECONDS = (
    1e-4  # how long a busy thread keeps others from running, and each answer takes some ten turns
)


@contextmanager
def serving(bind: str, port: int, tell: Tell) -> Iterator[list[Any]]:
    """Serve while the block lasts, in a thread of its own, for the caller's loop may be busy; give
    the addresses.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        with start_blocking_portal() as portal:
            task, names = portal.start_task(serve, bind, port, tell)
            try:
                yield names
            finally:
                if not task.cancel():
                    task.result()
    finally:
        sys.setswitchinterval(before)


async def serve(
    bind: str, port: int, tell: Tell, *, task_status: Any = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled at all addresses of `bind` (empty: ours), which `task_status` gets;
    ConfigError without.
    """
    listeners = _listen(bind, port)
    serving = dict[_Client, anyio.CancelScope]()

    async def converse(client: _Client) -> None:
        with (
            client.own,
            suppress(Disconnected, OSError),
            anyio.move_on_after(_SECONDS) as scope,
        ):  # it may leave
            serving[client] = scope
            if len(serving) > _MOST_CLIENTS:
                serving.pop(next(iter(serving))).cancel()
            while want := client.step():
                await client.stream.wait(want)
            # A close with bytes unread is a reset, which may take the answer along (RFC 9112
            # section 9.6).
            scope.deadline = anyio.current_time() + _SECONDS
            client.own.shutdown(socket.SHUT_WR)
            while client.stream.recv_into(client.scratch):
                await client.stream.wait(WANT_READ)
        serving.pop(client, None)

    async def accept(listener: socket.socket) -> None:
        with listener:
            listener.setblocking(False)
            while True:
                await anyio.wait_readable(listener)
                try:
                    for _ in range(_MOST_CLIENTS):
                        tasks.start_soon(converse, _Client(listener.accept()[0], tell))
                except BlockingIOError:
                    pass
                except OSError:
                    await anyio.sleep(_NO_FILES_PAUSE)

    async with anyio.create_task_group() as tasks:
        for listener in listeners:
            tasks.start_soon(accept, listener)
        task_status.started([listener.getsockname() for listener in listeners])


def _listen(bind: str, port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    try:
        if not 0 <= port < 65536:
            raise ValueError("ports end at 65535")
        found = socket.getaddrinfo(
            bind.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in found:
            both = family == socket.AF_INET6 and len(found) == 1 and socket.has_dualstack_ipv6()
            listeners.append(
                socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
            )
    except (OSError, ValueError) as error:
        for listener in listeners:
            listener.close()
        cause = (
            clean(getattr(error, "strerror", None) or str(error), 100)
            .partition(" (while")[0]
            .lower()
        )
        raise ConfigError(
            f"no health listener on {clean(bind, 100) or '*'} port {port}: {cause}",
            hint="--health-bind and --health-port take another",
        ) from error
    return listeners


class _Client:
    def __init__(self, own: socket.socket, tell: Tell) -> None:
        self.own = own
        self.stream = SocketStream(own)
        self.scratch = memoryview(bytearray(_HEAD))
        self._tell = tell
        self._framing = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD - 1)
        self._left: memoryview | None = None  # of the answer

    def step(self) -> int:
        """Go on with the exchange: 0 when the answer has left, or the client without a word; else
        what to wait for.
        """
        event = None
        status = 400
        try:
            while self._left is None and (event := self._framing.next_event()) is h11.NEED_DATA:
                if (count := self.stream.recv_into(self.scratch)) < 0:
                    return count
                self._framing.receive_data(bytes(self.scratch[:count]))
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
        if self._left is None:
            self._left = memoryview(self._answer(event, status))
        while self._left:
            if (sent := self.stream.send(self._left)) < 0:
                return sent
            self._left = self._left[sent:]
        return 0

    def _answer(self, event: object, status: int) -> bytes:
        method = b""
        document = dict[str, Any]()
        if isinstance(event, h11.ConnectionClosed):
            return b""
        if isinstance(event, h11.Request):
            method = event.method
            fields = dict(event.headers)
            path = re.sub(rb"(?i)^https?://[^/?]*", b"", event.target).partition(b"?")[0]
            # RFC 9112 sections 3.2 and 6.3: others could see another host, or another end of the
            # message.
            doubtful = {b"transfer-encoding", b"content-length"} <= {*fields}
            if doubtful or not re.fullmatch(rb"[\w.~:%\[\]-]*", fields.get(b"host", b"")):
                pass
            elif event.http_version[:2] != b"1.":
                status = 505
            elif path not in (b"/healthz", b"/readyz"):
                status = 404
            elif method not in (b"GET", b"HEAD"):
                status = 405
            else:
                status, document = self._tell(path.decode())
        phrase = HTTPStatus(status).phrase
        body = json.dumps(document or {"status": phrase.lower()}).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
            ("Date", formatdate(usegmt=True)),
            *([("Allow", "GET, HEAD")] if status == 405 else []),
        ]
        head = (
            self._framing.send(h11.Response(status_code=status, headers=headers, reason=phrase))
            or b""
        )
        return head if method == b"HEAD" else head + body
