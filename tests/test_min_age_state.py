"""Where `min_age` keeps its times: what cannot be kept is an error before any request (docs/design.md
section 12, "Age").
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conformance.client.copies import push_http
from conformance.content.images import Seed
from tests.ends import Ran, document, run_regsync, tags
from tests.states import rows

MAPPING = {"from": "app", "tags": tags("v1"), "min_age": "3d"}
# Nobody answers there.
ENDS = {"source": "http://127.0.0.1:9", "target": "http://127.0.0.1:19"}


def run(file: Path, *options: str, env: Any = None, **top: Any) -> Ran:
    file.write_text(document(ENDS, MAPPING, **top))
    return run_regsync("sync", "--json", *options, "-c", str(file), env={"CI": "", **(env or {})})


UNKEPT = "mappings[0] has `min_age`, but this run keeps nothing for the next one"


def test_without_a_directory_nothing_is_attempted():
    ran = run_regsync("sync", "-c", "-", stdin=document(ENDS, MAPPING))
    assert ran.status == 3
    assert f"error: CONFIG_ERROR: {UNKEPT}\nhint: set `cache_dir` in `global` to a" in ran.err


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--shard", "0/2")], ids=str)
def test_beside_the_file_a_ci_job_keeps_nothing(tmp_path, options):
    file = tmp_path / "mirror.yaml"
    ran = run(file, *options, env={"CI": "true"})
    assert (ran.status, ran.report["error"]["message"]) == (3, UNKEPT)
    assert [path.name for path in tmp_path.iterdir()] == ["mirror.yaml"]

    # A directory that somebody has named may be one that stays; and CI may be set to say no.
    named = {"global": {"cache_dir": "cache"}}
    assert run(file, *options, env={"CI": "true"}, **named).status == 2
    assert run(file, *options, env={"CI": "false"}).status == 2


def test_validate_looks_at_the_configuration_alone(tmp_path):
    file = tmp_path / "mirror.yaml"
    file.write_text(document(ENDS, MAPPING))
    assert run_regsync("validate", str(file), env={"CI": "true"}).status == 0


def test_watch_needs_it_too(tmp_path):
    file = tmp_path / "mirror.yaml"
    file.write_text(document(ENDS, MAPPING))
    ran = run_regsync("watch", "-c", str(file), "--health-port", "0", env={"CI": "true"})
    assert (ran.status, UNKEPT in ran.err) == (3, True)


def test_a_directory_or_file_that_cannot_be_used_is_an_error(tmp_path):
    file = tmp_path / "mirror.yaml"
    cache = tmp_path / ".regsync"
    cache.write_text("a file")
    ran = run(file)
    assert (ran.status, ran.report["error"]["code"]) == (3, "CONFIG_ERROR")
    assert f"which {cache} cannot keep: File exists" in ran.report["error"]["message"]

    cache.unlink()
    cache.mkdir()
    state = cache / "state.db"
    state.mkdir()
    assert run(file).status == 3

    state.rmdir()
    assert run(file).status == 2
    with closing(sqlite3.connect(state)) as database:
        database.execute("PRAGMA user_version = 99")
    before = state.read_bytes()
    ran = run(file)
    assert ran.status == 3
    assert "it was written by a newer version" in ran.report["error"]["message"]
    assert state.read_bytes() == before


# --- the file itself


@pytest.mark.slow
def test_an_image_of_docker_registry_is_held_back(docker_registry, serve, tmp_path):
    target = serve()
    image = Seed(5).image()
    push_http(image, docker_registry, "app", "v1")
    file = tmp_path / "mirror.yaml"
    text = document({"source": docker_registry, "target": target}, MAPPING)
    file.write_text(text)
    ran = run_regsync("sync", "--json", "-c", str(file), env={"CI": ""})
    assert (ran.status, ran.images[0]["reason"]) == (0, "min_age")
    assert ran.totals["requests"][docker_registry] == {"manifest_head": 1}
    target.journal.matching("HEAD", "manifest").exactly(1)

    # Three days later: the state says that the digest was seen then.
    with closing(sqlite3.connect(tmp_path / ".regsync" / "state.db")) as state, state:
        ((key, _, _),) = rows(tmp_path / ".regsync")["seen"]
        assert key.decode() == f"seen {docker_registry}/app {image.top}"
        state.execute("UPDATE note SET value = ? WHERE key = ?", (b"[1767225600]", key))
    ran = run_regsync("sync", "--json", "-c", str(file), env={"CI": ""})
    assert ran.statuses() == ["synced"]
    assert target.app.tags("app") == {"v1": image.top}
