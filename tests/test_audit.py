"""`regsync audit`: what is asked, request by request, and what the answers show to be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from jsonschema import Draft202012Validator

from _regsync.sync.report import schema
from conformance.client.attachments import family, referrers_tag
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from tests.ends import Ran, Virtual, document, only, tags

SBOM = "application/spdx+json"
SIGNED = "application/vnd.cncf.notary.signature"
WRITES = "POST PUT PATCH DELETE"


class Stage:
    """A source, targets that hold what it holds, and audits of one mapping."""

    def __init__(
        self, world: Virtual, directory: Path, *names: str, **options: Mapping[str, Any]
    ) -> None:
        self.world = world
        self.directory = directory
        self.seed = Seed(31)
        self.source = world.registry("source.test", **options.get("source", {}))
        self.targets = [
            world.registry(f"{name}.test", **options.get(name, {})) for name in names or ["target"]
        ]
        self.mapping: dict[str, Any] = {"from": "app", "tags": tags("v1")}
        self.others = list[dict[str, Any]]()
        self.registries: dict[str, Any] = {"source": {"url": self.source.url}}
        for place, name in zip(self.targets, names or ["target"], strict=True):
            self.registries[name] = {"url": place.url}

    @property
    def target(self) -> App:
        return self.targets[0].app

    def load(self, image: Image, *names: str, artifacts: tuple[Image, ...] = ()) -> Image:
        """Hold an image and its artifacts at the source and at all targets."""
        for place in (self.source, *self.targets):
            image.load_into(place.app, "app", *names)
            for artifact in artifacts:
                artifact.load_into(place.app, "app")
        return image

    async def run(self, *options: str, command: str = "audit", **top: Any) -> Ran:
        """Run a command in JSON; what was exchanged before is no longer in the journals."""
        for place in (self.source, *self.targets):
            place.journal.clear()
        file = self.directory / "mirror.yaml"
        top = {"defaults": {"artifacts": {}}, **top}
        file.write_text(document(self.registries, self.mapping, *self.others, **top))
        return await self.world.run(command, "-q", "--json", "-c", str(file), *options)

    async def audit(self, *options: str, **top: Any) -> Ran:
        """Run an audit, which writes nothing and whose document is as the schema says."""
        ran = await self.run(*options, **top)
        Draft202012Validator(schema()).validate(ran.report)
        for place in (self.source, *self.targets):
            place.journal.matching(WRITES).none()
        counted = Counter(finding["finding"] for finding in ran.report["findings"])
        assert ran.status == (2 if ran.report["failures"] else min(1, len(counted)))
        return ran

    def asked_target(self) -> dict[str, int]:
        return self.targets[0].journal.summary()

    def asked_source(self) -> dict[str, int]:
        return self.source.journal.summary()


def found(ran: Ran) -> list[tuple[str, str | None]]:
    """Return the kinds of the findings, with the digests."""
    return sorted((each["finding"], each["digest"]) for each in ran.report["findings"])


def whole(ran: Ran) -> int:
    """Return how many images are whole, of an audit that has found nothing."""
    assert (ran.status, ran.report["findings"], ran.report["failures"]) == (0, [], [])
    return int(ran.totals["images"]["whole"])


def lose_manifest(registry: App, digest: str) -> None:
    """Forget a manifest, and the tags that name it."""
    held = registry.repositories["app"]
    del held.manifests[digest]
    for tag in [tag for tag, named in held.tags.items() if named == digest]:
        del held.tags[tag]


def lose_blob(registry: App, digest: str) -> None:
    del registry.repositories["app"].blobs[digest]


# What is asked.


async def test_an_image_costs_a_get_a_manifest_and_a_head_a_blob(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    ran = await stage.audit()
    assert whole(ran) == 1
    assert stage.asked_source() == {"HEAD manifest": 1, "GET referrers": 1}
    assert stage.asked_target() == {
        "GET manifest": 1,
        "HEAD blob": len(image.blobs),
        "GET referrers": 1,
    }


async def test_an_index_is_read_once_and_shared_blobs_are_asked_for_once(world, tmp_path):
    """Attestations have no artifacts: of an index with two platforms three digests are asked about."""
    stage = Stage(world, tmp_path)
    shared = stage.seed.layer(500)
    children = [
        stage.seed.image(layers=[shared, stage.seed.layer(100)], architecture=architecture)
        for architecture in ("amd64", "arm64")
    ]
    top = stage.load(stage.seed.index(children, attestations=True), "v1")
    ran = await stage.audit()
    assert whole(ran) == 1
    assert stage.asked_source() == {"HEAD manifest": 1, "GET referrers": 3}
    assert stage.asked_target() == {
        "GET manifest": len(top.manifests),
        "HEAD blob": len(top.blobs),
        "GET referrers": 3,
    }
    assert ran.totals["manifests"] == len(top.manifests)
    assert ran.totals["blobs"] == len(top.blobs)


async def test_other_tags_of_an_image_cost_a_head_at_each_end(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1", "v2", "latest")
    stage.mapping["tags"] = tags("v1", "v2", "latest")
    assert whole(await stage.audit()) == 3
    assert stage.asked_source() == {"HEAD manifest": 3, "GET referrers": 1}
    assert stage.asked_target() == {
        "GET manifest": 1,
        "HEAD manifest": 2,
        "HEAD blob": len(image.blobs),
        "GET referrers": 1,
    }


async def test_artifacts_are_read_and_asked_about_once_at_each_end(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.seed.image()
    bill = stage.seed.artifact(image, SBOM)
    signature = stage.seed.artifact(bill, SIGNED)
    stage.load(image, "v1", artifacts=(bill, signature))
    ran = await stage.audit()
    assert whole(ran) == 1
    assert ran.totals["artifacts"] == 2
    assert stage.asked_source() == {"HEAD manifest": 1, "GET referrers": 3}
    blobs = {*image.blobs, *bill.blobs, *signature.blobs}
    assert stage.asked_target() == {"GET manifest": 3, "HEAD blob": len(blobs), "GET referrers": 3}


async def test_without_artifacts_nothing_is_asked_about_them(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.load(stage.seed.image(), "v1")
    stage.mapping["artifacts"] = {"enabled": False}
    assert whole(await stage.audit()) == 1
    assert stage.asked_source() == {"HEAD manifest": 1}
    stage.targets[0].journal.matching("GET", "referrers").none()


async def test_the_source_is_asked_once_for_all_targets(world, tmp_path):
    stage = Stage(world, tmp_path, "one", "two", "three")
    image = stage.load(stage.seed.image(), "v1")
    assert whole(await stage.audit()) == 3
    assert stage.asked_source() == {"HEAD manifest": 1, "GET referrers": 1}
    for place in stage.targets:
        assert place.journal.summary() == {
            "GET manifest": 1,
            "HEAD blob": len(image.blobs),
            "GET referrers": 1,
        }


async def test_foreign_layers_are_not_asked_for(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(foreign=("https://example.com/layer",)), "v1")
    assert image.absent
    assert whole(await stage.audit()) == 1
    stage.targets[0].journal.matching("HEAD", "blob").exactly(len(image.blobs))


# What is expected.


async def test_a_trimmed_index_that_a_run_has_put_costs_no_manifest_of_the_source(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.seed.index().load_into(stage.source.app, "app", "v1")
    stage.mapping["platforms"] = ["linux/amd64"]
    assert (await stage.run(command="sync")).statuses() == ["synced"]
    assert whole(await stage.audit()) == 1
    stage.source.journal.matching("GET", "manifest").none()
    # The trimmed index is unknown to the source: only what is below it is asked about.
    stage.source.journal.matching("GET", "referrers").exactly(1)


async def test_a_trimmed_index_is_made_again_where_no_state_tells_it(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.seed.index().load_into(stage.source.app, "app", "v1", "v2")
    stage.mapping |= {"platforms": ["linux/amd64"], "tags": tags("v1", "v2")}
    assert (await stage.run(command="sync")).statuses() == ["synced"] * 2
    (tmp_path / ".regsync" / "state.db").unlink()
    assert whole(await stage.audit()) == 2
    stage.source.journal.matching("GET", "manifest").exactly(1)


async def test_what_the_state_knows_of_an_index_that_was_replaced_is_not_expected(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.seed.index().load_into(stage.source.app, "app", "v1")
    stage.mapping["platforms"] = ["linux/amd64"]
    await stage.run(command="sync")
    held = only(list((await stage.run(command="sync")).images))["digest"]
    stage.seed.index().load_into(stage.source.app, "app", "v1")
    assert found(await stage.audit()) == [("differs", held)]


async def test_another_filter_than_that_of_the_run_differs(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.load(stage.seed.index(platforms=("linux/amd64", "linux/arm64")), "v1")
    stage.mapping["platforms"] = ["linux/amd64"]
    finding = only((await stage.audit()).report["findings"])
    assert finding["finding"] == "differs"


async def test_nothing_is_kept_and_a_state_is_not_believed(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.seed.image().load_into(stage.source.app, "app", "v1")
    await stage.run(command="sync")
    state = (tmp_path / ".regsync" / "state.db").read_bytes()
    lost = next(iter(image.blobs))
    lose_blob(stage.target, lost)
    assert found(await stage.audit()) == [("incomplete", lost)]
    assert (tmp_path / ".regsync" / "state.db").read_bytes() == state


async def test_only_the_right_to_pull_is_asked_for(world, tmp_path):
    service = TokenService(now=anyio.current_time)
    world.listen(service, "token.test")
    service.realm = "http://token.test/token"
    stage = Stage(world, tmp_path, target={"auth": service})
    stage.load(stage.seed.image(), "v1")
    assert whole(await stage.audit()) == 1
    asked = service.journal.matching("GET", "token").exactly(1)
    assert asked[0].query["scope"] == "repository:app:pull"


# What is wrong.


async def test_a_tag_that_is_not_there(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.seed.image().load_into(stage.source.app, "app", "v1")
    finding = only((await stage.audit()).report["findings"])
    assert finding == {
        "finding": "missing",
        "source": "source.test/app:v1",
        "target": "target.test/app:v1",
        "digest": None,
        "expected": image.top,
        "size": None,
        "message": f"expected {image.top}",
    }
    assert stage.asked_target() == {"GET manifest": 1}


async def test_what_differs_is_looked_at_whole(world, tmp_path):
    """And the source, which may not know it any more, is not asked about it."""
    stage = Stage(world, tmp_path)
    new = stage.seed.image().load_into(stage.source.app, "app", "v1")
    old = stage.seed.image().load_into(stage.target, "app", "v1")
    bill = stage.seed.artifact(old, SBOM).load_into(stage.target, "app")
    lost = [next(iter(old.blobs)), next(iter(bill.blobs))]
    for digest in lost:
        lose_blob(stage.target, digest)
    ran = await stage.audit()
    assert found(ran) == sorted([("differs", old.top), *(("incomplete", each) for each in lost)])
    [differs] = [each for each in ran.report["findings"] if each["finding"] == "differs"]
    assert differs["expected"] == new.top
    assert stage.asked_source() == {"HEAD manifest": 1}


@pytest.mark.parametrize("part", ["blob", "manifest"])
async def test_a_part_that_is_lost_is_named_with_its_size(world, part, tmp_path):
    stage = Stage(world, tmp_path)
    child = stage.seed.image()
    stage.load(stage.seed.index([child, stage.seed.image(architecture="arm64")]), "v1", "v2")
    stage.mapping["tags"] = tags("v1", "v2")
    if part == "blob":
        digest, data = next(iter(child.blobs.items()))
        lose_blob(stage.target, digest)
    else:
        digest, data = child.top, child.body
        lose_manifest(stage.target, digest)
    ran = await stage.audit()
    assert found(ran) == [("incomplete", digest)] * 2, "each tag that leads to it is told"
    for finding in ran.report["findings"]:
        assert finding["size"] == len(data)
        assert finding["message"].startswith(f"{part} {digest} (")
    assert ran.totals["images"] == {"whole": 0, "flawed": 2, "failed": 0}


async def test_an_artifact_that_is_lost(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.seed.image()
    bill = stage.seed.artifact(image, SBOM)
    signature = stage.seed.artifact(bill, SIGNED)
    stage.load(image, "v1", artifacts=(bill, signature))
    lose_manifest(stage.target, signature.top)
    ran = await stage.audit()
    assert found(ran) == [("artifact_missing", signature.top)]
    message = only(ran.report["findings"])["message"]
    assert message == f"{signature.top} ({SIGNED}) of {bill.top} is missing"
    # The source is asked whether it holds what it lists: a run cannot bring what it has lost.
    assert stage.source.journal.matching("HEAD", "manifest").exactly(2)
    lose_manifest(stage.source.app, signature.top)
    stage.source.app.intercept = lists_anyway(bill, signature)
    assert whole(await stage.audit()) == 1


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


async def test_a_blob_that_an_image_and_its_artifact_lack_is_told_once(world, tmp_path):
    stage = Stage(world, tmp_path)
    made = family("shared")
    stage.load(made.image, "v1", artifacts=made.sample.attached)
    [shared, *_] = {*made.image.blobs} & {*made.sample.attached[0].blobs}
    lose_blob(stage.target, shared)
    assert found(await stage.audit()) == [("incomplete", shared)]


async def test_an_artifact_that_is_an_index_is_asked_about_with_its_children(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.seed.image()
    child = stage.seed.artifact()
    index = stage.seed.index([child], subject=image, artifact_type=SBOM)
    signature = stage.seed.artifact(child, SIGNED)
    stage.load(image, "v1", artifacts=(index, signature))
    ran = await stage.audit()
    assert (whole(ran), ran.totals["artifacts"]) == (1, 2)
    lose_manifest(stage.target, signature.top)
    assert found(await stage.audit()) == [("artifact_missing", signature.top)]


async def test_what_only_the_target_lists_has_to_be_there_too(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    bill = stage.seed.artifact(image, SBOM)
    stage.target.intercept = lists_anyway(image, bill)
    ran = await stage.audit()
    assert found(ran) == [("artifact_missing", bill.top)]
    assert only(ran.report["findings"])["message"].endswith("is listed, but missing")
    stage.target.intercept = None
    bill.load_into(stage.target, "app")
    lost = next(iter(bill.blobs))
    lose_blob(stage.target, lost)
    assert found(await stage.audit()) == [("incomplete", lost)]


async def test_an_artifact_that_the_filters_refuse_is_not_missed(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    stage.seed.artifact(image, SBOM).load_into(stage.source.app, "app")
    stage.mapping["artifacts"] = {"exclude": [SBOM]}
    assert whole(await stage.audit()) == 1
    stage.mapping["artifacts"] = {}
    assert len(found(await stage.audit())) == 1


async def test_a_signature_of_cosign_that_was_made_again_differs(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    stage.mapping["tags"] = tags("v*")
    signature = referrers_tag(image.top) + ".sig"
    new = stage.seed.image().load_into(stage.source.app, "app", signature)
    assert found(await stage.audit()) == [("artifact_missing", new.top)]
    old = stage.seed.image().load_into(stage.target, "app", signature)
    ran = await stage.audit()
    assert found(ran) == [("differs", old.top)]
    assert only(ran.report["findings"])["expected"] == new.top
    new.load_into(stage.target, "app", signature)
    assert whole(await stage.audit()) == 1
    # What hangs on the signature is asked for where a listing shows some of it.
    stage.source.journal.matching("GET", "referrers").exactly(1)
    stage.targets[0].journal.matching("GET", "referrers").exactly(1)


# Wrong bytes, and answers that say too little.


async def test_a_manifest_with_wrong_bytes_is_corrupt(world, tmp_path):
    stage = Stage(world, tmp_path)
    child = stage.seed.image()
    stage.load(stage.seed.index([child]), "v1")
    stage.targets[0].app.faults.on("GET", "manifest", reference=child.top).corrupt()
    ran = await stage.audit()
    assert found(ran) == [("corrupt", child.top)]
    stage.targets[0].journal.matching("GET", "manifest", reference=child.top).exactly(2)


async def test_bytes_that_were_wrong_once_are_no_finding(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.load(stage.seed.image(), "v1")
    stage.targets[0].app.faults.on("GET", "manifest").nth(1).corrupt()
    assert whole(await stage.audit()) == 1


async def test_blobs_are_read_back_and_hashed(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    ran = await stage.audit("--read", "99")
    assert whole(ran) == 1
    assert ran.totals["read"] == {"blobs": len(image.blobs), "bytes": image.size}
    stage.targets[0].journal.matching("GET", "blob").exactly(len(image.blobs))

    wrong = next(iter(image.blobs))
    stage.targets[0].app.faults.on("GET", "blob", reference=wrong).corrupt()
    assert found(await stage.audit()) == []
    stage.targets[0].journal.matching("GET", "blob").none()
    ran = await stage.audit("--read", "99")
    assert found(ran) == [("corrupt", wrong)]
    assert ran.totals["read"]["blobs"] == len(image.blobs) - 1
    stage.targets[0].journal.matching("GET", "blob", reference=wrong).exactly(2)


async def test_a_blob_that_breaks_is_read_to_its_end(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(sizes=(300_000,)), "v1")
    large = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
    faults = stage.targets[0].app.faults
    faults.on("GET", "blob", reference=large).nth(1).drop(after=100_000)
    faults.on("GET", "blob", reference=large).nth(1).status(503)
    ran = await stage.audit("--read", "99")
    assert whole(ran) == 1
    assert ran.totals["read"]["bytes"] == image.size


async def test_a_blob_that_can_only_be_asked_for_is_incomplete(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    lost = next(iter(image.blobs))
    stage.targets[0].app.faults.on("GET", "blob", reference=lost).status(404)
    assert found(await stage.audit("--read", "99")) == [("incomplete", lost)]


async def test_of_each_target_so_many_blobs_are_read_as_are_asked_for(world, tmp_path):
    stage = Stage(world, tmp_path, "one", "two")
    for number in range(10):
        stage.load(stage.seed.image(), f"v{number}")
    stage.mapping["tags"] = tags("v*")
    ran = await stage.audit("--read", "3")
    assert whole(ran) == 20
    assert ran.totals["read"]["blobs"] == 6
    for place in stage.targets:
        place.journal.matching("GET", "blob").exactly(3)


@pytest.mark.parametrize(("chance", "read"), [(0.999, "first"), (0.0, "last")])
async def test_chance_says_which_blobs_are_read(world, read, tmp_path):
    """Whatever it says, the first ones stay or make way for later ones."""
    stage = Stage(world, tmp_path)
    for number in range(10):
        stage.load(stage.seed.image(), f"v{number}")
    stage.mapping["tags"] = tags("v*")
    assert whole(await stage.audit("--read", "1")) == 10
    journal = stage.targets[0].journal
    answered = [entry.reference for entry in journal.matching("HEAD", "blob")]
    [entry] = journal.matching("GET", "blob")
    place = answered.index(entry.reference)
    assert place < 10 if read == "first" else place >= len(answered) - 10


async def test_a_head_may_leave_out_digest_and_length(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.load(stage.seed.image(), "v1", "v2")
    stage.mapping["tags"] = tags("v1", "v2")
    for place in (stage.source, stage.targets[0]):
        unsaid = {"Docker-Content-Digest": None, "Content-Length": None}
        place.app.faults.on("HEAD", "manifest blob").lie(headers=unsaid)
    assert whole(await stage.audit()) == 2


async def test_a_blob_of_another_length_is_corrupt(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    cut = next(iter(image.blobs))
    faults = stage.targets[0].app.faults
    faults.on("HEAD", "blob", reference=cut).lie(headers={"Content-Length": "7"})
    finding = only((await stage.audit()).report["findings"])
    assert (finding["finding"], finding["digest"]) == ("corrupt", cut)
    size = len(image.blobs[cut])
    assert finding["message"] == f"blob {cut}: it has 7 bytes, its descriptor says {size}"
