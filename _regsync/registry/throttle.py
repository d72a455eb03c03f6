"""When a request may go: permits per registry, windows and buckets per action, what a peer asks us
to wait. Owns: the arithmetic of waiting. May not know: clocks, sockets, tasks; `now` and chance are
arguments. Invariant I8: a request is admitted by one synchronous decision that takes everything it
needs or nothing. Follows docs/specification.md section 8.1, docs/design.md section 9."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from _regsync.providers import Pace

DEFAULT_CONCURRENCY = 50  # docs/specification.md section 2.2: `max_concurrent` when unset


# Bodies from here on count as streams (docs/design.md section 9): few fill a link, more only make
# every image end late.
LARGE_BODY = 1024 * 1024


_LARGE_STREAMS = 8


# docs/design.md section 9: 5 attempts, exponential from 0.5 s, full jitter, cap 30 s.
ATTEMPTS = 5


_FIRST_PAUSE = 0.5


_LONGEST_PAUSE = 30.0


# A request gives up after so long of 429s; what asks for longer than the second is not waited for.
THROTTLED_FOR = 600.0


LONGEST_WAIT = 300.0


# A congestion epoch lasts so long at least; a body that was not refused for so long is under way.
_EPOCH = 0.1


UNDER_WAY = 1.0


# Of the last tenth of a quota discovery takes only what comes back, in a minute where no time is
# told.
DISCOVERY = ("tag_list", "manifest_head", "manifest_get")


_LOW_QUOTA = 0.1


_USUAL_QUOTA = 60


# compiled when it is first needed: a start pays for what it uses
_QUOTA = "([0-9]{1,12})(?:;.*w=([0-9]{1,9}))?"


class Want(NamedTuple):
    """What a request or half of a blob transfer takes: a permit, a place in its first meter, a
    token of each meter.
    """

    host: str
    body: str | None = None  # "read", "write", or None for a short request
    large: bool = False
    meters: tuple[str, ...] = ()
    discovers: bool = False
    within: bool = False  # of work that has a permit: it takes none

    @property
    def place(self) -> tuple[str, ...]:
        return (self.host, *self.meters)


class Meter:
    """A group of actions at a registry: the adaptive window of those under way, the bucket that
    feeds it, pauses.
    """

    def __init__(self, pace: Pace, limit: Limit) -> None:
        self.width = float(pace.start)
        self.paused = -math.inf
        self.refused_since = math.inf
        self._limit = limit
        self._entered = 0
        self._halved = 0
        self._settled = -math.inf
        self._refused = 0
        self.inside = dict[
            int, float
        ]()  # by the order of their entry: when they leave if nothing is heard
        # The bucket is the time at which it is full; a token is there up to `_slack` before that.
        self._gap = 1 / pace.rate if pace.rate else 0.0
        self.full = -math.inf
        self._slack = self._gap * (pace.burst - 1 - 1e-4)  # for sums of gaps are rounded
        # Of a quota: the last number it has room for, its size, seconds between two that discover,
        # when one went last.
        self._last = math.inf
        self._most = 0
        self._spread = 0.0
        self._asked = -math.inf
        self._held = -math.inf
        self._left = math.inf
        self._fresh = 0

    def opens(self, now: float, discovers: bool) -> float:
        """Return when one more request may enter: now, or by time alone, or (inf) not before
        another one leaves.
        """
        for number in [number for number, until in self.inside.items() if until <= now]:
            self.end(number, 200)
        room = max(1, min(int(self.width), self._limit.cap))
        later = max(self.paused, self.full - self._slack, self._held if discovers else -math.inf)
        full = len(self.inside) >= room or (discovers and self._entered >= self._last)
        return max(later, min(self.inside.values())) if full and self.inside else later

    def enter(self, now: float, discovers: bool) -> int:
        """Take a token, and a place in the window; return its number."""
        self.full = max(now, self.full) + self._gap
        if discovers:
            self._asked = now
            self._held = now + self._spread
        self._entered += 1
        self.inside[self._entered] = math.inf
        return self._entered

    def end(
        self,
        number: int,
        status: int = 0,
        now: float = 0.0,
        asked: float = 0.0,
        chance: float = 0.0,
    ) -> None:
        """Leave the window by an answer (0: none): widen it, or halve it once in a congestion
        epoch, which ends with the answer to a request that entered after it; pause for what was
        `asked`, after a 429 at least a back-off."""
        was_inside = self.inside.pop(number, None) is not None
        if status == 429:
            self.refused_since = min(self.refused_since, now)
            if number > self._halved and now >= self._settled:
                self.width = max(1.0, self.width / 2)
                self._halved = self._entered
                self._settled = now + _EPOCH
                self._refused += 1
                asked = max(asked, backoff(self._refused, chance))
            elif number > self._halved:
                asked = max(asked, self._settled - now)
        elif was_inside and 0 < status < 500:
            self.width = min(self.width + 1 / self.width, float(self._limit.cap))
            self._refused = 0
            self.refused_since = math.inf
        if asked <= LONGEST_WAIT:
            self.paused = max(self.paused, now + asked if asked else -math.inf)

    def tell(self, now: float, number: int, left: int, most: int, seconds: float) -> bool:
        """Take in a quota by the answer to a request (0: another meter's); False: used up for too
        long.
        """
        if number <= self._fresh and left >= self._left:
            return True
        # what was asked before this one was heard may be older
        self._left = left
        self._fresh = self._entered
        self._most = max(self._most, most, left)
        wait = seconds / max(left, 1)
        low = left <= self._most * _LOW_QUOTA and wait <= LONGEST_WAIT
        # Of those inside it may have counted none.
        self._last = self._entered - len(self.inside) + left if left and not low else math.inf
        self._spread = wait if low else 0.0
        self._held = (self._asked if left else now) + self._spread
        return left > 0 or low


class Limit:
    """What one registry gives and who uses it: permits over all actions, a meter for each group of
    them.
    """

    def __init__(self, cap: int, paces: Sequence[Pace] = (), *, per_project: bool = False) -> None:
        self.cap = cap
        self.in_use = 0
        self.bodies = 0
        self.large = {"read": 0, "write": 0}
        self.meters = dict[str, Meter]()
        self._per_project = per_project
        self._paces = {action: pace for pace in paces for action in pace.actions.split()}

    def meters_of(self, repository: str, *actions: str) -> tuple[str, ...]:
        """Name the meters that a request draws on which does all of `actions`."""
        project = f"{repository.partition('/')[0]}: " if self._per_project else ""
        found = {project + self._paces[action].actions: self._paces[action] for action in actions}
        for name, pace in found.items():
            if name not in self.meters:
                self.meters[name] = Meter(pace, self)
        return tuple(found)

    def fits(self, wants: Sequence[Want]) -> bool:
        """Say whether all of `wants`, of this registry, can be taken now."""
        bodies = [want for want in wants if want.body is not None]
        # A fifth, at least two, stays for discovery; but a transfer inside one registry (two
        # permits) fits when idle.
        most = max(1, self.cap - max(2, self.cap // 5)) if self.bodies else self.cap
        room = self.in_use + len(wants) <= self.cap and (
            not bodies or self.bodies + len(bodies) <= most
        )
        return room and all(
            self.large[want.body or ""] < _LARGE_STREAMS for want in bodies if want.large
        )

    def count(self, want: Want, step: int) -> None:
        """Take a permit (1) or give it back (-1)."""
        self.in_use += step
        if want.body is not None:
            self.bodies += step
            self.large[want.body] += step * want.large


def admit(
    limits: Mapping[str, Limit],
    wants: tuple[Want, ...],
    now: float = 0.0,
    entered: list[tuple[tuple[str, ...], Meter, int]] | None = None,
) -> bool:
    """Take all that `wants` name, or nothing; True when taken, with the places in windows added to
    `entered`.
    """
    permits = [want for want in wants if not want.within]
    if due(limits, wants, now) > now or not all(
        limits[host].fits([want for want in permits if want.host == host])
        for host in {want.host for want in permits}
    ):
        return False
    for want in permits:
        limits[want.host].count(want, 1)
    for want in wants:
        meters = [limits[want.host].meters[name] for name in want.meters]
        numbers = [meter.enter(now, want.discovers) for meter in meters]
        for meter, number in zip(meters[1:], numbers[1:], strict=True):
            meter.end(number)
        if meters and entered is not None:
            entered.append((want.place, meters[0], numbers[0]))
    return True


def due(limits: Mapping[str, Limit], wants: tuple[Want, ...], now: float) -> float:
    """Return when windows and buckets have what `wants` draw, as `Meter.opens` does."""
    return max(
        (
            limits[want.host].meters[name].opens(now, want.discovers)
            for want in wants
            for name in want.meters
        ),
        default=-math.inf,
    )


def release(limits: Mapping[str, Limit], wants: tuple[Want, ...]) -> None:
    for want in wants:
        limits[want.host].count(want, -1)


class Patience:
    """Repetitions of one piece of work: so many attempts, and apart from them 429s for so long."""

    def __init__(self, attempts: int) -> None:
        self.repeated = 0
        self._left = attempts
        self._throttled_since = -1.0

    def pause(self, now: float, chance: float, *, throttled: bool, asked: float) -> float | None:
        """Return the seconds before the next attempt, at least what the peer asked for; None to
        give up.
        """
        if throttled and self._throttled_since < 0:
            self._throttled_since = now
        self._left -= not throttled
        late = throttled and now - self._throttled_since > THROTTLED_FOR
        if late or self._left < 1 or asked > LONGEST_WAIT:
            return None
        self.repeated += 1
        return max(asked, backoff(self.repeated, chance))


def backoff(attempt: int, chance: float) -> float:
    """Return the pause in seconds before attempt `attempt` (from 1); `chance` is uniform in [0, 1)."""
    return float(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt - 1, 9)) * chance)


def hopeless(before: Mapping[Any, int], left: Mapping[Any, int], ticks: float) -> list[Any]:
    """Return the streams to drop, by two looks at what each has left, `ticks` times the time
    between them before the end: those that would not end if the whole line were theirs, else the
    slowest of those that would not."""
    moved = {each: before[each] - count for each, count in left.items() if each in before}
    late = [each for each in moved if left[each] > ticks * moved[each]]
    late.sort(key=lambda each: moved[each] / left[each])
    line = sum(moved.values())
    return [each for each in late if left[each] > ticks * line] or late[:1] if line else []


def parse_quota(
    header: Callable[[str], str | None], wall_now: float
) -> tuple[int, int, float] | None:
    """Return what is left of a quota, of how much (0: not told), and at most how long until all of
    it is back.
    """
    for prefix in ("", "x-"):
        if not header(f"{prefix}ratelimit-remaining"):
            continue
        left, most, reset = (
            re.match(_QUOTA, header(f"{prefix}ratelimit-{name}") or "")
            for name in ("remaining", "limit", "reset")
        )
        if left:
            seconds = float((reset and reset[1]) or left[2] or (most and most[2]) or _USUAL_QUOTA)
            # Some tell a moment, in seconds since 1970.
            return int(left[1]), int(most[1]) if most else 0, seconds - (seconds > 1e9) * wall_now
    return None
