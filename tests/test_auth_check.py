"""`auth check`: what each registry in use lets us do, told before any transfer; every request is
counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from conformance.content.images import Seed
from conformance.messages import Access, Answer, Request, Response, error
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.exchange import Reception
from conformance.server.memory import Place
from tests.ends import Ran, Virtual, document
from tests.program import report_schema

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

USERS = {"me": "hunter2"}
LOGIN = {"auth_type": "basic", "credentials": {"username": "me", "password": "hunter2"}}
ORIGIN = "credentials of registry 'target'"
ENDS = {"source": "http://source.test", "target": "http://target.test"}


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


def with_login(side: str) -> dict[str, Any]:
    """Return both ends, of which one has credentials."""
    return {**ENDS, side: {"url": ENDS[side], **LOGIN}}


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


@pytest.mark.new
async def test_each_end_is_asked_as_a_run_would_and_no_manifest_is_touched(world: Virtual) -> None:
    tokens = TokenService(USERS, now=anyio.current_time)
    source = serve(world, App(auth=tokens), "source.test", "app")
    target = serve(world, App(auth=BasicAuth(USERS)), "target.test", "app")
    ran, rows = await check(world, with_login("target"), "app")
    assert ran.status == 0
    assert [each.split("?")[0] for each in asked(source)] == [
        "GET /v2/app/tags/list",
        "GET /token",
        "GET /v2/app/tags/list",
    ]
    session = "/v2/app/blobs/uploads/00000000-0000-4000-8000-000000000001?"
    assert [each.split("_state")[0] for each in asked(target)] == [
        "GET /v2/app/tags/list?n=1 401",
        "GET /v2/app/tags/list?n=1 200",
        "POST /v2/app/blobs/uploads/ 202",
        f"DELETE {session}",
    ]
    assert rows == {
        "source.test/app": row("source", "source.test/app"),
        "target.test/app": row(
            "target",
            "target.test/app",
            rights="pull,push",
            method="basic",
            source="credentials of registry 'target'",
            upload="opened",
        ),
    }


def row(alias: str, repository: str, **more: Any) -> dict[str, Any]:
    none = dict.fromkeys(("source", "expires", "upload", "error"))
    plain = {"registry": alias, "repository": repository, "rights": "pull", "method": "detected"}
    return {**plain, **none, **more}


@pytest.mark.new
async def test_what_is_not_there_yet_is_not_created_elsewhere(world: Virtual) -> None:
    serve(world, App(), "source.test", "app")
    target = serve(world, App(), "target.test")
    ran, rows = await check(world, ENDS, "app")
    assert (ran.status, rows["target.test/app"]["upload"]) == (0, "absent")
    assert asked(target) == ["GET /v2/app/tags/list?n=1 404"]


@pytest.mark.new
async def test_fifty_repositories_need_seven_tokens_and_one_bare_request(world: Virtual) -> None:
    names = [f"team/app{number}" for number in range(50)]
    tokens = TokenService(USERS, anonymous=False, now=anyio.current_time)
    source = serve(world, App(auth=tokens), "source.test", *names)
    serve(world, App(), "target.test", *names)
    ran, rows = await check(world, with_login("source"), *names)
    assert (ran.status, len(rows), tokens.requests) == (0, 100, 7)
    source.journal.matching("GET", "tag_list").exactly(51)


@pytest.mark.new
async def test_refused_credentials_are_told_for_each_repository_and_shown_once(
    world: Virtual,
) -> None:
    tokens = TokenService({"me": "another"}, now=anyio.current_time)
    source = serve(world, App(auth=tokens), "source.test", "one", "two")
    target = serve(world, App(), "target.test", "one", "two")
    ran, rows = await check(world, with_login("source"), "one", "two")
    assert (ran.status, tokens.requests, len(source.journal.entries)) == (4, 1, 2)
    codes = {name: found["error"] and found["error"]["code"] for name, found in rows.items()}
    wrong = dict.fromkeys(("source.test/one", "source.test/two"), "AUTH_ERROR")
    assert codes == {**wrong, "target.test/one": None, "target.test/two": None}
    assert ran.err.count("error: AUTH_ERROR: check source.test/") == 2
    assert ran.err.count("hint: check") == 1
    target.journal.matching("POST").exactly(2)


async def test_a_credential_file_that_cannot_be_read_stops_its_registry_only(
    world: Virtual, tmp_path: Path
) -> None:
    (tmp_path / "config.json").mkdir()
    source = serve(world, App(), "source.test", "app")
    serve(world, App(), "target.test", "app")
    registries = {
        "source": "http://source.test",
        "target": {"url": "http://target.test", "auth_type": "anonymous"},
    }
    text = document(registries, {"from": "app"})
    ran = await world.run(
        "auth", "check", "-c", "-", stdin=text, env={"DOCKER_CONFIG": str(tmp_path)}
    )
    assert (ran.status, ran.out) == (4, "ok  target.test/app  pull,push  (anonymous)\n")
    assert f"error: AUTH_ERROR: check source.test/app: {tmp_path}/config.json " in ran.err
    source.journal.matching().none()


@pytest.mark.new
async def test_an_unreachable_registry_does_not_hide_the_others(world: Virtual) -> None:
    serve(world, App(), "source.test", *map(str, range(5)))
    registries = {"source": "http://source.test", "down": "http://nobody.test"}
    ran, rows = await check(world, registries, *map(str, range(5)))
    assert ran.status == 4
    assert {found["registry"] for found in rows.values() if found["error"]} == {"down"}
    assert {found["error"]["code"] for found in rows.values() if found["error"]} == {
        "NETWORK_ERROR"
    }


@pytest.mark.new
async def test_who_may_only_pull_is_told_at_a_target(world: Virtual) -> None:
    serve(world, App(), "source.test", "app")
    tokens = TokenService(
        USERS, grants=lambda user, access: access.action == "pull", now=anyio.current_time
    )
    target = serve(world, App(auth=tokens), "target.test", "app")
    ran, rows = await check(world, with_login("target"), "app")
    assert ran.status == 4
    assert rows["target.test/app"]["error"]["code"] == "AUTH_ERROR"
    assert rows["target.test/app"]["rights"] == "pull"
    assert "(credentials of registry 'target')" in ran.err
    target.journal.matching("DELETE").none()


class Hidden(App):
    """A registry that lists nothing to those who may push (docs/design.md section 9)."""

    def start(self, request: Request) -> Answer | Reception:
        if request.kind == "tag_list":
            return error(403, "DENIED", "requested access to the resource is denied")
        return super().start(request)


@pytest.mark.new
async def test_where_a_listing_is_hidden_the_upload_decides(world: Virtual) -> None:
    serve(world, App(), "source.test", "app")
    target = serve(world, Hidden(), "target.test", "app")
    ran, rows = await check(world, ENDS, "app")
    assert (ran.status, rows["target.test/app"]["upload"]) == (0, "opened")
    assert rows["target.test/app"]["rights"] == "push", "reading was refused"
    target.journal.matching("POST").exactly(1)
    target.journal.matching("DELETE").exactly(1)
    ran, rows = await check(
        world, {"source": "http://target.test", "target": "http://source.test"}, "app"
    )
    assert (ran.status, rows["target.test/app"]["error"]["code"]) == (4, "AUTH_ERROR")


async def test_a_repository_at_both_ends_is_asked_once_and_an_unused_registry_never(
    world: Virtual, tmp_path: Path
) -> None:
    both = serve(world, App(), "both.test", "a", "b")
    unused = serve(world, App(), "unused.test", "a")
    text = document(
        {
            "source": "http://both.test",
            "target": "http://both.test",
            "unused": "http://unused.test",
        },
        {"from": "a", "to": "b", "targets": ["source"]},
        {"from": "b", "to": "c", "targets": ["source"]},
    )
    file = tmp_path / "mirror.yaml"
    file.write_text(text)
    ran = await world.run("auth", "check", "--json", "-q", "-c", str(file))
    rights = {each["repository"]: each["rights"] for each in ran.report["access"]}
    assert rights == {"both.test/a": "pull", "both.test/b": "pull,push", "both.test/c": ""}
    both.journal.matching("GET", "tag_list").exactly(3)
    unused.journal.matching().none()
    assert os.listdir(tmp_path) == ["mirror.yaml"]


# Logins where anybody may read.


class Zot(BasicAuth):
    """Anybody reads, and `GET /v2/` says in a 200 how a login is taken (CheckVersionSupport of zot)."""

    challenge = True

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        if request.kind != "ping" or request.header("authorization"):
            return super().check(request, needs)
        headers = [("WWW-Authenticate", 'basic realm="zot"')] if self.challenge else []
        return Response(200, headers, b"{}")


@pytest.mark.new
@pytest.mark.provokes("credential_unasked")
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    ("side", "repository"),
    [("source", "there"), ("source", "new"), ("target", "there"), ("target", "new")],
)
async def test_a_wrong_password_is_found_where_anybody_may_read(
    world: Virtual, side: str, repository: str, asks: bool
) -> None:
    auth = Zot({"me": "another"}, anonymous_pull=True)
    auth.challenge = asks
    place = serve(world, App(auth=auth), f"{side}.test", "there")
    other = {"source": "target", "target": "source"}[side]
    serve(world, App(), f"{other}.test", "there", "new")
    registries = {
        side: {"url": f"http://{side}.test", **LOGIN},
        other: {"url": f"http://{other}.test", "auth_type": "anonymous"},
    }
    ran, rows = await check(world, registries, repository)
    assert ran.status == 4
    found = rows[f"{side}.test/{repository}"]
    assert found["error"]["code"] == "AUTH_ERROR"
    assert f"(credentials of registry '{side}')" in ran.err
    assert (found["source"], found["rights"]) == (None, "pull" if repository == "there" else "")
    shown = [entry for entry in place.journal.entries if entry.authorization.scheme]
    assert len(shown) == 1, "a refused password is not sent again"


@pytest.mark.new
@pytest.mark.provokes("ping", "credential_unasked")
async def test_a_login_is_proven_once_where_anybody_may_read(world: Virtual) -> None:
    serve(world, App(), "source.test", "one", "two")
    zot = serve(world, App(auth=Zot(USERS, anonymous_pull=True)), "target.test")
    ran, rows = await check(world, with_login("target"), "one", "two")
    assert ran.status == 0
    for name in ("one", "two"):
        found = rows[f"target.test/{name}"]
        assert (found["source"], found["rights"], found["upload"]) == (ORIGIN, "", "absent")
    assert sorted(asked(zot)) == [
        "GET /v2/ 200",
        "GET /v2/ 200",
        "GET /v2/one/tags/list?n=1 404",
        "GET /v2/two/tags/list?n=1 404",
    ]


@pytest.mark.new
@pytest.mark.provokes("ping")
async def test_a_token_is_asked_for_with_the_login_where_anybody_may_read(world: Virtual) -> None:
    """The registry lets anybody list, and sends to a token service who asks for `/v2/`."""

    class Open(TokenService):
        def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
            return None if request.kind == "tag_list" else super().check(request, needs)

    serve(world, App(), "target.test", "app")
    tokens = Open({"me": "another"}, now=anyio.current_time)
    source = serve(world, App(auth=tokens), "source.test", "app")
    ran, rows = await check(world, with_login("source"), "app")
    assert (ran.status, rows["source.test/app"]["error"]["code"]) == (4, "AUTH_ERROR")
    assert asked(source)[0] == "GET /v2/app/tags/list?n=1 200"
    assert asked(source)[1] == "GET /v2/ 401"
    assert tokens.requests == 1

    tokens.users["me"] = "hunter2"
    ran, rows = await check(world, with_login("source"), "app")
    assert (ran.status, rows["source.test/app"]["source"]) == (
        0,
        "credentials of registry 'source'",
    )


@pytest.mark.new
async def test_nobody_is_pinged_for_an_anonymous_or_a_proven_login(world: Virtual) -> None:
    source = serve(world, App(), "source.test", "app")
    target = serve(world, App(auth=BasicAuth(USERS)), "target.test", "app")
    ran, _ = await check(world, with_login("target"), "app")
    assert ran.status == 0
    source.journal.matching(kind="ping").none()
    target.journal.matching(kind="ping").none()


@pytest.mark.parametrize("words", [("auth",), ("auth", "chek", "-c", "-"), ("auth", "check")])
async def test_what_is_no_such_command_is_said(world: Virtual, words: tuple[str, ...]) -> None:
    ran = await world.run(*words)
    assert ran.status == 3
    assert "hint: see `regsync auth --help`" in ran.err
