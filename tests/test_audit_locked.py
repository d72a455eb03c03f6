"""`regsync audit` from a lock, of which no source is asked, and with digests that `min_age` holds back."""

from __future__ import annotations

import anyio
import pytest

from conformance.client.attachments import referrers_tag
from conformance.content.images import Image
from conformance.registry.tokens import TokenService
from tests.ends import Ran, document, only, tags
from tests.test_audit import SBOM, SIGNED, Stage, found, lose_manifest, whole

DAY = 86_400


class LockedStage(Stage):
    """A stage whose source was locked, and is asked no more."""

    async def lock(self, **top: object) -> None:
        assert (await self.run(command="lock", **top)).status == 0

    async def audit(self, *options: str, **top: object) -> Ran:
        ran = await super().audit("--locked", *options, **top)
        self.source.journal.matching().none()
        return ran


async def test_a_lock_says_what_is_expected_and_no_source_is_asked(world, tmp_path):
    stage = LockedStage(world, tmp_path)
    image = stage.seed.image()
    bill = stage.seed.artifact(image, SBOM)
    signature = stage.seed.artifact(bill, SIGNED)
    stage.load(image, "v1", artifacts=(bill, signature))
    stage.mapping["tags"] = tags("v*")
    await stage.lock()
    # What happens at the source afterwards changes nothing.
    stage.seed.image().load_into(stage.source.app, "app", "v1", "v2")

    ran = await stage.audit()
    assert whole(ran) == 1
    blobs = {*image.blobs, *bill.blobs, *signature.blobs}
    assert stage.asked_target() == {"GET manifest": 3, "HEAD blob": len(blobs), "GET referrers": 3}
    assert list(ran.totals["requests"]) == ["target.test"]


async def test_no_token_of_the_source_is_asked_for(world, tmp_path):
    service = TokenService(now=anyio.current_time)
    world.listen(service, "token.test")
    service.realm = "http://token.test/token"
    stage = LockedStage(world, tmp_path, source={"auth": service})
    stage.load(stage.seed.image(), "v1")
    await stage.lock()
    service.journal.clear()
    assert whole(await stage.audit()) == 1
    service.journal.matching().none()


async def test_what_is_not_as_in_the_lock_is_found(world, tmp_path):
    stage = LockedStage(world, tmp_path)
    image = stage.seed.image()
    bill = stage.seed.artifact(image, SBOM)
    signature = stage.seed.artifact(bill, SIGNED)
    stage.load(image, "v1", "v2", artifacts=(bill, signature))
    stage.mapping["tags"] = tags("v1", "v2")
    await stage.lock()

    moved = stage.seed.image().load_into(stage.target, "app", "v2")
    assert found(await stage.audit()) == [("differs", moved.top)]
    del stage.target.repositories["app"].tags["v2"]
    assert found(await stage.audit()) == [("missing", None)]
    image.load_into(stage.target, "app", "v2")
    lose_manifest(stage.target, signature.top)
    assert found(await stage.audit()) == [("artifact_missing", signature.top)] * 2
    lose_manifest(stage.target, bill.top)
    assert {digest for _, digest in found(await stage.audit())} == {bill.top, signature.top}


async def test_a_trimmed_index_is_known_from_the_lock(world, tmp_path):
    stage = LockedStage(world, tmp_path)
    stage.seed.index(platforms=("linux/amd64", "linux/arm64")).load_into(
        stage.source.app, "app", "v1"
    )
    stage.mapping["platforms"] = ["linux/amd64"]
    await stage.lock()
    assert (await stage.run("--locked", command="sync")).statuses() == ["synced"]
    (tmp_path / ".regsync" / "state.db").unlink()
    assert whole(await stage.audit()) == 1


async def test_signatures_of_cosign_are_those_of_the_lock(world, tmp_path):
    stage = LockedStage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    stage.mapping["tags"] = tags("v*")
    tag = referrers_tag(image.top) + ".sig"
    signature = stage.load(stage.seed.image(), tag)
    above = stage.load(stage.seed.image(), referrers_tag(signature.top) + ".att")
    await stage.lock()
    ran = await stage.audit()
    assert (whole(ran), ran.totals["artifacts"]) == (1, 2)

    lose_manifest(stage.target, above.top)
    assert found(await stage.audit()) == [("artifact_missing", above.top)]
    above.load_into(stage.target, "app", referrers_tag(signature.top) + ".att")
    other: Image = stage.seed.image().load_into(stage.target, "app", tag)
    assert ("differs", other.top) in found(await stage.audit())


async def test_artifacts_that_a_mapping_refuses_are_not_missed(world, tmp_path):
    """The lock has them, because another mapping takes them."""
    stage = LockedStage(world, tmp_path)
    image = stage.load(stage.seed.image(), "v1")
    bill = stage.seed.artifact(image, SBOM).load_into(stage.source.app, "app")
    signature = stage.load(stage.seed.artifact(image, SIGNED))
    for loaded in (image, bill, signature):
        loaded.load_into(stage.target, "other", *(["v1"] if loaded is image else []))
    stage.mapping["artifacts"] = {"exclude": [SBOM]}
    stage.others = [{"from": "app", "to": "other", "tags": tags("v1")}]
    await stage.lock()
    assert whole(await stage.audit()) == 2
    lose_manifest(stage.target, signature.top)
    assert found(await stage.audit()) == [("artifact_missing", signature.top)]


async def test_another_lock_can_be_named_and_without_one_nothing_is_asked(world, tmp_path):
    stage = LockedStage(world, tmp_path)
    stage.load(stage.seed.image(), "v1")
    await stage.lock()
    elsewhere = tmp_path / "reviewed.lock"
    (tmp_path / "mirror.lock").rename(elsewhere)
    assert whole(await stage.audit("--lock", str(elsewhere))) == 1


# What is held back.


async def test_what_is_held_back_is_neither_missing_nor_different(world, tmp_path):
    """What the target holds meanwhile is looked at whole all the same."""
    stage = Stage(world, tmp_path)
    stage.mapping |= {"min_age": "3d", "tags": tags("v1", "v2")}
    old = stage.seed.image()
    stage.load(old, "v1")
    new = stage.seed.image().load_into(stage.source.app, "app", "v1", "v2")
    await stage.run(command="sync")
    assert stage.target.repositories["app"].tags == {"v1": old.top}
    assert whole(await stage.audit()) == 2
    assert stage.asked_source() == {"HEAD manifest": 2}
    stage.targets[0].journal.matching("HEAD", "blob").exactly(len(old.blobs))

    lost = next(iter(old.blobs))
    del stage.target.repositories["app"].blobs[lost]
    assert found(await stage.audit()) == [("incomplete", lost)]

    await anyio.sleep(3 * DAY)
    kinds = {finding["finding"] for finding in (await stage.audit()).report["findings"]}
    assert kinds == {"differs", "missing", "incomplete"}
    await stage.run(command="sync")
    assert stage.target.repositories["app"].tags == {"v1": new.top, "v2": new.top}
    assert whole(await stage.audit()) == 2


async def test_an_index_that_is_held_back_is_not_trimmed(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.mapping |= {"min_age": "3d", "platforms": ["linux/amd64"]}
    stage.seed.index().load_into(stage.source.app, "app", "v1")
    assert whole(await stage.audit()) == 1
    assert stage.asked_source() == {"HEAD manifest": 1}


async def test_an_audit_notes_no_time(world, tmp_path):
    stage = Stage(world, tmp_path)
    stage.mapping["min_age"] = "3d"
    stage.seed.image().load_into(stage.source.app, "app", "v1")
    assert whole(await stage.audit()) == 1
    assert not (tmp_path / ".regsync").exists()


async def test_a_time_in_the_lock_counts(world, tmp_path):
    stage = LockedStage(world, tmp_path)
    stage.mapping["min_age"] = "3d"
    stage.seed.image().load_into(stage.source.app, "app", "v1")
    await stage.lock()
    assert whole(await stage.audit()) == 1
    await anyio.sleep(3 * DAY)
    assert only(found(await stage.audit())) == ("missing", None)


async def test_without_a_place_for_the_times_nothing_is_attempted(world, tmp_path):
    stage = Stage(world, tmp_path)
    config = document(stage.registries, {"from": "app", "tags": tags("v1"), "min_age": "3d"})
    with pytest.raises(Exception, match="min_age"):
        await world.run("audit", "-c", "-", stdin=config)
    stage.targets[0].journal.matching().none()
