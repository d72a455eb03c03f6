"""The image layouts of a run.

`layout` is imported with the first of them, because most runs have none.

Follows: docs/design.md section 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from _regsync.config import Registry
from _regsync.errors import Side, SyncError
from _regsync.registry.runs import Transport

if TYPE_CHECKING:
    from _regsync.layout import Layout, LayoutRepository


class Layouts:
    """The layouts of a run."""

    def __init__(self, transport: Transport, *, recheck: bool = False) -> None:
        """Prepare for layouts. With `recheck` a target holds an image only if it holds all parts."""
        self._transport = transport
        self._recheck = recheck
        self._layouts = dict[str, "Layout"]()  # by path

    def layout(self, registry: Registry) -> Layout:
        """Return the layout that a registry is."""
        from _regsync.layout import Layout

        path = registry.host
        if path not in self._layouts:
            self._layouts[path] = Layout(registry, self._transport, must_be_whole=self._recheck)
        return self._layouts[path]

    def repository(self, registry: Registry, name: str, side: Side) -> LayoutRepository:
        """Return a repository of a registry that is a layout."""
        from _regsync.layout import LayoutRepository

        return LayoutRepository(self.layout(registry), name, side)

    async def save(self) -> dict[str, SyncError]:
        """Save what was added to all layouts. Returns the errors of those that cannot be written any
        more, by the name of the layout.
        """
        for layout in self._layouts.values():
            await layout.save()
        return {layout.key: layout.error for layout in self._layouts.values() if layout.error}

    def close(self) -> None:
        """Unlock the layouts."""
        for layout in self._layouts.values():
            layout.close()
