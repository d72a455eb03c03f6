"""What a registry grants between two refusals is not exceeded; what is no limit slows nothing."""

from __future__ import annotations

import math

import anyio
import pytest

from _regsync.providers import Limits
from _regsync.registry.throttle import GrantedRate, RegistryLimits, Stretch, densest_stretch
from conformance.content.fleets import Fleet
from conformance.messages import Answer, Request, error
from conformance.server.memory import Link
from tests.ends import Virtual, tags
from tools.benches.place import app_of


class Client:
    """Requests that go through a rate one at a time, each answered at once."""

    def __init__(self) -> None:
        self.rate = GrantedRate()
        self.number = 0

    def enter(self, now: float) -> int:
        self.number += 1
        self.rate.enter(self.number, now)
        return self.number

    def granted(self, count: int, now: float) -> None:
        for _ in range(count):
            self.rate.record_grant(self.enter(now))

    def refused(self, count: int, now: float) -> None:
        for _ in range(count):
            self.rate.record_refusal(self.enter(now))

    @property
    def limit(self) -> Stretch | None:
        return self.rate.limit


def limited() -> Client:
    """Return a client that has been granted 5 requests in 2 seconds, at 1.0 and until 3.0."""
    client = Client()
    client.granted(7, 0.0)
    client.refused(3, 0.0)
    client.granted(5, 1.0)
    client.refused(2, 1.5)
    client.granted(1, 3.0)
    return client


def test_nothing_is_waited_for_before_a_second_refusal() -> None:
    client = Client()
    client.granted(100, 0.0)
    client.refused(30, 0.0)
    assert client.limit is None
    client.granted(100, 1.0)
    assert client.limit is None
    assert client.rate.next_opening() == -math.inf


def test_what_was_granted_between_two_refusals_bounds_what_is_let_in() -> None:
    client = limited()
    assert client.limit == (5, 2.0)
    # One of five has entered, at 3.0. The refused ones count for nothing.
    assert client.rate.next_opening() == 1.0 + 2.0
    client.granted(3, 3.25)
    assert client.rate.next_opening() == 1.0 + 2.0
    client.granted(1, 3.5)
    assert client.rate.next_opening() == 3.0 + 2.0
    client.enter(5.0)
    assert client.rate.next_opening() == 3.25 + 2.0


def test_a_late_refusal_begins_no_other_one() -> None:
    """Its request entered before the one that showed that the registry grants something again."""
    client = Client()
    early = [client.enter(0.0) for _ in range(2)]
    client.rate.record_refusal(early[0])
    later = [client.enter(1.0) for _ in range(4)]
    client.rate.record_refusal(early[1])
    for number in later:
        client.rate.record_grant(number)
    assert client.limit is None
    client.refused(1, 1.0)
    client.granted(1, 3.0)
    assert client.limit == (4, 2.0)


def test_a_late_grant_ends_no_refusal() -> None:
    client = Client()
    early = [client.enter(0.0) for _ in range(2)]
    client.rate.record_refusal(early[0])
    probe = client.enter(1.0)
    client.enter(1.0)
    client.rate.record_grant(early[1])
    client.rate.record_refusal(probe)
    client.granted(1, 2.0)
    assert client.limit is None, "the registry has refused once"


def test_two_probes_of_one_moment_measure_nothing() -> None:
    client = limited()
    client.refused(1, 4.0)
    client.granted(1, 4.0)
    learnt = client.limit
    client.refused(1, 4.0)
    client.granted(1, 4.0)
    assert client.limit == learnt == (1, 1.0)


def test_a_probe_that_is_refused_prolongs_the_refusal() -> None:
    client = Client()
    client.refused(1, 0.0)
    client.granted(4, 1.0)
    for moment in (1.0, 2.0, 3.0):
        client.refused(1, moment)
    client.granted(1, 4.0)
    assert client.limit == (4, 3.0)


def test_two_refusals_far_apart_are_two_strays() -> None:
    client = Client()
    client.refused(1, 0.0)
    client.granted(5, 1.0)
    client.refused(1, 10.9)
    client.granted(1, 11.1)
    assert client.limit is None
    client.refused(1, 11.2)
    client.granted(1, 12.1)
    assert client.limit == (1, 1.0)


def test_a_beginning_in_which_little_was_asked_for_is_left_out() -> None:
    assert densest_stretch([0.0, 5.0, 5.0, 5.0, 5.0], 6.0) == (4, 1.0)
    assert densest_stretch([0.0, 0.0, 0.0, 0.0], 1.0) == (4, 1.0)
    assert densest_stretch([0.0, 1.0, 2.0, 3.0], 4.5) == (4, 4.5)


def test_the_last_few_requests_alone_say_nothing() -> None:
    assert densest_stretch([0.0, 0.5, 0.5, 0.5, 1.0, 1.0], 1.25) == (5, 0.75)
    assert densest_stretch([0.0, 0.0, 0.0, 0.0, 0.0, 1.0], 1.01) == (6, 1.01)
    assert densest_stretch([3.0], 4.0) == (1, 1.0)


def test_a_limit_grows_by_leaps_and_is_forgotten() -> None:
    client = limited()
    limits = []
    for _ in range(5 + 6 + 10):
        limits.append(client.limit)
        client.granted(1, 100.0)
    assert limits == [(5, 2.0)] * 5 + [(6, 2.0)] * 6 + [(10, 2.0)] * 10
    assert client.limit is None


def test_a_limit_that_was_met_again_is_measured_again() -> None:
    client = limited()
    client.granted(6, 4.0)
    assert client.limit == (6, 2.0)
    client.refused(1, 4.0)
    client.granted(1, 5.0)
    assert client.limit == (6, 1.0)


def test_what_was_never_sent_counts_for_nothing() -> None:
    limits = RegistryLimits(50, (Limits("x"),))
    limits.meter_names("app", "x")
    meter = limits.meters["x"]
    for moment, status in ((0.0, 429), (1.0, 200), (1.0, 200), (1.0, 429), (3.0, 200)):
        meter.record_answer(meter.enter(moment), status, moment)
    assert meter.next_opening(is_discovery=False) <= 3.0
    for _ in range(10):
        meter.discard(meter.enter(3.0))
    assert meter.next_opening(is_discovery=False) <= 3.0
    meter.record_answer(meter.enter(3.0), 200, 3.0)
    assert meter.next_opening(is_discovery=False) == 3.0 + 2.0


# On the wire.


class Limiter:
    """A registry that takes so many requests in any second; it counts what it refuses."""

    def __init__(self, requests: int, *, tells: bool) -> None:
        self.requests = requests
        self.tells = tells
        self.taken: list[float] = []
        self.asked = 0
        self.refused = 0
        self.refused_bytes = 0

    def __call__(self, request: Request) -> Answer | None:
        now = anyio.current_time()
        self.asked += 1
        self.taken = [moment for moment in self.taken if moment > now - 1]
        if len(self.taken) < self.requests:
            self.taken.append(now)
            return None
        self.refused += 1
        self.refused_bytes += request.length() or 0
        pause = [("Retry-After", "1")] if self.tells else []
        return error(429, "TOOMANYREQUESTS", "slowly", headers=pause)


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize(("tells", "most"), [(True, 40), (False, 80)])
async def test_few_bodies_are_sent_in_vain_to_a_registry_that_takes_40_requests_a_second(
    world: Virtual, tells: bool, most: int
) -> None:
    """If nothing were learnt, 74 requests would be refused if the registry says how long to wait, else
    130. The pauses that a run chooses are random, so this is the mean of four runs: of a single run
    without a Retry-After it is 39 to 123.
    """
    near = Link(latency=0.02)
    source = world.registry("source.test", up=near, down=near)
    Fleet(size=10_000, repositories=5, tags=8).load_into(app_of(source))
    mappings = [{"from": f"fleet/app-{number}", "tags": tags("*")} for number in range(5)]
    limiters: list[Limiter] = []
    for number in range(4):
        target = world.registry(f"target{number}.test", up=near, down=near)
        target.app.intercept = limiter = Limiter(40, tells=tells)
        limiters.append(limiter)
        ends = {"source": source, "t": {"url": target.url, "max_concurrent": 16}}
        ran = await world.sync(ends, *mappings)
        assert ran.statuses() == ["synced"] * 40
        assert 390 <= limiter.asked - limiter.refused <= 400
        assert 9 < ran.seconds < 18  # at 40 requests a second: 9 pauses at least
    assert sum(limiter.refused for limiter in limiters) <= 4 * most
    assert sum(limiter.refused_bytes for limiter in limiters) <= 4 * most * 7000


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_one_stray_refusal_costs_its_pause_alone(world: Virtual) -> None:
    near = Link(latency=0.02)
    source = world.registry("source.test", up=near, down=near)
    target = world.registry("target.test", up=near, down=near)
    Fleet(size=10_000, repositories=5, tags=8).load_into(app_of(source))
    target.app.faults.on("POST").nth(30).status(429, retry_after=1)
    ends = {"source": source, "t": {"url": target.url, "max_concurrent": 16}}
    mappings = [{"from": f"fleet/app-{number}", "tags": tags("*")} for number in range(5)]
    ran = await world.sync(ends, *mappings)
    assert ran.statuses() == ["synced"] * 40
    assert ran.seconds < 3.5  # 3.0; twice as long if the rate before the refusal were kept to
