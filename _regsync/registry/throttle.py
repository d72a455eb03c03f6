"""The arithmetic of waiting: how often, and how many at a time, a registry may be asked.

Owns: permits of a registry, the windows, buckets and quotas of its actions, pauses, retry budgets.
May not know: clocks, sockets, tasks; `now` and chance are arguments.
Invariants: I8 (a request is admitted by one decision that takes everything it needs, or nothing).
Follows: docs/specification.md section 8.1, docs/design.md section 9.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from _regsync.providers import Pace

# docs/specification.md section 2.2: `max_concurrent` when unset.
DEFAULT_CONCURRENCY = 50

# Bytes from which on a body counts as a stream (docs/design.md section 9): few streams fill a
# link, more of them only make every image end late.
LARGE_BODY = 1024 * 1024

# How many streams read from one registry, and how many write to one.
_LARGE_STREAMS = 8

# docs/design.md section 9: 5 attempts, exponential from 0.5 s, full jitter, at most 30 s.
ATTEMPTS = 5
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0

# Seconds after which a request that gets nothing but 429 is given up.
THROTTLED_FOR = 600.0

# Seconds that a run waits when a registry asks for a pause; what asks for more is given up.
LONGEST_WAIT = 300.0

# Seconds that a congestion epoch lasts at least.
_EPOCH = 0.1

# Seconds after which a body that was not refused counts as accepted.
UNDER_WAY = 1.0

# The actions that ask what there is. What they find is copied by other actions.
DISCOVERY = ("tag_list", "manifest_head", "manifest_get")

# Seconds until a quota is back, where a registry does not say.
_USUAL_QUOTA = 60.0

# The headers by which registries tell a quota: what is left of it, how large it is, when it is back.
_QUOTA_HEADERS = (
    ("ratelimit-remaining", "ratelimit-limit", "ratelimit-reset"),
    ("x-ratelimit-remaining", "x-ratelimit-limit", "x-ratelimit-reset"),
)

# A moment in seconds since 1970 is larger than this, a duration is smaller.
_LEAST_MOMENT = 1e9

# A count, and the seconds of the window that it is about: `100;w=21600`.
_QUOTA = "(?P<count>[0-9]{1,12})(?:;.*w=(?P<window>[0-9]{1,9}))?"

# Requests that are remembered to see how many a registry grants; and the longest time between two
# refusals, in seconds, from which that is learnt: two that are further apart are two strays.
_MOST_SEEN = 1000
_LONGEST_STRETCH = 10.0

# The part of a token by which a bucket is read as fuller than it is: sums of gaps are rounded.
_ROUNDING = 1e-4


class Demand(NamedTuple):
    """What one request, or one side of a blob transfer, takes from a registry.

    That is a permit, a place in the window of the first of its meters, and a token of the bucket of
    each.
    """

    host: str
    body: Literal["read", "write"] | None = None  # None: a short request
    large: bool = False  # a body of LARGE_BODY bytes or more
    meters: tuple[str, ...] = ()
    is_discovery: bool = False
    has_permit: bool = False  # part of work that has a permit, so that it takes none

    @property
    def place(self) -> tuple[str, ...]:
        """The window and buckets that it draws on; two demands of one place need it once."""
        return (self.host, *self.meters)


class PermitNeed(NamedTuple):
    """What one piece of work takes of the permits of one registry."""

    host: str
    permits: int
    bodies: int  # how many of them are for bodies
    large: tuple[Literal["read", "write"], ...]  # the ways of those that are large


@lru_cache(maxsize=1024)
def permit_needs(wants: tuple[Demand, ...]) -> tuple[PermitNeed, ...]:
    """Return what `wants` take of permits, for each registry. The same few are asked for at every
    request.
    """
    by_host: dict[str, list[Demand]] = {}
    for want in wants:
        if not want.has_permit:
            by_host.setdefault(want.host, []).append(want)
    needs = []
    for host, group in by_host.items():
        bodies = [want.body for want in group if want.body is not None]
        large = tuple(want.body for want in group if want.body is not None and want.large)
        needs.append(PermitNeed(host, len(group), len(bodies), large))
    return tuple(needs)


class CongestionWindow:
    """How many requests may be under way at once: one more after successes, half after a 429."""

    def __init__(self, start: int) -> None:
        self.width = float(start)

        # The numbers of the requests that are under way, and those of bodies: when each counts as a
        # success if nothing is heard of it until then.
        self.occupants: set[int] = set()
        self.presumed_success_at: dict[int, float] = {}

        # The number of the last request that was let in.
        self.last_number = 0

        # When the first of the 429s came that no success has followed.
        self.refused_since = math.inf

        self._halvings = 0  # since the last success
        self._last_number_at_halving = 0
        self._epoch_end = -math.inf

    def is_full(self, cap: int) -> bool:
        return len(self.occupants) + 1 > min(self.width, cap)

    def enter(self) -> int:
        self.last_number += 1
        self.occupants.add(self.last_number)
        return self.last_number

    def leave(self, number: int) -> bool:
        """Take a request out; return whether it was still inside."""
        if number not in self.occupants:
            return False
        self.occupants.remove(number)
        self.presumed_success_at.pop(number, None)
        return True

    def record_success(self, cap: int) -> None:
        self.width = min(self.width + 1 / self.width, float(cap))
        self.refused_since = math.inf
        self._halvings = 0

    def record_refusal(self, number: int, now: float, chance: float) -> float:
        """Take in a 429; return for how many seconds the window should rest.

        The width is halved once in a congestion epoch. An epoch ends with the answer to a request
        that entered after the halving, and lasts at least _EPOCH seconds.
        """
        self.refused_since = min(self.refused_since, now)
        if number <= self._last_number_at_halving:
            return 0.0
        if now < self._epoch_end:
            return self._epoch_end - now

        self.width = max(1.0, self.width / 2)
        self._last_number_at_halving = self.last_number
        self._epoch_end = now + _EPOCH
        self._halvings += 1
        return backoff(self._halvings, chance)


class TokenBucket:
    """So many requests a second, and so many at once. It is kept as the time at which it is full."""

    def __init__(self, rate: int, burst: int) -> None:
        # Seconds between two tokens; 0: there are always some.
        self._gap = 1 / rate if rate else 0.0
        self._depth = self._gap * (burst - 1 - _ROUNDING)
        self._full_at = -math.inf

    def next_token(self) -> float:
        """Return the time from which on a token is there."""
        return self._full_at - self._depth

    def take(self, now: float) -> None:
        self._full_at = max(now, self._full_at) + self._gap


class _Entry(NamedTuple):
    """A request that was let in, and when."""

    number: int
    time: float


class Stretch(NamedTuple):
    """So many requests, in so many seconds."""

    requests: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


class GrantedRate:
    """How many requests a registry grants in which time, learnt between two of its refusals.

    A body has been sent when it is refused, so that to wait costs less. What a registry granted
    between two refusals is a limit: so many requests, in the time from the first of them until the
    registry granted something again. From then on no more are let in within any stretch of that
    length. After as many grants without a refusal the limit grows, by 1, then by 4, 16 and so on,
    and is forgotten when a step would double it.

    One refusal alone shows no limit, because any server may refuse once.
    """

    def __init__(self) -> None:
        # No more than this is let in; None: nothing was learnt.
        self.limit: Stretch | None = None

        # After a first refusal, the last requests that were let in and not refused, in their order.
        self._has_refused = False
        self._entries = deque[_Entry](maxlen=_MOST_SEEN)

        # After a refusal: the first request that was let in since, which shows by its answer whether
        # the registry grants something again. And when the last one entered that has shown it.
        self._is_refused = False
        self._probe: _Entry | None = None
        self._granted_since = -math.inf

        # Requests to be granted until the number grows, and by how much it does then.
        self._until_growth = 0
        self._growth = 1

    def next_opening(self) -> float:
        """Return the time from which on one more may be let in."""
        limit = self.limit
        if limit is None or len(self._entries) < limit.requests:
            return -math.inf
        return self._entries[-limit.requests].time + limit.seconds

    def enter(self, number: int, now: float) -> None:
        if not self._has_refused:
            return
        entry = _Entry(number, now)
        self._entries.append(entry)
        if self._is_refused and self._probe is None:
            self._probe = entry

    def discard(self, number: int) -> None:
        """Take out a request that the registry has not counted."""
        for index in reversed(range(len(self._entries))):
            if self._entries[index].number == number:
                del self._entries[index]
                return

    def record_refusal(self, number: int) -> None:
        """Take in a 429."""
        self._has_refused = True
        self.discard(number)

        # A request that entered before the probe belongs to the refusal that is known.
        if self._probe is None or number >= self._probe.number:
            self._is_refused = True
            self._probe = None

    def record_grant(self, number: int) -> None:
        """Take in an answer that is no refusal."""
        if self._probe is not None and number >= self._probe.number:
            self._learn(self._probe.time)
            self._is_refused = False
            self._probe = None
        elif self.limit is not None and not self._is_refused:
            self._until_growth -= 1
            if self._until_growth == 0:
                self._grow(self.limit)

    def _learn(self, until: float) -> None:
        """Learn from what was granted before a refusal that has ended at `until`."""
        since = self._granted_since
        self._granted_since = until
        if until - since > _LONGEST_STRETCH:
            return
        granted = [entry.time for entry in self._entries if since <= entry.time < until]
        if granted:
            self.limit = densest_stretch(granted, until)
            self._until_growth = self.limit.requests
            self._growth = 1

    def _grow(self, limit: Stretch) -> None:
        if self._growth >= limit.requests:
            self.limit = None
            return
        self.limit = limit._replace(requests=limit.requests + self._growth)
        self._until_growth = self.limit.requests
        self._growth *= 4


def densest_stretch(times: Sequence[float], until: float) -> Stretch:
    """Return the stretch of the highest rate: from one of the requests, let in at `times`, to the last
    of them, in the time from the first of these until `until`.

    A run may have had little to ask for at first, so the beginning may be left out. At least half
    the requests count, because the last few alone say nothing.
    """
    fewest = (len(times) + 1) // 2
    counts = range(fewest, len(times) + 1)
    return max((Stretch(count, until - times[-count]) for count in counts), key=lambda s: s.rate)


class Remaining(NamedTuple):
    """What is left of a quota: requests, and the seconds until all of it is back at the latest."""

    requests: int
    seconds: float


class Quota:
    """What a registry says it will still answer (`ratelimit-remaining`)."""

    def __init__(self) -> None:
        # Nothing is left before this time.
        self.paused_until = -math.inf

        # The number of the last request that the quota covers.
        self._last_covered = math.inf

        # What the newest answer said is left, and the last request that had been sent by then.
        self._left = math.inf
        self._sent_by_then = 0

    def covers(self, number: int) -> bool:
        return number <= self._last_covered

    def update(
        self, now: float, number: int, window: CongestionWindow, remaining: Remaining
    ) -> bool:
        """Take in what the answer to a request says; False when a run does not wait for the rest.

        Answers overtake each other: one to a request that had been sent when the newest was heard
        may be older, and counts only when it leaves less. Requests that are under way may not have
        been counted by the registry, so that each of them is taken off.
        """
        if number <= self._sent_by_then and remaining.requests >= self._left:
            return True
        self._left = remaining.requests
        self._sent_by_then = window.last_number
        self._last_covered = window.last_number - len(window.occupants) + remaining.requests

        if remaining.requests > 0:
            return True
        if remaining.seconds > LONGEST_WAIT:
            return False
        self.paused_until = now + remaining.seconds
        return True


class Meter:
    """What a group of actions at a registry shares: a congestion window, a token bucket, a quota, and
    pauses that the registry asks for.
    """

    def __init__(self, pace: Pace, limit: RegistryLimits) -> None:
        self.window = CongestionWindow(pace.start)
        self.paused_until = -math.inf
        self._bucket = TokenBucket(pace.rate, pace.burst)
        self._granted_rate = GrantedRate()
        self._quota = Quota()
        self._limit = limit

    @property
    def width(self) -> float:
        return self.window.width

    def next_opening(self, *, is_discovery: bool) -> float:
        """Return the time from which one more request may enter the window.

        Returns inf if only an answer can make room. Due presumed successes must have been ended
        with `end_presumed_successes` before.
        """
        window = self.window
        opens_at = max(
            self.paused_until, self._bucket.next_token(), self._granted_rate.next_opening()
        )
        is_full = window.is_full(self._limit.cap)
        if is_discovery:
            opens_at = max(opens_at, self._quota.paused_until)
            is_full = is_full or not self._quota.covers(window.last_number + 1)

        # If no request is under way, one request is admitted even without remaining quota, because
        # only its answer can report a new quota.
        if not is_full or not window.occupants:
            return opens_at
        if not window.presumed_success_at:
            return math.inf

        # The first presumed success makes room.
        return max(opens_at, min(window.presumed_success_at.values()))

    def end_presumed_successes(self, now: float) -> None:
        """Let uploads leave that the registry has taken for so long that they count as accepted."""
        presumed = self.window.presumed_success_at
        for number in [number for number, moment in presumed.items() if moment <= now]:
            self.end(number, 200)

    def enter(self, now: float) -> int:
        """Take a token and a place in the window; return the request's number."""
        self._bucket.take(now)
        number = self.window.enter()
        self._granted_rate.enter(number, now)
        return number

    def take_token(self, now: float) -> None:
        self._bucket.take(now)

    def end(
        self,
        number: int,
        status: int = 0,
        now: float = 0.0,
        retry_after: float = 0.0,
        chance: float = 0.0,
    ) -> None:
        """Let a request leave the window.

        `number` is what `enter` returned. `status` is its answer's, 0 where there is none, and
        `retry_after` the seconds that the answer asks to pause. `chance`, from 0 to 1, spreads the
        back-off after a 429 between processes.
        """
        was_inside = self.window.leave(number)
        pause = retry_after
        if status == 429:
            self._granted_rate.record_refusal(number)
            back_off = self.window.record_refusal(number, now, chance)
            pause = max(pause, back_off)
        elif was_inside and 0 < status < 500:
            # Any answer but a failure of the server says that it keeps up. One that came when its
            # request had left, as an upload that counts as accepted does, says nothing new.
            self.window.record_success(self._limit.cap)
            self._granted_rate.record_grant(number)
        elif was_inside and status == 0:
            self._granted_rate.discard(number)  # it was not sent, or got no answer

        # Who asks for a longer pause is not waited for: its requests fail (`LONGEST_WAIT`).
        if 0 < pause <= LONGEST_WAIT:
            self.paused_until = max(self.paused_until, now + pause)

    def update_quota(self, now: float, number: int, remaining: Remaining) -> bool:
        """Take in a quota; `number`: the request that was answered, 0 when it is another meter's.

        False when the quota is used up for longer than a run waits.
        """
        return self._quota.update(now, number, self.window, remaining)


class RegistryLimits:
    """What one registry gives and who uses it: permits over all actions, and a meter for
    each group of actions.
    """

    def __init__(self, cap: int, paces: Sequence[Pace] = (), *, per_project: bool = False) -> None:
        self.cap = cap
        self.in_use = 0
        self.bodies = 0
        self.large = {"read": 0, "write": 0}
        self.meters: dict[str, Meter] = {}

        # Whether the first segment of a repository's name has meters of its own.
        self._per_project = per_project
        self._paces = {action: pace for pace in paces for action in pace.actions.split()}
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def meters_of(self, repository: str, *actions: str) -> tuple[str, ...]:
        """Name the meters on which a request draws that does all of `actions`."""
        project = f"{repository.partition('/')[0]}: " if self._per_project else ""
        key = (project, *actions)
        if key not in self._names:
            paces = {
                project + self._paces[action].actions: self._paces[action] for action in actions
            }
            for name, pace in paces.items():
                self.meters.setdefault(name, Meter(pace, self))
            self._names[key] = tuple(paces)
        return self._names[key]

    def narrow_windows(self) -> None:
        """Narrow all windows to a quarter: the registry is back from an outage."""
        for meter in self.meters.values():
            meter.window.width = max(1.0, meter.window.width / 4)

    def has_permits_for(self, need: PermitNeed) -> bool:
        """Say whether the permits that one piece of work needs here can be taken now."""
        if self.in_use + need.permits > self.cap:
            return False
        if need.bodies == 0:
            return True

        # A fifth stays for short requests, and at least two, or one of three at most. A transfer
        # inside one registry, of two bodies, fits when nothing else is under way.
        least_kept = 2 if self.cap > 3 else 1
        most_bodies = max(1, self.cap - max(least_kept, self.cap // 5))
        if self.bodies and self.bodies + need.bodies > most_bodies:
            return False
        return all(self.large[way] < _LARGE_STREAMS for way in need.large)

    def count_permit(self, want: Demand, step: int) -> None:
        """Take a permit (1), or give it back (-1)."""
        self.in_use += step
        if want.body is not None:
            self.bodies += step
            if want.large:
                self.large[want.body] += step


class Slot(NamedTuple):
    """A place in a window, taken for a request that will be or is under way."""

    want: Demand
    meter: Meter
    number: int


def has_permits(limits: Mapping[str, RegistryLimits], wants: tuple[Demand, ...]) -> bool:
    """Say whether the permits are there that `wants` take."""
    return all(limits[need.host].has_permits_for(need) for need in permit_needs(wants))


def take(limits: Mapping[str, RegistryLimits], wants: Sequence[Demand], now: float) -> list[Slot]:
    """Take all that `wants` name, which is there as `has_permits` and `next_opening` say; return the
    places in windows.
    """
    slots: list[Slot] = []
    for want in wants:
        if not want.has_permit:
            limits[want.host].count_permit(want, 1)
        if want.meters:
            meters = [limits[want.host].meters[name] for name in want.meters]
            slots.append(Slot(want, meters[0], meters[0].enter(now)))
            for meter in meters[1:]:
                meter.take_token(now)
    return slots


def refresh_next_opening(
    limits: Mapping[str, RegistryLimits], wants: Sequence[Demand], now: float
) -> float:
    """End the presumed successes that are due, and return the time from which all windows and
    buckets of `wants` have room.

    Returns inf if only an answer can make room.
    """
    opens_at = -math.inf
    for want in wants:
        meters = limits[want.host].meters
        for name in want.meters:
            meter = meters[name]
            if meter.window.presumed_success_at:
                meter.end_presumed_successes(now)
            opens_at = max(opens_at, meter.next_opening(is_discovery=want.is_discovery))
    return opens_at


def release(limits: Mapping[str, RegistryLimits], wants: Sequence[Demand]) -> None:
    """Give back the permits that `take` took for `wants`; windows are left by `Meter.end`."""
    for want in wants:
        limits[want.host].count_permit(want, -1)


class RetryBudget:
    """How often one piece of work may be repeated: so many attempts, and besides 429s for so long."""

    def __init__(self, attempts: int) -> None:
        self.retries = 0
        self._left = attempts
        self._throttled_since: float | None = None

    def take_attempt(
        self, now: float, chance: float, *, is_throttled: bool, retry_after: float
    ) -> float | None:
        """Use up one attempt, unless `is_throttled`, and return the pause before it in seconds.

        The pause is at least `retry_after`. Returns None if the budget is exhausted.
        """
        if is_throttled:
            if self._throttled_since is None:
                self._throttled_since = now
            if now - self._throttled_since > THROTTLED_FOR:
                return None
        else:
            self._left -= 1
        if self._left < 1 or retry_after > LONGEST_WAIT:
            return None
        self.retries += 1
        return max(retry_after, backoff(self.retries, chance))


def backoff(attempt: int, chance: float) -> float:
    """Return the pause in seconds before attempt `attempt` (from 1); `chance` is uniform in [0, 1)."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(attempt - 1, 9))
    return longest * chance


def parse_quota(header: Callable[[str], str | None], wall_now: float) -> Remaining | None:
    """Read what is left of a quota from an answer's headers; None where nothing is said."""
    for remaining_name, limit_name, reset_name in _QUOTA_HEADERS:
        value = header(remaining_name)
        remaining = re.match(_QUOTA, value) if value else None
        if remaining is not None:
            limit = re.match(_QUOTA, header(limit_name) or "")
            reset = re.match(_QUOTA, header(reset_name) or "")
            seconds = _seconds_of(reset, remaining, limit, wall_now)
            return Remaining(int(remaining["count"]), seconds)
    return None


def _seconds_of(
    reset: re.Match[str] | None,
    remaining: re.Match[str],
    limit: re.Match[str] | None,
    wall_now: float,
) -> float:
    """Return the seconds until a quota is back: as it says itself, else the length of its window."""
    if reset is not None:
        seconds = float(reset["count"])
        return seconds - wall_now if seconds > _LEAST_MOMENT else seconds
    if remaining["window"]:
        return float(remaining["window"])
    if limit is not None and limit["window"]:
        return float(limit["window"])
    return _USUAL_QUOTA
