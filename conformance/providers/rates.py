"""How many requests a registry takes: caps over any stretch of time, and the 429 for one more.

Owns: what each request counts as, sliding windows, quotas that headers tell, the refusal.
May not know: what a registry holds, sockets, a clock (`now` is an argument).
Invariants: in no stretch of a cap's length, wherever it begins, the registry admits more requests
than the cap. A refused request counts for nothing. So a client whose rate plus burst is above the
cap is caught at its burst, as the clouds catch it.
Follows: docs/protocol-facts.md sections 1.12 (429, TOOMANYREQUESTS, Retry-After), 4.8, 5.5, 6.5 and
7.2 (what is counted); the actions are those of docs/design.md section 9.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..messages import Access, Answer, Request, Response, error

if TYPE_CHECKING:
    from ..registry.app import Auth
    from ..server.exchange import Reception

__all__ = ["ACTIONS", "READS", "WRITES", "Cap", "Metered", "Rates", "RetryAfter", "actions_of"]

RetryAfter: TypeAlias = "Literal['seconds', 'date'] | None"

READS = frozenset({"tag_list", "manifest_head", "manifest_get", "blob_head", "blob_get"})
WRITES = frozenset({"manifest_put", "upload_start", "upload_body", "upload_finish"})
ACTIONS = READS | WRITES


def actions_of(request: Request) -> tuple[str, ...]:
    """Return the actions of a request: none for a ping, two for a PUT that brings the body."""
    method = request.method
    kind = request.kind
    if kind in ("tag_list", "catalog"):
        return ("tag_list",)
    if kind == "referrers":
        return ("manifest_get",)
    if kind in ("manifest", "blob"):
        named = f"{kind}_{method.lower()}"
        return (named,) if named in ACTIONS else ()
    if kind == "upload_start":
        # One POST with the whole blob is all three steps.
        whole = request.has_body and request.parameter("digest") is not None
        return ("upload_start", "upload_body", "upload_finish") if whole else ("upload_start",)
    if kind == "upload" and method == "PATCH":
        return ("upload_body",)
    if kind == "upload" and method == "PUT":
        return ("upload_body", "upload_finish") if request.has_body else ("upload_finish",)
    return ()


@dataclass(frozen=True)
class Cap:
    """At most `requests` of `actions` in any `seconds`.

    `apart`: each action has a count of its own, as AWS counts by API; otherwise one for all.
    `per` gives the key of a request's count, for one count by caller, repository or the like; None
    where the cap does not hold for the request.
    """

    requests: int
    seconds: float = 1.0
    actions: frozenset[str] = ACTIONS
    apart: bool = False
    per: Callable[[Request], str | None] = lambda request: ""


class Rates:
    """Caps that are kept: `refuse` counts a request or says no.

    `retry_after`: None leaves the header out, "seconds" and "date" say when the next one is taken.
    `refused` counts by action.
    """

    def __init__(
        self,
        *caps: Cap,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        retry_after: RetryAfter = "seconds",
        message: str = "too many requests",
    ) -> None:
        self.caps = caps
        self.now = now
        self.wall = wall
        self.retry_after = retry_after
        self.message = message
        self.refused: Counter[str] = Counter()
        self._times: defaultdict[tuple[Cap, str, str], deque[float]] = defaultdict(deque)

    def refuse(self, request: Request) -> Response | None:
        """Count a request that is admitted; return the 429 for one that is not."""
        now = self.now()
        counts = list(self._counts(request))
        waits = [
            times[0] + cap.seconds - now for cap, times in counts if len(times) >= cap.requests
        ]
        if waits:
            self.refused.update(actions_of(request))
            return self._too_many(max(waits))
        for _, times in counts:
            times.append(now)
        return None

    def remaining(self, cap: Cap, request: Request) -> int:
        """Return how many more such requests the cap has room for now."""
        return min(
            (cap.requests - len(times) for _, times in self._counts(request, cap)),
            default=cap.requests,
        )

    def _counts(self, request: Request, *only: Cap) -> Iterable[tuple[Cap, deque[float]]]:
        """Give each cap that holds for a request, with the times of its admitted requests."""
        now = self.now()
        for cap in only or self.caps:
            key = cap.per(request)
            if key is None:
                continue
            for action in actions_of(request):
                if action not in cap.actions:
                    continue
                times = self._times[cap, action if cap.apart else "", key]
                while times and times[0] <= now - cap.seconds:
                    times.popleft()
                yield cap, times
                if not cap.apart:
                    break  # a request is one request, whatever it is made of

    def _too_many(self, wait: float) -> Response:
        headers = []
        if self.retry_after == "seconds":
            headers.append(("Retry-After", str(math.ceil(wait))))
        elif self.retry_after == "date":
            headers.append(("Retry-After", formatdate(math.ceil(self.wall() + wait), usegmt=True)))
        return error(429, "TOOMANYREQUESTS", self.message, headers=headers)


class Metered:
    """`App(auth=Metered(rates, auth))`: logins first, then caps; what a login refuses is not
    counted.
    """

    def __init__(self, rates: Rates, auth: Auth | None = None) -> None:
        self._rates = rates
        self._auth = auth

    def answer(self, request: Request) -> Answer | Reception | None:
        """Serve the token service's own path where it lives at the registry."""
        return None if self._auth is None else self._auth.answer(request)

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        """Refuse by login, then by caps."""
        refusal = None if self._auth is None else self._auth.check(request, needs)
        return refusal or self._rates.refuse(request)
