"""Sync again and again, with the files as they are before each cycle.

Invariants: if the configuration becomes invalid, the last valid one stays in force. A message or a
failure that repeats in the next cycle is not shown again.
Follows: docs/specification.md section 1.5, docs/design.md section 10 ("Health", "Watch").
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import anyio.lowlevel

from _regsync import __version__
from _regsync.app.console import Console
from _regsync.app.environment import connected, listen_for_signals, report_document, utc_now
from _regsync.app.health import serving
from _regsync.app.progress import show_progress
from _regsync.config import Config
from _regsync.errors import ConfigError
from _regsync.pins import Lock
from _regsync.registry.runs import Transport
from _regsync.state import StateFile
from _regsync.sync.report import Outcome, Report
from _regsync.sync.run import Run
from _regsync.text import duration_text

STANDSTILL_SECONDS = 900.0  # without progress, after which /healthz answers 503

Log = Callable[..., None]  # has the parameters of `Console.log`


class Inputs(NamedTuple):
    """What the files of a watch say before a cycle."""

    config: Config
    lock: Lock | None  # None without `--locked`


# Reads all files. Raises ConfigError if one is invalid.
Load = Callable[[Log], Inputs]


async def run(
    console: Console, load: Load, interval: float, health_address: str, health_port: int
) -> int:
    """Run cycles, `interval` seconds apart, until SIGINT or SIGTERM. Returns the exit status.

    Health probes are answered at `health_address` and `health_port`; port 0 means any free port.
    Raises ConfigError if the configuration or the lock is invalid, or if the port cannot be opened.
    """
    news = News(console)
    inputs = load(news.log)
    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        signals.append(signal.SIGHUP)
    async with connected(console, inputs.config.registries_in_use, news.log) as transport:
        watch = Watch(console, news, transport, load, inputs, interval)
        with serving(health_address, health_port, watch.answer_probe) as bound_port:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen_for_signals, watch.on_signal, signals)
                # This checkpoint lets the listener start, so that a signal that is sent after the
                # next log line is not lost.
                await anyio.lowlevel.checkpoint()
                text = (
                    f"waiting {duration_text(interval)} between cycles; "
                    f"health probes at {health_address} port {bound_port}"
                )
                console.log("info", "listening", text)
                await watch.run_cycles()
                tasks.cancel_scope.cancel()  # ends the listener
    return 0


class Watch:
    """The loop over cycles. All cycles share the transport and the state files."""

    def __init__(
        self,
        console: Console,
        news: News,
        transport: Transport,
        load: Load,
        inputs: Inputs,
        interval: float,  # seconds between two cycles
    ) -> None:
        self._console = console
        self._news = news
        self._transport = transport
        self._load = load
        self._interval = interval
        # State files by cache_dir. A reload may change cache_dir.
        self._states = dict[str | None, StateFile]()
        self._take(inputs)
        self._stop = anyio.Event()  # set by the first SIGINT or SIGTERM
        self._wake = anyio.Event()  # set to end the pause between two cycles
        self._cycle_number = 0  # of the current or the last cycle
        self._cycle_scope = anyio.CancelScope()  # cancels the current cycle
        self._health = Health(due=anyio.current_time())

    def _take(self, inputs: Inputs) -> None:
        """Put what the files say into force. Raises ConfigError if `min_age` has no usable state."""
        cache_dir = inputs.config.cache_dir
        if cache_dir not in self._states:
            self._states[cache_dir] = StateFile(cache_dir, self._news.log)
        if inputs.config.has_ages:
            self._states[cache_dir].load(is_needed=True)
        self._inputs = inputs

    def answer_probe(self, path: str) -> tuple[int, dict[str, object]]:
        """Return the HTTP status and the JSON document for `/healthz` or `/readyz`.

        It is called in other threads, which have no event loop: the loop's clock is `monotonic`.
        """
        return self._health.answer(path, time.monotonic(), self._transport.last_progress)

    def on_signal(self, number: int) -> None:
        """Stop after the current cycle on SIGINT or SIGTERM, or at once on a second one.

        Any signal, SIGHUP included, ends the pause between two cycles.
        """
        if number in (signal.SIGINT, signal.SIGTERM):
            is_second = self._stop.is_set()
            if is_second:
                self._cycle_scope.cancel()
            self._stop.set()
            self._health.status = "stopping"
        self._wake.set()

    async def run_cycles(self) -> None:
        """Run cycles, with the pause between them, until SIGINT or SIGTERM."""
        while not self._stop.is_set():
            # A signal during the cycle sets this event too, so that no pause follows the cycle.
            self._wake = anyio.Event()
            self._news.begin_cycle()
            self._cycle_number += 1
            if self._cycle_number > 1:
                self._reload()
            await self._run_cycle()
            if self._interval > self._transport.machine.timeouts.idle_connection:
                # Idle connections would expire before the next cycle, which opens new ones.
                self._transport.close()
            with anyio.move_on_after(self._interval):
                await self._wake.wait()

    def _reload(self) -> None:
        """Read all files again, and put them into force together.

        If one is invalid, log the error and keep what was in force.
        """
        before = self._inputs
        try:
            inputs = self._load(self._news.log)
            # Certificate files may have changed although the configuration has not.
            self._transport.read_again(inputs.config.registries_in_use)
            self._take(inputs)
        except ConfigError as error:
            for problem in error.problems or [error]:
                text = f"{error.code}: {problem}; the last valid configuration stays in force"
                self._news.log("error", "reload_failed", text, code=error.code, hint=error.hint)
            self._health.reload_error = str(error)
            return

        if inputs != before or self._health.reload_error is not None:
            text = f"now in force: {len(inputs.config.mappings)} mappings"
            if inputs.lock is not None:
                text += f", {len(inputs.lock)} locked images"
            self._console.log("info", "reloaded", text)
        self._health.reload_error = None

    async def _run_cycle(self) -> None:
        """Sync all mappings once and show the results. After a signal no more images are copied."""
        start = anyio.current_time()
        started_at = utc_now()
        self._health.due = start
        config = self._inputs.config
        for warning in config.warnings:
            self._news.log("warning", "config", warning)
        self._transport.begin_run(config.registries_in_use)
        report = Report()
        state = self._states[config.cache_dir]
        state.load()
        work = Run(
            self._transport,
            config,
            self._news.show_outcome,
            report,
            state=state,
            lock=self._inputs.lock,
        )
        async with anyio.create_task_group() as tasks:
            self._cycle_scope = tasks.cancel_scope  # a second signal cancels it
            if self._console.has_progress_line:
                tasks.start_soon(show_progress, self._console, work.scheduler)
            await work.sync(self._stop)
            tasks.cancel_scope.cancel()  # ends `show_progress`

        duration = anyio.current_time() - start
        if self._console.writes_json:
            document = report_document(report, started_at, duration, self._transport)
            self._console.print_document(document)
        cycle = {
            "number": self._cycle_number,
            "started_at": started_at,
            "duration_s": round(duration, 3),
            "exit_status": report.exit_status(),
            "images": report.totals()["images"],
        }
        # Exit status 1 means that some images failed and others did not, which is enough to be
        # ready.
        if self._health.status == "starting" and report.exit_status() in (0, 1):
            self._health.status = "ready"
        self._health.cycle = cycle
        self._health.due = anyio.current_time() + self._interval
        if report.has_something_to_report:
            text = f"cycle {self._cycle_number}: {'; '.join(report.summary(duration))}"
            self._console.log("info", "cycle", text, **cycle)


@dataclass
class Health:
    """The state that health probes report, in other threads. Times are those of the event loop's
    clock, in seconds.
    """

    due: float  # the start of the current cycle; between two cycles, the planned start of the next
    # "ready" after the first successful cycle, "stopping" after the first signal
    status: str = "starting"
    cycle: dict[str, object] | None = None  # the result of the last finished cycle
    reload_error: str | None = None  # why the configuration file is not in force; None if it is

    def answer(self, path: str, now: float, last_progress: float) -> tuple[int, dict[str, object]]:
        """Return the HTTP status (200 or 503) and the JSON document for `/healthz` or `/readyz`.

        `/healthz` is 503 if STANDSTILL_SECONDS have passed since the last cycle was due and since
        `last_progress`, when a registry last answered or bytes of a blob were last moved. `/readyz`
        is 503 before the first successful cycle and after the first signal.
        """
        if path == "/healthz":
            has_passed = now - max(self.due, last_progress) < STANDSTILL_SECONDS
        else:
            has_passed = self.status == "ready"
        document: dict[str, object] = {
            "status": self.status,
            "version": __version__,
            "cycle": self.cycle,
            "reload_error": self.reload_error,
        }
        return 200 if has_passed else 503, document


class News:
    """Shows what a cycle has to say, except what the previous cycle has said too."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # What this cycle and the previous one had to say, shown or not: (event, message) of each
        # line, and (source, target, code, HTTP status) of each failure, because the message of a
        # failure may contain a time.
        self._said = set[tuple[object, ...]]()
        self._said_before = set[tuple[object, ...]]()

    def begin_cycle(self) -> None:
        self._said, self._said_before = set(), self._said
        # The same failure may occur again after months. Its hint is then needed again.
        self._console.shown_hints.clear()

    def _is_new(self, *said: object) -> bool:
        """Record what this cycle has to say. Returns False if the previous one has said it too."""
        self._said.add(said)
        return said not in self._said_before

    def log(self, level: str, event: str, message: str, **fields: object) -> None:
        """Log a line unless it is a repetition. Lines at DEBUG and TRACE are always logged."""
        if level in ("trace", "debug") or self._is_new(event, message):
            self._console.log(level, event, message, **fields)

    def show_outcome(self, outcome: Outcome) -> None:
        """Show the result of an image, unless it is a failure that is a repetition."""
        error = outcome.error
        # Only errors that are responses of a registry have an HTTP status.
        status = getattr(error, "status", None)
        if error is None or self._is_new(outcome.source, outcome.target, error.code, status):
            self._console.show_outcome(outcome)
