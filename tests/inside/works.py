"""Work whose progress is shown, without a run behind it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import anyio

from _regsync.sync.image import Traffic


def work(**fields: Any) -> Any:
    """Return what a run's scheduler shows of itself; `fields` are those that matter in a test."""
    transport = SimpleNamespace(
        blob_bytes=0, bytes_sent=0, requests={}, limits={}, reaches=[], throttled_lanes={}
    )
    traffic = Traffic()
    traffic.expected_bytes = 90_000_000
    usual: dict[str, Any] = {
        "transport": transport,
        "images_known": 4,
        "images_done": 1,
        "bytes_moved": 60_000_000,
        "traffic": traffic,
        "drain_deadline": None,
    }
    return SimpleNamespace(**{**usual, **fields})


def throttle(shown: Any, host: str, seconds: float) -> None:
    """Let a host ask for a pause."""
    shown.transport.throttled_lanes[host] = SimpleNamespace(
        paused_until=anyio.current_time() + seconds, width=2.5
    )


def ask(shown: Any, host: str, requests: int, in_use: int) -> None:
    """Say how many requests a host has had, and how many are on their way."""
    shown.transport.requests[host] = Counter({"manifest_get": requests})
    shown.transport.limits[host] = SimpleNamespace(used=in_use)
