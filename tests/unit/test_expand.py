"""The expanded configuration: what it says, what it hides, and that it loads again to the same."""

from __future__ import annotations

import textwrap
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
registries:
  hub: {url: index.docker.io, head_first: yes}
  mine:
    url: ${HOST:-localhost}:5000
    auth_type: basic
    credentials: {username: mirror, password: "${MIRROR_PASSWORD}"}
    max_concurrent: ${N}
    ca_file: certs/ca.pem
  far: {url: far.example, auth_type: ecr, aws_profile: dev, proxy: "http://proxy.example:3128"}
  disk: {url: "oci-layout:disk", assume: far.txt}
target_groups: {all: [mine, far]}
defaults:
  source: hub
  targets: all
  tags: {glob: "3.*", exclude: ["*-rc*"]}
  platforms: [Linux/AMD64]
mappings:
  - from: library/alpine
    tags: null
  - {from: a/b, to: c/d, targets: mine, platforms: [linux/arm/v7], min_age: 7d,
     tags: {glob: ["1.20", 'yes', "$$x-*"], sort: semver, latest: 2}, artifacts: {enabled: off}}
  - {from: a/b, targets: disk, platforms: all, tags: {min_tags: 0}}
global: {cache_ttl: 90m, staging_size_limit: 1.5 MB}
"""
ENVIRON = {"MIRROR_PASSWORD": "s3cret", "N": "7"}


def file(text: str, environ: Mapping[str, str], base_dir: str | None = "/etc/rs") -> ConfigFile:
    return ConfigFile(
        text.encode(), name="c.yaml", environ=environ, base_dir=base_dir, home="/home/me"
    )


def load(text: str, environ: Mapping[str, str] = ENVIRON) -> Config:
    """Load without warnings: their places are not those of another text."""
    found = config.load(file(text, environ))
    return found._replace(warnings=())


def expand(text: str, environ: Mapping[str, str] = ENVIRON, *, show: bool = False) -> str:
    return config.expand(file(text, environ), show_secrets=show)


def registry(body: str, environ: Mapping[str, str], *, show: bool = False) -> Any:
    text = f"registries: {{r: {{{body}}}}}\nmappings: []\n"
    return yaml.safe_load(expand(text, environ, show=show))["registries"]["r"]


def test_the_whole_is_spelled_out() -> None:
    expected = """\
    registries:
      hub: {url: 'https://docker.io', head_first: true}
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
      source: hub
      targets: [mine, far]
      tags:
        glob: [3.*]
        exclude: ['*-rc*']
      platforms: [linux/amd64]
    - from: a/b
      to: c/d
      source: hub
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
      source: hub
      targets: [disk]
      tags: {min_tags: 0}
    global: {max_concurrent_transfers: 50, cache_ttl: 5400, cache_dir: /etc/rs/.regsync, staging_size_limit: 1500000B}
    """
    assert expand(WHOLE) == textwrap.dedent(expected)


def test_what_is_printed_loads_to_the_same() -> None:
    assert load(expand(WHOLE)) == load(WHOLE)
    assert load(expand(WHOLE, show=True), {}) == load(WHOLE)
    assert expand(expand(WHOLE)) == expand(WHOLE)


def test_the_name_of_a_registry_may_have_a_dollar() -> None:
    text = """\
    registries: {"a${X}": {url: a.example}, "b$": {url: b.example}}
    target_groups: {all: ["b$$"]}
    mappings: [{from: x, source: "a$${X}", targets: all}]
    """
    text = textwrap.dedent(text)
    assert load(expand(text, {}), {}) == load(text, {})


def test_standard_input_has_no_directory() -> None:
    found = yaml.safe_load(config.expand(file("mappings: []", {}, base_dir=None)))
    assert found["global"] == {"max_concurrent_transfers": 50, "cache_ttl": 43200}


def test_a_wrong_configuration_is_told_as_by_validate() -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        expand("mapping: []\nmappings: []")
    assert len(caught.value.problems) == 1


def test_what_is_shared_stands_at_each_place_without_anchors() -> None:
    text = """\
x-anchors: [&web {glob: [x, y]}]
registries: {a: {url: a.example}, b: {url: b.example}}
defaults: {source: a, targets: b, tags: *web}
mappings: [{from: a}, {from: c, artifacts: {}}]
"""
    found = expand(text)
    assert found.count("glob: [x, y]") == 2
    assert "&" not in found
    assert "x-anchors" not in found


# --- secrets -----------------------------------------------------------------------------------

BASIC = "url: a.example, auth_type: basic, credentials: {username: u, password: '%s'}"
ENV = {"PW": "s3cret", "USER": "robot", "P": "http://u:s3cret@proxy.example:1", "HOST": "h.example"}
PASSWORDS = [
    ("${PW}", "${PW}"),
    ("${PW:?set it}", "${PW}"),
    ("${PW:-s3cret}", "${PW}"),
    ("s3cret", "********"),
    ("x${PW}y", "********${PW}********"),
    ("${PW}${USER}", "${PW}${USER}"),
    ("a$$b${PW}", "********${PW}"),
    ("$${PW}s3cret", "********"),
    ("a$b", "********"),
]


@pytest.mark.parametrize(("written", "shown"), PASSWORDS)
def test_a_password_stays_the_variable_that_it_came_from(written: str, shown: str) -> None:
    assert registry(BASIC % written, ENV)["credentials"] == {"username": "u", "password": shown}


@pytest.mark.parametrize(
    ("written", "value"),
    [("a$$b", "a$$b"), ("a$b", "a$$b"), ("${PW}", "s3cret"), ("$${PW}", "$${PW}")],
)
def test_a_password_is_written_out_when_that_is_asked_for(written: str, value: str) -> None:
    assert registry(BASIC % written, ENV, show=True)["credentials"]["password"] == value


PROXIES = [
    ("http://u:s3cret@proxy.example:1", "http://********@proxy.example:1"),
    ("http://u:${PW}@proxy.example:1", "http://********@proxy.example:1"),
    ("http://u:${PW}@${HOST}:1", "http://********@${HOST}:1"),
    ("${P}", "${P}"),
    ("http://${HOST}:1", "http://h.example:1"),
    ("http://proxy.example:1", "http://proxy.example:1"),
    ("http://${UP}${HOST}:1", "********${UP}${HOST}********"),
]


@pytest.mark.parametrize(("written", "shown"), PROXIES)
def test_of_a_proxy_only_its_user_is_a_secret(written: str, shown: str) -> None:
    assert registry(f"url: a.example, proxy: '{written}'", {**ENV, "UP": "cret@"})["proxy"] == shown


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
    assert found["registries"]["a"]["url"] == "https://${PW}.example"
    assert found["registries"]["b"]["url"] == "https://b-12.example"
    assert found["registries"]["b"]["credentials"] == {"username": "robot", "password": "${NUMBER}"}
    assert found["mappings"][0]["from"] == "x/${PW}/robot"
    assert found["mappings"][0]["tags"]["glob"] == ["${PW}", "v12"]
    assert found["registries"]["b"]["ca_file"] == "/$$${PW}$$"
    assert load(shown, environ) == load(text, environ)


# --- properties --------------------------------------------------------------------------------


@settings(max_examples=40)
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
