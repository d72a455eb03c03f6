"""Thin layouts: what the far side has is left out, looked for there, and named where it is missing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from conformance.client.attachments import SBOM
from conformance.content.images import Image, Seed
from conformance.journal import Entries
from conformance.server.sockets import Server
from tests.ends import Ran, document, held, only, run_regsync, tags
from tests.layouts import blob_path, check_layout, index_of

MAPPING = {"from": "app", "tags": tags("v*")}


@pytest.fixture
def seed() -> Seed:
    return Seed(41)


def layers_of(image: Image) -> list[str]:
    return [layer["digest"] for layer in json.loads(image.body)["layers"]]


def run(
    directory: Path, registries: dict[str, Any], *mappings: Any, more: tuple[str, ...] = ()
) -> Ran:
    (directory / "mirror.yaml").write_text(
        document(registries, *(mappings or (MAPPING,)), defaults={"artifacts": {}})
    )
    return run_regsync("sync", "--json", "-q", "-c", str(directory / "mirror.yaml"), *more)


def outside(directory: Path, source: Server, assume: Any, *mappings: Any, **more: Any) -> Ran:
    disk = {"url": "oci-layout:disk", "assume": assume}
    return run(directory, {"source": source, "disk": disk}, *mappings, **more)


def inside(directory: Path, target: Server, *mappings: Any) -> Ran:
    return run(directory, {"source": {"url": "oci-layout:disk"}, "target": target}, *mappings)


def write_receipt(directory: Path, *digests: str, repository: str = "app") -> str:
    lines = [f"{digest} {repository}\n" for digest in sorted(digests)]
    (directory / "far.txt").write_text("".join(lines))
    return "far.txt"


def left_out(directory: Path) -> list[str]:
    """Return the lines of what was left out of the layout."""
    annotations = index_of(directory / "disk").get("annotations", {})
    return list(annotations.get("dev.regsync.left-out", "").splitlines())


def test_what_the_receipt_names_is_neither_asked_for_nor_written(source, seed, tmp_path):
    base = seed.layer(50_000)
    image = seed.image(layers=[base, seed.layer(300)]).load_into(source.app, "app", tag="v1")
    shared, own = layers_of(image)
    ran = outside(tmp_path, source, write_receipt(tmp_path, shared))
    assert ran.statuses() == ["synced"]
    assert source.journal.count("GET", "blob") == 2, "its own layer and the config"
    assert left_out(tmp_path) == [f"{shared} app"]
    assert not blob_path(tmp_path / "disk", shared).exists()
    assert own in check_layout(tmp_path / "disk", left_out=frozenset({shared}))
    assert only(ran.images)["blobs"] == {"transferred": 2, "mounted": 0, "skipped": 1}


def test_configs_and_manifests_are_always_written(source, seed, tmp_path):
    image = seed.index().load_into(source.app, "app", tag="v1")
    outside(tmp_path, source, write_receipt(tmp_path, *image.contents()))
    there = {path.name for path in (tmp_path / "disk" / "blobs" / "sha256").iterdir()}
    layers = {line.partition(" ")[0][7:] for line in left_out(tmp_path)}
    assert there | layers == {digest[7:] for digest in image.contents()}
    assert not there & layers
    children = [part["digest"] for part in json.loads(image.body)["manifests"]]
    configs = [json.loads(image.contents()[child])["config"]["digest"] for child in children]
    for digest in (image.top, *children, *configs):
        assert digest[7:] in there


def test_a_second_run_writes_nothing_and_a_full_one_what_was_left_out(source, seed, tmp_path):
    image = seed.image().load_into(source.app, "app", tag="v1")
    receipt = write_receipt(tmp_path, *layers_of(image))
    outside(tmp_path, source, receipt)
    first = (tmp_path / "disk" / "index.json").read_bytes()
    for more in ((), ("--recheck",)):
        assert outside(tmp_path, source, receipt, more=more).statuses() == ["skipped"]
    assert (tmp_path / "disk" / "index.json").read_bytes() == first

    image.load_into(source.app, "app", tag="v2")
    seed.image(layers=[image.contents()[layers_of(image)[0]]]).load_into(
        source.app, "app", tag="v3"
    )
    assert run(tmp_path, {"source": source, "disk": {"url": "oci-layout:disk"}}).status == 0
    assert f"{layers_of(image)[0]} app" not in left_out(tmp_path)


def test_recheck_writes_what_the_far_side_has_no_longer(source, seed, tmp_path):
    image = seed.image(layers=[seed.layer(300), seed.layer(400)])
    first, second = layers_of(image.load_into(source.app, "app", tag="v1"))
    outside(tmp_path, source, write_receipt(tmp_path, first, second))

    for named in ([first], []):
        assume = write_receipt(tmp_path, *named)
        source.journal.clear()
        assert outside(tmp_path, source, assume).statuses() == ["skipped"]
        assert source.journal.count("GET", "blob") == 0
        assert outside(tmp_path, source, assume, more=("--recheck",)).statuses() == ["synced"]
        assert source.journal.count("GET", "blob") == 1
        assert left_out(tmp_path) == [f"{digest} app" for digest in named]


@pytest.mark.parametrize("repository", ["app", "ghcr.io/org/app"])
def test_a_receipt_of_a_layout_has_what_was_left_out_of_it(source, seed, tmp_path, repository):
    """A one-way diode, as docs/recipes.md has it: each transfer's receipt is made outside."""
    base = seed.layer(9_000)
    first = layers_of(seed.image(layers=[base]).load_into(source.app, "app", tag="v1"))
    mapping = {**MAPPING, "to": repository}
    write_receipt(tmp_path)
    for week in (1, 2, 3):
        source.journal.clear()
        assert outside(tmp_path, source, ["far.txt"], mapping).status == 0
        assert source.journal.count("GET", "blob") == 1 + (week == 1), "configs, and the layer once"
        assert left_out(tmp_path) == [f"{digest} {repository}" for digest in first if week > 1]

        config = os.fspath(tmp_path / "mirror.yaml")
        receipt = os.fspath(tmp_path / "far.txt")
        assert run_regsync("audit", "-c", config, "--receipt", receipt).status == 0
        shutil.rmtree(tmp_path / "disk")


def test_an_empty_disk_each_week_gets_what_the_receipt_does_not_name(
    source, target, seed, tmp_path
):
    """As docs/recipes.md has it: the first receipt is empty, each week's is made inside."""
    base = seed.layer(9_000)
    write_receipt(tmp_path)
    for week in (1, 2, 3):
        if week < 3:  # the third week has nothing new
            image = seed.image(layers=[base, seed.layer(week)])
            image.load_into(source.app, "app", tag=f"v{week}")
        source.journal.clear()
        assert outside(tmp_path, source, ["far.txt"]).status == 0
        configs = min(week, 2)
        layers = {1: 2, 2: 1, 3: 0}[week]
        assert source.journal.count("GET", "blob") == configs + layers

        assert inside(tmp_path, target).status == 0
        config = os.fspath(tmp_path / "mirror.yaml")
        receipt = os.fspath(tmp_path / "far.txt")
        assert run_regsync("audit", "-c", config, "--receipt", receipt).status == 0
        shutil.rmtree(tmp_path / "disk")


# Inside.


def test_what_was_left_out_is_found_at_the_target_before_anything_is_pushed(
    source, target, seed, tmp_path
):
    base = seed.layer(50_000)
    old = seed.image(layers=[base]).load_into(target.app, "app", tag="v0")
    new = seed.image(layers=[base, seed.layer(300)]).load_into(source.app, "app", tag="v1")
    outside(tmp_path, source, write_receipt(tmp_path, *layers_of(old)))
    ran = inside(tmp_path, target)
    assert ran.statuses() == ["synced"]
    assert held(target, "app", new)
    heads = target.journal.matching("HEAD", "blob")
    assert [entry.reference for entry in heads][:1] == layers_of(old)
    Entries(heads[:1], "what was left out").before(target.journal.matching("POST PUT PATCH"))
    assert target.journal.count("PUT", "upload") == 2


@pytest.mark.parametrize("mounts", [True, False])
@pytest.mark.provokes("source_written", "blob_pulled_twice", "manifest_invented")
def test_a_new_repository_gets_it_from_the_one_of_its_line(source, serve, seed, tmp_path, mounts):
    target = serve(mounts=mounts)
    base = seed.layer(50_000)
    old = seed.image(layers=[base]).load_into(target.app, "old/app", tag="v0")
    new = seed.image(layers=[base, seed.layer(300)]).load_into(source.app, "app", tag="v1")
    outside(tmp_path, source, write_receipt(tmp_path, *layers_of(old), repository="old/app"))
    ran = inside(tmp_path, target)
    assert ran.statuses() == ["synced"], ran.err
    assert held(target, "app", new)
    assert target.journal.count("GET", "blob") == (0 if mounts else 1)
    assert only(ran.images)["blobs"]["mounted"] == (1 if mounts else 0)


def test_what_is_nowhere_fails_that_image_for_that_target_and_is_named(
    source, serve, seed, tmp_path
):
    base = seed.layer(50_000)
    has = serve()
    lacks = serve()
    old = seed.image(layers=[base]).load_into(has.app, "app", tag="v0")
    new = seed.image(layers=[base]).load_into(source.app, "app", tag="v1")
    other = seed.image().load_into(source.app, "app", tag="v2")
    outside(tmp_path, source, write_receipt(tmp_path, *layers_of(old)))
    registries = {"source": {"url": "oci-layout:disk"}, "has": has, "lacks": lacks}
    ran = run(tmp_path, registries)
    assert (ran.status, sorted(ran.statuses())) == (1, ["failed", "synced", "synced", "synced"])
    assert held(has, "app", new)
    assert lacks.app.tags("app") == {"v2": other.top}
    assert lacks.journal.count("PUT", "upload") == len(other.blobs)
    error = only([image for image in ran.images if image["status"] == "failed"])["error"]
    assert layers_of(old)[0] in error["message"]
    assert "left out" in error["message"]
    assert "assume" in error["hint"]


def test_artifacts_are_thin_too(source, target, seed, tmp_path):
    image = seed.image().load_into(source.app, "app", tag="v1")
    sbom = seed.artifact(image, SBOM).load_into(source.app, "app")
    assert outside(tmp_path, source, write_receipt(tmp_path, "sha256:" + "0" * 64)).status == 0
    assert inside(tmp_path, target).status == 0
    assert held(target, "app", sbom)


# What cannot be read.


@pytest.mark.parametrize("damage", ["absent", "no line", "a digest that is none"])
def test_a_receipt_that_cannot_be_read_stops_before_any_request(source, tmp_path, damage):
    if damage != "absent":
        (tmp_path / "far.txt").write_text("hello\n" if damage == "no line" else "sha256:0 app\n")
    ran = outside(tmp_path, source, "far.txt")
    assert ran.status == 3
    assert "far.txt" in ran.out
    assert "assume" in ran.out
    assert not source.journal.entries
