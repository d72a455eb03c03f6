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
from _regsync.state.archive import RepositoryKey
from _regsync.sync import staging
from _regsync.sync.feed import PATIENCE, Feed, FeedBody, Feeds, Part, Subscriber, _State
from conformance.content.images import Image, Seed
from conformance.journal import Entries
from conformance.providers.personas import Provider, imitate
from conformance.registry.app import App
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, held, tags, virtual

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


async def test_one_get_serves_three_targets_where_nothing_is_staged(world):
    source = world.registry("source.test")
    places = targets(world, None, None, None)
    image = load(source, 3 * MIB, 2 * MIB)
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    source.journal.matching("GET", "blob").exactly(len(image.blobs))
    for digest in image.blobs:
        pulls(source, digest).exactly(1)
    for place in places:
        place.journal.matching("POST", "upload_start").exactly(len(image.blobs))
        place.journal.matching("PUT", "upload").exactly(len(image.blobs))


async def test_one_get_serves_all_where_the_limit_has_no_room_for_a_blob(world):
    source = world.registry("source.test")
    places = targets(world, None, None)
    image = load(source, 3 * MIB, 2 * MIB)
    ran = await mirror(world, source, places, **{"global": {"staging_size_limit": "2.5 MB"}})
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    for digest in image.blobs:
        pulls(source, digest).exactly(1)


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


async def test_a_slow_target_sets_the_pace_and_the_source_is_read_once(world):
    """4 MiB at 64 KiB a second: it never stands still, so that nobody leaves it behind."""
    source = world.registry("source.test")
    places = targets(world, None, None, Link(bandwidth=1 << 16, window=1 << 16))
    image = load(source, 4 * MIB)
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    pulls(source, largest(image)).exactly(1)
    assert ran.seconds == pytest.approx(64, abs=2)
    fast, slow = (bodies(place, largest(image))[0] for place in (places[0], places[2]))
    assert (slow.ended_time or 0) - (fast.ended_time or 0) < 10


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


async def test_a_target_that_has_the_blob_is_not_waited_for(world):
    source = world.registry("source.test")
    places = targets(world, None, None, None)
    image = load(source, 4 * MIB)
    app = places[1].app
    assert isinstance(app, App)
    app.add_blob("app", image.blobs[largest(image)])
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    pulls(source, largest(image)).exactly(1)
    bodies(places[1], largest(image)).exactly(0)
    assert ran.seconds < 1


async def test_a_target_that_breaks_ends_no_other_and_goes_on_by_itself(world):
    source = world.registry("source.test")
    places = targets(world, None, None, None, resumable=True)
    image = load(source, 4 * MIB)
    digest = largest(image)
    places[0].app.faults.on("PUT", "upload", query={"digest": digest}).first().drop(
        after=MIB, of="request"
    )
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    pulls(source, digest).exactly(2)
    assert [entry.request_bytes for entry in bodies(places[0], digest)] == [
        MIB,
        len(image.blobs[digest]) - MIB,
    ]
    for place in places[1:]:
        bodies(place, digest).exactly(1)


async def test_targets_that_break_share_a_second_reading_which_the_end_of_the_first_leaves_alone(
    world,
):
    """The first reading ends after 64 s, shortly before the second one."""
    slow = Link(bandwidth=1 << 16, window=1 << 16)
    source = world.registry("source.test")
    places = targets(world, slow, slow, slow)
    image = load(source, 4 * MIB)
    digest = largest(image)
    for place in places[1:]:
        faults = place.app.faults.on("PUT", "upload", query={"digest": digest})
        faults.first().drop(after=MIB, of="request")
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    pulls(source, digest).exactly(2)
    for place, number in zip(places, (1, 2, 2), strict=True):
        bodies(place, digest).exactly(number)


async def test_a_source_that_breaks_for_good_is_read_again_for_all_at_once(world):
    """It goes on by Range five times; then the targets come together again."""
    source = world.registry("source.test")
    places = targets(world, None, None, None, resumable=True)
    image = load(source, 4 * MIB)
    digest = largest(image)
    broken = source.app.faults.on("GET", "blob", reference=digest)
    broken.first(5).drop(after=0, of="response")
    ran = await mirror(world, source, places)
    assert (ran.status, ran.err) == (0, "")
    assert all_held(places, image)
    assert len(pulls(source, digest)) <= 5 + 1 + 1


@pytest.mark.parametrize("most", [2, 5])
@pytest.mark.virtual_time
async def test_many_blobs_and_tags_share_their_readings_whatever_may_run_at_once(most):
    await copy_many(most)


@pytest.mark.provokes("blob_pulled_twice")
@pytest.mark.virtual_time
async def test_where_one_request_may_run_at_once_all_arrive_too():
    """Then targets keep each other waiting for so long that some go by themselves."""
    await copy_many(1)


async def copy_many(most: int) -> None:
    """Copy many blobs to targets of different latency: no two wait for each other for ever."""
    async with virtual() as world:
        source = world.registry("source.test", down=Link(latency=0.02))
        slow = Link(latency=0.3)
        places = targets(world, Link(latency=0.01), slow, Link(latency=0.1))
        images = [
            load(source, *(MIB + 7000 * tag + 100 * n for n in range(6)), tag=f"v{tag}", seed=tag)
            for tag in range(4)
        ]
        ends: dict[str, Any] = {"source": source}
        ends |= {
            place.address.partition(".")[0]: {"url": place.url, "max_concurrent": most}
            for place in places
        }
        ran = await world.sync(ends, {"from": "app", "tags": tags("*")}, **OFF)
        assert (ran.status, ran.err) == (0, "")
        assert all_held(places, *images)
        if most > 1:
            source.journal.matching("GET", "blob").exactly(sum(len(i.blobs) for i in images))


@pytest.mark.provokes("blob_pulled_twice")  # it tries to mount first, and comes too late
async def test_a_registry_that_is_source_and_target_takes_part(world):
    source, other = world.registry("source.test", mounts=False), world.registry("b.test")
    image = load(source, 3 * MIB)
    ends = {"source": {"url": source.url, "max_concurrent": 2}, "b": other}
    mapping = {"from": "app", "to": "copy", "tags": tags("v1"), "targets": ["source", "b"]}
    ran = await world.sync(ends, mapping, **OFF)
    assert (ran.status, ran.err) == (0, "")
    assert held(source, "copy", image)
    assert held(other, "copy", image)


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


# Outages.


@pytest.mark.parametrize("seconds", [5, 60])
@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_an_outage_of_the_source_is_waited_out_by_all_targets(world, how, seconds):
    """What they lack is read once more for all when the source is back."""
    source = world.registry("source.test", down=Link(bandwidth=MIB))
    places = targets(world, None, None, None)
    image = load(source, 8 * MIB)

    async def outage() -> None:
        await anyio.sleep(4)
        source.reset_connections()
        async with source.outage(how, seconds):
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outage)
        ran = await mirror(world, source, places)
    assert ran.status == 0, ran.err
    assert all_held(places, image)
    digest = largest(image)
    served = [entry for entry in pulls(source, digest) if entry.status in (200, 206)]
    assert len(served) == 2
    for place in places:
        sent = sum(entry.request_bytes for entry in bodies(place, digest))
        assert sent == len(image.blobs[digest])


# Chunks.


def azures(world: Virtual, number: int) -> list[Provider]:
    """Start so many registries of the kind that takes chunks of 16 MiB."""
    providers = list[Provider]()
    for name in "abcdef"[:number]:
        provider = imitate("acr", now=anyio.current_time, wall=world.wall)
        world.listen(provider, f"{name}.azurecr.io", scheme="https")
        providers.append(provider)
    return providers


@pytest.mark.provokes("blob_pulled_twice")  # where memory has no room
@pytest.mark.parametrize("size", [9 * MIB, 40 * MIB], ids=["in one chunk", "in three"])
@pytest.mark.parametrize("number", [2, 5])
async def test_targets_that_take_chunks_share_a_reading_as_far_as_memory_goes(world, size, number):
    """48 MiB of memory have room for three chunks of 16 MiB, or five of 9 MiB."""
    source, plain = world.registry("source.test"), world.registry("plain.test")
    image = load(source, size)
    digest = largest(image)
    providers = azures(world, number)
    ends: dict[str, Any] = {"source": source, "plain": plain}
    ends |= {f"{n}": f"https://{n}.azurecr.io" for n in "abcdef"[:number]}
    ran = await world.sync(ends, {"from": "app", "tags": tags("v1")}, **OFF)
    assert ran.status == 0, ran.err
    assert held(plain, "app", image)
    assert all(provider.blob("app", digest) == image.blobs[digest] for provider in providers)
    together = max(1, min(number, 3 if size > 16 * MIB else 5))
    pulls(source, digest).exactly(-(-number // together))


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
