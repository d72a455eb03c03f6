"""Output that nobody takes: closed streams, a full disk. No traceback, and an exit status that is
true.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Seed
from conformance.registry.app import App
from conformance.server.sockets import run_in_thread
from tests.ends import program

ROOT = Path(__file__).resolve().parent.parent
FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="uses a POSIX shell")


def run(
    line: str, *arguments: str, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run the checkout's program with the redirections of `line`, buffered as for a user."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["sh", "-c", f'exec "$@" {line}', "sh", *program(), *arguments]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    assert "Traceback" not in (done.stdout or "") + done.stderr
    assert "Exception ignored" not in done.stderr
    return done


@pytest.mark.parametrize("line", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["version"], 0),
        (["--help"], 0),
        (["version", "-v"], 0),
        (["nonsense"], 3),
        (["sync", "-c", "-"], 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_closed_streams_change_no_exit_status(line: str, arguments: list[str], status: int) -> None:
    assert run(line, *arguments).returncode == status


@pytest.mark.parametrize("line", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("command", "status"), [("version", 0), ("--help", 0), ("schema", 0), ("nonsense", 3)]
)
def test_closed_streams_need_no_dev_null(line: str, command: str, status: int) -> None:
    """An empty root has none. The three numbers are taken all the same."""
    start = f"""
import os, sys
os.devnull = "/nonexistent/null"
import regsync
status = regsync.main([{command!r}])
assert os.open("/", os.O_RDONLY) > 2
sys.exit(status)
"""
    shell = ["sh", "-c", f'exec "$@" {line}', "sh"]
    done = subprocess.run(
        [*shell, sys.executable, "-c", start], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == status, done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("arguments", [["version"], ["version", "--json"], ["-v", "version"]])
def test_a_full_standard_output_is_said_in_one_line(arguments: list[str]) -> None:
    done = run(">/dev/full", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: INTERNAL_ERROR: the output of this command cannot be written: "
    )
    assert done.stderr.count("\n") == 1


def test_a_pipe_that_is_full_and_does_not_wait_is_no_defect() -> None:
    """Whoever shares it may have made it so, and its reader may be slow."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(reading, "rb"), open(writing, "wb", buffering=0) as pipe:
        while pipe.write(bytes(4096)) is not None:
            pass
        done = run("", "version", "--json", stdout=pipe)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: INTERNAL_ERROR: the output of this command cannot be written: "
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")
def test_a_full_standard_error_stops_no_copy() -> None:
    with run_in_thread(App()) as source, run_in_thread(App()) as target:
        image = Seed(1).image().load_into(source.app, "app", tag="v1")
        done = run(
            "2>/dev/full", "copy", "-v", f"{source.address}/app:v1", f"{target.address}/app:v1"
        )
        assert target.app.tags("app") == {"v1": image.top}
    assert (done.returncode, done.stdout.count("synced")) == (0, 1)


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("line", [">/dev/full", "2>/dev/full", ">/dev/full 2>&1"])
def test_an_error_keeps_its_status_where_it_cannot_be_told(line: str) -> None:
    assert run(line, "sync", "--json", "-c", "/nonexistent").returncode == 3
