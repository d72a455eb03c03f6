"""How many requests a registry may get, how fast, and what happens while it does not answer.

A lane is one window of the specification's table (section 8.1). A request enters its lane: it waits,
first come first served, and holds nothing; then it takes a place in the window, a token of the bucket
and one of the registry's permits in one synchronous look. The place is free again when the head of the
answer is there, the permit when its body is. A large blob that streams from one registry to another
takes all that it needs at both in one such look (`Gate.enter`).

While a registry is away its lanes admit one request at a time, with growing pauses: whichever comes
first is the probe. A registry that has never answered is treated the same, so the first request goes
alone (docs/design.md section 6, rule 1). A host that is no registry (a token service, a storage host)
has no lanes: whoever finds it away waits for it, and one goes after each pause.

May not know: sockets, what a request contains.
Invariants: I8 (whoever waits here holds nothing), I9 (who is cancelled leaves nothing behind).
Follows: docs/specification.md section 8.1, docs/design.md section 9.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import anyio

from _regsync.errors import (
    ConnectFailed,
    LoginExpired,
    ProtocolBroken,
    RegistryError,
    SyncError,
    TimedOut,
    WireError,
)
from _regsync.net.wire import Timeouts
from _regsync.providers import Limits
from _regsync.text import duration_text

# The default of `max_concurrent` (docs/specification.md section 2.2).
DEFAULT_CONCURRENCY = 50

# Bodies of at least this many bytes are large. Some streams fill a link; more of them only make
# every image finish late.
LARGE_BODY = 1024 * 1024
_MOST_STREAMS = 16  # at one registry, in one direction

# 5 attempts, exponential from 0.5 s, full jitter, at most 30 s.
_ATTEMPTS = 5
_FIRST_PAUSE = 0.5  # seconds
_LONGEST_PAUSE = 30.0

# Seconds of 429s alone after which a request fails, and all requests of a lane.
THROTTLED_FOR = 600.0

# The longest pause in seconds that a run observes if a registry asks for one. Requests that would
# have to pause longer fail.
LONGEST_WAIT = 300.0

# The part of a token by which a bucket is treated as fuller than it is, to absorb rounding errors.
_ROUNDING = 1e-4

# After so many failures in a row, with no answer between them, a host is away.
_FAILURES_IN_A_ROW = 3

# The longest pause between two probes, in seconds.
_LONGEST_PROBE_PAUSE = 10.0

# Matches a header that reports a quota: requests left, size of the quota, time of its renewal. A count
# may name the seconds of its window: `100;w=21600`. A time above _LEAST_MOMENT is one since 1970.
_QUOTA = "(?P<count>[0-9]{1,12})(?:;.*w=(?P<window>[0-9]{1,9}))?"
_LEAST_MOMENT = 1e9
_USUAL_QUOTA = 60.0  # seconds

# Statuses of a proxy in front of a registry that cannot reach the registry.
_GATEWAY_STATUSES = (502, 503, 504)


def backoff(attempt: int, chance: float) -> float:
    """Return the seconds to wait before an attempt is repeated. The first attempt is 1."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(attempt - 1, 9))
    return longest * chance


def is_gateway_failure(status: int, retry_after: object) -> bool:
    """Report whether a status means that a proxy could not reach the host. `retry_after` is the
    Retry-After of the answer, or None.
    """
    return status in _GATEWAY_STATUSES and retry_after is None


def is_outage(error: SyncError) -> bool:
    """Report whether a failure may mean that a host is away, rather than that it refuses the request.

    This is the case if no answer arrived, or if a proxy could not reach the registry and named no
    time to retry.
    """
    if isinstance(error, RegistryError):
        return is_gateway_failure(error.status, error.retry_after)
    return isinstance(error, WireError) and not isinstance(error, ProtocolBroken)


class HostLimits:
    """One host: whether it answers, when it is asked again while it does not, and, of a registry, its
    lanes and its cap.
    """

    def __init__(
        self,
        name: str,
        gate: Gate,
        *,
        chance: Callable[[], float],
        log: Callable[..., None],
        timeouts: Timeouts,
        on_away: Callable[[], None] = lambda: None,
        cap: int = 0,
        groups: tuple[Limits, ...] = (),
    ) -> None:
        """`log` tells of the beginning and the end of an outage, `on_away` is called when it begins.
        `groups` describes the lanes.
        """
        self.name = name  # HOST:PORT
        self.host = self  # as a need of those who wait for it
        self.chance = chance
        self._gate = gate
        self._log = log
        self._timeouts = timeouts
        self._on_away = on_away

        self.has_lanes = bool(groups)
        self.is_away = self.has_lanes  # a registry until its first answer
        self.is_probed = False
        self.has_answered = False
        self.error: SyncError | None = None  # the last failure, since the last answer
        self.since = math.inf  # the first failure since the last answer
        self.probe_at = -math.inf
        self.stop_error: SyncError | None = None  # with which all further requests fail
        self._back_at = -math.inf  # requests that were sent before may still fail
        self._failures = 0  # since the last answer
        self._pauses = 0
        self._was_given_up = False  # since its last answer
        self._waited = ""  # for how long before that, as errors say it
        self._limited = set[anyio.CancelScope]()  # of requests that end when it is given up

        self.cap = cap
        self.used = 0  # permits
        self.reading = Streams(self)
        self.writing = Streams(self)
        self._groups = groups
        # By area (the first segment of a repository, where each has its own windows) and action.
        self._lanes = dict[tuple[str, str], Lane]()

    # Its lanes.

    @property
    def most_streams(self) -> int:
        """Fewer streams than permits, so that a stream waits for short requests only."""
        return max(1, min(_MOST_STREAMS, (self.cap - 1) // 2))

    def lane(self, action: str, area: str = "") -> Lane:
        lane = self._lanes.get((area, action))
        if lane is None:
            for group in self._groups:
                new = Lane(self, group)
                self._lanes.update({(area, each): new for each in group.actions.split()})
            lane = self._lanes[area, action]
        return lane

    def wake(self) -> None:
        """Let those who wait look again."""
        self._gate.wake(self)

    def raise_if_stopped(self) -> None:
        """Raise the error of a host that was stopped, or that has been waited for long enough."""
        error = self.error if self.is_away and self.stop_error is None else None
        if error is not None and anyio.current_time() >= self.gives_up_at:
            failure = error.copy_without_context()
            self._give_up(failure)
            raise failure
        if self.stop_error is not None:
            raise self.stop_error.copy_without_context()

    def stop(self, error: SyncError) -> None:
        """Let all further requests of this run fail with an error."""
        self.stop_error = error.copy_without_context()
        self.wake()

    def begin_run(self) -> None:
        """Prepare for another run. It waits for a host as long as any, whatever failed at the end of
        the last one. A host that was stopped is tried once.
        """
        self._was_given_up = self.stop_error is not None
        self._waited = ""
        self.stop_error = None
        self._forget_failures()

    def _forget_failures(self) -> None:
        """Look at the host anew. If it was given up, the next request decides whether it is stopped."""
        self.is_away = self.has_lanes and (self._was_given_up or not self.has_answered)
        self.error = None
        self.since = math.inf
        self._failures = self._pauses = 0

    # Whether it answers.

    @property
    def is_out(self) -> bool:
        """Whether the host is away, and not only asked for the first time."""
        return self.is_away and self.error is not None

    @property
    def gives_up_at(self) -> float:
        timeouts = self._timeouts
        return self.since + (timeouts.outage if self.has_answered else timeouts.first_answer)

    def limiting(self) -> AbstractContextManager[None]:
        """Return a context that ends a request to a host that is away when the host is given up."""
        return self._limiting() if self.is_out else nullcontext()

    @contextmanager
    def _limiting(self) -> Iterator[None]:
        with anyio.CancelScope(deadline=self.gives_up_at) as scope:
            self._limited.add(scope)
            try:
                yield
            finally:
                self._limited.discard(scope)
        if scope.cancelled_caught:
            self.raise_if_stopped()
            raise TimedOut(f"{self.name} did not answer in time")

    def record_answer(self, now: float) -> None:
        """Record an answer, which ends an outage."""
        was_away = self.is_away
        if self.is_out:
            self._back_at = now
            away = duration_text(now - self.since)
            self._log("info", "back", f"{self.name} answers again, after {away}", host=self.name)
            for scope in self._limited:  # a body may be on its way for longer
                scope.deadline = math.inf
            for lane in {*self._lanes.values()}:  # it may not stand all at once
                lane.width = max(1.0, lane.width / 4)
        self.is_away = self.is_probed = False
        self.has_answered = True
        self.error = None
        self.since = math.inf
        self._failures = self._pauses = 0
        self._was_given_up = False
        self._waited = ""
        if was_away:
            self.wake()

    def record_failure(
        self, error: SyncError, began: float, now: float, *, is_probe: bool = False
    ) -> None:
        """Record that a request which was sent at `began` got no answer. If the host is away, the
        error belongs to it (`error.away`); if the host has been waited for long enough, it is
        stopped, and the error is final.
        """
        if began < self._back_at:
            error.away = self  # of an outage that is over: the request may go at once
            return
        if self.stop_error is not None:
            return
        if self.error is None:
            # The wait for a host begins with its first failed attempt to connect, which takes time.
            self.since = began if isinstance(error, ConnectFailed) else now
        self.error = error.copy_without_context()
        self._failures += 1
        has_often_failed = self._failures >= _FAILURES_IN_A_ROW
        is_permanent = _is_permanent(error, has_answered=self.has_answered)
        if self._was_given_up or (is_permanent and has_often_failed):
            self._give_up(error)
            return
        if is_permanent:
            return
        if self._pauses == 0 and (has_often_failed or not self.has_answered):
            self._begin_outage(now)
        elif is_probe:
            self._pause(now)
        if self.is_out:
            error.away = self
            if now >= self.gives_up_at:
                self._give_up(error)

    def _begin_outage(self, now: float) -> None:
        self.is_away = True
        self._pause(now)
        patience = duration_text(self.gives_up_at - self.since)
        text = f"{self.describe_wait()}, for {patience} at most"
        self._log("warning", "outage", text, host=self.name)
        self._on_away()

    def _pause(self, now: float) -> None:
        """Set the time of the next probe. Each pause is twice as long as the one before."""
        seconds = min(_LONGEST_PROBE_PAUSE, _FIRST_PAUSE * 2.0 ** min(self._pauses, 9))
        self.probe_at = min(now + seconds * (0.75 + self.chance() / 2), self.gives_up_at)
        self._pauses += 1
        self.wake()

    def _give_up(self, error: SyncError) -> None:
        if self._pauses:  # it was waited for
            self._waited = f" (waited for {duration_text(self.gives_up_at - self.since)})"
        error.message += self._waited
        error.retryable = False
        error.away = self
        is_first = self.has_answered and not self._was_given_up
        if is_first and isinstance(error, RegistryError):
            # A proxy has answered: perhaps it cannot give what this one request asks for.
            self._was_given_up = True
            self._forget_failures()
            self.wake()
        else:
            self.stop(error)

    def describe_wait(self) -> str:
        """Name the host that is waited for, and the reason."""
        assert self.error is not None
        return f"waiting for {self.name} ({self.error.message})"

    async def wait(self) -> None:
        """Wait until this task may ask the host again: one task for each pause. Raises the error of
        a host that was stopped.
        """
        await self._gate.enter(self)

    def opens_at(self) -> float:
        return self.probe_at if self.is_away else -math.inf

    def take(self, now: float) -> None:
        if self.is_away:
            self._pause(now)  # the others wait longer


def _is_permanent(error: SyncError, *, has_answered: bool) -> bool:
    """Report whether waiting cannot resolve a failure: the certificate is not trusted, or the name
    does not exist.

    The name of a host that has answered before exists; only its name server may be unreachable.
    """
    if not isinstance(error, ConnectFailed):
        return False
    return not error.retryable or (error.is_unknown_name and not has_answered)


class Bucket:
    """A bucket that gains `rate` tokens per second and holds at most `burst`. A rate of 0 means no
    limit.
    """

    def __init__(self, rate: int, burst: int) -> None:
        self._gap = 1 / rate if rate else 0.0  # seconds between two tokens
        # Seconds in which an empty bucket gains all tokens but one.
        self._depth = self._gap * (burst - 1 - _ROUNDING)
        self._full_at = -math.inf  # if no token is taken until then

    def next_token(self) -> float:
        """Return the time from which the bucket holds a token."""
        return self._full_at - self._depth

    def take(self, now: float) -> None:
        self._full_at = max(now, self._full_at) + self._gap


class Lane:
    """The window, bucket and pauses of one group of actions at a registry."""

    def __init__(self, host: HostLimits, limits: Limits) -> None:
        self.host = host
        self.bucket = Bucket(limits.rate, limits.burst)
        self.width = float(limits.start)
        self.used = 0  # requests without an answer
        self.admitted = 0  # requests so far
        self.paused_until = -math.inf
        self.refused_since = math.inf  # the first 429 since the last success
        # The error of requests that would have to wait longer than a run waits, and until when.
        self._stop_error: SyncError | None = None
        self._stopped_until = -math.inf
        # The last request that was admitted before the width was halved, and how often it was since
        # the last success.
        self._halved_at = 0
        self._halvings = 0

    def opens_at(self) -> float:
        """Return the time from which one more request fits; inf if only an answer can make room.
        Raises the error of a lane that was stopped.
        """
        if self._stop_error is not None and anyio.current_time() < self._stopped_until:
            raise self._stop_error.copy_without_context()
        host = self.host
        if self.used + 1 > self.width or host.used >= host.cap:
            return math.inf
        opens_at = max(self.paused_until, self.bucket.next_token())
        if host.is_away:
            opens_at = math.inf if host.is_probed else max(opens_at, host.probe_at)
        return opens_at

    def stop(self, error: SyncError, until: float) -> None:
        """Let requests of these actions fail with an error until a time."""
        error.away = self.host
        self._stop_error = error.copy_without_context()
        self._stopped_until = until
        self.host.wake()

    def take(self, now: float) -> Turn:
        self.used += 1
        self.host.used += 1
        self.admitted += 1
        self.bucket.take(now)
        self.host.is_probed = self.host.is_away
        return Turn(self, now)

    def record(self, number: int, status: int, now: float, retry_after: float) -> None:
        """Record the answer to the request with this number, which asks for a pause in seconds."""
        self.used -= 1
        pause = min(retry_after, LONGEST_WAIT)
        if status == 429:
            self.refused_since = min(self.refused_since, now)
            pause = max(pause, self._halve(number))
        elif status < 500:
            self.width = min(self.width + 1 / self.width, float(self.host.cap))
            self.refused_since = math.inf
            self._halvings = 0
        self.paused_until = max(self.paused_until, now + pause)
        self.host.wake()

    def _halve(self, number: int) -> float:
        """Halve the window, once in a congestion epoch. Returns for how many seconds it pauses.

        An epoch lasts until a request is answered that was admitted after the halving.
        """
        if number <= self._halved_at:
            return 0.0  # the halving was for this refusal too, and has paused the window
        self.width = max(1.0, self.width / 2)
        self._halved_at = self.admitted
        self._halvings += 1
        return backoff(self._halvings, self.host.chance())


class Streams:
    """How many large blobs move at a registry in one direction."""

    def __init__(self, host: HostLimits) -> None:
        self.host = host
        self.used = 0

    def opens_at(self) -> float:
        return math.inf if self.used >= self.host.most_streams else -math.inf

    def take(self, now: float) -> Streams:
        self.used += 1
        return self

    def leave(self) -> None:
        """Give back the place of one blob."""
        self.used -= 1
        self.host.wake()


class Trial(Streams):
    """Requests that show a password which may be wrong: one at a time, until one is let in."""

    def __init__(self, host: HostLimits, is_over: Callable[[], bool]) -> None:
        super().__init__(host)
        self._is_over = is_over

    def opens_at(self) -> float:
        return math.inf if self.used and not self._is_over() else -math.inf


Need = HostLimits | Lane | Streams


class Turn:
    """The admission of one request. Its methods may be called in any order, and twice."""

    def __init__(self, lane: Lane, now: float) -> None:
        self.lane = lane
        self.number = lane.admitted
        self.began = now
        self.is_probe = lane.host.is_away
        self.places: list[Streams] = []  # what is given back with the permit
        self._is_in_window = self._has_permit = True

    def record_answer(self, status: int, now: float, retry_after: float = 0.0) -> None:
        """Record the head of an answer: the place in the window is free."""
        if self._is_in_window:
            self._is_in_window = False
            self.lane.record(self.number, status, now, retry_after)

    def record_taken(self, host: HostLimits) -> None:
        """Free the place in the window, because a host takes the body. That ends its outage."""
        now = anyio.current_time()
        self.record_answer(202, now)
        host.record_answer(now)

    def end_probe(self) -> None:
        """Let another request find out whether the registry answers: this one does not, or no more."""
        if self.is_probe:
            self.is_probe = self.lane.host.is_probed = False
            self.lane.host.wake()

    def leave(self) -> None:
        """Give back the permit, and the place in the window."""
        if not self._has_permit:
            return
        self._has_permit = False
        for place in self.places:
            place.leave()
        self.lane.used -= self._is_in_window
        self._is_in_window = False
        host = self.lane.host
        host.used -= 1
        self.end_probe()
        host.wake()


def turn_of(given: Iterable[Turn | Streams]) -> Turn | None:
    """Return the turn among what was given, if there is one."""
    return next((each for each in given if isinstance(each, Turn)), None)


class _Waiter:
    """Who waits for the same needs as others."""

    def __init__(self, number: int) -> None:
        self.number = number  # in the order of arrival
        self.look = anyio.Event()


class Gate:
    """The queues in front of all registries, one for each combination of needs."""

    def __init__(self) -> None:
        self._queues = dict[tuple[Need, ...], deque[_Waiter]]()
        self._arrivals = 0

    async def enter(self, *needs: Need) -> list[Any]:
        """Wait until all needs can be met at once, and take them. Returns what each has given, such
        as a Turn.

        Raises the error of a registry, or of a lane, that was stopped.
        """
        now = anyio.current_time()
        if needs not in self._queues and self._opens_at(needs) <= now:
            return [need.take(now) for need in needs]
        queue = self._queues.setdefault(needs, deque())
        me = _Waiter(self._arrivals)
        self._arrivals += 1
        queue.append(me)
        try:
            while True:
                opens_at = self._opens_at(needs) if queue[0] is me else math.inf
                if opens_at <= now:
                    return [need.take(now) for need in needs]
                with anyio.CancelScope(deadline=opens_at) if opens_at < math.inf else nullcontext():
                    await me.look.wait()
                me.look = anyio.Event()
                now = anyio.current_time()
        finally:
            queue.remove(me)
            if queue:
                queue[0].look.set()
            else:
                del self._queues[needs]

    @asynccontextmanager
    async def admitted(self, *needs: Need) -> AsyncIterator[list[Any]]:
        """Enter, and leave all in the end. Yields what each need has given."""
        given = await self.enter(*needs)
        try:
            yield given
        finally:
            for each in given:
                each.leave()

    @staticmethod
    def _opens_at(needs: tuple[Need, ...]) -> float:
        for need in needs:
            need.host.raise_if_stopped()
        # Each lane takes a permit, and both ends of a body may be at one registry.
        hosts = [need.host for need in needs if isinstance(need, Lane)]
        if any(host.used + hosts.count(host) > host.cap for host in hosts):
            return math.inf
        return max((need.opens_at() for need in needs), default=-math.inf)

    def wake(self, host: HostLimits) -> None:
        """Let those look again who are first in a queue that leads to a registry, the oldest first."""
        if not self._queues:
            return
        first = [
            queue[0]
            for needs, queue in self._queues.items()
            if host in [need.host for need in needs]
        ]
        for waiter in sorted(first, key=lambda waiter: waiter.number):
            waiter.look.set()


class Retry:
    """The attempts at one piece of work."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self.retries = 0
        self._chance = chance
        self._left = _ATTEMPTS
        self._throttled_since = math.inf

    async def pause(self, error: SyncError, *hosts: HostLimits, longest: float = math.inf) -> None:
        """Wait before the next attempt. Raises `error` if there is none, or if the pause would be
        longer than `longest` seconds. `hosts` are those that the work needs.
        """
        error.retries = self.retries
        if not error.retryable or any(host.stop_error for host in hosts):
            raise error
        if isinstance(error, LoginExpired):
            return  # the upload limits how often its login is renewed
        if error.away is not None:
            if error.enters_no_lane:
                await error.away.wait()
            return
        seconds = self._take_attempt(error)
        if seconds > longest:
            raise error
        self.retries += 1
        await anyio.sleep(seconds)

    def _take_attempt(self, error: SyncError) -> float:
        """Count an attempt, and return the seconds to wait before the next one. Raises `error` if
        none is left.
        """
        wait = (error.retry_after or 0.0) if isinstance(error, RegistryError) else 0.0
        if isinstance(error, RegistryError) and error.status == 429:
            now = anyio.current_time()
            self._throttled_since = min(self._throttled_since, now)
            if now - self._throttled_since > THROTTLED_FOR:
                raise error
            # Where there is a lane, its pauses grow.
            attempt = self.retries + 1 if error.enters_no_lane else 1
            return max(wait, backoff(attempt, self._chance()))
        self._left -= 1
        if self._left < 1:
            raise error
        return max(wait, backoff(_ATTEMPTS - self._left, self._chance()))


def quota_wait(header: Callable[[str], str | None], wall_now: float) -> float | None:
    """Return the seconds until a quota is renewed that the headers of a refusal call used up, or
    None. Without a time of renewal it is renewed at the latest when its window has passed.
    """
    for quota in ("ratelimit", "x-ratelimit"):
        remaining, limit, reset = (
            re.match(_QUOTA, header(f"{quota}-{name}") or "")
            for name in ("remaining", "limit", "reset")
        )
        if remaining is None or int(remaining["count"]) > 0:
            continue
        if reset is not None:
            seconds = float(reset["count"])
            return seconds - wall_now if seconds > _LEAST_MOMENT else seconds
        windows = (each["window"] for each in (remaining, limit) if each is not None)
        return float(next(filter(None, windows), _USUAL_QUOTA))
    return None
