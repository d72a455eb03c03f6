"""Who may do what: bearer token services and Basic."""

from __future__ import annotations

import base64
import http.client
import itertools
import json

import pytest

from conformance.http import Site, run_in_thread
from conformance.images import Seed
from conformance.messages import Response
from conformance.registry import App
from conformance.tests.asking import NOWHERE, refused
from conformance.tokens import BasicAuth, TokenService
from conformance.walks import fetch_http, identical


def ask_token(app: Site, query: str, secret: str | None = None, path: str = "/token") -> Response:
    headers = (
        [("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())] if secret else []
    )
    return app.request("GET", f"{path}?{query}", headers)


def bearer(app: Site, query: str, secret: str | None = None) -> list[tuple[str, str]]:
    """Obtain a token; return the header that carries it."""
    answer = ask_token(app, query, secret)
    assert answer.status == 200
    return [("Authorization", f"Bearer {answer.json()['token']}")]


PULL = "service=registry.test&scope=repository:a/b:pull"
PUSH = "service=registry.test&scope=repository:a/b:pull,push"


@pytest.fixture
def tokens() -> TokenService:
    return TokenService({"me": "secret:1"})


@pytest.fixture
def guarded(tokens: TokenService, seed: Seed) -> App:
    app = App(auth=tokens)
    seed.image().load_into(app, "a/b", tag="v1")
    return app


def test_a_challenge_names_realm_service_and_scope(guarded: App) -> None:
    answer = refused(guarded.request("GET", "/v2/a/b/tags/list"), 401, "UNAUTHORIZED")
    assert answer.header("WWW-Authenticate") == (
        'Bearer realm="http://registry.test/token",service="registry.test",scope="repository:a/b:pull"'
    )
    for method, target, scope in (
        ("GET", "/v2/", ""),
        ("POST", "/v2/a/b/blobs/uploads/", "repository:a/b:pull,push"),
        ("DELETE", "/v2/a/b/blobs/uploads/x", "repository:a/b:delete"),
        (
            "POST",
            f"/v2/a/b/blobs/uploads/?mount={NOWHERE}&from=c",
            "repository:a/b:pull,push repository:c:pull",
        ),
    ):
        said = guarded.request(method, target).header("WWW-Authenticate")
        assert said.partition("scope=")[2] == (f'"{scope}"' if scope else "")
    assert "a/b" in guarded.repositories
    assert not guarded.uploads()


def test_no_damaged_byte_makes_the_token_of_another_service() -> None:
    asked = [TokenService().request("GET", "/token?service=registry.test") for _ in range(30)]
    tokens = [answer.json()["token"] for answer in asked]
    for one, other in itertools.combinations(tokens, 2):
        if len(one) == len(other):
            assert sum(a != b for a, b in zip(one, other, strict=True)) > 1


def test_a_token_opens_what_its_scope_says(guarded: App, tokens: TokenService) -> None:
    pull = bearer(guarded, PULL)
    push = bearer(guarded, PUSH, "me:secret:1")
    assert pull[0][1].startswith("Bearer token-1.")
    assert guarded.request("GET", "/v2/", pull).status == 200
    assert guarded.request("GET", "/v2/a/b/tags/list", pull).status == 200
    assert guarded.request("POST", "/v2/a/b/blobs/uploads/", push).status == 202
    for target, method in (("/v2/a/b/blobs/uploads/", "POST"), ("/v2/other/tags/list", "GET")):
        answer = refused(guarded.request(method, target, pull), 401, "UNAUTHORIZED")
        assert 'error="insufficient_scope"' in answer.header("WWW-Authenticate")
    refused(guarded.request("DELETE", "/v2/a/b/blobs/uploads/x", push), 401, "UNAUTHORIZED")
    answer = refused(
        guarded.request("GET", "/v2/", [("Authorization", "Bearer x")]), 401, "UNAUTHORIZED"
    )
    assert 'error="invalid_token"' in answer.header("WWW-Authenticate")
    value = pull[0][1].removeprefix("Bearer ")
    refused(
        guarded.request("GET", "/v2/", [("Authorization", f"Basic {value}")]), 401, "UNAUTHORIZED"
    )
    assert tokens.requests == guarded.journal.count(kind="token") == 2
    assert tokens.issued == ["repository:a/b:pull", "repository:a/b:pull,push"]
    guarded.journal.check()


def test_grants_are_the_intersection_of_what_is_asked_and_allowed(guarded: App) -> None:
    anonymous = bearer(guarded, PUSH)
    assert guarded.request("GET", "/v2/a/b/tags/list", anonymous).status == 200
    refused(guarded.request("POST", "/v2/a/b/blobs/uploads/", anonymous), 401, "UNAUTHORIZED")
    everything = bearer(guarded, "service=registry.test&scope=repository:a/b:*", "me:secret:1")
    assert guarded.request("DELETE", "/v2/a/b/blobs/uploads/x", everything).status == 404


@pytest.mark.parametrize("one_scope", [False, True])
@pytest.mark.parametrize(
    "form", ["scope={0}&scope={1}", "scope={0}%20{1}"], ids=["repeated", "one parameter"]
)
def test_several_scopes_are_one_token(
    guarded: App, tokens: TokenService, one_scope: bool, form: str
) -> None:
    tokens.one_scope = one_scope
    query = form.format("repository:a/b:pull", "repository:c/d:pull")
    header = bearer(guarded, f"service=registry.test&{query}")
    assert guarded.request("GET", "/v2/a/b/tags/list", header).status == 200
    expected = 401 if one_scope and "&scope" in form else 404
    assert guarded.request("GET", "/v2/c/d/tags/list", header).status == expected


def test_tokens_end(guarded: App, tokens: TokenService) -> None:
    clock = [0.0]
    tokens.now = lambda: clock[0]
    tokens.expires_in = 60
    header = bearer(guarded, PULL)
    for now, status in ((59.9, 200), (60.0, 401)):
        clock[0] = now
        assert guarded.request("GET", "/v2/a/b/tags/list", header).status == status
    tokens.expires_in = None
    tokens.lifetime = 10.0
    assert "expires_in" not in ask_token(guarded, PULL).json()
    header = bearer(guarded, PULL)
    clock[0] = 70.0
    assert guarded.request("GET", "/v2/", header).status == 401
    header = bearer(guarded, PULL)
    tokens.revoke()
    assert guarded.request("GET", "/v2/", header).status == 401


def test_wrong_credentials_get_no_token(guarded: App, tokens: TokenService) -> None:
    for secret in ("me:secret", "you:secret:1", "me"):
        refused(ask_token(guarded, PULL, secret), 401, "UNAUTHORIZED")
    junk = guarded.request("GET", f"/token?{PULL}", [("Authorization", "Basic !")])
    refused(junk, 401, "UNAUTHORIZED")
    tokens.anonymous = False
    refused(ask_token(guarded, PULL), 401, "UNAUTHORIZED")
    assert tokens.issued == []


@pytest.mark.parametrize(
    "query",
    [
        "scope=repository:a/b:pull",
        "service=other&scope=repository:a/b:pull",
        "service=registry.test&scope=a/b",
    ],
    ids=["no service", "another service", "malformed scope"],
)
def test_malformed_token_requests_are_refused_and_noted(
    guarded: App, tokens: TokenService, query: str
) -> None:
    refused(ask_token(guarded, query), 400, "UNSUPPORTED")
    assert tokens.journal.violations
    assert tokens.issued == []


FORM = [("Content-Type", "application/x-www-form-urlencoded")]
GRANT = "service=registry.test&client_id=x&scope=repository:a/b:pull+repository:c/d:pull"


def test_post_gives_a_token_for_a_refresh_token_or_a_password(
    guarded: App, tokens: TokenService
) -> None:
    offline = ask_token(guarded, f"{PULL}&offline_token=true", "me:secret:1").json()[
        "refresh_token"
    ]
    assert "refresh_token" not in ask_token(guarded, f"{PULL}&offline_token=true").json()
    for grant in (
        f"grant_type=refresh_token&refresh_token={offline}",
        "grant_type=password&username=me&password=secret:1",
    ):
        answer = guarded.request("POST", "/token", FORM, f"{GRANT}&{grant}".encode())
        header = [("Authorization", f"Bearer {answer.json()['token']}")]
        assert guarded.request("GET", "/v2/a/b/tags/list", header).status == 200
        assert guarded.request("GET", "/v2/c/d/tags/list", header).status == 404
    for grant in (
        "grant_type=refresh_token&refresh_token=x",
        "grant_type=refresh_token",
        "grant_type=password&username=me&password=x",
        "grant_type=password&username=x",
    ):
        refused(
            guarded.request("POST", "/token", FORM, f"{GRANT}&{grant}".encode()),
            401,
            "UNAUTHORIZED",
        )
    guarded.journal.check()
    tokens.journal.check()


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        pytest.param([], f"{GRANT}&grant_type=password", id="no form"),
        pytest.param(FORM, GRANT, id="no grant"),
        pytest.param(FORM, f"{GRANT}&grant_type=magic", id="unknown grant"),
        pytest.param(FORM, "grant_type=password&client_id=x", id="no service"),
        pytest.param(FORM, "grant_type=password&service=registry.test", id="no client"),
    ],
)
def test_malformed_grants_are_refused_and_noted(
    guarded: App, tokens: TokenService, headers: list[tuple[str, str]], body: str
) -> None:
    refused(guarded.request("POST", "/token", headers, body.encode()), 400, "UNSUPPORTED")
    assert tokens.journal.violations


def test_tokens_are_given_to_get_and_post_only(guarded: App) -> None:
    refused(guarded.request("PUT", "/token", FORM, GRANT.encode()), 405, "UNSUPPORTED")


def test_the_token_service_can_live_elsewhere(seed: Seed) -> None:
    service = TokenService(path="/auth")
    app = App(auth=service)
    image = seed.image().load_into(app, "a/b", tag="v1")
    with run_in_thread(service) as there, run_in_thread(app) as here:
        service.realm = f"{there.url}/auth"
        assert f'realm="{there.url}/auth"' in app.request("GET", "/v2/").header("WWW-Authenticate")
        connection = http.client.HTTPConnection(there.address, timeout=10)
        connection.request("GET", f"/auth?{PULL}")
        token = json.loads(connection.getresponse().read())["token"]
        connection.close()
        got = fetch_http(here.address, "a/b", "v1", authorization=f"Bearer {token}")
    assert identical(got, image.contents())
    assert service.journal.summary() == {"GET token": 1}
    refused(app.request("GET", "/auth"), 404, "UNSUPPORTED")
    refused(service.request("GET", "/other"), 404, "UNSUPPORTED")


def test_basic_is_asked_for_on_every_request(seed: Seed) -> None:
    auth = BasicAuth({"me": "secret:1"})
    app = App(auth=auth)
    seed.image().load_into(app, "a/b", tag="v1")
    answer = refused(app.request("GET", "/v2/"), 401, "UNAUTHORIZED")
    assert answer.header("WWW-Authenticate") == 'Basic realm="registry"'
    for secret, status in (("me:secret:1", 200), ("me:secret", 401), ("you:secret:1", 401)):
        header = [("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())]
        assert app.request("GET", "/v2/a/b/tags/list", header).status == status
    other = [("Authorization", "Bearer " + base64.b64encode(b"me:secret:1").decode())]
    assert app.request("GET", "/v2/", other).status == 401
    auth.anonymous_pull = True
    assert app.request("GET", "/v2/a/b/tags/list").status == 200
    assert app.request("GET", "/v2/").status == 401
    assert app.request("POST", "/v2/a/b/blobs/uploads/").status == 401
