"""Measure time, CPU and memory of whole runs, start-up included, beside a bare loop of h11.

The bare loop asks HEAD after HEAD with nothing around h11 and anyio. Each scene is run into empty
registries, then once more, when nothing has changed. The scene `one` comes first, because its second
run is what a start takes: without that, each run's CPU is shown as so many times that of the bare
loop, request by request. Figures are medians of rounds; a busy machine changes times much, and
CPU little.

Owns: the scenes, and the loop beside which they are shown.
May not know: anything of the program but its command line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from conformance.images import Fleet, Seed
from tools.benches.programs import OURS, Job, Program, add_peer_option, chosen_programs, run_job
from tools.benches.runs import (
    MB,
    MIB,
    Images,
    Registry,
    Spent,
    choose,
    run_measured,
    started_registries,
)

__all__ = ["add_options", "run"]

# Sends COUNT questions over 16 connections; prints the seconds of CPU.
BARE_LOOP = """
import json, socket, sys, time
import anyio, h11
address, path, count = json.loads(sys.argv[1])
host, _, port = address.partition(":")
HEADERS = [("host", address), ("user-agent", "bare"), ("accept", "*/*")]

async def worker(requests):
    own = socket.create_connection((host, int(port)))
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setblocking(False)
    framing = h11.Connection(h11.CLIENT)
    for _ in range(requests):
        head = h11.Request(method="HEAD", target=path, headers=HEADERS)
        own.send(framing.send(head) + framing.send(h11.EndOfMessage()))
        while type(event := framing.next_event()) is not h11.EndOfMessage:
            if event is h11.NEED_DATA:
                await anyio.wait_readable(own)
                framing.receive_data(own.recv(65536))
        framing.start_next_cycle()
    own.close()

async def main():
    async with anyio.create_task_group() as workers:
        for _ in range(16):
            workers.start_soon(worker, count // 16)

began = time.process_time()
anyio.run(main)
print(time.process_time() - began)
"""
BARE_COUNT = 3200


class Scene(NamedTuple):
    """What is copied, and to how many targets."""

    text: str
    images: Callable[[], Images]
    targets: int = 1


def small_images(count: int, size: int) -> Images:
    """Make images of one repository, each with a layer of `size` bytes."""
    return Fleet(repositories=1, tags=count, shared=0, own=1, size=size).images()


def big_image() -> Images:
    """Make an image of 2 GiB."""
    return {"fleet/app-0": {"v1": Seed(2).image(sizes=[256 * MIB] * 8)}}


SCENES: Mapping[str, Scene] = {
    "one": Scene("one small image", lambda: small_images(1, 1000)),
    "small": Scene("1,000 small images", lambda: small_images(1000, 1000)),
    "pod": Scene("20 MB in 79 images, a typical run", lambda: small_images(79, 20 * MB // 79)),
    "three": Scene(
        "320 MB in 96 images, to three targets", lambda: small_images(96, 320 * MB // 96), 3
    ),
    "bodies": Scene("one image of 8 layers of 256 MiB", big_image),
}


class Row(NamedTuple):
    """The medians of a program's runs, and how many requests it says that each took (ours alone)."""

    spent: Spent
    requests: int


def measure_rounds(
    scene: Scene, programs: Mapping[str, Program], rounds: int
) -> dict[tuple[str, str], Row]:
    """Run a scene in each round with each program; return what it took by program and phase."""
    images = scene.images()
    runs: dict[tuple[str, str], list[Spent]] = {}
    requests: dict[tuple[str, str], int] = {}
    with started_registries(1) as (_, [source]):
        source.push(images)
        for _ in range(rounds):
            for name, program in programs.items():
                for phase, spent, said in measure(scene.targets, images, program, source):
                    runs.setdefault((name, phase), []).append(spent)
                    requests[name, phase] = count_requests(said) if name == OURS else 0
    return {
        key: Row(Spent(*map(statistics.median, zip(*several, strict=True))), requests[key])
        for key, several in runs.items()
    }


def measure(
    targets: int, images: Images, program: Program, source: Registry
) -> Iterator[tuple[str, Spent, str]]:
    """Run a program into empty registries, and once more; give phase, what it took and said."""
    with started_registries(targets) as (home, empty):
        job = Job(home, source.address, [target.address for target in empty], list(images))
        for phase in ("first run", "unchanged"):
            spent, said = run_job(program, job)
            for target in empty:
                target.check(images)
            yield phase, spent, said


def count_requests(report: str) -> int:
    """Return how many requests a report of this program counts, at all registries."""
    totals = json.loads(report)["totals"]
    return sum(sum(counts.values()) for counts in totals["requests"].values())


def bare_loop(rounds: int) -> float:
    """Return the seconds of CPU that a request of the bare loop takes."""
    images = small_images(1, 1000)
    with started_registries(1) as (home, [registry]):
        registry.push(images)
        question = [registry.address, "/v2/fleet/app-0/manifests/1.0.0", BARE_COUNT]
        command = [sys.executable, "-c", BARE_LOOP, json.dumps(question)]
        seconds = [float(run_measured(command, home)[1]) for _ in range(rounds)]
    return statistics.median(seconds) / BARE_COUNT


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    texts = [f"  {name:<8} {scene.text}" for name, scene in SCENES.items()]
    parser.epilog = "\n".join(["scenes:", *texts])
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help="default: all")
    parser.add_argument("-n", type=int, default=3, metavar="N", help="rounds (%(default)s)")
    add_peer_option(parser)


def run(options: argparse.Namespace) -> int:
    """Measure the chosen scenes."""
    programs = chosen_programs(options.peer)
    scenes = choose(options.scenes, SCENES)
    load, _, _ = os.getloadavg()
    print(f"{os.cpu_count()} processors, load {load:.1f}; CPython {platform.python_version()}")
    bare = bare_loop(options.n)
    print(f"bare loop: {1000 * bare:.3f} ms of CPU a request", flush=True)
    start = 0.0  # seconds of CPU
    for name, scene in {"one": SCENES["one"], **scenes}.items():
        print(f"{name}: {scene.text}")
        for (title, phase), row in measure_rounds(scene, programs, options.n).items():
            beside = ""
            if title == OURS and name == "one":
                start = row.spent.cpu  # in the end that of the unchanged run
            elif title == OURS:
                times = (row.spent.cpu - start) / row.requests / bare
                beside = f"; {row.requests:,} requests, each {times:.2f} x bare"
            print(f"  {title:<10} {phase:<10} {row.spent}{beside}", flush=True)
    return 0
