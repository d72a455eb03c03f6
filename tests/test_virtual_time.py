"""Whole runs over a network in memory, on a clock that jumps: what waiting does to a sync.

Nothing here takes real time. The program has its own time-outs and pauses; only DNS, sockets, TLS
and worker threads are left out (`ends.Virtual`). The first tests are about the network itself: a
fake is trusted only when it was verified.
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import anyio
import pytest

from conformance.audit.evidence import Act
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, error
from conformance.providers.personas import Persona, Provider
from conformance.providers.rates import Cap
from conformance.registry.app import App
from conformance.server.memory import End, Link, Place, network
from tests.ends import document, held, only, tags


@pytest.fixture
def seed() -> Seed:
    return Seed(41)


def now() -> float:
    return round(anyio.current_time(), 6)


async def read(end: End, count: int) -> bytes:
    room = memoryview(bytearray(count))
    while (got := end.read_into(room)) is None:
        await end.readable()
    return bytes(room[:got])


async def read_all(end: End, count: int) -> bytes:
    whole = b""
    while len(whole) < count and (piece := await read(end, count - len(whole))):
        whole += piece
    return whole


PING = b"GET /v2/ HTTP/1.1\r\nHost: r.test\r\n\r\n"


# The network.


@pytest.mark.virtual_time
async def test_an_answer_takes_both_latencies_and_the_bandwidth():
    async with network() as net:
        net.listen(App(), "r.test", up=Link(latency=0.5), down=Link(latency=1.5, bandwidth=10))
        end = await net.connect("r.test", 80)
        assert now() == 2.0, "a connection takes one round trip"
        assert end.write(PING) == len(PING)
        assert (await read(end, 10), now()) == (b"HTTP/1.1 2", 5.0)
        assert (await read(end, 10), now()) == (b"00 OK\r\nCon", 6.0)


@pytest.mark.virtual_time
async def test_bandwidth_is_shared_by_the_connections_of_a_place():
    async with network() as net:
        app = App()
        digest = app.add_blob("app", bytes(900_000))
        net.listen(app, "r.test", down=Link(bandwidth=100_000))
        ended: list[float] = []

        async def pull() -> None:
            end = await net.connect("r.test", 80)
            end.write(f"GET /v2/app/blobs/{digest} HTTP/1.1\r\nHost: r.test\r\n\r\n".encode())
            await read_all(end, 900_000)
            ended.append(now())

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(pull)
        assert min(ended) >= 17
        assert round(max(ended), 1) == 18.0


@pytest.mark.virtual_time
async def test_a_full_window_makes_the_writer_wait_until_the_reader_reads():
    async with network() as net:
        place = net.listen(App(), "r.test", up=Link(window=100))
        place.fail("silent")
        place.recover()
        end = await net.connect("r.test", 80)
        place.fail("silent")
        assert end.write(b"G" * 300) == 100
        assert end.write(b"G") is None
        with anyio.move_on_after(5) as scope:
            await end.writable()
        assert scope.cancelled_caught


@pytest.mark.virtual_time
async def test_a_close_arrives_behind_what_was_written_and_a_reset_at_once():
    async with network() as net:
        place = net.listen(App(), "r.test", down=Link(latency=3.0))
        asked = PING.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        end = await net.connect("r.test", 80)
        end.write(asked)
        whole = b""
        while piece := await read(end, 4096):
            whole += piece
        assert (whole.startswith(b"HTTP/1.1 200 OK"), whole.endswith(b"{}"), now()) == (
            True,
            True,
            6.0,
        )
        other = await net.connect("r.test", 80)
        other.write(PING)
        await anyio.sleep(1)
        place.reset_connections()
        with pytest.raises(ConnectionResetError):
            await read(other, 100)
        with pytest.raises(ConnectionResetError):
            other.write(PING)


@pytest.mark.virtual_time
async def test_an_answer_that_a_reset_destroys_is_a_failure_in_the_journal():
    async with network() as net:
        place = net.listen(App(), "r.test", down=Link(latency=3.0))
        for _ in range(2):
            end = await net.connect("r.test", 80)
            end.write(PING)
            await anyio.sleep(7)
            if place.journal.count("GET") == 1:
                await read(end, 4096)
        place.reset_connections()
        kept, lost = (Act("r.test", "http://r.test", entry) for entry in place.journal.entries)
        assert [act.entry.status for act in (kept, lost)] == [200, 200]
        assert (kept.is_success, lost.is_success) == (True, False)
        assert (kept.is_failure, lost.is_failure) == (False, True)


@pytest.mark.virtual_time
async def test_nobody_listens_under_another_name_or_port_or_in_an_outage():
    async with network() as net:
        place = net.listen(App(), "r.test")
        with pytest.raises(OSError, match="Name or service not known"):
            await net.connect("other.test", 80)
        with pytest.raises(ConnectionRefusedError):
            await net.connect("r.test", 443)
        async with place.outage("refused", 60):
            with pytest.raises(ConnectionRefusedError):
                await net.connect("r.test", 80)
        async with place.outage("silent", 60):
            await net.connect("r.test", 80)
        assert now() == 120.0, "a silent line takes connections when it is back"
        assert place.open_connections() == 1


# Runs.


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


async def test_a_storm_of_429s_is_outlived_and_nothing_is_lost(world, seed):
    """Every second request to the target for four minutes is refused; all images arrive."""
    source, target = world.registry("source.test"), world.registry("target.test")
    images = {
        f"v{number}": await image_at(source, seed, tag=f"v{number}", sizes=(50_000, 70_000))
        for number in range(12)
    }
    counts = {"asked": 0, "refused": 0}

    def storm(request: Request) -> Answer | None:
        counts["asked"] += 1
        if now() < 240 and counts["asked"] % 2:
            counts["refused"] += 1
            return error(429, "TOOMANYREQUESTS", "storm")
        return None

    target.app.intercept = storm
    ran = await world.sync({"source": source, "t": target}, {"from": "app", "tags": tags("*")})
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 12)
    assert counts["refused"] > 12
    assert ran.totals["throttled"] == {"target.test": counts["refused"]}
    assert all(held(target, "app", image) for image in images.values())


async def test_slow_bandwidth_is_not_a_stall(world, seed):
    """2 KiB a second for more than five minutes: slower than any time-out lets an idle body be."""
    source = world.registry("source.test", down=Link(bandwidth=2048))
    target = world.registry("target.test", up=Link(bandwidth=2048))
    image = await image_at(source, seed, sizes=(320 * 2048,))
    ran = await world.copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert 320 < ran.seconds < 380, "what is read is sent at the same time"
    assert (source.journal.count("GET", "blob"), target.journal.count("PUT", "upload")) == (2, 2)


@pytest.mark.slow
@pytest.mark.provokes("blob_pulled_twice")  # less than one piece came each time
async def test_a_line_slower_than_1_kib_a_second_is_given_up(world, seed):
    source = world.registry("source.test", down=Link(bandwidth=500))
    target = world.registry("target.test")
    await image_at(source, seed, sizes=(4_000_000,))
    ran = await world.copy(source, target)
    assert ran.status != 0
    assert only(ran.images)["status"] == "failed"
    assert "only 150000 bytes of the body moved in 300 s" in ran.err
    assert source.journal.count("GET", "blob") <= 2 * 5, "as often as anything is repeated"
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


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_an_outage_of_ten_minutes_costs_one_run_and_the_next_moves_only_the_rest(
    world, seed, how
):
    source, target = (
        world.registry("source.test"),
        world.registry("target.test", up=Link(bandwidth=5000)),
    )
    images = {
        f"v{each}": await image_at(source, seed, tag=f"v{each}", sizes=(9000,)) for each in range(8)
    }
    ends = {"source": source, "t": {"url": target.url, "max_concurrent": 2}}
    mapping = {"from": "app", "tags": tags("*")}

    async def outage() -> None:
        await anyio.sleep(6)
        async with target.outage(how, 600):
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outage)
        first = await world.sync(ends, mapping)
        assert first.seconds < 600, "a run does not wait for a registry that is gone"
    assert first.status != 0
    there = set(target.app.tags("app"))
    # A tag whose answer the outage swallowed is there too.
    assert there >= {
        each["target"].rpartition(":")[2] for each in first.images if each["status"] == "synced"
    }
    assert 0 < len(there) < 8
    assert set(first.statuses()) == {"synced", "failed"}
    target.journal.clear()
    second = await world.sync(ends, mapping)
    assert (second.status, second.err) == (0, "")
    assert sorted(second.statuses()) == sorted(
        ["skipped"] * len(there) + ["synced"] * (8 - len(there))
    )
    assert target.journal.count("PUT", "manifest") == 8 - len(there)
    assert all(held(target, "app", image) for image in images.values())


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


@pytest.mark.parametrize(
    ("seconds", "finish", "asks"),
    [(63.5, 60, 0), (64.5, 60, 1), (899.5, 899, 0), (900.5, 899, 1)],
    ids=["in time", "late", "at most 15 minutes: in time", "at most 15 minutes: late"],
)
async def test_the_answer_to_a_body_is_waited_for_by_its_size_then_the_blob_is_asked_for(
    world, seed, seconds, finish, asks
):
    """4 MiB give the registry 4 s more than `finish`. An answer that is late is not needed: the blob
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
    ran = await world.run(*flags, *names, stdin=registries, finish=finish)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert target.journal.count("HEAD", "blob", reference=digest, status=200) == asks
    assert target.journal.count("PUT", "upload") == len(image.blobs)
    assert ran.seconds == pytest.approx(min(seconds, finish + 4, 900), abs=0.1)


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
