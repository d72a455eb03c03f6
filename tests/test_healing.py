"""Targets that lost what the state says they hold: the run that finds out makes it good
(docs/design.md section 7, I5).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response, digest_of
from conformance.server.sockets import Server
from tests.ends import clear, drop_state, held, load_all, load_numbered, tags

SAYS = pytest.mark.parametrize("says", ["MANIFEST_BLOB_UNKNOWN", "MANIFEST_INVALID"])


def saying(server: Server, code: str) -> None:
    """Let a registry say no more than a code when it refuses a manifest."""

    def amend(request: Request, answer: Answer) -> Answer:
        refused = (
            isinstance(answer, Response) and answer.status == 400 and request.kind == "manifest"
        )
        if refused and request.method == "PUT" and code != "MANIFEST_BLOB_UNKNOWN":
            return Response(400, [], b'{"errors": [{"code": "%s"}]}' % code.encode())
        return answer

    server.app.amend = amend


@SAYS
@pytest.mark.provokes("manifest_names_absent")
def test_a_target_that_lost_a_blob_is_healed_in_the_same_run(source, target, says, sync_pair):
    images = load_numbered(source, 2)
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    lost = images[0].document["layers"][0]["digest"]
    del target.app.repositories["app"].blobs[lost]
    saying(target, says)
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held(target, "app", images[1])
    assert target.journal.count("PUT", "manifest", status=400) == 1
    assert target.journal.count("PUT", "manifest", status=201) == 1
    assert source.journal.count("GET", "blob", reference=lost) == 1


@pytest.mark.provokes("manifest_names_absent")
def test_a_target_that_names_one_lost_blob_at_a_time_is_healed_in_the_same_run(
    source, target, sync_pair
):
    made = Seed(5)
    shared = [made.blob(500 + number) for number in range(4)]
    made.image(layers=shared).load_into(source.app, "app", tag="v0")
    image = made.image(layers=[*shared, made.blob(9)]).load_into(source.app, "app", tag="v1")
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    for blob in shared:
        del target.app.repositories["app"].blobs[digest_of(blob)]

    def amend(request: Any, answer: Any) -> Any:
        if request.method == "PUT" and request.kind == "manifest" and answer.status == 400:
            first = json.loads(answer.body)["errors"][:1]
            return type(answer)(400, [], json.dumps({"errors": first}).encode())
        return answer

    target.app.amend = amend
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held(target, "app", image)
    # The first refusal brings what it names; the second one all that the state was believed of.
    assert target.journal.count("PUT", "manifest", status=400) == 1
    assert target.journal.count("PUT", "manifest", status=201) == 1
    for blob in shared:
        assert source.journal.count("GET", "blob", reference=digest_of(blob)) == 1
        target.journal.matching("PUT", "upload", query={"digest": digest_of(blob)}).exactly(1)


@pytest.mark.provokes("manifest_names_absent")
def test_a_target_that_lost_blobs_of_two_platforms_is_healed_in_the_same_run(
    source, target, sync_pair
):
    made = Seed(6)
    shared = [made.blob(500), made.blob(600), made.blob(700)]
    for tag in ("v0", "v1"):
        children = [
            made.image(layers=[blob, made.blob(40)], architecture=architecture)
            for blob, architecture in zip(shared, ("amd64", "arm64", "s390x"), strict=True)
        ]
        index = made.index(children).load_into(source.app, "app", tag=tag)
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    for blob in shared[:2]:
        del target.app.repositories["app"].blobs[digest_of(blob)]
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held(target, "app", index)
    for blob, often in zip(shared, (1, 1, 0), strict=True):
        assert source.journal.count("GET", "blob", reference=digest_of(blob)) == often


def test_a_target_that_lost_a_repository_is_healed_in_the_same_run(source, target, sync_pair):
    images = load_numbered(source, 3)
    mapping = {"from": "app", "tags": tags("v0", "v1", "v2")}
    sync_pair(mapping)
    del target.app.repositories["app"]
    ran = sync_pair(mapping)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 3), ran.err
    assert all(held(target, "app", each) for each in images)
    assert target.journal.count("PUT", "manifest", status=400) == 0


@pytest.mark.parametrize(("status", "exit_status"), [(403, 4), (413, 2)])
def test_a_manifest_that_is_refused_for_itself_makes_nothing_of_the_state_doubtful(
    source, target, status, exit_status, sync_pair
):
    """Who may not push, or pushes too much, hears nothing of blobs that are gone."""
    images = load_numbered(source, 2)
    shared = images[0].document["layers"][0]["digest"]
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    target.app.faults.on("PUT", "manifest").status(status)
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.statuses()) == (exit_status, ["failed"]), ran.err
    assert str(status) in ran.failed[0]
    target.journal.matching("PUT", "manifest").exactly(1)
    # The shared layer, of which only the state knows, is neither asked for nor brought again.
    assert source.journal.summary() == {"GET manifest": 1, "GET blob": 2}
    assert not [each for each in target.journal.entries if shared in each.target]


def test_a_listing_without_tags_makes_the_state_of_its_repository_weak(source, target, sync_pair):
    seed = Seed(22)
    base = seed.layer(900)
    images = {f"v{number}": seed.image(layers=[base, seed.layer(900)]) for number in range(3)}
    load_all(source, {"app": images})
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    del target.app.repositories["app"]
    clear(source, target)
    assert sync_pair({"from": "app", "tags": tags("v1", "v2")}).statuses() == ["synced"] * 2
    assert all(held(target, "app", images[tag]) for tag in ("v1", "v2"))
    target.journal.matching("GET", "tag_list", status=404).exactly(1)
    # The base is asked for by the POST that would start its upload, not believed: no manifest is
    # refused.
    target.journal.matching("PUT", "manifest").exactly(2)
    target.journal.matching("HEAD", "manifest").none()
    target.journal.matching("PUT", "upload").exactly(5)


@pytest.mark.provokes("manifest_names_absent")
@pytest.mark.parametrize("to", ["app", "beside"])
def test_a_registry_that_has_lost_what_its_manifest_names_is_healed_without_a_state(
    source, target, tmp_path, to, sync_pair
):
    """In its own repository the manifest is refused, beside it the mount is: both are made good."""
    seed = Seed(63)
    base = seed.layer(900)
    old, new = (seed.image(layers=[base, seed.layer(900)]) for _ in range(2))
    load_all(source, {"app": {"v1": old}, "new": {"v2": new}})
    mapping = {"from": "app", "tags": tags("v1")}
    assert sync_pair(mapping).status == 0
    drop_state(tmp_path)
    lost = old.document["layers"][0]["digest"]
    del target.app.repositories["app"].blobs[lost]
    clear(source, target)
    ran = sync_pair(mapping, {"from": "new", "tags": tags("v2"), "to": to})
    assert (ran.status, sorted(ran.statuses())) == (0, ["skipped", "synced"]), ran.err
    assert held(target, to, new)
    source.journal.matching("GET", "blob").exactly(3)
    target.journal.matching("PUT", "manifest", status=400).exactly(1 if to == "app" else 0)
    target.journal.matching("PUT", "manifest", status=201).exactly(1)
    mount = {"mount": lost, "from": "app"}
    target.journal.matching("POST", "upload_start", status=202, query=mount).exactly(1)
    target.journal.matching("PUT", "upload", status=201).exactly(3)


@SAYS
@pytest.mark.provokes("manifest_names_absent")
def test_a_target_that_lost_a_child_gets_it_again_with_what_it_names(
    source, target, says, sync_pair
):
    seed = Seed(19)
    lost, other, new = (seed.image(architecture=name) for name in ("amd64", "arm64", "s390x"))
    load_all(
        source, {"app": {"v1": seed.index([lost, other]), "v2": (image := seed.index([lost, new]))}}
    )
    assert sync_pair({"from": "app", "tags": tags("v1")}).status == 0
    there = target.app.repositories["app"]
    del there.manifests[lost.top], there.blobs[lost.document["layers"][0]["digest"]]
    saying(target, says)
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v2")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held(target, "app", image)
    target.journal.matching("PUT", "manifest", reference=lost.top, status=201).exactly(1)
    target.journal.matching("PUT", "manifest", reference="v2", status=201).exactly(1)


@pytest.mark.provokes("manifest_names_absent")
def test_a_lost_child_is_fetched_once_for_all_images_that_name_it(source, target, sync_pair):
    """The second image was looked up while the child was believed to be there."""
    seed = Seed(19)
    platforms = ("amd64", "arm64", "s390x", "riscv64")
    lost, *others = (seed.image(architecture=name) for name in platforms)
    indexes = {f"v{number}": seed.index([lost, other]) for number, other in enumerate(others)}
    load_all(source, {"app": indexes})
    one_at_a_time = {"global": {"max_concurrent_transfers": 1}}
    assert sync_pair({"from": "app", "tags": tags("v0")}, **one_at_a_time).status == 0
    del target.app.repositories["app"].manifests[lost.top]
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1", "v2")}, **one_at_a_time)
    assert (ran.status, ran.statuses()) == (0, ["synced", "synced"]), ran.err
    assert all(held(target, "app", index) for index in indexes.values())
    source.journal.matching("GET", "manifest", reference=lost.top).exactly(1)
    target.journal.matching("PUT", "manifest", status=400).exactly(1)
    target.journal.matching("PUT", "manifest", reference=lost.top, status=201).exactly(1)


@pytest.mark.provokes("manifest_names_absent")
def test_a_child_that_the_target_lost_and_the_source_no_longer_has_fails_its_image(
    source, target, sync_pair
):
    seed = Seed(19)
    lost, other, new = (seed.image(architecture=name) for name in ("amd64", "arm64", "s390x"))
    load_all(source, {"app": {"v1": seed.index([lost, other]), "v2": seed.index([lost, new])}})
    assert sync_pair({"from": "app", "tags": tags("v1")}).status == 0
    del target.app.repositories["app"].manifests[lost.top]
    source.app.faults.on("GET", "manifest", reference=lost.top).status(404, "MANIFEST_UNKNOWN")
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v2")})
    assert ran.statuses() == ["failed"]
    assert ran.images[0]["error"]["code"] == "SOURCE_ERROR"
    assert lost.top in ran.images[0]["error"]["message"] + ran.err
    target.journal.matching("PUT", "manifest", reference="v2").exactly(1)


@SAYS
@pytest.mark.provokes("manifest_names_absent")
def test_a_target_that_lost_all_blobs_of_all_repositories_is_whole_again(
    source, target, says, sync_pair
):
    seed = Seed(20)
    base = seed.layer(900)
    images = {
        name: {tag: seed.image(layers=[base, seed.layer(900)]) for tag in ("v0", "v1")}
        for name in ("one", "two", "three", "four")
    }
    load_all(source, images)
    assert sync_pair(*({"from": name, "tags": tags("v0")} for name in images)).status == 0
    for each in target.app.repositories.values():
        each.blobs.clear()
    saying(target, says)
    ran = sync_pair(*({"from": name, "tags": tags("v1")} for name in images))
    assert (ran.status, ran.failed) == (0, [])
    assert all(held(target, name, tagged["v1"]) for name, tagged in images.items())
