"""Connect a command to its process: login files, limits, signals, the event loop.

Follows: docs/specification.md section 1.6, docs/design.md sections 2 and 9.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from _regsync import edge
from _regsync.app.console import Console
from _regsync.app.progress import Work, show_progress
from _regsync.config import Registry
from _regsync.errors import ConfigError
from _regsync.registry.client import Machine
from _regsync.registry.runs import Transport
from _regsync.text import printable, reason_of, time_text

if TYPE_CHECKING:
    from _regsync.audit import Audit
    from _regsync.sync.report import Report

LARGEST_LOGIN_FILE = 4 * 1024 * 1024  # bytes read of a login file; login files are far smaller
MOST_OPEN_FILES = 65536  # unless the system allows fewer (docs/design.md section 9)

# The threshold of Python's garbage collector: new objects between two collections of the youngest
# generation.
_OBJECTS_BETWEEN_COLLECTIONS = 10_000


@asynccontextmanager
async def connected(
    console: Console, registries: Collection[Registry], log: Callable[..., None] | None = None
) -> AsyncIterator[Transport]:
    """Yield the transport of this process while its time-outs are watched, and close it in the end.

    Messages go to `log`, by default the console's. Raises ConfigError if a file that one of the
    `registries` names cannot be used: before any request is sent.
    """
    raise_file_limit()
    machine = Machine(read_login_file, log or console.log, traces=console.shows("trace"))
    transport = Transport(machine)
    transport.read_again(registries)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(transport.pool.watch)
        try:
            yield transport
        finally:
            transport.close()
            tasks.cancel_scope.cancel()


def read_login_file(path: str) -> bytes | None:
    """Read a login file.

    Returns None if it does not exist. Raises ConfigError if it is unreadable.
    """
    try:
        with open(path, "rb") as stream:
            return stream.read(LARGEST_LOGIN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = reason_of(error)
        raise ConfigError(f"{printable(path)} cannot be read: {reason}") from error


def raise_file_limit() -> None:
    """Raise the soft limit of open files up to MOST_OPEN_FILES, unless it is higher already, or a
    service may not change it.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(hard, MOST_OPEN_FILES)
    if 0 <= soft < limit:  # RLIM_INFINITY is negative on some systems
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def utc_now() -> str:
    return time_text(edge.current().wall())


def report_document(
    report: Report | Audit, started_at: str, elapsed: float, transport: Transport
) -> dict[str, object]:
    """Return the document of `--json`, with a random run id. `elapsed` is in seconds.

    `totals` has, beside those of the report, the number of requests by host and action, and of
    throttled requests by host.
    """
    requests = {
        host: dict(sorted(actions.items())) for host, actions in sorted(transport.requests.items())
    }
    throttled = dict(sorted(transport.throttled.items()))
    return {
        "schema": 1,
        "run_id": os.urandom(8).hex(),
        "started_at": started_at,
        "duration_s": round(elapsed, 3),
        "interrupted": report.interrupted,
        **report.as_json(),
        "totals": {**report.totals(), "requests": requests, "throttled": throttled},
    }


def run_async(work: Callable[[], Awaitable[int]]) -> int:
    """Run a command's coroutine in a new event loop. Returns its exit status."""
    # Each request allocates and frees some hundred objects. With the default threshold of 700, the
    # garbage collector takes 5 % of a run's CPU time (docs/design.md section 9).
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
    return anyio.run(work, backend="asyncio")


async def carry_out(
    act: Callable[[], Awaitable[object]],
    console: Console,
    work: Work,
    stop: anyio.Event | None = None,
) -> list[int]:
    """Await `act()` and show the progress of `work`. Returns the signals that arrived meanwhile.

    The first SIGINT or SIGTERM sets `stop`, which asks `act` to end, and the second cancels `act`.
    Without `stop`, the first signal cancels `act`.
    """
    signals: list[int] = []
    async with anyio.create_task_group() as tasks:

        def on_signal(number: int) -> None:
            is_first = not signals
            signals.append(number)
            if is_first and stop is not None:
                stop.set()
            else:
                tasks.cancel_scope.cancel()

        tasks.start_soon(listen_for_signals, on_signal, (signal.SIGINT, signal.SIGTERM))
        if console.shows_progress:
            tasks.start_soon(show_progress, console, work)
        await act()
        tasks.cancel_scope.cancel()  # ends the two tasks
    return signals


async def listen_for_signals(
    on_signal: Callable[[int], None], numbers: Sequence[signal.Signals]
) -> None:
    """Call `on_signal` with the number of each signal that arrives, until cancelled."""
    try:
        with anyio.open_signal_receiver(*numbers) as signals:
            async for number in signals:
                on_signal(int(number))
    except NotImplementedError:
        # Event loops on Windows have no signal handlers. An interrupt ends the program at once.
        return
