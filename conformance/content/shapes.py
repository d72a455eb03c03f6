"""The names of `conformance.shapes` under their old path, until all imports are renamed."""

from ..shapes import shapes as shapes
