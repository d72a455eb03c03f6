"""A host that is away is waited for: the states, and whole runs over outages on a clock that jumps
(docs/design.md section 9, "Outages").
"""

from __future__ import annotations

from contextlib import ExitStack

import anyio
import anyio.lowlevel
import pytest

from conformance.client.copies import fetch_http, identical, push_http
from conformance.content.images import Seed
from conformance.messages import Request
from conformance.programs import docker_registry
from conformance.server.memory import Link
from tests.ends import document, held, started, tags

# Whole runs.


KIB = 1 << 10


@pytest.mark.parametrize(("times", "uploads"), [(1, 1), (2, 2), (99, 2)])
async def test_a_mount_that_may_have_met_an_outage_is_asked_for_once_more(world, times, uploads):
    """A registry that always breaks at a mount gets the blob by upload."""
    source, target = world.registry("source.test"), world.registry("target.test")
    image = Seed(5).image(sizes=(1000,)).load_into(source.app, "app", tag="v1")
    digest = max(image.blobs, key=lambda digest: len(image.blobs[digest]))

    def is_mount(request: Request) -> bool:
        query = dict(request.query)
        is_from_elsewhere = query.get("from") not in (None, request.repository)
        return is_from_elsewhere and query.get("mount") == digest

    ill = target.app.faults.on("POST", "upload_start", where=is_mount)
    ill.first(times).status(503)
    mappings = [{"from": "app", "to": name, "tags": tags("*")} for name in ("app", "copy")]
    ran = await world.sync({"source": source, "target": target}, *mappings)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 2), ran.err
    puts = target.journal.matching("PUT", "upload", query={"digest": digest}, status=201)
    assert len(puts) == uploads


async def test_an_upload_goes_on_through_as_many_outages_as_it_meets(world):
    """Five of 10 s each, in an upload of 64 s."""
    source = world.registry("source.test")
    target = world.registry("target.test", up=Link(bandwidth=200 * KIB))
    image = Seed(7).image(sizes=(64 * 200 * KIB,)).load_into(source.app, "app", tag="v1")

    async def outages() -> None:
        for _ in range(5):
            await anyio.sleep(15.0)
            target.fail("refused")
            await anyio.sleep(10.0)
            target.recover()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outages)
        ran = await world.copy(source, target)
        tasks.cancel_scope.cancel()
    assert ran.status == 0, ran.err
    assert held(target, "app", image)
    assert 64 + 5 * 10 <= ran.seconds < 64 + 5 * 20


# Real processes.


@pytest.mark.slow
@pytest.mark.parametrize("side", ["target", pytest.param("source", marks=pytest.mark.thorough)])
def test_a_registry_that_is_ended_and_started_again_costs_no_image(side, tmp_path):
    """It is ended when the first image has arrived, and started when the program has noticed."""
    homes = {name: tmp_path / name for name in ("source", "target")}
    seed = Seed(3)
    shared = seed.layer(300_000)
    images = {f"v{n}": seed.image(layers=[shared, seed.layer(400_000 + n)]) for n in range(40)}
    with ExitStack() as others:
        running = {name: others.enter_context(ExitStack()) for name in homes}
        where = {name: running[name].enter_context(docker_registry(homes[name])) for name in homes}
        for tag, image in images.items():
            push_http(image, where["source"], "app", tag)
        config = tmp_path / "mirror.yaml"
        registries = {name: f"http://{address}" for name, address in where.items()}
        config.write_text(document(registries, {"from": "app", "tags": tags("*")}))

        command = ["sync", "--no-progress", "--log-format", "json", "-c", str(config)]
        with started(*command, bufsize=1) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline()
            running[side].close()
            said = next(line for line in process.stderr if '"outage"' in line)
            assert f"waiting for {where[side]} (" in said
            port = int(where[side].rpartition(":")[2])
            running[side].enter_context(docker_registry(homes[side], port=port))
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
        for tag, image in images.items():
            assert identical(fetch_http(where["target"], "app", tag), image.contents())
