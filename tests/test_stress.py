"""Many small syncs at random over registries that fail at random, on a clock that jumps: what holds
must hold in all of them, and none may stand still.

Each seed makes registries of every kind that the program knows, with its windows, dialects and
rates; repositories whose images share layers and children, mappings (several targets, aliases,
within one registry, several into one repository), permits and windows as narrow as one. Lines are
slow, requests are refused, answered with 429 and 5xx, dropped and cut. Then every image has one
outcome, what is synced is whole, no blob was stored twice, and the next run, undisturbed, completes
the rest. Where nothing can go on any more the clock jumps to the end of this test's patience. In
two of three seeds time also passes between two looks at the clock.

    STRESS=1000:500 pytest tests/test_stress.py      five hundred other seeds
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import anyio
import pytest

from _regsync.providers import ROWS, Kind
from conformance.client.attachments import referrers_tag
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.app import App
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, held, virtual
from tests.thinning import seeds

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

# A manifest may be asked for by its digest while another tag's answer with the same bytes is under
# way; how a blob comes to its place is decided when its image is promoted, and not again when it may
# start.
NOT_YET = ("manifest_fetched_twice", "blob_pulled_twice", "upload_without_mount")

# One host name of each kind, and what a configuration calls it.
KINDS = {
    "ghcr.io": "ghcr.io",
    "europe-docker.pkg.dev": "europe-docker.pkg.dev",
    "registry-1.docker.io": "docker.io",
    "public.ecr.aws": "public.ecr.aws",
    "012345678901.dkr.ecr.eu-west-1.amazonaws.com": "012345678901.dkr.ecr.eu-west-1.amazonaws.com",
    "mine.azurecr.io": "mine.azurecr.io",
    **{f"{letter}.test": f"http://{letter}.test" for letter in "abc"},
}
# Of any run: a pause that a registry asks for is a second, ours are half a minute at most, and some
# are in a row.
PATIENCE = 3 * 3600.0

Wanted = dict[tuple[int, str, str], Image]


class Ill:
    """What a registry does wrong, each request only so often."""

    def __init__(self, place: Place, random: Random, share: float, most: int) -> None:
        self.on, self._random, self._share, self._most = True, random, share, most
        self._seen: Counter[tuple[str, ...]] = Counter()
        app = place.app
        self._by_patch = (
            place.host == "ghcr.io" or place.scheme == "http"
        ) and random.random() < 0.4
        app.intercept, app.amend = self._intercept, self._amend

    def _strikes(self, request: Request, share: float, *which: str) -> bool:
        if not self.on or self._random.random() > share:
            return False
        key = (*which, request.method, request.kind, request.repository, request.reference)
        self._seen[key] += 1
        return self._seen[key] <= self._most

    async def _intercept(self, request: Request) -> Answer | None:
        await anyio.sleep(self._random.choice([0, 0, 0.001, 0.3]))
        if (
            self._by_patch
            and request.method == "PUT"
            and request.kind == "upload"
            and request.length()
        ):
            return error(405, "UNSUPPORTED", "by PATCH only")
        if not self._strikes(request, self._share):
            return None
        if request.parameter("mount") and self._random.random() < 0.5:
            return error(self._random.choice([400, 403, 404, 405]), "UNSUPPORTED", "no mount")
        wait = self._random.choice([[], [("Retry-After", "1")]])
        slowly = error(429, "TOOMANYREQUESTS", "slowly", headers=wait)
        bad: list[Answer] = [
            Response(500),
            Response(502, early=True),
            error(503, "UNAVAILABLE", "ill"),
            b"",
        ]
        return self._random.choice([slowly, slowly, slowly, *bad])

    def _amend(self, request: Request, answer: Answer) -> Answer:
        """Carry out the request and lose its answer, or cut a blob."""
        if not isinstance(answer, Response) or not self._strikes(request, self._share / 4, "lost"):
            return answer
        if request.method == "GET" and request.kind == "blob" and answer.status == 200:
            body = b"".join(map(bytes, answer.pieces()))
            cut = body[: self._random.randrange(len(body) + 1)]
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + cut
        return b""


def pool(random: Random, seed: Seed) -> list[Image]:
    """Make images of every shape from few layers, so that much is shared."""
    layers = [
        seed.layer(random.choice([0, 900, 5000, 300_000])) for _ in range(random.randint(2, 7))
    ]
    layers += [seed.layer(1_100_000)] * (random.random() < 0.4)

    def image(architecture: str = "amd64") -> Image:
        chosen = [random.choice(layers) for _ in range(random.randint(0, 5))]
        return seed.image(
            layers=chosen, architecture=architecture, inline_config=random.random() < 0.1
        )

    pool = [image(), image(), seed.artifact(None)]
    for _ in range(random.randint(1, 6)):
        children = [image("amd64"), image("arm64"), *random.sample(pool, random.randint(0, 2))]
        pool.append(
            random.choice([image(), seed.index(children, attestations=random.random() < 0.2)])
        )
    return pool


def places_of(world: Virtual, random: Random) -> tuple[list[Place], list[str]]:
    """Let registries listen; return them and what a configuration calls them."""
    chosen = random.sample(sorted(KINDS), random.randint(1, 3))
    places = []
    for name in chosen:
        lines = [
            Link(latency=random.choice([0, 0.02, 0.2]), bandwidth=random.choice([1e5, 1e7]))
            for _ in range(2)
        ]
        app = App(mounts=random.random() < 0.5, referrers_api=random.random() < 0.7)
        scheme = "http" if name.endswith(".test") else "https"
        places.append(world.listen(app, name, scheme=scheme, up=lines[0], down=lines[1]))
    return places, [KINDS[name] for name in chosen]


def attach(
    random: Random, seed: Seed, image: Image, app: App, repository: str, *, listed: bool
) -> list[Image]:
    """Hang artifacts on an image, by what they refer to or by cosign's tags; return those that are
    to travel.
    """
    hung, subjects = list[Image](), [image]
    for end in random.sample([".sig", ".sbom", "", ""], random.randint(0, 3)):
        if end:
            name = "application/vnd.oci.image.config.v1+json"
            own = Seed(
                int(image.top[7:15], 16) + len(end)
            )  # wherever the image is: a tag can name one only
            signature = own.artifact(None, None, config_type=name, size=900)
            signature.load_into(app, repository, tag=referrers_tag(image.top) + end)
            hung += [signature] * (listed or not app.referrers_api)
        elif app.referrers_api:
            subjects.append(seed.artifact(random.choice(subjects), size=random.randint(1, 3000)))
            hung.append(subjects[-1].load_into(app, repository))
    return hung


def scene_of(
    random: Random, images: list[Image], places: list[Place], names: list[str], seed: Seed
) -> tuple[str, Wanted]:
    """Fill the sources, write a configuration, and return what the targets shall hold after it."""
    artifacts = random.random() < 0.5
    registries: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        permits = {"max_concurrent": random.choice([2, 3])} if random.random() < 0.5 else {}
        registries[f"r{number}"] = {"url": name, "auth_type": "anonymous", **permits}
    mappings: list[dict[str, Any]] = []
    wanted: Wanted = {}
    for number in range(random.randint(1, 6)):
        origin, repository = random.randrange(len(places)), f"from/r{number}"
        kept = {f"t{number}-{n}": random.choice(images) for n in range(random.randint(1, 5))}
        for tag, image in kept.items():
            image.load_into(places[origin].app, repository, tag=tag)
        source, listed, hung = places[origin].app, random.random() < 0.5, list[Image]()
        for each in {image.top: image for image in kept.values()}.values() if artifacts else ():
            hung += attach(random, seed, each, source, repository, listed=listed)
        for to in random.sample([f"to/r{number}", "to/all", f"x/{number}"], random.randint(1, 2)):
            targets = random.sample(range(len(places)), random.randint(1, len(places)))
            wanted.update({(n, to, tag): image for n in targets for tag, image in kept.items()})
            wanted.update({(n, to, each.top): each for n in targets for each in hung})
            one = {
                "from": repository,
                "to": to,
                "source": f"r{origin}",
                "targets": [f"r{n}" for n in targets],
            }
            mappings.append({**one, "tags": {"glob": "*" if listed else [*kept]}})
    limits = {"max_concurrent_transfers": random.choice([1, 2, 50])}
    rest = {"defaults": {"artifacts": {"enabled": artifacts}}, "global": limits}
    return json.dumps({"registries": registries, "mappings": mappings, **rest}), wanted


def narrow(random: Random) -> dict[Kind, Any]:
    """Return the rows of all kinds with windows that begin narrower, and smaller chunks."""
    start = random.choice([1, 2, 32])
    rows = {}
    for kind, row in ROWS.items():
        paces = tuple(pace._replace(start=min(pace.start, start)) for pace in row.paces)
        rows[kind] = row._replace(paces=paces, put_limit=row.put_limit and 1 << 20)
    return rows


@contextlib.contextmanager
def passing(step: float) -> Iterator[None]:
    """Let time pass between two looks at a clock that otherwise stands while anybody works."""
    still, looks = anyio.current_time, Counter[float]()

    def look() -> float:
        looks[moment := still()] += 1
        return moment + looks[moment] * step

    with mock.patch.object(anyio, "current_time", look):
        yield


def check_outcomes(ran: Ran, places: list[Place], wanted: Wanted) -> None:
    """Every image has one outcome, what is synced is whole, and the status says how it went."""
    outcomes = {each["target"]: each["status"] for each in ran.images}
    assert len(outcomes) == len(ran.images), "no image has two outcomes"
    failed = [each for each in ran.images if each["status"] == "failed"]
    assert ran.status == (0 if not failed else 2 if len(failed) == len(ran.images) else 1)
    assert "INTERNAL_ERROR" not in {each["error"]["code"] for each in failed}
    hosts = [KINDS[place.host].removeprefix("http://") for place in places]
    names = {(n, to, tag): f"{hosts[n]}/{to}:{tag}" for n, to, tag in wanted if ":" not in tag}
    assert any(name.endswith(":*") for name in outcomes) or outcomes.keys() == {*names.values()}
    for (n, to, tag), name in names.items():
        is_synced = outcomes.get(name, "failed") != "failed"
        assert not is_synced or held(places[n], to, wanted[n, to, tag])


def check_stored_once(places: list[Place]) -> None:
    """No blob came to a repository twice."""
    for place in places:
        stored = place.journal.matching("PUT", "upload", status=201)
        blobs = Counter((entry.repository, entry.query.get("digest")) for entry in stored)
        assert max(blobs.values(), default=1) == 1


def ill_scene(
    world: Virtual,
    random: Random,
    number: int,
    share: float,
    directory: Path,
    lock_up: Callable[[list[Place], Random], None] = lambda places, random: None,
) -> tuple[list[Place], Wanted, Path, list[Ill]]:
    """Make registries of which a share of the answers is ill, and a configuration of copies between
    them; with them comes which image has to be where. `lock_up` has them ask for logins.
    """
    places, names = places_of(world, random)
    lock_up(places, random)
    seed = Seed(number)
    text, wanted = scene_of(random, pool(random, seed), places, names, seed)
    file = directory / "mirror.yaml"
    file.write_text(text)
    ills = [
        Ill(place, Random(random.random()), share, random.choice([1, 3, 8])) for place in places
    ]
    return places, wanted, file, ills


@pytest.mark.slow
@pytest.mark.provokes(
    *NOT_YET, "blob_before_session", "mount_refused_again", "absent_tag_asked", "own_manifest_asked"
)
@pytest.mark.parametrize("number", seeds("STRESS", 6, 30))
async def test_no_run_stands_still(number: int, tmp_path: Path) -> None:
    random = Random(number)
    share = random.choice([0, 0.1, 0.3, 0.6])
    async with virtual(chance=random.random()) as world:
        places, wanted, file, ills = ill_scene(world, random, number, share, tmp_path)

        async def run() -> Ran:
            with anyio.fail_after(PATIENCE):
                return await world.run("sync", "--json", "-q", "-c", str(file))

        kinds = mock.patch.dict(ROWS, narrow(random))  # type: ignore[arg-type]
        with kinds, passing((0, 1e-5, 2e-4)[number % 3]):
            ran = await run()
            check_outcomes(ran, places, wanted)
            check_stored_once(places)
            assert share or ran.status == 0
            assert share or ran.seconds < 600, "somebody waited for a mount in vain"
            for each in ills:
                each.on = False
            again = await run()
        assert (again.status, again.failed) == (0, [])
        assert again.seconds < 600, "somebody waited for a mount in vain"
        lacking = [key for key, image in wanted.items() if not held(places[key[0]], key[1], image)]
        assert not lacking


def lose(app: App, repository: str, random: Random) -> None:
    """Let a target lose things as a registry does that keeps to its word: nothing stands whose
    parts are gone.
    """
    held = app.repositories.get(repository)
    what = random.choice(["nothing", "repository", "blobs", "manifests", "tags"])
    if held is None or what == "repository":
        app.repositories.pop(repository, None)
        return
    parts: dict[str, dict[str, Any]] = {
        "blobs": held.blobs,
        "manifests": held.manifests,
        "tags": held.tags,
    }
    for name in [each for each in parts.get(what, {}) if random.random() < 0.4]:
        del parts[what][name]
    while broken := [
        digest
        for digest, manifest in held.manifests.items()
        if any(each["digest"] not in held.manifests for each in manifest.children)
        or any(each["digest"] not in held.blobs and not each.get("urls") for each in manifest.blobs)
    ]:
        for digest in broken:
            del held.manifests[digest]
    for tag in [tag for tag, digest in held.tags.items() if digest not in held.manifests]:
        del held.tags[tag]


@pytest.mark.slow
@pytest.mark.provokes(
    *NOT_YET, "blob_before_session", "mount_refused_again", "absent_tag_asked", "own_manifest_asked"
)
@pytest.mark.provokes("manifest_names_absent", "manifest_put_twice", "known_blob_asked")
@pytest.mark.parametrize("number", seeds("STRESS", 2, 10))
async def test_targets_that_lose_things_behind_our_back_converge_in_the_next_run(
    number: int, tmp_path: Path
) -> None:
    """With a state from a run under faults, which may have failed in parts (I5)."""
    random = Random(number)
    share = random.choice([0, 0, 0.1, 0.3])
    async with virtual(chance=random.random()) as world:
        places, wanted, file, ills = ill_scene(world, random, number, share, tmp_path)
        with anyio.fail_after(4 * PATIENCE):
            ran = await world.run("sync", "--json", "-q", "-c", str(file))
            assert share or ran.status == 0
            for each in ills:
                each.on = False
            for _ in range(2):
                for n, to in sorted({(n, to) for n, to, _ in wanted}):
                    lose(places[n].app, to, random)
                ran = await world.run("sync", "--json", "-q", "--recheck", "-c", str(file))
                assert (ran.status, ran.failed) == (0, [])
                assert all(held(places[n], to, image) for (n, to, _), image in wanted.items())
