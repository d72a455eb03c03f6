"""Each registry's way to take a blob, counted on the wire: docs/design.md section 9,
docs/protocol-facts.md section 7.9.

Personas refuse what their provider refuses. Paths that a dialect avoids are counted too: zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _regsync.providers import DIALECTS
from conformance.content.images import Image, Seed
from conformance.journal import Entry
from conformance.registry.app import App
from conformance.server.memory import Place
from tests.ends import Ran, Virtual, document, tags

MIB = 1 << 20
BIG = 35 * MIB + 7
ACR = "team.azurecr.io"

# Made once: the bytes of the images of all tests.
_BLOBS = {
    size: Seed(size).blob(min(size, 64_000)) * (size // 64_000 + 1)
    for size in (BIG, 10 * MIB, 3 * MIB)
}


def blob(size: int) -> bytes:
    return _BLOBS[size][:size] if size in _BLOBS else Seed(size).blob(size)


def load(place: Place, *sizes: int, tag: str = "v1") -> Image:
    return (
        Seed(5)
        .image(layers=[blob(size) for size in sizes])
        .load_into(place.app, "team/app", tag=tag)
    )


async def mirror(
    world: Virtual, source: Place, *targets: str | Place, home: Path | None = None, **top: Any
) -> Ran:
    """Copy team/app to cloud hosts by their names, without a login, or to registries of the
    network.

    With a `home` there is state, and one image goes after the other.
    """
    ends: dict[str, Any] = {"source": source}
    for number, each in enumerate(targets):
        ends[f"t{number}"] = (
            {"url": each, "auth_type": "anonymous"} if isinstance(each, str) else each
        )
    ends |= top.pop("ends", {})
    if home is not None:
        top["global"] = {"max_concurrent_transfers": 1}
    text = document(ends, {"from": "team/app", "tags": tags("*")}, **top)
    if home is not None:
        (home / "mirror.yaml").write_text(text)
    file = "-" if home is None else str(home / "mirror.yaml")
    return await world.run(
        "sync", "--json", "-q", "-c", file, stdin=text, env={"GITHUB_TOKEN": "unused"}
    )


def bodies(provider: App, method: str) -> list[Entry]:
    return [
        each
        for each in provider.journal.matching(method, "upload")
        if each.header("content-length") != "0"
    ]


def patches(provider: App) -> list[tuple[str, int, int | None]]:
    return [
        (each.header("content-range"), each.request_bytes, each.status)
        for each in bodies(provider, "PATCH")
    ]


# ACR: POST + PUT up to 16 MiB, above it chunks.


def held_by(provider: App, image: Image) -> bool:
    return all(provider.blob("team/app", digest) == body for digest, body in image.blobs.items())


async def test_a_registry_that_loses_the_answer_to_each_chunk_gets_every_byte_once(
    world, monkeypatch
):
    """What it has by then is progress: the attempts are those of one chunk."""
    monkeypatch.setitem(DIALECTS, "acr", DIALECTS["acr"]._replace(put_limit=4 * MIB))
    source, target = world.registry("source.test"), App()
    world.listen(target, ACR, scheme="https")
    image = load(source, BIG)
    target.faults.on("PATCH", "upload").drop(at="answer")
    ran = await mirror(world, source, ACR)
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held_by(target, image)
    assert sum(n for _, n, _ in patches(target)) == BIG
    assert len(patches(target)) == 9
    source.journal.matching("GET", "blob").exactly(2)
