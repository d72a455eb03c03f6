"""A mirror on the virtual network: a source, its targets, a configuration beside a state, and what the
last command asked of each.

Registries are called `http://NAME.test`. Each class adds to the one before it what its tests are about;
a test file that needs more than a class here has adds it by a class of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from conformance.images import Image, Seed
from conformance.memory import Place
from conformance.registry import App
from conformance.walks import fallback_lists
from tests.ends import Ran, Virtual, document, tags
from tests.program import report_schema

SBOM = "application/spdx+json"
SIGNATURE = "application/vnd.example.signature"
WRITES = "POST PUT PATCH DELETE"


class Mirror:
    """A source, a target or several, and commands with one configuration.

    `options` are of each registry (App's), `of` has those of one by its name.
    """

    def __init__(
        self,
        world: Virtual,
        directory: Path,
        *names: str,
        of: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.world = world
        self.directory = directory
        self.file = directory / "mirror.yaml"
        self.lock = directory / "mirror.lock"
        self.cache = directory / ".regsync"
        self.seed = Seed(11)
        self.attached: list[Image] = []

        def registry(name: str) -> Place:
            return world.registry(f"{name}.test", **{**options, **(of or {}).get(name, {})})

        self.source = registry("source")
        self.targets = {name: registry(name) for name in names or ("target",)}
        self.target = next(iter(self.targets.values()))

    def load(self, image: Image, *names: str) -> Image:
        """Hold an image at the source, under these tags."""
        return image.load_into(self.source.app, "app", *names)

    def push(self, tag: str, image: Image | None = None, repository: str = "app") -> Image:
        """Let a tag name this image at the source, or a new one."""
        return (image or self.seed.image()).load_into(self.source.app, repository, tag)

    def attach(self, subject: Image, kind: str = SIGNATURE, *names: str) -> Image:
        """Attach an artifact as a client does; under a tag of cosign's where one is given."""
        made = self.load(self.seed.artifact(subject, kind), *names)
        self.attached.append(made)
        if not self.source.app.referrers_api:
            for tag, listed in fallback_lists(self.attached).items():
                self.load(listed, tag)
        return made

    def text(self, *mappings: Mapping[str, Any], **top: Any) -> str:
        """Return a configuration; artifacts are copied unless it says otherwise."""
        registries = {"source": self.source, **self.targets, **top.pop("registries", {})}
        defaults = {"artifacts": {}, **top.pop("defaults", {})}
        return document(registries, *mappings, defaults=defaults, **top)

    def write(self, *mappings: Mapping[str, Any], **top: Any) -> None:
        self.file.write_text(self.text(*mappings, **top))

    def clear(self) -> None:
        """Forget what was asked."""
        for place in (self.source, *self.targets.values()):
            place.journal.clear()

    async def run(self, command: str, *options: str) -> Ran:
        """Run a command quietly, with its report in JSON, on journals that are empty before."""
        self.clear()
        return await self.world.run(command, "--json", "-q", *options, "-c", str(self.file))

    async def sync(self, *mappings: Mapping[str, Any], **top: Any) -> Ran:
        """Write the configuration and run it once."""
        self.write(*mappings, **top)
        return await self.run("sync")

    def holds(self, image: Image) -> bool:
        """Whether the target has an image's manifest."""
        return image.top in self.target.app.repositories["app"].manifests


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> Mirror:
    return Mirror(world, tmp_path)


def asked(place: Place) -> Counter[str]:
    """Count what a registry was asked, by method and kind."""
    return Counter(place.journal.summary())


class CopyMirror(Mirror):
    """A mirror whose runs have no state, and copy no artifacts."""

    async def copy(self, reference: str = "app:v1", *more: str, to: str = "") -> Ran:
        """Copy one image."""
        self.clear()
        where = [f"{self.source.address}/{reference}", f"{self.target.address}/{to or reference}"]
        words = ("copy", "--no-artifacts", "--json", "--no-progress", "-c", "-", *more, *where)
        text = document({"source": self.source, "target": self.target})
        return await self.world.run(*words, stdin=text)

    async def sync(
        self, *mappings: Mapping[str, Any], registries: Mapping[str, Any] = {}, **top: Any
    ) -> Ran:
        self.clear()
        known = {"source": self.source, **self.targets, **registries}
        return await self.world.sync(known, *mappings, **top)

    async def sync_tags(self, *names: str, **rule: Any) -> Ran:
        """Sync these tags of the one repository."""
        return await self.sync({"from": "app", "tags": tags(*names, **rule)})

    def asked(self) -> tuple[Counter[str], Counter[str]]:
        """Count what the source and the target were asked in the last run."""
        return asked(self.source), asked(self.target)

    def puts(self) -> list[str]:
        """Return what manifests were put under at the target, in order."""
        return [each.reference for each in self.target.journal.matching("PUT", "manifest")]


class SignedMirror(Mirror):
    """Images v0, v1 and so on, which are signed when the test says so."""

    def __init__(self, world: Virtual, directory: Path, images: int = 1, **options: Any) -> None:
        super().__init__(world, directory, **options)
        self.images = [self.push(f"v{number}") for number in range(images)]

    async def look(self, tag_rule: Mapping[str, Any] | None = None, *more: str, **rule: Any) -> Ran:
        """Sync all of them; `rule` is about artifacts."""
        self.write({"from": "app", "tags": tag_rule or tags("v*"), "artifacts": rule})
        return await self.run("sync", *more)


class LockedMirror(Mirror):
    """A mirror with a lock."""

    async def succeed(self, *words: str) -> Ran:
        ran = await self.run(*words)
        assert (ran.status, ran.err) == (0, ""), ran.err + ran.out
        return ran

    async def skip_all(self, count: int, *options: str) -> None:
        """Run from the lock where all is there: each tag costs a HEAD at the target, and nothing at
        the source.
        """
        ran = await self.succeed("sync", "--locked", *options)
        assert ran.statuses() == ["skipped"] * len(ran.images)
        assert asked(self.source) == {}
        assert asked(self.target) == {"HEAD manifest": count}

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


class AuditedMirror(Mirror):
    """One mapping, which the targets hold as the source does, until a test takes something away."""

    def __init__(self, world: Virtual, directory: Path, *names: str, **options: Any) -> None:
        super().__init__(world, directory, *names, **options)
        self.mapping: dict[str, Any] = {"from": "app", "tags": tags("v1")}
        self.others = list[dict[str, Any]]()
        self.registries = dict[str, Any]()

    def load(self, image: Image, *names: str, artifacts: tuple[Image, ...] = ()) -> Image:
        """Hold an image and its artifacts at the source and at all targets."""
        for place in (self.source, *self.targets.values()):
            image.load_into(place.app, "app", *names)
            for artifact in artifacts:
                artifact.load_into(place.app, "app")
        return image

    async def run(self, command: str, *options: str, **top: Any) -> Ran:
        self.write(self.mapping, *self.others, registries=self.registries, **top)
        return await super().run(command, *options)

    async def audit(self, *options: str, **top: Any) -> Ran:
        """Run an audit, which writes nothing and whose document is as the schema says."""
        ran = await self.run("audit", *options, **top)
        Draft202012Validator(report_schema()).validate(ran.report)
        for place in (self.source, *self.targets.values()):
            place.journal.matching(WRITES).none()
        counted = Counter(finding["finding"] for finding in ran.report["findings"])
        assert ran.status == (2 if ran.report["failures"] else min(1, len(counted)))
        return ran


def found(ran: Ran) -> list[tuple[str, str | None]]:
    """Return the kinds of an audit's findings, with the digests."""
    return sorted((each["finding"], each["digest"]) for each in ran.report["findings"])


def whole(ran: Ran) -> int:
    """Return how many images are whole, of an audit that has found nothing."""
    assert (ran.status, ran.report["findings"], ran.report["failures"]) == (0, [], [])
    return int(ran.totals["images"]["whole"])


def lose_manifest(registry: App, digest: str) -> None:
    """Forget a manifest, and the tags that name it."""
    held = registry.repositories["app"]
    del held.manifests[digest]
    for tag in [tag for tag, named in held.tags.items() if named == digest]:
        del held.tags[tag]


def lose_blob(registry: App, digest: str) -> None:
    del registry.repositories["app"].blobs[digest]
