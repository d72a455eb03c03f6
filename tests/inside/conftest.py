"""Fixtures of the tests that know the program's inside. They go with the modules that they know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from _regsync.text import forget_all_secrets


@pytest.fixture(autouse=True)
def without_secrets() -> Iterator[None]:
    """Let no secret of one test be masked in the texts of another."""
    forget_all_secrets()
    yield
    forget_all_secrets()
