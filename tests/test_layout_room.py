"""A blob for which a disk has too little room is not begun (docs/design.md section 13)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.content.images import Image, Seed
from conformance.server.memory import Link
from tests.ends import Virtual, document, only, tags
from tests.layouts import check_layout, files_of, names_of


class Disk:
    """A disk of some bytes: what is free on it is what the layout's files leave."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.path = directory / "disk"
        self.size = size
        self.least = size
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=self.free()))

    def free(self) -> int:
        used = sum((self.path / name).stat().st_size for name in files_of(self.path))
        self.least = min(self.least, self.size - used)
        return self.size - used


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk of a megabyte, on which the layout lies."""
    return Disk(tmp_path, monkeypatch, 1_000_000)


def image_of(seed: Seed, *sizes: int) -> Image:
    return seed.image(layers=[seed.blob(size) for size in sizes])


async def sync(world: Virtual, directory: Path, *more: str) -> Any:
    registries = {
        "source": {"url": "http://source.test"},
        "disk": {"url": f"oci-layout:{directory / 'disk'}"},
    }
    file = directory / "mirror.yaml"
    file.write_text(document(registries, {"from": "app", "tags": tags("v*")}))
    return await world.run("sync", "--json", "-q", "-c", str(file), *more)


async def test_a_blob_for_which_there_is_no_room_costs_no_byte(world, tmp_path, disk):
    """Its image fails. What was written of it stays for a larger disk, and smaller images go on."""
    seed = Seed(90)
    place = world.registry("source.test")
    large = image_of(seed, 600_000, 600_001).load_into(place.app, "app", tag="v1")
    small = image_of(seed, 100_000).load_into(place.app, "app", tag="v2")
    ran = await sync(world, tmp_path)
    assert ran.statuses() == ["failed", "synced"]
    error = next(each["error"] for each in ran.images if each["status"] == "failed")
    assert error["code"] == "TARGET_ERROR"
    assert "the blob needs 600.0 KB" in error["message"]
    assert str(disk.path) in error["message"]
    assert "free space" in error["hint"]
    one, other = (layer["digest"] for layer in json.loads(large.body)["layers"])
    asked = [entry.reference for entry in place.journal.matching("GET", "blob")]
    assert (one in asked) != (other in asked)
    assert names_of(disk.path) == {"app:v2": small.top}
    assert disk.least > 0

    disk.size = 2_000_000
    place.journal.clear()
    assert (await sync(world, tmp_path)).statuses() == ["synced", "skipped"]
    asked = [entry.reference for entry in place.journal.matching("GET", "blob")]
    assert (one in asked) != (other in asked)
    check_layout(disk.path)


async def test_blobs_under_way_keep_their_room(world, tmp_path, disk):
    """The later one fails at once, where it would have filled the disk for all."""
    seed = Seed(91)
    place = world.registry("source.test", down=Link(bandwidth=10_000))
    shared = seed.blob(300_000)
    images = {
        f"app:v{number}": seed.image(layers=[shared, seed.blob(300_000)]) for number in range(3)
    }
    for name, image in images.items():
        image.load_into(place.app, "app", tag=name.partition(":")[2])
    ran = await sync(world, tmp_path)
    assert sorted(ran.statuses()) == ["failed", "synced", "synced"]
    error = next(each["error"] for each in ran.images if each["status"] == "failed")
    assert "for blobs under way" in error["message"]
    assert "1.0 MB are free" in error["message"]
    assert len(names_of(disk.path)) == 2
    check_layout(disk.path)
    layers = {
        each["digest"] for image in images.values() for each in json.loads(image.body)["layers"]
    }
    asked = {entry.reference for entry in place.journal.matching("GET", "blob")}
    assert len(layers) - len(layers & asked) == 1
    assert disk.least > 0

    disk.size = 2_000_000
    ran = await sync(world, tmp_path)
    assert sorted(ran.statuses()) == ["skipped", "skipped", "synced"]


async def test_a_blob_that_fails_gives_its_room_back(world, tmp_path, disk):
    seed = Seed(92)
    place = world.registry("source.test")
    lost = image_of(seed, 700_000).load_into(place.app, "app", tag="v1")
    layer = json.loads(lost.body)["layers"][0]["digest"]
    place.app.faults.on("GET", "blob", reference=layer).status(404)
    place.app.faults.on("GET", "manifest", reference="v2").delay(5)
    whole = image_of(seed, 700_000).load_into(place.app, "app", tag="v2")
    ran = await sync(world, tmp_path)
    assert ran.statuses() == ["failed", "synced"], ran.err
    assert check_layout(disk.path) >= set(whole.contents())


async def test_what_is_there_and_what_a_killed_run_has_left_needs_no_room(world, tmp_path, disk):
    seed = Seed(93)
    place = world.registry("source.test")
    shared = seed.blob(500_000)
    seed.image(layers=[shared]).load_into(place.app, "app", tag="v1")
    assert (await sync(world, tmp_path)).statuses() == ["synced"]
    large = seed.blob(450_000)
    seed.image(layers=[shared, large]).load_into(place.app, "app", tag="v2")
    ran = await sync(world, tmp_path)
    assert ran.statuses() == ["skipped", "synced"], ran.err
    assert disk.least > 0


@pytest.mark.usefixtures("disk")
async def test_a_dry_run_compares_the_whole(world, tmp_path):
    """None of its images is too large by itself."""
    seed = Seed(94)
    place = world.registry("source.test")
    for number in range(3):
        image_of(seed, 400_000).load_into(place.app, "app", tag=f"v{number}")
    ran = await sync(world, tmp_path, "--dry-run")
    assert ran.statuses() == ["would_sync"] * 3
    assert ran.status == 1
    room = only(ran.totals["layouts"])
    assert room["to_write"] > room["free"] == 1_000_000
