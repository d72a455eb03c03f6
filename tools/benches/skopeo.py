"""Measure regsync beside skopeo, between two Debian docker-registry processes on loopback.

Each round runs both programs, in turn first, on a target registry that was just started on an empty
directory; storage is in memory. Figures are medians of whole runs of the client,
start-up included; CPU and memory are the client's alone. Layers are gzip, since skopeo would
compress any other. Each line ends with what the figure should be; nothing fails when it is not,
since a busy machine changes wall times much (CPU seconds little). skopeo 1.9.3 hashes without the
CPU's SHA instructions, Python with.

Needs docker-registry, skopeo, openssl (case tls), and what tools/build_zipapp.py needs. As root it
removes skopeo's cache of blob locations (/var/lib/containers/cache).

Owns: the cases, and the machine with both programs.
May not know: anything of the program but its command line.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from conformance.http import Server, run_in_thread
from conformance.images import Image, Seed, Stream
from conformance.programs import find_program
from conformance.registry import App, MeasuringApp
from conformance.walks import push_http
from tools.benches.peers import forget_blobs
from tools.benches.place import app_of
from tools.benches.props import prop_command, started_line
from tools.benches.registries import empty_registry
from tools.benches.runner import (
    CPU,
    MB,
    MIB,
    PEAK,
    ROOT,
    WALL,
    BenchError,
    Figure,
    Program,
    Quantity,
    Ran,
    Spent,
    choose,
    conditions,
    folder_in_memory,
    median,
    print_figures,
    run_measured,
    spread,
    write_config,
    write_mirror,
)

__all__ = ["add_options", "run"]

DELAY = 0.02  # seconds, each way
SETTLING = 5.0  # seconds that blocked streams get to fill what they fill
STARTING = 60  # seconds until 50 streams have begun
LARGE = 256 * MIB  # bytes of a stream
PACE = 640_000  # bytes a second that a slow target takes of each
PLAIN_HTTP = ("--src-tls-verify=false", "--dest-tls-verify=false")
REPOSITORY = "bench/one"
IMAGE = f"{REPOSITORY}:v1"


class Certificate(NamedTuple):
    """The files of a registry on loopback that speaks TLS."""

    certificate: str
    key: str


class Machine:
    """Both programs, and an empty place to work in."""

    def __init__(self, work: Path, program: Program, rounds: int) -> None:
        self.work = work
        self.program = program
        self.rounds = rounds
        self._home = work / "home"
        self._home.mkdir()

    def measure(self, command: Sequence[str], **environ: str) -> Ran:
        """Run a program with these variables beside a home of its own."""
        home = {"HOME": str(self._home), "XDG_RUNTIME_DIR": str(self._home)}
        return run_measured(command, environ={**home, **environ})

    def regsync(self, *arguments: str, **environ: str) -> Spent:
        """Run the built file."""
        return self.measure(self.program.command(*arguments), **environ).spent

    def skopeo(self, *arguments: str, **environ: str) -> Spent:
        """Run skopeo, which remembers nothing from the last time."""
        forget_blobs(self._home)
        command = [find_program("skopeo", "skopeo"), "--insecure-policy", *arguments]
        return self.measure(command, **environ).spent

    @contextmanager
    def registry(self, tls: Certificate | None = None) -> Iterator[str]:
        """Run an empty docker-registry and yield its address."""
        with empty_registry(self.work, tls) as registry:
            yield registry.address

    def rotate(
        self, *runs: Callable[[], Spent], rounds: int | None = None
    ) -> tuple[list[Spent], ...]:
        """Do every run in each round, another one first each time; return what each one spent."""
        spent: tuple[list[Spent], ...] = tuple([] for _ in runs)
        count = self.rounds if rounds is None else rounds
        for number in range(count):
            for place in range(len(runs)):
                chosen = (place + number) % len(runs)
                spent[chosen].append(runs[chosen]())
        return spent


def make_certificate(work: Path) -> Certificate:
    """Make a certificate for 127.0.0.1."""
    made = Certificate(str(work / "cert.pem"), str(work / "key.pem"))
    command = [find_program("openssl", "openssl"), "req", "-x509", "-nodes", "-days", "2"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", made.key, "-out", made.certificate]
    subprocess.run(command, capture_output=True, check=True)
    return made


# ---------------------------------------------------------------- one image


class Rounds(NamedTuple):
    """What both programs spent, round by round."""

    ours: list[Spent]
    theirs: list[Spent]

    def times_faster(self) -> float:
        """Return how many times as fast as skopeo regsync was."""
        return median(self.theirs, WALL) / median(self.ours, WALL)

    def times_as_much(self, quantity: Quantity) -> float:
        """Return what regsync spent as a multiple of what skopeo did."""
        return median(self.ours, quantity) / median(self.theirs, quantity)

    def show(self, quantity: Quantity) -> str:
        """Show both sides."""
        ours = spread(self.ours, quantity)
        theirs = spread(self.theirs, quantity)
        return f"regsync {ours} {quantity.unit}, skopeo {theirs} {quantity.unit}"


def copy_rounds(
    machine: Machine, image: Image, *, tls: Certificate | None = None, is_distant: bool = False
) -> Rounds:
    """Copy one image by both programs, each time into an empty registry."""
    trust = {"SSL_CERT_FILE": tls.certificate} if tls else {}
    context = ssl.create_default_context(cafile=tls.certificate) if tls else None

    def way_to(address: str) -> AbstractContextManager[str]:
        if is_distant:
            return started_line("delay", str(DELAY), address)
        return contextlib.nullcontext(address)

    with machine.registry(tls) as near_source, way_to(near_source) as source:
        push_http(image, near_source, REPOSITORY, "v1", context=context)

        def ours() -> Spent:
            with machine.registry(tls) as near_target, way_to(near_target) as target:
                options = ["--no-artifacts", "--no-progress"]
                if tls:
                    options += ["-c", write_tls_config(machine.work, source, target)]
                names = [f"{address}/{IMAGE}" for address in (source, target)]
                spent = machine.regsync("copy", *names, *options, **trust)
                check_held(image, near_target, context)
            return spent

        def theirs() -> Spent:
            options = () if tls else PLAIN_HTTP
            with machine.registry(tls) as near_target, way_to(near_target) as target:
                names = [f"docker://{address}/{IMAGE}" for address in (source, target)]
                spent = machine.skopeo("copy", *options, *names, **trust)
                check_held(image, near_target, context)
            return spent

        return Rounds(*machine.rotate(ours, theirs))


def write_tls_config(work: Path, *addresses: str) -> str:
    """Write the configuration that makes registries on loopback HTTPS."""
    urls = {f"r{number}": f"https://{address}" for number, address in enumerate(addresses)}
    return str(write_config(work / "tls.yaml", urls, []))


def check_held(image: Image, address: str, context: ssl.SSLContext | None) -> None:
    """Make sure that what was timed was done: the tag names the image's manifest, byte for byte."""
    connection = (
        http.client.HTTPSConnection(address, timeout=60, context=context)
        if context
        else http.client.HTTPConnection(address, timeout=60)
    )
    with contextlib.closing(connection):
        path = f"/v2/{REPOSITORY}/manifests/v1"
        connection.request("GET", path, headers={"Accept": image.media_type})
        if connection.getresponse().read() != image.body:
            raise BenchError("the target does not hold the image that was copied")


class Goals(NamedTuple):
    """What a copy should be, as multiples of skopeo's; 0: nothing is asked of it."""

    speed: float
    cpu: float
    memory: float = 0.0


def compare(rounds: Rounds, size: int, goals: Goals) -> Iterator[Figure]:
    """Give speed, CPU and memory of a copy of `size` bytes."""
    ours, theirs = (f"{size / median(side, WALL) / MB:.0f}" for side in rounds)
    detail = f"{rounds.show(WALL)}: {ours} and {theirs} MB/s"
    yield Figure("speed", rounds.times_faster(), "x skopeo", goals.speed, "at least", detail)

    ours, theirs = (f"{median(side, CPU) / size * 1e9:.2f}" for side in rounds)
    detail = f"{rounds.show(CPU)}: {ours} and {theirs} s/GB"
    yield Figure("client CPU", rounds.times_as_much(CPU), "x skopeo", goals.cpu, detail=detail)

    if goals.memory:
        factor = rounds.times_as_much(PEAK)
        detail = rounds.show(PEAK)
        yield Figure("peak memory", factor, "x skopeo", goals.memory, detail=detail)


def bulk(machine: Machine) -> Iterator[Figure]:
    """8 layers of 64 MiB over HTTP"""
    image = Seed(1).image(sizes=[64 * MIB] * 8)
    rounds = copy_rounds(machine, image)
    yield from compare(rounds, image.size, Goals(speed=1.15, cpu=0.60, memory=1.6))


def big(machine: Machine) -> Iterator[Figure]:
    """one layer of 1 GiB over HTTP"""
    image = Seed(2).image(sizes=[1024 * MIB])
    rounds = copy_rounds(machine, image)
    yield from compare(rounds, image.size, Goals(speed=1.10, cpu=0.50))


def tls(machine: Machine) -> Iterator[Figure]:
    """8 layers of 64 MiB, TLS on both sides"""
    image = Seed(1).image(sizes=[64 * MIB] * 8)
    rounds = copy_rounds(machine, image, tls=make_certificate(machine.work))
    yield from compare(rounds, image.size, Goals(speed=1.05, cpu=0.75, memory=1.6))


def latency(machine: Machine) -> Iterator[Figure]:
    """64 layers of 4 KiB, both registries 20 ms away in each direction"""
    rounds = copy_rounds(machine, Seed(3).image(sizes=[4096] * 64), is_distant=True)
    detail = rounds.show(WALL)
    yield Figure("speed", rounds.times_faster(), "x skopeo", 4.0, "at least", detail)


# ---------------------------------------------------------------- many images


def many(machine: Machine) -> Iterator[Figure]:
    """200 small images of one repository in one sync"""
    seed = Seed(4)
    again = Rounds([], [])
    with machine.registry() as source:
        for number in range(200):
            push_http(seed.image(sizes=(1000,)), source, "bench/many", f"v{number}")

        def ours() -> Spent:
            with machine.registry() as target:
                file = write_mirror(
                    machine.work / "many.yaml",
                    f"http://{source}",
                    [f"http://{target}"],
                    ["bench/many"],
                )
                command = ["sync", "-c", str(file), "--no-progress"]
                first = machine.regsync(*command)
                again.ours.append(machine.regsync(*command))
            return first

        def theirs() -> Spent:
            with machine.registry() as target:
                command = ["sync", "--src", "docker", "--dest", "docker", *PLAIN_HTTP]
                command += [f"{source}/bench/many", f"{target}/bench"]
                first = machine.skopeo(*command)
                again.theirs.append(machine.skopeo(*command))
            return first

        first = Rounds(*machine.rotate(ours, theirs))
    for name, rounds, goal in (("first sync", first, 2.5), ("no-op sync", again, 1.5)):
        detail = f"{rounds.show(WALL)}; CPU {rounds.show(CPU)}"
        speed = rounds.times_faster()
        yield Figure(f"{name} speed", speed, "x skopeo", goal, "at least", detail)


# ---------------------------------------------------------------- memory and the event loop


def slow(machine: Machine) -> Iterator[Figure]:
    """50 streams of 256 MiB into targets that take 640 kB/s each

    No more than 8 large bodies go to one registry at a time, so that 50 need 7 pairs of registries.
    They are the harness's.
    """
    wanted = 50
    pairs = range(7)
    layers = iter(Stream(6, number, LARGE) for number in range(8 * len(pairs)))
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        targets: list[Server] = []
        for n in pairs:
            source = stack.enter_context(run_in_thread(App()))
            target = stack.enter_context(run_in_thread(MeasuringApp()))
            for number in range(8):
                image = Seed(number).image(layers=[next(layers)])
                image.load_into(app_of(source), f"r{n}", f"t{number}")
            app_of(target).faults.on("PUT", "upload").throttle(PACE, of="request")
            urls |= {f"a{n}": source.url, f"b{n}": target.url}
            targets.append(target)
        mappings = [{"from": f"r{n}", "source": f"a{n}", "targets": [f"b{n}"]} for n in pairs]
        config = write_config(
            machine.work / "slow.yaml", urls, mappings, {"artifacts": {"enabled": False}}
        )
        log = stack.enter_context(open(machine.work / "client.log", "w+", encoding="utf-8"))
        command = machine.program.command("sync", "-c", str(config), "--no-progress")
        client = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(client.wait)
        stack.callback(client.kill)

        streams = 0
        until = time.monotonic() + STARTING
        while streams < wanted and time.monotonic() < until:
            time.sleep(0.1)
            uploads = [
                each for target in targets for each in target.journal.matching("PUT", "upload")
            ]
            streams = len([upload for upload in uploads if upload.status is None])
        time.sleep(SETTLING)
        if client.poll() is not None:
            log.seek(0)
            raise BenchError(f"the client ended: {log.read()[-500:]}")
        status = Path(f"/proc/{client.pid}/status").read_text(encoding="ascii")
    if streams < wanted:
        raise BenchError(f"the streams did not begin within a minute: there are {streams}")
    [kilobytes] = re.findall(r"VmHWM:\s*(\d+) kB", status)
    detail = f"{streams} streams of {LARGE // MIB} MiB to {len(pairs)} registries"
    yield Figure("peak memory", int(kilobytes) * 1024 / MB, "MB", 64, detail=detail)


def lag(machine: Machine) -> Iterator[Figure]:
    """longest wait of another task while 8 layers of 64 MiB are copied over HTTP"""
    image = Seed(1).image(sizes=[64 * MIB] * 8)
    gaps: list[dict[str, float]] = []
    with machine.registry() as source:
        push_http(image, source, REPOSITORY, "v1")
        for _ in range(machine.rounds):
            with machine.registry() as target:
                names = [f"{address}/{IMAGE}" for address in (source, target)]
                command = prop_command("lag", machine.program.file, "copy", *names)
                command += ["--no-artifacts", "--no-progress"]
                ran = machine.measure([machine.program.python, *command])
                gaps.append(json.loads(ran.err.strip().splitlines()[-1]))
    middle = {name: statistics.median(gap[name] for gap in gaps) for name in gaps[0]}
    worst = max(gap["wall_ms"] for gap in gaps)
    detail = f"99 % below {middle['wall_p99_ms']:.1f} ms, worst of all rounds {worst:.1f} ms"
    yield Figure("longest gap", middle["wall_ms"], "ms", 20, detail=detail)
    detail = f"99 % below {middle['cpu_p99_ms']:.1f} ms; "
    detail += "the rest of the gap the system gave to others"
    yield Figure("longest own CPU", middle["cpu_ms"], "ms", 20, detail=detail)


# ---------------------------------------------------------------- start-up


def start(machine: Machine) -> Iterator[Figure]:
    """start-up from the .pyz, ten times as many rounds"""
    with machine.registry() as source, machine.registry() as target:
        for address in (source, target):
            push_http(Seed(5).image(sizes=(1000,)), address, REPOSITORY, "v1")
        file = write_mirror(
            machine.work / "one.yaml",
            f"http://{source}",
            [f"http://{target}"],
            [REPOSITORY],
            tags="v1",
        )
        names = [f"docker://{address}/{IMAGE}" for address in (source, target)]
        nothing, version, sync, copy = machine.rotate(
            lambda: machine.measure([machine.program.python, "-c", "pass"]).spent,
            lambda: machine.regsync("version"),
            lambda: machine.regsync("sync", "-c", str(file)),
            lambda: machine.skopeo("copy", *PLAIN_HTTP, *names),
            rounds=10 * machine.rounds,
        )
    wall = 1000 * median(nothing, WALL)
    cpu = 1000 * median(nothing, CPU)
    # The commands import what they need and use no other means to start sooner: that costs this much.
    for name, runs, goal in (("version", version, 5), ("no-op sync, 1 tag", sync, 14)):
        own_wall = 1000 * median(runs, WALL)
        own_cpu = 1000 * median(runs, CPU)
        detail = f"{own_wall:.1f} ms against {wall:.1f} ms, CPU {own_cpu:.1f} and {cpu:.1f} ms"
        yield Figure(name, own_wall / wall, "x pass", goal, detail=detail)
    yield Figure("skopeo copy, 1 tag", 1000 * median(copy, WALL), "ms", detail="for comparison")


CASES: Mapping[str, Callable[[Machine], Iterator[Figure]]] = {
    "bulk": bulk,
    "big": big,
    "tls": tls,
    "latency": latency,
    "many": many,
    "slow": slow,
    "lag": lag,
    "start": start,
}


# ---------------------------------------------------------------- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    titles = [f"  {name:<8} {title_of(case)}" for name, case in CASES.items()]
    parser.epilog = "\n".join(["cases:", *titles])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all, in the order below")
    parser.add_argument(
        "-n", dest="rounds", type=int, default=5, help="rounds of each case (%(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the chosen cases and print each figure as soon as it is known."""
    cases = choose(options.cases, CASES)
    with folder_in_memory() as work:
        machine = Machine(work, build_program(work), options.rounds)
        for command in (
            machine.program.command("version"),
            [find_program("skopeo", "skopeo"), "--version"],
        ):
            print(run_measured(command).out.strip())
        print(f"medians of {options.rounds} rounds; {conditions()}", flush=True)
        for name, case in cases.items():
            print(f"{name}: {title_of(case)}", flush=True)
            print_figures(case(machine))
    return 0


def title_of(case: Callable[[Machine], Iterator[Figure]]) -> str:
    """Return the first line of what a case says of itself."""
    return (case.__doc__ or "").splitlines()[0]


def build_program(work: Path) -> Program:
    """Build the program for this interpreter; return the build without the gate.

    The interpreter is the one behind links, which take time themselves.
    """
    python = os.path.realpath(sys.executable)
    command = [sys.executable, str(ROOT / "tools" / "build_zipapp.py")]
    command += ["--python", python, "--out", str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the program cannot be built: {done.stderr.strip()}")
    return Program(python, str(work / "regsync-nofips.pyz"))
