"""A strict OCI 1.1 registry in memory: it computes the answer to a request's head and body.

Owns: every answer of the registry except those under /blobs/uploads/.
May not know: sockets, time, any client.
Invariants: content becomes visible only after its digest, size and media type and everything that a
manifest names were verified. Every refusal has the specification's error body with one of its
codes, or TAG_INVALID, a code of older versions, which ECR uses for immutable tags. A request that
no correct client sends is refused *and* recorded in `journal.violations`, so that a test can fail
on it.
Follows: the OCI distribution specification 1.1.1. If it leaves a choice, distribution's behaviour
(docs/protocol-facts.md sections 1.2 to 1.12).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import quote

from ..messages import (
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
from ..server.exchange import Reception, Site, receive_whole
from .storage import (
    DOCKER_LIST,
    MANIFEST_LIMIT,
    OCI_INDEX,
    OCI_MANIFEST,
    Invalid,
    Mislabelled,
    Repository,
    Stored,
    is_foreign,
    read_manifest,
)
from .uploads import OCTETS, Uploads

__all__ = ["METHODS", "App", "Auth"]

_BYTES_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)\Z")

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


class Auth(Protocol):
    """Authentication and authorisation of a registry (`conformance/registry/tokens.py`)."""

    def answer(self, request: Request) -> Answer | Reception | None:
        """Answer a request for a path of the service itself. Returns None for all other paths."""

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        """Return a refusal unless the request has all permissions in `needs`."""


class _Page(NamedTuple):
    """One page of a list."""

    names: list[str]
    headers: Headers = ()  # a Link if there is a next page


@dataclass(eq=False, repr=False, kw_only=True)
class App(Uploads):
    """A registry.

    Its options, which conformance/README.md describes, are differences among registries.
    """

    auth: Auth | None = None
    # Manifests and tags.
    require_blobs: bool = True
    any_manifest_type: bool = False
    immutable_tags: bool = False
    # Lists.
    page_size: int | None = None
    referrers_api: bool = True
    referrers_filter: bool = True
    referrers_page: int | None = None

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

    # One request.

    def kind_of(self, request: Request) -> str:
        """Return the kind of a request's path. A token service recognises its own path."""
        return self.auth.kind_of(request) if isinstance(self.auth, Site) else request.kind

    def start(self, request: Request) -> Answer | Reception:
        """Answer a request's head, or return a Reception for its body (see `Site`)."""
        if self.auth is not None:
            service_answer = self.auth.answer(request)
            if service_answer is not None:
                return service_answer
        decision = (
            self._refuse_framing(request)
            or self._refuse_names(request)
            or self._refuse_query(request)
        )
        if decision is None and self.auth is not None:
            decision = self.auth.check(request, self._permissions(request))
        if decision is None:
            # Methods such as `_get_manifest`. Unknown kinds and methods were refused above.
            route = getattr(self, f"_{request.method.lower()}_{request.kind}")
            answer: Answer | Reception = route(request)
            return self._with_version_header(answer)
        return self._with_version_header(decision)

    @staticmethod
    def _with_version_header(decided: Answer | Reception) -> Answer | Reception:
        if isinstance(decided, Response):
            decided.headers.append(("Docker-Distribution-Api-Version", "registry/2.0"))
        return decided

    def _refuse_framing(self, request: Request) -> Response | None:
        """Refuse a body without a length, a malformed length, or an unexpected body.

        `Expect` is refused too, because the server never sends 100 Continue (docs/design.md
        section 9).
        """
        if request.header("expect"):
            return self._refuse_mistake(request, 417, "UNSUPPORTED", "Expect is not met here")

        declared = request.header("content-length")
        if declared and request.length() is None:
            return self._refuse_mistake(
                request, 400, "SIZE_INVALID", f"Content-Length {declared!r} is no number"
            )

        if request.method in ("POST", "PUT", "PATCH"):
            if not declared and not request.is_chunked:
                return self._refuse_mistake(
                    request, 411, "SIZE_INVALID", "neither Content-Length nor chunked coding"
                )
        elif request.has_body:
            return self._refuse_mistake(
                request, 400, "UNSUPPORTED", f"a {request.method} with a body"
            )

        return None

    def _refuse_names(self, request: Request) -> Response | None:
        """Refuse malformed paths, names, digests and tags, and methods unknown to the path."""
        kind = request.kind
        name = request.repository
        reference = request.reference
        if kind not in METHODS:
            return self._refuse_mistake(request, 404, "UNSUPPORTED", "no such path")
        if (name and not is_name(name)) or "%2f" in request.target.partition("?")[0].lower():
            return self._refuse_mistake(
                request, 400, "NAME_INVALID", "invalid repository name", {"name": name}
            )

        if kind in ("blob", "referrers") or (kind == "manifest" and ":" in reference):
            if not is_digest(reference):
                return self._refuse_mistake(
                    request, 400, "DIGEST_INVALID", "invalid digest", {"digest": reference}
                )
        elif kind == "manifest" and not is_tag(reference):
            # No manifest can have such a tag. The official suite expects 404 when it reads
            # `.INVALID_MANIFEST_NAME`.
            detail = {"tag": reference}
            if request.method == "PUT":
                return self._refuse_mistake(request, 400, "MANIFEST_INVALID", "invalid tag", detail)
            return self._refuse_mistake(request, 404, "MANIFEST_UNKNOWN", "invalid tag", detail)

        if request.method not in METHODS[kind]:
            return self._refuse_mistake(
                request, 405, "UNSUPPORTED", f"{request.method} is not for this path"
            )

        return None

    def _refuse_query(self, request: Request) -> Response | None:
        """Refuse repeated parameters, `from` without `mount`, and a malformed `last`."""
        keys = [key for key, _ in request.query]
        repeated = sorted({key for key in keys if key in _PARAMETERS and keys.count(key) > 1})
        if repeated:
            return self._refuse_mistake(
                request, 400, "UNSUPPORTED", f"query parameter {repeated[0]} is given twice"
            )
        if request.kind == "upload_start" and "from" in keys and "mount" not in keys:
            return self._refuse_mistake(request, 400, "UNSUPPORTED", "from without mount")
        last = request.parameter("last")
        if request.kind == "tag_list" and last is not None and not is_tag(last):
            return self._refuse_mistake(
                request, 400, "UNSUPPORTED", "last is not a tag", {"last": last}
            )
        return None

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

    def _page_of(self, request: Request, names: list[str], limit: int | None) -> _Page | Response:
        """Return the page of a sorted list that `n`, `last` and this registry's `limit` select.

        Returns a refusal if `n` is malformed.
        """
        asked_size = request.parameter("n")
        if asked_size is not None and not (asked_size.isascii() and asked_size.isdigit()):
            return self._refuse_mistake(
                request, 400, "UNSUPPORTED", "invalid number of results", {"n": asked_size}
            )
        sizes = [int(asked_size)] if asked_size else []
        if limit is not None:
            sizes.append(limit)
        size = min(sizes, default=None)
        last = request.parameter("last")
        rest = [name for name in names if last is None or name > last]
        if size == 0:
            return _Page([])
        if size is None or size >= len(rest):
            return _Page(rest)
        page_names = rest[:size]
        link = f'<{request.path}?last={quote(page_names[-1], safe="")}&n={size}>; rel="next"'
        return _Page(page_names, [("Link", link)])

    def _get_tag_list(self, request: Request) -> Response:
        repository = self.repositories.get(request.repository)
        if repository is None or not repository.is_founded:
            return self._refuse_unknown_name(request)
        page = self._page_of(request, sorted(repository.tags), self.page_size)
        if isinstance(page, Response):
            return page
        return self._answer_list({"name": request.repository, "tags": page.names}, page.headers)

    def _get_referrers(self, request: Request) -> Response:
        if not self.referrers_api:
            return error(404, "UNSUPPORTED", "the referrers API is not here")

        descriptors = [
            entry.descriptor()
            for entry in self._repository(request.repository).referrers(request.reference)
        ]
        artifact_type = request.parameter("artifactType")
        headers: list[tuple[str, str]] = []
        if artifact_type and self.referrers_filter:
            descriptors = [
                entry for entry in descriptors if entry.get("artifactType") == artifact_type
            ]
            headers.append(("OCI-Filters-Applied", "artifactType"))

        if self.referrers_page is not None:
            last = request.parameter("last") or ""
            descriptors = [entry for entry in descriptors if entry["digest"] > last]
            if len(descriptors) > self.referrers_page:
                descriptors = descriptors[: self.referrers_page]
                more = [
                    ("last", descriptors[-1]["digest"]),
                    *([("artifactType", artifact_type)] if artifact_type else []),
                ]
                query = "&".join(f"{key}={quote(value, safe='')}" for key, value in more)
                headers.append(("Link", f'<{request.path}?{query}>; rel="next"'))

        return self._answer_list(
            {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": descriptors},
            headers,
            OCI_INDEX,
        )

    @staticmethod
    def _answer_list(
        document: object, headers: Headers, media_type: str = "application/json"
    ) -> Response:
        return Response(
            200, [("Content-Type", media_type), *headers], json.dumps(document).encode()
        )

    @staticmethod
    def _refuse_unknown_name(request: Request) -> Response:
        return error(404, "NAME_UNKNOWN", "repository name not known", {"name": request.repository})

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
                manifest = self._default_child(repository, manifest)
                if manifest is None:
                    return error(404, "MANIFEST_UNKNOWN", "no manifest for linux/amd64 in the list")

        etag = f'"{manifest.digest}"'
        headers = [("Docker-Content-Digest", manifest.digest), ("Etag", etag)]
        if request.header("if-none-match") in (etag, manifest.digest):
            return Response(304, headers)
        return Response(200, [("Content-Type", manifest.media_type), *headers], manifest.body)

    _head_manifest = _get_manifest

    @staticmethod
    def _default_child(repository: Repository, index: Stored) -> Stored | None:
        """Return the manifest of an index for linux/amd64, or None."""
        for child in index.children:
            platform = child.get("platform") or {}
            if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
                return repository.manifests.get(child["digest"])
        return None

    def _put_manifest(self, request: Request) -> Response | Reception:
        media_type = request.header("content-type").partition(";")[0].strip()
        if not media_type:
            return self._refuse_mistake(request, 400, "MANIFEST_INVALID", "no Content-Type")
        if (request.length() or 0) > MANIFEST_LIMIT:
            return self._refuse_mistake(request, 413, "MANIFEST_INVALID", "manifest above 4 MiB")
        return receive_whole(
            lambda body: self._put_manifest_body(request, media_type, body),
            limit=MANIFEST_LIMIT + 1,
        )

    def _put_manifest_body(self, request: Request, media_type: str, body: bytes) -> Response:
        if len(body) > MANIFEST_LIMIT:
            return self._refuse_mistake(request, 413, "MANIFEST_INVALID", "manifest above 4 MiB")

        by_digest = ":" in request.reference
        digest = digest_of(body, request.reference.partition(":")[0] if by_digest else "sha256")
        if by_digest and digest != request.reference:
            return error(
                400, "DIGEST_INVALID", "provided digest did not match content", {"digest": digest}
            )

        try:
            stored = read_manifest(body, media_type, digest, any_type=self.any_manifest_type)
        except Mislabelled as problem:
            # The specification: a client "MUST set the Content-Type header to the value specified
            # by the mediaType field".
            return self._refuse_mistake(
                request, 400, "MANIFEST_INVALID", f"manifest invalid: {problem}"
            )
        except Invalid as problem:
            return error(400, "MANIFEST_INVALID", "manifest invalid", str(problem))

        # `_repository` does not create the repository, which must not exist until the manifest is
        # valid.
        repository = self._repository(request.repository)
        refusal = self._refuse_missing(repository, stored) if self.require_blobs else None
        if refusal is not None:
            return refusal
        if not by_digest and self.immutable_tags and request.reference in repository.tags:
            # The put is refused even if the digest is the same (docs/protocol-facts.md section
            # 4.9).
            text = f"The image tag '{request.reference}' already exists and the repository is immutable."
            return error(400, "TAG_INVALID", text)

        repository = self.repositories[request.repository]
        repository.manifests[digest] = stored
        repository.is_founded = True
        if not by_digest:
            repository.tags[request.reference] = digest

        headers = [
            ("Location", f"{request.origin}/v2/{request.repository}/manifests/{digest}"),
            ("Docker-Content-Digest", digest),
        ]
        if stored.subject is not None and self.referrers_api:
            headers.append(("OCI-Subject", stored.subject))
        return Response(201, headers)

    @staticmethod
    def _refuse_missing(repository: Repository, stored: Stored) -> Response | None:
        """Refuse a manifest if the repository lacks a part of it, or has it in another size."""
        missing: list[str] = []
        for part in stored.blobs:
            blob = repository.blobs.get(part["digest"])
            if blob is None:
                if not is_foreign(part["mediaType"]):
                    missing.append(part["digest"])
            elif blob.size != part["size"]:
                return error(
                    400, "MANIFEST_INVALID", "manifest invalid", f"size of {part['digest']}"
                )

        for part in stored.children:
            size = repository.size_of(part["digest"])
            if size is None:
                missing.append(part["digest"])
            elif size != part["size"]:
                return error(
                    400, "MANIFEST_INVALID", "manifest invalid", f"size of {part['digest']}"
                )

        text = "blob unknown to registry"
        # As at distribution, a digest that the manifest names twice is listed twice.
        entries = [("MANIFEST_BLOB_UNKNOWN", text, {"digest": digest}) for digest in missing]
        return errors(400, entries) if entries else None

    # Blobs.

    def _get_blob(self, request: Request) -> Response:
        blob = self._repository(request.repository).blobs.get(request.reference)
        if blob is None:
            return self._refuse_unknown_blob(request)

        headers = [
            ("Content-Type", OCTETS),
            ("Docker-Content-Digest", request.reference),
            ("Etag", f'"{request.reference}"'),
            ("Accept-Ranges", "bytes"),
        ]
        span = _BYTES_RANGE.match(request.header("range"))
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

    @staticmethod
    def _refuse_unknown_blob(request: Request) -> Response:
        return error(404, "BLOB_UNKNOWN", "blob unknown to registry", {"digest": request.reference})
