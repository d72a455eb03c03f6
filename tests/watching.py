"""A watch on the virtual clock, and what happens between its cycles."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.registry.app import App
from tests.ends import Ran, Virtual, document

INTERVAL = 30.0
ARTIFACTS = {"artifacts": {"enabled": True}}
Step = Callable[[], Awaitable[None] | None]


class Scene:
    """Two registries and a configuration; `asked` has what each cycle asked them."""

    def __init__(self, world: Virtual, directory: Path, **options: Any) -> None:
        self.world, self.file, self.seed = world, directory / "mirror.yaml", Seed(1)
        self.source, self.target = (
            world.listen(App(**{name: make() for name, make in options.items()}), f"{end}.test")
            for end in ("source", "target")
        )
        self.asked: list[tuple[dict[str, int], dict[str, int]]] = []

    def load(self, tag: str, repository: str = "app") -> Image:
        return self.seed.image().load_into(self.source.app, repository, tag=tag)

    def write(self, *mappings: Any, registries: Any = None, **top: Any) -> None:
        ends = {
            "source": "http://source.test",
            "target": "http://target.test",
            **(registries or {}),
        }
        top = {"defaults": {**ARTIFACTS, "targets": ["target"]}, **top}
        self.file.write_text(document(ends, *mappings, **top))

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
                for place in (self.source, self.target):
                    place.journal.clear()

        async def play() -> None:
            await anyio.sleep(interval / 2)
            for step in steps:
                look()
                done = step() if step else None
                if done is not None:
                    await done
                await anyio.sleep(interval)
            look()
            signal.raise_signal(signal.SIGTERM)

        arguments = (
            "watch",
            "-c",
            str(self.file),
            "--interval",
            f"{interval:.0f}",
            "--health-port",
            "0",
            *more,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play)
            ran = await self.world.run(*arguments)
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

    That thread has the real clock. Whether a watch stands still is asked by tests/unit/test_watch_rules.py.
    """
    assert isinstance(sys.stderr, io.StringIO)
    ports = re.findall(r"health probes at 127\.0\.0\.1 port (\d+)", sys.stderr.getvalue())
    connection = http.client.HTTPConnection("127.0.0.1", int(ports[-1]), timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.load(answer)
