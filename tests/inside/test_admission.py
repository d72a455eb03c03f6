"""Who is admitted when: all or nothing, by rank, then by arrival; nobody is lost or left waiting
(I8, I9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _regsync.providers import Limits
from _regsync.registry import admission, throttle
from _regsync.registry.admission import Gate, Permit, Turn
from _regsync.registry.throttle import Demand, RegistryLimits

A, B = Demand("a"), Demand("b")
READ_A, WRITE_A, WRITE_B = Demand("a", "read"), Demand("a", "write"), Demand("b", "write")
LARGE = (Demand("a", "read", True), Demand("b", "write", True))
INSIDE = (READ_A, WRITE_A)

pytestmark = pytest.mark.anyio


def gate_of(**caps: int) -> Gate:
    gate = Gate()
    gate.limits.update({host: RegistryLimits(cap) for host, cap in caps.items()})
    return gate


def is_idle(gate: Gate) -> bool:
    limits = gate.limits.values()
    return (
        all(
            (limit.in_use, limit.bodies, limit.large_bodies) == (0, 0, {"read": 0, "write": 0})
            for limit in limits
        )
        and not any(meter.window.occupants for limit in limits for meter in limit.meters.values())
        and not any(gate._queues.values())
    )


class Crowd:
    """Tasks that want in; `order` is who got in, `leave` lets one go."""

    def __init__(self, gate: Gate, group: anyio.abc.TaskGroup) -> None:
        self.gate, self.group = gate, group
        self.order: list[str] = []
        self.inside: set[str] = set()
        self._leave: dict[str, anyio.Event] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}

    async def ask(self, name: str, *wants: Demand, rank: float = 0.0) -> None:
        self._leave[name], self._scopes[name] = anyio.Event(), anyio.CancelScope()

        async def run() -> None:
            with self._scopes[name]:
                async with self.gate.admitted(wants, rank):
                    self.order.append(name)
                    self.inside.add(name)
                    try:
                        await self._leave[name].wait()
                    finally:
                        self.inside.discard(name)

        self.group.start_soon(run)
        await anyio.wait_all_tasks_blocked()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
        await anyio.wait_all_tasks_blocked()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self._scopes[name].cancel()
        await anyio.wait_all_tasks_blocked()


async def crowded(gate: Gate, script: Callable[[Crowd], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as group:
        await script(Crowd(gate, group))
        group.cancel_scope.cancel()
    assert is_idle(gate)


async def test_transfer_holds_nothing_while_it_waits_for_the_other_side() -> None:
    async def script(crowd: Crowd) -> None:
        await crowd.ask("target", B)
        await crowd.ask("transfer", READ_A, WRITE_B)
        assert crowd.gate.limits["a"].in_use == 0
        await crowd.ask("source", A)
        assert crowd.order == ["target", "source"]
        await crowd.leave("target")
        assert "transfer" not in crowd.inside  # one permit of each, and `source` has a's
        await crowd.leave("source")
        assert crowd.order == ["target", "source", "transfer"]

    await crowded(gate_of(a=1, b=1), script)


async def test_lowest_rank_goes_first_then_who_came_first() -> None:
    async def script(crowd: Crowd) -> None:
        await crowd.ask("holder", A)
        for name, rank in (("c", 5.0), ("a", 1.0), ("d", 5.0), ("b", 1.0), ("short", 0.0)):
            await crowd.ask(name, READ_A, rank=rank)
        await crowd.leave("holder", "c", "a", "d", "b", "short")
        assert crowd.order == ["holder", "short", "a", "b", "c", "d"]

    await crowded(gate_of(a=1), script)


async def test_order_holds_across_different_wants() -> None:
    async def script(crowd: Crowd) -> None:
        await crowd.ask("holder", A)
        await crowd.ask("body", READ_A, rank=2)
        await crowd.ask("other", WRITE_A, rank=1)
        await crowd.ask("late", READ_A, rank=1)
        await crowd.leave("holder", "body", "other", "late")
        assert crowd.order == ["holder", "other", "late", "body"]

    await crowded(gate_of(a=1), script)


async def test_short_request_passes_bodies_that_wait_for_a_stream() -> None:
    async def script(crowd: Crowd) -> None:
        for number in range(9):
            await crowd.ask(f"large{number}", *LARGE)
        assert len(crowd.inside) == 8
        await crowd.ask("short", A, rank=9)
        await crowd.ask("small", READ_A, WRITE_B, rank=9)
        assert {"short", "small"} <= crowd.inside
        await crowd.leave("large3")
        assert "large8" in crowd.inside

    await crowded(gate_of(a=50, b=50), script)


async def test_two_permits_returned_at_once_let_two_of_a_kind_in() -> None:
    async def script(crowd: Crowd) -> None:
        await crowd.ask("holder", *INSIDE)
        await crowd.ask("one", A)
        await crowd.ask("two", A)
        await crowd.leave("holder")
        assert crowd.inside == {"one", "two"}

    await crowded(gate_of(a=2), script)


async def test_who_is_cancelled_in_the_queue_holds_nothing_and_blocks_nobody() -> None:
    async def script(crowd: Crowd) -> None:
        await crowd.ask("holder", A)
        for name in ("first", "second", "third"):
            await crowd.ask(name, A)
        await crowd.cancel("second", "first")
        assert crowd.gate.limits["a"].in_use == 1
        await crowd.leave("holder")
        assert crowd.inside == {"third"}

    await crowded(gate_of(a=1), script)


async def test_who_is_cancelled_inside_gives_its_permits_back() -> None:
    async def script(crowd: Crowd) -> None:
        await crowd.ask("holder", READ_A, WRITE_B)
        await crowd.ask("next", READ_A, WRITE_B)
        await crowd.cancel("holder")
        assert crowd.inside == {"next"}

    await crowded(gate_of(a=1, b=1), script)


async def test_permit_given_in_the_moment_of_cancellation_goes_to_the_next() -> None:
    async def script(crowd: Crowd) -> None:
        await crowd.ask("holder", A)
        await crowd.ask("first", A)
        await crowd.ask("second", A)
        crowd._scopes["first"].cancel()
        crowd._leave["holder"].set()
        await anyio.wait_all_tasks_blocked()
        assert crowd.inside == {"second"}

    async def given_first(crowd: Crowd) -> None:
        await crowd.ask("first", A)
        gate = crowd.gate
        await crowd.ask("second", A)
        await crowd.ask("third", A)
        # Returned and cancelled in one step: `second` was chosen and never runs.
        throttle.release(gate.limits, (A,))
        gate.wake()
        crowd._scopes["second"].cancel()
        await anyio.wait_all_tasks_blocked()
        assert crowd.inside == {"first", "third"}
        throttle.take({"a": RegistryLimits(99)}, (A,), 0.0)
        gate.limits["a"].in_use += 1  # what was returned in `first`'s name

    await crowded(gate_of(a=1), script)
    await crowded(gate_of(a=1), given_first)


async def test_error_inside_gives_the_permits_back() -> None:
    gate = gate_of(a=1)
    with pytest.raises(ValueError, match="x"):
        async with gate.admitted((A,)):
            raise ValueError("x")
    assert is_idle(gate)


async def test_returning_a_permit_does_not_ask_everybody_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of blobs wait; looking at each for every short request would cost more than the
    request.
    """
    asked: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., object]:
        real: Callable[..., object] = getattr(throttle, name)

        def count(*arguments: object) -> object:
            asked[name] += 1
            return real(*arguments)

        return count

    async def script(crowd: Crowd) -> None:
        for number in range(60):
            await crowd.ask(f"large{number}", *LARGE, rank=number)
        asked.clear()
        async with crowd.gate.admitted((A,)):
            pass
        assert asked["has_permits"] <= 3
        assert asked["refresh_next_opening"] == 1, (
            "no window matters to those for whom permits lack"
        )

    for name in ("has_permits", "refresh_next_opening"):
        monkeypatch.setattr(admission, name, counting(name))
    await crowded(gate_of(a=50, b=50), script)


WANTS = st.sampled_from(
    [
        (A,),
        (B,),
        (READ_A,),
        (WRITE_B,),
        (READ_A, WRITE_B),
        INSIDE,
        LARGE,
        (Demand("b", "read"), WRITE_A),
    ]
)


@pytest.mark.virtual_time
@settings(max_examples=60)
@given(
    caps=st.tuples(st.integers(2, 3), st.integers(1, 3)),
    askers=st.lists(
        st.tuples(WANTS, st.integers(0, 3), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=40,
    ),
)
async def test_small_limits_never_deadlock(
    caps: tuple[int, int], askers: list[tuple[tuple[Demand, ...], int, int, bool]]
) -> None:
    """Everyone gets in, whoever else comes, stays or is cancelled; a hang would be an hour."""
    gate, served, most = gate_of(a=caps[0], b=caps[1]), 0, {"a": 0, "b": 0}

    async def asker(wants: tuple[Demand, ...], rank: int, stay: int, gives_up: bool) -> None:
        nonlocal served
        with anyio.move_on_after(1.5 if gives_up else None) as scope:
            async with gate.admitted(wants, rank):
                for host, limit in gate.limits.items():
                    most[host] = max(most[host], limit.in_use)
                await anyio.sleep(stay)
        assert gives_up or not scope.cancelled_caught
        served += 1

    with anyio.fail_after(3600):
        async with anyio.create_task_group() as group:
            for each in askers:
                group.start_soon(asker, *each)
    assert served == len(askers)
    assert most["a"] <= caps[0]
    assert most["b"] <= caps[1]
    assert is_idle(gate)


@pytest.mark.virtual_time
@pytest.mark.parametrize("cap", [1, 2, 3])
async def test_streams_and_short_requests_share_a_small_registry(cap: int) -> None:
    gate, done = gate_of(a=cap, b=cap), 0

    async def work(wants: tuple[Demand, ...], rank: float) -> None:
        nonlocal done
        async with gate.admitted(wants, rank):
            await anyio.sleep(1)
        done += 1

    with anyio.fail_after(1000):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(work, LARGE, float(number))
                group.start_soon(work, (A,), 0.0)
                group.start_soon(work, (B,), 0.0)
    assert done == 60
    assert is_idle(gate)


# Places in windows.


def windowed(cap: int, *paces: Limits) -> tuple[Gate, dict[str, Demand]]:
    """Return a gate in front of one registry, and what a request of each action draws there."""
    gate = Gate()
    limit = gate.limits["a"] = RegistryLimits(cap, paces)
    actions = [action for pace in paces for action in pace.actions.split()]
    return gate, {
        action: Demand("a", meters=limit.meter_names("app", action)) for action in actions
    }


async def request(
    gate: Gate, permit: Permit, want: Demand, seconds: float, status: int = 200
) -> None:
    """Do what a transport does about one request: a place is taken with it, and left with its
    answer.
    """
    await gate.reserve(permit, want)
    now = anyio.current_time()
    turn = Turn(gate, permit, permit.pop_slot(want), now, owns_permit=False)
    try:
        await anyio.sleep(seconds)
    finally:
        turn.meter.record_answer(turn.number, status, anyio.current_time(), 0.0, 1.0)
        gate.on_window_change()
        await turn.end()


@pytest.mark.virtual_time
async def test_work_whose_requests_share_a_window_leaves_every_place() -> None:
    """Inside one registry of one window, the GET and the PUT of what it gives draw on the same."""
    gate, want = windowed(8, Limits("blob_get upload_body"))
    with anyio.fail_after(3600):
        for _ in range(20):
            async with gate.admitted((READ_A, WRITE_A)) as permit:
                await gate.reserve(permit, want["blob_get"], want["upload_body"])
                await request(gate, permit, want["blob_get"], 0.1)
                await request(gate, permit, want["upload_body"], 0.1)
    assert is_idle(gate)


@pytest.mark.virtual_time
async def test_a_request_without_an_answer_leaves_its_place_to_who_waits() -> None:
    """Its work goes on, and gives no permit back."""
    gate, want = windowed(8, Limits("upload_body", start=1))
    chunk = want["upload_body"]
    entered = list[float]()

    async def wait() -> None:
        turn = await gate.begin_request(chunk, None, None)
        entered.append(anyio.current_time() - began)
        await turn.end()

    began = anyio.current_time()
    async with anyio.create_task_group() as group, gate.admitted((WRITE_A,)):
        broken = await gate.begin_request(chunk, None, None)
        group.start_soon(wait)
        await anyio.sleep(5)
        await broken.end()
        await anyio.sleep(60)
    assert entered == [5.0]
    assert is_idle(gate)


@pytest.mark.virtual_time
async def test_work_that_gives_back_its_place_to_wait_takes_one_again() -> None:
    """The next chunk of an upload waits for a window that was halved meanwhile."""
    gate, want = windowed(8, Limits("upload_body", start=1))
    chunk = want["upload_body"]

    async def upload(status: int) -> None:
        async with gate.admitted((WRITE_A._replace(meters=chunk.meters),)) as permit:
            for _ in range(3):
                await request(gate, permit, chunk, 0.1, status)

    with anyio.fail_after(3600):
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(upload, 429)
    assert is_idle(gate)


@pytest.mark.virtual_time
async def test_two_that_copy_to_and_fro_do_not_wait_for_each_other() -> None:
    """Each has a place where it writes when its read is refused, and the windows have become narrow
    meanwhile.
    """
    gate = Gate()
    for host in "ab":
        gate.limits[host] = RegistryLimits(8, (Limits("blob_get upload_body", start=2),))
    window = {
        host: Demand(host, meters=gate.limits[host].meter_names("app", "blob_get")) for host in "ab"
    }

    async def copy(source: str, target: str) -> None:
        async with gate.admitted((Demand(source, "read"), Demand(target, "write"))) as permit:
            await gate.reserve(permit, window[source], window[target])
            await request(gate, permit, window[source], 1.0, 401)
            await anyio.sleep(1)  # for a token
            await request(gate, permit, window[source], 1.0)
            await request(gate, permit, window[target], 1.0)

    with anyio.fail_after(3600):
        async with anyio.create_task_group() as group:
            group.start_soon(copy, "a", "b")
            group.start_soon(copy, "b", "a")
            await anyio.sleep(1.5)
            for host in "ab":
                gate.limits[host].meters[window[host].meters[0]].window.width = 1.0
    assert is_idle(gate)


@pytest.mark.virtual_time
@settings(max_examples=60)
@given(
    cap=st.integers(1, 3),
    requests=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.05, 0.3]),
                st.sampled_from([0.0, 0.1, 0.2]),
                st.sampled_from([200, 429]),
            ),
            min_size=1,
            max_size=4,
        ),
        min_size=2,
        max_size=4,
    ),
    is_crowded=st.booleans(),
    cancelled=st.one_of(st.none(), st.floats(0.0, 3.0)),
)
async def test_tasks_of_one_work_that_wait_at_once_get_its_permits_again_once(
    cap: int,
    requests: list[list[tuple[float, float, int]]],
    is_crowded: bool,
    cancelled: float | None,
) -> None:
    """One reading that feeds several targets in chunks: each target's next chunk may have to wait."""
    gate = Gate()
    wants = []
    for number in range(len(requests)):
        limits = gate.limits[f"t{number}"] = RegistryLimits(cap, (Limits("upload_body", start=1),))
        names = limits.meter_names("app", "upload_body")
        wants.append(Demand(f"t{number}", "write", meters=names))

    async def serve(permit: Permit, want: Demand, chunks: list[tuple[float, float, int]]) -> None:
        for pause, seconds, status in chunks:
            await anyio.sleep(pause)  # for the bytes of the source
            await request(gate, permit, want, seconds, status)

    async def work() -> None:
        async with gate.admitted(tuple(wants)) as permit, anyio.create_task_group() as tasks:
            for want, chunks in zip(wants, requests, strict=True):
                tasks.start_soon(serve, permit, want, chunks)

    with anyio.fail_after(3600):
        async with anyio.create_task_group() as works:
            for _ in range(3 if is_crowded else 1):
                works.start_soon(work)
            if cancelled is not None:
                await anyio.sleep(cancelled)
                works.cancel_scope.cancel()
    assert is_idle(gate)


STEPS = st.lists(
    st.tuples(st.sampled_from(["get", "put", "ask"]), st.booleans()), min_size=1, max_size=5
)


@pytest.mark.virtual_time
@settings(max_examples=60)
@given(
    layout=st.sampled_from(["get put ask", "get put|ask", "get|put|ask"]),
    start=st.integers(1, 2),
    works=st.lists(
        st.tuples(st.sampled_from([(), ("put",), ("get", "put")]), st.booleans(), STEPS),
        min_size=1,
        max_size=12,
    ),
)
async def test_narrow_windows_never_deadlock(
    layout: str, start: int, works: list[tuple[tuple[str, ...], bool, list[tuple[str, bool]]]]
) -> None:
    """Whatever draws on which window, in which order, refused or not; a hang would be an hour."""
    gate, want = windowed(4, *(Limits(actions, start) for actions in layout.split("|")))

    async def work(ahead: tuple[str, ...], at_once: bool, steps: list[tuple[str, bool]]) -> None:
        drawn = [want[action] for action in ahead]
        bodies = [
            Demand("a", "write", meters=each.meters if at_once else ()) for each in drawn
        ] or [WRITE_A]
        async with gate.admitted(tuple(bodies)) as permit:
            if not at_once:
                await gate.reserve(permit, *drawn)
            for action, refused in steps:
                await request(gate, permit, want[action], 0.1, 429 if refused else 200)

    with anyio.fail_after(3600):
        async with anyio.create_task_group() as group:
            for each in works:
                group.start_soon(work, *each)
    assert is_idle(gate)


@pytest.mark.virtual_time
@pytest.mark.parametrize("step", [number / 1000 for number in range(1, 120, 6)])
async def test_time_that_passes_between_two_looks_at_the_clock_loses_nobody(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request was too early at one look, late enough at the next: it waited for ever in a run
    that did no more.
    """
    gate, now, looks, entered = Gate(), anyio.current_time, count(), list[int]()
    limit = gate.limits["a"] = RegistryLimits(50, (Limits("upload_start", rate=9),))
    monkeypatch.setattr(anyio, "current_time", lambda: now() + next(looks) * step)
    want = Demand("a", meters=limit.meter_names("repository", "upload_start"))
    with anyio.fail_after(60):
        for number in range(20):
            async with gate.admitted((want,)):
                entered.append(number)
    assert entered == [*range(20)]
    assert is_idle(gate)


@pytest.mark.virtual_time
async def test_who_waits_for_a_moment_goes_before_who_asks_when_it_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock has moved and nobody was woken yet: the one that asks now is not let in first."""
    gate = Gate()
    now = anyio.current_time()
    late = 0.0
    limit = gate.limits["a"] = RegistryLimits(50, (Limits("upload_start", rate=1),))
    monkeypatch.setattr(anyio, "current_time", lambda: now + late)
    want = Demand("a", meters=limit.meter_names("repository", "upload_start"))
    async with anyio.create_task_group() as group:
        crowd = Crowd(gate, group)
        await crowd.ask("first", want)
        await crowd.ask("waiting", want)
        assert crowd.order == ["first"]
        late = 1.5
        await crowd.ask("asking", want)
        assert crowd.order == ["first", "waiting"]
        group.cancel_scope.cancel()


async def test_an_answer_looks_at_nobody_who_waits_for_a_permit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nearly all who wait in a cold run do so for permits, and answers give none back."""
    looks = Counter[str]()

    def counted(*args: object) -> bool:
        looks["looks"] += 1
        return throttle.has_permits(*args)  # type: ignore[arg-type]

    async def script(crowd: Crowd) -> None:
        await crowd.ask("holder", A)
        await crowd.ask("body", READ_A)
        await crowd.ask("short", A)
        monkeypatch.setattr(admission, "has_permits", counted)
        for _ in range(10):
            crowd.gate.on_window_change()
        assert looks["looks"] == 0
        await crowd.leave("holder")
        assert crowd.inside == {"body"}
        assert looks["looks"] == 2  # the first of both queues; the second one still has to wait

    await crowded(gate_of(a=1), script)


async def test_who_begins_to_wait_is_the_only_one_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[tuple[Demand, ...]] = []

    def counted(limits: dict[str, RegistryLimits], wants: tuple[Demand, ...]) -> bool:
        looked_at.append(wants)
        return throttle.has_permits(limits, wants)

    async def script(crowd: Crowd) -> None:
        await crowd.ask("holder", A)
        await crowd.ask("body", READ_A)
        monkeypatch.setattr(admission, "has_permits", counted)
        await crowd.ask("short", A)
        assert set(looked_at) == {(A,)}

    await crowded(gate_of(a=1), script)


async def test_an_answer_lets_in_who_has_permits_and_waits_for_a_window() -> None:
    gate = Gate()
    limit = gate.limits["a"] = RegistryLimits(50, (Limits("upload_start", start=1),))
    want = Demand("a", meters=limit.meter_names("repository", "upload_start"))
    first = await gate.begin_request(want, None, None)
    entered: list[Turn] = []

    async def ask() -> None:
        entered.append(await gate.begin_request(want, None, None))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert entered == []
        first.meter.record_success(first.number)
        gate.on_window_change()  # an answer has come; its turn has not ended
        await anyio.wait_all_tasks_blocked()
        assert len(entered) == 1
    for turn in (first, *entered):
        await turn.end()
    assert is_idle(gate)
