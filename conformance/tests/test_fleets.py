"""Families share what they say that they share, and content of any size costs no memory."""

from __future__ import annotations

import hashlib
import http.client
import tracemalloc
from dataclasses import replace

import pytest

from conformance.http import run_in_thread
from conformance.images import PLATFORMS, Fleet, Stream
from conformance.messages import digest_of
from conformance.registry import App, Measured

SMALL = Fleet(repositories=3, tags=4, shared=2, own=1, size=50, bases=2)
GIB = 1 << 30


def blobs(fleet: Fleet) -> dict[str, set[str]]:
    """Return repository -> the digests of its blobs."""
    return {
        name: {digest for image in tagged.values() for digest in (*image.blobs, *image.streams)}
        for name, tagged in fleet.images().items()
    }


@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(Fleet(), id="one base"),
        pytest.param(Fleet(platforms=PLATFORMS), id="platforms"),
        pytest.param(Fleet(repositories=1, tags=1000, own=1), id="1000 tags"),
    ],
)
@pytest.mark.slow
def test_a_family_has_the_layers_that_its_numbers_say(fleet: Fleet) -> None:
    kinds = len(fleet.platforms) or 1
    count = fleet.repositories * fleet.tags
    together = set().union(*blobs(fleet).values())
    configs = count * kinds
    assert len(together) == kinds * fleet.shared * fleet.bases + count * kinds * fleet.own + configs
    assert sum(len(tagged) for tagged in fleet.images().values()) == count
    first = fleet.images()["fleet/app-0"]["1.0.0"]
    assert len(first.manifests) == (kinds + 1 if fleet.platforms else 1)


def test_repositories_share_their_base_and_nothing_else() -> None:
    zero, one, two = blobs(SMALL).values()
    assert len(zero & two) == SMALL.shared
    assert not zero & one


def test_platforms_have_bases_of_their_own() -> None:
    fleet = replace(SMALL, platforms=PLATFORMS, tags=1, repositories=2, bases=1)
    one, other = (tagged["1.0.0"] for tagged in fleet.images().values())
    assert len(set(one.blobs) & set(other.blobs)) == SMALL.shared * 4
    assert [entry["platform"]["architecture"] for entry in one.document["manifests"]] == [
        "amd64",
        "arm64",
        "arm",
        "s390x",
    ]


def test_a_family_is_the_same_bytes_every_time() -> None:
    told = "".join(image.top for tagged in SMALL.images().values() for image in tagged.values())
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == "90dc6b4bde079c8a"
    assert replace(SMALL, seed=1).images() != SMALL.images()


def test_new_tags_leave_the_others_as_they_were() -> None:
    before, after = replace(SMALL, left_out=2).images(), SMALL.images()
    new = {
        (name, tag) for name, tagged in after.items() for tag in tagged if tag not in before[name]
    }
    assert new == {("fleet/app-1", "1.3.0"), ("fleet/app-2", "1.3.0")}
    assert all(
        after[name][tag] == image
        for name, tagged in before.items()
        for tag, image in tagged.items()
    )


def test_moved_tags_keep_their_base_and_leave_the_others_as_they_were() -> None:
    fleet = replace(SMALL, repositories=5, tags=8)
    before, after = fleet.images(), replace(fleet, moved=5).images()
    changed = [
        (image, after[name][tag])
        for name, tagged in before.items()
        for tag, image in tagged.items()
        if after[name][tag] != image
    ]
    assert len(changed) == 2, "5 % of 40"
    for old, new in changed:
        assert len(set(old.blobs) & set(new.blobs)) == SMALL.shared


@pytest.mark.parametrize(
    "size", [0, 1, 31, 32, 33, (1 << 20) - 1, 1 << 20, (1 << 20) + 5, (3 << 20) + 17]
)
def test_a_stream_is_the_same_bytes_however_it_is_read(size: int) -> None:
    stream = Stream(3, 4, size)
    whole = bytes(stream)
    assert len(whole) == size == stream.size
    assert stream.digest() == digest_of(whole)
    assert stream.digest("sha512") == digest_of(whole, "sha512")
    for start, stop in (
        (0, 1),
        (5, 40),
        (31, 33),
        (1 << 20, (1 << 20) + 33),
        ((1 << 20) - 1, None),
        (7, 9 << 20),
    ):
        assert b"".join(stream.pieces(start, stop)) == whole[start:stop]


def test_streams_of_other_numbers_and_their_pieces_differ() -> None:
    assert Stream(1, 2, 40 << 10).digest() == (
        "sha256:4cc24c85d7b20da88c4b9c63adcac86ae3dc063c843a31983e15cba6187b680d"
    )
    assert len({Stream(seed, number, 100).digest() for seed in (1, 2) for number in (1, 2)}) == 4
    stamps = {bytes(piece) for piece in Stream(1, 1, 8 << 20).pieces()[::2]}
    assert len(stamps) == 8


@pytest.mark.slow
def test_four_gibibytes_cost_no_memory() -> None:
    stream = Stream(1, 1, 4 * GIB)
    stream.pieces(0, 1)  # the shared filling is made once
    tracemalloc.start()
    try:
        pieces = stream.pieces()
        assert sum(map(len, pieces)) == 4 * GIB
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_stream_and_what_was_measured_take_and_give_nothing() -> None:
    with pytest.raises(TypeError):
        Stream(1, 1, 9).feed(b"x")
    measured = Measured()
    assert measured.pieces() == []
    measured.feed(b"ab")
    measured.feed(b"c")
    assert (measured.size, measured.digest()) == (3, digest_of(b"abc"))
    with pytest.raises(LookupError):
        measured.pieces()
    with pytest.raises(LookupError):
        measured.digest("sha512")


def test_a_part_of_a_stream_can_be_asked_for() -> None:
    stream = Stream(1, 7, 3 << 20)
    app = App()
    app.repositories["app"].blobs[stream.digest()] = stream
    with run_in_thread(app) as server:
        connection = http.client.HTTPConnection(server.address, timeout=30)
        wanted = {"Range": "bytes=1048570-1048620"}
        connection.request("GET", f"/v2/app/blobs/{stream.digest()}", headers=wanted)
        assert connection.getresponse().read() == bytes(stream)[1048570:1048621]
        connection.close()
