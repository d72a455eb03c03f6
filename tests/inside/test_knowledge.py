"""What a run believes of what earlier ones left (docs/design.md section 7, "Vouching"), and for how long."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable

import pytest

from _regsync.state.archive import (
    MOST_HOLDERS,
    BlobEntry,
    Fact,
    ManifestEntry,
    MemoryArchive,
    RepositoryKey,
    Snapshot,
    SnapshotEntry,
    digest_like,
    hashed_key,
    key_of,
)
from _regsync.state.knowledge import Knowledge, ProbeAnswers

HOUR = 3600
DAY = 86400
NOW = 100 * DAY
HOST = "host:5000"
A = RepositoryKey(HOST, "a")
B = RepositoryKey(HOST, "b/one")
C = RepositoryKey("else", "a")
TOP, CHILD, BLOB, OTHER = (f"sha256:{number:064x}" for number in range(1, 5))


def held(archive: MemoryArchive, moment: int = NOW - HOUR) -> None:
    """Put an index with one child of one blob into A."""
    archive.put_manifest(A, key_of(TOP), ManifestEntry(moment, (), (key_of(CHILD),)))
    archive.put_manifest(A, key_of(CHILD), ManifestEntry(moment, (key_of(BLOB),), ()))
    archive.put_blob(A, key_of(BLOB), BlobEntry(moment, True))


def known(archive: MemoryArchive, now: int = NOW, ttl: float = DAY) -> Knowledge:
    return Knowledge(archive, now=lambda: float(now), ttl=ttl)


def test_a_key_is_of_one_length_and_says_its_algorithm() -> None:
    for digest in (TOP, f"sha512:{5:0128x}"):
        key = key_of(digest)
        assert len(key) == 33
        assert digest.startswith(digest_like(key))
    assert digest_like(b"\7" + bytes(32)).startswith(":")


@pytest.mark.parametrize(
    ("age", "ttl", "believed"),
    [(DAY, DAY, True), (DAY + 1, DAY, False), (90 * DAY, 0, True), (-DAY - 1, 0, False)],
)
def test_an_entry_is_believed_as_long_as_it_lasts(age: int, ttl: float, believed: bool) -> None:
    archive = MemoryArchive()
    held(archive, NOW - age)
    knowledge = known(archive, ttl=ttl)
    assert knowledge.is_blob_believed(A, BLOB) is believed
    assert knowledge.is_manifest_believed(A, TOP) is believed
    assert (knowledge.mount_source(B, BLOB) == "a") is believed
    assert not knowledge.is_confirmed(A, BLOB)
    assert not knowledge.is_blob_believed(B, BLOB)
    assert knowledge.mount_source(C, BLOB) is None


@pytest.mark.parametrize(("age", "fresh"), [(30 * 60, True), (30 * 60 + 1, False)])
def test_a_careful_look_believes_what_is_fresh_or_vouched_for(age: int, fresh: bool) -> None:
    archive = MemoryArchive()
    held(archive, NOW - age)
    knowledge = known(archive)
    assert knowledge.is_blob_believed(A, BLOB, must_be_recent=True) is fresh
    knowledge.confirm_tagged_manifest(A, TOP)
    assert knowledge.is_blob_believed(A, BLOB, must_be_recent=True), "whatever its depth"


def test_a_contradicted_repository_is_believed_where_it_is_vouched_for() -> None:
    archive = MemoryArchive()
    held(archive)
    knowledge = known(archive)
    knowledge.confirm_tagged_manifest(A, TOP)
    knowledge.record_populated(A, False)
    assert knowledge.is_empty(A)
    assert not knowledge.is_blob_believed(A, BLOB)
    knowledge.confirm_tagged_manifest(A, TOP)
    assert knowledge.is_blob_believed(A, BLOB)


def test_a_host_that_misses_what_it_vouches_for_is_lenient_for_a_day() -> None:
    archive = MemoryArchive()
    held(archive)
    knowledge = known(archive)
    knowledge.record_absent_blob(A, BLOB)
    assert knowledge.is_blob_believed(A, BLOB)
    knowledge.confirm_tagged_manifest(A, TOP)
    knowledge.record_absent_blob(A, BLOB)
    assert knowledge.facts_of(HOST).accepts_absent_blobs
    later = known(archive, NOW + DAY - 1, ttl=0)
    assert not later.is_blob_believed(A, BLOB)
    assert known(archive, NOW + DAY + 1, ttl=0).is_blob_believed(A, BLOB)


def test_what_is_forgotten_goes_with_what_it_names() -> None:
    archive = MemoryArchive()
    held(archive)
    archive.put_blob(B, key_of(BLOB), BlobEntry(NOW, True))
    knowledge = known(archive)
    knowledge.forget(A, CHILD)
    assert not knowledge.is_manifest_believed(A, CHILD)
    assert not knowledge.is_blob_believed(A, BLOB)
    assert knowledge.is_manifest_believed(A, TOP)
    assert knowledge.is_blob_believed(B, BLOB)
    assert list(knowledge.holders(HOST, BLOB)) == ["b/one"]
    knowledge.confirm_manifest(A, CHILD, [BLOB])
    assert known(archive).is_manifest_believed(A, CHILD)
    assert known(archive).is_blob_believed(A, BLOB)


def test_what_could_be_mounted_from_there_once_still_can() -> None:
    archive = MemoryArchive()
    held(archive)
    knowledge = known(archive)
    knowledge.confirm_blob(A, BLOB)
    knowledge.confirm_blob(A, OTHER)
    assert archive.blob(A, key_of(BLOB)) == BlobEntry(NOW, True)
    assert archive.blob(A, key_of(OTHER)) == BlobEntry(NOW, False)
    assert known(archive).mount_source(B, OTHER) is None


@pytest.mark.parametrize(("age", "renewed"), [(6 * HOUR, False), (6 * HOUR + 1, True)])
def test_what_a_tag_vouches_for_is_renewed_in_each_quarter_of_its_life(
    age: int, renewed: bool
) -> None:
    archive = MemoryArchive()
    held(archive, NOW - age)
    archive.put_blob(A, key_of(OTHER), BlobEntry(NOW - age, True))
    knowledge = known(archive)
    knowledge.confirm_tagged_manifest(A, TOP)
    knowledge.finish()
    moment = NOW if renewed else NOW - age
    for digest in (TOP, CHILD):
        entry = archive.manifest(A, key_of(digest))
        assert entry is not None
        assert entry.confirmed_at == moment
    assert archive.blob(A, key_of(BLOB)) == BlobEntry(moment, True)
    assert archive.blob(A, key_of(OTHER)) == BlobEntry(NOW - age, True)


def test_manifests_that_name_each_other_are_renewed_once() -> None:
    archive = MemoryArchive()
    for one, other in ((TOP, CHILD), (CHILD, TOP)):
        archive.put_manifest(A, key_of(one), ManifestEntry(1, (), (key_of(other),)))
    knowledge = known(archive)
    knowledge.confirm_tagged_manifest(A, TOP)
    assert not knowledge.is_blob_believed(A, BLOB)
    knowledge.finish()
    assert archive.manifest(A, key_of(CHILD)) == ManifestEntry(NOW, (), (key_of(TOP),))


def test_each_fact_of_a_host_lasts_a_day_from_when_it_was_learnt() -> None:
    archive = MemoryArchive()
    login = [["bearer", "https://realm.test", "", "", ""], False]
    morning = known(archive, NOW)
    morning.record_login(HOST, login)
    morning.record_referrers_api(B, False)
    morning.record_fallback_size(HOST, 5)
    noon = known(archive, NOW + DAY // 2)
    noon.record_mount(HOST)
    noon.record_probe_answer(B, is_202_if_absent=True)
    noon.record_login(HOST, login)

    evening = known(archive, NOW + DAY)
    assert evening.facts_of(HOST).login == login
    assert evening.facts_of(HOST).fallback_size == 5
    assert evening.has_referrers_api(B) is False
    assert evening.has_referrers_api(A) is None

    next_day = known(archive, NOW + DAY + 1)
    assert next_day.facts_of(HOST).login is None
    assert next_day.facts_of(HOST).fallback_size is None
    assert next_day.has_referrers_api(B) is None
    assert next_day.supports_mounts(HOST) is True
    assert next_day.probe_answers(RepositoryKey(HOST, "b/two")) == ProbeAnswers(
        is_202_if_absent=True, is_201_if_present=None
    )
    assert next_day.probe_answers(A) == ProbeAnswers(is_202_if_absent=None, is_201_if_present=None)
    assert next_day.facts_of("else").supports_mounts is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mounts", 1),
        ("mounts", None),
        ("probe_answers", [True]),
        ("probe_answers", [1, 0]),
        ("smallest_patch", "5"),
        ("smallest_patch", True),
        ("has_referrers_api", "no"),
        ("is_lenient", []),
        ("else", True),
    ],
)
def test_a_fact_of_another_form_is_passed_over(name: str, value: object) -> None:
    archive = MemoryArchive()
    archive.put_fact(HOST, Fact(name, "", value, NOW))
    assert known(archive).facts_of(HOST) == known(MemoryArchive()).facts_of(HOST)


def test_a_fact_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[Fact]()
    archive = MemoryArchive()
    monkeypatch.setattr(archive, "put_fact", lambda host, fact: written.append(fact))
    knowledge = known(archive)
    for _ in range(3):
        knowledge.record_mount(HOST)
        knowledge.record_fallback_size(HOST, None)
        knowledge.record_probe_answer(B, is_202_if_absent=True)
        knowledge.record_referrers_api(B, True)
    assert written == [
        Fact("mounts", "", True, NOW),
        Fact("probe_answers", "b", [True, None], NOW),
        Fact("has_referrers_api", "b", True, NOW),
    ]


def test_an_unchanged_tag_is_written_anew_in_each_quarter_of_its_life_only() -> None:
    archive = MemoryArchive()
    name = hashed_key("a")
    keys = Snapshot(key_of(TOP), key_of(CHILD))
    for now, written in ((NOW, NOW), (NOW + 6 * HOUR, NOW), (NOW + 6 * HOUR + 1, None)):
        knowledge = known(archive, now)
        knowledge.record_snapshot(name, keys, knowledge.snapshots([name]).get(name))
        assert knowledge.snapshots([name])[name].snapshot == keys
        assert archive.snapshots_by_name[name].confirmed_at == (written or now)
    knowledge = known(archive, NOW + 7 * HOUR)
    knowledge.record_snapshot(
        name, Snapshot(keys.source, keys.source), knowledge.snapshots([name])[name]
    )
    assert archive.snapshots_by_name[name].confirmed_at == NOW + 7 * HOUR
    assert known(archive, NOW + 40 * HOUR).snapshots([name]) == {}


def test_what_is_too_old_is_swept_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = MemoryArchive()
    swept = list[tuple[int, dict[str, int]]]()

    def sweep(moment: int, **limits: int) -> None:
        swept.append((moment, limits))
        archive.swept_at = moment

    monkeypatch.setattr(archive, "sweep", sweep)
    for now in (NOW, NOW + DAY, NOW + DAY + 1):
        known(archive, now, ttl=7 * DAY).finish()
    known(archive, NOW + 3 * DAY, ttl=0).finish()
    assert [moment for moment, _ in swept] == [NOW, NOW + DAY + 1, NOW + 3 * DAY]
    assert swept[0][1] == {
        "entries_before": NOW - 7 * DAY,
        "checks_before": NOW - 400 * DAY,
        "facts_before": NOW - DAY,
    }
    assert swept[2][1]["entries_before"] == 0


@pytest.mark.parametrize("name", ["a b", "a&digest=x", "a\r\nX: y", "A", "", "a/../b", "\ufffd"])
def test_a_name_that_no_repository_has_is_never_mounted_from(name: str) -> None:
    archive = MemoryArchive()
    archive.put_blob(RepositoryKey(HOST, name), key_of(BLOB), BlobEntry(NOW - HOUR, True))
    assert known(archive).mount_source(B, BLOB) is None


class Counted(MemoryArchive):
    """An archive that knows what it was asked for."""

    def __init__(self) -> None:
        self.asked_for_holders = 0
        self.asked_for_snapshots = list[list[bytes]]()
        super().__init__()

    def holders_of(self, host: str, key: bytes) -> dict[str, int]:
        self.asked_for_holders += 1
        return super().holders_of(host, key)

    def snapshots(self, names: Iterable[bytes]) -> dict[bytes, SnapshotEntry]:
        names = list(names)
        self.asked_for_snapshots.append(names)
        return super().snapshots(names)


def test_a_blob_in_many_repositories_is_mounted_from_the_oldest_ones() -> None:
    knowledge = known(Nothing())
    names = [f"app-{number}" for number in range(MOST_HOLDERS + 1)]
    for name in names:
        knowledge.confirm_manifest(RepositoryKey(HOST, name), TOP, [BLOB])
        knowledge.confirm_manifest(RepositoryKey(HOST, name), CHILD, [BLOB])
    assert list(knowledge.holders(HOST, BLOB)) == names[:-1]
    knowledge.forget(RepositoryKey(HOST, names[0]), BLOB)
    knowledge.confirm_manifest(RepositoryKey(HOST, names[-1]), OTHER, [BLOB])
    assert list(knowledge.holders(HOST, BLOB)) == names[1:]
    assert list(knowledge.holders("else", BLOB)) == []


def test_what_a_run_knows_of_a_blob_that_it_copies_is_small() -> None:
    """An image of six layers takes 3 kB of it: 20,000 images take 60 MB."""
    images = [
        (
            f"sha256:{number:064x}",
            [f"sha256:{1000 * layer + number:064x}" for layer in range(7, 14)],
        )
        for number in range(1000)
    ]
    knowledge = known(Nothing())
    tracemalloc.start()
    for top, blobs in images:
        for blob in blobs:
            knowledge.confirm_blob(A, blob)
        knowledge.confirm_manifest(A, top, blobs)
    key_of.cache_clear()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 7000 < 400


def test_the_archive_is_asked_once_who_holds_a_blob() -> None:
    archive = Counted()
    held(archive)
    archive.put_blob(B, key_of(BLOB), BlobEntry(NOW, True))
    knowledge = known(archive)
    for _ in range(4):
        assert list(knowledge.holders(HOST, BLOB)) == ["a", "b/one"]
    assert archive.asked_for_holders == 1
    knowledge.forget(A, BLOB)
    assert list(knowledge.holders(HOST, BLOB)) == ["b/one"]
    knowledge.record_populated(B, False)
    assert list(knowledge.holders(HOST, BLOB)) == []
    knowledge.confirm_manifest(A, CHILD, [BLOB])
    assert list(knowledge.holders(HOST, BLOB)) == ["a"]
    assert archive.asked_for_holders == 1


def test_snapshots_are_read_at_once_and_nothing_is_read_when_one_is_recorded() -> None:
    archive = Counted()
    names = [hashed_key(text) for text in "abc"]
    old = Snapshot(key_of(TOP), key_of(TOP))
    new = Snapshot(key_of(CHILD), key_of(CHILD))
    for name in names[:2]:
        known(archive, NOW - HOUR).record_snapshot(name, old)
    archive.asked_for_snapshots.clear()

    knowledge = known(archive)
    entries = knowledge.snapshots(names)
    assert [entries[name].snapshot for name in names[:2]] == [old, old]
    assert names[2] not in entries
    knowledge.record_snapshot(names[0], old, entries[names[0]])
    knowledge.record_snapshot(names[1], new, entries[names[1]])
    knowledge.record_snapshot(names[2], new)
    assert archive.asked_for_snapshots == [names]
    entries = knowledge.snapshots(names)
    assert [entries[name].snapshot for name in names] == [old, new, new]
    assert entries[names[0]].confirmed_at == NOW - HOUR


# What a tag's answer teaches (docs/design.md section 6, rule 4).


class Nothing(MemoryArchive):
    """The archive of a run without a state: nothing that it is given is found again."""

    def put_blob(self, where: RepositoryKey, key: bytes, entry: BlobEntry) -> None:
        pass

    def put_manifest(self, where: RepositoryKey, key: bytes, entry: ManifestEntry) -> None:
        pass


ARCHIVES = pytest.mark.parametrize("archive", [MemoryArchive, Nothing])


def test_a_run_that_saves_nothing_ends_where_manifests_name_each_other() -> None:
    archive = Nothing()
    for one, other in ((TOP, CHILD), (CHILD, TOP)):
        entry = ManifestEntry(1, (), (key_of(other),))
        MemoryArchive.put_manifest(archive, A, key_of(one), entry)
    knowledge = known(archive)
    knowledge.confirm_tagged_manifest(A, TOP)
    knowledge.finish()
    assert archive.manifest_times(A, [key_of(TOP)]) == {key_of(TOP): 1}


def shown(archive: type[MemoryArchive]) -> Knowledge:
    """Return what is known after a tag of A answered with an index, and both manifests were read."""
    knowledge = known(archive())
    knowledge.confirm_tagged_manifest(A, TOP)
    knowledge.record_tagged_content(HOST, TOP, [], [CHILD])
    knowledge.record_tagged_content(HOST, CHILD, [BLOB], [])
    return knowledge


@ARCHIVES
def test_what_a_shown_manifest_names_is_believed_and_not_confirmed(
    archive: type[MemoryArchive],
) -> None:
    knowledge = shown(archive)
    assert knowledge.is_manifest_believed(A, CHILD)
    assert knowledge.is_blob_believed(A, BLOB, must_be_recent=True)
    assert knowledge.mount_source(B, BLOB) == A[1]
    assert knowledge.choose_present_blob(A) == BLOB
    assert knowledge.is_confirmed(A, TOP)
    assert not knowledge.is_confirmed(A, CHILD)
    assert not knowledge.is_confirmed(A, BLOB)
    assert not knowledge.is_blob_believed(B, BLOB)


def test_a_manifest_that_no_tag_has_shown_teaches_nothing() -> None:
    knowledge = known(MemoryArchive())
    knowledge.record_tagged_content(HOST, TOP, [BLOB], [CHILD])
    knowledge.confirm_tagged_manifest(RepositoryKey("else.test", A[1]), TOP)
    knowledge.record_tagged_content(HOST, TOP, [BLOB], [CHILD])
    assert not knowledge.is_blob_believed(A, BLOB)
    assert not knowledge.is_manifest_believed(A, CHILD)


@ARCHIVES
def test_what_was_forgotten_is_not_believed_again(archive: type[MemoryArchive]) -> None:
    knowledge = shown(archive)
    for digest in (BLOB, CHILD):
        knowledge.forget(A, digest)
    knowledge.confirm_tagged_manifest(A, TOP)
    knowledge.record_tagged_content(HOST, TOP, [], [CHILD])
    knowledge.record_tagged_content(HOST, CHILD, [BLOB], [])
    assert not knowledge.is_manifest_believed(A, CHILD)
    assert not knowledge.is_blob_believed(A, BLOB)
    # Until it is there again.
    knowledge.confirm_manifest(A, CHILD, [BLOB])
    assert knowledge.is_manifest_believed(A, CHILD)
    assert knowledge.is_blob_believed(A, BLOB)


@ARCHIVES
def test_a_contradicted_repository_shows_nothing(archive: type[MemoryArchive]) -> None:
    knowledge = shown(Nothing)
    knowledge.record_contradiction(A)
    assert not knowledge.is_blob_believed(A, BLOB)
    assert knowledge.mount_source(B, BLOB) is None
    knowledge = known(archive())
    knowledge.confirm_tagged_manifest(A, TOP)
    knowledge.record_contradiction(A)
    knowledge.record_tagged_content(HOST, TOP, [BLOB], [CHILD])
    assert not knowledge.is_blob_believed(A, BLOB)
    assert not knowledge.is_manifest_believed(A, CHILD)


def test_what_is_too_old_is_believed_where_a_tag_shows_it() -> None:
    archive = MemoryArchive()
    known(archive, NOW).confirm_manifest(A, TOP, [BLOB])
    later = known(archive, NOW + 2 * DAY, ttl=float(DAY))
    assert not later.is_blob_believed(A, BLOB)
    assert later.mount_source(B, BLOB) is None
    later.confirm_tagged_manifest(A, TOP)
    assert later.is_blob_believed(A, BLOB)
    assert later.mount_source(B, BLOB) == A[1]


def test_a_blob_that_a_post_said_to_be_there_is_believed_until_it_is_forgotten() -> None:
    knowledge = known(Nothing())
    knowledge.record_probed_blob(A, BLOB)
    assert knowledge.is_blob_believed(A, BLOB)
    assert not knowledge.is_confirmed(A, BLOB)
    assert knowledge.mount_source(B, BLOB) is None
    knowledge.forget(A, BLOB)
    assert not knowledge.is_blob_believed(A, BLOB)
