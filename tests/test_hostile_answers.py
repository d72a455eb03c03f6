"""Answers that are broken, lie or attack, and what a user sees of them.

Every row ends by itself, in one clear line with both references, with the exit status of
docs/design.md section 2 and the side that is to blame, with nothing under the tag at the target,
and without a secret or a traceback in any output. Both registries ask for a login, so that there is
something to leak.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.storage import OCI_MANIFEST
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.sockets import Server
from tests.ends import (
    Peer,
    Ran,
    Script,
    Start,
    basic,
    document,
    held,
    only,
    run_regsync,
    sync,
    tags,
)

USER, SECRET = "captain", "Xyzzy-0pen-Sesame"
NEVER_SHOWN = (SECRET, basic(USER, SECRET), "Traceback", "\x1b", "\u202e")
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}
HTML = Response(
    200, [("Content-Type", "text/html")], b"<html><body>Welcome to the portal</body></html>"
)
NOWHERE = "sha256:" + "0" * 64
CONTENT, NETWORK, SOURCE, TARGET, AUTH = (
    f"{name}_ERROR" for name in ("CONTENT", "NETWORK", "SOURCE", "TARGET", "AUTH")
)


@dataclass
class World:
    """Two registries that want a login, an image at the source, and what a row changes of it."""

    speaker: Callable[[Script], str]
    source: Server
    target: Server
    seed: Seed
    image: Image
    source_url: str
    tag: str = "v1"

    def answer(
        self, side: str, which: dict[str, str], answer: Answer | Callable[[Request], Answer | None]
    ) -> None:
        """Have requests to one side that agree with `which` answered so."""
        app = {"source": self.source, "target": self.target}[side].app
        before = app.intercept

        def intercept(request: Request) -> Any:
            if any(getattr(request, name) != value for name, value in which.items()):
                return before(request) if before else None
            found = answer(request) if callable(answer) else answer
            if isinstance(found, Response):
                return dataclasses.replace(found, headers=list(found.headers))
            return found

        app.intercept = intercept

    def run(self) -> Ran:
        """Sync the tag, or every tag of a listing."""
        registries = {
            "source": {"url": self.source_url, **LOGIN},
            "target": {"url": self.target.url, **LOGIN},
        }
        text = document(registries, {"from": "app", "tags": tags(self.tag)})
        return run_regsync("sync", "--json", "-q", "-c", "-", stdin=text)


@pytest.fixture
def world(serve: Start, speaker: Any) -> World:
    source, target = (serve(auth=BasicAuth({USER: SECRET})) for _ in range(2))
    seed = Seed(3)
    image = seed.image(sizes=(600_000,)).load_into(source.app, "app", tag="v1")
    return World(speaker, source, target, seed, image, source.url)


def clean_output(ran: Ran) -> None:
    """Assert that nothing shows in any output that must not."""
    for text in (ran.out, ran.err):
        for secret in NEVER_SHOWN:
            assert secret not in text
        assert all(char == "\n" or char.isprintable() for char in text), text
    json.loads(ran.out)


MANIFEST = {"method": "GET", "kind": "manifest"}
BLOB = {"method": "GET", "kind": "blob"}
LISTING = {"kind": "tag_list"}
HEAD = {"method": "HEAD", "kind": "manifest"}
LOOK = {"method": "HEAD", "kind": "blob"}
START = {"method": "POST", "kind": "upload_start"}
BODY = {"method": "PUT", "kind": "upload"}
PUT = {"method": "PUT", "kind": "manifest"}

Arrange = Callable[[World], None]
Given = Any  # an answer, or a function that makes one of the image


def raw(head: str, body: bytes = b"", **headers: str) -> bytes:
    """Write an answer by hand."""
    named = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {head}", *named, "", ""]).encode() + body


def given(which: dict[str, str], answer: Given) -> Arrange:
    """Have the source answer so; what is callable is given the image."""
    return lambda world: world.answer(
        "source", which, answer(world.image) if callable(answer) else answer
    )


def listed(answer: Answer) -> Arrange:
    """Have the source answer its listing so."""

    def arrange(world: World) -> None:
        world.tag = "*"
        world.answer("source", LISTING, answer)

    return arrange


def taken(which: dict[str, str], answer: Answer) -> Arrange:
    """Have the target answer so."""
    return lambda world: world.answer("target", which, answer)


def big_layer(arrange: Arrange) -> Arrange:
    def arranged(world: World) -> None:
        world.seed.image(sizes=(24_000_000,)).load_into(world.source.app, "app", tag="v1")
        arrange(world)

    return arranged


def blobs(answer: Callable[[bytes], bytes]) -> Arrange:
    """Have the source answer each blob with bytes made of it."""

    def arrange(world: World) -> None:
        world.answer("source", BLOB, lambda asked: answer(world.image.blobs[asked.reference]))

    return arrange


def peer(script: Script) -> Arrange:
    """Put a script in the place of the source."""

    def arrange(world: World) -> None:
        world.source_url = f"http://{world.speaker(script)}"

    return arrange


def endless(opening: bytes, again: bytes, pause: float = 0.0) -> Script:
    """A peer that never ends its answer, until the client leaves."""

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(opening)
        while True:
            await peer.send(again)
            await anyio.sleep(pause)

    return script


def halted(opening: bytes, *, closes: bool) -> Script:
    """A peer that says a part, and then closes the connection or is silent."""

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(opening)
        if not closes:
            await peer.receive()

    return script


def found(**headers: str) -> Callable[[Image], Answer]:
    """Answer with the image's manifest and other headers."""
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return lambda image: Response(200, [("Content-Type", OCI_MANIFEST), *named], image.body)


# What is wrong, by the side that is to blame and the error's code: the words that say it, and how it
# comes about. Documents that are wrong are in test_images.py, who leads us elsewhere in
# test_hostile_peers.py, lists without an end in test_endless_listings.py.
ROWS: dict[tuple[str, str], dict[str, tuple[str, Arrange]]] = {
    ("source", CONTENT): {
        "a digest header that lies": (
            "asked for sha256:0000",
            given(MANIFEST, found(Docker_Content_Digest=NOWHERE)),
        ),
        "a digest header that is no digest": (
            "digest",
            given(MANIFEST, found(Docker_Content_Digest="sha256:../../etc")),
        ),
        "a manifest longer than its length": (
            "not JSON",
            given(MANIFEST, lambda image: raw("200 OK", image.body, Content_Length="99")),
        ),
        "ten megabytes without a length": (
            "4194304",
            given(MANIFEST, raw("200 OK", b" " * 10_000_000, Connection="close")),
        ),
        "a longer blob without a length": (
            "longer",
            blobs(lambda data: raw("200 OK", bytes(len(data)) + data, Connection="close")),
        ),
        "a page in the place of a listing": ("listing", listed(HTML)),
        "a listing of something else": ("a list", listed(Response(200, [], b'{"tags": {"a": 1}}'))),
        "tags that are no tags": (
            "invalid tag",
            listed(Response(200, [], json.dumps({"tags": ["v1", "../../etc\x1b[1m"]}).encode())),
        ),
        "tags that are numbers": ("invalid tag", listed(Response(200, [], b'{"tags": [1]}'))),
        "a listing without end": ("8388608", listed(Response(200, [], b" " * 9_000_000))),
    },
    ("source", SOURCE): {
        "an error page without end": (
            "status 404",
            given(MANIFEST, raw("404 Not Found", b"<" * 9_000_000, Connection="close")),
        ),
        "an error cut short": (
            "status 404",
            given(MANIFEST, raw("404 Not Found", b'{"err', Content_Length="900")),
        ),
    },
    ("source", NETWORK): {
        "a manifest cut short": (
            "too early",
            given(MANIFEST, lambda image: raw("200 OK", image.body[:50], Content_Length="900")),
        ),
        "a blob that breaks every time": (
            "too early",
            blobs(lambda data: raw("200 OK", data[:9], Content_Length=str(len(data)))),
        ),
        "a shorter blob without a length": (
            "ended after",
            blobs(lambda data: raw("200 OK", data[:-1], Connection="close")),
        ),
        "a redirect to nowhere": ("without a Location", given(MANIFEST, Response(307))),
        "a head without end": ("head of", peer(endless(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 9999))),
        "headers without end": (
            "head of",
            peer(endless(b"HTTP/1.1 200 OK\r\n", b"X-A: y\r\n" * 99)),
        ),
        "interim answers without end": (
            "no answer",
            peer(endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99, 1.0)),
        ),
        "a banner": ("HTTP/1.1", given(MANIFEST, b"SSH-2.0-OpenSSH_9.2\r\n\r\n")),
        "half a head": ("ended", peer(halted(b"HTTP/1.1 200 OK\r\nContent-", closes=True))),
        "silence in a body": (
            "moved nothing",
            peer(halted(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", closes=False)),
        ),
    },
    ("source", AUTH): {
        "a login without a challenge": ("status 401", given(MANIFEST, Response(401))),
        "a login that nobody knows": (
            "negotiate",
            given(MANIFEST, Response(401, [("WWW-Authenticate", "Negotiate")])),
        ),
    },
    ("target", CONTENT): {
        "a target's digest that is none": (
            "digest",
            taken(HEAD, Response(200, [("Docker-Content-Digest", "x\x7f")])),
        ),
        "a blob stored as another": (
            "instead of",
            taken(BODY, Response(201, [("Docker-Content-Digest", NOWHERE)])),
        ),
        "a manifest stored as another": (
            "instead of",
            taken(PUT, Response(201, [("Docker-Content-Digest", NOWHERE)])),
        ),
    },
    ("target", TARGET): {
        "a page in the place of a session": ("status 200", taken(START, HTML)),
        "an upload redirected": ("status 307", taken(BODY, Response(307, [("Location", "/x")]))),
        "a blob refused in its middle": (
            "SIZE_INVALID",
            big_layer(
                taken(
                    BODY, dataclasses.replace(error(413, "SIZE_INVALID", "too large"), early=True)
                )
            ),
        ),
        "a blob refused in its middle without a word": (
            "status 400",
            big_layer(taken(BODY, raw("400 Bad Request", Content_Length="0"))),
        ),
        "blobs accepted and thrown away": (
            "MANIFEST_BLOB_UNKNOWN",
            taken(BODY, Response(201, early=False)),
        ),
        "a manifest redirected": ("status 307", taken(PUT, Response(307, [("Location", "/x")]))),
        "another thank you": ("status 204", taken(PUT, Response(204))),
    },
    ("target", NETWORK): {
        "an upload without a location": ("without a Location", taken(START, Response(202))),
        "an upload to spaces": ("no URL", taken(START, Response(202, [("Location", "/v2/a b")]))),
        "a blob accepted before it was sent": (
            "before the blob",
            big_layer(taken(BODY, Response(201, early=True))),
        ),
    },
}


@pytest.mark.rule("R3", "R4", "R6", "R11", "R12", "R13", "R14", "R17", "R18")
@pytest.mark.provokes("blob_pulled_twice")  # a size that differs is asked for twice
@pytest.mark.parametrize(
    ("blame", "name"),
    [pytest.param(blame, name, id=name) for blame, rows in ROWS.items() for name in rows],
)
def test_what_is_wrong_ends_in_one_clear_line(world, blame, name):
    side, code = blame
    words, arrange = ROWS[blame][name]
    arrange(world)
    ran = world.run()
    line = only(ran.failed)
    assert [
        other for other in ran.err.splitlines() if other != line and not other.startswith("hint: ")
    ] == []
    assert f": {code}: " in line
    assert words in line
    assert len(line) < 1200
    lost = only(ran.images)
    assert line.startswith(f"failed {lost['source']} -> {lost['target']}: ")
    assert (lost["status"], lost["error"]["code"], lost["error"]["side"]) == ("failed", code, side)
    assert ran.status == (4 if code == AUTH else 2)
    assert not world.target.app.tags("app")
    clean_output(ran)


# What is withstood.


@pytest.mark.rule("R17")
def test_an_answer_with_garbage_behind_it_counts_and_its_connection_does_not(world):
    def answer(request: Request) -> Answer:
        body = world.image.blobs[request.reference]
        return raw("200 OK", body + b"HTTP/1.1 200 OK\r\n\r\nmore", Content_Length=str(len(body)))

    world.answer("source", BLOB, answer)
    ran = world.run()
    assert ran.status == 0
    assert held(world.target, "app", world.image)


def test_a_listing_with_an_empty_page_and_several_links_is_read_to_its_end(world):
    def answer(request: Request) -> Answer:
        last = request.parameter("last")
        first = '<https://elsewhere.test/a,b>; rel="first"; title="rel=next, <x>"'
        following = {None: "m", "m": "z"}.get(last)
        links = (
            [("Link", f"{first}, </v2/app/tags/list?last={following}>; rel=next")]
            if following
            else []
        )
        names = {None: ["v1"], "m": [], "z": ["v2"]}[last]
        return Response(200, links, json.dumps({"tags": names}).encode())

    world.tag = "*"
    world.image.load_into(world.source.app, "app", tag="v2")
    world.answer("source", LISTING, answer)
    ran = world.run()
    assert (ran.status, ran.statuses()) == (0, ["synced", "synced"])
    assert world.source.journal.count("GET", "tag_list", status=200) == 3


def test_a_target_that_hides_blobs_behind_403_is_written_all_the_same(world):
    world.seed.image().load_into(world.target.app, "app", tag="v1")
    world.answer("target", LOOK, error(403, "DENIED", "no heads"))
    ran = world.run()
    assert (ran.status, ran.err) == (0, "")
    assert held(world.target, "app", world.image)
    assert world.target.journal.count("HEAD", "blob"), "else this tests nothing"


def test_nulls_and_digests_in_a_listing_are_left_out(world):
    world.tag = "*"
    names = [None, "", NOWHERE, "v1"]
    body = json.dumps({"tags": names}).encode()
    world.answer("source", LISTING, Response(200, [], body))
    ran = world.run()
    assert (ran.status, len(ran.images)) == (0, 1)


def test_a_listing_of_null_is_empty(world):
    world.tag = "*"
    shown = []
    for names in (None, []):
        world.answer("source", LISTING, Response(200, [], json.dumps({"tags": names}).encode()))
        ran = world.run()
        shown.append((ran.status, ran.images, ran.err))
    assert shown[0] == shown[1]


@pytest.mark.rule("R12")
def test_a_target_that_lies_about_every_blob_gets_no_tag(world):
    sizes = {digest: str(len(data)) for digest, data in world.image.blobs.items()}
    world.answer(
        "target", START, lambda request: Response(201) if request.parameter("mount") else None
    )
    world.answer(
        "target", LOOK, lambda request: raw("200 OK", Content_Length=sizes[request.reference])
    )
    ran = world.run()
    assert ran.status == 2
    assert "MANIFEST_BLOB_UNKNOWN" in only(ran.failed)
    assert not world.target.app.tags("app")


# What tests/unit/test_tokens.py tells of words and lifetimes is not repeated here.
TOKENS: dict[str, tuple[Answer, str, int]] = {
    "a page": (HTML, "usable token", 4),
    "not found": (Response(404), "404", 4),
    "two megabytes": (Response(200, [], b'{"token": "' + b"x" * 2_000_000 + b'"}'), "1048576", 2),
    "longer than any head": (
        Response(200, [], json.dumps({"token": "x" * 65_537}).encode()),
        "usable token",
        4,
    ),
    "out of order": (Response(503), "503", 2),
    "not http": (b"220 mail ready\r\n\r\n", "HTTP/1.1", 2),
}


@pytest.mark.rule("R2", "R14")
@pytest.mark.parametrize("name", TOKENS)
def test_a_token_service_that_is_broken_ends_in_one_line(serve, target, name):
    answer, words, status = TOKENS[name]
    source = serve(auth=TokenService({USER: SECRET}))
    Seed(5).image().load_into(source.app, "app", tag="v1")
    source.app.intercept = lambda request: answer if request.path == "/token" else None
    ran = sync(
        {"source": {"url": source.url, **LOGIN}, "t": target}, {"from": "app", "tags": tags("v1")}
    )
    assert words in only(ran.failed)
    assert only(ran.images)["error"]["side"] == "source"
    assert ran.status == status
    assert not target.app.tags("app")
    clean_output(ran)
    assert not [entry for entry in source.journal.entries if "xxx" in str(entry.headers)]
    if name != "out of order":  # an outage, whose probes tests/test_outage.py counts
        source.journal.matching("GET", "token").at_most(1)


# Codings that nobody asked for (R15).


@pytest.mark.rule("R15")
@pytest.mark.parametrize("coding", ["gzip", "GZIP", "zstd", "identity, br", "\x1b[1mx"])
@pytest.mark.parametrize("what", ["tag_list", "manifest", "blob", "token"])
def test_a_coding_that_is_only_claimed_changes_nothing(serve, target, what, coding):
    source = serve(auth=TokenService({USER: SECRET}))
    image = Seed(1).image(sizes=(70_000,)).load_into(source.app, "app", tag="v1")

    def amend(request: Request, answer: Answer) -> Answer:
        kind = "token" if request.path == "/token" else request.kind
        if isinstance(answer, Response) and kind == what and answer.status == 200:
            return Response(200, [*answer.headers, ("Content-Encoding", coding)], answer.body)
        return answer

    source.app.amend = amend
    mapping = {"from": "app", "tags": tags("*" if what == "tag_list" else "v1")}
    ran = sync({"source": {"url": source.url, **LOGIN}, "t": target}, mapping)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    asked = [entry for entry in source.journal.entries if not entry.target.startswith("/token")]
    assert {entry.headers.get("accept-encoding") for entry in asked} == {"identity"}


@pytest.mark.rule("R15")
def test_an_error_stays_that_error_in_whatever_coding(source, target):
    packed = Response(404, [("Content-Encoding", "gzip")], b"\x1f\x8b\x08\x00whatever")
    source.app.intercept = lambda request: packed if request.kind == "manifest" else None
    ran = sync({"source": source, "t": target}, {"from": "app", "tags": tags("v1")})
    assert "status 404" in only(ran.failed)
    assert only(ran.images)["error"]["status"] == 404


OK = b"HTTP/1.1 200 OK\r\n"
PAGE = b'{"tags":["v1"]}'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\nf\r\n" + PAGE + b"\r\n0\r\n"

SHAPES: dict[str, tuple[bytes, str]] = {
    "both framings": (OK + b"Content-Length: 3\r\n" + CHUNKED + b"\r\n", ""),
    "chunked twice": (
        OK + b"Transfer-Encoding: chunked\r\n" + CHUNKED + b"\r\n",
        "multiple Transfer-Encoding",
    ),
    "a coding before chunks": (
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding",
    ),
    "almost chunked": (OK + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", "Transfer-Encoding"),
    "chunked by a control": (OK + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", "HTTP/1.1"),
    "two lengths": (
        OK + b"Content-Length: 15\r\nContent-Length: 16\r\n\r\n" + PAGE,
        "conflicting Content-Length",
    ),
    "a list of lengths": (
        OK + b"Content-Length: 15, 16\r\n\r\n" + PAGE,
        "conflicting Content-Length",
    ),
    "a length with a sign": (OK + b"Content-Length: +15\r\n\r\n" + PAGE, "bad Content-Length"),
    "a length in hexadecimal": (OK + b"Content-Length: 0xf\r\n\r\n" + PAGE, "bad Content-Length"),
    "a length beyond all": (
        OK + b"Content-Length: " + b"9" * 300 + b"\r\n\r\n" + PAGE,
        "bad Content-Length",
    ),
    "a space before the colon": (OK + b"Content-Length : 15\r\n\r\n" + PAGE, "illegal header line"),
    "a NUL in a value": (
        OK + b"X: a\x00b\r\nContent-Length: 15\r\n\r\n" + PAGE,
        "illegal header line",
    ),
    "a CR alone in a value": (
        OK + b"X: a\rY: b\r\nContent-Length: 15\r\n\r\n" + PAGE,
        "illegal header line",
    ),
    "a line without a colon": (OK + b"Content-Length\r\n\r\n" + PAGE, "illegal header line"),
    "a continuation of nothing": (OK + b" Content-Length: 15\r\n\r\n" + PAGE, "continuation line"),
    "a chunk of negative size": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n-f\r\n" + PAGE,
        "illegal chunk header",
    ),
    "a chunk without end": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
        "illegal chunk header",
    ),
    "a chunk that ends elsewhere": (
        OK + CHUNKED.replace(b"\r\n0", b"XX0"),
        "malformed chunk footer",
    ),
    "another protocol": (
        OK.replace(b"200 OK", b"101 Switching") + b"Upgrade: x\r\n\r\n",
        "HTTP/1.1",
    ),
    "a status of two digits": (OK.replace(b"200", b"20") + b"\r\n", "illegal status line"),
    "a connection that ends": (OK + b"Connection: close\r\nContent-Length: 15\r\n\r\n" + PAGE, ""),
    "two answers at once": ((OK + b"Content-Length: 15\r\n\r\n" + PAGE) * 2, ""),
    "the same length twice": (OK + b"Content-Length: 15\r\nContent-Length: 15\r\n\r\n" + PAGE, ""),
    "trailers that frame": (OK + CHUNKED + b"Transfer-Encoding: x\r\n\r\n", "Transfer-Encoding"),
    "trailers with a length": (OK + CHUNKED + b"Content-Length: 3\r\n\r\n", ""),
    # RFC 9112 sections 2.2 and 5.2 let a client read these, and there is one way to do so.
    "lines that end in LF": (b"HTTP/1.1 200 OK\nContent-Length: 15\n\n" + PAGE, ""),
    "a value on two lines": (
        OK + b"X: a\r\n Content-Length: 3\r\nContent-Length: 15\r\n\r\n" + PAGE,
        "",
    ),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 15\r\n\r\n" + PAGE, ""),
}

# Nothing of these is doubtful: the connection may serve again.
CLEAR = {
    "the same length twice",
    "trailers with a length",
    "lines that end in LF",
    "a value on two lines",
}


@pytest.mark.rule("R17")
@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_is_one_answer_or_none(speaker, target, name):
    said, words = SHAPES[name]
    served: list[int] = []

    async def script(peer: Peer) -> None:
        served.append(0)
        while await peer.head():
            served[-1] += 1
            # A second exchange that read what was left of the first would get these tags.
            await peer.send(
                said
                if len(served) == served[-1] == 1
                else OK + b"Content-Length: 15\r\n\r\n" + PAGE
            )

    # One request at a time, so that the second finds the first one's connection.
    source = {"url": f"http://{speaker(script)}", "max_concurrent": 1}
    text = document({"source": source, "t": target}, {"from": "app"}, {"from": "app/two"})
    ran = run_regsync("sync", "-q", "--dry-run", "--json", "-c", "-", stdin=text)
    failed = [line for line in ran.err.splitlines() if "/app:*" in line]
    if words:
        assert words in only(failed)
        assert "/app:" in only(failed)
        assert "\x0b" not in ran.err
    else:
        assert failed == []
    assert [each["selected"] for each in ran.report["mappings"]][-1] == 1
    assert served[0] == 1 or name in CLEAR, "what was read doubtfully is read no more"
