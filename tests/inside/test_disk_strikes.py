"""A disk that takes only a part of each write, which no disk of a test machine does by itself: the
program's own file class is replaced. The scene is the fault matrix's (tests/fault_matrix.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest

from _regsync.sync import staging
from tests.fault_matrix import Case, Scene, judge


@contextlib.asynccontextmanager
async def short_writes(scene: Scene, times: int | None) -> AsyncIterator[None]:
    struck = 0

    class Short(staging.FileIO):
        def write(self, data: Any, /) -> Any:
            nonlocal struck
            struck += 1
            return super().write(bytes(data)[:1000])

    with mock.patch.object(staging, "FileIO", Short):
        yield
    assert struck


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_staged_blobs_are_whole_whatever_part_of_a_write_the_disk_takes():
    await judge(Case("disk-stage_short-full-ever", "large", short_writes, None, True))
