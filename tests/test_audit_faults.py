"""`regsync audit` where registries are of many kinds, refuse, throttle, go away or are slow; where
signals come, disks are full and nobody reads; and between two real registries.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest

from conformance.client.attachments import FAMILIES, family, has_api, referrers_tag
from conformance.client.copies import push_http
from conformance.content.images import Seed
from conformance.messages import digest_of
from conformance.providers.personas import PERSONAS
from conformance.server.memory import Link
from tests.attached import MOVES, Scene
from tests.ends import Ran, document, only, run_regsync, stopped_at, tags
from tests.mirrors import AuditedMirror, found, lose_blob, lose_manifest, whole
from tests.thinning import thinned

# Registries of every kind.

KINDS = ("strict", "referrers-in-pages", "distribution", "unknown-referrers-announced", "old")
WITHOUT_API = ("distribution", "old")


@pytest.mark.parametrize(
    ("source", "target", "name"),
    thinned(
        itertools.product(KINDS, KINDS, FAMILIES),
        lambda cell: cell[:2],
        lambda cell: (cell[1] in WITHOUT_API, cell[2]),
    ),
)
async def test_what_a_run_has_brought_is_whole_and_what_is_lost_of_it_is_missed(
    world, source, target, name, tmp_path
):
    scene = Scene(world, tmp_path, family(name), source, target)
    await scene.succeed()

    async def audit() -> Ran:
        for site in (scene.source, scene.target):
            site.journal.clear()
        file = str(tmp_path / "mirror.yaml")
        ran = await world.run("audit", "--json", "-q", "-c", file)
        for site in (scene.source, scene.target):
            site.journal.matching(MOVES).none()
        assert ran.report["failures"] == []
        return ran

    ran = await audit()
    assert whole(ran) == 1
    travelling = {image.top for image in scene.made.travelling}
    assert ran.totals["artifacts"] == len(travelling)
    scene.target.journal.matching("GET", "manifest", status=200).at_most(
        ran.totals["manifests"] + (0 if has_api(scene.target) else len(travelling) + 1)
    )
    scene.target.journal.matching("HEAD", "blob").exactly(ran.totals["blobs"])

    for lost in sorted(travelling)[:2]:
        lose_manifest(scene.target, lost)
    digests = {each["digest"] for each in (await audit()).report["findings"]}
    assert set(sorted(travelling)[:2]) <= digests


CLOSED = ("gar", "gcr", "acr-io", "acr-cn", "acr-us")


@pytest.mark.parametrize("name", sorted(PERSONAS))
async def test_a_target_of_any_kind_is_looked_at_whole(world, name, tmp_path):
    """Without a login: where that is refused, an image that may be there is no finding."""
    mirror = AuditedMirror(world, tmp_path)
    target = world.persona(name)
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
        target.journal.matching("HEAD", "blob", status=200).exactly(len(image.blobs))


async def test_an_artifact_that_a_target_does_not_list_is_found_and_mended(world, tmp_path):
    scene = Scene(world, tmp_path, family("single"), "strict", "distribution")
    await scene.succeed()
    held = scene.target.repositories["app"]
    del held.tags[referrers_tag(scene.made.image.top)]
    file = str(tmp_path / "mirror.yaml")
    ran = await world.run("audit", "--json", "-q", "-c", file)
    assert {each["finding"] for each in ran.report["findings"]} == {"artifact_missing"}
    assert len(ran.report["findings"]) == len(scene.made.travelling)
    for finding in ran.report["findings"]:
        assert finding["message"].endswith("exists, but the target does not list it")

    await world.run("sync", "-q", "--recheck", "-c", file)
    assert whole(await world.run("audit", "--json", "-q", "-c", file)) == 1


@pytest.mark.parametrize("part", ["blob", "manifest", "child"])
async def test_what_the_recipe_says_mends_an_image(world, part, tmp_path):
    """README.md, "After an incident": the tag is deleted, the state removed, then a run brings it."""
    mirror = AuditedMirror(world, tmp_path)
    child = mirror.seed.image()
    top = mirror.seed.index([child, mirror.seed.image(architecture="arm64")])
    top.load_into(mirror.source.app, "app", "v1", "v2")
    mirror.mapping["tags"] = tags("v1", "v2")
    await mirror.run("sync")
    if part == "blob":
        lose_blob(mirror.target.app, next(iter(child.blobs)))
    else:
        lose_manifest(mirror.target.app, child.top if part == "child" else top.top)
    assert {each for each, _ in found(await mirror.audit())} == {
        "missing" if part == "manifest" else "incomplete"
    }

    mirror.target.app.repositories["app"].tags.clear()
    (tmp_path / ".regsync" / "state.db").unlink()
    assert (await mirror.run("sync")).status == 0
    assert whole(await mirror.audit()) == 2


# Registries that do not answer as one would like.


@pytest.mark.parametrize("status", [401, 403])
async def test_a_repository_that_is_hidden_is_a_failure(world, status, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    mirror.load(mirror.seed.image(), "v1")
    mirror.target.app.faults.on("GET", "manifest").status(status)
    ran = await mirror.audit()
    assert (ran.status, ran.report["findings"]) == (2, [])
    assert only(ran.report["failures"])["error"]["code"] == "AUTH_ERROR"
    assert ran.totals["images"] == {"whole": 0, "flawed": 0, "failed": 1}


async def test_a_blob_that_may_not_be_asked_for_is_a_failure_and_the_rest_is_told(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    image = mirror.load(mirror.seed.image(sizes=(100, 200)), "v1")
    hidden, lost, *_ = image.blobs
    lose_blob(mirror.target.app, lost)
    mirror.target.app.faults.on("HEAD", "blob", reference=hidden).status(403)
    ran = await mirror.audit()
    assert (ran.status, found(ran)) == (2, [("incomplete", lost)])
    assert only(ran.report["failures"])["target"] == "target.test/app:v1"
    assert len(ran.failed) == 1


async def test_a_source_that_cannot_be_listed_fails_its_mapping_alone(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path, "one", "two")
    mirror.mapping["tags"] = tags("v*")
    mirror.source.app.faults.on("GET", "tag_list").status(403)
    ran = await mirror.audit()
    assert sorted(each["target"] for each in ran.report["failures"]) == [
        "one.test/app:*",
        "two.test/app:*",
    ]
    for place in mirror.targets.values():
        place.journal.matching().none()


async def test_a_tag_that_the_source_lost_is_a_failure(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    mirror.seed.image().load_into(mirror.target.app, "app", "v1")
    mirror.seed.image().load_into(mirror.source.app, "app", "v2")
    ran = await mirror.audit()
    assert (ran.status, ran.report["findings"]) == (2, [])
    assert only(ran.report["failures"])["error"]["code"] == "SOURCE_ERROR"


async def test_an_index_that_has_no_end_is_a_failure(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
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


async def test_artifacts_on_artifacts_are_checked_if_they_are_eight_deep(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    top = mirror.load(mirror.seed.image(), "v1")
    for _ in range(8):
        top = mirror.load(mirror.seed.artifact(top))
    ran = await mirror.audit()
    assert (ran.status, found(ran), ran.report["failures"]) == (0, [], [])
    assert ran.totals["artifacts"] == 8


async def test_artifacts_on_artifacts_that_have_no_end_are_a_failure(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    top = mirror.load(mirror.seed.image(), "v1")
    for _ in range(9):
        top = mirror.load(mirror.seed.artifact(top))
    ran = await mirror.audit()
    assert found(ran) == []
    error = only(ran.report["failures"])["error"]
    assert (error["code"], error["side"]) == ("CONTENT_ERROR", "target")
    assert "more than 8 deep" in error["message"]


async def test_of_two_sources_of_a_tag_the_later_one_is_a_failure(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    mirror.load(mirror.seed.image(), "v1")
    mirror.others.append({"from": "other", "to": "app", "tags": tags("v1")})
    ran = await mirror.audit()
    failure = only(ran.report["failures"])
    assert (failure["source"], failure["error"]["code"]) == ("source.test/other:v1", "TARGET_ERROR")
    assert "mappings[0] writes this tag too" in failure["error"]["message"]
    assert ran.totals["images"] == {"whole": 1, "flawed": 0, "failed": 1}


async def test_a_mapping_that_selects_nothing_is_a_warning(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    mirror.load(mirror.seed.image(), "v1")
    mirror.mapping["tags"] = tags("w*")
    mirror.write(mirror.mapping)
    ran = await world.run("audit", "--json", "-c", str(mirror.file))
    assert ran.status == 0, ran.err
    assert "source.test/app" in ran.err


async def test_a_nested_index_that_was_trimmed_is_not_asked_about_at_the_source(world, tmp_path):
    """Here a 404 to that would look like a source without the referrers API."""
    mirror = AuditedMirror(world, tmp_path)
    children = [mirror.seed.image(architecture=name) for name in ("amd64", "arm64")]
    nested = mirror.seed.index(children)
    mirror.seed.index([nested]).load_into(mirror.source.app, "app", "v1")
    mirror.mapping["platforms"] = ["linux/amd64"]
    assert (await mirror.run("sync")).statuses() == ["synced"]
    assert whole(await mirror.audit()) == 1
    asked = mirror.source.journal.matching("GET", "referrers")
    assert [entry.reference for entry in asked] == [children[0].top]


async def test_throttling_is_obeyed(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    for number in range(20):
        mirror.load(mirror.seed.image(), f"v{number}")
    mirror.mapping["tags"] = tags("v*")
    mirror.target.app.faults.on("GET HEAD").throttle(requests=10, seconds=1)
    ran = await mirror.audit()
    assert whole(ran) == 20
    assert ran.totals["throttled"]["target.test"] > 0
    assert ran.seconds > 5


async def test_a_target_that_is_away_fails_alone(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path, "one", "two")
    for number in range(100):
        mirror.load(mirror.seed.image(), f"v{number}")
    mirror.mapping["tags"] = tags("v*")
    mirror.target.fail("refused")
    ran = await mirror.audit()
    assert (ran.status, ran.report["findings"]) == (2, [])
    failures = ran.report["failures"]
    assert {each["error"]["code"] for each in failures} == {"NETWORK_ERROR"}
    assert len(failures) == 100
    assert ran.totals["images"]["whole"] == 100
    # The other one does not wait until the first is given up.
    asked = mirror.targets["two"].journal.entries
    assert asked[-1].time - asked[0].time < 1


async def test_an_outage_that_ends_costs_no_finding(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path, of={"target": {"up": Link(latency=0.1)}})
    for number in range(100):
        mirror.load(mirror.seed.image(sizes=(2000,)), f"v{number}")
    mirror.mapping["tags"] = tags("v*")
    place = mirror.target

    async def go_away() -> None:
        await anyio.sleep(1.5)
        assert 0 < len(place.journal.entries) < 300
        async with place.outage("refused", 20):
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_away)
        ran = await mirror.audit()
    assert whole(ran) == 100
    assert ran.seconds > 20


async def test_an_audit_shows_how_far_it_is(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    mirror.load(mirror.seed.image(), "v1")
    await mirror.audit()
    mirror.target.app.faults.on("HEAD", "blob").delay(40)
    file = str(tmp_path / "mirror.yaml")
    ran = await world.run("audit", "-c", file)
    assert ran.err.splitlines() == ["still running: 0 of 1 images"]


# The process.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
async def test_a_signal_ends_an_audit_at_once_and_what_was_found_is_told(world, number, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    image = mirror.load(mirror.seed.image(), "v1", "v2")
    mirror.mapping["tags"] = tags("v1", "v2", "v3")
    mirror.seed.image().load_into(mirror.source.app, "app", "v3")
    receipt = tmp_path / "there.txt"
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


async def test_a_receipt_names_what_is_there(world, tmp_path):
    mirror = AuditedMirror(world, tmp_path)
    image = mirror.seed.image(sizes=(100, 200))
    bill = mirror.seed.artifact(image, "application/spdx+json")
    mirror.load(image, "v1", artifacts=(bill,))
    lost, wrong, *_ = image.blobs
    lose_blob(mirror.target.app, lost)
    mirror.target.app.faults.on("GET", "blob", reference=wrong).corrupt()
    receipt = tmp_path / "there.txt"
    ran = await mirror.audit("--read", "--receipt", str(receipt))
    assert found(ran) == sorted([("incomplete", lost), ("corrupt", wrong)])
    there = {*image.contents(), *bill.contents()} - {lost, wrong}
    lines = receipt.read_text().splitlines()
    assert lines == sorted(f"{digest} target.test/app" for digest in there)
    # Nobody needs to read these two bytes to know them.
    assert digest_of(b"{}") in there
    mirror.target.journal.matching("GET", "blob", reference=digest_of(b"{}")).none()


@pytest.mark.parametrize("trouble", ["no directory", "full disk"])
def test_a_receipt_that_cannot_be_written_is_an_error_that_names_it(
    trouble, source, target, tmp_path
):
    for registry in (source.app, target.app):
        Seed(1).image().load_into(registry, "app", tag="v1")
    config = document({"source": source, "target": target}, {"from": "app", "tags": tags("v1")})
    receipt = tmp_path / ("none" if trouble == "no directory" else "") / "there.txt"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "replace", side_effect=full):
        ran = run_regsync("audit", "-c", "-", "--receipt", str(receipt), stdin=config)
    assert str(receipt) in ran.err
    assert not receipt.exists()
    if trouble == "no directory":
        assert ran.status == 3
        target.journal.matching().none()
    else:
        assert (ran.status, os.listdir(tmp_path)) == (2, [])


def test_mappings_are_shared_among_shards(source, target):
    for name in ("one", "two"):
        Seed(1).image().load_into(source.app, name, tag="v1")
    mappings = [{"from": name, "tags": tags("v1")} for name in ("one", "two")]
    config = document({"source": source, "target": target}, *mappings)
    told = []
    for shard in ("0/2", "1/2"):
        ran = run_regsync("audit", "--json", "-c", "-", "--shard", shard, stdin=config)
        told += [each["target"].rpartition("/")[2] for each in ran.report["findings"]]
    assert sorted(told) == ["one:v1", "two:v1"]


def test_what_was_left_out_of_a_layout_is_not_missed(source, target, tmp_path):
    """The receipt of one audit thins a layout; another audit finds that layout whole."""
    image = Seed(1).image(sizes=(400, 500)).load_into(source.app, "app", tag="v1")
    image.load_into(target.app, "app", tag="v1")
    rule = {"from": "app", "tags": tags("v1")}
    file = tmp_path / "mirror.yaml"
    file.write_text(document({"source": source, "target": target}, rule))
    audit = ("audit", "--json", "-q", "-c", str(file))
    assert whole(run_regsync(*audit, "--receipt", str(tmp_path / "far.txt"))) == 1

    disk = {"url": "oci-layout:disk", "assume": "far.txt"}
    file.write_text(document({"source": source, "target": disk}, rule))
    assert run_regsync("sync", "-q", "-c", str(file)).status == 0
    ran = run_regsync(*audit, "--read")
    assert whole(ran) == 1
    assert ran.totals["blobs"] == 1, "the config alone is there"


def two_registries(docker_registries: Callable[..., str], directory: Path, **mapping: Any) -> Any:
    source = docker_registries()
    target = docker_registries()
    file = directory / "mirror.yaml"
    rule = {"from": "app", "tags": tags("v*"), **mapping}
    ends = {"source": source, "target": target}
    file.write_text(document(ends, rule, defaults={"artifacts": {}}))
    return source, target, str(file)


@pytest.mark.slow
def test_the_requests_between_two_real_registries(docker_registries, tmp_path):
    """They have no referrers API: one question shows that, then one listing stands for the fallback
    tags of the index and its two children.
    """
    source, target, file = two_registries(docker_registries, tmp_path)
    image = Seed(7).index(platforms=("linux/amd64", "linux/arm64/v8"))
    push_http(image, source, "app", "v1", "latest")
    assert run_regsync("lock", "-q", "-c", file).status == 0
    assert run_regsync("sync", "-q", "-c", file).status == 0
    (tmp_path / ".regsync" / "state.db").unlink()
    at_target = {"manifest_get": 3 + 1, "blob_head": len(image.blobs), "tag_list": 1}

    ran = run_regsync("audit", "--json", "-q", "-c", file)
    assert whole(ran) == 1
    at_source = {"tag_list": 1, "manifest_head": 1, "manifest_get": 1}
    assert ran.totals["requests"] == {source: at_source, target: at_target}
    ran = run_regsync("audit", "--json", "-q", "--locked", "-c", file)
    assert whole(ran) == 1
    assert ran.totals["requests"] == {target: at_target}


@pytest.mark.new
@pytest.mark.slow
def test_between_two_real_registries(docker_registries, tmp_path):
    source, target, file = two_registries(docker_registries, tmp_path)
    made = family("everything")
    made.push(source)
    assert run_regsync("sync", "-q", "-c", file).status == 0
    receipt = tmp_path / "there.txt"
    ran = run_regsync("audit", "--json", "-q", "-c", file, "--read", "--receipt", str(receipt))
    assert whole(ran) == 1
    assert ran.totals["artifacts"] == len(made.travelling)
    requests = ran.totals["requests"][target]
    assert requests["blob_head"] == ran.totals["blobs"]
    assert requests["blob_get"] == ran.totals["blobs"] - 1, "all but {}"
    assert set(requests) == {"blob_head", "blob_get", "manifest_get", "tag_list"}
    assert requests["tag_list"] == 1
    named = {line.split()[0] for line in receipt.read_text().splitlines()}
    digests = {*made.image.contents()}.union(*(each.contents() for each in made.travelling))
    assert named == digests
