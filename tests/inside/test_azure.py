"""Azure's login: each source of an identity in each cloud, what is asked for it, and msal's word on
the same.

`log_in` is asked in memory, request by request; whole runs are in test_cloud_runs.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl, urlencode, urlsplit

import anyio
import msal
import pytest

from _regsync.auth import azure
from _regsync.auth.azure import is_configured
from _regsync.auth.cloud import Answer, CloudEnvironment, Login
from _regsync.auth.credentials import Credential
from _regsync.config import Registry
from _regsync.errors import AuthError, ConnectFailed
from conformance.clouds.azure import (
    CLOUDS,
    COMMAND_LINE,
    TOKEN_USER,
    Cloud,
    Directory,
    Exchange,
    Identity,
    claims_of,
)
from conformance.messages import Response
from conformance.server.exchange import Site
from tests.ends import only

NEW_YEAR = 1767225600.0
HOME = "/home/someone"
# What no output may show; with characters that a form changes.
SECRETS = {
    "secret": "s3cr~t/of+app",
    "assertion": "eyJ.fede-rated_1.sig",
    "refresh": "0.AXs+refr/esh",
    "header": "h3ad-er",
}
METADATA = "http://169.254.169.254"
SERVICE = "http://localhost:42356/msi/token"
APP = Identity(
    secret=SECRETS["secret"], assertion=SECRETS["assertion"], refresh_tokens={SECRETS["refresh"]}
)
TENANT = APP.tenant


def session(
    cloud: Cloud = CLOUDS["io"],
    refresh: str = SECRETS["refresh"],
    name: str = "me@tenant.test",
    token: str = "an-access-token",
    audience: str = "https://management.core.windows.net/",
) -> dict[str, bytes]:
    """Write what the command line leaves behind: the profile as it is documented, the cache by msal
    itself.
    """
    cache = msal.SerializableTokenCache()
    told = json.dumps({"uid": "oid", "utid": TENANT}).encode()
    who = {
        "oid": "oid",
        "preferred_username": name,
        "tid": TENANT,
        "sub": "s",
        "aud": COMMAND_LINE,
        "iss": "i",
    }
    encode = msal.oauth2cli.oidc.base64.urlsafe_b64encode
    cache.add(
        {
            "client_id": COMMAND_LINE,
            "scope": [f"{audience}/.default"],
            "token_endpoint": f"https://{cloud.authority}/{TENANT}/oauth2/v2.0/token",
            "response": {
                "access_token": token,
                "refresh_token": refresh,
                "expires_in": 3600,
                "client_info": encode(told).decode().rstrip("="),
                "id_token": f"e30.{encode(json.dumps(who).encode()).decode().rstrip('=')}.s",
                "id_token_claims": who,
                "foci": "1",
            },
        },
        now=NEW_YEAR,
    )
    subscription = {
        "id": "s1",
        "tenantId": TENANT,
        "isDefault": True,
        "state": "Enabled",
        "environmentName": cloud.name,
    }
    profile = {"subscriptions": [{**subscription, "user": {"name": name, "type": "user"}}]}
    return {
        "azureProfile.json": b"\xef\xbb\xbf" + json.dumps(profile).encode(),
        "msal_token_cache.json": cache.serialize().encode(),
    }


@dataclass
class World:
    """A machine in a cloud: its environment, its files, and who answers; what was asked, in order."""

    cloud: Cloud = CLOUDS["io"]
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    now: float = NEW_YEAR
    wall: Callable[[], float] | None = None
    identities: tuple[Identity, ...] = (APP,)
    asked: list[str] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)
    headers: list[list[tuple[str, str]]] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = Directory(
            self.cloud, *self.identities, header=SECRETS["header"], wall=lambda: self.now
        )
        self.host = f"name.{self.cloud.suffix}"
        self.exchange = Exchange(service=self.host, directory=self.directory, wall=lambda: self.now)
        self.sites: dict[str, Site] = {
            self.cloud.authority: self.directory,
            self.host: self.exchange,
        }

    @property
    def machine(self) -> CloudEnvironment:
        wall = self.wall or (lambda: self.now)
        return CloudEnvironment(
            self.environ, HOME, lambda path: self.files.get(path), wall, self.fetch
        )

    async def fetch(
        self,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: bytes,
        seconds: float | None = None,
    ) -> Answer:
        parts = urlsplit(url)
        self.asked.append(f"{method} {parts.netloc}{parts.path}")
        self.headers.append(headers)
        self.seconds.append(seconds)
        self.forms.append(dict(parse_qsl(parts.query or body.decode())))
        site = self.sites.get(parts.netloc)
        if site is None:
            raise ConnectFailed(f"{parts.netloc} is down")
        secure = parts.netloc not in ("169.254.169.254", "localhost:42356")
        assert parts.scheme == ("https" if secure else "http")
        given = site.request(
            method, f"{parts.path}?{parts.query}", [("host", parts.netloc), *headers], body or None
        )
        heads = {name.lower(): value for name, value in given.headers}
        return Answer(given.status, heads, given.data)

    async def log_in(self, *, probing_metadata: bool = False) -> Login | None:
        registry = Registry("mine", "https", self.host, 443, "acr")
        return await azure.log_in(self.machine, registry, probing_metadata=probing_metadata)

    async def refused(self) -> AuthError:
        with pytest.raises(AuthError) as caught:
            await self.log_in()
        text = f"{caught.value.message} {caught.value.hint}"
        assert not [secret for secret in SECRETS.values() if secret in text], text
        assert caught.value.fatal
        return caught.value

    def check(self) -> None:
        self.directory.journal.check()
        self.exchange.journal.check()


def by_secret(world: World) -> None:
    world.environ |= {
        "AZURE_CLIENT_ID": APP.client_id,
        "AZURE_TENANT_ID": TENANT,
        "AZURE_CLIENT_SECRET": SECRETS["secret"],
    }


def by_file(world: World) -> None:
    world.environ |= {
        "AZURE_CLIENT_ID": APP.client_id,
        "AZURE_TENANT_ID": TENANT,
        "AZURE_FEDERATED_TOKEN_FILE": "/var/token",
    }
    world.files["/var/token"] = f"{SECRETS['assertion']}\n".encode()


def by_service(world: World) -> None:
    world.environ |= {"IDENTITY_ENDPOINT": SERVICE, "IDENTITY_HEADER": SECRETS["header"]}
    world.directory.identities.append(Identity(client_id="m", managed="system"))
    world.sites["localhost:42356"] = world.directory


def by_machine(world: World) -> None:
    world.directory.identities.append(Identity(client_id="m", managed="system"))
    world.sites["169.254.169.254"] = world.directory


def by_command_line(world: World) -> None:
    world.files |= {f"{HOME}/.azure/{name}": text for name, text in session(world.cloud).items()}


Source = Callable[[World], None]
# A source, what Credential.origin and `auth check` call it, its requests before the exchange.
SOURCES: dict[str, tuple[Source, str, int]] = {
    "secret": (by_secret, "AZURE_CLIENT_SECRET", 1),
    "file": (by_file, "AZURE_FEDERATED_TOKEN_FILE", 1),
    "service": (by_service, "IDENTITY_ENDPOINT", 1),
    "machine": (by_machine, "the metadata service 169.254.169.254", 2),
    "command-line": (by_command_line, "az login", 2),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


# One login.


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
@pytest.mark.parametrize("name", sorted(SOURCES))
async def test_each_source_logs_in_in_each_cloud(name: str, cloud: str) -> None:
    prepare, origin, before = SOURCES[name]
    world = World(CLOUDS[cloud])
    prepare(world)
    login = await world.log_in()
    assert login is not None
    made = claims_of(login.credential.identity_token)
    assert (login.credential.username, login.credential.found_at) == (TOKEN_USER, origin)
    assert login.credential.password == ""
    assert (made["aud"], login.expires) == (world.host, world.now + 10_800)
    assert world.asked[-1] == f"POST {world.host}/oauth2/exchange"
    assert len(world.asked) == before + 1, world.asked
    assert claims_of(world.forms[-1]["access_token"])["aud"] == CLOUDS[cloud].audiences[0]
    world.check()
    # After it has ended the same is asked again, and another login comes.
    world.now, cold = world.now + 10_800, len(world.asked)
    again = await world.log_in()
    assert again is not None
    assert again.credential != login.credential
    assert len(world.asked) == 2 * cold


async def test_the_first_source_is_taken_and_the_others_are_not_asked() -> None:
    """docs/specification.md section 5.2: secret, federated token, managed identity, the command
    line's session.
    """
    world = World()
    order = ["secret", "file", "service", "machine", "command-line"]
    for name in order:
        SOURCES[name][0](world)
    for name in order:
        world.asked.clear()
        login = await world.log_in()
        assert login is not None
        assert login.credential.found_at == SOURCES[name][1]
        for variable in {
            "secret": ["AZURE_CLIENT_SECRET"],
            "file": ["AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID"],
        }.get(name, ["IDENTITY_ENDPOINT"] if name == "service" else []):
            del world.environ[variable]
        if name == "machine":
            del world.sites["169.254.169.254"]


async def test_nothing_found_names_every_place_and_what_a_pod_needs() -> None:
    error = await World().refused()
    for place in (
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "IDENTITY_ENDPOINT",
        "169.254.169.254",
        "~/.azure",
    ):
        assert place in error.message
    assert error.hint is not None
    for remedy in (
        "azure.workload.identity/client-id",
        'azure.workload.identity/use: "true"',
        "AcrPull",
        "AcrPush",
    ):
        assert remedy in error.hint


@pytest.mark.parametrize("name", sorted(SOURCES))
async def test_what_names_an_identity_is_present(name: str) -> None:
    world = World()
    assert not is_configured(world.machine)
    world.files[f"{HOME}/.azure/azureProfile.json"] = b'\xef\xbb\xbf{"subscriptions": []}'
    assert not is_configured(world.machine), "after az logout"
    SOURCES[name][0](world)
    assert is_configured(world.machine) == (name != "machine")
    assert world.asked == []


# What is broken is an error, told without its secrets.


@pytest.mark.parametrize("name", ["secret", "file"])
@pytest.mark.parametrize("lacking", ["AZURE_CLIENT_ID", "AZURE_TENANT_ID"])
async def test_half_an_application_is_an_error(name: str, lacking: str) -> None:
    world = World()
    by_machine(world)
    SOURCES[name][0](world)
    del world.environ[lacking]
    error = await world.refused()
    assert error.message == f"{SOURCES[name][1]} is set without {lacking}"
    assert "azure.workload.identity/client-id" in (error.hint or "")
    assert world.asked == []


async def test_a_federated_token_that_is_not_there_is_an_error() -> None:
    world = World()
    by_file(world)
    world.files["/var/token"] = b"\n"
    assert "AZURE_FEDERATED_TOKEN_FILE names /var/token" in (await world.refused()).message


async def test_a_service_without_its_header_is_an_error() -> None:
    world = World()
    by_service(world)
    del world.environ["IDENTITY_HEADER"]
    assert (await world.refused()).message == "IDENTITY_ENDPOINT is set without IDENTITY_HEADER"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("secret", {"secret": "another"}, "invalid_client: AADSTS7000215: Invalid client secret"),
        ("secret", {"client_id": "another"}, "AADSTS700016: Application was not found"),
        ("file", {"assertion": "another"}, "AADSTS700213: No matching federated identity"),
        ("command-line", {"refresh_tokens": set()}, "invalid_grant: AADSTS700082: The refresh"),
    ],
)
async def test_a_proof_that_is_refused_is_told_in_one_line(
    name: str, change: dict[str, Any], words: str
) -> None:
    world = World()
    SOURCES[name][0](world)
    world.directory.identities[:] = [Identity(**{**APP.__dict__, **change})]
    error = await world.refused()
    assert words in error.message
    assert "somebody@secret.test" not in error.message
    assert len(world.asked) == (2 if name == "command-line" else 1)
    assert ("az login" in (error.hint or "")) or name == "secret"


@pytest.mark.parametrize(
    "end",
    [" Trace ID: 77 for me@secret.test", "\r\nTrace ID: 77 me@secret.test", "\nme@secret.test"],
)
async def test_what_follows_the_first_line_of_a_refusal_is_not_told(end: str) -> None:
    world = World()
    by_secret(world)
    told = {
        "error": "invalid_client",
        "error_description": f"AADSTS7000222: The keys are expired.{end}",
    }
    world.directory.intercept = lambda request: Response(401, [], json.dumps(told).encode())
    assert (await world.refused()).message.endswith(
        "status 401: invalid_client: AADSTS7000222: The keys are expired."
    )


@pytest.mark.parametrize("name", ["secret", "service"])
async def test_a_directory_that_knows_none_of_the_audiences_is_an_error(name: str) -> None:
    world = World()
    SOURCES[name][0](world)
    world.directory.unknown = world.cloud.audiences
    assert "invalid_resource: AADSTS500011" in (await world.refused()).message
    assert len(world.asked) == 2


async def test_what_a_server_repeats_of_a_secret_is_taken_out() -> None:
    world = World()
    by_secret(world)
    repeated = {
        "error": "invalid_client",
        "error_description": f"no: {SECRETS['secret']} or s3cr~t%2Fof%2Bapp",
    }
    world.directory.intercept = lambda request: Response(401, [], json.dumps(repeated).encode())
    error = await world.refused()
    assert error.message.endswith("status 401: invalid_client: no: *** or ***")


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"access_token": 5}', b'{"access_token": null}', b"[" * 9999]
)
async def test_an_answer_without_a_token_is_an_error(body: bytes) -> None:
    world = World()
    by_secret(world)
    world.directory.intercept = lambda request: Response(200, [], body)
    assert "status 200" in (await world.refused()).message


@pytest.mark.virtual_time
@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("where", ["directory", "exchange"])
async def test_who_is_not_well_is_asked_again_when_it_says(status: int, where: str) -> None:
    world = World()
    by_secret(world)
    site = getattr(world, where)
    answers = [Response(status, [("Retry-After", "7")], b"")] * 2
    site.intercept = lambda request: answers.pop() if answers else None
    began = anyio.current_time()
    assert await world.log_in() is not None
    assert anyio.current_time() - began == pytest.approx(14.0)
    answers += [Response(status, [("Retry-After", "86400")], b"")] * 3
    error = await world.refused()
    assert error.code == "NETWORK_ERROR", "nobody has refused the identity"
    assert anyio.current_time() - began == pytest.approx(14.0 + 120.0)


async def test_an_identity_of_another_tenant_is_refused_by_the_registry() -> None:
    world = World()
    by_secret(world)
    world.exchange.tenants = ("33333333-3333-4333-8333-333333333333",)
    error = await world.refused()
    assert "AZURE_CLIENT_SECRET at name.azurecr.io: status 401: UNAUTHORIZED" in error.message
    assert "AcrPull" in (error.hint or "")


# Clouds.


@pytest.mark.parametrize("known", [1, 2])
@pytest.mark.parametrize("name", ["secret", "machine"])
@pytest.mark.parametrize("cloud", sorted(CLOUDS))
async def test_an_audience_that_the_directory_does_not_know_is_followed_by_the_next(
    cloud: str, name: str, known: int
) -> None:
    """Section 6.2: the registries' own, the command line's in every cloud, the manager's."""
    world = World(CLOUDS[cloud])
    SOURCES[name][0](world)
    known = min(known, len(world.cloud.audiences) - 1)
    world.directory.unknown = world.cloud.audiences[:known]
    login = await world.log_in()
    assert login is not None
    asked = [
        form.get("resource") or form["scope"].removesuffix("/.default")
        for form in world.forms[:-1]
        if len(form) > 1
    ]
    assert asked == list(world.cloud.audiences[: known + 1])
    world.check()


@pytest.mark.parametrize(
    "given",
    [
        "login.microsoftonline.us",
        "https://login.microsoftonline.us",
        "https://login.microsoftonline.us/",
    ],
)
async def test_the_environment_names_another_authority(given: str) -> None:
    world = World()
    by_secret(world)
    world.environ["AZURE_AUTHORITY_HOST"] = given
    world.sites["login.microsoftonline.us"] = world.directory
    assert await world.log_in() is not None
    assert world.asked[0] == f"POST login.microsoftonline.us/{TENANT}/oauth2/v2.0/token"


async def test_a_host_of_another_name_is_in_the_global_cloud() -> None:
    """`auth_type: acr` on a name of one's own."""
    world = World()
    world.host = world.exchange.service = "registry.example"
    world.sites["registry.example"] = world.exchange
    by_secret(world)
    assert await world.log_in() is not None
    assert world.asked[0].startswith("POST login.microsoftonline.com/")


# Machines.


async def test_a_client_id_chooses_among_identities() -> None:
    for prepare in (by_machine, by_service):
        world = World()
        prepare(world)
        world.directory.identities[:] = [
            Identity(client_id=name, managed="user") for name in ("one", "two")
        ]
        error = await world.refused()
        assert "Multiple user assigned identities exist" in error.message
        world.environ["AZURE_CLIENT_ID"] = "two"
        login = await world.log_in()
        assert login is not None
        assert claims_of(login.credential.identity_token)["appid"] == "two"


async def test_the_metadata_service_has_a_second_to_be_there_and_longer_to_give() -> None:
    world = World()
    by_machine(world)
    assert await world.log_in(probing_metadata=True) is not None
    assert world.seconds == [1.0, 30.0, None]
    assert "resource" not in world.forms[0]


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_another_clouds_metadata_service_is_none(status: int) -> None:
    world, other = World(), Directory(CLOUDS["io"])
    other.intercept = lambda request: Response(status)
    world.sites["169.254.169.254"] = other
    assert await world.log_in(probing_metadata=True) is None
    assert len(world.asked) == 1


async def test_a_guess_that_finds_no_identity_is_no_login() -> None:
    world = World(environ={"AZURE_CLIENT_SECRET": "not even looked at"})
    assert await world.log_in(probing_metadata=True) is None
    world.sites["169.254.169.254"] = world.directory
    assert await world.log_in(probing_metadata=True) is None
    assert set(world.asked) == {"GET 169.254.169.254/metadata/identity/oauth2/token"}


@pytest.mark.virtual_time
@pytest.mark.parametrize("is_probe", [False, True])
async def test_a_metadata_service_that_does_not_work_is_an_error(is_probe: bool) -> None:
    world = World()
    by_machine(world)
    by_command_line(world)
    world.directory.intercept = lambda request: (
        Response(503) if request.header("metadata") else None
    )
    with pytest.raises(AuthError, match=r"the metadata service 169\.254\.169\.254: status 503"):
        await world.log_in(probing_metadata=is_probe)


async def test_a_guess_that_the_registry_refuses_is_anonymous_there() -> None:
    """The machine's identity may be another tenant's; the registry may let anybody pull."""
    world = World()
    by_machine(world)
    world.exchange.tenants = ("33333333-3333-4333-8333-333333333333",)
    assert await world.log_in(probing_metadata=True) == Login(Credential(), math.inf)


async def test_a_machine_without_an_identity_leaves_it_to_the_command_line() -> None:
    world = World()
    world.sites["169.254.169.254"] = world.directory
    assert "Identity not found" in (await world.refused()).message
    by_command_line(world)
    login = await world.log_in()
    assert login is not None
    assert login.credential.found_at == "az login"


# The command line's session.


def changed(world: World, name: str, change: Callable[[Any], None]) -> None:
    path = f"{HOME}/.azure/{name}"
    told = json.loads(world.files[path])
    change(told)
    world.files[path] = json.dumps(told).encode()


async def test_the_session_is_the_default_subscriptions_in_the_registrys_cloud() -> None:
    world = World()
    by_command_line(world)

    def more(profile: Any) -> None:
        mine = profile["subscriptions"][0]
        elsewhere = {**mine, "environmentName": "AzureChinaCloud", "tenantId": "c"}
        profile["subscriptions"] = [{**mine, "isDefault": False, "tenantId": "x"}, elsewhere, mine]

    changed(world, "azureProfile.json", more)
    assert await world.log_in() is not None
    assert world.asked[1] == f"POST login.microsoftonline.com/{TENANT}/oauth2/v2.0/token"
    changed(
        world,
        "azureProfile.json",
        lambda profile: profile["subscriptions"].__delitem__(slice(0, 3, 2)),
    )
    assert "no Azure identity" in (await world.refused()).message


async def test_the_newest_refresh_token_of_the_account_is_taken() -> None:
    world = World()
    by_command_line(world)

    def more(cache: Any) -> None:
        mine = next(iter(cache["RefreshToken"].values()))
        newer = str(int(mine["last_modification_time"]) + 1)
        cache["RefreshToken"] = {
            "old": {**mine, "secret": "old", "last_modification_time": "1"},
            "other": {
                **mine,
                "secret": "other",
                "home_account_id": "other",
                "last_modification_time": newer,
            },
            "cloud": {
                **mine,
                "secret": "cloud",
                "environment": "login.chinacloudapi.cn",
                "last_modification_time": newer,
            },
            "mine": mine,
        }
        account = next(iter(cache["Account"].values()))
        cache["Account"]["other"] = {**account, "home_account_id": "other", "username": "other"}

    changed(world, "msal_token_cache.json", more)
    assert await world.log_in() is not None
    assert world.forms[1]["refresh_token"] == SECRETS["refresh"]


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
async def test_a_token_that_the_command_line_has_got_is_taken_while_it_is_good(cloud: str) -> None:
    world = World(CLOUDS[cloud])
    audience = world.cloud.audiences[0]
    form = {
        "grant_type": "refresh_token",
        "client_id": COMMAND_LINE,
        "refresh_token": SECRETS["refresh"],
    }
    kind = [("content-type", "application/x-www-form-urlencoded")]
    body = urlencode({**form, "scope": f"{audience}/.default"}).encode()
    token = world.directory.request("POST", f"/{TENANT}/oauth2/v2.0/token", kind, body).json()[
        "access_token"
    ]
    files = session(world.cloud, token=token, audience=audience)
    world.files |= {f"{HOME}/.azure/{name}": text for name, text in files.items()}
    for seconds, asked in (
        (3299, 2),
        (3301, 3),
    ):  # of 3600; the first of them looks for a metadata service
        world.now = NEW_YEAR + seconds
        world.asked.clear()
        assert await world.log_in() is not None
        assert len(world.asked) == asked
    changed(
        world,
        "msal_token_cache.json",
        lambda cache: next(iter(cache["AccessToken"].values())).update(realm="other"),
    )
    world.now = NEW_YEAR
    world.asked.clear()
    assert await world.log_in() is not None
    assert len(world.asked) == 3, "a token for another tenant"


async def test_the_directory_of_the_session_is_configurable() -> None:
    world = World(environ={"AZURE_CONFIG_DIR": "/other"})
    world.files |= {f"/other/{name}": text for name, text in session().items()}
    assert is_configured(world.machine)
    assert await world.log_in() is not None


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{}", b"{", b"[]", b"\xff", b'{"Account": {}}', b'{"Account": {"a": 5}}',
        b'{"Account": [], "RefreshToken": {}}',
    ],
)  # fmt: skip
async def test_a_session_without_its_tokens_is_an_error(text: bytes) -> None:
    world = World()
    by_command_line(world)
    world.files[f"{HOME}/.azure/msal_token_cache.json"] = text
    error = await world.refused()
    assert error.message == "`az login` has left no usable token in its files"
    assert "core.encrypt_token_cache=false" in (error.hint or "")


# Lives.


@pytest.mark.parametrize(
    ("claims", "life"),
    [
        pytest.param({"iat": 1000, "exp": 4600}, 3600, id="by-its-own-clock"),
        pytest.param({"exp": NEW_YEAR + 60}, 60, id="without-a-beginning"),
        pytest.param({}, math.inf, id="untold"),
        pytest.param({"exp": "soon"}, math.inf, id="not-a-number"),
        pytest.param([], math.inf, id="no-claims"),
    ],
)
async def test_a_login_lives_as_long_as_its_token_says(claims: object, life: float) -> None:
    import base64

    world = World()
    by_secret(world)
    token = f"e30.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.s"
    world.exchange.intercept = lambda request: Response(
        200, [], json.dumps({"refresh_token": token}).encode()
    )
    login = await world.log_in()
    assert login is not None
    assert login.expires == NEW_YEAR + life


async def test_a_federated_token_is_read_anew_each_time() -> None:
    world = World()
    by_file(world)
    assert await world.log_in() is not None
    world.directory.identities[:] = [Identity(assertion="the-next-one")]
    world.files["/var/token"] = b"the-next-one"
    assert await world.log_in() is not None


# msal's word on the same.


class Heard:
    """What msal sends, answered by the directory in memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: list[tuple[str, str, dict[str, str], dict[str, str]]] = []

    def ask(self, method: str, url: str, headers: Mapping[str, str], body: str) -> mock.Mock:
        parts = urlsplit(url)
        self.requests.append(
            (
                method,
                f"{parts.netloc}{parts.path}",
                dict(headers),
                dict(parse_qsl(parts.query or body)),
            )
        )
        given = self.world.sites[parts.netloc].request(
            method, f"{parts.path}?{parts.query}", [*headers.items()], body.encode() or None
        )
        return mock.Mock(
            status_code=given.status, text=given.data.decode(), headers=dict(given.headers)
        )

    def get(self, url: str, params: Any = None, headers: Any = None, **_: Any) -> mock.Mock:
        if "/.well-known/" in url:
            return mock.Mock(status_code=404, text="{}", headers={})
        return self.ask("GET", f"{url}?{urlencode(params or {})}", headers or {}, "")

    def post(
        self, url: str, params: Any = None, data: Any = None, headers: Any = None, **_: Any
    ) -> mock.Mock:
        form = {"Content-Type": "application/x-www-form-urlencoded", **(headers or {})}
        return self.ask("POST", url, form, urlencode(data))

    def close(self) -> None:
        pass


def without_telemetry(fields: Mapping[str, str]) -> dict[str, str]:
    """Leave out what msal adds for its makers, and what it asks for beside the token that is
    wanted.
    """
    kept = {
        key: value
        for key, value in fields.items()
        if not key.startswith("x-") and key not in ("client_info", "claims")
    }
    if "scope" in kept:
        kept["scope"] = " ".join(
            set(kept["scope"].split()) - {"openid", "profile", "offline_access"}
        )
    return kept


def authority_of(cloud: Cloud) -> dict[str, Any]:
    """Options that keep msal from asking where the authority's endpoints are."""
    return {"authority": f"https://{cloud.authority}/{TENANT}", "instance_discovery": False}


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(url: str, client: object, **_: Any) -> dict[str, str]:
        base = url.partition("/v2.0/")[0]
        return {
            "authorization_endpoint": f"{base}/oauth2/v2.0/authorize",
            "token_endpoint": f"{base}/oauth2/v2.0/token",
            "issuer": f"{base}/v2.0",
        }

    monkeypatch.setattr(msal.authority, "tenant_discovery", known)


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
@pytest.mark.parametrize("name", ["secret", "file"])
async def test_msal_proves_an_application_by_the_same_request(
    endpoints: None, name: str, cloud: str
) -> None:
    world = World(CLOUDS[cloud])
    SOURCES[name][0](world)
    assert await world.log_in() is not None
    heard = Heard(world)
    proof = (
        SECRETS["secret"]
        if name == "secret"
        else {"client_assertion": lambda: SECRETS["assertion"]}
    )
    app = msal.ConfidentialClientApplication(
        APP.client_id, client_credential=proof, http_client=heard, **authority_of(world.cloud)
    )
    assert "access_token" in app.acquire_token_for_client([f"{world.cloud.audiences[0]}/.default"])
    method, place, _, form = only(heard.requests)
    assert f"{method} {place}" == world.asked[0]
    assert without_telemetry(form) == world.forms[0]
    world.check()


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
async def test_msal_takes_the_same_refresh_token_from_the_same_file(
    endpoints: None, cloud: str
) -> None:
    world = World(CLOUDS[cloud])
    by_command_line(world)
    assert await world.log_in() is not None
    heard, cache = Heard(world), msal.SerializableTokenCache()
    cache.deserialize(world.files[f"{HOME}/.azure/msal_token_cache.json"].decode())
    app = msal.PublicClientApplication(
        COMMAND_LINE, token_cache=cache, http_client=heard, **authority_of(world.cloud)
    )
    account = only(app.get_accounts(username="me@tenant.test"))
    scope = f"{world.cloud.audiences[0]}/.default"
    assert "access_token" in app.acquire_token_silent([scope], account)
    method, place, _, form = only(heard.requests)
    assert f"{method} {place}" == world.asked[1]
    assert without_telemetry(form) == world.forms[1]
    world.check()


@pytest.mark.parametrize("chosen", ["", "m"])
@pytest.mark.parametrize("name", ["service", "machine"])
async def test_msal_asks_managed_identities_by_the_same_request(
    name: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(environ={"AZURE_CLIENT_ID": chosen})
    SOURCES[name][0](world)
    assert await world.log_in() is not None
    for variable in ("IDENTITY_ENDPOINT", "IDENTITY_HEADER"):
        if variable in world.environ:
            monkeypatch.setenv(variable, world.environ[variable])
    identity = (
        msal.UserAssignedManagedIdentity(client_id=chosen)
        if chosen
        else msal.SystemAssignedManagedIdentity()
    )
    heard = Heard(world)
    client = msal.ManagedIdentityClient(identity, http_client=heard)
    assert "access_token" in client.acquire_token_for_client(resource=world.cloud.audiences[0])
    method, place, headers, query = only(heard.requests)
    at = -2  # the last request before the exchange
    assert (f"{method} {place}", query) == (world.asked[at], world.forms[at])
    theirs = {key: value for key, value in headers.items() if not key.startswith("x-")}
    assert theirs == dict(world.headers[at])
    world.check()
