"""Watch mode: cycle after cycle until a signal, each with the configuration as it is then.
Owns: when a cycle begins, what a new configuration changes, what is said of a cycle, the states that probes ask for.
May not know: how a run goes, HTTP. Invariants: a configuration that cannot be used leaves the last good one in force;
what repeats is said once. Follows specification section 1.5, design.md section 10 ("Health", "Watch")."""
from __future__ import annotations
import os, signal, time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
import anyio
from _regsync import __version__, config, health, session, sync
from _regsync.errors import ConfigError
from _regsync.output import Console
from _regsync.report import Outcome, Report
from _regsync.store import StateFile
_NO_PROGRESS, _HOUR = 900.0, 3600.0
_SETTINGS = ("max_concurrent_transfers", "cache_dir", "cache_ttl", "staging_size_limit")
class Health:
    """What probes are told; `moved` says when a registry answered last, or bytes moved."""
    def __init__(self, now: Callable[[], float], moved: Callable[[], float], is_stopping: Callable[[], bool]) -> None:
        self._now, self._moved, self._is_stopping, self._is_seeded = now, moved, is_stopping, False
        self.began: float | None = None  # when the cycle under way did
        self.cycle: dict[str, Any] | None = None  # the last that ended
        self.reload_error: str | None = None
    def end(self, **cycle: Any) -> None:
        """Take in how a cycle ended."""
        self.began, self.cycle = None, cycle
        self._is_seeded = self._is_seeded or cycle["exit_status"] in (0, 1)
    def tell(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return status and document: whether the loop waits or has made progress lately, or a cycle has ended well."""
        moves = self.began is None or self._now() - max(self.began, self._moved()) < _NO_PROGRESS
        status = "stopping" if self._is_stopping() else "ready" if self._is_seeded else "starting"
        return 200 if (moves if path == "/healthz" else status == "ready") else 503, {"status": status,
            "version": __version__, "cycle": self.cycle, "reload_error": self.reload_error}
def changes(old: config.Config, new: config.Config) -> Iterator[str]:
    """Give a line for each registry, mapping and setting that was added, removed or changed; no line has a value."""
    before, after = _named(old), _named(new)
    for name in dict.fromkeys((*before, *after)):
        verb = "removed" if name not in after else "changed" if name in before else "added"
        if before.get(name) != after.get(name): yield f"{name} {verb}"
def _named(found: config.Config) -> dict[str, object]:
    rules = defaultdict[str, list[object]](list)
    for rule in found.mappings:
        name = f"mapping {rule.source.alias}/{rule.source_repository} -> {rule.target_repository}"
        rules[name].append(([each.alias for each in rule.targets], rule.tags, rule.platforms, rule.artifacts))
    return {**{f"registry {alias}": each for alias, each in found.registries.items()}, **rules,
        **{f"setting {name}": (value,) for name, value in found._asdict().items() if name in _SETTINGS}}
class _Said:
    """What was said in the cycle under way and in the one before: what repeats is not said again."""
    def __init__(self, console: Console) -> None:
        self._console, self._before, self._now, self.has_news = console, set[object](), set[object](), False
        # By source and target, how an image failed.
        self.failed, self._failed = dict[tuple[str, str], object](), dict[tuple[str, str], object]()
    def begin(self) -> None:
        self._before, self._now, self._failed, self.failed, self.has_news = self._now, set(), self.failed, {}, False
        self._console.hinted.clear()  # the next failure that is said may be months later
    def log(self, level: str, event: str, message: str, **fields: Any) -> None:
        said = (event, message)
        if level in ("trace", "debug") or (said not in self._before and said not in self._now):
            self._console.log(level, event, message, **fields)
        if level not in ("trace", "debug"): self._now.add(said)
    def outcome(self, outcome: Outcome) -> None:
        error, key = outcome.error, (outcome.source, outcome.target)
        if error is not None:
            self.failed[key] = error.code, getattr(error, "status", None)  # words may have a time in them
        if outcome.status == "synced" or self._failed.get(key) != self.failed.get(key):
            self.has_news = True
            self._console.outcome(outcome)
    def end(self) -> None:
        gone = self._failed.keys() - self.failed.keys()
        names = Counter(" -> ".join(name.rpartition(":")[0] for name in pair) for pair in sorted(gone))
        for name, count in names.items(): self.log("info", "recovered", f"no longer failing: {name} ({count})")
class _Watch:
    """The loop; `read` gives the arguments of `load`."""
    def __init__(self, console: Console, read: Callable[[], dict[str, Any]],
            load: Callable[..., config.Config]) -> None:
        self._console, self._read, self._load, self._said, given = console, read, load, _Said(console), read()
        self._text, self._found = given["text"], load(**given)
        self.transport = session.connect(console, self._said.log)
        self._state = cache(partial(StateFile, warn=partial(self._said.log, "warning"), remembers=True))
        self._stop, self._wake, self._number, self._quiet_since = anyio.Event(), anyio.Event(), 0, anyio.current_time()
        self.health = Health(anyio.current_time, lambda: self.transport.moved, self._stop.is_set)
    def take(self, scope: anyio.CancelScope, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            if self._stop.is_set(): scope.cancel()
            self._stop.set()
        self._wake.set()
    async def cycles(self, interval: float) -> None:
        while not self._stop.is_set():
            self._wake = anyio.Event()
            self._said.begin()
            if self._number: self._reload()
            await self._cycle()
            if interval > self.transport.edge.timeouts.idle_connection: self.transport.close()
            with anyio.move_on_after(interval): await self._wake.wait()
    def _reload(self) -> None:
        try:
            given = self._read()
            changed = given["text"] != self._text
            found = self._load(**given) if changed else self._found
            self.transport.renew(found.in_use)
        except ConfigError as error:
            self._text, self.health.reload_error = None, str(error)
            for each in error.problems or [error]:
                self._said.log("error", "reload_failed", f"{error.code}: {each}; what was good last stays in force")
            return
        if changed:
            lines, self._text, self._found = [*changes(self._found, found)], given["text"], found
            self.health.reload_error = None
            for line in (*lines, f"configuration changes: {len(lines)}"): self._console.log("info", "reloaded", line)
    async def _cycle(self) -> None:
        began, started = anyio.current_time(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.health.began, self._number, report = began, self._number + 1, Report()
        for warning in self._found.warnings: self._said.log("warning", "config", warning)
        self.transport.begin(self._found.in_use)
        work = sync.Run(self.transport, self._found, self._said.outcome, report,
            state=self._state(self._found.cache_dir))
        async with anyio.create_task_group() as tasks:
            if self._console.live: tasks.start_soon(session.show_progress, self._console, work.execution)
            await work.sync(self._stop)
            tasks.cancel_scope.cancel()
        if not report.interrupted: self._said.end()
        now = anyio.current_time()
        if self._console.as_json:
            self._console.document(report.as_json(os.urandom(8).hex(), started, now - began, self.transport.requests,
                self.transport.throttled))
        self.health.end(number=self._number, started_at=started, duration_s=round(now - began, 3),
            exit_status=report.exit_status(), images=report.totals()["images"])
        text = f"cycle {self._number}: {'; '.join(report.summary(now - began))}"
        if self._said.has_news: self._console.log("info", "cycle", text, **(self.health.cycle or {}))
        elif now - self._quiet_since < _HOUR: return
        else: self._console.log("debug", "quiet", f"{'nothing new' if self._said.failed else 'all is well'}; {text}")
        self._quiet_since = now
async def run(console: Console, read: Callable[[], dict[str, Any]], load: Callable[..., config.Config], interval: float,
        where: tuple[str, int]) -> int:
    """Run cycles, `interval` seconds apart, until SIGINT or SIGTERM; return the exit status."""
    watch = _Watch(console, read, load)
    numbers = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.listen_for_signals, partial(watch.take, tasks.cancel_scope), numbers)
            names = await tasks.start(health.serve, *where, watch.health.tell)
            console.log("info", "listening", f"probes are answered at {where[0]}, port {names[0][1]}")
            await watch.cycles(interval)
            tasks.cancel_scope.cancel()
    finally: watch.transport.close()
    return 0
