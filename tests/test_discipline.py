"""The request discipline (docs/design.md section 6), counted on the wire: what a path costs where
registries refuse, err or forget, and what it must not.

What undisturbed runs cost is in test_costs. Rules 1 (no ping, one bare request), 2 (tokens) and 3
(pages) have their files: test_tokens, test_sync, test_hostile_answers. What a broken body and a lost
answer cost (rule 16) is in test_resume, a full disk in test_errors_told. Every run is audited besides
(`tests.ends`), so that no request of a kind that was known to be unnecessary goes unnoticed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, digest_of, error
from conformance.registry.tokens import TokenService
from conformance.server.http1 import Endpoint
from conformance.server.sockets import Server
from tests.ends import (
    Ran,
    clear,
    drop_state,
    held,
    load_all,
    load_numbered,
    run_regsync,
    sync_file,
    tags,
)

Held = Mapping[str, Mapping[str, Image]]

# Bytes of a layer.
LARGE = 70_000


def age_state(directory: Path) -> None:
    """Let a day pass since everything in the state was confirmed."""
    with closing(sqlite3.connect(directory / ".regsync" / "state.db")) as database, database:
        database.execute("UPDATE held SET at = at - 86400 WHERE because = x''")
        database.execute("UPDATE note SET at = at - 86400 WHERE substr(key, 1, 4) = ?", (b"tag ",))


def single(seed: Seed) -> Held:
    return {"app": {"v1": seed.image(sizes=(LARGE, LARGE))}}


def multi(seed: Seed) -> Held:
    base = seed.layer(LARGE)
    children = [
        seed.image(layers=[base, seed.layer(LARGE)], architecture=name)
        for name in ("amd64", "arm64", "s390x")
    ]
    return {"app": {"v1": seed.index(children)}}


def several(seed: Seed) -> Held:
    base = seed.layer(LARGE)
    return {
        f"team/app-{number}": {
            f"v{tag}": seed.image(layers=[base, seed.layer(LARGE)]) for tag in range(2)
        }
        for number in range(4)
    }


def blobs(images: Held) -> tuple[set[str], set[tuple[str, str]]]:
    """Return all digests, and all places (repository, digest)."""
    places = {
        (name, digest)
        for name, tagged in images.items()
        for image in tagged.values()
        for digest in image.blobs
    }
    return {digest for _, digest in places}, places


def test_two_aliases_of_one_host_are_asked_and_filled_once(source, target, tmp_path):
    images = several(Seed(6))
    load_all(source, images)
    ends = {"source": source, "one": target, "two": target}
    mappings = [
        {"from": name, "tags": tags("*"), "targets": [alias]}
        for name, alias in zip(images, ["one", "two"] * 2, strict=True)
    ]
    assert sync_file(tmp_path, ends, *mappings).status == 0
    once, places = blobs(images)
    source.journal.matching("GET", "blob").exactly(len(once))
    target.journal.matching("PUT", "upload").exactly(len(once))
    target.journal.matching("POST", "upload_start", status=201).exactly(len(places) - len(once))
    clear(source, target)
    assert sync_file(tmp_path, ends, *mappings).status == 0
    assert target.journal.summary() == {"HEAD manifest": 8}
    assert source.journal.summary() == {"GET tag_list": 4, "HEAD manifest": 8}


# Rules 4, 7 and 8: tags that moved, trimmed indexes, children.


def test_a_trimmed_index_costs_one_question_at_each_side_when_warm(source, target, sync_pair):
    load_all(source, {"app": {"v1": Seed(8).index()}})
    mapping = {"from": "app", "tags": tags("v1"), "platforms": ["linux/amd64"]}
    assert sync_pair(mapping).statuses() == ["synced"]
    clear(source, target)
    assert sync_pair(mapping).statuses() == ["skipped"]
    assert source.journal.summary() == target.journal.summary() == {"HEAD manifest": 1}
    # Another filter is another image.
    clear(source, target)
    assert sync_pair({**mapping, "platforms": ["linux/arm/v7"]}).statuses() == ["synced"]
    source.journal.matching("HEAD", "manifest").none()
    source.journal.matching("GET", "manifest", reference="v1").exactly(1)


def test_a_tag_that_vanished_behind_its_head_is_resolved_again_once(source, target, sync_pair):
    seed = Seed(9)
    load_all(source, {"app": {"v1": seed.image()}})
    mapping = {"from": "app", "tags": tags("v1")}
    assert sync_pair(mapping).status == 0
    between, last = seed.image(), seed.image()
    load_all(source, {"app": {"v1": between}})
    clear(source, target)

    def amend(request: Request, answer: Answer) -> Answer:
        if request.method == "HEAD" and between.top in source.app.repositories["app"].manifests:
            del source.app.repositories["app"].manifests[between.top]
            last.load_into(source.app, "app", tag="v1")
        return answer

    source.app.amend = amend
    assert sync_pair(mapping).statuses() == ["synced"]
    assert held(target, "app", last)
    source.journal.matching("GET", "manifest", reference=between.top, status=404).exactly(1)
    source.journal.matching("GET", "manifest", reference="v1").exactly(1)


# Rule 4: what a tag's answer teaches of its repository.


@pytest.mark.parametrize("lose", [drop_state, age_state])
@pytest.mark.parametrize("make", [single, multi])
def test_what_an_unchanged_tag_names_is_mounted_without_a_state(
    source, target, tmp_path, lose, make, sync_pair
):
    """A state that is empty or too old: the target's own answer says what is there."""
    images = make(Seed(61))
    load_all(source, images)
    top: dict[str, Any] = {"global": {"cache_ttl": "12h"}}
    (repository, tagged), *_ = images.items()
    tag, image = next(iter(tagged.items()))
    same = {"from": repository, "tags": tags(tag)}
    assert sync_pair(same, **top).status == 0
    lose(tmp_path)
    clear(source, target)
    beside = {**same, "to": "beside/it"}
    ran = sync_pair(beside, same, **top)
    assert sorted(ran.statuses()) == ["skipped", "synced"]
    assert held(target, "beside/it", image)
    mounts = {"mount": "*", "from": repository}
    blobs = len(image.blobs)
    target.journal.matching("POST", "upload_start").exactly(blobs)
    target.journal.matching("HEAD", "blob").none()
    # The answer may come when one of them is on its way already.
    target.journal.matching("POST", "upload_start", status=201, query=mounts).at_least(blobs - 1)
    target.journal.matching("PUT", "upload").at_most(1)
    source.journal.matching("GET", "blob").at_most(1)


def test_what_an_unchanged_tag_names_is_not_brought_again_to_its_repository(
    source, target, tmp_path, sync_pair
):
    """A layer of an image, and a child of an index with all that it names."""
    seed = Seed(62)
    base = seed.layer(LARGE)
    old, new = (seed.image(layers=[base, seed.layer(LARGE)]) for _ in range(2))
    child, other = (seed.image(architecture=name) for name in ("amd64", "arm64"))
    load_all(source, {"app": {"v1": old}, "multi": {"v1": seed.index([child])}})
    mappings = [{"from": name, "tags": tags("*")} for name in ("app", "multi")]
    assert sync_pair(*mappings).status == 0
    load_all(source, {"app": {"v2": new}, "multi": {"v2": (grown := seed.index([child, other]))}})
    drop_state(tmp_path)
    clear(source, target)
    ran = sync_pair(*mappings)
    assert sorted(ran.statuses()) == ["skipped", "skipped", "synced", "synced"]
    assert held(target, "app", new)
    assert held(target, "multi", grown)
    # Two new blobs of the image, and the new child's.
    brought = 2 + len(other.blobs)
    source.journal.matching("GET", "blob").exactly(brought)
    target.journal.matching("PUT", "upload").exactly(brought)
    # Unless it is looked at before the target has told that its old parent is there.
    source.journal.matching("GET", "manifest", reference=child.top).at_most(1)
    target.journal.matching("PUT", "manifest").exactly(3)


# Rules 9 and 10: mounts, also from earlier runs.


def test_a_mount_asks_for_the_right_to_read_where_an_earlier_run_has_put_the_blob(tmp_path, serve):
    source = serve()
    target = serve(auth=TokenService({"u": "p"}))
    image = Seed(11).image(sizes=(LARGE, LARGE))
    load_all(source, {"one": {"v1": image}, "two": {"v1": image}})
    login = {"username": "u", "password": "p"}
    entry = {"url": target.url, "auth_type": "basic", "credentials": login}
    ends = {"source": source, "target": entry}
    assert sync_file(tmp_path, ends, {"from": "one", "tags": tags("v1")}).status == 0
    assert sync_file(tmp_path, ends, {"from": "two", "tags": tags("v1")}).statuses() == ["synced"]
    target.journal.matching("POST", "upload_start", status=201, query={"from": "one"}).exactly(3)
    target.journal.matching("POST", "upload_start", status=401).none()


def test_where_no_token_covers_the_repository_to_mount_from_the_blob_is_uploaded(tmp_path, serve):
    source = serve()
    target = serve(auth=TokenService({"u": "p"}))
    image = Seed(11).image(sizes=(LARGE, LARGE))
    load_all(source, {"one": {"v1": image}, "two": {"v1": image}})
    login = {"username": "u", "password": "p"}
    entry = {"url": target.url, "auth_type": "basic", "credentials": login}
    ends = {"source": source, "target": entry}
    assert sync_file(tmp_path, ends, {"from": "one", "tags": tags("v1")}).status == 0

    def intercept(request: Request) -> Answer | None:
        asks_for_one = any("repository:one:" in value for _, value in request.query)
        return error(403, "DENIED", "not that one") if asks_for_one else None

    target.app.intercept = intercept
    assert sync_file(tmp_path, ends, {"from": "two", "tags": tags("v1")}).statuses() == ["synced"]
    assert held(target, "two", image)
    mounts = target.journal.matching("POST", "upload_start", query={"from": "one"})
    assert not [each for each in mounts if each.target.startswith("/v2/two/")]
    target.journal.matching("PUT", "upload", status=201).exactly(3 + 3)


def test_a_registry_that_never_mounts_is_asked_once_and_not_by_the_next_run(tmp_path, serve):
    source, target = serve(), serve(mounts=False)
    images = several(Seed(12))
    load_all(source, images)
    ends = {"source": source, "target": target}
    first, *rest = ({"from": name, "tags": tags("*")} for name in images)
    assert sync_file(tmp_path, ends, first, rest[0]).status == 0
    tried = [
        each
        for each in target.journal.matching("POST", "upload_start")
        if each.query.get("from") in images
    ]
    others = [each for each in tried if each.query["from"] != each.repository]
    assert len(others) == 1
    clear(source, target)
    assert sync_file(tmp_path, ends, *rest[1:]).status == 0
    tried = [
        each
        for each in target.journal.matching("POST", "upload_start")
        if each.query.get("from") in images
    ]
    assert [each for each in tried if each.query["from"] != each.repository] == []
    target.journal.matching("PUT", "upload").exactly(
        len(target.journal.matching("POST", "upload_start"))
    )


@pytest.mark.provokes("mount_uncommitted")
def test_a_refused_mount_that_rested_on_the_state_is_followed_by_one_head_and_its_own_session(
    source, target, sync_pair
):
    image = Seed(13).image(layers=[Seed(14).layer(LARGE)])
    load_all(source, {"one": {"v1": image}, "two": {"v1": image}})
    assert sync_pair({"from": "one", "tags": tags("v1")}).status == 0
    del target.app.repositories["one"]
    clear(source, target)
    assert sync_pair({"from": "two", "tags": tags("v1")}).statuses() == ["synced"]
    assert held(target, "two", image)
    for digest in image.blobs:
        target.journal.matching("POST", "upload_start", query={"mount": digest}).at_most(1)
        target.journal.matching("HEAD", "blob", reference=digest).at_most(1)
    # No session was opened and left: each POST has its PUT.
    target.journal.matching("POST", "upload_start", status=202).exactly(2)
    target.journal.matching("PUT", "upload", status=201).exactly(2)
    target.journal.matching("HEAD", "blob", status=404).at_least(1)


@pytest.mark.provokes("mount_uncommitted")
def test_a_repository_that_was_deleted_at_the_target_does_not_end_the_mounts_of_its_host(
    source, target, sync_pair
):
    """The mount from it is refused because it has lost its blobs. Others are still asked for."""
    lost, shared = Seed(13).image(layers=[Seed(14).layer(LARGE)]), Seed(16).layer(LARGE)
    first, second = Seed(17).image(layers=[shared]), Seed(18).image(layers=[shared])
    load_all(source, {"one": {"v1": lost}, "two": {"v1": lost}})
    assert sync_pair({"from": "one", "tags": tags("v1")}).status == 0
    del target.app.repositories["one"]
    assert sync_pair({"from": "two", "tags": tags("v1")}).status == 0
    load_all(source, {"three": {"v1": first}, "four": {"v1": second}})
    clear(source, target)
    ran = sync_pair({"from": "three", "tags": tags("v1")}, {"from": "four", "tags": tags("v1")})
    assert ran.statuses() == ["synced"] * 2
    assert held(target, "three", first)
    assert held(target, "four", second)
    # The two configs and the shared layer are read once each, the layer is mounted once.
    source.journal.matching("GET", "blob").exactly(3)
    mounted = target.journal.matching("POST", "upload_start", status=201)
    assert [each.query["mount"] for each in mounted] == [digest_of(shared)]
    target.journal.matching("PUT", "upload", status=201).exactly(3)


# Rule 11: existence and upload start in one request, where that was seen to work.


def test_a_probe_that_was_seen_to_work_replaces_the_heads_of_the_next_run(
    source, target, sync_pair
):
    seed = Seed(15)
    there = [seed.layer(LARGE) for _ in range(3)]
    load_all(source, {"app": {"v1": seed.image(layers=there)}})
    # Somebody else's images: the repository is not empty, and holds one of the layers.
    load_all(target, {"app": {"other": seed.image(layers=there[:1])}})
    assert sync_pair({"from": "app", "tags": tags("v1")}).status == 0
    source.journal.matching("GET", "blob").exactly(3)
    # The first 201 is confirmed by a HEAD, once.
    target.journal.matching("HEAD", "blob").exactly(1)
    new = [seed.layer(LARGE) for _ in range(2)]
    image = seed.image(layers=[*there, *new])
    load_all(source, {"app": {"v2": image}})
    clear(source, target)
    assert sync_pair({"from": "app", "tags": tags("v2")}).statuses() == ["synced"]
    assert held(target, "app", image)
    source.journal.matching("GET", "blob").exactly(3)
    target.journal.matching("HEAD", "blob").none()
    target.journal.matching(
        "POST", "upload_start", status=202, query={"mount": "*", "from": "app"}
    ).exactly(3)
    target.journal.matching("PUT", "upload").exactly(3)


def changed(
    directory: Path, target: Server | Mapping[str, Any], source: Server, new: int
) -> tuple[Image, Ran]:
    """Let a tag of a repository that the state knows move to an image with `new` new blobs; return
    the image and how the run that copies it went.
    """
    seed = Seed(65 + new)
    ends = {"source": source, "target": target}
    mapping = {"from": "app", "tags": tags("v1")}
    load_all(source, {"app": {"v1": seed.image(sizes=(LARGE, LARGE))}})
    assert sync_file(directory, ends, mapping).statuses() == ["synced"]
    image = seed.image(sizes=(900,) * (new - 1))
    load_all(source, {"app": {"v1": image}})
    clear(source)
    if isinstance(target, Endpoint):
        clear(target)
    return image, sync_file(directory, ends, mapping)


def test_where_the_question_gets_another_answer_heads_ask_and_its_session_is_used(tmp_path, serve):
    """It costs nothing then: the session takes a blob that is absent."""
    source, target = serve(), serve(mounts=False)
    for new in (24, 23):
        image, ran = changed(tmp_path, target, source, new)
        assert ran.statuses() == ["synced"]
        assert held(target, "app", image)
        target.journal.matching("HEAD", "blob", status=404).exactly(new)
        target.journal.matching("POST", "upload_start", status=202).exactly(new)
        target.journal.matching("POST", "upload_start").exactly(new)
        target.journal.matching("PUT", "upload", status=201).exactly(new)
        target.journal.matching("DELETE", "upload").none()


@pytest.mark.parametrize("how", ["400", "500", "reset"])
def test_where_the_question_is_refused_it_is_not_asked_again_and_heads_ask(
    source, target, sync_pair, how
):
    seed = Seed(67)
    mapping = {"from": "app", "tags": tags("v1")}
    load_all(source, {"app": {"v1": seed.image(sizes=(LARGE, LARGE))}})
    assert sync_pair(mapping).statuses() == ["synced"]
    image = seed.image(sizes=(900,) * 4)
    load_all(source, {"app": {"v1": image}})
    clear(source, target)
    question = target.app.faults.on("POST", "upload_start", query={"mount": "*"})
    if how == "reset":
        question.first(2).drop()  # an idle connection that is closed is replaced for free
    else:
        question.first().status(int(how))
    assert sync_pair(mapping).statuses() == ["synced"]
    assert held(target, "app", image)
    target.app.faults.check()
    # An error that may pass says nothing: the question is asked again.
    target.journal.matching("HEAD", "blob", status=404).exactly(5 if how == "400" else 0)
    target.journal.matching("POST", "upload_start", status=201).exactly(0 if how == "400" else 1)
    target.journal.matching("POST", "upload_start", status=202).exactly(5)
    target.journal.matching("PUT", "upload", status=201).exactly(5)


def test_a_registry_that_says_201_to_anything_is_asked_by_head(source, target, tmp_path):

    def intercept(request: Request) -> Answer | None:
        if request.method != "POST" or "mount" not in dict(request.query):
            return None
        return Response(201, [("Location", "/v2/app/blobs/x")], b"")

    target.app.intercept = intercept
    for new in (6, 5):
        image, ran = changed(tmp_path, target, source, new)
        assert ran.statuses() == ["synced"], ran.err
        assert held(target, "app", image)
        target.journal.matching("HEAD", "blob", status=404).at_least(new)
        target.journal.matching("PUT", "upload", status=201).exactly(new)
    # Once it is known nothing is asked for by POST.
    target.journal.matching("POST", "upload_start", status=201).none()
    target.journal.matching("HEAD", "blob").exactly(5)


@pytest.mark.parametrize("status", [409, 500])
def test_where_a_probe_gets_an_error_a_201_to_another_is_confirmed_by_head(
    source, target, sync_pair, status
):
    """The registry says 201 to anything, but not to its second question."""
    seed = Seed(67)
    mapping = {"from": "app", "tags": tags("v1")}
    load_all(source, {"app": {"v1": seed.image(sizes=(LARGE, LARGE))}})
    assert sync_pair(mapping).statuses() == ["synced"]
    image = seed.image(sizes=(900,) * 4)
    load_all(source, {"app": {"v1": image}})
    clear(source, target)
    asked = 0

    def intercept(request: Request) -> Answer | None:
        nonlocal asked
        if request.method != "POST" or "mount" not in dict(request.query):
            return None
        asked += 1
        if asked == 2:
            return error(status, "CONFLICT", "not now")
        return Response(201, [("Location", "/v2/app/blobs/x")], b"")

    target.app.intercept = intercept
    assert sync_pair(mapping).statuses() == ["synced"]
    assert held(target, "app", image)
    target.journal.matching("POST", "upload_start", status=status).exactly(1)
    target.journal.matching("PUT", "upload", status=201).exactly(5)
    target.journal.matching("PUT", "manifest").exactly(1)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 501])
def test_a_registry_that_refuses_mounts_is_not_asked_for_one_with_each_blob(
    source, target, tmp_path, status
):
    def intercept(request: Request) -> Answer | None:
        if request.method != "POST" or "mount" not in dict(request.query):
            return None
        return error(status, "UNSUPPORTED", "no mounts here")

    target.app.intercept = intercept
    images = {f"v{number}": Seed(70 + number).image(sizes=(900,) * 5) for number in range(2)}
    load_all(source, {"app": images})
    ends = {"source": source, "target": target}
    ran = sync_file(tmp_path, ends, {"from": "app", "tags": tags("*")})
    assert ran.statuses() == ["synced", "synced"], ran.err
    target.journal.matching("POST", "upload_start", status=status).exactly(1)
    target.journal.matching("POST", "upload_start", status=202).exactly(12)
    target.journal.matching("HEAD", "blob").none()
    # The next run knows.
    image, ran = changed(tmp_path, target, source, 3)
    assert held(target, "app", image)
    target.journal.matching("POST", "upload_start", status=status).none()


@pytest.mark.parametrize("status", [409, 422, 500])
def test_a_registry_that_fails_at_one_mount_is_asked_for_others(source, target, tmp_path, status):
    failure = target.app.faults.on("POST", "upload_start", query={"mount": "*"}).first()
    failure.status(status)
    load_all(source, {"app": {"v1": Seed(70).image(sizes=(900,) * 5)}})
    ends = {"source": source, "target": target}
    assert sync_file(tmp_path, ends, {"from": "app", "tags": tags("v1")}).statuses() == ["synced"]
    itself = {"mount": "*", "from": "app"}
    target.journal.matching("POST", "upload_start", status=status, query=itself).exactly(1)
    target.journal.matching("POST", "upload_start", status=202, query=itself).exactly(5)
    target.journal.matching("POST", "upload_start").exactly(7)


@pytest.mark.provokes("manifest_names_absent")
def test_a_201_is_believed_and_a_registry_that_was_wrong_is_healed(
    source, target, tmp_path, sync_pair
):
    changed(tmp_path, target, source, 3)
    image = Seed(68).image(sizes=(900, 900))
    wrong = image.document["layers"][0]["digest"]

    def intercept(request: Request) -> Answer | None:
        if request.method != "POST" or dict(request.query).get("mount") != wrong:
            return None
        return Response(201, [("Location", "/v2/app/blobs/x")], b"")

    target.app.intercept = intercept
    load_all(source, {"app": {"v1": image}})
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert ran.statuses() == ["synced"], ran.err
    assert held(target, "app", image)
    target.journal.matching("PUT", "manifest", status=400).exactly(1)
    target.journal.matching("HEAD", "blob", reference=wrong, status=404).at_least(1)
    target.journal.matching("HEAD", "blob").at_most(3)
    target.journal.matching("PUT", "upload", status=201).exactly(3)


@pytest.mark.provokes("manifest_names_absent")
def test_a_target_is_healed_once(source, target, tmp_path, sync_pair):
    """What refuses a manifest whose blobs it was sent anew is not sent it a third time."""
    changed(tmp_path, target, source, 3)
    image = Seed(68).image(sizes=(900, 900))
    wrong = image.document["layers"][0]["digest"]

    def intercept(request: Request) -> Answer | None:
        if request.method == "PUT" and "/manifests/" in request.path:
            return error(400, "MANIFEST_BLOB_UNKNOWN", "unknown")
        if request.method == "POST" and dict(request.query).get("mount") == wrong:
            return Response(201, [("Location", "/v2/app/blobs/x")], b"")
        return None

    target.app.intercept = intercept
    load_all(source, {"app": {"v1": image}})
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert ran.statuses() == ["failed"], ran.err
    target.journal.matching("PUT", "manifest", status=400).at_most(5)
    target.journal.matching("PUT", "upload", status=201).exactly(3)


def test_what_hangs_on_an_artifact_that_failed_is_not_put(tmp_path, serve):
    source, target = serve(), serve()
    seed = Seed(93)
    image = seed.image()
    sbom = seed.artifact(image, "application/vnd.example.sbom")
    signature = seed.artifact(sbom, "application/vnd.example.signature")
    for server in (source, target):
        image.load_into(server.app, "app", tag="v1")
    for each in (sbom, signature):
        each.load_into(source.app, "app")

    def intercept(request: Request) -> Answer | None:
        if request.method == "HEAD" and sbom.top in request.path:
            return error(400, "UNSUPPORTED", "not this one")
        return None

    target.app.intercept = intercept
    mapping = {"from": "app", "tags": tags("v1"), "artifacts": {"enabled": True}}
    ran = sync_file(tmp_path, {"source": source, "target": target}, mapping)
    assert ran.statuses() == ["failed"]
    assert [each["artifacts"]["failed"] for each in ran.images] == [2]
    target.journal.matching("PUT", "manifest").none()


def test_what_hangs_on_a_cosign_tag_that_failed_is_not_put(tmp_path, serve):
    source, target = serve(), serve()
    seed = Seed(94)
    image, signature, attestation = seed.image(), seed.image(), seed.image()
    for server in (source, target):
        image.load_into(server.app, "app", tag="v1")
    signature_tag = image.top.replace(":", "-") + ".sig"
    signature.load_into(source.app, "app", tag=signature_tag)
    attestation.load_into(source.app, "app", tag=signature.top.replace(":", "-") + ".att")

    def intercept(request: Request) -> Answer | None:
        if request.method == "HEAD" and signature_tag in request.path:
            return error(400, "UNSUPPORTED", "not this one")
        return None

    target.app.intercept = intercept
    mapping = {"from": "app", "tags": tags("v*"), "artifacts": {"enabled": True}}
    ran = sync_file(tmp_path, {"source": source, "target": target}, mapping)
    assert ran.statuses() == ["failed"]
    assert [each["artifacts"]["failed"] for each in ran.images] == [2]
    target.journal.matching("PUT", "manifest").none()


def test_harbor_is_asked_by_head(tmp_path, serve):
    """It is known by the service of its tokens."""
    source = serve()
    target = serve(auth=TokenService({"u": "p"}, service="harbor-registry"))
    entry = {
        "url": target.url,
        "auth_type": "basic",
        "credentials": {"username": "u", "password": "p"},
    }
    image, ran = changed(tmp_path, entry, source, 3)
    assert ran.statuses() == ["synced"], ran.err
    assert held(target, "app", image)
    target.journal.matching("POST", "upload_start", query={"mount": "*"}).none()


def test_a_dry_run_asks_no_such_question(source, target, tmp_path):
    _, ran = changed(tmp_path, target, source, 24)
    assert ran.status == 0
    load_all(source, {"app": {"v1": Seed(67).image(sizes=(900,) * 5)}})
    clear(source, target)
    assert run_regsync("sync", "--dry-run", "-q", "-c", str(tmp_path / "mirror.yaml")).status == 0
    target.journal.matching("POST").none()
    target.journal.matching("HEAD", "blob").exactly(6)


def test_an_empty_repository_is_asked_for_no_blob(source, target, sync_pair):
    """An interrupted run's blobs are found by the POST that would start the upload."""
    seed = Seed(16)
    images = {f"v{number}": seed.image(sizes=(LARGE,)) for number in range(2)}
    load_all(source, {"app": images})
    left = images["v0"].document["layers"][0]["digest"]
    target.app.add_blob("app", images["v0"].blobs[left])
    ran = sync_pair({"from": "app", "tags": tags("*")})
    assert ran.status == 0
    source.journal.matching("GET", "blob", reference=left).none()
    source.journal.matching("GET", "blob").exactly(3)
    # One HEAD confirms the first 201 (rule 11).
    target.journal.matching("HEAD", "blob").exactly(1)
    target.journal.matching("POST", "upload_start").exactly(4)
    target.journal.matching("PUT", "upload").exactly(3)


# What a state saves.


def test_the_way_to_a_login_is_remembered(tmp_path, serve):
    users = {"me": "secret-word"}
    source, target = serve(auth=TokenService(users)), serve(auth=TokenService(users))
    load_numbered(source, 2)
    login = {"auth_type": "basic", "credentials": {"username": "me", "password": "secret-word"}}
    ends = {"source": {"url": source.url, **login}, "target": {"url": target.url, **login}}
    mapping = {"from": "app", "tags": tags("v0", "v1")}
    assert sync_file(tmp_path, ends, mapping).status == 0
    before = [len(server.journal.entries) for server in (source, target)]
    assert {*sync_file(tmp_path, ends, mapping).statuses()} == {"skipped"}
    for server, first in zip((source, target), before, strict=True):
        assert server.journal.count(status=401) == 1
        kinds = [f"{each.method} {each.kind}" for each in server.journal.entries[first:]]
        assert sorted(kinds) == ["GET token", "HEAD manifest", "HEAD manifest"]
    assert b"secret-word" not in (tmp_path / ".regsync" / "state.db").read_bytes()
