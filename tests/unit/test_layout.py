"""A directory of images by itself: what `index.json` names, a hostile directory, how it is written."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import threading
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from _regsync import edge
from _regsync.app.cli import in_thread
from _regsync.config import Config, registry_for
from _regsync.errors import ContentError, RegistryError, Side, SyncError
from _regsync.layout import Index, Layout, LayoutRepository, new_entry, read_lines, without_host
from _regsync.oci import Descriptor, Manifest, parse_manifest, referrers_tag
from _regsync.registry.limits import Gate
from conformance.images import Image, Seed
from tests.layouts import (
    FULL_NAME,
    NAME,
    blob_path,
    check_layout,
    digest_of,
    files_of,
    make_layout,
    names_of,
)


@pytest.fixture
def seed() -> Seed:
    return Seed(11)


def manifest_of(image: Image) -> Manifest:
    return parse_manifest(image.body, content_type=image.media_type)


def entry(digest_byte: str, **annotations: str) -> dict[str, Any]:
    return {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": f"sha256:{digest_byte * 64}",
        "size": 7,
        "annotations": annotations,
    }


def index(*entries: dict[str, Any], **more: Any) -> Index:
    return Index(json.dumps({"schemaVersion": 2, "manifests": entries, **more}).encode())


def tags(held: Index, repository: str) -> dict[str, str]:
    return {tag: each.descriptor.digest for tag, each in held.tags(repository).items()}


# Names.


OURS = "base/alpine:3.20"
HUB = "docker.io/library/alpine:3.20"
FULL = "quay.example/team/app:v1"


@pytest.mark.parametrize(
    ("entries", "repository", "found"),
    [
        ([{NAME: OURS, FULL_NAME: HUB}], "base/alpine", {"3.20": 0}),
        ([{NAME: OURS, FULL_NAME: HUB}], "library/alpine", {}),
        ([{NAME: FULL}], "team/app", {"v1": 0}),
        ([{FULL_NAME: FULL}], "team/app", {"v1": 0}),
        ([{FULL_NAME: FULL}], "app", {}),
        ([{NAME: "localhost:5000/app:v1"}], "app", {"v1": 0}),
        # Bare tags are one repository of whatever name,
        ([{NAME: "v1"}, {NAME: "v2"}], "anything/at/all", {"v1": 0, "v2": 1}),
        # but not where others have full names: buildx and docker write a tag, and the full name beside it.
        ([{NAME: "3.20", FULL_NAME: HUB}, {NAME: "v2"}], "library/alpine", {"3.20": 0}),
        ([{NAME: "3.20", FULL_NAME: HUB}, {NAME: "v2"}], "other", {}),
        # Our name outweighs a full name.
        (
            [{FULL_NAME: "x.test/app:v1"}, {NAME: "app:v1"}, {FULL_NAME: "y.test/app:v1"}],
            "app",
            {"v1": 1},
        ),
    ],
)
def test_an_entry_is_named_by_us_by_its_full_name_or_by_its_tag_alone(entries, repository, found):
    held = index(*(entry(letter, **each) for letter, each in zip("abc", entries, strict=False)))
    wanted = {tag: f"sha256:{'abc'[place] * 64}" for tag, place in found.items()}
    assert tags(held, repository) == wanted


# Writing of the index.


def test_equal_content_gives_equal_bytes_in_whatever_order_it_came(seed):
    manifests = [manifest_of(seed.image()) for _ in range(4)]
    subject = seed.image()
    artifact = manifest_of(seed.artifact(subject, "application/x"))
    entries = [new_entry(each, "app", f"v{number}") for number, each in enumerate(manifests)]
    entries += [new_entry(artifact, "app"), new_entry(manifests[0], "other")]
    bodies = set[bytes]()
    for order in (entries, entries[::-1], entries[2:] + entries[:2]):
        held = Index()
        for each in order:
            held.add(each)
        held.left_out.update({f"sha256:{'f' * 64}": "app", f"sha256:{'e' * 64}": "app"})
        bodies.add(held.dump())
        assert Index(held.dump()).dump() == held.dump()
    assert len(bodies) == 1


def test_an_image_that_moves_keeps_none_of_its_names(seed):
    old = manifest_of(seed.image())
    new = manifest_of(seed.image())
    list_tag = referrers_tag(f"sha256:{'a' * 64}")
    held = Index()
    for manifest in (old, new):
        held.add(new_entry(manifest, "ghcr.io/app", "v1"))  # may be a full name too
        held.add(new_entry(manifest, "app", list_tag))
    held = Index(held.dump())
    assert [each.descriptor.digest for each in held.entries.values()] == [new.digest, new.digest]
    assert tags(held, "ghcr.io/app") == {"v1": new.digest}
    assert tags(held, "app") == {"v1": new.digest, list_tag: new.digest}


def test_what_another_tool_wrote_into_an_entry_stays():
    foreign = {**entry("a", **{NAME: "v1"}), "platform": {"os": "linux"}, "x-unknown": [1, 2]}
    held = index(foreign, annotations={"org.example": "yes"})
    document = json.loads(held.dump())
    assert document["manifests"] == [foreign]
    assert document["annotations"] == {"org.example": "yes"}


def test_an_artifact_does_not_name_itself_by_its_annotations_and_takes_little_room(seed):
    subject = seed.image()
    named = {NAME: "app:v1", "org.example": "note"}
    artifact = manifest_of(seed.artifact(subject, "application/x", annotations=named))
    held = Index()
    held.add(new_entry(artifact, "app"))
    assert tags(held, "app") == {}
    (listed,) = held.artifacts[subject.top].values()
    assert listed.document == {
        "mediaType": artifact.media_type,
        "digest": artifact.digest,
        "size": artifact.size,
        "annotations": {"dev.regsync.subject": subject.top},
    }


@pytest.mark.parametrize("limit", ["_MOST_VALUES", "_LARGEST_INDEX"])
def test_an_index_that_could_not_be_read_is_not_written(limit, monkeypatch):
    held = index(*(entry("a", **{NAME: f"app:v{number}"}) for number in range(50)))
    held.dump()
    monkeypatch.setattr(f"_regsync.layout.{limit}", 200)
    with pytest.raises(ContentError, match="more than"):
        held.dump()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b'{"manifests": {}}', "no list"),
        (
            json.dumps({"manifests": [{**entry("a"), "digest": f"sha256:{'../' * 21}x"}]}).encode(),
            "not a digest",
        ),
        (json.dumps({"manifests": [{**entry("a"), "size": -1}]}).encode(), "not a size"),
        (b'{"manifests": [' + b"{}," * 1_000_001 + b"{}]}", "more than 1000000 values"),
        (b'{"manifests": ' + b"[" * 5000 + b"]" * 5000 + b"}", "deeper"),
        # It would be written again as `Infinity`, which nobody can read.
        (b'{"manifests": [], "annotations": {"x": 1e999}}', "cannot be kept"),
    ],
)
def test_an_index_that_is_none_is_refused_in_words(body, words):
    with pytest.raises(ContentError, match=words):
        Index(body)


def test_lines_of_receipts_name_repositories_with_their_host_or_without():
    digest = f"sha256:{'a' * 64}"
    for host in ("", "registry.example/", "localhost:5000/", "oci-layout:/d//"):
        assert read_lines(f"{digest} {host}team/app\n", without_host) == {digest: "team/app"}
    assert read_lines(f"# far\n\n{digest} team/app\n{digest} other\n") == {digest: "team/app"}
    for text in (f"{digest}", f"{digest} ../up", "sha256:short app"):
        with pytest.raises(ContentError, match="line 1"):
            read_lines(text)


# A hostile directory.


def open_layout(path: Path, said: list[str] | None = None) -> Layout:
    def log(level: str, _event: str, text: str, **_: Any) -> None:
        if said is not None:
            said.append(f"{level}: {text}")

    transport = SimpleNamespace(
        machine=SimpleNamespace(log=log), count_sent=lambda _: None, gate=Gate()
    )
    registry = registry_for(f"oci-layout:{path}", Config({}, ()))
    return Layout(registry, transport, must_be_whole=False)


@pytest.fixture(autouse=True)
def threads() -> Any:
    with edge.using(SimpleNamespace(in_thread=in_thread, chance=lambda: 0.5)):
        yield


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root may make a device")


NO_FILE = "not a regular file|Too many levels of symbolic links|Is a directory"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("index.json", linked),
        ("index.json", piped),
        ("a blob", linked),
        ("a blob", a_folder),
        ("a blob", a_device),
    ],
)
def test_only_regular_files_are_read(seed, tmp_path, name, change):
    image = seed.image()
    layout = make_layout(tmp_path / "disk", {"app:v1": image})
    change(blob_path(layout, image.top) if name == "a blob" else layout / name)
    opened = open_layout(layout)
    with pytest.raises(SyncError, match=NO_FILE):
        opened.read_manifest(image.top, None) if name == "a blob" else opened.index()


@pytest.mark.parametrize("folder", ["blobs", "blobs/sha256"])
async def test_nothing_is_read_or_written_through_a_link(tmp_path, folder):
    disk = make_layout(tmp_path / "disk", {})
    (disk / folder).rename(tmp_path / "outside")
    (disk / folder).symlink_to(tmp_path / "outside")
    with pytest.raises(SyncError, match="is not a directory"):
        open_layout(disk).size_of(digest_of(b"body"))
    with pytest.raises(SyncError, match="is not a directory"):
        await put_blob(open_layout(disk), b"body")
    assert files_of(tmp_path / "outside") == set()


def test_a_file_that_is_too_large_is_not_read(seed, tmp_path):
    image = seed.image()
    disk = make_layout(tmp_path / "disk", {"app:v1": image})
    os.truncate(blob_path(disk, image.top), 5 << 20)
    with pytest.raises(ContentError, match="5242880 bytes, more than 4194304"):
        open_layout(disk).read_manifest(image.top, None)
    os.truncate(disk / "index.json", 1 << 30)
    with pytest.raises(SyncError, match=r"index\.json: the file has 1073741824 bytes, more than"):
        open_layout(disk).index()


@pytest.mark.parametrize("change", [linked, piped, a_folder, a_device])
async def test_what_lies_beside_the_place_of_a_blob_is_no_way_out(tmp_path, change):
    body = b"a" * 100
    disk = make_layout(tmp_path / "disk", {})
    beside = blob_path(disk, digest_of(body)).with_suffix(".partial")
    beside.write_bytes(body[:50])
    change(beside)
    outside = beside.with_name("elsewhere")
    layout = open_layout(disk)
    if change is a_folder:
        with pytest.raises(SyncError, match="File exists"):
            await put_blob(layout, body)
    else:
        await put_blob(layout, body)
        await layout.save()
        assert blob_path(disk, digest_of(body)).read_bytes() == body
    layout.close()
    assert not outside.exists() or outside.read_bytes() == body[:50]


@pytest.mark.parametrize("name", ["index.json.partial", "oci-layout.partial"])
async def test_no_file_of_the_layout_is_written_through_a_link(seed, tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    disk = make_layout(tmp_path / "disk", {})
    (disk / name).symlink_to(outside)
    layout = open_layout(disk)
    await put_image(layout, seed.image())
    await layout.save()
    layout.close()
    assert outside.read_bytes() == b"precious"
    check_layout(disk)


# Writing.


def target_in(layout: Path) -> LayoutRepository:
    """Return the repository `app` of a layout, as a run writes to it."""
    return LayoutRepository(open_layout(layout), "app", Side.TARGET)


class Pieces:
    """The pieces of a body."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = iter(pieces)

    async def next(self) -> bytes:
        return next(self.pieces, b"")


async def test_a_manifest_without_its_parts_is_refused_as_a_registry_does(seed, tmp_path):
    root = manifest_of(seed.image())
    target = target_in(make_layout(tmp_path / "disk", {}))
    with pytest.raises(RegistryError, match=root.dependencies[0].digest) as caught:
        await target.put_manifest("v1", root)
    assert (caught.value.status, caught.value.codes) == (404, ("MANIFEST_BLOB_UNKNOWN",))


def blob_of(body: bytes) -> Descriptor:
    return Descriptor("application/octet-stream", digest_of(body), len(body))


async def begin(layout: Layout, body: bytes) -> Any:
    upload = LayoutRepository(layout, "app", Side.TARGET).begin_upload(blob_of(body))
    await upload.start()
    return upload


async def put_blob(layout: Layout, body: bytes) -> None:
    await (await begin(layout, body)).send(Pieces(memoryview(body)))


async def put_image(layout: Layout, image: Image, tag: str = "v1") -> None:
    target = LayoutRepository(layout, "app", Side.TARGET)
    manifest = manifest_of(image)
    for blob in manifest.blobs:
        if not await target.has_blob(blob):
            await put_blob(layout, image.contents()[blob.digest])
    await target.put_manifest(tag, manifest)


async def test_a_second_writer_is_refused_and_may_write_later(seed, tmp_path):
    first = open_layout(tmp_path / "disk")
    second = open_layout(tmp_path / "disk")
    assert not second.index(may_be_new=True).entries
    await put_image(first, seed.image(), "v1")
    for _ in range(2):
        with pytest.raises(SyncError, match="another process is writing") as caught:
            await put_image(second, seed.image(), "v2")
        assert caught.value.hint is not None
    await first.save()
    first.close()

    await put_image(second, seed.image(), "v2")
    await second.save()
    second.close()
    assert set(names_of(tmp_path / "disk")) == {"app:v1", "app:v2"}, "what the first wrote stays"


async def test_a_file_system_without_locks_is_written_and_told_once(seed, tmp_path, monkeypatch):
    def no_locks(_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("_regsync.layout.lock", no_locks)
    said = list[str]()
    layout = open_layout(tmp_path / "disk", said)
    await put_image(layout, seed.image())
    await layout.save()
    layout.close()
    check_layout(tmp_path / "disk")
    [line] = said
    assert line.startswith("info: ")
    assert "its file system has no locks" in line


async def test_a_file_too_large_for_the_file_system_is_told_with_the_limit_of_fat32(tmp_path):
    upload = await begin(open_layout(tmp_path / "disk"), b"a" * 5000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(SyncError, match="File too large") as caught:
            await upload.send(Pieces(memoryview(b"a" * 5000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        await upload.cancel_upload()
    assert "FAT32 holds no file above 4 GiB" in (caught.value.hint or "")
    assert not list((tmp_path / "disk").rglob("*.partial")), "it takes no room from others"


@pytest.mark.parametrize("says_it_at_once", [True, False])
async def test_a_disk_that_says_at_the_end_that_it_is_full_is_told_once(
    tmp_path, monkeypatch, says_it_at_once
):
    class Full(FileIO):
        """As on a network disk: `close` repeats the error of `write`, or is the first to say it."""

        has_failed = False

        def write(self, data):
            if len(data) < 5000:
                return super().write(data)
            self.has_failed = True
            if not says_it_at_once:
                return super().write(data)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

        def close(self):
            super().close()
            if self.has_failed:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("_regsync.layout.FileIO", Full)
    upload = await begin(open_layout(tmp_path / "disk"), b"a" * 5000)
    with pytest.raises(SyncError, match="Disk quota exceeded") as caught:
        await upload.send(Pieces(memoryview(b"a" * 5000)))
    if upload.session:
        await upload.cancel_upload()
    assert "free space" in (caught.value.hint or "")
    assert not list((tmp_path / "disk").rglob("*.partial")), "it takes no room from others"


async def test_a_manifest_that_was_cut_is_written_again(seed, tmp_path):
    image = seed.image()
    disk = make_layout(tmp_path / "disk", {"app:v1": image})
    blob_path(disk, image.top).write_bytes(image.body[:-1])
    layout = open_layout(disk)
    await put_image(layout, image)
    await layout.save()
    layout.close()
    check_layout(disk)


# An index whose rename was lost.


def test_a_new_index_is_read_where_the_old_one_is_missing(seed, tmp_path):
    disk = make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    (disk / "index.json").rename(disk / "index.json.partial")
    assert set(tags(open_layout(disk).index(), "app")) == {"v1"}

    body = (disk / "index.json.partial").read_bytes()
    for torn in (body[: len(body) // 2], bytes(len(body)), b""):
        (disk / "index.json.partial").write_bytes(torn)
        with pytest.raises(SyncError, match="has no index"):
            open_layout(disk).index()
        assert not open_layout(disk).index(may_be_new=True).entries


def test_a_new_index_that_was_not_finished_counts_for_nothing_beside_the_old_one(seed, tmp_path):
    disk = make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    other = make_layout(tmp_path / "other", {"app:v2": seed.image()})
    (other / "index.json").rename(disk / "index.json.partial")
    said = list[str]()
    assert set(tags(open_layout(disk, said).index(), "app")) == {"v1"}
    assert not said


async def test_what_a_new_index_names_stays_when_the_next_run_writes(seed, tmp_path):
    disk = make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    (disk / "index.json").rename(disk / "index.json.partial")
    layout = open_layout(disk)
    await put_image(layout, seed.image(), "v2")
    assert (disk / "index.json").exists(), "before anything is written over it"
    await layout.save()
    layout.close()
    assert names_of(disk).keys() == {"app:v1", "app:v2"}
    assert not (disk / "index.json.partial").exists()


# Errors of the disk.


@pytest.mark.parametrize(
    ("call", "trouble"), [("fsync", errno.EIO), ("replace", errno.ENOSPC), ("replace", errno.EROFS)]
)
async def test_a_commit_that_fails_leaves_the_index_as_it_was_and_nothing_is_written_after(
    seed, tmp_path, monkeypatch, call, trouble
):
    layout = open_layout(tmp_path / "disk")
    first = seed.image()
    await put_image(layout, first, "v1")
    await layout.save()
    before = (tmp_path / "disk" / "index.json").read_bytes()

    def fails(*_: Any) -> None:
        raise OSError(trouble, os.strerror(trouble))

    await put_image(layout, seed.image(), "v2")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        await layout.save()
    assert os.strerror(trouble) in str(layout.error)
    assert trouble != errno.EROFS or "mount the device for writing" in str(layout.error.hint)
    assert (tmp_path / "disk" / "index.json").read_bytes() == before

    with pytest.raises(SyncError, match=os.strerror(trouble)):
        await put_image(layout, seed.image(), "v3")
    await layout.save()
    assert (tmp_path / "disk" / "index.json").read_bytes() == before
    layout.close()
    assert names_of(tmp_path / "disk") == {"app:v1": first.top}


async def test_a_commit_that_gets_no_thread_fails_what_it_was_for_and_no_run(seed, tmp_path):
    async def none_left(*_: Any) -> None:
        raise OSError("can't start new thread")

    layout = open_layout(tmp_path / "disk")
    await put_image(layout, seed.image())
    with edge.using(SimpleNamespace(in_thread=none_left)):
        await layout.save()
    assert "can't start new thread" in str(layout.error)


async def test_what_is_put_while_a_group_fails_fails_with_it(seed, tmp_path, monkeypatch):
    """The index would name what the first group could not write."""
    layout = open_layout(tmp_path / "disk")
    layout.begin_writing()
    has_put = threading.Event()

    def fails(_: int) -> None:
        assert has_put.wait(10)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    await put_image(layout, seed.image(), "v1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        async with anyio.create_task_group() as group:
            group.start_soon(layout.save)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            await put_image(layout, seed.image(), "v2")
            has_put.set()
    await layout.save()
    assert "Input/output error" in str(layout.error)
    layout.close()
    assert not (tmp_path / "disk" / "index.json").exists()
