"""Who may do what: bearer token services and Basic."""

from __future__ import annotations

import itertools

import pytest

from conformance.images import Seed
from conformance.messages import Response
from conformance.registry import App
from conformance.tests.asking import NOWHERE, Clock, basic, bearer, refused
from conformance.tokens import BasicAuth, TokenService

TAGS = "/v2/a/b/tags/list"
START = "/v2/a/b/blobs/uploads/"
PULL = "service=registry.test&scope=repository:a/b:pull"
PUSH = "service=registry.test&scope=repository:a/b:pull,push"
ME = basic("me", "secret:1")


@pytest.fixture
def tokens(clock: Clock) -> TokenService:
    return TokenService({"me": "secret:1"}, now=clock)


@pytest.fixture
def guarded(tokens: TokenService, seed: Seed) -> App:
    app = App(auth=tokens)
    seed.image().load_into(app, "a/b", tag="v1")
    return app


def token(app: App, query: str, *headers: tuple[str, str]) -> tuple[str, str]:
    """Obtain a token; return the header that carries it."""
    return bearer(app.request("GET", f"/token?{query}", headers))


@pytest.mark.parametrize(
    ("method", "target", "scope"),
    [
        ("GET", "/v2/", None),
        ("GET", TAGS, "repository:a/b:pull"),
        ("POST", START, "repository:a/b:pull,push"),
        ("DELETE", f"{START}x", "repository:a/b:delete"),
        ("POST", f"{START}?mount={NOWHERE}&from=c", "repository:a/b:pull,push repository:c:pull"),
    ],
)
def test_a_challenge_names_realm_service_and_scope(
    guarded: App, method: str, target: str, scope: str | None
) -> None:
    answer = refused(guarded.request(method, target), 401, "UNAUTHORIZED")
    challenge = 'Bearer realm="http://registry.test/token",service="registry.test"'
    challenge += f',scope="{scope}"' if scope else ""
    assert answer.header("WWW-Authenticate") == challenge
    assert not guarded.uploads()


def test_no_damaged_byte_makes_the_token_of_another_service() -> None:
    asked = [TokenService().request("GET", "/token?service=registry.test") for _ in range(30)]
    for one, other in itertools.combinations((answer.json()["token"] for answer in asked), 2):
        if len(one) == len(other):
            assert sum(a != b for a, b in zip(one, other, strict=True)) > 1


def test_a_token_opens_what_its_scope_says(guarded: App, tokens: TokenService) -> None:
    pull = token(guarded, PULL)
    push = token(guarded, PUSH, ME)
    anonymous = token(guarded, PUSH)
    everything = token(guarded, "service=registry.test&scope=repository:a/b:*", ME)
    assert guarded.request("GET", TAGS, [pull]).status == 200
    assert guarded.request("POST", START, [push]).status == 202
    assert guarded.request("DELETE", f"{START}x", [everything]).status == 404
    for method, target, header, problem in (
        ("POST", START, pull, "insufficient_scope"),
        ("POST", START, anonymous, "insufficient_scope"),
        ("GET", "/v2/other/tags/list", pull, "insufficient_scope"),
        ("DELETE", f"{START}x", push, "insufficient_scope"),
        ("GET", "/v2/", ("Authorization", "Bearer x"), "invalid_token"),
        ("GET", "/v2/", ("Authorization", pull[1].replace("Bearer", "Basic")), "invalid_token"),
    ):
        answer = refused(guarded.request(method, target, [header]), 401, "UNAUTHORIZED")
        assert f'error="{problem}"' in answer.header("WWW-Authenticate")
    assert tokens.requests == guarded.journal.count(kind="token") == len(tokens.issued) == 4
    guarded.journal.check()


@pytest.mark.parametrize("one_scope", [False, True])
@pytest.mark.parametrize("form", ["scope={0}&scope={1}", "scope={0}%20{1}"])
def test_several_scopes_are_one_token(
    guarded: App, tokens: TokenService, one_scope: bool, form: str
) -> None:
    tokens.one_scope = one_scope
    query = form.format("repository:a/b:pull", "repository:c/d:pull")
    header = token(guarded, f"service=registry.test&{query}")
    assert guarded.request("GET", TAGS, [header]).status == 200
    expected = 401 if one_scope and "&scope" in form else 404
    assert guarded.request("GET", "/v2/c/d/tags/list", [header]).status == expected


def test_tokens_end(guarded: App, tokens: TokenService, clock: Clock) -> None:
    tokens.expires_in = 60
    header = token(guarded, PULL)
    for seconds, status in ((59.9, 200), (0.1, 401)):
        clock.now += seconds
        assert guarded.request("GET", TAGS, [header]).status == status

    tokens.expires_in = None
    tokens.lifetime = 10.0
    answer = guarded.request("GET", f"/token?{PULL}")
    assert "expires_in" not in answer.json()
    clock.now += 10
    assert guarded.request("GET", TAGS, [bearer(answer)]).status == 401

    tokens.uses = 1
    header = token(guarded, PULL)
    assert [guarded.request("GET", TAGS, [header]).status for _ in range(2)] == [200, 401]
    header = token(guarded, PULL)
    tokens.revoke()
    assert guarded.request("GET", TAGS, [header]).status == 401


def test_wrong_credentials_get_no_token(guarded: App, tokens: TokenService) -> None:
    def ask(*headers: tuple[str, str]) -> Response:
        return guarded.request("GET", f"/token?{PULL}", headers)

    for login in (basic("me", "secret"), basic("you", "secret:1"), ("Authorization", "Basic !")):
        refused(ask(login), 401, "UNAUTHORIZED")
    tokens.anonymous = False
    refused(ask(), 401, "UNAUTHORIZED")
    assert tokens.issued == []


FORM = ("Content-Type", "application/x-www-form-urlencoded")
GRANT = "service=registry.test&client_id=x&scope=repository:a/b:pull+repository:c/d:pull"


def test_post_gives_a_token_for_a_refresh_token_or_a_password(
    guarded: App, tokens: TokenService
) -> None:
    def ask(grant: str) -> Response:
        return guarded.request("POST", "/token", [FORM], f"{GRANT}&{grant}".encode())

    offline = f"/token?{PULL}&offline_token=true"
    assert "refresh_token" not in guarded.request("GET", offline).json()
    refresh = guarded.request("GET", offline, [ME]).json()["refresh_token"]
    for grant in (
        f"grant_type=refresh_token&refresh_token={refresh}",
        "grant_type=password&username=me&password=secret:1",
    ):
        header = bearer(ask(grant))
        assert guarded.request("GET", TAGS, [header]).status == 200
        assert guarded.request("GET", "/v2/c/d/tags/list", [header]).status == 404
    for grant in (
        "grant_type=refresh_token&refresh_token=x",
        "grant_type=refresh_token",
        "grant_type=password&username=me&password=x",
        "grant_type=password&username=x",
    ):
        refused(ask(grant), 401, "UNAUTHORIZED")
    guarded.journal.check()
    tokens.journal.check()


@pytest.mark.parametrize(
    ("method", "query", "headers", "body"),
    [
        ("GET", "scope=repository:a/b:pull", [], ""),
        ("GET", "service=other&scope=repository:a/b:pull", [], ""),
        ("GET", "service=registry.test&scope=a/b", [], ""),
        ("POST", "", [], f"{GRANT}&grant_type=password"),
        ("POST", "", [FORM], GRANT),
        ("POST", "", [FORM], f"{GRANT}&grant_type=magic"),
        ("POST", "", [FORM], f"{GRANT}&grant_type=password&grant_type=password"),
        ("POST", "", [FORM], "grant_type=password&client_id=x"),
        ("POST", "", [FORM], "grant_type=password&service=registry.test"),
    ],
)
def test_malformed_token_requests_are_refused_and_noted(
    guarded: App,
    tokens: TokenService,
    method: str,
    query: str,
    headers: list[tuple[str, str]],
    body: str,
) -> None:
    answer = guarded.request(method, f"/token?{query}", headers, body.encode() or None)
    refused(answer, 400, "UNSUPPORTED")
    assert tokens.journal.violations
    assert tokens.issued == []


def test_the_token_service_can_live_elsewhere(seed: Seed) -> None:
    service = TokenService(path="/auth", realm="https://there.test/auth")
    app = App(auth=service)
    seed.image().load_into(app, "a/b", tag="v1")
    challenge = app.request("GET", "/v2/").header("WWW-Authenticate")
    assert 'realm="https://there.test/auth"' in challenge
    header = bearer(service.request("GET", f"/auth?{PULL}"))
    assert app.request("GET", TAGS, [header]).status == 200
    assert service.journal.summary() == {"GET token": 1}
    refused(app.request("GET", "/auth"), 404, "UNSUPPORTED")
    refused(service.request("GET", "/other"), 404, "UNSUPPORTED")
    refused(service.request("PUT", "/auth"), 405, "UNSUPPORTED")


def test_basic_is_asked_for_on_every_request(seed: Seed) -> None:
    auth = BasicAuth({"me": "secret:1"})
    app = App(auth=auth)
    seed.image().load_into(app, "a/b", tag="v1")
    answer = refused(app.request("GET", "/v2/"), 401, "UNAUTHORIZED")
    assert answer.header("WWW-Authenticate") == 'Basic realm="registry"'
    bearing = (ME[0], ME[1].replace("Basic", "Bearer"))
    for header, status in (
        (ME, 200),
        (basic("me", "secret"), 401),
        (basic("you", "secret:1"), 401),
        (bearing, 401),
    ):
        assert app.request("GET", TAGS, [header]).status == status
    auth.anonymous_pull = True
    assert app.request("GET", TAGS).status == 200
    assert app.request("GET", "/v2/").status == 401
    assert app.request("POST", START).status == 401
