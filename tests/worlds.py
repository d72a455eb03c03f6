"""Worlds in which all goes wrong that may: the scenes of tests/test_worlds.py.

A seed makes all of it: registries of all kinds, a layout as one more end; repositories whose images
share layers and children; mappings (several targets, aliases, within one registry, several into one
repository); as few requests at a time as one. Lines are slow; requests are refused, answered with 429
and 5xx, dropped and cut. To that may come logins that end early and caps on requests, habits (uploads
lost, ranges that are not true, mounts refused, long pauses asked for), outages of whole registries,
a disk that fills up, a state that is damaged, and targets that lose what they held.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import anyio

from conformance.audit import latest
from conformance.images import Image, Seed
from conformance.memory import Link, Place
from conformance.messages import Answer, Request, Response, error
from conformance.rates import Cap, Metered, Rates
from conformance.registry import App
from conformance.tokens import TokenService
from conformance.walks import fallback_lists, referrers_tag
from tests import ends
from tests.ends import Ran, Virtual, held
from tests.layouts import NAME, blob_path, make_layout

__all__ = [
    "NOT_YET",
    "PATIENCE",
    "Scene",
    "damage_state",
    "filling_disk",
    "lose",
    "passing",
    "pool",
    "spoil",
    "storms",
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

# Images by the number of an end, the repository, and the tag; or the digest, if it has none.
Wanted = dict[tuple[int, str, str], Image]


class Scene:
    """Ends, a configuration of copies between them, and which image has to be where afterwards.

    `locked` and `capped` are the shares of registries that want tokens and that have caps on
    requests; `shelved` is how likely there is a layout.
    """

    def __init__(
        self,
        world: Virtual,
        random: Random,
        number: int,
        directory: Path,
        *,
        images: list[Image] | None = None,
        locked: float = 0.0,
        capped: float = 0.0,
        shelved: float = 0.0,
    ) -> None:
        self.world = world
        self.file = directory / "mirror.yaml"
        self.places, names = places_of(world, random)
        lock_up(self.places, random, locked, capped)
        self.shelves = []
        if shelved and random.random() < shelved:
            self.shelves.append(SimpleNamespace(app=App(), path=directory / "shelf"))
            names.append(f"oci-layout:{directory / 'shelf'}")
        self.ends: list[Any] = [*self.places, *self.shelves]
        seed = Seed(number)
        images = images or pool(random, seed)
        text, self.wanted = scene_of(random, images, self.ends, names, seed)
        self.file.write_text(text)
        for shelf in self.shelves:
            write_shelf(shelf)
        self.ills: list[Ill] = []

    def fall_ill(self, random: Random, share: float) -> None:
        """Let a share of each registry's answers be ill."""
        self.ills = [
            Ill(place, Random(random.random()), share, random.choice([1, 3, 8]))
            for place in self.places
        ]

    def recover(self) -> None:
        for ill in self.ills:
            ill.on = False

    async def run(self, *options: str) -> Ran:
        """Run once, and check what holds of any run."""
        since = latest(self.world._sites())
        with anyio.fail_after(PATIENCE):
            ran = await self.world.run("sync", "--json", "-q", *options, "-c", str(self.file))
        self.check_stored_once(since)
        for shelf in self.shelves:
            read_shelf(shelf)
        self.check_outcomes(ran)
        return ran

    async def complete(self) -> Ran:
        """Run once more, which brings all that lacks."""
        ran = await self.run()
        assert (ran.status, ran.failed) == (0, [])
        assert self.lacking() == []
        return ran

    def check_stored_once(self, since: int) -> None:
        """No blob came to a repository twice in one run."""
        for place in self.places:
            stored = Counter(
                (entry.repository, entry.query.get("digest"))
                for entry in place.journal.matching("PUT", "upload", status=201)
                if entry.begun > since
            )
            assert max(stored.values(), default=1) == 1

    def check_outcomes(self, ran: Ran) -> None:
        """Every image has one outcome, the status says how it went, and what has a tag at its target
        is whole.
        """
        assert "Traceback" not in ran.err
        outcomes = {each["target"]: each["status"] for each in ran.images}
        # Two mappings to one repository may both have failed before their tags were known.
        whole = [each["target"] for each in ran.images if each["target"].endswith(":*")]
        pairs = {(each["source"], each["target"]) for each in ran.images}
        assert len(pairs) == len(ran.images) == len({*outcomes} - {*whole}) + len(whole)
        codes = [each["error"]["code"] for each in ran.images if each["status"] == "failed"]
        assert "INTERNAL_ERROR" not in codes
        if not ran.report["interrupted"]:
            some = 0 if not codes else 1 if len(codes) < len(ran.images) else 2
            assert ran.status == (4 if some == 2 and {*codes} == {"AUTH_ERROR"} else some)
        names = {
            (n, to, tag): f"{prefix_of(self.ends[n])}{to}:{tag}"
            for n, to, tag in self.wanted
            if ":" not in tag
        }
        assert ran.report["interrupted"] or whole or outcomes.keys() == {*names.values()}
        for (n, to, tag), name in names.items():
            end, image = self.ends[n], self.wanted[n, to, tag]
            tagged = end.app.tags(to).get(tag)
            assert tagged is None or held(end, to, image), name
            assert outcomes.get(name, "failed") == "failed" or tagged == image.top, name

    def lacking(self) -> list[tuple[int, str, str]]:
        """Return what the ends do not hold whole, and the artifacts that they do not list."""
        return [
            (n, to, name)
            for (n, to, name), image in self.wanted.items()
            if not held(self.ends[n], to, image) or not is_found(self.ends[n], to, name, image)
        ]

    async def check_hung_up(self) -> None:
        """After a minute, in which all that was sent is there, no registry has an open connection."""
        await anyio.sleep(60)
        assert not any(place.open_connections() for place in self.places)


# What is copied, between which ends.


def pool(random: Random, seed: Seed) -> list[Image]:
    """Make images of every shape from few layers, so that much is shared."""
    layers = [
        seed.layer(random.choice([0, 900, 5000, 300_000])) for _ in range(random.randint(2, 7))
    ]
    layers += [seed.layer(random.choice([1_100_000, 3_300_000]))] * (random.random() < 0.5)

    def image(architecture: str = "amd64") -> Image:
        chosen = [random.choice(layers) for _ in range(random.randint(0, 5))]
        inline = random.random() < 0.1
        return seed.image(layers=chosen, architecture=architecture, inline_config=inline)

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
        up, down = (
            Link(latency=random.choice([0, 0.02, 0.2]), bandwidth=random.choice([1e5, 1e7]))
            for _ in range(2)
        )
        app = App(mounts=random.random() < 0.5, referrers_api=random.random() < 0.7)
        scheme = "http" if name.endswith(".test") else "https"
        places.append(world.listen(app, name, scheme=scheme, up=up, down=down))
    return places, [KINDS[name] for name in chosen]


def lock_up(places: list[Place], random: Random, locked: float, capped: float) -> None:
    """Put some registries behind tokens that end early, and do not always say so, and some behind
    caps on requests.
    """
    for place in places:
        if locked and random.random() < locked:
            life = random.choice([60.0, 300.0])
            place.app.auth = TokenService(
                grants=lambda user, access: True,
                expires_in=int(life) if random.random() < 0.5 else None,
                lifetime=life,
                now=anyio.current_time,
            )
        if capped and random.random() < capped:
            cap = Cap(*random.choice([(3, 1.0), (30, 10.0), (150, 60.0)]))
            rates = Rates(cap, now=anyio.current_time, has_retry_after=random.random() < 0.5)
            place.app.auth = Metered(rates, place.app.auth)


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
            # The same wherever the image is: a tag can name one only.
            own = Seed(int(image.top[7:15], 16) + len(end))
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
    random: Random, images: list[Image], ends_of: Sequence[Any], names: list[str], seed: Seed
) -> tuple[str, Wanted]:
    """Fill the sources, write a configuration, and return what the targets shall hold after it."""
    artifacts = random.random() < 0.5
    registries: dict[str, dict[str, Any]] = {f"r{n}": {"url": url} for n, url in enumerate(names)}
    mappings: list[dict[str, Any]] = []
    wanted: Wanted = {}
    for number in range(random.randint(1, 6)):
        origin, repository = random.randrange(len(ends_of)), f"from/r{number}"
        kept = {f"t{number}-{n}": random.choice(images) for n in range(random.randint(1, 5))}
        for tag, image in kept.items():
            image.load_into(ends_of[origin].app, repository, tag=tag)
        source, listed, hung = ends_of[origin].app, random.random() < 0.5, list[Image]()
        for each in {image.top: image for image in kept.values()}.values() if artifacts else ():
            hung += attach(random, seed, each, source, repository, listed=listed)
        for to in random.sample([f"to/r{number}", "to/all", f"x/{number}"], random.randint(1, 2)):
            targets = random.sample(range(len(ends_of)), random.randint(1, len(ends_of)))
            wanted.update({(n, to, tag): image for n in targets for tag, image in kept.items()})
            wanted.update({(n, to, each.top): each for n in targets for each in hung})
            mapping = {"from": repository, "to": to, "source": f"r{origin}"}
            chosen = {"glob": "*" if listed else [*kept]}
            mappings.append({**mapping, "targets": [f"r{n}" for n in targets], "tags": chosen})
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


def prefix_of(end: Any) -> str:
    """Return what stands before a repository in the names that a report has."""
    if isinstance(end, Place):
        return KINDS[end.host].removeprefix("http://") + "/"
    return f"oci-layout:{end.path}//"


def is_found(end: Any, repository: str, name: str, image: Image) -> bool:
    """Whether a tag names the image, or an artifact's subject leads to it."""
    app = end.app
    if ":" not in name:
        return app.tags(repository).get(name) == image.top
    subject = image.document.get("subject")
    if subject is None:
        return image.top in app.tags(repository).values()
    if not isinstance(end, Place):
        return image.top in end.unnamed
    if app.referrers_api:
        return True
    fallback = app.manifest(repository, referrers_tag(subject["digest"]))
    return fallback is not None and image.top.encode() in fallback.body


# A shelf is an end that is a layout: its App has what the layout holds.


def write_shelf(shelf: SimpleNamespace) -> None:
    """Write the layout with all that its App has: entries with names, artifacts without."""
    images: dict[str, Image] = {}
    referrers: dict[str, dict[str, Any]] = {}
    for repository, content in shelf.app.repositories.items():
        blobs = {digest: bytes(blob) for digest, blob in content.blobs.items()}
        manifests = {digest: (m.media_type, m.body) for digest, m in content.manifests.items()}
        for tag, digest in content.tags.items():
            images[f"{repository}:{tag}"] = Image(digest, manifests[digest][0], manifests, blobs)
        for digest, (media_type, body) in manifests.items():
            if "subject" in json.loads(body):
                entry = {"mediaType": media_type, "digest": digest, "size": len(body)}
                referrers[digest] = entry
    if images:
        make_layout(shelf.path, images, *referrers.values())


def read_shelf(shelf: SimpleNamespace) -> None:
    """Replace what the App has by what the layout names."""
    shelf.app = App()
    if not (shelf.path / "index.json").exists():
        return
    entries = json.loads((shelf.path / "index.json").read_bytes())["manifests"]
    blobs = {
        f"{folder.name}:{file.name}": file.read_bytes()
        for folder in (shelf.path / "blobs").iterdir()
        for file in folder.iterdir()
        if "." not in file.name
    }
    shelf.unnamed = {entry["digest"] for entry in entries}
    for entry in entries:
        repository, _, tag = entry.get("annotations", {}).get(NAME, "").rpartition(":")
        if repository:
            for digest, body in blobs.items():
                shelf.app.add_blob(repository, body, digest)
            body = blob_path(shelf.path, entry["digest"]).read_bytes()
            shelf.app.add_manifest(repository, body, entry["mediaType"], tag)


# What goes wrong.


class Ill:
    """What a registry does wrong, each request only so often."""

    def __init__(self, place: Place, random: Random, share: float, most: int) -> None:
        self.on, self._random, self._share, self._most = True, random, share, most
        self._seen: Counter[tuple[str, ...]] = Counter()
        may_patch = place.host == "ghcr.io" or place.scheme == "http"
        self._by_patch = may_patch and random.random() < 0.4
        place.app.intercept, place.app.amend = self.intercept, self.amend

    def _strikes(self, request: Request, share: float, *which: str) -> bool:
        if not self.on or self._random.random() > share:
            return False
        key = (*which, request.method, request.kind, request.repository, request.reference)
        self._seen[key] += 1
        return self._seen[key] <= self._most

    async def intercept(self, request: Request) -> Answer | None:
        await anyio.sleep(self._random.choice([0, 0, 0.001, 0.3]))
        is_put = (request.method, request.kind) == ("PUT", "upload")
        if self._by_patch and is_put and request.length():
            return error(405, "UNSUPPORTED", "by PATCH only")
        if not self._strikes(request, self._share):
            return None
        if request.parameter("mount") and self._random.random() < 0.5:
            return error(self._random.choice([400, 403, 404, 405]), "UNSUPPORTED", "no mount")
        wait = self._random.choice([[], [("Retry-After", "1")]])
        slowly = error(429, "TOOMANYREQUESTS", "slowly", headers=wait)
        down = error(503, "UNAVAILABLE", "ill")
        bad: list[Answer] = [Response(500), Response(502, early=True), down, b""]
        return self._random.choice([slowly, slowly, slowly, *bad])

    def amend(self, request: Request, answer: Answer) -> Answer:
        """Carry out the request and lose its answer, or cut a blob."""
        if not isinstance(answer, Response) or not self._strikes(request, self._share / 4, "lost"):
            return answer
        if request.method == "GET" and request.kind == "blob" and answer.status == 200:
            body = b"".join(map(bytes, answer.pieces()))
            cut = body[: self._random.randrange(len(body) + 1)]
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + cut
        return b""


def spoil(place: Place, ill: Ill, random: Random) -> None:
    """Give a registry bad habits on top of its illness."""
    app = place.app
    habits = random.sample(["mounts", "uploads", "ranges", "pauses"], random.choice([0, 1, 1, 2]))
    refusal = random.choice([400, 403, 404, 405, 501])

    async def worse(request: Request) -> Answer | None:
        if "mounts" in habits and request.parameter("mount"):
            return error(refusal, "UNSUPPORTED", "no mounts")
        if ill.on and "uploads" in habits and request.kind == "upload" and random.random() < 0.1:
            uploads = app.repositories[request.repository].uploads
            if request.reference in uploads and not uploads[request.reference].is_busy:
                del uploads[request.reference]
                return error(random.choice([404, 416]), "BLOB_UPLOAD_UNKNOWN", "lost")
        if ill.on and "pauses" in habits and random.random() < 0.02:
            wait = str(random.choice([2, 40, 200, 400]))
            status = random.choice([429, 503])
            return error(status, "TOOMANYREQUESTS", "later", headers=[("Retry-After", wait)])
        return await ill.intercept(request)

    def lying(request: Request, answer: Answer) -> Answer:
        answer = ill.amend(request, answer)
        if not ill.on or "ranges" not in habits or not isinstance(answer, Response):
            return answer
        if answer.status in (202, 204, 206, 416) and random.random() < 0.3:
            told = {
                "range": f"0-{random.choice([0, 9, 2_000_000])}",
                "content-range": "bytes 1-2/3",
            }
            answer.headers = [(key, told.get(key.lower(), value)) for key, value in answer.headers]
        return answer

    app.intercept, app.amend = worse, lying


async def storms(world: Virtual, places: list[Place], random: Random) -> None:
    """Take registries away and bring them back, each some times, and end all outages when cancelled."""
    async with anyio.create_task_group() as tasks:
        for place in places:
            tasks.start_soon(storm, world, place, Random(random.random()))


async def storm(world: Virtual, place: Place, random: Random) -> None:
    for _ in range(random.choice([0, 1, 1, 2, 5])):
        await anyio.sleep(10 ** random.uniform(-1.5, 2.5))
        how = random.choice(["refused", "silent", "nameless", "unavailable", "reset", "revoked"])
        auth = getattr(place.app.auth, "_auth", place.app.auth)
        if how == "revoked" and isinstance(auth, TokenService):
            auth.revoke()
        elif how in ("reset", "revoked"):
            place.reset_connections()
        else:
            with away(world, place, how):
                await anyio.sleep(10 ** random.uniform(-0.5, 2.8))


@contextlib.contextmanager
def away(world: Virtual, place: Place, how: str) -> Iterator[None]:
    """Let a registry refuse connections, be silent, have no name, or answer 503 to everything."""

    async def unavailable(request: Request) -> Answer:
        return Response(503)

    known, intercept = world.network._places, place.app.intercept
    if how == "unavailable":
        place.app.intercept = unavailable
    elif how == "nameless":
        del known[place.host, place.port]
        place.reset_connections()
    else:
        place.fail(how)
    try:
        yield
    finally:
        place.app.intercept = intercept
        known[place.host, place.port] = place
        place.recover()


@contextlib.contextmanager
def filling_disk(room: int) -> Iterator[None]:
    """Let no file of this process become longer than `room`: the kernel refuses the write.

    That goes for staged blobs, for the state and for a layout.
    """
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@contextlib.contextmanager
def passing(step: float) -> Iterator[None]:
    """Let time pass between two looks at a clock that otherwise stands while anybody works."""
    still, looks = anyio.current_time, Counter[float]()

    def look() -> float:
        looks[moment := still()] += 1
        return moment + looks[moment] * step

    with mock.patch.object(anyio, "current_time", look):
        yield


def damage_state(directory: Path, random: Random) -> None:
    """Lose the state between two runs, cut it, or change bytes of it."""
    state = directory / ".regsync" / "state.db"
    data = bytearray(state.read_bytes() if state.exists() else b"")
    if not data:
        return  # a full disk leaves an empty file
    how = random.choice(["lost", "cut", "changed", "empty"])
    if how == "lost":
        state.unlink()
        return
    if how == "cut":
        del data[random.randrange(len(data)) :]
    elif how == "empty":
        data.clear()
    else:
        for _ in range(random.choice([1, 30])):
            data[random.randrange(len(data))] = random.randrange(256)
    state.write_bytes(data)


def lose(app: App, repository: str, random: Random) -> None:
    """Let a target lose things as a registry does that keeps to its word: nothing stands whose
    parts are gone.
    """
    kept = app.repositories.get(repository)
    what = random.choice(["nothing", "repository", "blobs", "manifests", "tags"])
    if kept is None or what == "repository":
        app.repositories.pop(repository, None)
        return
    part: dict[str, Any] = {} if what == "nothing" else getattr(kept, what)
    for name in [each for each in part if random.random() < 0.4]:
        del part[name]
    while broken := [
        digest
        for digest, manifest in kept.manifests.items()
        if any(each["digest"] not in kept.manifests for each in manifest.children)
        or any(each["digest"] not in kept.blobs and not each.get("urls") for each in manifest.blobs)
    ]:
        for digest in broken:
            del kept.manifests[digest]
    for tag in [tag for tag, digest in kept.tags.items() if digest not in kept.manifests]:
        del kept.tags[tag]
