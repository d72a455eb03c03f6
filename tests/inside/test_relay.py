"""A blob on its way from its source: what is still at hand when its target has refused it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from _regsync.crypto import new_hash
from _regsync.net.http1 import PIECE, Buffers
from _regsync.oci import Descriptor, digest_of
from _regsync.sync.relay import Relay

pytestmark = pytest.mark.anyio


class Answer:
    """The body of a blob from a byte on, so many bytes at a time."""

    def __init__(self, body: bytes, step: int) -> None:
        self.body = body
        self.step = step

    async def read_into(self, buffer: memoryview) -> int:
        piece = self.body[: min(self.step, len(buffer))]
        buffer[: len(piece)] = piece
        self.body = self.body[len(piece) :]
        return len(piece)


def relay_of(body: bytes, step: int) -> Any:
    """Return the relay of a source that gives `body`, `step` bytes at a time."""

    @contextmanager
    def adding_context(*_: object) -> Iterator[None]:
        yield

    async def open_blob(
        blob: object, offset: int, *, is_fresh: bool
    ) -> AbstractAsyncContextManager[Answer]:
        return nullcontext(Answer(body[offset:], step))

    source: Any = SimpleNamespace(
        name_of=str, adding_context=adding_context, open_blob=open_blob, host=None
    )
    transport: Any = SimpleNamespace(buffers=Buffers(), count_read=lambda count: None)
    blob = Descriptor("application/octet-stream", digest_of(body), len(body))
    return Relay(source, blob, transport)


async def sent(relay: Any) -> bytes:
    pieces = bytearray()
    while piece := await relay.next():
        pieces += piece
    return bytes(pieces)


@pytest.mark.parametrize("step", [1, 7, 1000, PIECE])
@pytest.mark.parametrize("size", [1, 999, 1000, 5001])
async def test_a_small_blob_is_whole_in_memory_when_it_is_verified(size: int, step: int) -> None:
    body = bytes(range(256)) * 20
    relay = relay_of(body[:size], step)
    async with relay.opened():
        assert relay.whole_body() is None
        assert await sent(relay) == body[:size]
        assert bytes(relay.whole_body()) == body[:size]


async def test_a_blob_whose_beginning_was_read_before_is_not_whole() -> None:
    body = bytes(range(256)) * 20
    relay = relay_of(body, 700)
    relay.continue_from(1000, new_hash("sha256", body[:1000]))
    async with relay.opened(1000):
        assert await sent(relay) == body[1000:]
        assert relay.whole_body() is None


async def test_a_blob_that_is_larger_than_a_piece_is_not_whole() -> None:
    body = bytes(3 * PIECE)
    relay = relay_of(body, PIECE)
    async with relay.opened():
        assert await sent(relay) == body
        assert relay.whole_body() is None
