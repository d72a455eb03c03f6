"""`regsync lock` and runs from a lock: what they ask, what they copy, what they refuse."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from _regsync.text import parse_time
from tests.ends import Virtual, tags
from tests.mirrors import LockedMirror

DAY = 86_400.0


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> LockedMirror:
    return LockedMirror(world, tmp_path)


# What a lock costs, and what is in it.


async def test_first_seen_changes_with_the_digest_alone(mirror):
    mirror.push("v1")
    mirror.push("v2")
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    before = mirror.lines()
    await anyio.sleep(DAY)
    mirror.push("v2")
    await mirror.succeed("lock", "--recheck")
    after = mirror.lines()
    assert after["v1"] == before["v1"]
    assert parse_time(after["v2"]["first_seen"]) - parse_time(before["v2"]["first_seen"]) == DAY
