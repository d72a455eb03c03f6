#!/usr/bin/env python3
"""Build the static executables for Linux, which need nothing of a host.

    python3 tools/build_static.py [--arch ARCH ...] [--out dist] [--work build/static] [--cache build/wheels]
    python3 tools/build_static.py --cached ...      only what needs no compiler

dist/regsync-linux-ARCH has AWS-LC with its FIPS module, dist/regsync-nofips-linux-ARCH has OpenSSL.

There are two steps. The first compiles a runtime (CPython, AWS-LC or OpenSSL, SQLite, zlib, musl) from
pinned archives: 10 to 30 minutes for an architecture, on x86_64 only, and not again before one of its
parts changes (tools/static/runtime.py). The second puts the program behind it, in seconds and without a
compiler (tools/static/program.py). SHA256SUMS is written over all that is in the directory.

The archives are taken from --cache, else from their projects' sites, as Debian's source packages by
apt, or by cargo; packages and the compiler from the index that pip is set up for. Each has to have its
pinned hash.

Owns: the order of the steps, the command line.
May not know: how a step is done.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.build_zipapp import BuildError, write_sums  # noqa: E402
from tools.static.program import append  # noqa: E402
from tools.static.runtime import ARCHITECTURES, build_runtime, runtime_of  # noqa: E402
from tools.static.sources import VARIANTS, Variant  # noqa: E402

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Build, say what there is now, and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch",
        action="append",
        choices=ARCHITECTURES,
        help="build for this one; may be repeated (default: both)",
    )
    parser.add_argument("--out", default=str(ROOT / "dist"), metavar="DIR")
    parser.add_argument("--work", default=str(ROOT / "build" / "static"), metavar="DIR")
    parser.add_argument("--cache", default=str(ROOT / "build" / "wheels"), metavar="DIR")
    parser.add_argument(
        "--cached", action="store_true", help="compile nothing: fail where a runtime is not there"
    )
    options = parser.parse_args(argv)
    options.work = Path(options.work).resolve()
    try:
        build(options)
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or 'output'}: {error.strerror}\n")
        return 1
    return 0


def build(options: argparse.Namespace) -> None:
    """Make the executables."""
    out = Path(options.out)
    written = []
    for variant in VARIANTS:
        compiler = ready_runtime(variant, platform.machine(), options)
        for arch in options.arch or ARCHITECTURES:
            runtime = ready_runtime(variant, arch, options)
            written.append(append(variant, arch, runtime, compiler, out, options.cache))
    for path in [*written, Path(write_sums(str(out)))]:
        print(f"{path}: {path.stat().st_size} bytes")


def ready_runtime(variant: Variant, arch: str, options: argparse.Namespace) -> Path:
    """Return the directory of a runtime, built if need be and allowed."""
    if not options.cached:
        return build_runtime(variant, arch, options.work, Path(options.cache))
    if arch not in ARCHITECTURES:
        raise BuildError(f"there is no runtime that {arch} could run, to compile bytecode")
    directory = runtime_of(variant, arch, options.work)
    if directory is None:
        raise BuildError(f"no runtime of {variant.name}-{arch} is in {options.work}")
    return directory


if __name__ == "__main__":
    sys.exit(main())
