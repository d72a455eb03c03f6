"""Registries that ration, and a program that keeps to it: who waits, for how long, and who does not
have to.

All on a clock that jumps. Requests are counted at the registry; what refuses them is the harness's
own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from conformance.client.copies import ACCEPT
from conformance.content.fleets import Fleet
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.providers.personas import Persona, Provider
from conformance.providers.rates import Cap
from conformance.registry.app import App
from conformance.server.memory import Link, Place
from tests.ends import document, held, tags
from tools.benches.place import app_of

NEAR = Link(latency=0.02)
LATER = [("Retry-After", "30")]


@pytest.fixture
def seed() -> Seed:
    return Seed(83)


def images_at(place: Place, seed: Seed, count: int, *sizes: int, name: str = "app") -> list[Image]:
    """Load images, each with blobs of its own, as app:v0, app:v1, ..."""
    return [
        seed.image(sizes=sizes or (3000,)).load_into(place.app, name, tag=f"v{n}")
        for n in range(count)
    ]


def refuse(
    place: Place, where: Callable[[Request], bool], *, until: float, headers: Any = ()
) -> list[float]:
    """Answer 429 to what `where` picks, until a time; return when that happened."""
    refused: list[float] = []

    def intercept(request: Request) -> Answer | None:
        if anyio.current_time() >= until or not where(request):
            return None
        refused.append(anyio.current_time())
        return error(429, "TOOMANYREQUESTS", "slowly", headers=headers)

    place.app.intercept = intercept
    return refused


def is_manifest_put(request: Request) -> bool:
    return (request.method, request.kind) == ("PUT", "manifest")


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


async def test_ecrs_published_rates_are_kept_and_used(world, seed):
    """The target refuses what is more than its caps allow in any second."""
    source = world.registry("source.test", up=NEAR, down=NEAR)
    images = images_at(source, seed, 60, 3000, 3000)
    host = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
    caps = [Cap(most, actions=frozenset({action})) for action, most in ECR_CAPS.items()]
    persona = Persona("", hosts={"registry": host}, mount="committed", caps=lambda provider: caps)
    ecr = Provider(persona, now=anyio.current_time, wall=world.wall)
    target = world.listen(ecr, host, scheme="https", up=NEAR, down=NEAR)
    registries = {"source": source, "ecr": {"url": host, "auth_type": "anonymous"}}
    text = document(registries, {"from": "app", "tags": tags("*")})
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert ran.statuses() == ["synced"] * 60
    assert all(held(target, "app", image) for image in images)
    assert not ecr.rates.refused
    assert ran.totals["requests"][host]["manifest_put"] == 60
    assert ran.seconds < 60 / 9 + 1


async def test_a_google_project_is_rationed_apart_from_its_neighbour(world, seed):
    """One window and bucket a project: the second one's work does not wait for the first one's."""
    source = world.registry("source.test", up=NEAR, down=NEAR)
    images = {name: images_at(source, seed, 40, 10, 20, name=name) for name in ("one", "two")}
    target = world.listen(App(), "europe-docker.pkg.dev", scheme="https", up=NEAR, down=NEAR)
    registries = {"source": source, "t": {"url": "europe-docker.pkg.dev", "auth_type": "anonymous"}}
    mappings = [{"from": name, "to": f"{name}/r/app", "tags": tags("*")} for name in images]
    text = document(registries, *mappings)
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert ran.statuses() == ["synced"] * 80
    for project in images:
        mine = [each.time for each in target.journal.entries if f"/{project}/" in each.target]
        assert len(mine) > 300 - 30
        for first, at in enumerate(mine):
            assert sum(other < at + 1 for other in mine[first:]) <= 240 + 30
        assert all(held(target, f"{project}/r/app", image) for image in images[project])
    both = [each.time for each in target.journal.entries]
    assert max(sum(at <= other < at + 1 for other in both) for at in both) > 240 + 30


async def test_a_copy_inside_a_registry_of_one_window_ends(world, seed):
    """There a blob's GET and PUT draw on the same window, which no finished transfer may leave
    narrower.
    """
    place = world.listen(App(mounts=False), "ghcr.io", scheme="https", up=NEAR, down=NEAR)
    images = images_at(place, seed, 40, 100_000, 100_000, name="o/app")
    refused = refuse(place, lambda request: request.kind == "upload", until=8.0)
    registry = {"url": "ghcr.io", "auth_type": "anonymous"}
    text = document(
        {"source": registry, "t": registry}, {"from": "o/app", "to": "o/kept", "tags": tags("*")}
    )
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert refused
    assert ran.statuses() == ["synced"] * 40
    assert all(held(place, "o/kept", image) for image in images)


async def test_uploads_of_two_steps_that_wait_for_a_narrow_window_end(world, seed):
    """Read once for two targets, sent by PATCH and PUT: refusals have halved the window down to
    one.
    """
    source, *targets = (
        world.registry(name, up=NEAR, down=NEAR) for name in ("source.test", "a.test", "b.test")
    )
    images, refused = images_at(source, seed, 12, 100_000, 100_000), list[float]()

    def intercept(request: Request) -> Answer | None:
        if request.method == "PUT" and request.kind == "upload" and request.length():
            return error(405, "UNSUPPORTED", "by PATCH only")
        if request.method not in ("PATCH", "PUT") or anyio.current_time() >= 3.0:
            return None
        refused.append(anyio.current_time())
        return error(429, "TOOMANYREQUESTS", "slowly")

    for target in targets:
        target.app.intercept = intercept
    registries = {"source": source, **dict(zip("ab", targets, strict=True))}
    ran = await world.sync(registries, {"from": "app", "tags": tags("*"), "targets": ["a", "b"]})
    assert refused
    assert ran.statuses() == ["synced"] * 24
    assert all(held(target, "app", image) for image in images for target in targets)


# A refusal is about one action.


async def test_a_429_on_manifest_put_slows_nothing_but_manifest_puts(world, seed):
    source, target = (
        world.registry(name, up=NEAR, down=NEAR) for name in ("source.test", "target.test")
    )
    images = images_at(source, seed, 30, 100_000)
    refused = refuse(target, is_manifest_put, until=1.0, headers=LATER)
    ran = await world.sync({"source": source, "t": target}, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["synced"] * 30
    assert all(held(target, "app", image) for image in images)
    first = min(refused)
    assert len(refused) <= 4, "those that were under way"
    for journal, method, kind in (
        (source.journal, "GET", "manifest"),
        (source.journal, "GET", "blob"),
        (target.journal, "POST", "upload_start"),
        (target.journal, "PUT", "upload"),
    ):
        times = [each.time for each in journal.matching(method, kind)]
        assert len(times) >= 29
        assert max(times) < first + 2
    puts = [each.time for each in target.journal.matching("PUT", "manifest", status=201)]
    assert len(puts) == 30
    assert min(puts) >= first + 30, "the window rests for all its users"
    assert ran.seconds < 35, "once, not for each of them"
    assert ran.totals["throttled"] == {"target.test": len(refused)}


async def test_retry_after_of_an_upload_start_rests_the_window_and_frees_what_was_held(world, seed):
    """Transfers that wait hold nothing of the source, so that the other target has all of it."""
    source = world.registry("source.test", up=NEAR, down=NEAR)
    busy, well = (world.registry(name, up=NEAR, down=NEAR) for name in ("busy.test", "well.test"))
    images_at(source, seed, 20)
    images_at(source, seed, 20, name="other")
    refused = refuse(
        busy, lambda request: request.kind == "upload_start", until=20.0, headers=LATER
    )
    ran = await world.sync(
        {"source": {"url": source.url, "max_concurrent": 4}, "busy": busy, "well": well},
        {"from": "app", "tags": tags("*"), "targets": ["busy"]},
        {"from": "other", "tags": tags("*"), "targets": ["well"]},
    )
    assert ran.statuses() == ["synced"] * 40
    assert max(each.time for each in well.journal.matching("PUT", "manifest")) < 10
    assert min(each.time for each in busy.journal.matching("PUT", "upload")) >= min(refused) + 30
    assert len(refused) <= 4
    assert ran.seconds < 40


async def test_a_503_with_retry_after_rests_the_window_too(world, seed):
    source, target = (
        world.registry(name, up=NEAR, down=NEAR) for name in ("source.test", "target.test")
    )
    images_at(source, seed, 30)
    source.app.faults.on("GET", "manifest").nth(8).status(503, headers={"Retry-After": "20"})
    ran = await world.sync({"source": source, "t": target}, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["synced"] * 30
    entry = source.journal.matching("GET", "manifest", status=503)[0]
    times = [each.time for each in source.journal.matching("GET", "manifest")]
    assert not [at for at in times if entry.time + 0.05 < at < entry.time + 20]
    assert max(each.time for each in source.journal.matching("GET", "blob")) > 20


async def test_a_request_that_is_always_refused_gives_up_and_so_do_all_behind_it(world, seed):
    source, target = (
        world.registry(name, up=NEAR, down=NEAR) for name in ("source.test", "target.test")
    )
    images_at(source, seed, 200)
    is_get = refuse(
        source,
        lambda request: request.kind == "manifest",
        until=1e9,
        headers=[("Retry-After", "60")],
    )
    ran = await world.sync({"source": source, "t": target}, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["failed"] * 200
    assert 600 < ran.seconds < 900
    assert len(is_get) < 40, "one at a time asks whether the registry has changed its mind"


# A rate that nobody has published.


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


@pytest.mark.parametrize(("tells", "most"), [(True, 90), (False, 140)])
async def test_few_bodies_are_sent_in_vain_to_a_registry_that_takes_40_requests_a_second(
    world, tells, most
):
    """The pauses that a run chooses are random, so this is the mean of four runs."""
    source = world.registry("source.test", up=NEAR, down=NEAR)
    Fleet(size=10_000, repositories=5, tags=8).load_into(app_of(source))
    mappings = [{"from": f"fleet/app-{number}", "tags": tags("*")} for number in range(5)]
    limiters: list[Limiter] = []
    for number in range(4):
        target = world.registry(f"target{number}.test", up=NEAR, down=NEAR)
        target.app.intercept = limiter = Limiter(40, tells=tells)
        limiters.append(limiter)
        ends = {"source": source, "t": {"url": target.url, "max_concurrent": 16}}
        ran = await world.sync(ends, *mappings)
        assert ran.statuses() == ["synced"] * 40
        assert 390 <= limiter.asked - limiter.refused <= 410
        assert 9 < ran.seconds < 18  # at 40 requests a second: 9 pauses at least
    assert sum(limiter.refused for limiter in limiters) <= 4 * most
    assert sum(limiter.refused_bytes for limiter in limiters) <= 4 * most * 7000


async def test_one_stray_refusal_costs_its_pause_alone(world):
    source = world.registry("source.test", up=NEAR, down=NEAR)
    target = world.registry("target.test", up=NEAR, down=NEAR)
    Fleet(size=10_000, repositories=5, tags=8).load_into(app_of(source))
    target.app.faults.on("POST").nth(30).status(429, retry_after=1)
    ends = {"source": source, "t": {"url": target.url, "max_concurrent": 16}}
    mappings = [{"from": f"fleet/app-{number}", "tags": tags("*")} for number in range(5)]
    ran = await world.sync(ends, *mappings)
    assert ran.statuses() == ["synced"] * 40
    assert ran.seconds < 3.5


# What is left of a quota.


async def test_docker_hubs_quota_is_used_up_and_hardly_overdrawn(world, seed):
    hub, target = world.persona("dockerhub"), world.registry("target.test", up=NEAR, down=NEAR)
    for number in range(130):
        seed.image(sizes=(500,)).load_into(hub, "library/app", tag=f"v{number}")
    text = document({"source": "docker.io", "t": target}, {"from": "app", "tags": tags("*")})
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert ran.status == 1
    # Who had begun is brought to its end, though its registry takes no further question.
    assert sorted(ran.statuses()) == ["failed"] * 30 + ["synced"] * 100
    assert len(target.app.tags("app")) == 100
    assert hub.journal.count("GET", "manifest", status=200) == 100
    refused = hub.journal.count("GET", "manifest", status=429)
    assert 1 <= refused <= 30
    failed = [each["error"]["message"] for each in ran.images if each["status"] == "failed"]
    assert all("quota is used up" in text and "until 2026-01-01 06:0" in text for text in failed)
    assert ran.seconds < 60


async def test_a_quota_that_others_have_used_up_costs_one_refusal(world, seed):
    """It closes the lane of manifests; HEADs go on."""
    hub, target = world.persona("dockerhub"), world.registry("target.test", up=NEAR, down=NEAR)
    for number in range(5):
        seed.image(sizes=(500,)).load_into(target.app, "app", tag=f"v{number}")
        seed.image(sizes=(500,)).load_into(hub, "library/app", tag=f"v{number}")
    assert hub.tokens is not None
    scope = "service=registry.docker.io&scope=repository:library/app:pull"
    token = hub.tokens.request("GET", f"/token?{scope}", []).json()["token"]
    for _ in range(100):
        path = "/v2/library/app/manifests/v0"
        login = [("Authorization", f"Bearer {token}"), ("Accept", ACCEPT)]
        assert hub.request("GET", path, login).status == 200
    text = document({"source": "docker.io", "t": target}, {"from": "app", "tags": tags("v*")})
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert ran.statuses() == ["failed"] * 5
    assert hub.journal.count("HEAD", "manifest", status=200) == 5
    assert hub.journal.count("GET", "manifest", status=429) == 1


def with_quota(provider: Provider, request: Request, answer: Response) -> Response:
    """Tell how many manifests more there may be within a minute."""
    if request.kind == "manifest":
        left = provider.rates.remaining(provider.rates.caps[0], request)
        told = [
            ("X-RateLimit-Limit", "30"),
            ("X-RateLimit-Remaining", str(left)),
            ("X-RateLimit-Reset", "60"),
        ]
        answer.headers += told
    return answer


async def test_discovery_stops_at_the_wall_and_resumes_by_itself(world, seed):
    row = Persona(
        source="docs/protocol-facts.md section 7.1",
        hosts={"registry": "rationed.test"},
        caps=lambda provider: (Cap(30, 60.0, frozenset({"manifest_get"})),),
        after=(with_quota,),
    )
    rationed = Provider(row, now=anyio.current_time, wall=world.wall)
    source = world.listen(rationed, "rationed.test", up=NEAR, down=NEAR)
    target = world.registry("target.test", up=NEAR, down=NEAR)
    images = images_at(source, seed, 100)
    ran = await world.sync({"source": source, "t": target}, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["synced"] * 100
    assert all(held(target, "app", image) for image in images)
    assert rationed.rates.refused["manifest_get"] <= 3 * 8
    assert 180 < ran.seconds < 300
    asked = sorted(each.time for each in source.journal.matching("GET", "manifest", status=200))
    put = sorted(each.time for each in target.journal.matching("PUT", "manifest", status=201))
    # Execution goes on meanwhile: each image is there soon after it was found.
    assert all(0 < there - found < 3 for found, there in zip(asked, put, strict=True))


# A registry that is stopped.


async def test_those_who_wait_fail_at_once_when_their_registry_asks_for_hours(world, seed):
    source, target, other = (
        world.registry(f"{name}.test", up=NEAR, down=NEAR) for name in ("source", "t", "o")
    )
    images_at(source, seed, 40)
    refused = refuse(target, is_manifest_put, until=1e9, headers=[("Retry-After", "4000")])
    ran = await world.sync(
        {"source": source, "t": target, "o": other}, {"from": "app", "tags": tags("*")}
    )
    assert sorted(ran.statuses()) == ["failed"] * 40 + ["synced"] * 40
    assert len(refused) <= 4, "those that were under way"
    assert ran.seconds < 10
    messages = {each["error"]["message"] for each in ran.images if each["status"] == "failed"}
    assert all("1h06m" in text and "until 2026-01-01 01:06 UTC" in text for text in messages)


async def test_dead_credentials_stop_their_registry_only(world, seed):
    source, well = (
        world.registry(name, up=NEAR, down=NEAR) for name in ("source.test", "well.test")
    )
    dead = world.listen(App(), "dead.test", scheme="https", up=NEAR, down=NEAR)
    images_at(source, seed, 20)
    asks = [("WWW-Authenticate", 'Basic realm="dead"')]
    dead.app.intercept = lambda request: error(401, "UNAUTHORIZED", "no", headers=asks)
    login = {"auth_type": "basic", "credentials": {"username": "me", "password": "wrong"}}
    registries = {"source": source, "dead": {"url": "dead.test", **login}, "well": well}
    ran = await world.sync(registries, {"from": "app", "tags": tags("*")})
    assert sorted(ran.statuses()) == ["failed"] * 20 + ["synced"] * 20
    errors = [each["error"] for each in ran.images if each["error"]]
    assert {each["code"] for each in errors} == {"AUTH_ERROR"}
    assert all("refused" in each["message"] for each in errors)
    assert len(dead.journal.entries) == 2, (
        "bare, then with what is wrong, and not again: accounts get locked"
    )


async def test_a_403_of_one_repository_stops_no_other(world, seed):
    source, target = (
        world.registry(name, up=NEAR, down=NEAR) for name in ("source.test", "target.test")
    )
    for name in ("open", "shut"):
        for number in range(5):
            seed.image(sizes=(500,)).load_into(source.app, name, tag=f"v{number}")

    def closed(request: Request) -> Answer | None:
        return error(403, "DENIED", "not yours") if request.repository == "shut" else None

    target.app.intercept = closed
    mappings = [{"from": name, "tags": tags("*")} for name in ("open", "shut")]
    ran = await world.sync({"source": source, "t": target}, *mappings)
    outcome = {each["target"]: each["status"] for each in ran.images}
    assert {name.partition("/")[2]: status for name, status in outcome.items()} == {
        **{f"open:v{n}": "synced" for n in range(5)},
        **{f"shut:v{n}": "failed" for n in range(5)},
    }


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_an_unreachable_registry_stops_and_the_others_finish(world, seed, how):
    source, gone, well = (
        world.registry(f"{name}.test", up=NEAR, down=NEAR) for name in ("source", "gone", "well")
    )
    images_at(source, seed, 50)
    gone.fail(how)
    ran = await world.sync(
        {"source": source, "gone": gone, "well": well}, {"from": "app", "tags": tags("*")}
    )
    assert sorted(ran.statuses()) == ["failed"] * 50 + ["synced"] * 50
    assert ran.seconds < 60
    assert len(well.app.tags("app")) == 50
