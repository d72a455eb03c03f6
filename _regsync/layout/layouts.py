"""The image layouts of a run, each opened once.

Owns: which layouts are in use, when what was put into them is made safe.
May not know: how a layout is read and written. The modules that do are imported for the first
    layout: most runs have none.
Follows: docs/design.md section 13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

from _regsync.config.model import Registry
from _regsync.errors import Side
from _regsync.registry.transport import Transport

if TYPE_CHECKING:
    from _regsync.layout.repository import LayoutHost, LayoutRepository

# Seconds between two replacements of `index.json`, which wear a disk out and take their time.
_COMMIT_SECONDS = 10.0


class Layouts:
    """The layouts of a run. With `recheck` an image counts as there only with all that it names."""

    def __init__(self, transport: Transport, *, recheck: bool = False) -> None:
        self._transport = transport
        self._recheck = recheck
        # By path.
        self._hosts: dict[str, LayoutHost] = {}
        # Set when something was put that is not safe yet.
        self._has_put = anyio.Event()

    def prepare(self, registry: Registry) -> None:
        """Read what the far side of a layout is assumed to hold; ConfigError where that cannot be
        read.
        """
        if registry.is_layout:
            self._host(registry).assume(registry.assume, self._transport.machine.log)

    def repository(self, registry: Registry, name: str, side: Side) -> LayoutRepository:
        """Return a repository of the layout that a registry of the configuration is."""
        return self._host(registry).repository(name, side)

    def _host(self, registry: Registry) -> LayoutHost:
        path = registry.host
        if path not in self._hosts:
            from _regsync.layout.repository import LayoutHost

            self._hosts[path] = LayoutHost(
                registry, self._transport, self._on_put, is_rechecked=self._recheck
            )
        return self._hosts[path]

    def _on_put(self) -> None:
        self._has_put.set()

    def written_to(self, registries: Iterable[Registry]) -> list[LayoutHost]:
        """Return the layouts among these registries, each once."""
        paths = dict.fromkeys(registry.host for registry in registries if registry.is_layout)
        return [self._hosts[path] for path in paths if path in self._hosts]

    async def commit_regularly(self) -> None:
        """Make what was put safe now and then, until cancelled."""
        while True:
            await self._has_put.wait()
            with anyio.move_on_after(_COMMIT_SECONDS):
                await anyio.sleep_forever()
            self._has_put = anyio.Event()
            await self.commit()

    async def commit(self) -> None:
        """Make what was put safe."""
        for host in self._hosts.values():
            await host.layout.commit()

    def close(self, *, remove_partials: bool) -> None:
        """Give the locks back; with `remove_partials` remove what killed runs have left."""
        for host in self._hosts.values():
            host.layout.close(remove_partials=remove_partials)
