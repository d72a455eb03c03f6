"""What a copy needs of a repository, whether a registry has it or a directory.

Owns: the surface that `remote` and the layouts have in common, what a refused manifest means.
May not know: HTTP, files, what is copied where, or why.
Follows: OCI distribution-spec 1.1, docs/design.md sections 7 and 13.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from _regsync.errors import RegistryError, Side, SyncError
from _regsync.net.http1 import Pieces
from _regsync.net.pool import Lease
from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.providers import Product, UploadStyle
from _regsync.registry.host import Host
from _regsync.registry.throttle import Demand
from _regsync.state.archive import RepositoryKey

if TYPE_CHECKING:
    from hashlib import _Hash


class BlobBody(Protocol):
    """The bytes of a blob on their way from its source."""

    async def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` and return how many bytes it got, 0 at the end of the blob."""

    def read_now(self, buffer: memoryview) -> int:
        """Fill `buffer`, in a worker thread, and return how many bytes it got; 0 where `read_into` has
        to go on: it waits for a peer, and ends the body.
        """


class BlobUpload(Protocol):
    """One blob on its way into a repository; `upload` has the states and what each method does."""

    lease: Lease
    session: str
    broken_session: str
    offset: int
    style: UploadStyle
    is_start_refused: bool
    has_begun: bool

    @property
    def hash(self) -> _Hash | None:
        """The hash of the first `offset` bytes, where an earlier run has sent the first of them."""

    async def start(self, mount_from: str | None = None) -> bool: ...

    async def try_mount(self, digest: str, mount_from: str) -> bool: ...

    async def send(self, pieces: Pieces, *, last: bool = True) -> bool: ...

    async def resume(self) -> None: ...

    async def cancel_upload(self) -> None: ...


class Repository(Protocol):
    """One repository, seen from one side of a copy.

    Errors name side, operation and reference.
    """

    @property
    def host(self) -> Host: ...

    @property
    def name(self) -> str: ...

    @property
    def api_name(self) -> str:
        """The name in requests."""

    @property
    def side(self) -> Side: ...

    @property
    def product(self) -> Product: ...

    @property
    def key(self) -> RepositoryKey:
        """What names its tags."""

    @property
    def pool(self) -> RepositoryKey:
        """What holds its blobs and manifests, perhaps together with those of other repositories."""

    @property
    def is_local(self) -> bool:
        """Whether it is a directory of this machine: it is asked without requests, and a later run may
        find another disk there.
        """

    @property
    def probe_from(self) -> str | None:
        """What a POST mounts from to ask whether a blob is here; None where only a HEAD can ask."""

    def reference(self, reference: str) -> str:
        """Return how an error names a tag or digest of this repository."""

    def full_name(self, reference: str) -> str:
        """Return what an image is called outside of this run."""

    def adding_place(self, operation: str, reference: str) -> AbstractContextManager[None]:
        """Return a block which adds side, operation and reference to every error that it raises."""

    def demand_of_reading(self) -> Demand:
        """Return the limits that the request for a blob counts against."""

    def demand_of_writing(self) -> Demand:
        """Return the limits that the request with a blob's body counts against."""

    async def list_tags(self) -> dict[str, str | None] | None:
        """Return every tag, with its digest where that costs nothing; None without the repository."""

    async def head_manifest(self, reference: str) -> str | None:
        """Return a manifest's digest; "" where it is not told, None where there is no manifest."""

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        """Return a manifest that has the digest asked for (I3). RegistryError with status 404 where
        there is none.
        """

    async def put_child(self, manifest: Manifest) -> None:
        """Put a manifest that an index names."""

    async def put_manifest(
        self, reference: str, manifest: Manifest, *, full_name: str = ""
    ) -> None:
        """Put a manifest under a tag or digest; `full_name` is what it is called at its source."""

    async def missing_parts_of(
        self, root: Manifest, children: tuple[Manifest, ...]
    ) -> frozenset[str]:
        """Ask for each blob and child of an image; return the digests of those that are missing."""

    async def list_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return what refers to a digest."""

    def has_unsaved(self) -> bool:
        """Say whether something was put that a power cut could still take away."""

    async def wait_until_saved(self) -> None:
        """Return when all that was put is there for good; raise why it will not be."""

    async def has_blob(self, blob: Descriptor, *, with_retries: bool = False) -> bool:
        """Say whether a blob is here and has its size."""

    async def blob_size(self, digest: str) -> int | None:
        """Return the bytes of a blob, None where they are not told. RegistryError with status 404
        where there is no such blob.
        """

    def known_read_error(self, blob: Descriptor) -> SyncError | None:
        """Return why a blob is known not to be readable here; None where it may be."""

    def far_repository(self, digest: str) -> str | None:
        """Return a repository at a target that is said to hold a blob which was left out here."""

    async def open_blob(
        self, blob: Descriptor, start: int = 0, *, is_fresh: bool = False
    ) -> AbstractAsyncContextManager[BlobBody]:
        """Open a blob at byte `start`. Returns a context that yields its bytes. With `is_fresh` they do
        not come over the connection that has delivered wrong bytes before.
        """

    def reserving(
        self, reference: str, blobs: Iterable[Descriptor], manifests: Iterable[Manifest]
    ) -> AbstractContextManager[None]:
        """Return a block that keeps room for an image; it raises SyncError where there is too little."""

    def begin_upload(self, blob: Descriptor, lease: Lease) -> BlobUpload:
        """Return the upload of a blob, which has not begun."""


def may_be_stale(error: RegistryError) -> bool:
    """Say whether a manifest may have been refused because something that it names is gone
    (docs/design.md section 7, "Healing").
    """
    if error.status >= 500:
        return "MANIFEST_BLOB_UNKNOWN" in error.codes
    if error.status in (401, 403, 413, 429):
        return False
    return not is_immutable(error)  # any other code counts: zot and Quay say MANIFEST_INVALID


def is_immutable(error: RegistryError) -> bool:
    """Say whether a manifest was refused because its tag may not move (docs/design.md section 9)."""
    return "TAG_INVALID" in error.codes or "ImageTagAlreadyExistsException" in error.message
