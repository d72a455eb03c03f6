"""When a layout is written: `index.json` seldom, images reported when they are safe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.content.images import Seed
from conformance.server.memory import Link
from tests.ends import Virtual, document, tags
from tests.layouts import check_layout, names_of


class Replacements:
    """The moments at which `index.json` was replaced, and how many names it had then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
        self.moments = list[float]()
        self.names = list[int]()
        replace = os.replace

        def noted(old: str, new: str) -> None:
            replace(old, new)
            if new == str(disk / "index.json"):
                self.moments.append(anyio.current_time())
                self.names.append(len(names_of(disk)))
                check_layout(disk)

        monkeypatch.setattr(os, "replace", noted)


def configure(directory: Path, *mappings: dict[str, Any]) -> Path:
    registries = {
        "source": {"url": "http://source.test"},
        "disk": {"url": f"oci-layout:{directory / 'disk'}"},
    }
    file = directory / "mirror.yaml"
    file.write_text(document(registries, *mappings, **{"global": {"max_concurrent_transfers": 1}}))
    return file


async def sync(world: Virtual, file: Path) -> Any:
    return await world.run("sync", "--json", "-q", "-c", str(file))


async def test_the_index_is_replaced_every_ten_seconds_and_at_the_end(world, tmp_path, monkeypatch):
    seed = Seed(5)
    place = world.registry("source.test", down=Link(bandwidth=10_000))
    for number in range(40):
        seed.image(sizes=(9_000,)).load_into(place.app, "app", tag=f"v{number}")
    replaced = Replacements(monkeypatch, tmp_path / "disk")
    ran = await sync(world, configure(tmp_path, {"from": "app", "tags": tags("v*")}))
    assert ran.status == 0
    assert ran.seconds > 35
    pauses = [
        later - earlier
        for earlier, later in zip(replaced.moments[:-1], replaced.moments[1:-1], strict=False)
    ]
    assert min(pauses) >= 10
    assert len(replaced.moments) <= ran.seconds / 10 + 1
    assert replaced.names[-1] == 40
    assert replaced.names == sorted(replaced.names)
    assert len(names_of(tmp_path / "disk")) == 40


async def test_a_short_run_replaces_it_once_and_waits_for_nothing(world, tmp_path, monkeypatch):
    seed = Seed(6)
    place = world.registry("source.test")
    for number in range(5):
        seed.image().load_into(place.app, "app", tag=f"v{number}")
    replaced = Replacements(monkeypatch, tmp_path / "disk")
    ran = await sync(world, configure(tmp_path, {"from": "app", "tags": tags("v*")}))
    assert ran.status == 0
    assert ran.seconds < 5
    assert replaced.names == [5]


async def test_an_image_is_reported_when_it_is_safe(world, tmp_path, monkeypatch):
    """What fails when the names are given is a failed image, though all its bytes have come."""
    seed = Seed(7)
    replace = os.replace

    def fails(old: str, new: str) -> None:
        if "index.json" in new:
            raise OSError(5, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(os, "replace", fails)
    place = world.registry("source.test")
    for number in range(3):
        seed.image().load_into(place.app, "app", tag=f"v{number}")
    ran = await sync(world, configure(tmp_path, {"from": "app", "tags": tags("v*")}))
    assert ran.status == 2
    assert ran.statuses() == ["failed"] * 3
    assert all("Input/output error" in image["error"]["message"] for image in ran.images)
    assert all(image["error"]["side"] == "target" for image in ran.images)
