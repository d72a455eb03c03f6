"""Which stream gets which line, what a terminal is shown, and what the line of progress says."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from _regsync import edge
from _regsync.app.console import Console
from _regsync.app.progress import Progress, show_progress
from _regsync.errors import ContentError, Side
from _regsync.sync.report import Outcome, Report
from tests.ends import ROOT

CLEAR = "\r\x1b[K"
REFUSED = ContentError("wrong digest", hint="look at the source").add_context(
    Side.SOURCE, "fetch blob", "s/app"
)
FAILED = "failed s/app:1 -> t/app:1: CONTENT_ERROR: fetch blob s/app: wrong digest\n"
BUSY = Progress(12, 40, 31_500_000, 1_200_000_000, 5_200_000.0, 65.0)
BUSY_LINE = "12 of 40 images, 31.5 MB of 1.2 GB, 5.2 MB/s"


class Stream(io.StringIO):
    """A stream that may be a terminal, and that writes into a record shared with its sibling."""

    def __init__(self, name: str, record: list[tuple[str, str]], *, is_terminal: bool) -> None:
        super().__init__()
        self._name, self._record, self._is_terminal = name, record, is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return 2

    def write(self, text: str) -> int:
        self._record.append((self._name, text))
        return super().write(text)


class Screen:
    """A console on streams of its own, behind which a terminal may be, and what it wrote to each."""

    def __init__(
        self, *, terminal: bool = False, shows_progress: bool = False, **options: bool
    ) -> None:
        self.record: list[tuple[str, str]] = []
        self.out = Stream("out", self.record, is_terminal=terminal)
        self.err = Stream("err", self.record, is_terminal=terminal)
        sys.stdout, sys.stderr = self.out, self.err
        self.console = Console(**options)
        self.console.configure("warning", shows_progress=shows_progress)

    @property
    def texts(self) -> tuple[str, str]:
        return self.out.getvalue(), self.err.getvalue()


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let terminals have 80 columns."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((80, 24)))
    monkeypatch.setenv("TERM", "xterm")


def outcome(status: str, error: ContentError | None = None, **details: Any) -> Outcome:
    return Outcome(source="s/app:1", target="t/app:1", status=status, error=error, **details)


def test_what_was_synced_is_a_result_and_what_failed_is_not_and_a_hint_is_given_once() -> None:
    shown = Screen()
    for each in (
        outcome("synced", bytes=1000),
        outcome("skipped"),
        *[outcome("failed", REFUSED)] * 3,
    ):
        shown.console.show_outcome(each)
    assert shown.texts == (
        "synced s/app:1 -> t/app:1 (1.0 KB, 0.0s)\n",
        f"{FAILED}hint: look at the source\n{FAILED}{FAILED}",
    )


@pytest.mark.parametrize(
    ("status", "terminal", "is_shown"),
    [("synced", False, True), ("skipped", False, False), ("skipped", True, True)],
)
def test_the_summary_shows_when_there_is_something_or_somebody(
    status: str, terminal: bool, is_shown: bool
) -> None:
    shown, report = Screen(terminal=terminal), Report()
    report.outcomes.append(outcome(status))
    shown.console.print_summary(report, 1.0)
    assert shown.texts == ("\n".join([*report.summary(1.0), ""]) if is_shown else "", "")


def test_json_log_lines_are_objects_with_their_events_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The last moment of a second: the milliseconds must not round up alone.
    world = edge.current()._replace(wall=lambda: 1_700_000_000.9999)
    monkeypatch.setattr(edge, "current", lambda: world)
    shown = Screen(logs_json=True, shows_progress=True, terminal=True)
    shown.console.log("warning", "min_tags", "too few", kept=1, where=Side.TARGET)
    shown.console.show_progress(str(BUSY), BUSY._asdict())
    warning, running = map(json.loads, shown.err.getvalue().splitlines())
    assert warning == {
        "ts": "2023-11-14T22:13:20.999Z",
        "level": "warning",
        "event": "min_tags",
        "message": "too few",
        "kept": 1,
        "where": "Side.TARGET",
    }
    assert (running["event"], running["message"]) == ("heartbeat", BUSY_LINE)
    assert running["expected"] == BUSY.expected


# Progress.


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (BUSY._replace(remaining=225.0), f"{BUSY_LINE}, 3m45s left"),
        (BUSY._replace(registries=("b is slow", "c too")), f"{BUSY_LINE}; b is slow; c too"),
        (Progress(0, 0, 0, 0, 0.0, 0.3), "0 of 0 images"),
        (Progress(1, 1, 999_960, 0, 0.0, 0.3), "1 of 1 images, 1.0 MB of 1.0 MB, 0 B/s"),
        # Read again: more bytes than expected.
        (Progress(1, 1, 3000, 2000, 0.0, 7200.0), "1 of 1 images, 3.0 KB of 3.0 KB, 0 B/s"),
    ],
)
def test_progress_is_one_line(now: Progress, text: str) -> None:
    assert str(now) == text


def test_the_line_that_the_documents_show_is_the_programs() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    now = Progress(12, 29, 78_800_000, 150_100_000, 4_900_000.0, 17.0, remaining=14.6)
    throttled = "docker.io is throttled (429), window 2, next try in 4.2s"
    assert re.findall("(?m)^12 of 29 .*", page) == [str(now._replace(registries=(throttled,)))]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (len(BUSY_LINE), f"{BUSY_LINE[:-2]}~"),
        (10, "12 of 40~"),
        (1, "~"),
        (0, BUSY_LINE),  # a terminal that does not know
    ],
)
def test_a_line_on_a_terminal_never_fills_the_last_column(
    columns: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would move the cursor on, in some terminals to the next line."""
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    shown = Screen(terminal=True, shows_progress=True)
    for _ in range(2):
        shown.console.show_progress(BUSY_LINE, {})
    assert shown.record == [("err", f"{CLEAR}{line}")]


def test_the_line_of_progress_is_cleared_before_any_other_line() -> None:
    shown = Screen(terminal=True, shows_progress=True)
    shown.console.show_progress("1 of 2", {})
    shown.console.log("info", "event", "not wanted")
    shown.console.print_line("done")
    shown.console.print_line("nothing to clear any more")
    assert shown.record == [
        ("err", f"{CLEAR}1 of 2"),
        ("err", CLEAR),
        ("out", "done\n"),
        ("out", "nothing to clear any more\n"),
    ]


def work() -> Any:
    """Return work whose progress is shown, without a run behind it."""
    transport = SimpleNamespace(hosts={}, throttled_lanes={}, last_progress=-math.inf)
    traffic = SimpleNamespace(expected_bytes=90_000_000)
    counts = {"images_known": 4, "images_done": 1, "bytes_moved": 60_000_000}
    return SimpleNamespace(transport=transport, traffic=traffic, **counts)


async def test_the_rate_is_that_of_the_last_seconds_and_the_time_left_needs_one(
    virtual_clock: None,
) -> None:
    shown, progress = Screen(shows_progress=True, terminal=True), work()
    with anyio.move_on_after(40.5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(show_progress, shown.console, progress)
            await anyio.sleep(20.6)
            progress.bytes_moved += 10_000_000
    lines = [text.removeprefix(f"{CLEAR}1 of 4 images, ") for _, text in shown.record]
    assert lines[0] == "60.0 MB of 90.0 MB, 60.0 MB/s"
    assert lines[3] == "60.0 MB of 90.0 MB, 15.0 MB/s"
    assert "60.0 MB of 90.0 MB, 0 B/s" in lines
    assert "70.0 MB of 90.0 MB, 1.0 MB/s, 20s left" in lines
    assert lines[-2:] == ["70.0 MB of 90.0 MB, 0 B/s", CLEAR]


async def test_each_registry_that_is_away_throttled_or_slow_is_named(
    virtual_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((200, 24)))
    progress, now = work(), anyio.current_time()
    away = SimpleNamespace(name="away", is_out=True, since=now - 3, used=0)
    away.describe_wait = lambda: "waiting for away"
    progress.transport.hosts["away"] = away
    for host, seconds in (("hub", 12.25), ("past", 0.1)):
        lane = SimpleNamespace(paused_until=now + seconds, width=2.5)
        progress.transport.throttled_lanes[host] = lane
    for host, used in (("slow", 3), ("idle", 0)):
        here = SimpleNamespace(name=host, is_out=False, since=now, used=used)
        progress.transport.hosts[host] = here
    shown = Screen(shows_progress=True, terminal=True)
    with anyio.move_on_after(11.5):
        await show_progress(shown.console, progress)
    first, last = shown.record[0][1], shown.record[-2][1]
    throttled = "hub is throttled (429), window 2, next try in 11s"
    assert first.endswith(f"; waiting for away, 4.0s; {throttled}")
    assert last.endswith("; slow has not answered for 11s")
    assert not {"idle", "past"} & {*shown.err.getvalue().split()}
