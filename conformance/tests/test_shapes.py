"""Images, fleets and the catalogue of shapes: the same bytes on every run, and true to what they say.

The strict registry, Debian's docker-registry and skopeo take each valid shape, but for those in a
table with reasons. A shape that a program takes although the table says otherwise fails too. That
regsync copies what is valid, and refuses what is not, is in tests/test_copy.py.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.http import run_in_thread
from conformance.images import PLATFORMS, Fleet, Image, Seed, Stream, encode
from conformance.messages import digest_of
from conformance.programs import skopeo
from conformance.registry import App
from conformance.shapes import Sample, Shape, shapes
from conformance.tests.asking import ROOT
from conformance.walks import fetch_http, identical, push_http

# Images and streams.


def test_images_are_the_same_bytes_on_every_run_and_python() -> None:
    seed = Seed(42)
    image = seed.image()
    index = seed.index([seed.index(attestations=True), seed.image(format="docker", spacing="odd")])
    assert (image.top, index.top, seed.artifact(index).top) == (
        "sha256:6bb9a06639421e21e4f51b6b048bb9bfc566760af7971e7a86066eb9714879d8",
        "sha256:94f5434cb3579b281cc037ee33f6386ad0e5c23858eb6e2a03efc495cdc2e067",
        "sha256:c784f4c4cea1c9dd93dc8b3c261ab1568aab667a859e9f4f330cea3b7b5909e5",
    )
    assert Seed(42).image().top == image.top != Seed(43).image().top


def test_layers_are_real_archives_and_odd_spacing_is_json(seed: Seed) -> None:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(seed.layer(200_000)))) as archive:
        (member,) = archive.getmembers()
        assert (member.size, member.mtime, member.uid, member.isfile()) == (200_000, 0, 0, True)
    image = seed.image(spacing="odd")
    assert image.body != encode(image.document)
    assert image.document["config"]["digest"] in image.blobs


@pytest.mark.parametrize("size", [0, 33, (1 << 20) - 1, (3 << 20) + 17])
def test_a_stream_is_the_same_bytes_however_it_is_read(size: int) -> None:
    stream = Stream(3, 4, size)
    whole = bytes(stream)
    assert len(whole) == size == stream.size
    assert stream.digest("sha512") == digest_of(whole, "sha512")
    for start, stop in ((5, 40), (31, 33), ((1 << 20) - 1, None), (7, 9 << 20)):
        assert b"".join(stream.pieces(start, stop)) == whole[start:stop]
    with pytest.raises(TypeError):
        stream.feed(b"x")


def test_streams_and_their_pieces_differ_and_cost_no_memory() -> None:
    assert Stream(1, 2, 40 << 10).digest() == (
        "sha256:4cc24c85d7b20da88c4b9c63adcac86ae3dc063c843a31983e15cba6187b680d"
    )
    assert len({Stream(seed, number, 100).digest() for seed in (1, 2) for number in (1, 2)}) == 4
    assert len({bytes(piece) for piece in Stream(1, 1, 8 << 20).pieces()[::2]}) == 8
    tracemalloc.start()
    try:
        assert sum(map(len, Stream(1, 1, 1 << 30).pieces())) == 1 << 30
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


# Fleets.

SMALL = Fleet(repositories=3, tags=4, shared=2, own=1, size=50, bases=2)


@pytest.mark.parametrize("platforms", [(), PLATFORMS])
def test_a_fleet_has_the_layers_that_its_numbers_say(platforms: tuple[str, ...]) -> None:
    fleet = replace(SMALL, platforms=platforms)
    kinds = len(platforms) or 1
    zero, one, two = (
        {digest for image in tagged.values() for digest in image.blobs}
        for tagged in fleet.images().values()
    )
    assert len(zero & two) == SMALL.shared * kinds
    assert not zero & one
    # Each of 12 images has a config and a layer of its own.
    assert len(zero | one | two) == kinds * (SMALL.shared * SMALL.bases + 12 * 2)
    assert replace(fleet, seed=1).images() != fleet.images()


def test_new_and_moved_tags_leave_the_others_as_they_were() -> None:
    fleet = replace(SMALL, repositories=5, tags=8)
    now = {
        (name, tag): image for name, tags in fleet.images().items() for tag, image in tags.items()
    }
    for change, lost, moved in (({"left_out": 2}, 2, 0), ({"moved": 5}, 0, 2)):
        tagged = replace(fleet, **change).images()
        kept = {(name, tag): image for name, tags in tagged.items() for tag, image in tags.items()}
        assert len(now) - len(kept) == lost
        changed = [place for place, image in kept.items() if image != now[place]]
        assert len(changed) == moved
        for place in changed:
            assert len({*kept[place].blobs} & {*now[place].blobs}) == SMALL.shared


# The catalogue.

DIGESTS = Path(__file__).resolve().parent / "data" / "shapes.txt"
VALID: Mapping[str, Shape] = {name: each for name, each in shapes().items() if not each.refused}


def golden() -> dict[str, str]:
    """Read the digest of each shape: the same from Python 3.10 to 3.13."""
    lines = [line.split() for line in DIGESTS.read_text(encoding="ascii").splitlines()]
    return {name: digest for digest, name in lines}


@pytest.mark.slow
def test_every_shape_has_the_bytes_that_it_always_had_whatever_the_interpreters_hashes() -> None:
    assert {name: shape.build().fingerprint() for name, shape in shapes().items()} == golden()
    code = "from conformance.shapes import shapes\n"
    code += "for name, shape in shapes().items(): print(name, shape.build().fingerprint())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
    )
    assert dict(line.split() for line in done.stdout.splitlines()) == golden()


def graph_of(sample: Sample) -> set[str]:
    """Follow every descriptor of every document of a sample; return the digests."""
    named: set[str] = set()
    for image in sample.parts().values():
        for media_type, body in image.manifests.values():
            document = Image("t", media_type, {"t": (media_type, body)}, {}).document
            parts = [document["config"]] if document.get("config") else []
            for key in ("layers", "manifests", "blobs"):
                parts += document.get(key) or []
            named |= {part["digest"] for part in parts}
    return named


def push(sample: Sample, at: App | str, repository: str) -> None:
    for reference, image in sample.parts().items():
        push_http(image, at, repository, *(() if ":" in reference else (reference or "v1",)))


@pytest.mark.parametrize("name", VALID)
def test_the_strict_registry_takes_every_valid_shape(name: str) -> None:
    shape = VALID[name]
    sample = shape.build()
    parts = sample.parts().values()
    named = graph_of(sample) | {image.top for image in parts}
    contents = {key: body for image in parts for key, body in image.contents().items()}
    assert named == {*contents}.union(*(image.absent for image in parts))

    app = App(**shape.options)
    push(sample, app, "app")
    app.journal.check()
    held = app.repositories["app"]
    found = {digest: bytes(content) for digest, content in held.blobs.items()}
    found |= {digest: stored.body for digest, stored in held.manifests.items()}
    assert identical(found, contents)


# The catalogue through programs that nobody here wrote.

LENGTHY = ("index-of-1000", "1000-layers")  # thousands of requests that show nothing new
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


def names(table: Mapping[str, str]) -> pytest.MarkDecorator:
    """Try all that is refused, and every third that is taken; all of them in a thorough run."""
    taken = [name for name in VALID if name not in table and name not in LENGTHY]
    every = pytest.param([*table, *taken], id="all", marks=pytest.mark.thorough)
    some = pytest.param([*table, *taken[::3]], id="some")
    return pytest.mark.parametrize("names", [some, every])


@pytest.mark.slow
@names(DOCKER_REGISTRY)
def test_docker_registry_takes_every_valid_shape_but_those_in_the_table(
    docker_registry: str, names: list[str]
) -> None:
    refused = {}
    for name in names:
        sample = VALID[name].build()
        try:
            push(sample, docker_registry, f"shapes/{name}")
        except AssertionError as problem:
            refused[name] = str(problem)
            continue
        if name != "buildkit-cache-index":  # its entries are no manifests, as this client expects
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
