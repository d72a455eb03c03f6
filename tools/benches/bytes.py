"""Count what runs cost, beside the least that they could cost: requests by class, bytes by side.

Each scene is run cold, then unchanged with the state of the first run, then unchanged without it;
scenes whose source changes are run cold, changed, and changed without state. Registries are
Debian's docker-registry, whose log is counted. Bytes are those of manifests and blobs, not of
listings and error bodies.

The least is that of tests/least.py: for a program that knows all about blobs, and must ask what tags
name.

    bench.py bytes --json FILE             write what was counted into a file
    bench.py bytes --against FILE          compare with such a file, and fail if a count is larger

tools/benches/requests.json has what was counted when the program was last judged by it, here and in
`bench.py compare counts` (but in scenes whose counts depend on time). Of a count that varies from run to
run it has the largest that was seen.

Owns: the scenes, how a run is shown.
May not know: anything of the program but its command line.
Invariants: the program's own count of requests agrees with what the registries saw, else the run
fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from conformance.images import PLATFORMS, Fleet
from tests import least as exact
from tests.least import Repository, Tally
from tools.benches.registries import Debian, Exchange, Images, empty_registry
from tools.benches.runner import (
    BenchError,
    Spent,
    choose,
    folder_in_memory,
    sync_measured,
    write_mirror,
)

__all__ = ["Tally", "add_options", "least", "run", "tally_of"]

Counts = Mapping[str, Mapping[str, int]]  # by side; requests by class, and bytes

CLASSES = (
    "list",
    "HEAD manifest",
    "GET manifest",
    "HEAD blob",
    "GET blob",
    "mount",
    "POST upload",
    "PUT upload",
    "PUT manifest",
)


def summary(tally: Tally) -> str:
    """Write the requests of one side."""
    counts = [f"{tally.requests[name]} {name}" for name in CLASSES if tally.requests[name]]
    return ", ".join(counts) or "nothing"


def tally_of(exchanges: Iterable[Exchange]) -> Tally:
    """Count."""
    tally = Tally()
    for exchange in exchanges:
        tally.requests[exchange.name] += 1
        tally.bytes += exchange.bytes
    return tally


class Both(NamedTuple):
    """What was asked of the source, and of all targets together."""

    source: Tally
    target: Tally

    @property
    def request_count(self) -> int:
        """All requests together."""
        return self.source.count + self.target.count

    @property
    def bytes(self) -> int:
        """All bytes together."""
        return self.source.bytes + self.target.bytes


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


# ---------------------------------------------------------------- the least


def least(
    before: Images, now: Images, *, targets: int, is_immutable: bool, is_stateful: bool
) -> Both:
    """Return the fewest requests and bytes of a sync from `before` at the targets to `now`."""
    repositories = [
        Repository(name, tagged, [before.get(name, {})] * targets, is_immutable=is_immutable)
        for name, tagged in now.items()
    ]
    bound = exact.least(repositories, exact.Terms(is_stateful=is_stateful))
    together = Tally()
    for tally in bound.targets:
        together.requests += tally.requests
        together.bytes += tally.bytes
    return Both(bound.source, together)


# ---------------------------------------------------------------- runs


class Measured(NamedTuple):
    """One run: what was asked, beside the least."""

    scene: str
    phase: str
    asked: Both
    least: Both
    spent: Spent

    @property
    def excess(self) -> float:
        """How many percent of requests were more than the least."""
        return (
            100 * (self.asked.request_count - self.least.request_count) / self.least.request_count
        )

    @property
    def more_bytes(self) -> int:
        """How many bytes more than the least."""
        return self.asked.bytes - self.least.bytes


def run_once(config: Path, registries: Sequence[Debian]) -> tuple[Both, Spent]:
    """Run once.

    Raises BenchError if an image failed, or if the program counted other requests than a registry.
    """
    for registry in registries:
        registry.exchanges()
    spent, report = sync_measured(config)
    if report["totals"]["images"]["failed"]:
        failed = [image for image in report["images"] if image["error"]]
        raise BenchError(f"images failed: {failed[:3]}")

    seen = {registry.address: registry.exchanges() for registry in registries}
    for address, exchanges in seen.items():
        counted = sum(report["totals"]["requests"].get(address, {}).values())
        if counted != len(exchanges):
            message = f"the program says {counted} requests, the registry {len(exchanges)}"
            raise BenchError(f"{address}: {message}")
    source, *targets = seen.values()
    together = [exchange for exchanges in targets for exchange in exchanges]
    return Both(tally_of(source), tally_of(together)), spent


class World(NamedTuple):
    """One scene between registries that were just started."""

    name: str
    registries: Sequence[Debian]
    config: Path

    def measure(self, phase: str, before: Images, now: Images, *, is_stateful: bool) -> Measured:
        """Run once and hold it against the least."""
        scene = SCENES[self.name]
        bound = least(
            before,
            now,
            targets=scene.targets,
            is_immutable=scene.is_immutable,
            is_stateful=is_stateful,
        )
        asked, spent = run_once(self.config, self.registries)
        return Measured(self.name, phase, asked, bound, spent)

    def forget(self) -> None:
        """Remove the state."""
        shutil.rmtree(self.config.parent / ".regsync")


@contextmanager
def started_world(name: str, work: Path, *images: Images) -> Iterator[World]:
    """Start the registries of a scene, whose source holds the first of `images`, and later others."""
    scene = SCENES[name]
    with ExitStack() as stack:
        registries = [stack.enter_context(empty_registry(work)) for _ in range(1 + scene.targets)]
        for registry in registries:
            for known in images:
                registry.announce(known)
        registries[0].load(images[0])
        source, *targets = [f"http://{registry.address}" for registry in registries]
        config = write_mirror(
            Path(tempfile.mkdtemp(dir=work)) / "mirror.yaml",
            source,
            targets,
            scene.fleet.images(),
            is_immutable=scene.is_immutable,
        )
        yield World(name, registries, config)


def measure_scene(name: str, work: Path) -> Iterator[Measured]:
    """Run one scene in all its phases."""
    scene = SCENES[name]
    now = scene.fleet.images()
    nothing: Images = {repository: {} for repository in now}
    before = now if scene.before is None else scene.before.images()
    with started_world(name, work, before, now) as world:
        yield world.measure("cold", nothing, before, is_stateful=False)
        if scene.before is not None:
            world.registries[0].load(now)
            yield world.measure("changed", before, now, is_stateful=True)
        yield world.measure("warm", now, now, is_stateful=True)
        world.forget()
        yield world.measure("warm, no state", now, now, is_stateful=False)

    if scene.before is None:
        return
    with started_world(name, work, before, now) as world:
        run_once(world.config, world.registries)
        world.registries[0].load(now)
        world.forget()
        yield world.measure("changed, no state", before, now, is_stateful=False)


# ---------------------------------------------------------------- the command


def as_text(found: Measured) -> str:
    """Write one run for people."""
    asked = found.asked
    requests = (
        f"{asked.request_count} requests, {found.excess:+.1f} % of {found.least.request_count}"
    )
    size = f"{asked.bytes} bytes, {found.more_bytes:+d} of the least"
    lines = [f"{found.scene}, {found.phase}: {requests}; {size}"]
    for side in ("source", "target"):
        tally: Tally = getattr(asked, side)
        bound: Tally = getattr(found.least, side)
        lines.append(f"    {side}: {summary(tally)}; {tally.bytes} bytes")
        if not tally.is_same(bound):
            lines.append(f"    {'least':>{len(side)}}: {summary(bound)}; {bound.bytes} bytes")
    per_thousand = 1000 * found.spent.cpu / asked.request_count
    lines.append(f"    {found.spent}, {per_thousand:.2f} s of CPU per 1,000 requests")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    texts = [f"  {name}  {scene.text}" for name, scene in SCENES.items()]
    parser.epilog = "\n".join(["scenes:", *texts])
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts into this file")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="fail if a count is larger than in this file"
    )


def run(options: argparse.Namespace) -> int:
    """Measure the chosen scenes."""
    counted: dict[str, Counts] = {}
    for name, scene in choose(options.scenes, SCENES).items():
        print(f"({name}) {scene.text}")
        with folder_in_memory() as work:
            for found in measure_scene(name, work):
                print(as_text(found), flush=True)
                counted[f"{name}, {found.phase}"] = counts_of(found.asked)
    if options.json:
        options.json.write_text(json.dumps({"bytes": counted}, indent=1) + "\n")
    if not options.against:
        return 0

    known: Mapping[str, Counts] = json.loads(options.against.read_text())["bytes"]
    larger = list(larger_counts(known, counted))
    print("\n".join(larger) or f"no count is larger than in {options.against}")
    return 1 if larger else 0


def counts_of(asked: Both) -> Counts:
    """Return what was asked of each side by class, and its bytes."""
    return {
        side: {**+tally.requests, "bytes": tally.bytes} for side, tally in asked._asdict().items()
    }


def larger_counts(known: Mapping[str, Counts], counted: Mapping[str, Counts]) -> Iterator[str]:
    """Name what is larger than it was known to be."""
    for row, sides in counted.items():
        for side, counts in sides.items():
            for name, count in counts.items():
                before = known.get(row, {}).get(side, {}).get(name, 0)
                if count > before:
                    yield f"{row}, {side}: {count} {name}, not {before}"
