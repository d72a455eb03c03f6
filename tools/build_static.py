#!/usr/bin/env python3
"""Build dist/regsync-linux-x86_64 and -aarch64, which need nothing of a host, and an image of them.

    python3 tools/build_static.py [--arch ARCH ...] [--out dist] [--work build/static] [--cache build/wheels]
    python3 tools/build_static.py --cached ...      only what needs no compiler
    python3 tools/build_static.py --modules         write tools/static/modules.txt again

There are two steps. The first compiles the runtime (CPython, OpenSSL, SQLite, zlib, musl) from pinned
archives: 10 to 30 minutes for an architecture, on x86_64 only, and not again before one of its parts
changes (tools/static/runtime.py). The second puts the program behind it, in seconds and without a
compiler (tools/static/program.py). With both architectures there, dist/regsync-linux.oci.tar is made of
them (tools/static/image.py); SHA256SUMS is written over all that is in the directory.

The archives are taken from --cache, else from their projects' sites, else as Debian's source packages by
apt; packages and the compiler from the index that pip is set up for. Each has to have its pinned hash.

Owns: the order of the steps, the command line.
May not know: how a step is done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.build_zipapp import BuildError, write_sums  # noqa: E402
from tools.static import modules  # noqa: E402
from tools.static.image import write_image  # noqa: E402
from tools.static.program import append, sources_of_program, wheels_inside  # noqa: E402
from tools.static.runtime import ARCHITECTURES, build_runtime, python_parts, runtime_of  # noqa: E402

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
    parser.add_argument(
        "--modules", action="store_true", help="list the standard modules that the program needs"
    )
    options = parser.parse_args(argv)
    options.work = Path(options.work).resolve()
    try:
        if options.modules:
            list_modules(options)
        else:
            build(options)
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or 'output'}: {error.strerror}\n")
        return 1
    return 0


def build(options: argparse.Namespace) -> None:
    """Make the executables, and the image where all are there."""
    out = Path(options.out)
    own = ready_runtime(platform.machine(), options)
    written = []
    for arch in options.arch or ARCHITECTURES:
        runtime = ready_runtime(arch, options)
        written.append(append(arch, runtime, own, out, options.cache))

    executables = {arch: out / f"regsync-linux-{arch}" for arch in ARCHITECTURES}
    if all(path.exists() for path in executables.values()):
        image = out / "regsync-linux.oci.tar"
        written.append(write_image(image, executables, own / "runtime", options.cache))
    for path in [*written, Path(write_sums(str(out)))]:
        print(f"{path}: {path.stat().st_size} bytes")


def ready_runtime(arch: str, options: argparse.Namespace) -> Path:
    """Return the directory of a runtime, built if need be and allowed."""
    if not options.cached:
        return build_runtime(arch, options.work, Path(options.cache))
    if arch not in ARCHITECTURES:
        raise BuildError(f"there is no runtime that {arch} could run, to compile bytecode")
    directory = runtime_of(arch, options.work)
    if directory is None:
        raise BuildError(f"no runtime for {arch} of this source is in {options.work}")
    return directory


def list_modules(options: argparse.Namespace) -> None:
    """Write modules.txt, by the library of the CPython that is compiled."""
    source, python = python_parts(options.work, Path(options.cache))
    program = sources_of_program(wheels_inside(options.cache))
    texts = {name: data.decode() for name, data in program.items() if name.endswith(".py")}
    done = subprocess.run(
        [python / "bin" / "build-python", modules.__file__, source / "Lib"],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        env={"WORK": str(options.work), "PATH": os.defpath},
        check=False,
    )
    if done.returncode:
        raise BuildError(f"the modules could not be listed: {done.stderr.strip()[-300:]}")
    path = modules.FOLDER / "modules.txt"
    path.write_text(done.stdout, encoding="ascii")
    print(f"{path}: {len(done.stdout.split())} modules")


if __name__ == "__main__":
    sys.exit(main())
