"""Measure what runs take beside requests: memory, CPU, and bytes that are moved again.

A case with a limit runs under RLIMIT_DATA, which counts all private memory that can be written.
What is shown as MiB was resident. Registries are the harness's, in this process; the program is a
process of its own.

Owns: which cases there are.
May not know: how a case is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping

from tools.benches import parts, resume, runs, soak
from tools.benches.runner import Figure, choose, print_figures

__all__ = ["CASES", "add_options", "run"]

CASES: Mapping[str, Callable[[], Iterator[Figure]]] = {
    "election": parts.election,
    "state": parts.state,
    "tags": parts.tags,
    "config": parts.config,
    "never-moving": runs.never_moving,
    "remembering": runs.remembering,
    "layout": runs.layout,
    "typical": runs.typical,
    "large": runs.large,
    "dialects": runs.dialects,
    "resume": resume.figures,
    "soak": soak.figures,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all)")


def run(options: argparse.Namespace) -> int:
    """Measure the chosen cases."""
    for case in choose(options.cases, CASES).values():
        print_figures(case())
    return 0
