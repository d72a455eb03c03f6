"""A YAML document as nodes that know their place, and the environment's values in its texts.

Owns: decoding, composing, duplicate and merged keys, `${NAME}`.
May not know: which fields exist.
Invariants: work and memory are bounded by the length of the input, whatever it nests, repeats or
refers to; a value of the environment never changes the document's structure.
Follows: docs/design.md section 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

# Levels of nodes; legitimate documents have 6.
_MAX_DEPTH = 32

# Values that `<<` may repeat, as each is read again; this is some 60,000 mappings.
_MAX_MERGED = 1_000_000

# Characters of a key that a path shows: a long key must not be repeated for each of many items.
_SHOWN_KEY = 64

_TAG_PREFIX = "tag:yaml.org,2002:"

# `$$`, or `${NAME}` with an operator and its text. Where nothing closes `${` properly, `${` alone
# matches. Each character is looked at once.
_VARIABLE = (
    r"\$\$"
    r"|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"(?::(?P<operator>[-?])(?P<rest>(?:[^$}]|\$(?!\{))*))?\})?"
)

_KINDS = {
    "map": "a mapping",
    "seq": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a decimal number",
    "bool": "true or false",
    "null": "empty",
    "timestamp": "a date",
    "merge": "a merge key",
}


class Node(NamedTuple):
    """A YAML node with its place, lines and columns counted from 1.

    An alias is the very node of its anchor.
    """

    tag: str  # the last word of the YAML tag
    line: int
    column: int
    text: str = ""  # of a scalar
    items: Sequence[Node] = ()  # of a list
    entries: Mapping[str, Entry] = MappingProxyType({})  # of a mapping, by the text of the key

    @property
    def kind(self) -> str:
        """What a message calls such a node."""
        return _KINDS[self.tag]

    @property
    def is_scalar(self) -> bool:
        return self.tag not in ("map", "seq")


class Entry(NamedTuple):
    """One key of a mapping, and what stands behind it."""

    key: Node
    value: Node


Note = Callable[[Node, str, str], None]  # takes a problem: its node, its path, a message


class Unreadable(Exception):
    """The document cannot be read any further than here."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.message = message


def compose(text: bytes, note: Note) -> Node | None:
    """Return the root of the one document in `text`, None when there is none.

    `note` is called with each problem after which reading goes on. Unreadable is raised for the others.
    """
    decoded = _decode(text)

    try:
        loader = yaml.SafeLoader(decoded)  # looks for control characters at once
    except yaml.reader.ReaderError as error:
        message = f"control character U+{error.character:04X}: remove it"
        raise _unreadable_after(decoded[: error.position], message) from None

    try:
        return _Composer(loader, note).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _unreadable_at(mark, f"malformed YAML: {_remedy(error)}") from None
    except (ValueError, OverflowError):
        # PyYAML lets chr() and int() refuse "\UFFFFFFFF" and an endless %YAML version themselves.
        raise _unreadable_at(loader, "malformed YAML: a number out of range") from None


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        raise _unreadable_after(before, "not UTF-8: save the file as UTF-8") from None


def _remedy(error: yaml.MarkedYAMLError) -> str:
    """Return PyYAML's message, with the usual reason for it."""
    message: str = error.problem or "cannot be parsed"
    if "'\\t'" in message:
        return "a tab is not allowed here: indent with spaces"
    if "got '{'" in message:
        return f"{message}: inside {{ }} and [ ] a '${{NAME}}' has to be quoted"
    if "alias" in (error.context or ""):
        return f"{message}: a text that begins with '*' has to be quoted"
    return message


def _unreadable_at(mark: Any, message: str) -> Unreadable:
    """Return the error for a mark of PyYAML's, whose lines and columns count from 0."""
    return Unreadable(mark.line + 1, mark.column + 1, message)


def _unreadable_after(before: str, message: str) -> Unreadable:
    """Return the error for the character that follows the text `before`."""
    return Unreadable(before.count("\n") + 1, len(before) - before.rfind("\n"), message)


class _Composer:
    """Makes nodes of the parser's events, in one pass.

    PyYAML's own composer would neither bound the depth nor name repeated keys.
    """

    def __init__(self, loader: yaml.SafeLoader, note: Note) -> None:
        self.loader: Any = loader  # types-PyYAML gives its methods no types
        self.note = note
        self.anchors: dict[str, Node] = {}
        self.merged = 0  # values that `<<` has repeated so far

    def document(self) -> Node | None:
        """Return the root of the stream's one document, None where it has none."""
        root: Node | None = None
        for event in self.events_before(yaml.StreamEndEvent):
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise _unreadable_at(
                    event.start_mark, "a second YAML document: keep one in each file"
                )
            if isinstance(event, yaml.NodeEvent):
                root = self.node(event, "", 1)
        return root

    def events_before(self, end: type) -> Iterator[Any]:
        """Yield the events of a collection before its end event.

        The caller reads each node to its end before it takes the next event.
        """
        while True:
            event = self.loader.get_event()
            if isinstance(event, end):
                return
            yield event

    def node(self, event: Any, path: str, depth: int) -> Node:
        """Return the node that begins with an event, `depth` being 1 for the root."""
        if isinstance(event, yaml.AliasEvent):
            return self.anchored(event)
        if depth > _MAX_DEPTH:
            raise _unreadable_at(event.start_mark, f"nested more than {_MAX_DEPTH} levels deep")

        line = event.start_mark.line + 1
        column = event.start_mark.column + 1
        if isinstance(event, yaml.MappingStartEvent):
            node = Node("map", line, column, entries=self.mapping(path, depth + 1))
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Node("seq", line, column, items=self.sequence(path, depth + 1))
        else:
            node = Node(self.scalar_tag(event), line, column, text=event.value)

        # "!" says that a scalar is text. Any other tag may only be the one the node has anyway.
        is_redundant = event.tag in (None, "!", _TAG_PREFIX + node.tag)
        if not is_redundant:
            remedy = "remove it, or quote text beginning with '!'"
            self.note(node, path, f"a YAML tag is not supported: {remedy}")
        if event.anchor is not None:
            # The anchor is known from here on, so that no node can contain itself.
            self.anchors[event.anchor] = node
        return node

    def anchored(self, event: Any) -> Node:
        if event.anchor not in self.anchors:
            message = "no anchor of that name above: quote text beginning with '*'"
            raise _unreadable_at(event.start_mark, message)
        return self.anchors[event.anchor]

    def scalar_tag(self, event: Any) -> str:
        """Return what a scalar is, which only one without quotes and without a YAML tag leaves open."""
        is_plain = event.implicit[0]
        if not is_plain:
            return "str"
        tag: str = self.loader.resolve(yaml.ScalarNode, event.value, (True, False))
        # PyYAML has a tag of its own for "=".
        return tag.removeprefix(_TAG_PREFIX).replace("value", "str")

    def sequence(self, path: str, depth: int) -> list[Node]:
        events = self.events_before(yaml.SequenceEndEvent)
        return [self.node(event, f"{path}[{index}]", depth) for index, event in enumerate(events)]

    def mapping(self, path: str, depth: int) -> dict[str, Entry]:
        """Return the entries by key, each key once. The mapping's own go before those that `<<` merges
        into it, wherever `<<` stands.
        """
        entries: dict[str, Entry] = {}
        sources: list[Node] = []  # the mappings that `<<` names

        for event in self.events_before(yaml.MappingEndEvent):
            key = self.node(event, path, depth)
            value_path = path
            if key.is_scalar:
                value_path = f"{path}.{key.text[:_SHOWN_KEY]}".removeprefix(".")
            value = self.node(self.loader.get_event(), value_path, depth)

            if not key.is_scalar:
                self.note(key, path, f"{key.kind} cannot be a key")
            elif key.tag == "merge":
                sources += value.items if value.tag == "seq" else [value]
            elif key.text in entries:
                earlier = entries[key.text].key.line
                self.note(key, value_path, f"duplicate key: it is on line {earlier} already")
            else:
                entries[key.text] = Entry(key, value)

        for source in sources:
            self.merge(source, entries, path)
        return entries

    def merge(self, source: Node, entries: dict[str, Entry], path: str) -> None:
        """Add the entries of a mapping that `<<` names, without the keys that `entries` has."""
        if source.tag != "map":
            self.note(source, path, "'<<' takes a mapping or a list of mappings")
            return
        self.merged += 1 + len(source.entries)  # an empty mapping costs time too
        if self.merged > _MAX_MERGED:
            message = f"'<<' repeats over {_MAX_MERGED:,} values"
            raise Unreadable(source.line, source.column, message)
        for name, entry in source.entries.items():
            entries.setdefault(name, entry)


def dump(value: object) -> str:
    """Return plain values as a YAML document that every reader of YAML understands alike."""
    return yaml.safe_dump(
        value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def variable_names(text: str) -> set[str]:
    """Return the names that `substitute` looks up."""
    return {match["name"] for match in re.finditer(_VARIABLE, text) if match["name"]}


def mask_values(text: str, mask: str) -> str:
    """Return a text with its variables as `${NAME}`, without their defaults.

    All text between variables becomes `mask`, unless that is empty: then it stays.
    """
    masked = ""
    for match in re.finditer(rf"{_VARIABLE}|[^$]+|\$", text):
        if match["name"]:
            masked += f"${{{match['name']}}}"
        elif not mask:
            masked += match[0]
        elif not masked.endswith(mask):  # one mask for several pieces in a row
            masked += mask
    return masked


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """Replace the variables of a text by the environment's values; ValueError says what is wrong.

    A value is not searched for further variables.
    """
    if "$" not in text:
        return text
    return re.sub(_VARIABLE, lambda match: _value_of(match, environ), text)


def _value_of(variable: re.Match[str], environ: Mapping[str, str]) -> str:
    """Return what a match of `_VARIABLE` stands for; ValueError where it has no value."""
    if variable[0] == "$$":
        return "$"

    name = variable["name"]
    if name is None:
        forms = "${NAME}, ${NAME:-default} or ${NAME:?message}"
        raise ValueError(f"malformed '${{': write {forms}, not nested, and $$ for a single $")

    # As in a shell: with `:-` and `:?`, an empty variable counts as not set.
    value = environ.get(name)
    operator = variable["operator"]
    if operator == "-":
        return value or variable["rest"]
    if value is None or (operator == "?" and not value):
        remedy = variable["rest"] or "set it, or give a default"
        raise ValueError(f"environment variable {name} is not set: {remedy}")
    return value
