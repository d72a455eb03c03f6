"""The program and the providers that the harness imitates, by their own names where they have some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.content.images import Seed
from conformance.providers.personas import persona
from conformance.server.names import Names, names
from tests.ends import document, held, only, program, sync, tags

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def seed() -> Seed:
    return Seed(31)


@pytest.fixture
def known_names(tmp_path: Path) -> Iterator[Names]:
    with names(tmp_path) as found:
        yield found


@pytest.mark.process
def test_regsync_lists_a_source_that_is_old(seed):
    with persona("old") as old, persona("strict") as target:
        image = seed.image(sizes=(1,)).load_into(old.app, "app")
        for number in range(230):
            old.app.add_manifest("app", image.body, image.media_type, f"v{number:03}")
        ran = sync({"source": old, "t": target}, {"from": "app", "tags": tags("v2*")})
        assert (ran.status, len(ran.images)) == (0, 30)
        assert len(target.app.tags("app")) == 30
        old.check()
        target.check()


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_regsync_copies_from_hub_by_its_short_name_in_memory(world, seed):
    """Names as they are, https as it is believed: `docker.io`, the token service elsewhere,
    `library/`.
    """
    hub, target = world.persona("dockerhub"), world.registry("target.test")
    image = seed.index().load_into(hub, "library/alpine", tag="3")
    text = document({"source": "docker.io", "t": target}, {"from": "alpine", "tags": tags("3")})
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "alpine", image)
    again = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert (again.status, again.statuses()) == (0, ["skipped"])
    assert hub.tokens is not None
    assert not {entry.kind for entry in hub.journal.entries} & {"token"}
    assert {entry.kind for entry in hub.tokens.journal.entries} == {"token"}


@pytest.mark.slow
def test_the_built_program_copies_between_providers_by_name(known_names, seed, pyz, tmp_path):
    with (
        persona("dockerhub", names=known_names) as hub,
        persona("redirecting", names=known_names) as target,
    ):
        image = seed.index().load_into(hub.app, "library/alpine", tag="3")
        command = [*program(pyz), "copy", "--json", "--no-artifacts"]
        command += ["docker.io/alpine:3", f"{target.address}/mirror/alpine:3"]
        ran = subprocess.run(
            command,
            env={**os.environ, **known_names.environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert only(json.loads(ran.stdout)["images"])["status"] == "synced"
        assert held(target, "mirror/alpine", image)
        assert target.address == "redirecting.test"
        hub.check()
        target.check()
    assert known_names.refused == []


@pytest.mark.slow
def test_a_persona_is_served_as_a_program(pyz, tmp_path):
    """With names: the shell reads DIR/environ, and the built program finds the seeded image by
    name.
    """
    command = [
        sys.executable,
        "-m",
        "conformance",
        "serve",
        "--persona",
        "dockerhub",
        "--seed-images",
    ]
    command += ["--names", str(tmp_path / "names"), "--journal"]
    pipe = subprocess.PIPE
    serving = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    try:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "serving https://registry-1.docker.io\n"
        shell = f'. "{tmp_path}/names/environ"; exec "$0" "$@"'
        with persona("strict") as target:
            copied = [
                "copy",
                "--no-artifacts",
                "docker.io/seed/index:v1",
                f"{target.address}/index:v1",
            ]
            ran = subprocess.run(
                ["/bin/sh", "-c", shell, *program(pyz), *copied],
                **{"capture_output": True, "text": True, "timeout": 60, "check": False},
            )
            assert ran.returncode == 0, ran.stderr
            assert list(target.app.tags("index")) == ["v1"]
    finally:
        serving.terminate()
        said = serving.communicate(timeout=30)
    assert serving.returncode == 0
    assert "GET /v2/seed/index/manifests/v1 -> 401" in said[1]
