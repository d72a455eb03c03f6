"""The catalogue of content through programs that nobody here wrote: docker-registry and skopeo.

What they refuse is a table with reasons. A shape that a program takes although the table says
otherwise fails too: then the shape is not what it seems, or the program is another version.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from conformance.http import run_in_thread
from conformance.programs import skopeo
from conformance.registry import App
from conformance.shapes import Shape, shapes
from conformance.walks import fetch_http, identical, push_http

LENGTHY = ("index-of-1000", "1000-layers")  # thousands of requests that show nothing new
VALID: Mapping[str, Shape] = {
    name: shape for name, shape in shapes().items() if not shape.refused and name not in LENGTHY
}

URLS = "urls have to match its list of allowed ones, whatever the media type"
UNKNOWN_TYPE = "it knows four types of manifest"
DOCKER_REGISTRY = {  # 2.8.2
    "docker-foreign": URLS,
    "oci-foreign": URLS,
    "urls-on-a-layer": URLS,
    "foreign-without-urls": "without urls a foreign layer has to be there",
    "sha512-child": "a manifest is known by its sha256 only",
    "unknown-child": UNKNOWN_TYPE,
    "oras-manifest": UNKNOWN_TYPE,
}
NESTED = "it takes no index within an index"
LAYER_TYPES = "it knows few types of layers in Docker manifests"
SKOPEO = {  # 1.9.3
    "nested-index": NESTED,
    "nested-4-deep": NESTED,
    "nested-shared": NESTED,
    "referrers-of-children": NESTED,
    "foreign-without-urls": "a layer without urls is fetched whatever its type",
    "urls-on-a-layer": "a layer with urls is not pushed whatever its type",
    "sha512-blobs": "what it pushes it calls by its sha256",
    "sha512-child": "a manifest is known by its sha256 only",
    "artifact-in-index": "it would write the index in another way",
    "buildkit-cache-index": "entries of an index are manifests for it",
    "unknown-child": UNKNOWN_TYPE,
    "oras-manifest": UNKNOWN_TYPE,
}


def some(table: Mapping[str, str]) -> list[str]:
    """Return what an ordinary run tries: all that is refused, and every third that is taken."""
    return [*table, *[name for name in VALID if name not in table][::3]]


def names(table: Mapping[str, str]) -> pytest.MarkDecorator:
    every = pytest.param(list(VALID), id="all", marks=pytest.mark.thorough)
    return pytest.mark.parametrize("names", [pytest.param(some(table), id="some"), every])


def test_the_tables_name_shapes() -> None:
    assert {*DOCKER_REGISTRY, *SKOPEO} <= set(VALID)


@pytest.mark.slow
@names(DOCKER_REGISTRY)
def test_docker_registry_takes_every_valid_shape_but_those_in_the_table(
    docker_registry: str, names: list[str]
) -> None:
    refused = {}
    for name in names:
        sample = VALID[name].build()
        try:
            for reference, image in sample.parts().items():
                tags = () if ":" in reference else (reference or "v1",)
                push_http(image, docker_registry, f"shapes/{name}", *tags)
        except AssertionError as problem:
            refused[name] = str(problem)
        else:
            if (
                name != "buildkit-cache-index"
            ):  # its entries are no manifests, which this client takes them for
                got = fetch_http(docker_registry, f"shapes/{name}", "v1")
                assert identical(got, sample.image.contents())
    assert refused.keys() == DOCKER_REGISTRY.keys(), refused


@pytest.mark.slow
@names(SKOPEO)
def test_skopeo_copies_every_valid_shape_but_those_in_the_table(
    tmp_path: Path, names: list[str]
) -> None:
    """It does so without one request that the strict registry would note."""
    options = ("--all", "--preserve-digests", "--src-tls-verify=false", "--dest-tls-verify=false")
    source, target = (App(any_manifest_type=True) for _ in range(2))
    refused = {}
    with run_in_thread(source) as one, run_in_thread(target) as other:
        for name in names:
            sample = VALID[name].build().load_into(source, name, "v1")
            places = [f"docker://{end.address}/{name}:v1" for end in (one, other)]
            try:
                skopeo("copy", *options, *places, home=tmp_path)
            except AssertionError as problem:
                refused[name] = str(problem)
            else:
                assert target.tags(name) == {"v1": sample.image.top}
        source.journal.check()
        target.journal.check()
    assert refused.keys() == SKOPEO.keys(), refused
