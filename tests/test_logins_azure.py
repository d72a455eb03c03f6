"""Azure's logins: each source of an identity in each cloud, what is asked for it, and msal's word on
the same.

The directory and the registry's exchange (conformance/clouds/azure.py) verify proofs, audiences and
tenants by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import anyio
import msal
import pytest

from conformance.clouds.azure import (
    CLOUDS,
    COMMAND_LINE,
    TOKEN_USER,
    Cloud,
    Directory,
    Exchange,
    Identity,
)
from conformance.images import Seed
from conformance.messages import Request, Response
from conformance.personas import imitate
from tests.clouds import Asked, Machine, answer_first, hear
from tests.ends import basic, only, tags

# What no output may show; with characters that a form changes.
SECRETS = {
    "secret": "s3cr~t/of+app",
    "assertion": "eyJ.fede-rated_1.sig",
    "refresh": "0.AXs+refr/esh",
    "header": "h3ad-er",
}
APP = Identity(
    secret=SECRETS["secret"], assertion=SECRETS["assertion"], refresh_tokens={SECRETS["refresh"]}
)
TENANT = APP.tenant
STRANGERS = ("33333333-3333-4333-8333-333333333333",)
IMDS, SERVICE = "169.254.169.254", "localhost"
METADATA = f"{IMDS}/metadata/identity/oauth2/token"


class InAzure(Machine):
    auth_type = "acr"

    def __init__(self, *place: Any, cloud: str = "io") -> None:
        super().__init__(*place)
        self.cloud = CLOUDS[cloud]
        name = f"acr-{cloud}"
        self.provider = imitate(name, now=anyio.current_time, wall=self.world.wall)
        assert isinstance(self.provider.tokens, Exchange)
        self.exchange = self.provider.tokens
        assert self.exchange.directory is not None
        self.directory: Directory = self.exchange.directory
        self.directory.identities.append(Identity(**APP.__dict__))
        self.directory.header = SECRETS["header"]
        self.host = f"name.{self.cloud.suffix}"
        self.answer(self.provider, self.host)
        self.answer(self.directory, self.cloud.authority)
        self.heard = hear(self.directory)
        self.load("app")

    def load(self, *repositories: str) -> None:
        for number, name in enumerate(repositories):
            Seed(number).image(sizes=(9,)).load_into(self.provider, name, "v1")

    def secrets(self) -> list[str]:
        given = [*self.exchange.issued_tokens, *self.directory.issued_tokens]
        return [*SECRETS.values(), *given, "somebody@secret.test"]

    async def login(self, **fields: Any) -> str:
        return await self.source(self.host, **fields)

    async def told(self, **fields: Any) -> str:
        return await self.refused(self.host, **fields)

    def audiences(self) -> list[str]:
        """The audiences that tokens were asked for, in order."""
        asked = [each.query.get("resource") or each.form.get("scope", "") for each in self.heard]
        return [audience.removesuffix("/.default") for audience in asked if audience]

    def change(self, name: str, change: Callable[[Any], object]) -> Any:
        """Change a file of the command line; return what it holds then."""
        path = self.home / ".azure" / name
        told = json.loads(path.read_text("utf-8-sig"))
        change(told)
        path.write_text(json.dumps(told))
        return told


@pytest.fixture
def machine(world, clean_env, monkeypatch):
    return InAzure(world, clean_env, monkeypatch)


@pytest.fixture
def in_cloud(world, clean_env, monkeypatch):
    return lambda cloud: InAzure(world, clean_env, monkeypatch, cloud=cloud)


# Sources of an identity.


def by_secret(machine: InAzure) -> None:
    machine.set(AZURE_CLIENT_ID=APP.client_id, AZURE_TENANT_ID=TENANT)
    machine.set(AZURE_CLIENT_SECRET=SECRETS["secret"])


def by_file(machine: InAzure) -> None:
    machine.set(AZURE_CLIENT_ID=APP.client_id, AZURE_TENANT_ID=TENANT)
    path = machine.write("token", f"{SECRETS['assertion']}\n")
    machine.set(AZURE_FEDERATED_TOKEN_FILE=path)


def by_service(machine: InAzure) -> None:
    machine.set(IDENTITY_ENDPOINT=f"http://{SERVICE}:42356/msi/token")
    machine.set(IDENTITY_HEADER=SECRETS["header"])
    machine.directory.identities.append(Identity(client_id="m", managed="system"))
    machine.answer(machine.directory, SERVICE, scheme="http", port=42356)


def by_machine(machine: InAzure) -> None:
    machine.directory.identities.append(Identity(client_id="m", managed="system"))
    machine.answer(machine.directory, IMDS, scheme="http")


def by_command_line(machine: InAzure) -> None:
    for name, text in session(machine.cloud, machine.world.wall()).items():
        machine.write(f".azure/{name}", text)


def session(cloud: Cloud, now: float) -> dict[str, str]:
    """Return what the command line leaves behind: the profile as it is documented, the cache by msal
    itself.
    """
    name = "me@tenant.test"
    who = {"oid": "oid", "preferred_username": name, "tid": TENANT, "sub": "s", "iss": "i"}
    encode = msal.oauth2cli.oidc.base64.urlsafe_b64encode
    client_info, claims = (
        encode(json.dumps(each).encode()).decode().rstrip("=")
        for each in ({"uid": "oid", "utid": TENANT}, {**who, "aud": COMMAND_LINE})
    )
    answer = {
        "access_token": "a-token",
        "refresh_token": SECRETS["refresh"],
        "expires_in": 3600,
        "client_info": client_info,
        "id_token": f"e30.{claims}.s",
        "id_token_claims": {**who, "aud": COMMAND_LINE},
        "foci": "1",
    }
    event = {
        "client_id": COMMAND_LINE,
        "scope": ["https://management.core.windows.net//.default"],
        "token_endpoint": f"https://{cloud.authority}/{TENANT}/oauth2/v2.0/token",
        "response": answer,
    }
    cache = msal.SerializableTokenCache()
    cache.add(event, now=now)
    mine = {"id": "s1", "tenantId": TENANT, "isDefault": True, "environmentName": cloud.name}
    profile = {"subscriptions": [{**mine, "user": {"name": name, "type": "user"}}]}
    return {
        "azureProfile.json": "\ufeff" + json.dumps(profile),
        "msal_token_cache.json": cache.serialize(),
    }


# A source, what it is called, and its requests before the exchange.
SOURCES: dict[str, tuple[Callable[[InAzure], None], str, int]] = {
    "secret": (by_secret, "AZURE_CLIENT_SECRET", 1),
    "file": (by_file, "AZURE_FEDERATED_TOKEN_FILE", 1),
    "service": (by_service, "IDENTITY_ENDPOINT", 1),
    "machine": (by_machine, f"the metadata service {IMDS}", 2),
    "command-line": (by_command_line, "az login", 1),
}


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
@pytest.mark.parametrize("name", SOURCES)
async def test_each_source_logs_in_in_each_cloud_as_msal_does(in_cloud, name, cloud):
    arrange, origin, requests = SOURCES[name]
    machine = in_cloud(cloud)
    arrange(machine)
    row = await machine.check(machine.host)
    assert (row["error"], row["source"]) == (None, origin)
    ends = time.gmtime(machine.world.wall() + 3 * 3600)
    assert row["expires"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", ends)
    assert (len(machine.heard), machine.exchange.exchanges) == (requests, 1)
    assert machine.audiences() == [machine.cloud.audiences[0]]
    if name != "machine":
        assert await machine.login(auth_type=None) == origin, "it is seen that this is configured"
    mine = machine.heard[requests - 1]
    machine.heard.clear()
    msals(machine, name)
    assert plain(only(machine.heard)) == plain(mine)


def plain(asked: Asked) -> tuple[Any, ...]:
    """Leave out what msal adds for its makers, and what it asks for beside the token that is
    wanted.
    """
    form = {
        name: value for name, value in asked.form.items() if name not in ("client_info", "claims")
    }
    if "scope" in form:
        more = {"openid", "profile", "offline_access"}
        form["scope"] = " ".join(set(form["scope"].split()) - more)
    proofs = {"metadata", "x-identity-header"}
    headers = {name: value for name, value in asked.headers.items() if name in proofs}
    return asked.method, asked.place, asked.query, headers, form


def msals(machine: InAzure, name: str, chosen: str = "") -> None:
    """Let msal ask for the same token."""
    audience = machine.cloud.audiences[0]
    scopes = [f"{audience}/.default"]
    options = {
        "authority": f"https://{machine.cloud.authority}/{TENANT}",
        "instance_discovery": False,
        "http_client": Line(machine),
    }
    base = f"https://{machine.cloud.authority}/{TENANT}"
    ends = {"authorization": f"{base}/oauth2/v2.0/authorize", "token": f"{base}/oauth2/v2.0/token"}
    known = {f"{end}_endpoint": url for end, url in ends.items()} | {"issuer": f"{base}/v2.0"}
    machine.patch.setattr(msal.authority, "tenant_discovery", lambda url, client, **_: known)
    if name in ("service", "machine"):
        user, system = msal.UserAssignedManagedIdentity, msal.SystemAssignedManagedIdentity
        identity = user(client_id=chosen) if chosen else system()
        managed = msal.ManagedIdentityClient(identity, http_client=Line(machine))
        found = managed.acquire_token_for_client(resource=audience)
    elif name == "command-line":
        cache = msal.SerializableTokenCache()
        cache.deserialize((machine.home / CACHE).read_text())
        profile = (machine.home / ".azure/azureProfile.json").read_text("utf-8-sig")
        subscription = json.loads(profile)["subscriptions"][0]
        user_app = msal.PublicClientApplication(COMMAND_LINE, token_cache=cache, **options)
        account = only(user_app.get_accounts(username=subscription["user"]["name"]))
        found = user_app.acquire_token_silent(scopes, account)
    else:
        by_assertion = {"client_assertion": lambda: SECRETS["assertion"]}
        proof = by_assertion if name == "file" else SECRETS["secret"]
        app = msal.ConfidentialClientApplication(APP.client_id, client_credential=proof, **options)
        found = app.acquire_token_for_client(scopes)
    assert "access_token" in found


class Line:
    """msal's way to ask."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def ask(self, method: str, url: str, headers: Any, body: str = "") -> mock.Mock:
        given = self.machine.ask(method, url, headers, body.encode())
        assert given is not None
        text, heads = given.data.decode(), dict(given.headers)
        return mock.Mock(status_code=given.status, text=text, headers=heads)

    def get(self, url: str, params: Any = None, headers: Any = None, **_: Any) -> mock.Mock:
        return self.ask("GET", f"{url}?{urlencode(params or {})}", headers)

    def post(self, url: str, data: Any = None, headers: Any = None, **_: Any) -> mock.Mock:
        form = {"Content-Type": "application/x-www-form-urlencoded", **(headers or {})}
        return self.ask("POST", url, form, urlencode(data))

    def close(self) -> None:
        pass


async def test_the_first_source_is_taken_and_the_others_are_not_asked(machine):
    for arrange, _, _ in SOURCES.values():
        arrange(machine)
    for name, used in {
        "secret": ["AZURE_CLIENT_SECRET"],
        "file": ["AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID"],
        "service": ["IDENTITY_ENDPOINT"],
        "machine": [],
    }.items():
        machine.heard.clear()
        assert await machine.login() == SOURCES[name][1]
        assert len(machine.heard) == SOURCES[name][2]
        machine.unset(*used)
    machine.reachable[IMDS].fail("refused")
    assert await machine.login() == "az login"


# What is broken is an error, told without its secrets.


def becoming(**fields: Any) -> Callable[[InAzure], None]:
    """Let the directory know another identity than the machine's."""

    def change(machine: InAzure) -> None:
        machine.directory.identities[:] = [Identity(**{**APP.__dict__, **fields})]

    return change


PLACES = [
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "IDENTITY_ENDPOINT",
    IMDS,
    "~/.azure",
]
POD = [
    "azure.workload.identity/client-id",
    'azure.workload.identity/use: "true"',
    "AcrPush at target",
]
CACHE = ".azure/msal_token_cache.json"
NO_SESSION = [
    "`az login` has left no usable token in its files (",
    "core.encrypt_token_cache=false",
]
Change = Callable[[InAzure], object]
# A source, what breaks it, the requests to the directory, and what is said.
FAILURES: list[tuple[Callable[[InAzure], None] | None, Change, int, list[str]]] = [
    (None, lambda m: None, 0, ["no Azure identity for name.azurecr.io", *PLACES, *POD]),
    (by_secret, lambda m: m.unset("AZURE_CLIENT_ID"), 0,
        ["AZURE_CLIENT_SECRET is set without AZURE_CLIENT_ID (", *POD]),
    (by_service, lambda m: m.unset("IDENTITY_HEADER"), 0,
        ["IDENTITY_ENDPOINT is set without IDENTITY_HEADER (", *POD]),
    (by_file, lambda m: m.write("token", "\n"), 0,
        ["AZURE_FEDERATED_TOKEN_FILE names ", "token, which is missing or empty"]),
    (by_secret, becoming(secret="another"), 1, ["invalid_client: AADSTS7000215: Invalid client secret"]),
    (by_secret, becoming(client_id="another"), 1, ["AADSTS700016: Application was not found"]),
    (by_file, becoming(assertion="another"), 1, ["AADSTS700213: No matching federated identity"]),
    (by_secret, lambda m: setattr(m.exchange, "tenants", STRANGERS), 1,
        ["AZURE_CLIENT_SECRET at name.azurecr.io: status 401: UNAUTHORIZED", "AcrPull"]),
    (by_command_line, becoming(refresh_tokens=set()), 1,
        ["invalid_grant: AADSTS700082: The refresh", "run `az login` again as a user"]),
    (by_command_line, lambda m: m.write(CACHE, ""), 0, NO_SESSION),
    (by_command_line, lambda m: m.write(CACHE, '{"Account": {"a": 5}}'), 0, NO_SESSION),
]  # fmt: skip


@pytest.mark.parametrize(("arrange", "change", "asked", "words"), FAILURES)
async def test_a_broken_source_is_the_end(machine, arrange, change, asked, words):
    if arrange is not None:
        arrange(machine)
    if arrange in (by_secret, by_file, by_service):
        by_machine(machine)  # which could give a token
    change(machine)
    told = await machine.told()
    assert all(each in told for each in words), told
    assert "Trace ID" not in told
    assert len(machine.heard) == asked


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("AADSTS7000222: ended. Trace ID: 77 for me@secret.test", "AADSTS7000222: ended."),
        ("AADSTS7000222: ended.\r\nTrace ID: 77", "AADSTS7000222: ended."),
        ("AADSTS7000222: ended.\nme@secret.test", "AADSTS7000222: ended."),
        (f"no: {SECRETS['secret']} or s3cr~t%2Fof%2Bapp", "no: *** or ***"),
    ],
)
async def test_of_a_refusal_its_first_line_is_told_without_secrets(machine, said, shown):
    by_secret(machine)
    refusal = {"error": "invalid_client", "error_description": said}
    answer_first(machine.directory, Response(401, [], json.dumps(refusal).encode()))
    assert f": status 401: invalid_client: {shown} (" in await machine.told()


@pytest.mark.parametrize(
    ("where", "path", "status"),
    [("directory", f"/{TENANT}/oauth2/v2.0/token", 500), ("provider", "/oauth2/exchange", 429)],
)
async def test_who_is_not_well_is_asked_again_when_it_says(machine, where, path, status):
    by_secret(machine)
    site = getattr(machine, where)
    answer_first(site, *[Response(status, [("Retry-After", "7")], b"")] * 2, path=path)
    await machine.login()
    assert machine.ran.seconds == pytest.approx(14.0)
    answer_first(site, *[Response(status, [("Retry-After", "86400")], b"")] * 3, path=path)
    error = (await machine.check(machine.host))["error"]
    assert error["code"] == "NETWORK_ERROR", "nobody has refused the identity"
    assert machine.ran.seconds == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("where", "path", "field"),
    [
        ("directory", f"/{TENANT}/oauth2/v2.0/token", "access_token"),
        ("provider", "/oauth2/exchange", "refresh_token"),
    ],
)
async def test_an_empty_token_is_none(machine, where, path, field):
    by_secret(machine)
    empty = Response(200, [], json.dumps({field: ""}).encode())
    answer_first(getattr(machine, where), *[empty] * 3, path=path)
    assert ": status 200: no usable answer (" in await machine.told()


# Clouds.


@pytest.mark.parametrize("name", ["secret", "machine"])
@pytest.mark.parametrize("cloud", sorted(CLOUDS))
async def test_an_audience_that_the_directory_does_not_know_is_followed_by_the_next(
    in_cloud, cloud, name
):
    """Section 6.2: the registries' own, the command line's in every cloud, the manager's."""
    machine = in_cloud(cloud)
    SOURCES[name][0](machine)
    audiences = machine.cloud.audiences
    for known in range(1, len(audiences)):
        machine.heard.clear()
        machine.directory.unknown = audiences[:known]
        await machine.login()
        assert machine.audiences() == list(audiences[: known + 1])
    machine.heard.clear()
    machine.directory.unknown = audiences
    assert "invalid_resource: AADSTS500011" in await machine.told()
    assert machine.audiences() == list(audiences)


@pytest.mark.parametrize("given", ["login.test", "https://login.test/"])
async def test_the_environment_names_another_authority(machine, given):
    by_secret(machine)
    machine.set(AZURE_AUTHORITY_HOST=given)
    machine.answer(machine.directory, "login.test")
    await machine.login()
    assert only(machine.heard).place == f"login.test/{TENANT}/oauth2/v2.0/token"


async def test_a_host_of_another_name_is_in_the_global_cloud(machine):
    by_secret(machine)
    machine.exchange.service = "registry.example"
    machine.answer(machine.provider, "registry.example")
    assert await machine.source("registry.example") == "AZURE_CLIENT_SECRET"
    assert machine.heard[0].place.startswith("login.microsoftonline.com/")


# Machines.


@pytest.mark.parametrize("name", ["machine", "service"])
async def test_a_client_id_chooses_among_identities_as_for_msal(machine, name):
    SOURCES[name][0](machine)
    both = [Identity(client_id=each, managed="user") for each in ("one", "two")]
    machine.directory.identities[:] = both
    assert "Multiple user assigned identities exist" in await machine.told()
    machine.set(AZURE_CLIENT_ID="two")
    await machine.login()
    mine = machine.heard[-1]
    machine.heard.clear()
    msals(machine, name, "two")
    assert plain(only(machine.heard)) == plain(mine)
    assert mine.query["client_id"] == "two"


async def test_the_metadata_service_has_a_second_to_be_there_and_longer_to_give(machine):
    by_machine(machine)
    delays = {"": 0.5, "true": 29.0}

    async def intercept(request: Request) -> None:
        await anyio.sleep(delays[request.header("metadata")])

    machine.directory.intercept = intercept
    await machine.login(auth_type=None)
    assert machine.ran.seconds == pytest.approx(29.5)
    assert machine.heard[0].query.keys() == {"api-version"}
    delays["true"] = 31.0
    assert f"the metadata service {IMDS}" in await machine.told(auth_type=None)
    assert machine.ran.seconds == pytest.approx(0.5 + 3 * 30.0 + 3.0)
    delays[""] = 1.5
    machine.exchange.anonymous = True
    assert (await machine.check(machine.host, auth_type=None))["source"] is None
    assert machine.ran.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("is_probe", [False, True])
async def test_a_metadata_service_that_does_not_work_is_an_error(machine, is_probe):
    by_machine(machine)
    if not is_probe:
        by_command_line(machine)
    machine.directory.intercept = lambda request: (
        Response(503) if request.header("metadata") else None
    )
    told = await machine.told(auth_type=None if is_probe else "acr")
    assert f"the metadata service {IMDS}: status 503" in told


@pytest.mark.parametrize(
    "identity", ["no service", "401", "403", "404", "none", "refused by the registry"]
)
async def test_what_anybody_may_pull_needs_no_identity(machine, identity):
    """The machine's identity may be another tenant's; nothing else is asked, and it is no error."""
    machine.exchange.anonymous = True
    is_refused = identity == "refused by the registry"
    if identity != "no service":
        machine.answer(machine.directory, IMDS, scheme="http")
    if identity.isdigit():  # of another cloud's service
        answer_first(machine.directory, Response(int(identity)))
    if is_refused:
        machine.directory.identities.append(Identity(client_id="m", managed="system"))
        machine.exchange.tenants = STRANGERS
    assert (await machine.check(machine.host, auth_type=None))["source"] is None
    assert (machine.exchange.exchanges, machine.exchange.requests) == (is_refused, 1)
    assert {each.place for each in machine.heard} <= {METADATA}
    assert not identity.isdigit() or len(machine.directory.journal.entries) == 1


async def test_a_machine_without_an_identity_leaves_it_to_the_command_line(machine):
    machine.answer(machine.directory, IMDS, scheme="http")
    assert "Identity not found" in await machine.told()
    by_command_line(machine)
    assert await machine.login() == "az login"


# The command line's session.


async def test_the_session_is_the_default_subscriptions_in_the_registrys_cloud(machine):
    by_command_line(machine)

    def more(profile: Any) -> None:
        mine = profile["subscriptions"][0]
        elsewhere = {**mine, "environmentName": "AzureChinaCloud", "tenantId": "c"}
        profile["subscriptions"] = [{**mine, "isDefault": False, "tenantId": "x"}, elsewhere, mine]

    profile = machine.change("azureProfile.json", more)
    await machine.login()
    assert only(machine.heard).place == f"login.microsoftonline.com/{TENANT}/oauth2/v2.0/token"
    elsewhere = {"subscriptions": profile["subscriptions"][1:2]}
    machine.write(".azure/azureProfile.json", json.dumps(elsewhere))
    assert "no Azure identity" in await machine.told()
    machine.write(".azure/azureProfile.json", '\ufeff{"subscriptions": []}')
    machine.exchange.anonymous = True
    assert (await machine.check(machine.host, auth_type=None))["source"] is None, "after az logout"


async def test_case_does_not_count_in_a_name_as_for_msal(machine):
    by_command_line(machine)

    def rename(profile: Any) -> None:
        profile["subscriptions"][0]["user"]["name"] = "Me@Tenant.test"

    machine.change("azureProfile.json", rename)
    await machine.login()
    msals(machine, "command-line")


async def test_the_newest_refresh_token_of_the_account_is_taken(machine):
    by_command_line(machine)

    def more(cache: Any) -> None:
        mine = only([*cache["RefreshToken"].values()])
        later = str(int(mine["last_modification_time"]) + 1)
        new = {**mine, "last_modification_time": later}
        cache["RefreshToken"] = {
            "old": {**mine, "secret": "old", "last_modification_time": "1"},
            "other": {**new, "secret": "other", "home_account_id": "other"},
            "cloud": {**new, "secret": "cloud", "environment": "login.chinacloudapi.cn"},
            "mine": mine,
        }
        account = only([*cache["Account"].values()])
        cache["Account"]["other"] = {**account, "home_account_id": "other", "username": "other"}

    machine.change("msal_token_cache.json", more)
    await machine.login()
    assert only(machine.heard).form["refresh_token"] == SECRETS["refresh"]


async def test_the_directory_of_the_session_is_configurable(machine):
    by_command_line(machine)
    machine.set(AZURE_CONFIG_DIR=str((machine.home / ".azure").rename(machine.home / "other")))
    assert await machine.login(auth_type=None) == "az login"


# Whole runs.


async def sync(machine: InAzure, *repositories: str, **options: Any) -> None:
    """Copy these repositories to another registry."""
    target = machine.world.registry("target.test")
    source = {"url": machine.host, **options}
    mappings = [{"from": name, "tags": tags("v1")} for name in repositories]
    machine.ran = await machine.world.sync({"source": source, "target": target}, *mappings)
    shown = machine.ran.out + machine.ran.err
    assert not [secret for secret in machine.secrets() if secret in shown]


@pytest.mark.parametrize("refusal", [400, 401])
async def test_a_login_that_is_revoked_in_mid_run_is_renewed_once(machine, refusal):
    """Section 2.4: a refresh token that is refused may be answered 400 there. The federated token,
    which has another life, is read anew.
    """
    by_file(machine)
    machine.exchange.refusal = refusal
    machine.load("one", "two")

    def revoke(request: Request) -> None:
        if request.kind == "blob" and not machine.exchange.revoked:
            machine.exchange.revoke_logins()
            machine.directory.identities[0].assertion = "the-next-one"
            machine.write("token", "the-next-one")

    machine.provider.intercept = revoke
    await sync(machine, "one", "two", max_concurrent=1)
    assert machine.ran.statuses() == ["synced"] * 2
    assert (len(machine.heard), machine.exchange.exchanges) == (2, 2)


@pytest.mark.parametrize("is_good", [True, False])
async def test_what_az_acr_login_leaves_in_the_docker_config_logs_in(machine, is_good):
    """Section 6.1: the user of zeros, whose password is the registry's refresh token."""
    given = machine.exchange._signer.make(3600, aud=machine.host, appid="me")
    if not is_good:
        machine.exchange.revoke_logins()
    entry = {"auths": {machine.host: {"auth": basic(TOKEN_USER, given)}}}
    machine.write(".docker/config.json", json.dumps(entry))
    await sync(machine, "app")
    assert machine.ran.statuses() == ["synced" if is_good else "failed"]
    assert (machine.exchange.requests, machine.heard) == (1, [])
