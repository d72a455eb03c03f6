"""Who is asked, and told what, where a registry, a token service or a proxy leads us elsewhere
(R1-R9, R20).

A network in memory has every place that an attacker could name; whoever must not be asked has a
journal that stays empty.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from conformance.content.images import Image, Seed, encode
from conformance.messages import Answer, Content, Request, Response
from conformance.registry.app import App
from conformance.registry.storage import OCI_MANIFEST
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.exchange import Reception, Site
from tests.ends import Ran, Virtual, basic, document, held, only, tags, virtual

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

USER, SECRET, IDENTITY = "captain", "Xyzzy-0pen-Sesame", "Identity-0f-Captain"
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}
HOME = "https://registry.example.test"


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


# Where an attacker may want us to go; each is there, and listens.
PLACES = {
    "http://registry.example.test:8080": "the registry's name, another port, no TLS",
    "http://evil.test": "a stranger without TLS",
    "http://169.254.169.254": "a cloud's metadata",
    "https://169.254.169.254": "a cloud's metadata",
    "https://metadata.google.internal": "a cloud's metadata",
    "https://127.0.0.1": "this machine",
    "https://localhost": "this machine",
    "https://[::1]": "this machine",
    "https://[::ffff:10.0.0.8]": "a private network",
    "https://10.0.0.8": "a private network",
    "https://2130706433": "this machine in one number",
    "https://0.0.0.0": "this machine by no address",
    f"https://{USER}:x@evil.test": "a place with a login in its name",
    "ftp://evil.test": "no HTTP",
}
STRANGERS = [
    "https://evil.test",
    "https://cdn.registry.example.test",
    "https://registry.example.test:8443",
]


class World:
    """A registry that wants a login, a plain one, and everywhere else."""

    def __init__(self, net: Virtual, auth: Any = None) -> None:
        self.image = Seed(7).image(sizes=(3000,))
        self.net = net
        self.evil = Elsewhere(self.image)
        self.app = App(auth=auth or BasicAuth({USER: SECRET}))
        self.home = net.listen(self.app, "registry.example.test", scheme="https")
        self.other = net.registry("other.test")
        for url in [*PLACES, *STRANGERS]:
            parts = urlsplit(url)
            net.listen(self.evil, parts.hostname or "", port=parts.port, scheme=parts.scheme)

    async def run(
        self, *, up: bool = False, listing: bool = False, login: dict[str, Any] = LOGIN
    ) -> Ran:
        """Copy from the registry, or to it (`up`)."""
        registries = {"home": {"url": HOME, **login}, "other": {"url": "http://other.test"}}
        ends = (
            {"source": "other", "targets": ["home"]}
            if up
            else {"source": "home", "targets": ["other"]}
        )
        self.image.load_into(self.other.app if up else self.app, "app", tag="v1")
        rule = {"glob": "*" if listing else "v1"}
        mapping = {
            "from": "app",
            **({"to": "new"} if up else {}),
            "tags": rule,
            "artifacts": {"enabled": False},
            **ends,
        }
        text = json.dumps({"registries": registries, "mappings": [mapping]})
        return await self.net.run("sync", "--json", "-vv", "--no-progress", "-c", "-", stdin=text)

    def new_tags(self) -> dict[str, str]:
        """Return what the copy has made, by tag."""
        return dict(self.other.app.tags("app"))

    def strangers_saw(self) -> list[dict[str, str]]:
        return [entry.headers for entry in self.evil.journal.entries]


@asynccontextmanager
async def world_of(auth: Any = None) -> AsyncIterator[World]:
    async with virtual() as net:
        yield World(net, auth)


def lead(kind: str, place: str) -> Callable[[Request], Answer | None]:
    """Have a registry lead us from one endpoint to a place, once a login was shown where it wants
    one.
    """

    def intercept(request: Request) -> Answer | None:
        known = request.header("authorization")
        if kind == "realm" and not (known or "").startswith("Bearer"):
            return Response(
                401, [("WWW-Authenticate", f'Bearer realm="{place}/token",service="s"')]
            )
        if not known:
            return None
        if kind == "upload" and (request.method, request.kind) == ("POST", "upload_start"):
            return Response(202, [("Location", f"{place}/upload?id=1")])
        if kind == "link" and request.kind == "tag_list":
            return Response(
                200,
                [("Link", f'<{place}/v2/app/tags/list?last=v1>; rel="next"')],
                b'{"tags": ["v1"]}',
            )
        if kind == request.kind and request.method == "GET":
            return Response(307, [("Location", f"{place}/{kind}/{request.reference}")])
        return None

    return intercept


@pytest.mark.rule("R2", "R3", "R4", "R6", "R20")
@pytest.mark.parametrize("kind", ["manifest", "blob", "upload", "realm", "link"])
@pytest.mark.parametrize("place", PLACES)
async def test_nobody_is_asked_where_it_is_not_safe(place, kind):
    async with world_of() as world:
        world.app.intercept = lead(kind, place)
        ran = await world.run(up=kind == "upload", listing=kind == "link")
        assert world.strangers_saw() == [], PLACES[place]
        code = only(ran.images)["error"]["code"]
        assert (code, ran.status) in (("NETWORK_ERROR", 2), ("AUTH_ERROR", 4)), ran.err
        for secret in (SECRET, basic(USER, SECRET)):
            assert secret not in ran.out + ran.err


@pytest.mark.rule("R1", "R3")
@pytest.mark.parametrize("kind", ["manifest", "blob", "upload"])
@pytest.mark.parametrize("place", STRANGERS)
async def test_whoever_is_asked_elsewhere_sees_no_login(place, kind):
    async with world_of() as world:
        world.app.intercept = lead(kind, place)
        ran = await world.run(up=kind == "upload")
        saw = world.strangers_saw()
        assert saw
        assert [
            headers
            for headers in saw
            if {"authorization", "proxy-authorization", "cookie"} & {*headers}
        ] == []
        # What a target does not get, although it was sent where it said, it says itself.
        assert ran.status == (2 if kind == "upload" else 0)
        if kind != "upload":
            assert held(world.other, "app", world.image)


@pytest.mark.rule("R1")
@pytest.mark.parametrize("status", [301, 302, 303, 308])
async def test_a_blob_is_fetched_from_wherever_it_is_by_any_redirect(status):
    async with world_of() as world:

        def move(request: Request) -> Answer | None:
            led = lead("blob", "https://evil.test")(request)
            return Response(status, led.headers) if isinstance(led, Response) else None

        world.app.intercept = move
        assert (await world.run()).status == 0
        assert held(world.other, "app", world.image)
        assert [headers for headers in world.strangers_saw() if "authorization" in headers] == []


@pytest.mark.rule("R1")
async def test_a_chain_that_left_the_registry_comes_back_without_credentials():
    async with world_of() as world:
        digest = world.image.document["layers"][0]["digest"]
        back = f"{HOME}/v2/app/blobs/{digest}?again=1"
        world.evil.answer = Response(307, [("Location", back)])

        def lead_out(request: Request) -> Answer | None:
            is_first = request.reference == digest and not request.parameter("again")
            return lead("blob", "https://evil.test")(request) if is_first else None

        world.app.intercept = lead_out
        ran = await world.run()
        assert ran.status in (2, 4), "the registry asks for a login, and gets none on this path"
        returned = [entry for entry in world.home.journal.entries if entry.query.get("again")]
        assert returned
        assert all("authorization" not in entry.headers for entry in returned)


@pytest.mark.rule("R1", "R3")
@pytest.mark.parametrize("kind", ["blob", "upload"])
async def test_a_stranger_that_asks_for_a_login_gets_none(kind):
    async with world_of() as world:
        world.evil.answer = Response(401, [("WWW-Authenticate", 'Basic realm="give me"')])
        world.app.intercept = lead(kind, "https://evil.test")
        ran = await world.run(up=kind == "upload")
        assert ran.status in (2, 4)
        saw = world.strangers_saw()
        assert saw
        assert [headers for headers in saw if "authorization" in headers] == []


@pytest.mark.rule("R6")
@pytest.mark.parametrize(
    "place",
    [
        *STRANGERS,
        "",
        "/v2/app/../secret",
        "/v2/app/%2e%2E/secret",
        # what is absolute is not joined, which would normalise it
        "https://registry.example.test/v2/app/../secret",
        "https://registry.example.test/v2/app/tags/.%2e/../secret",
        "http://registry.example.test",
    ],
)
async def test_a_next_page_elsewhere_is_not_asked_for(place):
    target = f"{place}/v2/other/tags/list" if not place else f"{place}/v2/app/tags/list?last=v1"
    async with world_of() as world:
        asked: list[str] = []

        def pages(request: Request) -> Answer | None:
            asked.append(request.target)
            if request.kind == "tag_list" and len(asked) < 3 and request.header("authorization"):
                return Response(200, [("Link", f'<{target}>; rel="next"')], b'{"tags": ["v1"]}')
            return None

        world.app.intercept = pages
        ran = await world.run(listing=True)
        assert world.strangers_saw() == []
        if place.startswith(
            "http://"
        ):  # its own name, as it is called behind a proxy that ends TLS
            assert ran.status == 0
        else:
            assert "this repository" in only(ran.failed)
            assert len(asked) == 2


@pytest.mark.rule("R2")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("identity", [False, True])
async def test_a_login_is_not_sent_on_by_a_token_service(status, identity):
    async with world_of(
        TokenService({USER: SECRET}, refresh_tokens={IDENTITY: USER}, anonymous=False)
    ) as world:
        home = {
            "auths": {
                "registry.example.test": {"identitytoken": IDENTITY, "auth": basic("<token>", "")}
            }
        }
        world.app.intercept = lambda request: (
            Response(status, [("Location", "https://evil.test/token")])
            if request.path == "/token"
            else None
        )
        login = {} if identity else LOGIN
        world.image.load_into(world.app, "app", tag="v1")
        registries = {"home": {"url": HOME, **login}, "other": {"url": "http://other.test"}}
        mapping = {"from": "app", "source": "home", "targets": ["other"], "tags": {"glob": "v1"}}
        text = json.dumps(
            {"registries": registries, "mappings": [{**mapping, "artifacts": {"enabled": False}}]}
        )
        ran = await world.net.run(
            "sync",
            "--json",
            "-c",
            "-",
            stdin=text,
            env={"DOCKER_AUTH_CONFIG": json.dumps(home)} if identity else None,
        )
        assert world.strangers_saw() == []
        assert str(status) in only(ran.failed)
        assert ran.status == 4


@pytest.mark.rule("R1", "R2")
@pytest.mark.provokes(
    "credential_to_realm"
)  # the audit knows one host for both, section 2.7 the same owner's too
async def test_a_realm_of_the_same_owner_gets_the_login_over_https_and_the_registry_the_token():
    async with world_of(
        TokenService({USER: SECRET}, realm="https://cdn.registry.example.test/token")
    ) as world:
        ran = await world.run()
        assert ran.status in (2, 4), "the stranger's token is none"
        saw = world.strangers_saw()
        assert {headers.get("authorization") for headers in saw} == {f"Basic {basic(USER, SECRET)}"}
        sent = {entry.headers.get("authorization") for entry in world.home.journal.entries}
        assert sent == {None, "Bearer of-a-stranger"}


@pytest.mark.rule("R5")
async def test_the_urls_of_layers_are_not_fetched():
    async with world_of() as world:
        document = dict(world.image.document)
        layer = {
            **document["layers"][0],
            "urls": ["https://evil.test/layer", "https://169.254.169.254/x"],
        }
        foreign = {
            "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
            "digest": f"sha256:{'f' * 64}",
            "size": 99,
            "urls": ["https://evil.test/foreign"],
        }
        image = world.image.with_manifest(
            encode({**document, "layers": [layer, foreign]}), OCI_MANIFEST
        )
        world.image = image
        ran = await world.run()
        assert (ran.status, ran.failed) == (0, [])
        assert world.strangers_saw() == []
        asked = [
            entry.target for place in (world.home, world.other) for entry in place.journal.entries
        ]
        assert not [target for target in asked if "f" * 64 in target]
        assert [*world.new_tags()] == ["v1"]


@pytest.mark.rule("R8")
@pytest.mark.parametrize(
    "host",
    [
        "registry.example.test.evil.test",
        "evil-registry.example.test",
        "example.test",
        "x.registry.example.test",
    ],
)
async def test_a_name_that_looks_alike_gets_no_login(host):
    async with world_of() as world:
        alike = world.net.listen(App(auth=BasicAuth({USER: SECRET})), host, scheme="https")
        login = {"auths": {"registry.example.test": {"auth": basic(USER, SECRET)}}}
        registries = {"source": f"https://{host}", "t": world.other}
        text = document(registries, {"from": "app", "tags": tags("v1")})
        ran = await world.net.run(
            "sync", "-c", "-", stdin=text, env={"DOCKER_AUTH_CONFIG": json.dumps(login)}
        )
        assert ran.status == 4
        assert alike.journal.entries
        assert not [entry for entry in alike.journal.entries if "authorization" in entry.headers]


@pytest.mark.rule("R9")
async def test_a_registry_that_speaks_no_tls_is_not_asked_without():
    async with virtual() as net:
        plain = net.registry("registry.example.test")
        ran = await net.sync(
            {"source": HOME, "t": "http://other.test"}, {"from": "app", "tags": tags("v1")}
        )
        assert ran.status == 2
        assert plain.journal.entries == []
        assert "no connection" in only(ran.failed)
