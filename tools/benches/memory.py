"""Measure the memory of large runs, in processes of their own between registries of the harness.

    large      500 images to three targets, two layers of 4 GiB and 50 of 8 MiB among them, under the
               512 MiB of docs/specification.md section 1.1. The limit is RLIMIT_DATA, which counts
               all private memory that can be written.
    streams    50 bodies of 256 MiB at once, into targets that take 640 kB/s of each

Owns: the scenes and their limits.
May not know: anything of the program but its command line.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conformance.http import run_in_thread
from conformance.images import Seed, Stream
from conformance.registry import App, MeasuringApp
from tools.benches.runs import MB, MIB, REGSYNC, BenchError, choose, run_measured

__all__ = ["add_options", "run"]

LARGE_LIMIT = 512 * MIB

PAIRS = 7  # of registries: 8 large bodies go to one at a time
STREAMS = 50
STREAM = 256 * MIB
PACE = 640_000  # bytes a second that a slow target takes of each
STARTING = 60  # seconds until the streams have begun
SETTLING = 5  # seconds that blocked streams get to fill what they fill


@contextmanager
def started(*apps: App) -> Iterator[tuple[Path, list[str]]]:
    """Serve registries; yield an empty folder, and their URLs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield folder, [stack.enter_context(run_in_thread(app)).url for app in apps]


def sync_command(
    folder: Path, urls: Mapping[str, str], mappings: Sequence[Mapping[str, object]]
) -> list[str]:
    """Write a configuration (JSON is YAML); return the command line of a sync."""
    document = {
        "registries": {name: {"url": url} for name, url in urls.items()},
        "defaults": {"tags": {"glob": "*"}, "artifacts": {"enabled": False}},
        "mappings": mappings,
    }
    config = folder / "mirror.yaml"
    config.write_text(json.dumps(document), encoding="utf-8")
    return [*REGSYNC, "sync", "--json", "-q", "-c", str(config)]


def large() -> str:
    """Copy many large images under a hard limit; say what it took."""
    huge = [Stream(8, number, 4 << 30) for number in range(2)]
    many = [Stream(9, number, 8 << 20) for number in range(50)]
    source = App()
    for number in range(500):
        seed = Seed(number)
        layers: list[bytes | Stream] = [many[number % 50], seed.layer(5000)]
        if number % 250 < len(huge):
            layers.append(huge[number % 250])
        image = seed.image(layers=layers)
        image.load_into(source, f"app-{number % 20}", f"v{number}")

    with started(source, MeasuringApp(), MeasuringApp(), MeasuringApp()) as (folder, urls):
        names = ["source", "one", "two", "three"]
        mappings = [
            {"from": f"app-{number}", "source": "source", "targets": names[1:]}
            for number in range(20)
        ]
        command = sync_command(folder, dict(zip(names, urls, strict=True)), mappings)
        spent, said = run_measured(command, folder, data_limit=LARGE_LIMIT)
    totals = json.loads(said)["totals"]
    if totals["images"] != {"synced": 1500, "skipped": 0, "failed": 0}:
        raise BenchError(f"large: {totals['images']}")
    return f"{spent}, under {LARGE_LIMIT // MIB} MiB; {totals['bytes'] / 1e9:.1f} GB pushed"


def streams() -> str:
    """Hold 50 streams open; say what memory they take."""
    layers = iter(Stream(6, number, STREAM) for number in range(8 * PAIRS))
    sources = [App() for _ in range(PAIRS)]
    targets = [MeasuringApp() for _ in range(PAIRS)]
    for pair, source in enumerate(sources):
        for number in range(8):
            image = Seed(number).image(layers=[next(layers)])
            image.load_into(source, f"r{pair}", f"t{number}")
    for target in targets:
        target.faults.on("PUT", "upload").throttle(PACE, of="request")

    with started(*sources, *targets) as (folder, urls), ExitStack() as stack:
        names = [f"{side}{pair}" for side in ("source", "target") for pair in range(PAIRS)]
        mappings = [
            {"from": f"r{pair}", "source": f"source{pair}", "targets": [f"target{pair}"]}
            for pair in range(PAIRS)
        ]
        command = sync_command(folder, dict(zip(names, urls, strict=True)), mappings)
        log = stack.enter_context(open(folder / "log", "w+", encoding="utf-8"))
        client = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(client.kill)

        open_streams = 0
        until = time.monotonic() + STARTING
        while open_streams < STREAMS and time.monotonic() < until:
            time.sleep(0.1)
            uploads = [
                each for target in targets for each in target.journal.matching("PUT", "upload")
            ]
            open_streams = len([upload for upload in uploads if upload.status is None])
        time.sleep(SETTLING)
        if client.poll() is not None:
            log.seek(0)
            raise BenchError(f"the client ended: {log.read()[-500:]}")
        status = Path(f"/proc/{client.pid}/status").read_text(encoding="ascii")
    if open_streams < STREAMS:
        raise BenchError(f"the streams did not begin in a minute: there are {open_streams}")
    [kilobytes] = re.findall(r"VmHWM:\s*(\d+) kB", status)
    peak = int(kilobytes) * 1024
    return f"{peak / MB:.0f} MB for {open_streams} streams"


CASES: Mapping[str, Callable[[], str]] = {"large": large, "streams": streams}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all)")


def run(options: argparse.Namespace) -> int:
    """Measure the chosen cases."""
    for name, case in choose(options.cases, CASES).items():
        print(f"{name}: {case()}", flush=True)
    return 0
