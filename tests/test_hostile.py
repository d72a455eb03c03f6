"""Who is asked, told what, and how much of it is kept, where a registry, a token service or a proxy is
hostile: the rules R1 to R20 of docs/protocol-facts.md section 9.2.

A network in memory has every place that an attacker could name; whoever must not be asked has a
journal that stays empty. What broken answers come to is in test_hostile_answers.py.
"""

from __future__ import annotations

import json
import socket
import ssl
import tracemalloc
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from conformance.http import Reception, Site
from conformance.images import Image, Seed, encode
from conformance.messages import Answer, Content, Request, Response
from conformance.registry import App
from conformance.storage import OCI_INDEX, OCI_MANIFEST
from conformance.tokens import BasicAuth, TokenService
from tests.ends import Ran, Virtual, basic, copy, document, held, only, sync, tags

USER, SECRET, IDENTITY = "captain", "Xyzzy-0pen-Sesame", "Identity-0f-Captain"
PAIR = basic(USER, SECRET)
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}
HOME = "https://registry.example.test"


# The stage: a registry that wants a login, a plain one, and everywhere else.


class Elsewhere(Site):
    """A place that gives and takes everything, a token to whoever asks for one."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        self.image = image
        self.answer: Response | None = None  # to whatever is asked

    def start(self, request: Request) -> Answer | Reception:
        if self.answer:
            return Response(self.answer.status, list(self.answer.headers))
        if request.method in ("PUT", "POST", "PATCH"):
            return Reception(Content(), lambda received: Response(201))
        if request.path.startswith("/blob/"):
            return Response(200, [], self.image.blobs[request.path[6:]])
        if request.path.startswith("/manifest/"):
            return Response(200, [("Content-Type", OCI_MANIFEST)], self.image.body)
        return Response(200, [], b'{"token": "of-a-stranger"}')

    def saw(self) -> list[dict[str, str]]:
        """Return the headers of each request."""
        return [entry.headers for entry in self.journal.entries]


# Where an attacker may want us to go; each is there, and listens.
PLACES = {
    "http://registry.example.test:8080": "the registry's name, another port, no TLS",
    "http://evil.test": "a stranger without TLS",
    "http://169.254.169.254": "a cloud's metadata",
    "https://169.254.169.254": "a cloud's metadata",
    "https://metadata.google.internal": "a cloud's metadata",
    "https://127.0.0.1": "this machine",
    "https://localhost": "this machine",
    "https://[::ffff:10.0.0.8]": "a private network",
    "https://2130706433": "this machine in one number",
    f"https://{USER}:x@evil.test": "a place with a login in its name",
    "ftp://evil.test": "no HTTP",
}
STRANGERS = [
    "https://evil.test",
    "https://cdn.registry.example.test",
    "https://registry.example.test:8443",
]


class Astray:
    """A registry that wants a login, a plain one, and everywhere else."""

    def __init__(self, world: Virtual, auth: Any = None) -> None:
        self.world = world
        self.image = Seed(7).image(sizes=(3000,))
        self.evil = Elsewhere(self.image)
        self.app = App(auth=auth or BasicAuth({USER: SECRET}))
        self.home = world.listen(self.app, "registry.example.test", scheme="https")
        self.other = world.registry("other.test")
        for url in [*PLACES, *STRANGERS]:
            parts = urlsplit(url)
            world.listen(self.evil, parts.hostname or "", port=parts.port, scheme=parts.scheme)

    async def run(
        self, *, up: bool = False, login: dict[str, Any] = LOGIN, env: Any = None, glob: str = "v1"
    ) -> Ran:
        """Copy from the registry, or to it (`up`)."""
        home, other = {"url": HOME, **login}, {"url": "http://other.test"}
        self.image.load_into(self.other.app if up else self.app, "app", "v1")
        registries = {"source": other if up else home, "target": home if up else other}
        text = document(registries, {"from": "app", "to": "new", "tags": tags(glob)})
        options = ("--json", "-vv", "--no-progress", "-c", "-")
        return await self.world.run("sync", *options, stdin=text, env=env)


@pytest.fixture
def astray(world: Virtual) -> Astray:
    return Astray(world)


def lead(kind: str, place: str, status: int = 307) -> Callable[[Request], Answer | None]:
    """Have a registry lead us from one endpoint to a place, once a login was shown where it wants
    one.
    """

    def intercept(request: Request) -> Answer | None:
        known = request.header("authorization")
        if kind == "realm" and not (known or "").startswith("Bearer"):
            challenge = f'Bearer realm="{place}/token",service="s"'
            return Response(401, [("WWW-Authenticate", challenge)])
        if not known:
            return None
        if kind == "upload" and (request.method, request.kind) == ("POST", "upload_start"):
            return Response(202, [("Location", f"{place}/upload?id=1")])
        if kind == "link" and request.kind == "tag_list":
            link = f'<{place}/v2/app/tags/list?last=v1>; rel="next"'
            return Response(200, [("Link", link)], b'{"tags": ["v1"]}')
        if kind == request.kind and request.method == "GET":
            return Response(status, [("Location", f"{place}/{kind}/{request.reference}")])
        return None

    return intercept


SOME = list(PLACES)[:4]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *(("blob", place) for place in PLACES),
        *((kind, place) for kind in ("upload", "manifest", "realm", "link") for place in SOME),
    ],
)
async def test_nobody_is_asked_where_it_is_not_safe(astray, kind, place):
    astray.app.intercept = lead(kind, place)
    ran = await astray.run(up=kind == "upload", glob="*" if kind == "link" else "v1")
    assert astray.evil.saw() == [], PLACES[place]
    code = only(ran.images)["error"]["code"]
    assert (code, ran.status) in (("NETWORK_ERROR", 2), ("AUTH_ERROR", 4)), ran.err
    for secret in (SECRET, PAIR):
        assert secret not in ran.out + ran.err


@pytest.mark.parametrize(
    ("kind", "place", "status"),
    [
        ("manifest", STRANGERS[0], 307),
        ("upload", STRANGERS[0], 202),
        ("blob", STRANGERS[0], 301),
        ("blob", STRANGERS[1], 302),
        ("blob", STRANGERS[2], 303),
    ],
)
async def test_whoever_is_asked_elsewhere_sees_no_login(astray, kind, place, status):
    astray.app.intercept = lead(kind, place, status)
    ran = await astray.run(up=kind == "upload")
    assert astray.evil.saw()
    for headers in astray.evil.saw():
        assert {"authorization", "proxy-authorization", "cookie"}.isdisjoint(headers)
    # What a target does not get, although it was sent where it said, it says itself.
    assert ran.status == (2 if kind == "upload" else 0)
    assert kind == "upload" or held(astray.other, "new", astray.image)


async def test_a_chain_that_left_the_registry_comes_back_without_credentials(astray):
    digest = astray.image.document["layers"][0]["digest"]
    back = f"{HOME}/v2/app/blobs/{digest}?again=1"
    astray.evil.answer = Response(307, [("Location", back)])

    def lead_out(request: Request) -> Answer | None:
        is_first = request.reference == digest and not request.parameter("again")
        return lead("blob", STRANGERS[0])(request) if is_first else None

    astray.app.intercept = lead_out
    ran = await astray.run()
    assert ran.status in (2, 4), "the registry asks for a login, and gets none on this path"
    returned = [entry for entry in astray.home.journal.entries if entry.query.get("again")]
    assert returned
    assert all("authorization" not in entry.headers for entry in returned)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("blob", "evil.test, to which the registry redirects, asks for a login"), ("upload", "401")],
)
async def test_a_stranger_that_asks_for_a_login_gets_none(astray, kind, says):
    astray.evil.answer = Response(401, [("WWW-Authenticate", 'Basic realm="give me"')])
    astray.app.intercept = lead(kind, STRANGERS[0])
    ran = await astray.run(up=kind == "upload")
    assert ran.status in (2, 4)
    assert says in only(ran.failed)
    assert astray.evil.saw()
    assert all("authorization" not in headers for headers in astray.evil.saw())


@pytest.mark.parametrize(
    "target",
    [
        *(f"{place}/v2/app/tags/list?last=v1" for place in STRANGERS),
        "/v2/other/tags/list",
        "/v2/app/../secret/v2/app/tags/list?last=v1",
        "/v2/app/%2e%2E/secret/v2/app/tags/list?last=v1",
        # What is absolute is not joined, which would normalise it.
        f"{HOME}/v2/app/tags/.%2e/../secret/v2/app/tags/list?last=v1",
    ],
)
async def test_a_next_page_elsewhere_is_not_asked_for(astray, target):
    astray.app.intercept = link_to(target)
    ran = await astray.run(glob="*")
    assert astray.evil.saw() == []
    assert "this repository" in only(ran.failed)
    assert len(astray.home.journal.entries) == 2


async def test_a_next_page_at_the_registrys_name_without_tls_is_asked_for_with_it(astray):
    """So is it called behind a proxy that ends TLS."""
    astray.app.intercept = link_to("http://registry.example.test/v2/app/tags/list?last=v1")
    assert (await astray.run(glob="*")).status == 0


def link_to(target: str) -> Callable[[Request], Answer | None]:
    def pages(request: Request) -> Answer | None:
        is_first = request.kind == "tag_list" and not request.parameter("last")
        if is_first and request.header("authorization"):
            return Response(200, [("Link", f'<{target}>; rel="next"')], b'{"tags": ["v1"]}')
        return None

    return pages


async def test_the_urls_of_layers_are_not_fetched(astray):
    made = dict(astray.image.document)
    urls = ["https://evil.test/layer", "https://169.254.169.254/x"]
    foreign = {
        "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "digest": f"sha256:{'f' * 64}",
        "size": 99,
        "urls": ["https://evil.test/foreign"],
    }
    layers = [{**made["layers"][0], "urls": urls}, foreign]
    astray.image = astray.image.with_manifest(encode({**made, "layers": layers}), OCI_MANIFEST)
    ran = await astray.run()
    assert (ran.status, ran.failed) == (0, [])
    assert astray.evil.saw() == []
    asked = [each.target for at in (astray.home, astray.other) for each in at.journal.entries]
    assert not [target for target in asked if "f" * 64 in target]
    assert [*astray.other.app.tags("new")] == ["v1"]


# Logins.


@pytest.mark.parametrize(("status", "identity"), [(301, False), (302, True), (307, False)])
async def test_a_login_is_not_sent_on_by_a_token_service(world, status, identity):
    auth = TokenService({USER: SECRET}, refresh_tokens={IDENTITY: USER}, anonymous=False)
    astray = Astray(world, auth)
    moved = Response(status, [("Location", "https://evil.test/token")])
    astray.app.intercept = lambda request: moved if request.path == "/token" else None
    entry = {"identitytoken": IDENTITY, "auth": basic("<token>", "")}
    env = {"DOCKER_AUTH_CONFIG": json.dumps({"auths": {"registry.example.test": entry}})}
    ran = await (astray.run(login={}, env=env) if identity else astray.run())
    assert astray.evil.saw() == []
    assert str(status) in only(ran.failed)
    assert ran.status == 4


# The audit knows one host for both, section 2.7 the same owner's too.
@pytest.mark.provokes("credential_to_realm")
async def test_a_realm_of_the_same_owner_gets_the_login_over_https_and_the_registry_the_token(
    world,
):
    realm = "https://cdn.registry.example.test/token"
    astray = Astray(world, TokenService({USER: SECRET}, realm=realm))
    ran = await astray.run()
    assert ran.status in (2, 4), "the stranger's token is none"
    assert {headers.get("authorization") for headers in astray.evil.saw()} == {f"Basic {PAIR}"}
    sent = {entry.headers.get("authorization") for entry in astray.home.journal.entries}
    assert sent == {None, "Bearer of-a-stranger"}


async def test_credentials_go_to_the_token_service_and_tokens_to_the_registry_only(world):
    astray = Astray(world, TokenService({USER: SECRET}, anonymous=False))
    ran = await astray.run()
    assert ran.status == 0
    assert held(astray.other, "new", astray.image)
    for entry in astray.home.journal.entries:
        assert (PAIR in str(entry.headers)) == (entry.kind == "token")
    assert all("authorization" not in each.headers for each in astray.other.journal.entries)
    for secret in (SECRET, PAIR, "token-1"):
        assert secret not in ran.out + ran.err


@pytest.mark.parametrize("number", [1, 2])
async def test_who_has_asked_for_tokens_gets_no_password_for_a_stray_basic_challenge(world, number):
    """A proxy in front of some paths is enough for one; the token is renewed instead."""
    astray = Astray(world, TokenService({USER: SECRET}, anonymous=False))
    astray.app.faults.on("GET", "blob").nth(number).challenge('Basic realm="a proxy"')
    ran = await astray.run()
    with_password = [each for each in astray.home.journal.entries if PAIR in str(each.headers)]
    assert {each.kind for each in with_password} == {"token"}
    assert (ran.status, ran.failed) == (0, [])
    assert held(astray.other, "new", astray.image)
    astray.home.journal.matching("GET", "blob", status=401).exactly(1)
    astray.home.journal.matching("GET", "token").exactly(2)


@pytest.mark.parametrize(
    "host", ["registry.example.test.evil.test", "evil-registry.example.test", "example.test"]
)
async def test_a_name_that_looks_alike_gets_no_login(world, host):
    alike = world.listen(App(auth=BasicAuth({USER: SECRET})), host, scheme="https")
    login = {"auths": {"registry.example.test": {"auth": PAIR}}}
    text = document({"source": f"https://{host}", "t": "http://t.test"}, {"from": "app"})
    env = {"DOCKER_AUTH_CONFIG": json.dumps(login)}
    ran = await world.run("sync", "-c", "-", stdin=text, env=env)
    assert ran.status == 4
    assert alike.journal.entries
    assert all("authorization" not in entry.headers for entry in alike.journal.entries)


async def test_a_registry_that_speaks_no_tls_is_not_asked_without(world):
    plain = world.registry("registry.example.test")
    ran = await world.sync(
        {"source": HOME, "t": "http://t.test"}, {"from": "app", "tags": tags("v1")}
    )
    assert ran.status == 2
    assert plain.journal.entries == []
    assert "no connection" in only(ran.failed)


class Storage(Site):
    """A host that takes parts of uploads, and says where the next one goes."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self.location = location

    def start(self, request: Request) -> Answer | Reception:
        answer = Response(202 if request.method == "PATCH" else 201, [("Location", self.location)])
        return Reception(Content(), lambda received: answer)


@pytest.mark.parametrize("back", [True, False])
async def test_an_upload_that_went_elsewhere_comes_not_back_with_a_login(astray, world, back):
    """Else a host that the registry trusts with blobs alone has us write anything there in our own
    name.
    """
    storage = world.listen(
        Storage(f"{HOME}/v2/new/manifests/v9?x=1" if back else "/next?x=1"),
        "storage.test",
        scheme="https",
    )
    refused: list[str] = []

    def lead_out(request: Request) -> Answer | None:
        if not request.header("authorization"):
            return None
        if request.kind == "upload" and request.method == "PUT":
            refused.append(request.target)
            return Response(405)  # so that the other way is tried, which has a Location more
        if request.kind == "upload_start" and refused:
            return Response(202, [("Location", "https://storage.test/up")])
        return None

    astray.app.intercept = lead_out
    ran = await astray.run(up=True)
    assert ran.status == 2
    assert storage.journal.count("PATCH")
    assert not [entry for entry in astray.home.journal.entries if "x" in entry.query]
    later = [entry.target for entry in storage.journal.entries if "x" in entry.query]
    assert {target.partition("?")[0] for target in later} == (set() if back else {"/next"})
    assert all("authorization" not in entry.headers for entry in storage.journal.entries)


# With TLS and names as they are.


def tls(ca: Any, name: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(name).configure_cert(made)
    return made


@pytest.mark.process
def test_a_client_certificate_is_shown_to_nobody_whom_another_registry_names(
    serve, target, ca, tmp_path
):
    ca_file, certificate = tmp_path / "ca.pem", tmp_path / "client.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    ca.issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    strict = tls(ca, "127.0.0.1")
    strict.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(strict)
    good, evil = serve(ssl_context=strict), serve(ssl_context=tls(ca, "127.0.0.1"))
    Seed(2).image(sizes=(50,)).load_into(evil.app, "app", "v1")
    secret = Seed(3).image(sizes=(60,)).load_into(good.app, "secret", "v1")

    def lead_astray(request: Request) -> Answer | None:
        there = f"{good.url}/v2/secret/blobs/{request.reference}?led=astray"
        return Response(307, [("Location", there)]) if request.kind == "blob" else None

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


@pytest.mark.in_process
@pytest.mark.process
@pytest.mark.parametrize("secure", [False, True])
def test_a_name_that_leads_to_this_machine_gets_no_request(
    serve, target, speaker, ca, tmp_path, monkeypatch, secure
):
    look_up, heard = socket.getaddrinfo, list[bytes]()

    def rebound(host: str, *rest: Any, **more: Any) -> Any:
        return look_up("127.0.0.1" if host == "cdn.evil.test" else host, *rest, **more)

    def listen(connected: socket.socket) -> None:
        heard.append(connected.recv(65536))
        connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    source = serve(ssl_context=tls(ca, "127.0.0.1"))
    inside = serve(ssl_context=tls(ca, "inside.test")) if secure else None
    port = (inside.address if inside else speaker(listen)).rpartition(":")[2]
    Seed(1).image(sizes=(50,)).load_into(source.app, "app", "v1")
    there = Response(307, [("Location", f"https://cdn.evil.test:{port}/secret")])
    source.app.intercept = lambda request: there if request.kind == "blob" else None
    entry = {"url": source.url, "ca_file": str(tmp_path / "ca.pem")}
    ran = sync({"source": entry, "t": target}, {"from": "app", "tags": tags("v1")})
    assert ran.status == 2
    assert "NETWORK_ERROR" in only(ran.failed)
    assert all(said.startswith(b"\x16\x03") for said in heard), "a greeting of TLS, and no request"
    assert heard or inside
    assert not (inside and inside.journal.entries)


# What others can make large: memory, work, tasks, connections (R14). Each is an attack. It may fail
# its own image; everything else goes on as if it were not there.


def entries(count: int, size: int = 2, first: int = 0) -> list[dict[str, Any]]:
    """Return descriptors of manifests that nobody has."""
    return [
        {"mediaType": OCI_MANIFEST, "digest": f"sha256:{first + n:064x}", "size": size}
        for n in range(count)
    ]


def index_of(manifests: list[dict[str, Any]]) -> bytes:
    return encode({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests})


BOMBS: dict[str, tuple[str, bytes, str]] = {
    "lists": ("manifest", b'{"a":[' + b"[]," * 400_000 + b"[]]}", "more than 300000 values"),
    "numbers": ("manifest", b'{"a":[' + b"0," * 400_000 + b"0]}", "more than 300000 values"),
    "children": ("manifest", index_of(entries(10_001)), "more than 10000 blobs or manifests"),
    "large children": ("manifest", index_of(entries(9, size=4 << 20)), "more than 33554432 bytes"),
    "a listing of lists": (
        "tag_list",
        b'{"tags":[' + b"[]," * 300_000 + b"[]]}",
        "is not a list of names",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_answer_that_names_much_more_is_refused_unread(source, target, name):
    kind, body, words = BOMBS[name]
    media_type = OCI_INDEX if "children" in name else OCI_MANIFEST
    answer = Response(200, [("Content-Type", media_type)], body)
    source.app.intercept = lambda request: answer if request.kind == kind else None
    rule = tags("*" if kind == "tag_list" else "v1")
    ran = sync({"source": source, "t": target}, {"from": "app", "tags": rule})
    assert ran.status == 2
    assert words in only(ran.failed)
    source.journal.matching("GET").exactly(1)


def test_an_image_of_too_many_blobs_is_refused(source, target):
    """Each of its two children may have as many."""
    layers = [{**each, "mediaType": "a/b"} for each in entries(10_001)]
    seed = Seed(1)
    config = json.loads(seed.image(sizes=()).body)["config"]
    parts = [layers[:5000], layers[5000:]]
    bodies = [
        encode({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": each})
        for each in parts
    ]
    children = [seed.image().with_manifest(body, OCI_MANIFEST) for body in bodies]
    seed.index(children).load_into(source.app, "app", "v1")
    assert "the image names more than 10000 blobs" in only(copy(source, target).failed)
    assert not target.journal.count("POST")


@pytest.mark.thorough
def test_artifacts_that_all_have_artifacts_are_not_all_asked_for(source, target):
    """Each list may name 10,000: of 900 such lists a run held all, and a task for each of their
    entries.
    """
    seed = Seed(1)
    image = seed.image().load_into(source.app, "app", "v1")
    for _ in range(120):
        artifact = seed.artifact(image).load_into(source.app, "app")
        for _ in range(150):
            seed.artifact(artifact).load_into(source.app, "app")
    mapping = {"from": "app", "tags": tags("v1"), "artifacts": {"enabled": True}}
    ran = sync({"source": source, "t": target}, mapping)
    assert "more than 10000 artifacts" in only(ran.failed)
    # Those that were asked when one told too much, and none of the others.
    assert 10_000 // 150 < source.journal.count("GET", "referrers") <= 1 + 10_000 // 150 + 32


async def test_no_failed_image_keeps_the_body_that_it_failed_on(world):
    names = [f"v{number}" for number in range(60)]
    source, target = world.registry("source.test"), world.registry("target.test")
    bad = Response(200, [], b"\xff" * 2**20)
    source.app.intercept = lambda request: bad if request.kind == "manifest" else None
    tracemalloc.start()
    try:
        mapping = {"from": "app", "tags": tags(*names)}
        ran = await world.sync({"source": source, "t": target}, mapping)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ran.statuses() == ["failed"] * 60
    # Fewer are in flight, and each is there twice at most.
    assert peak < 30 * 2**20


def test_blobs_that_wait_for_their_source_hold_no_connection_to_the_targets(serve):
    source, *targets = serve(), serve(), serve()
    Seed(1).image(sizes=range(100, 130)).load_into(source.app, "app", "v1")
    registries: dict[str, Any] = {"source": {"url": source.url, "max_concurrent": 1}}
    for name, each in zip("tu", targets, strict=True):
        registries[name] = {"url": each.url, "max_concurrent": 3}
    ran = sync(registries, {"from": "app", "tags": tags("v1")})
    assert ran.statuses() == ["synced", "synced"]
    assert [each.journal.connections() <= 3 for each in targets] == [True, True]


@pytest.mark.parametrize("status", [200, 201])
async def test_a_thank_you_for_half_a_manifest_is_none(world, status):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = Seed(1).image(annotations={"a": "b" * 1_000_000}).load_into(source.app, "app", "v1")
    target.app.faults.on("PUT", "manifest").first().status(status, early=True)
    ran = await world.copy(source, target)
    assert ran.status == 0
    assert held(target, "app", image)
    target.journal.matching("PUT", "manifest").exactly(2)
    target.journal.matching("HEAD").exactly(1)
