#!/usr/bin/env python3
"""Count what artifacts add to runs, beside the least that they could add.

    python3 tools/bench_artifacts.py [--images 100] [--json]

Each image has three artifacts: an SBOM, a signature, and a signature of the SBOM. Registries with
the referrers API and without it are source and target in turn, in memory, on a clock that jumps.
Counted are the requests of a run with artifacts less those of the same run with `enabled: false`:
cold; at once again; after two hours, when a look at each image is due; and when one image in ten got
a new signature in between.

The least: a source with the API is asked once for each image and each artifact; elsewhere one
listing, made anyway, says which of them have a list, and that is fetched. Each artifact's manifest
and layer is fetched once; the layer goes up in one POST, the manifest in one PUT, the empty config
once per repository. The first artifact in a repository's area costs the target one question about
its API; without it each list is put and read back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import anyio  # noqa: E402

from conformance.attachments import fallback_lists, has_api  # noqa: E402
from conformance.images import Image, Seed  # noqa: E402
from tests.ends import Virtual, document, virtual  # noqa: E402

__all__ = ["main"]

SBOM = "application/spdx+json"
SIGNATURE = "application/vnd.example.signature"
RUNS = ("cold", "again", "after 2 h", "late signatures")


class Source:
    """A repository of signed images that can get more signatures."""

    def __init__(self, place: Any, images: int) -> None:
        self.app = place.app
        self.seed = Seed(7)
        self.attached: list[Image] = []
        self.images = [
            self.seed.image().load_into(self.app, "app", f"v{number}") for number in range(images)
        ]
        for image in self.images:
            sbom = self.attach(image, SBOM)
            self.attach(sbom, SIGNATURE)
            self.attach(image, SIGNATURE)
        self.list()

    def attach(self, subject: Image, kind: str) -> Image:
        made = self.seed.artifact(subject, kind).load_into(self.app, "app")
        self.attached.append(made)
        return made

    def list(self) -> None:
        """Keep the lists that a client keeps where there is no API."""
        if not has_api(self.app):
            for tag, listed in fallback_lists(self.attached).items():
                listed.load_into(self.app, "app", tag)


async def counted(
    world: Virtual, ends: dict[str, Any], directory: Path, enabled: bool
) -> Counter[str]:
    """Run once and return its requests by side, method and kind."""
    for each in ends.values():
        each.journal.clear()
    text = document(
        ends,
        {"from": "app", "tags": {"glob": "v*"}, "artifacts": {"enabled": enabled}},
        **{"global": {"cache_dir": str(directory / "state")}},
    )
    path = directory / "mirror.yaml"
    path.write_text(text, encoding="utf-8")
    ran = await world.run("sync", "--json", "-q", "-c", str(path))
    if ran.status:
        raise SystemExit(f"a run ended with status {ran.status}: {ran.err}")
    return Counter(
        {
            f"{side} {name}": count
            for side, end in ends.items()
            for name, count in end.journal.summary().items()
        }
    )


async def measured(source_api: bool, target_api: bool, images: int) -> dict[str, Counter[str]]:
    """Return for each run what artifacts added."""
    found: dict[bool, list[Counter[str]]] = {True: [], False: []}
    for enabled, counts in found.items():
        with tempfile.TemporaryDirectory() as directory:
            async with virtual() as world:
                one = world.registry("source.example", referrers_api=source_api)
                ends = {
                    "source": one,
                    "target": world.registry("target.example", referrers_api=target_api),
                }
                source = Source(one, images)
                for name in RUNS:
                    if name == "after 2 h":
                        await anyio.sleep(7200)
                    if name == "late signatures":
                        for image in source.images[:: max(1, images // 10)]:
                            source.attach(image, SIGNATURE)
                        source.list()
                        await anyio.sleep(2 * 86400)
                    counts.append(await counted(world, ends, Path(directory), enabled))
    return {
        name: Counter(
            {key: count - without[key] for key, count in with_them.items() if count != without[key]}
        )
        for name, with_them, without in zip(RUNS, found[True], found[False], strict=True)
    }


def least(source_api: bool, target_api: bool, images: int) -> int:
    """Return what a cold run has to add."""
    lists = 2 * images  # an image's and an SBOM's
    source = (4 * images if source_api else lists + 1) + 2 * 3 * images
    return source + 2 * 3 * images + 1 + 1 + (0 if target_api else 2 * lists)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    given = parser.parse_args(argv)
    told = []
    for source_api in (True, False):
        for target_api in (True, False):
            added = anyio.run(
                measured,
                source_api,
                target_api,
                given.images,
                backend="trio",
                backend_options=_clock(),
            )
            row: dict[str, Any] = {"source_api": source_api, "target_api": target_api}
            row["least_cold"] = least(source_api, target_api, given.images)
            row["runs"] = {
                name: {"added": sum(counts.values()), **counts} for name, counts in added.items()
            }
            told.append(row)
            if not given.json:
                ends = " -> ".join(
                    "API" if each else "fallback tags" for each in (source_api, target_api)
                )
                print(f"{ends}: the least that a cold run adds is {row['least_cold']}")
                for name, counts in added.items():
                    detail = (
                        ", ".join(f"{count} {key}" for key, count in sorted(counts.items()))
                        or "nothing"
                    )
                    print(f"  {name:<16} {sum(counts.values()):>6}  {detail}")
    if given.json:
        print(json.dumps(told, indent=2))
    return 0


def _clock() -> dict[str, Any]:
    import trio.testing

    return {"clock": trio.testing.MockClock(autojump_threshold=0)}


if __name__ == "__main__":
    sys.exit(main())
