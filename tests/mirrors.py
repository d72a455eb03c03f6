"""A mirror on the virtual network: a source, its targets, a configuration beside a state, and what the
last command asked of each.

Registries are called `http://NAME.test`. Each class adds to the one before it what its tests are about;
a test file that needs more than a class here has adds it by a class of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.client.attachments import fallback_lists
from conformance.content.images import Image, Seed
from conformance.server.memory import Place
from tests.ends import Ran, Virtual, document, tags

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


class SignedMirror(Mirror):
    """Images v0, v1 and so on, which are signed when the test says so."""

    def __init__(self, world: Virtual, directory: Path, images: int = 1, **options: Any) -> None:
        super().__init__(world, directory, **options)
        self.images = [self.push(f"v{number}") for number in range(images)]

    async def look(self, tag_rule: Mapping[str, Any] | None = None, *more: str, **rule: Any) -> Ran:
        """Sync all of them; `rule` is about artifacts."""
        self.write({"from": "app", "tags": tag_rule or tags("v*"), "artifacts": rule})
        return await self.run("sync", *more)
