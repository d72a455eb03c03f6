#!/usr/bin/env python3
"""Measure a sync to a registry that keeps ECR's published rates: 429s, and the time beside the
least there is.

    python3 tools/bench_rates.py [-n IMAGES] [-l LAYERS] [--latency SECONDS]

Program and registries share one event loop on a clock that jumps, so that the seconds are exact and
none is waited for. The target refuses whatever is more than its caps allow in any second, wherever
it begins (docs/protocol-facts.md section 4.8); "ideal" is what the requests of the most rationed
action take at its cap. Exit status 1: a 429, or more than 1.15 times that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from trio.testing import MockClock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.app import App  # noqa: E402
from conformance.images import Seed  # noqa: E402
from conformance.memory import Link  # noqa: E402
from conformance.personas import Persona, Provider  # noqa: E402
from conformance.rates import Cap  # noqa: E402
from tests.ends import Virtual, document, held, tags, virtual  # noqa: E402

__all__ = ["Measured", "main", "measure"]

HOST = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
MOST = 1.15
CAPS = {
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
    source="docs/protocol-facts.md section 4.8",
    hosts={"registry": HOST},
    mount="committed",
    caps=lambda provider: [Cap(most, actions=frozenset({action})) for action, most in CAPS.items()],
)


class Measured(NamedTuple):
    """One sync: 429s, seconds, the least seconds, requests by action as the program counted them."""

    refused: int
    seconds: float
    ideal: float
    requests: dict[str, int]

    @property
    def ratio(self) -> float:
        return self.seconds / self.ideal


async def measure(images: int, layers: int, latency: float) -> Measured:
    """Sync so many images, each with layers of its own, to an empty repository."""
    async with virtual() as world:
        return await _measure(world, images, layers, latency)


async def _measure(world: Virtual, images: int, layers: int, latency: float) -> Measured:
    link = Link(latency=latency)
    source = world.registry("source.test", up=link, down=link)
    ecr = Provider(ECR, now=anyio.current_time, wall=world.wall)
    target = world.listen(ecr, HOST, scheme="https", up=link, down=link)
    seed = Seed(7)
    app = source.app
    assert isinstance(app, App)
    copied = [
        seed.image(sizes=(3000,) * layers).load_into(app, "app", tag=f"v{n}") for n in range(images)
    ]
    registries: dict[str, Any] = {"source": source, "ecr": {"url": HOST, "auth_type": "anonymous"}}
    text = document(registries, {"from": "app", "tags": tags("*")})
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert ran.statuses() == ["synced"] * images, ran.err
    assert all(held(target, "app", image) for image in copied)
    asked = ran.totals["requests"][HOST]
    # Each upload is three steps, in however many requests it goes.
    asked.update(dict.fromkeys(("upload_body", "upload_finish"), asked["upload_start"]))
    ideal = max(asked.get(action, 0) / most for action, most in CAPS.items())
    return Measured(sum(ecr.rates.refused.values()), ran.seconds, ideal, asked)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure a sync against ECR's published rates.")
    parser.add_argument("-n", type=int, default=300, help="images (%(default)s)")
    parser.add_argument("-l", type=int, default=3, help="layers of each (%(default)s)")
    parser.add_argument(
        "--latency", type=float, default=0.02, help="each way, in seconds (%(default)s)"
    )
    given = parser.parse_args(argv)
    options = {"clock": MockClock(autojump_threshold=0)}
    found: Measured = anyio.run(
        measure, given.n, given.l, given.latency, backend="trio", backend_options=options
    )
    print(
        f"{given.n} images with {given.l} layers, {given.latency * 1000:.0f} ms each way: {found.refused} x 429"
    )
    print(
        f"{found.seconds:.2f} s, ideal {found.ideal:.1f} s: {found.ratio:.3f} times, at most {MOST}"
    )
    print(" ".join(f"{action} {count}" for action, count in sorted(found.requests.items())))
    return int(found.refused > 0 or found.ratio > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
