"""The server's side of a connection: receiving, sending and closing.

Owns: the interface of connections (`Connection`), and its implementation by sockets
(`SocketConnection`).
May not know: HTTP.
Invariants: sent bytes are counted in the journal's entry before the client can read them, so that a
test that has the answer also finds its bytes counted.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from typing import Protocol

import anyio
import anyio.lowlevel

from ..journal import Entry

__all__ = ["LINGER", "Connection", "Gone", "SocketConnection"]

# After an early answer, the rest of the body is received for at most this many seconds. Closing
# earlier would reset the connection, and the client would lose the answer.
LINGER = 2.0
_READ = 1 << 16  # maximum number of bytes that `receive` returns
_TURN = 1 << 20  # number of bytes after which a connection lets other tasks run


class Gone(Exception):
    """The client has ended the connection."""


class Connection(Protocol):
    """One connection. Its methods raise Gone if the client has ended it."""

    # The exchange that is being answered. A connection in memory records lost answers in it.
    answered: Entry | None

    async def handshake(self) -> None:
        """Perform the TLS handshake if the connection uses TLS."""

    async def receive_into(self, room: memoryview) -> int:
        """Receive at least one byte into `room`. Returns the number of bytes."""

    async def receive(self) -> bytes:
        """Wait until bytes have arrived, and return them."""

    async def send(self, piece: bytes | memoryview, entry: Entry | None = None) -> None:
        """Send all of `piece`, and count its bytes in `entry`."""

    async def linger(self) -> None:
        """Drop received bytes for up to LINGER seconds, so that the client gets the last answer."""

    def reset(self) -> None:
        """Make the following `close` reset the connection."""

    def close(self) -> None:
        """Close the connection."""


class SocketConnection:
    """A connection over a non-blocking socket, with or without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.answered: Entry | None = None
        # Bytes moved since other tasks were last allowed to run.
        self._moved = 0
        # Buffer of `receive`. It is reused, because a new buffer would have to be zeroed.
        self._room = memoryview(bytearray(_READ))

    async def _wait(self, problem: Exception, *, writing: bool = False) -> None:
        """Wait until the operation that raised `problem` can continue.

        TLS may have to write in order to read.
        """
        if isinstance(problem, ssl.SSLWantWriteError) or (
            writing and isinstance(problem, BlockingIOError)
        ):
            await anyio.wait_writable(self.sock)
        else:
            await anyio.wait_readable(self.sock)

    async def handshake(self) -> None:
        """Perform the TLS handshake if the socket uses TLS."""
        while isinstance(self.sock, ssl.SSLSocket):
            try:
                return self.sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as problem:
                await self._wait(problem)
        return None

    async def receive_into(self, room: memoryview) -> int:
        while True:
            try:
                count = self.sock.recv_into(room)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as problem:
                await self._wait(problem)
                continue
            except OSError as problem:
                raise Gone(str(problem)) from None
            if not count:
                raise Gone("end of stream")
            await self._let_others_work(count)
            return count

    async def receive(self) -> bytes:
        count = await self.receive_into(self._room)
        return bytes(self._room[:count])

    async def send(self, piece: bytes | memoryview, entry: Entry | None = None) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                count = self._send_some(rest, entry)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as problem:
                await self._wait(problem, writing=True)
                continue
            except OSError as problem:
                raise Gone(str(problem)) from None
            rest = rest[count:]
            await self._let_others_work(count)

    def _send_some(self, data: memoryview, entry: Entry | None) -> int:
        """Send as many bytes as the socket accepts now. Returns their number.

        Bytes are counted before they are sent. Bytes that were not sent are subtracted afterwards.
        """
        if entry is None:
            return self.sock.send(data)
        sent = 0
        entry.response_bytes += len(data)
        try:
            sent = self.sock.send(data)
        finally:
            entry.response_bytes -= len(data) - sent
        return sent

    async def _let_others_work(self, count: int) -> None:
        self._moved += count
        if self._moved >= _TURN:
            self._moved = 0
            await anyio.lowlevel.checkpoint()

    async def linger(self) -> None:
        buffer = memoryview(bytearray(1 << 18))
        with contextlib.suppress(Gone, OSError), anyio.move_on_after(LINGER):
            if not isinstance(self.sock, ssl.SSLSocket):
                self.sock.shutdown(socket.SHUT_WR)
            while True:
                await self.receive_into(buffer)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        anyio.notify_closing(self.sock)
        self.sock.close()
