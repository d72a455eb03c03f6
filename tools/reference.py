#!/usr/bin/env python3
"""Write the reference of the configuration into docs/configuration.md, from its JSON Schema.

    python3 tools/reference.py           put it between the markers
    python3 tools/reference.py --check   exit with 1 where docs/configuration.md has another

tests/unit/test_schema.py holds the schema against what `validate` accepts.

Owns: how a key is shown.
May not know: which keys there are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from _regsync.config import schema  # noqa: E402

__all__ = ["main", "reference", "updated"]

PAGE = ROOT / "docs" / "configuration.md"
BEGIN = "<!-- reference: begin -->"
END = "<!-- reference: end -->"
# A word, a duration or a size: YAML needs no quotes around it.
PLAIN = r"[A-Za-z][A-Za-z0-9.+/:-]*|\d+[hmd]\S*|\d+ [KMGT]i?B"
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
    "all_or_texts": "list or `all`",
    "flag": "true, false",
    "count": "number from 0",
    "count_from_1": "number from 1",
    "path": "path",
    "alias": "name",
    "targets": "name or list",
    "duration": "duration",
    "size": "size",
}


def main(argv: Sequence[str]) -> int:
    """Write or check the reference; return an exit status."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in argv:
        return 0 if updated(text) == text else 1
    PAGE.write_text(updated(text), encoding="utf-8")
    return 0


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
    document = schema()
    section = document if name == "config" else document["$defs"][name]
    yield f"| {title} | takes | default | meaning | example |"
    yield "|---|---|---|---|---|"
    for name_of_key, written_key in section["properties"].items():
        key = resolved(written_key, document)
        shown = f"`{name_of_key}`" + (
            " (required)" if name_of_key in section.get("required", ()) else ""
        )
        default = f"`{written(key['default'])}`" if key.get("default") not in (None, [], {}) else ""
        example = f"`{written(key['examples'][0])}`" if "examples" in key else ""
        text = key["description"].replace("|", r"\|")
        yield f"| {shown} | {takes(key)} | {default} | {text} | {example} |"


def resolved(key: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return a key of a mapping, or that of `defaults` to which it refers."""
    pointer = key.get("$ref", "").split("/")[1:]
    if "properties" not in pointer:
        return key
    for part in pointer:
        document = document[part]
    return document


def takes(key: dict[str, Any]) -> str:
    """Return which values a key takes: its choices, or a word or two."""
    if "anyOf" in key:
        choices = [f"`{choice}`" for choice in key["anyOf"][0]["enum"] if choice is not None]
        return "one of " + ", ".join(choices)
    if "$ref" in key:
        return TYPES.get(key["$ref"].rpartition("/")[2], "section")
    return "list" if key["type"] == "array" else "section"


def written(value: Any) -> str:
    """Return a default or an example as one writes it: quotes only where YAML wants them."""
    if isinstance(value, dict):
        entries = [f"{key}: {written(entry)}" for key, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, str) and not re.fullmatch(PLAIN, value):
        return f'"{value}"'
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
