"""Find out which blobs a run would send, in place of copying them.

Owns: what a run would copy and mount, found out with GET and HEAD requests alone.
Invariants: nothing is written anywhere; the bytes are those of a run that gets the same answers.
Follows: docs/design.md sections 6 and 10 ("Dry run").
"""

from __future__ import annotations

from _regsync.oci import Descriptor
from _regsync.registry.repository import Repository
from _regsync.state import MOUNTS, Knowledge
from _regsync.sync.image import BlobResult


class DryRun:
    """A replacement for `Blobs` that writes nothing."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

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
        """Return how a run would copy a blob.

        Sends a HEAD for the blob, unless the run would mount it or the target repository is empty.
        """
        if mount_from or self._knowledge.mount_source(target.store_key, blob.digest):
            # The host is assumed to accept the mount.
            self._knowledge.learn(target.host.key, MOUNTS, True)
            return BlobResult.MOUNTED
        is_empty = self._knowledge.is_empty(target.store_key)
        if not is_empty and await target.has_blob(blob, with_retries=True):
            return BlobResult.PRESENT
        return BlobResult.UPLOADED
