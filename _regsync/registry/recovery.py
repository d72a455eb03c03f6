"""Wait for unreachable hosts, and choose the waiting task that probes a host.

Owns: the outages of a run by host, the tasks that wait for each host, the messages about outages.
May not know: the meaning of a request, permits, windows.
Invariants: a task that waits here holds no permit and no connection (I8); a probe that was not sent
is cancelled, even if its task fails or is cancelled (I9).
Follows: docs/design.md section 9 ("Outages"); `outage` has the states of a host.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import anyio

from _regsync.addresses import Origin
from _regsync.errors import RegistryError, SyncError, WireError
from _regsync.registry.outage import Outage, Patience, Reach, is_outage
from _regsync.text import duration_text

_Answer = TypeVar("_Answer")


class Peer:
    """A host that a run sends requests to: a registry, a token service, a store of blobs."""

    def __init__(self, origin: Origin, outage: Outage) -> None:
        self.origin = origin
        self.url = str(origin)
        self.outage = outage  # its reachability

        # The waiting tasks, in the order of arrival.
        self.waiters: list[_Waiter] = []

        # Set, and replaced by a new event, whenever the waiters have to check the state again.
        self.changed = anyio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def is_next(self, waiter: _Waiter) -> bool:
        """Report whether a waiter sends the next probe: the first waiter that can probe, or the
        first waiter if no waiter can.
        """
        able = [other for other in self.waiters if other.can_probe]
        first = able[0] if able else self.waiters[0]
        return waiter is first


class _Waiter:
    """A task that waits for a host."""

    def __init__(self, can_probe: bool) -> None:
        self.can_probe = can_probe  # whether its next request may be the probe


class Recovery:
    """The reachability of all hosts of a process's runs, and the tasks that wait for hosts.

    `ping` sends a simple request to a host; it is the probe if no waiting task can send one.
    `on_outage` and `on_back` are called when an outage of a host begins, and when it has ended.
    """

    def __init__(
        self,
        *,
        patience: Patience,
        chance: Callable[[], float],
        log: Callable[..., None],
        ping: Callable[[Peer], Awaitable[None]],
        on_outage: Callable[[Peer], None],
        on_back: Callable[[Peer], None],
    ) -> None:
        self._patience = patience
        self._chance = chance
        self._log = log
        self._ping = ping
        self._on_outage = on_outage
        self._on_back = on_back
        self._peers: dict[tuple[str, str, int], Peer] = {}  # by `Origin.address`

        # The peer that the next request of this task probes; None for an ordinary request.
        self._probe_target: ContextVar[Peer | None] = ContextVar("probe target", default=None)

    def peer(self, origin: Origin) -> Peer:
        """Return the peer at an origin. It is created on first use."""
        peer = self._peers.get(origin.address)
        if peer is None:
            peer = Peer(origin, Outage(self._patience))
            self._peers[origin.address] = peer
        return peer

    def begin_run(self) -> None:
        """Prepare for another run. A host that was stopped is tried once."""
        for peer in self._peers.values():
            peer.outage.begin_run()

    def is_waiting(self) -> bool:
        """Report whether any task waits for an unreachable host."""
        return any(peer.waiters for peer in self._peers.values())

    def count_probes(self) -> int:
        """Return how many hosts are being probed."""
        return [peer.outage.reach for peer in self._peers.values()].count(Reach.PROBED)

    def describe(self, now: float) -> dict[str, str]:
        """Describe each unreachable host that a task waits for, by HOST:PORT, the longest outage
        first.
        """
        away = [peer for peer in self._peers.values() if peer.outage.is_on and peer.waiters]
        away.sort(key=lambda peer: peer.outage.since)
        texts = {}
        for peer in away:
            duration = duration_text(now - peer.outage.since)
            texts[peer.origin.authority] = f"{_describe_wait(peer)}, {duration}"
        return texts

    # Called for each request.

    def is_probing(self, peer: Peer) -> bool:
        """Report whether the next request of this task is the probe of a peer."""
        return self._probe_target.get() is peer

    def error_of(self, peer: Peer, *, can_repeat: bool) -> SyncError | None:
        """Return the error of a request that must not be sent to a peer, because the peer is
        unreachable or was given up. Returns None if it may be sent: it may be this task's probe.

        `can_repeat` is False for a request that cannot be sent again: it cannot be a probe.
        """
        outage = peer.outage
        if outage.reach is Reach.UP or (can_repeat and self.is_probing(peer)):
            return None
        return _error_of_outage(peer)

    def record_answer(self, peer: Peer, now: float) -> None:
        """Record that a peer has answered a request. If that ends an outage, call `on_back` and
        notify the waiters.
        """
        outage = peer.outage
        if self.is_probing(peer):
            self._probe_target.set(None)  # the probe is complete
        has_ended_outage = outage.record_answer(now)
        if has_ended_outage:
            away = duration_text(now - outage.since)
            name = peer.origin.authority
            self._log("info", "back", f"{name} answers again, after {away}", host=name)
            self._on_back(peer)
            peer.notify()

    def record_failure(
        self, peer: Peer, error: SyncError, began: float, *, is_counted: bool = True
    ) -> None:
        """Record the failure of a request that was sent at `began`. If the failure shows that the
        host has answered, record the answer instead.

        If the failure belongs to an outage, `error.unreachable_peer` is set. If not `is_counted`,
        the failure does not begin an outage: a registry may refuse a body by closing the
        connection.
        """
        outage = peer.outage
        now = anyio.current_time()
        if not is_outage(error):
            self.record_answer(peer, now)
            return
        belongs_to_previous_outage = began < outage.back_at and not outage.is_on
        if is_counted and not belongs_to_previous_outage:
            self._count_failure(peer, error, began, now)
        # After an outage that has ended, `wait` returns at once.
        if outage.is_on or belongs_to_previous_outage:
            error.unreachable_peer = peer

    def _count_failure(self, peer: Peer, error: SyncError, began: float, now: float) -> None:
        """Count a failure, which may begin an outage. If it makes the host be given up, the error
        becomes not retryable.
        """
        outage = peer.outage
        before = outage.reach
        is_probe = self.is_probing(peer)
        if is_probe:
            self._probe_target.set(None)
        outage.record_failure(error, began, now, self._chance(), is_probe=is_probe)
        if outage.is_stopped and before is not Reach.STOPPED:
            _mark_given_up(error, peer)
        if outage.is_on and before is Reach.UP:
            name = peer.origin.authority
            patience = duration_text(outage.gives_up_at - outage.since)
            text = f"{_describe_wait(peer)}, for {patience} at most"
            self._log("warning", "outage", text, host=name)
            self._on_outage(peer)
        peer.notify()

    async def await_probe(self, peer: Peer, answer: Awaitable[_Answer]) -> _Answer:
        """Return the answer to a probe. If it does not arrive before the host is given up, the host
        is stopped and the error of the outage is raised. The error is retryable if another request
        has been answered meanwhile.
        """
        with anyio.CancelScope(deadline=peer.outage.gives_up_at):
            return await answer
        # The deadline has passed, so the block above was cancelled. The next request of this task
        # is not a probe.
        self._probe_target.set(None)
        peer.outage.stop_if_due(anyio.current_time())
        peer.notify()
        raise _error_of_outage(peer)

    # Waiting.

    def end_attempt(self) -> None:
        """Cancel the probe of this task if it was not sent."""
        peer = self._probe_target.get()
        if peer is not None:
            self._probe_target.set(None)
            peer.outage.cancel_probe()
            peer.notify()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Return a context for the work that a task attempts after `wait`. It calls `end_attempt`
        at its end.
        """
        try:
            yield
        finally:
            self.end_attempt()

    async def wait(self, error: SyncError, *, can_repeat: bool = True) -> None:
        """Wait until the host that caused an error is reachable again. Raises the error if the host
        is given up.

        One waiting task returns earlier: its next request probes the host. A task can probe only if
        `can_repeat`, which means that its next request can be sent again.
        """
        peer = error.unreachable_peer
        assert isinstance(peer, Peer)
        self.end_attempt()  # so that another task can probe the host
        waiter = _Waiter(can_repeat)
        peer.waiters.append(waiter)
        try:
            await self._wait_or_probe(waiter, peer)
        finally:
            peer.waiters.remove(waiter)
            peer.notify()  # another waiter may be the next to probe
        if peer.outage.is_stopped:
            _mark_given_up(error, peer)
            raise error

    async def retry_over_outages(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Call `ask`, and call it again after each outage that makes it fail. Returns its result.

        The request that `ask` sends must be repeatable.
        """
        while True:
            try:
                with self.attempt():
                    return await ask()
            except SyncError as error:
                if error.unreachable_peer is None or not error.retryable:
                    raise
                failure = error
            await self.wait(failure)

    async def _wait_or_probe(self, waiter: _Waiter, peer: Peer) -> None:
        """Return when the outage is over, the host is stopped, or the next request of this task is
        the probe.
        """
        outage = peer.outage
        while outage.is_on:
            now = anyio.current_time()
            is_next = peer.is_next(waiter)
            if is_next and outage.begin_probe(now):
                self._probe_target.set(peer)
                if waiter.can_probe:
                    return
                # No waiting task can probe. Send a simple request, then check its outcome.
                with self.attempt():
                    await self._ping(peer)
                continue
            if outage.stop_if_due(now):
                peer.notify()
                return
            wake_at = outage.gives_up_at
            if is_next and outage.reach is Reach.DOWN:
                wake_at = min(wake_at, outage.probe_at)
            with anyio.CancelScope(deadline=wake_at):
                await peer.changed.wait()


def _describe_wait(peer: Peer) -> str:
    """Name the host that is waited for, and the reason in a few words."""
    error = peer.outage.error
    assert error is not None
    cause = error.message
    if isinstance(error, WireError) and error.address == (peer.origin.host, peer.origin.port):
        cause = error.brief
    return f"waiting for {peer.origin.authority} ({cause})"


def _error_of_outage(peer: Peer) -> SyncError:
    """Return the error of a request that was not sent or not answered because of an outage. If the
    host was given up, the error is final. Otherwise it is retryable, whatever the last failure was.
    """
    assert peer.outage.error is not None
    error = peer.outage.error.copy_without_context()
    error.unreachable_peer = peer
    if peer.outage.is_stopped:
        _mark_given_up(error, peer)
    elif not isinstance(error, RegistryError):  # that of a gateway is retryable anyway
        error.retryable = True
    return error


def _mark_given_up(error: SyncError, peer: Peer) -> None:
    """Add to an error how long the host was waited for, and mark the error as not retryable."""
    waited = peer.outage.gives_up_at - peer.outage.since
    if math.isfinite(waited):
        error.message += f" (waited for {duration_text(waited)})"
    if isinstance(error, RegistryError):
        error.is_final = True
    else:
        error.retryable = False
