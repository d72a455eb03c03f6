"""Registries that ration, and a program that keeps to it: who waits, for how long, and who does not
have to.

All on a clock that jumps. Requests are counted at the registry; what refuses them is the harness's
own arithmetic.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from _regsync.providers import Limits
from _regsync.registry.admission import Gate
from _regsync.registry.throttle import CongestionWindow, Demand, RegistryLimits
from _regsync.registry.transport import Body, Call
from conformance.content.images import Part, Seed, compose
from conformance.server.memory import Link
from tests.inside.wires import Blob, plain_registry, transport_of


@pytest.fixture
def seed() -> Seed:
    return Seed(83)


# Waiting in front of windows and buckets.


def gate_of(**paces: Limits) -> Gate:
    gate = Gate()
    gate.limits.update({host: RegistryLimits(4, (pace,)) for host, pace in paces.items()})
    return gate


def drawing(gate: Gate, host: str) -> Demand:
    return Demand(host, meters=gate.limits[host].meter_names("app", "x"))


@pytest.mark.virtual_time
async def test_who_waits_for_a_token_holds_no_permit_and_goes_by_age():
    gate = gate_of(a=Limits("x", rate=1))
    order: list[tuple[int, float]] = []

    async def ask(number: int, rank: float) -> None:
        async with gate.admitted((drawing(gate, "a"),), rank):
            order.append((number, anyio.current_time()))

    async with anyio.create_task_group() as group:
        for number, rank in enumerate((0, 5, 3, 4, 3)):
            group.start_soon(ask, number, rank)
            await anyio.sleep(0.01)
        assert gate.limits["a"].in_use == 0
        async with gate.admitted((Demand("a"),)):
            pass  # what draws nothing does not wait
        assert anyio.current_time() < 0.1
    assert order == [
        (number, pytest.approx(at, abs=1e-3)) for at, number in enumerate((0, 2, 4, 3, 1))
    ]


@pytest.mark.virtual_time
async def test_the_next_in_line_is_let_in_on_time_when_the_first_gives_up():
    gate = gate_of(a=Limits("x", rate=1))
    entered: list[float] = []

    async def ask(patience: float) -> None:
        with anyio.move_on_after(patience):
            async with gate.admitted((drawing(gate, "a"),)):
                entered.append(anyio.current_time())

    async with anyio.create_task_group() as group:
        for patience in (10, 0.5, 0.7, 10):
            group.start_soon(ask, patience)
            await anyio.wait_all_tasks_blocked()
    assert entered == [0.0, pytest.approx(1.0, abs=1e-3)]
    assert gate.limits["a"].in_use == 0
    assert not gate._queues


@pytest.mark.virtual_time
async def test_no_action_starves_another_in_a_window_that_they_share():
    """Younger work keeps coming, of both sorts; who came before is served before."""
    gate = gate_of(a=Limits("x y", 1, rate=10))
    waited: list[float] = []

    async def ask(rank: float | None) -> None:
        began = anyio.current_time()
        async with gate.admitted((drawing(gate, "a"),), rank):
            await anyio.sleep(0.05)
        waited.append(anyio.current_time() - began)

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(ask, float(number))  # a body of image `number`
            group.start_soon(ask, None)  # a question
            await anyio.sleep(0.19)
    assert max(waited) < 2


@pytest.mark.virtual_time
async def test_a_transfer_gives_back_what_it_holds_before_it_waits_for_its_next_request():
    gate = gate_of(a=Limits("x", rate=1), b=Limits("x"))
    inside: list[str] = []

    async def transfer(name: str) -> None:
        async with gate.admitted((Demand("a", "write"), Demand("b", "read"))) as permit:
            await gate.reserve(permit, drawing(gate, "a"))
            assert gate.limits["b"].in_use == 1
            inside.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(transfer, "first")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(transfer, "second")
        await anyio.wait_all_tasks_blocked()
        assert inside == ["first"]
        assert (gate.limits["a"].in_use, gate.limits["b"].in_use) == (0, 0)
    assert inside == ["first", "second"]
    assert anyio.current_time() == pytest.approx(1.0, abs=1e-3)


@asynccontextmanager
async def narrow(world_of: Any = None) -> AsyncIterator[Any]:
    transport = transport_of({})
    host = transport.client(plain_registry())
    transport.gate.limits[host.key] = RegistryLimits(
        10, (Limits("upload_start upload_body upload_finish manifest_put", 1),)
    )
    yield transport, host


@pytest.mark.virtual_time
async def test_a_body_frees_its_window_after_a_second_or_a_mebibyte_and_keeps_its_permit():
    body = Call("upload_body", "PUT", "/v2/app/blobs/uploads/1", "app")
    entered: list[float] = []
    async with narrow() as (transport, host):

        async def put(seconds: float, *, told: bool) -> None:
            turn = await transport.gate.begin_request(transport.demand_of(host, body), None, None)
            sent = Body(Blob(b""), lambda: None, transport)
            transport._watch_body(body, turn, sent, None)
            entered.append(anyio.current_time())
            if told:
                await anyio.sleep(0.3)
                transport._record_under_way(turn)
            await anyio.sleep(seconds)
            await turn.end()

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: put(10, told=False))
            await anyio.wait_all_tasks_blocked()
            group.start_soon(lambda: put(10, told=True))
            await anyio.wait_all_tasks_blocked()
            # The window has widened by the first success: two of a second's length.
            meter = next(iter(transport.gate.limits[host.key].meters.values()))
            await anyio.sleep(1.1)
            meter.window.width = 1.0
            group.start_soon(lambda: put(10, told=False))
            await anyio.sleep(1)
            assert transport.gate.limits[host.key].in_use == 3
    assert entered == [0.0, pytest.approx(1.0, abs=1e-3), pytest.approx(1.3)]


@pytest.mark.virtual_time
async def test_a_body_well_under_way_wakes_those_who_wait_once(monkeypatch):
    body = Call("upload_body", "PUT", "/v2/app/blobs/uploads/1", "app")
    async with narrow() as (transport, host):
        turn = await transport.gate.begin_request(transport.demand_of(host, body), None, None)
        with monkeypatch.context() as patch:
            wakes: list[None] = []
            patch.setattr(transport.gate, "on_window_change", lambda: wakes.append(None))
            for moment in (1.0, 2.0, 3.0):
                await anyio.sleep_until(moment)
                transport._record_under_way(turn)
                assert transport.last_progress == pytest.approx(moment)
            assert len(wakes) == 1
        await turn.end()


async def test_a_large_body_does_not_hold_up_other_uploads_of_a_window_of_one(
    world, seed, monkeypatch
):
    """6 MB at 2 MB/s: the next upload starts when the first mebibyte is through."""
    monkeypatch.setattr(
        CongestionWindow,
        "width",
        property(lambda self: 1.0, lambda self, value: None),
        raising=False,
    )
    source = world.registry("source.test")
    target = world.registry("target.test", up=Link(bandwidth=2_000_000, window=100_000))
    parts = [Part("application/x", seed.blob(size)) for size in (6_000_000, 6_000_000)]
    config = Part("application/vnd.acme.config", b"{}")
    image = compose(config, parts).load_into(source.app, "app", tag="v1")
    large = [each["digest"] for each in image.document["layers"]]
    ran = await world.copy(source, target)
    assert ran.statuses() == ["synced"]
    puts = target.journal.matching("PUT", "upload")
    first, second = sorted(each.time for each in puts if each.query["digest"] in large)
    assert second - first == pytest.approx(1.05 * 0.5, abs=0.3)
