"""Detect that a host is unreachable, and decide when to probe it and when to stop waiting for it.

Owns: when an outage begins, when its next probe is due, when it ends, when the host is stopped.
May not know: clocks, sockets, tasks, the request that serves as a probe. `now` (seconds of the
event loop's clock) and `chance` (a random number from 0 to 1) are arguments.
Invariants: there is one probe at a time (I8). A host that answers is never waited for.
Follows: docs/design.md section 9 ("Outages").
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from _regsync.errors import ConnectFailed, ProtocolBroken, RegistryError, SyncError, WireError

# Statuses of a proxy in front of a registry that cannot reach the registry.
_GATEWAY_STATUSES = (502, 503, 504)

# An outage begins after this many failures in a row, of any tasks, with no answer between them.
_FAILURES_IN_A_ROW = 3

# The longest pause between two probes, as a multiple of the first pause.
_LONGEST_PAUSE = 20


class Reach(enum.Enum):
    """The state of a host.

    from           to        when
    UP             UP        an answer; the first or second failure in a row
    UP             DOWN      the third failure in a row; the first, if it has never answered
    UP             STOPPED   the third permanent failure in a row; the first failure of a host that
                             was stopped in the previous run
    DOWN           PROBED    a probe is due, and a task sends it
    PROBED         DOWN      the probe has failed, or was not sent
    DOWN, PROBED   UP        an answer, to the probe or to a request that was already in flight
    DOWN, PROBED   STOPPED   the time to wait is over; the third permanent failure in a row
    all            UP        another run begins

    After the host was stopped, failures and answers of requests in flight change nothing.
    """

    UP = "up"
    DOWN = "down"  # an outage, and no probe in flight
    PROBED = "probed"  # an outage, and one probe in flight or about to be sent
    STOPPED = "stopped"  # all requests of this run fail


class Patience(NamedTuple):
    """How long to wait for an unreachable host, in seconds."""

    after_answer: float  # from the first failure, if the host has answered before
    without_answer: float  # if it never has: the service may still be starting
    first_pause: float  # before the first probe; each later pause is twice as long


class Outage:
    """The reachability of one host."""

    def __init__(self, patience: Patience) -> None:
        self.reach = Reach.UP
        self.has_answered = False

        # The last failure, and the time of the first failure in the current row of failures.
        self.error: SyncError | None = None
        self.since = math.inf

        # When the last outage ended. Requests that were sent before may still fail because of it.
        self.back_at = -math.inf

        # During an outage: when the next probe is due, and when the host is stopped.
        self.probe_at = math.inf
        self.gives_up_at = math.inf

        self._patience = patience
        self._failures = 0  # in a row
        self._permanent_failures = 0  # in a row
        self._probes = 0  # probes scheduled in this outage
        self._was_stopped = False  # in the previous run; the first failure stops it again

    @property
    def is_on(self) -> bool:
        """Report whether the host is unreachable and waited for."""
        return self.reach is Reach.DOWN or self.reach is Reach.PROBED

    @property
    def is_stopped(self) -> bool:
        """Report whether the host was given up for this run."""
        return self.reach is Reach.STOPPED

    def record_answer(self, now: float) -> bool:
        """Record an answer. Returns True if it has ended an outage."""
        if self.reach is Reach.STOPPED:
            return False
        was_on = self.reach is not Reach.UP
        if was_on:
            self.back_at = now
        self.reach = Reach.UP
        self.has_answered = True
        self._failures = 0
        self._permanent_failures = 0
        self._was_stopped = False
        self.gives_up_at = math.inf
        return was_on

    def record_failure(
        self, error: SyncError, began: float, now: float, chance: float, *, is_probe: bool = False
    ) -> None:
        """Record the failure of a request that was sent at `began`, and change the state as `Reach`
        describes.

        `error` must be an error of a host that may be away (the function `is_outage`). A permanent
        failure, such as an unknown name, does not begin an outage, because to wait is in vain.
        `chance` is a random number that spreads probes.
        """
        if self.is_stopped:
            return
        self.error = error.copy_without_context()
        if self._failures == 0:
            # The wait for a host begins with its first failed attempt to connect, which takes time.
            self.since = began if isinstance(error, ConnectFailed) else now
        self._failures += 1
        is_permanent = _is_permanent(error, has_answered=self.has_answered)
        self._permanent_failures = self._permanent_failures + 1 if is_permanent else 0

        if self._was_stopped or self._permanent_failures >= _FAILURES_IN_A_ROW:
            self.reach = Reach.STOPPED
        elif is_probe and self.reach is Reach.PROBED:  # not if another answer has ended the outage
            self._schedule_probe(now, chance)
            self.stop_if_due(now)
        elif self.reach is Reach.UP and not is_permanent:
            failures_needed = _FAILURES_IN_A_ROW if self.has_answered else 1
            if self._failures >= failures_needed:
                self._begin_outage(now, chance)

    def begin_probe(self, now: float) -> bool:
        """Begin a probe. Returns False if no probe is due, or another probe has begun."""
        if self.reach is not Reach.DOWN or now < self.probe_at:
            return False
        self.reach = Reach.PROBED
        return True

    def cancel_probe(self) -> None:
        """Cancel a probe that was not sent. The next probe may begin at once."""
        if self.reach is Reach.PROBED:
            self.reach = Reach.DOWN

    def stop_if_due(self, now: float) -> bool:
        """Stop the host if the time to wait for it is over. Returns whether the host is stopped."""
        if self.is_on and now >= self.gives_up_at:
            self.reach = Reach.STOPPED
        return self.is_stopped

    def begin_run(self) -> None:
        """Prepare for another run. A host that was stopped is tried once."""
        self._was_stopped = self.is_stopped
        self.reach = Reach.UP
        self._failures = 0
        self._permanent_failures = 0
        self.gives_up_at = math.inf

    def _begin_outage(self, now: float, chance: float) -> None:
        patience = self._patience
        seconds = patience.after_answer if self.has_answered else patience.without_answer
        self.gives_up_at = self.since + seconds
        self._probes = 0
        self._schedule_probe(now, chance)

    def _schedule_probe(self, now: float, chance: float) -> None:
        """Set the time of the next probe, and the state DOWN. Each pause is twice as long as the
        previous one, up to the longest, and jitter changes it by up to a quarter.
        """
        # The exponent is limited, because a float overflows at 2 ** 1024.
        factor = min(2.0 ** min(self._probes, 30), _LONGEST_PAUSE)
        self.probe_at = now + self._patience.first_pause * factor * (0.75 + chance / 2)
        self._probes += 1
        self.reach = Reach.DOWN


def is_outage(error: SyncError) -> bool:
    """Report whether a failure may mean that a host is unreachable, rather than that it refuses the
    request.

    This is the case if no answer arrived, or if a proxy could not reach the registry and named no
    time to retry.
    """
    if isinstance(error, RegistryError):
        return is_gateway_failure(error.status, error.retry_after)
    return isinstance(error, WireError) and not isinstance(error, ProtocolBroken)


def is_gateway_failure(status: int, retry_after: object) -> bool:
    """Report whether a status means that a proxy could not reach the host. `retry_after` is the
    Retry-After of the answer, or None.
    """
    return status in _GATEWAY_STATUSES and retry_after is None


def _is_permanent(error: SyncError, *, has_answered: bool) -> bool:
    """Report whether waiting cannot resolve a failure: the certificate is not trusted, or the name
    does not exist.

    The name of a host that has answered before exists; only its name server may be unreachable.
    """
    if not isinstance(error, ConnectFailed):
        return False
    return not error.retryable or (error.is_unknown_name and not has_answered)
