"""Whatever is in the cache directory, a run begins: with what was kept, or empty with one warning.

The bytes have the right checksums here, so that what they say is read; what is wrong in it costs
requests.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.addresses import Origin
from _regsync.auth.credentials import Credential
from _regsync.auth.tokens import Authenticator
from _regsync.state.database import (
    _CRC,
    _HEAD,
    _LAYOUTS,
    _MAGIC,
    _VERSION,
    EMPTY,
    Archive,
    Damaged,
    StateFile,
    digest_like,
    entry,
    folded,
    frame,
    key_of,
    named,
    unframe,
)
from _regsync.state.knowledge import Knowledge
from tests.fuzzing import fuzz, trees

DIGESTS = [f"sha256:{number:064x}" for number in range(4)] + [f"sha512:{1:0128x}"]
WHERES = [("host", "repo"), ("host", "other"), ("else", "repo")]
NOW = 1_000_000
NAMES = [
    "login host",
    "login else",
    "mounts host",
    "lenient host",
    "probes host repo",
    "whole host",
    "x",
]

IDENTITIES = st.builds(
    lambda digest, number: key_of(digest) + number.to_bytes(4, "big"),
    st.sampled_from(DIGESTS),
    st.sampled_from([0, 1, 2, 3, 2**32 - 1]),
)
MOMENTS = st.sampled_from([0, 1, NOW - 60, NOW, 2**32 - 1]).map(_CRC.pack)
KEYS = st.sampled_from(DIGESTS).map(key_of) | st.binary(min_size=33, max_size=33)
ROWS = {
    "B": st.builds(
        lambda *parts: b"".join(parts),
        IDENTITIES,
        MOMENTS,
        st.sampled_from([b"\0", b"\1", b"\xff"]),
    ),
    "M": st.builds(lambda *parts: b"".join(parts), IDENTITIES, MOMENTS, st.just(b"\0")),
    "E": st.builds(lambda *parts: b"".join(parts), IDENTITIES, KEYS),
    "S": st.builds(
        lambda *parts: b"".join(parts),
        st.sampled_from([named("a"), named("b")]),
        MOMENTS,
        KEYS,
        KEYS,
    ),
    "A": st.builds(
        lambda *parts: b"".join(parts),
        st.sampled_from([named("a"), named("b")]),
        MOMENTS,
        MOMENTS,
        st.binary(max_size=2),
    ),
}
NONE = (b"",) * len(_LAYOUTS)
TABLES = st.tuples(
    *(
        st.lists(ROWS[table], max_size=4).map(b"".join) | st.binary(max_size=90)
        for table in _LAYOUTS
    )
)
LISTS = st.one_of(
    st.lists(st.sampled_from(WHERES) | trees("x"), max_size=4),
    st.lists(st.sampled_from(WHERES), max_size=4),
    trees("x"),
)
FACTS = st.one_of(
    trees(*NAMES),
    st.dictionaries(
        st.sampled_from(NAMES),
        st.tuples(
            trees(
                "x",
                leaves=st.sampled_from(
                    [True, ["bearer", "https://a", "", "", ""], ["basic"] * 5, "bearer"]
                ),
            ),
            st.sampled_from([NOW, 0, 1e400, -5, "7"]),
        ),
    ),
)


def image(first: object, second: object, tables: tuple[bytes, ...]) -> bytes:
    parts = [json.dumps(first).encode(), json.dumps(second).encode(), *tables]
    whole = _HEAD.pack(_MAGIC, _VERSION, NOW, *map(len, parts)) + b"".join(parts)
    return whole + _CRC.pack(zlib.crc32(whole))


def opened(data: bytes) -> Archive:
    try:
        return Archive(data)
    except Damaged:
        return EMPTY


def use(archive: Archive, ttl: float) -> bytes | None:
    """Ask and tell all that a run does; return what it would save."""
    known = Knowledge(archive, now=lambda: float(NOW), ttl=ttl, note=lambda record: None)
    for where in WHERES:
        for digest in DIGESTS:
            known.has_blob(where, digest, careful=True)
            known.is_committed(where, digest)
            known.mount_source(where, digest)
            known.miss(where, digest)
        known.mounts(where[0])
        known.may_probe(where, True)
        known.probed(where)
        origin = Origin("https", "registry.test", 443)
        login = Authenticator(
            origin=origin,
            credential=Credential("u", "p"),
            fetch=pytest.fail,
            now=float,
            wall=float,  # type: ignore[arg-type]
        )
        login.recall(known.fact(f"login {where[0]}"))
        known.learn(f"login {where[0]}", login.learnt)
        known.learn_probe(where, absent=True)
    known.vouch(WHERES[0], DIGESTS[0])
    known.contradict(WHERES[1])
    known.forget(WHERES[0], DIGESTS[1])
    known.commit(WHERES[1], DIGESTS[2], DIGESTS[3:4], DIGESTS[:1])
    for name in (named("a"), named("c")):
        known.snapshot(name)
        known.take_snapshot(name, key_of(DIGESTS[0]), key_of(DIGESTS[1]))
        known.look(name)
        known.looked(name, 7, bytes(8))
        digest_like((known.snapshot(name) or (b"\1" + bytes(32),))[0])
    return known.encoded()


@fuzz(150)
@given(LISTS, FACTS, TABLES, st.sampled_from([0.0, 100.0, 1e9]))
@example([WHERES[0]] * 2, {}, NONE, 0.0)
@example([], {"x": [0, 1e400]}, NONE, 0.0)
@example([], {"login host": [5, NOW]}, NONE, 0.0)
@example([], {"login host": [[["bearer", 5, "", "", ""], False], NOW]}, NONE, 0.0)
@example([], {"probes host repo": [True, NOW]}, NONE, 0.0)
def test_any_state_is_used_or_refused_and_what_is_saved_is_whole(
    first: object, second: object, tables: Any, ttl: float
) -> None:
    saved = use(opened(image(first, second, tables)), ttl)
    assert saved is not None
    again = Archive(saved)
    known = Knowledge(again, now=lambda: float(NOW), ttl=ttl)
    assert known.is_committed(WHERES[1], DIGESTS[2])
    assert known.snapshot(named("c")) == (key_of(DIGESTS[0]), key_of(DIGESTS[1]))


RECORDS = st.lists(
    st.one_of(
        st.tuples(
            st.just("R"), st.sampled_from([b"host\0repo", b"a\0b\0c", b"\0", b"x", b"\xff\0\xff"])
        ),
        *(st.tuples(st.just(table), rows) for table, rows in ROWS.items()),
        st.tuples(st.sampled_from("RBMESAX\xff"), st.binary(max_size=50)),
    ),
    max_size=6,
)


def framed(kind: str, payload: bytes) -> bytes:
    record = kind.encode("latin-1") + len(payload).to_bytes(2, "big") + payload
    return record + _CRC.pack(zlib.crc32(record))


@fuzz(200)
@given(
    st.binary(max_size=200)
    | RECORDS.map(lambda records: b"".join(framed(*each) for each in records))
)
def test_any_journal_folds_or_is_damaged(journal: bytes) -> None:
    records, end = unframe(journal)
    assert 0 <= end <= len(journal)
    assert unframe(journal[:end]) == (records, end)
    try:
        archive = folded(EMPTY, records)
    except Damaged:
        return
    use(archive, 0.0)


@fuzz(60)
@given(
    st.one_of(st.none(), st.binary(max_size=99), st.builds(image, LISTS, FACTS, TABLES)),
    st.one_of(
        st.none(),
        st.binary(max_size=99),
        RECORDS.map(lambda records: b"".join(framed(*each) for each in records)),
    ),
    st.booleans(),
)
def test_any_files_begin_a_run_with_one_warning_at_most_and_the_next_with_none(
    whole: bytes | None, journal: bytes | None, beside: bool
) -> None:
    with TemporaryDirectory() as directory:
        if whole is not None:
            Path(directory, "state.bin").write_bytes(whole)
        if journal is not None:
            header = b"regsyncj" + zlib.crc32(whole or b"").to_bytes(4, "big") if beside else b""
            Path(directory, "state.journal").write_bytes(header + journal)
        row = entry(key_of(DIGESTS[0]), 0, NOW, True)
        for most in (1, 0):
            warned: list[str] = []
            kept = StateFile(
                directory, lambda event, message, warned=warned: warned.append(message)
            )  # type: ignore[misc]
            archive = kept.load()
            assert len(warned) <= most
            assert all("\n" not in message for message in warned)
            kept.note(frame("B", row))
            kept.save(use(archive, 0.0))
            kept.close()
