"""What goes wrong at night: registries that hang, drop answers or ask for hours, and a stop in
between.

Each test says how far the failure reaches, what it costs in requests, and what the operator is
told.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from _regsync.errors import ContentError, SyncError
from _regsync.sync.once import Once
from conformance.content.images import Image, Seed
from conformance.server.sockets import Server


@pytest.fixture
def image(source: Server) -> Image:
    return Seed(11).image().load_into(source.app, "app", tag="v1")


async def test_what_fails_is_asked_once_by_all_that_want_it():
    once = Once[int]()
    asked: list[str] = []
    errors: list[SyncError] = []

    async def ask() -> int:
        asked.append("")
        await anyio.lowlevel.checkpoint()
        raise ContentError("no such thing")

    async def want() -> None:
        try:
            await once.get(ask)
        except SyncError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(want)
    assert (len(asked), len(errors)) == (1, 3)
