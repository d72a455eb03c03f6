"""Logins and tokens as registries see them: how often they are asked for, when they are shown, and
what of them is told or kept.
"""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import anyio
import pytest

from conformance.content.images import Seed
from conformance.messages import Answer, Request, error
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.memory import Link
from tests.ends import only, tags
from tests.mirrors import Mirror

USER, PASSWORD = "captain", "Xyzzy-0pen-Sesame"
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": PASSWORD}}
MAPPING = {"from": "app", "tags": tags("v1"), "artifacts": {"enabled": False}}


def with_login(mirror: Mirror) -> dict[str, dict[str, object]]:
    return {"source": {"url": mirror.source.url, **LOGIN}}


def kept_below(directory: Path) -> bytes:
    """Return all that is in the files of a directory."""
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def tokens() -> TokenService:
    return TokenService({USER: PASSWORD}, anonymous=False, now=anyio.current_time)


async def test_tokens_that_are_never_accepted_end_the_request(world, tmp_path, tokens):
    """Two new logins a request, and not one more for as long as it fails."""
    tokens.uses = 0
    mirror = Mirror(world, tmp_path, of={"source": {"auth": tokens}})
    mirror.push("v1")
    ran = await mirror.sync(MAPPING, registries=with_login(mirror))
    assert ran.status == 4
    assert "AUTH_ERROR" in only(ran.failed)
    assert tokens.requests <= 3
    assert ran.seconds < 60


@pytest.mark.parametrize("kind", ["basic", "token"])
@pytest.mark.parametrize("wrong", ["one", "two"])
async def test_two_logins_of_one_host_stay_apart_and_a_wrong_one_is_shown_once(
    world, tmp_path, monkeypatch, kind, wrong
):
    """A file of podman's has a login for each of two namespaces: 10 repositories wait for each."""
    users = {"one": "password-of-one", "two": "password-of-two"}
    service: BasicAuth = BasicAuth(users)
    if kind == "token":
        service = TokenService(users, anonymous=False, now=anyio.current_time)
    far = {"down": Link(latency=0.1), "up": Link(latency=0.1)}
    mirror = Mirror(world, tmp_path, of={"source": {"auth": service, **far}})
    names = [f"{namespace}/app{number}" for number in range(10) for namespace in users]
    for name in names:
        mirror.push("v1", repository=name)
    logins = {**users, wrong: "Xyzzy-0pen-Sesame"}
    auths = {
        f"source.test:80/{user}": {"username": user, "password": password}
        for user, password in logins.items()
    }
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": auths}))
    ran = await mirror.sync(*({**MAPPING, "from": name} for name in names))
    assert ran.status == 1
    assert sorted(ran.statuses()) == ["failed"] * 10 + ["synced"] * 10
    assert all(f"source.test/{wrong}/" in line for line in ran.failed)

    asked = mirror.source.journal.entries
    shown = [entry.header("authorization").removeprefix("Basic ") for entry in asked]
    assert shown.count(b64encode(f"{wrong}:{logins[wrong]}".encode()).decode()) == 1
    assert not [entry for entry in asked if ":one/" in entry.target and ":two/" in entry.target]


async def test_a_token_that_was_replaced_is_not_shown_either(world, tmp_path, tokens):
    mirror = Mirror(world, tmp_path, of={"source": {"auth": tokens}})
    mirror.push("v1")
    shown: list[str] = []

    def intercept(request: Request) -> Answer | None:
        value = request.header("authorization").removeprefix("Bearer ")
        if request.kind != "blob" or not value:
            return None
        shown.append(value)
        if len(shown) == 1:
            tokens.revoke()
            words = 'realm="http://source.test/token",service="registry.test",error="invalid_token"'
            challenge = f'Bearer {words},scope="repository:app:pull"'
            return error(401, "UNAUTHORIZED", "ended", headers=[("WWW-Authenticate", challenge)])
        return error(403, "DENIED", f"{shown[0]} was replaced, and {value} may not")

    mirror.source.app.intercept = intercept
    ran = await mirror.sync(MAPPING, registries=with_login(mirror))
    assert ran.status == 4
    assert len(set(shown)) >= 2
    assert "was replaced" in ran.err
    assert not [value for value in shown if value in ran.err + ran.out]


@pytest.mark.provokes("secret_in_url")  # which the registry asks for
async def test_no_secret_of_a_challenge_is_kept(world, tmp_path, tokens):
    """As of a registry that repeats the password in it."""
    tokens.service = f"for {PASSWORD}"
    mirror = Mirror(world, tmp_path, of={"source": {"auth": tokens}})
    mirror.push("v1")
    ran = await mirror.sync(MAPPING, registries=with_login(mirror))
    assert ran.status == 0, ran.err
    kept = kept_below(mirror.cache)
    assert kept
    assert PASSWORD.encode() not in kept


async def test_a_password_waits_for_its_challenge_in_each_run_over_plain_http(world, tmp_path):
    """What an earlier run was asked for is no reason to show it to whoever answers now."""
    mirror = Mirror(world, tmp_path, of={"source": {"auth": BasicAuth({USER: PASSWORD})}})
    for number in range(2):
        mirror.push("v1", Seed(number).image())
        ran = await mirror.sync(MAPPING, registries=with_login(mirror))
        assert ran.status == 0, ran.err
        first, second, *_ = mirror.source.journal.entries
        assert (first.status, "authorization" in first.headers) == (401, False)
        assert "authorization" in second.headers


async def test_what_a_clock_far_ahead_has_written_is_not_believed(world, tmp_path):
    mirror = Mirror(world, tmp_path)
    seed = Seed(3)
    shared = seed.blob(5000)
    mirror.push("v1", seed.image(layers=[shared]))
    mirror.write(MAPPING)
    ahead = world.edge()._replace(wall=lambda: world.wall() + 10 * 86400)
    ran = await world.run("sync", "-q", "-c", str(mirror.file), edge=ahead)
    assert ran.status == 0, ran.err

    image = mirror.push("v1", seed.image(layers=[shared, seed.blob(100)]))
    ran = await mirror.sync(MAPPING)
    assert ran.status == 0, ran.err
    digest = image.document["layers"][0]["digest"]
    asked = mirror.target.journal.matching("HEAD", "blob", reference=digest)
    mounted = mirror.target.journal.matching("POST", "upload_start", query={"mount": digest})
    assert len(asked) + len(mounted) == 1, "what it wrote is asked for again"
