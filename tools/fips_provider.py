#!/usr/bin/env python3
"""Put Debian's FIPS provider for OpenSSL into build/fips, and print where it is.

    OPENSSL_MODULES=$(python3 tools/fips_provider.py) dist/regsync.pyz version

Tests, demo and benchmarks load it. Debian's build is not a validated module, and nobody claims so
here: it shows that the gate works. The standard library is all that this needs.

The package `openssl-provider-fips` is asked for by a list of sources of our own. The list names the
machine's own mirror and the first suite that has the package (trixie, whose module works under
bookworm's OpenSSL). apt checks the package against Debian's keys, and it is only unpacked.

Owns: the way from Debian's archive to `fips.so`, and to the `fipsmodule.cnf` that `openssl
fipsinstall` makes for it.
May not know: who loads it.
Invariants: nothing is installed, and nothing outside of build/ changes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["DEBIAN_KEYS", "ENTRY", "ProviderError", "apt_with", "find", "main", "ready", "run"]

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "build" / "fips"
PACKAGE = "openssl-provider-fips"
# The first release with the package. Its module also runs with the C library of the one before.
FIRST_RELEASE = 13
FIRST_SUITE = "trixie"
DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Of apt's sources (sources.list(5)): an entry that is written, and the older form that is read, with
# its options, address and suite.
ENTRY = "Types: {}\nURIs: {}\nSuites: {}\nComponents: main\nSigned-By: {}\n"
ONE_LINE = r"(?m)^deb[ \t]+(?:\[([^\]]*)\][ \t]+)?(\S+)[ \t]+(\S+)"
TIME_LIMIT = 600  # seconds for each of apt's steps


class ProviderError(Exception):
    """Why there is no provider, on one line."""


def main() -> int:
    """Fetch it where it is not there yet, print its directory, return an exit status."""
    try:
        print(ready())
    except ProviderError as error:
        sys.stderr.write(f"fips_provider: {error}\n")
        return 1
    return 0


def find() -> str | None:
    """Return the directory of the provider, for OPENSSL_MODULES, if it is there."""
    both = [DIRECTORY / "fips.so", DIRECTORY / "fipsmodule.cnf"]
    return str(DIRECTORY) if all(path.is_file() for path in both) else None


def ready() -> str:
    """Return the directory of the provider, fetched if need be; else ProviderError says why not."""
    if directory := find():
        return directory
    for program in ("apt-get", "dpkg", "openssl"):
        if shutil.which(program) is None:
            raise ProviderError(f"no {program} on this machine")
    own_suite, suite = suite_of(read("/etc/os-release"))
    lists = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    source = source_of("\n\n".join(read(path) for path in lists), own_suite, suite)

    DIRECTORY.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DIRECTORY.parent) as work:
        package = download(source, Path(work))
        run("dpkg", "-x", str(package), f"{work}/root")
        modules = list(Path(work, "root").rglob("fips.so"))
        if not modules:
            raise ProviderError(f"there is no fips.so in {package.name}")

        provider = Path(work, "made")
        provider.mkdir()
        shutil.copy(modules[0], provider)
        module = provider / "fips.so"
        config = provider / "fipsmodule.cnf"
        run("openssl", "fipsinstall", "-module", str(module), "-out", str(config))
        provider.chmod(0o755)
        config.chmod(0o644)
        shutil.rmtree(DIRECTORY, ignore_errors=True)
        provider.replace(DIRECTORY)
    return str(DIRECTORY)


def read(path: str | Path) -> str:
    """Return a file's text, or nothing."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def suite_of(release: str) -> tuple[str, str]:
    """Return from /etc/os-release this machine's suite and the one that has the package."""
    fields = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', release))
    version = fields.get("VERSION_ID", "")
    if fields.get("ID") != "debian" or not version.isdigit():
        name = fields.get("PRETTY_NAME", "no Debian")
        raise ProviderError(f"this is {name}, not a release of Debian")
    if int(version) < FIRST_RELEASE - 1:
        raise ProviderError(f"{fields['PRETTY_NAME']} is older than the package's C library")
    own = fields["VERSION_CODENAME"]
    if int(version) < FIRST_RELEASE:
        return own, FIRST_SUITE
    return own, own


def source_of(lists: str, own: str, suite: str) -> str:
    """Return apt's entry for a suite at the mirror that serves the machine's own one."""
    for stanza in re.split(r"\n\s*\n", lists):
        pairs = re.findall(r"(?m)^([A-Za-z-]+):[ \t]*(.+)$", stanza)
        fields = {name.lower(): value for name, value in pairs}
        if "deb" in fields.get("types", "").split() and own in fields.get("suites", "").split():
            address = fields["uris"].split()[0]
            return ENTRY.format("deb", address, suite, fields.get("signed-by", DEBIAN_KEYS))
    for options, address, served in re.findall(ONE_LINE, lists):
        if served == own:
            keys = re.search(r"signed-by=(\S+)", options)
            return ENTRY.format("deb", address, suite, keys[1] if keys else DEBIAN_KEYS)
    raise ProviderError(f"apt has no source for {own}")


def download(source: str, work: Path) -> Path:
    """Let apt fetch the package by this one source; return the package's path."""
    run(*apt_with(source, work), "download", PACKAGE, cwd=work)
    return next(work.glob(f"{PACKAGE}_*.deb"))


def apt_with(sources: str, work: Path) -> list[str]:
    """Return the words that start apt with these sources alone, whose lists it has fetched.

    It keeps its lists and caches in `work`.
    """
    (work / "own.sources").write_text(sources, encoding="ascii")
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    settings = {
        "Dir::Etc::SourceList": work / "own.sources",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",  # as root apt would fetch as a user that may not write here
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    apt = ["apt-get", *options, "-qq"]
    run(*apt, "update", cwd=work)
    return apt


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a program quietly and return what it says; ProviderError has its last line."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProviderError(f"{command[0]} took longer than {TIME_LIMIT} seconds") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["failed without a word"]
        raise ProviderError(f"{command[0]}: {lines[-1]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
