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

from _regsync.state import Knowledge, RepositoryKey, StateFile
from tests import states

pytestmark = pytest.mark.rule("R12")


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
    Knowledge(kept).confirm_blob(RepositoryKey("host", "app"), f"sha256:{'a' * 64}")
    kept.close()
