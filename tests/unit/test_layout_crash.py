"""A run into a layout that is killed at any write, rename or sync, and the run after it (I11)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.client.attachments import SBOM
from conformance.content.images import Image, Seed
from tests.ends import ROOT, run_regsync
from tests.layouts import check_layout, files_of, index_of, make_layout, names_of

# Reads numbers, and forks for each a sync that dies at the call of that number, of which half of
# what was to be written is written. Prints how it ended, and the number of calls of one that lived.
DIES = """
import io, os, signal, sys
sys.path.insert(0, sys.argv[2])
from _regsync.app import cli
from _regsync.app import commands, running
from _regsync import layout
from _regsync.sync import run

config = sys.argv[1]
at = calls = 0

def step(half=lambda: None):
    global calls
    calls += 1
    if calls == at:
        half()
        os.kill(os.getpid(), signal.SIGKILL)

def dying(name):
    real = getattr(os, name)
    def call(*arguments, **named):
        step()
        return real(*arguments, **named)
    setattr(os, name, call)

class DyingFile(io.FileIO):
    def write(self, data):
        step(lambda: io.FileIO.write(self, memoryview(data)[: len(data) // 2]))
        return super().write(data)

for name in ("replace", "fsync", "mkdir", "unlink"):
    dying(name)
layout.FileIO = DyingFile
for line in sys.stdin:
    at = int(line)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = cli.main(["sync", "-q", "-c", config])
        os.write(writing, str(calls).encode())
        os._exit(status)
    os.close(writing)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, os.read(reading, 99).decode() or 0, flush=True)
    os.close(reading)
"""


class Scene:
    """A layout with new images, and one with old ones that it is copied to."""

    def __init__(self, directory: Path) -> None:
        seed = Seed(77)
        self.work = directory
        self.old = {"app:v1": seed.image(), "app:latest": seed.image()}
        shared = seed.layer(400_000)
        new = seed.image(layers=[shared, seed.layer(300)])
        self.new = {
            "app:v1": new,
            "app:v2": seed.index(platforms=("linux/amd64", "linux/arm64")),
            "app:latest": seed.image(layers=[shared]),
            "": seed.artifact(new, SBOM),
        }
        make_layout(directory / "source", self.new)
        registries = {"source": {"url": "oci-layout:source"}, "disk": {"url": "oci-layout:disk"}}
        mapping = {"from": "app", "source": "source", "targets": ["disk"]}
        document = {"registries": registries, "mappings": [mapping]}
        self.config = directory / "mirror.yaml"
        self.config.write_text(json.dumps(document))
        self.command = [sys.executable, "-c", DIES, str(self.config), str(ROOT)]

    def begin(self) -> Path:
        disk = self.work / "disk"
        shutil.rmtree(disk, ignore_errors=True)
        make_layout(disk, self.old)
        return disk

    @contextlib.contextmanager
    def runs(self) -> Iterator[Callable[[int], tuple[int, int]]]:
        """Give a function that runs a sync up to a call; it tells the status, and how many calls
        one that lived has made.
        """
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(self.command, cwd=self.work, **pipes) as process:

            def run(at: int) -> tuple[int, int]:
                process.stdin.write(f"{at}\n")
                process.stdin.flush()
                status, calls = process.stdout.readline().split()
                return int(status), int(calls)

            yield run

    def tops(self) -> dict[str, tuple[str, str]]:
        """Return by name what it may name: the old image or the new one."""
        names = self.new.keys() | self.old.keys()
        return {name: (top(self.old, name), top(self.new, name)) for name in names if name}


def top(images: dict[str, Image], name: str) -> str:
    return images[name].top if name in images else ""


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.thorough), 9])
def test_whatever_the_instant_tags_are_old_or_new_and_the_next_run_ends_it(tmp_path, step):
    scene = Scene(tmp_path)
    with scene.runs() as run:
        disk = scene.begin()
        status, calls = run(0)
        assert status == 0
        assert calls > 30
        complete = (disk / "index.json").read_bytes()
        files = files_of(disk)

        for at in range(1, calls + 1, step):
            disk = scene.begin()
            assert run(at)[0] == -signal.SIGKILL, at
            names = names_of(disk)
            assert all(names.get(name, "") in tops for name, tops in scene.tops().items()), at
            check_layout(disk)

            ran = run_regsync("sync", "-q", "-c", str(scene.config))
            assert ran.status == 0, (at, ran.err)
            check_layout(disk)
            assert (disk / "index.json").read_bytes() == complete, at
            assert files_of(disk) == files, at


def test_the_artifact_is_named_after_a_run_that_died_before_its_index_was_there(tmp_path):
    """Its manifest is there, and `index.json` does not name it: it is put once more."""
    scene = Scene(tmp_path)
    disk = scene.begin()
    assert run_regsync("sync", "-q", "-c", str(scene.config)).status == 0
    complete = (disk / "index.json").read_bytes()
    document = index_of(disk)
    document["manifests"] = [
        entry
        for entry in document["manifests"]
        if "dev.regsync.subject" not in entry["annotations"]
    ]
    (disk / "index.json").write_text(json.dumps(document))
    assert run_regsync("sync", "-q", "--recheck", "-c", str(scene.config)).status == 0
    assert (disk / "index.json").read_bytes() == complete
    assert os.listdir(disk / "blobs") == ["sha256"]
