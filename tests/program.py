"""The program as tests know it: a command line, an environment and standard input in; a status and
text out.

`run_process` starts it as a process and runs any executable. `run_virtual` runs it on the event loop
of the test, through its door `regsync.run(argv, edge)`: the edge is the program's whole world, so
that its network is the harness's in memory, and its clock one that jumps. Which program that is, a
test never knows: the checkout's, or an executable (pytest's option `--file`).

Invariant: nothing here imports anything of `_regsync`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import anyio
import anyio.lowlevel

from conformance.memory import End, Network

ROOT = Path(__file__).resolve().parent.parent
NEW_YEAR = 1767225600.0  # 2026-01-01, when the time of a virtual run begins, in seconds since 1970

# What a stream of the edge returns where it would block: what to wait for.
WANT_READ = -1
WANT_WRITE = -2


class Chosen:
    """Which program is run (option of pytest)."""

    file: Path | None = None  # an executable, in place of the checkout
    is_static = False  # whether it needs no interpreter


@dataclass(frozen=True)
class Ran:
    """One finished run: what the shell and the user got."""

    status: int
    out: str
    err: str
    # How long it took on a virtual clock.
    seconds: float = 0.0

    @property
    def report(self) -> dict[str, Any]:
        """The one JSON document on standard output."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def images(self) -> list[dict[str, Any]]:
        return list(self.report["images"])

    @property
    def totals(self) -> dict[str, Any]:
        return dict(self.report["totals"])

    @property
    def failed(self) -> list[str]:
        """The lines about failed images."""
        return [line for line in self.err.splitlines() if line.startswith("failed ")]

    def statuses(self) -> list[str]:
        """Each image's outcome, in the order of the targets' names."""
        return [
            each["status"] for each in sorted(self.images, key=lambda each: str(each["target"]))
        ]


# The program as a process


def words(pyz: Path | None = None, *options: str) -> list[str]:
    """Return the words that start the program as a process: the checkout, a zipapp, or the file.

    `options` are the interpreter's, if there is one.
    """
    if Chosen.file is not None:
        return [str(Chosen.file)]
    return [sys.executable, *options, str(pyz or ROOT / "regsync.py")]


def run_process(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str | bytes = b""
) -> Ran:
    """Run the program as a process, with this environment on top of the test's."""
    done = subprocess.run(
        [*words(), *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env={**os.environ, **(env or {})},
        check=False,
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_here(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str | bytes = b""
) -> Ran:
    """Run the program on sockets, but in this process, for tests that replace what the interpreter
    or the system does.
    """
    text = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = importlib.import_module("regsync").main(list(arguments))
    return Ran(status, out.getvalue(), err.getvalue())


def started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start the program as a process; its home is this process's (temporary) one."""
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
        **options,
    }
    command = [*words(), *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)


@functools.cache
def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of what `--json` writes."""
    path = ROOT / "tests" / "report.schema.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


@functools.cache
def command_names() -> list[str]:
    """Return the names of the commands, as `--help` lists them."""
    listed = run_process("--help").out.partition("\ncommands ")[2].partition("\n\n")[0]
    return re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE)


@functools.cache
def help_of(command: str) -> str:
    """Return what a command says to `--help`."""
    ran = run_process(command, "--help")
    assert (ran.status, ran.err) == (0, "")
    return ran.out


# The program on the event loop of the test


class Stream:
    """A connection of the network in memory, as the program's edge has it.

    `recv_into` and `send_now` return a count of bytes, or WANT_READ or WANT_WRITE where they would
    block; `recv_into` returns 0 at the end. They raise OSError where the connection is broken.
    """

    def __init__(self, end: End) -> None:
        self._end = end
        self._waiting: set[int] = set()

    def recv_into(self, buffer: memoryview) -> int:
        with as_by_the_kernel():
            count = self._end.read_into(buffer)
        return WANT_READ if count is None else count

    def send_now(self, data: memoryview) -> int:
        with as_by_the_kernel():
            count = self._end.write(data)
        return WANT_WRITE if count is None else count

    async def wait(self, want: int) -> None:
        assert want not in self._waiting, "two tasks wait for one direction"
        self._waiting.add(want)
        try:
            await (self._end.readable() if want == WANT_READ else self._end.writable())
        finally:
            self._waiting.discard(want)
        if self._end.closed:
            raise ConnectionAbortedError("the connection was closed")

    def close(self) -> None:
        self._end.close()


@contextlib.contextmanager
def as_by_the_kernel() -> Iterator[None]:
    """Raise the error of a broken connection as a socket does, with its number and words."""
    try:
        yield
    except ConnectionError as error:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error


class Edge(NamedTuple):
    """What the program takes from the world around it, and nothing else."""

    connect: Callable[[str, int], Awaitable[Any]]  # a stream to HOST, PORT; raises OSError
    start_tls: Callable[[Any, Any, str], Awaitable[Any]]  # a stream, a context, the host's name
    wall: Callable[[], float]  # the time of day, in seconds since 1970
    chance: Callable[[], float]  # a random number from 0 to 1
    in_thread: Callable[..., Awaitable[Any]]  # calls a function that blocks
    environ: Mapping[str, str]


def edge_of(
    network: Network, *, wall: Callable[[], float], chance: float, env: Mapping[str, str] | None
) -> Edge:
    """Return the edge of a program that lives on a network in memory.

    DNS, sockets and TLS are left out (a name with https is believed), and what would run in a
    worker thread runs at once, because a clock that jumps sees neither.
    """

    async def connect(host: str, port: int) -> Stream:
        return Stream(await network.connect(host, port))

    return Edge(connect, believe, wall, lambda: chance, call_at_once, {**os.environ, **(env or {})})


async def believe(below: Stream, context: object, host: str) -> Stream:
    """Stand in for a TLS handshake that succeeds."""
    assert context is not None, "https needs a context"
    await anyio.lowlevel.checkpoint()
    return below


async def call_at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    return function(*arguments)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def run_virtual(
    arguments: Sequence[str], edge: Edge, stdin: str | bytes = "", *, terminal: bool = False
) -> Ran:
    """Run the program on this event loop, with its own time-outs and pauses. With a `terminal` it
    writes its messages to one.
    """
    text = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
    umask = os.umask(0o022)
    os.umask(umask)
    began = anyio.current_time()
    with (
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = await importlib.import_module("regsync").run(arguments, edge)
    assert os.umask(umask) == umask  # a run that wants another gives it back
    return Ran(status, out.getvalue(), err.getvalue(), seconds=anyio.current_time() - began)
