"""Runs into layouts that are thin, short of room, begun or stopped (docs/design.md, section 13)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from itertools import pairwise
from types import SimpleNamespace

import anyio
import pytest

from conformance.images import Image, Seed
from conformance.memory import Link
from conformance.messages import Answer, Request, Response
from tests.ends import held, only, stopped_at, tags
from tests.layouts import (
    DiskMirror,
    blob_path,
    check_layout,
    digest_of,
    files_of,
    index_of,
    make_layout,
    names_of,
)
from tests.mirrors import SBOM

V1 = {"from": "app", "tags": tags("v1")}
ALL = {"from": "app", "tags": tags("v*")}


@pytest.fixture
def mirror(world, tmp_path) -> DiskMirror:
    return DiskMirror(world, tmp_path)


def layers_of(image: Image) -> list[str]:
    return [layer["digest"] for layer in image.document["layers"]]


def errors(ran) -> list[dict]:
    return [each["error"] for each in ran.images if each["error"]]


# Thin layouts: what the far side has is left out, looked for there, and named where it is missing.


class Thin(DiskMirror):
    """A disk that leaves out what the receipt `far.txt` names."""

    def assume(self, *digests: str, repository: str = "app") -> None:
        lines = [f"{digest} {repository}\n" for digest in sorted(digests)]
        (self.directory / "far.txt").write_text("".join(lines))

    async def thin(self, mapping=ALL):
        return await self.outside(mapping, disk={"assume": "far.txt"})

    async def receipt(self) -> None:
        """Replace the receipt by one of what the configuration's targets have."""
        receipt = str(self.directory / "far.txt")
        ran = await self.world.run("audit", "-c", str(self.file), "--receipt", receipt)
        assert ran.status == 0, ran.err

    def left_out(self) -> list[str]:
        """Return the lines of what was left out of the layout."""
        annotations = index_of(self.disk).get("annotations", {})
        return annotations.get("dev.regsync.left-out", "").splitlines()


@pytest.fixture
def thin(world, tmp_path) -> Thin:
    return Thin(world, tmp_path)


async def test_what_the_receipt_names_is_neither_asked_for_nor_written(thin):
    image = thin.push("v1", thin.seed.image(layers=[thin.seed.layer(50_000), thin.seed.layer(300)]))
    shared, own = layers_of(image)
    thin.assume(shared)
    ran = await thin.thin()
    assert thin.source.journal.count("GET", "blob") == 2, "its own layer and the config"
    assert thin.left_out() == [f"{shared} app"]
    assert not blob_path(thin.disk, shared).exists()
    assert own in check_layout(thin.disk, left_out=frozenset({shared}))
    assert only(ran.images)["blobs"] == {"transferred": 2, "mounted": 0, "skipped": 1}


async def test_configs_manifests_and_artifacts_are_always_written(thin):
    index = thin.push("v1", thin.seed.index())
    bill = thin.attach(index, SBOM)
    thin.assume(*index.contents())
    assert (await thin.thin()).status == 0
    there = {path.name for path in (thin.disk / "blobs" / "sha256").iterdir()}
    children = [
        json.loads(body) for digest, (_, body) in index.manifests.items() if digest != index.top
    ]
    layers = {layer["digest"][7:] for child in children for layer in child["layers"]}
    assert {line.partition(" ")[0][7:] for line in thin.left_out()} == layers
    assert there == {digest[7:] for digest in (*index.contents(), *bill.contents())} - layers


async def test_a_second_run_writes_nothing_and_a_full_one_what_was_left_out(thin):
    image = thin.push("v1")
    thin.assume(*layers_of(image))
    await thin.thin()
    first = (thin.disk / "index.json").read_bytes()
    for more in ((), ("--recheck",)):
        assert (await thin.run("sync", *more)).statuses() == ["skipped"]
    assert (thin.disk / "index.json").read_bytes() == first
    thin.push("v2", thin.seed.image(layers=[image.blobs[layers_of(image)[0]]]))
    assert (await thin.outside(ALL)).status == 0
    assert f"{layers_of(image)[0]} app" not in thin.left_out()


async def test_recheck_writes_what_the_far_side_has_no_longer(thin):
    first, second = layers_of(thin.push("v1"))
    thin.assume(first, second)
    await thin.thin()
    for named in ([first], []):
        thin.assume(*named)
        assert (await thin.run("sync")).statuses() == ["skipped"]
        assert thin.source.journal.count("GET", "blob") == 0
        assert (await thin.run("sync", "--recheck")).statuses() == ["synced"]
        assert thin.source.journal.count("GET", "blob") == 1
        assert thin.left_out() == [f"{digest} app" for digest in named]


@pytest.mark.parametrize("repository", ["app", "ghcr.io/org/app"])
async def test_a_receipt_of_a_layout_has_what_was_left_out_of_it(thin, repository):
    """A one-way diode, as docs/recipes.md has it: each transfer's receipt is made outside."""
    first = layers_of(thin.push("v1", thin.seed.image(sizes=(9_000,))))
    thin.assume()
    for week in (1, 2, 3):
        assert (await thin.thin({**ALL, "to": repository})).status == 0
        gets = thin.source.journal.count("GET", "blob")
        assert gets == 1 + (week == 1), "configs, and the layer once"
        assert thin.left_out() == [f"{digest} {repository}" for digest in first if week > 1]
        await thin.receipt()
        shutil.rmtree(thin.disk)


async def test_what_a_receipt_of_a_layout_names_is_found_under_its_name_inside(thin):
    """The repositories of such a receipt are those of the disk, and inside they may be called otherwise."""
    base = thin.seed.layer(9_000)
    thin.push("v1", thin.seed.image(layers=[base]), "a")
    new = thin.push("v1", thin.seed.image(layers=[base, thin.seed.layer(300)]), "b")
    first, second = ({"from": name, "tags": tags("v1")} for name in ("a", "b"))
    thin.assume()
    for week in ([first], [first, second]):
        assert (await thin.outside(*week, disk={"assume": "far.txt"})).status == 0
        await thin.receipt()
        assert (
            await thin.inside(*({**each, "to": f"x/{each['from']}"} for each in week))
        ).status == 0
        shutil.rmtree(thin.disk)
    assert held(thin.target, "x/b", new)
    mount = {"mount": digest_of(base), "from": "x/a"}
    thin.target.journal.matching("POST", "upload_start", status=201, query=mount).exactly(1)


async def test_an_empty_disk_each_week_gets_what_the_receipt_does_not_name(thin):
    """As docs/recipes.md has it: the first receipt is empty, each week's is made inside."""
    base = thin.seed.layer(9_000)
    thin.assume()
    for week, layers in ((1, 2), (2, 1), (3, 0)):  # the third week has nothing new
        if layers:
            thin.push(f"v{week}", thin.seed.image(layers=[base, thin.seed.layer(week)]))
        assert (await thin.thin()).status == 0
        configs = min(week, 2)
        assert thin.source.journal.count("GET", "blob") == configs + layers
        assert (await thin.inside(ALL)).status == 0
        await thin.receipt()
        shutil.rmtree(thin.disk)


async def test_through_a_diode_a_late_signature_comes_in_with_the_first_disk_that_has_it(thin):
    """The receipt is made outside, so that the next disk leaves the signature's blobs out."""
    image = thin.push("v1")
    thin.assume()
    for week in range(5):
        if week == 3:
            signature = thin.attach(image)
        assert (await thin.thin()).status == 0
        await thin.receipt()
        assert (await thin.inside(ALL)).status == 0
        shutil.rmtree(thin.disk)
        await anyio.sleep(7 * 86_400 - 60)  # a bit too early for a look at another source
    assert thin.holds(signature)


@pytest.mark.provokes("source_written", "blob_pulled_twice", "manifest_invented")
@pytest.mark.parametrize(
    ("repository", "mounts"), [("app", True), ("old/app", True), ("old/app", False)]
)
async def test_what_was_left_out_is_found_at_the_target(world, tmp_path, repository, mounts):
    """A new repository gets it from the one of its line."""
    thin = Thin(world, tmp_path, of={"target": {"mounts": mounts}})
    base = thin.seed.layer(50_000)
    old = thin.seed.image(layers=[base]).load_into(thin.target.app, repository, "v0")
    new = thin.push("v1", thin.seed.image(layers=[base, thin.seed.layer(300)]))
    thin.assume(*layers_of(old), repository=repository)
    await thin.thin()
    ran = await thin.inside(ALL)
    assert ran.statuses() == ["synced"], ran.err
    assert held(thin.target, "app", new)
    assert only(ran.images)["blobs"]["mounted"] == (repository != "app" and mounts)
    assert thin.target.journal.count("GET", "blob") == (not mounts)
    assert thin.target.journal.count("PUT", "upload") == 2 + (not mounts)
    if repository == "app":
        heads = thin.target.journal.matching("HEAD", "blob")
        assert [entry.reference for entry in heads][:1] == layers_of(old)


async def test_what_is_nowhere_fails_that_image_for_that_target_and_is_named(world, tmp_path):
    thin = Thin(world, tmp_path, "has", "lacks")
    has, lacks = thin.targets.values()
    new = thin.push("v1").load_into(has.app, "app", "v0")
    other = thin.push("v2", thin.seed.image(sizes=(100,)))
    thin.assume(layers_of(new)[0])
    await thin.thin()
    ran = await thin.inside(ALL)
    assert (ran.status, sorted(ran.statuses())) == (1, ["failed", "synced", "synced", "synced"])
    assert held(has, "app", new)
    assert lacks.app.tags("app") == {"v2": other.top}
    error = only(errors(ran))
    assert layers_of(new)[0] in error["message"]
    assert "left out" in error["hint"]
    assert "assume" in error["hint"]


@pytest.mark.parametrize(
    "text", [None, "hello\n", "sha256:0 app\n"], ids=["absent", "no line", "no digest"]
)
async def test_a_receipt_that_cannot_be_read_stops_before_any_request(thin, text):
    if text:
        (thin.directory / "far.txt").write_text(text)
    ran = await thin.thin()
    assert ran.status == 3
    assert "far.txt" in ran.out
    assert "assume" in ran.out
    assert not thin.source.journal.entries


# A blob for which a disk has too little room is not begun.


class Room:
    """A disk of some bytes: what is free on it is what the layout's files leave."""

    def __init__(self, path, size: int) -> None:
        self.path, self.size, self.least = path, size, size

    def usage(self, _: object) -> SimpleNamespace:
        used = sum((self.path / name).stat().st_size for name in files_of(self.path))
        self.least = min(self.least, self.size - used)
        return SimpleNamespace(free=self.size - used, total=self.size)


@pytest.fixture
def room(mirror, monkeypatch) -> Room:
    """A disk of a megabyte, on which the layout lies."""
    made = Room(mirror.disk, 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", made.usage)
    return made


def push(mirror, tag: str, *sizes: int) -> Image:
    return mirror.push(tag, mirror.seed.image(layers=[mirror.seed.blob(size) for size in sizes]))


def pulled(mirror) -> set[str]:
    return {each.reference for each in mirror.source.journal.matching("GET", "blob")}


async def test_a_blob_for_which_there_is_no_room_costs_no_byte(mirror, room):
    """Its image fails. What was written of it stays for a larger disk, and smaller images go on."""
    large = push(mirror, "v1", 600_000, 600_001)
    small = push(mirror, "v2", 100_000)
    ran = await mirror.outside(ALL)
    assert ran.statuses() == ["failed", "synced"]
    error = only(errors(ran))
    assert error["code"] == "TARGET_ERROR"
    assert "the blob needs 600.0 KB" in error["message"]
    assert str(mirror.disk) in error["message"]
    assert "free space" in error["hint"]
    assert len(pulled(mirror) & {*layers_of(large)}) == 1
    assert names_of(mirror.disk) == {"app:v2": small.top}
    assert room.least > 0

    room.size = 2_000_000
    assert (await mirror.outside(ALL)).statuses() == ["synced", "skipped"]
    assert len(pulled(mirror) & {*layers_of(large)}) == 1
    check_layout(mirror.disk)


async def test_a_disk_that_does_not_say_what_is_free_is_written(mirror, monkeypatch):
    """ramfs says so, and tmpfs without a size."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0, total=0))
    push(mirror, "v1", 100_000)
    assert (await mirror.outside(V1)).statuses() == ["synced"]


async def test_a_blob_that_fails_gives_its_room_back_and_one_that_is_there_needs_none(mirror, room):
    lost, whole = push(mirror, "v1", 700_000), push(mirror, "v2", 500_000)
    faults = mirror.source.app.faults
    faults.on("GET", "blob", reference=layers_of(lost)[0]).status(404)
    faults.on("GET", "manifest", reference="v2").delay(5)
    assert (await mirror.outside(ALL)).statuses() == ["failed", "synced"]
    assert check_layout(mirror.disk) >= set(whole.contents())
    shared = whole.blobs[layers_of(whole)[0]]
    mirror.push("v3", mirror.seed.image(layers=[shared, mirror.seed.blob(450_000)]))
    assert (await mirror.outside({"from": "app", "tags": tags("v3")})).statuses() == ["synced"]
    assert room.least > 0


# What a run has begun to write of a blob.

SIZE = 3_000_000
HALF = SIZE // 2


class Begun(DiskMirror):
    """An image whose large layer a killed run has begun to write to the disk."""

    def __init__(self, world, directory, *names: str) -> None:
        super().__init__(world, directory, *names)
        self.image = push(self, "v1", SIZE)
        self.digest = layers_of(self.image)[0]
        self.body = self.image.blobs[self.digest]
        make_layout(self.disk, {})
        self.partial = blob_path(self.disk, self.digest).with_suffix(".partial")

    def pulls(self) -> list[str]:
        """Return the ranges that were asked for; the whole is none."""
        pulls = self.source.journal.matching("GET", "blob", reference=self.digest)
        return [pull.header("range") for pull in pulls]

    async def go_on(self, **top):
        ran = await self.outside(V1, **top)
        assert {*ran.statuses()} == {"synced"}, ran.err
        assert check_layout(self.disk) == set(self.image.contents())
        assert not list(self.disk.rglob("*.partial"))
        return self.pulls()


@pytest.fixture
def begun(world, tmp_path) -> Begun:
    return Begun(world, tmp_path)


async def test_a_disk_is_for_those_whom_the_umask_lets_read_it(mirror):
    """The user who reads it on the other side is another one."""
    mirror.push("v1")
    before = os.umask(0o022)
    try:
        assert (await mirror.outside(V1)).status == 0
    finally:
        os.umask(before)
    made = {(path.is_dir(), path.stat().st_mode & 0o777) for path in mirror.disk.rglob("*")}
    assert made == {(True, 0o755), (False, 0o644)}


@pytest.mark.parametrize(
    "left", [lambda body: body[:HALF], lambda body: body, lambda _: b"x" * (SIZE + 1)]
)
async def test_what_a_killed_run_has_left_of_a_blob_is_replaced(begun, left):
    begun.partial.write_bytes(left(begun.body))
    assert await begun.go_on() == [""]


async def test_what_a_killed_run_has_left_of_a_blob_takes_no_room_from_it(begun, monkeypatch):
    room = Room(begun.disk, SIZE + 200_000)
    monkeypatch.setattr(shutil, "disk_usage", room.usage)
    begun.partial.write_bytes(begun.body[:HALF])
    assert await begun.go_on() == [""]


async def test_a_file_with_a_name_elsewhere_is_not_written(begun):
    outside = begun.directory / "outside"
    outside.write_bytes(begun.body[:HALF])
    os.link(outside, begun.partial)
    assert await begun.go_on() == [""]
    assert outside.read_bytes() == begun.body[:HALF]


async def test_a_run_that_was_stopped_leaves_nothing_of_a_blob(world, tmp_path):
    begun = Begun(slow_source(world), tmp_path)
    async with stopped_at(60.0):
        ran = await begun.outside(V1)
    assert ran.status == 128 + signal.SIGTERM
    assert not begun.partial.exists()
    assert await begun.go_on() == [""]


async def test_a_source_that_breaks_is_gone_on_with_where_the_file_ends(begun):
    begun.source.app.faults.on("GET", "blob", reference=begun.digest).first().drop(after=HALF)
    first, second = await begun.go_on()
    assert (first, second[:6]) == ("", "bytes=")


def other_bytes(begun, digest: str, size: int, keep: int) -> list[str]:
    """Let a source have other bytes of a blob, but for the last `keep`, once it was asked for it; return
    the ranges that are asked for.
    """
    asked = list[str]()

    def change(request: Request) -> Answer | None:
        if (request.kind, request.reference) != ("blob", digest):
            return None
        asked.append(request.header("range"))
        start = int(asked[-1].removeprefix("bytes=").removesuffix("-") or 0)
        if len(asked) == 1 or (keep and start):
            return None
        body = (
            b"x" * (size - start - keep)
            + (begun.source.app.blob("app", digest) or b"")[size - keep :]
        )
        headers = [("Content-Length", str(size - start))]
        if start:
            headers.append(("Content-Range", f"bytes {start}-{size - 1}/{size}"))
        return Response(206 if start else 200, headers, body)

    begun.source.app.intercept = change
    return asked


async def test_a_blob_that_is_read_anew_from_its_beginning_is_hashed_anew(mirror):
    """A small one: its source breaks, gives no rest, and then other bytes. Nothing gets a name."""
    size, half = 900_000, 600_000
    digest = layers_of(push(mirror, "v1", size))[0]
    asked = other_bytes(mirror, digest, size, keep=size - half)
    faults = mirror.source.app.faults
    rest = faults.on("GET", "blob", reference=digest, header={"Range": "*"})
    rest.drop(of="response", after=0)
    faults.on("GET", "blob", reference=digest).first().drop(of="response", after=half)
    ran = await mirror.outside(V1)
    assert asked.count("") > 1
    assert "CONTENT_ERROR" in only(ran.failed)
    assert not list(mirror.disk.rglob("*.partial")), "wrong bytes do not stay"


async def test_a_blob_whose_staged_file_fails_half_way_is_read_and_hashed_from_its_source(
    begun, monkeypatch
):
    """With the rest from a source that now has other bytes: no layout names them."""
    monkeypatch.delattr(os, "preadv", raising=False)  # a thread reads the file
    other_bytes(begun, begun.digest, SIZE, keep=0)
    plain = begun.world.edge()
    readings = list[int]()

    async def fail_half_way(function, *arguments):
        if getattr(function, "__name__", "") == "readinto":
            readings.append(1)
            if len(readings) > 6:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return await plain.in_thread(function, *arguments)

    begun.world.edge = lambda env=None: plain._replace(in_thread=fail_half_way)
    ran = await begun.outside(V1, defaults={"targets": ["disk", "target"]})
    begun.world.edge = lambda env=None: plain
    assert len(readings) > 6
    assert "failed" in ran.statuses()
    assert all("CONTENT_ERROR" in each for each in ran.failed)
    named = [path for path in begun.disk.rglob("*") if len(path.name) == 64]
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in named)


# When a layout is written: `index.json` seldom, images reported when they are safe.


def slow_source(world):
    """Let registries that are started from now on send 20 kB a second."""
    start = world.registry
    world.registry = lambda name, **options: start(name, down=Link(bandwidth=20_000), **options)
    return world


@pytest.fixture
def replaced(monkeypatch, tmp_path) -> list[tuple[float, int]]:
    """Note when `index.json` is replaced, and how many names it has then."""
    noted = list[tuple[float, int]]()
    replace = os.replace

    def note(old: str, new: str) -> None:
        replace(old, new)
        if new == str(tmp_path / "disk" / "index.json"):
            noted.append((anyio.current_time(), len(names_of(tmp_path / "disk"))))
            check_layout(tmp_path / "disk")

    monkeypatch.setattr(os, "replace", note)
    return noted


ONE_SLOT = {"global": {"max_concurrent_transfers": 1}}


async def test_the_index_is_replaced_every_ten_seconds_and_at_the_end(world, tmp_path, replaced):
    mirror = DiskMirror(slow_source(world), tmp_path)
    for number in range(40):
        mirror.push(f"v{number}", mirror.seed.image(sizes=(18_000,)))
    ran = await mirror.outside(ALL, **ONE_SLOT)
    assert ran.status == 0
    assert ran.seconds > 35
    moments, names = zip(*replaced, strict=True)
    assert min(later - earlier for earlier, later in pairwise(moments[:-1])) >= 10
    assert 3 <= len(moments) <= ran.seconds / 10 + 1
    assert [*names] == sorted(names)
    assert names[-1] == 40


async def test_a_short_run_replaces_it_once_and_waits_for_nothing(mirror, replaced):
    for number in range(5):
        mirror.push(f"v{number}")
    ran = await mirror.outside(ALL, **ONE_SLOT)
    assert (ran.status, [names for _, names in replaced]) == (0, [5])
    assert ran.seconds < 5


async def test_an_image_is_reported_when_it_is_safe(mirror, monkeypatch):
    """What fails when the names are given is a failed image, though all its bytes have come."""
    replace = os.replace

    def fails(old: str, new: str) -> None:
        if "index.json" in new:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(old, new)

    monkeypatch.setattr(os, "replace", fails)
    for number in range(3):
        mirror.push(f"v{number}")
    ran = await mirror.outside(ALL)
    assert (ran.status, ran.statuses()) == (2, ["failed"] * 3)
    assert all("Input/output error" in error["message"] for error in errors(ran))
    assert {error["side"] for error in errors(ran)} == {"target"}


async def test_what_was_put_when_a_signal_came_is_safe_and_reported(mirror):
    images = {f"app:v{number}": mirror.push(f"v{number}") for number in range(4)}
    stuck = layers_of(mirror.push("v9", mirror.seed.image(sizes=(3000,))))[0]
    mirror.source.app.faults.on("GET", "blob", reference=stuck).first().stall()
    async with stopped_at(3.0):
        ran = await mirror.outside(ALL)
    assert ran.status == 128 + signal.SIGTERM
    assert ran.report["interrupted"]
    assert ran.statuses() == ["synced"] * 4
    assert ran.seconds < 30
    assert names_of(mirror.disk) == {name: image.top for name, image in images.items()}
    check_layout(mirror.disk)
    assert (await mirror.outside(ALL)).statuses() == ["skipped"] * 4 + ["synced"]
    check_layout(mirror.disk)
    assert not list(mirror.disk.rglob("*.partial"))


async def test_a_copy_between_directories_that_goes_on_is_waited_for(mirror):
    """It sends no request, and moves bytes all the same."""
    make_layout(
        mirror.directory / "from", {"app:v1": Seed(1).image(layers=[Seed(2).blob(10 << 20)])}
    )
    ends = {"source": "oci-layout:from", "disk": "oci-layout:disk"}
    mirror.write(V1, registries=ends, defaults={"targets": ["disk"]})

    async def slowly(function, *arguments):
        await anyio.sleep(0.2)
        return function(*arguments)

    edge = mirror.world.edge()._replace(in_thread=slowly)
    async with stopped_at(1.0):
        ran = await mirror.world.run("sync", "--json", "-q", "-c", str(mirror.file), edge=edge)
    assert ran.statuses() == ["synced"], ran.err
    check_layout(mirror.disk)


@pytest.mark.parametrize("glob", ["*", "v1"])
async def test_an_image_that_others_brought_inside_gets_the_artifacts_of_its_platforms(
    mirror, glob
):
    index = mirror.push("v1", mirror.seed.index([child := mirror.seed.image()]))
    artifact = mirror.attach(child)
    await mirror.outside(V1)
    index.load_into(mirror.target.app, "app", "v1")
    assert (await mirror.inside({"from": "app", "tags": tags(glob)})).statuses() == ["synced"]
    assert mirror.holds(artifact)


async def test_repositories_of_a_layout_share_what_they_hold(mirror):
    """Also where both are on their way."""
    layer = mirror.seed.blob(2_000_000)
    image = mirror.push("v1", mirror.seed.image(layers=[layer]))
    mirror.seed.image(layers=[layer]).load_into(mirror.source.app, "other", "v1")
    ran = await mirror.outside(V1, {"from": "other", "tags": tags("v1")})
    assert ran.statuses() == ["synced"] * 2
    mirror.source.journal.matching("GET", "blob", reference=layers_of(image)[0]).exactly(1)
    check_layout(mirror.disk)


# Images of a stranger that name what is on the disk, or on its way there.


def lying(image: Image, more: int) -> Image:
    """Return an image that gives its first layer so many bytes more."""
    document = json.loads(image.body)
    document["layers"][0]["size"] += more
    return image.with_manifest(json.dumps(document).encode(), document["mediaType"])


@pytest.fixture
def evil(world):
    return world.registry("evil.test")


async def both(mirror: DiskMirror, evil, *mappings):
    """Copy from two registries to one disk."""
    registries = {"disk": {"url": "oci-layout:disk"}, "evil": {"url": f"http://{evil.address}"}}
    return await mirror.sync(*mappings, registries=registries, defaults={"targets": ["disk"]})


BAD = {"from": "bad", "source": "evil", "tags": tags("v1")}


@pytest.mark.parametrize("more", [1, -1])
async def test_a_size_that_is_not_a_layers_fails_that_image_alone(mirror, more):
    blob = mirror.seed.blob(300_000)
    mirror.push("v1", mirror.seed.image(layers=[blob]))
    mirror.push("v2", lying(mirror.seed.image(layers=[blob]), more))
    mirror.push("v3")
    ran = await mirror.outside(ALL)
    assert sorted(ran.statuses()) == ["failed", "synced", "synced"]
    check_layout(mirror.disk)


async def test_a_layer_is_not_empty_because_its_descriptor_says_so(mirror):
    image = mirror.seed.image(layers=[mirror.seed.blob(3000)])
    mirror.push("v1", lying(image, -3000))
    ran = await mirror.outside(V1)
    assert only(errors(ran))["code"] == "CONTENT_ERROR"
    assert not blob_path(mirror.disk, layers_of(image)[0]).exists()


@pytest.mark.parametrize("how", ["link", "folder", "pipe"])
async def test_what_is_no_file_is_looked_for_at_the_target(mirror, how):
    image = mirror.push("v1", mirror.seed.image(layers=[mirror.seed.blob(3000)]))
    assert (await mirror.outside(V1)).status == 0
    layer = layers_of(image)[0]
    path = blob_path(mirror.disk, layer)
    mirror.target.app.add_blob("app", path.read_bytes(), layer)
    path.unlink()
    if how == "link":
        path.symlink_to(path)
    elif how == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert (await mirror.inside(V1)).statuses() == ["synced"]
    assert held(mirror.target, "app", image)


@pytest.mark.provokes("blob_pulled_twice")
async def test_a_wrong_size_and_a_slow_source_do_not_take_the_place_of_right_bytes(mirror, evil):
    """Not even if the layout is saved while they come."""
    blob = mirror.seed.blob(2_000_000)
    good = mirror.push("v1", mirror.seed.image(layers=[blob]))
    lying(mirror.seed.image(layers=[blob]), 500_000).load_into(evil.app, "bad", "v1")
    evil.app.faults.on("GET", "manifest").optional().delay(1)
    blobs = evil.app.faults.on("GET", "blob", reference=layers_of(good)[0]).optional()
    blobs.truncate(1_500_000, framing="chunked").corrupt(whole=True).throttle(100_000)
    ran = await both(mirror, evil, V1, BAD)
    assert sorted(ran.statuses()) == ["failed", "synced"]
    check_layout(mirror.disk)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_layer_that_is_another_images_manifest_harms_neither(mirror, evil, is_late):
    good = mirror.push("v1")
    mirror.seed.image(layers=[good.body]).load_into(evil.app, "bad", "v1")
    mirror.source.app.faults.on("GET", "manifest").optional().delay(1)
    layer = evil.app.faults.on("GET", "blob", reference=good.top).optional()
    if is_late:
        layer.delay(25)
    else:
        layer.delay(3).status(404)
    ran = await both(mirror, evil, BAD, V1)
    assert sorted(ran.statuses()) == (["synced"] * 2 if is_late else ["failed", "synced"])
    check_layout(mirror.disk)


async def test_entries_that_cannot_be_read_are_one_warning(mirror):
    kind = "application/vnd.oci.image.manifest.v1+json"
    junk = [{"mediaType": kind, "digest": f"sha256:{n:064x}", "size": 5} for n in range(200)]
    make_layout(mirror.disk, {"app:v1": mirror.seed.image()}, *junk)
    await mirror.inside(ALL)
    ran = await mirror.aloud("sync", "--recheck")
    assert (ran.status, ran.err.count("warning:")) == (0, 1), ran.err
    assert "200 entries cannot be read" in ran.err
