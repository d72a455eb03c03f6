"""The distribution specification from the client's side: one method for each endpoint.

Owns: paths, headers, statuses, the reading of answers. The endpoints of an upload are in `upload`.
May not know: what is copied where, or why.
Invariants: a manifest that is returned has the digest that was asked for (I3); a next page on
    another origin is refused (I6); a listing that leads back to itself is an error (I12); an error
    names side, operation and reference.
Follows: OCI distribution-spec 1.1, docs/protocol-facts.md section 1 (its numbers are cited below).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext

from _regsync.errors import (
    ContentError,
    ListingBroken,
    ProtocolBroken,
    RegistryError,
    Side,
    SyncError,
    WrongBytes,
)
from _regsync.net.http1 import Header, Response
from _regsync.net.pool import Lease
from _regsync.oci.manifest import ACCEPT_MANIFESTS, Descriptor, Manifest, parse_manifest
from _regsync.oci.reference import check_digest, image_name, is_digest, is_tag
from _regsync.providers import PRODUCTS, api_repository
from _regsync.registry.host import RegistryClient
from _regsync.registry.redirects import resolve_location
from _regsync.registry.throttle import Demand
from _regsync.registry.transport import Call, Transport
from _regsync.registry.upload import Upload
from _regsync.state.archive import RepositoryKey
from _regsync.text import clean_beginning, printable, redacting

# Limits of answers, in bytes.
_MANIFEST_LIMIT = 4 * 1024 * 1024
_TAGS_LIMIT = 8 * 1024 * 1024

# A listing is held in memory; the largest known repositories have some 100,000 tags.
_MOST_PAGES = 10_000
_MOST_TAGS = 1_000_000

# A list of referrers has at most so many pages, so many entries and so many KiB.
_MOST_REFERRERS = 10_000

# The page size that every registry takes (section 1.11).
_SMALL_PAGE = 100

# Harbor has no host names of its own; its tokens are for this service (docs/protocol-facts.md
# section 2.1).
_HARBOR_SERVICE = "harbor-registry"

_ACCEPT_MANIFESTS: Header = ("Accept", ACCEPT_MANIFESTS)

# The media type of a list of referrers, which is an OCI index.
_INDEX = ACCEPT_MANIFESTS.partition(",")[0]

# RFC 8288: <target>; parameters, whose quotes may hold separators. A target has no `<`: 64 KiB must
# not cost a square.
_LINK = r'<([^<>]*)>((?:[^,"]|"[^"]*")*)'

# The first `rel` outside of quotes; blanks belong to one place only, for the same reason.
_NEXT = r'(?i)(?:[^"]|"[^"]*")*?;\s*rel\s*=\s*(?:"(?:[^"]*\s)?)?next(?![^\s";])'

# A path below a repository's own, without a segment of two dots, which would lead out again.
_BELOW = r"/(?![^?]*(?i:\.|%2e){2})"


class _Pages:
    """The pages of one listing that were read, with numbers from 1: none may come twice (I12).

    Hashes stand for paths and contents, because a Link may have 64 KiB.
    """

    def __init__(self, listed: str) -> None:
        """`listed` names the listed things in an error: "tags"."""
        self._listed = listed
        self._number_by_path = dict[int, int]()
        self._number_by_content = dict[int, int]()

    def __len__(self) -> int:
        return len(self._number_by_path)

    def add(self, path: str) -> None:
        """Note that a page is asked for."""
        self._number_by_path[hash(path)] = len(self) + 1

    def has(self, path: str) -> bool:
        """Say whether a page was asked for."""
        return hash(path) in self._number_by_path

    def check(self, content: Collection[str], following: str | None, *, has_new: bool) -> None:
        """Raise ListingBroken where the listing comes back to a page that was read.

        `content` are the names on the page added last, `following` is where its Link leads.
        """
        number = len(self)
        if following is not None and self.has(following):
            raise self._endless(number, f"page {self._number_by_path[hash(following)]}")

        same = self._number_by_content.setdefault(hash(tuple(content)), number)
        if not content or has_new:
            return
        if same != number:
            raise self._endless(number - 1, f"page {same}")
        # A last page may repeat some names: a registry may begin each with the last one before it.
        if following is not None:
            raise self._endless(number - 1, "what earlier pages name")

    def _endless(self, number: int, goal: str) -> ListingBroken:
        text = f"the list of {self._listed} does not end: page {number} leads back to {goal}"
        return ListingBroken(text)


class _Place(redacting):
    """A block that adds side, operation and reference to each error raised in it, without secrets."""

    def __init__(self, repository: RemoteRepository, operation: str, reference: str) -> None:
        super().__init__(repository.host.secrets)
        self._repository = repository
        self._operation = operation
        self._reference = reference

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        super().__exit__(_type, error, _traceback)
        if isinstance(error, SyncError):
            error.with_place(self._repository.side, self._operation, self._reference)
            # A malformed answer may repeat our request with its login; a traceback shows causes.
            error.message = self._repository.host.redact(error.message)
            error.__cause__ = None


class RemoteRepository:
    """One repository of one registry, seen from one side of a copy: see `Repository`."""

    is_local = False

    def __init__(
        self,
        transport: Transport,
        host: RegistryClient,
        name: str,
        side: Side,
        *,
        reads_only: bool = False,
    ) -> None:
        self._transport = transport
        self.host = host
        self.name = name
        self.side = side
        self.product = PRODUCTS[host.registry.kind]  # what is known of the registry's product

        # Quay creates a repository when push is asked for.
        self.rights = "pull" if reads_only or side is Side.SOURCE else "pull,push"

        # Docker Hub's `library/` is on the wire only.
        self.api_name = api_repository(host.registry.host, name)
        self.key = RepositoryKey(host.key, self.api_name)
        self.pool = self.key
        self._base = f"/v2/{self.api_name}"
        self._text = f"{host.key}/{name}"

    def __str__(self) -> str:
        return self._text

    @property
    def probe_from(self) -> str | None:
        """What a POST mounts from to ask whether a blob is here ("": it names nothing); None where only
        a HEAD can ask (docs/design.md section 6, rule 11).
        """
        if self.host.authenticator.service == _HARBOR_SERVICE:
            return None
        if self.product.probe == "from":
            return self.api_name
        return "" if self.product.probe == "bare" else None

    def reference(self, reference: str) -> str:
        """Return how an error names a tag or digest of this repository."""
        return image_name(self._text, reference)

    def full_name(self, reference: str) -> str:
        """Return what an image is called outside of this run: other tools know no short names of Docker
        Hub's.
        """
        return image_name(f"{self.host.key}/{self.api_name}", reference)

    def adding_place(self, operation: str, reference: str) -> _Place:
        """Return a block which adds side, operation and reference to every error that it raises."""
        return _Place(self, operation, reference)

    def build_call(
        self, action: str, method: str, path: str, *headers: Header, body: bytes = b""
    ) -> Call:
        """Word a request to a path below this repository's own."""
        return Call(
            action, method, f"{self._base}/{path}", self.api_name, self.rights, headers, body
        )

    def demand_of_reading(self) -> Demand:
        """Return the limits that the request for a blob counts against."""
        return self._transport.demand_of(self.host, self.build_call("blob_get", "GET", ""))

    def demand_of_writing(self) -> Demand:
        """Return the limits that the request with a blob's body counts against."""
        return self._transport.demand_of(self.host, self.build_call("upload_body", "PUT", ""))

    # Tags.

    async def list_tags(self) -> dict[str, str | None] | None:
        """Return every tag, with its digest where the listing has it (Google's registries).

        None where the registry knows no such repository. ListingBroken for a listing without end.
        """
        with self.adding_place("list tags of", str(self)):
            page_size = self.product.page_size
            try:
                return await self._list_tags(page_size)
            except RegistryError as error:
                # Older versions of a registry take only small pages (section 1.11).
                is_size_refused = "PAGINATION_NUMBER_INVALID" in error.codes
                if not is_size_refused or page_size <= _SMALL_PAGE:
                    raise
            return await self._list_tags(_SMALL_PAGE)

    async def _list_tags(self, page_size: int) -> dict[str, str | None] | None:
        tags: dict[str, str | None] = {}
        pages = _Pages("tags")
        is_linked = False
        call = self.build_call("tag_list", "GET", f"tags/list?n={page_size}")
        while len(pages) < _MOST_PAGES:
            pages.add(call.path)
            try:
                answer = await self._transport.request(
                    self.host, call, ok=(200,), limit=_TAGS_LIMIT
                )
            except RegistryError as error:
                if error.status == 404 and len(pages) == 1:
                    return None
                raise
            page = _tags_of(answer.body, self.product.listing_has_digests)
            new = [tag for tag in page if tag not in tags]
            tags.update(page)
            if len(tags) > _MOST_TAGS:
                raise ContentError(f"the listing has more than {_MOST_TAGS} tags")

            following = self._next_page(call, answer)
            if is_linked or following is not None:
                pages.check(page, following, has_new=bool(new))

            is_linked = following is not None
            if following is None and new and len(page) == page_size:
                # Some registries give a page without a Link (section 1.11).
                following = f"{self._base}/tags/list?n={page_size}&last={new[-1]}"
            if following is None or pages.has(following):
                return tags
            call = call._replace(path=following)
        raise ProtocolBroken(f"the listing has more than {_MOST_PAGES} pages")

    def _next_page(self, call: Call, answer: Response) -> str | None:
        """Return the path of a listing's next page; ProtocolBroken when it is elsewhere (R6)."""
        links = ", ".join(answer.headers.all("link"))
        if not links:
            return None
        for target, parameters in re.findall(_LINK, links):
            if re.match(_NEXT, parameters):
                origin, path = resolve_location(self.host.origin, call.path, target)
                is_own = re.match(re.escape(self._base) + _BELOW, path) is not None
                if origin != self.host.origin or not is_own:
                    raise ProtocolBroken(
                        "the next page of the listing is not in this repository at this host"
                    )
                return path
        return None

    # Manifests.

    async def head_manifest(self, reference: str) -> str | None:
        """Return a manifest's digest; "" where the registry does not tell it, None where there is
        no such manifest.
        """
        path = f"manifests/{reference}"
        call = self.build_call("manifest_head", "HEAD", path, _ACCEPT_MANIFESTS)
        with self.adding_place("look up", self.reference(reference)):
            answer = await self._transport.request(self.host, call, ok=(200, 404))
            if answer.status == 404:
                return None
            digest = answer.headers.get("docker-content-digest")
            return check_digest(digest) if digest else ""

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        """Return a manifest whose bytes have the digest that was asked for, or that the registry
        names (I3).

        Other bytes are asked for once more over a fresh connection: a cache on the way may have
        been wrong once. Raises ContentError when they still do not, or when they contradict
        `expected`, the entry of an index; RegistryError with status 404 when there is no such
        manifest.
        """
        accept = _ACCEPT_MANIFESTS
        if expected is not None and expected.media_type not in ACCEPT_MANIFESTS:
            accept = ("Accept", f"{ACCEPT_MANIFESTS}, {expected.media_type}")
        call = self.build_call("manifest_get", "GET", f"manifests/{reference}", accept)
        with self.adding_place("fetch manifest", self.reference(reference)):
            try:
                return await self._get_manifest(call, reference, expected)
            except WrongBytes:
                return await self._get_manifest(call._replace(is_fresh=True), reference, expected)

    async def _get_manifest(
        self, call: Call, reference: str, expected: Descriptor | None
    ) -> Manifest:
        answer = await self._transport.request(self.host, call, ok=(200,), limit=_MANIFEST_LIMIT)
        digest = reference if is_digest(reference) else answer.headers.get("docker-content-digest")
        content_type = answer.headers.get("content-type")
        return parse_manifest(
            answer.body, content_type=content_type, digest=digest, expected=expected
        )

    async def put_child(self, manifest: Manifest) -> None:
        """Push a manifest that an index names."""
        await self.put_manifest(manifest.digest, manifest)

    async def put_manifest(
        self, reference: str, manifest: Manifest, *, full_name: str = ""
    ) -> None:
        """Push a manifest; ContentError or ProtocolBroken when the registry stored something else.

        A registry is not told its `full_name`.
        """
        content_type = ("Content-Type", manifest.media_type)
        call = self.build_call(
            "manifest_put", "PUT", f"manifests/{reference}", content_type, body=manifest.body
        )
        with self.adding_place("push manifest", self.reference(reference)):
            answer = await self._transport.request(self.host, call, ok=(201, 200))
            self.check_stored_digest(answer, manifest.digest)
            if answer.status == 201 or answer.headers.get("docker-content-digest"):
                return
            # A 200 without a digest may be anybody's.
            if await self.head_manifest(reference) not in (manifest.digest, ""):
                raise ProtocolBroken("the registry answered 200, but does not hold the manifest")

    def check_stored_digest(self, answer: Response, digest: str) -> None:
        """Raise ContentError for an answer that names another digest than what was pushed."""
        stored = answer.headers.get("docker-content-digest")
        if not stored or stored == digest:
            return
        # Another algorithm's digest of the same bytes says nothing (section 1.4).
        if stored.partition(":")[0] == digest.partition(":")[0]:
            raise ContentError(
                f"the registry says that it stored {printable(stored, 100)} instead of {digest}"
            )

    async def missing_parts_of(
        self, root: Manifest, children: tuple[Manifest, ...]
    ) -> frozenset[str]:
        """Ask for each blob and child of an image; return the digests of those that are missing."""
        missing: list[str] = []
        blobs = {blob.digest: blob for manifest in (root, *children) for blob in manifest.blobs}
        for digest, blob in blobs.items():
            if not await self.has_blob(blob, with_retries=True):
                missing.append(digest)
        for child in children:
            if await self.head_manifest(child.digest) is None:
                missing.append(child.digest)
        return frozenset(missing)

    async def list_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return the descriptors that the referrers API lists (section 1.10), of all pages.

        RegistryError where there is no such API, or the first page is refused; ListingBroken where
        the list comes back to an earlier page, or a later page is refused; ProtocolBroken where the
        list is longer than any that is known.
        """
        call = self.build_call("manifest_get", "GET", f"referrers/{digest}", ("Accept", _INDEX))
        pages = _Pages("referrers")
        referrers: dict[str, Descriptor] = {}
        size = 0
        with self.adding_place("list referrers of", self.reference(digest)):
            while True:
                pages.add(call.path)
                try:
                    answer = await self._transport.request(
                        self.host, call, ok=(200,), limit=_MANIFEST_LIMIT
                    )
                except RegistryError as error:
                    # With a first page there is such an API, whatever a later page's error says.
                    is_later_page = len(pages) > 1
                    is_about_login = error.status in (401, 403)
                    if is_later_page and not error.retryable and not is_about_login:
                        text = f"page {len(pages)} of the list of referrers: {error.message}"
                        raise ListingBroken(text) from error
                    raise
                size += len(answer.body)
                page = {
                    entry.digest: entry for entry in _referrers_of(answer, is_first=len(pages) == 1)
                }
                has_new = not page.keys() <= referrers.keys()
                referrers.update(page)

                following = self._next_page(call, answer)
                pages.check(page, following, has_new=has_new)
                if following is None:
                    return tuple(referrers.values())
                is_larger = size > _MOST_REFERRERS * 1024
                if is_larger or len(referrers) > _MOST_REFERRERS or len(pages) > _MOST_REFERRERS:
                    raise ProtocolBroken(
                        f"the list has more than {_MOST_REFERRERS} referrers, or more than that many KiB"
                    )
                call = call._replace(path=following)

    def has_unsaved(self) -> bool:
        """Say whether something was put that is not safe yet: what a registry has answered is."""
        return False

    async def wait_until_saved(self) -> None:
        """Return at once."""

    # Blobs.

    async def has_blob(self, blob: Descriptor, *, with_retries: bool = False) -> bool:
        """Send a HEAD; say whether the blob is here and has its size, where that is told.

        Without `with_retries` one request is sent: for callers that repeat their whole attempt. The
        blob counts as absent where the registry refuses to say (401, 403), because the upload shows
        whether the blob can be written (docs/design.md section 9).
        """
        call = self.build_call("blob_head", "HEAD", f"blobs/{blob.digest}")
        with self.adding_place("look up blob", self.reference(blob.digest)):
            try:
                if with_retries:
                    answer = await self._transport.request(self.host, call, ok=(200, 404))
                else:
                    answer = await self._head_once(call)
            except RegistryError as error:
                if error.status not in (401, 403):
                    raise
                return False
        size = answer.headers.get("content-length")
        return answer.status == 200 and size in (None, str(blob.size))

    async def _head_once(self, call: Call) -> Response:
        exchange = await self._transport.exchange(self.host, call, (200, 404))
        async with exchange as answer:
            return answer  # a HEAD has no body to read

    def known_read_error(self, blob: Descriptor) -> SyncError | None:
        """Return None: only a request tells."""
        return None

    def far_repository(self, digest: str) -> str | None:
        """Return None: a registry leaves nothing out."""
        return None

    def reserving(
        self, reference: str, blobs: Iterable[Descriptor], manifests: Iterable[Manifest]
    ) -> AbstractContextManager[None]:
        """Keep nothing: a registry does not tell its room."""
        return nullcontext()

    def begin_upload(self, blob: Descriptor, lease: Lease) -> Upload:
        """Return the upload of a blob, which has not begun."""
        return Upload(self, self._transport, lease, blob)

    async def blob_size(self, digest: str) -> int | None:
        """Return the bytes of a blob, None where the registry does not tell them.

        RegistryError with status 404 where there is no such blob.
        """
        call = self.build_call("blob_head", "HEAD", f"blobs/{digest}")
        with self.adding_place("look up blob", self.reference(digest)):
            answer = await self._transport.request(self.host, call, ok=(200,))
        size = answer.headers.get("content-length")
        return int(size) if size is not None else None

    async def open_blob(
        self, blob: Descriptor, start: int = 0, *, is_fresh: bool = False
    ) -> AbstractAsyncContextManager[Response]:
        """Request a blob from byte `start` on. Returns a context that yields the response; the caller
        reads its body inside. With `is_fresh` the request goes over a connection that no other request
        has used.

        The caller has a permit, and hashes the body (I3). Raises ProtocolBroken when the registry
        does not begin at `start` (docs/protocol-facts.md section 1.13), WrongBytes when the blob has
        another size than its descriptor says.
        """
        call = self.build_call("blob_get", "GET", f"blobs/{blob.digest}")._replace(
            is_fresh=is_fresh
        )
        if start:
            call = call._replace(headers=(("Range", f"bytes={start}-"),))
        with self.adding_place("fetch blob", self.reference(blob.digest)):
            turn = await self._transport.exchange(self.host, call, (200, 206))
            assert turn.response is not None
            try:
                _check_range(turn.response, blob, start)
            except SyncError:
                await turn.end()
                raise
        return turn


def _check_range(response: Response, blob: Descriptor, start: int) -> None:
    """Raise for a body that is not what follows byte `start` of a blob."""
    remaining = blob.size - start
    if start:
        content_range = response.headers.get("content-range") or ""
        is_rest = response.status == 206 and content_range.startswith(f"bytes {start}-")
        if not is_rest or response.length not in (None, remaining):
            raise ProtocolBroken("the registry did not resume the blob where it broke off")
    if response.length not in (None, remaining):
        raise WrongBytes(f"the blob has {response.length} bytes, its descriptor says {blob.size}")


def _referrers_of(answer: Response, *, is_first: bool) -> tuple[Descriptor, ...]:
    """Read one page of a list of referrers; RegistryError when it is no list at all.

    What calls itself an index, or follows one, is a broken list. Anything else is what some
    registries answer to a path that they do not know.
    """
    content_type = answer.headers.get("content-type") or ""
    try:
        page = parse_manifest(answer.body, content_type=content_type)
        if not page.is_index:
            raise ContentError("not an index")
    except ContentError as error:
        if not is_first or content_type.startswith(_INDEX):
            raise
        raise RegistryError(f"status 200, but not a list: {error.message}", status=200) from error
    return page.children


def _tags_of(body: bytes, with_digests: bool) -> dict[str, str | None]:
    """Read one page of a listing (section 1.11): nulls and digests are left out, other nonsense
    fails.
    """
    if body.count(b"[") + body.count(b"{") > _MOST_TAGS // 4:
        raise ContentError("the tag listing is not a list of names")
    try:
        document = json.loads(body)
        tags = document["tags"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        beginning = clean_beginning(body, 60)
        raise ContentError(f"the tag listing is not valid: {beginning}") from error
    if tags is None:
        tags = []
    if not isinstance(tags, list):
        raise ContentError("the tag listing is not a list")

    names: dict[str, str | None] = {}
    for tag in tags:
        if not tag or (isinstance(tag, str) and ":" in tag):
            continue
        if not isinstance(tag, str) or not is_tag(tag):
            raise ContentError(f"the tag listing holds an invalid tag: {printable(str(tag), 60)}")
        names[tag] = None
    if with_digests:
        _add_digests(names, document.get("manifest"))
    return names


def _add_digests(names: dict[str, str | None], manifests: object) -> None:
    """Enter the digests that Google's listings have: `{"sha256:...": {"tag": ["v1"]}}`."""
    if not isinstance(manifests, dict):
        return
    for digest, entry in manifests.items():
        tags = entry.get("tag") if isinstance(entry, dict) else None
        if not isinstance(tags, list) or not re.fullmatch("sha256:[0-9a-f]{64}", digest):
            continue
        for tag in tags:
            if isinstance(tag, str) and tag in names:
                names[tag] = digest
