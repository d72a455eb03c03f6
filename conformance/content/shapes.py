"""The catalogue of content: all shapes from specifications and practice, by name.

Owns: the whole list.
May not know: how a shape is built.
Invariants: names are unique and do not change, because tests contain the digest of each shape.
Shapes that must be copied come first, then shapes that must be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .samples import Sample, Shape
from .shapes_artifacts import ARTIFACTS
from .shapes_images import IMAGES
from .shapes_refused import REFUSED

__all__ = ["Sample", "Shape", "shapes"]


def shapes() -> Mapping[str, Shape]:
    """Return the catalogue by name. `Shape.build` builds the content of a shape."""
    all_shapes = (*IMAGES, *ARTIFACTS, *REFUSED)
    by_name = {shape.name: shape for shape in all_shapes}
    if len(by_name) != len(all_shapes):
        raise ValueError("two shapes have one name")
    return MappingProxyType(by_name)
