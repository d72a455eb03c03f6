"""Count the bytes that a run would send, in place of copying blobs.

Owns: what a run would copy and mount, found out with GET and HEAD requests alone.
Invariants: nothing is written anywhere; the bytes are those of a run that gets the same answers.
Follows: docs/design.md sections 6 and 10 ("Dry run").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from _regsync.errors import Side, SyncError
from _regsync.oci import Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.state import MOUNTS, Knowledge
from _regsync.sync.image import BlobResult, Image
from _regsync.sync.report import LayoutSpace
from _regsync.text import size_text

if TYPE_CHECKING:
    from _regsync.layout import Layout


class DryRun:
    """A replacement for `Blobs` that writes nothing and counts what a run would send."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        # By host, the bytes of all blobs and manifests that a run would send to it.
        self._bytes_to_write = Counter[str]()
        self.layouts: dict[str, Layout] = {}  # those that are targets, by host

    async def copy(
        self,
        blob: Descriptor,
        source: Repository,
        target: Repository,
        *,
        mount_from: str | None = None,
        is_shared: bool = False,
        present: str | None = None,
    ) -> BlobResult:
        """Return how a run would copy a blob, and count its bytes if it would be sent.

        Sends a HEAD for the blob, unless the run would mount it or the target repository is empty.
        """
        if mount_from or self._knowledge.mount_source(target.store_key, blob.digest):
            # The host is assumed to accept the mount.
            self._knowledge.learn(target.host.key, MOUNTS, True)
            return BlobResult.MOUNTED
        is_empty = self._knowledge.is_empty(target.store_key)
        if not is_empty and await target.has_blob(blob, with_retries=True):
            return BlobResult.PRESENT
        self._bytes_to_write[target.host.key] += blob.size
        return BlobResult.UPLOADED

    async def put_manifests(
        self, image: Image, own_manifests: frozenset[str], on_put: Callable[[Manifest], None]
    ) -> None:
        """Count the manifests that a run would put, and call `on_put` with each child.

        Raises SyncError if the image alone is too large for the disk of its target.
        """
        host = image.target.host.key
        children = [child for child in image.tree.children if child.digest in own_manifests]
        size = sum(manifest.size for manifest in (*children, image.tree.root))
        self._bytes_to_write[host] += size

        needed = sum(blob.size for blob in image.copy.uploaded)
        free = self.layouts[host].free_bytes() if host in self.layouts else needed
        if needed > free:
            text = f"{host} has room for {size_text(free)}, the image needs {size_text(needed)}"
            error = SyncError(text, hint="free space on the device, or copy to a larger one")
            raise error.add_context(Side.TARGET, "write", image.target.name_of(image.reference))
        for child in children:
            on_put(child)

    def layout_spaces(self) -> list[LayoutSpace]:
        """Return what a run would write to each layout, and the room that there is."""
        return [
            LayoutSpace(
                host,
                to_write=self._bytes_to_write[host],
                left_out=sum(layout.left_out_sizes.values()),
                free=layout.free_bytes(),
            )
            for host, layout in self.layouts.items()
        ]
