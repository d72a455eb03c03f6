"""What answers the probes of a watch, asked on the virtual clock: its listener answers in a thread
that has the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from _regsync.app import health, watch


def tellers(monkeypatch: pytest.MonkeyPatch) -> list[health.AnswerProbe]:
    """Return the list into which goes what answers the probes of each watch from now on."""

    @contextmanager
    def noted(bind: str, port: int, tell: health.AnswerProbe) -> Iterator[Any]:
        made.append(tell)
        with plain(bind, port, tell) as names:
            yield names

    plain, made = health.serving, list[health.AnswerProbe]()
    monkeypatch.setattr(watch, "serving", noted)
    return made
