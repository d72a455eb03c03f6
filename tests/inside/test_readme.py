"""README and the user's documents, held to the program: what they show runs, what they name exists.

A new user reads nothing else, so every claim in them that a machine can look at is looked at here:
command lines, options, keys, examples of tag rules, recipes (run between registries), codes, files,
links.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from _regsync.app import cli
from _regsync.app.progress import Progress
from _regsync.config import TAGS
from _regsync.oci import parse_reference
from _regsync.sync.report import schema
from tests.ends import run_regsync
from tests.pages import PAGES_FOR_USERS

TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES_FOR_USERS)
# Without the tables that a program makes.
OWN_WORDS = re.sub(r"(?s)<!-- (reference|measured): begin -->.*?<!-- \1: end -->", "", TEXT)

BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", TEXT)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command."""
    return {name: cli.command_parser(name, cli.COMMANDS[name]) for name in cli.COMMANDS}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def command_lines() -> Iterator[list[str]]:
    """Give each command line, from blocks and from the text, in words and without redirections."""
    lines = [line for language, block in BLOCKS if not language for line in block.splitlines()]
    text = re.sub(r"(?ms)^```.*?^```$", "", TEXT)
    lines += re.findall(r"`(regsync [^`]*)`", text)
    for line in lines:
        words = shlex.split(re.sub(r" [<>].*", "", line.replace("…", "0" * 64)))
        if words and words[0] == "regsync":
            yield words[1:]


# --- command lines
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [*command_lines()], ids=" ".join)
def test_every_command_line_is_understood(words):
    if words == ["COMMAND", "--help"]:
        return
    arguments = cli.parse_arguments(words)
    if arguments.command == "copy" and arguments.src != "SRC":
        assert parse_reference(arguments.src).repository
        target = parse_reference(arguments.dst)
        assert target.is_in_layout or target.registry in {"registry.example.com", "localhost:5000"}


def test_every_command_is_there():
    assert {words[0] for words in command_lines()} - {"COMMAND"} == set(commands())
    assert sum(words[0] == "copy" for words in command_lines()) > 5


def test_every_option_exists_and_every_option_is_named():
    rules = {f"--{key.replace('_', '-')}" for key in TAGS.keys}
    real = {name for parser in commands().values() for name in options_of(parser)}
    tools = {
        "--file",
        "--order-seed",
        "--python",
        "--help",
        "--thorough",
        "--check",
        "--cache",
        "--out",
    }
    tools |= {"--into", "--peer", "--table"}
    gone = {"--diff", "--markdown"}  # docs/changes.md names them
    others = {*gone, "-b", "-cf", "-xf", "--quiet", "--oci-layout-path"}
    others |= {
        "--all",
        "--all-tags",
        "--from",
        "-k",
        "-l",
        "-m",
        "-n",
        "--ignore-missing",
        "-suffix",
        "-alpine",
        "-module",
        "-providers",
        "-out",
        "--home-dir",
        "--no-create-home",
        "--system",
        "-d",
        "-e",
        "-eq",
        "-i",
        "-o",
        "-r",
        "-u",
    }
    named = set(re.findall(r"(?<![\w:-])(--?[a-z][a-z-]*)(?![\w-])", OWN_WORDS)) - others
    assert named - real - tools - {"-vv"} == set()
    assert real - named - rules == {"-h", "--config"}


def test_the_exit_statuses_are_those_of_the_help():
    table = dict(re.findall(r"(?m)^\| ([\d, ]+) \| (.*) \|$", TEXT))
    helped = dict(re.findall(r"(?m)^  (\d)    (.*)$", cli.STATUSES))
    interrupted = table.pop("130, 143")
    assert table == helped
    assert interrupted == "interrupted by SIGINT, SIGTERM, with work left undone"


def test_every_command_with_json_is_named():
    told = re.search(r"With `--json` \((.*?)\) standard output", TEXT, re.DOTALL)
    assert told is not None
    named = {name.partition(" ")[0] for name in re.findall("`([a-z ]+)`", told[1])}
    assert named == {name for name, parser in commands().items() if "--json" in options_of(parser)}


def test_the_fields_of_a_report_are_those_of_its_schema():
    kinds = schema()["$defs"]
    told = re.search(
        r"(?s)The document of `sync` and `copy` has (.*?)An image has:(.*?)\n\n[^|]", TEXT
    )
    assert told is not None
    assert {*re.findall(r"`(\w+)`", told[1])} <= {*kinds["report"]["properties"]}
    rows = re.findall(r"(?m)^\| (`.*?) \| (.*) \|$", told[2])
    fields = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert {"source", "status", "error"} <= fields <= {*kinds["image"]["properties"]}
    parts = next(meaning for name, meaning in rows if name == "`error`")
    assert {*re.findall(r"`(\w+)`", parts)} == {*kinds["cause"]["properties"]}


def test_the_line_of_progress_is_the_programs():
    shown = next(block for _, block in BLOCKS if block.startswith("12 of 29 images"))
    now = Progress(
        done=12,
        known=29,
        bytes=78_800_000,
        expected=150_100_000,
        rate=4_900_000,
        elapsed=17.0,
        remaining=14.6,
        # As tests/unit/test_console.py has it.
        registries=("docker.io is throttled (429), window 2, next try in 4.2s",),
    )
    assert shown.splitlines() == [str(now)]


OWN_STATUSES = {
    "audit": ["0    all is there and right", "1    there are findings"],
    "auth": ["0    nothing that is needed", "4    something that is needed is missing"],
    "lock": ["0    nothing failed, with or without changes", "1    something failed"],
    "report": ["0    the report was shown, whatever failed in the run"],
    "sync": ["0    nothing failed", "4    everything failed"],
    "watch": ["0    stopped by SIGINT or SIGTERM"],
}


@pytest.mark.parametrize("name", OWN_STATUSES)
def test_the_help_of_a_command_says_what_its_own_statuses_mean(name):
    _, _, statuses = (
        cli.command_parser(name, cli.COMMANDS[name]).format_help().partition("exit status:\n")
    )
    for line in OWN_STATUSES[name]:
        assert f"  {line}" in statuses


def test_every_command_lists_the_statuses_that_it_can_end_with():
    for name, parser in commands().items():
        _, _, statuses = parser.format_help().partition("exit status:\n")
        assert re.findall(r"(?m)^  (\d+) ", statuses) == cli.COMMANDS[name].statuses.split()
        assert {"0", "3"} <= {*cli.COMMANDS[name].statuses.split()}


def test_a_command_that_copies_nothing_does_not_say_that_it_copies():
    locked = next(action for action in commands()["audit"]._actions if action.dest == "locked")
    assert locked.help
    assert "copy" not in locked.help


def test_q_hides_warnings_as_its_help_says(tmp_path):
    assert "no warnings" in run_regsync_help("validate")
    path = tmp_path / "mirror.yaml"
    mapping = "{from: a, source: a, targets: [b], tags: {glob: x, exclude: x}}"
    path.write_text(
        f"registries: {{a: {{url: a.example}}, b: {{url: b.example}}}}\nmappings: [{mapping}]"
    )
    assert "warning: " in run_regsync("validate", str(path)).err
    assert run_regsync("validate", "-q", str(path)).err == ""


# --- the configuration
# ----------------------------------------------------------------------------------


def test_the_schema_is_named_as_editors_want_it():
    assert "# yaml-language-server: $schema=regsync.schema.json" in TEXT
    assert "# yaml-language-server: $schema=regsync.schema.json" in run_regsync_help("schema")


def run_regsync_help(name: str) -> str:
    return cli.command_parser(name, cli.COMMANDS[name]).format_help()


# --- failures, files
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name, parser in commands().items() if "-c" in options_of(parser)]
)
def test_help_offers_standard_input_where_it_is_read(name):
    helped = next(
        each.help
        for each in cli.command_parser(name, cli.COMMANDS[name])._actions
        if "-c" in each.option_strings
    )
    assert helped is not None
    if name == "watch":
        assert "standard input" not in helped
        assert "watch needs a file, not -" in run_regsync("watch", "-c", "-").err
    else:
        assert helped.endswith("; - reads standard input")
        words = {"copy": ["copy", "a", "b"], "tags": ["tags", "a"], "auth": ["auth", "check"]}.get(
            name, [name]
        )
        ran = run_regsync(*words, "-c", "-", stdin="registries: 1")
        assert ran.err.startswith("error: CONFIG_ERROR: standard input:1:")
