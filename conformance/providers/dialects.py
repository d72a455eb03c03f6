"""How the clouds take blobs: the functions of their rows.

Owns: which requests of an upload a provider refuses, and how; immutable tags, repositories that
have to be made first, blobs that are seen late.
May not know: sockets, logins, any client.
Invariants: all other behaviour is the strict registry's.
Follows: docs/protocol-facts.md sections 1.7, 1.8, 4.7, 4.9, 5.5, 6.5, 7.1 and 7.9.
"""

from __future__ import annotations

from dataclasses import replace

from ..messages import Request, Response, error
from .provider import Before, Provider
from .rates import READS, WRITES, Cap

__all__ = [
    "ACR_PUT_LIMIT",
    "LAG",
    "absent_repository",
    "acr_caps",
    "acr_chunks",
    "bare_mount",
    "ecr_caps",
    "ecr_public_caps",
    "elsewhere",
    "from_elsewhere",
    "ghcr_chunks",
    "google_caps",
    "no_chunks",
    "no_whole_put",
    "seen_late",
    "unreferenced",
    "worded_as_ecr",
]

ACR_PUT_LIMIT = 20_000_000  # "above about 20 MB" (section 6.5)
GHCR_CHUNK_LIMIT = 4 << 20  # section 7.1
LAG = "lag"  # under this note a test says for how many seconds a fresh blob is not seen


def _is_body(request: Request) -> bool:
    return request.kind == "upload" and request.method in ("PUT", "PATCH") and request.has_body


# ECR, sections 4.7 to 4.9.


def absent_repository(provider: Provider, request: Request) -> Response | None:
    """Know only repositories that were created (tests do it): a push creates none."""
    name = request.repository
    if not name or name in provider.repositories:
        return None
    registry = request.header("host").partition(".")[0]
    text = f"The repository with name '{name}' does not exist in the registry with id '{registry}'"
    return error(404, "NAME_UNKNOWN", text)


def unreferenced(provider: Provider, request: Request) -> Response | None:
    """Give no blob that no manifest names: download URLs are for layers of images."""
    if (
        request.kind != "blob"
        or request.method != "GET"
        or request.repository not in provider.repositories
    ):
        return None

    repository = provider.repositories[request.repository]
    named = any(
        part["digest"] == request.reference
        for manifest in repository.manifests.values()
        for part in manifest.blobs
    )
    return (
        None
        if named
        else error(404, "BLOB_UNKNOWN", "blob unknown to registry", {"digest": request.reference})
    )


def seen_late(provider: Provider, request: Request, answer: Response) -> Response:
    """Refuse a manifest that names a blob which arrived less than so many seconds ago."""
    lag = provider.notes.get(LAG, 0.0)
    digest = request.parameter("digest")
    if request.kind == "upload" and answer.status == 201 and digest:
        provider.notes["arrived", request.repository, digest] = provider.now()

    put = request.kind == "manifest" and request.method == "PUT" and answer.status == 201
    if not (put and lag):
        return answer

    stored = provider.manifest(request.repository, answer.header("Docker-Content-Digest"))
    assert stored is not None
    ages = {
        part["digest"]: provider.now()
        - provider.notes.get(("arrived", request.repository, part["digest"]), -lag)
        for part in stored.blobs
    }
    fresh = [digest for digest, age in ages.items() if age < lag]
    if not fresh:
        return answer

    repository = provider.repositories[request.repository]
    del repository.manifests[stored.digest]
    for tag in [tag for tag, there in repository.tags.items() if there == stored.digest]:
        del repository.tags[tag]

    text = "Images with digests '{fresh}' required for pushing image into repository do not exist"
    return error(400, "MANIFEST_BLOB_UNKNOWN", text.format(fresh=fresh))


def worded_as_ecr(provider: Provider, request: Request, answer: Response) -> Response:
    """Say of an immutable tag what ECR says, and answer some PATCHes with 201."""
    if answer.status == 400 and request.kind == "manifest" and answer.codes == ["TAG_INVALID"]:
        name = request.repository
        tag = request.reference
        text = f"The image tag '{tag}' already exists in the '{name}' repository and cannot be overwritten"
        return error(400, "TAG_INVALID", f"{text} because the repository is immutable.")
    if request.method == "PATCH" and answer.status == 202:
        return replace(answer, status=201)
    return answer


def ecr_caps(provider: Provider) -> tuple[Cap, ...]:
    """Count each API for itself (section 4.8)."""
    counts = {"blob_head": 1000, "manifest_head": 2000, "manifest_get": 2000, "blob_get": 3000}
    counts |= {"upload_start": 100, "upload_body": 500, "upload_finish": 100, "manifest_put": 10}
    return tuple(Cap(count, actions=frozenset({action})) for action, count in counts.items())


def ecr_public_caps(provider: Provider) -> tuple[Cap, ...]:
    """Count as ECR Public does for clients that have logged in (section 4.8)."""
    counts = {
        "blob_head": 200,
        "upload_start": 10,
        "upload_body": 260,
        "upload_finish": 10,
        "manifest_put": 10,
    }
    pulls = Cap(10, actions=frozenset({"manifest_head", "manifest_get", "blob_get"}))
    return (pulls, *(Cap(count, actions=frozenset({action})) for action, count in counts.items()))


# Google, section 5.5.


def no_chunks(provider: Provider, request: Request) -> Response | None:
    """Refuse PATCH: uploads are whole."""
    if request.kind != "upload" or request.method != "PATCH":
        return None
    provider.journal.violations.append(f"PATCH {request.target}: chunked uploads are not supported")
    return error(405, "UNSUPPORTED", "chunked uploads are not supported")


_PLACE = "/artifacts-uploads/namespaces/{project}/repositories/{rest}/uploads/"
_LONG = "A" * 1500  # a Location has more than 1,500 characters


def elsewhere(provider: Provider, request: Request, answer: Response) -> Response:
    """Give Locations outside of `/v2/`, longer than most; they have no query."""
    place = answer.header("Location")
    if answer.status != 202 or request.kind != "upload_start":
        return answer
    project, _, rest = request.repository.partition("/")
    where = f"{_PLACE.format(project=project, rest=rest or '-')}{_LONG}{len(provider.notes)}"
    provider.notes[where] = place
    headers = [
        (name, value)
        for name, value in answer.headers
        if name not in ("Location", "Docker-Upload-UUID")
    ]
    return replace(answer, headers=[*headers, ("Location", request.origin + where)])


def from_elsewhere(provider: Provider, request: Request) -> Request:
    """Take what comes to such a Location to its session."""
    if (place := provider.notes.get(request.path)) is None:
        return request
    digest = request.parameter("digest")
    changed = replace(
        request, target=place.removeprefix(request.origin) + (f"&digest={digest}" if digest else "")
    )
    request.kind = changed.kind
    request.repository = changed.repository
    request.reference = changed.reference
    return changed


def bare_mount(provider: Provider, request: Request) -> Response | None:
    """Answer a mount without `from` by whether this repository has the blob (section 1.8, GCR)."""
    digest = request.parameter("mount")
    repository = provider.repositories.get(request.repository)
    if (
        request.kind != "upload_start"
        or digest is None
        or request.parameter("from") is not None
        or repository is None
    ):
        return None
    there = f"{request.origin}/v2/{request.repository}/blobs/{digest}"
    headers = [("Location", there), ("Docker-Content-Digest", digest)]
    return Response(201, headers) if digest in repository.blobs else None


def google_caps(provider: Provider) -> tuple[Cap, ...]:
    """Count all requests, and writes, of a minute by project."""

    def project(request: Request) -> str:
        return request.repository.partition("/")[0]

    return (Cap(60_000, 60.0, per=project), Cap(18_000, 60.0, WRITES, per=project))


# GHCR, section 7.1.


def ghcr_chunks(provider: Provider, request: Request) -> Response | None:
    """Refuse a large chunk that says its range; of several PATCHes keep the last one only."""
    if request.kind != "upload" or request.method != "PATCH":
        return None
    if request.header("content-range") and (request.length() or 0) > GHCR_CHUNK_LIMIT:
        text = "the body exceeds 4.00 MiB"
        return error(416, "REQUESTED_RANGE_NOT_SATISFIABLE", text)
    repository = provider.repositories.get(request.repository)
    upload = repository.uploads.get(request.reference) if repository else None
    if upload is not None and upload.content.size:
        upload.content = type(upload.content)()
    return None


def no_whole_put(status: int, code: str = "UNSUPPORTED") -> Before:
    """Refuse a PUT that has a body, as section 7.9 says that some do."""

    def answer(provider: Provider, request: Request) -> Response | None:
        refused = request.method == "PUT" and _is_body(request)
        return replace(error(status, code, "not by this way"), early=True) if refused else None

    return answer


# ACR, section 6.5.


def acr_chunks(provider: Provider, request: Request) -> Response | None:
    """Refuse bodies that are too long, and chunks without a range or in a transfer coding."""
    if not _is_body(request):
        return None
    if request.chunked:
        return error(400, "CONTENT_LENGTH_INVALID", "the Content-Length header is missing")
    if (request.length() or 0) > ACR_PUT_LIMIT and (
        request.method == "PUT" or request.header("content-range")
    ):
        page = b"<html><head><title>413 Request Entity Too Large</title></head></html>"
        return Response(
            413,
            [("Content-Type", "text/html"), ("Server", "AzureContainerRegistry")],
            page,
            early=True,
        )
    if request.header("content-range").startswith("bytes "):
        return error(400, "BLOB_UPLOAD_INVALID", "the Content-Range header format is invalid")
    return None


def acr_caps(provider: Provider) -> tuple[Cap, ...]:
    """Count reads and writes of a minute: Premium's."""
    return (Cap(10_000, 60.0, READS), Cap(2000, 60.0, WRITES))
