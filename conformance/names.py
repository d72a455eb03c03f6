"""A forward proxy and a temporary certificate authority, to reach local sites by host names.

A tunnel leads only to a registered name, so that a test cannot reach the network by mistake. What
a tunnel carries is unknown here. Follows RFC 9110 section 9.3.6 and docs/protocol-facts.md sections
8.1 and 8.2 (which variables clients read). A client in the same process needs neither sockets nor
this module (see `memory`).
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.abc
import anyio.from_thread
import h11

from .faults import head_of
from .http import cancelled_at_the_end

__all__ = ["Names", "names"]

_ENDED = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError)


class Names:
    """Registered names, with the proxy and the certificate authority for them.

    Clients must trust `ca_file` and use `proxy`. `environ` has the variables for both.
    """

    def __init__(self, directory: Path) -> None:
        import trustme  # not in a built zipapp, with which `serve` works too

        self._authority = trustme.CA()
        # Absolute, so that `environ` is right in every working directory.
        self.ca_file = directory.absolute() / "authority.pem"
        self._authority.cert_pem.write_to_path(self.ca_file)
        self._ports: dict[str, int] = {}  # local ports, by host of a CONNECT to port 443
        self.proxy = ""  # URL; set when the proxy listens
        self.refused: list[str] = []  # method and target of requests that were refused
        self.tunnels: list[str] = []  # HOST:PORT of each tunnel

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that a client's environment needs."""
        return {
            "HTTPS_PROXY": self.proxy,
            "https_proxy": self.proxy,
            "SSL_CERT_FILE": str(self.ca_file),
        }

    def context(self, hosts: Sequence[str]) -> ssl.SSLContext:
        """Return a TLS context for a server with a certificate for these names."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(*hosts).configure_cert(context)
        return context

    @contextlib.contextmanager
    def known(self, host: str, port: int) -> Iterator[None]:
        """Register a local port for port 443 of a name while the block runs."""
        self._ports[host] = port
        try:
            yield
        finally:
            del self._ports[host]

    async def _serve(self, client: anyio.abc.ByteStream) -> None:
        """Answer one connection to the proxy: open the tunnel, or refuse the request."""
        parser = h11.Connection(h11.SERVER)
        with contextlib.suppress(*_ENDED, h11.RemoteProtocolError):
            async with client:
                while (asked := parser.next_event()) is h11.NEED_DATA:
                    parser.receive_data(await client.receive())
                assert isinstance(asked, h11.Request)
                method = asked.method.decode()
                target = asked.target.decode()
                host, _, port = target.rpartition(":")
                local_port = self._ports.get(host.lower()) if port == "443" else None
                if method != "CONNECT" or local_port is None:
                    self.refused.append(f"{method} {target}")
                    status = 403 if method == "CONNECT" else 405
                    ending = [("Content-Length", "0"), ("Connection", "close")]
                    await client.send(head_of(status, ending))
                    return

                self.tunnels.append(target)
                async with await anyio.connect_tcp("127.0.0.1", local_port) as server:
                    await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await _join(client, server)


async def _join(client: anyio.abc.ByteStream, server: anyio.abc.ByteStream) -> None:
    """Copy bytes in both directions until either side closes."""

    async def carry(source: anyio.abc.ByteStream, sink: anyio.abc.ByteStream) -> None:
        with contextlib.suppress(*_ENDED):
            while True:
                await sink.send(await source.receive())
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carry, client, server)
        tasks.start_soon(carry, server, client)


@contextlib.asynccontextmanager
async def _listening(known: Names) -> AsyncIterator[None]:
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        cancelled_at_the_end() as tasks,
    ):
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        known.proxy = f"http://127.0.0.1:{port}"
        tasks.start_soon(listener.serve, known._serve)
        yield


@contextlib.contextmanager
def names(directory: Path | str) -> Iterator[Names]:
    """Run the proxy in another thread while the block runs.

    The authority's certificate is written to `directory`.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    known = Names(Path(directory))
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_listening(known)),
    ):
        yield known
