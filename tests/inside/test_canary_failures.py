"""Secrets in every command while anything else fails: what is inside, the disk, the network, a
signal, a stream that nobody reads; and a watch with its reloads and probes. The last part is of
real processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Seed
from conformance.registry.tokens import BasicAuth
from tests.canaries import Canaries, Traces
from tests.canary_scene import USER
from tests.ends import ROOT, document

# Real processes.


@pytest.fixture
def secrets(clean_env: Path, monkeypatch: pytest.MonkeyPatch) -> Canaries:
    """Put a password into the environment, a token into a file."""
    canaries = Canaries()
    monkeypatch.setenv("CONFIG_PASSWORD", canaries.make("CONFIG_PASSWORD", "/:"))
    return canaries


def mirror(path: Path, source: str, target: str, **more: Any) -> str:
    login = {
        "auth_type": "basic",
        "credentials": {"username": USER, "password": "${CONFIG_PASSWORD}"},
    }
    registries = {"source": {"url": source, **login, **more}, "target": {"url": target, **login}}
    file = path / "mirror.yaml"
    file.write_text(document(registries, {"from": "app", "tags": {"glob": "*"}}))
    return str(file)


# What a process does when it begins its first upload; it also writes down how it is called by
# then.
MIDDLES = {
    "crash": "os.abort()",
    "SIGTERM": "os.kill(os.getpid(), 15); os.kill(os.getpid(), 15)",
    "Ctrl-C": "raise KeyboardInterrupt",
    "defect": "raise ValueError('a defect in the middle')",
}
# Waits for a host that never answers for 1 s instead of 15.
IMPATIENT = """
import runpy, sys
from _regsync.net.wire import Timeouts
Timeouts.__new__.__defaults__ = tuple(Timeouts(first_answer=1.0))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.process
def test_a_process_that_finds_nobody_shows_no_secret(
    serve, tmp_path, clean_env, secrets, monkeypatch
):
    check_process("refused", IMPATIENT, serve, tmp_path, clean_env, secrets, monkeypatch)


def check_process(how, script, serve, tmp_path, clean_env, secrets, monkeypatch):
    auth = BasicAuth({USER: secrets.places["CONFIG_PASSWORD"]})
    source, target = serve(auth=auth), serve(auth=auth)
    Seed(1).image(sizes=(900,)).load_into(source.app, "app", tag="v1")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    file = mirror(tmp_path, "http://127.0.0.1:9" if how == "refused" else source.url, target.url)
    traces = Traces(secrets, tmp_path, clean_env)
    program = [str(ROOT / "regsync.py")]
    if script is not None:
        program = ["-c", script, *program]
    command = [
        sys.executable,
        *(["-X", "dev"] if how == "dev" else []),
        *program,
        "sync",
        "-vv",
        "--json",
        "-c",
        file,
    ]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            command,
            stdout=full if how == "lost output" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=(lambda: os.close(1)) if how == "closed output" else None,
            text=True,
            cwd=ROOT,
        )
        out, err = process.communicate(timeout=60)
    expected = {
        "dev": 0,
        "crash": -signal.SIGABRT,
        "refused": 2,
        "SIGTERM": 143,
        "Ctrl-C": 130,
        "defect": 2,
    }
    assert process.returncode == expected.get(how, process.returncode), err
    assert (how == "crash") == ("Fatal Python error: Aborted" in err)
    assert (how in MIDDLES) == (tmp_path / "tmp" / "title").exists()
    assert how != "defect" or ("Traceback" in err and "a defect in the middle" in err)
    assert not traces.found({"standard output": out or "", "standard error": err})
