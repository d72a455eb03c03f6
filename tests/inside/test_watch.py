"""Watch mode: cycle after cycle with the same clients, told only what changes (docs/design.md
section 10).
"""

from __future__ import annotations

import sqlite3
from typing import Any

from _regsync.state import sqlite
from tests.ends import tags
from tests.states import entries
from tests.watching import lines

# State.


async def test_what_a_full_disk_does_not_take_is_remembered_until_there_is_room(
    stage, tmp_path, monkeypatch
):
    connect = sqlite._connect

    def on_full_disk(*given: Any) -> sqlite3.Connection:
        connection = connect(*given)
        connection.execute("PRAGMA max_page_count = 1").fetchall()
        return connection

    for n in range(3):
        stage.load(f"v{n}")
    stage.write({"from": "app", "tags": tags("v*")})
    monkeypatch.setattr(sqlite, "_connect", on_full_disk)
    ran = await stage.watch(None, None, None, monkeypatch.undo, None)
    assert stage.asked[1:] == [({"GET tag_list": 1, "HEAD manifest": 3}, {"HEAD manifest": 3})] * 5
    assert len(lines(ran, "warning: no state", "is full")) == 1
    assert entries(tmp_path / ".regsync") > 0
    stage.source.journal.clear()
    stage.target.journal.clear()
    await stage.watch()
    assert stage.asked[-1] == ({"GET tag_list": 1, "HEAD manifest": 3}, {"HEAD manifest": 3}), (
        "of a new process"
    )


async def test_what_another_process_has_locked_is_remembered_here(stage, tmp_path):
    from _regsync.state.database import StateFile

    def quiet(level: str, event: str, message: str) -> None:
        pass

    for n in range(3):
        stage.load(f"v{n}")
    stage.write({"from": "app", "tags": tags("v*")})
    other = StateFile(str(tmp_path / ".regsync"), quiet)
    other.load()
    ran = await stage.watch(None, None, None)
    assert stage.asked[1:] == [({"GET tag_list": 1, "HEAD manifest": 3}, {"HEAD manifest": 3})] * 3
    assert len(lines(ran, "warning: another run")) == 1
    assert entries(tmp_path / ".regsync") == 0
    other.close()
    await stage.watch()
    assert entries(tmp_path / ".regsync") > 0
