"""What the user sees: results, log lines, progress, the JSON document. Owns: the two output streams
and how values become lines on them. May not know: what a run does. Invariant: standard output holds
results only, with `--json` exactly one document; everything else goes to standard error; no control
character of foreign text reaches either. Follows docs/specification.md section 6, docs/design.md
sections 2 and 10."""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple, TextIO

from _regsync.errors import RegsyncError
from _regsync.sync.report import Outcome, Report
from _regsync.text import duration_text, one_line, size_text

_LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40}


_LONGEST_LINE = 2000  # an image's holds two references and a cause that was cut before


_COLOURS = {"error": "\x1b[31m", "warning": "\x1b[33m"}


class Snapshot(NamedTuple):
    """How far a run is: images and bytes, done of known; bytes a second; seconds; what takes long."""

    done: int
    known: int
    bytes: int
    expected: int
    rate: float
    elapsed: float
    waiting: str

    def __str__(self) -> str:
        text = f"{self.done} of {self.known} images, {self.data}, {duration_text(self.elapsed)}"
        return f"{text}; {self.waiting}" if self.waiting else text

    @property
    def data(self) -> str:
        whole = size_text(
            max(self.bytes, self.expected)
        )  # a blob that is read again makes more than were expected
        return f"{size_text(self.bytes)} of {whole}, {size_text(int(self.rate))}/s"


def progress_lines(now: Snapshot, columns: int, marks: str = "#-") -> list[str]:
    """Return the live display: at most three lines, none as wide as the terminal."""
    rows = [("images", now.done, now.known, f"{now.done} of {now.known}")]
    if now.expected or now.bytes:
        rows.append(("data", now.bytes, max(now.bytes, now.expected), now.data))
    width = min(
        24, columns - 10 - max(30, *(len(text) for *_, text in rows))
    )  # usual texts do not move the bars
    lines = []
    for name, part, whole, text in rows:
        full = width * part // max(whole, 1)
        bar = f"{marks[0] * full}{marks[1] * (width - full)} " if width > 3 else ""
        lines.append(f"{name:<7}{bar}{text}")
    lines.append(f"{duration_text(now.elapsed):<7}{now.waiting}".rstrip())
    # The last column wraps on some terminals, and a line that wraps is not cleared.
    return [line if len(line) < columns else f"{line[: max(0, columns - 2)]}~" for line in lines]


class Console:
    def __init__(
        self, out: TextIO, err: TextIO, *, level: str, as_json: bool, json_log: bool, progress: bool
    ) -> None:
        self._out = out
        self._err = err
        self._threshold = _LEVELS[level]
        self.as_json = as_json
        self._json_log = json_log
        terminal = err.isatty() and os.environ.get("TERM") != "dumb" and not json_log
        self.live = progress and terminal
        self.heartbeat = progress and not terminal
        self._colours = {} if os.environ.get("NO_COLOR") or not terminal else _COLOURS
        self._marks = (
            "█░" if (getattr(err, "encoding", None) or "").lower().startswith("utf") else "#-"
        )
        self._shown = list[str]()
        self.hinted = set[str]()
        self.lost = False  # whether a stream could not take what was written to it

    def log(self, level: str, event: str, message: str, **fields: Any) -> None:
        if _LEVELS[level] >= self._threshold:
            self._say(f"{level}: {message}", level, event, message, **fields)

    def _say(self, text: str, level: str, event: str, message: str, **fields: Any) -> None:
        text = one_line(text, _LONGEST_LINE)
        if self._json_log:
            seconds, rest = divmod(time.time_ns(), 1_000_000_000)
            stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1_000_000:03d}Z"
            text = json.dumps(
                {"ts": stamp, "level": level, "event": event, "message": message, **fields},
                default=str,
            )
        elif colour := self._colours.get(level):
            word, *more = text.split(" ", 1)
            text = " ".join([f"{colour}{word}\x1b[0m", *more])
        self._line(self._err, text)
        hint = fields.get("hint")
        if hint and hint not in self.hinted and not self._json_log:  # once for all that it helps
            self.hinted.add(hint)
            self._line(self._err, one_line(f"hint: {hint}", _LONGEST_LINE))

    def outcome(self, outcome: Outcome) -> None:
        """Show one image: what was done on standard output, what failed on standard error."""
        if outcome.error is not None:
            line = outcome.line()
            self._say(
                line, "error", "image_failed", line, **outcome.as_json(), hint=outcome.error.hint
            )
        elif outcome.status == "synced" and not self.as_json:
            self.line(outcome.line())

    def error(self, error: RegsyncError) -> None:
        problems = getattr(error, "problems", ())
        code = error.code
        hint = error.hint
        for line in map(str, problems or [error]):
            self._say(f"error: {code}: {line}", "error", "run_failed", line, code=code, hint=hint)
        if self.as_json:
            told = {"code": code, "message": str(error), "hint": hint}
            self.document(
                {"schema": 1, "error": told, "problems": [each._asdict() for each in problems]}
            )

    def summary(self, report: Report, elapsed: float) -> None:
        """Show causes that images share, and the summary if there is something to say or somebody
        to hear.
        """
        for count, cause in report.causes():
            text = f"Failed: {count} x {cause}"
            self._say(text, "error", "failed_alike", text, count=count, cause=cause)
        if not self.as_json and (
            self._out.isatty() or any(each.status != "skipped" for each in report.outcomes)
        ):
            for line in report.summary(elapsed):
                self.line(line)

    def document(self, value: dict[str, Any]) -> None:
        """Write the one JSON document: ASCII, so that any stream takes it and no terminal obeys it."""
        self._line(self._out, json.dumps(value))

    def line(self, text: str) -> None:
        self._line(self._out, one_line(text, _LONGEST_LINE))

    def progress(self, now: Snapshot) -> None:
        """Show how far a run is: on a terminal at its bottom, in place; else as a line of its own."""
        if not self.live:
            self._say(f"still running: {now}", "info", "heartbeat", str(now), **now._asdict())
            return
        columns, rows = self._size()
        lines = progress_lines(now, columns, self._marks)[: max(1, rows - 1)]
        if lines != self._shown:
            self.clear("\n".join(lines))
            self._shown = lines

    def _size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self._err.fileno())
        except (OSError, ValueError):
            columns = 0
            rows = 0
        return columns or 80, rows or 24  # some terminals say that they have none

    def clear(self, then: str = "") -> None:
        """Take the live display away, and write in its place; a terminal made narrower has wrapped
        its lines.
        """
        if self._shown:
            columns, _ = self._size()
            up = sum(max(1, -(-len(line) // columns)) for line in self._shown) - 1
            then = "\r" + f"\x1b[{up}A" * (up > 0) + "\x1b[J" + then
            self._shown = []
        if then:
            self._write(self._err, then)

    def _line(self, stream: TextIO, text: str) -> None:
        self.clear()
        try:
            self._write(stream, text + "\n")
        except UnicodeEncodeError:  # a terminal or pipe without UTF-8 still gets its line
            text = text.replace("…", "...").encode("ascii", "backslashreplace").decode("ascii")
            self._write(stream, text + "\n")

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            self.lost = True
            if stream is not self._err:  # a full log disk must not stop a mirror; lost results must
                raise
