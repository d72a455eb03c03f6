"""Fault rules as text, for a command line or a file, with the same words as in rules.py.

Owns: the grammar.
May not know: what verbs do. Their parameters are read from their classes.
Invariants: text that does not conform to the grammar is refused with its line and column. Parsing
`str(rule)` of a parsed rule gives the same rule.

    RULE     = WHICH ": " VERB { ", " VERB }          one to a line; # begins a comment
    WHICH    = any of, in any order:
               a method (GET), a kind (blob), several of each; "any" for all
               repository= reference= host= path= header.NAME= query.NAME=      a glob
               nth=2  nth=1,3  every=3  first=2  since=4  chance=0.1  at-most=5
               of-each  optional
    VERB     = name [ARGUMENT] { NAME=ARGUMENT }      header.NAME= for headers; - leaves one out
    ARGUMENT = word | "text" with \\" \\\\ \\r \\n \\t \\xHH | several, with commas and no spaces
               bytes: 10  64KiB  1MiB   time: 2s  500ms  1m   yes or no: yes  no

    PATCH upload repository=app/web nth=2: drop 64KiB
    GET blob first=2 of-each: delay 30s, status 503 retry-after=5
    GET HEAD manifest chance=0.1: lie Docker-Content-Digest header.Content-Type=text/html
    any path=/token: challenge realm=http://elsewhere.test/token service=x
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import Field
from typing import Any, NamedTuple, NoReturn

from ..journal import KINDS, METHODS
from .injection import parameters_of
from .rules import Faults, Rule
from .verbs import VERBS

__all__ = ["RuleError", "read_rules"]

# Patterns of one value, and of a token: NAME= and values, up to a colon, a comma or a space.
_PART = r'(?:"(?:[^"\\]|\\.)*"|[^\s",]+?(?=[\s,]|:\s|:?\Z))'
_TOKEN = re.compile(rf"\s*(?:([A-Za-z][A-Za-z0-9._-]*)=)?({_PART}(?:,{_PART})*)(:|,)?(?=\s|\Z)")
_PARTS = re.compile(_PART)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|.)")
_ESCAPED = {'"': '"', "\\": "\\", "r": "\r", "n": "\n", "t": "\t"}
_SIZE = re.compile(r"(-?[0-9]+)(|B|kB|MB|GB|KiB|MiB|GiB)\Z")
_SIZES = {
    "": 1,
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(|ms|s|m|h)\Z")
_TIMES = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_GLOBS = ("repository", "reference", "host", "path")


class RuleError(ValueError):
    """A rule is malformed. The message is SOURCE:LINE:COLUMN: REASON."""


class _Token(NamedTuple):
    """A word, or NAME=ARGUMENT."""

    name: str  # empty for a word
    values: tuple[str, ...]
    is_quoted: bool  # whether the first value is in quotes
    end: str  # the following colon or comma, or empty
    column: int  # from 1


class _Line:
    """One line of rules."""

    def __init__(self, text: str, source: str, number: int) -> None:
        self.text = text
        self._place = f"{source}:{number}"

    def refuse(self, column: int, why: object) -> NoReturn:
        """Raise RuleError for a column of this line."""
        raise RuleError(f"{self._place}:{column}: {why}")

    def tokens(self) -> Iterator[_Token]:
        """Yield the tokens of the line, up to a comment."""
        position = 0
        while True:
            rest = self.text[position:].lstrip()
            if not rest or rest.startswith("#"):
                return
            column = len(self.text) - len(rest) + 1
            match = _TOKEN.match(self.text, position)
            if match is None:
                self.refuse(column, f"cannot be read from here on: {rest[:40]}")
            name, text, end = match.groups()
            parts = _PARTS.findall(text)
            values = tuple(self._unescape(part, column) for part in parts)
            yield _Token(name or "", values, parts[0].startswith('"'), end or "", column)
            position = match.end()

    def _unescape(self, part: str, column: int) -> str:
        if not part.startswith('"'):
            return part

        def replace_escape(match: re.Match[str]) -> str:
            escape = match[1]
            if escape.startswith("x") and len(escape) == 3:
                return chr(int(escape[1:], 16))
            if escape not in _ESCAPED:
                self.refuse(column, f"unknown escape {match[0]}")
            return _ESCAPED[escape]

        return _ESCAPE.sub(replace_escape, part[1:-1])


def read_rules(faults: Faults, text: str, source: str = "rules") -> list[Rule]:
    """Parse rules and add them to `faults`.

    Raises RuleError if a rule is malformed. No rule is added then.
    """
    before = len(faults.rules)
    try:
        for number, line in enumerate(text.splitlines(), 1):
            placed = _Line(line, source, number)
            tokens = list(placed.tokens())
            if tokens:
                _read_rule(faults, placed, tokens)
    except RuleError:
        del faults.rules[before:]
        raise
    return faults.rules[before:]


def _read_rule(faults: Faults, line: _Line, tokens: list[_Token]) -> None:
    ends = [n for n, token in enumerate(tokens) if token.end == ":"]
    if len(ends) != 1 or ends[0] + 1 == len(tokens):
        column = tokens[ends[1]].column if len(ends) > 1 else len(line.text) + 1
        line.refuse(column, "a rule is WHICH: VERB, with one colon and a verb behind it")
    rule = _read_which(faults, line, tokens[: ends[0] + 1])
    verb: list[_Token] = []
    for token in tokens[ends[0] + 1 :]:
        verb.append(token)
        if token.end == ",":
            _read_verb(rule, line, verb)
            verb = []
    if not verb:
        line.refuse(tokens[-1].column, "a verb is missing behind the comma")
    _read_verb(rule, line, verb)


class _Which:
    """The parsed parts of WHICH: the arguments of a selector, and the conditions of the rule."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.kinds: list[str] = []
        self.globs: dict[str, str] = {}
        self.header: dict[str, str] = {}
        self.query: dict[str, str] = {}
        # Each condition is a function that adds it to a rule. The token is for error messages.
        self.conditions: list[tuple[_Token, Callable[[Rule], Rule]]] = []


def _read_which(faults: Faults, line: _Line, tokens: list[_Token]) -> Rule:
    which = _Which()
    for token in tokens:
        if token.end == ",":
            line.refuse(token.column, "no comma before the colon")
        if token.name:
            _read_named(line, token, which)
        else:
            _read_words(line, token, which)

    rule = faults.on(
        " ".join(which.methods),
        " ".join(which.kinds),
        repository=which.globs.get("repository"),
        reference=which.globs.get("reference"),
        host=which.globs.get("host"),
        path=which.globs.get("path"),
        header=which.header,
        query=which.query,
    )
    for token, add_condition in which.conditions:
        try:
            add_condition(rule)
        except ValueError as problem:
            line.refuse(token.column, problem)

    return rule


def _read_words(line: _Line, token: _Token, which: _Which) -> None:
    """Parse methods, kinds, and conditions without a value."""
    for word in token.values:
        if word in METHODS:
            which.methods.append(word)
        elif word in KINDS:
            which.kinds.append(word)
        elif word == "of-each":
            which.conditions.append((token, Rule.of_each))
        elif word == "optional":
            which.conditions.append((token, Rule.optional))
        elif word != "any":
            line.refuse(token.column, f"{word} is no method and no kind ({' '.join(KINDS)})")


def _read_named(line: _Line, token: _Token, which: _Which) -> None:
    """Parse NAME=GLOB, header.NAME=GLOB, query.NAME=GLOB, or a condition with a value."""
    group, _, name = token.name.partition(".")
    groups = {"header": which.header, "query": which.query}
    if token.name in _GLOBS and token.name not in which.globs:
        which.globs[token.name] = _only_value(line, token)
    elif group in groups and name and name not in groups[group]:
        groups[group][name] = _only_value(line, token)
    else:
        which.conditions.append((token, _read_occurrence(line, token)))


def _read_occurrence(line: _Line, token: _Token) -> Callable[[Rule], Rule]:
    """Parse a condition with a value. Returns the function that adds it to a rule."""
    if token.name == "nth":
        numbers = [_read_number(line, token, value) for value in token.values]
        return lambda rule: rule.nth(*numbers)

    methods = {
        "every": Rule.every,
        "first": Rule.first,
        "since": Rule.since,
        "at-most": Rule.at_most,
    }
    if token.name in methods:
        number = _read_number(line, token, _only_value(line, token))
        return lambda rule: methods[token.name](rule, number)

    if token.name != "chance" or not re.fullmatch(r"[01]|[01]?\.[0-9]+", _only_value(line, token)):
        line.refuse(
            token.column, f"{token.name}={','.join(token.values)} is not understood here, or twice"
        )

    return lambda rule: rule.chance(float(token.values[0]))


def _read_verb(rule: Rule, line: _Line, tokens: list[_Token]) -> None:
    """Parse a verb with its arguments, and add it to a rule."""
    first = tokens[0]
    verb = VERBS.get(_only_value(line, first))
    if verb is None or first.name:
        line.refuse(first.column, f"no verb: one of {' '.join(VERBS)}")

    parameters = parameters_of(verb)
    arguments: dict[str, Any] = {}
    for number, token in enumerate(tokens[1:]):
        group, _, header = token.name.partition(".")
        if group == "header" and header and any(field.name == "headers" for field in parameters):
            value = _only_value(line, token)
            is_left_out = value == "-" and not token.is_quoted
            arguments.setdefault("headers", {})[header] = None if is_left_out else value
            continue
        name = token.name.replace("-", "_")
        if not name and number == 0 and parameters:
            name = parameters[0].name  # the first argument needs no name
        matching = [field for field in parameters if field.name == name and name != "headers"]
        if not matching or name in arguments:
            parameter_names = (
                ", ".join(field.name.replace("_", "-") for field in parameters) or "nothing"
            )
            line.refuse(token.column, f"{first.values[0]} takes {parameter_names}, each once")
        arguments[name] = _read_argument(line, token, matching[0])

    try:
        rule.add(verb(**arguments))
    except (TypeError, ValueError) as problem:
        text = "needs an argument" if isinstance(problem, TypeError) else problem
        line.refuse(first.column, f"{first.values[0]}: {text}")


def _read_argument(line: _Line, token: _Token, argument: Field[Any]) -> Any:
    """Parse an argument according to the type of its parameter."""
    kind = str(argument.type)
    if "tuple" in kind:
        return token.values if len(token.values) > 1 else token.values[0]
    text = _only_value(line, token)
    if kind.startswith("bool"):
        if text not in ("yes", "no"):
            line.refuse(token.column, f"yes or no, not {text}")
        return text == "yes"
    if kind.startswith("int"):
        return _read_number(line, token, text)
    if kind.startswith("float"):
        match = _TIME.match(text)
        if match is None and "str" not in kind:
            line.refuse(token.column, f"{text} is no time: 2s, 500ms, 1m")
        return text if match is None else float(match[1]) * _TIMES[match[2]]
    return text.encode("latin-1", "replace") if kind.startswith("bytes") else text


def _read_number(line: _Line, token: _Token, text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        line.refuse(token.column, f"{text} is no number: 10, 64KiB, 1MiB")
    return int(match[1]) * _SIZES[match[2]]


def _only_value(line: _Line, token: _Token) -> str:
    """Return the value of a token. Refuses the token if it has several values."""
    if len(token.values) != 1:
        line.refuse(token.column, "one value; text with a comma is quoted")
    return token.values[0]
