"""`regsync audit`: what is asked, what the answers show to be wrong, and what is expected, also from a
lock; registries of all kinds, registries that refuse, throttle or are away; signals and receipts.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from conformance.images import OCI_INDEX, Image, Seed
from conformance.messages import Answer, Request, Response, digest_of
from conformance.tokens import TokenService
from conformance.walks import family, has_api, referrers_tag
from tests.attached import MOVES, Scene
from tests.ends import Ran, Virtual, only, stopped_at, tags
from tests.mirrors import (
    SBOM,
    SIGNATURE,
    AuditedMirror,
    asked,
    found,
    lose_blob,
    lose_manifest,
    whole,
)

DAY = 86_400


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> AuditedMirror:
    return AuditedMirror(world, tmp_path)


@pytest.fixture
def pair(world: Virtual, tmp_path: Path) -> AuditedMirror:
    """A mirror with two targets."""
    return AuditedMirror(world, tmp_path, "one", "two")


def chain(mirror: AuditedMirror, *names: str) -> tuple[Image, Image, Image]:
    """Hold an image, an SBOM of it, and a signature of that."""
    image = mirror.seed.image()
    bill = mirror.seed.artifact(image, SBOM)
    signature = mirror.seed.artifact(bill, SIGNATURE)
    mirror.load(image, *(names or ("v1",)), artifacts=(bill, signature))
    return image, bill, signature


# What is asked.


async def test_an_index_is_read_once_and_shared_blobs_are_asked_for_once(mirror):
    """A GET a manifest and a HEAD a blob. Attestations have no artifacts: of an index with two
    platforms three digests are asked about at the source, and none that has none at the target.
    """
    shared = mirror.seed.layer(500)
    children = [
        mirror.seed.image(layers=[shared, mirror.seed.layer(100)], architecture=each)
        for each in ("amd64", "arm64")
    ]
    top = mirror.load(mirror.seed.index(children, attestations=True), "v1")
    ran = await mirror.audit()
    assert whole(ran) == 1
    assert asked(mirror.source) == {"HEAD manifest": 1, "GET referrers": 3}
    parts = {"GET manifest": len(top.manifests), "HEAD blob": len(top.blobs)}
    assert asked(mirror.target) == parts
    assert [ran.totals["manifests"], ran.totals["blobs"]] == [*parts.values()]


async def test_other_tags_of_an_image_cost_a_head_at_each_end(mirror):
    image = mirror.load(mirror.seed.image(), "v1", "v2", "latest")
    mirror.mapping["tags"] = tags("v1", "v2", "latest")
    assert whole(await mirror.audit()) == 3
    assert asked(mirror.source) == {"HEAD manifest": 3, "GET referrers": 1}
    parts = {"GET manifest": 1, "HEAD blob": len(image.blobs)}
    assert asked(mirror.target) == {**parts, "HEAD manifest": 2}


async def test_artifacts_are_read_and_asked_about_once_at_each_end(mirror):
    blobs = {digest for each in chain(mirror) for digest in each.blobs}
    ran = await mirror.audit()
    assert whole(ran) == 1
    assert ran.totals["artifacts"] == 2
    assert asked(mirror.source) == {"HEAD manifest": 1, "GET referrers": 3}
    assert asked(mirror.target) == {"GET manifest": 3, "HEAD blob": len(blobs), "GET referrers": 2}
    mirror.mapping["artifacts"] = {"enabled": False}
    assert whole(await mirror.audit()) == 1
    assert asked(mirror.source) == {"HEAD manifest": 1}
    mirror.target.journal.matching("GET", "referrers").none()


async def test_the_source_is_asked_once_for_all_targets_and_foreign_layers_nowhere(pair):
    image = pair.load(pair.seed.image(foreign=("https://example.com/layer",)), "v1")
    assert image.absent
    assert whole(await pair.audit()) == 2
    assert asked(pair.source) == {"HEAD manifest": 1, "GET referrers": 1}
    parts = {"GET manifest": 1, "HEAD blob": len(image.blobs)}
    assert all(asked(place) == parts for place in pair.targets.values())


async def test_only_the_right_to_pull_is_asked_for(world, tmp_path):
    service = TokenService(realm="http://token.test/token", now=anyio.current_time)
    world.listen(service, "token.test")
    mirror = AuditedMirror(world, tmp_path, of={"target": {"auth": service}})
    mirror.load(mirror.seed.image(), "v1")
    assert whole(await mirror.audit()) == 1
    (entry,) = service.journal.matching("GET", "token")
    assert entry.query["scope"] == "repository:app:pull"


async def test_what_a_head_leaves_out_is_no_finding(mirror):
    mirror.load(mirror.seed.image(), "v1", "v2")
    mirror.mapping["tags"] = tags("v1", "v2")
    for place in (mirror.source, mirror.target):
        unsaid = {"Docker-Content-Digest": None, "Content-Length": None}
        place.app.faults.on("HEAD", "manifest blob").lie(headers=unsaid)
    assert whole(await mirror.audit()) == 2


# What is expected.


@pytest.mark.parametrize(("knows", "manifests"), [(True, 0), (False, 1)])
async def test_a_trimmed_index_is_made_again_where_no_state_tells_it(mirror, knows, manifests):
    """The source does not know it: only what is below it is asked about there."""
    mirror.seed.index().load_into(mirror.source.app, "app", "v1", "v2")
    mirror.mapping |= {"platforms": ["linux/amd64"], "tags": tags("v1", "v2")}
    assert (await mirror.run("sync")).statuses() == ["synced"] * 2
    if not knows:
        (mirror.cache / "state.db").unlink()
    assert whole(await mirror.audit()) == 2
    mirror.source.journal.matching("GET", "manifest").exactly(manifests)
    mirror.source.journal.matching("GET", "referrers").exactly(1)


async def test_what_the_state_knows_of_an_index_that_was_replaced_is_not_expected(mirror):
    mirror.seed.index().load_into(mirror.source.app, "app", "v1")
    mirror.mapping["platforms"] = ["linux/amd64"]
    await mirror.run("sync")
    held = only((await mirror.run("sync")).images)["digest"]
    mirror.seed.index().load_into(mirror.source.app, "app", "v1")
    assert found(await mirror.audit()) == [("differs", held)]


async def test_nothing_is_kept_and_a_state_is_not_believed(mirror):
    image = mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    await mirror.run("sync")
    state = (mirror.cache / "state.db").read_bytes()
    lost = next(iter(image.blobs))
    lose_blob(mirror.target.app, lost)
    assert found(await mirror.audit()) == [("incomplete", lost)]
    assert (mirror.cache / "state.db").read_bytes() == state


# What is wrong.


async def test_a_tag_that_is_not_there(mirror):
    image = mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    assert only((await mirror.audit()).report["findings"]) == {
        "finding": "missing",
        "source": "source.test/app:v1",
        "target": "target.test/app:v1",
        "digest": None,
        "expected": image.top,
        "size": None,
        "message": f"expected {image.top}",
    }
    assert asked(mirror.target) == {"GET manifest": 1}


async def test_an_audit_that_finds_nothing_says_nothing_and_findings_are_lines(mirror):
    image = mirror.load(mirror.seed.image(sizes=(900, 2000)), "v1")
    mirror.write(mirror.mapping)
    ran = await mirror.world.run("audit", "-c", str(mirror.file))
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    lost = next(digest for digest, body in image.blobs.items() if 2000 < len(body) < 9000)
    lose_blob(mirror.target.app, lost)
    ran = await mirror.world.run("audit", "-c", str(mirror.file))
    assert (ran.status, ran.err) == (1, "")
    size = f"{len(image.blobs[lost]) / 1000:.1f} KB"
    assert ran.out.splitlines()[:3] == [
        f"incomplete source.test/app:v1 -> target.test/app:v1: blob {lost} ({size}) is missing",
        "Images: 0 whole, 1 with findings, 0 not checked completely",
        f"Present: 1 manifests, {len(image.blobs) - 1} blobs, 0 artifacts",
    ]


async def test_what_differs_is_looked_at_whole(mirror):
    """But not what refers to it: the source, which may not know it any more, is not asked about it."""
    new = mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    old = mirror.seed.index().load_into(mirror.target.app, "app", "v1")
    mirror.seed.artifact(old, SBOM).load_into(mirror.target.app, "app")
    lost = next(iter(old.blobs))
    lose_blob(mirror.target.app, lost)
    ran = await mirror.audit()
    assert found(ran) == [("differs", old.top), ("incomplete", lost)]
    [differs] = [each for each in ran.report["findings"] if each["finding"] == "differs"]
    assert differs["expected"] == new.top
    assert asked(mirror.source) == {"HEAD manifest": 1}


@pytest.mark.parametrize("part", ["blob", "manifest"])
async def test_a_part_that_is_lost_is_named_with_its_size(mirror, part):
    child = mirror.seed.image()
    mirror.load(mirror.seed.index([child, mirror.seed.image(architecture="arm64")]), "v1", "v2")
    mirror.mapping["tags"] = tags("v1", "v2")
    if part == "blob":
        digest, data = next(iter(child.blobs.items()))
        lose_blob(mirror.target.app, digest)
    else:
        digest, data = child.top, child.body
        lose_manifest(mirror.target.app, digest)
    ran = await mirror.audit()
    assert found(ran) == [("incomplete", digest)] * 2, "each tag that leads to it is told"
    for finding in ran.report["findings"]:
        assert finding["size"] == len(data)
        assert finding["message"].startswith(f"{part} {digest} (")
    assert ran.totals["images"] == {"whole": 0, "flawed": 2, "failed": 0}


async def test_a_blob_that_an_image_and_its_artifact_lack_is_told_once(mirror):
    made = family("shared")
    mirror.load(made.image, "v1", artifacts=made.sample.attached)
    [shared, *_] = {*made.image.blobs} & {*made.sample.attached[0].blobs}
    lose_blob(mirror.target.app, shared)
    assert found(await mirror.audit()) == [("incomplete", shared)]


@pytest.mark.parametrize("part", ["blob", "child"])
async def test_what_the_recipe_says_mends_an_image(mirror, part):
    """docs/recipes.md, "After an incident": the tag is deleted, the state removed, then a run brings it."""
    child = mirror.seed.image()
    top = mirror.seed.index([child, mirror.seed.image(architecture="arm64")])
    top.load_into(mirror.source.app, "app", "v1", "v2")
    mirror.mapping["tags"] = tags("v1", "v2")
    await mirror.run("sync")
    if part == "blob":
        lose_blob(mirror.target.app, next(iter(child.blobs)))
    else:
        lose_manifest(mirror.target.app, child.top)
    assert {each for each, _ in found(await mirror.audit())} == {"incomplete"}
    mirror.target.app.repositories["app"].tags.clear()
    (mirror.cache / "state.db").unlink()
    assert (await mirror.run("sync")).status == 0
    assert whole(await mirror.audit()) == 2


# What is wrong with artifacts.


async def test_an_artifact_that_is_lost(mirror):
    _, bill, signature = chain(mirror)
    lose_manifest(mirror.target.app, signature.top)
    ran = await mirror.audit()
    assert found(ran) == [("artifact_missing", signature.top)]
    message = only(ran.report["findings"])["message"]
    assert message == f"{signature.top} ({SIGNATURE}) of {bill.top} is missing"
    # The source is asked whether it holds what it lists: a run cannot bring what it has lost.
    mirror.source.journal.matching("HEAD", "manifest").exactly(2)
    lose_manifest(mirror.source.app, signature.top)
    mirror.source.app.intercept = lists_anyway(bill, signature)
    assert whole(await mirror.audit()) == 1


def lists_anyway(subject: Image, artifact: Image) -> Callable[[Request], Answer | None]:
    """Have a registry list an artifact, whether or not it holds it."""
    listing = Response(200, [("Content-Type", OCI_INDEX)], Seed().fallback_index([artifact]).body)
    asked = ("referrers", subject.top)
    return lambda request: listing if (request.kind, request.reference) == asked else None


async def test_an_artifact_that_a_target_does_not_list_is_found_and_mended(world, tmp_path):
    scene = Scene(world, tmp_path, family("single"), "strict", "distribution")
    await scene.succeed()
    del scene.target.repositories["app"].tags[referrers_tag(scene.made.image.top)]
    findings = (await scene.run("audit")).report["findings"]
    assert {each["finding"] for each in findings} == {"artifact_missing"}
    assert len(findings) == len(scene.made.travelling)
    for finding in findings:
        assert finding["message"].endswith("exists, but the target does not list it")
    ran = await world.run("sync", "--recheck", "-v", "-c", str(scene.file))
    assert (ran.status, ran.out) == (0, ""), "no image was copied"
    tag = referrers_tag(scene.made.image.top)
    added = f"target.test/app:{tag}: {len(findings)} artifacts are added to the list of referrers"
    assert added in ran.err
    assert whole(await scene.run("audit")) == 1


async def test_a_signature_of_cosign_that_was_made_again_differs(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    mirror.mapping["tags"] = tags("v*")
    signature = referrers_tag(image.top) + ".sig"
    new = mirror.seed.image().load_into(mirror.source.app, "app", signature)
    assert found(await mirror.audit()) == [("artifact_missing", new.top)]
    old = mirror.seed.image().load_into(mirror.target.app, "app", signature)
    ran = await mirror.audit()
    assert found(ran) == [("differs", old.top)]
    assert only(ran.report["findings"])["expected"] == new.top
    new.load_into(mirror.target.app, "app", signature)
    assert whole(await mirror.audit()) == 1
    # What hangs on the signature is asked for where a listing shows some of it.
    mirror.source.journal.matching("GET", "referrers").exactly(1)
    mirror.target.journal.matching("GET", "referrers").none()


@pytest.mark.parametrize("depth", [8, 9])
async def test_artifacts_on_artifacts_are_checked_if_they_are_eight_deep(mirror, depth):
    top = mirror.load(mirror.seed.image(), "v1")
    for _ in range(depth):
        top = mirror.load(mirror.seed.artifact(top))
    ran = await mirror.audit()
    assert found(ran) == []
    if depth == 8:
        assert (whole(ran), ran.totals["artifacts"]) == (1, 8)
        return
    error = only(ran.report["failures"])["error"]
    assert (error["code"], error["side"]) == ("CONTENT_ERROR", "source")
    assert "more than 8 deep" in error["message"]


# Bytes.


@pytest.mark.parametrize("always", [True, False])
async def test_a_manifest_is_corrupt_whose_bytes_are_wrong_twice(mirror, always):
    child = mirror.seed.image()
    mirror.load(mirror.seed.index([child]), "v1")
    rule = mirror.target.app.faults.on("GET", "manifest", reference=child.top)
    (rule if always else rule.first()).corrupt()
    assert found(await mirror.audit()) == [("corrupt", child.top)] * always
    mirror.target.journal.matching("GET", "manifest", reference=child.top).exactly(2)


async def test_a_blob_of_another_length_is_corrupt(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    cut, body = next(iter(image.blobs.items()))
    faults = mirror.target.app.faults
    faults.on("HEAD GET", "blob", reference=cut).lie(headers={"Content-Length": "7"})
    ran = await mirror.audit()
    assert found(ran) == [("corrupt", cut)]
    message = only(ran.report["findings"])["message"]
    assert message == f"blob {cut}: the blob has 7 bytes, its descriptor says {len(body)}"


async def test_a_get_decides_where_a_head_lies_about_a_blob(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    lied, *refused = image.blobs
    faults = mirror.target.app.faults
    faults.on("HEAD", "blob", reference=lied).lie(headers={"Content-Length": "7"})
    for blob, status in zip(refused, (403, 405), strict=True):
        faults.on("HEAD", "blob", reference=blob).status(status)
    assert whole(await mirror.audit()) == 1
    mirror.target.journal.matching("GET", "blob").exactly(3)


async def test_blobs_of_each_target_are_read_back_once_and_hashed(pair):
    images = [pair.load(pair.seed.image(), f"v{number}") for number in range(3)]
    pair.mapping["tags"] = tags("v*")
    blobs = {digest: body for image in images for digest, body in image.blobs.items()}
    ran = await pair.audit("--read")
    assert whole(ran) == 6
    size = sum(map(len, blobs.values()))
    assert ran.totals["read"] == {"blobs": 2 * len(blobs), "bytes": 2 * size}
    for place in pair.targets.values():
        place.journal.matching("GET", "blob").exactly(len(blobs))

    wrong = next(iter(blobs))
    pair.target.app.faults.on("GET", "blob", reference=wrong).corrupt()
    assert found(await pair.audit()) == []
    pair.target.journal.matching("GET", "blob").none()
    ran = await pair.audit("--read")
    assert found(ran) == [("corrupt", wrong)]
    assert ran.totals["read"]["blobs"] == 2 * len(blobs) - 1
    pair.target.journal.matching("GET", "blob", reference=wrong).exactly(2)


async def test_a_blob_that_breaks_is_read_to_its_end(mirror):
    image = mirror.load(mirror.seed.image(sizes=(300_000,)), "v1")
    large = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
    faults = mirror.target.app.faults
    faults.on("GET", "blob", reference=large).first().drop(after=100_000)
    faults.on("GET", "blob", reference=large).first().status(503)
    ran = await mirror.audit("--read")
    assert whole(ran) == 1
    assert ran.totals["read"]["bytes"] == image.size


async def test_a_blob_that_can_only_be_asked_for_is_incomplete(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    lost = next(iter(image.blobs))
    mirror.target.app.faults.on("GET", "blob", reference=lost).status(404)
    assert found(await mirror.audit("--read")) == [("incomplete", lost)]


# Registries of every kind.


ENDS = ("strict", "distribution")
KINDS = ("referrers-in-pages", "unknown-referrers-announced", "old")


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        *itertools.product(ENDS, ENDS, ["everything"]),
        *itertools.product(ENDS, ENDS, ["filtered"]),
        *(("strict", kind, "everything") for kind in KINDS),
    ],
)
async def test_what_a_run_has_brought_is_whole_and_what_is_lost_of_it_is_missed(
    world, tmp_path, source, target, name
):
    scene = Scene(world, tmp_path, family(name), source, target)
    await scene.succeed()
    ran = await scene.run("audit")
    scene.moved().none()
    assert whole(ran) == 1
    travelling = {image.top for image in scene.made.travelling}
    assert ran.totals["artifacts"] == len(travelling)
    scene.target.journal.matching("GET", "manifest", status=200).at_most(
        ran.totals["manifests"] + (0 if has_api(scene.target) else len(travelling) + 1)
    )
    scene.target.journal.matching("HEAD", "blob").exactly(ran.totals["blobs"])

    lost = sorted(travelling)[:2]
    for digest in lost:
        lose_manifest(scene.target, digest)
    ran = await scene.run("audit")
    scene.moved().none()
    assert ran.report["failures"] == []
    assert {*lost} <= {each["digest"] for each in ran.report["findings"]}


CLOSED = ("gar", "acr-io")


@pytest.mark.parametrize("name", [*CLOSED, "dockerhub", "ecr", "ghcr", "redirecting"])
async def test_a_target_of_any_kind_is_looked_at_whole(mirror, name):
    """Without a login: where that is refused, an image that may be there is no finding."""
    target = mirror.world.persona(name)
    repository = "library/app" if name == "dockerhub" else "team/a/app"
    image = mirror.seed.index().load_into(mirror.source.app, "app", "v1")
    image.load_into(target, repository, "v1")
    mirror.registries["target"] = {"url": f"https://{target.row.hosts['registry']}"}
    mirror.mapping["to"] = repository
    ran = await mirror.run("audit", "--read")
    target.journal.matching(MOVES).none()
    if name in CLOSED:
        assert (ran.status, ran.report["findings"]) == (2, [])
        assert only(ran.report["failures"])["error"]["code"] == "AUTH_ERROR"
    else:
        assert whole(ran) == 1
        assert ran.totals["read"]["blobs"] == len(image.blobs)
        target.journal.matching("HEAD", "blob").none()


# Registries that do not answer as one would like.


async def test_a_blob_that_may_not_be_asked_for_is_a_failure_and_the_rest_is_told(mirror):
    image = mirror.load(mirror.seed.image(sizes=(100, 200)), "v1")
    hidden, lost, *_ = image.blobs
    lose_blob(mirror.target.app, lost)
    mirror.target.app.faults.on("HEAD GET", "blob", reference=hidden).status(403)
    ran = await mirror.audit()
    assert (ran.status, found(ran)) == (2, [("incomplete", lost)])
    assert only(ran.report["failures"])["target"] == "target.test/app:v1"
    assert len(ran.failed) == 1


async def test_a_source_that_cannot_be_listed_fails_its_mapping_alone(pair):
    pair.mapping["tags"] = tags("v*")
    pair.source.app.faults.on("GET", "tag_list").status(403)
    failures = (await pair.audit()).report["failures"]
    assert sorted(each["target"] for each in failures) == ["one.test/app:*", "two.test/app:*"]
    for place in pair.targets.values():
        assert not place.journal.entries


async def test_two_mappings_of_a_source_that_cannot_be_listed_are_two_failures(mirror):
    mirror.mapping["tags"] = tags("v*")
    mirror.others.append({"from": "app", "tags": tags("w*")})
    mirror.source.app.faults.on("GET", "tag_list").status(403)
    ran = await mirror.audit()
    assert len(ran.report["failures"]) == 2
    assert ran.totals["images"] == {"whole": 0, "flawed": 0, "failed": 2}


async def test_a_tag_that_the_source_lost_is_a_failure(mirror):
    mirror.seed.image().load_into(mirror.target.app, "app", "v1")
    mirror.seed.image().load_into(mirror.source.app, "app", "v2")
    ran = await mirror.audit()
    assert (ran.status, ran.report["findings"]) == (2, [])
    assert only(ran.report["failures"])["error"]["code"] == "SOURCE_ERROR"


async def test_an_index_that_has_no_end_is_a_failure(mirror):
    mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    nested = mirror.seed.image()
    for _ in range(5):
        nested = mirror.seed.index([nested])
    nested.load_into(mirror.target.app, "app", "v1")
    ran = await mirror.audit()
    assert found(ran) == [("differs", nested.top)]
    error = only(ran.report["failures"])["error"]
    assert error["code"] == "CONTENT_ERROR"
    assert "nested more than 4 deep" in error["message"]


async def test_of_two_sources_of_a_tag_the_later_one_is_a_failure(mirror):
    mirror.load(mirror.seed.image(), "v1")
    mirror.others.append({"from": "other", "to": "app", "tags": tags("v1")})
    ran = await mirror.audit()
    failure = only(ran.report["failures"])
    assert (failure["source"], failure["error"]["code"]) == ("source.test/other:v1", "TARGET_ERROR")
    assert "mappings[0] writes this tag too" in failure["error"]["message"]
    assert ran.totals["images"] == {"whole": 1, "flawed": 0, "failed": 1}


async def test_a_target_that_is_away_fails_alone(pair):
    for number in range(100):
        pair.load(pair.seed.image(), f"v{number}")
    pair.mapping["tags"] = tags("v*")
    pair.target.fail("refused")
    ran = await pair.audit()
    assert (ran.status, ran.report["findings"]) == (2, [])
    codes = [each["error"]["code"] for each in ran.report["failures"]]
    assert codes == ["NETWORK_ERROR"] * 100
    assert ran.totals["images"]["whole"] == 100
    # The other one does not wait until the first is given up.
    times = [each.time for each in pair.targets["two"].journal.entries]
    assert times[-1] - times[0] < 1


async def test_an_audit_shows_how_far_it_is(mirror):
    mirror.load(mirror.seed.image(), "v1")
    mirror.write(mirror.mapping)
    mirror.target.app.faults.on("HEAD", "blob").delay(40)
    ran = await mirror.world.run("audit", "-c", str(mirror.file))
    line = "still running: 0 of 1 images; target.test has not answered for 30s"
    assert ran.err.splitlines() == [line]


# From a lock, of which no source is asked.


class LockedAudit(AuditedMirror):
    """A mirror whose source was locked, and is asked no more."""

    async def make_lock(self) -> None:
        assert (await self.run("lock")).status == 0

    async def audit(self, *options: str, **top: object) -> Ran:
        ran = await super().audit("--locked", *options, **top)
        assert not self.source.journal.entries
        return ran


@pytest.fixture
def locked(world: Virtual, tmp_path: Path) -> LockedAudit:
    return LockedAudit(world, tmp_path)


async def test_a_lock_says_what_is_expected_and_no_source_is_asked(locked):
    """Nor its token service. Another lock can be named."""
    service = TokenService(realm="http://token.test/token", now=anyio.current_time)
    locked.world.listen(service, "token.test")
    locked.source.app.auth = service
    blobs = {digest for each in chain(locked) for digest in each.blobs}
    locked.mapping["tags"] = tags("v*")
    await locked.make_lock()
    elsewhere = locked.directory / "reviewed.lock"
    locked.lock.rename(elsewhere)
    service.journal.clear()
    # What happens at the source afterwards changes nothing.
    locked.seed.image().load_into(locked.source.app, "app", "v1", "v2")

    ran = await locked.audit("--lock", str(elsewhere))
    assert whole(ran) == 1
    assert asked(locked.target) == {"GET manifest": 3, "HEAD blob": len(blobs), "GET referrers": 2}
    assert list(ran.totals["requests"]) == ["target.test"]
    assert not service.journal.entries


async def test_what_is_not_as_in_the_lock_is_found(locked):
    image, bill, signature = chain(locked, "v1", "v2")
    locked.mapping["tags"] = tags("v1", "v2")
    await locked.make_lock()
    other = locked.seed.image().load_into(locked.target.app, "app", "v2")
    assert found(await locked.audit()) == [("differs", other.top)]
    del locked.target.app.repositories["app"].tags["v2"]
    assert found(await locked.audit()) == [("missing", None)]
    image.load_into(locked.target.app, "app", "v2")
    lose_manifest(locked.target.app, signature.top)
    assert found(await locked.audit()) == [("artifact_missing", signature.top)] * 2
    lose_manifest(locked.target.app, bill.top)
    assert {digest for _, digest in found(await locked.audit())} == {bill.top, signature.top}


async def test_a_trimmed_index_is_known_from_the_lock(locked):
    index = locked.seed.index(platforms=("linux/amd64", "linux/arm64"))
    index.load_into(locked.source.app, "app", "v1")
    locked.mapping["platforms"] = ["linux/amd64"]
    await locked.make_lock()
    assert (await locked.run("sync", "--locked")).statuses() == ["synced"]
    (locked.cache / "state.db").unlink()
    assert whole(await locked.audit()) == 1


async def test_artifacts_that_a_mapping_refuses_are_not_missed(locked):
    """The lock has them, because another mapping takes them."""
    image = locked.load(locked.seed.image(), "v1")
    bill = locked.seed.artifact(image, SBOM).load_into(locked.source.app, "app")
    signature = locked.load(locked.seed.artifact(image, SIGNATURE))
    for loaded in (image, bill, signature):
        loaded.load_into(locked.target.app, "other", *(["v1"] if loaded is image else []))
    locked.mapping["artifacts"] = {"exclude": [SBOM]}
    locked.others = [{"from": "app", "to": "other", "tags": tags("v1")}]
    await locked.make_lock()
    assert whole(await locked.audit()) == 2
    lose_manifest(locked.target.app, signature.top)
    assert found(await locked.audit()) == [("artifact_missing", signature.top)]


# What is held back by its age.


async def test_what_is_held_back_is_neither_missing_nor_different(mirror):
    """What the target holds meanwhile is looked at whole all the same."""
    mirror.mapping |= {"min_age": "3d", "tags": tags("v1", "v2")}
    old = mirror.load(mirror.seed.image(), "v1")
    new = mirror.seed.image().load_into(mirror.source.app, "app", "v1", "v2")
    await mirror.run("sync")
    assert mirror.target.app.tags("app") == {"v1": old.top}
    assert whole(await mirror.audit()) == 2
    assert asked(mirror.source) == {"HEAD manifest": 2}
    mirror.target.journal.matching("HEAD", "blob").exactly(len(old.blobs))
    lost = next(iter(old.blobs))
    lose_blob(mirror.target.app, lost)
    assert found(await mirror.audit()) == [("incomplete", lost)]

    await anyio.sleep(3 * DAY)
    assert {kind for kind, _ in found(await mirror.audit())} == {"differs", "missing", "incomplete"}
    await mirror.run("sync")
    assert mirror.target.app.tags("app") == {"v1": new.top, "v2": new.top}
    assert whole(await mirror.audit()) == 2


async def test_of_an_index_that_is_held_back_nothing_is_read_and_no_time_is_noted(mirror):
    mirror.mapping |= {"min_age": "3d", "platforms": ["linux/amd64"]}
    mirror.seed.index().load_into(mirror.source.app, "app", "v1")
    assert whole(await mirror.audit()) == 1
    assert asked(mirror.source) == {"HEAD manifest": 1}
    assert not mirror.cache.exists()


# Signals, receipts, shards, layouts.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
async def test_a_signal_ends_an_audit_at_once_and_what_was_found_is_told(mirror, number):
    image = mirror.load(mirror.seed.image(), "v1", "v2")
    mirror.mapping["tags"] = tags("v1", "v2", "v3")
    mirror.seed.image().load_into(mirror.source.app, "app", "v3")
    receipt = mirror.directory / "there.txt"
    receipt.write_text("as it was")
    faults = mirror.target.app.faults
    faults.on("HEAD", "blob", reference=next(iter(image.blobs))).stall()
    async with stopped_at(5.0, number=number):
        ran = await mirror.run("audit", "--receipt", str(receipt))
    assert ran.status == 128 + number
    assert ran.seconds == pytest.approx(5.0, abs=0.01)
    assert ran.report["interrupted"]
    assert [each for each, _ in found(ran)] == ["missing"]
    assert ran.totals["images"] == {"whole": 0, "flawed": 1, "failed": 0, "undone": 2}
    assert receipt.read_text() == "as it was"


async def test_a_receipt_names_what_is_there(mirror):
    image = mirror.seed.image(sizes=(100, 200))
    bill = mirror.seed.artifact(image, SBOM)
    mirror.load(image, "v1", artifacts=(bill,))
    lost, wrong, *_ = image.blobs
    lose_blob(mirror.target.app, lost)
    mirror.target.app.faults.on("GET", "blob", reference=wrong).corrupt()
    receipt = mirror.directory / "there.txt"
    ran = await mirror.audit("--read", "--receipt", str(receipt))
    assert found(ran) == sorted([("incomplete", lost), ("corrupt", wrong)])
    there = {*image.contents(), *bill.contents()} - {lost, wrong}
    lines = receipt.read_text().splitlines()
    assert lines == sorted(f"{digest} target.test/app" for digest in there)
    # Nobody needs to read these two bytes to know them.
    assert digest_of(b"{}") in there
    mirror.target.journal.matching("GET", "blob", reference=digest_of(b"{}")).none()


@pytest.mark.parametrize("trouble", ["no directory", "full disk"])
async def test_a_receipt_that_cannot_be_written_is_an_error_that_names_it(
    mirror, monkeypatch, trouble
):
    mirror.load(mirror.seed.image(), "v1")
    places = mirror.directory / "receipts"
    if trouble == "full disk":
        places.mkdir()
    receipt = places / "there.txt"

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    mirror.write(mirror.mapping)
    words = ("--json", "-c", str(mirror.file), "--receipt", str(receipt))
    ran = await mirror.world.run("audit", *words)
    assert str(receipt) in ran.err
    if trouble == "no directory":
        assert ran.status == 3
        assert not mirror.target.journal.entries
    else:
        assert (ran.status, os.listdir(places)) == (2, [])
        assert ran.totals["images"]["whole"] == 1, "what was found out is told"


@pytest.mark.skipif(os.name != "posix", reason="a pipe with a name is POSIX's")
async def test_a_receipt_goes_into_a_pipe_and_does_not_take_its_place(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    pipe = mirror.directory / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert (await mirror.run("audit", "--receipt", str(pipe))).status == 0
    assert image.top.encode() in os.read(reading, 65536)
    os.close(reading)
    assert pipe.is_fifo()


async def test_mappings_are_shared_among_shards(mirror):
    for name in ("app", "two"):
        mirror.seed.image().load_into(mirror.source.app, name, tag="v1")
    mirror.others = [{"from": "two", "tags": tags("v1")}]
    told = []
    for shard in ("0/2", "1/2"):
        findings = (await mirror.audit("--shard", shard)).report["findings"]
        told += [each["target"].rpartition("/")[2] for each in findings]
    assert sorted(told) == ["app:v1", "two:v1"]


async def test_what_was_left_out_of_a_layout_is_not_missed(mirror):
    """The receipt of one audit thins a layout; another audit finds that layout whole."""
    mirror.load(mirror.seed.image(sizes=(400, 500)), "v1")
    assert whole(await mirror.audit("--receipt", str(mirror.directory / "far.txt"))) == 1
    mirror.registries["target"] = {"url": "oci-layout:disk", "assume": "far.txt"}
    assert (await mirror.run("sync")).status == 0
    ran = await mirror.audit("--read")
    assert whole(ran) == 1
    assert ran.totals["blobs"] == 1, "the config alone is there"
