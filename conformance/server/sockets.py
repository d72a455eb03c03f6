"""Serve sites on TCP ports.

Owns: listening, TLS, starting and stopping a server.
May not know: HTTP, what a registry is.
Invariants: a server that stops closes its connections.

`serve` is for tests on the same event loop, `run_in_thread` for tests that run another program.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator

import anyio
import anyio.from_thread

from .connection import SocketConnection
from .exchange import Site
from .http1 import Endpoint

__all__ = ["Server", "run_in_thread", "serve"]


class Server(Endpoint):
    """A Site that listens on a TCP port."""

    def __init__(self, site: Site, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        host, port = listener.getsockname()[:2]
        super().__init__(site, "http" if context is None else "https", host, port)
        self._listener = listener
        self._context = context
        self._connections = 0  # number of connections accepted so far
        self._open_connections = 0
        # Guards `_open_connections`. Notified when a connection has ended.
        self._closing = threading.Condition()

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        """Wait until no connection is open. Must not be called in the server's thread.

        By then, all requests of a client that was killed have been processed. Raises TimeoutError
        if a connection is still open after `seconds`.
        """
        with self._closing:
            if not self._closing.wait_for(lambda: self._open_connections == 0, seconds):
                raise TimeoutError(f"{self._open_connections} connections to {self.url} are open")

    async def accept(self) -> None:
        """Accept connections until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    sock, _ = self._listener.accept()
                except BlockingIOError:
                    await anyio.wait_readable(self._listener)
                    continue
                self._connections += 1
                with self._closing:
                    self._open_connections += 1
                tasks.start_soon(self._connection, sock, self._connections)

    async def _connection(self, sock: socket.socket, number: int) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
            await self.converse(SocketConnection(sock), number)
        finally:
            with self._closing:
                self._open_connections -= 1
                self._closing.notify_all()


@contextlib.asynccontextmanager
async def serve(
    app: Site, host: str = "127.0.0.1", port: int = 0, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Serve `app` while the block runs, then close all connections.

    A port of 0 means any free port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
        server = Server(app, listener, ssl_context)
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.accept)
            try:
                yield server
            except Exception as problem:
                # Re-raised below, because the task group would wrap it in an ExceptionGroup.
                failure = problem
            tasks.cancel_scope.cancel()

        if failure is not None:
            raise failure


@contextlib.contextmanager
def run_in_thread(
    app: Site, host: str = "127.0.0.1", port: int = 0, ssl_context: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """Serve `app` in another thread while the block runs."""
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve(app, host, port, ssl_context)) as server,
    ):
        yield server
