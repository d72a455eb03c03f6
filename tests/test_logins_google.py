"""Google's logins by application default credentials, and google-auth's word on the same files.

The services (conformance/clouds/google.py) verify signatures, claims and every field by themselves.
"""

from __future__ import annotations

import base64
import calendar
import datetime
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock
from urllib.parse import quote

import anyio
import pytest
from google import auth
from google.auth import _helpers
from google.auth.compute_engine import _metadata

from conformance.clouds.google import CLIENT, HOSTS, METADATA, Google, GoogleTokens, make_key
from conformance.messages import Response
from conformance.tokens import read_basic
from tests.clouds import Asked, Fixed, Machine, answer_first, hear
from tests.ends import only

GAR = "europe-docker.pkg.dev"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
IMDS = "169.254.169.254"
BY_METADATA = f"the metadata server {IMDS}"
WELL_KNOWN = ".config/gcloud/application_default_credentials.json"
NAMED = "keys/mine.json"
Info = Mapping[str, Any]


class AtGoogle(Machine):
    auth_type = "gar"

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.google = Google(now=anyio.current_time, wall=self.world.wall)
        self.heard = hear(self.google)
        self.answer(self.google, *HOSTS)
        self.answer(self.google, *METADATA, scheme="http")
        self.tokens = GoogleTokens(anonymous=False, now=anyio.current_time)
        self.tokens.google = self.google
        self.gar = self.registry(self.tokens, GAR)

    def secrets(self) -> list[str]:
        return self.google.secrets

    def use(self, info: Any, name: str = NAMED) -> str:
        """Write a credential file, and name it unless it is the well-known one."""
        path = self.write(name, json.dumps(info))
        if name == NAMED:
            self.set(GOOGLE_APPLICATION_CREDENTIALS=path)
        return path

    async def who(self, **fields: Any) -> str:
        """Log in, and return whose token the registry's token service was shown."""
        await self.source(GAR, **fields)
        (asked,) = self.gar.journal.matching("GET", "token")
        self.gar.journal.clear()
        login = read_basic(asked.header("authorization"))
        assert login is not None
        return self.google.principal(*login) or ""

    async def told(self, **fields: Any) -> str:
        return await self.refused(GAR, **fields)

    async def anonymous(self) -> None:
        """Guess, and find no identity; anybody may pull."""
        self.tokens.anonymous = True
        assert (await self.check(GAR, auth_type=None))["source"] is None

    async def ends_in(self) -> float | None:
        """Log in; return the seconds for which that is good."""
        row = await self.check(GAR)
        assert row["error"] is None
        if row["expires"] is None:
            return None
        ends = calendar.timegm(time.strptime(row["expires"], "%Y-%m-%dT%H:%M:%SZ"))
        return ends - int(self.world.wall())


@pytest.fixture
def machine(world, clean_env, monkeypatch):
    return AtGoogle(world, clean_env, monkeypatch)


# Each kind of credential file: how it is written, which services are asked in turn, and who that
# makes us.


def subject(machine: AtGoogle) -> str:
    return next(iter(machine.google.subjects))


def by_file(machine: AtGoogle, **fields: Any) -> dict[str, Any]:
    path = machine.write("token", subject(machine))
    return machine.google.external_account({"file": path}, **fields)


def by_json_file(machine: AtGoogle, field: str = "token") -> dict[str, Any]:
    path = machine.write("token", json.dumps({"other": 1, "token": subject(machine)}))
    form = {"type": "json", "subject_token_field_name": field}
    return machine.google.external_account({"file": path, "format": form})


def by_url(machine: AtGoogle, status: int = 200) -> dict[str, Any]:
    body = subject(machine) if status == 200 else "gone"
    machine.answer(Fixed(Response(status, [], body.encode())), "tokens.example")
    fields = {"headers": {"X-Mine": "yes"}, "format": {"type": "text"}}
    return machine.google.external_account({"url": "https://tokens.example/mine?a=b", **fields})


def by_json_url(machine: AtGoogle) -> dict[str, Any]:
    body = json.dumps({"access_token": subject(machine)}).encode()
    machine.answer(Fixed(Response(200, [], body)), "169.254.169.253", scheme="http")
    form = {"type": "json", "subject_token_field_name": "access_token"}
    url = "http://169.254.169.253/metadata/identity/oauth2/token?resource=x"
    headers = {"Metadata": "True"}
    return machine.google.external_account({"url": url, "headers": headers, "format": form})


def workforce(machine: AtGoogle, **fields: Any) -> dict[str, Any]:
    project = {"audience": machine.google.workforce, "workforce_pool_user_project": "project"}
    return by_file(machine, **project, **fields)


def impersonating(machine: AtGoogle) -> dict[str, Any]:
    url = machine.google.impersonation_url
    life = {"token_lifetime_seconds": 1800}
    more = {"service_account_impersonation_url": url, "service_account_impersonation": life}
    return by_file(machine, **more)


KINDS: dict[str, tuple[Callable[[AtGoogle], Info], str, str]] = {
    "service_account": (lambda m: m.google.service_account(), "oauth2", "robot"),
    "authorized_user": (lambda m: m.google.authorized_user(), "oauth2", "user@"),
    "external_file": (by_file, "sts", "workload"),
    "external_json_file": (by_json_file, "sts", "workload"),
    "external_url": (by_url, "sts", "workload"),
    "external_json_url": (by_json_url, "sts", "workload"),
    "external_workforce": (workforce, "sts", "workload"),
    "external_workforce_client": (
        lambda m: workforce(m, client_id=CLIENT[0], client_secret=CLIENT[1]), "sts", "workload"),
    "external_impersonating": (impersonating, "sts iamcredentials", "target"),
    "external_user": (lambda m: m.google.external_user(), "sts", "staff@"),
    "impersonated_by_user": (
        lambda m: m.google.impersonated(m.google.authorized_user(quota_project_id=None)),
        "oauth2 iamcredentials", "target"),
    "impersonated_by_key": (
        lambda m: m.google.impersonated(m.google.service_account()), "oauth2 iamcredentials", "target"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_file_logs_in_by_the_requests_of_google_auth(machine, kind):
    make, services, who = KINDS[kind]
    path = machine.use(make(machine))
    assert (await machine.who()).startswith(who)
    assert machine.google.asked == services.split()
    assert machine.ran.report["access"][0]["source"].startswith(f"{path} (GOOGLE_APPLICATION_")
    assert await machine.ends_in() == (1800 if kind == "external_impersonating" else 3600)
    assert machine.google.asked == services.split() * 2, "nothing is kept"

    mine = list(map(plain, machine.heard[: len(services.split())]))
    machine.heard.clear()
    assert google_auths(machine).startswith(who)
    theirs = list(map(plain, machine.heard))
    if kind in ("external_impersonating", "impersonated_by_key"):
        # The token to impersonate with: google-auth narrows it to one API, facts section 5.4 does
        # not.
        assert scope_of(mine[0]) == SCOPE
        assert scope_of(theirs[0]) == SCOPE.replace("cloud-platform", "iam")
    assert mine == theirs


def plain(asked: Asked) -> tuple[Any, ...]:
    """Take a request apart, without what says which library asks."""
    kept = ("authorization", "content-type", "metadata-flavor", "metadata", "x-mine")
    headers = {name: value for name, value in asked.headers.items() if name in kept}
    form: dict[str, Any] = {}
    if headers.get("content-type") == "application/json":
        form = json.loads(asked.body)
        form["delegates"] = form.get("delegates") or []
        headers["authorization"] = headers["authorization"].split()[0]  # tokens are new each time
    elif asked.body:
        form = asked.form
    return asked.method, asked.place, asked.query, headers, form


def scope_of(asked: tuple[Any, ...]) -> str:
    """Take the scope out of a request."""
    form = asked[-1]
    if "assertion" in form:
        claims = form.pop("assertion").split(".")[1]
        return str(json.loads(base64.urlsafe_b64decode(claims + "=="))["scope"])
    return str(form.pop("scope"))


def google_auths(machine: AtGoogle) -> str:
    """Return who google-auth says that it is."""

    def ask(url: str, method: str = "GET", body: bytes = b"", headers: Any = None, **_: Any) -> Any:
        answer = machine.ask(method, url, headers, body)
        assert answer is not None
        heads = CaseInsensitive({name.lower(): value for name, value in answer.headers})
        return mock.Mock(status=answer.status, headers=heads, data=answer.data)

    now = datetime.datetime.fromtimestamp(int(machine.world.wall()), datetime.UTC)
    machine.patch.setattr(_helpers, "utcnow", lambda: now.replace(tzinfo=None))
    machine.patch.setattr(_metadata, "_GCE_METADATA_HOST", IMDS)
    machine.set(GOOGLE_CLOUD_PROJECT="project")  # it would ask whose project a pool is
    credentials, _ = auth.default(scopes=[SCOPE], request=ask)
    credentials.refresh(ask)
    return machine.google.principal("_token", credentials.token) or ""


class CaseInsensitive(dict[str, str]):
    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())


@pytest.mark.parametrize("folder", ["", "elsewhere"])
async def test_the_first_place_is_taken_as_by_google_auth(machine, folder):
    if folder:
        machine.set(CLOUDSDK_CONFIG=str(machine.home / folder))
    well_known = f"{folder}/{WELL_KNOWN.rpartition('/')[2]}" if folder else WELL_KNOWN
    path = machine.use(machine.google.authorized_user(), well_known)
    machine.use(machine.google.service_account())
    for who in ("robot", "user@", "machine"):
        assert (await machine.who()).startswith(who)
        assert google_auths(machine).startswith(who)
        if who == "robot":
            machine.unset("GOOGLE_APPLICATION_CREDENTIALS")
        elif who == "user@":
            found = await machine.source(GAR, auth_type=None)
            assert found == f"{path}, authorized_user at oauth2.googleapis.com"
            machine.gar.journal.clear()
            (machine.home / well_known).unlink()


async def test_the_metadata_server_is_asked_as_by_google_auth(machine):
    assert await machine.who() == machine.google.machine
    mine = only(machine.heard)
    google_auths(machine)
    assert plain(machine.heard[-1]) == plain(mine)
    assert len(machine.heard) > 2, "google-auth pings and asks for the project first"


@pytest.mark.parametrize("name", ["GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"])
async def test_a_metadata_server_is_where_the_environment_says(machine, name):
    machine.set(**{name: METADATA[0]})
    assert await machine.who(auth_type=None) == machine.google.machine
    assert only(machine.heard).place.startswith(METADATA[0])


# Files that are of no use.

NO_SOURCE = "a credential_source with {} is not supported: use `file` or `url`"
BROKEN: list[tuple[Callable[[AtGoogle], Any], str]] = [
    (lambda m: [], "type 'None' is not one of authorized_user, external_account_authorized_user, "
        "service_account, external_account, impersonated_service_account"),
    (lambda m: {"type": "gdch_service_account"}, "type 'gdch_service_account' is not one of"),
    (lambda m: m.google.service_account(private_key=""), "private_key is missing"),
    (lambda m: m.google.service_account(client_email=1), "client_email is not a text"),
    (lambda m: m.google.service_account(private_key="abc"), "private_key does not parse"),
    (lambda m: m.google.authorized_user(refresh_token=None), "refresh_token is missing"),
    (lambda m: by_file(m) | {"credential_source": "x"}, NO_SOURCE.format("nothing")),
    (lambda m: m.google.external_account({"executable": {"command": "x"}}), NO_SOURCE.format("executable")),
    (lambda m: m.google.external_account({"environment_id": "aws1", "url": f"http://{IMDS}"}),
        NO_SOURCE.format("environment_id, url")),
    (lambda m: m.google.external_account({"file": "/gone"}), "token is missing"),
    (lambda m: by_url(m, 404), "credential_source at tokens.example: status 404: gone (check url and headers"),
    (lambda m: by_json_file(m, ""), "subject_token_field_name is missing"),
    (lambda m: by_json_file(m, "gone"), "gone is missing"),
    (lambda m: m.google.impersonated({}), "source_credentials: type 'None'"),
    (lambda m: m.google.impersonated(m.google.authorized_user(), service_account_impersonation_url=None),
        "service_account_impersonation_url is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), BROKEN, ids=[words for _, words in BROKEN])
async def test_a_file_of_no_use_is_named_with_what_is_wrong(machine, make, words):
    path = machine.use(make(machine))
    told = await machine.told()
    assert told.startswith(f"{path} (GOOGLE_APPLICATION_CREDENTIALS)")
    assert words in told


def with_url(machine: AtGoogle, field: str, url: str, **more: Any) -> Info:
    """Return a credential file with a URL of its own."""
    user = machine.google.authorized_user
    if field == "token_uri":
        return user(token_uri=url, **more)
    if field == "token_url":
        return by_file(machine, token_url=url, **more)
    if field == "url":
        return machine.google.external_account({"url": url}, **more)
    return machine.google.impersonated(user(), service_account_impersonation_url=url, **more)


URL_FIELDS = ("token_uri", "token_url", "service_account_impersonation_url", "url")


@pytest.mark.parametrize(
    ("field", "url"),
    [
        *((field, "http://oauth2.googleapis.com/token") for field in URL_FIELDS),
        ("token_uri", "http://127.0.0.1.example/token"),
        ("token_uri", "http://169.254.169.254.example/token"),
        ("token_uri", "http://10.0.0.1/token"),
        ("token_uri", "http://localhost@evil.example/"),
        ("token_uri", "https://you@oauth2.googleapis.com/token"),
        ("token_uri", "https:///token"),
        ("url", "ftp://localhost/"),
        ("url", "https://a b/"),
        ("url", "file:///etc/passwd"),
    ],
)
async def test_secrets_go_to_no_place_that_is_not_https(machine, field, url):
    machine.use(with_url(machine, field, url))
    assert f"{field} is not an https URL" in await machine.told()
    assert {asked.place for asked in machine.heard} <= {"oauth2.googleapis.com/token"}


@pytest.mark.parametrize(
    ("field", "name"),
    [
        *((field, "evil.example") for field in URL_FIELDS[:3]),
        ("token_uri", "googleapis.com.evil.example"),
        ("token_uri", "notgoogleapis.com"),
        ("token_uri", "sts.example.cloud"),
    ],
)
async def test_secrets_go_to_google_alone(machine, field, name):
    """docs/protocol-facts.md 5.3: the file of a stranger may name any file as its token, and any
    place to send it to.
    """
    refusal = f"{field} names {name}, which is not Google's"
    machine.use(with_url(machine, field, f"https://{name}/token"))
    assert refusal in await machine.told()
    assert {asked.place for asked in machine.heard} <= {"oauth2.googleapis.com/token"}
    universe = {"universe_domain": "example.cloud"}
    machine.use(with_url(machine, field, f"https://{name}/token", **universe))
    assert (refusal in await machine.told()) is (name != "sts.example.cloud")


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1:80", "[::1]:1"])
async def test_this_machine_may_be_asked_without_https(machine, host):
    token = machine.google._issue("somebody", SCOPE, 60.0)
    told = {"access_token": token, "expires_in": 60}
    site = Fixed(Response(200, [], json.dumps(told).encode()))
    name, _, port = host.rpartition(":")
    machine.answer(site, name.strip("[]"), scheme="http", port=int(port))
    machine.use(machine.google.authorized_user(token_uri=f"http://{host}/token?a=b"))
    assert await machine.who() == "somebody"
    assert await machine.ends_in() == 60


async def test_a_file_that_is_gone_or_unreadable_is_no_reason_to_look_elsewhere(machine):
    machine.set(GOOGLE_APPLICATION_CREDENTIALS="/gone")
    machine.use(machine.google.authorized_user(), WELL_KNOWN)
    told = await machine.told()
    assert told.startswith(
        "/gone (GOOGLE_APPLICATION_CREDENTIALS): the file does not exist (correct"
    )
    machine.unset("GOOGLE_APPLICATION_CREDENTIALS")
    (machine.home / WELL_KNOWN).unlink()
    (machine.home / WELL_KNOWN).mkdir()
    for auth_type in (None, "gar"):
        assert "directory" in (await machine.told(auth_type=auth_type)).lower()
    assert machine.heard == []


# What services say.


@pytest.mark.parametrize(
    ("make", "spoil", "words"),
    [
        (lambda m: m.google.authorized_user(), lambda m: m.google.users.clear(),
            ["status 400: invalid_grant: Token has been", "gcloud auth"]),
        (lambda m: m.google.service_account(), lambda m: m.google.keys.clear(),
            ["account not found", "check the key"]),
        (lambda m: m.google.service_account(private_key=make_key(1).pem), lambda m: None,
            ["Invalid JWT Signature"]),
        (lambda m: m.google.service_account(), lambda m: setattr(m.google, "wall", lambda: 9e9),
            ["reasonable timeframe", "clock of this machine"]),
        (by_file, lambda m: m.google.subjects.clear(), ["attribute condition", "audiences"]),
        (impersonating, lambda m: m.google.impersonators.clear(),
            ["PERMISSION_DENIED", "serviceAccountTokenCreator"]),
    ],
)  # fmt: skip
async def test_a_service_that_refuses_is_quoted_with_what_may_help(machine, make, spoil, words):
    machine.use(make(machine))
    spoil(machine)
    told = await machine.told()
    assert all(each in told for each in words), told


async def test_what_a_service_echoes_shows_no_secret(machine):
    secret = machine.google.authorized_user()["refresh_token"]
    machine.use(machine.google.authorized_user())
    parted = f"{secret[:5]}\0{secret[5:]}"
    for said, shown in {
        f"no {secret} and {CLIENT[1]}\x1b[2J": "no *** and ***[2J",
        f"no {quote(secret, safe='')} and {parted}": "no *** and ***",
    }.items():
        answer_first(machine.google, Response(400, [], said.encode()))
        assert f"status 400: {shown} (" in await machine.told()
    token = machine.google._issue("robot", SCOPE, 60.0)
    issued = json.dumps({"access_token": token}).encode()
    echo = Response(400, [], f"Bearer {token}?".encode())
    machine.use(machine.google.impersonated(machine.google.authorized_user()))
    answer_first(machine.google, Response(200, [], issued), echo)
    assert "status 400: Bearer ***? (" in await machine.told()


async def test_of_the_headers_of_a_file_secrets_are_masked_and_no_parts_of_names(machine):
    secret = "abcdefgh.ijklmnop"
    headers = {"Metadata": "True", "Authorization": f"Bearer {secret}"}
    source = {"url": "https://tokens.example", "headers": headers}
    machine.answer(Fixed(Response(400, [], f"no {secret}".encode())), "tokens.example")
    machine.use(machine.google.external_account(source))
    row = await machine.check(GAR, repository="true-app")
    assert row["repository"] == f"{GAR}/true-app"
    assert "status 400: no ***" in row["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"access_token": ""}', b'{"access_token": 1}', b'{"access_token": "a b"}'],
)
async def test_an_answer_without_a_token_is_an_error(machine, body):
    machine.use(machine.google.authorized_user())
    answer_first(machine.google, *[Response(200, [], body)] * 3)
    assert "status 200: no usable answer" in await machine.told()


@pytest.mark.parametrize(
    ("told", "seconds"), [("60", 60), (60, 60), (None, None), ("x", None), (-1, None)]
)
async def test_a_life_may_be_a_number_or_a_text_or_nothing(machine, told, seconds):
    token = machine.google._issue("robot", SCOPE, 60.0)
    machine.use(machine.google.authorized_user())
    answer = json.dumps({"access_token": token, "expires_in": told}).encode()
    answer_first(machine.google, Response(200, [], answer))
    assert await machine.ends_in() == seconds


# The metadata server.


@pytest.mark.parametrize("status", [403, 404])
async def test_a_metadata_server_that_is_not_ready_is_asked_again(machine, status):
    answer_first(machine.google, *[Response(status)] * 2)
    assert await machine.who() == machine.google.machine
    assert machine.ran.seconds == pytest.approx(3.0)
    machine.reachable[IMDS].fail("silent")
    await machine.told()
    assert machine.ran.seconds == pytest.approx(3 * 3.0 + 3.0)


async def test_nothing_found_names_every_place(machine):
    machine.google.has_account = False
    told = await machine.told()
    assert told.startswith(
        f"registry 'source': no Google identity for {GAR}; looked at the environment variable "
        f"GOOGLE_APPLICATION_CREDENTIALS, {machine.home}/{WELL_KNOWN}, {BY_METADATA}: status 404: "
        "not found ("
    )
    remedies = ("gcloud auth application-default login", "key file", "auth_type: anonymous")
    assert all(word in told for word in remedies)
    machine.heard.clear()
    machine.set(NO_GCE_CHECK="true")
    assert f"{BY_METADATA}: not asked because of NO_GCE_CHECK" in await machine.told()
    await machine.anonymous()
    assert machine.heard == []


async def test_who_has_configured_gclouds_helper_alone_is_told_what_logs_in(machine):
    """The login of gcloud itself is none of the application default credentials."""
    machine.google.has_account = False
    machine.write(".docker/config.json", json.dumps({"credHelpers": {GAR: "gcloud"}}))
    told = await machine.told(auth_type=None)
    assert "without credentials" in told
    assert "run `gcloud auth application-default login`" in told


async def test_another_service_at_that_address_is_not_believed(machine):
    token = b'{"access_token": "t", "expires_in": 60}'
    answer_first(machine.google, Response(200, [], token), Response(200, [], token))
    assert f"{BY_METADATA}: the answer is not Google's" in await machine.told()
    await machine.anonymous()


async def test_a_guess_is_one_request_of_one_second_to_the_metadata_server_alone(machine):
    assert await machine.source(GAR, auth_type=None) == BY_METADATA
    assert machine.google.asked == ["metadata"]
    for answer in (Response(503), Response(404)):
        answer_first(machine.google, answer)
        await machine.anonymous()
        assert machine.ran.seconds == 0, "it is not asked again"
    machine.reachable[IMDS].fail("silent")
    await machine.anonymous()
    assert machine.ran.seconds == pytest.approx(1.0)
