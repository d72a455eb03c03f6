"""One shape of content: how it is built, what it is, whether a copier may take it.

Owns: the frame of the catalogue in shapes.py.
May not know: any one shape.
Invariants: a shape is built from its own name alone, so that its bytes change only with its own
builder.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..messages import digest_of
from .images import Image, Seed

if TYPE_CHECKING:
    from ..registry.app import App

__all__ = ["Found", "Sample", "Shape"]

# Where it shows that a shape cannot be copied: in the documents, before anything is sent; in the
# bytes of blobs, so that blobs may arrive but no manifest; or only at a strict target.
Found = Literal["document", "content", "target"]


@dataclass(frozen=True)
class Sample:
    """The content of a repository: an image, its referrers, and tags that belong to it."""

    image: Image
    # In an order in which they can be pushed; held by digest, named by their subjects.
    attached: tuple[Image, ...] = ()
    # Tags that are derived from the image's digest: cosign's, and the referrers fallback tag.
    tagged: Mapping[str, Image] = field(default_factory=dict)

    def load_into(self, app: App, repository: str, tag: str) -> Sample:
        """Hold everything in a registry of this harness; return self."""
        self.image.load_into(app, repository, tag)
        for image in self.attached:
            image.load_into(app, repository)
        for name, image in self.tagged.items():
            image.load_into(app, repository, name)
        return self

    def parts(self) -> dict[str, Image]:
        """Return the image as "", attached ones under their digests, tagged ones under their tags."""
        return {"": self.image, **{image.top: image for image in self.attached}, **self.tagged}

    def fingerprint(self) -> str:
        """Return one digest of every byte and name in the sample."""
        lines = []
        for name, image in self.parts().items():
            lines.append(f"{name} {image.top} {image.media_type}")
            lines += [
                f"{key} {kind} {digest_of(body)}" for key, (kind, body) in image.manifests.items()
            ]
            lines += [f"{key} {digest_of(data)}" for key, data in image.blobs.items()]
            lines += sorted(image.absent)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Shape(NamedTuple):
    """An entry of the catalogue; `refused` says why a copy has to fail, "" that it has to succeed."""

    name: str
    sentence: str
    reference: str
    builder: Callable[[Seed], Image | Sample]
    refused: str = ""
    found: Found = "document"
    # The options of App that a registry needs in order to take it.
    options: Mapping[str, bool] = {}

    def build(self) -> Sample:
        """Build the sample; equal on every run and Python."""
        built = self.builder(Seed(zlib.crc32(self.name.encode())))
        return built if isinstance(built, Sample) else Sample(built)
