"""Which registry gets a login of a cloud, who shares it, and when it is renewed: a cloud of one
function, in place of AWS, Azure and Google.
"""

from __future__ import annotations

import json
import math
import os
from types import SimpleNamespace

import anyio
import pytest

from _regsync import edge
from _regsync.auth import aws, azure, google
from _regsync.auth.cloud import Access, CloudLogin, Clouds, Login, Request
from _regsync.auth.credentials import Credential
from _regsync.auth.tokens import Grant
from _regsync.config import Registry
from _regsync.errors import AuthError, ConnectFailed, SyncError
from _regsync.providers import kind_of

pytestmark = pytest.mark.virtual_time

ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
GAR, GCR, ACR = "europe-docker.pkg.dev", "gcr.io", "mine.azurecr.io"
NEW_YEAR, HOUR = 1767225600.0, 3600.0
DOCKER = "/home/someone/.docker/config.json"
IN_FILE = {
    DOCKER: json.dumps({"auths": {ECR: {"username": "file", "password": "hunter2"}}}).encode()
}


class Cloud:
    """A cloud's module: logins `p1`, `p2`, ... that last `life` seconds, or `given` in turn."""

    def __init__(self, *given, present=True, life=math.inf):
        self.given = list(given)
        self.is_present = present
        self.life = life
        self.asked = []  # each time: the registry, and whether it was a guess
        self.takes = 0.0  # seconds
        self.looked = 0

    def is_configured(self, access):
        self.looked += 1
        return self.is_present

    async def log_in(self, access, registry, *, probing_metadata):
        self.asked.append((registry.authority, probing_metadata))
        await anyio.sleep(self.takes)
        if self.given:
            found = self.given.pop(0)
            if isinstance(found, SyncError):
                raise found
            return found
        return Login(password(len(self.asked)), wall() + self.life)

    def login(self, **fields):
        made = find(self, **fields)
        assert isinstance(made, CloudLogin)
        return made


def password(number):
    return Credential("AWS", f"p{number}", found_at="a cloud of the tests")


def registry(host=ECR, **fields):
    kind = kind_of(host, fields.get("auth_type"))
    fields = {"alias": "mine", "scheme": "https", "port": 443, "kind": kind, **fields}
    return Registry(host=host, **fields)


async def nobody_answers(*_):
    raise ConnectFailed("nobody is there")


def access(read=lambda path: None):
    return Access(read, nobody_answers)


def wall():
    return NEW_YEAR + anyio.current_time()


@pytest.fixture(autouse=True)
def world():
    world = edge.current()._replace(environ={"HOME": "/home/someone"}, wall=wall)
    with edge.using(world):
        yield world


def find(cloud, host=ECR, files=None, **fields):
    made = Clouds(access(), lambda name: cloud)
    return made.find(registry(host, **fields), "app", (files or {}).get)


def real(name):
    return {"aws": aws, "azure": azure, "google": google}[name]


# Which login.


async def test_its_own_variables_or_files_come_before_the_docker_config():
    cloud = Cloud()
    assert isinstance(find(cloud, files=IN_FILE), CloudLogin)
    cloud.is_present = False
    assert find(cloud, files=IN_FILE).username == "file"
    assert cloud.asked == []
    assert await cloud.login(files={}).credential() == password(1)
    assert cloud.asked == [(ECR, True)], "the metadata service comes last, and is guessed"


async def test_a_named_method_is_the_whole_chain_and_no_other_source():
    cloud = Cloud(present=False)
    await cloud.login(files=IN_FILE, auth_type="ecr").credential()
    assert (cloud.asked, cloud.looked) == ([(ECR, False)], 0)
    for method in ("anonymous", "basic", "static_token", "docker_config"):
        assert not isinstance(find(cloud, files=IN_FILE, auth_type=method), CloudLogin)
    assert cloud.looked == 0


@pytest.mark.parametrize("host", [ACR, ECR, GAR])
async def test_without_a_home_nothing_is_read_below_the_current_directory(host, monkeypatch):
    """Where anybody might have put it."""
    monkeypatch.setattr(edge, "home", lambda: None)
    names = []
    made = Clouds(access(names.append), real).find(registry(host), "app", names.append)
    assert await made.credential() is None
    assert [name for name in names if not name.startswith("/")] == []


async def test_on_windows_googles_file_is_below_appdata(monkeypatch, world):
    monkeypatch.setattr(google, "os", SimpleNamespace(name="nt", path=os.path))
    path = "/appdata/gcloud/application_default_credentials.json"
    there = access({path: b"{}"}.get)
    assert not google.is_configured(there)
    with edge.using(world._replace(environ={"APPDATA": "/appdata"})):
        assert google.is_configured(there)


@pytest.mark.parametrize("host", ["registry.example", "ghcr.io", "docker.io", f"{ECR}.example"])
async def test_a_host_of_nobody_looks_at_no_cloud(host):
    cloud = Cloud()
    assert find(cloud, host) is None
    assert cloud.looked == 0


async def test_a_clouds_login_never_goes_over_plain_http():
    cloud = Cloud()
    with pytest.raises(AuthError, match="plain HTTP") as caught:
        find(cloud, "registry.example", scheme="http", auth_type="ecr")
    assert caught.value.fatal
    assert find(cloud, scheme="http") is None
    assert isinstance(find(cloud, "localhost", scheme="http", auth_type="acr"), CloudLogin)


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        (ECR, ECR.replace("123456789012", "210987654321"), True),
        (ECR, ECR.replace("eu-west-1", "us-east-1"), False),
        (GAR, GCR, True),
        (ACR, "other.azurecr.io", False),
    ],
)
async def test_a_login_is_shared_by_those_it_holds_for(first, second, is_shared):
    made = Clouds(access(), lambda name: Cloud())
    one, two, again = (made.find(registry(host), "app", {}.get) for host in (first, second, first))
    assert (one is two) is is_shared
    assert one is again
    other = registry(ECR, auth_type="ecr", cloud_profile="other")
    assert made.find(other, "app", {}.get) not in (one, two)


# When, and how often.


async def together(count, ask):
    """Let so many ask at once; return what each got, or the message of its error."""
    told = []

    async def one():
        try:
            told.append(await ask())
        except SyncError as error:
            told.append(error.message)

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(one)
    return told


async def test_all_who_wait_share_one_login_and_its_error():
    cloud = Cloud(AuthError("no"), Login(password(2), math.inf))
    cloud.takes, login = 1.0, cloud.login()
    for expected in ("no", password(2)):
        assert await together(20, login.credential) == [expected] * 20
    assert len(cloud.asked) == 2


async def test_a_cancelled_asker_leaves_the_asking_to_the_next():
    cloud = Cloud()
    cloud.takes, login, told = 10.0, cloud.login(), []

    async def ask():
        told.append(await login.credential())

    async with anyio.create_task_group() as group:
        with anyio.move_on_after(1):
            group.start_soon(ask)
            await login.credential()
    with anyio.move_on_after(1):
        await login.credential(password(2))
    assert told == [password(2)]
    assert await login.credential() == password(4), "the one that was refused serves nobody"
    assert len(cloud.asked) == 4


@pytest.mark.parametrize("life", [12 * HOUR, 40.0])
async def test_a_login_is_renewed_before_it_ends(life):
    login = Cloud(life=life).login()
    await login.credential()
    await anyio.sleep(life * 0.9 - 0.5)
    assert await login.credential() == password(1)
    await anyio.sleep(1.0)
    assert await login.credential() == password(2)
    assert login.expires == NEW_YEAR + anyio.current_time() + life


@pytest.mark.parametrize("life", [math.inf, -HOUR], ids=["without end", "by another clock"])
async def test_a_login_whose_end_is_unknown_serves_until_it_is_refused(life):
    login = Cloud(life=life).login()
    await login.credential()
    await anyio.sleep(1000 * HOUR)
    assert await login.credential() == password(1)
    assert await login.credential(password(1)) == password(2)


async def test_a_login_refused_while_its_renewal_fails_serves_nobody():
    cloud = Cloud(life=HOUR)
    login = cloud.login()
    await login.credential()
    cloud.given, cloud.takes = [ConnectFailed("down")], 5.0
    await anyio.sleep(0.95 * HOUR)
    refused = iter([None, password(1)])

    async def ask():
        sent = next(refused)
        await anyio.sleep(1 if sent else 0)
        return await login.credential(sent)

    assert await together(2, ask) == ["down", "down"]
    assert len(cloud.asked) == 2
    assert await login.credential() == password(3)


async def test_the_old_login_serves_while_it_lives_when_there_is_no_new_one():
    cloud = Cloud(life=HOUR)
    login = cloud.login()
    await login.credential()
    cloud.given = [ConnectFailed("down"), ConnectFailed("down"), ConnectFailed("still down")]
    await anyio.sleep(0.95 * HOUR)
    for _ in range(5):
        assert await login.credential() == password(1)
    assert len(cloud.asked) == 2, "the next is asked for a minute later"
    await anyio.sleep(61)
    assert await login.credential() == password(1)
    await anyio.sleep(120)
    with pytest.raises(ConnectFailed, match="still down"):
        await login.credential()
    assert await login.credential() == password(5)


async def test_a_metadata_service_that_is_absent_is_asked_once_a_run():
    cloud = Cloud(AuthError("nobody"), present=False)
    cloud.takes = 1.0
    made = Clouds(access(), lambda name: cloud)
    hosts = iter([ECR, ECR.replace("1234", "4321")] * 2)

    async def ask():
        return await made.find(registry(next(hosts, ECR)), "app", {}.get).credential()

    began = anyio.current_time()
    assert await together(4, ask) == [None] * 4
    assert await ask() is None
    assert (len(cloud.asked), anyio.current_time() - began) == (1, 1.0)
    made.reload()
    assert await ask() == password(2), "it has come later"


async def test_what_was_guessed_right_is_renewed_as_what_it_is():
    cloud = Cloud(present=False, life=HOUR)
    login = cloud.login()
    await login.credential()
    await anyio.sleep(HOUR)
    await login.credential()
    assert [is_guess for _, is_guess in cloud.asked] == [True, False]


async def test_an_identity_that_comes_later_is_found_by_the_next_run():
    cloud = Cloud(present=False)
    made = Clouds(access(), lambda name: cloud)
    for _ in range(2):
        assert isinstance(made.find(registry(), "app", IN_FILE.get), Credential)
    assert cloud.looked == 1, "once a run"
    cloud.is_present = True
    made.reload()
    assert isinstance(made.find(registry(), "app", IN_FILE.get), CloudLogin)


SECRET = "hunter2"


@pytest.mark.parametrize(
    "held",
    [
        aws.Keys("AKIA", SECRET, SECRET, "a profile"),
        azure._Token("az login", SECRET),
        google._CredentialFile(access(), "key.json", {"private_key": SECRET}),
        Request("GET", f"https://a/{SECRET}", [("Authorization", SECRET)], SECRET.encode()),
        Grant(f"Bearer {SECRET}", frozenset(), 0.0, 0.0),
        Login(Credential("me", SECRET, SECRET, SECRET), 0.0),
    ],
    ids=lambda held: type(held).__name__,
)
async def test_what_holds_a_secret_does_not_show_it(held):
    assert SECRET not in f"{held!r} {held} {[held]}"
