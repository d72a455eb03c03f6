"""Measure a watch: memory and CPU over many cycles without news, and the time to its end under load.

SIGHUP ends the wait between two cycles, so that 1,000 cycles need no 1,000 intervals. The layers of
the load come from a generator.

Owns: both scenes.
May not know: anything of the program but its command line and its reports.
Needs Linux.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from conformance.content.images import Seed
from conformance.content.streams import Stream
from conformance.registry.measuring import MeasuringApp
from tools.benches.place import app_of, started_place
from tools.benches.runner import MIB, REGSYNC, ROOT, BenchError, Figure

__all__ = ["figures"]

LAYER = 64 * MIB  # of the load
IMAGES = 24  # of the load, each of four layers
BEGUN = 8  # layers of the load that have begun when the program is told to end
LONGEST_END = 120  # seconds
CYCLES = 1000
TAGS = 500
SHOWN = (2, 10, 100, CYCLES // 2, CYCLES)  # cycles with a line of their own


class Usage(NamedTuple):
    """What a process has used so far: seconds of CPU, and bytes that are resident now."""

    cpu: float
    resident: int


def usage_of(number: int) -> Usage:
    """Read the usage of a process from the system (proc(5): utime, stime and rss of `stat`)."""
    text = Path(f"/proc/{number}/stat").read_text(encoding="ascii")
    fields = text.rpartition(") ")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int(fields[21])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))


@contextmanager
def running_watch(config: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Run a watch; yield it and its standard output, where its reports are."""
    command = REGSYNC.command("watch", "-q", "--json", "--interval", "1h", "--health-port", "0")
    with subprocess.Popen(
        [*command, "-c", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as watch:
        assert watch.stdout is not None
        try:
            yield watch, watch.stdout
        finally:
            watch.kill()


def figures() -> Iterator[Figure]:
    """Measure the end first, then the cycles."""
    yield from end_under_load()
    yield from idle_cycles()


def end_under_load() -> Iterator[Figure]:
    """Show how long the program takes to its end in the middle of a copy."""
    with started_place(target=MeasuringApp) as place:
        for number in range(IMAGES):
            layers: list[bytes | Stream] = [
                Stream(3, 4 * number + layer, LAYER) for layer in range(4)
            ]
            image = Seed(number).image(layers=layers)
            image.load_into(app_of(place.source), "app", f"v{number}")
        with running_watch(place.configure(["app"], has_artifacts=True)) as (watch, _):
            while place.targets[0].journal.count("PUT", "upload") < BEGUN:
                if watch.poll() is not None:
                    raise BenchError(f"the watch ended with {watch.returncode}")
                time.sleep(0.05)
            began = time.perf_counter()
            watch.send_signal(signal.SIGTERM)
            said, _ = watch.communicate(timeout=LONGEST_END)
            seconds = time.perf_counter() - began
        images = json.loads(said)["totals"]["images"]["synced"]
        detail = f"status {watch.returncode}, {images} of {IMAGES} images copied"
        yield Figure("SIGTERM to end", seconds, "s", detail=detail)


def idle_cycles() -> Iterator[Figure]:
    """Measure the memory and CPU of a watch in cycles in which no tag has changed."""
    nothing_new = {"synced": 0, "skipped": TAGS, "failed": 0}
    with started_place() as place:
        seed = Seed(1)
        for number in range(TAGS):
            seed.image().load_into(app_of(place.source), "app", f"v{number}")
        with running_watch(place.configure(["app"], has_artifacts=True)) as (watch, reports):
            first = Usage(0.0, 0)
            for number in range(1, CYCLES + 1):
                report = reports.readline()
                if not report:
                    raise BenchError(f"the watch ended in cycle {number}")
                totals = json.loads(report)["totals"]
                usage = usage_of(watch.pid)
                if number == 1:
                    first = usage
                elif totals["images"] != nothing_new:
                    raise BenchError(f"cycle {number}: {totals}")
                if number in SHOWN:
                    requests = sum(sum(kinds.values()) for kinds in totals["requests"].values())
                    cpu = (usage.cpu - first.cpu) / (number - 1)
                    detail = f"{requests} requests, {cpu:.3f} s of CPU a cycle"
                    yield Figure(f"cycle {number}", usage.resident / MIB, "MiB", detail=detail)
                for server in place.servers:
                    server.journal.clear()
                watch.send_signal(signal.SIGHUP)
            watch.send_signal(signal.SIGTERM)
            watch.communicate(timeout=LONGEST_END)
