"""Worlds in which all goes wrong that may: the scene of tests/test_worlds.py.

To the registries, images and mappings of tests/stressing.py come a layout as one more end; logins
that end early, and caps on requests; habits (uploads lost, ranges that are not true, mounts refused,
long pauses asked for); outages of whole registries, shorter and longer than they are waited for; a
disk for staging that fills up; a state that is damaged.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio

from conformance.client.attachments import referrers_tag
from conformance.content.images import Image
from conformance.messages import Answer, Request, Response, error
from conformance.providers.rates import Cap, Metered, Rates
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from conformance.server.memory import Place
from tests.ends import Virtual, held
from tests.layouts import NAME, blob_path, make_layout
from tests.stressing import KINDS, Ill, Wanted

__all__ = [
    "damage_state",
    "filling_disk",
    "lacking",
    "lock_up",
    "make_shelf",
    "prefix_of",
    "read_shelf",
    "spoil",
    "storms",
    "write_shelf",
]


# The ends.


def lock_up(places: list[Place], random: Random) -> None:
    """Put some registries behind tokens that end early, and some behind caps on requests."""
    for place in places:
        if random.random() < 0.4:
            life = random.choice([60.0, 300.0])
            place.app.auth = TokenService(
                grants=lambda user, access: True,
                expires_in=int(life) if random.random() < 0.5 else None,
                lifetime=life,
                now=anyio.current_time,
            )
        if random.random() < 0.3:
            cap = Cap(*random.choice([(3, 1.0), (30, 10.0), (150, 60.0)]))
            rates = Rates(cap, now=anyio.current_time, has_retry_after=random.random() < 0.5)
            place.app.auth = Metered(rates, place.app.auth)


def make_shelf(directory: Path) -> tuple[SimpleNamespace, str]:
    """Return an end that is a layout, and what a configuration calls it.

    Its App has what the layout holds: `scene_of` fills it, `write_shelf` brings it to the disk, and
    `read_shelf` reads it again after a run.
    """
    app = App()
    return SimpleNamespace(app=app, path=directory / "shelf"), f"oci-layout:{directory / 'shelf'}"


def write_shelf(shelf: SimpleNamespace) -> None:
    """Write the layout with all that its App has: entries with names, artifacts without."""
    images: dict[str, Image] = {}
    referrers: list[dict[str, Any]] = []
    for repository, content in shelf.app.repositories.items():
        blobs = {digest: bytes(blob) for digest, blob in content.blobs.items()}
        manifests = {digest: (m.media_type, m.body) for digest, m in content.manifests.items()}
        for tag, digest in content.tags.items():
            images[f"{repository}:{tag}"] = Image(digest, manifests[digest][0], manifests, blobs)
        for digest, (media_type, body) in manifests.items():
            if "subject" in json.loads(body):
                referrers.append({"mediaType": media_type, "digest": digest, "size": len(body)})
    if images:
        make_layout(shelf.path, images, *{each["digest"]: each for each in referrers}.values())


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


def prefix_of(end: Any) -> str:
    """Return what stands before a repository in the names that a report has."""
    if isinstance(end, Place):
        return KINDS[end.host].removeprefix("http://") + "/"
    return f"oci-layout:{end.path}//"


def lacking(ends: list[Any], wanted: Wanted) -> list[tuple[int, str, str]]:
    """Return what the ends do not hold whole, and the artifacts that they do not list."""
    return [
        (n, to, name)
        for (n, to, name), image in wanted.items()
        if not held(ends[n], to, image) or not is_found(ends[n], to, name, image)
    ]


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


# What goes wrong.


def spoil(place: Place, ill: Ill, random: Random) -> None:
    """Give a registry bad habits on top of its illness."""
    app, intercept, amend = place.app, place.app.intercept, place.app.amend
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
        return await intercept(request)

    def lying(request: Request, answer: Answer) -> Answer:
        answer = amend(request, answer)
        if not ill.on or "ranges" not in habits or not isinstance(answer, Response):
            return answer
        if answer.status in (202, 204, 206, 416) and random.random() < 0.3:
            lies = {
                "range": f"0-{random.choice([0, 9, 2_000_000])}",
                "content-range": "bytes 1-2/3",
            }
            answer.headers = [(key, lies.get(key.lower(), value)) for key, value in answer.headers]
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
