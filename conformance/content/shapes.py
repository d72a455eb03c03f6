"""The catalogue of content: every shape in the specifications and in the field, by name.

Owns: the whole list.
May not know: how any shape is built.
Invariants: names are unique and stay, since tests have the digest of each. The shapes that must be
copied come first, then those that must be refused.
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
    """Return the catalogue; build a shape's bytes with its `build`."""
    listed = (*IMAGES, *ARTIFACTS, *REFUSED)
    by_name = {shape.name: shape for shape in listed}
    if len(by_name) != len(listed):
        raise ValueError("two shapes have one name")
    return MappingProxyType(by_name)
