"""`sync --dry-run`: nothing is changed, and what it foretells is what a run then does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _regsync.text import size_text
from conformance.content.images import Seed
from conformance.server.sockets import Server
from tests.ends import Ran, Start, document, run_regsync, tags


def command(
    directory: Path,
    what: str,
    registries: Mapping[str, Any],
    *mappings: Mapping[str, Any],
    more: str = "--json",
) -> Ran:
    file = directory / "mirror.yaml"
    file.write_text(document(registries, *mappings))
    words = {"dry": ["sync", "--dry-run"], "sync": ["sync"]}[what]
    return run_regsync(*words, more, "-c", str(file))


def shared_base(source: Server) -> list[dict[str, Any]]:
    """Load three repositories of images over one base, and an index; return mappings for them."""
    made = Seed(3)
    base = [made.layer(70_000), made.layer(900)]
    for name in ("one", "two", "three"):
        for tag in ("v1", "v2"):
            made.image(layers=[*base, made.layer(500)]).load_into(source.app, name, tag=tag)
    made.index(attestations=True).load_into(source.app, "many", tag="v1")
    return [
        *({"from": name, "tags": tags("v1", "v2")} for name in ("one", "two", "three")),
        {"from": "many", "tags": tags("v1")},
    ]


def test_the_bytes_to_transfer_are_told_beside_those_of_all_blobs(
    tmp_path: Path, serve: Start
) -> None:
    source, target = serve(), serve()
    mappings, ends = shared_base(source), {"source": source, "target": target}
    told = command(tmp_path, "dry", ends, *mappings, more="-q").out.splitlines()
    totals = command(tmp_path, "dry", ends, *mappings).totals
    assert totals["layers"]["mounted"] == 4
    all_bytes = totals["bytes"] + totals["saved"]["mounted"]
    data = f"{size_text(totals['bytes'])} of {size_text(all_bytes)}"
    assert told[-1] == f"Data: {data} to transfer"
    assert totals["saved"]["mounted"] > 2 * 70_000, "the base, in two of the repositories"
