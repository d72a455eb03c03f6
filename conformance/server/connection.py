"""Moved to `conformance/http.py`."""

from ..http import Connection, Gone, SocketConnection

__all__ = ["Connection", "Gone", "SocketConnection"]
