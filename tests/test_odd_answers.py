"""Answers that a registry may give and the specification does not foresee, or hardly, counted on the
wire: docs/design.md section 9, docs/protocol-facts.md section 1.
"""

from __future__ import annotations

import json

import pytest

from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response
from conformance.registry.app import App
from conformance.server.memory import Place
from tests.ends import Virtual, held, only, tags
from tests.mirrors import SignedMirror

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


def ends(world: Virtual) -> tuple[Place, Place]:
    return world.registry("source.test"), world.registry("target.test")


@pytest.mark.parametrize("status", [401, 403])
async def test_a_target_that_does_not_list_its_tags_is_written_to(world, status):
    source, target = ends(world)
    image = Seed(1).image().load_into(source.app, "app", "v1", "v2")
    target.app.faults.on("GET", "tag_list").status(status)
    ran = await world.sync(
        {"source": source, "target": target}, {"from": "app", "tags": tags("v*")}
    )
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 2)
    assert target.app.tags("app") == {"v1": image.top, "v2": image.top}
    target.journal.matching("HEAD", "manifest").exactly(2)


async def test_a_tag_whose_digest_a_head_does_not_tell_is_read(world):
    def hide(request: Request, answer: Answer) -> Answer:
        if request.method == "HEAD" and isinstance(answer, Response):
            answer.headers[:] = [
                pair for pair in answer.headers if pair[0] != "Docker-Content-Digest"
            ]
        return answer

    source, target = ends(world)
    Seed(1).image().load_into(source.app, "app", tag="v1").load_into(target.app, "app", "v1")
    target.app.amend = hide
    ran = await world.copy(source, target)
    assert (ran.status, ran.statuses()) == (0, ["skipped"])
    assert target.journal.summary() == {"HEAD manifest": 1, "GET manifest": 1}


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_200_to_a_manifest_is_believed_when_the_registry_holds_it(world, is_stored):
    source, target = ends(world)
    image = Seed(1).image().load_into(source.app, "app", tag="v1")

    def welcome(request: Request) -> Answer | None:
        if (request.method, request.kind) != ("PUT", "manifest"):
            return None
        if is_stored:
            image.load_into(target.app, "app", tag="v1")
        return Response(200, [], b"<html>Welcome</html>")

    target.app.intercept = welcome
    ran = await world.copy(source, target)
    assert (ran.status, ran.statuses()) == ((0, ["synced"]) if is_stored else (2, ["failed"]))
    target.journal.matching("PUT", "manifest").exactly(1)
    target.journal.matching("HEAD", "manifest").exactly(2)


async def test_a_blob_that_the_target_holds_with_another_size_is_sent(world):
    source, target = ends(world)
    seed = Seed(1)
    image = seed.image(sizes=(9000,)).load_into(source.app, "app", tag="v1")
    # The repository is populated, and has the blobs, so that a POST asks for them (rule 11).
    for each in (seed.image(), image):
        each.load_into(target.app, "app", tag="old")
    del target.app.repositories["app"].manifests[image.top]
    target.app.repositories["app"].tags.clear()

    def shorten(request: Request) -> Answer | None:
        if (request.method, request.kind) != ("HEAD", "blob"):
            return None
        return Response(200, [("Content-Length", "7")])

    target.app.intercept = shorten
    ran = await world.copy(source, target)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    target.journal.matching("HEAD", "blob").exactly(len(image.blobs))
    target.journal.matching("PUT", "upload").exactly(len(image.blobs))
    assert held(target, "app", image)


async def test_a_full_page_without_a_link_is_not_the_last_one(world):
    source, target = ends(world)
    image = Seed(1).image().load_into(source.app, "app", "x0999", "x1000")
    names = [f"x{number:04}" for number in range(1001)]

    def page(request: Request) -> Answer | None:
        if request.kind != "tag_list":
            return None
        last = request.parameter("last")
        return Response(
            200,
            [("Content-Type", "application/json")],
            json.dumps({"tags": names[1000:] if last else names[:1000]}).encode(),
        )

    source.app.intercept = page
    ran = await world.sync(
        {"source": source, "target": target}, {"from": "app", "tags": tags("x1*")}
    )
    assert ran.statuses() == ["synced"]
    assert held(target, "app", image)
    asked = [entry.query for entry in source.journal.matching("GET", "tag_list")]
    assert asked == [{"n": "1000"}, {"n": "1000", "last": "x0999"}]


async def test_digests_in_googles_listing_spare_the_heads_of_all_tags(world):
    source = world.registry("source.test")
    google = world.listen(App(), "gcr.io", scheme="https")
    image = Seed(1).image().load_into(source.app, "app", "v1", "v2")
    image.load_into(google.app, "team/app", "v1", "v2")
    entries = {image.top: {"tag": ["v1", None, "v2"]}, "sha256:0": [], "none": {"tag": ["v1"]}}
    listing = {"tags": ["v1", "v2"], "manifest": entries}

    def listed(request: Request) -> Answer | None:
        if request.kind != "tag_list":
            return None
        return Response(200, [("Content-Type", "application/json")], json.dumps(listing).encode())

    google.app.intercept = listed
    ran = await world.sync(
        {"source": source, "target": {"url": "https://gcr.io", "auth_type": "anonymous"}},
        {"from": "app", "to": "team/app", "tags": tags("v*")},
    )
    assert (ran.status, ran.statuses()) == (0, ["skipped"] * 2)
    assert google.journal.summary() == {"GET tag_list": 1}


async def test_a_referrer_that_is_listed_and_gone_is_left_out(world, tmp_path):
    mirror = SignedMirror(world, tmp_path)
    gone, there = (mirror.attach(mirror.images[0]) for _ in range(2))
    mirror.source.app.faults.on("GET", "manifest", reference=gone.top).status(404)
    ran = await mirror.look()
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert only(ran.images)["artifacts"]["synced"] == 1
    assert mirror.holds(there)
    assert not mirror.holds(gone)
    mirror.source.journal.matching("GET", "manifest", reference=gone.top).exactly(1)
