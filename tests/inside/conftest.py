"""Fixtures of the tests that know the program's inside. They go with the modules that they know."""

from __future__ import annotations

from tests.inside.a_cloud import cloud  # noqa: F401
