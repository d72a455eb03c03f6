"""When a request may go: permits per registry, the pause before a repetition, what a peer asks us to wait.

Owns: the arithmetic of waiting. May not know: clocks, sockets, tasks; `now` and chance are arguments. Invariant I8: a
request is admitted by one synchronous decision that takes everything it needs or nothing. Follows design.md section 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["DEFAULT_CONCURRENCY", "LARGE_BODY", "Limit", "Patience", "Want", "admit", "hopeless", "parse_retry_after",
    "release"]

DEFAULT_CONCURRENCY = 50  # specification section 2.2: `max_concurrent` when unset
# Bodies from here on count as streams (design.md section 9): few fill a link, more only make every image end late.
LARGE_BODY, _LARGE_STREAMS = 1024 * 1024, 8
# design.md section 9: 5 attempts, exponential from 0.5 s, full jitter, cap 30 s.
ATTEMPTS, _FIRST_PAUSE, _LONGEST_PAUSE = 5, 0.5, 30.0
# A request gives up after so long of 429s; a longer Retry-After than the second is not waited for.
THROTTLED_FOR, LONGEST_RETRY_AFTER = 600.0, 300.0

class Want(NamedTuple):
    """What one request or one half of a blob transfer needs of one registry: a permit of this sort."""
    host: str
    body: str | None = None  # "read", "write", or None for a short request
    large: bool = False

class Limit:
    """The permits of one registry and who uses them."""
    def __init__(self, cap: int) -> None:
        self.cap, self.in_use, self.bodies = cap, 0, 0
        self.large = {"read": 0, "write": 0}

    def fits(self, wants: Sequence[Want]) -> bool:
        """Say whether all of `wants`, of this registry, can be taken now."""
        bodies = [want for want in wants if want.body is not None]
        # A fifth, at least two, stays for discovery; but a transfer inside one registry (two permits) fits when idle.
        most = max(1, self.cap - max(2, self.cap // 5))
        if self.in_use + len(wants) > self.cap or (bodies and self.bodies and self.bodies + len(bodies) > most):
            return False
        return all(self.large[want.body or ""] < _LARGE_STREAMS for want in bodies if want.large)

    def count(self, want: Want, step: int) -> None:
        """Take a permit (1) or give it back (-1)."""
        self.in_use += step
        if want.body is not None:
            self.bodies += step
            self.large[want.body] += step * want.large

def admit(limits: Mapping[str, Limit], wants: tuple[Want, ...]) -> bool:
    """Take all that `wants` name, or nothing; True when taken."""
    hosts = {want.host for want in wants}
    if not all(limits[host].fits([want for want in wants if want.host == host]) for host in hosts):
        return False
    for want in wants: limits[want.host].count(want, 1)
    return True

def release(limits: Mapping[str, Limit], wants: tuple[Want, ...]) -> None:
    """Give back what `admit` took."""
    for want in wants: limits[want.host].count(want, -1)

class Patience:
    """Repetitions of one piece of work: so many attempts, and apart from them 429s for so long."""
    def __init__(self, attempts: int) -> None:
        self.repeated = 0
        self._left, self._throttled_since = attempts, -1.0

    def pause(self, now: float, chance: float, *, throttled: bool, asked: float) -> float | None:
        """Return the seconds before the next attempt, at least what the peer asked for; None to give up."""
        if throttled and self._throttled_since < 0: self._throttled_since = now
        self._left -= not throttled
        late = throttled and now - self._throttled_since > THROTTLED_FOR
        if late or self._left < 1 or asked > LONGEST_RETRY_AFTER: return None
        self.repeated += 1
        return max(asked, backoff(self.repeated, chance))

def backoff(attempt: int, chance: float) -> float:
    """Return the pause in seconds before attempt `attempt` (from 1); `chance` is uniform in [0, 1)."""
    return float(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt - 1, 9)) * chance)

def hopeless(before: Mapping[Any, int], left: Mapping[Any, int], ticks: float) -> list[Any]:
    """Return the streams to drop, by two looks at what each has left, `ticks` times the time between them before the
    end: those that would not end if the whole line were theirs, else the slowest of those that would not."""
    moved = {each: before[each] - count for each, count in left.items() if each in before}
    late = [each for each in moved if left[each] > ticks * moved[each]]
    late.sort(key=lambda each: moved[each] / left[each])
    line = sum(moved.values())
    return [each for each in late if left[each] > ticks * line] or late[:1] if line else []

def parse_retry_after(value: str | None, wall_now: float) -> float | None:
    """Return seconds from a Retry-After header (RFC 9110 section 10.2.3: a number or a date)."""
    if not (value := (value or "").strip()): return None
    if value.isascii() and value.isdigit(): return float(value[:9])
    from email.utils import parsedate_to_datetime

    try: return max(0.0, parsedate_to_datetime(value).timestamp() - wall_now)
    except (ValueError, OverflowError): return None
