"""The live display of a run, as lines.

Owns: what is shown of a moment, in which order and width.
May not know: terminals, clocks, where the figures come from.
Invariants: at most 8 lines, none as wide as the terminal.
Follows: docs/design.md section 10.
"""

from __future__ import annotations

from typing import NamedTuple

from _regsync.text import duration_text, size_text

LONGEST_BAR = 24  # columns
SHORTEST_BAR = 4  # columns; below it the numbers alone are shown
USUAL_TEXT = 40  # columns kept for the text behind a bar, so that usual texts do not move it
LABEL = 7  # columns of "images", "data" and the elapsed time

MOST_REGISTRIES = 4  # lines; what does not fit is counted in the last one

# Seconds. A time that is left is told in steps, the longer it is the larger.
STEPS = ((60.0, 5), (600.0, 30), (float("inf"), 300))


class Progress(NamedTuple):
    """How far a run is."""

    done: int  # images
    known: int  # images so far, done or not
    bytes: int  # that were moved
    expected: int  # bytes so far, moved or not
    rate: float  # bytes a second
    elapsed: float  # seconds
    waiting: str  # what is done, or waited for, in words
    remaining: float | None = None  # seconds; None: not known
    saved_present: int = 0  # bytes that were at targets already
    saved_mounted: int = 0  # bytes that targets have mounted
    registries: tuple[str, ...] = ()  # those that are slow, throttled or failing, in words

    def __str__(self) -> str:
        text = f"{self.done} of {self.known} images, {self.data}, {duration_text(self.elapsed)}"
        return "; ".join(filter(None, (text, self.waiting, *self.registries)))

    @property
    def data(self) -> str:
        # A blob that is sent again makes more bytes than were expected.
        total = max(self.bytes, self.expected)
        text = f"{size_text(self.bytes)} of {size_text(total)}, {size_text(int(self.rate))}/s"
        if self.remaining is None:
            return text
        rest = duration_text(in_steps(self.remaining)).replace(".0s", "s")
        return f"{text}, {rest} left"

    @property
    def saved(self) -> str:
        """What need not be sent; empty where that is nothing."""
        parts = [(self.saved_present, "already there"), (self.saved_mounted, "mounted")]
        details = [f"{size_text(count)} {word}" for count, word in parts if count]
        if len(details) < 2:
            return "".join(details)
        total = size_text(self.saved_present + self.saved_mounted)
        return f"{total}: {', '.join(details)}"


def in_steps(seconds: float) -> float:
    """Round a time up, so that it does not change with each drawing."""
    step = next(step for most, step in STEPS if seconds <= most)
    return -(-seconds // step) * step


def progress_lines(now: Progress, columns: int, marks: str = "#-") -> list[str]:
    """Return the live display: at most 8 lines, none as wide as the terminal.

    `marks` are the characters of a bar, for what is done and for what is left.
    """
    images_text = f"{now.done} of {now.known}"
    text_width = max(USUAL_TEXT, len(images_text), len(now.data))
    # Three more columns: the blanks around a bar, and the last one of the terminal, which stays free.
    width = min(LONGEST_BAR, columns - LABEL - 3 - text_width)

    lines = [bar_line("images", now.done, now.known, images_text, width, marks)]
    if now.expected or now.bytes:
        total = max(now.bytes, now.expected)
        lines.append(bar_line("data", now.bytes, total, now.data, width, marks))
    if now.saved:
        lines.append(f"{'saved':<{LABEL}}{now.saved}")
    lines.append(f"{duration_text(now.elapsed):<{LABEL}}{now.waiting}".rstrip())

    registries = list(now.registries)
    if len(registries) > MOST_REGISTRIES:
        left_out = len(registries) - MOST_REGISTRIES + 1
        registries[MOST_REGISTRIES - 1 :] = [f"and {left_out} more registries"]
    lines += registries
    return [shorten(line, columns) for line in lines]


def bar_line(label: str, part: int, total: int, text: str, width: int, marks: str) -> str:
    """Return a line with a bar of `width` columns for the share of `part` in `total`."""
    bar = ""
    if width >= SHORTEST_BAR:
        full = width * part // max(total, 1)
        bar = f"{marks[0] * full}{marks[1] * (width - full)} "
    return f"{label:<{LABEL}}{bar}{text}"


def shorten(line: str, columns: int) -> str:
    """Keep the last column free: some terminals wrap there, and a wrapped line is not cleared."""
    return line if len(line) < columns else f"{line[: max(0, columns - 2)]}~"
