"""Moved to `conformance/registry`."""

from . import METHODS, App, Auth

__all__ = ["METHODS", "App", "Auth"]
