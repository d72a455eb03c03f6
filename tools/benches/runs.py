"""Run a program between registries: what it took, and what it asked of them.

Registries are Debian's docker-registry processes on loopback, whose data are in memory and whose log
is read. Time, CPU and memory are the program's alone, start-up included.

Owns: how a run is measured; what one request was, as a registry's log tells it.
May not know: which programs there are, and what is compared with what.
Needs Linux.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from conformance.images import Image
from conformance.messages import Request
from conformance.programs import docker_registry
from conformance.walks import ACCEPT, push_http
from tests.least import Tally

__all__ = [
    "MB",
    "MIB",
    "REGSYNC",
    "ROOT",
    "BenchError",
    "Images",
    "Registry",
    "Spent",
    "choose",
    "run_measured",
    "started_registries",
]

ROOT = Path(__file__).resolve().parents[2]
REGSYNC = [sys.executable, str(ROOT / "regsync.py")]
MB = 1_000_000
MIB = 1 << 20
MEMORY = "/dev/shm"
MARK = "/v2/?mark"  # what is asked to divide a log

Images = Mapping[str, Mapping[str, Image]]  # repository -> tag -> image

# Forks from a small interpreter, because a child's peak memory begins with its parent's.
# RLIMIT_DATA counts all private memory that can be written: heap, buffers and the stacks of
# threads, touched or not, which are therefore made 1 MiB each (8 is usual). RLIMIT_AS would count
# the address space that allocators reserve and never use.
LAUNCHER = """\
import json, os, resource, sys, time
figures, data_limit, *command = sys.argv[1:]
began = time.perf_counter()
child = os.fork()
if not child:
    if int(data_limit):
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))
        resource.setrlimit(resource.RLIMIT_DATA, (int(data_limit), int(data_limit)))
    os.execv(command[0], command)
_, status, used = os.wait4(child, 0)
wall = time.perf_counter() - began
with open(figures, "w") as file:
    json.dump([wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024], file)
sys.exit(os.waitstatus_to_exitcode(status) % 256)
"""


class BenchError(Exception):
    """What is missing or went wrong, on one line."""


class Spent(NamedTuple):
    """What a run took."""

    wall: float  # seconds
    cpu: float  # seconds
    peak: float  # bytes that were resident at once

    def __str__(self) -> str:
        return f"{self.wall:6.2f} s, {self.cpu:5.2f} s of CPU, {self.peak / MB:3.0f} MB"


def run_measured(command: Sequence[str], home: Path, *, data_limit: int = 0) -> tuple[Spent, str]:
    """Run a program to its end, with at most `data_limit` bytes of memory of its own (0: no limit).

    Returns what it took, and its standard output. BenchError if its status is not 0.
    """
    figures = home / "figures"
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(figures), str(data_limit)]
    done = subprocess.run(
        [*launcher, *command],
        capture_output=True,
        text=True,
        env={"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-1500:]
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return Spent(*json.loads(figures.read_text())), done.stdout


class Registry:
    """A docker-registry: filled by pushes, asked what it holds, and at its end what it was asked."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.log = ""  # when it has ended

    def push(self, images: Images) -> None:
        """Push images."""
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                push_http(image, self.address, repository, tag)

    def check(self, images: Images) -> None:
        """Raise BenchError unless each tag names its image."""
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                if self._ask(f"/v2/{repository}/manifests/{tag}") != image.body:
                    raise BenchError(f"{repository}:{tag} is not at the target as it should be")

    def mark(self) -> None:
        """Begin another stretch of the log."""
        self._ask(MARK)

    def stretches(self, *pushed: Images) -> list[Tally]:
        """Return what was asked between marks, by class, and the bytes of manifests and blobs.

        A log tells what was sent, not what came: `pushed` are images that may have come.
        """
        sizes: dict[str, int] = {}  # by digest or REPOSITORY:TAG
        for images in pushed:
            for repository, tagged in images.items():
                for tag, image in tagged.items():
                    sizes[f"{repository}:{tag}"] = len(image.body)
                    sizes |= {digest: len(body) for digest, body in image.contents().items()}

        tallies = [Tally()]
        for line in self.log.splitlines():
            if 'msg="response completed' not in line:
                continue
            if MARK in line:
                tallies.append(Tally())
            else:
                name, size = classify(line, sizes)
                tallies[-1].add(name, [size])
        return tallies

    def _ask(self, path: str) -> bytes:
        with closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            connection.request("GET", path, headers={"Accept": ACCEPT})
            return connection.getresponse().read()


def classify(line: str, sizes: Mapping[str, int]) -> tuple[str, int]:
    """Return the class of the request on a line of a log, and its bytes.

    Listings and mounts stand apart, all others by method and kind.
    """
    found = re.findall(r'http\.(\w+\.\w+)=(?:"([^"]*)"|(\S+))', line)
    fields = {name: quoted or plain for name, quoted, plain in found}
    uri = fields["request.uri"]
    method = fields["request.method"]
    status = fields["response.status"]
    request = Request(method, uri, [])
    query = parse_qs(urlsplit(uri).query)
    if request.kind == "tag_list":
        return "list", 0
    if request.kind == "upload_start" and "digest" not in query:
        is_mounted = "mount" in query and query.get("from") != [request.repository]
        return "mount" if is_mounted and status == "201" else "POST upload", 0

    size = 0
    if method == "GET" and request.kind in ("manifest", "blob") and status in ("200", "206"):
        size = int(fields["response.written"])
    elif method == "PUT" and request.kind == "manifest":
        name = request.reference
        size = sizes[name if ":" in name else f"{request.repository}:{name}"]
    elif "digest" in query:
        size = sizes[query["digest"][0]]
    return f"{method} {request.kind}", size


@contextmanager
def started_registries(count: int) -> Iterator[tuple[Path, list[Registry]]]:
    """Run so many empty registries; yield a folder in memory for whatever runs, and them."""
    place = MEMORY if os.path.isdir(MEMORY) else None
    made = tempfile.TemporaryDirectory(prefix="bench-", dir=place, ignore_cleanup_errors=True)
    with made as folder:
        work = Path(folder, "home")
        work.mkdir()
        homes = [Path(folder, f"registry-{number}") for number in range(count)]
        with ExitStack() as stack:
            registries = [Registry(stack.enter_context(docker_registry(home))) for home in homes]
            yield work, registries
        for registry, home in zip(registries, homes, strict=True):
            registry.log = (home / "registry.log").read_text(encoding="utf-8")


Case = TypeVar("Case")


def choose(names: Sequence[str], cases: Mapping[str, Case]) -> dict[str, Case]:
    """Return the named cases, or all of them where none is named."""
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise BenchError(f"no such case: {', '.join(unknown)} (there are {', '.join(cases)})")
    return {name: cases[name] for name in names or cases}
