"""Moved to `conformance/registry`."""

from . import OCTETS

__all__ = ["OCTETS"]
