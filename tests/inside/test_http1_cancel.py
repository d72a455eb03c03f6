"""I9: cancelling at any await leaves the pool reusable and no connection behind.

Each scenario is run again and again, cancelled at its first checkpoint, its second, and so on until
it gets through. A checkpoint is wherever the code lets others run: a wait on a stream, a dial, a
piece.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest

from _regsync.errors import Disconnected, SyncError
from _regsync.net.http1 import Request
from _regsync.net.pool import Pool
from _regsync.net.streams import WANT_WRITE
from tests.inside.wires import ORIGIN, Blob, End, Pause, Wire, answer, pool_of

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

GET, POST, PUT = Request("GET", "/x"), Request("POST", "/u/"), Request("PUT", "/u/1")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Scene:
    """The wires that may be opened, and what is done with them."""

    wires: list[Wire]
    act: Callable[[Pool, Callable[[], None]], Awaitable[None]]
    blobs: list[Blob] = field(default_factory=list)


async def fetch(pool: Pool, tick: Callable[[], None]) -> None:
    async with pool.lease(ORIGIN) as lease:
        response = await lease.exchange(GET)
        buffer = memoryview(bytearray(4))
        while await response.read_into(buffer):
            pass


async def leave_unread(pool: Pool, tick: Callable[[], None]) -> None:
    async with pool.lease(ORIGIN) as lease:
        await lease.exchange(GET)


async def push(pool: Pool, tick: Callable[[], None]) -> None:
    blob = Blob(b"first", b"second", b"third", pause=1)
    blob.tick = tick
    async with pool.lease(ORIGIN) as lease:
        await lease.exchange(POST)
        response = await lease.exchange(PUT, 300, blob)
        await response.read(100)


def slow_get() -> Scene:
    parts = (Pause(1), b"hel", Pause(1), b"lo")
    return Scene([Wire(answers=((Pause(1), answer(b"hello")[:-5], *parts),))], fetch)


def chunked_get() -> Scene:
    return Scene(
        [Wire(answers=((CHUNKED, Pause(1), b"3\r\nabc\r\n", Pause(1), b"0\r\n\r\n"),))], fetch
    )


def unread_rest() -> Scene:
    return Scene([Wire(answers=((answer(b"hello")[:-3], Pause(0.1), b"llo"),))], leave_unread)


def upload() -> Scene:
    wire = Wire(
        sends=(1000, 1000, WANT_WRITE, 3, Pause(1), 2, WANT_WRITE),
        answers=((answer(status=202),), (Pause(1), answer(status=201))),
    )
    return Scene([wire], push)


def dead_idle() -> Scene:
    old = Wire(answers=((answer(status=202), Pause(0.5), End.EOF),))
    return Scene([old, Wire(answers=((answer(status=201),),))], push)


def early_answer() -> Scene:
    wire = Wire(answers=((answer(status=202),),))
    wire.after(120, Pause(0.5), answer(b"words", status=413))
    return Scene([wire], push)


def failed_write() -> Scene:
    wire = Wire(sends=(1000, 1000, End.RESET), answers=((answer(status=202),),))
    wire.after(120, Pause(2.5), answer(b"words", status=413))
    return Scene([wire], push)


SCENES = [slow_get, chunked_get, unread_rest, upload, dead_idle, early_answer, failed_write]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, tick: Callable[[], None]) -> Iterator[None]:
    """Count the checkpoints of the code under test."""
    real = anyio.lowlevel.checkpoint

    async def checkpoint() -> None:
        tick()
        await real()

    with monkeypatch.context() as patch:
        patch.setattr(anyio.lowlevel, "checkpoint", checkpoint)
        yield


async def cancelled_at(
    scene: Scene, count: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Pool, bool]:
    """Run a scene, cancelled at its checkpoint number `count`; tell whether it got that far."""
    pool, passed = pool_of(*scene.wires), 0
    scope = anyio.CancelScope()

    def tick() -> None:
        nonlocal passed
        passed += 1
        if passed == count:
            scope.cancel()

    for wire in scene.wires:
        wire.tick = tick
    with counted(monkeypatch, tick), scope:
        try:
            await scene.act(pool, tick)
        except SyncError:
            assert passed < count, "an error instead of the cancellation"
    return pool, passed >= count


@pytest.mark.parametrize("make", SCENES, ids=lambda make: make.__name__)
async def test_cancelling_at_any_await_leaves_the_pool_reusable(
    make: Callable[[], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, count = True, 0
    while reached:
        count += 1
        assert count < 500, "the scene never ends"
        scene = make()
        pool, reached = await cancelled_at(scene, count, monkeypatch)
        await anyio.sleep(10)
        for wire in scene.wires:
            wire.tick = lambda: None
        opened = [wire for wire in scene.wires if wire.dialled]
        assert sum(not wire.closed for wire in opened) == (pool.reuse(ORIGIN) is not None), (
            f"leak at {count}"
        )
    assert count > 4


@pytest.mark.parametrize("make", SCENES, ids=lambda make: make.__name__)
async def test_connection_that_survives_a_cancellation_has_nothing_left_to_say(
    make: Callable[[], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection in the middle of an exchange must never serve the next request."""
    reached, count = True, 0
    while reached:
        count += 1
        scene = make()
        pool, reached = await cancelled_at(scene, count, monkeypatch)
        for wire in scene.wires:
            wire.tick = lambda: None
            if not wire.closed and wire.requests:
                assert all(seen.whole for seen in wire.requests)
        survivor = pool.reuse(ORIGIN)
        if survivor is not None:
            (wire,) = (wire for wire in scene.wires if not wire.closed and wire.writes)
            wire.answers.clear()
            wire.answers.append((answer(b"mine"),))
            if End.EOF in wire.incoming:  # the peer leaves before it could answer, and says nothing
                with pytest.raises(Disconnected):
                    await survivor.exchange(GET, memoryview(b""), None, 60)
                assert survivor.can_repeat()
                continue
            response = await survivor.exchange(GET, memoryview(b""), None, 60)
            assert await response.read(10) == b"mine"


async def test_failed_dial_leaves_nothing() -> None:
    async def dial(origin: object) -> Wire:
        await anyio.sleep(1)
        raise SyncError("no")

    pool = Pool(dial, pool_of().timeouts)
    async with pool.lease(ORIGIN) as lease:
        with pytest.raises(SyncError):
            await lease.exchange(GET)
    assert pool.reuse(ORIGIN) is None


async def test_cancellation_after_a_whole_exchange_keeps_the_connection() -> None:
    wire = Wire(answers=((answer(b"abc"),),))
    pool = pool_of(wire)
    with anyio.CancelScope() as scope:
        async with pool.lease(ORIGIN) as lease:
            await (await lease.exchange(GET)).read(10)
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert not wire.closed
    assert pool.reuse(ORIGIN) is not None
