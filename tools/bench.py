#!/usr/bin/env python3
"""Measure the program, and count what it asks of registries.

    python3 tools/bench.py SUBJECT [OPTION ...]
    python3 tools/bench.py SUBJECT --help

SUBJECT is one of:

    requests    requests and bytes of whole runs, beside the least that they could be
    speed       time, CPU and memory of whole runs, beside a bare loop of h11
    memory      memory of large runs, under a hard limit

The first two measure other programs beside this one where they are named (tools/benches/programs.py).
They need docker-registry and the packages of .venv; tools/check.py brings both.

Owns: the names of the subjects, and the end of a command that fails: one line, status 1.
May not know: how anything is measured (tools/benches/).
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("anyio") is None:
    sys.exit("bench: run it with .venv/bin/python, which tools/check.py makes")

from conformance.programs import MissingProgram  # noqa: E402
from tools.benches import memory, requests, speed  # noqa: E402
from tools.benches.runs import BenchError  # noqa: E402

__all__ = ["main"]

SUBJECTS = {"requests": requests, "speed": speed, "memory": memory}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one subject; return 0, or 1 when something needed is missing or failed."""
    parser = argparse.ArgumentParser(
        description=for_users(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subjects = parser.add_subparsers(required=True, metavar="SUBJECT")
    for name, module in SUBJECTS.items():
        subject = subjects.add_parser(
            name,
            description=for_users(module.__doc__ or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(subject)
        subject.set_defaults(run=module.run)
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
    except (BenchError, MissingProgram) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    return status


def for_users(docstring: str) -> str:
    """Return what a module says of itself, without what it says to those who change it."""
    return docstring.partition("\nOwns: ")[0]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    sys.exit(main())
