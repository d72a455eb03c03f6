"""What goes over the wire in a copy or a sync, counted exactly, and how far a failure reaches.

The lower bounds of docs/design.md section 6 for open registries, then the isolation and the
repetition of failures. Every test looks at the target as well as at the counts, and at what must
not have been asked.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from typing import Any

import anyio
import pytest

from conformance.content.images import EMPTY_CONFIG, Image, Seed, compose_index, encode
from conformance.content.shapes import shapes
from conformance.messages import Answer, Request, Response, digest_of, error
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from conformance.server.sockets import Server
from tests.ends import Peer, copy, document, held, only, run_regsync, sync, tags


@pytest.fixture
def seed() -> Seed:
    return Seed(7)


def edited(image: Image, **fields: Any) -> Image:
    """Return the image with other top-level fields of its manifest."""
    return image.with_manifest(encode({**image.document, **fields}), image.media_type)


def wire(server: Server) -> dict[str, int]:
    """Return the counts of everything that was asked and forget it."""
    found = server.journal.summary()
    server.journal.clear()
    return found


def cold(blobs: int, manifests: int = 1) -> tuple[dict[str, int], dict[str, int]]:
    """Return the lower bounds, source's and target's, for one tag with so many blobs and manifests."""
    return (
        {"GET blob": blobs, "GET manifest": manifests},
        {
            "HEAD manifest": 1,
            "POST upload_start": blobs,
            "PUT upload": blobs,
            "PUT manifest": manifests,
        },
    )


# Lower bounds.


@pytest.mark.parametrize("format", ["oci", "docker"])
def test_a_cold_image_costs_its_lower_bound(source, target, seed, format):
    image = seed.image(format=format, sizes=(900, 2000, 300_000), spacing="odd")
    image.load_into(source.app, "app", tag="v1")
    ran = copy(source, target)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert held(target, "app", image)
    assert target.app.tags("app") == {"v1": image.top}
    assert (wire(source), wire(target)) == cold(4)
    assert ran.totals["bytes"] == image.size
    assert ran.totals["layers"] == {"transferred": 4, "unique": 4, "mounted": 0, "skipped": 0}


def test_no_request_is_a_ping_and_no_upload_body_is_sent_twice(source, target, seed):
    image = seed.image().load_into(source.app, "app", tag="v1")
    assert copy(source, target).status == 0
    for server in (source, target):
        assert not server.journal.count(kind="ping")
        assert not server.journal.count("DELETE")
        assert all("expect" not in entry.headers for entry in server.journal.entries)
    assert target.journal.bytes_in() == image.size + len(image.body)


def test_an_unchanged_tag_costs_one_request_at_each_end(source, target, seed):
    image = (
        seed.image().load_into(source.app, "app", tag="v1").load_into(target.app, "app", tag="v1")
    )
    ran = copy(source, target)
    assert (ran.status, only(ran.images)["reason"]) == (0, "unchanged")
    assert (wire(source), wire(target)) == ({"GET manifest": 1}, {"HEAD manifest": 1})
    assert only(ran.images)["digest"] == image.top


def test_a_second_run_says_nothing_and_moves_nothing(source, target, seed):
    seed.index().load_into(source.app, "app", tag="v1")
    where = (f"{source.address}/app:v1", f"{target.address}/app:v1")
    assert run_regsync("copy", "--no-artifacts", *where).out.startswith("synced ")
    wire(source), wire(target)
    second = run_regsync("copy", "--no-artifacts", *where)
    assert (second.status, second.out, second.err) == (0, "", "")
    assert (wire(source), wire(target)) == ({"GET manifest": 1}, {"HEAD manifest": 1})


def test_an_alias_tag_costs_one_put(source, target, seed):
    image = seed.index().load_into(source.app, "app", "v1", "latest")
    assert copy(source, target).status == 0
    wire(source), wire(target)
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("v1", "latest")})
    assert sorted(ran.statuses()) == ["skipped", "synced"]
    assert target.app.tags("app") == {"v1": image.top, "latest": image.top}
    assert wire(target) == {"GET tag_list": 1, "HEAD manifest": 1, "PUT manifest": 1}


def test_tags_of_one_image_in_one_run_move_it_once(source, target, seed):
    image = seed.index(platforms=("linux/amd64", "linux/arm64")).load_into(
        source.app, "app", "a", "b", "c"
    )
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("a", "b", "c")})
    assert ran.statuses() == ["synced"] * 3
    assert target.app.tags("app") == dict.fromkeys("abc", image.top)
    assert wire(source) == {"GET manifest": 3 + 2, "GET blob": 6}
    # The listing of the unknown repository takes the place of three HEADs.
    assert wire(target) == {
        "GET tag_list": 1,
        "POST upload_start": 6,
        "PUT upload": 6,
        "PUT manifest": 2 + 3,
    }


def test_a_version_is_put_before_the_tag_that_floats_with_it(source, target, seed):
    """I2: who reads `latest` while a sync runs finds its version there too."""
    image = seed.image().load_into(source.app, "app", "latest", "edge", "v1.2.0")
    ran = sync(
        {"source": source, "target": target},
        {"from": "app", "tags": tags("latest", "edge", "v1.2.0")},
    )
    assert ran.statuses() == ["synced"] * 3
    puts = [entry.reference for entry in target.journal.matching("PUT", "manifest")]
    assert puts[0] == "v1.2.0"
    assert sorted(puts) == ["edge", "latest", "v1.2.0"]
    assert target.app.tags("app")["latest"] == image.top


def test_an_index_waits_for_a_child_that_a_tag_of_its_own_brings(source, target, seed):
    child = seed.image().load_into(source.app, "app", tag="1-amd64")
    seed.index([child, seed.image(architecture="arm64")]).load_into(source.app, "app", tag="2")
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("1-amd64", "2")})
    assert ran.statuses() == ["synced"] * 2
    puts = [entry.reference for entry in target.journal.matching("PUT", "manifest")]
    assert child.top not in puts
    assert len(puts) == 3


def test_an_index_moves_children_before_itself_and_each_once(source, target, seed):
    image = seed.index(attestations=True).load_into(source.app, "app", tag="v1")
    assert copy(source, target).status == 0
    assert held(target, "app", image)
    puts = [entry.reference for entry in target.journal.matching("PUT", "manifest")]
    assert puts[-1] == "v1"
    assert len(puts) == len(set(puts)) == 9
    assert (wire(source), wire(target)) == cold(len(image.blobs), 9)


def test_nested_indexes_are_kept_and_put_from_below(source, target, seed):
    inner = seed.index(platforms=("linux/arm/v6", "linux/arm/v7"))
    image = seed.index([inner, seed.image()], with_platforms=False).load_into(
        source.app, "app", tag="v1"
    )
    assert copy(source, target).status == 0
    assert held(target, "app", image)
    puts = [entry.reference for entry in target.journal.matching("PUT", "manifest")]
    assert set(puts[: puts.index(inner.top)]) >= {
        digest for digest, (_, body) in inner.manifests.items() if body != inner.body
    }
    assert (wire(source), wire(target)) == cold(9, 5)


def test_a_child_known_at_the_target_is_not_pushed_again(source, target, seed):
    child, other, third = seed.image(), seed.image(), seed.image()
    one, two = seed.index([child, other]), seed.index([child, third])
    one.load_into(source.app, "app", tag="v1")
    two.load_into(source.app, "app", tag="v2")
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("v1", "v2")})
    assert ran.statuses() == ["synced", "synced"]
    assert held(target, "app", one)
    assert held(target, "app", two)
    assert source.journal.count("GET", "manifest", reference=child.top) == 1
    assert target.journal.count("PUT", "manifest", reference=child.top) == 1
    assert target.journal.count("PUT", "upload") == 9


# Platforms.


def trimmed(image: Image, *architectures: str) -> bytes:
    """Write the index as it has to come out: compact JSON with the other entries left out."""
    document = image.document
    document["manifests"] = [
        entry
        for entry in document["manifests"]
        if entry["platform"]["architecture"] in architectures
    ]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def test_a_platform_filter_moves_only_what_matches(source, target, seed):
    image = seed.index(
        spacing="indent", extra={"zulu": "é", "alpha": [1, None]}, annotations={"k": "v"}
    )
    image.load_into(source.app, "app", tag="v1")
    ran = copy(
        source, target, "app:v1", None, "--platform", "linux/amd64", "--platform", "linux/arm64"
    )
    body = trimmed(image, "amd64", "arm64")
    assert ran.status == 0
    stored = target.app.manifest("app", "v1")
    assert stored.body == body
    # Golden: no release may write other bytes, since every target would be pushed anew.
    assert (
        stored.digest == "sha256:7300796ab05df86cdf9940eeaeb468745b0093291f3a106b9cb92e0cd4c5a61a"
    )
    found = only(ran.images)
    assert (found["digest"], found["source_digest"]) == (digest_of(body), image.top)
    assert (wire(source), wire(target)) == cold(6, 3)
    again = copy(
        source, target, "app:v1", None, "--platform", "linux/arm64", "--platform", "linux/amd64"
    )
    assert only(again.images)["reason"] == "unchanged"
    assert (wire(source), wire(target)) == ({"GET manifest": 1}, {"HEAD manifest": 1})


def test_a_filter_that_drops_nothing_keeps_the_sources_bytes(source, target, seed):
    image = seed.index(platforms=("linux/amd64",), spacing="odd").load_into(
        source.app, "app", tag="v1"
    )
    assert copy(source, target, "app:v1", None, "--platform", "linux/amd64").status == 0
    assert target.app.manifest("app", "v1").body == image.body


def test_a_nested_index_is_trimmed_inside(source, target, seed):
    inner = seed.index(platforms=("linux/arm/v6", "linux/arm/v7"))
    seed.index([inner, seed.image()]).load_into(source.app, "app", tag="v1")
    assert copy(source, target, "app:v1", None, "--platform", "linux/arm/v7").status == 0
    outer = json.loads(target.app.manifest("app", "v1").body)
    below = only(outer["manifests"])
    kept = json.loads(target.app.manifest("app", below["digest"]).body)
    assert only(kept["manifests"])["platform"]["variant"] == "v7"
    assert source.journal.count("GET", "blob") == 3


def test_some_platforms_missing_is_a_warning(source, target, seed):
    seed.index(platforms=("linux/amd64", "linux/arm64")).load_into(source.app, "app", tag="v1")
    ran = copy(
        source, target, "app:v1", None, "--platform", "linux/amd64", "--platform", "windows/amd64"
    )
    assert ran.status == 0
    assert "warning: " in only(ran.err.splitlines())
    assert "windows/amd64" in ran.err
    assert len(json.loads(target.app.manifest("app", "v1").body)["manifests"]) == 1


def test_no_platform_found_is_an_error_that_says_all(source, target, seed):
    seed.index(platforms=("linux/amd64", "linux/arm64")).load_into(source.app, "app", tag="v1")
    ran = copy(source, target, "app:v1", None, "--platform", "plan9/mips")
    assert ran.status == 2
    line = only(ran.failed)
    for said in (
        "SOURCE_ERROR",
        "plan9/mips",
        "linux/amd64",
        "linux/arm64",
        f"{source.address}/app:v1",
    ):
        assert said in line
    assert not target.app.tags("app")
    assert wire(target) == {"HEAD manifest": 1}, "nothing is pushed"


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (1, "v01"),
        (10, "v01, v02, v03, v04, v05, v06, v07, v08, v09, v10"),
        (12, "v01, v02, v03, v04, v05, v06, v07, v08, v09, v10 and 2 more"),
    ],
)
def test_a_platform_that_indexes_lack_is_one_warning_that_names_their_tags(
    source, target, seed, count, named
):
    seed.index(platforms=("linux/amd64", "plan9/mips")).load_into(source.app, "app", tag="v00")
    for number in range(1, count + 1):
        index = seed.index(platforms=("linux/amd64", "linux/arm64"))
        index.load_into(source.app, "app", tag=f"v{number:02}")
    text = document(
        {"source": source, "target": target},
        {"from": "app", "tags": tags("v*"), "platforms": ["linux/amd64", "plan9/mips"]},
    )
    ran = run_regsync("sync", "--no-progress", "-c", "-", stdin=text)
    assert ran.status == 0
    warnings = [line for line in ran.err.splitlines() if "but not plan9" in line]
    place = f"{source.address}/app"
    words = f"the index has {named}, but not plan9/mips; the other platforms are copied"
    assert warnings == [f"warning: {place}: {words}"]


def test_a_single_image_is_copied_whatever_the_filter(source, target, seed):
    image = seed.image().load_into(source.app, "app", tag="v1")
    assert copy(source, target, "app:v1", None, "--platform", "plan9/mips").status == 0
    assert held(target, "app", image)


def test_an_index_of_blobs_is_copied_whatever_the_filter(source, target, seed):
    """BuildKit's older cache: an index whose entries are layers and a cache configuration."""
    image = shapes()["buildkit-cache-index"].build().load_into(source.app, "app", "v1").image
    ran = copy(source, target, "app:v1", None, "--platform", "plan9/mips")
    assert ran.status == 0, ran.err
    assert held(target, "app", image)
    assert (wire(source), wire(target)) == cold(3, 1)
    again = copy(source, target, "app:v1", None, "--platform", "plan9/mips")
    assert only(again.images)["reason"] == "unchanged"
    assert (wire(source), wire(target)) == ({"GET manifest": 1}, {"HEAD manifest": 1})


def test_blobs_beside_images_fall_to_the_filter(source, target, seed):
    one, other = seed.image(), seed.image()
    layer = one.document["layers"][0]
    # The same digest once as a layer and once, hostile, as an image of the platform that is asked
    # for.
    false = {
        **layer,
        "mediaType": one.media_type,
        "platform": {"os": "plan9", "architecture": "mips"},
    }
    platforms = [{"platform": {"os": "linux", "architecture": name}} for name in ("amd64", "arm64")]
    index = compose_index([(one, platforms[0]), (other, platforms[1])])
    document = {**index.document, "manifests": [layer, false, *index.document["manifests"]]}
    image = index.with_manifest(encode(document), index.media_type)
    image.load_into(source.app, "app", tag="v1")
    assert copy(source, target, "app:v1", None, "--platform", "linux/amd64").status == 0
    kept = json.loads(target.app.manifest("app", "v1").body)["manifests"]
    assert [entry["digest"] for entry in kept] == [one.top]
    assert (wire(source), wire(target)) == cold(3, 2)


# Blobs.


def test_layers_shared_by_two_repositories_are_uploaded_once_and_mounted(source, target, seed):
    shared = [seed.layer(3000), seed.layer(700)]
    one = seed.image(layers=[*shared, seed.layer(10)]).load_into(source.app, "one", tag="v1")
    two = seed.image(layers=[*shared, seed.layer(20)]).load_into(source.app, "two", tag="v1")
    ran = sync(
        {"source": source, "target": target},
        {"from": "one", "tags": tags("v1")},
        {"from": "two", "tags": tags("v1")},
    )
    assert ran.statuses() == ["synced", "synced"]
    assert held(target, "one", one)
    assert held(target, "two", two)
    assert ran.totals["layers"] == {"transferred": 6, "unique": 6, "mounted": 2, "skipped": 0}
    for layer in shared:
        assert source.journal.count("GET", "blob", reference=digest_of(layer)) == 1
    assert wire(target)["PUT upload"] == 6


def test_within_one_registry_nothing_but_mounts(source, seed):
    image = seed.index().load_into(source.app, "app", tag="v1")
    ran = copy(source, source, "app:v1", "mirror/app:v1")
    assert ran.status == 0
    assert held(source, "mirror/app", image)
    counted = wire(source)
    assert counted.pop("POST upload_start") == len(image.blobs)
    assert counted == {"GET manifest": 5, "HEAD manifest": 1, "PUT manifest": 5}
    assert ran.totals["bytes"] == 0


def test_a_refused_mount_is_an_upload_session(serve, source, seed):
    target = serve(mounts=False)
    shared = [seed.layer(3000 + n) for n in range(4)]
    names = ("one", "two", "three")
    images = [
        seed.image(layers=[*shared, seed.layer(9)]).load_into(source.app, name, tag="v1")
        for name in names
    ]
    ran = sync(
        {"source": source, "target": target},
        *({"from": name, "tags": tags("v1")} for name in names),
    )
    assert ran.statuses() == ["synced"] * 3
    for name, image in zip(names, images, strict=True):
        assert held(target, name, image)
    assert ran.totals["layers"]["mounted"] == 0
    assert (
        target.journal.count("POST", "upload_start") == target.journal.count("PUT", "upload") == 18
    )


def test_nobody_waits_for_mounts_at_a_registry_that_refuses_them(serve, source, seed):
    target = serve(mounts=False)
    for pair in ("ab", "cd"):
        layer = seed.layer(3000)
        for name in pair:
            seed.image(layers=[layer, seed.layer(9)]).load_into(source.app, name, tag="v1")
    started: list[anyio.Event] = []

    async def intercept(request: Request) -> Answer | None:
        # Whoever leads the second pair is not committed before the other one uploads the shared
        # layer.
        started[:] = started or [anyio.Event()]
        if request.method == "PUT" and request.repository in ("c", "d"):
            if request.kind == "manifest" and not started[0].is_set():
                await started[0].wait()
            if request.parameter("digest") == digest_of(layer):
                seen.add(request.repository)
                if len(seen) == 2:
                    started[0].set()
        return None

    seen: set[str] = set()
    target.app.intercept = intercept
    ran = sync(
        {"source": source, "target": target},
        *({"from": name, "tags": tags("v1")} for name in "abcd"),
    )
    assert ran.statuses() == ["synced"] * 4
    assert seen == {"c", "d"}


@pytest.mark.parametrize("status", [400, 403, 404, 405, 500], ids=str)
def test_a_refused_mount_is_followed_by_a_plain_upload(source, seed, status):
    image = seed.image().load_into(source.app, "app", tag="v1")

    refused = source.app.faults.on("POST", query={"mount": "*", "from": "app"})
    refused.status(status, "UNSUPPORTED", "no mounts")
    ran = copy(source, source, "app:v1", "mirror/app:v1")
    assert (ran.status, ran.err) == (0, "")
    assert held(source, "mirror/app", image)
    assert source.journal.count("PUT", "upload") == 3


def test_several_targets_read_each_blob_of_the_source_once(serve, source, seed):
    image = seed.image(sizes=(900, 1_500_000)).load_into(source.app, "app", tag="v1")
    targets = {name: serve() for name in ("t1", "t2", "t3")}
    ran = sync(
        {"source": source, **targets}, {"from": "app", "tags": tags("v1"), "targets": list(targets)}
    )
    assert ran.statuses() == ["synced"] * 3
    assert wire(source) == cold(3)[0]
    for each in targets.values():
        assert held(each, "app", image)
        assert wire(each) == cold(3)[1]


def test_a_layer_named_twice_moves_once(source, target, seed):
    layer = seed.layer(500)
    image = seed.image(layers=[layer, seed.layer(0), layer]).load_into(source.app, "app", tag="v1")
    assert copy(source, target).status == 0
    assert held(target, "app", image)
    assert (wire(source), wire(target)) == cold(3)


def test_an_image_without_layers_and_an_empty_layer_arrive(source, target, seed):
    bare = seed.image(layers=[]).load_into(source.app, "app", tag="bare")
    empty = seed.image(layers=[b""]).load_into(source.app, "app", tag="empty")
    for tag, image in (("bare", bare), ("empty", empty)):
        assert copy(source, target, f"app:{tag}").status == 0
        assert held(target, "app", image)
    assert not source.journal.count("GET", "blob", reference=digest_of(b"")), (
        "nobody has to send nothing"
    )


def test_foreign_layers_are_neither_fetched_nor_pushed(serve, source, seed):
    stranger = serve()
    target = serve()
    image = seed.image(foreign=[f"{stranger.url}/layer"]).load_into(source.app, "app", tag="v1")
    assert copy(source, target).status == 0
    assert held(target, "app", image)
    assert (wire(source), wire(target)) == cold(3)
    assert not stranger.journal.entries


def test_embedded_data_is_pushed_without_being_fetched(source, target, seed):
    image = seed.image(inline_config=True).load_into(source.app, "app", tag="v1")
    assert copy(source, target).status == 0
    assert held(target, "app", image)
    config = image.document["config"]["digest"]
    assert not source.journal.count("GET", "blob", reference=config)
    assert wire(source) == {"GET manifest": 1, "GET blob": 2}


@pytest.mark.provokes("manifest_refused")
def test_embedded_data_that_is_something_else_is_fetched(source, target, seed):
    plain = seed.image()
    config = {**plain.document["config"], "data": "bm90IGl0"}
    image = edited(plain, config=config).load_into(source.app, "app", tag="v1")
    target.app.any_manifest_type = True
    copy(source, target)
    assert source.journal.count("GET", "blob", reference=config["digest"]) == 1
    assert target.app.blob("app", config["digest"]) == image.blobs[config["digest"]]


def test_the_empty_config_is_never_fetched(source, target, seed):
    made = seed.artifact()
    bare = {key: value for key, value in made.document["config"].items() if key != "data"}
    image = edited(made, config=bare).load_into(source.app, "app", tag="v1")
    assert copy(source, target).status == 0
    assert held(target, "app", image)
    assert not source.journal.count("GET", "blob", reference=digest_of(EMPTY_CONFIG))


def test_unknown_fields_and_spacing_arrive_byte_for_byte(source, target, seed):
    image = seed.index(
        [seed.image(extra={"x-new": {"a": [1.5, "\u00fc"]}}, spacing="odd")],
        extra={"vendor": "y"},
        spacing="indent",
    )
    image.load_into(source.app, "app", tag="v1")
    assert copy(source, target).status == 0
    assert held(target, "app", image)
    assert target.app.manifest("app", "v1").body == image.body


def test_sha512_digests_are_verified_and_kept(source, target, seed):
    plain = seed.image(sizes=(300_000,))
    layer = next(data for data in plain.blobs.values() if len(data) > 10_000)
    digest = digest_of(layer, "sha512")
    described = {**plain.document["layers"][0], "digest": digest}
    named = dataclasses.replace(plain, blobs={**plain.blobs, digest: layer})
    del named.blobs[digest_of(layer)]  # type: ignore[attr-defined]
    document = {**named.document, "layers": [described]}
    image = named.with_manifest(encode(document), named.media_type, "sha512")
    image.load_into(source.app, "app", tag="v1")
    assert image.top.startswith("sha512:")
    where = f"app@{image.top}"
    assert copy(source, target, where).status == 0
    assert held(target, "app", image)
    assert copy(source, target, "app:v1").status == 0
    assert target.journal.count("PUT", "upload") == 2


def test_a_blob_that_is_there_already_is_not_sent(source, target, seed):
    """I4: skip beats mount, mount beats upload."""
    image = seed.image().load_into(source.app, "app", tag="v1")
    layer = image.document["layers"][1]["digest"]
    target.app.add_blob("app", image.blobs[layer])
    ran = copy(source, target)
    assert ran.status == 0
    assert held(target, "app", image)
    assert not source.journal.count("GET", "blob", reference=layer)
    assert target.journal.count("PUT", "upload") == 2
    assert ran.totals["layers"]["skipped"] == 1


# Listings and skips.


def test_immutable_tags_of_the_targets_listing_cost_nothing(source, target, seed):
    for tag in ("v1", "v2", "v3"):
        seed.image().load_into(source.app, "app", tag=tag)
    seed.image().load_into(target.app, "app", "v1", "v2")
    rule = tags("v1", "v2", "v3", immutable_tags="v*")
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": rule})
    assert ran.statuses() == ["skipped", "skipped", "synced"]
    assert {each["reason"] for each in ran.images} == {"immutable_tag", None}
    for server in (source, target):
        for tag in ("v1", "v2"):
            assert not server.journal.count(reference=tag)
    assert wire(target)["GET tag_list"] == 1


def test_literal_tags_need_no_listing_of_the_source(source, target, seed):
    seed.image().load_into(source.app, "app", "v1", "other")
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("v1")})
    assert ran.statuses() == ["synced"]
    assert not source.journal.count(kind="tag_list")
    assert wire(target)["HEAD manifest"] == 1
    assert set(target.app.tags("app")) == {"v1"}


def test_a_listing_of_the_target_saves_the_heads_of_what_it_lacks(source, target, seed):
    source.app.page_size = 2
    images = {
        f"v{n}": seed.image(sizes=(9,)).load_into(source.app, "app", tag=f"v{n}") for n in range(5)
    }
    images["v0"].load_into(target.app, "app", tag="v0")
    seed.image(sizes=(9,)).load_into(target.app, "app", tag="v1")
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("v*")})
    assert ran.statuses() == ["skipped", *["synced"] * 4]
    assert target.app.tags("app") == {tag: image.top for tag, image in images.items()}
    assert source.journal.count("GET", "tag_list") == 3, "three pages of two"
    heads = [entry.reference for entry in target.journal.matching("HEAD", "manifest")]
    assert sorted(heads) == ["v0", "v1"]


def test_mappings_of_one_source_share_its_listing(serve, source, seed):
    target = serve()
    seed.image().load_into(source.app, "app", tag="v1")
    ran = sync(
        {"source": source, "target": target},
        {"from": "app", "to": "a", "tags": tags("v*")},
        {"from": "app", "to": "b", "tags": tags("v*")},
    )
    assert ran.statuses() == ["synced", "synced"]
    assert source.journal.count("GET", "tag_list") == 1
    assert ran.totals["layers"]["mounted"] == 3


@pytest.mark.parametrize("present", [True, False], ids=["unchanged", "changed"])
def test_head_first_fetches_a_manifest_only_on_difference(source, target, seed, present):
    image = seed.image().load_into(source.app, "app", tag="v1")
    (image if present else seed.image()).load_into(target.app, "app", tag="v1")
    registries = {"source": {"url": source.url, "head_first": True}, "target": target}
    ran = sync(registries, {"from": "app", "tags": tags("v1")})
    assert ran.statuses() == ["skipped" if present else "synced"]
    assert source.journal.count("HEAD", "manifest") == 1
    fetched = source.journal.matching("GET", "manifest")
    assert [entry.reference for entry in fetched] == ([] if present else [image.top])
    assert target.app.tags("app") == {"v1": image.top}


def test_a_literal_tag_that_the_source_lacks_fails_that_image_only(source, target, seed):
    seed.image().load_into(source.app, "app", tag="v1")
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("v1", "v2")})
    assert (ran.status, ran.statuses()) == (1, ["synced", "failed"])
    lost = ran.images[[each["status"] for each in ran.images].index("failed")]
    assert lost["error"]["code"] == "SOURCE_ERROR"
    assert lost["error"]["side"] == "source"
    assert f"{source.address}/app:v2" in only(ran.failed)
    assert set(target.app.tags("app")) == {"v1"}


# Logins.


def test_one_bare_request_and_one_token_serve_a_whole_run(serve, seed):
    services = [TokenService({"captain": "secret"}, anonymous=False) for _ in range(2)]
    source, target = (serve(auth=service) for service in services)
    for name in ("one", "two", "three"):
        for tag in ("v1", "v2"):
            seed.image().load_into(source.app, name, tag=tag)
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": "secret"}}
    registries = {"source": {"url": source.url, **login}, "target": {"url": target.url, **login}}
    ran = sync(
        registries, *({"from": name, "tags": tags("v1", "v2")} for name in ("one", "two", "three"))
    )
    assert ran.statuses() == ["synced"] * 6
    for server, service, actions in zip(
        (source, target), services, ("pull", "pull,push"), strict=True
    ):
        assert service.requests == 1
        assert sorted(service.issued[0].split()) == sorted(
            f"repository:{name}:{actions}" for name in ("one", "two", "three")
        )
        assert len(server.journal.matching(status=401)) == 1, (
            "the others wait for what the first one learns"
        )
        assert server.journal.entries[0].status == 401


@pytest.mark.parametrize("is_layer", [False, True])
def test_a_token_that_ends_before_an_upload_is_renewed_and_the_blob_sent(
    serve, source, seed, is_layer
):
    service = TokenService({"captain": "secret"}, anonymous=False)
    target = serve(auth=service)
    image = seed.image(sizes=(700_000,)).load_into(source.app, "app", tag="v1")
    lost = max(image.blobs, key=lambda digest: (len(image.blobs[digest]) > 500_000) == is_layer)
    revoked: list[str] = []

    def intercept(request: Request) -> Answer | None:
        is_upload = (request.method, request.kind) == ("PUT", "upload")
        if is_upload and request.parameter("digest") == lost and not revoked:
            revoked.append(request.reference)
            service.revoke()
        return None

    target.app.intercept = intercept
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": "secret"}}
    ran = sync(
        {"source": source, "t": {"url": target.url, **login}}, {"from": "app", "tags": tags("v1")}
    )
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert target.journal.count("PUT", "upload", status=401) >= 1
    assert service.requests == 2


def test_a_token_that_ends_in_the_middle_is_renewed(serve, target, seed):
    service = TokenService({"captain": "secret"}, anonymous=False)
    source = serve(auth=service)
    image = seed.image().load_into(source.app, "app", tag="v1")
    revoked: list[str] = []

    def intercept(request: Request) -> Answer | None:
        if request.kind == "blob" and not revoked:
            revoked.append(request.reference)
            service.revoke()
        return None

    source.app.intercept = intercept
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": "secret"}}
    ran = sync(
        {"source": {"url": source.url, **login}, "target": target},
        {"from": "app", "tags": tags("v1")},
    )
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert service.requests == 2, "one new token, whoever was refused"


def test_a_private_repository_spoils_no_anonymous_token_of_the_public_ones(serve, target, seed):
    """A token service may answer 401 to the whole request where one scope of it needs a login."""
    service = TokenService()
    source = serve(auth=service)
    names = ("one", "private", "two")
    images = {name: seed.image().load_into(source.app, name, tag="v1") for name in names}

    def intercept(request: Request) -> Answer | None:
        if request.path == "/token" and "private" in str(request.query):
            return error(401, "UNAUTHORIZED", "authentication required")
        return None

    source.app.intercept = intercept
    ran = sync(
        {"source": source, "target": target},
        *({"from": name, "tags": tags("v1")} for name in names),
    )
    assert ran.statuses() == ["synced", "failed", "synced"], ran.err
    assert f"{source.address}/private:v1" in only(ran.failed)
    assert "private (pull)" in only(ran.failed)
    assert held(target, "one", images["one"])
    assert held(target, "two", images["two"])
    # The wide one was refused once; then each repository has its own.
    asked = [each.target for each in source.journal.entries if each.target.startswith("/token")]
    assert [target.count("scope=") for target in asked] == [3, 1, 1, 1]


# Isolation.


def test_one_mappings_404_is_its_own(source, target, seed):
    image = seed.image().load_into(source.app, "app", tag="v1")
    ran = sync(
        {"source": source, "target": target},
        {"from": "gone", "tags": tags("*")},
        {"from": "app", "tags": tags("v1")},
    )
    assert (ran.status, ran.statuses()) == (1, ["synced", "failed"])
    line = only(ran.failed)
    assert f"{source.address}/gone:*" in line
    assert f"{target.address}/gone:*" in line
    assert "SOURCE_ERROR" in line
    assert held(target, "app", image)


def test_one_target_that_is_down_stops_for_itself_only(serve, source, seed):
    image = seed.image().load_into(source.app, "app", "v1", "v2", "v3", "v4")
    up = serve()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    ran = sync(
        {"source": source, "up": up, "down": nowhere},
        {"from": "app", "targets": ["up", "down"], "tags": tags("v1", "v2", "v3", "v4")},
    )
    assert ran.status == 1
    assert held(up, "app", image)
    assert len(up.app.tags("app")) == 4
    lost = [each for each in ran.images if each["status"] == "failed"]
    assert {each["error"]["code"] for each in lost} == {"NETWORK_ERROR"}
    assert {each["error"]["side"] for each in lost} == {"target"}
    asked = ran.totals["requests"][nowhere]
    assert set(asked) == {"tag_list"}
    assert asked["tag_list"] < 8, "a first contact and its probes, for all images"
    assert len(ran.failed) == len(lost) == 4
    assert all("connection refused" in line for line in ran.failed)


def test_one_broken_image_leaves_the_others_whole(source, target, seed):
    shared = seed.layer(4000)
    good = [seed.image(layers=[shared, seed.layer(n)]) for n in range(3)]
    broken = seed.image(layers=[shared, seed.layer(50)])
    for n, image in enumerate(good):
        image.load_into(source.app, f"r{n}", tag="v1")
    broken.load_into(source.app, "broken", tag="v1")
    lost = broken.document["layers"][1]["digest"]
    del source.app.repositories["broken"].blobs[lost]
    names = ["broken", "r0", "r1", "r2"]
    ran = sync(
        {"source": source, "target": target},
        *({"from": name, "tags": tags("v1")} for name in names),
    )
    assert (ran.status, ran.statuses()) == (1, ["failed", *["synced"] * 3])
    for n, image in enumerate(good):
        assert held(target, f"r{n}", image)
    assert not target.app.tags("broken")
    assert lost in only(ran.failed)


def test_two_mappings_that_want_one_tag_conflict_and_the_first_wins(source, target, seed):
    one = seed.image().load_into(source.app, "one", tag="v1")
    seed.image().load_into(source.app, "two", "v1", "v2")
    ran = sync(
        {"source": source, "target": target},
        {"from": "one", "to": "app", "tags": tags("v1")},
        {"from": "two", "to": "app", "tags": tags("v*")},
    )
    assert ran.status == 1
    assert target.app.tags("app")["v1"] == one.top
    lost = only([each for each in ran.images if each["status"] == "failed"])
    assert lost["error"]["code"] == "TARGET_ERROR"
    assert lost["source"].endswith("/two:v1")
    assert "v2" in target.app.tags("app"), "its other tags are its own"
    assert not source.journal.count("GET", "manifest", "two", reference="v1")


def test_two_mappings_that_ask_the_same_are_done_once(source, target, seed):
    seed.image().load_into(source.app, "app", tag="v1")
    mapping = {"from": "app", "tags": tags("v1")}
    ran = sync({"source": source, "target": target}, mapping, mapping)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert wire(target)["PUT manifest"] == 1


# Repetition.


def times(server: Server, count: int, answer: Answer, **which: Any) -> None:
    """Have the first `count` requests that agree with `which` answered with `answer`."""
    left = [count]

    def intercept(request: Request) -> Answer | None:
        if all(getattr(request, name) == value for name, value in which.items()) and left[0]:
            left[0] -= 1
            return answer if isinstance(answer, bytes) else dataclasses.replace(answer)
        return None

    server.app.intercept = intercept


REPEATED = [
    pytest.param("source", {"method": "GET", "kind": "manifest"}, id="manifest get"),
    pytest.param("source", {"method": "GET", "kind": "blob"}, id="blob get"),
    pytest.param("target", {"method": "HEAD", "kind": "manifest"}, id="target head"),
    pytest.param("target", {"method": "POST", "kind": "upload_start"}, id="upload start"),
    pytest.param("target", {"method": "PUT", "kind": "upload"}, id="upload body"),
    pytest.param("target", {"method": "PUT", "kind": "manifest"}, id="manifest put"),
]


@pytest.mark.parametrize(("side", "which"), REPEATED)
@pytest.mark.parametrize("status", [503, 429, 408])
def test_a_passing_failure_costs_one_repetition(source, target, seed, side, which, status):
    image = seed.image(sizes=(800,)).load_into(source.app, "app", tag="v1")
    answer = error(status, "UNAVAILABLE", "not now", headers=[("Retry-After", "7")])
    times({"source": source, "target": target}[side], 1, answer, **which)
    ran = copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert ran.seconds >= 7, "what the registry asks for is waited"
    at_source, at_target = cold(2)
    expected = {**at_source, **at_target}
    expected[f"{which['method']} {which['kind']}"] += 1
    if which["kind"] == "upload":
        # A whole body whose answer is 5xx is asked for before it is sent again. One that a limit has
        # refused goes again to the same session. It comes from memory: no source is read again.
        if status != 429:
            expected["POST upload_start"] += 1
        if status == 503:
            expected["HEAD blob"] = 3
    # Where the source failed the upload session is still good.
    assert {**wire(source), **wire(target)} == expected


def test_a_session_whose_source_refuses_is_cancelled_by_one_request(source, target, seed):
    image = seed.image(sizes=(800,)).load_into(source.app, "app", tag="v1")
    lost = image.document["layers"][0]["digest"]
    del source.app.repositories["app"].blobs[lost]
    ran = copy(source, target)
    assert ran.status == 2
    assert f"fetch blob {source.address}/app@{lost}" in only(ran.failed)
    assert target.journal.count("POST", "upload_start") == 2
    assert target.journal.count("PUT", "upload", status=201) == 1
    assert [entry.status for entry in target.journal.matching("DELETE")] == [204]
    assert target.app.uploads() == 0


@pytest.mark.parametrize("answer", [401, 404, 405, 429, 503])
def test_a_session_that_cannot_be_cancelled_changes_nothing(source, target, seed, answer):
    seed.image(sizes=()).load_into(source.app, "app", tag="v1")
    source.app.repositories["app"].blobs.clear()
    times(target, 99, error(answer, "UNSUPPORTED", "not this"), method="DELETE", kind="upload")
    ran = copy(source, target)
    assert (ran.status, ran.seconds) == (2, 0.0)
    assert "fetch blob" in only(ran.failed)
    assert only(ran.images)["error"]["side"] == "source"
    assert target.journal.count("DELETE") == 1


@pytest.mark.provokes("blob_pulled_twice")
def test_a_blob_that_may_not_be_staged_is_read_by_each_target(serve, source, seed, tmp_path):
    image = seed.image(sizes=(1_100_000,)).load_into(source.app, "app", tag="v1")
    targets = {name: serve() for name in ("t1", "t2")}
    ran = sync(
        {"source": source, **targets},
        {"from": "app", "tags": tags("v1"), "targets": list(targets)},
        **{"global": {"staging_size_limit": 0, "cache_dir": str(tmp_path)}},
    )
    assert ran.status == 0, ran.err
    assert wire(source) == {"GET manifest": 1, "GET blob": 3}
    for each in targets.values():
        assert held(each, "app", image)
        assert wire(each) == cold(2)[1]


def test_429_does_not_use_up_attempts(source, target, seed):
    image = seed.image().load_into(source.app, "app", tag="v1")
    refusal = error(429, "TOOMANYREQUESTS", "slowly", headers=[("Retry-After", "0")])
    times(source, 9, refusal, method="GET", kind="manifest")
    ran = copy(source, target)
    assert ran.status == 0
    assert held(target, "app", image)
    assert source.journal.count("GET", "manifest") == 10
    assert ran.totals["throttled"] == {source.address: 9}


@pytest.mark.parametrize("status", [400, 403, 404, 501], ids=str)
def test_a_refusal_is_not_repeated(source, target, seed, status):
    seed.image().load_into(source.app, "app", tag="v1")
    times(source, 99, error(status, "UNSUPPORTED", "no"), method="GET", kind="manifest")
    ran = copy(source, target)
    assert ran.status == (4 if status == 403 else 2)
    assert source.journal.count("GET", "manifest") == 1
    assert not target.app.tags("app")


def test_a_connection_dropped_before_the_answer_is_replaced(speaker, target, seed):
    image = seed.image(layers=[])
    app = App()
    image.load_into(app, "app", tag="v1")
    asked: list[str] = []

    async def drop_every_second(peer: Peer) -> None:
        while head := await peer.head():
            line = head.decode().splitlines()[0]
            asked.append(line)
            if len(asked) == 2:
                return
            method, path, _ = line.split()
            answer = app.request(method, path, [("Accept", image.media_type)])
            lines = [f"HTTP/1.1 {answer.status} OK", f"Content-Length: {answer.size}"]
            lines += [f"{name}: {value}" for name, value in answer.headers]
            await peer.send("\r\n".join([*lines, "", ""]).encode() + answer.data)

    address = speaker(drop_every_second)
    where = (f"{address}/app:v1", f"{target.address}/app:v1")
    ran = run_regsync("copy", "--no-artifacts", "--json", *where)
    assert ran.err == "", asked
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert len(asked) == 3, asked


def test_a_target_that_drops_the_line_in_a_body_gets_it_again(source, target, seed):
    image = seed.image(sizes=(3_000_000,)).load_into(source.app, "app", tag="v1")
    layer = image.document["layers"][0]["digest"]
    dropped: list[str] = []

    def intercept(request: Request) -> Answer | None:
        if request.method == "PUT" and request.parameter("digest") == layer and not dropped:
            dropped.append(request.target)
            return Response(503, early=True, close=True)
        return None

    target.app.intercept = intercept
    ran = copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert source.journal.count("GET", "blob", reference=layer) == 2


@pytest.mark.parametrize(
    "status", [(404, "NAME_UNKNOWN"), (403, "DENIED"), (405, "UNSUPPORTED")], ids=str
)
@pytest.mark.parametrize("images", [1, 20])
def test_a_repository_that_takes_no_upload_is_not_asked_for_each_blob(serve, seed, status, images):
    """Those that begin at once find out, however many blobs and images wait behind them; others are
    brought.
    """
    source, target = serve(), serve()
    for number in range(images):
        seed.image(sizes=(900, 1000, 1100)).load_into(source.app, "app", f"v{number}")
    seed.image().load_into(source.app, "other", "v1")

    def refuse(request: Request) -> Answer | None:
        missing = request.kind == "upload_start" and request.repository == "app"
        return error(*status, "not here") if missing else None

    target.app.intercept = refuse
    ran = sync(
        {"source": source, "mine": target},
        *({"from": name, "tags": tags("v*")} for name in ("app", "other")),
    )
    assert sorted(ran.statuses()) == ["failed"] * images + ["synced"]
    told = [each["error"]["message"] for each in ran.images if each["status"] == "failed"]
    assert len(told) == images
    assert all(each.endswith(f"status {status[0]}: {status[1]} not here") for each in told)
    refused = [
        entry
        for entry in target.journal.matching("POST", "upload_start")
        if entry.repository == "app"
    ]
    assert len(refused) <= 8  # those of the blobs that began before the first answer
    assert not [
        entry for entry in source.journal.matching("GET", "blob") if entry.repository == "app"
    ]
