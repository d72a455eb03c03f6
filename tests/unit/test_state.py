"""What a run believes of what earlier ones left, and the file that keeps it (docs/design.md sections 7
and 8).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from _regsync.state import (
    ABSENT_IS_202,
    MOST_HOLDERS,
    MOUNTS,
    NO_CHECK,
    PRESENT_IS_201,
    ArtifactCheck,
    FirstSeen,
    Knowledge,
    RepositoryKey,
    SeenKey,
    Snapshot,
    StateFile,
    _blob_key,
    hashed_key,
)

HOUR, DAY = 3600, 86400
NOW = 2_000_000_000
HOST = "host:5000"
A, B = RepositoryKey(HOST, "a"), RepositoryKey(HOST, "b/one")
TOP, CHILD, BLOB, OTHER = (f"sha256:{number:064x}" for number in range(1, 5))


class State:
    """A state on disk: each block of `known` is a run of its own."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state.db"
        self.directory = directory
        self.said = list[tuple[str, str]]()

    def file(self) -> StateFile:
        return StateFile(
            str(self.directory), lambda level, _, text: self.said.append((level, text))
        )

    @contextmanager
    def known(
        self, now: float = NOW, *, ttl: float = DAY, may_write: bool = True
    ) -> Iterator[Knowledge]:
        file = self.file()
        file.load(may_write=may_write)
        knowledge = Knowledge(file, now=lambda: now, ttl=ttl)
        yield knowledge
        knowledge.finish()
        file.close()

    def hold(self, now: float = NOW - HOUR) -> None:
        """Put an index with one child of one blob into A."""
        with self.known(now) as known:
            known.confirm_manifest(A, CHILD, [BLOB])
            known.confirm_manifest(A, TOP, [], [CHILD])

    def change(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute(statement, values)


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path)


# Belief.


@pytest.mark.parametrize(
    ("age", "ttl", "is_believed"),
    [(DAY, DAY, True), (DAY + 1, DAY, False), (90 * DAY, 0, True), (-2 * DAY, 0, False)],
)
def test_an_entry_is_believed_as_long_as_it_lasts(state, age, ttl, is_believed):
    state.hold(NOW - age)
    with state.known(ttl=ttl) as known:
        assert known.is_blob_believed(A, BLOB) is is_believed
        assert known.is_manifest_believed(A, TOP) is is_believed
        assert (known.mount_source(B, BLOB) == "a") is is_believed
        assert not known.is_confirmed(A, BLOB)
        assert not known.is_blob_believed(B, BLOB)
        assert known.mount_source(RepositoryKey("else", "a"), BLOB) is None


@pytest.mark.parametrize(("age", "is_recent"), [(30 * 60, True), (30 * 60 + 1, False)])
def test_a_careful_look_believes_what_is_recent_or_below_a_tag(state, age, is_recent):
    state.hold(NOW - age)
    with state.known() as known:
        assert known.is_blob_believed(A, BLOB, must_be_recent=True) is is_recent
        known.confirm_tagged_manifest(A, TOP)
        assert known.is_blob_believed(A, BLOB, must_be_recent=True), "whatever its depth"


def test_what_is_too_old_is_believed_below_a_tag_and_is_young_again_after_that_run(state):
    state.hold(NOW - 3 * DAY)
    with state.known() as known:
        assert not known.is_blob_believed(A, BLOB)
        known.confirm_tagged_manifest(A, TOP)
        assert known.is_blob_believed(A, BLOB)
        assert known.mount_source(B, BLOB) == "a"
    with state.known(NOW + HOUR) as known:
        assert known.is_blob_believed(A, BLOB)
    with state.known(NOW + 3 * DAY) as known:
        assert not known.is_blob_believed(A, BLOB)


def test_a_contradicted_repository_is_believed_below_tags_that_are_found_later(state):
    state.hold()
    with state.known() as known:
        known.confirm_tagged_manifest(A, TOP)
        known.record_populated(A, False)
        assert known.is_empty(A)
        assert not known.is_blob_believed(A, BLOB)
        assert known.mount_source(B, BLOB) is None
        known.confirm_tagged_manifest(A, TOP)
        assert known.is_blob_believed(A, BLOB)


@pytest.mark.parametrize("forgotten", [BLOB, CHILD, TOP])
def test_what_is_forgotten_is_believed_no_more_and_vouches_for_nothing(state, forgotten):
    state.hold()
    with state.known() as known:
        known.confirm_manifest(B, OTHER, [BLOB])
        assert {*known.holders(HOST, BLOB)} == {"a", "b/one"}
        known.forget(A, forgotten)
        if forgotten != TOP:  # the child was put by itself
            assert not known.is_blob_believed(A, BLOB)
            assert {*known.holders(HOST, BLOB)} == {"b/one"}
    with state.known() as known:
        assert known.is_blob_believed(A, BLOB) is (forgotten == TOP)
        known.confirm_manifest(A, CHILD, [BLOB])
        assert known.mount_source(RepositoryKey(HOST, "c"), BLOB) in ("a", "b/one")


def test_bytes_that_are_a_manifest_here_are_no_blob_here(state):
    with state.known() as known:
        known.confirm_manifest(A, TOP, [], [CHILD])
        known.confirm_tagged_manifest(A, OTHER)
        assert not any(known.is_blob_believed(A, each) for each in (TOP, CHILD, OTHER))
        assert known.is_confirmed(A, TOP)
        assert known.is_manifest_confirmed(A, TOP)
        assert not known.is_manifest_confirmed(A, "latest")
        known.confirm_blob(A, BLOB)
        assert not known.is_manifest_believed(A, BLOB)


# What answers of this run teach, with a file and without one.


@pytest.fixture(params=["file", "memory"])
def known(request: pytest.FixtureRequest, state: State) -> Iterator[Knowledge]:
    if request.param == "memory":
        yield Knowledge(now=lambda: NOW, ttl=DAY)
    else:
        with state.known() as knowledge:
            yield knowledge


def show(known: Knowledge) -> None:
    """Let a tag of A answer with an index, and read both manifests."""
    known.confirm_tagged_manifest(A, TOP)
    known.record_tagged_content(HOST, TOP, [], [CHILD])
    known.record_tagged_content(HOST, CHILD, [BLOB], [])


def test_what_a_tagged_manifest_names_is_believed_and_not_confirmed(known):
    show(known)
    assert known.is_manifest_believed(A, CHILD)
    assert known.is_blob_believed(A, BLOB, must_be_recent=True)
    assert known.mount_source(B, BLOB) == "a"
    assert known.choose_present_blob(A) == BLOB
    assert [known.is_confirmed(A, each) for each in (TOP, CHILD, BLOB)] == [True, False, False]
    known.record_contradiction(A)
    assert not known.is_blob_believed(A, BLOB)
    assert known.mount_source(B, BLOB) is None


def test_a_manifest_that_no_tag_of_its_host_names_teaches_nothing(known):
    known.record_tagged_content(HOST, TOP, [BLOB], [CHILD])
    known.confirm_tagged_manifest(RepositoryKey("else", "a"), TOP)
    known.record_tagged_content(HOST, TOP, [BLOB], [CHILD])
    assert not known.is_blob_believed(A, BLOB)
    assert not known.is_manifest_believed(A, CHILD)


def test_an_answer_about_a_digest_outweighs_what_names_it(known):
    known.forget(A, BLOB)
    known.forget(A, CHILD)
    show(known)
    assert not known.is_manifest_believed(A, CHILD)
    assert not known.is_blob_believed(A, BLOB)
    known.confirm_manifest(A, CHILD, [BLOB])
    assert known.is_manifest_believed(A, CHILD)
    assert known.is_blob_believed(A, BLOB)


def test_a_blob_that_a_probe_has_found_is_believed_until_it_is_forgotten(known):
    known.confirm_blob(A, BLOB, by_probe=True)
    assert known.is_blob_believed(A, BLOB)
    assert not known.is_confirmed(A, BLOB)
    assert known.mount_source(B, BLOB) is None
    assert not known.needs_head(A, BLOB)
    known.forget(A, BLOB)
    assert not known.is_blob_believed(A, BLOB)
    assert known.needs_head(A, BLOB)


def test_a_blob_is_mounted_where_a_manifest_names_it_and_from_few(known):
    known.confirm_blob(A, BLOB)
    assert known.mount_source(B, BLOB) is None
    names = [f"app-{number}" for number in range(MOST_HOLDERS + 1)]
    for name in names:
        known.confirm_manifest(RepositoryKey(HOST, name), TOP, [BLOB])
    assert [*known.holders(HOST, BLOB)] == names[:-1]
    # The manifest that named it may be gone: then nothing there vouches for the mount.
    known.forget(RepositoryKey(HOST, names[0]), TOP)
    assert [*known.holders(HOST, BLOB)] == names[1:-1]


@pytest.mark.parametrize(("is_confirmed", "refusals"), [(True, 1), (False, 3)])
def test_a_refused_mount_of_what_only_old_entries_knew_says_little_of_the_host(
    known, is_confirmed, refusals
):
    for number in range(refusals):
        assert known.supports_mounts(HOST) is None
        known.record_refused_mount(A, f"x{number}", is_source_confirmed=is_confirmed)
    assert known.supports_mounts(HOST) is False
    assert known.supports_mounts("else") is None
    known.learn(HOST, MOUNTS, True)
    assert not known.may_mount(A, "x0")
    assert known.may_mount(B, "x0")


def test_a_blob_to_ask_for_is_found_below_a_tag(state):
    state.hold(NOW - 3 * DAY)
    with state.known() as known:
        assert known.choose_present_blob(A) is None
        known.confirm_tagged_manifest(A, TOP)
        assert known.choose_present_blob(A) == BLOB
        known.forget(A, BLOB)
        assert known.choose_present_blob(A) is None


# Facts, tags, looks.


def test_a_fact_of_a_host_lasts_a_day(state):
    login = [["bearer", "https://realm.test", "", "", ""], False]
    with state.known() as known:
        known.learn(HOST, "login", login)
        known.learn(B.area, "api", False)
        known.learn(B.area, ABSENT_IS_202, True)
        known.learn(B.area, PRESENT_IS_201, False)
    with state.known(NOW + DAY) as known:
        assert known.host_note(HOST, "login") == login
        assert known.fact(RepositoryKey(HOST, "b/two").area, "api") is False
        assert known.fact(A.area, "api") is None
        assert known.fact(B.area, ABSENT_IS_202) is True
        assert known.fact(B.area, PRESENT_IS_201) is False
    with state.known(NOW + DAY + 1) as known:
        assert known.host_note(HOST, "login") is None
        assert known.fact(B.area, ABSENT_IS_202) is None


@pytest.mark.parametrize("value", [b"", b"7", b"[" * 9999, b"\xff", b'"x"', b"[1, 2]", b"[[]]", 7])
def test_notes_of_another_form_are_passed_over(state, value):
    with state.known() as known:
        known.learn(HOST, MOUNTS, True)
        known.learn(A.area, ABSENT_IS_202, True)
        known.record_artifact_check(b"name", ArtifactCheck(is_complete=True))
    state.change("UPDATE note SET value = ?", value)
    with state.known() as known:
        assert known.supports_mounts(HOST) is None
        assert known.fact(A.area, ABSENT_IS_202) is None
        assert known.artifact_check(b"name") == NO_CHECK
        assert FirstSeen(known._file, lambda: NOW).record_sighting(A, TOP, 9) == NOW + 9


def test_an_unchanged_tag_is_written_anew_in_each_quarter_of_its_life(state):
    name, keys = hashed_key("a"), Snapshot(TOP, CHILD)
    for now, written in ((NOW, NOW), (NOW + 6 * HOUR, NOW), (NOW + 7 * HOUR, NOW + 7 * HOUR)):
        with state.known(now) as known:
            known.record_snapshot(name, keys, known.snapshot(name))
            known.record_snapshot(b"", keys)
            assert known.snapshot(name) == (written, keys)
            assert known.snapshot(b"") is None
    with state.known(NOW + 32 * HOUR) as known:
        assert known.snapshot(name) is None


def test_a_look_outlives_every_other_entry(state):
    name = hashed_key("a")
    with state.known() as known:
        made = ArtifactCheck(0, 0, True, True, 3, b"01234567")
        known.record_artifact_check(name, made)
        known.confirm_blob(A, BLOB)
        known.record_snapshot(name, Snapshot(TOP, TOP))
    with state.known(NOW + 300 * DAY) as known:
        check = known.artifact_check(name)
        assert check == made._replace(last=NOW, first=NOW)
        known.record_artifact_check(name, check)
        assert known.artifact_check(name).first == NOW
    with closing(sqlite3.connect(state.path)) as database:
        assert database.execute("SELECT count(*) FROM held").fetchone() == (0,)
        notes = sorted(key.split()[0] for (key,) in database.execute("SELECT key FROM note"))
        assert notes == [b"look", b"swept"]


# The age of digests.


def test_a_digest_that_is_seen_again_keeps_its_age_in_a_file_and_in_memory(state):
    for file in (StateFile(None, print), state.file()):
        for now, until in ((NOW, NOW + DAY), (NOW + HOUR, NOW + DAY), (NOW + DAY, None)):
            file.load()
            seen = FirstSeen(file, lambda now=now: now)
            assert seen.record_sighting(A, TOP, DAY) == until
            assert seen.first_seen_at(SeenKey(A, TOP)) == NOW
            assert seen.first_seen_at(SeenKey(B, TOP)) == now, "unknown"
            file.close()


def test_of_a_lock_and_the_state_the_earlier_time_counts():
    times = {SeenKey(A, TOP): NOW - DAY}
    seen = FirstSeen(StateFile(None, print), lambda: NOW, times)
    assert seen.record_sighting(A, TOP, DAY) is None
    assert seen.record_sighting(A, TOP, DAY + 1) == NOW + 1
    early = FirstSeen(StateFile(None, print), lambda: NOW - 2 * DAY, times)
    assert early.record_sighting(A, TOP, HOUR) == NOW - 2 * DAY + HOUR


# The file.


def test_what_stands_at_random_bytes_fails_no_run(state):
    random = Random(5)
    for _ in range(60):
        state.hold()
        data = bytearray(state.path.read_bytes())
        for _ in range(random.choice([1, 40, 400])):
            data[random.randrange(len(data))] = random.randrange(256)
        state.path.write_bytes(data[: random.choice([len(data), random.randrange(len(data))])])
        for may_write in (False, True):
            with state.known(may_write=may_write) as known:
                known.is_blob_believed(A, BLOB)
                known.snapshot(hashed_key("a"))
                known.choose_present_blob(A)
                assert [*known.holders(HOST, BLOB)] in ([], ["a"])
                known.forget(A, BLOB)
                known.confirm_manifest(A, CHILD, [BLOB])
                assert known.is_blob_believed(A, BLOB)
        state.path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["a b", "a&digest=x", "a\r\nX: y", "A", "", "a/../b", b"\xff"])
def test_a_name_that_no_repository_has_is_never_mounted_from(state, name):
    state.hold()
    state.change("UPDATE place SET name = CAST(? AS TEXT)", name)
    with state.known() as known:
        assert known.mount_source(B, BLOB) is None


ForeignFile = Callable[[State], Any]
FOREIGN: dict[str, ForeignFile] = {
    "another program": lambda state: state.change("PRAGMA application_id = 7"),
    "newer version": lambda state: state.change("PRAGMA user_version = 99"),
}


@pytest.mark.parametrize("whose", FOREIGN)
def test_a_file_of_others_is_left_alone(state, whose):
    state.hold()
    FOREIGN[whose](state)
    before = state.path.read_bytes()
    with state.known() as known:
        assert not known.is_blob_believed(A, BLOB)
        known.confirm_blob(A, BLOB)
    assert state.path.read_bytes() == before
    assert [(level, whose in text) for level, text in state.said] == [("warning", True)]


@pytest.mark.parametrize(
    ("statement", "level"),
    [("PRAGMA user_version = 3", "info"), ("CREATE TABLE more (x)", "warning")],
)
def test_a_file_of_other_tables_begins_anew(state, statement, level):
    state.hold()
    state.change(statement)
    with state.known() as known:
        assert not known.is_blob_believed(A, BLOB)
        known.confirm_blob(A, OTHER)
    assert [(level, "begins anew" in text) for level, text in state.said] == [(level, True)]
    with state.known() as known:
        assert known.is_blob_believed(A, OTHER)


def test_a_second_process_reads_and_saves_nothing(state):
    state.hold()
    with state.known():
        with state.known() as second:
            assert second.is_blob_believed(A, BLOB)
            second.confirm_blob(A, OTHER)
            second.learn(HOST, MOUNTS, True)
            second.forget(A, BLOB)
            assert not second.is_blob_believed(A, BLOB)
            assert second.supports_mounts(HOST)
        assert [level for level, text in state.said if "another run uses" in text] == ["warning"]
    with state.known() as known:
        assert known.is_blob_believed(A, BLOB)
        assert not known.is_blob_believed(A, OTHER)
        assert known.supports_mounts(HOST) is None


def test_a_dry_run_leaves_no_trace(state):
    with state.known(may_write=False) as known:
        known.confirm_blob(A, BLOB)
        known.learn(HOST, MOUNTS, True)
    assert [*state.directory.iterdir()] == []
    state.path.touch()
    with state.known(may_write=False) as known:
        assert not known.is_blob_believed(A, BLOB)
    assert (state.path.read_bytes(), state.said) == (b"", [])


def test_notes_that_could_not_be_written_are_kept_until_they_can(state, monkeypatch):
    """As in a watch whose disk is full for some cycles."""
    monkeypatch.setattr(sqlite3, "connect", full := Full())
    file = state.file()
    for cycle in range(3):
        file.load()
        known = Knowledge(file, now=lambda: NOW, ttl=DAY)
        assert known.supports_mounts(HOST) is (None if cycle == 0 else True)
        known.learn(HOST, MOUNTS, True)
        if cycle == 1:
            full.has_room = True
        file.close()
    assert ["is full" in text for _, text in state.said] == [True, True]
    with state.known() as known:
        assert known.supports_mounts(HOST) is True


class Full:
    """`sqlite3.connect` on a disk without room, until there is some."""

    has_room = False
    connect = staticmethod(sqlite3.connect)

    def __call__(self, *given: Any, **named: Any) -> sqlite3.Connection:
        if not self.has_room:
            raise sqlite3.OperationalError("database or disk is full")
        return self.connect(*given, **named)


def test_what_a_run_knows_of_a_blob_that_it_copies_is_small() -> None:
    """An image of six layers takes 3 kB of it: 20,000 images take 60 MB."""
    import tracemalloc

    images = [
        (f"sha256:{n:064x}", [f"sha256:{1000 * layer + n:064x}" for layer in range(7, 14)])
        for n in range(1000)
    ]
    known = Knowledge(now=lambda: NOW)
    tracemalloc.start()
    for top, blobs in images:
        for blob in blobs:
            known.confirm_blob(A, blob)
        known.confirm_manifest(A, top, blobs)
    _blob_key.cache_clear()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 7000 < 400
