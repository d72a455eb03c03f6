"""Moved to `conformance/registry/app.py`."""

from .app import OCTETS

__all__ = ["OCTETS"]
