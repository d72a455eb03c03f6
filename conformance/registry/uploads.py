"""Upload sessions and mounts of the registry.

Owns: offsets; Locations, each of which is valid for one request; the state of a session after a
body broke off.
May not know: manifests, tags, sockets.
Invariants: bytes become a blob only if they have the digest of the request. A PUT ends its session,
whatever the answer.
Follows: docs/protocol-facts.md sections 1.7 to 1.9.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from ..messages import Request, Response, error, is_digest, is_name
from ..server.exchange import Reception, Site
from .storage import Repository, Upload

__all__ = ["OCTETS", "Uploads"]

# The form of the OCI specification, without a unit and a total.
_CONTENT_RANGE = re.compile(r"([0-9]+)-([0-9]+)\Z")
OCTETS = "application/octet-stream"


@dataclass(eq=False, repr=False, kw_only=True)
class Uploads(Site):
    """The repositories of a registry, and its answers to requests under /blobs/uploads/."""

    mounts: bool = True
    single_post: bool = True
    resumable: bool = True

    def __post_init__(self) -> None:
        super().__init__()
        self.repositories: defaultdict[str, Repository] = defaultdict(Repository)
        self._sessions = 0  # number of sessions opened so far

    def _refuse_mistake(
        self, request: Request, status: int, code: str, message: str, detail: object = None
    ) -> Response:
        """Return an error answer, and record a violation: no correct client sends this request."""
        self.journal.violations.append(f"{request.method} {request.target}: {message}")
        return error(status, code, message, detail)

    def uploads(self) -> int:
        """Count the open upload sessions."""
        return sum(len(repository.uploads) for repository in tuple(self.repositories.values()))

    def _repository(self, repository: str) -> Repository:
        """Return a repository. An unknown repository is not created, but looks empty."""
        return self.repositories.get(repository) or Repository()

    def _post_upload_start(self, request: Request) -> Response | Reception:
        mount = request.parameter("mount")
        source = request.parameter("from")
        whole = request.parameter("digest")
        for digest in (mount, whole):
            if digest is not None and not is_digest(digest):
                return self._refuse_mistake(
                    request, 400, "DIGEST_INVALID", "invalid digest", {"digest": digest}
                )

        if source is not None and not is_name(source):
            return self._refuse_mistake(
                request, 400, "NAME_INVALID", "invalid repository name", {"name": source}
            )

        if mount is not None and source is not None and self.mounts:
            blob = self._repository(source).blobs.get(mount)
            if blob is not None:
                self.repositories[request.repository].blobs[mount] = blob
                return self._answer_created(request, mount)

        if request.has_body and whole is None:
            return self._refuse_mistake(request, 400, "SIZE_INVALID", "a body without a digest")

        refusal = self._refuse_type(request)
        if refusal is not None:
            return refusal
        if whole is not None and self.single_post:
            upload = Upload("single")
            return Reception(upload.content, lambda _: self._commit(request, upload, whole))

        self._sessions += 1
        upload = Upload(f"00000000-0000-4000-8000-{self._sessions:012d}")
        self.repositories[request.repository].uploads[upload.identity] = upload
        return self._answer_with_location(request, upload)

    def _refuse_type(self, request: Request) -> Response | None:
        media_type = request.header("content-type")
        if request.has_body and media_type not in ("", OCTETS):
            return self._refuse_mistake(
                request, 415, "UNSUPPORTED", f"Content-Type {media_type!r} for bytes"
            )
        return None

    def _answer_with_location(
        self, request: Request, upload: Upload, status: int = 202
    ) -> Response:
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

    def _answer_created(self, request: Request, digest: str) -> Response:
        location = f"{request.origin}/v2/{request.repository}/blobs/{digest}"
        return Response(201, [("Location", location), ("Docker-Content-Digest", digest)])

    def _find_session(self, request: Request) -> Upload | Response:
        """Return the session of a request, or a refusal."""
        upload = self._repository(request.repository).uploads.get(request.reference)
        if upload is None:
            return error(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        state = request.parameter("_state")
        if state is None:
            # The client has dropped the query of the Location, which is part of it (section 1.7).
            return self._refuse_mistake(
                request, 400, "BLOB_UPLOAD_INVALID", "not the Location that was given"
            )
        if request.method in ("PATCH", "PUT") and (upload.is_busy or state != str(upload.sequence)):
            return self._refuse_order(request, upload, "not the newest Location of this upload")
        return upload

    def _refuse_order(self, request: Request, upload: Upload, message: str) -> Response:
        answer = self._answer_with_location(request, upload)
        return error(416, "BLOB_UPLOAD_INVALID", message, headers=answer.headers)

    def _refuse_chunk(self, request: Request, upload: Upload) -> Response | None:
        """Return a refusal if the head of a PATCH or PUT is wrong, else None."""
        refusal = self._refuse_type(request)
        if refusal is not None:
            return refusal
        declared = request.header("content-range")
        if not declared:
            return None

        span = _CONTENT_RANGE.match(declared)
        if span is None:
            return self._refuse_mistake(
                request,
                400,
                "BLOB_UPLOAD_INVALID",
                f"Content-Range {declared!r} is not <start>-<end>",
            )

        first = int(span[1])
        last = int(span[2])
        if first != upload.content.size or first > last:
            return self._refuse_order(request, upload, f"the next byte is {upload.content.size}")
        if request.length() != last - first + 1:
            # This includes a chunked body, whose length is None. ACR refuses it too (section 1.7).
            return self._refuse_mistake(
                request, 400, "SIZE_INVALID", "Content-Length is not that of Content-Range"
            )

        return None

    def _receive(self, request: Request, digest: str | None) -> Response | Reception:
        """Receive the body of a PATCH or PUT. A PUT has a `digest`, and ends the session."""
        upload = self._find_session(request)
        if isinstance(upload, Response):
            return upload
        refusal = self._refuse_chunk(request, upload)
        if refusal is not None:
            return refusal
        upload.is_busy = True

        def finish(received: int) -> Response:
            upload.is_busy = False
            if digest is None:
                return self._answer_with_location(request, upload)
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
            return self._refuse_mistake(request, 400, "DIGEST_INVALID", text, {"digest": digest})
        return self._receive(request, digest)

    def _commit(self, request: Request, upload: Upload, digest: str) -> Response:
        """Store the bytes of an upload as a blob, or refuse them if they have another digest."""
        actual = upload.content.digest(digest.partition(":")[0])
        if actual != digest:
            detail = {"digest": digest, "content": actual}
            return error(
                400, "DIGEST_INVALID", "provided digest did not match uploaded content", detail
            )
        self.repositories[request.repository].blobs[digest] = upload.content
        return self._answer_created(request, digest)

    def _get_upload(self, request: Request) -> Response:
        upload = self._find_session(request)
        return (
            upload
            if isinstance(upload, Response)
            else self._answer_with_location(request, upload, 204)
        )

    def _delete_upload(self, request: Request) -> Response:
        upload = self._find_session(request)
        if isinstance(upload, Response):
            return upload
        del self.repositories[request.repository].uploads[upload.identity]
        return Response(204)
