"""The state on disk: what is put is found again, by whoever may, and no disk stops a run."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.state import database, sqlite
from _regsync.state.archive import (
    Archive,
    ArtifactCheck,
    BlobEntry,
    Fact,
    ManifestEntry,
    MemoryArchive,
    RepositoryKey,
    Snapshot,
    SnapshotEntry,
    hashed_key,
    key_of,
)
from _regsync.state.database import COMMIT_SECONDS, StateFile
from tests.ends import ROOT
from tests.fuzzing import fuzz
from tests.states import entries, rows

KEYS = [key_of(f"sha256:{number:064x}") for number in range(6)]
KEYS.append(key_of(f"sha512:{1:0128x}"))
WHERES = [
    RepositoryKey(*where)
    for where in (("host:5000", "repo"), ("host:5000", "other/repo"), ("else", "repo"))
]
NAMES = [hashed_key("a"), hashed_key("b")]
HERE = WHERES[0]


class Said(list[tuple[str, str]]):
    """What was logged: level and message."""

    def __call__(self, level: str, event: str, message: str) -> None:
        self.append((level, message))


@contextmanager
def opened(directory: Path, said: Said | None = None, **options: Any) -> Iterator[StateFile]:
    """Give a state between `load` and `close`; without `said` nothing may be logged."""
    heard = Said() if said is None else said
    state = StateFile(str(directory), heard)
    state.load(**options)
    yield state
    state.close()
    if said is None:
        assert heard == []


def put_blobs(state: StateFile, *numbers: int) -> None:
    for number in numbers:
        state.put_blob(HERE, KEYS[number], BlobEntry(5, False))


def blobs(state: StateFile) -> set[int]:
    return {number for number, key in enumerate(KEYS) if state.blob(HERE, key)}


def made(directory: Path, *numbers: int) -> Path:
    """Write a state with these blobs; return the file."""
    with opened(directory) as state:
        put_blobs(state, *numbers)
    return directory / "state.db"


def listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# What is put is found again.

MOMENTS = st.integers(0, 2**40)
BLOB = st.builds(BlobEntry, MOMENTS, st.booleans())
MANIFEST = st.builds(
    ManifestEntry, MOMENTS, *[st.lists(st.sampled_from(KEYS), max_size=3).map(tuple)] * 2
)
SNAPSHOT = st.builds(
    SnapshotEntry, MOMENTS, st.builds(Snapshot, st.sampled_from(KEYS), st.sampled_from(KEYS))
)
LOOK = st.builds(ArtifactCheck, MOMENTS, MOMENTS, st.integers(0, 255), st.binary(max_size=8))
FACT = st.builds(
    Fact,
    st.sampled_from(["mounts", "login"]),
    st.sampled_from(["", "library"]),
    st.none() | st.booleans() | st.integers(0, 9) | st.lists(st.text(max_size=3), max_size=2),
    MOMENTS,
)
WHERE = st.sampled_from(WHERES)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put_blob"), WHERE, st.sampled_from(KEYS), BLOB),
        st.tuples(st.just("put_manifest"), WHERE, st.sampled_from(KEYS), MANIFEST),
        st.tuples(st.just("put_snapshot"), st.sampled_from(NAMES), SNAPSHOT),
        st.tuples(st.just("put_artifact_check"), st.sampled_from(NAMES), LOOK),
        st.tuples(st.just("put_fact"), st.sampled_from(["host:5000", "else"]), FACT),
        st.tuples(st.just("forget"), WHERE, st.lists(st.sampled_from(KEYS), max_size=2)),
        st.just(("commit",)),
        st.just(("again",)),
    ),
    max_size=12,
)


def answers(archive: Archive) -> list[object]:
    """Return all that an archive can be asked."""
    holders = [
        sorted(archive.holders_of(host, key).items())
        for host in ("host:5000", "else")
        for key in KEYS
    ]
    return [
        [archive.blob(where, key) for where in WHERES for key in KEYS],
        [archive.manifest(where, key) for where in WHERES for key in KEYS],
        [archive.manifest_times(where, KEYS) for where in WHERES],
        archive.snapshots(NAMES),
        [archive.artifact_check(name) for name in NAMES],
        [sorted(map(repr, archive.facts_of(host))) for host in ("host:5000", "else")],
        holders,
    ]


@fuzz(60)
@given(STEPS)
def test_a_file_answers_as_memory_does_however_often_it_is_written_and_opened(
    steps: list[tuple[Any, ...]],
) -> None:
    with TemporaryDirectory() as directory:
        said = Said()
        memory = MemoryArchive()
        state = StateFile(directory, said)
        state.load()
        for name, *arguments in steps:
            if name == "again":
                state.close()
                state.load()
            else:
                getattr(state, name)(*arguments)
                if name != "commit":
                    getattr(memory, name)(*arguments)
            assert answers(state) == answers(memory)
        state.close()
        with opened(Path(directory), may_write=False) as reader:
            assert answers(reader) == answers(memory)
        assert said == []


def test_a_state_is_two_files_for_their_user_alone(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made(cache, 1)
    assert sorted(path.name for path in cache.iterdir()) == ["state.db", "state.lock"]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o600}
    with opened(cache) as state:
        assert state.is_writer
        assert state.is_used
        assert blobs(state) == {1}


def test_a_file_has_a_rollback_journal_and_says_its_version(tmp_path: Path) -> None:
    made(tmp_path, 1)
    with closing(sqlite3.connect(tmp_path / "state.db")) as file:
        assert file.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert file.execute("PRAGMA user_version").fetchone() > (0,)
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_mount_sources_are_those_confirmed_last_and_no_more_than_are_tried(tmp_path: Path) -> None:
    with opened(tmp_path) as state:
        for number in range(100):
            state.put_blob(
                RepositoryKey("host", f"app-{number}"), KEYS[0], BlobEntry(number, number % 2 == 0)
            )
        state.put_blob(RepositoryKey("else", "app"), KEYS[0], BlobEntry(200, True))
    with opened(tmp_path) as state:
        holders = state.holders_of("host", KEYS[0])
        wanted = [(f"app-{number}", number) for number in range(98, 34, -2)]
        assert list(holders.items()) == wanted
        state.forget(RepositoryKey("host", "app-98"), [KEYS[0]])
        assert wanted[0][0] not in state.holders_of("host", KEYS[0])


def test_what_is_too_old_is_removed_from_the_file(tmp_path: Path) -> None:
    with opened(tmp_path) as state:
        for moment, key, name in ((4, KEYS[0], NAMES[0]), (5, KEYS[1], NAMES[1])):
            state.put_blob(HERE, key, BlobEntry(moment, True))
            state.put_manifest(HERE, key, ManifestEntry(moment, (), ()))
            state.put_snapshot(name, SnapshotEntry(moment, Snapshot(key, key)))
            state.put_artifact_check(name, ArtifactCheck(moment, 1, 1, b""))
            state.put_fact("host", Fact("mounts", str(moment), True, moment))
        state.sweep(9, entries_before=5, checks_before=5, facts_before=5)
        assert state.swept_at == 9
    assert {table: len(found) for table, found in rows(tmp_path).items()} == dict.fromkeys(
        ("blob", "manifest", "snapshot", "look", "fact", "swept"), 1
    )
    with opened(tmp_path) as state:
        assert (state.swept_at, blobs(state)) == (9, {1})


@pytest.mark.rule("R16")
def test_files_of_the_earlier_format_go_and_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "state.bin").write_bytes(b"regsync\n and more")
    (tmp_path / "state.journal").write_bytes(b"another program's")
    with opened(tmp_path):
        assert not (tmp_path / "state.bin").exists()
        assert (tmp_path / "state.journal").exists()
    (tmp_path / "state.journal").write_bytes(b"regsyncj and more")
    with opened(tmp_path, may_write=False):
        assert (tmp_path / "state.journal").exists(), "who has no lock removes nothing"
    with opened(tmp_path):
        assert not (tmp_path / "state.journal").exists()


# When it is written.


def test_a_thousand_entries_are_written_without_being_asked(tmp_path: Path) -> None:
    with opened(tmp_path) as state:
        for number in range(1000):
            assert entries(tmp_path) == 0
            state.put_blob(HERE, key_of(f"sha256:{number:064x}"), BlobEntry(5, True))
        assert entries(tmp_path) == 1000


@pytest.mark.anyio
async def test_what_is_noted_is_written_soon_and_by_no_run_that_keeps_nothing(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as state:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(state.commit_regularly)
            for number in range(2):
                put_blobs(state, number)
                await anyio.sleep(COMMIT_SECONDS + 0.2)
                assert entries(tmp_path) == number + 1
            tasks.cancel_scope.cancel()
    with opened(tmp_path, may_write=False) as reader, anyio.fail_after(5):
        await reader.commit_regularly()


KILLED = """
import os, signal, sys
from _regsync.state.database import StateFile
from _regsync.state.archive import BlobEntry, RepositoryKey, key_of
state = StateFile(sys.argv[1], print)
state.load()
number = 0
while True:
    for _ in range(7):
        state.put_blob(RepositoryKey("host:5000", "repo"), key_of(f"sha256:{number:064x}"), BlobEntry(5, True))
        number += 1
    state.commit()
    print(number, flush=True)
"""


@pytest.mark.parametrize("after", [0.0, 0.03, 0.11])
def test_a_kill_loses_nothing_that_was_committed(tmp_path: Path, after: float) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(after)
        process.kill()
        committed = int([first, *process.stdout.read().split()][-1])
    assert process.returncode == -signal.SIGKILL
    with opened(tmp_path) as state:
        found = [
            state.blob(HERE, key_of(f"sha256:{number:064x}")) for number in range(committed + 8)
        ]
    assert all(found[:committed])
    assert found[committed:] in ([None] * 8, [BlobEntry(5, True)] * 7 + [None])


def states_of_a_commit(directory: Path) -> Iterator[dict[str, bytes]]:
    """Give the files as they stand after each write of one commit, as SQLite does them.

    First the journal is written, then the pages of the database one after the other, then the journal is removed.
    """
    many = [key_of(f"sha256:{number:064x}") for number in range(300)]
    path = directory / "state.db"
    with opened(directory) as state:
        put_blobs(state, 0, 1, 2)
        for key in many:
            state.put_blob(RepositoryKey("host:5000", "many"), key, BlobEntry(5, True))
        state.commit()
        before = path.read_bytes()

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            # While somebody reads, SQLite writes the journal and then has to wait.
            other.execute("BEGIN")
            other.execute("SELECT * FROM blob").fetchone()
            put_blobs(state, 3)
            state.forget(HERE, [KEYS[0]])
            for key in many[::50]:
                state.put_blob(RepositoryKey("host:5000", "many"), key, BlobEntry(6, True))
            journal = b""
            connection = state._connection
            assert connection is not None
            for statement, values in database._statements(state._unsaved):
                connection.executemany(statement, values)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                connection.execute("COMMIT")
            journal = (directory / "state.db-journal").read_bytes()
            other.execute("COMMIT")
            connection.execute("ROLLBACK")
            connection.execute("BEGIN")
        state.commit()
    after = path.read_bytes()
    assert len(journal) > 512
    assert before != after

    for end in range(0, len(journal), 512):
        yield {"state.db": before, "state.db-journal": journal[:end]}
    size = 4096
    for end in range(0, len(after) + 1, size):
        yield {"state.db": after[:end] + before[end:], "state.db-journal": journal}
    yield {"state.db": after}


def test_a_kill_at_each_write_of_a_commit_leaves_what_was_there_before_or_after(
    tmp_path: Path,
) -> None:
    seen = set()
    for number, files in enumerate(states_of_a_commit(tmp_path / "one")):
        place = tmp_path / str(number)
        place.mkdir()
        for name, content in files.items():
            (place / name).write_bytes(content)
        # Beside a killed run, who may not write reads what is whole or nothing, and repairs nothing.
        said = Said()
        with opened(place, said, may_write=False) as reader:
            assert blobs(reader) in (set(), {0, 1, 2}, {1, 2, 3})
        assert [level for level, _ in said] in ([], ["info"])
        assert listing(place) == files

        with opened(place) as state:
            found = blobs(state)
            put_blobs(state, 4)
        assert found in ({0, 1, 2}, {1, 2, 3})
        seen.add(frozenset(found))
        with opened(place) as state:
            assert blobs(state) == found | {4}
        assert sorted(listing(place)) == ["state.db", "state.lock"]
    assert len(seen) == 2


LIMITED = """
import resource, signal, sys
from _regsync.state.database import StateFile
from _regsync.state.archive import BlobEntry, RepositoryKey, key_of
directory, limit, action = sys.argv[1], int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
signal.signal(signal.SIGXFSZ, getattr(signal, action))
state = StateFile(directory, lambda *said: print(*said))
state.load()
for number in range(300):
    state.put_blob(RepositoryKey("host:5000", "repo"), key_of(f"sha256:{number:064x}"), BlobEntry(5, True))
    if number % 50 == 0:
        state.commit()
state.close()
"""


@pytest.mark.parametrize("action", ["SIG_DFL", "SIG_IGN"], ids=["killed", "refused"])
@pytest.mark.parametrize("limit", [0, 400, 6000, 24_576, 200_000])
def test_where_files_may_not_grow_further_what_was_committed_before_is_there(
    tmp_path: Path, limit: int, action: str
) -> None:
    """A process is killed, or refused, at the first write beyond a size of any of its files."""
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(limit), action],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if action == "SIG_DFL":
        assert ran.returncode in (0, -signal.SIGXFSZ)
    else:
        assert (ran.returncode, ran.stderr) == (0, "")
        assert len(ran.stdout.splitlines()) <= 1, "one warning"
        assert all(line.startswith("warning state ") for line in ran.stdout.splitlines())

    with opened(tmp_path) as state:
        found = [bool(state.blob(HERE, key_of(f"sha256:{each:064x}"))) for each in range(300)]
        put_blobs(state, 6)
    assert found == sorted(found, reverse=True)
    assert sum(found) % 50 in (0, 1), "whole commits, in their order"
    assert all(found) or limit < 200_000
    with opened(tmp_path) as state:
        assert 6 in blobs(state)


# A second process.


def test_a_second_run_reads_and_leaves_nothing_behind(tmp_path: Path) -> None:
    made(tmp_path, 1)
    with opened(tmp_path) as first:
        put_blobs(first, 2)
        before = listing(tmp_path)
        said = Said()
        with opened(tmp_path, said) as second:
            assert (second.is_writer, second.is_used) == (False, True)
            assert blobs(second) == {1}
            put_blobs(second, 3)
            second.forget(HERE, [KEYS[1]])
            assert blobs(second) == set(), "what it was answered otherwise is forgotten in its run"
            second.commit()
            # It has no transaction open: the first one can write, and what it wrote is read.
            first.commit()
            assert blobs(second) == {2}
        assert said == [
            ("warning", f"another run uses {tmp_path}: this one reads the state and saves nothing")
        ]
        assert sorted(listing(tmp_path)) == sorted(before)
    with opened(tmp_path) as after:
        assert blobs(after) == {1, 2}


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "none", may_write=False) as state:
        assert (state.is_writer, state.is_used) == (False, True)
        assert blobs(state) == set()
        put_blobs(state, 1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("has_header", [False, True])
def test_a_reader_takes_a_file_whose_tables_are_not_made_yet_for_an_empty_one(
    tmp_path: Path, has_header: bool
) -> None:
    path = tmp_path / "state.db"
    path.touch()
    if has_header:
        with closing(sqlite3.connect(path)) as other:
            other.execute(f"PRAGMA application_id = {sqlite._APPLICATION_ID}")
            other.execute(f"PRAGMA user_version = {sqlite._VERSION}")
    with opened(tmp_path, may_write=False) as state:
        assert (state.is_used, blobs(state)) == (True, set())


def test_a_reader_gives_up_when_the_file_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database._BUSY_SECONDS == 2.0
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.2)
    path = made(tmp_path, 1)
    said = Said()
    with opened(tmp_path, said, may_write=False) as reader:
        assert blobs(reader) == {1}
        with closing(sqlite3.connect(path, isolation_level=None)) as writer:
            writer.execute("BEGIN EXCLUSIVE")
            assert blobs(reader) == set()
            again = Said()
            with opened(tmp_path, again, may_write=False) as second:
                assert not second.is_used
        assert blobs(reader) == set(), "it has given up"
    text = f"the state in {tmp_path} is not used: another run has not finished writing it"
    assert said == again == [("info", text)]


def test_a_writer_that_finds_the_file_locked_keeps_what_it_noted(tmp_path: Path) -> None:
    path = made(tmp_path, 1)
    with opened(tmp_path) as state, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM blob").fetchone()
        put_blobs(state, 2)
        state.commit()
        assert state.is_writer
        assert blobs(state) == {1, 2}
        other.execute("COMMIT")
        state.commit()
        assert entries(tmp_path) == 2


def test_a_file_that_is_locked_to_the_end_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.1)
    path = made(tmp_path, 1)
    said = Said()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        with opened(tmp_path, said) as state:
            other.execute("BEGIN")
            other.execute("SELECT * FROM blob").fetchone()
            put_blobs(state, 2)
        other.execute("COMMIT")
    assert said == [("warning", f"the state in {tmp_path} is not saved: it is locked")]
    with opened(tmp_path) as state:
        assert blobs(state) == {1}


# Damage, and files that are not ours.


def harmed(path: Path, harm: str) -> None:
    whole = path.read_bytes()
    if harm in ("columns", "trigger", "wal", "version"):
        statements = {
            "columns": "ALTER TABLE look ADD COLUMN more",
            "trigger": "CREATE TRIGGER more AFTER DELETE ON blob BEGIN DELETE FROM look; END",
            "wal": "PRAGMA journal_mode = WAL",
            "version": "PRAGMA user_version = 1",
        }
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            file.execute(statements[harm]).fetchall()
        return
    broken = {
        "cut in the header": whole[:50],
        "cut": whole[:5000],
        "magic": b"nothing!" + whole[8:],
        "short": b"x",
        "zeros": bytes(len(whole)),
        "schema": whole[:100] + bytes(3996) + whole[4096:],
        "name": whole.replace(b"tablefact", b"tablef\x87ct"),
    }
    path.write_bytes(broken[harm])


@pytest.mark.parametrize(
    "harm",
    [
        *("cut in the header", "cut", "magic", "short", "zeros", "schema", "name"),
        *("columns", "trigger", "wal", "version"),
    ],
)
def test_a_damaged_file_is_said_once_and_removed_by_who_has_the_lock(
    tmp_path: Path, harm: str
) -> None:
    path = made(tmp_path, 1)
    harmed(path, harm)
    before = listing(tmp_path)
    said = Said()
    with opened(tmp_path, said, may_write=False) as reader:
        assert blobs(reader) == set()
    assert listing(tmp_path) == before
    assert len(said) == 1
    assert said[0][1].startswith(f"the state in {tmp_path} is not used: ")

    said = Said()
    with opened(tmp_path, said) as state:
        assert (state.is_writer, state.is_used) == (True, True)
        assert blobs(state) == set()
        put_blobs(state, 2)
    assert len(said) == 1
    assert said[0][0] == "warning"
    assert said[0][1].startswith(f"the state in {tmp_path} is not used: ")
    with opened(tmp_path) as state:
        assert blobs(state) == {2}


@pytest.mark.parametrize("failures", [1, 2])
def test_damage_that_is_met_when_writing_costs_the_file_and_no_new_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    made(tmp_path, 1)
    plain = database._write_entries
    errors = [sqlite3.DatabaseError("database disk image is malformed")] * failures

    def write(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        plain(*arguments)

    monkeypatch.setattr(database, "_write_entries", write)
    said = Said()
    with opened(tmp_path, said) as state:
        put_blobs(state, 2)
        state.commit()
        assert blobs(state) == {2}
        assert state.is_writer == (failures == 1)
    assert [level for level, _ in said] == ["warning"] * failures
    with opened(tmp_path) as state:
        assert blobs(state) == ({2} if failures == 1 else set())


class _Broken:
    """A connection whose disk has gone."""

    in_transaction = False

    def execute(self, *_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("may_write", [True, False])
def test_a_disk_that_cannot_be_read_any_more_costs_one_warning(
    tmp_path: Path, may_write: bool
) -> None:
    made(tmp_path, 1)
    said = Said()
    with opened(tmp_path, said, may_write=may_write) as state:
        assert state._connection is not None
        state._connection.close()
        state._connection = _Broken()  # type: ignore[assignment]
        assert blobs(state) == set()
        assert not state.is_writer
    assert [level for level, _ in said] == ["warning"]
    assert said[0][1].endswith("disk I/O error")


def test_damage_that_is_met_later_ends_the_file_and_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with opened(tmp_path) as state:
        for number in range(3000):
            state.put_blob(HERE, key_of(f"sha256:{number:064x}"), BlobEntry(5, True))
    size = path.stat().st_size
    said = Said()
    with opened(tmp_path, said) as state:
        with open(path, "r+b") as file:
            file.seek(2 * 4096)
            file.write(b"\xff" * (size - 2 * 4096))
        put_blobs(state, 6)
        assert not any(
            state.blob(HERE, key_of(f"sha256:{each:064x}")) for each in range(10, 3000, 100)
        )
        assert state.is_writer
        put_blobs(state, 5)
    assert [level for level, _ in said] == ["warning"]
    assert "is not used" in said[0][1]
    with opened(tmp_path) as state:
        assert blobs(state) == {5, 6}


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("PRAGMA user_version = 4", "it was written by a newer version of regsync"),
        ("PRAGMA application_id = 77", "state.db is another program's"),
    ],
)
def test_a_newer_file_and_anothers_are_left_alone(
    tmp_path: Path, statement: str, words: str
) -> None:
    path = made(tmp_path, 1)
    with closing(sqlite3.connect(path)) as file:
        file.execute(statement)
    before = listing(tmp_path)
    said = Said()
    with opened(tmp_path, said) as state:
        assert (state.is_writer, state.is_used) == (False, False)
        put_blobs(state, 2)
        assert blobs(state) == set()
    assert said == [("warning", f"the state in {tmp_path} is not used, and none is kept: {words}")]
    assert listing(tmp_path) == before
    said = Said()
    with opened(tmp_path, said, may_write=False) as reader:
        assert blobs(reader) == set()
    assert said == [("warning", f"the state in {tmp_path} is not used: {words}")]


# Disks and interpreters that lack something.


@pytest.mark.parametrize("place", ["a file", "/proc/nowhere"])
def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_text("x")
    said = Said()
    with opened(tmp_path / place, said) as state:
        put_blobs(state, 1)
        assert (state.is_writer, state.is_used) == (False, False)
        assert blobs(state) == set()
    assert [level for level, _ in said] == ["warning"]
    assert said[0][1].startswith(f"no state is kept: {tmp_path / place}: ")


def test_a_disk_without_locks_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = Said()
    with opened(tmp_path, said) as state:
        put_blobs(state, 1)
        assert (state.is_writer, state.is_used) == (False, False)
    assert said == [("warning", f"no state is kept: {tmp_path}: No locks available")]
    assert [path.name for path in tmp_path.iterdir()] == ["state.lock"]


def test_a_database_that_is_locked_from_the_start_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk that refuses the locks of SQLite looks like one that another process has locked."""
    monkeypatch.setattr(database, "_WRITER_BUSY_SECONDS", 0.01)
    path = made(tmp_path, 1)
    said = Said()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with opened(tmp_path, said) as state:
            put_blobs(state, 2)
            assert (state.is_writer, state.is_used) == (False, False)
    assert said == [("warning", f"no state is kept: {tmp_path}: database is locked")]


def test_an_interpreter_without_the_module_keeps_no_state_and_says_so_once(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["sqlite3"] = None
from _regsync.state.archive import RepositoryKey
from _regsync.state.database import StateFile
from _regsync.state.knowledge import Knowledge
state = StateFile({str(tmp_path / "cache")!r}, lambda *said: print(*said, sep="|"))
state.load()
known = Knowledge(state, now=lambda: 5.0, ttl=60)
known.confirm_blob(RepositoryKey("host", "app"), "sha256:{"a" * 64}")
assert known.is_blob_believed(RepositoryKey("host", "app"), "sha256:{"a" * 64}")
state.commit()
known.finish()
state.close()
print(state.is_writer, state.is_used)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert ran.stdout.splitlines() == [
        "warning|state|no state is kept: this Python has no module sqlite3",
        "False False",
    ]
    assert not (tmp_path / "cache").exists()


@contextmanager
def full(state: StateFile) -> Iterator[None]:
    """Let the file not grow any more."""
    assert state._connection is not None
    state._connection.execute("PRAGMA max_page_count = 1").fetchall()
    yield


def put_many(state: StateFile, repository: str = "many") -> None:
    for number in range(400):
        state.put_blob(
            RepositoryKey("host", repository), key_of(f"sha256:{number:064x}"), BlobEntry(5, True)
        )


def test_a_full_disk_fails_no_run(tmp_path: Path) -> None:
    made(tmp_path, 1)
    said = Said()
    with opened(tmp_path, said) as state, full(state):
        put_blobs(state, 2)
        put_many(state)
        state.commit()
        assert not state.is_writer
        assert blobs(state) == {1, 2}, "what is there is read, and what was forgotten stays so"
        put_blobs(state, 3)
        state.commit()
        with opened(tmp_path) as other:
            put_blobs(other, 4)
        assert blobs(state) == {1, 2, 4}
    assert said == [("warning", f"the state in {tmp_path} is not saved: database or disk is full")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.db", "state.lock"]
    with opened(tmp_path) as state:
        assert blobs(state) == {1, 4}


def test_what_a_full_disk_did_not_take_is_remembered_for_the_next_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, 1)
    said = Said()
    state = StateFile(str(tmp_path), said, keeps_unsaved=True)
    connect = sqlite._connect

    def limited(path: str, mode: str, busy_seconds: float) -> sqlite3.Connection:
        connection = connect(path, mode, busy_seconds)
        connection.execute("PRAGMA max_page_count = 1").fetchall()
        return connection

    with monkeypatch.context() as filled:
        filled.setattr(sqlite, "_connect", limited)
        for cycle in range(3):
            state.load()
            assert state.is_writer is (cycle == 0)
            assert blobs(state) == ({1} if cycle == 0 else {1, 2})
            if cycle == 0:
                put_blobs(state, 2)
                put_many(state)
            state.close()
    assert [level for level, _ in said] == ["warning"] * 3
    assert entries(tmp_path) == 1

    # Another run's findings and ours do not exclude each other.
    with opened(tmp_path) as other:
        put_blobs(other, 3)
    state.load()
    assert state.is_writer
    state.close()
    assert len(said) == 3
    with opened(tmp_path) as after:
        assert blobs(after) == {1, 2, 3}
    assert entries(tmp_path) == 403


def test_what_another_process_had_locked_is_remembered_for_the_next_cycle(tmp_path: Path) -> None:
    said = Said()
    state = StateFile(str(tmp_path), said, keeps_unsaved=True)
    with opened(tmp_path):
        state.load()
        put_blobs(state, 2)
        state.close()
        state.load()
        assert (blobs(state), state.is_writer, state.is_used) == ({2}, False, True)
        state.close()
    state.load()
    state.close()
    assert [level for level, _ in said] == ["warning"] * 2
    with opened(tmp_path) as after:
        assert blobs(after) == {2}


def test_without_a_directory_nothing_is_kept_but_looks_of_this_run() -> None:
    state = StateFile(None, Said(), keeps_unsaved=True)
    for _ in range(2):
        state.load()
        assert (state.is_writer, state.is_used) == (False, False)
        put_blobs(state, 1)
        assert blobs(state) == set()
        state.put_artifact_check(NAMES[0], ArtifactCheck(5, 5, 1, b""))
        assert state.artifact_check(NAMES[0]) == ArtifactCheck(5, 5, 1, b"")
        state.close()


def test_a_transaction_that_breaks_off_leaves_nothing_behind(tmp_path: Path) -> None:
    state = StateFile(str(tmp_path), Said())
    state.load()
    put_blobs(state, 1)
    state.put_fact("host:5000", Fact("no value of JSON", "", object(), 5))
    with pytest.raises(TypeError):
        state.commit()
    with opened(tmp_path, may_write=False) as other:
        assert blobs(other) == set()
    state._close_file()


def test_a_link_in_the_place_of_the_state_is_replaced(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"of another program")
    directory = tmp_path / "state"
    directory.mkdir()
    (directory / "state.db").symlink_to(elsewhere)
    said = Said()
    with opened(directory, said) as state:
        put_blobs(state, 1)
    assert [message.rpartition(": ")[2] for _, message in said] == ["it is a link"]
    assert elsewhere.read_bytes() == b"of another program"
    assert not (directory / "state.db").is_symlink()
    with opened(directory) as again:
        assert blobs(again) == {1}
