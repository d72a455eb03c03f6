"""The tasks that ask targets what they hold."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from _regsync.sync.discovery import TargetTag, TargetWorkers

TARGET: Any = None

pytestmark = pytest.mark.anyio


async def test_a_task_that_has_its_answer_asks_for_the_next_tag():
    tasks = set()
    most_at_once = at_once = 0

    async def ask(tag: TargetTag) -> None:
        nonlocal at_once, most_at_once
        tasks.add(anyio.get_current_task().id)
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        await checkpoint()
        at_once -= 1
        tag.digest = f"of {tag.reference}"

    workers = TargetWorkers(ask)
    async with workers.running():
        for look_up in range(5):
            tags = [TargetTag(TARGET, f"{look_up}.{number}", b"") for number in range(4)]
            answered_events = [workers.submit(tag) for tag in tags]
            for tag, answered_event in zip(tags, answered_events, strict=True):
                await answered_event.wait()
                assert tag.digest == f"of {tag.reference}"
    assert len(tasks) == most_at_once == 4


async def test_questions_without_an_answer_are_dropped_at_the_end():
    async def ask(tag: TargetTag) -> None:
        await anyio.sleep_forever()

    workers = TargetWorkers(ask)
    async with workers.running():
        workers.submit(TargetTag(TARGET, "v1", b""))
        await checkpoint()
