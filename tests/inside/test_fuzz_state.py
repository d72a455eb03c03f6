"""Whatever stands in the state, a run begins with what can be used of it, or empty with one warning.

Some files are well made and say what no run of ours wrote; others are files of ours
in which bytes were changed, cut off or added.
"""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.addresses import Origin
from _regsync.auth.credentials import Credential
from _regsync.auth.tokens import Authenticator
from _regsync.state.archive import (
    Archive,
    BlobEntry,
    RepositoryKey,
    Snapshot,
    digest_like,
    hashed_key,
    key_of,
)
from _regsync.state.database import StateFile
from _regsync.state.knowledge import Knowledge
from tests.fuzzing import fuzz, trees

DIGESTS = [f"sha256:{number:064x}" for number in range(4)] + [f"sha512:{1:0128x}"]
WHERES = [
    RepositoryKey(*where) for where in (("host", "repo"), ("host", "other"), ("else", "repo"))
]
NOW = 1_000_000

# What SQLite can hold in any column, whatever was declared.
MOMENTS = st.sampled_from([0, 1, NOW - 60, NOW, 2**63 - 1, -(2**63), 1.5, "7", b"7", None])
KEYS = st.sampled_from(DIGESTS).map(key_of) | st.binary(max_size=40)
VALUES = st.one_of(MOMENTS, KEYS, st.text(max_size=3), st.integers(-5, 300))
HOSTS = st.sampled_from(["host", "else"]) | VALUES
REPOSITORIES = st.sampled_from(["repo", "other"]) | VALUES
JOINED = st.lists(KEYS, max_size=3).map(b"".join) | VALUES
NAMES = st.sampled_from([hashed_key("a"), hashed_key("b")]) | VALUES
FACTS = st.one_of(
    trees("x").map(json.dumps),
    st.sampled_from(
        [
            "true",
            "5",
            "[true, true]",
            "[true, 1]",
            '[["bearer", "https://a", "", "", ""], false]',
            '[["bearer", 5, "", "", ""], false]',
            '[["basic", "", "", "", ""], true]',
            "NaN",
            "[" * 5000,
            "{",
        ]
    ),
    VALUES,
)
FACT_NAMES = (
    st.sampled_from(
        ["login", "mounts", "is_lenient", "probe_answers", "smallest_patch", "has_referrers_api"]
    )
    | VALUES
)
ROWS = {
    "blob": st.tuples(HOSTS, KEYS, REPOSITORIES, MOMENTS, VALUES),
    "manifest": st.tuples(HOSTS, REPOSITORIES, KEYS, MOMENTS, JOINED, JOINED),
    "snapshot": st.tuples(NAMES, MOMENTS, KEYS | VALUES, KEYS | VALUES),
    "look": st.tuples(NAMES, MOMENTS, MOMENTS, VALUES, VALUES),
    "fact": st.tuples(HOSTS, FACT_NAMES, st.sampled_from(["", "repo"]) | VALUES, FACTS, MOMENTS),
    "swept": st.tuples(st.just(1), VALUES),
}
TABLES = st.fixed_dictionaries({name: st.lists(row, max_size=5) for name, row in ROWS.items()})


def use(archive: Archive, ttl: float) -> None:
    """Ask and tell all that a run does."""
    known = Knowledge(archive, now=lambda: float(NOW), ttl=ttl)
    for where in WHERES:
        for digest in DIGESTS:
            known.is_blob_believed(where, digest, must_be_recent=True)
            known.is_manifest_believed(where, digest)
            known.mount_source(where, digest)
            known.record_absent_blob(where, digest)
        known.supports_mounts(where[0])
        known.needs_head(where, DIGESTS[0])
        known.has_referrers_api(where)
        assert isinstance(known.facts_of(where[0]).fallback_size, int | None)
        origin = Origin("https", "registry.test", 443)
        login = Authenticator(
            origin=origin, credential=Credential("u", "p"), fetch=pytest.fail, now=float, wall=float
        )
        login.restore(known.facts_of(where[0]).login)
        known.record_login(where[0], login.login_facts)
        known.record_probe_answer(where, is_202_if_absent=True)
        known.record_referrers_api(where, True)
    known.confirm_tagged_manifest(WHERES[0], DIGESTS[0])
    known.record_contradiction(WHERES[1])
    known.forget(WHERES[0], DIGESTS[1])
    known.confirm_manifest(WHERES[1], DIGESTS[2], DIGESTS[3:4], DIGESTS[:1])
    for name in (hashed_key("a"), hashed_key("c")):
        entry = known.snapshots([name]).get(name)
        known.record_snapshot(name, Snapshot(key_of(DIGESTS[0]), key_of(DIGESTS[1])), entry)
        known.artifact_check(name)
        known.record_artifact_check(name, 7, bytes(8))
        for entry in known.snapshots([name]).values():
            digest_like(entry.snapshot.source)
    known.finish()


def run(directory: str, ttl: float = 0.0) -> list[str]:
    """Use the state in a directory as a run does; return what was logged."""
    said = list[str]()
    state = StateFile(directory, lambda level, event, message: said.append(message))
    state.load()
    use(state, ttl)
    state.close()
    assert all("\n" not in message for message in said)
    return said


def check(directory: str, ttl: float = 0.0) -> None:
    """Look whether the state has what `use` told it."""
    state = StateFile(directory, lambda *said: pytest.fail(str(said)))
    state.load()
    known = Knowledge(state, now=lambda: float(NOW), ttl=ttl)
    assert known.is_manifest_believed(WHERES[1], DIGESTS[2])
    (entry,) = known.snapshots([hashed_key("c")]).values()
    assert entry.snapshot == (key_of(DIGESTS[0]), key_of(DIGESTS[1]))
    state.close()


def begin(directory: str, count: int = 5) -> Path:
    """Write a state of so many blobs."""
    state = StateFile(directory, lambda *said: pytest.fail(str(said)))
    state.load()
    for number in range(count):
        state.put_blob(WHERES[0], key_of(f"sha256:{number:064x}"), BlobEntry(NOW, True))
    use(state, 0.0)
    state.close()
    return Path(directory, "state.db")


NONE: dict[str, list[tuple[object, ...]]] = {name: [] for name in ROWS}


@fuzz(120)
@given(TABLES, st.sampled_from([0.0, 100.0, 1e9]))
@example({**NONE, "fact": [("host", "login", "", "5", NOW)]}, 0.0)
@example({**NONE, "fact": [("host", "probe_answers", "repo", "true", NOW)]}, 0.0)
@example({**NONE, "manifest": [("host", "repo", key_of(DIGESTS[0]), NOW, b"", b"x" * 5)]}, 1e9)
@example(
    {**NONE, "manifest": [("host", "repo", key_of(DIGESTS[0]), 1, b"", key_of(DIGESTS[0]))]}, 1e9
)
def test_any_rows_are_used_and_what_is_saved_is_read(tables, ttl):
    with TemporaryDirectory() as directory:
        path = begin(directory, 0)
        with closing(sqlite3.connect(path)) as file:
            for table, rows in tables.items():
                for row in rows:
                    marks = ", ".join("?" * len(row))
                    with suppress(sqlite3.IntegrityError):  # keys are never NULL
                        file.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)
            file.commit()
        assert run(directory, ttl) == []
        check(directory, ttl)


WHOLE: dict[int, bytes] = {}


def whole(count: int) -> bytes:
    """Return the file of a state of so many blobs."""
    if count not in WHOLE:
        with TemporaryDirectory() as directory:
            WHOLE[count] = begin(directory, count).read_bytes()
    return WHOLE[count]


@fuzz(300)
@given(
    st.sampled_from([5, 2000]),
    st.integers(0, 2**32),
    st.sampled_from(["flip", "cut", "page", "add"]),
)
@example(5, 575, "flip")  # SQLite: "unsupported file format"
def test_any_damage_is_said_once_at_most_and_is_over_with_that_run(count, seed, harm):
    dice = random.Random(seed)
    content = bytearray(whole(count))
    if harm == "flip":
        for _ in range(dice.choice([1, 3, 100])):
            # The version and the program of the file decide whether it is ours to remove.
            place = dice.choice([dice.randrange(60), dice.randrange(72, len(content))])
            content[place] ^= 1 << dice.randrange(8)
    elif harm == "cut":
        del content[dice.randrange(len(content)) :]
    elif harm == "page":
        start = 4096 * dice.randrange(1, len(content) // 4096)
        content[start : start + 4096] = dice.randbytes(4096)
    else:
        content += dice.randbytes(dice.randrange(1, 9000))

    with TemporaryDirectory() as directory:
        path = Path(directory, "state.db")
        path.write_bytes(content)
        first = run(directory)
        assert len(first) <= 1, first
        assert "not used" in "".join(first) or not first
        second = run(directory)
        assert len(second) <= 1
        if first:
            assert second == []
            check(directory)


@fuzz(60)
@given(
    st.none() | st.binary(max_size=200) | st.just(b"SQLite format 3\0" + bytes(200)),
    st.none() | st.binary(max_size=200) | st.just(bytes.fromhex("d9d505f920a163d7") + bytes(600)),
)
def test_any_files_begin_a_run_with_one_warning_at_most_and_the_next_with_none(content, journal):
    with TemporaryDirectory() as directory:
        if content is not None:
            Path(directory, "state.db").write_bytes(content)
        if journal is not None:
            Path(directory, "state.db-journal").write_bytes(journal)
        said = run(directory)
        assert len(said) <= 1
        if "none is" not in "".join(said):
            check(directory)


@fuzz(60)
@given(st.integers(0, 2**32))
def test_any_journal_beside_a_file_does_no_harm_that_is_not_over_with_the_run(seed):
    dice = random.Random(seed)
    magic = bytes.fromhex("d9d505f920a163d7")
    head = [dice.choice([0, 1, 2, 2**32 - 1]) for _ in range(3)] + [
        512,
        dice.choice([512, 4096, 7]),
    ]
    journal = magic + b"".join(each.to_bytes(4, "big") for each in head)
    journal += bytes(512 - len(journal)) + dice.randbytes(dice.randrange(9000))
    with TemporaryDirectory() as directory:
        Path(directory, "state.db").write_bytes(whole(2000))
        Path(directory, "state.db-journal").write_bytes(journal)
        said = run(directory)
        assert len(said) <= 1
        assert run(directory) == []
