"""Whether a host can be reached, and how often it is asked while it cannot.

Owns: when an outage begins, when it is probed, when it has ended, when it is given up.
May not know: clocks, sockets, tasks; `now` and chance are arguments. What a probe is.
Invariants: one probe at a time (I8). A host that answers is never waited for.
Follows: docs/design.md section 9 ("Outages").
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from _regsync.errors import ConnectFailed, ProtocolBroken, RegistryError, SyncError, WireError

# Statuses by which a proxy in front of a registry says that nobody is behind it.
_GATEWAY_STATUSES = (502, 503, 504)

# So many failures without an answer between them are an outage, whichever tasks saw them.
_FAILURES_IN_A_ROW = 3

# The longest pause between two probes is so many times the first.
_LONGEST_PAUSE = 20


class Reach(enum.Enum):
    """Whether a host can be reached.

    from           to        when
    UP             UP        an answer; the first or second failure in a row
    UP             DOWN      the third failure in a row; the first, if it has never answered
    UP             STOPPED   the third failure in a row that no waiting mends; the first failure of
                             a host that had been stopped and is tried once more
    DOWN           PROBED    the time for a probe has come, and somebody has a request for it
    PROBED         DOWN      the probe has failed, or was never sent
    DOWN, PROBED   UP        an answer, to the probe or to a request that was under way
    DOWN, PROBED   STOPPED   the patience is at its end; the third failure that no waiting mends
    all            UP        another run begins

    Failures and answers of what was under way when it stopped change nothing.
    """

    UP = "up"
    DOWN = "down"
    PROBED = "probed"
    STOPPED = "stopped"


class Patience(NamedTuple):
    """How long a host is waited for, in seconds."""

    after_answer: float  # from its first failure on, when it has answered before
    without_answer: float  # when it never has: a service may still be starting
    first_pause: float  # before the first probe; each later one is twice as long


class Outage:
    """What is known of one host: whether it is away, since when, and what comes next."""

    def __init__(self, patience: Patience) -> None:
        self.reach = Reach.UP
        self.has_answered = False

        # The failure that was seen last, and when the first of those in a row was.
        self.error: SyncError | None = None
        self.since = math.inf

        # When the last outage ended: what was sent before may still fail for it.
        self.back_at = -math.inf

        # While it is away: when it may be probed next, and when it is given up.
        self.probe_at = math.inf
        self.gives_up_at = math.inf

        self._patience = patience
        self._failures = 0  # in a row
        self._lasting_failures = 0  # in a row, that no waiting mends
        self._probes = 0
        self._is_last_try = False

    @property
    def is_on(self) -> bool:
        """Whether the host is away and waited for."""
        return self.reach is Reach.DOWN or self.reach is Reach.PROBED

    @property
    def is_stopped(self) -> bool:
        """Whether the host was given up for this run."""
        return self.reach is Reach.STOPPED

    def record_answer(self, now: float) -> bool:
        """Take in an answer; say whether it has ended an outage."""
        if self.reach is Reach.STOPPED:
            return False
        was_on = self.reach is not Reach.UP
        if was_on:
            self.back_at = now
        self.reach = Reach.UP
        self.has_answered = True
        self._failures = 0
        self._lasting_failures = 0
        self._is_last_try = False
        self.gives_up_at = math.inf
        return was_on

    def record_failure(
        self, error: SyncError, began: float, now: float, chance: float, *, is_probe: bool = False
    ) -> None:
        """Take in a request that failed as `is_outage` says; it was sent at `began`."""
        if self.is_stopped:
            return
        self.error = error.without_place()
        if self._failures == 0:
            # Where no connection came about, the time spent on it was waiting already.
            self.since = began if isinstance(error, ConnectFailed) else now
        self._failures += 1
        is_lasting = _is_lasting(error, has_answered=self.has_answered)
        self._lasting_failures = self._lasting_failures + 1 if is_lasting else 0

        is_at_end = is_probe and now >= self.gives_up_at
        needed = _FAILURES_IN_A_ROW if self.has_answered else 1
        if is_at_end or self._is_last_try or self._lasting_failures == _FAILURES_IN_A_ROW:
            self.reach = Reach.STOPPED
        elif is_probe:
            self._wait_for_next_probe(now, chance)
        elif self.reach is Reach.UP and not is_lasting and self._failures >= needed:
            self._begin(now, chance)

    def begin_probe(self, now: float) -> bool:
        """Take the next probe; False when it is not yet time, or one is under way."""
        if self.reach is not Reach.DOWN or now < self.probe_at:
            return False
        self.reach = Reach.PROBED
        return True

    def cancel_probe(self) -> None:
        """Give back a probe that was not sent: another one may take its place at once."""
        if self.reach is Reach.PROBED:
            self.reach = Reach.DOWN

    def stop_if_due(self, now: float) -> bool:
        """Stop the host when the patience is at its end; say whether that is so."""
        if self.is_on and now >= self.gives_up_at:
            self.reach = Reach.STOPPED
        return self.is_stopped

    def begin_run(self) -> None:
        """Let another run begin. A host that was stopped is tried once."""
        self._is_last_try = self.is_stopped
        self.reach = Reach.UP
        self._failures = 0
        self._lasting_failures = 0
        self.gives_up_at = math.inf

    def _begin(self, now: float, chance: float) -> None:
        patience = self._patience
        longest = patience.after_answer if self.has_answered else patience.without_answer
        self.gives_up_at = self.since + longest
        self._probes = 0
        self._wait_for_next_probe(now, chance)

    def _wait_for_next_probe(self, now: float, chance: float) -> None:
        """Double the pause, up to the longest, with a quarter of it as jitter."""
        factor = min(2.0 ** min(self._probes, 30), _LONGEST_PAUSE)
        self.probe_at = now + self._patience.first_pause * factor * (0.75 + chance / 2)
        self._probes += 1
        self.reach = Reach.DOWN


def is_outage(error: SyncError) -> bool:
    """Ask whether a failure may mean that a host is away, and not that it refuses this request.

    That is so where nothing answered, or where a proxy said that nobody is behind it and not when
    to come back.
    """
    if isinstance(error, RegistryError):
        return is_gateway_failure(error.status, error.retry_after)
    return isinstance(error, WireError) and not isinstance(error, ProtocolBroken)


def is_gateway_failure(status: int, retry_after: object) -> bool:
    """Ask the same of the status of an answer and its Retry-After, None where it has none."""
    return status in _GATEWAY_STATUSES and retry_after is None


def _is_lasting(error: SyncError, *, has_answered: bool) -> bool:
    """Ask whether no waiting mends a failure: nobody is trusted there, or nobody has that name.

    A name that has answered may only be away from its name server.
    """
    if not isinstance(error, ConnectFailed):
        return False
    return not error.retryable or (error.is_unknown_name and not has_answered)
