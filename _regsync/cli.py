"""The command line: arguments, wiring, signals, exit status.

Owns: what the process gives to a run (environment, files, clock, chance) and what a run's end means for
the shell. May not know: how anything is copied. Invariants: every error ends in one line and one exit
status of design.md section 2; no traceback without `-vv`; what is costly to import is imported by the
command that needs it (throughput.md section 5).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from _regsync import __version__
from _regsync.errors import ConfigError, RegsyncError, clean

if TYPE_CHECKING:
    import argparse

    import anyio

    from _regsync.config import Config, MappingRule
    from _regsync.output import Console
    from _regsync.report import Report
    from _regsync.transport import Transport

__all__ = ["main"]

_LARGEST_CREDENTIAL_FILE = 4 * 1024 * 1024
_LARGEST_CONFIG = 32 * 1024 * 1024
# How a full disk, a quota or a reader that left ends a write. Files of our own have their own errors.
_LOST_OUTPUT = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

_STATUSES = """\
exit status:
  0    nothing failed (everything skipped, and nothing to do, included)
  1    something failed, something did not
  2    everything failed, or an unexpected error
  3    configuration or command line invalid: nothing was attempted
  4    everything failed, and every failure is one of authentication or authorisation
  130  interrupted by SIGINT, 143 by SIGTERM, with work left undone
"""
_COPY = """\
examples:
  regsync copy docker.io/library/alpine:3.20 registry.example.com/base/alpine
  regsync copy quay.io/org/app@sha256:... localhost:5000/app:pinned
  regsync copy --platform linux/amd64 ghcr.io/org/app:v1 localhost:5000/app

A reference is HOST[:PORT]/REPO[:TAG|@DIGEST]; without a host it is Docker Hub's.

"""
_SYNC = """\
example:
  regsync sync -c mirror.yaml

"""


def _parser() -> argparse.ArgumentParser:
    from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter

    class Parser(ArgumentParser):
        def __init__(self, **options: Any) -> None:
            # `--jso` would be taken for --json here and for something else by `main`.
            super().__init__(allow_abbrev=False, **options)

        def error(self, message: str) -> NoReturn:
            raise ConfigError(message, hint=f"see `{self.prog} --help`")

    shared = Parser(add_help=False)
    group = shared.add_argument_group("everywhere")

    def everywhere(*names: str, **options: Any) -> None:
        group.add_argument(*names, default=SUPPRESS, **options)

    everywhere("-v", action="count", dest="verbose", help="show decisions; -vv: every request too")
    everywhere("-q", action="store_true", dest="quiet", help="only results and failures")
    everywhere("--log-format", choices=("text", "json"), help="form of standard error's lines (text)")
    everywhere("--no-progress", action="store_true", help="no progress display")
    parser = Parser(
        prog="regsync",
        description="Copy container images between OCI registries.",
        epilog=_STATUSES,
        parents=[shared],
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"regsync {__version__}", help="print the version"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str, epilog: str = "") -> ArgumentParser:
        return commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=epilog + _STATUSES,
            parents=[shared],
            formatter_class=RawDescriptionHelpFormatter,
        )

    copy = command("copy", "copy one image", _COPY)
    _add_copy_arguments(copy)
    sync = command("sync", "run every mapping of a configuration once", _SYNC)
    sync.add_argument(
        "-c", "--config", metavar="FILE", required=True, help="the configuration; - reads standard input"
    )
    validate = command("validate", "check a configuration and say all that is wrong with it")
    validate.add_argument("file", metavar="FILE", help="the configuration; - reads standard input")
    version = command("version", "say which build this is and what it runs on")
    for each in (copy, sync, version):
        each.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def _add_copy_arguments(copy: argparse.ArgumentParser) -> None:
    copy.add_argument("source", metavar="SRC", help="the image; without a tag: latest")
    copy.add_argument("target", metavar="DST", help="where it goes; without a tag: the source's")
    copy.add_argument(
        "--platform",
        action="append",
        default=[],
        metavar="OS/ARCH[/VARIANT]",
        help="copy only this platform of an index; may be repeated",
    )
    copy.add_argument("--no-artifacts", action="store_true", help="leave referrers behind without a warning")
    copy.add_argument(
        "-c", "--config", metavar="FILE", help="take registries and global settings from it; - reads stdin"
    )


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    from _regsync.output import Console

    as_json = "--json" in argv
    console = Console(
        sys.stdout, sys.stderr, level="warning", as_json=as_json, json_log=False, progress=False
    )
    verbose = 0
    try:
        arguments = _parser().parse_args(argv)
        verbose = getattr(arguments, "verbose", 0)
        quiet = getattr(arguments, "quiet", False)
        console = Console(
            sys.stdout,
            sys.stderr,
            level="error" if quiet else ("warning", "debug", "trace")[min(verbose, 2)],
            as_json=as_json,
            json_log=getattr(arguments, "log_format", "text") == "json",
            progress=not quiet and not getattr(arguments, "no_progress", False),
        )
        return _COMMANDS[arguments.command](arguments, console)
    except RegsyncError as error:
        if verbose > 1:
            _traceback()
        return _tell_error(console, error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the one place: print, exit status 2
        if verbose > 1:
            _traceback()
        return _unexpected(console, _innermost(error))
    finally:
        if console.lost:
            _lose_output()


def _tell_error(console: Console, error: RegsyncError) -> int:
    """Show why the command ended; return its exit status, which holds even where nobody can be told."""
    try:
        console.error(error)
    except OSError:
        _lose_output()
    return error.exit_status


def _unexpected(console: Console, found: BaseException) -> int:
    """Show what nothing below has made a message of; return the exit status."""
    if isinstance(found, RegsyncError):
        return _tell_error(console, found)
    if isinstance(found, OSError) and found.errno in _LOST_OUTPUT:
        _lose_output()
        if not isinstance(found, BrokenPipeError):  # the reader of our output left: there is nobody to tell
            text = f"the output of this command cannot be written: {clean(found.strerror or str(found))}"
            with contextlib.suppress(OSError):
                sys.stderr.write(f"error: INTERNAL_ERROR: {text}\n")
        return RegsyncError.exit_status
    message = f"{type(found).__name__}: {clean(str(found))}"
    return _tell_error(
        console, RegsyncError(message, hint="this is a defect; run again with -vv for its place")
    )


def _lose_output() -> None:
    """Let what an output stream could not take go nowhere, or the interpreter's last flush complains."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it serves until the end


def _innermost(error: BaseException) -> BaseException:
    """Return what an exception group is about: task groups wrap what a task raises."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return error


def _traceback() -> None:
    import traceback

    traceback.print_exc()


def _read_config(name: str) -> Config:
    from _regsync import config

    try:
        if name == "-":
            text = sys.stdin.buffer.read(_LARGEST_CONFIG + 1)
        else:
            with open(name, "rb") as stream:
                text = stream.read(_LARGEST_CONFIG + 1)
    except OSError as error:
        shown = clean(name) or "a file without a name"
        raise ConfigError(f"{shown} cannot be read: {clean(error.strerror or str(error))}") from error
    if len(text) > _LARGEST_CONFIG:
        raise ConfigError(f"{clean(name)} is larger than {_LARGEST_CONFIG} bytes")
    base_dir = None if name == "-" else os.path.dirname(os.path.abspath(name))
    shown = "standard input" if name == "-" else name
    return config.load(text, name=shown, environ=os.environ, base_dir=base_dir, home=_home())


def _home() -> str | None:
    home = os.path.expanduser("~")
    return home if home != "~" else None


def _read_file(path: str) -> bytes | None:
    """Return a file's bytes, None when there is none; ConfigError when it is there and unreadable."""
    try:
        with open(path, "rb") as stream:
            return stream.read(_LARGEST_CREDENTIAL_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{clean(path)} cannot be read: {clean(error.strerror or str(error))}") from error


def _read_mappings(name: str, console: Console) -> Config:
    """Read a configuration whose mappings are to be run; say what it warns of, refuse what is not kept."""
    found = _read_config(name)
    for warning in found.warnings:
        console.log("warning", "config", warning)
    if any(mapping.artifacts.require_artifacts for mapping in found.mappings):
        raise ConfigError(
            "artifacts.require_artifacts cannot be kept: this version does not copy referrers yet",
            hint="leave require_artifacts out, or use a version that copies referrers",
        )
    return found


def _validate(arguments: argparse.Namespace, console: Console) -> int:
    _read_mappings(arguments.file, console)
    return 0


def _version(arguments: argparse.Namespace, console: Console) -> int:
    from _regsync import version

    return version.show(as_json=arguments.json)


def _sync(arguments: argparse.Namespace, console: Console) -> int:
    return _run(_read_mappings(arguments.config, console), console, None)


def _copy(arguments: argparse.Namespace, console: Console) -> int:
    from _regsync import config, oci
    from _regsync.config import ArtifactRule, Config, MappingRule
    from _regsync.tags import TagRule

    given = _read_config(arguments.config) if arguments.config else None
    source, target = oci.parse_reference(arguments.source), oci.parse_reference(arguments.target)
    try:
        platforms = tuple(oci.parse_platform(text) for text in arguments.platform)
    except ValueError as error:
        raise ConfigError(f"--platform: {error}") from error
    reference = source.digest or source.tag or "latest"
    if source.digest is None and source.tag is None:
        console.log("info", "default_tag", f"{source}: no tag given, taking latest")
    if target.digest is not None and (target.digest != source.digest or platforms):
        raise ConfigError(
            "the digest of the target must be that of the source, given as a digest, without --platform",
            hint="name a tag at the target, or leave the digest out",
        )
    mapping = MappingRule(
        index=0,
        source=config.registry_for(source.host, given),
        source_repository=source.repository,
        targets=(config.registry_for(target.host, given),),
        target_repository=target.repository,
        tags=TagRule(),
        platforms=platforms or None,
        artifacts=ArtifactRule(enabled=not arguments.no_artifacts),
    )
    if mapping.source.origin == mapping.targets[0].origin and mapping.source.max_concurrent == 1:
        raise ConfigError(
            f"a copy reads and writes {mapping.source.authority}, whose max_concurrent is 1",
            hint="allow 2 at least: one request reads while the other writes",
        )
    one = Config(
        registries={},
        mappings=(mapping,),
        max_concurrent_transfers=given.max_concurrent_transfers if given else 50,
        cache_dir=given.cache_dir if given else None,
    )
    return _run(one, console, (mapping, reference, target.digest or target.tag or reference))


def _run(found: Config, console: Console, one: tuple[MappingRule, str, str] | None) -> int:
    """Run a sync, or one copy, in an event loop, and tell how it ended."""
    import anyio

    return anyio.run(_go, found, console, one, backend="asyncio")


async def _go(found: Config, console: Console, one: tuple[MappingRule, str, str] | None) -> int:
    import anyio

    from _regsync.output import show_progress
    from _regsync.report import Report
    from _regsync.sync import Run
    from _regsync.transport import Edge, Transport

    # Start-up is over (`regsync.main` says why it was off); what is there now never becomes garbage.
    gc.freeze()
    gc.enable()
    began, started = anyio.current_time(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = Report()
    edge = Edge(
        environ=os.environ,
        home=_home(),
        read=_read_file,
        chance=_chance,
        wall=time.time,
        log=console.log,
        open_files=_raise_file_limit(),
    )
    transport = Transport(edge)

    def emit(outcome: Any) -> None:
        report.add(outcome)
        console.outcome(outcome)

    run = Run(transport, found, emit, report)
    signals: list[int] = []
    try:
        async with anyio.create_task_group() as tasks:
            stop = anyio.Event()
            tasks.start_soon(_listen_for_signals, stop, signals, tasks.cancel_scope)
            if console.live or console.heartbeat:
                tasks.start_soon(show_progress, console, run.progress)
            if one is None:
                await run.sync(stop)
            else:
                await run.copy(*one, stop)
            tasks.cancel_scope.cancel()
    finally:
        transport.close()
    if len(signals) > 1:
        report.interrupted = True
    _tell(console, report, transport, anyio.current_time() - began, started, summary=one is None)
    if report.interrupted:
        return 128 + signals[0]
    return report.exit_status()


def _tell(
    console: Console, report: Report, transport: Transport, elapsed: float, started: str, *, summary: bool
) -> None:
    if summary:
        console.summary(report, elapsed)
    if console.as_json:
        console.document(
            report.as_json(
                run_id=os.urandom(8).hex(),
                started_at=started,
                elapsed=elapsed,
                requests=transport.requests(),
                throttled=transport.throttled(),
            )
        )


def _chance() -> float:
    import random

    return random.random()


async def _listen_for_signals(stop: anyio.Event, signals: list[int], scope: anyio.CancelScope) -> None:
    """First signal: take nothing new and drain. Second: stop at once."""
    import anyio

    try:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            async for number in received:
                signals.append(int(number))
                if len(signals) > 1:
                    scope.cancel()
                stop.set()
    except NotImplementedError:
        # The event loop of Windows takes no signal handlers; an interrupt then ends the program at once.
        return


def _raise_file_limit() -> int:
    """Allow as many open files as the system lets us, and return how many (design.md section 9)."""
    most = 65536
    try:
        import resource
    except ImportError:
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most:
        soft = most if hard == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else soft


_COMMANDS = {"copy": _copy, "sync": _sync, "validate": _validate, "version": _version}
