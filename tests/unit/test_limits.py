"""Windows, epochs, buckets, caps, streams, and registries that are away, on a clock that is an argument
or that jumps.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext, suppress

import anyio
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
    backoff,
    is_gateway_failure,
    quota_wait,
)

GROUPS = (Limits("upload_start upload_body", 4), Limits("blob_get", 8, rate=2, burst=3))


def host(cap=50, *, gate=None, has_answered=True, groups=GROUPS):
    made = HostLimits(
        "r.test",
        gate or Gate(),
        chance=lambda: 0.5,
        log=lambda *_, **__: None,
        timeouts=Timeouts(),
        cap=cap,
        groups=groups,
    )
    if has_answered:
        made.record_answer(0.0)
    return made


def upload_lane(cap=50):
    return host(cap).lane("upload_start")


def lost():
    return Disconnected("connection reset")


# The window.


def test_successes_widen_the_window_by_one_each_round():
    lane = upload_lane()
    for _ in range(4):
        lane.take(0.0).record_answer(201, 0.0)
    assert 4.8 < lane.width < 5.1
    assert lane.used == 0


def test_a_burst_of_refusals_halves_the_window_once():
    lane = upload_lane()
    first, *others = [lane.take(0.0) for _ in range(4)]
    first.record_answer(429, 1.0)
    assert lane.paused_until == pytest.approx(1.0 + backoff(1, 0.5))
    for seconds, turn in enumerate(others, 2):  # long after the epoch
        turn.record_answer(429, float(seconds))
    assert lane.width == 2


def test_what_was_admitted_after_a_halving_ends_its_epoch_and_a_window_of_one_stays_one():
    lane = upload_lane()
    widths = []
    for now in (0.0, 0.2, 1.0):
        lane.take(now).record_answer(429, now)
        widths.append(lane.width)
    assert widths == [2, 1, 1]


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_error_changes_no_window(status):
    lane = upload_lane()
    lane.take(0.0).record_answer(status, 0.0)
    assert lane.width == 4


def test_a_pause_that_is_asked_for_is_everybodys_and_has_a_bound():
    lane = upload_lane()
    lane.take(0.0).record_answer(429, 0.0, 40.0)
    assert lane.opens_at() == 40
    lane.take(50.0).record_answer(503, 50.0, 1e9)
    assert lane.opens_at() == 50 + LONGEST_WAIT


def test_a_place_is_free_when_the_head_is_there_and_the_permit_in_the_end():
    registry = host(1)
    turn = registry.lane("upload_start").take(0.0)
    assert registry.lane("blob_get").opens_at() == math.inf
    turn.record_answer(200, 0.0)
    assert registry.lane("upload_start").used == 0
    assert registry.lane("blob_get").opens_at() == math.inf
    turn.leave()
    turn.leave()
    registry.reading.take(0.0).leave()
    assert (registry.used, registry.reading.used) == (0, 0)
    assert registry.lane("blob_get").opens_at() < math.inf


@given(st.lists(st.tuples(st.sampled_from(["take", "answer", "refuse", "leave"]), st.floats(0, 2))))
def test_whatever_comes_counts_are_never_below_nothing_nor_above_the_window(steps):
    registry = host(5)
    lane, turns, now = registry.lane("upload_start"), [], 0.0
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


@pytest.mark.parametrize(("cap", "most"), [(1, 1), (2, 1), (3, 1), (5, 2), (17, 8), (50, 16)])
def test_streams_leave_permits_for_short_requests(cap, most):
    assert host(cap).most_streams == most


def test_projects_have_lanes_of_their_own():
    registry = host()
    assert registry.lane("blob_get", "one") is not registry.lane("blob_get", "two")
    assert registry.lane("upload_start", "one") is registry.lane("upload_body", "one")


# The bucket, and quotas.


@given(st.integers(1, 50), st.integers(1, 20))
def test_a_bucket_gives_its_burst_at_once_and_then_its_rate(rate, burst):
    bucket, now, given_at = Bucket(rate, burst), 100.0, []
    while len(given_at) < burst + 2 * rate:
        now = max(now, bucket.next_token())
        bucket.take(now)
        given_at.append(now)
    assert given_at[burst - 1] == pytest.approx(100.0, abs=1e-3)
    for first in given_at:
        assert len([at for at in given_at if first <= at < first + 1]) <= rate + burst


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
def test_a_quota_without_rest_says_when_it_is_renewed(headers, seconds):
    assert quota_wait(headers.get, 2e9) == seconds


# A registry that is away.


def test_the_first_request_to_a_registry_goes_alone():
    registry = host(has_answered=False)
    turn = registry.lane("upload_start").take(0.0)
    assert turn.is_probe
    assert registry.lane("blob_get").opens_at() == math.inf
    registry.record_answer(0.1)
    assert registry.lane("blob_get").opens_at() <= 0.1


def test_three_failures_in_a_row_make_it_away_and_an_answer_ends_that():
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
    assert (registry.is_away, lane.width) == (False, 2.0)


@pytest.mark.virtual_time
async def test_a_body_that_ends_an_outage_may_take_longer_than_one():
    registry = host()
    for _ in range(3):
        registry.record_failure(lost(), 0.0, anyio.current_time())
    with registry.limiting():
        await anyio.sleep(100)
        registry.record_answer(anyio.current_time())  # the body is taken
        await anyio.sleep(1000)
    assert not registry.is_out


def test_failures_of_requests_from_before_say_nothing_when_it_is_over():
    registry = host()
    for _ in range(3):
        registry.record_failure(lost(), 1.0, 2.0)
    registry.record_answer(5.0)
    for _ in range(9):
        late = lost()
        registry.record_failure(late, 4.0, 6.0)
        assert late.away is registry, "it goes again at once"
    assert not registry.is_away


def test_probes_become_rarer_and_the_wait_ends_after_two_minutes():
    registry, now, probes = host(), 100.0, []
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


@pytest.mark.virtual_time
async def test_one_that_never_answered_is_waited_for_fifteen_seconds():
    registry, now = host(has_answered=False), anyio.current_time()
    registry.record_failure(ConnectFailed("refused"), now, now + 1)
    assert registry.gives_up_at == now + 15
    await anyio.sleep(14.9)
    registry.raise_if_stopped()
    await anyio.sleep(0.1)
    with pytest.raises(SyncError, match="waited for 15s"):
        registry.raise_if_stopped()


def test_an_untrusted_certificate_is_not_waited_for():
    registry = host(has_answered=False)
    for _ in range(3):
        assert registry.stop_error is None
        failure = ConnectFailed("not trusted")
        failure.retryable = False
        registry.record_failure(failure, 0.0, 0.0)
    assert registry.stop_error is not None


async def test_a_stopped_registry_is_tried_once_in_the_next_run():
    registry = host(has_answered=False)
    registry.record_failure(lost(), 0.0, 0.0)
    registry.record_failure(lost(), 15.0, 15.0)
    assert registry.stop_error is not None
    registry.begin_run()
    registry.raise_if_stopped()
    registry.record_failure(lost(), 21.0, 21.0)
    assert registry.stop_error is not None


async def test_a_lane_that_asks_for_hours_is_closed_until_then():
    lane, now = upload_lane(), anyio.current_time()
    lane.stop(RegistryError("slowly", status=429), until=now + 5000.0)
    with pytest.raises(RegistryError):
        lane.opens_at()
    assert lane.host.lane("blob_get").opens_at() < now
    lane.stop(RegistryError("slowly", status=429), until=now)
    assert lane.opens_at() < now


@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [(502, None, True), (503, None, True), (503, 5.0, False), (500, None, False), (429, None, False)],
)  # fmt: skip
def test_a_gateways_answer_that_names_no_time_is_none(status, retry_after, expected):
    assert is_gateway_failure(status, retry_after) is expected


@pytest.mark.virtual_time
async def test_a_host_without_lanes_lets_one_ask_for_each_pause():
    reach, now, began = host(groups=(), has_answered=False), anyio.current_time(), []
    reach.chance = lambda: 0.0
    reach.record_answer(now)
    for _ in range(3):
        reach.record_failure(lost(), now, now)
    reach.probe_at = now + 1

    async def ask():
        await reach.wait()
        began.append(anyio.current_time())

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await anyio.sleep(1.2)
        assert len(began) == 1
        reach.record_answer(anyio.current_time())
    assert len(began) == 3


# Those who wait.


@pytest.mark.virtual_time
async def test_who_waits_comes_in_turn_and_who_is_cancelled_leaves_nothing():
    gate, order, scope = Gate(), [], anyio.CancelScope()
    lane = host(1, gate=gate).lane("upload_start")
    (first,) = await gate.enter(lane)

    async def enter(name, within):
        with within:
            turn = await gate.enter(lane)
            order.append(name)
            turn[0].leave()

    async with anyio.create_task_group() as tasks:
        for name, within in (("one", nullcontext()), ("cancelled", scope), ("two", nullcontext())):
            tasks.start_soon(enter, name, within)
            await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert order == []
        first.leave()
        await enter("newcomer", nullcontext())  # asks before "one" has looked
    assert order == ["one", "two", "newcomer"]
    assert not gate._queues, "nobody is left"


@pytest.mark.virtual_time
async def test_a_stream_takes_all_at_both_ends_or_nothing():
    """I8, and who waits for a busy registry holds up nobody who goes elsewhere."""
    gate, order = Gate(), []
    busy, free, target = (host(gate=gate) for _ in range(3))
    held = [busy.reading.take(0.0) for _ in range(busy.most_streams)]

    async def enter(name, source):
        into = (target.lane("upload_body"), target.writing)
        await gate.enter(source.lane("blob_get"), source.reading, *into)
        order.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter, "busy", busy)
        await anyio.wait_all_tasks_blocked()
        assert (target.used, target.writing.used) == (0, 0)
        tasks.start_soon(enter, "free", free)
        await anyio.wait_all_tasks_blocked()
        assert order == ["free"]
        held[0].leave()
    assert order == ["free", "busy"]
    assert not gate._queues, "nobody is left"


@pytest.mark.virtual_time
async def test_both_ends_of_a_body_at_one_registry_need_two_permits():
    gate = Gate()
    one = host(2, gate=gate)
    (first,) = await gate.enter(one.lane("upload_start"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gate.enter, one.lane("blob_get"), one.lane("upload_body"))
        await anyio.wait_all_tasks_blocked()
        assert one.used == 1
        first.leave()
    assert one.used == 2


# Retries.


async def test_five_attempts_then_no_more():
    retry, registry = Retry(lambda: 0.0), host()
    for _ in range(4):
        await retry.pause(lost(), registry)
    with pytest.raises(Disconnected) as caught:
        await retry.pause(lost(), registry)
    assert caught.value.retries == 4


async def test_refusals_and_outages_use_up_no_attempt():
    retry, registry = Retry(lambda: 0.0), host()
    for _ in range(50):
        await retry.pause(RegistryError("slowly", status=429), registry)
        away = lost()
        away.away = registry
        await retry.pause(away, registry)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("error", "longest"),
    [
        (RegistryError("slowly", status=503, retry_after=30.0), 20.0),
        (RegistryError("no", status=404), math.inf),
    ],
    ids=["a pause that is too long for the caller", "what is final"],
)
async def test_what_is_not_worth_a_pause_is_raised_at_once(error, longest):
    began = anyio.current_time()
    with pytest.raises(RegistryError):
        await Retry(lambda: 0.0).pause(error, host(), longest=longest)
    assert anyio.current_time() == began


@pytest.mark.virtual_time
async def test_what_is_throttled_for_ten_minutes_is_given_up_though_others_succeed():
    retry, error = Retry(lambda: 0.5), RegistryError("throttled", status=429)
    with anyio.move_on_after(1000), suppress(RegistryError):
        while True:
            await retry.pause(error, host())
    assert anyio.current_time() == pytest.approx(600, abs=10)
