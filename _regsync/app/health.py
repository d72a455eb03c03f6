"""The health probes of `watch`: two resources over HTTP/1.1, one request per connection.

Invariants: a response contains nothing of the request. A client takes at most 8 KiB, two seconds
and one of PLACES places. If all places are taken, the oldest client is disconnected, so that slow
clients cannot block a probe.
Follows: RFC 9112, docs/design.md section 10.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from _regsync.errors import ConfigError
from _regsync.text import json_text, printable, reason_of

# Takes the path `/healthz` or `/readyz`. Returns the HTTP status and the JSON document. It is
# called in threads of this module.
AnswerProbe = Callable[[str], tuple[int, dict[str, object]]]

LARGEST_HEAD = 8192  # bytes of a request
PLACES = 64  # clients that are served at a time
CLIENT_SECONDS = 2.0  # for the request and the response
NO_FILES_PAUSE = 0.1  # seconds to wait if the process cannot open another socket


@contextmanager
def serving(bind: str, port: int, answer_probe: AnswerProbe) -> Iterator[int]:
    """Serve probes while the block is active. Yields the port.

    The clients are served in threads, because the caller's event loop may be busy. An empty `bind`
    means all addresses of this machine. Raises ConfigError if the server cannot listen.
    """
    listener = open_listener(bind, port)
    clients = deque[socket.socket](maxlen=PLACES)  # those that are served, oldest first

    def accept() -> None:
        while listener.fileno() != -1:  # not closed
            try:
                client, _ = listener.accept()
            except OSError:  # the listener is being closed, or there are too many open files
                time.sleep(NO_FILES_PAUSE)
                continue
            if len(clients) == PLACES:
                with suppress(OSError):  # it has ended meanwhile
                    clients[0].shutdown(socket.SHUT_RDWR)
            clients.append(client)
            try:
                threading.Thread(target=serve, args=(client,), daemon=True).start()
            except RuntimeError:  # there are too many threads
                serve(client)

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError):
            exchange(client, answer_probe)
        with suppress(ValueError):  # a newer client has its place
            clients.remove(client)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):  # not every system wakes `accept` so
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def open_listener(bind: str, port: int) -> socket.socket:
    """Open the listening socket. Raises ConfigError if that is not possible."""
    host = bind.strip("[]")
    is_for_all = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host or is_for_all else socket.AF_INET
    try:
        if not 0 <= port < 65536:
            raise ValueError("the highest port is 65535")
        return socket.create_server(
            (host, port), family=family, backlog=1024, dualstack_ipv6=is_for_all or host == "::"
        )
    except (OSError, ValueError) as error:
        # The message below has the address already, which `create_server` adds in brackets.
        reason = reason_of(error).partition(" (while")[0].lower()
        raise ConfigError(
            f"health probes: cannot listen on {printable(bind, 100) or '*'} port {port}: {reason}",
            hint="choose another address or port with --health-bind and --health-port",
        ) from error


def exchange(client: socket.socket, answer_probe: AnswerProbe) -> None:
    """Read a request and send the response. Raises OSError after the time."""
    deadline = time.monotonic() + CLIENT_SECONDS
    head = b""
    while b"\r\n\r\n" not in head and len(head) < LARGEST_HEAD:
        # A time-out of 0 would not wait, and a negative one is invalid.
        client.settimeout(max(0.001, deadline - time.monotonic()))
        received = client.recv(LARGEST_HEAD)
        if not received:
            return
        head += received
    client.sendall(respond(head, answer_probe))


def respond(head: bytes, answer_probe: AnswerProbe) -> bytes:
    """Return the response to the head of a request: 404 for whatever is no probe."""
    target = head.partition(b" ")[2].partition(b" ")[0]
    path = target.partition(b"?")[0].decode("latin-1")
    if path in ("/healthz", "/readyz"):
        status, document = answer_probe(path)
    else:
        status, document = 404, {"status": "not found"}

    body = json_text(document).encode()
    lines = [
        f"HTTP/1.1 {status} ",  # the words after the number may be left out
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "\r\n",
    ]
    return "\r\n".join(lines).encode() + (b"" if head.startswith(b"HEAD ") else body)
