"""Tokens that end before their time: a registry that counts their uses loses no image, and a login
that never worked is not tried more often for it (docs/design.md section 6, rule 2, and section 9,
"Retries").

Registries and the program share one loop on a clock that jumps (`ends.virtual`).
"""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response
from conformance.registry.tokens import Challenge, TokenService, plain
from conformance.server.memory import Link, Place
from tests.ends import Virtual, held, tags

LOGIN = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}


def load(place: Place, images: int, layers: int = 3) -> list[Image]:
    loaded = []
    for number in range(images):
        image = Seed(500 + number).image(sizes=(3000,) * layers)
        image.load_into(place.app, "app", tag=f"v{number}")
        loaded.append(image)
    return loaded


def service(**options: Any) -> TokenService:
    return TokenService({"u": "p"}, anonymous=False, now=anyio.current_time, **options)


def pair(world: Virtual, **options: Any) -> tuple[Place, Place, dict[str, Any]]:
    source = world.registry("source.test", auth=service(**options))
    target = world.registry("target.test", auth=service(**options))
    registries = {"source": {"url": source.url, **LOGIN}, "target": {"url": target.url, **LOGIN}}
    return source, target, registries


def without_error(challenge: Challenge) -> list[str]:
    """Write a challenge that does not say what was wrong with a token."""
    return [f'Bearer realm="{challenge.realm}",service="{challenge.service}"']


@pytest.mark.parametrize("form", [plain, without_error])
@pytest.mark.parametrize(("uses", "images"), [(25, 12), (7, 4)])
async def test_a_registry_whose_tokens_end_after_some_requests_loses_no_image(
    world, uses, images, form
):
    source, target, registries = pair(world, uses=uses, form=form)
    loaded = load(source, images)
    ran = await world.sync(registries, {"from": "app", "tags": tags(glob="v*")})
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert ran.statuses() == ["synced"] * images
    assert all(held(target, "app", image) for image in loaded)
    for place in (source, target):
        let_in = len(place.journal.entries) - len(place.journal.matching(status=401))
        assert let_in > uses, "one token would not have done"


async def test_requests_with_the_same_ended_token_share_one_renewal(world):
    source = world.registry("source.test", auth=service(), up=Link(0.1))
    target = world.registry("target.test")
    registries = {"source": {"url": source.url, **LOGIN}, "target": target}
    load(source, 12)
    tokens = source.app.auth
    revoked: list[int] = []

    def intercept(request: Request) -> None:
        if request.kind == "blob" and not revoked:
            revoked.append(tokens.requests)
            tokens.revoke()

    source.app.intercept = intercept
    ran = await world.sync(registries, {"from": "app", "tags": tags(glob="v*")})
    assert (ran.status, ran.failed) == (0, []), ran.err
    refused = source.journal.matching(status=401)
    assert len(refused) > 3, "one bare request, and all that carried the revoked token"
    assert tokens.requests == revoked[0] + 1


async def test_a_token_that_ends_at_a_redirect_is_renewed_as_well(world):
    source, target, registries = pair(world)
    image = load(source, 1)[0]
    redirected: list[str] = []

    def intercept(request: Request) -> Answer | None:
        if request.kind != "blob" or redirected:
            return None
        redirected.append(request.path)
        source.app.auth.revoke()
        return Response(307, [("Location", f"{request.path}?again=1")])

    source.app.intercept = intercept
    ran = await world.sync(registries, {"from": "app", "tags": tags("v0")})
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert held(target, "app", image)
    assert source.app.auth.requests == 2


async def test_a_token_that_never_worked_is_renewed_once(world):
    """A registry that takes no token at all: two of them are tried for a request, as ever."""
    source, _, registries = pair(world)
    load(source, 1)
    useless = source.app.faults.on("GET", "manifest")
    useless.challenge(
        realm="http://source.test/token", service="registry.test", error="invalid_token"
    )
    ran = await world.sync(registries, {"from": "app", "tags": tags("v0")})
    assert ran.status == 4
    assert source.journal.count("GET", "manifest") == 2
    assert source.app.auth.requests == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_has_let_nobody_in(world, status):
    source, _, registries = pair(world)
    load(source, 1)
    shown: list[str] = []

    def intercept(request: Request) -> Answer | None:
        if request.kind != "manifest" or not request.header("authorization"):
            return None
        shown.append(request.header("authorization"))
        if len(shown) == 1:
            return Response(status, [("Retry-After", "1")])
        source.app.auth.revoke()
        return None

    source.app.intercept = intercept
    ran = await world.sync(registries, {"from": "app", "tags": tags("v0")})
    assert ran.status == 4
    assert len(shown) == 3, "the first token again, and one that was new"
    assert source.app.auth.requests == 2


async def test_what_has_let_nobody_write_is_no_ended_token(world):
    """The token lets requests read, so it is good; that it is refused to the first that writes is
    for lack of a right, though the challenge does not say so.
    """
    source = world.registry("source.test")
    pulls_only = service(grants=lambda user, access: access.action == "pull", form=without_error)
    target = world.registry("target.test", auth=pulls_only)
    image = load(source, 1)[0]
    image.load_into(target.app, "app", tag="other")
    target.app.repositories["app"].blobs.clear()
    registries = {"source": source, "target": {"url": target.url, **LOGIN}}
    ran = await world.sync(registries, {"from": "app", "tags": tags("v0")})
    assert ran.status == 4
    starts = target.journal.matching("POST", "upload_start")
    assert [bool(entry.query) for entry in starts] == [True, True, False, False]
    assert pulls_only.requests == 4
