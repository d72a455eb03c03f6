"""An image as it will stand at its target, and one image on its way there.

Owns: the tree of manifests, what a target lacks of it, the order of its blobs; the tally of one copy.
May not know: who copies which blob, when, or how.
Invariants: a tree lists children before the indexes that name them (I2); one digest has one size.
Follows: docs/specification.md section 1.1 "Blob order"; docs/design.md section 7.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from _regsync.errors import ContentError, RegsyncError
from _regsync.oci.manifest import IMAGE_CONFIGS, MAX_INDEX_DEPTH, Descriptor, Manifest
from _regsync.registry.repository import Repository


class BlobResult(enum.Enum):
    """How a blob came to be in a repository."""

    UPLOADED = enum.auto()
    MOUNTED = enum.auto()
    PRESENT = enum.auto()  # it was there already


# Blobs of one image. Real images name hundreds, a hostile index could name hundreds of thousands.
_MAX_BLOBS = 10_000


class NotAtHand(ContentError):
    """The target lacks a child that was not fetched, because the target seemed to hold it."""


class Tree(NamedTuple):
    """The manifests of an image: `children` in the order in which they are put, without the root."""

    root: Manifest
    children: tuple[Manifest, ...]
    source_digest: str

    @property
    def size(self) -> int:
        """Return the bytes of all manifests."""
        return sum(manifest.size for manifest in (self.root, *self.children))

    @property
    def required_digests(self) -> frozenset[str]:
        """Return what the target has to hold before the root: all blobs, all children."""
        return frozenset(
            descriptor.digest
            for manifest in (self.root, *self.children)
            for descriptor in manifest.dependencies
        )

    @property
    def is_image(self) -> bool:
        """Say whether every config is an image's.

        Registries look into those and notice an absent blob (docs/design.md section 7).
        """
        return all(
            manifest.config.media_type in IMAGE_CONFIGS if manifest.config else not manifest.layers
            for manifest in (self.root, *self.children)
        )

    def with_ancestors(self, lost: frozenset[str]) -> frozenset[str]:
        """Return `lost` and every manifest that names some of it: all that is to be copied again."""
        digests = set(lost)
        for manifest in (*self.children, self.root):
            if any(descriptor.digest in digests for descriptor in manifest.dependencies):
                digests.add(manifest.digest)
        return frozenset(digests)

    def missing_at(
        self, is_committed: Callable[[str], bool]
    ) -> tuple[tuple[Descriptor, ...], tuple[Manifest, ...]]:
        """Return the blobs, each once, and the children that a target lacks.

        `is_committed` says whether the target holds a manifest with all that is below it. Raises
        NotAtHand for a child that would have to be fetched first, ContentError for a tree that
        contradicts itself or is too large.
        """
        if is_committed(self.root.digest):
            return (), ()

        by_digest = {child.digest: child for child in self.children}
        blobs = dict[str, Descriptor]()
        lacking = {self.root.digest}
        pending = [self.root]
        for manifest in pending:
            for blob in manifest.blobs:
                first = blobs.setdefault(blob.digest, blob)
                if first.size != blob.size:
                    raise ContentError(
                        f"{blob.digest} is named with {first.size} and with {blob.size} bytes"
                    )
            for digest in [entry.digest for entry in manifest.children]:
                if digest in lacking or is_committed(digest):
                    continue
                if digest not in by_digest:
                    raise NotAtHand(f"the index names {digest}, which is not at hand")
                lacking.add(digest)
                pending.append(by_digest[digest])

        if len(blobs) > _MAX_BLOBS:
            raise ContentError(f"the image names more than {_MAX_BLOBS} blobs")
        children = tuple(child for child in self.children if child.digest in lacking)
        return tuple(blobs.values()), children


def build_tree(root: Manifest, fetched: Mapping[str, Manifest], source_digest: str) -> Tree:
    """Order an image's manifests so that each stands behind its own children (I2).

    Raises ContentError when indexes are nested too deep.
    """
    ordered = dict[str, Manifest]()

    def visit(manifest: Manifest, depth: int) -> None:
        if manifest.is_index and depth > MAX_INDEX_DEPTH:
            raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")
        for entry in manifest.children:
            child = fetched.get(entry.digest)
            if child is not None and entry.digest not in ordered:
                visit(child, depth + 1)
                ordered[entry.digest] = child

    visit(root, 1)
    return Tree(root, tuple(ordered.values()), source_digest)


def order_blobs(
    blobs: Iterable[Descriptor], references: Mapping[str, int]
) -> dict[str, Descriptor]:
    """Return blobs by digest, those first that most images name; ties stay as they are."""
    ordered = sorted(blobs, key=lambda blob: -references.get(blob.digest, 0))
    return {blob.digest: blob for blob in ordered}


class ImageCopy:
    """One image and its artifacts being copied to one target, and what is reported of it."""

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
        # The target held the image; only artifacts may be missing.
        self.already_at_target = there
        # Whether other targets get the same image.
        self.has_several_targets = False

        # The look at its artifacts: the key in the state; what the state said; what it will say.
        self.check_key = b""
        self.last_check: tuple[int, int, int, bytes] = (0, 0, 0, b"")
        self.flags = 0
        self.listing_hash = bytes(8)
        # Artifacts by subject, which a target without the referrers API is to list.
        self.listing = dict[str, list[Descriptor]]()

        # Images, the artifacts among them, that have not ended. At 0 the copy has ended.
        self.unfinished_images = 1
        # The first failure of any of them.
        self.error = error
        # What the target held under a tag that it did not let us move.
        self.immutable_digest: str | None = None

        # Blobs of all of them.
        self.blobs_uploaded = list[Descriptor]()
        self.blobs_mounted = 0
        self.blobs_present = 0

        # Artifacts.
        self.artifacts_copied = set[str]()
        self.artifacts_skipped = 0
        self.artifacts_failed = 0
        self.artifacts_stripped = 0
        # What a dry run says of them.
        self.planned = list[str]()

    def record_blob(self, blob: Descriptor, result: BlobResult) -> None:
        """Note how a blob came to the target."""
        if result is BlobResult.UPLOADED:
            self.blobs_uploaded.append(blob)
        elif result is BlobResult.MOUNTED:
            self.blobs_mounted += 1
        else:
            self.blobs_present += 1

    def record_success(self, image: Image, *, copied: bool) -> None:
        """Note that an image is at the target; `copied` is False for an artifact that another copy
        has brought there.
        """
        self.unfinished_images -= 1
        self.blobs_present += image.blobs_present
        if not image.artifact:
            return
        if copied:
            self.artifacts_copied.add(image.reference)
            self.planned.append(f"carry {image.artifact}")
        else:
            self.artifacts_skipped += 1

    def record_failure(self, image: Image) -> None:
        """Note that an image is not at the target, so that its artifacts will not be either."""
        lost = list(image.with_dependents())
        self.unfinished_images -= len(lost)
        self.blobs_present += image.blobs_present
        if not image.is_kept_by_immutable_tag:
            self.error = self.error or image.error
            self.artifacts_failed += sum(1 for each in lost if each.artifact)


class Image:
    """One image, or one artifact, to be copied to a repository under one reference.

    `then` are the artifacts that refer to it and follow it. `artifact` is what a dry run calls it,
    empty for an image proper. `snapshot` is the key under which the state keeps what the tag named.
    """

    # Its place among the pending images, once it has one.
    number = -1
    # A refused manifest was made good once, which is not tried a second time (I5, "Healing").
    has_been_healed = False
    # The tag may not be moved, which is no failure.
    is_kept_by_immutable_tag = False
    # Blobs that this image did not have to copy, because they were there or others copied them.
    blobs_present = 0
    error: RegsyncError | None = None

    def __init__(
        self,
        delivery: ImageCopy,
        tree: Tree,
        reference: str,
        snapshot: bytes,
        then: list[Image],
        artifact: str = "",
    ) -> None:
        self.copy = delivery
        self.source = delivery.source
        self.target = delivery.target
        self.tree = tree
        self.reference = reference
        self.snapshot = snapshot
        self.dependents = then
        self.artifact = artifact

    def with_dependents(self) -> Iterator[Image]:
        """Give this image and all that follows it, at any depth."""
        yield self
        for dependent in self.dependents:
            yield from dependent.with_dependents()
