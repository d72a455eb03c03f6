"""Files of others in our directories, and a state that says more than is true (R12, R16).

Whoever may write into `cache_dir` may put there what he likes: pipes and links, that blobs and
manifests are at a target, a clock that runs ahead, in a file that is whole. It costs requests, and
no image is wrong (I5).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from _regsync import files
from _regsync.state import Knowledge, RepositoryKey, StateFile
from _regsync.sync import staging as sync_staging
from _regsync.sync.staging import Staging, StagingFailed
from conformance.content.images import Seed
from tests import states
from tests.ends import document, held, run_regsync, tags

pytestmark = pytest.mark.rule("R12")


@pytest.mark.anyio
async def test_a_staged_file_that_was_changed_is_not_sent_whole(tmp_path):
    from _regsync.oci.manifest import Descriptor
    from _regsync.oci.reference import digest_of

    body = bytes(range(256)) * 8192
    blob = Descriptor("a/b", digest_of(body), len(body))

    async def read(sink: Any) -> None:
        await sink(memoryview(body))

    staging = Staging(str(tmp_path))
    async with staging.ensuring_staged(blob, read):
        pass
    path = tmp_path / "staged" / "sha256" / blob.digest.partition(":")[2]
    changed = path.with_suffix(".new")
    changed.write_bytes(body[:-1] + b"!")
    changed.replace(path)
    with staging.opened(blob) as pieces:
        assert pieces is not None
        given = 0

        async def read_all() -> None:
            nonlocal given
            while piece := await pieces.next():
                given += len(piece)

        with pytest.raises(StagingFailed, match="on disk"):
            await read_all()
        assert 0 < given < len(body)


CHANGES: list[Callable[[bytes], bytes]] = [
    lambda body: body[:-1] + b"!",
    lambda body: body[:9],
    lambda body: b"x" + body,
]


@pytest.mark.parametrize("change", CHANGES, ids=["changed", "shorter", "longer"])
def test_a_blob_that_was_changed_on_disk_is_read_again(tmp_path, serve, monkeypatch, change):
    source, one, two = serve(), serve(), serve()
    image = Seed(1).image(sizes=(3_000_000,)).load_into(source.app, "app", tag="v1")
    replacing = files.replacing

    @contextmanager
    def tampered(path: str) -> Iterator[int]:
        with replacing(path) as descriptor:
            yield descriptor
        if "staged" in path:
            Path(path).write_bytes(change(Path(path).read_bytes()))

    monkeypatch.setattr(sync_staging, "replacing", tampered)
    config = tmp_path / "mirror.yaml"
    ends = {"source": source, "t": one, "u": two}
    config.write_text(
        document(ends, {"from": "app", "tags": tags("v1")}, **{"global": {"cache_dir": "cache"}})
    )
    ran = run_regsync("sync", "--json", "-c", str(config))
    assert ran.statuses() == ["synced", "synced"]
    assert held(one, "app", image)
    assert held(two, "app", image)
    assert ran.err.count("changed on disk") == 1
    # What was wrong never reached its end: nothing was put that a registry had to refuse.
    assert [each.journal.count("PUT", "upload", status=400) for each in (one, two)] == [0, 0]


# Pipes, links and directories of others.


@pytest.mark.rule("R16")
@pytest.mark.parametrize("linked", ["staged", "staged/sha256"])
def test_a_directory_that_somebody_else_chose_is_neither_filled_nor_emptied(tmp_path, linked):
    victim, link = tmp_path / "victim", tmp_path / "cache" / linked
    inside = victim / "sha256" if linked == "staged" else victim
    inside.mkdir(parents=True)
    precious = inside / ("a" * 64)
    precious.write_bytes(b"precious")
    old = inside / f"{'b' * 64}.0011.partial"
    old.write_bytes(b"precious")
    os.utime(old, (0, 0))
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    staging = Staging(str(tmp_path / "cache"))
    with pytest.raises(OSError, match="symbolic link is not followed"):
        staging._folder("sha256")
    staging.close()
    assert sorted(inside.iterdir()) == [precious, old]


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
    Knowledge(kept).confirm_blob(RepositoryKey("host", "app"), f"sha256:{'a' * 64}")
    kept.close()
