"""Configurations: of plain mappings, and as hypothesis makes them, right ones and trees of anything."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from _regsync import config
from _regsync.config import Config

# The table of keys, by the names that the JSON Schema gives its sections.
SECTIONS = {
    "config": config.DOCUMENT.keys,
    "registry": config.REGISTRY.keys,
    "credentials": config.CREDENTIALS.keys,
    "defaults": config.DEFAULTS.keys,
    "mapping": config.MAPPING.keys,
    "tags": config.TAGS.keys,
    "artifacts": config.ARTIFACTS.keys,
    "global": config.GLOBAL.keys,
}


def type_of(section: str, key: str) -> str:
    """Return the name that the JSON Schema gives to what a key takes."""
    document = config.schema()
    described = (document if section == "config" else document["$defs"][section])["properties"][key]
    if "properties" in described.get("$ref", ""):  # a mapping's key is that of `defaults`
        return type_of("defaults", key)
    name = described.get("$ref", "").rpartition("/")[2]
    if name in SECTIONS or "additionalProperties" in described:
        return "section"
    return name or ("list" if described.get("type") == "array" else "text")


def with_field(section: str, key: str, value: Any, **more: Any) -> Any:
    """Return a document in which all is right but, perhaps, one field of one section.

    `more` are other fields of that section, or of the registry that has the credentials.
    """
    changed = {**more, key: value}
    route = {"from": "x", "source": "a", "targets": ["b"]}
    registry: dict[str, Any] = {"url": "c.example"}
    if section == "registry":
        registry.update(changed)
    if section == "credentials":
        login = {"username": "u", "password": "p", **changed}
        registry.update(auth_type="basic", credentials=login)
    whole: dict[str, Any] = {
        "registries": {"a": {"url": "a.example"}, "b": {"url": "b.example"}, "c": registry},
        "mappings": [{**route, **(changed if section == "mapping" else {})}],
    }
    if section in ("tags", "artifacts"):
        whole["mappings"][0][section] = changed
    if section in ("defaults", "global"):
        whole[section] = changed
    return {**whole, **(changed if section == "config" else {})}


# Right configurations; their secrets begin with "S3-".
TEXTS = st.text("ab$'\"#: {}[]-*&!.,~é0129", min_size=1, max_size=12).filter(str.strip)
SECRETS = st.text("abcxyz$@{}:/é", min_size=1, max_size=12).map(lambda text: f"S3-{text}")
TAGS = st.fixed_dictionaries(
    {},
    optional={
        "glob": st.one_of(
            st.sampled_from(["*", "1.20", "yes", "_", "null"]), st.just(["a", "0x1f"])
        ),
        "exclude": st.just("[ab]*"),
        "semver": st.just(">=1.2 , <2||3.x"),
        "sort": st.sampled_from(["semver", "alpha"]),
        "min_tags": st.integers(0, 9),
    },
)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "tags": TAGS,
    "platforms": st.sampled_from([["linux/amd64"], ["Linux/ARM/v7", "linux/amd64"], None]),
    "artifacts": st.sampled_from(
        [None, {}, {"enabled": False}, {"include": ["a/b"], "require_artifacts": True}]
    ),
    "targets": st.sampled_from(["all", "two", ["two", "one"]]),
    "min_age": st.sampled_from(["7d", 0, 90, "${N}"]),
}
REGISTRIES = st.fixed_dictionaries(
    {
        "one": st.fixed_dictionaries(
            {"url": st.sampled_from(["one.example", "HTTP://One.example:80"])},
            optional={
                "head_first": st.booleans(),
                "max_concurrent": st.sampled_from([5, "${N}"]),
                "client_cert": TEXTS.map(lambda text: text.replace("$", "$$")),
                "proxy": st.sampled_from(["http://u:${PW}@p:1", "${HTTP}", "p:3128"]),
            },
        ),
        "two": st.sampled_from([{"url": "two.example"}, {"url": "[::1]:5000"}]),
        "src": st.just(
            {
                "url": "docker.io",
                "auth_type": "basic",
                "credentials": {"username": "u", "password": "${PW}"},
            }
        ),
    }
)
MAPPINGS = st.fixed_dictionaries(
    {"from": st.sampled_from(["a", "b/c"])}, optional={**COMMON, "to": st.just("d")}
)
TOP = {"cache_ttl": 90, "cache_dir": "~/x", "staging_size_limit": "1 GB"}
CONFIGS = st.fixed_dictionaries(
    {
        "registries": REGISTRIES,
        "target_groups": st.just({"all": ["one", "two"]}),
        "defaults": st.fixed_dictionaries({"source": st.just("src"), **COMMON}),
        "mappings": st.lists(MAPPINGS, max_size=3),
    },
    optional={"global": st.sampled_from([None, {}, TOP])},
)

# Anything.
NAMES = st.sampled_from(
    sorted({key for keys in SECTIONS.values() for key in keys} | {"a", "b", "<<", "x.y"})
)
WORDS = ["a", "b", "*", "1.2", "basic", "ecr", "a.example", "${A}", "${", "linux/amd64", "12h", "="]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 10**12),
    st.floats(),
    st.dates(),
    st.sampled_from([*WORDS, ""]),
    st.text(max_size=8),
    st.binary(max_size=3),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=5)),
    max_leaves=20,
)


URLS = {"a": "a.test", "b": "b.test:5000", "c": "c.test", "again": "a.test", "hub": "docker.io"}


def read_mappings(*mappings: dict[str, Any], cache_dir: str = "/cache") -> Config:
    """Read mappings, which go from a to b where they say nothing else."""
    whole = {
        "registries": {name: {"url": url} for name, url in URLS.items()},
        "defaults": {"source": "a", "targets": ["b"]},
        "mappings": mappings,
        "global": {"cache_dir": cache_dir},
    }
    return config.load(
        config.ConfigFile(json.dumps(whole).encode(), name="x", environ={}, base_dir="/")
    )
