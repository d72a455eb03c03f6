"""The endpoints of one repository at a registry, one method for each; `upload` has those of an upload.

May not know: which images are copied where, and why.
Invariants: a returned manifest has the requested digest (I3); a next page on another origin is
refused (I6); a listing that links back to one of its own pages is an error (I12); an error names
side, operation and reference.
Follows: OCI distribution-spec 1.1, docs/protocol-facts.md section 1 (its numbers are cited below).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from _regsync.addresses import resolve_location
from _regsync.errors import (
    ContentError,
    ListingBroken,
    ProtocolBroken,
    RegistryError,
    Side,
    SyncError,
    TimedOut,
    WrongBytes,
    adding_context,
)
from _regsync.net.wire import Header, Response
from _regsync.oci import (
    ACCEPT_MANIFESTS,
    Descriptor,
    Manifest,
    check_digest,
    image_name,
    is_digest,
    is_tag,
    load_json,
    parse_manifest,
)
from _regsync.providers import DIALECTS, api_repository
from _regsync.registry.client import Call, RegistryClient
from _regsync.registry.limits import LARGE_BODY, Need, Turn
from _regsync.registry.repository import BlobBody, Locked
from _regsync.registry.upload import Upload, check_stored_digest
from _regsync.state import RepositoryKey
from _regsync.text import clean_beginning, printable

# The largest answers that are read, in bytes.
_MANIFEST_LIMIT = 4 * 1024 * 1024
_TAGS_LIMIT = 8 * 1024 * 1024

# A listing is kept in memory. The largest known repositories have some 100,000 tags.
_MOST_PAGES = 10_000
_MOST_TAGS = 1_000_000

# The most JSON lists and objects in one page of a listing of tags. They take far more memory than
# names. Google's registries list each manifest with at least two of them.
_MOST_BRACKETS = _MOST_TAGS // 4

# The most pages, entries and KiB of a list of referrers.
_MOST_REFERRERS = 10_000

# A page size that every registry accepts (section 1.11).
_SMALL_PAGE = 100

# How registries refuse a HEAD of a blob, whether or not they have it.
_HEAD_REFUSED = (400, 401, 403, 405, 501)

# The service name in Harbor's token challenges. Harbor cannot be detected by its host name
# (docs/protocol-facts.md section 2.1).
_HARBOR_SERVICE = "harbor-registry"

_ACCEPT: Header = ("Accept", ACCEPT_MANIFESTS)

# The media type of an OCI index, and so of a list of referrers.
_INDEX = ACCEPT_MANIFESTS.partition(",")[0]

# Matches one link of a Link header (RFC 8288): <target>, and parameters, whose quoted strings may
# contain separators. A target contains no `<`, so that matching 64 KiB does not take quadratic
# time.
_LINK = r'<([^<>]*)>((?:[^,"]|"[^"]*")*)'

# Matches parameters whose first `rel` outside of quotes contains the word "next". Each blank can be
# matched by one part of the pattern only, for the same reason.
_NEXT = r'(?i)(?:[^"]|"[^"]*")*?;\s*rel\s*=\s*(?:"(?:[^"]*\s)?)?next(?![^\s";])'

# Matches a parameter `rel` that says anything.
_RELATION = r'(?i);\s*rel\s*=\s*(?:"[^"]*[^"\s]|[^\s";,\'])'

# Matches what can be a page in a Link without brackets.
_PAGE_OF_A_LIST = r"[^\s<>;,\"']*\?[^\s<>;,\"']+"

# Matches the rest of a path below the repository's own, without a `..` segment, which would lead
# out of the repository.
_BELOW = r"/(?![^?]*(?i:\.|%2e){2})"


class _Pages:
    """The pages of one listing. None is asked for twice, and one without news is the last (I12)."""

    def __init__(self, kind: str) -> None:
        """`kind` names the listed objects in an error message, such as "tags"."""
        self._kind = kind
        # The numbers of pages, from 1, by the hashes of their paths, which may have 64 KiB.
        self._numbers = dict[int, int]()

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, path: str) -> None:
        """Record that a page is asked for. Raises ListingBroken if it was before."""
        if hash(path) in self._numbers:
            raise self._endless(f"page {self._numbers[hash(path)]}")
        self._numbers[hash(path)] = len(self) + 1

    def check_news(self, names: Collection[str], next_path: str | None, *, has_new: bool) -> None:
        """Raise ListingBroken if the last page leads on, and only repeats names."""
        if names and not has_new and next_path is not None:
            raise self._endless(f"page {len(self)} or an earlier one")

    def _endless(self, goal: str) -> ListingBroken:
        text = f"the list of {self._kind} does not end: page {len(self)} leads back to {goal}"
        return ListingBroken(text)


class RemoteRepository(Locked):
    """One repository of one registry, on one side of a copy. See `Repository` for its methods."""

    is_local = False

    def __init__(
        self, host: RegistryClient, name: str, side: Side, *, reads_only: bool = False
    ) -> None:
        self.host = host
        self.name = name
        self.side = side
        self.dialect = DIALECTS[host.registry.kind]

        # The rights that are requested with a token. Requesting push at a source could create the
        # repository in Quay.
        self.rights = "pull" if reads_only or side is Side.SOURCE else "pull,push"

        # The name in requests. On Docker Hub it may begin with `library/`, which is not shown to
        # users.
        self.api_name = api_repository(host.registry.host, name)
        self.key = RepositoryKey(host.key, self.api_name)
        self.store_key = self.key  # each repository of a registry has its own blobs
        self._base = f"/v2/{self.api_name}"  # the path of all endpoints
        self._text = f"{host.key}/{name}"
        self.unannounced = set[str]()

    def __str__(self) -> str:
        return self._text

    @property
    def probe_from(self) -> str | None:
        """The repository that a POST names to find out whether a blob exists here, by mounting it
        (docs/design.md section 6, rule 11).

        The value is "" if the POST names no repository. It is None if only a HEAD can find out.
        """
        if self.host.authenticator.service == _HARBOR_SERVICE:
            return None
        if self.dialect.probe == "from":
            return self.api_name
        return "" if self.dialect.probe == "bare" else None

    def name_of(self, reference: str) -> str:
        """Return the name of a tag or digest of this repository for an error message."""
        return image_name(self._text, reference)

    def adding_context(self, operation: str, reference: str) -> AbstractContextManager[None]:
        return adding_context(self.side, operation, reference)

    def build_call(
        self, action: str, method: str, path: str, *headers: Header, **options: Any
    ) -> Call:
        """Describe a request to `path`, which is relative to `/v2/NAME/` unless it begins with a
        slash. `options` are fields of Call. Nothing is sent.
        """
        if not path.startswith("/"):
            path = f"{self._base}/{path}"
        return Call(action, method, path, self.api_name, self.rights, headers, **options)

    def reading_needs(self, size: int) -> tuple[Need, ...]:
        """Return what reading a blob of this size needs: a lane first."""
        lane = self.host.lane_of(self.build_call("blob_get", "GET", ""))
        return (lane, self.host.limits.reading) if size >= LARGE_BODY else (lane,)

    def writing_needs(self, size: int, *, in_chunks: bool = False) -> tuple[Need, ...]:
        """Return what sending a blob of this size needs: a lane first, unless it goes in chunks, of
        which each enters its lane by itself.
        """
        stream = (self.host.limits.writing,) if size >= LARGE_BODY else ()
        if in_chunks:
            # With one permit, a body that is read there would wait for ever while it keeps it.
            is_single = self.host.limits.cap == 1
            return (*stream, self.host.limits.reading) if is_single else stream
        return (self.host.lane_of(self.build_call("upload_body", "PUT", "")), *stream)

    # Tags.

    async def list_tags(self) -> dict[str, str | None] | None:
        """Return all tags. The values are digests if the listing contains them (Google's
        registries), otherwise None.

        Returns None if the repository does not exist. Raises ListingBroken if the listing has no
        end.
        """
        with self.adding_context("list tags of", str(self)):
            try:
                return await self._list_tags_in_pages(self.dialect.page_size)
            except RegistryError as error:
                # Older versions of some registries accept only small pages (section 1.11).
                if "PAGINATION_NUMBER_INVALID" not in error.codes:
                    raise
            return await self._list_tags_in_pages(_SMALL_PAGE)

    async def _list_tags_in_pages(self, page_size: int) -> dict[str, str | None] | None:
        """Return what `list_tags` returns, from pages of at most `page_size` tags."""
        tags: dict[str, str | None] = {}
        pages = _Pages("tags")
        call = self.build_call("tag_list", "GET", f"tags/list?n={page_size}")
        while len(pages) < _MOST_PAGES:
            pages.add(call.path)
            ok = (200, 404) if len(pages) == 1 else (200,)
            answer = await self.host.request(call, ok=ok, limit=_TAGS_LIMIT)
            if answer.status == 404:
                return None  # the repository does not exist
            page, length = _tags_of(answer.body, self.dialect.listing_has_digests)
            new_tags = [tag for tag in page if tag not in tags]
            tags.update(page)
            if len(tags) > _MOST_TAGS:
                raise ContentError(f"the listing has more than {_MOST_TAGS} tags")

            next_path = self._next_page(call, answer)
            pages.check_news(page, next_path, has_new=bool(new_tags))
            if next_path is None and new_tags and length == page_size:
                # Some registries return a full page without a Link although there are more (section
                # 1.11). Others ignore `last`, and return the same page: it has no new tags.
                next_path = f"{self._base}/tags/list?n={page_size}&last={new_tags[-1]}"
            if next_path is None:
                return tags
            call = call._replace(path=next_path)
        raise ProtocolBroken(f"the listing has more than {_MOST_PAGES} pages")

    def _next_page(self, call: Call, answer: Response) -> str | None:
        """Return the path of the next page by the Link of `answer`, the answer to `call`. Returns
        None if there is no such Link.

        A Link without brackets or without `rel` is followed if it can only name another page of this
        list. Raises ListingBroken if a Link cannot be read, or if there are several next pages, and
        ProtocolBroken if the next page is outside of this repository (R6).
        """
        text = ", ".join(answer.headers.all("link"))
        links = re.findall(_LINK, text)
        targets = {target for target, parameters in links if re.match(_NEXT, parameters)}
        is_malformed = bool(re.sub(_LINK, "", text).strip(", \t")) or not all(
            re.search(_RELATION, parameters) for _, parameters in links
        )
        if is_malformed and not targets:
            targets = {*re.findall(_PAGE_OF_A_LIST, text)}
        if len(targets) != 1:
            if not targets and not is_malformed:
                return None
            raise ListingBroken(f"the Link to the next page is not clear: {printable(text, 100)}")
        origin, path = resolve_location(self.host.origin, call.path, targets.pop())
        is_own = re.match(re.escape(self._base) + _BELOW, path) is not None
        is_of_this_list = path.partition("?")[0] == call.shown_path
        if origin != self.host.origin or not is_own or (is_malformed and not is_of_this_list):
            raise ProtocolBroken(
                "the next page of the listing is not in this repository at this host"
            )
        return path

    # Manifests.

    async def head_manifest(self, reference: str) -> str | None:
        """Send a HEAD request for a manifest, and return its digest.

        Returns "" if the registry does not report the digest, and None if the manifest does not
        exist.
        """
        path = f"manifests/{reference}"
        call = self.build_call("manifest_head", "HEAD", path, _ACCEPT)
        with self.adding_context("look up", self.name_of(reference)):
            answer = await self.host.request(call, ok=(200, 404))
            if answer.status == 404:
                return None
            digest = _digest_in(answer)
            return check_digest(digest) if digest else ""

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        """Fetch a manifest and verify its digest: the requested one, or the one that the registry
        reports (I3).

        If the bytes do not match, they are fetched once more over a new connection, because a cache
        may have returned wrong bytes. `expected` is the manifest's descriptor in an index, if an
        index names the manifest.

        Raises ContentError if the bytes still do not match, or contradict `expected`. Raises
        RegistryError with status 404 if the manifest does not exist.
        """
        accept = _ACCEPT
        if expected is not None and expected.media_type not in ACCEPT_MANIFESTS:
            accept = ("Accept", f"{ACCEPT_MANIFESTS}, {expected.media_type}")
        call = self.build_call("manifest_get", "GET", f"manifests/{reference}", accept)
        with self.adding_context("fetch manifest", self.name_of(reference)):
            while True:
                answer = await self.host.request(call, ok=(200,), limit=_MANIFEST_LIMIT)
                digest = reference if is_digest(reference) else _digest_in(answer)
                content_type = answer.headers.get("content-type")
                try:
                    return parse_manifest(
                        answer.body, content_type=content_type, digest=digest, expected=expected
                    )
                except WrongBytes:
                    if call.is_fresh:
                        raise
                call = call._replace(is_fresh=True)

    async def put_child(self, manifest: Manifest) -> None:
        """Push a manifest by digest that an index names."""
        await self.put_manifest(manifest.digest, manifest)

    async def put_manifest(self, reference: str, manifest: Manifest) -> None:
        """Push a manifest.

        Raises ContentError or ProtocolBroken if the registry stored something else.
        """
        call = self.build_call(
            "manifest_put",
            "PUT",
            f"manifests/{reference}",
            ("Content-Type", manifest.media_type),
            body=manifest.body,
            seconds=self.host.timeouts.head,
        )
        with self.adding_context("push manifest", self.name_of(reference)):
            try:
                answer = await self.host.request(call, ok=(201, 200))
            except TimedOut:
                # Only if it answers others the registry gets more time for this.
                if await self.head_manifest(reference) == manifest.digest:
                    return
                call = call._replace(seconds=self.host.timeouts.manifest_put)
                answer = await self.host.request(call, ok=(201, 200))
            check_stored_digest(answer, manifest.digest)
            subject = manifest.subject
            if subject is not None and answer.headers.all("oci-subject") != [subject.digest]:
                self.unannounced.add(subject.digest)
            if answer.status == 201 or answer.headers.get("docker-content-digest"):
                return
            # A 200 without a digest may come from a server that is not a registry, which may answer
            # a HEAD by 200 too.
            digest = await self.head_manifest(reference)
            if digest == "":
                digest = (await self.get_manifest(reference)).digest
            if digest != manifest.digest:
                raise ProtocolBroken("the registry answered 200, but does not hold the manifest")

    async def list_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return the descriptors of all pages of the referrers API (section 1.10).

        Raises RegistryError if the registry has no such API or refuses the first page,
        ListingBroken if the list leads back to an earlier page or a later page is refused, and
        ProtocolBroken if the list is too long.
        """
        call = self.build_call("manifest_get", "GET", f"referrers/{digest}", ("Accept", _INDEX))
        pages = _Pages("referrers")
        referrers: dict[str, Descriptor] = {}
        body_bytes = 0
        with self.adding_context("list referrers of", self.name_of(digest)):
            while True:
                pages.add(call.path)
                answer = await self._get_referrers_page(call, len(pages))
                body_bytes += len(answer.body)
                if answer.headers.get("oci-filters-applied"):  # no request asks for a filter
                    raise ListingBroken("the registry has left entries out of the list")
                page = _referrers_of(answer, is_first=len(pages) == 1)
                has_new = not page.keys() <= referrers.keys()
                referrers.update(page)

                next_path = self._next_page(call, answer)
                pages.check_news(page, next_path, has_new=has_new)
                if next_path is None:
                    return tuple(referrers.values())
                most = max(len(pages), len(referrers), body_bytes / 1024)
                if most > _MOST_REFERRERS:
                    raise ProtocolBroken(
                        f"the list has more than {_MOST_REFERRERS} referrers, or more than that many KiB"
                    )
                call = call._replace(path=next_path)

    async def _get_referrers_page(self, call: Call, number: int) -> Response:
        """Request page `number` of a list of referrers, counted from 1."""
        try:
            return await self.host.request(call, ok=(200,), limit=_MANIFEST_LIMIT)
        except RegistryError as error:
            is_about_login = error.status in (401, 403)
            if number == 1 or error.retryable or is_about_login:
                raise
            # After a first page the API is known to exist. The caller must not take the error of a
            # later page for the absence of the API.
            text = f"page {number} of the list of referrers: {error.message}"
            raise ListingBroken(text) from error

    # Blobs.

    async def has_blob(self, blob: Descriptor, *, with_retries: bool = False) -> bool | None:
        """Send a HEAD request, and report whether the repository has the blob.

        Returns False if the blob is absent, or if it has another size than its descriptor says, and
        None if the registry refuses the request: the upload then shows whether the blob can be
        written (docs/design.md section 9).

        A failed request is repeated only with `with_retries`. Other callers repeat their whole
        attempt.
        """
        call = self.build_call("blob_head", "HEAD", f"blobs/{blob.digest}")
        with self.adding_context("look up blob", self.name_of(blob.digest)):
            try:
                if with_retries:
                    answer = await self.host.request(call, ok=(200, 404))
                else:
                    async with await self.host.exchange(call, (200, 404)) as answer:
                        pass  # a HEAD has no body to read
            except RegistryError as error:
                if error.status not in _HEAD_REFUSED:
                    raise
                return None
        size = answer.headers.get("content-length")
        return answer.status == 200 and size in (None, str(blob.size))

    def far_repository(self, digest: str) -> str | None:
        """Return None: a registry omits no blobs."""
        return None

    def begin_upload(self, blob: Descriptor) -> Upload:
        """Return the upload of a blob. No request is sent yet."""
        return Upload(self, blob)

    async def open_blob(
        self, blob: Descriptor, start: int = 0, *, is_fresh: bool = False, turn: Turn | None = None
    ) -> AbstractAsyncContextManager[BlobBody]:
        """Request a blob from byte `start` on. Returns a context that yields the response, whose
        body the caller reads in the context.

        If `is_fresh`, the request uses a new connection, because the bytes were wrong before. `turn`
        was taken for it already. The caller verifies the digest (I3).

        Raises ProtocolBroken if the answer does not begin at `start` (docs/protocol-facts.md
        section 1.13), and WrongBytes if the size differs from the descriptor's.
        """
        part = (("Range", f"bytes={start}-"),) if start else ()
        path = f"blobs/{blob.digest}"
        call = self.build_call("blob_get", "GET", path, *part, is_fresh=is_fresh)
        with self.adding_context("fetch blob", self.name_of(blob.digest)):
            exchange = await self.host.exchange(call, (200, 206), turn=turn)
            try:
                _check_range(exchange.response, blob, start)
            except SyncError:
                await exchange.__aexit__()
                raise
        return exchange


def _check_range(response: Response, blob: Descriptor, start: int) -> None:
    """Check that the body is a blob from byte `start` on. Raises WrongBytes if a whole blob has the
    wrong size, and ProtocolBroken if a part of a blob is not the requested part.
    """
    remaining = blob.size - start
    has_right_length = response.length in (None, remaining)
    if start == 0:
        if not has_right_length:
            text = f"the blob has {response.length} bytes, its descriptor says {blob.size}"
            raise WrongBytes(text)
        return
    content_range = response.headers.get("content-range") or ""
    is_rest = response.status == 206 and content_range.startswith(f"bytes {start}-")
    if not is_rest or not has_right_length:
        raise ProtocolBroken("the registry did not resume the blob where it broke off")


def _digest_in(answer: Response) -> str | None:
    """Return the digest that an answer reports. Two different ones are none."""
    digests = {*answer.headers.all("docker-content-digest")}
    return digests.pop() if len(digests) == 1 else None


def _referrers_of(answer: Response, *, is_first: bool) -> dict[str, Descriptor]:
    """Parse one page of a list of referrers. Returns the descriptors by digest.

    Raises ContentError if the page is not a valid index. For a first page without the media type of
    an index it raises RegistryError instead, as if the registry had no such list: some registries
    answer unknown paths with status 200 and another document.
    """
    content_type = answer.headers.get("content-type") or ""
    is_of_manifests = content_type.startswith("application/")  # else a proxy may have named it
    try:
        page = parse_manifest(answer.body, content_type=content_type if is_of_manifests else None)
        if not page.is_index:
            raise ContentError("not an index")
    except ContentError as error:
        if not is_first or content_type.startswith(_INDEX):
            raise
        raise RegistryError(f"status 200, but not a list: {error.message}", status=200) from error
    return {child.digest: child for child in page.children}


def _tags_of(body: bytes, with_digests: bool) -> tuple[dict[str, str | None], int]:
    """Parse one page of a listing of tags (section 1.11). Returns the digests by tag (None if the
    page has no digest of a tag, or not `with_digests`), and the number of entries.

    Nulls and digests among the tags are skipped. Raises ContentError if the page contains anything
    else that is not a tag.
    """
    if body.count(b"[") + body.count(b"{") > _MOST_BRACKETS:
        raise ContentError("the tag listing is not a list of names")
    context = f"the tag listing is not valid: {clean_beginning(body, 60)}"
    document = load_json(body, context, most_values=_TAGS_LIMIT)
    if "tags" not in document:
        raise ContentError(context)
    tags = document["tags"]
    if tags is None:
        tags = []
    if not isinstance(tags, list):
        raise ContentError("the tag listing is not a list")

    digests = _digests_by_tag(document.get("manifest")) if with_digests else {}
    page: dict[str, str | None] = {}
    for tag in tags:
        is_listed_digest = isinstance(tag, str) and ":" in tag
        if not tag or is_listed_digest:
            continue
        if not isinstance(tag, str) or not is_tag(tag):
            raise ContentError(f"the tag listing holds an invalid tag: {printable(str(tag), 60)}")
        page[tag] = digests.get(tag)
    return page, len(tags)


def _digests_by_tag(manifests: object) -> dict[str, str]:
    """Return the digests of a listing of Google's registries, by tag. `manifests` has the form
    `{"sha256:...": {"tag": ["v1"]}}`. Its malformed entries are skipped.
    """
    digests: dict[str, str] = {}
    if not isinstance(manifests, dict):
        return digests
    for digest, entry in manifests.items():
        tags = entry.get("tag") if isinstance(entry, dict) else None
        if not isinstance(tags, list) or not re.fullmatch("sha256:[0-9a-f]{64}", digest):
            continue
        for tag in tags:
            if isinstance(tag, str):
                digests[tag] = digest
    return digests
