"""Google's registries: Artifact Registry and what was Container Registry.

Owns: uploads without PATCH, long Locations outside of `/v2/`, mounts without `from`, rates by
project; their token service.
May not know: sockets, who has an access token (`clouds.google`), any client.
Invariants: all other behaviour is the strict registry's.
Follows: docs/protocol-facts.md sections 1.8, 5.1, 5.2 and 5.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..clouds.google import GoogleTokens
from ..messages import Access, Request, Response, error
from .provider import CLOUD_OPTIONS, Persona, Provider
from .rates import WRITES, Cap

__all__ = ["PERSONAS"]

_LOCATION = "/artifacts-uploads/namespaces/{project}/repositories/{rest}/uploads/"
_LONG = "A" * 1500  # a Location has more than 1,500 characters


def _no_chunks(provider: Provider, request: Request) -> Response | None:
    """Refuse PATCH: uploads are whole."""
    if request.kind != "upload" or request.method != "PATCH":
        return None
    provider.journal.violations.append(f"PATCH {request.target}: chunked uploads are not supported")
    return error(405, "UNSUPPORTED", "chunked uploads are not supported")


def _move_locations(provider: Provider, request: Request, answer: Response) -> Response:
    """Give Locations outside of `/v2/`, longer than most; they have no query."""
    if answer.status != 202 or request.kind != "upload_start":
        return answer
    project, _, rest = request.repository.partition("/")
    location = _LOCATION.format(project=project, rest=rest or "-") + _LONG
    location += str(len(provider.notes))  # no two are equal
    provider.notes[location] = answer.header("Location")
    headers = [
        (name, value)
        for name, value in answer.headers
        if name not in ("Location", "Docker-Upload-UUID")
    ]
    return replace(answer, headers=[*headers, ("Location", request.origin + location)])


def _follow_locations(provider: Provider, request: Request) -> Request:
    """Take a request for such a Location to its upload session."""
    location = provider.notes.get(request.path)
    if location is None:
        return request
    digest = request.parameter("digest")
    target = location.removeprefix(request.origin) + (f"&digest={digest}" if digest else "")
    changed = replace(request, target=target)
    request.kind = changed.kind
    request.repository = changed.repository
    request.reference = changed.reference
    return changed


def _bare_mount(provider: Provider, request: Request) -> Response | None:
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


def _caps(provider: Provider) -> tuple[Cap, ...]:
    """Count all requests, and writes, of a minute by project."""

    def project(request: Request) -> str:
        return request.repository.partition("/")[0]

    return (Cap(60_000, 60.0, per=project), Cap(18_000, 60.0, WRITES, per=project))


def _grants(user: str | None, access: Access) -> bool:
    """Let everybody pull from the project `public`, and who has logged in do all."""
    return user is not None or (access.action == "pull" and access.name.startswith("public/"))


def _with_logins(host: str) -> Persona:
    """Describe a registry to log in to; a test sets its `tokens.google`, who gives access tokens."""
    return Persona(
        source="docs/protocol-facts.md sections 5.1, 5.2, 5.5",
        hosts={"registry": host},
        tokens={"service": host, "path": "/v2/token", "grants": _grants},
        service=GoogleTokens,
        before=(_no_chunks,),
    )


PERSONAS: Mapping[str, Persona] = {
    "gar": _with_logins("europe-docker.pkg.dev"),
    "gcr": _with_logins("gcr.io"),
    # Without logins.
    "gar_open": Persona(
        source="docs/protocol-facts.md section 5.5 (uploads, mounts)",
        hosts={"registry": "europe-west1-docker.pkg.dev"},
        options=CLOUD_OPTIONS,
        mount="never",
        caps=_caps,
        rewrites=(_follow_locations,),
        before=(_no_chunks,),
        after=(_move_locations,),
    ),
    "gcr_open": Persona(
        source="docs/protocol-facts.md sections 1.8 (mount without from), 5.5 (uploads)",
        hosts={"registry": "eu.gcr.io"},
        options=CLOUD_OPTIONS,
        caps=_caps,
        rewrites=(_follow_locations,),
        before=(_no_chunks, _bare_mount),
        after=(_move_locations,),
    ),
}
