"""Results on standard output; everything else, progress among it, on standard error.

Invariants: standard output holds only results, with `--json` exactly one document. No secret
and no control character of foreign text reaches either stream.
Follows: docs/specification.md section 6, docs/design.md sections 2 and 10.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO

from _regsync import edge
from _regsync.errors import ConfigError, RegsyncError
from _regsync.text import json_text, mask, one_line, reason_of

if TYPE_CHECKING:
    from _regsync.audit import Audit
    from _regsync.sync.report import Outcome, Report

LEVELS = ("trace", "debug", "info", "warning", "error")
CLEAR_LINE = "\r\x1b[K"  # clears the line that the cursor is in, and returns to its beginning

# Characters. A line has room for two references and a cause, each of which has a limit of its own.
LONGEST_LINE = 2000

USUAL_COLUMNS = 80  # of a terminal that does not report its size


class Console:
    """Standard output and standard error, in the formats that the command line selects."""

    def __init__(self, *, writes_json: bool = False, logs_json: bool = False) -> None:
        """`writes_json` is `--json`, `logs_json` is `--log-format json`."""
        if isinstance(sys.stdout, TextIOWrapper):
            # Files are UTF-8, whatever encoding the locale selects. Names may be no text at all.
            sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
        is_terminal = sys.stderr.isatty() and edge.variable("TERM") != "dumb"
        self.writes_json = writes_json
        self.shown_hints = set[str]()  # hints that are not to be shown again
        self._has_document = False  # whether one was printed
        self._logs_json = logs_json
        self._takes_escapes = is_terminal and not logs_json
        self._progress_line = ""  # on the terminal now
        self.configure("warning", shows_progress=False)

    def configure(self, level: str, *, shows_progress: bool) -> None:
        """Set the lowest level that `log` writes, one of LEVELS, and whether there is progress."""
        self._threshold = LEVELS.index(level)
        self.shows_progress = shows_progress
        # Whether progress is a line that is redrawn at the bottom of the terminal. Otherwise it is a
        # log line every 30 seconds.
        self.has_progress_line = shows_progress and self._takes_escapes

    def shows(self, level: str) -> bool:
        """Report whether `log` writes lines of this level."""
        return LEVELS.index(level) >= self._threshold

    def log(self, level: str, event: str, message: str, **fields: object) -> None:
        """Write a line to standard error, unless its level is below the console's level."""
        if self.shows(level):
            self.tell(level, event, message, prefix=f"{level}: ", **fields)

    def tell(
        self, level: str, event: str, message: str, *, prefix: str = "", **fields: object
    ) -> None:
        """Write a line to standard error regardless of its level.

        In the text format the line is `prefix` and `message`, followed by `fields["hint"]` on a
        line of its own, unless that hint was shown before. In the JSON format the line is an object
        of all arguments except `prefix`.
        """
        if self._logs_json:
            entry = {"ts": timestamp(), "level": level, "event": event, "message": message}
            self._write_line(sys.stderr, json_text({**entry, **fields}))
            return

        self._write_line(sys.stderr, one_line(mask(prefix + message), LONGEST_LINE))
        hint = fields.get("hint")
        if isinstance(hint, str) and hint not in self.shown_hints:
            self.shown_hints.add(hint)
            self._write_line(sys.stderr, one_line(mask(f"hint: {hint}"), LONGEST_LINE))

    def show_outcome(self, outcome: Outcome) -> None:
        """Print a synced image to standard output, or log a failed image to standard error.

        Skipped images are not shown. With `--json` synced images are only in the document.
        """
        if outcome.error is not None:
            fields = {**outcome.as_json(), "hint": outcome.error.hint}
            self.tell("error", "image_failed", outcome.line(), **fields)
        elif outcome.status == "synced" and not self.writes_json:
            self.print_line(outcome.line())

    def show_error(self, error: RegsyncError) -> None:
        """Log the error that ended the command, a line for each problem of a configuration.

        With `--json` the error is also printed as the JSON document, unless the command has printed
        its own.
        """
        prefix = f"error: {error.code}: "
        problems = error.problems if isinstance(error, ConfigError) else ()
        named = {"code": error.code, "hint": error.hint}
        for problem in problems or [error]:
            self.tell("error", "run_failed", str(problem), prefix=prefix, **named)
        if self.writes_json and not self._has_document:
            entries = [problem._asdict() for problem in problems]
            described = {"code": error.code, "message": str(error), "hint": error.hint}
            self.print_document({"schema": 1, "error": described, "problems": entries})

    def show_traceback(self, error: BaseException) -> None:
        """Write the traceback of an error, for whoever looks into it."""
        import traceback  # only needed here

        text = "".join(traceback.format_exception(error))
        if self._logs_json:
            self.tell("trace", "traceback", text)
        else:
            self._write_line(sys.stderr, "\n".join(map(mask, text.splitlines())))

    def print_summary(self, report: Report | Audit, elapsed: float) -> None:
        """Print the report's summary. `elapsed` is in seconds.

        It is not printed with `--json`, nor for a run without changes if standard output is not a
        terminal.
        """
        if not self.writes_json and (report.has_something_to_report or sys.stdout.isatty()):
            self.print_lines(report.summary(elapsed))

    def print_document(self, document: Mapping[str, object]) -> None:
        """Print the JSON document of a command, in ASCII."""
        self._has_document = True
        self._write_line(sys.stdout, json_text(document))

    def print_line(self, text: str) -> None:
        """Print a result to standard output, on one line and without control characters."""
        self._write_line(sys.stdout, one_line(mask(text), LONGEST_LINE))

    def print_lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.print_line(text)

    def print_text(self, text: str) -> None:
        """Print the text of a file, such as YAML or HTML, as it is."""
        self._write(sys.stdout, text)

    def show_progress(self, text: str, fields: Mapping[str, object]) -> None:
        """Redraw the line on the terminal. Without a terminal, log a line with `fields` instead."""
        if not self.has_progress_line:
            self.tell("info", "heartbeat", text, prefix="still running: ", **fields)
            return
        line = one_line(mask(text), LONGEST_LINE)
        # The last column stays blank, because some terminals wrap a line that fills it. Clearing
        # the line would then leave a part of it on the screen.
        columns = terminal_columns(sys.stderr)
        if len(line) >= columns:
            line = f"{line[: max(0, columns - 2)]}~"
        if line != self._progress_line:
            # Clear and draw in one write, so that the line does not flicker.
            self._write(sys.stderr, f"{CLEAR_LINE}{line}")
            self._progress_line = line

    def clear_progress(self) -> None:
        """Remove the line of progress, before other text is written to the terminal."""
        if self._progress_line:
            self._progress_line = ""
            self._write(sys.stderr, CLEAR_LINE)

    def _write_line(self, stream: TextIO, text: str) -> None:
        self.clear_progress()
        self._write(stream, f"{text}\n")

    def _write(self, stream: TextIO, text: str) -> None:
        """Write to a stream. Results that cannot be written raise RegsyncError or BrokenPipeError."""
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            # A log on a full disk must not stop a mirror, but lost results must stop it.
            if stream is sys.stderr:
                return
            if isinstance(error, BrokenPipeError):
                raise
            reason = reason_of(error)
            message = f"the output of this command cannot be written: {reason}"
            raise RegsyncError(message) from error


def terminal_columns(stream: TextIO) -> int:
    """Return the columns of a stream's terminal, or 80 if they are unknown."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return USUAL_COLUMNS
    return columns or USUAL_COLUMNS  # some terminals report a size of 0 by 0


def timestamp() -> str:
    """Return the current time in UTC with milliseconds, in the format of RFC 3339."""
    moment = datetime.fromtimestamp(edge.current().wall(), timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
