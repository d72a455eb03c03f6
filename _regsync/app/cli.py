"""Parse the command line, run the command, and turn every error into an exit status.

One table has the commands with their help and options. Every error is reported in one line and has
one exit status; without `-vv` there is no traceback.
Follows: docs/design.md section 2.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from _regsync import edge, fips
from _regsync.app import commands
from _regsync.app.console import Console
from _regsync.errors import AuthError, ConfigError, RegsyncError
from _regsync.text import forget_all_secrets, mask_unless_word, printable

if TYPE_CHECKING:
    import ssl

STATUSES = """\
  0    nothing failed, even if there was nothing to do
  1    something failed, but not everything
  2    everything failed, or an unexpected error
  3    the configuration or command line is invalid, or the FIPS gate is closed; nothing was attempted
  4    everything failed, and every failure is about authentication or authorisation
  130  interrupted by SIGINT, 143 by SIGTERM, with work left undone
"""

# The table of commands.

# Options are written as help shows them, one a line: names, what stands for a value, two blanks, and
# the meaning, which may go on in indented lines. Without a value an option is a flag. `N` is a
# number, `a|b` are all choices, `...` lets an option be repeated. A configuration is required
# unless it stands in brackets. A meaning may end with the `(default: VALUE)`.

CONFIG = "-c, --config FILE   the configuration; - reads standard input"
FILE = "FILE                the configuration; - reads standard input"
JSON = "--json              write one JSON document to standard output"
LOCK = """\
--lock PATH         the lock file; implies --locked (default: FILE with .lock as its ending: mirror.lock for
                    mirror.yaml)"""
SHARD = """\
--shard I/N         run only part I (0 to N-1) of the mappings in N parts; /N takes I from
                    JOB_COMPLETION_INDEX"""

COMMON = """\
-v                  show decisions and retries; -vv: also every request
--no-progress       do not show progress
-q                  show only results and failures, no warnings
--log-format text|json  format of the lines on standard error (default: text)"""


class Command(NamedTuple):
    """The help and the options of one command, which `commands.run_NAME` runs."""

    summary: str
    statuses: str  # the exit statuses that the command can return, separated by blanks
    examples: str
    options: str
    # Exit status -> its meaning for this command, if that differs from STATUSES.
    own_statuses: Mapping[str, str] = {}


COMMANDS: Mapping[str, Command] = {
    "copy": Command(
        summary="copy one image, with its signatures and SBOMs, to another registry",
        statuses="0 1 2 3 4 130",
        examples="""\
regsync copy docker.io/library/alpine:3.20 registry.example.com/base/alpine
regsync copy quay.io/org/app@sha256:... localhost:5000/app:pinned
regsync copy --platform linux/amd64 ghcr.io/org/app:v1 localhost:5000/app

A reference is HOST[:PORT]/REPO[:TAG|@DIGEST]; without a host it means Docker Hub. HTTPS is used except for
localhost and loopback addresses; http:// or https:// before the host overrides that.
oci-layout:PATH//REPO[:TAG|@DIGEST] is an image in a directory, for disks that are carried into closed networks.
Signatures, SBOMs and attestations are found by the referrers API, its fallback tag, and cosign's tags of the image.""",
        options=f"""\
--platform OS/ARCH[/VARIANT]...  copy only this platform of a multi-platform image; may be repeated
SRC                 the image to copy (default tag: latest)
DST                 where to copy it (default tag: that of SRC)
--no-artifacts      leave signatures, SBOMs and attestations behind
[-c, --config FILE]  a configuration to take registries and global settings from; - reads standard input
{JSON}""",
    ),
    "sync": Command(
        summary="copy what a configuration selects, once",
        statuses="0 1 2 3 4 130",
        examples="""\
regsync sync -c mirror.yaml
regsync sync -c mirror.yaml --dry-run
regsync sync -c mirror.yaml --recheck
regsync sync -c mirror.yaml --verify --dry-run
regsync sync -c mirror.yaml --json >report.json
regsync sync -c mirror.yaml --retry-from report.json""",
        options=f"""\
{CONFIG}
--dry-run           show what a run would do, and change nothing
--recheck           look again for the signatures and SBOMs of all images, at source and targets; in an image
                    layout also look for files that it has lost
--verify            ask targets for every manifest and blob of every image, and copy what they have lost;
                    includes --recheck
--retry-from REPORT  copy only what failed or was left undone in a report that --json wrote
--summary FILE      write a summary in Markdown
--locked            copy what the lock file names, and nothing else
{LOCK}
{SHARD}
{JSON}""",
    ),
    "watch": Command(
        summary="copy what a configuration selects, again and again, as a service",
        statuses="0 2 3",
        examples="""\
regsync watch -c mirror.yaml --interval 1h --json >>cycles.jsonl

A changed configuration is read before the next cycle; SIGHUP begins one at once. Only changes are shown.""",
        options=f"""\
-c, --config FILE   the configuration file
--locked            copy what the lock file names, and nothing else
{LOCK}
{SHARD}
--json              write a line of JSON after each cycle
--interval DURATION  time from the end of a cycle to the next (default: 5m)
--health-bind ADDR  address for health probes (default: 127.0.0.1)
--health-port N     port for health probes (default: 8080)""",
        own_statuses={"0": "stopped by SIGINT or SIGTERM", "2": "an unexpected error"},
    ),
    "lock": Command(
        summary="pin the digest of each selected tag in a file, for review",
        statuses="0 1 2 3 4 130",
        examples="""\
regsync lock -c mirror.yaml
regsync lock -c mirror.yaml --check
regsync lock -c mirror.yaml --only library/alpine
regsync sync -c mirror.yaml --locked

Only sources are asked. A mapping that fails keeps its old lines.""",
        options=f"""\
{CONFIG}
--lock PATH         the lock file (default: FILE with .lock as its ending: mirror.lock for mirror.yaml)
--check             show what has come, moved or gone, and do not write the lock file
--only FROM...      update only mappings with this `from` (without the host), and keep all other lines; may be
                    repeated
--recheck           also look for new signatures and SBOMs of images that have not moved; without it, their
                    lines stay as they are
{JSON}""",
        own_statuses={
            "0": "nothing failed, with or without changes; --check: without changes",
            "1": "something failed, but not everything; --check: nothing failed, and there are changes",
            "2": "everything failed, or an unexpected error; --check: something failed",
        },
    ),
    "audit": Command(
        summary="check that targets hold what they should hold",
        statuses="0 1 2 3 130",
        examples="""\
regsync audit -c mirror.yaml
regsync audit -c mirror.yaml --read --json >audit.json
regsync audit -c mirror.yaml --locked --receipt there.txt

Every tag, manifest, blob and artifact is asked for, and nothing is written to any registry. Without --locked the
targets are compared with what the sources have now. A tag that only a target has is no finding.""",
        options=f"""\
{CONFIG}
--locked            expect at targets what the lock file names, and contact no source
{LOCK}
--read              download all blobs of the targets, and check their bytes
--receipt FILE      write a line DIGEST HOST/REPOSITORY for each manifest and blob that is there: a list for
                    `assume`, which leaves these out of a disk for a closed network
{SHARD}
{JSON}""",
        own_statuses={
            "0": "all is there and right",
            "1": "there are findings",
            "2": "something could not be checked, or an unexpected error",
        },
    ),
    "tags": Command(
        summary="list the tags of a repository that a rule or a configuration selects",
        statuses="0 2 3 4 130",
        examples="""\
regsync tags -v -c mirror.yaml ghcr.io/org/app
regsync tags alpine --glob '3.*.*' --exclude '*[-_]*' --sort semver --latest 3
regsync tags quay.io/org/app --semver '>=1.2,<3' --latest 5

The options are the keys of `tags` in a configuration. -v says why other tags are left out.""",
        options=f"""\
REPO                [http://]HOST[:PORT]/REPO, with -c too; without a host: Docker Hub
[-c, --config FILE]  a configuration to take registries and global settings from; without options for a rule,
                    also the rules of the mappings that copy from REPO; - reads standard input
{JSON}""",
    ),
    "auth": Command(
        summary="check that the credentials have the rights that a configuration needs",
        statuses="0 2 3 4 130",
        examples="""\
regsync auth check -c mirror.yaml

Each source and target repository of the mappings is asked for its tags. In each target repository that exists, an
upload is also begun and cancelled, so that nothing is stored. A login that may only read from targets is therefore
an error here, even if it is enough for `audit`.""",
        options=f"""\
check               try the rights in each source and target repository of the mappings
{CONFIG}
{JSON}""",
        own_statuses={
            "0": "nothing that is needed is missing",
            "2": "an unexpected error",
            "4": "something that is needed is missing, or a registry did not answer",
        },
    ),
    "report": Command(
        summary="show the JSON report of a run as Markdown, JUnit or HTML",
        statuses="0 3",
        examples="""\
regsync report run.json >>"$GITHUB_STEP_SUMMARY"
regsync report run.json --to html >run.html

The report is what `sync --json` or `copy --json` has written (`audit --json` writes another document). No registry
is asked.""",
        options="""\
FILE                the JSON report; - reads standard input
--to markdown|junit|html  the format to write (default: markdown)""",
        own_statuses={"0": "the report was shown, whatever failed in the run"},
    ),
    "validate": Command(
        summary="check a configuration",
        statuses="0 3",
        examples="""\
regsync validate mirror.yaml
regsync validate - <mirror.yaml""",
        options=FILE,
    ),
    "expand": Command(
        summary="print what was understood of a configuration, without its secrets",
        statuses="0 3",
        examples="regsync expand mirror.yaml",
        options=FILE,
    ),
    "schema": Command(
        summary="print the JSON Schema of the configuration",
        statuses="0 3",
        examples="""\
regsync schema >regsync.schema.json

Editors complete a configuration that begins with
# yaml-language-server: $schema=regsync.schema.json""",
        options="",
    ),
    "version": Command(
        summary="show which build this is, and what it runs on",
        statuses="0 3",
        examples="""\
regsync version --json

It also runs where the FIPS gate is closed, and says why.""",
        options=JSON,
    ),
}


# Parsing.


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see `{self.prog} --help`")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. The returned `command` is the name of the command.

    Raises ConfigError if it does not begin with a command, or if the command does not accept its
    arguments. Exits if the command line asks for help.
    """
    name, words = (argv[0], argv[1:]) if argv else ("", [])
    if name == "--version":
        name = "version"
    if name in COMMANDS:
        parser = command_parser(name, COMMANDS[name])
    elif name in ("-h", "--help"):
        parser, words = program_parser(), argv
    else:
        found = f", not {mask_unless_word(name)!r}" if argv else ""
        raise ConfigError(
            f"a command line begins with a command{found}", hint="see `regsync --help`"
        )
    arguments, unknown = parser.parse_known_args(words, argparse.Namespace(command=name))
    if unknown:
        # An unknown word, or the value after an option's `=`, may be a secret.
        shown = [word.partition("=")[0] if word.startswith("-") else "***" for word in unknown]
        parser.error(f"unrecognized arguments: {' '.join(shown)}")
    return arguments


def program_parser() -> Parser:
    """Create the parser for a command line without a command, such as `regsync --help`."""
    epilog = [
        "commands (`regsync COMMAND --help` has the options and exit statuses of each):",
        *(f"  {name:<9} {command.summary}" for name, command in COMMANDS.items()),
        "",
        "examples:",
        "  regsync copy docker.io/library/alpine:3.20 registry.example.com/base/alpine",
        "  regsync sync -c mirror.yaml --dry-run",
        "",
        "README.md and docs/ of the source say how to write mirror.yaml.",
        "",
        "exit status:",
        STATUSES,
        "Some commands use fewer of these, or give some a different meaning: see their help.",
    ]
    parser = make_parser("regsync", "copy container images between OCI registries", epilog)
    parser.usage = "regsync COMMAND ..."
    add_options(parser, "--version           the same as the command `version`")
    return parser


def command_parser(name: str, command: Command) -> Parser:
    """Create the parser for one command."""
    meanings = dict(line.split(maxsplit=1) for line in STATUSES.splitlines())  # by exit status
    meanings |= command.own_statuses
    epilog = [
        "examples:",
        *(f"  {line}".rstrip() for line in command.examples.splitlines()),
        "",
        "exit status:",
        *(f"  {status:<5}{meanings[status]}" for status in command.statuses.split()),
    ]
    parser = make_parser(f"regsync {name}", command.summary, epilog)
    if name == "tags":
        add_tag_options(parser)
    add_options(parser, command.options)
    add_options(parser, COMMON)
    return parser


def make_parser(prog: str, description: str, epilog: Sequence[str]) -> Parser:
    """Create a parser without arguments. `epilog` has the last lines of its help."""
    return Parser(
        prog=prog,
        description=description,
        epilog="\n".join(epilog),
        # `main` looks for `--json` in the words of the command line, so it must not be abbreviated.
        allow_abbrev=False,
        # Without a width argparse would import `shutil` and three compression modules to compute it.
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=78),
    )


def add_options(parser: Parser, text: str) -> None:
    """Add options and arguments that are written as above CONFIG."""
    for line in re.sub(r"\n +", " ", text).splitlines():
        head, _, meaning = line.partition("  ")
        is_optional = head.startswith("[")
        *names, last = head.strip("[]").replace(",", "").split()
        more: dict[str, Any] = {"help": meaning.strip()}
        if default := re.search(r"\(default: (\S+)\)$", meaning):
            more["default"] = default[1]
        if last.startswith("-"):  # a flag: no value follows
            more["action"] = "count" if last == "-v" else "store_true"
        else:
            metavar = last.removesuffix("...")
            more["metavar"] = metavar
            if metavar != last:
                more |= {"action": "append", "default": []}
            if metavar == "N":
                more["type"] = int
            elif metavar.islower():
                more["choices"] = metavar.split("|")
            elif "/VARIANT" in metavar:
                more["type"] = value_of("MAPPING", "platforms")
        if "--config" in names:
            more["required"] = not is_optional
        elif not names:
            names = [last.lower()]
            more |= {"nargs": "?"} if is_optional else {}
        parser.add_argument(*names, **more)


def add_tag_options(parser: Parser) -> None:
    """Add an option for each key of the section `tags` that a listing can heed."""
    from _regsync.config import TAGS, parse_count, parse_positive, schema

    described = schema()["$defs"]["tags"]["properties"]
    for key, field in TAGS.keys.items():
        if key == "immutable_tags":
            continue
        more: dict[str, Any] = {"help": described[key]["description"]}
        if field.item:
            more = {"help": f"{more['help']}; may be repeated", "action": "append", "default": []}
        is_count = field.parse in (parse_count, parse_positive)
        more["metavar"] = "|".join(field.choices) or ("N" if is_count else "PATTERN")
        parser.add_argument(f"--{key.replace('_', '-')}", type=value_of("TAGS", key), **more)


def value_of(section: str, key: str) -> Callable[[str], object]:
    """Return the parser of an option that takes what a key of the configuration takes."""

    def parse(text: str) -> object:
        from _regsync import config  # imported late, because most commands need no such option

        try:
            field = getattr(config, section).keys[key]
            return (field.item or field).parse_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


# Running.


def main(argv: Sequence[str], closed_reason: str = "") -> int:
    """Run one command, on an event loop of its own if it needs one. Returns the exit status.

    `closed_reason` is the reason why the FIPS gate is closed. It is empty if the gate holds or if
    this build has no gate.
    """
    with edge.using(process_edge()):
        console = console_for(argv)
        try:
            outcome = begin(argv, closed_reason, console)
            if isinstance(outcome, int):
                return outcome
            from _regsync.app.environment import run_async

            return run_async(outcome)
        except (Exception, KeyboardInterrupt) as error:
            return report_error(console, error)


async def run(argv: Sequence[str], closed_reason: str = "") -> int:
    """Run one command on the event loop of the caller, like `main`."""
    console = console_for(argv)
    try:
        outcome = begin(argv, closed_reason, console)
        if isinstance(outcome, int):
            return outcome
        return await outcome()
    except (Exception, KeyboardInterrupt) as error:
        return report_error(console, error)


def console_for(argv: Sequence[str]) -> Console:
    """Return the console that shows the errors of the command line, and then those of the command.

    These two options decide how an error of the parser is shown, so they are looked for before.
    """
    logs_json = "--log-format json" in " ".join(argv).replace("=", " ")
    return Console(writes_json="--json" in argv, logs_json=logs_json)


def begin(argv: Sequence[str], closed_reason: str, console: Console) -> commands.Outcome:
    """Parse the command line and run the command. Returns its exit status, or the work that is left
    to do on an event loop.
    """
    forget_all_secrets()  # of an earlier command in this process
    arguments = parse_arguments(argv)
    console.configure(
        log_level(arguments), shows_progress=not (arguments.q or arguments.no_progress)
    )
    if closed_reason and arguments.command not in ("schema", "version"):
        raise ConfigError(closed_reason, hint=fips.remedy())
    arguments.closed_reason = closed_reason  # `version` prints it
    outcome: commands.Outcome = getattr(commands, f"run_{arguments.command}")(arguments, console)
    return outcome


def log_level(arguments: argparse.Namespace) -> str:
    """Return the lowest level of log lines to show."""
    if arguments.q:
        return "error"
    if arguments.v is None:
        return "info" if arguments.command == "watch" else "warning"
    return "debug" if arguments.v == 1 else "trace"


def report_error(console: Console, error: BaseException) -> int:
    """Show the error that ended a command, unless it is a broken pipe. Returns the exit status."""
    # A task group raises an exception group. Report its first exception.
    while members := getattr(error, "exceptions", None):
        error = members[0]
    if isinstance(error, KeyboardInterrupt):
        return 130
    # An invalid configuration or command line is no defect of this program.
    if console.shows("trace") and not isinstance(error, ConfigError):
        console.show_traceback(error)

    if isinstance(error, RegsyncError):
        reported = error
    else:
        message = f"{type(error).__name__}: {printable(str(error))}"
        hint = "report this defect, with the output of a run with -vv"
        reported = RegsyncError(message, hint=hint)

    # Do not show a broken pipe: the reader has closed it on purpose, as `head` does.
    if not isinstance(error, BrokenPipeError):
        try:
            console.show_error(reported)
        except (OSError, RegsyncError):
            pass  # standard output takes no document: the line on standard error is all

    # Compare codes, because errors of other classes can have AuthError's code, such as a
    # RegistryError about a 401.
    if reported.code == AuthError.code:
        return AuthError.exit_status
    return reported.exit_status


# The edge of this process: its sockets, clock, environment and threads.


def process_edge() -> edge.Edge:
    return edge.Edge(connect, start_tls, time.time, random_fraction, in_thread, os.environ)


async def connect(host: str, port: int) -> Any:
    from _regsync.net import dial  # imported late, because most commands connect to nothing

    return await dial.connect(host, port)


async def start_tls(stream: Any, context: ssl.SSLContext, host: str) -> Any:
    from _regsync.net import dial

    return await dial.handshake(stream, context, host)


def random_fraction() -> float:
    """Return a random number from 0 to 1, without 1. The module `random` takes long to import."""
    return int.from_bytes(os.urandom(6), "big") / 2**48


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    from _regsync.net import dial

    return await dial.in_thread(function, *arguments)
