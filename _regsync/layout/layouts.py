"""Open the image layouts of a run, and commit to them regularly.

Owns: which layouts are in use, when additions to them are committed.
May not know: how a layout is read and written. The modules for that are imported with the first
    layout, because most runs have no layout.
Follows: docs/design.md section 13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

from _regsync.config import Registry
from _regsync.errors import Side
from _regsync.registry.runs import Transport

if TYPE_CHECKING:
    from _regsync.layout.repository import LayoutHost, LayoutRepository

# Seconds between two commits. Each commit replaces `index.json`, which is slow and wears the disk
# out.
_COMMIT_SECONDS = 10.0


class Layouts:
    """The layouts of a run."""

    def __init__(self, transport: Transport, *, recheck: bool = False) -> None:
        """Prepare for layouts. None of them is read yet.

        With `recheck` a target holds an image only if it holds all parts of the image.
        """
        self._transport = transport
        self._recheck = recheck
        # The layouts by their path.
        self._hosts: dict[str, LayoutHost] = {}
        # Set by additions, and replaced before each commit.
        self._has_additions = anyio.Event()

    def prepare(self, registry: Registry) -> None:
        """If a registry is a layout, read which blobs its far side is assumed to hold.

        Raises ConfigError if a receipt that `assume` names cannot be read.
        """
        if registry.is_layout:
            self._host(registry).assume(registry.assume)

    def repository(self, registry: Registry, name: str, side: Side) -> LayoutRepository:
        """Return a repository of a registry that is a layout."""
        return self._host(registry).repository(name, side)

    def _host(self, registry: Registry) -> LayoutHost:
        path = registry.host
        if path not in self._hosts:
            from _regsync.layout.repository import LayoutHost

            self._hosts[path] = LayoutHost(
                registry, self._transport, self._on_put, requires_all_parts=self._recheck
            )
        return self._hosts[path]

    def _on_put(self) -> None:
        self._has_additions.set()

    def layouts_among(self, registries: Iterable[Registry]) -> list[LayoutHost]:
        """Return the layouts among these registries, without duplicates."""
        paths = dict.fromkeys(registry.host for registry in registries if registry.is_layout)
        return [self._hosts[path] for path in paths if path in self._hosts]

    async def commit_regularly(self) -> None:
        """Commit additions at most every _COMMIT_SECONDS. Runs until it is cancelled."""
        while True:
            await self._has_additions.wait()
            # Pause, so that one commit saves the additions of the whole interval.
            with anyio.move_on_after(_COMMIT_SECONDS):
                await anyio.sleep_forever()
            self._has_additions = anyio.Event()
            await self.commit()

    async def commit(self) -> None:
        """Commit the additions to all layouts."""
        for host in self._hosts.values():
            await host.layout.commit()

    def close(self, *, remove_partials: bool) -> None:
        """Unlock the layouts. With `remove_partials`, remove the partial files of blobs."""
        for host in self._hosts.values():
            host.layout.close(remove_partials=remove_partials)
