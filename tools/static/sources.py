"""The archives that the static executable is compiled from, by hash, and the ways to get them.

An archive is taken from the directory of sources, from its project's site, from Debian's source
packages (apt asks the mirror that this machine is set up for), or, the compiler, by pip. Whoever
gives it: the hash decides.

Owns: versions, hashes and licences of what is compiled; fetching.
May not know: how it is compiled.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SOURCES", "ZIG", "Source", "SourceError", "fetch"]

TIME_LIMIT = 600  # seconds for one download
# The suites that have the source packages, by the end of their archive's address.
DEBIAN_SUITES = (("debian", "sid"), ("debian", "trixie"), ("debian-security", "trixie-security"))
DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


class SourceError(Exception):
    """Why an archive is not there, on one line."""


@dataclass(frozen=True)
class Source:
    """One pinned archive."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str  # SPDX's short name
    cpe: str  # vendor and product, by which advisories name it
    url: str = ""  # the same bytes at the project's own site
    debian: str = ""  # the source package that has this file, with its version


SOURCES = (
    Source(
        "CPython",
        "3.13.15",
        "python3.13_3.13.15.orig.tar.xz",
        "1e66a7945a48390ee4c2a4268a0e4185884059a13c4aab6d148aa208deea4a76",
        "PSF-2.0",
        "python:python",
        "https://www.python.org/ftp/python/3.13.15/Python-3.13.15.tar.xz",
        "python3.13=3.13.15-1",
    ),
    Source(
        "OpenSSL",
        "3.5.7",
        "openssl_3.5.7.orig.tar.gz",
        "a8c0d28a529ca480f9f36cf5792e2cd21984552a3c8e4aa11a24aa31aeac98e8",
        "Apache-2.0",
        "openssl:openssl",
        "https://github.com/openssl/openssl/releases/download/openssl-3.5.7/openssl-3.5.7.tar.gz",
        "openssl=3.5.7-1~deb13u3",
    ),
    Source(
        "SQLite",
        "3.53.4",
        "sqlite3_3.53.4.orig.tar.xz",
        "05366adc8ee80c6b1faa71285b49d133c2121238ca58934b077fdeb95934abd4",
        "blessing",
        "sqlite:sqlite",
        debian="sqlite3=3.53.4-2",
    ),
    # Debian packs it again, without what it holds not to be free: no file at zlib's site has these bytes.
    Source(
        "zlib",
        "1.3.2",
        "zlib_1.3.dfsg+really1.3.2.orig.tar.gz",
        "7b6903eb019983987b7112eccf90f1703f1c6c0e0cede36564bf611d19ca579d",
        "Zlib",
        "zlib:zlib",
        debian="zlib=1:1.3.dfsg+really1.3.2-4",
    ),
)

ZIG = Source(
    "ziglang",
    "0.17.1",
    "ziglang-0.17.1-py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64.musllinux_1_1_x86_64.whl",
    "ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54",
    "MIT",
    "ziglang:zig",
)


def fetch(source: Source, directory: Path) -> Path:
    """Return the path of a verified archive, taken from `directory` or fetched into it.

    SourceError names the file to put there where no way leads to it.
    """
    path = directory / source.file
    reasons = []
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as work:
            for way in (from_site, from_debian, from_index):
                try:
                    way(source, Path(work))
                except SourceError as error:
                    reasons.append(str(error))
                fetched = Path(work, source.file)
                if fetched.exists():
                    fetched.replace(path)
                    break
    if not path.exists():
        raise SourceError(
            f"{source.file} (sha256 {source.sha256}) is not in {directory}: {'; '.join(reasons)}"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise SourceError(
            f"{path} has sha256 {digest}, not {source.sha256} as pinned: remove it and look why"
        )
    return path


def from_site(source: Source, work: Path) -> None:
    """Download an archive from its project's site."""
    if not source.url:
        return
    try:
        with (
            urllib.request.urlopen(source.url, timeout=30) as response,
            open(work / "unfinished", "wb") as file,
        ):
            shutil.copyfileobj(response, file)
    except OSError as error:
        raise SourceError(f"{source.url} cannot be had ({error})") from None
    Path(work, "unfinished").replace(work / source.file)


def from_debian(source: Source, work: Path) -> None:
    """Let apt fetch a source package by lists and caches of its own, from this machine's mirror."""
    if not source.debian:
        return
    if shutil.which("apt-get") is None:
        raise SourceError("no apt-get for Debian's source packages")
    mirrors = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
    by_archive = {address.rstrip("/").rpartition("/")[2]: address for address in mirrors.split()}
    lines = [
        f"deb-src [signed-by={DEBIAN_KEYS}] {by_archive[archive]} {suite} main"
        for archive, suite in DEBIAN_SUITES
        if archive in by_archive
    ]
    if not lines:
        raise SourceError("apt has no mirror of Debian for its source packages")
    (work / "sources.list").write_text("\n".join([*lines, ""]), encoding="ascii")
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    settings = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",  # as root apt would fetch as a user that may not write here
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    run("apt-get", *options, "-qq", "update", cwd=work)
    run(
        "apt-get",
        *options,
        "-qq",
        "source",
        "--download-only",
        "--tar-only",
        source.debian,
        cwd=work,
    )


def from_index(source: Source, work: Path) -> None:
    """Let pip fetch the compiler's wheel, from the index that pip is set up for."""
    if source != ZIG:
        return
    requirements = work / "requirements.txt"
    requirements.write_text(
        f"{source.name}=={source.version} --hash=sha256:{source.sha256}\n", encoding="ascii"
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--platform", "manylinux2010_x86_64", "--dest", str(work)]
    run(*command, "--requirement", str(requirements))


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a program quietly and return what it says; SourceError has its last line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, timeout=TIME_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"{command[0]} took longer than {TIME_LIMIT} seconds") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["failed without a word"])[-1]
        raise SourceError(f"{Path(command[0]).name}: {last}")
    return done.stdout
