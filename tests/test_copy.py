"""What a copy moves, what it asks for and what it refuses, and how far a failure reaches.

Registries are the harness's, on a clock that jumps. Runs have no state and copy no artifacts, which
have files of their own; what undisturbed runs cost in scenes of every kind is in test_costs.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
import pytest

from conformance.images import LARGE, Fleet, Image, Seed, Stream, compose_index, encode
from conformance.memory import Place
from conformance.messages import Answer, Request, digest_of
from conformance.registry import App, Measured, MeasuringApp
from conformance.shapes import shapes
from tests.costs import costs
from tests.ends import Virtual, document, held, only, tags
from tests.least import Repository, Terms, least
from tests.mirrors import CopyMirror, asked
from tests.thinning import thorough

UNCHANGED = ({"GET manifest": 1}, {"HEAD manifest": 1})  # what a tag costs that is there


@pytest.fixture
def copies(world: Virtual, tmp_path: Path) -> CopyMirror:
    return CopyMirror(world, tmp_path)


def check_least(copies: CopyMirror, *repositories: Repository, **terms: Any) -> None:
    """Assert that the last run has asked for what it could not avoid."""
    bound = least(repositories, Terms(**terms))
    costs(copies.source, bound.source)
    for place, tally in zip(copies.targets.values(), bound.targets, strict=True):
        costs(place, tally)


def cold(blobs: int, manifests: int = 1) -> tuple[dict[str, int], dict[str, int]]:
    """Return what a tag with so many blobs and manifests costs, at the source and at the target."""
    at_source = {"GET blob": blobs, "GET manifest": manifests}
    uploads = {"POST upload_start": blobs, "PUT upload": blobs}
    return at_source, {"HEAD manifest": 1, **uploads, "PUT manifest": manifests}


def everything(place: Place) -> dict[str, bytes]:
    """Return the bytes of all blobs and manifests of a repository by digest."""
    known = place.app.repositories["app"]
    blobs = {digest: bytes(content) for digest, content in known.blobs.items()}
    return {**blobs, **{digest: stored.body for digest, stored in known.manifests.items()}}


# One image. What the catalogue of shapes itself promises is in conformance/tests/test_shapes.py.

LENGTHY = ("index-of-1000", "1000-layers")  # thousands of requests
VALID = [
    thorough(pytest.param(name)) if name in LENGTHY else name
    for name, shape in shapes().items()
    if not shape.refused
]
REFUSED = [name for name, shape in shapes().items() if shape.refused]


@pytest.mark.parametrize("name", VALID)
async def test_content_of_each_shape_arrives_byte_for_byte_and_costs_its_lower_bound(
    world, tmp_path, name
):
    shape = shapes()[name]
    copies = CopyMirror(world, tmp_path, **shape.options)
    sample = shape.build().load_into(copies.source.app, "app", "v1")
    for number, (reference, image) in enumerate(sample.parts().items()):
        # What is held by digest is copied by a tag of its own.
        tag = reference if reference and ":" not in reference else f"v{number + 1}"
        image.load_into(copies.source.app, "app", tag)
        ran = await copies.copy(f"app:{tag}")
        assert (ran.status, ran.err) == (0, "")
        assert held(copies.target, "app", image)
        if name == "inline-everything":
            copies.source.journal.matching("GET", "blob").none()
        elif number == 0:
            check_least(copies, Repository("app", {tag: image}, [{}], is_listed=False))
            assert ran.totals["bytes"] == image.size
        assert only((await copies.copy(f"app:{tag}")).images)["reason"] == "unchanged"
        assert copies.asked() == UNCHANGED
    assert everything(copies.target) == everything(copies.source)
    assert copies.target.app.tags("app") == copies.source.app.tags("app")


# The strict registry refuses these too; what does not agree with its descriptor is read twice.
@pytest.mark.provokes("manifest_refused", "manifest_fetched_twice", "blob_pulled_twice")
@pytest.mark.parametrize("name", REFUSED)
async def test_content_that_must_not_be_copied_is_refused_and_the_tag_stays(copies, name):
    shape = shapes()[name]
    sample = shape.build().load_into(copies.source.app, name, "v1")
    before = copies.seed.image().load_into(copies.target.app, name, "v1")
    ran = await copies.copy(f"{name}:v1")
    assert ran.status == 2
    assert f"source.test/{name}:v1" in only(ran.failed)
    # What the line says of each is in test_oci.py.
    side = "SOURCE" if name.startswith("lost-") else "CONTENT"
    code = "TARGET_ERROR" if shape.found == "target" else f"{side}_ERROR"
    assert only(ran.images)["error"]["code"] == code
    assert copies.target.app.tags(name) == {"v1": before.top}
    assert sample.image.top not in copies.target.app.repositories[name].manifests
    if shape.found == "document":
        copies.target.journal.matching("POST PUT PATCH").none()
    if shape.found == "target":
        copies.target.journal.clear()  # the strict registry has noted it: that is what it is for


async def test_a_second_run_says_nothing(copies):
    copies.push("v1")
    where = ("source.test/app:v1", "target.test/app:v1")
    text = document({"source": copies.source, "target": copies.target})
    ran = await copies.world.run("copy", "--no-artifacts", "-c", "-", *where, stdin=text)
    assert ran.out.startswith("synced source.test/app:v1 -> target.test/app:v1 ")
    ran = await copies.world.run("copy", "--no-artifacts", "-c", "-", *where, stdin=text)
    assert (ran.status, ran.out, ran.err) == (0, "", "")


@pytest.mark.provokes("manifest_refused")
async def test_embedded_data_that_is_something_else_is_fetched(copies):
    plain = copies.seed.image()
    config = {**plain.document["config"], "data": "bm90IGl0"}
    document = {**plain.document, "config": config}
    copies.push("v1", plain.with_manifest(encode(document), plain.media_type))
    copies.target.app.any_manifest_type = True
    await copies.copy()
    copies.source.journal.matching("GET", "blob", reference=config["digest"]).exactly(1)
    assert copies.target.app.blob("app", config["digest"]) == plain.blobs[config["digest"]]


@pytest.mark.slow
async def test_large_layers_are_copied_and_verified_without_being_held(world, tmp_path):
    """Both ends keep next to nothing, and a byte that differed would be refused."""
    copies = CopyMirror(world, tmp_path)
    kept = copies.targets["target"] = world.listen(MeasuringApp(), "large.test")
    copies.target = kept
    layers = [Stream(1, number, LARGE + 12345) for number in range(3)]
    image = copies.push("v1", copies.seed.image(layers=layers))
    assert (await copies.copy()).status == 0
    for digest, stream in image.streams.items():
        blob = kept.app.repositories["app"].blobs[digest]
        assert isinstance(blob, Measured)
        assert blob.size == stream.size
    assert kept.app.tags("app") == {"v1": image.top}


# Platforms.


def trimmed(index: Image, kept: list[Image]) -> bytes:
    """Write an index as it has to come out: compact JSON without the other entries."""
    document = index.document
    digests = {image.top for image in kept}
    document["manifests"] = [each for each in document["manifests"] if each["digest"] in digests]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def two_of_four(seed: Seed) -> tuple[Image, list[Image], list[str]]:
    platforms = ("linux/amd64", "linux/arm64", "linux/arm/v7", "linux/arm/v6")
    children = [seed.platform_image(each) for each in platforms]
    unknown = {"zulu": "é", "alpha": [1, None]}
    index = seed.index(children, spacing="indent", extra=unknown, annotations={"k": "v"})
    return index, children[:2], ["linux/arm64", "linux/amd64"]


def attested(seed: Seed) -> tuple[Image, list[Image], list[str]]:
    """An attestation goes with its image, and stays with it."""
    children = [seed.image(), seed.image(architecture="arm64")]
    index = seed.index(children, attestations=True)
    digest = index.document["manifests"][2]["digest"]
    return index, [children[0], replace(index, top=digest)], ["linux/amd64"]


def beside_blobs(seed: Seed) -> tuple[Image, list[Image], list[str]]:
    """The same digest once as a layer and once, hostile, as an image of the platform asked for."""
    one, other = seed.image(), seed.image()
    layer = one.document["layers"][0]
    mips = {"os": "plan9", "architecture": "mips"}
    false = {**layer, "mediaType": one.media_type, "platform": mips}
    linux = [{"platform": {"os": "linux", "architecture": each}} for each in ("amd64", "arm64")]
    index = compose_index([(one, linux[0]), (other, linux[1])])
    document = {**index.document, "manifests": [layer, false, *index.document["manifests"]]}
    return index.with_manifest(encode(document), index.media_type), [one], ["linux/amd64"]


def options(platforms: list[str]) -> list[str]:
    return [word for each in platforms for word in ("--platform", each)]


@pytest.mark.parametrize("make", [two_of_four, attested, beside_blobs])
async def test_a_platform_filter_moves_what_it_selects_and_nothing_else(copies, make):
    index, kept, platforms = make(copies.seed)
    copies.push("v1", index)
    ran = await copies.copy("app:v1", *options(platforms))
    body = trimmed(index, kept)
    stored = copies.target.app.manifest("app", "v1")
    assert (ran.status, stored.body) == (0, body)
    found = only(ran.images)
    assert (found["digest"], found["source_digest"]) == (digest_of(body), index.top)
    documents = [json.loads(index.manifests[image.top][1]) for image in kept]
    named = [part for each in documents for part in (each["config"], *each["layers"])]
    assert copies.asked() == cold(len({part["digest"] for part in named}), len(kept) + 1)
    again = await copies.copy("app:v1", *options(platforms[::-1]))
    assert only(again.images)["reason"] == "unchanged"
    assert copies.asked() == UNCHANGED


async def test_a_filtered_index_is_written_in_these_very_bytes(copies):
    """No release may write others, since every target would be pushed anew."""
    extra = {"zulu": "é", "alpha": [1, None]}
    copies.push("v1", Seed(7).index(spacing="indent", extra=extra, annotations={"k": "v"}))
    ran = await copies.copy("app:v1", "-v", *options(["linux/amd64", "linux/arm64"]))
    golden = "sha256:7300796ab05df86cdf9940eeaeb468745b0093291f3a106b9cb92e0cd4c5a61a"
    assert copies.target.app.tags("app") == {"v1": golden}
    told = "info: source.test/app: the index is trimmed to `platforms`, so its digest at the target is "
    assert f"{told}{golden}; artifacts of the whole index stay behind" in ran.err


async def test_an_index_inside_an_index_is_copied_whole_or_not_at_all(copies):
    inner = copies.seed.index(platforms=("linux/arm/v6", "linux/arm/v7"))
    image = copies.push("v1", copies.seed.index([inner, copies.seed.image()]))
    ran = await copies.copy("app:v1", *options(["linux/arm/v7"]))
    assert ran.status == 2
    told = f"filter platforms of source.test/app@{image.top}: one of its entries is itself an index"
    assert told in only(ran.failed)
    assert "leave out `platforms`" in ran.err
    assert copies.target.app.tags("app") == {}
    assert (await copies.copy("app:v1")).status == 0
    assert held(copies.target, "app", image)


@pytest.mark.parametrize("kind", ["nothing is dropped", "no index", "an index of blobs"])
async def test_what_no_filter_changes_keeps_its_bytes(copies, kind):
    image, platform = copies.seed.image(), "plan9/mips"
    if kind == "nothing is dropped":
        image, platform = copies.seed.index([image], spacing="odd"), "linux/amd64"
    if kind == "an index of blobs":  # BuildKit's older cache
        image = shapes()["buildkit-cache-index"].build().image
    copies.push("v1", image)
    assert (await copies.copy("app:v1", *options([platform]))).status == 0
    assert copies.target.app.tags("app") == {"v1": image.top}
    assert held(copies.target, "app", image)


async def test_no_platform_found_is_an_error_that_says_all(copies):
    copies.push("v1", copies.seed.index(platforms=("linux/amd64", "linux/arm64")))
    ran = await copies.copy("app:v1", *options(["plan9/mips"]))
    assert ran.status == 2
    words = ("SOURCE_ERROR", "plan9/mips", "linux/amd64", "linux/arm64", "source.test/app:v1")
    assert all(word in only(ran.failed) for word in words)
    assert asked(copies.target) == {"HEAD manifest": 1}, "nothing is pushed"


async def test_a_platform_that_indexes_lack_is_one_warning_for_all_tags(copies):
    copies.push("v00", copies.seed.index(platforms=("linux/amd64", "plan9/mips")))
    for tag in ("v01", "v02"):
        copies.push(tag, copies.seed.index(platforms=("linux/amd64", "linux/arm64")))
    mapping = {"from": "app", "tags": tags("v*"), "platforms": ["linux/amd64", "plan9/mips"]}
    text = document({"source": copies.source, "target": copies.target}, mapping)
    ran = await copies.world.run("sync", "--no-progress", "-c", "-", stdin=text)
    assert ran.status == 0
    words = "an index lacks plan9/mips; its other platforms are copied"
    warnings = [line for line in ran.err.splitlines() if "plan9" in line]
    assert warnings == [f"warning: source.test/app: {words}"]
    assert len(json.loads(copies.target.app.manifest("app", "v01").body)["manifests"]) == 1


# Blobs that are there, or elsewhere.


async def test_layers_shared_by_repositories_are_uploaded_once_and_mounted(copies):
    shared = [copies.seed.layer(3000), copies.seed.layer(700)]
    images = {
        name: copies.push("v1", copies.seed.image(layers=[*shared, copies.seed.layer(size)]), name)
        for name, size in (("one", 10), ("two", 20))
    }
    ran = await copies.sync(*({"from": name, "tags": tags("v1")} for name in images))
    assert ran.statuses() == ["synced", "synced"]
    assert all(held(copies.target, name, image) for name, image in images.items())
    assert ran.totals["layers"] == {"transferred": 6, "unique": 6, "mounted": 2, "skipped": 0}
    check_least(
        copies,
        *(Repository(name, {"v1": image}, [{}], is_listed=False) for name, image in images.items()),
    )


@pytest.mark.provokes("source_written")
async def test_within_one_registry_all_is_mounted(copies):
    copies.target = copies.source
    image = copies.push("v1", copies.seed.index())
    ran = await copies.copy(to="mirror/app:v1")
    assert (ran.status, ran.totals["bytes"]) == (0, 0)
    assert held(copies.source, "mirror/app", image)
    mounts = {"POST upload_start": len(image.blobs)}
    assert asked(copies.source) == {
        **mounts,
        "GET manifest": 5,
        "HEAD manifest": 1,
        "PUT manifest": 5,
    }


@pytest.mark.provokes("source_written")
async def test_another_tag_in_the_same_repository_is_all_that_is_put(copies):
    index = copies.push("v1", copies.seed.index())
    copies.attach(index)
    where = ("http://source.test/app:v1", "http://source.test/app:v2")
    ran = await copies.world.run("copy", "--json", *where)
    assert ran.statuses() == ["synced"]
    assert copies.source.app.tags("app") == {"v1": index.top, "v2": index.top}
    assert asked(copies.source) == {"GET manifest": 1, "HEAD manifest": 1, "PUT manifest": 1}


@pytest.mark.provokes("source_written")
@pytest.mark.parametrize("status", [400, 403, 404, 405, 500])
async def test_a_refused_mount_is_followed_by_a_plain_upload(copies, status):
    copies.target = copies.source
    image = copies.push("v1")
    mounts = copies.source.app.faults.on("POST", query={"mount": "*", "from": "app"})
    mounts.status(status, "UNSUPPORTED")
    ran = await copies.copy(to="mirror/app:v1")
    assert (ran.status, ran.err) == (0, "")
    assert held(copies.source, "mirror/app", image)
    copies.source.journal.matching("PUT", "upload").exactly(3)


async def test_where_nothing_is_mounted_a_session_is_used_and_nobody_waits(world, tmp_path):
    """Each of two repositories may upload what both have: neither is finished before the other."""
    copies = CopyMirror(world, tmp_path, mounts=False)
    for pair in ("ab", "cd"):
        shared = copies.seed.layer(3000)
        for name in pair:
            copies.push("v1", copies.seed.image(layers=[shared, copies.seed.layer(9)]), name)
    both, seen = anyio.Event(), set[str]()

    async def intercept(request: Request) -> Answer | None:
        if request.method == "PUT" and request.repository in ("c", "d"):
            if request.kind == "manifest":
                await both.wait()
            if request.parameter("digest") == digest_of(shared):
                seen.add(request.repository)
                if len(seen) == 2:
                    both.set()
        return None

    copies.target.app.intercept = intercept
    ran = await copies.sync(*({"from": name, "tags": tags("v1")} for name in "abcd"))
    assert (ran.statuses(), ran.totals["layers"]["mounted"]) == (["synced"] * 4, 0)
    copies.target.journal.matching("POST", "upload_start").exactly(12)
    copies.target.journal.matching("PUT", "upload").exactly(12)


@pytest.mark.parametrize("holder", ["app", "other"])
async def test_a_blob_behind_a_refused_mount_keeps_no_other_blob_waiting(world, tmp_path, holder):
    """One that another repository holds; and one that takes the session of the question about a blob
    which is there.
    """
    copies = CopyMirror(world, tmp_path, mounts=False)
    shared = copies.seed.layer(900)
    first = copies.push("v1", copies.seed.image(layers=[shared]), holder)
    copies.push("v2", copies.seed.image(layers=[shared, copies.seed.layer(9)]))
    if holder == "app":
        first.load_into(copies.target.app, "app", "v1")

    async def intercept(request: Request) -> Answer | None:
        await anyio.sleep(5 if request.kind == "upload" else 0)
        return None

    copies.target.app.intercept = intercept
    mappings = [{"from": name, "tags": tags("v*")} for name in {holder: 0, "app": 0}]
    ran = await copies.sync(*mappings, **{"global": {"max_concurrent_transfers": 1}})
    assert ran.statuses() == ["skipped" if holder == "app" else "synced", "synced"]
    assert ran.seconds == pytest.approx(5 if holder == "app" else 10)


async def test_several_targets_read_each_blob_of_the_source_once(world, tmp_path):
    copies = CopyMirror(world, tmp_path, "t1", "t2", "t3")
    image = copies.push("v1", copies.seed.image(sizes=(900, 1_500_000)))
    ran = await copies.sync_tags("v1")
    assert ran.statuses() == ["synced"] * 3
    assert all(held(place, "app", image) for place in copies.targets.values())
    check_least(copies, Repository("app", {"v1": image}, [{}] * 3, is_listed=False))


async def test_mappings_of_one_source_to_several_targets_read_each_blob_once(world, tmp_path):
    """Where the image has another name at each target, each has a mapping of its own."""
    copies = CopyMirror(world, tmp_path, "t1", "t2")
    image = copies.push("v1", copies.seed.image(sizes=(900, 1_500_000)))
    rule = {"from": "app", "tags": tags("v1")}
    ran = await copies.sync(
        *({**rule, "to": f"{to}/app", "targets": [to]} for to in copies.targets)
    )
    assert ran.statuses() == ["synced"] * 2
    assert all(held(place, f"{to}/app", image) for to, place in copies.targets.items())
    assert asked(copies.source) == {"GET manifest": 1, "GET blob": 3}


async def test_what_one_target_gets_is_not_written_to_disk_beside_tags_for_another(world, tmp_path):
    copies = CopyMirror(world, tmp_path, "t1", "t2")
    (tmp_path / "staged").touch()  # nothing can be staged here
    for tag in copies.targets:
        copies.push(tag, copies.seed.image(sizes=(1_500_000,)))
    copies.write(
        *({"from": "app", "tags": tags(to), "targets": [to]} for to in copies.targets),
        **{"global": {"cache_dir": str(tmp_path)}},
    )
    ran = await world.run("sync", "--json", "-c", str(copies.file))
    assert (ran.statuses(), "be staged" in ran.err) == (["synced"] * 2, False)


async def test_small_blobs_that_memory_has_no_room_for_are_not_written_to_disk_for_one_target(
    world, tmp_path
):
    copies = CopyMirror(world, tmp_path)
    (tmp_path / "staged").touch()  # nothing can be staged here
    for number in range(45):
        layer = copies.seed.blob(100) + bytes(1_000_000)
        for tag in (f"{number:02}a", f"{number:02}b"):
            copies.push(tag, copies.seed.image(layers=[layer]))

    async def intercept(request: Request) -> Answer | None:
        await anyio.sleep(1.0 if request.kind == "upload" else 0.0)
        return None

    copies.target.app.intercept = intercept
    limits = {"cache_dir": str(tmp_path), "max_concurrent_transfers": 100}
    copies.write({"from": "app", "tags": tags("*")}, **{"global": limits})
    ran = await world.run("sync", "--json", "-c", str(copies.file))
    assert (ran.statuses(), "be staged" in ran.err) == (["synced"] * 90, False)


async def test_what_is_staged_is_for_nobody_else_and_goes_in_the_end(world, tmp_path):
    copies = CopyMirror(world, tmp_path, "t1", "t2")
    copies.push("v1", copies.seed.image(sizes=(1_500_000,)))
    staged, modes = tmp_path / "staged", set()

    async def intercept(request: Request) -> Answer | None:
        if (request.length() or 0) > 1_000_000:
            modes.update(each.stat().st_mode & 0o777 for each in staged.rglob("*"))
        return None

    copies.targets["t2"].app.intercept = intercept
    place = {"global": {"cache_dir": str(tmp_path)}}
    ran = await copies.sync({"from": "app", "tags": tags("v1")}, **place)
    assert ran.statuses() == ["synced"] * 2
    assert modes == {0o700, 0o600}
    assert not staged.exists()


@pytest.mark.provokes("blob_pulled_twice")
async def test_a_blob_that_may_not_be_staged_is_read_by_each_target(world, tmp_path):
    copies = CopyMirror(world, tmp_path, "t1", "t2")
    image = copies.push("v1", copies.seed.image(sizes=(1_100_000,)))
    limits = {"staging_size_limit": 0, "cache_dir": str(tmp_path)}
    ran = await copies.sync({"from": "app", "tags": tags("v1")}, **{"global": limits})
    assert ran.status == 0, ran.err
    assert asked(copies.source) == {"GET manifest": 1, "GET blob": 3}
    for place in copies.targets.values():
        assert held(place, "app", image)
        assert asked(place) == cold(2)[1]


async def test_a_blob_that_is_there_already_is_not_sent(copies):
    """I4: skip beats mount, mount beats upload."""
    image = copies.push("v1")
    layer = image.document["layers"][1]["digest"]
    copies.target.app.add_blob("app", image.blobs[layer])
    ran = await copies.copy()
    assert (ran.status, ran.totals["layers"]["skipped"]) == (0, 1)
    assert held(copies.target, "app", image)
    copies.source.journal.matching("GET", "blob", reference=layer).none()
    copies.target.journal.matching("PUT", "upload").exactly(2)


# Tags.


async def test_tags_of_one_image_move_it_once_and_versions_go_first(copies):
    """I2: who reads `latest` while a sync runs finds its version there too."""
    names = ("latest", "edge", "v1.2.0")
    image = copies.load(copies.seed.index(), *names)
    ran = await copies.sync_tags(*names)
    assert ran.statuses() == ["synced"] * 3
    assert copies.target.app.tags("app") == dict.fromkeys(names, image.top)
    assert next(each for each in copies.puts() if each in names) == "v1.2.0"
    now = dict.fromkeys(names, image)
    check_least(copies, Repository("app", now, [{}], is_listed=False))


async def test_the_blobs_that_most_images_need_go_first(copies):
    """The first image has 24 layers of its own, of which 16 may begin before another one is known."""
    own, shared = ([copies.seed.layer(size) for _ in range(24)] for size in (100, 5000))
    copies.push("v0", copies.seed.image(layers=own + shared))
    copies.push("v1", copies.seed.image(layers=shared))
    ran = await copies.sync_tags("v*")
    assert ran.statuses() == ["synced"] * 2
    sent = [each.query["digest"] for each in copies.target.journal.matching("PUT", "upload")]
    places = [sorted(sent.index(digest_of(layer)) for layer in layers) for layers in (own, shared)]
    assert mean(places[0][-8:]) > mean(places[1])


async def test_an_index_waits_for_children_that_other_tags_bring(copies):
    child, other, third = (copies.seed.image() for _ in range(3))
    copies.push("1-amd64", child)
    indexes = [
        copies.push("2", copies.seed.index([child, other])),
        copies.push("3", copies.seed.index([child, third])),
    ]
    ran = await copies.sync_tags("1-amd64", "2", "3")
    assert ran.statuses() == ["synced"] * 3
    assert all(held(copies.target, "app", index) for index in indexes)
    assert sorted(copies.puts()) == sorted(["1-amd64", "2", "3", other.top, third.top])


async def test_a_listing_of_the_target_saves_the_heads_of_what_it_lacks(copies):
    copies.source.app.page_size = 2
    images = {f"v{number}": copies.push(f"v{number}") for number in range(5)}
    images["v0"].load_into(copies.target.app, "app", "v0")
    copies.seed.image().load_into(copies.target.app, "app", "v1")
    ran = await copies.sync_tags("v*")
    assert ran.statuses() == ["skipped", *["synced"] * 4]
    assert copies.target.app.tags("app") == {tag: each.top for tag, each in images.items()}
    copies.source.journal.matching("GET", "tag_list").exactly(3)
    copies.target.journal.matching("GET", "tag_list").exactly(1)
    heads = [entry.reference for entry in copies.target.journal.matching("HEAD", "manifest")]
    assert sorted(heads) == ["v0", "v1"]


async def test_one_tag_that_never_moves_stays_where_the_target_lists_it(copies):
    copies.push("v1")
    there = copies.seed.image().load_into(copies.target.app, "app", "v1")
    ran = await copies.sync_tags("v1", immutable_tags="v*")
    assert (ran.statuses(), copies.target.app.tags("app")) == (["skipped"], {"v1": there.top})
    assert copies.asked() == ({}, {"GET tag_list": 1})


async def test_tags_that_never_move_cost_nothing_where_the_target_lists_them(copies):
    for tag in ("v1", "v2", "v3"):
        copies.push(tag)
    copies.seed.image().load_into(copies.target.app, "app", "v1", "v2")
    ran = await copies.sync_tags("v1", "v2", "v3", immutable_tags="v*")
    assert ran.statuses() == ["skipped", "skipped", "synced"]
    assert {each["reason"] for each in ran.images} == {"immutable_tag", None}
    for place in (copies.source, copies.target):
        assert {each.reference for each in place.journal.entries}.isdisjoint({"v1", "v2"})
    copies.target.journal.matching("GET", "tag_list").exactly(1)


async def test_a_literal_tag_needs_no_listing_and_one_that_is_missing_fails_alone(copies):
    copies.load(copies.seed.image(), "v1", "other")
    assert (await copies.sync_tags("v1")).statuses() == ["synced"]
    assert copies.asked() == cold(3)
    ran = await copies.sync_tags("v1", "v2")
    assert (ran.status, ran.statuses()) == (1, ["skipped", "failed"])
    lost = only([each["error"] for each in ran.images if each["error"]])
    assert (lost["code"], lost["side"]) == ("SOURCE_ERROR", "source")
    assert "source.test/app:v2" in only(ran.failed)
    assert copies.target.app.tags("app").keys() == {"v1"}


@pytest.mark.slow
async def test_a_family_is_brought_and_then_what_changed(copies):
    small = Fleet(repositories=3, tags=4, shared=2, own=1, size=50, bases=2)
    states = ((11, replace(small, left_out=1)), (1, small), (3, replace(small, moved=25)))
    for fresh, fleet in (*states, (3, small)):
        fleet.load_into(copies.source.app)
        ran = await copies.sync(*({"from": name, "tags": tags("*")} for name in small.images()))
        assert (ran.status, ran.statuses().count("synced")) == (0, fresh), ran.err
        for name, tagged in fleet.images().items():
            assert all(held(copies.target, name, image) for image in tagged.values())
            assert copies.target.app.tags(name) == copies.source.app.tags(name)


# Who writes a tag: of all mappings the first (I10).

ONE = {"from": "one", "to": "app"}
TWO = {"from": "two", "to": "app"}
AMD, ARM = "linux/amd64", "linux/arm64"


@pytest.mark.parametrize(
    ("mappings", "registries", "synced", "refused"),
    [
        pytest.param([ONE, TWO], {}, ["one:v1", "two:v2"], ["two:v1"], id="two-sources"),
        pytest.param([ONE, ONE], {}, ["one:v1"], [], id="the-same-twice"),
        pytest.param([{**ONE, "tags": tags("v1", "*1")}], {}, ["one:v1"], [], id="a-tag-twice"),
        pytest.param([{**ONE, "platforms": [ARM, AMD]}, {**ONE, "platforms": [AMD, ARM]}], {},
            ["one:v1"], [], id="the-same-platforms"),
        pytest.param([{**ONE, "platforms": [ARM, AMD]}, ONE], {}, ["one:v1"], ["one:v1"], id="other-platforms"),
        pytest.param([ONE], {"again": "http://target.test"}, ["one:v1"], [], id="two-aliases"),
        pytest.param([ONE], {"again": "https://target.test:80"}, ["one:v1"], [], id="two-schemes"),
        pytest.param([ONE], {"other": "http://target.test:5000"}, ["one:v1"] * 2, [], id="two-ports"),
        pytest.param([{**ONE, "to": "nginx"}, {**TWO, "to": "library/nginx"}], {"target": "docker.io"},
            ["one:v1", "two:v2"], ["two:v1"], id="two-names-at-docker-hub"),
    ],
)  # fmt: skip
async def test_a_tag_of_a_target_is_written_by_one_mapping(
    copies, mappings, registries, synced, refused
):
    copies.push("v1", copies.seed.index(platforms=(AMD, ARM)), "one")
    copies.load(copies.seed.image(), "v1", "v2")
    copies.seed.image().load_into(copies.source.app, "two", "v1", "v2")
    copies.world.listen(App(), "target.test", port=5000)
    copies.world.persona("dockerhub")
    rule = {"tags": tags("v*")}
    registries = {"source": copies.source, "target": copies.target, **registries}
    text = document(registries, *({**rule, **mapping} for mapping in mappings))
    ran = await copies.world.run("sync", "--dry-run", "--json", "-q", "-c", "-", stdin=text)
    found = {"would_sync": list[str](), "failed": list[str]()}
    for each in ran.images:
        found[each["status"]].append(each["source"].rpartition("/")[2])
    assert (sorted(found["would_sync"]), found["failed"]) == (synced, refused)
    for line in ran.failed:
        assert "TARGET_ERROR" in line
        assert "mappings[0] writes this tag too, from another source or other platforms" in line
