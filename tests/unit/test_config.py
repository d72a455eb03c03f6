"""The configuration: what is accepted and what it means, and where each problem is.

Follows docs/design.md sections 3 and 4. Wrong types are tried in every field by test_schema.py, and
test_expand.py has what an expanded configuration shows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from _regsync.config import (
    ArtifactRule,
    Config,
    ConfigFile,
    MappingRule,
    Registry,
    load,
    parse_duration,
    parse_registry_url,
    parse_size,
    registry_for,
    schema,
    substitute,
)
from _regsync.errors import ConfigError
from _regsync.oci import Platform
from _regsync.tags import TagRule
from tests.unit.configs import NAMES, TREES

REGISTRIES = """\
registries:
  hub: {url: docker.io}
  one: {url: one.example}
  two: {url: two.example:5000}
"""
ROUTE = "from: team/app, source: one, targets: two"


def read(
    text: str | bytes, environ: Mapping[str, str] | None = None, base_dir: str = "/etc/rs"
) -> Config:
    body = text.encode() if isinstance(text, str) else text
    return load(ConfigFile(body, name="c.yaml", environ=environ or {}, base_dir=base_dir))


def problems(text: str | bytes, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, environ)
    assert caught.value.exit_status == 3
    return [str(problem) for problem in caught.value.problems]


def mapping(body: str, environ: Mapping[str, str] | None = None) -> MappingRule:
    """Read one mapping of `team/app` from one to two, with `body` in it."""
    return read(mapped(body), environ).mappings[0]


def registry(body: str, environ: Mapping[str, str] | None = None) -> Registry:
    return read(listed(body), environ).registries["r"]


def registry_problem(body: str, environ: Mapping[str, str] | None = None) -> str:
    (found,) = problems(listed(body), environ)
    return found


# What a configuration means.


def test_the_smallest_configuration_has_the_specified_defaults() -> None:
    found = read("mappings: []")
    assert found == Config(
        registries={},
        mappings=(),
        max_concurrent_transfers=50,
        cache_dir="/etc/rs/.regsync",
        cache_ttl=12 * 3600.0,
        staging_size_limit=None,
        warnings=(),
    )
    for key, described in schema()["$defs"]["global"]["properties"].items():
        if "default" in described and key != "cache_dir":
            written = read(f"mappings: []\nglobal: {{{key}: {described['default']}}}")
            assert getattr(written, key) == getattr(found, key), "the schema's is the same"


def test_a_mapping_falls_back_to_from_and_to_the_defaults() -> None:
    found = read(
        REGISTRIES
        + textwrap.dedent("""\
        target_groups: {all: [one, two, one]}
        defaults:
          source: hub
          targets: all
          tags: {glob: "3.*", exclude: ["*-rc*"]}
          platforms: [Linux/AMD64]
          artifacts: {require_artifacts: true}
          min_age: 1d12h
        mappings:
          - from: library/alpine
          - {from: a/b, to: c/d, source: two, targets: [one], tags: null, platforms: [linux/arm/v7],
             artifacts: {include: [x/y]}, min_age: 0}
          - {from: a/b, tags: {sort: semver, latest: 2}, targets: two, platforms: null, min_age: 3d}
          - {from: a/b, tags: {semver: ">=1", latest: 3}}
        """)
    )
    first, second, third, fourth = found.mappings
    assert (first.index, first.source.alias, first.min_age) == (0, "hub", 129600.0)
    assert (first.source_repository, first.target_repository) == ("library/alpine",) * 2
    assert [target.alias for target in first.targets] == ["one", "two"]
    assert first.tags == TagRule(glob=("3.*",), exclude=("*-rc*",))
    assert first.platforms == (Platform("linux", "amd64", None),)
    assert first.artifacts.require_artifacts
    assert (second.target_repository, second.source.alias, second.min_age) == ("c/d", "two", 0)
    assert [target.alias for target in second.targets] == ["one"]
    assert second.tags is first.tags, "null inherits"
    assert second.artifacts == ArtifactRule(include=("x/y",)), "nothing is merged inside"
    assert third.tags == TagRule(sort="semver", latest=2)
    assert [target.alias for target in third.targets] == ["two"]
    assert third.platforms == first.platforms, "null inherits"
    assert third.min_age == 259200.0
    assert fourth.tags.order == "semver", "a range implies it"


def test_a_whole_registry_is_read_with_global_settings() -> None:
    found = registry(
        "url: 'https://R.example:8443', auth_type: basic, credentials: {username: u, password: p:w}, "
        "head_first: yes, max_concurrent: 3, client_cert: c.pem, client_key: k.pem, proxy: 'http://p:3128'"
    )
    assert (found.alias, found.scheme, found.host, found.port) == ("r", "https", "r.example", 8443)
    assert (found.username, found.password, found.proxy) == ("u", "p:w", "http://p:3128")
    assert (found.head_first, found.max_concurrent) == (True, 3)
    assert (found.client_cert, found.client_key) == ("/etc/rs/c.pem", "/etc/rs/k.pem")
    top = "max_concurrent_transfers: 7, cache_dir: ../s, cache_ttl: 90m, staging_size_limit: 1.5 GB"
    whole = read(f"mappings: []\nglobal: {{{top}}}")
    assert (whole.max_concurrent_transfers, whole.cache_dir) == (7, "/etc/rs/../s")
    assert (whole.cache_ttl, whole.staging_size_limit) == (5400, 1_500_000_000)
    none = read("mappings: []\nglobal: {cache_ttl: 0, staging_size_limit: 0}")
    assert (none.cache_ttl, none.staging_size_limit) == (0, 0), "numbers need no quotes"


@pytest.mark.parametrize(
    ("written", "beside_a_file", "from_standard_input"),
    [
        ("/var/x", "/var/x", "/var/x"),
        ("~/x", "/home/me/x", "/home/me/x"),
        ("x/y", "/etc/rs/x/y", None),
    ],
)
def test_paths_are_relative_to_the_file(
    written: str, beside_a_file: str, from_standard_input: str | None, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = f"mappings: []\nglobal: {{cache_dir: '{written}'}}"
    assert read(text).cache_dir == beside_a_file
    assert read(text, base_dir="").cache_dir == from_standard_input
    assert registry(f"url: a.example, ca_file: '{written}'").ca_file == beside_a_file


@pytest.mark.parametrize("name", ["cloud_profile", "aws_profile"])
def test_the_profile_has_two_names(name: str) -> None:
    found = registry(f"url: a.example, auth_type: ecr, {name}: dev")
    assert (found.cloud_profile, found.kind) == ("dev", "ecr"), "its kind is that of auth_type"


def test_one_registry_is_one_whatever_its_scheme_and_platforms_have_no_order() -> None:
    found = read(
        textwrap.dedent("""\
        registries: {a: {url: "http://a.example:443"}, b: {url: a.example}, c: {url: c.example}}
        defaults: {targets: c}
        mappings:
        - {from: x, source: a, platforms: [linux/amd64, linux/arm64]}
        - {from: x, source: b, platforms: [linux/arm64, linux/amd64]}
        """)
    )
    assert found.registries["a"].address == found.registries["b"].address
    assert found.mappings[0].source_key == found.mappings[1].source_key


# Variables.

ENVIRONMENT = {"A": "one", "EMPTY": "", "TRICK": "${A} $$"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("x${A}y${A}", "xoneyone"),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY:-p$$w}", "p$w"),
        ("$$$${A}", "$${A}"),
        ("${TRICK}", "${A} $$"),
    ],
)
def test_a_variable_is_filled_in_once(text: str, expanded: str) -> None:
    assert substitute(text, ENVIRONMENT) == expanded


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("${NONE}", "variable NONE is not set: set it, or give a default"),
        ("${NONE:?ask the admin}", "NONE is not set: ask the admin"),
        ("${EMPTY:?}", "EMPTY is not set"),
        ("${A", "malformed"),
        ("${A:-${B}}", "malformed"),
    ],
)
def test_a_variable_without_a_value_or_form_is_placed_and_named(text: str, remedy: str) -> None:
    found = registry_problem(f"url: '{text}'", ENVIRONMENT)
    assert found.startswith("c.yaml:1:23: registries.r.url: ")
    assert remedy in found


def test_a_value_never_changes_the_structure() -> None:
    environ = {"TRICK": "x\n  evil: true", "GLOB": "a, b", "KEY": "url"}
    body = "url: a.example, cloud_profile: '${TRICK}', auth_type: ecr"
    assert "control character" in registry_problem(body, environ)
    (found,) = problems(
        f"{REGISTRIES}mappings: [{{{ROUTE}, tags: {{glob: '${{GLOB}}'}}}}]", environ
    )
    assert "never be" in found
    found = " ".join(problems("registries: {r: {'${KEY}': a}}\nmappings: []", environ))
    assert "unknown key" in found


def test_a_scalar_is_its_text_as_it_was_written() -> None:
    rule = mapping(
        "tags: {glob: [1.10, 0123, no, 2024-01-02, 0x1f, 'null'], sort: alpha, latest: '3'}"
    )
    assert rule.tags.glob == ("1.10", "0123", "no", "2024-01-02", "0x1f", "null")
    assert rule.tags.latest == 3
    text = "registries: {1: {url: a.x, head_first: 'on'}}\nmappings: [{from: a, to: b, source: 1, targets: 01}]"
    (found,) = problems(text)
    assert "no registry is named '01'" in found
    login = registry("url: a.x, auth_type: basic, credentials: {username: 007, password: =}")
    assert (login.username, login.password) == ("007", "=")


def test_a_variable_may_be_a_number_or_truth_value() -> None:
    environ = {"N": "8", "T": "true"}
    found = registry("url: a.example, max_concurrent: '${N}', head_first: '${T}'", environ)
    assert (found.max_concurrent, found.head_first) == (8, True)
    assert registry("url: a.example, max_concurrent: '${X:-9}'").max_concurrent == 9
    assert registry("url: a.example, max_concurrent: '1${N}'", environ).max_concurrent == 18
    assert "whole number" in registry_problem("url: a.example, max_concurrent: '${T}'", environ)
    assert "true or false" in registry_problem("url: a.example, head_first: '${N}'", environ)
    assert mapping("tags: {glob: '${N}'}", environ).tags.glob == ("8",), "text stays text"


# Problems.


def test_all_problems_come_in_one_go_and_in_order() -> None:
    text = textwrap.dedent("""\
        registries:
          one: {url: "https://user:pw@a.example", tokne: x}
          dup: {url: a.example}
          dup: {url: b.example}
        defaults: {targets: nope, tags: {glob: ''}}
        mappings:
          - form: a
          - from: team/app:1.0
            source: one
            platforms: [all, linux]
        global: {cache_ttl: soon}
        """)
    found = problems(text)
    assert [line.split(": ", 2)[:2] for line in found] == [
        ["c.yaml:2:14", "registries.one.url"],
        ["c.yaml:2:43", "registries.one.tokne"],
        ["c.yaml:4:3", "registries.dup"],
        ["c.yaml:5:21", "defaults.targets"],
        ["c.yaml:5:40", "defaults.tags.glob"],
        ["c.yaml:7:5", "mappings[0].form"],
        ["c.yaml:7:5", "mappings[0].from"],
        ["c.yaml:7:5", "mappings[0].source"],
        ["c.yaml:8:11", "mappings[1].from"],
        ["c.yaml:10:17", "mappings[1].platforms[0]"],
        ["c.yaml:10:22", "mappings[1].platforms[1]"],
        ["c.yaml:11:21", "global.cache_ttl"],
    ]
    assert "pw" not in "".join(found)


def test_the_message_of_the_error_counts_the_rest() -> None:
    with pytest.raises(ConfigError, match=r"^c\.yaml:1:\d+: .* \(and 1 more\)$"):
        read("{a: 1, b: 2, mappings: []}")


MORE_REGISTRIES = f"""{REGISTRIES}\
  both: {{url: both.example}}
  alike: {{url: 'https://ONE.example:443'}}
  tight: {{url: t.example, max_concurrent: 1}}
  loose: {{url: t.example}}
target_groups: {{group: [one, two], both: [two]}}
"""
GROUPS = f"{REGISTRIES}mappings: []\ntarget_groups: "


def mapped(body: str) -> str:
    return f"{REGISTRIES}mappings:\n- {{{ROUTE}, {body}}}\n"


def routed(body: str) -> str:
    return f"{MORE_REGISTRIES}mappings:\n- {{{body}}}\n"


def listed(body: str) -> str:
    return f"registries: {{r: {{{body}}}}}\nmappings: []\n"


MAPPING_PROBLEMS = [
    ("tags: {semver: [~]}", "semver: must be a single value, not a list"),
    ("to: !!python/none x", "to: must be a single value, not something with a YAML tag of its own"),
    ("tags: {glob: []}", "glob: the list is empty: omit it to take every tag"),
    ("tags: {exclude: ['a', '{b']}", "exclude[1]: '{b' is not a pattern: it may have *, ?,"),
    ("tags: {immutable_tags: '['}", "immutable_tags: "),
    ("tags: {semver: '>=1 <2'}", "join comparators with a comma"),
    ("tags: {semver_prerelease: maybe}", "'maybe' is not one of include, exclude, only"),
    ("tags: {sort: alpha, latest: 0}", "latest: must be a whole number from 1"),
    ("tags: {latest: 3}", "latest: needs `sort` or `semver`"),
    ("tags: {min_tags: 99999999999999999999}", "a whole number from 0"),
    ("tags: [v1]", "tags: must be a mapping, not a list"),
    ("tags: {globs: a}", "globs: unknown key: write one of glob, exclude, semver,"),
    ("platforms: [all]", "platforms[0]: 'all' is not a platform: omit the field"),
    ("platforms: all", "platforms: must be a list, not text: write [OS/ARCH], or omit it to copy all platforms"),
    ("artifacts: {enabled: false, require_artifacts: true}", "require_artifacts: contradicts"),
    ("artifacts: {include: ['application/*']}", "include[0]: 'application/*' is not an artifact type"),
    ("artifacts: {include: ['']}", "include[0]: must not be empty"),
    ("to: Team/App", "write a path in lower case"),
    ("to: 'a/b@sha256:00'", "`regsync copy` copies a digest"),
    ("min_age: a week", "'a week' is not a duration"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), MAPPING_PROBLEMS)
def test_what_is_wrong_with_a_mapping_is_one_problem_with_its_remedy(
    body: str, message: str
) -> None:
    (found,) = problems(mapped(body))
    assert found.startswith("c.yaml:6:")
    assert ": mappings[0]." in found
    assert message in found


PROBLEMS = [
    # Where a mapping leads.
    (routed("from: a, targets: two"), "mappings[0].source: is missing: set it here or in `defaults`"),
    (routed("from: a, source: one"), "mappings[0].targets: is missing: set it here or in `defaults`"),
    (routed("from: a, source: three, targets: two"), "no registry is named 'three'"),
    (routed("from: a, source: one, targets: []"), "targets: the list is empty"),
    (routed("from: a, source: one, targets: [group]"), "(a group can only be the whole of `targets`)"),
    (routed("from: a, to: a, source: one, targets: group"), "mappings[0].to: source and target are the same"),
    (routed("from: a, source: one, targets: alike"), "mappings[0].from: source and target are the same"),
    (routed("from: alpine, to: library/alpine, source: hub, targets: hub"), "the same repository of docker.io"),
    (routed("from: a, to: b, source: tight, targets: tight"), "max_concurrent is 1: set it to 2"),
    (routed("from: a, to: b, source: tight, targets: loose"), "max_concurrent is 1: set it to 2"),
    # A registry.
    (listed("head_first: true"), "registries.r.url: required"),
    (listed("url: a.example, auth_type: kerberos"), "'kerberos' is not one of ecr,"),
    (listed("url: a.example, auth_type: basic"), "auth_type: basic needs `credentials`"),
    (listed("url: a.example, auth_type: static_token"), "auth_type: static_token needs `token`"),
    (listed("url: a.example, token: t"), "token: is only valid with `auth_type: static_token`"),
    (listed("url: a.example, credentials: {username: u, password: p}"), "is only valid with `auth_type: basic`"),
    (listed("url: a.example, auth_type: basic, credentials: {username: u}"), "credentials.password: required"),
    (listed("url: a.example, auth_type: basic, credentials: {username: u:v, password: p}"), "username: has a colon"),
    (listed('url: a.example, auth_type: static_token, token: "abc\\n"'), "line break"),
    (listed("url: a.example, auth_type: static_token, token: a b"), "blank"),
    (listed("url: 123456789012.dkr.ecr.eu-west-1.amazonaws.com, aws_profile: p"),
        "aws_profile: is only valid with `auth_type: ecr`"),
    (listed("url: a.example, auth_type: ecr, cloud_profile: p, aws_profile: p"), "the same field as `cloud_profile`"),
    (listed("url: a.example, client_key: k"), "client_key: needs `client_cert`"),
    (listed("url: a.example, proxy: 'socks5://u:pw@h'"), "socks5"),
    # The document.
    ("registries: {}", "c.yaml:1:1: mappings: required"),
    ("mappings: []\nmapings: []", "c.yaml:2:1: mapings: unknown key: write one of registries, target_groups, "),
    (f"{REGISTRIES}mappings: [{{{ROUTE}, x-a: 1}}]", "mappings[0].x-a: unknown key"),
    ("- a", "must be a mapping, not a list"),
    ("registries: {~: {url: a.x}}\nmappings: []", "c.yaml:1:14: registries.~: must be a name"),
    (f"{GROUPS}{{g: [uno]}}", "target_groups.g[0]: no registry is named 'uno'"),
    ("mappings: []\nglobal: {cache_ttl: 12 h}", "is not a duration: write 0, seconds (90)"),
    ("mappings: []\nglobal: {staging_size_limit: 5 XB}", "is not a size: write 0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), PROBLEMS)
def test_what_else_is_wrong_is_one_problem_with_its_remedy(text: str, message: str) -> None:
    (found,) = problems(text)
    assert message in found
    assert "pw" not in found


def test_a_group_goes_before_a_registry_of_its_name() -> None:
    (rule,) = read(routed("from: a, source: one, targets: both")).mappings
    assert [target.alias for target in rule.targets] == ["two"]


def test_one_request_at_a_time_is_enough_where_two_registries_are_involved() -> None:
    ends = "a: {url: a.example, max_concurrent: 1}, b: {url: b.example, max_concurrent: 1}"
    assert read(f"registries: {{{ends}}}\nmappings: [{{from: x, source: a, targets: b}}]").mappings


def test_a_wrong_field_hides_the_default_and_what_many_use_is_told_once() -> None:
    top = f"{REGISTRIES}defaults: {{source: one, targets: one}}\n"
    (found,) = problems(f"{top}mappings: [{{from: a, targets: nowhere}}]")
    assert "nowhere" in found
    top = f"{REGISTRIES}defaults: {{source: one, targets: nope}}\n"
    assert len(problems(f"{top}mappings: [{{from: a}}, {{from: b}}]")) == 1


# Warnings.


def warnings_of(text: str) -> list[str]:
    """Return the warnings about a configuration, without the file's name."""
    return [warning.removeprefix("c.yaml:") for warning in read(text).warnings]


def test_a_warning_of_what_many_inherit_is_told_once_and_all_are_in_the_order_of_the_file() -> None:
    rules = "artifacts: {enabled: false}, tags: {glob: [x, y], exclude: x}"
    text = f"{REGISTRIES}defaults: {{source: one, targets: two, {rules}}}\nmappings: "
    found = warnings_of(text + "[{from: a}, {from: b}, {from: c, artifacts: {enabled: false}}]")
    assert [line.partition(": ")[2] for line in found] == [
        "defaults.artifacts.enabled: is false: signatures and SBOMs are stripped at targets",
        "defaults.tags.glob: 'x' is never copied: the exclude rule drops it",
        "mappings[2].artifacts.enabled: is false: signatures and SBOMs are stripped at targets",
    ]
    assert [line.partition(":")[0] for line in found] == ["5", "5", "6"]


def test_credentials_over_plain_http_warn() -> None:
    basic = "auth_type: basic, credentials: {username: u, password: p}"
    (warning,) = warnings_of(f"registries: {{a: {{url: 'http://a.x', {basic}}}}}\nmappings: []")
    assert "registries.a.url: credentials are sent unencrypted to a.x" in warning
    for fine in ("url: 'http://a.x'", f"url: localhost:5000, {basic}"):
        assert warnings_of(f"registries: {{a: {{{fine}}}}}\nmappings: []") == []


@pytest.mark.parametrize(
    ("tags", "dropped"),
    [
        ("glob: ['a', 'b-rc1'], exclude: '*-rc*'", ["b-rc1"]),
        ("glob: '*', exclude: ['*-rc*', latest]", []),
        ("glob: '1.*', exclude: '1.*'", []),  # globs are not held against one another
        ("glob: ['1.2.3', latest], semver: '>=1,<3'", []),
    ],
)
def test_a_tag_written_out_that_exclude_drops_is_told(tags: str, dropped: list[str]) -> None:
    found = warnings_of(mapped(f"tags: {{{tags}}}"))
    assert [line.partition(": ")[2] for line in found] == [
        f"mappings[0].tags.glob: '{tag}' is never copied: the exclude rule drops it"
        for tag in dropped
    ]
    assert all(line.startswith("6:") for line in found)


HUB = "registries: {hub: {url: registry.hub.docker.com}, quay: {url: quay.io}, m: {url: 'm.test:5000'}, lan: {url: 'https://a'}}\n"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            "from: quay.io/org/app, source: quay, targets: m",
            "from: 'quay.io/org/app' begins with the registry's own host, which does not belong here: "
            "write 'org/app'",
        ),
        ("from: docker.io/library/alpine, source: hub, targets: m", "write 'library/alpine'"),
        ("from: a/b, source: lan, targets: m", ""),  # a team may have a name without a dot
        ("from: docker.io/library/alpine, source: quay, targets: m", ""),  # a mirror names it so
        ("from: quay.io, source: quay, targets: m", ""),
        ("from: a/quay.io/b, to: quay.io/b, source: quay, targets: m", ""),
    ],
)
def test_a_repository_that_begins_with_its_registry_is_told(mapping: str, message: str) -> None:
    found = warnings_of(f"{HUB}mappings:\n- {{{mapping}}}\n")
    assert [message in line for line in found] == ([True] if message else [])


# YAML.

DOCUMENTS = [
    (b"# only a comment\n", "c.yaml:1:1: the document is empty"),
    (b"mappings: []\n---\nmappings: []\n", "c.yaml:2:1: malformed YAML: a second document"),
    ("mappings: []\nx: ä".encode("latin-1"), "malformed YAML: unacceptable character #x00e4"),
    ("mappings: \ud800".encode("utf-8", "surrogatepass"), "invalid continuation byte"),
    (b"a: 1\nmappings: \x00", "special characters are not allowed in \"<byte string>\", position 15"),
    (b"%YAML 1." + b"9" * 5000 + b"\n---\nmappings: []", "c.yaml:1:1: malformed YAML: Exceeds the limit"),
    (b"mappings:\n\t- from: a", "c.yaml:2:1: malformed YAML: found character '\\t'"),
    (b"registries: {a: {url: ${HOST}}}\nmappings: []", "c.yaml:1:24: malformed YAML: expected ',' or '}'"),
    (b"mappings: *all\n", "c.yaml:1:11: malformed YAML: a second document, an unknown tag (!), or an anchor (&)"),
    (b"x-a: &S3CRET 1\nmappings: &S3CRET []", "c.yaml:2:11: malformed YAML: a second document, an unknown tag"),
    (b"x-password: !S3CRET!2024\n", "c.yaml:1:13: malformed YAML: a second document, an unknown tag"),
    (b"mappings: " + b"{a: " * 20_000, "malformed YAML: maximum recursion depth exceeded"),
    (b"mappings: &a [*a]", "c.yaml:1:11: mappings[0]: must be a mapping, not a list"),
    (b"mappings: []\nglobal: &a {<<: [&b {<<: *a, x: 1}]}", "global.x: unknown key"),
    (b"mappings: []\nglobal: {<<: 1}", "'<<' takes a mapping"),
    (b"mappings:\n- tags: {b: 1, b: 2}\n", "c.yaml:2:16: mappings[0].tags.b: duplicate key: it is on line 2"),
    (b"mappings: []\n[a]: b", "a list cannot be a key"),
    (b"mappings: []\n? {{a: b}: c}\n: {d: 1, d: 2}", "a mapping cannot be a key"),
    (b"mappings: !!python/object/apply:os.system [x]", "must be a list, not something with a YAML tag of its own"),
    (b"mappings: []\nglobal: {cache_dir: !secret x}", "a single value, not something with a YAML tag of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), DOCUMENTS, ids=[row[1] for row in DOCUMENTS])
def test_problem_of_the_yaml(body: bytes, message: str) -> None:
    found = problems(body)
    assert any(message in " ".join(line.split()) for line in found)
    assert "S3CRET" not in "".join(found)


def test_byte_order_mark_and_crlf_are_fine() -> None:
    text = "\ufeffmappings: []\r\nglobal:\r\n  cache_dir: x\r\n"
    assert read(text).cache_dir == read(text[1:].encode("utf-16")).cache_dir == "/etc/rs/x"


def test_anchors_and_merge_keys_are_understood() -> None:
    found = read(
        REGISTRIES
        + textwrap.dedent("""\
        x-unread: [1.20, {a: '${NOWHERE}'}]
        x-tags: &tags {glob: !!str 1.20, sort: alpha}
        mappings:
          - &base
            from: a
            source: one
            targets: [two]
            tags: *tags
          - {<<: *base, from: b}
          - {from: c, <<: [{source: two}, *base], targets: [one], tags: {<<: *tags, sort: semver}}
          - *base
        """)
    )
    assert [rule.source_repository for rule in found.mappings] == ["a", "b", "c", "a"]
    assert [rule.source.alias for rule in found.mappings] == ["one", "one", "two", "one"]
    assert [rule.index for rule in found.mappings] == [0, 1, 2, 3]
    assert {rule.tags.glob for rule in found.mappings} == {("1.20",)}
    assert [rule.tags.sort for rule in found.mappings] == ["alpha", "alpha", "semver", "alpha"]


def test_aliases_do_not_multiply_work() -> None:
    # Every alias of the list costs one look, not 2,000 patterns.
    patterns = ", ".join(f"a{i}" for i in range(2000))
    shared = f"defaults: {{source: one, targets: two, tags: &t {{glob: [{patterns}]}}}}\n"
    entries = "".join(f"- {{from: a{i}, tags: *t}}\n" for i in range(500))
    found = read(f"{REGISTRIES}{shared}mappings:\n{entries}")
    assert len({id(rule.tags) for rule in found.mappings}) == 1
    items = ", ".join([f"&a {'a' * 200_000}", *["*a"] * 2000])
    assert len(problems(f"{REGISTRIES}mappings: []\ndefaults: {{tags: {{glob: [{items}]}}}}")) == 1
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    found_in_bomb = problems("\n".join([*lines, "mappings: *a29"]))
    assert any("mappings[0]: must be a mapping" in line for line in found_in_bomb)


def test_a_chain_of_merges_ends_somewhere() -> None:
    lines = ["x-0: &a0 {from: a}"] + [f"x-{i}: &a{i} {{<<: *a{i - 1}}}" for i in range(1, 1500)]
    found = problems("\n".join([*lines, "mappings: [*a1499]"]))
    assert any("nested too deep" in line for line in found)


SIZE = 100_000
GLOBAL = "mappings: []\nglobal: {"
MAPPED = f"{REGISTRIES}mappings:\n- {{{ROUTE}, "


HOSTILE = {
    "a variable that stays open": "mappings: '" + "${" * SIZE + "'",
    "stars": MAPPED + "tags: {glob: '" + "*a" * SIZE + "['}}",
    "braces": MAPPED + "tags: {glob: '" + "{" * SIZE + "'}}",
    "a long range": MAPPED + "tags: {semver: '" + ">1," * SIZE + "'}}",
    "a long platform": MAPPED + "platforms: [" + "a/" * SIZE + "]}",
    "a long repository": MAPPED + "to: " + "a/" * SIZE + "}",
    "a long duration": GLOBAL + "cache_ttl: " + "1h" * SIZE + "x}",
    "digests that are no logins": GLOBAL + "cache_ttl: '" + "=a@sha256:" * SIZE + "'}",
    "a long size": GLOBAL + "staging_size_limit: " + "1" * SIZE + "}",
    "a long address": "mappings: []\nregistries: {a: {url: " + "a." * SIZE + "}}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_refused_in_linear_work_and_few_words(text: str) -> None:
    assert all(len(line) < 800 for line in problems(text))


# Small grammars.


@pytest.mark.parametrize("text", ["", "h", "1 h", "1H", "-1", "1.5h", "1h30", "1w", "١", "9" * 40])
def test_no_duration_shows_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match="1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1.5GB", 1_500_000_000),
        ("10 MiB", 10 * 1024 * 1024),
        (" 2tib ", 2 * 1024**4),
        ("1.000000001 GB", 1_000_000_001),
    ],
)
def test_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "1", "GB", "-1 GB", "1 G", "1,5 GB", "1e3 B", "1. GB"])
def test_no_size_shows_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match="KiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "parts", "authority"),
    [
        ("GHCR.io:8443", ("https", "ghcr.io", 8443), "ghcr.io:8443"),
        ("HTTP://a.example", ("http", "a.example", 80), "a.example"),
        ("http://a.example:443", ("http", "a.example", 443), "a.example:443"),
        ("https://registry-1.docker.io", ("https", "docker.io", 443), "docker.io"),
        ("localhost", ("http", "localhost", 80), "localhost"),
        ("[::1]:5000", ("http", "::1", 5000), "[::1]:5000"),
        ("128.0.0.1", ("https", "128.0.0.1", 443), "128.0.0.1"),
        ("[2001:DB8:0::1]", ("https", "2001:db8::1", 443), "[2001:db8::1]"),
    ],
)
def test_an_address_and_the_name_that_reports_have_for_it(
    text: str, parts: tuple[str, str, int], authority: str
) -> None:
    assert parse_registry_url(text) == parts
    assert registry(f"url: '{text}'").authority == authority


BAD_URLS = ["", "https://", "a.example/", "a.example/v2", "a.example?x", "ftp://a.example", "a..b", "-a",
            "a_b", "a:", "a:0", "a:65536", "a:b", "::1", "[::1", "[::g]", "[1.2.3.4]", "a b", "//a",
            "a.example.", "user@a.example", "https://u:pw@a.example", "a\n", "ä.example",
            "[fe80::1%eth0]", "a:٣", "https://http://a"]  # fmt: skip


@pytest.mark.parametrize("text", BAD_URLS)
def test_no_registry_address(text: str) -> None:
    with pytest.raises(ValueError, match=": ") as caught:
        parse_registry_url(text)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "alias"),
    [
        ("docker.io", "hub"),
        ("A.example", "tls"),
        ("https://a.example", "tls"),
        ("a.example:5000", "odd"),
        ("b.example:80", "plain"),
        ("http://b.example", "plain"),
        ("http://localhost:5000", "local"),
        ("oci-layout:/other", "oci-layout:/other"),
        ("b.example:444", "b.example:444"),
        ("b.example:443", "b.example:443"),
        ("a.example:80", "a.example:80"),
    ],
)
def test_a_reference_finds_the_first_registry_that_has_its_address(
    written: str, alias: str
) -> None:
    found = read(
        textwrap.dedent("""\
        registries:
          hub: {url: index.docker.io}
          tls: {url: a.example}
          again: {url: a.example}
          odd: {url: a.example:5000}
          plain: {url: http://b.example}
          local: {url: localhost:5000}
          disk: {url: "oci-layout:/disk"}
        mappings: []
        """)
    )
    assert registry_for(written, found).alias == alias


def test_a_reference_to_what_is_not_configured_gets_the_scheme_that_its_host_implies() -> None:
    none = Config({}, ())
    assert registry_for("localhost:5000", none).scheme == "http"
    assert registry_for("https://localhost:5000", none).scheme == "https"
    assert registry_for("ghcr.io:444", none)[:5] == ("ghcr.io:444", "https", "ghcr.io", 444, "ghcr")
    with pytest.raises(ConfigError, match="registry address"):
        registry_for("a/b", none)
    found = read("registries: {local: {url: 'localhost:5000'}}\nmappings: []")
    with pytest.raises(ConfigError, match="the configuration says http:// for registry 'local'"):
        registry_for("https://localhost:5000", found)


# The table, and anything at all.


def settles(text: bytes) -> None:
    """Assert that a document is a configuration, or an error whose problems have a place."""
    try:
        read(text, {"A": "x"})
    except ConfigError as error:
        found = error.problems
    else:
        return
    assert found
    for problem in found:
        assert "\n" not in str(problem)
        assert problem.line >= 1
        assert problem.message


@given(st.dictionaries(NAMES, TREES, max_size=6))
def test_any_document_of_known_names_is_a_config_or_a_config_error(tree: dict[str, object]) -> None:
    tree.setdefault("registries", {"a": {"url": "a.example"}, "b": {"url": "b.example"}})
    tree.setdefault("mappings", [{"from": "x", "source": "a", "targets": ["b"]}])
    settles(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))


@given(st.text("ab:-[]{}&*!|>'\"%@`#, \n\t\\?<$1~=\x00\ufeff\ud800", max_size=40))
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    settles(text.encode("utf-8", "surrogatepass"))
