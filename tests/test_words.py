"""The words of messages, hints and help, as the source has them.

Every literal that becomes a message or a hint is read from the syntax trees. What a message says in
a real failure, whole, is the subject of `test_errors_told`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from _regsync.app import cli
from _regsync.config.fields import SECTIONS, Field

PROGRAM = Path(__file__).resolve().parent.parent / "_regsync"

# Characters of a literal, without what is filled in: a line on a terminal, and two of them.
LONGEST_MESSAGE = 120
LONGEST_HINT = 240

FILLED_IN = "{}"

ERRORS = re.compile(
    r"\w*Error|Disconnected|TimedOut|ProtocolBroken|ConnectFailed|WrongBytes|LoginExpired"
    r"|StagingFailed|NoRoom|MappingConflict|_error|_WrongLine|_Unreadable"
)

# Hints are orders: each begins with one of these. `did you mean` is the exception.
VERBS = """
    add allow ask attach build check choose copy correct create did enable format free give grant have
    install leave list log make name push put raise report restore run see set sign use wait write
"""

# Messages without anything filled in name their thing in these ways: an option, a variable, a
# key or command in backquotes, an argument in capitals, the configuration, a reference, this host.
THING = re.compile(r"--[a-z]|[A-Z]{3}|`|configuration|reference|command|watch|host")

# How a translator writes, or a developer among his own.
FOREIGN = re.compile(
    r"(?<!there )\bis no [a-z]|\bare no [a-z]| such an? \w|is needed, not|asked for them|gives nothing|\((?:R|I)\d+\)"
    r"|\bsection \d|\bwhat hangs|[.][.](?![.])|[.]$|  |: :|;$"
)


class Text(NamedTuple):
    text: str
    place: str


def literals(node: ast.expr) -> Iterator[str]:
    """Give the texts that an expression may be, with `{}` for each part that is filled in."""
    match node:
        case ast.Constant(value=str() as text):
            yield text
        case ast.JoinedStr():
            parts = (
                each.value if isinstance(each, ast.Constant) else FILLED_IN for each in node.values
            )
            yield "".join(map(str, parts))
        case ast.IfExp():
            yield from literals(node.body)
            yield from literals(node.orelse)
        case ast.BoolOp():
            for each in node.values:
                yield from literals(each)


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return what hints and messages are read from, each with its file and line."""
    wanted = (ast.Call, ast.keyword, ast.Assign, ast.FunctionDef)
    return [
        (f"{path.relative_to(PROGRAM)}:{node.lineno}", node)
        for path in sorted(PROGRAM.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, wanted)
    ]


def is_hint(name: str) -> bool:
    return "hint" in name.lower() or name.startswith("_remedy_for")


def hints() -> Iterator[Text]:
    """Give each argument, variable and result whose name says that it is a hint."""
    for place, node in nodes():
        values: list[ast.expr] = []
        match node:
            case ast.keyword(arg=str() as name) if is_hint(name):
                values = [node.value]
            case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)]) if is_hint(
                name
            ):
                values = [node.value]
            case ast.FunctionDef() if is_hint(node.name):
                returns = (each for each in ast.walk(node) if isinstance(each, ast.Return))
                values = [each.value for each in returns if each.value is not None]
        for value in values:
            for text in literals(value):
                if text and text[0] not in "{ ":  # else it is put together of others
                    yield Text(text, place)


def messages() -> Iterator[Text]:
    """Give the first argument of each error that the program makes."""
    for place, node in nodes():
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if ERRORS.fullmatch(name):
                yield from (Text(text, place) for text in literals(node.args[0]))


def config_errors() -> Iterator[Text]:
    for place, node in nodes():
        match node:
            case ast.Call(func=ast.Name(id="ConfigError" | "AuthError" | "RegsyncError")):
                yield from (Text(text, place) for text in literals(node.args[0]))


HINTS = list(hints())
MESSAGES = list(messages())
FIELDS = [field for section in SECTIONS.values() for field in section]


def of_place(text: Text) -> str:
    return text.place


def test_there_are_hints_and_messages_to_read() -> None:
    assert len(HINTS) > 60
    assert len(MESSAGES) > 250
    assert any("HTTPS_PROXY" in hint.text for hint in HINTS)


@pytest.mark.parametrize("hint", HINTS, ids=of_place)
def test_a_hint_begins_with_a_verb_and_fits_on_two_lines(hint: Text) -> None:
    first, _, _ = hint.text.partition(" ")
    assert first in VERBS.split(), hint.text
    assert len(hint.text) <= LONGEST_HINT, hint.text


@pytest.mark.parametrize("message", MESSAGES, ids=of_place)
def test_a_message_is_short(message: Text) -> None:
    assert len(message.text) <= LONGEST_MESSAGE, message.text


@pytest.mark.parametrize("text", [*HINTS, *MESSAGES], ids=of_place)
def test_no_text_reads_as_a_translation(text: Text) -> None:
    assert not FOREIGN.search(text.text), text.text


@pytest.mark.parametrize("message", list(config_errors()), ids=of_place)
def test_an_error_without_a_place_names_its_thing(message: Text) -> None:
    """Errors of registries get the place from their callers; those of a configuration have none."""
    assert FILLED_IN in message.text or THING.search(message.text), message.text


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_says_what_it_does(field: Field) -> None:
    assert field.meaning
    assert not FOREIGN.search(field.meaning)


@pytest.mark.parametrize("name", [None, *cli.COMMANDS])
def test_every_argument_has_help_without_a_full_stop(name: str | None) -> None:
    parser = cli.program_parser() if name is None else cli.command_parser(name, cli.COMMANDS[name])
    for action in parser._actions:
        assert action.help, action
        assert not action.help.endswith("."), action.help
        assert not FOREIGN.search(action.help), action.help
