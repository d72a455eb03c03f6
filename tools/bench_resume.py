#!/usr/bin/env python3
"""Measure what a connection that breaks late in a large layer costs: bytes that are moved again.

    python3 tools/bench_resume.py [--json] [--size MIB]

The registries are the harness's, in this process (the target verifies and drops what it gets); the
program is a process of its own, over real sockets. A layer of 1 GiB breaks at 90 %: at its source
by an end of file or a reset, at a target that keeps what has come (distribution 3) and at one that
forgets it (2.8.2).

Owns: the cases and their goals. May not know: anything of the program but its command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.app import App  # noqa: E402
from conformance.families import Weighing  # noqa: E402
from conformance.faults import Rule  # noqa: E402
from conformance.images import Seed  # noqa: E402
from conformance.streams import Stream  # noqa: E402
from tools.bench_memory import BenchError, Figure, Place, place  # noqa: E402

__all__ = ["main"]

MIB = 1 << 20
# What lies between a hash's state and what was sent: 16 MiB; and what a piece and sockets hold.
_CHECKPOINT = 16.0
_UNDER_WAY = 8.0


class Case(NamedTuple):
    """What breaks, and how many MiB may be moved again by the source and to the target."""

    name: str
    where: str
    strike: Callable[[Rule, int], Rule]
    resumable: bool
    source: float
    target: float


def _cases(size: float) -> Iterator[Case]:
    """A reset takes with it what the source's kernel had not sent: that counts as sent there, and
    was not.
    """
    yield Case(
        "source ends", "source", lambda rule, at: rule.drop(after=at, of="response"), True, 0, 0
    )
    yield Case(
        "source resets",
        "source",
        lambda rule, at: rule.drop(after=at, of="response", reset=True),
        True,
        _UNDER_WAY,
        0,
    )
    yield Case(
        "target keeps", "target", lambda rule, at: rule.drop(after=at, of="request", reset=True), True,
        _CHECKPOINT + _UNDER_WAY, 0,
    )  # fmt: skip
    yield Case(
        "target forgets", "target", lambda rule, at: rule.drop(after=at, of="request", reset=True), False,
        0.9 * size + _UNDER_WAY, 0.9 * size,
    )  # fmt: skip


def _measure(case: Case, size: int) -> Iterator[Figure]:
    with place(1, lambda: Weighing(resumable=case.resumable)) as world:
        layer = Stream(10, 1, size)
        source = world.source.app
        target = world.targets[0].app
        assert isinstance(source, App)
        Seed(10).image(layers=[layer]).load_into(source, "app", "v1")
        digest = layer.digest()
        rule = (
            source.faults.on("GET", "blob", reference=digest)
            if case.where == "source"
            else target.faults.on("PUT", "upload", query={"digest": digest})
        )
        case.strike(rule.first(), size * 9 // 10)
        spent, images = world.run(["app"])
        if images["synced"] != 1 or not rule.struck:
            raise BenchError(f"{case.name}: {images}, {len(rule.struck)} struck")
        read, sent = _moved(world, digest)
        pulls = ", ".join(
            each.header("range") or "all"
            for each in world.source.journal.matching("GET", "blob", reference=digest)
        )
        yield Figure(
            f"{case.name}: source",
            (read - size) / MIB,
            "MiB read again",
            case.source,
            f"GET {pulls}",
        )
        yield Figure(
            f"{case.name}: target", (sent - size) / MIB, "MiB sent again", case.target, str(spent)
        )


def _moved(world: Place, digest: str) -> tuple[int, int]:
    read = world.source.journal.matching("GET", "blob", reference=digest).bytes_out()
    puts = world.targets[0].journal.matching("PUT", "upload", query={"digest": digest})
    return read, puts.bytes_in()


def main(arguments: list[str] | None = None) -> int:
    """Measure; 1 when a case could not be run."""
    parser = argparse.ArgumentParser(description="measure what is moved again after a break")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="of the layer")
    given = parser.parse_args(arguments)
    figures: list[Figure] = []
    for case in _cases(given.size):
        try:
            for figure in _measure(case, given.size * MIB):
                figures.append(figure)
                if not given.json:
                    print(figure, flush=True)
        except BenchError as problem:
            print(f"bench_resume: {problem}", file=sys.stderr)
            return 1
    if given.json:
        print(json.dumps([figure._asdict() for figure in figures], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
