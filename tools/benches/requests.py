"""Count what runs cost, beside the least that they could cost: requests by class, bytes by side.

    bench.py requests --json FILE              write what was counted into a file
    bench.py requests --against FILE           fail if a count is larger than in such a file

Each scene is run cold, then with its changes if it has some, then unchanged, then unchanged without
what the program remembers. Bytes are those of manifests and blobs, not of listings and error
bodies. The least is that of tests/least.py: for a program that knows all about blobs, and must ask
what tags name. tools/benches/requests.json has what was counted when the program was last judged
by it. Peers are counted beside it, but not kept.

Owns: the scenes, and how they are held against the least and against a table.
May not know: anything of the program but its command line.
Invariants: the targets hold what they should, and the program's own count of requests agrees with
what the registries saw, else the run fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.images import PLATFORMS, Fleet
from tests.least import Repository, Tally, Terms, least
from tools.benches.programs import OURS, Job, Program, add_peer_option, chosen_programs, run_job
from tools.benches.runs import BenchError, Images, choose, started_registries

__all__ = ["add_options", "run"]

Counts = Mapping[str, Mapping[str, int]]  # by side; requests by class, and bytes


@dataclass(frozen=True)
class Scene:
    """What the source holds (and held before, where it changes), and to how many targets it goes."""

    text: str
    fleet: Fleet
    before: Fleet | None = None
    targets: int = 1
    is_immutable: bool = False


SCENES: Mapping[str, Scene] = {
    "a": Scene("10 repositories x 10 tags, 5 shared and 3 own layers", Fleet(size=70_000)),
    "b": Scene("the same as indexes of 4 platforms", Fleet(size=70_000, platforms=PLATFORMS)),
    "c": Scene(
        "ten bases under 100 repositories x 2 tags",
        Fleet(size=70_000, repositories=100, tags=2, bases=10),
    ),
    "d": Scene("(a) to three targets", Fleet(size=70_000), targets=3),
    "e": Scene(
        "1,000 tags that never move, 5 of them new",
        Fleet(size=70_000, repositories=1, tags=1000, own=1),
        Fleet(size=70_000, repositories=1, tags=1000, own=1, left_out=5),
        is_immutable=True,
    ),
    "f": Scene("(a) with 5 % of its tags moved", Fleet(size=70_000, moved=5), Fleet(size=70_000)),
}


def counts_of(source: Tally, targets: Iterable[Tally]) -> Counts:
    """Return what was asked of the source, and of all targets together."""
    target = Tally()
    for tally in targets:
        target.requests += tally.requests
        target.bytes += tally.bytes
    sides = {"source": source, "target": target}
    return {side: {**+tally.requests, "bytes": tally.bytes} for side, tally in sides.items()}


def as_text(asked: Counts, bound: Counts) -> str:
    """Write what was asked; in brackets, and below what is otherwise, stands the least."""
    lines = [f"{total(asked)} requests ({total(bound)})"]
    for side, counts in asked.items():
        lines.append(f"{side}: {listed(counts)}")
        if counts != bound[side]:
            lines.append(f"{'least':>{len(side)}}: {listed(bound[side])}")
    return "\n      ".join(lines)


def total(counts: Counts) -> int:
    """Return the requests to both sides."""
    return sum(sum(side.values()) - side["bytes"] for side in counts.values())


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def least_of(scene: Scene, before: Images, now: Images, *, is_stateful: bool) -> Counts:
    """Return the fewest requests and bytes of a sync from `before` at the targets to `now`."""
    repositories = [
        Repository(
            name, tagged, [before.get(name, {})] * scene.targets, is_immutable=scene.is_immutable
        )
        for name, tagged in now.items()
    ]
    bound = least(repositories, Terms(is_stateful=is_stateful))
    return counts_of(bound.source, bound.targets)


def count_scene(
    scene: Scene, program: Program, *, is_ours: bool
) -> Iterator[tuple[str, Counts, Counts]]:
    """Run one scene in all its phases, between registries that were just started.

    Gives each phase, what was asked in it, and the least.
    """
    now = scene.fleet.images()
    first = scene.before.images() if scene.before else now
    phases: list[tuple[str, Images, Images]] = [("cold", {}, first)]
    if scene.before:
        phases.append(("changed", first, now))
    phases += [("warm", now, now), ("warm, no state", now, now)]

    reports = []
    with started_registries(1 + scene.targets) as (home, registries):
        source, *targets = registries
        addresses = [registry.address for registry in registries]
        job = Job(home, addresses[0], addresses[1:], list(now), scene.is_immutable)
        for phase, _, wanted in phases:
            if phase in ("cold", "changed"):
                source.push(wanted)
            if phase == "warm, no state":
                shutil.rmtree(home)
                home.mkdir()
            for registry in registries:
                registry.mark()
            _, said = run_job(program, job)
            reports.append(said)
            for registry in registries:
                registry.mark()
            for target in targets:
                target.check(wanted)

    stretches = [registry.stretches(first, now) for registry in registries]
    for number, (phase, before, wanted) in enumerate(phases):
        tallies = [each[1 + 2 * number] for each in stretches]  # between two marks
        if is_ours:
            check_report(json.loads(reports[number]), addresses, tallies)
        bound = least_of(scene, before, wanted, is_stateful=phase in ("changed", "warm"))
        yield phase, counts_of(tallies[0], tallies[1:]), bound


def check_report(
    report: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]],
    addresses: Iterable[str],
    tallies: Iterable[Tally],
) -> None:
    """Raise BenchError if the program counted other requests than a registry."""
    for address, tally in zip(addresses, tallies, strict=True):
        counted = sum(report["totals"]["requests"].get(address, {}).values())
        if counted != tally.count:
            message = f"the program says {counted} requests, the registry {tally.count}"
            raise BenchError(f"{address}: {message}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    texts = [f"  {name}  {scene.text}" for name, scene in SCENES.items()]
    parser.epilog = "\n".join(["scenes:", *texts])
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts into this file")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="fail if a count is larger than in this file"
    )
    add_peer_option(parser)


def run(options: argparse.Namespace) -> int:
    """Count the chosen scenes."""
    rows: dict[str, Counts] = {}
    programs = chosen_programs(options.peer)
    for name, scene in choose(options.scenes, SCENES).items():
        print(f"({name}) {scene.text}")
        for title, program in programs.items():
            for phase, asked, bound in count_scene(scene, program, is_ours=title == OURS):
                print(f"  {title}, {phase}: {as_text(asked, bound)}", flush=True)
                if title == OURS:
                    rows[f"{name}, {phase}"] = asked
    if options.json:
        lines = [f" {json.dumps(row)}: {json.dumps(counts)}" for row, counts in rows.items()]
        options.json.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    if not options.against:
        return 0

    known: dict[str, Counts] = json.loads(options.against.read_text(encoding="utf-8"))
    larger = list(larger_counts(known, rows))
    print("\n".join(larger) or f"no count is larger than in {options.against}")
    return 1 if larger else 0


def larger_counts(known: Mapping[str, Counts], counted: Mapping[str, Counts]) -> Iterator[str]:
    """Name what is larger than it was known to be."""
    for row, sides in counted.items():
        for side, counts in sides.items():
            for name, count in counts.items():
                before = known.get(row, {}).get(side, {}).get(name, 0)
                if count > before:
                    yield f"{row}, {side}: {count} {name}, not {before}"
