"""Runs against ECR and ECR Public: the built program from an empty state, over TLS, under AWS's own
names.

Each source of an identity logs in for a copy from and to both; the forward proxy knows AWS's names
and nothing else, metadata services are where their variables say. What is about time runs in this
process, on the virtual clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.clouds.aws import ACCOUNT, Aws, Private, Public
from conformance.content.images import Seed
from conformance.providers.personas import imitate
from conformance.registry.app import App
from conformance.server.memory import Link
from conformance.server.names import Names, names
from conformance.server.sockets import Server, run_in_thread
from tests.ends import Virtual, document, held, program, tags
from tests.test_aws import SOURCES, World
from tests.thinning import Cell, thinned

PRIVATE, PUBLIC = f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com", "public.ecr.aws"
SERVICES = [
    *(
        "api.ecr.eu-west-1.amazonaws.com",
        "api.ecr-public.us-east-1.amazonaws.com",
        "sts.eu-west-1.amazonaws.com",
    ),
    *(
        "portal.sso.eu-west-1.amazonaws.com",
        "oidc.eu-west-1.amazonaws.com",
        "portal.sso.us-east-2.amazonaws.com",
    ),
    *("sts.us-east-1.amazonaws.com", "portal.sso.us-east-1.amazonaws.com"),
]


class Parts:
    """AWS under its own names: its services, both registries, and metadata over plain HTTP at
    `metadata`.
    """

    def __init__(self, known: Names, running: contextlib.ExitStack) -> None:
        self.known = known
        context = known.context([*SERVICES, PRIVATE, PUBLIC])
        self.aws = Aws()
        self.login = Public(self.aws)
        self.private, self.public = (
            imitate("ecr", auth=Private(self.aws)),
            imitate("ecr_public", auth=self.login),
        )

        def start(site: Any, *hosts: str) -> Server:
            server = running.enter_context(
                run_in_thread(site, ssl_context=context if hosts else None)
            )
            for host in hosts:
                running.enter_context(known.known(host, server.port))
            return server

        start(self.aws, *SERVICES)
        self.servers = {PRIVATE: start(self.private, PRIVATE), PUBLIC: start(self.public, PUBLIC)}
        self.metadata = start(self.aws).url

    def clear(self) -> None:
        """Forget what an earlier test did."""
        self.aws.__init__()  # type: ignore[misc]
        self.login.issued.clear()
        for app in (self.private, self.public):
            app.repositories.clear()
            app.notes.clear()
            app.journal.clear()
        self.known.refused.clear()
        self.known.tunnels.clear()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    with names(tmp_path_factory.mktemp("names")) as known, contextlib.ExitStack() as stack:
        yield Parts(known, stack)


@pytest.fixture
def parts(running: Parts) -> Parts:
    running.clear()
    return running


def regsync(
    pyz: Path, parts: Parts, environ: Mapping[str, str], *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the built program; nothing that it says may hold a secret."""
    ran = subprocess.run(
        [*program(pyz), *arguments],
        env={**os.environ, **parts.known.environ, **environ},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = ran.stdout + ran.stderr
    assert not [secret for secret in parts.aws.secrets if secret in said]
    return ran


def nearby(parts: Parts, environ: Mapping[str, str]) -> dict[str, str]:
    """Lead to metadata services at a port of this machine: link-local addresses cannot be had in a
    test.
    """
    near = {**environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": parts.metadata}
    for name in ("RELATIVE", "FULL"):
        if near.pop(f"AWS_CONTAINER_CREDENTIALS_{name}_URI", ""):
            assert parts.aws.container is not None
            near["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = parts.metadata + parts.aws.container[0]
    return near


def kind(cell: Cell) -> Cell:
    """An ordinary run has one source of each kind; those of a kind log in by themselves in
    test_aws.py.
    """
    return (str(cell[0]).partition(" ")[0].strip(","),)


@pytest.mark.slow
@pytest.mark.parametrize("source", thinned([(name,) for name in sorted(SOURCES)], kind))
def test_each_source_copies_out_of_both_and_into_both(
    pyz: Path, parts: Parts, clean_env: Path, source: str
) -> None:
    """-vv, from an empty state: what was asked of whom, and that no secret was shown."""
    world = World(clean_env)
    world.aws = parts.aws
    arrange, asked = SOURCES[source]
    name = arrange(world)
    seed = Seed(7)
    out = seed.image(sizes=(900, 70)).load_into(parts.public, "docker/library/app", tag="v1")
    back = seed.image(sizes=(80, 500)).load_into(parts.private, "team/own", tag="v1")
    (
        parts.private.repositories["app"],
        parts.public.repositories["alias/own"],
    )  # created: a push creates none
    mappings = [
        {
            "from": "docker/library/app",
            "to": "app",
            "source": "public",
            "targets": ["private"],
            "tags": tags("v1"),
        },
        {
            "from": "team/own",
            "to": "alias/own",
            "source": "private",
            "targets": ["public"],
            "tags": tags("v1"),
        },
    ]
    registries = {"public": PUBLIC, "private": PRIVATE}
    config = document(registries, *mappings, defaults={"source": "public", "targets": ["private"]})
    ran = regsync(
        pyz, parts, nearby(parts, world.environ), "sync", "-vv", "--json", "-c", "-", stdin=config
    )
    assert ran.returncode == 0, ran.stderr
    assert [each["status"] for each in json.loads(ran.stdout)["images"]] == ["synced", "synced"]
    assert held(parts.servers[PRIVATE], "app", out)
    assert held(parts.servers[PUBLIC], "alias/own", back)
    # One login for each of the two, which are two services, by who was to be found; and nothing
    # else.
    assert [[*map(parts.aws.owner, given)] for given in parts.aws.passwords.values()] == [
        [name],
        [name],
    ]
    once = Counter(asked.split())
    assert Counter(parts.aws.requests) == once + once - Counter(["ecr"]) + Counter(["ecr-public"])
    assert parts.login.issued == [True], "and one token"
    for site in (parts.aws, parts.private, parts.public):
        site.journal.check()
    assert parts.known.refused == []


@pytest.mark.slow
def test_public_images_need_no_login(pyz: Path, parts: Parts) -> None:
    """Neither a machine's role nor a password is asked for where anybody may pull, but for one
    short guess.
    """
    image = Seed(8).image(sizes=(90,)).load_into(parts.public, "docker/library/app", tag="v1")
    open_target = App()
    with run_in_thread(open_target) as target:
        copied = [
            "copy",
            "--json",
            "--no-artifacts",
            f"{PUBLIC}/docker/library/app:v1",
            f"{target.address}/app:v1",
        ]
        ran = regsync(pyz, parts, nearby(parts, {}), *copied)
        assert ran.returncode == 0, ran.stderr
        assert held(target, "app", image)
    assert parts.aws.requests == ["imds", "imds"], "which has no role for this machine"
    assert parts.login.issued == [False]


@pytest.mark.slow
def test_no_login_at_all_is_told_with_every_place(pyz: Path, parts: Parts, clean_env: Path) -> None:
    parts.private.repositories["app"]  # is created
    config = document({"source": {"url": PRIVATE, "auth_type": "ecr"}, "target": PRIVATE})
    ran = regsync(
        pyz,
        parts,
        nearby(parts, {}),
        "copy",
        "-c",
        "-",
        f"{PRIVATE}/app:v1",
        f"{PRIVATE}/app:v2",
        stdin=config,
    )
    assert ran.returncode == 4, ran.stderr
    for place in (
        "AWS_ACCESS_KEY_ID",
        "profile 'default' in ~/.aws/config",
        "AWS_CONTAINER",
        "EC2 metadata service",
    ):
        assert place in ran.stderr


# On the virtual clock, in this process.


def arranged(world: Virtual, **options: Any) -> tuple[Aws, App, dict[str, str]]:
    aws = Aws(now=world.wall, **options)
    user = aws.identity("user")
    world.listen(aws, "api.ecr.eu-west-1.amazonaws.com", scheme="https")
    private = imitate("ecr", auth=Private(aws), now=anyio.current_time, wall=world.wall)
    world.listen(private, PRIVATE, scheme="https", up=Link(latency=2.0), down=Link(latency=2.0))
    return aws, private, {"AWS_ACCESS_KEY_ID": user.access, "AWS_SECRET_ACCESS_KEY": user.secret}


def sources(
    world: Virtual, private: App, repositories: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    seed, source = Seed(9), world.registry("source.test")
    for number in range(repositories):
        private.repositories[f"app{number}"]  # is created
        seed.image(sizes=(300, 200)).load_into(source.app, f"app{number}", tag="v1")  # type: ignore[arg-type]
    mappings = [
        {"from": f"app{number}", "to": f"app{number}", "tags": tags("v1")}
        for number in range(repositories)
    ]
    return {
        "source": {"url": source.url},
        "ecr": {"url": f"https://{PRIVATE}", "max_concurrent": 6},
    }, mappings


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_fifty_repositories_share_one_login(world: Virtual) -> None:
    aws, private, environ = arranged(world)
    registries, mappings = sources(world, private, 50)
    ran = await world.run(
        "sync", "--json", "-q", "-c", "-", stdin=document(registries, *mappings), env=environ
    )
    assert ran.statuses() == ["synced"] * 50, ran.err
    assert aws.requests == ["ecr"]
    assert refusals(private) == 1, "by which the registry asked for the login"


def refusals(app: App) -> int:
    return sum(entry.status == 401 for entry in app.journal.entries)
