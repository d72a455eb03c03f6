"""The image layouts of a run, and when they are saved.

`layout` is imported with the first of them, because most runs have none.

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
    from _regsync.layout import Layout, LayoutRepository

# Seconds between two savings. Each replaces `index.json`, which is slow and wears the disk out.
_SAVE_SECONDS = 10.0


class Layouts:
    """The layouts of a run."""

    def __init__(self, transport: Transport, *, recheck: bool = False) -> None:
        """Prepare for layouts. With `recheck` a target holds an image only if it holds all parts."""
        self._transport = transport
        self._recheck = recheck
        self._layouts = dict[str, "Layout"]()  # by path

    def prepare(self, registry: Registry) -> None:
        """Read which blobs the far side of a layout has. Raises ConfigError if that fails."""
        if registry.is_layout:
            from _regsync.layout import read_receipts

            self._layout(registry).assumed.update(read_receipts(registry.assume))

    def repository(self, registry: Registry, name: str, side: Side) -> LayoutRepository:
        """Return a repository of a registry that is a layout."""
        from _regsync.layout import LayoutRepository

        return LayoutRepository(self._layout(registry), name, side)

    def _layout(self, registry: Registry) -> Layout:
        from _regsync.layout import Layout

        path = registry.host
        if path not in self._layouts:
            self._layouts[path] = Layout(registry, self._transport, must_be_whole=self._recheck)
        return self._layouts[path]

    def layouts_among(self, registries: Iterable[Registry]) -> dict[str, Layout]:
        """Return the layouts among these registries, by host."""
        layouts = [self._layout(registry) for registry in registries if registry.is_layout]
        return {layout.key: layout for layout in layouts}

    async def commit_regularly(self) -> None:
        """Save what was added, every _SAVE_SECONDS. Runs until it is cancelled."""
        while True:
            await anyio.sleep(_SAVE_SECONDS)
            await self.commit()

    async def commit(self) -> None:
        """Save what was added to all layouts."""
        for layout in self._layouts.values():
            await layout.save()

    def close(self, *, remove_partials: bool) -> None:
        """Unlock the layouts. With `remove_partials`, remove what was begun of blobs."""
        for layout in self._layouts.values():
            layout.close(remove_partials=remove_partials)
