"""A command at work: what the process gives to it, how signals reach it, how its end is told.

Owns: the edge to the process (environment, files, clock, chance), and the wiring of a run and of a
listing of tags.
May not know: arguments, configuration files, how anything is copied.
Invariants: connections are closed however a command ends.
Follows: docs/specification.md section 1.6, docs/design.md sections 2, 5 and 9.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any, Literal

import anyio

from _regsync.app.console import Console
from _regsync.app.progress import show_progress
from _regsync.config.model import Config, MappingRule, Registry
from _regsync.errors import ConfigError, Side
from _regsync.registry.transport import Machine, Transport
from _regsync.state.knowledge import Knowledge
from _regsync.sync.discovery import Discovery
from _regsync.sync.report import Report, analysis_lines
from _regsync.sync.run import Run
from _regsync.tags import TagRule
from _regsync.text import printable

LARGEST_LOGIN_FILE = 4 * 1024 * 1024  # bytes; more than any such file has
MOST_OPEN_FILES = 65536  # or as many as the system lets us open (docs/design.md section 9)

Rehearsal = Literal["plan", "analysis"]


async def run(
    config: Config,
    console: Console,
    image: tuple[MappingRule, str, str] | None = None,
    rehearsal: Rehearsal | None = None,
) -> int:
    """Run a configuration's mappings, or copy one image; return the exit status.

    `image` is its mapping, what it is called at the source, and what at the target.
    """
    began = anyio.current_time()
    started_at = utc_now()
    run_id = os.urandom(8).hex()
    report = Report()
    transport = connect(console)
    work = Run(transport, config, console.outcome, report, rehearsal or "sync")
    signals = list[int]()
    stop = anyio.Event()
    with closing(transport):
        async with anyio.create_task_group() as tasks:

            def on_signal(number: int) -> None:
                signals.append(number)
                stop.set()  # take nothing new, and let end what is under way
                if len(signals) > 1:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(listen_for_signals, on_signal, (signal.SIGINT, signal.SIGTERM))
            if console.live or console.heartbeat:
                tasks.start_soon(show_progress, console, work.scheduler)
            if image is None:
                await work.sync(stop)
            else:
                await work.copy(*image, stop)
            tasks.cancel_scope.cancel()

    elapsed = anyio.current_time() - began
    document = report.as_json(run_id, started_at, elapsed, transport.requests, transport.throttled)
    if work.dry_run is None:
        if image is None:
            console.summary(report, elapsed)
    elif rehearsal == "analysis":
        document = work.dry_run.analysis()
        show_lines(console, analysis_lines(document))
    else:
        document["dry_run"] = True
        show_lines(console, report.plan())
    if console.as_json:
        console.document(document)
    return 128 + signals[0] if report.interrupted else report.exit_status()


def show_lines(console: Console, lines: Sequence[str]) -> None:
    """Write results that the JSON document holds as well."""
    if not console.as_json:
        for line in lines:
            console.line(line)


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


async def list_tags(registry: Registry, repository: str, rule: TagRule, console: Console) -> int:
    """Show the tags of a repository that a rule selects, and for each other tag the reason why it
    is dropped; return the exit status.
    """
    with closing(connect(console)) as transport:
        transport.prepare(registry)
        discovery = Discovery(transport, Knowledge())
        source = discovery.repository(registry, repository, Side.SOURCE)
        kept, dropped, min_tags = await discovery.select(rule, source)

    for tag, reason in dropped.items():
        console.log("info", "tag_dropped", f"dropped, {reason:<12}  {tag}", tag=tag, reason=reason)
    message = f"{source}: {len(kept)} of {len(kept) + len(dropped)} tags are selected"
    if dropped:
        reason_counts = Counter(dropped.values()).most_common()
        summary = ", ".join(f"{count} {reason}" for reason, count in reason_counts)
        message += f" (dropped: {summary})"

    if kept:
        console.log("info", "selected", message)
    else:
        console.log("warning", "nothing_selected", message)
    if len(kept) < min_tags:
        message = f"{source}: min_tags asks for {min_tags}, not {len(kept)}"
        console.log("warning", "min_tags", message)

    if console.as_json:
        console.document({"repository": str(source), "tags": kept, "dropped": dict(dropped)})
    show_lines(console, kept)
    return 0


def connect(console: Console, log: Callable[..., None] | None = None) -> Transport:
    """Return what this process asks registries with; `log` stands in for the console's."""
    home = os.path.expanduser("~")  # itself where nobody knows it
    return Transport(
        Machine(
            environ=os.environ,
            home=None if home == "~" else home,
            read=read_credential_file,
            chance=lambda: int.from_bytes(os.urandom(6), "big") / 2**48,
            wall=time.time,
            log=log or console.log,
            open_files=raise_file_limit(),
        )
    )


def read_credential_file(path: str) -> bytes | None:
    """Return the content of a file, None where there is none; ConfigError if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return stream.read(LARGEST_LOGIN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = printable(error.strerror or str(error))
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
    if soft < MOST_OPEN_FILES:
        soft = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


async def run_awake_to_signals(work: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    """Run `work` in an event loop that every signal wakes; return its exit status.

    Python runs a signal's function only between two steps of its own. A signal that comes right
    before the event loop waits would be acted on when something else ends the wait. While the loop
    receives any signal, it sets `signal.set_wakeup_fd`, and then each signal ends the wait. SIGURG
    is one that nobody sends and that does nothing: the functions of the others stay as they are.
    """
    unused = getattr(signal, "SIGURG", None)
    # Windows has no SIGURG, but a loop that every signal wakes. Only the main thread gets signals.
    if unused is None or threading.current_thread() is not threading.main_thread():
        return await work(*arguments)

    with anyio.open_signal_receiver(unused):
        return await work(*arguments)


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
