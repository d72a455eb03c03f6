"""A YAML document as nodes that know their place, and the environment's part in its texts.

Owns: decoding, composition, duplicate and merged keys, `${NAME}`, the list of problems found. May not
know: which fields exist. Invariant: work and memory are bounded by the length of the input, whatever it
nests, repeats or refers to; nothing recurses; a value never changes the document's structure.
Follows design.md section 3 (the first two points); YAML as PyYAML's safe loader resolves it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from _regsync.errors import Problem, clean

__all__ = ["KINDS", "Node", "Notes", "Unreadable", "compose", "expand"]

# The deepest legitimate document has 6 levels; 1,000,000 nodes are some 60,000 mappings.
_DEEPEST = 32
_MOST_NODES = 1_000_000
KINDS = {
    "map": "a mapping",
    "seq": "a list",
    "str": "text",
    "int": "a number",
    "float": "a number",
    "bool": "a truth value",
    "null": "empty",
    "timestamp": "a date",
}
_TAG_PREFIX = "tag:yaml.org,2002:"


@dataclass(slots=True, eq=False)
class Node:
    """A YAML node with its place; `value` is text, a list of nodes, or a list of pairs of nodes."""

    line: int
    column: int
    tag: str
    value: Any
    shared: bool = False
    is_open: bool = False


class Unreadable(Exception):
    """The document cannot be read on: the problem is the last one noted."""


class Notes:
    """The problems found so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []

    def note(self, place: Node | tuple[int, int], path: str, message: str) -> None:
        line, column = place if isinstance(place, tuple) else (place.line, place.column)
        self.problems.append(Problem(self.name, line, column, clean(path, 200), clean(message)))

    def unreadable(self, place: Node | tuple[int, int], message: str) -> Unreadable:
        self.note(place, "", message)
        return Unreadable()


def _decode(text: bytes, notes: Notes) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        column = error.start - text.rfind(b"\n", 0, error.start)
        raise notes.unreadable((line, column), "not UTF-8: save the file as UTF-8") from None


def compose(text: bytes, notes: Notes) -> Node | None:
    """Return the root of the one document in `text`, None when there is none; Unreadable after a fatal note.

    PyYAML's own composer recurses once a level; this one keeps a stack, bounds depth and number of nodes,
    merges `<<` as it goes, and gives for an alias the very node of its anchor.
    """
    import yaml

    decoded = _decode(text, notes)
    loader = None
    try:
        loader = yaml.SafeLoader(decoded)
        return _Composer(loader, yaml, notes).compose()
    except yaml.reader.ReaderError as error:
        before = decoded[: error.position]
        place = (before.count("\n") + 1, error.position - before.rfind("\n"))
        raise notes.unreadable(place, f"control character U+{error.character:04X}: remove it") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        message = error.problem or "malformed YAML"
        if "'\\t'" in message:
            message = "a tab cannot stand here: indent with spaces"
        elif "alias" in (error.context or ""):
            message += ": a text that begins with '*' has to be quoted"
        raise notes.unreadable(place, f"malformed YAML: {message}") from None
    except (ValueError, OverflowError):
        # PyYAML lets chr() and int() refuse "\\UFFFFFFFF" and an endless %YAML version themselves.
        place = (loader.line + 1, loader.column + 1) if loader is not None else (1, 1)
        raise notes.unreadable(place, "malformed YAML: a number out of range") from None


class _Composer:
    """One pass over the parser's events."""

    def __init__(self, loader: Any, yaml: Any, notes: Notes) -> None:
        self.loader = loader
        self.yaml = yaml
        self.notes = notes
        self.anchors: dict[str, Node] = {}
        self.count = 0

    def compose(self) -> Node | None:
        events = self.yaml.events
        root: Node | None = None
        stack: list[Node] = []
        while not isinstance(event := self.loader.get_event(), events.StreamEndEvent):
            if isinstance(event, events.CollectionEndEvent):
                self.close(stack.pop())
            elif isinstance(event, events.NodeEvent):
                node = self.node(event)
                if stack:
                    stack[-1].value.append(node)
                else:
                    root = node
                if isinstance(event, events.CollectionStartEvent):
                    stack.append(node)
                    if len(stack) > _DEEPEST:
                        raise self.notes.unreadable(node, f"nested more than {_DEEPEST} levels deep")
            elif isinstance(event, events.DocumentStartEvent) and root is not None:
                place = (event.start_mark.line + 1, event.start_mark.column + 1)
                raise self.notes.unreadable(place, "a second document: keep one in a file")
        return root

    def node(self, event: Any) -> Node:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        self.charge(1, (line, column))
        if isinstance(event, self.yaml.AliasEvent):
            target = self.anchors.get(event.anchor)
            if target is None:
                raise self.notes.unreadable(
                    (line, column), f"no anchor &{event.anchor}: quote a text that begins with '*'"
                )
            target.shared = True
            return target
        if isinstance(event, self.yaml.ScalarEvent):
            node = Node(line, column, self.scalar_tag(event), event.value)
        else:
            kind = "map" if isinstance(event, self.yaml.MappingStartEvent) else "seq"
            node = Node(line, column, kind, [], is_open=True)
            if event.tag not in (None, "!", _TAG_PREFIX + kind):
                self.notes.note(node, "", f"YAML tag {event.tag} is not supported: remove it")
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def charge(self, values: int, place: Node | tuple[int, int]) -> None:
        self.count += values
        if self.count > _MOST_NODES:
            raise self.notes.unreadable(place, f"more than {_MOST_NODES:,} values")

    def scalar_tag(self, event: Any) -> str:
        tag = event.tag
        if tag is None or tag == "!":
            if not event.implicit[0]:
                return "str"
            tag = self.loader.resolve(self.yaml.ScalarNode, event.value, event.implicit)
        kind = str(tag).removeprefix(_TAG_PREFIX)
        if kind in KINDS:
            return kind
        if kind not in ("value", "merge"):
            place = (event.start_mark.line + 1, event.start_mark.column + 1)
            self.notes.note(place, "", f"YAML tag {tag} is not supported: remove it")
        return "merge" if kind == "merge" else "str"

    def close(self, node: Node) -> None:
        """End a collection; of a mapping make pairs: no key twice, merged keys after its own."""
        if node.tag == "map":
            flat, node.value = node.value, []
            own: dict[str, int] = {}
            merged: list[Node] = []
            for key, value in zip(flat[::2], flat[1::2], strict=True):
                if key.tag in ("map", "seq"):
                    self.notes.note(key, "", f"{KINDS[key.tag]} cannot be a key")
                elif key.tag == "merge":
                    merged += value.value if value.tag == "seq" and not value.is_open else [value]
                elif key.value in own:
                    first = own[key.value]
                    self.notes.note(key, "", f"duplicate key {key.value!r}: it is on line {first} already")
                else:
                    own[key.value] = key.line
                    node.value.append((key, value))
            for source in merged:
                self.merge(source, node, own)
        node.is_open = False

    def merge(self, source: Node, node: Node, own: dict[str, int]) -> None:
        if source.tag != "map" or source.is_open:
            self.notes.note(source, "", "'<<' takes a mapping or a list of mappings, not itself")
            return
        self.charge(len(source.value), source)
        for key, value in source.value:
            if key.value not in own:
                own[key.value] = key.line
                node.value.append((key, value))


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Put the environment's values into a text; ValueError says what is wrong. Nothing is read twice."""
    parts: list[str] = []
    at = 0
    while (dollar := text.find("$", at)) >= 0:
        parts.append(text[at:dollar])
        follows = text[dollar + 1 : dollar + 2]
        if follows != "{":
            parts.append("$")
            at = dollar + (2 if follows == "$" else 1)
            continue
        end = text.find("}", dollar)
        if end < 0:
            raise ValueError("'${' without '}': write '$${' for the two characters themselves")
        parts.append(_value(text[dollar + 2 : end], environ))
        at = end + 1
    return "".join((*parts, text[at:]))


def _value(inner: str, environ: Mapping[str, str]) -> str:
    name, operator, rest = inner, "", ""
    if ":" in inner:
        name, _, rest = inner.partition(":")
        operator, rest = rest[:1], rest[1:]
    if not _NAME.fullmatch(name) or (":" in inner and operator not in ("-", "?")) or "${" in rest:
        raise ValueError(
            "malformed '${': write ${NAME}, ${NAME:-default} or ${NAME:?message}, none inside another"
        )
    value = environ.get(name)
    if operator == "-":
        return value or rest
    if operator == "?" and not value:
        raise ValueError(
            f"environment variable {name} is not set: {rest}"
            if rest
            else f"environment variable {name} is not set"
        )
    if value is None:
        raise ValueError(f"environment variable {name} is not set: set it, or write ${{{name}:-default}}")
    return value
