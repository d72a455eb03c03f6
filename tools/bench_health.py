#!/usr/bin/env python3
"""Measure how long probes of the health listener take during full syncs, with a crowd of bad
clients.

    python3 tools/bench_health.py [-n IMAGES] [-m MIB] [-r MAPPINGS] [--idle N]

`regsync watch` syncs between Debian docker-registry processes: many small images, then eight with
one large layer each, then it reads a file of many mappings, of which none selects a tag. All the
time 200 clients say nothing, 20 send a byte every 100 ms, and 10 send 64 KiB of garbage again and
again; those that are cut off come back. Probes are asked for one after the other, each on a
connection of its own, GET and HEAD of both resources; a probe's time is from before it connects to
the end of its answer. Exit status 1: the slowest took more than 100 ms, or a sync failed. Other
work on the machine shows; on Linux it shows less, as root, in a group of processes of its own that
comes first:

    setsid -w sh -c 'echo -19 >/proc/self/autogroup; python3 tools/bench_health.py'
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.copies import push_http  # noqa: E402
from conformance.images import Seed  # noqa: E402
from conformance.registries import Missing, docker_registry  # noqa: E402

__all__ = ["main"]

LIMIT = 0.1  # seconds
MIB = 1024 * 1024
SLOW = 20
GARBAGE = 10
PROBES = [
    f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n"
    for method in ("GET", "HEAD")
    for path in ("/healthz", "/readyz")
]
HERE = ("127.0.0.1", 0)


async def crowd(port: int, idle: int) -> None:
    """Be so many bad clients, until ended."""

    async def come(number: int) -> None:
        while True:
            with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream):
                async with await anyio.connect_tcp(HERE[0], port) as stream:
                    if number < SLOW:
                        for byte in b"GET /healthz HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 500:
                            await stream.send(bytes([byte]))
                            await anyio.sleep(0.1)
                    elif number < SLOW + GARBAGE:
                        await stream.send(garbage)
                        await anyio.sleep(0.05)
                    while True:
                        await stream.receive()
            await anyio.sleep(0.1)

    garbage = random.Random(1).randbytes(64 * 1024)
    async with anyio.create_task_group() as tasks:
        for number in range(SLOW + GARBAGE + idle):
            tasks.start_soon(come, number)


def probe(port: int, request: str) -> tuple[float, bytes]:
    """Ask once and return the seconds, and what was said."""
    began = time.perf_counter()
    with socket.create_connection((HERE[0], port), timeout=30) as own:
        own.sendall(request.encode())
        got = b""
        while piece := own.recv(65536):
            got += piece
    assert got.startswith((b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 503 ")), got
    return time.perf_counter() - began, got.partition(b"\r\n\r\n")[2]


def cycle(said: bytes) -> dict[str, Any]:
    """Return the last cycle that has ended, as a probe was told."""
    return json.loads(said)["cycle"] or {"number": 0} if said else {"number": 0}


def show(title: str, times: Sequence[float]) -> float:
    slowest = max(times)
    middle = statistics.median(times)
    late = sorted(times)[int(len(times) * 0.99)]
    print(
        f"{title:<44} {len(times):5} probes: median {middle * 1000:.1f} ms, 99 % {late * 1000:.1f} ms, "
        f"slowest {slowest * 1000:.1f} ms",
        flush=True,
    )
    return slowest


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a file of this checkout as another process, which is ended at last."""
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def elsewhere() -> ThreadPoolExecutor:
    """Return a thread whose children give way to others: on Linux a priority is a thread's."""
    return ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,))


def measure(
    title: str,
    path: Path,
    registries: dict[str, Any],
    mappings: Sequence[dict[str, Any]],
    idle: int,
) -> bool:
    """Sync beside the crowd; whether the sync and all probes were well."""

    def write(*mappings: dict[str, Any]) -> None:
        defaults = {"source": "source", "targets": ["target"]}
        path.write_text(
            json.dumps({"registries": registries, "defaults": defaults, "mappings": mappings})
        )

    def ask() -> bytes:
        seconds, said = probe(port, next(requests))
        times.append(seconds)
        time.sleep(0.01)
        return said

    with socket.create_server(HERE) as free:
        port = free.getsockname()[1]
    requests = itertools.cycle(PROBES)
    times = list[float]()
    write()
    words = ("watch", "-q", "-c", str(path), "--interval", "1h", "--health-port", str(port))
    with program(str(ROOT / "regsync.py"), *words) as watch:
        while not times:
            with contextlib.suppress(ConnectionError):
                while cycle(ask())["number"] < 1:
                    pass
        times.clear()
        for _ in range(200):
            ask()
        show("nobody else, nothing to do", times)
        with contextlib.ExitStack() as stack, elsewhere() as thread:
            thread.submit(
                stack.enter_context, program(__file__, "--crowd", str(port), "--idle", str(idle))
            ).result()
            time.sleep(2)
            times.clear()
            for _ in range(200):
                ask()
            show("the crowd, nothing to do", times)
            write(*mappings)
            watch.send_signal(signal.SIGHUP)
            times.clear()
            while (last := cycle(ask()))["number"] < 2:
                pass
        slowest = show(f"the crowd, {title} in {last['duration_s']:.1f} s", times)
        watch.terminate()
        return watch.wait() == last["exit_status"] == 0 and slowest <= LIMIT


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Measure probes of the health listener during full syncs."
    )
    parser.add_argument("-n", type=int, default=400, help="small images (%(default)s)")
    parser.add_argument(
        "-m", type=int, default=128, help="MiB of each of eight large layers (%(default)s)"
    )
    parser.add_argument(
        "-r", type=int, default=5000, help="mappings of the last file (%(default)s)"
    )
    parser.add_argument(
        "--idle", type=int, default=200, help="clients that say nothing (%(default)s)"
    )
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.crowd:
        anyio.run(crowd, given.crowd, given.idle)
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(dir=place))
    try:
        with contextlib.ExitStack() as stack, elsewhere() as thread:

            def registry(name: str) -> str:
                return thread.submit(
                    stack.enter_context, docker_registry(directory / name)
                ).result()

            source = registry("source")
            target = registry("target")
            seed = Seed(5)
            for number in range(given.n):
                push_http(
                    seed.image(sizes=(900, 2000, 30_000)),
                    source,
                    f"small/{number % 10}",
                    f"v{number}",
                )
            for number in range(8):
                push_http(seed.image(sizes=(given.m * MIB,)), source, "large", f"v{number}")
            well = []
            nothing = {"tags": {"glob": "none*"}}
            for title, mappings in (
                (f"{given.n} small images", [{"from": f"small/{number}"} for number in range(10)]),
                (f"8 images of {given.m} MiB", [{"from": "large"}]),
                (
                    f"{given.r} mappings",
                    [
                        {"from": f"small/{number % 10}", "to": f"many/{number}", **nothing}
                        for number in range(given.r)
                    ],
                ),
            ):
                registries = {
                    "source": {"url": f"http://{source}"},
                    "target": {"url": f"http://{target}"},
                }
                well.append(
                    measure(title, directory / "mirror.yaml", registries, mappings, given.idle)
                )
    except Missing as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"limit {LIMIT * 1000:.0f} ms: {'kept' if all(well) else 'missed'}")
    return int(not all(well))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
