"""Count what artifacts add to runs, beside the least that they could add.

Each image has three artifacts: an SBOM, a signature, and a signature of the SBOM. Registries with
the referrers API and without it are source and target in turn, in memory, on a clock that jumps.
Counted are the requests of a run with artifacts less those of the same run with `enabled: false`:
cold; at once again; after two hours, when artifacts are looked for again; and when one image in ten
got a new signature in between.

The least: a source with the API is asked once for each image and each artifact; elsewhere one
listing, made anyway, says which of them have a list, and that is fetched. Each artifact's manifest
and layer is fetched once; the layer goes up in a POST and a PUT, the manifest in one PUT, the empty
config once per repository. The first artifact in a repository's area costs the target one question about
its API; without it each list is put and read back.

Owns: the images, the four runs, the least.
May not know: how artifacts are found.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import anyio
from trio.testing import MockClock

from conformance.client.attachments import fallback_lists, has_api
from conformance.content.images import Image, Seed
from conformance.registry.app import App
from conformance.server.memory import Place
from tests.ends import Virtual, document, virtual
from tools.benches.place import app_of
from tools.benches.runner import BenchError

__all__ = ["add_options", "run"]

SBOM = "application/spdx+json"
SIGNATURE = "application/vnd.example.signature"
RUNS = ("cold", "again", "after 2 h", "late signatures")
HOUR = 3600.0  # seconds
DAY = 24 * HOUR


class Ends(NamedTuple):
    """Whether source and target have the referrers API."""

    source_api: bool
    target_api: bool

    def __str__(self) -> str:
        return " -> ".join("API" if has else "fallback tags" for has in self)


class SignedImages:
    """A repository of signed images that can get more signatures."""

    def __init__(self, app: App, count: int) -> None:
        self.app = app
        self.seed = Seed(7)
        self.attached: list[Image] = []
        self.images = [
            self.seed.image().load_into(app, "app", f"v{number}") for number in range(count)
        ]
        for image in self.images:
            sbom = self.attach(image, SBOM)
            self.attach(sbom, SIGNATURE)
            self.attach(image, SIGNATURE)
        self.update_lists()

    def attach(self, subject: Image, kind: str) -> Image:
        """Put one artifact."""
        artifact = self.seed.artifact(subject, kind).load_into(self.app, "app")
        self.attached.append(artifact)
        return artifact

    def sign_some(self) -> None:
        """Give one image in ten a new signature."""
        for image in self.images[:: max(1, len(self.images) // 10)]:
            self.attach(image, SIGNATURE)
        self.update_lists()

    def update_lists(self) -> None:
        """Keep the lists that a client keeps where there is no API."""
        if not has_api(self.app):
            for tag, image in fallback_lists(self.attached).items():
                image.load_into(self.app, "app", tag)


async def requests_of_run(
    world: Virtual, places: Mapping[str, Place], directory: Path, enabled: bool
) -> Counter[str]:
    """Run once and return its requests by side, method and kind."""
    for place in places.values():
        place.journal.clear()
    mapping = {"from": "app", "tags": {"glob": "v*"}, "artifacts": {"enabled": enabled}}
    settings = {"cache_dir": str(directory / "state")}
    config = directory / "mirror.yaml"
    config.write_text(document(dict(places), mapping, **{"global": settings}), encoding="utf-8")
    ran = await world.run("sync", "--json", "-q", "-c", str(config))
    if ran.status:
        raise BenchError(f"a run ended with status {ran.status}: {ran.err}")
    requests = Counter[str]()
    for side, place in places.items():
        for name, count in place.journal.summary().items():
            requests[f"{side} {name}"] = count
    return requests


async def requests_of_runs(ends: Ends, images: int, enabled: bool) -> dict[str, Counter[str]]:
    """Return the requests of each of RUNS."""
    requests: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        async with virtual() as world:
            source = world.registry("source.example", referrers_api=ends.source_api)
            target = world.registry("target.example", referrers_api=ends.target_api)
            signed = SignedImages(app_of(source), images)
            for name in RUNS:
                if name == "after 2 h":
                    await anyio.sleep(2 * HOUR)
                if name == "late signatures":
                    signed.sign_some()
                    await anyio.sleep(2 * DAY)
                places = {"source": source, "target": target}
                requests[name] = await requests_of_run(world, places, Path(directory), enabled)
    return requests


async def added_requests(ends: Ends, images: int) -> dict[str, dict[str, int]]:
    """Return for each run what artifacts added, where that is not nothing."""
    with_artifacts = await requests_of_runs(ends, images, True)
    without = await requests_of_runs(ends, images, False)
    return {
        name: {
            kind: count - without[name][kind]
            for kind, count in with_artifacts[name].items()
            if count != without[name][kind]
        }
        for name in RUNS
    }


def least(ends: Ends, images: int) -> int:
    """Return what a cold run has to add."""
    artifacts = 3 * images
    lists = 2 * images  # an image's and an SBOM's
    questions = images + artifacts if ends.source_api else lists + 1
    gets = 2 * artifacts  # manifest and layer
    puts = 3 * artifacts  # the layer's upload takes two
    config = 2
    question_of_target = 1
    updates = 0 if ends.target_api else 2 * lists
    return questions + gets + puts + config + question_of_target + updates


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument("--images", type=int, default=100, help="how many (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Count all four pairs of registries."""
    for ends in (Ends(True, True), Ends(True, False), Ends(False, True), Ends(False, False)):
        added: dict[str, dict[str, int]] = anyio.run(
            added_requests,
            ends,
            options.images,
            backend="trio",
            backend_options={"clock": MockClock(autojump_threshold=0)},
        )
        print(f"{ends}: the least that a cold run adds is {least(ends, options.images)}")
        for name, requests in added.items():
            counts = [f"{count} {kind}" for kind, count in sorted(requests.items())]
            print(f"  {name:<16} {sum(requests.values()):>6}  {', '.join(counts) or 'nothing'}")
    return 0
