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
from types import MappingProxyType
from typing import Any

from _regsync.errors import Problem, clean

__all__ = ["Node", "Notes", "Unreadable", "compose", "expand"]

# The deepest legitimate document has 6 levels; 1,000,000 nodes are some 60,000 mappings.
_DEEPEST = 32
_MOST_NODES = 1_000_000

_TAG_PREFIX = "tag:yaml.org,2002:"
_KINDS = MappingProxyType(
    {"map": "a mapping", "seq": "a list", "str": "text", "int": "a number", "float": "a number"}
    | {"bool": "a truth value", "null": "empty", "timestamp": "a date", "merge": "a merge key"}
)


@dataclass(slots=True, eq=False)
class Node:
    """A YAML node with its place; `value` is text, a list of nodes, or a list of pairs of nodes.

    `tag` is the last word of the YAML tag; `shared` says that aliases lead here too.
    """

    line: int
    column: int
    tag: str
    value: Any
    shared: bool = False
    is_open: bool = False

    @property
    def kind(self) -> str:
        return _KINDS[self.tag]


class Unreadable(Exception):
    """The document cannot be read on: the problem is the last one noted."""


class Notes:
    """The problems found so far in one file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []

    def note(self, node: Node, path: str, message: str) -> None:
        self.problems.append(Problem(self.name, node.line, node.column, clean(path, 200), clean(message)))

    def unreadable(self, line: int, column: int, message: str) -> Unreadable:
        self.problems.append(Problem(self.name, line, column, "", clean(message)))
        return Unreadable()


def compose(text: bytes, notes: Notes) -> Node | None:
    """Return the root of the one document in `text`, None when there is none; Unreadable after a fatal note.

    PyYAML's own composer recurses once a level; this one keeps a stack, bounds depth and number of nodes,
    merges `<<` as it goes, and gives for an alias the very node of its anchor.
    """
    import yaml

    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = text.count(b"\n", 0, error.start) + 1, error.start - text.rfind(b"\n", 0, error.start)
        raise notes.unreadable(line, column, "not UTF-8: save the file as UTF-8") from None
    loader = None
    try:
        loader = yaml.SafeLoader(decoded)
        return _Composer(loader, yaml, notes).compose()
    except yaml.reader.ReaderError as error:
        line = decoded.count("\n", 0, error.position) + 1
        column = error.position - decoded.rfind("\n", 0, error.position)
        raise notes.unreadable(
            line, column, f"control character U+{error.character:04X}: remove it"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        message = error.problem or "cannot be parsed"
        if "'\\t'" in message:
            message = "a tab cannot stand here: indent with spaces"
        elif "alias" in (error.context or ""):
            message += ": a text that begins with '*' has to be quoted"
        raise notes.unreadable(mark.line + 1, mark.column + 1, f"malformed YAML: {message}") from None
    except (ValueError, OverflowError):
        # PyYAML lets chr() and int() refuse "\UFFFFFFFF" and an endless %YAML version themselves.
        line, column = (loader.line + 1, loader.column + 1) if loader is not None else (1, 1)
        raise notes.unreadable(line, column, "malformed YAML: a number out of range") from None


class _Composer:
    """One pass over the parser's events; `stack` holds the collections that are open."""

    def __init__(self, loader: Any, yaml: Any, notes: Notes) -> None:
        self.loader = loader
        self.yaml = yaml
        self.notes = notes
        self.anchors: dict[str, Node] = {}
        self.stack: list[Node] = []
        self.count = 0

    def compose(self) -> Node | None:
        events = self.yaml.events
        root: Node | None = None
        while not isinstance(event := self.loader.get_event(), events.StreamEndEvent):
            if isinstance(event, events.CollectionEndEvent):
                self.close(self.stack.pop())
            elif isinstance(event, events.NodeEvent):
                node = self.node(event)
                if self.stack:
                    self.stack[-1].value.append(node)
                else:
                    root = node
                if isinstance(event, events.CollectionStartEvent):
                    self.stack.append(node)
                    if len(self.stack) > _DEEPEST:
                        raise self.unreadable(event, f"nested more than {_DEEPEST} levels deep")
            elif isinstance(event, events.DocumentStartEvent) and root is not None:
                raise self.unreadable(event, "a second document: keep one in a file")
        return root

    def unreadable(self, event: Any, message: str) -> Unreadable:
        return self.notes.unreadable(event.start_mark.line + 1, event.start_mark.column + 1, message)

    def node(self, event: Any) -> Node:
        self.count += 1
        if self.count > _MOST_NODES:
            raise self.unreadable(event, f"more than {_MOST_NODES:,} values")
        if isinstance(event, self.yaml.AliasEvent):
            target = self.anchors.get(event.anchor)
            if target is None:
                raise self.unreadable(event, f"no anchor &{event.anchor}: quote a text that begins with '*'")
            target.shared = True
            return target
        line, column, tag = event.start_mark.line + 1, event.start_mark.column + 1, event.tag
        if isinstance(event, self.yaml.ScalarEvent):
            if tag is None or tag == "!":
                tag = "str"
                # Only texts with such a first character can be anything else: spares most of the look-ups.
                if event.implicit[0] and event.value[:1] in self.loader.yaml_implicit_resolvers:
                    tag = self.loader.resolve(self.yaml.ScalarNode, event.value, event.implicit)
            node = Node(line, column, tag.removeprefix(_TAG_PREFIX), event.value)
            if node.tag not in _KINDS:
                # PyYAML has a tag of its own for a plain "=".
                if node.tag != "value":
                    self.notes.note(node, "", f"YAML tag {tag} is not supported: remove it")
                node.tag = "str"
        else:
            kind = "map" if isinstance(event, self.yaml.MappingStartEvent) else "seq"
            node = Node(line, column, kind, [], is_open=True)
            if tag not in (None, "!", _TAG_PREFIX + kind):
                self.notes.note(node, "", f"YAML tag {tag} is not supported: remove it")
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def close(self, node: Node) -> None:
        """End a collection; of a mapping make pairs: no key twice, merged keys after its own."""
        if node.tag == "map":
            flat, node.value = node.value, []
            own: dict[str, Node] = {}
            merged: list[Node] = []
            for key, value in zip(flat[::2], flat[1::2], strict=True):
                if key.tag in ("map", "seq"):
                    self.notes.note(key, self.path(), f"{key.kind} cannot be a key")
                elif key.tag == "merge":
                    merged += value.value if value.tag == "seq" and not value.is_open else [value]
                elif key.value in own:
                    message = f"duplicate key: it is on line {own[key.value].line} already"
                    self.notes.note(key, f"{self.path()}.{key.value}".removeprefix("."), message)
                else:
                    own[key.value] = key
                    node.value.append((key, value))
            for source in merged:
                self.merge(source, node, own)
        node.is_open = False

    def merge(self, source: Node, node: Node, own: dict[str, Node]) -> None:
        if source.tag != "map" or source.is_open:
            self.notes.note(source, self.path(), "'<<' takes a mapping or a list of mappings, not itself")
            return
        self.count += len(source.value)
        if self.count > _MOST_NODES:
            raise self.notes.unreadable(source.line, source.column, f"more than {_MOST_NODES:,} values")
        for key, value in source.value:
            if key.value not in own:
                own[key.value] = key
                node.value.append((key, value))

    def path(self) -> str:
        """Return the key path of the collection that is being closed."""
        parts = []
        for node in self.stack:
            if node.tag == "seq":
                parts.append(f"[{len(node.value) - 1}]")
            elif len(node.value) % 2 == 0 and isinstance(node.value[-2].value, str):
                # Otherwise what is closed stands where a key should; that is a problem of its own.
                parts.append(f".{node.value[-2].value}")
        return "".join(parts).removeprefix(".")


# Unclosed `${` runs to the end of the text, so that each character is looked at once.
_DOLLAR = re.compile(r"\$(?:\$|\{[^}]*\}?)")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::([-?])((?:[^$]|\$(?!\{))*))?\}", re.DOTALL)


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Put the environment's values into a text; ValueError says what is wrong. Nothing is read twice."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        variable = _VARIABLE.fullmatch(match[0])
        if variable is None:
            form = "write ${NAME}, ${NAME:-default} or ${NAME:?message}, none in another, and $$ for a lone $"
            raise ValueError(f"malformed '${{': {form}")
        name, operator, rest = variable.groups()
        found = environ.get(name)
        if operator == "-":
            return found or rest
        if found is None or (operator == "?" and not found):
            raise ValueError(f"environment variable {name} is not set: {rest or 'set it, or give a default'}")
        return found

    return _DOLLAR.sub(value, text)
