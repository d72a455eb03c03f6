"""Copies from and to registries of clouds, by the identity that a machine has there.

First the built program, from an empty state and over TLS, under the clouds' own names: a forward
proxy knows those names and nothing else. Then runs in this process, on a clock that jumps.
What each source of an identity asks for is in test_aws.py, test_azure.py and test_google.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.clouds.azure import TOKEN_USER, Directory, Exchange, Identity
from conformance.clouds.google import HOSTS, METADATA, Google, GoogleTokens, google
from conformance.content.images import Seed
from conformance.messages import Request, Response
from conformance.providers.personas import Provider, persona
from conformance.registry.app import App
from conformance.server.names import Names, names
from tests.ends import Ran, Virtual, basic, document, held, program, tags

GAR, GCR, ACR = "europe-docker.pkg.dev", "gcr.io", "name.azurecr.io"
SECRETS = {"secret": "s3cr~t/of+app", "assertion": "eyJ.fede-rated_1.sig", "header": "h3ad-er"}
APP = Identity(secret=SECRETS["secret"], assertion=SECRETS["assertion"])
BY_SECRET = {
    "AZURE_CLIENT_ID": APP.client_id,
    "AZURE_TENANT_ID": APP.tenant,
    "AZURE_CLIENT_SECRET": SECRETS["secret"],
}


# The built program.


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Names]:
    with names(tmp_path_factory.mktemp("names")) as made:
        yield made


def regsync(
    pyz: Path, known: Names, env: Mapping[str, str], *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the built program, which reaches nobody but who is known."""
    known.refused.clear()
    ran = subprocess.run(
        [*program(pyz), *arguments],
        env={**os.environ, **known.environ, **env},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert known.refused == []
    return ran


def check_hidden(secrets: Iterable[str], *texts: str) -> None:
    """No secret and no token of a run may stand in what it said or left behind."""
    assert not [secret for secret in secrets for text in texts if secret in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("service account", ["oauth2"]),
        ("well-known file", ["oauth2"]),
        ("federation", ["sts", "iamcredentials"]),
        ("metadata", ["metadata"]),
    ],
)
def test_google(pyz: Path, known: Names, tmp_path: Path, kind: str, asked: list[str]) -> None:
    """One login serves both registries of Google."""
    with (
        google(known) as services,
        persona("gar", names=known) as source,
        persona("gcr", names=known) as target,
    ):
        for each in (source, target):
            assert isinstance(each.provider.tokens, GoogleTokens)
            each.provider.tokens.google = services.site
        image = Seed(8).image(sizes=(1000, 70_000))
        image.load_into(source.app, "project/private/app", tag="v1")
        env = google_identity(kind, services.site, tmp_path) or services.environ
        copied = [f"{GAR}/project/private/app:v1", f"{GCR}/project/mirror:v1"]
        command = ["copy", "--json", "--no-artifacts", "-vv", *copied]
        ran = regsync(pyz, known, {"HOME": str(tmp_path), **env}, *command)
        assert ran.returncode == 0, ran.stderr
        assert held(target, "project/mirror", image)
        assert services.site.asked == asked
        for each in (source, target):
            # One token for all: asked for with the access token, used as Bearer (section 5.2).
            (entry,) = each.journal.matching("GET", "token")
            assert entry.authorization[0] == "basic"
            check_hidden(each.provider.tokens._tokens, ran.stdout, ran.stderr)
        check_hidden(services.site.secrets, ran.stdout, ran.stderr)
        for each in (services, source, target):
            each.check()


def google_identity(kind: str, services: Google, home: Path) -> dict[str, str]:
    """Write the file of an identity; return the environment that names it."""
    key = home / "key.json"
    if kind == "metadata":
        return {}
    if kind == "well-known file":
        folder = home / ".config" / "gcloud"
        folder.mkdir(parents=True)
        user = json.dumps(services.authorized_user())
        (folder / "application_default_credentials.json").write_text(user)
        return {"HOME": str(home)}
    if kind == "federation":
        (home / "token").write_text(next(iter(services.subjects)))
        url = services.impersonation_url
        told = services.external_account(
            {"file": str(home / "token")}, service_account_impersonation_url=url
        )
    else:
        told = services.service_account()
    key.write_text(json.dumps(told))
    return {"GOOGLE_APPLICATION_CREDENTIALS": str(key)}


def secrets_of(exchange: Exchange) -> list[str]:
    assert exchange.directory is not None
    given = [*SECRETS.values(), *exchange.issued_tokens, *exchange.directory.issued_tokens]
    assert len(given) >= len(SECRETS) + 2
    return given


# On a clock that jumps.


async def sync(world: Virtual, source: str, *repositories: str, **options: Any) -> Ran:
    """Copy these repositories from a cloud to `target.test`."""
    env = options.pop("env", None)
    wanted = [{"from": name, "tags": tags("v1")} for name in repositories]
    registries = {"source": {"url": f"https://{source}", **options}, "target": "http://target.test"}
    return await world.run(
        "sync", "--json", "-vv", "-c", "-", stdin=document(registries, *wanted), env=env
    )


def load(provider: App, *repositories: str) -> None:
    for number, name in enumerate(repositories):
        Seed(number).image(sizes=(9,)).load_into(provider, name, tag="v1")


Azure = tuple[Provider, Exchange, Directory]


@pytest.fixture
def azure(world: Virtual) -> Azure:
    """A registry of Azure and its directory, where nobody is known yet."""
    world.registry("target.test")
    provider = world.persona("acr-io")
    exchange = provider.tokens
    assert isinstance(exchange, Exchange)
    assert exchange.directory is not None
    return provider, exchange, exchange.directory


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_guess_at_google_costs_one_connection_and_what_is_public_is_copied(
    world: Virtual,
) -> None:
    services = Google(now=anyio.current_time, wall=world.wall, has_account=False)
    for host in HOSTS:
        world.listen(services, host, scheme="https")
    world.listen(services, METADATA[1])
    source, target = world.persona("gar"), world.registry("target.test")
    assert isinstance(source.tokens, GoogleTokens)
    source.tokens.google = services
    repositories = ["public/images/one", "public/images/two"]
    images = [Seed(9).image().load_into(source, name, tag="v1") for name in repositories]
    ran = await sync(world, GAR, *repositories)
    assert ran.status == 0
    assert all(held(target, name, image) for name, image in zip(repositories, images, strict=True))
    assert services.asked == ["metadata"]
    assert {entry.authorization for entry in source.journal.matching("GET", "token")} == {("", "")}


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_virtual_machine_at_azure_logs_in_with_nothing_said_about_it(
    world: Virtual, azure: Azure
) -> None:
    provider, exchange, directory = azure
    world.listen(directory, "169.254.169.254")
    directory.identities.append(Identity(client_id="m", managed="system"))
    repositories = [f"app{number}" for number in range(50)]
    load(provider, *repositories)
    ran = await sync(world, ACR, *repositories)
    assert (ran.status, len(ran.images)) == (0, 50)
    assert [entry.status for entry in directory.journal.entries] == [400, 200]
    # Eight repositories in a token (docs/design.md section 6, rule 2).
    assert (exchange.exchanges, exchange.requests) == (1, math.ceil(50 / 8))
    provider.journal.matching(kind="manifest", status=401).exactly(1)
    check_hidden(secrets_of(exchange), ran.out, ran.err)


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("identity", ["no service", "none", "refused by the registry"])
async def test_what_anybody_may_pull_needs_no_login_at_azure(
    world: Virtual, azure: Azure, identity: str
) -> None:
    provider, exchange, directory = azure
    exchange.anonymous = True
    if identity != "no service":
        world.listen(directory, "169.254.169.254")
    is_refused = identity == "refused by the registry"
    if is_refused:
        directory.identities.append(Identity(client_id="m", managed="system"))
        exchange.tenants = ("33333333-3333-4333-8333-333333333333",)
    load(provider, "app")
    assert (await sync(world, ACR, "app")).status == 0
    assert (exchange.exchanges, exchange.requests) == (is_refused, 1)


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("refusal", [400, 401])
async def test_a_login_that_azure_revokes_in_mid_run_is_renewed_once(
    world: Virtual, azure: Azure, refusal: int
) -> None:
    """Section 2.4: a refresh token that is refused may be answered 400 there."""
    provider, exchange, directory = azure
    directory.identities.append(APP)
    exchange.refusal = refusal
    load(provider, "one", "two")

    def revoke(request: Request) -> None:
        if request.kind == "blob" and not exchange.revoked:
            exchange.revoke_logins()

    provider.intercept = revoke
    ran = await sync(world, ACR, "one", "two", env=BY_SECRET, max_concurrent=1)
    assert ran.status == 0
    assert (len(directory.journal.entries), exchange.exchanges) == (2, 2)
    check_hidden(secrets_of(exchange), ran.out, ran.err)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_directory_that_is_not_well_is_asked_again(world: Virtual, azure: Azure) -> None:
    provider, exchange, directory = azure
    directory.identities.append(APP)
    load(provider, "app")
    answers = [Response(503, [("Retry-After", "9")]), Response(500)]
    directory.intercept = lambda request: answers.pop(0) if answers else None
    ran = await sync(world, ACR, "app", env=BY_SECRET)
    assert (ran.status, len(directory.journal.entries), exchange.exchanges) == (0, 3, 1)
    assert ran.seconds >= 9


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("good", [True, False])
async def test_what_az_acr_login_leaves_in_the_docker_config_logs_in(
    world: Virtual, azure: Azure, good: bool, clean_env: Path
) -> None:
    """Section 6.1: the user of zeros, whose password is the registry's refresh token."""
    provider, exchange, directory = azure
    directory.identities.append(APP)
    load(provider, "app")
    await sync(world, ACR, "app", env=BY_SECRET)
    given = exchange.issued_tokens[0]
    if not good:
        exchange.revoke_logins()
    (clean_env / ".docker").mkdir()
    entry = {"auth": basic(TOKEN_USER, given)}
    (clean_env / ".docker" / "config.json").write_text(json.dumps({"auths": {ACR: entry}}))
    exchange.requests = 0
    ran = await sync(world, ACR, "app")
    assert (ran.status, exchange.requests) == ((0, 1) if good else (4, 1))
    check_hidden(secrets_of(exchange), ran.out, ran.err)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_auth_check_tells_source_and_end_of_a_login(world: Virtual, azure: Azure) -> None:
    provider, exchange, directory = azure
    directory.identities.append(APP)
    load(provider, "app")
    text = document({"source": {"url": ACR}, "t": "http://target.test"}, {"from": "app"})
    ran = await world.run("auth", "check", "--json", "-vv", "-c", "-", stdin=text, env=BY_SECRET)
    row = next(each for each in ran.report["access"] if each["repository"] == f"{ACR}/app")
    assert ran.status == 0
    assert row["source"] == "AZURE_CLIENT_SECRET"
    assert row["expires"] == "2026-01-01T03:00:00Z"
    check_hidden(secrets_of(exchange), ran.out, ran.err)
