"""The format of the warm tier: what is written is found again, and what is damaged is refused
whole.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.state.database import (
    EMPTY,
    Archive,
    Damaged,
    StateFile,
    encode,
    entry,
    folded,
    frame,
    key_of,
    moment_of,
    named,
    unframe,
)

DIGESTS = [f"sha256:{number:064x}" for number in range(40)] + [
    f"sha512:{number:064x}{0:064x}" for number in range(5)
]


def table(*rows: bytes) -> bytes:
    return encode(EMPTY, {"B": list(rows)}, [("host", "repo"), ("host", "other")], {})


def size(archive: Archive) -> int:
    return sum(1 for name in "BMES" for _ in archive.rows(name))


def identity(digest: str, number: int) -> bytes:
    return key_of(digest) + number.to_bytes(4, "big")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DIGESTS), st.integers(0, 1), st.integers(0, 2**32 - 1), st.booleans()
        ),
        max_size=60,
    )
)
def test_of_each_identity_the_newest_row_is_found_and_a_mount_source_stays_one(
    rows: list[tuple[str, int, int, bool]],
) -> None:
    half = len(rows) // 2
    first = Archive(table(*(entry(key_of(d), n, t, f) for d, n, t, f in rows[:half])))
    both = Archive(
        encode(first, {"B": [entry(key_of(d), n, t, f) for d, n, t, f in rows[half:]]}, [], {})
    )
    assert both.repositories == [("host", "repo"), ("host", "other")]
    assert size(both) == len({(d, n) for d, n, _, _ in rows})
    for digest, number, _, _ in rows:
        same = [(t, f) for d, n, t, f in rows if (d, n) == (digest, number)]
        row = both.row("B", identity(digest, number))
        assert row is not None
        assert moment_of("B", row) == max(t for t, _ in same)
        assert bool(row[41]) == any(f for _, f in same)
    assert both.row("B", identity(f"sha256:{'f' * 64}", 0)) is None


def test_rows_that_begin_alike_are_given_in_order_and_no_others() -> None:
    rows = [entry(key_of(digest), number, 5, False) for digest in DIGESTS for number in (0, 1)]
    random.Random(1).shuffle(rows)
    archive = Archive(table(*rows))
    for digest in DIGESTS:
        found = list(archive.rows("B", key_of(digest)))
        assert found == sorted(row for row in rows if row.startswith(key_of(digest)))
        assert len(found) == 2


def test_what_is_too_old_or_forgotten_is_dropped_with_what_it_names() -> None:
    manifest, old, blob = identity(DIGESTS[0], 0), identity(DIGESTS[1], 0), key_of(DIGESTS[2])
    whole = encode(
        EMPTY,
        {
            "M": [manifest + b"\0\0\0\x09\0", old + b"\0\0\0\x01\0"],
            "E": [manifest + blob, old + blob],
            "B": [entry(key_of(DIGESTS[3]), 0, 9, True), entry(key_of(DIGESTS[4]), 0, 9, True)],
            "S": [named("new") + b"\0\0\0\x09" + blob * 2, named("old") + b"\0\0\0\x01" + blob * 2],
        },
        [("host", "repo")],
        {"mounts host": (True, 9)},
        oldest=5,
        forgotten=frozenset({identity(DIGESTS[4], 0)}),
    )
    archive = Archive(whole)
    assert list(archive.rows("M")) == [manifest + b"\0\0\0\x09\0"]
    assert list(archive.rows("E")) == [manifest + blob]
    assert [row[:37] for row in archive.rows("B")] == [identity(DIGESTS[3], 0)]
    assert archive.row("S", named("new")) is not None
    assert archive.row("S", named("old")) is None
    assert archive.facts == {"mounts host": (True, 9)}


def test_what_was_confirmed_for_free_is_as_new_as_the_run() -> None:
    old = Archive(table(*(entry(key_of(digest), 0, 3, True) for digest in DIGESTS[:2])))
    renewed = frozenset({identity(DIGESTS[0], 0)})
    archive = Archive(encode(old, {}, [], {}, oldest=4, renewed=renewed, moment=8))
    assert [(row[:37], moment_of("B", row)) for row in archive.rows("B")] == [
        (identity(DIGESTS[0], 0), 8)
    ]
    assert archive.renewed == 8


@pytest.mark.parametrize("harm", ["cut", "flip", "version", "magic", "empty", "lists"])
def test_damaged_bytes_are_refused_whole(harm: str) -> None:
    whole = table(*(entry(key_of(digest), 0, 3, True) for digest in DIGESTS))
    broken = {
        "cut": whole[:-9],
        "flip": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
        "version": whole[:9] + b"\x63" + whole[10:],
        "magic": b"nothing!" + whole[8:],
        "empty": b"",
        "lists": encode(EMPTY, {}, [("host",)], {}),  # type: ignore[list-item]
    }[harm]
    with pytest.raises(Damaged):
        Archive(broken)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_archive_or_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        Archive(data)


@given(
    st.lists(st.tuples(st.sampled_from("RBMES"), st.binary(max_size=80)), max_size=8),
    st.integers(0, 400),
)
def test_a_journal_is_read_up_to_its_torn_tail(records: list[tuple[str, bytes]], cut: int) -> None:
    frames = [frame(kind, payload) for kind, payload in records]
    whole = b"".join(frames)
    read, end = unframe(whole[:cut])
    assert read == records[: len(read)]
    assert end == len(b"".join(frames[: len(read)])) <= min(cut, len(whole))
    assert len(read) == len(records) or end + len(frames[len(read)]) > min(cut, len(whole))


def test_a_journal_folds_into_its_archive() -> None:
    base = Archive(table(entry(key_of(DIGESTS[0]), 0, 3, True)))
    row = entry(key_of(DIGESTS[1]), 2, 4, False)
    archive = folded(base, [("R", b"host\0third"), ("B", row)])
    assert archive.repositories == [("host", "repo"), ("host", "other"), ("host", "third")]
    assert size(archive) == 2
    assert archive.row("B", row[:37]) == row
    with pytest.raises(Damaged):
        folded(base, [("B", b"short")])


class Warned(list[str]):
    def __call__(self, event: str, message: str) -> None:
        self.append(message)


def test_what_is_saved_is_loaded_again_with_private_modes(tmp_path: Path) -> None:
    warned = Warned()
    state = StateFile(str(tmp_path / "cache"), warned)
    assert size(state.load()) == 0
    state.save(table(entry(key_of(DIGESTS[0]), 0, 3, True)))
    state.close()
    assert sorted(each.name for each in (tmp_path / "cache").iterdir()) == [
        "state.bin",
        "state.lock",
    ]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / "state.bin").stat().st_mode & 0o777 == 0o600
    again = StateFile(str(tmp_path / "cache"), warned)
    assert size(again.load()) == 1
    again.close()
    assert warned == []


@pytest.mark.parametrize("torn", [0, 1, 20])
def test_after_a_kill_the_journal_is_all_and_it_goes_on_behind_its_last_whole_record(
    tmp_path: Path, torn: int
) -> None:
    warned = Warned()
    killed = StateFile(str(tmp_path), warned)
    killed.load()
    killed.note(frame("R", b"host\0repo"))
    killed.note(frame("B", entry(key_of(DIGESTS[0]), 0, 3, True)))
    killed.close()
    with open(tmp_path / "state.journal", "ab") as journal:
        journal.write(frame("B", entry(key_of(DIGESTS[1]), 0, 3, True))[:torn])
    second = StateFile(str(tmp_path), warned)
    assert size(second.load()) == 1
    second.note(frame("B", entry(key_of(DIGESTS[2]), 0, 3, True)))
    second.close()
    third = StateFile(str(tmp_path), warned)
    archive = third.load()
    assert [row[:37] for row in archive.rows("B")] == [
        identity(DIGESTS[0], 0),
        identity(DIGESTS[2], 0),
    ]
    third.save(encode(archive, {}, [], {}))
    third.close()
    assert not (tmp_path / "state.journal").exists()
    assert warned == []


def test_a_journal_of_another_state_file_is_left_alone(tmp_path: Path) -> None:
    first = StateFile(str(tmp_path), Warned())
    first.load()
    first.note(frame("R", b"host\0old"))
    first.close()
    (tmp_path / "state.bin").write_bytes(table(entry(key_of(DIGESTS[0]), 1, 3, True)))
    second = StateFile(str(tmp_path), Warned())
    assert second.load().repositories == [("host", "repo"), ("host", "other")]
    second.close()


def test_a_second_run_reads_and_leaves_nothing_behind(tmp_path: Path) -> None:
    first, warned = StateFile(str(tmp_path), Warned()), Warned()
    first.load()
    first.save(table(entry(key_of(DIGESTS[0]), 0, 3, True)))
    second = StateFile(str(tmp_path), warned)
    assert size(second.load()) == 1
    assert not second.is_kept
    second.note(b"never written")
    second.save(b"never written")
    second.close()
    assert warned == [f"another run uses {tmp_path}: this one leaves no state behind"]
    first.close()
    assert size(StateFile(str(tmp_path), Warned()).load()) == 1


def test_damage_is_said_once_and_the_next_save_ends_it(tmp_path: Path) -> None:
    (tmp_path / "state.bin").write_bytes(b"not ours")
    warned = Warned()
    state = StateFile(str(tmp_path), warned)
    assert size(state.load()) == 0
    assert len(warned) == 1
    assert "not used" in warned[0]
    state.save(table(entry(key_of(DIGESTS[0]), 0, 3, True)))
    state.close()
    after = StateFile(str(tmp_path), warned)
    assert size(after.load()) == 1
    after.close()
    assert len(warned) == 1


@pytest.mark.parametrize("place", ["a file", "/proc/nowhere"])
def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_text("x")
    warned = Warned()
    state = StateFile(place if place.startswith("/") else str(tmp_path / place), warned)
    assert state.load() is EMPTY
    state.note(b"x")
    state.save(b"x")
    state.close()
    assert len(warned) == 1, warned


def test_a_full_disk_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    warned = Warned()
    state = StateFile(str(tmp_path), warned)
    state.load()
    monkeypatch.setattr(os, "write", full)
    state.note(b"x")
    assert not state.is_kept
    assert len(warned) == 1
    monkeypatch.undo()
    other = StateFile(str(tmp_path), warned)
    other.load()
    monkeypatch.setattr(os, "fsync", full)
    other.save(b"x")
    monkeypatch.undo()
    other.close()
    assert len(warned) == 2
    assert not list(tmp_path.glob("*.partial"))


def test_what_a_full_disk_did_not_take_is_kept_unless_another_run_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    def held(state: StateFile) -> list[bytes]:
        return [row[:37] for row in state.load().rows("B")]

    ours, others = (table(entry(key_of(digest), 1, 3, True)) for digest in DIGESTS[:2])
    state = StateFile(str(tmp_path), warned := Warned(), remembers=True)
    with monkeypatch.context() as filled:
        filled.setattr(os, "fsync", full)
        assert held(state) == []
        state.save(ours)
        state.close()
        for _ in range(2):
            assert held(state) == [identity(DIGESTS[0], 1)]
            assert not state.is_kept
            state.note(frame("R", b"host\0third"))
            state.save(None)
            state.close()
    assert len(warned) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["state.lock"]
    assert held(state) == [identity(DIGESTS[0], 1)]
    assert state.is_kept
    assert (tmp_path / "state.bin").read_bytes() == ours
    state.close()
    with monkeypatch.context() as filled:
        filled.setattr(os, "fsync", full)
        state.load()
        state.save(ours)
        state.close()
    other = StateFile(str(tmp_path), Warned())
    other.load()
    other.save(others)
    other.close()
    assert held(state) == [identity(DIGESTS[1], 1)]
    state.close()


def test_what_a_clock_confirmed_that_is_ahead_gives_way_to_what_is_confirmed_now() -> None:
    ahead, now, old = (entry(key_of(DIGESTS[0]), 0, moment, False) for moment in (900, 100, 50))
    for rows, kept in [([ahead, now, old], now), ([ahead, old], old), ([ahead], ahead)]:
        archive = Archive(encode(Archive(table(rows[0])), {"B": rows[1:]}, [], {}, newest=500))
        assert list(archive.rows("B")) == [kept]


def test_what_follows_a_damaged_journal_is_no_part_of_the_file_beside_it(tmp_path: Path) -> None:
    """Its repositories are numbered from nothing: read with the old ones they would be others."""
    first = StateFile(str(tmp_path), Warned())
    first.load()
    first.save(table(entry(key_of(DIGESTS[0]), 1, 3, True)))
    first.close()
    second = StateFile(str(tmp_path), Warned())
    second.load()
    second.note(frame("B", b"no row"))
    second.close()
    third = StateFile(str(tmp_path), warned := Warned())
    assert third.load() is EMPTY
    third.note(frame("R", b"host\0third"))
    third.note(frame("B", entry(key_of(DIGESTS[1]), 0, 3, True)))
    third.close()
    assert len(warned) == 1
    killed = StateFile(str(tmp_path), Warned())
    archive = killed.load()
    assert archive.repositories == [("host", "repo"), ("host", "other")]
    assert [row[:37] for row in archive.rows("B")] == [identity(DIGESTS[0], 1)]
    killed.close()
