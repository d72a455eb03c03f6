"""Answers that are broken, lie or attack, and what a user sees of them.

Every row of the first table ends by itself, in one clear line with both references, with the exit
status of docs/design.md section 2 and the side that is to blame, with nothing under the tag at the
target, and without a secret or a traceback in any output. Both registries ask for a login, so that
there is something to leak. What others wrote is one clean line wherever it is printed (R18).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from conformance.images import Image, Seed, encode
from conformance.messages import Answer, Request, Response, error
from conformance.storage import OCI_INDEX, OCI_MANIFEST
from conformance.tokens import BasicAuth, TokenService
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

USER, SECRET = "captain", "Xyzzy-0pen-Sesame-" + "q" * 60
PAIR = basic(USER, SECRET)
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}
NOWHERE = "sha256:" + "0" * 64


# The stage: two registries that want a login, an image at the source, and what a row changes of it.


class Scene:
    def __init__(self, serve: Start, speaker: Callable[[Script], str]) -> None:
        self.speaker = speaker
        self.source, self.target = (serve(auth=BasicAuth({USER: SECRET})) for _ in range(2))
        self.source_url = self.source.url
        self.tag = "v1"
        self.load(600_000)

    def load(self, size: int) -> None:
        self.image = Seed(3).image(sizes=(size,)).load_into(self.source.app, "app", "v1")

    def run(self) -> Ran:
        """Sync the tag, or every tag of a listing."""
        registries = {
            "source": {"url": self.source_url, **LOGIN},
            "target": {"url": self.target.url, **LOGIN},
        }
        ran = sync(registries, {"from": "app", "tags": tags(self.tag)})
        check_output(ran)
        return ran


@pytest.fixture
def scene(serve: Start, speaker: Any) -> Scene:
    return Scene(serve, speaker)


def check_output(ran: Ran) -> None:
    """Assert that nothing shows in any output that must not: no secret, no traceback, nothing that
    a terminal obeys.
    """
    for text in (ran.out, ran.err):
        for secret in (SECRET, PAIR, "Traceback"):
            assert secret not in text
        check_lines(text)


def check_lines(text: str) -> None:
    """Assert that every line is one that this program begins, and all of it can be printed."""
    assert [char for char in text if not (char.isprintable() or char == "\n")] == []
    begun_anew = ("synced a", "evil", "red")
    assert [line for line in text.split("\n") if line.startswith(begun_anew)] == []


def kind_of(request: Request) -> str:
    return "token" if request.path == "/token" else request.kind


def fresh(answer: Answer) -> Answer:
    """Return an answer that may be sent: the server adds to its headers."""
    if not isinstance(answer, Response):
        return answer
    return Response(answer.status, list(answer.headers), answer.body, early=answer.early)


Arrange = Callable[[Scene], None]
Given = Any  # an answer, or a function that makes one of the image and the request


def at(side: str, which: str, given: Given) -> Arrange:
    """Have one side answer requests of a method and kind so."""

    def arrange(scene: Scene) -> None:
        def intercept(request: Request) -> Answer | None:
            if f"{request.method} {request.kind}" != which:
                return None
            answer = given(scene.image, request) if callable(given) else given
            return answer and fresh(answer)

        {"source": scene.source, "target": scene.target}[side].app.intercept = intercept

    return arrange


def manifest(given: Given) -> Arrange:
    return at("source", "GET manifest", given)


def blobs(answer: Callable[[bytes], bytes]) -> Arrange:
    """Have the source answer each blob with bytes made of it."""
    return at("source", "GET blob", lambda image, asked: answer(image.blobs[asked.reference]))


def listed(answer: Answer) -> Arrange:
    """Have the source answer its listing so."""

    def arrange(scene: Scene) -> None:
        scene.tag = "*"
        at("source", "GET tag_list", answer)(scene)

    return arrange


def listed_tags(names: object) -> Arrange:
    return listed(Response(200, [], json.dumps({"tags": names}).encode()))


def taken(which: str, answer: Answer) -> Arrange:
    """Have the target answer so."""
    return at("target", which, answer)


def big_layer(arrange: Arrange) -> Arrange:
    def arranged(scene: Scene) -> None:
        scene.load(5_000_000)
        arrange(scene)

    return arranged


def raw(head: str, body: bytes = b"", **headers: str) -> bytes:
    """Write an answer by hand."""
    named = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {head}", *named, "", ""]).encode() + body


def found(**headers: str) -> Given:
    """Answer with the image's manifest and other headers."""
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return lambda image, asked: Response(200, [("Content-Type", OCI_MANIFEST), *named], image.body)


def peer(
    opening: bytes, again: bytes = b"", pause: float = 0.0, *, closes: bool = False
) -> Arrange:
    """Put in the place of the source one that says something, and then the same again without end;
    or closes the connection, or is silent.
    """

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(opening)
        while again:
            await peer.send(again)
            await anyio.sleep(pause)
        if not closes:
            await peer.receive()

    def arrange(scene: Scene) -> None:
        scene.source_url = f"http://{scene.speaker(script)}"

    return arrange


PAGE = Response(200, [("Content-Type", "text/html")], b"<html>Welcome to the portal</html>")
OTHER_DIGEST = Response(201, [("Docker-Content-Digest", NOWHERE)])
MOVED = Response(307, [("Location", "/x")])
TOO_LARGE = error(413, "SIZE_INVALID", "too large")

# What is wrong, by the side that is to blame and the error's code: the words that say it, and how it
# comes about. Documents that are wrong are in test_copy.py, who leads us elsewhere in
# test_hostile.py.
ROWS: dict[tuple[str, str], dict[str, tuple[str, Arrange]]] = {
    ("source", "CONTENT_ERROR"): {
        "a digest header that lies": (
            "asked for sha256:0000",
            manifest(found(Docker_Content_Digest=NOWHERE)),
        ),
        "a digest header that is no digest": (
            "digest",
            manifest(found(Docker_Content_Digest="sha256:../../etc")),
        ),
        "a manifest longer than its length": (
            "not JSON",
            manifest(lambda image, asked: raw("200 OK", image.body, Content_Length="99")),
        ),
        "five megabytes without a length": (
            "4194304",
            manifest(raw("200 OK", b" " * 5_000_000, Connection="close")),
        ),
        "a longer blob without a length": (
            "longer",
            blobs(lambda data: raw("200 OK", bytes(len(data)) + data, Connection="close")),
        ),
        "a page in the place of a listing": ("listing", listed(PAGE)),
        "tags that are no tags": ("invalid tag", listed_tags(["v1", "../../etc\x1b[1m"])),
        "a listing without end": ("8388608", listed(Response(200, [], b" " * 9_000_000))),
    },
    ("source", "SOURCE_ERROR"): {
        "an error page without end": (
            "status 404",
            manifest(raw("404 Not Found", b"<" * 5_000_000, Connection="close")),
        ),
        "an error in a coding": (
            "status 404",
            manifest(Response(404, [("Content-Encoding", "gzip")], b"\x1f\x8b\x08\x00whatever")),
        ),
    },
    ("source", "NETWORK_ERROR"): {
        "a manifest cut short": (
            "too early",
            manifest(lambda image, asked: raw("200 OK", image.body[:50], Content_Length="900")),
        ),
        "a blob that breaks every time": (
            "too early",
            blobs(lambda data: raw("200 OK", data[:9], Content_Length=str(len(data)))),
        ),
        "a shorter blob without a length": (
            "ended after",
            blobs(lambda data: raw("200 OK", data[:-1], Connection="close")),
        ),
        "a redirect to nowhere": ("without a Location", manifest(Response(307))),
        "a head without end": ("head of", peer(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 9999)),
        "interim answers without end": (
            "no answer",
            peer(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99, 20.0),
        ),
        "half a head": ("ended", peer(b"HTTP/1.1 200 OK\r\nContent-", closes=True)),
        "silence in a body": (
            "moved nothing",
            peer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"),
        ),
    },
    ("source", "AUTH_ERROR"): {
        "a login without a challenge": ("status 401", manifest(Response(401))),
        "a login that nobody knows": (
            "negotiate",
            manifest(Response(401, [("WWW-Authenticate", "Negotiate")])),
        ),
    },
    ("target", "CONTENT_ERROR"): {
        "a target's digest that is none": (
            "digest",
            taken("HEAD manifest", Response(200, [("Docker-Content-Digest", "x\x7f")])),
        ),
        "a blob stored as another": ("instead of", taken("PUT upload", OTHER_DIGEST)),
        "a manifest stored as another": ("instead of", taken("PUT manifest", OTHER_DIGEST)),
    },
    ("target", "TARGET_ERROR"): {
        "a page in the place of a session": ("status 200", taken("POST upload_start", PAGE)),
        "an upload redirected": ("status 307", taken("PUT upload", MOVED)),
        "a blob refused in its middle": (
            "SIZE_INVALID",
            big_layer(taken("PUT upload", Response(413, [], TOO_LARGE.body, early=True))),
        ),
        "blobs accepted and thrown away": (
            "MANIFEST_BLOB_UNKNOWN",
            taken("PUT upload", Response(201, early=False)),
        ),
        "a manifest redirected": ("status 307", taken("PUT manifest", MOVED)),
    },
    ("target", "NETWORK_ERROR"): {
        "an upload without a location": (
            "without a Location",
            taken("POST upload_start", Response(202)),
        ),
        "a blob accepted before it was sent": (
            "before the blob",
            big_layer(taken("PUT upload", Response(201, early=True))),
        ),
    },
}


LONG = ("silence in a body", "interim answers without end", "out of order")


@pytest.mark.provokes("blob_pulled_twice")  # a size that differs is asked for twice
@pytest.mark.parametrize(
    ("blame", "name"),
    [
        pytest.param(blame, name, id=name, marks=[pytest.mark.long_wait] if name in LONG else [])
        for blame, rows in ROWS.items()
        for name in rows
    ],
)
def test_what_is_wrong_ends_in_one_clear_line(scene, blame, name):
    side, code = blame
    words, arrange = ROWS[blame][name]
    arrange(scene)
    ran = scene.run()
    line = only(ran.failed)
    others = [other for other in ran.err.splitlines() if other != line]
    assert [other for other in others if not other.startswith("hint: ")] == []
    assert f": {code}: " in line
    assert words in line
    assert len(line) < 1200
    lost = only(ran.images)
    assert line.startswith(f"failed {lost['source']} -> {lost['target']}: ")
    assert (lost["status"], lost["error"]["code"], lost["error"]["side"]) == ("failed", code, side)
    assert ran.status == (4 if code == "AUTH_ERROR" else 2)
    assert not scene.target.app.tags("app")


# What a token service may say; words and lifetimes are in tests/unit/test_tokens.py.
TOKENS: dict[str, tuple[Answer, str, int]] = {
    "a page": (PAGE, "usable token", 4),
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long_wait] if name in LONG else []) for name in TOKENS],
)
def test_a_token_service_that_is_broken_ends_in_one_line(serve, target, name):
    answer, words, status = TOKENS[name]
    source = serve(auth=TokenService({USER: SECRET}))
    source.app.intercept = lambda request: fresh(answer) if kind_of(request) == "token" else None
    registries = {"source": {"url": source.url, **LOGIN}, "t": target}
    ran = sync(registries, {"from": "app", "tags": tags("v1")})
    assert words in only(ran.failed)
    assert only(ran.images)["error"]["side"] == "source"
    assert ran.status == status
    check_output(ran)
    assert not [entry for entry in source.journal.entries if "xxx" in str(entry.headers)]
    if name != "out of order":  # an outage, whose probes others count
        source.journal.matching("GET", "token").at_most(1)


# What is withstood.


def test_an_answer_with_garbage_behind_it_counts_and_its_connection_does_not(scene):
    more = b"HTTP/1.1 200 OK\r\n\r\nmore"
    blobs(lambda data: raw("200 OK", data + more, Content_Length=str(len(data))))(scene)
    assert scene.run().status == 0
    assert held(scene.target, "app", scene.image)


def test_a_listing_with_an_empty_page_and_several_links_is_read_to_its_end(scene):
    def answer(image: Image, request: Request) -> Answer:
        last = request.parameter("last") or ""
        following = {"": "m", "m": "z"}.get(last)
        first = '<https://elsewhere.test/a,b>; rel="first"; title="rel=next, <x>"'
        link = f"{first}, </v2/app/tags/list?last={following}>; rel=next"
        names = {"": ["v1"], "m": [], "z": ["v2"]}[last]
        body = json.dumps({"tags": names}).encode()
        return Response(200, [("Link", link)] if following else [], body)

    scene.tag = "*"
    scene.image.load_into(scene.source.app, "app", "v2")
    at("source", "GET tag_list", answer)(scene)
    ran = scene.run()
    assert (ran.status, ran.statuses()) == (0, ["synced", "synced"])
    scene.source.journal.matching("GET", "tag_list", status=200).exactly(3)


@pytest.mark.parametrize(
    ("names", "selected"), [([None, "", NOWHERE, "v1"], 1), (None, 0), ([], 0)], ids=str
)
def test_what_is_no_name_in_a_listing_is_left_out(scene, names, selected):
    listed_tags(names)(scene)
    ran = scene.run()
    assert (ran.status, len(ran.images)) == (0, selected)


def test_a_target_that_hides_blobs_behind_403_is_written_all_the_same(scene):
    Seed(4).image().load_into(scene.target.app, "app", "v1")
    taken("HEAD blob", error(403, "DENIED", "no heads"))(scene)
    ran = scene.run()
    assert (ran.status, ran.err) == (0, "")
    assert held(scene.target, "app", scene.image)
    assert scene.target.journal.count("HEAD", "blob"), "else this tests nothing"


def test_a_target_that_lies_about_every_blob_gets_no_tag(scene):
    def lie(image: Image, request: Request) -> Answer | None:
        return Response(201) if request.parameter("mount") else None

    at("target", "POST upload_start", lie)(scene)
    mounts = scene.target.app.intercept

    def intercept(request: Request) -> Any:
        if (request.method, request.kind) != ("HEAD", "blob"):
            return mounts(request)
        return raw("200 OK", Content_Length=str(len(scene.image.blobs[request.reference])))

    scene.target.app.intercept = intercept
    ran = scene.run()
    assert ran.status == 2
    assert "MANIFEST_BLOB_UNKNOWN" in only(ran.failed)
    assert not scene.target.app.tags("app")


@pytest.mark.parametrize(
    ("what", "coding"),
    [
        ("tag_list", "gzip"),
        ("manifest", "GZIP"),
        ("token", "\x1b[1mx"),
        *(("blob", coding) for coding in ("gzip", "zstd", "identity, br")),
    ],
)
def test_a_coding_that_is_only_claimed_changes_nothing(serve, target, what, coding):
    source = serve(auth=TokenService({USER: SECRET}))
    image = Seed(1).image(sizes=(70_000,)).load_into(source.app, "app", "v1")

    def amend(request: Request, answer: Answer) -> Answer:
        if isinstance(answer, Response) and (kind_of(request), answer.status) == (what, 200):
            return Response(200, [*answer.headers, ("Content-Encoding", coding)], answer.body)
        return answer

    source.app.amend = amend
    mapping = {"from": "app", "tags": tags("*" if what == "tag_list" else "v1")}
    ran = sync({"source": {"url": source.url, **LOGIN}, "t": target}, mapping)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    asked = [entry for entry in source.journal.entries if entry.kind != "token"]
    assert {entry.headers.get("accept-encoding") for entry in asked} == {"identity"}


# How an answer may be framed (R17): the words of what is refused, and else whether nothing of it is
# doubtful, so that the connection may serve again.
OK = b"HTTP/1.1 200 OK\r\n"
TAGS = b'{"tags":["v1"]}'
LENGTH = b"Content-Length: 15\r\n\r\n" + TAGS
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\nf\r\n" + TAGS + b"\r\n0\r\n"
SHAPES: dict[str, tuple[bytes, str]] = {
    "both framings": (OK + b"Content-Length: 3\r\n" + CHUNKED + b"\r\n", "closed"),
    "a coding before chunks": (
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding",
    ),
    "chunked by a control": (OK + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", "HTTP/1.1"),
    "two lengths": (OK + b"Content-Length: 16\r\n" + LENGTH, "conflicting Content-Length"),
    "a length beyond all": (
        OK + b"Content-Length: " + b"9" * 300 + b"\r\n\r\n" + TAGS,
        "bad Content-Length",
    ),
    "a space before the colon": (OK + b"Content-Length : 15\r\n\r\n" + TAGS, "illegal header line"),
    "a chunk that ends elsewhere": (
        OK + CHUNKED.replace(b"\r\n0", b"XX0"),
        "malformed chunk footer",
    ),
    "trailers that frame": (OK + CHUNKED + b"Transfer-Encoding: x\r\n\r\n", "Transfer-Encoding"),
    "a connection that ends": (OK + b"Connection: close\r\n" + LENGTH, "closed"),
    "two answers at once": ((OK + LENGTH) * 2, "closed"),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n" + LENGTH, "closed"),
    "the same length twice": (OK + b"Content-Length: 15\r\n" + LENGTH, "clear"),
    "trailers with a length": (OK + CHUNKED + b"Content-Length: 3\r\n\r\n", "clear"),
    # RFC 9112 sections 2.2 and 5.2 let a client read these, and there is one way to do so.
    "lines that end in LF": (b"HTTP/1.1 200 OK\nContent-Length: 15\n\n" + TAGS, "clear"),
    "a value on two lines": (OK + b"X: a\r\n Content-Length: 3\r\n" + LENGTH, "clear"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_is_one_answer_or_none(speaker, target, name):
    said, words = SHAPES[name]
    served: list[int] = []

    async def script(peer: Peer) -> None:
        served.append(0)
        while await peer.head():
            served[-1] += 1
            # A second exchange that read what was left of the first would get these tags.
            is_first = len(served) == served[-1] == 1
            await peer.send(said if is_first else OK + LENGTH)

    # One request at a time, so that the second finds the first one's connection.
    source = {"url": f"http://{speaker(script)}", "max_concurrent": 1}
    text = document({"source": source, "t": target}, {"from": "app"}, {"from": "app/two"})
    ran = run_regsync("sync", "-q", "--dry-run", "--json", "-c", "-", stdin=text)
    failed = [line for line in ran.err.splitlines() if "/app:*" in line]
    if words in ("clear", "closed"):
        assert failed == []
    else:
        assert words in only(failed)
        assert "\x0b" not in ran.err
    assert [each["selected"] for each in ran.report["mappings"]][-1] == 1
    assert served[0] == 1 or words == "clear", "what was read doubtfully is read no more"


# What others wrote, wherever it is printed (R18).

# Colours, a title, a bell, a line that begins anew, C1's CSI, bidirectional marks, what has no
# width, line ends.
UGLY = "\x1b[31mred\x1b]0;t\x07\b\r\nsynced a -> b\n\x9b0m\u202eevil\u2066\u2028\u200b\u061c\x85\x7f\u00ad"
# The same as a header's value: one line, Latin-1.
LINE = "\xff[31mred\x9b0m\x85synced a -> b\xad"


def raw_body(text: str) -> Response:
    return Response(200, [("Content-Type", OCI_MANIFEST)], text.encode())


def body(document: Any, media_type: str = OCI_MANIFEST) -> Response:
    return Response(200, [("Content-Type", media_type)], encode(document))


def image(**fields: Any) -> Response:
    return body({**Seed(1).image(sizes=(50,)).document, **fields})


def layer(**fields: Any) -> Response:
    return image(layers=[{"mediaType": "a/b", "digest": NOWHERE, "size": 9, **fields}])


def index(**fields: Any) -> Response:
    entry = {"mediaType": OCI_MANIFEST, "digest": NOWHERE, "size": 9, **fields}
    return body({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}, OCI_INDEX)


def with_header(status: int, name: str, value: str) -> Response:
    return Response(status, [(name, value)], b'{"tags": ["v1"]}')


def by_hand(head: str) -> bytes:
    return f"{head}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")


# Where a registry says it: the kind of request, the answer.
SAID: dict[str, tuple[str, Answer]] = {
    "an error's words": ("manifest", error(400, "BAD", UGLY)),
    "an error's code": ("manifest", error(404, UGLY, "no")),
    "an error's details": ("manifest", Response(400, [], encode({"details": UGLY}))),
    "an error in other bytes": ("manifest", Response(400, [], UGLY.encode("utf-16"))),
    "a reason": ("manifest", by_hand(f"HTTP/1.1 404 {LINE}")),
    "a status line": ("manifest", by_hand(f"{LINE} 200 OK")),
    "a header": ("manifest", by_hand(f"HTTP/1.1 200 OK\r\n{LINE}")),
    "a wait": ("manifest", with_header(400, "Retry-After", LINE)),
    "a digest": ("manifest", with_header(200, "Docker-Content-Digest", LINE)),
    "a content type": ("manifest", with_header(200, "Content-Type", LINE)),
    "a location": ("manifest", with_header(307, "Location", f"http://{LINE}.test/")),
    "a challenge": ("manifest", with_header(401, "WWW-Authenticate", LINE)),
    "a realm": (
        "manifest",
        with_header(401, "WWW-Authenticate", f'Bearer realm="https://evil.test/{LINE}"'),
    ),
    "a document": ("manifest", raw_body(UGLY)),
    "a layer's digest": ("manifest", layer(digest=UGLY)),
    "a key twice": ("manifest", raw_body(f"{{{json.dumps(UGLY)}:1,{json.dumps(UGLY)}:1}}")),
    "a platform": ("manifest", index(platform={"os": UGLY, "architecture": UGLY})),
    "an annotation": ("manifest", index(annotations={UGLY: UGLY})),
    "a tag": ("tag_list", Response(200, [], encode({"tags": ["v1", UGLY]}))),
    "a listing": ("tag_list", Response(200, [], UGLY.encode())),
    "a next page": ("tag_list", with_header(200, "Link", f"<http://{LINE}/>; rel=next")),
    "a token service's words": ("token", error(403, UGLY, UGLY)),
    "a token service's error": ("token", Response(400, [], encode({"error": UGLY}))),
}


@pytest.mark.parametrize("form", ["-vv", "--log-format=json"])
@pytest.mark.parametrize("name", SAID)
def test_what_a_registry_says_is_one_clean_line(serve, target, name, form):
    kind, answer = SAID[name]
    source = serve(auth=TokenService({"a": "b"})) if kind == "token" else serve()
    source.app.intercept = lambda request: fresh(answer) if kind_of(request) == kind else None
    rule = tags("*" if kind == "tag_list" else "v1")
    mapping = {"from": "app", "tags": rule, "platforms": ["linux/amd64"]}
    text = document({"source": source, "t": target}, mapping)
    ran = run_regsync("sync", "--no-progress", form, "-c", "-", stdin=text)
    assert ran.status in (2, 4)
    check_lines(ran.out)
    check_lines(ran.err)
    if form == "-vv":
        assert len(ran.failed) == 1
    else:
        events = [json.loads(line)["event"] for line in ran.err.splitlines()]
        assert events.count("image_failed") == 1


@pytest.mark.parametrize(
    "where", ["registries", "url", "from", "to", "source", "targets", "glob", "semver", "global"]
)
def test_what_a_configuration_says_is_clean_lines(where):
    mapping: dict[str, Any] = {"from": "app", "source": "a", "targets": ["a"], "tags": {}}
    registries: dict[str, Any] = {"a": {"url": "h.test"}}
    top: dict[str, Any] = {}
    match where:
        case "registries":
            registries[UGLY] = {"url": "x.test"}
        case "url":
            registries["a"]["url"] = UGLY
        case "global":
            top[UGLY] = UGLY
        case "glob" | "semver":
            mapping["tags"][where] = UGLY
        case "targets":
            mapping["targets"] = [UGLY]
        case _:
            mapping[where] = UGLY
    given = {"registries": registries, "mappings": [mapping], "global": top}
    ran = run_regsync("validate", "-", stdin=json.dumps(given))
    assert ran.status == 3
    check_lines(ran.out)
    check_lines(ran.err)
    begins = ("error: CONFIG_ERROR: ", "hint: ", "warning: ")
    assert all(line.startswith(begins) for line in ran.err.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ["{}"],
        ["tags", "{}"],
        ["tags", "h.test/a", "--semver", "{}"],
        ["sync", "-c", "{}"],
        ["copy", "a", "{}"],
    ],
    ids=str,
)
def test_what_a_command_line_says_is_one_clean_line(arguments):
    ran = run_regsync(*(each.format(UGLY) for each in arguments))
    assert ran.status == 3
    check_lines(ran.out)
    check_lines(ran.err)


# What is repeated to us (R10), and what is no login (R19). The secrets' other ways are in
# test_canary*.py.


def test_no_traceback_shows_what_was_repeated(scene):
    def repeat(request: Request) -> Answer | None:
        login = request.header("authorization")
        return f"HTTP/1.1 200 OK\r\nX-Echo {login}\r\n\r\n".encode() if login else None

    scene.source.app.intercept = repeat
    text = json.dumps({"registries": {"s": {"url": scene.source.url, **LOGIN}}, "mappings": []})
    ran = run_regsync("tags", "-vv", "-c", "-", f"{scene.source.address}/app", stdin=text)
    assert ran.status == 2
    assert "Traceback" in ran.err, "else this tests nothing"
    assert PAIR[:9] not in ran.err


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_registry_that_repeats_the_request_repeats_no_secret(scene, form):
    def repeat(request: Request) -> Answer | None:
        login = request.header("authorization")
        said = f"you sent {login}, {SECRET}; see https://bucket.test/a?X-Signature=abc123 and ask"
        if not login:
            return None
        return error(400, "BAD", said) if form == "json" else Response(400, [], said.encode())

    scene.source.app.intercept = repeat
    ran = scene.run()
    assert "you sent Basic ***, ***; see https://bucket.test/a?... and ask" in only(ran.failed)
    assert "abc123" not in ran.out + ran.err


@pytest.mark.long_wait
def test_the_query_of_a_next_page_is_in_no_log(source, target):
    def pages(request: Request) -> Answer | None:
        if request.parameter("state"):
            return Response(503)
        link = '</v2/app/tags/list?state=signed-secret>; rel="next"'
        return with_header(200, "Link", link) if request.kind == "tag_list" else None

    source.app.intercept = pages
    text = document({"source": source, "t": target}, {"from": "app"})
    ran = run_regsync("sync", "--json", "-vv", "-c", "-", stdin=text)
    assert ran.status == 2
    assert "GET " in ran.err, "else this tests nothing"
    assert "signed-secret" not in ran.out + ran.err


def test_a_digest_is_no_login():
    for word in ("registry.test:5000/app@sha256:zz", "app:v1@sha512:"):
        assert word in run_regsync("tags", word).err
    named = f"host.test/app:v1@{NOWHERE}"
    mapping = {"from": named, "source": "a", "targets": ["a"]}
    given = {"registries": {"a": {"url": "h.test"}}, "mappings": [mapping]}
    assert f"{named}'" in run_regsync("validate", "-", stdin=json.dumps(given)).err
