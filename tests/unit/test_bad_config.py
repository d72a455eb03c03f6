"""Configurations that are wrong, hostile or unreadable: exit status 3, every problem placed,
nothing attempted.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from _regsync.config import AMOUNT, TEXT, ConfigFile, load, schema
from _regsync.errors import ConfigError
from tests.unit.configs import SECTIONS, type_of

VALIDATOR = jsonschema.Draft202012Validator(schema())
ROUTE = "registries: {a: {url: a.example}, b: {url: b.example}}\nmappings:\n- {from: x, source: a, targets: b"


def told(text: str | bytes, environ: dict[str, str] | None = None) -> list[str]:
    body = text.encode() if isinstance(text, str) else text
    with pytest.raises(ConfigError) as caught:
        load(ConfigFile(body, name="c", environ=environ or {}, base_dir="/etc", home=None))
    return [str(problem) for problem in caught.value.problems]


# --- hostile YAML --------------------------------------------------------------------------------

SIZE = 100_000
HOSTILE = {
    "blanks": " " * SIZE + "!",
    "dashes": "- " * SIZE + "!",
    "blanks in a value": "k: b" + " " * SIZE + "~!:",
    "words": "k: " + "a " * SIZE + "#x: ",
    "colons": "k: " + ":a" * SIZE + ": ",
    "an open list": "k: [" + " " * SIZE + "!",
    "an open list of words": "k: [" + "a " * SIZE + "!",
    "lists in lists in lines": "k:\n" + "".join(" " * depth + "-\n" for depth in range(200)),
    "mappings in mappings": "".join(" " * depth + "a:\n" for depth in range(200)),
    "quotes": "k: " + "'a'" * SIZE,
    "a quote that stays open": 'k: "' + "a" * SIZE,
    "comments": "k: a" + " #" * SIZE,
    "nothing but lines": "\n" * SIZE,
    "a key of some size": "k" * SIZE + ": 1",
    "a variable that stays open": "mappings: '" + "${" * SIZE + "'",
    "stars": ROUTE + ", tags: {glob: '" + "*a" * SIZE + "['}}",
    "braces": ROUTE + ", tags: {glob: '" + "{" * SIZE + "'}}",
    "a long range": ROUTE + ", tags: {semver: '" + ">1," * SIZE + "'}}",
    "a long platform": ROUTE + ", platforms: [" + "a/" * SIZE + "]}",
    "a long duration": "mappings: []\nglobal: {cache_ttl: " + "1h" * SIZE + "x}",
    "digests that are no logins": "mappings: []\nglobal: {cache_ttl: '"
    + "=a@sha256:" * SIZE
    + "'}",
    "a long size": "mappings: []\nglobal: {staging_size_limit: " + "1" * SIZE + "}",
    "a long number": "mappings: []\nglobal: {max_concurrent_transfers: " + "1" * SIZE + "}",
    "a long address": "mappings: []\nregistries: {a: {url: " + "a." * SIZE + "}}",
    "a long repository": ROUTE.replace("from: x", "from: " + "a/" * SIZE) + "}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_in_linear_work_and_few_words(name: str) -> None:
    found = told(HOSTILE[name])
    assert found
    assert all(len(line) < 800 for line in found)


def test_five_megabytes_are_read() -> None:
    # 5 MB with a comment as long as they are, and one mapping at the end.
    text = "registries: {a: {url: a.example}, b: {url: b.example}}\n" + ("#" * 999 + "\n") * 5000
    text += "mappings:\n- {from: x, source: a, targets: b}\n"
    found = load(ConfigFile(text.encode(), name="c", environ={}, base_dir=None, home=None))
    assert len(found.mappings) == 1


# --- wrong types everywhere ----------------------------------------------------------------------

VALUES: dict[str, tuple[Any, str]] = {
    "whole number": (7, "a whole number"),
    "decimal number": (1.2, "a decimal number"),
    "boolean": (True, "true or false"),
    "text": ("no such thing", "text"),
    "list": ([["x"]], "a list"),
    "mapping": ({"x": 1}, "a mapping"),
}
TAKES: dict[str, set[str]] = {
    "flag": {"boolean"},
    "count": {"whole number"},
    "count_from_1": {"whole number"},
    "duration": {"text", "whole number", "decimal number"},
    "size": {"text", "whole number", "decimal number"},
    "section": {"mapping"},
    "list": {"list"},
    "texts": {"list"},
    "one_or_texts": {"text", "list"},
    "all_or_texts": {"list"},
    "targets": {"text", "list"},
}
FIELDS = [
    pytest.param(section, key, value, id=f"{section}.{key}-{value}")
    for section, keys in SECTIONS.items()
    for key in keys
    for value in VALUES
    if value not in TAKES.get(type_of(section, key), {"text"})
]


def with_field(section: str, key: str, value: Any) -> Any:
    """Return a document in which all is right but one field of one section."""
    route = {"from": "x", "source": "a", "targets": ["b"]}
    wrong = {key: value}
    registry: dict[str, Any] = {"url": "c.example"}
    if section == "registry":
        registry.update(wrong)
    if section == "credentials":
        registry.update(auth_type="basic", credentials={"username": "u", "password": "p", **wrong})
    whole: dict[str, Any] = {
        "registries": {"a": {"url": "a.example"}, "b": {"url": "b.example"}, "c": registry},
        "mappings": [{**route, **(wrong if section == "mapping" else {})}],
    }
    if section in ("tags", "artifacts"):
        whole["mappings"][0][section] = wrong
    if section in ("defaults", "global"):
        whole[section] = wrong
    return {**whole, **(wrong if section == "config" else {})}


@pytest.mark.parametrize(("section", "key", "value"), FIELDS)
def test_a_wrong_type_is_named_at_its_place_with_what_is_needed(
    section: str, key: str, value: str
) -> None:
    given, kind = VALUES[value]
    lines = told(yaml.safe_dump(with_field(section, key, given)))
    found = [line for line in lines if f" {key}: " in line.replace(".", " ")]
    assert any(f", not {kind}" in line for line in found), found
    if SECTIONS[section][key].secret:
        assert "7" not in found[0].partition(": ")[2]


@pytest.mark.parametrize(("section", "key", "value"), FIELDS)
def test_the_schema_refuses_each_wrong_type_that_a_document_can_show(
    section: str, key: str, value: str
) -> None:
    """It knows no more of a text than that it is one."""
    assert not VALIDATOR.is_valid(with_field(section, key, VALUES[value][0]))


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a\nb", "a\r", "\x1b[0m", "a\u2028b", "\x00"], ids=ascii)
def test_a_value_with_a_line_break_is_refused_in_every_field(value: str) -> None:
    for section, keys in SECTIONS.items():
        for key, field in keys.items():
            is_scalar = not (field.keys or field.item or field.named)
            if is_scalar and field.form in (TEXT, AMOUNT):
                text = json.dumps(with_field(section, key, "${V}"))
                found = [line for line in told(text, {"V": value}) if key in line]
                assert any(
                    "has a line break or another control character: remove it" in line
                    for line in found
                )


def test_an_unset_variable_is_told_in_every_field_at_once() -> None:
    text = json.dumps(with_field("registry", "url", "${HOST}")).replace('"x"', '"${PATH_}"')
    found = told(text)
    assert [line.split(": ", 2)[1] for line in found] == ["registries.c.url", "mappings[0].from"]
    assert all("is not set: set it, or give a default" in line for line in found)


@pytest.mark.rule("R19")
def test_no_message_repeats_a_secret() -> None:
    text = """\
registries:
  a: {url: "https://u:S3CRET@a.example"}
  b: {url: b.example, auth_type: static_token, token: "S3CRET S3CRET"}
  c: {url: c.example, proxy: "socks5://u:S3CRET@h"}
  d: {url: d.example, auth_type: basic, credentials: {username: "u:v", password: "S3CRET\\n"}}
  e: {url: "${URL}", proxy: "${URL}"}
mappings: []
"""
    found = told(text, {"URL": "http://u:S3CRET@e.example/path"})
    assert len(found) >= 6
    assert "S3CRET" not in "".join(found)
