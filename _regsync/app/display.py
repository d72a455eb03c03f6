"""Format the progress of a run as the lines of the terminal display.

Owns: which figures are shown, in which order and width.
May not know: terminals, clocks, how the figures are measured.
Invariants: there are at most 8 lines, and each is shorter than the terminal is wide.
Follows: docs/design.md section 10.
"""

from __future__ import annotations

from typing import NamedTuple

from _regsync.text import duration_text, size_text

# Widths are in columns of the terminal.
LONGEST_BAR = 24
SHORTEST_BAR = 4  # with less room, no bar is drawn
USUAL_TEXT = 40  # room to the right of a bar. A longer text makes the bar shorter.
LABEL = 7  # room for "images", "data" or the elapsed time, to the left of a bar
BLANK_COLUMNS = 3  # one on each side of a bar, and the terminal's last column

MOST_REGISTRIES = 4  # lines for registries. If there are more, the last line is their number.

# (largest time, step): remaining times up to the largest time are rounded up to a multiple of the
# step. Both are in seconds.
STEPS = ((60.0, 5), (600.0, 30), (float("inf"), 300))


class Progress(NamedTuple):
    """The progress of a run at one moment. The field names are those of the heartbeat's JSON."""

    done: int  # images with a result
    known: int  # images found so far, including `done`
    bytes: int  # bytes moved
    expected: int  # bytes to move for the known images, including `bytes`
    rate: float  # bytes per second
    elapsed: float  # seconds
    waiting: str  # the current work in words
    remaining: float | None = None  # seconds; None if unknown
    saved_present: int = 0  # bytes not sent because targets had the blobs already
    saved_mounted: int = 0  # bytes not sent because targets mounted the blobs
    registries: tuple[str, ...] = ()  # a line for each slow, throttled or failing registry

    def __str__(self) -> str:
        text = f"{self.done} of {self.known} images, {self.data}, {duration_text(self.elapsed)}"
        return "; ".join(filter(None, (text, self.waiting, *self.registries)))

    @property
    def data(self) -> str:
        """The moved bytes, the rate and the remaining time: `1.2 MB of 3.4 MB, 0.5 MB/s, 5s left`."""
        # A blob that is sent again adds bytes that were not expected.
        total = max(self.bytes, self.expected)
        text = f"{size_text(self.bytes)} of {size_text(total)}, {size_text(int(self.rate))}/s"
        if self.remaining is None:
            return text
        remaining = duration_text(in_steps(self.remaining)).replace(".0s", "s")
        return f"{text}, {remaining} left"

    @property
    def saved(self) -> str:
        """The bytes that need not be sent: `3 MB: 2 MB already there, 1 MB mounted`.

        If all these bytes are of one kind, there is no total: `2 MB already there`. Without such
        bytes the text is empty.
        """
        present = f"{size_text(self.saved_present)} already there" if self.saved_present else ""
        mounted = f"{size_text(self.saved_mounted)} mounted" if self.saved_mounted else ""
        if present and mounted:
            total = size_text(self.saved_present + self.saved_mounted)
            return f"{total}: {present}, {mounted}"
        return present or mounted


def in_steps(seconds: float) -> float:
    """Round a time up to a multiple of its step, so that the display does not change all the time."""
    step = next(step for largest_time, step in STEPS if seconds <= largest_time)
    return -(-seconds // step) * step  # the negative signs turn rounding down into rounding up


def progress_lines(progress: Progress, columns: int, marks: str = "#-") -> list[str]:
    """Return the lines of the display for a terminal with this many columns.

    `marks` has two characters: that of the done part of a bar and that of the remaining part.
    """
    images_text = f"{progress.done} of {progress.known}"
    text_width = max(USUAL_TEXT, len(images_text), len(progress.data))
    # All bars have the same width, although the texts beside them differ.
    bar_width = min(LONGEST_BAR, columns - LABEL - BLANK_COLUMNS - text_width)

    lines = [bar_line("images", progress.done, progress.known, images_text, bar_width, marks)]
    if progress.expected or progress.bytes:
        total = max(progress.bytes, progress.expected)
        lines.append(bar_line("data", progress.bytes, total, progress.data, bar_width, marks))
    if progress.saved:
        lines.append(f"{'saved':<{LABEL}}{progress.saved}")
    lines.append(f"{duration_text(progress.elapsed):<{LABEL}}{progress.waiting}".rstrip())

    if len(progress.registries) <= MOST_REGISTRIES:
        lines += progress.registries
    else:
        shown = progress.registries[: MOST_REGISTRIES - 1]
        lines += [*shown, f"and {len(progress.registries) - len(shown)} more registries"]
    return [shorten(line, columns) for line in lines]


def bar_line(label: str, part: int, total: int, text: str, width: int, marks: str) -> str:
    """Return a line: the label, a bar for the share of `part` in `total`, and the text.

    `width` is that of the bar. The bar is left out if it would be shorter than SHORTEST_BAR.
    """
    bar = ""
    if width >= SHORTEST_BAR:
        done_width = width * part // max(total, 1)
        bar = f"{marks[0] * done_width}{marks[1] * (width - done_width)} "
    return f"{label:<{LABEL}}{bar}{text}"


def shorten(line: str, columns: int) -> str:
    """Cut a line so that the terminal's last column stays blank.

    Some terminals wrap a line that fills the last column. Clearing the display would then leave a
    part of the line on the screen.
    """
    return line if len(line) < columns else f"{line[: max(0, columns - 2)]}~"
