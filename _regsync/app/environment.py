"""What this process gives to a command: environment, files, clock, chance, signals.

Owns: the edge to the process.
May not know: arguments, configurations, what a command does.
Follows: docs/specification.md section 1.6, docs/design.md sections 2 and 9.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

import anyio

from _regsync.app.console import Console
from _regsync.app.progress import Work, show_progress
from _regsync.errors import ConfigError
from _regsync.registry.transport import Machine, Transport
from _regsync.text import printable, reason_of, time_text

LARGEST_LOGIN_FILE = 4 * 1024 * 1024  # bytes; login files are far smaller
MOST_OPEN_FILES = 65536  # or fewer, where the system allows fewer (docs/design.md section 9)

# New objects between two looks at the young ones by Python's collector of cycles.
_OBJECTS_BETWEEN_COLLECTIONS = 10_000


def connect(console: Console, log: Callable[..., None] | None = None) -> Transport:
    """Return what this process asks registries with; `log` stands in for the console's."""
    home = os.path.expanduser("~")  # unchanged where nobody knows it
    return Transport(
        Machine(
            environ=os.environ,
            home=None if home == "~" else home,
            read=read_login_file,
            chance=lambda: int.from_bytes(os.urandom(6), "big") / 2**48,
            wall=time.time,
            log=log or console.log,
            traces=console.shows("trace"),
            open_files=raise_file_limit(),
        )
    )


def read_login_file(path: str) -> bytes | None:
    """Return the content of a file, None where there is none; ConfigError if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return stream.read(LARGEST_LOGIN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = reason_of(error)
        raise ConfigError(f"{printable(path)} cannot be read: {reason}") from error


def raise_file_limit() -> int:
    """Raise the soft limit of open files as far as the system lets us; return the limit."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST_OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_OPEN_FILES
    if soft >= MOST_OPEN_FILES:
        return soft
    # Infinity is a negative number on some systems, so it is no limit to take the smaller of.
    limit = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def utc_now() -> str:
    return time_text(time.time())


def run_async(work: Callable[[], Awaitable[int]]) -> int:
    """Run a command's coroutine in an event loop of its own; return its exit status."""
    # What a run makes, directories on the way to cache_dir included, is for its user alone.
    umask = os.umask(0o077)
    # A run makes and drops some hundred objects a request. By default the collector of cycles looks
    # at them after every 700, and that costs 5 % of a run's CPU (docs/bodies.md section 4).
    thresholds = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *thresholds[1:])
    try:
        return anyio.run(run_awake_to_signals, work, backend="asyncio")
    finally:
        gc.set_threshold(*thresholds)
        os.umask(umask)


async def run_awake_to_signals(work: Callable[[], Awaitable[int]]) -> int:
    """Run `work` in an event loop that every signal wakes; return its exit status."""
    # Python calls a signal's handler only between two steps of its own. If a signal comes right before
    # the event loop waits, the handler is called when something else ends the wait. A loop that
    # receives any signal sets `signal.set_wakeup_fd`, and then each signal ends the wait. It receives
    # SIGURG: nobody sends that, and no other handler is replaced.
    unused = getattr(signal, "SIGURG", None)
    # Windows has no SIGURG: there every signal wakes the loop. Only the main thread gets signals.
    if unused is None or threading.current_thread() is not threading.main_thread():
        return await work()

    with anyio.open_signal_receiver(unused):
        return await work()


async def carry_out(
    act: Callable[[], Awaitable[object]],
    console: Console,
    work: Work,
    stop: anyio.Event | None = None,
) -> list[int]:
    """Await `act()`, and show how far its work is; return the signals that came meanwhile.

    The first SIGINT or SIGTERM sets `stop`, and `act` is to end by itself. The second one cancels it,
    and so does the first one where there is no `stop`.
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
        if console.has_display or console.has_heartbeat:
            tasks.start_soon(show_progress, console, work)
        await act()
        tasks.cancel_scope.cancel()
    return signals


async def listen_for_signals(
    on_signal: Callable[[int], None], numbers: Sequence[signal.Signals]
) -> None:
    """Call `on_signal` with the number of each signal, until cancelled."""
    try:
        with anyio.open_signal_receiver(*numbers) as received:
            async for number in received:
                on_signal(int(number))
    except NotImplementedError:
        # The event loop of Windows takes no signal handlers: an interrupt ends the program at once.
        return
