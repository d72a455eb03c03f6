"""Where a registry may lead us, and what those who are there are shown: addresses and names, client
certificates, logins, an upload that goes on elsewhere.

Who is asked at all is in test_hostile_peers.py.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
from typing import Any

import pytest

from conformance.content.images import Seed
from conformance.messages import Answer, Content, Request, Response
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.exchange import Reception, Site
from tests.ends import basic, document, held, only, run_regsync, sync, tags

USER, SECRET = "captain", "Xyzzy-0pen-Sesame"
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}


class Elsewhere(Site):
    """A host that takes parts of uploads, and says where the next one goes."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self.location = location

    def start(self, request: Request) -> Answer | Reception:
        status = 202 if request.method == "PATCH" else 201
        return Reception(
            Content(), lambda received: Response(status, [("Location", self.location)])
        )


@pytest.mark.rule("R1", "R3")
@pytest.mark.parametrize("back", [True, False])
def test_an_upload_that_went_elsewhere_comes_not_back_with_a_login(serve, source, back):
    """Else a host that the registry trusts with blobs alone has us write anything there in our own
    name.
    """
    target = serve(auth=BasicAuth({USER: SECRET}))
    Seed(1).image(sizes=(200_000,)).load_into(source.app, "app", tag="v1")
    storage = serve(Elsewhere(f"{target.url}/v2/app/manifests/v9?x=1" if back else "/next?x=1"))
    refused: list[str] = []  # the journal has a PUT only when its answer has left

    def lead(request: Request) -> Answer | None:
        if request.kind == "upload" and request.method == "PUT":
            refused.append(request.target)
            return Response(405)  # so that the other way is tried, which has a Location more
        return Response(202, [("Location", f"{storage.url}/up")]) if storage_next(request) else None

    def storage_next(request: Request) -> bool:
        return request.kind == "upload_start" and bool(refused)

    target.app.intercept = lead
    text = json.dumps({"registries": {"t": {"url": target.url, **LOGIN}}, "mappings": []})
    where = (f"{source.address}/app:v1", f"{target.address}/app:v1")
    ran = run_regsync("copy", "--json", "--no-artifacts", "-c", "-", *where, stdin=text)
    assert ran.status == 2
    assert storage.journal.count("PATCH")
    assert not [entry for entry in target.journal.entries if "x" in entry.query]
    later = {
        entry.target.partition("?")[0] for entry in storage.journal.entries if "x" in entry.query
    }
    assert later == (set() if back else {"/next"})
    assert all("authorization" not in entry.headers for entry in storage.journal.entries)


@pytest.mark.process
@pytest.mark.rule("R1")
def test_a_client_certificate_is_shown_to_nobody_whom_another_registry_names(
    serve, target, ca, tmp_path
):
    def context() -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert("127.0.0.1").configure_cert(made)
        return made

    ca_file, certificate = tmp_path / "ca.pem", tmp_path / "client.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    ca.issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    strict = context()
    strict.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(strict)
    good, evil = serve(ssl_context=strict), serve(ssl_context=context())
    image, secret = Seed(2).image(sizes=(50,)), Seed(3).image(sizes=(60,))
    image.load_into(evil.app, "app", tag="v1")
    secret.load_into(good.app, "secret", tag="v1")

    def lead_astray(request: Request) -> Answer | None:
        if request.kind != "blob":
            return None
        return Response(
            307, [("Location", f"{good.url}/v2/secret/blobs/{request.reference}?led=astray")]
        )

    evil.app.intercept = lead_astray
    common = {"ca_file": str(ca_file)}
    ran = sync(
        {
            "source": {"url": evil.url, **common},
            "good": {"url": good.url, "client_cert": str(certificate), **common},
            "t": target,
        },
        {"from": "secret", "source": "good", "targets": ["t"], "tags": tags("v1")},
        {"from": "app", "targets": ["t"], "tags": tags("v1")},
    )
    assert sorted(ran.statuses()) == ["failed", "synced"]
    assert held(target, "secret", secret), "the certificate serves its own registry"
    assert not [entry for entry in good.journal.entries if "led" in entry.query]


# Token services.


@pytest.mark.rule("R2")
def test_credentials_go_to_the_token_service_and_tokens_to_the_registry_only(serve, target):
    source = serve(auth=TokenService({USER: SECRET}, anonymous=False))
    image = Seed(5).image().load_into(source.app, "app", tag="v1")
    text = json.dumps({"registries": {"a": {"url": source.url, **LOGIN}}, "mappings": []})
    where = (f"{source.address}/app:v1", f"{target.address}/app:v1")
    ran = run_regsync("copy", "-vv", "--no-artifacts", "-c", "-", *where, stdin=text)
    assert ran.status == 0
    assert held(target, "app", image)
    for entry in source.journal.entries:
        is_token = entry.target.startswith("/token")
        assert (
            base64.b64encode(f"{USER}:{SECRET}".encode()).decode() in str(entry.headers)
        ) == is_token
    assert not [entry for entry in target.journal.entries if "authorization" in entry.headers]
    for secret in (SECRET, basic(USER, SECRET), "token-1"):
        assert secret not in ran.out + ran.err


@pytest.mark.rule("R2")
@pytest.mark.parametrize("number", [1, 3])
def test_who_has_asked_for_tokens_gets_no_password_for_a_stray_basic_challenge(
    serve, target, number
):
    """A proxy in front of some paths is enough for one; the token is renewed instead."""
    source = serve(auth=TokenService({USER: SECRET}, anonymous=False))
    image = Seed(5).image().load_into(source.app, "app", tag="v1")
    source.app.faults.on("GET", "blob").nth(number).challenge('Basic realm="a proxy"')
    text = json.dumps({"registries": {"a": {"url": source.url, **LOGIN}}, "mappings": []})
    where = (f"{source.address}/app:v1", f"{target.address}/app:v1")
    ran = run_regsync("copy", "--json", "-q", "--no-artifacts", "-c", "-", *where, stdin=text)
    with_password = [each for each in source.journal.entries if each.authorization[0] == "basic"]
    assert {each.kind for each in with_password} == {"token"}
    assert (ran.status, ran.failed) == (0, [])
    assert held(target, "app", image)
    source.journal.matching("GET", "blob", status=401).exactly(1)
    source.journal.matching("GET", "token").exactly(2)


@pytest.fixture
def rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def answer(host: str, *rest: Any, **more: Any) -> Any:
        return look_up("127.0.0.1" if host == "cdn.evil.test" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.mark.in_process
@pytest.mark.process
@pytest.mark.rule("R4")
@pytest.mark.parametrize("secure", [False, True])
def test_a_name_that_leads_to_this_machine_gets_no_request(
    serve, target, speaker, ca, tmp_path, rebound, secure
):
    def context(name: str) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert(name).configure_cert(made)
        return made

    heard: list[bytes] = []

    def listen(connected: socket.socket) -> None:
        heard.append(connected.recv(65536))
        connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    source = serve(ssl_context=context("127.0.0.1"))
    inside = serve(ssl_context=context("inside.test")) if secure else None
    port = (inside.address if inside else speaker(listen)).rpartition(":")[2]
    Seed(1).image(sizes=(50,)).load_into(source.app, "app", tag="v1")
    source.app.intercept = lambda request: (
        Response(307, [("Location", f"https://cdn.evil.test:{port}/secret")])
        if request.kind == "blob"
        else None
    )
    entry = {"url": source.url, "ca_file": str(tmp_path / "ca.pem")}
    ran = run_regsync(
        "sync",
        "-q",
        "-c",
        "-",
        stdin=document({"source": entry, "t": target}, {"from": "app", "tags": tags("v1")}),
    )
    assert ran.status == 2
    assert "NETWORK_ERROR" in only(ran.failed)
    assert all(said.startswith(b"\x16\x03") for said in heard), "a greeting of TLS, and no request"
    assert heard or inside
    assert not (inside and inside.journal.entries)
