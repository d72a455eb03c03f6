"""The command line: arguments, the files that they name, errors, exit status. Owns: what each
command takes, its help, and what its end means for the shell. May not know: how anything is asked
or copied. Invariants: every error ends in one line and one exit status of docs/design.md section 2;
no traceback without `-vv`; costly imports are made by the command that needs them, whose parser
alone is built (docs/bodies.md section 5)."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from _regsync import __version__
from _regsync.app.console import Console
from _regsync.errors import AuthError, ConfigError, RegsyncError
from _regsync.fips import REMEDY
from _regsync.text import clean, plain

if TYPE_CHECKING:
    from _regsync.config.fields import Field
    from _regsync.config.model import Config

_LARGEST_CONFIG = 32 * 1024 * 1024


_INTERVAL = "5m"


# How a full disk, a quota or a reader that left ends a write. Files of our own have their own
# errors.
_LOST_OUTPUT = frozenset(
    {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EAGAIN}
)


_STATUSES = """\
  0    nothing failed (everything skipped, and nothing to do, included)
  1    something failed, something did not
  2    everything failed, or an unexpected error
  3    configuration or command line invalid: nothing was attempted
  4    everything failed, and every failure is one of authentication or authorisation
  130  interrupted by SIGINT, 143 by SIGTERM, with work left undone
"""


_CONFIG = (
    "-c --config FILE",
    "take registries and global settings from it; - reads standard input",
)


_NEEDED = ("-c --config FILE", "the configuration; - reads standard input")


_FILE = ("FILE", _NEEDED[1])


_JSON = ("--json", "one JSON document on standard output")


_SHARD = (
    "--shard I/N",
    "only the mappings that are shard I's, from 0, of N; /N takes I from JOB_COMPLETION_INDEX",
)


_EVERYWHERE = (
    ("-v", "show decisions; -vv: every request too"),
    ("-q", "only results and failures"),
    ("--log-format text|json", "form of standard error's lines (text)"),
    ("--no-progress", "no progress display"),
)


_METAVARS = {"count": "N", "text": "RANGE", "texts": "OS/ARCH[/VARIANT]", "one_or_texts": "PATTERN"}


class _Command(NamedTuple):
    text: str
    run: Callable[[argparse.Namespace, Console], int]
    statuses: str
    arguments: tuple[tuple[str, str], ...]  # as a usage line has them, with their help
    examples: str


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    rest = list(argv)
    valued = ("--log-format", "-c", "--config")
    places = [
        at
        for at, word in enumerate(argv)
        if word[:1] != "-" and not (at and argv[at - 1] in valued)
    ]
    name = rest.pop(places[0]) if places else None  # options may stand before the command
    if name is not None and name not in _COMMANDS:
        import difflib

        near = difflib.get_close_matches(name[:64], _COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see `regsync --help`"
        raise ConfigError(f"there is no command {plain(name)!r}", hint=hint)
    arguments, more = (parser := _parser(name)).parse_known_args(
        rest, argparse.Namespace(command=name)
    )
    shown = [
        word.partition("=")[0] if word[:1] == "-" else "***" for word in more
    ]  # what follows may be a secret
    if more:
        parser.error(f"unrecognized arguments: {' '.join(shown)}")
    if name is None:
        raise ConfigError("a command is needed", hint="see `regsync --help`")
    return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see `{self.prog} --help`")


def _parser(name: str | None) -> argparse.ArgumentParser:
    statuses = _STATUSES.splitlines()
    if name is None:
        told = ["commands (`regsync COMMAND --help` says more):"]
        told += [f"  {each:<9} {command.text}" for each, command in _COMMANDS.items()]
    else:
        told = [
            "examples:",
            *(f"  {line}".rstrip() for line in _COMMANDS[name].examples.splitlines()),
        ]
        statuses = [
            line for line in statuses if line.split()[0] in _COMMANDS[name].statuses.split()
        ]
    # Each argument makes a formatter, which asks shutil for the terminal's width: 2 ms of a start.
    # An abbreviation, as `--jso`, would be taken for --json here and for something else by `main`.
    parser = _Parser(
        prog=f"regsync {name}" if name else "regsync",
        usage=None if name else "regsync COMMAND ...",
        description=_COMMANDS[name].text
        if name
        else "copy container images between OCI registries",
        epilog="\n".join([*told, "", "exit status:", *statuses]),
        allow_abbrev=False,
        formatter_class=partial(argparse.HelpFormatter, width=80),
    )
    if name is None:
        parser.add_argument("--version", action="version", version=f"regsync {__version__}")
    fields: list[Field] = []
    if name in ("copy", "tags"):
        from _regsync.config.fields import SECTIONS

        fields = [
            field
            for field in SECTIONS["mapping" if name == "copy" else "tags"]
            if (field.name == "platforms" if name == "copy" else field.name != "immutable_tags")
        ]
    for field in fields:
        many = field.type in ("texts", "one_or_texts")
        parser.add_argument(
            "--platform" if name == "copy" else f"--{field.name.replace('_', '-')}",
            action="append" if many else "store",
            metavar="|".join(field.choices) or _METAVARS.get(field.type),
            type=partial(_parse_value, field),
            default=[] if many else None,
            help=field.meaning + ("; may be repeated" if many else ""),
        )
    for form, text in (*(_COMMANDS[name].arguments if name else ()), *_EVERYWHERE):
        *names, last = form.split()
        if not form.startswith("-"):
            parser.add_argument(
                form.lower(), metavar=form, help=text, choices=[form] if form.islower() else None
            )
        elif names:
            choices = last.split("|") if "|" in last else None
            parser.add_argument(
                *names,
                metavar=last,
                help=text,
                choices=choices,
                type=int if last == "N" else str,
                required=last == "FILE" and text != _CONFIG[1],
            )
        else:
            parser.add_argument(form, action="count" if form == "-v" else "store_true", help=text)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _parse_value(field: Field, text: str) -> Any:
    try:
        return field.parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: Sequence[str], closed: str = "") -> int:
    """Run one command and return its exit status; `closed` says why the FIPS gate is, if it is."""
    # Before the arguments are known to be right: also what is wrong with them is told as they ask.
    json_log = "--log-format json" in " ".join(argv).replace("=", " ")
    make = partial(Console, sys.stdout, sys.stderr, as_json="--json" in argv, json_log=json_log)
    console = make(level="warning", progress=False)
    verbose = 0
    try:
        if closed and ("schema" in argv[:1] or {"-h", "--help"} & {*argv}):
            console.log("warning", "gate_closed", closed)
        arguments = _parse(argv)
        verbose = arguments.v or 0
        least = "info" if arguments.command == "watch" else "warning"
        level = "error" if arguments.q else (least, "debug", "trace")[min(verbose, 2)]
        console = make(level=level, progress=not (arguments.q or arguments.no_progress))
        if closed and arguments.command not in ("schema", "version"):
            raise ConfigError(closed, hint=REMEDY)
        arguments.closed = closed
        return _COMMANDS[arguments.command].run(arguments, console)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the one place
        if verbose > 1 and not isinstance(error, ConfigError):
            sys.excepthook(type(error), error, error.__traceback__)
        return _tell(console, error)
    finally:
        # What a stream could not take goes nowhere, or the interpreter's last flush complains.
        for name in ("stdout", "stderr") if console.lost else ():
            try:
                getattr(sys, name).flush()
            except OSError:
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it serves until the end


def _tell(console: Console, error: BaseException) -> int:
    while inner := getattr(error, "exceptions", None):
        error = inner[0]  # task groups wrap what a task raises
    if isinstance(error, RegsyncError):
        told = error
    elif isinstance(error, OSError) and error.errno in _LOST_OUTPUT:
        console.lost = True
        told = RegsyncError(
            f"the output of this command cannot be written: {clean(error.strerror or str(error))}"
        )
    else:
        message = f"{type(error).__name__}: {clean(str(error))}"
        told = RegsyncError(message, hint="this is a defect; run again with -vv for its place")
    try:
        if not isinstance(
            error, BrokenPipeError
        ):  # the reader of our output left: there is nobody to tell
            console.error(told)
    except OSError:
        pass
    return AuthError.exit_status if told.code == AuthError.code else told.exit_status


def _read(name: str) -> dict[str, Any]:
    try:
        if name == "-":
            text = sys.stdin.buffer.read(_LARGEST_CONFIG + 1)
        else:
            with open(name, "rb") as stream:
                text = stream.read(_LARGEST_CONFIG + 1)
    except OSError as error:
        shown = clean(name) or "a file without a name"
        raise ConfigError(
            f"{shown} cannot be read: {clean(error.strerror or str(error))}"
        ) from error
    if len(text) > _LARGEST_CONFIG:
        raise ConfigError(f"{clean(name)} is larger than {_LARGEST_CONFIG} bytes")
    shown, base_dir = (
        ("standard input", None) if name == "-" else (name, os.path.dirname(os.path.abspath(name)))
    )
    return {
        "text": text,
        "name": shown,
        "environ": os.environ,
        "base_dir": base_dir,
        "home": os.path.expanduser("~"),
    }


def _read_config(name: str | None, console: Console | None = None, *, lint: bool = False) -> Config:
    from _regsync.config import model, reader

    found = model.Config({}, ()) if name is None else reader.load(**_read(name), lint=lint)
    for warning in found.warnings:
        if console:
            console.log("warning", "config", warning)
    return found


def _share(shard: str | None, whole: Config, log: Callable[..., None]) -> Config:
    if shard is None:
        return whole
    from _regsync.sync.mappings import parse_shard, share

    number, total = parse_shard(shard, os.environ)
    found = share(whole, number, total)
    told = f"shard {number} of {total}: {len(found.mappings)} of {len(whole.mappings)} mappings"
    log("info", "shard", told, mappings=len(found.mappings), of=len(whole.mappings))
    return found


def _validate(arguments: argparse.Namespace, console: Console) -> int:
    _read_config(arguments.file, console, lint=True)
    return 0


def _version(arguments: argparse.Namespace, console: Console) -> int:
    from _regsync.app.version import inventory, show

    return inventory() if arguments.sbom else show(arguments.closed, as_json=arguments.json)


def _show(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.command == "expand":
        from _regsync.config.reader import expand

        text = expand(**_read(arguments.file), show_secrets=arguments.show_secrets)
    else:
        from _regsync.config.fields import schema
        from _regsync.sync import report

        text = json.dumps(report.schema() if arguments.report else schema(), indent=2) + "\n"
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # YAML is UTF-8, whatever a terminal is
        sys.stdout.buffer.write(text.encode())
    sys.stdout.flush()
    return 0


def _tags(arguments: argparse.Namespace, console: Console) -> int:
    from _regsync.app.commands import list_tags
    from _regsync.config.model import registry_for
    from _regsync.oci.reference import parse_reference
    from _regsync.tags import TagRule, select

    given = _read_config(arguments.config)
    where = parse_reference(arguments.repo)
    if where.tag or where.digest:
        raise ConfigError(
            f"reference {str(where)!r}: a repository is needed",
            hint="leave out the tag or digest; --glob chooses tags",
        )
    given_rule: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in TagRule._fields
    }
    rule = TagRule(**given_rule)
    try:
        select((), rule)
    except ValueError as error:
        raise ConfigError(str(error), hint="see `regsync tags --help`") from error
    return _run(list_tags, registry_for(where.host, given), where.repository, rule, console)


def _sync(arguments: argparse.Namespace, console: Console) -> int:
    found = _share(
        getattr(arguments, "shard", None), _read_config(arguments.config, console), console.log
    )
    from _regsync.app import commands

    if arguments.command == "auth":
        return _run(commands.check, found, console)
    rehearse = (
        "analysis" if arguments.command == "analyze" else "plan" if arguments.dry_run else None
    )
    return _run(commands.run, found, console, None, rehearse)


def _watch(arguments: argparse.Namespace, console: Console) -> int:
    from _regsync.app import watch
    from _regsync.config import reader as config_reader
    from _regsync.config.fields import parse_duration

    def load(log: Any, **given: Any) -> Config:
        return _share(arguments.shard, config_reader.load(**given), log)

    try:
        interval = parse_duration(arguments.interval or _INTERVAL)
    except ValueError as error:
        raise ConfigError(f"--interval: {error}") from error
    if not interval or arguments.config == "-":
        raise ConfigError("watch needs a file, not -, and an --interval above 0")
    where = (
        arguments.health_bind or "127.0.0.1",
        8080 if arguments.health_port is None else arguments.health_port,
    )
    return _run(watch.run, console, partial(_read, arguments.config), load, interval, where)


def _copy(arguments: argparse.Namespace, console: Console) -> int:
    from _regsync import tags as tags_module
    from _regsync.app import commands as app_commands
    from _regsync.config import model as config_model
    from _regsync.config.model import MappingRule
    from _regsync.oci import reference as oci_reference

    given = _read_config(arguments.config)
    source = oci_reference.parse_reference(arguments.src)
    target = oci_reference.parse_reference(arguments.dst)
    platforms = tuple(arguments.platform)
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
        source=config_model.registry_for(source.host, given),
        source_repository=source.repository,
        targets=(config_model.registry_for(target.host, given),),
        target_repository=target.repository,
        tags=tags_module.TagRule(),
        platforms=platforms or None,
        artifacts=config_model.ArtifactRule(enabled=not arguments.no_artifacts),
    )
    if mapping.source.origin == mapping.targets[0].origin and mapping.source.max_concurrent == 1:
        raise ConfigError(
            f"a copy reads and writes {mapping.source.authority}, whose max_concurrent is 1",
            hint="allow 2 at least: one request reads while the other writes",
        )
    one = (mapping, reference, target.digest or target.tag or reference)
    return _run(app_commands.run, given._replace(mappings=(mapping,)), console, one)


def _run(work: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    import anyio

    from _regsync.app import commands

    before = os.umask(
        0o077
    )  # what a run makes, directories on the way to cache_dir included, is its user's alone
    try:
        return anyio.run(commands.run_awake_to_signals, work, *arguments, backend="asyncio")
    finally:
        os.umask(before)


_COMMANDS: Mapping[str, _Command] = {
    "copy": _Command("copy one image", _copy, "0 1 2 3 4 130", (
        ("SRC", "the image; without a tag: latest"), ("DST", "where it goes; without a tag: the source's"),
        ("--no-artifacts", "leave signatures, SBOMs and attestations behind"), _CONFIG, _JSON), """\
regsync copy docker.io/library/alpine:3.20 registry.example.com/base/alpine
regsync copy quay.io/org/app@sha256:... localhost:5000/app:pinned
regsync copy --platform linux/amd64 ghcr.io/org/app:v1 localhost:5000/app

A reference is HOST[:PORT]/REPO[:TAG|@DIGEST]; without a host it is Docker Hub's."""),
    "sync": _Command("run every mapping of a configuration once", _sync, "0 1 2 3 4 130", (
        _NEEDED, ("--dry-run", "say what a run would do, and change nothing"), _SHARD, _JSON), """\
regsync sync -c mirror.yaml
regsync sync -c mirror.yaml --dry-run
regsync sync -c - --json <mirror.yaml >report.json"""),
    "watch": _Command("run every mapping again and again, until a signal", _watch, "0 2 3", (
        ("-c --config FILE", "the configuration, a file"), _SHARD, ("--json", "a line of JSON each cycle"),
        ("--interval DURATION", f"from the end of a cycle to the next ({_INTERVAL})"),
        ("--health-bind ADDR", "where probes are answered (127.0.0.1)"), ("--health-port N", "its port (8080)")), """\
regsync watch -c mirror.yaml --interval 1h --json >>cycles.jsonl

A changed configuration is taken before the next cycle; SIGHUP begins one at once. Only what changes is
said. A signal ends the program with 0; with --json each cycle is a line."""),
    "analyze": _Command("say what images share, and what a run would cost", _sync, "0 1 2 3 4 130",
        (_NEEDED, _SHARD, _JSON), """\
regsync analyze -c mirror.yaml

Every selected image's manifests are read at the source, targets say what they have; nothing is changed."""),
    "tags": _Command("list the tags of a repository that a rule selects", _tags, "0 2 3 4 130", (
        ("REPO", "HOST[:PORT]/REPO; without a host: Docker Hub's"), _CONFIG, _JSON), """\
regsync tags alpine --glob '3.*' --exclude '*_rc*' --sort semver
regsync tags quay.io/org/app --semver '>=1.2,<3' --latest 5
regsync tags -v -c mirror.yaml registry.example.com/team/app --glob 'v*'

The rules are those of `tags` in a configuration. -v says why the other tags are left out."""),
    "auth": _Command("say what the registries of a configuration let us do", _sync, "0 3 130",
        (("check", "ask each repository in use, and write nothing"), _NEEDED, _JSON), """\
regsync auth check -c mirror.yaml

At targets an upload is begun and ended, in repositories that exist. Exit status 4: not all that is needed holds."""),
    "validate": _Command("say all that is wrong with a configuration", _validate, "0 3", (_FILE,), """\
regsync validate mirror.yaml
regsync validate - <mirror.yaml"""),
    "expand": _Command("print a configuration with variables and defaults filled in", _show, "0 3", (
        _FILE, ("--show-secrets", "write passwords and tokens out")), "regsync expand mirror.yaml"),
    "schema": _Command("print the JSON Schema of the configuration", _show, "0 3", (
        ("--report", "that of what --json writes instead"),), """\
regsync schema >regsync.schema.json

Editors complete a configuration that begins with
# yaml-language-server: $schema=regsync.schema.json"""),
    "version": _Command("say which build this is and what it runs on", _version, "0 3", (
        _JSON, ("--sbom", "print what the file is made of, as CycloneDX")),
        "regsync version --json\nregsync version --sbom >regsync.cdx.json"),
}  # fmt: skip
