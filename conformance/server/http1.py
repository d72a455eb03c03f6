"""Moved to `conformance/http.py`."""

from ..http import Endpoint

__all__ = ["Endpoint"]
