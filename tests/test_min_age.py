"""`min_age`: a digest waits until it was first seen so long ago, at no request more than an unchanged
run's (docs/design.md section 12, "Age").
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response
from tests.ends import Ran, Virtual, document, held, tags
from tests.mirrors import Mirror, asked
from tests.program import report_schema
from tests.states import rows
from tests.watching import lines

HOUR = 3600.0
DAY = 24 * HOUR


class AgedMirror(Mirror):
    """A mirror whose digests wait; nothing hangs on its images."""

    @property
    def seen(self) -> list[str]:
        """What the state says of digests that were seen: one text for each."""
        return [str(note) for note in rows(self.cache).get("seen", ())]

    async def copy(self, *names: str, min_age: str = "3d", **rule: Any) -> Ran:
        """Run one mapping of these tags once."""
        return await self.sync({"from": "app", "tags": tags(*names), "min_age": min_age, **rule})

    async def sync(
        self, *mappings: Any, options: tuple[str, ...] = ("--json", "-q"), **top: Any
    ) -> Ran:
        top["defaults"] = {"artifacts": {"enabled": False}, **top.get("defaults", {})}
        self.write(*mappings, **top)
        self.clear()
        return await self.world.run("sync", *options, "-c", str(self.file))

    def asked(self) -> tuple[Counter[str], ...]:
        """Count what the source was asked for, then each target."""
        return tuple(asked(place) for place in (self.source, *self.targets.values()))


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> AgedMirror:
    return AgedMirror(world, tmp_path)


HELD = {"HEAD manifest": 1}


async def test_a_new_digest_waits_costs_a_head_a_side_and_goes_when_it_is_old_enough(mirror):
    image = mirror.push("v1")
    for hours in (0, 71):
        await anyio.sleep(hours * HOUR)
        ran = await mirror.copy("v1")
        assert (ran.status, mirror.asked()) == (0, (HELD, HELD))
        (told,) = ran.images
        assert (told["status"], told["reason"]) == ("skipped", "min_age")
        assert (told["until"], told["digest"]) == ("2026-01-04T00:00:00Z", None)
        assert told["source_digest"] == image.top
        assert ran.totals["images"] == {"synced": 0, "skipped": 1, "failed": 0, "held": 1}
        assert mirror.cache.joinpath("state.db").stat().st_mode & 0o777 == 0o600

    await anyio.sleep(HOUR)
    ran = await mirror.copy("v1")
    assert ran.statuses() == ["synced"]
    assert "until" not in ran.images[0]
    assert held(mirror.target, "app", image)
    source, _ = mirror.asked()
    assert source == {"HEAD manifest": 1, "GET manifest": 1, "GET blob": len(image.blobs)}

    ran = await mirror.copy("v1")
    assert (ran.statuses(), mirror.asked()) == (["skipped"], (HELD, HELD))
    assert (ran.images[0]["reason"], "held" in ran.totals["images"]) == ("unchanged", False)


async def test_what_the_target_holds_is_never_held_and_stays_until_the_new_digest_is_due(mirror):
    old = mirror.push("v1")
    old.load_into(mirror.target.app, "app", tag="v1")
    assert (await mirror.copy("v1")).images[0]["reason"] == "unchanged"

    new = mirror.push("v1")
    ran = await mirror.copy("v1")
    assert ran.images[0]["reason"] == "min_age"
    assert (ran.images[0]["digest"], ran.images[0]["source_digest"]) == (old.top, new.top)
    assert mirror.asked() == (HELD, HELD)
    assert held(mirror.target, "app", old)

    # What came and went meanwhile is never copied, and delays nothing.
    mirror.push("v1", old)
    await anyio.sleep(3 * DAY)
    assert (await mirror.copy("v1")).images[0]["reason"] == "unchanged"
    mirror.push("v1", new)
    assert (await mirror.copy("v1")).statuses() == ["synced"]


async def test_a_moving_tag_goes_at_once_to_a_digest_that_another_tag_has_had_for_long(mirror):
    first = mirror.push("1.2.3")
    mirror.push("latest", first)
    await mirror.copy("*")
    await anyio.sleep(3 * DAY)
    assert (await mirror.copy("*")).statuses() == ["synced", "synced"]
    second = mirror.push("1.2.4")
    await mirror.copy("*")
    await anyio.sleep(3 * DAY)
    mirror.push("latest", second)
    assert (await mirror.copy("*")).statuses() == ["skipped", "synced", "synced"]


async def test_a_mapping_without_an_age_notes_what_one_with_an_age_goes_by(mirror):
    image = mirror.push("1.2.3")
    mirror.push("latest")
    plain = {"from": "app", "tags": tags("1.2.3"), "to": "plain"}
    aged = {"from": "app", "tags": tags("latest"), "min_age": "3d"}
    kept = {"global": {"cache_dir": str(mirror.cache), "cache_ttl": 0}}
    assert (await mirror.sync(plain, aged, **kept)).statuses() == ["skipped", "synced"]
    await anyio.sleep(3 * DAY)
    mirror.push("latest", image)
    assert (await mirror.sync(plain, aged, **kept)).statuses() == ["synced", "skipped"]
    assert len(mirror.seen) == 2

    # Where no mapping has an age, nothing is noted.
    mirror.cache.joinpath("state.db").unlink()
    await mirror.sync(plain)
    assert mirror.seen == []


async def test_two_mappings_hold_one_tag_back_for_different_times(mirror):
    mirror.push("v1")
    both = [
        {"from": "app", "to": name, "tags": tags("v1"), "min_age": age}
        for name, age in (("slow", "3d"), ("quick", "1d"), ("now", "0"))
    ]
    statuses = []
    for _ in range(4):
        ran = await mirror.sync(*both, defaults={"min_age": "9d"})
        statuses.append(ran.statuses())
        await anyio.sleep(DAY)
    assert statuses == [
        ["synced", "skipped", "skipped"],
        ["skipped", "synced", "skipped"],
        ["skipped", "skipped", "skipped"],
        ["skipped", "skipped", "synced"],
    ]


async def test_one_verdict_for_all_targets_and_those_that_hold_it_are_unchanged(world, tmp_path):
    mirror = AgedMirror(world, tmp_path, "east", "west")
    image = mirror.push("v1")
    image.load_into(mirror.targets["west"].app, "app", tag="v1")
    rule = {"artifacts": {"enabled": True}}
    ran = await mirror.copy("v1", **rule)
    assert [each["reason"] for each in ran.images] == ["min_age", "unchanged"]
    signature = mirror.seed.artifact(image).load_into(mirror.source.app, "app")

    # The signature goes where the image is, and waits with it where it is not.
    await anyio.sleep(2 * DAY)
    ran = await mirror.copy("v1", **rule)
    outcomes = {each["target"]: each["status"] for each in ran.images}
    assert outcomes == {"east.test/app:v1": "skipped", "west.test/app:v1": "synced"}
    assert not mirror.targets["east"].app.tags("app")
    assert held(mirror.targets["west"], "app", signature)

    await anyio.sleep(DAY)
    ran = await mirror.copy("v1", **rule)
    assert ran.statuses() == ["synced", "skipped"]
    assert held(mirror.targets["east"], "app", signature)


async def test_an_index_that_is_trimmed_goes_by_the_digest_of_its_source(mirror):
    index = mirror.seed.index(platforms=("linux/amd64", "linux/arm64"))
    mirror.push("v1", index)
    rule = {"platforms": ["linux/arm64"]}
    assert (await mirror.copy("v1", **rule)).images[0]["reason"] == "min_age"
    assert mirror.asked() == (HELD, HELD)
    assert index.top in str(mirror.seen)
    await anyio.sleep(3 * DAY)
    ran = await mirror.copy("v1", **rule)
    assert ran.statuses() == ["synced"]
    assert ran.images[0]["digest"] != index.top
    assert (await mirror.copy("v1", **rule)).images[0]["reason"] == "unchanged"
    assert mirror.asked() == (HELD, HELD)


async def test_where_the_listing_has_digests_a_held_tag_costs_nothing_at_its_source(
    world, tmp_path
):
    provider, target = world.persona("gcr_open"), world.registry("target.test")
    image = Seed(23).image().load_into(provider, "team/app", tag="v1")

    def list_digests(request: Request) -> Answer | None:
        if request.kind != "tag_list":
            return None
        listing = {"name": "team/app", "tags": ["v1"], "manifest": {image.top: {"tag": ["v1"]}}}
        headers = [("Content-Type", "application/json")]
        return Response(200, headers, json.dumps(listing).encode())

    provider.intercept = list_digests
    mapping = {"from": "team/app", "tags": tags("v*"), "min_age": "3d"}
    ends = {"source": {"url": provider.row.hosts["registry"]}, "target": target}
    file = tmp_path / "mirror.yaml"
    file.write_text(document(ends, mapping))
    ran = await world.run("sync", "--json", "-q", "-c", str(file))
    assert (ran.images[0]["reason"], ran.images[0]["source_digest"]) == ("min_age", image.top)
    assert provider.journal.summary() == {"GET tag_list": 1}


async def test_held_tags_count_in_latest_and_in_min_tags(mirror):
    for name in ("1.0.0", "1.1.0"):
        mirror.push(name)
    rule = {"tags": tags("*", sort="semver", latest=2)}
    await mirror.copy(**rule)
    await anyio.sleep(3 * DAY)
    mirror.push("1.2.0")
    ran = await mirror.copy(**rule)
    assert [(each["source"][-5:], each["status"]) for each in ran.images] == [
        ("1.2.0", "skipped"),
        ("1.1.0", "synced"),
    ]


# --- what is said


async def test_the_summary_says_how_many_wait_and_until_when(mirror):
    mirror.push("v1")
    await mirror.copy("v1")
    await anyio.sleep(3 * DAY)
    for name in ("v2", "v3"):
        mirror.push(name)
    mapping = {"from": "app", "tags": tags("v*"), "min_age": "3d"}
    ran = await mirror.sync(mapping, options=("--no-progress",))
    assert "Images: 1 synced, 2 skipped, 0 failed\nHeld: 2 (next 2026-01-07T00:00:00Z)\n" in ran.out
    assert "held" not in ran.err


async def test_a_run_of_which_all_is_held_is_a_warning(mirror):
    mirror.push("v1")
    mapping = {"from": "app", "tags": tags("v*"), "min_age": "3d"}
    ran = await mirror.sync(mapping, options=("--no-progress",))
    told = "min_age holds back all images (1), until 2026-01-04T00:00:00Z at the earliest"
    assert ran.err.endswith(f"warning: {told}\n")
    assert (ran.status, ran.out) == (0, "")

    # One image is there: its target gets something.
    await anyio.sleep(3 * DAY)
    await mirror.copy("v1")
    mirror.push("v2")
    ran = await mirror.sync(mapping, options=("--no-progress",))
    assert "holds back" not in ran.err


async def test_a_dry_run_says_what_waits_and_leaves_no_trace(mirror):
    mirror.push("v1")
    mapping = {"from": "app", "tags": tags("v1"), "min_age": "3d"}
    ran = await mirror.sync(mapping, options=("--dry-run", "--no-progress"))
    place = "source.test/app:v1 -> target.test/app:v1"
    assert f"would skip {place} (min_age, until 2026-01-04T00:00:00Z)\n" in ran.out
    assert "Held: 1 (next 2026-01-04T00:00:00Z)\n" in ran.out
    assert mirror.asked() == (HELD, HELD)
    assert not mirror.cache.exists()

    await mirror.copy("v1")
    await anyio.sleep(3 * DAY)
    ran = await mirror.sync(mapping, options=("--dry-run", "--json", "-q"))
    assert ran.totals["images"] == {"synced": 0, "skipped": 0, "failed": 0, "would_sync": 1}


@pytest.mark.virtual_time
async def test_the_schema_names_what_is_new():
    image = report_schema()["$defs"]["image"]["properties"]
    assert "min_age" in image["reason"]["enum"]
    assert "until" in image
    assert "held" in report_schema()["$defs"]["images"]["properties"]


# --- state that is lost, shared, damaged, refused


async def test_without_its_state_the_age_begins_again_and_with_it_it_goes_on(mirror):
    mirror.push("v1")
    await mirror.copy("v1")
    await anyio.sleep(3 * DAY)
    state = mirror.cache / "state.db"
    times = state.read_bytes()
    state.unlink()
    assert (await mirror.copy("v1")).images[0]["until"] == "2026-01-07T00:00:00Z"
    state.write_bytes(times)
    assert (await mirror.copy("v1")).statuses() == ["synced"]


async def test_two_configurations_share_a_directory_and_neither_drops_the_others_entries(mirror):
    mirror.push("v1")
    mirror.push("v2")
    await mirror.copy("v1")
    for _ in range(3):
        await anyio.sleep(DAY)
        await mirror.copy("v2")
    assert (await mirror.copy("v1")).statuses() == ["synced"]


async def test_each_shard_has_the_times_of_its_own_images(mirror):
    image = mirror.push("v1")
    image.load_into(mirror.source.app, "other", tag="v1")
    both = [{"from": name, "tags": tags("v1"), "min_age": "3d"} for name in ("app", "other")]
    statuses = []
    for _ in range(2):
        for shard in ("0/2", "1/2"):
            ran = await mirror.sync(*both, options=("--json", "-q", "--shard", shard))
            statuses += ran.statuses()
        await anyio.sleep(3 * DAY)
    assert statuses == ["skipped", "skipped", "synced", "synced"]


@pytest.mark.parametrize(("days", "status"), [(89, "synced"), (93, "skipped")])
async def test_a_digest_that_comes_back_within_ninety_days_keeps_its_age(mirror, days, status):
    first = mirror.push("v1")
    await mirror.copy("v1")
    await anyio.sleep(days * DAY)
    second = mirror.push("v1")
    await mirror.copy("v1")
    assert second.top in str(mirror.seen)
    mirror.push("v1", first)
    assert (await mirror.copy("v1")).statuses() == [status]


# --- clocks


class Clock:
    """A wall clock that is wrong by some seconds."""

    def __init__(self, mirror: AgedMirror, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wrong_by = 0.0
        monkeypatch.setattr(mirror.world, "wall", lambda: Virtual.wall() + self.wrong_by)


@pytest.fixture
def clock(mirror: AgedMirror, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(mirror, monkeypatch)


async def test_a_time_later_than_now_counts_as_now(mirror, clock):
    """A clock was a year ahead when the digest was first seen: it waits as long as others, no more."""
    mirror.push("v1")
    clock.wrong_by = 365 * DAY
    assert (await mirror.copy("v1")).images[0]["until"] == "2027-01-04T00:00:00Z"
    clock.wrong_by = 0
    assert (await mirror.copy("v1")).images[0]["until"] == "2026-01-04T00:00:00Z"
    await anyio.sleep(2 * DAY)
    assert (await mirror.copy("v1")).images[0]["until"] == "2026-01-04T00:00:00Z"
    mirror.push("v2")
    assert (await mirror.copy("v2")).images[0]["until"] == "2026-01-06T00:00:00Z"
    await anyio.sleep(DAY)
    assert (await mirror.copy("v1")).statuses() == ["synced"]


async def test_a_clock_that_falls_back_and_recovers_makes_no_digest_older(mirror, clock):
    await anyio.sleep(10 * DAY)
    mirror.push("v1")
    await mirror.copy("v1")
    mirror.push("v2")
    clock.wrong_by = -9 * DAY
    ran = await mirror.copy("v1", "v2")
    assert [each["until"] for each in ran.images] == ["2026-01-05T00:00:00Z"] * 2
    clock.wrong_by = 0
    await anyio.sleep(HOUR)
    ran = await mirror.copy("v1", "v2")
    assert [each["until"] for each in ran.images] == ["2026-01-14T00:00:00Z"] * 2


async def test_a_clock_that_jumps_ahead_loses_no_time_that_still_counts(mirror, clock):
    mirror.push("v1")
    await mirror.copy("v1")
    clock.wrong_by = 365 * DAY  # the entry expires, and begins again
    ran = await mirror.copy("v1")
    assert ran.images[0]["until"] == "2027-01-04T00:00:00Z"
    clock.wrong_by = 0
    assert (await mirror.copy("v1")).images[0]["until"] == "2026-01-04T00:00:00Z"


# --- races


async def test_a_tag_that_moves_between_look_up_and_copy_waits_for_its_own_age(mirror):
    old = mirror.push("v1")
    await mirror.copy("v1")
    await anyio.sleep(3 * DAY)
    new = mirror.seed.image()

    def move(request: Request, answer: Answer) -> Answer:
        manifests = mirror.source.app.repositories["app"].manifests
        if request.method == "HEAD" and manifests.pop(old.top, None):
            new.load_into(mirror.source.app, "app", tag="v1")
        return answer

    mirror.source.app.amend = move
    ran = await mirror.copy("v1")
    assert (ran.images[0]["reason"], ran.images[0]["source_digest"]) == ("min_age", new.top)
    assert ran.images[0]["until"] == "2026-01-07T00:00:00Z"


async def test_a_run_that_is_killed_has_saved_what_it_saw_a_second_before(mirror):
    image = mirror.push("v1")
    mirror.push("v2")
    saved = []

    def look(request: Request, answer: Answer) -> Answer:
        saved.append(image.top in str(mirror.seen))
        return answer

    mirror.source.app.faults.on(reference="v2").first().status(429, retry_after=2)
    mirror.source.app.amend = look
    await mirror.copy("v1", "v2")
    assert saved == [False, False, True]


# --- watch


async def test_watch_holds_back_and_copies_when_it_is_due(stage):
    image = stage.load("v1")
    stage.write(
        {"from": "app", "tags": tags("v1"), "min_age": "3h", "artifacts": {"enabled": False}}
    )
    ran = await stage.watch(None, None, None, interval=HOUR, more=("--json",))
    cycles = [json.loads(line)["images"][0] for line in ran.out.splitlines()]
    assert [each["status"] for each in cycles] == ["skipped", "skipped", "skipped", "synced"]
    assert stage.asked[:3] == [(HELD, HELD)] * 3
    assert held(stage.target, "app", image)
    # What repeats is said once.
    until = "held back by min_age until 2026-01-01T03:00:00Z"
    assert lines(ran, "min_age") == [
        f"info: source.test/app:v1: {until}",
        "warning: min_age holds back all images (1), until 2026-01-01T03:00:00Z at the earliest",
    ]


async def test_watch_keeps_the_configuration_whose_times_can_be_kept(stage, tmp_path):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    (tmp_path / "file").write_text("no directory")

    def change() -> None:
        stage.write(
            {"from": "app", "tags": tags("v1"), "min_age": "2h"},
            **{"global": {"cache_dir": str(tmp_path / "file")}},
        )

    ran = await stage.watch(change, None)
    assert len(lines(ran, "error:", "File exists", "in force")) == 1
