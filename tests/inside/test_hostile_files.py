"""Files of others in our directories, and a state that says more than is true (R12, R16).

Whoever may write into `cache_dir` may put there what he likes: pipes and links, that blobs and
manifests are at a target, a clock that runs ahead, in a file that is whole. It costs requests, and
no image is wrong (I5).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from _regsync.state.archive import (
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
from _regsync.state.database import StateFile
from _regsync.state.knowledge import Knowledge
from tests import states

pytestmark = pytest.mark.rule("R12")

NOW = 2_000_000_000
AHEAD = NOW + 10 * 365 * 86400
DIGEST = f"sha256:{'a' * 64}"
WHERE = RepositoryKey("registry.test:5000", "app")


@pytest.mark.rule("R16")
@pytest.mark.parametrize(
    ("moment", "believed"), [(NOW, True), (NOW - 3600, True), (NOW + 3600, True), (AHEAD, False)]
)
def test_what_a_clock_confirmed_that_is_years_ahead_is_not_believed(moment, believed):
    name = hashed_key("a", "b")
    key = key_of(DIGEST)
    archive = MemoryArchive()
    archive.put_blob(WHERE, key, BlobEntry(moment, True))
    archive.put_manifest(WHERE, key, ManifestEntry(moment, (), ()))
    archive.put_snapshot(name, SnapshotEntry(moment, Snapshot(key, key)))
    archive.put_artifact_check(name, ArtifactCheck(moment, moment, 0, bytes(8)))
    known = Knowledge(archive, now=lambda: float(NOW))
    assert known.is_blob_believed(WHERE, DIGEST) is believed
    assert known.is_manifest_believed(WHERE, DIGEST) is believed
    assert (known.mount_source(RepositoryKey(WHERE[0], "else"), DIGEST) == WHERE[1]) is believed
    assert (name in known.snapshots([name])) is believed
    assert (known.artifact_check(name).last == moment) is believed


@pytest.mark.rule("R16")
def test_a_fact_from_a_clock_that_is_years_ahead_is_not_believed():
    archive = MemoryArchive()
    archive.put_fact("a", Fact("mounts", "", True, AHEAD))
    archive.put_fact("b", Fact("mounts", "", True, NOW))
    known = Knowledge(archive, now=lambda: float(NOW))
    assert [known.supports_mounts(host) for host in "ab"] == [None, True]


CHANGES: list[Callable[[bytes], bytes]] = [
    lambda body: body[:-1] + b"!",
    lambda body: body[:9],
    lambda body: b"x" + body,
]


# Pipes, links and directories of others.


@pytest.mark.rule("R16")
@pytest.mark.parametrize("name", ["state.db", "state.db-journal"])
@pytest.mark.parametrize("what", ["link", "other name", "pipe"])
def test_a_state_that_is_another_file_is_begun_anew(tmp_path, name, what):
    cache, victim = tmp_path / "cache", tmp_path / "victim"
    write_state(cache)
    victim.write_bytes((cache / "state.db").read_bytes())
    place = cache / name
    place.unlink(missing_ok=True)
    makes: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(place),
        "link": lambda: place.symlink_to(victim),
        "other name": lambda: place.hardlink_to(victim),
    }
    makes[what]()
    before = victim.read_bytes()

    reader = StateFile(str(cache), print)
    reader.load(may_write=False)
    reader.close()
    assert os.path.lexists(place), "who has no lock removes nothing"
    write_state(cache)

    assert victim.read_bytes() == before
    assert not (cache / "state.db-journal").exists()
    assert (cache / "state.db").stat().st_nlink == 1
    assert not (cache / "state.db").is_symlink()
    assert states.entries(cache) == 1


def write_state(directory: Path) -> None:
    kept = StateFile(str(directory), print)
    kept.load()
    kept.put_blob(RepositoryKey("host", "app"), bytes(33), BlobEntry(1, True))
    kept.close()
