"""How far a run is: measured now and then, and given to the console.

Owns: how often that happens, and the words for what takes long.
May not know: how a terminal is drawn on.
Follows: docs/design.md section 10.
"""

from __future__ import annotations

from collections import deque

import anyio

from _regsync.app.console import Console, Snapshot
from _regsync.sync.schedule import Scheduler
from _regsync.text import duration_text

DISPLAY_SECONDS = 0.25  # between two drawings of the live display
HEARTBEAT_SECONDS = 30.0  # between two lines where no terminal shows a display
RATE_SECONDS = 5.0  # of which the rate is the average: a longer average hides a standstill


async def show_progress(console: Console, scheduler: Scheduler) -> None:
    """Keep the live display, or write a heartbeat every 30 s, until cancelled."""
    began = anyio.current_time()
    samples = deque([(began, 0)])  # time, and bytes moved until then
    pause = DISPLAY_SECONDS if console.live else HEARTBEAT_SECONDS
    try:
        while True:
            await anyio.sleep(pause)
            now = anyio.current_time()
            moved = scheduler.transport.blob_bytes
            while len(samples) > 1 and samples[1][0] <= now - RATE_SECONDS:
                samples.popleft()
            sampled_at, moved_then = samples[0]
            samples.append((now, moved))
            console.progress(
                Snapshot(
                    done=scheduler.images_done,
                    known=scheduler.images_known,
                    bytes=moved,
                    expected=scheduler.bytes_expected,
                    rate=(moved - moved_then) / (now - sampled_at),
                    elapsed=now - began,
                    waiting=describe_wait(scheduler, now),
                )
            )
    finally:
        console.clear()


def describe_wait(scheduler: Scheduler, now: float) -> str:
    """Say in a few words what the run is waiting for."""
    names = scheduler.under_way()
    if scheduler.drain_ends is not None:
        remaining = duration_text(max(0.0, scheduler.drain_ends - now))
        return f"stopping in {remaining} at most, {len(names)} under way"

    outage = scheduler.transport.recovery.describe(now)
    if outage is not None:
        return outage

    for host, window in scheduler.transport.throttled_windows.items():
        if window.paused_until > now:
            text = f"{host} is throttled (429), window {window.width:.0f}"
            return f"{text}, next try in {duration_text(window.paused_until - now)}"

    if not names:
        return (
            "asking what there is"
            if scheduler.images_done == scheduler.images_known
            else "comparing tags"
        )
    if len(names) == 1:
        return f"copying {names[0]}"
    return f"{len(names)} under way, first {names[0]}"
