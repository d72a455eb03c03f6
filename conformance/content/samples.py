"""The form of the entries of the catalogue of content in shapes.py.

Owns: samples of content, and shapes, which build samples.
May not know: any particular shape.
Invariants: the bytes of a shape depend only on its name and its builder.
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

# When a copier can detect that a shape cannot be copied: from its documents, before it sends
# anything; from the bytes of its blobs, so that blobs may have been pushed, but no manifest; or
# only from the refusal of a strict target.
Found = Literal["document", "content", "target"]


@dataclass(frozen=True)
class Sample:
    """An image with its referrers and the tags that are derived from its digest."""

    image: Image
    # Referrers, in an order in which they can be pushed. They have no tags.
    attached: tuple[Image, ...] = ()
    # Images by tag: cosign's tags and the fallback tag of referrers.
    tagged: Mapping[str, Image] = field(default_factory=dict)

    def load_into(self, app: App, repository: str, tag: str) -> Sample:
        """Store the sample in a registry of the harness. Returns self."""
        self.image.load_into(app, repository, tag)
        for image in self.attached:
            image.load_into(app, repository)
        for name, image in self.tagged.items():
            image.load_into(app, repository, name)
        return self

    def parts(self) -> dict[str, Image]:
        """Return the image by "", its referrers by digest, and the tagged images by tag."""
        return {"": self.image, **{image.top: image for image in self.attached}, **self.tagged}

    def fingerprint(self) -> str:
        """Return a hash of all bytes and names of the sample."""
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
    """An entry of the catalogue."""

    name: str
    sentence: str  # description
    reference: str  # the document that defines or mentions the shape
    builder: Callable[[Seed], Image | Sample]
    refused: str = ""  # why a copy must fail; empty if it must succeed
    found: Found = "document"
    # The options of App that a registry needs to accept the shape.
    options: Mapping[str, bool] = {}

    def build(self) -> Sample:
        """Build the sample. It is the same in every run and with every version of Python."""
        built = self.builder(Seed(zlib.crc32(self.name.encode())))
        return built if isinstance(built, Sample) else Sample(built)
