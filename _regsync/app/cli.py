"""The command line: arguments, help, errors, and the exit status.

Owns: what each command takes, and what its end means for the shell.
May not know: what a command does with its arguments.
Invariants: every error ends in one line and one exit status; no traceback without `-vv`.
Follows: docs/design.md section 2.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from _regsync.app import commands
from _regsync.app.console import Console, terminal_size
from _regsync.errors import AuthError, ConfigError, RegsyncError
from _regsync.files import null_output
from _regsync.fips import REMEDY
from _regsync.text import mask_unless_word, printable, reason_of

if TYPE_CHECKING:
    from _regsync.config.fields import Field

# Errors of a write to our output: a full disk, a quota, a reader that left. Our own files raise
# errors of other classes.
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

# What the help of an option calls the value of a configuration field of this type.
METAVARS = {
    "count": "N",
    "text": "RANGE",
    "one_or_texts": "PATTERN",
    "all_or_texts": "OS/ARCH[/VARIANT]",
}


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are ours: one line, and the hint where help is."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see `{self.prog} --help`")


class Command(NamedTuple):
    """One command: what it says of itself, what it takes, and what runs it."""

    summary: str
    statuses: str  # the exit statuses that it can end with, for its help
    examples: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace, Console], int]
    own_statuses: Mapping[str, str] = MappingProxyType({})  # those that mean something else here
    asks_registries: bool = True


# Arguments


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ConfigError for one that no command takes."""
    name, words = split_command(argv)
    if name is None and "--version" in words:
        words.remove("--version")
        name = "version"
    if name is None:
        parser = program_parser()
    elif name in COMMANDS:
        parser = command_parser(name, COMMANDS[name])
    else:
        import difflib  # for this error alone

        near = difflib.get_close_matches(name[:64], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see `regsync --help`"
        raise ConfigError(f"there is no command {mask_unless_word(name)!r}", hint=hint)

    arguments, unknown = parser.parse_known_args(words, argparse.Namespace(command=name))
    if unknown:
        # An unknown word may be a secret, or an option with a secret behind its `=`.
        shown = [word.partition("=")[0] if word.startswith("-") else "***" for word in unknown]
        parser.error(f"unrecognized arguments: {' '.join(shown)}")
    if name is None:
        raise ConfigError("a command is needed", hint="see `regsync --help`")
    return arguments


def split_command(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the name of the command, None where there is none, and all other words.

    Options may stand before the command: its name is the first word that is neither an option nor an
    option's value.
    """
    options_with_value = ("--log-format", "-c", "--config")
    previous = ""
    for place, word in enumerate(argv):
        if not word.startswith("-") and previous not in options_with_value:
            return word, [*argv[:place], *argv[place + 1 :]]
        previous = word
    return None, [*argv]


def program_parser() -> Parser:
    """Return the parser of a command line without a command: it has help, and nothing to run."""
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
    """Return the parser of one command."""
    epilog = [
        "examples:",
        *(f"  {line}".rstrip() for line in command.examples.splitlines()),
        "",
        "exit status:",
        statuses_of(command),
    ]
    parser = make_parser(f"regsync {name}", command.summary, epilog)
    command.add_arguments(parser)
    add_global_arguments(parser, asks_registries=command.asks_registries)
    return parser


def statuses_of(command: Command) -> str:
    """Return the lines of `STATUSES` that a command can end with, with its own meanings."""
    meanings = dict(line.split(maxsplit=1) for line in STATUSES.splitlines())
    meanings |= command.own_statuses
    return "\n".join(f"  {number:<5}{meanings[number]}" for number in command.statuses.split())


def make_parser(prog: str, description: str, epilog: Sequence[str]) -> Parser:
    """Return a parser without arguments; its help ends with the lines of `epilog`."""
    return Parser(
        prog=prog,
        description=description,
        epilog="\n".join(epilog),
        # `--jso` would count as --json here, but not in `main`, which looks at the words themselves.
        allow_abbrev=False,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=help_width()),
    )


def help_width() -> int:
    """Return the columns that help may take, the same that argparse would take by itself."""
    # To learn them argparse imports `shutil` and three compressors, for every command line.
    variable = os.environ.get("COLUMNS", "")
    if variable.isdecimal() and int(variable) > 0:
        return int(variable) - 2
    columns, _ = terminal_size(sys.stdout)
    return columns - 2


def add_global_arguments(parser: Parser, *, asks_registries: bool) -> None:
    """Add what every command takes. The help of one that asks no registry leaves out the options about
    requests and progress.
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
    """Take a configuration as FILE, or as other commands do with -c."""
    forms = parser.add_mutually_exclusive_group(required=True)
    meaning = "the configuration; - reads standard input"
    # Both set `file`. A default of one would replace the value that the other was given.
    none = argparse.SUPPRESS
    forms.add_argument("file", metavar="FILE", nargs="?", default=none, help=meaning)
    forms.add_argument("-c", "--config", dest="file", metavar="FILE", default=none, help=meaning)


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


def add_field(parser: Parser, option: str, field: Field, meaning: str) -> None:
    """Add an option that takes what a field of the configuration takes, of a list one value."""
    is_list = field.type in ("one_or_texts", "all_or_texts")
    parser.add_argument(
        option,
        action="append" if is_list else "store",
        metavar="|".join(field.choices) or METAVARS.get(field.type),
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
    from _regsync.config.fields import SECTIONS

    platforms = next(field for field in SECTIONS["mapping"] if field.name == "platforms")
    add_field(parser, "--platform", platforms, "copy only this platform of a multi-platform image")
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


def add_analyze_arguments(parser: Parser) -> None:
    add_config(parser)
    add_locked(parser, "look at what the lock file names, and not at what sources have now")
    add_shard(parser)
    add_json(parser)


def add_lock_arguments(parser: Parser) -> None:
    add_config(parser)
    parser.add_argument(
        "--lock",
        metavar="PATH",
        help="the lock file (default: FILE with .lock as its ending: mirror.lock for mirror.yaml)",
    )
    parser.add_argument(
        "--diff", action="store_true", help="show the changes, and do not write the lock file"
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print the changes to standard output as a table in Markdown",
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
        metavar="N",
        type=int,
        default=0,
        help="download N blobs of each target, chosen at random, and check their bytes",
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
    from _regsync.config.fields import SECTIONS

    for field in SECTIONS["tags"]:
        if field.name != "immutable_tags":  # it is about a target, and there is none
            add_field(parser, f"--{field.name.replace('_', '-')}", field, field.meaning)
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
    parser.usage = (
        "%(prog)s check -c FILE [options]"  # argparse would put `check` behind the options
    )
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


def main(argv: Sequence[str], closed: str = "") -> int:
    """Run one command and return its exit status.

    `closed` says why the FIPS gate is closed; it is empty where the gate holds or there is none.
    """
    # An error in the command line is shown in the form that it asks for, so these two are found
    # without a parser.
    writes_json = "--json" in argv
    logs_json = "--log-format json" in " ".join(argv).replace("=", " ")
    make_console = partial(
        Console, sys.stdout, sys.stderr, writes_json=writes_json, logs_json=logs_json
    )
    console = make_console(level="warning", shows_progress=False)
    verbosity = 0
    try:
        # Help and the schema are shown all the same.
        asks_for_help = "-h" in argv or "--help" in argv
        if closed and (asks_for_help or argv[:1] == ["schema"]):
            console.log("warning", "gate_closed", closed)
        arguments = parse_arguments(argv)
        verbosity = arguments.v or 0
        console = make_console(
            level=log_level(arguments), shows_progress=not (arguments.q or arguments.no_progress)
        )
        if closed and arguments.command not in ("schema", "version"):
            raise ConfigError(closed, hint=REMEDY)
        arguments.closed = closed  # which `version` shows
        return COMMANDS[arguments.command].run(arguments, console)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # every error of every command is reported here
        if verbosity > 1 and not isinstance(error, ConfigError):
            sys.excepthook(type(error), error, error.__traceback__)
        return report_error(console, error)
    finally:
        if console.has_lost_output:
            discard_lost_output()


def log_level(arguments: argparse.Namespace) -> str:
    """Return the lowest level whose lines are shown."""
    if arguments.q:
        return "error"
    if not arguments.v:
        return "info" if arguments.command == "watch" else "warning"
    return "debug" if arguments.v == 1 else "trace"


def discard_lost_output() -> None:
    """Replace each stream that takes nothing any more: the interpreter's last flush would fail."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, null_output())


def report_error(console: Console, error: BaseException) -> int:
    """Report the error that ended a command, in one line; return the exit status."""
    # A task group raises an exception group. Its first exception is reported.
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

    # A broken pipe is not reported: the reader of the output has left.
    if not isinstance(error, BrokenPipeError):
        try:
            console.show_error(reported)
        except OSError:
            pass  # standard error cannot be written either: only the exit status is left

    # Errors of other classes may have AuthError's code, and then its exit status.
    if reported.code == AuthError.code:
        return AuthError.exit_status
    return reported.exit_status


COMMANDS: Mapping[str, Command] = {
    "copy": Command(
        "copy one image, with its signatures and SBOMs, to another registry",
        "0 1 2 3 4 130",
        """\
regsync copy docker.io/library/alpine:3.20 registry.example.com/base/alpine
regsync copy quay.io/org/app@sha256:... localhost:5000/app:pinned
regsync copy --platform linux/amd64 ghcr.io/org/app:v1 localhost:5000/app

A reference is HOST[:PORT]/REPO[:TAG|@DIGEST]; without a host it means Docker Hub. HTTPS is used except for
localhost and loopback addresses; http:// or https:// before the host overrides that.
oci-layout:PATH//REPO[:TAG|@DIGEST] is an image in a directory, for disks that are carried into closed networks.
Signatures, SBOMs and attestations are found by the referrers API, its fallback tag, and cosign's tags of the image.""",
        add_copy_arguments,
        commands.run_copy,
    ),
    "sync": Command(
        "copy what a configuration selects, once",
        "0 1 2 3 4 130",
        """\
regsync sync -c mirror.yaml
regsync sync -c mirror.yaml --dry-run
regsync sync -c mirror.yaml --recheck
regsync sync -c mirror.yaml --json >report.json
regsync sync -c mirror.yaml --retry-from report.json""",
        add_sync_arguments,
        commands.run_sync,
    ),
    "watch": Command(
        "copy what a configuration selects, again and again, as a service",
        "0 2 3",
        """\
regsync watch -c mirror.yaml --interval 1h --json >>cycles.jsonl

A changed configuration is read before the next cycle; SIGHUP begins one at once. Only changes are shown.""",
        add_watch_arguments,
        commands.run_watch,
        {"0": "stopped by SIGINT or SIGTERM", "2": "an unexpected error"},
    ),
    "analyze": Command(
        "show how large the selected images are, what they share, and the bytes and requests of a run",
        "0 1 2 3 4 130",
        """\
regsync analyze -c mirror.yaml

It prints the number of images and blobs, their size with each blob once, how much a run would send to each target,
how many requests each registry would get, and the largest images and layers. For this the manifests of all selected
images are read, unchanged ones too, and targets are asked what they have. Nothing is changed. To see what the next
run does with each image, use `sync --dry-run`.""",
        add_analyze_arguments,
        commands.run_analyze,
    ),
    "lock": Command(
        "pin the digest of each selected tag in a file, for review",
        "0 1 2 3 4 130",
        """\
regsync lock -c mirror.yaml
regsync lock -c mirror.yaml --diff --markdown
regsync lock -c mirror.yaml --only library/alpine
regsync lock -c mirror.yaml --recheck
regsync sync -c mirror.yaml --locked

Only sources are asked. A mapping that fails keeps its old lines.""",
        add_lock_arguments,
        commands.run_lock,
        {"0": "nothing failed, with or without changes"},
    ),
    "audit": Command(
        "check that targets hold what they should hold",
        "0 1 2 3 130",
        """\
regsync audit -c mirror.yaml
regsync audit -c mirror.yaml --read 20 --json >audit.json
regsync audit -c mirror.yaml --locked --receipt there.txt

Every tag, manifest, blob and artifact is asked for, and nothing is written to any registry. Without --locked the
targets are compared with what the sources have now. A tag that only a target has is no finding. Findings are:

missing           the target has no such tag
differs           the tag names another digest at the target
incomplete        a manifest or blob of the image is missing
artifact_missing  a signature, SBOM or attestation is missing
corrupt           what is there does not have the bytes or the length of its digest""",
        add_audit_arguments,
        commands.run_audit,
        {
            "0": "all is there and right",
            "1": "there are findings",
            "2": "something could not be checked, or an unexpected error",
        },
    ),
    "tags": Command(
        "list the tags of a repository that a rule or a configuration selects",
        "0 2 3 4 130",
        """\
regsync tags -v -c mirror.yaml docker.io/library/alpine
regsync tags -v -c mirror.yaml ghcr.io/org/app
regsync tags alpine --glob '3.*.*' --exclude '*[-_]*' --sort semver --latest 3
regsync tags quay.io/org/app --semver '>=1.2,<3' --latest 5

The options are the keys of `tags` in a configuration. -v says why other tags are left out.""",
        add_tags_arguments,
        commands.run_tags,
    ),
    "auth": Command(
        "check that the credentials have the rights that a configuration needs",
        "0 2 3 4 130",
        """\
regsync auth check -c mirror.yaml

Each source and target repository of the mappings is asked for its tags. In each target repository that exists, an
upload is also begun and cancelled, so that nothing is stored. A login that may only read from targets is therefore
an error here, even if it is enough for `audit`.""",
        add_auth_arguments,
        commands.run_auth,
        {
            "0": "nothing that is needed is missing",
            "2": "an unexpected error",
            "4": "something that is needed is missing, or a registry did not answer",
        },
    ),
    "report": Command(
        "show the JSON report of a run as text, Markdown, JUnit or HTML",
        "0 3",
        """\
regsync report run.json
regsync report run.json --to markdown >>"$GITHUB_STEP_SUMMARY"
regsync report run.json --to html >run.html

The report is what `sync --json` or `copy --json` has written (`audit --json` writes another document). No registry
is asked.""",
        add_report_arguments,
        commands.run_report,
        {
            "0": "the report was shown, whatever failed in the run",
            "3": "FILE is not a report, the command line is invalid, or the FIPS gate is closed",
        },
        asks_registries=False,
    ),
    "validate": Command(
        "check a configuration",
        "0 3",
        """\
regsync validate mirror.yaml
regsync validate - <mirror.yaml""",
        add_config_file,
        commands.run_validate,
        {"0": "the configuration is valid"},
        asks_registries=False,
    ),
    "expand": Command(
        "print a configuration with variables and defaults filled in",
        "0 3",
        "regsync expand mirror.yaml",
        add_expand_arguments,
        commands.run_expand,
        {"0": "the configuration is valid, and was printed"},
        asks_registries=False,
    ),
    "schema": Command(
        "print the JSON Schema of the configuration",
        "0 3",
        """\
regsync schema >regsync.schema.json

Editors complete a configuration that begins with
# yaml-language-server: $schema=regsync.schema.json""",
        add_schema_arguments,
        commands.run_schema,
        {"0": "the schema was printed", "3": "the command line is invalid"},
        asks_registries=False,
    ),
    "version": Command(
        "show which build this is, and what it runs on",
        "0 3",
        """\
regsync version --json
regsync version --sbom >regsync.cdx.json

It also runs where the FIPS gate is closed, and says why. Only a built file has an inventory, a checkout has none.""",
        add_version_arguments,
        commands.run_version,
        {
            "0": "the version was printed, whether the FIPS gate holds or not",
            "3": "the command line is invalid, or there is no inventory",
        },
        asks_registries=False,
    ),
}
