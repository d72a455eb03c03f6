"""Registries of every kind that are ill at random, images of every shape, and a configuration of copies
between them: the scene of tests/test_stress.py and tests/test_stress_stopped.py.

A seed makes all of it: registries of all kinds; repositories whose images share layers and children;
mappings (several targets, aliases, within one registry, several into one repository); as few requests
at a time as one. Lines are slow, requests are refused,
answered with 429 and 5xx, dropped and cut.
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

from conformance.client.attachments import fallback_lists, referrers_tag
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.app import App
from conformance.server.memory import Link, Place
from tests import ends
from tests.ends import Virtual

__all__ = [
    "KINDS",
    "NOT_YET",
    "PATIENCE",
    "Ill",
    "Wanted",
    "check_hung_up",
    "ill_scene",
    "passing",
    "places_of",
    "pool",
    "scene_of",
]

# A manifest may be asked for by its digest while another tag's answer with the same bytes is under
# way; how a blob comes to its place is decided when its image is promoted, and not again when it may
# start.
NOT_YET = ("manifest_fetched_twice", "upload_without_mount")

# One host name of each kind, and what a configuration calls it.
KINDS = {
    "ghcr.io": "ghcr.io",
    "europe-docker.pkg.dev": "europe-docker.pkg.dev",
    "registry-1.docker.io": "docker.io",
    "public.ecr.aws": "public.ecr.aws",
    "012345678901.dkr.ecr.eu-west-1.amazonaws.com": "012345678901.dkr.ecr.eu-west-1.amazonaws.com",
    "mine.azurecr.io": "mine.azurecr.io",
    "yours.azurecr.io": "yours.azurecr.io",
    **{f"{letter}.test": f"http://{letter}.test" for letter in "abc"},
}

# Two that take chunks, so that one reading may feed both.
LIKE_AZURE = ["mine.azurecr.io", "yours.azurecr.io", "a.test"]

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
    layers += [seed.layer(random.choice([1_100_000, 3_300_000]))] * (random.random() < 0.5)

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
    kinds = random.choice([sorted(KINDS), sorted(KINDS), LIKE_AZURE])
    chosen = random.sample(kinds, random.randint(1, 3))
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
    hung, referrers = list[Image](), list[Image]()
    for end in random.sample([".sig", ".sbom", "", ""], random.randint(0, 3)):
        if end:
            name = "application/vnd.oci.image.config.v1+json"
            own = Seed(
                int(image.top[7:15], 16) + len(end)
            )  # wherever the image is: a tag can name one only
            signature = own.artifact(None, None, config_type=name, size=900)
            signature.load_into(app, repository, tag=referrers_tag(image.top) + end)
            hung += [signature] * (listed or not app.referrers_api)
        else:
            subject = random.choice([image, *referrers])
            referrers.append(seed.artifact(subject, size=random.randint(1, 3000)))
            referrers[-1].load_into(app, repository)
    if not app.referrers_api:
        for tag, index in fallback_lists(referrers).items():
            index.load_into(app, repository, tag=tag)
    return hung + referrers


def scene_of(
    random: Random, images: list[Image], places: list[Place], names: list[str], seed: Seed
) -> tuple[str, Wanted]:
    """Fill the sources, write a configuration, and return what the targets shall hold after it."""
    artifacts = random.random() < 0.5
    registries: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        registries[f"r{number}"] = {"url": name}
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
    # A registry that is both ends of one mapping needs two permits.
    both = {each["source"] for each in mappings if each["source"] in each["targets"]}
    for alias, registry in registries.items():
        if not registry["url"].startswith("oci-layout:"):
            registry["auth_type"] = "anonymous"
            if random.random() < 0.5:
                registry["max_concurrent"] = random.choice([2, 3] if alias in both else [1, 2, 3])
    limits: dict[str, Any] = {"max_concurrent_transfers": random.choice([1, 2, 50])}
    if random.random() < 0.5:
        limits["staging_size_limit"] = random.choice(["0", "0", "10 KB", "1.5 MB"])
        # What cannot be kept for all targets may be read for each.
        ends._provoked.add("blob_pulled_twice")
    rest = {"defaults": {"artifacts": {"enabled": artifacts}}, "global": limits}
    return json.dumps({"registries": registries, "mappings": mappings, **rest}), wanted


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


@contextlib.contextmanager
def passing(step: float) -> Iterator[None]:
    """Let time pass between two looks at a clock that otherwise stands while anybody works."""
    still, looks = anyio.current_time, Counter[float]()

    def look() -> float:
        looks[moment := still()] += 1
        return moment + looks[moment] * step

    with mock.patch.object(anyio, "current_time", look):
        yield


async def check_hung_up(places: list[Place]) -> None:
    """After a minute, in which all that was sent is there, no registry has an open connection."""
    await anyio.sleep(60)
    assert not any(place.open_connections() for place in places)
