"""Windows, epochs, buckets, caps, streams, and registries that are away, on a clock that is an argument
or that jumps.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.errors import ConnectFailed, Disconnected, RegistryError, SyncError
from _regsync.net.wire import Timeouts
from _regsync.providers import Limits
from _regsync.registry.limits import (
    LONGEST_WAIT,
    Bucket,
    Gate,
    HostLimits,
    Retry,
    Turn,
    backoff,
    is_gateway_failure,
    quota_wait,
)

UPLOADS = "upload_start upload_body"
GROUPS = (Limits(UPLOADS, 4), Limits("blob_get", 8, rate=2, burst=3))


def quiet(*_: Any, **__: Any) -> None:
    """Log nothing."""


def host(cap: int = 50, *, gate: Gate | None = None, has_answered: bool = True) -> HostLimits:
    made = HostLimits(
        "r.test",
        gate or Gate(),
        chance=lambda: 0.5,
        log=quiet,
        timeouts=Timeouts(),
        cap=cap,
        groups=GROUPS,
    )
    if has_answered:
        made.record_answer(0.0)
    return made


def lost(message: str = "connection reset") -> Disconnected:
    return Disconnected(message)


# The window.


def test_successes_widen_the_window_by_one_each_round() -> None:
    lane = host().lane("upload_start")
    for _ in range(4):
        lane.take(0.0).record_answer(201, 0.0)
    assert 4.8 < lane.width < 5.1
    assert lane.used == 0


def test_a_burst_of_refusals_halves_the_window_once() -> None:
    lane = host().lane("upload_start")
    turns = [lane.take(0.0) for _ in range(4)]
    for turn in turns:
        turn.record_answer(429, 1.0)
    assert lane.width == 2
    assert lane.paused_until == pytest.approx(1.0 + backoff(1, 0.5))


def test_a_window_of_one_stays_one() -> None:
    lane = host().lane("upload_start")
    for second in range(9):
        lane.take(float(second)).record_answer(429, float(second))
    assert lane.width == 1


def test_an_epoch_lasts_a_tenth_of_a_second_at_least() -> None:
    lane = host().lane("upload_start")
    lane.take(0.0).record_answer(429, 0.0)
    lane.take(0.01).record_answer(429, 0.05)
    assert lane.width == 2
    lane.take(0.2).record_answer(429, 0.2)
    assert lane.width == 1


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_error_changes_no_window(status: int) -> None:
    lane = host().lane("upload_start")
    lane.take(0.0).record_answer(status, 0.0)
    assert lane.width == 4


def test_a_pause_that_is_asked_for_is_everybodys_and_has_a_bound() -> None:
    lane = host().lane("upload_start")
    lane.take(0.0).record_answer(429, 0.0, 40.0)
    assert lane.opens_at() == 40
    lane.take(50.0).record_answer(503, 50.0, 1e9)
    assert lane.opens_at() == 50 + LONGEST_WAIT


def test_a_place_is_free_when_the_head_is_there_and_the_permit_in_the_end() -> None:
    registry = host(1)
    turn = registry.lane("upload_start").take(0.0)
    assert registry.lane("blob_get").opens_at() == math.inf
    turn.record_answer(200, 0.0)
    assert registry.lane("upload_start").used == 0
    assert registry.lane("blob_get").opens_at() == math.inf
    turn.leave()
    turn.leave()
    assert registry.used == 0
    assert registry.lane("blob_get").opens_at() < math.inf


@given(st.lists(st.tuples(st.sampled_from(["take", "answer", "refuse", "leave"]), st.floats(0, 2))))
def test_whatever_comes_counts_are_never_below_nothing_nor_above_the_window(steps: Any) -> None:
    registry = host(5)
    lane, turns, now = registry.lane("upload_start"), list[Turn](), 0.0
    for step, seconds in steps:
        now += seconds
        if step == "take" and lane.opens_at() <= now:
            turns.append(lane.take(now))
        elif turns:
            turn = turns[int(seconds * 7) % len(turns)]
            if step == "leave":
                turn.leave()
                turns.remove(turn)
            else:
                turn.record_answer(429 if step == "refuse" else 200, now)
        assert 0 <= lane.used <= 5
        assert registry.used == len(turns) <= 5
        assert 1 <= lane.width <= 5


# The bucket.


@given(st.integers(1, 50), st.integers(1, 20))
def test_a_bucket_gives_its_burst_at_once_and_then_its_rate(rate: int, burst: int) -> None:
    bucket, now, given_at = Bucket(rate, burst), 100.0, list[float]()
    while len(given_at) < burst + 2 * rate:
        now = max(now, bucket.next_token())
        bucket.take(now)
        given_at.append(now)
    assert given_at[burst - 1] == pytest.approx(100.0, abs=1e-3)
    for first in given_at:
        within = [at for at in given_at if first <= at < first + 1]
        assert len(within) <= rate + burst


def test_no_rate_is_no_limit() -> None:
    bucket = Bucket(0, 1)
    for _ in range(99):
        bucket.take(5.0)
    assert bucket.next_token() <= 5.0


def test_projects_have_lanes_of_their_own() -> None:
    registry = host()
    assert registry.lane("blob_get", "one") is not registry.lane("blob_get", "two")
    assert registry.lane("upload_start", "one") is registry.lane("upload_body", "one")


# A registry that is away.


def test_the_first_request_to_a_registry_goes_alone() -> None:
    registry = host(has_answered=False)
    turn = registry.lane("upload_start").take(0.0)
    assert turn.is_probe
    assert registry.lane("blob_get").opens_at() == math.inf
    registry.record_answer(0.1)
    assert registry.lane("blob_get").opens_at() <= 0.1


def test_three_failures_in_a_row_make_it_away_and_an_answer_ends_that() -> None:
    registry = host()
    for number in range(2):
        registry.record_failure(lost(), 1.0, 1.0 + number)
    registry.record_answer(3.0)
    for number in range(3):
        assert not registry.is_away
        registry.record_failure(lost(), 4.0, 4.0 + number)
    assert registry.is_out
    lane = registry.lane("upload_start")
    assert lane.opens_at() == registry.probe_at > 6.0
    lane.width = 8.0
    registry.record_answer(9.0)
    assert not registry.is_away
    assert lane.width == 2.0


def test_failures_of_requests_from_before_say_nothing_when_it_is_over() -> None:
    registry = host()
    for _ in range(3):
        registry.record_failure(lost(), 1.0, 2.0)
    registry.record_answer(5.0)
    for _ in range(9):
        late = lost()
        registry.record_failure(late, 4.0, 6.0)
        assert late.away is registry, "it goes again at once"
    assert not registry.is_away


def test_probes_become_rarer_and_the_wait_ends_after_two_minutes() -> None:
    registry, now, probes = host(), 100.0, list[float]()
    for _ in range(3):
        registry.record_failure(lost(), now, now)
    while registry.stop_error is None:
        now = registry.probe_at
        probes.append(now - 100.0)
        registry.record_failure(lost(), now, now, is_probe=True)
    pauses = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert pauses[:5] == pytest.approx([1.0, 2.0, 4.0, 8.0, 10.0])
    assert probes[-1] == pytest.approx(120.0)
    assert "waited for 2m00s" in registry.stop_error.message
    assert not registry.stop_error.retryable


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_one_that_never_answered_is_waited_for_fifteen_seconds() -> None:
    registry = host(has_answered=False)
    now = anyio.current_time()
    registry.record_failure(ConnectFailed("refused"), now, now + 1)
    assert registry.gives_up_at == now + 15
    await anyio.sleep(14.9)
    registry.raise_if_stopped()
    await anyio.sleep(0.1)
    with pytest.raises(SyncError, match="waited for 15s"):
        registry.raise_if_stopped()


def test_an_untrusted_certificate_is_not_waited_for() -> None:
    registry = host(has_answered=False)
    for _ in range(3):
        assert registry.stop_error is None
        failure = ConnectFailed("not trusted")
        failure.retryable = False
        registry.record_failure(failure, 0.0, 0.0)
    assert registry.stop_error is not None


def test_a_stopped_registry_is_tried_once_in_the_next_run() -> None:
    registry = host(has_answered=False)
    registry.record_failure(lost(), 0.0, 0.0)
    registry.record_failure(lost(), 15.0, 15.0)
    assert registry.stop_error is not None
    registry.begin_run()
    registry.raise_if_stopped()
    registry.record_failure(lost(), 21.0, 21.0)
    assert registry.stop_error is not None


@pytest.mark.anyio
async def test_a_lane_that_asks_for_hours_is_closed_until_then() -> None:
    lane = host().lane("upload_start")
    now = anyio.current_time()
    lane.stop(RegistryError("slowly", status=429), until=now + 5000.0)
    with pytest.raises(RegistryError):
        lane.opens_at()
    assert lane.host.lane("blob_get").opens_at() < now
    lane.stop(RegistryError("slowly", status=429), until=now)
    assert lane.opens_at() < now


@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [
        (502, None, True),
        (503, None, True),
        (503, 5.0, False),
        (500, None, False),
        (429, None, False),
    ],
)
def test_a_gateways_answer_that_names_no_time_is_none(
    status: int, retry_after: float | None, expected: bool
) -> None:
    assert is_gateway_failure(status, retry_after) is expected


# A quota.


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"ratelimit-remaining": "3;w=60"}, None),
        ({"ratelimit-remaining": "0;w=21600"}, 21600.0),
        ({"ratelimit-remaining": "0", "ratelimit-limit": "100;w=600"}, 600.0),
        ({"ratelimit-remaining": "0"}, 60.0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "30"}, 30.0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "2000000100"}, 100.0),
        ({"ratelimit-remaining": "none"}, None),
    ],
)
def test_a_quota_without_rest_says_when_it_is_renewed(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert quota_wait(headers.get, 2e9) == seconds


# Those who wait.

pytestmark: list[pytest.MarkDecorator] = []


async def until_still() -> None:
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def enter(gate: Gate, order: list[str], name: str, *needs: Any) -> list[Any]:
    given = await gate.enter(*needs)
    order.append(name)
    return given


@pytest.mark.anyio
async def test_who_waits_comes_in_turn_and_who_is_cancelled_leaves_nothing() -> None:
    gate = Gate()
    lane = host(1, gate=gate).lane("upload_start")
    (first,) = await gate.enter(lane)
    order: list[str] = []
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def cancelled() -> None:
            with scope:
                await enter(gate, order, "cancelled", lane)

        for name in ("one", "two"):
            tasks.start_soon(enter, gate, order, name, lane)
            await until_still()
            if name == "one":
                tasks.start_soon(cancelled)
                await until_still()
        scope.cancel()
        await until_still()
        assert order == []
        first.leave()
        await until_still()
        assert order == ["one"]
        tasks.cancel_scope.cancel()
    assert not gate._queues


@pytest.mark.anyio
async def test_a_stream_takes_all_at_both_ends_or_nothing() -> None:
    """I8, and who waits for a busy registry holds up nobody who goes elsewhere."""
    gate = Gate()
    busy, free, target = (host(gate=gate) for _ in range(3))
    held = [busy.reading.take(0.0) for _ in range(busy.most_streams)]
    order: list[str] = []
    async with anyio.create_task_group() as tasks:
        needs = (busy.lane("blob_get"), busy.reading, target.lane("upload_body"), target.writing)
        tasks.start_soon(enter, gate, order, "busy", *needs)
        await until_still()
        assert (target.used, target.writing.used) == (0, 0)
        needs = (free.lane("blob_get"), free.reading, target.lane("upload_body"), target.writing)
        tasks.start_soon(enter, gate, order, "free", *needs)
        await until_still()
        assert order == ["free"]
        held[0].leave()
        await until_still()
        assert order == ["free", "busy"]


@pytest.mark.anyio
async def test_a_stop_ends_all_waits() -> None:
    gate = Gate()
    registry = host(1, gate=gate)
    lane = registry.lane("upload_start")
    await gate.enter(lane)
    failures: list[SyncError] = []

    async def wait() -> None:
        try:
            await gate.enter(lane)
        except SyncError as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(wait)
        await until_still()
        registry.stop(lost("gone"))
    assert len(failures) == 5
    assert not gate._queues


@pytest.mark.parametrize(("cap", "most"), [(1, 1), (2, 1), (3, 1), (5, 2), (17, 8), (50, 16)])
def test_streams_leave_permits_for_short_requests(cap: int, most: int) -> None:
    assert host(cap).most_streams == most


# Retries.


@pytest.mark.anyio
async def test_five_attempts_then_no_more() -> None:
    retry, registry = Retry(lambda: 0.0), host()
    for _ in range(4):
        await retry.pause(lost(), registry)
    with pytest.raises(Disconnected) as caught:
        await retry.pause(lost(), registry)
    assert caught.value.retries == 4


@pytest.mark.anyio
async def test_refusals_and_outages_use_up_no_attempt() -> None:
    retry, registry = Retry(lambda: 0.0), host()
    for _ in range(50):
        refusal = RegistryError("slowly", status=429)
        await retry.pause(refusal, registry)
        away = lost()
        away.away = registry
        await retry.pause(away, registry)


@pytest.mark.anyio
async def test_a_pause_that_is_too_long_for_the_caller_is_not_begun() -> None:
    asked = RegistryError("slowly", status=503, retry_after=30.0)
    with pytest.raises(RegistryError):
        await Retry(lambda: 0.0).pause(asked, host(), longest=20.0)


@pytest.mark.anyio
async def test_nothing_that_is_final_is_repeated() -> None:
    final = RegistryError("no", status=404)
    with pytest.raises(RegistryError):
        await Retry(lambda: 0.0).pause(final, host())


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_host_without_lanes_lets_one_ask_for_each_pause() -> None:
    reach = HostLimits("s.test", Gate(), chance=lambda: 0.0, log=quiet, timeouts=Timeouts())
    now = anyio.current_time()
    reach.record_answer(now)
    for _ in range(3):
        reach.record_failure(lost(), now, now)
    reach.probe_at = now + 1
    began: list[float] = []

    async def ask() -> None:
        await reach.wait()
        began.append(anyio.current_time())

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await anyio.sleep(1.2)
        assert len(began) == 1
        reach.record_answer(anyio.current_time())
    assert len(began) == 3


def test_what_each_need_gives_is_left() -> None:
    registry = host()
    turn = registry.lane("blob_get").take(0.0)
    turn.leave()
    turn.leave()
    registry.reading.take(0.0).leave()
    assert (registry.used, registry.reading.used) == (0, 0)


@pytest.mark.anyio
async def test_both_ends_of_a_body_at_one_registry_need_two_permits() -> None:
    gate = Gate()
    one = host(2, gate=gate)
    order: list[str] = []
    async with anyio.create_task_group() as tasks:
        (first,) = await gate.enter(one.lane("upload_start"))
        needs = (one.lane("blob_get"), one.lane("upload_body"))
        tasks.start_soon(enter, gate, order, "both", *needs)
        await until_still()
        assert (one.used, order) == (1, [])
        first.leave()
        await until_still()
        assert order == ["both"]
