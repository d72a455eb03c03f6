"""SIGTERM and SIGINT at every stage of a run: nothing new begins, what can end ends, the rest is
for the next run.

When and in which order is shown on the virtual clock; what is the process's own (handlers before a
run listens, threads that nobody can end) by processes that stop themselves at a known place.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ends import ROOT, document

SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name
)


def written(path: Path, *mappings: Any, **top: Any) -> str:
    registries = {"source": "http://source.test", "target": "http://target.test"}
    file = path / "mirror.yaml"
    file.write_text(document(registries, *mappings, **top))
    return str(file)


# Processes.

_STUCK = """
import os, signal, socket, sys, threading
import regsync
asked = threading.Event()
look_up = socket.getaddrinfo
def getaddrinfo(host, *arguments, **options):
    if not host.endswith(".test"):
        return look_up(host, *arguments, **options)
    os.write(2, b"asked\\n")
    asked.set()
    threading.Event().wait()
"""
_RUN = "socket.getaddrinfo = getaddrinfo\nsys.exit(regsync.main())"
_AT = """
import os, signal, sys
import regsync, {module}
def strike(*_, **__):
    for number in {numbers}:
        os.kill(os.getpid(), number)
    while True:
        pass
{module}.{name} = strike
sys.exit(regsync.main())
"""


@contextmanager
def program(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script, which does not outlive the test, however that ends."""
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], text=True, cwd=ROOT, **pipes
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@SIGNALS
@pytest.mark.parametrize("command", ["sync", "tags", "copy"])
@pytest.mark.parametrize("place", ["builtins.open", "anyio.run"])
def test_a_signal_before_a_run_listens_ends_the_program(tmp_path, number, command, place):
    """Where it reads its configuration, or begins its event loop."""
    check_ended_before_a_run(tmp_path, number, command, place)


@SIGNALS
@pytest.mark.parametrize("command", ["sync", "tags", "copy"])
@pytest.mark.parametrize("place", ["_regsync.oci.parse_reference", "_regsync.config.load"])
def test_a_signal_that_comes_before_a_run_in_a_callback_ends_it(tmp_path, number, command, place):
    """Also where an exception would be lost or told: in an import, in a callback."""
    check_ended_before_a_run(tmp_path, number, command, place)


def check_ended_before_a_run(
    tmp_path: Path, number: signal.Signals, command: str, place: str
) -> None:
    module, _, name = place.rpartition(".")
    file = written(tmp_path, {"from": "app"})
    arguments = {"tags": ["r.invalid/app"], "copy": ["r.invalid/app", "s.invalid/app"], "sync": []}[
        command
    ]
    if command == "sync" and name == "parse_reference":
        name, module = "load", "_regsync.config"
    script = _AT.format(module=module, name=name, numbers=[int(number)])
    with program(script, command, "-c", file, *arguments) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "")
    assert "Traceback" not in err
    assert not (tmp_path / ".regsync").exists()


def test_nor_does_it_delay_the_end_of_a_run_that_gave_up():
    script = _STUCK + (
        "from _regsync.net.wire import Timeouts\n"
        "hurried = Timeouts(connect=0.05, first_answer=1.0)\n"
        "Timeouts.__new__.__defaults__ = tuple(hurried)\n"
    )
    with program(script + _RUN, "tags", "r.test/app") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "NETWORK_ERROR" in err
    assert "r.test:443 within 0.05 s" in err
