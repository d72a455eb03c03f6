"""A YAML document as nodes that know their place, and the environment's part in its texts. Owns:
decoding, composition, duplicate and merged keys, `${NAME}`. May not know: which fields exist.
Invariant: work and memory are bounded by the length of the input, whatever it nests, repeats or
refers to; a value never changes the document's structure; the short way for usual text and PyYAML's
events lead to the same nodes. Follows docs/design.md 3."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

_DEEPEST = 32  # levels; legitimate documents have 6


_MOST_MERGED = 1_000_000  # what `<<` repeats is read again each time; this is some 60,000 mappings


_TAG_PREFIX = "tag:yaml.org,2002:"


# `${` that nothing closes properly is matched alone. Each character is looked at once.
_VARIABLE = r"\$\$|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::([-?])((?:[^$}]|\$(?!\{))*))?\})?"


_KINDS = {
    "map": "a mapping",
    "seq": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a decimal number",
    "bool": "a truth value",
    "null": "empty",
    "timestamp": "a date",
    "merge": "a merge key",
}


class Node(NamedTuple):
    """A YAML node with its place; `value` is text, a list of nodes, or key and value nodes by key,
    `tag` the last word of the YAML tag. Where an alias stands, stands the very node of its anchor.
    """

    tag: str
    value: Any
    line: int
    column: int

    @property
    def kind(self) -> str:
        return _KINDS[self.tag]


class Unreadable(Exception):
    """The document cannot be read on; its arguments are line, column and message."""


def compose(text: bytes, note: Callable[[Node, str, str], None]) -> Node | None:
    """Return the root of the one document in `text`, None when there is none; `note` takes
    problems.
    """
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _after(
            error.object[: error.start].decode(), "not UTF-8: save the file as UTF-8"
        ) from None
    if root := _Ordinary().read(decoded):
        return root
    import yaml  # 15 ms of a start

    try:
        loader: Any = yaml.SafeLoader(decoded)  # looks for control characters
        return _Composer(loader, yaml, note).document()
    except yaml.reader.ReaderError as error:
        raise _after(
            decoded[: error.position], f"control character U+{error.character:04X}: remove it"
        ) from None
    except yaml.MarkedYAMLError as error:
        message = error.problem or "cannot be parsed"
        if "'\\t'" in message:
            message = "a tab cannot stand here: indent with spaces"
        elif "got '{'" in message:
            message += ": inside { } and [ ] a '${NAME}' has to be quoted"
        elif "alias" in (error.context or ""):
            message += ": a text that begins with '*' has to be quoted"
        raise _at(error.problem_mark or error.context_mark, f"malformed YAML: {message}") from None
    except (ValueError, OverflowError):
        # PyYAML lets chr() and int() refuse "\UFFFFFFFF" and an endless %YAML version themselves.
        raise _at(loader, "malformed YAML: a number out of range") from None


def _at(mark: Any, message: str) -> Unreadable:
    return Unreadable(mark.line + 1, mark.column + 1, message)


def _after(before: str, message: str) -> Unreadable:
    return Unreadable(before.count("\n") + 1, len(before) - before.rfind("\n"), message)


def _tag(text: str) -> str:
    if text.isascii() and text.isdecimal() and (text[0] != "0" or text == "0"):
        return "int"
    if text in ("true", "false", "null"):
        return "null" if text == "null" else "bool"
    if text and text.lower() not in _WORDS and (text[0] not in _STARTS or text[-1] not in _ENDS):
        return "str"
    import yaml

    rules: Any = yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], ())
    tag: str = next((tag for tag, pattern in rules if pattern.match(text)), "str")
    return tag.removeprefix(_TAG_PREFIX).replace(
        "value", "str"
    )  # PyYAML has a tag of its own for "="


def _pattern(ends: str) -> str:
    """Return the pattern of a token, or of a line's end, where `ends` are what else ends a plain
    text.
    """
    plain = (
        rf"[^\s\-?:,\[\]{{}}#&*!|>'\"%@`](?:[^\s#:{ends}]|:(?=[^\s{ends}])| +(?=[^\s#:{ends}]))*"
    )
    token = (
        r"(-)(?= |$)|([A-Za-z_][\w.-]{0,99}):(?= |$)|\"([^\"\\]{0,99})\":|\"([^\"\\]*)\"|'([^']*)'"
    )
    # Blanks are always taken whole, so that no line can be split in more than one way.
    return rf" *(?! )(?:{token}|({plain})|([\[\]{{}},])|(?:(?<![^ ])#.*)?$)"


_BLOCK = _pattern("")


_FLOW = _pattern(r",?\[\]{}")


# By the groups of the pattern: what a token is, where its own text does not say it.
_IN_BLOCK, _IN_FLOW = (("", "-", key, "name", "str", "str", None, "") for key in (":", "key"))


_LONGEST_LINE = (
    10_000  # a pattern remembers hundreds of bytes for each word that it may have to give back
)


# columns of block collections, levels of flow ones: no deeper than `_DEEPEST`
_FARTHEST = 22


_MOST_NESTED = 8


_HELD = frozenset({"[", "{", *_KINDS})


# What may be no text: PyYAML is asked about these words, and where a text begins and ends as other
# values do.
_WORDS = frozenset({"yes", "no", "true", "false", "on", "off", "null"})


_STARTS = "~<=-+.0123456789"


_ENDS = "~<=._0123456789abcdefABCDEFnNZ"


_TOP = Node("-", "", 0, -1)


_END = Node("", "", -1, 0)


class _Unusual(Exception):
    """Something for PyYAML to understand, or to refuse."""


class _Ordinary:
    """Reads block collections, flow ones that end on their line and scalars of one line without
    escapes, several times as fast as PyYAML. Its tokens are the scalars' nodes, and nodes with an
    indicator or bracket for a tag."""

    def read(self, text: str) -> Node | None:
        """Return the root; None where there is anything else, and where nothing is."""
        self.tokens = self.split(text)
        try:
            self.token = next(self.tokens, _END)
            root = self.value(_TOP)
        except _Unusual:
            return None
        return root if self.token is _END else None

    def split(self, text: str) -> Iterator[Node]:
        block = (re.compile(_BLOCK), _IN_BLOCK)
        flow = (re.compile(_FLOW), _IN_FLOW)
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > _LONGEST_LINE or not line.isprintable() or line[:3] == "...":
                raise _Unusual
            place = 3 if number == 1 and line == "---" else 0
            level = 0
            while level <= _MOST_NESTED:
                pattern, tags = flow if level else block
                if not (match := pattern.match(line, place)):
                    raise _Unusual
                if not (group := match.lastindex):
                    break
                tag = tags[group]
                place = match.end()
                tag = _tag(match[group]) if tag is None else tag or match[group]
                level += (tag in ("[", "{")) - (tag in ("]", "}"))
                # The column of a quoted text is that of its quote.
                yield Node(
                    tag,
                    match[group],
                    number,
                    match.start(group) + (tags[group] not in ("str", "name")),
                )
            if level:
                raise _Unusual

    def take(self, tags: Container[str]) -> Node:
        token = self.token
        if token.tag not in tags:
            raise _Unusual
        self.token = next(self.tokens, _END)
        return token

    def value(self, above: Node) -> Node:
        """Return what a dash, a key or a bracket holds."""
        tag, _, line, column = self.token
        in_flow = above.tag in ("[", "key", "name")
        # A list may stand at the column of its key.
        if not in_flow and column < above.column + ((tag, above.tag) != ("-", ":")):
            return Node(
                "null", "", above.line, above.column + len(above.value) + (above.tag == ":")
            )
        if tag in ("-", ":"):
            if in_flow or (line == above.line and above.tag == ":") or column > _FARTHEST:
                raise _Unusual
            return self.collection(self.token)
        token = self.take(_HELD)
        node = self.collection(token) if tag in ("[", "{") else token
        if not (in_flow or above is _TOP) and (line != above.line or self.token.line == line):
            raise _Unusual
        return node

    def collection(self, first: Node) -> Node:
        """Return what begins with an indicator or an opening bracket."""
        end = {"[": "]", "{": "}"}.get(first.tag)
        node = Node(
            *(("seq", []) if first.tag in ("-", "[") else ("map", {})), first.line, first.column
        )
        while (
            self.token.tag != end
            if end
            else (self.token.tag, self.token.column) == (first.tag, first.column)
        ):
            key = first if first.tag == "[" else self.take(("key", "name") if end else (first.tag,))
            value = self.value(key)
            if node.tag == "seq":
                node.value.append(value)
            elif key.value in node.value:
                raise _Unusual
            else:
                node.value[key.value] = (
                    key._replace(tag="str" if key.tag == "name" else _tag(key.value)),
                    value,
                )
            if end and self.token.tag != end:
                self.take({","})
        if end:
            self.take({end})
        return node


class _Composer:
    """One pass over the parser's events. PyYAML's own would not bound depth, nor name repeated
    keys.
    """

    def __init__(self, loader: Any, yaml: Any, note: Callable[[Node, str, str], None]) -> None:
        self.loader = loader
        self.yaml = yaml
        self.note = note
        self.anchors: dict[str, Node] = {}
        self.merged = 0

    def until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := self.loader.get_event(), end):
            yield event

    def document(self) -> Node | None:
        root: Node | None = None
        for event in self.until(self.yaml.StreamEndEvent):
            if isinstance(event, self.yaml.DocumentStartEvent) and root is not None:
                raise _at(event.start_mark, "a second document: keep one in a file")
            if isinstance(event, self.yaml.NodeEvent):
                root = self.node(event, "", 1)
        return root

    def node(self, event: Any, path: str, depth: int) -> Node:
        if isinstance(event, self.yaml.AliasEvent):
            if (
                event.anchor not in self.anchors
            ):  # it counts from the end of its node: nothing holds itself
                raise _at(
                    event.start_mark, "no anchor of that name above: quote text beginning with '*'"
                )
            return self.anchors[event.anchor]
        if depth > _DEEPEST:
            raise _at(event.start_mark, f"nested more than {_DEEPEST} levels deep")
        tag = "str"
        value = getattr(event, "value", None)
        if isinstance(event, self.yaml.MappingStartEvent):
            tag = "map"
            value = self.mapping(path, depth + 1)
        elif isinstance(event, self.yaml.SequenceStartEvent):
            items = enumerate(self.until(self.yaml.SequenceEndEvent))
            tag = "seq"
            value = [self.node(item, f"{path}[{index}]", depth + 1) for index, item in items]
        elif event.implicit[0]:
            tag = _tag(event.value)
        node = Node(tag, value, event.start_mark.line + 1, event.start_mark.column + 1)
        if event.tag not in (None, "!", _TAG_PREFIX + tag):
            self.note(
                node,
                path,
                "a YAML tag is not supported: remove it, or quote text beginning with '!'",
            )
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def mapping(self, path: str, depth: int) -> dict[str, tuple[Node, Node]]:
        """Return keys with values by name: no key twice, merged keys after the mapping's own."""
        pairs: dict[str, tuple[Node, Node]] = {}
        merged: list[Node] = []
        for event in self.until(self.yaml.MappingEndEvent):
            key = self.node(event, path, depth)
            # Cut, because a long key must not be repeated for each of many items.
            inner = (
                f"{path}.{key.value[:64]}".removeprefix(".") if isinstance(key.value, str) else path
            )
            value = self.node(self.loader.get_event(), inner, depth)
            if key.tag in ("map", "seq"):
                self.note(key, path, f"{key.kind} cannot be a key")
            elif key.tag == "merge":
                merged += value.value if value.tag == "seq" else [value]
            elif key.value in pairs:
                self.note(
                    key, inner, f"duplicate key: it is on line {pairs[key.value][0].line} already"
                )
            else:
                pairs[key.value] = key, value
        for source in merged:
            if source.tag != "map":
                self.note(source, path, "'<<' takes a mapping or a list of mappings")
                continue
            self.merged += 1 + len(source.value)
            if self.merged > _MOST_MERGED:
                raise Unreadable(
                    source.line, source.column, f"'<<' repeats over {_MOST_MERGED:,} values"
                )
            for name, pair in source.value.items():
                pairs.setdefault(name, pair)
        return pairs


def dump(value: object) -> str:
    """Return plain values as a YAML document that every reader of YAML understands alike."""
    import yaml

    return yaml.safe_dump(
        value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def variables(text: str) -> set[str]:
    """Return the names that `substitute` looks up."""
    return {name for name, _, _ in re.findall(_VARIABLE, text) if name}


def masked(text: str, mask: str) -> str:
    """Return a text with its variables as `${NAME}`, defaults left out, and `mask`, if any, for the
    rest.
    """
    shown = ""
    for match in re.finditer(rf"{_VARIABLE}|[^$]+|\$", text):
        piece = f"${{{match[1]}}}" if match[1] else mask or match[0]
        if piece != mask or not shown.endswith(mask):
            shown += piece
    return shown


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """Put the environment's values into a text; ValueError says what is wrong. Nothing is read
    twice.
    """

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
            raise ValueError(
                f"environment variable {name} is not set: {rest or 'set it, or give a default'}"
            )
        return found

    return re.sub(_VARIABLE, value, text) if "$" in text else text
