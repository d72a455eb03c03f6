"""`min_age`: a digest waits until it was first seen so long ago, at no request more than an unchanged
run's; times that cannot be kept are an error before any request (docs/design.md section 12, "Age").
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.messages import Answer, Request
from tests.ends import Ran, Virtual, document, held, run_regsync, tags
from tests.mirrors import Mirror, asked
from tests.states import rows
from tests.watching import lines

HOUR = 3600.0
DAY = 24 * HOUR
HEAD = {"HEAD manifest": 1}


class AgedMirror(Mirror):
    """A mirror whose digests wait; nothing hangs on its images."""

    wrong_by = 0.0  # how far the wall clock is ahead, in seconds

    @property
    def seen(self) -> list[str]:
        """What the state says of digests that were seen: one text for each."""
        return [str(note) for note in rows(self.cache).get("seen", ())]

    def mapping(self, *names: str, min_age: str = "3d", **rule: Any) -> dict[str, Any]:
        return {"from": "app", "tags": tags(*names), "min_age": min_age, **rule}

    async def copy(self, *names: str, **rule: Any) -> Ran:
        """Run one mapping of these tags once."""
        return await self.sync(self.mapping(*names, **rule))

    async def told(self, *names: str, **rule: Any) -> dict[str, Any]:
        """Copy one image, and return what the report says of it."""
        (image,) = (await self.copy(*names, **rule)).images
        return image

    async def sync(
        self, *mappings: Any, options: tuple[str, ...] = ("--json", "-q"), **top: Any
    ) -> Ran:
        top["defaults"] = {"artifacts": {"enabled": False}, **top.get("defaults", {})}
        self.write(*mappings, **top)
        self.clear()
        return await self.world.run("sync", *options, "-c", str(self.file))

    def cost(self) -> tuple[dict[str, int], ...]:
        """Count what the source was asked for, then each target."""
        return tuple(asked(place) for place in (self.source, *self.targets.values()))


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgedMirror:
    made = AgedMirror(world, tmp_path)
    monkeypatch.setattr(world, "wall", lambda: Virtual.wall() + made.wrong_by)
    return made


# What waits, and for how long.


async def test_a_new_digest_waits_costs_a_head_a_side_and_goes_when_it_is_old_enough(mirror):
    image = mirror.push("v1")
    for hours in (0, 71):
        await anyio.sleep(hours * HOUR)
        ran = await mirror.copy("v1")
        assert (ran.status, mirror.cost()) == (0, (HEAD, HEAD))
        (told,) = ran.images
        assert (told["status"], told["reason"]) == ("skipped", "min_age")
        assert (told["until"], told["digest"]) == ("2026-01-04T00:00:00Z", None)
        assert told["source_digest"] == image.top
        assert ran.totals["images"] == {"synced": 0, "skipped": 1, "failed": 0, "held": 1}

    await anyio.sleep(HOUR)
    ran = await mirror.copy("v1")
    assert ran.statuses() == ["synced"]
    assert "until" not in ran.images[0]
    assert held(mirror.target, "app", image)
    assert mirror.cost()[0] == {**HEAD, "GET manifest": 1, "GET blob": len(image.blobs)}

    ran = await mirror.copy("v1")
    assert (ran.statuses(), mirror.cost()) == (["skipped"], (HEAD, HEAD))
    assert (ran.images[0]["reason"], "held" in ran.totals["images"]) == ("unchanged", False)


async def test_what_the_target_holds_is_never_held_and_stays_until_the_new_digest_is_due(mirror):
    old = mirror.push("v1")
    old.load_into(mirror.target.app, "app", "v1")
    assert (await mirror.told("v1"))["reason"] == "unchanged"

    new = mirror.push("v1")
    told = await mirror.told("v1")
    assert told["reason"] == "min_age"
    assert (told["digest"], told["source_digest"]) == (old.top, new.top)
    assert mirror.cost() == (HEAD, HEAD)
    assert held(mirror.target, "app", old)

    # What came and went meanwhile is never copied, and delays nothing.
    mirror.push("v1", old)
    await anyio.sleep(3 * DAY)
    assert (await mirror.told("v1"))["reason"] == "unchanged"
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
    aged = mirror.mapping("latest")
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


async def test_mappings_hold_one_tag_back_for_different_times(mirror):
    mirror.push("v1")
    ages = {"slow": "3d", "quick": "1d", "now": "0"}
    mappings = [mirror.mapping("v1", to=name, min_age=age) for name, age in ages.items()]
    statuses = []
    for _ in range(4):
        statuses.append((await mirror.sync(*mappings, defaults={"min_age": "9d"})).statuses())
        await anyio.sleep(DAY)
    assert statuses == [
        ["synced", "skipped", "skipped"],
        ["skipped", "synced", "skipped"],
        ["skipped", "skipped", "skipped"],
        ["skipped", "skipped", "synced"],
    ]


async def test_one_verdict_for_all_targets_and_those_that_hold_it_are_unchanged(world, tmp_path):
    mirror = AgedMirror(world, tmp_path, "east", "west")
    east, west = mirror.targets.values()
    image = mirror.push("v1")
    image.load_into(west.app, "app", "v1")
    rule = {"artifacts": {"enabled": True}}
    ran = await mirror.copy("v1", **rule)
    assert [each["reason"] for each in ran.images] == ["min_age", "unchanged"]
    signature = mirror.seed.artifact(image).load_into(mirror.source.app, "app")

    # The signature goes where the image is, and waits with it where it is not.
    await anyio.sleep(2 * DAY)
    assert (await mirror.copy("v1", **rule)).statuses() == ["skipped", "synced"]
    assert not east.app.tags("app")
    assert held(west, "app", signature)

    await anyio.sleep(DAY)
    assert (await mirror.copy("v1", **rule)).statuses() == ["synced", "skipped"]
    assert held(east, "app", signature)


async def test_an_index_that_is_trimmed_goes_by_the_digest_of_its_source(mirror):
    index = mirror.push("v1", mirror.seed.index(platforms=("linux/amd64", "linux/arm64")))
    rule = {"platforms": ["linux/arm64"]}
    assert (await mirror.told("v1", **rule))["reason"] == "min_age"
    assert mirror.cost() == (HEAD, HEAD)
    assert index.top in str(mirror.seen)
    await anyio.sleep(3 * DAY)
    told = await mirror.told("v1", **rule)
    assert told["status"] == "synced"
    assert told["digest"] != index.top
    assert (await mirror.told("v1", **rule))["reason"] == "unchanged"
    assert mirror.cost() == (HEAD, HEAD)


async def test_held_tags_count_in_latest_and_in_min_tags(mirror):
    for name in ("1.0.0", "1.1.0"):
        mirror.push(name)
    rule = {"tags": tags("*", sort="semver", latest=2)}
    await mirror.copy(**rule)
    await anyio.sleep(3 * DAY)
    mirror.push("1.2.0")
    ran = await mirror.copy(**rule)
    found = {each["source"]: each["status"] for each in ran.images}
    assert found == {"source.test/app:1.2.0": "skipped", "source.test/app:1.1.0": "synced"}


# What is said.

LOUD = ("--no-progress",)


async def test_the_summary_says_how_many_wait_and_until_when(mirror):
    mirror.push("v1")
    ran = await mirror.sync(mirror.mapping("v*"), options=LOUD)
    assert (ran.status, ran.out, "min_age" in ran.err) == (0, "", False)

    # Of several, of which the target gets one.
    await anyio.sleep(3 * DAY)
    for name in ("v2", "v3"):
        mirror.push(name)
    ran = await mirror.sync(mirror.mapping("v*"), options=LOUD)
    assert "Images: 1 synced, 2 skipped, 0 failed\nHeld: 2 (next 2026-01-07T00:00:00Z)\n" in ran.out
    assert "min_age" not in ran.err


async def test_a_dry_run_says_what_waits_and_leaves_no_trace(mirror):
    mirror.push("v1")
    ran = await mirror.sync(mirror.mapping("v1"), options=("--dry-run", *LOUD))
    place = "source.test/app:v1 -> target.test/app:v1"
    assert f"would skip {place} (min_age, until 2026-01-04T00:00:00Z)\n" in ran.out
    assert "Held: 1 (next 2026-01-04T00:00:00Z)\n" in ran.out
    assert mirror.cost() == (HEAD, HEAD)
    assert not mirror.cache.exists()

    await mirror.copy("v1")
    await anyio.sleep(3 * DAY)
    ran = await mirror.sync(mirror.mapping("v1"), options=("--dry-run", "--json", "-q"))
    assert ran.totals["images"] == {"synced": 0, "skipped": 0, "failed": 0, "would_sync": 1}


# State that is lost, shared, old.


async def test_without_its_state_the_age_begins_again_and_with_it_it_goes_on(mirror):
    mirror.push("v1")
    await mirror.copy("v1")
    await anyio.sleep(3 * DAY)
    state = mirror.cache / "state.db"
    times = state.read_bytes()
    state.unlink()
    assert (await mirror.told("v1"))["until"] == "2026-01-07T00:00:00Z"
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
    image.load_into(mirror.source.app, "other", "v1")
    both = [{**mirror.mapping("v1"), "from": name} for name in ("app", "other")]
    statuses = []
    for _ in range(2):
        for shard in ("0/2", "1/2"):
            options = ("--json", "-q", "--shard", shard)
            statuses += (await mirror.sync(*both, options=options)).statuses()
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


async def test_a_digest_that_goes_on_answering_keeps_its_age(mirror):
    mirror.push("v1")
    for _ in range(3):
        assert (await mirror.told("v1", min_age="200d"))["until"] == "2026-07-20T00:00:00Z"
        await anyio.sleep(60 * DAY)


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


# Clocks.


async def test_a_time_later_than_now_holds_back_until_it_has_come(mirror):
    """A clock was a year ahead when a digest was first seen. What is new then may be as new as that:
    late, never early. Whoever removes the state begins again.
    """
    mirror.push("v1")
    mirror.wrong_by = 365 * DAY
    assert (await mirror.told("v1"))["until"] == "2027-01-04T00:00:00Z"
    mirror.wrong_by = 0
    mirror.push("v2")
    for name, day in (("v1", 4), ("v2", 5)):
        assert (await mirror.told(name))["until"] == f"2027-01-0{day}T00:00:00Z"
    mirror.cache.joinpath("state.db").unlink()
    assert (await mirror.told("v1"))["until"] == "2026-01-04T00:00:00Z"


async def test_a_clock_that_falls_back_and_recovers_makes_no_digest_older(mirror):
    await anyio.sleep(10 * DAY)
    mirror.push("v1")
    await mirror.copy("v1")
    # Within a day the second time is not noted, and v2 came after it.
    await anyio.sleep(23 * HOUR)
    await mirror.copy("v1")
    mirror.push("v2")
    for wrong_by in (-9 * DAY, 0):
        mirror.wrong_by = wrong_by
        ran = await mirror.copy("v1", "v2")
        untils = sorted(each["until"] for each in ran.images)
        assert untils == ["2026-01-14T00:00:00Z", "2026-01-15T00:00:00Z"]
        await anyio.sleep(HOUR)


# A watch.


async def test_watch_holds_back_and_copies_when_it_is_due(stage):
    image = stage.load("v1")
    mapping = {"from": "app", "tags": tags("v1"), "artifacts": {"enabled": False}}
    stage.write({**mapping, "min_age": "3h"})
    ran = await stage.watch(None, None, None, interval=HOUR, more=("--json",))
    cycles = [json.loads(line)["images"][0]["status"] for line in ran.out.splitlines()]
    assert cycles == ["skipped", "skipped", "skipped", "synced"]
    assert stage.asked[:3] == [(HEAD, HEAD)] * 3
    assert held(stage.target, "app", image)
    assert "min_age" not in ran.err


async def test_watch_keeps_the_configuration_whose_times_can_be_kept(stage, tmp_path):
    stage.load("v1")
    mapping = {"from": "app", "tags": tags("v1")}
    stage.write(mapping)
    (tmp_path / "file").write_text("no directory")
    nowhere = {"global": {"cache_dir": str(tmp_path / "file")}}
    ran = await stage.watch(lambda: stage.write({**mapping, "min_age": "2h"}, **nowhere), None)
    assert len(lines(ran, "error:", "File exists", "in force")) == 1


# Where times are kept. Nobody answers here.

MAPPING = {"from": "app", "tags": tags("v1"), "min_age": "3d"}
ENDS = {"source": "http://127.0.0.1:9", "target": "http://127.0.0.1:19"}
UNKEPT = "`min_age` counts from a state, and none is kept"


def run(file: Path, *options: str) -> Ran:
    file.write_text(document(ENDS, MAPPING))
    return run_regsync("sync", "--json", *options, "-c", str(file))


@pytest.mark.parametrize("words", ["sync", "sync --dry-run", "sync --shard 0/2", "audit"])
def test_without_a_directory_nothing_is_attempted(words):
    ran = run_regsync(*words.split(), "-c", "-", stdin=document(ENDS, MAPPING))
    assert ran.status == 3
    reason = "no directory is set\nhint: set `cache_dir` in `global` to a"
    assert f"error: CONFIG_ERROR: {UNKEPT}: {reason}" in ran.err


def test_a_watch_needs_it_too_and_validate_looks_at_the_configuration_alone(tmp_path):
    file = tmp_path / "mirror.yaml"
    file.write_text(document(ENDS, MAPPING))
    (tmp_path / ".regsync").write_text("a file")
    ran = run_regsync("watch", "-c", str(file), "--health-port", "0")
    assert (ran.status, UNKEPT in ran.err) == (3, True)
    assert run_regsync("validate", str(file)).status == 0


def test_a_directory_or_file_that_cannot_be_used_is_an_error(tmp_path):
    file, cache = tmp_path / "mirror.yaml", tmp_path / ".regsync"
    cache.write_text("a file")
    ran = run(file)
    assert (ran.status, ran.report["error"]["code"]) == (3, "CONFIG_ERROR")
    assert ran.report["error"]["message"] == f"{UNKEPT}: {cache}: File exists"

    cache.unlink()
    assert run(file).status == 2
    state = cache / "state.db"
    with closing(sqlite3.connect(state)) as database:
        database.execute("PRAGMA user_version = 99")
    before = state.read_bytes()
    ran = run(file)
    assert ran.status == 3
    assert "it was written by a newer version" in ran.report["error"]["message"]
    assert state.read_bytes() == before
