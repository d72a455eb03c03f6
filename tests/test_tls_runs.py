"""Whole runs over TLS: each wrong certificate, whose certificate is shown to whom, `certs.d`."""

from __future__ import annotations

import datetime
import json
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from conformance.content.images import Seed
from conformance.messages import Request, Response
from conformance.server.sockets import Server
from tests.ends import Ran, Start, document, held, run_regsync, tags

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


def demanding(scene: Scene, version: ssl.TLSVersion) -> Server:
    context = scene.context(clients=True)
    context.maximum_version = version
    return scene.registry(context)


PAST = datetime.datetime(2021, 1, 1, tzinfo=datetime.timezone.utc)
REFUSED, CHECK = "this client's certificate", "which authority"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("client", "words", "remedy"),
    [
        ({}, "TLS handshake|client certificate", "client certificate|certs.d"),
        ({"by": trustme.CA()}, REFUSED, CHECK),
        ({"not_after": PAST}, REFUSED, CHECK),
    ],
    ids=["none", "of an authority that is unknown there", "expired"],
)
def test_a_registry_that_refuses_our_certificate_is_told_with_a_remedy(
    scene: Scene, version: ssl.TLSVersion, client: dict[str, Any], words: str, remedy: str
) -> None:
    """Once, without another attempt, and nothing was asked of it.

    Under TLS 1.3 a client hears of it with its first answer, before that in the handshake.
    """
    server = demanding(scene, version)
    shown = scene.client("shown", **client) if client else {}
    ran = scene.copy(server, ca_file=scene.ca_file, **shown)
    assert ran.status == 2
    failed, hint = ran.err.splitlines()
    assert failed.startswith(f"failed {server.address}/app:v1 ")
    assert "NETWORK_ERROR" in failed or "SOURCE_ERROR" in failed
    assert re.search(words, failed)
    assert hint.startswith("hint: ")
    assert re.search(remedy, hint)
    assert server.journal.entries == []


def test_the_hint_for_a_tls_registry_on_loopback_is_a_reference_as_it_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(scene.ca_file))
    secure = scene.registry()
    target = f"{scene.target.address}/app"
    ran = run_regsync("copy", "--no-artifacts", f"{secure.address}/app:v1", target)
    assert ran.status == 2
    (hint,) = re.findall(rf"hint: .*(https://{secure.address})", ran.err)
    ran = run_regsync("copy", "--no-artifacts", f"{hint}/app:v1", target)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"synced {secure.address}/app:v1 -> {target}:v1 ")
    ran = run_regsync("tags", f"{hint}/app")
    assert (ran.status, ran.out) == (0, "v1\n")


@pytest.mark.parametrize(
    "words", ["No required SSL certificate was sent", "The SSL certificate error"]
)
def test_nginx_that_asks_for_a_client_certificate_in_http_is_understood(
    scene: Scene, words: str
) -> None:
    """It lets everybody shake hands, and answers each request with a page."""
    server = scene.registry()
    page = f"<html><head><title>400 {words}</title></head></html>".encode()
    server.app.intercept = lambda request: Response(400, [("Content-Type", "text/html")], page)
    ran = scene.copy(server, ca_file=scene.ca_file)
    assert ran.status == 2
    assert "certs.d" in ran.err.splitlines()[1]


# Who is shown which certificate.


def names_of(context: ssl.SSLContext) -> list[str]:
    """Return the list in which a server's context writes whose certificate each handshake showed."""
    shown: list[str] = []

    class Noting(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            found = self.getpeercert() or {}
            shown.append("".join(value for _, value in found.get("subjectAltName", ())))  # type: ignore[misc]

    context.sslsocket_class = Noting
    return shown


def test_two_aliases_of_one_host_show_each_its_own_certificate(scene: Scene) -> None:
    """Also where nobody logs in, so that nothing else tells them apart."""
    context = scene.context(clients=True)
    shown, server = names_of(context), scene.registry(context)
    Seed(2).image(sizes=(70,)).load_into(server.app, "other", tag="v1")  # type: ignore[arg-type]
    entries = {
        name: {"url": server.url, "ca_file": scene.ca_file, **scene.client(name)}
        for name in ("alice", "bob")
    }
    mappings = [
        {"from": "app", "source": "alice", "targets": ["target"], "tags": tags("v1")},
        {"from": "other", "source": "bob", "targets": ["target"], "tags": tags("v1")},
    ]
    ran = run_regsync(
        "sync",
        "--json",
        "-q",
        "-c",
        "-",
        stdin=document(
            {**entries, "target": scene.target}, *mappings, defaults={"source": "alice"}
        ),
    )
    assert ran.statuses() == ["synced", "synced"], ran.err
    assert set(shown) == {"alice.example", "bob.example"}
    by_connection = {
        entry.connection: entry.repository for entry in server.journal.entries if entry.repository
    }
    assert {
        entry.repository == by_connection[entry.connection] for entry in server.journal.entries
    } == {True}


@pytest.mark.parametrize("by", ["fields", "certs.d"])
def test_a_host_that_a_registry_sends_us_to_is_shown_no_certificate(scene: Scene, by: str) -> None:
    """But it is trusted by the same authority: storage beside a registry has its certificate from
    there too.
    """
    here, there = scene.context(clients=True), scene.context()
    there.verify_mode = ssl.CERT_OPTIONAL
    scene.clients.configure_trust(there)
    at_home, abroad = names_of(here), names_of(there)
    server, storage = scene.registry(here), scene.registry(there)

    def intercept(request: Request) -> Response | None:
        if request.kind == "blob" and request.method == "GET":
            return Response(307, [("Location", f"{storage.url}{request.target}")])
        return None

    server.app.intercept = intercept
    fields: dict[str, str] = {}
    if by == "fields":
        fields = {"ca_file": scene.ca_file, **scene.client("alice")}
    else:
        scene.certs_d(server, scene.client("alice"), scene.ca)
    ran = scene.copy(server, **fields)
    assert ran.status == 0, ran.err
    assert set(at_home) == {"alice.example"}
    assert set(abroad) == {""}
    assert held(scene.target, "app", scene.image)


# Container clients' directories.


def test_what_podman_trusts_and_shows_needs_no_configuration(scene: Scene) -> None:
    server = scene.registry(clients=True)
    assert scene.copy(server).status == 2
    scene.certs_d(server, scene.client("alice"), scene.ca)
    ran = scene.copy(server)
    assert ran.status == 0, ran.err
    assert held(scene.target, "app", scene.image)


def test_fields_of_the_configuration_replace_their_part_of_the_directory(scene: Scene) -> None:
    server = scene.registry(clients=True)
    directory = scene.certs_d(server, scene.client("stranger", trustme.CA()), scene.ca)
    assert "this client's certificate" in scene.copy(server).err
    assert scene.copy(server, **scene.client("alice")).status == 0, (
        "whose authority is still in the directory"
    )
    (directory / "ca.crt").write_text("junk")
    assert scene.copy(server, **scene.client("alice")).status == 3
    assert scene.copy(server, ca_file=scene.ca_file, **scene.client("alice")).status == 0


def test_what_is_wrong_with_the_directory_is_told_before_any_request(scene: Scene) -> None:
    server = scene.registry(clients=True)
    directory = scene.certs_d(server, scene.client("alice"), scene.ca)
    (directory / "client.key").unlink()
    ran = scene.copy(server)
    assert ran.status == 3
    failed, hint = ran.err.splitlines()
    assert failed == f"error: CONFIG_ERROR: {directory}/client.cert has no client.key beside it"
    assert "*.cert and *.key" in hint
    assert server.journal.entries == []


def test_the_first_of_two_pairs_by_name_is_shown(scene: Scene) -> None:
    context = scene.context(clients=True)
    shown, server = names_of(context), scene.registry(context)
    directory = scene.certs_d(server, scene.client("alice"), scene.ca)
    other = scene.client("aaron")
    (directory / "a.cert").write_bytes(Path(other["client_cert"]).read_bytes())
    (directory / "a.key").write_bytes(Path(other["client_key"]).read_bytes())
    assert scene.copy(server).status == 0
    assert set(shown) == {"aaron.example"}
