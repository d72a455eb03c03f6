"""The expanded configuration: what it says, and what it hides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given, reject, settings

from _regsync import config
from _regsync.config import ConfigFile
from _regsync.errors import ConfigError
from _regsync.text import forget_all_secrets
from tests.unit.configs import CONFIGS, SECRETS

WHOLE = """\
x-anchors: [&web {glob: "3.*", exclude: ["*-rc*"]}]
registries:
  "h${X}": {url: index.docker.io, head_first: yes}
  mine:
    url: ${HOST:-localhost}:5000
    auth_type: basic
    credentials: {username: mirror, password: "${MIRROR_PASSWORD}"}
    max_concurrent: ${N}
    ca_file: certs/ca.pem
    proxy: "http://proxy.example:3128"
  disk: {url: "oci-layout:disk", assume: far.txt}
target_groups: {all: [mine, disk]}
defaults: {source: "h$${X}", targets: all, tags: *web, platforms: [Linux/AMD64]}
mappings:
  - {from: library/alpine, tags: null}
  - {from: a/b, to: c/d, targets: mine, platforms: [linux/arm/v7], min_age: 7d,
     tags: {glob: ["1.20", 'yes', "$$x-*"], sort: semver, latest: 2, min_tags: 0},
     artifacts: {enabled: off}}
global: {cache_ttl: 90m, staging_size_limit: 1.5 MB}
"""
EXPANDED = """\
registries:
  h${X}: {alias: 'h${X}', scheme: https, host: docker.io, port: 443, kind: dockerhub, head_first: true}
  mine: {alias: mine, scheme: http, host: localhost, port: 5000, kind: unknown, auth_type: basic, username: mirror,
    password: '***', max_concurrent: 7, ca_file: /etc/rs/certs/ca.pem, proxy: 'http://proxy.example:3128'}
  disk:
    alias: disk
    scheme: oci-layout
    host: /etc/rs/disk
    port: 0
    kind: unknown
    written_path: disk
    assume: [/etc/rs/far.txt]
mappings:
- index: 0
  source: h${X}
  source_repository: library/alpine
  targets: [mine, disk]
  target_repository: library/alpine
  tags:
    glob: [3.*]
    exclude: ['*-rc*']
  platforms: [linux/amd64]
  artifacts: {}
- index: 1
  source: h${X}
  source_repository: a/b
  targets: [mine]
  target_repository: c/d
  tags:
    glob: ['1.20', 'yes', $x-*]
    sort: semver
    latest: 2
    min_tags: 0
  platforms: [linux/arm/v7]
  artifacts: {enabled: false}
  min_age: 604800.0
cache_dir: /etc/rs/.regsync
cache_ttl: 5400.0
staging_size_limit: 1500000
warnings: ['c.yaml:18:27: mappings[1].artifacts.enabled: is false: signatures and SBOMs are stripped at
    targets']
"""
ENVIRON = {"MIRROR_PASSWORD": "s3cret", "N": "7"}


def file(text: str, environ: Mapping[str, str], base_dir: str = "/etc/rs") -> ConfigFile:
    return ConfigFile(text.encode(), name="c.yaml", environ=environ, base_dir=base_dir)


def expand(text: str, environ: Mapping[str, str] = ENVIRON) -> str:
    forget_all_secrets()
    return config.expand(file(text, environ))


def test_what_was_understood_is_spelled_out_without_anchors_and_defaults() -> None:
    assert expand(WHOLE) == EXPANDED


def test_standard_input_has_no_directory() -> None:
    assert config.expand(file("mappings: []", {}, base_dir="")) == (
        "registries: {}\nmappings: []\n"
    )


# Secrets.

BASIC = "auth_type: basic, credentials: {username: u, password: '%s'}"
TOKEN = "auth_type: static_token, token: '%s'"
PROXY = "proxy: '%s'"


@pytest.mark.parametrize(
    ("field", "written", "shown"),
    [
        (BASIC, "${PW}", "password: '***'"),
        (BASIC, "abc", "password: '***'"),
        (TOKEN, "abc", "token: '***'"),
        (PROXY, "http://u:${PW}@p.x:1", "proxy: '***'"),
        (PROXY, "http://p.x:1", "proxy: 'http://p.x:1'"),
    ],
)
@pytest.mark.parametrize("alias", ["r", "status"])
def test_a_secret_is_hidden_however_short_it_is(
    alias: str, field: str, written: str, shown: str
) -> None:
    """A proxy's URL is a secret if it has a user and password."""
    text = f"registries: {{{alias}: {{url: a.example, {field % written}}}}}\nmappings: []\n"
    found = expand(text, {"PW": "s3cret"})
    assert shown in found
    assert "s3cret" not in found


def test_a_secret_is_hidden_where_another_value_repeats_it_unless_it_is_short() -> None:
    text = """\
registries:
  a: {url: "${PW}.example", auth_type: static_token, token: "${PW}"}
  b:
    {url: "b-12.example", ca_file: "/$$s3cret$$", auth_type: basic,
     credentials: {username: robot, password: "12"}}
mappings:
  - {from: "x/${PW:-d}", source: a, targets: [b], tags: {glob: [s3cret, v12]}}
"""
    found = yaml.safe_load(expand(text, {"PW": "s3cret"}))
    a, b = found["registries"]["a"], found["registries"]["b"]
    assert (a["host"], a["token"], b["host"]) == ("***.example", "***", "b-12.example")
    assert (b["username"], b["password"], b["ca_file"]) == ("robot", "***", "/$***$")
    (mapping,) = found["mappings"]
    assert (mapping["source_repository"], mapping["tags"]) == ("x/***", {"glob": ["***", "v12"]})


@settings(max_examples=30)
@given(CONFIGS, SECRETS)
def test_of_any_configuration_all_is_shown_but_its_secrets(tree: Any, secret: str) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True)
    environ = {"PW": secret, "N": "9", "HTTP": "http://u:S3-x@p:1"}
    try:
        shown = expand(text, environ)
    except ConfigError:
        reject()  # a password with a slash is none in a proxy's URL
    assert "S3-" not in shown
    found = yaml.safe_load(shown)
    whole = config.load(file(text, environ))
    assert found["registries"].keys() == whole.registries.keys()
    assert len(found["mappings"]) == len(whole.mappings)
