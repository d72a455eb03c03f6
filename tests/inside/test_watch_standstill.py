"""Watch mode: when probes are told that it stands still (docs/design.md section 10)."""

from __future__ import annotations

from functools import partial

import anyio

from _regsync.app import environment
from _regsync.net.wire import Timeouts
from _regsync.registry.client import Machine
from conformance.server.memory import Link
from tests.ends import tags
from tests.inside.telling import tellers
from tests.watching import Scene


async def test_a_long_wait_is_no_illness_until_its_end_is_missed(stage, monkeypatch):
    told_by, states = tellers(monkeypatch), list[int]()
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})

    async def look() -> None:
        await anyio.sleep(1900)
        states.append(told_by[0]("/healthz")[0])
        with monkeypatch.context() as later:
            now = anyio.current_time()
            for seconds in (950.0, 1050.0):  # the loop is stuck, and this is another's clock
                later.setattr(anyio, "current_time", lambda seconds=seconds: now + seconds)
                states.append(told_by[0]("/healthz")[0])

    ran = await stage.watch(look, interval=4000)
    assert (ran.status, states) == (0, [200, 200, 503])


async def test_a_cycle_is_ill_when_nothing_moves_and_not_when_it_is_long(
    world, tmp_path, monkeypatch
):
    patient = Timeouts(idle=3600.0, slow_window=36000.0)  # or the run would give up before
    monkeypatch.setattr(environment, "Machine", partial(Machine, timeouts=patient))
    told_by = tellers(monkeypatch)
    stage = Scene(world, tmp_path)
    slow = world.registry("slow.test", up=Link(bandwidth=2000), down=Link(bandwidth=2000))
    stage.seed.image(sizes=(4_000_000,)).load_into(slow.app, "app", tag="v1")
    stage.write(
        {"from": "app", "source": "slow", "tags": tags("v1")},
        registries={"slow": "http://slow.test"},
    )
    states: list[bool] = []

    async def look() -> None:
        for _ in range(15):
            states.append(told_by[0]("/healthz")[0] == 200)
            await anyio.sleep(60)
        slow.fail("silent")
        for _ in range(25):
            await anyio.sleep(60)
            states.append(told_by[0]("/healthz")[0] == 200)
        slow.recover()

    await stage.watch(look, interval=120)
    assert all(states[:29])
    assert not any(states[31:])
