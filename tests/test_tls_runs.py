"""Whole runs over TLS: each wrong certificate, whose certificate is shown to whom, `certs.d`."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from _regsync.config.model import Registry
from _regsync.errors import ConfigError
from _regsync.net import tls
from _regsync.registry import host
from _regsync.registry.transport import Machine, Transport
from conformance.content.images import Seed
from conformance.messages import Request, Response
from conformance.server.sockets import Server
from tests.ends import ROOT, Ran, Start, document, held, only, run_regsync, tags
from tests.forwarding import Speaker

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


def day(year: int) -> datetime.datetime:
    return datetime.datetime(year, 1, 1, tzinfo=datetime.timezone.utc)


def weak(scene: Scene, key: str = "rsa:1024", algorithm: str = "-sha256") -> Server:
    """Serve what OpenSSL's level 2 takes no more, a short key or a signature over MD5, made by
    `openssl`.
    """
    authority = trustme.CA(key_type=trustme.KeyType.RSA)
    authority.cert_pem.write_to_path(scene.ca_file)
    signer, pem = scene.directory / "signer.key", scene.directory / "weak.pem"
    authority.private_key_pem.write_to_path(str(signer))
    command = [
        "openssl",
        "req",
        "-x509",
        "-subj",
        "/CN=weak",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-nodes",
    ]
    command += [
        "-newkey",
        key,
        algorithm,
        "-CA",
        scene.ca_file,
        "-CAkey",
        str(signer),
        "-days",
        "7",
    ]
    command += ["-keyout", str(scene.directory / "weak.key"), "-out", str(pem)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_cert_chain(pem, scene.directory / "weak.key")
    return scene.registry(context)


def self_signed(scene: Scene) -> Server:
    lone = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with lone.private_key_pem.tempfile() as key, lone.cert_pem.tempfile() as certificate:
        context.load_cert_chain(certificate, key)
    return scene.registry(context)


def old(scene: Scene) -> Server:
    context = scene.context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    return scene.registry(context)


def versioned(version: ssl.TLSVersion) -> Callable[[Scene], Server]:
    def demanding(scene: Scene) -> Server:
        context = scene.context(clients=True)
        context.maximum_version = version
        return scene.registry(context)

    return demanding


CLOCK = "clock"
TRUST = "SSL_CERT_FILE"
SHOW = "certs.d"
CHECK = "which authority"
STRANGER: dict[str, Any] = {"by": trustme.CA()}
V12, V13 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("start", "client", "words", "remedy"),
    [
        pytest.param(
            lambda scene: scene.registry(not_after=day(2021)), "", "expired", CLOCK, id="expired"
        ),
        pytest.param(
            lambda scene: scene.registry(not_before=day(2037)), "", "valid yet", CLOCK, id="future"
        ),
        pytest.param(
            lambda scene: scene.registry(**STRANGER),
            "",
            "unknown authority",
            TRUST,
            id="unknown authority",
        ),
        pytest.param(self_signed, "", "self-signed", TRUST, id="self-signed"),
        pytest.param(weak, "", "too weak", "2048 bits", id="weak key"),
        pytest.param(
            lambda scene: weak(scene, "rsa:2048", "-md5"), "", "too weak", "2048 bits", id="MD5"
        ),
        pytest.param(old, "", "TLS version", "TLS 1.2", id="TLS too old"),
        pytest.param(versioned(V13), "", "client certificate", SHOW, id="certificate, 1.3"),
        pytest.param(
            versioned(V12), "", "TLS handshake", "client certificate", id="certificate, 1.2"
        ),
        pytest.param(versioned(V13), "stranger", "this client's certificate", CHECK, id="of whom"),
        pytest.param(versioned(V13), "expired", "this client's certificate", CHECK, id="past it"),
        pytest.param(
            versioned(V12), "stranger", "this client's certificate", CHECK, id="whom, 1.2"
        ),
        pytest.param(versioned(V12), "expired", "this client's certificate", CHECK, id="past, 1.2"),
    ],
)
def test_a_registry_that_tls_does_not_let_us_use_is_told_with_a_remedy(
    scene: Scene, start: Callable[[Scene], Server], client: str, words: str, remedy: str
) -> None:
    """Once, without another attempt, and nothing was asked of it."""
    shown = {
        "": lambda: {},
        "stranger": lambda: scene.client("stranger", trustme.CA()),
        "expired": lambda: scene.client("expired", not_after=day(2021)),
    }[client]()
    server = start(scene)
    ran = scene.copy(server, ca_file=scene.ca_file, **shown)
    assert ran.status == 2
    failed, hint = ran.err.splitlines()
    assert failed.startswith(f"failed {server.address}/app:v1 ")
    assert "NETWORK_ERROR" in failed or "SOURCE_ERROR" in failed
    assert words in failed
    assert hint.startswith("hint: ")
    assert remedy in hint
    assert server.journal.entries == []


def test_a_certificate_for_another_name_is_told(scene: Scene) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    scene.ca.issue_cert("elsewhere.example").configure_cert(context)
    ran = scene.copy(scene.registry(context), ca_file=scene.ca_file)
    assert "for this name" in only(ran.failed)
    assert "reissued" in ran.err


def test_tls_on_a_plain_port_and_plain_http_on_a_tls_port_are_told(
    scene: Scene, speaker: Speaker
) -> None:
    def plain(connected: socket.socket) -> None:
        connected.recv(65536)
        connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    ran = scene.copy(f"https://{speaker(plain)}", ca_file=scene.ca_file)
    assert "speak TLS" in only(ran.failed)
    assert "http://" in ran.err
    secure = scene.registry()
    ran = scene.copy(f"http://{secure.address}")
    assert ran.status == 2
    assert f"https://{secure.address} " in ran.err


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
    assert SHOW in ran.err.splitlines()[1]


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


NAMING = (
    "name a client's certificate and key *.cert and *.key, and an authority's certificate *.crt"
)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        pytest.param(
            lambda directory: (directory / "client.key").unlink(),
            "DIR/client.cert has no client.key beside it",
            NAMING,
            id="no key",
        ),
        pytest.param(
            lambda directory: (directory / "client.cert").unlink(),
            "DIR/client.key has no client.cert beside it",
            NAMING,
            id="no certificate",
        ),
        pytest.param(
            lambda directory: (directory / "ca.crt").write_text("junk"),
            "ca_file DIR/ca.crt cannot be used: no certificate or crl found",
            "use PEM files, and a key without a passphrase (RSA: at least 2048 bits)",
            id="junk",
        ),
        pytest.param(
            lambda directory: (directory / "b.crt").symlink_to("gone"),
            "ca_file DIR/b.crt: DIR/b.crt does not exist",
            "name another file, or make this one readable",
            id="dangling",
        ),
        pytest.param(
            lambda directory: (directory / "client.key").write_bytes(
                trustme.CA().private_key_pem.bytes()
            ),
            "client_cert DIR/client.cert with client_key DIR/client.key cannot be used: key values mismatch",
            "use PEM files, and a key without a passphrase (RSA: at least 2048 bits)",
            id="another key",
        ),
    ],
)
def test_what_is_wrong_with_the_directory_is_told_before_any_request(
    scene: Scene, change: Callable[[Path], object], message: str, hint: str
) -> None:
    server = scene.registry(clients=True)
    directory = scene.certs_d(server, scene.client("alice"), scene.ca)
    change(directory)
    ran = scene.copy(server)
    assert ran.status == 3
    assert ran.err.replace(str(directory), "DIR").splitlines() == [
        f"error: CONFIG_ERROR: {message}",
        f"hint: {hint}",
    ]
    assert server.journal.entries == []


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
        "from _regsync.net import tls; tls.make_context(client_cert=sys.argv[1], client_key=sys.argv[2], environ={})"
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


@pytest.mark.in_process
def test_a_file_that_this_user_may_not_read_is_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's own keys are root's; who is root here is refused nothing, so the system's answer is
    stood in for.
    """
    server = scene.registry(clients=True)
    directory = scene.certs_d(server, scene.client("alice"), scene.ca)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(".key"))
    ran = scene.copy(server)
    assert ran.status == 3
    assert f"{directory}/client.key is not a file, or this user may not read it" in ran.err
    assert "hint: name another file, or make this one readable" in ran.err


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return directories that stand for the user's and the two of /etc."""
    found = {name: tmp_path / name for name in ("home", "containers", "docker")}
    found["home"] = found["home"] / ".config/containers/certs.d"
    monkeypatch.setattr(tls, "_CERTS_D", (str(found["containers"]), str(found["docker"])))
    return found


@pytest.mark.parametrize(
    ("authority", "port", "laid", "expected"),
    [
        pytest.param("r.example", 443, ["docker/r.example"], "docker/r.example", id="docker's"),
        pytest.param(
            "r.example",
            443,
            ["docker/r.example", "containers/r.example", "home/r.example"],
            "home/r.example",
            id="the user's first",
        ),
        pytest.param(
            "r.example",
            443,
            ["docker/r.example", "containers/r.example"],
            "containers/r.example",
            id="then podman's",
        ),
        pytest.param(
            "r.example:5000", 5000, ["docker/r.example"], None, id="a port is part of the name"
        ),
        pytest.param(
            "r.example:5000", 5000, ["docker/r.example:5000"], "docker/r.example:5000", id="port"
        ),
        pytest.param(
            "r.example", 443, ["docker/r.example:443"], "docker/r.example:443", id="the usual port"
        ),
        pytest.param(
            "r.example",
            443,
            ["docker/r.example:443", "docker/r.example"],
            "docker/r.example",
            id="rather without",
        ),
        pytest.param("[::1]:5000", 5000, ["docker/[::1]:5000"], "docker/[::1]:5000", id="v6"),
        pytest.param("r.example", 443, ["docker/sub.r.example"], None, id="another host's"),
        pytest.param("r.example", 443, [], None, id="none"),
    ],
)
def test_the_first_directory_is_used_alone(
    bases: dict[str, Path],
    tmp_path: Path,
    authority: str,
    port: int,
    laid: list[str],
    expected: str | None,
) -> None:
    for place in laid:
        base, _, name = place.partition("/")
        (bases[base] / name).mkdir(parents=True)
        for file in ("b.crt", "a.crt", "x.cert", "x.key", "README", "old.pem", "..data"):
            (bases[base] / name / file).write_text("")
    found = tls.certs_d(str(tmp_path / "home"), authority, port)
    base, _, name = (expected or "").partition("/")
    files = (
        [str(bases[base] / name / file) for file in ("a.crt", "b.crt", "x.cert", "x.key")]
        if expected
        else []
    )
    assert list(found) == files


def test_an_empty_directory_ends_the_search_and_what_cannot_be_listed_does_not(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    (bases["docker"] / "r.example").mkdir(parents=True)
    (bases["docker"] / "r.example" / "a.crt").write_text("")
    bases["containers"].mkdir()
    (bases["containers"] / "r.example").write_text("no directory")
    assert len(tls.certs_d(None, "r.example", 443)) == 1
    (bases["home"] / "r.example").mkdir(parents=True)
    assert tls.certs_d(str(tmp_path / "home"), "r.example", 443) == ()


def test_the_first_of_two_pairs_by_name_is_shown(scene: Scene) -> None:
    context = scene.context(clients=True)
    shown, server = names_of(context), scene.registry(context)
    directory = scene.certs_d(server, scene.client("alice"), scene.ca)
    other = scene.client("aaron")
    (directory / "a.cert").write_bytes(Path(other["client_cert"]).read_bytes())
    (directory / "a.key").write_bytes(Path(other["client_key"]).read_bytes())
    assert scene.copy(server).status == 0
    assert set(shown) == {"aaron.example"}


def test_looking_costs_six_failed_listings_at_most(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def listdir(path: str) -> list[str]:
        looked.append(path)
        raise FileNotFoundError

    monkeypatch.setattr(os, "listdir", listdir)
    assert tls.certs_d("/home/me", "r.example", 443) == ()
    assert len(looked) == 6
    assert tls.certs_d("/home/me", "r.example:5000", 5000) == ()
    assert len(looked) == 9
    assert set(bases)


def test_plain_http_looks_for_no_directory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "certs_d", lambda *_: pytest.fail("looked"))
    plain = scene.serve()
    scene.image.load_into(plain.app, "app", tag="v1")  # type: ignore[arg-type]
    assert scene.copy(plain).status == 0


def test_a_watch_reads_the_directory_again_and_keeps_what_was_good(scene: Scene) -> None:
    registry = Registry("r", "https", HOME, 5000, "unknown")
    directory = scene.home / ".config/containers/certs.d" / f"{HOME}:5000"
    directory.mkdir(parents=True)
    scene.ca.cert_pem.write_to_path(str(directory / "ca.crt"))

    def log(*_: object, **__: object) -> None:
        pass

    edge = Machine({}, str(scene.home), lambda path: None, lambda: 0.5, lambda: 0.0, log)
    connected = Transport(edge)
    connected.prepare(registry)
    first = connected._dialer._context(registry)
    (directory / "client.key").write_text("alone")
    assert connected._dialer._context(registry) is first, "in one cycle it is what it was"
    with pytest.raises(ConfigError, match=r"client\.key has no client\.cert beside it"):
        connected.renew([registry])
    assert connected._dialer._context(registry) is first
    (directory / "client.key").unlink()
    connected.renew([registry])
    assert connected._dialer._context(registry) is not first
