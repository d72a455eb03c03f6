"""What a long run says of how far it is: a line on a terminal, which goes before anything else is
written, and a line of the log every 30 seconds without one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from conformance.memory import Link
from tests.ends import Ran, stopped_at, tags
from tests.mirrors import Mirror

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

IMAGES = 4
LAYER = 2_000_000
SPEED = 100_000  # bytes a second
CLEAR = "\r\x1b[K"


@pytest.fixture
def mirror(world, tmp_path):
    """Four images of one layer, one after the other on a slow line, which takes 80 s."""
    made = Mirror(world, tmp_path)
    images = [made.seed.image(layers=[made.seed.blob(LAYER)]) for _ in range(IMAGES)]
    for number, image in enumerate(images):
        made.push(f"v{number}", image)
    made.source.change_links(down=Link(bandwidth=SPEED))
    made.write(
        {"from": "app", "tags": tags("v*"), "artifacts": {"enabled": False}},
        **{"global": {"max_concurrent_transfers": 1}},
    )
    made.size = sum(image.size for image in images)
    return made


def beats(ran: Ran) -> list[Mapping[str, Any]]:
    """Return the heartbeats of a log in JSON."""
    lines = [json.loads(line) for line in ran.err.splitlines()]
    return [line for line in lines if line["event"] == "heartbeat"]


async def test_a_run_without_a_terminal_tells_how_far_it_is_every_30_seconds(mirror):
    ran = await mirror.world.run("sync", "--log-format", "json", "-v", "-c", str(mirror.file))
    first, second = beats(ran)
    assert (first["elapsed"], second["elapsed"]) == (30.0, 60.0)
    for each in (first, second):
        assert (each["known"], each["expected"]) == (IMAGES, mirror.size)
        assert each["bytes"] == pytest.approx(SPEED * each["elapsed"], rel=0.2)
    # Until nothing more was found in between, it might have been anything.
    assert first["remaining"] is None
    assert second["remaining"] == pytest.approx(20.0, abs=4.0)


async def test_an_audit_that_reads_blobs_counts_their_bytes(mirror):
    await mirror.run("sync")
    mirror.target.change_links(down=Link(bandwidth=SPEED))
    ran = await mirror.world.run(
        "audit", "--read", "--log-format", "json", "-v", "-c", str(mirror.file)
    )
    assert ran.status == 0
    first, second = beats(ran)
    for each in (first, second):
        assert each["known"] == IMAGES
        assert each["bytes"] == pytest.approx(SPEED * each["elapsed"], rel=0.2)


@pytest.mark.parametrize("command", ["sync", "watch --interval 1h --health-port 0"])
async def test_a_terminal_has_one_line_of_progress_that_other_lines_replace(mirror, command):
    command = [*command.split(), "-c", str(mirror.file)]
    async with stopped_at(100.0):
        ran = await mirror.world.run(*command, terminal=True)
    drawn = ran.err.split(CLEAR)
    lines = [each for each in drawn if f" of {IMAGES} images" in each]
    assert len(lines) > 60, "once a second"
    assert lines[0].startswith(f"0 of {IMAGES} images, ")
    assert lines[-1].startswith(f"{IMAGES - 1} of {IMAGES} images, ")
    assert "\n" not in "".join(lines), "none stays"
