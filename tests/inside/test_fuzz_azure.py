"""Azure's files, variables and servers: whatever they hold gives a login or one error, which shows
no secret.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.auth import azure
from _regsync.auth.azure import is_configured
from _regsync.auth.cloud import Answer, CloudEnvironment, Login
from _regsync.config import Registry
from _regsync.errors import AuthError
from tests.fuzzing import fuzz, in_virtual_time, scraps, trees

SECRET = "Xyzzy-0pen+Sesame"
PLACE = "/home/u/.azure"
# What the directory gives may be repeated by the registry, as what we gave by the directory.
GOOD = (200, dict[str, str](), json.dumps({"access_token": SECRET, "refresh_token": "r"}).encode())


def log_in(
    environ: Mapping[str, str],
    files: Mapping[str, bytes],
    *answers: tuple[int, dict[str, str], bytes],
) -> Login | None:
    """Log in; return None after an error that may be shown."""
    left = list(answers)

    async def fetch(
        method: str, url: str, headers: Any, body: bytes, seconds: float | None = None
    ) -> Any:
        # What is no URL is refused by what asks (`resolve_location`), not here.
        return Answer(*(left.pop(0) if left else GOOD))

    machine = CloudEnvironment(environ, "/home/u", files.get, lambda: 1000.0, fetch)
    is_configured(machine)
    found: list[Login] = []

    async def ask() -> None:
        registry = Registry("a", "https", "a.azurecr.io", 443, "acr")
        try:
            login = await azure.log_in(machine, registry, probing_metadata=False)
        except AuthError as error:
            shown = f"{error.message} {error.hint}"
            assert SECRET not in shown
            assert len(shown) < 1200
            assert not any(letter in shown for letter in "\r\n\x1b")
        else:
            assert login is not None
            found.append(login)

    in_virtual_time(ask)
    return found[0] if found else None


NOBODY = (404, dict[str, str](), b"")
LEAVES = st.sampled_from(
    [SECRET, "AzureCloud", "me", "user", "h", "login.microsoftonline.com", "9999999999", "1"]
)
PROFILE = trees("subscriptions environmentName tenantId user name type isDefault", leaves=LEAVES)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(LEAVES, LEAVES, st.none(), st.just("\ud800"), st.integers())
        for name in ("secret", "home_account_id", "environment", "username", "realm", "target", "expires_on",
            "last_modification_time")
    },
)  # fmt: skip
KINDS = "Account RefreshToken AccessToken"
ENTRIES = st.dictionaries(st.text(max_size=2), ENTRY, max_size=3)
CACHE = st.one_of(
    trees(KINDS, leaves=LEAVES),
    st.fixed_dictionaries({}, optional=dict.fromkeys(KINDS.split(), ENTRIES)),
)


def session(**tokens: dict[str, object]) -> dict[str, object]:
    """What the command line keeps of a user with these tokens."""
    both = {"home_account_id": "h", "environment": "login.microsoftonline.com", "realm": "t"}
    both["target"] = "https://containerregistry.azure.net/.default"
    account = {
        "Account": {"1": {"home_account_id": "h", "username": "me"}},
        "AccessToken": {},
        "RefreshToken": {},
    }
    return {**account, **{kind: {"1": {**both, **fields}} for kind, fields in tokens.items()}}


SUBSCRIPTION = {
    "environmentName": "AzureCloud",
    "tenantId": "t",
    "user": {"name": "me", "type": "user"},
}


@fuzz(50)
@given(PROFILE | st.just({"subscriptions": [SUBSCRIPTION]}), CACHE)
@example({"subscriptions": [{**SUBSCRIPTION, "tenantId": "\ud800"}]}, {})
@example(
    {"subscriptions": [SUBSCRIPTION]},
    session(RefreshToken={"last_modification_time": math.inf, "secret": "s"}),
)
@example(
    {"subscriptions": [SUBSCRIPTION]},
    session(RefreshToken={"last_modification_time": "1", "secret": [1]}),
)
@example(
    {"subscriptions": [SUBSCRIPTION]}, session(AccessToken={"expires_on": 10**400, "secret": "s"})
)
@example(
    {"subscriptions": [SUBSCRIPTION]},
    session(AccessToken={"expires_on": "9999999999", "secret": [1]}),
)
def test_any_session_of_the_command_line_is_a_login_or_an_error(profile, cache):
    files = {
        f"{PLACE}/azureProfile.json": json.dumps(profile).encode(),
        f"{PLACE}/msal_token_cache.json": json.dumps(cache).encode(),
    }
    log_in({}, files, NOBODY, (400, {}, b"no"))
    log_in({}, files, NOBODY)


PLACES = scraps("https:// http:// / : ? \ud800 é [", " ", "\n", other="ab", most=5)
PROOFS = scraps("\ud800 é", SECRET, " ", "\n", other="ab", most=5)
VARIABLES = {
    **dict.fromkeys(("AZURE_CLIENT_SECRET", "IDENTITY_HEADER"), PROOFS),
    **dict.fromkeys(
        ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE", "IDENTITY_ENDPOINT"),
        PLACES,
    ),
    **dict.fromkeys(("AZURE_CONFIG_DIR", "AZURE_AUTHORITY_HOST"), PLACES),
}


@fuzz(100)
@given(st.fixed_dictionaries({}, optional=VARIABLES), st.binary(max_size=9))
@example(
    {"AZURE_CLIENT_SECRET": "\ud800", "AZURE_CLIENT_ID": "\ud800", "AZURE_TENANT_ID": "\ud800"}, b""
)
def test_any_environment_is_a_login_or_an_error(environ, token):
    log_in(environ, {environ.get("AZURE_FEDERATED_TOKEN_FILE", ""): token}, NOBODY)


NAMED = {"AZURE_CLIENT_SECRET": SECRET, "AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t"}
BODIES = st.one_of(
    st.binary(max_size=20),
    trees(
        "error error_description message errors code access_token refresh_token",
        leaves=st.sampled_from([SECRET, "AADSTS500011: no", "a.e30.c", f"a {SECRET} b\r\nc"]),
    ).map(lambda document: json.dumps(document).encode()),
)


@fuzz(100)
@given(
    st.sampled_from([200, 200, 400, 401, 403, 404, 429, 500, 503]),
    BODIES,
    st.text("1, GMT:", max_size=5),
    st.booleans(),
)
def test_any_answer_is_a_login_or_an_error(status, body, after, late):
    answers = [GOOD, (status, {"retry-after": after}, body)]
    found = log_in(NAMED, {}, *answers[0 if late else 1 :])
    assert found is None or found.credential.identity_token
