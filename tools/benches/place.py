"""Registries of the harness in this process, and a folder with a configuration and its state.

Owns: how they are started, filled and asked what came.
May not know: what is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from conformance.http import Endpoint, Server, run_in_thread
from conformance.registry import App
from tools.benches.runner import Spent, sync_measured, write_mirror

__all__ = ["Place", "app_of", "started_place"]


class Place(NamedTuple):
    """One source and some targets, and where the program runs."""

    directory: Path
    source: Server
    targets: Sequence[Server]

    @property
    def servers(self) -> list[Server]:
        """All registries, the source first."""
        return [self.source, *self.targets]

    @property
    def requests(self) -> int:
        """How many requests came since the last run began."""
        return sum(len(server.journal.entries) for server in self.servers)

    def configure(self, repositories: Sequence[str], *, is_immutable: bool = False) -> Path:
        """Write the configuration of a sync of all tags, which may be said never to move."""
        return write_mirror(
            self.directory / "mirror.yaml",
            self.source.url,
            [server.url for server in self.targets],
            repositories,
            is_immutable=is_immutable,
        )

    def sync(
        self, repositories: Sequence[str], *, data_limit: int = 0, is_immutable: bool = False
    ) -> tuple[Spent, Mapping[str, int]]:
        """Run once; return what it took, and how many images were synced, skipped and failed."""
        for server in self.servers:
            server.journal.clear()
        config = self.configure(repositories, is_immutable=is_immutable)
        spent, report = sync_measured(config, data_limit=data_limit)
        return spent, report["totals"]["images"]


@contextmanager
def started_place(targets: int = 1, target: Callable[[], App] = App) -> Iterator[Place]:
    """Start a source and so many targets, all of them empty."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = stack.enter_context(run_in_thread(App()))
        others = [stack.enter_context(run_in_thread(target())) for _ in range(targets)]
        yield Place(directory, source, others)


def app_of(server: Endpoint) -> App:
    """Return the registry behind a server, to be filled without requests."""
    assert isinstance(server.app, App)
    return server.app
