"""Whole runs over TLS: each wrong certificate, whose certificate is shown to whom, `certs.d`."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from _regsync.registry import runs
from conformance.content.images import Seed
from conformance.server.sockets import Server
from tests.ends import ROOT, Ran, Start, run_regsync

pytestmark = pytest.mark.process  # for sockets and TLS

HOME = "127.0.0.1"


class Scene:
    """A registry over TLS with an image, an open target, and files of keys."""

    def __init__(self, serve: Start, ca: trustme.CA, directory: Path, home: Path) -> None:
        self.serve, self.ca, self.directory, self.home = serve, ca, directory, home
        self.clients = trustme.CA()  # the authority by which registries know their clients
        self.ca_file = str(directory / "ca.pem")
        ca.cert_pem.write_to_path(self.ca_file)
        self.target = serve()
        self.image = Seed(1).image(sizes=(2000, 300))

    def context(
        self, *, by: trustme.CA | None = None, clients: bool = False, **options: Any
    ) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (by or self.ca).issue_cert(HOME, "localhost", **options).configure_cert(made)
        if clients:
            made.verify_mode = ssl.CERT_REQUIRED
            self.clients.configure_trust(made)
        return made

    def registry(self, context: ssl.SSLContext | None = None, **options: Any) -> Server:
        server = self.serve(ssl_context=context or self.context(**options))
        self.image.load_into(server.app, "app", tag="v1")
        return server

    def client(self, name: str, by: trustme.CA | None = None, **options: Any) -> dict[str, str]:
        """Write a client's certificate and key; return the fields that name them."""
        leaf = (by or self.clients).issue_cert(f"{name}.example", **options)
        paths = {
            "client_cert": self.directory / f"{name}.pem",
            "client_key": self.directory / f"{name}-key.pem",
        }
        paths["client_cert"].write_bytes(leaf.cert_chain_pems[0].bytes())
        paths["client_key"].write_bytes(leaf.private_key_pem.bytes())
        return {field: str(path) for field, path in paths.items()}

    def certs_d(
        self, server: Server, client: dict[str, str] | None = None, ca: trustme.CA | None = None
    ) -> Path:
        """Lay out what podman reads for a registry."""
        directory = self.home / ".config/containers/certs.d" / server.address
        directory.mkdir(parents=True)
        if ca:
            ca.cert_pem.write_to_path(str(directory / "ca.crt"))
        for field, end in (("client_cert", "cert"), ("client_key", "key")) if client else ():
            (directory / f"client.{end}").write_bytes(Path(client[field]).read_bytes())
        return directory

    def copy(self, source: Server | str, *more: str, **fields: Any) -> Ran:
        url = source if isinstance(source, str) else source.url
        text = json.dumps({"registries": {"it": {"url": url, **fields}}, "mappings": []})
        where = [f"{url.partition('://')[2]}/app:v1", f"{self.target.address}/app:v1"]
        return run_regsync("copy", "--no-artifacts", *more, "-c", "-", *where, stdin=text)


@pytest.fixture
def scene(serve: Start, ca: trustme.CA, tmp_path: Path, clean_env: Path) -> Scene:
    return Scene(serve, ca, tmp_path, clean_env)


# Container clients' directories.


@pytest.mark.skipif(
    not hasattr(os, "openpty"), reason="this system has no terminals to be asked at"
)
def test_a_key_with_a_pass_phrase_is_an_error_and_nobody_is_asked_for_it_at_a_terminal(
    scene: Scene,
) -> None:
    files = scene.client("locked")
    command = ["openssl", "pkey", "-aes128", "-passout", "pass:open", "-in", files["client_key"]]
    subprocess.run(
        [*command, "-out", f"{files['client_key']}.locked"], check=True, capture_output=True
    )
    code = (
        "import os, sys; os.open(os.ttyname(0), os.O_RDWR)  # of a new session it is the terminal then\n"
        "from _regsync.net import trust\n"
        "trust.make_context(client_cert=sys.argv[1], client_key=sys.argv[2], environ={})"
    )
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, files["client_cert"], f"{files['client_key']}.locked"],
            env={"PYTHONPATH": str(ROOT), "SSL_CERT_FILE": scene.ca_file},
            stdin=theirs,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=60,
            check=False,
        )
        assert "ConfigError: client_cert" in done.stderr
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            os.read(ours, 100)
    finally:
        os.close(ours)
        os.close(theirs)


def test_plain_http_looks_for_no_directory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "find_certs_d", lambda *_: pytest.fail("looked"))
    plain = scene.serve()
    scene.image.load_into(plain.app, "app", tag="v1")  # type: ignore[arg-type]
    assert scene.copy(plain).status == 0
