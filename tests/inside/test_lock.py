"""`regsync lock` and runs from a lock: what they ask, what they copy, what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from _regsync.app import locking
from _regsync.errors import RegsyncError
from _regsync.sync.lockfile import Lock
from tests.ends import Virtual, tags
from tests.mirrors import LockedMirror


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> LockedMirror:
    return LockedMirror(world, tmp_path)


# The file.


async def test_of_two_processes_one_writes(mirror):
    mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v1")})
    file = locking.open_lock(str(mirror.lock))
    await mirror.succeed("lock")
    theirs = mirror.lock.read_text()
    with pytest.raises(RegsyncError, match="something else changed it") as refused:
        locking.replace_lock(file, Lock())
    assert refused.value.hint == "run `regsync lock` again"
    assert mirror.lock.read_text() == theirs

    file = locking.open_lock(str(mirror.lock))
    mirror.lock.unlink()
    with pytest.raises(RegsyncError, match="something else"):
        locking.replace_lock(file, Lock())
