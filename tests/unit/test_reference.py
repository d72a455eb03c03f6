"""The reference of the configuration in docs/configuration.md, held to the table that validates."""

from __future__ import annotations

import json

import pytest
import yaml

from _regsync.config.fields import SECTIONS
from _regsync.config.reader import ConfigFile, load
from tools import reference

PAGE = reference.PAGE.read_text(encoding="utf-8")
EXAMPLES = [(name, row) for name in reference.TITLES for row in SECTIONS[name] if row.example]


def test_a_changed_field_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**SECTIONS, "tags": (SECTIONS["tags"][0]._replace(meaning="something | else"),)}
    monkeypatch.setattr(reference, "SECTIONS", changed)
    assert r"something \| else" in reference.updated(PAGE)


def test_every_section_but_the_second_name_of_one_has_its_table() -> None:
    assert {*reference.TITLES, "defaults"} == set(SECTIONS)
    assert {row.name for row in SECTIONS["defaults"]} <= {row.name for row in SECTIONS["mapping"]}


@pytest.mark.parametrize(("name", "row"), EXAMPLES, ids=lambda one: getattr(one, "name", one))
def test_every_example_is_valid_as_it_is_written(name: str, row: object) -> None:
    field = next(each for each in SECTIONS[name] if each is row)
    value = yaml.safe_load(reference.written(field.example))
    routes = {"source": "hub", "targets": ["mine"], "from": "a", "to": "b"}
    registry = {"url": "mine.example"}
    sections = {
        "config": {},
        "registry": {
            **registry,
            **({"auth_type": "static_token"} if field.name == "token" else {}),
            **({"url": "oci-layout:disk"} if field.name == "assume" else {}),
        },
        "credentials": {"username": "u", "password": "p"},
        "mapping": routes,
        "tags": {"sort": "alpha"},
        "global": {},
        "artifacts": {},
    }
    section = {**sections[name], field.name: value}
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
