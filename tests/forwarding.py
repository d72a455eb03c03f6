"""A forward proxy for tests, in threads: CONNECT only, with or without a login.

Names lead where the test says, never to the network. What each tunnel carried is kept byte for
byte, so that a test can say that something was not in it.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.ends import basic

OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass
class Forward:
    """A proxy that knows some HOST:PORT; `heads` are the requests to it, `carried` is what clients
    sent inside.
    """

    known: Mapping[str, str]
    login: str = ""
    challenge: str = 'Basic realm="proxy"'
    heads: list[bytes] = field(default_factory=list)
    carried: bytearray = field(default_factory=bytearray)

    @property
    def targets(self) -> list[str]:
        """What was asked for, in order."""
        return [head.split(b" ")[1].decode() for head in self.heads]

    def __call__(self, connected: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            if not (head := until_blank_line(connected)):
                return
            self.heads.append(head)
            if (
                self.login
                and f"Proxy-Authorization: Basic {basic(*self.login.split(':', 1))}".encode()
                not in head
            ):
                answer = f"HTTP/1.1 407 Login\r\nProxy-Authenticate: {self.challenge}\r\nContent-Length: 0\r\n\r\n"
                connected.sendall(answer.encode())
            elif where := self.known.get(self.targets[-1]):
                host, _, port = where.rpartition(":")
                upstream = stack.enter_context(socket.create_connection((host, int(port))))
                connected.sendall(OPEN)
                self.carry(connected, upstream)
            else:
                connected.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    def carry(self, client: socket.socket, upstream: socket.socket) -> None:
        """Carry bytes both ways until either side ends."""
        while True:
            ready = select.select([client, upstream], [], [], 10)[0]
            for source, sink in ((client, upstream), (upstream, client)):
                if source in ready:
                    if not (got := source.recv(65536)):
                        return
                    if source is client:
                        self.carried += got
                    sink.sendall(got)
            if not ready:
                return


def until_blank_line(connected: socket.socket) -> bytes:
    """Read one head and no byte more."""
    got = b""
    while not got.endswith(b"\r\n\r\n"):
        if not (byte := connected.recv(1)):
            return b""
        got += byte
    return got


Speaker = Callable[[Callable[[socket.socket], None]], str]
