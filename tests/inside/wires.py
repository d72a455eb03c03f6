"""A transport whose connections are the scripted wires of the units, and answers without a wire."""

from __future__ import annotations

from collections.abc import Iterable

import anyio.lowlevel

from _regsync.addresses import Origin
from _regsync.config import Registry
from _regsync.net.wire import Headers, Response
from _regsync.registry.client import Machine
from _regsync.registry.runs import Transport
from tests.unit.wires import NEVER, Blob, End, Item, Wire, answer

__all__ = [
    "NEVER",
    "Blob",
    "End",
    "Item",
    "Told",
    "Wire",
    "answer",
    "plain_registry",
    "transport_of",
]


class Told(Response):
    """An answer that was read, without a connection that it came from."""

    def __init__(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        self.status = status
        self.headers = Headers([*headers])
        self.body = body
        self.is_early = False


def transport_of(wires: dict[Origin, list[Wire]]) -> Transport:
    """Return a transport whose connections are these, of each origin in turn."""

    def log(*_: object, **__: object) -> None:
        pass

    made = Transport(
        Machine(
            environ={},
            home=None,
            read=lambda path: None,
            chance=lambda: 0.5,
            wall=lambda: 0.0,
            log=log,
        )
    )

    async def dial(origin: Origin, is_foreign: bool) -> Wire:
        await anyio.lowlevel.checkpoint()
        there = wires[Origin(*origin[:3])]
        there[0].dialled = (origin, is_foreign)
        return there.pop(0)

    made.pool.dial = dial
    return made


def plain_registry(host: str = "registry.test") -> Registry:
    """Return a registry that is asked by http and by nobody in particular."""
    return Registry(
        alias="r",
        scheme="http",
        host=host,
        port=80,
        kind="unknown",
        auth_type="anonymous",
        max_concurrent=2,
    )
