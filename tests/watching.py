"""A watch on the virtual clock, and what happens between its cycles."""

from __future__ import annotations

import contextlib
import http.client
import inspect
import io
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.images import Image
from tests.ends import Ran, Virtual
from tests.mirrors import Mirror

INTERVAL = 30.0
Step = Callable[[], Any]


class Scene(Mirror):
    """A mirror that is watched; `asked` has what each cycle asked both ends."""

    def __init__(self, world: Virtual, directory: Path, **options: Any) -> None:
        super().__init__(world, directory, **options)
        self.asked: list[tuple[dict[str, int], dict[str, int]]] = []

    def load(self, tag: str, repository: str = "app") -> Image:  # type: ignore[override]
        """Let a tag name a new image at the source."""
        return self.push(tag, repository=repository)

    def text(self, *mappings: Any, **top: Any) -> str:
        top["defaults"] = {"targets": ["target"], **top.get("defaults", {})}
        return super().text(*mappings, **top)

    async def watch(
        self,
        *steps: Step | None,
        more: tuple[str, ...] = (),
        interval: float = INTERVAL,
        forgets: bool = False,
    ) -> Ran:
        """Watch, with a step after each cycle but the last; who `forgets` keeps no journal of what
        was.
        """
        before = Counter[str](), Counter[str]()

        def look() -> None:
            nonlocal before
            self.world.check_so_far(1)  # also where the scene has outages
            now = Counter(self.source.journal.summary()), Counter(self.target.journal.summary())
            self.asked.append((dict(now[0] - before[0]), dict(now[1] - before[1])))
            before = now
            if forgets:
                before, self.asked = (Counter(), Counter()), self.asked[-1:]
                self.clear()

        async def play() -> None:
            await anyio.sleep(interval / 2)
            for step in steps:
                look()
                done = step() if step else None
                if inspect.isawaitable(done):
                    await done
                await anyio.sleep(interval)
            look()
            signal.raise_signal(signal.SIGTERM)

        words = ["--interval", f"{interval:.0f}", "--health-port", "0", *more]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play)
            ran = await self.world.run("watch", "-c", str(self.file), *words)
            tasks.cancel_scope.cancel()
        assert "Traceback" not in ran.err
        return ran


@pytest.fixture
def stage(world: Virtual, tmp_path: Path) -> Scene:
    return Scene(world, tmp_path)


def lines(ran: Ran, *words: str) -> list[str]:
    return [line for line in ran.err.splitlines() if all(word in line for word in words)]


def probe(path: str) -> tuple[int, dict[str, Any]]:
    """Ask the watch under way, which answers on a socket and in a thread of its own; return the
    status and the document.

    That thread has the real clock. Whether a watch stands still is asked by tests/unit/test_health.py.
    """
    assert isinstance(sys.stderr, io.StringIO)
    ports = re.findall(r"health probes at 127\.0\.0\.1 port (\d+)", sys.stderr.getvalue())
    connection = http.client.HTTPConnection("127.0.0.1", int(ports[-1]), timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.load(answer)
