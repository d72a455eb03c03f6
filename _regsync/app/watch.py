"""Watch mode: cycle after cycle until a signal, each with the configuration as it is then.

Owns: when a cycle begins, what a new configuration changes, what is shown of a cycle, and the
states that probes ask for.
May not know: how a run goes, HTTP.
Invariants: a configuration that cannot be used leaves the last good one in force; what repeats is
said once.
Follows: docs/specification.md section 1.5, docs/design.md section 10 ("Health", "Watch").
"""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import anyio.lowlevel

from _regsync import __version__
from _regsync.app.console import Console
from _regsync.app.environment import connect, listen_for_signals, utc_now
from _regsync.app.health import serving
from _regsync.app.progress import show_progress
from _regsync.config.model import Config
from _regsync.config.reader import ConfigFile
from _regsync.errors import ConfigError
from _regsync.state.database import StateFile
from _regsync.state.seen import FirstSeen, first_seen_for
from _regsync.sync.lockfile import Lock, compare
from _regsync.sync.report import Outcome, Report
from _regsync.sync.run import Run
from _regsync.text import duration_text

STANDSTILL_SECONDS = 900.0  # without an answer or a byte, after which /healthz says 503
QUIET_SECONDS = 3600.0  # between two signs of life at DEBUG while nothing changes

# Fields of a configuration whose change is told by name.
SETTINGS = ("max_concurrent_transfers", "cache_dir", "cache_ttl", "staging_size_limit")

Log = Callable[..., None]  # as `Console.log`
Read = Callable[[], ConfigFile]
Load = Callable[[Log, ConfigFile], Config]
ReadLock = Callable[[Config], Lock | None]  # None: the cycles are not from a lock


class Health(NamedTuple):
    """What probes are told; replaced as a whole, because a thread of its own reads it."""

    due: float  # when the cycle under way began, or when the next one is to begin
    status: str = (
        "starting"  # "ready" once a cycle has ended well; "stopping" from the first signal
    )
    cycle: dict[str, object] | None = None  # the last that has ended
    reload_error: str | None = None

    def answer(self, path: str, now: float, moved: float) -> tuple[int, dict[str, object]]:
        """Return HTTP status and document for `/healthz` or `/readyz`.

        `moved` is when a registry last answered or bytes last moved.
        """
        if path == "/healthz":
            is_well = now - max(self.due, moved) < STANDSTILL_SECONDS
        else:
            is_well = self.status == "ready"
        document: dict[str, object] = {
            "status": self.status,
            "version": __version__,
            "cycle": self.cycle,
            "reload_error": self.reload_error,
        }
        return 200 if is_well else 503, document


def changes(old: Config, new: Config) -> Iterator[str]:
    """Give a line for each registry, mapping and setting that was added, removed or changed.

    No line holds a value: it may be a secret.
    """
    before = named_parts(old)
    after = named_parts(new)
    for name in dict.fromkeys((*before, *after)):
        if name not in after:
            yield f"{name} removed"
        elif name not in before:
            yield f"{name} added"
        elif before[name] != after[name]:
            yield f"{name} changed"


def named_parts(config: Config) -> dict[str, object]:
    """Return what a configuration consists of, under the names that `changes` uses."""
    mappings = defaultdict[str, list[object]](list)
    for rule in config.mappings:
        name = f"mapping {rule.source.alias}/{rule.source_repository} -> {rule.target_repository}"
        # By their aliases: a registry that has changed has a line of its own.
        targets = [target.alias for target in rule.targets]
        rules = (rule.tags, rule.min_age, rule.platforms, rule.artifacts)
        mappings[name].append((targets, *rules))
    registries = {f"registry {alias}": registry for alias, registry in config.registries.items()}
    settings = {f"setting {name}": getattr(config, name) for name in SETTINGS}
    return {**registries, **mappings, **settings}


class CycleLog:
    """Shows what happens in cycles; what the cycle before has shown is not shown again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Event and message of each line that was due, in the cycle before and in this one.
        self._said_before = set[object]()
        self._said_now = set[object]()

        # How each image fails in this cycle, by source and target: code and HTTP status. Its
        # message may hold a time.
        self.failures = dict[tuple[str, str], object]()
        self._failures_before = dict[tuple[str, str], object]()  # as `failures`, the cycle before

        self.has_news = False  # whether this cycle has shown an image

    def begin_cycle(self) -> None:
        """Begin a cycle: what this one was is the cycle before now."""
        self._said_before = self._said_now
        self._said_now = set()
        self._failures_before = self.failures
        self.failures = {}
        self.has_news = False
        # Hints are shown once; the next failure may come months later, and needs its hint then.
        self._console.shown_hints.clear()

    def log(self, level: str, event: str, message: str, **fields: object) -> None:
        """Log a line, unless this cycle or the one before had the same; debugging sees all lines."""
        line = (event, message)
        is_repeated = line in self._said_before or line in self._said_now
        if level in ("trace", "debug"):
            is_repeated = False
        else:
            self._said_now.add(line)
        if not is_repeated:
            self._console.log(level, event, message, **fields)

    def outcome(self, outcome: Outcome) -> None:
        """Show an image that was copied, or that fails in another way than in the cycle before."""
        key = (outcome.source, outcome.target)
        if outcome.error is not None:
            self.failures[key] = (outcome.error.code, getattr(outcome.error, "status", None))
        has_changed = self._failures_before.get(key) != self.failures.get(key)
        if outcome.status == "synced" or has_changed:
            self.has_news = True
            self._console.show_outcome(outcome)

    def end_cycle(self) -> None:
        """Say which images no longer fail, a line for each pair of repositories."""
        recovered = Counter[str]()
        for key in sorted(self._failures_before.keys() - self.failures.keys()):
            source, target = (name.rpartition(":")[0] for name in key)
            # Where the listing of a mapping failed (`REPO:*`), its images were not looked at: they
            # count as failing.
            if (f"{source}:*", f"{target}:*") in self.failures:
                self.failures[key] = self._failures_before[key]
            else:
                recovered[f"{source} -> {target}"] += 1
        for name, count in recovered.items():
            self._console.log("info", "recovered", f"no longer failing: {name} ({count})")


class Watch:
    """The loop over cycles. Clients, windows, connections and state live across cycles."""

    def __init__(
        self, console: Console, read: Read, load: Load, read_lock: ReadLock, interval: float
    ) -> None:
        self._console = console
        self._read = read
        self._load = load
        self._read_lock = read_lock
        self._interval = interval
        self._log = CycleLog(console)
        file = read()
        self._text: bytes | None = file.text  # of the file as last read; None: it cannot be used
        self._config = load(self._log.log, file)
        self._lock = read_lock(self._config)
        self.transport = connect(console, self._log.log)
        self._first_seen = self._first_seen_for(self._config, self._lock)
        self._states = dict[str | None, StateFile]()  # by cache_dir, which a reload may change
        self._stop = anyio.Event()
        self._wake = anyio.Event()  # ends the pause between two cycles
        self._number = 0  # of the cycle under way, or of the last one
        self._last_sign_of_life = anyio.current_time()
        self._health = Health(due=anyio.current_time())
        self._cycle_scope = anyio.CancelScope()  # of the cycle under way

    def answer_probe(self, path: str) -> tuple[int, dict[str, object]]:
        """Answer a probe, in whatever thread: all event loops of asyncio share one clock."""
        return self._health.answer(path, anyio.current_time(), self.transport.last_progress)

    def on_signal(self, number: int) -> None:
        """SIGHUP ends the pause. The first SIGINT or SIGTERM ends the watch after this cycle, the
        second one ends the cycle.
        """
        if number in (signal.SIGINT, signal.SIGTERM):
            if self._stop.is_set():
                self._cycle_scope.cancel()
            self._stop.set()
            self._health = self._health._replace(status="stopping")
        self._wake.set()

    async def run_cycles(self) -> None:
        """Run a cycle, wait, and read the configuration again, until a signal stops the watch."""
        while not self._stop.is_set():
            self._wake = anyio.Event()
            self._log.begin_cycle()
            if self._number > 0:
                self._reload()
            await self._run_cycle()
            if self._interval > self.transport.machine.timeouts.idle_connection:
                # Idle connections would be stale by the next cycle. The transport opens new ones.
                self.transport.close()
            with anyio.move_on_after(self._interval):
                await self._wake.wait()

    def _reload(self) -> None:
        """Take a changed configuration or lock; keep the last good ones where one is unusable."""
        try:
            file = self._read()
            has_new_config = file.text != self._text
            config = self._load(self._log.log, file) if has_new_config else self._config
            lock = self._read_lock(config)
            has_new_lock = lock != self._lock
            self.transport.renew(config.in_use)
            if has_new_config or has_new_lock:
                self._first_seen = self._first_seen_for(config, lock)
        except ConfigError as error:
            # The file is read again before each cycle, and told again only in other words.
            self._text = None
            self._health = self._health._replace(reload_error=str(error))
            for problem in error.problems or [error]:
                text = f"{error.code}: {problem}; the last valid configuration stays in force"
                self._log.log("error", "reload_failed", text, code=error.code, hint=error.hint)
            return

        if has_new_lock:
            moved = compare(self._lock or Lock(), lock or Lock())
            text = f"images added, removed or changed in the lock: {len(moved)}"
            self._console.log("info", "lock_changed", text)
            self._lock = lock
        if has_new_config:
            lines = list(changes(self._config, config))
            for line in (*lines, f"configuration changes: {len(lines)}"):
                self._console.log("info", "reloaded", line)
            self._text = file.text
            self._config = config
            self._health = self._health._replace(reload_error=None)

    async def _run_cycle(self) -> None:
        """Copy what the configuration selects, once, and show what came of it."""
        began = anyio.current_time()
        started_at = utc_now()
        self._number += 1
        self._health = self._health._replace(due=began)
        for warning in self._config.warnings:
            self._log.log("warning", "config", warning)
        self.transport.begin(self._config.in_use)
        report = Report()
        state = self._state_in(self._config.cache_dir)
        if self._first_seen is not None:
            self._first_seen.refresh()  # other processes may have added to it
        work = Run(
            self.transport,
            self._config,
            self._log.outcome,
            report,
            state=state,
            first_seen=self._first_seen,
            lock=self._lock,
        )
        async with anyio.create_task_group() as tasks:
            self._cycle_scope = tasks.cancel_scope
            if self._console.has_display:
                tasks.start_soon(show_progress, self._console, work.scheduler)
            await work.sync(self._stop)
            tasks.cancel_scope.cancel()

        if not report.interrupted:
            self._log.end_cycle()
        duration = anyio.current_time() - began
        if self._console.writes_json:
            run_id = os.urandom(8).hex()
            transport = self.transport
            self._console.print_document(
                report.as_json(
                    run_id, started_at, duration, transport.requests, transport.throttled
                )
            )
        self._record_cycle(report, started_at, duration)

    def _first_seen_for(self, config: Config, lock: Lock | None) -> FirstSeen | None:
        known = lock.first_seen_times() if lock is not None else None
        return first_seen_for(config, self.transport.machine.wall, self._log.log, known=known)

    def _state_in(self, cache_dir: str | None) -> StateFile:
        if cache_dir not in self._states:
            self._states[cache_dir] = StateFile(cache_dir, self._log.log, remembers=True)
        return self._states[cache_dir]

    def _record_cycle(self, report: Report, started_at: str, duration: float) -> None:
        """Keep the cycle for probes. Show it if it brought news, or if nothing was shown for long."""
        now = anyio.current_time()
        cycle = {
            "number": self._number,
            "started_at": started_at,
            "duration_s": round(duration, 3),
            "exit_status": report.exit_status(),
            "images": report.totals()["images"],
        }
        status = self._health.status
        # After 1 some images failed, but others did not: the configuration serves.
        serves = cycle["exit_status"] in (0, 1)
        if status == "starting" and serves:
            status = "ready"
        next_cycle = now + self._interval
        self._health = self._health._replace(status=status, cycle=cycle, due=next_cycle)

        text = f"cycle {self._number}: {'; '.join(report.summary(duration))}"
        if self._log.has_news:
            self._last_sign_of_life = now
            self._console.log("info", "cycle", text, **cycle)
        elif now - self._last_sign_of_life >= QUIET_SECONDS:
            self._last_sign_of_life = now
            state = "the same images fail" if self._log.failures else "all is well"
            self._console.log("debug", "quiet", f"{state}; {text}")


async def run(
    console: Console,
    *,
    read: Read,
    load: Load,
    read_lock: ReadLock,
    interval: float,
    health_at: tuple[str, int],
) -> int:
    """Run cycles, `interval` seconds apart, until SIGINT or SIGTERM; return the exit status.

    `health_at`: address and port at which probes are answered; ConfigError if nobody can listen.
    """
    watch = Watch(console, read, load, read_lock, interval)
    address, _ = health_at
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        numbers.append(signal.SIGHUP)
    with closing(watch.transport), serving(*health_at, watch.answer_probe) as addresses:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen_for_signals, watch.on_signal, numbers)
            # The listener for signals starts at this checkpoint, before anything is announced.
            await anyio.lowlevel.checkpoint()
            port = addresses[0][1]
            text = (
                f"waiting {duration_text(interval)} between cycles; "
                f"health probes at {address} port {port}"
            )
            console.log("info", "listening", text)
            await watch.run_cycles()
            tasks.cancel_scope.cancel()
    return 0
