"""What the user sees: results, log lines, progress, the JSON document.

Owns: the two output streams and how values become lines on them. May not know: what a run does.
Invariant: standard output holds results only, and with `--json` exactly one document; everything else
goes to standard error; no control character of foreign text reaches either. Silence means success.
Follows specification section 6, design.md sections 2 and 10.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, TextIO

from _regsync.errors import ConfigError, RegsyncError, clean
from _regsync.report import Outcome, Report, duration_text, size_text

__all__ = ["LEVELS", "Console", "show_progress"]

LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40}
_TICK, _HEARTBEAT = 0.25, 30.0
# An image's line holds two references and a cause that was cut before.
_LONGEST_LINE = 2000
_CLEAR = "\r\x1b[K"


class Console:
    """Standard output and standard error of one command."""

    def __init__(
        self, out: TextIO, err: TextIO, *, level: str, as_json: bool, json_log: bool, progress: bool
    ) -> None:
        self._out, self._err = out, err
        self._threshold = LEVELS[level]
        self.as_json, self._json_log = as_json, json_log
        can_clear = err.isatty() and os.environ.get("TERM") != "dumb"
        self.live = progress and can_clear and not json_log
        self.heartbeat = progress and not self.live
        self.shows_summary = out.isatty()
        self._status = ""
        # Whether standard error could not take what was written to it.
        self.lost = False

    def log(self, level: str, event: str, message: str, **fields: Any) -> None:
        """Write one log line when its level is wanted."""
        if LEVELS[level] >= self._threshold:
            self._say(f"{level}: {message}", level, event, message, **fields)

    def _say(self, text: str, level: str, event: str, message: str, **fields: Any) -> None:
        """Write `text` to standard error, or with `--log-format json` an object in its place."""
        if self._json_log:
            seconds, rest = divmod(time.time_ns(), 1_000_000_000)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
            entry = {"ts": f"{stamp}.{rest // 1_000_000:03d}Z", "level": level, "event": event}
            self._line(self._err, json.dumps({**entry, "message": message, **fields}, default=str))
        else:
            self._line(self._err, clean(text, _LONGEST_LINE))

    def outcome(self, outcome: Outcome) -> None:
        """Show one image: what was done on standard output, what failed on standard error."""
        if outcome.status == "failed":
            line = outcome.line()
            hint = outcome.error.hint if outcome.error is not None else None
            self._say(line, "error", "image_failed", line, **outcome.as_json(), hint=hint)
            self._hint(outcome.error)
        elif outcome.status == "synced" and not self.as_json:
            self.line(outcome.line())

    def _hint(self, error: RegsyncError | None) -> None:
        if error is not None and error.hint and not self._json_log:
            self._line(self._err, clean(f"hint: {error.hint}", _LONGEST_LINE))

    def error(self, error: RegsyncError) -> None:
        """Show why the command as a whole ended."""
        problems = error.problems if isinstance(error, ConfigError) else ()
        for line in [str(problem) for problem in problems] or [str(error)]:
            told = {"code": error.code, "hint": error.hint}
            self._say(f"error: {error.code}: {line}", "error", "run_failed", line, **told)
        self._hint(error)
        if self.as_json:
            told = {"code": error.code, "message": str(error), "hint": error.hint}
            self.document({"schema": 1, "error": told, "problems": [each._asdict() for each in problems]})

    def summary(self, report: Report, elapsed: float) -> None:
        """Show the summary when there is something to say, or somebody to say it to."""
        if not self.as_json and (self.shows_summary or report.counts["synced"] or report.counts["failed"]):
            for line in report.summary(elapsed):
                self.line(line)

    def document(self, value: dict[str, Any]) -> None:
        """Write the one JSON document: ASCII, so that any stream takes it and no terminal obeys it."""
        self._line(self._out, json.dumps(value))

    def line(self, text: str) -> None:
        """Write one result."""
        self._line(self._out, clean(text, _LONGEST_LINE))

    def progress(self, text: str) -> None:
        """Show how far a run is: on a terminal at its bottom, in place; else as a line of its own."""
        if not self.live:
            self._say(f"still running: {text}", "info", "heartbeat", text)
            return
        try:
            columns = os.get_terminal_size(self._err.fileno()).columns or 80
        except (OSError, ValueError):
            columns = 80
        # A line that wraps could not be cleared; the last column wraps on some terminals.
        text = text if len(text) < columns else f"{text[: max(0, columns - 2)]}~"
        if text != self._status:
            self._write(self._err, _CLEAR + text)
            self._status = text

    def _line(self, stream: TextIO, text: str) -> None:
        if self._status:
            self._status = ""
            self._write(self._err, _CLEAR)
        try:
            self._write(stream, text + "\n")
        except UnicodeEncodeError:
            # A terminal or pipe without UTF-8 still gets its line.
            self._write(stream, text.encode("ascii", "backslashreplace").decode("ascii") + "\n")

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            # A full log disk must not stop a mirror; lost results must.
            if stream is not self._err:
                raise
            self.lost = True


async def show_progress(console: Console, progress: Any) -> None:
    """Keep the live line, or a heartbeat every 30 s, until cancelled; `progress` is `sync.Progress`."""
    import anyio

    began = anyio.current_time()
    try:
        while True:
            await anyio.sleep(_TICK if console.live else _HEARTBEAT)
            elapsed = anyio.current_time() - began
            rate = size_text(int(progress.bytes / elapsed))
            console.progress(
                f"{progress.done} of {progress.known} images, {size_text(progress.bytes)}, {rate}/s, "
                f"{duration_text(elapsed)}"
            )
    finally:
        if console.live:
            console.progress("")
