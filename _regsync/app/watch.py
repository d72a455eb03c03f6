"""Run cycles until a signal arrives, and read the configuration again before each cycle.

Owns: when a cycle begins, which changes of the configuration are logged, which events of a cycle are
shown, and the states that health probes report.
May not know: how a run works, HTTP.
Invariants: if the configuration becomes invalid, the last valid one stays in force. A message that
repeats in the next cycle is not shown again.
Follows: docs/specification.md section 1.5, docs/design.md section 10 ("Health", "Watch").
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio.lowlevel

from _regsync import __version__
from _regsync.app.console import Console
from _regsync.app.environment import connect, listen_for_signals, print_report, utc_now
from _regsync.app.health import serving
from _regsync.app.progress import show_progress
from _regsync.config import Config, ConfigFile
from _regsync.errors import ConfigError
from _regsync.state import FirstSeen, StateFile, first_seen_for
from _regsync.sync.lockfile import Lock, compare
from _regsync.sync.report import Outcome, Report
from _regsync.sync.run import Run
from _regsync.text import duration_text

STANDSTILL_SECONDS = 900.0  # without progress, after which /healthz answers 503
QUIET_SECONDS = 3600.0  # between two summaries at DEBUG while cycles have no news

# Global settings whose changes are logged by name.
SETTINGS = ("max_concurrent_transfers", "cache_dir", "cache_ttl", "staging_size_limit")

Log = Callable[..., None]  # has the parameters of `Console.log`


class InputFiles(NamedTuple):
    """How the files of a watch are read. Each function raises ConfigError if its file is invalid."""

    read_config: Callable[[], ConfigFile]  # returns the text of the configuration
    parse_config: Callable[[ConfigFile, Log], Config]
    read_lock: Callable[[Config], Lock | None]  # returns None without `--locked`


class Health(NamedTuple):
    """The state that health probes report.

    It is immutable, because the health listener's thread reads it. `Watch` replaces it as a whole.
    Times are those of the event loop's clock, in seconds.
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


def describe_changes(old: Config, new: Config) -> Iterator[str]:
    """Yield a line for each registry, mapping and setting that was added, removed or changed.

    The lines contain names but no values, because a value may be a secret.
    """
    before = parts_by_name(old)
    after = parts_by_name(new)
    for name in dict.fromkeys((*before, *after)):
        if name not in after:
            yield f"{name} removed"
        elif name not in before:
            yield f"{name} added"
        elif before[name] != after[name]:
            yield f"{name} changed"


def parts_by_name(config: Config) -> dict[str, object]:
    """Return the registries, mappings and settings of a configuration, to be compared by name."""
    mappings = defaultdict[str, list[object]](list)  # several mappings may have one name
    for rule in config.mappings:
        name = f"mapping {rule.source.alias}/{rule.source_repository} -> {rule.target_repository}"
        # Compare targets by alias only, because a changed registry has a line of its own.
        targets = [target.alias for target in rule.targets]
        mappings[name].append((targets, rule.tags, rule.min_age, rule.platforms, rule.artifacts))
    registries = {f"registry {alias}": registry for alias, registry in config.registries.items()}
    settings = {f"setting {name}": getattr(config, name) for name in SETTINGS}
    return {**registries, **mappings, **settings}


@dataclass
class Cycle:
    """What happened in one cycle."""

    # (event, message) of each line, shown or not.
    lines: set[tuple[str, str]] = field(default_factory=set)
    # The images that fail, as (source, target). The value identifies the error by (code, HTTP
    # status), because its message may contain a time.
    failures: dict[tuple[str, str], object] = field(default_factory=dict)
    has_news: bool = False  # whether an image was shown


class CycleLog:
    """Shows the messages and outcomes of a cycle, except those that repeat the previous cycle."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._current = Cycle()
        self._previous = Cycle()
        self._last_summary_at = anyio.current_time()  # when a cycle's summary was last logged

    def begin_cycle(self) -> None:
        self._previous = self._current
        self._current = Cycle()
        # The same failure may occur again after months. Its hint is then needed again.
        self._console.shown_hints.clear()

    def log(self, level: str, event: str, message: str, **fields: object) -> None:
        """Log a line, unless the same line was logged in this cycle or in the previous one.

        Lines at DEBUG and TRACE are always logged.
        """
        if level in ("trace", "debug"):
            self._console.log(level, event, message, **fields)
            return

        line = (event, message)
        is_repeated = line in self._current.lines or line in self._previous.lines
        # Record a repeated line too, so that the next cycle does not show it either.
        self._current.lines.add(line)
        if not is_repeated:
            self._console.log(level, event, message, **fields)

    def show_outcome(self, outcome: Outcome) -> None:
        """Record the result of an image, and show the result if it is news.

        News are a synced image, a failure that the image did not have in the previous cycle, and
        the end of a failure.
        """
        key = (outcome.source, outcome.target)
        if outcome.error is not None:
            # Only errors that are responses of a registry have an HTTP status.
            status = getattr(outcome.error, "status", None)
            self._current.failures[key] = (outcome.error.code, status)
        # An image that does not fail has no entry.
        has_changed = self._previous.failures.get(key) != self._current.failures.get(key)
        if outcome.status == "synced" or has_changed:
            self._current.has_news = True
            self._console.show_outcome(outcome)

    def end_cycle(self) -> None:
        """Log how many images no longer fail, with a line for each pair of repositories."""
        recovered = Counter[str]()  # the number of images by "SOURCE -> TARGET"
        for (source, target), failure in sorted(self._previous.failures.items()):
            if (source, target) in self._current.failures:
                continue
            source_repository = without_tag(source)
            target_repository = without_tag(target)
            # A mapping whose tags could not be listed has failed with this key. None of its images
            # was tried, so their failures last.
            mapping_key = (f"{source_repository}:*", f"{target_repository}:*")
            if mapping_key in self._current.failures:
                self._current.failures[source, target] = failure
            else:
                recovered[f"{source_repository} -> {target_repository}"] += 1
        for repositories, count in recovered.items():
            self._console.log("info", "recovered", f"no longer failing: {repositories} ({count})")

    def log_summary(self, text: str, cycle: dict[str, object]) -> None:
        """Log the summary `text` of a cycle that had news, with the fields `cycle`.

        The summary of a cycle without news is logged only at DEBUG, and only if no summary was
        logged for QUIET_SECONDS.
        """
        now = anyio.current_time()
        if self._current.has_news:
            self._last_summary_at = now
            self._console.log("info", "cycle", text, **cycle)
        elif now - self._last_summary_at >= QUIET_SECONDS:
            self._last_summary_at = now
            state = "the same images fail" if self._current.failures else "all is well"
            self._console.log("debug", "quiet", f"{state}; {text}")


def without_tag(reference: str) -> str:
    repository, _, _ = reference.rpartition(":")
    return repository


class Watch:
    """The loop over cycles. All cycles share the transport and the state files."""

    def __init__(self, console: Console, files: InputFiles, interval: float) -> None:
        """Read the configuration and the lock. Raises ConfigError if either is invalid.

        `interval` is the pause between two cycles, in seconds.
        """
        self._console = console
        self._files = files
        self._interval = interval
        self._cycle_log = CycleLog(console)
        file = files.read_config()
        self._config_text = file.text  # of the configuration in force
        self._config = files.parse_config(file, self._cycle_log.log)
        self._lock = files.read_lock(self._config)
        self.transport = connect(console, self._cycle_log.log)
        # State files by cache_dir. A reload may change cache_dir.
        self._states = dict[str | None, StateFile]()
        # When each digest was first seen; None if no mapping has `min_age`.
        self._first_seen = self._load_first_seen(self._config, self._lock)
        self._stop = anyio.Event()  # set by the first SIGINT or SIGTERM
        self._wake = anyio.Event()  # set to end the pause between two cycles
        self._cycle_number = 0  # of the current or the last cycle; 0 before the first one
        self._health = Health(due=anyio.current_time())
        self._cycle_scope = anyio.CancelScope()  # cancels the current cycle

    def answer_probe(self, path: str) -> tuple[int, dict[str, object]]:
        """Return the HTTP status and the JSON document for `/healthz` or `/readyz`.

        The health listener calls this in its own thread. `current_time` returns the same clock in
        the event loops of both threads.
        """
        return self._health.answer(path, anyio.current_time(), self.transport.last_progress)

    def on_signal(self, number: int) -> None:
        """Stop after the current cycle on SIGINT or SIGTERM, or at once on a second one.

        Any signal, SIGHUP included, ends the pause between two cycles.
        """
        if number in (signal.SIGINT, signal.SIGTERM):
            is_second = self._stop.is_set()
            if is_second:
                self._cycle_scope.cancel()
            self._stop.set()
            self._health = self._health._replace(status="stopping")
        self._wake.set()

    async def run_cycles(self) -> None:
        """Run cycles, with the pause between them, until SIGINT or SIGTERM."""
        while not self._stop.is_set():
            # A signal during the cycle sets this event too, so that no pause follows the cycle.
            self._wake = anyio.Event()
            self._cycle_log.begin_cycle()
            if self._cycle_number > 0:  # `__init__` has read the files for the first cycle
                self._reload()
            await self._run_cycle()
            if self._interval > self.transport.machine.timeouts.idle_connection:
                # Idle connections would expire before the next cycle, which opens new ones.
                self.transport.close()
            with anyio.move_on_after(self._interval):
                await self._wake.wait()

    def _reload(self) -> None:
        """Read the configuration and the lock again, put them into force, and log their changes.

        If either is invalid, log the error and keep the previous configuration and lock.
        """
        config = self._config
        first_seen = self._first_seen
        try:
            file = self._files.read_config()
            # After a failed reload the file is parsed even if its old text was restored, so that
            # health probes no longer show the error.
            has_failed_before = self._health.reload_error is not None
            has_new_config = file.text != self._config_text or has_failed_before
            if has_new_config:
                config = self._files.parse_config(file, self._cycle_log.log)
            lock = self._files.read_lock(config)
            has_new_lock = lock != self._lock
            # Certificate files may have changed although the configuration has not.
            self.transport.read_again(config.registries_in_use)
            if has_new_config or has_new_lock:
                first_seen = self._load_first_seen(config, lock)
        except ConfigError as error:
            self._log_failed_reload(error)
            self._health = self._health._replace(reload_error=str(error))
            return

        if has_new_lock:
            lock_changes = compare(self._lock or Lock(), lock or Lock())
            text = f"images added, removed or changed in the lock: {len(lock_changes)}"
            self._console.log("info", "lock_changed", text)
        if has_new_config:
            lines = list(describe_changes(self._config, config))
            for line in (*lines, f"configuration changes: {len(lines)}"):
                self._console.log("info", "reloaded", line)
        # All files are valid. They come into force together.
        self._config_text = file.text
        self._config = config
        self._lock = lock
        self._first_seen = first_seen
        self._health = self._health._replace(reload_error=None)

    def _log_failed_reload(self, error: ConfigError) -> None:
        # Each reload fails until the file is valid again. The cycle log shows the error only once.
        for problem in error.problems or [error]:
            text = f"{error.code}: {problem}; the last valid configuration stays in force"
            self._cycle_log.log("error", "reload_failed", text, code=error.code, hint=error.hint)

    async def _run_cycle(self) -> None:
        """Sync all mappings once and show the results."""
        start = anyio.current_time()
        started_at = utc_now()
        self._cycle_number += 1
        self._health = self._health._replace(due=start)
        report = await self._sync()
        if not report.interrupted:  # an interrupted cycle has not tried all images
            self._cycle_log.end_cycle()
        duration = anyio.current_time() - start
        if self._console.writes_json:
            print_report(report, started_at, duration, self.transport, self._console)
        cycle = {
            "number": self._cycle_number,
            "started_at": started_at,
            "duration_s": round(duration, 3),
            "exit_status": report.exit_status(),
            "images": report.totals()["images"],
        }
        self._publish_to_probes(cycle)
        text = f"cycle {self._cycle_number}: {'; '.join(report.summary(duration))}"
        self._cycle_log.log_summary(text, cycle)

    async def _sync(self) -> Report:
        """Sync all mappings, and return the report. After a signal no more images are copied."""
        for warning in self._config.warnings:
            self._cycle_log.log("warning", "config", warning)
        self.transport.begin_run(self._config.registries_in_use)
        report = Report()
        work = Run(
            self.transport,
            self._config,
            self._cycle_log.show_outcome,
            report,
            state=self._state_in(self._config.cache_dir),
            first_seen=self._first_seen,
            lock=self._lock,
        )
        async with anyio.create_task_group() as tasks:
            self._cycle_scope = tasks.cancel_scope  # a second signal cancels it
            if self._console.has_progress_line:
                tasks.start_soon(show_progress, self._console, work.scheduler)
            await work.sync(self._stop)
            tasks.cancel_scope.cancel()  # ends `show_progress`
        return report

    def _load_first_seen(self, config: Config, lock: Lock | None) -> FirstSeen | None:
        locked_times = lock.first_seen_times() if lock is not None else None
        wall = self.transport.machine.wall
        state = self._state_in(config.cache_dir)
        return first_seen_for(config, state, wall, locked_times=locked_times)

    def _state_in(self, cache_dir: str | None) -> StateFile:
        if cache_dir not in self._states:
            self._states[cache_dir] = StateFile(cache_dir, self._cycle_log.log)
        return self._states[cache_dir]

    def _publish_to_probes(self, cycle: dict[str, object]) -> None:
        status = self._health.status
        # Exit status 1 means that some images failed and others did not, which is enough to be
        # ready.
        is_successful = cycle["exit_status"] in (0, 1)
        if status == "starting" and is_successful:
            status = "ready"
        next_start = anyio.current_time() + self._interval
        self._health = self._health._replace(status=status, cycle=cycle, due=next_start)


async def run(
    console: Console, files: InputFiles, interval: float, health_address: str, health_port: int
) -> int:
    """Run cycles, `interval` seconds apart, until SIGINT or SIGTERM. Returns the exit status.

    Health probes are answered at `health_address` and `health_port`; port 0 means any free port.
    Raises ConfigError if the configuration or the lock is invalid, or if the port cannot be opened.
    """
    watch = Watch(console, files, interval)
    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        signals.append(signal.SIGHUP)
    with (
        closing(watch.transport),
        serving(health_address, health_port, watch.answer_probe) as addresses,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen_for_signals, watch.on_signal, signals)
            tasks.start_soon(watch.transport.pool.watch)
            # This checkpoint lets the listener start, so that a signal that is sent after the next
            # log line is not lost.
            await anyio.lowlevel.checkpoint()
            _, bound_port, *_ = addresses[0]  # (host, port) or, for IPv6, a longer tuple
            text = (
                f"waiting {duration_text(interval)} between cycles; "
                f"health probes at {health_address} port {bound_port}"
            )
            console.log("info", "listening", text)
            await watch.run_cycles()
            tasks.cancel_scope.cancel()  # ends the two tasks
    return 0
