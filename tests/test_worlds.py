"""Some runs one after another in worlds in which all goes wrong that may, on a clock that jumps: the
next run that is left alone completes the rest.

The worlds are tests/worlds.py's. No run stands still: where nothing can go on any more the clock
jumps to the end of this test's patience. Runs fail in parts, or are cancelled at any instant, with a
state that may be damaged between them. Each image has one outcome, what is reported as synced is whole,
no blob is stored twice in a run, and no connection is open when one has ended. After an undisturbed run
all is there, the artifacts too (before that nobody looks at them), and one more moves nothing.

    WORLDS=1000:500 pytest tests/test_worlds.py      five hundred other seeds
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import anyio
import pytest
from trio._core import _run

from conformance.audit.mistakes import latest
from conformance.content.images import Seed
from conformance.server.memory import Place
from tests.ends import Ran, virtual
from tests.stressing import (
    NOT_YET,
    PATIENCE,
    Ill,
    Wanted,
    check_hung_up,
    passing,
    places_of,
    pool,
    scene_of,
)
from tests.thinning import seeds
from tests.worlds import (
    damage_state,
    filling_disk,
    lacking,
    lock_up,
    make_shelf,
    prefix_of,
    read_shelf,
    spoil,
    storms,
    write_shelf,
)

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time, pytest.mark.slow]


def check_outcomes(ran: Ran, ends: list[Any], wanted: Wanted) -> None:
    """Every image has one outcome, and what is synced is whole."""
    assert "Traceback" not in ran.err
    outcomes = {each["target"]: each for each in ran.images}
    # Two mappings to one repository may both have failed before their tags were known.
    pairs = {(each["source"], each["target"]) for each in ran.images}
    assert len(pairs) == len(ran.images), "no image has two outcomes"
    codes = {each["error"]["code"] for each in ran.images if each["error"]}
    assert "INTERNAL_ERROR" not in codes
    names = {
        (n, to, tag): f"{prefix_of(ends[n])}{to}:{tag}" for n, to, tag in wanted if ":" not in tag
    }
    assert any(name.endswith(":*") for name in outcomes) or outcomes.keys() == {*names.values()}
    synced = {
        key: wanted[key]
        for key, name in names.items()
        if name in outcomes and outcomes[name]["status"] != "failed"
    }
    assert not lacking(ends, synced)


def check_stored_once(places: list[Place], since: int) -> None:
    """No blob came to a repository twice in one run."""
    for place in places:
        stored = Counter(
            (entry.repository, entry.query.get("digest"))
            for entry in place.journal.matching("PUT", "upload", status=201)
            if entry.begun > since
        )
        assert max(stored.values(), default=1) == 1


def moved(places: list[Place]) -> int:
    """Count the requests so far that move something."""
    return sum(
        each.kind != "token" and (each.method not in ("GET", "HEAD") or each.kind == "blob")
        for place in places
        for each in place.journal.entries
    )


# No journal tells what a layout holds that is a source. A first piece whose answer was lost with a
# reused connection is sent once more over a new one (docs/design.md section 6, rule 16): nobody has
# heard of the newer Location of a PATCH, or that a PUT has ended the session.
@pytest.mark.provokes(*NOT_YET, "manifest_invented", "location_stale", "session_after_end")
@pytest.mark.parametrize("number", seeds("WORLDS", 2, 20))
async def test_whatever_happened_the_next_run_completes_it(number, tmp_path, monkeypatch):
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    _run._r.seed(number)
    random = Random(number)
    async with virtual(chance=random.random()) as world:
        places, names = places_of(world, random)
        lock_up(places, random)
        ends: list[Any] = [*places]
        if random.random() < 0.3:
            shelf, name = make_shelf(tmp_path)
            ends.append(shelf)
            names.append(name)
        seed, file = Seed(number), tmp_path / "mirror.yaml"
        text, wanted = scene_of(random, pool(random, seed), ends, names, seed)
        file.write_text(text)
        for shelf in ends[len(places) :]:
            write_shelf(shelf)
        share = random.choice([0, 0, 0.05, 0.2])
        ills = [
            Ill(place, Random(random.random()), share, random.choice([1, 3, 8])) for place in places
        ]
        for place, ill in zip(places, ills, strict=True):
            spoil(place, ill, Random(random.random()))

        async def run() -> Ran:
            with anyio.fail_after(PATIENCE):
                since = latest(world._sites())
                ran = await world.run("sync", "--json", "-q", "-c", str(file))
            check_stored_once(places, since)
            for shelf in ends[len(places) :]:
                read_shelf(shelf)
            check_outcomes(ran, ends, wanted)
            return ran

        with passing((0, 1e-5, 2e-4)[number % 3]):
            for _ in range(random.choice([1, 1, 2])):
                room = random.choice([10**9, 10**9, 0, 10**6])
                killed = 10 ** random.uniform(-1, 2) if random.random() < 0.3 else math.inf
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(storms, world, places, Random(random.random()))
                    with filling_disk(room), anyio.move_on_after(killed):
                        await run()
                    tasks.cancel_scope.cancel()
                await check_hung_up(places)  # what a killed run has sent is there
                if random.random() < 0.3:
                    damage_state(tmp_path, random)
            for ill in ills:
                ill.on = False
            await anyio.sleep(700)  # the pauses that were asked for are over
            ran = await run()
            assert (ran.status, ran.failed) == (0, [])
            assert not lacking(ends, wanted)
            before = moved(places)
            ran = await run()
            assert {*ran.statuses()} <= {"skipped"}
            assert moved(places) == before
            await check_hung_up(places)
