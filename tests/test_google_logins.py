"""Google's registries by whatever identity the machine has: the built program under real names,
then by the clock.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.clouds.google import HOSTS, METADATA, Google, GoogleTokens, Running, google
from conformance.content.images import Image, Seed
from conformance.messages import Request, Response
from conformance.providers.personas import Provider, persona
from conformance.providers.personas import Running as Registry
from conformance.server.exchange import Site
from conformance.server.names import Names, names
from conformance.server.sockets import run_in_thread
from tests.ends import Virtual, document, held, program, tags, virtual

GAR, GCR = "europe-docker.pkg.dev", "gcr.io"


class Elsewhere(Site):
    """Another provider of identities, which gives tokens to this machine."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def start(self, request: Request) -> Response:
        assert (request.path, request.header("metadata")) == ("/token", "True")
        return Response(
            200,
            [("Content-Type", "application/json")],
            json.dumps({"id_token": self._token}).encode(),
        )


@dataclass
class World:
    """Google's services and two of its registries under their names, and the program."""

    names: Names
    services: Running
    gar: Registry
    gcr: Registry
    elsewhere: str
    image: Image
    program: Path

    @property
    def google(self) -> Google:
        return self.services.site

    def copy(
        self, source: str, target: str, home: Path, *more: str, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the built program from an empty state; its output shows no secret."""
        command = [
            *program(self.program),
            "copy",
            "--json",
            "--no-artifacts",
            "-vv",
            *more,
            source,
            target,
        ]
        environ = {"HOME": str(home), "PATH": os.environ["PATH"], **self.names.environ, **env}
        ran = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        said = ran.stdout + ran.stderr
        secrets = [
            *self.google.secrets,
            *(token for each in (self.gar, self.gcr) for token in given(each.provider)),
        ]
        assert not [secret for secret in secrets if secret in said]
        assert "Traceback" not in said
        for running in (self.services, self.gar, self.gcr):
            running.check()
        assert self.names.refused == []
        return ran


def given(provider: Provider) -> list[str]:
    """Return the tokens that a registry's token service gave."""
    assert provider.tokens is not None
    return [*provider.tokens._tokens]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, pyz: Path) -> Iterator[World]:
    with (
        names(tmp_path_factory.mktemp("names")) as known,
        google(known) as services,
        persona("gar", names=known) as gar,
        persona("gcr", names=known) as gcr,
        run_in_thread(Elsewhere(next(iter(services.site.subjects)))) as elsewhere,
    ):
        for each in (gar, gcr):
            assert isinstance(each.provider.tokens, GoogleTokens)
            each.provider.tokens.google = services.site
        image = (
            Seed(8).image(sizes=(1000, 70_000)).load_into(gar.app, "project/private/app", tag="v1")
        )
        image.load_into(gar.app, "public/images/app", tag="v1")
        yield World(known, services, gar, gcr, elsewhere.url, image, pyz)


@pytest.fixture
def world(served: World) -> World:
    served.google.asked.clear()
    served.gcr.app.repositories.clear()
    for each in (served.gar, served.gcr):
        each.journal.clear()
    return served


def by_file(world: World, home: Path, **fields: Any) -> dict[str, Any]:
    (home / "token").write_text(next(iter(world.google.subjects)))
    return world.google.external_account({"file": str(home / "token")}, **fields)


def by_url(world: World, home: Path) -> dict[str, Any]:
    form = {"type": "json", "subject_token_field_name": "id_token"}
    url = f"{world.elsewhere}/token"
    return world.google.external_account(
        {"url": url, "headers": {"Metadata": "True"}, "format": form}
    )


# Each kind of identity: the file that it is in, and the services that are asked in turn.
KINDS: dict[str, tuple[Callable[[World, Path], dict[str, Any] | None], list[str]]] = {
    "service_account": (lambda world, home: world.google.service_account(), ["oauth2"]),
    "authorized_user": (lambda world, home: world.google.authorized_user(), ["oauth2"]),
    "external_file": (by_file, ["sts"]),
    "external_url": (by_url, ["sts"]),
    "external_impersonating": (
        lambda world, home: by_file(
            world, home, service_account_impersonation_url=world.google.impersonation_url
        ),
        ["sts", "iamcredentials"],
    ),
    "external_user": (lambda world, home: world.google.external_user(), ["sts"]),
    "impersonated": (
        lambda world, home: world.google.impersonated(world.google.service_account()),
        ["oauth2", "iamcredentials"],
    ),
    "metadata": (lambda world, home: None, ["metadata"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_built_program_logs_in_once_for_both_registries(
    world: World, tmp_path: Path, kind: str
) -> None:
    write, services = KINDS[kind]
    info, env = write(world, tmp_path), dict(world.services.environ)
    if info is not None and kind == "authorized_user":
        (tmp_path / ".config" / "gcloud").mkdir(parents=True)
        (tmp_path / ".config" / "gcloud" / "application_default_credentials.json").write_text(
            json.dumps(info)
        )
        env = {}
    elif info is not None:
        (tmp_path / "key.json").write_text(json.dumps(info))
        env = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}
    ran = world.copy(f"{GAR}/project/private/app:v1", f"{GCR}/project/mirror:v1", tmp_path, **env)
    assert ran.returncode == 0, ran.stderr
    assert held(world.gcr, "project/mirror", world.image)
    assert world.google.asked == services
    for each in (world.gar, world.gcr):
        # At the registry, one token for all: asked for with the access token, used as Bearer
        # (section 5.2).
        tokens = [*each.journal.matching("GET", "token")]
        assert {entry.authorization[0] for entry in tokens} == {"basic"}
        assert len(tokens) == 1


@pytest.mark.slow
def test_the_built_program_pulls_what_is_public_without_any_identity(
    world: World, tmp_path: Path
) -> None:
    with persona("strict", names=world.names) as target:
        ran = world.copy(
            f"{GAR}/public/images/app:v1", f"{target.address}/app:v1", tmp_path, NO_GCE_CHECK="true"
        )
        assert ran.returncode == 0, ran.stderr
        assert held(target, "app", world.image)
    assert world.google.asked == []
    assert {entry.authorization[0] for entry in world.gar.journal.matching("GET", "token")} == {""}


@pytest.mark.slow
def test_the_built_program_names_all_places_and_the_remedy(world: World, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(document({"source": {"url": GAR, "auth_type": "gar"}, "t": GCR}))
    env = {"NO_GCE_CHECK": "true"}
    ran = world.copy(
        f"{GAR}/project/private/app:v1",
        f"{GCR}/project/mirror:v1",
        tmp_path,
        "-c",
        str(config),
        **env,
    )
    assert ran.returncode == 4, ran.stderr
    for words in (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "application_default_credentials.json",
        "metadata server",
        "gcloud",
    ):
        assert words in ran.stdout + ran.stderr


# Long runs, on a clock that jumps.


def google_in(
    world: Virtual, home: Path, **options: Any
) -> tuple[Google, Provider, Mapping[str, str]]:
    """Put Google's services and a registry into a world; return them with the environment of a
    service account.
    """
    services = Google(now=anyio.current_time, wall=world.wall, **options)
    for host in HOSTS:
        world.listen(services, host, scheme="https")
    world.listen(services, METADATA[1])
    registry = world.persona("gar")
    assert isinstance(registry.tokens, GoogleTokens)
    registry.tokens.google = services
    (home / "key.json").write_text(json.dumps(services.service_account()))
    return services, registry, {"GOOGLE_APPLICATION_CREDENTIALS": str(home / "key.json")}


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_without_an_identity_a_guess_costs_one_connection_and_what_is_public_is_copied(
    tmp_path: Path,
) -> None:
    async with virtual() as world:
        services, source, _ = google_in(world, tmp_path, has_account=False)
        target = world.registry("target.test")
        names = ["public/images/one", "public/images/two"]
        images = [Seed(9).image().load_into(source, name, tag="v1") for name in names]
        config = document(
            {"source": GAR, "t": target}, *({"from": name, "tags": tags("v1")} for name in names)
        )
        ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=config)
        assert (ran.status, ran.err) == (0, "")
        assert all(held(target, name, image) for name, image in zip(names, images, strict=True))
        assert services.asked == ["metadata"]
        assert {entry.authorization for entry in source.journal.matching("GET", "token")} == {
            ("", "")
        }


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_fifty_repositories_cost_one_login(tmp_path: Path) -> None:
    async with virtual() as world:
        services, source, env = google_in(world, tmp_path)
        target = world.registry("target.test")
        seed, repositories = Seed(9), [f"project/app/n{number:02}" for number in range(50)]
        for name in repositories:
            seed.image(sizes=(10,)).load_into(source, name, tag="v1")
        config = document(
            {"source": GAR, "t": target},
            *({"from": name, "tags": tags("v1")} for name in repositories),
        )
        ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=config, env=env)
        assert (ran.status, ran.err) == (0, "")
        assert services.asked == ["oauth2"]
        # Eight repositories share one token of the registry (docs/design.md section 6, rule 2).
        assert len(source.journal.matching("GET", "token")) == 7


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_auth_check_tells_whose_login_it_is_and_until_when(tmp_path: Path) -> None:
    async with virtual() as world:
        services, source, env = google_in(world, tmp_path)
        world.registry("target.test")
        Seed(9).image().load_into(source, "project/app/app", tag="v1")
        config = document(
            {"source": GAR, "t": "http://target.test"}, {"from": "project/app/app", "to": "app"}
        )
        ran = await world.run("auth", "check", "--json", "-q", "-c", "-", stdin=config, env=env)
        row = next(row for row in ran.report["access"] if row["registry"] == "source")
        key = env["GOOGLE_APPLICATION_CREDENTIALS"]
        origin = f"{key} (GOOGLE_APPLICATION_CREDENTIALS), service_account at oauth2.googleapis.com"
        assert (row["source"], row["expires"], row["error"]) == (
            origin,
            "2026-01-01T01:00:00Z",
            None,
        )
        assert services.asked == ["oauth2"]
        services.impersonators.clear()
        (tmp_path / "key.json").write_text(
            json.dumps(services.impersonated(services.service_account()))
        )
        ran = await world.run("auth", "check", "--json", "-q", "-c", "-", stdin=config, env=env)
        row = next(row for row in ran.report["access"] if row["registry"] == "source")
        assert ran.status == 4
        assert "PERMISSION_DENIED" in row["error"]["message"]
        assert "roles/iam.serviceAccountTokenCreator" in ran.err
