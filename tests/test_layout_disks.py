"""Layouts on disks of their own: real file systems on files, which only root may mount."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from _regsync.layout.directory import Layout
from conformance.client.attachments import SBOM
from conformance.content.images import Seed
from tests.ends import Ran, document, only, run_regsync
from tests.layouts import check_layout, files_of, make_layout, names_of

pytestmark = [pytest.mark.slow]

MAKERS = {
    "vfat": ["mkfs.vfat", "-F", "32", "-s", "1"],
    "exfat": ["mkfs.exfat"],
    "ext4": ["mkfs.ext4", "-q", "-m", "0"],
}

# linux/ext4.h: what was not written to the disk is lost, and every further call fails.
EXT4_IOC_SHUTDOWN = 0x8004587D
WITHOUT_ITS_JOURNAL = struct.pack("I", 2)


class Disk:
    """A file system of 64 MiB on a file, mounted at `mnt`."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory = directory
        self.kind = kind
        self.device = ""  # of a loop, where `mount` does not make it
        self.file = directory / "disk.img"
        self.place = directory / "mnt"
        self.place.mkdir()
        self.layout = self.place / "mirror"
        with self.file.open("wb") as stream:
            stream.truncate(64 << 20)
        maker = MAKERS[kind]
        if os.name != "posix" or os.geteuid() != 0:
            pytest.skip("only root may mount a disk")
        if shutil.which(maker[0]) is None:
            pytest.skip(f"there is no {maker[0]} here to make a disk of {kind}")
        subprocess.run([*maker, str(self.file)], check=True, capture_output=True)
        self.mount()

    def mount(self, options: str = "loop") -> None:
        command = ["mount", "-t", self.kind, "-o", options, str(self.file), str(self.place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and self.kind == "exfat":
            done = self._mount_by_fuse()
        if done.returncode:
            pytest.skip(f"{self.kind} cannot be mounted here: {done.stderr.strip()[:120]}")

    def _mount_by_fuse(self) -> subprocess.CompletedProcess[str]:
        if shutil.which("mount.exfat-fuse") is None:
            pytest.skip("neither the kernel nor FUSE mounts exfat here")
        find = ["losetup", "--find", "--show", str(self.file)]
        done = subprocess.run(find, capture_output=True, text=True, check=False)
        if done.returncode:
            return done
        self.device = done.stdout.strip()
        command = ["mount.exfat-fuse", self.device, str(self.place)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def umount(self, *options: str) -> None:
        subprocess.run(["umount", *options, str(self.place)], check=False, capture_output=True)
        if self.device:
            subprocess.run(["losetup", "--detach", self.device], check=False, capture_output=True)
            self.device = ""

    def shut_down(self) -> None:
        """Lose what is not on the disk, as if it was pulled out."""
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, WITHOUT_ITS_JOURNAL)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def mounted(directory: Path, kind: str) -> Iterator[Disk]:
    disk = Disk(directory, kind)
    try:
        yield disk
    finally:
        disk.umount("-l")


class Scene:
    """A layout as source, in the directory of the disk's file."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        self.seed = Seed(96)
        self.target = target
        v1 = self.seed.image(sizes=(70_000,))
        self.images = {
            "app:v1": v1,
            "app:v2": self.seed.index(platforms=("linux/amd64", "linux/arm64")),
            "": self.seed.artifact(v1, SBOM),
        }
        self.write()

    def write(self) -> None:
        shutil.rmtree(self.directory / "source", ignore_errors=True)
        make_layout(self.directory / "source", self.images)

    def run(self, *command: str) -> Ran:
        registries = {
            "source": {"url": "oci-layout:source"},
            "disk": {"url": f"oci-layout:{self.target}"},
        }
        mapping = {"from": "app", "source": "source", "targets": ["disk"]}
        file = self.directory / "mirror.yaml"
        file.write_text(document(registries, mapping, defaults={"artifacts": {"enabled": True}}))
        return run_regsync(*command, "-c", str(file))

    def sync(self, *more: str) -> Ran:
        return self.run("sync", "--json", "-q", *more)

    def tops(self) -> dict[str, str]:
        return {name: image.top for name, image in self.images.items() if name}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_layout_is_made_read_and_changed_on_a_real_disk(tmp_path, kind):
    with mounted(tmp_path, kind) as disk:
        scene = Scene(tmp_path, disk.layout)
        ran = scene.sync()
        assert ran.statuses() == ["synced"] * 2, ran.err
        assert names_of(disk.layout) == scene.tops()
        first = (disk.layout / "index.json").read_bytes()
        disk.umount()
        disk.mount()
        assert scene.sync().statuses() == ["skipped"] * 2
        assert (disk.layout / "index.json").read_bytes() == first
        audit = scene.run("audit", "--json", "--read")
        assert audit.status == 0, audit.err

        scene.images["app:v1"] = scene.seed.image()
        scene.images["app:V1"] = scene.seed.image()  # names of tags are in index.json alone
        scene.write()
        ran = scene.sync()
        assert ran.statuses() == ["synced", "synced", "skipped"], ran.err
        assert names_of(disk.layout) == scene.tops()
        check_layout(disk.layout)
        assert not [name for name in files_of(disk.layout) if name.endswith(".partial")]
        old = disk.layout / "index.json.old"
        assert (old.read_bytes() if old.exists() else None) == (None if kind == "ext4" else first)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_free_is_compared_before_the_disk_is_full(tmp_path, kind):
    with mounted(tmp_path, kind) as disk:
        scene = Scene(tmp_path, disk.layout)
        large = {"app:v3": scene.seed.image(sizes=(40_000_000, 40_000_000))}
        scene.images = {**large, **scene.images}
        scene.write()
        ran = scene.sync()
        assert ran.statuses() == ["synced", "synced", "failed"], ran.err
        failed = next(each for each in ran.images if each["status"] == "failed")
        assert "needs 80.0 MB" in failed["error"]["message"]
        check_layout(disk.layout)
        dry = scene.sync("--dry-run")
        assert dry.status == 1
        assert only(dry.totals["layouts"])["free"] < 64 << 20


@pytest.mark.parametrize("kind", ["vfat"])
def test_a_file_that_is_too_large_for_the_file_system_is_told(tmp_path, kind):
    with mounted(tmp_path, kind) as disk:
        descriptor = os.open(disk.place / "probe", os.O_RDWR | os.O_CREAT)
        with pytest.raises(OSError, match="Invalid argument"):
            os.lseek(descriptor, 1 << 32, os.SEEK_SET)
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["vfat", "ext4"])
def test_a_disk_that_was_mounted_to_be_read_says_so(tmp_path, kind):
    with mounted(tmp_path, kind) as disk:
        scene = Scene(tmp_path, disk.layout)
        assert scene.sync().status == 0
        disk.umount()
        disk.mount("loop,ro")
        assert scene.sync().statuses() == ["skipped"] * 2, "nothing to write, nothing refused"
        scene.images["app:v1"] = scene.seed.image()
        scene.write()
        ran = scene.sync()
        assert ran.statuses() == ["failed", "skipped"]
        error = next(each["error"] for each in ran.images if each["error"])
        assert error["code"] == "TARGET_ERROR"
        assert "Read-only file system" in error["message"]
        assert "mount" in error["hint"]


Removal = Callable[[Disk], None]


def _pulled(monkeypatch: pytest.MonkeyPatch, disk: Disk, remove: Removal) -> None:
    """Have the disk removed when the second group is about to be brought to it."""
    write_group = Layout._write_group

    def written(layout: Layout, *given: Any) -> None:
        remove(disk)
        write_group(layout, *given)

    monkeypatch.setattr(Layout, "_write_group", written)


def test_a_disk_that_is_pulled_out_loses_no_image_that_was_reported(tmp_path, monkeypatch):
    with mounted(tmp_path, "ext4") as disk:
        scene = Scene(tmp_path, disk.layout)
        assert scene.sync().status == 0
        before = dict(scene.tops())
        scene.images["app:v1"] = scene.seed.image()
        scene.images["app:v3"] = scene.seed.image(sizes=(2_000_000,))
        scene.write()
        with monkeypatch.context() as patch:
            _pulled(patch, disk, Disk.shut_down)
            ran = scene.sync()
        assert ran.statuses() == ["failed", "skipped", "failed"], ran.err
        error = next(each["error"] for each in ran.images if each["error"])
        assert "Input/output error" in error["message"]
        assert error["hint"]

        disk.umount()
        disk.mount()
        assert names_of(disk.layout) == before
        check_layout(disk.layout)
        assert scene.sync().status == 0
        assert names_of(disk.layout) == scene.tops()
        check_layout(disk.layout)


def test_what_lies_below_a_disk_that_was_taken_away_is_not_written(tmp_path, monkeypatch):
    with mounted(tmp_path, "ext4") as disk:
        scene = Scene(tmp_path, disk.place)
        assert scene.sync().status == 0, "the layout is the disk's own root"
        scene.images = {"app:v7": scene.images["app:v2"]}
        scene.write()
        _pulled(monkeypatch, disk, lambda disk: disk.umount("-l"))
        ran = scene.sync()
        assert ran.statuses() == ["failed"]
        assert "removed" in only(ran.images)["error"]["message"]
        assert not list(disk.place.iterdir())


def test_the_shape_of_a_layout_needs_no_name_that_a_disk_refuses(tmp_path):
    """FAT has no colon, no names that differ by case alone, and at most 255 characters."""
    scene = Scene(tmp_path, tmp_path / "disk")
    scene.images["a" * 120 + "/B:v1".lower()] = scene.seed.image()
    assert scene.sync().status == 0
    names = [part for name in files_of(tmp_path / "disk") for part in name.split("/")]
    assert all(name == name.lower() and len(name) <= 138 for name in names)
    assert not [name for name in names if set(name) & set('"*:<>?\\|+,;=[]')]
    assert json.loads((tmp_path / "disk" / "index.json").read_bytes())["manifests"]
