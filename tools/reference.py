#!/usr/bin/env python3
"""Write the reference of the configuration into docs/configuration.md, from its JSON Schema.

    .venv/bin/python tools/reference.py

tests/unit/test_schema.py holds the schema against what `validate` accepts, tests/test_documents.py
the page against the schema.

Owns: how a key is shown.
May not know: which keys there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent

__all__ = ["reference", "updated"]

PAGE = ROOT / "docs" / "configuration.md"
BEGIN = "<!-- reference: begin -->"
END = "<!-- reference: end -->"
SCHEMA = json.loads((ROOT / "_regsync" / "config.schema.json").read_text(encoding="utf-8"))
# Sections in reading order, and where each stands; `defaults` takes a mapping's last fields.
TITLES = {
    "config": "The document",
    "registry": "Each of `registries`",
    "credentials": "`credentials`",
    "mapping": "Each of `mappings` (`defaults` takes all but `from` and `to`)",
    "tags": "`tags`",
    "artifacts": "`artifacts`",
    "global": "`global`",
}
# What a key takes, by the name of its type in the schema.
TYPES = {
    "required_text": "text",
    "text": "text",
    "texts": "list",
    "one_or_texts": "text or list",
    "flag": "true, false",
    "count": "number from 0",
    "count_from_1": "number from 1",
    "path": "path",
    "alias": "name",
    "targets": "name or list",
    "duration": "duration",
    "size": "size",
}


def updated(readme: str) -> str:
    """Return the page with the reference of now between its markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"docs/configuration.md has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{reference()}{END}{after}"


def reference() -> str:
    """Return one table for each section, in Markdown."""
    return "\n".join("\n".join([*table(name, title), ""]) for name, title in TITLES.items())


def table(name: str, title: str) -> Iterator[str]:
    """Give the lines of one section's table."""
    section = SCHEMA if name == "config" else SCHEMA["$defs"][name]
    yield f"| {title} | takes | default | meaning | example |"
    yield "|---|---|---|---|---|"
    for name_of_key, written_key in section["properties"].items():
        key = resolved(written_key, SCHEMA)
        required = " (required)" if name_of_key in section.get("required", ()) else ""
        default = f"`{written(key['default'])}`" if key.get("default") not in (None, [], {}) else ""
        example = f"`{written(key['examples'][0])}`" if "examples" in key else ""
        text = key["description"].replace("|", r"\|")
        yield f"| `{name_of_key}`{required} | {takes(key)} | {default} | {text} | {example} |"


def resolved(key: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return a key of a mapping, or that of `defaults` to which it refers."""
    name = key.get("$ref", "").removeprefix("#/$defs/defaults/properties/")
    found: dict[str, Any] = document["$defs"]["defaults"]["properties"].get(name, key)
    return found


def takes(key: dict[str, Any]) -> str:
    """Return which values a key takes: its choices, or a word or two."""
    if "anyOf" in key:
        choices = [f"`{choice}`" for choice in key["anyOf"][0]["enum"] if choice is not None]
        return "one of " + ", ".join(choices)
    if "$ref" in key:
        return TYPES.get(key["$ref"].rpartition("/")[2], "section")
    return "list" if key["type"] == "array" else "section"


def written(value: Any) -> str:
    """Return a default or an example as one writes it in YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
