"""How the bytes of a blob come into a layout: through worker threads where its source is fast."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from _regsync.layout.directory import BlobFile
from _regsync.net.wire import PIECE
from conformance.content.images import Image, Seed
from conformance.server.memory import Link, Place
from tests.ends import Virtual, document, only, tags
from tests.layouts import blob_path, check_layout, make_layout, names_of

PIECES = 6
SIZE = PIECES * PIECE + 5

# All of the layer has come before its first piece is asked for.
FAST = Link(window=2 * SIZE)


class Scene:
    """A source with one image, whose layer has more than six pieces, and an empty disk."""

    def __init__(self, directory: Path, world: Virtual, down: Link = FAST) -> None:
        self.directory = directory
        self.world = world
        self.disk = directory / "disk"
        self.place: Place = world.registry("source.test", down=down)
        self.image: Image = Seed(93).image(layers=[Seed(94).blob(SIZE)])
        self.image.load_into(self.place.app, "app", tag="v1")
        self.digest = max(self.image.blobs, key=lambda each: len(self.image.blobs[each]))
        self.source = "http://source.test"

    def read_from_layout(self) -> Path:
        """Have the image in a layout instead."""
        directory = make_layout(self.directory / "source", {"app:v1": self.image})
        self.source = f"oci-layout:{directory}"
        return blob_path(directory, self.digest)

    async def sync(self) -> Any:
        file = self.directory / "mirror.yaml"
        registries = {"source": {"url": self.source}, "disk": {"url": f"oci-layout:{self.disk}"}}
        file.write_text(document(registries, {"from": "app", "tags": tags("v*")}))
        return await self.world.run("sync", "--json", "-q", "-c", str(file))

    @property
    def asked(self) -> list[str]:
        pulls = self.place.journal.matching("GET", "blob", reference=self.digest)
        return [pull.header("range") for pull in pulls]

    @property
    def sent(self) -> int:
        pulls = self.place.journal.matching("GET", "blob", reference=self.digest)
        return sum(pull.response_bytes for pull in pulls)

    @property
    def partials(self) -> list[Path]:
        return list(self.disk.rglob("*.partial"))

    def check(self) -> None:
        assert check_layout(self.disk) == set(self.image.contents())
        assert not self.partials


async def test_a_source_that_breaks_in_a_thread_is_gone_on_with_where_it_broke(world, tmp_path):
    scene = Scene(tmp_path, world)
    rule = scene.place.app.faults.on("GET", "blob", reference=scene.digest).first()
    rule.drop(after=3 * PIECE + 7, of="response")
    assert (await scene.sync()).statuses() == ["synced"]
    assert scene.asked == ["", f"bytes={3 * PIECE + 7}-"]
    assert scene.sent == SIZE
    scene.check()


def full_after(count: int) -> Callable[[BlobFile, memoryview], None]:
    """Return a way to write that has room for so many pieces."""
    plain = BlobFile.append
    left = itertools.chain([True] * count, itertools.repeat(False))

    def append(self: BlobFile, piece: memoryview) -> None:
        with self._layout.disk_errors():
            if not next(left):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(self, piece)

    return append


@pytest.mark.parametrize("count", [0, 3])
async def test_a_disk_that_fills_costs_the_blob_that_filled_it(world, tmp_path, monkeypatch, count):
    """On the event loop, and in a worker thread."""
    scene = Scene(tmp_path, world)
    config = json.loads(scene.image.body)["config"]["digest"]
    make_layout(scene.disk, {})
    blob_path(scene.disk, config).write_bytes(scene.image.blobs[config])
    with monkeypatch.context() as patched:
        patched.setattr(BlobFile, "append", full_after(count))
        ran = await scene.sync()
    assert ran.statuses() == ["failed"]
    error = only(ran.images)["error"]
    assert error["code"] == "TARGET_ERROR"
    assert "No space left" in error["message"]
    assert not scene.partials
    assert not names_of(scene.disk)

    assert (await scene.sync()).statuses() == ["synced"]
    scene.check()


@pytest.mark.parametrize("place", [PIECE // 2, 2 * PIECE, SIZE - 1])
async def test_a_wrong_byte_in_whichever_piece_is_found_out(world, tmp_path, place):
    scene = Scene(tmp_path, world)
    path = scene.read_from_layout()
    body = bytearray(path.read_bytes())
    body[place] ^= 1
    path.write_bytes(body)
    ran = await scene.sync()
    assert ran.statuses() == ["failed"]
    assert only(ran.images)["error"]["code"] == "CONTENT_ERROR"
    assert not (scene.disk / "index.json").exists()
    assert not blob_path(scene.disk, scene.digest).exists()
