"""Be what stands around a program that is measured: a slow line, an outage, a clock.

    bench.py props delay SECONDS HOST:PORT        a TCP line, SECONDS long in each direction
    bench.py props away SECONDS BYTES HOST:PORT   a line that is cut for SECONDS, once, after BYTES
    bench.py props lag PYZ ARGUMENT...            the program, with a clock in its event loop

Each is a process of its own, so that its time and memory are not the client's. Only the standard
library is needed; `lag` imports anyio from the .pyz that it runs.

Owns: the props, and how one is started.
May not know: what is measured with them.
Invariants: the first line on standard output is the address to talk to; everything ends when its
standard input ends, so that nothing outlives the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from tools.benches.runner import ROOT

__all__ = ["add_options", "prop_command", "run", "started_line"]

PIECE = 64 * 1024  # bytes
TICK = 0.001  # seconds between two looks at the clock

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def started_line(*arguments: str) -> Iterator[str]:
    """Put one of the lines in front of a registry; yield the address to ask."""
    command = [sys.executable, *prop_command(*arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as running:
        assert running.stdout is not None
        try:
            yield running.stdout.readline().strip()
        finally:
            running.kill()


def prop_command(*arguments: str) -> list[str]:
    """Return what an interpreter is to run for one of the props."""
    return [str(ROOT / "tools" / "bench.py"), "props", *arguments]


async def until_stdin_ends() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


async def listen(serve: Serve, port: int = 0) -> tuple[asyncio.AbstractServer, str]:
    # A connection that the near end has closed lets go of its task, which may still wait for the far
    # end. Without this set the collector would destroy it.
    serving = set[asyncio.Task[None] | None]()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        serving.add(task)
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # at the end; asyncio would print it
        finally:
            writer.close()
            serving.discard(task)

    server = await asyncio.start_server(quietly, "127.0.0.1", port, limit=PIECE)
    return server, "{}:{}".format(*server.sockets[0].getsockname())


async def both_ways(*ways: Coroutine[None, None, None]) -> None:
    """Carry in both directions; where one breaks, the other ends too."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# ---------------------------------------------------------------- a line with a length


async def carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened: float, delay: float
) -> None:
    """Pass bytes on `delay` after they came, none of them earlier than `delay` after `opened`."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            due, data = await under_way.get()
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)

    arriving = asyncio.ensure_future(arrive())
    try:
        data = b"first"
        while data:
            data = await reader.read(PIECE)
            under_way.put_nowait((max(loop.time(), opened) + delay, data))
        await arriving
    finally:
        arriving.cancel()


async def delay(seconds: float, address: str) -> None:
    """Stand in front of `address`.

    Connecting costs a round trip too: the first bytes leave one later.
    """
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = asyncio.get_running_loop().time() + 2 * seconds
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        try:
            await both_ways(
                carry(reader, far_writer, opened, seconds), carry(far_reader, writer, 0.0, seconds)
            )
        finally:
            far_writer.close()

    server, here = await listen(serve)
    print(here, flush=True)
    await until_stdin_ends()
    server.close()


# ---------------------------------------------------------------- a line that is cut


class CutLine:
    """A line to `address` that breaks once, when `limit` bytes have gone to the far side.

    Connections end without warning, and new ones are refused for `seconds`.
    """

    def __init__(self, seconds: float, limit: int, address: str) -> None:
        self.host, _, self.port = address.rpartition(":")
        self.seconds = seconds
        self.limit = limit
        self.sent = 0
        self.is_open = asyncio.Event()
        self.is_due = asyncio.Event()
        self.is_back = asyncio.Event()
        self.writers: set[asyncio.StreamWriter] = set()

    async def run(self) -> None:
        """Listen, be away for a while when it is due, and listen at the same port again."""
        server, here = await listen(self.serve)
        print(here, flush=True)
        self.is_open.set()
        ended = asyncio.ensure_future(until_stdin_ends())
        due = asyncio.ensure_future(self.is_due.wait())
        await asyncio.wait([ended, due], return_when=asyncio.FIRST_COMPLETED)
        server.close()
        if ended.done():
            return
        for writer in tuple(self.writers):
            writer.transport.abort()
        await asyncio.sleep(self.seconds)
        server, _ = await listen(self.serve, port=int(here.rpartition(":")[2]))
        self.is_back.set()
        await ended
        server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self.host, int(self.port))
        both = {writer, far_writer}
        self.writers |= both
        try:
            await both_ways(
                self.pass_on(reader, far_writer, is_counted=True),
                self.pass_on(far_reader, writer, is_counted=False),
            )
        finally:
            self.writers -= both
            far_writer.close()

    async def pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_counted: bool
    ) -> None:
        while data := await reader.read(PIECE):
            if is_counted:
                self.sent += len(data)
                if self.sent >= self.limit:
                    self.is_due.set()
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


# ---------------------------------------------------------------- a clock in the event loop


class Gap(NamedTuple):
    """Seconds by which one tick came late: by the clock, and of the program's own CPU."""

    wall: float
    cpu: float


def lag(pyz: str, arguments: Sequence[str]) -> int:
    """Run the program with a ticker beside each run; print the longest gaps as JSON.

    They go to standard error. `cpu_ms` is the longest that the program itself computed between two
    ticks; `wall_ms` has in it what the system gave to others meanwhile.
    """
    sys.path[:0] = ["{}/cp{}{}".format(pyz, *sys.version_info[:2]), pyz]
    with suppress(ImportError):  # there is no tree for this interpreter
        importlib.import_module("tree_importer")  # as the file itself does when it starts
    import anyio

    import regsync
    from _regsync.sync.run import Run

    gaps: list[Gap] = []

    async def tick() -> None:
        while True:
            wall = time.perf_counter()
            cpu = time.thread_time()
            await anyio.sleep(TICK)
            gaps.append(Gap(time.perf_counter() - wall - TICK, time.thread_time() - cpu))

    run_all = Run._run_lookups_and_copies

    async def timed(self: Run, *given: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            await run_all(self, *given)
            tasks.cancel_scope.cancel()

    Run._run_lookups_and_copies = timed  # type: ignore[method-assign, assignment]
    status = regsync.main(arguments)
    walls = sorted(1000 * gap.wall for gap in gaps)
    cpus = sorted(1000 * gap.cpu for gap in gaps)
    rank = len(gaps) * 99 // 100
    longest = {
        "wall_ms": walls[-1],
        "cpu_ms": cpus[-1],
        "wall_p99_ms": walls[rank],
        "cpu_p99_ms": cpus[rank],
    }
    sys.stderr.write(json.dumps(longest) + "\n")
    return status


# ---------------------------------------------------------------- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("prop", choices=("delay", "away", "lag"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> int:
    """Be one of the props until standard input ends."""
    arguments: list[str] = options.arguments
    if options.prop == "lag":
        return lag(arguments[0], arguments[1:])
    if options.prop == "delay":
        asyncio.run(delay(float(arguments[0]), arguments[1]))
    else:
        asyncio.run(CutLine(float(arguments[0]), int(arguments[1]), arguments[2]).run())
    return 0
