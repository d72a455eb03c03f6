"""Measure what runs take beside requests: memory, CPU, and bytes that are moved again.

A case with a limit runs under RLIMIT_DATA, which counts all private memory that can be written.
What is shown as MiB was resident. Registries are the harness's, in this process; the program is a
process of its own.

Owns: which cases there are, and their options.
May not know: how a case is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from tools.benches import parts, resume, runs, soak
from tools.benches.runner import REGSYNC, Figure, Program, choose, print_figures

__all__ = ["CASES", "add_options", "run"]


def program_of(options: argparse.Namespace) -> Program:
    """Return the program that is to be measured."""
    return Program(options.python, options.program)


CASES: Mapping[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "election": lambda options: parts.election(),
    "state": lambda options: parts.state(),
    "tags": lambda options: parts.tags(),
    "config": lambda options: parts.config(program_of(options), options.mappings),
    "unchanged": lambda options: runs.unchanged(program_of(options)),
    "never-moving": lambda options: runs.never_moving(program_of(options)),
    "remembering": lambda options: runs.remembering(program_of(options)),
    "layout": lambda options: runs.layout(program_of(options)),
    "typical": lambda options: runs.typical(program_of(options)),
    "large": lambda options: runs.large(program_of(options)),
    "dialects": lambda options: runs.dialects(program_of(options)),
    "resume": lambda options: resume.figures(program_of(options), options.size),
    "soak": lambda options: soak.figures(program_of(options), options.cycles, options.tags),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--python", default=sys.executable, metavar="EXE", help="the interpreter")
    parser.add_argument(
        "--program", default=REGSYNC.file, metavar="FILE", help="regsync.py or a built file"
    )
    parser.add_argument(
        "--mappings", type=int, default=5000, metavar="N", help="config: how many (%(default)s)"
    )
    parser.add_argument(
        "--size", type=int, default=1024, metavar="MIB", help="resume: of the layer (%(default)s)"
    )
    parser.add_argument(
        "--cycles", type=int, default=1000, metavar="N", help="soak: how many (%(default)s)"
    )
    parser.add_argument(
        "--tags", type=int, default=500, metavar="N", help="soak: how many (%(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure the chosen cases."""
    cases = choose(options.cases, CASES).values()
    figures = chain.from_iterable(case(options) for case in cases)
    print_figures(figures, as_json=options.json)
    return 0
