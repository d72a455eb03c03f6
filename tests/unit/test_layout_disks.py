"""Layouts on a disk of their own: a real file system on a file, which only root may mount."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from _regsync.layout import Layout
from conformance.client.attachments import SBOM
from conformance.content.images import Seed
from tests.ends import Ran, document, run_regsync
from tests.layouts import check_layout, make_layout, names_of

pytestmark = [pytest.mark.slow]

# linux/ext4.h: what was not written to the disk is lost, and every further call fails.
EXT4_IOC_SHUTDOWN = 0x8004587D
WITHOUT_ITS_JOURNAL = struct.pack("I", 2)


class Disk:
    """A file system of 64 MiB on a file, mounted at `mnt`."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "disk.img"
        self.place = directory / "mnt"
        self.place.mkdir()
        self.layout = self.place / "mirror"
        with self.file.open("wb") as stream:
            stream.truncate(64 << 20)
        if os.name != "posix" or os.geteuid() != 0:
            pytest.skip("only root may mount a disk")
        maker = ["mkfs.ext4", "-q", "-m", "0"]
        if shutil.which(maker[0]) is None:
            pytest.skip("there is no mkfs.ext4 here to make a disk")
        subprocess.run([*maker, str(self.file)], check=True, capture_output=True)
        self.mount()

    def mount(self, options: str = "loop") -> None:
        command = ["mount", "-t", "ext4", "-o", options, str(self.file), str(self.place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"ext4 cannot be mounted here: {done.stderr.strip()[:120]}")

    def umount(self, *options: str) -> None:
        subprocess.run(["umount", *options, str(self.place)], check=False, capture_output=True)

    def shut_down(self) -> None:
        """Lose what is not on the disk, as if its power was cut."""
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, WITHOUT_ITS_JOURNAL)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[Disk]:
    disk = Disk(directory)
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


def test_a_disk_that_fails_loses_no_image_that_was_reported(tmp_path, monkeypatch):
    with mounted(tmp_path) as disk:
        scene = Scene(tmp_path, disk.layout)
        assert scene.sync().status == 0
        before = dict(scene.tops())
        scene.images["app:v1"] = scene.seed.image()
        scene.images["app:v3"] = scene.seed.image(sizes=(2_000_000,))
        scene.write()
        write_names = Layout._write_names

        def fails_meanwhile(layout: Layout, *given: Any) -> None:
            disk.shut_down()
            write_names(layout, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Layout, "_write_names", fails_meanwhile)
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
