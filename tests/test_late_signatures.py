"""When the artifacts of images that are there are looked at again (docs/design.md section 8, "Late
signatures"), and what such a look costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.memory import Link
from conformance.walks import referrers_tag
from tests.ends import Ran, Virtual, stopped_at, tags
from tests.mirrors import SIGNATURE, SignedMirror, asked

MINUTE, HOUR, DAY = 60, 3600, 86400
WITHOUT_API = {"referrers_api": False}
NEVER_MOVE = {**tags("v*"), "immutable_tags": "v*"}


class Late(SignedMirror):
    """Images v0, v1 and so on, which are signed when the test says so."""

    async def look_without_state(self, **rule: Any) -> Ran:
        """Sync all images from standard input, beside which no state can be."""
        self.clear()
        text = self.text({"from": "app", "tags": tags("v*"), "artifacts": rule})
        return await self.world.run("sync", "--json", "-q", "-c", "-", stdin=text)

    async def copy(self, *options: str) -> Ran:
        """Copy the first image by hand, without a state."""
        self.clear()
        text = self.text({"from": "app"}, defaults={"artifacts": {"enabled": False}})
        words = ("copy", *self.names, *options, "--json", "-q", "-c", "-")
        return await self.world.run(*words, stdin=text)

    @property
    def names(self) -> list[str]:
        return [f"{place.address}/app:v0" for place in (self.source, self.target)]

    @property
    def questions(self) -> int:
        """How many digests the source was asked about."""
        return self.source.journal.count("GET", "referrers")

    async def skip(self) -> None:
        """Run where all is there."""
        assert {*(await self.look()).statuses()} == {"skipped"}

    async def minutes_of_looks(self, minutes: int, step: int = 5) -> list[int]:
        """Run every `step` minutes; return after how many the source was asked for referrers."""
        found = []
        for minute in range(step, minutes + 1, step):
            await anyio.sleep(step * MINUTE)
            await self.skip()
            if self.questions:
                assert self.questions == len(self.images), "one question for each"
                found.append(minute)
        return found

    def cosign(self, number: int = 0, suffix: str = ".sig") -> str:
        """Return a tag of cosign's for an image."""
        return referrers_tag(self.images[number].top) + suffix

    def hold_all(self) -> None:
        """Let the target have all images."""
        for number, image in enumerate(self.images):
            image.load_into(self.target.app, "app", f"v{number}")


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> Late:
    return Late(world, tmp_path)


@pytest.fixture
def two(world: Virtual, tmp_path: Path) -> Late:
    return Late(world, tmp_path, images=2)


def moved(*statuses: int) -> dict[str, int]:
    return dict(zip(("synced", "skipped", "failed", "stripped"), statuses, strict=True))


# The schedule.


async def test_a_late_signature_arrives_when_its_look_is_due(mirror):
    first = mirror.attach(mirror.images[0])
    assert (await mirror.look()).images[0]["artifacts"] == moved(1, 0, 0, 0)
    assert mirror.holds(first)
    late = mirror.attach(mirror.images[0])
    await mirror.skip()
    assert not mirror.holds(late)
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 1}
    assert asked(mirror.target) == {"HEAD manifest": 1}
    await anyio.sleep(6 * MINUTE)
    ran = await mirror.look()
    assert ran.statuses() == ["synced"], "what moves is told"
    assert ran.images[0]["artifacts"] == moved(1, 1, 0, 0)
    assert mirror.holds(late)
    assert mirror.questions == 2, "the image, and what is new on it"
    await anyio.sleep(10 * MINUTE)
    await mirror.skip()
    assert (mirror.questions, mirror.source.journal.count("GET", "manifest")) == (1, 0)


@pytest.mark.parametrize("tag", ["", ".sig"])
async def test_platforms_are_asked_about_again_when_their_index_has_a_new_signature(
    world, tmp_path, tag
):
    mirror = Late(world, tmp_path, images=0)
    images = [mirror.seed.image(architecture=each) for each in ("amd64", "arm64")]
    mirror.images = [mirror.push("v0", mirror.seed.index(images)), *images]
    await mirror.look()
    await anyio.sleep(6 * MINUTE)
    await mirror.skip()
    assert (mirror.questions, mirror.source.journal.count("GET", "manifest")) == (1, 0)
    names = [[mirror.cosign(number)] if tag else [] for number in range(3)]
    late = [
        mirror.attach(image, SIGNATURE, *each)
        for image, each in zip(mirror.images, names, strict=True)
    ]
    await anyio.sleep(6 * MINUTE)
    await mirror.look()
    assert [mirror.holds(each) for each in late] == [True] * 3
    mirror.source.journal.matching("GET", "manifest", reference=mirror.images[0].top).none()


@pytest.mark.parametrize("how", ["copied", "found there", "copied again"])
async def test_images_are_looked_at_by_the_schedule(two, how):
    if how == "found there":
        two.hold_all()
    await two.look()
    if how == "copied again":
        await anyio.sleep(9 * DAY)
        await two.skip()
        two.target.app.repositories.clear()
        assert (await two.look()).statuses() == ["synced"] * 2
    # Each when they are twice as old as at the last one.
    assert await two.minutes_of_looks(100) == [5, 10, 20, 40, 80]
    assert await two.minutes_of_looks(300, step=20) == [60, 220]
    # Not one of the early looks is left to make up for.
    await anyio.sleep(8 * DAY)
    await two.look()
    assert await two.minutes_of_looks(60, step=10) == []


async def test_another_tag_of_an_image_has_no_early_looks_again(mirror):
    await mirror.look()
    await anyio.sleep(DAY)
    await mirror.skip()
    mirror.load(mirror.images[0], "v7")
    assert (await mirror.look()).statuses() == ["skipped", "synced"]
    # After the time since the image was first copied, which is a day by now.
    found = await mirror.minutes_of_looks(26 * 60, step=60)
    assert found
    assert min(found) >= 24 * 60


async def test_targets_that_end_at_different_times_are_looked_at_together(mirror):
    mirror.targets["slow"] = mirror.world.registry("slow.test", up=Link(bandwidth=1000))
    found = []
    for minute in range(0, 41, 5):
        ran = await mirror.look()
        assert ran.status == 0
        if mirror.questions:
            found.append(minute)
        await anyio.sleep(5 * MINUTE - ran.seconds)
    # The slow one ends some seconds later, and no look is made for it alone.
    assert found == [0, 5, 10, 20, 40]


async def test_a_look_that_is_cut_off_is_made_up_for_by_the_next_run(mirror):
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


async def test_without_state_one_of_four_runs_a_day_looks(mirror):
    await mirror.look_without_state()
    late = mirror.attach(mirror.images[0])
    counts = []
    for _ in range(4):
        await mirror.look_without_state()
        counts.append(mirror.questions)
        await anyio.sleep(6 * HOUR)
    assert sorted(counts) == [0, 0, 0, 2], "the image, and what is new on it"
    assert mirror.holds(late)


# What a listing shows.


async def test_what_a_listing_shows_costs_no_question(world, tmp_path):
    mirror = Late(world, tmp_path, images=3, **WITHOUT_API)
    await mirror.look()
    await mirror.skip()
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 3}
    late = mirror.attach(mirror.images[1])
    mirror.load(mirror.seed.image(), mirror.cosign(2))
    assert (await mirror.look()).statuses() == ["skipped", "synced", "synced"]
    assert mirror.holds(late)
    assert mirror.cosign(2) in mirror.target.app.tags("app")
    assert mirror.questions == 0


async def test_a_tag_that_never_moves_is_looked_at_when_a_listing_shows_more(world, tmp_path):
    mirror = Late(world, tmp_path, images=2, **WITHOUT_API)
    await mirror.look(NEVER_MOVE)
    for _ in range(3):  # longer than `cache_ttl` in all
        await anyio.sleep(8 * HOUR)
        again = await mirror.look(NEVER_MOVE)
    assert [each["reason"] for each in again.images] == ["immutable_tag"] * 2
    assert asked(mirror.source) == {"GET tag_list": 1}
    late = mirror.attach(mirror.images[0])
    assert sorted((await mirror.look(NEVER_MOVE)).statuses()) == ["skipped", "synced"]
    assert mirror.holds(late)


@pytest.mark.parametrize(("side", "status"), [("source", 403), ("target", 500)])
async def test_an_immutable_tag_gets_a_late_signature_after_many_failed_look_ups(
    world, tmp_path, side, status
):
    """Its snapshot, which shows that there is a signature, must not expire meanwhile."""
    mirror = Late(world, tmp_path, images=2, **WITHOUT_API)
    await mirror.look(NEVER_MOVE)
    late = mirror.attach(mirror.images[0])
    faults = getattr(mirror, side).app.faults
    faults.on("GET HEAD", "manifest", reference="v0").status(status)
    for _ in range(4):  # longer than a snapshot is kept
        await anyio.sleep(30 * DAY)
        assert sorted((await mirror.look(NEVER_MOVE)).statuses()) == ["failed", "skipped"]
    faults.clear()
    await mirror.look(NEVER_MOVE)
    assert mirror.holds(late)


async def test_a_tag_of_cosign_that_comes_late_costs_no_look_and_one_that_moves_does(mirror):
    assert (await mirror.look()).statuses() == ["synced"]
    name = mirror.cosign()
    for number in range(2):
        signature = mirror.load(mirror.seed.image(), name)
        assert (await mirror.look()).statuses() == ["synced"]
        assert mirror.target.app.tags("app")[name] == signature.top
        mirror.target.journal.matching("HEAD", "manifest", reference=name).exactly(number)
        await anyio.sleep(6 * MINUTE)


async def test_a_sync_of_plain_names_asks_for_no_tag_of_cosign_where_the_source_has_the_api(mirror):
    """Three requests for each image would be too many; a pattern has the tags listed."""
    mirror.load(mirror.seed.image(), mirror.cosign())
    for options in ((), ("--recheck",)):
        await mirror.look(tags("v0"), *options)
        mirror.source.journal.matching(path="*sha256-*").none()
        assert list(mirror.target.app.tags("app")) == ["v0"]


# What a late signature costs at the target.


@pytest.mark.parametrize("options", [{}, WITHOUT_API], ids=["api", "fallback"])
async def test_a_first_signature_that_comes_late_costs_no_look_at_the_target(
    world, tmp_path, options
):
    """The last look found none, and what was not at the source did not come to the target."""
    mirror = Late(world, tmp_path, **options)
    assert (await mirror.look()).statuses() == ["synced"]
    # The next one may be there as well as the first, so each target is asked for it.
    for number in range(2):
        late = mirror.attach(mirror.images[0])
        await anyio.sleep(10 * MINUTE)
        assert (await mirror.look()).statuses() == ["synced"]
        assert mirror.holds(late)
        mirror.target.journal.matching("HEAD", "manifest", reference=late.top).exactly(number)


@pytest.mark.parametrize("recheck", [False, True])
async def test_a_late_signature_that_somebody_else_brought_stays_unharmed(mirror, recheck):
    """A recheck looks for it at the target; else it is put again."""
    assert (await mirror.look()).statuses() == ["synced"]
    late = mirror.attach(mirror.images[0])
    late.load_into(mirror.target.app, "app")
    await anyio.sleep(6 * MINUTE)
    ran = await mirror.look(None, *["--recheck"] * recheck)
    assert ran.statuses() == ["skipped" if recheck else "synced"]
    assert mirror.holds(late)
    mirror.target.journal.matching("PUT", "manifest").exactly(0 if recheck else 1)


# --recheck, and copies by hand.


async def test_a_recheck_asks_for_the_artifacts_of_all_images_at_both_ends(two):
    first = two.attach(two.images[0])
    await two.look()
    late = two.attach(two.images[1])
    await two.skip()
    assert two.questions == 0
    assert (await two.look(None, "--recheck")).statuses() == ["skipped", "synced"]
    assert two.holds(late)
    assert two.questions == 4, "of each image and of each artifact"
    again = await two.look(None, "--recheck")
    assert again.statuses() == ["skipped"] * 2
    assert [image["artifacts"]["skipped"] for image in again.images] == [1, 1]
    assert asked(two.source) == {
        "GET tag_list": 1,
        "HEAD manifest": 2,
        "GET manifest": 2,
        "GET referrers": 4,
    }
    # The tags, and the two artifacts, although the state knows that they are there.
    assert asked(two.target) == {"HEAD manifest": 4}

    # The state is wrong of one that somebody deleted.
    del two.target.app.repositories["app"].manifests[first.top]
    await two.skip()
    assert not two.holds(first)
    assert (await two.look(None, "--recheck")).statuses() == ["synced", "skipped"]
    assert two.holds(first)


async def test_a_recheck_looks_at_tags_that_never_move_where_artifacts_travel(two):
    await two.look(NEVER_MOVE)
    late = two.attach(two.images[0])
    for options, rule in (((), {}), (("--recheck",), {"enabled": False})):
        ran = await two.look(NEVER_MOVE, *options, **rule)
        assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 2
    assert (await two.look(NEVER_MOVE, "--recheck")).statuses() == ["synced", "skipped"]
    assert two.holds(late)


async def test_a_copy_by_hand_always_asks_for_artifacts(mirror):
    """Whatever the time of day, which spreads the looks of runs without a state."""
    assert (await mirror.copy()).statuses() == ["synced"]
    for _ in range(4):
        late = mirror.attach(mirror.images[0])
        assert (await mirror.copy()).statuses() == ["synced"]
        assert mirror.holds(late)
        await anyio.sleep(6 * HOUR)

    late = mirror.attach(mirror.images[0])
    assert (await mirror.copy("--no-artifacts")).statuses() == ["skipped"]
    assert mirror.questions == 0
    assert not mirror.holds(late)


async def test_a_copy_by_hand_asks_for_three_tags_of_cosign_where_the_source_has_the_api(mirror):
    """A HEAD each at the source, and one at the target only for a tag that the source has."""
    suffixes = (".att", ".sbom")
    tagged = [mirror.load(mirror.seed.image(), mirror.cosign(suffix=each)) for each in suffixes]
    count = mirror.source.journal.count
    assert (await mirror.copy()).statuses() == ["synced"]
    assert (count("HEAD", "manifest"), count("GET", "manifest")) == (3, 1 + len(tagged))
    assert (mirror.questions, count("GET", "tag_list")) == (1, 0)
    mirror.target.journal.matching("HEAD", "manifest").exactly(1)
    assert all(mirror.holds(each) for each in tagged)
    names = ["v0", *(mirror.cosign(suffix=each) for each in suffixes)]
    assert sorted(mirror.target.app.tags("app")) == sorted(names)

    assert (await mirror.copy()).statuses() == ["skipped"]
    assert (count("HEAD", "manifest"), count("GET", "manifest")) == (3, 1)
    mirror.target.journal.matching("HEAD", "manifest").exactly(1 + len(tagged))
    await mirror.copy("--no-artifacts")
    assert count("HEAD", "manifest") == 0


async def test_a_copy_of_one_platform_asks_for_no_signature_of_the_whole_index(mirror):
    mirror.images[0] = mirror.load(mirror.seed.index(), "v0")
    mirror.load(mirror.seed.image(), mirror.cosign())
    ran = await mirror.copy("--platform", "linux/amd64")
    assert ran.statuses() == ["synced"]
    mirror.source.journal.matching("HEAD", "manifest").none()
    assert list(mirror.target.app.tags("app")) == ["v0"]


async def test_a_copy_by_hand_asks_although_the_state_knows_all(mirror):
    first = mirror.attach(mirror.images[0])
    assert (await mirror.look()).statuses() == ["synced"]
    late = mirror.attach(mirror.images[0])
    del mirror.target.app.repositories["app"].manifests[first.top]
    assert (await mirror.run("copy", *mirror.names)).statuses() == ["synced"]
    assert mirror.holds(first)
    assert mirror.holds(late)


# Artifacts that are required.


async def test_required_artifacts_are_judged_by_state(two):
    two.attach(two.images[0])
    ran = await two.look(require_artifacts=True)
    two.target.journal.matching("PUT", "manifest").exactly(2)
    assert ran.statuses() == ["synced", "failed"]
    (error,) = (each["error"] for each in ran.images if each["error"])
    assert "require_artifacts" in error["message"]
    assert (error["code"], error["side"]) == ("SOURCE_ERROR", "source")
    assert (await two.look(require_artifacts=True)).statuses() == ["skipped", "failed"]
    assert two.questions == 1, "of the unsigned one only"
    two.attach(two.images[1])
    assert (await two.look(require_artifacts=True)).statuses() == ["skipped", "synced"]


async def test_a_tag_that_never_moves_is_skipped_unasked_where_artifacts_are_required(two):
    two.hold_all()
    ran = await two.look(NEVER_MOVE, require_artifacts=True)
    assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 2
    for place in (two.source, two.target):
        assert asked(place) == {"GET tag_list": 1}


async def test_required_artifacts_fail_the_copy_and_not_the_target_that_has_the_image(mirror):
    mirror.targets["unsigned"] = other = mirror.world.registry("unsigned.test")
    mirror.hold_all()
    ran = await mirror.look(tags("v0"), require_artifacts=True)
    assert ran.statuses() == ["skipped", "failed"]
    other.journal.matching("POST").none()


async def test_with_platforms_a_later_look_asks_for_what_refers_to_those_that_are_kept(
    world, tmp_path
):
    """No artifact refers to a trimmed index itself; those below count as required, too. What is kept
    the target says, because a source may count what is fetched.
    """
    mirror = Late(world, tmp_path, images=0)
    images = [mirror.seed.image(architecture=each) for each in ("amd64", "arm64")]
    mirror.load(mirror.seed.index(images), "v0")
    mirror.attach(images[0])
    mapping = {"from": "app", "tags": tags("v*"), "platforms": ["linux/amd64"]}
    mapping["artifacts"] = {"require_artifacts": True}
    assert (await mirror.sync(mapping)).status == 0
    late, other = map(mirror.attach, images)
    assert (await mirror.sync(mapping)).statuses() == ["skipped"]
    assert mirror.questions == 0
    await anyio.sleep(2 * HOUR)
    assert (await mirror.sync(mapping)).statuses() == ["synced"]
    assert (mirror.holds(late), mirror.holds(other)) == (True, False)
    await anyio.sleep(8 * HOUR)
    assert (await mirror.sync(mapping)).statuses() == ["skipped"]
    assert (mirror.questions, mirror.source.journal.count("GET", "manifest")) == (1, 0)
    assert asked(mirror.target) == {"HEAD manifest": 1, "GET manifest": 1}


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(("status", "wait"), [(429, None), (429, 3600), (503, 3600)])
async def test_a_registry_that_asks_for_hours_has_not_said_that_there_is_no_signature(
    world, tmp_path, status, wait, is_there
):
    """Not of an image that is new, and not of one whose look is due."""
    mirror = SignedMirror(world, tmp_path)
    if is_there:
        await mirror.look()
        await anyio.sleep(3600)
    signature = mirror.attach(mirror.images[0])
    mirror.source.app.faults.on("GET", "referrers").status(status, retry_after=wait)
    ran = await mirror.look()
    assert (ran.status, ran.statuses()) == (2, ["failed"])
    mirror.source.app.faults.clear()
    await anyio.sleep(3600)
    assert (await mirror.look()).status == 0
    assert mirror.holds(signature)


@pytest.mark.parametrize("status", [400, 406, 410, 422])
async def test_a_refusal_of_an_api_that_works_is_no_sign_that_there_is_no_signature(
    world, tmp_path, status
):
    mirror = SignedMirror(world, tmp_path, images=2)
    await mirror.look()
    await anyio.sleep(3600)
    mirror.attach(mirror.images[0])
    refused = mirror.source.app.faults.on("GET", "referrers", reference=mirror.images[0].top)
    refused.status(status)
    ran = await mirror.look()
    assert (ran.status, ran.statuses()) == (1, ["failed", "skipped"])
    assert f"list referrers of source.test/app@{mirror.images[0].top}" in ran.failed[0]
