"""What waits holds nothing: scenes in which everybody wants what another one has (docs/design.md I8).

Registries and the program share one loop on a clock that jumps. A run that hangs is ended, and fails,
after ten of its minutes.
"""

from __future__ import annotations

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, error
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, held, tags

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

MIB = 1 << 20
NEAR = Link(latency=0.005, bandwidth=20 * MIB)


def images_at(place: Place, name: str, count: int, *sizes: int, seed: int) -> list[Image]:
    """Load images of these layers each, under the tags v0, v1, ..."""
    made = Seed(seed)
    return [
        made.image(layers=[made.blob(size) for size in sizes]).load_into(
            place.app, name, tag=f"v{number}"
        )
        for number in range(count)
    ]


async def within_ten_minutes(world: Virtual, *arguments: object, **more: object) -> Ran:
    with anyio.fail_after(600):
        return await world.sync(*arguments, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [2, 3, 5, 50])
async def test_two_registries_copy_to_each_other_at_once(world: Virtual, cap: int) -> None:
    one, two = (world.registry(f"{name}.test", up=NEAR, down=NEAR) for name in ("one", "two"))
    there = images_at(one, "one/app", 6, 3 * MIB, 2 * MIB, 900, seed=1)
    back = images_at(two, "two/app", 6, 3 * MIB, 2 * MIB, 900, seed=2)
    registries = {
        "source": {"url": one.url, "max_concurrent": cap},
        "target": {"url": two.url, "max_concurrent": cap},
    }
    ran = await within_ten_minutes(
        world,
        registries,
        {"from": "one/app", "tags": tags("*")},
        {"source": "target", "from": "two/app", "targets": ["source"], "tags": tags("*")},
    )
    assert ran.statuses() == ["synced"] * 12, ran.err
    assert all(held(two, "one/app", image) for image in there)
    assert all(held(one, "two/app", image) for image in back)


async def test_one_manifest_that_is_never_there_costs_the_others_no_time(world: Virtual) -> None:
    """A gateway answers 503 to it for ever."""
    seconds: list[float] = []
    for is_ill in (False, True):
        suffix = "ill" if is_ill else "well"
        source = world.registry(f"source-{suffix}.test", up=NEAR, down=NEAR)
        target = world.registry(f"target-{suffix}.test", up=NEAR, down=NEAR)
        images = images_at(source, "app", 50, 20_000, seed=3)
        if is_ill:
            source.app.faults.on("GET", "manifest", reference="v7").status(503)
        began = anyio.current_time()
        ran = await within_ten_minutes(
            world, {"source": source, "target": target}, {"from": "app", "tags": tags("*")}
        )
        assert ran.statuses().count("synced") == 50 - is_ill
        assert all(held(target, "app", each) for number, each in enumerate(images) if number != 7)
        puts = target.journal.matching("PUT", "manifest")
        seconds.append(max(each.time for each in puts) - began)
    well, ill = seconds
    assert ill < well + 3


async def test_what_storage_refuses_does_not_narrow_the_registrys_window(world: Virtual) -> None:
    provider, target = world.persona("redirecting"), world.registry("target.test")
    made = Seed(4)
    images = [
        made.image(layers=[made.blob(5000)]).load_into(provider, "app", tag=f"v{number}")
        for number in range(30)
    ]
    storage = provider.sites["storage"]
    storage.faults.on("GET").first(10).status(429, retry_after=1)
    registries = {"source": f"https://{provider.row.hosts['registry']}", "target": target}
    ran = await within_ten_minutes(world, registries, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["synced"] * 30, ran.err
    assert all(held(target, "app", image) for image in images)
    assert ran.seconds < 10


async def test_storage_that_resets_each_first_connection_loses_no_image(world: Virtual) -> None:
    provider, target = world.persona("redirecting"), world.registry("target.test")
    made = Seed(5)
    images = [
        made.image(layers=[made.blob(5000)]).load_into(provider, "app", tag=f"v{number}")
        for number in range(10)
    ]
    seen = set[str]()

    def reset_first(request: Request) -> bool:
        is_first = request.target not in seen
        seen.add(request.target)
        return is_first

    storage = provider.sites["storage"]
    storage.faults.on("GET", where=reset_first).drop()
    registries = {"source": f"https://{provider.row.hosts['registry']}", "target": target}
    ran = await within_ten_minutes(world, registries, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["synced"] * 10, ran.err
    assert all(held(target, "app", image) for image in images)


@pytest.mark.provokes("blob_pulled_twice", "upload_abandoned")
async def test_a_body_under_way_when_its_registry_goes_away_arrives(world: Virtual) -> None:
    source = world.registry("source.test", up=NEAR, down=NEAR)
    target = world.registry("target.test", up=Link(latency=0.005, bandwidth=MIB))
    images = images_at(source, "app", 2, 8 * MIB, seed=6)
    ran: list[Ran] = []

    async def sync() -> None:
        registries = {"source": source, "target": target}
        ran.append(await within_ten_minutes(world, registries, {"from": "app", "tags": tags("*")}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sync)
        await anyio.sleep(4)
        async with target.outage("refused", 30):
            pass
    assert ran[0].statuses() == ["synced"] * 2, ran[0].err
    assert all(held(target, "app", image) for image in images)


async def test_many_who_find_a_registry_busy_come_in_the_order_in_which_they_came(
    world: Virtual,
) -> None:
    """A registry that takes two requests at a time and answers after a second."""
    source, target = world.registry("source.test"), world.registry("target.test")
    images = images_at(source, "app", 12, 900, seed=7)
    open_requests, most = [0], [0]

    async def slowly(request: Request) -> Answer | None:
        open_requests[0] += 1
        most[0] = max(most[0], open_requests[0])
        await anyio.sleep(1)
        open_requests[0] -= 1
        return error(500, "UNKNOWN", "too many at once") if open_requests[0] > 2 else None

    target.app.intercept = slowly
    registries = {"source": source, "target": {"url": target.url, "max_concurrent": 2}}
    ran = await within_ten_minutes(world, registries, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["synced"] * 12, ran.err
    assert all(held(target, "app", image) for image in images)
    assert most[0] <= 2


@pytest.mark.provokes("upload_abandoned")
@pytest.mark.parametrize("cap", [1, 2, 3])
async def test_a_registry_that_takes_chunks_only_is_no_trap_for_bodies_that_wait(
    world: Virtual, cap: int
) -> None:
    """The first refusals teach how to send, while other bodies wait for the same few permits."""
    source, target = world.registry("source.test"), world.registry("target.test")
    images = images_at(source, "app", 8, 6000, 900, seed=8)

    whole = target.app.faults.on("PUT", "upload", where=lambda asked: bool(asked.length()))
    whole.status(405)
    registries = {"source": source, "target": {"url": target.url, "max_concurrent": cap}}
    ran = await within_ten_minutes(world, registries, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["synced"] * 8, ran.err
    assert all(held(target, "app", image) for image in images)


@pytest.mark.provokes("upload_abandoned")
async def test_chunks_both_ways_between_two_registries_with_one_permit_each_arrive(
    world: Virtual,
) -> None:
    """A body that is being read keeps its permit, which the other way's chunk would wait for."""
    one, two = world.registry("one.test"), world.registry("two.test")
    there = images_at(one, "there", 3, 20 * MIB, 3 * MIB, seed=1)
    back = images_at(two, "back", 3, 20 * MIB, 3 * MIB, seed=2)
    for place in (one, two):
        whole = place.app.faults.on("PUT", "upload", where=lambda asked: bool(asked.length()))
        whole.status(405)
    registries = {
        "source": {"url": one.url, "max_concurrent": 1},
        "target": {"url": two.url, "max_concurrent": 1},
    }
    away = {"source": "target", "from": "back", "targets": ["source"], "tags": tags("*")}
    ran = await within_ten_minutes(world, registries, {"from": "there", "tags": tags("*")}, away)
    assert ran.statuses() == ["synced"] * 6, ran.err
    assert all(held(two, "there", image) for image in there)
    assert all(held(one, "back", image) for image in back)


async def test_chunks_that_a_refusal_has_taught_are_three_blobs_at_a_time(world: Virtual) -> None:
    """Each takes 16 MiB of memory, although all were on their way when the first was refused."""
    source = world.registry("source.test")
    target = world.registry("target.test", up=Link(bandwidth=8 * MIB))
    images = images_at(source, "app", 8, 17 * MIB, seed=9)
    whole = target.app.faults.on("PUT", "upload", where=lambda asked: bool(asked.length()))
    whole.status(405)
    ran = await within_ten_minutes(
        world, {"source": source, "target": target}, {"from": "app", "tags": tags("*")}
    )
    assert ran.statuses() == ["synced"] * 8, ran.err
    assert all(held(target, "app", image) for image in images)
    patches = [
        each for each in target.journal.matching("PATCH", "upload") if each.request_bytes >= MIB
    ]
    blobs: dict[str, list[int]] = {each.reference: [] for each in patches}
    for each in patches:
        blobs[each.reference] += [each.begun, each.ended or each.begun]
    begun_and_ended = [(min(times), max(times)) for times in blobs.values()]
    assert len(begun_and_ended) == 8
    for moment, _ in begun_and_ended:
        assert sum(begun <= moment <= ended for begun, ended in begun_and_ended) <= 3
