from __future__ import annotations

from collections.abc import Iterator

import pytest

from _regsync.text import forget_all_secrets


@pytest.fixture(autouse=True)
def without_secrets() -> Iterator[None]:
    """Let no secret of another test, of any file in this process, be masked in texts."""
    forget_all_secrets()
    yield
    forget_all_secrets()
