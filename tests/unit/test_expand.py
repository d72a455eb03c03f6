"""The expanded configuration: what it says, what it hides, and that it loads again to the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given, reject, settings

from _regsync import config
from _regsync.config import Config, ConfigFile
from _regsync.errors import ConfigError
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
  far: {url: far.example, auth_type: ecr, aws_profile: dev, proxy: "http://proxy.example:3128"}
  disk: {url: "oci-layout:disk", assume: far.txt}
target_groups: {all: [mine, far]}
defaults: {source: "h$${X}", targets: all, tags: *web, platforms: [Linux/AMD64]}
mappings:
  - {from: library/alpine, tags: null}
  - {from: a/b, to: c/d, targets: mine, platforms: [linux/arm/v7], min_age: 7d,
     tags: {glob: ["1.20", 'yes', "$$x-*"], sort: semver, latest: 2}, artifacts: {enabled: off}}
  - {from: a/b, targets: disk, platforms: all, tags: {min_tags: 0}}
  - {from: c, artifacts: {}}
global: {cache_ttl: 90m, staging_size_limit: 1.5 MB}
"""
EXPANDED = """\
registries:
  h${X}: {url: 'https://docker.io', head_first: true}
  mine:
    url: http://localhost:5000
    auth_type: basic
    max_concurrent: 7
    ca_file: /etc/rs/certs/ca.pem
    credentials: {username: mirror, password: '${MIRROR_PASSWORD}'}
  far: {url: 'https://far.example', auth_type: ecr, cloud_profile: dev, proxy: 'http://proxy.example:3128'}
  disk:
    url: oci-layout:disk
    assume: [/etc/rs/far.txt]
mappings:
- from: library/alpine
  to: library/alpine
  source: h$${X}
  targets: [mine, far]
  tags:
    glob: [3.*]
    exclude: ['*-rc*']
  platforms: [linux/amd64]
- from: a/b
  to: c/d
  source: h$${X}
  targets: [mine]
  tags:
    glob: ['1.20', 'yes', $$x-*]
    sort: semver
    latest: 2
  min_age: 604800
  platforms: [linux/arm/v7]
  artifacts: {enabled: false}
- from: a/b
  to: a/b
  source: h$${X}
  targets: [disk]
  tags: {min_tags: 0}
- from: c
  to: c
  source: h$${X}
  targets: [mine, far]
  tags:
    glob: [3.*]
    exclude: ['*-rc*']
  platforms: [linux/amd64]
global: {max_concurrent_transfers: 50, cache_ttl: 5400, cache_dir: /etc/rs/.regsync, staging_size_limit: 1500000B}
"""
ENVIRON = {"MIRROR_PASSWORD": "s3cret", "N": "7"}


def file(text: str, environ: Mapping[str, str], base_dir: str | None = "/etc/rs") -> ConfigFile:
    return ConfigFile(
        text.encode(), name="c.yaml", environ=environ, base_dir=base_dir, home="/home/me"
    )


def load(text: str, environ: Mapping[str, str] = ENVIRON) -> Config:
    """Load without warnings: their places are not those of another text."""
    return config.load(file(text, environ))._replace(warnings=())


def expand(text: str, environ: Mapping[str, str] = ENVIRON, *, show: bool = False) -> str:
    return config.expand(file(text, environ), show_secrets=show)


def test_the_whole_is_spelled_out_without_anchors_and_loads_to_the_same() -> None:
    assert expand(WHOLE) == EXPANDED
    assert load(EXPANDED) == load(WHOLE)
    assert load(expand(WHOLE, show=True), {}) == load(WHOLE)
    assert expand(EXPANDED) == EXPANDED


def test_standard_input_has_no_directory() -> None:
    found = yaml.safe_load(config.expand(file("mappings: []", {}, base_dir=None)))
    assert found["global"] == {"max_concurrent_transfers": 50, "cache_ttl": 43200}


# Secrets.

ENV = {
    "PW": "s3cret",
    "USER": "robot",
    "P": "http://u:s3cret@proxy.example:1",
    "HOST": "h.example",
    "UP": "cret@",
}
BASIC = "auth_type: basic, credentials: {username: u, password: '%s'}"


@pytest.mark.parametrize(
    ("field", "written", "shown", "whole"),
    [
        (BASIC, "${PW}", "${PW}", "s3cret"),
        (BASIC, "${PW:?set it}", "${PW}", "s3cret"),
        (BASIC, "${PW:-s3cret}", "${PW}", "s3cret"),
        (BASIC, "x${PW}y", "********${PW}********", "xs3crety"),
        (BASIC, "${PW}${USER}", "${PW}${USER}", "s3cretrobot"),
        (BASIC, "a$$b${PW}", "********${PW}", "a$$bs3cret"),
        (BASIC, "$${PW}s3cret", "********", "$${PW}s3cret"),
        (BASIC, "a$b", "********", "a$$b"),
        ("proxy: '%s'", "http://u:s3cret@p.x:1", "http://********@p.x:1", "http://u:s3cret@p.x:1"),
        ("proxy: '%s'", "http://u:${PW}@${HOST}:1", "http://********@${HOST}:1", None),
        ("proxy: '%s'", "${P}", "${P}", ENV["P"]),
        ("proxy: '%s'", "http://${HOST}:1", "http://h.example:1", "http://h.example:1"),
        ("proxy: '%s'", "http://${UP}${HOST}:1", "********${UP}${HOST}********", None),
    ],
)
def test_a_secret_stays_the_variable_that_it_came_from_unless_it_is_asked_for(
    field: str, written: str, shown: str, whole: str | None
) -> None:
    """Of a proxy only the user and password are a secret."""
    text = f"registries: {{r: {{url: a.example, {field % written}}}}}\nmappings: []\n"
    for show, value in ((False, shown), (True, whole or "")):
        found = yaml.safe_load(expand(text, ENV, show=show))["registries"]["r"]
        told = found["credentials"]["password"] if field is BASIC else found["proxy"]
        assert told == value or (show and whole is None)


def test_a_secret_is_hidden_where_another_value_repeats_it_unless_it_is_short() -> None:
    text = """\
registries:
  a: {url: "${PW}.example", auth_type: static_token, token: "${PW}"}
  b:
    {url: "b-12.example", ca_file: "/$$s3cret$$", auth_type: basic,
     credentials: {username: "${USER}", password: "${NUMBER}"}}
mappings:
  - {from: "x/${PW:-d}/${USER}", source: a, targets: [b], tags: {glob: [s3cret, v12]}}
"""
    environ = {**ENV, "NUMBER": "12"}
    shown = expand(text, environ)
    found = yaml.safe_load(shown)
    assert "s3cret" not in shown
    a, b = found["registries"]["a"], found["registries"]["b"]
    assert (a["url"], b["url"]) == ("https://${PW}.example", "https://b-12.example")
    assert b["credentials"] == {"username": "robot", "password": "${NUMBER}"}
    assert b["ca_file"] == "/$$${PW}$$"
    assert found["mappings"][0]["from"] == "x/${PW}/robot"
    assert found["mappings"][0]["tags"]["glob"] == ["${PW}", "v12"]
    assert load(shown, environ) == load(text, environ)


@settings(max_examples=30)
@given(CONFIGS, SECRETS)
def test_any_configuration_loads_again_to_the_same_and_hides_its_secrets(
    tree: Any, secret: str
) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True)
    environ = {"PW": secret, "N": "9", "HTTP": "http://u:S3-x@p:1"}
    try:
        found = load(text, environ)
    except ConfigError:
        reject()  # a password with a slash is none in a proxy's URL
    hidden = expand(text, environ)
    assert "S3-" not in hidden
    assert load(hidden.replace("********", "u:${PW}"), environ) == found
    assert load(expand(text, environ, show=True), {}) == found
