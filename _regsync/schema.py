"""The JSON Schema of the configuration, for editors and for programs that write configurations.

Owns: how a row of the table of fields reads in JSON Schema. May not know: YAML, values, the model.
Invariant: it takes whatever `validate` takes, variables in the place of numbers and truth values
included; rules between fields, references between names and the grammars inside texts are `validate`'s.
Follows JSON Schema 2020-12, of which it uses only what older drafts spell alike, but for `$defs`.
"""

from __future__ import annotations

import json
from typing import Any

from _regsync.fields import SECTIONS, Field

__all__ = ["config_schema"]

_TEXT = {"type": "string", "minLength": 1}
# What is one variable wholly may become anything.
_VARIABLE = {"type": "string", "pattern": r"^\$\{[^{}]*\}$"}


def config_schema() -> dict[str, Any]:
    """Return the schema of the document, as JSON values."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "regsync configuration"}
    return {**head, **_section("config"), "$defs": {of: _section(of) for of in SECTIONS if of != "config"}}


def _section(name: str) -> dict[str, Any]:
    rows = SECTIONS[name]
    return {
        "type": "object",
        "properties": {row.name: _field(row) for row in rows},
        "required": [row.name for row in rows if row.required],
        "additionalProperties": False,
    }


def _field(row: Field) -> dict[str, Any]:
    shapes = _shapes(row) if row.required else [*_shapes(row), {"type": "null"}]
    shown: dict[str, Any] = {"description": row.meaning}
    if row.default:
        shown["default"] = value_of(row.default)
    if row.example:
        shown["examples"] = [value_of(row.example)]
    return {**shown, **(shapes[0] if len(shapes) == 1 else {"anyOf": shapes})}


def _shapes(row: Field) -> list[dict[str, Any]]:
    """Return what a field may be, one schema for each JSON type."""
    section = {"$ref": f"#/$defs/{row.of}"}
    texts = {"type": "array", "items": _TEXT, **({"minItems": 1} if row.empty else {})}
    aliases = {"type": "array", "items": _TEXT, "minItems": 1}
    if row.choices:
        return [{"enum": list(row.choices)}, {"type": "string", "pattern": r"\$\{"}]
    shapes: dict[str, list[dict[str, Any]]] = {
        "flag": [{"type": "boolean"}, _VARIABLE],
        "count": [{"type": "integer", "minimum": row.least, "maximum": 999_999_999}, _VARIABLE],
        "amount": [_TEXT, {"type": "number", "minimum": 0}],
        "texts": [texts],
        "one_or_texts": [_TEXT, texts],
        "targets": [_TEXT, aliases],
        "section": [section],
        "list": [{"type": "array", "items": section}],
        "names": [{"type": "object", "additionalProperties": section if row.of else aliases}],
    }
    return shapes.get(row.type, [_TEXT])


def value_of(written: str) -> Any:
    """Return what a default or an example of the table is as JSON: most are texts."""
    try:
        return json.loads(written)
    except ValueError:
        return written
