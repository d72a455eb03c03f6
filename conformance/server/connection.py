"""The server's side of a connection: bytes in, bytes out, an end.

Owns: what any connection can do (`Connection`), and sockets that do it (`SocketConnection`).
May not know: HTTP, what is said over it.
Invariants: what was sent is counted in the journal's entry before the client can have read it, so
that a test which has the answer also finds its bytes counted.
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

# Seconds for which unread bytes are taken after an early answer: a reset would destroy the answer.
LINGER = 2.0
_READ = 1 << 16  # bytes of a head that are received at once
_TURN = 1 << 20  # bytes that one connection moves before other tasks get their turn


class Gone(Exception):
    """The other side went away."""


class Connection(Protocol):
    """One connection; its methods raise `Gone` when the other side has ended it."""

    # The exchange that is being answered; a connection in memory says with it whose answer was lost.
    answered: Entry | None

    async def handshake(self) -> None:
        """Do what comes before the first byte of HTTP."""

    async def receive_into(self, room: memoryview) -> int:
        """Receive at least one byte, and return how many."""

    async def receive(self) -> bytes:
        """Return the bytes that are there, at least one."""

    async def send(self, piece: bytes | memoryview, entry: Entry | None = None) -> None:
        """Send all of `piece`, and count it in `entry`."""

    async def linger(self) -> None:
        """Take bytes that still come, for a while, so that no reset destroys the last answer."""

    def reset(self) -> None:
        """Let the end of the connection, which follows, be a reset."""

    def close(self) -> None:
        """End the connection."""


class SocketConnection:
    """A non-blocking socket, plain or TLS, awaited by readiness."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.answered: Entry | None = None
        self._moved = 0
        self._room = memoryview(bytearray(_READ))  # for heads: a new one each time has to be zeroed

    async def _wait(self, problem: Exception, *, writing: bool = False) -> None:
        """Wait until the operation can go on; TLS may have to write in order to read."""
        if isinstance(problem, ssl.SSLWantWriteError) or (
            writing and isinstance(problem, BlockingIOError)
        ):
            await anyio.wait_writable(self.sock)
        else:
            await anyio.wait_readable(self.sock)

    async def handshake(self) -> None:
        """Do TLS's handshake, where there is TLS."""
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
        """Send all of `piece`; `entry` counts all of it at first, and in the end what was sent."""
        rest = memoryview(piece)
        while rest:
            before = entry.response_bytes if entry else 0
            try:
                if entry:
                    entry.response_bytes = before + len(rest)
                count = self.sock.send(rest)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as problem:
                if entry:
                    entry.response_bytes = before
                await self._wait(problem, writing=True)
                continue
            except OSError as problem:
                if entry:
                    entry.response_bytes = before
                raise Gone(str(problem)) from None

            if entry:
                entry.response_bytes = before + count

            rest = rest[count:]
            await self._let_others_work(count)

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
