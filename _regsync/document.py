"""A YAML document as nodes that know their place, and the environment's part in its texts.

Owns: decoding, composition, duplicate and merged keys, `${NAME}`. May not know: which fields exist.
There are two ways to the same nodes: a short one for ordinary text, and PyYAML's events for all the rest.
Invariant: work and memory are bounded by the length of the input, whatever it nests, repeats or refers to;
a value never changes the document's structure.
Follows design.md section 3 (the first two points); YAML as PyYAML's safe loader resolves it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["Node", "Unreadable", "compose", "dump", "masked", "substitute", "variables"]

# The deepest legitimate document has 6 levels.
_DEEPEST = 32
# What `<<` repeats is read again each time; this is some 60,000 mappings.
_MOST_MERGED = 1_000_000

_TAG_PREFIX = "tag:yaml.org,2002:"
_KINDS = MappingProxyType(
    {"map": "a mapping", "seq": "a list", "str": "text", "int": "a whole number", "float": "a decimal number"}
    | {"bool": "a truth value", "null": "empty", "timestamp": "a date", "merge": "a merge key"}
)


class Node(NamedTuple):
    """A YAML node with its place; `value` is text, a list of nodes, or key and value nodes by key.

    `tag` is the last word of the YAML tag. Where an alias stands, stands the very node of its anchor.
    """

    tag: str
    value: Any
    line: int
    column: int

    @property
    def kind(self) -> str:
        return _KINDS[self.tag]


class Unreadable(Exception):
    """The document cannot be read on."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(message)
        self.place = line, column


def compose(text: bytes, note: Callable[[Node, str, str], None]) -> Node | None:
    """Return the root of the one document in `text`, None when there is none; `note` takes problems."""
    import yaml

    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _after(error.object[: error.start].decode(), "not UTF-8: save the file as UTF-8") from None
    try:
        loader: Any = yaml.SafeLoader(decoded)  # looks for control characters
        if root := _Ordinary(yaml.SafeLoader.yaml_implicit_resolvers).read(decoded):
            return root
        # PyYAML asks ten times a token, and where no key can begin no more are needed: a sixth of all time.
        more = loader.need_more_tokens
        loader.need_more_tokens = lambda: not (loader.tokens and not loader.possible_simple_keys) and more()
        return _Composer(loader, yaml, note).document()
    except yaml.reader.ReaderError as error:
        message = f"control character U+{error.character:04X}: remove it"
        raise _after(decoded[: error.position], message) from None
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        message = error.problem or "cannot be parsed"
        if "'\\t'" in message:
            message = "a tab cannot stand here: indent with spaces"
        elif "got '{'" in message:
            message += ": inside { } and [ ] a '${NAME}' has to be quoted"
        elif "alias" in (error.context or ""):
            message += ": a text that begins with '*' has to be quoted"
        raise _at(mark, f"malformed YAML: {message}") from None
    except (ValueError, OverflowError):
        # PyYAML lets chr() and int() refuse "\UFFFFFFFF" and an endless %YAML version themselves.
        raise _at(loader, "malformed YAML: a number out of range") from None


def _at(mark: Any, message: str) -> Unreadable:
    return Unreadable(mark.line + 1, mark.column + 1, message)


def _after(before: str, message: str) -> Unreadable:
    return Unreadable(before.count("\n") + 1, len(before) - before.rfind("\n"), message)


_PLAIN = r"[^\s\-?:,\[\]{}#&*!|>'\"%@`](?:[^\s#:]|:(?=\S)| +(?=[^\s#]))*"
_FLOW_PLAIN = r"[^\s\-?:,\[\]{}#&*!|>'\"%@`](?:[^\s#:,?\[\]{}]|:(?=[^\s,?\[\]{}])| +(?=[^\s#:,?\[\]{}]))*"
_KEY = r"([A-Za-z_][A-Za-z0-9_.-]{0,99}):(?= |$)"
_SCALAR = r"|\"([^\"\\]*)\"|'([^']*)'"
# Indentation, dashes, a key, what stands there, a comment.
# A pattern remembers hundreds of bytes for each word that it may have to give back.
_LONGEST_LINE = 10_000
# Blanks are always taken whole, so that no line can be split in more than one way.
_LINE = rf"( *)(?! )((?:- +(?! ))*)(?:{_KEY})? *(?! )(?:({_PLAIN}){_SCALAR}|([\[{{].*))? *(?! )(?:(?<![^ ])#.*)?$"
_FLOW_ITEM = rf" *(?! )(?:{_KEY})? *(?! )(?:({_FLOW_PLAIN}){_SCALAR}|(?=([\[{{])))"
_COMMA = r" *(?:,|(?=[\]}]))"


class _Unusual(Exception):
    """Something for PyYAML to understand, or to refuse."""


class _Ordinary:
    """Reads what nearly all configurations consist of, eight times as fast as PyYAML and to the same nodes:
    block mappings and lists, flow ones that end on their line, scalars of one line without escapes.
    """

    def __init__(self, resolvers: Any) -> None:
        self.resolvers = resolvers
        self.tags: dict[str, str] = {}
        top = Node("top", [], 0, 0)
        # Open blocks with their columns, and where the next value goes: into what, under which key.
        self.open = [(-1, top)]
        self.hole: tuple[Node, Node | None, int, int] | None = (top, None, 0, 0)

    def read(self, text: str) -> Node | None:
        """Return the root; None where there is anything else, and where nothing is."""
        if re.search("[\t\r\x85\u2028\u2029\ufeff]", text):
            return None
        lines = text.split("\n")
        try:
            for number, line in enumerate(lines, 1):
                if number > 1 or line != "---":
                    self.line(line, number)
        except _Unusual:
            return None
        if len(self.open) == 1:
            return None
        self.fill(None)
        return self.open[0][1].value[0]  # type: ignore[no-any-return]

    def line(self, line: str, number: int) -> None:
        match = re.match(_LINE, line) if len(line) < _LONGEST_LINE else None
        if match is None:
            raise _Unusual
        _, dashes, key, *scalar, flow = match.groups()
        for dash in range(match.start(2), match.end(2)) if dashes else ():
            if line[dash] == "-":
                self.hole = self.block("seq", number, dash), None, number, dash + 2
        if key is not None:
            section, name = self.block("map", number, match.start(3)), self.plain(key, number, match.start(3))
            if key in section.value:
                raise _Unusual
            self.hole = section, name, number, match.end(3) + 2
        if scalar != [None, None, None] or flow:
            if not (dashes or key):
                raise _Unusual
            if not flow:
                self.fill(self.scalar(match, 4, number))
                return
            value, end = self.flow(line, number, match.start(7))
            if not re.match(" *(?:(?<= )#.*)?$", line[end:]):
                raise _Unusual
            self.fill(value)

    def block(self, kind: str, number: int, column: int) -> Node:
        """Return the mapping or list at a column, which goes on or begins where a value is missing."""
        while self.open[-1][0] > column or (self.open[-1][0] == column and self.open[-1][1].tag > kind):
            self.open.pop()
        at, node = self.open[-1]
        if at == column and node.tag == kind:
            self.fill(None)
            return node
        if self.hole is None or self.hole[0] is not node or len(self.open) > 8:
            raise _Unusual
        node = Node(kind, {} if kind == "map" else [], number, column + 1)
        self.fill(node)
        self.open.append((column, node))
        return node

    def fill(self, value: Node | None) -> None:
        """Put a value where one is missing; None stands for an empty one."""
        if self.hole is not None:
            parent, key, *place = self.hole
            value = value or Node("null", "", *place)
            if key is None:
                parent.value.append(value)
            else:
                parent.value[key.value] = key, value
            self.hole = None

    def flow(self, line: str, number: int, place: int, depth: int = 1) -> tuple[Node, int]:
        """Return the flow collection that begins at a place, and where it ends."""
        section = line[place] == "{"
        node = Node("map" if section else "seq", {} if section else [], number, place + 1)
        place += 1
        while not (end := re.compile(r" *([\]}])").match(line, place)):
            match = re.compile(_FLOW_ITEM).match(line, place)
            if match is None or (match[1] is not None) != section or depth > 8:
                raise _Unusual
            if section and match[1] in node.value:
                raise _Unusual
            place = match.end()
            if match[5]:
                value, place = self.flow(line, number, place, depth + 1)
            else:
                value = self.scalar(match, 2, number)
            if section:
                node.value[match[1]] = self.plain(match[1], number, match.start(1)), value
            else:
                node.value.append(value)
            comma = re.compile(_COMMA).match(line, place)
            if comma is None:
                raise _Unusual
            place = comma.end()
        if end[1] != ("}" if section else "]"):
            raise _Unusual
        return node, end.end()

    def scalar(self, match: re.Match[str], first: int, number: int) -> Node:
        if match[first] is not None:
            return self.plain(match[first], number, match.start(first))
        group = first + (1 if match[first + 1] is not None else 2)
        return Node("str", match[group], number, match.start(group))

    def plain(self, text: str, number: int, column: int) -> Node:
        tag = self.tags.get(text)
        if tag is None:
            rules = self.resolvers.get(text[0], ())
            tag = next((tag for tag, pattern in rules if pattern.match(text)), "str")
            tag = self.tags[text] = tag.removeprefix(_TAG_PREFIX).replace("value", "str")
        return Node(tag, text, number, column + 1)


class _Composer:
    """One pass over the parser's events. PyYAML's own would not bound depth, nor name repeated keys."""

    def __init__(self, loader: Any, yaml: Any, note: Callable[[Node, str, str], None]) -> None:
        self.loader = loader
        self.yaml = yaml
        self.note = note
        self.anchors: dict[str, Node] = {}
        self.merged = 0

    def document(self) -> Node | None:
        root: Node | None = None
        while not isinstance(event := self.loader.get_event(), self.yaml.StreamEndEvent):
            if isinstance(event, self.yaml.DocumentStartEvent) and root is not None:
                raise _at(event.start_mark, "a second document: keep one in a file")
            if isinstance(event, self.yaml.NodeEvent):
                root = self.node(event, "", 1)
        return root

    def node(self, event: Any, path: str, depth: int) -> Node:
        if isinstance(event, self.yaml.AliasEvent):
            # An anchor counts from the end of its node: nothing holds itself.
            if event.anchor not in self.anchors:
                raise _at(event.start_mark, f"no anchor &{event.anchor} above: quote text beginning with '*'")
            return self.anchors[event.anchor]
        if depth > _DEEPEST:
            raise _at(event.start_mark, f"nested more than {_DEEPEST} levels deep")
        value: Any
        if isinstance(event, self.yaml.ScalarEvent):
            tag, value = "str", event.value
            if event.implicit[0]:
                tag = self.loader.resolve(self.yaml.ScalarNode, value, event.implicit)
                # PyYAML has a tag of its own for a plain "=".
                tag = tag.removeprefix(_TAG_PREFIX).replace("value", "str")
        elif isinstance(event, self.yaml.MappingStartEvent):
            tag, value = "map", self.mapping(path, depth + 1)
        else:
            tag, value = "seq", self.sequence(path, depth + 1)
        node = Node(tag, value, event.start_mark.line + 1, event.start_mark.column + 1)
        if event.tag not in (None, "!", _TAG_PREFIX + tag):
            self.note(node, path, f"YAML tag {event.tag} is not supported: remove it")
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def sequence(self, path: str, depth: int) -> list[Node]:
        nodes: list[Node] = []
        while not isinstance(event := self.loader.get_event(), self.yaml.SequenceEndEvent):
            nodes.append(self.node(event, f"{path}[{len(nodes)}]", depth))
        return nodes

    def mapping(self, path: str, depth: int) -> dict[str, tuple[Node, Node]]:
        """Return keys with values by name: no key twice, merged keys after the mapping's own."""
        pairs: dict[str, tuple[Node, Node]] = {}
        merged: list[Node] = []
        while not isinstance(event := self.loader.get_event(), self.yaml.MappingEndEvent):
            key = self.node(event, path, depth)
            # Cut, because a long key must not be repeated for each of many items.
            inner = f"{path}.{key.value[:64]}".removeprefix(".") if isinstance(key.value, str) else path
            value = self.node(self.loader.get_event(), inner, depth)
            if key.tag in ("map", "seq"):
                self.note(key, path, f"{key.kind} cannot be a key")
            elif key.tag == "merge":
                merged += value.value if value.tag == "seq" else [value]
            elif key.value in pairs:
                line = pairs[key.value][0].line
                self.note(key, inner, f"duplicate key: it is on line {line} already")
            else:
                pairs[key.value] = key, value
        for source in merged:
            if source.tag != "map":
                self.note(source, path, "'<<' takes a mapping or a list of mappings")
                continue
            self.merged += 1 + len(source.value)
            if self.merged > _MOST_MERGED:
                raise Unreadable(source.line, source.column, f"'<<' repeats over {_MOST_MERGED:,} values")
            for name, pair in source.value.items():
                pairs.setdefault(name, pair)
        return pairs


# `${` that nothing closes properly is matched alone. Each character is looked at once.
_VARIABLE = r"\$\$|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::([-?])((?:[^$}]|\$(?!\{))*))?\})?"


def dump(value: object) -> str:
    """Return plain values as a YAML document that every reader of YAML understands alike."""
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def variables(text: str) -> set[str]:
    """Return the names that `substitute` looks up."""
    return {name for name, _, _ in re.findall(_VARIABLE, text) if name}


def masked(text: str, mask: str) -> str:
    """Return a text with its variables as `${NAME}`, defaults left out, and `mask`, if any, for the rest."""
    shown = ""
    for match in re.finditer(rf"{_VARIABLE}|[^$]+|\$", text):
        piece = f"${{{match[1]}}}" if match[1] else mask or match[0]
        if piece != mask or not shown.endswith(mask):
            shown += piece
    return shown


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """Put the environment's values into a text; ValueError says what is wrong. Nothing is read twice."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if match[0] == "$$":
            return "$"
        if name is None:
            form = "write ${NAME}, ${NAME:-default} or ${NAME:?message}, none in another, and $$ for a lone $"
            raise ValueError(f"malformed '${{': {form}")
        found = environ.get(name)
        if operator == "-":
            return found or rest
        if found is None or (operator and not found):
            raise ValueError(f"environment variable {name} is not set: {rest or 'set it, or give a default'}")
        return found

    return re.sub(_VARIABLE, value, text) if "$" in text else text
