"""The registries of the runs of a watch."""

from __future__ import annotations

import pytest

from _regsync.config import Registry
from _regsync.errors import SyncError
from _regsync.registry import runs
from _regsync.registry.client import Machine
from _regsync.registry.runs import Dialer, Transport

pytestmark = pytest.mark.anyio

MACHINE = Machine(lambda _: None, lambda *_, **__: None)


def alias(name: str, most: int | None = None) -> Registry:
    login = {"auth_type": "basic", "username": name, "password": "open sesame"}
    return Registry(name, "http", "reg.test", 80, "unknown", max_concurrent=most, **login)


async def test_an_alias_whose_neighbour_changes_begins_anew_and_shares_the_host() -> None:
    transport = Transport(MACHINE)
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


def test_authorities_are_read_once_for_a_registry_its_storage_and_the_clouds(monkeypatch) -> None:
    """A bundle takes 50 ms, in which nothing else goes on."""
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(runs, "make_context", lambda *given: made.append(given) or object())
    monkeypatch.setattr(runs, "find_certs_d", lambda *_: ())
    dialer, registry = Dialer(MACHINE), Registry("r", "https", "reg.test", 443, "unknown")
    dialer.prepare(registry)
    own, storage = (dialer._context(registry, has_certificate=each) for each in (True, False))
    assert own is storage is dialer._context(None)
    shown = registry._replace(client_cert="pair.pem")
    assert dialer._context(shown) is not own
    assert dialer._context(shown, has_certificate=False) is own
    assert len(made) == 2
