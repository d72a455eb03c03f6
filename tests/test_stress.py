"""Many small syncs at random over registries that fail at random, on a clock that jumps: what holds
must hold in all of them, and none may stand still.

The scene of each seed is tests/stressing.py's. Every image has one outcome, what is synced is whole,
no blob was stored twice, no connection is left open, and the next run, undisturbed, completes the
rest. Where nothing can go on any more the clock jumps to the end of this test's patience. In two of
three seeds time also passes between two looks at the clock.

    STRESS=1000:500 pytest tests/test_stress.py      five hundred other seeds
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import anyio
import pytest

from conformance.registry.app import App
from conformance.server.memory import Place
from tests.ends import Ran, held, virtual
from tests.stressing import KINDS, NOT_YET, PATIENCE, Wanted, check_hung_up, ill_scene, passing
from tests.thinning import seeds

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


def check_outcomes(ran: Ran, places: list[Place], wanted: Wanted) -> None:
    """Every image has one outcome, what is synced is whole, and the status says how it went."""
    outcomes = {each["target"]: each["status"] for each in ran.images}
    assert len(outcomes) == len(ran.images), "no image has two outcomes"
    failed = [each for each in ran.images if each["status"] == "failed"]
    assert ran.status == (0 if not failed else 2 if len(failed) == len(ran.images) else 1)
    assert "INTERNAL_ERROR" not in {each["error"]["code"] for each in failed}
    hosts = [KINDS[place.host].removeprefix("http://") for place in places]
    names = {(n, to, tag): f"{hosts[n]}/{to}:{tag}" for n, to, tag in wanted if ":" not in tag}
    assert any(name.endswith(":*") for name in outcomes) or outcomes.keys() == {*names.values()}
    for (n, to, tag), name in names.items():
        is_synced = outcomes.get(name, "failed") != "failed"
        assert not is_synced or held(places[n], to, wanted[n, to, tag])


def check_stored_once(places: list[Place]) -> None:
    """No blob came to a repository twice."""
    for place in places:
        stored = place.journal.matching("PUT", "upload", status=201)
        blobs = Counter((entry.repository, entry.query.get("digest")) for entry in stored)
        assert max(blobs.values(), default=1) == 1


@pytest.mark.slow
@pytest.mark.provokes(*NOT_YET)
@pytest.mark.parametrize("number", seeds("STRESS", 6, 30))
async def test_no_run_stands_still(number, tmp_path):
    random = Random(number)
    share = random.choice([0, 0.1, 0.3, 0.6])
    async with virtual(chance=random.random()) as world:
        places, wanted, file, ills = ill_scene(world, random, number, share, tmp_path)

        async def run() -> Ran:
            with anyio.fail_after(PATIENCE):
                ran = await world.run("sync", "--json", "-q", "-c", str(file))
            await check_hung_up(places)
            return ran

        with passing((0, 1e-5, 2e-4)[number % 3]):
            ran = await run()
            check_outcomes(ran, places, wanted)
            check_stored_once(places)
            assert share or ran.status == 0
            assert share or ran.seconds < 600, "somebody waited for a mount in vain"
            for each in ills:
                each.on = False
            again = await run()
        assert (again.status, again.failed) == (0, [])
        assert again.seconds < 600, "somebody waited for a mount in vain"
        lacking = [key for key, image in wanted.items() if not held(places[key[0]], key[1], image)]
        assert not lacking


def lose(app: App, repository: str, random: Random) -> None:
    """Let a target lose things as a registry does that keeps to its word: nothing stands whose
    parts are gone.
    """
    held = app.repositories.get(repository)
    what = random.choice(["nothing", "repository", "blobs", "manifests", "tags"])
    if held is None or what == "repository":
        app.repositories.pop(repository, None)
        return
    parts: dict[str, dict[str, Any]] = {
        "blobs": held.blobs,
        "manifests": held.manifests,
        "tags": held.tags,
    }
    for name in [each for each in parts.get(what, {}) if random.random() < 0.4]:
        del parts[what][name]
    while broken := [
        digest
        for digest, manifest in held.manifests.items()
        if any(each["digest"] not in held.manifests for each in manifest.children)
        or any(each["digest"] not in held.blobs and not each.get("urls") for each in manifest.blobs)
    ]:
        for digest in broken:
            del held.manifests[digest]
    for tag in [tag for tag, digest in held.tags.items() if digest not in held.manifests]:
        del held.tags[tag]


@pytest.mark.slow
@pytest.mark.provokes(*NOT_YET, "own_manifest_asked")
@pytest.mark.provokes("manifest_names_absent")
@pytest.mark.parametrize("number", seeds("STRESS", 2, 10))
async def test_targets_that_lose_things_behind_our_back_converge_in_the_next_run(number, tmp_path):
    """With a state from a run under faults, which may have failed in parts (I5)."""
    random = Random(number)
    share = random.choice([0, 0, 0.1, 0.3])
    async with virtual(chance=random.random()) as world:
        places, wanted, file, ills = ill_scene(world, random, number, share, tmp_path)
        with anyio.fail_after(4 * PATIENCE):
            ran = await world.run("sync", "--json", "-q", "-c", str(file))
            assert share or ran.status == 0
            for each in ills:
                each.on = False
            for _ in range(2):
                for n, to in sorted({(n, to) for n, to, _ in wanted}):
                    lose(places[n].app, to, random)
                ran = await world.run("sync", "--json", "-q", "--recheck", "-c", str(file))
                assert (ran.status, ran.failed) == (0, [])
                assert all(held(places[n], to, image) for (n, to, _), image in wanted.items())
