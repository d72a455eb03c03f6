"""Decide which work may send its next request: a queue in front of each registry's limits.

Owns: permits, turns, and the queue of work that waits for them.
May not know: what a request contains; how long anything takes.
Invariants: I8 (work is admitted by one synchronous decision, and holds nothing while it waits,
unless one of its requests is in flight), I9 (cancelled work leaves nothing behind). Of all waiting
work that fits into the limits, the lowest rank is admitted first, and then the longest wait.
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

from _regsync.net.wire import Response
from _regsync.registry.lease import Lease
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
    """The limits that one piece of work occupies: the transfer of a blob, or a single request."""

    def __init__(self, demands: tuple[Demand, ...], rank: float) -> None:
        self.demands = demands
        self.rank = rank  # the lowest is admitted first

        # Whether the permits that `demands` name are taken now. They are given back for a wait.
        self.is_held = False

        # Places in windows that are reserved for requests of this work which have not begun.
        self.slots: list[Slot] = []

        # How many requests of this work are in flight, and how many of its tasks wait for places in
        # windows meanwhile. Until all of them have ended, the work keeps its permits.
        self.active_requests = 0

        # Not None while a task of this work waits for permits that the work has given back. Set when
        # that wait ends.
        self.readmission: anyio.Event | None = None

    def pop_slot(self, demand: Demand) -> Slot:
        """Remove and return the reserved slot of a request that begins."""
        keys = [slot.demand.meters_key for slot in self.slots]
        return self.slots.pop(keys.index(demand.meters_key))


class Turn:
    """The limits and the connection that one request occupies, from its admission to its end.

    `async with` on a turn yields the response, once there is one, and ends the turn. The connection
    goes back to the pool before the permit is given back, so that the next work can reuse it.
    """

    def __init__(
        self, gate: Gate, permit: Permit, slot: Slot, began: float, *, owns_permit: bool
    ) -> None:
        self.meter = slot.meter
        self.number = slot.number  # the request's number in the window of `meter`
        self.began = began  # when the request was admitted, in the event loop's time
        self.connection: Lease | None = None  # None while the request uses its caller's lease
        self.response: Response | None = None
        self._gate = gate
        self._permit = permit
        # Whether the permit is for this request alone, and ends with it.
        self._owns_permit = owns_permit
        permit.active_requests += 1

    async def __aenter__(self) -> Response:
        assert self.response is not None
        return self.response

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def return_connection(self) -> None:
        """Return the connection to the pool, if the turn has one of its own."""
        if self.connection is not None:
            await self.connection.release()

    def presume_success_at(self, moment: float) -> None:
        """Free the request's place in the window at `moment`, if no response arrives before."""
        self.meter.window.presumed_success_at[self.number] = moment
        self._gate.on_window_change()

    async def end(self) -> None:
        """Return the connection, free the place in the window, and give back the request's own
        permit.
        """
        try:
            await self.return_connection()
        finally:
            self._permit.active_requests -= 1
            was_in_window = self.meter.discard(self.number)  # False if a response was recorded
            if self._owns_permit:
                self._gate.give_back(self._permit)
            elif was_in_window:
                self._gate.on_window_change()


class _Waiter:
    """Work in a queue. Waiters are ordered by rank, then by arrival."""

    def __init__(self, arrival: int, permit: Permit, demands: tuple[Demand, ...]) -> None:
        self.order = (permit.rank, arrival)
        self.permit = permit
        self.demands = demands
        self.admitted = anyio.Event()

        # The waiter sleeps in this scope. Its deadline is the time at which the waiter may fit into
        # the limits even if no response has arrived until then.
        self.scope = anyio.CancelScope()

    def __lt__(self, other: _Waiter) -> bool:
        return self.order < other.order


class Gate:
    """The queue in front of all registries."""

    def __init__(self) -> None:
        # The limits of each registry, by host:port.
        self.limits: dict[str, RegistryLimits] = {}

        # The rank of the image that was promoted last. Requests of discovery get this rank: they
        # wait for the images that have begun, but not for images that begin later.
        self.youngest_rank = 0.0

        # The permit that the current task holds. Its requests at the permit's registries use it and
        # take no permit of their own.
        self.current_permit: ContextVar[Permit | None] = ContextVar("current permit", default=None)

        # The waiters, by their demands: a heap for each. Waiters with the same demands fit or do
        # not fit together, so only the first one of each heap is examined.
        self._queues: dict[tuple[Demand, ...], list[_Waiter]] = {}

        # The earliest time at which one of these first waiters fits by time alone.
        self._next_opening = math.inf

        # Whether one of these first waiters finds its permits free, and waits only for a window, a
        # bucket or the end of a pause.
        self._has_window_waiter = False

        self._arrivals = count()

    @asynccontextmanager
    async def admitted(
        self, demands: tuple[Demand, ...], rank: float | None = None, lease: Lease | None = None
    ) -> AsyncIterator[Permit]:
        """Wait until the limits admit `demands`, and hold their permits while the block runs.

        The default rank is that of the youngest image. The connection of `lease` goes back to the
        pool before the permits are given back, so that the next work can reuse it.
        """
        permit = Permit(demands, self._note_rank(rank))
        previous = self.current_permit.set(permit)
        try:
            if demands and not self._try_to_take(permit, demands, anyio.current_time()):
                await self._wait(permit, demands)
            yield permit
            if lease is not None:
                await lease.release()
        finally:
            self.current_permit.reset(previous)
            self.give_back(permit)
            # Tasks that were started in the block may still have this permit as their current one.
            # Without demands it covers no request of theirs.
            permit.demands = ()

    async def begin_request(self, demand: Demand, rank: float | None, lease: Lease | None) -> Turn:
        """Wait until a request may be sent. Returns its turn, which the caller must end.

        If the task holds a permit at the request's registry, the request is a part of that work and
        needs only a place in its window. `lease` and the default of `rank` are those of `admitted`.
        """
        current = self.current_permit.get()
        if current is not None and any(held.host == demand.host for held in current.demands):
            await self.reserve(current, demand, lease=lease)
            slot = current.pop_slot(demand)
            return Turn(self, current, slot, anyio.current_time(), owns_permit=False)

        permit = Permit((demand,), self._note_rank(rank))
        now = anyio.current_time()
        if not self._try_to_take(permit, permit.demands, now):
            try:
                await self._wait(permit, permit.demands)
            except BaseException:
                self.give_back(permit)  # there is no turn that would give it back
                raise
            now = anyio.current_time()
        slot = permit.slots.pop()  # the place of this request, which the gate has taken
        return Turn(self, permit, slot, now, owns_permit=True)

    async def reserve(self, permit: Permit, *demands: Demand, lease: Lease | None = None) -> None:
        """Reserve places in windows, and tokens of buckets, for the next requests of admitted work.
        A demand whose place is reserved already needs no second place.

        If the places are not free at once, the work gives back its permits, its reserved places and
        the connection of `lease`, and waits for all of them together with the new places (I8). If
        one of its requests is in flight, the work keeps them and waits only for the new places.

        Several tasks may reserve places for the same work, for example one for each target of a
        shared reading. Only one of them waits for what the work has given back. The others wait for
        this task, because the permits must not be taken twice.
        """
        while True:
            if permit.readmission is not None:
                await permit.readmission.wait()
                continue
            reserved = {slot.demand.meters_key for slot in permit.slots}
            # They need places in windows only: the work holds its permits, or gets them again below.
            needed = tuple(
                demand._replace(has_permit=True)
                for demand in demands
                if demand.meters_key not in reserved
            )
            if not needed:
                return
            if permit.is_held and self._try_to_take(permit, needed, anyio.current_time()):
                return
            if permit.active_requests > 0:
                # This wait counts too, so that no other task of the work gives the permits back.
                permit.active_requests += 1
                try:
                    await self._wait(permit, needed)
                finally:
                    permit.active_requests -= 1
                return
            if lease is None:
                break
            # The connection is given back first. Other tasks of this work may run meanwhile, so
            # everything is looked at again.
            await lease.release()
            lease = None

        needed = self._with_held_demands(permit, needed)  # before they are given back
        self.give_back(permit)
        permit.readmission = anyio.Event()
        try:
            await self._wait(permit, needed)
        finally:
            permit.readmission.set()
            permit.readmission = None

    def give_back(self, permit: Permit) -> None:
        """Give back the permits, and the slots whose requests have not begun."""
        for slot in permit.slots:
            slot.meter.discard(slot.number)
        permit.slots = []
        if permit.is_held:
            release(self.limits, permit.demands)
            permit.is_held = False
        self.wake()

    def wake(self) -> None:
        """Admit the waiters that fit, after permits were given back."""
        if self._queues:
            self._admit_first_waiters(anyio.current_time())

    def on_window_change(self) -> None:
        """Admit the waiters that fit, after a response has changed a window, a quota or a pause."""
        # Nearly all waiters wait for permits, which a response does not free. To examine them at
        # each response took 4 % of the CPU of a cold run.
        if self._has_window_waiter:
            self.wake()

    def _admit_first_waiters(self, now: float) -> None:
        self._next_opening = math.inf
        self._has_window_waiter = False
        self._admit_waiters([queue[0] for queue in self._queues.values()], now)

    def _admit_waiters(self, waiters: list[_Waiter], now: float) -> None:
        """Admit each of `waiters` that fits into the limits, in their order. Each is the first of
        its queue; if it is admitted, the next waiter of its queue is examined too.

        A waiter that does not fit gets a deadline: the time from which it may fit even if no
        response arrives and no permit is given back.
        """
        heapq.heapify(waiters)
        while waiters:
            waiter = heapq.heappop(waiters)
            opens_at = math.inf
            are_permits_free = has_permits(self.limits, waiter.demands)
            if are_permits_free:
                opens_at = refresh_next_opening(self.limits, waiter.demands, now)
            if opens_at > now:
                # The waiter does not fit. Note what may make it fit: a response, or time alone.
                self._has_window_waiter = self._has_window_waiter or are_permits_free
                self._next_opening = min(self._next_opening, opens_at)
                if opens_at != waiter.scope.deadline:  # setting a deadline makes a timer
                    waiter.scope.deadline = opens_at
                continue

            self._take(waiter.permit, waiter.demands, now)
            queue = self._queues[waiter.demands]
            heapq.heappop(queue)
            waiter.admitted.set()
            if queue:
                heapq.heappush(waiters, queue[0])
            else:
                del self._queues[waiter.demands]

    def _note_rank(self, rank: float | None) -> float:
        """Return the rank of new work: `rank`, or that of the youngest image if it is None. A
        higher `rank` than before is the rank of the youngest image from now on.
        """
        if rank is None:
            return self.youngest_rank
        self.youngest_rank = max(self.youngest_rank, rank)
        return rank

    def _with_held_demands(self, permit: Permit, needed: tuple[Demand, ...]) -> tuple[Demand, ...]:
        """Return `needed` with all demands that the permit has now and is about to give back.

        A window that is named twice is entered only once: nothing would ever free a second place.
        """
        keys = {demand.meters_key for demand in permit.demands}
        others = [slot.demand._replace(has_permit=True) for slot in permit.slots]
        others.extend(needed)
        return (*permit.demands, *(other for other in others if other.meters_key not in keys))

    def _try_to_take(self, permit: Permit, demands: tuple[Demand, ...], now: float) -> bool:
        """Take the limits that `demands` name for the permit, if all are free now. Returns False if
        nothing was taken.
        """
        if now >= self._next_opening:
            self._admit_first_waiters(now)  # a waiter that fits by now goes before new work
        if not has_permits(self.limits, demands):
            return False
        if refresh_next_opening(self.limits, demands, now) > now:
            return False
        self._take(permit, demands, now)
        return True

    def _take(self, permit: Permit, demands: tuple[Demand, ...], now: float) -> None:
        """Take the limits that `demands` name for the permit. All of them must be free."""
        permit.slots += take(self.limits, demands, now)
        permit.is_held = True

    async def _wait(self, permit: Permit, demands: tuple[Demand, ...]) -> None:
        """Wait in the queue until `demands` are taken for the permit."""
        waiter = _Waiter(next(self._arrivals), permit, demands)
        queue = self._queues.setdefault(demands, [])
        heapq.heappush(queue, waiter)
        if queue[0] is waiter:
            # Set the deadline of the waiter. It may also be admitted now, if its own work has just
            # given back permits that no earlier waiter needed.
            self._admit_waiters([waiter], anyio.current_time())
        try:
            while not waiter.admitted.is_set():
                with waiter.scope:
                    await waiter.admitted.wait()
                if waiter.scope.cancelled_caught:
                    # The deadline has passed. Another waiter whose deadline has passed too, and
                    # whose rank is lower, must be admitted first. So examine all waiters.
                    waiter.scope = anyio.CancelScope()
                    self.wake()
        finally:
            if not waiter.admitted.is_set():
                self._leave_queue(waiter)

    def _leave_queue(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.demands]
        queue.remove(waiter)
        heapq.heapify(queue)
        if not queue:
            del self._queues[waiter.demands]
        self.wake()
