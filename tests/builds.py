"""Builds of the program in other places than this checkout, and processes that know nothing of it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.ends import ROOT

TREE = "cp{}{}".format(*sys.version_info)
WHEELS = ROOT / "build" / "wheels"
NOBODY = 54321  # a user id that has no name


def run(*command: object, cwd: str = "/", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment that has these variables, and hardly anything of ours."""
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ
    }
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**kept, **variables},
    )


def copy_sources(checkout: Path) -> Path:
    """Copy what a build needs."""
    for name in ("_regsync", "tools"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("regsync.py", "LICENSE"):
        shutil.copyfile(ROOT / name, checkout / name)
    return checkout


@functools.cache
def interpreter(name: str) -> str | None:
    """Find another Python of this machine; a name that does not run counts as absent."""
    places = os.environ.get("PATH", "").split(os.pathsep)
    places += map(str, Path(os.environ.get("PYENV_ROOT", "/nonexistent")).glob("versions/*/bin"))
    for place in places:
        path = shutil.which(name, path=place)
        if path and not run(path, "-c", "import json, ssl").returncode:
            return path
    return None
