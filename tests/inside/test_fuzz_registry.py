"""Whatever a registry answers, each endpoint's method gives a value or a SyncError, and nobody's
secret.

Heads and bodies are well framed here; what they say is fuzzed: challenges, tokens, manifests,
listings, Links, Locations, digests, error documents, waiting times. Answers come one by one, to
whomever we ask, in virtual time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.addresses import Origin
from _regsync.config import Registry
from _regsync.errors import ContentError, ProtocolBroken, Side, SyncError, WireError
from _regsync.oci import Descriptor, Manifest, check_digest, digest_of, is_tag, parse_manifest
from _regsync.registry.client import Machine, resolve_location
from _regsync.registry.endpoints import RemoteRepository, _tags_of
from _regsync.registry.runs import Transport
from _regsync.registry.upload import Upload
from tests.fuzzing import fuzz, in_virtual_time, scraps, trees
from tests.inside.wires import Blob, Item, Told, Wire

SECRET = "Xyzzy-0pen-Sesame"
BODY = b'{"schemaVersion":2,"manifests":[]}'
DIGEST = digest_of(BODY)
INDEX = "application/vnd.oci.image.index.v1+json"
BLOB = Descriptor("a/b", digest_of(b"blob"), 4)

URLS = scraps(
    "http:// https:// registry.test .registry.test other.test 127.0.0.1 [::1] [ "
    "localhost :80 :443 : / /v2/app/ /v2/app/blobs/uploads/1 tags/list?n=1000&last=b "
    "?sig=1 #x .. @ %2f \\ // 0x7f.1 user:pw@",
    SECRET,
    most=6,
)
WORDS = scraps(
    'realm= " , service= scope= repository:app:pull error= insufficient_scope '
    "invalid_token https://auth.registry.test/t http://registry.test/t \\ =",
    "Bearer ",
    "Basic ",
    "Negotiate ",
    " ",
    SECRET,
    other="\x80ÿa",
)
CHALLENGES = st.one_of(
    WORDS,
    st.just('Bearer realm="http://registry.test/t",service="s",scope="repository:app:pull"'),
    st.just('Basic realm="x"'),
    URLS.map(lambda url: f'Bearer realm="{url}",service="s"'),
)
LINKS = st.one_of(
    scraps('< > ; next " , /v2/app/tags/list?last= a http://registry.test =', " rel=", "\t"),
    URLS.map(lambda url: f'<{url}>; rel="next"'),
    st.integers(0, 3).map(lambda n: f"</v2/app/tags/list?last={n}>; rel=next"),
)
NAMED: dict[str, st.SearchStrategy[str]] = {
    "WWW-Authenticate": CHALLENGES,
    "Link": LINKS,
    "Location": URLS,
    "Docker-Content-Digest": scraps("sha256: sha512:", DIGEST, BLOB.digest, "a" * 64, most=2),
    "Content-Type": st.one_of(scraps("; application/ json", INDEX, " ", most=3), st.just(INDEX)),
    "Retry-After": scraps("1 0 9 - . e5 : inf", " ", "Thu, 01 Jan 2026 00:00:00 GMT", most=5),
    "Range": scraps("0 - bytes= 3", "9" * 30, most=4),
    "Connection": st.sampled_from(["close", "keep-alive", "Close, x"]),
    "RateLimit-Remaining": scraps("0 1 ;w= - nan", "9" * 20, most=3),
    "X-RateLimit-Reset": scraps("0 1 - nan inf", "9" * 20, most=3),
}
LEAVES = st.one_of(
    st.sampled_from(
        [
            "a",
            "latest",
            "MANIFEST_UNKNOWN",
            "TAG_INVALID",
            INDEX,
            DIGEST,
            BLOB.digest,
            SECRET,
            4,
            300,
            1e400,
        ]
    ),
    WORDS,
    st.just("a.eyJleHAiOjF9.b"),
)
DOCUMENTS = trees(
    "tags name manifest tag errors code message detail details token access_token "
    "expires_in refresh_token manifests config layers mediaType digest size error",
    DIGEST,
    leaves=LEAVES,
)
BODIES = st.one_of(
    DOCUMENTS.map(lambda tree: json.dumps(tree).encode()),
    st.just(BODY),
    st.just(b"blob"),
    st.lists(st.sampled_from(["a", "b", "c"]), max_size=3).map(
        lambda tags: json.dumps({"tags": tags}).encode()
    ),
    LEAVES.map(lambda value: json.dumps({"errors": [{"code": value, "message": value}]}).encode()),
    LEAVES.map(lambda value: json.dumps({"token": value, "expires_in": value}).encode()),
    st.sampled_from(
        [
            b"<html>",
            b"[" * 5_000,
            b'{"a":' * 5_000,
            b"1" * 5000,
            b"\xff\xfe",
            b"\x00",
            b"NaN",
            SECRET.encode(),
        ]
    ),
    st.binary(max_size=20),
)
STATUSES = st.sampled_from([
    200, 200, 200, 201, 202, 204, 206, 301, 307, 308, 400, 401, 401, 403, 404, 404, 405, 408, 416, 429, 500, 501, 503,
])  # fmt: skip


@st.composite
def wire_answers(draw: st.DrawFn) -> bytes:
    status, body = draw(STATUSES), draw(BODIES)
    lines = [f"HTTP/1.1 {status} Words", f"Content-Length: {len(body)}"]
    likely = {
        401: ["WWW-Authenticate"],
        202: ["Location"],
        307: ["Location"],
        429: ["Retry-After"],
    }.get(status, [])
    for name in [*likely, *draw(st.lists(st.sampled_from([*NAMED]), max_size=3))]:
        value = draw(NAMED[name])
        lines.append(
            f"{name}: {''.join(letter for letter in value if letter == chr(9) or letter >= ' ').strip()}"
        )
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


class Script(deque[tuple[Item, ...]]):
    """Answers for whoever asks next, on whatever connection; 404 after the last."""

    def __bool__(self) -> bool:
        return True

    def popleft(self) -> tuple[Item, ...]:
        return (
            super().popleft() if len(self) else (b"HTTP/1.1 404 None\r\nContent-Length: 0\r\n\r\n",)
        )


class World:
    """A registry's methods, over wires that answer by a script."""

    def __init__(self, scheme: str, kind: Any, login: bool, answers: list[bytes]) -> None:
        self.script = Script((each,) for each in answers)
        self.wires: list[tuple[Origin, Wire]] = []
        edge = Machine(
            {}, None, lambda path: None, lambda: 0.5, lambda: 1_767_225_600.0, lambda *_, **__: None
        )
        self.transport = Transport(edge)
        self.transport.pool.dial = self.dial
        port = 443 if scheme == "https" else 80
        who = (
            {"auth_type": "basic", "username": "me", "password": SECRET}
            if login
            else {"auth_type": "anonymous"}
        )
        registry = Registry("r", scheme, "registry.test", port, kind, **who)  # type: ignore[arg-type]
        self.host = self.transport.client(registry)
        self.repository = RemoteRepository(self.host, "app", Side.TARGET)

    async def dial(self, origin: Origin, is_foreign: bool) -> Wire:
        await anyio.lowlevel.checkpoint()
        wire = Wire()
        wire.answers = self.script
        self.wires.append((origin, wire))
        return wire

    def check(self) -> None:
        """Look at who was shown what (I6)."""
        for origin, wire in self.wires:
            own = origin.host == "registry.test" or origin.host.endswith(".registry.test")
            for seen in wire.requests:
                if not own or (self.host.origin.scheme, origin.scheme) == ("https", "http"):
                    assert "authorization" not in seen.headers
                    assert SECRET.encode() not in seen.body


async def upload(world: World, way: str) -> object:
    sent = Upload(world.repository, BLOB)
    if not await sent.start("lib" if way == "mount" else None):
        if way == "cancel":
            await sent.cancel_upload()
        elif way == "chunks":
            await in_chunks(sent)
        else:
            await sent.send(Blob(b"bl", b"ob"))
    return None


async def in_chunks(sent: Upload) -> None:
    """Send two chunks; after the first one that breaks ask for what is kept."""
    sent.in_chunks = True
    for _ in range(2):
        try:
            await sent.send(Blob(b"bl"[sent.offset :] or b"ob"), is_last=False)
        except WireError:
            if not sent.is_broken:
                raise
            await sent.resume()
        if not (sent.session and sent.offset <= BLOB.size):
            return
    await sent.send(Blob(b""))


async def fetch(world: World) -> object:
    async with await world.repository.open_blob(BLOB) as response:
        return await response.read(BLOB.size)


METHODS: dict[str, Callable[[World], Awaitable[object]]] = {
    "list": lambda world: world.repository.list_tags(),
    "head": lambda world: world.repository.head_manifest("v1"),
    "get": lambda world: world.repository.get_manifest("v1"),
    "get by digest": lambda world: world.repository.get_manifest(DIGEST),
    "referrers": lambda world: world.repository.list_referrers(DIGEST),
    "put": lambda world: world.repository.put_manifest(
        "v1", parse_manifest(BODY, content_type=INDEX)
    ),
    "has blob": lambda world: world.repository.has_blob(BLOB),
    "fetch": fetch,
    "mount": lambda world: upload(world, "mount"),
    "upload": lambda world: upload(world, "start"),
    "cancel": lambda world: upload(world, "cancel"),
    "chunks": lambda world: upload(world, "chunks"),
}


@pytest.mark.parametrize("method", METHODS)
@fuzz(60)
@given(
    st.sampled_from(["http", "https"]),
    st.sampled_from(["unknown", "gar", "acr"]),
    st.booleans(),
    st.lists(wire_answers(), max_size=6),
)
def test_any_answers_give_a_value_or_one_error(method, scheme, kind, login, answers):
    async def work() -> None:
        world = World(scheme, kind, login, answers)
        with anyio.move_on_after(86_400) as scope:
            try:
                value = await METHODS[method](world)
            except SyncError as error:
                shown = f"{error} {error.hint}"
                assert "\n" not in shown
                assert not login or SECRET not in shown
                assert len(shown) < 3000
            else:
                if method == "list":
                    assert value is None or all(map(is_tag, value))  # type: ignore[call-overload]
                if method == "get by digest":
                    assert isinstance(value, Manifest)
                    assert value.digest == DIGEST
        assert not scope.cancelled_caught
        world.check()

    in_virtual_time(work)


# One parser each.

REGISTRY = Origin("https", "registry.test", 443)


@fuzz(300)
@given(URLS | st.text(max_size=12), st.sampled_from([REGISTRY, Origin("http", "::1", 5000)]))
@example("http://[::1", REGISTRY)
@example("//a:99999", REGISTRY)
@example("http://a:٣/", REGISTRY)
def test_any_location_is_a_place_or_refused(location, base):
    try:
        origin, path = resolve_location(base, "/v2/app/", location)
    except ProtocolBroken:
        return
    assert origin.scheme in ("http", "https")
    assert 0 < origin.port < 65536
    assert f"{origin.host}{path}".isascii()
    assert " " not in f"{origin.host}{path}"
    assert path.startswith("/")
    # What it means does not change by being read again.
    assert resolve_location(base, "/v2/app/", f"{origin}{path}")[1] == path


PATH = st.text("abAB09-._~%!$&'()*+,;=:@/", max_size=12)


@fuzz(200)
@given(
    st.sampled_from(["http", "https"]),
    st.sampled_from(["a.test", "b", "[2001:db8::1]"]),
    st.integers(1, 65535),
    PATH,
    PATH,
)
@example("https", "b", 5000, "uploads/1;", ";")
def test_a_location_that_is_a_url_keeps_its_bytes(scheme, host, port, path, query):
    url = f"{scheme}://{host}:{port}/{path}?q{query}"
    origin, target = resolve_location(Origin("http", "registry.test", 80), "/v2/app/", url)
    assert origin == Origin(scheme, host.strip("[]"), port)
    assert target == f"/{path}?q{query}"


@fuzz(200)
@given(
    BODIES,
    STATUSES,
    st.lists(st.tuples(st.sampled_from([*NAMED]).map(str.lower), st.text(max_size=9)), max_size=3),
)
def test_any_error_document_is_one_line_without_secrets(body, status, headers):
    world = World("https", "unknown", True, [])
    error = world.host._error_of(Told(status, headers, body))
    assert len(str(error)) < 600
    assert "\n" not in str(error)
    assert SECRET not in str(error)
    assert error.retry_after is None or error.retry_after >= 0


@fuzz(200)
@given(
    BODIES
    | trees("tags manifest tag", DIGEST, leaves=st.sampled_from(["a", "latest"])).map(
        lambda tree: json.dumps(tree).encode()
    ),
    st.booleans(),
)
def test_any_listing_gives_tags_or_a_content_error(body, digests):
    try:
        found = _tags_of(body, digests)
    except ContentError:
        return
    assert all(map(is_tag, found))
    assert all(digest is None or check_digest(digest) for digest in found.values())
