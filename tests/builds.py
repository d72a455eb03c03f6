"""Builds of the program in other places than this checkout, processes that know nothing of it, and the
other Pythons of this machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import ROOT
from tools import fips_provider

TREE = "cp{}{}".format(*sys.version_info)
WHEELS = ROOT / "build" / "wheels"
NOBODY = 54321  # a user id that has no name
PYTHONS = [f"python3.{minor}" for minor in range(10, 14)]

# What OPENSSL_CONF names on a host that uses a FIPS provider alone.
SETUP = """\
openssl_conf = init
.include {settings}
[init]
providers = found
alg_section = algorithms
[found]
fips = {section}
base = base_sect
[base_sect]
activate = 1
[algorithms]
default_properties = fips=yes
"""


@contextlib.contextmanager
def openssl_server(certificate: Path, options: str) -> Iterator[str]:
    """Serve a page over TLS with the host's `openssl`, which can be told what to speak; give
    HOST:PORT.
    """
    command = ["openssl", "s_server", "-accept", "127.0.0.1:0", "-www", "-cert", str(certificate)]
    with subprocess.Popen(
        [*command, *options.split()], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield next(line.split()[1] for line in server.stdout if line.startswith("ACCEPT "))
        finally:
            server.kill()


def run(*command: object, cwd: str = "/", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment that has these variables, and hardly anything of ours."""
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ
    }
    return subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
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


def contents(path: Path) -> dict[str, bytes]:
    """Read an archive, in which no name stands twice."""
    with zipfile.ZipFile(path) as archive:
        assert len(set(archive.namelist())) == len(archive.namelist())
        return {name: archive.read(name) for name in archive.namelist()}


@functools.cache
def find_python(name: str) -> str | None:
    """Find a Python of this machine; a name that does not run counts as absent."""
    if name == "python{}.{}".format(*sys.version_info):
        return sys.executable
    places = [*Path(os.environ.get("PYENV_ROOT", "/nonexistent")).glob("versions/*/bin")]
    places += [path.parent for path in Path(sys.base_prefix).parent.glob(f"*/bin/{name}")]
    for place in (*places, *os.environ.get("PATH", "").split(os.pathsep)):
        path = shutil.which(name, path=str(place))
        if path and not run(path, "-c", "import json, ssl").returncode:
            return path
    return None


def python(name: str) -> str:
    """Return the path of a Python, or skip the test."""
    path = find_python(name)
    if path is None:
        pytest.skip(f"{name} is not on this machine")
    return path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="open-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


class Host:
    """A host on which the default build runs, with these variables alone.

    It has no FIPS provider before `use_provider`.
    """

    def __init__(self, file: Path, folder: Path) -> None:
        self.file = file
        self.folder = folder
        self.none = folder / "none"
        self.none.mkdir()
        self.modules = folder / "modules"
        self.conf = folder / "own.cnf"
        self.variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "OPENSSL_MODULES": str(self.none),
        }

    def use_provider(self) -> None:
        """Set the host up for a copy of the provider, or skip the test."""
        there = fips_provider.find()
        if there is None:
            pytest.skip("no FIPS provider: tools/check.py fetches one on Debian")
        shutil.copytree(there, self.modules)
        settings = self.modules / "fipsmodule.cnf"
        self.conf.write_text(SETUP.format(settings=settings, section="fips_sect"))
        self.variables["OPENSSL_MODULES"] = str(self.modules)
        self.variables["OPENSSL_CONF"] = str(self.conf)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.start(sys.executable, str(self.file), *arguments)

    def interpret(self, code: str, text: str = "") -> list[str]:
        """Run code that imports the default build; return the lines that it prints."""
        self.variables["PYTHONPATH"] = str(self.file)
        done = self.start(sys.executable, "-S", "-c", code, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def start(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            env=self.variables,
            cwd=self.folder,
            timeout=60,
            check=False,
        )


@pytest.fixture
def host(pyz: Path, tmp_path: Path) -> Host:
    """Give a host without a FIPS provider."""
    return Host(pyz.with_name("regsync.pyz"), tmp_path)


@pytest.fixture
def fips_host(host: Host) -> Host:
    """Give a host whose OpenSSL uses a FIPS provider alone."""
    host.use_provider()
    return host
