"""Logins and tokens as registries see them: how often they are asked for, when they are shown, and
what of them is told or kept. Then `auth check`, which tells what they let us do.

Where a cloud's identity is found, and whom it asks, is in test_logins_aws.py and its like.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from base64 import b64encode
from unittest import mock

import anyio
import pytest
from jsonschema import Draft202012Validator

from conformance.images import Seed
from conformance.memory import Link
from conformance.messages import Answer, Request, Response, error
from conformance.tokens import BasicAuth, TokenService
from tests.clouds import ECR, PRIVATE, InAws, answer_first
from tests.ends import document, only, tags
from tests.mirrors import Mirror
from tests.program import report_schema

USER, PASSWORD = "captain", "Xyzzy-0pen-Sesame"
USERS = {USER: PASSWORD}
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": PASSWORD}}
MAPPING = {"from": "app", "tags": tags("v1"), "artifacts": {"enabled": False}}
FAR = {"down": Link(latency=0.1), "up": Link(latency=0.1)}


def with_login(end="source"):
    return {end: {"url": f"http://{end}.test", **LOGIN}}


@pytest.fixture
def tokens():
    return TokenService(USERS, anonymous=False, now=anyio.current_time)


# Tokens and passwords of any registry.


async def test_tokens_that_are_never_accepted_end_the_request(world, tmp_path, tokens):
    """Two new logins a request, and not one more for as long as it fails."""
    tokens.uses = 0
    mirror = Mirror(world, tmp_path, of={"source": {"auth": tokens}})
    mirror.push("v1")
    ran = await mirror.sync(MAPPING, registries=with_login())
    assert ran.status == 4
    assert "AUTH_ERROR" in only(ran.failed)
    assert tokens.requests <= 3
    assert ran.seconds < 60


@pytest.mark.parametrize("kind", ["basic", "token"])
@pytest.mark.parametrize("wrong", ["one", "two"])
async def test_two_logins_of_one_host_stay_apart_and_a_wrong_one_is_shown_once(
    world, tmp_path, monkeypatch, kind, wrong
):
    """A file of podman's has a login for each of two namespaces: 10 repositories wait for each."""
    users = {"one": "password-of-one", "two": "password-of-two"}
    service: BasicAuth = BasicAuth(users)
    if kind == "token":
        service = TokenService(users, anonymous=False, now=anyio.current_time)
    mirror = Mirror(world, tmp_path, of={"source": {"auth": service, **FAR}})
    names = [f"{namespace}/app{number}" for namespace in users for number in range(10)]
    for name in names:
        mirror.push("v1", repository=name)
    logins = {**users, wrong: PASSWORD}
    auths = {
        f"source.test:80/{user}": {"username": user, "password": password}
        for user, password in logins.items()
    }
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": auths}))
    ran = await mirror.sync(*({**MAPPING, "from": name} for name in names))
    assert ran.status == 1
    assert sorted(ran.statuses()) == ["failed"] * 10 + ["synced"] * 10
    assert all(f"source.test/{wrong}/" in line for line in ran.failed)

    asked = mirror.source.journal.entries
    shown = [entry.header("authorization").removeprefix("Basic ") for entry in asked]
    assert shown.count(b64encode(f"{wrong}:{logins[wrong]}".encode()).decode()) == 1
    assert not [entry for entry in asked if ":one/" in entry.target and ":two/" in entry.target]


async def test_a_token_that_was_replaced_is_not_shown_either(world, tmp_path, tokens):
    mirror = Mirror(world, tmp_path, of={"source": {"auth": tokens}})
    mirror.push("v1")
    shown: list[str] = []

    def intercept(request: Request) -> Answer | None:
        value = request.header("authorization").removeprefix("Bearer ")
        if request.kind != "blob" or not value:
            return None
        shown.append(value)
        if len(shown) == 1:
            tokens.revoke()
            words = 'realm="http://source.test/token",service="registry.test",error="invalid_token"'
            challenge = f'Bearer {words},scope="repository:app:pull"'
            return error(401, "UNAUTHORIZED", "ended", headers=[("WWW-Authenticate", challenge)])
        return error(403, "DENIED", f"{shown[0]} was replaced, and {value} may not")

    mirror.source.app.intercept = intercept
    ran = await mirror.sync(MAPPING, registries=with_login())
    assert ran.status == 4
    assert len(set(shown)) >= 2
    assert "was replaced" in ran.err
    assert not [value for value in shown if value in ran.err + ran.out]


async def test_who_may_not_push_asks_for_no_third_token_of_the_same_rights(world, tmp_path, tokens):
    tokens.grants = lambda user, access: access.action == "pull"
    mirror = Mirror(world, tmp_path, of={"target": {"auth": tokens}})
    names = ["one", "two", "three"]
    for name in names:
        mirror.push("v1", repository=name)
    ran = await mirror.sync(
        *({**MAPPING, "from": name} for name in names), registries=with_login("target")
    )
    assert ran.status == 4
    assert tokens.requests <= 2 * len(names)
    assert mirror.target.journal.count("POST", "upload_start") <= 3 * len(names)


async def test_a_session_is_given_up_without_another_login(world, tmp_path, tokens):
    """Registries want a right to delete for that, which no service grants."""
    mirror = Mirror(world, tmp_path, of={"target": {"auth": tokens}})
    mirror.push("v1")
    mirror.source.app.faults.on("GET", "blob").status(404)
    way = 'Bearer realm="http://target.test/token",scope="repository:app:delete"'
    way += ',error="insufficient_scope"'
    mirror.target.app.faults.on("DELETE", "upload").challenge(way)
    ran = await mirror.sync(MAPPING, registries=with_login("target"))
    assert ran.status == 2
    posts = mirror.target.journal.matching("POST", "upload_start", status=202)
    assert mirror.target.journal.count("DELETE", "upload") == len(posts)
    assert tokens.requests == 1


async def test_sources_share_tokens_however_late_their_turn_is(world, tmp_path, tokens):
    """Some are listed when others have ended; a token is for eight."""
    mirror = Mirror(world, tmp_path, of={"source": {"auth": tokens, **FAR}, "target": FAR})
    names = [f"app{number:02}" for number in range(40)]
    for name in names:
        mirror.push("v1", repository=name)
        mirror.push("v2", repository=name)
    ran = await mirror.sync(*({"from": name} for name in names), registries=with_login())
    assert (ran.status, len(ran.images), tokens.requests) == (0, 80, 5)


@pytest.mark.parametrize("is_away", [False, True])
async def test_nothing_is_asked_of_the_source_for_a_target_that_is_given_up(
    world, tmp_path, tokens, is_away
):
    """Each manifest may count against a quota, which the next run needs."""
    mirror = Mirror(world, tmp_path, of={"target": {"auth": tokens}})
    for number in range(20):
        mirror.push(f"v{number}")
    target = with_login("target")["target"]
    if is_away:
        mirror.target.app.faults.on("GET", "tag_list").status(503)
    else:
        target["credentials"] = {"username": USER, "password": "not-the-right-one"}
    ran = await mirror.sync({"from": "app"}, registries={"target": target})
    assert ran.statuses() == ["failed"] * 20
    assert {each["error"]["side"] for each in ran.images} == {"target"}
    assert mirror.source.journal.summary() == {"GET tag_list": 1}


@pytest.mark.provokes("credential_unasked")  # the challenge was sent in the first run
async def test_targets_that_are_known_share_tokens_from_the_first_request_on(
    world, tmp_path, tokens
):
    mirror = Mirror(world, tmp_path, of={"target": {"auth": tokens}})
    names = [f"app{number}" for number in range(8)]
    for name in names:
        mirror.push("v1", repository=name)
    mappings = [{"from": name} for name in names]
    await mirror.sync(*mappings, registries=with_login("target"))
    requests = tokens.requests
    assert (await mirror.run("sync")).statuses() == ["skipped"] * 8
    assert tokens.requests == requests + 1


async def test_no_token_service_chooses_what_a_report_shows(world, tmp_path):
    """By a token that is a word of reports."""

    class Hostile(TokenService):
        def write_token(self, user):
            return "synced"

    mirror = Mirror(world, tmp_path, of={"source": {"auth": Hostile(now=anyio.current_time)}})
    mirror.push("v1")
    ran = await mirror.sync(MAPPING)
    assert (ran.status, ran.statuses()) == (0, ["synced"])


async def test_mounts_from_one_repository_cost_few_tokens(world, tmp_path, tokens):
    """Each needs a token for both of its repositories, and a token is for eight."""
    mirror = Mirror(world, tmp_path, of={"target": {"auth": tokens, **FAR}})
    shared = mirror.seed.blob(5000)
    names = [f"app{number:02}" for number in range(32)]
    for name in names:
        layers = [shared, mirror.seed.blob(100)]
        mirror.push("v1", mirror.seed.image(layers=layers), repository=name)
    ran = await mirror.sync(
        *({**MAPPING, "from": name} for name in names), registries=with_login("target")
    )
    assert ran.status == 0, ran.err
    mounts = mirror.target.journal.matching(
        "POST", "upload_start", query={"mount": "*"}, status=201
    )
    assert len(mounts) >= 31
    assert tokens.requests <= 4 + 5


@pytest.mark.provokes("source_written", "push_asked_of_source")
async def test_copies_within_a_registry_cost_few_tokens(world, tmp_path, tokens):
    """Each mount needs a token for a source and a target of its own: four such pairs are in one."""
    mirror = Mirror(world, tmp_path, of={"source": {"auth": tokens, **FAR}})
    names = [f"app{number:02}" for number in range(16)]
    for name in names:
        mirror.push("v1", mirror.seed.image(layers=[mirror.seed.blob(900)]), repository=name)
    within = (
        {**MAPPING, "from": name, "to": f"to/{name}", "targets": ["source"]} for name in names
    )
    ran = await mirror.sync(*within, registries=with_login("source"))
    assert ran.status == 0, ran.err
    assert {*ran.statuses()} == {"synced"}
    assert tokens.requests <= 2 + 2 + 4


@pytest.mark.provokes("secret_in_url")  # which the registry asks for
async def test_no_secret_of_a_challenge_is_kept(world, tmp_path, tokens):
    """As of a registry that repeats the password in it."""
    tokens.service = f"for {PASSWORD}"
    mirror = Mirror(world, tmp_path, of={"source": {"auth": tokens}})
    mirror.push("v1")
    ran = await mirror.sync(MAPPING, registries=with_login())
    assert ran.status == 0, ran.err
    kept = b"".join(path.read_bytes() for path in mirror.cache.rglob("*") if path.is_file())
    assert kept
    assert PASSWORD.encode() not in kept


async def test_what_a_clock_far_ahead_has_written_is_not_believed(world, tmp_path):
    mirror = Mirror(world, tmp_path)
    shared = mirror.seed.blob(5000)
    mirror.push("v1", mirror.seed.image(layers=[shared]))
    mirror.write(MAPPING)
    ahead = world.edge()._replace(wall=lambda: world.wall() + 10 * 86400)
    ran = await world.run("sync", "-q", "-c", str(mirror.file), edge=ahead)
    assert ran.status == 0, ran.err

    image = mirror.push("v1", mirror.seed.image(layers=[shared, mirror.seed.blob(100)]))
    ran = await mirror.sync(MAPPING)
    assert ran.status == 0, ran.err
    digest = image.document["layers"][0]["digest"]
    asked = mirror.target.journal.matching("HEAD", "blob", reference=digest)
    mounted = mirror.target.journal.matching("POST", "upload_start", query={"mount": digest})
    assert len(asked) + len(mounted) == 1, "what it wrote is asked for again"


# A cloud's logins in whole runs.


class Tokens(TokenService):
    """A token service that takes the passwords of ECR, as ECR Public's."""

    machine: InAws

    def user_of_password(self, user: str, password: str) -> str | None:
        return user if password in self.machine.aws.passwords["ecr"] else None


class AtEcr(InAws):
    """Keys are there, and `target.test`; logins are counted by what was asked of ECR's API."""

    def __init__(self, *place):
        super().__init__(*place)
        self.set_keys(self.aws.identity("user"))
        self.target = self.world.registry("target.test")

    @property
    def logins(self):
        return self.aws.count("ecr")

    @property
    def journal(self):
        return self.ecr.journal

    def use(self, scheme, **options):
        """Let the registry ask for passwords, or for tokens."""
        if scheme == "token":
            self.ecr.auth = Tokens(anonymous=False, now=anyio.current_time, **options)
            self.ecr.auth.machine = self

    def end_logins(self):
        """Let all passwords of so far be good no more."""
        self.aws.passwords["ecr"].clear()

    def end_tokens(self):
        self.end_logins()
        self.ecr.auth.revoke()

    def after(self, count, then):
        """Let something happen when so many logins have been shown to the registry."""
        shown = itertools.count(1)

        def intercept(request: Request) -> None:
            if request.header("authorization") and next(shown) == count:
                then()

        self.ecr.intercept = intercept

    async def sync(self, *repositories, host=PRIVATE, **fields):
        for number, name in enumerate(repositories):
            Seed(number).image().load_into(self.reachable[host].app, name, "v1")
        registries = {"source": {"url": host, **fields}, "target": self.target}
        mappings = ({"from": name, "tags": tags("v1")} for name in repositories)
        ran = await self.world.sync(registries, *mappings)
        assert not [secret for secret in self.secrets() if secret in ran.err + ran.out]
        return ran


@pytest.fixture
def machine(world, clean_env, monkeypatch):
    return AtEcr(world, clean_env, monkeypatch)


MANY = [f"team/app{number}" for number in range(16)]


async def test_many_repositories_cost_one_bare_request_and_one_login(machine):
    ran = await machine.sync(*MANY)
    assert (ran.status, len(ran.images), machine.logins) == (0, 16, 1)
    machine.journal.matching(status=401).exactly(1)
    with_login = machine.journal.matching(header={"authorization": "Basic *"})
    assert len(with_login) == len(machine.journal.entries) - 1


async def test_what_answers_without_a_login_costs_none(machine):
    machine.ecr.auth = None
    assert (await machine.sync("app")).status == 0
    assert machine.logins == 0


async def test_a_password_that_is_refused_twice_stops_the_registry(machine):
    machine.after(2, lambda: setattr(machine.ecr, "auth", BasicAuth({})))
    ran = await machine.sync("one", "two")
    assert machine.logins == 2
    assert {each["error"]["code"] for each in ran.images} == {"AUTH_ERROR"}
    assert "(AWS_ACCESS_KEY_ID)" in ran.err


async def test_a_login_that_was_never_good_is_not_asked_for_again(machine):
    machine.ecr.auth = BasicAuth({})
    assert (await machine.sync("one", "two")).status == 4
    assert machine.logins == 1
    machine.journal.matching(status=401).exactly(2)


@pytest.mark.parametrize("takes", [0.01, 5.0])
@pytest.mark.parametrize("scheme", ["basic", "token"])
async def test_many_who_are_refused_at_once_share_one_new_login(machine, scheme, takes):
    """Each gets its 401 while the first asks for a login, or after it: nobody takes the new one for
    refused. What is sent once the first 401 was heard carries another login.
    """
    machine.use(scheme, one_scope=True)
    machine.after(12, machine.end_logins)
    machine.reachable[PRIVATE].change_links(**FAR)
    machine.reachable[ECR].change_links(down=Link(latency=takes))
    ran = await machine.sync(*MANY)
    assert (ran.status, machine.logins) == (0, 2), ran.err
    refused = machine.journal.matching(status=401)
    assert len(refused) > 3
    first: dict[str, float] = {}
    for each in refused:
        heard = first.setdefault(each.header("authorization"), each.time) + 0.1
        assert each.time < heard + 0.101  # it was sent before, and took 0.1 s


@pytest.mark.parametrize("scheme", ["basic", "token"])
async def test_who_waits_for_its_turn_does_not_send_a_login_that_was_refused_meanwhile(
    machine, scheme
):
    """The registry takes one request at a time, and all others wait with their logins in hand."""
    machine.use(scheme)
    machine.after(12, machine.end_logins if scheme == "basic" else machine.end_tokens)
    ran = await machine.sync(*MANY, max_concurrent=1)
    assert (ran.status, machine.logins) == (0, 2), ran.err
    refused = [
        each.header("authorization")
        for each in machine.journal.matching(status=401)
        if each.kind != "token"  # requests for tokens do not wait for a turn
    ]
    assert len(refused) == len(set(refused))  # each login, and none, once
    assert len(refused) == 2 if scheme == "basic" else len(refused) > 2


class Ended(BasicAuth):
    """ECR's answer to a password that has ended."""

    def check(self, request, needs):
        if not request.header("authorization"):
            return super().check(request, needs)
        return error(400, "DENIED", f"Your authorization token has expired. {'x' * 5000}")


@pytest.mark.parametrize("is_configured", [False, True])
async def test_a_password_that_has_ended_is_shown_once(machine, is_configured):
    """All wait for the first answer, whose text comes later than its head."""
    machine.ecr.auth = Ended({})
    machine.reachable[PRIVATE].change_links(down=Link(latency=0.1, bandwidth=1000))
    ran = await machine.sync(*MANY, **(LOGIN if is_configured else {}))
    machine.journal.matching(header={"authorization": "Basic *"}).exactly(1)
    assert (ran.status, machine.logins) == (4, 0 if is_configured else 1)


@contextlib.contextmanager
def slow_dials(world):
    """Let each further connection to the registry take 0.3 s longer than the one before."""
    connect, dials = world.connect, itertools.count()

    async def dial(host, port):
        if host == PRIVATE:
            await anyio.sleep(0.3 * next(dials))
        return await connect(host, port)

    with mock.patch.object(world, "connect", dial):
        yield


@pytest.mark.parametrize("is_configured", [False, True])
async def test_a_login_that_is_refused_during_a_dial_is_not_sent(machine, is_configured):
    """A password that is refused again and again locks its account."""
    fields = {}
    if is_configured:
        machine.ecr.auth = BasicAuth(USERS)
        fields = LOGIN
    machine.after(2, machine.ecr.auth.users.clear if is_configured else machine.end_logins)
    with slow_dials(machine.world):
        ran = await machine.sync("one", "two", "three", **fields)
    machine.journal.matching(status=401).exactly(2)  # without a login, and with the first one
    assert (ran.status, machine.logins) == ((4, 0) if is_configured else (0, 2))


async def test_a_login_that_is_refused_by_a_token_service_is_not_sent_there_again(machine, tokens):
    """Three more tokens are asked for at once, and one exchange hears the 401 while others dial."""
    machine.ecr.auth = tokens
    machine.after(2, lambda: tokens.users.update({USER: "another"}))
    with slow_dials(machine.world):
        ran = await machine.sync(*MANY, **LOGIN)
    refused = [each.kind for each in machine.journal.matching(status=401)]
    assert (ran.status, refused.count("token")) == (4, 1)


async def test_a_chain_that_finds_nothing_is_told_once_and_stops_its_registry(machine):
    machine.unset("AWS_ACCESS_KEY_ID")
    ran = await machine.sync("one", "two", auth_type="ecr")
    assert (ran.status, machine.aws.requests) == (4, ["imds", "imds"])
    assert "looked at AWS_ACCESS_KEY_ID, " in ran.err
    assert ran.err.count("hint: give this machine or container a role") == 1
    machine.journal.matching().exactly(1)


async def test_a_login_service_is_asked_without_following_where_it_leads(machine):
    elsewhere = machine.world.registry("elsewhere.test")
    moved = Response(302, [("Location", "http://elsewhere.test/")], b"")
    answer_first(machine.aws, moved)
    assert f"AWS_ACCESS_KEY_ID at {ECR}: status 302" in await machine.refused(PRIVATE)
    elsewhere.journal.matching().none()


@pytest.mark.parametrize("name", ["metadata.test", "169.254.129.2", "127.0.0.1"])
async def test_plain_http_of_a_cloud_is_a_metadata_service_which_no_proxy_sees(machine, name):
    machine.unset("AWS_ACCESS_KEY_ID")
    machine.set(HTTP_PROXY="http://proxy.test:3128")
    machine.set(AWS_EC2_METADATA_SERVICE_ENDPOINT=f"http://{name}:8081/")
    machine.answer(machine.aws, name, scheme="http", port=8081)
    machine.aws.instance_role = "worker"
    assert await machine.who() == "instance:worker"


async def test_an_answer_that_is_too_long_for_a_login_is_an_error(machine):
    answer_first(machine.aws, Response(200, [], bytes(2 << 20)))
    assert "longer than" in await machine.refused(PRIVATE)


# `auth check`.


class Checked(Mirror):
    async def check(self, *repositories, **registries):
        """Ask in JSON; return the run, and its rows by repository."""
        self.clear()
        text = self.text(*({"from": name} for name in repositories), registries=registries)
        ran = await self.world.run("auth", "check", "--json", "-v", "-c", "-", stdin=text)
        Draft202012Validator(report_schema()).validate(ran.report)
        assert set(ran.report) == {"schema", "access"}
        rows = ran.report["access"]
        assert [row["repository"] for row in rows] == sorted(row["repository"] for row in rows)
        return ran, {row["repository"]: row for row in rows}

    def error(self, rows, end, repository="app"):
        found = rows[f"{end}.test/{repository}"]["error"]
        return found and found["code"]


def asked(place):
    """What a registry was asked, in order, with what it said."""
    return [
        f"{each.method} {each.target.split('?_state')[0]} {each.status}"
        for each in place.journal.entries
    ]


@pytest.fixture
def checked(world, tmp_path):
    """Return a function that makes a mirror whose source has these repositories."""

    def make(*repositories, target=None, **of):
        mirror = Checked(world, tmp_path, of={"target": target or {}, "source": of})
        for name in repositories or ("app",):
            mirror.push("v1", repository=name)
        return mirror

    return make


def row(end, **more):
    return {
        "repository": f"{end}.test/app",
        "rights": "pull",
        **dict.fromkeys(("source", "expires", "error")),
        **more,
    }


async def test_each_end_is_asked_as_a_run_would_and_no_manifest_is_touched(checked):
    tokens = TokenService(USERS, now=anyio.current_time)
    mirror = checked(auth=tokens, target={"auth": BasicAuth(USERS)})
    mirror.seed.image().load_into(mirror.target.app, "app", "v1")
    ran, rows = await mirror.check("app", **with_login("target"))
    assert ran.status == 0
    listing, session = "/v2/app/tags/list?n=1", "/v2/app/blobs/uploads/"
    first = "00000000-0000-4000-8000-000000000001"
    paths = [each.split("?")[0] for each in asked(mirror.source)]
    assert paths == ["GET /v2/app/tags/list", "GET /token", "GET /v2/app/tags/list"]
    assert asked(mirror.target) == [
        f"GET {listing} 401",
        f"GET {listing} 200",
        f"POST {session} 202",
        f"DELETE {session}{first} 204",
    ]
    origin = "credentials of registry 'target'"
    assert rows == {
        "source.test/app": row("source"),
        "target.test/app": row("target", source=origin, rights="pull,push"),
    }


async def test_fifty_repositories_need_seven_tokens_and_one_bare_request(checked, tokens):
    names = [f"team/app{number}" for number in range(50)]
    mirror = checked(*names, auth=tokens)
    ran, rows = await mirror.check(*names, **with_login())
    assert (ran.status, len(rows), tokens.requests) == (0, 100, 7)
    mirror.source.journal.matching("GET", "tag_list").exactly(51)


async def test_refused_credentials_are_told_for_each_repository_and_shown_once(checked, tokens):
    tokens.users[USER] = "another"
    mirror = checked("one", "two", auth=tokens)
    ran, rows = await mirror.check("one", "two", **with_login())
    assert (ran.status, tokens.requests, len(mirror.source.journal.entries)) == (4, 1, 2)
    for name in ("one", "two"):
        assert mirror.error(rows, "source", name) == "AUTH_ERROR"
        assert mirror.error(rows, "target", name) is None
    assert ran.err.count("error: AUTH_ERROR: check source.test/") == 2
    assert ran.err.count("hint: check") == 1


async def test_an_unusable_end_does_not_hide_the_others(checked, clean_env, monkeypatch):
    """A credential file that cannot be read, and a registry that cannot be reached."""
    (clean_env / "config.json").mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(clean_env))
    mirror = checked()
    alone = {"auth_type": "anonymous"}
    down = {"url": "http://nobody.test", **alone}
    target = {"url": "http://target.test", **alone}
    mirror.write({"from": "app"}, registries={"target": target, "down": down})
    ran = await mirror.world.run("auth", "check", "-c", str(mirror.file))
    absent = "the repository does not exist yet, so no push was tried"
    assert (ran.status, ran.out) == (4, f"ok  target.test/app  -  (anonymous, {absent})\n")
    assert f"error: AUTH_ERROR: check source.test/app: {clean_env}/config.json " in ran.err
    assert "error: NETWORK_ERROR: check nobody.test/app: " in ran.err
    assert asked(mirror.source) == []


async def test_who_may_only_pull_is_told_at_a_target(checked):
    tokens = TokenService(
        USERS, grants=lambda user, access: access.action == "pull", now=anyio.current_time
    )
    mirror = checked(target={"auth": tokens})
    mirror.seed.image().load_into(mirror.target.app, "app", "v1")
    ran, rows = await mirror.check("app", **with_login("target"))
    assert (ran.status, mirror.error(rows, "target")) == (4, "AUTH_ERROR")
    assert rows["target.test/app"]["rights"] == "pull"
    assert "(credentials of registry 'target')" in ran.err
    mirror.target.journal.matching("DELETE").none()


@pytest.mark.parametrize("status", [401, 403])
async def test_where_a_listing_is_hidden_the_upload_decides(checked, status):
    """As of a registry that lists nothing to those who may push (docs/design.md section 9)."""
    mirror = checked()
    mirror.seed.image().load_into(mirror.target.app, "app", "v1")
    hidden = error(status, "DENIED", "requested access to the resource is denied")
    for place in (mirror.source, mirror.target):
        place.app.intercept = lambda request: hidden if request.kind == "tag_list" else None
    ran, rows = await mirror.check("app")
    found = rows["target.test/app"]
    assert (found["error"], found["rights"]) == (None, "push")
    mirror.target.journal.matching("POST").exactly(1)
    mirror.target.journal.matching("DELETE").exactly(1)
    assert (ran.status, mirror.error(rows, "source")) == (4, "AUTH_ERROR")


async def test_what_is_missing_at_a_source_is_an_error(checked):
    mirror = checked()
    ran, rows = await mirror.check("another")
    assert (ran.status, mirror.error(rows, "source", "another")) == (4, "SOURCE_ERROR")


@pytest.mark.provokes("source_written")
async def test_a_repository_at_both_ends_is_asked_once_and_an_unused_registry_never(checked):
    mirror = checked("a", "b")
    back = {"targets": ["source"]}
    mirror.write({"from": "a", "to": "b", **back}, {"from": "b", "to": "c", **back})
    ran = await mirror.world.run("auth", "check", "--json", "-q", "-c", str(mirror.file))
    rights = {each["repository"]: each["rights"] for each in ran.report["access"]}
    assert rights == {"source.test/a": "pull", "source.test/b": "pull,push", "source.test/c": ""}
    mirror.source.journal.matching("GET", "tag_list").exactly(3)
    mirror.target.journal.matching().none()
    assert [path.name for path in mirror.directory.iterdir()] == ["mirror.yaml"]


# Logins where anybody may read.


class Zot(BasicAuth):
    """Anybody reads, and `GET /v2/` says in a 200 how a login is taken (CheckVersionSupport of zot)."""

    asks = True

    def check(self, request, needs):
        if request.kind != "ping" or request.header("authorization"):
            return super().check(request, needs)
        headers = [("WWW-Authenticate", 'basic realm="zot"')] if self.asks else []
        return Response(200, headers, b"{}")


@pytest.mark.provokes("credential_unasked")
@pytest.mark.parametrize(
    ("end", "repository", "asks"),
    [
        ("source", "there", True),
        ("source", "new", False),
        ("target", "there", True),
        ("target", "new", False),
    ],
)
async def test_a_wrong_password_is_found_where_anybody_may_read(checked, end, repository, asks):
    auth = Zot({USER: "another"}, anonymous_pull=True)
    auth.asks = asks
    mirror = (
        checked("there", target={"auth": auth}) if end == "target" else checked("there", auth=auth)
    )
    place = mirror.target if end == "target" else mirror.source
    mirror.seed.image().load_into(place.app, "there", "v1")
    ran, rows = await mirror.check(repository, **with_login(end))
    assert (ran.status, mirror.error(rows, end, repository)) == (4, "AUTH_ERROR")
    assert f"(credentials of registry '{end}')" in ran.err
    found = rows[f"{end}.test/{repository}"]
    assert (found["source"], found["rights"]) == (None, "pull" if repository == "there" else "")
    shown = [entry for entry in place.journal.entries if entry.authorization.scheme]
    assert len(shown) == 1, "a refused password is not sent again"


@pytest.mark.provokes("ping", "credential_unasked")
async def test_a_login_is_proven_once_where_anybody_may_read(checked):
    mirror = checked("one", "two", target={"auth": Zot(USERS, anonymous_pull=True)})
    ran, rows = await mirror.check("one", "two", **with_login("target"))
    assert ran.status == 0
    for name in ("one", "two"):
        found = rows[f"target.test/{name}"]
        assert found["source"] == "credentials of registry 'target'"
        assert (found["rights"], found["error"]) == ("", None)
    assert sorted(asked(mirror.target)) == [
        "GET /v2/ 200",
        "GET /v2/ 200",
        "GET /v2/one/tags/list?n=1 404",
        "GET /v2/two/tags/list?n=1 404",
    ]


@pytest.mark.provokes("ping")
@pytest.mark.parametrize("password", ["another", PASSWORD])
async def test_a_token_is_asked_for_with_the_login_where_anybody_may_read(checked, password):
    """The registry lets anybody list, and sends to a token service who asks for `/v2/`."""

    class Open(TokenService):
        def check(self, request, needs):
            return None if request.kind == "tag_list" else super().check(request, needs)

    tokens = Open({USER: password}, now=anyio.current_time)
    mirror = checked(auth=tokens)
    ran, rows = await mirror.check("app", **with_login())
    assert asked(mirror.source)[:2] == ["GET /v2/app/tags/list?n=1 200", "GET /v2/ 401"]
    assert tokens.requests == 1
    is_wrong = password == "another"
    assert (ran.status, mirror.error(rows, "source")) == (
        (4, "AUTH_ERROR") if is_wrong else (0, None)
    )
    origin = None if is_wrong else "credentials of registry 'source'"
    assert rows["source.test/app"]["source"] == origin


@pytest.mark.provokes("ping")
@pytest.mark.parametrize("status", [401, 403, 404])
async def test_where_anybody_may_read_what_is_refused_at_the_root_is_the_login(checked, status):
    """A registry without a root tells nothing."""
    mirror = checked("app")
    mirror.source.app.faults.on("GET", "ping").status(status)
    ran, rows = await mirror.check("app", **with_login())
    expected = (0, None) if status == 404 else (4, "AUTH_ERROR")
    assert (ran.status, mirror.error(rows, "source")) == expected


@pytest.mark.provokes("ping", "credential_unasked")
async def test_lines_for_people_say_the_same(machine, world):
    Seed(1).image().load_into(machine.target.app, "app", "v1")
    registries = {"source": {"url": PRIVATE}, "target": {"url": "http://target.test", **LOGIN}}
    text = document(registries, {"from": "app"}, {"from": "app", "to": "two"})
    ran = await world.run("auth", "check", "-q", "-c", "-", stdin=text)
    assert (ran.status, ran.err) == (0, "")
    found = "anonymous, no login needed, found: credentials of registry 'target'"
    absent = "the repository does not exist yet, so no push was tried"
    assert sorted(ran.out.splitlines()) == [
        f"ok  {PRIVATE}/app  pull  (AWS_ACCESS_KEY_ID)",
        f"ok  target.test/app  pull,push  ({found})",
        f"ok  target.test/two  -  ({found}, {absent})",
    ]


async def test_a_missing_ecr_repository_comes_with_the_command_that_creates_it(machine, world):
    Seed(1).image().load_into(machine.target.app, "team/app", "v1")
    machine.journal.clear()
    text = document({"source": machine.target, "ecr": {"url": PRIVATE}}, {"from": "team/app"})
    ran = await world.run("auth", "check", "--json", "-c", "-", stdin=text)
    (found,) = (row for row in ran.report["access"] if row["repository"].startswith(PRIVATE))
    assert (ran.status, found["error"]["code"], found["error"]["status"]) == (
        4,
        "TARGET_ERROR",
        404,
    )
    assert "hint: create the repository, " in ran.err
    assert "team/app --registry-id 123456789012 --region eu-west-1\n" in ran.err
    assert (found["source"], found["rights"]) == ("AWS_ACCESS_KEY_ID", "")
    assert [entry.method for entry in machine.journal.entries] == ["GET", "GET"]


@pytest.mark.parametrize("words", [("auth",), ("auth", "chek", "-c", "-"), ("auth", "check")])
async def test_what_is_no_such_command_is_said(world, words):
    ran = await world.run(*words)
    assert ran.status == 3
    assert "hint: see `regsync auth --help`" in ran.err
