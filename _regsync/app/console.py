"""Write results, log lines, progress and the JSON document.

Owns: standard output and standard error, and the format of every line on them.
May not know: what a run does.
Invariants: standard output holds only results, with `--json` exactly one document. Everything else
goes to standard error. No secret and no control character of foreign text reaches
either stream.
Follows: docs/specification.md section 6, docs/design.md sections 2 and 10.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TextIO

from _regsync import edge
from _regsync.errors import ConfigError, RegsyncError
from _regsync.text import duration_text, json_text, mask, one_line, size_text

if TYPE_CHECKING:
    from _regsync.audit import AuditReport
    from _regsync.sync.report import Outcome, Report

LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40}
COLOURS = {"error": "\x1b[31m", "warning": "\x1b[33m"}  # escape sequence of each coloured level
NO_COLOUR = "\x1b[0m"
CLEAR_LINE = "\r\x1b[K"  # clears the line that the cursor is in, and returns to its beginning

# Characters. A line has room for two references and a cause, each of which has a limit of its own.
LONGEST_LINE = 2000

DOCUMENT_PIECE = 64 * 1024  # characters of a JSON document in one write

USUAL_COLUMNS = 80  # of a terminal that does not report its size


class Progress(NamedTuple):
    """The progress of a run at one moment. The field names are those of the heartbeat's JSON."""

    done: int  # images with a result
    known: int  # images found so far, including `done`
    bytes: int  # bytes moved
    expected: int  # bytes to move for the known images, including `bytes`
    rate: float  # bytes per second
    elapsed: float  # seconds
    remaining: float | None = None  # seconds; None if unknown
    stopping: float | None = None  # seconds until unfinished copies are cancelled after a signal
    registries: tuple[str, ...] = ()  # a text for each registry that is away, throttled or slow

    def __str__(self) -> str:
        text = f"{self.done} of {self.known} images"
        if self.expected or self.bytes:
            # A blob that is sent again adds bytes that were not expected.
            total = max(self.bytes, self.expected)
            rate = size_text(int(self.rate))
            text += f", {size_text(self.bytes)} of {size_text(total)}, {rate}/s"
        if self.remaining is not None:
            text += f", {duration_text(self.remaining)} left"
        if self.stopping is not None:
            text = f"stopping in {duration_text(self.stopping)} at most; {text}"
        return "; ".join((text, *self.registries))


class Console:
    """Standard output and standard error, in the formats that the command line selects."""

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        *,
        level: str,  # the lowest level that `log` writes, a key of LEVELS
        writes_json: bool,  # --json
        logs_json: bool,  # --log-format json
        shows_progress: bool,  # neither -q nor --no-progress
    ) -> None:
        environ = edge.current().environ
        is_terminal = err.isatty() and environ.get("TERM") != "dumb"
        takes_escapes = is_terminal and not logs_json  # whether `err` may get escape sequences
        self.writes_json = writes_json
        self.shows_progress = shows_progress
        # Whether progress is a line that is redrawn at the bottom of the terminal. Otherwise it is a
        # log line every 30 seconds.
        self.has_progress_line = shows_progress and takes_escapes
        self.has_lost_output = False  # whether a write to either stream has failed
        self.shown_hints = set[str]()  # hints that are not to be shown again
        self._out = out
        self._err = err
        self._threshold = LEVELS[level]
        self._logs_json = logs_json
        # The escape sequence of each coloured level.
        self._colours = COLOURS if takes_escapes and not environ.get("NO_COLOR") else {}
        self._progress_line = ""  # on the terminal now

        # If all images have the same two hosts, the hosts are printed once, in a heading above the
        # first image, and the lines of images have no hosts.
        self._omits_hosts = False
        self._unprinted_heading = ""  # the heading until it has been printed

    def shows(self, level: str) -> bool:
        """Report whether `log` writes lines of this level."""
        return LEVELS[level] >= self._threshold

    def log(self, level: str, event: str, message: str, **fields: object) -> None:
        """Write a line to standard error, unless its level is below the console's level."""
        if self.shows(level):
            self._log_line(level, event, message, prefix=f"{level}: ", **fields)

    def _log_line(
        self, level: str, event: str, message: str, *, prefix: str = "", **fields: object
    ) -> None:
        """Write a line to standard error regardless of its level.

        In the text format the line is `prefix` and `message`, followed by `fields["hint"]` on a
        line of its own, unless that hint was shown before. In the JSON format the line is an object
        of all arguments except `prefix`.
        """
        if self._logs_json:
            entry = {"ts": timestamp(), "level": level, "event": event, "message": message}
            self._write_line(self._err, json_text({**entry, **fields}))
            return

        text = one_line(mask(prefix + message), LONGEST_LINE)
        if level in self._colours:
            first_word, blank, rest = text.partition(" ")
            text = f"{self._colours[level]}{first_word}{NO_COLOUR}{blank}{rest}"
        self._write_line(self._err, text)
        hint = fields.get("hint")
        if isinstance(hint, str) and hint not in self.shown_hints:
            self.shown_hints.add(hint)
            self._write_line(self._err, one_line(mask(f"hint: {hint}"), LONGEST_LINE))

    def show_outcome(self, outcome: Outcome) -> None:
        """Print a synced image to standard output, or log a failed image to standard error.

        Skipped images are not shown. With `--json` synced images are only in the document.
        """
        if outcome.error is not None:
            fields = {**outcome.as_json(), "hint": outcome.error.hint}
            self._log_line("error", "image_failed", outcome.line(), **fields)
        elif outcome.status == "synced" and not self.writes_json:
            if self._unprinted_heading:  # this is the first image of a run with one pair of hosts
                self.print_line(self._unprinted_heading)
                self._unprinted_heading = ""
            self.print_line(outcome.line(with_hosts=not self._omits_hosts))

    def omit_shared_hosts(self, host_pairs: Collection[tuple[str, str]]) -> None:
        """Print hosts once, instead of in each image's line, if all images have the same two hosts.

        `host_pairs` has a pair (source host, target host) for each direction in which the run
        copies. Output that does not go to a terminal keeps the hosts in each line.
        """
        if len(host_pairs) != 1 or not self._out.isatty():
            return
        source_host, target_host = next(iter(host_pairs))
        self._omits_hosts = True
        self._unprinted_heading = f"{source_host} -> {target_host}"

    def show_error(self, error: RegsyncError) -> None:
        """Log the error that ended the command, a line for each problem of a configuration.

        With `--json` the error is also printed as the JSON document.
        """
        code = error.code
        hint = error.hint
        problems = error.problems if isinstance(error, ConfigError) else ()
        for problem in problems or [error]:
            prefix = f"error: {code}: "
            self._log_line("error", "run_failed", str(problem), prefix=prefix, code=code, hint=hint)
        if self.writes_json:
            self.print_document(
                {
                    "schema": 1,
                    "error": {"code": code, "message": str(error), "hint": hint},
                    "problems": [problem._asdict() for problem in problems],
                }
            )

    def show_traceback(self, error: Exception) -> None:
        """Write the traceback of an error, for whoever looks into it."""
        import traceback  # only needed here

        lines = "".join(traceback.format_exception(error)).split("\n")
        self.clear_progress()
        self._write(self._err, "\n".join(map(mask, lines)))

    def print_summary(self, report: Report | AuditReport, elapsed: float) -> None:
        """Log each cause of several failures with their number, then print the report's summary.

        The summary is not printed with `--json`, nor for a run without changes if standard output
        is not a terminal. `elapsed` is in seconds.
        """
        for cause in report.causes():
            text = f"Failed: {cause.failures} x {cause.text}"
            self._log_line("error", "failed_alike", text, count=cause.failures, cause=cause.text)
        if self.writes_json:
            return
        if report.has_something_to_report or self._out.isatty():
            self.print_lines(report.summary(elapsed))

    def print_document(self, document: Mapping[str, object]) -> None:
        """Print the JSON document of a command. The document is ASCII, whatever the values contain.

        A value that is an iterator is written as an array, one item at a time, so that a long list
        of images need not fit in memory.
        """
        self.clear_progress()
        buffer = ""
        for piece in _json_pieces(document):
            buffer += piece
            if len(buffer) >= DOCUMENT_PIECE:
                self._write(self._out, buffer)
                buffer = ""
        self._write(self._out, buffer + "\n")

    def print_line(self, text: str) -> None:
        """Print a result to standard output, on one line and without control characters."""
        self._write_line(self._out, one_line(mask(text), LONGEST_LINE))

    def print_lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.print_line(text)

    def update_progress(self, progress: Progress) -> None:
        """Redraw the line on the terminal with `progress`. Without a terminal, log a line instead."""
        if not self.has_progress_line:
            fields = progress._asdict()
            self._log_line("info", "heartbeat", str(progress), prefix="still running: ", **fields)
            return
        line = one_line(mask(str(progress)), LONGEST_LINE)
        # The last column stays blank, because some terminals wrap a line that fills it. Clearing
        # the line would then leave a part of it on the screen.
        columns = terminal_columns(self._err)
        if len(line) >= columns:
            line = f"{line[: max(0, columns - 2)]}~"
        if line != self._progress_line:
            # Clear and draw in one write, so that the line does not flicker.
            self._write(self._err, f"{CLEAR_LINE}{line}")
            self._progress_line = line

    def clear_progress(self) -> None:
        """Remove the line of progress from the terminal.

        Every other write does this first, so that its text does not mix with the line.
        """
        if self._progress_line:
            self._progress_line = ""
            self._write(self._err, CLEAR_LINE)

    def _write_line(self, stream: TextIO, text: str) -> None:
        self.clear_progress()
        try:
            self._write(stream, text + "\n")
        except UnicodeEncodeError:  # the stream's encoding lacks a character of the text
            text = text.replace("…", "...").encode("ascii", "backslashreplace").decode("ascii")
            self._write(stream, text + "\n")

    def _write(self, stream: TextIO, text: str) -> None:
        """Write to a stream. If that fails, set `has_lost_output`, and raise only for `_out`."""
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            self.has_lost_output = True
            # A log on a full disk must not stop a mirror, but lost results must stop it.
            if stream is not self._err:
                raise


def terminal_columns(stream: TextIO) -> int:
    """Return the columns of a stream's terminal, or 80 if they are unknown."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return USUAL_COLUMNS
    return columns or USUAL_COLUMNS  # some terminals report a size of 0 by 0


def timestamp() -> str:
    """Return the current time in UTC with milliseconds, in the format of RFC 3339."""
    seconds, milliseconds = divmod(int(edge.current().wall() * 1000), 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{milliseconds:03d}Z"


def _json_pieces(document: Mapping[str, object]) -> Iterator[str]:
    """Yield a JSON object in pieces of text. A value that is an iterator becomes an array."""
    yield "{"
    separator = ""
    for key, value in document.items():
        yield f"{separator}{json.dumps(key)}: "
        separator = ", "
        if isinstance(value, Iterator):
            yield from _json_array_pieces(value)
        else:
            yield json_text(value)
    yield "}"


def _json_array_pieces(elements: Iterator[object]) -> Iterator[str]:
    yield "["
    separator = ""
    for element in elements:
        yield f"{separator}{json_text(element)}"
        separator = ", "
    yield "]"
