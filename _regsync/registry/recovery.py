"""The waiting for hosts that are away, and who of those that wait probes them.

Owns: the outages of a run by host, the tasks that wait for each, what is told about them.
May not know: what a request says, permits, windows.
Invariants: who waits here holds no permit and no connection (I8); a probe that was not sent is
given back, whatever becomes of its task (I9).
Follows: docs/design.md section 9 ("Outages"); `outage` has the states.
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
    """A host that a run asks, whoever leads there: a registry, a token service, a store of blobs."""

    def __init__(self, origin: Origin, outage: Outage) -> None:
        self.origin = origin
        self.url = str(origin)
        self.outage = outage

        # Who waits, in the order of arrival.
        self.waiting: list[_Waiter] = []

        # Set, and replaced, when those who wait have to look again.
        self.changed = anyio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def is_next(self, waiter: _Waiter) -> bool:
        """Ask who probes: the first whose request can be repeated, or else the first of all."""
        able = (other for other in self.waiting if other.may_probe)
        return next(able, self.waiting[0]) is waiter


class _Waiter:
    def __init__(self, may_probe: bool) -> None:
        self.may_probe = may_probe  # its next request can be a probe


class Recovery:
    """All hosts of a process's runs, and the waiting for those that are away.

    `ping` asks a host anything at all, where nobody who waits has a request that can be repeated.
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
        self._peers: dict[tuple[str, str, int], Peer] = {}  # by the address of the origin

        # The host that this task's next request is to probe.
        self._probed: ContextVar[Peer | None] = ContextVar("probed", default=None)

    def peer(self, origin: Origin) -> Peer:
        """Return what is known of the host of an origin."""
        peer = self._peers.get(origin.address)
        if peer is None:
            peer = Peer(origin, Outage(self._patience))
            self._peers[origin.address] = peer
        return peer

    def begin_run(self) -> None:
        """Begin another run: a host that was stopped is tried once."""
        for peer in self._peers.values():
            peer.outage.begin_run()

    def is_waiting(self) -> bool:
        """Ask whether anybody waits for a host that is away."""
        return any(peer.waiting for peer in self._peers.values())

    def count_probes(self) -> int:
        return [peer.outage.reach for peer in self._peers.values()].count(Reach.PROBED)

    def describe(self, now: float) -> dict[str, str]:
        """Say in a few words, by host, which hosts are waited for, the longest absent first."""
        away = [peer for peer in self._peers.values() if peer.outage.is_on and peer.waiting]
        away.sort(key=lambda peer: peer.outage.since)
        return {
            peer.origin.authority: f"{_waiting_for(peer)}, {duration_text(now - peer.outage.since)}"
            for peer in away
        }

    # What requests meet.

    def is_probing(self, peer: Peer) -> bool:
        """Ask whether this task's request is the probe of a host."""
        return self._probed.get() is peer

    def check(self, peer: Peer, *, can_repeat: bool) -> None:
        """Raise what a host that is away fails with, unless this is the request that probes it."""
        outage = peer.outage
        if outage.reach is Reach.UP or (can_repeat and self.is_probing(peer)):
            return
        assert outage.error is not None
        error = outage.error.without_place()
        error.unreachable_peer = peer
        if not outage.is_on:
            _give_up(error, peer)
        raise error

    def record_answer(self, peer: Peer, now: float) -> None:
        outage = peer.outage
        if self.is_probing(peer):
            self._probed.set(None)
        if outage.record_answer(now):
            away = duration_text(now - outage.since)
            name = peer.origin.authority
            self._log("info", "back", f"{name} answers again, after {away}", host=name)
            self._on_back(peer)
            peer.notify()

    def record_failure(
        self, peer: Peer, error: SyncError, began: float, *, counts: bool = True
    ) -> None:
        """Take in that a request failed which was sent at `began`; without `counts` it says nothing
        about the host. The error of an outage gets to know its host.
        """
        outage = peer.outage
        now = anyio.current_time()
        if not is_outage(error):
            self.record_answer(peer, now)
            return
        if began < outage.back_at and not outage.is_on:
            error.unreachable_peer = peer  # the one that is over
            return
        if not counts:
            error.unreachable_peer = peer if outage.is_on else None
            return
        was_stopped = outage.is_stopped
        was_on = outage.is_on
        is_probe = self.is_probing(peer)
        if is_probe:
            self._probed.set(None)
        outage.record_failure(error, began, now, self._chance(), is_probe=is_probe)
        if outage.is_on:
            error.unreachable_peer = peer
        elif outage.is_stopped and not was_stopped:
            _give_up(error, peer)
        if outage.is_on and not was_on:
            name = peer.origin.authority
            patience = duration_text(outage.gives_up_at - outage.since)
            text = f"{_waiting_for(peer)}, for {patience} at most"
            self._log("warning", "outage", text, host=name)
            self._on_outage(peer)
        peer.notify()

    async def await_probe(self, peer: Peer, answering: Awaitable[_Answer]) -> _Answer:
        """Wait for the answer to a probe until its host is given up; then it fails as the last one."""
        with anyio.CancelScope(deadline=peer.outage.gives_up_at):
            return await answering
        self._probed.set(None)
        peer.outage.stop_if_due(anyio.current_time())
        peer.notify()
        assert peer.outage.error is not None
        error = peer.outage.error.without_place()
        _give_up(error, peer)
        raise error

    # The waiting.

    def end_attempt(self) -> None:
        """Give back the probe that this task was to send, if it has not."""
        peer = self._probed.get()
        if peer is not None:
            self._probed.set(None)
            peer.outage.cancel_probe()
            peer.notify()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Do what a task attempts after `wait`, and `end_attempt`."""
        try:
            yield
        finally:
            self.end_attempt()

    async def wait(self, error: SyncError, *, can_repeat: bool = True) -> None:
        """Wait until the host that an error came from is back. Raise the error when it is given up.

        One of those who wait returns earlier: its next request is the probe of the host. That is one
        whose request can be repeated, where there is such a one.
        """
        peer = error.unreachable_peer  # the host; `Peer.outage` is its state
        assert isinstance(peer, Peer)
        self.end_attempt()
        waiter = _Waiter(can_repeat)
        peer.waiting.append(waiter)
        try:
            await self._wait_as(waiter, peer)
        finally:
            peer.waiting.remove(waiter)
            peer.notify()
        if peer.outage.is_stopped:
            _give_up(error, peer)
            raise error

    async def retry_over_outages(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Ask, by a request that can be repeated, and again whenever the host was away meanwhile."""
        while True:
            try:
                with self.attempt():
                    return await ask()
            except SyncError as error:
                if error.unreachable_peer is None or not error.retryable:
                    raise
                failure = error
            await self.wait(failure)

    async def _wait_as(self, waiter: _Waiter, peer: Peer) -> None:
        outage = peer.outage
        while outage.is_on:
            now = anyio.current_time()
            until = outage.gives_up_at
            if outage.reach is Reach.DOWN and peer.is_next(waiter):
                if outage.begin_probe(now):
                    self._probed.set(peer)
                    if waiter.may_probe:
                        return
                    with self.attempt():
                        await self._ping(peer)
                    continue
                until = min(until, outage.probe_at)
            if outage.stop_if_due(now):
                peer.notify()
                return
            with anyio.CancelScope(deadline=until):
                await peer.changed.wait()


def _waiting_for(peer: Peer) -> str:
    """Say which host is waited for, and in short why."""
    error = peer.outage.error
    assert error is not None
    cause = error.message
    if isinstance(error, WireError) and error.address == (peer.origin.host, peer.origin.port):
        cause = error.brief
    return f"waiting for {peer.origin.authority} ({cause})"


def _give_up(error: SyncError, peer: Peer) -> None:
    """Say in an error how long the host was waited for; it is not tried again."""
    waited = peer.outage.gives_up_at - peer.outage.since
    if math.isfinite(waited):
        error.message += f" (waited for {duration_text(waited)})"
    if isinstance(error, RegistryError):
        error.final = True
    else:
        error.retryable = False
