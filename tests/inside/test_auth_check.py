"""`auth check`: what each registry in use lets us do, told before any transfer; every request is
counted.
"""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from _regsync.auth.cloud import Login
from conformance.content.images import Seed
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth
from conformance.server.memory import Place
from tests.ends import Ran, Virtual, document
from tests.inside.a_cloud import ECR, Cloud
from tests.program import report_schema

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

LOGIN = {"auth_type": "basic", "credentials": {"username": "me", "password": "hunter2"}}
ORIGIN = "credentials of registry 'target'"
A_HOUR_LATER = "2026-01-01T01:00:00Z"


async def check(
    world: Virtual,
    registries: dict[str, Any],
    *repositories: str,
    verbose: str = "-v",
    **mapping: Any,
) -> tuple[Ran, dict[str, dict[str, Any]]]:
    """Ask in JSON; return the run, and its rows by repository."""
    text = document(registries, *({"from": name, **mapping} for name in repositories))
    ran = await world.run("auth", "check", "--json", verbose, "-c", "-", stdin=text)
    Draft202012Validator(report_schema()).validate(ran.report)
    assert set(ran.report) == {"schema", "access"}
    rows = ran.report["access"]
    assert [row["repository"] for row in rows] == sorted(row["repository"] for row in rows)
    return ran, {row["repository"]: row for row in rows}


def asked(place: Place) -> list[str]:
    """What a registry was asked, in order, with what it said."""
    return [
        f"{each.method} {each.target.split('/_')[0]} {each.status}"
        for each in place.journal.entries
    ]


def serve(world: Virtual, app: App, name: str, *repositories: str, scheme: str = "http") -> Place:
    place = world.listen(app, name, scheme=scheme)
    for number, repository in enumerate(repositories):
        Seed(number).image().load_into(app, repository, tag="v1")
    place.journal.clear()
    return place


@pytest.mark.provokes("ping", "credential_unasked")
async def test_lines_for_people_say_the_same(world: Virtual, cloud: Cloud) -> None:
    cloud.life = 3600.0
    serve(world, App(auth=BasicAuth({"AWS": "p1"})), ECR, "one", scheme="https")
    serve(world, App(), "target.test", "one")
    registries = {"source": f"https://{ECR}", "target": {"url": "http://target.test", **LOGIN}}
    text = document(registries, {"from": "one"}, {"from": "one", "to": "two"})
    ran = await world.run("auth", "check", "-q", "-c", "-", stdin=text)
    assert (ran.status, ran.err) == (0, "")
    assert sorted(ran.out.splitlines()) == [
        f"ok  {ECR}/one  pull  (a cloud of the tests, until {A_HOUR_LATER})",
        f"ok  target.test/one  pull,push  (anonymous, no login needed, found: {ORIGIN})",
        f"ok  target.test/two  -  (anonymous, no login needed, found: {ORIGIN}, "
        "the repository does not exist yet, so no push was tried)",
    ]


async def test_a_missing_ecr_repository_comes_with_the_command_that_creates_it(
    world: Virtual, cloud: Cloud
) -> None:
    serve(world, App(), "source.test", "team/app")
    target = serve(world, App(auth=BasicAuth({"AWS": "p1"})), ECR, scheme="https")
    registries = {"source": "http://source.test", "target": f"https://{ECR}"}
    ran, rows = await check(world, registries, "team/app")
    assert ran.status == 4
    assert "hint: add a repository creation template for CREATE_ON_PUSH, or create " in ran.err
    assert "team/app --registry-id 123456789012 --region eu-west-1\n" in ran.err
    found = rows[f"{ECR}/team/app"]
    assert (found["method"], found["source"], found["upload"]) == (
        "detected",
        "a cloud of the tests",
        None,
    )
    assert (found["error"]["code"], found["error"]["status"]) == ("TARGET_ERROR", 404)
    assert [each.split()[0] for each in asked(target)] == ["GET", "GET"]


async def test_who_has_no_login_at_a_cloud_is_told_how_to_see_why(
    world: Virtual, cloud: Cloud
) -> None:
    cloud.here, cloud.given = False, [None]
    serve(world, App(), "source.test", "app")
    serve(world, App(auth=BasicAuth({"AWS": "p1"})), ECR, "app", scheme="https")
    ran, rows = await check(
        world, {"source": "http://source.test", "target": f"https://{ECR}"}, "app"
    )
    assert (ran.status, rows[f"{ECR}/app"]["error"]["code"]) == (4, "AUTH_ERROR")
    assert "hint: set auth_type (ecr, gar, acr) to see why" in ran.err


@pytest.mark.parametrize("expires", [1e300, -1e300, float("nan")])
async def test_an_end_that_no_calendar_has_is_not_shown(
    world: Virtual, cloud: Cloud, expires: float
) -> None:
    """ACR's token says it itself, in a part that the registry writes."""
    cloud.given = [Login(cloud.credential(1), expires)]
    serve(world, App(auth=BasicAuth({"AWS": "p1"})), ECR, "team/app", scheme="https")
    serve(world, App(), "target.test")
    ran, rows = await check(
        world, {"source": f"https://{ECR}", "target": "http://target.test"}, "team/app"
    )
    assert (ran.status, rows[f"{ECR}/team/app"]["expires"]) == (0, None)
