"""Many images that share layers, as in one organisation, for measurements of copying.

Owns: which images share which layers.
May not know: how images are copied.
Invariants: a fleet depends only on its parameters. If two fleets differ only in `left_out` or
`moved`, all other tags are equal byte for byte, so that one fleet can be an older state of the
other.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..registry.app import App
from .images import Image, Seed
from .streams import Stream

__all__ = ["FLEETS", "LARGE", "PLATFORMS", "Fleet"]

PLATFORMS = ("linux/amd64", "linux/arm64/v8", "linux/arm/v7", "linux/s390x")
LARGE = 4 << 20  # bytes; layers of at least this size are generated when they are read


@dataclass(frozen=True)
class Fleet:
    """Images in several repositories. Each image has layers of a base and layers of its own."""

    seed: int = 0
    repositories: int = 10
    tags: int = 10  # of each repository
    shared: int = 5  # number of layers of a base
    own: int = 3  # number of layers that an image does not share
    size: int = 2000  # bytes of a layer
    bases: int = 1  # number of bases; repository n is built on base n % bases
    # If not empty, each tag is an index with an image for each platform, and each platform has its
    # own bases.
    platforms: tuple[str, ...] = ()
    left_out: int = 0  # how many of the newest tags are missing
    # Percentage of tags that name another image, with the same base and other layers of its own.
    moved: int = 0

    def images(self) -> dict[str, dict[str, Image]]:
        """Return the images, by repository and tag."""
        places = [(repo, tag) for tag in range(self.tags) for repo in range(self.repositories)]
        moved_count = len(places) * self.moved // 100
        # Evenly distributed.
        moved = {places[number * len(places) // moved_count] for number in range(moved_count)}
        bases = [self._base(base) for base in range(min(self.bases, self.repositories))]
        images: dict[str, dict[str, Image]] = {
            f"fleet/app-{repo}": {} for repo in range(self.repositories)
        }
        for repo, tag in places[: len(places) - self.left_out]:
            seed = self._seed("own", repo, tag, int((repo, tag) in moved))
            images[f"fleet/app-{repo}"][f"1.{tag}.0"] = self._image(seed, bases[repo % self.bases])
        return images

    def load_into(self, app: App) -> Fleet:
        """Store the fleet in a registry of the harness. Returns self."""
        for repository, tagged in self.images().items():
            for tag, image in tagged.items():
                image.load_into(app, repository, tag)
        return self

    def weights(self) -> Mapping[str, int]:
        """Return the bytes of all blobs. The key is how often a blob counts.

        "once", once in each "repository" that has it, or once for each "tag" that needs it.
        """
        once: dict[str, int] = {}  # sizes by digest
        in_repositories = 0
        for_tags = 0
        for tagged in self.images().values():
            in_repository: dict[str, int] = {}  # sizes by digest
            for image in tagged.values():
                in_repository.update({key: len(data) for key, data in image.blobs.items()})
                in_repository.update({key: stream.size for key, stream in image.streams.items()})
                for_tags += image.size
            in_repositories += sum(in_repository.values())
            once.update(in_repository)

        return {"once": sum(once.values()), "repository": in_repositories, "tag": for_tags}

    def _seed(self, *parts: object) -> Seed:
        return Seed(zlib.crc32(repr((self.seed, *parts)).encode()))

    def _layers(self, seed: Seed, count: int) -> list[bytes | Stream]:
        if self.size < LARGE:
            return [seed.layer(self.size) for _ in range(count)]
        return [Stream(self.seed, zlib.crc32(seed.blob(8)), self.size) for _ in range(count)]

    def _base(self, base: int) -> list[list[bytes | Stream]]:
        """Return the layers of a base for each platform."""
        kinds = self.platforms or ("",)
        return [self._layers(self._seed("base", base, platform), self.shared) for platform in kinds]

    def _image(self, seed: Seed, base: list[list[bytes | Stream]]) -> Image:
        if not self.platforms:
            return seed.image(layers=[*base[0], *self._layers(seed, self.own)])
        children = [
            seed.platform_image(platform, layers=[*below, *self._layers(seed, self.own)])
            for platform, below in zip(self.platforms, base, strict=True)
        ]
        return seed.index(children)


# The situations of docs/specification.md section 1.1. Tests make new or moved tags with
# `dataclasses.replace`.
FLEETS: Mapping[str, Fleet] = MappingProxyType(
    {
        "one base": Fleet(),
        "platforms": Fleet(platforms=PLATFORMS),
        "ten bases": Fleet(repositories=100, tags=2, bases=10),
        "1000 tags": Fleet(repositories=1, tags=1000, shared=5, own=1),
        "large layers": Fleet(repositories=2, tags=1, shared=1, own=1, size=4 << 30),
    }
)
