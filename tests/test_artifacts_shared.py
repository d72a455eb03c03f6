"""Artifacts that several tags, mappings and runs have to do with: each image is judged by what its
target holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from _regsync.oci.reference import referrers_tag
from conformance.client.graphs import equal, walk
from conformance.content.images import Image, Seed
from tests.ends import Ran, document, only, tags, virtual
from tests.test_late_signatures import SBOM, SIGNATURE, Stage

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

HOUR = 3600.0


async def run(stage: Stage, *mappings: Mapping[str, Any], command: str = "sync", **top: Any) -> Ran:
    for each in (stage.source, stage.target):
        each.journal.clear()
    registries = {"source": stage.source, "target": stage.target}
    file = stage.directory / "mirror.yaml"
    file.write_text(document(registries, *mappings, defaults={"artifacts": {}}, **top))
    return await stage.world.run(*command.split(), "--json", "-q", "-c", str(file))


def puts(stage: Stage) -> list[str | None]:
    return [each.reference for each in stage.target.journal.matching("PUT", "manifest", status=201)]


def chain(stage: Stage) -> tuple[Image, Image, Image]:
    """An image under v0, an SBOM of it, and a signature of that."""
    image = stage.images[0]
    sbom = stage.load(stage.seed.artifact(image, SBOM, size=400_000))
    return image, sbom, stage.load(stage.seed.artifact(sbom, SIGNATURE))


async def test_a_filter_of_another_mapping_brings_no_referrer_before_its_subject(world, tmp_path):
    """Two tags of one image: one takes the SBOM alone, the other what hangs on it too."""
    stage = Stage(world, tmp_path)
    image, sbom, signature = chain(stage)
    image.load_into(stage.source.app, "app", "w0")
    ran = await run(
        stage,
        {"from": "app", "tags": tags("v*"), "artifacts": {"include": [SBOM]}},
        {"from": "app", "tags": tags("w*")},
    )
    assert ran.status == 0, ran.err
    order = puts(stage)
    assert order.count(sbom.top) == order.count(signature.top) == 1
    assert order.index(sbom.top) < order.index(signature.top)
    assert sum(each["artifacts"]["synced"] for each in ran.images) == 2
    assert sum(each["artifacts"]["skipped"] for each in ran.images) == 1


@pytest.mark.parametrize("refused", ["v0", "v1"])
async def test_a_tag_that_fails_keeps_nothing_from_another_tag_of_its_image(
    world, refused, tmp_path
):
    stage = Stage(world, tmp_path)
    image, sbom, signature = chain(stage)
    image.load_into(stage.source.app, "app", "v1")
    stage.target.app.faults.on("PUT", "manifest", reference=refused).status(403)
    ran = await run(stage, {"from": "app", "tags": tags("v*")})
    assert sorted(each["status"] for each in ran.images) == ["failed", "synced"]
    assert stage.holds(sbom)
    assert stage.holds(signature)
    assert equal(
        walk(stage.source.app, "app", [image.top]), walk(stage.target.app, "app", [image.top])
    )


async def test_an_artifact_that_fails_fails_every_tag_of_its_image(world, tmp_path):
    stage = Stage(world, tmp_path)
    image, sbom, signature = chain(stage)
    image.load_into(stage.source.app, "app", "v1")
    stage.target.app.faults.on("PUT", "manifest", reference=sbom.top).status(403)
    ran = await run(stage, {"from": "app", "tags": tags("v*")})
    assert [each["status"] for each in ran.images] == ["failed"] * 2
    assert [each["artifacts"]["failed"] for each in ran.images] == [2, 2]
    assert not stage.holds(signature)


async def test_what_cannot_be_looked_up_at_the_target_gets_nothing_hung_on_it(world, tmp_path):
    """An image that is there already: its SBOM's HEAD fails, the signature of the SBOM waits for
    the next run.
    """
    stage = Stage(world, tmp_path)
    stage.images[0].load_into(stage.target.app, "app", "v0")
    _, sbom, signature = chain(stage)
    stage.target.app.faults.on("HEAD", "manifest", reference=sbom.top).status(500)
    ran = await run(stage, {"from": "app", "tags": tags("v*")})
    assert ran.statuses() == ["failed"]
    assert ran.images[0]["artifacts"] == {"synced": 0, "skipped": 0, "failed": 2, "stripped": 0}
    assert not stage.holds(signature)
    stage.target.app.faults.clear()
    await run(stage, {"from": "app", "tags": tags("v*")})
    assert stage.holds(sbom)
    assert stage.holds(signature)


async def test_a_record_of_a_target_that_lost_everything_is_void_while_it_is_filled_again(
    world, tmp_path
):
    """The second run is ended between the tag and its signature."""
    stage = Stage(world, tmp_path)
    signature = stage.sign(stage.images[0])
    await stage.run()
    stage.target.app.repositories.clear()
    await anyio.sleep(HOUR / 2)
    stage.target.app.faults.on("PUT", "manifest", reference=signature.top).status(503)
    with anyio.move_on_after(1) as ended:
        await stage.run()
    assert ended.cancelled_caught
    assert "v0" in stage.target.app.repositories["app"].tags
    assert not stage.holds(signature)
    stage.target.app.faults.clear()
    ran = await stage.run()
    assert ran.statuses() == ["synced"]
    assert stage.holds(signature)


async def test_an_image_that_comes_back_has_its_signature_looked_for(world, tmp_path):
    """A tag moved on and back; meanwhile the target dropped the older image with what hung on it."""
    stage = Stage(world, tmp_path)
    first, second = stage.images[0], stage.seed.image()
    signature = stage.sign(first)
    await stage.run()
    stage.load(second, "v0")
    await stage.run()
    held = stage.target.app.repositories["app"].manifests
    for each in (first, signature):
        held.pop(each.top)
    stage.load(first, "v0")
    ran = await stage.run()
    assert ran.statuses() == ["synced"]
    assert stage.holds(signature)


async def test_artifacts_of_platforms_count_as_required_after_a_later_look(tmp_path):
    """The later look asks for the top's alone; that there were some below is still known."""
    async with virtual(0.999) as world:
        stage = Stage(world, tmp_path, images=0)
        images = [stage.seed.image(architecture=each) for each in ("amd64", "arm64")]
        stage.load(stage.seed.index(images), "v0")
        stage.sign(images[0])
        mapping = {"from": "app", "tags": tags("v*"), "platforms": ["linux/amd64"]}
        mapping["artifacts"] = {"require_artifacts": True}
        assert (await run(stage, mapping)).status == 0
        await anyio.sleep(2 * HOUR)
        assert (await run(stage, mapping)).statuses() == ["skipped"]
        assert stage.source.journal.count("GET", "referrers") == 1, (
            "of the whole index: what is stripped"
        )
        assert (await run(stage, mapping)).statuses() == ["skipped"]
        assert stage.source.journal.count("GET", "referrers") == 0


async def test_where_no_state_can_be_kept_a_quarter_of_the_day_decides(tmp_path):
    async with virtual(0.0) as world:
        stage = Stage(world, tmp_path)
        (tmp_path / "state").write_text("a file where the directory was to be")
        await stage.run()
        looks = []
        for _ in range(16):
            await anyio.sleep(6 * HOUR)
            await stage.run()
            looks.append(stage.source.journal.count("GET", "referrers"))
        assert sum(looks) == 4, looks


async def test_an_analysis_counts_what_hangs_on_images(world, tmp_path):
    stage = Stage(world, tmp_path)
    chain(stage)
    ran = await run(stage, {"from": "app", "tags": tags("v*")}, command="analyze")
    assert ran.status == 0, ran.err
    (target,) = ran.report["targets"].values()
    assert target["bytes"] == target["to_move"] == ran.report["blobs"]["unique_bytes"]
    assert ran.report["images"] == 1


@pytest.mark.parametrize("referrers_api", [True, False])
async def test_an_artifact_that_is_a_child_too_is_put_once(world, referrers_api, tmp_path):
    """An index names an image, and a signature of the image; the source lists the signature, too."""
    stage = Stage(world, tmp_path, images=0)
    stage.target.app.referrers_api = referrers_api
    image = stage.seed.image()
    signature = stage.load(stage.seed.artifact(image, SIGNATURE))
    index = stage.load(stage.seed.index([image, signature]), "v0")
    ran = await run(stage, {"from": "app", "tags": tags("v*")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    lists = [] if referrers_api else [referrers_tag(image.top)]
    assert sorted(puts(stage)) == sorted([image.top, signature.top, "v0", *lists])
    assert only(ran.images)["artifacts"]["synced"] == 1
    assert equal(
        walk(stage.source.app, "app", [index.top]), walk(stage.target.app, "app", [index.top])
    )


async def test_a_signature_that_two_sources_have_is_asked_for_once_at_the_target(world, tmp_path):
    """Both sign one image by cosign's tag, and both copy it to one repository."""
    target = world.registry("target.example")
    sources = [world.registry("one.example"), world.registry("two.example")]
    seed = Seed(5)
    image = seed.image()
    signature = seed.image(sizes=(100,))
    tag = f"{referrers_tag(image.top)}.sig"
    for number, place in enumerate(sources):
        image.load_into(place.app, "app", f"v{number}")
        signature.load_into(place.app, "app", tag)
    mappings = [
        {"from": "app", "source": name, "tags": tags("v*"), "artifacts": {"enabled": True}}
        for name in ("one", "two")
    ]
    registries = {"one": sources[0], "two": sources[1], "target": target}
    file = tmp_path / "mirror.yaml"
    file.write_text(
        document(registries, *mappings, defaults={"source": "one", "targets": ["target"]})
    )
    first = await world.run("sync", "--json", "-q", "-c", str(file))
    assert first.statuses() == ["synced"] * 2, first.err
    target.journal.clear()
    again = await world.run("sync", "--recheck", "--json", "-q", "-c", str(file))
    assert again.statuses() == ["skipped"] * 2, again.err
    assert target.journal.summary() == {"HEAD manifest": 3}
    target.journal.matching("HEAD", "manifest", reference=tag).exactly(1)


async def test_many_tags_of_one_image_one_after_another_put_an_artifact_once(world, tmp_path):
    stage = Stage(world, tmp_path)
    image, sbom, signature = chain(stage)
    for number in range(1, 6):
        image.load_into(stage.source.app, "app", f"v{number}")
    ran = await run(
        stage, {"from": "app", "tags": tags("v*")}, **{"global": {"max_concurrent_transfers": 1}}
    )
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 6), ran.err
    order = puts(stage)
    assert order.count(sbom.top) == order.count(signature.top) == 1
    assert sum(each["artifacts"]["synced"] for each in ran.images) == 2
    assert sum(each["artifacts"]["skipped"] for each in ran.images) == 10
