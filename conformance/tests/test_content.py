"""Bodies in pieces, and images: the same bytes on every run."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest

from conformance.http import run_in_thread
from conformance.images import Seed, encode
from conformance.messages import Content, digest_of
from conformance.registry import App
from conformance.walks import fetch_http, identical


def test_content_in_pieces_is_one_stream() -> None:
    content = Content()
    expected = b""
    for number, size in enumerate((1, 3000, 70, 1)):
        data = bytes([number]) * size
        expected += data
        content.feed(data)
    assert bytes(content) == expected
    assert content.digest() == digest_of(expected)
    assert content.digest("sha512") == digest_of(expected, "sha512")
    for start, stop in ((0, 1), (1, 3001), (2999, 3003), (3072, None), (5, 5)):
        assert b"".join(content.pieces(start, stop)) == expected[start:stop]


# Images.


def test_images_are_the_same_bytes_on_every_run_and_python() -> None:
    seed = Seed(42)
    image = seed.image()
    index = seed.index([seed.index(attestations=True), seed.image(format="docker", spacing="odd")])
    tops = (image.top, index.top, seed.artifact(index).top, Seed(42).image().top)
    assert tops == (
        "sha256:6bb9a06639421e21e4f51b6b048bb9bfc566760af7971e7a86066eb9714879d8",
        "sha256:94f5434cb3579b281cc037ee33f6386ad0e5c23858eb6e2a03efc495cdc2e067",
        "sha256:c784f4c4cea1c9dd93dc8b3c261ab1568aab667a859e9f4f330cea3b7b5909e5",
        "sha256:6bb9a06639421e21e4f51b6b048bb9bfc566760af7971e7a86066eb9714879d8",
    )
    assert Seed(43).image().top != image.top


def test_layers_are_real_archives(seed: Seed) -> None:
    layer = seed.layer(200_000)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(layer))) as archive:
        (member,) = archive.getmembers()
        assert (member.size, member.mtime, member.uid, member.isfile()) == (200_000, 0, 0, True)


def test_the_bytes_of_odd_spacing_are_valid_json(seed: Seed) -> None:
    image = seed.image(spacing="odd")
    assert b"\\/" in image.body
    assert image.body != encode(image.document)
    assert image.document["config"]["digest"] in image.blobs


def test_identical_says_what_differs() -> None:
    assert identical({"a": b"1"}, {"a": b"1"})
    for other, said in (
        ({}, "first"),
        ({"a": b"1", "b": b""}, "second"),
        ({"a": b"2"}, "other bytes"),
    ):
        with pytest.raises(AssertionError, match=said):
            identical({"a": b"1"}, other)


def test_a_fetch_notices_bytes_that_are_not_the_digest(seed: Seed) -> None:
    image = seed.image()
    app = App()
    image.load_into(app, "a/b", tag="v1")
    app.add_blob("a/b", b"other", next(iter(image.blobs)))
    with run_in_thread(app) as server, pytest.raises(AssertionError, match="other bytes"):
        fetch_http(server.address, "a/b", "v1")


def test_a_fetch_follows_referrers_by_api_and_by_tag(seed: Seed) -> None:
    image = seed.image()
    artifacts = [seed.artifact(image) for _ in range(3)]
    wanted = {
        digest: data for part in (image, *artifacts) for digest, data in part.contents().items()
    }
    for options in ({}, {"referrers_page": 1}, {"referrers_api": False}):
        app = App(**options)
        for part in (image, *artifacts):
            part.load_into(app, "a/b", tag="v1" if part is image else None)
        seed.fallback_index(artifacts).load_into(app, "a/b", tag=image.top.replace(":", "-"))
        with run_in_thread(app) as server:
            got = fetch_http(server.address, "a/b", "v1", referrers=True)
        assert identical(got, wanted)
