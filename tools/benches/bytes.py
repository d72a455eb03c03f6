"""Count what runs cost, beside the least that they could cost: requests by class, bytes by side.

Each scene is run cold, then unchanged with the state of the first run, then unchanged without it;
scenes whose source changes are run cold, changed, and changed without state. Registries are
Debian's docker-registry, whose log is counted. Bytes are those of manifests and blobs, not of
listings and error bodies.

The least is computed here from the images, for a program that knows everything about blobs: each
repository is listed once at each side where tags are chosen by a pattern, each selected tag costs
one question at each side that the listing does not answer, each manifest that a target lacks is
fetched once, each blob that a host lacks is fetched once and uploaded once to each host (a POST and
a PUT), each other repository of the host mounts it, each manifest is put once.

Owns: the scenes, their bounds, how a run is shown.
May not know: anything of the program but its command line.
Invariants: the program's own count of requests agrees with what the registries saw, else the run
fails.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from conformance.content.fleets import PLATFORMS, Fleet
from conformance.content.images import Image
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

PAGE = 1000  # tags of a listing
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


@dataclass
class Tally:
    """What was asked of one side, and the bytes of manifests and blobs that it gave or took."""

    requests: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    @property
    def count(self) -> int:
        """All requests together."""
        return sum(self.requests.values())

    def times(self, number: int) -> Tally:
        """Return the same for so many registries."""
        requests = {name: count * number for name, count in self.requests.items()}
        return Tally(Counter(requests), self.bytes * number)

    def is_same(self, other: Tally) -> bool:
        """Tell whether both count the same; a class may be there with a count of 0."""
        return +self.requests == +other.requests and self.bytes == other.bytes

    def __str__(self) -> str:
        counts = [f"{self.requests[name]} {name}" for name in CLASSES if self.requests[name]]
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


class Change(NamedTuple):
    """One repository: what the targets hold of it, and what the source has."""

    before: Mapping[str, Image]
    now: Mapping[str, Image]

    def fresh(self) -> list[str]:
        """Return the tags that the targets lack."""
        return [tag for tag in self.now if tag not in self.before]

    def held(self) -> list[str]:
        """Return the tags that the targets have, with whatever image."""
        return [tag for tag in self.now if tag in self.before]

    def moved(self) -> list[str]:
        """Return the tags that the targets have with another image."""
        return [tag for tag in self.held() if self.before[tag].top != self.now[tag].top]

    def new_images(self) -> list[Image]:
        """Return the images that are copied."""
        return [self.now[tag] for tag in (*self.fresh(), *self.moved())]


def least(
    before: Images, now: Images, *, targets: int, is_immutable: bool, is_stateful: bool
) -> Both:
    """Return the fewest requests and bytes of a sync from `before` at the targets to `now`."""
    bound = Both(Tally(), Tally())
    blobs_before = {name: blob_sizes(tagged.values()) for name, tagged in before.items()}
    on_host = {digest for sizes in blobs_before.values() for digest in sizes}
    for name, tagged in now.items():
        change = Change(before.get(name, {}), tagged)
        count_look_ups(bound, change, is_immutable=is_immutable, is_stateful=is_stateful)
        count_manifests(bound, change)

        for digest, size in blob_sizes(change.new_images()).items():
            if digest in blobs_before.get(name, {}):
                continue
            if digest in on_host:
                bound.target.requests["mount"] += 1
                continue
            on_host.add(digest)
            bound.source.requests["GET blob"] += 1
            bound.source.bytes += size
            bound.target.requests["POST upload"] += 1
            bound.target.bytes += size
            bound.target.requests["PUT upload"] += 1
    return Both(bound.source, bound.target.times(targets))


def count_look_ups(bound: Both, change: Change, *, is_immutable: bool, is_stateful: bool) -> None:
    """Add listings to `bound`, and the requests that ask what each tag names."""
    source, target = bound
    fresh = change.fresh()
    asked = [] if is_immutable else change.held()
    source.requests["list"] += pages(change.now)
    if is_stateful:
        # The state turns the source's GET into a HEAD, and a moved tag costs its GET besides.
        source.requests["HEAD manifest"] += len(asked)
        gets = [*fresh, *change.moved()]
    else:
        gets = [*fresh, *asked]
    source.requests["GET manifest"] += len(gets)
    source.bytes += sum(len(change.now[tag].body) for tag in gets)

    # A target is listed where that tells of two tags or more; the state tells of those it knows.
    if is_immutable or not is_stateful or len(fresh) > 1:
        target.requests["list"] += pages(change.before)
    target.requests["HEAD manifest"] += len(asked)


def count_manifests(bound: Both, change: Change) -> None:
    """Add to `bound` the children that are fetched, and all manifests that are put."""
    source, target = bound
    new = change.new_images()
    known = {digest for image in change.before.values() for digest in image.manifests}
    children = {
        digest: len(body)
        for image in new
        for digest, (_, body) in image.manifests.items()
        if digest != image.top and digest not in known
    }
    source.requests["GET manifest"] += len(children)
    source.bytes += sum(children.values())
    target.requests["PUT manifest"] += len(new) + len(children)
    target.bytes += sum(len(image.body) for image in new) + sum(children.values())


def pages(tags: Collection[str]) -> int:
    """Count the pages of a listing.

    Behind a full one another may stand, whether or not a Link says so.
    """
    return len(tags) // PAGE + 1


def blob_sizes(images: Iterable[Image]) -> dict[str, int]:
    """Return the size of each blob by its digest."""
    return {digest: len(data) for image in images for digest, data in image.blobs.items()}


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
        lines.append(f"    {side}: {tally}; {tally.bytes} bytes")
        if not tally.is_same(bound):
            lines.append(f"    {'least':>{len(side)}}: {bound}; {bound.bytes} bytes")
    per_thousand = 1000 * found.spent.cpu / asked.request_count
    lines.append(f"    {found.spent}, {per_thousand:.2f} s of CPU per 1,000 requests")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    texts = [f"  {name}  {scene.text}" for name, scene in SCENES.items()]
    parser.epilog = "\n".join(["scenes:", *texts])
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help="default: all")


def run(options: argparse.Namespace) -> int:
    """Measure the chosen scenes."""
    for name, scene in choose(options.scenes, SCENES).items():
        print(f"({name}) {scene.text}")
        with folder_in_memory() as work:
            for found in measure_scene(name, work):
                print(as_text(found), flush=True)
    return 0
