"""A configuration written out: variables filled in, groups and `defaults` resolved, secrets hidden.

Owns: what of a configuration may be shown.
May not know: files, the process environment, how a value is used.
Invariants: what is written out loads again, and means the same; no secret is shown unasked.
Follows: docs/design.md sections 2 and 3.
"""

from __future__ import annotations

import re
from typing import Any

from _regsync.config.fields import SECTIONS, Field
from _regsync.config.reader import DOCUMENT, MAPPING, REGISTRY, ConfigFile, Reader
from _regsync.config.yaml import Node, dump, mask_values, substitute, variable_names
from _regsync.errors import ConfigError

_MASK = "********"

# Values of an expanded configuration. YAML aliases could repeat them until memory is full.
_MAX_EXPANDED = 1_000_000


def expand(file: ConfigFile, *, show_secrets: bool = False) -> str:
    """Return a configuration as YAML that loads again, without variables, groups and `defaults`.

    Without `show_secrets`, secrets stay variables or become asterisks. A text that is no secret
    keeps its variables if one of them gives a secret elsewhere. ConfigError as of `load`.
    """
    reader = Reader(file, lint=False)
    root = reader.read().node
    return dump(_Expansion(reader, show_secrets).plain(root, DOCUMENT))


class _Expansion:
    """Makes plain values of nodes that a reader has read without a problem."""

    def __init__(self, reader: Reader, show_secrets: bool) -> None:
        self.reader = reader
        self.show_secrets = show_secrets
        self.expanded = 0  # values made so far

    def plain(self, node: Node, field: Field) -> Any:
        """Return a node, read as a field, as YAML writes it: text, number, truth value, list or dict."""
        self.expanded += 1
        if self.expanded > _MAX_EXPANDED:
            raise ConfigError(f"the configuration expands to more than {_MAX_EXPANDED:,} values")
        match field.type:
            case "section":
                return self.plain_section(node, field.section)
            case "names":
                entries = node.entries.items()
                return {name: self.plain(entry.value, REGISTRY) for name, entry in entries}
            case "list":
                return [self.plain(item, MAPPING) for item in node.items]
            case "alias":
                return self.reader.value(node, field, "").alias
            case "targets":
                return [target.alias for target in self.reader.value(node, field, "")]
            case _ if node.tag == "seq":
                return [self.plain(item, field) for item in node.items]
            case _:
                return self.plain_scalar(node, field)

    def plain_section(self, node: Node, section_name: str) -> dict[str, Any]:
        nodes = self.field_nodes(node, section_name)
        return {
            field.name: self.plain(nodes[field.name], field)
            for field in SECTIONS[section_name]
            if field.name in nodes
        }

    def field_nodes(self, node: Node, section_name: str) -> dict[str, Node]:
        """Return the nodes of the fields that a section is written out with: its own, and those that it
        inherits or leaves to their defaults.
        """
        # A null counts as not set.
        nodes = {
            name: entry.value for name, entry in node.entries.items() if entry.value.tag != "null"
        }
        match section_name:
            case "config":
                nodes.setdefault("global", Node("map", 0, 0))
                # Mappings are written out with what they took from these two.
                nodes.pop("target_groups", None)
                nodes.pop("defaults", None)
            case "mapping":
                # Its own fields go before the defaults. Without `to`, the repository is called alike.
                nodes = {"to": nodes["from"], **self.reader.defaults.nodes, **nodes}
            case "global":
                for field in SECTIONS["global"]:
                    # Standard input is in no directory where a state could be.
                    has_no_place = field.name == "cache_dir" and not self.reader.file.base_dir
                    if field.default and not has_no_place:
                        nodes.setdefault(field.name, Node("str", 0, 0, text=field.default))
        return nodes

    def plain_scalar(self, node: Node, field: Field) -> Any:
        """Return a scalar with its variables replaced, unless that would show a secret."""
        text = substitute(node.text, self.reader.file.environ)
        is_secret = field.is_secret(text)
        shares_secret = bool(variable_names(node.text) & self.reader.secret_variables)
        if not self.show_secrets and (is_secret or shares_secret):
            return self.hidden(node.text, field, is_secret)

        # What is written out is read again: there `$$` is a `$`.
        if field.type not in ("flag", "count", "path"):
            return text.replace("$", "$$")
        value = self.reader.meaning(text, field)  # a truth value, a number, an absolute path
        return value.replace("$", "$$") if isinstance(value, str) else value

    def hidden(self, written: str, field: Field, is_secret: bool) -> str:
        """Return a text with its variables as they were written. Of a secret, all else is masked."""
        if not is_secret:
            return mask_values(written, "")
        if field.name != "proxy":
            return mask_values(written, _MASK)

        # Of a proxy's URL the user and password are masked, where an `@` shows their end.
        match = re.match(r"\w+://", written)
        scheme = match[0] if match else ""
        _, at, host = mask_values(written, "").rpartition("@")
        if at:
            return f"{scheme}{_MASK}@{host}"
        return scheme + mask_values(written[len(scheme) :], _MASK)
