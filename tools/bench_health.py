#!/usr/bin/env python3
"""Measure how long probes of the health listener take during full syncs, with a crowd of bad clients.

    python3 tools/bench_health.py [-n IMAGES] [-m MIB] [--idle N]

Two syncs between Debian docker-registry processes, with the listener in the loop that does the work: many small
images, then eight with one large layer each. All the time 200 clients say nothing, 20 send a byte every 100 ms, and
10 send 64 KiB of garbage again and again; those that are cut off come back. Probes are asked for one after the other,
each on a connection of its own, GET and HEAD of both resources; a probe's time is from before it connects to the end
of its answer. Exit status 1: the slowest took more than 100 ms, or a sync failed. Other work on the machine shows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
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

from _regsync import config, health, session  # noqa: E402
from _regsync.output import Console  # noqa: E402
from conformance.copies import push_http  # noqa: E402
from conformance.images import Seed  # noqa: E402
from conformance.registries import Missing, docker_registry  # noqa: E402

__all__ = ["main"]

LIMIT = 0.1  # seconds
MIB = 1024 * 1024
SLOW, GARBAGE = 20, 10
PROBES = [
    f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n" for method in ("GET", "HEAD") for path in ("/healthz", "/readyz")
]
HERE = ("127.0.0.1", 0)


def tell(path: str) -> tuple[int, dict[str, Any]]:
    return 200, {"status": "ok", "version": "0", "cycle": None, "reload_error": None}


async def work(path: str, text: bytes) -> int:
    """Serve probes while a configuration is synced; say the port first."""
    found = config.load(text, name=path, environ={}, base_dir=os.path.dirname(path), home=None)
    quiet = open(os.devnull, "w", encoding="ascii")  # noqa: ASYNC230, SIM115  it serves until the end
    console = Console(quiet, sys.stderr, level="warning", as_json=False, json_log=False, progress=False)
    async with anyio.create_task_group() as tasks:
        (address,) = await tasks.start(health.serve, *HERE, tell)
        print(address[1], flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        status = await session.run(found, console)
        tasks.cancel_scope.cancel()
    return status


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


def probe(port: int, request: str) -> float:
    """Ask once and return the seconds."""
    began = time.perf_counter()
    with socket.create_connection((HERE[0], port), timeout=30) as own:
        own.sendall(request.encode())
        got = b""
        while piece := own.recv(65536):
            got += piece
    assert got.startswith(b"HTTP/1.1 200 OK\r\n"), got
    return time.perf_counter() - began


def show(title: str, times: Sequence[float]) -> float:
    slowest = max(times)
    middle, late = statistics.median(times), sorted(times)[int(len(times) * 0.99)]
    print(
        f"{title:<44} {len(times):5} probes: median {middle * 1000:.1f} ms, 99 % {late * 1000:.1f} ms, "
        f"slowest {slowest * 1000:.1f} ms",
        flush=True,
    )
    return slowest


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run this file as another process, which is ended at last."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def elsewhere() -> ThreadPoolExecutor:
    """Return a thread whose children give way to others: on Linux a priority is a thread's."""
    return ThreadPoolExecutor(1, initializer=os.nice, initargs=(10,))


def measure(title: str, path: Path, idle: int) -> bool:
    """Sync a configuration beside the crowd; whether the sync and all probes were well."""
    with program("--work", str(path)) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        port = int(worker.stdout.readline())
        requests = itertools.cycle(PROBES)
        show("nobody else, nothing to do", [probe(port, next(requests)) for _ in range(200)])
        with contextlib.ExitStack() as stack, elsewhere() as thread:
            thread.submit(stack.enter_context, program("--crowd", str(port), "--idle", str(idle))).result()
            time.sleep(2)
            show("the crowd, nothing to do", [probe(port, next(requests)) for _ in range(200)])
            worker.stdin.write("\n")
            worker.stdin.flush()
            began, times = time.perf_counter(), list[float]()
            while worker.poll() is None:
                time.sleep(0.01)
                try:
                    times.append(probe(port, next(requests)))
                except (ConnectionError, AssertionError):
                    worker.wait(5)  # the listener ends with the sync, and a probe may fall into that
            status = worker.wait()
        slowest = show(f"the crowd, {title} in {time.perf_counter() - began:.1f} s", times)
    return status == 0 and slowest <= LIMIT


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure probes of the health listener during full syncs.")
    parser.add_argument("-n", type=int, default=400, help="small images (%(default)s)")
    parser.add_argument("-m", type=int, default=128, help="MiB of each of eight large layers (%(default)s)")
    parser.add_argument("--idle", type=int, default=200, help="clients that say nothing (%(default)s)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.work:
        return anyio.run(work, given.work, Path(given.work).read_bytes())
    if given.crowd:
        anyio.run(crowd, given.crowd, given.idle)
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(dir=place))
    try:
        with contextlib.ExitStack() as stack, elsewhere() as thread:

            def registry(name: str) -> str:
                return thread.submit(stack.enter_context, docker_registry(directory / name)).result()

            source, target, seed = registry("source"), registry("target"), Seed(5)
            for number in range(given.n):
                push_http(seed.image(sizes=(900, 2000, 30_000)), source, f"small/{number % 10}", f"v{number}")
            for number in range(8):
                push_http(seed.image(sizes=(given.m * MIB,)), source, "large", f"v{number}")
            well = []
            for title, names in (
                (f"{given.n} small images", [f"small/{number}" for number in range(10)]),
                (f"8 images of {given.m} MiB", ["large"]),
            ):
                path = directory / "mirror.yaml"
                registries = {"source": {"url": f"http://{source}"}, "target": {"url": f"http://{target}"}}
                defaults = {"source": "source", "targets": ["target"], "artifacts": {"enabled": True}}
                mappings = [{"from": name} for name in names]
                path.write_text(json.dumps({"registries": registries, "defaults": defaults, "mappings": mappings}))
                well.append(measure(title, path, given.idle))
    except Missing as error:
        sys.stderr.write(f"{error}\n")
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"limit {LIMIT * 1000:.0f} ms: {'kept' if all(well) else 'missed'}")
    return int(not all(well))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
