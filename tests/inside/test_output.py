"""Which stream gets which line, in text and JSON, on terminals and on pipes of any encoding."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from _regsync import edge
from _regsync.app.console import Console, Progress
from _regsync.app.progress import Pace, show_progress
from _regsync.errors import ConfigError, ContentError, Problem, RegsyncError, Side
from _regsync.sync.report import Outcome, Report
from tests.inside.works import ask, throttle, work

HOSTILE = "a\x1b[2Jb\x9b31mc\rd\ne\u202ef\x00g\x7fh\u2028i"
CLEAR = "\r\x1b[K"
ONE = Progress(1, 2, 0, 0, 0.0, 1.0)
TWO_OF_TWO = ONE._replace(done=2)


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


class Stream(io.StringIO):
    """A stream that may be a terminal, and that writes into a record shared with its sibling."""

    def __init__(self, name: str, record: list[tuple[str, str]], terminal: bool = False) -> None:
        super().__init__()
        self.name_, self._record, self._terminal = name, record, terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        self._record.append((self.name_, text))
        return super().write(text)


class Screen:
    """A console, with what it wrote to each stream and in which order."""

    def __init__(self, *, terminal: bool = False, level: str = "warning", **options: bool) -> None:
        self.record: list[tuple[str, str]] = []
        self.out = Stream("out", self.record, terminal)
        self.err = Stream("err", self.record, terminal)
        settings = {"writes_json": False, "logs_json": False, "shows_progress": False, **options}
        self.console = Console(self.out, self.err, level=level, **settings)

    @property
    def texts(self) -> tuple[str, str]:
        return self.out.getvalue(), self.err.getvalue()

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.err.getvalue().splitlines()]


def outcome(status: str, error: RegsyncError | None = None, **details: Any) -> Outcome:
    return Outcome(source="s/app:1", target="t/app:1", status=status, error=error, **details)


REFUSED = ContentError("wrong digest", hint="look at the source").add_context(
    Side.SOURCE, "fetch blob", "s/app"
)
FAILED = "failed s/app:1 -> t/app:1: CONTENT_ERROR: fetch blob s/app: wrong digest\n"


# Which stream.


def test_what_was_synced_is_a_result_and_what_failed_is_not() -> None:
    screen = Screen()
    for each in (outcome("synced", bytes=1000), outcome("skipped"), outcome("failed", REFUSED)):
        screen.console.show_outcome(each)
    assert screen.texts == (
        "synced s/app:1 -> t/app:1 (1.0 KB, 0.0s)\n",
        f"{FAILED}hint: look at the source\n",
    )


def test_with_json_standard_output_holds_one_document_whatever_is_said() -> None:
    screen = Screen(writes_json=True, level="trace", shows_progress=True)
    report = Report()
    for each in (outcome("synced"), outcome("failed", REFUSED)):
        report.outcomes.append(each)
        screen.console.show_outcome(each)
    screen.console.log("trace", "request", "GET /v2/")
    screen.console.update_progress(ONE)
    screen.console.print_summary(report, 1.0)
    screen.console.print_document({"schema": 1})
    assert screen.out.getvalue() == '{"schema": 1}\n'
    assert screen.err.getvalue() == (
        f"{FAILED}hint: look at the source\ntrace: GET /v2/\nstill running: 1 of 2 images\n"
    )


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("error", ["error"]),
        ("warning", ["warning", "error"]),
        ("debug", ["debug", "info", "warning", "error"]),
        ("trace", ["trace", "debug", "info", "warning", "error"]),
    ],
)
def test_a_line_shows_from_its_level_upwards(level: str, shown: list[str]) -> None:
    screen = Screen(level=level)
    for each in ("trace", "debug", "info", "warning", "error"):
        screen.console.log(each, "event", "text")
    assert screen.texts == ("", "".join(f"{each}: text\n" for each in shown))


def test_quiet_silences_neither_results_nor_failures() -> None:
    screen = Screen(level="error")
    screen.console.show_outcome(outcome("synced"))
    screen.console.show_outcome(outcome("failed", REFUSED))
    screen.console.show_error(RegsyncError("broken"))
    assert screen.out.getvalue().startswith("synced ")
    assert (
        screen.err.getvalue()
        == f"{FAILED}hint: look at the source\nerror: INTERNAL_ERROR: broken\n"
    )


@pytest.mark.parametrize(
    ("status", "terminal", "shown"),
    [
        ("synced", False, True),
        ("failed", False, True),
        ("skipped", False, False),
        ("skipped", True, True),
    ],
)
def test_the_summary_shows_when_there_is_something_or_somebody(
    status: str, terminal: bool, shown: bool
) -> None:
    screen, report = Screen(terminal=terminal), Report()
    report.outcomes.append(outcome(status, REFUSED if status == "failed" else None))
    screen.console.print_summary(report, 1.0)
    assert screen.texts == ("\n".join([*report.summary(1.0), ""]) if shown else "", "")


# Errors.

TWO = ConfigError(
    "2 problems",
    problems=(
        Problem("mirror.yaml", 3, 5, "mappings[0].from", "is missing"),
        Problem("mirror.yaml", 0, 0, "", "is empty"),
    ),
)


def test_an_error_with_json_is_the_published_document_and_still_lines_for_people() -> None:
    screen = Screen(writes_json=True)
    screen.console.show_error(TWO)
    assert json.loads(screen.out.getvalue()) == {
        "schema": 1,
        "error": {"code": "CONFIG_ERROR", "message": "2 problems", "hint": None},
        "problems": [
            {
                "file": "mirror.yaml",
                "line": 3,
                "column": 5,
                "path": "mappings[0].from",
                "message": "is missing",
            },
            {"file": "mirror.yaml", "line": 0, "column": 0, "path": "", "message": "is empty"},
        ],
    }
    assert screen.err.getvalue() == (
        "error: CONFIG_ERROR: mirror.yaml:3:5: mappings[0].from: is missing\n"
        "error: CONFIG_ERROR: mirror.yaml: is empty\n"
    )


# JSON log.


def test_json_log_lines_are_objects_with_their_events_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The last moment of a second: the milliseconds must not round up alone.
    world = edge.current()._replace(wall=lambda: 1_700_000_000.9999)
    monkeypatch.setattr(edge, "current", lambda: world)
    screen = Screen(logs_json=True, shows_progress=True, terminal=True)
    screen.console.log("warning", "min_tags", "too few", kept=1)
    screen.console.show_outcome(outcome("failed", REFUSED))
    screen.console.show_error(ConfigError("no such file", hint="give -c a file"))
    screen.console.update_progress(Progress(1, 2, 500, 1000, 50.0, 10.0))
    assert screen.out.getvalue() == ""
    warning, failed, ended, running = screen.logged()
    assert warning == {
        "ts": "2023-11-14T22:13:20.999Z",
        "level": "warning",
        "event": "min_tags",
        "message": "too few",
        "kept": 1,
    }
    assert (failed["level"], failed["event"], failed["error"]["code"]) == (
        "error",
        "image_failed",
        "CONTENT_ERROR",
    )
    assert (ended["event"], ended["code"], ended["hint"]) == (
        "run_failed",
        "CONFIG_ERROR",
        "give -c a file",
    )
    del running["ts"]
    assert running == {
        "level": "info",
        "event": "heartbeat",
        "message": "1 of 2 images, 500 B of 1.0 KB, 50 B/s",
        **{"done": 1, "known": 2, "bytes": 500, "expected": 1000, "rate": 50.0, "elapsed": 10.0},
        **{"remaining": None, "stopping": None, "registries": []},
    }


def test_a_field_that_json_does_not_know_is_shown_as_text() -> None:
    screen = Screen(logs_json=True)
    screen.console.log("warning", "event", "text", where=Side.TARGET)
    assert screen.logged()[0]["where"] == "Side.TARGET"


# Hostile text and narrow streams.


@pytest.mark.parametrize("logs_json", [False, True])
@pytest.mark.parametrize("writes_json", [False, True])
def test_no_control_character_reaches_a_stream(logs_json: bool, writes_json: bool) -> None:
    screen = Screen(logs_json=logs_json, writes_json=writes_json, level="trace")
    error = ConfigError(HOSTILE, hint=HOSTILE, problems=(Problem(HOSTILE, 1, 1, HOSTILE, HOSTILE),))
    screen.console.log("warning", "event", HOSTILE, field=HOSTILE)
    screen.console.show_outcome(
        Outcome(source=HOSTILE, target=HOSTILE, status="failed", error=error)
    )
    screen.console.show_outcome(Outcome(source=HOSTILE, target=HOSTILE, status="synced"))
    screen.console.show_error(error)
    screen.console.print_line(HOSTILE)
    screen.console.print_document({"key": HOSTILE})
    for text in screen.texts:
        assert not set(text) & set("\x1b\x9b\r\u202e\x00\x7f\u2028")
        assert all("a" in line for line in text.splitlines()), (
            "foreign text begins no line of its own"
        )


def test_a_long_text_is_cut() -> None:
    screen = Screen()
    screen.console.log("warning", "event", "x" * 100_000)
    assert len(screen.err.getvalue()) < 2100


def narrow(encoding: str) -> tuple[Console, io.BytesIO, io.BytesIO]:
    out, err = io.BytesIO(), io.BytesIO()
    console = Console(
        io.TextIOWrapper(out, encoding, newline="\n"),
        io.TextIOWrapper(err, encoding, newline="\n"),
        level="warning",
        writes_json=False,
        logs_json=False,
        shows_progress=False,
    )
    return console, out, err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_without_utf8_still_gets_every_line(encoding: str) -> None:
    console, out, err = narrow(encoding)
    console.print_line("caf\u00e9 \u2192 and so on\u2026")
    console.log("warning", "event", "\u2192")
    assert (out.getvalue(), err.getvalue()) == (
        b"caf\\xe9 \\u2192 and so on...\n",
        b"warning: \\u2192\n",
    )


def test_a_document_is_json_on_a_stream_of_any_encoding() -> None:
    for encoding in ("ascii", "latin-1", "utf-16"):
        console, out, _ = narrow(encoding)
        value = {"text": "caf\u00e9 \u2192 \U0001f600 \udc80"}
        console.print_document(value)
        assert json.loads(out.getvalue().decode(encoding)) == value


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_iterator_in_a_document_is_an_array(count: int) -> None:
    screen = Screen(writes_json=True)
    items = [{"number": number, "text": "\u2192"} for number in range(count)]
    screen.console.print_document({"schema": 1, "images": iter(items), "totals": {"images": count}})
    whole = {"schema": 1, "images": items, "totals": {"images": count}}
    assert screen.out.getvalue() == json.dumps(whole) + "\n"


def test_a_large_report_is_never_whole_in_memory() -> None:
    """Each item is written before many more are asked for."""
    screen = Screen(writes_json=True)
    waiting = list[int]()

    def items() -> Iterator[str]:
        for number in range(1000):
            waiting.append(1000 * number - len(screen.out.getvalue()))
            yield "x" * 1000

    screen.console.print_document({"schema": 1, "images": items()})
    assert len(json.loads(screen.out.getvalue())["images"]) == 1000
    assert max(waiting) < 70_000


# Progress.

BUSY = Progress(12, 40, 31_500_000, 1_200_000_000, 5_200_000.0, 65.0)


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (BUSY, "12 of 40 images, 31.5 MB of 1.2 GB, 5.2 MB/s"),
        (
            BUSY._replace(remaining=225.0),
            "12 of 40 images, 31.5 MB of 1.2 GB, 5.2 MB/s, 3m45s left",
        ),
        (
            BUSY._replace(
                remaining=4.0, registries=("waiting for away, 12s", "b has not answered for 10s")
            ),
            "12 of 40 images, 31.5 MB of 1.2 GB, 5.2 MB/s, 4.0s left; waiting for away, 12s; "
            "b has not answered for 10s",
        ),
        (
            BUSY._replace(stopping=20.0),
            "stopping in 20s at most; 12 of 40 images, 31.5 MB of 1.2 GB, 5.2 MB/s",
        ),
        (Progress(0, 0, 0, 0, 0.0, 0.3), "0 of 0 images"),
        # Read again: more bytes than expected.
        (Progress(1, 1, 3000, 2000, 0.0, 7200.0), "1 of 1 images, 3.0 KB of 3.0 KB, 0 B/s"),
    ],
)
def test_progress_is_one_line(now: Progress, text: str) -> None:
    assert str(now) == text


def at(screen: Screen, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    screen.err.fileno = lambda: 2  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("columns", "line"),
    [(80, str(BUSY)), (len(str(BUSY)), f"{str(BUSY)[:-2]}~"), (10, "12 of 40~"), (1, "~")],
)
def test_a_line_on_a_terminal_never_fills_the_last_column(
    columns: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would move the cursor on, in some terminals to the next line."""
    screen = Screen(terminal=True, shows_progress=True)
    at(screen, monkeypatch, columns)
    screen.console.update_progress(BUSY)
    assert screen.record == [("err", f"{CLEAR}{line}")]


def test_a_terminal_that_does_not_know_its_width_has_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen(terminal=True, shows_progress=True)
    at(screen, monkeypatch, 0)
    screen.console.update_progress(BUSY._replace(registries=("x" * 80,)))
    assert len(screen.err.getvalue().removeprefix(CLEAR)) == 79


def test_the_line_of_progress_is_cleared_before_any_other_line() -> None:
    screen = Screen(terminal=True, shows_progress=True)
    screen.console.update_progress(ONE)
    screen.console.show_outcome(outcome("synced"))
    screen.console.update_progress(TWO_OF_TWO)
    screen.console.log("info", "event", "not wanted")
    screen.console.print_line("done")
    screen.console.print_line("nothing to clear any more")
    assert screen.record == [
        ("err", f"{CLEAR}{ONE}"),
        ("err", CLEAR),
        ("out", "synced s/app:1 -> t/app:1 (0 B, 0.0s)\n"),
        ("err", f"{CLEAR}{TWO_OF_TWO}"),
        ("err", CLEAR),
        ("out", "done\n"),
        ("out", "nothing to clear any more\n"),
    ]


def test_the_same_progress_is_not_written_twice_and_another_replaces_it() -> None:
    screen = Screen(terminal=True, shows_progress=True)
    for now in (ONE, ONE, TWO_OF_TWO):
        screen.console.update_progress(now)
    _, second = screen.record
    assert second == ("err", f"{CLEAR}{TWO_OF_TWO}")


def test_a_terminal_that_cannot_clear_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen(terminal=True, shows_progress=True)
    assert (screen.console.has_progress_line, screen.console.shows_progress) == (False, True)
    screen.console.update_progress(BUSY)
    screen.console.log("warning", "event", "text")
    assert screen.err.getvalue() == (
        "still running: 12 of 40 images, 31.5 MB of 1.2 GB, 5.2 MB/s\nwarning: text\n"
    )


@pytest.mark.parametrize(
    ("terminal", "progress", "logs_json", "live", "heartbeat"),
    [
        (True, True, False, True, False),
        (True, True, True, False, True),
        (False, True, False, False, True),
        (True, False, False, False, False),
        (False, False, False, False, False),
    ],
)
def test_progress_is_live_on_terminals_and_a_heartbeat_elsewhere(
    terminal: bool, progress: bool, logs_json: bool, live: bool, heartbeat: bool
) -> None:
    console = Screen(terminal=terminal, shows_progress=progress, logs_json=logs_json).console
    assert (console.has_progress_line, console.shows_progress) == (live, live or heartbeat)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_without_a_terminal_a_heartbeat_comes_every_thirty_seconds() -> None:
    screen = Screen(shows_progress=True)
    with anyio.move_on_after(61):
        await show_progress(screen.console, work())
    assert screen.texts == (
        "",
        "still running: 1 of 4 images, 60.0 MB of 90.0 MB, 2.0 MB/s\n"
        "still running: 1 of 4 images, 60.0 MB of 90.0 MB, 0 B/s\n",
    )


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_on_a_terminal_the_line_moves_each_second_and_is_gone_at_the_end() -> None:
    screen = Screen(shows_progress=True, terminal=True)
    with anyio.move_on_after(4.6):
        await show_progress(screen.console, work())
    rates = [text.partition("of 90.0 MB, ")[2] for _, text in screen.record]
    assert rates == ["60.0 MB/s", "30.0 MB/s", "20.0 MB/s", "15.0 MB/s", ""]
    assert screen.record[-1] == ("err", CLEAR)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_the_rate_is_that_of_the_last_seconds() -> None:
    screen = Screen(shows_progress=True, terminal=True)
    with anyio.move_on_after(12.6):
        await show_progress(screen.console, work())
    assert screen.record[-2][1].endswith(", 0 B/s"), "all bytes came in the first second"


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_each_registry_that_is_away_throttled_or_slow_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = work()
    away = {"name": "away", "is_out": True, "since": anyio.current_time() - 3}
    reach = SimpleNamespace(**away, describe_wait=lambda: "waiting for away")
    shown.transport.reaches.append(reach)
    throttle(shown, "hub", 12.25)
    throttle(shown, "past", 0.1)
    ask(shown, "slow", requests=7, in_use=3)
    ask(shown, "idle", requests=7, in_use=0)
    screen = Screen(shows_progress=True, terminal=True)
    at(screen, monkeypatch, 200)
    with anyio.move_on_after(11.5):
        await show_progress(screen.console, shown)

    _, *first = screen.record[0][1].split("; ")
    assert first == ["waiting for away, 4.0s", "hub is throttled (429), window 2, next try in 11s"]
    assert screen.record[-2][1].endswith("; slow has not answered for 10s")
    assert not re.search("idle|past", screen.err.getvalue())


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_registry_is_not_slow_while_bytes_move() -> None:
    shown = work()
    ask(shown, "slow", requests=7, in_use=3)
    screen = Screen(shows_progress=True, terminal=True)
    with anyio.move_on_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(show_progress, screen.console, shown)
            while True:
                await anyio.sleep(1)
                shown.transport.bytes_sent += 1
    assert "slow" not in screen.err.getvalue()


# How long the rest takes.


def told(moments: Iterable[tuple[float, int, int]]) -> list[float | None]:
    """Return the times left that are told, for moments with bytes moved and expected."""
    pace = Pace(0.0)
    shown = list[float | None]()
    for now, moved, expected in moments:
        pace.record(now, moved, expected)
        shown.append(pace.remaining)
    return shown


def test_the_time_left_is_told_when_no_more_to_move_has_been_found_for_a_while() -> None:
    growing = [(float(n), n * 10, 1000 + n * 100) for n in range(1, 10)]
    settled = [(float(n), n * 10, 1900) for n in range(10, 25)]
    shown = told([*growing, *settled])
    assert shown[:18] == [None] * 18
    assert shown[18:] == [(1900 - n * 10) / 10 for n in range(19, 25)]


def test_nothing_is_said_of_the_rest_while_nothing_moves() -> None:
    assert told([(float(n), 0, 1000) for n in range(1, 60)]) == [None] * 59
    assert told([(float(n), 500, 1000) for n in range(1, 60)])[10:] == [None] * 49
    assert told([(float(n), n * 100, 1000) for n in range(1, 60)])[9:] == [None] * 50


# Hosts that all images have.


def test_a_terminal_shows_hosts_once_where_all_images_have_the_same() -> None:
    screen = Screen(terminal=True)
    screen.console.omit_shared_hosts({("s", "t")})
    screen.console.show_outcome(outcome("skipped"))
    assert screen.out.getvalue() == ""
    screen.console.show_outcome(outcome("synced"))
    screen.console.show_outcome(outcome("synced", bytes=1000))
    screen.console.show_outcome(outcome("failed", REFUSED))
    assert screen.out.getvalue() == (
        "s -> t\nsynced app:1 -> app:1 (0 B, 0.0s)\nsynced app:1 -> app:1 (1.0 KB, 0.0s)\n"
    )
    assert FAILED.strip() in re.sub("\x1b\\[[0-9;]*m", "", screen.err.getvalue())


def test_a_layout_that_all_images_go_to_is_shown_once_too() -> None:
    screen = Screen(terminal=True)
    screen.console.omit_shared_hosts({("s", "oci-layout:./usb")})
    done = Outcome(source="s/team/app:1", target="oci-layout:./usb//team/app:1", status="synced")
    screen.console.show_outcome(done)
    assert screen.out.getvalue() == (
        "s -> oci-layout:./usb\nsynced team/app:1 -> team/app:1 (0 B, 0.0s)\n"
    )


@pytest.mark.parametrize(
    ("terminal", "hosts"),
    [(False, {("s", "t")}), (True, {("s", "t"), ("s", "u")}), (True, {("s", "t"), ("r", "t")})],
)
def test_pipes_and_runs_between_several_hosts_show_them_with_each_image(
    terminal: bool, hosts: set[tuple[str, str]]
) -> None:
    screen = Screen(terminal=terminal)
    screen.console.omit_shared_hosts(hosts)
    screen.console.show_outcome(outcome("synced"))
    assert screen.out.getvalue() == "synced s/app:1 -> t/app:1 (0 B, 0.0s)\n"


# Colours.


@pytest.mark.parametrize(
    ("terminal", "term", "no_color", "logs_json", "coloured"),
    [
        (True, "xterm", None, False, True),
        (True, "xterm", "", False, True),  # no-color.org: empty is as absent
        (True, "xterm", "1", False, False),
        (True, "dumb", None, False, False),
        (True, "xterm", None, True, False),
        (False, "xterm", None, False, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    term: str,
    no_color: str | None,
    logs_json: bool,
    coloured: bool,
) -> None:
    monkeypatch.setenv("TERM", term)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    screen = Screen(terminal=terminal, logs_json=logs_json)
    screen.console.show_outcome(outcome("synced"))
    screen.console.show_outcome(outcome("failed", REFUSED))
    screen.console.log("warning", "event", "text")
    out, err = screen.texts
    assert "\x1b" not in out, "results are for other programs too"
    if not logs_json:
        expected = f"{FAILED}hint: look at the source\nwarning: text\n"
        for word, number in (("failed", 31), ("warning:", 33)) if coloured else ():
            expected = expected.replace(f"{word} ", f"\x1b[{number}m{word}\x1b[0m ", 1)
        assert err == expected
    assert ("\x1b[31m" in err) is coloured


# Many failures.


def test_a_hint_is_given_once_for_all_images_that_it_helps() -> None:
    screen = Screen()
    for _ in range(3):
        screen.console.show_outcome(outcome("failed", REFUSED))
    screen.console.show_outcome(outcome("failed", ContentError("wrong", hint="another")))
    assert screen.err.getvalue().splitlines() == [
        FAILED.rstrip(),
        "hint: look at the source",
        FAILED.rstrip(),
        FAILED.rstrip(),
        "failed s/app:1 -> t/app:1: CONTENT_ERROR: wrong",
        "hint: another",
    ]


@pytest.mark.parametrize("writes_json", [False, True])
@pytest.mark.parametrize("logs_json", [False, True])
def test_causes_that_images_share_are_told_once_more_with_their_number(
    writes_json: bool, logs_json: bool
) -> None:
    screen, report = Screen(writes_json=writes_json, logs_json=logs_json, level="error"), Report()
    for _ in range(12):
        report.outcomes.append(outcome("failed", REFUSED))
    report.outcomes.append(outcome("failed", ContentError("only once")))
    screen.console.print_summary(report, 1.0)
    out, err = screen.texts
    assert out.splitlines() == ([] if writes_json else report.summary(1.0))
    if logs_json:
        (told,) = screen.logged()
        assert (told["event"], told["level"], told["count"]) == ("failed_alike", "error", 12)
        assert told["cause"] == "CONTENT_ERROR s: wrong digest"
    else:
        assert err == "Failed: 12 x CONTENT_ERROR s: wrong digest\n"
