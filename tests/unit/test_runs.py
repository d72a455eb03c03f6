"""The registries of the runs of a watch."""

from __future__ import annotations

import pytest

from _regsync.config import Registry
from _regsync.errors import SyncError
from _regsync.registry.client import Machine
from _regsync.registry.runs import Transport

pytestmark = pytest.mark.anyio


def alias(name: str, most: int | None = None) -> Registry:
    login = {"auth_type": "basic", "username": name, "password": "open sesame"}
    return Registry(name, "http", "reg.test", 80, "unknown", max_concurrent=most, **login)


async def test_an_alias_whose_neighbour_changes_begins_anew_and_shares_the_host() -> None:
    transport = Transport(Machine(lambda _: None, lambda *_, **__: None))
    one, other = alias("one"), alias("other")
    transport.begin_run([one, other])
    transport.client(other)
    transport.client(one).limits.stop(SyncError("given up"))
    for _ in range(2):
        changed = alias("one", most=5)
        transport.begin_run([changed, other])
        first, second = transport.client(changed).limits, transport.client(other).limits
        assert first is second
        assert (second.stop_error, second.cap) == (None, 5)
