#!/usr/bin/env python3
"""Measure what runs take beside requests: memory under a hard limit, CPU time, and the state's own
figures.

    python3 tools/bench_memory.py [--json] [CASE ...]

The registries are the harness's, in this process; the program is a process of its own. A case with
a limit runs under RLIMIT_DATA, which counts all private memory that can be written: heap, buffers
and the stacks of threads, touched or not, which are therefore made 1 MiB each (8 is usual).
RLIMIT_AS would count the address space that allocators reserve and never use, so it says nothing;
what is shown as MiB was resident.

Owns: the cases and their limits. May not know: anything of the program but its command line, except
for the two figures that have none: the state file is written by, and the election is, the program's
own code. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.app import App  # noqa: E402
from conformance.families import Family, Weighing  # noqa: E402
from conformance.images import Seed  # noqa: E402
from conformance.personas import PERSONAS, Provider  # noqa: E402
from conformance.server import Server, run_in_thread  # noqa: E402
from conformance.streams import Stream  # noqa: E402

__all__ = ["BenchError", "Spent", "main", "spend"]

MIB = 1 << 20
TIME_LIMIT = 600

# Forks from a small interpreter, because a child's peak memory begins with its parent's.
_LAUNCHER = """\
import json, os, resource, signal, sys, time
out, limit, data, command = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
began = time.perf_counter()
child = os.fork()
if not child:
    if data:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    for number in (1, 2):
        os.dup2(os.open(f"{out}.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.execv(command[0], command)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(limit)
_, status, used = os.wait4(child, 0)
wall = time.perf_counter() - began
status = os.waitstatus_to_exitcode(status)
print(json.dumps([status, wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


class BenchError(Exception):
    """What is missing or went wrong, on one line."""


class Spent(NamedTuple):
    """What one run took: seconds, CPU seconds, MiB at its peak."""

    wall: float
    cpu: float
    rss: float

    def __str__(self) -> str:
        return f"{self.wall:.1f} s, {self.cpu:.2f} s of CPU, {self.rss:.0f} MiB"


def spend(command: Sequence[str], *, data: int = 0, **environ: str) -> tuple[Spent, str]:
    """Run a program to its end, with at most `data` bytes of memory of its own; return its standard
    output.

    BenchError when it ends with another status than 0.
    """
    with tempfile.TemporaryDirectory() as directory:
        out = os.path.join(directory, "out")
        environment = {"HOME": directory, "PATH": "/usr/bin:/bin", **environ}
        launcher = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _LAUNCHER,
            out,
            str(TIME_LIMIT),
            str(data),
            *command,
        ]
        done = subprocess.run(
            launcher, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
        )
        if done.returncode:
            raise BenchError(f"the launcher failed: {done.stderr[-500:]}")
        status, wall, cpu, rss = json.loads(done.stdout)
        said, complaints = (
            Path(f"{out}.{number}").read_text(errors="replace") for number in (1, 2)
        )
    if status:
        raise BenchError(f"{' '.join(command)} ended with {status}: {complaints[-1500:]}")
    return Spent(wall, cpu, rss), said


class Figure(NamedTuple):
    """One number beside what it should be at most."""

    name: str
    value: float
    unit: str
    goal: float
    detail: str

    def __str__(self) -> str:
        verdict = "met" if self.value <= self.goal else "NOT MET"
        return f"  {self.name:<22} {self.value:9.2f} {self.unit:<20} at most {self.goal:<6g} {verdict:<8} {self.detail}"


class Place:
    """Registries, and a directory with a configuration and its state."""

    def __init__(self, directory: Path, source: Server, targets: Sequence[Server]) -> None:
        self.source = source
        self.targets = targets
        self.directory = directory

    @property
    def requests(self) -> int:
        return sum(len(each.journal.entries) for each in (self.source, *self.targets))

    def run(
        self, repositories: Sequence[str], limit: int = 0, **rule: str
    ) -> tuple[Spent, dict[str, int]]:
        """Run once, under a limit in bytes; return what became of how many images."""
        for server in (self.source, *self.targets):
            server.journal.clear()
        names = [f"target-{number}" for number in range(len(self.targets))]
        urls = zip(("source", *names), (self.source, *self.targets), strict=True)
        document = {
            "registries": {name: {"url": server.url} for name, server in urls},
            "defaults": {"source": "source", "targets": names, "artifacts": {"enabled": False}},
            "mappings": [{"from": name, "tags": {"glob": "*", **rule}} for name in repositories],
        }
        file = self.directory / "mirror.yaml"
        file.write_text(json.dumps(document))
        command = [
            sys.executable,
            str(ROOT / "regsync.py"),
            "sync",
            "--json",
            "-q",
            "-c",
            str(file),
        ]
        spent, said = spend(command, data=limit)
        return spent, json.loads(said)["totals"]["images"]


@contextmanager
def place(targets: int = 1, target: Callable[[], App] = App) -> Iterator[Place]:
    """Start registries."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = stack.enter_context(run_in_thread(App()))
        others = [stack.enter_context(run_in_thread(target())) for _ in range(targets)]
        yield Place(directory, source, others)


def _app(server: Server) -> App:
    assert isinstance(server.app, App)
    return server.app


# ---------------------------------------------------------------- cases


def never_moving() -> Iterator[Figure]:
    """20,000 tags that never move, 5 of them new."""
    layers = [Seed(1).layer(500) for _ in range(2)]
    seed = Seed(2)
    with place() as world:
        for number in range(20_000):
            image = seed.image(layers=[*layers, seed.layer(100)])
            image.load_into(_app(world.source), "app", f"v{number}")
            if number < 19_995:
                image.load_into(_app(world.targets[0]), "app", f"v{number}")
        spent, images = world.run(["app"], immutable_tags="*")
        if images != {"synced": 5, "skipped": 19_995, "failed": 0}:
            raise BenchError(f"20,000 tags: {images}")
        detail = f"{world.requests} requests; {spent}"
        yield Figure("20,000 tags, 5 new", spent.rss, "MiB", 128, detail)


def unchanged() -> Iterator[Figure]:
    """A warm run of 2,000 tags."""
    family = Family(repositories=10, tags=200, shared=2, own=1, size=200)
    with place() as world:
        family.load_into(_app(world.source))
        names = [*family.images()]
        world.run(names)
        spent, images = world.run(names)
        if images["skipped"] != 2000:
            raise BenchError(f"2,000 tags: {images}")
        each = 1000 * spent.cpu / world.requests
        bare = spend([sys.executable, str(ROOT / "regsync.py"), "version"])[0].cpu
        detail = f"{world.requests} requests; {spent}; of the CPU {bare:.2f} s is the start of the program"
        yield Figure("2,000 tags, warm", each, "CPU s per 1,000", 1.0, detail)


def typical() -> Iterator[Figure]:
    """100 images in 20 repositories, layers of up to 32 MiB, state kept, at most 128 MiB."""
    layers = [Stream(7, number, (4 << 20) * (1 + number % 8)) for number in range(40)]
    with place(target=Weighing) as world:
        for repository in range(20):
            seed = Seed(repository)
            for tag in range(5):
                chosen: list[bytes | Stream] = [
                    *layers[repository * 2 : repository * 2 + 2],
                    layers[(repository + tag) % 40],
                    seed.layer(9000),
                ]
                seed.image(layers=chosen).load_into(
                    _app(world.source), f"app-{repository}", f"v{tag}"
                )
        names = [f"app-{number}" for number in range(20)]
        for phase in ("cold", "warm"):
            spent, images = world.run(names, 128 * MIB)
            if images["failed"]:
                raise BenchError(f"typical: {images}")
            yield Figure(
                f"100 images, {phase}", spent.rss, "MiB", 128, f"under 128 MiB of data; {spent}"
            )


def large() -> Iterator[Figure]:
    """500 images to three targets, two layers of 4 GiB among them, 50 streams, 600,000 entries of
    state.
    """
    big = [Stream(8, number, 4 << 30) for number in range(2)]
    many = [Stream(9, number, 8 << 20) for number in range(50)]
    with place(3, Weighing) as world:
        for number in range(500):
            seed = Seed(number)
            own: list[bytes | Stream] = [many[number % 50], seed.layer(5000)]
            own += {0: big[:1], 1: big[1:]}.get(number % 250, [])
            seed.image(layers=own).load_into(_app(world.source), f"app-{number % 20}", f"v{number}")
        state = world.directory / ".regsync"
        state.mkdir(mode=0o700)
        _write_state(state, [server.address for server in world.targets], 600_000)
        spent, images = world.run([f"app-{number}" for number in range(20)], 512 * MIB)
        if images["failed"] or images["synced"] != 1500:
            raise BenchError(f"large: {images}")
        moved = sum(server.journal.bytes_in() for server in world.targets) / 1e9
        detail = (
            f"under 512 MiB of data; {moved:.1f} GB pushed, {spent.cpu / moved:.2f} CPU s per GB"
        )
        yield Figure("500 images", spent.rss, "MiB", 512, f"{detail}; {spent}")


class _Cloud(Provider, Weighing):
    """A persona that drops what it has verified."""


# Each way of a body into a registry: the row of the persona, the kind that the program is told.
_WAYS = {
    "GHCR": ("ghcr", "ghcr"),
    "one PATCH": ("ghcr_405", "ghcr"),
    "Google": ("gar_open", "gar"),
    "ACR": ("acr", "acr"),
}


def dialects() -> Iterator[Figure]:
    """A layer of 4 GiB to each kind of registry, at most 64 MB (10^6) of memory, none of it on
    disk.
    """
    layer = Stream(10, 1, 4 << 30)
    for name, (row, kind) in _WAYS.items():
        cloud = _Cloud(replace(PERSONAS[row], hosts={"registry": "localhost"}))
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            source, target = (stack.enter_context(run_in_thread(each)) for each in (App(), cloud))
            image = Seed(11).image(layers=[layer]).load_into(_app(source), "app", "v1")
            # An address is nobody's; a name is of the kind that its login says. Nobody is asked for
            # one.
            url = target.url.replace("127.0.0.1", "localhost")
            registries = {"s": {"url": source.url}, "t": {"url": url, "auth_type": kind}}
            defaults = {"source": "s", "targets": ["t"], "artifacts": {"enabled": False}}
            file = Path(directory) / "mirror.yaml"
            mappings = [{"from": "app", "to": "team/app", "tags": {"glob": "v1"}}]
            file.write_text(
                json.dumps({"registries": registries, "defaults": defaults, "mappings": mappings})
            )
            command = [
                sys.executable,
                str(ROOT / "regsync.py"),
                "sync",
                "--json",
                "-q",
                "-c",
                str(file),
            ]
            spent, said = spend(command, data=64_000_000, GITHUB_TOKEN="none")
            if (
                json.loads(said)["totals"]["images"]["synced"] != 1
                or image.top not in cloud.tags("team/app").values()
            ):
                raise BenchError(f"{name}: {said[:500]}")
            moved = target.journal.bytes_in() / 1e9
            sent = ", ".join(
                f"{n} {what}" for what, n in target.journal.summary().items() if "upload" in what
            )
            detail = f"under 64 MB of data; {moved:.2f} GB pushed by {sent}; {spent}"
            left = sum(each.stat().st_size for each in Path(directory).rglob("*") if each.is_file())
            yield Figure(
                f"4 GiB, {name}",
                spent.rss * MIB / 1e6,
                "MB",
                64,
                f"{detail}; {left / 1000:.0f} kB on disk",
            )


def _write_state(directory: Path, hosts: Sequence[str], count: int) -> None:
    """Write a state of so many entries: manifests of 30 blobs in 200 repositories, and a tag for
    each.
    """
    from _regsync.state.database import StateFile, key_of, named
    from _regsync.state.knowledge import Knowledge

    file = StateFile(str(directory), print)
    file.load()
    if not file.is_kept:
        raise BenchError("the state cannot be written")
    known = Knowledge(file, now=time.time)
    for number in range(count // 62):
        # 1 manifest, 30 blobs, 30 names, 1 tag.
        where = (hosts[number % len(hosts)], f"held/app-{number % 200}")
        root = f"sha256:{number:064x}"
        known.commit(where, root, [f"sha256:{number * 30 + blob:064x}" for blob in range(1, 31)])
        known.take_snapshot(
            named("source", "held", str(number), *where), key_of(root), key_of(root)
        )
    known.finish()
    file.close()


def state() -> Iterator[Figure]:
    """A state of 600,000 entries, loaded and asked 1,000 times in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "state.db"
        _write_state(Path(directory), ["one.example", "two.example", "three.example"], 600_000)
        code = f"""
import time
from _regsync.state.database import StateFile
from _regsync.state.knowledge import Knowledge
began = time.perf_counter()
file = StateFile({directory!r}, print)
file.load()
known = Knowledge(file, now=time.time)
took = time.perf_counter() - began
began = time.perf_counter()
for number in range(1000):
    where = (["one.example", "two.example", "three.example"][number % 3], f"held/app-{{number % 200}}")
    assert known.has_blob(where, f"sha256:{{number * 30 + 7:064x}}")
asking = time.perf_counter() - began
print(took, asking)
"""
        bare = spend([sys.executable, "-c", "from _regsync.state import database, knowledge"])[0]
        spent, said = spend([sys.executable, "-c", code])
        took, asking = map(float, said.split())
        size = file.stat().st_size / MIB
        detail = f"600,000 entries, a file of {size:.0f} MiB, {1000 * asking:.0f} us a look-up"
        yield Figure("state, loaded", took, "s", 1.0, detail)
        yield Figure("state, in memory", spent.rss - bare.rss, "MiB", 10, detail)


def election() -> Iterator[Figure]:
    """2,000 images of 40 blobs, elected one by one."""
    from _regsync.sync.claims import Election

    elected = Election()
    began = time.process_time()
    for number in range(2000):
        shared = [("host", f"base-{number % 50}-{layer}") for layer in range(20)]
        elected.add(number, [*shared, *(("host", f"own-{number}-{layer}") for layer in range(20))])
    taken = {elected.take() for _ in range(2000)}
    took = time.process_time() - began
    if len(taken) != 2000:
        raise BenchError("an image was elected twice")
    yield Figure("election", took, "s of CPU", 1.0, "2,000 images x 40 blobs")


CASES: Mapping[str, Callable[[], Iterator[Figure]]] = {
    "election": election,
    "state": state,
    "unchanged": unchanged,
    "never-moving": never_moving,
    "typical": typical,
    "large": large,
    "dialects": dialects,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 when a case could not be run."""
    parser = argparse.ArgumentParser(description="measure memory, CPU time and the state's figures")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=" ".join(CASES))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    given = parser.parse_args(arguments)
    if unknown := {*given.cases} - {*CASES}:
        parser.error(f"no case {', '.join(sorted(unknown))}: one of {' '.join(CASES)}")
    figures: list[Figure] = []
    for name in given.cases or CASES:
        try:
            for figure in CASES[name]():
                figures.append(figure)
                if not given.json:
                    print(figure, flush=True)
        except BenchError as problem:
            print(f"bench_memory: {name}: {problem}", file=sys.stderr)
            return 1
    if given.json:
        print(json.dumps([figure._asdict() for figure in figures], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
