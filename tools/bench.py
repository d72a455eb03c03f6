#!/usr/bin/env python3
"""Measure regsync beside skopeo, between two Debian docker-registry processes on loopback.

    python3 tools/bench.py [-n ROUNDS] [--python EXE] [--pyz FILE] [--work DIR] [CASE ...]

Each round runs both programs, in turn first, on a target registry that was just started on an empty
directory; storage is in memory (/dev/shm). Figures are medians of whole runs of the client,
start-up included; CPU and memory are the client's alone. Layers are gzip, since skopeo would
compress any other. Each line ends with what the figure should be; nothing fails when it is not,
since a busy machine changes wall times much (CPU seconds little). skopeo 1.9.3 hashes without the
CPU's SHA instructions, Python with.

Owns: the cases and how they are counted. May not know: anything of the program but its command
line. Needs Linux, docker-registry, skopeo, openssl (case tls), and what tools/build_zipapp.py
needs, unless --pyz is given. As root it removes skopeo's cache of blob locations
(/var/lib/containers/cache).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.copies import push_http  # noqa: E402
from conformance.images import Image, Seed  # noqa: E402
from conformance.registries import Missing, docker_registry  # noqa: E402
from tools.bench_peers import LARGE  # noqa: E402

__all__ = ["main"]

MIB = 1024 * 1024
DELAY = 0.02  # seconds, each way
TIME_LIMIT = 600  # seconds for one run of a client
SETTLING = 5.0  # seconds that blocked streams get to fill what they fill
# Where skopeo remembers which registry has which blob: it would mount instead of copying.
CACHES = ("/var/lib/containers/cache", ".local/share/containers/cache")

# Forks from a small interpreter, because a child's peak memory begins with its parent's.
LAUNCHER = """\
import json, os, signal, sys, time
log, limit, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
began = time.perf_counter()
child = os.fork()
if not child:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.execv(command[0], command)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(limit)
_, status, used = os.wait4(child, 0)
wall = time.perf_counter() - began
status = os.waitstatus_to_exitcode(status)
print(json.dumps([status, wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6]))
"""


class BenchError(Exception):
    """What is missing or went wrong, on one line."""


@dataclass(frozen=True)
class Spent:
    """What one run of a client took: seconds, CPU seconds, MB at its peak."""

    wall: float
    cpu: float
    rss: float


@dataclass(frozen=True)
class Figure:
    """One number beside what it should be: `goal` is a limit, reached from above or below."""

    name: str
    value: float
    unit: str
    goal: float
    at_least: bool
    detail: str

    def __str__(self) -> str:
        met = self.value >= self.goal if self.at_least else self.value <= self.goal
        wanted = f"{'at least' if self.at_least else 'at most'} {self.goal:g}"
        verdict = "met" if met else "NOT MET"
        return f"  {self.name:<17} {self.value:7.2f} {self.unit:<9} {wanted:<14} {verdict:<8} {self.detail}"


class Bench:
    """One machine with both programs, an empty place to work in, and a number of rounds."""

    def __init__(self, work: Path, python: str, pyz: str, rounds: int) -> None:
        self.work = work
        self.python = python
        self.pyz = pyz
        self.rounds = rounds
        self._registries = 0
        (work / "home").mkdir()

    def spend(self, command: Sequence[str], *, trust: str | None = None) -> tuple[Spent, str]:
        """Run a client by itself to its end; return what it took and what it said."""
        home = str(self.work / "home")
        log = str(self.work / "client.log")
        environment = {"HOME": home, "XDG_RUNTIME_DIR": home, "PATH": "/usr/bin:/bin"}
        if trust is not None:
            environment["SSL_CERT_FILE"] = trust
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, log, str(TIME_LIMIT), *command]
        done = subprocess.run(
            launcher, capture_output=True, text=True, env=environment, cwd=ROOT, check=True
        )
        status, wall, cpu, rss = json.loads(done.stdout)
        with open(log, encoding="utf-8", errors="replace") as file:
            said = file.read()
        if status:
            raise BenchError(f"{' '.join(command)} ended with {status}: {said[-1000:]}")
        return Spent(wall, cpu, rss), said

    def regsync(self, *arguments: str, trust: str | None = None) -> Spent:
        """Run the .pyz."""
        return self.spend([self.python, self.pyz, *arguments], trust=trust)[0]

    def skopeo(self, *arguments: str, trust: str | None = None) -> Spent:
        """Run skopeo, which remembers nothing from the last time."""
        for cache in CACHES:  # the first is root's, and absolute
            (self.work / "home" / cache / "blob-info-cache-v1.boltdb").unlink(missing_ok=True)
        program = found("skopeo")
        return self.spend([program, "--insecure-policy", *arguments], trust=trust)[0]

    @contextmanager
    def registry(self, tls: tuple[str, str] | None = None) -> Iterator[str]:
        """Run an empty docker-registry; its storage is gone afterwards."""
        self._registries += 1
        directory = self.work / f"registry-{self._registries}"
        try:
            with docker_registry(directory, tls=tls) as address:
                yield address
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def peer(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run one of tools/bench_peers.py; its first line is still to be read."""
        command = [sys.executable, "-m", "tools.bench_peers", *arguments]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as running:
            try:
                yield running
            finally:
                running.kill()

    @contextmanager
    def delayed(self, address: str) -> Iterator[str]:
        """Put `address` behind a line of 20 ms each way."""
        with self.peer("delay", str(DELAY), address) as running:
            assert running.stdout is not None
            yield running.stdout.readline().strip()

    def rotate(self, *runs: Callable[[], Spent]) -> list[list[Spent]]:
        """Do every run in each round, another one first each time; return each one's rounds."""
        spent: list[list[Spent]] = [[] for _ in runs]
        for number in range(self.rounds):
            for place in range(len(runs)):
                chosen = (place + number) % len(runs)
                spent[chosen].append(runs[chosen]())
        return spent


def found(program: str) -> str:
    """Return where a program is."""
    path = shutil.which(program)
    if path is None:
        raise BenchError(f"{program} is not installed; on Debian: apt-get install {program}")
    return path


@contextmanager
def time_limit(seconds: int, problem: str) -> Iterator[None]:
    """End the block with BenchError after `seconds`, whatever it waits for."""

    def end(*_: object) -> None:
        raise BenchError(problem)

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def median(spent: Sequence[Spent], what: str) -> float:
    """Return the median of one of the three things spent."""
    values: list[float] = [getattr(each, what) for each in spent]
    return statistics.median(values)


def spread(spent: Sequence[Spent], what: str) -> str:
    """Show what lies on both sides of a median."""
    values = sorted(getattr(each, what) for each in spent)
    return f"{statistics.median(values):.3g} ({values[0]:.3g}-{values[-1]:.3g})"


def against(ours: Sequence[Spent], theirs: Sequence[Spent], what: str) -> str:
    """Show both sides of a ratio."""
    unit = "MB" if what == "rss" else "s"
    return f"regsync {spread(ours, what)} {unit}, skopeo {spread(theirs, what)} {unit}"


# ---------------------------------------------------------------- one image


def copies(
    bench: Bench, image: Image, *, tls: tuple[str, str] | None = None, far: bool = False
) -> tuple[list[Spent], list[Spent]]:
    """Copy one image by both programs, each time into an empty registry."""
    trust = tls[0] if tls else None
    context = ssl.create_default_context(cafile=trust) if tls else None
    away: Callable[[str], AbstractContextManager[str]] = (
        bench.delayed if far else contextlib.nullcontext
    )
    with bench.registry(tls) as near_source, away(near_source) as source:
        push_http(image, near_source, "bench/one", "v1", context=context)

        def ours() -> Spent:
            with bench.registry(tls) as near, away(near) as target:
                command = [f"{source}/bench/one:v1", f"{target}/bench/one:v1", "--no-artifacts"]
                command += ["-c", _https(bench, source, target)] if tls else []
                spent = bench.regsync("copy", *command, "--no-progress", trust=trust)
                _check_held(image, near, context)
            return spent

        def theirs() -> Spent:
            options = [] if tls else ["--src-tls-verify=false", "--dest-tls-verify=false"]
            with bench.registry(tls) as near, away(near) as target:
                names = [f"docker://{address}/bench/one:v1" for address in (source, target)]
                spent = bench.skopeo("copy", *options, *names, trust=trust)
                _check_held(image, near, context)
            return spent

        first, second = bench.rotate(ours, theirs)
    return first, second


def _https(bench: Bench, *hosts: str) -> str:
    """Write the configuration that makes registries on loopback HTTPS."""
    registries = {f"r{number}": {"url": f"https://{host}"} for number, host in enumerate(hosts)}
    config = bench.work / "tls.yaml"
    config.write_text(json.dumps({"registries": registries, "mappings": []}))
    return str(config)


def _check_held(image: Image, address: str, context: ssl.SSLContext | None) -> None:
    """Make sure that what was timed was done: the tag names the image, byte for byte its manifest."""
    connection = (
        http.client.HTTPSConnection(address, timeout=60, context=context)
        if context
        else http.client.HTTPConnection(address, timeout=60)
    )
    with contextlib.closing(connection):
        connection.request(
            "GET", "/v2/bench/one/manifests/v1", headers={"Accept": image.media_type}
        )
        if connection.getresponse().read() != image.body:
            raise BenchError("the target does not hold the image that was copied")


def compare(
    ours: Sequence[Spent],
    theirs: Sequence[Spent],
    size: int,
    *,
    speed: float,
    cpu: float,
    rss: float = 0.0,
) -> Iterator[Figure]:
    """Give speed, CPU and memory of ours as multiples of theirs."""
    factor = median(theirs, "wall") / median(ours, "wall")
    rates = [f"{size / median(side, 'wall') / 1e6:.0f}" for side in (ours, theirs)]
    detail = f"{against(ours, theirs, 'wall')}: {rates[0]} and {rates[1]} MB/s"
    yield Figure("speed", factor, "x skopeo", speed, True, detail)
    factor = median(ours, "cpu") / median(theirs, "cpu")
    per_gb = [f"{median(side, 'cpu') / size * 1e9:.2f}" for side in (ours, theirs)]
    detail = f"{against(ours, theirs, 'cpu')}: {per_gb[0]} and {per_gb[1]} s/GB"
    yield Figure("client CPU", factor, "x skopeo", cpu, False, detail)
    if rss:
        factor = median(ours, "rss") / median(theirs, "rss")
        yield Figure("peak memory", factor, "x skopeo", rss, False, against(ours, theirs, "rss"))


def case_bulk(bench: Bench) -> Iterator[Figure]:
    """8 layers of 64 MiB over HTTP"""
    image = Seed(1).image(sizes=[64 * MIB] * 8)
    ours, theirs = copies(bench, image)
    yield from compare(ours, theirs, image.size, speed=1.15, cpu=0.60, rss=1.6)


def case_big(bench: Bench) -> Iterator[Figure]:
    """one layer of 1 GiB over HTTP"""
    image = Seed(2).image(sizes=[1024 * MIB])
    ours, theirs = copies(bench, image)
    yield from compare(ours, theirs, image.size, speed=1.10, cpu=0.50)


def case_tls(bench: Bench) -> Iterator[Figure]:
    """8 layers of 64 MiB, TLS on both sides"""
    certificate = str(bench.work / "cert.pem")
    key = str(bench.work / "key.pem")
    command = [
        found("openssl"),
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]
    command += [
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=bench",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run([*command, "-keyout", key, "-out", certificate], capture_output=True, check=True)
    image = Seed(1).image(sizes=[64 * MIB] * 8)
    ours, theirs = copies(bench, image, tls=(certificate, key))
    yield from compare(ours, theirs, image.size, speed=1.05, cpu=0.75, rss=1.6)


def case_latency(bench: Bench) -> Iterator[Figure]:
    """64 layers of 4 KiB, both registries 20 ms away in each direction"""
    ours, theirs = copies(bench, Seed(3).image(sizes=[4096] * 64), far=True)
    factor = median(theirs, "wall") / median(ours, "wall")
    yield Figure("speed", factor, "x skopeo", 4.0, True, against(ours, theirs, "wall"))


# ---------------------------------------------------------------- many images


def write_config(
    path: Path, pairs: Sequence[tuple[str, str]], mappings: Sequence[Mapping[str, object]]
) -> None:
    """Write a configuration with sources a0, a1, ... and targets b0, b1, ... (JSON is YAML)."""
    registries: dict[str, object] = {}
    for number, (source, target) in enumerate(pairs):
        registries[f"a{number}"] = {"url": f"http://{source}"}
        registries[f"b{number}"] = {"url": f"http://{target}"}
    complete = [{**mapping, "artifacts": {"enabled": False}} for mapping in mappings]
    path.write_text(json.dumps({"registries": registries, "mappings": complete}))


def case_many(bench: Bench) -> Iterator[Figure]:
    """200 small images of one repository in one sync"""
    seed = Seed(4)
    config = bench.work / "many.yaml"
    with bench.registry() as source:
        for number in range(200):
            push_http(seed.image(sizes=(1000,)), source, "bench/many", f"v{number}")
        again: tuple[list[Spent], list[Spent]] = ([], [])

        def ours() -> Spent:
            with bench.registry() as target:
                mapping = {
                    "from": "bench/many",
                    "source": "a0",
                    "targets": ["b0"],
                    "tags": {"glob": "*"},
                }
                write_config(config, [(source, target)], [mapping])
                command = ("sync", "-c", str(config), "--no-progress")
                first = bench.regsync(*command)
                again[0].append(bench.regsync(*command))
            return first

        def theirs() -> Spent:
            with bench.registry() as target:
                command = ["sync", "--src", "docker", "--dest", "docker", "--src-tls-verify=false"]
                command += ["--dest-tls-verify=false", f"{source}/bench/many", f"{target}/bench"]
                first = bench.skopeo(*command)
                again[1].append(bench.skopeo(*command))
            return first

        rounds = bench.rotate(ours, theirs)
    for name, (mine, other), goal in (("first sync", rounds, 2.5), ("no-op sync", again, 1.5)):
        factor = median(other, "wall") / median(mine, "wall")
        cpu = f"CPU {spread(mine, 'cpu')} and {spread(other, 'cpu')} s"
        yield Figure(
            f"{name} speed",
            factor,
            "x skopeo",
            goal,
            True,
            f"{against(mine, other, 'wall')}; {cpu}",
        )


# ---------------------------------------------------------------- memory and the event loop


def case_slow(bench: Bench) -> Iterator[Figure]:
    """50 streams of 256 MiB into targets that take 640 kB/s each

    No more than 8 large bodies go to one registry at a time, so that 50 need 7 pairs of registries.
    """
    wanted = 50
    pairs = 7
    config = bench.work / "slow.yaml"
    with bench.peer("slow", str(pairs)) as running, ExitStack() as stack:
        assert running.stdout is not None
        addresses = running.stdout.readline().split()
        names = [f"t{number}" for number in range(8)]
        write_config(
            config,
            list(zip(addresses[:pairs], addresses[pairs:], strict=True)),
            [
                {"from": f"r{n}", "source": f"a{n}", "targets": [f"b{n}"], "tags": {"glob": names}}
                for n in range(pairs)
            ],
        )
        log = stack.enter_context(open(bench.work / "client.log", "w+", encoding="utf-8"))
        client = subprocess.Popen(
            [bench.python, bench.pyz, "sync", "-c", str(config), "--no-progress"],
            stdout=log,
            stderr=log,
        )
        stack.callback(client.wait)
        stack.callback(client.kill)
        streams = 0
        with time_limit(60, "the streams did not begin within a minute"):
            while streams < wanted and (line := running.stdout.readline()):
                streams = int(line)
        time.sleep(SETTLING)
        if client.poll() is not None:
            log.seek(0)
            raise BenchError(f"the client ended: {log.read()[-500:]}")
        status = Path(f"/proc/{client.pid}/status").read_text(encoding="ascii")
    peak = int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) * 1024 / 1e6
    detail = f"{streams} streams of {LARGE // MIB} MiB to {pairs} registries"
    yield Figure("peak memory", peak, "MB", 64, False, detail)


def case_lag(bench: Bench) -> Iterator[Figure]:
    """longest wait of another task while 8 layers of 64 MiB are copied over HTTP"""
    image = Seed(1).image(sizes=[64 * MIB] * 8)
    gaps: list[dict[str, float]] = []
    with bench.registry() as source:
        push_http(image, source, "bench/one", "v1")
        for _ in range(bench.rounds):
            with bench.registry() as target:
                names = [f"{address}/bench/one:v1" for address in (source, target)]
                program = [
                    bench.python,
                    "-m",
                    "tools.bench_peers",
                    "lag",
                    bench.pyz,
                    "copy",
                    *names,
                ]
                _, said = bench.spend([*program, "--no-artifacts", "--no-progress"])
                gaps.append(json.loads(said.strip().splitlines()[-1]))
    middle = {name: statistics.median(each[name] for each in gaps) for name in gaps[0]}
    worst = max(each["wall_ms"] for each in gaps)
    detail = f"99 % below {middle['wall_p99_ms']:.1f} ms, worst of all rounds {worst:.1f} ms"
    yield Figure("longest gap", middle["wall_ms"], "ms", 20, False, detail)
    detail = (
        f"99 % below {middle['cpu_p99_ms']:.1f} ms; the rest of the gap the system gave to others"
    )
    yield Figure("longest own CPU", middle["cpu_ms"], "ms", 20, False, detail)


# ---------------------------------------------------------------- start-up


def case_start(bench: Bench) -> Iterator[Figure]:
    """start-up from the .pyz, ten times as many rounds"""
    config = bench.work / "one.yaml"
    with bench.registry() as source, bench.registry() as target:
        for address in (source, target):
            push_http(Seed(5).image(sizes=(1000,)), address, "bench/one", "v1")
        mapping = {"from": "bench/one", "source": "a0", "targets": ["b0"], "tags": {"glob": "v1"}}
        write_config(config, [(source, target)], [mapping])
        options = ["--src-tls-verify=false", "--dest-tls-verify=false"]
        names = [f"docker://{address}/bench/one:v1" for address in (source, target)]
        runs = (
            lambda: bench.spend([bench.python, "-c", "pass"])[0],
            lambda: bench.regsync("version"),
            lambda: bench.regsync("sync", "-c", str(config)),
            lambda: bench.skopeo("copy", *options, *names),
        )
        rounds: list[list[Spent]] = [[] for _ in runs]
        for _ in range(10):
            for kept, spent in zip(rounds, bench.rotate(*runs), strict=True):
                kept += spent
    nothing = median(rounds[0], "wall")
    for name, side, goal in (("version", rounds[1], 2), ("no-op sync, 1 tag", rounds[2], 10)):
        detail = f"{1000 * median(side, 'wall'):.1f} ms against {1000 * nothing:.1f} ms"
        detail += (
            f", CPU {1000 * median(side, 'cpu'):.1f} and {1000 * median(rounds[0], 'cpu'):.1f} ms"
        )
        yield Figure(name, median(side, "wall") / nothing, "x pass", goal, False, detail)
    print(
        f"  for comparison: skopeo copy of the same tag {1000 * median(rounds[3], 'wall'):.1f} ms"
    )


CASES: Mapping[str, Callable[[Bench], Iterator[Figure]]] = {
    "bulk": case_bulk,
    "big": case_big,
    "tls": case_tls,
    "latency": case_latency,
    "many": case_many,
    "slow": case_slow,
    "lag": case_lag,
    "start": case_start,
}


def versions(bench: Bench) -> Iterator[str]:
    """Name everything that has a part in the figures."""
    for command in (
        [bench.python, "-VV"],
        [bench.python, bench.pyz, "version"],
        [found("skopeo"), "--version"],
        [found("docker-registry"), "--version"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        yield f"{os.path.basename(command[0])}: {' '.join(done.stdout.split())}"
    system = os.uname()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    yield f"{system.sysname} {system.release}, {os.cpu_count()} x {cpu[1] if cpu else system.machine}"


def interpreter(name: str) -> str:
    """Return the interpreter behind links and version managers' shims, which take time of their
    own.
    """
    command = [name, "-c", "import os, sys; print(os.path.realpath(sys.executable))"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise BenchError(f"{name} is no Python that can be run") from None


def built(work: Path, python: str) -> str:
    """Build the program for the interpreter that will run it."""
    command = [sys.executable, str(ROOT / "tools" / "build_zipapp.py"), "--python", python]
    done = subprocess.run(
        [*command, "--out", str(work)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchError(f"the program cannot be built: {done.stderr.strip()}")
    return str(work / "regsync-nofips.pyz")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0; 1 when something needed is missing or failed."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="cases: " + "; ".join(f"{name}: {_title(case)}" for name, case in CASES.items()),
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all, in the order below")
    parser.add_argument("-n", dest="rounds", type=int, default=5, help="rounds of each case (5)")
    parser.add_argument(
        "--python", default=sys.executable, metavar="EXE", help="interpreter of the .pyz"
    )
    parser.add_argument("--pyz", metavar="FILE", help="measure this file (default: a new build)")
    parser.add_argument(
        "--work", default="/dev/shm", metavar="DIR", help="where storage is (/dev/shm)"
    )
    options = parser.parse_args(argv)
    try:
        unknown = [name for name in options.cases if name not in CASES]
        if unknown:
            raise BenchError(f"no such case: {', '.join(unknown)} (there are {', '.join(CASES)})")
        if not os.path.isdir(options.work):
            raise BenchError(f"{options.work} is no directory: name one in memory with --work")
        measure(options)
    except (BenchError, Missing) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    return 0


def measure(options: argparse.Namespace) -> None:
    """Run the chosen cases and print each figure as soon as it is known."""
    python = interpreter(options.python)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.work) as directory:
        work = Path(directory)
        pyz = os.path.abspath(options.pyz) if options.pyz else built(work, python)
        bench = Bench(work, python, pyz, options.rounds)
        for line in versions(bench):
            print(line)
        print(
            f"{python}; medians of {options.rounds} rounds; load {os.getloadavg()[0]:.1f} before",
            flush=True,
        )
        for name in options.cases or CASES:
            print(f"{name}: {_title(CASES[name])}", flush=True)
            for figure in CASES[name](bench):
                print(figure, flush=True)


def _title(case: Callable[[Bench], Iterator[Figure]]) -> str:
    return (case.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    sys.exit(main())
