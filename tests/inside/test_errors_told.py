"""What a user reads when a copy fails: a row for each class of failure, the exact line and its
remedy.

Each row is a real copy between the harness's registries, or with a peer that no registry would be.
A line names what failed, where (`S` is the source's address, `T` the target's), why in the
registry's own cleaned words; a hint says what to do where that is known. Nothing else is said: no
traceback, no second line.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from conformance.content.images import Image, Seed
from conformance.registry.app import App
from conformance.server.sockets import Server
from tests.ends import Peer, Ran, Start, run_regsync

USER, SECRET = "captain", "hunter2"


@dataclass
class Scene:
    """Two registries, the first with an image, and what it takes to break one of them."""

    serve: Start
    speaker: Callable[[Callable[[socket.socket], None]], str]
    ca: trustme.CA
    directory: Path
    source: Server
    target: Server
    image: Image
    names: tuple[tuple[str, str], ...] = ()

    @property
    def app(self) -> App:
        """What the source holds."""
        return self.source.app

    def copy(
        self, *more: str, source: str = "", target: str = "", proxy: str = "", **options: Any
    ) -> Ran:
        """Copy `app:v1` from S to T, through P."""
        source, target = source or self.source.address, target or self.target.address
        self.names = ((source, "S"), (target, "T"), *([(proxy, "P")] if proxy else []))
        if proxy:
            options["env"] = {"HTTPS_PROXY": f"http://{options.pop('login', '')}{proxy}"}
        where = [f"{source}/app:v1", f"{target}/app:v1"]
        return run_regsync("copy", "--no-artifacts", *more, *where, **options)

    def told(self, ran: Ran) -> list[str]:
        """Return what was said, with short names."""
        text = re.sub("sha256:[0-9a-f]{64}", "DIGEST", ran.err)
        for name, short in self.names:
            text = text.replace(name, short)
        lines = text.replace(str(self.directory), "DIR").splitlines()
        return [
            line
            for line in lines
            if not line.startswith(("warning: waiting for ", "still running"))
        ]

    def login(self, address: str, password: str = SECRET, **fields: Any) -> list[str]:
        """Write a configuration that knows one registry, with credentials."""
        credentials = {"username": USER, "password": password}
        return self.config(address, auth_type="basic", credentials=credentials, **fields)

    def config(self, url: str, **fields: Any) -> list[str]:
        path = self.directory / "mirror.yaml"
        path.write_text(json.dumps({"registries": {"it": {"url": url, **fields}}, "mappings": []}))
        return ["-c", str(path)]

    def secured(self, *names: str, **options: Any) -> str:
        """Serve TLS with a certificate of our authority; return HOST:PORT."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*names, **options).configure_cert(context)
        return self.serve(ssl_context=context).address

    def ca_file(self) -> str:
        path = self.directory / "ca.pem"
        self.ca.cert_pem.write_to_path(str(path))
        return str(path)

    def says(self, text: bytes) -> str:
        """Start a peer that reads one head and says `text`; return HOST:PORT."""

        async def script(peer: Peer) -> None:
            await peer.head()
            await peer.send(text)

        return self.speaker(script)


@pytest.fixture
def scene(
    serve: Start, speaker: Any, ca: trustme.CA, tmp_path: Path, source: Server, target: Server
) -> Scene:
    image = Seed(1).image(sizes=(2000,))
    scene = Scene(serve, speaker, ca, tmp_path, source, target, image)
    image.load_into(scene.app, "app", tag="v1")
    return scene


# The way there.


def proxy(scene: Scene, status: str, login: str = "") -> Ran:
    speaker = scene.says(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
    return scene.copy(source="registry.example", proxy=speaker, login=login)


def test_a_defect_shows_no_traceback_unless_it_is_asked_for(scene, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("_regsync.registry.client.RegistryClient.refusal", broken)
    for more, shown in (((), False), (("-v",), False), (("-vv",), True)):
        ran = scene.copy(*more, source=scene.serve().address)
        assert ran.status == 2
        assert "error: INTERNAL_ERROR: ZeroDivisionError: of our own" in ran.err.splitlines()
        assert ("Traceback" in ran.err) is shown
