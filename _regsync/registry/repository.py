"""The interface of a repository for a copy, implemented for registries and for image layouts.

Owns: the methods that `endpoints` and the layouts have in common; the meaning of a refused manifest.
May not know: HTTP, files, which images are copied where, and why.
Follows: OCI distribution-spec 1.1, docs/design.md sections 7 and 13.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import NamedTuple, Protocol

from _regsync.config import Registry
from _regsync.errors import RegistryError, Side, SyncError
from _regsync.net.wire import Pieces
from _regsync.oci import Descriptor, Manifest
from _regsync.providers import Dialect
from _regsync.registry.limits import HostLimits, Need, Turn
from _regsync.state import RepositoryKey


class Host(Protocol):
    """The host of repositories, as this run uses it: a registry or an image layout."""

    # The lanes, streams and reachability of the host.
    limits: HostLimits

    # Whether an upload session can report how many bytes it has received (rule 16).
    can_resume: bool

    @property
    def stop_error(self) -> SyncError | None:
        """The error with which all further requests of this run fail, or None."""

    @property
    def key(self) -> str:
        """The name of the host in reports: HOST:PORT."""

    @property
    def registry(self) -> Registry: ...


class BlobBody(Protocol):
    """The bytes of a blob, read from its source."""

    async def read_into(self, buffer: memoryview) -> int:
        """Read bytes into `buffer`. Returns how many were read, or 0 at the end of the blob."""


class BlobUpload(Protocol):
    """The upload of one blob to a repository. `upload` describes its states and methods."""

    session: str  # the path of the session, or ""
    is_broken: bool  # whether its last body was not answered, and `resume` comes next
    offset: int  # bytes that the session has received
    in_chunks: bool  # whether the blob is sent in several requests
    mount_status: int  # of the answer to the last request to mount; 0: there was none

    async def start(self, mount_from: str | None = None) -> bool: ...

    async def try_mount(self, digest: str, mount_from: str) -> bool: ...

    async def send(
        self, pieces: Pieces, *, is_last: bool = True, turn: Turn | None = None
    ) -> bool: ...

    async def resume(self) -> None: ...

    async def cancel_upload(self) -> None: ...


class LockedParts(NamedTuple):
    """What a lock says of an image."""

    digest: str  # that it has at targets
    artifacts: list[str]  # the digests of all its artifacts
    subjects: list[str]  # its manifests that have artifacts


class Locked(Protocol):
    """What a lock says of a source, which need not be asked then. Without a lock it says nothing."""

    # The digest of each tag, cosign's tags among them. None without a lock.
    known_tags: Mapping[str, str] | None = None

    def locked_parts(self, reference: str) -> LockedParts | None:
        """Return what the lock says of the image that a tag names."""
        return None

    def locked_types(self, digest: str) -> frozenset[str]:
        """Return the types of an artifact. They are empty if they are unknown."""
        return frozenset()


class Repository(Locked, Protocol):
    """One repository, on one side of a copy.

    Errors name side, operation and reference.
    """

    name: str
    api_name: str  # the name in requests
    side: Side
    dialect: Dialect
    key: RepositoryKey  # the identity of the repository's tags
    store_key: RepositoryKey  # of its blobs and manifests; other repositories may share them
    # Whether it is a directory on this machine: it is accessed without requests, what is written is
    # safe after `Layout.save`, and it may be on another disk in a later run.
    is_local: bool

    @property
    def host(self) -> Host: ...

    @property
    def unannounced(self) -> Collection[str]:
        """The subjects of artifacts that were put here without an OCI-Subject in the answer."""

    @property
    def probe_from(self) -> str | None:
        """The repository that a POST names to find out whether a blob exists here, by mounting it.

        The value is "" if the POST names no repository. It is None if only a HEAD can find out.
        """

    def name_of(self, reference: str) -> str:
        """Return the name of a tag or digest of this repository for an error message."""

    def adding_context(self, operation: str, reference: str) -> AbstractContextManager[None]:
        """Return a context that adds side, operation and reference to each error raised in it."""

    def reading_needs(self, size: int) -> tuple[Need, ...]:
        """Return what reading a blob of this size needs. At a registry its lane comes first."""

    def writing_needs(self, size: int, *, in_chunks: bool = False) -> tuple[Need, ...]:
        """Return what sending a blob of this size needs. At a registry the lane of a whole body comes
        first; each chunk enters by itself.
        """

    async def list_tags(self) -> dict[str, str | None] | None:
        """Return all tags. The values are digests if the listing contains them, otherwise None.

        Returns None if the repository does not exist.
        """

    async def head_manifest(self, reference: str) -> str | None:
        """Return the digest of a manifest, "" if it is not reported, or None if the manifest does
        not exist.
        """

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        """Return a manifest, and verify its digest (I3). `expected` is the descriptor that names
        it.

        Raises RegistryError with status 404 if the manifest does not exist.
        """

    async def put_child(self, manifest: Manifest) -> None:
        """Push a manifest by digest that an index names."""

    async def put_manifest(self, reference: str, manifest: Manifest) -> None:
        """Push a manifest under a tag or digest."""

    async def list_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return the descriptors of all manifests that refer to a digest."""

    async def has_blob(self, blob: Descriptor, *, with_retries: bool = False) -> bool | None:
        """Report whether the repository has the blob. If the host reports a size, it must match the
        descriptor's. Returns None if the host refuses to say.

        Without `with_retries` a failed request is not repeated.
        """

    def far_repository(self, digest: str) -> str | None:
        """Return the repository at a target that holds a blob which was omitted here, or None."""

    async def open_blob(
        self, blob: Descriptor, start: int = 0, *, is_fresh: bool = False, turn: Turn | None = None
    ) -> AbstractAsyncContextManager[BlobBody]:
        """Open a blob at byte `start`. Returns a context that yields its body.

        If `is_fresh`, no connection is used that served another request, because it may have
        delivered wrong bytes. `turn` was taken for the request already.
        """

    def begin_upload(self, blob: Descriptor) -> BlobUpload:
        """Return the upload of a blob. No request is sent yet."""


def may_lack_part(error: RegistryError) -> bool:
    """Report whether a manifest may have been refused because a blob or child of it has disappeared
    from the target (docs/design.md section 7, "Healing").
    """
    if error.status >= 500:
        return "MANIFEST_BLOB_UNKNOWN" in error.codes
    if error.status in (401, 403, 413, 429):
        return False
    # Any other code may mean it: zot and Quay answer MANIFEST_INVALID.
    return not is_immutable(error)


def is_immutable(error: RegistryError) -> bool:
    """Report whether a manifest was refused because its tag exists and is immutable (docs/design.md
    section 9).
    """
    is_of_tag = "@" not in (error.reference or "")
    # Harbor says 412 PRECONDITION.
    if is_of_tag and error.status in (409, 412) and "MANIFEST_BLOB_UNKNOWN" not in error.codes:
        return True
    return "TAG_INVALID" in error.codes or "ImageTagAlreadyExistsException" in error.message
