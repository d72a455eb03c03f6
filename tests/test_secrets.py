"""Secrets that a server repeats and a run knows only for a while, or only in part, are in nothing that
it says. What is known all along is in tests/test_canary.py.
"""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from conformance.server.exchange import Reception
from tests.ends import Virtual, document
from tests.test_clouds import ACR

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

USER, IDENTITY = "canary-user", "canary-identity"


class Rotating(TokenService):
    """A token service that gives a new refresh token with each token."""

    def issue(self, *given: Any, offline: bool) -> Response:
        answer = super().issue(*given, offline=False)
        if answer.status != 200:
            return answer
        renewed = f"refreshed-{len(self.refresh_tokens)}-{USER}"
        self.refresh_tokens[renewed] = USER
        document = {**answer.json(), "refresh_token": renewed}
        return Response(200, answer.headers, json.dumps(document).encode())


class Static:
    """A registry that asks everybody for a bearer token, and takes any."""

    def answer(self, request: Request) -> Answer | Reception | None:
        return None

    def check(self, request: Request, needs: object) -> Response | None:
        if request.header("authorization"):
            return None
        challenge = 'Bearer realm="https://elsewhere.test/"'
        return Response(401, [("WWW-Authenticate", challenge)], b"{}")


@pytest.mark.rule("R10")
async def test_a_refresh_token_that_was_renewed_since_is_no_less_a_secret(world: Virtual) -> None:
    """Each answer of the token service brings a new one; an error repeats all that there were."""
    repositories = ("one", "two", "three")
    service = Rotating(
        refresh_tokens=[IDENTITY], anonymous=False, one_scope=True, now=anyio.current_time
    )
    app = App(auth=service)
    world.listen(app, ACR, scheme="https")
    world.registry("target.test")
    for number, name in enumerate(repositories):
        Seed(number).image().load_into(app, name, tag="v1")
    # By now each repository has got its token.
    app.faults.on("GET", "blob").delay(5)

    def repeat(request: Request) -> Answer | None:
        if request.kind != "blob":
            return None
        said = " and ".join(f"you sent {secret}" for secret in service.refresh_tokens)
        return error(403, "DENIED", said)

    app.intercept = repeat
    mappings = [{"from": name, "tags": {"glob": ["v1"]}} for name in repositories]
    text = document({"source": f"https://{ACR}", "target": "http://target.test"}, *mappings)
    login = {"auths": {ACR: {"identitytoken": IDENTITY}}}
    env = {"DOCKER_AUTH_CONFIG": json.dumps(login)}
    ran = await world.run("sync", "-vv", "--json", "-c", "-", stdin=text, env=env)
    assert len(ran.failed) == 3
    sent = {secret for entry in app.journal.entries for secret in entry.secrets}
    renewed = [*service.refresh_tokens]
    assert len(sent.intersection(renewed)) > 1, "one that was renewed was in use"
    assert all("you sent ***" in line for line in ran.failed)
    for secret in renewed:
        assert secret not in ran.out + ran.err, secret


@pytest.mark.rule("R10")
@pytest.mark.parametrize("kind", ["manifest", "tag_list"])
@pytest.mark.parametrize("length", [50, 500, 1000, 2000, 60_000])
async def test_of_a_long_token_that_a_document_repeats_no_part_is_told(
    world: Virtual, kind: str, length: int
) -> None:
    """Only the beginning of such a document is, which the token may be."""
    token = "".join(f"{number:x}." for number in range(length))[:length]
    app = world.registry("source.test").app
    world.registry("target.test")
    Seed(1).image().load_into(app, "app", tag="v1")
    app.intercept = lambda request: (
        Response(200, [("Content-Type", token)], f"Bearer {token}".encode())
        if request.kind == kind
        else None
    )
    source = {"url": "http://source.test", "auth_type": "static_token", "token": token}
    app.auth = Static()
    glob = {"glob": ["*" if kind == "tag_list" else "v1"]}
    text = document(
        {"source": source, "target": "http://target.test"}, {"from": "app", "tags": glob}
    )
    ran = await world.run("sync", "-vv", "--json", "-c", "-", stdin=text)
    assert ran.status == 2
    assert token[:8] not in ran.out + ran.err
    # Of more than is searched nothing is shown, since its end may be the beginning of a secret.
    assert ("***" if length < 10_000 else "…") in ran.err
