#!/usr/bin/env python3
"""Check everything: lint, format, types, tests. Arguments go to pytest.

    python3 tools/check.py [-x] [-k name] [-m 'not slow'] ...
    python3 tools/check.py --thorough      also the cells of full products that an ordinary run leaves out
    python3 tools/check.py --file=FILE     run FILE as the program, in the tests that judge any

On a fresh Debian machine with Python it first makes `.venv` with the pinned packages of
pyproject.toml and, as root, installs the registry and the client that the tests drive, and unpacks
a FIPS provider below build/ (tools/fips_provider.py); later runs find them there. It works from any
directory (paths among the arguments are those in the checkout), and needs the standard library only.

Owns: what is checked, in which order, and how the machine is made ready.
May not know: what the tests look at.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["main"]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "installed-for")
OLDEST_PYTHON = (3, 10)
PROGRAMS = ("docker-registry", "skopeo")  # Debian's packages have the programs' names

CHECKS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy", "--strict", "_regsync", "regsync.py", "conformance", "tools"],
    # Two workers, whole files in the order of tests/conftest.py; -n 0 among the arguments: none.
    "pytest": ["pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"],
}


class CheckError(Exception):
    """What is missing, on one line."""


def main(argv: Sequence[str]) -> int:
    """Make the machine ready, run each check even when one before it failed, and return a status."""
    os.chdir(ROOT)
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise CheckError(f"Python 3.10 or newer is needed; this is {sys.version.split()[0]}")
        python = ready_venv()
        ready_programs()
        ready_provider()
    except CheckError as error:
        sys.stderr.write(f"check: {error}\n")
        return 2

    failed = []
    for title, arguments in CHECKS.items():
        print(f"== {title}", flush=True)
        passed_on = argv if title == "pytest" else ()
        if subprocess.run([python, "-m", *arguments, *passed_on], check=False).returncode:
            failed.append(title)
    print(f"== failed: {', '.join(failed)}" if failed else "== all checks passed", flush=True)
    return 1 if failed else 0


def pins() -> list[str]:
    """Read the `name==version` lines of pyproject.toml; Python 3.10 has no tomllib."""
    with open("pyproject.toml", encoding="utf-8") as file:
        return re.findall(r'(?m)^    "([A-Za-z0-9_.-]+(?:\[[a-z-]+\])?==[^"]+)",$', file.read())


def ready_venv() -> str:
    """Return the Python of `.venv`, made or renewed when pins or interpreter have changed."""
    place = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    python = os.path.join(VENV, *place)
    wanted = hashlib.sha256(repr((sys.version, pins())).encode()).hexdigest()
    if os.path.exists(STAMP):
        with open(STAMP, encoding="ascii") as file:
            if file.read() == wanted:
                return python

    shutil.rmtree(VENV, ignore_errors=True)
    if not make_venv() and not (install_by_apt("python3-venv") and make_venv()):
        raise CheckError(
            f"{sys.executable} cannot make a virtual environment: install python3-venv"
        )
    pip = [python, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, *pins()], check=False).returncode:
        raise CheckError("pip could not install the pinned packages of pyproject.toml (see above)")
    with open(STAMP, "w", encoding="ascii") as file:
        file.write(wanted)
    return python


def make_venv() -> bool:
    """Make `.venv` with pip in it; False where Debian keeps ensurepip in a package of its own."""
    command = [sys.executable, "-m", "venv", "--clear", VENV]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def ready_programs() -> None:
    """Install the programs that tests drive, where that is possible and needed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing and not install_by_apt(*missing):
        command = f"apt-get install {' '.join(missing)}"
        raise CheckError(f"missing: {', '.join(missing)}: install them (Debian: {command})")


def ready_provider() -> None:
    """Fetch the FIPS provider that the gate's tests load; they skip where that cannot be."""
    command = [sys.executable, os.path.join("tools", "fips_provider.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = lines[-1].removeprefix("fips_provider: ")
        print(f"check: no FIPS provider, its tests are skipped: {reason}", flush=True)


def install_by_apt(*packages: str) -> bool:
    """Install Debian packages when this is root on a Debian machine; tell whether that worked."""
    if shutil.which("apt-get") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    for command in (["apt-get", "update"], install):
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
