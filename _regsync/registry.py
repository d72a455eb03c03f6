"""The distribution specification from the client's side: one method per endpoint. Owns: paths,
headers, statuses, the reading of answers. May not know: what is copied where, or why. Invariants:
I3 (a manifest is what its digest says, or the registry is in error), I6 (a Location elsewhere gets
no credentials), an error names side, operation, reference. Follows OCI distribution-spec 1.1,
protocol-facts.md section 1 (numbers below)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

from _regsync import oci, pacing, plan, transport
from _regsync.errors import (
    AuthError,
    ContentError,
    LoginExpired,
    ProtocolBroken,
    RegistryError,
    Side,
    SyncError,
    clean,
)
from _regsync.http1 import Lease, Pieces, Response
from _regsync.providers import ROWS, UploadStyle, api_repository
from _regsync.transport import Call, Host, Transport

_MANIFEST_LIMIT = 4 * 1024 * 1024
_TAGS_LIMIT = 8 * 1024 * 1024
# A listing is in memory; the largest known repositories have some 100,000 tags.
_MOST_PAGES = 10_000
_MOST_TAGS = 1_000_000
_MOST_REFERRERS = 10_000
_OCTETS = ("Content-Type", "application/octet-stream")
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
                origin, path = transport.resolve_location(self.host.origin, call.path, target)
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
            "manifest_head", "HEAD", f"manifests/{reference}", ("Accept", oci.ACCEPT_MANIFESTS)
        )
        with self.located("look up", self.reference(reference)):
            answer = await self._transport.request(self.host, call, ok=(200, 404))
            told = answer.headers.get("docker-content-digest") or ""
            return None if answer.status == 404 else told and oci.check_digest(told)

    async def get_manifest(
        self, reference: str, *, expected: oci.Descriptor | None = None
    ) -> oci.Manifest:
        """Fetch and verify (I3) a manifest, also against `expected`, the index entry; RegistryError
        404 when absent.
        """
        accept = oci.ACCEPT_MANIFESTS
        if expected is not None and expected.media_type not in accept:
            accept = f"{accept}, {expected.media_type}"
        call = self.call("manifest_get", "GET", f"manifests/{reference}", ("Accept", accept))
        with self.located("fetch manifest", self.reference(reference)):
            answer = await self._transport.request(
                self.host, call, ok=(200,), limit=_MANIFEST_LIMIT
            )
            told = reference if ":" in reference else answer.headers.get("docker-content-digest")
            content_type = answer.headers.get("content-type")
            return oci.parse_manifest(
                answer.body, content_type=content_type, digest=told, expected=expected
            )

    async def list_referrers(self, digest: str) -> tuple[oci.Descriptor, ...]:
        """Return what the referrers API lists (section 1.10), all pages; RegistryError where there
        is none.
        """
        accept = ("Accept", oci.ACCEPT_MANIFESTS.partition(",")[0])
        call = self.call("manifest_get", "GET", f"referrers/{digest}", accept)
        asked = set[int]()
        found = dict[str, oci.Descriptor]()
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
                    page = oci.parse_manifest(answer.body, content_type=told)
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

    async def put_manifest(self, reference: str, manifest: oci.Manifest) -> None:
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

    async def has_blob(self, blob: oci.Descriptor) -> bool:
        call = self.call("blob_head", "HEAD", f"blobs/{blob.digest}")
        with self.located("look up blob", self.reference(blob.digest)):
            try:
                async with self._transport.opened(self.host, call, (200, 404)) as answer:
                    pass
            except RegistryError as error:
                if error.status not in (401, 403):
                    raise
                # several registries hide what is there: the upload decides (design.md section 9)
                return False
        return answer.status == 200 and answer.headers.get("content-length") in (
            None,
            str(blob.size),
        )

    async def absent(self, tree: plan.Tree) -> frozenset[str]:
        """Ask which blobs and children of an image are not here."""
        blobs = {
            blob.digest: blob for manifest in (tree.root, *tree.children) for blob in manifest.blobs
        }
        lost = [digest for digest, blob in blobs.items() if not await self.has_blob(blob)]
        children = [
            child.digest
            for child in tree.children
            if await self.head_manifest(child.digest) is None
        ]
        return frozenset(lost + children)

    @asynccontextmanager
    async def open_blob(self, blob: oci.Descriptor, start: int = 0) -> AsyncIterator[Response]:
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


class _Counted:
    """A body that tells when the target has taken so much of it that it is well under way."""

    def __init__(self, pieces: Pieces, under_way: Callable[[], None]) -> None:
        self.length = pieces.length
        self._pieces = pieces
        self._under_way = under_way
        self._given = 0

    async def next(self) -> memoryview:
        if self._given >= pacing.LARGE_BODY:
            self._under_way()
        piece = await self._pieces.next()
        self._given += len(piece)
        return piece


class Upload:
    """One blob on its way into a repository: `start`, then `send` unless that is unnecessary, all
    over one `lease`. The open session's path is `session`, what it holds already `offset`, the path
    of one whose body broke `broken`."""

    def __init__(
        self, repository: Repository, transport: Transport, lease: Lease, blob: oci.Descriptor
    ) -> None:
        self.repository = repository
        self._transport = transport
        self.lease = lease
        self.blob = blob
        self._origin = repository.host.origin
        self.session = ""
        self.broken = ""
        self.offset = 0
        self.sent = 0
        # Whether a HEAD said so; whether a body began with the first byte; whether a 401 renewed
        # the login; whether a start that names no blob was refused for good, as that of any other
        # would be.
        self.absent = False
        self.begun = False
        self._renewed = False
        self.refused = False
        self.style: UploadStyle = "put"
        # its dialect; anew with each chunk
        self.turned = False
        self.patience = pacing.Patience(pacing.ATTEMPTS)

    async def start(self, mount_from: str | None = None) -> bool:
        """Open an upload session, or mount from another repository (empty: any, at Google's): True
        when now present. A refused mount is a session (202) like any other (section 1.8); an error
        not passing leads to a plain POST."""
        if mount_from is not None:
            query = f"?mount={self.blob.digest}" + (f"&from={mount_from}" if mount_from else "")
            try:
                return await self._post(
                    query, reads="" if mount_from == self.repository.api_name else mount_from
                )
            except (
                AuthError,
                RegistryError,
            ) as error:  # the other one may be closed to us while this one is open
                fatal = (
                    error.fatal
                    if isinstance(error, AuthError)
                    else error.retryable and error.status != 500
                )
                if fatal:
                    raise
        try:
            return await self._post("")
        except RegistryError as error:
            self.refused = not error.retryable
            raise

    async def whole(self, body: bytes) -> bool:
        """Upload in one POST (section 1.7, D): True when taken; else a session may be open
        (`session`).
        """
        try:
            return await self._post(f"?digest={self.blob.digest}", _OCTETS, body=body)
        except RegistryError as error:
            if error.retryable or error.status in (401, 403):
                raise
            return False

    async def _post(
        self, query: str, *headers: tuple[str, str], body: bytes = b"", reads: str = ""
    ) -> bool:
        """Say whether the answer is that the blob is there; else it opens a session."""
        repository = self.repository
        self.begun = bool(body)
        call = repository.call(
            "upload_start", "POST", f"blobs/uploads/{query}", *headers, body=body
        )
        call = call._replace(also=((reads, "pull"),) if reads else ())
        ok = (201, 202) if query else (202,)
        async with self._transport.opened(repository.host, call, ok, lease=self.lease) as response:
            if response.status == 202:
                self._opened(call, response, 0)
            else:
                repository.compare(response, self.blob.digest)
            return response.status == 201

    def _opened(self, call: Call, response: Response, offset: int) -> None:
        own = self.repository.host.origin
        location = response.headers.get("location")
        if location is None:
            raise ProtocolBroken("the upload was accepted without a Location")
        origin, path = transport.resolve_location(base := call.origin or own, call.path, location)
        transport.check_foreign(own, origin)
        if origin != base and (
            base != own or not self.repository.row.foreign_uploads
        ):  # once abroad it stays (R1)
            raise ProtocolBroken(
                f"the registry sends the upload to another host ({clean(origin.host, 100)}), refused"
            )
        # Only now: a session that is refused is not cancelled either.
        self._origin = origin
        self.session = path
        self.broken = ""
        self.offset = offset
        self.repository.host.authenticator.conceal(path)

    async def resume(self) -> None:
        """Ask for what the session of a broken body has kept (section 1.9); with any of it, or in
        chunks, it is open again. A host that has forgotten one is not asked again (design.md
        section 6, rule 16)."""
        repository = self.repository
        call = self.repository.call("upload_start", "GET", "")._replace(path=self.broken)
        chunks = self.style == "chunks"
        try:
            async with self._transport.opened(
                repository.host, call, (204,), lease=self.lease
            ) as response:
                self.broken = ""
                end = re.fullmatch("0-([0-9]{1,18})", response.headers.get("range") or "")
                # `0-0` says nothing: distribution answers so for no byte and for one. What was
                # acknowledged counts.
                kept = max(
                    int(end[1]) + 1 if end and 0 < int(end[1]) < self.sent else 0,
                    self.offset * chunks,
                )
                if kept or chunks:
                    self._opened(call, response, kept)
        except RegistryError as error:
            if error.retryable and not error.forgot_session:
                raise
            if error.forgot_session:
                self.session = ""  # a chunk may go again to where it went, else
            repository.host.resumes = False
            self.broken = ""

    async def send(self, pieces: Pieces, *, last: bool = True) -> bool:
        """Stream the blob, or a part before the `last`, which closes the session; False when only
        asking tells whether it arrived. Raises what the source raises, RegistryError when refused,
        WireError when the line broke."""
        host = self.repository.host
        repository = self.repository
        own = self._origin == self.repository.host.origin
        self.sent = self.offset + pieces.length
        sized = self.offset or (self.style == "chunks" and not last)
        span = (
            (("Content-Range", f"{self.offset}-{self.sent - 1}"),)
            if pieces.length and sized
            else ()
        )
        digest = f"{'&' if '?' in self.session else '?'}digest={self.blob.digest}" if last else ""
        action = "upload_body" if pieces.length or not last else "upload_finish"
        call = self._call(action, "PUT" if last else "PATCH", digest, _OCTETS, *span)
        timeouts = self._transport.edge.timeouts
        seconds = timeouts.finish + self.blob.size / timeouts.finish_bytes_per_second
        used = await self._transport.login(host, call, before_body=True)
        self.broken = self.session if host.resumes and own and self.style != "patch" else ""
        self.begun = self.begun or not self.offset
        async with (
            self._transport.metered(host, call, self.lease) as hear,
            self._transport.kept(host, self._origin, self.lease) as lease,
        ):
            if self.style != "chunks":
                self.session = ""  # whatever happens to a body, its session takes no other
            self._transport.count(host.origin, call.action)
            response = await lease.exchange(call.request(used), seconds, _Counted(pieces, hear))
            hear(response)
            self._transport.trace(call, lease, response)
            if not response.early or response.status < 500:
                self.broken = ""  # that session has got its answer
            if response.status == 401 and own and not self._renewed:
                self._renewed = True
                await response.read(transport.ERROR_BODY)
                await self._transport.relearn(host, call, used, response)
                raise LoginExpired(
                    "the login expired during the upload"
                )  # what was sent begins again
            await self._transport.expect(host, response, (201, 204) if last else (201, 202, 204))
            self.session = ""
            if last:
                repository.compare(response, self.blob.digest)
            elif not response.early:
                self._opened(call, response, self.sent)
            return not response.early

    async def cancel_upload(self) -> None:
        """End the session, which gets no body (section 1.9): one request, whose answer says
        nothing.
        """
        host = self.repository.host
        call = self._call("upload_finish", "DELETE", "")
        with suppress(SyncError):
            async with self._transport.opened(host, call, range(600), lease=self.lease):
                self.session = ""

    def _call(self, action: str, method: str, query: str, *headers: tuple[str, str]) -> Call:
        call = self.repository.call(action, method, "", *headers)
        return call._replace(path=self.session + query, origin=self._origin)


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
    if wrong := [tag for tag in named if not isinstance(tag, str) or not oci.is_tag(tag)]:
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
