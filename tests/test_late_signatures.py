"""When the artifacts of images that are there are looked at again (docs/design.md section 8, "Late
signatures").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from _regsync.state.database import StateFile, named
from _regsync.state.knowledge import Knowledge
from _regsync.sync.referrers import COMPLETE, HAS, Look, look_again, look_without_state
from conformance.attachments import fallback_lists
from conformance.images import Image, Seed
from conformance.memory import Place
from tests.ends import Ran, Virtual, document, tags, virtual
from tests.states import rows

HOUR, DAY = 3600.0, 86400.0
SBOM, SIGNATURE = "application/spdx+json", "application/vnd.example.signature"


@pytest.mark.parametrize(
    ("record", "shown", "now", "required", "look"),
    [
        ((0, 0, 0), 0, 0, False, Look.ALL),
        ((0, 0, HAS), 0, 10, False, Look.ALL),
        ((0, 0, COMPLETE), 0, 10, False, Look.NOT),
        ((0, 0, COMPLETE), 0, 10, True, Look.ALL),
        ((0, 0, COMPLETE | HAS), 0, 10, True, Look.NOT),
        ((0, 0, COMPLETE | 1), 1, 10, False, Look.NOT),
        ((0, 0, COMPLETE | 1), 3, 10, False, Look.TOP),
        ((0, 0, COMPLETE), 0, HOUR - 1, False, Look.NOT),
        ((0, 0, COMPLETE), 0, HOUR, False, Look.LATE),
        ((4 * DAY, 0, COMPLETE), 0, 5 * DAY - 1, False, Look.NOT),
        ((4 * DAY, 0, COMPLETE), 0, 5 * DAY + DAY / 2, False, Look.LATE),
        ((100 * DAY, 0, COMPLETE), 0, 107 * DAY - 1, False, Look.NOT),
        ((100 * DAY, 0, COMPLETE), 0, 107 * DAY, False, Look.LATE),
    ],
)
def test_when_an_unchanged_image_is_looked_at_again(
    record: tuple[int, int, int], shown: int, now: float, required: bool, look: Look
) -> None:
    whole = (*record, bytes(8))
    assert look_again(whole, shown, now, required=required) is look


def test_without_state_each_image_is_looked_at_in_one_hour_of_a_day() -> None:
    digests = [f"sha256:{number:064x}" for number in range(48)]
    for day in (0, 5):
        hours = [
            [look_without_state(each, day * DAY + hour * HOUR) for each in digests]
            for hour in range(24)
        ]
        assert all(sum(hour[n] is Look.ALL for hour in hours) == 1 for n in range(len(digests)))
        assert all(sum(look is Look.ALL for look in hour) == 2 for hour in hours), "evenly"


def test_what_is_noted_of_a_look_outlives_every_other_entry(tmp_path: Path) -> None:
    clock = [1000.0]
    name = named("a")

    @contextmanager
    def opened() -> Iterator[Knowledge]:
        state = StateFile(str(tmp_path), lambda *said: pytest.fail(str(said)))
        state.load()
        known = Knowledge(state, now=lambda: clock[0], ttl=60)
        yield known
        known.finish()
        state.close()

    with opened() as before:
        before.looked(name, COMPLETE | HAS, b"01234567")
        clock[0] = 5000
        before.looked(name, COMPLETE, b"76543210")
        before.add_blob(("host", "app"), f"sha256:{1:064x}")

    clock[0] = 5000 + 300 * DAY
    with opened() as after:
        assert after.look(name) == (5000, 1000, COMPLETE, b"76543210")
        assert after.look(named("b"))[2] == 0
    assert {table: len(each) for table, each in rows(tmp_path).items() if each} == {
        "look": 1,
        "swept": 1,
    }
    with opened() as again:
        assert again.look(name)[2] == COMPLETE


class Stage:
    """A source and a target on a virtual network, and a configuration with state."""

    def __init__(self, world: Virtual, directory: Path, images: int = 1, **options: Any) -> None:
        self.world, self.directory, self.seed = world, directory, Seed(5)
        self.source = world.registry("source.example", **options)
        self.target = world.registry("target.example", **options)
        self.attached: list[Image] = []
        self.images = [self.load(self.seed.image(), f"v{number}") for number in range(images)]

    def load(self, image: Image, tag: str | None = None) -> Image:
        return image.load_into(self.source.app, "app", *([tag] if tag else []))

    def sign(self, subject: Image, kind: str = SIGNATURE) -> Image:
        """Attach an artifact as a client does."""
        made = self.load(self.seed.artifact(subject, kind))
        self.attached.append(made)
        if not self.source.app.referrers_api:
            for tag, listed in fallback_lists(self.attached).items():
                self.load(listed, tag)
        return made

    async def run(
        self, tag_rule: Mapping[str, Any] | None = None, *, state: bool = True, **rule: Any
    ) -> Ran:
        for each in (self.source, self.target):
            each.journal.clear()
        mapping = {"from": "app", "tags": tag_rule or tags("v*"), "artifacts": rule}
        top = {"global": {"cache_dir": str(self.directory / "state")}} if state else {}
        text = document({"source": self.source, "target": self.target}, mapping, **top)
        if not state:
            return await self.world.run("sync", "--json", "-q", "-c", "-", stdin=text)
        path = self.directory / "mirror.yaml"
        path.write_text(text, encoding="utf-8")
        return await self.world.run("sync", "--json", "-q", "-c", str(path))

    def asked(self, place: Place) -> Counter[str]:
        return Counter(place.journal.summary())

    def holds(self, image: Image) -> bool:
        return image.top in self.target.app.repositories["app"].manifests


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_late_signature_arrives_when_its_look_is_due(tmp_path: Path) -> None:
    # The dice say 1: a small configuration's share is rounded up.
    async with virtual(0.999) as world:
        stage = Stage(world, tmp_path)
        first = stage.sign(stage.images[0])
        assert (await stage.run()).images[0]["artifacts"] == {
            "synced": 1,
            "skipped": 0,
            "failed": 0,
            "stripped": 0,
        }
        assert stage.holds(first)
        late = stage.sign(stage.images[0])
        quiet = await stage.run()
        assert quiet.statuses() == ["skipped"]
        assert not stage.holds(late)
        assert stage.asked(stage.source) == {"GET tag_list": 1, "HEAD manifest": 1}
        assert stage.asked(stage.target) == {"HEAD manifest": 1}
        await anyio.sleep(HOUR)
        ran = await stage.run()
        assert ran.statuses() == ["synced"], "what moves is told"
        assert ran.images[0]["artifacts"] == {"synced": 1, "skipped": 1, "failed": 0, "stripped": 0}
        assert stage.holds(late)
        assert stage.source.journal.count("GET", "referrers") == 2, (
            "the image, and what is new on it"
        )
        await anyio.sleep(HOUR)
        assert (await stage.run()).statuses() == ["skipped"]
        assert stage.source.journal.count("GET", "referrers") == 1
        assert stage.source.journal.count("GET", "manifest") == 0


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("dice", [0.0, 0.999])
async def test_looks_stay_below_two_in_a_hundred_requests(tmp_path: Path, dice: float) -> None:
    async with virtual(dice) as world:
        stage = Stage(world, tmp_path, images=30)
        await stage.run()
        seen = Counter[int]()
        for _ in range(8):
            await anyio.sleep(8 * DAY)
            await stage.run()
            seen[stage.source.journal.count("GET", "referrers")] += 1
        # 30 tags are 61 requests a run, of which 2 % are 1.22.
        assert seen == ({1: 8} if dice == 0 else {2: 8})
        late = [stage.sign(image) for image in stage.images]
        for _ in range(30):
            await anyio.sleep(8 * DAY)
            await stage.run()
            if all(map(stage.holds, late)):
                break
        assert all(map(stage.holds, late)), "the oldest are due first: each has its turn"


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_what_a_listing_shows_costs_no_question(tmp_path: Path) -> None:
    async with virtual(0.0) as world:
        stage = Stage(world, tmp_path, images=3, referrers_api=False)
        await stage.run()
        again = await stage.run()
        assert again.statuses() == ["skipped"] * 3
        assert stage.asked(stage.source) == {"GET tag_list": 1, "HEAD manifest": 3}
        late = stage.sign(stage.images[1])
        stage.load(stage.seed.image(), stage.images[2].top.replace(":", "-") + ".sig")
        ran = await stage.run()
        assert ran.statuses() == ["skipped", "synced", "synced"]
        assert stage.holds(late)
        assert stage.asked(stage.source)["GET referrers"] == 0
        assert (
            stage.images[2].top.replace(":", "-") + ".sig"
            in stage.target.app.repositories["app"].tags
        )


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_an_artifact_that_failed_fails_its_image_until_it_arrives(tmp_path: Path) -> None:
    async with virtual(0.0) as world:
        stage = Stage(world, tmp_path)
        late = stage.sign(stage.images[0])
        stage.target.app.faults.on("PUT", "manifest", reference=late.top).status(400)
        ran = await stage.run()
        assert ran.statuses() == ["failed"]
        assert ran.status == 2
        assert ran.images[0]["artifacts"]["failed"] == 1
        assert stage.images[0].top in stage.target.app.repositories["app"].manifests
        stage.target.app.faults.clear()
        ran = await stage.run()
        assert ran.statuses() == ["synced"]
        assert stage.holds(late)
        assert (await stage.run()).statuses() == ["skipped"]


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_tag_that_never_moves_is_looked_at_when_a_listing_shows_more(
    tmp_path: Path,
) -> None:
    async with virtual(0.0) as world:
        stage = Stage(world, tmp_path, images=2, referrers_api=False)
        rule = {**tags("v*"), "immutable_tags": "v*"}
        await stage.run(rule)
        for _ in range(3):  # longer than `cache_ttl` in all
            await anyio.sleep(8 * HOUR)
            again = await stage.run(rule)
        assert [each["reason"] for each in again.images] == ["immutable_tag"] * 2
        assert stage.asked(stage.source) == {"GET tag_list": 1}
        late = stage.sign(stage.images[0])
        ran = await stage.run(rule)
        assert sorted(each["status"] for each in ran.images) == ["skipped", "synced"]
        assert stage.holds(late)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_required_artifacts_are_judged_by_state(tmp_path: Path) -> None:
    async with virtual(0.0) as world:
        stage = Stage(world, tmp_path, images=2)
        stage.sign(stage.images[0])
        ran = await stage.run(require_artifacts=True)
        assert stage.target.journal.count("PUT", "manifest") == 2, "the one image and its signature"
        assert ran.statuses() == ["synced", "failed"]
        (failed,) = (each["error"] for each in ran.images if each["error"])
        assert "require_artifacts" in failed["message"]
        assert (failed["code"], failed["side"]) == ("SOURCE_ERROR", "source")
        again = await stage.run(require_artifacts=True)
        assert again.statuses() == ["skipped", "failed"]
        assert stage.source.journal.count("GET", "referrers") == 1, "of the unsigned one only"
        stage.sign(stage.images[1])
        assert (await stage.run(require_artifacts=True)).statuses() == ["skipped", "synced"]


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_without_state_an_hour_of_the_day_decides(tmp_path: Path) -> None:
    async with virtual(0.0) as world:
        stage = Stage(world, tmp_path)
        await stage.run(state=False)
        late = stage.sign(stage.images[0])
        looks = []
        for _ in range(24):
            await stage.run(state=False)
            looks.append(stage.source.journal.count("GET", "referrers"))
            await anyio.sleep(HOUR)
        assert sorted(looks)[-2:] == [0, 2]
        assert stage.holds(late)
