"""The line of progress: images, bytes, rate, time left, and the hosts that are waited for.

Follows: docs/design.md section 10.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import anyio

from _regsync.app.console import Console
from _regsync.registry.runs import Transport
from _regsync.text import duration_text, size_text

if TYPE_CHECKING:
    from _regsync.audit import Audit
    from _regsync.locking import Locking
    from _regsync.sync.work import Scheduler

# What shows progress: it counts images and bytes.
Work: TypeAlias = "Scheduler | Audit | Locking"

# All times are in seconds.

TERMINAL_SECONDS = 1.0  # between two updates of the line on a terminal
HEARTBEAT_SECONDS = 30.0  # between two log lines, if there is no terminal

# The rate is an average over this time. A longer average would hide a standstill.
RATE_SECONDS = 10.0

SILENCE_SECONDS = 10.0  # without an answer, after which a registry is reported as slow


class Progress(NamedTuple):
    """The progress of a run at one moment. The field names are those of the heartbeat's JSON."""

    done: int  # images with a result
    known: int  # images found so far, including `done`
    bytes: int  # bytes moved
    expected: int  # bytes to move for the known images, including `bytes`
    rate: float  # bytes per second
    elapsed: float  # seconds
    remaining: float | None = None  # seconds; None if unknown
    registries: tuple[str, ...] = ()  # a text for each registry that is away, throttled or slow

    def __str__(self) -> str:
        text = f"{self.done} of {self.known} images"
        if self.expected or self.bytes:
            # A blob that is sent again adds bytes that were not expected.
            total = max(self.bytes, self.expected)
            text += (
                f", {size_text(self.bytes)} of {size_text(total)}, {size_text(int(self.rate))}/s"
            )
        if self.remaining is not None:
            text += f", {duration_text(self.remaining)} left"
        return "; ".join((text, *self.registries))


async def show_progress(console: Console, work: Work) -> None:
    """Update the line on the terminal, or write a log line every 30 seconds, until cancelled."""
    start = anyio.current_time()
    # (time, bytes moved, bytes expected) of the last RATE_SECONDS and of one moment before.
    samples = deque([(start, 0, 0)])
    interval = TERMINAL_SECONDS if console.has_progress_line else HEARTBEAT_SECONDS
    try:
        while True:
            await anyio.sleep(interval)
            now = anyio.current_time()
            moved, expected = work.bytes_moved, work.traffic.expected_bytes
            samples.append((now, moved, expected))
            while samples[1][0] <= now - RATE_SECONDS:
                samples.popleft()
            since, moved_before, expected_before = samples[0]
            rate = (moved - moved_before) / max(now - since, 1e-3)
            # While tags are compared, each image to copy adds to the expected bytes.
            is_known = expected <= expected_before and expected > moved and rate > 0

            progress = Progress(
                done=work.images_done,
                known=work.images_known,
                bytes=moved,
                expected=expected,
                rate=rate,
                elapsed=now - start,
                remaining=(expected - moved) / rate if is_known else None,
                registries=describe_registries(work.transport, start, now),
            )
            console.show_progress(str(progress), progress._asdict())
    finally:
        console.clear_progress()


def describe_registries(transport: Transport, start: float, now: float) -> tuple[str, ...]:
    """Return a text for each registry that is away, throttled or slow, in this order.

    A registry is slow if nothing moves anywhere, and a request waits for its answer.
    """
    texts = dict[str, str]()  # by host; each has the first text that applies
    hosts = transport.hosts.values()
    for host in sorted(hosts, key=lambda host: host.since):
        if host.is_out:
            texts[host.name] = f"{host.describe_wait()}, {duration_text(now - host.since)}"
    for name, lane in transport.throttled_lanes.items():
        if lane.paused_until > now:
            pause = duration_text(lane.paused_until - now)
            text = f"{name} is throttled (429), window {lane.width:.0f}, next try in {pause}"
            texts.setdefault(name, text)

    silence = now - max(start, transport.last_progress)
    if silence >= SILENCE_SECONDS:
        for host in hosts:
            if host.used:
                text = f"{host.name} has not answered for {duration_text(silence)}"
                texts.setdefault(host.name, text)
    return tuple(texts.values())
