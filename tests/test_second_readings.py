"""Bytes that do not match their digest: read once more over a fresh connection, then given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.content.images import Image, Seed
from conformance.journal import Entries
from conformance.messages import Answer, Request
from conformance.registry.app import App
from conformance.server.memory import Place
from tests.ends import Virtual, held, only, tags

MIB = 1 << 20
PULLED_TWICE = pytest.mark.provokes("blob_pulled_twice", "second_session")


def load(source: Place, size: int) -> tuple[Image, str]:
    """Put an image with one layer of this size at the source; return it and the layer's digest."""
    image = Seed(7).image(sizes=(size,)).load_into(source.app, "app", tag="v1")
    return image, max(image.blobs, key=lambda digest: len(image.blobs[digest]))


def pulls(source: Place, digest: str) -> Entries:
    return source.journal.matching("GET", "blob", reference=digest)


async def mirror(world: Virtual, source: Place, *targets: Place, **top: Any) -> Any:
    places = {"source": source} | {f"t{number}": place for number, place in enumerate(targets)}
    return await world.sync(places, {"from": "app", "tags": tags("v1")}, **top)


@PULLED_TWICE
@pytest.mark.parametrize("size", [1000, 3 * MIB], ids=["in one piece", "in many"])
@pytest.mark.parametrize("at", [0, -1], ids=["from the first byte", "at the last byte"])
async def test_a_blob_that_was_wrong_once_is_read_again_over_a_fresh_connection(world, size, at):
    source, target = world.registry("source.test"), world.registry("target.test")
    image, digest = load(source, size)
    source.app.faults.on("GET", "blob", reference=digest).first().corrupt(at)
    ran = await world.copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    first, second = pulls(source, digest)
    before = {entry.connection for entry in source.journal.entries if entry is not second}
    assert second.connection not in before
    assert first.status == second.status == 200
    assert "range" not in second.headers
    assert ran.seconds == pytest.approx(0, abs=0.01), "nobody waits for it"


@pytest.mark.parametrize("staged", [True, False])
async def test_a_blob_that_is_always_wrong_is_read_twice_for_each_target(world, staged, tmp_path):
    source, *targets = (world.registry(f"{name}.test") for name in ("source", "a", "b"))
    _, digest = load(source, 3 * MIB)
    source.app.faults.on("GET", "blob", reference=digest).corrupt(5)
    limit = {} if staged else {"staging_size_limit": 0}
    settings = {"global": {"cache_dir": str(tmp_path), **limit}}
    ran = await mirror(world, source, *targets, **settings)
    assert ran.statuses() == ["failed"] * 2
    errors = [image["error"] for image in ran.images]
    assert {error["code"] for error in errors} == {"CONTENT_ERROR"}
    assert all("its digest" in error["message"] for error in errors)
    assert all(target.app.tags("app") == {} for target in targets)
    pulls(source, digest).exactly(2 * len(targets))


@PULLED_TWICE
async def test_what_a_session_in_chunks_has_taken_of_the_wrong_bytes_is_given_up(world):
    source = world.registry("source.test")
    azure = world.persona("acr")
    image, digest = load(source, 17 * MIB)
    source.app.faults.on("GET", "blob", reference=digest).first().corrupt(3)
    host = azure.row.hosts["registry"]
    ran = await world.sync(
        {"source": source, "t": f"https://{host}"}, {"from": "app", "tags": tags("v1")}
    )
    assert ran.statuses() == ["synced"], ran.err
    assert azure.blob("app", digest) == image.blobs[digest]
    pulls(source, digest).exactly(2)
    azure.journal.matching("DELETE", "upload").exactly(1)


def wrong(
    change: Callable[[bytes], bytes], times: int, *, by_digest: bool
) -> Callable[[Request, Answer], Answer]:
    """Return what changes the first answers with a manifest that is asked for by digest, or by
    tag.
    """
    left = [times]

    def amend(request: Request, answer: Answer) -> Answer:
        is_manifest = request.kind == "manifest" and request.method == "GET"
        if not is_manifest or (":" in request.reference) is not by_digest or not left[0]:
            return answer
        left[0] -= 1
        body = change(answer.body)
        headers = [pair for pair in answer.headers if pair[0].lower() != "content-length"]
        return answer.__class__(answer.status, headers, body)

    return amend


CHANGES = {
    "another manifest": lambda body: body.replace(b'"size": ', b'"size":  ') + b" ",
    "half of it": lambda body: body[: len(body) // 2],
    "a page": lambda _: b"<html>",
}


@pytest.mark.provokes("manifest_fetched_twice")
@pytest.mark.parametrize("by_digest", [True, False], ids=["a child", "a tag"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("times", [1, 2], ids=["wrong once", "wrong always"])
async def test_a_manifest_is_read_again_over_a_fresh_connection(world, by_digest, change, times):
    source, target = world.registry("source.test"), world.registry("target.test")
    index = Seed(8).index(platforms=("linux/amd64",)).load_into(source.app, "app", tag="v1")
    source.app.amend = wrong(change, times, by_digest=by_digest)
    ran = await world.copy(source, target)
    asked = [
        entry
        for entry in source.journal.matching("GET", "manifest")
        if (":" in entry.reference) is by_digest
    ]
    assert len(asked) == 2
    before = {entry.connection for entry in source.journal.entries if entry is not asked[1]}
    after = [entry for entry in source.journal.entries if entry.number > asked[1].number]
    before -= {entry.connection for entry in after}
    assert asked[1].connection not in before
    if times == 1:
        assert ran.statuses() == ["synced"], ran.err
        assert held(target, "app", index)
    else:
        assert only(ran.images)["error"]["code"] == "CONTENT_ERROR"


async def test_what_has_its_digest_and_is_no_manifest_is_asked_for_once(world):
    source, target = world.registry("source.test"), world.registry("target.test")
    app = source.app
    assert isinstance(app, App)
    load(source, 10)
    app.amend = wrong(lambda _: b'{"schemaVersion": 2}', 9, by_digest=False)
    app.faults.on("GET", "manifest").lie(headers={"Docker-Content-Digest": None})
    ran = await world.copy(source, target)
    assert only(ran.images)["error"]["code"] == "CONTENT_ERROR"
    assert source.journal.count("GET", "manifest") == 1
