"""One reading of a blob for several targets, where nothing is staged on disk."""

from __future__ import annotations

import errno
from io import FileIO
from typing import Any

import anyio
import pytest

from _regsync.errors import Disconnected
from _regsync.registry.admission import Gate
from _regsync.registry.throttle import Demand, RegistryLimits
from _regsync.state import RepositoryKey
from _regsync.sync import staging
from _regsync.sync.feed import PATIENCE, Feed, FeedBody, Feeds, Part, Subscriber, _State
from conformance.content.images import Image, Seed
from conformance.journal import Entries
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, held, tags

MIB = 1 << 20
OFF = {"global": {"staging_size_limit": 0}}


def load(source: Place, *sizes: int, tag: str = "v1", seed: int = 7) -> Image:
    return Seed(seed).image(sizes=sizes).load_into(source.app, "app", tag=tag)


def largest(image: Image) -> str:
    return max(image.blobs, key=lambda digest: len(image.blobs[digest]))


def pulls(source: Place, digest: str) -> Entries:
    return source.journal.matching("GET", "blob", reference=digest)


def bodies(target: Place, digest: str) -> Entries:
    return target.journal.matching("PUT", "upload", query={"digest": digest})


def targets(world: Virtual, *links: Link | None, **options: Any) -> list[Place]:
    names = "abcdefgh"[: len(links)]
    return [
        world.registry(f"{name}.test", up=link, **options)
        for name, link in zip(names, links, strict=True)
    ]


async def mirror(world: Virtual, source: Place, places: list[Place], **top: Any) -> Ran:
    ends: dict[str, Any] = {"source": source}
    ends |= {place.address.partition(".")[0]: place for place in places}
    return await world.sync(ends, {"from": "app", "tags": tags("*")}, **{**OFF, **top})


def all_held(places: list[Place], *images: Image) -> bool:
    return all(held(place, "app", image) for place in places for image in images)


# What goes over the wire.


@pytest.mark.provokes("blob_pulled_twice")  # once for the disk, once for all targets
async def test_a_full_disk_costs_one_reading(world, monkeypatch, tmp_path):
    class Full(FileIO):
        def write(self, piece: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging, "FileIO", Full)
    source = world.registry("source.test")
    places = targets(world, None, None, None)
    image = load(source, 3 * MIB)
    ran = await mirror(world, source, places, **{"global": {"cache_dir": str(tmp_path)}})
    assert ran.status == 0
    assert all_held(places, image)
    pulls(source, largest(image)).exactly(2)


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_target_that_stalls_is_left_behind_and_served_by_a_reading_of_its_own(
    world, resumable
):
    source = world.registry("source.test")
    places = targets(world, None, None, None, resumable=resumable)
    image = load(source, 4 * MIB)
    digest = largest(image)
    stalled = places[2].app.faults.on("PUT", "upload", query={"digest": digest}).first()
    stalled.delay(PATIENCE + 3, after=MIB, of="request")
    began = anyio.current_time()
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    pulls(source, digest).exactly(2)
    for place in places[:2]:
        (body,) = bodies(place, digest)
        assert (body.ended_time or 0) - began == pytest.approx(PATIENCE, abs=1)
    assert ran.seconds == pytest.approx(PATIENCE + 5, abs=1)
    size = len(image.blobs[digest])
    first, second = (entry.request_bytes for entry in bodies(places[2], digest))
    assert MIB <= first < 3 * MIB
    assert second == (size - first if resumable else size)


async def test_a_target_that_is_not_ready_in_time_is_not_waited_for(world):
    source = world.registry("source.test")
    places = targets(world, None, None, None)
    image = load(source, 4 * MIB)
    start = places[1].app.faults.on("POST", "upload_start", query={"mount": largest(image)})
    start.first().delay(50)
    began = anyio.current_time()
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    pulls(source, largest(image)).exactly(2)
    ended = [(bodies(place, largest(image))[0].ended_time or 0) - began for place in places]
    assert ended == [pytest.approx(seconds, abs=1) for seconds in (PATIENCE, 50, PATIENCE)]


@pytest.mark.provokes("blob_pulled_twice")
async def test_a_target_that_asks_for_a_long_pause_is_not_waited_for(world):
    source = world.registry("source.test")
    places = targets(world, None, None, None)
    image = load(source, 4 * MIB)
    digest = largest(image)
    (config,) = image.blobs.keys() - {digest}
    busy = places[1].app.faults.on("POST", "upload_start", query={"mount": config})
    busy.first().status(429, retry_after=120)
    late = places[2].app.faults.on("POST", "upload_start", query={"mount": digest})
    late.first().delay(10)
    began = anyio.current_time()
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    pulls(source, digest).exactly(2)
    ended = [(bodies(place, digest)[0].ended_time or 0) - began for place in places]
    # Whether it waits for the others, or its own start has to wait, they go on without it.
    assert ended[0] == ended[2] <= PATIENCE + 1
    assert ended[1] == pytest.approx(120, abs=1)


# The pace, without a wire.


class Reading:
    """Stands for a Relay: pieces of one buffer, which is written over for each."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.complete = False
        self.given = 0
        self.buffer = bytearray(max(map(len, pieces)))

    async def next(self) -> memoryview:
        await anyio.lowlevel.checkpoint()
        piece = self.pieces[self.given]
        self.given += 1
        self.complete = self.given == len(self.pieces)
        self.buffer[:] = bytes(len(self.buffer))
        self.buffer[: len(piece)] = piece
        return memoryview(self.buffer)[: len(piece)]


async def drink(feed: Feed, body: FeedBody, seconds: float, into: bytearray) -> None:
    """Take each piece for so long, and look at it then."""
    with body.request_scope:
        while piece := await body.next():
            await anyio.sleep(seconds)
            into += piece
    feed.remove(body)


@pytest.mark.virtual_time
async def test_a_piece_stays_until_the_slowest_has_taken_it_and_there_is_one_at_a_time():
    reading = Reading(b"one", b"three", b"five")
    feed = Feed(reading, 0, 12)  # type: ignore[arg-type]
    taken = [bytearray() for _ in range(3)]
    offsets = (0, 4, 9)
    async with anyio.create_task_group() as tasks:
        for into, offset, seconds in zip(taken, offsets, (0, 20, 5), strict=True):
            tasks.start_soon(drink, feed, feed.body(offset), seconds, into)
        tasks.start_soon(feed.pump)
        await anyio.sleep(19)
        assert reading.given == 2
    assert [bytes(into) for into in taken] == [b"onethreefive"[offset:] for offset in offsets]
    assert anyio.current_time() == 40


@pytest.mark.virtual_time
async def test_who_takes_nothing_is_left_behind_unless_nobody_waits_for_it():
    reading = Reading(b"one", b"two")
    feed = Feed(reading, 0, 6)  # type: ignore[arg-type]
    quick, stuck, slow = feed.body(0), feed.body(0), feed.body(0)
    taken = [bytearray() for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drink, feed, quick, 0, taken[0])
        tasks.start_soon(drink, feed, stuck, 1000, taken[1])
        tasks.start_soon(drink, feed, slow, PATIENCE - 1, taken[2])
        await feed.pump()
        assert anyio.current_time() == PATIENCE
    assert [bytes(into) for into in taken] == [b"onetwo", b"", b"onetwo"]
    assert stuck.request_scope.cancelled_caught

    alone = Feed(Reading(b"one", b"two"), 0, 6)  # type: ignore[arg-type]
    body, into = alone.body(0), bytearray()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drink, alone, body, 1000, into)
        await alone.pump()
    assert bytes(into) == b"onetwo"


@pytest.mark.virtual_time
async def test_nothing_more_is_read_when_all_targets_have_failed():
    reading = Reading(b"one", b"two")
    feed = Feed(reading, 0, 6)  # type: ignore[arg-type]

    async def break_off(body: FeedBody) -> None:
        await body.next()
        feed.remove(body)

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(break_off, feed.body(0))
        await feed.pump()
    assert reading.given == 1


@pytest.mark.virtual_time
async def test_a_failure_of_the_source_ends_all_requests_with_its_place():
    feed = Feed(Reading(b"one"), 0, 3)  # type: ignore[arg-type]
    parts = [feed.body(0), feed.body(0)]
    failures = list[Any]()

    async def ask(body: FeedBody) -> None:
        with pytest.raises(Disconnected) as caught:
            await body.next()
        failures.append(caught.value)

    from _regsync.errors import Side

    error = Disconnected("gone").add_context(Side.SOURCE, "fetch blob", "s/app")
    async with anyio.create_task_group() as tasks:
        for body in parts:
            tasks.start_soon(ask, body)
        await anyio.wait_all_tasks_blocked()
        feed.fail(error)
    assert [str(failure) for failure in failures] == ["fetch blob s/app: gone"] * 2
    assert failures[0] is not failures[1]
    assert {failure.side for failure in failures} == {Side.SOURCE}


# Who shares a reading, without a wire.


@pytest.mark.virtual_time
async def test_a_reading_serves_one_upload_for_each_registry():
    """A small `max_concurrent` may never admit two at once."""
    gate = Gate()
    gate.limits.update({name: RegistryLimits(2) for name in ("source", "one", "two")})
    feeds = Feeds(gate, staging.Staging("", 0))
    unused: Any = None

    def subscriber(host: str) -> Subscriber:
        made = feeds.subscribe(RepositoryKey("source", "app"), "sha256:a")
        demands = Demand("source", "read"), Demand(host, "write")
        made.part = Part(unused, 0, *demands, 0, 0.0, unused, unused, unused)
        made.state = _State.WAITING
        return made

    first, beside, other, late = (subscriber(host) for host in ("one", "one", "two", "two"))
    assert feeds._choose_sharing(first) == [first, other]
    assert feeds._choose_sharing(beside) == [beside, late]
