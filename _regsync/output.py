"""What the user sees: results, log lines, progress, the JSON document.

Owns: the two output streams and how values become lines on them. May not know: what a run does.
Invariant: standard output holds results only, and with `--json` exactly one document; everything else
goes to standard error. Silence means success. Follows specification section 6, design.md sections 2
and 10.
"""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

from _regsync.errors import ConfigError, RegsyncError, clean
from _regsync.report import Outcome, Report, duration_text, size_text

__all__ = ["LEVELS", "Console", "show_progress"]

LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40}
_TICK, _HEARTBEAT = 0.25, 30.0


class Console:
    """Standard output and standard error of one command."""

    def __init__(
        self, out: TextIO, err: TextIO, *, level: str, as_json: bool, json_log: bool, progress: bool
    ) -> None:
        self._out, self._err = out, err
        self._threshold = LEVELS[level]
        self.as_json, self._json_log = as_json, json_log
        self.live = progress and err.isatty() and not json_log
        self.heartbeat = progress and not self.live
        self.shows_summary = out.isatty()
        self._status = ""

    def log(self, level: str, event: str, message: str, **fields: Any) -> None:
        """Write one log line when its level is wanted."""
        if LEVELS[level] < self._threshold:
            return
        if self._json_log:
            now = time.time()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
            entry = {"ts": stamp, "level": level, "event": event, "message": message, **fields}
            self._line(self._err, json.dumps(entry, ensure_ascii=False))
        else:
            self._line(self._err, f"{level}: {clean(message, 2000)}")

    def outcome(self, outcome: Outcome) -> None:
        """Show one image: what was done on standard output, what failed on standard error."""
        if outcome.status == "failed":
            if self._json_log:
                self.log("error", "image_failed", outcome.line(), **outcome.as_json())
            else:
                self._line(self._err, clean(outcome.line(), 2000))
                if outcome.error is not None and outcome.error.hint:
                    self._line(self._err, f"hint: {clean(outcome.error.hint, 1000)}")
        elif outcome.status == "synced" and not self.as_json:
            self._line(self._out, outcome.line())

    def error(self, error: RegsyncError) -> None:
        """Show why the command as a whole ended."""
        problems = error.problems if isinstance(error, ConfigError) else ()
        lines = [str(problem) for problem in problems] or [str(error)]
        for line in lines:
            if self._json_log:
                self.log("error", "run_failed", line, code=error.code)
            else:
                self._line(self._err, f"error: {error.code}: {clean(line, 2000)}")
        if error.hint and not self._json_log:
            self._line(self._err, f"hint: {clean(error.hint, 1000)}")
        if self.as_json:
            self.document(
                {
                    "schema": 1,
                    "error": {"code": error.code, "message": str(error), "hint": error.hint},
                    "problems": [
                        {
                            "file": each.file,
                            "line": each.line,
                            "column": each.column,
                            "path": each.path,
                            "message": each.message,
                        }
                        for each in problems
                    ],
                }
            )

    def summary(self, report: Report, elapsed: float) -> None:
        """Show the summary when there is something to say, or somebody to say it to."""
        if not self.as_json and (self.shows_summary or report.counts["synced"] or report.counts["failed"]):
            for line in report.summary(elapsed):
                self._line(self._out, line)

    def document(self, value: dict[str, Any]) -> None:
        """Write the one JSON document."""
        self._line(self._out, json.dumps(value, ensure_ascii=False))

    def line(self, text: str) -> None:
        """Write one result."""
        self._line(self._out, text)

    def status(self, text: str) -> None:
        """Replace the live line at the bottom of the terminal."""
        import shutil

        width = shutil.get_terminal_size().columns - 1
        text = text if len(text) <= width else text[: max(0, width - 1)] + "~"
        if text != self._status:
            self._err.write("\r\x1b[K" + text)
            self._err.flush()
            self._status = text

    def _line(self, stream: TextIO, text: str) -> None:
        status, self._status = self._status, ""
        if status:
            self._err.write("\r\x1b[K")
            self._err.flush()
        try:
            stream.write(text + "\n")
        except UnicodeEncodeError:
            # A terminal or pipe without UTF-8 still gets its line.
            stream.write(text.encode("ascii", "backslashreplace").decode("ascii") + "\n")
        stream.flush()


async def show_progress(console: Console, progress: Any) -> None:
    """Keep the live line, or a heartbeat every 30 s, until cancelled; `progress` is `sync.Progress`."""
    import anyio

    began = anyio.current_time()
    try:
        while True:
            await anyio.sleep(_TICK if console.live else _HEARTBEAT)
            elapsed = anyio.current_time() - began
            rate = size_text(int(progress.bytes / elapsed)) if elapsed else "0 B"
            text = (
                f"{progress.done} of {progress.known} images, {size_text(progress.bytes)}, {rate}/s, "
                f"{duration_text(elapsed)}"
            )
            if console.live:
                console.status(text)
            else:
                console.log("warning", "heartbeat", f"still running: {text}")
    finally:
        if console.live:
            console.status("")
