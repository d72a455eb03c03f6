"""Watch mode: cycle after cycle until a signal, each with the configuration as it is then. Owns:
when a cycle begins, what a new configuration changes, what is said of a cycle, the states that
probes ask for. May not know: how a run goes, HTTP. Invariants: a configuration that cannot be used
leaves the last good one in force; what repeats is said once. Follows docs/specification.md section
1.5, docs/design.md section 10 ("Health", "Watch")."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from typing import Any, NamedTuple

import anyio.lowlevel

from _regsync import __version__
from _regsync.app.commands import connect, listen_for_signals, show_progress
from _regsync.app.console import Console
from _regsync.app.health import serving
from _regsync.config.model import Config
from _regsync.errors import ConfigError
from _regsync.state.database import StateFile
from _regsync.sync.report import Outcome, Report
from _regsync.sync.run import Run
from _regsync.text import duration_text

_NO_PROGRESS = 900.0


_HOUR = 3600.0


_SETTINGS = ("max_concurrent_transfers", "cache_dir", "cache_ttl", "staging_size_limit")


class Health(NamedTuple):
    """What probes are told: replaced as a whole, for a thread of its own reads it."""

    due: float  # when the cycle under way began, or the next one is to
    status: str = "starting"  # "ready" when a cycle has ended well; then "stopping"
    cycle: dict[str, Any] | None = None  # the last that ended
    reload_error: str | None = None

    def tell(self, path: str, now: float, moved: float) -> tuple[int, dict[str, Any]]:
        """Return status and document; `moved` says when a registry answered last, or bytes moved."""
        well = (
            now - max(self.due, moved) < _NO_PROGRESS
            if path == "/healthz"
            else self.status == "ready"
        )
        return 200 if well else 503, {
            "status": self.status,
            "version": __version__,
            "cycle": self.cycle,
            "reload_error": self.reload_error,
        }


def changes(old: Config, new: Config) -> Iterator[str]:
    """Give a line for each registry, mapping and setting that was added, removed or changed; no
    line has a value.
    """
    before = _named(old)
    after = _named(new)
    for name in dict.fromkeys((*before, *after)):
        verb = "removed" if name not in after else "changed" if name in before else "added"
        if before.get(name) != after.get(name):
            yield f"{name} {verb}"


def _named(found: Config) -> dict[str, object]:
    rules = defaultdict[str, list[object]](list)
    for rule in found.mappings:
        name = f"mapping {rule.source.alias}/{rule.source_repository} -> {rule.target_repository}"
        rules[name].append(
            ([each.alias for each in rule.targets], rule.tags, rule.platforms, rule.artifacts)
        )
    return {
        **{f"registry {alias}": each for alias, each in found.registries.items()},
        **rules,
        **{
            f"setting {name}": (value,)
            for name, value in found._asdict().items()
            if name in _SETTINGS
        },
    }


class _Said:
    """What was said in the cycle under way and in the one before: what repeats is not said again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._before = set[object]()
        self._now = set[object]()
        self.has_news = False
        # By source and target, how an image failed.
        self.failed = dict[tuple[str, str], object]()
        self._failed = dict[tuple[str, str], object]()

    def begin(self) -> None:
        self._before = self._now
        self._now = set()
        self._failed = self.failed
        self.failed = {}
        self.has_news = False
        self._console.hinted.clear()  # the next failure that is said may be months later

    def log(self, level: str, event: str, message: str, **fields: Any) -> None:
        said = (event, message)
        if level in ("trace", "debug") or (said not in self._before and said not in self._now):
            self._console.log(level, event, message, **fields)
        if level not in ("trace", "debug"):
            self._now.add(said)

    def outcome(self, outcome: Outcome) -> None:
        error = outcome.error
        key = (outcome.source, outcome.target)
        if error is not None:
            self.failed[key] = (
                error.code,
                getattr(error, "status", None),
            )  # words may have a time in them
        if outcome.status == "synced" or self._failed.get(key) != self.failed.get(key):
            self.has_news = True
            self._console.outcome(outcome)

    def end(self) -> None:
        gone = Counter[str]()
        for key in sorted(self._failed.keys() - self.failed.keys()):
            source, target = (name.rpartition(":")[0] for name in key)
            if (f"{source}:*", f"{target}:*") not in self.failed:
                gone[f"{source} -> {target}"] += 1
            else:
                self.failed[key] = self._failed[key]  # its listing failed: nobody asked for it
        for name, count in gone.items():
            self._console.log("info", "recovered", f"no longer failing: {name} ({count})")


class _Watch:
    """The loop; `read` gives the arguments of `load`, but for how it logs."""

    def __init__(
        self,
        console: Console,
        read: Callable[[], dict[str, Any]],
        load: Callable[..., Config],
        interval: float,
    ) -> None:
        self._console = console
        self._read = read
        self._load = load
        self._said = _Said(console)
        given = read()
        self._text = given["text"]
        self._found = load(self._said.log, **given)
        self._interval = interval
        self.transport = connect(console, self._said.log)
        self._state = cache(partial(StateFile, log=self._said.log, remembers=True))
        self._stop = anyio.Event()
        self._wake = anyio.Event()
        self._number = 0
        self._quiet_since = anyio.current_time()
        self._health = Health(anyio.current_time())
        self._cut = anyio.CancelScope()

    def tell(
        self, path: str
    ) -> tuple[int, dict[str, Any]]:  # in whatever thread: loops of asyncio have one clock
        return self._health.tell(path, anyio.current_time(), self.transport.moved)

    def take(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            if self._stop.is_set():
                self._cut.cancel()
            self._stop.set()
            self._health = self._health._replace(status="stopping")
        self._wake.set()

    async def cycles(self) -> None:
        while not self._stop.is_set():
            self._wake = anyio.Event()
            self._said.begin()
            if self._number:
                self._reload()
            await self._cycle()
            if self._interval > self.transport.edge.timeouts.idle_connection:
                self.transport.close()
            with anyio.move_on_after(self._interval):
                await self._wake.wait()

    def _reload(self) -> None:
        try:
            given = self._read()
            changed = given["text"] != self._text
            found = self._load(self._said.log, **given) if changed else self._found
            self.transport.renew(found.in_use)
        except ConfigError as error:
            self._text = None
            self._health = self._health._replace(reload_error=str(error))
            for each in error.problems or [error]:
                text = f"{error.code}: {each}; what was good last stays in force"
                self._said.log("error", "reload_failed", text, code=error.code, hint=error.hint)
            return
        if changed:
            lines = [*changes(self._found, found)]
            self._text = given["text"]
            self._found = found
            self._health = self._health._replace(reload_error=None)
            for line in (*lines, f"configuration changes: {len(lines)}"):
                self._console.log("info", "reloaded", line)

    async def _cycle(self) -> None:
        began = anyio.current_time()
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._number = self._number + 1
        self._health = self._health._replace(due=began)
        report = Report()
        for warning in self._found.warnings:
            self._said.log("warning", "config", warning)
        self.transport.begin(self._found.in_use)
        work = Run(
            self.transport,
            self._found,
            self._said.outcome,
            report,
            state=self._state(self._found.cache_dir),
        )
        async with anyio.create_task_group() as tasks:
            self._cut = tasks.cancel_scope
            if self._console.live:
                tasks.start_soon(show_progress, self._console, work.execution)
            await work.sync(self._stop)
            tasks.cancel_scope.cancel()
        if not report.interrupted:
            self._said.end()
        now = anyio.current_time()
        if self._console.as_json:
            self._console.document(
                report.as_json(
                    os.urandom(8).hex(),
                    started,
                    now - began,
                    self.transport.requests,
                    self.transport.throttled,
                )
            )
        cycle = {
            "number": self._number,
            "started_at": started,
            "duration_s": round(now - began, 3),
            "exit_status": report.exit_status(),
            "images": report.totals()["images"],
        }
        seeds = self._health.status == "starting" and cycle["exit_status"] in (0, 1)
        status = "ready" if seeds else self._health.status
        self._health = self._health._replace(status=status, cycle=cycle, due=now + self._interval)
        text = f"cycle {self._number}: {'; '.join(report.summary(now - began))}"
        if self._said.has_news:
            self._console.log("info", "cycle", text, **cycle)
        elif now - self._quiet_since < _HOUR:
            return
        else:
            self._console.log(
                "debug", "quiet", f"{'nothing new' if self._said.failed else 'all is well'}; {text}"
            )
        self._quiet_since = now


async def run(
    console: Console,
    read: Callable[[], dict[str, Any]],
    load: Callable[..., Config],
    interval: float,
    where: tuple[str, int],
) -> int:
    """Run cycles, `interval` seconds apart, until SIGINT or SIGTERM; return the exit status."""
    watch = _Watch(console, read, load, interval)
    numbers = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)
    with closing(watch.transport), serving(*where, watch.tell) as names:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen_for_signals, watch.take, numbers)
            await anyio.lowlevel.checkpoint()  # they are heard
            every = duration_text(interval)
            port = names[0][1]
            console.log(
                "info",
                "listening",
                f"a cycle every {every}, probes are answered at {where[0]}, port {port}",
            )
            await watch.cycles()
            tasks.cancel_scope.cancel()
    return 0
