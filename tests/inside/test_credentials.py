"""Where credentials come from: the configuration, GITHUB_TOKEN, the files of container clients."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _regsync.auth.credentials import Credential, find_credential
from _regsync.config import Registry
from _regsync.errors import AuthError, ConfigError
from _regsync.providers import kind_of
from _regsync.text import keep_secret, mask

HOME = "/home/someone"
DOCKER = f"{HOME}/.docker/config.json"
PODMAN = f"{HOME}/.config/containers/auth.json"
VARIABLE = "variable DOCKER_AUTH_CONFIG"


def pair(username: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{username}:{password}".encode()).decode()}


def registry(host: str = "registry.example", port: int = 443, **fields: Any) -> Registry:
    fields = {"alias": "mine", "scheme": "https", "kind": kind_of(host), **fields}
    return Registry(host=host, port=port, **fields)


def find(
    at: Registry,
    files: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    repository: str | None = None,
) -> Credential | None:
    """Look for a credential; files are given as documents, or as the bytes that they hold."""
    held = {
        path: content if isinstance(content, bytes) else json.dumps(content).encode()
        for path, content in (files or {}).items()
    }
    return find_credential(at, environ or {}, HOME, held.get, repository)


def login(found: Credential | None) -> tuple[str | None, str | None] | None:
    return None if found is None else (found.username, found.password)


@pytest.mark.rule("R8")
def test_each_auth_type_uses_its_own_source_only() -> None:
    files = {DOCKER: {"auths": {"registry.example": pair("file", "hunter2")}}}
    environ = {"GITHUB_TOKEN": "hunter3"}
    basic = find(
        registry(auth_type="basic", username="someone", password="hunter1"), files, environ
    )
    assert login(basic) == ("someone", "hunter1")
    static = find(registry(auth_type="static_token", token="hunter4"), files, environ)
    assert static is not None
    assert (static.registry_token, static.username) == ("hunter4", "")
    assert find(registry(auth_type="anonymous"), files, environ) is None
    assert login(find(registry(auth_type="docker_config"), files, environ)) == ("file", "hunter2")
    assert login(find(registry(auth_type="ghcr"), files, environ)) == ("regsync", "hunter3")


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        pytest.param("ghcr.io", {"GITHUB_TOKEN": "t"}, ("regsync", "t"), id="token"),
        pytest.param("ghcr.io", {"GITHUB_TOKEN": "t", "GITHUB_ACTOR": "me"}, ("me", "t"), id="actor"),
        pytest.param("ghcr.io", {}, ("file", "p"), id="unset-falls-to-the-file"),
        pytest.param("registry.example", {"GITHUB_TOKEN": "t"}, None, id="never-to-another-host"),
        pytest.param("ghcr.io.evil.example", {"GITHUB_TOKEN": "t"}, None, id="never-to-a-look-alike"),
    ],
)  # fmt: skip
def test_absent_auth_type_gives_githubs_token_to_ghcr_only(
    host: str, environ: dict[str, str], expected: tuple[str, str] | None
) -> None:
    assert (
        login(find(registry(host), {DOCKER: {"auths": {"ghcr.io": pair("file", "p")}}}, environ))
        == expected
    )


@pytest.mark.rule("R9")
def test_githubs_token_does_not_travel_in_clear() -> None:
    environ = {"GITHUB_TOKEN": "hunter2"}
    with pytest.raises(AuthError, match="not sent over plain HTTP"):
        find(registry("ghcr.io", 80, scheme="http"), environ=environ)
    assert (
        find(registry("127.0.0.1", 5000, scheme="http", auth_type="ghcr"), environ=environ)
        is not None
    )


HUB = "https://index.docker.io/v1/"


@pytest.mark.rule("R8")
@pytest.mark.parametrize(
    ("key", "host", "port", "matches"),
    [
        pytest.param("registry.example", "registry.example", 443, True, id="host"),
        pytest.param("registry.example:5000", "registry.example", 5000, True, id="host-and-port"),
        pytest.param("registry.example:443", "registry.example", 443, True, id="default-port-written"),
        pytest.param("registry.example", "registry.example", 5000, False, id="port-differs"),
        pytest.param("registry.example:5000", "registry.example", 443, False, id="port-too-many"),
        pytest.param("https://registry.example/v2/", "registry.example", 443, True, id="url"),
        pytest.param("http://registry.example:5000", "registry.example", 5000, True, id="http-url"),
        pytest.param("Registry.Example", "registry.example", 443, True, id="case"),
        pytest.param("registry.example/org", "registry.example", 443, False, id="path-is-not-the-host"),
        pytest.param("example", "registry.example", 443, False, id="parent-domain"),
        pytest.param("evil-registry.example", "registry.example", 443, False, id="name-ends-alike"),
        pytest.param("https://registry.example.evil/", "registry.example", 443, False, id="name-begins-alike"),
        pytest.param("registry.examplehttp://", "registry.example", 443, False, id="scheme-at-the-end"),
        pytest.param(HUB, "docker.io", 443, True, id="hub-key"),
        pytest.param("docker.io", "docker.io", 443, True, id="hub-name"),
        pytest.param("index.docker.io", "docker.io", 443, True, id="hub-index"),
        pytest.param("https://registry-1.docker.io/v2/", "docker.io", 443, True, id="hub-api-url"),
        pytest.param("registry.hub.docker.com", "docker.io", 443, True, id="hub-web-name"),
        pytest.param(HUB, "registry.example", 443, False, id="hub-key-for-another-host"),
    ],
)  # fmt: skip
def test_a_key_names_exactly_one_registry(key: str, host: str, port: int, matches: bool) -> None:
    found = find(registry(host, port), {DOCKER: {"auths": {key: pair("someone", "hunter2")}}})
    assert login(found) == (("someone", "hunter2") if matches else None)


@pytest.mark.parametrize(
    ("repository", "expected"),
    [
        pytest.param("team/app/api", "api", id="whole-repository"),
        pytest.param("team/app/web", "app", id="middle"),
        pytest.param("team/other", "team", id="first-segment"),
        pytest.param("elsewhere/app", "host", id="host"),
        pytest.param(None, "host", id="no-repository"),
    ],
)
def test_the_most_specific_of_podmans_keys_wins(repository: str | None, expected: str) -> None:
    auths = {
        "registry.example": pair("host", "p"),
        "registry.example/team": pair("team", "p"),
        "registry.example/team/app": pair("app", "p"),
        "registry.example/team/app/api": pair("api", "p"),
    }
    found = find(registry(), {PODMAN: {"auths": auths}}, repository=repository)
    assert found is not None
    assert found.username == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        pytest.param(pair("user", "pass:word"), ("user", "pass:word", None, None), id="auth-splits-at-first-colon"),
        pytest.param(pair("user", "password\0\0"), ("user", "password", None, None), id="trailing-nulls"),
        pytest.param({"username": "u", "password": "p"}, ("u", "p", None, None), id="in-two-fields"),
        pytest.param({**pair("u", "p"), "username": "x", "password": "y"}, ("u", "p", None, None), id="auth-wins"),
        pytest.param({**pair("00000000", ""), "identitytoken": "it"}, ("00000000", None, "it", None),
            id="identity-token"),
        pytest.param({"username": "<token>", "password": "it"}, ("<token>", None, "it", None), id="token-as-name"),
        pytest.param({"registrytoken": "rt"}, (None, None, None, "rt"), id="registry-token"),
    ],
)  # fmt: skip
def test_entries_are_read_in_all_their_forms(
    entry: dict[str, str], expected: tuple[str | None, ...]
) -> None:
    found = find(registry(), {DOCKER: {"auths": {"registry.example": entry}}})
    assert found is not None
    assert tuple(value or None for value in found[:4]) == expected
    assert found.found_at == DOCKER


@pytest.mark.parametrize("entry", [{}, {"email": "a@b"}, {"auth": ""}, {"username": "u"}])
def test_an_entry_without_secret_is_no_credential(entry: dict[str, str]) -> None:
    assert find(registry(), {DOCKER: {"auths": {"registry.example": entry}}}) is None


ALL = {
    VARIABLE: "variable",
    "/named/auth.json": "named",
    "/docker/config.json": "docker",
    "/run/user/7/containers/auth.json": "runtime",
    "/settings/containers/auth.json": "settings",
}


@pytest.mark.parametrize("missing", range(len(ALL)))
def test_places_are_searched_in_order(missing: int) -> None:
    """With the first places gone the next one answers; nothing behind it is opened."""
    environ = {
        "REGISTRY_AUTH_FILE": "/named/auth.json",
        "DOCKER_CONFIG": "/docker",
        "XDG_RUNTIME_DIR": "/run/user/7",
        "XDG_CONFIG_HOME": "/settings",
    }
    documents: dict[str, Any] = {
        place: {"auths": {"registry.example": pair(name, "p")}}
        for place, name in list(ALL.items())[missing:]
    }
    if VARIABLE in documents:
        environ["DOCKER_AUTH_CONFIG"] = json.dumps(documents.pop(VARIABLE))
    opened: list[str] = []

    def read(path: str) -> bytes | None:
        opened.append(path)
        return json.dumps(documents[path]).encode() if path in documents else None

    found = find_credential(registry(), environ, HOME, read)
    assert found is not None
    assert found.username == list(ALL.values())[missing]
    assert opened == list(ALL)[1 : missing + 1]


def test_places_without_variables_are_the_home_directorys() -> None:
    opened: list[str] = []

    def read(path: str) -> bytes | None:
        opened.append(path)
        return None

    assert find_credential(registry(), {}, HOME, read) is None
    assert opened[0] == DOCKER
    assert opened[1].startswith("/run/containers/")
    assert opened[2:] == [PODMAN]
    opened.clear()
    assert find_credential(registry(), {}, None, read) is None
    assert len(opened) == 1


@pytest.mark.parametrize("method", ["docker_config", "ghcr"])
def test_a_named_source_that_yields_nothing_names_every_place(method: str) -> None:
    with pytest.raises(AuthError) as caught:
        find(registry(auth_type=method))
    for place in (VARIABLE, DOCKER, PODMAN) if method == "docker_config" else ("GITHUB_TOKEN",):
        assert place in caught.value.message
    assert caught.value.fatal


@pytest.mark.rule("R19")
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{", id="not-json"),
        pytest.param(b"\xff\xfe", id="not-text"),
        pytest.param(b"[" * 100_000, id="too-deep"),
        pytest.param([], id="a-list"),
        pytest.param({"auths": ["hunter2"]}, id="auths-is-a-list"),
        pytest.param({"credHelpers": "x"}, id="helpers-is-a-string"),
        pytest.param({"auths": {"registry.example": "hunter2"}}, id="entry-is-a-string"),
        pytest.param({"auths": {"registry.example": {"auth": 5}}}, id="auth-is-a-number"),
        pytest.param({"auths": {"registry.example": {"auth": "hunter2!"}}}, id="auth-is-not-base64"),
        pytest.param({"auths": {"registry.example": {"auth": "aHVudGVyMg=="}}}, id="auth-without-colon"),
        pytest.param({"auths": {"registry.example": pair("", "hunter2")}}, id="auth-without-user"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["docker_config", None], ids=["asked-for", "by-default"])
def test_a_broken_file_is_an_error_that_names_it_and_shows_nothing_of_it(
    content: object, method: str | None
) -> None:
    with pytest.raises(AuthError) as caught:
        find(
            registry(auth_type=method),
            {DOCKER: content, PODMAN: {"auths": {"registry.example": pair("a", "b")}}},
        )
    assert DOCKER in caught.value.message
    assert caught.value.fatal
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_an_unreadable_file_is_an_error_that_names_it() -> None:
    def read(path: str) -> bytes | None:
        raise ConfigError(f"{path}: Permission denied")

    with pytest.raises(AuthError, match=r"config\.json: Permission denied"):
        find_credential(registry(), {}, HOME, read)


@pytest.mark.rule("R8")
@pytest.mark.parametrize(
    ("document", "method", "section"),
    [
        pytest.param({"credHelpers": {"registry.example": "pass"}}, None, "credHelpers", id="for-this-host"),
        pytest.param({"credHelpers": {"registry.example": "pass"}, "auths": {"registry.example": pair("u", "p")}},
            None, "credHelpers", id="for-this-host-beats-auths"),
        pytest.param({"credHelpers": {"elsewhere.example": "pass"}}, None, None, id="for-another-host"),
        pytest.param({"credsStore": "pass"}, "docker_config", "credsStore", id="store-asked-for"),
        pytest.param({"credsStore": "pass", "auths": {"registry.example": {}}}, None, "credsStore",
            id="store-left-its-mark"),
        pytest.param({"credsStore": "pass"}, None, None, id="store-without-mark"),
        pytest.param({"credsStore": "pass", "auths": {"elsewhere.example": {}}}, None, None,
            id="mark-of-another-host"),
    ],
)  # fmt: skip
def test_a_credential_helper_is_named_and_never_run(
    document: object, method: str | None, section: str | None
) -> None:
    if section is None:
        assert find(registry(auth_type=method), {DOCKER: document}) is None
        return
    with pytest.raises(AuthError) as caught:
        find(registry(auth_type=method), {DOCKER: document})
    for part in (DOCKER, "registry.example", "docker-credential-pass", section, "other programs"):
        assert part in caught.value.message
    assert "auth_type: basic" in (caught.value.hint or "")
    assert caught.value.fatal


@pytest.mark.parametrize(
    ("host", "program"),
    [
        ("123456789012.dkr.ecr.eu-west-1.amazonaws.com", "ecr-login"),
        ("public.ecr.aws", "ecr-login"),
        ("gcr.io", "gcloud"),
        ("europe-docker.pkg.dev", "gcr"),
        ("mine.azurecr.io", "acr-env"),
    ],
)
def test_a_clouds_own_helper_is_built_in(host: str, program: str) -> None:
    document = {"credHelpers": {host: program}}
    assert find(registry(host), {DOCKER: document}) is None
    with pytest.raises(AuthError, match=f"docker-credential-{program}"):
        find(registry(host, auth_type="docker_config"), {DOCKER: document})
    with pytest.raises(AuthError, match="docker-credential-pass"):
        find(registry(host), {DOCKER: {"credHelpers": {host: "pass"}}})
    with pytest.raises(AuthError, match=f"docker-credential-{program}"):
        find(registry(), {DOCKER: {"credHelpers": {"registry.example": program}}})


def test_an_entry_beside_a_store_is_used() -> None:
    document = {"credsStore": "pass", "auths": {"registry.example": pair("u", "p")}}
    assert login(find(registry(), {DOCKER: document})) == ("u", "p")


def test_no_secret_is_in_the_text_of_a_credential() -> None:
    held = Credential("someone", "hunter1", "hunter2", "hunter3")
    assert "hunter" not in f"{held!r} {held}"
    basic = held.basic or ""
    keep_secret(*held.secrets)
    assert mask(f"no hunter1, hunter2, hunter3 nor {basic[6:]}") == "no ***, ***, *** nor ***"


@pytest.mark.parametrize("host", ["registry.example", "ghcr.io", "gcr.io"])
def test_who_uses_no_clouds_identity_imports_none(host: str) -> None:
    code = (
        "import sys\nfrom _regsync.app import cli\nstatus = cli.main(sys.argv[1:])\n"
        "print(status, *sorted({'aws', 'azure', 'google', 'rsa'} & {name.rpartition('.')[2] for name in sys.modules}))"
    )
    config = json.dumps(
        {"registries": {"one": {"url": host, "auth_type": "docker_config"}}, "mappings": []}
    )
    command = [sys.executable, "-c", code, "tags", f"{host}/app", "-c", "-"]
    ran = subprocess.run(command, input=config, capture_output=True, text=True, check=True)
    assert (ran.stdout, "no credentials" in ran.stderr) == ("4\n", True), ran.stderr


NAMES = ["auths", "credHelpers", "credsStore", "registry.example", "auth", "identitytoken"]
JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES), inner),
)


@settings(max_examples=25)
@given(JSON)
def test_any_json_gives_a_credential_nothing_or_an_auth_error(document: object) -> None:
    try:
        find(registry(auth_type="docker_config"), {DOCKER: document})
    except AuthError as error:
        assert error.fatal  # noqa: PT017
