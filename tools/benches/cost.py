"""Print what a request, a byte and a second target cost in CPU, beside a bare loop of h11.

Registries are Debian's docker-registry processes on loopback, with their data in /dev/shm. CPU is
the client's alone. A request's CPU leaves out start-up, which is what a sync of one unchanged tag
takes. Function calls are those that cProfile counts in the main thread, start-up included. Every
other tool that is found (see peers.py) does the same work beside us, start-up included.

    requests  1,000 small images: unchanged, cold, and cold to three targets
    targets   320 MB in 96 images, to one target and to three, beside two more sends of the bytes
    bytes     one image of 8 layers of 256 MiB, beside SHA-256 alone
    pod       20 MB in 79 images, cold and unchanged, with a tenth of a processor where a control
              group can be made

Owns: the scenes, and the loops beside which they are shown.
May not know: anything of the program but its command line and `regsync.main`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from conformance.images import Seed
from conformance.walks import push_http
from tools.benches.peers import Job, Peer, add_peer_option, find_peers, run_job
from tools.benches.registries import empty_registry
from tools.benches.runner import (
    CPU,
    MB,
    MIB,
    REGSYNC,
    ROOT,
    WALL,
    BenchError,
    Figure,
    Spent,
    choose,
    folder_in_memory,
    median,
    print_figures,
    run_measured,
    spread,
    sync_measured,
    write_mirror,
)

__all__ = ["add_options", "joining", "run", "small_group"]

SMALL_IMAGES = 1000
REPOSITORY = "bench/cost"
PEER_LIMIT = 300  # seconds for one run of another tool
CONTROL_GROUPS = Path("/sys/fs/cgroup")

# Sends COUNT questions over 16 connections with nothing around h11 and anyio; prints the seconds of
# CPU, or the number of function calls.
BARE_LOOP = """
import cProfile, json, pstats, socket, sys, time
import anyio, h11
address, path, count, is_counting = json.loads(sys.argv[1])
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

profile = cProfile.Profile()
if is_counting:
    profile.enable()
began = time.process_time()
anyio.run(main)
spent = time.process_time() - began
profile.disable()
print(pstats.Stats(profile).total_calls if is_counting else spent)
"""

# Runs the program and writes the number of function calls into the file named first.
COUNT_CALLS = """
import cProfile, pathlib, pstats, sys
file, root, *arguments = sys.argv[1:]
sys.path.insert(0, root)
profile = cProfile.Profile()
profile.enable()
import regsync
status = regsync.main(arguments)
profile.disable()
pathlib.Path(file).write_text(str(pstats.Stats(profile).total_calls))
sys.exit(status)
"""

# Hashes 1 GiB from memory, or sends so many bytes to a socket; prints the seconds of CPU.
HASH_ALONE = """
import hashlib, time
piece = bytes(1 << 20)
digest = hashlib.sha256()
began = time.process_time()
for _ in range(1024):
    digest.update(piece)
print(time.process_time() - began)
"""
SEND_ALONE = """
import socket, sys, time
own = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
piece = bytes(1 << 20)
began = time.process_time()
for _ in range(int(sys.argv[2]) >> 20):
    own.sendall(piece)
print(time.process_time() - began)
"""


class Bench(NamedTuple):
    """Where the registries keep their data, how often each thing is measured, and beside what."""

    work: Path
    rounds: int
    peers: Sequence[Peer]

    @contextmanager
    def registry(self) -> Iterator[str]:
        """Run an empty docker-registry and yield its address."""
        with empty_registry(self.work) as registry:
            yield registry.address

    def median_of(self, measure: Callable[[], float]) -> float:
        """Measure once in each round; return the median."""
        return statistics.median(measure() for _ in range(self.rounds))


def peer_figures(
    bench: Bench,
    name: str,
    source: str,
    targets: int = 1,
    *,
    is_again: bool = False,
    before: Sequence[str] = (),
) -> Iterator[Figure]:
    """Measure each other tool: it copies all tags to empty registries, with `is_again` once more.

    `before` is put in front of each command.
    """
    for peer in bench.peers:
        runs = []
        for _ in range(bench.rounds):
            with ExitStack() as stack:
                home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                addresses = [stack.enter_context(bench.registry()) for _ in range(targets)]
                job = Job(home, source, tuple(addresses), {REPOSITORY: REPOSITORY})
                peer.forget(job)
                ran = run_job(peer, job, PEER_LIMIT, before)
                if is_again and not ran.status:
                    ran = run_job(peer, job, PEER_LIMIT, before)
            if ran.status:
                raise BenchError(f"{peer.name} ended with {ran.status}: {ran.err[-500:]}")
            runs.append(ran.spent)
        yield Figure(f"{name}, {peer.name}", median(runs, CPU), "s of CPU", detail=show(runs))


class Measured(NamedTuple):
    """One sync: what it took, and how many requests it sent."""

    spent: Spent
    requests: int


def configure(directory: Path, source: str, targets: Sequence[str], tags: str = "*") -> Path:
    """Write a configuration that copies the images of the one repository."""
    source_url, *target_urls = [f"http://{address}" for address in (source, *targets)]
    return write_mirror(directory / "mirror.yaml", source_url, target_urls, [REPOSITORY], tags=tags)


def sync(config: Path) -> Measured:
    """Run the program once."""
    spent, report = sync_measured(config)
    return Measured(spent, count_requests(report))


def count_requests(report: dict[str, object]) -> int:
    """Return how many requests a report counts, at all registries."""
    totals = report["totals"]
    assert isinstance(totals, dict)
    return sum(sum(actions.values()) for actions in totals["requests"].values())


def count_calls(config: Path) -> tuple[int, int]:
    """Run the program once under a profile; return function calls and requests."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "calls"
        arguments = [str(file), str(ROOT), "sync", "--json", "-q", "-c", str(config)]
        ran = run_measured([sys.executable, "-c", COUNT_CALLS, *arguments])
        return int(file.read_text()), count_requests(json.loads(ran.out))


def run_alone(code: str, *arguments: str) -> float:
    """Run a loop in an interpreter of its own and return the number that it prints."""
    return float(run_measured([sys.executable, "-c", code, *arguments]).out)


def fill(address: str, images: int, size: int) -> None:
    """Push so many images with one layer of `size` bytes each."""
    seed = Seed(1)
    for number in range(images):
        push_http(seed.image(sizes=(size,)), address, REPOSITORY, f"v{number}")


# ---------------------------------------------------------------- requests


class SmallCase(NamedTuple):
    """A kind of sync of many small images, and its goals for a request."""

    name: str
    targets: int
    is_again: bool  # whether a second run is measured, which finds all images at the target
    cpu_goal: float | None  # times the bare loop
    call_goal: int


SMALL_CASES = (
    SmallCase("unchanged", 1, True, 2.0, 900),
    SmallCase("cold", 1, False, 3.0, 1200),
    SmallCase("cold, three targets", 3, False, None, 1350),
)


def requests(bench: Bench) -> Iterator[Figure]:
    """CPU and function calls of a request."""
    with bench.registry() as source:
        fill(source, SMALL_IMAGES, 1000)
        bare_cpu, bare_calls = measure_bare_loop(bench, source)
        yield Figure("bare loop", bare_cpu, "ms a request", detail=f"{bare_calls:.0f} calls")

        for case in SMALL_CASES:
            yield from small_figures(bench, source, case, bare_cpu)


def small_figures(bench: Bench, source: str, case: SmallCase, bare_cpu: float) -> Iterator[Figure]:
    """Measure one kind of sync, and the same with other tools."""
    spent = []
    starts = []
    for _ in range(bench.rounds):
        with prepared(bench, source, case.targets, case.is_again) as (config, addresses):
            measured = sync(config)
            one = configure(config.parent, source, addresses, tags="v1")
            spent.append(measured.spent)
            starts.append(sync(one).spent)
    cpu = 1000 * (median(spent, CPU) - median(starts, CPU)) / measured.requests
    goal = None if case.cpu_goal is None else case.cpu_goal * bare_cpu
    detail = f"{cpu / bare_cpu:.1f} x the bare loop, {measured.requests} requests, "
    detail += f"in all {show(spent)}"
    yield Figure(f"{case.name}, CPU", cpu, "ms a request", goal, detail=detail)

    with prepared(bench, source, case.targets, case.is_again) as (config, _):
        calls, count = count_calls(config)
    yield Figure(f"{case.name}, calls", calls / count, "a request", case.call_goal)
    yield from peer_figures(bench, case.name, source, case.targets, is_again=case.is_again)


@contextmanager
def prepared(
    bench: Bench, source: str, targets: int, is_again: bool
) -> Iterator[tuple[Path, list[str]]]:
    """Start empty targets and write the configuration; for `is_again`, sync once."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = [stack.enter_context(bench.registry()) for _ in range(targets)]
        config = configure(directory, source, addresses)
        if is_again:
            sync(config)
        yield config, addresses


def measure_bare_loop(bench: Bench, address: str) -> tuple[float, float]:
    """Return milliseconds of CPU and function calls of a request of the bare loop."""
    count = 3200
    path = f"/v2/{REPOSITORY}/manifests/v1"
    seconds = bench.median_of(
        lambda: run_alone(BARE_LOOP, json.dumps([address, path, count, False]))
    )
    calls = run_alone(BARE_LOOP, json.dumps([address, path, count, True]))
    return 1000 * seconds / count, calls / count


# ---------------------------------------------------------------- bytes


def targets(bench: Bench) -> Iterator[Figure]:
    """What a second and a third target cost."""
    size = 320 * MB
    images = 96
    with bench.registry() as source:
        fill(source, images, size // images)
        one, registry_of_one = sync_counting_registries(bench, source, 1)
        three, registries_of_three = sync_counting_registries(bench, source, 3)
        others = [
            *peer_figures(bench, "one target", source),
            *peer_figures(bench, "three", source, 3),
        ]

    two_sends = bench.median_of(lambda: send_alone(2 * size))
    yield Figure("one target, CPU", median(one, CPU), "s", detail=show(one))
    goal = 1.6 * median(one, CPU) + two_sends
    detail = f"{show(three)}; two sends alone {two_sends:.2f} s"
    yield Figure("three targets, CPU", median(three, CPU), "s", goal, detail=detail)
    # Where registries and client share few processors, the registries' own work decides this ratio.
    detail = f"target registries alone took {registry_of_one:.1f} and {registries_of_three:.1f} s"
    detail += f" of CPU on {os.cpu_count()} processors"
    times = median(three, WALL) / median(one, WALL)
    yield Figure("three targets, wall", times, "x one target", 2.2, detail=detail)
    yield from others


def sync_counting_registries(bench: Bench, source: str, targets: int) -> tuple[list[Spent], float]:
    """Sync everything to empty registries, in each round. Returns what each run took, and the median
    of the CPU seconds that the target registries took.
    """
    runs: list[Spent] = []
    registries: list[float] = []
    for _ in range(bench.rounds):
        before = cpu_of_ended_children()
        runs.append(sync_fresh(bench, source, targets))
        registries.append(cpu_of_ended_children() - before - runs[-1].cpu)
    return runs, statistics.median(registries)


def cpu_of_ended_children() -> float:
    """Return the CPU seconds of all processes that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def sync_fresh(bench: Bench, source: str, targets: int) -> Spent:
    """Sync everything to empty registries."""
    with prepared(bench, source, targets, is_again=False) as (config, _):
        return sync(config).spent


def show(runs: Sequence[Spent]) -> str:
    """Show wall time, CPU and memory of the middle run."""
    return str(sorted(runs, key=lambda spent: spent.cpu)[len(runs) // 2])


def send_alone(size: int) -> float:
    """Return the CPU seconds that it takes to send so many bytes over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = threading.Thread(target=read_all, args=(listener,))
        reader.start()
        _, port = listener.getsockname()
        seconds = run_alone(SEND_ALONE, str(port), str(size))
        reader.join()
    return seconds


def read_all(listener: socket.socket) -> None:
    """Read one connection to its end."""
    accepted, _ = listener.accept()
    buffer = bytearray(MIB)
    with accepted:
        while accepted.recv_into(buffer):
            pass


def bytes_(bench: Bench) -> Iterator[Figure]:
    """What a byte costs."""
    size = 8 * 256 * MIB
    with bench.registry() as source:
        push_http(Seed(2).image(sizes=[256 * MIB] * 8), source, REPOSITORY, "v1")
        runs = [sync_fresh(bench, source, 1) for _ in range(bench.rounds)]
        others = list(peer_figures(bench, "2 GiB", source))

    hashing = bench.median_of(lambda: run_alone(HASH_ALONE))
    per_gb = median(runs, CPU) * 1e9 / size
    detail = f"{show(runs)}; SHA-256 alone {hashing * 1e9 / (1 << 30):.2f} s/GB"
    yield Figure("2 GiB", per_gb, "CPU s/GB", 1.25, detail=detail)
    yield from others


# ---------------------------------------------------------------- a pod


def pod(bench: Bench) -> Iterator[Figure]:
    """The typical run in a small pod."""
    with bench.registry() as source, ExitStack() as stack:
        fill(source, 79, 20 * MB // 79)
        group = stack.enter_context(small_group())
        cold: list[Spent] = []
        unchanged: list[Spent] = []
        for _ in range(bench.rounds):
            with prepared(bench, source, 1, is_again=False) as (config, _):
                cold.append(sync_within(group, config))
                unchanged.append(sync_within(group, config))
        others = []
        if group is not None:
            before = joining(group)
            others = list(peer_figures(bench, "pod, cold", source, before=before))
            others += peer_figures(bench, "pod, unchanged", source, is_again=True, before=before)

    for name, runs, goal in (("cold", cold, 0.6), ("unchanged", unchanged, 0.22)):
        detail = f"wall {spread(runs, WALL)} s" if group else "no control group could be made"
        yield Figure(f"pod, {name}", median(runs, CPU), "s of CPU", goal, detail=detail)
    yield from others


def sync_within(group: Path | None, config: Path) -> Spent:
    """Run the program once as a member of a control group."""
    command = REGSYNC.command("sync", "-q", "-c", str(config))
    return run_measured([*joining(group), *command]).spent


def joining(group: Path | None) -> list[str]:
    """Return what makes the command behind it a member of a control group."""
    if group is None:
        return []
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]


@contextmanager
def small_group() -> Iterator[Path | None]:
    """Make a control group that has a tenth of a processor; None where that is not allowed."""
    group = CONTROL_GROUPS / "cpu"  # version 1
    is_first_version = group.is_dir()
    if not is_first_version:
        group = CONTROL_GROUPS
    group = group / f"regsync-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return

    try:
        if is_first_version:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("10000")
        else:
            (group / "cpu.max").write_text("10000 100000")
    except OSError:
        group.rmdir()
        yield None
        return

    try:
        yield group
    finally:
        group.rmdir()


# ---------------------------------------------------------------- all

CASES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "requests": requests,
    "targets": targets,
    "bytes": bytes_,
    "pod": pod,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options this takes."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("-n", type=int, default=3, metavar="N", help="rounds (%(default)s)")
    add_peer_option(parser)


def run(options: argparse.Namespace) -> int:
    """Measure the chosen cases."""
    cases = choose(options.cases, CASES).values()
    with folder_in_memory() as work:
        bench = Bench(work, options.n, find_peers(options.peer))
        for case in cases:
            print_figures(case(bench))
    return 0
