"""Copies from and to registries of clouds, by the identity that a machine has there.

First the built program, from an empty state and over TLS, under the clouds' own names: a forward
proxy knows those names and nothing else. Then runs in this process, on a clock that jumps.
What each source of an identity asks for is in test_aws.py, test_azure.py and test_google.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from conformance.clouds.aws import Private, Public
from conformance.clouds.azure import Exchange, Identity
from conformance.content.images import Seed
from conformance.providers.personas import imitate, persona
from conformance.server.exchange import Site
from conformance.server.names import Names, names
from conformance.server.sockets import Server, run_in_thread
from tests.ends import document, held, only, program, tags
from tests.inside.aws_machine import PRIVATE, SOURCES, World

PUBLIC = "public.ecr.aws"
SERVICES = [
    f"{name}.amazonaws.com"
    for name in (
        "api.ecr.eu-west-1",
        "api.ecr-public.us-east-1",
        "sts.eu-west-1",
        "sts.us-east-1",
        "portal.sso.eu-west-1",
    )
]
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
    "source", ["environment", "web identity", "role of a profile", "sso", "container", "instance"]
)
def test_ecr(pyz: Path, known: Names, clean_env: Path, source: str) -> None:
    """A copy out of ECR Public and into ECR, and one the other way, by each way to an identity."""
    machine = World(clean_env)
    arrange, asked = SOURCES[source]
    name = arrange(machine)
    login = Public(machine.aws)
    private = imitate("ecr", auth=Private(machine.aws))
    public = imitate("ecr_public", auth=login)
    seed = Seed(7)
    out = seed.image(sizes=(900, 70)).load_into(public, "docker/library/app", tag="v1")
    back = seed.image(sizes=(80, 500)).load_into(private, "team/own", tag="v1")
    for registry, repository in ((private, "app"), (public, "alias/own")):
        registry.repositories[repository]  # is created by that, as it is not by a push

    with contextlib.ExitStack() as stack:
        context = known.context([*SERVICES, PRIVATE, PUBLIC])

        def start(site: Site, *hosts: str) -> Server:
            server = stack.enter_context(run_in_thread(site, ssl_context=context))
            for host in hosts:
                stack.enter_context(known.known(host, server.port))
            return server

        start(machine.aws, *SERVICES)
        servers = [start(private, PRIVATE), start(public, PUBLIC)]
        metadata = stack.enter_context(run_in_thread(machine.aws)).url
        config = document(
            {"public": PUBLIC, "private": PRIVATE},
            {"from": "docker/library/app", "to": "app", "tags": tags("v1")},
            {
                "from": "team/own",
                "to": "alias/own",
                "source": "private",
                "targets": ["public"],
                "tags": tags("v1"),
            },
            defaults={"source": "public", "targets": ["private"]},
        )
        env = nearby(machine, metadata)
        ran = regsync(pyz, known, env, "sync", "-vv", "--json", "-c", "-", stdin=config)
        assert ran.returncode == 0, ran.stderr
        assert [each["status"] for each in json.loads(ran.stdout)["images"]] == ["synced"] * 2
        assert held(servers[0], "app", out)
        assert held(servers[1], "alias/own", back)

    # One login for each of the two services by who was to be found, and nothing else.
    owners = [[*map(machine.aws.owner, given)] for given in machine.aws.passwords.values()]
    assert owners == [[name], [name]]
    once = Counter(asked.split())
    expected = once + once - Counter(["ecr"]) + Counter(["ecr-public"])
    assert Counter(machine.aws.requests) == expected
    assert login.issued == [True], "and one token"
    for site in (machine.aws, private, public):
        site.journal.check()
    check_hidden(machine.aws.secrets, ran.stdout, ran.stderr)


def nearby(machine: World, metadata: str) -> dict[str, str]:
    """Lead to metadata services at a port of this machine, as no test has link-local addresses."""
    near = {**machine.environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata}
    if near.pop("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", ""):
        assert machine.aws.container is not None
        near["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = metadata + machine.aws.container[0]
    return near


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cloud"), [("secret", "io"), ("federated token", "cn"), ("service", "us")]
)
def test_acr(
    pyz: Path, known: Names, tmp_path: Path, clean_env: Path, kind: str, cloud: str
) -> None:
    with persona(f"acr-{cloud}", names=known) as target, persona("strict") as source:
        image = Seed(5).index().load_into(source.app, "app", tag="v1")
        exchange = target.provider.tokens
        assert isinstance(exchange, Exchange)
        directory = exchange.directory
        assert directory is not None
        directory.header = SECRETS["header"]
        directory.identities += [APP, Identity(client_id="m", managed="system")]
        with run_in_thread(directory) as plain:
            env = azure_identity(kind, plain.url, tmp_path)
            command = ["copy", "--json", "--no-artifacts", "-vv", f"{source.address}/app:v1"]
            ran = regsync(pyz, known, env, *command, f"{target.address}/app:v1")
        assert ran.returncode == 0, ran.stderr
        assert only(json.loads(ran.stdout)["images"])["status"] == "synced"
        assert held(target, "app", image)
        assert directory.journal.count(status=200) == 1
        assert (exchange.exchanges, exchange.requests) == (1, 1)
        target.check()
        left = [path.read_text("latin-1") for path in clean_env.rglob("*") if path.is_file()]
        check_hidden(secrets_of(exchange), ran.stdout, ran.stderr, *left)


def azure_identity(kind: str, served: str, folder: Path) -> dict[str, str]:
    """Return the environment of an identity."""
    if kind == "secret":
        return BY_SECRET
    if kind == "service":
        return {"IDENTITY_ENDPOINT": f"{served}/msi/token", "IDENTITY_HEADER": SECRETS["header"]}
    (folder / "token").write_text(SECRETS["assertion"], encoding="ascii")
    application = {"AZURE_CLIENT_ID": APP.client_id, "AZURE_TENANT_ID": APP.tenant}
    return {**application, "AZURE_FEDERATED_TOKEN_FILE": str(folder / "token")}


def secrets_of(exchange: Exchange) -> list[str]:
    assert exchange.directory is not None
    given = [*SECRETS.values(), *exchange.issued_tokens, *exchange.directory.issued_tokens]
    assert len(given) >= len(SECRETS) + 2
    return given
