"""What the user sees: results, log lines, progress, the JSON document.

Owns: the two output streams, and how values become lines on them.
May not know: what a run does.
Invariants: standard output holds results only, with `--json` exactly one document; everything else
goes to standard error; no control character of foreign text reaches either.
Follows: docs/specification.md section 6, docs/design.md sections 2 and 10.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

from _regsync.app.display import Progress, progress_lines
from _regsync.errors import ConfigError, RegsyncError
from _regsync.text import one_line

if TYPE_CHECKING:
    from _regsync.sync.findings import AuditReport
    from _regsync.sync.report import Outcome, Report

LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40}
COLOURS = {"error": "\x1b[31m", "warning": "\x1b[33m"}
NO_COLOUR = "\x1b[0m"
CLEAR_BELOW = "\x1b[J"

LONGEST_LINE = 2000  # characters: room for two references and a cause, which are cut before

DOCUMENT_PIECE = 64 * 1024  # characters of a document that are written at once

USUAL_COLUMNS = 80  # of a terminal that does not say
USUAL_ROWS = 24


class Console:
    """Standard output and standard error, in the form that the command line asks for."""

    def __init__(
        self, out: TextIO, err: TextIO, *, level: str, as_json: bool, json_log: bool, progress: bool
    ) -> None:
        is_terminal = err.isatty() and os.environ.get("TERM") != "dumb"
        # Whether escape sequences may be written to it.
        is_styled = is_terminal and not json_log
        is_utf8 = (getattr(err, "encoding", None) or "").lower().startswith("utf")
        self.as_json = as_json
        self.live = progress and is_styled  # whether a display stands at the terminal's bottom
        self.heartbeat = progress and not is_styled  # whether a line shows progress now and then
        self.lost = False  # whether a stream could not take what was written to it
        self.hinted = set[str]()  # hints that were shown
        self._out = out
        self._err = err
        self._threshold = LEVELS[level]
        self._json_log = json_log
        self._colours = COLOURS if is_styled and not os.environ.get("NO_COLOR") else {}
        self._marks = "█░" if is_utf8 else "#-"  # as in `progress_lines`
        self._display = list[str]()  # the lines of the live display as they stand
        # The hosts that the lines of images are without, because all have the same; else empty.
        self._common_hosts = ("", "")
        self._has_shown_hosts = False

    def shows(self, level: str) -> bool:
        """Say whether lines of a level are shown."""
        return LEVELS[level] >= self._threshold

    def log(self, level: str, event: str, message: str, **fields: object) -> None:
        """Write a line to standard error, if its level is shown."""
        if self.shows(level):
            self._log_line(level, event, message, prefix=f"{level}: ", **fields)

    def _log_line(
        self, level: str, event: str, message: str, *, prefix: str = "", **fields: object
    ) -> None:
        """Write a line to standard error, whatever levels are shown: the message behind `prefix`, or
        with `--log-format json` an object of all other arguments.
        """
        if self._json_log:
            entry = {"ts": timestamp(), "level": level, "event": event, "message": message}
            self._write_line(self._err, json.dumps({**entry, **fields}, default=str))
            return

        text = one_line(prefix + message, LONGEST_LINE)
        if level in self._colours:
            first_word, blank, rest = text.partition(" ")
            text = f"{self._colours[level]}{first_word}{NO_COLOUR}{blank}{rest}"
        self._write_line(self._err, text)
        hint = fields.get("hint")
        # A hint is shown once, for all failures that it helps against.
        if isinstance(hint, str) and hint not in self.hinted:
            self.hinted.add(hint)
            self._write_line(self._err, one_line(f"hint: {hint}", LONGEST_LINE))

    def outcome(self, outcome: Outcome) -> None:
        """Show one image: what was done on standard output, what failed on standard error."""
        if outcome.error is not None:
            line = outcome.line()
            fields = {**outcome.as_json(), "hint": outcome.error.hint}
            self._log_line("error", "image_failed", line, **fields)
        elif outcome.status == "synced" and not self.as_json:
            source_host, target_host = self._common_hosts
            if source_host and not self._has_shown_hosts:
                self.line(f"{source_host} -> {target_host}")
                self._has_shown_hosts = True
            self.line(outcome.line(with_hosts=not source_host))

    def omit_shared_hosts(self, hosts: Collection[tuple[str, str]]) -> None:
        """Learn from which source hosts to which target hosts a run copies.

        Where there is one of each, a terminal shows them once, and not with each image.
        """
        if len(hosts) == 1 and self._out.isatty():
            (self._common_hosts,) = hosts

    def error(self, error: RegsyncError) -> None:
        """Show the error that ended the command: a line for each problem, with `--json` the document."""
        code = error.code
        hint = error.hint
        problems = error.problems if isinstance(error, ConfigError) else ()
        for problem in problems or [error]:
            prefix = f"error: {code}: "
            self._log_line("error", "run_failed", str(problem), prefix=prefix, code=code, hint=hint)
        if self.as_json:
            self.document(
                {
                    "schema": 1,
                    "error": {"code": code, "message": str(error), "hint": hint},
                    "problems": [problem._asdict() for problem in problems],
                }
            )

    def summary(self, report: Report | AuditReport, elapsed: float) -> None:
        """Show the causes that several failed images share, then the summary.

        Silence means success: without a terminal, a run that did nothing has no summary.
        """
        for count, cause in report.causes():
            text = f"Failed: {count} x {cause}"
            self._log_line("error", "failed_alike", text, count=count, cause=cause)
        if self.as_json:
            return
        if report.did_something or self._out.isatty():
            self.lines(report.summary(elapsed))

    def document(self, value: Mapping[str, object]) -> None:
        """Write the one JSON document. It is ASCII: any stream takes it, and no terminal obeys it.

        An iterator in it becomes an array, item by item, so that no report is whole in memory.
        """
        self.clear()
        text = ""
        for piece in _pieces_of(value):
            text += piece
            if len(text) >= DOCUMENT_PIECE:
                self._write(self._out, text)
                text = ""
        self._write(self._out, text + "\n")

    def line(self, text: str) -> None:
        """Write a result."""
        self._write_line(self._out, one_line(text, LONGEST_LINE))

    def lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.line(text)

    def progress(self, now: Progress) -> None:
        """Show how far a run is: on a terminal at its bottom, in place; else as a line of its own."""
        if not self.live:
            fields = now._asdict()
            self._log_line("info", "heartbeat", str(now), prefix="still running: ", **fields)
            return
        columns, rows = terminal_size(self._err)
        lines = progress_lines(now, columns, self._marks)[: max(1, rows - 1)]
        if lines != self._display:
            self.clear("\n".join(lines))
            self._display = lines

    def clear(self, replacement: str = "") -> None:
        """Take the live display away, and write something in its place."""
        if self._display:
            columns, _ = terminal_size(self._err)
            # A terminal that was made narrower has wrapped the lines of the display.
            height = sum(max(1, -(-len(line) // columns)) for line in self._display)
            up = f"\x1b[{height - 1}A" if height > 1 else ""
            replacement = f"\r{up}{CLEAR_BELOW}{replacement}"
            self._display = []
        if replacement:
            self._write(self._err, replacement)

    def _write_line(self, stream: TextIO, text: str) -> None:
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
            # A full disk with the log on it must not stop a mirror; lost results must.
            if stream is not self._err:
                raise


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return the columns and rows of the terminal that a stream writes to."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return USUAL_COLUMNS, USUAL_ROWS
    # Some terminals say that they have no columns and rows.
    return columns or USUAL_COLUMNS, rows or USUAL_ROWS


def timestamp() -> str:
    """Return the time in UTC with milliseconds, as RFC 3339 has it."""
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{nanoseconds // 1_000_000:03d}Z"


def _pieces_of(document: Mapping[str, object]) -> Iterator[str]:
    """Yield the text of a JSON object in pieces; the items of an iterator in it one by one."""
    separator = "{"
    for key, value in document.items():
        yield f"{separator}{json.dumps(key)}: "
        separator = ", "
        if not isinstance(value, Iterator):
            yield json.dumps(value)
            continue
        yield "["
        for number, item in enumerate(value):
            if number > 0:
                yield ", "
            yield json.dumps(item)
        yield "]"
    yield "}"
