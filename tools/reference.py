#!/usr/bin/env python3
"""Write the reference of the configuration into docs/configuration.md, from the table that validates.

    python3 tools/reference.py           put it between the markers
    python3 tools/reference.py --check   exit with 1 where docs/configuration.md has another

The same rows make the errors of `validate` and the JSON Schema, so the three cannot differ.

Owns: how a row of the table is shown.
May not know: which fields there are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from _regsync.config.fields import (  # noqa: E402
    SECTIONS,
    Field,
    json_value,
    parse_age,
    parse_duration,
    parse_size,
)

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
TYPES = {
    "text": "text",
    "texts": "list",
    "one_or_texts": "text or list",
    "all_or_texts": "list or `all`",
    "flag": "true, false",
    "count": "number",
    "path": "path",
    "alias": "name",
    "targets": "name or list",
    "section": "section",
    "list": "list",
    "names": "section",
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
    yield f"| {title} | takes | default | meaning | example |"
    yield "|---|---|---|---|---|"
    for row in SECTIONS[name]:
        key = f"`{row.name}`" + (" (required)" if row.required else "")
        default = f"`{row.default}`" if row.default not in ("", "[]", "{}") else ""
        text = row.meaning.replace("|", r"\|")
        yield f"| {key} | {takes(row)} | {default} | {text} | {examples(row)} |"


def takes(row: Field) -> str:
    """Return which values a field takes: its choices, or a word or two."""
    if row.parse in (parse_duration, parse_age):
        return "duration"
    if row.parse is parse_size:
        return "size"
    if row.choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in row.choices)
    return TYPES[row.type] + (f" from {row.minimum}" if row.type == "count" else "")


def examples(row: Field) -> str:
    """Return a field's example as one writes it in YAML."""
    return f"`{written(row.example)}`" if row.example else ""


def written(example: str) -> str:
    """Return an example as one writes it: quotes only where YAML wants them."""
    value = json_value(example)
    if isinstance(value, dict):
        entries = [f"{key}: {written(json.dumps(entry))}" for key, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(written(entry) for entry in value) + "]"
    if isinstance(value, int) or re.fullmatch(PLAIN, example):
        return example
    return f'"{example}"'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
