"""When the artifacts of images that are there are looked at again (docs/design.md section 8, "Late
signatures").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.server.memory import Link
from tests.ends import Ran, Virtual, document, stopped_at, tags
from tests.mirrors import SignedMirror, asked
from tests.states import rows

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> SignedMirror:
    return SignedMirror(world, tmp_path)


async def look_without_state(mirror: SignedMirror, **rule: Any) -> Ran:
    """Sync all images from standard input, beside which no state can be."""
    mirror.clear()
    text = mirror.text({"from": "app", "tags": tags("v*"), "artifacts": rule})
    return await mirror.world.run("sync", "--json", "-q", "-c", "-", stdin=text)


async def copy(mirror: SignedMirror, *options: str, config: str = "-") -> Ran:
    """Copy the first image by hand."""
    mirror.clear()
    names = (f"{place.address}/app:v0" for place in (mirror.source, mirror.target))
    text = mirror.text({"from": "app"}, defaults={"artifacts": {"enabled": False}})
    return await mirror.world.run(
        "copy", *names, *options, "--json", "-q", "-c", config, stdin=text
    )


async def test_a_late_signature_arrives_when_its_look_is_due(mirror):
    first = mirror.attach(mirror.images[0])
    assert (await mirror.look()).images[0]["artifacts"] == {
        "synced": 1,
        "skipped": 0,
        "failed": 0,
        "stripped": 0,
    }
    assert mirror.holds(first)
    late = mirror.attach(mirror.images[0])
    quiet = await mirror.look()
    assert quiet.statuses() == ["skipped"]
    assert not mirror.holds(late)
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 1}
    assert asked(mirror.target) == {"HEAD manifest": 1}
    await anyio.sleep(6 * MINUTE)
    ran = await mirror.look()
    assert ran.statuses() == ["synced"], "what moves is told"
    assert ran.images[0]["artifacts"] == {"synced": 1, "skipped": 1, "failed": 0, "stripped": 0}
    assert mirror.holds(late)
    assert mirror.source.journal.count("GET", "referrers") == 2, "the image, and what is new on it"
    await anyio.sleep(10 * MINUTE)
    assert (await mirror.look()).statuses() == ["skipped"]
    assert mirror.source.journal.count("GET", "referrers") == 1
    assert mirror.source.journal.count("GET", "manifest") == 0


async def minutes_of_looks(mirror: SignedMirror, minutes: int, step: int = 5) -> list[int]:
    """Run every `step` minutes; return after how many the source was asked for referrers."""
    found = []
    for minute in range(step, minutes + 1, step):
        await anyio.sleep(step * MINUTE)
        assert set((await mirror.look()).statuses()) == {"skipped"}
        if count := mirror.source.journal.count("GET", "referrers"):
            assert count == len(mirror.images), "one question for each"
            found.append(minute)
    return found


async def test_images_that_were_copied_are_looked_at_by_the_schedule(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=3)
    await mirror.look()
    # Later an hour apart, and a quarter of the time since the first when that is more.
    assert await minutes_of_looks(mirror, 100) == [5, 15, 30, 90]
    assert await minutes_of_looks(mirror, 300, step=20) == [60, 120, 200, 300]
    # Not one of the early looks is left to make up for.
    await anyio.sleep(8 * DAY)
    await mirror.look()
    assert await minutes_of_looks(mirror, 60) == []


async def test_images_that_were_found_there_have_no_early_looks(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=2)
    for number, image in enumerate(mirror.images):
        image.load_into(mirror.target.app, "app", f"v{number}")
    assert (await mirror.look()).statuses() == ["skipped"] * 2
    assert mirror.source.journal.count("GET", "referrers") == 2
    assert await minutes_of_looks(mirror, 180, step=20) == [60, 120, 180]


async def test_an_image_that_was_gone_and_is_copied_again_begins_anew(mirror):
    await mirror.look()
    await anyio.sleep(9 * DAY)
    assert (await mirror.look()).statuses() == ["skipped"]
    mirror.target.app.repositories.clear()
    assert (await mirror.look()).statuses() == ["synced"]
    # As behind the first copy, and not a quarter of nine days later.
    assert await minutes_of_looks(mirror, 100) == [5, 15, 30, 90]


async def test_another_tag_of_an_image_has_no_early_looks_again(mirror):
    await mirror.look()
    await anyio.sleep(DAY)
    assert (await mirror.look()).statuses() == ["skipped"]
    mirror.load(mirror.images[0], "v7")
    assert (await mirror.look()).statuses() == ["skipped", "synced"]
    found = await minutes_of_looks(mirror, 480, step=30)
    # A quarter of the time since the image was first copied, which is six hours by now.
    assert [minute for minute in found if minute < 360] == []
    assert found


async def test_an_image_whose_artifact_failed_has_its_early_looks_too(mirror):
    first = mirror.attach(mirror.images[0])
    mirror.target.app.faults.on("PUT", "manifest", reference=first.top).status(400)
    assert (await mirror.look()).statuses() == ["failed"]
    mirror.target.app.faults.clear()
    assert (await mirror.look()).statuses() == ["synced"]
    assert await minutes_of_looks(mirror, 120) == [5, 15, 30, 90]


async def test_an_image_that_failed_was_not_copied(mirror, tmp_path):
    mirror.target.app.faults.on("PUT", "manifest").status(400)
    assert (await mirror.look()).statuses() == ["failed"]
    assert not rows(tmp_path / ".regsync")["look"]
    mirror.target.app.faults.clear()
    mirror.images[0].load_into(mirror.target.app, "app", "v0")
    assert (await mirror.look()).statuses() == ["skipped"]
    assert await minutes_of_looks(mirror, 70) == [60]


async def test_a_copy_of_artifacts_that_is_cut_off_is_made_up_for_by_the_next_run(mirror):
    await mirror.look()
    late = mirror.attach(mirror.images[0])
    mirror.source.app.faults.on("GET", "blob").stall()
    async with stopped_at(1.0):
        assert (await mirror.look(None, "--recheck")).report["interrupted"]
    mirror.source.app.faults.clear()
    assert not mirror.holds(late)
    # No look is due yet, but the last one led to nothing.
    await mirror.look()
    assert mirror.holds(late)


async def test_a_recheck_asks_for_the_artifacts_of_all_images_at_both_ends(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=2)
    first = mirror.attach(mirror.images[0])
    await mirror.look()
    late = mirror.attach(mirror.images[1])
    assert (await mirror.look()).statuses() == ["skipped"] * 2
    assert mirror.source.journal.count("GET", "referrers") == 0

    # What a dry run asks is the same, and it moves nothing.
    planned = await mirror.look(None, "--recheck", "--dry-run")
    assert planned.statuses() == ["skipped", "would_sync"]
    assert not mirror.target.journal.matching("PUT POST PATCH")
    assert not mirror.holds(late)

    assert (await mirror.look(None, "--recheck")).statuses() == ["skipped", "synced"]
    assert mirror.holds(late)
    # The list of each image and of each artifact.
    assert asked(mirror.source)["GET referrers"] == 4
    again = await mirror.look(None, "--recheck")
    assert again.statuses() == ["skipped"] * 2
    assert [image["artifacts"]["skipped"] for image in again.images] == [1, 1]
    assert asked(mirror.source) == {
        "GET tag_list": 1,
        "HEAD manifest": 2,
        "GET manifest": 2,
        "GET referrers": 4,
    }
    # The tags, and the two artifacts, although the state knows that they are there.
    assert asked(mirror.target) == {"HEAD manifest": 4}

    # The state is wrong of one that somebody deleted.
    del mirror.target.app.repositories["app"].manifests[first.top]
    assert (await mirror.look()).statuses() == ["skipped"] * 2
    assert not mirror.holds(first)
    assert (await mirror.look(None, "--recheck")).statuses() == ["synced", "skipped"]
    assert mirror.holds(first)

    # A look is a look: nothing is left of the early ones until the next is due.
    assert (await mirror.look()).statuses() == ["skipped"] * 2
    assert mirror.source.journal.count("GET", "referrers") == 0


async def test_a_recheck_looks_at_tags_that_never_move_where_artifacts_travel(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=2)
    rule = {**tags("v*"), "immutable_tags": "v*"}
    await mirror.look(rule)
    late = mirror.attach(mirror.images[0])
    ran = await mirror.look(rule)
    assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 2
    ran = await mirror.look(rule, "--recheck", enabled=False)
    assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 2
    assert (await mirror.look(rule, "--recheck")).statuses() == ["synced", "skipped"]
    assert mirror.holds(late)


async def test_a_copy_by_hand_always_asks_for_artifacts(mirror):
    """Whatever the time of day, which spreads the looks of runs without a state."""
    assert (await copy(mirror)).statuses() == ["synced"]
    for _ in range(4):
        late = mirror.attach(mirror.images[0])
        assert (await copy(mirror)).statuses() == ["synced"]
        assert mirror.holds(late)
        assert (await copy(mirror)).statuses() == ["skipped"]
        assert mirror.source.journal.count("GET", "referrers") == 1 + len(mirror.attached)
        assert mirror.target.journal.count("HEAD", "manifest") == 1 + len(mirror.attached)
        await anyio.sleep(6 * HOUR)

    late = mirror.attach(mirror.images[0])
    assert (await copy(mirror, "--no-artifacts")).statuses() == ["skipped"]
    assert mirror.source.journal.count("GET", "referrers") == 0
    assert not mirror.holds(late)


@pytest.mark.parametrize("suffixes", [(), (".sig",), (".att", ".sbom", ".sig")])
async def test_a_copy_by_hand_asks_for_three_tags_of_cosign_where_the_source_has_the_api(
    mirror, suffixes
):
    """A HEAD each at the source, and one at the target only for a tag that the source has."""
    name = mirror.images[0].top.replace(":", "-")
    tagged = [mirror.load(mirror.seed.image(), name + suffix) for suffix in suffixes]

    assert (await copy(mirror)).statuses() == ["synced"]
    assert mirror.source.journal.count("HEAD", "manifest") == 3
    assert mirror.source.journal.count("GET", "manifest") == 1 + len(tagged)
    assert mirror.source.journal.count("GET", "referrers") == 1
    assert mirror.source.journal.count("GET", "tag_list") == 0
    assert mirror.target.journal.count("HEAD", "manifest") == 1
    assert all(mirror.holds(each) for each in tagged)
    assert sorted(mirror.target.app.tags("app")) == sorted(
        ["v0", *(name + suffix for suffix in suffixes)]
    )

    assert (await copy(mirror)).statuses() == ["skipped"]
    assert mirror.source.journal.count("HEAD", "manifest") == 3
    assert mirror.source.journal.count("GET", "manifest") == 1
    assert mirror.target.journal.count("HEAD", "manifest") == 1 + len(tagged)

    await copy(mirror, "--no-artifacts")
    assert mirror.source.journal.count("HEAD", "manifest") == 0


async def test_a_copy_of_one_platform_says_that_the_signature_of_its_index_stays_behind(mirror):
    index = mirror.load(mirror.seed.index(), "v0")
    mirror.load(mirror.seed.image(), index.top.replace(":", "-") + ".sig")
    ran = await copy(mirror, "--platform", "linux/amd64")
    assert ran.images[0]["artifacts"]["stripped"] == 1
    assert mirror.source.journal.count("HEAD", "manifest") == 3
    assert list(mirror.target.app.tags("app")) == ["v0"]


async def test_a_sync_of_plain_names_asks_for_no_tag_of_cosign_where_the_source_has_the_api(mirror):
    """Three requests for each image would be too many; a pattern has the tags listed."""
    mirror.load(mirror.seed.image(), mirror.images[0].top.replace(":", "-") + ".sig")
    for options in ((), ("--recheck",)):
        await mirror.look(tags("v0"), *options)
        mirror.source.journal.matching(path="*sha256-*").none()
        assert list(mirror.target.app.tags("app")) == ["v0"]


async def test_a_copy_by_hand_asks_although_the_state_knows_all(mirror):
    first = mirror.attach(mirror.images[0])
    assert (await mirror.look()).statuses() == ["synced"]
    late = mirror.attach(mirror.images[0])
    del mirror.target.app.repositories["app"].manifests[first.top]
    assert (await copy(mirror, config=str(mirror.file))).statuses() == ["synced"]
    assert mirror.holds(first)
    assert mirror.holds(late)


async def test_runs_that_come_late_make_up_for_early_looks_at_once(mirror):
    await mirror.look()
    assert await minutes_of_looks(mirror, 60, step=20) == [20, 40]
    await anyio.sleep(9 * DAY)
    late = mirror.attach(mirror.images[0])
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.holds(late)


async def test_targets_that_end_at_different_times_are_looked_at_together(mirror, world, tmp_path):
    slow = world.registry("slow.test", up=Link(bandwidth=1000))
    text = document(
        {"source": mirror.source, "target": mirror.target, "slow": slow},
        {"from": "app", "targets": ["target", "slow"], "tags": tags("v*"), "artifacts": {}},
        **{"global": {"cache_dir": str(tmp_path / ".regsync")}},
    )
    path = tmp_path / "mirror.yaml"
    path.write_text(text, encoding="utf-8")
    found = []
    for minute in range(0, 91, 5):
        mirror.source.journal.clear()
        ran = await world.run("sync", "--json", "-q", "-c", str(path))
        assert ran.status == 0
        if mirror.source.journal.count("GET", "referrers"):
            found.append(minute)
        await anyio.sleep(5 * MINUTE - ran.seconds)
    # The slow one ends some seconds after the run began, and each look is in a run after that.
    assert found == [0, 10, 20, 35]


async def test_what_a_listing_shows_costs_no_question(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=3, referrers_api=False)
    await mirror.look()
    again = await mirror.look()
    assert again.statuses() == ["skipped"] * 3
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 3}
    late = mirror.attach(mirror.images[1])
    mirror.load(mirror.seed.image(), mirror.images[2].top.replace(":", "-") + ".sig")
    ran = await mirror.look()
    assert ran.statuses() == ["skipped", "synced", "synced"]
    assert mirror.holds(late)
    assert asked(mirror.source)["GET referrers"] == 0
    assert (
        mirror.images[2].top.replace(":", "-") + ".sig"
        in mirror.target.app.repositories["app"].tags
    )


async def test_an_artifact_that_failed_fails_its_image_until_it_arrives(mirror):
    late = mirror.attach(mirror.images[0])
    mirror.target.app.faults.on("PUT", "manifest", reference=late.top).status(400)
    ran = await mirror.look()
    assert ran.statuses() == ["failed"]
    assert ran.status == 2
    assert ran.images[0]["artifacts"]["failed"] == 1
    assert mirror.images[0].top in mirror.target.app.repositories["app"].manifests
    mirror.target.app.faults.clear()
    ran = await mirror.look()
    assert ran.statuses() == ["synced"]
    assert mirror.holds(late)
    assert (await mirror.look()).statuses() == ["skipped"]


async def test_a_tag_that_never_moves_is_looked_at_when_a_listing_shows_more(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=2, referrers_api=False)
    rule = {**tags("v*"), "immutable_tags": "v*"}
    await mirror.look(rule)
    for _ in range(3):  # longer than `cache_ttl` in all
        await anyio.sleep(8 * HOUR)
        again = await mirror.look(rule)
    assert [each["reason"] for each in again.images] == ["immutable_tag"] * 2
    assert asked(mirror.source) == {"GET tag_list": 1}
    late = mirror.attach(mirror.images[0])
    ran = await mirror.look(rule)
    assert sorted(each["status"] for each in ran.images) == ["skipped", "synced"]
    assert mirror.holds(late)


async def test_required_artifacts_are_judged_by_state(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=2)
    mirror.attach(mirror.images[0])
    ran = await mirror.look(require_artifacts=True)
    assert mirror.target.journal.count("PUT", "manifest") == 2, "the one image and its signature"
    assert ran.statuses() == ["synced", "failed"]
    (failed,) = (each["error"] for each in ran.images if each["error"])
    assert "require_artifacts" in failed["message"]
    assert (failed["code"], failed["side"]) == ("SOURCE_ERROR", "source")
    again = await mirror.look(require_artifacts=True)
    assert again.statuses() == ["skipped", "failed"]
    assert mirror.source.journal.count("GET", "referrers") == 1, "of the unsigned one only"
    mirror.attach(mirror.images[1])
    assert (await mirror.look(require_artifacts=True)).statuses() == ["skipped", "synced"]


@pytest.mark.parametrize("look", [SignedMirror.look, look_without_state])
async def test_an_image_that_the_target_holds_is_skipped_without_required_artifacts(
    world, tmp_path, look
):
    """The skip tiers come first (docs/specification.md section 3); what stands at a target unsigned
    is for others to say.
    """
    mirror = SignedMirror(world, tmp_path, images=2)
    mirror.images[0].load_into(mirror.target.app, "app", tag="v0")
    ran = await look(mirror, require_artifacts=True)
    assert ran.statuses() == ["skipped", "failed"]
    assert "app:v1" in ran.err
    assert not mirror.target.journal.count("POST")
    for _ in range(4):
        await anyio.sleep(6 * HOUR)
        again = await look(mirror, require_artifacts=True)
        assert again.statuses() == ["skipped", "failed"]


async def test_a_tag_that_never_moves_is_skipped_unasked_where_artifacts_are_required(
    world, tmp_path
):
    mirror = SignedMirror(world, tmp_path, images=2)
    for number, image in enumerate(mirror.images):
        image.load_into(mirror.target.app, "app", tag=f"v{number}")
    rule = {**tags("v*"), "immutable_tags": "v*"}
    ran = await mirror.look(rule, require_artifacts=True)
    assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 2
    for place in (mirror.source, mirror.target):
        assert asked(place) == {"GET tag_list": 1}


async def test_required_artifacts_fail_the_copy_and_not_the_target_that_has_the_image(
    world, mirror
):
    mirror.images[0].load_into(mirror.target.app, "app", tag="v0")
    other = world.registry("unsigned.test")
    ends = {"source": mirror.source, "target": mirror.target, "unsigned": other}
    rule = {"require_artifacts": True}
    ran = await world.sync(ends, {"from": "app", "tags": tags("v0"), "artifacts": rule})
    statuses = {each["target"].split("/")[0]: each["status"] for each in ran.images}
    assert statuses == {"target.test": "skipped", "unsigned.test": "failed"}
    assert not other.journal.count("POST")


async def test_without_state_one_of_four_runs_a_day_looks(mirror):
    await look_without_state(mirror)
    late = mirror.attach(mirror.images[0])
    counts = []
    for _ in range(4):
        await look_without_state(mirror)
        counts.append(mirror.source.journal.count("GET", "referrers"))
        await anyio.sleep(6 * HOUR)
    assert sorted(counts) == [0, 0, 0, 2], "the image, and what is new on it"
    assert mirror.holds(late)


@pytest.mark.parametrize("options", [{}, {"referrers_api": False}], ids=["api", "fallback"])
async def test_a_first_signature_that_comes_late_costs_no_look_at_the_target(
    world, tmp_path, options
):
    """The last look found none, and what was not at the source did not come to the target."""
    mirror = SignedMirror(world, tmp_path, **options)
    assert (await mirror.look()).statuses() == ["synced"]
    late = mirror.attach(mirror.images[0])
    await anyio.sleep(6 * MINUTE)
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.holds(late)
    mirror.target.journal.matching("HEAD", "manifest", reference=late.top).none()

    # The next one may be there as well as the first, so each target is asked for it.
    second = mirror.attach(mirror.images[0])
    await anyio.sleep(10 * MINUTE)
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.holds(second)
    mirror.target.journal.matching("HEAD", "manifest", reference=second.top).exactly(1)


async def test_a_late_signature_that_somebody_else_brought_is_put_again_unharmed(mirror):
    assert (await mirror.look()).statuses() == ["synced"]
    late = mirror.attach(mirror.images[0])
    late.load_into(mirror.target.app, "app")
    await anyio.sleep(6 * MINUTE)
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.holds(late)
    assert mirror.target.journal.count("PUT", "manifest") == 1


async def test_a_late_signature_is_looked_for_at_the_target_by_recheck(mirror):
    assert (await mirror.look()).statuses() == ["synced"]
    late = mirror.attach(mirror.images[0])
    late.load_into(mirror.target.app, "app")
    assert (await mirror.look(None, "--recheck")).statuses() == ["skipped"]
    assert mirror.target.journal.count("PUT", "manifest") == 0


async def test_a_tag_of_cosign_that_comes_late_costs_no_look_and_one_that_moves_does(mirror):
    assert (await mirror.look()).statuses() == ["synced"]
    name = mirror.images[0].top.replace(":", "-") + ".sig"

    late = mirror.load(mirror.seed.image(), name)
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.target.app.repositories["app"].tags[name] == late.top
    mirror.target.journal.matching("HEAD", "manifest", reference=name).none()

    moved = mirror.load(mirror.seed.image(), name)
    await anyio.sleep(6 * MINUTE)
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.target.app.repositories["app"].tags[name] == moved.top
    mirror.target.journal.matching("HEAD", "manifest", reference=name).exactly(1)


async def test_a_tag_of_cosign_that_no_listing_shows_is_compared_at_each_look(world, tmp_path):
    """The state knows only of tags that a listing has shown."""
    mirror = SignedMirror(world, tmp_path, referrers_api=False)
    name = mirror.images[0].top.replace(":", "-") + ".sig"
    mirror.load(mirror.seed.image(), name)
    assert (await mirror.look(tags("v0"))).statuses() == ["synced"]
    await anyio.sleep(6 * MINUTE)
    assert (await mirror.look(tags("v0"))).statuses() == ["skipped"]
    mirror.target.journal.matching("HEAD", "manifest", reference=name).exactly(1)
    assert mirror.target.journal.count("PUT", "manifest") == 0


@pytest.mark.parametrize(("side", "status"), [("source", 403), ("target", 500)])
async def test_an_immutable_tag_gets_a_late_signature_after_many_failed_look_ups(
    world, tmp_path, side, status
):
    """Its snapshot, which shows that there is a signature, must not expire meanwhile."""
    mirror = SignedMirror(world, tmp_path, images=2, referrers_api=False)
    rule = {**tags("v*"), "immutable_tags": "v*"}
    await mirror.look(rule)
    late = mirror.attach(mirror.images[0])
    faults = getattr(mirror, side).app.faults
    faults.on("GET HEAD", "manifest", reference="v0").status(status)
    for _ in range(4):
        await anyio.sleep(4 * HOUR)
        ran = await mirror.look(rule)
        assert sorted(ran.statuses()) == ["failed", "skipped"]
    faults.clear()
    await mirror.look(rule)
    assert mirror.holds(late)
