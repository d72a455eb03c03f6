"""`regsync lock` and runs from a lock: what they ask, what they copy, what they refuse."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.client.attachments import fallback_lists
from conformance.content.images import Image, Seed
from conformance.server.memory import Place
from tests.ends import Ran, Virtual, document, tags, virtual

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

SBOM = "application/spdx+json"
SIGNATURE = "application/vnd.example.signature"
DAY = 86_400.0


class Mirror:
    """A source, targets, a configuration with its lock, and what the last command asked."""

    def __init__(
        self, world: Virtual, directory: Path, *targets: str, state: bool = True, **options: Any
    ) -> None:
        self.world = world
        self.directory = directory
        self.file = directory / "mirror.yaml"
        self.lock = directory / "mirror.lock"
        self.seed = Seed(11)
        self.source = world.registry("source.example", **options)
        names = targets or ("target.example",)
        self.targets = [world.registry(name, **options) for name in names]
        self.target = self.targets[0]
        self.attached: list[Image] = []
        self._state = state

    def load(self, tag: str, image: Image | None = None, repository: str = "app") -> Image:
        made = image or self.seed.image()
        return made.load_into(self.source.app, repository, tag)

    def attach(self, subject: Image, kind: str = SIGNATURE, tag: str | None = None) -> Image:
        """Attach an artifact as a client does; under a tag of cosign's where one is given."""
        made = self.seed.artifact(subject, kind)
        made.load_into(self.source.app, "app", *([tag] if tag else []))
        self.attached.append(made)
        if not self.source.app.referrers_api:
            for name, listed in fallback_lists(self.attached).items():
                listed.load_into(self.source.app, "app", name)
        return made

    def write(self, *mappings: Mapping[str, Any], **top: Any) -> None:
        """Write the configuration; artifacts are copied unless it says otherwise."""
        registries = {"source": self.source}
        registries.update({f"target{n}": place for n, place in enumerate(self.targets)})
        if self._state:
            top.setdefault("global", {"cache_dir": str(self.directory / "state")})
        else:
            top.setdefault("global", {"cache_dir": "/dev/null/none"})
        defaults = {"artifacts": {}, **top.pop("defaults", {})}
        self.file.write_text(document(registries, *mappings, defaults=defaults, **top))

    async def run(self, *words: str) -> Ran:
        """Run a command quietly, with its report in JSON, on journals that are empty before."""
        for place in (self.source, *self.targets):
            place.journal.clear()
        command, *options = words
        return await self.world.run(command, "--json", "-q", *options, "-c", str(self.file))

    async def succeed(self, *words: str) -> Ran:
        ran = await self.run(*words)
        assert (ran.status, ran.err) == (0, ""), ran.err + ran.out
        return ran

    def lines(self) -> dict[str, dict[str, Any]]:
        """Return the images of the lock by tag."""
        read = [json.loads(line) for line in self.lock.read_text().splitlines()]
        return {each["source"].rpartition(":")[2]: each for each in read if "source" in each}

    def digests(self) -> dict[str, str]:
        return {tag: line["digest"] for tag, line in self.lines().items()}

    def held(self, place: Place | None = None, repository: str = "app") -> dict[str, str]:
        """Return what tags name at a target."""
        found = (place or self.target).app.repositories.get(repository)
        return dict(found.tags) if found is not None else {}


def asked(*places: Place) -> Counter[str]:
    """Count what was asked, by method and kind."""
    counts: Counter[str] = Counter()
    for place in places:
        counts.update(place.journal.summary())
    return counts


# What a lock costs, and what is in it.


async def test_a_first_lock_and_an_unchanged_one(tmp_path: Path) -> None:
    async with virtual() as world:
        mirror = Mirror(world, tmp_path)
        images = {f"v{number}": mirror.load(f"v{number}") for number in range(3)}
        mirror.load("nightly")
        mirror.write({"from": "app", "tags": tags("v*")})
        ran = await mirror.succeed("lock")

        assert mirror.digests() == {tag: image.top for tag, image in images.items()}
        assert asked(mirror.source) == {"GET tag_list": 1, "GET manifest": 3, "GET referrers": 3}
        assert asked(mirror.target) == {}
        assert [change["kind"] for change in ran.report["changes"]] == ["came"] * 3
        assert ran.report["written"] is True

        before = mirror.lock.stat()
        ran = await mirror.succeed("lock")
        assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 3}
        assert asked(mirror.target) == {}
        assert (ran.report["changes"], ran.report["written"]) == ([], False)
        assert mirror.lock.stat() == before


async def test_one_image_that_moves_is_one_line(tmp_path: Path) -> None:
    async with virtual() as world:
        mirror = Mirror(world, tmp_path)
        for number in range(3):
            mirror.load(f"v{number}")
        mirror.write({"from": "app", "tags": tags("v*")})
        await mirror.succeed("lock")
        before = mirror.lock.read_text().splitlines()
        moved = mirror.load("v1")
        signature = mirror.attach(moved)

        ran = await mirror.succeed("lock", "--diff")
        assert mirror.lock.read_text().splitlines() == before
        assert not ran.report["written"]
        (change,) = ran.report["changes"]
        assert change["kind"] == "moved"
        assert change["after"]["digest"] == moved.top

        await mirror.succeed("lock")
        # Of the signature, too, it is asked what refers to it.
        assert asked(mirror.source) == {
            "GET tag_list": 1,
            "HEAD manifest": 3,
            "GET manifest": 1,
            "GET referrers": 2,
        }
        after = mirror.lock.read_text().splitlines()
        assert len(before) == len(after)
        assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
        assert mirror.lines()["v1"]["artifacts"] == [
            {"digest": signature.top, "type": SIGNATURE, "subject": moved.top}
        ]


# A run from a lock.


async def test_a_run_from_a_lock_copies_what_was_reviewed_and_asks_nothing_else(
    tmp_path: Path,
) -> None:
    async with virtual() as world:
        mirror = Mirror(world, tmp_path)
        reviewed = {f"v{number}": mirror.load(f"v{number}") for number in range(3)}
        signature = mirror.attach(reviewed["v0"])
        mirror.write({"from": "app", "tags": tags("v*")})
        await mirror.succeed("lock")
        mirror.load("v1")
        mirror.load("v9")
        late = mirror.attach(reviewed["v2"])

        ran = await mirror.succeed("sync", "--locked")
        assert ran.statuses() == ["synced"] * 3
        assert mirror.held() == {tag: image.top for tag, image in reviewed.items()}
        manifests = mirror.target.app.repositories["app"].manifests
        assert signature.top in manifests
        assert late.top not in manifests
        assert mirror.source.journal.count(kind="tag_list") == 0
        assert mirror.source.journal.count(kind="referrers") == 0
        fetched = mirror.source.journal.matching(kind="manifest")
        assert sorted(str(entry.reference) for entry in fetched) == sorted(
            [*(image.top for image in reviewed.values()), signature.top]
        )

        ran = await mirror.succeed("sync", "--locked")
        assert ran.statuses() == ["skipped"] * 3
        assert asked(mirror.source) == {}
        assert asked(mirror.target) == {"HEAD manifest": 3}
