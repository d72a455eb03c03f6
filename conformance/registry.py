"""A strict OCI 1.1 registry in memory: it computes the answer to a request's head and body.

Content becomes visible only after its digest, size and media type and everything that a manifest
names were verified. Every refusal has the specification's error body with one of its codes, or
TAG_INVALID, a code of older versions, which ECR uses for immutable tags. A request that no correct
client sends is refused *and* recorded in `journal.violations`, so that a test can fail on it.
Follows the OCI distribution specification 1.1.1. If it leaves a choice, distribution's behaviour
(docs/protocol-facts.md sections 1.2 to 1.12).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar
from urllib.parse import urlencode

from .http import Reception, Site, receive_whole
from .messages import (
    Access,
    Answer,
    Content,
    Headers,
    Request,
    Response,
    digest_of,
    error,
    errors,
    is_digest,
    is_name,
    is_tag,
)
from .storage import (
    DOCKER_LIST,
    MANIFEST_LIMIT,
    OCI_INDEX,
    OCI_MANIFEST,
    Invalid,
    Mislabelled,
    Repository,
    Stored,
    Upload,
    is_foreign,
    read_manifest,
)

__all__ = ["METHODS", "OCTETS", "App", "Auth", "Measured", "MeasuringApp"]

OCTETS = "application/octet-stream"

# The methods that are allowed, by kind of path.
METHODS = {
    "ping": {"GET", "HEAD"},
    "tag_list": {"GET"},
    "referrers": {"GET"},
    "manifest": {"GET", "HEAD", "PUT"},
    "blob": {"GET", "HEAD"},
    "upload_start": {"POST"},
    "upload": {"GET", "PATCH", "PUT", "DELETE"},
}

# The query parameters of the specification. Other parameters are ignored, because registries may
# define their own.
_PARAMETERS = {"artifactType", "digest", "from", "last", "mount", "n"}

_BYTES_RANGE = re.compile("bytes=([0-9]*)-([0-9]*)")
# The form of the OCI specification, without a unit and a total.
_CONTENT_RANGE = re.compile("([0-9]+)-([0-9]+)")

_Decided = TypeVar("_Decided")


class Auth(Protocol):
    """Authentication and authorisation of a registry (`conformance/tokens.py`)."""

    def answer(self, request: Request) -> Answer | Reception | None:
        """Answer a request for a path of the service itself. Returns None for all other paths."""

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        """Return a refusal unless the request has all permissions in `needs`."""


class _Refused(Exception):
    """A request gets this answer instead of what it asks for."""

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


def _unless_refused(decide: Callable[..., _Decided], *arguments: Any) -> _Decided | Response:
    """Return what `decide` returns, or the answer with which it refuses."""
    try:
        return decide(*arguments)
    except _Refused as refusal:
        return refusal.answer


@dataclass(eq=False, repr=False, kw_only=True)
class App(Site):
    """A registry.

    Its options, which conformance/README.md describes, are differences among registries.
    """

    auth: Auth | None = None
    # Uploads.
    mounts: bool = True
    single_post: bool = True
    resumable: bool = True
    # Manifests and tags.
    require_blobs: bool = True
    any_manifest_type: bool = False
    immutable_tags: bool = False
    # Lists.
    page_size: int | None = None
    referrers_api: bool = True
    referrers_filter: bool = True
    referrers_page: int | None = None

    _new_content: ClassVar[type[Content]] = Content  # keeps the bytes of an upload

    def __post_init__(self) -> None:
        super().__init__()
        self.repositories: defaultdict[str, Repository] = defaultdict(Repository)
        self._sessions = 0  # number of sessions opened so far

    # Methods with which tests store and inspect content without a request.

    def add_blob(self, repository: str, data: bytes, digest: str | None = None) -> str:
        """Store a blob.

        If `digest` is given, it is not verified, so that tests can store wrong content.
        """
        digest = digest or digest_of(data)
        self.repositories[repository].blobs[digest] = Content(data)
        return digest

    def add_manifest(
        self, repository: str, body: bytes, media_type: str, *tags: str, digest: str | None = None
    ) -> str:
        """Store a manifest under its digest and any number of tags, without verifying it."""
        digest = digest or digest_of(body)
        try:
            stored = read_manifest(body, media_type, digest, any_type=True)
        except Invalid:
            stored = Stored(media_type, body, digest, {})
        content = self.repositories[repository]
        content.manifests[digest] = stored
        content.is_founded = True
        content.tags.update(dict.fromkeys(tags, digest))
        return digest

    def blob(self, repository: str, digest: str) -> bytes | None:
        """Return a stored blob, or None."""
        blob = self._repository(repository).blobs.get(digest)
        return None if blob is None else bytes(blob)

    def manifest(self, repository: str, reference: str) -> Stored | None:
        """Return the stored manifest with this tag or digest, or None."""
        return self._repository(repository).find(reference)

    def tags(self, repository: str) -> dict[str, str]:
        """Return the digests of a repository's tags, by tag."""
        return dict(self._repository(repository).tags)

    def uploads(self) -> int:
        """Count the open upload sessions."""
        return sum(len(repository.uploads) for repository in tuple(self.repositories.values()))

    def _repository(self, name: str) -> Repository:
        """Return a repository. An unknown repository is not created, but looks empty."""
        return self.repositories.get(name) or Repository()

    # One request.

    def kind_of(self, request: Request) -> str:
        """Return the kind of a request's path. A token service recognises its own path."""
        return self.auth.kind_of(request) if isinstance(self.auth, Site) else request.kind

    def start(self, request: Request) -> Answer | Reception:
        """Answer a request's head, or return a Reception for its body (see `Site`)."""
        service_answer = None if self.auth is None else self.auth.answer(request)
        if service_answer is not None:
            return service_answer
        decided = _unless_refused(self._decide, request)
        if isinstance(decided, Response):
            decided.headers.append(("Docker-Distribution-Api-Version", "registry/2.0"))
        return decided

    def _decide(self, request: Request) -> Response | Reception:
        self._check_framing(request)
        self._check_path(request)
        self._check_query(request)
        if self.auth is not None:
            refusal = self.auth.check(request, self._permissions(request))
            if refusal is not None:
                return refusal
        # Methods such as `_get_manifest`. Unknown kinds and methods were refused above.
        route: Callable[[Request], Response | Reception]
        route = getattr(self, f"_{request.method.lower()}_{request.kind}")
        return route(request)

    def _mistake(
        self, request: Request, status: int, code: str, message: str, detail: object = None
    ) -> _Refused:
        """Record a violation, because no correct client sends this request. Returns the refusal."""
        self.journal.violations.append(f"{request.method} {request.target}: {message}")
        return _Refused(error(status, code, message, detail))

    def _check_framing(self, request: Request) -> None:
        """Refuse a body without a length, a malformed length, or an unexpected body.

        `Expect` is refused too, because the server never sends 100 Continue (docs/design.md
        section 9).
        """
        if request.header("expect"):
            raise self._mistake(request, 417, "UNSUPPORTED", "Expect is not met here")
        declared = request.header("content-length")
        if declared and request.length() is None:
            text = f"Content-Length {declared!r} is no number"
            raise self._mistake(request, 400, "SIZE_INVALID", text)
        if request.method in ("POST", "PUT", "PATCH"):
            if not declared and not request.is_chunked:
                text = "neither Content-Length nor chunked coding"
                raise self._mistake(request, 411, "SIZE_INVALID", text)
        elif request.has_body:
            text = f"a {request.method} with a body"
            raise self._mistake(request, 400, "UNSUPPORTED", text)

    def _check_path(self, request: Request) -> None:
        """Refuse malformed paths, names, digests and tags, and methods unknown to the path."""
        kind = request.kind
        name = request.repository
        reference = request.reference
        if kind not in METHODS:
            raise self._mistake(request, 404, "UNSUPPORTED", "no such path")
        if (name and not is_name(name)) or "%2f" in request.target.partition("?")[0].lower():
            text = "invalid repository name"
            raise self._mistake(request, 400, "NAME_INVALID", text, {"name": name})

        is_by_tag = kind == "manifest" and ":" not in reference
        if is_by_tag and not is_tag(reference):
            # No manifest can have such a tag. The official suite expects 404 when it reads
            # `.INVALID_MANIFEST_NAME`.
            is_put = request.method == "PUT"
            status, code = (400, "MANIFEST_INVALID") if is_put else (404, "MANIFEST_UNKNOWN")
            raise self._mistake(request, status, code, "invalid tag", {"tag": reference})
        has_digest = kind in ("blob", "referrers", "manifest") and not is_by_tag
        if has_digest and not is_digest(reference):
            detail = {"digest": reference}
            raise self._mistake(request, 400, "DIGEST_INVALID", "invalid digest", detail)

        if request.method not in METHODS[kind]:
            text = f"{request.method} is not for this path"
            raise self._mistake(request, 405, "UNSUPPORTED", text)

    def _check_query(self, request: Request) -> None:
        """Refuse repeated parameters, `from` without `mount`, and a malformed `last`."""
        keys = [key for key, _ in request.query]
        repeated = sorted(key for key in _PARAMETERS if keys.count(key) > 1)
        if repeated:
            text = f"query parameter {repeated[0]} is given twice"
            raise self._mistake(request, 400, "UNSUPPORTED", text)
        if request.kind == "upload_start" and "from" in keys and "mount" not in keys:
            raise self._mistake(request, 400, "UNSUPPORTED", "from without mount")
        last = request.parameter("last")
        if request.kind == "tag_list" and last is not None and not is_tag(last):
            raise self._mistake(request, 400, "UNSUPPORTED", "last is not a tag", {"last": last})

    @staticmethod
    def _permissions(request: Request) -> list[Access]:
        """Return the permissions that a request needs."""
        if request.kind == "ping":
            return []
        actions = {"GET": ["pull"], "HEAD": ["pull"], "DELETE": ["delete"]}.get(
            request.method, ["pull", "push"]
        )
        needs = [Access("repository", request.repository, action) for action in actions]
        source = request.parameter("from")
        if request.kind == "upload_start" and request.parameter("mount") and source:
            needs.append(Access("repository", source, "pull"))
        return needs

    def _get_ping(self, request: Request) -> Response:
        return Response(200, [("Content-Type", "application/json")], b"{}")

    _head_ping = _get_ping

    # Lists.

    def _page(
        self, request: Request, names: Sequence[str], limit: int | None
    ) -> tuple[Sequence[str], Headers]:
        """Return the page of a sorted list that `n`, `last` and this registry's `limit` select.

        Its headers are a Link if there is a next page.
        """
        asked = request.parameter("n")
        if asked is not None and not (asked.isascii() and asked.isdigit()):
            text = "invalid number of results"
            raise self._mistake(request, 400, "UNSUPPORTED", text, {"n": asked})
        sizes = [size for size in (int(asked) if asked else None, limit) if size is not None]
        size = min(sizes, default=None)
        last = request.parameter("last") or ""
        rest = [name for name in names if name > last]
        if not size or size >= len(rest):
            return rest[:size], ()
        others = [(key, value) for key, value in request.query if key not in ("last", "n")]
        query = urlencode([("last", rest[size - 1]), ("n", size), *others])
        return rest[:size], [("Link", f'<{request.path}?{query}>; rel="next"')]

    def _get_tag_list(self, request: Request) -> Response:
        repository = self._repository(request.repository)
        if not repository.is_founded:
            detail = {"name": request.repository}
            return error(404, "NAME_UNKNOWN", "repository name not known", detail)
        tags, headers = self._page(request, sorted(repository.tags), self.page_size)
        return _listed({"name": request.repository, "tags": tags}, headers, "application/json")

    def _get_referrers(self, request: Request) -> Response:
        if not self.referrers_api:
            return error(404, "UNSUPPORTED", "the referrers API is not here")
        found = [
            m.descriptor()
            for m in self._repository(request.repository).referrers(request.reference)
        ]
        artifact_type = request.parameter("artifactType")
        filtered: Headers = ()
        if artifact_type and self.referrers_filter:
            found = [each for each in found if each.get("artifactType") == artifact_type]
            filtered = [("OCI-Filters-Applied", "artifactType")]
        page, link = self._page(request, [each["digest"] for each in found], self.referrers_page)
        manifests = [each for each in found if each["digest"] in page]
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests}
        return _listed(index, [*filtered, *link], OCI_INDEX)

    # Manifests.

    def _get_manifest(self, request: Request) -> Response:
        repository = self._repository(request.repository)
        manifest = repository.find(request.reference)
        if manifest is None:
            detail = {"Name": request.repository, "Reference": request.reference}
            return error(404, "MANIFEST_UNKNOWN", "manifest unknown", detail)

        accepted = {part.partition(";")[0].strip() for part in request.header("accept").split(",")}
        if manifest.media_type not in accepted:
            # As distribution, which supports neither q-values nor */* (docs/protocol-facts.md
            # section 1.3).
            if manifest.media_type in (OCI_MANIFEST, OCI_INDEX):
                kind = "manifest" if manifest.media_type == OCI_MANIFEST else "index"
                text = f"OCI {kind} found, but accept header does not support OCI {kind}s"
                return error(404, "MANIFEST_UNKNOWN", text)
            if manifest.media_type == DOCKER_LIST and ":" not in request.reference:
                manifest = _default_child(repository, manifest)
                if manifest is None:
                    return error(404, "MANIFEST_UNKNOWN", "no manifest for linux/amd64 in the list")

        etag = f'"{manifest.digest}"'
        headers = [("Docker-Content-Digest", manifest.digest), ("Etag", etag)]
        if request.header("if-none-match") in (etag, manifest.digest):
            return Response(304, headers)
        return Response(200, [("Content-Type", manifest.media_type), *headers], manifest.body)

    _head_manifest = _get_manifest

    def _put_manifest(self, request: Request) -> Response | Reception:
        media_type = request.header("content-type").partition(";")[0].strip()
        if not media_type:
            raise self._mistake(request, 400, "MANIFEST_INVALID", "no Content-Type")
        if (request.length() or 0) > MANIFEST_LIMIT:
            raise self._mistake(request, 413, "MANIFEST_INVALID", "manifest above 4 MiB")
        return receive_whole(
            lambda body: _unless_refused(self._store_manifest, request, media_type, body),
            limit=MANIFEST_LIMIT + 1,
        )

    def _store_manifest(self, request: Request, media_type: str, body: bytes) -> Response:
        if len(body) > MANIFEST_LIMIT:
            raise self._mistake(request, 413, "MANIFEST_INVALID", "manifest above 4 MiB")

        reference = request.reference
        is_by_tag = ":" not in reference
        digest = digest_of(body, "sha256" if is_by_tag else reference.partition(":")[0])
        if not is_by_tag and digest != reference:
            text = "provided digest did not match content"
            return error(400, "DIGEST_INVALID", text, {"digest": digest})

        try:
            stored = read_manifest(body, media_type, digest, any_type=self.any_manifest_type)
        except Mislabelled as problem:
            # The specification: a client "MUST set the Content-Type header to the value specified
            # by the mediaType field".
            text = f"manifest invalid: {problem}"
            raise self._mistake(request, 400, "MANIFEST_INVALID", text) from None
        except Invalid as problem:
            return error(400, "MANIFEST_INVALID", "manifest invalid", str(problem))

        # `_repository` does not create the repository, which must not exist until the manifest is
        # valid.
        repository = self._repository(request.repository)
        if self.require_blobs:
            _check_parts(repository, stored)
        if is_by_tag and self.immutable_tags and reference in repository.tags:
            # The put is refused even if the digest is the same (docs/protocol-facts.md section
            # 4.7).
            text = f"The image tag '{reference}' already exists and the repository is immutable."
            return error(400, "TAG_INVALID", text)

        repository = self.repositories[request.repository]
        repository.manifests[digest] = stored
        repository.is_founded = True
        if is_by_tag:
            repository.tags[reference] = digest
        answer = self._created(request, "manifests", digest)
        if stored.subject is not None and self.referrers_api:
            answer.headers.append(("OCI-Subject", stored.subject))
        return answer

    @staticmethod
    def _created(request: Request, kind: str, digest: str) -> Response:
        location = f"{request.origin}/v2/{request.repository}/{kind}/{digest}"
        return Response(201, [("Location", location), ("Docker-Content-Digest", digest)])

    # Blobs.

    def _get_blob(self, request: Request) -> Response:
        digest = request.reference
        blob = self._repository(request.repository).blobs.get(digest)
        if blob is None:
            return error(404, "BLOB_UNKNOWN", "blob unknown to registry", {"digest": digest})

        headers = [
            ("Content-Type", OCTETS),
            ("Docker-Content-Digest", digest),
            ("Etag", f'"{digest}"'),
            ("Accept-Ranges", "bytes"),
        ]
        span = _BYTES_RANGE.fullmatch(request.header("range"))
        if span is None or request.method == "HEAD" or span.groups() == ("", ""):
            return Response(200, headers, blob.pieces())

        first, last = span.groups()
        start = int(first) if first else max(blob.size - int(last), 0)
        end = min(int(last), blob.size - 1) if first and last else blob.size - 1
        if start > end:
            headers = [("Content-Range", f"bytes */{blob.size}")]
            return error(416, "UNSUPPORTED", "invalid range", headers=headers)
        headers.append(("Content-Range", f"bytes {start}-{end}/{blob.size}"))
        return Response(206, headers, blob.pieces(start, end + 1))

    _head_blob = _get_blob

    # Upload sessions and mounts. Each Location is valid for one request. A PUT ends its session,
    # whatever the answer.

    def _post_upload_start(self, request: Request) -> Response | Reception:
        mount = request.parameter("mount")
        source = request.parameter("from")
        whole = request.parameter("digest")
        for digest in (mount, whole):
            if digest is not None and not is_digest(digest):
                detail = {"digest": digest}
                raise self._mistake(request, 400, "DIGEST_INVALID", "invalid digest", detail)
        if source is not None and not is_name(source):
            text = "invalid repository name"
            raise self._mistake(request, 400, "NAME_INVALID", text, {"name": source})

        if mount is not None and source is not None and self.mounts:
            blob = self._repository(source).blobs.get(mount)
            if blob is not None:
                self.repositories[request.repository].blobs[mount] = blob
                return self._created(request, "blobs", mount)

        if request.has_body and whole is None:
            raise self._mistake(request, 400, "SIZE_INVALID", "a body without a digest")
        self._check_type(request)
        self._sessions += 1
        identity = f"00000000-0000-4000-8000-{self._sessions:012d}"
        upload = Upload(identity, self._new_content())
        if whole is not None and self.single_post:
            return Reception(upload.content, lambda _: self._commit(request, upload, whole))
        self.repositories[request.repository].uploads[identity] = upload
        return self._located(request, upload)

    def _check_type(self, request: Request) -> None:
        media_type = request.header("content-type")
        if request.has_body and media_type not in ("", OCTETS):
            text = f"Content-Type {media_type!r} for bytes"
            raise self._mistake(request, 415, "UNSUPPORTED", text)

    @staticmethod
    def _located(request: Request, upload: Upload, status: int = 202) -> Response:
        """Return an answer with a new Location of the session.

        Earlier Locations are no longer valid.
        """
        upload.sequence += 1
        path = f"/v2/{request.repository}/blobs/uploads/{upload.identity}?_state={upload.sequence}"
        headers = [
            ("Location", request.origin + path),
            # As at distribution, 0-0 stands for no byte and for one byte (docs/protocol-facts.md
            # section 1.9).
            ("Range", f"0-{max(upload.content.size - 1, 0)}"),
            ("Docker-Upload-UUID", upload.identity),
        ]
        return Response(status, headers)

    def _session(self, request: Request) -> Upload:
        """Return the session of a request to its Location."""
        upload = self._repository(request.repository).uploads.get(request.reference)
        if upload is None:
            text = "blob upload unknown to registry"
            raise _Refused(error(404, "BLOB_UPLOAD_UNKNOWN", text))
        state = request.parameter("_state")
        if state is None:
            # The client has dropped the query of the Location, which is part of it (section 1.7).
            text = "not the Location that was given"
            raise self._mistake(request, 400, "BLOB_UPLOAD_INVALID", text)
        if request.method in ("PATCH", "PUT") and (upload.is_busy or state != str(upload.sequence)):
            raise self._out_of_order(request, upload, "not the newest Location of this upload")
        return upload

    def _out_of_order(self, request: Request, upload: Upload, message: str) -> _Refused:
        headers = self._located(request, upload).headers
        return _Refused(error(416, "BLOB_UPLOAD_INVALID", message, headers=headers))

    def _check_range(self, request: Request, upload: Upload) -> None:
        """Refuse a chunk whose Content-Range is malformed, or not that of the next bytes."""
        declared = request.header("content-range")
        if not declared:
            return
        span = _CONTENT_RANGE.fullmatch(declared)
        if span is None:
            text = f"Content-Range {declared!r} is not <start>-<end>"
            raise self._mistake(request, 400, "BLOB_UPLOAD_INVALID", text)
        first = int(span[1])
        last = int(span[2])
        if first != upload.content.size or first > last:
            raise self._out_of_order(request, upload, f"the next byte is {upload.content.size}")
        if request.length() != last - first + 1:
            # This includes a chunked body, whose length is None. ACR refuses it too (section 1.7).
            text = "Content-Length is not that of Content-Range"
            raise self._mistake(request, 400, "SIZE_INVALID", text)

    def _receive(self, request: Request, digest: str | None) -> Response | Reception:
        """Receive the body of a PATCH or PUT. A PUT has a `digest`, and ends the session."""
        upload = self._session(request)
        self._check_type(request)
        self._check_range(request, upload)
        upload.is_busy = True

        def finish(received: int) -> Response:
            upload.is_busy = False
            if digest is None:
                return self._located(request, upload)
            del self.repositories[request.repository].uploads[upload.identity]
            return self._commit(request, upload, digest)

        def abort() -> None:
            upload.is_busy = False
            upload.sequence += 1  # invalidates the Location of the broken request (section 1.9)
            if not self.resumable:
                self.repositories[request.repository].uploads.pop(upload.identity, None)

        return Reception(upload.content, finish, abort)

    def _patch_upload(self, request: Request) -> Response | Reception:
        return self._receive(request, None)

    def _put_upload(self, request: Request) -> Response | Reception:
        digest = request.parameter("digest")
        if digest is None or not is_digest(digest):
            text = "digest missing" if digest is None else "invalid digest"
            raise self._mistake(request, 400, "DIGEST_INVALID", text, {"digest": digest})
        return self._receive(request, digest)

    def _commit(self, request: Request, upload: Upload, digest: str) -> Response:
        """Store the bytes of an upload as a blob, or refuse them if they have another digest."""
        actual = upload.content.digest(digest.partition(":")[0])
        if actual != digest:
            text = "provided digest did not match uploaded content"
            return error(400, "DIGEST_INVALID", text, {"digest": digest, "content": actual})
        self.repositories[request.repository].blobs[digest] = upload.content
        return self._created(request, "blobs", digest)

    def _get_upload(self, request: Request) -> Response:
        return self._located(request, self._session(request), 204)

    def _delete_upload(self, request: Request) -> Response:
        upload = self._session(request)
        del self.repositories[request.repository].uploads[upload.identity]
        return Response(204)


def _listed(document: object, headers: Headers, media_type: str) -> Response:
    return Response(200, [("Content-Type", media_type), *headers], json.dumps(document).encode())


def _default_child(repository: Repository, index: Stored) -> Stored | None:
    """Return the manifest of an index for linux/amd64, or None."""
    for child in index.children:
        platform = child.get("platform") or {}
        if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
            return repository.manifests.get(child["digest"])
    return None


def _check_parts(repository: Repository, stored: Stored) -> None:
    """Refuse a manifest if the repository lacks a part of it, or has it in another size."""
    held = [(part, repository.size_of_blob(part["digest"])) for part in stored.blobs]
    held += [(part, repository.size_of(part["digest"])) for part in stored.children]
    for part, size in held:
        if size not in (None, part["size"]):
            text = f"size of {part['digest']}"
            raise _Refused(error(400, "MANIFEST_INVALID", "manifest invalid", text))

    # As at distribution, a digest that the manifest names twice is listed twice.
    missing = [
        ("MANIFEST_BLOB_UNKNOWN", "blob unknown to registry", {"digest": part["digest"]})
        for part, size in held
        if size is None and not is_foreign(part["mediaType"])
    ]
    if missing:
        raise _Refused(errors(400, missing))


# A registry that verifies blobs and drops their bytes, so that large images need no memory.


class Measured(Content):
    """A body of which only the size and the sha256 are kept."""

    def feed(self, data: bytes) -> None:
        """Count and hash `data`."""
        self._hash.update(data)
        self.size += len(data)

    def digest(self, algorithm: str = "sha256") -> str:
        """Return the sha256. Raises LookupError for other algorithms, which need the bytes."""
        if algorithm != "sha256":
            raise LookupError(f"the bytes are gone, and with them their {algorithm}")
        return super().digest()

    def pieces(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return no pieces if the body is empty. Raises LookupError otherwise."""
        if self.size:
            raise LookupError("the bytes of this blob were measured and dropped")
        return []


class MeasuringApp(App):
    """A registry that accepts pushes, but cannot answer pulls."""

    _new_content = Measured
