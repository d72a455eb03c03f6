"""Whose certificate is trusted, whose is shown to whom, and what proxies are asked for and told.

TLS needs sockets and processes; tunnels through proxies are opened on the virtual network.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme

from conformance.http import Gone, Server
from conformance.images import Seed
from conformance.memory import Link, MemoryConnection, Place
from conformance.messages import Request, Response
from conformance.registry import App
from conformance.tokens import TokenService
from tests.ends import Peer, Ran, Start, Virtual, basic, document, held, run_regsync, started, tags

USER, SECRET = "robot", "reg-c4nary"
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}


class Scene:
    """Registries over TLS with an image, an open target, and files of keys."""

    def __init__(self, serve: Start, ca: trustme.CA, directory: Path, home: Path) -> None:
        self.serve, self.ca, self.directory, self.home = serve, ca, directory, home
        self.clients = trustme.CA()  # the authority by which registries know their clients
        self.ca_file = str(directory / "ca.pem")
        ca.cert_pem.write_to_path(self.ca_file)
        self.target = serve()
        self.image = Seed(1).image(sizes=(2000, 300))

    def context(self, clients: ssl.VerifyMode = ssl.CERT_NONE) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert("127.0.0.1").configure_cert(made)
        made.verify_mode = clients
        self.clients.configure_trust(made)
        return made

    def registry(self, context: ssl.SSLContext | None = None, **options: Any) -> Server:
        """Start a registry that has the image, and demands a client's certificate unless `context`
        does not.
        """
        context = context or self.context(ssl.CERT_REQUIRED)
        server: Any = self.serve(ssl_context=context, **options)
        self.image.load_into(server.app, "app", tag="v1")
        return server

    def client(self, name: str, by: trustme.CA | None = None, **options: Any) -> dict[str, str]:
        """Write a client's certificate and key; return the fields that name them."""
        leaf = (by or self.clients).issue_cert(f"{name}.example", **options)
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}-key.pem"
        cert.write_bytes(leaf.cert_chain_pems[0].bytes())
        key.write_bytes(leaf.private_key_pem.bytes())
        return {"client_cert": str(cert), "client_key": str(key)}

    def certs_d(self, server: Server, client: dict[str, str], name: str = "client") -> Path:
        """Lay out what podman reads for a registry."""
        directory = self.home / ".config/containers/certs.d" / server.address
        directory.mkdir(parents=True, exist_ok=True)
        self.ca.cert_pem.write_to_path(str(directory / "ca.crt"))
        for field, end in (("client_cert", "cert"), ("client_key", "key")):
            (directory / f"{name}.{end}").write_bytes(Path(client[field]).read_bytes())
        return directory

    def copy(self, source: Server, **fields: Any) -> Ran:
        registries = {"it": {"url": source.url, **fields}}
        text = json.dumps({"registries": registries, "mappings": []})
        where = [f"{source.address}/app:v1", f"{self.target.address}/app:v1"]
        return run_regsync("copy", "--no-artifacts", "-c", "-", *where, stdin=text)


@pytest.fixture
def scene(serve: Start, ca: trustme.CA, tmp_path: Path, clean_env: Path) -> Scene:
    return Scene(serve, ca, tmp_path, clean_env)


def names_shown(context: ssl.SSLContext) -> list[str]:
    """Return the list in which a server's context writes whose certificate each handshake showed."""
    shown: list[str] = []

    class Noting(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            found: Any = self.getpeercert() or {}
            shown.append("".join(value for _, value in found.get("subjectAltName", ())))

    context.sslsocket_class = Noting
    return shown


# Certificates.

PAST = datetime.datetime(2021, 1, 1, tzinfo=datetime.timezone.utc)
REFUSED, CHECK = (
    "failed: tlsv1 alert unknown ca|failed: sslv3 alert certificate expired",
    "an authority that",
)


@pytest.mark.process
@pytest.mark.in_process
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("client", "words", "remedy"),
    [
        pytest.param(None, "handshake failure|certificate required", "certs.d", id="none"),
        pytest.param({"by": trustme.CA()}, REFUSED, CHECK, id="of-an-unknown-authority"),
        pytest.param({"not_after": PAST}, REFUSED, CHECK, id="expired"),
    ],
)  # fmt: skip
def test_a_registry_that_refuses_our_certificate_is_told_with_a_remedy(
    scene, version, client, words, remedy
):
    """Once, without another attempt, and nothing was asked of it.

    Under TLS 1.3 a client hears of it with its first answer, before that in the handshake.
    """
    context = scene.context(ssl.CERT_REQUIRED)
    context.maximum_version = version
    server = scene.registry(context)
    fields = {} if client is None else scene.client("shown", **client)
    ran = scene.copy(server, ca_file=scene.ca_file, **fields)
    assert ran.status == 2
    failed, hint = ran.err.splitlines()
    assert failed.startswith(f"failed {server.address}/app:v1 ")
    assert "NETWORK_ERROR" in failed or "SOURCE_ERROR" in failed
    assert re.search(words, failed)
    assert re.search(f"^hint: .*({remedy})", hint)
    assert server.journal.entries == []


@pytest.mark.process
def test_two_aliases_of_one_host_show_each_its_own_certificate(scene):
    """Also where nobody logs in, so that nothing else tells them apart."""
    context = scene.context(ssl.CERT_REQUIRED)
    shown, server = names_shown(context), scene.registry(context)
    Seed(2).image(sizes=(70,)).load_into(server.app, "other", tag="v1")
    entries = {
        name: {"url": server.url, "ca_file": scene.ca_file, **scene.client(name)}
        for name in ("alice", "bob")
    }
    mappings = [
        {"from": repository, "source": name, "targets": ["target"], "tags": tags("v1")}
        for repository, name in (("app", "alice"), ("other", "bob"))
    ]
    text = document({**entries, "target": scene.target}, *mappings, defaults={"source": "alice"})
    ran = run_regsync("sync", "--json", "-q", "-c", "-", stdin=text)
    assert ran.statuses() == ["synced", "synced"], ran.err
    assert set(shown) == {"alice.example", "bob.example"}
    used = {(entry.connection, entry.repository) for entry in server.journal.entries}
    assert len(used) == server.journal.connections(), "each is for one repository"


@pytest.mark.process
@pytest.mark.parametrize("by", ["fields", "certs.d"])
def test_where_a_registry_sends_us_no_certificate_is_shown_but_its_authority_is_trusted(scene, by):
    """Storage and logins beside a registry have their certificates from the same authority."""
    here = scene.context(ssl.CERT_REQUIRED)
    there, login = scene.context(ssl.CERT_OPTIONAL), scene.context(ssl.CERT_OPTIONAL)
    at_home, abroad, at_login = map(names_shown, (here, there, login))
    storage = scene.registry(there)
    tokens = TokenService({USER: SECRET}, anonymous=False)
    tokens.realm = f"{scene.serve(tokens, ssl_context=login).url}/token"
    server = scene.registry(here, auth=tokens)

    def intercept(request: Request) -> Response | None:
        if request.kind == "blob" and request.method == "GET" and request.header("authorization"):
            return Response(307, [("Location", f"{storage.url}{request.target}")])
        return None

    server.app.intercept = intercept
    fields = scene.client("alice")
    if by == "certs.d":
        scene.certs_d(server, fields)
        fields = {}
    else:
        fields |= {"ca_file": scene.ca_file}
    ran = scene.copy(server, **fields, **LOGIN)
    assert ran.status == 0, ran.err
    assert set(at_home) == {"alice.example"}
    assert (set(abroad), set(at_login)) == ({""}, {""})
    assert held(scene.target, "app", scene.image)


# The directories of container clients.


@pytest.mark.process
@pytest.mark.in_process
def test_what_podman_trusts_and_shows_needs_no_configuration(scene):
    """Fields of the configuration replace their part of the directory."""
    context = scene.context(ssl.CERT_REQUIRED)
    shown, server = names_shown(context), scene.registry(context)
    assert scene.copy(server).status == 2
    directory = scene.certs_d(server, scene.client("alice"))
    assert scene.copy(server).status == 0
    assert held(scene.target, "app", scene.image)
    assert set(shown) == {"alice.example"}

    scene.certs_d(server, scene.client("stranger", trustme.CA()), "a")  # the first pair by name
    assert re.search(REFUSED, scene.copy(server).err)
    alice = scene.client("alice")
    assert scene.copy(server, **alice).status == 0, "whose authority is still in the directory"
    (directory / "ca.crt").write_text("junk")
    assert scene.copy(server, **alice).status == 3
    assert scene.copy(server, ca_file=scene.ca_file, **alice).status == 0


async def test_plain_http_looks_for_no_directory(world, clean_env):
    source, target = world.registry("source.test"), world.registry("target.test")
    Seed(1).image().load_into(source.app, "app", tag="v1")
    for place in ("source.test", "source.test:80"):
        directory = clean_env / ".config/containers/certs.d" / place
        directory.mkdir(parents=True)
        (directory / "client.cert").write_text("without a key")
    assert (await world.copy(source, target)).status == 0


@pytest.mark.process
@pytest.mark.skipif(
    not hasattr(os, "openpty"), reason="this system has no terminals to be asked at"
)
def test_a_key_with_a_pass_phrase_is_an_error_and_nobody_is_asked_for_it_at_a_terminal(scene):
    files = scene.client("locked")
    locked = f"{files['client_key']}.locked"
    command = ["openssl", "pkey", "-aes128", "-passout", "pass:open", "-in", files["client_key"]]
    subprocess.run([*command, "-out", locked], check=True, capture_output=True)
    registry = {"url": "https://nowhere.test", **files, "client_key": locked}
    file = scene.directory / "mirror.yaml"
    file.write_text(json.dumps({"registries": {"it": registry}, "mappings": []}))
    ours, theirs = os.openpty()

    def take_the_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(theirs), os.O_RDWR))  # of a new session it is the terminal now

    words = ("copy", "-c", str(file), "nowhere.test/app:v1", f"{scene.target.address}/app:v1")
    try:
        with started(*words, preexec_fn=take_the_terminal) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == 3
        assert "CONFIG_ERROR: " in err
        assert "client_cert" in err
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            os.read(ours, 100)
    finally:
        os.close(ours)
        os.close(theirs)


# Proxies. Names lead where the test says, and TLS is believed.

NAME, STORAGE, HUB_LOGIN = "registry.acme.example", "storage.cdn.example", "login.acme.example"
GATE, GATE_SECRET, QUOTED = "gate", "pr%xy c4nary", "pr%25xy%20c4nary"
SECRETS = (SECRET, GATE_SECRET, QUOTED, basic(GATE, GATE_SECRET), basic(USER, SECRET))
OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Proxy(Place):
    """A forward proxy, with or without a login; or one that only says `answer`."""

    def __init__(self, world: Virtual, login: str = "", answer: bytes = b"") -> None:
        super().__init__(App(), "http", "proxy.test", 3128, Link(), Link())
        self._network, self._login, self._answer = world.network, login, answer
        self._network.attach(self)
        self.heads: list[str] = []  # of what it was asked for

    @property
    def targets(self) -> set[str]:
        return {head.split(" ")[1] for head in self.heads}

    async def converse(self, connection: Any, number: int) -> None:
        try:
            head = (await Peer(connection).head()).decode()
            self.heads.append(head)
            header = f"Proxy-Authorization: Basic {self._login}"
            if self._answer:
                await connection.send(self._answer)
                await connection.receive()
            elif self._login and header not in head:
                await connection.send(b"HTTP/1.1 407 Login\r\nContent-Length: 0\r\n\r\n")
            else:
                host, _, port = head.split(" ")[1].rpartition(":")
                upstream = MemoryConnection(await self._network.connect(host, int(port)))
                await connection.send(OPEN)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(carry, connection, upstream)
                    tasks.start_soon(carry, upstream, connection)
        except Gone:
            pass
        finally:
            connection.close()


async def carry(source: Any, sink: Any) -> None:
    """Carry bytes until either side ends."""
    try:
        while True:
            await sink.send(await source.receive())
    except Gone:
        source.close()
        sink.close()


class Outside:
    """A registry under a name that only a proxy leads to, and an open target."""

    def __init__(self, world: Virtual) -> None:
        self.world = world
        self.source = world.listen(App(), NAME, scheme="https")
        self.target = world.registry("target.test")
        self.image = Seed(1).image(sizes=(2000, 300)).load_into(self.source.app, "app", tag="v1")

    async def copy(self, *more: str, env: Any = None, **fields: Any) -> Ran:
        """Copy the image with these fields of the source's registry."""
        text = document({"source": {"url": NAME, **fields}, "target": self.target})
        where = [f"{NAME}/app:v1", "target.test/app:v1"]
        words = ("copy", "--no-artifacts", "-c", "-", *more, *where)
        ran = await self.world.run(
            *words, env={"NO_PROXY": "target.test", **(env or {})}, stdin=text
        )
        assert not [secret for secret in SECRETS if secret in ran.out + ran.err]
        return ran


@pytest.fixture
def outside(world: Virtual) -> Outside:
    return Outside(world)


@pytest.mark.parametrize("by", ["environment", "configuration"])
async def test_both_logins_go_to_whom_they_are_for(world, outside, by):
    outside.source.app.auth = TokenService({USER: SECRET}, anonymous=False)
    proxy = Proxy(world, login=basic(GATE, GATE_SECRET))
    url = f"http://{GATE}:{QUOTED}@proxy.test:3128"
    if by == "environment":
        ran = await outside.copy("-vv", env={"HTTPS_PROXY": url}, **LOGIN)
    else:
        ran = await outside.copy("-vv", env={"NO_PROXY": "*"}, proxy=url, **LOGIN)
    assert ran.status == 0, ran.err
    assert held(outside.target, "app", outside.image)
    assert proxy.targets == {f"{NAME}:443"}, "the target is reached without it"
    assert all(head.count("Authorization") == 1 for head in proxy.heads)
    entries = outside.source.journal.entries
    assert len(proxy.heads) == len({entry.connection for entry in entries})
    assert not [entry for entry in entries if "proxy-authorization" in entry.headers]
    assert {entry.headers["host"] for entry in entries} == {NAME}
    assert f"connecting to https://{NAME} through http://proxy.test:3128" in ran.err
    assert "connecting to http://target.test\n" in ran.err


@pytest.mark.provokes("credential_to_realm")  # it knows no public suffix
async def test_the_proxy_of_a_registry_is_that_of_its_login_and_its_storage_too(world, outside):
    """Where only that proxy leads out; what Docker Hub is asked for is at three hosts."""
    tokens = TokenService({USER: SECRET}, anonymous=False, realm=f"https://{HUB_LOGIN}/token")
    outside.source.app.auth = tokens
    world.listen(tokens, HUB_LOGIN, scheme="https")
    outside.image.load_into(world.listen(App(), STORAGE, scheme="https").app, "app", tag="v1")
    outside.source.app.faults.on("GET", "blob").redirect(f"https://{STORAGE}")
    proxy = Proxy(world)
    ran = await outside.copy(proxy="http://proxy.test:3128", **LOGIN)
    assert ran.status == 0, ran.err
    assert proxy.targets == {f"{NAME}:443", f"{HUB_LOGIN}:443", f"{STORAGE}:443"}
    assert tokens.requests == 1


async def test_no_proxy_means_no_byte_to_the_proxy(world, outside):
    proxy = Proxy(world)
    env = {"https_proxy": "proxy.test:3128", "no_proxy": f"a.example, {NAME}:443, target.test"}
    ran = await outside.copy("-v", env={**env, "NO_PROXY": ""})
    assert (ran.status, proxy.heads) == (0, [])
    assert f"connecting to https://{NAME}\n" in ran.err


FORBIDDEN = b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"
REPEATS = (
    "HTTP/1.1 407 No\r\n"
    f'Proxy-Authenticate: {basic(GATE, GATE_SECRET)} realm="\x1b[31m{GATE_SECRET}", NTLM\r\n'
    f"Content-Length: {len(GATE_SECRET)}\r\n\r\n{GATE_SECRET}"
).encode()


NO_TLS = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
# As of a proxy that looks into TLS.
UNKNOWN = ssl.SSLCertVerificationError(1, "certificate verify failed")
UNKNOWN.verify_code, UNKNOWN.verify_message = 20, "unable to get local issuer certificate"


@pytest.mark.parametrize(
    ("answer", "error", "ending", "remedy"),
    [
        (FORBIDDEN, None, "(403)", "HTTPS_PROXY"),
        (REPEATS, None, "(407)", "accept Basic"),
        (OPEN + b"\x1b[31m" + GATE_SECRET.encode(), None, "was used", None),
        (OPEN, NO_TLS, "protocol (waited for 15s)", "plain HTTP"),
        (OPEN, UNKNOWN, f": {NAME} is not trusted: {UNKNOWN.verify_message}", "`ca_file`"),
    ],
    ids=["403", "repeats-the-login", "out-of-turn", "leads-nowhere", "unknown-authority"],
)
async def test_what_a_proxy_does_instead_of_a_tunnel_is_told(
    world, outside, answer, error, ending, remedy
):
    async def fail(*_: object) -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    Proxy(world, answer=answer)
    world.start_tls = fail
    ran = await outside.copy(env={"HTTPS_PROXY": f"http://{GATE}:{QUOTED}@proxy.test:3128"})
    assert ran.status == 2
    lines = ran.err.splitlines()
    failed, *more = [line for line in lines if not line.startswith("warning: waiting for ")]
    assert "NETWORK_ERROR" in failed
    assert "the proxy http://proxy.test:3128" in failed
    assert failed.endswith(ending)
    hints = [line for line in more if line.startswith("hint: ")]
    assert [remedy in line for line in hints] == ([True] if remedy else [])
    assert "\x1b" not in ran.err
    assert outside.source.journal.entries == []


async def test_no_proxy_is_no_remedy_where_the_configuration_names_the_proxy(world, outside):
    Proxy(world, answer=FORBIDDEN)
    ran = await outside.copy(proxy="http://proxy.test:3128")
    assert "proxy in" in ran.err
    assert "NO_PROXY" not in ran.err


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HTTPS_PROXY": "socks5://proxy.test:1080"}, "HTTPS_PROXY: proxy scheme 'socks5'"),
        ({"SSL_CERT_FILE": "/nowhere.pem"}, "/nowhere.pem does not exist"),
    ],
    ids=["proxy", "trust"],
)
async def test_what_only_a_redirect_needs_and_is_wrong_fails_what_needs_it(world, env, words):
    """A registry that speaks plain HTTP needs neither; its storage does."""
    source, target = world.registry("source.test"), world.registry("target.test")
    whole, torn = (Seed(number).image(sizes=(300,)) for number in (1, 2))
    whole.load_into(source.app, "whole", tag="v1")
    torn.load_into(source.app, "torn", tag="v1")
    source.app.faults.on("GET", "blob", repository="torn").redirect(f"https://{STORAGE}")
    text = document({"source": source, "target": target}, {"from": "torn"}, {"from": "whole"})
    ran = await world.run("sync", "--json", "-c", "-", env=env, stdin=text)
    assert (ran.status, ran.statuses()) == (1, ["failed", "synced"])
    assert held(target, "whole", whole)
    (failed,) = ran.failed
    assert "NETWORK_ERROR" in failed
    assert words in failed
