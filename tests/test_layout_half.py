"""A run into a layout goes on with what a killed run has left of a blob (docs/design.md section 13)."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Response
from conformance.registry.app import App
from conformance.server.exchange import Answer, Reception, Request
from conformance.server.memory import Link, Place
from tests.ends import Virtual, document, held, stopped_at, tags
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


async def test_half_a_blob_is_hashed_and_the_rest_alone_is_asked_for(world, tmp_path):
    scene = Scene(tmp_path, world)
    scene.partial.write_bytes(scene.body[:HALF])
    assert (await scene.sync()).statuses() == ["synced"]
    assert scene.asked == [f"bytes={HALF}-"]
    assert scene.sent == SIZE - HALF
    scene.check()


@pytest.mark.parametrize("at", [0, HALF - 1])
async def test_a_wrong_half_is_found_out_and_the_blob_is_written_anew(world, tmp_path, at):
    """A power cut may leave zeros where bytes were written."""
    scene = Scene(tmp_path, world)
    left = bytearray(scene.body[:HALF])
    left[at] ^= 1
    scene.partial.write_bytes(left)
    assert (await scene.sync()).statuses() == ["synced"]
    assert scene.asked == [f"bytes={HALF}-", ""]
    scene.check()


@pytest.mark.parametrize("left", [b"", b"x" * SIZE, b"x" * (SIZE + 1)], ids=["", "wrong", "long"])
async def test_what_cannot_be_its_beginning_costs_no_request(world, tmp_path, left):
    scene = Scene(tmp_path, world)
    scene.partial.write_bytes(left)
    assert (await scene.sync()).statuses() == ["synced"]
    assert scene.asked == [""]
    scene.check()


class _Whole(App):
    """A registry without ranges: 200, and all of it."""

    def start(self, request: Request) -> Answer | Reception:
        request.headers = [
            (name, value) for name, value in request.headers if name.lower() != "range"
        ]
        return super().start(request)


@pytest.mark.parametrize("how", ["whole", "refused"])
async def test_a_source_without_ranges_gives_the_blob_from_its_first_byte(world, tmp_path, how):
    scene = Scene(tmp_path, world)
    if how == "whole":
        scene.place = world.listen(_Whole(), "whole.test")
        scene.image.load_into(scene.place.app, "app", tag="v1")
    else:
        scene.place.app.faults.on("GET", "blob", header={"Range": "*"}).status(416)
    scene.partial.write_bytes(scene.body[:HALF])
    ran = await scene.sync(source={"url": scene.place.url})
    assert ran.statuses() == ["synced"]
    assert scene.asked == [f"bytes={HALF}-", ""]
    scene.check()


@pytest.mark.parametrize("is_right", [True, False])
async def test_half_a_blob_that_comes_from_staging_is_verified_as_a_whole(
    world, tmp_path, is_right
):
    scene = Scene(tmp_path, world)
    other = world.registry("other.test")
    scene.partial.write_bytes(scene.body[:HALF] if is_right else b"x" * HALF)
    ran = await scene.sync(other={"url": "http://other.test"})
    assert ran.statuses() == ["synced"] * 2, ran.err
    assert scene.asked == [""]
    assert held(other, "app", scene.image)
    scene.check()


async def test_a_file_with_a_name_elsewhere_is_not_written(world, tmp_path):
    scene = Scene(tmp_path, world)
    outside = tmp_path / "outside"
    outside.write_bytes(scene.body[:HALF])
    os.link(outside, scene.partial)
    assert (await scene.sync()).statuses() == ["synced"]
    assert outside.read_bytes() == scene.body[:HALF]
    assert scene.asked == [""]
    scene.check()


async def test_a_run_that_was_stopped_is_gone_on_with_where_it_stood(world, tmp_path):
    scene = Scene(tmp_path, world, down=Link(bandwidth=20_000))
    async with stopped_at(60.0):
        ran = await scene.sync()
    assert ran.status == 128 + signal.SIGTERM
    written = scene.partial.stat().st_size
    assert 0 < written < SIZE
    ran = await scene.sync()
    assert ran.statuses() == ["synced"]
    assert scene.asked == ["", f"bytes={written}-"]
    scene.check()


async def test_a_source_that_has_lost_the_blob_is_asked_once_for_the_rest(world, tmp_path):
    scene = Scene(tmp_path, world)
    scene.partial.write_bytes(scene.body[:HALF])
    scene.place.app.faults.on("GET", "blob", reference=scene.digest).status(404)
    ran = await scene.sync()
    assert ran.statuses() == ["failed"]
    assert scene.asked == [f"bytes={HALF}-"]
    assert ran.images[0]["error"]["side"] == "source"
    assert scene.partial.read_bytes() == scene.body[:HALF]


async def test_a_blob_that_is_read_anew_from_its_beginning_is_hashed_anew(world, tmp_path):
    """A small one: its source breaks, gives no rest, and then other bytes. Nothing gets a name."""
    scene = Scene(tmp_path, world)
    size, half = 900_000, 600_000
    image = Seed(3).image(layers=[Seed(4).blob(size)])
    image.load_into(scene.place.app, "app", tag="v1")
    digest = max(image.blobs, key=lambda each: len(image.blobs[each]))
    asked = list[str]()

    def change(request: Request) -> Answer | None:
        is_whole = request.kind == "blob" and not request.header("range")
        if is_whole and request.reference == digest:
            asked.append(request.target)
            if len(asked) > 1:
                body = b"x" * half + image.blobs[digest][half:]
                return Response(200, [("Content-Length", str(size))], body)
        return None

    scene.place.app.intercept = change
    faults = scene.place.app.faults
    rest = faults.on("GET", "blob", reference=digest, header={"Range": "*"})
    rest.drop(of="response", after=0)
    faults.on("GET", "blob", reference=digest).first().drop(of="response", after=half)
    ran = await scene.sync()
    assert len(asked) > 1
    assert ran.statuses() == ["failed"]
    assert "CONTENT_ERROR" in ran.failed[0]


async def test_a_blob_whose_staged_file_fails_half_way_is_read_and_hashed_from_its_source(
    world, tmp_path
):
    """With the rest from a source that now has other bytes: no layout names them."""
    scene = Scene(tmp_path, world)
    world.registry("other.test")
    asked = list[str]()

    def change(request: Request) -> Answer | None:
        if request.kind == "blob" and request.reference == scene.digest:
            asked.append(request.header("range"))
            if len(asked) > 1:
                start = int(asked[-1].removeprefix("bytes=").removesuffix("-") or 0)
                headers = [("Content-Length", str(SIZE - start))]
                if start:
                    headers.append(("Content-Range", f"bytes {start}-{SIZE - 1}/{SIZE}"))
                return Response(206 if start else 200, headers, b"x" * (SIZE - start))
        return None

    scene.place.app.intercept = change
    plain = world.edge()
    readings = list[int]()

    async def fail_half_way(function: Any, *arguments: Any) -> Any:
        if getattr(function, "__name__", "") == "readinto":
            readings.append(1)
            if len(readings) > 6:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return await plain.in_thread(function, *arguments)

    world.edge = lambda env=None: plain._replace(in_thread=fail_half_way)
    ran = await scene.sync(other={"url": "http://other.test"})
    assert len(readings) > 6
    assert "failed" in ran.statuses()
    assert all("CONTENT_ERROR" in each for each in ran.failed)
    world.edge = lambda env=None: plain
    for name in scene.disk.rglob("*"):
        if len(name.name) == 64:
            assert hashlib.sha256(name.read_bytes()).hexdigest() == name.name
