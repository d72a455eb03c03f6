#!/usr/bin/env python3
"""Put Debian's FIPS provider for OpenSSL into build/fips, for tests, demo and benchmarks; print
where it is.

    OPENSSL_MODULES=$(python3 tools/fips_provider.py) dist/regsync.pyz version

Owns: the way from Debian's archive to `fips.so` and the `fipsmodule.cnf` that `openssl fipsinstall`
makes for it. Invariant: nothing is installed and nothing outside of build/ changes: the package
`openssl-provider-fips` is asked for by a list of sources of our own, which names the machine's own
mirror and the first suite that has the package (trixie, whose module works under bookworm's
OpenSSL), is checked by apt against Debian's keys, and is only unpacked. Debian's build is not a
validated module, and nobody claims so here: it shows that the gate works. Uses the standard library
only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["ProviderError", "find", "main", "ready"]

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "build" / "fips"
PACKAGE = "openssl-provider-fips"
FIRST = (13, "trixie")  # the first release with the package; its libc6 is not asked for before 12
TIME_LIMIT = 180  # seconds for each of apt's two steps


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
    """Return the directory of the provider, fetched if need be; ProviderError says why that cannot
    be.
    """
    if there := find():
        return there
    if missing := [name for name in ("apt-get", "dpkg", "openssl") if shutil.which(name) is None]:
        raise ProviderError(f"no {missing[0]} on this machine")
    suite = suite_of(read("/etc/os-release"))
    lists = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    source = source_of("\n\n".join(read(path) for path in lists), suite[0])
    DIRECTORY.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DIRECTORY.parent) as work:
        package = download(source.format(suite=suite[1]), Path(work))
        run("dpkg", "-x", str(package), f"{work}/root")
        modules = list(Path(work, "root").rglob("fips.so"))
        if not modules:
            raise ProviderError(f"there is no fips.so in {package.name}")
        made = Path(work, "made")
        made.mkdir()
        shutil.copy(modules[0], made)
        run(
            "openssl", "fipsinstall", "-module", f"{made}/fips.so", "-out", f"{made}/fipsmodule.cnf"
        )
        made.chmod(0o755)
        (made / "fipsmodule.cnf").chmod(0o644)
        shutil.rmtree(DIRECTORY, ignore_errors=True)
        made.replace(DIRECTORY)
    return str(DIRECTORY)


def read(path: str | Path) -> str:
    """Return a file's text, or nothing."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def suite_of(release: str) -> tuple[str, str]:
    """Return from /etc/os-release this machine's suite and the one that has the package."""
    told = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', release))
    if told.get("ID") != "debian" or not told.get("VERSION_ID", "").isdigit():
        raise ProviderError(
            f"this is {told.get('PRETTY_NAME', 'no Debian')}, not a release of Debian"
        )
    if int(told["VERSION_ID"]) < FIRST[0] - 1:
        raise ProviderError(f"{told['PRETTY_NAME']} is older than the package's C library")
    own = told["VERSION_CODENAME"]
    return own, own if int(told["VERSION_ID"]) >= FIRST[0] else FIRST[1]


def source_of(lists: str, own: str) -> str:
    """Return apt's entry for the mirror that serves suite `own`, with `{suite}` for the suite."""
    signed = "/usr/share/keyrings/debian-archive-keyring.gpg"
    entry = "Types: deb\nURIs: {}\nSuites: {{suite}}\nComponents: main\nSigned-By: {}\n"
    for stanza in re.split(r"\n\s*\n", lists):
        fields = {
            name.lower(): value
            for name, value in re.findall(r"(?m)^([A-Za-z-]+):[ \t]*(.+)$", stanza)
        }
        if "deb" in fields.get("types", "").split() and own in fields.get("suites", "").split():
            return entry.format(fields["uris"].split()[0], fields.get("signed-by", signed))
    for options, address, suite in re.findall(
        r"(?m)^deb[ \t]+(?:\[([^\]]*)\][ \t]+)?(\S+)[ \t]+(\S+)", lists
    ):
        if suite == own:
            by = re.search(r"signed-by=(\S+)", options)
            return entry.format(address, by[1] if by else signed)
    raise ProviderError(f"apt has no source for {own}")


def download(source: str, work: Path) -> Path:
    """Let apt fetch the package by this one source, with lists and caches of its own; return its
    path.
    """
    (work / "own.sources").write_text(source, encoding="ascii")
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
    run("apt-get", *options, "-qq", "update", cwd=work)
    run("apt-get", *options, "-qq", "download", PACKAGE, cwd=work)
    return next(work.glob(f"{PACKAGE}_*.deb"))


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a program quietly; ProviderError has its last line."""
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
        raise ProviderError(
            f"{command[0]}: {(done.stderr.strip().splitlines() or ['failed without a word'])[-1]}"
        )


if __name__ == "__main__":
    sys.exit(main())
