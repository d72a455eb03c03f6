"""Moved to `conformance/memory.py`."""

from ..memory import End, Link, MemoryConnection, Network, Place, network

__all__ = ["End", "Link", "MemoryConnection", "Network", "Place", "network"]
