"""The JSON Schema of the configuration, held against the table of keys: it takes what is written in
the usual way, and refuses what it can tell. `validate` also takes `"3"` for a number and 1.20 for a
text. A wrong type is told in every field.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings

from _regsync.config import ConfigFile, load, schema
from _regsync.errors import ConfigError
from tests.ends import ROOT
from tests.unit.configs import CONFIGS, SECTIONS, type_of, with_field
from tools import reference

SCHEMA = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
ENVIRON = {"A": "x", "PW": "p", "N": "9", "REGISTRY_TOKEN": "t", "MIRROR_PASSWORD": "p"}


def faults(text: str) -> list[str]:
    """Return the places at which a document breaks the schema."""
    return [error.json_path for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def problems(text: str, environ: dict[str, str] = ENVIRON) -> list[str]:
    """Return what is wrong with a configuration."""
    try:
        load(ConfigFile(text.encode(), name="c", environ=environ, base_dir="/x"))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_every_reference_leads_somewhere_and_each_key_has_a_meaning_and_right_examples() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(re.findall(r"'#/\$defs/(\w+)'", str(SCHEMA))) == set(SCHEMA["$defs"])
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


EXAMPLES = [
    (name, key, described["examples"][0])
    for name in reference.TITLES
    for key, written in (SCHEMA if name == "config" else SCHEMA["$defs"][name])[
        "properties"
    ].items()
    if "examples" in (described := reference.resolved(written, SCHEMA))
]
# What a field needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "token": {"auth_type": "static_token"},
    "assume": {"url": "oci-layout:disk"},
    "tags": {"sort": "alpha"},
}


@pytest.mark.parametrize(("section", "key", "example"), EXAMPLES, ids=str)
def test_every_example_is_valid_as_the_reference_shows_it(
    section: str, key: str, example: object
) -> None:
    value = yaml.safe_load(reference.written(example))
    more = {**BESIDE.get(section, {}), **BESIDE.get(key, {})} if section != "mapping" else {}
    text = json.dumps(with_field(section, key, value, **more))
    # An example may name registries and groups of its own.
    assert [each for each in problems(text) if "no registry is named" not in each] == []


@pytest.mark.parametrize(
    "text",
    [
        "mappings: [{from: a, targets: [b], to: null, tags: {latest: null, glob: [x, y]}}]",
        "mappings: [{from: a, tags: {latest: '${N}', sort: '${ORDER:-semver}'}, artifacts: {enabled: '${E}'}}]",
        "mappings: []\nregistries: {a: {url: x, head_first: '${H:-false}', max_concurrent: '${N:?number}'}}",
    ],
)
def test_it_takes_what_is_right(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("registries: {}", "$"),
        ("mappings: []\nmapings: []", "$"),
        ("mappings: [{from: ''}]", "$.mappings[0].from"),
        ("mappings: [{from: a, tags: {latest: 0}}]", "$.mappings[0].tags"),
        ("mappings: [{from: a, tags: {latest: 'x${N}'}}]", "$.mappings[0].tags"),
        ("mappings: [{from: a, platforms: []}]", "$.mappings[0].platforms"),
        ("mappings: []\nregistries: {a: {url: x, auth_type: kerberos}}", "$.registries"),
        ("mappings: []\nregistries: {a: {url: x, credentials: {username: u}}}", "$.registries"),
        ("mappings: []\nregistries: {1: {url: x}}\ntarget_groups: {a: []}", "$.target_groups"),
    ],
)
def test_it_refuses_what_is_wrong_where_it_is(text: str, place: str) -> None:
    assert any(found.startswith(place) for found in faults(text)), faults(text)


def test_it_takes_the_examples_of_the_documents() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "recipes.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    examples = re.findall(r"(?ms)^```yaml\n(.*?)^```$", text)
    assert len(examples) > 5
    assert [faults(each) for each in examples if "mappings:" in each and faults(each)] == []


@settings(max_examples=30)
@given(CONFIGS)
def test_it_takes_whatever_validate_takes(tree: Any) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True)
    assert problems(text) or faults(text) == []


# Wrong types.

LIST, MAPPING, WORDS = [["x"]], {"x": 1}, "no such thing"
NOT_ALONE = [
    (LIST, "must be a single value, not a list"),
    (MAPPING, "must be a single value, not a mapping"),
]
NO_LIST = [(MAPPING, "must be a list, not a mapping")]
NO_LISTS = [*NO_LIST, *((each, "must be a list, not text") for each in (WORDS, 7, 1.2, True))]
NO_COUNTS = [*NOT_ALONE, *((each, "must be a whole number from") for each in (WORDS, 1.2, True))]
# For each type of a field wrong values, and what is told of them.
WRONG: dict[str, list[tuple[Any, str]]] = {
    "flag": [*NOT_ALONE, *((each, "must be true or false") for each in (WORDS, 7, 1.2))],
    "count": NO_COUNTS,
    "count_from_1": NO_COUNTS,
    "duration": [*NOT_ALONE, (True, "'true' is not a duration")],
    "size": [*NOT_ALONE, (True, "'true' is not a size")],
    "section": [
        (LIST, "must be a mapping, not a list"),
        *((each, "must be a mapping, not text") for each in (WORDS, 7, 1.2, True)),
    ],
    "list": NO_LISTS,
    "texts": NO_LISTS,
    "one_or_texts": NO_LIST,
    "targets": NO_LIST,
}
FIELDS = [(section, key) for section, keys in SECTIONS.items() for key in keys]


@pytest.mark.parametrize(("section", "key"), FIELDS)
def test_a_wrong_type_is_told_at_its_place_with_what_is_needed_and_the_schema_refuses_it(
    section: str, key: str
) -> None:
    for value, told in WRONG.get(type_of(section, key), NOT_ALONE):
        document = with_field(section, key, value)
        lines = problems(yaml.safe_dump(document))
        found = [line for line in lines if f" {key}: " in line.replace(".", " ")]
        assert any(told in line for line in found), (value, lines)
        assert not VALIDATOR.is_valid(document), value


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (section, key)
        for section, key in FIELDS
        if not ((field := SECTIONS[section][key]).keys or field.item or field.named)
    ],
)
def test_a_value_with_a_line_break_is_refused_in_every_field(section: str, key: str) -> None:
    text = json.dumps(with_field(section, key, "${V}"))
    for value in ("a\nb", "a\r", "\x1b[0m", "a\u2028b", "\x00"):
        found = [line for line in problems(text, {"V": value}) if key in line]
        told = "has a line break or another control character: remove it"
        assert any(told in line for line in found), ascii(value)
