"""The arithmetic of waiting: permits, pauses, what Retry-After says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.pacing import LARGE_BODY, Limit, Want, admit, backoff, parse_retry_after, release

A, B = Want("a"), Want("b")
READ_A, READ_B, WRITE_A, WRITE_B = (Want(host, body) for body in ("read", "write") for host in "ab")
LARGE_READ, LARGE_WRITE = Want("a", "read", True), Want("b", "write", True)


def limits(**caps: int) -> dict[str, Limit]:
    return {host: Limit(cap) for host, cap in caps.items()}


def state(held: dict[str, Limit]) -> dict[str, tuple[int, int, dict[str, int]]]:
    return {host: (limit.in_use, limit.bodies, dict(limit.large)) for host, limit in held.items()}


def filled(held: dict[str, Limit], wants: tuple[Want, ...]) -> int:
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


@pytest.mark.parametrize(("cap", "bodies"), [(1, 1), (2, 1), (3, 1), (4, 2), (10, 8), (50, 40), (100, 80)])
def test_a_fifth_and_at_least_two_stay_for_short_requests(cap: int, bodies: int) -> None:
    held = limits(a=cap)
    assert filled(held, (READ_A,)) == bodies
    assert filled(held, (A,)) == cap - bodies


def test_short_requests_may_use_every_permit() -> None:
    assert filled(limits(a=7), (A,)) == 7


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
    assert filled(held, (Want("a", "write", True),)) == 8
    assert filled(held, (READ_A,)) == 50 - 10 - 16
    assert admit(held, (A,))


def test_returned_permits_are_there_for_others() -> None:
    held = limits(a=50, b=50)
    filled(held, (LARGE_READ, LARGE_WRITE))
    release(held, (LARGE_READ, LARGE_WRITE))
    assert filled(held, (LARGE_READ, LARGE_WRITE)) == 1


WANTS = st.sampled_from(
    [(A,), (B,), (READ_A, WRITE_B), (READ_A, WRITE_A), (LARGE_READ, LARGE_WRITE), (LARGE_READ,), (WRITE_B,)]
)


@given(st.integers(1, 60), st.integers(1, 60), st.lists(st.tuples(WANTS, st.booleans()), max_size=150))
def test_no_sequence_of_admissions_breaks_a_limit(a: int, b: int, steps: list[tuple[tuple[Want, ...], bool]]) -> None:
    held, inside = limits(a=a, b=b), list[tuple[Want, ...]]()
    for wants, leave in steps:
        if leave and inside:
            release(held, inside.pop(0))
        before = state(held)
        if admit(held, wants):
            inside.append(wants)
        else:
            assert state(held) == before
        for host, cap in (("a", a), ("b", b)):
            limit, mine = held[host], [want for taken in inside for want in taken if want.host == host]
            bodies = [want for want in mine if want.body]
            assert limit.in_use == len(mine) <= cap
            # One transfer inside a registry may hold two where the limit leaves room for one body.
            assert limit.bodies == len(bodies) <= max(2, cap - max(2, cap // 5))
            for body in ("read", "write"):
                large = sum(want.large and want.body == body for want in bodies)
                assert limit.large[body] == large <= 8
    for wants in inside:
        release(held, wants)
    assert state(held) == state(limits(a=a, b=b))


@given(WANTS, st.integers(2, 60), st.integers(2, 60))
def test_everything_fits_limits_that_are_idle(wants: tuple[Want, ...], a: int, b: int) -> None:
    assert admit(limits(a=a, b=b), wants)


def test_large_is_what_design_says() -> None:
    assert LARGE_BODY == 1024 * 1024


@pytest.mark.parametrize(("attempt", "most"), [(1, 0.5), (2, 1), (3, 2), (4, 4), (7, 30), (1000, 30), (9999, 30)])
def test_pause_doubles_from_half_a_second_to_thirty_with_full_jitter(attempt: int, most: float) -> None:
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
def test_retry_after_is_seconds_or_a_date_or_nothing(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, 1000.0) == seconds


@given(st.text("0123456789 :,-+GMTJanThu\u0661\x00", max_size=40))
def test_no_retry_after_is_a_crash(value: str) -> None:
    parsed = parse_retry_after(value, 1000.0)
    assert parsed is None or parsed >= 0
