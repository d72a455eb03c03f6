"""Parse the command line, run the command, and turn every error into an exit status.

Owns: the arguments, help and exit statuses of each command.
May not know: what a command does with its arguments.
Invariants: every error is reported in one line and has one exit status. Without `-vv` there is no
traceback.
Follows: docs/design.md section 2.
"""

from __future__ import annotations

import argparse
import errno
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from _regsync import edge
from _regsync.app import commands
from _regsync.app.commands import Outcome
from _regsync.app.console import Console, terminal_columns
from _regsync.app.process import process_edge
from _regsync.errors import AuthError, ConfigError, RegsyncError
from _regsync.files import null_output
from _regsync.fips import REMEDY
from _regsync.text import mask_unless_word, printable, reason_of

if TYPE_CHECKING:
    from _regsync.config import Field

# The errors of a write to standard output or standard error: a full disk, an exceeded quota, a
# reader that has closed its pipe. The same errors on other files arrive here as a RegsyncError.
LOST_OUTPUT = frozenset(
    {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EAGAIN}
)

STATUSES = """\
  0    nothing failed, even if there was nothing to do
  1    something failed, but not everything
  2    everything failed, or an unexpected error
  3    the configuration or command line is invalid, or the FIPS gate is closed; nothing was attempted
  4    everything failed, and every failure is about authentication or authorisation
  130  interrupted by SIGINT, 143 by SIGTERM, with work left undone
"""

# The keys of the section `tags` that are options, and the names of their values in help. An empty
# name stands for the choices.
TAG_OPTIONS = {
    "glob": "PATTERN",
    "exclude": "PATTERN",
    "semver": "RANGE",
    "semver_prerelease": "",
    "sort": "",
    "latest": "N",
    "min_tags": "N",
}

# Old commands and options -> what to do instead. An option follows its command; its N is a number.
GONE = {
    "analyze": "`sync --dry-run` shows how many images and bytes a run would move, and what it would mount",
    "lock --diff": "`lock --check` shows the changes and does not write the lock file",
    "lock --markdown": "`lock` prints a line for each change",
    "audit --read N": "`--read` takes no number, and reads all blobs; `--shard` takes a part of the mappings",
}

# Characters of an unknown command that are compared with the commands. The comparison of long texts
# takes quadratic time.
LONGEST_COMPARED = 64


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see `{self.prog} --help`")


class Command(NamedTuple):
    """The help, the arguments and the function of one command."""

    summary: str
    statuses: str  # the exit statuses that the command can return, separated by blanks
    examples: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace, Console], Outcome]
    # Exit status -> its meaning for this command, if that differs from STATUSES.
    own_statuses: Mapping[str, str] = MappingProxyType({})
    asks_registries: bool = True  # False if the command only reads and writes local files


# Arguments


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. The returned `command` is the name of the command.

    Raises ConfigError if there is no command, if the command does not exist, or if it does not
    accept its arguments. Exits if the command line asks for help.
    """
    name, words = split_command(argv)
    if name is None and "--version" in words:
        words.remove("--version")
        name = "version"
    if name is not None:
        check_is_not_gone(name, words)
        if name not in COMMANDS:
            raise unknown_command_error(name)

    # Without a command, the options are parsed all the same, because one of them may be `--help`.
    parser = program_parser() if name is None else command_parser(name, COMMANDS[name])
    arguments, unknown = parser.parse_known_args(words, argparse.Namespace(command=name))
    if unknown:
        # An unknown word, or the value after an option's `=`, may be a secret.
        shown = [word.partition("=")[0] if word.startswith("-") else "***" for word in unknown]
        parser.error(f"unrecognized arguments: {' '.join(shown)}")
    if name is None:
        raise ConfigError("a command is needed", hint="see `regsync --help`")
    return arguments


def check_is_not_gone(name: str, words: Sequence[str]) -> None:
    """Raise ConfigError if the command, or one of its options in `words`, is one of GONE."""
    text = f" {' '.join(words)} ".replace("=", " ")
    for old, instead in GONE.items():
        command, _, option = old.partition(" ")
        pattern = f" {option.replace('N', '[0-9]+')} "
        if command == name and (not option or re.search(pattern, text)):
            raise ConfigError(f"`{old}` is gone: {instead}")


def unknown_command_error(name: str) -> ConfigError:
    import difflib  # only needed for this error

    similar_names = difflib.get_close_matches(name[:LONGEST_COMPARED], COMMANDS, n=1)
    hint = f"did you mean {similar_names[0]!r}?" if similar_names else "see `regsync --help`"
    return ConfigError(f"there is no command {mask_unless_word(name)!r}", hint=hint)


def split_command(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the name of the command and all other words. The name is None if there is no command.

    The name is the first word that is neither an option nor the value of an option.
    """
    # The options that may precede the command and are followed by a value.
    options_with_value = ("--log-format", "-c", "--config")
    previous_word = ""
    for index, word in enumerate(argv):
        is_option = word.startswith("-")
        is_value_of_option = previous_word in options_with_value
        if not is_option and not is_value_of_option:
            return word, [*argv[:index], *argv[index + 1 :]]
        previous_word = word
    return None, list(argv)


def program_parser() -> Parser:
    """Create the parser for a command line without a command, such as `regsync --help`."""
    commands_list = [f"  {name:<9} {command.summary}" for name, command in COMMANDS.items()]
    epilog = [
        "commands (`regsync COMMAND --help` has the options and exit statuses of each):",
        *commands_list,
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
    parser.add_argument("--version", action="store_true", help="the same as the command `version`")
    add_global_arguments(parser, asks_registries=True)
    return parser


def command_parser(name: str, command: Command) -> Parser:
    """Create the parser for one command."""
    epilog = [
        "examples:",
        *(f"  {line}".rstrip() for line in command.examples.splitlines()),
        "",
        "exit status:",
        describe_statuses(command),
    ]
    parser = make_parser(f"regsync {name}", command.summary, epilog)
    command.add_arguments(parser)
    add_global_arguments(parser, asks_registries=command.asks_registries)
    return parser


def describe_statuses(command: Command) -> str:
    """Return a line of help for each exit status that a command can return."""
    meanings = dict(line.split(maxsplit=1) for line in STATUSES.splitlines())  # by exit status
    meanings |= command.own_statuses
    return "\n".join(f"  {status:<5}{meanings[status]}" for status in command.statuses.split())


def make_parser(prog: str, description: str, epilog: Sequence[str]) -> Parser:
    """Create a parser without arguments. `epilog` has the last lines of its help."""
    return Parser(
        prog=prog,
        description=description,
        epilog="\n".join(epilog),
        # `main` looks for `--json` in the words of the command line, so it must not be abbreviated.
        allow_abbrev=False,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=help_width()),
    )


def help_width() -> int:
    """Return the width of help in columns, as argparse would compute it.

    argparse itself would import `shutil` and three compression modules for this, on every start.
    """
    columns = terminal_columns(sys.stdout)
    variable = edge.current().environ.get("COLUMNS", "")
    if variable.isdecimal() and int(variable) > 0:
        columns = int(variable)
    return columns - 2  # the margin of argparse


def add_global_arguments(parser: Parser, *, asks_registries: bool) -> None:
    """Add the options of all commands.

    If the command asks no registries, the options about requests and progress are accepted, but its
    help does not show them.
    """
    verbose_help = "show decisions and retries; -vv: also every request"
    no_progress_help = "do not show progress"
    if not asks_registries:
        verbose_help = argparse.SUPPRESS
        no_progress_help = argparse.SUPPRESS
    parser.add_argument("-v", action="count", help=verbose_help)
    parser.add_argument(
        "-q", action="store_true", help="show only results and failures, no warnings"
    )
    parser.add_argument(
        "--log-format",
        metavar="text|json",
        choices=["text", "json"],
        help="format of the lines on standard error (default: text)",
    )
    parser.add_argument("--no-progress", action="store_true", help=no_progress_help)


def add_config(
    parser: Parser,
    meaning: str = "the configuration; - reads standard input",
    *,
    required: bool = True,
) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", required=required, help=meaning)


def add_config_file(parser: Parser) -> None:
    """Add a required configuration, either as the argument FILE or as the option -c."""
    forms = parser.add_mutually_exclusive_group(required=True)
    meaning = "the configuration; - reads standard input"
    # Both forms set `file`. The default of the absent form must not overwrite the value of the
    # other.
    no_default = argparse.SUPPRESS
    forms.add_argument("file", metavar="FILE", nargs="?", default=no_default, help=meaning)
    forms.add_argument(
        "-c", "--config", dest="file", metavar="FILE", default=no_default, help=meaning
    )


def add_json(parser: Parser, meaning: str = "write one JSON document to standard output") -> None:
    parser.add_argument("--json", action="store_true", help=meaning)


def add_shard(parser: Parser) -> None:
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="run only part I (0 to N-1) of the mappings in N parts; "
        "/N takes I from JOB_COMPLETION_INDEX",
    )


def add_locked(
    parser: Parser, meaning: str = "copy what the lock file names, and nothing else"
) -> None:
    parser.add_argument("--locked", action="store_true", help=meaning)
    parser.add_argument(
        "--lock",
        metavar="PATH",
        help="the lock file; implies --locked (default: FILE with .lock as its ending:"
        " mirror.lock for mirror.yaml)",
    )


def add_field(parser: Parser, option: str, field: Field, metavar: str, meaning: str) -> None:
    """Add an option for a field of the configuration. An option for a list may be repeated."""
    is_list = field.takes_list
    parser.add_argument(
        option,
        action="append" if is_list else "store",
        metavar=metavar or "|".join(field.choices),
        type=partial(parse_value, field),
        default=[] if is_list else None,
        help=meaning + ("; may be repeated" if is_list else ""),
    )


def parse_value(field: Field, text: str) -> object:
    try:
        return field.parse_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_copy_arguments(parser: Parser) -> None:
    from _regsync.config import MAPPING

    meaning = "copy only this platform of a multi-platform image"
    add_field(parser, "--platform", MAPPING.keys["platforms"], "OS/ARCH[/VARIANT]", meaning)
    parser.add_argument("src", metavar="SRC", help="the image to copy (default tag: latest)")
    parser.add_argument("dst", metavar="DST", help="where to copy it (default tag: that of SRC)")
    parser.add_argument(
        "--no-artifacts",
        action="store_true",
        help="leave signatures, SBOMs and attestations behind",
    )
    meaning = "a configuration to take registries and global settings from; - reads standard input"
    add_config(parser, meaning, required=False)
    add_json(parser)


def add_sync_arguments(parser: Parser) -> None:
    add_config(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show what a run would do, and change nothing"
    )
    parser.add_argument(
        "--recheck",
        action="store_true",
        help="look again for the signatures and SBOMs of all images, at source and targets; in an"
        " image layout also look for files that it has lost",
    )
    parser.add_argument(
        "--retry-from",
        metavar="REPORT",
        help="copy only what failed or was left undone in a report that --json wrote",
    )
    add_locked(parser)
    add_shard(parser)
    add_json(parser)


def add_watch_arguments(parser: Parser) -> None:
    add_config(parser, "the configuration file")
    add_locked(parser)
    add_shard(parser)
    add_json(parser, "write a line of JSON after each cycle")
    parser.add_argument(
        "--interval",
        metavar="DURATION",
        help=f"time from the end of a cycle to the next (default: {commands.DEFAULT_INTERVAL})",
    )
    parser.add_argument(
        "--health-bind",
        metavar="ADDR",
        help=f"address for health probes (default: {commands.DEFAULT_HEALTH_ADDRESS})",
    )
    parser.add_argument(
        "--health-port",
        metavar="N",
        type=int,
        help=f"port for health probes (default: {commands.DEFAULT_HEALTH_PORT})",
    )


def add_lock_arguments(parser: Parser) -> None:
    add_config(parser)
    parser.add_argument(
        "--lock",
        metavar="PATH",
        help="the lock file (default: FILE with .lock as its ending: mirror.lock for mirror.yaml)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="show what has come, moved or gone, and do not write the lock file",
    )
    parser.add_argument(
        "--only",
        metavar="FROM",
        action="append",
        default=[],
        help="update only mappings with this `from` (without the host), and keep all other lines; may be"
        " repeated",
    )
    parser.add_argument(
        "--recheck",
        action="store_true",
        help="also look for new signatures and SBOMs of images that have not moved; without it, their"
        " lines stay as they are",
    )
    add_json(parser)


def add_audit_arguments(parser: Parser) -> None:
    add_config(parser)
    add_locked(parser, "expect at targets what the lock file names, and contact no source")
    parser.add_argument(
        "--read",
        action="store_true",
        help="download all blobs of the targets, and check their bytes",
    )
    parser.add_argument(
        "--receipt",
        metavar="FILE",
        help="write a line DIGEST HOST/REPOSITORY for each manifest and blob that is there: a list for `assume`,"
        " which leaves these out of a disk for a closed network",
    )
    add_shard(parser)
    add_json(parser)


def add_tags_arguments(parser: Parser) -> None:
    from _regsync.config import TAGS, schema

    described = schema()["$defs"]["tags"]["properties"]
    for key, metavar in TAG_OPTIONS.items():
        option = f"--{key.replace('_', '-')}"
        add_field(parser, option, TAGS.keys[key], metavar, described[key]["description"])
    parser.add_argument(
        "repo",
        metavar="REPO",
        help="[http://]HOST[:PORT]/REPO, with -c too; without a host: Docker Hub",
    )
    meaning = (
        "a configuration to take registries and global settings from; without options for a rule, also the"
        " rules of the mappings that copy from REPO; - reads standard input"
    )
    add_config(parser, meaning, required=False)
    add_json(parser)


def add_auth_arguments(parser: Parser) -> None:
    # argparse would show `check` after the options.
    parser.usage = "%(prog)s check -c FILE [options]"
    parser.add_argument(
        "check",
        metavar="check",
        choices=["check"],
        help="try the rights in each source and target repository of the mappings",
    )
    add_config(parser)
    add_json(parser)


def add_expand_arguments(parser: Parser) -> None:
    add_config_file(parser)
    parser.add_argument(
        "--show-secrets", action="store_true", help="print passwords and tokens in plain text"
    )


def add_report_arguments(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="the JSON report; - reads standard input")
    parser.add_argument(
        "--to",
        metavar="text|markdown|junit|html",
        choices=["text", "markdown", "junit", "html"],
        default="text",
        help="the format to write (default: text)",
    )


def add_schema_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--report", action="store_true", help="print the schema of what --json writes instead"
    )


def add_version_arguments(parser: Parser) -> None:
    add_json(parser)
    parser.add_argument(
        "--sbom", action="store_true", help="print an inventory of the file (CycloneDX)"
    )


# Running


class Invocation:
    """One command line: the console that its options ask for, and the exit status that its command
    gives, or the error that ends it.

    `closed_reason` is the reason why the FIPS gate is closed. It is empty if the gate holds or if
    this build has no gate.
    """

    def __init__(self, argv: Sequence[str], closed_reason: str) -> None:
        self.status = 0
        self._argv = argv
        self._closed_reason = closed_reason
        self._shows_traceback = False
        # Look for these two options before parsing, because they decide how an error of the parser
        # is shown.
        self._make_console = partial(
            Console,
            writes_json="--json" in argv,
            logs_json="--log-format json" in " ".join(argv).replace("=", " "),
        )
        # Until the other options have been parsed, a console with their defaults shows the errors.
        self._console = self._make_console(level="warning", shows_progress=False)

    def begin(self) -> Outcome:
        """Parse the command line and run the command. Returns its exit status, or the work that is
        left to do on an event loop.
        """
        argv = self._argv
        closed_reason = self._closed_reason
        # Help and the schema are shown although the gate is closed, with this warning.
        asks_for_help = "-h" in argv or "--help" in argv
        if closed_reason and (asks_for_help or argv[:1] == ["schema"]):
            self._console.log("warning", "gate_closed", closed_reason)
        arguments = parse_arguments(argv)
        self._shows_traceback = (arguments.v or 0) >= 2
        self._console = self._make_console(
            level=log_level(arguments), shows_progress=not (arguments.q or arguments.no_progress)
        )
        if closed_reason and arguments.command not in ("schema", "version"):
            raise ConfigError(closed_reason, hint=REMEDY)
        arguments.closed_reason = closed_reason  # `version` prints it
        return COMMANDS[arguments.command].run(arguments, self._console)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report the error that ends the block, and set the exit status accordingly."""
        try:
            yield
        except KeyboardInterrupt:
            self.status = 130
        except Exception as error:
            # An invalid configuration or command line is no defect of this program.
            if self._shows_traceback and not isinstance(error, ConfigError):
                sys.excepthook(type(error), error, error.__traceback__)
            self.status = report_error(self._console, error)
        finally:
            if self._console.has_lost_output:
                discard_lost_output()


def main(argv: Sequence[str], closed_reason: str = "") -> int:
    """Run one command, on an event loop of its own if it needs one. Returns the exit status."""
    with edge.using(process_edge()):
        invocation = Invocation(argv, closed_reason)
        with invocation.reporting():
            outcome = invocation.begin()
            if not isinstance(outcome, int):
                from _regsync.app.environment import run_async

                outcome = run_async(outcome)
            invocation.status = outcome
    return invocation.status


async def run(argv: Sequence[str], closed_reason: str = "") -> int:
    """Run one command on the event loop of the caller. Returns the exit status."""
    invocation = Invocation(argv, closed_reason)
    with invocation.reporting():
        outcome = invocation.begin()
        if not isinstance(outcome, int):
            from _regsync.app.environment import private_files

            with private_files():
                outcome = await outcome()
        invocation.status = outcome
    return invocation.status


def log_level(arguments: argparse.Namespace) -> str:
    """Return the lowest level of log lines to show."""
    if arguments.q:
        return "error"
    if arguments.v is None:
        return "info" if arguments.command == "watch" else "warning"
    return "debug" if arguments.v == 1 else "trace"


def discard_lost_output() -> None:
    """Replace standard output and standard error if they can no longer be written to.

    Otherwise the interpreter would report an error when it flushes them at exit.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, null_output())


def report_error(console: Console, error: BaseException) -> int:
    """Show the error that ended a command, unless it is a broken pipe. Returns the exit status.

    If the error is that of a write to standard output or standard error, `console.has_lost_output`
    is set.
    """
    # A task group raises an exception group. Report its first exception.
    while members := getattr(error, "exceptions", None):
        error = members[0]

    if isinstance(error, RegsyncError):
        reported = error
    elif isinstance(error, OSError) and error.errno in LOST_OUTPUT:
        console.has_lost_output = True
        reason = reason_of(error)
        reported = RegsyncError(f"the output of this command cannot be written: {reason}")
    else:
        message = f"{type(error).__name__}: {printable(str(error))}"
        hint = "report this defect, with the output of a run with -vv"
        reported = RegsyncError(message, hint=hint)

    # Do not show a broken pipe: the reader has closed it on purpose, as `head` does.
    if not isinstance(error, BrokenPipeError):
        try:
            console.show_error(reported)
        except OSError:
            pass  # standard error is lost too, so that only the exit status can report the error

    # Compare codes, because errors of other classes can have AuthError's code, such as a
    # RegistryError about a 401.
    if reported.code == AuthError.code:
        return AuthError.exit_status
    return reported.exit_status


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
        add_arguments=add_copy_arguments,
        run=commands.run_copy,
    ),
    "sync": Command(
        summary="copy what a configuration selects, once",
        statuses="0 1 2 3 4 130",
        examples="""\
regsync sync -c mirror.yaml
regsync sync -c mirror.yaml --dry-run
regsync sync -c mirror.yaml --recheck
regsync sync -c mirror.yaml --json >report.json
regsync sync -c mirror.yaml --retry-from report.json""",
        add_arguments=add_sync_arguments,
        run=commands.run_sync,
    ),
    "watch": Command(
        summary="copy what a configuration selects, again and again, as a service",
        statuses="0 2 3",
        examples="""\
regsync watch -c mirror.yaml --interval 1h --json >>cycles.jsonl

A changed configuration is read before the next cycle; SIGHUP begins one at once. Only changes are shown.""",
        add_arguments=add_watch_arguments,
        run=commands.run_watch,
        own_statuses={"0": "stopped by SIGINT or SIGTERM", "2": "an unexpected error"},
    ),
    "lock": Command(
        summary="pin the digest of each selected tag in a file, for review",
        statuses="0 1 2 3 4 130",
        examples="""\
regsync lock -c mirror.yaml
regsync lock -c mirror.yaml --check
regsync lock -c mirror.yaml --only library/alpine
regsync lock -c mirror.yaml --recheck
regsync sync -c mirror.yaml --locked

Only sources are asked. A mapping that fails keeps its old lines.""",
        add_arguments=add_lock_arguments,
        run=commands.run_lock,
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
targets are compared with what the sources have now. A tag that only a target has is no finding. Findings are:

missing           the target has no such tag
differs           the tag names another digest at the target
incomplete        a manifest or blob of the image is missing
artifact_missing  a signature, SBOM or attestation is missing
corrupt           what is there does not have the bytes or the length of its digest""",
        add_arguments=add_audit_arguments,
        run=commands.run_audit,
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
regsync tags -v -c mirror.yaml docker.io/library/alpine
regsync tags -v -c mirror.yaml ghcr.io/org/app
regsync tags alpine --glob '3.*.*' --exclude '*[-_]*' --sort semver --latest 3
regsync tags quay.io/org/app --semver '>=1.2,<3' --latest 5

The options are the keys of `tags` in a configuration. -v says why other tags are left out.""",
        add_arguments=add_tags_arguments,
        run=commands.run_tags,
    ),
    "auth": Command(
        summary="check that the credentials have the rights that a configuration needs",
        statuses="0 2 3 4 130",
        examples="""\
regsync auth check -c mirror.yaml

Each source and target repository of the mappings is asked for its tags. In each target repository that exists, an
upload is also begun and cancelled, so that nothing is stored. A login that may only read from targets is therefore
an error here, even if it is enough for `audit`.""",
        add_arguments=add_auth_arguments,
        run=commands.run_auth,
        own_statuses={
            "0": "nothing that is needed is missing",
            "2": "an unexpected error",
            "4": "something that is needed is missing, or a registry did not answer",
        },
    ),
    "report": Command(
        summary="show the JSON report of a run as text, Markdown, JUnit or HTML",
        statuses="0 3",
        examples="""\
regsync report run.json
regsync report run.json --to markdown >>"$GITHUB_STEP_SUMMARY"
regsync report run.json --to html >run.html

The report is what `sync --json` or `copy --json` has written (`audit --json` writes another document). No registry
is asked.""",
        add_arguments=add_report_arguments,
        run=commands.run_report,
        own_statuses={
            "0": "the report was shown, whatever failed in the run",
            "3": "FILE is not a report, the command line is invalid, or the FIPS gate is closed",
        },
        asks_registries=False,
    ),
    "validate": Command(
        summary="check a configuration",
        statuses="0 3",
        examples="""\
regsync validate mirror.yaml
regsync validate - <mirror.yaml""",
        add_arguments=add_config_file,
        run=commands.run_validate,
        own_statuses={"0": "the configuration is valid"},
        asks_registries=False,
    ),
    "expand": Command(
        summary="print a configuration with variables and defaults filled in",
        statuses="0 3",
        examples="regsync expand mirror.yaml",
        add_arguments=add_expand_arguments,
        run=commands.run_expand,
        own_statuses={"0": "the configuration is valid, and was printed"},
        asks_registries=False,
    ),
    "schema": Command(
        summary="print the JSON Schema of the configuration",
        statuses="0 3",
        examples="""\
regsync schema >regsync.schema.json

Editors complete a configuration that begins with
# yaml-language-server: $schema=regsync.schema.json""",
        add_arguments=add_schema_arguments,
        run=commands.run_schema,
        own_statuses={"0": "the schema was printed", "3": "the command line is invalid"},
        asks_registries=False,
    ),
    "version": Command(
        summary="show which build this is, and what it runs on",
        statuses="0 3",
        examples="""\
regsync version --json
regsync version --sbom >regsync.cdx.json

It also runs where the FIPS gate is closed, and says why. Only a built file has an inventory, a checkout has none.""",
        add_arguments=add_version_arguments,
        run=commands.run_version,
        own_statuses={
            "0": "the version was printed, whether the FIPS gate holds or not",
            "3": "the command line is invalid, or there is no inventory",
        },
        asks_registries=False,
    ),
}
