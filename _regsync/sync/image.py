"""The manifests of an image as its target will have them, and the record of copying them.

Owns: the tree of manifests, and which parts of it a target lacks; the counts of one copy.
May not know: who copies which blob, when, or how.
Invariants: a tree lists children before the indexes that name them (I2); one digest has one size.
Follows: docs/design.md section 7.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from _regsync.errors import ContentError, RegsyncError
from _regsync.oci import IMAGE_CONFIGS, Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.state import NO_CHECK, ArtifactCheck, RepositoryKey
from _regsync.sync.report import Outcome


class BlobResult(enum.Enum):
    """How a blob got into a repository."""

    UPLOADED = enum.auto()
    MOUNTED = enum.auto()
    # The repository had the blob already.
    PRESENT = enum.auto()
    # The answer to a probing POST says that the repository has the blob. No HEAD has confirmed it.
    BELIEVED = enum.auto()


class Traffic:
    """The bytes of blobs that a run sends to its targets, and the bytes that it saves."""

    def __init__(self) -> None:
        # Bytes that were sent, or that will be sent as far as is known.
        self.expected_bytes = 0
        # Bytes that were saved because the target repository had the blob already.
        self.present_bytes = 0
        # Bytes that were saved because the target repository could mount the blob.
        self.mounted_bytes = 0

        # Host and digest of the blobs in `expected_bytes` that have not arrived at their host yet.
        self._awaited = set[tuple[str, str]]()
        # By repository, the digests of the blobs that have arrived there. Each blob is counted
        # once, however many images name it.
        self._arrived = defaultdict[RepositoryKey, set[str]](set)

    def expect(self, host: str, digest: str, size: int) -> None:
        """Record that a host lacks a blob.

        The blob is counted once for the host, because its other repositories mount it.
        """
        if (host, digest) not in self._awaited:
            self._awaited.add((host, digest))
            self.expected_bytes += size

    def record(self, where: RepositoryKey, blob: Descriptor, result: BlobResult) -> None:
        """Record how a blob got into a repository.

        Corrects `expected_bytes` if the blob was sent although it was not expected, or the reverse.
        """
        is_expected = (where.host, blob.digest) in self._awaited
        is_sent = result is BlobResult.UPLOADED
        self._awaited.discard((where.host, blob.digest))
        self.expected_bytes += blob.size * (is_sent - is_expected)

        # The bytes saved are counted once for each repository.
        if blob.digest not in self._arrived[where]:
            self._arrived[where].add(blob.digest)
            self.mounted_bytes += blob.size * (result is BlobResult.MOUNTED)
            self.present_bytes += blob.size * (result in (BlobResult.PRESENT, BlobResult.BELIEVED))


# The most blobs that one image may name. Real images name hundreds of blobs. A hostile index could
# name hundreds of thousands.
_MAX_BLOBS = 10_000


class ChildNotFetched(ContentError):
    """The target lacks a child that was not fetched, because the target seemed to have it."""


class Tree(NamedTuple):
    """The manifests of an image."""

    root: Manifest
    # All manifests below the root that were fetched, in the order in which they are put.
    children: tuple[Manifest, ...]
    # The root's digest at the source. It differs from `root.digest` if platforms are filtered.
    source_digest: str

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """All manifests that were fetched: the root, and then those below it."""
        return self.root, *self.children

    @property
    def blobs(self) -> dict[str, Descriptor]:
        """All blobs that these manifests name, by digest."""
        return {blob.digest: blob for manifest in self.manifests for blob in manifest.blobs}

    @property
    def size(self) -> int:
        """The bytes of all manifests."""
        return sum(manifest.size for manifest in self.manifests)

    @property
    def is_image(self) -> bool:
        """Whether every manifest is an index or has the config of an image.

        Registries refuse such a manifest if one of its blobs is absent (docs/design.md section 7).
        """
        return all(
            manifest.config.media_type in IMAGE_CONFIGS
            if manifest.config is not None
            else not manifest.layers  # an index names manifests only
            for manifest in self.manifests
        )

    def missing_at(
        self, is_committed: Callable[[str], bool]
    ) -> tuple[list[Descriptor], list[Manifest]]:
        """Return the blobs that a target lacks, each once, and the children, in the order in which
        they are put.

        `is_committed(digest)` reports whether the target has a manifest and everything that it
        names at any depth. If it has the root, no part is missing. Raises ChildNotFetched if a
        missing child was not fetched, and ContentError if the tree contradicts itself or is too
        large.
        """
        if is_committed(self.root.digest):
            return [], []

        fetched = {child.digest: child for child in self.children}
        missing = {self.root.digest: self.root}
        blobs = dict[str, Descriptor]()
        to_visit = [self.root]
        for manifest in to_visit:  # the list grows by the missing children of each manifest
            for blob in manifest.blobs:
                first = blobs.setdefault(blob.digest, blob)
                if first.size != blob.size:
                    raise ContentError(
                        f"{blob.digest} has two sizes in the image: {first.size} and {blob.size} bytes"
                    )
            for entry in manifest.children:
                if entry.digest in missing or is_committed(entry.digest):
                    continue  # the target has all that is below a committed manifest
                if entry.digest not in fetched:
                    raise ChildNotFetched(f"the index names {entry.digest}, which is not at hand")
                missing[entry.digest] = fetched[entry.digest]
                to_visit.append(fetched[entry.digest])
        if len(blobs) > _MAX_BLOBS:
            raise ContentError(f"the image names more than {_MAX_BLOBS} blobs")

        return [*blobs.values()], [child for child in self.children if child.digest in missing]


@dataclass(eq=False)
class ImageCopy:
    """The copy of one image and its artifacts to one target, and the counts for the report."""

    source: Repository
    target: Repository
    # The tag or digest that names the image at the source.
    source_reference: str
    # The tag or digest that names the image at the target.
    reference: str
    # The digest that the image has at the target.
    digest: str
    # The digest that the image has at the source. It differs from `digest` if platforms are
    # filtered.
    source_digest: str
    # When the copy began, on the clock of the event loop.
    began: float
    # Whether the target had the image before. Then only artifacts may be missing.
    already_at_target: bool
    # The first failure of the image or of any of its artifacts.
    error: RegsyncError | None = None
    # Whether the same image is copied to other targets too.
    has_several_targets: bool = False

    # Whether this run has put the image.
    is_copied: bool = False

    # The key of the record in the state of the search for its artifacts; empty if this run records
    # none. And the record: that of an earlier run, until this run has searched.
    check_key: bytes = b""
    check: ArtifactCheck = NO_CHECK
    # The artifacts to be listed at a target without the referrers API, by the subject's digest.
    listing: dict[str, list[Descriptor]] = field(default_factory=dict)

    # How many images are unfinished: the image and its artifacts. At 0 the copy has ended.
    unfinished_images: int = 1
    # The digest of the target's tag, if the tag is immutable and was not moved.
    immutable_digest: str | None = None

    # How the blobs of the image and its artifacts got to the target, by digest. What other images
    # have copied there is PRESENT.
    blobs: dict[str, tuple[Descriptor, BlobResult]] = field(default_factory=dict)

    # By tag or digest of an artifact: synced, skipped (it was at the target) or failed.
    artifacts: dict[str, str] = field(default_factory=dict)
    # How many artifacts were left behind, because a rule or a trimmed index excludes them.
    artifacts_stripped: int = 0
    # The lines about artifacts in the output of a dry run.
    planned: list[str] = field(default_factory=list)

    def check_after(self, *, is_complete: bool) -> ArtifactCheck:
        """Return what to record of the search. Unless the target has all artifacts, the next run
        searches for them again.
        """
        return self.check if is_complete else NO_CHECK._replace(first=self.check.first)

    @property
    def has_put_artifacts(self) -> bool:
        return "synced" in self.artifacts.values()

    def record_success(self, image: Image, *, is_copied: bool) -> None:
        """Record that the target has an image or artifact.

        Pass `is_copied=False` for an artifact that another copy has put there.
        """
        self.unfinished_images -= 1
        if not image.artifact:
            # If the tag is immutable at the target and names another image, nothing was copied.
            self.is_copied = self.immutable_digest is None
            return
        self.artifacts[image.reference] = "synced" if is_copied else "skipped"
        if is_copied:
            self.planned.append(f"carry {image.artifact}")

    def record_failure(self, image: Image) -> None:
        """Record that an image was not copied. Its dependents are not copied either.

        If the image was kept by an immutable tag, this is not counted as a failure.
        """
        failed = list(image.with_dependents())
        self.unfinished_images -= len(failed)
        if not image.is_kept_by_immutable_tag:
            self.error = self.error or image.error
            self.artifacts.update((each.reference, "failed") for each in failed if each.artifact)

    def outcome(self, duration: float, *, is_dry_run: bool) -> Outcome:
        """Return the entry for the report. The copy took `duration` seconds."""
        status, reason = self._status(is_dry_run=is_dry_run)
        digest_at_target = self.immutable_digest or self.digest
        blobs = self.blobs.values()
        uploaded = [blob for blob, result in blobs if result is BlobResult.UPLOADED]
        results = Counter(result for _, result in blobs)
        artifacts = Counter(self.artifacts.values())
        return Outcome(
            source=self.source.name_of(self.source_reference),
            target=self.target.name_of(self.reference),
            status=status,
            digest=digest_at_target if self.error is None else None,
            source_digest=self.source_digest,
            reason=reason,
            error=self.error,
            bytes=sum(blob.size for blob in uploaded),
            duration=duration,
            transferred=tuple(blob.digest for blob in uploaded),
            mounted=results[BlobResult.MOUNTED],
            skipped=results[BlobResult.PRESENT] + results[BlobResult.BELIEVED],
            planned=tuple(self.planned),
            artifacts={
                **{status: artifacts[status] for status in ("synced", "skipped", "failed")},
                "stripped": self.artifacts_stripped,
            },
        )

    def _status(self, *, is_dry_run: bool) -> tuple[str, str | None]:
        """Return the status in the report, and the reason if the status is `skipped`."""
        if self.error is not None:
            return "failed", None
        # The copy is not skipped if it has added an artifact to an image that the target had.
        if not self.has_put_artifacts:
            if self.immutable_digest is not None:
                return "skipped", "tag_immutable_exists"
            if self.already_at_target:
                return "skipped", "unchanged"
        return "would_sync" if is_dry_run else "synced", None


@dataclass(eq=False)
class Image:
    """One image or artifact to be copied to a repository under one tag or digest."""

    # The copy that this image or artifact belongs to.
    copy: ImageCopy
    tree: Tree
    # The tag or digest at the target.
    reference: str
    # The key of the tag's snapshot in the state. Empty if `reference` is not a tag.
    snapshot_key: bytes
    # The artifacts that refer to this image. They are copied after it.
    dependents: list[Image]
    # The description of the artifact in the output of a dry run. Empty if this is not an artifact.
    artifact: str = ""

    # How many times the image has started again after a refusal (I5, "Healing").
    restarts: int = 0
    # Whether the target's tag is immutable and names another image, which is not a failure at ECR.
    is_kept_by_immutable_tag: bool = False
    error: RegsyncError | None = None

    @property
    def source(self) -> Repository:
        return self.copy.source

    @property
    def target(self) -> Repository:
        return self.copy.target

    def with_dependents(self) -> Iterator[Image]:
        """Yield this image and all its dependents, at any depth."""
        yield self
        for dependent in self.dependents:
            yield from dependent.with_dependents()
