"""`from: "*"`: all repositories of an image layout, without a mapping for each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.content.images import Seed
from conformance.server.sockets import Server
from tests.ends import document, held, run_regsync, tags
from tests.layouts import FULL_NAME, NAME, make_layout

DISK = {"url": "oci-layout:disk"}

pytestmark = pytest.mark.new


def write(directory: Path, name: str, text: str) -> str:
    (directory / name).write_text(text)
    return str(directory / name)


def test_what_the_disk_has_needs_no_names(source: Server, target: Server, tmp_path: Path) -> None:
    images = {}
    for number, name in enumerate(("app", "team/db", "team/web")):
        images[name] = Seed(number).image().load_into(source.app, name, tag="v1")
    Seed(7).image().load_into(source.app, "app", tag="old")
    rules = [{"from": name, "tags": tags("*")} for name in images]
    ends = {"source": source, "disk": DISK}
    text = document(ends, *rules, defaults={"targets": ["disk"]})
    outside = write(tmp_path, "outside.yaml", text)
    assert run_regsync("sync", "-q", "-c", outside).status == 0

    ends = {"source": DISK, "target": target}
    mappings = [{"from": "*", "tags": tags("v*")}, {"from": "app", "to": "base/app"}]
    inside = write(tmp_path, "inside.yaml", document(ends, *mappings))
    ran = run_regsync("sync", "--json", "-c", inside)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 5)
    for name, image in images.items():
        assert held(target, name, image)
    assert {*target.app.tags("app")} == {"v1"}
    assert {*target.app.tags("base/app")} == {"v1", "old"}
    for command in (["lock"], ["sync", "--locked"], ["audit"], ["audit", "--locked"]):
        assert run_regsync(*command, "-c", inside).status == 0
    listed = run_regsync("tags", "-c", inside, f"oci-layout:{tmp_path}/disk//team/db")
    assert listed.out == "v1\n"

    printed = run_regsync("expand", inside).out
    again = write(tmp_path, "again.yaml", printed)
    assert run_regsync("sync", "-q", "-c", again).status == 0


@pytest.mark.parametrize("command", ["sync", "lock", "audit"])
def test_a_disk_that_is_not_there_is_told_before_anything_is_tried(
    command: str, target: Server, tmp_path: Path
) -> None:
    text = document({"source": DISK, "target": target}, {"from": "*"})
    inside = write(tmp_path, "inside.yaml", text)
    assert run_regsync("validate", inside).status == 0
    ran = run_regsync(command, "-c", inside)
    assert (ran.status, ran.out) == (3, "")
    assert "error: CONFIG_ERROR: mappings[0]: " in ran.err
    assert "hint: check the path, and whether the disk is mounted" in ran.err
    assert not target.journal.entries


def test_a_disk_without_images_is_a_warning(target: Server, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (tmp_path / "disk" / "index.json").write_text('{"schemaVersion": 2, "manifests": []}')
    text = document({"source": DISK, "target": target}, {"from": "*"})
    ran = run_regsync("sync", "--json", "-c", write(tmp_path, "inside.yaml", text))
    assert (ran.status, ran.images) == (0, [])
    assert "names no repository" in ran.err


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"from": "*", "source": "target"}, "mappings[0].from: only a source that is an `oci-layout`"),
        ({"from": "*", "to": "app"}, 'mappings[0].to: cannot be set where `from` is "*"'),
        ({"from": "team/*"}, "mappings[0].from: 'team/*' is not a repository"),
    ],
)  # fmt: skip
def test_it_stands_for_a_whole_layout_alone(mapping: dict[str, str], said: str) -> None:
    registries = {"source": DISK, "target": {"url": "a.example"}, "other": {"url": "b.example"}}
    document = {
        "registries": registries,
        "defaults": {"source": "source", "targets": ["other"]},
        "mappings": [mapping],
    }
    ran = run_regsync("validate", "-", stdin=json.dumps(document))
    assert (ran.status, said in ran.err) == (3, True), ran.err


def test_a_mapping_that_names_its_repository_goes_before(
    source: Server, target: Server, tmp_path: Path
) -> None:
    Seed(1).image().load_into(source.app, "app", tag="v1")
    ends = {"source": source, "disk": DISK}
    outside = document(ends, {"from": "app", "tags": tags("*")}, defaults={"targets": ["disk"]})
    assert run_regsync("sync", "-q", "-c", write(tmp_path, "o.yaml", outside)).status == 0
    image = Seed(2).image().load_into(source.app, "app", tag="v1")
    ends = {"source": source, "disk": DISK, "target": target}
    mappings = [{"from": "*", "source": "disk", "targets": ["target"]}]
    mappings.append({"from": "app", "tags": tags("v1"), "targets": ["target"]})
    ran = run_regsync("sync", "--json", "-c", write(tmp_path, "i.yaml", document(ends, *mappings)))
    assert ran.status == 1
    assert ["mappings[1] writes this tag too" in line for line in ran.failed] == [True]
    assert target.app.tags("app") == {"v1": image.top}


def test_images_that_other_tools_have_named_with_their_hosts_belong_to_it(
    target: Server, tmp_path: Path
) -> None:
    seed = Seed(3)
    images = {"app:v1": seed.image(), "lib:v2": seed.image()}
    index = make_layout(tmp_path / "disk", images) / "index.json"
    document_of_it = json.loads(index.read_bytes())
    for entry in document_of_it["manifests"]:
        if entry["annotations"][NAME] == "lib:v2":
            entry["annotations"] = {NAME: "v2", FULL_NAME: "docker.io/team/lib:v2"}
    index.write_text(json.dumps(document_of_it))
    text = document({"source": DISK, "target": target}, {"from": "*"})
    ran = run_regsync("sync", "--json", "-c", write(tmp_path, "inside.yaml", text))
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 2)
    assert held(target, "app", images["app:v1"])
    assert held(target, "team/lib", images["lib:v2"])
