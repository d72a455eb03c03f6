"""."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple

from _regsync.errors import ContentError, RegsyncError
from _regsync.oci.manifest import IMAGE_CONFIGS, MAX_INDEX_DEPTH, Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.sync.claims import Work

_MOST_BLOBS = (
    10_000  # of one image; real ones name hundreds, and a hostile index hundreds of thousands
)


class NotAtHand(ContentError):
    """A child that was left at the source, because its target seemed to hold it, is needed after
    all.
    """


class Tree(NamedTuple):
    """An image as it will stand at the target: `children` in put order, without the root."""

    root: Manifest
    children: tuple[Manifest, ...]
    source_digest: str

    @property
    def size(self) -> int:
        return sum(each.size for each in (self.root, *self.children))

    @property
    def names(self) -> frozenset[str]:
        """Everything that the target has to hold before the root: blobs and children, at hand or
        not.
        """
        return frozenset(
            each.digest for manifest in (self.root, *self.children) for each in manifest.names
        )

    def above(self, lost: frozenset[str]) -> frozenset[str]:
        """Return what has to be brought again where `lost` is gone: that, and each manifest that
        names it.
        """
        found = set(lost)
        for manifest in (*self.children, self.root):
            found |= {manifest.digest for each in manifest.names if each.digest in found}
        return frozenset(found)

    @property
    def is_image(self) -> bool:
        """Say whether every config is an image's: registries look into those (docs/design.md
        section 7).
        """
        return all(
            one.config.media_type in IMAGE_CONFIGS if one.config else not one.layers
            for one in (self.root, *self.children)
        )

    def needs(
        self, is_committed: Callable[[str], bool]
    ) -> tuple[tuple[Descriptor, ...], tuple[Manifest, ...]]:
        """Return the unique blobs and the children that the target lacks; a committed child stands
        for all below it.
        """
        if is_committed(self.root.digest):
            return (), ()
        by_digest = {child.digest: child for child in self.children}
        blobs = dict[str, Descriptor]()
        lacking = {self.root.digest}
        pending = [self.root]
        for manifest in pending:
            for blob in manifest.blobs:
                known = blobs.setdefault(blob.digest, blob)
                if known.size != blob.size:
                    raise ContentError(
                        f"{blob.digest} is named with {known.size} and with {blob.size} bytes"
                    )
            for digest in [entry.digest for entry in manifest.children]:
                if digest not in lacking and not is_committed(digest):
                    if digest not in by_digest:
                        raise NotAtHand(f"the index names {digest}, which is not at hand")
                    lacking.add(digest)
                    pending.append(by_digest[digest])
        if len(blobs) > _MOST_BLOBS:
            raise ContentError(f"the image names more than {_MOST_BLOBS} blobs")
        return tuple(blobs.values()), tuple(
            child for child in self.children if child.digest in lacking
        )


def grow(root: Manifest, fetched: Mapping[str, Manifest], source_digest: str) -> Tree:
    """Order an image's manifests so that each stands behind its own children (I2); ContentError for
    a deep one.
    """
    ordered: dict[str, Manifest] = {}

    def visit(manifest: Manifest, depth: int) -> None:
        if manifest.is_index and depth > MAX_INDEX_DEPTH:
            raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")
        for entry in manifest.children:
            if (child := fetched.get(entry.digest)) and entry.digest not in ordered:
                visit(child, depth + 1)
                ordered[entry.digest] = child

    visit(root, 1)
    return Tree(root, tuple(ordered.values()), source_digest)


def order_blobs(
    blobs: Iterable[Descriptor], references: Mapping[str, int]
) -> dict[str, Descriptor]:
    """Return blobs by digest, by descending reference count over all images discovered so far; ties
    as they stand.
    """
    return {
        blob.digest: blob
        for blob in sorted(blobs, key=lambda blob: -references.get(blob.digest, 0))
    }


class Delivery:
    """What a user calls an image, on its way to one target: it and its artifacts, what became of
    them. `there`: the image proper was not needed."""

    stands: str | None = None  # what a tag that never moves named before
    fan_out = False
    record = (
        b""  # under which the state keeps what is known of its artifacts; what that was, and is now
    )
    known: tuple[int, int, int, bytes] = (0, 0, 0, b"")
    bits = 0
    listed = bytes(8)
    open = 1  # of its images
    skipped = failed = stripped = mounted = present = 0

    def __init__(
        self,
        source: Repository,
        target: Repository,
        source_name: str,
        reference: str,
        digest: str,
        source_digest: str,
        began: float,
        there: bool,
        error: RegsyncError | None,
    ) -> None:
        self.source = source
        self.target = target
        self.source_name = source_name
        self.reference = reference
        self.digest = digest
        self.source_digest = source_digest
        self.began = began
        self.there = there
        self.error = error
        self.planned = list[str]()  # what a rehearsal says of them
        self.listing = dict[str, list[Descriptor]]()  # by subject, where there is no referrers API
        self.brought = set[str]()
        self.transferred = list[Descriptor]()


class Image:
    """One image or artifact on its way to its target under one reference; `then` is what hangs on
    it, `artifact` what a rehearsal calls it, if it is one."""

    number = -1
    running = 0
    has_begun = False
    healed = False  # a refused manifest was made good, which is not tried a second time
    stands = False  # a tag that never moves is there, which is no failure
    error: RegsyncError | None = None

    def __init__(
        self,
        delivery: Delivery,
        tree: Tree,
        reference: str,
        snapshot: bytes,
        then: list[Image],
        artifact: str = "",
    ) -> None:
        self.delivery = delivery
        self.source = delivery.source
        self.target = delivery.target
        self.tree = tree
        self.reference = reference
        self.snapshot = snapshot
        self.then = then
        self.artifact = artifact
        # steps without a slot
        self.work = Work(("", ""), {})
        self.queue = list[Callable[[], Awaitable[None]]]()
