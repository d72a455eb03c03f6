"""Measure what runs take beside requests: memory under a hard limit, and CPU.

A case with a limit runs under RLIMIT_DATA, which counts all private memory that can be written.
What is shown as MiB was resident. Registries are the harness's, in this process; the program is a
process of its own.

Owns: the scenes and their limits.
May not know: anything of the program but its command line, except for how a state of many entries
is written.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from conformance.http import run_in_thread
from conformance.images import Seed, Stream
from conformance.personas import PERSONAS, Provider
from conformance.registry import App, MeasuringApp
from tools.benches.place import app_of, started_place
from tools.benches.runner import (
    MB,
    MIB,
    BenchError,
    Figure,
    choose,
    print_figures,
    sync_measured,
    write_config,
)

__all__ = ["add_options", "run"]

# Each way of a body into a registry: the persona of the harness, and the kind that the program is
# told.
WAYS = {"GHCR": ("ghcr", "ghcr"), "ACR": ("acr", "acr")}
SMALL_LIMIT = 64 * MB  # bytes of data for a run that passes on one layer of any size
ENTRIES = 600_000  # of a large state


def never_moving() -> Iterator[Figure]:
    """20,000 tags that never move, 5 of them new."""
    tags = 20_000
    new = 5
    shared = [Seed(1).layer(500) for _ in range(2)]
    seed = Seed(2)
    with started_place() as place:
        for number in range(tags):
            image = seed.image(layers=[*shared, seed.layer(100)])
            image.load_into(app_of(place.source), "app", f"v{number}")
            if number < tags - new:
                image.load_into(app_of(place.targets[0]), "app", f"v{number}")

        spent, images = place.sync(["app"], is_immutable=True)
        if images != {"synced": new, "skipped": tags - new, "failed": 0}:
            raise BenchError(f"{tags} tags: {images}")
        detail = f"{place.requests} requests; {spent}"
        yield Figure("20,000 tags, 5 new", spent.peak / MIB, "MiB", 128, detail=detail)


def typical() -> Iterator[Figure]:
    """100 images in 20 repositories, layers of up to 32 MiB, with at most 128 MiB."""
    layers = [Stream(7, number, (4 << 20) * (1 + number % 8)) for number in range(40)]
    repositories = [f"app-{number}" for number in range(20)]
    with started_place(target=MeasuringApp) as place:
        for number, repository in enumerate(repositories):
            seed = Seed(number)
            base = layers[number * 2 : number * 2 + 2]
            for tag in range(5):
                chosen: list[bytes | Stream] = [*base, layers[(number + tag) % 40]]
                chosen.append(seed.layer(9000))
                image = seed.image(layers=chosen)
                image.load_into(app_of(place.source), repository, f"v{tag}")

        for phase in ("cold", "warm"):
            spent, images = place.sync(repositories, data_limit=128 * MIB)
            if images["failed"]:
                raise BenchError(f"typical: {images}")
            detail = f"under 128 MiB of data; {spent}"
            yield Figure(f"100 images, {phase}", spent.peak / MIB, "MiB", 128, detail=detail)


def large() -> Iterator[Figure]:
    """500 images to three targets, two layers of 4 GiB, 50 large ones, a state of 600,000 entries."""
    huge = [Stream(8, number, 4 << 30) for number in range(2)]
    many = [Stream(9, number, 8 << 20) for number in range(50)]
    with started_place(3, MeasuringApp) as place:
        for number in range(500):
            seed = Seed(number)
            layers: list[bytes | Stream] = [many[number % 50], seed.layer(5000)]
            if number % 250 < len(huge):
                layers.append(huge[number % 250])
            image = seed.image(layers=layers)
            image.load_into(app_of(place.source), f"app-{number % 20}", f"v{number}")
        state = place.directory / ".regsync"
        state.mkdir(mode=0o700)
        hosts = [server.address for server in place.targets]
        write_state(state, hosts, ENTRIES)

        repositories = [f"app-{number}" for number in range(20)]
        spent, images = place.sync(repositories, data_limit=512 * MIB)
        if images["failed"] or images["synced"] != 1500:
            raise BenchError(f"large: {images}")
        pushed = sum(server.journal.bytes_in() for server in place.targets) / 1e9
        detail = f"under 512 MiB of data; {pushed:.1f} GB pushed, "
        detail += f"{spent.cpu / pushed:.2f} CPU s per GB; {spent}"
        yield Figure("500 images", spent.peak / MIB, "MiB", 512, detail=detail)


class Cloud(Provider, MeasuringApp):
    """A persona that drops what it has verified."""


def dialects() -> Iterator[Figure]:
    """A layer of 4 GiB to each kind of registry, with at most 64 MB of memory and none on disk."""
    layer = Stream(10, 1, 4 << 30)
    for name, (persona, kind) in WAYS.items():
        cloud = Cloud(replace(PERSONAS[persona], hosts={"registry": "localhost"}))
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            source = stack.enter_context(run_in_thread(App()))
            target = stack.enter_context(run_in_thread(cloud))
            image = Seed(11).image(layers=[layer]).load_into(app_of(source), "app", "v1")

            # A registry at an address has no kind. One at a name is of the kind that its login
            # says, and this login asks nobody.
            url = target.url.replace("127.0.0.1", "localhost")
            config = write_config(
                directory / "mirror.yaml",
                {"s": source.url, "t": {"url": url, "auth_type": kind}},
                [{"from": "app", "to": "team/app", "tags": {"glob": "v1"}}],
                {"source": "s", "targets": ["t"], "artifacts": {"enabled": False}},
            )
            spent, report = sync_measured(
                config, data_limit=SMALL_LIMIT, environ={"GITHUB_TOKEN": "none"}
            )
            is_held = image.top in cloud.tags("team/app").values()
            if report["totals"]["images"]["synced"] != 1 or not is_held:
                raise BenchError(f"{name}: {report}")

            pushed = target.journal.bytes_in() / 1e9
            counts = target.journal.summary().items()
            uploads = ", ".join(f"{count} {name}" for name, count in counts if "upload" in name)
            files = [path for path in directory.rglob("*") if path.is_file()]
            on_disk = sum(path.stat().st_size for path in files) / 1000
            detail = f"under 64 MB of data; {pushed:.2f} GB pushed by {uploads}; {spent}; "
            detail += f"{on_disk:.0f} kB on disk"
            yield Figure(f"4 GiB, {name}", spent.peak / MB, "MB", 64, detail=detail)


def write_state(directory: Path, hosts: Sequence[str], count: int) -> None:
    """Write a state of about `count` entries into a cache directory.

    It holds manifests of 30 blobs in 200 repositories, and a tag for each.
    """
    from _regsync.state import Knowledge, RepositoryKey, Snapshot, StateFile, hashed_key

    file = StateFile(str(directory), print)
    file.load()
    if not file.is_writer:
        raise BenchError("the state cannot be written")
    known = Knowledge(file, now=time.time)
    for number in range(count // 62):  # 1 manifest, 30 blobs, 30 names, 1 tag
        where = RepositoryKey(hosts[number % len(hosts)], f"held/app-{number % 200}")
        root = f"sha256:{number:064x}"
        known.confirm_manifest(
            where, root, [f"sha256:{number * 30 + blob:064x}" for blob in range(1, 31)]
        )
        snapshot = hashed_key("source", "held", str(number), *where)
        known.record_snapshot(snapshot, Snapshot(root, root))
    known.finish()
    file.close()


CASES: Mapping[str, Callable[[], Iterator[Figure]]] = {
    "never-moving": never_moving,
    "typical": typical,
    "large": large,
    "dialects": dialects,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all)")


def run(options: argparse.Namespace) -> int:
    """Measure the chosen cases."""
    for case in choose(options.cases, CASES).values():
        print_figures(case())
    return 0
