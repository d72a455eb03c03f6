"""Artifacts that several tags, mappings and runs have to do with: each image is judged by what its
target holds.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from conformance.client.graphs import equal, walk
from conformance.content.images import Image
from tests.ends import Virtual, only, tags
from tests.mirrors import SBOM, SIGNATURE, SignedMirror

HOUR = 3600.0


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> SignedMirror:
    return SignedMirror(world, tmp_path)


def puts(mirror: SignedMirror) -> list[str | None]:
    return [
        each.reference for each in mirror.target.journal.matching("PUT", "manifest", status=201)
    ]


def chain(mirror: SignedMirror) -> tuple[Image, Image, Image]:
    """An image under v0, an SBOM of it, and a signature of that."""
    image = mirror.images[0]
    sbom = mirror.load(mirror.seed.artifact(image, SBOM, size=400_000))
    return image, sbom, mirror.load(mirror.seed.artifact(sbom, SIGNATURE))


async def test_a_filter_of_another_mapping_brings_no_referrer_before_its_subject(mirror):
    """Two tags of one image: one takes the SBOM alone, the other what hangs on it too."""
    image, sbom, signature = chain(mirror)
    image.load_into(mirror.source.app, "app", "w0")
    ran = await mirror.sync(
        {"from": "app", "tags": tags("v*"), "artifacts": {"include": [SBOM]}},
        {"from": "app", "tags": tags("w*")},
    )
    assert ran.status == 0, ran.err
    order = puts(mirror)
    assert order.count(sbom.top) == order.count(signature.top) == 1
    assert order.index(sbom.top) < order.index(signature.top)
    assert sum(each["artifacts"]["synced"] for each in ran.images) == 2
    assert sum(each["artifacts"]["skipped"] for each in ran.images) == 1


@pytest.mark.parametrize("refused", ["v0", "v1"])
async def test_a_tag_that_fails_keeps_nothing_from_another_tag_of_its_image(mirror, refused):
    image, sbom, signature = chain(mirror)
    image.load_into(mirror.source.app, "app", "v1")
    mirror.target.app.faults.on("PUT", "manifest", reference=refused).status(403)
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert sorted(each["status"] for each in ran.images) == ["failed", "synced"]
    assert mirror.holds(sbom)
    assert mirror.holds(signature)
    assert equal(
        walk(mirror.source.app, "app", [image.top]), walk(mirror.target.app, "app", [image.top])
    )


async def test_an_artifact_that_fails_fails_every_tag_of_its_image(mirror):
    image, sbom, signature = chain(mirror)
    image.load_into(mirror.source.app, "app", "v1")
    mirror.target.app.faults.on("PUT", "manifest", reference=sbom.top).status(403)
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert [each["status"] for each in ran.images] == ["failed"] * 2
    assert [each["artifacts"]["failed"] for each in ran.images] == [2, 2]
    assert not mirror.holds(signature)


async def test_what_cannot_be_looked_up_at_the_target_gets_nothing_hung_on_it(mirror):
    """An image that is there already: its SBOM's HEAD fails, the signature of the SBOM waits for
    the next run.
    """
    mirror.images[0].load_into(mirror.target.app, "app", "v0")
    _, sbom, signature = chain(mirror)
    mirror.target.app.faults.on("HEAD", "manifest", reference=sbom.top).status(500)
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert ran.statuses() == ["failed"]
    assert ran.images[0]["artifacts"] == {"synced": 0, "skipped": 0, "failed": 2, "stripped": 0}
    assert not mirror.holds(signature)
    mirror.target.app.faults.clear()
    await mirror.sync({"from": "app", "tags": tags("v*")})
    assert mirror.holds(sbom)
    assert mirror.holds(signature)


async def test_what_refers_to_a_child_of_an_artifact_that_failed_fails_too(mirror):
    """The SBOM of an image that is there already is an index, and its child is signed."""
    image = mirror.images[0].load_into(mirror.target.app, "app", "v0")
    child = mirror.seed.image()
    sbom = mirror.load(mirror.seed.index([child], subject=image, artifact_type=SBOM))
    signature = mirror.load(mirror.seed.artifact(child, SIGNATURE))
    mirror.target.app.faults.on("HEAD", "manifest", reference=sbom.top).status(500)
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert ran.statuses() == ["failed"]
    assert ran.images[0]["artifacts"] == {"synced": 0, "skipped": 0, "failed": 2, "stripped": 0}
    assert not mirror.holds(signature)
    mirror.target.app.faults.clear()
    await mirror.sync({"from": "app", "tags": tags("v*")})
    assert mirror.holds(sbom)
    assert mirror.holds(signature)


async def test_a_record_of_a_target_that_lost_everything_is_void_while_it_is_filled_again(mirror):
    """The second run is ended between the tag and its signature."""
    signature = mirror.attach(mirror.images[0])
    await mirror.look()
    mirror.target.app.repositories.clear()
    await anyio.sleep(HOUR / 2)
    mirror.target.app.faults.on("PUT", "manifest", reference=signature.top).status(503)
    with anyio.move_on_after(1) as ended:
        await mirror.look()
    assert ended.cancelled_caught
    assert "v0" in mirror.target.app.repositories["app"].tags
    assert not mirror.holds(signature)
    mirror.target.app.faults.clear()
    ran = await mirror.look()
    assert ran.statuses() == ["synced"]
    assert mirror.holds(signature)


async def test_an_image_that_comes_back_has_its_signature_looked_for(mirror):
    """A tag moved on and back; meanwhile the target dropped the older image with what hung on it."""
    first, second = mirror.images[0], mirror.seed.image()
    signature = mirror.attach(first)
    await mirror.look()
    mirror.load(second, "v0")
    await mirror.look()
    held = mirror.target.app.repositories["app"].manifests
    for each in (first, signature):
        held.pop(each.top)
    mirror.load(first, "v0")
    ran = await mirror.look()
    assert ran.statuses() == ["synced"]
    assert mirror.holds(signature)


async def test_artifacts_of_platforms_count_as_required_after_a_later_look(world, tmp_path):
    """The later look asks for the top's alone; that there were some below is still known."""
    mirror = SignedMirror(world, tmp_path, images=0)
    images = [mirror.seed.image(architecture=each) for each in ("amd64", "arm64")]
    mirror.load(mirror.seed.index(images), "v0")
    mirror.attach(images[0])
    mapping = {"from": "app", "tags": tags("v*"), "platforms": ["linux/amd64"]}
    mapping["artifacts"] = {"require_artifacts": True}
    assert (await mirror.sync(mapping)).status == 0
    await anyio.sleep(2 * HOUR)
    assert (await mirror.sync(mapping)).statuses() == ["skipped"]
    assert mirror.source.journal.count("GET", "referrers") == 1, (
        "of the whole index: what is stripped"
    )
    assert (await mirror.sync(mapping)).statuses() == ["skipped"]
    assert mirror.source.journal.count("GET", "referrers") == 0


async def test_artifacts_on_artifacts_are_copied_if_they_are_eight_deep(mirror):
    top = mirror.images[0]
    for _ in range(8):
        top = mirror.load(mirror.seed.artifact(top, SIGNATURE))
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert ran.statuses() == ["synced"], ran.err
    assert ran.images[0]["artifacts"]["synced"] == 8
    assert mirror.holds(top)


async def test_artifacts_on_artifacts_that_have_no_end_fail_their_image(mirror):
    top = mirror.images[0]
    for _ in range(9):
        top = mirror.load(mirror.seed.artifact(top, SIGNATURE))
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    error = only(ran.images)["error"]
    assert (error["code"], error["side"]) == ("CONTENT_ERROR", "source")
    assert "more than 8 deep" in error["message"]
    mirror.target.journal.matching("PUT POST").none()


async def test_where_no_state_can_be_kept_a_quarter_of_the_day_decides(mirror):
    (mirror.cache).write_text("a file where the directory was to be")
    await mirror.look()
    looks = []
    for _ in range(16):
        await anyio.sleep(6 * HOUR)
        await mirror.look()
        looks.append(mirror.source.journal.count("GET", "referrers"))
    assert sum(looks) == 4, looks


async def test_many_tags_of_one_image_one_after_another_put_an_artifact_once(mirror):
    image, sbom, signature = chain(mirror)
    for number in range(1, 6):
        image.load_into(mirror.source.app, "app", f"v{number}")
    ran = await mirror.sync(
        {"from": "app", "tags": tags("v*")}, **{"global": {"max_concurrent_transfers": 1}}
    )
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 6), ran.err
    order = puts(mirror)
    assert order.count(sbom.top) == order.count(signature.top) == 1
    assert sum(each["artifacts"]["synced"] for each in ran.images) == 2
    assert sum(each["artifacts"]["skipped"] for each in ran.images) == 10
