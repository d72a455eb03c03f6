"""The JSON Schema of the configuration: it takes what `validate` takes, and refuses what it can
tell.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings

from _regsync.config import ConfigFile, load, schema
from _regsync.errors import ConfigError
from tests.unit.configs import CONFIGS, SECTIONS, TREES

SCHEMA = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def faults(text: str) -> list[str]:
    """Return the places at which a document breaks the schema."""
    return [error.json_path for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def test_it_is_a_schema_and_every_reference_in_it_leads_somewhere() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    named = set(re.findall(r"'#/\$defs/(\w+)'", str(SCHEMA)))
    assert named == set(SCHEMA["$defs"])


def test_it_has_the_keys_of_the_table_and_says_what_each_means() -> None:
    for name, fields in SECTIONS.items():
        section = SCHEMA if name == "config" else SCHEMA["$defs"][name]
        assert list(section["properties"]) == list(fields)
        required = [key for key, field in fields.items() if field.required]
        assert section.get("required", []) == required
        for key, shown in section["properties"].items():
            inherited = f"#/$defs/defaults/properties/{key}"
            assert shown.get("description") or (name, shown) == ("mapping", {"$ref": inherited})
            if fields[key].choices:
                assert shown["anyOf"][0]["enum"] == [*fields[key].choices, None]
            # What an editor puts in has to be right.
            part = jsonschema.Draft202012Validator({"$defs": SCHEMA["$defs"], **shown})
            for value in [*shown.get("examples", []), shown.get("default")]:
                assert value is None or part.is_valid(value), (name, key, value)


GOOD = [
    "mappings: [{from: a, platforms: all}]",
    "mappings: [{from: a, platforms: '${P}'}]",
    "x-anchors: [&a {glob: b}]\nmappings: [{from: a, tags: *a}]",
    "mappings: []",
    "mappings: []\nregistries: null\ndefaults: ~\nglobal:",
    "mappings: [{from: a, targets: [b], source: c, to: null, tags: {latest: null, glob: x}}]",
    "mappings: [{from: a, tags: {glob: [x, y], latest: 3, sort: alpha, min_tags: 0}}]",
    "mappings: [{from: a, tags: {latest: '${N}', sort: '${ORDER:-semver}'}, artifacts: {enabled: '${E}'}}]",
    "mappings: []\nregistries: {a: {url: x, head_first: '${H:-false}', max_concurrent: '${N:?number}'}}",
    "mappings: []\nregistries: {a: {url: x, auth_type: '${A}'}, b: {url: y, auth_type: ghcr}}",
    "mappings: []\nglobal: {cache_ttl: 0, staging_size_limit: 20 GB, max_concurrent_transfers: 1}",
    "global: {cache_ttl: 12h, staging_size_limit: 0}\nmappings: []",
    "target_groups: {a: [b, c]}\nmappings: []",
]
# Types are tried in every field by test_bad_config.py.
BAD = [
    ("registries: {}", "$"),
    ("mappings: []\nmapings: []", "$"),
    ("mappings: [{to: a}]", "$.mappings[0]"),
    ("mappings: [{from: ''}]", "$.mappings[0].from"),
    ("mappings: [a]", "$.mappings[0]"),
    ("mappings: [{from: a, tags: {glob: [1]}}]", "$.mappings[0].tags"),
    ("mappings: [{from: a, tags: {glob: []}}]", "$.mappings[0].tags"),
    ("mappings: [{from: a, tags: {globs: a}}]", "$.mappings[0].tags"),
    ("mappings: [{from: a, tags: {latest: 0}}]", "$.mappings[0].tags"),
    ("mappings: [{from: a, tags: {latest: 'x${N}'}}]", "$.mappings[0].tags"),
    ("mappings: [{from: a, tags: {sort: date}}]", "$.mappings[0].tags"),
    ("mappings: [{from: a, platforms: []}]", "$.mappings[0].platforms"),
    ("mappings: [{from: a, targets: []}]", "$.mappings[0].targets"),
    ("mappings: []\nregistries: {a: {}}", "$.registries"),
    ("mappings: []\nregistries: {a: null}", "$.registries"),
    ("mappings: []\nregistries: {a: {url: x, auth_type: kerberos}}", "$.registries"),
    ("mappings: []\nregistries: {a: {url: x, credentials: {username: u}}}", "$.registries"),
    ("mappings: []\ntarget_groups: {a: b}", "$.target_groups"),
    ("mappings: []\ntarget_groups: {a: []}", "$.target_groups"),
    ("mappings: []\nx: 1", "$"),
    ("mappings: [{from: a, x-y: 1}]", "$.mappings[0]"),
    ("mappings: [{from: a, platforms: All}]", "$.mappings[0].platforms"),
]


@pytest.mark.parametrize("text", GOOD)
def test_it_takes_what_is_right(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(("text", "place"), BAD, ids=[row[0] for row in BAD])
def test_it_refuses_what_is_wrong_where_it_is(text: str, place: str) -> None:
    assert any(found.replace('"', "'").startswith(place) for found in faults(text)), faults(text)


def test_it_takes_the_examples_of_the_documents() -> None:
    root = Path(__file__).resolve().parents[2]
    pages = [root / "README.md", root / "docs" / "recipes.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    examples = re.findall(r"(?ms)^```yaml\n(.*?)^```$", text)
    assert examples
    for example in examples:
        if "mappings:" in example:
            assert faults(example) == []


def accepted(text: str) -> bool:
    try:
        load(
            ConfigFile(
                text.encode(),
                name="c",
                environ={"A": "x", "PW": "p", "N": "9"},
                base_dir=None,
                home=None,
            )
        )
    except ConfigError:
        return False
    return True


@settings(max_examples=60)
@given(CONFIGS)
def test_it_takes_whatever_validate_takes(tree: Any) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True)
    if accepted(text):
        assert faults(text) == []


@settings(max_examples=60)
@given(TREES)
def test_it_takes_a_mapping_of_anything_that_validate_takes(tree: Any) -> None:
    whole = {
        "registries": {"a": {"url": "a.x"}, "b": {"url": "b.x"}},
        "mappings": [],
        "defaults": tree,
    }
    text = yaml.safe_dump(whole, allow_unicode=True)
    if accepted(text):
        assert faults(text) == []
