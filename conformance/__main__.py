"""The command line: `python -m conformance serve | proxy | check`.

Owns: arguments, output and exit statuses.
May not know: internals of `App`, `Proxy` and `checks`.
Invariants: `serve` and `proxy` write one line to standard output, `serving URL`, as soon as they
answer requests. They write nothing more until SIGINT or SIGTERM. Then they report the faults on
standard error. `check` writes each row as soon as it is known, and its exit status is the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from .check import suite
from .check.checks import WORKFLOWS
from .content.images import Seed
from .faults.grammar import RuleError, read_rules
from .providers.personas import PERSONAS, persona
from .registry.app import App
from .registry.tokens import BasicAuth, TokenService
from .server.exchange import Site
from .server.names import names
from .server.proxy import Proxy, origin
from .server.sockets import serve

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


async def _run(arguments: argparse.Namespace) -> None:
    """Serve a strict registry until a signal."""
    auth: BasicAuth | TokenService | None = None
    if arguments.user:
        users = dict([arguments.user])
        auth = {"basic": BasicAuth, "bearer": TokenService}[arguments.auth](users)
    app = App(auth=auth, referrers_api=not arguments.no_referrers)
    if arguments.seed_images:
        seed_images(app)
    await _serve(app, arguments)


async def _run_persona(arguments: argparse.Namespace) -> None:
    """Serve a persona until a signal, each part at its own port or by its host name."""
    with contextlib.ExitStack() as stack:
        host_names = stack.enter_context(names(arguments.names)) if arguments.names else None
        users = dict([arguments.user]) if arguments.user else None
        served = stack.enter_context(
            persona(arguments.persona, names=host_names, port=arguments.port, users=users)
        )
        if arguments.seed_images:
            seed_images(served.app)
        _read_faults(served.app, arguments)
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            print(f"serving {served.url}", flush=True)
            async for _ in signals:
                break
        served.app.faults.release()
    _report(served.app, arguments)


async def _run_proxy(arguments: argparse.Namespace) -> None:
    context = ssl.create_default_context(cafile=arguments.ca) if arguments.ca else None
    await _serve(
        Proxy(arguments.upstream, token_path=arguments.token_path, context=context), arguments
    )


async def _serve(app: Site, arguments: argparse.Namespace) -> None:
    """Serve until a signal, with the requested faults, then report the faults."""
    _read_faults(app, arguments)
    context = None
    if arguments.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*arguments.tls)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with serve(app, arguments.host, arguments.port, context) as server:
            print(f"serving {server.url}", flush=True)
            async for _ in signals:
                break
            app.faults.release()
    _report(app, arguments)


def _read_faults(app: Site, arguments: argparse.Namespace) -> None:
    app.faults.seed = arguments.seed
    if arguments.faults:
        read_rules(app.faults, Path(arguments.faults).read_text("utf-8"), arguments.faults)
    for rule in arguments.fault:
        read_rules(app.faults, rule, "--fault")


def _report(app: Site, arguments: argparse.Namespace) -> None:
    if app.faults.rules:
        print(app.faults.report(), file=sys.stderr)
    if arguments.journal:
        print(app.journal, file=sys.stderr)


def _check(arguments: argparse.Namespace) -> int:
    """Check a registry. Returns the exit status.

    It is 0 if no check failed, 1 if a check failed, and 2 if the registry cannot be reached or
    used.
    """
    context = ssl.create_default_context(cafile=arguments.ca) if arguments.ca else None
    try:
        rows = suite.check_registry(
            arguments.url,
            credentials=arguments.user,
            workflows=arguments.workflow,
            context=context,
            mounting=arguments.mount_repository,
            keep=arguments.keep,
            progress=None if arguments.json else lambda row: print(suite.as_line(row), flush=True),
        )
    except suite.Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2

    if arguments.json:
        print(suite.as_json(arguments.url, rows))
    else:
        print(f"\n{suite.as_tables(rows)}\n\n{suite.as_summary(rows)}")

    return 1 if suite.count_outcomes(rows)["fail"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description="A registry, faults in front of one, and checks of any.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="serve an empty registry from memory")
    _add_registry(serving)
    _add_server(serving)
    proxying = commands.add_parser("proxy", help="pass requests on to a registry, with faults")
    _add_upstream(proxying)
    _add_server(proxying)
    checking = commands.add_parser(
        "check", help="check a registry against the OCI distribution specification 1.1"
    )
    _add_checks(checking)
    return parser


def _login(text: str) -> tuple[str, str] | None:
    """Parse NAME:PASSWORD. Returns None if there is no name."""
    name, _, password = text.partition(":")
    return (name, password) if name else None


def _add_registry(parser: argparse.ArgumentParser) -> None:
    """Add the options of the registry that is served."""
    parser.add_argument(
        "--seed-images", action="store_true", help="hold one image of every common shape"
    )
    parser.add_argument("--user", type=_login, metavar="NAME:PASSWORD", help="who may push")
    parser.add_argument("--auth", choices=("basic", "bearer"), default="bearer")
    parser.add_argument(
        "--no-referrers", action="store_true", help="answer 404 as registries before OCI 1.1"
    )
    parser.add_argument(
        "--persona", choices=sorted(PERSONAS), help="behave as this provider, over plain HTTP"
    )
    parser.add_argument(
        "--names",
        metavar="DIR",
        help="a persona's own host names, over TLS, for clients with the variables in DIR/environ",
    )


def _add_upstream(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the registry behind a proxy."""
    parser.add_argument(
        "upstream", type=origin, metavar="URL", help="http(s)://HOST[:PORT] of the registry"
    )
    parser.add_argument(
        "--ca", metavar="FILE", help="certificates to trust, PEM, instead of the system's"
    )
    parser.add_argument(
        "--token-path", default="/token", metavar="PATH", help="of its token service: kind token"
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options of a port, of faults and of the journal."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument(
        "--tls", nargs=2, metavar=("CERT", "KEY"), help="PEM files; HTTPS instead of HTTP"
    )
    parser.add_argument(
        *("--fault", "-f"),
        action="append",
        default=[],
        metavar="RULE",
        help="see README.md; several times",
    )
    parser.add_argument(
        "--faults", metavar="FILE", help="rules, one to a line, taken before those of --fault"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the rules that strike by chance")
    parser.add_argument(
        "--journal", action="store_true", help="write every exchange to standard error at the end"
    )


def _add_checks(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a check of a registry."""
    parser.add_argument(
        "url", metavar="URL", help="http(s)://HOST[:PORT]/REPOSITORY, which is written to"
    )
    parser.add_argument(
        "--user",
        type=_login,
        metavar="NAME:PASSWORD",
        help="for Basic or the registry's token service",
    )
    parser.add_argument(
        "--ca", metavar="FILE", help="certificates to trust, PEM, instead of the system's"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON document at the end instead of lines"
    )
    parser.add_argument(
        "--workflow",
        action="append",
        default=[],
        choices=WORKFLOWS,
        help="only this one; may be given several times",
    )
    parser.add_argument(
        "--mount-repository", metavar="NAME", help="to mount into; REPOSITORY-mount without it"
    )
    parser.add_argument("--keep", action="store_true", help="do not delete what was pushed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: `serve` and `proxy` until interrupted, `check` to its end."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "check":
            return _check(arguments)
        if arguments.command == "proxy":
            anyio.run(_run_proxy, arguments)
        else:
            anyio.run(_run_persona if arguments.persona else _run, arguments)
    except (OSError, RuleError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2 if arguments.command == "check" else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
