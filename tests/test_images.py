"""Content of every shape: equal on every run and Python, taken by a strict registry, copied or
refused.

The catalogue (conformance/content/shapes.py) is run through three clients: the harness's own, the program,
and for what has to be refused, the program alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.client.copies import fetch_http, identical, push_http
from conformance.content.images import Image, Seed
from conformance.content.samples import Sample
from conformance.content.shapes import shapes
from conformance.registry.app import App
from conformance.server.sockets import Server, run_in_thread
from tests.ends import copy, held, only
from tests.thinning import thorough

ROOT = Path(__file__).resolve().parent.parent
DIGESTS = ROOT / "tests" / "data" / "shapes.txt"
LENGTHY = ("index-of-1000", "1000-layers", "referrers-many")
VALID = {name: shape for name, shape in shapes().items() if not shape.refused}
REFUSED = {name: shape for name, shape in shapes().items() if shape.refused}


def golden() -> dict[str, str]:
    """Read the digest of each shape: the same from Python 3.10 to 3.13."""
    lines = [line.split() for line in DIGESTS.read_text(encoding="ascii").splitlines()]
    return {name: digest for digest, name in lines}


def copied() -> list[Any]:
    """Return the names of the valid shapes as parameters."""
    params = [
        pytest.param(name, marks=pytest.mark.slow if name in LENGTHY else ()) for name in VALID
    ]
    # A thousand children, or layers, are thousands of requests that show little new.
    return [thorough(each) if "1000" in str(each.values[0]) else each for each in params]


# The catalogue itself.


@pytest.mark.slow
def test_every_shape_has_the_bytes_that_it_always_had() -> None:
    assert {name: shape.build().fingerprint() for name, shape in shapes().items()} == golden()


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_interpreters_hashes() -> None:
    code = "from conformance.content.shapes import shapes\n"
    code += "for name, shape in shapes().items(): print(name, shape.build().fingerprint())"
    told = []
    for hashes in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True
        )
        told.append(dict(line.split() for line in done.stdout.splitlines()))
    assert told == [golden()] * 2


def test_every_shape_says_what_it_is_and_where_it_is_written() -> None:
    assert len(VALID) > 90
    assert len(REFUSED) > 60
    for name, shape in shapes().items():
        assert shape.name == name
        assert shape.sentence.endswith(".")
        assert shape.reference
    sentences = [shape.sentence for shape in shapes().values()]
    assert len(set(sentences)) == len(sentences)


def graph_of(sample: Sample) -> set[str]:
    """Follow every descriptor of every document of a sample; return the digests."""
    named: set[str] = set()
    for image in sample.parts().values():
        for media_type, body in image.manifests.values():
            document = Image("t", media_type, {"t": (media_type, body)}, {}).document
            config = document.get("config")
            for entry in [*([config] if config else []), *(document.get("layers") or [])]:
                named.add(entry["digest"])
            named |= {
                entry["digest"]
                for key in ("manifests", "blobs")
                for entry in document.get(key) or []
            }
    return named


@pytest.mark.parametrize("name", VALID)
def test_a_valid_sample_holds_what_it_names_and_nothing_else(name: str) -> None:
    sample = VALID[name].build()
    parts = sample.parts().values()
    everything = {
        digest for image in parts for digest in (*image.blobs, *image.manifests, *image.absent)
    }
    tops = {image.top for image in parts}
    assert graph_of(sample) - everything == set()
    assert everything - graph_of(sample) - tops == set()


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


@pytest.mark.parametrize("name", copied())
def test_a_strict_registry_takes_every_valid_shape(name: str, ends: tuple[Server, Server]) -> None:
    sample, (server, _) = VALID[name].build(), ends
    for reference, image in sample.parts().items():
        push_http(
            image,
            server.address,
            f"pushed/{name}",
            *((reference or "v1",) if ":" not in reference else ()),
        )
    expected = {
        key: data for image in sample.parts().values() for key, data in image.contents().items()
    }
    assert identical(everything(server, f"pushed/{name}"), expected)


# What a registry serves by a type that the harness's own client does not ask for.
OTHER_TYPES = ("unknown-child", "buildkit-cache-index", "oras-manifest", "artifact-manifest")


@pytest.mark.parametrize("name", copied())
def test_the_program_copies_every_valid_shape(name: str, ends: tuple[Server, Server]) -> None:
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


# What has to be in the line that says why: of the shape itself, else of all that are found in its
# way.
SAID = {
    "schema-1": "schema 1 manifest",
    "schema-1-signed": "schema 1 manifest",
    "schema-1-as-json": "schema 1 manifest",
    "schema-1-child": "schema 1 manifest",
    "manifest-and-index": "CVE-2021-41190",
    "index-as-manifest": "have the fields of application/vnd.oci.image.manifest",
    "manifest-as-index": "have the fields of application/vnd.oci.image.index",
    "other-content-type": "name different types",
    "other-child-type": "name different types",
    "child-of-other-kind": "name different types",
    "other-inner-type": "name different types",
    "empty-manifest": "no body",
    "cut-manifest": "not JSON",
    "json-list": "not an object",
    "html": "beginning '<html><body>502 Bad Gateway",
    "byte-order-mark": "BOM",
    "utf-16": "can't decode byte 0xff in position 0",
    "broken-utf-8": "can't decode byte 0xff",
    "keys-twice": "the key 'layers' twice",
    "not-a-number": "NaN",
    "two-documents": "Extra data",
    "deep-json": "nests deeper than 64",
    "above-4-mib": "longer than 4194304 bytes",
    "nested-5-deep": "nested more than 4 deep",
    "20000-layers": "more than 10000",
    "no-config": "have the fields",
    "layers-object": "'layers' is not a list",
    "layer-text": "layers[0]: not an object",
    "no-media-type": "layers[0]: '' is not a media type",
    "media-type-newline": "is not a media type",
    "digest-newline": "is not a digest",
    "null-layer": "layers[2]: not an object",
    "size-of-5000-digits": "the number 999",
    "media-type-header": "layers[0]: 'a/b  X-Evil: 1' is not a media type",
    "md5-digest": "digests of md5 cannot be verified",
    "blake3-digest": "digests of blake3 cannot be verified",
    "no-digest": "layers[0]: '' is not a digest",
    "short-digest": "layers[0]: 'sha256:ab12' is not a digest",
    "upper-digest": "is not a digest",
    "path-digest": "layers[0]: 'sha256:../../../../etc/passwd' is not a digest",
    "odd-subject": "subject: not an object",
    "odd-platform": "manifests[1]: 'platform' is not an object",
    "two-sizes": "two sizes for sha256:",
    "other-layer": "match its digest",
    "other-config": "match its digest",
    "layer-in-index": "match its digest",
    "other-child": "the index says",
    "same-size-child": "asked for sha256:",
    "child-size": "the index says 10",
    "lost-layer": "status 404: BLOB_UNKNOWN",
    "lost-config": "status 404: BLOB_UNKNOWN",
    "lost-urls-layer": "status 404: BLOB_UNKNOWN",
    "lost-child": "status 404: MANIFEST_UNKNOWN",
}
SAID_ELSE = {
    "document": "is not a size",
    "content": "its descriptor says",
    "target": "MANIFEST_INVALID",
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_program_refuses_what_must_not_be_copied(
    name: str, ends: tuple[Server, Server]
) -> None:
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
