"""A run into a layout goes on with what a killed run has left of a blob (docs/design.md section 13)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from conformance.content.images import Image, Seed
from conformance.server.memory import Place
from tests.ends import Virtual, document, tags
from tests.layouts import blob_path, check_layout, make_layout

SIZE = 3_000_000
HALF = SIZE // 2


class Scene:
    """A registry with one image, whose large layer a killed run has begun to write to a disk."""

    def __init__(self, directory: Path, world: Virtual, **listening: Any) -> None:
        seed = Seed(88)
        self.world = world
        self.place: Place = world.registry("source.test", **listening)
        self.load(seed)
        self.disk = make_layout(directory / "disk", {})
        self.partial = blob_path(self.disk, self.digest).with_suffix(".partial")

    def load(self, seed: Seed) -> None:
        layer = seed.blob(SIZE)
        self.image: Image = seed.image(layers=[layer])
        self.image.load_into(self.place.app, "app", tag="v1")
        self.digest = max(self.image.blobs, key=lambda each: len(self.image.blobs[each]))
        self.body = self.image.blobs[self.digest]

    async def sync(self, *more: str, **targets: Any) -> Any:
        file = self.disk.parent / "mirror.yaml"
        registries = {
            "source": {"url": "http://source.test"},
            "disk": {"url": f"oci-layout:{self.disk}"},
            **targets,
        }
        file.write_text(document(registries, {"from": "app", "tags": tags("v1")}))
        return await self.world.run("sync", "--json", "-q", "-c", str(file), *more)

    @property
    def asked(self) -> list[str]:
        pulls = self.place.journal.matching("GET", "blob", reference=self.digest)
        return [pull.header("range") for pull in pulls]

    @property
    def sent(self) -> int:
        pulls = self.place.journal.matching("GET", "blob", reference=self.digest)
        return sum(pull.response_bytes for pull in pulls)

    def check(self) -> None:
        assert check_layout(self.disk) == set(self.image.contents())
        assert not list(self.disk.rglob("*.partial"))


async def test_without_locks_a_file_that_another_process_may_be_writing_stays(
    world, tmp_path, monkeypatch
):
    def no_locks(_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("_regsync.layout.disk.lock", no_locks)
    scene = Scene(tmp_path, world)
    scene.partial.write_bytes(scene.body[:HALF])
    assert (await scene.sync()).statuses() == ["synced"]
    assert scene.asked == [""]
    assert scene.partial.read_bytes() == scene.body[:HALF]
    assert check_layout(scene.disk) == set(scene.image.contents())

    scene.load(Seed(89))
    scene.partial = blob_path(scene.disk, scene.digest).with_suffix(".ab.partial")
    scene.partial.write_bytes(scene.body[:HALF])
    long_ago = scene.partial.stat().st_mtime - 2 * 24 * 3600
    os.utime(scene.partial, (long_ago, long_ago))
    assert (await scene.sync()).statuses() == ["synced"]
    assert scene.asked == [f"bytes={HALF}-"]
    assert not scene.partial.exists()
