"""A listing that leads back to itself is an error, never a short answer (docs/design.md section 7,
I12), at either end, and nothing is concluded from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from conformance.content.images import OCI_INDEX
from conformance.messages import Answer, Request, Response, error
from conformance.server.memory import Place
from tests.ends import Ran, virtual
from tests.mirrors import SignedMirror, asked
from tests.states import rows


def entry(name: str) -> dict[str, Any]:
    return {"mediaType": "application/vnd.a.b", "digest": f"sha256:{name * 64}", "size": 2}


def body_of(names: Sequence[str], what: str) -> bytes:
    if what == "tags":
        return json.dumps({"tags": names}).encode()
    return json.dumps({"schemaVersion": 2, "manifests": [entry(name) for name in names]}).encode()


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["tags", "referrers"])
async def test_a_later_page_that_is_not_there_is_no_answer(monkeypatch, what, tmp_path):
    """Behind an empty first page neither an unknown repository nor a registry without the API."""
    async with virtual(0.0) as world:
        mirror = SignedMirror(world, tmp_path)
        kind = "tag_list" if what == "tags" else "referrers"

        def pages(request: Request) -> Answer | None:
            if request.kind != kind:
                return None
            if request.parameter("last"):
                return error(404, "NAME_UNKNOWN", "unknown")
            return linked(request, [], what)

        mirror.source.app.intercept = pages
        ran = await mirror.look()
        assert ran.statuses() == ["failed"]
        assert "status 404" in ran.err
        assert [each["error"]["code"] for each in ran.images] == ["SOURCE_ERROR"]
        assert "such repository" not in ran.err
        assert not rows(mirror.cache)["look"]
        assert "has_referrers_api" not in str(rows(mirror.cache)["fact"])


def linked(request: Request, names: Sequence[str], what: str, last: str = "z") -> Response:
    """Answer one page, with a Link to one behind `last`."""
    media_type = "application/json" if what == "tags" else OCI_INDEX
    link = f'<{request.path}?last={last}>; rel="next"'
    return Response(200, [("Content-Type", media_type), ("Link", link)], body_of(names, what))


def go_round(place: Place, kind: str, *, repeats: bool = False) -> None:
    """Let a registry's listings lead back: the second page to itself, or each to one like it."""

    def pages(request: Request) -> Answer | None:
        if request.kind != kind:
            return None
        place.app.intercept = None
        whole = place.app.start(request)
        place.app.intercept = pages
        assert isinstance(whole, Response)
        last = int(request.parameter("page") or 0)
        following = last + 1 if repeats else 1
        link = f'<{request.path}?page={following}>; rel="next"'
        headers = [("Content-Type", dict(whole.headers)["Content-Type"]), ("Link", link)]
        return Response(200, headers, whole.body)

    place.app.intercept = pages


def told(ran: Ran, what: str, code: str) -> None:
    assert ran.statuses() == ["failed"] * len(ran.images)
    for image in ran.images:
        assert image["error"]["code"] == code
        assert f"the list of {what} does not end: page " in image["error"]["message"]
        assert " leads back to page " in image["error"]["message"]


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("repeats", [False, True])
async def test_a_source_whose_tags_go_round_fails_its_mapping(tmp_path, repeats):
    async with virtual(0.0) as world:
        mirror = SignedMirror(world, tmp_path, images=3)
        go_round(mirror.source, "tag_list", repeats=repeats)
        ran = await mirror.look()
        told(ran, "tags", "SOURCE_ERROR")
        assert (ran.status, len(ran.images)) == (2, 1)
        assert asked(mirror.source) == {"GET tag_list": 2}
        assert asked(mirror.target) == {}


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_target_whose_tags_go_round_fails_its_images(tmp_path):
    async with virtual(0.0) as world:
        mirror = SignedMirror(world, tmp_path, images=3)
        for image in mirror.images:
            image.load_into(mirror.target.app, "app", "old")
        go_round(mirror.target, "tag_list")
        ran = await mirror.look()
        told(ran, "tags", "TARGET_ERROR")
        assert [image["error"]["side"] for image in ran.images] == ["target"] * 3
        assert asked(mirror.target) == {"GET tag_list": 2}


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("repeats", [False, True])
async def test_artifacts_of_an_endless_list_are_not_noted_as_looked_at(tmp_path, repeats):
    async with virtual(0.0) as world:
        mirror = SignedMirror(world, tmp_path)
        first = mirror.attach(mirror.images[0])
        go_round(mirror.source, "referrers", repeats=repeats)
        ran = await mirror.look()
        told(ran, "referrers", "SOURCE_ERROR")
        assert mirror.source.journal.count("GET", "referrers") == 2
        assert not rows(mirror.cache)["look"]
        assert not mirror.target.journal.count("PUT")

        mirror.source.app.intercept = None
        assert (await mirror.look()).statuses() == ["synced"]
        assert mirror.holds(first)

        # The same in a later look: what was complete is not any more.
        late = mirror.attach(mirror.images[0])
        await anyio.sleep(86_400)
        go_round(mirror.source, "referrers", repeats=repeats)
        told(await mirror.look(), "referrers", "SOURCE_ERROR")
        mirror.source.app.intercept = None
        assert (await mirror.look()).statuses() == ["synced"]
        assert mirror.holds(late)


@pytest.mark.anyio
@pytest.mark.virtual_time
# A first image's fallback tag may be asked for at the moment at which others begin to list.
@pytest.mark.provokes("absent_tag_asked")
async def test_tags_that_would_show_artifacts_and_go_round_are_no_answer(tmp_path):
    """Without the API a listing says which images have artifacts."""
    async with virtual(0.0) as world:
        mirror = SignedMirror(world, tmp_path, images=2, referrers_api=False)
        late = mirror.attach(mirror.images[1])
        go_round(mirror.source, "tag_list")
        literal = {"glob": ["v0", "v1"]}
        told(await mirror.look(literal), "tags", "SOURCE_ERROR")
        assert not rows(mirror.cache)["look"]

        mirror.source.app.intercept = None
        assert (await mirror.look(literal)).statuses() == ["synced"] * 2
        assert mirror.holds(late)
