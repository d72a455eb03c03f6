"""The registry's answers, asked in memory: each of its refusals has a case here.

A case fails when the check that it is about is taken out. That it does what the specification asks is
in test_docker_registry.py and test_skopeo.py: other programs answer and ask the same.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from conformance.images import Seed
from conformance.messages import Content, Request, Response, digest_of, error
from conformance.registry import App
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

# Paths, names and framing.


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        pytest.param("GET", "/v2", 404, "UNSUPPORTED", id="no trailing slash"),
        pytest.param("GET", "/v1/", 404, "UNSUPPORTED", id="other version"),
        pytest.param("GET", "/v2/a/b/unknown", 404, "UNSUPPORTED", id="unknown path"),
        pytest.param(
            "POST", "/v2/a/b/blobs/uploads", 400, "DIGEST_INVALID", id="uploads without slash"
        ),
        pytest.param("GET", "/v2/A/b/tags/list", 400, "NAME_INVALID", id="upper case name"),
        pytest.param("GET", "/v2/a//b/tags/list", 400, "NAME_INVALID", id="empty part of a name"),
        pytest.param("GET", "/v2/a_-b/tags/list", 400, "NAME_INVALID", id="mixed separators"),
        pytest.param("GET", "/v2/" + "a" * 256 + "/tags/list", 400, "NAME_INVALID", id="long name"),
        pytest.param(
            "GET", "/v2/a/b/manifests/.x", 404, "MANIFEST_UNKNOWN", id="tag with a first dot"
        ),
        pytest.param(
            "GET", "/v2/a/b/manifests/" + "x" * 129, 404, "MANIFEST_UNKNOWN", id="long tag"
        ),
        pytest.param(
            "GET", "/v2/a/b/manifests/v1%0A", 404, "MANIFEST_UNKNOWN", id="tag with a newline"
        ),
        pytest.param("PUT", "/v2/a/b/manifests/.x", 400, "MANIFEST_INVALID", id="put under no tag"),
        pytest.param(
            "GET", "/v2/a%2Fb/tags/list", 400, "NAME_INVALID", id="encoded slash in a name"
        ),
        pytest.param("GET", "/v2/a/b/tags/list?n=1&n=2", 400, "UNSUPPORTED", id="parameter twice"),
        pytest.param("GET", "/v2/a/b/tags/list?last=", 400, "UNSUPPORTED", id="last no tag"),
        pytest.param(
            "POST", "/v2/a/b/blobs/uploads/?from=a/b", 400, "UNSUPPORTED", id="from alone"
        ),
        pytest.param(
            "GET", "/v2/a/b/manifests/sha256:12", 400, "DIGEST_INVALID", id="short digest"
        ),
        pytest.param(
            "GET", "/v2/a/b/blobs/sha256:" + "A" * 64, 400, "DIGEST_INVALID", id="upper case hex"
        ),
        pytest.param(
            "GET", "/v2/a/b/blobs/md5:" + "a" * 32, 400, "DIGEST_INVALID", id="unknown algorithm"
        ),
        pytest.param("GET", "/v2/a/b/blobs/latest", 400, "DIGEST_INVALID", id="blob by tag"),
        pytest.param("GET", "/v2/a/b/referrers/v1", 400, "DIGEST_INVALID", id="referrers of a tag"),
        pytest.param("PUT", "/v2/a/b/tags/list", 405, "UNSUPPORTED", id="put a list"),
        pytest.param("PATCH", "/v2/a/b/manifests/v1", 405, "UNSUPPORTED", id="patch a manifest"),
        pytest.param("POST", "/v2/a/b/blobs/uploads/x", 405, "UNSUPPORTED", id="post to a session"),
        pytest.param(
            "POST",
            "/v2/a/b/blobs/uploads/?mount=x&from=a/b",
            400,
            "DIGEST_INVALID",
            id="mount what",
        ),
        pytest.param(
            "POST",
            "/v2/a/b/blobs/uploads/?digest=x",
            400,
            "DIGEST_INVALID",
            id="single post of what",
        ),
        pytest.param(
            "POST",
            f"/v2/a/b/blobs/uploads/?mount={NOWHERE}&from=A",
            400,
            "NAME_INVALID",
            id="mount from where",
        ),
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
    "name", ["a", "a/b", "a.b/c__d/e---f", "library/x-1_2", "blobs/manifests", "a/tags"]
)
def test_names_within_the_grammar_are_not_refused(app: App, seed: Seed, name: str) -> None:
    image = seed.image().load_into(app, name, tag="v1")
    assert app.request("GET", f"/v2/{name}/tags/list").json() == {"name": name, "tags": ["v1"]}
    assert app.request("GET", f"/v2/{name}/manifests/v1", [TAKE]).data == image.body
    app.journal.check()


@pytest.mark.parametrize(
    ("method", "headers", "status", "code"),
    [
        pytest.param(
            "POST", [("content-length", "many")], 400, "SIZE_INVALID", id="length no number"
        ),
        pytest.param("POST", [("content-length", "-1")], 400, "SIZE_INVALID", id="negative length"),
        pytest.param("GET", [("content-length", "3")], 400, "UNSUPPORTED", id="get with a body"),
        pytest.param(
            "POST", [("content-length", "3")], 400, "SIZE_INVALID", id="body without digest"
        ),
        pytest.param("POST", [("expect", "100-continue")], 417, "UNSUPPORTED", id="expect"),
    ],
)
def test_wrong_framing_is_refused(
    app: App, method: str, headers: list[tuple[str, str]], status: int, code: str
) -> None:
    target = "/v2/a/b/blobs/uploads/" if method == "POST" else "/v2/"
    refused(app.request(method, target, headers), status, code)
    assert app.journal.violations
    assert not app.uploads()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_a_body_of_undeclared_length_is_refused(app: App, method: str) -> None:
    target = "/v2/a/b/blobs/uploads/" if method == "POST" else begin(app)
    answer = app.handle(Request(method, target, [("Host", "x")]))
    assert isinstance(answer, Response)
    refused(answer, 411, "SIZE_INVALID")
    assert app.journal.violations


# Manifests.


@pytest.mark.parametrize(
    ("shape", "by", "outcome"),
    [
        ("oci image", "tag", 404),
        ("oci image", "digest", 404),
        ("oci index", "tag", 404),
        ("oci index", "digest", 404),
        ("docker list", "tag", "linux/amd64"),
        ("docker list", "digest", "itself"),
        ("docker image", "tag", "itself"),
    ],
)
@pytest.mark.parametrize("accept", ["", "*/*", "application/json;q=0.5"])
def test_what_is_not_accepted_is_withheld_as_distribution_does(
    app: App, seed: Seed, shape: str, by: str, outcome: object, accept: str
) -> None:
    image = {
        "oci image": lambda: seed.image(),
        "oci index": lambda: seed.index(),
        "docker list": lambda: seed.index(
            format="docker", platforms=("linux/arm64", "linux/amd64")
        ),
        "docker image": lambda: seed.image(format="docker"),
    }[shape]().load_into(app, "a/b", tag="v1")
    reference = "v1" if by == "tag" else image.top
    answer = app.request(
        "GET", f"/v2/a/b/manifests/{reference}", [("Accept", accept)] if accept else []
    )
    if outcome == 404:
        refused(answer, 404, "MANIFEST_UNKNOWN")
        kind = "manifest" if shape == "oci image" else "index"
        assert answer.json()["errors"][0]["message"].startswith(
            f"OCI {kind} found, but accept header"
        )
    elif outcome == "itself":
        assert answer.data == image.body
    else:
        child = image.document["manifests"][1]
        assert child["platform"]["architecture"] == "amd64"
        assert digest_of(answer.data) == answer.header("Docker-Content-Digest") == child["digest"]


def test_a_list_without_amd64_is_unknown_where_lists_are_not_accepted(app: App, seed: Seed) -> None:
    seed.index(format="docker", platforms=("linux/arm64",)).load_into(app, "a/b", tag="v1")
    refused(app.request("GET", "/v2/a/b/manifests/v1"), 404, "MANIFEST_UNKNOWN")


def test_an_unchanged_manifest_is_304_to_if_none_match(app: App, seed: Seed) -> None:
    image = seed.image().load_into(app, "a/b", tag="v1")
    for value, status in ((f'"{image.top}"', 304), (image.top, 304), (f'"{NOWHERE}"', 200)):
        assert (
            app.request("GET", "/v2/a/b/manifests/v1", [TAKE, ("If-None-Match", value)]).status
            == status
        )


_DESCRIPTOR = {"mediaType": "application/x", "digest": NOWHERE, "size": 1}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"schemaVersion": 1}, id="schema version 1"),
        pytest.param({"schemaVersion": ...}, id="no schema version"),
        pytest.param({"mediaType": DOCKER_MANIFEST}, id="another mediaType"),
        pytest.param({"manifests": []}, id="manifest and index at once"),
        pytest.param({"config": ...}, id="no config"),
        pytest.param({"config": "x"}, id="config no descriptor"),
        pytest.param({"layers": ...}, id="no layers"),
        pytest.param({"layers": {}}, id="layers no list"),
        pytest.param({"layers": [{**_DESCRIPTOR, "digest": "sha256:1"}]}, id="layer digest"),
        pytest.param({"layers": [{**_DESCRIPTOR, "digest": 1}]}, id="digest no text"),
        pytest.param({"layers": [{**_DESCRIPTOR, "size": -1}]}, id="negative size"),
        pytest.param({"layers": [{**_DESCRIPTOR, "size": 1.0}]}, id="size no integer"),
        pytest.param({"layers": [{**_DESCRIPTOR, "size": True}]}, id="size a truth value"),
        pytest.param({"layers": [{**_DESCRIPTOR, "mediaType": ""}]}, id="layer without type"),
        pytest.param({"layers": [{**_DESCRIPTOR, "data": "AA=="}]}, id="data not the content"),
        pytest.param({"layers": [{**_DESCRIPTOR, "data": "?"}]}, id="data not base64"),
        pytest.param({"layers": [{**_DESCRIPTOR, "data": 7}]}, id="data no text"),
        pytest.param({"subject": {"digest": NOWHERE}}, id="subject no descriptor"),
    ],
)
def test_a_manifest_that_is_not_what_it_says_is_refused(seed: Seed, fields: dict[str, Any]) -> None:
    app = App(require_blobs=False)
    image = seed.image()
    assert put_manifest(app, image, "good").status == 201
    refused(put_manifest(app, image, "v1", body=edited(image, **fields)), 400, "MANIFEST_INVALID")
    assert app.tags("a/b") == {"good": image.top}


@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        pytest.param(b"{", OCI_MANIFEST, id="not json"),
        pytest.param(b"[" * 100_000, OCI_MANIFEST, id="deep"),
        pytest.param(b"[]", OCI_MANIFEST, id="not an object"),
        pytest.param(
            b'{"schemaVersion":2,"manifests":[]}', DOCKER_LIST, id="docker without mediaType"
        ),
        pytest.param(
            b'{"schemaVersion":2,"manifests":[],"layers":[]}', OCI_INDEX, id="index and manifest"
        ),
        pytest.param(b'{"schemaVersion":2,"manifests":[3]}', OCI_INDEX, id="child no descriptor"),
        pytest.param(b"{}", "application/json", id="unknown type"),
    ],
)
def test_a_document_of_the_wrong_kind_is_refused(
    app: App, seed: Seed, body: bytes, media_type: str
) -> None:
    image = seed.image()
    refused(
        put_manifest(app, image, "v1", body=body, media_type=media_type), 400, "MANIFEST_INVALID"
    )
    assert not app.repositories


def test_a_manifest_under_another_type_than_it_says_is_refused_and_noted(seed: Seed) -> None:
    app = App(require_blobs=False)
    image = seed.image()
    refused(put_manifest(app, image, "v1", media_type=DOCKER_MANIFEST), 400, "MANIFEST_INVALID")
    assert app.tags("a/b") == {}
    with pytest.raises(AssertionError, match="mediaType is"):
        app.journal.check()


def test_a_manifest_without_content_type_is_refused_and_noted(app: App, seed: Seed) -> None:
    refused(
        app.request("PUT", "/v2/a/b/manifests/v1", body=seed.image().body), 400, "MANIFEST_INVALID"
    )
    assert app.journal.violations


def test_everything_that_a_manifest_names_has_to_be_there(app: App, seed: Seed) -> None:
    image = seed.image(layers=[one := seed.layer(10), seed.layer(20), one])
    answer = refused(put_manifest(app, image, "v1"), 400, *["MANIFEST_BLOB_UNKNOWN"] * 4)
    named = [entry["detail"]["digest"] for entry in answer.json()["errors"]]
    config, first, second = image.blobs
    assert named == [config, first, second, first]
    assert "a/b" not in app.repositories
    app.add_blob("a/b", image.blobs[first])
    refused(put_manifest(app, image, "v1"), 400, *["MANIFEST_BLOB_UNKNOWN"] * 2)
    app.add_blob("other/repository", image.blobs[second])
    refused(put_manifest(app, image, "v1"), 400, *["MANIFEST_BLOB_UNKNOWN"] * 2)


def test_every_child_of_an_index_has_to_be_there(app: App, seed: Seed) -> None:
    index = seed.index(platforms=("linux/amd64", "linux/arm64"))
    missing = [child["digest"] for child in index.document["manifests"]]
    answer = refused(put_manifest(app, index, "v1"), 400, *["MANIFEST_BLOB_UNKNOWN"] * 2)
    assert [entry["detail"]["digest"] for entry in answer.json()["errors"]] == missing
    app.add_manifest("a/b", index.manifests[missing[0]][1], OCI_MANIFEST)
    refused(put_manifest(app, index, "v1"), 400, "MANIFEST_BLOB_UNKNOWN")


def test_sizes_have_to_be_those_of_the_content(app: App, seed: Seed) -> None:
    image = seed.image().load_into(app, "a/b")
    config = {**image.document["config"], "size": 7}
    refused(
        put_manifest(app, image, "v1", body=edited(image, config=config)), 400, "MANIFEST_INVALID"
    )
    index = seed.index([image])
    child = {**index.document["manifests"][0], "size": 7}
    refused(
        put_manifest(app, index, "v1", body=edited(index, manifests=[child])),
        400,
        "MANIFEST_INVALID",
    )


def test_foreign_layers_are_not_demanded_but_layers_with_urls_are(app: App, seed: Seed) -> None:
    image = seed.image(foreign=["https://elsewhere.test/x"])
    for digest, data in image.blobs.items():
        app.add_blob("a/b", data, digest)
    assert put_manifest(app, image, "v1").status == 201
    layers = [{**layer, "mediaType": "application/x"} for layer in image.document["layers"]]
    answer = put_manifest(app, image, "v2", body=edited(image, layers=layers))
    refused(answer, 400, "MANIFEST_BLOB_UNKNOWN")
    assert list(app.tags("a/b")) == ["v1"]


def test_a_manifest_above_four_mebibytes_is_refused_with_and_without_a_length(seed: Seed) -> None:
    app = App(require_blobs=False)
    image = seed.image()
    limit = 4 << 20
    body = image.body + b" " * (limit - len(image.body))
    assert put_manifest(app, image, "v1", body=body).status == 201
    app.journal.clear()
    refused(put_manifest(app, image, "v2", body=body + b" "), 413, "MANIFEST_INVALID")
    assert app.journal.bytes_in() == 0, "refused on its head"
    chunked = [("Transfer-Encoding", "chunked"), ("Content-Type", OCI_MANIFEST)]
    answer = app.request("PUT", "/v2/a/b/manifests/v3", chunked, body + b" ")
    refused(answer, 413, "MANIFEST_INVALID")
    assert list(app.tags("a/b")) == ["v1"]


def test_a_manifest_by_digest_has_to_have_it(seed: Seed) -> None:
    app = App(require_blobs=False)
    image = seed.image()
    refused(put_manifest(app, image, NOWHERE), 400, "DIGEST_INVALID")
    assert put_manifest(app, image, image.top).status == 201
    assert app.tags("a/b") == {}
    longer = digest_of(image.body, "sha512")
    assert put_manifest(app, image, longer).header("Docker-Content-Digest") == longer


def test_other_manifest_types_are_refused_unless_allowed(seed: Seed) -> None:
    image = seed.image()
    strange = "application/vnd.example.thing.v1+json"
    for allowed, status in ((False, 400), (True, 201)):
        app = App(any_manifest_type=allowed)
        assert put_manifest(app, image, "v1", body=b'{"x":1}', media_type=strange).status == status


def test_an_immutable_tag_is_refused_even_with_the_same_digest(seed: Seed) -> None:
    app = App(immutable_tags=True)
    image = seed.image()
    image.load_into(app, "a/b")
    assert put_manifest(app, image, "v1").status == 201
    refused(put_manifest(app, image, "v1"), 400, "TAG_INVALID")
    assert put_manifest(app, image, image.top).status == 201
    assert put_manifest(app, image, "v2").status == 201


# Lists.


def pages(app: App, target: str, key: str) -> list[list[Any]]:
    """Follow Link to the end; return the pages."""
    found = []
    while target:
        answer = app.request("GET", target)
        assert answer.status == 200
        found.append(answer.json()[key])
        link = answer.header("Link")
        assert not link or link.endswith('>; rel="next"')
        target = link.partition(">")[0].removeprefix("<")
    return found


def test_a_repository_without_manifests_has_no_tag_list(app: App, seed: Seed) -> None:
    refused(app.request("GET", "/v2/a/b/tags/list"), 404, "NAME_UNKNOWN")
    app.add_blob("a/b", b"x")
    refused(app.request("GET", "/v2/a/b/tags/list"), 404, "NAME_UNKNOWN")
    seed.image().load_into(app, "a/b")
    empty = {"name": "a/b", "tags": []}
    assert app.request("GET", "/v2/a/b/tags/list").json() == empty
    app.repositories["a/b"].manifests.clear()
    assert app.request("GET", "/v2/a/b/tags/list").json() == empty, (
        "a repository that once was is known"
    )


# Blobs.


@pytest.mark.parametrize(
    ("asked", "status", "got", "says"),
    [
        (None, 200, b"0123456789", ""),
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=4-", 206, b"456789", "bytes 4-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=9-9", 206, b"9", "bytes 9-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=5-4", 416, None, "bytes */10"),
        ("bytes=-", 200, b"0123456789", ""),
        ("lines=1-2", 200, b"0123456789", ""),
        ("bytes=0-1,3-4", 200, b"0123456789", ""),
    ],
)
def test_a_blob_is_served_whole_or_by_range(
    app: App, asked: str | None, status: int, got: bytes | None, says: str
) -> None:
    digest = digest_of(b"0123456789")
    content = Content()
    for piece in (b"01", b"234", b"56789"):
        content.feed(piece)
    app.repositories["a/b"].blobs[digest] = content
    answer = app.request("GET", f"/v2/a/b/blobs/{digest}", [("Range", asked)] if asked else [])
    assert (answer.status, answer.header("Content-Range")) == (status, says)
    assert got is None or answer.data == got
    head = app.request("HEAD", f"/v2/a/b/blobs/{digest}")
    assert (head.status, head.size, head.header("Docker-Content-Digest")) == (200, 10, digest)


# Uploads.


def test_bytes_that_do_not_have_the_digest_are_refused_and_the_session_ends(app: App) -> None:
    for digest in (NOWHERE, digest_of(b"other", "sha512")):
        where = begin(app)
        refused(
            app.request("PUT", f"{where}&digest={digest}", [OCTETS], b"data"), 400, "DIGEST_INVALID"
        )
        refused(app.request("GET", where), 404, "BLOB_UPLOAD_UNKNOWN")
        refused(app.request("GET", f"/v2/a/b/blobs/{digest}"), 404, "BLOB_UNKNOWN")
    single = app.request("POST", f"/v2/a/b/blobs/uploads/?digest={NOWHERE}", body=b"data")
    refused(single, 400, "DIGEST_INVALID")
    app.journal.check()


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        pytest.param(
            [OCTETS, ("Content-Range", "4-7")], b"data", 416, "BLOB_UPLOAD_INVALID", id="gap"
        ),
        pytest.param(
            [OCTETS, ("Content-Range", "1-0")], b"", 416, "BLOB_UPLOAD_INVALID", id="backwards"
        ),
        pytest.param(
            [OCTETS, ("Content-Range", "0-9")], b"data", 400, "SIZE_INVALID", id="other length"
        ),
        pytest.param(
            [OCTETS, ("Content-Range", "bytes 0-3/4")],
            b"data",
            400,
            "BLOB_UPLOAD_INVALID",
            id="RFC form",
        ),
        pytest.param(
            [OCTETS, ("Content-Range", "0-3/4")], b"data", 400, "BLOB_UPLOAD_INVALID", id="total"
        ),
        pytest.param(
            [OCTETS, ("Content-Range", "0-3"), ("Transfer-Encoding", "chunked")],
            b"data",
            400,
            "SIZE_INVALID",
            id="range of a chunked body",
        ),
        pytest.param(
            [("Content-Type", "text/plain")], b"data", 415, "UNSUPPORTED", id="other type"
        ),
    ],
)
@pytest.mark.parametrize("method", ["PATCH", "PUT"])
def test_a_wrong_chunk_is_refused_and_nothing_is_kept(
    app: App, method: str, headers: list[tuple[str, str]], body: bytes, status: int, code: str
) -> None:
    where = begin(app)
    target = where if method == "PATCH" else f"{where}&digest={digest_of(body)}"
    answer = refused(app.request(method, target, headers, body), status, code)
    assert bool(app.journal.violations) == (status != 416), (
        "out of order is answered, not a client's error"
    )
    upload = app.repositories["a/b"].uploads[urlsplit(where).path.rpartition("/")[2]]
    assert upload.content.size == 0
    if status == 416:
        assert answer.header("Range") == "0-0"
        assert app.request("PATCH", location(answer), [OCTETS], b"data").status == 202


def test_only_the_newest_location_of_an_upload_works(app: App) -> None:
    first = begin(app)
    second = location(app.request("PATCH", first, [OCTETS], b"da"))
    stale = refused(app.request("PATCH", first, [OCTETS], b"ta"), 416, "BLOB_UPLOAD_INVALID")
    assert stale.header("Range") == "0-1"
    refused(app.request("PUT", f"{second}&digest={NOWHERE}"), 416, "BLOB_UPLOAD_INVALID")
    newest = location(app.request("GET", first))
    assert (
        app.request("PUT", f"{newest}&digest={digest_of(b'data')}", [OCTETS], b"ta").status == 201
    )
    app.journal.check()


def test_the_query_of_a_location_is_part_of_it(app: App) -> None:
    bare = begin(app).partition("?")[0]
    refused(app.request("PATCH", bare, [OCTETS], b"data"), 400, "BLOB_UPLOAD_INVALID")
    assert app.journal.violations


@pytest.mark.parametrize("digest", [None, "sha256:1"], ids=["missing", "malformed"])
def test_a_final_put_needs_a_digest(app: App, digest: str | None) -> None:
    where = begin(app)
    target = where + (f"&digest={digest}" if digest else "")
    answer = refused(app.request("PUT", target), 400, "DIGEST_INVALID")
    assert answer.json()["errors"][0]["message"] == (
        "invalid digest" if digest else "digest missing"
    )
    assert app.journal.violations
    assert app.uploads() == 1


def test_a_session_belongs_to_its_repository(app: App) -> None:
    where = begin(app).replace("/a/b/", "/c/d/")
    refused(app.request("PUT", f"{where}&digest={digest_of(b'')}"), 404, "BLOB_UPLOAD_UNKNOWN")


@pytest.mark.parametrize("resumable", [True, False])
def test_a_broken_body_leaves_its_bytes_or_nothing(resumable: bool) -> None:
    app = App(resumable=resumable)
    where = begin(app)
    exchange = app.open(Request("PATCH", where, [("Host", "x"), ("Content-Length", "4")]))
    exchange.start(None)
    exchange.feed(b"da")
    refused(
        app.request("PATCH", where, [OCTETS], b"data"), 416, "BLOB_UPLOAD_INVALID"
    )  # one at a time
    exchange.abort()
    status = app.request("GET", where)
    if not resumable:
        refused(status, 404, "BLOB_UPLOAD_UNKNOWN")
        return
    assert status.header("Range") == "0-1"
    refused(app.request("PATCH", where, [OCTETS], b"ta"), 416, "BLOB_UPLOAD_INVALID")
    newest = location(app.request("GET", where))
    assert (
        app.request("PUT", f"{newest}&digest={digest_of(b'data')}", [OCTETS], b"ta").status == 201
    )
    assert app.journal.entries[1].status is None


# Mounts.


def test_a_single_post_is_judged_as_a_put_is(app: App) -> None:
    target = f"/v2/a/b/blobs/uploads/?digest={digest_of(b'data')}"
    refused(
        app.request("POST", target, [("Content-Type", "text/plain")], b"data"), 415, "UNSUPPORTED"
    )
    assert app.request("POST", target, [OCTETS], b"data").status == 201


@pytest.mark.parametrize(
    ("query", "mounts", "status"),
    [
        pytest.param("mount={digest}&from=a/b", True, 201, id="from itself, present"),
        pytest.param(f"mount={NOWHERE}&from=a/b", True, 202, id="from itself, absent"),
        pytest.param(f"mount={NOWHERE}&from=x/y", True, 202, id="not in the source"),
        pytest.param("mount={digest}&from=no/no", True, 202, id="unknown source"),
        pytest.param("mount={digest}", True, 202, id="no source named"),
        pytest.param("mount={digest}&from=x/y", False, 202, id="mounting is off"),
    ],
)
def test_what_cannot_be_mounted_opens_a_session(
    app: App, query: str, mounts: bool, status: int
) -> None:
    digest = app.add_blob("x/y", b"data")
    app.add_blob("a/b", b"data")
    app.mounts = mounts
    answer = app.request("POST", f"/v2/a/b/blobs/uploads/?{query.format(digest=digest)}")
    assert (answer.status, app.uploads()) == (status, int(status == 202))
    assert "no/no" not in app.repositories
    app.journal.check()


# Hooks and the journal.


def test_the_intercept_is_asked_first_and_amend_last(app: App) -> None:
    app.intercept = lambda request: (
        error(503, "UNAVAILABLE", "later") if request.kind == "ping" else None
    )
    refused(app.request("GET", "/v2/"), 503, "UNAVAILABLE")
    refused(app.request("GET", "/v2/a/tags/list"), 404, "NAME_UNKNOWN")
    app.amend = lambda request, answer: Response(418, body=str(answer.status).encode())  # type: ignore[union-attr]
    assert app.request("GET", "/v2/").data == b"503"
    assert [entry.status for entry in app.journal.entries] == [503, 404, 418]


def test_an_asynchronous_intercept_needs_a_server(app: App) -> None:
    async def later(request: Request) -> None:
        await anyio.sleep(1)

    app.intercept = later
    with pytest.raises(TypeError, match="needs a server"):
        app.request("GET", "/v2/")


def test_a_manifest_whose_body_breaks_leaves_nothing(app: App) -> None:
    head = [("Host", "x"), ("Content-Length", "9"), ("Content-Type", OCI_MANIFEST)]
    exchange = app.open(Request("PUT", "/v2/a/b/manifests/v1", head))
    exchange.start(None)
    exchange.feed(b"{")
    exchange.abort()
    assert not app.repositories
    assert (exchange.entry.status, exchange.entry.request_bytes) == (None, 1)
