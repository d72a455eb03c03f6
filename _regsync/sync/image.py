"""An image as it will stand at its target, and one image on its way there.

Owns: the tree of manifests, what a target lacks of it; the tally of one copy.
May not know: who copies which blob, when, or how.
Invariants: a tree lists children before the indexes that name them (I2); one digest has one size.
Follows: docs/design.md section 7.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from _regsync.errors import ContentError, RegsyncError
from _regsync.oci.manifest import IMAGE_CONFIGS, MAX_INDEX_DEPTH, Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.state.archive import NO_CHECK, ArtifactCheck, RepositoryKey
from _regsync.sync.report import Outcome


class BlobResult(enum.Enum):
    """How a blob came to be in a repository."""

    UPLOADED = enum.auto()
    MOUNTED = enum.auto()
    PRESENT = enum.auto()  # it was there already
    BELIEVED = enum.auto()  # the answer to a POST says that it is there; no HEAD has confirmed it


class Traffic:
    """The bytes of blobs that a run sends to its targets, and of those that it need not send."""

    def __init__(self) -> None:
        # Sent, or still to be sent as far as the run knows.
        self.expected = 0
        # Not sent, because the target repository had the blob, or could mount it.
        self.present = 0
        self.mounted = 0

        # By host and digest, the blobs in `expected` that have not come to their host.
        self._awaited = set[tuple[str, str]]()
        # By repository, the digests that have come to it. Each counts once, however many images name
        # it.
        self._arrived = defaultdict[RepositoryKey, set[str]](set)

    def expect(self, host: str, digest: str, size: int) -> None:
        """Note that a host lacks a blob. It is sent there once: other repositories mount it."""
        if (host, digest) not in self._awaited:
            self._awaited.add((host, digest))
            self.expected += size

    def record(self, where: RepositoryKey, blob: Descriptor, result: BlobResult) -> None:
        """Note how a blob came to be in a repository."""
        was_expected = (where.host, blob.digest) in self._awaited
        self._awaited.discard((where.host, blob.digest))
        was_sent = result is BlobResult.UPLOADED
        if was_sent and not was_expected:
            self.expected += blob.size
        elif was_expected and not was_sent:
            self.expected -= blob.size

        if blob.digest in self._arrived[where]:
            return
        self._arrived[where].add(blob.digest)
        if result is BlobResult.MOUNTED:
            self.mounted += blob.size
        elif not was_sent:
            self.present += blob.size


# Blobs of one image. Real images name hundreds, a hostile index could name hundreds of thousands.
_MAX_BLOBS = 10_000


class NotAtHand(ContentError):
    """The target lacks a child that was not fetched, because the target seemed to hold it."""


class Tree(NamedTuple):
    """The manifests of an image."""

    root: Manifest
    # All manifests below the root that were fetched, in the order in which they are put.
    children: tuple[Manifest, ...]
    # The root's digest at the source, which differs where platforms are filtered.
    source_digest: str

    @property
    def size(self) -> int:
        """Return the bytes of all manifests."""
        return sum(manifest.size for manifest in (self.root, *self.children))

    @property
    def required_digests(self) -> frozenset[str]:
        """Return the digests that the target has to hold before the root: all blobs, all children."""
        return frozenset(
            descriptor.digest
            for manifest in (self.root, *self.children)
            for descriptor in manifest.dependencies
        )

    @property
    def is_image(self) -> bool:
        """Say whether every config is an image's: registries refuse such a manifest while a blob of it
        is absent (docs/design.md section 7).
        """
        return all(
            manifest.config.media_type in IMAGE_CONFIGS if manifest.config else not manifest.layers
            for manifest in (self.root, *self.children)
        )

    def levels(self, digests: frozenset[str]) -> list[list[Manifest]]:
        """Return the children with these digests in groups: the children of a manifest are in an
        earlier group than the manifest itself (I2).
        """
        remaining = {child.digest: child for child in self.children if child.digest in digests}
        levels = list[list[Manifest]]()
        while remaining:
            level = [
                child
                for child in remaining.values()
                if not any(entry.digest in remaining for entry in child.children)
            ]
            levels.append(level)
            for child in level:
                del remaining[child.digest]
        return levels

    def with_ancestors(self, lost: frozenset[str]) -> frozenset[str]:
        """Return the digests `lost`, and those of all manifests above them."""
        digests = set(lost)
        for manifest in (*self.children, self.root):  # each comes after its own children
            if any(descriptor.digest in digests for descriptor in manifest.dependencies):
                digests.add(manifest.digest)
        return frozenset(digests)

    def missing_at(
        self, is_committed: Callable[[str], bool]
    ) -> tuple[tuple[Descriptor, ...], tuple[Manifest, ...]]:
        """Return the blobs, each once, and the children that a target lacks.

        `is_committed` says whether the target holds a manifest with all that is below it. Both are
        empty for a committed root. Raises NotAtHand for a child that would have to be fetched first,
        ContentError for a tree that contradicts itself or is too large.
        """
        if is_committed(self.root.digest):
            return (), ()

        lacking = self._missing_manifests(is_committed)
        blobs = dict[str, Descriptor]()
        for manifest in lacking.values():
            for blob in manifest.blobs:
                first = blobs.setdefault(blob.digest, blob)
                if first.size != blob.size:
                    raise ContentError(
                        f"{blob.digest} has two sizes in the image: {first.size} and {blob.size} bytes"
                    )
        if len(blobs) > _MAX_BLOBS:
            raise ContentError(f"the image names more than {_MAX_BLOBS} blobs")

        # In the order of `self.children`, in which they are put.
        children = tuple(child for child in self.children if child.digest in lacking)
        return tuple(blobs.values()), children

    def _missing_manifests(self, is_committed: Callable[[str], bool]) -> dict[str, Manifest]:
        """Return by digest the root, which the target lacks, and the manifests that it lacks below.

        What is below a committed manifest is not looked at: the target has all of it.
        """
        fetched = {child.digest: child for child in self.children}
        missing = {self.root.digest: self.root}
        to_visit = [self.root]
        for manifest in to_visit:  # the list grows by the children of each manifest
            for entry in manifest.children:
                if entry.digest in missing or is_committed(entry.digest):
                    continue
                if entry.digest not in fetched:
                    raise NotAtHand(f"the index names {entry.digest}, which is not at hand")
                missing[entry.digest] = fetched[entry.digest]
                to_visit.append(fetched[entry.digest])
        return missing


def build_tree(root: Manifest, fetched: Mapping[str, Manifest], source_digest: str) -> Tree:
    """Order an image's manifests so that each comes after its own children (I2).

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


class ArtifactSearch(NamedTuple):
    """This run's search for the artifacts of one copy. The state keeps one record of it."""

    # The key of that record in the state. Empty if this run records no search.
    key: bytes = b""
    # The record of the last search by an earlier run.
    last_check: ArtifactCheck = NO_CHECK
    # A bit for each tag with artifacts that the source's listing shows (`Referrers.listed_tag_bits`).
    listed_tag_bits: int = 0
    # The hash of the digests that the source lists now (`ArtifactCheck.listing_hash`).
    listing_hash: bytes = bytes(8)


NO_SEARCH = ArtifactSearch()


@dataclass(eq=False)
class ImageCopy:
    """One image and its artifacts being copied to one target, and what is reported of it."""

    source: Repository
    target: Repository
    source_name: str
    # The tag or digest that names it at the source.
    source_reference: str
    # The tag or digest under which the target is to have it.
    reference: str
    # The digest that the target is to hold.
    digest: str
    # The source's own digest, which differs where platforms are filtered.
    source_digest: str
    # On the clock of the event loop.
    began: float
    # Whether the target held the image; then only artifacts may be missing.
    already_at_target: bool
    # The first failure of the image or of any of its artifacts.
    error: RegsyncError | None = None
    # Whether other targets get the same image.
    has_several_targets: bool = False

    # Whether this run has put the image itself.
    is_copied: bool = False

    artifact_search: ArtifactSearch = NO_SEARCH
    # By subject, the artifacts that a target without the referrers API is to list.
    listing: dict[str, list[Descriptor]] = field(default_factory=dict)

    # How many of the image and its artifacts have not ended. At 0 the copy has ended.
    unfinished_images: int = 1
    # The digest that the target held under a tag that it did not let us move.
    immutable_digest: str | None = None

    # Blobs of the image and its artifacts. Those that are present were at the target, or other images
    # copied them there.
    blobs_uploaded: list[Descriptor] = field(default_factory=list)
    blobs_mounted: int = 0
    blobs_present: int = 0

    # Artifacts.
    artifacts_copied: set[str] = field(default_factory=set)
    artifacts_skipped: int = 0
    artifacts_failed: int = 0
    artifacts_stripped: int = 0
    # What a dry run says of the artifacts.
    planned: list[str] = field(default_factory=list)

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
            self.is_copied = self.immutable_digest is None
            return
        if copied:
            self.artifacts_copied.add(image.reference)
            self.planned.append(f"carry {image.artifact}")
        else:
            self.artifacts_skipped += 1

    def record_failure(self, image: Image) -> None:
        """Note that an image will not be at the target, and so neither will its dependents."""
        failed = list(image.with_dependents())
        self.unfinished_images -= len(failed)
        self.blobs_present += image.blobs_present
        if not image.is_kept_by_immutable_tag:
            self.error = self.error or image.error
            self.artifacts_failed += sum(1 for dependent in failed if dependent.artifact)

    def outcome(
        self, *, started: float = 0.0, duration: float, is_dry_run: bool = False
    ) -> Outcome:
        """Return how the copy ended, which `started` so many seconds after the run, and took `duration`."""
        status, reason = self._status(is_dry_run=is_dry_run)
        return Outcome(
            self.source_name,
            self.target.name_of(self.reference),
            status,
            digest=(self.immutable_digest or self.digest) if self.error is None else None,
            source_digest=self.source_digest,
            reason=reason,
            error=self.error,
            bytes=sum(blob.size for blob in self.blobs_uploaded),
            started=started,
            duration=duration,
            transferred=tuple(blob.digest for blob in self.blobs_uploaded),
            mounted=self.blobs_mounted,
            skipped=self.blobs_present,
            planned=tuple(self.planned),
            artifacts={
                "synced": len(self.artifacts_copied),
                "skipped": self.artifacts_skipped,
                "failed": self.artifacts_failed,
                "stripped": self.artifacts_stripped,
            },
        )

    def _status(self, *, is_dry_run: bool) -> tuple[str, str | None]:
        """Return the status in the report, and for `skipped` the reason."""
        if self.error is not None:
            return "failed", None
        # A copy is not skipped when it brought an artifact to an image that was there.
        if not self.artifacts_copied:
            if self.immutable_digest is not None:
                return "skipped", "tag_immutable_exists"
            if self.already_at_target:
                return "skipped", "unchanged"
        return "would_sync" if is_dry_run else "synced", None


@dataclass(eq=False)
class Image:
    """One image, or one artifact, to be copied to a repository under one reference."""

    copy: ImageCopy
    tree: Tree
    reference: str
    # The key under which the state keeps what the tag named; empty where `reference` is no tag.
    snapshot_key: bytes
    # Artifacts that refer to this image, and are copied after it.
    dependents: list[Image]
    # What a dry run calls the artifact; empty for an image proper.
    artifact: str = ""

    # Its number in the election; -1 before it stands for election.
    number: int = -1
    # How often the image has started again after a refusal (I5, "Healing").
    healings: int = 0
    # Whether the target does not let the tag move, which is no failure.
    is_kept_by_immutable_tag: bool = False
    # How many of its blobs were at the target, or other images copied there.
    blobs_present: int = 0
    error: RegsyncError | None = None

    @property
    def source(self) -> Repository:
        return self.copy.source

    @property
    def target(self) -> Repository:
        return self.copy.target

    @property
    def source_reference(self) -> str:
        """The tag or digest that names the image at its source."""
        return self.reference if self.artifact else self.copy.source_reference

    def with_dependents(self) -> Iterator[Image]:
        """Give this image and its dependents, at any depth."""
        yield self
        for dependent in self.dependents:
            yield from dependent.with_dependents()
