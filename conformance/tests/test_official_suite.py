"""The requests of the official conformance suite, release 1.1, with the answers that it accepts.

The suite is a Go program; what it asks is written here as a list of exchanges, taken from its four
workflows in 1.1.0 and 1.1.1 (where the two differ, an answer has to suit both). The harness answers
each; and each names the check of `python -m conformance check` that asks the same of any registry.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from conformance.check.checks import CODES
from conformance.check.suite import choose_checks
from conformance.client.http import Client, Connections, Reply, with_query
from conformance.content.images import Seed
from conformance.messages import digest_of
from conformance.registry.app import App
from conformance.registry.storage import OCI_INDEX, OCI_MANIFEST
from conformance.server.sockets import run_in_thread

OCTETS = {"Content-Type": "application/octet-stream"}
TAKE = {"Accept": OCI_MANIFEST}
DONE = tuple(range(200, 300))
DELETED = (*DONE, 405)  # 404 is accepted as well, but not by 1.1.0 everywhere
WELL_DELETED = (*DONE, 404, 405)
NO_NAME = ".INVALID_MANIFEST_NAME"
DUMMY = digest_of(b"hello world")
KEY = "org.opencontainers.conformance.test"

UPLOADED = "PUT upload: a whole blob (blob)"
BY_TAG = "PUT manifest: by tag, 201 and its Location gives it (image)"
BY_DIGEST = "PUT manifest: by digest, 201 and its Location gives it (image)"
DELETE_BLOB = "DELETE blob: it is gone (blob)"
DELETE_MANIFEST = "DELETE manifest: it is gone, and so are its tags (image)"
SEEN = "PUT manifest: OCI-Subject says that the subject was seen (artifact)"


def describe(media_type: str, data: bytes, /, **more: Any) -> dict[str, Any]:
    """Write a descriptor as the suite does, with a field that the specification does not know."""
    found = {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}
    return {**found, **more, "newUnspecifiedField": more.get("newUnspecifiedField")}


def write(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent="\t").encode()


class Content:
    """What the suite pushes: five images with one layer, artifacts for the last two."""

    def __init__(self, seed: Seed) -> None:
        self.seed = seed
        self.layer = seed.layer(60)
        configs = (
            {
                "author": seed.blob(8).hex(),
                "architecture": "amd64",
                "os": "linux",
                "rootfs": {"type": "layers"},
            }
            for _ in range(5)
        )
        self.configs = [write(document) for document in configs]
        layers = [describe("application/vnd.oci.image.layer.v1.tar+gzip", self.layer)]
        self.manifests = [self._manifest(config, layers) for config in self.configs]
        self.empty_layers = self._manifest(self.configs[1], [], mediaType=None)
        self.blobs = [seed.blob(33), seed.blob(38)]
        self.types = ["application/vnd.example.bread", "application/vnd.example.jam"]
        self.by_config = [self._by_config(number) for number in (0, 1)]
        self.by_type = [
            self._by_type(number, self.manifests[4], f"test layer {number}") for number in (0, 1)
        ]
        self.late = self._by_type(1, self.manifests[3], None)
        children = (self.by_config[0], self.by_type[0])
        self.index = write(
            {
                "schemaVersion": 2,
                "mediaType": OCI_INDEX,
                "artifactType": "application/vnd.example.shop",
                "manifests": [describe(OCI_MANIFEST, child) for child in children],
                "subject": describe(OCI_MANIFEST, self.manifests[4]),
                "annotations": {KEY: "test index"},
            }
        )

    def _manifest(
        self, config: bytes, layers: list[dict[str, Any]], mediaType: str | None = OCI_MANIFEST
    ) -> bytes:
        data = {
            "data": base64.b64encode(config).decode(),
            "newUnspecifiedField": "aGVsbG8gd29ybGQ=",
        }
        document = {
            "schemaVersion": 2,
            "mediaType": mediaType,
            "config": describe("application/vnd.oci.image.config.v1+json", config, **data),
            "layers": layers,
        }
        return write({key: value for key, value in document.items() if value is not None})

    def _by_config(self, number: int) -> bytes:
        return write(
            {
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": describe(self.types[number], self.blobs[number]),
                "layers": [describe("application/vnd.oci.empty.v1+json", b"{}")],
                "subject": describe(OCI_MANIFEST, self.manifests[4]),
                "annotations": {KEY: f"test config {number}"},
            }
        )

    def _by_type(self, number: int, subject: bytes, note: str | None) -> bytes:
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": self.types[number],
            "config": describe("application/vnd.oci.empty.v1+json", b"{}"),
            "layers": [describe(self.types[number], self.blobs[number])],
            "subject": describe(OCI_MANIFEST, subject),
            "annotations": {KEY: note} if note else None,
        }
        return write({key: value for key, value in document.items() if value is not None})


@dataclass
class Suite:
    """One run of the suite: every exchange is judged as it is made, and names its check."""

    client: Client
    content: Content
    repository: str
    crossed: str
    manifests_first: bool = True
    automatic: bool = False  # what OCI_AUTOMATIC_CROSSMOUNT says
    covered: list[str] = field(default_factory=list)

    def ask(
        self,
        method: str,
        target: str,
        accepted: tuple[int, ...],
        check: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        repository: str | None = None,
    ) -> Reply:
        if not target.startswith(("/", "http")):
            target = f"/v2/{repository or self.repository}/{target}"
        if body is None and method in ("POST", "PUT", "PATCH"):
            body = b""  # Go sends Content-Length: 0
        reply = self.client.ask(method, target, headers, body)
        assert reply.status in accepted, (
            f"{reply}, the suite accepts {accepted}: {reply.body[:200]!r}"
        )
        self.covered.append(check)
        return reply

    def start(self) -> Reply:
        return self.ask("POST", "blobs/uploads/", DONE, "POST upload: a session (blob)")

    def upload(self, data: bytes) -> Reply:
        where = with_query(path(self.start()), digest=digest_of(data))
        return self.ask("PUT", where, DONE, UPLOADED, OCTETS, data)

    def put(self, reference: str, body: bytes, check: str, kind: str = OCI_MANIFEST) -> Reply:
        return self.ask("PUT", f"manifests/{reference}", DONE, check, {"Content-Type": kind}, body)

    def delete(
        self, blobs: list[bytes], manifests: list[bytes], accepted: tuple[int, ...] = DELETED
    ) -> None:
        """Tear down, in the order that the suite's setting says."""

        def delete_blobs() -> None:
            for data in blobs:
                self.ask("DELETE", f"blobs/{digest_of(data)}", accepted, DELETE_BLOB)

        if not self.manifests_first:
            delete_blobs()
        for body in manifests:
            self.ask("DELETE", f"manifests/{digest_of(body)}", accepted, DELETE_MANIFEST)
        if self.manifests_first:
            delete_blobs()


def path(reply: Reply) -> str:
    """Read a Location as the suite does: the path and query of it."""
    assert reply.header("Location"), reply
    where = urlsplit(reply.header("Location"))
    return f"{where.path}?{where.query}" if where.query else where.path


def says(reply: Reply, digest: str) -> None:
    assert reply.header("Docker-Content-Digest") in ("", digest)


def pull(suite: Suite) -> None:
    content = suite.content
    for data in (content.configs[0], content.configs[1], content.layer):
        suite.upload(data)
    suite.put("tagtest0", content.manifests[0], BY_TAG)
    suite.put(digest_of(content.manifests[1]), content.manifests[1], BY_DIGEST)
    tag = suite.ask("GET", "tags/list", DONE, "GET tags/list: every tag once (tags)")
    assert "tagtest0" in json.loads(tag.body)["tags"]
    suite.put("tagtest0", content.manifests[0], "PUT manifest: a tag moves (image)")

    config = digest_of(content.configs[0])
    suite.ask("HEAD", f"blobs/{DUMMY}", (404,), "HEAD blob: 404 (absent)")
    says(suite.ask("HEAD", f"blobs/{config}", (200,), "HEAD blob: is there (blob)"), config)
    suite.ask("GET", f"blobs/{DUMMY}", (404,), "GET blob: 404 (absent)")
    suite.ask("GET", f"blobs/{config}", (200,), "GET blob: its bytes (blob)")
    for method, found in (("HEAD", "is there"), ("GET", "its bytes")):
        malformed = f"{method} manifest: by a name that no tag can have, 404 (malformed)"
        suite.ask(method, f"manifests/{NO_NAME}", (404,), malformed)
        for body in content.manifests[:2]:
            digest = digest_of(body)
            check = f"{method} manifest: by digest, {found} (image)"
            says(suite.ask(method, f"manifests/{digest}", (200,), check, TAKE), digest)
        check = f"{method} manifest: by tag, {found} (image)"
        says(
            suite.ask(method, "manifests/tagtest0", (200,), check, TAKE),
            digest_of(content.manifests[0]),
        )
    reply = suite.ask(
        "GET",
        "manifests/sha256:totallywrong",
        (400, 404),
        "GET manifest: by a malformed digest, 400 or 404 (malformed)",
        {"Content-Type": OCI_MANIFEST},
    )
    if reply.status == 400:
        assert json.loads(reply.body)["errors"][0]["code"] in CODES
    suite.delete([*content.configs[:2], content.layer], content.manifests[:2])


def push(suite: Suite) -> None:
    streamed = suite.content.seed.blob(42)
    config = suite.content.configs[1]
    where = path(suite.start())
    check = "PATCH upload: a stream without Content-Range (blob)"
    where = path(suite.ask("PATCH", where, (202,), check, OCTETS, streamed))
    path(suite.ask("PUT", with_query(where, digest=digest_of(streamed)), (201,), check, OCTETS))

    suite.ask("GET", f"blobs/{DUMMY}", (404,), "GET blob: 404 (absent)")
    check = "POST upload digest: 201 and it is there, or 202 (blob)"
    single = with_query("blobs/uploads/", digest=digest_of(config))
    reply = suite.ask("POST", single, (201, 202), check, OCTETS, config)
    path(reply)
    suite.ask("GET", f"blobs/{digest_of(config)}", (404 if reply.status == 202 else 200,), check)
    for data in (config, suite.content.layer):
        reply = suite.ask("POST", "blobs/uploads/", (202,), "POST upload: a session (blob)")
        where = with_query(path(reply), digest=digest_of(data))
        path(suite.ask("PUT", where, (201,), UPLOADED, OCTETS, data))
        suite.ask("GET", f"blobs/{digest_of(data)}", (200,), UPLOADED)
    chunks(suite)
    mounts(suite, digest_of(streamed))

    manifest = suite.content.manifests[1]
    suite.ask(
        "GET",
        f"manifests/{NO_NAME}",
        (404,),
        "GET manifest: by a name that no tag can have, 404 (malformed)",
    )
    for number in range(4):
        reply = suite.put(f"test{number}", manifest, "PUT manifest: many tags for one (image)")
        assert reply.status == 201
        path(reply)
    path(suite.put("emptylayer", suite.content.empty_layers, "PUT manifest: no layers (image)"))
    suite.ask("GET", f"manifests/{digest_of(manifest)}", (200,), BY_TAG, TAKE)
    suite.delete([config, suite.content.layer], [manifest, suite.content.empty_layers])


def chunks(suite: Suite) -> None:
    reply = suite.start()
    least = int(reply.header("OCI-Chunk-Min-Length") or 0)
    size = least * 2 - 2 if least > 22 else 42
    data = suite.content.seed.blob(size)
    half = size // 2 + 1
    first = ({**OCTETS, "Content-Range": f"0-{half - 1}"}, data[:half])
    second = ({**OCTETS, "Content-Range": f"{half}-{size - 1}"}, data[half:])
    suite.ask(
        "PATCH", path(reply), (416,), "PATCH upload: the second chunk first, 416 (blob)", *second
    )
    used = path(suite.start())
    check = "PATCH upload: chunks in order (blob)"
    reply = suite.ask("PATCH", used, (202,), check, *first)
    assert reply.header("Range") == f"0-{half - 1}"
    suite.ask("PATCH", used, (416,), "PATCH upload: a chunk twice, 416 (blob)", *first)
    reply = suite.ask("GET", used, (204,), "GET upload: by an old Location (blob)")
    assert reply.header("Range") == f"0-{half - 1}"
    reply = suite.ask("PATCH", path(reply), (202,), check, *second)
    path(suite.ask("PUT", with_query(path(reply), digest=digest_of(data)), (201,), check, OCTETS))


def mounts(suite: Suite, held: str) -> None:
    """Mount what is there and what is not; the suite has a setting for what `mount` alone does."""

    def mount(digest: str, accepted: tuple[int, ...], check: str, **source: str) -> Reply:
        target = with_query("blobs/uploads/", mount=digest, **source)
        return suite.ask("POST", target, accepted, check, repository=suite.crossed)

    alone = "POST upload mount: without from (blob)"
    path(mount(DUMMY, (202,), "POST upload mount: 202 without from where nobody has it (absent)"))
    check = "POST upload mount: a blob of another repository (blob)"
    reply = mount(held, (201, 202), check, **{"from": suite.repository})
    if reply.status == 202:
        assert path(reply).startswith(f"/v2/{suite.crossed}/blobs/uploads/")
        return
    assert path(reply) == f"/v2/{suite.crossed}/blobs/{held}"
    suite.ask("GET", path(reply), (200,), check)
    mount(held, (201 if suite.automatic else 202,), alone)


def listed(reply: Reply) -> list[str]:
    tags = json.loads(reply.body)["tags"]
    assert isinstance(tags, list)
    return tags


def discovery(suite: Suite) -> None:
    content = suite.content
    subject, later = (digest_of(content.manifests[number]) for number in (4, 3))
    for data in (content.configs[2], content.layer):
        suite.upload(data)
    for number in range(4):
        suite.put(f"test{number}", content.manifests[2], "PUT manifest: many tags for one (image)")
    suite.upload(b"{}")
    suite.upload(content.blobs[0])
    early = [
        (content.by_config[0], OCI_MANIFEST),
        (content.by_type[0], OCI_MANIFEST),
        (content.index, OCI_INDEX),
    ]
    for body, kind in early:
        assert suite.put(digest_of(body), body, SEEN, kind).header("OCI-Subject") == subject
    for data in (content.configs[4], content.layer):
        suite.upload(data)
    suite.put("tagtest0", content.manifests[4], BY_TAG)
    suite.upload(content.blobs[1])
    for body in (content.by_config[1], content.by_type[1]):
        assert suite.put(digest_of(body), body, SEEN).header("OCI-Subject") == subject
    absent = "PUT manifest: a subject that is not there (artifact)"
    assert suite.put(digest_of(content.late), content.late, absent).header("OCI-Subject") == later

    tags = listed(suite.ask("GET", "tags/list", (200,), "GET tags/list: every tag once (tags)"))
    half = len(tags) // 2
    reply = suite.ask(
        "GET", f"tags/list?n={half}", (200,), "GET tags/list n: half of the tags (tags)"
    )
    page = listed(reply)
    assert len(page) == half
    after = "GET tags/list last: what follows it, n (tags)"
    reply = suite.ask("GET", f"tags/list?n={half}&last={quote(page[-1])}", (200,), after)
    assert len(listed(reply)) <= half

    notes = {
        digest_of(body): json.loads(body)["annotations"]
        for body in (*content.by_config, *content.by_type, content.index)
    }

    def referrers(digest: str, check: str, query: str = "") -> tuple[Reply, list[dict[str, Any]]]:
        reply = suite.ask("GET", f"referrers/{digest}{query}", (200,), check)
        assert reply.header("Content-Type") == OCI_INDEX
        found = json.loads(reply.body)["manifests"]
        assert isinstance(found, list)
        return reply, found

    assert referrers(DUMMY, "GET referrers: an empty list (absent)")[1] == []
    _, found = referrers(subject, "GET referrers: each once, no other (referrers)")
    assert {entry["digest"]: entry["annotations"] for entry in found} == notes
    assert len(found) == 5
    check = "GET referrers artifactType: what has that type, and the header (artifact)"
    reply, found = referrers(subject, check, f"?artifactType={quote(content.types[0], safe='')}")
    applied = reply.header("OCI-Filters-Applied")
    assert len(found) == (2 if applied else 5)
    assert applied in ("", "artifactType")
    assert all(entry["annotations"] == notes[entry["digest"]] for entry in found)
    _, found = referrers(later, "GET referrers: before the subject is there (referrers)")
    assert [entry["digest"] for entry in found] == [digest_of(content.late)]

    several = [
        content.index,
        content.manifests[2],
        content.manifests[4],
        *content.by_config,
        *content.by_type,
    ]
    suite.delete([content.configs[2], content.layer], [*several, content.late])
    suite.ask("DELETE", "manifests/tagtest0", WELL_DELETED, "DELETE tag: 404 (absent)")
    rest = [content.configs[4], b"{}", *content.blobs]
    suite.delete(rest, [content.index, content.manifests[4]], WELL_DELETED)


def management(suite: Suite) -> None:
    content = suite.content
    config = content.configs[3]
    manifest = content.manifests[3]
    for data in (config, content.layer):
        suite.upload(data)
    suite.put("tagtest0", manifest, BY_TAG)
    before = listed(suite.ask("GET", "tags/list", (200,), "GET tags/list: every tag once (tags)"))
    check = "DELETE tag: it is gone, its manifest and other tags stay (tag)"
    reply = suite.ask("DELETE", "manifests/tagtest0", (202, 400, 405), check)
    if reply.status == 400:
        assert json.loads(reply.body)["errors"][0]["code"] == "UNSUPPORTED"
    suite.ask("DELETE", f"manifests/{digest_of(manifest)}", (202, 404), DELETE_MANIFEST)
    suite.ask("GET", f"manifests/{digest_of(manifest)}", (200, 404), DELETE_MANIFEST)
    gone = "DELETE manifest: the list of tags has its tags no more (tags)"
    assert len(listed(suite.ask("GET", "tags/list", (200,), gone))) == len(before) - 1
    deleted = 0
    for data in (config, content.layer):
        deleted = suite.ask(
            "DELETE", f"blobs/{digest_of(data)}", (202, 404, 405), DELETE_BLOB
        ).status
    if deleted != 405:
        suite.ask("GET", f"blobs/{digest_of(config)}", (404,), DELETE_BLOB)


WORKFLOWS = {"pull": pull, "push": push, "discovery": discovery, "management": management}


def run(suite: Suite) -> None:
    for workflow in WORKFLOWS.values():
        workflow(suite)


@pytest.fixture(params=["manifests first", "blobs first"])
def suite(request: pytest.FixtureRequest) -> Iterator[Suite]:
    with served({}, manifests_first=request.param == "manifests first") as made:
        yield made


@contextmanager
def served(options: Mapping[str, Any], *, manifests_first: bool = True) -> Iterator[Suite]:
    """Yield a suite for a new harness on a socket."""
    wire = Connections()
    with run_in_thread(App(**options)) as server:
        yield Suite(
            Client(server.url, wire),
            Content(Seed(5)),
            "team/app",
            f"conformance-{uuid.UUID(int=7)}",
            manifests_first,
            bool(options.get("automatic_mounts")),
        )
        wire.close()


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_each_workflow_alone_is_answered_as_the_suite_accepts(suite: Suite, workflow: str) -> None:
    WORKFLOWS[workflow](suite)
    assert len(suite.covered) >= 13


def test_all_workflows_in_order_are_answered_as_the_suite_accepts(suite: Suite) -> None:
    run(suite)
    assert len(suite.covered) == 125


def test_every_request_of_the_suite_has_its_check(suite: Suite) -> None:
    run(suite)
    assert set(suite.covered) <= {entry.name for entry in choose_checks()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"automatic_mounts": True}, id="mounts from anywhere"),
        pytest.param({"mounts": False}, id="no mounts"),
        pytest.param({"single_post": False}, id="no single post"),
        pytest.param({"locations": "relative"}, id="relative locations"),
        pytest.param({"chunk_min_length": 100}, id="long chunks"),
        pytest.param({"referrers_filter": False}, id="no filter"),
        pytest.param({"tag_deletes": False}, id="no deletion of tags"),
        pytest.param({"require_blobs": False}, id="manifests before blobs"),
    ],
)
def test_what_the_specification_leaves_open_is_accepted_too(options: dict[str, Any]) -> None:
    with served(options) as suite:
        run(suite)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        pytest.param({"referrers_api": False}, "assert '' == 'sha256:", id="no referrers API"),
        pytest.param({"deletes": False}, "DELETE .* answered 405", id="no deletion"),
    ],
)
def test_what_the_suite_does_not_accept_is_seen(options: dict[str, Any], refused: str) -> None:
    """The list judges: a registry that the official suite fails is failed here."""
    with served(options) as suite, pytest.raises(AssertionError, match=refused):
        run(suite)
