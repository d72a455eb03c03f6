"""Copies into image layouts and out of them: what is asked, what is written, what is reported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from conformance.client.attachments import SBOM
from conformance.content.images import Image, Seed
from conformance.registry.app import App
from conformance.server.sockets import Server
from tests.ends import Ran, document, held, only, run_regsync, tags
from tests.layouts import (
    blob_path,
    check_layout,
    digest_of,
    files_of,
    index_of,
    make_layout,
    names_of,
)
from tests.states import rows

ALL = {"artifacts": {"enabled": True}}


@pytest.fixture
def seed() -> Seed:
    return Seed(23)


def counts(server: Server) -> dict[str, int]:
    """Return the counts of everything that was asked and forget it."""
    found = server.journal.summary()
    server.journal.clear()
    return found


def to_layout(
    directory: Path, source: Server, *mappings: dict[str, Any], more: Any = None, **top: Any
) -> Ran:
    """Sync into the layout `disk` of a directory, with a state beside the configuration."""
    registries = {"source": source, "disk": {"url": "oci-layout:disk", **(more or {})}}
    return run_file(
        directory, "out.yaml", document(registries, *mappings, **{**_defaults(), **top})
    )


def from_layout(directory: Path, targets: dict[str, Server], *mappings: Any, **top: Any) -> Ran:
    """Sync from the layout `disk` of a directory."""
    registries = {"source": {"url": "oci-layout:disk"}, **targets}
    return run_file(directory, "in.yaml", document(registries, *mappings, **{**_defaults(), **top}))


def _defaults() -> dict[str, Any]:
    return {"defaults": ALL}


def run_file(directory: Path, name: str, text: str, *more: str) -> Ran:
    (directory / name).write_text(text)
    return run_regsync("sync", "--json", "-q", "-c", str(directory / name), *more)


# There and back.


def test_one_image_goes_into_a_layout_and_back(source, target, seed, tmp_path):
    image = seed.index().load_into(source.app, "base/app", tag="v1")
    layout = f"oci-layout:{tmp_path / 'disk'}"
    ran = run_regsync("copy", "--json", f"{source.address}/base/app:v1", layout)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert only(ran.images)["target"] == f"{layout}//base/app:v1"
    assert ran.totals["bytes"] == image.size
    assert check_layout(tmp_path / "disk") == set(image.contents())
    entry = only(index_of(tmp_path / "disk")["manifests"])
    assert entry["annotations"] == {
        "org.opencontainers.image.ref.name": "base/app:v1",
        "io.containerd.image.name": f"{source.address}/base/app:v1",
    }

    ran = run_regsync("copy", "--json", f"{layout}//base/app:v1", f"{target.address}/x/y:v2")
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert held(target, "x/y", image)
    assert target.app.tags("x/y") == {"v2": image.top}


def test_large_blobs_go_from_disk_to_disk_by_several_threads(seed, tmp_path):
    image = seed.image(sizes=[6 << 20] * 5)
    make_layout(tmp_path / "one", {"app:v1": image})
    registries = {
        "source": {"url": f"oci-layout:{tmp_path / 'one'}"},
        "target": {"url": f"oci-layout:{tmp_path / 'other'}"},
    }
    mapping = {"from": "app", "tags": tags("v1")}
    ran = run_file(tmp_path, "mirror.yaml", document(registries, mapping))
    assert ran.statuses() == ["synced"]
    assert check_layout(tmp_path / "other") == set(image.contents())


def test_a_relative_path_and_a_repository_of_another_name(source, seed, tmp_path, monkeypatch):
    image = seed.image().load_into(source.app, "app", tag="v1")
    monkeypatch.chdir(tmp_path)
    where = f"{source.address}/app:v1"
    assert run_regsync("copy", where, "oci-layout:./usb//base/alpine:3.20").status == 0
    assert names_of(tmp_path / "usb") == {"base/alpine:3.20": image.top}
    again = run_regsync("copy", "--json", where, "oci-layout:usb//base/alpine:3.20")
    assert again.statuses() == ["skipped"]


async def test_other_tools_read_the_long_name_of_an_image_of_docker_hubs(world, seed, tmp_path):
    """containerd takes an image by this name, and knows no `docker.io/alpine`."""
    hub = world.listen(App(), "registry-1.docker.io", scheme="https")
    seed.image().load_into(hub.app, "library/alpine", tag="3.20")
    disk = tmp_path / "usb"
    assert (await world.run("copy", "alpine:3.20", f"oci-layout:{disk}")).status == 0
    (entry,) = index_of(disk)["manifests"]
    assert entry["annotations"] == {
        "io.containerd.image.name": "docker.io/library/alpine:3.20",
        "org.opencontainers.image.ref.name": "alpine:3.20",
    }


def test_tags_lists_a_repository_of_a_layout(seed, tmp_path):
    make_layout(tmp_path / "disk", {f"app:v{number}": seed.image() for number in range(3)})
    where = f"oci-layout:{tmp_path / 'disk'}//app"
    assert run_regsync("tags", where).out.split() == ["v0", "v1", "v2"]
    ran = run_regsync("tags", f"oci-layout:{tmp_path / 'disk'}//other")
    assert ran.status == 2
    assert "SOURCE_ERROR" in ran.err
    assert run_regsync("tags", f"oci-layout:{tmp_path / 'disk'}").status == 3


def test_a_digest_is_copied_without_a_tag(source, target, seed, tmp_path):
    image = seed.image().load_into(source.app, "app", tag="v1")
    layout = f"oci-layout:{tmp_path / 'disk'}"
    assert run_regsync("copy", f"{source.address}/app@{image.top}", f"{layout}//app").status == 0
    back = (f"{layout}//app@{image.top}", f"{target.address}/app")
    assert run_regsync("copy", *back).status == 0
    assert held(target, "app", image)


# Unchanged, moved, shared.


def test_an_unchanged_layout_costs_a_head_a_tag_and_nothing_is_written(source, seed, tmp_path):
    for name in ("a", "b"):
        for tag in ("v1", "v2"):
            seed.image().load_into(source.app, name, tag=tag)
    mappings = [{"from": name, "tags": tags("v1", "v2")} for name in ("a", "b")]
    none = {"defaults": {"artifacts": {"enabled": False}}}
    assert to_layout(tmp_path, source, *mappings, **none).statuses() == ["synced"] * 4
    disk = tmp_path / "disk"
    before = {name: (disk / name).stat().st_mtime_ns for name in files_of(disk)}
    counts(source)
    assert to_layout(tmp_path, source, *mappings, **none).statuses() == ["skipped"] * 4
    assert counts(source) == {"HEAD manifest": 4}
    assert before == {name: (disk / name).stat().st_mtime_ns for name in files_of(disk)}


def test_a_tag_that_moved_names_the_new_image_and_the_old_blobs_stay(source, seed, tmp_path):
    mapping = {"from": "app", "tags": tags("latest")}
    old = seed.image().load_into(source.app, "app", tag="latest")
    to_layout(tmp_path, source, mapping)
    new = seed.image().load_into(source.app, "app", tag="latest")
    assert to_layout(tmp_path, source, mapping).statuses() == ["synced"]
    assert names_of(tmp_path / "disk") == {"app:latest": new.top}
    assert check_layout(tmp_path / "disk") == set(new.contents())
    assert all(blob_path(tmp_path / "disk", digest).exists() for digest in old.contents())


def test_a_blob_of_several_repositories_is_read_and_written_once(source, seed, tmp_path):
    layer = seed.layer(50_000)
    names = ("a", "b/c", "d")
    images = [seed.image(layers=[layer]).load_into(source.app, name, tag="v1") for name in names]
    ran = to_layout(tmp_path, source, *({"from": name, "tags": tags("v1")} for name in names))
    assert ran.statuses() == ["synced"] * 3
    blobs = {blob for image in images for blob in image.blobs}
    assert source.journal.count("GET", "blob") == len(blobs)
    assert ran.totals["layers"]["mounted"] == 0
    check_layout(tmp_path / "disk")


def test_an_image_that_another_repository_of_the_layout_has_is_named_once_more(
    source, seed, tmp_path
):
    image = seed.index().load_into(source.app, "a", tag="v1").load_into(source.app, "b", tag="v1")
    to_layout(tmp_path, source, {"from": "a", "tags": tags("v1")})
    counts(source)
    assert to_layout(tmp_path, source, {"from": "b", "tags": tags("v1")}).statuses() == ["synced"]
    assert "GET blob" not in counts(source)
    assert names_of(tmp_path / "disk") == {"a:v1": image.top, "b:v1": image.top}


def test_equal_content_gives_equal_bytes_whatever_came_first(source, seed, tmp_path):
    for tag in ("v1", "v2", "v3"):
        seed.image().load_into(source.app, "app", tag=tag)
    bodies = list[bytes]()
    for number, order in enumerate((("v1", "v2", "v3"), ("v3", "v1"))):
        directory = tmp_path / str(number)
        directory.mkdir()
        for tag in order:
            to_layout(directory, source, {"from": "app", "tags": tags(tag)})
        to_layout(directory, source, {"from": "app", "tags": tags("v*")})
        bodies.append((directory / "disk" / "index.json").read_bytes())
    assert bodies[0] == bodies[1]


def test_platforms_are_trimmed_as_for_a_registry(source, target, seed, tmp_path):
    seed.index(platforms=("linux/amd64", "linux/arm64")).load_into(source.app, "app", tag="v1")
    mapping = {"from": "app", "tags": tags("v1"), "platforms": ["linux/arm64"]}
    assert to_layout(tmp_path, source, mapping).statuses() == ["synced"]
    assert to_layout(tmp_path, source, mapping).statuses() == ["skipped"]
    check_layout(tmp_path / "disk")
    ran = from_layout(tmp_path, {"target": target}, {"from": "app", "tags": tags("v1")})
    assert ran.statuses() == ["synced"]
    assert len(only(json.loads(target.app.manifest("app", "v1").body)["manifests"])) > 0  # type: ignore[union-attr]


# Artifacts.


def signed(seed: Seed, server: Server, repository: str = "app") -> tuple[Image, Image, Image]:
    """Load an image, its SBOM, and a signature of the SBOM."""
    image = seed.image().load_into(server.app, repository, tag="v1")
    sbom = seed.artifact(image, SBOM).load_into(server.app, repository)
    signature = seed.artifact(sbom, "application/vnd.example.signature").load_into(
        server.app, repository
    )
    return image, sbom, signature


def test_artifacts_travel_into_a_layout_and_out_of_it(source, target, seed, tmp_path):
    family = signed(seed, source)
    mapping = {"from": "app", "tags": tags("v1")}
    ran = to_layout(tmp_path, source, mapping)
    assert only(ran.images)["artifacts"]["synced"] == 2
    entries = index_of(tmp_path / "disk")["manifests"]
    subjects = {
        entry["digest"]: entry["annotations"].get("dev.regsync.subject") for entry in entries
    }
    image, sbom, signature = family
    assert subjects == {image.top: None, sbom.top: image.top, signature.top: sbom.top}
    ran = from_layout(tmp_path, {"target": target}, mapping)
    assert only(ran.images)["artifacts"]["synced"] == 2
    assert all(held(target, "app", each) for each in family)


def test_an_artifact_that_an_index_names_is_listed_as_an_artifact_too(
    source, target, seed, tmp_path
):
    image = seed.image()
    signature = seed.artifact(image, "application/vnd.example.signature")
    index = seed.index([image, signature]).load_into(source.app, "app", tag="v1")
    mapping = {"from": "app", "tags": tags("v1")}
    assert only(to_layout(tmp_path, source, mapping).images)["artifacts"]["synced"] == 1
    entries = index_of(tmp_path / "disk")["manifests"]
    assert {
        entry["digest"]: entry["annotations"].get("dev.regsync.subject") for entry in entries
    } == {index.top: None, signature.top: image.top}
    assert only(from_layout(tmp_path, {"target": target}, mapping).images)["status"] == "synced"
    target.journal.matching("PUT", "manifest", reference=signature.top).exactly(1)


def test_a_registry_without_the_api_gets_its_lists_from_a_layout(source, serve, seed, tmp_path):
    image, sbom, _ = signed(seed, source)
    mapping = {"from": "app", "tags": tags("v1")}
    to_layout(tmp_path, source, mapping)
    old = serve(referrers_api=False)
    assert from_layout(tmp_path, {"target": old}, mapping).status == 0
    listed = old.app.manifest("app", image.top.replace(":", "-"))
    assert listed is not None
    assert [part["digest"] for part in json.loads(listed.body)["manifests"]] == [sbom.top]


def test_cosigns_tags_are_tags_of_their_own_repository(source, target, seed, tmp_path):
    image = seed.image()
    signature = seed.image(sizes=(100,))
    tag = image.top.replace(":", "-") + ".sig"
    for name in ("a", "b"):
        image.load_into(source.app, name, tag="v1")
        signature.load_into(source.app, name, tag=tag)
    mappings = [{"from": name, "tags": tags("v*")} for name in ("a", "b")]
    to_layout(tmp_path, source, *mappings)
    assert names_of(tmp_path / "disk") == {
        "a:v1": image.top,
        "b:v1": image.top,
        f"a:{tag}": signature.top,
        f"b:{tag}": signature.top,
    }
    from_layout(tmp_path, {"target": target}, *mappings)
    assert target.app.tags("b") == {"v1": image.top, tag: signature.top}


# The state.


def test_the_state_knows_nothing_of_a_layout(source, seed, tmp_path):
    signed(seed, source)
    mapping = {"from": "app", "tags": tags("v1")}
    assert to_layout(tmp_path, source, mapping).status == 0
    known = rows(tmp_path / ".regsync")
    assert not [*known["held"], *known["tag"], *known["look"]]
    assert "layout" not in str(known["fact"])


def test_a_disk_that_was_swapped_is_filled_anew(source, seed, tmp_path):
    signed(seed, source)
    mapping = {"from": "app", "tags": tags("v1")}
    to_layout(tmp_path, source, mapping)
    first = (tmp_path / "disk" / "index.json").read_bytes()
    (tmp_path / "disk").rename(tmp_path / "other disk")
    ran = to_layout(tmp_path, source, mapping)
    assert (ran.statuses(), only(ran.images)["artifacts"]["synced"]) == (["synced"], 2)
    assert (tmp_path / "disk" / "index.json").read_bytes() == first
    check_layout(tmp_path / "disk")


def test_a_tag_whose_manifest_is_gone_is_absent(source, seed, tmp_path):
    image = seed.image().load_into(source.app, "app", tag="v1")
    mapping = {"from": "app", "tags": tags("v1")}
    to_layout(tmp_path, source, mapping)
    blob_path(tmp_path / "disk", image.top).unlink()
    assert to_layout(tmp_path, source, mapping).statuses() == ["synced"]
    assert check_layout(tmp_path / "disk") == set(image.contents())


def test_a_blob_that_was_lost_is_written_again_when_another_image_needs_it(source, seed, tmp_path):
    layer = seed.layer(1000)
    seed.image(layers=[layer]).load_into(source.app, "app", tag="v1")
    to_layout(tmp_path, source, {"from": "app", "tags": tags("v1")})
    lost = next(
        path
        for path in (tmp_path / "disk" / "blobs" / "sha256").iterdir()
        if path.read_bytes() == layer
    )
    lost.unlink()
    seed.image(layers=[layer]).load_into(source.app, "app", tag="v2")
    ran = to_layout(tmp_path, source, {"from": "app", "tags": tags("v1", "v2")})
    assert ran.statuses() == ["skipped", "synced"]
    check_layout(tmp_path / "disk")


# As a source.


def test_a_layout_costs_its_targets_what_a_registry_costs(target, seed, tmp_path):
    image = seed.image(sizes=(900, 2000, 300_000))
    make_layout(tmp_path / "disk", {"app:v1": image})
    no_artifacts = {"defaults": {"artifacts": {"enabled": False}}}
    mapping = {"from": "app", "tags": tags("v1")}
    ran = from_layout(tmp_path, {"target": target}, mapping, **no_artifacts)
    assert ran.statuses() == ["synced"]
    assert held(target, "app", image)
    assert counts(target) == {
        "HEAD manifest": 1,
        "POST upload_start": 4,
        "PUT upload": 4,
        "PUT manifest": 1,
    }
    ran = from_layout(tmp_path, {"target": target}, mapping, **no_artifacts)
    assert ran.statuses() == ["skipped"]
    assert counts(target) == {"HEAD manifest": 1}


# The layout takes a blob at once, and the registry's session may be a moment behind it.
def test_a_layout_and_a_registry_as_targets_of_one_source(source, target, seed, tmp_path):
    image, sbom, signature = signed(seed, source)
    registries = {"source": source, "target": target, "disk": {"url": "oci-layout:disk"}}
    text = document(registries, {"from": "app", "tags": tags("v1")}, defaults=ALL)
    assert run_file(tmp_path, "both.yaml", text).statuses() == ["synced"] * 2
    blobs = {blob for each in (image, sbom, signature) for blob in each.blobs}
    assert source.journal.count("GET", "blob") == len(blobs - {digest_of(b"{}")})
    check_layout(tmp_path / "disk")
    assert held(target, "app", image)
    assert run_file(tmp_path, "both.yaml", text).statuses() == ["skipped"] * 2


def test_a_copy_from_layout_to_layout_gives_the_same_bytes(source, seed, tmp_path):
    signed(seed, source)
    mapping = {"from": "app", "tags": tags("v1")}
    to_layout(tmp_path, source, mapping)
    registries = {"source": {"url": "oci-layout:disk"}, "next": {"url": "oci-layout:next"}}
    ran = run_file(tmp_path, "next.yaml", document(registries, mapping, defaults=ALL))
    assert ran.statuses() == ["synced"]
    assert files_of(tmp_path / "next") == files_of(tmp_path / "disk")
    for name in files_of(tmp_path / "next"):
        assert (tmp_path / "next" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes()


@pytest.mark.parametrize("damage", ["gone", "cut"])
@pytest.mark.parametrize("what", ["layer", "child"])
def test_a_recheck_mends_an_image_of_which_a_disk_has_lost_something(
    source, seed, tmp_path, damage, what
):
    image = seed.index([seed.image(), seed.image()]).load_into(source.app, "app", tag="v1")
    whole = seed.image().load_into(source.app, "app", tag="v2")
    seed.artifact(whole, SBOM).load_into(source.app, "app")
    wanted = {"from": "app", "tags": tags("v*")}
    assert to_layout(tmp_path, source, wanted).status == 0
    lost = json.loads(image.body)["manifests"][1]["digest"]
    if what == "layer":
        lost = json.loads(image.contents()[lost])["layers"][0]["digest"]
    if damage == "gone":
        blob_path(tmp_path / "disk", lost).unlink()
    else:
        os.truncate(blob_path(tmp_path / "disk", lost), 10)
    assert to_layout(tmp_path, source, wanted).statuses() == ["skipped"] * 2

    source.journal.clear()
    text = (tmp_path / "out.yaml").read_text()
    ran = run_file(tmp_path, "out.yaml", text, "--recheck")
    assert ran.statuses() == ["synced", "skipped"], ran.err
    check_layout(tmp_path / "disk")
    assert source.journal.count("GET", "blob") == (1 if what == "layer" else 0)
    again = run_file(tmp_path, "out.yaml", text, "--recheck")
    assert again.statuses() == ["skipped"] * 2


@pytest.mark.parametrize("damage", ["changed", "cut", "longer", "gone", "linked"])
def test_nothing_is_pushed_of_an_image_that_is_not_whole(target, seed, tmp_path, damage):
    good = seed.image()
    bad = seed.image(sizes=(700, 800))
    disk = make_layout(tmp_path / "disk", {"app:good": good, "app:bad": bad})
    digest = json.loads(bad.body)["layers"][1]["digest"]
    path = blob_path(disk, digest)
    body = path.read_bytes()
    path.unlink()
    if damage == "changed":
        path.write_bytes(b"x" * len(body))
    elif damage == "cut":
        path.write_bytes(body[:-1])
    elif damage == "longer":
        path.write_bytes(body + b"x")
    elif damage == "linked":
        (tmp_path / "outside").write_bytes(body)
        path.symlink_to(tmp_path / "outside")
    ran = from_layout(tmp_path, {"target": target}, {"from": "app", "tags": tags("*")})
    assert (ran.status, sorted(ran.statuses())) == (1, ["failed", "synced"])
    assert target.app.tags("app") == {"good": good.top}
    error = only([each for each in ran.images if each["status"] == "failed"])["error"]
    assert digest in error["message"]
    assert error["side"] == "source"
    if damage != "changed":  # what has the right size is found out when it is read
        pushed = target.journal.matching("PUT", "upload", status=201)
        assert len(pushed) == len(good.blobs)


def test_what_other_tools_name_is_found(target, seed, tmp_path):
    image = seed.index(format="docker")
    for number, name in enumerate(("v1", "host.example/team/app:v1", "team/app:v1")):
        make_layout(tmp_path / str(number), {name: image})
        where = f"oci-layout:{tmp_path / str(number)}//team/app:v1"
        assert run_regsync("copy", where, f"{target.address}/r{number}:v1").status == 0
        assert held(target, f"r{number}", image)


def test_artifacts_that_other_tools_left_without_a_word_are_found(target, seed, tmp_path):
    """oras writes the artifact as an entry without a name, and nothing of its subject."""
    image = seed.image()
    sbom = seed.artifact(image, SBOM)
    disk = make_layout(tmp_path / "disk", {"v1": image, "": sbom})
    ran = run_regsync("copy", "--json", f"oci-layout:{disk}//app:v1", f"{target.address}/app:v1")
    assert only(ran.images)["artifacts"]["synced"] == 1
    assert held(target, "app", sbom)


@pytest.mark.parametrize("damage", ["absent", "damaged", "a folder"])
def test_an_entry_without_a_name_that_cannot_be_read_is_warned_of(damage, target, seed, tmp_path):
    """It may refer to any image, and most images have nothing to do with it."""
    image = seed.image()
    sbom = seed.artifact(image, SBOM)
    other = seed.artifact(image, SBOM)
    disk = make_layout(tmp_path / "disk", {"app:v1": image, "": sbom}, other.descriptor())
    path = blob_path(disk, other.top)
    if damage == "damaged":
        path.write_bytes(other.body[:-1] + b" ")
    elif damage == "a folder":
        path.mkdir()
    ran = run_regsync("copy", "--json", f"oci-layout:{disk}//app:v1", f"{target.address}/app:v1")
    assert ran.status == 0
    assert only(ran.images)["artifacts"] == {"synced": 1, "skipped": 0, "failed": 0, "stripped": 0}
    (warning,) = [line for line in ran.err.splitlines() if line.startswith("warning: ")]
    assert str(disk) in warning
    assert f"{other.top} (" in warning


def test_a_fallback_list_in_a_layout_is_read(target, seed, tmp_path):
    image = seed.image()
    sbom = seed.artifact(image, SBOM)
    listed = seed.fallback_index([sbom])
    names = {"app:v1": image, "": sbom, f"app:{image.top.replace(':', '-')}": listed}
    disk = make_layout(tmp_path / "disk", names)
    ran = run_regsync("copy", "--json", f"oci-layout:{disk}//app:v1", f"{target.address}/app:v1")
    assert only(ran.images)["artifacts"]["synced"] == 1


# What a configuration may say.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("auth_type", "anonymous"),
        ("ca_file", "ca.pem"),
        ("proxy", "http://proxy.example:1"),
        ("max_concurrent", 5),
        ("head_first", True),
    ],
)
def test_a_layout_has_no_login_and_no_connection(source, tmp_path, field, value):
    ran = to_layout(tmp_path, source, {"from": "app"}, more={field: value})
    assert ran.status == 3
    assert f"registries.disk.{field}" in ran.out
    assert "image layout" in ran.out


@pytest.mark.parametrize("url", ["oci-layout:", "oci-layout://disk", "oci-layout:a//b"])
def test_a_layout_needs_a_directory(url, tmp_path, source):
    assert to_layout(tmp_path, source, {"from": "app"}, more={"url": url}).status == 3


def test_assume_is_for_layouts_alone(source, target, tmp_path):
    registries = {"source": source, "target": {"url": target.url, "assume": "far.txt"}}
    ran = run_file(tmp_path, "c.yaml", document(registries, {"from": "app"}))
    assert ran.status == 3
    assert "oci-layout:PATH" in ran.out


def test_a_run_after_a_lost_rename_writes_the_index_and_asks_for_no_blob(source, seed, tmp_path):
    """`index.json.partial` is whole, and was not renamed, or its new name was lost."""
    seed.image().load_into(source.app, "app", tag="v1")
    mapping = {"from": "app", "tags": tags("v*")}
    assert to_layout(tmp_path, source, mapping).statuses() == ["synced"]
    disk = tmp_path / "disk"
    before = (disk / "index.json").read_bytes()
    (disk / "index.json").rename(disk / "index.json.partial")
    files = files_of(disk)
    source.journal.clear()

    ran = run_regsync("sync", "-c", str(tmp_path / "out.yaml"), "--dry-run")
    assert "index.json is missing" in ran.err
    assert files_of(disk) == files
    assert to_layout(tmp_path, source, mapping).status == 0
    assert (disk / "index.json").read_bytes() == before
    assert not (disk / "index.json.partial").exists()
    assert source.journal.count("GET", "blob") == 0
    assert to_layout(tmp_path, source, mapping).statuses() == ["skipped"]


def test_one_process_writes_a_layout_so_that_it_takes_no_shard(source, tmp_path):
    registries = {"source": source, "disk": {"url": "oci-layout:disk"}}
    text = document(registries, {"from": "app", "tags": tags("v1")})
    ran = run_file(tmp_path, "c.yaml", text, "--shard", "0/2")
    assert (ran.status, "--shard" in ran.out) == (3, True)


def test_a_layout_may_not_copy_a_repository_onto_itself(tmp_path):
    registries = {"source": {"url": "oci-layout:disk"}, "same": {"url": "oci-layout:./disk"}}
    ran = run_file(tmp_path, "c.yaml", document(registries, {"from": "app"}))
    assert (ran.status, "same repository" in ran.out) == (3, True)


def test_a_dry_run_writes_nothing_and_says_what_it_would(source, seed, tmp_path):
    image = seed.image().load_into(source.app, "app", tag="v1")
    registries = {"source": source, "disk": {"url": "oci-layout:disk"}}
    text = document(registries, {"from": "app", "tags": tags("v1")})
    ran = run_file(tmp_path, "c.yaml", text, "--dry-run")
    assert (ran.status, ran.statuses()) == (0, ["would_sync"])
    assert ran.totals["bytes"] == image.size
    assert not (tmp_path / "disk").exists()
    room = only(ran.totals["layouts"])
    assert room["target"] == f"oci-layout:{tmp_path / 'disk'}"
    assert room["to_write"] == image.size + len(image.body)
    assert room["left_out"] == 0
    assert room["free"] > 0


def test_what_is_in_a_layout_has_no_age(target, seed, tmp_path):
    make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    ran = from_layout(tmp_path, {"target": target}, {"from": "app", "min_age": "3d"})
    assert (ran.status, "min_age" in ran.out) == (3, True)
    ran = from_layout(tmp_path, {"target": target}, {"from": "app", "min_age": "0"})
    assert ran.status == 0


# The other commands.


def test_an_audit_reads_a_layout_and_its_receipt_thins_another(source, seed, tmp_path):
    image, _, _ = signed(seed, source)
    to_layout(tmp_path, source, {"from": "app", "tags": tags("v1")})
    config = str(tmp_path / "out.yaml")
    receipt = str(tmp_path / "far.txt")
    ran = run_regsync("audit", "-c", config, "--read", "--receipt", receipt)
    assert (ran.status, ran.out) == (0, "")
    registries = {"source": source, "disk": {"url": "oci-layout:thin", "assume": "far.txt"}}
    text = document(registries, {"from": "app", "tags": tags("v1")}, defaults=ALL)
    assert run_file(tmp_path, "thin.yaml", text).status == 0
    assert not any(
        blob_path(tmp_path / "thin", layer["digest"]).exists()
        for layer in json.loads(image.body)["layers"]
    )

    for path, found in ((next(iter(image.blobs)), "incomplete"), (image.top, "missing")):
        blob_path(tmp_path / "disk", path).unlink()
        ran = run_regsync("audit", "-c", config)
        assert ran.status == 1
        assert ran.out.startswith(found)


@pytest.mark.parametrize("disk", ["absent", "empty folder", "empty layout"])
@pytest.mark.parametrize("names", [tags("v1"), tags("v*")], ids=["names", "pattern"])
def test_a_receipt_stays_when_the_disk_that_names_the_images_is_away(
    disk, names, target, seed, tmp_path
):
    make_layout(tmp_path / "disk", {"app:v1": seed.image()})
    assert from_layout(tmp_path, {"target": target}, {"from": "app", "tags": names}).status == 0
    receipt = tmp_path / "far.txt"
    audit = ("audit", "-c", str(tmp_path / "in.yaml"), "--receipt", str(receipt))
    assert run_regsync(*audit).status == 0
    before = receipt.read_text()
    assert len(before.splitlines()) > 2

    shutil.rmtree(tmp_path / "disk")
    if disk != "absent":
        (tmp_path / "disk").mkdir()
    if disk == "empty layout":
        make_layout(tmp_path / "disk", {})
    ran = run_regsync(*audit)
    assert ran.status == 2
    assert receipt.read_text() == before
    assert (
        f"error: {receipt} is left as it was: images whose source could not be read: 1\n" in ran.err
    )
    assert str(tmp_path / "disk") in ran.err
    assert "mounted" in ran.err

    receipt.unlink()
    assert run_regsync(*audit).status == 2
    assert receipt.read_text() == ""


def test_a_lock_of_a_layout_is_the_same_wherever_it_is_mounted(target, seed, tmp_path):
    locks = list[str]()
    registries = {"source": {"url": "oci-layout:disk"}, "target": target}
    text = document(registries, {"from": "app", "tags": tags("v*")})
    disk = make_layout(tmp_path / "disk", {"app:v1": seed.image(), "app:v2": seed.index()})
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "disk").symlink_to(disk)
        (tmp_path / name / "mirror.yaml").write_text(text)
        assert run_regsync("lock", "-c", str(tmp_path / name / "mirror.yaml")).status == 0
        lock = (tmp_path / name / "mirror.lock").read_text()
        locks.append(json.loads(lock.splitlines()[1])["mapping"])
        assert str(tmp_path) not in lock
    assert locks == ["oci-layout:disk//app"] * 2
    ran = run_regsync("sync", "--json", "--locked", "-c", str(tmp_path / "here" / "mirror.yaml"))
    assert ran.statuses() == ["synced"] * 2


def test_nobody_logs_in_to_a_layout(source, tmp_path):
    registries = {"source": source, "disk": {"url": "oci-layout:disk"}}
    (tmp_path / "c.yaml").write_text(document(registries, {"from": "app"}))
    ran = run_regsync("auth", "check", "--json", "-c", str(tmp_path / "c.yaml"))
    assert [row["registry"] for row in ran.report["access"]] == ["source"]
    assert not (tmp_path / "disk").exists()


def test_a_source_that_breaks_is_gone_on_with_where_the_file_ends(source, seed, tmp_path):
    image = seed.image(sizes=(2_000_000,)).load_into(source.app, "app", tag="v1")
    layer = json.loads(image.body)["layers"][0]["digest"]
    source.app.faults.on("GET", "blob", reference=layer).nth(1).drop(after=1_500_000)
    ran = to_layout(tmp_path, source, {"from": "app", "tags": tags("v1")})
    assert ran.statuses() == ["synced"], ran.err
    check_layout(tmp_path / "disk")
    ranges = [
        entry.headers.get("range")
        for entry in source.journal.matching("GET", "blob", reference=layer)
    ]
    assert ranges[0] is None
    assert len(ranges) == 2
    assert ranges[1] is not None


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_a_killed_run_had_written_is_taken_over_when_it_is_right(
    source, seed, tmp_path, is_whole
):
    image = seed.image(sizes=(5000,)).load_into(source.app, "app", tag="v1")
    layer = json.loads(image.body)["layers"][0]["digest"]
    disk = make_layout(tmp_path / "disk", {})
    left = blob_path(disk, layer).with_suffix(".partial")
    left.write_bytes(image.contents()[layer] if is_whole else b"x" * len(image.contents()[layer]))
    assert to_layout(tmp_path, source, {"from": "app", "tags": tags("v1")}).status == 0
    assert source.journal.count("GET", "blob", reference=layer) == (0 if is_whole else 1)
    assert check_layout(disk) == set(image.contents())
    assert not left.exists()


def test_a_million_entries_are_refused_in_bounded_memory(tmp_path):
    disk = make_layout(tmp_path / "disk", {})
    entry = '{"mediaType":"a/b","digest":"sha256:' + "0" * 64 + '","size":1}'
    (disk / "index.json").write_text(
        '{"schemaVersion":2,"manifests":[' + ",".join([entry] * 400_000) + "]}"
    )
    ran = run_regsync("tags", f"oci-layout:{disk}//app")
    assert ran.status == 2
    assert "CONTENT_ERROR" in ran.err
    assert "1000000 values" in ran.err


def test_indexes_that_name_each_other_end(target, seed, tmp_path):
    """A digest cannot name what names it; entries may, and indexes may be nested without end."""
    nested = seed.index()
    for _ in range(6):
        nested = seed.index([nested])
    disk = make_layout(tmp_path / "disk", {"app:v1": nested})
    ran = run_regsync("copy", f"oci-layout:{disk}//app:v1", f"{target.address}/app:v1")
    assert ran.status == 2
    assert "nested more than" in ran.err
    assert not target.journal.count("PUT")
