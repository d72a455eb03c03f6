#!/usr/bin/env python3
"""Measure the program, and count what it asks of registries.

    python3 tools/bench.py [SUBJECT] [OPTION ...]
    python3 tools/bench.py SUBJECT --help

SUBJECT is one of:

    skopeo      speed, CPU and memory beside skopeo's (also without a SUBJECT)
    compare     requests, bytes, time and results beside those of every other tool that is found
    cost        CPU of a request, a byte and a second target, beside a bare loop of h11
    bytes       requests and bytes of whole runs, beside the least that they could be
    memory      memory of large runs, under a hard limit
    props       what other subjects put around a program; not to be called by hand

Owns: the names of the subjects, and the end of a command that fails: one line, status 1.
May not know: how anything is measured (tools/benches/).
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from conformance.programs import MissingProgram  # noqa: E402
from tools.benches.runner import BenchError  # noqa: E402

__all__ = ["SUBJECTS", "main"]

SUBJECTS = ("skopeo", "compare", "cost", "bytes", "memory", "props")
DEFAULT = "skopeo"


class Subject(Protocol):
    """What each module of tools/benches/ that is named in SUBJECTS has."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Say which options the subject takes."""

    def run(self, options: argparse.Namespace) -> int:
        """Measure and print; return an exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one subject; return 0, or 1 when something needed is missing or failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(for_users(__doc__))
    name = DEFAULT
    if arguments and arguments[0] in SUBJECTS:
        name = arguments.pop(0)

    # A subject needs other packages than its neighbour: only its own module is imported.
    module = importlib.import_module(f"tools.benches.{name}")
    subject = cast(Subject, module)
    parser = argparse.ArgumentParser(
        prog=f"bench.py {name}",
        description=for_users(module.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject.add_options(parser)
    options = parser.parse_args(arguments)
    try:
        return subject.run(options)
    except (BenchError, MissingProgram) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1


def for_users(docstring: str) -> str:
    """Return what a module says of itself, without what it says to those who change it."""
    return docstring.partition("\nOwns: ")[0]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    sys.exit(main())
