"""Registries that are broken, lie or attack, and what a user sees of it.

Every row ends by itself, in one clear line with both references, with the exit status of
docs/design.md section 2 and the side that is to blame, with nothing under the tag at the target,
and without a secret or a traceback in any output. Both registries ask for a login, so that there is
something to leak.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme

from _regsync.addresses import Origin
from _regsync.errors import ProtocolBroken
from _regsync.net.streams import Timeouts
from _regsync.registry.redirects import check_foreign, resolve_location
from conformance.content.images import Image, Seed, encode
from conformance.messages import Answer, Request, Response, digest_of, error
from conformance.registry.app import App
from conformance.registry.storage import DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.exchange import Reception, Site
from conformance.server.sockets import Server
from tests.ends import QUICK, Ran, Start, basic, copy, held, only, run_regsync, until_blank_line

USER, SECRET = "captain", "Xyzzy-0pen-Sesame"
NEVER_SHOWN = (SECRET, basic(USER, SECRET), "Traceback", "\x1b", "\u202e")
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}
HTML = Response(
    200, [("Content-Type", "text/html")], b"<html><body>Welcome to the portal</body></html>"
)
SLOW = QUICK._replace(head=0.15, idle=0.15, manifest_put=0.15, finish=0.15)


@dataclass
class World:
    """Two registries, an image at the source, and what a row changes of it."""

    serve: Start
    speaker: Callable[[Callable[[socket.socket], None]], str]
    source: Server
    target: Server
    seed: Seed
    image: Image
    reference: str = "v1"
    source_url: str = ""
    target_url: str = ""
    timeouts: Timeouts = QUICK
    listing: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def load(self, image: Image) -> Image:
        """Give the source another image under the tag."""
        self.image = image.load_into(self.source.app, "app", tag="v1")
        return image

    def answer(
        self, side: str, answer: Answer | Callable[[Request], Answer | None], **which: Any
    ) -> None:
        """Have requests to one side that agree with `which` answered so."""
        server = {"source": self.source, "target": self.target}[side]
        before = server.app.intercept

        def intercept(request: Request) -> Any:
            if all(getattr(request, name) == value for name, value in which.items()):
                found = answer(request) if callable(answer) else answer
                if isinstance(found, Response):
                    return dataclasses.replace(found, headers=list(found.headers))
                return found
            return before(request) if before else None

        server.app.intercept = intercept

    def run(self) -> Ran:
        """Copy the tag, or sync the repository."""
        registries = {
            "source": {"url": self.source_url or self.source.url, **LOGIN},
            "target": {"url": self.target_url or self.target.url, **LOGIN},
        }
        mapping = {
            "from": "app",
            "source": "source",
            "targets": ["target"],
            "tags": {"glob": "*" if self.listing else self.reference},
            "artifacts": {"enabled": False},
        }
        if self.listing:
            text = json.dumps({"registries": registries, "mappings": [mapping]})
            return run_regsync(
                "sync", "--json", "-q", "-c", "-", stdin=text, timeouts=self.timeouts
            )
        text = json.dumps({"registries": registries, "mappings": []})
        hosts = [registries[side]["url"].partition("://")[2] for side in ("source", "target")]
        colon = "@" if ":" in self.reference else ":"
        return run_regsync(
            "copy",
            "--json",
            "-q",
            "--no-artifacts",
            "-c",
            "-",
            f"{hosts[0]}/app{colon}{self.reference}",
            f"{hosts[1]}/app:v1",
            stdin=text,
            timeouts=self.timeouts,
        )


def registry(serve: Start) -> Server:
    return serve(auth=BasicAuth({USER: SECRET}))


@pytest.fixture
def world(serve: Start, speaker: Any) -> World:
    seed = Seed(3)
    made = World(
        serve, speaker, registry(serve), registry(serve), seed, seed.image(sizes=(600_000,))
    )
    made.load(made.image)
    return made


def clean_output(ran: Ran) -> None:
    """Assert that nothing shows in any output that must not."""
    for text in (ran.out, ran.err):
        for secret in NEVER_SHOWN:
            assert secret not in text
        assert all(char == "\n" or char.isprintable() for char in text), text
    json.loads(ran.out)


MANIFEST = {"method": "GET", "kind": "manifest"}
BLOB = {"method": "GET", "kind": "blob"}
HEAD = {"method": "HEAD", "kind": "manifest"}
LOOK = {"method": "HEAD", "kind": "blob"}
START = {"method": "POST", "kind": "upload_start"}
BODY = {"method": "PUT", "kind": "upload"}
PUT = {"method": "PUT", "kind": "manifest"}


def raw(head: str, body: bytes = b"", **headers: str) -> bytes:
    """Write an answer by hand."""
    lines = [
        f"HTTP/1.1 {head}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def at(side: str, which: dict[str, str], answer: Any) -> Callable[[World], None]:
    return lambda world: world.answer(side, answer(world) if callable(answer) else answer, **which)


def manifest(
    change: Callable[[dict[str, Any]], dict[str, Any]], media_type: str = OCI_MANIFEST
) -> Any:
    """Have the source hold a manifest with a changed document; no digest is told."""

    def arrange(world: World) -> None:
        body = encode(change(world.image.document))
        world.answer("source", Response(200, [("Content-Type", media_type)], body), **MANIFEST)

    return arrange


def layer_of(image: Image) -> dict[str, Any]:
    return dict(image.document["layers"][0])


def blob_answer(change: Callable[[bytes], bytes]) -> Callable[[World], None]:
    """Have the source answer every blob with changed bytes, framed in order."""

    def arrange(world: World) -> None:
        def answer(request: Request) -> Answer:
            return Response(200, [], change(world.image.blobs[request.reference]))

        world.answer("source", answer, **BLOB)

    return arrange


def unframed_blob(change: Callable[[bytes], bytes]) -> Callable[[World], None]:
    """The same without a length: the end of the connection ends the body."""

    def arrange(world: World) -> None:
        def answer(request: Request) -> Answer:
            return raw("200 OK", change(world.image.blobs[request.reference]), Connection="close")

        world.answer("source", answer, **BLOB)

    return arrange


def cut_blob(world: World) -> None:
    """Have the source end every blob after its first half, whatever length it said."""

    def answer(request: Request) -> Answer:
        body = world.image.blobs[request.reference]
        return raw("200 OK", body[: len(body) // 2], Content_Length=str(len(body)))

    world.answer("source", answer, **BLOB)


def peer(script: Callable[[socket.socket], None]) -> Callable[[World], None]:
    """Put a script in the place of the source."""

    def arrange(world: World) -> None:
        world.source_url = f"http://{world.speaker(script)}"

    return arrange


def says(*pieces: bytes) -> Callable[[socket.socket], None]:
    """A peer that answers every request with the same bytes and closes."""

    def script(connected: socket.socket) -> None:
        if until_blank_line(connected):
            for piece in pieces:
                connected.sendall(piece)

    return script


def endless(opening: bytes, again: bytes) -> Callable[[socket.socket], None]:
    """A peer that never ends its answer, until the client leaves."""

    def script(connected: socket.socket) -> None:
        until_blank_line(connected)
        connected.sendall(opening)
        while True:
            connected.sendall(again)

    return script


def floods(world: World) -> None:
    world.timeouts = SLOW
    peer(endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99))(world)


def half_closed(opening: bytes) -> Callable[[socket.socket], None]:
    """A peer that says a part, closes its direction only and waits for ours."""

    def script(connected: socket.socket) -> None:
        until_blank_line(connected)
        connected.sendall(opening)
        connected.shutdown(socket.SHUT_WR)
        connected.recv(65536)

    return script


def silent(opening: bytes) -> Callable[[World], None]:
    """A peer that says a part and then nothing, while the connection stays."""

    def script(connected: socket.socket) -> None:
        until_blank_line(connected)
        connected.sendall(opening)
        connected.recv(65536)

    def arrange(world: World) -> None:
        world.timeouts = SLOW
        peer(script)(world)

    return arrange


def listing(answer: Any) -> Callable[[World], None]:
    """Have the source answer its listing so."""

    def arrange(world: World) -> None:
        world.listing = True
        world.answer("source", answer(world) if callable(answer) else answer, kind="tag_list")

    return arrange


def by_digest(arrange: Callable[[World], None]) -> Callable[[World], None]:
    def arranged(world: World) -> None:
        world.reference = world.image.top
        arrange(world)

    return arranged


def index_with(change: Callable[[dict[str, Any]], dict[str, Any]], drop: bool = False) -> Any:
    """Have the source hold an index whose first entry is changed, or whose first child is not
    there.
    """

    def arrange(world: World) -> None:
        whole = world.seed.index(platforms=("linux/amd64", "linux/arm64"))
        document = whole.document
        document["manifests"][0] = change(document["manifests"][0])
        world.load(whole.with_manifest(encode(document), OCI_INDEX))
        if drop:
            del world.source.app.repositories["app"].manifests[
                whole.document["manifests"][0]["digest"]
            ]

    return arrange


def big_layer(arrange: Callable[[World], None]) -> Callable[[World], None]:
    def arranged(world: World) -> None:
        world.load(world.seed.image(sizes=(24_000_000,)))
        arrange(world)

    return arranged


def challenge(text: str) -> Response:
    return Response(401, [("WWW-Authenticate", text)])


def deep(world: World) -> None:
    body = world.image.body[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    world.answer("source", Response(200, [("Content-Type", OCI_MANIFEST)], body), **MANIFEST)


UGLY = "\x1b[31mred\x1b[0m\r\nfailed b -> c: fake line\u202e\u2028 \x07\x9b0m" + "z" * 5000
NOWHERE = "sha256:" + "0" * 64
CONTENT, NETWORK, SOURCE, TARGET, AUTH = (
    f"{name}_ERROR" for name in ("CONTENT", "NETWORK", "SOURCE", "TARGET", "AUTH")
)

# id: side, code, what the line says, how the world is broken
ROWS: dict[str, tuple[str, str, str, Callable[[World], None]]] = {
    # Manifests of the source.
    "html": ("source", CONTENT, "not JSON", at("source", MANIFEST, HTML)),
    "truncated json": (
        "source",
        CONTENT,
        "not JSON",
        at(
            "source",
            MANIFEST,
            lambda w: Response(200, [("Content-Type", OCI_MANIFEST)], w.image.body[:99]),
        ),
    ),
    "an empty manifest": ("source", CONTENT, "no body", at("source", MANIFEST, Response(200))),
    "json that is no object": (
        "source",
        CONTENT,
        "not an object",
        at("source", MANIFEST, Response(200, [("Content-Type", "application/json")], b"[1]")),
    ),
    "a digest header that lies": (
        "source",
        CONTENT,
        "asked for sha256:0000",
        at(
            "source",
            MANIFEST,
            lambda w: Response(
                200,
                [("Content-Type", OCI_MANIFEST), ("Docker-Content-Digest", NOWHERE)],
                w.image.body,
            ),
        ),
    ),
    "a digest header that is no digest": (
        "source",
        CONTENT,
        "is not a digest",
        at(
            "source",
            MANIFEST,
            lambda w: Response(
                200,
                [("Content-Type", OCI_MANIFEST), ("Docker-Content-Digest", "sha256:../../etc")],
                w.image.body,
            ),
        ),
    ),
    "another manifest than the digest's": (
        "source",
        CONTENT,
        "asked for sha256:",
        by_digest(manifest(lambda document: {**document, "annotations": {"a": "b"}})),
    ),
    "a manifest cut short": (
        "source",
        NETWORK,
        "bytes too early",
        at("source", MANIFEST, lambda w: raw("200 OK", w.image.body[:50], Content_Length="900")),
    ),
    "a manifest longer than its length": (
        "source",
        CONTENT,
        "not JSON",
        at(
            "source",
            MANIFEST,
            lambda w: raw("200 OK", w.image.body, Content_Length="99", Content_Type=OCI_MANIFEST),
        ),
    ),
    "ten megabytes of manifest": (
        "source",
        CONTENT,
        "4194304",
        at("source", MANIFEST, Response(200, [("Content-Type", OCI_MANIFEST)], b" " * 10_000_000)),
    ),
    "ten megabytes without a length": (
        "source",
        CONTENT,
        "4194304",
        at("source", MANIFEST, raw("200 OK", b" " * 10_000_000, Connection="close")),
    ),
    "a manifest that is an index too": (
        "source",
        CONTENT,
        "both a manifest",
        manifest(lambda document: {**document, "manifests": []}),
    ),
    "an index that is a manifest too": (
        "source",
        CONTENT,
        "fields of",
        manifest(lambda document: {**document, "mediaType": OCI_INDEX}, OCI_INDEX),
    ),
    "a header that says another type": (
        "source",
        CONTENT,
        "name different types",
        manifest(lambda document: document, DOCKER_MANIFEST),
    ),
    "schema 1": (
        "source",
        CONTENT,
        "schema 1",
        manifest(
            lambda document: {"schemaVersion": 1, "fsLayers": []},
            "application/vnd.docker.distribution.manifest.v1+prettyjws",
        ),
    ),
    "schema 1 as plain json": (
        "source",
        CONTENT,
        "schema 1",
        manifest(lambda document: {"schemaVersion": 1, "fsLayers": []}, "application/json"),
    ),
    "json without end in depth": ("source", CONTENT, "nests deeper", deep),
    "a layer that is a path": (
        "source",
        CONTENT,
        "layers[0]",
        manifest(
            lambda document: {
                **document,
                "layers": [{**document["layers"][0], "digest": "../../x"}],
            }
        ),
    ),
    "a layer of negative size": (
        "source",
        CONTENT,
        "is not a size",
        manifest(lambda document: {**document, "layers": [{**document["layers"][0], "size": -1}]}),
    ),
    "a digest nobody can verify": (
        "source",
        CONTENT,
        "blake3",
        manifest(
            lambda document: {
                **document,
                "layers": [{**document["layers"][0], "digest": "blake3:" + "0" * 64}],
            }
        ),
    ),
    "one digest with two sizes": (
        "source",
        CONTENT,
        "two sizes",
        manifest(
            lambda document: {
                **document,
                "layers": [document["layers"][0], {**document["layers"][0], "size": 7}],
            }
        ),
    ),
    "an error with control characters": (
        "source",
        SOURCE,
        "red",
        at("source", MANIFEST, error(404, "MANIFEST_\x1b[1mUNKNOWN", UGLY)),
    ),
    "an error page": (
        "source",
        SOURCE,
        "status 404",
        at("source", MANIFEST, dataclasses.replace(HTML, status=404)),
    ),
    "an error page without end": (
        "source",
        SOURCE,
        "status 404",
        at("source", MANIFEST, raw("404 Not Found", b"<" * 9_000_000, Connection="close")),
    ),
    "an error cut short": (
        "source",
        SOURCE,
        "status 404",
        at("source", MANIFEST, raw("404 Not Found", b'{"err', Content_Length="900")),
    ),
    # Redirects: one that leads back to itself ends as an error (I12).
    "a redirect to itself": (
        "source",
        NETWORK,
        "more than 10 redirects",
        at("source", MANIFEST, lambda w: Response(307, [("Location", "/v2/app/manifests/v1")])),
    ),
    "a redirect to nowhere": (
        "source",
        NETWORK,
        "without a Location",
        at("source", MANIFEST, Response(307)),
    ),
    "a redirect to a file": (
        "source",
        NETWORK,
        "http or https URL",
        at("source", BLOB, Response(307, [("Location", "file:///etc/passwd")])),
    ),
    "a redirect to letters that no host has": (
        "source",
        NETWORK,
        "no URL may have",
        at("source", BLOB, Response(307, [("Location", "http://ex\xe4mple.test/x")])),
    ),
    "a redirect with a password": (
        "source",
        NETWORK,
        "http or https URL",
        at("source", BLOB, Response(307, [("Location", "http://a:b@127.0.0.1/x")])),
    ),
    "a redirect that is no url": (
        "source",
        NETWORK,
        "is not a URL",
        at("source", BLOB, Response(307, [("Location", "http://[::1/x")])),
    ),
    # Blobs of the source.
    "another blob of the same size": (
        "source",
        CONTENT,
        "match its digest",
        blob_answer(lambda data: bytes(len(data))),
    ),
    "a longer blob": (
        "source",
        CONTENT,
        "its descriptor says",
        blob_answer(lambda data: data + b"x"),
    ),
    "a shorter blob": (
        "source",
        CONTENT,
        "its descriptor says",
        blob_answer(lambda data: data[:-1]),
    ),
    "a longer blob without a length": (
        "source",
        CONTENT,
        "longer than the",
        unframed_blob(lambda data: bytes(len(data)) + data),
    ),
    "a shorter blob without a length": (
        "source",
        NETWORK,
        "ended after",
        unframed_blob(lambda data: data[:-1]),
    ),
    "a page in the place of a blob": (
        "source",
        CONTENT,
        "its descriptor says",
        at("source", BLOB, HTML),
    ),
    "no such blob": (
        "source",
        SOURCE,
        "status 404",
        at("source", BLOB, error(404, "BLOB_UNKNOWN", "unknown")),
    ),
    "a manifest that lies about a size": (
        "source",
        CONTENT,
        "its descriptor says",
        manifest(lambda document: {**document, "layers": [{**document["layers"][0], "size": 7}]}),
    ),
    "a blob that breaks every time": ("source", NETWORK, "bytes too early", cut_blob),
    # Children.
    "a child that is not there": (
        "source",
        SOURCE,
        "status 404",
        index_with(lambda entry: entry, drop=True),
    ),
    "a child of another size": (
        "source",
        CONTENT,
        "bytes",
        index_with(lambda entry: {**entry, "size": entry["size"] + 1}),
    ),
    "a child of another type": (
        "source",
        CONTENT,
        "",
        index_with(lambda entry: {**entry, "mediaType": DOCKER_MANIFEST}),
    ),
    # Listings.
    "a listing that is a page": ("source", CONTENT, "the tag listing", listing(HTML)),
    "a listing without a list": (
        "source",
        CONTENT,
        "the tag listing",
        listing(Response(200, [], b"[]")),
    ),
    "a listing of something else": (
        "source",
        CONTENT,
        "is not a list",
        listing(Response(200, [], b'{"tags": {"a": 1}}')),
    ),
    "tags that are no tags": (
        "source",
        CONTENT,
        "an invalid tag",
        listing(Response(200, [], json.dumps({"tags": ["v1", "../../etc\x1b[1m"]}).encode())),
    ),
    "tags that are numbers": (
        "source",
        CONTENT,
        "an invalid tag",
        listing(Response(200, [], b'{"tags": [1]}')),
    ),
    "a listing without end": (
        "source",
        CONTENT,
        "8388608",
        listing(Response(200, [], b" " * 9_000_000)),
    ),
    "a next page elsewhere": (
        "source",
        NETWORK,
        "not in this repository",
        listing(
            Response(
                200,
                [("Link", '<http://localhost:1/v2/app/tags/list>; rel="next"')],
                b'{"tags":["a"]}',
            )
        ),
    ),
    "a next page of another repository": (
        "source",
        NETWORK,
        "not in this repository",
        listing(Response(200, [("Link", '</v2/other/tags/list>; rel="next"')], b'{"tags":["a"]}')),
    ),
    "a next page that leads to itself": (
        "source",
        SOURCE,
        "page 2 leads back to page 2",
        listing(
            Response(200, [("Link", '</v2/app/tags/list?n=1>; rel="next"')], b'{"tags":["a"]}')
        ),
    ),
    "no such repository": (
        "source",
        SOURCE,
        "no such repository",
        listing(error(404, "NAME_UNKNOWN", "x")),
    ),
    # Peers that do not speak HTTP.
    "a head without end": (
        "source",
        NETWORK,
        "head of the answer",
        peer(endless(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 9999)),
    ),
    "headers without end": (
        "source",
        NETWORK,
        "head of the answer",
        peer(endless(b"HTTP/1.1 200 OK\r\n", b"X-A: y\r\n" * 99)),
    ),
    "interim answers without end": ("source", NETWORK, "no answer", floods),
    "a banner": ("source", NETWORK, "HTTP/1.1", peer(says(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"))),
    "bytes": ("source", NETWORK, "HTTP/1.1", peer(says(bytes(range(256)) * 9))),
    "a line that closes": ("source", NETWORK, "ended", peer(says(b""))),
    "half a head": ("source", NETWORK, "ended", peer(half_closed(b"HTTP/1.1 200 OK\r\nContent-"))),
    "half a body": (
        "source",
        NETWORK,
        "too early",
        peer(half_closed(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")),
    ),
    "a length that is no number": (
        "source",
        NETWORK,
        "HTTP/1.1",
        peer(says(b"HTTP/1.1 200 OK\r\nContent-Length: 1x\r\n\r\n")),
    ),
    "two lengths": (
        "source",
        NETWORK,
        "HTTP/1.1",
        peer(says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}")),
    ),
    "chunks that are none": (
        "source",
        NETWORK,
        "HTTP/1.1",
        peer(says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")),
    ),
    "silence": ("source", NETWORK, "no answer", silent(b"")),
    "silence in a body": (
        "source",
        NETWORK,
        "moved nothing",
        silent(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"),
    ),
    # Logins.
    "a login without a challenge": (
        "source",
        AUTH,
        "status 401",
        at("source", MANIFEST, Response(401)),
    ),
    "a login that nobody knows": (
        "source",
        AUTH,
        "negotiate",
        at("source", MANIFEST, challenge("Negotiate")),
    ),
    "a password refused": (
        "source",
        AUTH,
        "refused the credentials",
        at("source", MANIFEST, challenge('Basic realm="x"')),
    ),
    "a realm of a stranger": (
        "source",
        AUTH,
        "evil.example",
        at("source", MANIFEST, challenge('Bearer realm="https://evil.example/token"')),
    ),
    "a realm in the cloud's metadata": (
        "source",
        AUTH,
        "private address",
        at("source", MANIFEST, challenge('Bearer realm="http://169.254.169.254/token"')),
    ),
    "a realm with user info": (
        "source",
        AUTH,
        "user info",
        at("source", MANIFEST, challenge('Bearer realm="https://a:b@evil.example/token"')),
    ),
    # Targets.
    "a target that is closed for repairs": (
        "target",
        TARGET,
        "status 503",
        at("target", HEAD, Response(503)),
    ),
    "a target that does not tell digests": (
        "target",
        CONTENT,
        "not JSON",
        lambda w: (w.answer("target", Response(200), **HEAD), w.answer("target", HTML, **MANIFEST))[
            0
        ],
    ),
    "a target's digest that is none": (
        "target",
        CONTENT,
        "is not a digest",
        at("target", HEAD, Response(200, [("Docker-Content-Digest", "x\x7f")])),
    ),
    "an upload without a location": (
        "target",
        NETWORK,
        "without a Location",
        at("target", START, Response(202)),
    ),
    "an upload to a file": (
        "target",
        NETWORK,
        "http or https URL",
        at("target", START, Response(202, [("Location", "file:///x")])),
    ),
    "an upload to spaces": (
        "target",
        NETWORK,
        "no URL may have",
        at("target", START, Response(202, [("Location", "/v2/a b")])),
    ),
    "a page in the place of a session": ("target", TARGET, "status 200", at("target", START, HTML)),
    "a target without uploads": (
        "target",
        TARGET,
        "status 404",
        at("target", START, error(404, "NAME_UNKNOWN", "no")),
    ),
    "an upload redirected": (
        "target",
        TARGET,
        "status 307",
        at("target", BODY, Response(307, [("Location", "/x")])),
    ),
    "a target that forbids": (
        "target",
        AUTH,
        "DENIED",
        at("target", START, error(403, "DENIED", "not yours")),
    ),
    "a blob stored as another": (
        "target",
        CONTENT,
        "instead of",
        at("target", BODY, Response(201, [("Docker-Content-Digest", NOWHERE)])),
    ),
    "a blob refused in its middle": (
        "target",
        TARGET,
        "SIZE_INVALID",
        big_layer(
            at(
                "target",
                BODY,
                dataclasses.replace(error(413, "SIZE_INVALID", "too large"), early=True),
            )
        ),
    ),
    "a blob refused in its middle without a word": (
        "target",
        TARGET,
        "status 400",
        big_layer(at("target", BODY, raw("400 Bad Request", Content_Length="0"))),
    ),
    "a blob accepted before it was sent": (
        "target",
        NETWORK,
        "answered before the blob was sent",
        big_layer(at("target", BODY, Response(201, early=True))),
    ),
    "blobs accepted and thrown away": (
        "target",
        TARGET,
        "MANIFEST_BLOB_UNKNOWN",
        at("target", BODY, Response(201, early=False)),
    ),
    "a line cut after every blob": ("target", NETWORK, "connection", at("target", BODY, b"")),
    "a manifest refused": (
        "target",
        TARGET,
        "MANIFEST_INVALID",
        at("target", PUT, error(400, "MANIFEST_INVALID", UGLY)),
    ),
    "a manifest stored as another": (
        "target",
        CONTENT,
        "instead of",
        at("target", PUT, Response(201, [("Docker-Content-Digest", NOWHERE)])),
    ),
    "a manifest redirected": (
        "target",
        TARGET,
        "status 307",
        at("target", PUT, Response(307, [("Location", "/x")])),
    ),
    "a page in the place of a thank you": (
        "target",
        TARGET,
        "status 204",
        at("target", PUT, Response(204)),
    ),
}


@pytest.mark.rule("R3", "R4", "R6", "R11", "R12", "R13", "R14", "R17", "R18")
@pytest.mark.provokes("blob_pulled_twice")  # a size that differs is asked for twice
@pytest.mark.parametrize("name", ROWS)
def test_bad_input_ends_in_one_clear_line(world: World, name: str) -> None:
    side, code, words, arrange = ROWS[name]
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
def test_an_answer_with_garbage_behind_it_counts_and_its_connection_does_not(world: World) -> None:
    def answer(request: Request) -> Answer:
        body = world.image.blobs[request.reference]
        return raw("200 OK", body + b"HTTP/1.1 200 OK\r\n\r\nmore", Content_Length=str(len(body)))

    world.answer("source", answer, **BLOB)
    ran = world.run()
    assert ran.status == 0
    assert held(world.target, "app", world.image)


def test_a_listing_with_an_empty_page_and_several_links_is_read_to_its_end(world: World) -> None:
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

    world.listing = True
    world.image.load_into(world.source.app, "app", tag="v2")
    world.answer("source", answer, kind="tag_list")
    ran = world.run()
    assert (ran.status, ran.statuses()) == (0, ["synced", "synced"])
    assert world.source.journal.count("GET", "tag_list", status=200) == 3


def test_a_target_that_hides_blobs_behind_403_is_written_all_the_same(world: World) -> None:
    world.seed.image().load_into(world.target.app, "app", tag="v1")
    world.answer("target", error(403, "DENIED", "no heads"), **LOOK)
    ran = world.run()
    assert (ran.status, ran.err) == (0, "")
    assert held(world.target, "app", world.image)
    assert world.target.journal.count("HEAD", "blob"), "else this tests nothing"


def test_nulls_and_digests_in_a_listing_are_left_out(world: World) -> None:
    world.listing = True
    tags = [None, "", NOWHERE, "v1"]
    world.answer("source", Response(200, [], json.dumps({"tags": tags}).encode()), kind="tag_list")
    ran = world.run()
    assert (ran.status, len(ran.images)) == (0, 1)


def test_a_target_that_says_yes_to_every_mount_gets_the_blobs_all_the_same(world: World) -> None:
    world.answer(
        "target", lambda request: Response(201) if request.parameter("mount") else None, **START
    )
    ran = world.run()
    assert ran.status == 0
    assert held(world.target, "app", world.image)
    assert world.target.journal.count("PUT", "upload") == 2


@pytest.mark.rule("R12")
def test_a_target_that_lies_about_every_blob_gets_no_tag(world: World) -> None:
    sizes = {digest: str(len(data)) for digest, data in world.image.blobs.items()}
    world.answer(
        "target", lambda request: Response(201) if request.parameter("mount") else None, **START
    )
    world.answer(
        "target", lambda request: raw("200 OK", Content_Length=sizes[request.reference]), **LOOK
    )
    ran = world.run()
    assert ran.status == 2
    assert "MANIFEST_BLOB_UNKNOWN" in only(ran.failed)
    assert not world.target.app.tags("app")


@pytest.mark.rule("R10")
def test_a_signed_location_shows_in_no_output(world: World) -> None:
    storage = world.serve(Storage({}, *[Response(404) for _ in range(9)]))
    signed = f"{storage.url}/bucket?X-Signature={SECRET}"
    world.answer("source", Response(307, [("Location", signed)]), **BLOB)
    ran = world.run()
    assert ran.status == 2
    assert "404" in only(ran.failed)
    clean_output(ran)


# I6: who sees credentials.


class Storage(Site):
    """Object storage that gives and takes everything at any path, and remembers who asked."""

    def __init__(self, bodies: dict[str, bytes] | None = None, *answers: Response) -> None:
        super().__init__()
        self.bodies, self.answers = bodies or {}, list(answers)

    def start(self, request: Request) -> Answer | Reception:
        if self.answers:
            return self.answers.pop(0)
        if request.method == "PUT":
            from conformance.messages import Content

            return Reception(Content(), lambda received: Response(201))
        return Response(200, [], self.bodies[request.path.rpartition("/")[2]])


def no_credentials(server: Server) -> None:
    """Assert that a host was asked, and was sent no credential of any kind."""
    assert server.journal.entries
    for entry in server.journal.entries:
        assert not {"authorization", "cookie", "proxy-authorization"} & set(entry.headers), str(
            entry
        )


@pytest.mark.rule("R1")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_blob_from_another_host_is_fetched_without_credentials(world: World, status: int) -> None:
    storage = world.serve(Storage(dict(world.image.blobs)))

    def answer(request: Request) -> Answer:
        return Response(status, [("Location", f"{storage.url}/x/{request.reference}?sig=1")])

    world.answer("source", answer, **BLOB)
    assert world.run().status == 0
    assert held(world.target, "app", world.image)
    no_credentials(storage)


@pytest.mark.rule("R1")
def test_a_chain_that_left_the_registry_comes_back_without_credentials(world: World) -> None:
    back = f"{world.source.url}/v2/app/blobs/{layer_of(world.image)['digest']}?again=1"
    storage = world.serve(Storage({}, Response(307, [("Location", back)])))

    def answer(request: Request) -> Answer | None:
        if request.reference != layer_of(world.image)["digest"] or request.parameter("again"):
            return None
        return Response(307, [("Location", f"{storage.url}/x")])

    world.answer("source", answer, **BLOB)
    ran = world.run()
    assert ran.status in (2, 4), "the registry asks for a login, and gets none on this path"
    no_credentials(storage)
    returned = [entry for entry in world.source.journal.entries if entry.query.get("again")]
    assert returned
    assert all("authorization" not in entry.headers for entry in returned)
    clean_output(ran)


@pytest.mark.rule("R1")
def test_a_stranger_that_asks_for_a_login_gets_none(world: World) -> None:
    storage = world.serve(Storage({}, *[challenge('Basic realm="give me"') for _ in range(9)]))
    world.answer("source", Response(307, [("Location", f"{storage.url}/x")]), **BLOB)
    ran = world.run()
    assert ran.status == 2
    assert "asks for a login" in only(ran.failed)
    no_credentials(storage)


@pytest.mark.rule("R3")
def test_an_upload_to_another_host_carries_no_credentials(world: World) -> None:
    storage = world.serve(Storage())
    world.answer("target", Response(202, [("Location", f"{storage.url}/up?state=1")]), **START)
    ran = world.run()
    # The bytes went where the registry wanted them; it does not have them, and says so.
    assert "MANIFEST_BLOB_UNKNOWN" in only(ran.failed)
    assert ran.status == 2
    no_credentials(storage)
    assert {entry.query["digest"] for entry in storage.journal.entries} == set(world.image.blobs)
    clean_output(ran)


@pytest.mark.rule("R1", "R3")
def test_an_upload_refused_by_another_host_with_401_gets_no_credentials(world: World) -> None:
    storage = world.serve(Storage({}, *[challenge('Basic realm="give me"') for _ in range(9)]))
    world.answer("target", Response(202, [("Location", f"{storage.url}/up")]), **START)
    ran = world.run()
    assert ran.status in (2, 4)
    no_credentials(storage)
    clean_output(ran)


PUBLIC, PRIVATE = Origin("https", "registry.example", 443), Origin("http", "127.0.0.1", 5000)


@pytest.mark.rule("R3", "R4")
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "192.168.1.1",
        "0.0.0.0",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "2002:a00:1::1",
        "localhost",
        "api.localhost",
        "224.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "metadata.google.internal",
        "localhost.",
    ],
)
def test_a_public_registry_cannot_send_us_to_a_private_address(host: str) -> None:
    with pytest.raises(ProtocolBroken, match="private address"):
        check_foreign(PUBLIC, Origin("https", host, 443))
    check_foreign(PRIVATE, Origin("http", host, 80))


@pytest.mark.rule("R3", "R4")
@pytest.mark.parametrize("host", ["storage.example", "1.1.1.1", "2606:4700::1111", "1password.com"])
def test_a_public_registry_may_send_us_to_a_public_host_over_https_only(host: str) -> None:
    check_foreign(PUBLIC, Origin("https", host, 443))
    with pytest.raises(ProtocolBroken, match="from https to http"):
        check_foreign(PUBLIC, Origin("http", host, 80))


SECURE = Origin("https", "registry.example", 8443)


@pytest.mark.parametrize(
    ("base", "location", "origin", "path"),
    [
        pytest.param(PRIVATE, "/v2/a?b=%2F&c", PRIVATE, "/v2/a?b=%2F&c", id="a path"),
        pytest.param(PRIVATE, "?s=1", PRIVATE, "/v2/x/uploads/?s=1", id="a query"),
        pytest.param(
            PRIVATE, "u-1?x=%41~", PRIVATE, "/v2/x/uploads/u-1?x=%41~", id="a relative path"
        ),
        pytest.param(
            PUBLIC, "//other.example/u", Origin("https", "other.example", 443), "/u", id="a host"
        ),
        pytest.param(
            PUBLIC, "https://O.example:8443", Origin("https", "o.example", 8443), "/", id="a url"
        ),
        pytest.param(
            PUBLIC, "http://registry.example/u?s=1", PUBLIC, "/u?s=1", id="scheme lost, no port"
        ),
        pytest.param(
            SECURE, "http://registry.example:8443/u", SECURE, "/u", id="scheme lost, same port"
        ),
        pytest.param(
            SECURE,
            "http://registry.example:80/u",
            Origin("http", "registry.example", 80),
            "/u",
            id="another port is another origin",
        ),
    ],
)
def test_locations_keep_their_bytes(base: Origin, location: str, origin: Origin, path: str) -> None:
    assert resolve_location(base, "/v2/x/uploads/", location) == (origin, path)


@pytest.fixture
def tls(ca: trustme.CA, tmp_path: Any) -> tuple[ssl.SSLContext, str]:
    """Return a server's context and the file that makes it trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    path = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return context, str(path)


@pytest.mark.rule("R3", "R4")
@pytest.mark.parametrize("which", [MANIFEST, BLOB, START], ids=["manifest", "blob", "upload"])
def test_https_is_never_left_for_http(
    serve: Start, source: Server, target: Server, tls: Any, which: dict[str, str]
) -> None:
    context, ca_file = tls
    secure = serve(ssl_context=context)
    image = Seed(5).image()
    plain = source if which is START else target

    def intercept(request: Request) -> Answer | None:
        if (request.method, request.kind) != (which["method"], which["kind"]):
            return None
        return Response(202 if which is START else 307, [("Location", f"{plain.url}/elsewhere")])

    secure.app.intercept = intercept
    ends = (source, secure) if which is START else (secure, target)
    image.load_into(ends[0].app, "app", tag="v1")
    plain.journal.clear()
    registries = {"a": {"url": secure.url, "ca_file": ca_file}}
    ran = run_regsync(
        "copy",
        "--json",
        "--no-artifacts",
        "-c",
        "-",
        f"{ends[0].address}/app:v1",
        f"{ends[1].address}/app:v1",
        stdin=json.dumps({"registries": registries, "mappings": []}),
    )
    assert ran.status == 2
    assert "from https to http" in only(ran.failed)
    assert not [entry for entry in plain.journal.entries if "elsewhere" in entry.target]
    assert not ends[1].app.tags("app")


@pytest.mark.rule("R9")
def test_plain_http_where_tls_was_expected_is_said(world: World) -> None:
    heard: list[bytes] = []

    def script(connected: socket.socket) -> None:
        heard.append(connected.recv(65536))
        connected.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    world.source_url = f"https://{world.speaker(script)}"
    ran = world.run()
    assert ran.status == 2
    assert "speak TLS" in only(ran.failed)
    assert "http://" in ran.err, "the remedy"
    assert all(said.startswith(b"\x16\x03") for said in heard)


def test_an_unknown_authority_is_said_with_the_remedy(
    serve: Start, target: Server, tls: Any
) -> None:
    secure = serve(ssl_context=tls[0])
    registries = {"a": {"url": secure.url}}
    text = json.dumps({"registries": registries, "mappings": []})
    where = (f"{secure.address}/app:v1", f"{target.address}/app:v1")
    ran = run_regsync("copy", "--json", "--no-artifacts", "-c", "-", *where, stdin=text)
    assert ran.status == 2
    assert "ca_file" in ran.err
    assert not secure.journal.entries


# Token services.

TOKENS: dict[str, tuple[Answer, str, int]] = {
    "a page": (HTML, "usable token", 4),
    "garbage": (Response(200, [], b"\x00\xff{"), "usable token", 4),
    "an empty answer": (Response(200), "usable token", 4),
    "an empty token": (Response(200, [], b'{"token": ""}'), "usable token", 4),
    "a token of two lines": (Response(200, [], b'{"token": "a\\r\\nX: y"}'), "usable token", 4),
    "a token that is a list": (Response(200, [], b'{"token": ["a"]}'), "usable token", 4),
    "not found": (Response(404), "404", 4),
    "forbidden": (error(403, "DENIED", UGLY), "403", 4),
    "the password is wrong": (error(401, "UNAUTHORIZED", "who?"), "refused the credentials", 4),
    "two megabytes": (Response(200, [], b'{"token": "' + b"x" * 2_000_000 + b'"}'), "1048576", 2),
    "elsewhere": (Response(307, [("Location", "http://127.0.0.1:1/")]), "307", 4),
    "out of order": (Response(503), "503", 2),
    "not http": (b"220 mail ready\r\n\r\n", "HTTP/1.1", 2),
}


@pytest.mark.rule("R2", "R14")
@pytest.mark.parametrize("name", TOKENS)
def test_a_token_service_that_is_broken_ends_in_one_line(
    serve: Start, target: Server, name: str
) -> None:
    answer, words, status = TOKENS[name]
    source = serve(auth=TokenService({USER: SECRET}))
    Seed(5).image().load_into(source.app, "app", tag="v1")

    def intercept(request: Request) -> Answer | None:
        if request.path != "/token":
            return None
        return answer if isinstance(answer, bytes) else dataclasses.replace(answer)

    source.app.intercept = intercept
    text = json.dumps({"registries": {"a": {"url": source.url, **LOGIN}}, "mappings": []})
    where = (f"{source.address}/app:v1", f"{target.address}/app:v1")
    ran = run_regsync("copy", "--json", "-q", "--no-artifacts", "-c", "-", *where, stdin=text)
    line = only(ran.failed)
    assert words in line
    assert f"{source.address}/app:v1" in line
    assert only(ran.images)["error"]["side"] == "source"
    assert ran.status == status
    assert not target.app.tags("app")
    clean_output(ran)
    asked = [entry for entry in source.journal.entries if "/token" in entry.target]
    if name != "out of order":  # an outage, whose probes tests/test_outage.py counts
        assert len(asked) <= 1


@pytest.mark.rule("R2")
def test_credentials_go_to_the_token_service_and_tokens_to_the_registry_only(
    serve: Start, target: Server
) -> None:
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
    serve: Start, target: Server, number: int
) -> None:
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


@pytest.mark.rule("R16", "R18")
def test_a_plain_copy_of_a_hostile_name_stays_on_its_registry(
    source: Server, target: Server
) -> None:
    """Annotations and types are the image's own business and are copied as they are."""
    image = Seed(5).image(annotations={"a": UGLY, "org.opencontainers.image.ref.name": "../../x"})
    image.load_into(source.app, "app", tag="v1")
    ran = copy(source, target)
    assert ran.status == 0
    assert held(target, "app", image)
    assert "\x1b" not in ran.out + ran.err


@pytest.mark.rule("R12")
def test_a_digest_reference_is_not_trusted_to_headers(world: World) -> None:
    other = world.seed.image()
    headers = [("Content-Type", OCI_MANIFEST), ("Docker-Content-Digest", world.image.top)]
    world.reference = world.image.top
    world.answer("source", Response(200, headers, other.body), **MANIFEST)
    ran = world.run()
    assert f"got {digest_of(other.body)}" in only(ran.failed)
    assert ran.status == 2
    assert (
        not isinstance(world.target.app, App) or not world.target.app.repositories["app"].manifests
    )
