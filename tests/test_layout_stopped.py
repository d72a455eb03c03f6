"""A run into a layout that is told to stop, and the one that goes on (docs/design.md section 13)."""

from __future__ import annotations

import json
import signal

from conformance.content.images import Seed
from tests.ends import document, stopped_at, tags
from tests.layouts import check_layout, names_of


async def test_what_was_put_when_a_signal_came_is_safe_and_reported(world, tmp_path):
    seed = Seed(51)
    place = world.registry("source.test")
    images = {
        f"app:v{number}": seed.image().load_into(place.app, "app", tag=f"v{number}")
        for number in range(4)
    }
    stuck = seed.image(sizes=(3000,)).load_into(place.app, "app", tag="v9")
    layer = json.loads(stuck.body)["layers"][0]["digest"]
    place.app.faults.on("GET", "blob", reference=layer).first().stall()
    registries = {
        "source": {"url": "http://source.test"},
        "disk": {"url": f"oci-layout:{tmp_path / 'disk'}"},
    }
    file = tmp_path / "mirror.yaml"
    file.write_text(document(registries, {"from": "app", "tags": tags("v*")}))
    async with stopped_at(3.0):
        ran = await world.run("sync", "--json", "-q", "-c", str(file))
    assert ran.status == 128 + signal.SIGTERM
    assert ran.report["interrupted"]
    assert ran.statuses() == ["synced"] * 4
    assert ran.seconds < 30
    disk = tmp_path / "disk"
    assert names_of(disk) == {name: image.top for name, image in images.items()}
    check_layout(disk)

    ran = await world.run("sync", "--json", "-q", "-c", str(file))
    assert ran.statuses() == ["skipped"] * 4 + ["synced"]
    check_layout(disk)
    assert not list(disk.rglob("*.partial"))
