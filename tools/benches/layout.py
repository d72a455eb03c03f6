"""Print how fast an image layout is written and read, beside `cp` and beside what hashing leaves.

The image has 8 layers of 64 MiB, and lies in memory. All rounds alternate, and the best
of each is shown. The registry is Debian's docker-registry on loopback; it takes its share of the
processors.

    cp          `cp -r` of the layout
    SHA-256     the layers are read and hashed, by one thread and by one for each processor
    bare copy   one thread for each processor reads, hashes and writes files, and does nothing else:
                what a program can reach that hashes every byte
    start       a run that finds everything unchanged
    the rest    runs of the program; its speed is shown as a part of cp's, and, without the time of
                a start, of the bare copy's

Owns: the scenes, and what is around them.
May not know: anything of the program but its command line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from conformance.client.copies import push_http
from conformance.content.images import Seed
from conformance.programs import find_program
from tools.benches.registries import empty_registry
from tools.benches.runner import (
    MIB,
    REGSYNC,
    Figure,
    Spent,
    folder_in_memory,
    print_figures,
    run_measured,
    write_mirror,
)

__all__ = ["add_options", "run"]

LAYERS = 8
LAYER = 64 * MIB
REPOSITORY = "bench/layout"

# Reads and hashes the files of a folder, by so many threads, and writes them to another folder where
# one is named; prints the seconds that takes.
BARE = """
import hashlib, os, sys, threading, time
source, target, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
names = sorted(os.listdir(source), key=lambda name: os.path.getsize(f"{source}/{name}"))
PIECE = 512 << 10

def work():
    buffer = memoryview(bytearray(PIECE))
    while True:
        try:
            name = names.pop()
        except IndexError:
            return
        digest = hashlib.sha256()
        written = open(f"{target}/{name}", "wb", 0) if target else None
        with open(f"{source}/{name}", "rb", 0) as read:
            while size := read.readinto(buffer):
                digest.update(buffer[:size])
                if written:
                    written.write(buffer[:size])
        if written:
            written.close()

threads = [threading.Thread(target=work) for _ in range(count)]
began = time.perf_counter()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(time.perf_counter() - began)
"""


class Scene(NamedTuple):
    """A folder in memory, and a registry that holds the image."""

    work: Path
    registry: str

    @property
    def source(self) -> Path:
        """The layout that holds the image."""
        return self.work / "source"

    @property
    def target(self) -> Path:
        """The layout that a run writes."""
        return self.work / "target"

    def sync(self, source: str, target: str) -> Spent:
        """Run the program once."""
        config = write_mirror(self.work / "mirror.yaml", source, [target], [REPOSITORY], tags="v1")
        return run_measured(REGSYNC.command("sync", "-q", "-c", str(config))).spent

    def clear(self) -> None:
        """Remove what a run has written."""
        shutil.rmtree(self.target, ignore_errors=True)


def copy_plainly(scene: Scene) -> float:
    """Return the seconds that `cp` takes."""
    command = [find_program("cp", "coreutils"), "-r", str(scene.source), str(scene.target)]
    return run_measured(command).spent.wall


def run_bare(scene: Scene, threads: int, *, writes: bool) -> float:
    """Return the seconds that threads take to read and hash the layers, and perhaps to write them."""
    scene.target.mkdir()
    source = str(scene.source / "blobs" / "sha256")
    target = str(scene.target) if writes else ""
    command = [sys.executable, "-c", BARE, source, target, str(threads)]
    return float(run_measured(command).out)


def to_layout(scene: Scene) -> float:
    """Return the seconds from the registry into a layout."""
    return scene.sync(f"http://{scene.registry}", f"oci-layout:{scene.target}").wall


def between_layouts(scene: Scene) -> float:
    """Return the seconds from a layout into another."""
    return scene.sync(f"oci-layout:{scene.source}", f"oci-layout:{scene.target}").wall


def unchanged(scene: Scene) -> float:
    """Return the seconds of a run that has nothing to do."""
    shutil.copytree(scene.source, scene.target, copy_function=os.link)
    return between_layouts(scene)


def from_layout(scene: Scene) -> float:
    """Return the seconds from a layout into an empty registry."""
    with empty_registry(scene.work) as target:
        return scene.sync(f"oci-layout:{scene.source}", f"http://{target.address}").wall


def measure(scene: Scene, rounds: int) -> dict[str, float]:
    """Return the least seconds of each scene."""
    processors = len(os.sched_getaffinity(0))
    scenes: dict[str, Callable[[], float]] = {
        "cp": lambda: copy_plainly(scene),
        "SHA-256, 1 thread": lambda: run_bare(scene, 1, writes=False),
        f"SHA-256, {processors} threads": lambda: run_bare(scene, processors, writes=False),
        "bare copy": lambda: run_bare(scene, processors, writes=True),
        "start": lambda: unchanged(scene),
        "layout to layout": lambda: between_layouts(scene),
        "registry to layout": lambda: to_layout(scene),
        "layout to registry": lambda: from_layout(scene),
    }
    seconds = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        for name, take in scenes.items():
            scene.clear()
            seconds[name].append(take())
    return {name: min(values) for name, values in seconds.items()}


def figures(scene: Scene, rounds: int) -> Iterator[Figure]:
    """Show what was measured."""
    seconds = measure(scene, rounds)
    for name, taken in seconds.items():
        detail = ""
        if " to " in name:
            of_cp = seconds["cp"] / taken
            of_bare = seconds["bare copy"] / (taken - seconds["start"])
            detail = f"{of_cp:.2f} of cp's speed; less a start {of_bare:.2f} of the bare copy's"
        yield Figure(name, taken, "s", detail=detail)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options this takes."""
    parser.add_argument("-n", type=int, default=5, metavar="N", help="rounds (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Measure everything."""
    with folder_in_memory() as work, empty_registry(work) as registry:
        address = registry.address
        push_http(Seed(2).image(sizes=[LAYER] * LAYERS), address, REPOSITORY, "v1")
        scene = Scene(work, address)
        scene.sync(f"http://{address}", f"oci-layout:{scene.source}")
        print_figures(figures(scene, options.n))
    return 0
