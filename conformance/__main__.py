"""`python -m conformance serve`: serve a persona until SIGINT or SIGTERM.

One line is written to standard output, `serving URL`, as soon as requests are answered.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import anyio

from .images import Seed
from .personas import PERSONAS, persona
from .registry import App

__all__ = ["main"]


def seed_images(app: App) -> None:
    """Store one image of every common shape, under `seed/<shape>`."""
    seed = Seed(0)
    seed.image().load_into(app, "seed/oci", tag="v1")
    seed.image(format="docker").load_into(app, "seed/docker", tag="v1")
    seed.index(attestations=True).load_into(app, "seed/index", tag="v1")
    signed = seed.image().load_into(app, "seed/signed", tag="v1")
    seed.artifact(signed).load_into(app, "seed/signed")
    seed.artifact(signed, "application/vnd.example.signature.v1").load_into(app, "seed/signed")
    for number in range(25):
        seed.image(sizes=(100,)).load_into(app, "seed/many", tag=f"1.{number}.0")


async def _serve(name: str, port: int, *, is_seeded: bool) -> None:
    with persona(name, port=port) as served:
        if is_seeded:
            seed_images(served.app)
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            print(f"serving {served.url}", flush=True)
            async for _ in signals:
                break


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description="A test registry.")
    serving = parser.add_subparsers(required=True).add_parser("serve", help="serve a persona")
    serving.add_argument("--persona", choices=sorted(PERSONAS), default="strict")
    serving.add_argument("--port", type=int, default=0, help="of the registry; 0 takes a free one")
    serving.add_argument("--seed-images", action="store_true", help="hold some images to read")
    arguments = parser.parse_args(argv)
    try:
        anyio.run(
            lambda: _serve(arguments.persona, arguments.port, is_seeded=arguments.seed_images)
        )
    except OSError as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
