"""The command line: `python -m conformance serve` serves a persona until a signal.

Owns: arguments, output and exit status.
May not know: internals of the registry.
Invariants: one line is written to standard output, `serving URL`, as soon as requests are answered,
and nothing more until SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

import anyio

from .content.images import Seed
from .providers.personas import PERSONAS, persona
from .registry.app import App
from .server.names import names

__all__ = ["main"]


def seed_images(app: App) -> None:
    """Store one image of every common shape, under `seed/<shape>`."""
    seed = Seed(0)
    seed.image().load_into(app, "seed/oci", tag="v1")
    seed.image(format="docker").load_into(app, "seed/docker", tag="v1")
    seed.index(attestations=True).load_into(app, "seed/index", tag="v1")
    seed.index(format="docker", platforms=("linux/amd64", "windows/amd64")).load_into(
        app, "seed/list", tag="v1"
    )
    seed.index([seed.index(), seed.image()]).load_into(app, "seed/nested", tag="v1")
    signed = seed.image().load_into(app, "seed/signed", tag="v1")
    seed.artifact(signed).load_into(app, "seed/signed")
    seed.artifact(signed, "application/vnd.example.signature.v1").load_into(app, "seed/signed")
    for number in range(25):
        seed.image(sizes=(100,)).load_into(app, "seed/many", tag=f"1.{number}.0")


async def _serve(arguments: argparse.Namespace) -> None:
    """Serve a persona until a signal, each part at its own port or by its host name."""
    with contextlib.ExitStack() as stack:
        host_names = stack.enter_context(names(arguments.names)) if arguments.names else None
        users = dict([arguments.user]) if arguments.user else None
        served = stack.enter_context(
            persona(arguments.persona, names=host_names, port=arguments.port, users=users)
        )
        if arguments.seed_images:
            seed_images(served.app)
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            print(f"serving {served.url}", flush=True)
            async for _ in signals:
                break
    if arguments.journal:
        print(served.journal, file=sys.stderr)


def _login(text: str) -> tuple[str, str]:
    """Parse NAME:PASSWORD."""
    name, _, password = text.partition(":")
    return name, password


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conformance", description="A test registry.")
    commands = parser.add_subparsers(required=True)
    serving = commands.add_parser("serve", help="serve a registry from memory")
    serving.add_argument(
        "--persona", choices=sorted(PERSONAS), default="strict", help="the provider to imitate"
    )
    serving.add_argument(
        "--names",
        metavar="DIR",
        help="the provider's own host names, over TLS, for clients with the variables in DIR/environ",
    )
    serving.add_argument("--port", type=int, default=0, help="0 takes a free one")
    serving.add_argument(
        "--user", type=_login, metavar="NAME:PASSWORD", help="who may log in, if the persona asks"
    )
    serving.add_argument(
        "--seed-images", action="store_true", help="hold one image of every common shape"
    )
    serving.add_argument(
        "--journal", action="store_true", help="write every exchange to standard error at the end"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        anyio.run(_serve, arguments)
    except OSError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
