"""The registry's answers, asked in memory: each of its refusals has a row here.

That it does what the specification asks is in test_docker_registry.py and test_skopeo.py: other
programs answer and ask the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from conformance.images import Seed
from conformance.messages import Content, Request, Response, digest_of
from conformance.registry import App, Measured
from conformance.storage import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from conformance.tests.asking import (
    NOWHERE,
    OCTETS,
    TAKE,
    begin,
    edited,
    location,
    put_manifest,
    refused,
)

# Requests that no correct client sends.

START = "/v2/a/b/blobs/uploads/"
TEXT = ("Content-Type", "text/plain")
CHUNKED = ("Transfer-Encoding", "chunked")


def span(text: str) -> tuple[str, str]:
    return "Content-Range", text


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        ("GET", "/v2", 404, "UNSUPPORTED"),
        ("GET", "/v2/a/b/unknown", 404, "UNSUPPORTED"),
        ("PUT", "/v2/a/b/tags/list", 405, "UNSUPPORTED"),
        ("DELETE", "/v2/a/b/manifests/v1", 405, "UNSUPPORTED"),
        ("GET", "/v2/A/b/tags/list", 400, "NAME_INVALID"),
        ("GET", "/v2/a_-b/tags/list", 400, "NAME_INVALID"),
        ("GET", "/v2/a%2Fb/tags/list", 400, "NAME_INVALID"),
        ("GET", "/v2/" + "a" * 256 + "/tags/list", 400, "NAME_INVALID"),
        ("GET", "/v2/a/b/manifests/.x", 404, "MANIFEST_UNKNOWN"),
        ("GET", "/v2/a/b/manifests/v1%0A", 404, "MANIFEST_UNKNOWN"),
        ("GET", "/v2/a/b/manifests/" + "x" * 129, 404, "MANIFEST_UNKNOWN"),
        ("PUT", "/v2/a/b/manifests/.x", 400, "MANIFEST_INVALID"),
        ("PUT", "/v2/a/b/manifests/v1", 400, "MANIFEST_INVALID"),  # without Content-Type
        ("GET", "/v2/a/b/manifests/sha256:12", 400, "DIGEST_INVALID"),
        ("GET", "/v2/a/b/blobs/sha256:" + "A" * 64, 400, "DIGEST_INVALID"),
        ("GET", "/v2/a/b/blobs/md5:" + "a" * 32, 400, "DIGEST_INVALID"),
        ("GET", "/v2/a/b/referrers/v1", 400, "DIGEST_INVALID"),
        ("POST", f"{START}?mount=x&from=a/b", 400, "DIGEST_INVALID"),
        ("POST", f"{START}?digest=x", 400, "DIGEST_INVALID"),
        ("POST", f"{START}?mount={NOWHERE}&from=A", 400, "NAME_INVALID"),
        ("POST", f"{START}?from=a/b", 400, "UNSUPPORTED"),
        ("GET", "/v2/a/b/tags/list?n=1&n=2", 400, "UNSUPPORTED"),
        ("GET", "/v2/a/b/tags/list?last=", 400, "UNSUPPORTED"),
    ],
)
def test_impossible_requests_are_refused_and_noted(
    app: App, method: str, target: str, status: int, code: str
) -> None:
    answer = refused(app.request(method, target), status, code)
    assert answer.header("Docker-Distribution-Api-Version") == "registry/2.0"
    assert len(app.journal.violations) == 1
    with pytest.raises(AssertionError, match="no correct client"):
        app.journal.check()
    assert not app.repositories, "a refused request must not make a repository"


@pytest.mark.parametrize(
    ("method", "headers", "status", "code"),
    [
        ("POST", [("content-length", "many")], 400, "SIZE_INVALID"),
        ("POST", [("content-length", "3")], 400, "SIZE_INVALID"),  # a body without a digest
        ("POST", [("expect", "100-continue")], 417, "UNSUPPORTED"),
        ("GET", [("content-length", "3")], 400, "UNSUPPORTED"),
    ],
)
def test_wrong_framing_is_refused(
    app: App, method: str, headers: list[tuple[str, str]], status: int, code: str
) -> None:
    target = START if method == "POST" else "/v2/"
    refused(app.request(method, target, headers), status, code)
    assert app.journal.violations
    assert not app.uploads()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_a_body_of_undeclared_length_is_refused(app: App, method: str) -> None:
    target = START if method == "POST" else begin(app)
    answer = app.handle(Request(method, target, [("Host", "x")]))
    assert isinstance(answer, Response)
    refused(answer, 411, "SIZE_INVALID")
    assert app.journal.violations


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ([OCTETS, span("4-7")], b"data", 416, "BLOB_UPLOAD_INVALID"),
        ([OCTETS, span("1-0")], b"", 416, "BLOB_UPLOAD_INVALID"),
        ([OCTETS, span("0-9")], b"data", 400, "SIZE_INVALID"),
        ([OCTETS, span("0-3"), CHUNKED], b"data", 400, "SIZE_INVALID"),
        ([OCTETS, span("bytes 0-3/4")], b"data", 400, "BLOB_UPLOAD_INVALID"),
        ([TEXT], b"data", 415, "UNSUPPORTED"),
    ],
)
@pytest.mark.parametrize("method", ["PATCH", "PUT"])
def test_a_wrong_chunk_is_refused_and_nothing_is_kept(
    app: App, method: str, headers: list[tuple[str, str]], body: bytes, status: int, code: str
) -> None:
    where = begin(app)
    target = where if method == "PATCH" else f"{where}&digest={digest_of(body)}"
    answer = refused(app.request(method, target, headers, body), status, code)
    assert bool(app.journal.violations) == (status != 416), "out of order is no client's error"
    (upload,) = app.repositories["a/b"].uploads.values()
    assert upload.content.size == 0
    if status == 416:
        assert answer.header("Range") == "0-0"
        assert app.request("PATCH", location(answer), [OCTETS], b"data").status == 202


@pytest.mark.parametrize(
    ("method", "left_out", "added", "code"),
    [
        ("PUT", "", "", "DIGEST_INVALID"),
        ("PUT", "", "&digest=sha256:1", "DIGEST_INVALID"),
        ("PATCH", "?_state=1", "", "BLOB_UPLOAD_INVALID"),  # the query is a part of a Location
    ],
)
def test_a_wrong_target_of_an_upload_is_refused(
    app: App, method: str, left_out: str, added: str, code: str
) -> None:
    target = begin(app).replace(left_out, "") + added
    refused(app.request(method, target, [OCTETS], b"data"), 400, code)
    assert len(app.journal.violations) == app.uploads() == 1


# Manifests.

_PART = {"mediaType": "application/x", "digest": NOWHERE, "size": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"schemaVersion": 1},
        {"mediaType": DOCKER_MANIFEST},
        {"manifests": []},
        {"config": ...},
        {"config": "x"},
        {"layers": {}},
        {"layers": [{**_PART, "digest": "sha256:1"}]},
        {"layers": [{**_PART, "digest": 1}]},
        {"layers": [{**_PART, "size": -1}]},
        {"layers": [{**_PART, "size": 1.0}]},
        {"layers": [{**_PART, "size": True}]},
        {"layers": [{**_PART, "mediaType": ""}]},
        {"layers": [{**_PART, "data": "AA=="}]},
        {"layers": [{**_PART, "data": "?"}]},
        {"layers": [{**_PART, "data": 7}]},
        {"subject": {"digest": NOWHERE}},
    ],
)
def test_a_manifest_that_is_not_what_it_says_is_refused(seed: Seed, fields: dict[str, Any]) -> None:
    app = App(require_blobs=False)
    image = seed.image()
    assert put_manifest(app, image, "good").status == 201
    refused(put_manifest(app, image, "v1", body=edited(image, **fields)), 400, "MANIFEST_INVALID")
    assert app.tags("a/b") == {"good": image.top}
    assert bool(app.journal.violations) == ("mediaType" in fields)


@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        (b"{", OCI_MANIFEST),
        (b"[" * 100_000, OCI_MANIFEST),
        (b"[]", OCI_MANIFEST),
        (b'{"schemaVersion":2,"manifests":[]}', DOCKER_LIST),
        (b'{"schemaVersion":2,"manifests":[],"layers":[]}', OCI_INDEX),
        (b'{"schemaVersion":2,"manifests":[3]}', OCI_INDEX),
        (b"{}", "application/json"),
    ],
)
def test_a_document_of_the_wrong_kind_is_refused(
    app: App, seed: Seed, body: bytes, media_type: str
) -> None:
    answer = put_manifest(app, seed.image(), "v1", body=body, media_type=media_type)
    refused(answer, 400, "MANIFEST_INVALID")
    assert not app.repositories


def test_everything_that_a_manifest_names_has_to_be_there(app: App, seed: Seed) -> None:
    image = seed.image(layers=[one := seed.layer(10), seed.layer(20), one])
    answer = refused(put_manifest(app, image, "v1"), 400, *["MANIFEST_BLOB_UNKNOWN"] * 4)
    named = [entry["detail"]["digest"] for entry in answer.json()["errors"]]
    config, first, second = image.blobs
    assert named == [config, first, second, first]
    assert "a/b" not in app.repositories
    app.add_blob("a/b", image.blobs[first])
    app.add_blob("other/repository", image.blobs[second])
    refused(put_manifest(app, image, "v1"), 400, *["MANIFEST_BLOB_UNKNOWN"] * 2)

    index = seed.index(platforms=("linux/amd64", "linux/arm64"))
    child = index.document["manifests"][0]["digest"]
    app.add_manifest("a/b", index.manifests[child][1], OCI_MANIFEST)
    refused(put_manifest(app, index, "v1"), 400, "MANIFEST_BLOB_UNKNOWN")


def test_sizes_have_to_be_those_of_the_content(app: App, seed: Seed) -> None:
    image = seed.image().load_into(app, "a/b")
    config = {**image.document["config"], "size": 7}
    answer = put_manifest(app, image, "v1", body=edited(image, config=config))
    refused(answer, 400, "MANIFEST_INVALID")
    index = seed.index([image])
    child = {**index.document["manifests"][0], "size": 7}
    answer = put_manifest(app, index, "v1", body=edited(index, manifests=[child]))
    refused(answer, 400, "MANIFEST_INVALID")


def test_foreign_layers_are_not_demanded_but_layers_with_urls_are(app: App, seed: Seed) -> None:
    image = seed.image(foreign=["https://elsewhere.test/x"])
    for digest, data in image.blobs.items():
        app.add_blob("a/b", data, digest)
    assert put_manifest(app, image, "v1").status == 201
    layers = [{**layer, "mediaType": "application/x"} for layer in image.document["layers"]]
    answer = put_manifest(app, image, "v2", body=edited(image, layers=layers))
    refused(answer, 400, "MANIFEST_BLOB_UNKNOWN")


def test_a_manifest_above_four_mebibytes_is_refused_with_and_without_a_length(seed: Seed) -> None:
    app = App(require_blobs=False)
    image = seed.image()
    body = image.body.ljust(4 << 20)
    assert put_manifest(app, image, "v1", body=body).status == 201
    app.journal.clear()
    refused(put_manifest(app, image, "v2", body=body + b" "), 413, "MANIFEST_INVALID")
    assert app.journal.bytes_in() == 0, "refused on its head"
    chunked = [CHUNKED, ("Content-Type", OCI_MANIFEST)]
    answer = app.request("PUT", "/v2/a/b/manifests/v3", chunked, body + b" ")
    refused(answer, 413, "MANIFEST_INVALID")
    assert list(app.tags("a/b")) == ["v1"]


def test_a_manifest_by_digest_has_to_have_it(seed: Seed) -> None:
    app = App(require_blobs=False)
    image = seed.image()
    refused(put_manifest(app, image, NOWHERE), 400, "DIGEST_INVALID")
    assert put_manifest(app, image, image.top).status == 201
    longer = digest_of(image.body, "sha512")
    assert put_manifest(app, image, longer).header("Docker-Content-Digest") == longer
    assert app.tags("a/b") == {}


def test_options_of_manifests(seed: Seed) -> None:
    image = seed.image()
    strange = "application/vnd.example.thing.v1+json"
    app = App(any_manifest_type=True, immutable_tags=True)
    image.load_into(app, "a/b")
    assert put_manifest(app, image, "x", body=b'{"x":1}', media_type=strange).status == 201
    refused(put_manifest(app, image, "x"), 400, "TAG_INVALID")
    assert put_manifest(app, image, image.top).status == 201
    artifact = seed.artifact(image).load_into(app, "a/b")
    assert put_manifest(app, artifact, artifact.top).header("OCI-Subject") == image.top
    app.referrers_api = False
    assert put_manifest(app, artifact, artifact.top).header("OCI-Subject") == ""
    refused(app.request("GET", f"/v2/a/b/referrers/{image.top}"), 404, "UNSUPPORTED")


@pytest.mark.parametrize("accept", ["", "*/*", "application/json;q=0.5"])
def test_what_is_not_accepted_is_withheld_as_distribution_does(
    app: App, seed: Seed, accept: str
) -> None:
    def ask(reference: str) -> Response:
        headers = [("Accept", accept)] if accept else []
        return app.request("GET", f"/v2/a/b/manifests/{reference}", headers)

    for made in (seed.image(), seed.index()):
        made.load_into(app, "a/b", tag="oci")
        for reference in ("oci", made.top):
            answer = refused(ask(reference), 404, "MANIFEST_UNKNOWN")
            assert "accept header does not support" in answer.json()["errors"][0]["message"]
    docker = seed.image(format="docker").load_into(app, "a/b", tag="docker")
    assert ask("docker").data == docker.body
    listed = seed.index(format="docker", platforms=("linux/arm64", "linux/amd64"))
    listed.load_into(app, "a/b", tag="list")
    assert ask(listed.top).data == listed.body
    child = listed.document["manifests"][1]
    answer = ask("list")
    assert digest_of(answer.data) == answer.header("Docker-Content-Digest") == child["digest"]
    seed.index(format="docker", platforms=("linux/arm64",)).load_into(app, "a/b", tag="arm")
    refused(ask("arm"), 404, "MANIFEST_UNKNOWN")


def test_an_unchanged_manifest_is_304_to_if_none_match(app: App, seed: Seed) -> None:
    image = seed.image().load_into(app, "a/b", tag="v1")
    for value, status in ((f'"{image.top}"', 304), (image.top, 304), (f'"{NOWHERE}"', 200)):
        headers = [TAKE, ("If-None-Match", value)]
        assert app.request("GET", "/v2/a/b/manifests/v1", headers).status == status


# Lists.


@pytest.mark.parametrize("name", ["a.b/c__d/e---f", "library/x-1_2", "blobs/manifests", "a/tags"])
def test_names_within_the_grammar_are_known(app: App, seed: Seed, name: str) -> None:
    image = seed.image().load_into(app, name, tag="v1")
    assert app.request("GET", f"/v2/{name}/tags/list").json() == {"name": name, "tags": ["v1"]}
    assert app.request("GET", f"/v2/{name}/manifests/v1", [TAKE]).data == image.body
    app.journal.check()


def pages(app: App, target: str, key: str) -> list[list[Any]]:
    """Follow Link to the end; return the pages."""
    found = []
    while target:
        answer = app.request("GET", target)
        found.append(answer.json()[key])
        target = answer.header("Link").partition(">")[0].removeprefix("<")
    return found


def test_lists_come_in_pages(seed: Seed) -> None:
    app = App(page_size=3, referrers_page=2)
    image = seed.image().load_into(app, "a/b", *"abcdef")
    assert pages(app, "/v2/a/b/tags/list?n=2", "tags") == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert pages(app, "/v2/a/b/tags/list?n=9", "tags") == [["a", "b", "c"], ["d", "e", "f"]]
    assert pages(app, "/v2/a/b/tags/list?n=0", "tags") == [[]]
    refused(app.request("GET", "/v2/a/b/tags/list?n=x"), 400, "UNSUPPORTED")

    for kind in ("a/b", "c/d", "a/b"):
        seed.artifact(image, kind).load_into(app, "a/b")
    seed.artifact(seed.image()).load_into(app, "a/b")
    where = f"/v2/a/b/referrers/{image.top}"
    first, second = pages(app, where, "manifests")
    assert (len(first), len(second)) == (2, 1)
    only = app.request("GET", f"{where}?artifactType=c/d")
    assert [each["artifactType"] for each in only.json()["manifests"]] == ["c/d"]
    assert only.header("OCI-Filters-Applied") == "artifactType"
    app.referrers_filter = False
    whole = app.request("GET", f"{where}?artifactType=c/d")
    assert (len(whole.json()["manifests"]), whole.header("OCI-Filters-Applied")) == (2, "")


def test_a_repository_without_manifests_has_no_tag_list(app: App, seed: Seed) -> None:
    app.add_blob("a/b", b"x")
    refused(app.request("GET", "/v2/a/b/tags/list"), 404, "NAME_UNKNOWN")
    seed.image().load_into(app, "a/b")
    app.repositories["a/b"].manifests.clear()
    empty = {"name": "a/b", "tags": []}
    assert app.request("GET", "/v2/a/b/tags/list").json() == empty, "it is known that it was"


# Blobs and uploads.


@pytest.mark.parametrize(
    ("asked", "status", "got", "says"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=4-", 206, b"456789", "bytes 4-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=5-4", 416, None, "bytes */10"),
        ("bytes=-", 200, b"0123456789", ""),
        ("lines=1-2", 200, b"0123456789", ""),
    ],
)
def test_a_blob_is_served_whole_or_by_range(
    app: App, asked: str, status: int, got: bytes | None, says: str
) -> None:
    digest = digest_of(b"0123456789")
    content = Content()
    for piece in (b"01", b"234", b"56789"):
        content.feed(piece)
    app.repositories["a/b"].blobs[digest] = content
    answer = app.request("GET", f"/v2/a/b/blobs/{digest}", [("Range", asked)])
    assert (answer.status, answer.header("Content-Range")) == (status, says)
    assert got is None or answer.data == got
    head = app.request("HEAD", f"/v2/a/b/blobs/{digest}")
    assert (head.status, head.size, head.header("Docker-Content-Digest")) == (200, 10, digest)


def test_content_in_pieces_has_one_digest_and_what_is_measured_has_no_bytes() -> None:
    content, measured = Content(), Measured()
    for piece in (b"ab", b"c"):
        content.feed(piece)
        measured.feed(piece)
    assert content.digest() == measured.digest() == digest_of(b"abc")
    assert content.digest("sha512") == digest_of(b"abc", "sha512")
    with pytest.raises(LookupError):
        measured.pieces()
    with pytest.raises(LookupError):
        measured.digest("sha512")


def test_bytes_that_do_not_have_the_digest_are_refused_and_the_session_ends(app: App) -> None:
    for digest in (NOWHERE, digest_of(b"other", "sha512")):
        where = begin(app)
        answer = app.request("PUT", f"{where}&digest={digest}", [OCTETS], b"data")
        refused(answer, 400, "DIGEST_INVALID")
        refused(app.request("GET", where), 404, "BLOB_UPLOAD_UNKNOWN")
        refused(app.request("GET", f"/v2/a/b/blobs/{digest}"), 404, "BLOB_UNKNOWN")
    single = app.request("POST", f"{START}?digest={NOWHERE}", body=b"data")
    refused(single, 400, "DIGEST_INVALID")
    app.journal.check()


def test_only_the_newest_location_of_an_upload_works(app: App) -> None:
    first = begin(app)
    second = location(app.request("PATCH", first, [OCTETS], b"da"))
    stale = refused(app.request("PATCH", first, [OCTETS], b"ta"), 416, "BLOB_UPLOAD_INVALID")
    assert stale.header("Range") == "0-1"
    refused(app.request("PUT", f"{second}&digest={NOWHERE}"), 416, "BLOB_UPLOAD_INVALID")
    newest = location(app.request("GET", first))
    elsewhere = newest.replace("/a/b/", "/c/d/")
    refused(app.request("GET", elsewhere), 404, "BLOB_UPLOAD_UNKNOWN")
    end = f"{newest}&digest={digest_of(b'data')}"
    assert app.request("PUT", end, [OCTETS], b"ta").status == 201
    app.journal.check()


def test_a_cancelled_upload_is_gone(app: App) -> None:
    where = begin(app)
    assert app.request("DELETE", where).status == 204
    refused(app.request("GET", where), 404, "BLOB_UPLOAD_UNKNOWN")


@pytest.mark.parametrize("resumable", [True, False])
def test_a_broken_body_leaves_its_bytes_or_nothing(resumable: bool) -> None:
    app = App(resumable=resumable)
    where = begin(app)
    exchange = app.open(Request("PATCH", where, [("Host", "x"), ("Content-Length", "4")]))
    exchange.start(None)
    exchange.feed(b"da")
    newest = location(app.request("GET", where))
    meanwhile = app.request("PATCH", newest, [OCTETS], b"data")
    refused(meanwhile, 416, "BLOB_UPLOAD_INVALID")
    newest = location(meanwhile)
    exchange.abort()
    status = app.request("GET", where)
    if not resumable:
        refused(status, 404, "BLOB_UPLOAD_UNKNOWN")
        return
    assert status.header("Range") == "0-1"
    refused(app.request("PATCH", newest, [OCTETS], b"ta"), 416, "BLOB_UPLOAD_INVALID")
    end = f"{location(app.request('GET', where))}&digest={digest_of(b'data')}"
    assert app.request("PUT", end, [OCTETS], b"ta").status == 201
    assert app.journal.entries[1].status is None


def test_a_broken_body_makes_its_location_old(app: App) -> None:
    where = begin(app)
    exchange = app.open(Request("PATCH", where, [("Host", "x"), ("Content-Length", "4")]))
    exchange.start(None)
    exchange.abort()
    refused(app.request("PATCH", where, [OCTETS], b"data"), 416, "BLOB_UPLOAD_INVALID")


def test_a_single_post_is_judged_as_a_put_is(app: App) -> None:
    target = f"{START}?digest={digest_of(b'data')}"
    refused(app.request("POST", target, [TEXT], b"data"), 415, "UNSUPPORTED")
    assert app.request("POST", target, [OCTETS], b"data").status == 201


@pytest.mark.parametrize(
    ("query", "mounts", "status"),
    [
        ("mount={digest}&from=x/y", True, 201),
        ("mount={digest}&from=c/d", True, 202),
        (f"mount={NOWHERE}&from=x/y", True, 202),
        ("mount={digest}&from=no/no", True, 202),
        ("mount={digest}", True, 202),
        ("mount={digest}&from=x/y", False, 202),
    ],
)
def test_what_cannot_be_mounted_opens_a_session(
    app: App, query: str, mounts: bool, status: int
) -> None:
    digest = app.add_blob("x/y", b"data")
    app.add_blob("c/d", b"other")
    app.mounts = mounts
    answer = app.request("POST", f"{START}?{query.format(digest=digest)}")
    assert (answer.status, app.uploads()) == (status, int(status == 202))
    assert app.blob("a/b", digest) == (b"data" if status == 201 else None)
    assert "no/no" not in app.repositories
    app.journal.check()
