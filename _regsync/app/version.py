"""Show the version of this program, of its interpreter and of OpenSSL, and the state of the FIPS gate.

Follows: docs/design.md sections 1 and 10.
"""

from __future__ import annotations

import json
import sys

from _regsync import FIPS_BUILD, IS_STATIC, __version__, fips
from _regsync.errors import ConfigError


def show(closed_reason: str, *, writes_json: bool) -> int:
    """Print the version as a line or as JSON. Returns the exit status.

    `closed_reason` is the reason why the FIPS gate is closed. It is empty if the gate holds or if
    this build has no gate.
    """
    facts = describe(closed_reason)
    line = "regsync {version} ({gate}), {python}, {openssl}".format(**facts)
    sys.stdout.write(f"{json.dumps(facts) if writes_json else line}\n")
    sys.stdout.flush()
    return 0


def describe(closed_reason: str) -> dict[str, object]:
    """Return the document of `version --json`. The FIPS gate is closed for `closed_reason`, if any."""
    provider = None  # name and version of the FIPS provider, if the gate holds
    if IS_STATIC:
        build = "static"
        gate = "static file, no FIPS gate"
    elif not FIPS_BUILD:
        build = "nofips"
        gate = "no FIPS gate in this build"
    elif closed_reason:
        build = "fips"
        gate = f"FIPS gate closed: {closed_reason}"
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
        import _ssl  # faster than `ssl`, and the version is all that is needed
    except ImportError:  # an interpreter that was built without OpenSSL
        return "no OpenSSL"
    return _ssl.OPENSSL_VERSION


def inventory() -> int:
    """Print the SBOM (CycloneDX) that the build has put into the file. Returns the exit status.

    Raises ConfigError if the program runs from its sources, because they have no SBOM.
    """
    loader = globals()["__loader__"]  # that of a zip file has `archive`, the path of the file
    if not hasattr(loader, "archive"):
        raise ConfigError(
            "--sbom: a checkout has no inventory, only a built file has one",
            hint="build a file with tools/build_zipapp.py",
        )
    sys.stdout.write(loader.get_data(f"{loader.archive}/sbom.cdx.json").decode())
    sys.stdout.flush()
    return 0
