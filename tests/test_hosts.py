"""The same built file on every host that this machine can be (issue of trust, item 7;
tools/hosts.py has the table).

| CPython 3.10 to 3.13, and the system's | those that are found; older ones are told what is needed
(test_zipapp.py) | | `-I`, `-S`, `-OO`, `-W error -X dev -bb` | options of the interpreter | |
read-only home, read-only root | mounts in a namespace of our own | | no HOME, HOME that is no
directory, an unknown user id, both at once | the user's are root's to try | | umask 027 and 000 |
what is left is the owner's alone all the same | | 64 open files, as the hard and as the soft limit
| 32 images at once | | nothing writable but `cache_dir`, from `/` | an unknown user in folders of
another | | LANG=C, no LANG, ASCII alone, an unknown locale, no `_locale` | the last two as with
musl | | no standard input; folders with spaces, an umlaut, a byte that is no UTF-8 | | | no
environment at all | | | without what is POSIX-only (modules, signals, calls), on a loop like
Windows' | **simulated** |

Each is tried by a copy from plain HTTP to TLS, a sync to two targets, one of them TLS, and a second
sync that moves nothing; here what does not contradict is tried together, `python3 tools/hosts.py`
tries each on each interpreter.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ends import program
from tests.program import Chosen
from tests.thinning import thorough
from tools import hosts
from tools.hosts import HOSTS, Absent, Failed, Host, Smoke

pytestmark = pytest.mark.slow

CURRENT = [each for each in hosts.interpreters() if each.version >= (3, 10)]
PLAIN = HOSTS[0]
SIMULATED = HOSTS[-1]
TOGETHER = (
    ("as it is",),
    ("-I", "64 open files"),
    ("-S", "read-only home"),
    ("-OO", "read-only root"),
    ("-W error -X dev -bb",),
    ("no HOME", "no standard input"),
    ("HOME is no directory", "umask 000", "path with spaces"),
    ("umask 027", "no LANG"),
    ("unknown user", "LANG=C"),
    ("unknown user without HOME",),
    ("nothing writable but cache_dir", "ASCII alone"),
    ("empty root",),
    ("path with an umlaut, ASCII alone", "without locales"),
    (
        "a locale that is not installed",
        "path with a byte that is no UTF-8",
        "64 open files, more on request",
    ),
    ("no environment at all",),
    ("without what is POSIX-only (simulated)",),
)
NAMED = {host.name: host for host in HOSTS}
# An ordinary run has one of each sort: an interpreter's options, limits, users, places, systems.
ORDINARY = {"as it is", "-I", "unknown user", "nothing writable but cache_dir", SIMULATED.name}


def combined(names: tuple[str, ...]) -> Any:
    host = functools.reduce(Host.beside, map(NAMED.__getitem__, names))
    param = pytest.param(host, id=host.name)
    return param if names[0] in ORDINARY else thorough(param)


def test_every_host_of_the_table_is_tried():
    assert sorted(name for names in TOGETHER for name in names) == sorted(NAMED)


def test_hosts_that_contradict_are_not_tried_together():
    with pytest.raises(ValueError, match="have different shell"):
        NAMED["umask 027"].beside(NAMED["no standard input"])


@pytest.fixture(scope="module")
def smoke(pyz: Path) -> Iterator[Smoke]:
    """Start the registries that all hosts are tried with."""
    with Smoke(pyz) as smoke:
        yield smoke


@pytest.mark.parametrize("host", [combined(names) for names in TOGETHER])
def test_host(smoke, host):
    reasons = []
    # Another user may not reach the first.
    pythons = [python.path for python in (CURRENT if host.user is not None else CURRENT[:1])]
    if Chosen.file is not None:
        # What is asked of an interpreter has no meaning; the rest has.
        pythons = [""]
        host = host._replace(options=(), hook="")
    for python in pythons:
        try:
            smoke.run(host, python)
        except Absent as error:
            reasons.append(str(error))
        else:
            return
    pytest.skip("; ".join(reasons))


def others() -> list[Any]:
    """Return the interpreters beside the tests' own; those between the oldest and the newest are
    for a thorough run.
    """
    ordered = sorted(CURRENT[1:], key=lambda python: python.version)
    params = [pytest.param(python, id=python.name) for python in ordered]
    return [*params[:1], *map(thorough, params[1:-1]), *params[1:][-1:]]


@pytest.mark.in_process
@pytest.mark.parametrize("python", others())
def test_interpreter(smoke, python):
    """From the sources in the file where it has no tree for this one."""
    smoke.run(PLAIN, python.path)


@pytest.mark.thorough
@pytest.mark.in_process
@pytest.mark.parametrize(
    ("host", "problem"),
    [
        (
            Host("it speaks", hook="import sys; sys.stderr.write('a word')"),
            "version ended with 0: a word",
        ),
        (Host("it fails", shell="exit 7"), "version ended with 7"),
        (Host("it leaves a file", shell='touch "$HOME/left"; exec "$@"'), "left behind: .'left'."),
        (
            Host("its cache is open", shell='"$@"; chmod -fR a+rx cache || true'),
            "is open to others",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Host) else "",
)
def test_a_host_that_is_not_as_it_should_be_is_noticed(smoke, host, problem):
    with pytest.raises(Failed, match=problem):
        smoke.run(host, sys.executable)


@pytest.mark.in_process
def test_a_host_that_cannot_be_is_no_success(smoke):
    with pytest.raises(Absent, match="status 3"):
        smoke.run(Host("no namespaces", shell="exit 3  # unshare"), sys.executable)


def without_posix(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(SIMULATED.hook, encoding="utf-8")
    return {"PYTHONPATH": str(folder), "PATH": os.defpath, "HOME": str(folder)}


@pytest.mark.in_process
def test_an_interrupt_ends_a_run_on_a_loop_that_takes_no_signals(pyz, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, str(pyz), "copy", f"{where}/app:v1", f"{where}/other:v1"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=without_posix(tmp_path), text=True, **pipes) as process:
            silent.accept()[0].close()
            process.send_signal(signal.SIGINT)
            assert (*process.communicate(timeout=60), process.returncode) == ("", "", 130)


def test_the_simulation_takes_away_what_it_says(tmp_path):
    code = "import os, select, signal, socket; import fcntl"
    gone = "(os, 'fork'), (os, 'getuid'), (select, 'poll'), (signal, 'SIGHUP'), (socket, 'AF_UNIX')"
    for line, said in (
        (code, "ModuleNotFoundError"),
        (f"{code[:-14]}; print([hasattr(*x) for x in ({gone})])", "True"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", line],
            env=without_posix(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (said in done.stderr) == (said != "True")
        assert said == "ModuleNotFoundError" or done.stdout.count("False") == 5


@pytest.mark.in_process
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_error_with_an_umlaut_is_told_on_any_terminal(pyz, tmp_path, encoding):
    file = tmp_path / "Schlüssel→.yaml"
    file.write_text("mappings: []\nunknown: 1\n", encoding="utf-8")
    environ = {"PYTHONIOENCODING": encoding, "PATH": os.defpath}
    done = subprocess.run(
        [*program(pyz), "validate", str(file)], env=environ, capture_output=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr.decode(encoding).count("\n") == done.stderr.count(b"error: ")
    assert b"Traceback" not in done.stderr
    assert b"Schl" in done.stderr


@pytest.mark.in_process
def test_a_directory_as_standard_input_is_refused_by_the_interpreter(pyz):
    """Before any of our code runs: no status or word of ours is possible."""
    with_directory = ["sh", "-c", 'exec "$@" </', "sh", sys.executable]
    ours = subprocess.run(
        [*with_directory, str(pyz), "version"], capture_output=True, text=True, check=False
    )
    empty = subprocess.run(
        [*with_directory, "-c", "pass"], capture_output=True, text=True, check=False
    )
    assert (ours.returncode, ours.stdout) == (empty.returncode, "")
    assert "is a directory, cannot continue" in ours.stderr
