"""Whole runs through forward proxies: who is asked for what, who sees which secret, how each
failure reads.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from conformance.content.images import Seed
from conformance.messages import Request, Response
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from tests.ends import Ran, Start, basic, held, run_regsync
from tests.forwarding import OPEN, Forward, Speaker, until_blank_line

pytestmark = pytest.mark.process  # for sockets and TLS

NAME, STORAGE, LOGIN = "registry.acme.example", "storage.cdn.example", "login.acme.example"
USER, SECRET, GATE, GATE_SECRET, QUOTED = (
    "robot",
    "reg-c4nary",
    "gate",
    "pr%xy c4nary",
    "pr%25xy%20c4nary",
)
SECRETS = (SECRET, GATE_SECRET, QUOTED, basic(GATE, GATE_SECRET), basic(USER, SECRET))


class Scene:
    """A registry under a name that only proxies know, and an open target on this machine."""

    def __init__(self, serve: Start, speaker: Speaker, ca: trustme.CA, directory: Path) -> None:
        self.serve, self.speaker, self.ca, self.directory = serve, speaker, ca, directory
        ca.cert_pem.write_to_path(str(directory / "ca.pem"))
        self.source, self.target = serve(ssl_context=self.context(NAME)), serve()
        self.app = self.source.app
        self.image = Seed(1).image(sizes=(2000, 300))
        self.image.load_into(self.app, "app", tag="v1")
        self.known = {f"{NAME}:443": self.source.address}

    def context(self, *names: str) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*names).configure_cert(made)
        return made

    def proxy(self, **options: Any) -> tuple[Forward, str]:
        forward = Forward(self.known, **options)
        return forward, self.speaker(forward)

    def copy(self, *more: str, env: dict[str, str] | None = None, **fields: Any) -> Ran:
        """Copy the image to the target with these fields of the source's registry."""
        entry = {"url": NAME, "ca_file": str(self.directory / "ca.pem"), **fields}
        text = json.dumps({"registries": {"it": entry}, "mappings": []})
        where = [f"{NAME}/app:v1", f"{self.target.address}/app:v1"]
        ran = run_regsync("copy", "--no-artifacts", *more, "-c", "-", *where, env=env, stdin=text)
        for secret in SECRETS:
            assert secret not in ran.out + ran.err
        return ran


@pytest.fixture
def scene(serve: Start, speaker: Speaker, ca: trustme.CA, tmp_path: Path) -> Scene:
    return Scene(serve, speaker, ca, tmp_path)


@pytest.mark.new
@pytest.mark.parametrize("by", ["environment", "configuration"])
def test_both_logins_go_to_whom_they_are_for(scene: Scene, by: str) -> None:
    """At -vv."""
    scene.app.auth = TokenService({USER: SECRET}, anonymous=False)
    forward, address = scene.proxy(login=f"{GATE}:{GATE_SECRET}")
    url = f"http://{GATE}:{QUOTED}@{address}"
    login = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}
    if by == "environment":
        ran = scene.copy("-vv", env={"HTTPS_PROXY": url}, **login)
    else:
        ran = scene.copy("-vv", env={"NO_PROXY": "*"}, proxy=url, **login)
    assert ran.status == 0, ran.err
    assert held(scene.target, "app", scene.image)
    assert set(forward.targets) == {f"{NAME}:443"}, (
        "the target on this machine is reached without it"
    )
    header = f"Proxy-Authorization: Basic {basic(GATE, GATE_SECRET)}"
    assert all(
        head.decode().count("Authorization") == head.decode().count(header) == 1
        for head in forward.heads
    )
    assert len(forward.heads) == len({entry.connection for entry in scene.app.journal.entries})
    assert not [
        entry for entry in scene.app.journal.entries if "proxy-authorization" in entry.headers
    ]
    assert {entry.headers["host"] for entry in scene.app.journal.entries} == {NAME}
    lines = ran.err.splitlines()
    assert f"connecting to https://{NAME} through http://{address}" in "\n".join(lines)
    assert [line for line in lines if line.endswith(f"to http://{scene.target.address}")]


def moved_to_storage(scene: Scene) -> None:
    """Let blobs be at another host, as most registries have it."""

    def intercept(request: Request) -> Response | None:
        if request.kind == "blob" and request.method == "GET" and request.header("host") == NAME:
            return Response(307, [("Location", f"https://{STORAGE}{request.target}")])
        return None

    elsewhere = App()
    scene.image.load_into(elsewhere, "app", tag="v1")
    scene.known[f"{STORAGE}:443"] = scene.serve(
        elsewhere, ssl_context=scene.context(STORAGE)
    ).address
    scene.app.intercept = intercept


@pytest.mark.provokes(
    "credential_to_realm"
)  # by the addresses behind the names, which the audit goes by
def test_the_proxy_and_ca_of_a_registry_are_those_of_its_login_and_its_storage_too(
    scene: Scene,
) -> None:
    """Where only that proxy leads out; what Docker Hub is asked for is at three hosts."""
    tokens = TokenService({USER: SECRET}, anonymous=False, realm=f"https://{LOGIN}/token")
    scene.app.auth = tokens
    moved_to_storage(scene)
    scene.known[f"{LOGIN}:443"] = scene.serve(tokens, ssl_context=scene.context(LOGIN)).address
    forward, address = scene.proxy()
    login = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}
    ran = scene.copy(proxy=f"http://{address}", **login)
    assert ran.status == 0, ran.err
    assert set(forward.targets) == {f"{NAME}:443", f"{LOGIN}:443", f"{STORAGE}:443"}
    assert tokens.requests == 1


@pytest.mark.new
def test_no_proxy_means_no_byte_to_the_proxy(scene: Scene) -> None:
    forward, address = scene.proxy()
    ran = scene.copy("-v", env={"https_proxy": address, "no_proxy": f"a.example, {NAME}:443"})
    assert ran.status == 2
    assert f"connecting to https://{NAME}\n" in ran.err
    assert forward.heads == []


def says(answer: bytes) -> Callable[[socket.socket], None]:
    def script(connected: socket.socket) -> None:
        until_blank_line(connected)
        connected.sendall(answer)

    return script


def leads_nowhere(connected: socket.socket) -> None:
    until_blank_line(connected)
    connected.sendall(OPEN)
    connected.recv(65536)


NASTY = b"\x1b[31m<h1>\x07pr%xy c4nary</h1>"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(NASTY)
NAMED = "HTTPS_PROXY"


def challenge(value: str) -> bytes:
    return f"HTTP/1.1 407 No\r\nProxy-Authenticate: {value}\r\n".encode() + LENGTH + NASTY


@pytest.mark.parametrize(
    ("script", "ending", "remedy"),
    [
        pytest.param(says(b"HTTP/1.1 403 No\r\n" + LENGTH + NASTY), "(403)", NAMED, id="403"),
        pytest.param(says(challenge(f'{basic(GATE, GATE_SECRET)} realm="\x1b[31mx", NTLM')),
            "(407), it accepts NTLM", "accepts Basic", id="repeats-the-login"),
        pytest.param(says(challenge(f"{GATE_SECRET} realm=x")), "(407)", "accepts Basic", id="repeats-the-password"),
        pytest.param(says(OPEN + NASTY), "was used", None, id="speaks-out-of-turn"),
        pytest.param(leads_nowhere, "TLS handshake (waited for 15s)", "plain HTTP", id="tunnel-leads-nowhere"),
    ],
)  # fmt: skip
@pytest.mark.in_process
def test_what_a_proxy_does_instead_of_a_tunnel_is_told(
    scene: Scene, script: Callable[[socket.socket], None], ending: str, remedy: str | None
) -> None:
    address = scene.speaker(script)
    env = {"HTTPS_PROXY": f"http://{GATE}:{QUOTED}@{address}"}
    ran = scene.copy(env=env)
    assert ran.status == 2
    said = ran.err.replace(address, "P").splitlines()
    failed, *more = [line for line in said if not line.startswith("warning: waiting for ")]
    assert "NETWORK_ERROR" in failed
    assert "the proxy http://P" in failed
    assert failed.endswith(ending)
    hints = [line for line in more if line.startswith("hint: ")]
    assert [remedy in line for line in hints] == ([True] if remedy else [])
    assert "\x1b" not in ran.err
    assert not [each for each in (GATE_SECRET, QUOTED, basic(GATE, GATE_SECRET)) if each in ran.err]
    assert scene.app.journal.entries == []


def test_no_proxy_is_no_remedy_where_the_configuration_names_the_proxy(scene: Scene) -> None:
    ran = scene.copy(proxy=f"http://{scene.speaker(says(b'HTTP/1.1 403 No' + LENGTH))}")
    assert "proxy in" in ran.err
    assert "NO_PROXY" not in ran.err


def test_an_authority_that_is_unknown_inside_a_tunnel_is_told_with_the_proxy(scene: Scene) -> None:
    """As of a proxy that looks into TLS."""
    _, address = scene.proxy()
    ran = scene.copy(env={"HTTPS_PROXY": address}, ca_file=None)
    assert ran.status == 2
    assert f"the proxy http://{address}: {NAME} " in ran.err
    assert "`ca_file`" in ran.err


@pytest.mark.new
@pytest.mark.parametrize("by", ["HTTPS_PROXY", "https_proxy", "proxy in the configuration"])
def test_a_proxy_with_tls_of_its_own_is_one_error_with_its_remedy(scene: Scene, by: str) -> None:
    url = f"https://{GATE}:{QUOTED}@{scene.proxy()[1]}"
    ran = scene.copy(proxy=url) if "proxy in" in by else scene.copy(env={by: url})
    assert ran.status == 3
    assert f"{by}: proxy scheme 'https' is not supported" in ran.err
    assert "write http://HOST:PORT; through it the connection to a registry is TLS all" in ran.err
    assert scene.app.journal.entries == []
