"""Measure a sync to a registry that keeps ECR's published rates: 429s, and the time it takes.

Program and registries share one event loop on a clock that jumps, so that the seconds are exact and
none is waited for. The target refuses what is more than its caps allow in any second, wherever that
second begins. "Ideal" is what the requests of the most rationed action take at its cap.

Owns: the caps, and how far from ideal a sync may be.
May not know: how the program keeps to them.
Follows: https://docs.aws.amazon.com/AmazonECR/latest/userguide/service-quotas.html (the caps).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

import anyio
from trio.testing import MockClock

from conformance.content.images import Seed
from conformance.providers.personas import Persona, Provider
from conformance.providers.rates import Cap
from conformance.server.memory import Link
from tests.ends import Virtual, document, held, tags, virtual
from tools.benches.place import app_of
from tools.benches.runner import BenchError

__all__ = ["Measured", "add_options", "measure", "run"]

HOST = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
WORST = 1.15  # times the ideal
LATENCY = 0.02  # seconds each way, at both registries
IMAGES = 300
LAYERS = 3  # of each image
CAPS = {  # requests a second for an account and region
    "manifest_put": 10,
    "upload_start": 100,
    "upload_finish": 100,
    "upload_body": 500,
    "blob_head": 1000,
    "blob_get": 3000,
    "manifest_get": 2000,
    "manifest_head": 2000,
}
ECR = Persona(
    source="https://docs.aws.amazon.com/AmazonECR/latest/userguide/service-quotas.html",
    hosts={"registry": HOST},
    mount="committed",
    caps=lambda provider: [Cap(most, actions=frozenset({action})) for action, most in CAPS.items()],
)


class Measured(NamedTuple):
    """One sync; requests are by action, as the program counted them."""

    refused: int
    seconds: float
    ideal: float
    requests: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """How many times the ideal it took."""
        return self.seconds / self.ideal


async def measure(images: int, layers: int) -> Measured:
    """Sync so many images, each with layers of its own, to an empty repository."""
    async with virtual() as world:
        return await measure_sync(world, images, layers)


async def measure_sync(world: Virtual, images: int, layers: int) -> Measured:
    """Sync from a registry without limits to one with ECR's."""
    link = Link(latency=LATENCY)
    source = world.registry("source.test", up=link, down=link)
    ecr = Provider(ECR, now=anyio.current_time, wall=world.wall)
    target = world.listen(ecr, HOST, scheme="https", up=link, down=link)
    seed = Seed(7)
    copied = [
        seed.image(sizes=(3000,) * layers).load_into(app_of(source), "app", tag=f"v{number}")
        for number in range(images)
    ]
    account = {"url": HOST, "auth_type": "anonymous"}
    config = document({"source": source, "ecr": account}, {"from": "app", "tags": tags("*")})

    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=config)
    if ran.statuses() != ["synced"] * images:
        raise BenchError(f"images failed: {ran.err}")
    if not all(held(target, "app", image) for image in copied):
        raise BenchError("the target does not hold what was copied")
    sent: dict[str, int] = ran.totals["requests"][HOST]
    # Each upload has three steps, however few requests they take.
    uploads = sent["upload_start"]
    requests = {**sent, "upload_body": uploads, "upload_finish": uploads}
    ideal = max(requests.get(action, 0) / most for action, most in CAPS.items())
    return Measured(sum(ecr.rates.refused.values()), ran.seconds, ideal, requests)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add none: there is one scene."""


def run(options: argparse.Namespace) -> int:
    """Measure one sync; 1 where something was refused, or where it took too long."""
    measured: Measured = anyio.run(
        measure,
        IMAGES,
        LAYERS,
        backend="trio",
        backend_options={"clock": MockClock(autojump_threshold=0)},
    )
    scene = f"{IMAGES} images with {LAYERS} layers, {LATENCY * 1000:.0f} ms each way"
    print(f"{scene}: {measured.refused} x 429")
    times = f"{measured.ratio:.3f} times, at most {WORST}"
    print(f"{measured.seconds:.2f} s, ideal {measured.ideal:.1f} s: {times}")
    print(" ".join(f"{action} {count}" for action, count in sorted(measured.requests.items())))
    return 1 if measured.refused or measured.ratio > WORST else 0
