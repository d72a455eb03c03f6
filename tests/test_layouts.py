"""Image layouts: copies into them and out of them, what they name, and what other tools make of that.

A hostile directory and how a layout is written is in unit/test_layout, runs that are short of room, stopped
or thin in test_layout_runs (docs/design.md section 13).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from conformance.images import Seed
from conformance.programs import skopeo
from conformance.shapes import shapes
from tests.ends import held, only, run_regsync, tags
from tests.layouts import (
    FULL_NAME,
    NAME,
    DiskMirror,
    blob_path,
    check_layout,
    digest_of,
    files_of,
    index_of,
    make_layout,
    names_of,
)
from tests.mirrors import SBOM, asked
from tests.program import report_schema
from tests.states import rows
from tests.thinning import thorough

V1 = {"from": "app", "tags": tags("v1")}
ALL = {"from": "app", "tags": tags("v*")}
DISK = {"url": "oci-layout:disk"}
SUBJECT = "dev.regsync.subject"


@pytest.fixture
def mirror(world, tmp_path) -> DiskMirror:
    return DiskMirror(world, tmp_path)


def signed(mirror):
    """Push an image, its SBOM, and a signature of the SBOM."""
    image = mirror.push("v1")
    bill = mirror.attach(image, SBOM)
    return image, bill, mirror.attach(bill)


def subjects(disk: Path) -> dict[str, str | None]:
    """Return what each entry of `index.json` refers to, by its digest."""
    return {
        each["digest"]: each["annotations"].get(SUBJECT) for each in index_of(disk)["manifests"]
    }


def times(disk: Path) -> dict[str, int]:
    """Return when each file was written."""
    return {name: (disk / name).stat().st_mtime_ns for name in files_of(disk)}


# There and back.


@pytest.mark.parametrize(
    ("repository", "tag"),
    # Two underscores are a registry's name, and no `ref.name` by OCI's grammar.
    [("base/app", "v1"), ("a__b", "_x")],
)
async def test_one_image_goes_into_a_layout_and_back(mirror, repository, tag):
    image = mirror.push(tag, mirror.seed.index(), repository)
    ran = await mirror.copy(f"http://source.test/{repository}:{tag}", mirror.layout)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    where = f"{mirror.layout}//{repository}:{tag}"
    assert only(ran.images)["target"] == where
    assert ran.totals["bytes"] == image.size
    assert check_layout(mirror.disk) == set(image.contents())
    entry = only(index_of(mirror.disk)["manifests"])
    assert entry["annotations"] == {NAME: f"{repository}:{tag}"}

    ran = await mirror.copy(where, "http://target.test/x/y:v2")
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert held(mirror.target, "x/y", image)
    assert mirror.target.app.tags("x/y") == {"v2": image.top}


async def test_a_path_may_be_relative_and_a_digest_needs_no_tag(mirror, monkeypatch):
    image = mirror.push("v1")
    monkeypatch.chdir(mirror.directory)
    where = "oci-layout:./disk//base/alpine:3.20"
    for status in ("synced", "skipped"):
        assert (await mirror.copy("http://source.test/app:v1", where)).statuses() == [status]
    assert names_of(mirror.disk) == {"base/alpine:3.20": image.top}
    assert (
        await mirror.copy(f"http://source.test/app@{image.top}", f"{mirror.layout}//new")
    ).status == 0
    back = (f"{mirror.layout}//new@{image.top}", "http://target.test/app")
    assert (await mirror.copy(*back)).status == 0
    assert held(mirror.target, "app", image)


@pytest.mark.parametrize("names", [["v1"], ["v1", "v2"]])
async def test_an_unchanged_tag_costs_a_head_however_many_there_are(mirror, names):
    """A GET would count against the quota of Docker Hub. To list a directory costs no request."""
    for name in names:
        mirror.push(name)
    mapping = {"from": "app", "tags": tags(*names), "artifacts": {"enabled": False}}
    for how in ("GET manifest", "HEAD manifest"):
        await mirror.outside(mapping)
        found = asked(mirror.source)
        assert {kind: found[kind] for kind in found if "manifest" in kind} == {how: len(names)}


async def test_a_tag_that_moved_names_the_new_image_and_the_old_blobs_stay(mirror):
    old = mirror.push("v1")
    await mirror.outside(V1)
    new = mirror.push("v1")
    assert (await mirror.outside(V1)).statuses() == ["synced"]
    assert names_of(mirror.disk) == {"app:v1": new.top}
    assert check_layout(mirror.disk) == set(new.contents())
    assert all(blob_path(mirror.disk, digest).exists() for digest in old.contents())


async def test_repositories_share_blobs_which_are_read_and_written_once(mirror):
    layer = mirror.seed.layer(50_000)
    images = {
        name: mirror.seed.image(layers=[layer, mirror.seed.layer(9)]) for name in ("a", "b/c")
    }
    for name, image in images.items():
        mirror.push("v1", image, name)
    mirror.push("v1", images["a"], "same")
    ran = await mirror.outside(*({"from": name, "tags": tags("v1")} for name in images))
    assert ran.totals["layers"]["mounted"] == 0
    blobs = {blob for image in images.values() for blob in image.blobs}
    assert mirror.source.journal.count("GET", "blob") == len(blobs)
    check_layout(mirror.disk)
    # What another repository of the layout has is named once more.
    assert (await mirror.outside({"from": "same", "tags": tags("v1")})).statuses() == ["synced"]
    assert mirror.source.journal.count("GET", "blob") == 0
    assert names_of(mirror.disk)["same:v1"] == images["a"].top


async def test_a_filtered_index_is_written_and_found_and_nothing_is_written_again(mirror):
    mirror.push("v1", mirror.seed.index(platforms=("linux/amd64", "linux/arm64")))
    mapping = {**V1, "platforms": ["linux/arm64"], "artifacts": {"enabled": False}}
    assert (await mirror.outside(mapping)).statuses() == ["synced"]
    before = times(mirror.disk)
    assert (await mirror.outside(mapping)).statuses() == ["skipped"]
    assert times(mirror.disk) == before
    assert asked(mirror.source) == {"GET manifest": 1}
    check_layout(mirror.disk)
    assert (await mirror.inside(V1)).statuses() == ["synced"]


# The layout takes a blob at once, and the registry's session may be a moment behind it.
async def test_a_layout_and_a_registry_as_targets_of_one_source_read_it_once(mirror):
    family = signed(mirror)
    both = {"targets": ["disk", "target"]}
    assert (await mirror.outside(V1, defaults=both)).statuses() == ["synced"] * 2
    blobs = {blob for each in family for blob in each.blobs} - {digest_of(b"{}")}
    assert mirror.source.journal.count("GET", "blob") == len(blobs)
    check_layout(mirror.disk)
    assert held(mirror.target, "app", family[0])
    assert (await mirror.outside(V1, defaults=both)).statuses() == ["skipped"] * 2


# Artifacts.


@pytest.mark.parametrize("api", [True, False])
async def test_artifacts_travel_into_a_layout_and_out_of_it(world, tmp_path, api):
    mirror = DiskMirror(world, tmp_path, of={"target": {"referrers_api": api}})
    image, bill, signature = family = signed(mirror)
    assert only((await mirror.outside(V1)).images)["artifacts"]["synced"] == 2
    assert subjects(mirror.disk) == {image.top: None, bill.top: image.top, signature.top: bill.top}
    assert only((await mirror.inside(V1)).images)["artifacts"]["synced"] == 2
    assert all(held(mirror.target, "app", each) for each in family)
    if not api:
        listed = json.loads(mirror.target.app.manifest("app", image.top.replace(":", "-")).body)
        assert [part["digest"] for part in listed["manifests"]] == [bill.top]


async def test_a_signature_under_a_tag_of_cosign_comes_out_although_no_pattern_lists_the_layout(
    world, tmp_path
):
    mirror = DiskMirror(world, tmp_path, of={"source": {"referrers_api": False}})
    image = mirror.push("v1")
    tag = f"{image.top.replace(':', '-')}.sig"
    signature = mirror.push(tag)
    assert only((await mirror.outside(V1)).images)["artifacts"]["synced"] == 1
    assert only((await mirror.inside(V1)).images)["artifacts"]["synced"] == 1
    assert mirror.target.app.tags("app") == {"v1": image.top, tag: signature.top}


async def test_an_artifact_that_an_index_names_is_listed_as_an_artifact_too(mirror):
    image = mirror.seed.image()
    signature = mirror.seed.artifact(image)
    index = mirror.push("v1", mirror.seed.index([image, signature]))
    assert only((await mirror.outside(V1)).images)["artifacts"]["synced"] == 1
    assert subjects(mirror.disk) == {index.top: None, signature.top: image.top}
    assert (await mirror.inside(V1)).statuses() == ["synced"]
    mirror.target.journal.matching("PUT", "manifest", reference=signature.top).exactly(1)


async def test_an_artifact_that_has_a_tag_is_listed_as_an_artifact_too(mirror):
    image = mirror.push("v1")
    await mirror.outside(V1)
    bill = mirror.attach(image, SBOM, "bill")
    await mirror.outside({"from": "app", "tags": tags("bill")})
    await mirror.outside(V1)
    assert (await mirror.run("sync", "--recheck")).status == 0
    assert (await mirror.run("audit")).status == 0
    assert (await mirror.inside(V1)).statuses() == ["synced"]
    assert held(mirror.target, "app", bill)


async def test_an_artifact_is_named_after_a_run_that_died_before_its_index_was_there(mirror):
    """Its manifest is there, and `index.json` does not name it: it is put once more."""
    signed(mirror)
    await mirror.outside(V1)
    index = mirror.disk / "index.json"
    complete = index.read_bytes()
    document = index_of(mirror.disk)
    names = document["manifests"]
    document["manifests"] = [each for each in names if SUBJECT not in each["annotations"]]
    index.write_text(json.dumps(document))
    assert (await mirror.run("sync", "--recheck")).status == 0
    assert index.read_bytes() == complete


@pytest.mark.parametrize("damage", ["absent", "damaged", "a folder"])
async def test_an_entry_without_a_name_that_cannot_be_read_is_warned_of(mirror, damage):
    """It may refer to any image, and most images have nothing to do with it."""
    image = mirror.seed.image()
    bill, other = mirror.seed.artifact(image, SBOM), mirror.seed.artifact(image, SBOM)
    make_layout(mirror.disk, {"app:v1": image, "": bill}, other.descriptor())
    if damage == "damaged":
        blob_path(mirror.disk, other.top).write_bytes(other.body[:-1] + b" ")
    elif damage == "a folder":
        blob_path(mirror.disk, other.top).mkdir()
    mirror.write(V1, registries={"source": DISK})
    ran = await mirror.aloud("sync")
    assert ran.status == 0
    assert only(ran.images)["artifacts"] == {"synced": 1, "skipped": 0, "failed": 0, "stripped": 0}
    warning = only([line for line in ran.err.splitlines() if line.startswith("warning: ")])
    assert str(mirror.disk) in warning
    assert other.top in warning


@pytest.mark.parametrize("wrong", ["a list that is lost", "a list that is an image", "a platform"])
async def test_what_is_wrong_about_the_artifacts_of_one_image_hides_those_of_no_other(
    mirror, wrong
):
    first, second = mirror.seed.image(), mirror.seed.image()
    bills = [mirror.seed.artifact(each, SBOM) for each in (first, second)]
    named = {"app:a": first, "app:b": second}
    tag = f"app:{first.top.replace(':', '-')}"
    if wrong == "a list that is lost":
        named[tag] = mirror.seed.fallback_index(bills[:1])
    elif wrong == "a list that is an image":
        named[tag] = mirror.seed.index([first])
    make_layout(mirror.disk, {**named, "": bills[0]})
    document = index_of(mirror.disk)
    if wrong == "a list that is lost":
        blob_path(mirror.disk, named[tag].top).unlink()
    elif wrong == "a platform":  # as old versions of skopeo write it
        document["manifests"][-1]["platform"] = {"os": "linux", "architecture": "amd64"}
    for digest, body in bills[1].contents().items():
        blob_path(mirror.disk, digest).write_bytes(body)
    document["manifests"].append(bills[1].descriptor())
    (mirror.disk / "index.json").write_text(json.dumps(document))
    # One look-up at a time, so that what is wrong comes first.
    mappings = [{"from": "app", "tags": tags(name)} for name in ("a", "b")]
    ran = await mirror.inside(*mappings)
    assert held(mirror.target, "app", bills[1])
    if wrong == "a list that is lost":
        assert sorted(ran.statuses()) == ["failed", "synced"]
        assert only([each["error"] for each in ran.images if each["error"]])["side"] == "source"
        assert tag in only(ran.failed)
    else:
        assert ran.statuses() == ["synced"] * 2
        assert held(mirror.target, "app", bills[0])


# A disk is asked anew in each run, and may have lost what it had.


async def test_a_disk_that_was_swapped_is_filled_anew_as_the_state_knows_nothing_of_it(mirror):
    signed(mirror)
    await mirror.outside(V1)
    known = rows(mirror.cache)
    assert not [*known["held"], *known["tag"], *known["look"]]
    assert "layout" not in str(known["fact"])
    first = (mirror.disk / "index.json").read_bytes()
    mirror.disk.rename(mirror.directory / "other disk")
    ran = await mirror.outside(V1)
    assert (ran.statuses(), only(ran.images)["artifacts"]["synced"]) == (["synced"], 2)
    assert (mirror.disk / "index.json").read_bytes() == first
    check_layout(mirror.disk)


async def test_a_tag_whose_manifest_is_gone_is_absent(mirror):
    image = mirror.push("v1")
    await mirror.outside(V1)
    blob_path(mirror.disk, image.top).unlink()
    assert (await mirror.outside(V1)).statuses() == ["synced"]
    assert check_layout(mirror.disk) == set(image.contents())


async def test_an_image_whose_manifest_a_source_has_lost_fails_although_a_pattern_chose_it(mirror):
    good, lost = mirror.seed.image(), mirror.seed.image()
    make_layout(mirror.disk, {"app:v1": good, "app:v2": lost})
    blob_path(mirror.disk, lost.top).unlink()
    ran = await mirror.inside(ALL)
    assert (ran.status, sorted(ran.statuses())) == (1, ["failed", "synced"])
    assert lost.top in only(ran.failed)
    error = only([each["error"] for each in ran.images if each["error"]])
    assert "`sync --recheck` where the layout was made" in error["hint"]


@pytest.mark.parametrize("option", ["--recheck", "--no-progress"])
@pytest.mark.parametrize("immutable", [{}, {"immutable_tags": "v0"}], ids=["", "immutable"])
async def test_a_tag_that_cannot_be_looked_at_fails_no_other_image(mirror, option, immutable):
    odd = mirror.push("v0")
    make_layout(mirror.disk, {"app:v0": odd, "app:unselected": odd})
    blob_path(mirror.disk, odd.top).unlink()
    blob_path(mirror.disk, odd.top).mkdir()
    for tag in ("v1", "v2"):
        mirror.push(tag)
    mapping = {"from": "app", "tags": {**ALL["tags"], **immutable}}
    mirror.write(mapping, registries={"disk": DISK}, defaults={"targets": ["disk"]})
    ran = await mirror.run("sync", option)
    assert sorted(ran.statuses()) == ["failed", "synced", "synced"]
    assert odd.top[7:] in only(ran.failed)


async def test_a_blob_that_was_lost_is_written_again_when_another_image_needs_it(mirror):
    layer = mirror.seed.layer(1000)
    mirror.push("v1", mirror.seed.image(layers=[layer]))
    await mirror.outside(V1)
    blob_path(mirror.disk, digest_of(layer)).unlink()
    mirror.push("v2", mirror.seed.image(layers=[layer, b"more"]))
    assert (await mirror.outside(ALL)).statuses() == ["skipped", "synced"]
    check_layout(mirror.disk)


@pytest.mark.parametrize(("what", "is_cut"), [("layer", True), ("child", False)])
async def test_a_recheck_mends_an_image_of_which_a_disk_has_lost_something(mirror, what, is_cut):
    index = mirror.push("v1", mirror.seed.index([mirror.seed.image(), mirror.seed.image()]))
    mirror.attach(mirror.push("v2"), SBOM)
    await mirror.outside(ALL)
    lost = index.document["manifests"][1]["digest"]
    if what == "layer":
        lost = json.loads(index.contents()[lost])["layers"][0]["digest"]
    path = blob_path(mirror.disk, lost)
    if is_cut:
        os.truncate(path, 10)
    else:
        path.unlink()
    assert (await mirror.run("sync")).statuses() == ["skipped"] * 2
    assert (await mirror.run("sync", "--recheck")).statuses() == ["synced", "skipped"]
    assert mirror.source.journal.count("GET", "blob") == (1 if what == "layer" else 0)
    check_layout(mirror.disk)
    assert (await mirror.run("sync", "--recheck")).statuses() == ["skipped"] * 2


@pytest.mark.parametrize("number", [None, 1], ids=["index", "child"])
@pytest.mark.parametrize("option", ["--recheck", "--verify"])
async def test_a_manifest_of_wrong_bytes_is_written_again(mirror, number, option):
    index = mirror.push("v1", mirror.seed.index([mirror.seed.image(), mirror.seed.image()]))
    await mirror.outside(V1)
    damaged = index.top if number is None else index.document["manifests"][number]["digest"]
    path = blob_path(mirror.disk, damaged)
    path.write_bytes(b"\0" * path.stat().st_size)
    inside = await mirror.inside(V1)
    assert "`sync --recheck` where the layout was made" in only(inside.images)["error"]["hint"]
    await mirror.outside(V1)
    assert (await mirror.run("sync", option, "--dry-run")).statuses() == ["would_sync"]
    assert (await mirror.run("sync", option)).statuses() == ["synced"]
    assert mirror.source.journal.count("GET", "blob") == 0
    assert check_layout(mirror.disk) == set(index.contents())
    assert (await mirror.run("sync", option)).statuses() == ["skipped"]


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "linked"])
async def test_no_manifest_is_pushed_of_an_image_that_is_not_whole(mirror, damage):
    good, bad = mirror.seed.image(), mirror.seed.image(sizes=(700, 800))
    make_layout(mirror.disk, {"app:good": good, "app:bad": bad})
    digest = bad.document["layers"][1]["digest"]
    path = blob_path(mirror.disk, digest)
    body = path.read_bytes()
    path.unlink()
    if damage == "changed":
        path.write_bytes(b"x" * len(body))
    elif damage == "cut":
        path.write_bytes(body[:-1])
    elif damage == "linked":
        (mirror.directory / "outside").write_bytes(body)
        path.symlink_to(mirror.directory / "outside")
    ran = await mirror.inside({"from": "app", "tags": tags("*")})
    assert (ran.status, sorted(ran.statuses())) == (1, ["failed", "synced"])
    assert mirror.target.app.tags("app") == {"good": good.top}
    error = only([each["error"] for each in ran.images if each["error"]])
    assert digest in error["message"]
    assert error["side"] == "source"
    mirror.target.journal.matching("PUT", "manifest").exactly(1)


async def test_a_run_after_a_lost_rename_writes_the_index_and_asks_for_no_blob(mirror):
    """`index.json.partial` is whole, and was not renamed, or its new name was lost."""
    mirror.push("v1")
    await mirror.outside(V1)
    index, partial = mirror.disk / "index.json", mirror.disk / "index.json.partial"
    before = index.read_bytes()
    index.rename(partial)
    files = files_of(mirror.disk)
    assert (await mirror.run("sync", "--dry-run")).statuses() == ["would_sync"]
    receipt = mirror.directory / "far.txt"
    receipt.write_text("as it was")
    ran = await mirror.run("audit", "--receipt", str(receipt))
    assert (ran.status, receipt.read_text()) == (2, "as it was"), "the disk has what it had"
    assert "`sync`" in only(ran.report["failures"])["error"]["hint"]
    assert files_of(mirror.disk) == files
    assert (await mirror.run("sync")).status == 0
    assert mirror.source.journal.count("GET", "blob") == 0
    assert (index.read_bytes(), partial.exists()) == (before, False)
    assert (await mirror.run("sync")).statuses() == ["skipped"]


# What a configuration may say.

SERVER = {"url": "http://target.test"}


@pytest.mark.parametrize(
    ("source", "target", "mapping", "said"),
    [
        *(
            (SERVER, {**DISK, name: value}, {}, f"registries.target.{name}: means nothing for an image layout")
            for name, value in {"auth_type": "anonymous", "ca_file": "x.pem", "max_concurrent": 5}.items()
        ),
        (SERVER, {"url": "oci-layout:"}, {}, "names no directory"),
        (SERVER, {"url": "oci-layout://disk"}, {}, "registries.target.url"),
        (SERVER, {"url": "oci-layout:a//b"}, {}, "registries.target.url"),
        ({"url": "a.test"}, {**SERVER, "assume": "far.txt"}, {}, "oci-layout:PATH"),
        (DISK, {"url": "oci-layout:./disk"}, {}, "same repository"),
        (DISK, SERVER, {"min_age": "3d"}, "min_age"),
        (SERVER, DISK, {"from": "*"}, "mappings[0].from: only a source that is an `oci-layout`"),
        (DISK, SERVER, {"from": "*", "to": "app"}, 'mappings[0].to: cannot be set where `from` is "*"'),
        (DISK, SERVER, {"from": "team/*"}, "mappings[0].from: 'team/*' is not a repository"),
    ],
)  # fmt: skip
async def test_a_configuration_is_refused_that_means_nothing_for_a_layout(
    mirror, source, target, mapping, said
):
    registries = {"source": source, "target": target}
    ran = await mirror.sync({"from": "app", **mapping}, registries=registries)
    assert ran.status == 3
    assert said in ran.err


async def test_shards_write_a_layout_one_after_the_other(mirror):
    mirror.push("v1")
    mirror.write(V1, registries={"target": DISK})
    told = [(await mirror.run("sync", "--shard", shard)).statuses() for shard in ("0/2", "1/2")]
    assert sorted(told) == [[], ["synced"]]


# The other commands.


async def test_a_dry_run_writes_nothing_and_says_what_it_would(mirror):
    image = mirror.push("v1")
    mirror.write(V1, registries={"target": DISK})
    ran = await mirror.run("sync", "--dry-run")
    assert (ran.status, ran.statuses()) == (0, ["would_sync"])
    assert ran.totals["bytes"] == image.size
    assert not mirror.disk.exists()
    Draft202012Validator(report_schema()).validate(ran.report)


async def test_tags_lists_a_repository_of_a_layout_and_nobody_logs_in_there(mirror):
    make_layout(mirror.disk, {f"app:v{number}": mirror.seed.image() for number in range(3)})
    run = mirror.world.run
    assert (await run("tags", f"{mirror.layout}//app")).out.split() == ["v0", "v1", "v2"]
    ran = await run("tags", f"{mirror.layout}//other")
    assert (ran.status, "SOURCE_ERROR" in ran.err) == (2, True)
    assert (await run("tags", mirror.layout)).status == 3
    mirror.write(V1, registries={"target": DISK})
    ran = await mirror.run("auth", "check")
    assert [row["repository"] for row in ran.report["access"]] == ["source.test/app"]


async def test_an_audit_reads_a_layout_and_its_receipt_thins_another(mirror):
    image, _, _ = signed(mirror)
    await mirror.outside(V1)
    config, receipt = str(mirror.file), str(mirror.directory / "far.txt")
    ran = await mirror.world.run("audit", "-c", config, "--read", "--receipt", receipt)
    assert (ran.status, ran.out) == (0, "")
    for path, finding in ((next(iter(image.blobs)), "incomplete"), (image.top, "missing")):
        blob_path(mirror.disk, path).unlink()
        ran = await mirror.world.run("audit", "-c", config)
        assert (ran.status, ran.out.partition(" ")[0]) == (1, finding)
    thin = {"url": "oci-layout:thin", "assume": "far.txt"}
    assert (await mirror.sync(V1, registries={"target": thin})).status == 0
    layers = [
        blob_path(mirror.directory / "thin", each["digest"]) for each in image.document["layers"]
    ]
    assert not any(path.exists() for path in layers)


async def test_a_directory_may_have_a_name_that_is_no_text(world, tmp_path):
    folder = tmp_path / os.fsdecode(b"disk\xff")
    folder.mkdir()
    mirror = DiskMirror(world, folder)
    image, _, _ = signed(mirror)
    receipt = folder / "far.txt"
    assert (await mirror.outside(V1)).statuses() == ["synced"]
    ran = await world.run("audit", "-c", str(mirror.file), "--receipt", str(receipt))
    assert (ran.status, ran.out) == (0, "")
    assert image.top.encode() in receipt.read_bytes()
    assert (await mirror.inside(V1)).statuses() == ["synced"]
    assert held(mirror.target, "app", image)


@pytest.mark.parametrize(
    ("disk", "names"), [("absent", "v1"), ("absent", "v*"), ("a folder", "v*"), ("empty", "v1")]
)
async def test_a_receipt_stays_when_the_disk_that_names_the_images_is_away(mirror, disk, names):
    make_layout(mirror.disk, {"app:v1": mirror.seed.image()})
    assert (await mirror.inside({"from": "app", "tags": tags(names)})).status == 0
    receipt = mirror.directory / "far.txt"
    audit = ("audit", "-c", str(mirror.file), "--receipt", str(receipt))
    assert (await mirror.world.run(*audit)).status == 0
    before = receipt.read_text()
    assert len(before.splitlines()) > 2

    shutil.rmtree(mirror.disk)
    if disk == "a folder":
        mirror.disk.mkdir()
    elif disk == "empty":
        make_layout(mirror.disk, {})
    ran = await mirror.world.run(*audit)
    assert ran.status == 2
    assert receipt.read_text() == before
    told = f"error: {receipt} is left as it was: not everything could be checked\n"
    assert told in ran.err
    assert str(mirror.disk) in ran.err
    assert "mounted" in ran.err
    receipt.unlink()
    assert (await mirror.world.run(*audit)).status == 2
    assert not receipt.exists()


@pytest.mark.parametrize(
    "damage", [None, "", "{}", '{"manifests": [], "annotations": {"dev.regsync.left-out": "x"}}']
)
async def test_a_receipt_stays_when_the_index_of_its_disk_is_damaged(mirror, damage):
    mirror.push("v1")
    await mirror.outside(V1)
    if damage is None:  # the disk is away
        shutil.rmtree(mirror.disk)
    else:
        (mirror.disk / "index.json").write_text(damage)
    receipt = mirror.directory / "far.txt"
    receipt.write_text("as it was")
    ran = await mirror.run("audit", "--receipt", str(receipt))
    assert (ran.status, ran.report["findings"]) == (2, [])
    error = only(ran.report["failures"])["error"]
    assert error["message"].count(f"{mirror.disk}/index.json: ") == (damage is not None)
    assert "whether the disk is mounted" in error["hint"]
    assert receipt.read_text() == "as it was"


async def test_a_lock_of_a_layout_is_the_same_wherever_it_is_mounted(mirror, tmp_path):
    disk = make_layout(
        tmp_path / "usb", {"app:v1": mirror.seed.image(), "app:v2": mirror.seed.index()}
    )
    text = mirror.text(ALL, registries={"source": DISK})
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "disk").symlink_to(disk)
        mirror.file = tmp_path / name / "mirror.yaml"
        mirror.file.write_text(text)
        assert (await mirror.run("lock")).status == 0
        lock = (tmp_path / name / "mirror.lock").read_text()
        assert json.loads(lock.splitlines()[1])["mapping"] == "oci-layout:disk//app"
        assert str(tmp_path) not in lock
    assert (await mirror.run("sync", "--locked")).statuses() == ["synced"] * 2


async def test_what_a_directory_has_is_staged_for_nobody(mirror, world):
    mirror.push("v1", mirror.seed.image(sizes=(1_500_000,)))
    await mirror.outside(V1)
    plain = world.edge()
    calls = list[str]()

    async def note(function, *arguments):
        calls.append(function.__name__)
        return await plain.in_thread(function, *arguments)

    world.edge = lambda env=None: plain._replace(in_thread=note)
    ends = {"source": DISK, "other": world.registry("other.test")}
    ran = await mirror.sync(V1, registries=ends, defaults={"targets": ["target", "other"]})
    assert ran.statuses() == ["synced"] * 2
    assert {*calls} == {"readinto"}


# `from: "*"`: all repositories of a layout, without a mapping for each of them.

WHOLE = {"from": "*", "tags": tags("v*")}


async def test_what_the_disk_has_needs_no_names(mirror):
    images = {name: mirror.push("v1", repository=name) for name in ("app", "team/db", "team/web")}
    mirror.push("old")
    await mirror.outside(*({"from": name, "tags": tags("*")} for name in images))
    ran = await mirror.inside(WHOLE, {"from": "app", "to": "base/app"})
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 5)
    assert all(held(mirror.target, name, image) for name, image in images.items())
    assert {*mirror.target.app.tags("app")} == {"v1"}
    assert {*mirror.target.app.tags("base/app")} == {"v1", "old"}
    for command in (["lock"], ["sync", "--locked"], ["audit"], ["audit", "--locked"]):
        assert (await mirror.run(*command)).status == 0
    listed = await mirror.world.run("tags", "-c", str(mirror.file), f"{mirror.layout}//team/db")
    assert listed.out == "v1\n"


@pytest.mark.parametrize("command", ["sync", "lock", "audit"])
async def test_a_disk_that_is_not_there_is_told_before_anything_is_tried(mirror, command):
    mirror.write(WHOLE, registries={"source": DISK})
    assert (await mirror.world.run("validate", str(mirror.file))).status == 0
    ran = await mirror.world.run(command, "-c", str(mirror.file))
    assert (ran.status, ran.out) == (3, "")
    assert "error: CONFIG_ERROR: mappings[0]: " in ran.err
    assert "hint: check the path, and whether the disk is mounted" in ran.err
    assert not mirror.target.journal.entries


async def test_a_disk_that_is_not_mounted_is_not_written_below_its_mount_point(mirror):
    mirror.push("v1")
    ran = await mirror.copy("http://source.test/app:v1", f"{mirror.layout}/mirror//app:v1")
    assert "No such file or directory" in only(ran.failed)
    assert "hint: mount the disk, or make the directory above it" in ran.err
    assert not mirror.disk.exists()


async def test_of_a_disk_that_may_not_be_read_a_user_needs_no_right_to_write(mirror, monkeypatch):
    os_open = os.open

    def refuses(path: str, *flags: int) -> int:  # root may read all
        if path.endswith("index.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return os_open(path, *flags)

    monkeypatch.setattr(os, "open", refuses)
    ran = await mirror.copy(f"{mirror.layout}//app:v1", "http://target.test/app:v1")
    assert "index.json: Permission denied" in only(ran.failed)
    assert "hint: let this user read there (and write, if it is a target)" in ran.err


async def test_a_disk_without_images_is_a_warning(mirror):
    make_layout(mirror.disk, {})
    mirror.write(WHOLE, registries={"source": DISK})
    ran = await mirror.aloud("sync")
    assert (ran.status, ran.images) == (0, [])
    assert "names no repository" in ran.err


async def test_a_mapping_that_names_its_repository_goes_before(mirror):
    make_layout(mirror.disk, {"app:v1": mirror.seed.image()})
    image = mirror.push("v1")
    whole = {**WHOLE, "source": "disk"}
    ran = await mirror.sync(whole, V1, registries={"disk": DISK}, defaults={"targets": ["target"]})
    assert ran.status == 1
    assert "mappings[1] writes this tag too" in only(ran.failed)
    assert mirror.target.app.tags("app") == {"v1": image.top}


async def test_images_that_other_tools_have_named_with_their_hosts_belong_to_it(mirror):
    image, other = mirror.seed.image(), mirror.seed.image()
    named = other.descriptor(annotations={NAME: "v2", FULL_NAME: "docker.io/team/lib:v2"})
    make_layout(mirror.disk, {"app:v1": image}, named)
    for digest, body in other.contents().items():
        blob_path(mirror.disk, digest).write_bytes(body)
    assert (await mirror.inside({"from": "*"})).statuses() == ["synced"] * 2
    assert held(mirror.target, "app", image)
    assert held(mirror.target, "team/lib", other)


# Other tools.


@pytest.mark.slow
async def test_skopeo_and_we_write_one_layout_by_turns_and_read_each_others(mirror):
    theirs, ours = mirror.push("theirs"), mirror.push("v1", mirror.seed.index())
    made = make_layout(mirror.directory / "made", {"one": theirs})
    for tag, name in (("v1", "team/app:v1"), ("v2", "host.example/team/app:v2")):
        skopeo("copy", f"oci:{made}:one", f"oci:{mirror.disk}:{name}", home=mirror.directory)
        assert (
            await mirror.copy("http://source.test/app:v1", f"{mirror.layout}//app:{tag}")
        ).status == 0
    assert names_of(mirror.disk) == {
        "team/app:v1": theirs.top,
        "host.example/team/app:v2": theirs.top,
        "app:v1": ours.top,
        "app:v2": ours.top,
    }
    check_layout(mirror.disk)
    back = mirror.directory / "back"
    named = (f"oci:{mirror.disk}:app:v1", f"oci:{back}:v1")
    skopeo("copy", "--all", *named, home=mirror.directory)
    assert check_layout(back) == set(ours.contents())
    for tag in ("v1", "v2"):
        where = (f"{mirror.layout}//team/app:{tag}", f"http://target.test/app:{tag}")
        assert (await mirror.copy(*where)).status == 0
    assert mirror.target.app.tags("app") == {"v1": theirs.top, "v2": theirs.top}


@pytest.mark.parametrize("names", ["tag", "path", "backup", "list"])
async def test_what_oras_writes_with_referrers_is_read_with_them(mirror, names):
    """In the shapes of its version 1.3: artifacts and children of indexes are entries without a name.
    `oras cp -r ... --to-oci-layout DIR:TAG`, `--to-oci-layout-path DIR REPO:TAG`, and `oras backup
    --include-referrers` from a registry without the API of referrers, which has its lists as tags.
    Others write such a list, and no entry of what it names.
    """
    children = [mirror.seed.image(), mirror.seed.image()]
    index = mirror.seed.index(children)
    bill = mirror.seed.artifact(index, SBOM)
    named = {"v1" if names == "tag" else "app:v1": index}
    unnamed = [child.descriptor() for child in children]
    listed = {index.top.replace(":", "-"): mirror.seed.fallback_index([bill])}
    if names == "backup":
        named = {**listed, "v1": index, "v2": index}
    elif names == "list":
        named = {f"app:{tag}": image for tag, image in {**listed, "v1": index}.items()}
    make_layout(mirror.disk, {**named, "": bill}, *unnamed)
    if names == "list":
        document = index_of(mirror.disk)
        assert document["manifests"].pop(len(named))["digest"] == bill.top
        (mirror.disk / "index.json").write_text(json.dumps(document))
    ran = await mirror.inside(V1)
    assert (ran.status, only(ran.images)["artifacts"]["synced"]) == (0, 1)
    assert held(mirror.target, "app", index)
    assert held(mirror.target, "app", bill)
    ran = await mirror.world.run("tags", f"{mirror.layout}//app")
    assert ran.out.split()[-2:] == (["v1", "v2"] if names == "backup" else ["v1"])


@pytest.mark.process
def test_oras_and_we_write_one_layout_by_turns(source, tmp_path):
    oras = shutil.which("oras")
    if oras is None:
        pytest.skip("there is no oras here")

    def run(*command: str) -> str:
        words = [oras, *command]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    seed = Seed(31)
    image = seed.image().load_into(source.app, "app", "v1")
    seed.artifact(image, SBOM).load_into(source.app, "app")
    disk, where = tmp_path / "disk", f"{source.address}/app:v1"
    assert run_regsync("copy", where, f"oci-layout:{disk}").status == 0
    path = ("--oci-layout-path", str(disk))
    assert run("manifest", "fetch", *path, "app:v1").strip().encode() == image.body.strip()
    assert len(json.loads(run("discover", "--format", "json", *path, "app:v1"))["referrers"]) == 1
    (tmp_path / "a.txt").write_text("a")
    run("push", *path, "team/new:v9", "a.txt:text/plain")
    assert run_regsync("copy", where, f"oci-layout:{disk}//app:v2").status == 0
    assert names_of(disk).keys() == {"app:v1", "app:v2", "team/new:v9"}
    check_layout(disk)


SHAPES = [pytest.param(each, id=each.name) for each in shapes().values() if not each.refused]
LARGE = {"index-of-1000", "1000-layers"}  # each takes as long as all others


# A layout does not look into what it keeps: an ordinary run has every fifth shape.
@pytest.mark.parametrize(
    "shape",
    [
        thorough(each) if number % 5 or each.id in LARGE else each
        for number, each in enumerate(SHAPES)
    ],
)
async def test_every_shape_goes_there_and_back_and_obeys_ocis_rules(world, tmp_path, shape):
    mirror = DiskMirror(world, tmp_path, **shape.options)
    sample = shape.build()
    mirror.push("v1", sample.image)
    for image in sample.attached:
        image.load_into(mirror.source.app, "app")
    assert (await mirror.outside(V1)).status == 0
    assert (await mirror.inside(V1)).status == 0
    assert held(mirror.target, "app", sample.image)
    # OCI's image-layout.md, image-spec's content-descriptor.json, and the grammar of `ref.name`.
    index = index_of(mirror.disk)
    assert (index["schemaVersion"], index["mediaType"]) == (
        2,
        "application/vnd.oci.image.index.v1+json",
    )
    token = r"[A-Za-z0-9][\w!#$&^.+-]{0,126}"
    component = r"(?:[A-Za-z0-9]+(?:[-._:@/+]|--)?)*[A-Za-z0-9]+"
    for entry in index["manifests"]:
        assert re.fullmatch(f"{token}/{token}", entry["mediaType"])
        assert re.fullmatch(r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[a-zA-Z0-9=_-]+", entry["digest"])
        assert 0 <= entry["size"] < 2**63
        assert all(isinstance(text, str) for text in entry["annotations"].values())
        name = entry["annotations"].get(NAME, "x")
        assert re.fullmatch(f"{component}(?:/{component})*", name)
