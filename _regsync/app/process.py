"""The edge of this process: its sockets, clock, environment and threads.

Follows: docs/design.md section 2.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from _regsync.edge import Edge

if TYPE_CHECKING:
    import ssl

_T = TypeVar("_T")


def process_edge() -> Edge:
    return Edge(connect, start_tls, time.time, random_fraction, in_thread, os.environ)


async def connect(host: str, port: int) -> Any:
    from _regsync.net import dial  # imported late, because most commands connect to nothing

    return await dial.connect(host, port)


async def start_tls(stream: Any, context: ssl.SSLContext, host: str) -> Any:
    from _regsync.net import dial

    return await dial.handshake(stream, context, host)


def random_fraction() -> float:
    """Return a random number from 0 to 1, without 1. The module `random` takes long to import."""
    return int.from_bytes(os.urandom(6), "big") / 2**48


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    import anyio.to_thread

    return await anyio.to_thread.run_sync(function, *arguments)
