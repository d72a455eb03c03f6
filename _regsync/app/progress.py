"""Measure the progress of a run at intervals, and pass it to the console.

Owns: the intervals, the transfer rate, the time left, and the descriptions of slow registries.
May not know: how a line is shown.
Follows: docs/design.md section 10.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import anyio

from _regsync.app.console import Console, Progress
from _regsync.registry.runs import Transport
from _regsync.sync.image import Traffic
from _regsync.text import duration_text

# All times are in seconds.

TERMINAL_SECONDS = 1.0  # between two updates of the line on a terminal
HEARTBEAT_SECONDS = 30.0  # between two log lines, if there is no terminal

# The rate is an average over this time. A longer average would hide a standstill.
RATE_SECONDS = 10.0

SILENCE_SECONDS = 10.0  # without an answer, after which a registry is reported as slow


class Work(Protocol):
    """Work whose progress is shown: a run's scheduler, an audit, or the making of a lock."""

    @property
    def transport(self) -> Transport: ...

    @property
    def images_done(self) -> int: ...

    @property
    def images_known(self) -> int:
        """The number of images found so far, including the images that are done."""

    @property
    def bytes_moved(self) -> int: ...

    @property
    def traffic(self) -> Traffic: ...

    @property
    def drain_deadline(self) -> float | None:
        """When unfinished copies will be cancelled after a signal. None before a signal."""


async def show_progress(console: Console, work: Work) -> None:
    """Update the line on the terminal, or write a log line every 30 seconds, until cancelled."""
    start = anyio.current_time()
    pace = Pace(start)
    silences = Silences()
    interval = TERMINAL_SECONDS if console.has_progress_line else HEARTBEAT_SECONDS
    try:
        while True:
            await anyio.sleep(interval)
            now = anyio.current_time()
            # Both compare the counters of `work` with those of earlier rounds.
            pace.record(now, work.bytes_moved, work.traffic.expected_bytes)
            silences.record(now, work)
            deadline = work.drain_deadline
            console.update_progress(
                Progress(
                    done=work.images_done,
                    known=work.images_known,
                    bytes=work.bytes_moved,
                    expected=work.traffic.expected_bytes,
                    rate=pace.rate,
                    elapsed=now - start,
                    remaining=pace.remaining,
                    stopping=None if deadline is None else max(0.0, deadline - now),
                    registries=describe_registries(work, silences, now),
                )
            )
    finally:
        console.clear_progress()


class _Sample(NamedTuple):
    time: float
    moved: int  # bytes moved from the start until `time`
    expected: int  # bytes to move in total, as far as known at `time`


class Pace:
    """The average rate of the last seconds, and how long the rest takes at this rate."""

    def __init__(self, start: float) -> None:
        # The samples of the last RATE_SECONDS and one older sample, oldest first.
        self._samples = deque([_Sample(start, 0, 0)])

    def record(self, now: float, moved: int, expected: int) -> None:
        """Add the bytes moved so far and the bytes to move in total."""
        self._samples.append(_Sample(now, moved, expected))
        while self._samples[1].time <= now - RATE_SECONDS:
            self._samples.popleft()

    @property
    def rate(self) -> float:
        """The rate in bytes per second."""
        first = self._samples[0]
        last = self._samples[-1]
        seconds = max(last.time - first.time, 1e-3)  # not 0
        return (last.moved - first.moved) / seconds

    @property
    def remaining(self) -> float | None:
        """The remaining seconds. None if they are unknown or no bytes are moving."""
        first = self._samples[0]
        last = self._samples[-1]
        # While tags are compared, each image to copy adds to the expected bytes.
        is_growing = last.expected > first.expected
        remaining_bytes = last.expected - last.moved
        if is_growing or remaining_bytes <= 0 or self.rate == 0:
            return None
        return remaining_bytes / self.rate


class Silences:
    """How long each registry has left requests unanswered."""

    def __init__(self) -> None:
        self._request_counts = dict[str, int]()  # requests so far, by host
        # When each host last was sent a request, had no open request, or may have moved bytes.
        self._active_at = dict[str, float]()
        self._byte_count = 0  # bytes of blobs received and sent so far, at all hosts

    def record(self, now: float, work: Work) -> None:
        """Compare the counters of all hosts with those of the last call."""
        transport = work.transport
        byte_count = transport.blob_bytes + transport.bytes_sent
        # Bytes are not counted by host. While bytes are moving, no host is reported as slow.
        has_moved_bytes = byte_count != self._byte_count
        for host, limits in transport.limits.items():
            request_count = transport.requests[host].total() if host in transport.requests else 0
            has_new_requests = request_count != self._request_counts.get(host)
            is_idle = limits.used == 0
            if has_moved_bytes or has_new_requests or is_idle:
                self._active_at[host] = now
            self._request_counts[host] = request_count
        self._byte_count = byte_count

    def by_host(self, now: float) -> dict[str, float]:
        """Return the seconds of silence of each host that has been silent for SILENCE_SECONDS."""
        silences = {host: now - active_at for host, active_at in self._active_at.items()}
        return {host: seconds for host, seconds in silences.items() if seconds >= SILENCE_SECONDS}


def describe_registries(work: Work, silences: Silences, now: float) -> tuple[str, ...]:
    """Return a text for each registry that is away, throttled or slow."""
    # By host. A host that is away, throttled and slow is described by the first of these only.
    away = [reach for reach in work.transport.reaches if reach.is_out]
    away.sort(key=lambda reach: reach.since)
    texts = {
        each.name: f"{each.describe_wait()}, {duration_text(now - each.since)}" for each in away
    }
    for host, lane in work.transport.throttled_lanes.items():
        if lane.paused_until > now:
            pause = duration_text(lane.paused_until - now)
            text = f"{host} is throttled (429), window {lane.width:.0f}, next try in {pause}"
            texts.setdefault(host, text)
    for host, seconds in silences.by_host(now).items():
        texts.setdefault(host, f"{host} has not answered for {duration_text(seconds)}")
    return tuple(texts.values())
