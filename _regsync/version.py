"""What `regsync version` says: this program, its interpreter, its OpenSSL, its FIPS gate.

Owns: those words. May not know: anything but `fips`. Invariant: importing it and calling it with
`as_json` false loads nothing costly, no ssl, json, typing or argparse (tests/test_zipapp.py looks),
because scripts ask for the version often. Follows design.md sections 1 and 10.
"""

from __future__ import annotations

import sys

from _regsync import FIPS_BUILD, __version__, fips

__all__ = ["facts", "openssl_version", "show"]


def openssl_version() -> str:
    """Name the OpenSSL that this process has loaded.

    `_ssl` is what `ssl` wraps; alone it takes a third of the time, and the name is the run-time
    library's (OpenSSL_version), not that of the headers which Python was compiled with.
    """
    try:
        from _ssl import OPENSSL_VERSION
    except ImportError:
        return "no OpenSSL"
    return OPENSSL_VERSION


def facts() -> dict[str, str]:
    """Return what `regsync version --json` prints."""
    # platform.python_implementation() gives the same word and imports re, subprocess and more.
    implementation = {"cpython": "CPython", "pypy": "PyPy"}.get(sys.implementation.name, sys.implementation.name)
    return {
        "version": __version__,
        "build": "fips" if FIPS_BUILD else "nofips",
        "python": f"{implementation} {'.'.join(map(str, sys.version_info[:3]))}",
        "openssl": openssl_version(),
        "gate": fips.gate_state(),
    }


def show(*, as_json: bool) -> int:
    """Write the version to standard output; return the exit status."""
    told = facts()
    if as_json:
        import json

        text = json.dumps(told)
    else:
        text = "regsync {version} ({gate}), {python}, {openssl}".format(**told)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 0
