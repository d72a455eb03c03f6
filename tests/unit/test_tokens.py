"""The header of each request to a registry: what is asked of its token service, how long the answer
serves, and what a refusal leads to. The token service is one function; every request is counted.
"""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from urllib.parse import parse_qs, parse_qsl, urlsplit

import anyio
import pytest
import trio

from _regsync import edge
from _regsync.addresses import Origin
from _regsync.auth.challenge import Challenge
from _regsync.auth.cloud import CloudLogin, Login
from _regsync.auth.credentials import Credential
from _regsync.auth.tokens import NEEDED, Authenticator, says_login_ended
from _regsync.errors import AuthError, ConnectFailed, RegistryError, SyncError
from _regsync.text import keep_passing_secret, mask

REALM = "https://auth.example.org/token"
BEARER = f'Bearer realm="{REALM}",service="registry.example.org",scope="repository:team/app:pull"'
USER = Credential("someone", "hunter2", found_at="credentials of registry 'mine'")
TOKEN = Credential("someone", identity_token="hunter2", found_at="a file")
BASIC = "Basic " + base64.b64encode(b"someone:hunter2").decode()


@pytest.fixture(autouse=True)
def world():
    with edge.using(edge.current()._replace(wall=lambda: 1_700_000_000.0)):
        yield


class Service:
    """A token service: `answers` in turn, then `t1`, `t2`, ... for five minutes."""

    def __init__(self, *answers, expires_in=300):
        self.answers = list(answers)
        self.expires_in = expires_in
        self.asked = []  # method, URL, headers and body of each request
        self.open = anyio.Event()
        self.open.set()

    @property
    def now(self):
        return anyio.current_time()

    @now.setter
    def now(self, time):
        trio.lowlevel.current_clock().jump(time - self.now)

    async def fetch(self, *request):
        self.asked.append(request)
        number = len(self.asked)
        await self.open.wait()
        if not self.answers:
            life = {} if self.expires_in is None else {"expires_in": self.expires_in}
            return answer(200, {"token": f"t{number}", **life})
        given = self.answers.pop(0)
        if isinstance(given, SyncError):
            raise given
        return given

    def login(self, credential=USER, scheme="https"):
        return Authenticator(
            origin=Origin(scheme, "registry.example.org", 443),
            credential=credential,
            fetch=self.fetch,
        )

    def challenged(self, credential=USER):
        at = self.login(credential)
        assert refuse(at, BEARER)
        return at

    def scopes(self):
        """The scopes of each request, without `repository:`."""
        queries = [parse_qs(urlsplit(url).query) for _, url, _, _ in self.asked]
        return [[each.removeprefix("repository:") for each in query["scope"]] for query in queries]


def answer(status, document=None, **headers):
    body = b"" if document is None else json.dumps(document).encode()
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return SimpleNamespace(status=status, headers=fields, body=body)


def needs(name="team/app", actions="pull"):
    return frozenset({(name, actions)})


APP = needs()
OTHER = needs("team/other")


async def header(at, needed=APP, *, for_body=False):
    """Return what is sent, as a request obtains it."""
    while (found := at.header(needed, anyio.current_time(), for_body=for_body)) is NEEDED:
        await at.obtain(needed, for_body=for_body)
    return found


def refuse(at, challenge="", sent=None, needed=APP, *, status=401, body=b""):
    headers = SimpleNamespace(all=lambda name: [challenge] if challenge else [])
    refusal = SimpleNamespace(status=status, headers=headers, body=body)
    return at.refused(refusal, sent, needed)


async def together(count, ask, then):
    """Let askers begin, call `then` when all of them wait, and return what each got."""
    results = [None] * count

    async def one(number):
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


# What is sent.


async def test_a_token_is_asked_for_with_the_challenges_words():
    service = Service()
    at = service.login()
    assert await header(at) is None, "the first request goes bare"
    refuse(at, 'Bearer realm="https://registry.example.org/t?tenant=a%20b",service="the service"')
    both = frozenset({("other/app", "pull"), ("team/app", "pull,push")})
    assert await header(at, both) == "Bearer t1"
    method, url, headers, _ = service.asked[0]
    assert (method, headers) == ("GET", [("Authorization", BASIC)])
    assert parse_qsl(urlsplit(url).query) == [
        ("tenant", "a b"),
        ("service", "the service"),
        ("scope", "repository:team/app:pull,push"),
        ("scope", "repository:other/app:pull"),
        ("account", "someone"),
    ]


async def test_no_secret_moves_when_the_realm_is_refused():
    service = Service()
    at = service.login()
    with pytest.raises(AuthError, match="another owner"):
        refuse(at, 'Bearer realm="https://evil.test/token"')
    assert await header(at) is None
    at.restore([Challenge("bearer", "https://evil.test/token"), False])
    assert await header(at) is None, "a saved realm is checked again"
    assert service.asked == []


async def test_a_static_token_waits_for_its_challenge_over_http_alone():
    held = Credential(registry_token="hunter2", found_at="token of registry 'mine'")
    assert await header(Service().login(held)) == "Bearer hunter2"
    at = Service().login(held, "http")
    assert await header(at) is None
    assert refuse(at, BEARER)
    assert await header(at) == "Bearer hunter2"
    with pytest.raises(AuthError, match=r"refused .*\(token of registry 'mine'\)") as caught:
        refuse(at, BEARER, "Bearer hunter2")
    assert not caught.value.fatal
    assert not refuse(at, sent="Bearer hunter2", status=403)


async def test_a_single_basic_challenge_after_tokens_is_not_believed():
    at = Service().challenged()
    used = await header(at)
    assert refuse(at, 'Basic realm="here"', used)
    assert await header(at) == "Bearer t2"


@pytest.mark.parametrize(("scheme", "sent"), [("https", BASIC), ("http", None)])
async def test_a_saved_basic_challenge_is_answered_over_https_only(scheme, sent):
    at = Service().login(scheme=scheme)
    at.restore([Challenge("basic", "here"), False])
    assert await header(at) == sent


async def test_a_saved_challenge_that_no_longer_serves_is_forgotten():
    at = Service(answer(404)).login()
    at.restore([Challenge("bearer", REALM), True])
    assert await header(at) is None
    assert at.login_facts == [None, True]
    assert refuse(at, BEARER)
    assert await header(at) == "Bearer t2"


async def test_unknown_schemes_are_named_and_no_challenge_is_no_way_in():
    at = Service().login()
    with pytest.raises(AuthError, match="negotiate"):
        refuse(at, "Negotiate")
    assert not refuse(at)


# Sharing.


async def test_askers_share_one_token_request_for_eight_repositories():
    service = Service()
    at = service.challenged()
    for number in range(9):
        at.plan_scope(f"team/{number}", "pull")
    service.open = anyio.Event()
    got = await together(
        16, lambda number: header(at, needs(f"team/{number % 8}")), service.open.set
    )
    assert got == ["Bearer t1"] * 16
    assert await header(at, needs("team/8")) == "Bearer t2"
    assert service.scopes() == [[f"team/{number}:pull" for number in range(8)], ["team/8:pull"]]


@pytest.mark.parametrize("failure", [answer(401), answer(503), ConnectFailed("no route")])
async def test_a_failure_is_shared_and_each_asker_gets_its_own_error(failure):
    """A refused password is not sent again, a busy service is asked again."""
    service = Service(failure)
    at = service.challenged()
    service.open = anyio.Event()
    got = await together(20, lambda number: header(at), service.open.set)
    assert len(service.asked) == 1
    assert len({id(error) for error in got if isinstance(error, SyncError)}) == 20
    if failure == answer(401):
        for needed in (APP, OTHER):
            with pytest.raises(AuthError, match="refused"):
                await header(at, needed)
        assert len(service.asked) == 1
        at.begin()
    assert await header(at) == "Bearer t2"


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(
    ("refusal", "credential"),
    [
        (answer(401), USER),
        (answer(400, {"error": "invalid_grant", "error_description": "it has expired"}), TOKEN),
        (answer(400, {"errors": [{"code": "UNAUTHORIZED"}]}), TOKEN),
    ],
)
async def test_a_wrong_login_is_sent_once_however_many_repositories_wait(
    refusal, credential, is_exact
):
    service = Service(refusal)
    at = service.login(credential)
    at.restore([None, is_exact])
    refuse(at, BEARER)
    at.plan_scope("team/planned", "pull")
    service.open = anyio.Event()
    got = await together(20, lambda number: header(at, needs(f"team/{number}")), service.open.set)
    assert len(service.asked) == 1
    assert {str(error) for error in got} == {
        f"the token service of registry.example.org refused the credentials ({credential.found_at})"
    }
    assert all("expired" in error.hint for error in got)


async def test_the_next_asker_takes_over_from_one_that_was_cancelled():
    service = Service()
    at = service.challenged()
    service.open = anyio.Event()
    front = anyio.CancelScope()

    async def ask(number):
        if number:
            return await header(at)
        with front:
            return await header(at)
        return "cancelled"

    def cancel():
        front.cancel()
        service.open.set()

    assert await together(3, ask, cancel) == ["cancelled", "Bearer t2", "Bearer t2"]


# Scopes.


async def test_what_is_planned_for_a_repository_is_asked_for_at_once():
    service = Service()
    at = service.challenged()
    at.plan_scope("team/app", "pull,push")
    at.plan_scope("team/app", "pull")
    for actions in ("pull", "pull,push"):
        assert await header(at, needs(actions=actions)) == "Bearer t1"
    assert await header(at, OTHER) == "Bearer t2"
    assert service.scopes() == [["team/app:pull,push"], ["team/other:pull"]]


async def test_what_is_needed_now_is_asked_for_first_and_what_is_written_to_before_others():
    """Some services, and some registries, heed the first scope alone."""
    service = Service()
    at = service.challenged()
    at.plan_scope("team/a", "pull")
    needed = frozenset((("team/b", "pull"), ("team/c", "pull,push")))
    assert await header(at, needed) == "Bearer t1"
    assert service.scopes() == [["team/c:pull,push", "team/b:pull", "team/a:pull"]]


def planned(service, credential=USER):
    """Return a login that has two repositories to ask for."""
    at = service.challenged(credential)
    for number in (1, 2):
        at.plan_scope(f"team/{number}", "pull")
    return at


@pytest.mark.parametrize(
    ("status", "credential"), [(400, USER), (403, USER), (404, USER), (414, USER), (401, None)]
)
async def test_a_repository_that_spoils_a_wide_request_is_left_out(status, credential):
    service = Service(answer(status))
    at = planned(service, credential)
    assert await header(at, needs("team/1")) == "Bearer t2"
    assert service.scopes() == [["team/1:pull", "team/2:pull"], ["team/1:pull"]]
    assert at.login_facts[1]


@pytest.mark.parametrize(
    ("status", "error", "is_exact"),
    [
        (403, "", True),
        (401, "insufficient_scope", True),
        (401, "", True),
        (401, "invalid_token", False),
    ],
)
async def test_what_the_refusal_of_a_wide_token_teaches(status, error, is_exact):
    service = Service()
    at = planned(service)
    used = await header(at, needs("team/1"))
    challenge = f'Bearer realm="{REALM}",scope="repository:team/1:pull",error="{error}"'
    assert refuse(at, challenge, used, needs("team/1"), status=status)
    await header(at, needs("team/1"))
    assert (len(service.scopes()[1]) == 1) is is_exact
    assert at.login_facts[1] is is_exact


async def test_a_403_to_an_exact_token_or_to_no_token_is_final():
    at = Service().challenged()
    used = await header(at)
    for sent in (used, None, BASIC):
        assert not refuse(at, sent=sent, status=403)
    refuse(at, BEARER, used)
    assert refuse(at, sent=used, status=403), "another request has replaced it"


@pytest.mark.parametrize(
    ("scope", "asked"),
    [
        ("aws", [["aws"]]),  # for the whole host
        ("repository:local/team/app:pull", [["local/team/app:pull"], ["team/other:pull"]]),
    ],
)
async def test_a_scope_of_the_registrys_own_is_used_as_it_is(scope, asked):
    service = Service()
    at = service.login(None)
    refuse(at, f'Bearer realm="{REALM}",scope="{scope}"')
    for needed in (APP, OTHER, APP):
        await header(at, needed)
    assert service.scopes() == asked


async def test_a_right_of_one_request_takes_none_from_the_others():
    """A DELETE is refused with its own right alone, and has the same needs as an upload."""
    service = Service()
    at = service.challenged()
    upload = needs(actions="pull,push")
    used = await header(at, upload)
    more = f'Bearer realm="{REALM}",scope="repository:team/app:delete",error="insufficient_scope"'
    assert refuse(at, more, used, upload)
    await header(at, upload)
    assert service.scopes()[1:] == [["team/app:pull,push", "team/app:delete"]]


# Lifetimes.


def jwt(**claims):
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"aaa.{payload}.bbb"


@pytest.mark.parametrize(
    ("document", "lasts"),
    [
        ({"token": "t", "expires_in": 300}, 270),  # less ten per cent
        ({"token": "t", "expires_in": "300"}, 270),
        ({"token": "t", "expires_in": 5}, 54),  # a minute at least
        ({"access_token": "t", "expires_in": -1}, 54),
        ({"token": jwt(iat=5000, exp=5100)}, 90),  # by its own clock
        ({"token": jwt(exp=1_700_000_100)}, 90),  # by ours
        ({"token": jwt(exp=1_700_000_100), "expires_in": 1000}, 900),
    ],
)
@pytest.mark.virtual_time
async def test_a_token_is_renewed_before_it_ends(document, lasts):
    service = Service(answer(200, document))
    at = service.challenged()
    first = await header(at)
    service.now += lasts - 0.5
    assert await header(at, for_body=True) == first
    service.now += 1
    assert await header(at) == "Bearer t2"


@pytest.mark.virtual_time
async def test_a_lifetime_counts_from_the_asking():
    service = Service()
    at = service.challenged()
    service.open = anyio.Event()

    def answer_late():
        service.now += 200
        service.open.set()

    await together(1, lambda number: header(at), answer_late)
    service.now += 80
    assert await header(at) == "Bearer t2"


@pytest.mark.parametrize("expires_in", [60, None])
@pytest.mark.parametrize("for_body", [True, False])
@pytest.mark.virtual_time
async def test_a_service_that_takes_longer_than_its_tokens_live_is_asked_once(for_body, expires_in):
    service = Service(expires_in=expires_in)
    at = service.challenged()
    service.open = anyio.Event()

    def answer_late():
        service.now += 61
        service.open.set()

    async def ask(number):
        with anyio.fail_after(0.5):
            return await header(at, for_body=for_body)

    assert await together(1, ask, answer_late) == ["Bearer t1"]


@pytest.mark.parametrize("token", ["opaque", "a.!.c", jwt(exp="soon")])
@pytest.mark.virtual_time
async def test_a_token_of_unknown_life_serves_until_refused_but_not_before_a_body(token):
    service = Service(answer(200, {"token": token}))
    at = service.challenged()
    await header(at)
    service.now += 59
    assert await header(at, for_body=True) == f"Bearer {token}"
    service.now += 100_000
    assert await header(at) == f"Bearer {token}"
    assert await header(at, for_body=True) == "Bearer t2"


@pytest.mark.virtual_time
async def test_what_has_expired_is_dropped_with_the_next_run():
    service = Service()
    at = service.challenged()
    await header(at)
    service.now += 200
    await header(at, OTHER)
    service.now += 200
    at.begin()
    assert [*at._grants] == [OTHER]


# Refusals.


async def test_one_token_for_two_uses_is_refused_for_both_and_may_be_given_again():
    service = Service(*[answer(200, {"token": "the-same"})] * 3)
    at = service.challenged()
    used = await header(at)
    assert await header(at, OTHER) == used
    refuse(at, BEARER, used, OTHER)
    assert at.header(APP, service.now) is NEEDED
    assert await header(at) == used, "which its service gives again"
    assert mask("it was the-same") == "it was ***"


@pytest.mark.virtual_time
async def test_a_refused_token_takes_the_older_ones_for_the_same_along():
    service = Service(expires_in=None)
    at = service.challenged()
    assert await header(at) == "Bearer t1"
    service.now += 61
    assert await header(at, APP | OTHER, for_body=True) == "Bearer t2"
    service.now += 61
    assert await header(at, for_body=True) == "Bearer t3"
    assert await header(at, needs("team/third")) == "Bearer t4"
    refuse(at, BEARER, "Bearer t3")
    assert await header(at) == "Bearer t5"
    assert await header(at, needs("team/third")) == "Bearer t4"


async def test_an_expired_password_is_told_by_its_text():
    body = b"Your authorization token has expired."
    for status in (400, 403):
        at = Service().challenged()
        used = await header(at)
        assert refuse(at, "", used, status=status, body=body)
        assert at.header(APP, 1000.0) is NEEDED
    assert not says_login_ended(SimpleNamespace(status=404, body=body))


@pytest.mark.parametrize(
    ("credential", "complaint"),
    [(None, "none are"), (Credential(identity_token="hunter2", found_at="a file"), "a file has")],
)
async def test_a_basic_challenge_that_cannot_be_met_says_why(credential, complaint):
    at = Service().login(credential)
    refuse(at, 'Basic realm="here"')
    with pytest.raises(AuthError, match=complaint) as caught:
        await header(at)
    assert caught.value.fatal is (credential is not None)


# The token service.


@pytest.mark.parametrize(
    ("reply", "credential", "complaint"),
    [
        (answer(401), USER, "refused the credentials (credentials of registry"),
        (answer(401), None, "team/app (pull) without credentials: status 401"),
        (answer(403, {"errors": [{"code": "DENIED", "message": "not yours, hunter2"}]}), USER,
            "team/app (pull) to the credentials from credentials of registry 'mine': "
            "status 403: DENIED not yours, ***"),
        (answer(400, {"details": "bad\x1b[2J\nscope"}), None, "status 400: bad[2J scope"),
        (answer(403, {"error": "hun\0ter2"}), USER, "status 403: ***"),
        (answer(302, None, location="https://evil.test/"), USER, "status 302"),
        *((answer(200, document), USER, "without a usable token") for document in
            ([], {"token": ""}, {"token": 5}, {"token": "a\r\nX: b"}, {"token": "ü"})),
    ],
)  # fmt: skip
async def test_what_the_token_service_refuses_is_said_once_and_clean(reply, credential, complaint):
    service = Service(reply)
    at = service.challenged(credential)
    with pytest.raises(AuthError) as caught:
        await header(at)
    assert complaint in caught.value.message
    assert caught.value.message.isprintable()
    assert len(service.asked) == 1


async def test_a_token_service_in_trouble_may_be_asked_again():
    at = Service(answer(503, {"message": "hunter2"}, retry_after="7")).challenged()
    with pytest.raises(RegistryError, match=r"\*\*\*") as caught:
        await header(at)
    assert (caught.value.retryable, caught.value.retry_after) == (True, 7.0)
    assert await header(at) == "Bearer t2"


async def test_an_identity_token_goes_by_post_and_its_successor_is_kept_and_masked():
    service = Service(
        answer(200, {"access_token": "a1", "refresh_token": "first-renewed"}),
        answer(200, {"access_token": "a2", "refresh_token": "second-renewed"}),
    )
    at = service.challenged(Credential("00000000", identity_token="hunter2", found_at="a file"))
    assert await header(at) == "Bearer a1"
    await header(at, OTHER)
    await header(at, needs("team/third"))
    assert [method for method, *_ in service.asked] == ["POST"] * 3
    forms = [dict(parse_qsl(body.decode())) for _, _, _, body in service.asked]
    sent = ["hunter2", "first-renewed", "second-renewed"]
    assert [form["refresh_token"] for form in forms] == sent
    assert forms[0]["scope"] == "repository:team/app:pull"
    assert mask(", ".join(sent)) == "***, ***, ***"
    # A service that runs for months keeps the last one.
    keep_passing_secret(*(f"passing-{number}" for number in range(1000)))
    assert mask(", ".join(sent)) == "hunter2, first-renewed, ***"


def cloud_login(*passwords):
    """A cloud that gives these passwords in turn."""
    given = iter(passwords)

    async def log_in(*, probing_metadata):
        return Login(Credential("AWS", next(given), found_at="a cloud"), float("inf"))

    return CloudLogin(log_in, probing_metadata=False)


async def test_a_cloud_replaces_a_password_that_was_good_and_not_by_the_same():
    at = Service().login(cloud_login("first-password", "second-password", "second-password"))
    refuse(at, "Basic")
    used = await header(at)
    at.record_success()
    assert refuse(at, "Basic", used)
    renewed = await header(at)
    assert renewed not in (used, None)
    at.record_success()
    assert refuse(at, "Basic", renewed)
    with pytest.raises(AuthError, match="a cloud") as caught:
        await header(at)
    assert caught.value.fatal
    at.begin()
    assert await header(at) == renewed, "the account may have been unlocked"


async def test_only_what_can_be_sent_is_offered_unasked():
    assert not await Service().login(None).log_in_unasked([BEARER])
    nameless = Service().login(Credential(identity_token="secret"))
    assert not await nameless.log_in_unasked([])
    assert await nameless.log_in_unasked([BEARER])
    at = Service().login()
    assert await at.log_in_unasked([])
    assert await header(at) == BASIC
