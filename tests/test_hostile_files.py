"""Files of others in our directories, and a state that says more than is true (R12, R16).

Whoever may write into `cache_dir` may put there what he likes: pipes and links, that blobs and
manifests are at a target, a clock that runs ahead, in a file that is whole. It costs requests, and
no image is wrong (I5).
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Seed
from conformance.server.sockets import Server
from tests.ends import Ran, document, held, run_regsync, tags

pytestmark = pytest.mark.rule("R12")


@pytest.fixture
def ends(tmp_path: Path, source: Server, target: Server) -> Callable[..., Ran]:
    """Return a function that runs one mapping with its state beside the configuration."""
    path = tmp_path / "mirror.yaml"

    def run(**rule: Any) -> Ran:
        mapping = {"from": "app", "tags": tags("v1"), **rule}
        path.write_text(
            document({"source": source, "t": target}, mapping, **{"global": {"cache_dir": "cache"}})
        )
        return run_regsync("sync", "--json", "-c", str(path))

    return run


def empty(server: Server) -> None:
    """Let a registry lose everything: what the state says of it is then as false as if somebody had
    made it up.
    """
    server.app.repositories.clear()
    server.journal.clear()


@pytest.mark.rule("R16")
@pytest.mark.parametrize(
    "rule", [{}, {"tags": {"glob": "v1", "immutable_tags": "*"}}, {"tags": {"glob": "*"}}]
)
@pytest.mark.parametrize("moved", [False, True])
def test_what_the_state_says_is_there_is_brought_when_it_is_not(ends, source, target, rule, moved):
    image = Seed(1).image(sizes=(50, 70_000)).load_into(source.app, "app", tag="v1")
    assert ends(**rule).statuses() == ["synced"]
    empty(target)
    if moved:
        image = (
            Seed(1)
            .image(sizes=(50, 70_000), annotations={"a": "b"})
            .load_into(source.app, "app", tag="v1")
        )
    ran = ends(**rule)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert held(target, "app", image)


@pytest.mark.rule("R16")
def test_a_version_to_come_is_not_read(ends, tmp_path, source, target):
    Seed(1).image(sizes=(50,)).load_into(source.app, "app", tag="v1")
    assert ends().status == 0
    state = tmp_path / "cache" / "state.db"
    with closing(sqlite3.connect(state)) as file:
        (version,) = file.execute("PRAGMA user_version").fetchone()
        file.execute(f"PRAGMA user_version = {version + 1}")
    before = state.read_bytes()
    for _ in range(2):
        ran = ends()
        assert (ran.status, ran.statuses()) == (0, ["skipped"])
        assert ran.err.count("newer version") == 1
    assert state.read_bytes() == before, "the newer program finds its own again"


# Pipes, links and directories of others.


@pytest.fixture
def mirror(tmp_path: Path, source: Server, target: Server) -> Callable[..., Ran]:
    """Return a function that runs a mapping of one image, with its state in `tmp_path / "cache"`."""
    Seed(1).image(sizes=(50,)).load_into(source.app, "app", tag="v1")
    path = tmp_path / "mirror.yaml"

    def run(**settings: Any) -> Ran:
        given = {"cache_dir": "cache", **settings}
        path.write_text(
            document(
                {"source": source, "t": target},
                {"from": "app", "tags": tags("v1")},
                **{"global": given},
            )
        )
        return run_regsync("sync", "--json", "-c", str(path))

    return run


def entries(folder: Path) -> dict[str, int]:
    """Return the modes of everything below a directory."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


@pytest.mark.rule("R16")
@pytest.mark.parametrize(
    "name", ["state.db", "state.lock", "state.db-journal", "state.bin", "state.journal"]
)
@pytest.mark.parametrize("what", ["pipe", "link", "other name", "directory", "dangling link"])
def test_what_stands_where_the_state_belongs_is_waited_for_and_written_to_by_nobody(
    tmp_path, mirror, target, name, what
):
    victim, place = tmp_path / "victim", tmp_path / "cache" / name
    victim.write_bytes(b"precious")
    victim.chmod(0o644)
    place.parent.mkdir()
    makes: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(place),
        "link": lambda: place.symlink_to(victim),
        "other name": lambda: place.hardlink_to(victim),
        "directory": place.mkdir,
        "dangling link": lambda: place.symlink_to(tmp_path / "made"),
    }
    makes[what]()
    ran = mirror()
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert "Traceback" not in ran.err
    assert victim.read_bytes() == b"precious"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644
    assert not (tmp_path / "made").exists()


@pytest.mark.rule("R16")
def test_what_a_run_makes_is_its_users_alone_whatever_the_umask(tmp_path, mirror):
    before = os.umask(0)
    try:
        assert mirror(cache_dir="a/b/cache").status == 0
    finally:
        os.umask(before)
    made = {name: mode for name, mode in entries(tmp_path).items() if name.startswith("a")}
    assert {*made} >= {"a", "a/b", "a/b/cache", "a/b/cache/state.db"}
    assert [name for name, mode in made.items() if mode & 0o077] == []
