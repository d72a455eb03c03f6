"""What `regsync version` says: this program, its interpreter, its OpenSSL, its FIPS gate.

Owns: the words of `version`, and the inventory (SBOM) of the built file.
Follows: docs/design.md sections 1 and 10.
"""

from __future__ import annotations

import json
import sys

from _regsync import FIPS_BUILD, IS_STATIC, __version__, fips
from _regsync.errors import ConfigError


def show(closed: str, *, as_json: bool) -> int:
    """Write the version to standard output; return the exit status.

    `closed` says why the FIPS gate is closed; it is empty where the gate holds or there is none.
    """
    facts = describe(closed)
    line = "regsync {version} ({gate}), {python}, {openssl}".format(**facts)
    sys.stdout.write(f"{json.dumps(facts) if as_json else line}\n")
    sys.stdout.flush()
    return 0


def describe(closed: str) -> dict[str, object]:
    """Return what `version --json` shows."""
    provider = None
    if IS_STATIC:
        build = "static"
        gate = "static file, no FIPS gate"
    elif not FIPS_BUILD:
        build = "nofips"
        gate = "no FIPS gate in this build"
    elif closed:
        build = "fips"
        gate = f"FIPS gate closed: {closed}"
    else:
        build = "fips"
        provider = fips.provider()
        gate = "FIPS gate holds: {name} {version}".format(**provider)
    return {
        "schema": 1,
        "version": __version__,
        "build": build,
        "python": python_version(),
        "openssl": openssl_version(),
        "gate": gate,
        "gate_holds": provider is not None,
        "provider": provider,
    }


def python_version() -> str:
    name = sys.implementation.name
    version, *_ = sys.version.split()
    return f"{'CPython' if name == 'cpython' else name} {version}"


def openssl_version() -> str:
    try:
        import _ssl  # to ask for its version, where `ssl` would set up trust as well
    except ImportError:  # some interpreters are built without it
        return "no OpenSSL"
    return _ssl.OPENSSL_VERSION


def inventory() -> int:
    """Write the SBOM (CycloneDX) that the build put into the file to standard output.

    ConfigError where the program runs from its sources, which have none.
    """
    loader = globals()["__loader__"]
    if not hasattr(loader, "archive"):
        raise ConfigError(
            "--sbom: a checkout has no inventory, only a built file has one",
            hint="build a file with tools/build_zipapp.py",
        )
    sys.stdout.write(loader.get_data(f"{loader.archive}/sbom.cdx.json").decode())
    sys.stdout.flush()
    return 0
