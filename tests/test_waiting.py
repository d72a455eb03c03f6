"""Who waits, for how long, and who does not have to: permits and windows (docs/design.md I8), rates and
quotas, outages, and logins that end before their time (section 6, rule 2, and section 9).

Requests are counted at the registry; what refuses them is the harness's own arithmetic.
"""

from __future__ import annotations

import itertools
import re
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.http import Reception, Site
from conformance.images import Image, Seed
from conformance.memory import Link, Place
from conformance.messages import Answer, Request, Response, digest_of, error
from conformance.personas import Persona, Provider
from conformance.programs import docker_registry
from conformance.rates import Cap
from conformance.registry import App
from conformance.tokens import Challenge, TokenService, plain
from conformance.walks import ACCEPT, fetch_http, identical, push_http
from tests.ends import Ran, Virtual, document, held, only, started, stopped_at, tags
from tests.mirrors import Mirror

KIB, MIB = 1 << 10, 1 << 20
NEAR = Link(latency=0.02)
ALL = {"from": "app", "tags": tags("*")}
LOGIN = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}


class Near(Mirror):
    """Registries 20 ms away, and images without artifacts."""

    def __init__(self, world: Virtual, directory: Path, *names: str, **options: Any) -> None:
        super().__init__(world, directory, *names, **{"up": NEAR, "down": NEAR, **options})
        self.registries: dict[str, Any] = {}

    def hold(
        self, count: int, *sizes: int, name: str = "app", place: Place | None = None
    ) -> list[Image]:
        """Hold images v0, v1 and so on with blobs of their own, at the source or another place."""
        return [
            self.seed.image(layers=[self.seed.blob(size) for size in sizes or (3000,)]).load_into(
                (place or self.source).app, name, f"v{number}"
            )
            for number in range(count)
        ]

    async def copy(self, *mappings: Mapping[str, Any], **top: Any) -> Ran:
        """Run them; a run that hangs is ended, and fails, after twenty of its minutes."""
        top["registries"] = {**self.registries, **top.get("registries", {})}
        defaults = {"artifacts": {"enabled": False}, **top.pop("defaults", {})}
        with anyio.fail_after(1200):
            return await self.sync(*(mappings or [ALL]), defaults=defaults, **top)

    def limit(self, **most: int) -> None:
        """Bound what may be asked at once of registries, by alias."""
        places = {"source": self.source, **self.targets}
        for alias, number in most.items():
            self.registries[alias] = {"url": places[alias].url, "max_concurrent": number}


@pytest.fixture
def near(world: Virtual, tmp_path: Path) -> Near:
    return Near(world, tmp_path)


def arrived(ran: Ran, place: Place, images: list[Image], name: str = "app") -> None:
    assert {*ran.statuses()} == {"synced"}, ran.err
    assert all(held(place, name, image) for image in images)


def times_of(place: Place, *condition: Any, **more: Any) -> list[float]:
    return [each.time for each in place.journal.matching(*condition, **more)]


# Permits: who waits holds nothing.


@pytest.mark.provokes("source_written")
@pytest.mark.parametrize("cap", [2, 50])
async def test_two_registries_copy_to_each_other_at_once(world, tmp_path, cap):
    link = Link(latency=0.005, bandwidth=20 * MIB)
    mirror = Near(world, tmp_path, up=link, down=link)
    there = mirror.hold(6, MIB + 1, MIB + 2, 900)
    back = mirror.hold(6, MIB + 1, MIB + 2, 900, name="back", place=mirror.target)
    mirror.limit(source=cap, target=cap)
    away = {"source": "target", "from": "back", "targets": ["source"], "tags": tags("*")}
    ran = await mirror.copy(ALL, away)
    arrived(ran, mirror.target, there)
    arrived(ran, mirror.source, back, "back")
    assert ran.seconds < 60


@pytest.mark.provokes("source_written")
@pytest.mark.provokes("upload_abandoned")
async def test_chunks_both_ways_between_two_registries_with_one_permit_each_arrive(near):
    """A body that is being read keeps its permit, which the other way's chunk would wait for."""
    there = near.hold(2, 17 * MIB, 3 * MIB)
    back = near.hold(2, 17 * MIB, 3 * MIB, name="back", place=near.target)
    for place in (near.source, near.target):
        refuse_whole_bodies(place)
    near.limit(source=1, target=1)
    away = {"source": "target", "from": "back", "targets": ["source"], "tags": tags("*")}
    ran = await near.copy(ALL, away)
    arrived(ran, near.target, there)
    arrived(ran, near.source, back, "back")


def refuse_whole_bodies(place: Place) -> None:
    place.app.faults.on("PUT", "upload", where=lambda asked: bool(asked.length())).status(405)


@pytest.mark.provokes("upload_abandoned")
@pytest.mark.parametrize("cap", [1, 2, 3])
async def test_a_registry_that_takes_chunks_only_is_no_trap_for_bodies_that_wait(near, cap):
    """The first refusals teach how to send, while other bodies wait for the same few permits."""
    images = near.hold(8, 6000, 900)
    refuse_whole_bodies(near.target)
    near.limit(target=cap)
    arrived(await near.copy(), near.target, images)


async def test_one_manifest_that_is_never_there_costs_the_others_no_time(near):
    """A gateway answers 503 to it for ever."""
    near.hold(50, 20_000)
    near.source.app.faults.on("GET", "manifest", reference="v7").status(503)
    ran = await near.copy()
    assert ran.statuses().count("synced") == 49
    assert near.target.app.tags("app").keys() == {f"v{n}" for n in range(50)} - {"v7"}
    assert max(times_of(near.target, "PUT", "manifest")) < 5 < ran.seconds


async def test_one_blob_that_is_never_there_fails_its_image_alone(near):
    """While nothing else is asked for, it looks like a registry that is away."""
    images = near.hold(6, 20_000)
    lost = [*images[2].blobs][-1]
    near.source.app.faults.on("GET", "blob", reference=lost).status(503)
    ran = await near.copy(**{"global": {"max_concurrent_transfers": 1}})
    assert Counter(ran.statuses()) == {"synced": 5, "failed": 1}, ran.err
    assert "waited for 2m00s" in ran.err


def most_open(place: Place, most: int) -> list[int]:
    """Let a registry take a second for each request, and refuse to take more of them at once.
    Return how many were open, whenever one came.
    """
    counts = [0]
    open_now = 0

    async def slowly(request: Request) -> Answer | None:
        nonlocal open_now
        open_now += 1
        counts.append(open_now)
        await anyio.sleep(1)
        open_now -= 1
        return error(500, "UNKNOWN", "too many at once") if counts[-1] > most else None

    place.app.intercept = slowly
    return counts


async def test_of_one_image_sixteen_blobs_move_at_once(near):
    images = near.hold(1, *range(900, 940))
    open_requests = most_open(near.target, 50)
    arrived(await near.copy(), near.target, images)
    assert max(open_requests) == 16


async def test_of_two_aliases_of_a_registry_the_smaller_bound_holds(near):
    near.hold(20, 900)
    for alias, most in (("one", 7), ("two", 3), ("three", 5)):
        near.registries[alias] = {"url": near.target.url, "max_concurrent": most}
    open_requests = most_open(near.target, 3)
    targets = [["one", "two", "three"][number % 3] for number in range(9)]
    ran = await near.copy(
        *({**ALL, "to": f"to{n}", "targets": [alias]} for n, alias in enumerate(targets))
    )
    assert {*ran.statuses()} == {"synced"}, ran.err
    assert max(open_requests) == 3


async def test_a_registry_of_which_nothing_is_said_gets_50_requests_at_once(near):
    near.hold(120, 900, 901, 902)
    open_requests = most_open(near.target, 50)
    assert {*(await near.copy()).statuses()} == {"synced"}
    assert max(open_requests) == 50


@pytest.mark.parametrize(("hard", "raised"), [(4096, 4096), (1 << 20, 65536)])
async def test_as_many_files_are_opened_as_the_system_lets_us(near, monkeypatch, hard, raised):
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    images = near.hold(1)
    arrived(await near.copy(), near.target, images)
    assert asked == [(raised, hard)]


async def test_a_service_that_may_not_change_its_limits_works_with_those_it_has(near, monkeypatch):
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    images = near.hold(1)
    arrived(await near.copy(), near.target, images)


async def test_a_copy_within_a_registry_that_allows_one_request_is_refused(near):
    near.limit(source=1)
    near.write(registries=near.registries)
    where = ["source.test/app:v1", "source.test/other:v1"]
    ran = await near.world.run("copy", "--no-artifacts", "-c", str(near.file), *where)
    assert ran.status == 3
    errors = [line for line in ran.err.splitlines() if line.startswith("error")]
    assert "max_concurrent is 1" in only(errors)
    assert not near.source.journal.entries


# Storage behind a registry.


async def test_what_storage_refuses_does_not_narrow_the_registrys_window(near):
    provider = near.world.persona("redirecting")
    near.registries["source"] = f"https://{provider.row.hosts['registry']}"
    images = [near.seed.image(sizes=(5000,)) for _ in range(30)]
    for number, image in enumerate(images):
        image.load_into(provider, "app", f"v{number}")
    provider.sites["storage"].faults.on("GET").first(10).status(429, retry_after=1)
    ran = await near.copy()
    arrived(ran, near.target, images)
    assert ran.seconds < 10


class Storage(Site):
    """The uploads of a registry at a host of their own. It refuses the first body."""

    def __init__(self, registry: Place) -> None:
        super().__init__()
        self.registry = registry
        self.bodies = list[float]()
        registry.app.intercept = self.lead

    def lead(self, request: Request) -> Answer | None:
        if request.kind != "upload_start":
            return None
        self.registry.app.intercept = None
        answer = self.registry.app.start(request)
        self.registry.app.intercept = self.lead
        assert isinstance(answer, Response)
        location = answer.header("Location").replace("target.test", "storage.test")
        return Response(answer.status, [("Location", location)])

    def start(self, request: Request) -> Answer | Reception:
        self.bodies.append(anyio.current_time())
        if len(self.bodies) == 1:
            return error(429, "TOOMANYREQUESTS", "slowly", headers=[("Retry-After", "30")])
        return self.registry.app.start(request)


@pytest.mark.provokes("upload_abandoned")
async def test_a_registry_that_leads_to_one_that_is_away_is_not_asked_over_and_over(near):
    """As registry.k8s.io leads to another registry, which a configuration may have too."""
    away = near.world.registry("away.test", up=NEAR, down=NEAR)
    [image] = near.hold(1)
    image.load_into(away.app, "app")
    near.hold(1, name="other", place=away)

    def fail(request: Request) -> bool:
        away.fail("refused")
        return True

    near.source.app.faults.on("GET", "blob", where=fail).redirect("http://away.test")
    near.registries["away"] = away
    async with anyio.create_task_group() as tasks:

        async def recover() -> None:
            await anyio.sleep(60)
            near.source.app.faults.clear()
            away.recover()

        tasks.start_soon(recover)
        other = {"source": "away", "from": "other", "tags": tags("v0")}
        ran = await near.copy(ALL, other, defaults={"targets": ["target"]})
    assert ran.statuses() == ["synced"] * 2, ran.err
    assert near.source.journal.count("GET", "blob") < 40


async def test_a_body_that_storage_refuses_does_not_pause_the_registrys_uploads(near):
    images = near.hold(20, 5000)
    storage = Storage(near.target)
    near.world.listen(storage, "storage.test", up=NEAR, down=NEAR)
    began = anyio.current_time()
    arrived(await near.copy(), near.target, images)
    assert sum(at < began + 5 for at in storage.bodies) == 40
    assert len(storage.bodies) == 41


async def test_a_body_that_storage_takes_says_nothing_of_its_registry(near):
    """The registry is away for half a minute, while its storage takes a large blob."""
    near.hold(1, 8 * MIB)
    for number in range(5):
        near.push(f"w{number}", near.seed.image(layers=[near.seed.blob(3000)]))
    near.source.app.faults.on("GET", "manifest", reference="w*").delay(5)
    storage = Storage(near.target)
    storage.bodies.append(0.0)  # so that it refuses none
    slow = Link(latency=0.02, bandwidth=200_000)
    near.world.listen(storage, "storage.test", up=slow, down=NEAR)

    async def be_away() -> None:
        await anyio.sleep(4)
        near.target.fail("refused")
        await anyio.sleep(30)
        near.target.recover()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(be_away)
        ran = await near.copy()
    assert ran.statuses() == ["synced"] * 6, ran.err


async def test_a_body_to_storage_does_not_keep_others_from_asking_the_registry(near):
    """It waited for the one before it, and goes first when the registry is away for a moment."""
    near.hold(1, 8 * MIB)
    near.push("v1", near.seed.image(layers=[near.seed.blob(30 * MIB)]))
    for number in range(5):
        near.push(f"w{number}", near.seed.image(layers=[near.seed.blob(3000)]))
    near.source.app.faults.on("GET", "manifest", reference="w*").delay(39)
    storage = Storage(near.target)
    storage.bodies.append(0.0)  # so that it refuses none
    slow = Link(latency=0.02, bandwidth=200_000)
    near.world.listen(storage, "storage.test", up=slow, down=NEAR)
    near.limit(target=4)

    async def be_away() -> None:
        await anyio.sleep(38)
        near.target.fail("refused")
        await anyio.sleep(20)
        near.target.recover()

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(be_away)
        ran = await near.copy()
    assert ran.statuses() == ["synced"] * 7, ran.err
    assert sum(at < began + 80 for at in times_of(near.target, "PUT", "manifest")) == 6


async def test_a_body_that_is_taken_leaves_its_place_in_the_window_to_others(near):
    """ECR's window begins with four places; eight bodies are on a line that needs 3 s for each."""
    images = near.hold(8, 3 * MIB)
    host = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
    line = Link(latency=0.02, bandwidth=MIB)
    target = near.world.listen(App(), host, scheme="https", up=line, down=NEAR)
    near.registries["target"] = anonymous(host)
    ran = await near.copy()
    arrived(ran, target, images)
    bodies = [
        each.time for each in target.journal.matching("PUT", "upload") if each.request_bytes > MIB
    ]
    assert len(bodies) == 8
    assert max(bodies) - min(bodies) < 10
    assert ran.seconds > 24


# A refusal is about one action.


def refuse(
    place: Place, where: Callable[[Request], bool], until: float, pause: str = ""
) -> list[float]:
    """Answer 429 to what `where` picks, until a time; return when that happened."""
    refused = list[float]()
    headers = [("Retry-After", pause)] if pause else []

    def intercept(request: Request) -> Answer | None:
        if anyio.current_time() >= until or not where(request):
            return None
        refused.append(anyio.current_time())
        return error(429, "TOOMANYREQUESTS", "slowly", headers=headers)

    place.app.intercept = intercept
    return refused


def is_manifest_put(request: Request) -> bool:
    return (request.method, request.kind) == ("PUT", "manifest")


async def test_a_429_on_manifest_put_slows_nothing_but_manifest_puts(near):
    images = near.hold(30, 100_000)
    refused = refuse(near.target, is_manifest_put, until=1.0, pause="30")
    ran = await near.copy()
    arrived(ran, near.target, images)
    assert len(refused) <= 4, "those that were under way"
    for place, method, kind in (
        (near.source, "GET", "manifest"),
        (near.source, "GET", "blob"),
        (near.target, "POST", "upload_start"),
        (near.target, "PUT", "upload"),
    ):
        assert len(times_of(place, method, kind)) >= 29
        assert max(times_of(place, method, kind)) < min(refused) + 2
    puts = times_of(near.target, "PUT", "manifest", status=201)
    assert len(puts) == 30
    assert min(puts) >= min(refused) + 30, "the window rests for all its users"
    assert ran.seconds < 35, "once, not for each of them"
    assert ran.totals["throttled"] == {"target.test": len(refused)}


async def test_a_503_with_retry_after_rests_the_window_too(near):
    images = near.hold(30)
    near.source.app.faults.on("GET", "manifest").nth(8).status(503, headers={"Retry-After": "20"})
    arrived(await near.copy(), near.target, images)
    at = only(times_of(near.source, "GET", "manifest", status=503))
    asked = times_of(near.source, "GET", "manifest")
    assert not [each for each in asked if at + 0.05 < each < at + 20]
    assert max(times_of(near.source, "GET", "blob")) > 20


async def test_a_request_that_is_always_refused_gives_up_and_so_do_all_behind_it(near):
    near.hold(200)
    refused = refuse(near.source, lambda asked: asked.kind == "manifest", until=1e9, pause="60")
    ran = await near.copy()
    assert ran.statuses() == ["failed"] * 200
    assert 600 < ran.seconds < 900
    assert len(refused) < 40, "one at a time asks whether the registry has changed its mind"


@pytest.mark.provokes("upload_abandoned")
async def test_the_end_of_an_upload_is_the_probe_of_a_registry_that_is_its_own_source(near):
    """All chunks have arrived when the registry goes away, so that nothing is left to read there."""
    place = near.world.registry("one.test", mounts=False)
    layer = near.seed.blob(17 * MIB)
    image = near.seed.image(layers=[layer]).load_into(place.app, "app", "v0")
    refuse_whole_bodies(place)
    digest = digest_of(layer)
    place.app.faults.on("PUT", "upload", where=lambda asked: digest in asked.target).first(
        2
    ).status(502)
    place.app.faults.on("HEAD", "blob").first(3).status(502)
    near.registries = {alias: {"url": place.url} for alias in ("source", "target")}
    ran = await near.copy({"from": "app", "to": "kept", "tags": tags("*")})
    arrived(ran, place, [image], "kept")
    assert ran.seconds < 60


async def test_a_copy_inside_a_registry_of_one_window_ends(near):
    """There a blob's GET and PUT draw on the same window, which no finished transfer may leave
    narrower.
    """
    place = near.world.listen(App(mounts=False), "ghcr.io", scheme="https", up=NEAR, down=NEAR)
    images = near.hold(40, 100_000, 100_000, name="o/app", place=place)
    refused = refuse(place, lambda asked: asked.kind == "upload", until=8.0)
    near.registries = dict.fromkeys(("source", "target"), anonymous("ghcr.io"))
    ran = await near.copy({"from": "o/app", "to": "o/kept", "tags": tags("*")})
    assert refused
    arrived(ran, place, images, "o/kept")


def anonymous(host: str) -> dict[str, str]:
    return {"url": host, "auth_type": "anonymous"}


# Rates that are published, and one that nobody has published.

# Requests a second for an account and region:
# https://docs.aws.amazon.com/AmazonECR/latest/userguide/service-quotas.html
ECR_CAPS = {
    "manifest_put": 10,
    "upload_start": 100,
    "upload_finish": 100,
    "upload_body": 500,
    "blob_head": 1000,
    "blob_get": 3000,
    "manifest_get": 2000,
    "manifest_head": 2000,
}


async def test_ecrs_published_rates_are_kept_and_used(near):
    """The target refuses what is more than its caps allow in any second."""
    images = near.hold(60, 3000, 3001)
    host = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
    caps = [Cap(most, actions=frozenset({action})) for action, most in ECR_CAPS.items()]
    persona = Persona("", hosts={"registry": host}, mount="committed", caps=lambda provider: caps)
    ecr = Provider(persona, now=anyio.current_time, wall=near.world.wall)
    target = near.world.listen(ecr, host, scheme="https", up=NEAR, down=NEAR)
    near.registries["target"] = anonymous(host)
    ran = await near.copy()
    arrived(ran, target, images)
    assert not ecr.rates.refused
    assert ran.totals["requests"][host]["manifest_put"] == 60
    assert ran.seconds < 60 / 9 + 1


async def test_a_google_project_is_rationed_apart_from_its_neighbour(near):
    """One window and bucket a project: the second one's work does not wait for the first one's."""
    images = {name: near.hold(40, 10, 20, name=name) for name in ("one", "two")}
    host = "europe-docker.pkg.dev"
    target = near.world.listen(App(), host, scheme="https", up=NEAR, down=NEAR)
    near.registries["target"] = anonymous(host)
    ran = await near.copy(
        *({"from": name, "to": f"{name}/r/app", "tags": tags("*")} for name in images)
    )
    for project in images:
        arrived(ran, target, images[project], f"{project}/r/app")
        mine = [each.time for each in target.journal.entries if f"/{project}/" in each.target]
        assert len(mine) > 300 - 30
        assert most_in_a_second(mine) <= 240 + 30
    assert most_in_a_second([each.time for each in target.journal.entries]) > 240 + 30


def most_in_a_second(times: list[float]) -> int:
    return max(sum(at <= other < at + 1 for other in times) for at in times)


class Limiter:
    """A registry that takes so many requests in any second; it counts what it refuses."""

    def __init__(self, requests: int, *, tells: bool) -> None:
        self.requests = requests
        self.tells = tells
        self.taken = list[float]()
        self.asked = self.refused = self.refused_bytes = 0

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


@pytest.mark.parametrize(("tells", "most"), [(True, 90), (False, 140)])
async def test_few_bodies_are_sent_in_vain_to_a_registry_that_takes_40_requests_a_second(
    near, tells, most
):
    near.hold(40, 1500, 1501, 1502, 1503)
    near.target.app.intercept = limiter = Limiter(40, tells=tells)
    near.limit(target=16)
    ran = await near.copy()
    assert ran.statuses() == ["synced"] * 40
    assert 440 <= limiter.asked - limiter.refused <= 460
    assert 10 < ran.seconds < 20  # at 40 requests a second: 10 pauses at least
    assert limiter.refused <= most
    assert limiter.refused_bytes <= most * 1000


# What is left of a quota.


async def test_docker_hubs_quota_is_used_up_and_hardly_overdrawn(near):
    hub = near.world.persona("dockerhub")
    near.registries["source"] = "docker.io"
    for number in range(130):
        near.seed.image(sizes=(500,)).load_into(hub, "library/app", tag=f"v{number}")
    ran = await near.copy()
    assert ran.status == 1
    # Who had begun is brought to its end, though its registry takes no further question.
    assert sorted(ran.statuses()) == ["failed"] * 30 + ["synced"] * 100
    assert len(near.target.app.tags("app")) == 100
    assert hub.journal.count("GET", "manifest", status=200) == 100
    assert 1 <= hub.journal.count("GET", "manifest", status=429) <= 30
    failed = [each["error"]["message"] for each in ran.images if each["status"] == "failed"]
    assert all("status 429" in text and "until 2026-01-01 06:0" in text for text in failed)
    assert ran.seconds < 60


async def test_a_quota_that_others_have_used_up_costs_one_refusal(near):
    """It closes the lane of manifests; HEADs go on."""
    hub = near.world.persona("dockerhub")
    near.registries["source"] = "docker.io"
    near.hold(5, place=near.target)
    for number in range(5):
        near.seed.image(sizes=(500,)).load_into(hub, "library/app", tag=f"v{number}")
    assert hub.tokens is not None
    scope = "service=registry.docker.io&scope=repository:library/app:pull"
    token = hub.tokens.request("GET", f"/token?{scope}", []).json()["token"]
    for _ in range(100):
        login = [("Authorization", f"Bearer {token}"), ("Accept", ACCEPT)]
        assert hub.request("GET", "/v2/library/app/manifests/v0", login).status == 200
    assert (await near.copy()).statuses() == ["failed"] * 5
    assert hub.journal.count("HEAD", "manifest", status=200) == 5
    assert hub.journal.count("GET", "manifest", status=429) == 1


async def test_a_registry_that_says_when_to_come_again_is_believed_before_its_quotas_window(near):
    images = near.hold(3)
    quota = {"Retry-After": "20", "ratelimit-remaining": "0;w=21600"}
    near.source.app.faults.on("GET", "manifest").first().status(429, headers=quota)
    ran = await near.copy()
    arrived(ran, near.target, images)
    assert 20 < ran.seconds < 25


# A registry that is stopped.


async def test_those_who_wait_fail_at_once_when_their_registry_asks_for_hours(world, tmp_path):
    mirror = Near(world, tmp_path, "asks", "other")
    mirror.hold(40)
    refused = refuse(mirror.target, is_manifest_put, until=1e9, pause="4000")
    ran = await mirror.copy()
    assert ran.statuses() == ["failed"] * 40 + ["synced"] * 40
    assert len(refused) <= 4, "those that were under way"
    assert ran.seconds < 10
    messages = {each["error"]["message"] for each in ran.images if each["status"] == "failed"}
    assert all("1h06m" in text and "until 2026-01-01 01:06 UTC" in text for text in messages)


@pytest.mark.parametrize("size", [3000, 2 * MIB])
@pytest.mark.parametrize(("status", "pause", "seconds"), [(429, "4000", 10), (503, None, 200)])
async def test_those_who_wait_for_a_source_do_not_blame_the_target(
    near, size, status, pause, seconds
):
    """A body waits for both ends at once."""
    near.hold(60, size)
    near.source.app.faults.on("GET", "blob").status(status, retry_after=pause)
    ran = await near.copy()
    errors = [each["error"] for each in ran.images]
    assert {(each["code"], each["side"]) for each in errors} == {("SOURCE_ERROR", "source")}
    assert all(each["message"].startswith("fetch blob source.test/") for each in errors)
    assert ran.seconds < seconds


@pytest.mark.parametrize("status", [429, 503])
async def test_a_token_service_that_asks_for_hours_stops_its_registry(world, tmp_path, status):
    mirror = Guarded(world, tmp_path)
    for name in ("one", "two", "three"):
        mirror.hold(2, name=name)
    slow = mirror.source.app.faults.on("GET", path="/token").delay(1)
    slow.status(status, retry_after=86400)
    names = [{"from": name, "tags": tags("*")} for name in ("one", "two", "three")]
    ran = await mirror.copy(*names)
    assert len(mirror.source.journal.matching(path="/token")) == 1
    assert ran.seconds < 10
    messages = [each["error"]["message"] for each in ran.images]
    assert len(messages) == 3
    assert all(text.count("24h00m, until 2026-01-02 00:0") == 1 for text in messages)


@pytest.mark.parametrize("where", ["token", "storage"])
async def test_who_refuses_without_a_lane_is_asked_ever_more_rarely(near, where):
    provider = near.world.persona("dockerhub" if where == "token" else "redirecting")
    near.registries["source"] = f"https://{provider.row.hosts['registry']}"
    near.seed.image(sizes=(5000,)).load_into(provider, "library/app", "v1")
    provider.sites[where].faults.on("GET").status(429)
    ran = await near.copy({"from": "library/app", "tags": tags("v1")})
    assert "429" in only(ran.failed)
    assert 600 < ran.seconds < 700
    assert provider.sites[where].journal.count("GET", status=429) < 120, "for two blobs"


async def test_dead_credentials_stop_their_registry_only(near):
    dead = near.world.listen(App(), "dead.test", scheme="https", up=NEAR, down=NEAR)
    near.hold(20)
    asks = [("WWW-Authenticate", 'Basic realm="dead"')]
    dead.app.intercept = lambda request: error(401, "UNAUTHORIZED", "no", headers=asks)
    near.registries["dead"] = {"url": "dead.test", **LOGIN}
    ran = await near.copy()
    assert ran.statuses() == ["failed"] * 20 + ["synced"] * 20
    errors = [each["error"] for each in ran.images if each["error"]]
    assert {each["code"] for each in errors} == {"AUTH_ERROR"}
    assert all("refused" in each["message"] for each in errors)
    assert len(dead.journal.entries) == 2, (
        "bare, then with what is wrong, and not again: accounts get locked"
    )


async def test_a_403_of_one_repository_stops_no_other(near):
    for name in ("open", "shut"):
        near.hold(5, name=name)
    near.target.app.intercept = lambda request: (
        error(403, "DENIED", "not yours") if request.repository == "shut" else None
    )
    ran = await near.copy(*({"from": name, "tags": tags("*")} for name in ("open", "shut")))
    assert ran.statuses() == ["synced"] * 5 + ["failed"] * 5


# Outages.


class Away(Near):
    """A registry with its blobs elsewhere, one with a token service, and images to copy; each of
    these places may be away.
    """

    def __init__(self, world: Virtual, directory: Path, images: int = 16) -> None:
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
        of = {"source": {"down": line}, "target": {"auth": service, "up": line}}
        super().__init__(world, directory, of=of, up=None, down=None)
        self.places: dict[str, Place] = {
            "source": self.source,
            "target": self.target,
            "token": world.listen(service, "token.test"),
            "blobs": world.registry("blobs.test", down=line),
        }
        shared = self.seed.layer(100 * KIB)
        self.images = [
            self.seed.image(
                layers=[shared, self.seed.layer(100 * KIB + number), self.seed.layer(1000 + number)]
            )
            for number in range(images)
        ]
        for name in ("source", "blobs"):
            for number, image in enumerate(self.images):
                image.load_into(self.places[name].app, "app", f"v{number}")

        def elsewhere(request: Request) -> Answer | None:
            if (request.method, request.kind) != ("GET", "blob"):
                return None
            return Response(307, [("Location", f"http://blobs.test{request.target}")])

        self.source.app.intercept = elsewhere
        # Few at a time, so that no answer is late because bodies are before it on the line.
        self.limit(target=8)
        self.connected: dict[str, list[float]] = {}  # when, by host
        connect = world.network.connect

        async def noting(host: str, port: int) -> Any:
            self.connected.setdefault(host, []).append(self.now())
            return await connect(host, port)

        world.network.connect = noting  # type: ignore[method-assign]

    def now(self) -> float:
        """Return the seconds since the scene began."""
        return anyio.current_time() - self.began

    @asynccontextmanager
    async def away(
        self, name: str, how: str, begins: float = 2.0, seconds: float = 1000.0
    ) -> AsyncIterator[None]:
        """Run the block beside an outage of a place."""
        place = self.places[name]
        usual = place.app.intercept
        if name in ("source", "blobs"):
            self.limit(source=4)  # else small blobs are all asked for long before they can be sent

        def is_away() -> bool:
            return begins <= self.now() < begins + seconds

        def intercept(request: Request) -> Any:
            if is_away() and how.isdigit():
                return error(int(how), "UNAVAILABLE", "nobody is behind me")
            if is_away() and how == "lost":  # taken, and never answered
                return anyio.sleep_forever()
            return usual(request) if usual is not None else None

        place.app.intercept = intercept

        async def fail() -> None:
            await anyio.sleep(begins)
            place.fail("silent" if how == "silent" else "refused")
            await anyio.sleep(seconds)
            place.recover()

        async def reset() -> None:
            await anyio.sleep(begins)
            while is_away():
                place.reset_connections()
                await anyio.sleep(0.005)

        async with anyio.create_task_group() as tasks:
            if how in ("refused", "silent"):
                tasks.start_soon(fail)
            elif how == "reset":
                tasks.start_soon(reset)
            yield
            tasks.cancel_scope.cancel()

    def check_sent_once(self) -> None:
        """No blob was sent again after it had arrived."""
        puts = self.target.journal.matching("PUT", "upload", status=201)
        assert {*Counter(each.query["digest"] for each in puts).values()} == {1}

    def attempts(self, name: str, begins: float, seconds: float) -> list[float]:
        """When somebody tried to reach a place: connections, and requests over those that held."""
        place = self.places[name]
        asked = [entry.time - self.began for entry in place.journal.entries]
        times = sorted([*self.connected.get(place.host, []), *asked])
        return [time for time in times if begins <= time <= begins + seconds]


OUTAGES = [
    *itertools.product(("source", "target", "token", "blobs"), ("refused", "503"), (5.0,)),
    *itertools.product(("target",), ("504", "silent", "lost", "reset"), (5.0,)),
    *itertools.product(("blobs",), ("lost", "reset"), (5.0,)),
    ("target", "refused", 0.5),
    ("target", "503", 30.0),
]


@pytest.mark.parametrize(("name", "how", "seconds"), OUTAGES)
async def test_an_outage_is_waited_out(world, tmp_path, name, how, seconds):
    """All arrives, nothing is sent twice, and little time is lost beside that of the outage."""
    scene = Away(world, tmp_path)
    async with scene.away(name, how, seconds=seconds):
        ran = await scene.copy()
    arrived(ran, scene.target, scene.images)
    scene.check_sent_once()
    # The bodies take 4.5 s. What was lost ends by its own time-outs: a manifest's has 300 s.
    assert 4.5 < ran.seconds < 2.0 + seconds + (320 if how == "lost" else 20)


@pytest.mark.parametrize(
    ("name", "how"),
    [("target", "refused"), ("target", "503"), ("blobs", "refused"), ("token", "503")],
)
async def test_one_probe_at_a_time_and_none_when_it_is_back(world, tmp_path, name, how):
    scene = Away(world, tmp_path, images=12)
    async with scene.away(name, how, seconds=40.0):
        ran = await scene.copy()
    arrived(ran, scene.target, scene.images)
    attempts = scene.attempts(name, 2.0, 40.0)
    gaps = [round(later - time, 1) for time, later in itertools.pairwise(attempts)]
    expected = pytest.approx([1.0, 2.0, 4.0, 8.0, 10.0, 10.0], abs=0.3)
    assert gaps[-6:] == expected, "nothing comes between two probes"
    for place in scene.places.values():
        assert not [entry for entry in place.journal.entries if entry.target == "/v2/"]


@pytest.mark.parametrize("how", ["refused", "silent", "503"])
@pytest.mark.parametrize("name", ["source", "target", "token"])
async def test_what_was_never_there_is_said_within_twenty_seconds(world, tmp_path, name, how):
    scene = Away(world, tmp_path, images=4)
    async with scene.away(name, how, 0.0):
        ran = await scene.copy()
    assert ran.status == 2
    assert ran.seconds == pytest.approx(15.0, abs=0.5)
    assert ran.failed
    assert all("(waited for 15s)" in line for line in ran.failed)
    if (name, how) == ("token", "503"):
        assert all("token service at token.test answered 503" in line for line in ran.failed)
    times = {round(time, 1) for time in scene.attempts(name, 0.0, 1000.0)}
    assert len(times) == (2 if how == "silent" else 5), "one contact and its probes, for all"


@pytest.mark.parametrize("how", ["refused", "503"])
async def test_a_registry_that_stays_away_is_given_up_after_two_minutes(world, tmp_path, how):
    """Each image fails once, and the other target has them all."""
    scene = Away(world, tmp_path)
    scene.registries["other"] = other = world.registry("other.test")
    async with scene.away("target", how):
        ran = await scene.copy()
    assert ran.status == 1
    assert ran.seconds == pytest.approx(122.0, abs=1.0)
    assert all(held(other, "app", image) for image in scene.images)
    failed = [image["target"] for image in ran.images if image["status"] == "failed"]
    assert 0 < len(failed) == len(set(failed))
    assert all(target.startswith("target.test/") for target in failed)
    assert all("waited for 2m00s" in line for line in ran.failed)


@pytest.mark.parametrize("how", ["refused", "503"])
async def test_storage_that_is_given_up_is_asked_no_more(world, tmp_path, how):
    scene = Away(world, tmp_path, images=40)
    async with scene.away("blobs", how):
        ran = await scene.copy(**{"global": {"max_concurrent_transfers": 4}})
    assert ran.seconds == pytest.approx(122.0, abs=1.0)
    assert len(ran.failed) > 30
    assert len(scene.attempts("blobs", 121.0, 1000.0)) < 10
    assert all(line.count("a Location of") == 1 for line in ran.failed)


async def test_an_outage_is_said_once_and_so_is_its_end_and_the_heartbeat_names_it(world, tmp_path):
    scene = Away(world, tmp_path)
    scene.write(ALL, registries=scene.registries, defaults={"artifacts": {"enabled": False}})
    async with scene.away("target", "refused", seconds=40.0):
        ran = await world.run("sync", "-v", "--json", "-c", str(scene.file))
    said = re.compile("waiting for|answers again")
    waits, beat, back = [line for line in ran.err.splitlines() if said.search(line)]
    why = "waiting for target.test (no connection to target.test: connection refused)"
    assert waits == f"warning: {why}, for 2m00s at most"
    assert beat.startswith("still running")
    assert beat.endswith(f"; {why}, 28s")
    assert back.startswith("info: target.test answers again, after 4")


async def test_a_signal_ends_the_waiting_at_once(world, tmp_path):
    scene = Away(world, tmp_path)
    async with scene.away("source", "refused", 0.0), stopped_at(10.0):
        ran = await scene.copy()
    assert ran.status == 143
    assert ran.seconds == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize("how", ["refused", "503"])
async def test_a_mount_that_an_outage_met_is_asked_for_again(world, tmp_path, how):
    """What is there in another repository is not uploaded because its host was away."""
    scene = Away(world, tmp_path)
    async with scene.away("target", how, seconds=5.0):
        ran = await scene.copy(*({**ALL, "to": name} for name in ("app", "copy")))
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 32), ran.err
    scene.check_sent_once()


@pytest.mark.parametrize("how", ["refused", "503"])
async def test_a_reading_for_several_targets_goes_on_where_it_broke(world, tmp_path, how):
    """After 40 s, twice as long as a request to a target is kept open for its source."""
    scene = Away(world, tmp_path, images=0)
    blobs = scene.places["blobs"]
    blobs.change_links(down=Link(bandwidth=2 * MIB))
    image = only(scene.hold(1, 12 * MIB))
    image.load_into(blobs.app, "app", "v0")
    scene.registries |= {name: world.registry(f"{name}.test") for name in ("one", "two")}
    async with scene.away("blobs", how, 3.0, 40.0):
        if how == "503":
            large = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
            broken = blobs.app.faults.on("GET", "blob", reference=large).first()
            broken.drop(after=5 * MIB, of="response")
        ran = await scene.copy({**ALL, "targets": ["one", "two"]})
    for name in ("one", "two"):
        place = scene.registries[name]
        arrived(ran, place, [image])
        sent = place.journal.matching("PUT", "upload")
        assert sum(entry.request_bytes for entry in sent) < 13 * MIB
    read = sum(entry.response_bytes for entry in blobs.journal.matching("GET", "blob"))
    assert read < 13 * MIB
    assert ran.seconds < 43 + 15


@pytest.mark.parametrize(
    ("is_all_silent", "most"),
    [pytest.param(True, 240, id="and all behind it"), pytest.param(False, 450, id="alone")],
)
async def test_a_manifest_put_into_silence_ends_as_promised(near, is_all_silent, most):
    """docs/operations.md promises two minutes where a registry stops answering; what it takes to
    notice the silence comes on top. Where the registry answers others, a slow PUT has more time.
    """
    near.hold(1)

    async def fall_silent(request: Request) -> None:
        if is_manifest_put(request):
            if is_all_silent:
                near.target.fail("silent")
            await anyio.sleep_forever()

    near.target.app.intercept = fall_silent
    ran = await near.copy()
    assert ran.status == 2
    assert ran.seconds <= most


@pytest.mark.slow
def test_a_registry_that_is_ended_and_started_again_costs_no_image(tmp_path):
    """Real processes: it is ended when the first image has arrived, and started when the program
    has noticed.
    """
    homes = {name: tmp_path / name for name in ("source", "target")}
    seed = Seed(3)
    shared = seed.layer(300_000)
    images = {f"v{n}": seed.image(layers=[shared, seed.layer(400_000 + n)]) for n in range(20)}
    with ExitStack() as others:
        running = {name: others.enter_context(ExitStack()) for name in homes}
        where = {name: running[name].enter_context(docker_registry(homes[name])) for name in homes}
        for tag, image in images.items():
            push_http(image, where["source"], "app", tag)
        config = tmp_path / "mirror.yaml"
        ends = {name: f"http://{where[name]}" for name in homes}
        config.write_text(document(ends, ALL, **{"global": {"max_concurrent_transfers": 2}}))
        command = ["sync", "--no-progress", "--log-format", "json", "-c", str(config)]
        with started(*command, bufsize=1) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline()
            running["target"].close()
            said = next(line for line in process.stderr if '"outage"' in line)
            assert f"waiting for {where['target']} (" in said
            port = int(where["target"].rpartition(":")[2])
            running["target"].enter_context(docker_registry(homes["target"], port=port))
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
        for tag, image in images.items():
            assert identical(fetch_http(where["target"], "app", tag), image.contents())


# Tokens that end before their time.


def service(**options: Any) -> TokenService:
    return TokenService({"u": "p"}, anonymous=False, now=anyio.current_time, **options)


class Guarded(Near):
    """Both ends want tokens of the same login."""

    def __init__(self, world: Virtual, directory: Path, **options: Any) -> None:
        of = {"source": {"auth": service(**options)}, "target": {"auth": service(**options)}}
        super().__init__(world, directory, of=of, up=None, down=None)
        for alias, place in (("source", self.source), ("target", self.target)):
            self.registries[alias] = {"url": place.url, **LOGIN}
        self.tokens = self.source.app.auth


def without_error(challenge: Challenge) -> list[str]:
    """Write a challenge that does not say what was wrong with a token."""
    return [f'Bearer realm="{challenge.realm}",service="{challenge.service}"']


@pytest.mark.parametrize(
    ("uses", "images", "form"), [(25, 12, plain), (7, 4, without_error)], ids=["many", "few"]
)
async def test_a_registry_whose_tokens_end_after_some_requests_loses_no_image(
    world, tmp_path, uses, images, form
):
    mirror = Guarded(world, tmp_path, uses=uses, form=form)
    loaded = mirror.hold(images, 3001, 3002, 3003)
    arrived(await mirror.copy(), mirror.target, loaded)
    for place in (mirror.source, mirror.target):
        let_in = len(place.journal.entries) - len(place.journal.matching(status=401))
        assert let_in > uses, "one token would not have done"


async def test_a_token_that_ends_at_a_redirect_is_renewed_as_well(world, tmp_path):
    mirror = Guarded(world, tmp_path)
    images = mirror.hold(1)
    redirected = list[str]()

    def intercept(request: Request) -> Answer | None:
        if request.kind != "blob" or redirected:
            return None
        redirected.append(request.path)
        mirror.tokens.revoke()
        return Response(307, [("Location", f"{request.path}?again=1")])

    mirror.source.app.intercept = intercept
    arrived(await mirror.copy(), mirror.target, images)
    assert mirror.tokens.requests == 2


async def test_who_is_refused_with_every_token_asks_for_two_new_ones(world, tmp_path):
    mirror = Guarded(world, tmp_path)
    mirror.hold(1)
    shown = list[str]()

    def intercept(request: Request) -> Answer | None:
        if request.kind != "manifest" or not request.header("authorization"):
            return None
        shown.append(request.header("authorization"))
        if len(shown) == 1:
            return Response(503, [("Retry-After", "1")])
        mirror.tokens.revoke()
        return None

    mirror.source.app.intercept = intercept
    assert (await mirror.copy({"from": "app", "tags": tags("v0")})).status == 4
    assert len(shown) == 4, "the first token again, and two that were new"
    assert mirror.tokens.requests == 3
