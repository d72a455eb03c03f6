#!/usr/bin/env python3
"""Measure the test registry of `conformance/` itself: it must never be what a test run waits for.

    python3 tools/bench_harness.py [-n ROUNDS] [--seconds S] [--python EXE] [--tls] [CASE ...]

`python -m conformance serve` runs on one core, the client on the others. The client is raw sockets
with requests made beforehand and answers counted, not parsed, so that it costs a small part of what
the server does. Each line gives the median of the rounds: the rate by the clock, and the rate by
the server's CPU time, which says on a busy machine too what one whole core would do. SHARED stands
where only that was enough, because others had the server's core: measure again on a quiet machine.

Owns: the requests that are measured and how they are counted. May not know: how the server works.
Invariant: every answer has the status and the length that it has to have, else the run fails;
uploads end with a digest that the registry checked. Needs Linux (/proc, taskset, MSG_TRUNC) and two
cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import selectors
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.copies import ACCEPT, push_http  # noqa: E402
from conformance.images import Image, Seed  # noqa: E402

__all__ = ["main"]

MIB = 1 << 20
# requests and MB a second that one core has to give
SMALL = 2000.0
LARGE = 300.0
CONNECTIONS = 16
STREAMS = 4
BLOB = 64 * MIB
_TICKS = os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """What is missing or went wrong, on one line."""


@dataclass(frozen=True)
class Round:
    """What one round moved: `amount` requests or bytes, in seconds of the clock and of both sides'
    CPU.
    """

    amount: float
    wall: float
    server: float
    client: float


class Peer:
    """A running server and how to reach it."""

    def __init__(self, address: str, pid: int, context: ssl.SSLContext | None) -> None:
        self.address = address
        self.pid = pid
        self.context = context
        host, _, port = address.rpartition(":")
        self._where = host, int(port)

    def connect(self) -> socket.socket:
        """Open one connection."""
        sock = socket.create_connection(self._where, timeout=60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return (
            self.context.wrap_socket(sock, server_hostname=self._where[0]) if self.context else sock
        )

    def cpu(self) -> float:
        """Return the CPU seconds that the server has used, in steps of a hundredth."""
        fields = (
            Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        )
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def head(self, method: str, target: str, *headers: str) -> bytes:
        """Write the head of a request as Go's clients do."""
        lines = [
            f"{method} {target} HTTP/1.1",
            f"Host: {self.address}",
            "User-Agent: bench/1",
            *headers,
        ]
        return "\r\n".join([*lines, "Accept-Encoding: identity", "", ""]).encode()


def answer(sock: socket.socket) -> bytes:
    """Read one whole answer that has a Content-Length."""
    got = b""
    while (end := got.find(b"\r\n\r\n")) < 0:
        got += received(sock)
    lengths = [
        line[15:]
        for line in got[:end].lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    ]
    while len(got) < end + 4 + int(lengths[0]):
        got += received(sock)
    return got


def received(sock: socket.socket) -> bytes:
    """Read what is there; BenchError at the end."""
    piece = sock.recv(1 << 16)
    if not piece:
        raise BenchError("the server closed a connection")
    return piece


# ---------------------------------------------------------------- small requests


def exchange_many(peer: Peer, requests: Sequence[bytes], status: bytes, seconds: float) -> int:
    """Keep one request on each connection for `seconds`; return how many answers came.

    Each connection goes through `requests`. They are asked once beforehand to learn how long each
    answer is, so that counting bytes is enough afterwards.
    """
    lengths = _learn(peer, requests, status)
    done = 0
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        for number in range(CONNECTIONS):
            sock = stack.enter_context(peer.connect())
            waiting.register(sock, selectors.EVENT_READ, [sock, number % len(requests), 0])
            sock.sendall(requests[number % len(requests)])
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for key, _ in waiting.select(1.0):
                sock, place, got = key.data
                piece = received(sock)
                if not got and not piece.startswith(status):
                    raise BenchError(f"unexpected answer: {piece[:200]!r}")
                got += len(piece)
                if got < lengths[place]:
                    key.data[2] = got
                    continue
                if got > lengths[place]:
                    raise BenchError(
                        f"an answer of {got} bytes, {lengths[place]} before: {piece[:200]!r}"
                    )
                done += 1
                place = (place + 1) % len(requests)
                key.data[1:] = place, 0
                sock.sendall(requests[place])
    return done


def _learn(peer: Peer, requests: Sequence[bytes], status: bytes) -> list[int]:
    lengths = []
    with peer.connect() as sock:
        for request in requests:
            sock.sendall(request)
            if request.startswith(b"HEAD"):
                said = received(sock)
                while not said.endswith(b"\r\n\r\n"):
                    said += received(sock)
            else:
                said = answer(sock)
            if not said.startswith(status):
                raise BenchError(f"unexpected answer: {said[:200]!r}")
            lengths.append(len(said))
    return lengths


Run = Callable[[float], float]


def case_head(peer: Peer, image: Image) -> Run:
    """HEAD of manifests by tag: what a sync without changes does"""
    requests = [peer.head("HEAD", "/v2/bench/small/manifests/v1", f"Accept: {ACCEPT}")]
    return lambda seconds: exchange_many(peer, requests, b"HTTP/1.1 200 ", seconds)


def case_get(peer: Peer, image: Image) -> Run:
    """GET of manifests by digest"""
    requests = [peer.head("GET", f"/v2/bench/small/manifests/{image.top}", f"Accept: {ACCEPT}")]
    return lambda seconds: exchange_many(peer, requests, b"HTTP/1.1 200 ", seconds)


def case_missing(peer: Peer, image: Image) -> Run:
    """HEAD of blobs that are not there"""
    requests = [peer.head("HEAD", f"/v2/bench/small/blobs/sha256:{n:064x}") for n in range(16)]
    return lambda seconds: exchange_many(peer, requests, b"HTTP/1.1 404 ", seconds)


def case_mount(peer: Peer, image: Image) -> Run:
    """POSTs that mount a blob"""
    digest = next(iter(image.blobs))
    target = f"/v2/bench/other/blobs/uploads/?mount={digest}&from=bench%2Fsmall"
    requests = [peer.head("POST", target, "Content-Length: 0")]
    return lambda seconds: exchange_many(peer, requests, b"HTTP/1.1 201 ", seconds)


def case_put(peer: Peer, image: Image) -> Run:
    """PUTs of manifests"""
    kind = f"Content-Type: {image.media_type}"
    head = peer.head(
        "PUT", "/v2/bench/small/manifests/v2", kind, f"Content-Length: {len(image.body)}"
    )
    return lambda seconds: exchange_many(peer, [head + image.body], b"HTTP/1.1 201 ", seconds)


def case_post(peer: Peer, image: Image) -> Run:
    """small blobs: POST with the digest and 2 KB of body"""
    data = Seed(7).blob(2000)
    target = f"/v2/bench/small/blobs/uploads/?digest=sha256:{hashlib.sha256(data).hexdigest()}"
    kind = "Content-Type: application/octet-stream"
    head = peer.head("POST", target, kind, f"Content-Length: {len(data)}")
    return lambda seconds: exchange_many(peer, [head + data], b"HTTP/1.1 201 ", seconds)


# ---------------------------------------------------------------- bodies


def in_streams(move: Callable[[Callable[[], bool]], int], seconds: float) -> float:
    """Run `move` in threads until the time is over; return the bytes that all of them moved."""
    end = time.perf_counter() + seconds
    moved: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            moved.append(move(lambda: time.perf_counter() < end))
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=run) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise BenchError(f"a stream broke: {failures[0]!r}")
    return float(sum(moved))


def case_download(peer: Peer, image: Image) -> Run:
    """GETs of a blob of 64 MiB on four connections"""
    digest, data = large()
    request = peer.head("GET", f"/v2/bench/large/blobs/{digest}")
    # On Linux TCP drops what MSG_TRUNC reads without copying it: a client that costs next to
    # nothing.
    flags = 0 if peer.context else socket.MSG_TRUNC

    def move(more: Callable[[], bool]) -> int:
        moved = 0
        buffer = bytearray(MIB)
        with peer.connect() as sock:
            while more():
                sock.sendall(request)
                got = b""
                while b"\r\n\r\n" not in got:
                    got += received(sock)
                if not got.startswith(b"HTTP/1.1 200 "):
                    raise BenchError(f"unexpected answer: {got[:200]!r}")
                missing = len(data) - len(got.partition(b"\r\n\r\n")[2])
                while missing:
                    count = sock.recv_into(buffer, min(missing, MIB), flags)
                    if not count:
                        raise BenchError("the server closed a connection")
                    missing -= count
                moved += len(data)
        return moved

    return lambda seconds: in_streams(move, seconds)


def case_upload(peer: Peer, image: Image) -> Run:
    """PUTs of a blob of 64 MiB on four connections, each verified"""
    digest, data = large()
    start = peer.head("POST", "/v2/bench/large/blobs/uploads/", "Content-Length: 0")

    def move(more: Callable[[], bool]) -> int:
        moved = 0
        with peer.connect() as sock:
            while more():
                sock.sendall(start)
                said = answer(sock).decode()
                where = urlsplit(
                    next(line[10:] for line in said.split("\r\n") if line[:9] == "Location:")
                )
                target = f"{where.path}?{where.query}&digest={digest}"
                kind = "Content-Type: application/octet-stream"
                sock.sendall(peer.head("PUT", target, kind, f"Content-Length: {len(data)}"))
                sock.sendall(data)
                if not answer(sock).startswith(b"HTTP/1.1 201 "):
                    raise BenchError("an upload was refused")
                moved += len(data)
        return moved

    return lambda seconds: in_streams(move, seconds)


def large() -> tuple[str, bytes]:
    """Make the large blob and its digest."""
    data = Seed(8).blob(BLOB)
    return f"sha256:{hashlib.sha256(data).hexdigest()}", data


# ---------------------------------------------------------------- running


Case = Callable[[Peer, Image], Run]
CASES: Mapping[str, tuple[Case, bool]] = {
    "head": (case_head, True),
    "get": (case_get, True),
    "missing": (case_missing, True),
    "mount": (case_mount, True),
    "put": (case_put, True),
    "post": (case_post, True),
    "download": (case_download, False),
    "upload": (case_upload, False),
}


@contextlib.contextmanager
def serving(python: str, work: Path, *, tls: bool) -> Iterator[Peer]:
    """Run the harness's own command on core 0 and keep this process off it."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        raise BenchError("two cores are needed: one for the server, one for the client")
    command = ["taskset", "-c", str(min(cores)), python, "-m", "conformance", "serve"]
    context = None
    if tls:
        context = ssl.create_default_context(cafile=str(certificate(work)))
        command += ["--tls", str(work / "cert.pem"), str(work / "key.pem")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if not said.startswith("serving "):
                raise BenchError(f"the server did not start: {said!r}")
            os.sched_setaffinity(0, cores - {min(cores)})
            yield Peer(said.split("//")[1].strip(), process.pid, context)
        finally:
            os.sched_setaffinity(0, cores)
            process.terminate()


def certificate(work: Path) -> Path:
    """Make a certificate for loopback."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += [
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=bench",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    command += ["-keyout", str(work / "key.pem"), "-out", str(work / "cert.pem")]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError:
        raise BenchError("openssl is not installed") from None
    return work / "cert.pem"


def timed(peer: Peer, run: Run, seconds: float) -> Round:
    """Run once and count what both sides spent."""
    wall = time.perf_counter()
    server = peer.cpu()
    client = time.process_time()
    amount = run(seconds)
    return Round(
        amount,
        time.perf_counter() - wall,
        peer.cpu() - server,
        max(time.process_time() - client, 1e-9),
    )


def line(name: str, rounds: Sequence[Round], *, small: bool) -> str:
    """Say what a case came to, beside what it has to."""
    unit, scale, goal = ("req/s", 1.0, SMALL) if small else ("MB/s", 1e6, LARGE)
    rates = sorted(each.amount / scale / each.wall for each in rounds)
    by_cpu = statistics.median(
        each.amount / scale / max(each.server, 1 / _TICKS) for each in rounds
    )
    rate = statistics.median(rates)
    busy = statistics.median(each.server / each.wall for each in rounds)
    client = statistics.median(each.client / max(each.server, 1 / _TICKS) for each in rounds)
    # The client is never what is waited for: a server that did not get its core had to share it.
    verdict = "met" if rate >= goal else "NOT MET" if busy > 0.8 or by_cpu < goal else "SHARED"
    return (
        f"  {name:<9} {rate:6.0f} {unit} ({rates[0]:.0f}-{rates[-1]:.0f}), at least {goal:.0f}: {verdict:<8}"
        f" {by_cpu:6.0f} a second of its CPU ({busy:.0%} used); client's CPU {client:.2f} of the server's"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0; 1 when something needed is missing or failed."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="cases: "
        + "; ".join(f"{name}: {case.__doc__}" for name, (case, _) in CASES.items()),
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all, in the order below")
    parser.add_argument("-n", dest="rounds", type=int, default=5, help="rounds of each case (5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long one round takes (2)")
    parser.add_argument(
        "--python", default=sys.executable, metavar="EXE", help="the server's interpreter"
    )
    parser.add_argument(
        "--tls", action="store_true", help="over HTTPS; the client then costs as much"
    )
    options = parser.parse_args(argv)
    try:
        unknown = [name for name in options.cases if name not in CASES]
        if unknown:
            raise BenchError(f"no such case: {', '.join(unknown)} (there are {', '.join(CASES)})")
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            measure(options, Path(directory))
    except BenchError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    return 0


def measure(options: argparse.Namespace, work: Path) -> None:
    """Run the chosen cases and print each figure as soon as it is known."""
    print(
        f"medians of {options.rounds} rounds of {options.seconds:g} s; load {os.getloadavg()[0]:.1f} before"
    )
    for name in options.cases or CASES:
        case, small = CASES[name]
        with serving(options.python, work, tls=options.tls) as peer:
            image = Seed(6).image(sizes=(1000, 2000))
            push_http(image, peer.address, "bench/small", "v1", context=peer.context)
            if case is case_download:
                digest, data = large()
                blob = Image("", "", {}, {digest: data})
                push_http(blob, peer.address, "bench/large", context=peer.context)
            run = case(peer, image)
            run(0.2)
            rounds = [timed(peer, run, options.seconds) for _ in range(options.rounds)]
        print(line(name, rounds, small=small), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    sys.exit(main())
