"""Where credentials come from: the configuration, GITHUB_TOKEN, the files of container clients."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest

from _regsync import edge
from _regsync.auth.credentials import Credential, find_credential
from _regsync.config import Registry
from _regsync.errors import AuthError
from _regsync.providers import kind_of
from _regsync.text import keep_secret, mask

HOME = "/home/someone"
DOCKER = f"{HOME}/.docker/config.json"
PODMAN = f"{HOME}/.config/containers/auth.json"
VARIABLE = "variable DOCKER_AUTH_CONFIG"
HOST = "registry.example"


def pair(username, password):
    return {"auth": base64.b64encode(f"{username}:{password}".encode()).decode()}


def registry(host=HOST, port=443, **fields):
    fields = {"alias": "mine", "scheme": "https", "kind": kind_of(host), **fields}
    return Registry(host=host, port=port, **fields)


def search(at, environ, read, repository=None):
    variables = {"HOME": HOME, **environ}
    with edge.using(edge.current()._replace(environ=variables)):
        return find_credential(at, read, repository)


def find(at, document=None, environ=None, repository=None, **more):
    """Look for a credential; docker's file is given as a document, or as its bytes."""
    files = {} if document is None else {DOCKER: document, **more}
    held = {
        path: content if isinstance(content, bytes) else json.dumps(content).encode()
        for path, content in files.items()
    }
    return search(at, environ or {}, held.get, repository)


def login(found):
    return None if found is None else (found.username, found.password)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"auth_type": "basic", "username": "me", "password": "p1"}, ("me", "p1", "", "")),
        ({"auth_type": "static_token", "token": "t"}, ("", "", "", "t")),
        ({"auth_type": "docker_config"}, ("file", "p2", "", "")),
        ({"auth_type": "ghcr"}, ("regsync", "p3", "", "")),
        ({"auth_type": "anonymous"}, None),
    ],
)
def test_each_auth_type_uses_its_own_source_only(fields, expected):
    document = {"auths": {HOST: pair("file", "p2")}}
    found = find(registry(**fields), document, {"GITHUB_TOKEN": "p3"})
    assert (found and found[:4]) == expected


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        ("ghcr.io", {"GITHUB_TOKEN": "t"}, ("regsync", "t")),
        ("ghcr.io", {"GITHUB_TOKEN": "t", "GITHUB_ACTOR": "me"}, ("me", "t")),
        ("ghcr.io", {}, ("file", "p")),
        (HOST, {"GITHUB_TOKEN": "t"}, None),
        ("ghcr.io.evil.example", {"GITHUB_TOKEN": "t"}, None),
    ],
)
def test_githubs_token_is_for_ghcr_only_and_does_not_travel_in_clear(host, environ, expected):
    document = {"auths": {"ghcr.io": pair("file", "p")}}
    assert login(find(registry(host), document, environ)) == expected
    plain = registry("ghcr.io", 80, scheme="http")
    if environ:
        with pytest.raises(AuthError, match="not sent over plain HTTP"):
            find(plain, environ=environ)
    here = registry("127.0.0.1", 5000, scheme="http", auth_type="ghcr")
    assert find(here, environ={"GITHUB_TOKEN": "t"}) is not None


HUB = "https://index.docker.io/v1/"


@pytest.mark.parametrize(
    ("key", "host", "port", "matches"),
    [
        (HOST, HOST, 443, True),
        (f"{HOST}:5000", HOST, 5000, True),
        (f"{HOST}:443", HOST, 443, True),
        (HOST, HOST, 5000, False),
        (f"{HOST}:5000", HOST, 443, False),
        (f"https://{HOST}/v2/", HOST, 443, True),
        (f"http://{HOST}:5000", HOST, 5000, True),
        (HOST.title(), HOST, 443, True),
        (f"{HOST}/org", HOST, 443, False),
        ("example", HOST, 443, False),
        (f"evil-{HOST}", HOST, 443, False),
        (f"https://{HOST}.evil/", HOST, 443, False),
        (f"{HOST}http://", HOST, 443, False),
        (HUB, "docker.io", 443, True),
        ("docker.io", "docker.io", 443, True),
        ("index.docker.io", "docker.io", 443, True),
        ("https://registry-1.docker.io/v2/", "docker.io", 443, True),
        ("registry.hub.docker.com", "docker.io", 443, True),
        (HUB, HOST, 443, False),
    ],
)
def test_a_key_names_exactly_one_registry(key, host, port, matches):
    found = find(registry(host, port), {"auths": {key: pair("someone", "hunter2")}})
    assert login(found) == (("someone", "hunter2") if matches else None)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (pair("user", "pass:word"), ("user", "pass:word", "", "")),
        (pair("user", "password\0\0"), ("user", "password", "", "")),
        ({"auth": "dTpw\nYXNz\r\n"}, ("u", "pass", "", "")),
        ({"username": "u", "password": "p"}, ("u", "p", "", "")),
        ({**pair("u", "p"), "username": "x", "password": "y"}, ("u", "p", "", "")),
        ({**pair("00000000", ""), "identitytoken": "it"}, ("00000000", "", "it", "")),
        ({"username": "<token>", "password": "it"}, ("<token>", "", "it", "")),
        ({"registrytoken": "rt"}, ("", "", "", "rt")),
        *((entry, None) for entry in ({}, {"email": "a@b"}, {"auth": ""}, {"username": "u"})),
    ],
)
def test_entries_are_read_in_all_their_forms(entry, expected):
    found = find(registry(), {"auths": {HOST: entry}})
    assert (found and found[:4]) == expected
    assert found is None or found.found_at == DOCKER


@pytest.mark.parametrize("content", [b"", b" \n"])
def test_an_empty_file_is_no_file(content):
    at = registry()
    assert find(at, content) is None
    assert find(at, content, **{PODMAN: {"auths": {HOST: pair("u", "p")}}}).username == "u"


def opened(environ, documents=None):
    """Return which places were opened, in order, and the credential."""
    names = []

    def read(path):
        names.append(path)
        return json.dumps(documents[path]).encode() if path in (documents or {}) else None

    return names, search(registry(), environ, read)


def test_places_are_searched_in_order_and_nothing_behind_the_first_is_opened():
    environ = {
        "REGISTRY_AUTH_FILE": "/named/auth.json",
        "DOCKER_CONFIG": "/docker",
        "XDG_RUNTIME_DIR": "/run/user/7",
        "XDG_CONFIG_HOME": "/settings",
    }
    places = [
        "/named/auth.json",
        "/docker/config.json",
        "/run/user/7/containers/auth.json",
        "/settings/containers/auth.json",
    ]
    for missing in range(len(places)):
        documents = {place: {"auths": {HOST: pair(place, "p")}} for place in places[missing:]}
        names, found = opened(environ, documents=documents)
        assert (names, found.username) == (places[: missing + 1], places[missing])
    inline = json.dumps({"auths": {HOST: pair("inline", "p")}})
    names, found = opened({**environ, "DOCKER_AUTH_CONFIG": inline}, documents=documents)
    assert (names, found.username) == ([], "inline")


def test_places_without_variables_are_the_home_directorys(monkeypatch):
    names, _ = opened({})
    assert (names[0], names[2:]) == (DOCKER, [PODMAN])
    assert names[1].startswith("/run/containers/")
    # Without HOME it is the account's, if it has one.
    for account, count in (("/home/account", 3), ("~", 1)):
        monkeypatch.setattr("os.path.expanduser", lambda _, home=account: home)
        names, _ = opened({"HOME": ""})
        assert len(names) == count
        assert ("/home/account/.docker/config.json" in names) is (count == 3)


@pytest.mark.parametrize(
    ("method", "places"),
    [("docker_config", (VARIABLE, DOCKER, PODMAN)), ("ghcr", ("variable GITHUB_TOKEN",))],
)
def test_a_named_source_that_yields_nothing_names_every_place_and_what_helps(method, places):
    with pytest.raises(AuthError) as caught:
        find(registry(auth_type=method))
    assert all(place in caught.value.message for place in places)
    assert ("container client" in caught.value.hint) == (method == "docker_config")
    assert caught.value.fatal


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[" * 100_000,
        [],
        {"credHelpers": "x"},
        {"auths": {HOST: "hunter2"}},
        {"auths": {HOST: {"auth": 5}}},
        {"auths": {HOST: {"auth": "hunter2!"}}},
        {"auths": {HOST: {"auth": "aHVudGVyMg=="}}},
        {"auths": {HOST: pair("", "hunter2")}},
    ],
    ids=lambda content: str(content)[:40],
)
def test_a_broken_file_is_an_error_that_names_it_and_shows_nothing_of_it(content):
    for method in ("docker_config", None):
        with pytest.raises(AuthError) as caught:
            find(registry(auth_type=method), content, **{PODMAN: {"auths": {HOST: pair("a", "b")}}})
        assert DOCKER in caught.value.message
        assert caught.value.hint == "correct it, or remove it and log in again"
        assert caught.value.fatal
        assert "hunter2" not in repr(caught.value)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


LOGIN = {HOST: pair("u", "p")}


@pytest.mark.parametrize(
    ("document", "method", "section"),
    [
        ({"credHelpers": {HOST: "pass"}}, None, "credHelpers"),
        ({"credHelpers": {HOST: "pass"}, "auths": LOGIN}, None, "credHelpers"),
        ({"credHelpers": {"elsewhere.example": "pass"}}, None, None),
        ({"credsStore": "pass"}, "docker_config", "credsStore"),
        ({"credsStore": "pass", "auths": {HOST: {}}}, None, "credsStore"),  # its mark
        ({"credsStore": "pass"}, None, None),
        ({"credsStore": "pass", "auths": {"elsewhere.example": {}}}, None, None),
    ],
)
def test_a_credential_helper_is_named_and_never_run(document, method, section):
    if section is None:
        assert find(registry(auth_type=method), document) is None
        return
    with pytest.raises(AuthError) as caught:
        find(registry(auth_type=method), document)
    for part in (DOCKER, HOST, "docker-credential-pass", section, "other programs"):
        assert part in caught.value.message
    assert "auth_type: basic" in caught.value.hint
    assert caught.value.fatal


def test_an_entry_beside_a_store_is_used():
    assert login(find(registry(), {"credsStore": "pass", "auths": LOGIN})) == ("u", "p")


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
def test_a_clouds_own_helper_is_built_in(host, program):
    assert find(registry(host), {"credHelpers": {host: program}}) is None
    for at, helper in (
        (registry(host, auth_type="docker_config"), program),
        (registry(host), "pass"),
        (registry(), program),
    ):
        with pytest.raises(AuthError, match=f"docker-credential-{helper}"):
            find(at, {"credHelpers": {at.host: helper}})


def test_no_secret_is_in_the_text_of_a_credential():
    held = Credential("someone", "hunter1", "hunter2", "hunter3")
    assert "hunter" not in f"{held!r} {held}"
    keep_secret(*held.secrets)
    assert mask(f"no hunter1, hunter2, hunter3 nor {held.basic[6:]}") == "no ***, ***, *** nor ***"


def test_who_uses_no_clouds_identity_imports_none():
    code = (
        "import sys\nfrom _regsync.app import cli\nstatus = cli.main(sys.argv[1:])\n"
        "loaded = {name.rpartition('.')[2] for name in sys.modules}\n"
        "print(status, *sorted({'aws', 'azure', 'google', 'rsa'} & loaded))"
    )
    one = {"url": "gcr.io", "auth_type": "docker_config"}
    config = json.dumps({"registries": {"one": one}, "mappings": []})
    command = [sys.executable, "-c", code, "tags", "gcr.io/app", "-c", "-"]
    ran = subprocess.run(command, input=config, capture_output=True, text=True, check=True)
    assert (ran.stdout, "no credentials" in ran.stderr) == ("4\n", True), ran.stderr
