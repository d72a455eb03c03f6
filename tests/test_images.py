"""Content of every shape of the catalogue (conformance/content/shapes.py) is copied, or refused.

What the catalogue itself promises is in conformance/tests/test_shapes.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conformance.client.copies import fetch_http, identical
from conformance.content.images import Seed
from conformance.content.shapes import shapes
from conformance.registry.app import App
from conformance.server.sockets import Server, run_in_thread
from tests.ends import copy, held, only
from tests.thinning import thorough

LENGTHY = ("index-of-1000", "1000-layers", "referrers-many")
VALID = {name: shape for name, shape in shapes().items() if not shape.refused}
REFUSED = {name: shape for name, shape in shapes().items() if shape.refused}


# Thousands of requests show little new.
COPIED: list[Any] = [
    thorough(pytest.param(name)) if name in LENGTHY else pytest.param(name) for name in VALID
]


# Registries and clients.


@pytest.fixture(scope="module")
def strict() -> Iterator[dict[bool, tuple[Server, Server]]]:
    """Two strict registries, and two that take any type of manifest."""
    with (
        run_in_thread(App()) as one,
        run_in_thread(App()) as two,
        run_in_thread(App(any_manifest_type=True)) as three,
        run_in_thread(App(any_manifest_type=True)) as four,
    ):
        yield {False: (one, two), True: (three, four)}


@pytest.fixture
def ends(
    strict: dict[bool, tuple[Server, Server]], request: pytest.FixtureRequest
) -> Iterator[tuple[Server, Server]]:
    """The source and the target for the test's shape; both have seen nothing that no correct client
    sends.
    """
    shape = shapes()[request.getfixturevalue("name")]
    pair = strict[bool(shape.options)]
    yield pair
    for server in pair:
        server.journal.check()
        server.journal.clear()


def everything(server: Server, repository: str) -> dict[str, bytes]:
    """Return digest -> bytes of a whole repository, without asking it."""
    known = server.app.repositories.get(repository)
    if known is None:
        return {}
    blobs = {digest: bytes(content) for digest, content in known.blobs.items()}
    return {**blobs, **{digest: stored.body for digest, stored in known.manifests.items()}}


# What a registry serves by a type that the harness's own client does not ask for.
OTHER_TYPES = ("unknown-child", "buildkit-cache-index", "oras-manifest")


@pytest.mark.parametrize("name", COPIED)
def test_the_program_copies_every_valid_shape(name, ends):
    sample, (source, target) = VALID[name].build(), ends
    sample.load_into(source.app, name, "v1")
    for number, (reference, image) in enumerate(sample.parts().items()):
        # What is held by digest is copied by a tag of its own.
        tag = reference if reference and ":" not in reference else f"v{number + 1}"
        image.load_into(source.app, name, tag)
        ran = copy(source, target, f"{name}:{tag}")
        assert ran.status == 0, ran.err
        assert held(target, name, image)
    assert identical(everything(target, name), everything(source, name))
    assert target.app.tags(name) == source.app.tags(name)
    if name not in OTHER_TYPES:
        assert identical(*(fetch_http(end.address, name, "v1", referrers=True) for end in ends))


# A word of the line that says why: of the shape itself, else of all that are found in its way. The
# lines themselves are in test_oci.py.
SAID = {
    "schema-1": "schema 1",
    "schema-1-signed": "schema 1",
    "schema-1-as-json": "schema 1",
    "schema-1-child": "schema 1",
    "manifest-and-index": "CVE-2021-41190",
    "index-as-manifest": "fields",
    "manifest-as-index": "fields",
    "other-content-type": "different types",
    "other-child-type": "different types",
    "child-of-other-kind": "different types",
    "other-inner-type": "different types",
    "empty-manifest": "no body",
    "cut-manifest": "not JSON",
    "json-list": "object",
    "html": "502 Bad",
    "byte-order-mark": "BOM",
    "utf-16": "0xff",
    "broken-utf-8": "0xff",
    "keys-twice": "'layers' twice",
    "not-a-number": "NaN",
    "two-documents": "Extra data",
    "deep-json": "deeper",
    "above-4-mib": "4194304",
    "nested-5-deep": "more than 4",
    "20000-layers": "10000",
    "no-config": "fields",
    "layers-object": "'layers'",
    "layer-text": "layers[0]:",
    "no-media-type": "layers[0]: ''",
    "media-type-newline": "media type",
    "digest-newline": "digest",
    "null-layer": "layers[2]:",
    "size-of-5000-digits": "999",
    "media-type-header": "layers[0]: 'a/b  X-Evil: 1'",
    "md5-digest": "md5",
    "blake3-digest": "blake3",
    "no-digest": "layers[0]: ''",
    "short-digest": "'sha256:ab12'",
    "upper-digest": "digest",
    "path-digest": "'sha256:../../../../etc/passwd'",
    "odd-subject": "subject:",
    "odd-platform": "manifests[1]: 'platform'",
    "two-sizes": "two sizes",
    "other-layer": "its digest",
    "other-config": "its digest",
    "layer-in-index": "its digest",
    "other-child": "the index",
    "same-size-child": "asked for",
    "child-size": "the index",
    "lost-layer": "BLOB_UNKNOWN",
    "lost-config": "BLOB_UNKNOWN",
    "lost-urls-layer": "BLOB_UNKNOWN",
    "lost-child": "MANIFEST_UNKNOWN",
}
SAID_ELSE = {"document": "a size", "content": "its descriptor", "target": "MANIFEST_INVALID"}


@pytest.mark.parametrize("name", REFUSED)
def test_the_program_refuses_what_must_not_be_copied(name, ends):
    """The tag stays as it was, nothing appears by the image's digest, and one line says what is
    wrong.
    """
    shape, (source, target) = REFUSED[name], ends
    before = Seed(1).image()
    sample = shape.build().load_into(source.app, name, "v1")
    before.load_into(target.app, name, "v1")
    ran = copy(source, target, f"{name}:v1")
    assert ran.status == 2
    assert SAID.get(name, SAID_ELSE[shape.found]) in only(ran.failed)
    assert f"{name}" in only(ran.failed)
    code = (
        "TARGET" if shape.found == "target" else "SOURCE" if name.startswith("lost-") else "CONTENT"
    )
    assert only(ran.images)["error"]["code"] == f"{code}_ERROR"
    assert target.app.tags(name) == {"v1": before.top}
    assert sample.image.top not in everything(target, name)
    if shape.found == "document":
        assert not [
            each for each in target.journal.entries if each.method in ("POST", "PUT", "PATCH")
        ]
    if shape.found == "target":
        # The strict registry noted it: this is what it is there for.
        target.journal.clear()
