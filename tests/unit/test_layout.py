"""A directory of images by itself: what `index.json` names, a hostile directory, how it is written."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from _regsync import edge
from _regsync.app.process import in_thread
from _regsync.config import Config, registry_for
from _regsync.errors import ContentError, RegistryError, Side, WireError, WrongBytes
from _regsync.layout import (
    Index,
    Layout,
    LayoutError,
    LayoutRepository,
    image_entry,
    read_lines,
    unnamed_entry,
    without_host,
)
from _regsync.oci import Descriptor, Manifest, parse_manifest, referrers_tag
from _regsync.registry.limits import Gate
from conformance.client.attachments import SBOM
from conformance.content.images import Image, Seed
from tests.ends import run_regsync
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


def test_a_name_of_ours_is_the_only_one_of_its_entry():
    held = index(
        entry("a", **{NAME: "base/alpine:3.20", FULL_NAME: "docker.io/library/alpine:3.20"})
    )
    assert tags(held, "base/alpine") == {"3.20": f"sha256:{'a' * 64}"}
    assert tags(held, "library/alpine") == tags(held, "docker.io/library/alpine") == {}


@pytest.mark.parametrize("key", [NAME, FULL_NAME])
def test_a_full_name_counts_with_its_host_and_without(key):
    held = index(entry("a", **{key: "quay.example/team/app:v1"}))
    for repository in ("team/app", "quay.example/team/app"):
        assert tags(held, repository) == {"v1": f"sha256:{'a' * 64}"}
    assert not tags(held, "app")


def test_a_full_name_with_a_port_is_read():
    assert tags(index(entry("a", **{NAME: "localhost:5000/app:v1"})), "app") != {}


def test_bare_tags_are_one_repository_of_whatever_name():
    held = index(entry("a", **{NAME: "v1"}), entry("b", **{NAME: "v2"}))
    assert tags(held, "anything/at/all") == tags(held, "other") != {}


def test_bare_tags_name_nothing_where_others_have_full_names():
    """What buildx and docker write: a tag alone, and the full name beside it."""
    held = index(
        entry("a", **{NAME: "v1", FULL_NAME: "docker.io/library/app:v1"}),
        entry("b", **{NAME: "v2"}),
    )
    assert tags(held, "library/app") == {"v1": f"sha256:{'a' * 64}"}
    assert tags(held, "other") == {}


def test_our_name_outweighs_a_full_name():
    held = index(
        entry("a", **{FULL_NAME: "host.example/app:v1"}),
        entry("b", **{NAME: "app:v1"}),
        entry("c", **{FULL_NAME: "other.example/app:v1"}),
    )
    assert tags(held, "app") == {"v1": f"sha256:{'b' * 64}"}


def test_an_entry_without_annotations_has_no_name():
    bare = entry("a")
    del bare["annotations"]
    held = index(bare)
    assert (tags(held, "app"), len(held.entries)) == ({}, 1)


# Writing of the index.


def test_equal_content_gives_equal_bytes_in_whatever_order_it_came(seed):
    manifests = [manifest_of(seed.image()) for _ in range(4)]
    subject = seed.image()
    artifact = manifest_of(seed.artifact(subject, "application/x"))
    entries = [
        image_entry(each, "app", f"v{number}", f"hub/app:v{number}")
        for number, each in enumerate(manifests)
    ]
    entries += [unnamed_entry(artifact, "app"), unnamed_entry(manifests[0], "other")]
    bodies = set[bytes]()
    for order in (entries, entries[::-1], entries[2:] + entries[:2]):
        held = Index()
        for each in order:
            held.add(each)
        held.left_out.update({f"sha256:{'f' * 64}": "app", f"sha256:{'e' * 64}": "app"})
        bodies.add(held.dump())
        assert Index(held.dump()).dump() == held.dump()
    assert len(bodies) == 1


def test_a_tag_that_moves_keeps_one_entry_and_other_names_stay(seed):
    old = manifest_of(seed.image())
    new = manifest_of(seed.image())
    held = Index()
    held.add(image_entry(old, "app", "latest", "hub/app:latest"))
    held.add(image_entry(old, "app", "v1", "hub/app:v1"))
    held.add(image_entry(new, "app", "latest", "hub/app:latest"))
    assert tags(held, "app") == {"latest": new.digest, "v1": old.digest}
    assert len(Index(held.dump()).entries) == 2


def test_an_image_that_moves_keeps_none_of_its_names(seed):
    old = manifest_of(seed.image())
    new = manifest_of(seed.image())
    list_tag = referrers_tag(f"sha256:{'a' * 64}")
    held = Index()
    for manifest in (old, new):
        held.add(image_entry(manifest, "ghcr.io/app", "v1", ""))  # may be a full name too
        held.add(image_entry(manifest, "app", list_tag, ""))
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


def test_an_artifact_does_not_name_itself_by_its_annotations(seed):
    subject = seed.image()
    named = {NAME: "app:v1", "dev.regsync.repository": "app", "org.example": "note"}
    artifact = manifest_of(seed.artifact(subject, "application/x", annotations=named))
    held = Index()
    held.add(unnamed_entry(artifact, "app"))
    assert tags(held, "app") == {}
    (listed,) = held.artifacts[subject.top].values()
    assert listed.referrer.artifact_type == "application/x"
    assert dict(listed.referrer.annotations) == {"org.example": "note"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b'{"manifests": {}}', "no list"),
        (b'{"manifests": [{"digest": "sha256:../../etc/passwd"}]}', "media type"),
        (json.dumps({"manifests": [{**entry("a"), "digest": "../x"}]}).encode(), "not a digest"),
        (
            json.dumps({"manifests": [{**entry("a"), "digest": f"sha256:{'../' * 21}x"}]}).encode(),
            "not a digest",
        ),
        (json.dumps({"manifests": [{**entry("a"), "size": -1}]}).encode(), "not a size"),
        (b'{"manifests": [' + b"{}," * 1_000_001 + b"{}]}", "more than 1000000 values"),
        (b'{"manifests": ' + b"[" * 5000 + b"]" * 5000 + b"}", "deeper"),
    ],
)
def test_an_index_that_is_none_is_refused_in_words(body, words):
    with pytest.raises(ContentError, match=words):
        Index(body)


@pytest.mark.parametrize(
    "place",
    ["team/app", "registry.example/team/app", "localhost:5000/team/app", "oci-layout:/d//team/app"],
)
def test_a_receipt_names_repositories_with_their_host_or_without(place):
    digest = f"sha256:{'a' * 64}"
    assert read_lines(f"{digest} {place}\n", without_host) == {digest: "team/app"}


def test_a_line_of_what_was_left_out_has_no_host():
    """A mirror may call its repositories by the names of other hosts."""
    digest = f"sha256:{'a' * 64}"
    left_out = index(annotations={"dev.regsync.left-out": f"{digest} ghcr.io/org/app"}).left_out
    assert left_out == {digest: "ghcr.io/org/app"}


def test_lines_of_receipts():
    digest = f"sha256:{'a' * 64}"
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
        machine=SimpleNamespace(log=log, chance=lambda: 0.5), count_sent=lambda _: None, gate=Gate()
    )
    registry = registry_for(f"oci-layout:{path}", Config({}, ()))
    return Layout(registry, transport, must_be_whole=False)


@pytest.fixture(autouse=True)
def threads() -> Any:
    with edge.using(SimpleNamespace(in_thread=in_thread)):
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


@pytest.mark.parametrize("change", [linked, piped, a_folder, a_device])
@pytest.mark.parametrize("name", ["index.json", "oci-layout"])
def test_only_regular_files_are_read(seed, tmp_path, name, change):
    layout = make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    change(layout / name)
    with pytest.raises(LayoutError, match=NO_FILE):
        open_layout(layout).index()


@pytest.mark.parametrize("change", [linked, piped, a_folder, a_device])
def test_a_blob_is_a_regular_file(seed, tmp_path, change):
    image = seed.image()
    layout = make_layout(tmp_path / "disk", {"app:v1": image})
    change(blob_path(layout, image.top))
    with pytest.raises(LayoutError, match=NO_FILE):
        open_layout(layout).read_manifest(image.top, None)


async def test_a_look_up_of_a_blob_whose_place_is_taken_says_which_blob(seed, tmp_path):
    image = seed.image()
    layout = make_layout(tmp_path / "disk", {"app:v1": image})
    blob = manifest_of(image).blobs[0]
    a_folder(blob_path(layout, blob.digest))
    with pytest.raises(LayoutError, match="Is a directory") as caught:
        await target_in(layout).has_blob(blob)
    assert caught.value.code == "TARGET_ERROR"
    assert caught.value.reference == f"oci-layout:{layout}//app@{blob.digest}"


@pytest.mark.parametrize("folder", ["blobs", "blobs/sha256"])
def test_no_folder_of_blobs_is_a_link(seed, tmp_path, folder):
    image = seed.image()
    layout = make_layout(tmp_path / "disk", {"app:v1": image})
    linked(layout / folder)
    with pytest.raises(LayoutError, match="is not a directory"):
        open_layout(layout).size_of(image.top)


def test_an_index_of_a_gigabyte_is_not_read(seed, tmp_path):
    layout = make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    os.truncate(layout / "index.json", 1 << 30)
    with pytest.raises(ContentError, match="1073741824 bytes, more than"):
        open_layout(layout).index()


async def test_a_blob_of_another_size_is_not_opened(seed, tmp_path):
    image = seed.image()
    layout = make_layout(tmp_path / "disk", {"app:v1": image})
    blob = manifest_of(image).blobs[0]
    with blob_path(layout, blob.digest).open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(WrongBytes, match="descriptor says"):
        await target_in(layout).open_blob(blob)


def test_a_manifest_of_5_mib_is_not_read(seed, tmp_path):
    image = seed.image()
    layout = make_layout(tmp_path / "disk", {"app:v1": image})
    os.truncate(blob_path(layout, image.top), 5 << 20)
    with pytest.raises(ContentError, match="5242880 bytes, more than 4194304"):
        open_layout(layout).read_manifest(image.top, None)


def test_a_manifest_that_many_entries_name_is_read_once(seed, tmp_path, monkeypatch):
    sbom = seed.artifact(seed.image(), SBOM)
    same = [sbom.descriptor(annotations={"number": str(number)}) for number in range(1000)]
    disk = make_layout(tmp_path / "disk", {"app:v1": seed.image()}, *same)
    for digest, body in sbom.contents().items():
        blob_path(disk, digest).write_bytes(body)
    reads = list[str]()
    read = Layout.read_manifest

    def counted(layout: Layout, digest: str, expected: Any) -> Manifest:
        reads.append(digest)
        return read(layout, digest, expected)

    monkeypatch.setattr(Layout, "read_manifest", counted)
    ran = run_regsync("copy", f"oci-layout:{disk}//app:v1", f"oci-layout:{tmp_path / 'other'}")
    assert ran.status == 0, ran.err
    assert reads.count(sbom.top) == 1


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
        with pytest.raises(LayoutError, match="File exists"):
            await put_blob(layout, body)
    else:
        await put_blob(layout, body)
        await layout.save()
        assert blob_path(disk, digest_of(body)).read_bytes() == body
    layout.close(remove_partials=True)
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
    layout.close(remove_partials=True)
    assert outside.read_bytes() == b"precious"
    check_layout(disk)


@pytest.mark.parametrize("folder", ["blobs", "blobs/sha256"])
async def test_no_blob_is_written_through_a_link(tmp_path, folder):
    disk = make_layout(tmp_path / "disk", {})
    (disk / folder).rename(tmp_path / "outside")
    (disk / folder).symlink_to(tmp_path / "outside")
    with pytest.raises(LayoutError, match="is not a directory"):
        await put_blob(open_layout(disk), b"body")
    assert files_of(tmp_path / "outside") == set()


@pytest.mark.parametrize("version", ["2.0.0", "", None])
def test_another_version_of_the_layout_is_refused(seed, tmp_path, version):
    layout = make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": version}))
    with pytest.raises(ContentError, match="version"):
        open_layout(layout).index()


def test_a_layout_without_an_index_is_incomplete(seed, tmp_path):
    layout = make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    (layout / "index.json").unlink()
    with pytest.raises(LayoutError, match="is an incomplete image layout"):
        open_layout(layout).index()
    assert not open_layout(layout).index(may_be_new=True).entries


def test_a_directory_without_a_layout_says_what_to_look_at(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(LayoutError, match="not an image layout") as caught:
            open_layout(path).index()
        assert "mounted" in (caught.value.hint or "")


# Writing.


def target_in(layout: Path) -> LayoutRepository:
    """Return the repository `app` of a layout, as a run writes to it."""
    return LayoutRepository(open_layout(layout), "app", Side.TARGET)


class Pieces:
    """The pieces of a body. An error among them is raised in its place."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = iter(pieces)

    async def next(self) -> bytes:
        piece = next(self.pieces, b"")
        if isinstance(piece, Exception):
            raise piece
        return piece


async def test_an_upload_whose_body_breaks_goes_on_where_the_file_ends(tmp_path):
    body = b"0123456789"
    blob = blob_of(body)
    target = target_in(tmp_path / "disk")
    upload = target.begin_upload(blob)
    assert not await upload.start()
    with pytest.raises(WireError):
        await upload.send(Pieces(body[:4], WireError("the source is gone")))
    assert (bool(upload.session), upload.offset, upload.verifies) == (True, 4, False)
    assert await upload.send(Pieces(body[4:]))
    await target.host.save()
    assert blob_path(tmp_path / "disk", blob.digest).read_bytes() == body


async def test_wrong_bytes_of_a_source_do_not_stay(tmp_path):
    upload = target_in(tmp_path / "disk").begin_upload(blob_of(b"0123456789"))
    await upload.start()
    with pytest.raises(WrongBytes):
        await upload.send(Pieces(b"0123", WrongBytes("the blob's bytes do not match")))
    assert not upload.session
    assert not list((tmp_path / "disk").rglob("*.partial"))


@pytest.mark.parametrize("left", [b"01234", b"x1234"], ids=["right", "wrong"])
async def test_what_an_earlier_run_has_left_is_verified_with_the_rest(tmp_path, left):
    body = b"0123456789"
    disk = make_layout(tmp_path / "disk", {})
    partial = blob_path(disk, digest_of(body)).with_suffix(".partial")
    partial.write_bytes(left)
    upload = target_in(disk).begin_upload(blob_of(body))
    assert not await upload.start()
    assert (upload.offset, upload.verifies) == (5, True)
    if left != body[:5]:
        with pytest.raises(WrongBytes, match="not its beginning"):
            await upload.send(Pieces(body[5:]))
        assert not partial.exists()
    else:
        assert await upload.send(Pieces(body[5:]))
        assert partial.read_bytes() == body


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
    await target.put_manifest(tag, manifest, full_name=f"hub.example/app:{tag}")


async def test_what_is_put_is_there_after_a_commit_and_names_nothing_before(seed, tmp_path):
    image = seed.image()
    layout = open_layout(tmp_path / "disk")
    await put_image(layout, image)
    assert not (tmp_path / "disk" / "index.json").exists()
    assert layout.read_manifest(image.top, None).body == image.body, "the run finds it at once"
    await layout.save()
    await layout.wait_until_saved()
    layout.close(remove_partials=True)
    assert check_layout(tmp_path / "disk") == set(image.contents())
    assert names_of(tmp_path / "disk") == {"app:v1": image.top}
    blobs = {f"blobs/sha256/{digest[7:]}" for digest in image.contents()}
    assert files_of(tmp_path / "disk") == {"oci-layout", "index.json", *blobs}


async def test_others_may_read_what_is_carried_to_them(seed, tmp_path):
    before = os.umask(0o077)
    try:
        layout = open_layout(tmp_path / "disk")
        await put_image(layout, seed.image())
        await layout.save()
    finally:
        os.umask(before)
    for folder, folders, files in os.walk(tmp_path / "disk"):
        for name in folders:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o755
        for name in files:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o644


async def test_nothing_put_is_nothing_written(seed, tmp_path):
    make_layout(tmp_path / "disk", {"v1": seed.image()})
    before = {name: os.stat(tmp_path / "disk" / name) for name in files_of(tmp_path / "disk")}
    layout = open_layout(tmp_path / "disk")
    assert tags(layout.index(), "x")
    await layout.save()
    layout.close(remove_partials=True)
    after = {name: os.stat(tmp_path / "disk" / name) for name in files_of(tmp_path / "disk")}
    assert {name: each.st_mtime_ns for name, each in before.items()} == {
        name: each.st_mtime_ns for name, each in after.items()
    }


async def test_a_second_writer_is_refused_and_may_write_later(seed, tmp_path):
    first = open_layout(tmp_path / "disk")
    second = open_layout(tmp_path / "disk")
    assert not second.index(may_be_new=True).entries
    await put_image(first, seed.image(), "v1")
    with pytest.raises(LayoutError, match="another process is writing") as caught:
        await put_image(second, seed.image(), "v2")
    assert caught.value.hint is not None
    await first.save()
    first.close(remove_partials=True)

    await put_image(second, seed.image(), "v2")
    await second.save()
    second.close(remove_partials=True)
    assert set(names_of(tmp_path / "disk")) == {"app:v1", "app:v2"}, "what the first wrote stays"


async def test_a_file_system_without_locks_is_told_once(seed, tmp_path, monkeypatch):
    def no_locks(_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("_regsync.layout.lock", no_locks)
    said = list[str]()
    layout = open_layout(tmp_path / "disk", said)
    await put_image(layout, seed.image())
    await layout.save()
    assert [line.partition(":")[0] for line in said] == ["info"]
    assert "no locks" in said[0]


async def test_a_disk_that_is_not_mounted_is_not_made_up(tmp_path):
    layout = open_layout(tmp_path / "media" / "disk")
    with pytest.raises(LayoutError, match="No such file"):
        layout.begin_writing()
    assert not (tmp_path / "media").exists()


async def test_a_blob_for_which_there_is_no_room_is_refused_before_its_first_byte(
    tmp_path, monkeypatch
):
    layout = open_layout(tmp_path / "disk")
    monkeypatch.setattr(layout, "free_bytes", lambda: 1000)
    under_way = await begin(layout, b"a" * 600)
    with pytest.raises(LayoutError, match=r"room for 400 B, .* 500 B") as caught:
        await begin(layout, b"b" * 500)
    assert "larger" in (caught.value.hint or "")
    await under_way.cancel_upload()
    await (await begin(layout, b"b" * 500)).cancel_upload()
    assert not list((tmp_path / "disk" / "blobs" / "sha256").iterdir())


async def test_a_leftover_needs_room_for_its_rest_alone(tmp_path, monkeypatch):
    body = b"x" * 900
    disk = make_layout(tmp_path / "disk", {})
    partial = blob_path(disk, digest_of(body)).with_suffix(".partial")
    partial.write_bytes(body[:600])
    index_size = (disk / "index.json").stat().st_size  # a second one is written beside it
    layout = open_layout(disk)
    monkeypatch.setattr(layout, "free_bytes", lambda: 299 + index_size)
    with pytest.raises(LayoutError, match="room for 299 B, the blob needs 300 B"):
        await begin(layout, body)
    assert partial.read_bytes() == body[:600], "a larger disk goes on with it"
    monkeypatch.setattr(layout, "free_bytes", lambda: 300 + index_size)
    await (await begin(layout, body)).send(Pieces(memoryview(body)[600:]))


async def test_a_file_too_large_for_the_file_system_is_told_with_the_limit_of_fat32(tmp_path):
    upload = await begin(open_layout(tmp_path / "disk"), b"a" * 5000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(LayoutError, match="File too large") as caught:
            await upload.send(Pieces(memoryview(b"a" * 5000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "FAT32 holds no file above 4 GiB" in (caught.value.hint or "")
    assert not list((tmp_path / "disk").rglob("*.partial")), "it takes no room from others"


async def test_a_manifest_that_was_cut_is_written_again(seed, tmp_path):
    image = seed.image()
    disk = make_layout(tmp_path / "disk", {"app:v1": image})
    blob_path(disk, image.top).write_bytes(image.body[:-1])
    layout = open_layout(disk)
    await put_image(layout, image)
    await layout.save()
    layout.close(remove_partials=True)
    check_layout(disk)


async def test_a_writing_that_could_not_begin_may_begin_later(seed, tmp_path, monkeypatch):
    """The lock that it took is its own, not another process's."""
    layout = open_layout(tmp_path / "disk")
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "fsync", fails)
        with pytest.raises(LayoutError, match="Input/output error"):
            layout.begin_writing()
    await put_image(layout, seed.image())
    await layout.save()
    layout.close(remove_partials=True)
    check_layout(tmp_path / "disk")


# An index whose rename was lost.


def test_a_new_index_is_read_where_the_old_one_is_missing(seed, tmp_path):
    disk = make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    (disk / "index.json").rename(disk / "index.json.partial")
    said = list[str]()
    assert set(tags(open_layout(disk, said).index(), "app")) == {"v1"}
    assert [line.partition(":")[0] for line in said] == ["warning"]

    body = (disk / "index.json.partial").read_bytes()
    for torn in (body[: len(body) // 2], bytes(len(body)), b""):
        (disk / "index.json.partial").write_bytes(torn)
        with pytest.raises(LayoutError, match="has no index"):
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
    layout.close(remove_partials=True)
    assert names_of(disk).keys() == {"app:v1", "app:v2"}
    assert not (disk / "index.json.partial").exists()


# Errors of the disk.


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("trouble", [errno.EIO, errno.ENOSPC, errno.EROFS])
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
        async with anyio.create_task_group() as group:

            async def waits() -> None:
                with pytest.raises(LayoutError, match=os.strerror(trouble)):
                    await layout.wait_until_saved()

            group.start_soon(waits)
            await anyio.lowlevel.checkpoint()
            await layout.save()
    assert (tmp_path / "disk" / "index.json").read_bytes() == before

    with pytest.raises(LayoutError, match=os.strerror(trouble)):
        await put_image(layout, seed.image(), "v3")
    await layout.save()
    assert (tmp_path / "disk" / "index.json").read_bytes() == before
    layout.close(remove_partials=True)
    assert names_of(tmp_path / "disk") == {"app:v1": first.top}


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
    with pytest.raises(LayoutError, match="Input/output error"):
        await layout.wait_until_saved()
    layout.close(remove_partials=True)
    assert not (tmp_path / "disk" / "index.json").exists()


def test_a_read_only_directory_is_told(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()

    def read_only(path: str, *_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(LayoutError, match="Read-only file system"):
        open_layout(tmp_path / "disk").begin_writing()


async def test_what_is_not_whole_is_removed_in_the_end_unless_somebody_goes_on_with_it(tmp_path):
    for remove_partials in (False, True):
        layout = open_layout(tmp_path / "disk")
        upload = await begin(layout, b"a" * 100)
        with pytest.raises(WireError):
            await upload.send(Pieces(memoryview(b"a" * 50), WireError("the source is gone")))
        await upload.cancel_upload()
        layout.close(remove_partials=remove_partials)
        left = list((tmp_path / "disk" / "blobs" / "sha256").iterdir())
        assert len(left) == (0 if remove_partials else 1)
