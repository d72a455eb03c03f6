"""Image layouts as tests make and read them, by OCI's own text and without the program's code; and a
mirror that goes by a disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from conformance.images import Image
from tests.ends import Ran
from tests.mirrors import Mirror

NAME = "org.opencontainers.image.ref.name"
FULL_NAME = "io.containerd.image.name"


def digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def blob_path(layout: Path, digest: str) -> Path:
    algorithm, _, encoded = digest.partition(":")
    return layout / "blobs" / algorithm / encoded


def index_of(layout: Path) -> dict[str, Any]:
    document = json.loads((layout / "index.json").read_bytes())
    assert isinstance(document, dict)
    return document


def names_of(layout: Path) -> dict[str, str]:
    """Return the digest of each name in `index.json`."""
    entries = index_of(layout)["manifests"]
    names = [entry["annotations"][NAME] for entry in entries if NAME in entry["annotations"]]
    assert len(names) == len(set(names)), "a name twice"
    return {
        entry["annotations"][NAME]: entry["digest"]
        for entry in entries
        if NAME in entry["annotations"]
    }


def check_layout(layout: Path, *, left_out: frozenset[str] = frozenset()) -> set[str]:
    """Return all digests that are reached from `index.json`; each is there, whole, and right, and
    nothing else is there but what a killed run has left.
    """
    assert json.loads((layout / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    waiting = list(index_of(layout)["manifests"])
    reached = set[str]()
    while waiting:
        entry = waiting.pop()
        if entry["digest"] in reached or entry["digest"] in left_out:
            continue
        reached.add(entry["digest"])
        body = blob_path(layout, entry["digest"]).read_bytes()
        assert len(body) == entry["size"], entry
        assert digest_of(body) == entry["digest"], entry
        if "manifest" in entry["mediaType"] or "index" in entry["mediaType"]:
            document = json.loads(body)
            waiting += document.get("manifests") or document.get("layers") or []
            waiting += [document["config"]] if "config" in document else []
    return reached


def make_layout(
    layout: Path, images: dict[str, Image], *more: dict[str, Any], **annotations: Any
) -> Path:
    """Write a layout as another tool would: `images` by the text of their `ref.name`."""
    (layout / "blobs" / "sha256").mkdir(parents=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    entries = list[dict[str, Any]]()
    for name, image in images.items():
        for digest, body in image.contents().items():
            blob_path(layout, digest).write_bytes(body)
        notes = {NAME: name, **annotations} if name else dict(annotations)
        entry = image.descriptor()
        entries.append({**entry, "annotations": notes} if notes else entry)
    document = {"schemaVersion": 2, "manifests": [*entries, *more]}
    (layout / "index.json").write_text(json.dumps(document))
    return layout


def files_of(layout: Path) -> set[str]:
    """Return every file of a layout, without its folder."""
    return {
        os.path.relpath(os.path.join(folder, name), layout)
        for folder, _, names in os.walk(layout)
        for name in names
    }


class DiskMirror(Mirror):
    """A registry outside, the layout `disk` on the way, and a registry inside."""

    def __init__(self, world: Any, directory: Path, *names: str, **options: Any) -> None:
        super().__init__(world, directory, *names, **options)
        self.disk = directory / "disk"
        self.layout = f"oci-layout:{self.disk}"

    async def outside(self, *mappings: dict[str, Any], **top: Any) -> Ran:
        """Sync from the source into the layout; `disk` has more fields of its entry."""
        disk = {"url": "oci-layout:disk", **top.pop("disk", {})}
        defaults = {"targets": ["disk"], **top.pop("defaults", {})}
        return await self.sync(*mappings, registries={"disk": disk}, defaults=defaults, **top)

    async def inside(self, *mappings: dict[str, Any], **top: Any) -> Ran:
        """Sync from the layout into the targets."""
        return await self.sync(*mappings, registries={"source": "oci-layout:disk"}, **top)

    async def copy(self, source: str, target: str) -> Ran:
        self.write()
        return await self.run("copy", source, target)

    async def aloud(self, command: str, *options: str) -> Ran:
        """Run a command that also says its warnings."""
        return await self.world.run(command, "--json", *options, "-c", str(self.file))
