"""What `regsync version` says: this program, its interpreter, its OpenSSL, its FIPS gate. Owns:
those words. May not know: anything but `fips`. Invariant: without `as_json` nothing costly is
loaded, no ssl, json, typing or argparse (tests/test_zipapp.py looks): scripts ask often. Follows
docs/design.md sections 1 and 10."""

from __future__ import annotations

import sys

from _regsync import FIPS_BUILD, __version__, fips


def show(closed: str, *, as_json: bool) -> int:
    """Write the version, and whether the gate is `closed`, to standard output; return the exit
    status.
    """
    try:
        import _ssl  # what `ssl` wraps, in a third of its time

        openssl = _ssl.OPENSSL_VERSION
    except ImportError:
        openssl = "no OpenSSL"
    # platform.python_implementation() gives the same word and imports re, subprocess and more.
    implementation = {"cpython": "CPython", "pypy": "PyPy"}.get(
        sys.implementation.name, sys.implementation.name
    )
    provider = fips.provider() if FIPS_BUILD and not closed else None
    gate = f"FIPS gate closed: {closed}" if closed else "no FIPS gate in this build"
    if provider:
        gate = "FIPS gate holds: {name} {version}".format(**provider)
    told = {
        "version": __version__,
        "build": "fips" if FIPS_BUILD else "nofips",
        "python": f"{implementation} {'.'.join(map(str, sys.version_info[:3]))}",
        "openssl": openssl,
        "gate": gate,
        "gate_holds": provider is not None,
        "provider": provider,
    }
    text = "regsync {version} ({gate}), {python}, {openssl}".format(**told)
    if as_json:
        import json

        text = json.dumps(told)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 0


def inventory() -> int:
    """Write the SBOM (CycloneDX) that the build put into the file to standard output; ConfigError
    for sources.
    """
    from _regsync.errors import ConfigError

    loader = globals()["__loader__"]
    if not hasattr(loader, "archive"):
        raise ConfigError(
            "only a built file has an inventory", hint="tools/build_zipapp.py makes one"
        )
    sys.stdout.write(loader.get_data(f"{loader.archive}/sbom.cdx.json").decode())
    sys.stdout.flush()
    return 0
