"""Where `min_age` keeps its times: what cannot be kept is an error before any request (docs/design.md
section 12, "Age").
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from _regsync.state.archive import RepositoryKey
from _regsync.state.seen import FirstSeen, SeenKey
from tests.ends import Ran, document, run_regsync, tags

MAPPING = {"from": "app", "tags": tags("v1"), "min_age": "3d"}
# Nobody answers there.
ENDS = {"source": "http://127.0.0.1:9", "target": "http://127.0.0.1:19"}


def run(file: Path, *options: str, env: Any = None, **top: Any) -> Ran:
    file.write_text(document(ENDS, MAPPING, **top))
    return run_regsync("sync", "--json", *options, "-c", str(file), env={"CI": "", **(env or {})})


def test_a_directory_of_another_user_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("_regsync.state.seen.os.access", lambda *_: False)
    ran = run(tmp_path / "mirror.yaml")
    assert (ran.status, "cannot keep: it cannot be written" in ran.err) == (3, True)
    # A dry run writes nothing.
    assert run(tmp_path / "mirror.yaml", "--dry-run").status == 2


# --- the file itself

WHERE = RepositoryKey("source.test", "app")
DIGEST = "sha256:" + "0" * 64


def first_seen(directory: Path, now: float, **more: Any) -> FirstSeen:
    made = FirstSeen(str(directory), lambda: now, lambda *_: None, **more)
    made.load()
    return made


async def test_of_two_sources_the_earlier_time_counts(tmp_path):
    known = {SeenKey(WHERE, DIGEST): 1000}
    assert (
        first_seen(tmp_path, 5000, locked_times=known).record_sighting(WHERE, DIGEST, 4001) == 5001
    )
    assert (
        first_seen(tmp_path, 5000, locked_times=known).record_sighting(WHERE, DIGEST, 4000) is None
    )
    # A time later than now counts as now.
    assert first_seen(tmp_path, 900, locked_times=known).record_sighting(WHERE, DIGEST, 50) == 950
    alone = FirstSeen(None, lambda: 5000, lambda *_: None, locked_times=known)
    alone.load()
    assert alone.record_sighting(WHERE, DIGEST, 4000) is None
    await alone.save()


async def test_what_is_written_is_read_again_and_nothing_else_is_left(tmp_path):
    one = first_seen(tmp_path, 5000)
    one.record_sighting(WHERE, DIGEST, 10)
    await one.save()
    assert sorted(os.listdir(tmp_path)) == ["seen.jsonl", "seen.lock"]
    before = (tmp_path / "seen.jsonl").stat()
    assert (tmp_path / "seen.jsonl").read_text() == (
        '{"seen": 1}\n{"source": "source.test/app", "digest": "' + DIGEST + '", '
        '"first_seen": "1970-01-01T01:23:20Z", "answered": "1970-01-01T01:23:20Z"}\n'
    )

    # What has nothing new writes nothing: the moment of the last answer is kept by the day.
    again = first_seen(tmp_path, 5000 + 86399)
    assert again.record_sighting(WHERE, DIGEST, 86400) == 5000 + 86400
    await again.save()
    assert (tmp_path / "seen.jsonl").stat().st_ino == before.st_ino
    later = first_seen(tmp_path, 5000 + 86400)
    later.record_sighting(WHERE, DIGEST, 10)
    await later.save()
    assert (tmp_path / "seen.jsonl").stat().st_ino != before.st_ino


async def test_of_two_processes_the_first_and_the_last_time_count(tmp_path):
    early = first_seen(tmp_path, 5000)
    late = first_seen(tmp_path, 9000)
    late.record_sighting(WHERE, DIGEST, 10)
    await late.save()
    early.record_sighting(WHERE, DIGEST, 10)
    await early.save()
    assert '"first_seen": "1970-01-01T01:23:20Z"' in (tmp_path / "seen.jsonl").read_text()
    assert '"answered": "1970-01-01T02:30:00Z"' in (tmp_path / "seen.jsonl").read_text()


ENTRY = {
    "source": "source.test/app",
    "digest": DIGEST,
    "first_seen": "2026-01-01T00:00:00Z",
    "answered": "2026-01-01T00:00:00Z",
}
JANUARY = 1767225600


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[" * 10000,
        b"\xff\xfe",
        b'{"seen": 1}',
        *(
            json.dumps({**ENTRY, **change}).encode()
            for change in (
                {"source": "app"},
                {"source": 1},
                {"digest": None},
                {"first_seen": "2026-01-01"},
                {"first_seen": "2026-13-01T00:00:00Z"},
                {"answered": "0000-00-00T00:00:00Z"},
                {"ahead": "soon"},
            )
        ),
    ],
)
async def test_a_line_that_is_no_entry_is_skipped_and_goes(tmp_path, line):
    file = tmp_path / "seen.jsonl"
    other = {**ENTRY, "digest": DIGEST.replace("0", "1")}
    file.write_bytes(b'{"seen": 1}\n%b\n%b\n' % (line, json.dumps(other).encode()))
    said = list[tuple[str, ...]]()
    made = FirstSeen(str(tmp_path), lambda: JANUARY + 86400, lambda *words: said.append(words))
    made.load()
    assert made.record_sighting(WHERE, str(other["digest"]), 86400) is None
    assert made.record_sighting(WHERE, DIGEST, 86400) == JANUARY + 2 * 86400
    await made.save()
    assert [(level, "line 2" in text) for level, _, text in said] == [("warning", True)]
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.virtual_time
async def test_a_saving_waits_for_another_one_and_not_for_ever(tmp_path):
    lock = os.open(tmp_path / "seen.lock", os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one = first_seen(tmp_path, 5000)
        one.record_sighting(WHERE, DIGEST, 10)
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.save)
            await anyio.sleep(1.5)
            assert not (tmp_path / "seen.jsonl").exists()
        assert round(anyio.current_time() - began, 3) == 2.0
    finally:
        os.close(lock)
    assert (tmp_path / "seen.jsonl").exists()
