"""What is kept: what a run believes of what earlier ones left, the file that keeps it (docs/design.md
sections 7 and 8), and blobs that are staged for several uploads.
"""

from __future__ import annotations

import shutil
import sqlite3
import tracemalloc
from contextlib import closing, contextmanager
from random import Random

import anyio
import anyio.lowlevel
import pytest

from _regsync import edge
from _regsync.app.cli import process_edge
from _regsync.oci import Descriptor, digest_of
from _regsync.state import (
    ABSENT_IS_202,
    MOST_HOLDERS,
    MOUNTS,
    NO_CHECK,
    PRESENT_IS_201,
    ArtifactCheck,
    Knowledge,
    RepositoryKey,
    Snapshot,
    StateFile,
    _blob_key,
    _manifest_key,
    hashed_key,
)
from _regsync.sync.blobs import SMALL_BLOB, NoRoom, Staging

HOUR, DAY = 3600, 86400
NOW = 2_000_000_000
HOST = "host:5000"
A, B = RepositoryKey(HOST, "a"), RepositoryKey(HOST, "b/one")
TOP, CHILD, BLOB, OTHER = (f"sha256:{number:064x}" for number in range(1, 5))


class State:
    """A state on disk: each block of `known` is a run of its own."""

    def __init__(self, directory):
        self.path = directory / "state.db"
        self.directory = directory
        self.said = []

    def file(self):
        return StateFile(
            str(self.directory), lambda level, _, text, **hint: self.said.append((level, text))
        )

    @contextmanager
    def known(self, now=NOW, *, ttl=DAY, may_write=True):
        file = self.file()
        file.load(may_write=may_write)
        knowledge = Knowledge(file, now=lambda: now, ttl=ttl)
        yield knowledge
        knowledge.finish()
        file.close()

    def hold(self, now=NOW - HOUR):
        """Put an index with one child of one blob into A."""
        with self.known(now) as known:
            known.confirm_manifest(A, CHILD, [BLOB])
            known.confirm_manifest(A, TOP, [], [CHILD])

    def sql(self, statement, *values):
        with closing(sqlite3.connect(self.path)) as database, database:
            return database.execute(statement, values).fetchall()


@pytest.fixture
def state(tmp_path):
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


def test_what_is_too_old_leaves_the_file_with_all_that_it_named(state):
    state.hold(NOW - 5 * DAY)
    for days in (3, 1):  # what is below an index goes a sweep later
        with state.known(NOW - days * DAY):
            pass
    assert state.sql("SELECT * FROM held") == []


def test_what_is_too_old_is_believed_below_a_tag_and_is_young_again_after_that_run(state):
    state.hold(NOW - 3 * DAY)
    with state.known() as known:
        assert not known.is_blob_believed(A, BLOB)
        assert known.choose_present_blob(A) is None
        known.confirm_tagged_manifest(A, TOP)
        assert known.is_blob_believed(A, BLOB)
        assert known.mount_source(B, BLOB) == "a"
        assert known.choose_present_blob(A) == BLOB
    for later, is_believed in ((HOUR, True), (3 * DAY, False)):
        with state.known(NOW + later) as known:
            assert known.is_blob_believed(A, BLOB) is is_believed


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
def known(request, state):
    if request.param == "memory":
        yield Knowledge(now=lambda: NOW, ttl=DAY)
    else:
        with state.known() as knowledge:
            yield knowledge


def show(known):
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
    assert not known.needs_head(A)
    known.forget(A, BLOB)
    assert not known.is_blob_believed(A, BLOB)
    assert known.needs_head(A)


def test_a_mount_that_is_refused_teaches_nothing_about_probes(known):
    known.confirm_blob(A, BLOB, by_probe=True)
    known.forget(A, BLOB, is_absent=False)
    assert not known.is_blob_believed(A, BLOB)
    assert not known.needs_head(A)


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
    known.record_refused_mount(A, "y", is_source_confirmed=True)  # of a host that mounts
    assert known.supports_mounts(HOST) is True
    assert not known.may_mount(A, "x0")
    assert known.may_mount(B, "x0")


# Facts, tags, looks, the age of digests.


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
        facts = [known.fact(B.area, name) for name in (ABSENT_IS_202, PRESENT_IS_201)]
        assert facts == [True, False]
    with state.known(NOW + DAY + 1) as known:
        assert known.host_note(HOST, "login") is None
        assert known.fact(B.area, ABSENT_IS_202) is None


@pytest.mark.parametrize("value", [b"", b"[" * 9999, b"\xff", b"[1, 2]", b"[[]]", 7])
def test_notes_of_another_form_are_passed_over(state, value):
    with state.known() as known:
        known.learn(HOST, MOUNTS, True)
        known.learn(A.area, ABSENT_IS_202, True)
        known.record_artifact_check(b"name", ArtifactCheck(is_complete=True))
    state.sql("UPDATE note SET value = ?", value)
    with state.known() as known:
        assert known.supports_mounts(HOST) is None
        assert known.fact(A.area, ABSENT_IS_202) is None
        assert known.artifact_check(b"name") == NO_CHECK
        assert known.record_sighting(A, TOP, 9) == NOW + 9


def test_an_unchanged_tag_is_written_anew_in_each_quarter_of_its_life(state):
    name, keys = hashed_key("a"), Snapshot(TOP, CHILD)
    for now, written in ((NOW, NOW), (NOW + 22 * DAY, NOW), (NOW + 23 * DAY, NOW + 23 * DAY)):
        with state.known(now) as known:
            known.record_snapshot(name, keys)
            known.record_snapshot(b"", keys)
            assert known.snapshot(name) == keys
            assert known.snapshot(b"") is None
        notes = dict(state.sql("SELECT key, at FROM note"))
        assert notes[b"tag " + name] == written
    with state.known(NOW + 115 * DAY) as known:
        assert known.snapshot(name) is None


@pytest.mark.parametrize(
    ("days", "kept"), [(80, [b"look", b"swept", b"tag"]), (300, [b"look", b"swept"])]
)
def test_looks_and_snapshots_outlive_every_other_entry(state, days, kept):
    name = hashed_key("a")
    with state.known() as known:
        made = ArtifactCheck(0, 0, True, 3, "0123456789abcdef")
        known.record_artifact_check(name, made)
        known.confirm_blob(A, BLOB)
        known.record_snapshot(name, Snapshot(TOP, TOP))
    with state.known(NOW + days * DAY) as known:
        check = known.artifact_check(name)
        assert check == made._replace(last=NOW, first=NOW)
        known.record_artifact_check(name, check)
        assert known.artifact_check(name).first == NOW
    assert state.sql("SELECT count(*) FROM held") == [(0,)]
    notes = sorted(key.split()[0] for (key,) in state.sql("SELECT key FROM note"))
    assert notes == kept


# The file.


def test_what_stands_at_random_bytes_fails_no_run(state):
    random = Random(5)
    for _ in range(30):
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


@pytest.mark.parametrize("name", ["a&digest=x", "a\r\nX: y", "A", "", "a/../b", b"\xff"])
def test_a_name_that_no_repository_has_is_never_mounted_from(state, name):
    state.hold()
    state.sql("UPDATE place SET name = CAST(? AS TEXT)", name)
    with state.known() as known:
        assert known.mount_source(B, BLOB) is None


@pytest.mark.parametrize(
    ("whose", "statement"),
    [("another program", "application_id = 7"), ("newer version", "user_version = 99")],
)
def test_a_file_of_others_is_left_alone(state, whose, statement):
    state.hold()
    state.sql(f"PRAGMA {statement}")
    before = state.path.read_bytes()
    with state.known() as known:
        assert not known.is_blob_believed(A, BLOB)
        known.confirm_blob(A, BLOB)
    assert state.path.read_bytes() == before
    assert [(level, whose in text) for level, text in state.said] == [("warning", True)]


@pytest.mark.parametrize("statement", ["PRAGMA user_version = 3", "CREATE TABLE more (x)"])
def test_a_file_of_other_tables_begins_anew(state, statement):
    state.hold()
    state.sql(statement)
    with state.known() as known:
        assert not known.is_blob_believed(A, BLOB)
        known.confirm_blob(A, OTHER)
    assert [(level, "begins anew" in text) for level, text in state.said] == [("warning", True)]
    with state.known() as known:
        assert known.is_blob_believed(A, OTHER)


def test_what_a_run_cannot_save_at_its_end_because_others_read_is_told(state, monkeypatch):
    monkeypatch.setattr("_regsync.state._READER_PATIENCE", 0)
    state.hold()
    query = "SELECT * FROM held"
    with closing(sqlite3.connect(state.path)) as reader, closing(reader.execute(query)) as rows:
        assert rows.fetchone()  # not the last one
        with state.known() as known:
            known.confirm_blob(B, OTHER)
        assert ["is locked" in text for _, text in state.said] == [True]
    with state.known() as known:
        known.confirm_blob(B, OTHER)
    assert len(state.said) == 1


def test_a_dry_run_leaves_no_trace(state):
    with state.known(may_write=False) as known:
        known.confirm_blob(A, BLOB)
        known.learn(HOST, MOUNTS, True)
    assert [*state.directory.iterdir()] == []
    state.path.touch()
    with state.known(may_write=False) as known:
        assert not known.is_blob_believed(A, BLOB)
    assert (state.path.read_bytes(), state.said) == (b"", [])


def test_what_a_run_knows_of_a_blob_that_it_copies_is_small():
    """An image of six layers takes 3 kB of it: 20,000 images take 60 MB."""
    known = Knowledge(now=lambda: NOW)
    images = [[f"sha256:{1000 * part + n:064x}" for part in range(8)] for n in range(1000)]
    tracemalloc.start()
    for top, *parts in images:
        for blob in parts:
            known.confirm_blob(A, blob)
        known.confirm_manifest(A, top, parts)
    _blob_key.cache_clear()
    _manifest_key.cache_clear()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 7000 < 400


def test_a_digest_that_is_mirrored_for_months_keeps_its_age(state):
    held_until = []
    for days in (200, 150, 100, 50, 0):
        with state.known(NOW - days * DAY) as known:
            held_until.append(known.record_sighting(A, TOP, DAY))
    assert held_until == [NOW - 199 * DAY, None, None, None, None]


# Blobs that are kept for several uploads.

LARGE = SMALL_BLOB + 1


class Source:
    """A blob that counts how often it is read."""

    def __init__(self, size, letter=b"x"):
        self.body = letter * size
        self.blob = Descriptor("application/octet-stream", digest_of(self.body), size)
        self.reads = 0

    async def read(self):
        self.reads += 1
        for start in range(0, len(self.body), 300_000):
            await anyio.lowlevel.checkpoint()
            yield memoryview(self.body)[start : start + 300_000]

    async def held(self, staging, *, is_shared=True, start=0):
        async with staging.holding(self.blob, self.read, is_shared=is_shared) as stream:
            return b"".join([bytes(piece) async for piece in stream(start)])


@pytest.fixture
async def stage(tmp_path):
    """Return a function that makes a place for blobs."""
    with edge.using(process_edge()):
        yield lambda limit=None: Staging(str(tmp_path / "staged"), limit)


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("size", [900, LARGE])
async def test_a_shared_blob_is_read_once_and_given_from_any_byte(stage, tmp_path, size):
    source, staging = Source(size), stage()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(source.held, staging)
    assert await source.held(staging, start=size - 7) == source.body[-7:]
    assert source.reads == 1
    assert files(tmp_path) == ([] if size < SMALL_BLOB else [source.blob.digest.partition(":")[2]])
    staging.clear()
    assert files(tmp_path) == []


async def test_what_a_killed_run_has_staged_goes_when_the_next_one_begins(stage, tmp_path):
    await Source(LARGE).held(stage())
    assert len(files(tmp_path)) == 1
    stage()
    assert files(tmp_path) == []


async def test_what_nobody_else_needs_is_never_on_disk(stage, tmp_path):
    staging, small = stage(), Source(900)
    with pytest.raises(NoRoom):
        await Source(LARGE).held(staging, is_shared=False)
    for _ in range(2):
        assert await small.held(staging, is_shared=False) == small.body
    assert (small.reads, files(tmp_path)) == (2, [])


async def test_memory_has_a_bound_and_gives_room_again(stage):
    staging = stage(0)
    sources = [Source(SMALL_BLOB, bytes([letter])) for letter in range(30)]
    for source in (*sources, sources[-1], sources[0]):
        await source.held(staging)
    assert (sources[-1].reads, sources[0].reads) == (1, 2)


async def test_a_limit_makes_the_least_recently_used_file_go_that_nobody_reads(stage, tmp_path):
    staging = stage(2 * LARGE)
    first, second, third = (Source(LARGE, letter) for letter in (b"1", b"2", b"3"))
    async with staging.holding(first.blob, first.read, is_shared=True):
        await second.held(staging)
        await third.held(staging)
        with pytest.raises(NoRoom) as caught:
            async with staging.holding(third.blob, third.read, is_shared=True):
                await Source(LARGE, b"4").held(staging)
    assert caught.value.level == "debug", "it is the user's own limit"
    await first.held(staging)
    await second.held(staging)
    assert (first.reads, second.reads) == (1, 2)
    assert len(files(tmp_path)) == 2
    shutil.rmtree(tmp_path / "staged" / "sha256")  # by somebody else, which gives room too
    assert await third.held(staging) == third.body


async def test_a_file_that_does_not_fit_the_free_space_is_not_begun(stage, tmp_path, monkeypatch):
    """With what is promised to others: two of three would fit."""
    free = shutil.disk_usage(tmp_path)._replace(free=2 * LARGE + 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    staging, refused = stage(), []

    async def hold(source):
        try:
            await source.held(staging)
        except NoRoom as error:
            refused.append(error.level)

    async with anyio.create_task_group() as tasks:
        for letter in (b"1", b"2", b"3"):
            tasks.start_soon(hold, Source(LARGE, letter))
    assert refused == ["warning"]
    await hold(Source(LARGE, b"4"))
    assert refused == ["warning"], "that blob alone was left out"


@pytest.mark.parametrize("is_link", [True, False])
async def test_what_somebody_else_has_put_there_is_not_removed(stage, tmp_path, is_link):
    mine = tmp_path / ("elsewhere" if is_link else "staged")
    if is_link:
        mine.mkdir()
        (tmp_path / "staged").symlink_to(mine)
        mine /= "mine"
    mine.write_text("mine")
    before, staging = files(tmp_path), stage()
    with pytest.raises(NoRoom):
        await Source(LARGE).held(staging)
    staging.clear()
    assert files(tmp_path) == before
