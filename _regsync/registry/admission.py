"""Who may ask which registry next: the queue in front of permits, windows and buckets.

Owns: permits that work holds, turns of requests, the order of those who wait.
May not know: what a request says; how long anything takes.
Invariants: I8 (one synchronous decision admits; who waits holds nothing, unless a request of the
same work is under way), I9 (who is cancelled leaves nothing behind). The lowest rank goes first,
then who came first, among those that fit.
Follows: docs/design.md section 9.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from itertools import count

import anyio

from _regsync.net.http1 import Response
from _regsync.net.pool import Lease
from _regsync.registry.throttle import (
    Demand,
    RegistryLimits,
    Slot,
    has_permits,
    refresh_next_opening,
    release,
    take,
)


class Permit:
    """What one piece of work holds, a blob's transfer or a single request."""

    def __init__(self, wants: tuple[Demand, ...], rank: float) -> None:
        self.wants = wants
        self.rank = rank
        self.is_held = False

        # Places in windows, taken for requests that have not begun.
        self.slots: list[Slot] = []

        self.requests_in_flight = 0

    def take_slot(self, want: Demand) -> Slot:
        """Take out the place that is there for a request."""
        index = [slot.demand.place for slot in self.slots].index(want.place)
        return self.slots.pop(index)


class Turn:
    """What one request holds from its admission to its end: a place in a window, a permit, and a
    connection, unless it goes over its caller's lease.

    `async with` gives the answer, once there is one, and ends the turn. The connection goes back to
    the pool before the permit does, so that whoever gets the permit next can use it.
    """

    def __init__(
        self, gate: Gate, permit: Permit, slot: Slot, began: float, *, owns_permit: bool
    ) -> None:
        self.meter = slot.meter
        self.number = slot.number
        self.began = began  # when its request could be sent, in the event loop's time
        self.connection: Lease | None = None
        self.response: Response | None = None
        self._gate = gate
        self._permit = permit
        self._owns_permit = owns_permit
        permit.requests_in_flight += 1

    async def __aenter__(self) -> Response:
        assert self.response is not None
        return self.response

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def settle(self) -> None:
        """Let go of the connection."""
        if self.connection is not None:
            await self.connection.settle()

    def is_in_window(self) -> bool:
        """Say whether the request still takes a place in its window."""
        return self.number in self.meter.window.occupants

    def succeed_at(self, moment: float) -> None:
        """Give the window back at a time when nothing is heard until then: a body is under way."""
        self.meter.window.presumed_success_at[self.number] = moment
        self._gate.on_window_change()

    async def end(self) -> None:
        """Let go of the connection, leave the window, and give back the permit when it is the
        request's own.
        """
        try:
            if self.connection is not None:
                await self.connection.settle()
        finally:
            self._permit.requests_in_flight -= 1
            was_in_window = self.is_in_window()  # not where its answer has ended it
            self.meter.end(self.number)
            if self._owns_permit:
                self._gate.give_back(self._permit)
            elif was_in_window:
                self._gate.on_window_change()


class _Waiter:
    """Work in the queue, in the order of its rank, then of its arrival."""

    def __init__(
        self, rank: float, arrival: int, permit: Permit, needs: tuple[Demand, ...]
    ) -> None:
        self.order = (rank, arrival)
        self.permit = permit
        self.needs = needs
        self.admitted = anyio.Event()

        # It sleeps in this scope, until the deadline wakes it: the time at which it may be let in
        # though no answer has freed a place.
        self.scope = anyio.CancelScope()

    def __lt__(self, other: _Waiter) -> bool:
        return self.order < other.order


class Gate:
    """The waiting in front of registries."""

    def __init__(self) -> None:
        # By host:port.
        self.limits: dict[str, RegistryLimits] = {}

        # The rank of the youngest image. Requests of discovery have no rank of their own and get
        # this one: they wait for all images that have begun, and for none that begins later.
        self.youngest = 0.0

        # The permit that this task holds: its requests at that registry take no other.
        self.at_work: ContextVar[Permit | None] = ContextVar("at work", default=None)

        # Those whose needs are the same fit or do not fit together: of each heap only the first is
        # ever looked at.
        self._queues: dict[tuple[Demand, ...], list[_Waiter]] = {}
        # The earliest time at which one of these fits by time alone. Until then none does, unless
        # something is given back: `wake` follows that.
        self._next_opening = math.inf
        # Whether one of these has its permits: then it waits for a window, a bucket or a pause.
        self._waits_for_window = False
        self._arrivals = count()

    @asynccontextmanager
    async def admitted(
        self, wants: tuple[Demand, ...], rank: float | None = None, lease: Lease | None = None
    ) -> AsyncIterator[Permit]:
        """Hold permits for `wants` while the block runs.

        Waiters are served by ascending `rank` (default: the rank of the youngest image). The
        lease's connection goes back to the pool before the permits do, so that the next holder can
        use it again.
        """
        permit = Permit(wants, self._rank(rank))
        outer = self.at_work.set(permit)
        try:
            if wants and not self._admits_at_once(permit, wants, anyio.current_time()):
                await self._wait(permit, wants)
            yield permit
            if lease is not None:
                await lease.settle()
        finally:
            self.at_work.reset(outer)
            self.give_back(permit)
            permit.wants = ()

    async def enter(self, want: Demand, rank: float | None, lease: Lease | None) -> Turn:
        """Wait for a request's turn, as a part of what this task holds where it holds a permit of
        that registry. Whoever gets the turn ends it.
        """
        work = self.at_work.get()
        if work is not None and any(held.host == want.host for held in work.wants):
            await self.take(work, want, lease=lease)
            slot = work.take_slot(want)
            return Turn(self, work, slot, anyio.current_time(), owns_permit=False)

        permit = Permit((want,), self._rank(rank))
        now = anyio.current_time()
        if not self._admits_at_once(permit, permit.wants, now):
            try:
                await self._wait(permit, permit.wants)
            except BaseException:
                self.give_back(permit)
                raise
            now = anyio.current_time()
        return Turn(self, permit, permit.slots.pop(), now, owns_permit=True)

    async def take(self, permit: Permit, *wants: Demand, lease: Lease | None = None) -> None:
        """Take the places in windows, and the tokens, for the next requests of admitted work.

        Where they are not free at once, all is given back and waited for anew (I8), the lease's
        connection too, unless a request of the work is under way.
        """
        entered = {slot.demand.place for slot in permit.slots}
        needs = tuple(want._replace(has_permit=True) for want in wants if want.place not in entered)
        if not needs or self._admits_at_once(permit, needs, anyio.current_time()):
            return
        if permit.requests_in_flight == 0:
            if lease is not None:
                await lease.settle()
            needs = self._all_needs(permit, needs)
            self.give_back(permit)
        await self._wait(permit, needs)

    def give_back(self, permit: Permit) -> None:
        """Give back the permits, and leave the windows that no request has used."""
        for slot in permit.slots:
            slot.meter.end(slot.number)
        permit.slots = []
        if permit.is_held:
            release(self.limits, permit.wants)
            permit.is_held = False
        self.wake()

    def wake(self) -> None:
        """Let in whoever fits, after permits were given back."""
        if self._queues:
            self._serve_queues(anyio.current_time())

    def on_window_change(self) -> None:
        """Let in whoever fits, after a window, a quota or a pause has changed."""
        # Nearly always all wait for permits: to look at them at each answer cost 4 % of a copy's CPU.
        if self._waits_for_window:
            self.wake()

    def _serve_queues(self, now: float) -> None:
        self._next_opening = math.inf
        self._waits_for_window = False
        self._serve([queue[0] for queue in self._queues.values()], now)

    def _serve(self, heads: list[_Waiter], now: float) -> None:
        """Let in those of `heads` who fit, and who follows them in their queues. Each of the others
        looks again when time alone may have made room.
        """
        heapq.heapify(heads)
        while heads:
            waiter = heapq.heappop(heads)
            opens = math.inf
            has_its_permits = has_permits(self.limits, waiter.needs)
            if has_its_permits:
                opens = refresh_next_opening(self.limits, waiter.needs, now)
            if opens <= now:
                self._take(waiter.permit, waiter.needs, now)
                queue = self._queues[waiter.needs]
                heapq.heappop(queue)
                waiter.admitted.set()
                if queue:
                    heapq.heappush(heads, queue[0])
                else:
                    del self._queues[waiter.needs]
            else:
                self._waits_for_window = self._waits_for_window or has_its_permits
                self._next_opening = min(self._next_opening, opens)
                if opens != waiter.scope.deadline:  # to set it costs a timer
                    waiter.scope.deadline = opens

    def _rank(self, rank: float | None) -> float:
        if rank is None:
            return self.youngest
        self.youngest = max(self.youngest, rank)
        return rank

    def _all_needs(self, permit: Permit, needs: tuple[Demand, ...]) -> tuple[Demand, ...]:
        """Return all that work needs which begins to wait: its permits, its places, and `needs`.

        Both lists may name the same window. It is entered once: a second place would never be left,
        and the window would stay one place narrower.
        """
        first = {want.place for want in permit.wants}
        held = (slot.demand._replace(has_permit=True) for slot in permit.slots)
        return (*permit.wants, *(want for want in (*held, *needs) if want.place not in first))

    def _admits_at_once(self, permit: Permit, needs: tuple[Demand, ...], now: float) -> bool:
        if now >= self._next_opening:
            self._serve_queues(now)  # others came first, and one of them may fit by now
        if (
            not has_permits(self.limits, needs)
            or refresh_next_opening(self.limits, needs, now) > now
        ):
            return False
        self._take(permit, needs, now)
        return True

    def _take(self, permit: Permit, needs: tuple[Demand, ...], now: float) -> None:
        permit.slots += take(self.limits, needs, now)
        permit.is_held = True

    async def _wait(self, permit: Permit, needs: tuple[Demand, ...]) -> None:
        waiter = _Waiter(permit.rank, next(self._arrivals), permit, needs)
        queue = self._queues.setdefault(needs, [])
        heapq.heappush(queue, waiter)
        if queue[0] is waiter:
            self._serve([waiter], anyio.current_time())
        try:
            while not waiter.admitted.is_set():
                with waiter.scope:
                    await waiter.admitted.wait()
                if waiter.scope.cancelled_caught:  # its time has come, and perhaps that of others
                    waiter.scope = anyio.CancelScope()
                    self.wake()
        finally:
            if not waiter.admitted.is_set():
                self._leave_queue(waiter)

    def _leave_queue(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.needs]
        queue.remove(waiter)
        heapq.heapify(queue)
        if not queue:
            del self._queues[waiter.needs]
        self.wake()
