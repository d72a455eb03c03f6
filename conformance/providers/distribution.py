"""Distribution, which most private registries run: its differences from the strict registry.

Owns: its leniencies and its error answers.
May not know: sockets, other providers.
Invariants: the persona `distribution` answers as Debian's docker-registry 2.8.2.
conformance/tests/test_docker_registry.py compares both, and has the table of the remaining
differences. The behaviour of version 3 was taken from its source code.
Follows: docs/protocol-facts.md sections 1.7 to 1.9, 1.11 and 1.12, "tested".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from ..messages import (
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
from ..registry.storage import Invalid, Upload, read_manifest
from ..registry.uploads import OCTETS
from .provider import Persona, Provider, change_query

__all__ = ["PERSONAS"]

# Headers of the error pages of Go's router.
_PLAIN = ("Content-Type", "text/plain; charset=utf-8")
_NOSNIFF = ("X-Content-Type-Options", "nosniff")
_PAGE = [_PLAIN, _NOSNIFF]
# The values of Allow, by kind of path.
_ALLOWED = {
    "ping": "GET, HEAD, OPTIONS",
    "tag_list": "GET",
    "manifest": "DELETE, GET, HEAD, PUT",
    "blob": "DELETE, GET, HEAD",
    "upload_start": "POST",
    "upload": "DELETE, GET, HEAD, PATCH, PUT",
}
_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)\Z")


def _headers_without(request: Request, name: str) -> Headers:
    return [(key, value) for key, value in request.headers if key != name]


# Rewrites of requests.


def _start_with_anything(provider: Provider, request: Request) -> Request:
    """Ignore the body and the digest of a POST, and a malformed mount (section 1.12)."""
    if request.kind != "upload_start":
        return request
    mount = request.parameter("mount")
    source = request.parameter("from")
    can_mount = is_digest(mount or "") and is_name(source or "")
    headers = None
    if request.has_body:
        headers = [*_headers_without(request, "content-length"), ("content-length", "0")]
    ignored = {"digest"} if can_mount else {"digest", "mount", "from"}
    return change_query(request, without=frozenset(ignored), headers=headers)


def _chunks_anywhere(provider: Provider, request: Request) -> Request:
    """Ignore Content-Range: bytes are appended (section 1.7)."""
    if request.kind == "upload" and request.header("content-range"):
        return replace(request, headers=_headers_without(request, "content-range"))
    return request


def _any_last_chunk(provider: Provider, request: Request) -> Request:
    """Ignore Content-Range of a PUT, as version 3. Of a PATCH it counts: 416 (section 1.7)."""
    return _chunks_anywhere(provider, request) if request.method == "PUT" else request


def _upload(provider: Provider, request: Request) -> Upload | None:
    repository = provider.repositories.get(request.repository)
    return None if repository is None else repository.uploads.get(request.reference)


def _state_is_an_offset(provider: Provider, request: Request) -> Request:
    """Accept an old Location while its offset is right (section 1.9)."""
    state = request.parameter("_state")
    upload = _upload(provider, request) if request.kind == "upload" and state is not None else None
    if upload is None or provider.notes.get((request.reference, state)) != upload.content.size:
        return request
    return change_query(request, _state=str(upload.sequence))


def _whole_lists(provider: Provider, request: Request) -> Request:
    """Ignore `n` and `last` of `tags/list`: there are no pages up to 2.8.3 (section 1.11)."""
    if request.kind != "tag_list":
        return request
    return change_query(request, without=frozenset({"n", "last"}))


# Answers instead of the strict registry.


def _any_ping(provider: Provider, request: Request) -> Response | None:
    """Answer 200 to every method on /v2/."""
    if request.kind != "ping" or request.method in ("GET", "HEAD"):
        return None
    return Response(200, [("Content-Type", "application/json")], b"{}")


def _lost_session(provider: Provider, request: Request) -> Response | None:
    """Answer 404 unless the state is the session's newest.

    A wrong digest or a body that breaks off ends a session (section 1.9).
    """
    if request.kind != "upload":
        return None
    upload = _upload(provider, request)
    state = request.parameter("_state")
    if upload is None:
        is_invalid = request.reference not in provider.notes
    else:
        is_invalid = provider.notes.get((request.reference, state)) != upload.content.size
    if state is None or is_invalid:
        return error(404, "BLOB_UPLOAD_INVALID", "blob upload invalid")
    if request.method == "PATCH" and request.header("content-type") not in ("", OCTETS):
        return error(500, "UNKNOWN", "unknown error", "Bad Content-Type")  # section 1.7
    return None


def _no_page(provider: Provider, request: Request) -> Response | None:
    """Answer unknown paths and malformed tags with the page of Go's router."""
    if request.path == "/":
        return Response(200, [("Cache-Control", "no-cache")])
    if request.path == "/v2":
        body = b'<a href="/v2/">Moved Permanently</a>.\n\n'
        return Response(
            301, [("Location", "/v2/"), ("Content-Type", "text/html; charset=utf-8")], body
        )
    is_by_tag = request.kind == "manifest" and ":" not in request.reference
    has_no_rule = request.kind in ("other", "referrers")
    if has_no_rule or (is_by_tag and not is_tag(request.reference)):
        return Response(404, list(_PAGE), b"404 page not found\n")
    return None


def _manifests_by_sha256(provider: Provider, request: Request) -> Response | None:
    """Refuse malformed and sha512 digests of manifests (section 1.7)."""
    if request.kind != "manifest":
        return None
    is_by_digest = ":" in request.reference
    is_malformed = is_by_digest and not is_digest(request.reference)
    if request.method in ("GET", "HEAD") and is_malformed:
        return error(500, "UNKNOWN", "unknown error", "invalid checksum digest format")
    if request.method == "PUT" and request.reference.startswith("sha512:"):
        return error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
    return None


# Answers to received manifests.


def _layers_with_urls(provider: Provider, request: Request, body: bytes) -> Response | None:
    """Refuse layers with `urls` by three errors, and absent layers by one.

    The type of a layer does not matter, and neither does the presence of a layer with `urls`. This
    was observed, as in section 1.12.
    """
    try:
        stored = read_manifest(body, request.header("content-type").partition(";")[0].strip(), "")
    except Invalid:
        return None

    repository = provider.repositories.get(request.repository)
    problems: list[tuple[str, str, object]] = []
    for part in stored.blobs:
        missing = ("MANIFEST_BLOB_UNKNOWN", "blob unknown to registry", {"digest": part["digest"]})
        if part.get("urls"):
            problems += [("UNKNOWN", "unknown error", None)] * 2 + [missing]
        elif repository is None or part["digest"] not in repository.blobs:
            problems.append(missing)

    if not problems:
        return None

    # The first error determines the status.
    code, _, _ = problems[0]
    return errors(500 if code == "UNKNOWN" else 400, problems)


# Changes of an answer.


def _uploads(provider: Provider, request: Request, answer: Response) -> Response:
    """Answer uploads with other errors, and record each Location's offset (section 1.9)."""
    if request.kind == "upload" and answer.status == 416:
        return error(404, "BLOB_UPLOAD_INVALID", "blob upload invalid")
    if request.kind == "upload" and answer.status == 201:
        provider.notes[request.reference] = "ended"
    if request.kind == "upload" and request.method == "DELETE" and answer.status == 204:
        provider.notes[request.reference] = "ended"
        answer.headers.append(("Docker-Upload-UUID", request.reference))

    identity = answer.header("Docker-Upload-UUID")
    location = answer.header("Location")
    if identity and location:
        upload = provider.repositories[request.repository].uploads[identity]
        provider.notes[identity, location.rpartition("_state=")[2]] = upload.content.size

    digest = request.parameter("digest") or ""
    if answer.status == 201 and request.kind == "upload" and digest.startswith("sha512:"):
        # The blob is stored under both digests. The answer has the sha256 (section 1.12, "tested").
        blobs = provider.repositories[request.repository].blobs
        canonical = blobs[digest].digest()
        blobs[canonical] = blobs[digest]
        answer.headers = [
            (name, value.replace(digest, canonical)) for name, value in answer.headers
        ]

    return answer


def _blobs(provider: Provider, request: Request, answer: Response) -> Response:
    """Answer as Go's http.ServeContent: conditions, malformed ranges, caching for a year."""
    if request.kind != "blob" or answer.status not in (200, 206, 416):
        return answer
    cached = ("Cache-Control", "max-age=31536000")
    blob_headers = [
        ("Docker-Content-Digest", request.reference),
        ("Etag", f'"{request.reference}"'),
        cached,
    ]
    if request.header("if-none-match") == f'"{request.reference}"':
        return Response(304, blob_headers)
    range_header = request.header("range")
    span = _RANGE.match(range_header)
    is_backwards = span is not None and bool(span[1] and span[2]) and int(span[1]) > int(span[2])
    if range_header and (span is None or is_backwards):
        return Response(416, [*_PAGE, *blob_headers], b"invalid range\n")
    if answer.status == 416:
        size = ("Content-Range", answer.header("Content-Range"))
        text = b"invalid range: failed to overlap\n"
        return Response(416, [*_PAGE, *blob_headers, size], text)
    answer.headers.append(cached)
    return answer


def _tags(provider: Provider, request: Request, answer: Response) -> Response:
    """List tags in an arbitrary order, as in a directory."""
    if request.kind != "tag_list" or answer.status != 200:
        return answer
    document = answer.json()
    document["tags"].sort(key=lambda tag: digest_of(tag.encode()))
    return replace(answer, body=json.dumps(document).encode())


def _errors(provider: Provider, request: Request, answer: Response) -> Response:
    """Answer 405 with Go's page, 400 for a large manifest, and 304 without headers."""
    if answer.status == 405:
        allowed = _ALLOWED.get(request.kind, "GET")
        return Response(405, [_NOSNIFF, ("Allow", allowed), _PLAIN], b"Method Not Allowed\n")
    if request.kind == "manifest" and answer.status == 413:
        return error(400, "MANIFEST_INVALID", "manifest invalid")  # section 1.4
    if request.kind == "manifest" and answer.status == 304:
        answer.headers = []
    return answer


def _version(provider: Provider, request: Request, answer: Response) -> Response:
    """Add the API version to the answers to all paths except `/`."""
    name = "Docker-Distribution-Api-Version"
    if request.path == "/":
        answer.headers = [(key, value) for key, value in answer.headers if key != name]
    elif not answer.header(name):
        answer.headers.append((name, "registry/2.0"))
    return answer


PERSONAS: Mapping[str, Persona] = {
    "distribution": Persona(
        # Debian's docker-registry 2.8.2. Tests compare both.
        source="docs/protocol-facts.md sections 1.2, 1.7 to 1.12",
        hosts={"registry": "distribution.test"},
        options={"referrers_api": False, "single_post": False, "resumable": False},
        rewrites=(_start_with_anything, _chunks_anywhere, _state_is_an_offset, _whole_lists),
        before=(_any_ping, _lost_session, _no_page, _manifests_by_sha256),
        judges=(_layers_with_urls,),
        after=(_uploads, _blobs, _tags, _errors, _version),
    ),
    "distribution3": Persona(
        # Keeps the bytes of a body that breaks off. A GET on the old Location returns their number,
        # and a PUT can send the other bytes.
        source="docs/protocol-facts.md sections 1.7 (Content-Range), 1.9 (resuming), 7.7 (no referrers)",
        hosts={"registry": "distribution3.test"},
        options={"referrers_api": False, "single_post": False, "resumable": True},
        rewrites=(_any_last_chunk,),
    ),
}
