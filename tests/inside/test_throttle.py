"""The arithmetic of waiting: permits, pauses, what Retry-After says."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.net.wire import parse_retry_after
from _regsync.providers import DIALECTS, Limits
from _regsync.registry.throttle import (
    LARGE_BODY,
    UNDER_WAY,
    CongestionWindow,
    Demand,
    RegistryLimits,
    Remaining,
    RetryBudget,
    Slot,
    backoff,
    has_permits,
    parse_quota,
    refresh_next_opening,
    release,
    take,
)

A, B = Demand("a"), Demand("b")
READ_A, READ_B, WRITE_A, WRITE_B = (
    Demand(host, body) for body in ("read", "write") for host in "ab"
)
LARGE_READ, LARGE_WRITE = Demand("a", "read", True), Demand("b", "write", True)


def limits(**caps: int) -> dict[str, RegistryLimits]:
    return {host: RegistryLimits(cap) for host, cap in caps.items()}


def state(held: dict[str, RegistryLimits]) -> dict[str, tuple[int, int, dict[str, int]]]:
    return {
        host: (limit.in_use, limit.bodies, dict(limit.large_bodies)) for host, limit in held.items()
    }


def places(
    held: dict[str, RegistryLimits], wants: tuple[Demand, ...], now: float
) -> list[Slot] | None:
    """Take all that `wants` name, as the gate does, and return the places in windows."""
    if not has_permits(held, wants) or refresh_next_opening(held, wants, now) > now:
        return None
    return take(held, wants, now)


def admit(held: dict[str, RegistryLimits], wants: tuple[Demand, ...], now: float = 0.0) -> bool:
    """Take all that `wants` name, or nothing."""
    return places(held, wants, now) is not None


def filled(held: dict[str, RegistryLimits], wants: tuple[Demand, ...]) -> int:
    """Admit as often as possible; return how often."""
    count = 0
    while admit(held, wants):
        count += 1
    return count


def test_admission_takes_all_or_nothing() -> None:
    held = limits(a=5, b=1)
    assert admit(held, (B,))
    before = state(held)
    assert not admit(held, (READ_A, WRITE_B))
    assert state(held) == before
    release(held, (B,))
    assert admit(held, (READ_A, WRITE_B))
    assert (held["a"].in_use, held["b"].in_use) == (1, 1)


@pytest.mark.parametrize(
    ("cap", "bodies"), [(1, 1), (2, 1), (3, 2), (4, 2), (10, 8), (50, 40), (100, 80)]
)
def test_a_fifth_and_at_least_two_stay_for_short_requests(cap: int, bodies: int) -> None:
    held = limits(a=cap)
    assert filled(held, (READ_A,)) == bodies
    assert filled(held, (A,)) == cap - bodies


def test_transfer_inside_one_registry_takes_two_permits() -> None:
    held = limits(a=50)
    assert filled(held, (READ_A, WRITE_A)) == 20
    assert (held["a"].in_use, held["a"].bodies) == (40, 40)


@pytest.mark.parametrize("cap", [2, 3, 4])
def test_transfer_inside_one_registry_fits_the_smallest_limit_once(cap: int) -> None:
    held = limits(a=cap)
    assert filled(held, (READ_A, WRITE_A)) == 1
    release(held, (READ_A, WRITE_A))
    assert held["a"].in_use == held["a"].bodies == 0


def test_eight_large_bodies_stream_from_one_registry_and_eight_to_one() -> None:
    held = limits(a=50, b=50)
    assert filled(held, (LARGE_READ, LARGE_WRITE)) == 8
    assert filled(held, (LARGE_READ,)) == filled(held, (LARGE_WRITE,)) == 0
    # The other direction has its own eight; small bodies and short requests none of it.
    assert filled(held, (Demand("a", "write", True),)) == 8
    assert filled(held, (READ_A,)) == 50 - 10 - 16
    assert admit(held, (A,))


WANTS = st.sampled_from(
    [
        (A,),
        (B,),
        (READ_A, WRITE_B),
        (READ_A, WRITE_A),
        (LARGE_READ, LARGE_WRITE),
        (LARGE_READ,),
        (WRITE_B,),
    ]
)


@given(
    st.integers(1, 60), st.integers(1, 60), st.lists(st.tuples(WANTS, st.booleans()), max_size=150)
)
def test_no_sequence_of_admissions_breaks_a_limit(
    a: int, b: int, steps: list[tuple[tuple[Demand, ...], bool]]
) -> None:
    held, inside = limits(a=a, b=b), list[tuple[Demand, ...]]()
    for wants, leave in steps:
        if leave and inside:
            release(held, inside.pop(0))
        before = state(held)
        if admit(held, wants):
            inside.append(wants)
        else:
            assert state(held) == before
        for host, cap in (("a", a), ("b", b)):
            limit, mine = (
                held[host],
                [want for taken in inside for want in taken if want.host == host],
            )
            bodies = [want for want in mine if want.body]
            assert limit.in_use == len(mine) <= cap
            # One transfer inside a registry may hold two where the limit leaves room for one body.
            assert limit.bodies == len(bodies) <= max(2, cap - max(2, cap // 5))
            for body in ("read", "write"):
                large = sum(want.is_large and want.body == body for want in bodies)
                assert limit.large_bodies[body] == large <= 8
    for wants in inside:
        release(held, wants)
    assert state(held) == state(limits(a=a, b=b))


@given(WANTS, st.integers(2, 60), st.integers(2, 60))
def test_everything_fits_limits_that_are_idle(wants: tuple[Demand, ...], a: int, b: int) -> None:
    assert admit(limits(a=a, b=b), wants)


def test_large_is_what_design_says() -> None:
    assert LARGE_BODY == 1024 * 1024


@pytest.mark.parametrize(
    ("attempt", "most"), [(1, 0.5), (2, 1), (3, 2), (4, 4), (7, 30), (1000, 30), (9999, 30)]
)
def test_pause_doubles_from_half_a_second_to_thirty_with_full_jitter(
    attempt: int, most: float
) -> None:
    assert backoff(attempt, 0.0) == 0
    assert backoff(attempt, 0.5) == most / 2
    assert backoff(attempt, 1.0) == most


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("0", 0),
        (" 120 ", 120),
        ("9" * 4000, 999_999_999),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10),
        ("Thursday, 01-Jan-70 00:16:50 GMT", 10),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Thu, 01 Jan 1970 00:16:50 -0000", 10),
        ("Thu, 01 Jan 1970 01:16:50 +0100", 10),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("\u0661", None),
        ("Mon, 99 Foo 2020", None),
        ("Thu, 01 Jan 99999999999 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_or_nothing(
    value: str | None, seconds: float | None
) -> None:
    assert parse_retry_after(value, 1000.0) == seconds


@given(st.text("0123456789 :,-+GMTJanThu\u0661\x00", max_size=40))
def test_no_retry_after_is_a_crash(value: str) -> None:
    parsed = parse_retry_after(value, 1000.0)
    assert parsed is None or parsed >= 0


# Buckets: a rate and a burst, and never more in any second than both together.

BUCKETS = sorted(
    {
        (pace.rate, pace.burst)
        for dialect in DIALECTS.values()
        for pace in dialect.limits
        if pace.rate
    }
)


def metered(pace: Limits, cap: int = 50) -> tuple[dict[str, RegistryLimits], Demand]:
    held = {"a": RegistryLimits(cap, (pace,))}
    return held, Demand(
        "a", meters=held["a"].meter_names("app", pace.actions.split()[0]), has_permit=True
    )


@given(
    st.sampled_from(BUCKETS),
    st.lists(st.floats(0, 0.7), min_size=1, max_size=60),
    st.floats(0, 1e6),
)
def test_no_second_has_more_than_rate_and_burst(
    bucket: tuple[int, int], waits: list[float], start: float
) -> None:
    """Whoever asks as often as they can, with pauses of any length, in whatever second one looks."""
    rate, burst = bucket
    held, want = metered(Limits("x", 10_000, rate, burst), 10_000)
    now, taken = start, list[float]()
    for wait in waits:
        now += wait
        for _ in range(burst + 5):
            if not admit(held, (want,), now):
                now = refresh_next_opening(held, (want,), now)
                assert admit(held, (want,), now), "it said when"
            taken.append(now)
    for first, at in enumerate(taken):
        within = sum(at <= other < at + 1 for other in taken[first:])
        assert within <= rate + burst


@pytest.mark.parametrize(("rate", "burst"), BUCKETS)
def test_a_bucket_gives_its_burst_at_once_then_its_rate(rate: int, burst: int) -> None:
    held, want = metered(Limits("x", 10_000, rate, burst), 10_000)
    now, taken = 100.0, list[float]()
    while len(taken) < burst + 3 * rate:
        if admit(held, (want,), now):
            taken.append(now)
        else:
            now = refresh_next_opening(held, (want,), now)
    assert taken[:burst] == pytest.approx([100.0] * burst, abs=1e-5)
    assert taken[-1] == pytest.approx(100 + 3, abs=1e-3)


@pytest.mark.parametrize("seconds", [0.005, 0.01, 0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize(("action", "cap"), [("upload_start", 100), ("upload_body", 500)])
def test_handshakes_that_delay_requests_leave_ecrs_caps_alone(
    action: str, cap: int, seconds: float
) -> None:
    """A token is taken before a connection is made, which for TLS 1.3 takes two round trips: those
    who find a connection catch up with those who wait for one.
    """
    pace = next(each for each in DIALECTS["ecr"].limits if each.actions == action)
    held, want = metered(pace)
    meter = held["a"].meters[want.meters[0]]
    now, idle, arrived = 0.0, 0, list[float]()
    answers: list[tuple[float, int]] = []
    while now < 5:
        if slots := places(held, (want,), now):
            delay = 0.0 if idle else 2 * seconds
            idle = max(0, idle - 1)
            arrived.append(now + delay)
            heapq.heappush(answers, (now + delay + seconds, slots[0].number))
            continue
        opens = refresh_next_opening(held, (want,), now)
        times = [at for at, _ in answers[:1]]
        now = min([opens, *times] if opens > now else times)
        while answers and answers[0][0] <= now:
            at, number = heapq.heappop(answers)
            meter.record_answer(number, 200, at)
            idle += 1
    arrived.sort()
    assert all(bisect_left(arrived, at + 1 - 1e-9) - n <= cap for n, at in enumerate(arrived))


def test_a_request_draws_a_token_of_every_step_it_does() -> None:
    held = {"a": RegistryLimits(50, DIALECTS["ecr"].limits)}
    whole = Demand("a", meters=held["a"].meter_names("app", "upload_finish", "upload_body"))
    for meter in held["a"].meters.values():
        meter.window.width = 50.0
    assert [admit(held, (whole,), 1e-5 * (number == 17)) for number in range(19)] == [True] * 18 + [
        False
    ]
    assert held["a"].in_use == 18, "nothing was taken for the one that lacks a token"
    assert refresh_next_opening(held, (whole,), 0.0) == pytest.approx(1 / 80, abs=1e-5)
    body = Demand("a", meters=held["a"].meter_names("app", "upload_body"))
    assert refresh_next_opening(held, (body,), 0.0) <= 0.0, "the other bucket has more"


# Windows.


class Window:
    """A meter without a bucket, and what was let in."""

    def __init__(self, start: int, cap: int) -> None:
        self.held, self.want = metered(Limits("x", start), cap)
        self.meter = self.held["a"].meters["x"]

    def enter(self, now: float, *, is_discovery: bool = False) -> int | None:
        want = self.want._replace(is_discovery=is_discovery)
        slots = places(self.held, (want,), now)
        return None if slots is None else slots[0].number

    def entered(self, now: float) -> int:
        number = self.enter(now)
        assert number is not None
        return number


@given(
    st.integers(1, 60),
    st.sampled_from([1, 4, 8, 32]),
    st.lists(
        st.tuples(
            st.sampled_from(["in", "ok", "404", "429", "503", "cut", "wait"]), st.integers(0, 9)
        )
    ),
)
def test_a_window_stays_between_one_and_the_limit(
    cap: int, start: int, steps: list[tuple[str, int]]
) -> None:
    window, inside, now = Window(start, cap), list[int](), 0.0
    ends = {"ok": 200, "404": 404, "429": 429, "503": 503}
    for step, which in steps:
        if step == "wait":
            now += which / 7
        elif step == "in":
            width = window.meter.width
            if (number := window.enter(now)) is not None:
                inside.append(number)
                assert len(inside) <= max(1, min(int(width), cap))
        elif inside:
            before = window.meter.width
            number = inside.pop(which % len(inside))
            if step == "cut":
                window.meter.discard(number)
            else:
                window.meter.record_answer(number, ends[step], now, 0.0, 0.5)
            after = window.meter.width
            if step in ("ok", "404"):
                assert after == pytest.approx(max(min(before + 1 / before, cap), min(before, cap)))
            elif step == "429":
                assert after in (before, max(1.0, before / 2))
            else:
                assert after == before
        assert 1 <= window.meter.width <= max(cap, start)


@given(st.integers(2, 40), st.data())
def test_429s_at_the_same_time_halve_once(count: int, data: st.DataObject) -> None:
    window = Window(50, 50)
    numbers = data.draw(st.permutations([window.entered(0.0) for _ in range(count)]))
    for delay, number in enumerate(numbers):
        window.meter.record_answer(number, 429, 1.0 + delay * data.draw(st.floats(0, 30)), 0.0, 0.0)
        assert window.meter.width == 25


def test_a_429_to_an_older_request_does_not_halve_again_and_a_newer_one_does() -> None:
    window = Window(16, 50)
    old, first = window.entered(0.0), window.entered(0.0)
    window.meter.record_answer(first, 429, 1.0)
    new = window.entered(1.0)
    window.meter.record_answer(old, 429, 60.0)
    assert window.meter.width == 8
    window.meter.record_answer(new, 429, 60.0)
    assert window.meter.width == 4


def test_an_epoch_lasts_100_ms_and_who_is_refused_in_it_waits_for_its_end() -> None:
    window = Window(16, 50)
    window.meter.record_answer(window.entered(1.0), 429, 1.0)
    window.meter.record_answer(window.entered(1.01), 429, 1.02)
    assert (window.meter.width, window.meter.paused_until) == (8, pytest.approx(1.1))
    window.meter.record_answer(window.entered(1.1), 429, 1.1)
    assert window.meter.width == 4


def test_refusals_in_a_row_pause_longer_and_a_success_ends_that() -> None:
    window, pauses, now = Window(16, 50), list[float](), 0.0
    for status in (429, 429, 429, 200, 429):
        window.meter.record_answer(window.entered(now), status, now, 0.0, 1.0)
        pauses.append(max(0.0, window.meter.paused_until - now))
        now += 100
    assert pauses == [0.5, 1.0, 2.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("status", "asked", "paused"),
    [(429, 30.0, 30.0), (503, 30.0, 30.0), (429, 301.0, 0.0), (503, 0.0, 0.0)],
)
def test_what_is_asked_for_pauses_the_window_unless_nobody_waits_so_long(
    status: int, asked: float, paused: float
) -> None:
    window = Window(16, 50)
    window.meter.record_answer(window.entered(10.0), status, 10.0, asked, 0.0)
    assert max(10.0, window.meter.paused_until) == 10 + paused
    assert (window.enter(10.0) is None) == bool(paused)
    assert window.enter(10 + paused) is not None


def test_a_body_holds_its_place_for_a_second_and_then_counts_as_a_success() -> None:
    window = Window(1, 50)
    number = window.entered(5.0)
    window.meter.window.presumed_success_at[number] = 5.5 + UNDER_WAY
    assert window.enter(6.49) is None
    assert refresh_next_opening(window.held, (window.want,), 6.0) == 6.5
    assert window.enter(6.5) is not None
    assert window.meter.width == 2
    window.meter.record_answer(number, 201, 9.0)
    assert window.meter.width == 2, "not twice"
    window.meter.record_answer(number, 429, 9.0)
    assert window.meter.width == 1, "but a refusal after all is one"


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_error_leaves_the_window_as_it_is(status: int) -> None:
    window = Window(4, 50)
    window.meter.record_answer(window.entered(0.0), status, 0.0)
    assert window.meter.width == 4


def test_a_short_request_holds_its_place_until_it_is_answered() -> None:
    window = Window(1, 50)
    window.entered(0.0)
    assert refresh_next_opening(window.held, (window.want,), 0.0) == math.inf
    assert window.enter(1e9) is None


def test_one_piece_of_work_may_draw_twice_on_a_window_of_one() -> None:
    """A GET and the PUT of what it gives, inside one registry of one window: the PUT follows the
    GET's answer.
    """
    held = {"a": RegistryLimits(2, DIALECTS["gar"].limits, per_project=True)}
    meters = held["a"].meter_names("p/app", "blob_get")
    held["a"].meters[meters[0]].window.width = 1.0
    get, put = Demand("a", "read", meters=meters), Demand("a", "write", meters=meters)
    assert admit(held, (get, put), 0.0)


def test_projects_of_a_google_host_have_windows_of_their_own() -> None:
    held = RegistryLimits(50, DIALECTS["gar"].limits, per_project=True)
    assert (
        held.meter_names("p/a", "blob_get")
        == held.meter_names("p/b", "manifest_put")
        != held.meter_names("q/a", "blob_get")
    )
    other = RegistryLimits(50, DIALECTS["ghcr"].limits)
    assert other.meter_names("p/a", "blob_get") == other.meter_names("q/a", "blob_get")


# Quotas.


@pytest.mark.parametrize(
    ("headers", "quota"),
    [
        ({}, None),
        ({"ratelimit-remaining": "20;w=21600", "ratelimit-limit": "100;w=21600"}, (20, 21600)),
        ({"ratelimit-remaining": "0", "ratelimit-limit": "100;w=3600"}, (0, 3600)),
        ({"ratelimit-remaining": "7", "ratelimit-reset": "30"}, (7, 30)),
        ({"x-ratelimit-remaining": "7", "x-ratelimit-reset": "2000000050"}, (7, 50)),
        ({"x-ratelimit-remaining": "7"}, (7, 60)),
        ({"ratelimit-remaining": "5;q=1;w=9"}, (5, 9)),
        ({"ratelimit-limit": "100;w=60"}, None),
        ({"ratelimit-remaining": "many"}, None),
        ({"ratelimit-remaining": "-1"}, None),
        ({"ratelimit-remaining": "\u0661"}, None),
    ],
)
def test_what_is_left_of_a_quota_is_read_from_headers(
    headers: dict[str, str], quota: tuple[int, float] | None
) -> None:
    assert parse_quota(headers.get, 2e9) == quota


@given(
    st.dictionaries(
        st.sampled_from(["remaining", "limit", "reset"]),
        st.text("0123456789;w= \u0661\x00-", max_size=30),
    )
)
def test_no_quota_is_a_crash(headers: dict[str, str]) -> None:
    found = parse_quota({f"ratelimit-{name}": value for name, value in headers.items()}.get, 1e9)
    assert found is None or found.requests >= 0


def test_discovery_rests_when_a_quota_is_used_up_and_execution_does_not() -> None:
    window = Window(16, 50)
    discovering = window.want._replace(is_discovery=True)
    for step, (left, pause) in enumerate(((100, 0), (1, 0), (0, 60), (0, 60), (50, 0))):
        now = 1000.0 * step
        number = window.entered(now)
        window.meter.record_answer(number, 200, now)
        assert window.meter.quota.update(now, number, Remaining(left, 60.0))
        assert max(now, refresh_next_opening(window.held, (discovering,), now)) == now + pause
        window.meter.discard(window.entered(now))  # execution goes on


def test_after_a_rest_one_request_asks_whether_there_is_room_again() -> None:
    window = Window(16, 50)
    window.meter.quota.update(0.0, window.entered(0.0), Remaining(0, 60.0))
    window.meter.record_answer(1, 200, 0.0)
    number = window.enter(60.0, is_discovery=True)
    assert number is not None
    assert window.enter(60.0, is_discovery=True) is None
    window.meter.record_answer(number, 200, 61.0)
    assert window.meter.quota.update(61.0, number, Remaining(3, 60.0))
    asked = [window.enter(61.0, is_discovery=True) for _ in range(4)]
    assert [number is not None for number in asked] == [True, True, True, False]


def test_no_more_are_sent_than_the_quota_has_left_whatever_answers_overtake() -> None:
    window = Window(16, 50)
    numbers = [window.entered(0.0) for _ in range(4)]
    for left, number in ((4, numbers[3]), (6, numbers[1]), (7, numbers[0]), (5, numbers[2])):
        window.meter.record_answer(number, 200, 1.0)
        assert window.meter.quota.update(1.0, number, Remaining(left, 21600.0))
    # Of those that were inside when 4 were left all three may have come after that.
    assert [window.enter(1.0, is_discovery=True) for _ in range(2)] == [5, None]
    assert window.enter(1.0) == 6, "execution goes on"
    window.meter.record_answer(5, 200, 2.0)
    assert window.meter.quota.update(2.0, 5, Remaining(3, 21600.0))
    assert [window.enter(2.0, is_discovery=True) for _ in range(3)] == [7, 8, None]


def test_answers_that_never_come_do_not_block_a_quota_for_ever() -> None:
    window = Window(16, 50)
    first, lost = window.entered(0.0), window.entered(0.0)
    window.meter.record_answer(first, 200, 1.0)
    assert window.meter.quota.update(1.0, first, Remaining(2, 21600.0))
    number = window.enter(1.0, is_discovery=True)
    assert number is not None
    assert window.enter(1.0, is_discovery=True) is None
    for each in (lost, number):
        window.meter.discard(each)
    assert window.enter(1.0, is_discovery=True) is not None


@pytest.mark.parametrize(
    ("left", "seconds", "goes_on"), [(0, 300, True), (0, 301, False), (1, 21600, True)]
)
def test_a_quota_that_is_used_up_for_longer_than_a_run_waits_is_said(
    left: int, seconds: float, goes_on: bool
) -> None:
    assert Window(16, 50).meter.quota.update(0.0, 0, Remaining(left, seconds)) is goes_on


def test_a_window_of_one_request_is_not_narrowed_further() -> None:
    window = CongestionWindow(1)
    for moment in range(5):
        number = window.enter()
        window.leave(number)
        window.record_refusal(number, float(moment), 1.0)
    assert window.width == 1.0
    window.record_success(50)
    assert window.width == 2.0


def test_a_request_with_two_meters_takes_a_token_of_each() -> None:
    limit = RegistryLimits(50, (Limits("upload_finish", rate=100), Limits("upload_body", rate=1)))
    want = Demand("a", meters=limit.meter_names("repository", "upload_finish", "upload_body"))
    assert admit({"a": limit}, (want,), 10.0)
    assert refresh_next_opening({"a": limit}, (want,), 10.0) == pytest.approx(11.0, abs=0.001)


def test_a_registry_that_throttles_for_ten_minutes_is_given_up() -> None:
    budget = RetryBudget(5)
    for moment in range(0, 601, 30):
        assert budget.take_attempt(float(moment), 0.5, is_throttled=True) is not None
    assert budget.take_attempt(601.0, 0.5, is_throttled=True) is None
