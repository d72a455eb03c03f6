"""Where `min_age` keeps its times: what cannot be kept is an error before any request (docs/design.md
section 12, "Age").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.client.copies import push_http
from conformance.content.images import Seed
from tests.ends import Ran, document, run_regsync, tags

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
    seen = cache / "seen.jsonl"
    seen.write_text('{"seen": 2}\n')
    ran = run(file)
    assert ran.status == 3
    assert "seen.jsonl was written by a newer version" in ran.report["error"]["message"]
    assert seen.read_text() == '{"seen": 2}\n'

    seen.unlink()
    seen.symlink_to(tmp_path / "elsewhere")
    assert run(file).status == 3


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

    # Three days later: the file says that the digest was seen then.
    seen = tmp_path / ".regsync" / "seen.jsonl"
    entry = json.loads(seen.read_text().splitlines()[1])
    assert entry["source"] == f"{docker_registry}/app"
    seen.write_text(seen.read_text().replace(entry["first_seen"], "2026-01-01T00:00:00Z", 1))
    ran = run_regsync("sync", "--json", "-c", str(file), env={"CI": ""})
    assert ran.statuses() == ["synced"]
    assert target.app.tags("app") == {"v1": image.top}
