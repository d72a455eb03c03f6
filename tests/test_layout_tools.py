"""Image layouts and other tools: what they read of ours, what we read of theirs, OCI's own rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conformance.client.attachments import SBOM
from conformance.client.copies import fetch_http, identical
from conformance.content.images import Image, Seed
from conformance.content.shapes import shapes
from conformance.programs import skopeo
from tests.ends import held, only, run_regsync
from tests.layouts import blob_path, check_layout, digest_of, index_of, make_layout, names_of
from tests.thinning import thorough

slow = pytest.mark.slow

OCI = ("oci.image.manifest", "oci.image.index")
PLAIN = ("--dest-tls-verify=false",)


@pytest.fixture
def seed() -> Seed:
    return Seed(31)


@pytest.mark.process
@slow
@pytest.mark.parametrize("index", [False, True], ids=["image", "index"])
def test_skopeo_inspects_and_copies_by_our_names(source, target, seed, tmp_path, index):
    image = seed.index() if index else seed.image()
    image.load_into(source.app, "team/sub/app", tag="v1.2")
    disk = tmp_path / "disk"
    assert (
        run_regsync("copy", f"{source.address}/team/sub/app:v1.2", f"oci-layout:{disk}").status == 0
    )
    found = skopeo("inspect", "--raw", f"oci:{disk}:team/sub/app:v1.2", home=tmp_path)
    assert digest_of(found) == image.top
    there = f"docker://{target.address}/copied:v1"
    skopeo("copy", "--all", *PLAIN, f"oci:{disk}:team/sub/app:v1.2", there, home=tmp_path)
    assert identical(fetch_http(target.address, "copied", "v1"), image.contents())


@slow
def test_what_skopeo_writes_is_read(target, seed, tmp_path):
    one = seed.image()
    two = seed.image()
    made = make_layout(tmp_path / "made", {"one": one, "two": two})
    for name in ("v1", "team/app:v2", "host.example/team/app:v3"):
        which = "two" if "v2" in name else "one"
        skopeo("copy", f"oci:{made}:{which}", f"oci:{tmp_path / 'disk'}:{name}", home=tmp_path)
    layout = f"oci-layout:{tmp_path / 'disk'}"
    for tag, image in (("v2", two), ("v3", one)):
        where = (f"{layout}//team/app:{tag}", f"{target.address}/app:{tag}")
        assert run_regsync("copy", *where).status == 0
        assert held(target, "app", image)


@slow
def test_skopeo_and_we_write_one_layout_by_turns(source, seed, tmp_path):
    theirs = seed.image()
    made = make_layout(tmp_path / "made", {"one": theirs})
    ours = seed.image().load_into(source.app, "app", tag="v1")
    disk = tmp_path / "disk"
    skopeo("copy", f"oci:{made}:one", f"oci:{disk}:team/app:v1", home=tmp_path)
    assert run_regsync("copy", f"{source.address}/app:v1", f"oci-layout:{disk}").status == 0
    skopeo("copy", f"oci:{made}:one", f"oci:{disk}:team/app:v2", home=tmp_path)
    assert run_regsync("copy", f"{source.address}/app:v1", f"oci-layout:{disk}//app:v2").status == 0
    assert names_of(disk) == {
        "team/app:v1": theirs.top,
        "team/app:v2": theirs.top,
        "app:v1": ours.top,
        "app:v2": ours.top,
    }
    check_layout(disk)


# oras, in the shapes that its version 1.3 writes.

CREATED = "org.opencontainers.image.created"


def make_by_oras(disk: Path, names: dict[str, Image], *unnamed: Image) -> Path:
    """Write a layout as oras does: artifacts and children of indexes are entries without a name."""
    make_layout(disk, names)
    document = index_of(disk)
    for entry in document["manifests"]:
        entry["annotations"][CREATED] = "2026-11-23T07:35:31Z"
    for image in unnamed:
        document["manifests"].append(image.descriptor())
        for digest, body in image.contents().items():
            blob_path(disk, digest).write_bytes(body)
    (disk / "index.json").write_text(json.dumps(document))
    return disk


@pytest.mark.parametrize("name", ["v1", "team/app:v1"], ids=["tag", "name"])
def test_what_oras_copies_with_its_referrers_is_read_with_them(target, seed, tmp_path, name):
    """`oras cp -r ... --to-oci-layout DIR:TAG`, or `--to-oci-layout-path DIR REPO:TAG`."""
    children = [seed.image(), seed.image()]
    image = seed.index(children)
    sbom = seed.artifact(image, SBOM)
    disk = make_by_oras(tmp_path / "disk", {name: image}, sbom, *children)
    where = f"oci-layout:{disk}//team/app:v1"
    ran = run_regsync("copy", "--json", where, f"{target.address}/app:v1")
    assert (ran.status, only(ran.images)["artifacts"]["synced"]) == (0, 1)
    assert held(target, "app", image)
    assert held(target, "app", sbom)


def test_what_oras_has_tagged_twice_are_two_tags(seed, tmp_path):
    one = seed.image()
    disk = make_by_oras(tmp_path / "disk", {"v1": seed.image(), "v2": one, "latest": one})
    tags = run_regsync("tags", f"oci-layout:{disk}//whatever").out.split()
    assert sorted(tags) == ["latest", "v1", "v2"]


def test_a_backup_by_oras_has_its_lists_as_tags(target, seed, tmp_path):
    """`oras backup --include-referrers` from a registry without the API of referrers."""
    image = seed.image()
    sbom = seed.artifact(image, SBOM)
    listed = seed.fallback_index([sbom])
    names = {image.top.replace(":", "-"): listed, "v1": image}
    disk = make_by_oras(tmp_path / "disk", names, sbom)
    ran = run_regsync("copy", "--json", f"oci-layout:{disk}//app:v1", f"{target.address}/app:v1")
    assert (ran.status, only(ran.images)["artifacts"]["synced"]) == (0, 1)
    assert held(target, "app", sbom)


def test_oras_and_we_write_one_layout_by_turns(source, seed, tmp_path):
    oras = shutil.which("oras")
    if oras is None:
        pytest.skip("there is no oras here")

    def run(*command: str) -> str:
        done = subprocess.run(
            [oras, *command], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout

    image = seed.image().load_into(source.app, "app", tag="v1")
    seed.artifact(image, SBOM).load_into(source.app, "app")
    disk = tmp_path / "disk"
    where = f"{source.address}/app:v1"
    assert run_regsync("copy", where, f"oci-layout:{disk}").status == 0
    raw = run("manifest", "fetch", "--oci-layout-path", str(disk), "app:v1")
    assert raw.strip().encode() == image.body.strip()
    found = json.loads(
        run("discover", "--format", "json", "--oci-layout-path", str(disk), "app:v1")
    )
    assert len(found["referrers"]) == 1

    (tmp_path / "a.txt").write_text("a")
    run("push", "--oci-layout-path", str(disk), "team/new:v9", "a.txt:text/plain")
    assert run_regsync("copy", where, f"oci-layout:{disk}//app:v2").status == 0
    assert names_of(disk).keys() == {"app:v1", "app:v2", "team/new:v9"}
    check_layout(disk)


# Every shape of the harness.

SHAPES = [shape for shape in shapes().values() if not shape.refused]


LARGE = {"index-of-1000", "1000-layers", "referrers-many"}  # each takes as long as all others
PARAMS = [pytest.param(shape, id=shape.name) for shape in SHAPES]


# A layout does not look into what it keeps: an ordinary run has every third shape.
@pytest.mark.parametrize(
    "shape",
    [
        thorough(param) if number % 3 or param.id in LARGE else param
        for number, param in enumerate(PARAMS)
    ],
)
def test_every_shape_goes_there_and_back(serve, shape, tmp_path):
    sample = shape.build()
    source = serve(**shape.options)
    target = serve(**shape.options)
    sample.image.load_into(source.app, "app", tag="v1")
    for image in sample.attached:
        image.load_into(source.app, "app")
    disk = tmp_path / "disk"
    there = run_regsync("copy", f"{source.address}/app:v1", f"oci-layout:{disk}")
    assert there.status == 0, there.err
    back = run_regsync("copy", f"oci-layout:{disk}//app:v1", f"{target.address}/app:v1")
    assert back.status == 0, back.err
    assert held(target, "app", sample.image)
    check_rules(disk)


def check_rules(layout: Path) -> None:
    """Hold a layout against OCI's image-layout.md and its schemas for `index.json`."""
    version = json.loads((layout / "oci-layout").read_text())
    assert version == {"imageLayoutVersion": "1.0.0"}
    index = index_of(layout)
    assert index["schemaVersion"] == 2
    assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    for entry in index["manifests"]:
        check_descriptor(entry)


def check_descriptor(entry: dict[str, Any]) -> None:
    """image-spec's content-descriptor.json, and `ref.name`'s grammar."""
    assert re.fullmatch(
        r"[A-Za-z0-9][\w!#$&^.+-]{0,126}/[A-Za-z0-9][\w!#$&^.+-]{0,126}", entry["mediaType"]
    )
    assert re.fullmatch(r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[a-zA-Z0-9=_-]+", entry["digest"])
    assert 0 <= entry["size"] < 2**63
    assert all(isinstance(text, str) for text in entry.get("annotations", {}).values())
    name = entry.get("annotations", {}).get("org.opencontainers.image.ref.name", "x")
    component = r"[A-Za-z0-9]+(?:[-._:@/+]|--)?"
    assert re.fullmatch(rf"(?:{component})*[A-Za-z0-9]+(?:/(?:{component})*[A-Za-z0-9]+)*", name)


def test_names_that_the_grammar_of_references_lacks_are_read_by_us(source, target, seed, tmp_path):
    """Two underscores are a registry's name, and no `ref.name` by OCI's grammar: docs say so."""
    image: Image = seed.image().load_into(source.app, "a__b", tag="_x")
    layout = f"oci-layout:{tmp_path / 'disk'}"
    assert run_regsync("copy", f"{source.address}/a__b:_x", layout).status == 0
    assert run_regsync("copy", f"{layout}//a__b:_x", f"{target.address}/c:v1").status == 0
    assert held(target, "c", image)
