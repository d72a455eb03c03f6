"""Credential files, Azure's files, token services and challenges: any bytes give a login, none, or one
error that shows no secret, and what is found is right.
"""

from __future__ import annotations

import base64
import json
import math
from types import SimpleNamespace
from urllib.parse import urlsplit

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync import edge
from _regsync.addresses import Origin
from _regsync.auth import azure
from _regsync.auth.cloud import Access
from _regsync.auth.credentials import Credential, find_credential
from _regsync.auth.tokens import NEEDED, Authenticator
from _regsync.config import Config, Registry, registry_for
from _regsync.errors import AuthError, SyncError
from tests.fuzzing import fuzz, in_virtual_time, scraps, trees

SECRET = "Xyzzy-0pen+Sesame"


def as_json(strategy):
    return strategy.map(lambda document: json.dumps(document).encode())


NOBODY = (404, {}, b"")


def said(status, headers, body):
    return SimpleNamespace(status=status, headers=headers, body=body)


# Credential files of container clients.

PLACE = "/home/u/.docker/config.json"


def find(text, host="registry.test", repository=None, **env):
    read = {PLACE: text}.get
    with edge.using(edge.current()._replace(environ={"HOME": "/home/u", **env})):
        return find_credential(registry_for(host, Config({}, ())), read, repository)


def pair(user, password):
    return base64.b64encode(f"{user}:{password}".encode("utf-8", "surrogatepass")).decode()


VALUES = ["u", SECRET, "\ud800", "<token>", "", None, 5, "é", "a b\r\nX: y"]
ENTRIES = st.one_of(
    st.builds(pair, scraps("u : \x00", other="é"), scraps(": \x00", SECRET, "\n")).map(
        lambda auth: {"auth": auth}
    ),
    st.builds(
        lambda keys, values: dict(zip(keys, values, strict=False)),
        st.permutations(["username", "password", "identitytoken", "registrytoken", "auth"]),
        st.lists(st.sampled_from(VALUES), max_size=5),
    ),
    st.sampled_from([{}, None, [], "x", {"auth": "===="}, {"auth": "é"}, {"auth": "dTpw\n"}]),
)
KEYS = st.sampled_from([
    "registry.test", "https://registry.test", "https://registry.test/v1/", "registry.test/team",
    "registry.test/team/app", "registry.test:443", "REGISTRY.TEST", "evil.registry.test",
    "registry.test.evil", "xregistry.test", "",
])  # fmt: skip
HELPERS = st.dictionaries(KEYS, st.sampled_from(["ecr-login", "", None, 5, "x" * 99]), max_size=2)
PARTS = {
    "auths": st.dictionaries(KEYS, ENTRIES, max_size=4) | trees("registry.test"),
    "credHelpers": HELPERS,
    "credsStore": st.sampled_from(["desktop", "", None, [], {"a": 1}]),
}
FILES = as_json(
    st.fixed_dictionaries({}, optional=PARTS)
    | trees("auths credHelpers credsStore registry.test auth")
)
HALF_USER = {"auths": {"registry.test": {"username": "\ud800", "password": "x"}}}


@fuzz(100)
@given(FILES | st.sampled_from([b"\xff", b"", b"[" * 5_000, b"\xef\xbb\xbf{}"]), st.booleans())
@example(json.dumps(HALF_USER).encode(), False)
def test_any_credential_file_gives_a_credential_that_can_be_sent_or_an_auth_error(text, scoped):
    try:
        found = find(text, repository="team/app" if scoped else None)
    except AuthError as error:
        shown = f"{error} {error.hint}"
        assert "\n" not in shown
        assert SECRET not in shown
        return
    if found is not None:
        assert SECRET not in repr(found)
        sent = base64.b64decode((found.basic or "Basic ")[6:]).decode("utf-8", "surrogatepass")
        assert sent in ("", f"{found.username}:{found.password or found.identity_token}")


@fuzz(60)
@given(st.dictionaries(KEYS, st.integers(0, 9), max_size=5))
def test_only_entries_of_this_very_host_are_used_and_the_longest_path_wins(numbers):
    entries = {key: {"auth": pair(f"user{number}", "p")} for key, number in numbers.items()}
    found = find(json.dumps({"auths": entries}).encode(), repository="team/app")
    exact = ["registry.test/team/app", "registry.test/team", "registry.test", "registry.test:443"]
    urls = [key for key in numbers if key.startswith("https://") or key == "REGISTRY.TEST"]
    first = next((key for key in exact if key in numbers), None)
    if first is not None:
        assert found.username == f"user{numbers[first]}"
    elif urls:
        assert found.username in {f"user{numbers[key]}" for key in urls}
    else:
        assert found is None


def test_what_is_no_text_in_the_environment_is_sent_or_refused():
    """What is no UTF-8 is half characters in `os.environ`."""
    with pytest.raises(AuthError, match="DOCKER_AUTH_CONFIG is not"):
        find(None, DOCKER_AUTH_CONFIG="\udcff")
    for env in ({"GITHUB_TOKEN": "\udcff"}, {"GITHUB_TOKEN": "x", "GITHUB_ACTOR": "\udcff"}):
        assert find(None, "ghcr.io", **env).basic.startswith("Basic ")


# Token services and challenges.


def jwt_of(claims):
    return f"a.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.c"


TOKENS = st.one_of(
    st.sampled_from(["abc", SECRET, "", "a b", "é", "a\r\nb", "a.e30.c", "a..c", "a.W10.c"]),
    st.binary(max_size=20).map(jwt_of),
    as_json(trees("exp iat", leaves=st.sampled_from([1e9, 10**400, "9", -1]))).map(jwt_of),
)
LIVES = st.one_of(
    st.none() | st.integers() | st.floats(),
    st.sampled_from(["300", "x", True, [], 10**400, "nan", "1e999", -1]),
)
BODIES = st.one_of(
    st.fixed_dictionaries({"token": TOKENS, "expires_in": LIVES}),
    st.fixed_dictionaries({"access_token": TOKENS, "refresh_token": LIVES}),
    st.builds(lambda text: {"errors": [{"code": text, "message": text}]}, TOKENS | LIVES),
    trees("token access_token expires_in refresh_token errors message error"),
)
ANSWERS = st.tuples(
    st.sampled_from([200, 200, 200, 204, 301, 400, 401, 403, 404, 429, 500]),
    st.dictionaries(st.just("retry-after"), st.sampled_from(["1", "x", "9" * 30]), max_size=1),
    as_json(BODIES) | st.sampled_from([b"", b"[" * 5_000, b"\xff", b"null", b"1" * 5000]),
)
CHALLENGES = scraps(
    ', scope=" repository:app:pull " aws error="insufficient_scope" error="invalid_token"',
    'Bearer realm="https://registry.test/t"', "Basic x=y", most=5,
)  # fmt: skip
CREDENTIALS = [
    None,
    Credential("u", SECRET),
    Credential(identity_token=SECRET),
    Credential("\ud800", "\ud800", "\ud800"),
    Credential("<token>", "", SECRET),
]


@fuzz(100)
@given(
    st.lists(ANSWERS, max_size=5),
    st.lists(CHALLENGES, min_size=1, max_size=3),
    st.sampled_from(CREDENTIALS),
)
def test_any_token_answers_give_a_header_or_one_error(answers, challenges, credential):
    asked, waiting = [], iter(answers)

    async def fetch(method, url, headers, body):
        asked.append(urlsplit(url).netloc)
        return said(*next(waiting, NOBODY))

    async def work():
        shown = ""

        def login_of(credential):
            return Authenticator(
                origin=Origin("https", "registry.test", 443), credential=credential, fetch=fetch
            )

        login = login_of(credential)
        login.plan_scope("other", "pull")
        used, needed = None, frozenset({("app", "pull")})
        for challenge in challenges:
            headers = SimpleNamespace(all=lambda _, challenge=challenge: [challenge])
            refusal = SimpleNamespace(status=401, headers=headers, body=b"")
            try:
                if login.refused(refusal, used, needed):
                    while (
                        used := login.header(needed, anyio.current_time(), for_body=True)
                    ) is NEEDED:
                        await login.obtain(needed, for_body=True)
            except SyncError as error:
                shown += str(error)
                continue
            assert used is None or (used.isascii() and used.isprintable())
            await anyio.sleep(100.0)
        assert "\n" not in shown
        assert credential is None or SECRET not in shown
        assert set(asked) <= {"registry.test"}
        assert len(asked) <= 8 * len(challenges)
        later = login_of(None)
        later.restore(json.loads(json.dumps(login.login_facts)))
        assert later.login_facts == login.login_facts

    in_virtual_time(work)


# Azure's files, variables and servers.

FOLDER = "/home/u/.azure"
# What the directory gives may be repeated by the registry, as what we gave by the directory.
GOOD = (200, {}, json.dumps({"access_token": SECRET, "refresh_token": "r"}).encode())


def log_in(environ, files, *answers):
    """Log in; return None after an error that may be shown."""
    left, found = list(answers), []

    async def fetch(method, url, headers, body, seconds=None):
        # What is no URL is refused by what asks (`resolve_location`), not here.
        return said(*(left.pop(0) if left else GOOD))

    access = Access(files.get, fetch)

    async def ask():
        azure.is_configured(access)
        registry = Registry("a", "https", "a.azurecr.io", 443, "acr")
        try:
            found.append(await azure.log_in(access, registry, probing_metadata=False))
        except AuthError as error:
            shown = f"{error.message} {error.hint}"
            assert SECRET not in shown
            assert len(shown) < 1200
            assert not any(letter in shown for letter in "\r\n\x1b")

    variables = {"HOME": "/home/u", **environ}
    with edge.using(edge.current()._replace(environ=variables, wall=lambda: 1000.0)):
        in_virtual_time(ask)
    return found[0] if found else None


HOST = "login.microsoftonline.com"
LEAVES = st.sampled_from([SECRET, "AzureCloud", "me", "user", "h", HOST, "9999999999", "1"])
FIELDS = (
    "secret home_account_id environment username realm target expires_on last_modification_time"
)
ODD = st.none() | st.just("\ud800") | st.integers()
ENTRY = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS.split(), LEAVES | LEAVES | ODD))
KINDS = "Account RefreshToken AccessToken"
SECTION = st.dictionaries(st.text(max_size=2), ENTRY, max_size=3)
CACHES = trees(KINDS, leaves=LEAVES) | st.fixed_dictionaries(
    {}, optional=dict.fromkeys(KINDS.split(), SECTION)
)
MINE = {"environmentName": "AzureCloud", "tenantId": "t", "user": {"name": "me", "type": "user"}}
PROFILE = {"subscriptions": [MINE]}
PROFILES = trees("subscriptions environmentName tenantId user name type isDefault", leaves=LEAVES)


def session(kind, **fields):
    """Return what the command line keeps of a user with one token."""
    mine = {"home_account_id": "h", "environment": HOST, "realm": "t"}
    mine["target"] = "https://containerregistry.azure.net/.default"
    account = {"Account": {"1": {"home_account_id": "h", "username": "me"}}}
    return {**account, "AccessToken": {}, "RefreshToken": {}, kind: {"1": {**mine, **fields}}}


@fuzz(50)
@given(PROFILES | st.just(PROFILE), CACHES)
@example({"subscriptions": [{**MINE, "tenantId": "\ud800"}]}, {})
@example(PROFILE, session("RefreshToken", last_modification_time=math.inf, secret="s"))
@example(PROFILE, session("RefreshToken", last_modification_time="1", secret=[1]))
@example(PROFILE, session("AccessToken", expires_on=10**400, secret="s"))
@example(PROFILE, session("AccessToken", expires_on="9999999999", secret=[1]))
def test_any_session_of_azures_command_line_is_a_login_or_an_error(profile, cache):
    files = {
        f"{FOLDER}/azureProfile.json": json.dumps(profile).encode(),
        f"{FOLDER}/msal_token_cache.json": json.dumps(cache).encode(),
    }
    log_in({}, files, NOBODY, (400, {}, b"no"))
    log_in({}, files, NOBODY)


TEXTS = scraps("https:// http:// / : ? \ud800 é [", SECRET, " ", "\n", other="ab", most=5)
NAMES = (
    "AZURE_CLIENT_SECRET IDENTITY_HEADER AZURE_CLIENT_ID AZURE_TENANT_ID AZURE_CONFIG_DIR "
    "AZURE_FEDERATED_TOKEN_FILE IDENTITY_ENDPOINT AZURE_AUTHORITY_HOST"
)
SECRET_NAMES = ("AZURE_CLIENT_SECRET", "IDENTITY_HEADER")
VARIABLES = {
    name: TEXTS if name in SECRET_NAMES else TEXTS.map(lambda text: text.replace(SECRET, "a"))
    for name in NAMES.split()
}
NO_TEXT = dict.fromkeys(("AZURE_CLIENT_SECRET", "AZURE_CLIENT_ID", "AZURE_TENANT_ID"), "\ud800")


@fuzz(100)
@given(st.fixed_dictionaries({}, optional=VARIABLES), st.binary(max_size=9))
@example(NO_TEXT, b"")
def test_any_environment_of_azure_is_a_login_or_an_error(environ, token):
    log_in(environ, {environ.get("AZURE_FEDERATED_TOKEN_FILE", ""): token}, NOBODY)


BY_SECRET = {"AZURE_CLIENT_SECRET": SECRET, "AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t"}
SAID = st.sampled_from([SECRET, "AADSTS500011: no", "a.e30.c", f"a {SECRET} b\r\nc"])
REFUSALS = "error error_description message errors code access_token refresh_token"


@fuzz(100)
@given(
    st.sampled_from([200, 200, 400, 401, 403, 404, 429, 500, 503]),
    st.binary(max_size=20) | as_json(trees(REFUSALS, leaves=SAID)),
    st.text("1, GMT:", max_size=5),
    st.booleans(),
)
def test_any_answer_of_azure_is_a_login_or_an_error(status, body, after, is_late):
    answers = [GOOD, (status, {"retry-after": after}, body)]
    found = log_in(BY_SECRET, {}, *answers[0 if is_late else 1 :])
    assert found is None or found.credential.identity_token
