"""Whole runs over a network in memory, on a clock that jumps: what waiting does to a sync.

Nothing here takes real time. The program has its own time-outs and pauses; only DNS, sockets, TLS
and worker threads are left out (`ends.Virtual`). The network itself is tested beside the harness.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, error
from conformance.providers.personas import Persona, Provider
from conformance.providers.rates import Cap
from conformance.server.memory import Link, Place
from tests.ends import document, held, only, tags


@pytest.fixture
def seed() -> Seed:
    return Seed(41)


def now() -> float:
    return round(anyio.current_time(), 6)


async def image_at(
    place: Place, seed: Seed, repository: str = "app", tag: str = "v1", **shape: Any
) -> Any:
    return seed.image(**shape).load_into(place.app, repository, tag=tag)


def largest(image: Image) -> str:
    """Return the digest of the largest blob."""
    return max(image.blobs, key=lambda digest: len(image.blobs[digest]))


def times(place: Place, wanted: Callable[[Request], bool]) -> list[float]:
    """Note from now on when requests that `wanted` picks arrive."""
    noted: list[float] = []

    def note(request: Request) -> Answer | None:
        if wanted(request):
            noted.append(now())
        return None

    place.app.intercept = note
    return noted


async def test_a_copy_takes_its_round_trips(world, seed):
    source = world.registry("source.test", down=Link(latency=4.0))
    target = world.registry("target.test", up=Link(latency=2.0))
    image = await image_at(source, seed)
    ran = await world.copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    # Connect, manifest, blob at the source; start, body, manifest at the target.
    assert ran.seconds >= 3 * 4 + 3 * 2


async def test_retry_after_30_pauses_30_seconds(world, seed):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = await image_at(source, seed)
    source.app.faults.on(kind="manifest").first().status(429, retry_after=30)
    ran = await world.copy(source, target)
    asked = [round(entry.time, 6) for entry in source.journal.matching(kind="manifest")]
    assert (ran.status, asked) == (0, [0.0, 30.0])
    assert held(target, "app", image)
    assert ran.totals["throttled"] == {"source.test": 1}


@pytest.mark.parametrize("chance", [0.999])
async def test_backoff_doubles_between_server_errors(world, seed):
    source, target = world.registry("source.test"), world.registry("target.test")
    await image_at(source, seed)
    source.app.faults.on(kind="manifest").status(500)
    ran = await world.copy(source, target)
    assert ran.status == 2
    pauses = [round(gap, 1) for gap in source.journal.matching(kind="manifest").gaps()]
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    assert only(ran.images)["error"]["retries"] == 4
    assert not target.app.tags("app")


async def test_only_the_first_request_to_a_host_goes_alone(world, seed):
    """Rule 1: the others wait for its outcome, and then go together."""
    source = world.registry("source.test", down=Link(latency=1.0))
    target = world.registry("target.test")
    names = [f"team/app{number}" for number in range(20)]
    for name in names:
        await image_at(source, seed, name)
    ends = {"source": source, "target": target}
    ran = await world.sync(ends, *({"from": name, "tags": tags("v1")} for name in names))
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 20)
    asked = source.journal.matching(kind="manifest")
    first, second, *others = (entry.time for entry in asked)
    assert second >= first + 1.0  # over the same connection, when it has its answer
    assert max(others[:3]) < second + 1.1  # over connections of their own


async def test_slow_bandwidth_is_not_a_stall(world, seed):
    """4 KiB a second for more than five minutes: slower than any time-out lets an idle body be."""
    source = world.registry("source.test", down=Link(bandwidth=4096))
    target = world.registry("target.test", up=Link(bandwidth=4096))
    image = await image_at(source, seed, sizes=(320 * 4096,))
    ran = await world.copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert 320 < ran.seconds < 380, "what is read is sent at the same time"
    assert (source.journal.count("GET", "blob"), target.journal.count("PUT", "upload")) == (2, 2)


@pytest.mark.slow
@pytest.mark.provokes("blob_pulled_twice")  # less than one piece came each time
async def test_a_line_much_slower_than_1_kib_a_second_is_given_up(world, seed):
    """What has come is gone on with, but ten times five minutes are less than a mebibyte."""
    source = world.registry("source.test", down=Link(bandwidth=300))
    target = world.registry("target.test")
    await image_at(source, seed, sizes=(4_000_000,))
    ran = await world.copy(source, target)
    assert ran.status != 0
    assert only(ran.images)["status"] == "failed"
    # 300 bytes a second, and what has come with the head.
    assert re.search(r"only 9\d\d\d\d bytes .* in 300 s", ran.err)
    assert source.journal.count("GET", "blob") <= 2 * 10, "as often as anything is repeated"
    assert target.app.tags("app") == {}


@pytest.mark.parametrize("chance", [0.0])
async def test_a_silent_registry_is_given_up_after_its_time_outs(world, seed):
    """It takes connections and says nothing: one contact of 60 s, and 15 s for a probe."""
    source, target = world.registry("source.test"), world.registry("target.test")
    await image_at(source, seed)

    source.app.faults.on().stall()
    ran = await world.copy(source, target)
    assert ran.status != 0
    assert ran.seconds == pytest.approx(60.0 + 15.0, abs=1)
    assert target.journal.count() <= 1


@pytest.mark.parametrize("chance", [0.0])
async def test_nobody_waits_longer_than_a_head_for_the_end_of_a_session(world, seed):
    source, target = world.registry("source.test"), world.registry("target.test")
    await image_at(source, seed)
    source.app.repositories["app"].blobs.clear()
    target.app.faults.on("DELETE").stall()
    ran = await world.copy(source, target)
    assert ran.status == 2
    assert target.journal.count("DELETE") >= 1
    assert ran.seconds == pytest.approx(60.0, abs=5)


@pytest.mark.parametrize("chance", [0.0])
async def test_a_dead_line_is_noticed_by_the_connect_time_out(world, seed):
    source, target = world.registry("source.test"), world.registry("target.test")
    await image_at(source, seed)
    source.fail("silent")
    ran = await world.copy(source, target)
    assert ran.status != 0
    assert "no connection to source.test within 10 s" in ran.err
    assert "waited for 15s" in ran.err
    assert ran.seconds == pytest.approx(15.0, abs=0.1), "the first contact is a part of it"


@pytest.mark.parametrize(
    ("minutes", "status", "seconds"), [(9, "synced", 540), (13, "failed", 660)]
)
async def test_nine_minutes_of_429s_are_waited_for_and_thirteen_are_not(
    world, seed, minutes, status, seconds
):
    source, target = world.registry("source.test"), world.registry("target.test")
    await image_at(source, seed)
    until = anyio.current_time() + 60 * minutes

    def busy(request: Request) -> Answer | None:
        if anyio.current_time() >= until:
            return None
        return error(429, "TOOMANYREQUESTS", "later", headers=[("Retry-After", "60")])

    source.app.intercept = busy
    ran = await world.copy(source, target)
    assert ran.statuses() == [status]
    assert ran.seconds == pytest.approx(seconds, abs=1)


async def test_a_retry_after_as_a_date_is_read_with_the_clock_of_the_world(world, seed):
    source, target = world.registry("source.test"), world.registry("target.test")
    await image_at(source, seed)
    asked = times(target, lambda request: request.kind == "manifest" and request.method == "HEAD")
    at = formatdate(world.wall() + 45, usegmt=True)
    first = error(429, "TOOMANYREQUESTS", "later", headers=[("Retry-After", at)])
    target.app.amend = lambda request, answer: (
        first if request.kind == "manifest" and len(asked) == 1 else answer
    )
    ran = await world.copy(source, target)
    assert (ran.status, asked) == (0, [0.0, 45.0])


async def test_a_cap_in_any_second_is_kept_to_by_waiting(world, seed):
    """4 manifests a second, as a cloud's cap of writes: all arrive, and no stretch of a second has
    more.
    """
    row = Persona(
        source="docs/protocol-facts.md section 4.8",
        hosts={"registry": "capped.test"},
        caps=lambda provider: (Cap(4, 1.0, frozenset({"manifest_put"})),),
    )
    source, capped = (
        world.registry("source.test"),
        Provider(row, now=anyio.current_time, wall=world.wall),
    )
    target = world.listen(capped, "capped.test")
    images = {
        f"v{each}": await image_at(source, seed, tag=f"v{each}", sizes=(10 + each,))
        for each in range(20)
    }
    ran = await world.sync({"source": source, "t": target}, {"from": "app", "tags": tags("*")})
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 20)
    assert all(held(target, "app", image) for image in images.values())
    puts = target.journal.matching("PUT", "manifest")
    taken = sorted(entry.ended_time or 0 for entry in puts if entry.status == 201)
    assert len(taken) == 20
    assert all(later - earlier >= 1 for earlier, later in zip(taken, taken[4:], strict=False))
    assert sum(entry.status == 429 for entry in puts) == capped.rates.refused["manifest_put"] > 0


# Faults, whose waits are on the same clock.


@pytest.mark.parametrize(("seconds", "asked", "took"), [(59, 1, 59), (61, 2, 60.5)])
async def test_an_answer_may_be_late_up_to_its_time_out(world, seed, seconds, asked, took):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = await image_at(source, seed)
    source.app.faults.on("GET", "manifest").first().delay(seconds)
    ran = await world.copy(source, target)
    assert (ran.status, ran.seconds) == (0, pytest.approx(took, abs=0.01))
    assert source.journal.count("GET", "manifest") == asked
    assert held(target, "app", image)


@pytest.mark.parametrize(("seconds", "asks"), [(63.5, 0), (64.5, 1)], ids=["in time", "late"])
async def test_the_answer_to_a_body_is_waited_for_by_its_size_then_the_blob_is_asked_for(
    world, seed, seconds, asks
):
    """4 MiB give the registry 4 s more than a minute. An answer that is late is not needed: the blob
    has arrived.
    """
    source, target = world.registry("source.test"), world.registry("target.test")
    image = await image_at(source, seed, sizes=(4 << 20,))
    digest = largest(image)
    late = target.app.faults.on("PUT", "upload", query={"digest": digest})
    late.first().delay(seconds, at="answer")
    names = [f"{place.address}/app:v1" for place in (source, target)]
    registries = document({"source": source, "target": target})
    flags = ("copy", "--no-artifacts", "--json", "--no-progress", "-c", "-")
    ran = await world.run(*flags, *names, stdin=registries)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert target.journal.count("HEAD", "blob", reference=digest, status=200) == asks
    assert target.journal.count("PUT", "upload") == len(image.blobs)
    assert ran.seconds == pytest.approx(min(seconds, 64), abs=0.1)


async def test_a_body_that_stalls_is_fetched_again_after_a_minute(world, seed):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = await image_at(source, seed, sizes=(200_000,))
    stalled = source.app.faults.on("GET", "blob", reference=largest(image)).first()
    stalled.stall(after=1000)
    ran = await world.copy(source, target)
    assert (ran.status, len(stalled.done)) == (0, 1)
    assert 60 <= ran.seconds < 62
    assert held(target, "app", image)


@pytest.mark.parametrize("reset", [False, True])
async def test_connections_that_are_dropped_cost_seconds_at_most(world, seed, reset):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = await image_at(source, seed, sizes=(200_000,))
    source.app.faults.on("GET", "blob", reference=largest(image)).first(2).drop(
        after=50_000, reset=reset
    )
    target.app.faults.on("PUT", "upload").nth(2).drop(reset=reset)
    target.app.faults.on("PUT", "manifest").first().drop(reset=reset)
    ran = await world.copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert ran.seconds < 10
    assert held(target, "app", image)
    for place in (source, target):
        place.app.faults.check()


async def test_several_targets_stage_on_disk_without_a_thread(world, seed, tmp_path):
    source = world.registry("source.test", down=Link(bandwidth=1_000_000))
    near = world.registry("near.test")
    far = world.registry("far.test", up=Link(bandwidth=100_000))
    image = await image_at(source, seed, sizes=(3_000_000,))
    ran = await world.sync(
        {"source": source, "near": near, "far": far},
        {"from": "app", "tags": tags("v1")},
        **{"global": {"cache_dir": str(tmp_path)}},
    )
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 2)
    assert held(near, "app", image)
    assert held(far, "app", image)
    assert source.journal.count("GET", "blob") == 2, "pulled once for both"
    assert ran.seconds == pytest.approx(3 + 30, abs=2)
