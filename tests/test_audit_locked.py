"""`regsync audit` from a lock, of which no source is asked, and with digests that `min_age` holds back."""

from __future__ import annotations

import anyio

from conformance.client.attachments import referrers_tag
from conformance.content.images import Image
from conformance.registry.tokens import TokenService
from tests.ends import Ran, only, tags
from tests.mirrors import SBOM, SIGNATURE, AuditedMirror, asked, found, lose_manifest, whole

DAY = 86_400


class LockedAudit(AuditedMirror):
    """A mirror whose source was locked, and is asked no more."""

    async def make_lock(self, **top: object) -> None:
        assert (await self.run("lock", **top)).status == 0

    async def audit(self, *options: str, **top: object) -> Ran:
        ran = await super().audit("--locked", *options, **top)
        self.source.journal.matching().none()
        return ran


async def test_a_lock_says_what_is_expected_and_no_source_is_asked(world, tmp_path):
    mirror = LockedAudit(world, tmp_path)
    image = mirror.seed.image()
    bill = mirror.seed.artifact(image, SBOM)
    signature = mirror.seed.artifact(bill, SIGNATURE)
    mirror.load(image, "v1", artifacts=(bill, signature))
    mirror.mapping["tags"] = tags("v*")
    await mirror.make_lock()
    # What happens at the source afterwards changes nothing.
    mirror.seed.image().load_into(mirror.source.app, "app", "v1", "v2")

    ran = await mirror.audit()
    assert whole(ran) == 1
    blobs = {*image.blobs, *bill.blobs, *signature.blobs}
    assert asked(mirror.target) == {"GET manifest": 3, "HEAD blob": len(blobs), "GET referrers": 3}
    assert list(ran.totals["requests"]) == ["target.test"]


async def test_no_token_of_the_source_is_asked_for(world, tmp_path):
    service = TokenService(now=anyio.current_time)
    world.listen(service, "token.test")
    service.realm = "http://token.test/token"
    mirror = LockedAudit(world, tmp_path, of={"source": {"auth": service}})
    mirror.load(mirror.seed.image(), "v1")
    await mirror.make_lock()
    service.journal.clear()
    assert whole(await mirror.audit()) == 1
    service.journal.matching().none()


async def test_what_is_not_as_in_the_lock_is_found(world, tmp_path):
    mirror = LockedAudit(world, tmp_path)
    image = mirror.seed.image()
    bill = mirror.seed.artifact(image, SBOM)
    signature = mirror.seed.artifact(bill, SIGNATURE)
    mirror.load(image, "v1", "v2", artifacts=(bill, signature))
    mirror.mapping["tags"] = tags("v1", "v2")
    await mirror.make_lock()

    moved = mirror.seed.image().load_into(mirror.target.app, "app", "v2")
    assert found(await mirror.audit()) == [("differs", moved.top)]
    del mirror.target.app.repositories["app"].tags["v2"]
    assert found(await mirror.audit()) == [("missing", None)]
    image.load_into(mirror.target.app, "app", "v2")
    lose_manifest(mirror.target.app, signature.top)
    assert found(await mirror.audit()) == [("artifact_missing", signature.top)] * 2
    lose_manifest(mirror.target.app, bill.top)
    assert {digest for _, digest in found(await mirror.audit())} == {bill.top, signature.top}


async def test_a_trimmed_index_is_known_from_the_lock(world, tmp_path):
    mirror = LockedAudit(world, tmp_path)
    mirror.seed.index(platforms=("linux/amd64", "linux/arm64")).load_into(
        mirror.source.app, "app", "v1"
    )
    mirror.mapping["platforms"] = ["linux/amd64"]
    await mirror.make_lock()
    assert (await mirror.run("sync", "--locked")).statuses() == ["synced"]
    (tmp_path / ".regsync" / "state.db").unlink()
    assert whole(await mirror.audit()) == 1


async def test_signatures_of_cosign_are_those_of_the_lock(world, tmp_path):
    mirror = LockedAudit(world, tmp_path)
    image = mirror.load(mirror.seed.image(), "v1")
    mirror.mapping["tags"] = tags("v*")
    tag = referrers_tag(image.top) + ".sig"
    signature = mirror.load(mirror.seed.image(), tag)
    above = mirror.load(mirror.seed.image(), referrers_tag(signature.top) + ".att")
    await mirror.make_lock()
    ran = await mirror.audit()
    assert (whole(ran), ran.totals["artifacts"]) == (1, 2)

    lose_manifest(mirror.target.app, above.top)
    assert found(await mirror.audit()) == [("artifact_missing", above.top)]
    above.load_into(mirror.target.app, "app", referrers_tag(signature.top) + ".att")
    other: Image = mirror.seed.image().load_into(mirror.target.app, "app", tag)
    assert ("differs", other.top) in found(await mirror.audit())


async def test_artifacts_that_a_mapping_refuses_are_not_missed(world, tmp_path):
    """The lock has them, because another mapping takes them."""
    mirror = LockedAudit(world, tmp_path)
    image = mirror.load(mirror.seed.image(), "v1")
    bill = mirror.seed.artifact(image, SBOM).load_into(mirror.source.app, "app")
    signature = mirror.load(mirror.seed.artifact(image, SIGNATURE))
    for loaded in (image, bill, signature):
        loaded.load_into(mirror.target.app, "other", *(["v1"] if loaded is image else []))
    mirror.mapping["artifacts"] = {"exclude": [SBOM]}
    mirror.others = [{"from": "app", "to": "other", "tags": tags("v1")}]
    await mirror.make_lock()
    assert whole(await mirror.audit()) == 2
    lose_manifest(mirror.target.app, signature.top)
    assert found(await mirror.audit()) == [("artifact_missing", signature.top)]


async def test_another_lock_can_be_named_and_without_one_nothing_is_asked(world, tmp_path):
    mirror = LockedAudit(world, tmp_path)
    mirror.load(mirror.seed.image(), "v1")
    await mirror.make_lock()
    elsewhere = tmp_path / "reviewed.lock"
    (tmp_path / "mirror.lock").rename(elsewhere)
    assert whole(await mirror.audit("--lock", str(elsewhere))) == 1


# What is held back.


async def test_what_is_held_back_is_neither_missing_nor_different(world, tmp_path):
    """What the target holds meanwhile is looked at whole all the same."""
    mirror = AuditedMirror(world, tmp_path)
    mirror.mapping |= {"min_age": "3d", "tags": tags("v1", "v2")}
    old = mirror.seed.image()
    mirror.load(old, "v1")
    new = mirror.seed.image().load_into(mirror.source.app, "app", "v1", "v2")
    await mirror.run("sync")
    assert mirror.target.app.repositories["app"].tags == {"v1": old.top}
    assert whole(await mirror.audit()) == 2
    assert asked(mirror.source) == {"HEAD manifest": 2}
    mirror.target.journal.matching("HEAD", "blob").exactly(len(old.blobs))

    lost = next(iter(old.blobs))
    del mirror.target.app.repositories["app"].blobs[lost]
    assert found(await mirror.audit()) == [("incomplete", lost)]

    await anyio.sleep(3 * DAY)
    kinds = {finding["finding"] for finding in (await mirror.audit()).report["findings"]}
    assert kinds == {"differs", "missing", "incomplete"}
    await mirror.run("sync")
    assert mirror.target.app.repositories["app"].tags == {"v1": new.top, "v2": new.top}
    assert whole(await mirror.audit()) == 2


async def test_an_index_that_is_held_back_is_not_trimmed(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    mirror.mapping |= {"min_age": "3d", "platforms": ["linux/amd64"]}
    mirror.seed.index().load_into(mirror.source.app, "app", "v1")
    assert whole(await mirror.audit()) == 1
    assert asked(mirror.source) == {"HEAD manifest": 1}


async def test_an_audit_notes_no_time(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    mirror.mapping["min_age"] = "3d"
    mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    assert whole(await mirror.audit()) == 1
    assert not (tmp_path / ".regsync").exists()


async def test_a_time_in_the_lock_counts(world, tmp_path):
    mirror = LockedAudit(world, tmp_path)
    mirror.mapping["min_age"] = "3d"
    mirror.seed.image().load_into(mirror.source.app, "app", "v1")
    await mirror.make_lock()
    assert whole(await mirror.audit()) == 1
    await anyio.sleep(3 * DAY)
    assert only(found(await mirror.audit())) == ("missing", None)


async def test_without_a_place_for_the_times_nothing_is_attempted(mirror):
    config = mirror.text({"from": "app", "tags": tags("v1"), "min_age": "3d"})
    ran = await mirror.world.run("audit", "-c", "-", stdin=config)
    assert ran.status == 3
    assert "min_age" in ran.err
    mirror.target.journal.matching().none()
