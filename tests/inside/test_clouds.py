"""Which login is asked for where, how often and when: a cloud of one function, registries on a
clock that jumps.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import anyio
import pytest

from _regsync.auth.cloud import CloudEnvironment, CloudLogin, CloudModule, Clouds, Login
from _regsync.auth.credentials import Credential
from _regsync.config import Registry
from _regsync.edge import using
from _regsync.errors import AuthError, ConfigError, ConnectFailed, ContentError, SyncError, TimedOut
from _regsync.providers import kind_of
from _regsync.registry import runs
from _regsync.registry.client import Machine
from _regsync.registry.runs import Transport
from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.exchange import Reception, Site
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, document, virtual
from tests.inside.a_cloud import ECR, Cloud

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

OTHER_ACCOUNT = ECR.replace("123456789012", "210987654321")
OTHER_REGION = ECR.replace("eu-west-1", "us-east-1")
GAR, GCR, ACR = "europe-docker.pkg.dev", "gcr.io", "mine.azurecr.io"
NEW_YEAR = 1767225600.0
HOUR = 3600.0


def module_of(name: str) -> CloudModule:
    """Find a cloud's module as the transport does, or the test's own (`cloud`)."""
    return runs._cloud(name)


def registry(host: str = ECR, **fields: Any) -> Registry:
    fields = {
        "alias": "mine",
        "scheme": "https",
        "port": 443,
        "kind": kind_of(host, fields.get("auth_type")),
        **fields,
    }
    return Registry(host=host, **fields)


def machine(**files: bytes) -> CloudEnvironment:
    async def fetch(*given: object) -> Any:
        raise AssertionError("nothing is asked")

    return CloudEnvironment(
        {}, "/home/someone", files.get, lambda: NEW_YEAR + anyio.current_time(), fetch
    )


def found(
    host: str = ECR, files: Mapping[str, bytes] | None = None, **fields: Any
) -> Credential | CloudLogin | None:
    return Clouds(machine(), module_of).find(registry(host, **fields), "app", (files or {}).get)


def chain(**fields: Any) -> CloudLogin:
    made = found(**fields)
    assert isinstance(made, CloudLogin)
    return made


# Which login.

DOCKER = "/home/someone/.docker/config.json"
IN_FILE = {
    DOCKER: json.dumps({"auths": {ECR: {"username": "file", "password": "hunter2"}}}).encode()
}


async def test_its_own_variables_or_files_come_before_the_docker_config(cloud: Cloud) -> None:
    assert isinstance(found(files=IN_FILE), CloudLogin)
    cloud.here = False
    credential = found(files=IN_FILE)
    assert isinstance(credential, Credential)
    assert credential.username == "file"
    assert cloud.asked == []


@pytest.mark.parametrize(
    "broken", [ConfigError("not readable"), AuthError("not in form", fatal=True)]
)
async def test_its_own_broken_file_is_a_file_of_its_own(
    cloud: Cloud, broken: SyncError | ConfigError
) -> None:
    cloud.broken = broken
    await chain(files=IN_FILE).credential()
    assert cloud.asked == [(ECR, False)], (
        "the whole chain, which meets the file again and says what is wrong"
    )


async def test_the_metadata_service_comes_last_and_is_guessed(cloud: Cloud) -> None:
    cloud.here = False
    assert await chain(files={}).credential() == cloud.credential(1)
    assert cloud.asked == [(ECR, True)]


async def test_a_named_method_is_the_whole_chain_and_no_other_source(cloud: Cloud) -> None:
    cloud.here = False
    await chain(files=IN_FILE, auth_type="ecr").credential()
    assert (cloud.asked, cloud.looked) == ([(ECR, False)], 0)


@pytest.mark.parametrize(
    ("host", "path"),
    [
        (ACR, ".azure/azureProfile.json"),
        (ECR, ".aws/credentials"),
        (GAR, ".config/gcloud/application_default_credentials.json"),
    ],
)
async def test_a_file_that_cannot_be_read_fails_its_own_registry_alone(
    host: str, path: str
) -> None:
    def read(name: str) -> bytes | None:
        if name == f"/home/someone/{path}":
            raise ConfigError(f"{name}: Permission denied")
        return None

    async def fetch(*given: object) -> Any:
        raise ConnectFailed("nobody is there")

    ends = Clouds(machine()._replace(read=read, fetch=fetch), module_of)
    made = ends.find(registry(host), "app", read)
    assert isinstance(made, CloudLogin)
    with pytest.raises(AuthError, match="Permission denied") as caught:
        await made.credential()
    assert caught.value.fatal


@pytest.mark.parametrize("host", [ACR, ECR, GAR])
async def test_without_a_home_nothing_is_read_below_the_current_directory(host: str) -> None:
    """Where anybody might have put it."""

    def read(name: str) -> bytes | None:
        names.append(name)
        return None

    async def fetch(*given: object) -> Any:
        raise ConnectFailed("nobody is there")

    names = list[str]()
    made = Clouds(machine()._replace(home=None, read=read, fetch=fetch), runs._cloud).find(
        registry(host), "app", read
    )
    assert isinstance(made, CloudLogin)
    assert await made.credential() is None
    assert [name for name in names if not name.startswith("/")] == []


@pytest.mark.parametrize("method", ["anonymous", "basic", "static_token", "docker_config"])
async def test_another_method_keeps_the_cloud_out(cloud: Cloud, method: str) -> None:
    assert not isinstance(found(files=IN_FILE, auth_type=method), CloudLogin)
    assert (cloud.asked, cloud.looked) == ([], 0)


@pytest.mark.parametrize(
    "host", ["registry.example", "ghcr.io", "docker.io", "evil-azurecr.io", f"{ECR}.example"]
)
async def test_a_host_of_nobody_looks_at_no_cloud(cloud: Cloud, host: str) -> None:
    assert found(host) is None
    assert cloud.looked == 0


@pytest.mark.rule("R9")
async def test_a_clouds_login_never_goes_over_plain_http(cloud: Cloud) -> None:
    with pytest.raises(AuthError, match="plain HTTP") as caught:
        found("registry.example", scheme="http", auth_type="ecr")
    assert caught.value.fatal
    assert found(ECR, scheme="http") is None
    assert isinstance(found("localhost", scheme="http", auth_type="acr"), CloudLogin)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        pytest.param(ECR, OTHER_ACCOUNT, True, id="accounts-of-a-region"),
        pytest.param(ECR, OTHER_REGION, False, id="regions"),
        pytest.param(GAR, GCR, True, id="google"),
        pytest.param(ACR, "other.azurecr.io", False, id="azure"),
    ],
)
async def test_a_login_is_shared_by_those_it_holds_for(
    cloud: Cloud, first: str, second: str, shared: bool
) -> None:
    made = Clouds(machine(), module_of)
    chains = [made.find(registry(host), "app", {}.get) for host in (first, second, first)]
    assert (chains[0] is chains[1]) is shared
    assert chains[0] is chains[2]
    assert (
        made.find(registry(ECR, auth_type="ecr", cloud_profile="other"), "app", {}.get)
        not in chains
    )


# When, and how often.


async def test_all_who_wait_share_one_login_and_its_error(cloud: Cloud) -> None:
    cloud.takes, cloud.given = 1.0, [AuthError("no"), Login(cloud.credential(2), math.inf)]
    one, told = chain(), list[object]()

    async def ask() -> None:
        try:
            told.append(await one.credential())
        except AuthError as error:
            told.append(error.message)

    for expected in ("no", cloud.credential(2)):
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(ask)
        assert told == [expected] * 20
        told.clear()
    assert len(cloud.asked) == 2


async def test_a_cancelled_asker_leaves_the_asking_to_the_next(cloud: Cloud) -> None:
    cloud.takes, one, told = 10.0, chain(), list[object]()

    async def ask() -> None:
        told.append(await one.credential())

    async with anyio.create_task_group() as group:
        with anyio.move_on_after(1):
            group.start_soon(ask)
            await one.credential()
    with anyio.move_on_after(1):
        await one.credential(cloud.credential(2))
    assert told == [cloud.credential(2)]
    assert await one.credential() == cloud.credential(4), "the one that was refused serves nobody"
    assert len(cloud.asked) == 4


@pytest.mark.parametrize(
    ("life", "good"),
    [
        pytest.param(12 * HOUR, 12 * HOUR * 0.9, id="at-nine-tenths"),
        pytest.param(300.0, 240.0, id="a-minute-before"),
        pytest.param(40.0, 20.0, id="a-short-one-half-way"),
    ],
)
async def test_a_login_is_renewed_before_it_ends(cloud: Cloud, life: float, good: float) -> None:
    cloud.life, one = life, chain()
    await one.credential()
    await anyio.sleep(good - 0.5)
    assert await one.credential() == cloud.credential(1)
    await anyio.sleep(1.0)
    assert await one.credential() == cloud.credential(2)
    assert one.expires == NEW_YEAR + anyio.current_time() + life


@pytest.mark.parametrize("life", [math.inf, -HOUR])
async def test_a_login_without_end_or_by_another_clock_serves_until_it_is_refused(
    cloud: Cloud, life: float
) -> None:
    cloud.life, one = life, chain()
    await one.credential()
    await anyio.sleep(1000 * HOUR)
    assert await one.credential() == cloud.credential(1)
    assert await one.credential(cloud.credential(1)) == cloud.credential(2)


async def test_a_login_refused_while_its_renewal_fails_serves_nobody(cloud: Cloud) -> None:
    cloud.life, one = HOUR, chain()
    await one.credential()
    cloud.given, cloud.takes = [ConnectFailed("down")], 5.0
    await anyio.sleep(0.95 * HOUR)
    told = list[object]()

    async def ask(refused: Credential | None) -> None:
        try:
            told.append(await one.credential(refused))
        except ConnectFailed as error:
            told.append(error.message)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, None)
        await anyio.sleep(1)
        group.start_soon(ask, cloud.credential(1))
    assert (told, len(cloud.asked)) == (["down", "down"], 2)
    assert await one.credential() == cloud.credential(3)


async def test_the_old_login_serves_while_it_lives_when_there_is_no_new_one(cloud: Cloud) -> None:
    cloud.life, one = HOUR, chain()
    await one.credential()
    cloud.given = [ConnectFailed("down"), ConnectFailed("down"), ConnectFailed("still down")]
    await anyio.sleep(0.95 * HOUR)
    for _ in range(5):
        assert await one.credential() == cloud.credential(1)
    assert len(cloud.asked) == 2  # the next is asked for a minute later
    await anyio.sleep(61)
    assert await one.credential() == cloud.credential(1)
    await anyio.sleep(120)
    with pytest.raises(ConnectFailed, match="still down"):
        await one.credential()
    assert await one.credential() == cloud.credential(5)


async def test_one_guess_for_a_login_whose_metadata_service_is_absent(cloud: Cloud) -> None:
    cloud.here, cloud.takes, cloud.given = False, 1.0, [None]
    made, told = Clouds(machine(), module_of), list[object]()

    async def ask(host: str) -> None:
        one = made.find(registry(host), "app", {}.get)
        assert isinstance(one, CloudLogin)
        told.append(await one.credential())

    async with anyio.create_task_group() as group:
        for host in (ECR, OTHER_ACCOUNT, ECR, OTHER_ACCOUNT):
            group.start_soon(ask, host)
    assert (told, len(cloud.asked), anyio.current_time()) == ([None] * 4, 1, pytest.approx(1.0))
    await ask(ECR)
    assert len(cloud.asked) == 1


async def test_what_was_guessed_right_is_renewed_as_what_it_is(cloud: Cloud) -> None:
    cloud.here, cloud.life = False, HOUR
    one = chain()
    await one.credential()
    await anyio.sleep(HOUR)
    await one.credential()
    assert [guessed for _, guessed in cloud.asked] == [True, False]


# On the wire.


class Turning(App):
    """A registry that changes its mind about who may come in, once so many logins have been shown
    to it.
    """

    def __init__(
        self, auth: BasicAuth | TokenService, after: int, then: Callable[[], None]
    ) -> None:
        super().__init__(auth=auth)
        self.after, self.then = after, then

    def start(self, request: Request) -> Answer | Reception:
        if request.header("authorization").startswith(("Basic", "Bearer")):
            self.after -= 1
            if self.after == 0:
                self.then()
        return super().start(request)


async def sync(world: Virtual, source: str, *repositories: str, **fields: Any) -> Ran:
    text = document(
        {"source": {"url": f"https://{source}", **fields}, "target": "http://target.test"},
        *({"from": name, "tags": {"glob": ["v1"]}} for name in repositories),
    )
    return await world.run("sync", "--json", "-c", "-", stdin=text)


def serve(world: Virtual, app: App, host: str, *repositories: str, **links: Link) -> Place:
    """Let a registry answer under a cloud's name, with an image in each repository, and another be
    the target.
    """
    place = world.listen(app, host, scheme="https", **links)
    world.registry("target.test")
    for number, name in enumerate(repositories):
        Seed(number).image().load_into(app, name, tag="v1")
    place.journal.clear()
    return place


async def test_fifty_repositories_cost_one_bare_request_and_one_login(cloud: Cloud) -> None:
    names, cloud.takes = [f"team/app{number}" for number in range(50)], 0.2
    async with virtual() as world:
        source = serve(world, App(auth=BasicAuth({"AWS": "p1"})), ECR, *names)
        ran = await sync(world, ECR, *names)
        assert (ran.status, len(ran.images), len(cloud.asked)) == (0, 50, 1)
        source.journal.matching(status=401).exactly(1)
        assert (
            len(source.journal.matching(header={"authorization": "Basic *"}))
            == len(source.journal.entries) - 1
        )


async def test_what_answers_without_a_login_costs_none(cloud: Cloud) -> None:
    async with virtual() as world:
        serve(world, App(), GAR, "p/r/app")
        assert (await sync(world, GAR, "p/r/app")).status == 0
    assert cloud.asked == []


async def test_an_anonymous_pull_waits_a_second_for_metadata_at_most(cloud: Cloud) -> None:
    cloud.here, cloud.takes, cloud.given = False, 1.0, [None]
    async with virtual() as world:
        tokens = TokenService(now=anyio.current_time)
        serve(world, App(auth=tokens), GAR, "p/r/one", "p/r/two")
        ran = await sync(world, GAR, "p/r/one", "p/r/two")
        assert (ran.status, len(cloud.asked), tokens.requests) == (0, 1, 1)
        assert ran.seconds < 1.5


async def test_a_password_that_was_good_is_asked_for_anew_once(cloud: Cloud) -> None:
    users = {"AWS": "p1"}
    async with virtual() as world:
        source = serve(
            world, Turning(BasicAuth(users), 4, lambda: auth.users.update(AWS="p2")), ECR, "app"
        )
        auth = source.app.auth
        assert (await sync(world, ECR, "app")).status == 0
        assert len(cloud.asked) == 2


@pytest.mark.parametrize("takes", [0.01, 1.0])
@pytest.mark.parametrize("scheme", ["basic", "token"])
async def test_many_who_are_refused_at_once_share_one_new_login(
    cloud: Cloud, scheme: str, takes: float
) -> None:
    """Each gets its 401 while the first asks for a login, or after it: nobody takes the new one for
    refused. What is sent once the first 401 was heard carries another login.
    """
    names, users = [f"team/app{number}" for number in range(30)], {"AWS": "p1"}
    cloud.takes = takes
    async with virtual() as world:
        tokens = TokenService(users, anonymous=False, one_scope=True, now=anyio.current_time)
        auth = BasicAuth(users) if scheme == "basic" else tokens

        def turn() -> None:
            auth.users["AWS"] = "p2"

        source = serve(
            world,
            Turning(auth, 20, turn),
            ECR,
            *names,
            up=Link(latency=0.1),
            down=Link(latency=0.1),
        )
        ran = await sync(world, ECR, *names)
        assert (ran.status, len(cloud.asked)) == (0, 2), ran.err
        refused = source.journal.matching(status=401)
        assert len(refused) > 3
        first: dict[str, float] = {}
        for each in refused:
            heard = first.setdefault(each.header("authorization"), each.time) + 0.1
            assert each.time < heard + 0.101  # it was sent before, and took 0.1 s


@pytest.mark.parametrize("scheme", ["basic", "token"])
async def test_who_waits_for_its_turn_does_not_send_a_login_that_was_refused_meanwhile(
    cloud: Cloud, scheme: str
) -> None:
    """The registry takes one request at a time, and all others wait with their logins in hand."""
    names, users = [f"team/app{number}" for number in range(30)], {"AWS": "p1"}
    async with virtual() as world:
        tokens = TokenService(users, anonymous=False, now=anyio.current_time)

        def turn() -> None:
            users.update(AWS="p2")
            auth.users = users
            tokens.revoke()

        auth = BasicAuth(users) if scheme == "basic" else tokens
        source = serve(world, Turning(auth, 20, turn), ECR, *names)
        ran = await sync(world, ECR, *names, max_concurrent=1)
        assert (ran.status, len(cloud.asked)) == (0, 2), ran.err
        refused = [
            each.header("authorization")
            for each in source.journal.matching(status=401)
            if each.kind != "token"  # requests for tokens do not wait for a turn
        ]
        assert len(refused) == len(set(refused))  # each login, and none, once
        assert len(refused) == 2 if scheme == "basic" else len(refused) > 2


@contextlib.contextmanager
def slow_dials(world: Virtual, host: str) -> Iterator[None]:
    """Let each further connection to a host take 0.3 s longer than the one before."""
    connect = world.connect
    dials = itertools.count()

    async def dial(to: str, port: int) -> Any:
        if to == host:
            await anyio.sleep(0.3 * next(dials))
        return await connect(to, port)

    with mock.patch.object(world, "connect", dial):
        yield


CONFIGURED = {"auth_type": "basic", "credentials": {"username": "AWS", "password": "p1"}}


@pytest.mark.parametrize("login", ["cloud", "configured"])
async def test_a_login_that_is_refused_during_a_dial_is_not_sent(cloud: Cloud, login: str) -> None:
    """A password that is refused again and again locks its account."""
    auth = BasicAuth({"AWS": "p1"})
    async with virtual() as world:
        app = Turning(auth, 2, lambda: auth.users.update(AWS="p2"))
        source = serve(world, app, ECR, "one", "two", "three")
        with slow_dials(world, ECR):
            fields = CONFIGURED if login == "configured" else {}
            ran = await sync(world, ECR, "one", "two", "three", **fields)
        source.journal.matching(status=401).exactly(2)  # without a login, and with p1
        assert ran.status == (4 if login == "configured" else 0)
        assert len(cloud.asked) == (0 if login == "configured" else 2)


async def test_a_login_that_is_refused_by_a_token_service_is_not_sent_there_again(
    cloud: Cloud,
) -> None:
    """Three more tokens are asked for at once, and one exchange hears the 401 while others dial."""
    names = [f"team/app{number}" for number in range(30)]
    async with virtual() as world:
        tokens = TokenService({"AWS": "p1"}, anonymous=False, now=anyio.current_time)
        app = Turning(tokens, 2, lambda: tokens.users.update(AWS="p2"))
        source = serve(world, app, ECR, *names)
        with slow_dials(world, ECR):
            ran = await sync(world, ECR, *names, **CONFIGURED)
        refused = [each.kind for each in source.journal.matching(status=401)]
        assert refused.count("token") == 1
        assert ran.status == 4
        assert len(cloud.asked) == 0


async def test_a_password_that_is_refused_twice_stops_the_registry(cloud: Cloud) -> None:
    async with virtual() as world:
        source = serve(
            world,
            Turning(BasicAuth({"AWS": "p1"}), 2, lambda: auth.users.clear()),
            ECR,
            "one",
            "two",
        )
        auth = source.app.auth
        ran = await sync(world, ECR, "one", "two")
        assert len(cloud.asked) == 2
        assert {each["error"]["code"] for each in ran.images} == {"AUTH_ERROR"}
        assert "(a cloud of the tests)" in ran.err


async def test_a_login_that_was_never_good_is_not_asked_for_again(cloud: Cloud) -> None:
    async with virtual() as world:
        source = serve(world, App(auth=BasicAuth({"AWS": "another"})), ECR, "one", "two")
        assert (await sync(world, ECR, "one", "two")).status == 4
        assert len(cloud.asked) == 1
        source.journal.matching(status=401).exactly(2)


async def test_ecr_says_403_to_a_password_that_is_too_old(cloud: Cloud) -> None:
    class Old(App):
        def start(self, request: Request) -> Answer | Reception:
            if (
                self.auth.users["AWS"] == "p2"
                and request.header("authorization") == Cloud.credential(1).basic
            ):
                return error(
                    403,
                    "DENIED",
                    "Your authorization token has expired. Reauthenticate and try again.",
                )
            answer = super().start(request)
            if request.kind == "manifest" and request.header("authorization"):
                self.auth.users["AWS"] = "p2"
            return answer

    async with virtual() as world:
        serve(world, Old(auth=BasicAuth({"AWS": "p1"})), ECR, "app")
        assert (await sync(world, ECR, "app")).status == 0
        assert len(cloud.asked) == 2


def refresh(number: int) -> Login:
    user = "00000000-0000-0000-0000-000000000000"
    return Login(
        Credential(user, identity_token=f"refresh{number}", found_at="a cloud of the tests"),
        math.inf,
    )


async def test_a_refresh_token_that_ended_early_is_got_anew_once(cloud: Cloud) -> None:
    cloud.given = [refresh(1), refresh(2)]
    async with virtual() as world:
        tokens = TokenService(
            refresh_tokens={"refresh1": "refresh1"},
            anonymous=False,
            expires_in=60,
            now=anyio.current_time,
        )

        def turn() -> None:
            tokens.refresh_tokens = {"refresh2": "refresh2"}
            tokens.revoke()

        serve(world, Turning(tokens, 4, turn), ACR, "app")
        ran = await sync(world, ACR, "app")
        assert (ran.status, len(cloud.asked), len(tokens.issued)) == (0, 2, 2)


async def test_a_chain_that_finds_nothing_is_told_once_and_stops_its_registry(cloud: Cloud) -> None:
    cloud.given = [AuthError("looked at a, b and c", hint="give it one", fatal=True)]
    async with virtual() as world:
        source = serve(world, App(auth=BasicAuth({"AWS": "p1"})), ECR, "one", "two")
        ran = await sync(world, ECR, "one", "two")
        assert (ran.status, len(cloud.asked)) == (4, 1)
        assert "looked at a, b and c" in ran.err
        assert "hint: give it one" in ran.err
        source.journal.matching().exactly(1)


# What a cloud's module asks through.


async def exchange(world: Virtual, url: str, **given: Any) -> tuple[int, Mapping[str, str], bytes]:
    def log(level: str, event: str, message: str, **fields: object) -> None:
        logged.append(message)

    logged = list[str]()
    edge = Machine(
        {"HTTP_PROXY": "http://proxy.test:3128"},
        None,
        lambda path: None,
        lambda: 0.5,
        world.wall,
        log,
    )
    with using(world.edge()):
        transport = Transport(edge)
        try:
            return await transport.fetch(None, "GET", url, [("Metadata", "true")], b"", **given)
        finally:
            transport.close()
            assert not any("secret" in line for line in logged), logged


class Answers(Site):
    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.answer = answer

    def start(self, request: Request) -> Answer | Reception:
        request.kind, self.metadata = "token", request.header("metadata")
        return self.answer


@pytest.mark.rule("R2", "R20")
async def test_a_login_service_is_asked_without_following_where_it_leads() -> None:
    async with virtual() as world:
        moved = Response(302, [("Location", "http://elsewhere.test/")], b"")
        place = world.listen(Answers(moved), "169.254.169.254")
        status, headers, _ = await exchange(
            world, "http://169.254.169.254/secret/path?token=secret"
        )
        assert (status, headers["location"]) == (302, "http://elsewhere.test/")
        assert place.app.metadata == "true"
        place.journal.matching().exactly(1)


@pytest.mark.rule("R20")
@pytest.mark.parametrize("name", ["metadata.test", "169.254.129.2", "127.0.0.1"])
async def test_plain_http_of_a_cloud_is_a_metadata_service_which_no_proxy_sees(name: str) -> None:
    async with virtual() as world:
        place = world.listen(Answers(Response(200, [], b"")), name, port=8081)
        assert (await exchange(world, f"http://{name}:8081/"))[0] == 200
        place.journal.matching().exactly(1)


async def test_an_answer_that_is_too_long_for_a_login_is_an_error() -> None:
    async with virtual() as world:
        world.listen(
            Answers(Response(200, [], bytes(2 * 1024 * 1024))), "login.test", scheme="https"
        )
        with pytest.raises(ContentError, match="longer than"):
            await exchange(world, "https://login.test/")


async def test_a_metadata_service_has_the_seconds_that_it_is_given() -> None:
    async with virtual() as world:
        world.listen(Answers(Response(200, [], b"late")), "169.254.169.254", down=Link(latency=5.0))
        with pytest.raises(TimedOut, match="did not answer within 1 s"):
            await exchange(world, "http://169.254.169.254/", seconds=1.0)
        assert anyio.current_time() == pytest.approx(1.0, abs=0.01)
        assert (await exchange(world, "http://169.254.169.254/"))[0] == 200


async def test_a_metadata_service_that_comes_later_is_found_by_the_next_run(cloud: Cloud) -> None:
    cloud.here, cloud.given = False, [None]
    made = Clouds(machine(), module_of)
    one = made.find(registry(), "app", {}.get)
    assert isinstance(one, CloudLogin)
    assert await one.credential() is None
    assert await one.credential() is None
    made.reload()  # as the transport does (`begin`)
    assert await one.credential() == cloud.credential(2)


async def test_an_identity_that_comes_later_is_found_by_the_next_run(cloud: Cloud) -> None:
    cloud.here = False
    made = Clouds(machine(), module_of)
    for _ in range(2):
        assert isinstance(made.find(registry(ECR), "app", IN_FILE.get), Credential)
    assert cloud.looked == 1, "once a run"
    cloud.here = True
    made.reload()
    assert isinstance(made.find(registry(ECR), "app", IN_FILE.get), CloudLogin)
