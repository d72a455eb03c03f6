"""The connection of requests that belong together, such as those of one upload.

Invariant: a lease holds at most one connection, that of its last answer.
"""

from __future__ import annotations

from collections.abc import Callable

from _regsync.addresses import Origin
from _regsync.net.wire import Pieces, Pool, Request, Response


class Lease:
    """The right to one connection at a time. The pool gives the one that was used last."""

    def __init__(
        self, pool: Pool, origin: Origin, *, is_fresh: bool = False, is_foreign: bool = False
    ) -> None:
        """`is_fresh` and `is_foreign` are those of Pool.exchange."""
        self.origin = origin
        self._pool = pool
        self._is_fresh = is_fresh
        self._is_foreign = is_foreign
        self._response: Response | None = None  # the last one, until `release`

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def release(self) -> None:
        """Give the connection of the last answer back to the pool."""
        response = self._response
        if response is not None:
            self._response = None
            await response.close()

    async def exchange(
        self,
        request: Request,
        seconds: float | None = None,
        pieces: Pieces | None = None,
        *,
        check_may_send: Callable[[], None] | None = None,
        now: float | None = None,
    ) -> Response:
        """Perform one exchange (see Pool.exchange). `check_may_send` is called after each wait and
        before anything is sent. If it raises, nothing is sent.
        """
        first: memoryview | None = None
        if pieces is not None:
            # The first piece goes in one write with the head of the request.
            first = await pieces.next()
            now = None  # the source may have taken time
        if self._response is not None:
            await self.release()
            now = None  # reading the rest of the last answer may have taken time
        if pieces is not None and check_may_send is not None:
            check_may_send()
        self._response = await self._pool.exchange(
            self.origin,
            request,
            first=first,
            pieces=pieces,
            seconds=seconds,
            is_fresh=self._is_fresh,
            is_foreign=self._is_foreign,
            check_may_send=check_may_send,
            now=now,
        )
        return self._response
