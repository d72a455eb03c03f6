"""A host that is away is waited for: the states, and whole runs over outages on a clock that jumps
(docs/design.md section 9, "Outages").
"""

from __future__ import annotations

import itertools
import math
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from _regsync.addresses import Origin
from _regsync.errors import ConnectFailed, Disconnected, ProtocolBroken, RegistryError, SyncError
from _regsync.registry.outage import Outage, Patience, Reach, is_outage
from _regsync.registry.recovery import Peer, Recovery
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.tokens import TokenService
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, document, held, only, tags

PATIENCE = Patience(after_answer=120.0, without_answer=15.0, first_pause=0.5)
REFUSED = ConnectFailed("r.test: connection refused")
RESET = Disconnected("reset")
UNTRUSTED = ConnectFailed("bad certificate")
UNTRUSTED.retryable = False
UNKNOWN = ConnectFailed("r.test: unknown name")
UNKNOWN.is_unknown_name = True


# The states.


def outage(*, answered: bool) -> Outage:
    host = Outage(PATIENCE)
    if answered:
        host.record_answer(0)
    return host


def fail(host: Outage, now: float, error: SyncError = REFUSED, *, is_probe: bool = False) -> Reach:
    host.record_failure(error, now, now, 0.5, is_probe=is_probe)
    return host.reach


def test_three_failures_in_a_row_begin_an_outage_and_an_answer_between_begins_the_count_anew():
    host = outage(answered=True)
    assert (fail(host, 1), fail(host, 2)) == (Reach.UP, Reach.UP)
    assert host.record_answer(2.5) is False
    assert [fail(host, now) for now in (3, 4, 5)] == [Reach.UP, Reach.UP, Reach.DOWN]
    assert (host.since, host.gives_up_at) == (3, 123)


def test_the_first_failure_of_a_host_that_has_never_answered_begins_one():
    host = outage(answered=False)
    assert fail(host, 7) is Reach.DOWN
    assert (host.since, host.gives_up_at, host.probe_at) == (7, 22, 7.5)


def test_probes_come_after_pauses_that_double_up_to_ten_seconds():
    host = outage(answered=True)
    now = 0.0
    for _ in range(3):
        fail(host, now)
    pauses = []
    for _ in range(8):
        assert not host.begin_probe(host.probe_at - 0.01)
        pauses.append(host.probe_at - now)
        now = host.probe_at
        assert host.begin_probe(now)
        assert not host.begin_probe(now), "one at a time"
        assert fail(host, now, is_probe=True) is Reach.DOWN
    assert pauses == [0.5, 1, 2, 4, 8, 10, 10, 10]


@pytest.mark.parametrize(("chance", "first"), [(0.0, 0.375), (0.999, 0.625)])
def test_a_pause_has_a_quarter_of_itself_as_jitter(chance, first):
    host = Outage(PATIENCE)
    host.record_failure(REFUSED, 0.0, 0.0, chance)
    assert host.probe_at == pytest.approx(first, abs=0.001)


@pytest.mark.parametrize("probed", [False, True])
def test_an_answer_ends_an_outage_whoever_got_it(probed):
    host = outage(answered=False)
    fail(host, 0)
    if probed:
        host.begin_probe(1)
    assert host.record_answer(0) is True
    assert host.reach is Reach.UP
    assert host.record_answer(0) is False


def test_failures_of_what_was_under_way_change_nothing():
    host = outage(answered=False)
    fail(host, 0)
    assert host.begin_probe(1)
    assert fail(host, 1.1) is Reach.PROBED
    assert (host.probe_at, host.since) == (0.5, 0)


def test_a_probe_that_was_not_sent_makes_room_for_another_at_once():
    host = outage(answered=False)
    fail(host, 0)
    assert host.begin_probe(1)
    host.cancel_probe()
    assert host.begin_probe(1)


def test_a_probe_that_was_not_sent_does_not_bring_back_an_outage_that_has_ended():
    host = outage(answered=False)
    fail(host, 0)
    assert host.begin_probe(1)
    assert host.record_answer(1)
    host.cancel_probe()
    assert host.reach is Reach.UP


def test_a_probe_that_fails_after_another_answer_is_an_ordinary_failure():
    host = outage(answered=True)
    for now in range(3):
        fail(host, now)
    assert host.begin_probe(5)
    host.record_answer(6)
    assert [fail(host, now, is_probe=True) for now in (7, 8)] == [Reach.UP, Reach.UP]
    assert fail(host, 9) is Reach.DOWN
    assert host.gives_up_at < math.inf


def test_a_host_is_given_up_when_the_patience_ends():
    host = outage(answered=False)
    fail(host, 0)
    assert not host.stop_if_due(14.9)
    assert host.stop_if_due(15)
    assert host.record_answer(0) is False
    assert fail(host, 16) is Reach.STOPPED


def test_a_probe_that_fails_behind_the_end_gives_up():
    host = outage(answered=False)
    fail(host, 0)
    host.begin_probe(14)
    assert fail(host, 24, is_probe=True) is Reach.STOPPED


@pytest.mark.parametrize(
    ("lasting", "answered"), [(UNTRUSTED, False), (UNTRUSTED, True), (UNKNOWN, False)]
)
def test_three_failures_that_no_waiting_mends_stop_a_host(lasting, answered):
    host = outage(answered=answered)
    states = [fail(host, now, lasting) for now in range(3)]
    assert states == [Reach.UP, Reach.UP, Reach.STOPPED]


def test_a_name_that_has_answered_may_be_away_from_its_name_server():
    host = outage(answered=True)
    assert [fail(host, now, UNKNOWN) for now in range(3)] == [Reach.UP, Reach.UP, Reach.DOWN]


def test_a_host_that_was_stopped_is_tried_once_in_the_next_run():
    host = outage(answered=False)
    fail(host, 0)
    host.stop_if_due(15)
    host.begin_run()
    assert host.reach is Reach.UP
    assert fail(host, 100) is Reach.STOPPED
    host.begin_run()
    host.record_answer(0)
    assert fail(host, 200) is Reach.UP


def test_time_spent_on_a_connection_that_never_came_about_counts():
    host = outage(answered=False)
    host.record_failure(REFUSED, 0.0, 10.0, 0.5)
    assert host.gives_up_at == 15
    host = outage(answered=False)
    host.record_failure(RESET, 0.0, 60.0, 0.5)
    assert host.gives_up_at == 75


def test_what_may_be_an_outage():
    def status(number: int, retry_after: float | None = None) -> SyncError:
        return RegistryError("", status=number, retry_after=retry_after)

    assert all(map(is_outage, [REFUSED, RESET, status(502), status(503), status(504)]))
    others = [ProtocolBroken(""), status(500), status(429), status(401), status(503, 5.0)]
    assert not any(map(is_outage, others))


# Whole runs.


PLACES = ("source", "target", "token", "blobs")
WAYS = ("refused", "reset", "502", "503", "504", "silent", "lost")
KIB = 1 << 10


class World:
    """A registry with its blobs elsewhere, one with a token service, and images to copy."""

    def __init__(self, world: Virtual, images: int) -> None:
        self.world = world
        self.began = anyio.current_time()
        line = Link(latency=0.01, bandwidth=400 * KIB)
        # A token ends soon, so that another is needed in the middle of a run.
        service = TokenService(
            realm="http://token.test/token",
            grants=lambda *_: True,
            expires_in=None,
            lifetime=3.0,
            now=anyio.current_time,
        )
        self.places: dict[str, Place] = {
            "source": world.registry("source.test"),
            "target": world.registry("target.test", auth=service, up=line),
            "token": world.listen(service, "token.test"),
            "blobs": world.registry("blobs.test"),
        }
        seed = Seed(12)
        shared = seed.layer(100 * KIB)
        self.images: dict[str, Image] = {}
        for number in range(images):
            image = seed.image(
                layers=[shared, seed.layer(100 * KIB + number), seed.layer(1000 + number)]
            )
            for name in ("source", "blobs"):
                image.load_into(self.places[name].app, "app", tag=f"v{number}")
            self.images[f"v{number}"] = image

        def elsewhere(request: Request) -> Answer | None:
            if (request.method, request.kind) != ("GET", "blob"):
                return None
            return Response(307, [("Location", f"http://blobs.test{request.target}")])

        self.places["source"].app.intercept = elsewhere

        # When somebody began to connect to a place, by its host.
        self.connected: dict[str, list[float]] = {}
        connect = world.network.connect

        async def noting(host: str, port: int) -> Any:
            self.connected.setdefault(host, []).append(self.now())
            return await connect(host, port)

        world.network.connect = noting  # type: ignore[method-assign]

    def now(self) -> float:
        """Return the seconds since the scene began."""
        return anyio.current_time() - self.began

    async def sync(
        self, *mappings: Mapping[str, Any], arguments: tuple[str, ...] = ("-q",), **others: Place
    ) -> Ran:
        """Copy all images to the target, and to others."""
        # Few at a time, so that no answer is late because bodies are before it on the line.
        registries: dict[str, Any] = {
            "source": self.places["source"],
            "target": {"url": self.places["target"].url, "max_concurrent": 8},
            **others,
        }
        config = document(registries, *(mappings or [{"from": "app", "tags": tags("*")}]))
        return await self.world.run("sync", "--json", *arguments, "-c", "-", stdin=config)

    @asynccontextmanager
    async def away(self, name: str, how: str, begins: float, seconds: float) -> AsyncIterator[None]:
        """Run the block beside an outage of a place."""
        place = self.places[name]
        ends = begins + seconds

        def is_away() -> bool:
            return begins <= self.now() < ends

        usual = place.app.intercept

        def intercept(request: Request) -> Any:
            if is_away() and how.isdigit():
                return error(int(how), "UNAVAILABLE", "nobody is behind me")
            if is_away() and how == "lost":  # taken, and never answered
                return stall()
            return usual(request) if usual is not None else None

        place.app.intercept = intercept

        async def outage() -> None:
            await anyio.sleep(begins)
            place.fail("silent" if how == "silent" else "refused")
            await anyio.sleep(seconds)
            place.recover()

        async def resets() -> None:
            await anyio.sleep(begins)
            while self.now() < ends:
                place.reset_connections()
                await anyio.sleep(0.005)

        async with anyio.create_task_group() as tasks:
            if how in ("refused", "silent"):
                tasks.start_soon(outage)
            elif how == "reset":
                tasks.start_soon(resets)
            yield
            tasks.cancel_scope.cancel()

    def check_arrived(self, ran: Ran) -> None:
        """All images are there, and no blob was sent again after it had arrived."""
        target = self.places["target"]
        assert (ran.status, ran.statuses()) == (0, ["synced"] * len(self.images)), ran.err
        assert all(held(target, "app", image) for image in self.images.values())
        self.check_sent_once()

    def check_sent_once(self) -> None:
        arrived = Counter(
            entry.query["digest"]
            for entry in self.places["target"].journal.matching("PUT", "upload")
            if entry.status == 201
        )
        assert set(arrived.values()) == {1}

    def attempts(self, name: str, begins: float, ends: float) -> list[float]:
        """When somebody tried to reach a place: connections, and requests over those that held."""
        place = self.places[name]
        asked = [entry.time - self.began for entry in place.journal.entries]
        times = sorted([*self.connected.get(place.host, []), *asked])
        return [time for time in times if begins <= time <= ends]


async def stall() -> Answer:
    await anyio.sleep_forever()
    raise AssertionError


def thorough(name: str, how: str, seconds: float) -> Any:
    """Leave out of a usual run what differs from another case by a number: it has all ways and all
    lengths at one place, and three ways at the others.
    """
    if name == "blobs":
        is_usual = seconds == 5.0 or how in ("refused", "503")
    else:
        is_usual = seconds == 5.0 and how in ("refused", "503", "reset")
    return pytest.param(name, how, seconds, marks=[] if is_usual else [pytest.mark.thorough])


@pytest.mark.parametrize(
    ("name", "how", "seconds"),
    [
        thorough(name, how, seconds)
        for name in PLACES
        for how in WAYS
        for seconds in (0.5, 5.0, 30.0)
    ],
)
async def test_an_outage_is_waited_out(world, name, how, seconds):
    """All arrives, nothing is sent twice, and little time is lost beside that of the outage."""
    scene = World(world, images=16)
    async with scene.away(name, how, 2.0, seconds):
        ran = await scene.sync()
    scene.check_arrived(ran)
    # The bodies take 4.5 s. What was lost ends by its own time-outs: a manifest's has 300 s.
    assert ran.seconds < 2.0 + seconds + (320 if how == "lost" else 20)


@pytest.mark.parametrize("name", ["target", "blobs", "token", "source"])
@pytest.mark.parametrize("how", ["refused", "503"])
async def test_one_probe_at_a_time_and_none_when_it_is_back(world, name, how):
    begins = 2.0
    scene = World(world, images=12)
    async with scene.away(name, how, begins, 40.0):
        ran = await scene.sync()
    scene.check_arrived(ran)

    attempts = scene.attempts(name, begins, begins + 40.0)
    gaps = [round(later - time, 1) for time, later in itertools.pairwise(attempts)]
    assert gaps[-6:] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0], "nothing comes between two probes"
    for place in scene.places.values():
        assert not [entry for entry in place.journal.entries if entry.target == "/v2/"]


@pytest.mark.parametrize(("how", "seconds"), [("refused", 15.0), ("silent", 15.0), ("503", 15.0)])
@pytest.mark.parametrize("name", ["source", "target", "token"])
async def test_what_was_never_there_is_said_within_twenty_seconds(world, name, how, seconds):
    scene = World(world, images=4)
    async with scene.away(name, how, 0.0, 1000.0):
        ran = await scene.sync()
    assert ran.status == 2
    assert ran.seconds == pytest.approx(seconds, abs=0.5)
    assert ran.failed
    assert all("(waited for 15s)" in line for line in ran.failed)
    attempts = scene.attempts(name, 0.0, 1000.0)
    times = {round(time, 1) for time in attempts}
    assert len(times) == (2 if how == "silent" else 5), "one contact and its probes, for all"


async def test_a_name_that_does_not_exist_is_said_at_once(world):
    scene = World(world, images=4)
    scene.places["target"].host = "nobody.test"
    ran = await scene.sync()
    assert ran.status == 2
    assert ran.seconds < 3
    assert len(scene.connected["nobody.test"]) == 3


@pytest.mark.parametrize("how", ["refused", "503"])
async def test_a_registry_that_stays_away_is_given_up_after_two_minutes(world, how):
    """Each image fails once, and the other target has them all."""
    scene = World(world, images=16)
    other = world.registry("other.test")
    async with scene.away("target", how, 2.0, 1000.0):
        ran = await scene.sync(other=other)
    assert ran.status == 1
    assert ran.seconds == pytest.approx(122.0, abs=1.0)
    assert all(held(other, "app", image) for image in scene.images.values())
    failed = [image["target"] for image in ran.images if image["status"] == "failed"]
    assert 0 < len(failed) == len(set(failed))
    assert all(target.startswith("target.test/") for target in failed)
    assert all("waited for 2m00s" in line for line in ran.failed)


async def test_an_outage_is_said_once_and_so_is_its_end(world):
    scene = World(world, images=16)
    async with scene.away("target", "refused", 2.0, 20.0):
        ran = await scene.sync(arguments=("-v",))
    lines = ran.err.splitlines()
    said = [line for line in lines if "waiting for target.test" in line]
    assert said == ["warning: waiting for target.test (connection refused), for 2m00s at most"]
    back = only([line for line in lines if "answers again" in line])
    assert back.startswith("info: target.test answers again, after 2")


async def test_the_heartbeat_says_for_whom_a_run_waits(world):
    scene = World(world, images=16)
    async with scene.away("target", "refused", 2.0, 40.0):
        ran = await scene.sync(arguments=())
    beat = only([line for line in ran.err.splitlines() if line.startswith("still running")])
    assert beat.endswith("; waiting for target.test (connection refused), 28s")


@pytest.mark.parametrize("how", ["refused", "503", "lost"])
async def test_a_signal_ends_the_waiting_at_once(world, how):
    scene = World(world, images=16)

    async def interrupt() -> None:
        await anyio.sleep(10.0)
        signal.raise_signal(signal.SIGTERM)

    async with scene.away("source", how, 0.0, 1000.0), anyio.create_task_group() as tasks:
        tasks.start_soon(interrupt)
        ran = await scene.sync()
    assert ran.status == 143
    assert ran.seconds == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize("how", ["refused", "503"])
async def test_a_mount_that_an_outage_met_is_asked_for_again(world, how):
    """What is there in another repository is not uploaded because its host was away."""
    scene = World(world, images=16)
    mappings = [{"from": "app", "to": name, "tags": tags("*")} for name in ("app", "copy")]
    async with scene.away("target", how, 2.0, 5.0):
        ran = await scene.sync(*mappings)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 32), ran.err
    scene.check_sent_once()


@pytest.mark.parametrize("how", ["refused", "503"])
async def test_a_reading_for_several_targets_goes_on_where_it_broke(world, how, tmp_path):
    """After 40 s, twice as long as a request to a target is kept open for its source."""
    scene = World(world, images=0)
    blobs = scene.places["blobs"]
    blobs.change_links(down=Link(bandwidth=2 * KIB * KIB))
    image = Seed(6).image(sizes=(12 * KIB * KIB,))
    for place in (scene.places["source"], blobs):
        image.load_into(place.app, "app", tag="v1")
    targets = {name: world.registry(f"{name}.test") for name in ("one", "two")}
    config = document(
        {"source": scene.places["source"], **targets},
        {"from": "app", "tags": tags("*")},
        **{"global": {"cache_dir": str(tmp_path)}},
    )
    async with scene.away("blobs", how, 3.0, 40.0):
        if how == "503":
            large = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
            broken = blobs.app.faults.on("GET", "blob", reference=large).first()
            broken.drop(after=5 * KIB * KIB, of="response")
        ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=config)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 2), ran.err
    assert all(held(target, "app", image) for target in targets.values())
    for target in targets.values():
        sent = target.journal.matching("PUT", "upload")
        assert sum(entry.request_bytes for entry in sent) < 13 * KIB * KIB
    read = sum(entry.response_bytes for entry in blobs.journal.matching("GET", "blob"))
    assert read < 13 * KIB * KIB
    assert ran.seconds < 43 + 15


# The waiting by itself.


@asynccontextmanager
async def recovery(answers_at: float) -> AsyncIterator[tuple[Recovery, Peer, list[float]]]:
    """Give the waiting for a host that answers a GET /v2/ from a time on, and when it was asked."""
    pings: list[float] = []
    began = anyio.current_time()

    async def ping(peer: Peer) -> None:
        now = anyio.current_time()
        pings.append(round(now - began, 3))
        if now - began >= answers_at:
            waiting.record_answer(peer, now)
        else:
            waiting.record_failure(peer, REFUSED, now)

    waiting = Recovery(
        patience=PATIENCE,
        chance=lambda: 0.5,
        log=lambda *_, **__: None,
        ping=ping,
        on_outage=lambda _: None,
        on_back=lambda _: None,
    )
    peer = waiting.peer(Origin("http", "r.test", 80))
    yield waiting, peer, pings


def failure_at(waiting: Recovery, peer: Peer) -> SyncError:
    error = REFUSED.copy_without_context()
    waiting.record_failure(peer, error, anyio.current_time())
    assert error.unreachable_peer is peer
    return error


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("address", "cause"),
    [
        (("r.test", 443), "connection refused"),
        (("r.test", 80), "X: connection refused"),
        (("proxy.test", 443), "X: connection refused"),
    ],
)
async def test_who_is_waited_for_is_named_once(address, cause):
    said: list[str] = []
    waiting = Recovery(
        patience=PATIENCE,
        chance=lambda: 0.5,
        log=lambda level, event, message, **_: said.append(message),
        ping=lambda _: anyio.lowlevel.checkpoint(),
        on_outage=lambda _: None,
        on_back=lambda _: None,
    )
    message = "X: connection refused"
    error = ConnectFailed(message, address=address, brief="connection refused")
    peer = waiting.peer(Origin("https", "r.test", 443))
    waiting.record_failure(peer, error, anyio.current_time())
    assert said == [f"waiting for r.test ({cause}), for 15s at most"]


@pytest.mark.virtual_time
async def test_where_only_bodies_wait_a_host_is_asked_for_anything():
    async with recovery(answers_at=3.0) as (waiting, peer, pings):
        error = failure_at(waiting, peer)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(partial(waiting.wait, error, can_repeat=False))
        assert pings == [0.5, 1.5, 3.5]
        assert peer.outage.reach is Reach.UP


@pytest.mark.virtual_time
async def test_the_first_request_that_can_be_repeated_is_the_probe():
    async with recovery(answers_at=0.0) as (waiting, peer, pings):
        error = failure_at(waiting, peer)
        probed: list[str] = []

        async def wait(name: str, *, can_repeat: bool) -> None:
            with waiting.attempt():
                await waiting.wait(error.copy_without_context(), can_repeat=can_repeat)
                if waiting.is_probing(peer):
                    probed.append(name)
                    assert waiting.error_of(peer, can_repeat=True) is None
                    waiting.record_answer(peer, anyio.current_time())

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(partial(wait, "body", can_repeat=False))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(partial(wait, "first", can_repeat=True))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(partial(wait, "second", can_repeat=True))
        assert (probed, pings) == (["first"], [])


@pytest.mark.virtual_time
async def test_what_was_sent_in_an_outage_and_fails_behind_it_begins_no_other():
    """Nor does it use up an attempt: nobody waits for its host any more."""
    async with recovery(answers_at=0.0) as (waiting, peer, _):
        began = anyio.current_time()
        await waiting.wait(failure_at(waiting, peer), can_repeat=False)
        back = anyio.current_time()
        for _ in range(5):
            late = RESET.copy_without_context()
            waiting.record_failure(peer, late, began)
            assert late.unreachable_peer is peer
            await waiting.wait(late)
        assert (anyio.current_time(), peer.outage.reach) == (back, Reach.UP)


@pytest.mark.virtual_time
async def test_a_probe_without_an_answer_is_repeated_if_another_request_was_answered():
    async with recovery(answers_at=0.0) as (waiting, peer, _):
        error = failure_at(waiting, peer)
        errors: list[SyncError] = []

        async def probe() -> None:
            with waiting.attempt():
                await waiting.wait(error)
                assert waiting.is_probing(peer)
                try:
                    await waiting.await_probe(peer, anyio.sleep_forever())
                except SyncError as unanswered:
                    errors.append(unanswered)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(probe)
            await anyio.sleep(10.0)
            waiting.record_answer(peer, anyio.current_time())
        (unanswered,) = errors
        assert peer.outage.reach is Reach.UP
        assert (unanswered.retryable, unanswered.unreachable_peer) == (True, peer)
        await waiting.wait(unanswered)


@pytest.mark.virtual_time
async def test_what_no_waiting_mends_does_not_end_the_waiting_of_others():
    """A proxy may show another certificate while the host behind it is away."""
    async with recovery(answers_at=0.0) as (waiting, peer, _):
        failure_at(waiting, peer)
        waiting.record_failure(peer, UNTRUSTED.copy_without_context(), anyio.current_time())
        assert peer.outage.reach is Reach.DOWN
        error = waiting.error_of(peer, can_repeat=False)
        assert error is not None
        assert error.retryable
        await waiting.wait(error, can_repeat=False)
        assert peer.outage.reach is Reach.UP


@pytest.mark.virtual_time
async def test_a_probe_that_is_cancelled_is_given_back():
    async with recovery(answers_at=0.0) as (waiting, peer, pings):
        error = failure_at(waiting, peer)

        async def never_sent() -> None:
            with waiting.attempt():
                await waiting.wait(error)
                assert waiting.is_probing(peer)
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(never_sent)
            await anyio.sleep(1.0)
            assert peer.outage.reach is Reach.PROBED
            tasks.cancel_scope.cancel()
        assert peer.outage.reach is Reach.DOWN
        await waiting.wait(error, can_repeat=False)
        assert (pings, peer.outage.reach) == ([1.0], Reach.UP)
