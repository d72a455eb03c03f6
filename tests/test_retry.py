"""`sync --retry-from REPORT`: what failed or was left undone in that report, and nothing else
(docs/design.md section 2, "Retry").
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.content.images import Image, Seed
from tests.ends import Ran, Virtual, document, held, tags, virtual

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


class Scene:
    """A source and two targets; the reports of runs are kept in a file."""

    def __init__(self, world: Virtual, directory: Path) -> None:
        self.world = world
        self.seed = Seed(21)
        self.source = world.registry("source.test")
        self.other = world.registry("other.test")
        self.east = world.registry("east.test")
        self.west = world.registry("west.test")
        self.file = directory / "mirror.yaml"
        self.report = directory / "report.json"

    def push(self, repository: str, *names: str) -> Image:
        return self.seed.image().load_into(self.source.app, repository, *names)

    def write(self, *mappings: Any) -> None:
        ends = {"source": self.source, "east": self.east, "west": self.west, "other": self.other}
        defaults = {"targets": ["east", "west"]}
        self.file.write_text(document(ends, *mappings, defaults=defaults))

    async def sync(self, *options: str) -> Ran:
        """Run what was written, keep the report, and count what is asked from now on."""
        ran = await self.world.run("sync", "--json", *options, "-c", str(self.file))
        self.report.write_text(ran.out)
        for place in (self.source, self.east, self.west):
            place.journal.clear()
        return ran

    async def retry(self, *options: str) -> Ran:
        return await self.world.run(
            "sync", "--json", "--retry-from", str(self.report), *options, "-c", str(self.file)
        )

    def asked(self) -> tuple[dict[str, int], ...]:
        """Count what source, east and west were asked for, each request by its repository."""
        return tuple(
            dict(
                Counter(
                    f"{entry.method} {entry.kind} {entry.repository}"
                    for entry in place.journal.entries
                )
            )
            for place in (self.source, self.east, self.west)
        )


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with virtual() as world:
        yield Scene(world, tmp_path)


def names(ran: Ran) -> list[tuple[str, str]]:
    """Return the images of a run with their statuses, by target."""
    return sorted((each["target"], each["status"]) for each in ran.images)


async def test_the_images_that_failed_are_asked_for_and_no_others(scene: Scene) -> None:
    scene.push("a", "v1", "v2")
    scene.push("b", "v1")
    scene.write(
        {"from": "a", "tags": tags("v*", sort="alpha", latest=5)},
        {"from": "b", "tags": tags("v1", "v2"), "targets": ["east"]},
    )
    first = await scene.sync()
    assert (first.status, first.totals["images"]["failed"]) == (1, 1)

    image = scene.push("b", "v2")
    ran = await scene.retry()
    assert (ran.status, names(ran)) == (0, [("east.test/b:v2", "synced")])
    assert [each["selected"] for each in ran.report["mappings"]] == [1]
    blobs = len(image.blobs)
    assert scene.asked() == (
        {"GET manifest b": 1, "GET blob b": blobs},
        {
            "HEAD manifest b": 1,
            "POST upload_start b": blobs,
            "PUT upload b": blobs,
            "PUT manifest b": 1,
        },
        {},
    )
    assert held(scene.east, "b", image)

    # A report without failures leaves nothing to do.
    scene.report.write_text(ran.out)
    again = await scene.retry("-v")
    assert (again.status, again.images) == (0, [])
    assert "no image failed or was left undone" in again.err


async def test_a_mapping_that_could_not_be_listed_is_asked_for_as_a_whole(scene: Scene) -> None:
    scene.push("a", "v1", "v2", "w1")
    scene.push("b", "v1")
    both = [{"from": name, "tags": tags("v*"), "targets": ["east"]} for name in "ab"]
    scene.write(*both)
    scene.source.app.faults.on("GET", "tag_list", repository="a").status(403)
    first = await scene.sync()
    assert ("east.test/a:*", "failed") in names(first)

    scene.source.app.faults.clear()
    ran = await scene.retry()
    assert names(ran) == [("east.test/a:v1", "synced"), ("east.test/a:v2", "synced")]
    source, east, west = scene.asked()
    assert source["GET tag_list a"] == 1
    assert not [what for what in (*source, *east) if what.endswith(" b")]
    assert west == {}


async def test_what_an_interrupted_run_left_undone_is_asked_for(scene: Scene) -> None:
    scene.push("a", "v1")
    scene.push("b", "v1")
    scene.seed.image().load_into(scene.other.app, "c", tag="v1")
    rule = {"tags": tags("v*"), "targets": ["east"]}
    scene.write(
        {"from": "a", **rule}, {"from": "b", **rule}, {"from": "c", "source": "other", **rule}
    )
    scene.source.app.faults.on("GET", "manifest", repository="b").delay(50)
    scene.other.app.faults.on("GET", "tag_list").delay(50)

    async def interrupt() -> None:
        await anyio.sleep(10)
        signal.raise_signal(signal.SIGTERM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupt)
        first = await scene.sync()
    assert (first.status, names(first)) == (143, [("east.test/a:v1", "synced")])
    undone = [(each["source"], each["target"]) for each in first.report["undone"]]
    assert sorted(undone) == [
        ("other.test/c:*", "east.test/c:*"),
        ("source.test/b:v1", "east.test/b:v1"),
    ]

    # A retry that is interrupted as well leaves the same undone.
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupt)
        second = await scene.retry()
    assert sorted(second.report["undone"], key=str) == sorted(first.report["undone"], key=str)

    for place in (scene.source, scene.other):
        place.app.faults.clear()
        place.journal.clear()
    ran = await scene.retry()
    assert names(ran) == [("east.test/b:v1", "synced"), ("east.test/c:v1", "synced")]
    source, east, _ = scene.asked()
    assert not [what for what in (*source, *east) if what.endswith(" a")]
    assert "GET tag_list b" not in source


async def test_what_is_no_longer_selected_is_told_and_not_asked_for(scene: Scene) -> None:
    scene.push("a", "v1")
    scene.write(
        {"from": "a", "tags": tags("v1", "v7", "v8", "v9")},
        {"from": "b", "tags": tags("v1"), "targets": ["east"]},
    )
    first = await scene.sync()
    assert first.totals["images"]["failed"] == 7

    scene.push("a", "v7", "v8", "v9")
    scene.write({"from": "a", "tags": tags("v*", exclude=["v8"]), "targets": ["west"]})
    ran = await scene.retry("--no-progress")
    assert names(ran) == [("west.test/a:v7", "synced"), ("west.test/a:v9", "synced")]
    (line,) = [line for line in ran.err.splitlines() if "no mapping selects" in line]
    assert (ran.status, line.startswith("error: ")) == (1, True)
    shown = line.partition("any more: ")[2].split("; ")
    assert sorted(shown) == [
        "source.test/a:v7 -> east.test/a:v7",
        "source.test/a:v8 -> east.test/a:v8",
        "source.test/a:v8 -> west.test/a:v8",
        "source.test/a:v9 -> east.test/a:v9",
        "source.test/b:v1 -> east.test/b:v1",
    ]
    source, east, _ = scene.asked()
    assert "GET tag_list a" not in source
    assert east == {}


async def test_a_shard_asks_for_its_own_and_says_nothing_of_the_others(scene: Scene) -> None:
    scene.write(*({"from": name, "tags": tags("v1")} for name in "abcd"))
    await scene.sync()
    for name in "abcd":
        scene.push(name, "v1")
    found = list[tuple[str, str]]()
    for shard in ("0/2", "1/2"):
        ran = await scene.retry("--shard", shard)
        assert (len(ran.images), "no mapping selects" in ran.err) == (4, False)
        found += names(ran)
    assert len(set(found)) == 8


async def test_a_dry_run_says_what_would_be_asked_for_and_changes_nothing(scene: Scene) -> None:
    scene.push("a", "v1")
    scene.write({"from": "a", "tags": tags("v1", "v2"), "targets": ["east"]})
    await scene.sync()
    scene.push("a", "v2")
    ran = await scene.retry("--dry-run")
    assert names(ran) == [("east.test/a:v2", "would_sync")]
    assert {what.partition(" ")[0] for counts in scene.asked() for what in counts} <= {
        "GET",
        "HEAD",
    }
    assert scene.east.app.tags("a").keys() == {"v1"}


@pytest.mark.parametrize(("owner", "listings"), [(("v1",), 0), (("v*",), 1)], ids=str)
async def test_a_conflict_of_mappings_stays_one(
    scene: Scene, owner: tuple[str, ...], listings: int
) -> None:
    """The second mapping alone is in the report. It must not take the tag from the first (I10)."""
    ours = scene.push("a", "v1")
    scene.push("b", "v1", "v2")
    scene.write(
        {"from": "a", "to": "c", "tags": tags(*owner), "targets": ["east"]},
        {"from": "b", "to": "c", "tags": tags("v1", "v2"), "targets": ["east"]},
    )
    first = await scene.sync()
    assert names(first) == [
        ("east.test/c:v1", "failed"),
        ("east.test/c:v1", "synced"),
        ("east.test/c:v2", "synced"),
    ]
    ran = await scene.retry()
    assert (ran.status, names(ran)) == (2, [("east.test/c:v1", "failed")])
    assert "mappings[0] writes this tag too" in ran.images[0]["error"]["message"]
    assert scene.east.app.tags("c")["v1"] == ours.top
    source, east, _ = scene.asked()
    assert (source, east) == ({"GET tag_list a": 1} if listings else {}, {})


OWNER = {"from": "a", "to": "c", "tags": tags("v*"), "targets": ["east"]}
OTHER = {"from": "b", "to": "c", "tags": tags("v1", "w1"), "targets": ["east"]}


async def test_an_owner_that_cannot_be_listed_is_no_failure_of_the_retry(scene: Scene) -> None:
    scene.push("a", "v9")
    image = scene.push("b", "w1")
    scene.write(OWNER, OTHER)
    assert ("east.test/c:v1", "failed") in names(await scene.sync())
    scene.push("b", "v1")
    scene.source.app.faults.on("GET", "tag_list").status(403)
    ran = await scene.retry()
    assert (ran.status, names(ran)) == (0, [("east.test/c:v1", "synced")])
    assert held(scene.east, "c", image)


async def test_an_interrupted_retry_leaves_undone_what_it_wanted_and_not_whole_mappings(
    scene: Scene,
) -> None:
    scene.push("a", "v9")
    scene.push("b", "w1")
    scene.write(OWNER, OTHER)
    await scene.sync()
    scene.source.app.faults.on("GET", "tag_list").delay(50)

    async def interrupt() -> None:
        await anyio.sleep(10)
        signal.raise_signal(signal.SIGTERM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupt)
        ran = await scene.retry()
    ends = {"source": "source.test/b:v1", "target": "east.test/c:v1"}
    assert (ran.status, ran.report["undone"]) == (143, [{**ends, "status": "undone"}])


async def test_each_target_is_asked_for_its_own_failures(scene: Scene) -> None:
    image = scene.push("a", "v1", "v2", "v3")
    scene.write({"from": "a", "tags": tags("v*")})
    scene.east.app.faults.on("PUT", "manifest", reference="v1").status(403)
    scene.west.app.faults.on("PUT", "manifest", reference="v3").status(403)
    assert (await scene.sync()).totals["images"]["failed"] == 2
    for place in (scene.east, scene.west):
        place.app.faults.clear()
    ran = await scene.retry()
    assert names(ran) == [("east.test/a:v1", "synced"), ("west.test/a:v3", "synced")]
    one = {"HEAD manifest a": 1, "PUT manifest a": 1}
    assert scene.asked()[1:] == (one, one)
    assert held(scene.west, "a", image)


async def test_with_a_lock_no_source_is_asked_what_a_tag_names(scene: Scene) -> None:
    image = scene.push("a", "v1", "v2")
    scene.write({"from": "a", "tags": tags("v*"), "targets": ["east"]})
    assert (await scene.world.run("lock", "-q", "-c", str(scene.file))).status == 0
    scene.east.app.faults.on("PUT", "manifest", reference="v2").status(403)
    assert (await scene.sync("--locked")).totals["images"]["failed"] == 1
    scene.east.app.faults.clear()
    scene.push("a", "v2")

    ran = await scene.retry("--locked")
    assert names(ran) == [("east.test/a:v2", "synced")]
    assert ran.images[0]["digest"] == image.top
    source, east, _ = scene.asked()
    assert "HEAD manifest a" not in source
    assert {entry.reference for entry in scene.source.journal.entries} <= set(image.contents())
    assert (east["HEAD manifest a"], east["PUT manifest a"]) == (1, 1)


async def test_an_image_layout_is_a_target_like_others(scene: Scene, tmp_path: Path) -> None:
    scene.push("a", "v1")
    layout = f"oci-layout:{tmp_path / 'layout'}"
    mapping = {"from": "a", "tags": tags("v1", "v2")}
    scene.file.write_text(document({"source": scene.source, "disk": layout}, mapping))
    assert (await scene.sync()).statuses() == ["synced", "failed"]
    scene.push("a", "v2")
    ran = await scene.retry()
    assert names(ran) == [(f"{layout}//a:v2", "synced")]


async def test_a_digest_that_is_too_young_waits_in_a_retry_too(
    scene: Scene, tmp_path: Path
) -> None:
    scene.write({"from": "a", "tags": tags("v1"), "targets": ["east"], "min_age": "1d"})
    assert (await scene.sync()).status == 2
    scene.push("a", "v1")
    assert (await scene.retry()).images[0]["reason"] == "min_age"
    # What was held back did not fail.
    scene.report.write_text((await scene.sync()).out)
    assert (await scene.retry()).images == []
