"""The expansion of a configuration: variables, groups and `defaults` resolved, secrets masked.

Owns: which parts of a configuration may be printed.
May not know: files, the process environment, how a value is used.
Invariants: an expanded configuration can be loaded again and has the same meaning. No secret is
printed unless the caller requests it.
Follows: docs/design.md sections 2 and 3.
"""

from __future__ import annotations

import re
from typing import Any

from _regsync.config.fields import SECTIONS, Field
from _regsync.config.reader import DOCUMENT, MAPPING, REGISTRY, ConfigFile, Reader
from _regsync.config.yaml import (
    Node,
    drop_defaults,
    dump,
    mask_literals,
    substitute,
    variable_names,
)
from _regsync.errors import ConfigError

_MASK = "********"

# An expanded configuration may have at most this many values. YAML aliases could otherwise repeat
# values until memory is exhausted.
_MAX_EXPANDED = 1_000_000

# The types of fields that are expanded to their parsed value: a bool, an int or an absolute path.
# Other fields keep the form in which they are written: a duration stays `7d`.
_PARSED_TYPES = ("flag", "count", "path")


def expand(file: ConfigFile, *, show_secrets: bool = False) -> str:
    """Return a configuration as YAML with all variables, groups and `defaults` resolved.

    Unless `show_secrets` is set, the variables in secrets are kept and the other parts of secrets
    are masked. A text that is not secret keeps its variables if one of them also occurs in a
    secret. Raises ConfigError as `load` does.
    """
    reader = Reader(file)
    document = reader.read_document()
    expansion = _Expansion(reader, show_secrets=show_secrets)
    return dump(expansion.to_plain(document.node, DOCUMENT))


class _Expansion:
    """Converts the nodes of a valid configuration to plain values that YAML can represent."""

    def __init__(self, reader: Reader, *, show_secrets: bool) -> None:
        # Has read the whole configuration without a problem, so it has `defaults`, the groups and
        # the names of the variables in secrets.
        self.reader = reader
        self.show_secrets = show_secrets
        self.value_count = 0  # values converted so far

    def to_plain(self, node: Node, field: Field) -> Any:
        """Return the value of a field as a str, int, bool, list or dict.

        Raises ConfigError if more than `_MAX_EXPANDED` values have been converted.
        """
        self.value_count += 1
        if self.value_count > _MAX_EXPANDED:
            raise ConfigError(f"the configuration expands to more than {_MAX_EXPANDED:,} values")
        match field.type:
            case "section":
                return self.section_to_plain(node, field.section)
            case "names":  # only `registries`, because `expanded_nodes` drops `target_groups`
                entries = node.entries.items()
                return {name: self.to_plain(entry.value, REGISTRY) for name, entry in entries}
            case "list":
                return [self.to_plain(item, MAPPING) for item in node.items]
            # `convert` returns the registries that it found when the document was read.
            case "alias":
                return _escape(self.reader.convert(node, field, path="").alias)
            case "targets":
                registries = self.reader.convert(node, field, path="")
                return [_escape(registry.alias) for registry in registries]
            case _ if node.tag == "seq":  # a list of scalars, all of the type of the field
                return [self.to_plain(item, field) for item in node.items]
            case _:
                return self.scalar_to_plain(node, field)

    def section_to_plain(self, node: Node, section_name: str) -> dict[str, Any]:
        nodes = self.expanded_nodes(node, section_name)
        return {
            field.name: self.to_plain(nodes[field.name], field)
            for field in SECTIONS[section_name]
            if field.name in nodes
        }

    def expanded_nodes(self, node: Node, section_name: str) -> dict[str, Node]:
        """Return the node of each field that the expanded section has, by the field's name."""
        # A field with the value null is not set.
        nodes = {
            name: entry.value for name, entry in node.entries.items() if entry.value.tag != "null"
        }
        match section_name:
            case "config":
                nodes.setdefault("global", Node("map", 0, 0))  # for its default values
                # The expanded mappings contain the values of these two sections.
                nodes.pop("target_groups", None)
                nodes.pop("defaults", None)
            case "mapping":
                # The default value of `to` is the value of `from`.
                nodes = {"to": nodes["from"], **self.reader.defaults.nodes, **nodes}
            case "global":
                nodes = {**self.global_defaults(), **nodes}
        return nodes

    def global_defaults(self) -> dict[str, Node]:
        """Return a node for each default value of the section `global`, by the field's name."""
        defaults = {field.name: field.default for field in SECTIONS["global"] if field.default}
        if self.reader.file.base_dir is None:
            # The default directory is beside the file. Standard input has no such directory.
            defaults.pop("cache_dir", None)
        return {name: Node("str", 0, 0, text=default) for name, default in defaults.items()}

    def scalar_to_plain(self, node: Node, field: Field) -> Any:
        """Return the value of a scalar with its variables replaced by their values.

        Unless `show_secrets` is set, a secret is masked except for its variables. A text that
        shares a variable with a secret keeps all its variables.
        """
        text = substitute(node.text, self.reader.file.environ)
        if not self.show_secrets:
            if field.is_secret(text):
                is_url = field.name == "proxy"
                return _mask_login(node.text) if is_url else mask_literals(node.text, _MASK)
            shares_variable = bool(variable_names(node.text) & self.reader.secret_variables)
            if shares_variable:
                return drop_defaults(node.text)  # the default of a variable may be a secret too

        value = self.reader.parse_text(text, field) if field.type in _PARSED_TYPES else text
        return _escape(value) if isinstance(value, str) else value


def _escape(text: str) -> str:
    """Return a text as a configuration has to write it: there `$$` is a `$`."""
    return text.replace("$", "$$")


def _mask_login(url: str) -> str:
    """Return a URL, as written in the configuration, with its user name and password masked."""
    match = re.match(r"\w+://", url)
    scheme = match[0] if match else ""
    # The default of a variable may contain an `@` that does not separate the login from the host.
    _, separator, host = drop_defaults(url).rpartition("@")
    if separator:
        return f"{scheme}{_MASK}@{host}"
    # The `@` is in the value of a variable, so it is unknown which characters are the login.
    return scheme + mask_literals(url.removeprefix(scheme), _MASK)
