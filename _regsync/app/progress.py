"""Measure the progress of a run at intervals, and pass it to the console.

Owns: the intervals, the transfer rate, the forecast of the remaining time, and the descriptions of
current work and of slow registries.
May not know: how the display is drawn.
Follows: docs/design.md section 10.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import anyio

from _regsync.app.console import Console
from _regsync.app.display import Progress
from _regsync.registry.transport import Transport
from _regsync.sync.image import Traffic
from _regsync.text import duration_text

# All times are in seconds.

DISPLAY_SECONDS = 0.25  # between two updates of the display on a terminal
HEARTBEAT_SECONDS = 30.0  # between two log lines, if there is no display

# The displayed rate is an average over this time. A longer average would hide a standstill.
RATE_SECONDS = 5.0
NEW_RATE_SECONDS = 1.0  # between two displayed rates, because faster changes cannot be read

FORECAST_SECONDS = 30.0  # the forecast uses the average rate over this time
SETTLED_SECONDS = 5.0  # without newly expected bytes, before a forecast is made
# A new forecast is displayed only if it differs by this share of the remaining time.
STEADY_SHARE = 0.15

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
    def failures(self) -> Mapping[str, int]:
        """The number of failed images by host."""

    @property
    def drain_deadline(self) -> float | None:
        """When unfinished copies will be cancelled after a signal. None before a signal."""

    @property
    def verb(self) -> str:
        """The verb for an image in progress, such as "copying"."""

    def images_under_way(self) -> list[str]:
        """Return the references of the images in progress."""


async def show_progress(console: Console, work: Work) -> None:
    """Update the display, or write a log line every 30 seconds, until cancelled."""
    start = anyio.current_time()
    pace = Pace(start)
    silences = Silences()
    interval = DISPLAY_SECONDS if console.has_display else HEARTBEAT_SECONDS
    try:
        while True:
            await anyio.sleep(interval)
            now = anyio.current_time()
            # Both compare the counters of `work` with those of the last round.
            pace.record(now, work.bytes_moved, work.traffic.expected_bytes)
            silences.record(now, work)
            console.update_progress(
                Progress(
                    done=work.images_done,
                    known=work.images_known,
                    bytes=work.bytes_moved,
                    expected=work.traffic.expected_bytes,
                    rate=pace.rate,
                    elapsed=now - start,
                    waiting=describe_work(work, now),
                    remaining=pace.remaining(now),
                    saved_present=work.traffic.present_bytes,
                    saved_mounted=work.traffic.mounted_bytes,
                    registries=describe_registries(work, silences, now),
                )
            )
    finally:
        console.clear_display()


class _Sample(NamedTuple):
    time: float
    moved: int  # bytes moved from the start until `time`


class Pace:
    """The displayed transfer rate and the displayed forecast, both kept from changing too often."""

    def __init__(self, start: float) -> None:
        self.rate = 0.0  # the displayed rate, in bytes per second
        self._rate_time = start  # when this rate was computed
        # The samples of the last FORECAST_SECONDS and one older sample, oldest first.
        self._samples = deque([_Sample(start, 0)])
        self._expected = 0  # the bytes to move in total, as far as known
        self._expected_growth_time = start  # when `_expected` last grew
        # The displayed forecast of when all bytes will have been moved. None if it is unknown.
        self._forecast: float | None = None

    def record(self, now: float, moved: int, expected: int) -> None:
        """Update the rate and the forecast, given the bytes moved so far and expected in total."""
        self._samples.append(_Sample(now, moved))
        # Keep one sample that is older than FORECAST_SECONDS, to compute the rate since then.
        while self._samples[1].time <= now - FORECAST_SECONDS:
            self._samples.popleft()

        is_rate_old = now - self._rate_time >= NEW_RATE_SECONDS
        if is_rate_old or self.rate == 0:  # show at once that bytes are moving
            self.rate = self._rate_since(now - RATE_SECONDS)
            self._rate_time = now
        if expected > self._expected:
            self._expected_growth_time = now
        self._expected = expected
        self._update_forecast(now, expected - moved)

    def _rate_since(self, moment: float) -> float:
        """Return the average rate since `moment`, or since the oldest sample if that is later."""
        last = self._samples[-1]
        samples_before = (sample for sample in reversed(self._samples) if sample.time <= moment)
        first = next(samples_before, self._samples[0])
        seconds = max(last.time - first.time, 1e-3)  # not 0
        return (last.moved - first.moved) / seconds

    def _update_forecast(self, now: float, remaining_bytes: int) -> None:
        """Replace the displayed forecast if a new one differs from it by more than STEADY_SHARE.

        If no forecast is possible, the displayed one becomes None.
        """
        rate = self._rate_since(now - FORECAST_SECONDS)
        # While tags are compared, each image to copy adds to the expected bytes.
        is_growing = now - self._expected_growth_time < SETTLED_SECONDS
        is_possible = remaining_bytes > 0 and rate > 0 and not is_growing
        if not is_possible:
            self._forecast = None
            return
        seconds = remaining_bytes / rate
        end = now + seconds
        if self._forecast is None or abs(end - self._forecast) > STEADY_SHARE * seconds:
            self._forecast = end

    def remaining(self, now: float) -> float | None:
        """Return the remaining seconds. Returns None if they are unknown or no bytes are moving."""
        if self._forecast is None or self.rate == 0:
            return None
        return max(0.0, self._forecast - now)


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
        for host, limits in transport.gate.limits.items():
            request_count = transport.requests[host].total() if host in transport.requests else 0
            has_new_requests = request_count != self._request_counts.get(host)
            is_idle = limits.in_use == 0
            if has_moved_bytes or has_new_requests or is_idle:
                self._active_at[host] = now
            self._request_counts[host] = request_count
        self._byte_count = byte_count

    def by_host(self, now: float) -> dict[str, float]:
        """Return the seconds of silence of each host that has been silent for SILENCE_SECONDS."""
        silences = {host: now - active_at for host, active_at in self._active_at.items()}
        return {host: seconds for host, seconds in silences.items() if seconds >= SILENCE_SECONDS}


def describe_work(work: Work, now: float) -> str:
    """Describe the current work in a few words, such as "copying REFERENCE" or "listing tags"."""
    images = work.images_under_way()
    if work.drain_deadline is not None:
        remaining = duration_text(max(0.0, work.drain_deadline - now))
        return f"stopping in {remaining} at most, {len(images)} under way"
    if not images:
        # If all known images are done, the run is waiting for the tag list of another repository.
        return "listing tags" if work.images_done == work.images_known else "comparing tags"
    if len(images) == 1:
        return f"{work.verb} {images[0]}"
    return f"{len(images)} under way, first {images[0]}"


def describe_registries(work: Work, silences: Silences, now: float) -> tuple[str, ...]:
    """Return a line for each registry that is unreachable, throttled, slow or failing."""
    # By host. A host that is unreachable, throttled and slow is shown with the first of these only.
    lines = work.transport.recovery.describe(now)  # the unreachable hosts
    for host, meter in work.transport.throttled_meters.items():
        if meter.paused_until > now:
            pause = duration_text(meter.paused_until - now)
            text = f"{host} is throttled (429), window {meter.width:.0f}, next try in {pause}"
            lines.setdefault(host, text)
    for host, seconds in silences.by_host(now).items():
        lines.setdefault(host, f"{host} has not answered for {duration_text(seconds)}")

    for host, count in work.failures.items():
        if host in lines:
            lines[host] += f", {count} failed"
        else:
            lines[host] = f"{host}: {count} failed"
    return tuple(lines.values())
