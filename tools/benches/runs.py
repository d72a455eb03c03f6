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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from conformance.client.copies import ACCEPT, push_http
from conformance.content.images import Image
from conformance.messages import Request
from conformance.programs import docker_registry
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
    peak: int  # bytes that were resident at once

    def __str__(self) -> str:
        return f"{self.wall:.2f} s, {self.cpu:.2f} s of CPU, {self.peak / MB:.0f} MB"


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
    """A docker-registry that is running: filled by pushes, asked what it holds and what came."""

    def __init__(self, address: str, home: Path) -> None:
        self.address = address
        self._log = home / "registry.log"
        self._read = 0  # characters of the log
        self._marks = 0
        self._sizes: dict[str, int] = {}  # of blobs and manifests, by digest or REPOSITORY:TAG

    def announce(self, images: Images) -> None:
        """Learn how large things are: a log tells what was sent, not what came."""
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                self._sizes[f"{repository}:{tag}"] = len(image.body)
                self._sizes |= {digest: len(body) for digest, body in image.contents().items()}

    def push(self, images: Images) -> None:
        """Push images."""
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                push_http(image, self.address, repository, tag)

    def check(self, images: Images) -> None:
        """Raise BenchError unless each tag names its image."""
        with closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            for repository, tagged in images.items():
                for tag, image in tagged.items():
                    path = f"/v2/{repository}/manifests/{tag}"
                    connection.request("GET", path, headers={"Accept": ACCEPT})
                    if connection.getresponse().read() != image.body:
                        raise BenchError(f"{repository}:{tag} is not at the target as it should be")

    def take_requests(self) -> Tally:
        """Return the requests since the last time, by class, and bytes of manifests and blobs."""
        self._marks += 1
        mark = f"/v2/?mark={self._marks}"
        with closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            connection.request("GET", mark)
            connection.getresponse()
        text = ""
        while f'"{mark}"' not in text:  # the log comes a little later
            time.sleep(0.01)
            text = self._log.read_text()[self._read :]
        self._read += len(text)
        tally = Tally()
        for line in text.splitlines():
            if 'msg="response completed' in line and "/v2/?mark=" not in line:
                name, size = self._classify(line)
                tally.add(name, [size])
        return tally

    def _classify(self, line: str) -> tuple[str, int]:
        """Return the class of the request on a line of the log, and its bytes.

        Listings and mounts stand apart, all others by method and kind.
        """
        found = re.findall(r'http\.(\w+\.\w+)=(?:"([^"]*)"|(\S+))', line)
        fields = {name: quoted or plain for name, quoted, plain in found}
        uri = fields["request.uri"]
        method = fields["request.method"]
        request = Request(method, uri, [])
        query = parse_qs(urlsplit(uri).query)
        name = f"{method} {request.kind}"
        size = 0
        if request.kind == "tag_list":
            name = "list"
        elif request.kind == "upload_start":
            is_mounted = "mount" in query and query.get("from") != [request.repository]
            name = "mount" if is_mounted and fields["response.status"] == "201" else "POST upload"

        if name in ("GET manifest", "GET blob") and fields["response.status"] in ("200", "206"):
            size = int(fields["response.written"])
        elif name == "PUT manifest":
            digest_or_tag = request.reference
            is_digest = ":" in digest_or_tag
            size = self._sizes[
                digest_or_tag if is_digest else f"{request.repository}:{digest_or_tag}"
            ]
        elif method in ("POST", "PUT") and "digest" in query:
            size = self._sizes[query["digest"][0]]
        return name, size


@contextmanager
def started_registries(count: int) -> Iterator[tuple[Path, list[Registry]]]:
    """Run so many empty registries; yield them, and a folder in memory for whatever runs."""
    place = MEMORY if os.path.isdir(MEMORY) else None
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="bench-", dir=place, ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(made))
        registries = []
        for number in range(count):
            home = folder / f"registry-{number}"
            address = stack.enter_context(docker_registry(home))
            registries.append(Registry(address, home))
        work = folder / "home"
        work.mkdir()
        yield work, registries


Case = TypeVar("Case")


def choose(names: Sequence[str], cases: Mapping[str, Case]) -> dict[str, Case]:
    """Return the named cases, or all of them where none is named."""
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise BenchError(f"no such case: {', '.join(unknown)} (there are {', '.join(cases)})")
    return {name: cases[name] for name in names or cases}
