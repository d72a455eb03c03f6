"""YAML documents as nodes with line and column, and environment variables in their texts.

Owns: decoding, composing, duplicate and merged keys, `${NAME}`.
May not know: which fields exist.
Invariants: work and memory are bounded by the length of the input, regardless of its nesting, aliases
and merge keys. The value of an environment variable never changes the document's structure.
Follows: docs/design.md section 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

# Levels of nested nodes. Real configurations have 6.
_MAX_DEPTH = 32

# The number of entries that all `<<` of a document may merge, because each is converted again. The
# limit corresponds to about 60,000 mappings.
_MAX_MERGED = 1_000_000

# A path shows at most this many characters of a key, because many problems may repeat a long key.
_MAX_KEY_IN_PATH = 64

_TAG_PREFIX = "tag:yaml.org,2002:"

# Either `$$`, or `${NAME}` with an optional operator and its argument. If a `${` is malformed, only
# the two characters `${` match, and `name` is None. Matching takes linear time.
_VARIABLE = (
    r"\$\$"
    r"|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"(?::(?P<operator>[-?])(?P<argument>(?:[^$}]|\$(?!\{))*))?\})?"
)

# The names of YAML types in messages, by `Node.tag`.
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
    """A YAML node with its line and column, both counted from 1.

    A YAML alias is represented by the same Node object as its anchor.
    """

    tag: str  # "map", "seq" or the type of a scalar: the last word of the YAML tag
    line: int
    column: int
    text: str = ""  # the text of a scalar
    items: Sequence[Node] = ()  # the items of a list
    entries: Mapping[str, Entry] = MappingProxyType({})  # the entries of a mapping, by key

    @property
    def kind(self) -> str:
        """The name of the node's type in messages."""
        return _KINDS[self.tag]

    @property
    def is_scalar(self) -> bool:
        return self.tag not in ("map", "seq")


class Entry(NamedTuple):
    """A key of a mapping and its value."""

    key: Node
    value: Node


AddProblem = Callable[[Node, str, str], None]  # its arguments: node, path of keys, message


class DocumentError(Exception):
    """A problem after which the rest of the document cannot be read."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.message = message


def compose(text: bytes, add_problem: AddProblem) -> Node | None:
    """Parse a YAML file and return the root node of its document.

    Returns None if the file has no document. Calls `add_problem` for each problem that leaves the
    rest of the document readable. Raises DocumentError if the rest cannot be read.
    """
    decoded = _decode(text)

    try:
        loader = yaml.SafeLoader(decoded)  # the constructor checks every character
    except yaml.reader.ReaderError as error:
        message = f"control character U+{error.character:04X}: remove it"
        raise _error_after(decoded[: error.position], message) from None

    try:
        return _Composer(loader, add_problem).read_document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _error_at(mark, f"malformed YAML: {_explain(error)}") from None
    except (ValueError, OverflowError):
        # PyYAML does not catch the errors of chr() and int() for "\UFFFFFFFF" or for a %YAML
        # version with very many digits.
        raise _error_at(loader, "malformed YAML: a number out of range") from None


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()
        raise _error_after(before, "not UTF-8: save the file as UTF-8") from None


def _explain(error: yaml.MarkedYAMLError) -> str:
    """Return PyYAML's message, extended or replaced by the usual cause of the error."""
    message: str = error.problem or "cannot be parsed"
    if "'\\t'" in message:
        return "a tab is not allowed here: indent with spaces"
    if "got '{'" in message:
        return f"{message}: inside {{ }} and [ ] a '${{NAME}}' has to be quoted"
    if "alias" in (error.context or ""):
        return f"{message}: a text that begins with '*' has to be quoted"
    return message


def _error_at(mark: Any, message: str) -> DocumentError:
    """Return the error for a PyYAML mark. PyYAML counts lines and columns from 0."""
    return DocumentError(mark.line + 1, mark.column + 1, message)


def _error_after(before: str, message: str) -> DocumentError:
    """Return the error for the character that follows the text `before`."""
    return DocumentError(before.count("\n") + 1, len(before) - before.rfind("\n"), message)


class _Composer:
    """Builds nodes from the events of the PyYAML parser.

    PyYAML's own composer does not limit the nesting depth and does not report duplicate keys.
    """

    def __init__(self, loader: yaml.SafeLoader, add_problem: AddProblem) -> None:
        self.loader: Any = loader  # Any: types-PyYAML does not annotate the methods used here
        self.add_problem = add_problem
        self.anchors: dict[str, Node] = {}  # the nodes read so far that have an anchor, by its name
        self.merged_count = 0  # entries that `<<` has merged so far

    def read_document(self) -> Node | None:
        """Return the root of the only document. Returns None if the stream has no document."""
        self.loader.get_event()  # the start of the stream
        if isinstance(self.loader.get_event(), yaml.StreamEndEvent):
            return None
        root = self.read_node(self.loader.get_event(), "", 1)
        self.loader.get_event()  # the end of the document
        event = self.loader.get_event()
        if isinstance(event, yaml.DocumentStartEvent):
            raise _error_at(event.start_mark, "a second YAML document: keep one in each file")
        return root

    def events_until(self, end: type) -> Iterator[Any]:
        """Yield the parser's events up to the next event of type `end`, which is consumed.

        The caller must read the node that an event begins, with all its children, before it takes
        the next event.
        """
        while True:
            event = self.loader.get_event()
            if isinstance(event, end):
                return
            yield event

    def read_node(self, event: Any, path: str, depth: int) -> Node:
        """Return the node that begins with `event`. The root has depth 1."""
        if isinstance(event, yaml.AliasEvent):
            return self.resolve_alias(event)
        if depth > _MAX_DEPTH:
            raise _error_at(event.start_mark, f"nested more than {_MAX_DEPTH} levels deep")

        line = event.start_mark.line + 1
        column = event.start_mark.column + 1
        if isinstance(event, yaml.MappingStartEvent):
            node = Node("map", line, column, entries=self.read_mapping(path, depth + 1))
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Node("seq", line, column, items=self.read_sequence(path, depth + 1))
        else:
            node = Node(self.scalar_tag(event), line, column, text=event.value)

        # A YAML tag such as `!!int` is accepted only if it has no effect. The tag "!" marks a
        # scalar as text, as quotes do.
        is_tag_without_effect = event.tag in (None, "!", _TAG_PREFIX + node.tag)
        if not is_tag_without_effect:
            remedy = "remove it, or quote text beginning with '!'"
            self.add_problem(node, path, f"a YAML tag is not supported: {remedy}")
        if event.anchor is not None:
            # The anchor is defined only after its node has been read, so no node can contain
            # itself.
            self.anchors[event.anchor] = node
        return node

    def resolve_alias(self, event: Any) -> Node:
        if event.anchor not in self.anchors:
            message = "no anchor of that name above: quote text beginning with '*'"
            raise _error_at(event.start_mark, message)
        return self.anchors[event.anchor]

    def scalar_tag(self, event: Any) -> str:
        """Return the type of a scalar.

        Quoted scalars and scalars with a YAML tag are text. The type of a plain scalar follows from
        its characters.
        """
        is_plain = event.implicit[0]  # neither quoted nor tagged
        if not is_plain:
            return "str"
        tag: str = self.loader.resolve(yaml.ScalarNode, event.value, (True, False))
        # PyYAML gives the scalar "=" the tag "value".
        return tag.removeprefix(_TAG_PREFIX).replace("value", "str")

    def read_sequence(self, path: str, depth: int) -> list[Node]:
        events = self.events_until(yaml.SequenceEndEvent)
        return [
            self.read_node(event, f"{path}[{index}]", depth) for index, event in enumerate(events)
        ]

    def read_mapping(self, path: str, depth: int) -> dict[str, Entry]:
        """Return the entries of a mapping by key, including entries merged by `<<`.

        The mapping's own entries take precedence over merged entries, regardless of their order.
        """
        entries: dict[str, Entry] = {}
        sources: list[Node] = []  # the nodes that `<<` refers to, in order

        # Each event begins a key. The event after the key begins its value.
        for event in self.events_until(yaml.MappingEndEvent):
            key = self.read_node(event, path, depth)
            value_path = path
            if key.is_scalar:
                value_path = f"{path}.{key.text[:_MAX_KEY_IN_PATH]}".removeprefix(".")
            value = self.read_node(self.loader.get_event(), value_path, depth)

            if not key.is_scalar:
                self.add_problem(key, path, f"{key.kind} cannot be a key")
            elif key.tag == "merge":
                sources += value.items if value.tag == "seq" else [value]
            elif key.text in entries:
                first_line = entries[key.text].key.line
                message = f"duplicate key: it is on line {first_line} already"
                self.add_problem(key, value_path, message)
            else:
                entries[key.text] = Entry(key, value)

        # After all own entries, because they take precedence.
        for source in sources:
            self.merge(source, entries, path)
        return entries

    def merge(self, source: Node, entries: dict[str, Entry], path: str) -> None:
        """Add to `entries` the entries of `source`, a node that `<<` refers to.

        A key that `entries` already has keeps its value. Adds a problem if `source` is not a
        mapping. Raises DocumentError if all `<<` together have merged too many entries.
        """
        if source.tag != "map":
            self.add_problem(source, path, "'<<' takes a mapping or a list of mappings")
            return
        # A source takes time even if it has no entries.
        self.merged_count += 1 + len(source.entries)
        if self.merged_count > _MAX_MERGED:
            message = f"'<<' repeats over {_MAX_MERGED:,} values"
            raise DocumentError(source.line, source.column, message)
        for name, entry in source.entries.items():
            entries.setdefault(name, entry)


def dump(value: object) -> str:
    """Serialize dicts, lists and scalars as a YAML document."""
    return yaml.safe_dump(
        value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def variable_names(text: str) -> set[str]:
    """Return the names of the variables that occur in a text."""
    return {match["name"] for match in re.finditer(_VARIABLE, text) if match["name"]}


def drop_defaults(text: str) -> str:
    """Return a text with each variable written as `${NAME}`, without its default or message."""

    def shorten(match: re.Match[str]) -> str:
        return f"${{{match['name']}}}" if match["name"] else match[0]

    return re.sub(_VARIABLE, shorten, text)


def mask_literals(text: str, mask: str) -> str:
    """Return a text with each variable written as `${NAME}` and everything else masked.

    Each stretch of text between variables is replaced by one `mask`.
    """
    masked = ""
    # Each match is a variable, `$$`, or a piece of other text.
    for match in re.finditer(rf"{_VARIABLE}|[^$]+|\$", text):
        if match["name"]:
            masked += f"${{{match['name']}}}"
        elif not masked.endswith(mask):
            masked += mask
    return masked


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """Replace each variable in a text by its value. Variables inside a value are not replaced.

    Raises ValueError if a variable is malformed or has no value.
    """
    if "$" not in text:
        return text
    return re.sub(_VARIABLE, lambda match: _value_of(match, environ), text)


def _value_of(variable: re.Match[str], environ: Mapping[str, str]) -> str:
    """Return the replacement for a match of `_VARIABLE`.

    Raises ValueError if the variable is malformed, or if it has neither a value nor a default.
    """
    if variable[0] == "$$":
        return "$"

    name = variable["name"]
    if name is None:
        forms = "${NAME}, ${NAME:-default} or ${NAME:?message}"
        raise ValueError(f"malformed '${{': write {forms}, not nested, and $$ for a single $")

    # As in a shell, the operators `:-` and `:?` treat an empty variable as not set.
    value = environ.get(name)
    operator = variable["operator"]
    if operator == "-":
        return value or variable["argument"]
    if value is None or (operator == "?" and not value):
        remedy = variable["argument"] or "set it, or give a default"
        raise ValueError(f"environment variable {name} is not set: {remedy}")
    return value
