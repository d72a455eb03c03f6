"""How far a run is: measured now and then, and given to the console.

Owns: how often that happens, how fast bytes move and how long the rest takes, and the words for what
takes long.
May not know: how a terminal is drawn on.
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

DISPLAY_SECONDS = 0.25  # between two drawings of the live display
HEARTBEAT_SECONDS = 30.0  # between two lines where no terminal shows a display

RATE_SECONDS = 5.0  # of which the rate is the average: a longer average hides a standstill
NEW_RATE_SECONDS = 1.0  # between two rates that are shown: digits that never rest cannot be read
FORECAST_SECONDS = 30.0  # of which the rate is the average by which the rest is reckoned
SETTLED_SECONDS = 5.0  # without more to move: before, the rest is not known
STEADY_SHARE = 0.15  # of the time left, by which a new forecast has to differ to be shown

SILENCE_SECONDS = 10.0  # without an answer, after which a registry is called slow


class Work(Protocol):
    """Says how far something is: a run's scheduler, an audit, or a new lock."""

    @property
    def transport(self) -> Transport: ...

    @property
    def images_done(self) -> int: ...

    @property
    def images_known(self) -> int:
        """Images so far, done or not."""

    @property
    def bytes_moved(self) -> int: ...

    @property
    def traffic(self) -> Traffic: ...

    @property
    def failures(self) -> Mapping[str, int]:
        """By host, how many images have failed there."""

    @property
    def drain_ends(self) -> float | None:
        """When what is under way is cut off; None while there is no drain."""

    @property
    def verb(self) -> str:
        """What is done to an image at work, in a word or two: "copying"."""

    def under_way(self) -> list[str]:
        """Return the references of the images at work."""


async def show_progress(console: Console, work: Work) -> None:
    """Keep the live display, or write a heartbeat every 30 s, until cancelled."""
    began = anyio.current_time()
    pace = Pace(began)
    silences = Silences()
    pause = DISPLAY_SECONDS if console.has_display else HEARTBEAT_SECONDS
    try:
        while True:
            await anyio.sleep(pause)
            now = anyio.current_time()
            pace.record(now, work.bytes_moved, work.traffic.expected)
            silences.record(now, work)
            console.update_progress(
                Progress(
                    done=work.images_done,
                    known=work.images_known,
                    bytes=work.bytes_moved,
                    expected=work.traffic.expected,
                    rate=pace.rate,
                    elapsed=now - began,
                    waiting=describe_work(work, now),
                    remaining=pace.remaining(now),
                    saved_present=work.traffic.present,
                    saved_mounted=work.traffic.mounted,
                    registries=tuple(describe_registries(work, silences, now).values()),
                )
            )
    finally:
        console.clear_display()


class _Sample(NamedTuple):
    time: float
    moved: int  # bytes until then


class Pace:
    """How fast bytes move, and how long the rest takes, told so that neither jumps."""

    def __init__(self, began: float) -> None:
        self.rate = 0.0  # bytes a second, as it is shown
        self._rated_at = began  # when this rate was reckoned
        self._samples = deque([_Sample(began, 0)])  # the oldest first
        self._expected = 0  # bytes
        self._grew_at = began  # when more bytes were expected the last time
        self._ends_at: float | None = None  # when the rest is moved, as it is shown

    def record(self, now: float, moved: int, expected: int) -> None:
        """Note how many bytes were moved until now, and how many are to be moved in all."""
        self._samples.append(_Sample(now, moved))
        # One sample from before the time of the forecast stays, to count from.
        while self._samples[1].time <= now - FORECAST_SECONDS:
            self._samples.popleft()

        is_rate_old = now - self._rated_at >= NEW_RATE_SECONDS
        if is_rate_old or not self.rate:
            self.rate = self._rate_since(now - RATE_SECONDS)
            self._rated_at = now
        if expected > self._expected:
            self._grew_at = now
        self._expected = expected
        self._update_forecast(now, expected - moved)

    def _rate_since(self, moment: float) -> float:
        """Return the average rate from a moment on, or from the first sample that is kept."""
        last = self._samples[-1]
        first = next(
            (sample for sample in reversed(self._samples) if sample.time <= moment),
            self._samples[0],
        )
        return (last.moved - first.moved) / max(last.time - first.time, 1e-3)

    def _update_forecast(self, now: float, rest: int) -> None:
        """Reckon when the rest is moved. The forecast that is shown stays while it is about right."""
        rate = self._rate_since(now - FORECAST_SECONDS)
        # While images are compared, more bytes are expected with each of them.
        is_growing = now - self._grew_at < SETTLED_SECONDS
        if rest <= 0 or rate <= 0 or is_growing:
            self._ends_at = None
            return
        ends_at = now + rest / rate
        tolerance = STEADY_SHARE * (ends_at - now)
        if self._ends_at is None or abs(ends_at - self._ends_at) > tolerance:
            self._ends_at = ends_at

    def remaining(self, now: float) -> float | None:
        """Return the seconds that are left; None where that is not known, or nothing moves."""
        if self._ends_at is None or not self.rate:
            return None
        return max(0.0, self._ends_at - now)


class Silences:
    """Since when registries have not answered the requests that are on their way."""

    def __init__(self) -> None:
        # By host: how many requests there were, and when there was another one last.
        self._requests = dict[str, int]()
        self._moved_at = dict[str, float]()
        self._bytes = 0

    def record(self, now: float, work: Work) -> None:
        """Look at the requests of now."""
        transport = work.transport
        bytes_now = transport.blob_bytes + transport.bytes_sent
        for host, limits in transport.gate.limits.items():
            requests = transport.requests[host].total() if host in transport.requests else 0
            # Nobody counts bytes by host: while any move, no registry is called slow.
            has_moved = requests != self._requests.get(host) or bytes_now != self._bytes
            is_idle = not limits.in_use
            if has_moved or is_idle:
                self._moved_at[host] = now
            self._requests[host] = requests
        self._bytes = bytes_now

    def longest(self, now: float) -> dict[str, float]:
        """Return the hosts that are slow to answer, with the seconds since their last one."""
        silent = {host: now - moment for host, moment in self._moved_at.items()}
        return {host: seconds for host, seconds in silent.items() if seconds >= SILENCE_SECONDS}


def describe_work(work: Work, now: float) -> str:
    """Say in a few words what is being done."""
    names = work.under_way()
    if work.drain_ends is not None:
        remaining = duration_text(max(0.0, work.drain_ends - now))
        return f"stopping in {remaining} at most, {len(names)} under way"
    if not names:
        # With all known images done, more can only come from repositories that are being listed.
        all_done = work.images_done == work.images_known
        return "listing tags" if all_done else "comparing tags"
    if len(names) == 1:
        return f"{work.verb} {names[0]}"
    return f"{len(names)} under way, first {names[0]}"


def describe_registries(work: Work, silences: Silences, now: float) -> dict[str, str]:
    """Say in a line each, by host, which registries are away, throttled, slow or failing."""
    lines = work.transport.recovery.describe(now)
    for host, meter in work.transport.throttled_meters.items():
        if meter.paused_until > now:
            text = f"{host} is throttled (429), window {meter.width:.0f}"
            seconds = duration_text(meter.paused_until - now)
            lines.setdefault(host, f"{text}, next try in {seconds}")
    for host, silence in silences.longest(now).items():
        lines.setdefault(host, f"{host} has not answered for {duration_text(silence)}")
    for host, count in work.failures.items():
        text = f"{count} failed"
        lines[host] = f"{lines[host]}, {text}" if host in lines else f"{host}: {text}"
    return lines
