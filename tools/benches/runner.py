"""Run a program, take its time, CPU and memory, and print figures.

Owns: how a run is measured; where registries keep their data; what a figure looks like; how a
configuration is written.
May not know: what is compared with what.
Needs Linux.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from conformance.programs import find_program

__all__ = [
    "CPU",
    "MB",
    "MIB",
    "PEAK",
    "REGSYNC",
    "ROOT",
    "WALL",
    "BenchError",
    "Figure",
    "Program",
    "Quantity",
    "Ran",
    "Spent",
    "choose",
    "conditions",
    "folder_in_memory",
    "median",
    "print_figures",
    "run_measured",
    "run_unchecked",
    "spread",
    "sync_measured",
    "write_config",
    "write_mirror",
]

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000
MIB = 1 << 20
MEMORY = "/dev/shm"
TIME_LIMIT = 600  # seconds for one run

# Forks from a small interpreter, because a child's peak memory begins with its parent's.
# RLIMIT_DATA counts all private memory that can be written: heap, buffers and the stacks of
# threads, touched or not, which are therefore made 1 MiB each (8 is usual). RLIMIT_AS would count
# the address space that allocators reserve and never use.
LAUNCHER = """\
import json, os, resource, signal, sys, time
out = sys.argv[1]
time_limit = int(sys.argv[2])
data_limit = int(sys.argv[3])
command = sys.argv[4:]
began = time.perf_counter()
child = os.fork()
if not child:
    if data_limit:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))
        resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    for number in (1, 2):
        os.dup2(os.open(f"{out}.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.execv(command[0], command)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(time_limit)
_, status, used = os.wait4(child, 0)
wall = time.perf_counter() - began
status = os.waitstatus_to_exitcode(status)
print(json.dumps([status, wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""


class BenchError(Exception):
    """What is missing or went wrong, on one line."""


class Program(NamedTuple):
    """The program to be measured: an interpreter, and regsync.py or a built file."""

    python: str
    file: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of a run."""
        return [self.python, self.file, *arguments]


REGSYNC = Program(sys.executable, str(ROOT / "regsync.py"))


class Spent(NamedTuple):
    """What one run took."""

    wall: float  # seconds
    cpu: float  # seconds
    peak: int  # bytes that were resident at once

    def __str__(self) -> str:
        return f"{self.wall:.1f} s, {self.cpu:.2f} s of CPU, {self.peak / MIB:.0f} MiB"


class Ran(NamedTuple):
    """One run: what it took, what it wrote, and its exit status (negative: the signal that ended it)."""

    spent: Spent
    out: str
    err: str
    status: int = 0


def run_measured(
    command: Sequence[str], *, data_limit: int = 0, environ: Mapping[str, str] | None = None
) -> Ran:
    """Run a program to its end, with at most `data_limit` bytes of memory of its own.

    It has an empty home unless `environ` names one. BenchError when its status is not 0.
    """
    ran = run_unchecked(command, data_limit=data_limit, environ=environ)
    if ran.status:
        said = (ran.out + ran.err)[-1500:]
        raise BenchError(f"{' '.join(command)} ended with {ran.status}: {said}")
    return ran


def run_unchecked(
    command: Sequence[str],
    *,
    seconds: int = TIME_LIMIT,
    data_limit: int = 0,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Run a program that may fail; it is killed after so many seconds."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        environment = {"HOME": directory, "PATH": "/usr/bin:/bin", **(environ or {})}
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER]
        launcher += [str(out), str(seconds), str(data_limit)]
        done = subprocess.run(
            [*launcher, *command],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"the launcher failed: {done.stderr[-500:]}")
        status, wall, cpu, peak = json.loads(done.stdout)
        said = out.with_suffix(".1").read_text(encoding="utf-8", errors="replace")
        complaints = out.with_suffix(".2").read_text(encoding="utf-8", errors="replace")
    return Ran(Spent(wall, cpu, peak), said, complaints, status)


def sync_measured(
    config: Path, *, data_limit: int = 0, environ: Mapping[str, str] | None = None
) -> tuple[Spent, dict[str, Any]]:
    """Run one sync from the checkout; return what it took and its report."""
    command = REGSYNC.command("sync", "--json", "-q", "-c", str(config))
    ran = run_measured(command, data_limit=data_limit, environ=environ)
    return ran.spent, json.loads(ran.out)


def write_config(
    file: Path,
    registries: Mapping[str, str | Mapping[str, object]],
    mappings: Sequence[Mapping[str, object]],
    defaults: Mapping[str, object] | None = None,
) -> Path:
    """Write a configuration (JSON is YAML) and return its path; a registry may be its URL alone."""
    entries = {
        name: {"url": registry} if isinstance(registry, str) else registry
        for name, registry in registries.items()
    }
    document: dict[str, object] = {"registries": entries, "mappings": mappings}
    if defaults is not None:
        document["defaults"] = defaults
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def write_mirror(
    file: Path,
    source: str,
    targets: Sequence[str],
    repositories: Iterable[str],
    *,
    tags: str = "*",
    is_immutable: bool = False,
) -> Path:
    """Write a configuration that copies repositories from one URL to others; return its path."""
    rule = {"glob": tags}
    if is_immutable:
        rule["immutable_tags"] = "*"
    urls = {f"target-{number}": url for number, url in enumerate(targets)}
    return write_config(
        file,
        {"source": source, **urls},
        [{"from": repository, "tags": rule} for repository in repositories],
        {"source": "source", "targets": list(urls), "artifacts": {"enabled": False}},
    )


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Make a folder in memory, or on disk if the system has no such place; remove it at the end."""
    place = MEMORY if os.path.isdir(MEMORY) else None
    with tempfile.TemporaryDirectory(prefix="bench-", dir=place) as folder:
        yield Path(folder)


def conditions() -> str:
    """Say what else has a part in the figures."""
    registry = find_program("docker-registry", "docker-registry")
    version = subprocess.run(
        [registry, "--version"], capture_output=True, text=True, check=True
    ).stdout.split()
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    processor = model[1] if model else platform.machine()
    load, _, _ = os.getloadavg()
    return (
        f"{datetime.date.today()}, {os.cpu_count()} x {processor}, load {load:.1f} before; "
        f"CPython {platform.python_version()}, docker-registry {version[-1]}"
    )


# ---------------------------------------------------------------- many runs


class Quantity(NamedTuple):
    """One of the things that a run spends."""

    name: str
    unit: str
    of: Callable[[Spent], float]


WALL = Quantity("wall", "s", lambda spent: spent.wall)
CPU = Quantity("CPU", "s", lambda spent: spent.cpu)
PEAK = Quantity("peak memory", "MB", lambda spent: spent.peak / MB)


def median(runs: Iterable[Spent], quantity: Quantity) -> float:
    """Return the middle one of what the runs spent."""
    return statistics.median(quantity.of(spent) for spent in runs)


def spread(runs: Iterable[Spent], quantity: Quantity) -> str:
    """Show the median, the lowest and the highest."""
    values = sorted(quantity.of(spent) for spent in runs)
    return f"{statistics.median(values):.3g} ({values[0]:.3g}-{values[-1]:.3g})"


# ---------------------------------------------------------------- figures


class Figure(NamedTuple):
    """One number, beside what it should be where that is said."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    bound: Literal["at most", "at least"] = "at most"
    detail: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the number is what it should be."""
        if self.goal is None:
            return True
        if self.bound == "at least":
            return self.value >= self.goal
        return self.value <= self.goal

    def __str__(self) -> str:
        wanted = "" if self.goal is None else f"{self.bound} {self.goal:g}"
        verdict = ""
        if self.goal is not None:
            verdict = "met" if self.is_met else "NOT MET"
        number = f"{self.value:9.2f} {self.unit:<15}"
        return f"  {self.name:<26} {number} {wanted:<14} {verdict:<8} {self.detail}".rstrip()


def print_figures(figures: Iterable[Figure]) -> None:
    """Print each figure as soon as it is known."""
    for figure in figures:
        print(figure, flush=True)


Case = TypeVar("Case")


def choose(names: Sequence[str], cases: Mapping[str, Case]) -> dict[str, Case]:
    """Return the named cases, or all of them where none is named."""
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise BenchError(f"no such case: {', '.join(unknown)} (there are {', '.join(cases)})")
    return {name: cases[name] for name in names or cases}
