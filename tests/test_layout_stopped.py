"""A run into a layout that is told to stop, and the one that goes on (docs/design.md section 13)."""

from __future__ import annotations

import json
import signal

import anyio

from conformance.content.images import Seed
from tests.ends import document, stopped_at, tags
from tests.layouts import check_layout, make_layout, names_of


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


async def test_a_copy_between_directories_that_goes_on_is_waited_for(world, tmp_path):
    """It sends no request, and moves bytes all the same."""
    image = Seed(1).image(layers=[Seed(2).blob(10 << 20)])
    make_layout(tmp_path / "from", {"app:v1": image})
    registries = {
        "source": {"url": f"oci-layout:{tmp_path / 'from'}"},
        "disk": {"url": f"oci-layout:{tmp_path / 'disk'}"},
    }
    file = tmp_path / "mirror.yaml"
    file.write_text(document(registries, {"from": "app", "tags": tags("v1")}))

    async def slowly(function, *arguments):
        await anyio.sleep(0.2)
        return function(*arguments)

    edge = world.edge()._replace(in_thread=slowly)
    async with stopped_at(1.0):
        ran = await world.run("sync", "--json", "-q", "-c", str(file), edge=edge)
    assert ran.statuses() == ["synced"], ran.err
    check_layout(tmp_path / "disk")
