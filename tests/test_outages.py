"""A registry, a token service or a storage host that is away is waited for (docs/design.md section 9,
"Outages"): each place, each way and each length, on a clock that jumps.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.tokens import TokenService
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, document, held, only, tags

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
            "source": world.registry("source.test", down=line),
            "target": world.registry("target.test", auth=service, up=line),
            "token": world.listen(service, "token.test"),
            "blobs": world.registry("blobs.test", down=line),
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


def images_for(name: str, usual: int) -> int:
    """Return how many images keep a place busy for longer than two seconds: small blobs are asked for
    long before they can be sent.
    """
    return 4 * usual if name in ("source", "blobs") else usual


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
    marks = [] if is_usual else [pytest.mark.thorough]
    if name == "token" and how.isdigit():
        marks.append(pytest.mark.new)
    return pytest.param(name, how, seconds, marks=marks)


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
    scene = World(world, images=images_for(name, 16))
    async with scene.away(name, how, 2.0, seconds):
        ran = await scene.sync()
    scene.check_arrived(ran)
    # The bodies take 4.5 s, or 18. What was lost ends by its own time-outs: a manifest's has 300 s.
    usual = 40 if name in ("source", "blobs") else 20
    assert ran.seconds < 2.0 + seconds + (320 if how == "lost" else usual)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        pytest.param(how, name, marks=[pytest.mark.new] * ((how, name) == ("503", "token")))
        for how in ("refused", "503")
        for name in ("target", "blobs", "token", "source")
    ],
)
async def test_one_probe_at_a_time_and_none_when_it_is_back(world, name, how):
    begins = 2.0
    scene = World(world, images=images_for(name, 12))
    async with scene.away(name, how, begins, 40.0):
        ran = await scene.sync()
    scene.check_arrived(ran)

    attempts = scene.attempts(name, begins, begins + 40.0)
    gaps = [round(later - time, 1) for time, later in itertools.pairwise(attempts)]
    expected = pytest.approx([1.0, 2.0, 4.0, 8.0, 10.0, 10.0], abs=0.3)
    assert gaps[-6:] == expected, "nothing comes between two probes"
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
