"""How far a failure of a copy reaches, what is tried again, and what targets get back.

On a clock that jumps. Bodies that break, outages and rates have files of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.images import OCI_INDEX, Image, encode
from conformance.memory import Place
from conformance.messages import Answer, Request, Response, error
from conformance.tokens import TokenService
from conformance.walks import referrers_tag
from tests.ends import Ran, Virtual, held, only, tags
from tests.mirrors import (
    SBOM,
    SIGNATURE,
    WRITES,
    AuditedMirror,
    CopyMirror,
    LockedMirror,
    Mirror,
    SignedMirror,
    asked,
    lose_blob,
    lose_manifest,
    whole,
)
from tests.states import rows


@pytest.fixture
def copies(world: Virtual, tmp_path: Path) -> CopyMirror:
    return CopyMirror(world, tmp_path)


def v1_of(*names: str) -> list[dict[str, Any]]:
    """Return a mapping for each repository."""
    return [{"from": name, "tags": tags("v1")} for name in names]


def errors(ran: Ran) -> list[dict[str, Any]]:
    return [each["error"] for each in ran.images if each["error"]]


# How far it reaches.


async def test_a_mapping_without_a_repository_fails_alone(copies):
    image = copies.push("v1")
    ran = await copies.sync({"from": "gone", "tags": tags("*")}, *v1_of("app"))
    assert (ran.status, ran.statuses()) == (1, ["synced", "failed"])
    assert "source.test/gone:* -> target.test/gone:*" in only(ran.failed)
    assert "SOURCE_ERROR" in only(ran.failed)
    assert held(copies.target, "app", image)


async def test_a_target_that_is_down_stops_for_itself_only(world, tmp_path):
    copies = CopyMirror(world, tmp_path, "down", "up")
    copies.load(image := copies.seed.image(), "v1", "v2", "v3", "v4")
    copies.targets["down"].fail("refused")
    ran = await copies.sync_tags("v1", "v2", "v3", "v4")
    assert ran.status == 1
    assert copies.targets["up"].app.tags("app") == dict.fromkeys(
        ("v1", "v2", "v3", "v4"), image.top
    )
    lost = errors(ran)
    assert {(each["code"], each["side"]) for each in lost} == {("NETWORK_ERROR", "target")}
    requests = ran.totals["requests"]["down.test"]
    assert requests.keys() == {"tag_list"}
    assert requests["tag_list"] < 8, "a first contact and its probes, for all images"
    assert len(ran.failed) == len(lost) == 4
    assert all("connection refused" in line for line in ran.failed)


async def test_a_broken_image_leaves_others_with_its_layers_whole(copies):
    shared, names = copies.seed.layer(4000), ("broken", "r0", "r1", "r2")
    images = {
        name: copies.push("v1", copies.seed.image(layers=[shared, copies.seed.layer(9)]), name)
        for name in names
    }
    lost = images.pop("broken").document["layers"][1]["digest"]
    del copies.source.app.repositories["broken"].blobs[lost]
    ran = await copies.sync(*v1_of(*names))
    assert (ran.status, ran.statuses()) == (1, ["failed", *["synced"] * 3])
    assert all(held(copies.target, name, image) for name, image in images.items())
    assert not copies.target.app.tags("broken")
    assert lost in only(ran.failed)


@pytest.mark.provokes("blob_pulled_twice")
async def test_a_wrong_size_of_a_shared_layer_fails_the_image_that_gives_it(copies):
    """It is the first that brings the layer."""
    shared = copies.seed.layer(900)
    wrong = copies.seed.image(layers=[shared])
    layer = {**wrong.document["layers"][0], "size": 901}
    body = encode({**wrong.document, "layers": [layer]})
    copies.push("v0", wrong.with_manifest(body, wrong.media_type))
    image = copies.push("v1", copies.seed.image(layers=[shared]))
    ran = await copies.sync_tags("v0", "v1")
    assert (ran.statuses(), only(errors(ran))["code"]) == (["failed", "synced"], "CONTENT_ERROR")
    assert held(copies.target, "app", image)


async def test_artifacts_of_an_image_or_artifact_that_failed_have_failed_with_it(mirror):
    image = mirror.push("v1")
    bill = mirror.attach(image, SBOM)
    mirror.attach(bill)
    for refused, failed in ((bill.top, 2), ("v1", 2)):
        rule = mirror.target.app.faults.on("PUT", "manifest", reference=refused).first()
        rule.status(403, "DENIED")
        ran = await mirror.sync({"from": "app", "tags": tags("v1")})
        mirror.target.app.repositories.clear()
        assert only(ran.images)["artifacts"]["failed"] == failed
        assert ran.status == 4


@pytest.mark.parametrize("refusal", [(404, "NAME_UNKNOWN"), (403, "DENIED"), (405, "UNSUPPORTED")])
@pytest.mark.parametrize("images", [1, 20])
async def test_a_repository_that_takes_no_upload_is_not_asked_for_each_blob(
    copies, refusal, images
):
    """Those that begin at once find out, however many wait behind them; others are brought."""
    for number in range(images):
        copies.push(f"v{number}", copies.seed.image(sizes=(900, 1000, 1100)))
    copies.push("v1", repository="other")
    status, code = refusal
    uploads = copies.target.app.faults.on("POST", "upload_start", repository="app")
    uploads.status(status, code)
    ran = await copies.sync(*({"from": name, "tags": tags("v*")} for name in ("app", "other")))
    assert sorted(ran.statuses()) == ["failed"] * images + ["synced"]
    assert all(f"status {status}: {code}" in each["message"] for each in errors(ran))
    copies.target.journal.matching("POST", "upload_start", "app").at_most(8)
    copies.source.journal.matching("GET", "blob", "app").none()


async def test_a_repository_that_takes_no_upload_is_not_asked_to_mount_each_blob(copies):
    layers = [copies.seed.layer(size) for size in range(900, 915)]
    for name in ("app", "other"):
        copies.push("v1", copies.seed.image(layers=layers), name)
    rule = copies.target.app.faults.on("POST", "upload_start", repository="app")
    rule.status(403, "DENIED")
    few = {"max_concurrent_transfers": 1}  # so that the other one is there, to mount from
    ran = await copies.sync(*v1_of("other", "app"), **{"global": few})
    assert ran.statuses() == ["failed", "synced"]
    # The first of them, without the mount too.
    copies.target.journal.matching("POST", "upload_start", "app").exactly(2)


async def test_a_mount_that_is_throttled_again_and_again_gives_way_to_an_upload(copies):
    layer = copies.seed.layer(900)
    for name in ("app", "other"):
        copies.push("v1", copies.seed.image(layers=[layer]), name)
    rule = copies.target.app.faults.on(
        "POST", "upload_start", repository="app", where=lambda asked: "from=other" in asked.target
    )
    rule.status(429)
    few = {"max_concurrent_transfers": 1}  # so that the other one is there, to mount from
    ran = await copies.sync(*v1_of("other", "app"), **{"global": few})
    assert ran.statuses() == ["synced", "synced"]
    assert ran.seconds < 60


@pytest.mark.parametrize("status", [403, 405])
@pytest.mark.parametrize("kind", ["blob", "manifest"])
async def test_a_refused_manifest_is_told_although_its_parts_cannot_be_asked_for(
    copies, kind, status
):
    """Nothing is sent again, because nothing says that it was lost."""
    index = copies.push("v1", copies.seed.index())
    faults = copies.target.app.faults
    faults.on("PUT", "manifest", reference="v1").status(400, "MANIFEST_INVALID")
    faults.on("HEAD", kind, reference="sha256:*").status(status)
    ran = await copies.sync_tags("v1")
    assert "push manifest target.test/app:v1: status 400: MANIFEST_INVALID" in only(ran.failed)
    copies.target.journal.matching("PUT", "upload").exactly(len(index.blobs))


# What is tried again.

REPEATED = [
    ("source", "GET", "manifest", 503),
    ("source", "GET", "blob", 503),
    ("source", "GET", "blob", 429),
    ("target", "HEAD", "manifest", 503),
    ("target", "POST", "upload_start", 503),
    ("target", "PUT", "upload", 503),
    ("target", "PUT", "upload", 429),
    ("target", "PUT", "upload", 408),
    ("target", "PUT", "manifest", 503),
]


@pytest.mark.parametrize(("side", "method", "kind", "status"), REPEATED)
async def test_a_passing_failure_costs_one_repetition(copies, side, method, kind, status):
    image = copies.push("v1", copies.seed.image(sizes=(800,)))
    faults = getattr(copies, side).app.faults
    faults.on(method, kind).first().status(status, "UNAVAILABLE", retry_after=7)
    ran = await copies.copy()
    assert (ran.status, ran.err) == (0, "")
    assert held(copies.target, "app", image)
    assert ran.seconds >= 7, "what the registry asks for is waited"
    expected = {"GET blob": 2, "GET manifest": 1, "HEAD manifest": 1, "PUT manifest": 1}
    expected |= {"POST upload_start": 2, "PUT upload": 2}
    expected[f"{method} {kind}"] += 1
    if kind == "upload":
        # A whole body whose answer is 5xx is asked for before it is sent again. One that a limit has
        # refused goes again to the same session. It comes from memory: no source is read again.
        expected["POST upload_start"] += status != 429
        expected |= {"HEAD blob": 3} if status == 503 else {}
    at_source, at_target = copies.asked()
    assert at_source + at_target == expected


@pytest.mark.parametrize(("status", "exit_status"), [(400, 2), (403, 4), (404, 2), (501, 2)])
async def test_a_refusal_is_not_repeated(copies, status, exit_status):
    copies.push("v1")
    copies.source.app.faults.on("GET", "manifest").status(status, "UNSUPPORTED")
    assert (await copies.copy()).status == exit_status
    copies.source.journal.matching("GET", "manifest").exactly(1)
    assert not copies.target.app.tags("app")


async def test_a_target_that_drops_the_line_in_a_body_gets_it_again(copies):
    image = copies.push("v1", copies.seed.image(sizes=(3_000_000,)))
    layer = image.document["layers"][0]["digest"]
    rule = copies.target.app.faults.on("PUT", "upload", query={"digest": layer}).first()
    rule.status(503, "UNAVAILABLE", early=True)
    ran = await copies.copy()
    assert (ran.status, ran.err) == (0, "")
    assert held(copies.target, "app", image)
    copies.source.journal.matching("GET", "blob", reference=layer).exactly(2)


async def test_a_session_whose_source_refuses_is_cancelled_by_one_request(copies):
    image = copies.push("v1", copies.seed.image(sizes=(800,)))
    lost = image.document["layers"][0]["digest"]
    del copies.source.app.repositories["app"].blobs[lost]
    ran = await copies.copy()
    assert ran.status == 2
    assert f"fetch blob source.test/app@{lost}" in only(ran.failed)
    copies.target.journal.matching("POST", "upload_start").exactly(2)
    copies.target.journal.matching("PUT", "upload", status=201).exactly(1)
    copies.target.journal.matching("DELETE", status=204).exactly(1)
    assert copies.target.app.uploads() == 0


@pytest.mark.parametrize("status", [401, 404, 429, 503])
async def test_a_session_that_cannot_be_cancelled_changes_nothing(copies, status):
    copies.push("v1", copies.seed.image(sizes=()))
    copies.source.app.repositories["app"].blobs.clear()
    copies.target.app.faults.on("DELETE", "upload").status(status, "UNSUPPORTED")
    ran = await copies.copy()
    assert (ran.status, ran.seconds) == (2, 0.0)
    assert "fetch blob" in only(ran.failed)
    assert only(errors(ran))["side"] == "source"
    copies.target.journal.matching("DELETE").exactly(1)


async def test_requests_whose_token_ends_in_the_middle_share_one_renewal(world, tmp_path):
    service = TokenService({"captain": "secret"}, anonymous=False, now=anyio.current_time)
    copies = CopyMirror(world, tmp_path, of={"source": {"auth": service}})
    image = copies.push("v1", copies.seed.image(sizes=(700_000, 800_000)))
    revoked = list[str]()

    def revoke(request: Request) -> None:
        if request.kind == "blob" and not revoked:
            revoked.append(request.reference)
            service.revoke()

    copies.source.app.intercept = revoke
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": "secret"}}
    source = {"source": {"url": copies.source.url, **login}}
    ran = await copies.sync(*v1_of("app"), registries=source)
    assert (ran.status, ran.err) == (0, "")
    assert held(copies.target, "app", image)
    assert (len(revoked), service.requests) == (1, 2)


async def test_a_private_repository_spoils_no_anonymous_token_of_the_public_ones(world, tmp_path):
    """A token service may answer 401 to the whole request where one scope of it needs a login."""
    service = TokenService(now=anyio.current_time)
    copies = CopyMirror(world, tmp_path, of={"source": {"auth": service}})
    names = ("one", "private", "two")
    images = {name: copies.push("v1", repository=name) for name in names}

    def refuse(request: Request) -> Answer | None:
        if request.path == "/token" and "private" in str(request.query):
            return error(401, "UNAUTHORIZED", "authentication required")
        return None

    copies.source.app.intercept = refuse
    ran = await copies.sync(*v1_of(*names))
    assert ran.statuses() == ["synced", "failed", "synced"], ran.err
    assert "source.test/private:v1" in only(ran.failed)
    assert "private (pull)" in only(ran.failed)
    assert all(held(copies.target, name, images[name]) for name in ("one", "two"))
    # The wide one was refused once; then each repository has its own.
    paths = [each.target for each in copies.source.journal.entries]
    assert [path.count("scope=") for path in paths if path.startswith("/token")] == [3, 1, 1, 1]


# Listings that lead back to themselves are errors, never short answers (I12), at either end.


ROUNDS = ["to itself", "to one like it", "to nothing"]


def go_round(place: Place, kind: str, how: str = "to itself") -> None:
    """Let each page of a registry's listings lead to itself, to one with the same entries, or to
    itself where none has an entry.
    """

    def pages(request: Request) -> Answer | None:
        if request.kind != kind:
            return None
        place.app.intercept = None
        whole_answer = place.app.start(request)
        place.app.intercept = pages
        assert isinstance(whole_answer, Response)
        page = int(request.parameter("page") or 0)
        if len(place.journal.entries) > 99:
            return error(404, "UNSUPPORTED", "nobody comes here")
        following = page + 1 if how == "to one like it" else 1
        link = f'<{request.path}?page={following}>; rel="next"'
        headers = [("Content-Type", dict(whole_answer.headers)["Content-Type"]), ("Link", link)]
        nothing = b'{"schemaVersion": 2, "tags": [], "manifests": []}'
        return Response(200, headers, nothing if how == "to nothing" else whole_answer.body)

    place.app.intercept = pages


def is_told(ran: Ran, what: str, code: str) -> bool:
    """Whether all images failed because of a list that does not end."""
    text = re.compile(f"the list of {what} does not end: page .* leads back to page ")
    found = errors(ran)
    is_said = all(each["code"] == code and text.search(each["message"]) for each in found)
    return ran.statuses() == ["failed"] * len(found) and is_said


@pytest.mark.parametrize("how", ROUNDS)
async def test_a_source_whose_tags_go_round_fails_its_mapping(world, tmp_path, how):
    mirror = SignedMirror(world, tmp_path, images=3)
    go_round(mirror.source, "tag_list", how)
    ran = await mirror.look()
    assert is_told(ran, "tags", "SOURCE_ERROR")
    assert (ran.status, len(ran.images)) == (2, 1)
    assert asked(mirror.source) == {"GET tag_list": 2}
    assert asked(mirror.target) == {}


async def test_a_target_whose_tags_go_round_fails_its_images(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=3)
    for image in mirror.images:
        image.load_into(mirror.target.app, "app", "old")
    go_round(mirror.target, "tag_list")
    ran = await mirror.look()
    assert is_told(ran, "tags", "TARGET_ERROR")
    assert [each["side"] for each in errors(ran)] == ["target"] * 3
    assert asked(mirror.target) == {"GET tag_list": 2}


@pytest.mark.parametrize("how", ROUNDS)
async def test_artifacts_of_an_endless_list_are_not_noted_as_looked_at(world, tmp_path, how):
    mirror = SignedMirror(world, tmp_path)
    first = mirror.attach(mirror.images[0])
    go_round(mirror.source, "referrers", how)
    assert is_told(await mirror.look(), "referrers", "SOURCE_ERROR")
    mirror.source.journal.matching("GET", "referrers").exactly(2)
    assert not rows(mirror.cache)["look"]
    mirror.target.journal.matching("PUT").none()

    mirror.source.app.intercept = None
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.holds(first)


# A first image's fallback tag may be asked for at the moment at which others begin to list.
@pytest.mark.provokes("absent_tag_asked")
async def test_tags_that_would_show_artifacts_and_go_round_are_no_answer(world, tmp_path):
    """Without the API a listing says which images have artifacts."""
    mirror = SignedMirror(world, tmp_path, images=2, referrers_api=False)
    late = mirror.attach(mirror.images[1])
    go_round(mirror.source, "tag_list")
    literal = {"glob": ["v0", "v1"]}
    assert is_told(await mirror.look(literal), "tags", "SOURCE_ERROR")
    assert not rows(mirror.cache)["look"]

    mirror.source.app.intercept = None
    assert (await mirror.look(literal)).statuses() == ["synced"] * 2
    assert mirror.holds(late)


@pytest.mark.parametrize("kind", ["tag_list", "referrers"])
async def test_a_later_page_that_is_not_there_is_no_answer(world, tmp_path, kind):
    """Behind an empty first page neither an unknown repository nor a registry without the API."""
    mirror = SignedMirror(world, tmp_path)

    def pages(request: Request) -> Answer | None:
        if request.kind != kind:
            return None
        if request.parameter("last"):
            return error(404, "NAME_UNKNOWN", "unknown")
        media_type = "application/json" if kind == "tag_list" else OCI_INDEX
        link = f'<{request.path}?last=z>; rel="next"'
        nothing = {"schemaVersion": 2, "tags": [], "manifests": []}
        return Response(
            200, [("Content-Type", media_type), ("Link", link)], json.dumps(nothing).encode()
        )

    mirror.source.app.intercept = pages
    ran = await mirror.look()
    assert [each["code"] for each in errors(ran)] == ["SOURCE_ERROR"]
    assert "status 404" in ran.err
    assert "such repository" not in ran.err
    assert not rows(mirror.cache)["look"]
    assert "has_referrers_api" not in str(rows(mirror.cache)["fact"])


async def test_a_source_without_pages_in_its_listing_is_listed_whole(copies, world):
    """An old registry gives a hundred tags at most, unless it is asked for more."""
    old = world.persona("old")
    image = copies.seed.image(sizes=(1,)).load_into(old, "app")
    for number in range(230):
        old.add_manifest("app", image.body, image.media_type, f"v{number:03}")
    entries = {"source": "https://old.test", "target": copies.target}
    ran = await world.sync(entries, {"from": "app", "tags": tags("v2*")})
    assert (ran.status, len(ran.images)) == (0, 30)
    assert len(copies.target.app.tags("app")) == 30


# `sync --verify`: targets are asked for every part of every image, and get back what they lost.


@pytest.fixture
def kept(world: Virtual, tmp_path: Path) -> AuditedMirror:
    return AuditedMirror(world, tmp_path)


def index_of(kept: AuditedMirror) -> tuple[Image, Image]:
    """Let the source have an index with two platforms. Returns it and one of its children."""
    child = kept.seed.image()
    index = kept.seed.index([child, kept.seed.image(architecture="arm64")])
    return index.load_into(kept.source.app, "app", "v1", "v2"), child


async def test_what_is_whole_costs_a_look_at_each_part_and_nothing_is_copied(kept):
    index, _ = index_of(kept)
    kept.mapping["tags"] = tags("v1", "v2")
    await kept.run("sync")
    ran = await kept.run("sync", "--verify")
    assert (ran.statuses(), ran.err) == (["skipped"] * 2, "")
    parts = {"GET manifest": len(index.manifests), "HEAD blob": len(index.blobs)}
    assert asked(kept.target) == {"HEAD manifest": 2, **parts}
    assert asked(kept.source) == {"HEAD manifest": 2, "GET manifest": 1, "GET referrers": 3}


@pytest.mark.parametrize("part", ["blob", "child", "index"])
async def test_what_a_target_has_lost_is_copied_and_nothing_else(kept, part):
    """A run without the option skips the image, because its tag names the right digest."""
    index, child = index_of(kept)
    kept.mapping["tags"] = tags("v*")
    await kept.run("sync")
    kept.push("v3")
    await kept.run("sync")  # which learns how the target answers probing POSTs
    if part == "blob":
        lose_blob(kept.target.app, next(iter(child.blobs)))
    elif part == "child":
        lose_manifest(kept.target.app, child.top)
    else:
        del kept.target.app.repositories["app"].manifests[index.top]
    if part != "index":
        assert (await kept.run("sync")).statuses() == ["skipped"] * 3

    ran = await kept.run("sync", "--verify")
    assert sorted(ran.statuses()) == ["skipped", "synced", "synced"]
    kept.target.journal.matching("PUT", "upload").exactly(part == "blob")
    kept.source.journal.matching("GET", "blob").exactly(part == "blob")
    assert whole(await kept.audit()) == 3
    assert (await kept.run("sync", "--verify")).statuses() == ["skipped"] * 3


async def test_a_dry_run_tells_what_is_lost_and_changes_nothing(kept):
    image = kept.load(kept.seed.image(), "v1", "v2")
    kept.mapping["tags"] = tags("v1", "v2")
    await kept.run("sync")
    lost = next(iter(image.blobs))
    lose_blob(kept.target.app, lost)
    kept.clear()
    words = ("--verify", "--dry-run", "--json", "-c", str(kept.file))
    ran = await kept.world.run("sync", *words)
    assert ran.statuses() == ["would_sync"] * 2
    assert all(f"target.test/app:{tag}: blob {lost} (" in ran.err for tag in ("v1", "v2"))
    assert sum(each["blobs"]["transferred"] for each in ran.images) == 1
    kept.target.journal.matching(WRITES).none()


async def test_without_a_state_too_and_tags_that_never_move_are_looked_at(kept):
    image = kept.seed.image().load_into(kept.source.app, "app", "v1", "v2")
    kept.mapping |= {"tags": tags("v*", immutable_tags="v*"), "artifacts": {"enabled": False}}
    await kept.run("sync")
    (kept.cache / "state.db").unlink()
    lose_blob(kept.target.app, next(iter(image.blobs)))
    assert [each["reason"] for each in (await kept.run("sync")).images] == ["immutable_tag"] * 2
    assert (await kept.run("sync", "--verify")).statuses() == ["synced"] * 2
    kept.source.journal.matching("GET", "blob").exactly(1)
    assert whole(await kept.audit()) == 2


async def test_an_artifact_is_looked_at_like_an_image(kept):
    image = kept.seed.image()
    bill = kept.seed.artifact(image, SBOM)
    signature = kept.seed.artifact(bill, SIGNATURE)
    kept.load(image, "v1", artifacts=(bill, signature))
    await kept.run("sync")
    lose_manifest(kept.target.app, signature.top)
    lose_blob(kept.target.app, next(iter(bill.blobs)))
    ran = await kept.run("sync", "--verify")
    assert (ran.status, only(ran.images)["artifacts"]["synced"]) == (0, 2)
    assert whole(await kept.audit()) == 1


async def test_an_artifact_that_a_target_does_not_list_is_listed_again(world, tmp_path):
    kept = AuditedMirror(world, tmp_path, referrers_api=False)
    image = kept.load(kept.seed.image(), "v1")
    kept.attach(image)
    await kept.run("sync")
    del kept.target.app.repositories["app"].tags[referrers_tag(image.top)]
    assert (await kept.run("sync", "--verify")).status == 0
    assert whole(await kept.audit()) == 1


async def test_wrong_bytes_stay_and_the_error_says_what_to_do(kept):
    """A registry that has something under a digest takes nothing else under it."""
    image = kept.load(kept.seed.image(), "v1")
    await kept.run("sync")
    wrong = next(iter(image.blobs))
    shorter = {"Content-Length": "3"}
    kept.target.app.faults.on("HEAD GET", "blob", reference=wrong).lie(headers=shorter)
    ran = await kept.run("sync", "--verify")
    found = only(errors(ran))
    assert (ran.status, found["code"], found["side"]) == (2, "CONTENT_ERROR", "target")
    assert f"blob {wrong}: the blob has 3 bytes" in found["message"]
    assert found["hint"] == "delete it at the target, and run `sync --verify` again"
    kept.target.journal.matching(WRITES).none()


async def test_what_cannot_be_asked_for_is_a_failure(kept):
    image = kept.load(kept.seed.image(), "v1")
    await kept.run("sync")
    kept.target.app.faults.on("HEAD GET", "blob", reference=next(iter(image.blobs))).status(403)
    assert only(errors(await kept.run("sync", "--verify")))["code"] == "AUTH_ERROR"
    kept.target.journal.matching(WRITES).none()


async def test_from_a_lock_no_source_is_asked_for_more_than_what_is_lost(world, tmp_path):
    mirror = LockedMirror(world, tmp_path)
    image = mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    mirror.push("v1")
    lost = next(iter(image.blobs))
    lose_blob(mirror.target.app, lost)
    assert (await mirror.run("sync", "--locked", "--verify")).statuses() == ["synced"]
    assert asked(mirror.source) == {"GET manifest": 1, "GET blob": 1}
    assert mirror.held() == {"v1": image.top}
    assert lost in mirror.target.app.repositories["app"].blobs


@pytest.mark.parametrize("damage", ["lost", "shorter"])
async def test_a_directory_gets_back_what_a_disk_has_lost(world, tmp_path, damage):
    mirror = Mirror(world, tmp_path)
    image = mirror.push("v1")
    layout = tmp_path / "layout"
    disk = {"registries": {"target": f"oci-layout:{layout}"}}
    assert (await mirror.sync({"from": "app", "tags": tags("v1")}, **disk)).status == 0
    digest, data = next(iter(image.blobs.items()))
    path = layout / "blobs" / "sha256" / digest.partition(":")[2]
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(data[:-1])
    assert (await mirror.run("sync", "--verify")).statuses() == ["synced"]
    assert path.read_bytes() == data
