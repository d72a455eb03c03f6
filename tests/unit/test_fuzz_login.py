"""Credential files, tokens and realms: any bytes give a credential, none, or one AuthError,
and what is found is right."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.addresses import Origin
from _regsync.auth.cloud import Answer
from _regsync.auth.credentials import Credential, Pair, find_credential
from _regsync.auth.tokens import NEEDED, Authenticator
from _regsync.config import Config, registry_for
from _regsync.errors import AuthError, SyncError
from tests.fuzzing import fuzz, in_virtual_time, scraps, trees

SECRET = "Xyzzy-0pen-Sesame"
PLACE = "/home/u/.docker/config.json"


def find(
    text: bytes | None, host: str = "registry.test", repository: str | None = None, **env: str
) -> Credential | None:
    def read(path: str) -> bytes | None:
        return text if path == PLACE else None

    return find_credential(registry_for(host, Config({}, ())), env, "/home/u", read, repository)


def pair(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode("utf-8", "surrogatepass")).decode()


ENTRIES = st.one_of(
    st.builds(
        lambda *parts: {"auth": pair(*parts)},
        scraps("u : \x00", other="é"),
        scraps(": \x00", SECRET, "\n"),
    ),
    st.builds(
        lambda keys, values: dict(zip(keys, values, strict=False)),
        st.permutations(["username", "password", "identitytoken", "registrytoken", "auth"]),
        st.lists(
            st.sampled_from(["u", SECRET, "\ud800", "<token>", "", None, 5, "é", "a b\r\nX: y"]),
            max_size=5,
        ),
    ),
    st.sampled_from(
        [{}, None, [], "x", {"auth": "===="}, {"auth": "é"}, {"auth": 5}, {"auth": "dTpw\n"}]
    ),
)
KEYS = st.sampled_from([
    "registry.test", "https://registry.test", "https://registry.test/v1/", "registry.test/team",
    "registry.test/team/app",
    "registry.test:443", "REGISTRY.TEST", "evil.registry.test", "registry.test.evil", "xregistry.test", "",
])  # fmt: skip
FILES = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "auths": st.dictionaries(KEYS, ENTRIES, max_size=4) | trees("registry.test"),
            "credHelpers": st.dictionaries(
                KEYS, st.sampled_from(["ecr-login", "", None, 5, "x" * 99]), max_size=2
            ),
            "credsStore": st.sampled_from(["desktop", "", None, [], {"a": 1}]),
        },
    ),
    trees("auths credHelpers credsStore registry.test auth"),
).map(lambda document: json.dumps(document).encode())


@fuzz(100)
@given(
    FILES | st.sampled_from([b"\xff", b"", b"[" * 5_000, b'{"auths":' * 9, b"\xef\xbb\xbf{}"]),
    st.booleans(),
)
@example(
    json.dumps({"auths": {"registry.test": {"username": "\ud800", "password": "x"}}}).encode(),
    False,
)
@example(json.dumps({"auths": {"registry.test": {"identitytoken": "\ud800"}}}).encode(), False)
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
    mine = ["registry.test/team/app", "registry.test/team", "registry.test", "registry.test:443"]
    mine += [key for key in numbers if key.lower().startswith("https://registry.test")]
    mine += [key for key in numbers if key == "REGISTRY.TEST"]
    first = next((key for key in mine[:4] if key in numbers), None)
    if first is not None:
        assert found is not None
        assert found.username == f"user{numbers[first]}"
    elif found is not None:
        assert found.username in {f"user{numbers[key]}" for key in mine if key in numbers}
    else:
        assert not {key for key in numbers if key.startswith("https://registry.test")}


def test_what_is_no_text_in_the_environment_is_sent_or_refused():
    """What is no UTF-8 is half characters in `os.environ`."""
    with pytest.raises(AuthError, match="DOCKER_AUTH_CONFIG is not"):
        find(None, DOCKER_AUTH_CONFIG="\udcff")
    for env in ({"GITHUB_TOKEN": "\udcff"}, {"GITHUB_TOKEN": "x", "GITHUB_ACTOR": "\udcff"}):
        found = find(None, "ghcr.io", **env)
        assert found is not None
        assert (found.basic or "").startswith("Basic ")


# Tokens.

TOKENS = st.one_of(
    st.sampled_from(
        [
            "abc",
            SECRET,
            "",
            "a b",
            "é",
            "a\r\nb",
            "a.e30.c",
            "a..c",
            "a.eyJleHAiOiAiSW5maW5pdHkifQ.c",
            "a.W10.c",
        ]
    ),
    st.binary(max_size=20).map(
        lambda claims: f"a.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.c"
    ),
    trees("exp iat", leaves=st.sampled_from([1e9, 10**400, "9", -1])).map(
        lambda claims: (
            f"a.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.c"
        )
    ),
)
LIVES = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.sampled_from(["300", "x", True, [], 10**400, "nan", "1e999", -1]),
)
ANSWERS = st.tuples(
    st.sampled_from([200, 200, 200, 204, 301, 400, 401, 403, 404, 429, 500]),
    st.dictionaries(st.just("retry-after"), st.sampled_from(["1", "x", "9" * 30]), max_size=1),
    st.one_of(
        st.builds(lambda token, life: {"token": token, "expires_in": life}, TOKENS, LIVES),
        st.builds(
            lambda token, more: {"access_token": token, "refresh_token": more, "errors": []},
            TOKENS,
            LIVES,
        ),
        st.builds(
            lambda text: {"errors": [{"code": text, "message": text}], "details": text},
            TOKENS | LIVES,
        ),
        trees("token access_token expires_in refresh_token errors message error"),
    ).map(lambda document: json.dumps(document).encode())
    | st.sampled_from([b"", b"[" * 5_000, b"\xff", b"null", b"1" * 5000]),
)


@fuzz(100)
@given(
    st.lists(ANSWERS, max_size=5),
    st.lists(scraps(', scope=" repository:app:pull " aws error="insufficient_scope" '
'error="invalid_token"', 'Bearer realm="https://registry.test/t"', "Basic x=y", most=5), min_size=1, max_size=3),
    st.sampled_from([None, Credential("u", SECRET), Credential(identity_token=SECRET), Credential("\ud800", "\ud800",
    "\ud800"), Credential("<token>", "",
    SECRET)]),
)  # fmt: skip
def test_any_token_answers_give_a_header_or_one_error(answers, challenges, credential):
    asked: list[str] = []
    waiting = iter(answers)

    async def fetch(method: str, url: str, headers: list[Pair], body: bytes, **_: object) -> Answer:
        asked.append(urlsplit(url).netloc)
        return Answer(*next(waiting, (404, {}, b"")))

    async def work() -> None:
        now, shown = 0.0, list[str]()
        login = Authenticator(
            origin=Origin("https", "registry.test", 443),
            credential=credential,
            fetch=fetch,
            now=lambda: now,
            wall=lambda: now,
        )
        login.plan_scope("other", "pull")
        used, needed = None, frozenset({("app", "pull")})
        for challenge in challenges:
            headers = SimpleNamespace(all=lambda _, challenge=challenge: [challenge])
            refusal: Any = SimpleNamespace(status=401, headers=headers, body=b"")
            try:
                if login.refused(refusal, used, needed, "GET", []):
                    while (used := login.header(needed, now, for_body=True)) is NEEDED:
                        await login.obtain(needed, for_body=True)
            except SyncError as error:
                shown.append(str(error))
                continue
            assert used is None or (used.isascii() and used.isprintable())
            now += 100.0
        assert "\n" not in "".join(shown)
        assert credential is None or SECRET not in "".join(shown)
        assert set(asked) <= {"registry.test"}
        assert len(asked) <= 8 * len(challenges)
        later = Authenticator(
            origin=Origin("https", "registry.test", 443),
            credential=None,
            fetch=fetch,
            now=lambda: now,
            wall=lambda: now,
        )
        later.restore(json.loads(json.dumps(login.login_facts)))
        assert later.login_facts == login.login_facts

    in_virtual_time(work)
