"""A command loads nothing that only other commands need.

Half of the time of a sync in which nothing has changed is imports: each of these names costs from half
a millisecond to fifteen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.content.images import Seed
from tests.ends import ROOT, Start

# As the interpreter runs the built file, and then what is there. `threads` are those that were ever
# started. The file ends the process, in place of which it comes back here.
PROGRAM = """
import json, os, runpy, sys
os._exit = sys.exit
threads = []
sys.addaudithook(lambda event, _: event == "_thread.start_new_thread" and threads.append(event))
pyz, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_path(pyz, run_name="__main__")
except SystemExit as end:
    status = end.code
print(json.dumps([status, sorted(sys.modules), len(threads)]))
"""

# What only other commands need, or those who use a registry of a cloud, a lock or an image layout.
NEEDLESS_OURS = {
    *("app.access", "app.auditing", "app.locking", "app.watch", "app.health"),
    "app.pages",
    *("auth.aws", "auth.azure", "auth.google"),
    "layout",
    *("audit", "sync.dry_run", "sync.retry"),
    *("locking", "pins"),
}
# Of the standard library, whose modules load others as each version likes: what a run used to load
# without need.
NEEDLESS = {
    "bz2",
    "ctypes",
    "decimal",
    "difflib",
    "email",
    "encodings.idna",
    "fractions",
    "hmac",
    "http",
    "lzma",
    "pathlib",
    "platform",
    "random",
    "shutil",
    "stringprep",
}

BLOCK = """\
---
# as people write it
registries:
  source: {{url: "{source}", max_concurrent: 8}}
  target:
    url: {target}
global: {{cache_ttl: 5m}}
defaults:
  source: source
  targets: [target]
  artifacts: {{enabled: false}}
mappings:
  - from: app
    tags: {{glob: [v1]}}
"""


def block(source: str, target: str) -> str:
    return BLOCK.format(source=source, target=target)


def generated(source: str, target: str) -> str:
    """Return what programs write: JSON on one line."""
    mapping = {
        "from": "app",
        "source": "a",
        "targets": ["b"],
        "tags": {"glob": "v1"},
        "artifacts": {"enabled": False},
    }
    return json.dumps(
        {"registries": {"a": {"url": source}, "b": {"url": target}}, "mappings": [mapping]}
    )


@pytest.fixture
def ends(serve: Start) -> Iterator[dict[str, str]]:
    """Give a source and a target with the same tag; the run is to find out, and no more."""
    source, target = serve(), serve()
    for server in (source, target):
        Seed(5).image(sizes=(1000,)).load_into(server.app, "app", tag="v1")
    yield {"source": source.url, "target": target.url}
    assert source.journal.summary() == {"GET manifest": 1}
    assert target.journal.summary() == {"HEAD manifest": 1}


def loaded(pyz: Path, directory: Path, *words: str) -> tuple[set[str], int]:
    """Run a command; return the modules that were loaded, and how many threads were started."""
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(pyz), *words]
    environment = {"HOME": str(directory), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=directory, env=environment
    )
    assert done.returncode == 0, done.stderr
    told: tuple[int, list[str], int] = json.loads(done.stdout.splitlines()[-1])
    assert told[0] == 0, done.stderr
    return set(told[1]), told[2]


@pytest.mark.process
@pytest.mark.parametrize("write", [block, generated])
def test_a_sync_that_changes_nothing_loads_what_it_needs(pyz, tmp_path, ends, write):
    (tmp_path / "mirror.yaml").write_text(write(**ends))
    modules, threads = loaded(pyz, tmp_path, "sync", "-c", "mirror.yaml")
    assert modules & {f"_regsync.{name}" for name in NEEDLESS_OURS} == set()
    assert modules & NEEDLESS == set()
    assert threads == 0


@pytest.mark.process
def test_without_a_configuration_no_yaml_is_loaded(pyz, tmp_path, serve):
    server = serve()
    Seed(5).image(sizes=(1000,)).load_into(server.app, "app", tag="v1")
    modules, _ = loaded(pyz, tmp_path, "tags", f"{server.address}/app")
    assert modules & {"yaml"} == set()


@pytest.mark.parametrize("cloud", ["aws", "azure", "google"])
def test_a_registry_of_a_cloud_loads_what_that_cloud_needs(cloud):
    code = "import sys; from _regsync.registry import runs; runs._cloud(sys.argv[1]); "
    code += "print(*(name for name in sys.modules if name.startswith('_regsync.auth.')))"
    done = subprocess.run(
        [sys.executable, "-c", code, cloud], cwd=ROOT, capture_output=True, text=True, check=True
    )
    clouds = {f"_regsync.auth.{name}" for name in ("aws", "azure", "google")}
    assert clouds & {*done.stdout.split()} == {f"_regsync.auth.{cloud}"}


def test_version_loads_nothing_of_a_run(pyz, tmp_path):
    modules, _ = loaded(pyz, tmp_path, "version")
    rooms = {name.split(".")[1] for name in modules if name.startswith("_regsync.")}
    assert rooms == {"app", "edge", "errors", "files", "fips", "text"}
    assert modules & {"anyio", "asyncio", "h11", "ssl", "yaml", *NEEDLESS} == set()
