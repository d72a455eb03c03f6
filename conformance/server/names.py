"""Moved to `conformance/names.py`."""

from ..names import Names, names

__all__ = ["Names", "names"]
