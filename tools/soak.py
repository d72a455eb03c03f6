#!/usr/bin/env python3
"""Let a watch run for many cycles without news, then end it under load: memory, CPU, requests, time
to the end.

    python3 tools/soak.py [--cycles N] [--tags N] [--program FILE]

The registries are the harness's, in this process; the program is a process of its own, whose waits
SIGHUP ends, so that 1,000 cycles need no 1,000 intervals. Printed are the resident memory after
some cycles, CPU and requests of one, and how long the program took from SIGTERM to its end while it
copied images whose layers come from a generator.

Owns: the scene and the figures. May not know: anything of the program but its command line and its
reports. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.app import App  # noqa: E402
from conformance.families import Weighing  # noqa: E402
from conformance.images import Seed  # noqa: E402
from conformance.server import Server, run_in_thread  # noqa: E402
from conformance.streams import Stream  # noqa: E402

__all__ = ["main"]

MIB = 1 << 20
# of the load
_LAYER = 64 * MIB
_IMAGES = 24
_LONGEST_END = 120  # seconds


class Spent(NamedTuple):
    """What a process has used so far."""

    cpu: float
    rss: float

    @classmethod
    def of(cls, number: int) -> Spent:
        """Read it from the system."""
        fields = (
            Path(f"/proc/{number}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
        )
        ticks = int(fields[11]) + int(fields[12])
        return cls(
            ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / MIB
        )


@contextmanager
def watching(program: str, file: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a watch, whose reports are on its standard output."""
    words = [
        sys.executable,
        program,
        "watch",
        "-q",
        "--json",
        "--interval",
        "1h",
        "--health-port",
        "0",
        "-c",
        str(file),
    ]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, cwd=ROOT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def configure(directory: Path, source: Server, target: Server, name: str) -> Path:
    """Write a configuration of one mapping."""
    file = directory / "mirror.yaml"
    written = {
        "registries": {"source": {"url": source.url}, "target": {"url": target.url}},
        "mappings": [
            {"from": name, "source": "source", "targets": ["target"], "tags": {"glob": "*"}}
        ],
    }
    file.write_text(json.dumps(written), encoding="utf-8")
    return file


def rest(program: str, directory: Path, tags: int, cycles: int) -> None:
    """Print what cycles without news take."""
    source = App()
    target = App()
    seed = Seed(1)
    for number in range(tags):
        seed.image().load_into(source, "app", f"v{number}")
    marks = sorted({2, 10, 100, cycles // 2, cycles} & {*range(cycles + 1)})
    with (
        run_in_thread(source) as one,
        run_in_thread(target) as two,
        watching(program, configure(directory, one, two, "app")) as process,
    ):
        assert process.stdout is not None
        began = Spent(0.0, 0.0)
        for number in range(1, cycles + 1):
            report = json.loads(process.stdout.readline())
            spent = Spent.of(process.pid)
            requests = sum(sum(each.values()) for each in report["totals"]["requests"].values())
            if number == 1:
                began = spent
            elif report["totals"]["images"] != {"synced": 0, "skipped": tags, "failed": 0}:
                raise SystemExit(f"cycle {number}: {report['totals']}")
            if number in marks:
                each = (spent.cpu - began.cpu) / (number - 1)
                print(
                    f"cycle {number}: {spent.rss:.1f} MiB, {requests} requests, {each:.3f} s of CPU a cycle"
                )
            for server in (one, two):
                server.journal.clear()
            process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=_LONGEST_END)


def end(program: str, directory: Path) -> None:
    """Print how long the program takes to its end in the middle of a copy."""
    source = App()
    target = Weighing()
    for number in range(_IMAGES):
        layers: list[bytes | Stream] = [Stream(3, 4 * number + layer, _LAYER) for layer in range(4)]
        Seed(number).image(layers=layers).load_into(source, "app", f"v{number}")
    with (
        run_in_thread(source) as one,
        run_in_thread(target) as two,
        watching(program, configure(directory, one, two, "app")) as process,
    ):
        while two.journal.count("PUT", "upload") < 8:
            time.sleep(0.05)
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=_LONGEST_END)
        took = time.perf_counter() - began
        report = json.loads(said)
        images = report["totals"]["images"]["synced"]
        print(f"SIGTERM to end: {took:.1f} s, status {process.returncode}, {images} images brought")


def main(argv: Sequence[str] | None = None) -> int:
    """Run both scenes."""
    parser = argparse.ArgumentParser(
        description="memory, CPU and requests of a watch; its end under load"
    )
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--tags", type=int, default=500)
    parser.add_argument("--program", default=str(ROOT / "regsync.py"), help="the program to run")
    arguments = parser.parse_args(argv)
    for scene in (end, rest):
        with tempfile.TemporaryDirectory() as directory:
            if scene is end:
                end(arguments.program, Path(directory))
            else:
                rest(arguments.program, Path(directory), arguments.tags, max(2, arguments.cycles))
    return 0


if __name__ == "__main__":
    sys.exit(main())
