"""A forward proxy and a temporary certificate authority, to reach local sites by host names.

Owns: the local port of each host name; CONNECT; the certificates for those names.
May not know: the content of a tunnel.
Invariants: a tunnel leads only to a registered name, so that a test cannot reach the network by
mistake. Other requests are recorded in `refused`.
Follows: RFC 9110 section 9.3.6; docs/protocol-facts.md sections 8.1 and 8.2 (which variables
clients read).

A client in the same process needs neither sockets nor this module (see `memory`). Certificates are
made by the program `openssl`, because the standard library cannot make them.
"""

from __future__ import annotations

import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.abc
import anyio.from_thread

from ..programs import find_program

__all__ = ["Names", "names"]

_HEAD = 1 << 14  # maximum size of the head of a CONNECT, in bytes
_PIECE = 1 << 18  # maximum number of bytes that a tunnel copies at once
# Configuration of openssl.
_CONFIG = """[req]
distinguished_name = dn
prompt = no
[dn]
CN = {name}
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth
authorityKeyIdentifier = keyid
subjectKeyIdentifier = hash
subjectAltName = {alternatives}
"""


class Names:
    """Registered names, with the proxy and the certificate authority for them.

    Clients must trust `ca_file` and use `proxy`. `environ` has the variables for both.
    """

    def __init__(self, directory: Path) -> None:
        # Absolute, so that `environ` is right in every working directory.
        self.directory = directory.absolute()
        self._ports: dict[str, int] = {}  # local ports, by host of a CONNECT to port 443
        self.proxy = ""  # URL; set when the proxy listens
        self.refused: list[str] = []  # method and target of requests that were refused
        self.tunnels: list[str] = []  # HOST:PORT of each tunnel
        self.ca_file = self.directory / "authority.pem"
        self._certify("authority", "a throw-away authority", "DNS:invalid", ())

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that a client's environment needs."""
        return {
            "HTTPS_PROXY": self.proxy,
            "https_proxy": self.proxy,
            "SSL_CERT_FILE": str(self.ca_file),
        }

    def _certify(self, file: str, name: str, alternatives: str, signed: Sequence[str]) -> None:
        """Make a key and a certificate. `signed` has openssl's options for the signer.

        The certificate is that of an authority if `signed` is empty.
        """
        program = find_program("openssl", "openssl")
        config = self.directory / f"{file}.cnf"
        config.write_text(_CONFIG.format(name=name, alternatives=alternatives))
        command = [program, "req", "-x509", "-config", str(config), "-days", "7", "-nodes"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *signed]
        command += ["-extensions", "leaf" if signed else "authority"]
        command += ["-keyout", str(config.with_suffix(".key"))]
        command += ["-out", str(config.with_suffix(".pem"))]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode:
            raise RuntimeError(f"openssl made no certificate:\n{completed.stderr}")

    def context(self, hosts: Sequence[str]) -> ssl.SSLContext:
        """Return a TLS context for a server with a certificate for these names."""
        file = f"leaf-{hosts[0]}"
        signed = ("-CA", str(self.ca_file), "-CAkey", str(self.ca_file.with_suffix(".key")))
        self._certify(file, hosts[0], ",".join(f"DNS:{host}" for host in hosts), signed)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / f"{file}.pem", self.directory / f"{file}.key")
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
        with contextlib.suppress(
            anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError
        ):
            async with client:
                head = b""
                while b"\r\n\r\n" not in head and len(head) < _HEAD:
                    head += await client.receive()

                method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
                target = rest.partition(" ")[0]
                host, _, port = target.rpartition(":")
                local_port = self._ports.get(host.lower()) if port == "443" else None
                if method != "CONNECT" or local_port is None:
                    self.refused.append(f"{method} {target}")
                    status = "403 Forbidden" if method == "CONNECT" else "405 Method Not Allowed"
                    await client.send(
                        f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
                    )
                    return

                self.tunnels.append(target)
                async with await anyio.connect_tcp("127.0.0.1", local_port) as server:
                    await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await _join(client, server)


async def _join(client: anyio.abc.ByteStream, server: anyio.abc.ByteStream) -> None:
    """Copy bytes in both directions until either side closes."""

    async def carry(source: anyio.abc.ByteStream, sink: anyio.abc.ByteStream) -> None:
        with contextlib.suppress(
            anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError
        ):
            while True:
                await sink.send(await source.receive(_PIECE))
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carry, client, server)
        tasks.start_soon(carry, server, client)


@contextlib.contextmanager
def names(directory: Path | str) -> Iterator[Names]:
    """Run the proxy in another thread while the block runs.

    Its files are written to `directory`.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    known_names = Names(Path(directory))

    @contextlib.asynccontextmanager
    async def listening() -> AsyncIterator[None]:
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            known_names.proxy = (
                f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
            )
            lines = [f"export {name}='{value}'\n" for name, value in known_names.environ.items()]
            (known_names.directory / "environ").write_text("".join(lines))  # for a shell to read
            tasks.start_soon(listener.serve, known_names._serve)
            yield
            tasks.cancel_scope.cancel()

    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(listening()),
    ):
        yield known_names
