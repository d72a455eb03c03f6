"""`regsync audit`: what is asked, request by request, and what the answers show to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from conformance.client.attachments import family, referrers_tag
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response
from conformance.registry.tokens import TokenService
from tests.ends import Virtual, only, tags
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


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> AuditedMirror:
    return AuditedMirror(world, tmp_path)


# What is asked.


async def test_an_image_costs_a_get_a_manifest_and_a_head_a_blob(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    ran = await mirror.audit()
    assert whole(ran) == 1
    assert asked(mirror.source) == {"HEAD manifest": 1, "GET referrers": 1}
    assert asked(mirror.target) == {
        "GET manifest": 1,
        "HEAD blob": len(image.blobs),
        "GET referrers": 1,
    }


async def test_an_index_is_read_once_and_shared_blobs_are_asked_for_once(mirror):
    """Attestations have no artifacts: of an index with two platforms three digests are asked about."""
    shared = mirror.seed.layer(500)
    children = [
        mirror.seed.image(layers=[shared, mirror.seed.layer(100)], architecture=architecture)
        for architecture in ("amd64", "arm64")
    ]
    top = mirror.load(mirror.seed.index(children, attestations=True), "v1")
    ran = await mirror.audit()
    assert whole(ran) == 1
    assert asked(mirror.source) == {"HEAD manifest": 1, "GET referrers": 3}
    assert asked(mirror.target) == {
        "GET manifest": len(top.manifests),
        "HEAD blob": len(top.blobs),
        "GET referrers": 3,
    }
    assert ran.totals["manifests"] == len(top.manifests)
    assert ran.totals["blobs"] == len(top.blobs)


async def test_other_tags_of_an_image_cost_a_head_at_each_end(mirror):
    image = mirror.load(mirror.seed.image(), "v1", "v2", "latest")
    mirror.mapping["tags"] = tags("v1", "v2", "latest")
    assert whole(await mirror.audit()) == 3
    assert asked(mirror.source) == {"HEAD manifest": 3, "GET referrers": 1}
    assert asked(mirror.target) == {
        "GET manifest": 1,
        "HEAD manifest": 2,
        "HEAD blob": len(image.blobs),
        "GET referrers": 1,
    }


async def test_artifacts_are_read_and_asked_about_once_at_each_end(mirror):
    image = mirror.seed.image()
    bill = mirror.seed.artifact(image, SBOM)
    signature = mirror.seed.artifact(bill, SIGNATURE)
    mirror.load(image, "v1", artifacts=(bill, signature))
    ran = await mirror.audit()
    assert whole(ran) == 1
    assert ran.totals["artifacts"] == 2
    assert asked(mirror.source) == {"HEAD manifest": 1, "GET referrers": 3}
    blobs = {*image.blobs, *bill.blobs, *signature.blobs}
    assert asked(mirror.target) == {"GET manifest": 3, "HEAD blob": len(blobs), "GET referrers": 3}


async def test_without_artifacts_nothing_is_asked_about_them(mirror):
    mirror.load(mirror.seed.image(), "v1")
    mirror.mapping["artifacts"] = {"enabled": False}
    assert whole(await mirror.audit()) == 1
    assert asked(mirror.source) == {"HEAD manifest": 1}
    mirror.target.journal.matching("GET", "referrers").none()


async def test_the_source_is_asked_once_for_all_targets(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path, "one", "two", "three")
    image = mirror.load(mirror.seed.image(), "v1")
    assert whole(await mirror.audit()) == 3
    assert asked(mirror.source) == {"HEAD manifest": 1, "GET referrers": 1}
    for place in mirror.targets.values():
        assert place.journal.summary() == {
            "GET manifest": 1,
            "HEAD blob": len(image.blobs),
            "GET referrers": 1,
        }


async def test_foreign_layers_are_not_asked_for(mirror):
    image = mirror.load(mirror.seed.image(foreign=("https://example.com/layer",)), "v1")
    assert image.absent
    assert whole(await mirror.audit()) == 1
    mirror.target.journal.matching("HEAD", "blob").exactly(len(image.blobs))


# What is expected.


async def test_a_trimmed_index_that_a_run_has_put_costs_no_manifest_of_the_source(mirror):
    mirror.seed.index().load_into(mirror.source.app, "app", "v1")
    mirror.mapping["platforms"] = ["linux/amd64"]
    assert (await mirror.run("sync")).statuses() == ["synced"]
    assert whole(await mirror.audit()) == 1
    mirror.source.journal.matching("GET", "manifest").none()
    # The trimmed index is unknown to the source: only what is below it is asked about.
    mirror.source.journal.matching("GET", "referrers").exactly(1)


async def test_a_trimmed_index_is_made_again_where_no_state_tells_it(mirror, tmp_path):
    mirror.seed.index().load_into(mirror.source.app, "app", "v1", "v2")
    mirror.mapping |= {"platforms": ["linux/amd64"], "tags": tags("v1", "v2")}
    assert (await mirror.run("sync")).statuses() == ["synced"] * 2
    (tmp_path / ".regsync" / "state.db").unlink()
    assert whole(await mirror.audit()) == 2
    mirror.source.journal.matching("GET", "manifest").exactly(1)


async def test_what_the_state_knows_of_an_index_that_was_replaced_is_not_expected(mirror):
    mirror.seed.index().load_into(mirror.source.app, "app", "v1")
    mirror.mapping["platforms"] = ["linux/amd64"]
    await mirror.run("sync")
    held = only(list((await mirror.run("sync")).images))["digest"]
    mirror.seed.index().load_into(mirror.source.app, "app", "v1")
    assert found(await mirror.audit()) == [("differs", held)]


async def test_another_filter_than_that_of_the_run_differs(mirror):
    mirror.load(mirror.seed.index(platforms=("linux/amd64", "linux/arm64")), "v1")
    mirror.mapping["platforms"] = ["linux/amd64"]
    finding = only((await mirror.audit()).report["findings"])
    assert finding["finding"] == "differs"


async def test_nothing_is_kept_and_a_state_is_not_believed(mirror, tmp_path):
    image = mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    await mirror.run("sync")
    state = (tmp_path / ".regsync" / "state.db").read_bytes()
    lost = next(iter(image.blobs))
    lose_blob(mirror.target.app, lost)
    assert found(await mirror.audit()) == [("incomplete", lost)]
    assert (tmp_path / ".regsync" / "state.db").read_bytes() == state


async def test_only_the_right_to_pull_is_asked_for(world, tmp_path):
    service = TokenService(now=anyio.current_time)
    world.listen(service, "token.test")
    service.realm = "http://token.test/token"
    mirror = AuditedMirror(world, tmp_path, of={"target": {"auth": service}})
    mirror.load(mirror.seed.image(), "v1")
    assert whole(await mirror.audit()) == 1
    asked = service.journal.matching("GET", "token").exactly(1)
    assert asked[0].query["scope"] == "repository:app:pull"


# What is wrong.


async def test_a_tag_that_is_not_there(mirror):
    image = mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    finding = only((await mirror.audit()).report["findings"])
    assert finding == {
        "finding": "missing",
        "source": "source.test/app:v1",
        "target": "target.test/app:v1",
        "digest": None,
        "expected": image.top,
        "size": None,
        "message": f"expected {image.top}",
    }
    assert asked(mirror.target) == {"GET manifest": 1}


async def test_what_differs_is_looked_at_whole(mirror):
    """And the source, which may not know it any more, is not asked about it."""
    new = mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    old = mirror.seed.image().load_into(mirror.target.app, "app", "v1")
    bill = mirror.seed.artifact(old, SBOM).load_into(mirror.target.app, "app")
    lost = [next(iter(old.blobs)), next(iter(bill.blobs))]
    for digest in lost:
        lose_blob(mirror.target.app, digest)
    ran = await mirror.audit()
    assert found(ran) == sorted([("differs", old.top), *(("incomplete", each) for each in lost)])
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


async def test_an_artifact_that_is_lost(mirror):
    image = mirror.seed.image()
    bill = mirror.seed.artifact(image, SBOM)
    signature = mirror.seed.artifact(bill, SIGNATURE)
    mirror.load(image, "v1", artifacts=(bill, signature))
    lose_manifest(mirror.target.app, signature.top)
    ran = await mirror.audit()
    assert found(ran) == [("artifact_missing", signature.top)]
    message = only(ran.report["findings"])["message"]
    assert message == f"{signature.top} ({SIGNATURE}) of {bill.top} is missing"
    # The source is asked whether it holds what it lists: a run cannot bring what it has lost.
    assert mirror.source.journal.matching("HEAD", "manifest").exactly(2)
    lose_manifest(mirror.source.app, signature.top)
    mirror.source.app.intercept = lists_anyway(bill, signature)
    assert whole(await mirror.audit()) == 1


def lists_anyway(subject: Image, artifact: Image) -> Callable[[Request], Answer | None]:
    """Have a registry list an artifact, whether or not it holds it."""
    entry = artifact.descriptor(artifactType=artifact.document["artifactType"])
    listed = Seed().fallback_index([artifact]).body
    assert entry["digest"].encode() in listed

    def intercept(request: Request) -> Answer | None:
        if request.kind == "referrers" and request.reference == subject.top:
            media_type = "application/vnd.oci.image.index.v1+json"
            return Response(200, [("Content-Type", media_type)], listed)
        return None

    return intercept


async def test_a_blob_that_an_image_and_its_artifact_lack_is_told_once(mirror):
    made = family("shared")
    mirror.load(made.image, "v1", artifacts=made.sample.attached)
    [shared, *_] = {*made.image.blobs} & {*made.sample.attached[0].blobs}
    lose_blob(mirror.target.app, shared)
    assert found(await mirror.audit()) == [("incomplete", shared)]


async def test_an_artifact_that_is_an_index_is_asked_about_with_its_children(mirror):
    image = mirror.seed.image()
    child = mirror.seed.artifact()
    index = mirror.seed.index([child], subject=image, artifact_type=SBOM)
    signature = mirror.seed.artifact(child, SIGNATURE)
    mirror.load(image, "v1", artifacts=(index, signature))
    ran = await mirror.audit()
    assert (whole(ran), ran.totals["artifacts"]) == (1, 2)
    lose_manifest(mirror.target.app, signature.top)
    assert found(await mirror.audit()) == [("artifact_missing", signature.top)]


async def test_what_only_the_target_lists_has_to_be_there_too(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    bill = mirror.seed.artifact(image, SBOM)
    mirror.target.app.intercept = lists_anyway(image, bill)
    ran = await mirror.audit()
    assert found(ran) == [("artifact_missing", bill.top)]
    assert only(ran.report["findings"])["message"].endswith("is listed, but missing")
    mirror.target.app.intercept = None
    bill.load_into(mirror.target.app, "app")
    lost = next(iter(bill.blobs))
    lose_blob(mirror.target.app, lost)
    assert found(await mirror.audit()) == [("incomplete", lost)]


async def test_an_artifact_that_the_filters_refuse_is_not_missed(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    mirror.seed.artifact(image, SBOM).load_into(mirror.source.app, "app")
    mirror.mapping["artifacts"] = {"exclude": [SBOM]}
    assert whole(await mirror.audit()) == 1
    mirror.mapping["artifacts"] = {}
    assert len(found(await mirror.audit())) == 1


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
    mirror.target.journal.matching("GET", "referrers").exactly(1)


# Wrong bytes, and answers that say too little.


async def test_a_manifest_with_wrong_bytes_is_corrupt(mirror):
    child = mirror.seed.image()
    mirror.load(mirror.seed.index([child]), "v1")
    mirror.target.app.faults.on("GET", "manifest", reference=child.top).corrupt()
    ran = await mirror.audit()
    assert found(ran) == [("corrupt", child.top)]
    mirror.target.journal.matching("GET", "manifest", reference=child.top).exactly(2)


async def test_bytes_that_were_wrong_once_are_no_finding(mirror):
    mirror.load(mirror.seed.image(), "v1")
    mirror.target.app.faults.on("GET", "manifest").nth(1).corrupt()
    assert whole(await mirror.audit()) == 1


async def test_blobs_are_read_back_and_hashed(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    ran = await mirror.audit("--read")
    assert whole(ran) == 1
    assert ran.totals["read"] == {"blobs": len(image.blobs), "bytes": image.size}
    mirror.target.journal.matching("GET", "blob").exactly(len(image.blobs))

    wrong = next(iter(image.blobs))
    mirror.target.app.faults.on("GET", "blob", reference=wrong).corrupt()
    assert found(await mirror.audit()) == []
    mirror.target.journal.matching("GET", "blob").none()
    ran = await mirror.audit("--read")
    assert found(ran) == [("corrupt", wrong)]
    assert ran.totals["read"]["blobs"] == len(image.blobs) - 1
    mirror.target.journal.matching("GET", "blob", reference=wrong).exactly(2)


async def test_a_blob_that_breaks_is_read_to_its_end(mirror):
    image = mirror.load(mirror.seed.image(sizes=(300_000,)), "v1")
    large = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
    faults = mirror.target.app.faults
    faults.on("GET", "blob", reference=large).nth(1).drop(after=100_000)
    faults.on("GET", "blob", reference=large).nth(1).status(503)
    ran = await mirror.audit("--read")
    assert whole(ran) == 1
    assert ran.totals["read"]["bytes"] == image.size


async def test_a_blob_that_can_only_be_asked_for_is_incomplete(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    lost = next(iter(image.blobs))
    mirror.target.app.faults.on("GET", "blob", reference=lost).status(404)
    assert found(await mirror.audit("--read")) == [("incomplete", lost)]


async def test_all_blobs_of_each_target_are_read_once(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path, "one", "two")
    images = [mirror.load(mirror.seed.image(), f"v{number}") for number in range(10)]
    mirror.mapping["tags"] = tags("v*")
    blobs = {digest for image in images for digest in image.blobs}
    ran = await mirror.audit("--read")
    assert whole(ran) == 20
    assert ran.totals["read"]["blobs"] == 2 * len(blobs)
    for place in mirror.targets.values():
        place.journal.matching("GET", "blob").exactly(len(blobs))


async def test_a_head_may_leave_out_digest_and_length(mirror):
    mirror.load(mirror.seed.image(), "v1", "v2")
    mirror.mapping["tags"] = tags("v1", "v2")
    for place in (mirror.source, mirror.target):
        unsaid = {"Docker-Content-Digest": None, "Content-Length": None}
        place.app.faults.on("HEAD", "manifest blob").lie(headers=unsaid)
    assert whole(await mirror.audit()) == 2


async def test_a_blob_of_another_length_is_corrupt(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    cut = next(iter(image.blobs))
    faults = mirror.target.app.faults
    faults.on("HEAD", "blob", reference=cut).lie(headers={"Content-Length": "7"})
    finding = only((await mirror.audit()).report["findings"])
    assert (finding["finding"], finding["digest"]) == ("corrupt", cut)
    size = len(image.blobs[cut])
    assert finding["message"] == f"blob {cut}: it has 7 bytes, its descriptor says {size}"
