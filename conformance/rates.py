"""Rate limits of registries: caps on requests in a sliding window, and the 429 beyond them.

Invariant: in every window of a cap's length, at most as many requests are admitted as the cap
allows. A refused request does not count. So a client whose rate plus burst exceeds the cap is
refused at its burst, as in the clouds. Time is an argument.
Follows: docs/protocol-facts.md sections 1.12 (429, TOOMANYREQUESTS, Retry-After), 4.8, 5.5, 6.5 and
7.2 (what is counted); the actions are those of docs/design.md section 9.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .messages import Access, Answer, Request, Response, error

if TYPE_CHECKING:
    from .http import Reception
    from .registry import Auth

__all__ = ["ACTIONS", "READS", "WRITES", "Cap", "Metered", "Rates", "actions_of"]

READS = frozenset({"tag_list", "manifest_head", "manifest_get", "blob_head", "blob_get"})
WRITES = frozenset({"manifest_put", "upload_start", "upload_body", "upload_finish"})
ACTIONS = READS | WRITES


def actions_of(request: Request) -> tuple[str, ...]:
    """Return the actions of a request: none for a ping, two for a PUT with a body."""
    method = request.method
    kind = request.kind
    if kind == "tag_list":
        return ("tag_list",)
    if kind == "referrers":
        return ("manifest_get",)
    if kind in ("manifest", "blob"):
        action = f"{kind}_{method.lower()}"
        return (action,) if action in ACTIONS else ()
    if kind == "upload_start":
        # A POST with the whole blob counts as all three steps.
        whole = request.has_body and request.parameter("digest") is not None
        return ("upload_start", "upload_body", "upload_finish") if whole else ("upload_start",)
    if kind == "upload" and method == "PATCH":
        return ("upload_body",)
    if kind == "upload" and method == "PUT":
        return ("upload_body", "upload_finish") if request.has_body else ("upload_finish",)
    return ()


@dataclass(frozen=True)
class Cap:
    """A limit of `requests` requests with one of `actions` in any `seconds`.

    A request with several of these actions counts once.
    """

    requests: int
    seconds: float = 1.0
    actions: frozenset[str] = ACTIONS
    # Returns the key of the count for a request, such as its user or repository. None: the cap does
    # not apply to the request.
    per: Callable[[Request], str | None] = lambda request: ""


class Rates:
    """The counts of some caps. `refused` has the number of refused requests by action.

    With `has_retry_after`, a 429 has the seconds until the request is admitted.
    """

    def __init__(
        self, *caps: Cap, now: Callable[[], float] = time.monotonic, has_retry_after: bool = True
    ) -> None:
        self.caps = caps
        self.now = now
        self.has_retry_after = has_retry_after
        self.refused: Counter[str] = Counter()
        # Times of the admitted requests. Keys: the cap, the result of `per`.
        self._times: defaultdict[tuple[Cap, str], deque[float]] = defaultdict(deque)

    def refuse(self, request: Request) -> Response | None:
        """Count a request if it is admitted. Returns the 429 otherwise."""
        now = self.now()
        counts = list(self._counts(request, self.caps))
        waits = [
            times[0] + cap.seconds - now for cap, times in counts if len(times) >= cap.requests
        ]
        if waits:
            self.refused.update(actions_of(request))
            seconds = str(math.ceil(max(waits)))
            headers = [("Retry-After", seconds)] if self.has_retry_after else []
            return error(429, "TOOMANYREQUESTS", "too many requests", headers=headers)
        for _, times in counts:
            times.append(now)
        return None

    def remaining(self, cap: Cap, request: Request) -> int:
        """Return how many more requests like `request` the cap admits now."""
        return min(
            (cap.requests - len(times) for _, times in self._counts(request, (cap,))),
            default=cap.requests,
        )

    def _counts(self, request: Request, caps: Iterable[Cap]) -> Iterator[tuple[Cap, deque[float]]]:
        """Yield each cap that applies to a request, with the times of the admitted requests."""
        now = self.now()
        actions = actions_of(request)
        for cap in caps:
            key = cap.per(request)
            if key is None or cap.actions.isdisjoint(actions):
                continue
            times = self._times[cap, key]
            while times and times[0] <= now - cap.seconds:
                times.popleft()
            yield cap, times


class Metered:
    """An `Auth` that checks logins, then caps. A request whose login is refused is not counted.

    It is used as `App(auth=Metered(rates, auth))`.
    """

    def __init__(self, rates: Rates, auth: Auth | None = None) -> None:
        self._rates = rates
        self._auth = auth

    def answer(self, request: Request) -> Answer | Reception | None:
        """Answer the token path if the token service is at the registry's origin."""
        return None if self._auth is None else self._auth.answer(request)

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        """Return the refusal of the login or of the caps, or None."""
        refusal = None if self._auth is None else self._auth.check(request, needs)
        return refusal or self._rates.refuse(request)
