"""Tokens, from a token service made of one function; every request is counted."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import anyio
import pytest

from _regsync.addresses import Origin
from _regsync.auth.challenge import Challenge
from _regsync.auth.cloud import Answer
from _regsync.auth.credentials import Credential
from _regsync.auth.tokens import Authenticator, Refusal, may_repeat_after
from _regsync.errors import AuthError, ConnectFailed, RegistryError, Side, SyncError

pytestmark = pytest.mark.anyio

REALM = "https://auth.example.org/token"
BEARER = f'Bearer realm="{REALM}",service="registry.example.org",scope="repository:team/app:pull"'
USER = Credential("someone", "hunter2", found_at="credentials of registry 'mine'")
BASIC = "Basic " + base64.b64encode(b"someone:hunter2").decode()


class Tokens:
    """A token service: answers `answer`, in turn when it is a list, else `t1`, `t2`, ... for five
    minutes.
    """

    def __init__(self, *answers: Answer | SyncError, expires_in: int | None = 300) -> None:
        self.answers = list(answers)
        self.expires_in = expires_in
        self.asked: list[tuple[str, str, list[tuple[str, str]], bytes]] = []
        self.open = anyio.Event()
        self.open.set()

    async def fetch(
        self,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: bytes,
        seconds: float | None = None,
        check_may_send: Callable[[], None] | None = None,
    ) -> Answer:
        self.asked.append((method, url, headers, body))
        number = len(self.asked)
        await self.open.wait()
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, SyncError):
                raise answer
            return answer
        document: dict[str, Any] = {"token": f"t{number}"}
        if self.expires_in is not None:
            document["expires_in"] = self.expires_in
        return Answer(200, {}, json.dumps(document).encode())

    def scopes(self) -> list[list[str]]:
        """The scopes of each request, without `repository:`."""
        return [
            [
                scope.removeprefix("repository:")
                for scope in parse_qs(urlsplit(url).query).get("scope", [])
            ]
            for _, url, _, _ in self.asked
        ]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def login(
    tokens: Tokens,
    credential: Credential | None = None,
    *,
    clock: Clock | None = None,
    **fields: Any,
) -> Authenticator:
    origin = Origin(**{"scheme": "https", "host": "registry.example.org", "port": 443, **fields})
    now = clock or Clock()
    return Authenticator(
        origin=origin,
        credential=credential,
        fetch=tokens.fetch,
        now=now,
        wall=lambda: 1_700_000_000.0,
    )


async def challenged(
    tokens: Tokens, credential: Credential | None = None, challenge: str = BEARER, **fields: Any
) -> Authenticator:
    """An authenticator that has been told the way by a first, bare request for team/app."""
    at = login(tokens, credential, **fields)
    assert await at.on_unauthorized([challenge], None, "team/app", "pull")
    return at


async def test_only_what_can_be_sent_is_offered_unasked() -> None:
    assert not await login(Tokens()).log_in_unasked([BEARER], "team/app", "pull")
    nameless = login(Tokens(), Credential(identity_token="secret"))
    assert not await nameless.log_in_unasked([], "team/app", "pull")
    assert await nameless.log_in_unasked([BEARER], "team/app", "pull")


def answer(status: int = 200, document: object = None, **headers: str) -> Answer:
    lowered = {name.replace("_", "-"): value for name, value in headers.items()}
    body = b"" if document is None else json.dumps(document).encode()
    return Answer(status, lowered, body)


def jwt(**claims: object) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"aaa.{payload}.bbb"


# What is sent.


async def test_the_first_request_goes_bare() -> None:
    tokens = Tokens()
    assert await login(tokens, USER).authorization("team/app", "pull") is None
    assert tokens.asked == []


async def test_a_token_is_asked_for_with_the_challenges_words() -> None:
    tokens = Tokens()
    challenge = 'Bearer realm="https://registry.example.org/t?tenant=a%20b",service="the service"'
    at = await challenged(tokens, USER, challenge)
    assert (
        await at.authorization("team/app", "pull,push", also=[("other/app", "pull")]) == "Bearer t1"
    )
    method, url, headers, body = tokens.asked[0]
    assert (method, body) == ("GET", b"")
    assert url.startswith("https://registry.example.org/t?")
    assert parse_qsl(urlsplit(url).query) == [
        ("tenant", "a b"),
        ("service", "the service"),
        ("scope", "repository:team/app:pull,push"),
        ("scope", "repository:other/app:pull"),
        ("account", "someone"),
    ]
    assert headers == [("Authorization", BASIC)]


async def test_an_anonymous_token_carries_no_login() -> None:
    tokens = Tokens()
    at = await challenged(tokens)
    assert await at.authorization("team/app", "pull") == "Bearer t1"
    assert tokens.asked[0][2] == []
    assert "account" not in tokens.asked[0][1]


@pytest.mark.rule("R2")
async def test_no_secret_moves_when_the_realm_is_refused() -> None:
    tokens = Tokens()
    at = login(tokens, USER)
    with pytest.raises(AuthError, match="another owner"):
        await at.on_unauthorized(
            ['Bearer realm="https://evil.test/token"'], None, "team/app", "pull"
        )
    assert await at.authorization("team/app", "pull") is None
    assert tokens.asked == []


async def test_basic_is_sent_after_the_challenge_on_every_request() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER, 'Basic realm="here"', scheme="http")
    assert await at.authorization("team/app", "pull") == BASIC
    assert await at.authorization("team/other", "pull") == BASIC
    assert tokens.asked == []


@pytest.mark.parametrize(
    ("credential", "used", "complaint", "fatal"),
    [
        (None, None, "none are", False),
        (USER, BASIC, "credentials (credentials of registry 'mine')", True),
        (Credential(identity_token="hunter2", found_at="a file"), None, "a file has none", True),
    ],
)
async def test_a_basic_challenge_that_cannot_be_met_says_why(
    credential: Credential | None, used: str | None, complaint: str, fatal: bool
) -> None:
    with pytest.raises(AuthError) as caught:
        await login(Tokens(), credential).on_unauthorized(
            ['Basic realm="here"'], used, "team/app", "pull"
        )
    assert complaint in caught.value.message
    assert caught.value.fatal is fatal
    assert "hunter2" not in f"{caught.value!r}{caught.value.hint}"


async def test_unknown_schemes_are_named_and_no_challenge_is_no_way_in() -> None:
    at = login(Tokens(), USER)
    with pytest.raises(AuthError, match="negotiate, ntlm"):
        await at.on_unauthorized(["Negotiate", "NTLM"], None, "team/app", "pull")
    assert not await at.on_unauthorized([], None, "team/app", "pull")


async def test_a_static_token_is_sent_at_once_over_https_and_never_exchanged() -> None:
    tokens = Tokens()
    held = Credential(registry_token="hunter2", found_at="token of registry 'mine'")
    assert await login(tokens, held).authorization("team/app", "pull") == "Bearer hunter2"
    over_http = login(tokens, held, scheme="http")
    assert await over_http.authorization("team/app", "pull") is None
    assert await over_http.on_unauthorized([BEARER], None, "team/app", "pull")
    assert await over_http.authorization("team/app", "pull") == "Bearer hunter2"
    with pytest.raises(AuthError, match=r"refused .*\(token of registry 'mine'\)") as caught:
        await over_http.on_unauthorized([BEARER], "Bearer hunter2", "team/app", "pull")
    assert "hunter2" not in repr(caught.value)
    assert not over_http.on_forbidden("Bearer hunter2")
    assert tokens.asked == []


# Sharing.


async def ask_together(
    count: int, ask: Callable[[int], Awaitable[str | None]], then: Callable[[], None] = lambda: None
) -> list[str | SyncError | None]:
    """Start `count` askers, let all of them wait, call `then`, and return what each got."""
    results: list[str | SyncError | None] = [None] * count

    async def one(number: int) -> None:
        try:
            results[number] = await ask(number)
        except SyncError as error:
            results[number] = error

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, number)
        await anyio.wait_all_tasks_blocked()
        then()
    return results


async def test_twenty_askers_share_one_token_request() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    tokens.open = anyio.Event()
    got = await ask_together(
        20, lambda number: at.authorization("team/app", "pull"), tokens.open.set
    )
    assert got == ["Bearer t1"] * 20
    assert len(tokens.asked) == 1
    assert await at.authorization("team/app", "pull") == "Bearer t1"
    assert len(tokens.asked) == 1


async def test_askers_for_repositories_under_way_wait_for_the_same_request() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    for number in range(8):
        at.plan_scope(f"team/{number}", "pull")
    tokens.open = anyio.Event()
    got = await ask_together(
        8, lambda number: at.authorization(f"team/{number}", "pull"), tokens.open.set
    )
    assert got == ["Bearer t1"] * 8
    assert len(tokens.asked) == 1


async def test_the_next_waiter_takes_over_when_the_asker_in_front_is_cancelled() -> None:
    """One caller's cancellation never poisons shared work."""
    tokens = Tokens()
    at = await challenged(tokens, USER)
    tokens.open = anyio.Event()
    front = anyio.CancelScope()

    async def ask(number: int) -> str | None:
        if number:
            return await at.authorization("team/app", "pull")
        with front:
            return await at.authorization("team/app", "pull")
        return "cancelled"

    results: list[str | SyncError | None] = []

    async def run() -> None:
        results.extend(await ask_together(6, ask))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        assert len(tokens.asked) == 1
        front.cancel()
        await anyio.wait_all_tasks_blocked()
        assert len(tokens.asked) == 2
        tokens.open.set()
    assert results == ["cancelled", *["Bearer t2"] * 5]
    assert len(tokens.asked) == 2


async def test_a_waiter_that_is_cancelled_disturbs_nobody() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    tokens.open = anyio.Event()

    async def ask(number: int) -> str | None:
        with anyio.CancelScope() as scope:
            if number == 1:
                scope.cancel()
            return await at.authorization("team/app", "pull")
        return "cancelled"

    assert await ask_together(3, ask, tokens.open.set) == ["Bearer t1", "cancelled", "Bearer t1"]
    assert len(tokens.asked) == 1


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(answer(401), id="refused"),
        pytest.param(answer(503, retry_after="7"), id="unavailable"),
        pytest.param(ConnectFailed("no route"), id="unreachable"),
    ],
)
async def test_a_failure_is_shared_and_each_asker_gets_its_own_error(
    failure: Answer | SyncError,
) -> None:
    tokens = Tokens(failure)
    at = await challenged(tokens, USER)
    tokens.open = anyio.Event()

    async def ask(number: int) -> str | None:
        try:
            return await at.authorization("team/app", "pull")
        except SyncError as error:
            error.add_context(Side.SOURCE, "GET", f"reference {number}")
            raise

    got = await ask_together(20, ask, tokens.open.set)
    assert len(tokens.asked) == 1
    errors = [error for error in got if isinstance(error, SyncError)]
    assert len({id(error) for error in errors}) == 20
    assert [error.reference for error in errors] == [f"reference {number}" for number in range(20)]
    assert len({(type(error), error.message, error.retryable) for error in errors}) == 1
    # Nothing of the failure stays, and the next asker tries again. But a refused password is not
    # sent again in the same run.
    if isinstance(failure, Answer) and failure.status == 401:
        with pytest.raises(AuthError, match="refused"):
            await at.authorization("team/app", "pull")
        assert len(tokens.asked) == 1
        at.begin()
    assert await at.authorization("team/app", "pull") == "Bearer t2"


async def test_a_refused_token_that_is_given_again_serves() -> None:
    """Some services give one token until it ends. Without end it would be refused, and asked for."""
    same = Answer(200, {}, json.dumps({"token": "same"}).encode())
    at = await challenged(Tokens(same, same), USER)
    used = await at.authorization("team/app", "pull")
    assert used == "Bearer same"
    at.record_success(used, "team/app", "GET")
    assert await at.on_unauthorized([BEARER], used, "team/app", "pull") is Refusal.REVOKED
    assert [*at.refused_logins] == [used]
    assert await at.authorization("team/app", "pull") == used
    assert not at.refused_logins


async def test_one_token_for_two_uses_is_refused_for_both() -> None:
    same = Answer(200, {}, json.dumps({"token": "same"}).encode())
    tokens = Tokens(same, same)
    at = await challenged(tokens, USER)
    used = await at.authorization("team/app", "pull")
    assert await at.authorization("team/other", "pull") == used
    await at.on_unauthorized([BEARER], used, "team/other", "pull")
    assert await at.authorization("team/app", "pull") == "Bearer t3"
    assert [*at.refused_logins] == [used]


# Scopes.


async def test_one_request_covers_eight_declared_repositories_the_needed_one_first() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    for number in range(9):
        at.plan_scope(f"team/{number}", "pull")
    assert await at.authorization("team/5", "pull") == "Bearer t1"
    assert tokens.scopes() == [[f"team/{number}:pull" for number in (5, 0, 1, 2, 3, 4, 6, 7)]]
    for number in range(8):
        assert await at.authorization(f"team/{number}", "pull") == "Bearer t1"
    assert await at.authorization("team/8", "pull") == "Bearer t2"
    assert tokens.scopes()[1:] == [["team/8:pull"]]


async def test_a_declared_target_asks_for_pull_and_push_at_once() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    at.plan_scope("team/app", "pull")
    at.plan_scope("team/app", "pull,push")
    assert await at.authorization("team/app", "pull") == "Bearer t1"
    assert await at.authorization("team/app", "pull,push") == "Bearer t1"
    assert tokens.scopes() == [["team/app:pull,push"]]


async def test_without_a_declaration_push_is_never_asked_for() -> None:
    """Quay creates the repository when a token with push is asked for (docs/protocol-facts.md
    section 2.2).
    """
    tokens = Tokens()
    at = await challenged(tokens, USER)
    await at.authorization("team/app", "pull")
    assert tokens.scopes() == [["team/app:pull"]]
    assert await at.authorization("team/app", "pull,push") == "Bearer t2"
    assert len(tokens.asked) == 2


async def test_a_mounts_source_is_part_of_what_is_needed() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    await at.authorization("team/app", "pull,push")
    assert (
        await at.authorization("team/app", "pull,push", also=[("team/base", "pull")]) == "Bearer t2"
    )
    assert await at.authorization("team/base", "pull") == "Bearer t2"
    assert tokens.scopes() == [["team/app:pull,push"], ["team/app:pull,push", "team/base:pull"]]


async def narrowed(at: Authenticator, tokens: Tokens) -> None:
    """Assert that from here each request has its own token, asked for once."""
    asked = len(tokens.asked)
    for _ in range(2):
        for number in (1, 2):
            assert await at.authorization(f"team/{number}", "pull") == f"Bearer t{asked + number}"
    assert tokens.scopes()[asked:] == [["team/1:pull"], ["team/2:pull"]]
    assert at.login_facts[1]


async def test_a_403_to_a_wide_token_makes_the_host_one_scope() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    for number in (1, 2):
        at.plan_scope(f"team/{number}", "pull,push")
    used = await at.authorization("team/1", "pull")
    assert not at.login_facts[1]
    assert at.on_forbidden(used)
    await narrowed(at, tokens)
    # A second 403 that comes in for the wide token is worth a repetition, one for an exact token is
    # not.
    assert at.on_forbidden(used)
    assert not at.on_forbidden(await at.authorization("team/1", "pull"))
    assert len(tokens.asked) == 3


async def test_a_403_to_an_exact_token_or_to_none_is_final() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    used = await at.authorization("team/app", "pull")
    assert not at.on_forbidden(used)
    assert not at.on_forbidden(None)
    assert not at.on_forbidden(BASIC)
    assert not at.login_facts[1]


@pytest.mark.parametrize(
    ("error", "refused", "narrow"),
    [
        ("insufficient_scope", "team/1", True),
        ("", "team/2", True),
        ("", "team/1", True),
        ("invalid_token", "team/2", False),
    ],
)
async def test_what_a_401_to_a_wide_token_teaches(error: str, refused: str, narrow: bool) -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    for number in (1, 2):
        at.plan_scope(f"team/{number}", "pull")
    used = await at.authorization("team/1", "pull")
    challenge = f'Bearer realm="{REALM}",scope="repository:{refused}:pull",error="{error}"'
    assert await at.on_unauthorized([challenge], used, refused, "pull")
    if narrow:
        await narrowed(at, tokens)
    else:
        assert await at.authorization("team/1", "pull") == "Bearer t2"
        assert len(tokens.scopes()[1]) == 2


@pytest.mark.parametrize("status", [400, 403, 404, 414])
async def test_a_repository_that_spoils_a_wide_request_is_left_out(status: int) -> None:
    """ghcr answers 403 to the whole token request when one repository is out of bounds."""
    tokens = Tokens(answer(status))
    at = await challenged(tokens, USER)
    for number in (1, 2):
        at.plan_scope(f"team/{number}", "pull")
    assert await at.authorization("team/1", "pull") == "Bearer t2"
    assert tokens.scopes() == [["team/1:pull", "team/2:pull"], ["team/1:pull"]]
    assert at.login_facts[1]


async def test_a_refusal_for_one_repository_is_not_anothers() -> None:
    tokens = Tokens(answer(403), answer(403))
    at = await challenged(tokens, USER)
    for number in (0, 1):
        at.plan_scope(f"team/{number}", "pull")
    tokens.open = anyio.Event()
    got = await ask_together(
        4, lambda number: at.authorization(f"team/{number % 2}", "pull"), tokens.open.set
    )
    assert tokens.scopes() == [["team/0:pull", "team/1:pull"], ["team/0:pull"], ["team/1:pull"]]
    assert [got[1], got[3]] == ["Bearer t3"] * 2
    for error in (got[0], got[2]):
        assert isinstance(error, AuthError)
        assert "team/0 (pull)" in error.message


async def test_a_wrong_password_is_tried_once_however_many_repositories_wait() -> None:
    tokens = Tokens(answer(401))
    at = await challenged(tokens, USER)
    for number in range(20):
        at.plan_scope(f"team/{number}", "pull")
    with pytest.raises(AuthError):
        await at.authorization("team/1", "pull")
    assert len(tokens.asked) == 1


async def test_a_scope_for_the_whole_host_is_used_as_it_is() -> None:
    """ECR Public: scope="aws", whatever the repository (docs/protocol-facts.md section 2.1)."""
    tokens = Tokens()
    at = await challenged(tokens, None, f'Bearer realm="{REALM}",service="s",scope="aws"')
    at.plan_scope("team/1", "pull")
    assert await at.authorization("team/app", "pull") == "Bearer t1"
    assert await at.authorization("team/1", "pull") == "Bearer t1"
    assert tokens.scopes() == [["aws"]]


async def test_a_registrys_own_name_for_a_repository_is_used() -> None:
    tokens = Tokens()
    challenge = f'Bearer realm="{REALM}",scope="repository:local/team/app:pull"'
    at = await challenged(tokens, None, challenge)
    assert await at.authorization("team/app", "pull") == "Bearer t1"
    assert tokens.scopes() == [["local/team/app:pull"]]


async def test_insufficient_scope_asks_for_what_the_challenge_says() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    used = await at.authorization("team/app", "pull")
    more = f'Bearer realm="{REALM}",scope="repository:team/app:pull,metadata",error="insufficient_scope"'
    assert await at.on_unauthorized([more], used, "team/app", "pull")
    await at.authorization("team/app", "pull")
    assert tokens.scopes()[1:] == [["team/app:pull,metadata"]]


async def test_insufficient_scope_of_one_request_takes_no_right_from_the_others() -> None:
    """A DELETE is refused with its own right alone, and has the same actions as an upload."""
    tokens = Tokens()
    at = await challenged(tokens, USER)
    used = await at.authorization("team/app", "pull,push")
    more = f'Bearer realm="{REALM}",scope="repository:team/app:delete",error="insufficient_scope"'
    assert await at.on_unauthorized([more], used, "team/app", "pull,push", "DELETE")
    await at.authorization("team/app", "pull,push")
    assert tokens.scopes()[1:] == [["team/app:delete,pull,push"]]


# Lifetimes.


@pytest.mark.parametrize(
    ("document", "lasts"),
    [
        ({"token": "t", "expires_in": 300}, 270),  # less ten per cent
        ({"token": "t", "expires_in": "300"}, 270),
        ({"token": "t", "expires_in": 300.0}, 270),
        ({"token": "t", "expires_in": 5}, 54),  # a minute at least
        ({"token": "t", "expires_in": -1}, 54),
        ({"access_token": "t", "expires_in": 300}, 270),
        ({"token": jwt(iat=5000, exp=5100)}, 90),  # by its own clock
        ({"token": jwt(exp=1_700_000_100)}, 90),  # by ours
        ({"token": jwt(exp=1_700_000_100), "expires_in": 1000}, 900),
    ],
)
async def test_a_token_is_renewed_before_it_expires(document: object, lasts: float) -> None:
    tokens, clock = Tokens(answer(200, document)), Clock()
    at = await challenged(tokens, USER, clock=clock)
    first = await at.authorization("team/app", "pull")
    clock.now += lasts - 0.5
    assert await at.authorization("team/app", "pull", can_repeat=False) == first
    assert len(tokens.asked) == 1
    clock.now += 1
    assert await at.authorization("team/app", "pull") == "Bearer t2"
    assert len(tokens.asked) == 2


@pytest.mark.parametrize(
    "token", ["opaque", "a.b.c", "a.!.c", "a..c", jwt(exp="soon"), "a." + "W10" + ".c"]
)
async def test_a_token_of_unknown_lifetime_serves_until_refused_but_not_before_a_body(
    token: str,
) -> None:
    tokens, clock = Tokens(answer(200, {"token": token})), Clock()
    at = await challenged(tokens, USER, clock=clock)
    await at.authorization("team/app", "pull")
    clock.now += 59
    assert await at.authorization("team/app", "pull", can_repeat=False) == f"Bearer {token}"
    clock.now += 100_000
    assert await at.authorization("team/app", "pull") == f"Bearer {token}"
    assert len(tokens.asked) == 1
    assert await at.authorization("team/app", "pull", can_repeat=False) == "Bearer t2"
    assert await at.authorization("team/app", "pull") == "Bearer t2"
    assert len(tokens.asked) == 2


async def test_one_renewal_before_a_body_serves_the_other_repositories_too() -> None:
    tokens, clock = Tokens(expires_in=None), Clock()
    at = await challenged(tokens, USER, clock=clock)
    for number in range(8):
        at.plan_scope(f"team/{number}", "pull,push")
    for _ in range(2):
        for number in range(8):
            await at.authorization(f"team/{number}", "pull,push", can_repeat=False)
        clock.now += 60
    assert len(tokens.asked) == 2


async def test_a_lifetime_counts_from_the_asking() -> None:
    tokens, clock = Tokens(), Clock()
    at = await challenged(tokens, USER, clock=clock)
    tokens.open = anyio.Event()

    def answer_late() -> None:
        clock.now += 200
        tokens.open.set()

    await ask_together(1, lambda number: at.authorization("team/app", "pull"), answer_late)
    clock.now += 80
    assert await at.authorization("team/app", "pull") == "Bearer t2"


async def test_a_401_drops_that_token_only() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    assert await at.authorization("team/app", "pull") == "Bearer t1"
    assert await at.authorization("team/other", "pull") == "Bearer t2"
    assert await at.on_unauthorized([BEARER], "Bearer t1", "team/app", "pull")
    assert await at.authorization("team/other", "pull") == "Bearer t2"
    assert await at.authorization("team/app", "pull") == "Bearer t3"
    assert len(tokens.asked) == 3


async def test_a_401_to_a_token_leaves_no_older_one_to_be_refused_too() -> None:
    """Of those that do not say when they end the youngest is sent: where that has ended, all have."""
    tokens, clock = Tokens(expires_in=None), Clock()
    at = await challenged(tokens, USER, clock=clock)
    assert await at.authorization("team/app", "pull") == "Bearer t1"
    clock.now += 61
    assert (
        await at.authorization("team/app", "pull", [("team/other", "pull")], can_repeat=False)
        == "Bearer t2"
    )
    clock.now += 61
    assert await at.authorization("team/third", "pull") == "Bearer t3"
    assert await at.authorization("team/app", "pull") == "Bearer t2"
    assert await at.on_unauthorized([BEARER], "Bearer t2", "team/app", "pull")
    assert await at.authorization("team/app", "pull") == "Bearer t4"
    assert await at.authorization("team/third", "pull") == "Bearer t3", (
        "which does not serve here and may be good"
    )
    assert len(tokens.asked) == 4


async def test_a_401_to_an_older_token_is_simply_repeated() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    await at.authorization("team/app", "pull")
    for _ in range(20):
        assert await at.on_unauthorized([BEARER], "Bearer t1", "team/app", "pull")
        assert await at.authorization("team/app", "pull") == "Bearer t2"
    assert len(tokens.asked) == 2


async def test_a_401_without_challenge_to_a_token_renews_it() -> None:
    tokens = Tokens()
    at = await challenged(tokens, USER)
    used = await at.authorization("team/app", "pull")
    assert await at.on_unauthorized([], used, "team/app", "pull")
    assert await at.authorization("team/app", "pull") == "Bearer t2"


# The token service's answers.


UNUSABLE = "usable token"
REPLIES = [
    (answer(401), USER, "credentials (credentials of registry"),
    (answer(401), None, "team/app (pull) without credentials: status 401"),
    (answer(403, {"errors": [{"code": "DENIED", "message": "not yours, hunter2"}]}), USER,
        "team/app (pull) to the credentials from credentials of registry 'mine': "
        "status 403: DENIED not yours, ***"),
    (answer(400, {"details": "bad\x1b[2J\nscope"}), None, "status 400: bad[2J scope"),
    (answer(403, {"error": "hun\0ter2"}), USER, "status 403: ***"),
    (answer(404, {"error": "unknown"}), None, "status 404: unknown"),
    (Answer(404, {}, b"<html>"), None, "status 404"),
    (answer(302, None, location="https://evil.test/"), USER, "status 302"),
    (Answer(200, {}, b""), USER, UNUSABLE),
    (Answer(200, {}, b"[" * 200_000), USER, UNUSABLE),
    (answer(200, []), USER, UNUSABLE),
    (answer(200, {"token": ""}), USER, UNUSABLE),
    (answer(200, {"token": 5}), USER, UNUSABLE),
    (answer(200, {"token": "a\r\nX: b"}), USER, UNUSABLE),
    (answer(200, {"token": "ü"}), USER, UNUSABLE),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "credential", "complaint"), REPLIES)
async def test_what_the_token_service_refuses_is_said_once_and_clean(
    reply: Answer, credential: Credential | None, complaint: str
) -> None:
    tokens = Tokens(reply)
    at = await challenged(tokens, credential)
    with pytest.raises(AuthError) as caught:
        await at.authorization("team/app", "pull")
    assert complaint in caught.value.message
    assert "service of registry.example.org" in caught.value.message
    assert caught.value.fatal is ("credentials (" in complaint)
    assert caught.value.message.isprintable()
    assert "hunter2" not in f"{caught.value!r}{caught.value.hint}"
    assert len(tokens.asked) == 1
    if reply[0] in (401, 403, 404, 400):
        assert caught.value.hint is not None
        assert ("docker login registry.example.org" in caught.value.hint) is (credential is None)


@pytest.mark.parametrize(("status", "wait"), [(429, "7"), (503, None), (500, "0"), (408, None)])
async def test_a_token_service_in_trouble_may_be_asked_again(status: int, wait: str | None) -> None:
    headers = {"retry_after": wait} if wait is not None else {}
    tokens = Tokens(answer(status, {"message": "hunter2"}, **headers))
    at = await challenged(tokens, USER)
    with pytest.raises(RegistryError) as caught:
        await at.authorization("team/app", "pull")
    assert caught.value.retryable
    assert caught.value.retry_after == (None if wait is None else float(wait))
    assert "hunter2" not in caught.value.message
    assert await at.authorization("team/app", "pull") == "Bearer t2"


IDENTITY = Credential("00000000", identity_token="hunter2", found_at="a file")


async def test_an_identity_token_is_exchanged_by_post_and_its_successor_kept() -> None:
    tokens = Tokens(
        answer(200, {"access_token": "a1", "expires_in": 300, "refresh_token": "hunter3"})
    )
    at = await challenged(tokens, IDENTITY)
    at.plan_scope("team/other", "pull")
    assert await at.authorization("team/app", "pull") == "Bearer a1"
    assert await at.authorization("team/third", "pull") == "Bearer t2"
    method, url, headers, body = tokens.asked[0]
    assert (method, url) == ("POST", REALM)
    assert headers == [("Content-Type", "application/x-www-form-urlencoded")]
    assert parse_qsl(body.decode()) == [
        ("grant_type", "refresh_token"),
        ("service", "registry.example.org"),
        ("client_id", "regsync"),
        ("scope", "repository:team/app:pull repository:team/other:pull"),
        ("refresh_token", "hunter2"),
    ]
    assert ("refresh_token", "hunter3") in parse_qsl(tokens.asked[1][3].decode())


@pytest.mark.parametrize("status", [400, 401, 404, 405])
async def test_get_is_tried_where_the_post_flow_is_missing(status: int) -> None:
    tokens = Tokens(answer(status))
    at = await challenged(tokens, IDENTITY)
    assert await at.authorization("team/app", "pull") == "Bearer t2"
    assert [request[0] for request in tokens.asked] == ["POST", "GET"]
    assert tokens.asked[1][2] == [
        ("Authorization", "Basic " + base64.b64encode(b"00000000:hunter2").decode())
    ]


async def test_get_is_not_tried_without_a_user_name() -> None:
    tokens = Tokens(answer(401))
    at = await challenged(tokens, Credential(identity_token="hunter2", found_at="a file"))
    with pytest.raises(AuthError, match=r"refused .*\(a file\)"):
        await at.authorization("team/app", "pull")
    assert len(tokens.asked) == 1


# What an earlier run learnt.


async def test_a_recalled_challenge_saves_the_bare_request() -> None:
    tokens = Tokens()
    earlier = await challenged(Tokens(), USER)
    assert earlier.login_facts == [list(Challenge("bearer", REALM, "registry.example.org")), False]
    at = login(tokens, USER)
    at.restore(earlier.login_facts)
    assert await at.authorization("team/app", "pull") == "Bearer t1"


@pytest.mark.rule("R2")
async def test_a_recalled_realm_is_checked_again() -> None:
    tokens = Tokens()
    at = login(tokens, USER)
    at.restore([Challenge("bearer", "https://evil.test/token"), False])
    assert await at.authorization("team/app", "pull") is None
    assert tokens.asked == []


async def test_a_recalled_challenge_that_no_longer_serves_is_forgotten() -> None:
    tokens = Tokens(answer(404))
    at = login(tokens, USER)
    at.restore([Challenge("bearer", REALM), True])
    assert await at.authorization("team/app", "pull") is None
    assert at.login_facts == [None, True]
    assert await at.on_unauthorized([BEARER], None, "team/app", "pull")
    assert await at.authorization("team/app", "pull") == "Bearer t2"


@pytest.mark.rule("R9")
@pytest.mark.parametrize(("scheme", "sent"), [("https", BASIC), ("http", None)])
async def test_recalled_basic_is_sent_at_once_over_https_only(
    scheme: str, sent: str | None
) -> None:
    at = login(Tokens(), USER, scheme=scheme)
    at.restore([Challenge("basic", "here"), False])
    assert await at.authorization("team/app", "pull") == sent


async def test_recall_does_not_overrule_what_this_run_was_told() -> None:
    at = await challenged(Tokens(), USER)
    at.restore([Challenge("bearer", "https://old.example.org/token"), False])
    assert at.login_facts[0] == list(Challenge("bearer", REALM, "registry.example.org"))


@pytest.mark.parametrize("length", [10, 16_000, 40_000])
async def test_a_challenge_that_repeats_a_secret_is_not_kept(length: int) -> None:
    challenge = f'Bearer realm="{REALM}",service="{"x" * length} hunter2"'
    at = await challenged(Tokens(), USER, challenge=challenge)
    assert at.login_facts == [None, False]


async def test_a_403_to_a_token_that_was_replaced_meanwhile_is_worth_a_repetition() -> None:
    at = await challenged(Tokens(), USER)
    used = await at.authorization("team/app", "pull")
    expired = f'{BEARER},error="invalid_token"'
    assert await at.on_unauthorized([expired], used, "team/app", "pull")
    fresh = await at.authorization("team/app", "pull")
    assert fresh != used
    assert at.on_forbidden(used)
    assert not at.on_forbidden(fresh)


def test_a_login_is_renewed_five_times_for_one_request() -> None:
    refusals: list[Refusal] = []
    for _ in range(5):
        refusals.append(Refusal.REVOKED)
        assert may_repeat_after(refusals)
    refusals.append(Refusal.REVOKED)
    assert not may_repeat_after(refusals)
