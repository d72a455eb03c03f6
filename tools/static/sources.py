"""The archives that the static executable is compiled from, by hash, and the ways to get them.

An archive is taken from the directory of sources, from its project's site, from Debian's source
packages (apt asks the mirror that this machine is set up for), by cargo, or, the compiler, by pip.
Whoever gives it: the hash decides.

Owns: versions, hashes and licences of what is compiled; fetching.
May not know: how it is compiled.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tools.build_zipapp import BuildError, Wheel, download, verified
from tools.fips_provider import DEBIAN_KEYS, ENTRY, ProviderError, apt_with, run

__all__ = ["CPYTHON", "DEFAULT", "SQLITE", "VARIANTS", "ZIG", "ZLIB", "Source", "Variant", "fetch"]

# The suites that have the source packages, by the end of their archive's address.
DEBIAN_SUITES = (("debian", "sid"), ("debian", "trixie"), ("debian-security", "trixie-security"))


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
    crate: str = ""  # the crate that this file is, with its version


CPYTHON = Source(
    "CPython",
    "3.13.15",
    "python3.13_3.13.15.orig.tar.xz",
    "1e66a7945a48390ee4c2a4268a0e4185884059a13c4aab6d148aa208deea4a76",
    "PSF-2.0",
    "python:python",
    "https://www.python.org/ftp/python/3.13.15/Python-3.13.15.tar.xz",
    "python3.13=3.13.15-1",
)

# The source of the version that certificate #5314 names, as this crate carries it; 0.13.10 has
# 3.0.0 and 0.13.12 has 3.2.0.
AWS_LC = Source(
    "AWS-LC",
    "3.1.0",
    "aws-lc-fips-sys-0.13.11.crate",
    "df6ea8e07e2df15b9f09f2ac5ee2977369b06d116f0c4eb5fa4ad443b73c7f53",
    "ISC AND (Apache-2.0 OR ISC) AND OpenSSL",
    "amazon:aws-lc",
    crate="aws-lc-fips-sys@0.13.11",
)

OPENSSL = Source(
    "OpenSSL",
    "3.5.7",
    "openssl_3.5.7.orig.tar.gz",
    "a8c0d28a529ca480f9f36cf5792e2cd21984552a3c8e4aa11a24aa31aeac98e8",
    "Apache-2.0",
    "openssl:openssl",
    "https://github.com/openssl/openssl/releases/download/openssl-3.5.7/openssl-3.5.7.tar.gz",
    "openssl=3.5.7-1~deb13u3",
)

SQLITE = Source(
    "SQLite",
    "3.53.4",
    "sqlite3_3.53.4.orig.tar.xz",
    "05366adc8ee80c6b1faa71285b49d133c2121238ca58934b077fdeb95934abd4",
    "blessing",
    "sqlite:sqlite",
    debian="sqlite3=3.53.4-2",
)

# Debian packs it again, without what it holds not to be free: no file at zlib's site has these bytes.
ZLIB = Source(
    "zlib",
    "1.3.2",
    "zlib_1.3.dfsg+really1.3.2.orig.tar.gz",
    "7b6903eb019983987b7112eccf90f1703f1c6c0e0cede36564bf611d19ca579d",
    "Zlib",
    "zlib:zlib",
    debian="zlib=1:1.3.dfsg+really1.3.2-4",
)

ZIG = Source(
    "ziglang",
    "0.17.1",
    "ziglang-0.17.1-py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64.musllinux_1_1_x86_64.whl",
    "ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54",
    "MIT",
    "ziglang:zig",
)


@dataclass(frozen=True)
class Variant:
    """One of the two static files; they differ in the library that computes and speaks TLS."""

    name: str  # of the executable, before the architecture
    library: Source
    is_fips: bool

    @property
    def sources(self) -> tuple[Source, ...]:
        """What is compiled into it."""
        return (CPYTHON, self.library, SQLITE, ZLIB)


DEFAULT = Variant("regsync-linux", AWS_LC, is_fips=True)
VARIANTS = (DEFAULT, Variant("regsync-nofips-linux", OPENSSL, is_fips=False))


def fetch(source: Source, directory: Path) -> Path:
    """Return the path of a verified archive, taken from `directory` or fetched into it.

    BuildError names the file to put there where no way leads to it.
    """
    path = directory / source.file
    reasons = []
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as work:
            for way in (from_site, from_debian, from_cargo, from_index):
                try:
                    way(source, Path(work))
                except (BuildError, ProviderError) as error:
                    reasons.append(str(error))
                fetched = Path(work, source.file)
                if fetched.exists():
                    fetched.replace(path)
                    break
    if not path.exists():
        raise BuildError(
            f"{source.file} (sha256 {source.sha256}) is not in {directory}: {'; '.join(reasons)}"
        )
    return Path(verified(str(path), source.sha256))


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
        raise BuildError(f"{source.url} cannot be had ({error})") from None
    Path(work, "unfinished").replace(work / source.file)


def from_debian(source: Source, work: Path) -> None:
    """Let apt fetch a source package by lists and caches of its own, from this machine's mirror."""
    if not source.debian:
        return
    if shutil.which("apt-get") is None:
        raise BuildError("no apt-get for Debian's source packages")
    mirrors = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
    by_archive = {address.rstrip("/").rpartition("/")[2]: address for address in mirrors.split()}
    entries = [
        ENTRY.format("deb-src", by_archive[archive], suite, DEBIAN_KEYS)
        for archive, suite in DEBIAN_SUITES
        if archive in by_archive
    ]
    if not entries:
        raise BuildError("apt has no mirror of Debian for its source packages")
    apt = apt_with("\n".join(entries), work)
    run(*apt, "source", "--download-only", "--tar-only", source.debian, cwd=work)


def from_cargo(source: Source, work: Path) -> None:
    """Let cargo fetch a crate, from the registry that it is set up for, and copy what it keeps."""
    if not source.crate:
        return
    if shutil.which("cargo") is None:
        raise BuildError(f"no cargo for the crate {source.crate}")
    run("cargo", "info", "--quiet", source.crate, cwd=work)
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    for kept in home.glob(f"registry/cache/*/{source.file}"):
        shutil.copy(kept, work)


def from_index(source: Source, work: Path) -> None:
    """Let pip fetch the compiler's wheel, from the index that pip is set up for."""
    if source == ZIG:
        wheel = Wheel(source.name, source.version, source.file, source.sha256, source.licence)
        download(wheel, str(work))
