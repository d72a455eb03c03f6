"""Copies into image layouts and out of them: what is asked, what is written, what is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Seed
from conformance.server.sockets import Server
from tests.ends import Ran, document, only, run_regsync, tags

ALL = {"artifacts": {"enabled": True}}


@pytest.fixture
def seed() -> Seed:
    return Seed(23)


def from_layout(directory: Path, targets: dict[str, Server], *mappings: Any, **top: Any) -> Ran:
    """Sync from the layout `disk` of a directory."""
    registries = {"source": {"url": "oci-layout:disk"}, **targets}
    return run_file(directory, "in.yaml", document(registries, *mappings, **{**_defaults(), **top}))


def _defaults() -> dict[str, Any]:
    return {"defaults": ALL}


def run_file(directory: Path, name: str, text: str, *more: str) -> Ran:
    (directory / name).write_text(text)
    return run_regsync("sync", "--json", "-q", "-c", str(directory / name), *more)


# As a source.


# What a configuration may say.


def test_a_dry_run_says_what_assume_saves_and_that_there_is_too_little_room(
    source, seed, tmp_path, monkeypatch
):
    image = seed.image(sizes=(5000, 70_000)).load_into(source.app, "app", tag="v1")
    layer = json.loads(image.body)["layers"][1]
    (tmp_path / "far.txt").write_text(f"{layer['digest']} app\n")
    monkeypatch.setattr("_regsync.layout.directory.Layout.free_bytes", lambda _: 5000)
    registries = {"source": source, "disk": {"url": "oci-layout:disk", "assume": "far.txt"}}
    text = document(registries, {"from": "app", "tags": tags("v1")})
    ran = run_file(tmp_path, "c.yaml", text, "--dry-run")
    room = only(ran.totals["layouts"])
    assert room["left_out"] == layer["size"]
    assert room["to_write"] == image.size + len(image.body) - layer["size"] > 5000
    assert ran.status == 2, "the image alone is too large"
    shown = run_regsync("sync", "-c", str(tmp_path / "c.yaml"), "--dry-run").out
    assert "left out, 5.0 KB free: too little" in shown
    ran = run_file(tmp_path, "c.yaml", text)
    assert ran.statuses() == ["failed"]
    assert "room for" in only(ran.images)["error"]["message"]
