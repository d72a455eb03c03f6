"""The reference of the configuration in docs/configuration.md, held to the schema and to what is valid."""

from __future__ import annotations

import json

import pytest
import yaml

from _regsync.config import ConfigFile, load, schema
from tests.unit.configs import SECTIONS
from tools import reference

PAGE = reference.PAGE.read_text(encoding="utf-8")
SCHEMA = schema()
EXAMPLES = [
    (name, key, described["examples"][0])
    for name in reference.TITLES
    for key, written in (SCHEMA if name == "config" else SCHEMA["$defs"][name])[
        "properties"
    ].items()
    if "examples" in (described := reference.resolved(written, SCHEMA))
]


def test_a_changed_field_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = schema()
    changed["$defs"]["tags"]["properties"]["glob"]["description"] = "something | else"
    monkeypatch.setattr(reference, "schema", lambda: changed)
    assert r"something \| else" in reference.updated(PAGE)


def test_every_section_but_the_second_name_of_one_has_its_table() -> None:
    assert {*reference.TITLES, "defaults"} == set(SECTIONS)
    assert set(SECTIONS["defaults"]) <= set(SECTIONS["mapping"])


@pytest.mark.parametrize(("name", "key", "example"), EXAMPLES, ids=str)
def test_every_example_is_valid_as_it_is_written(name: str, key: str, example: object) -> None:
    value = yaml.safe_load(reference.written(example))
    routes = {"source": "hub", "targets": ["mine"], "from": "a", "to": "b"}
    registry = {"url": "mine.example"}
    sections = {
        "config": {},
        "registry": {
            **registry,
            **({"auth_type": "static_token"} if key == "token" else {}),
            **({"url": "oci-layout:disk"} if key == "assume" else {}),
        },
        "credentials": {"username": "u", "password": "p"},
        "mapping": routes,
        "tags": {"sort": "alpha"},
        "global": {},
        "artifacts": {},
    }
    section = {**sections[name], key: value}
    basic = {"auth_type": "basic", "credentials": section} if name == "credentials" else {}
    mapping = (
        section
        if name == "mapping"
        else {**routes, **({name: section} if name in ("tags", "artifacts") else {})}
    )
    whole = {
        "registries": {
            "hub": {"url": "hub.example"},
            "mine": section if name == "registry" else {**registry, **basic},
        },
        "mappings": [mapping],
        **({"global": section} if name == "global" else section if name == "config" else {}),
    }
    environ = {"REGISTRY_TOKEN": "t", "MIRROR_PASSWORD": "p"}
    assert load(
        ConfigFile(json.dumps(whole).encode(), name="c", environ=environ, base_dir="/x", home=None)
    ).mappings
