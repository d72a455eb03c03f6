"""."""

from __future__ import annotations

import heapq
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from itertools import count

import anyio

from _regsync.net.pool import Lease
from _regsync.registry.throttle import Limit, Meter, Want, admit, due, release


class _Permit:
    """What one piece of work holds: permits of registries, places in windows (`entered`) for its
    next requests.
    """

    def __init__(self, wants: tuple[Want, ...], rank: float) -> None:
        self.wants = wants
        self.rank = rank
        self.holds = False
        self.busy = 0
        self.entered = list[tuple[tuple[str, ...], Meter, int]]()
        self.drawn = dict[Meter, tuple[float, float]]()  # when, and the bucket behind it
        self.turn = anyio.Event()
        self.scope = anyio.CancelScope()


class Gate:
    """The waiting in front of permits: by rank, then first come, first served among those that fit."""

    def __init__(self) -> None:
        self.limits: dict[str, Limit] = {}
        # Those who wait for the same fit or not together: only the first of each heap is ever
        # asked.
        self._queues: dict[tuple[Want, ...], list[tuple[float, int, _Permit]]] = {}
        # so neither discovery nor execution waits for ever
        self._arrivals = count()
        self.youngest = 0.0
        # What a task holds: its request at a registry that it holds a permit of takes no other.
        self.at_work: ContextVar[_Permit | None] = ContextVar("at work", default=None)

    @asynccontextmanager
    async def admitted(
        self, wants: tuple[Want, ...], rank: float | None = None, lease: Lease | None = None
    ) -> AsyncIterator[_Permit]:
        """Hold the permits for `wants` inside the block; the lowest `rank` goes first, by default
        the youngest's. Who comes next finds the connection of `lease` in the pool."""
        self.youngest = max(self.youngest, rank or 0.0)
        permit = _Permit(wants, self.youngest if rank is None else rank)
        outer = self.at_work.set(permit)
        try:
            await self.take(permit)
            yield permit
            if lease is not None:
                await lease.settle()
        finally:
            self.at_work.reset(outer)
            self._give_back(permit)
            permit.wants = ()

    async def take(self, permit: _Permit, *wants: Want, lease: Lease | None = None) -> None:
        """Add what the next requests draw. To wait it gives back all (I8) unless a request of it is
        under way.
        """
        entered = [place for place, *_ in permit.entered]
        begun = {want.place for want in permit.wants}
        wants = tuple(want._replace(within=True) for want in wants if want.place not in entered)
        needs = wants if permit.holds else permit.wants
        if self._queues:
            self.wake()  # by time alone others may fit by now, and they came first
        if not needs or self._admit(permit, needs, anyio.current_time()):
            return
        if permit.holds and not permit.busy:
            if lease is not None:
                await lease.settle()  # what waits without a permit holds none
            held = tuple(Want(host, meters=tuple(meters), within=True) for host, *meters in entered)
            self._give_back(permit)
            # One place for what both name: a second one nobody would leave, and the window would be
            # narrower for good.
            needs = (*permit.wants, *(want for want in (*held, *wants) if want.place not in begun))
        waiting = (permit.rank, next(self._arrivals), permit)
        permit.turn = anyio.Event()
        heapq.heappush(self._queues.setdefault(needs, []), waiting)
        try:
            while not permit.turn.is_set():
                with anyio.CancelScope() as permit.scope:  # until time alone may have made room
                    self.wake()
                    await permit.turn.wait()
        finally:
            if not permit.turn.is_set():
                self._queues[needs].remove(waiting)
                heapq.heapify(self._queues[needs])
                self.wake()

    def _admit(self, permit: _Permit, needs: tuple[Want, ...], now: float) -> bool:
        admitted = admit(self.limits, needs, now, permit.entered)
        permit.holds = permit.holds or admitted
        for meter in (
            self.limits[want.host].meters[name] for want in needs * admitted for name in want.meters
        ):
            permit.drawn[meter] = now, meter.full
        return admitted

    def _give_back(self, permit: _Permit) -> None:
        for _, meter, number in permit.entered:
            meter.end(number)
        if permit.holds:
            release(self.limits, permit.wants)
        permit.entered = []
        permit.holds = False
        self.wake()

    def wake(self) -> None:
        """Let in whoever fits; who comes first of the others looks again when time alone may have
        made room.
        """
        heads = [(*queue[0], needs) for needs, queue in self._queues.items() if queue]
        heapq.heapify(heads)
        while heads:
            *_, permit, needs = heapq.heappop(heads)
            now = (
                anyio.current_time()
            )  # once for both: too early to go must not seem too late to wait for
            if self._admit(permit, needs, now):
                heapq.heappop(self._queues[needs])
                permit.turn.set()
                if self._queues[needs]:
                    heapq.heappush(heads, (*self._queues[needs][0], needs))
            else:
                later = due(self.limits, needs, now)
                permit.scope.deadline = later if later > now else math.inf
        self._queues = {needs: queue for needs, queue in self._queues.items() if queue}
