"""The door of the old program (commit ae1b25da), which has none: `run(argv, edge)` by patches.

It is imported only where that program is run, from a worktree (`--program`), and goes when the new
one is done.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest import mock

import anyio
import anyio.to_thread

from _regsync.app import cli, environment
from _regsync.app.console import Console
from _regsync.errors import ConfigError, Disconnected
from _regsync.net import pool, streams
from tests.program import Edge


class Wire(streams.Stream):
    """A stream of the edge, with the old program's names and errors."""

    def __init__(self, below: Any) -> None:
        self._below = below

    def recv_into(self, buffer: memoryview) -> int:
        return self._try(self._below.recv_into, buffer)

    def send(self, data: memoryview) -> int:
        return self._try(self._below.send_now, data)

    def _try(self, move: Callable[[memoryview], int], piece: memoryview) -> int:
        try:
            return move(piece)
        except OSError as error:
            raise streams._connection_error(error) from error

    async def wait(self, want: int) -> None:
        try:
            await self._below.wait(want)
        except OSError as error:
            raise Disconnected("the connection was closed") from error

    def close(self) -> None:
        self._below.close()


async def run(argv: Sequence[str], edge: Edge) -> int:
    async def look_up(host: str, port: int, family: int = 0) -> list[Any]:
        """Return as the one address of the host what becomes of the connection to it."""
        try:
            found: Any = Wire(await edge.connect(host, port))
        except socket.gaierror:
            raise
        except OSError as error:
            found = error
        return [(socket.AF_INET, 0, 0, "", found)]

    async def race(addresses: Any) -> Wire:
        only = addresses[0].sockaddr
        if isinstance(only, OSError):
            raise only
        return only if isinstance(only, Wire) else Wire(await edge.connect(*only))

    async def start_tls(below: Any, context: object, host: str, timeouts: Any) -> Any:
        return await edge.start_tls(below, context, host)

    async def in_thread(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        return await edge.in_thread(function, *arguments)

    def machine(**given: Any) -> Any:
        return plain_machine(**{**given, "chance": edge.chance, "wall": edge.wall})

    def later(work: Callable[[], Awaitable[int]]) -> int:
        works.append(work)
        return 0

    plain_machine, works = environment.Machine, list[Callable[[], Awaitable[int]]]()
    with (
        mock.patch.dict(os.environ, edge.environ, clear=True),
        mock.patch.object(environment, "Machine", machine),
        mock.patch.object(environment, "run_async", later),
        mock.patch.object(streams, "_look_up", look_up),
        mock.patch.object(streams, "_race", race),
        mock.patch.object(pool, "start_tls", start_tls),
        mock.patch.object(anyio.to_thread, "run_sync", in_thread),
    ):
        status = cli.main(argv)
        for work in works:
            umask = os.umask(0o077)
            try:
                status = await work()
            except Exception as error:  # which the command line of that program tells
                if "-vv" in argv and not isinstance(error, ConfigError):
                    sys.excepthook(type(error), error, error.__traceback__)
                console = Console(
                    sys.stdout,
                    sys.stderr,
                    level="warning",
                    writes_json="--json" in argv,
                    logs_json="--log-format" in argv,
                    shows_progress=False,
                )
                status = cli.report_error(console, error)
            finally:
                os.umask(umask)
    return status
