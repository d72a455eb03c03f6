"""How far a run is: measured now and then, and given to the console.

Owns: how often that happens, and the words for what takes long.
May not know: how a terminal is drawn on.
Follows: docs/design.md section 10.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import anyio

from _regsync.app.console import Console, Snapshot
from _regsync.registry.transport import Transport
from _regsync.text import duration_text

DISPLAY_SECONDS = 0.25  # between two drawings of the live display
HEARTBEAT_SECONDS = 30.0  # between two lines where no terminal shows a display
RATE_SECONDS = 5.0  # of which the rate is the average: a longer average hides a standstill


class Work(Protocol):
    """What shows how far it is: a run's scheduler, or an audit."""

    @property
    def transport(self) -> Transport: ...

    @property
    def images_done(self) -> int: ...

    @property
    def images_known(self) -> int:
        """Images so far, done or not."""

    @property
    def bytes_expected(self) -> int:
        """Bytes of blobs so far, moved or not."""

    @property
    def drain_ends(self) -> float | None:
        """When what is under way is cut off; None while there is no drain."""

    @property
    def doing(self) -> str:
        """What is done to an image at work, in a word or two: "copying"."""

    def under_way(self) -> list[str]:
        """Return the references of the images at work."""


async def show_progress(console: Console, work: Work) -> None:
    """Keep the live display, or write a heartbeat every 30 s, until cancelled."""
    began = anyio.current_time()
    samples = deque([(began, 0)])  # time, and bytes moved until then
    pause = DISPLAY_SECONDS if console.live else HEARTBEAT_SECONDS
    try:
        while True:
            await anyio.sleep(pause)
            now = anyio.current_time()
            moved = work.transport.blob_bytes
            while len(samples) > 1 and samples[1][0] <= now - RATE_SECONDS:
                samples.popleft()
            sampled_at, moved_then = samples[0]
            samples.append((now, moved))
            console.progress(
                Snapshot(
                    done=work.images_done,
                    known=work.images_known,
                    bytes=moved,
                    expected=work.bytes_expected,
                    rate=(moved - moved_then) / (now - sampled_at),
                    elapsed=now - began,
                    waiting=describe_wait(work, now),
                )
            )
    finally:
        console.clear()


def describe_wait(work: Work, now: float) -> str:
    """Say in a few words what the run is waiting for."""
    names = work.under_way()
    if work.drain_ends is not None:
        remaining = duration_text(max(0.0, work.drain_ends - now))
        return f"stopping in {remaining} at most, {len(names)} under way"

    outage = work.transport.recovery.describe(now)
    if outage is not None:
        return outage

    for host, window in work.transport.throttled_windows.items():
        if window.paused_until > now:
            text = f"{host} is throttled (429), window {window.width:.0f}"
            return f"{text}, next try in {duration_text(window.paused_until - now)}"

    if not names:
        return "asking what there is" if work.images_done == work.images_known else "comparing tags"
    if len(names) == 1:
        return f"{work.doing} {names[0]}"
    return f"{len(names)} under way, first {names[0]}"
