"""Moved to `conformance/http.py`."""

from ..http import Server, run_in_thread, serve

__all__ = ["Server", "run_in_thread", "serve"]
