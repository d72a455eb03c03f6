"""The distribution specification from the client's side: one method per endpoint. Owns: paths,
headers, statuses, the reading of answers. May not know: what is copied where, or why. Invariants:
I3 (a manifest is what its digest says, or the registry is in error), I6 (a Location elsewhere gets
no credentials), an error names side, operation, reference. Follows OCI distribution-spec 1.1,
docs/protocol-facts.md section 1 (numbers below)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from _regsync.errors import ContentError, ProtocolBroken, RegistryError, Side, SyncError
from _regsync.net.http1 import Response
from _regsync.oci import manifest as oci_manifest
from _regsync.oci.manifest import Manifest
from _regsync.oci.reference import check_digest, is_tag
from _regsync.providers import ROWS, api_repository
from _regsync.registry.redirects import resolve_location
from _regsync.registry.transport import Call, Host, Transport
from _regsync.text import clean

_MANIFEST_LIMIT = 4 * 1024 * 1024


_TAGS_LIMIT = 8 * 1024 * 1024


# A listing is in memory; the largest known repositories have some 100,000 tags.
_MOST_PAGES = 10_000


_MOST_TAGS = 1_000_000


_MOST_REFERRERS = 10_000


# RFC 8288: <target>; parameters, whose quotes may hold separators. A target has no `<`: 64 KiB must
# not cost a square.
_LINK = r'<([^<>]*)>((?:[^,"]|"[^"]*")*)'


# The first `rel` outside of quotes; blanks belong to one place only, for the same reason.
_NEXT = r'(?i)(?:[^"]|"[^"]*")*?;\s*rel\s*=\s*(?:"(?:[^"]*\s)?)?next(?![^\s";])'


_BELOW = r"/(?![^?]*(?i:\.|%2e){2})"  # and no segment of dots leads out again


class Repository:
    """One repository of one host, seen from one side of a copy."""

    def __init__(
        self, transport: Transport, host: Host, name: str, side: Side, *, reads_only: bool = False
    ) -> None:
        self._transport = transport
        self.host = host
        self.name = name
        self.side = side
        self.rights = (
            "pull" if reads_only or side is Side.SOURCE else "pull,push"
        )  # asking to push creates it on Quay
        self.api_name = api_repository(
            host.registry.host, name
        )  # Docker Hub's `library/` is on the wire only
        self.key = (host.key, self.api_name)
        self._base = f"/v2/{self.api_name}"
        self.row = ROWS[host.registry.kind]

    def __str__(self) -> str:
        return f"{self.host.key}/{self.name}"

    def reference(self, reference: str) -> str:
        return f"{self}{'@' if ':' in reference else ':'}{reference}"

    @contextmanager
    def located(self, operation: str, reference: str) -> Iterator[None]:
        """Add side, operation and reference to every error of the block."""
        try:
            yield
        except SyncError as error:
            error.located(self.side, operation, reference)
            error.message = self.host.authenticator.redact(
                error.message
            )  # what is no listing may repeat the request,
            error.__cause__ = None  # and a traceback shows causes
            raise

    def call(
        self, action: str, method: str, path: str, *headers: tuple[str, str], body: bytes = b""
    ) -> Call:
        return Call(
            action, method, f"{self._base}/{path}", self.api_name, self.rights, headers, body
        )

    async def list_tags(self) -> dict[str, str | None] | None:
        """Return every tag, with its digest where the listing has it (Google's); None where no
        repository is known.
        """
        # hashes: a Link may have 64 KiB
        size = self.row.page_size
        tags = dict[str, str | None]()
        asked = set[int]()
        call = self.call("tag_list", "GET", f"tags/list?n={size}")
        with self.located("list tags of", str(self)):
            while len(asked) < _MOST_PAGES:
                asked.add(hash(call.path))
                try:
                    answer = await self._transport.request(
                        self.host, call, ok=(200,), limit=_TAGS_LIMIT
                    )
                except RegistryError as error:
                    if error.status == 404 and not tags:
                        return None
                    if "PAGINATION_NUMBER_INVALID" not in error.codes or size <= 100:
                        raise
                    # an older maximum (section 1.11)
                    size = 100
                    call = self.call("tag_list", "GET", "tags/list?n=100")
                    continue
                found = _tags_of(answer.body, self.row.listing_has_digests)
                fresh = [tag for tag in found if tag not in tags]
                tags.update(found)
                if len(tags) > _MOST_TAGS:
                    raise ContentError(f"the listing has more than {_MOST_TAGS} tags")
                following = self._linked(call, answer)
                if (
                    following is None and fresh and len(found) == size
                ):  # some page without a Link (section 1.11)
                    following = f"{self._base}/tags/list?n={size}&last={fresh[-1]}"
                if following is None or hash(following) in asked:
                    return tags
                call = call._replace(path=following)
            raise ProtocolBroken(f"the listing has more than {_MOST_PAGES} pages")

    def _linked(self, call: Call, answer: Response) -> str | None:
        told = ", ".join(answer.headers.all("link"))
        for target, parameters in re.findall(_LINK, told) if told else ():
            if re.match(_NEXT, parameters):
                origin, path = resolve_location(self.host.origin, call.path, target)
                if origin != self.host.origin or not re.match(re.escape(self._base) + _BELOW, path):
                    raise ProtocolBroken(
                        "the next page of the listing is on another origin, refused (R6)"
                    )
                return path
        return None

    async def head_manifest(self, reference: str) -> str | None:
        """Ask for a manifest's digest: empty where the registry does not tell, None when it is
        absent.
        """
        call = self.call(
            "manifest_head",
            "HEAD",
            f"manifests/{reference}",
            ("Accept", oci_manifest.ACCEPT_MANIFESTS),
        )
        with self.located("look up", self.reference(reference)):
            answer = await self._transport.request(self.host, call, ok=(200, 404))
            told = answer.headers.get("docker-content-digest") or ""
            return None if answer.status == 404 else told and check_digest(told)

    async def get_manifest(
        self, reference: str, *, expected: oci_manifest.Descriptor | None = None
    ) -> oci_manifest.Manifest:
        """Fetch and verify (I3) a manifest, also against `expected`, the index entry; RegistryError
        404 when absent.
        """
        accept = oci_manifest.ACCEPT_MANIFESTS
        if expected is not None and expected.media_type not in accept:
            accept = f"{accept}, {expected.media_type}"
        call = self.call("manifest_get", "GET", f"manifests/{reference}", ("Accept", accept))
        with self.located("fetch manifest", self.reference(reference)):
            answer = await self._transport.request(
                self.host, call, ok=(200,), limit=_MANIFEST_LIMIT
            )
            told = reference if ":" in reference else answer.headers.get("docker-content-digest")
            content_type = answer.headers.get("content-type")
            return oci_manifest.parse_manifest(
                answer.body, content_type=content_type, digest=told, expected=expected
            )

    async def list_referrers(self, digest: str) -> tuple[oci_manifest.Descriptor, ...]:
        """Return what the referrers API lists (section 1.10), all pages; RegistryError where there
        is none.
        """
        accept = ("Accept", oci_manifest.ACCEPT_MANIFESTS.partition(",")[0])
        call = self.call("manifest_get", "GET", f"referrers/{digest}", accept)
        asked = set[int]()
        found = dict[str, oci_manifest.Descriptor]()
        size = 0
        with self.located("list referrers of", self.reference(digest)):
            while (
                hash(call.path) not in asked
                and max(len(asked), len(found), size // 1024) <= _MOST_REFERRERS
            ):
                asked.add(hash(call.path))
                answer = await self._transport.request(
                    self.host, call, ok=(200,), limit=_MANIFEST_LIMIT
                )
                size = size + len(answer.body)
                told = answer.headers.get("content-type") or ""
                try:
                    page = oci_manifest.parse_manifest(answer.body, content_type=told)
                    if not page.is_index:
                        raise ContentError("not an index")
                except ContentError as error:
                    # What calls itself a list is a broken one; anything else is what an unknown
                    # path is answered with.
                    if len(asked) > 1 or told.startswith(accept[1]):
                        raise
                    raise RegistryError(
                        f"a 200 that is no list: {error.message}", status=200
                    ) from error
                found.update((each.digest, each) for each in page.children)
                if (following := self._linked(call, answer)) is None:
                    return tuple(found.values())
                call = call._replace(path=following)
            raise ProtocolBroken(
                f"the list goes in circles, or names more than {_MOST_REFERRERS}, or has as many KiB"
            )

    async def put_manifest(self, reference: str, manifest: oci_manifest.Manifest) -> None:
        content_type = ("Content-Type", manifest.media_type)
        call = self.call(
            "manifest_put", "PUT", f"manifests/{reference}", content_type, body=manifest.body
        )
        with self.located("push manifest", self.reference(reference)):
            answer = await self._transport.request(self.host, call, ok=(201, 200))
            self.compare(answer, manifest.digest)
            stored = answer.status == 201 or answer.headers.get("docker-content-digest")
            if not stored and await self.head_manifest(reference) not in (manifest.digest, ""):
                raise ProtocolBroken("the registry answered 200 and does not hold the manifest")

    def compare(self, answer: Response, digest: str) -> None:
        """Refuse an answer that names another digest than the one that was pushed."""
        told = answer.headers.get("docker-content-digest")
        # Another algorithm's digest of the same bytes says nothing (section 1.4).
        if told and told.partition(":")[0] == digest.partition(":")[0] and told != digest:
            raise ContentError(
                f"the registry says that it stored {clean(told, 100)} instead of {digest}"
            )

    async def has_blob(self, blob: oci_manifest.Descriptor) -> bool:
        call = self.call("blob_head", "HEAD", f"blobs/{blob.digest}")
        with self.located("look up blob", self.reference(blob.digest)):
            try:
                async with self._transport.opened(self.host, call, (200, 404)) as answer:
                    pass
            except RegistryError as error:
                if error.status not in (401, 403):
                    raise
                # several registries hide what is there: the upload decides (docs/design.md section
                # 9)
                return False
        return answer.status == 200 and answer.headers.get("content-length") in (
            None,
            str(blob.size),
        )

    async def absent(self, root: Manifest, children: tuple[Manifest, ...]) -> frozenset[str]:
        """Ask which blobs and children of an image are not here."""
        blobs = {blob.digest: blob for manifest in (root, *children) for blob in manifest.blobs}
        lost = [digest for digest, blob in blobs.items() if not await self.has_blob(blob)]
        lost += [
            child.digest for child in children if await self.head_manifest(child.digest) is None
        ]
        return frozenset(lost)

    @asynccontextmanager
    async def open_blob(
        self, blob: oci_manifest.Descriptor, start: int = 0
    ) -> AsyncIterator[Response]:
        """Open a blob at byte `start` (section 1.13: or ProtocolBroken); the caller has a permit
        and hashes (I3).
        """
        span = (("Range", f"bytes={start}-"),) if start else ()
        call = self.call("blob_get", "GET", f"blobs/{blob.digest}", *span)
        async with AsyncExitStack() as stack:
            with self.located("fetch blob", self.reference(blob.digest)):
                response = await stack.enter_async_context(
                    self._transport.opened(self.host, call, (200, 206))
                )
                told = response.headers.get("content-range") or ""
                left = blob.size - start
                goes_on = response.status == 206 and told.startswith(f"bytes {start}-")
                if start and not (goes_on and response.length in (None, left)):
                    raise ProtocolBroken("the registry does not continue the blob where it broke")
                if response.length is not None and response.length != left:
                    raise ContentError(
                        f"the blob has {response.length} bytes, its descriptor says {blob.size}"
                    )
            yield response


def _tags_of(body: bytes, with_digests: bool) -> dict[str, str | None]:
    """Read one page of a listing (section 1.11): nulls and digests are left out, other nonsense
    fails.
    """
    if body.count(b"[") + body.count(b"{") > _MOST_TAGS // 4:
        raise ContentError("the tag listing is not a list of names")
    try:
        document = json.loads(body)
        tags = [] if document["tags"] is None else document["tags"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        began = clean(body[:999].decode("utf-8", "replace"), 60)
        raise ContentError(
            f"the tag listing is not what the specification says: {began}"
        ) from error
    if not isinstance(tags, list):
        raise ContentError("the tag listing is not a list")
    named = [tag for tag in tags if tag and not (isinstance(tag, str) and ":" in tag)]
    if wrong := [tag for tag in named if not isinstance(tag, str) or not is_tag(tag)]:
        raise ContentError(
            f"the tag listing holds a name that no tag can have: {clean(str(wrong[0]), 60)}"
        )
    found: dict[str, str | None] = dict.fromkeys(named)
    manifests = document.get("manifest") if with_digests else None
    for digest, about in manifests.items() if isinstance(manifests, dict) else ():
        names = about.get("tag") if isinstance(about, dict) else None
        for tag in names if isinstance(names, list) else ():
            if (
                isinstance(tag, str)
                and tag in found
                and re.fullmatch("sha256:[0-9a-f]{64}", digest)
            ):
                found[tag] = digest
    return found


def may_be_stale(error: RegistryError) -> bool:
    """Say whether a refused manifest may mean that something it names is gone (docs/design.md
    section 7, I5).
    """
    if error.status >= 500:
        return "MANIFEST_BLOB_UNKNOWN" in error.codes
    return error.status not in (401, 403, 413, 429) and not is_immutable(
        error
    )  # zot and Quay say MANIFEST_INVALID


def is_immutable(error: RegistryError) -> bool:
    """Say whether this is how a tag that never moves is refused (docs/design.md section 9)."""
    return "TAG_INVALID" in error.codes or "ImageTagAlreadyExistsException" in error.message
