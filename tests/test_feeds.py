"""One reading of a blob for several targets, where nothing is staged on disk."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

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
