"""`sync --verify`: targets are asked for every part of every image, and what they lost is copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.client.attachments import referrers_tag
from conformance.content.images import Image
from conformance.messages import Answer, Request, Response
from tests.ends import Virtual, document, only, run_regsync, tags
from tests.mirrors import (
    SBOM,
    SIGNATURE,
    WRITES,
    AuditedMirror,
    LockedMirror,
    asked,
    lose_blob,
    lose_manifest,
    whole,
)


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> AuditedMirror:
    return AuditedMirror(world, tmp_path)


def index_of(mirror: AuditedMirror) -> tuple[Image, Image]:
    """Let the source have an index with two platforms. Returns it and one of its children."""
    child = mirror.seed.image()
    index = mirror.seed.index([child, mirror.seed.image(architecture="arm64")])
    return index.load_into(mirror.source.app, "app", "v1", "v2"), child


async def test_what_is_whole_costs_a_look_at_each_part_and_nothing_is_copied(mirror):
    index, _ = index_of(mirror)
    mirror.mapping["tags"] = tags("v1", "v2")
    await mirror.run("sync")
    ran = await mirror.run("sync", "--verify")
    assert (ran.statuses(), ran.err) == (["skipped"] * 2, "")
    assert asked(mirror.target) == {
        "HEAD manifest": 2,
        "GET manifest": len(index.manifests),
        "HEAD blob": len(index.blobs),
    }
    assert asked(mirror.source) == {"HEAD manifest": 2, "GET manifest": 1, "GET referrers": 3}


@pytest.mark.parametrize("part", ["blob", "child", "index"])
async def test_what_a_target_has_lost_is_copied_and_nothing_else(mirror, part):
    """A run without the option skips the image, because its tag names the right digest."""
    index, child = index_of(mirror)
    mirror.mapping["tags"] = tags("v*")
    await mirror.run("sync")
    mirror.push("v3")
    await mirror.run("sync")  # which learns how the target answers probing POSTs
    lost = {"blob": next(iter(child.blobs)), "child": child.top, "index": index.top}[part]
    if part == "blob":
        lose_blob(mirror.target.app, lost)
    elif part == "child":
        lose_manifest(mirror.target.app, lost)
    else:
        del mirror.target.app.repositories["app"].manifests[lost]
    if part != "index":
        assert (await mirror.run("sync")).statuses() == ["skipped"] * 3

    ran = await mirror.run("sync", "--verify")
    assert sorted(ran.statuses()) == ["skipped", "synced", "synced"]
    mirror.target.journal.matching("PUT", "upload").exactly(1 if part == "blob" else 0)
    if part == "blob":
        mirror.target.journal.matching("POST", "upload_start").exactly(1)
    mirror.source.journal.matching("GET", "blob").exactly(1 if part == "blob" else 0)
    assert whole(await mirror.audit()) == 3
    assert (await mirror.run("sync", "--verify")).statuses() == ["skipped"] * 3


async def test_a_dry_run_tells_what_is_lost_and_changes_nothing(mirror):
    image = mirror.load(mirror.seed.image(), "v1", "v2")
    mirror.mapping["tags"] = tags("v1", "v2")
    await mirror.run("sync")
    lost = next(iter(image.blobs))
    lose_blob(mirror.target.app, lost)
    mirror.clear()
    options = ("--verify", "--dry-run", "--json", "-c", str(mirror.file))
    ran = await mirror.world.run("sync", *options)
    assert ran.statuses() == ["would_sync"] * 2
    for tag in ("v1", "v2"):
        assert f"target.test/app:{tag}: blob {lost} (" in ran.err
    assert sum(each["blobs"]["transferred"] for each in ran.images) == 1
    mirror.target.journal.matching(WRITES).none()


async def test_without_a_state_too_and_tags_that_never_move_are_looked_at(mirror, tmp_path):
    image = mirror.seed.image().load_into(mirror.source.app, "app", "v1", "v2")
    mirror.mapping |= {"tags": tags("v*", immutable_tags="v*"), "artifacts": {"enabled": False}}
    await mirror.run("sync")
    (tmp_path / ".regsync" / "state.db").unlink()
    lost = next(iter(image.blobs))
    lose_blob(mirror.target.app, lost)
    assert [each["reason"] for each in (await mirror.run("sync")).images] == ["immutable_tag"] * 2
    assert (await mirror.run("sync", "--verify")).statuses() == ["synced"] * 2
    mirror.source.journal.matching("GET", "blob").exactly(1)
    assert whole(await mirror.audit()) == 2


async def test_an_artifact_is_looked_at_like_an_image(mirror):
    image = mirror.seed.image()
    bill = mirror.seed.artifact(image, SBOM)
    signature = mirror.seed.artifact(bill, SIGNATURE)
    mirror.load(image, "v1", artifacts=(bill, signature))
    await mirror.run("sync")
    lose_manifest(mirror.target.app, signature.top)
    lost = next(iter(bill.blobs))
    lose_blob(mirror.target.app, lost)
    ran = await mirror.run("sync", "--verify")
    assert ran.status == 0
    assert only(list(ran.images))["artifacts"]["synced"] == 2
    assert whole(await mirror.audit()) == 1


async def test_an_artifact_that_a_target_does_not_list_is_listed_again(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path, referrers_api=False)
    image = mirror.load(mirror.seed.image(), "v1")
    mirror.attach(image)
    await mirror.run("sync")
    del mirror.target.app.repositories["app"].tags[referrers_tag(image.top)]
    assert (await mirror.run("sync", "--verify")).status == 0
    assert whole(await mirror.audit()) == 1


async def test_wrong_bytes_stay_and_the_error_says_what_to_do(mirror):
    """A registry that has something under a digest takes nothing else under it."""
    image = mirror.load(mirror.seed.image(), "v1")
    await mirror.run("sync")
    wrong = next(iter(image.blobs))

    def shorten(request: Request) -> Answer | None:
        if request.kind == "blob" and request.reference == wrong:
            return Response(200, [("Content-Length", "3")], b"abc")
        return None

    mirror.target.app.intercept = shorten
    ran = await mirror.run("sync", "--verify")
    error = only(list(ran.images))["error"]
    assert (ran.status, error["code"], error["side"]) == (2, "CONTENT_ERROR", "target")
    assert f"blob {wrong}: it has 3 bytes" in error["message"]
    assert error["hint"] == "delete it at the target, and run `sync --verify` again"
    mirror.target.journal.matching(WRITES).none()


async def test_what_cannot_be_asked_for_is_a_failure(mirror):
    image = mirror.load(mirror.seed.image(), "v1")
    await mirror.run("sync")
    mirror.target.app.faults.on("HEAD", "blob", reference=next(iter(image.blobs))).status(403)
    ran = await mirror.run("sync", "--verify")
    assert only(list(ran.images))["error"]["code"] == "AUTH_ERROR"
    mirror.target.journal.matching(WRITES).none()


async def test_from_a_lock_no_source_is_asked_for_more_than_what_is_lost(world, tmp_path):
    mirror = LockedMirror(world, tmp_path)
    image = mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    mirror.push("v1")
    lost = next(iter(image.blobs))
    lose_blob(mirror.target.app, lost)
    ran = await mirror.run("sync", "--locked", "--verify")
    assert ran.statuses() == ["synced"]
    assert asked(mirror.source) == {"GET manifest": 1, "GET blob": 1}
    assert mirror.held() == {"v1": image.top}
    assert lost in mirror.target.app.repositories["app"].blobs


@pytest.mark.parametrize("damage", ["lost", "shorter"])
def test_a_directory_gets_back_what_a_disk_has_lost(source, tmp_path, damage):
    from conformance.content.images import Seed

    image = Seed(3).image().load_into(source.app, "app", "v1")
    layout = tmp_path / "layout"
    mapping = {"from": "app", "tags": tags("v1")}
    file = tmp_path / "mirror.yaml"
    file.write_text(document({"source": source, "disk": f"oci-layout:{layout}"}, mapping))
    assert run_regsync("sync", "-q", "-c", str(file)).status == 0
    digest, data = next(iter(image.blobs.items()))
    path = layout / "blobs" / "sha256" / digest.partition(":")[2]
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(data[:-1])
    ran = run_regsync("sync", "--json", "--verify", "-c", str(file))
    assert ran.statuses() == ["synced"]
    assert path.read_bytes() == data
