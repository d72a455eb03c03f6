"""The arithmetic of rate limits: how many requests a registry may get, and how many at a time.

Owns: the permits of a registry; the windows, buckets and quotas of its actions; pauses; retry
budgets.
May not know: clocks, sockets, tasks. `now` (seconds of the event loop's clock) and `chance` (a
random number from 0 to 1) are arguments.
Invariants: I8 (a request is admitted by one decision, which takes all that the request needs, or
nothing).
Follows: docs/specification.md section 8.1, docs/design.md section 9.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from _regsync.providers import Limits

# The default of `max_concurrent` (docs/specification.md section 2.2).
DEFAULT_CONCURRENCY = 50

# Bodies of at least this many bytes are large (docs/design.md section 9). A few streams fill a
# link; more of them only make every image finish late.
LARGE_BODY = 1024 * 1024

# How many large bodies are read from one registry at a time, and how many are written to one.
_LARGE_STREAMS = 8

# docs/design.md section 9: 5 attempts, exponential from 0.5 s, full jitter, at most 30 s.
ATTEMPTS = 5
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0

# Seconds after which a request is given up that has been answered by 429 only.
THROTTLED_FOR = 600.0

# The longest pause in seconds that a run observes if a registry asks for one. Requests that would
# have to pause longer fail.
LONGEST_WAIT = 300.0

# The shortest congestion epoch, in seconds.
_EPOCH = 0.1

# Seconds after which an upload's body counts as accepted, if the registry has not refused it.
UNDER_WAY = 1.0

# The actions that find out what to copy. Other actions then copy it.
DISCOVERY = ("tag_list", "manifest_head", "manifest_get")

# Seconds until a quota is renewed, if the registry does not report a time.
_USUAL_QUOTA = 60.0

# The headers that report a quota: requests left, size of the quota, time of its renewal.
_QUOTA_HEADERS = (
    ("ratelimit-remaining", "ratelimit-limit", "ratelimit-reset"),
    ("x-ratelimit-remaining", "x-ratelimit-limit", "x-ratelimit-reset"),
)

# A larger number of seconds is a time since 1970, a smaller one is a duration.
_LEAST_MOMENT = 1e9

# A count, and the seconds of the window that it applies to: `100;w=21600`.
_QUOTA = "(?P<count>[0-9]{1,12})(?:;.*w=(?P<window>[0-9]{1,9}))?"

# The part of a token by which a bucket is treated as fuller than it is, to absorb rounding errors.
_ROUNDING = 1e-4


class Demand(NamedTuple):
    """The limits that one request, or one side of a blob transfer, counts against.

    It takes a permit of the registry, a place in the window of its first meter, and a token from
    the bucket of each of its meters.
    """

    host: str  # host:port of the registry, a key of the registries' limits
    body: Literal["read", "write"] | None = None  # None: a request without a blob's body
    is_large: bool = False  # whether the body has at least LARGE_BODY bytes
    meters: tuple[str, ...] = ()  # names of its meters at the registry
    is_discovery: bool = False  # whether its action is in DISCOVERY; quotas apply to these only
    has_permit: bool = False  # whether its work holds the permit already, so that it takes none

    @property
    def meters_key(self) -> tuple[str, ...]:
        """The identity of its window and buckets. Demands of one piece of work with equal keys
        share one slot.
        """
        return (self.host, *self.meters)


class PermitNeed(NamedTuple):
    """The permits that one piece of work takes at one registry."""

    host: str
    permits: int
    bodies: int  # how many of the permits are for bodies
    large_bodies: tuple[Literal["read", "write"], ...]  # the direction of each large body


@lru_cache(maxsize=1024)
def permit_needs(demands: tuple[Demand, ...]) -> tuple[PermitNeed, ...]:
    """Return the permits that `demands` take, added up for each registry. The result is cached,
    because each request calls this function with one of a few demands.
    """
    takers = [demand for demand in demands if not demand.has_permit]
    needs = []
    for host in dict.fromkeys(taker.host for taker in takers):
        group = [taker for taker in takers if taker.host == host]
        bodies = [taker.body for taker in group if taker.body is not None]
        large = tuple(taker.body for taker in group if taker.body is not None and taker.is_large)
        needs.append(PermitNeed(host, len(group), len(bodies), large))
    return tuple(needs)


class CongestionWindow:
    """How many requests may be in flight at once. The width grows by one for each window of
    successes, and is halved after a 429.
    """

    def __init__(self, start: int) -> None:
        self.width = float(start)

        # The numbers of the requests that occupy a place in the window.
        self.occupants: set[int] = set()

        # Uploads among the occupants, by number: the time at which each counts as a success, if no
        # answer has arrived by then.
        self.presumed_success_at: dict[int, float] = {}

        # The number of the request that was admitted last. Numbers start at 1.
        self.last_number = 0

        # The time of the first 429 since the last success; inf if there was none.
        self.refused_since = math.inf

        self._halvings = 0  # since the last success

        # The current congestion epoch: the last request that was admitted before the width was
        # halved, and the earliest time at which the width may be halved again.
        self._last_number_at_halving = 0
        self._epoch_end = -math.inf

    def is_full(self, cap: int) -> bool:
        return len(self.occupants) + 1 > min(self.width, cap)

    def enter(self) -> int:
        self.last_number += 1
        self.occupants.add(self.last_number)
        return self.last_number

    def leave(self, number: int) -> bool:
        """Remove a request from the window. Returns False if it was not in the window any more."""
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
        """Record a 429, and return for how many seconds the window should pause.

        The width is halved once per congestion epoch. An epoch lasts at least _EPOCH seconds, and
        until a request is answered that was admitted after the halving.
        """
        self.refused_since = min(self.refused_since, now)
        if number <= self._last_number_at_halving:
            return 0.0  # the halving was for this refusal too, and has paused the window
        if now < self._epoch_end:
            return self._epoch_end - now  # the width is not halved again before then

        # Begin a new epoch.
        self.width = max(1.0, self.width / 2)
        self._last_number_at_halving = self.last_number
        self._epoch_end = now + _EPOCH
        self._halvings += 1
        return backoff(self._halvings, chance)


class TokenBucket:
    """A bucket that gains `rate` tokens per second and holds at most `burst`. A rate of 0 means no
    limit.
    """

    def __init__(self, rate: int, burst: int) -> None:
        # Seconds between two tokens; 0 if there is no limit.
        self._gap = 1 / rate if rate else 0.0

        # Seconds in which an empty bucket gains all tokens but one.
        self._depth = self._gap * (burst - 1 - _ROUNDING)
        self._full_at = -math.inf  # when the bucket will be full, if no token is taken until then

    def next_token(self) -> float:
        """Return the time from which the bucket holds a token."""
        return self._full_at - self._depth

    def take(self, now: float) -> None:
        self._full_at = max(now, self._full_at) + self._gap


class Remaining(NamedTuple):
    """The rest of a quota: how many requests are left, and the seconds until the quota is fully
    renewed.
    """

    requests: int
    seconds: float


class Quota:
    """The quota of discovery requests that a registry reports (`ratelimit-remaining`)."""

    def __init__(self, window: CongestionWindow) -> None:
        self._window = window  # of the meter that this quota belongs to

        # The quota is used up: no request of discovery is admitted before this time.
        self.paused_until = -math.inf

        # The number of the last request that fits into the quota.
        self._last_covered = math.inf

        # What the newest answer reported as left, and the number of the last request that had been
        # admitted when that answer arrived.
        self._left = math.inf
        self._last_number_at_update = 0

    def covers(self, number: int) -> bool:
        """Report whether the request with this number fits into the quota."""
        return number <= self._last_covered

    def update(self, now: float, number: int, remaining: Remaining) -> bool:
        """Record the quota that an answer reports. `number` is the request that was answered, or 0
        if it was a request of another meter.

        Returns False if the quota is used up for longer than a run waits (LONGEST_WAIT). Returns
        True in all other cases, also if the answer is out of date and is ignored.
        """
        window = self._window
        # Answers may overtake each other. An answer to a request that was admitted before the last
        # update may be older than it, and is used only if it reports fewer requests.
        if number <= self._last_number_at_update and remaining.requests >= self._left:
            return True
        self._left = remaining.requests
        self._last_number_at_update = window.last_number

        # The registry may not have counted the requests in flight (`occupants`), so they are
        # subtracted.
        self._last_covered = window.last_number - len(window.occupants) + remaining.requests

        if remaining.requests > 0:
            return True
        if remaining.seconds > LONGEST_WAIT:
            return False
        self.paused_until = now + remaining.seconds
        return True


class Meter:
    """The limits that a group of actions at a registry shares: a congestion window, a token bucket,
    a quota, and pauses that the registry asks for.
    """

    def __init__(self, limits: Limits, registry: RegistryLimits) -> None:
        self.window = CongestionWindow(limits.start)
        self.paused_until = -math.inf  # no request is admitted before this time
        self._bucket = TokenBucket(limits.rate, limits.burst)
        self.quota = Quota(self.window)
        self._registry = registry  # its `cap` bounds the window

    @property
    def width(self) -> float:
        return self.window.width

    def next_opening(self, *, is_discovery: bool) -> float:
        """Return the time from which one more request may be admitted. It may have passed.

        Returns inf if only an answer can make room in the window. Call `end_presumed_successes`
        first.
        """
        window = self.window
        opens_at = max(self.paused_until, self._bucket.next_token())
        is_full = window.is_full(self._registry.cap)
        if is_discovery:
            opens_at = max(opens_at, self.quota.paused_until)
            # If no request is in flight, one request is admitted even if the quota covers none,
            # because only its answer can report a new quota.
            is_covered = self.quota.covers(window.last_number + 1) or not window.occupants
            is_full = is_full or not is_covered

        if not is_full:
            return opens_at
        if not window.presumed_success_at:
            return math.inf
        # The first upload that counts as a success without an answer makes room.
        return max(opens_at, min(window.presumed_success_at.values()))

    def end_presumed_successes(self, now: float) -> None:
        """Remove uploads from the window that count as accepted by now, and record each as a
        success.
        """
        presumed = self.window.presumed_success_at
        for number in [number for number, moment in presumed.items() if moment <= now]:
            self.record_success(number)

    def enter(self, now: float) -> int:
        """Take a token and a place in the window. Returns the number of the request."""
        self._bucket.take(now)
        return self.window.enter()

    def take_token(self, now: float) -> None:
        self._bucket.take(now)

    def record_answer(
        self, number: int, status: int, now: float, retry_after: float = 0.0, chance: float = 0.0
    ) -> None:
        """Remove a request from the window, and record its answer.

        `number` is the request's, as returned by `enter`. `retry_after` is the pause in seconds
        that the answer asks for. `chance` spreads the back-off after a 429 over processes.
        """
        pause = retry_after
        if status == 429:
            self.window.leave(number)
            back_off = self.window.record_refusal(number, now, chance)
            pause = max(pause, back_off)
        elif status < 500:
            self.record_success(number)  # any such answer shows that the registry keeps up
        else:
            self.window.leave(number)

        # Requests to a registry that asks for a longer pause fail, so they do not pause either.
        if 0 < pause <= LONGEST_WAIT:
            self.paused_until = max(self.paused_until, now + pause)

    def record_success(self, number: int) -> bool:
        """Remove a request from the window, and record a success. If the request was removed
        before, nothing is recorded, and the result is False.
        """
        if not self.window.leave(number):
            return False
        self.window.record_success(self._registry.cap)
        return True

    def discard(self, number: int) -> bool:
        """Remove a request that was not sent, or not answered, from the window. Returns False if it
        was removed before.
        """
        return self.window.leave(number)


class RegistryLimits:
    """The limits of one registry and their use: permits for all actions together, and a meter for
    each group of actions.
    """

    def __init__(
        self, cap: int, groups: Sequence[Limits] = (), *, per_project: bool = False
    ) -> None:
        self.cap = cap  # permits
        self.in_use = 0  # permits that are taken
        self.bodies = 0  # permits that are taken for bodies
        self.large_bodies = {"read": 0, "write": 0}  # permits for large bodies, by direction

        # By name: the project, if any, and the actions of the meter.
        self.meters: dict[str, Meter] = {}

        # Whether each first segment of a repository's name ("project") has its own meters.
        self._has_meters_per_project = per_project

        # The limits of each action.
        self._limits_of = {action: group for group in groups for action in group.actions.split()}

        # The results of `meter_names`, by project and actions.
        self._name_cache: dict[tuple[str, ...], tuple[str, ...]] = {}

    def meter_names(self, repository: str, *actions: str) -> tuple[str, ...]:
        """Return the names of the meters for a request that performs all of `actions`, without
        repetitions. Creates each meter on first use.
        """
        project = f"{repository.partition('/')[0]}: " if self._has_meters_per_project else ""
        key = (project, *actions)
        if key in self._name_cache:
            return self._name_cache[key]

        names: list[str] = []
        for action in actions:
            limits = self._limits_of[action]
            name = project + limits.actions  # all actions that share the meter
            if name not in self.meters:
                self.meters[name] = Meter(limits, self)
            if name not in names:
                names.append(name)
        self._name_cache[key] = tuple(names)
        return self._name_cache[key]

    def narrow_windows(self) -> None:
        """Narrow all windows to a quarter, because an outage of the registry has ended."""
        for meter in self.meters.values():
            meter.window.width = max(1.0, meter.window.width / 4)

    def has_permits_for(self, need: PermitNeed) -> bool:
        """Report whether the permits that one piece of work needs are free."""
        if self.in_use + need.permits > self.cap:
            return False
        if need.bodies == 0:
            return True

        # A fifth of the permits, and at least two (one of three or fewer), is reserved for requests
        # without a body.
        least_reserved = 2 if self.cap > 3 else 1
        reserved = max(least_reserved, self.cap // 5)
        most_bodies = max(1, self.cap - reserved)
        # A transfer within one registry has two bodies, which may be more than `most_bodies`. It is
        # admitted if no other body is in flight.
        if self.bodies and self.bodies + need.bodies > most_bodies:
            return False
        return all(self.large_bodies[way] < _LARGE_STREAMS for way in need.large_bodies)

    def add_permit_in_use(self, demand: Demand, step: int = 1) -> None:
        """Take the permit of a demand. With a `step` of -1, return the permit."""
        self.in_use += step
        if demand.body is not None:
            self.bodies += step
            if demand.is_large:
                self.large_bodies[demand.body] += step


class Slot(NamedTuple):
    """A place in a window that was taken for a request."""

    demand: Demand
    meter: Meter
    number: int  # of the request in the window


def has_permits(limits: Mapping[str, RegistryLimits], demands: tuple[Demand, ...]) -> bool:
    """Report whether all permits that `demands` take are free."""
    return all(limits[need.host].has_permits_for(need) for need in permit_needs(demands))


def take(limits: Mapping[str, RegistryLimits], demands: Sequence[Demand], now: float) -> list[Slot]:
    """Take the permits of all demands, and what each demand needs of its meters: a place in the
    window of the first meter, and a token from the bucket of each meter. Returns the places.

    All of these must be free: `has_permits` has returned True, and the time that
    `refresh_next_opening` has returned is over.
    """
    slots: list[Slot] = []
    for demand in demands:
        registry = limits[demand.host]
        if not demand.has_permit:
            registry.add_permit_in_use(demand)
        if demand.meters:
            first, *others = [registry.meters[name] for name in demand.meters]
            number = first.enter(now)  # takes the place, and a token
            slots.append(Slot(demand, first, number))
            for meter in others:
                meter.take_token(now)
    return slots


def refresh_next_opening(
    limits: Mapping[str, RegistryLimits], demands: Sequence[Demand], now: float
) -> float:
    """End the presumed successes that are due, and return the time from which the windows and
    buckets have room for all of `demands`.

    Returns inf if only an answer can make room.
    """
    opens_at = -math.inf
    for demand in demands:
        meters = limits[demand.host].meters
        for name in demand.meters:
            meter = meters[name]
            if meter.window.presumed_success_at:
                meter.end_presumed_successes(now)
            opens_at = max(opens_at, meter.next_opening(is_discovery=demand.is_discovery))
    return opens_at


def release(limits: Mapping[str, RegistryLimits], demands: Sequence[Demand]) -> None:
    """Return the permits that `take` took for `demands`. The windows keep their requests."""
    for demand in demands:
        limits[demand.host].add_permit_in_use(demand, step=-1)


class RetryBudget:
    """How often one piece of work may be repeated: up to a number of attempts, not counting those
    that were answered by 429, and for at most THROTTLED_FOR seconds of 429s.
    """

    def __init__(self, attempts: int) -> None:
        self.retries = 0  # so far, for errors and 429s
        self._left = attempts
        self._throttled_since = math.inf  # the time of the first 429

    def take_attempt(self, now: float, chance: float, *, is_throttled: bool) -> float | None:
        """Use up one attempt, and return the pause in seconds before the next one.

        `is_throttled` reports that the attempt was answered by 429, which uses up no attempt.

        Returns None if the work must not be repeated: no attempt is left, or the answers have been
        429 for more than THROTTLED_FOR seconds.
        """
        if is_throttled:
            self._throttled_since = min(self._throttled_since, now)
            if now - self._throttled_since > THROTTLED_FOR:
                return None
        else:
            self._left -= 1
        if self._left < 1:
            return None
        self.retries += 1
        return backoff(self.retries, chance)


def backoff(attempt: int, chance: float) -> float:
    """Return the pause in seconds before retry `attempt`, counted from 1. `chance` is uniform in
    [0, 1).
    """
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(attempt - 1, 9))
    return longest * chance


def parse_quota(header: Callable[[str], str | None], wall_now: float) -> Remaining | None:
    """Read from the headers of an answer how much of a quota is left. Returns None if they report
    no quota.

    `header` returns the value of a header by its name. `wall_now` is in seconds since 1970.
    """
    for remaining_name, limit_name, reset_name in _QUOTA_HEADERS:
        value = header(remaining_name)
        remaining = re.match(_QUOTA, value) if value else None
        if remaining is not None:
            limit = re.match(_QUOTA, header(limit_name) or "")
            reset = re.match(_QUOTA, header(reset_name) or "")
            seconds = _seconds_until_reset(reset, remaining, limit, wall_now)
            return Remaining(int(remaining["count"]), seconds)
    return None


def _seconds_until_reset(
    reset: re.Match[str] | None,
    remaining: re.Match[str],
    limit: re.Match[str] | None,
    wall_now: float,
) -> float:
    """Return the seconds until a quota is renewed, by the first header that reports a time: the
    time of the renewal (`reset`), or the length of the window (in `remaining` or `limit`).

    Returns _USUAL_QUOTA if no header reports a time.
    """
    if reset is not None:
        seconds = float(reset["count"])
        return seconds - wall_now if seconds > _LEAST_MOMENT else seconds
    if remaining["window"]:
        return float(remaining["window"])
    if limit is not None and limit["window"]:
        return float(limit["window"])
    return _USUAL_QUOTA
