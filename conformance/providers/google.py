"""Google's registries: Artifact Registry and the former Container Registry.

Owns: uploads without PATCH; long Locations outside of `/v2/`; mounts without `from`; rates by
project; the permissions of their token service.
May not know: sockets, access tokens (`clouds.google`), any client.
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

# The path of an upload's Location, without its last part.
_LOCATION = "/artifacts-uploads/namespaces/{project}/repositories/{rest}/uploads/"
_LONG = "A" * 1500  # part of a Location, which has more than 1,500 characters


def _no_chunks(provider: Provider, request: Request) -> Response | None:
    """Refuse PATCH."""
    if request.kind != "upload" or request.method != "PATCH":
        return None
    provider.journal.violations.append(f"PATCH {request.target}: chunked uploads are not supported")
    return error(405, "UNSUPPORTED", "chunked uploads are not supported")


def _move_locations(provider: Provider, request: Request, answer: Response) -> Response:
    """Replace the Location of an upload by a long one outside of `/v2/`, without a query."""
    if answer.status != 202 or request.kind != "upload_start":
        return answer
    project, _, rest = request.repository.partition("/")
    location = _LOCATION.format(project=project, rest=rest or "-") + _LONG
    location += str(len(provider.notes))  # makes each Location unique
    provider.notes[location] = answer.header("Location")
    headers = [
        (name, value)
        for name, value in answer.headers
        if name not in ("Location", "Docker-Upload-UUID")
    ]
    return replace(answer, headers=[*headers, ("Location", request.origin + location)])


def _follow_locations(provider: Provider, request: Request) -> Request:
    """Return a request for such a Location as a request for its upload session."""
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
    """Answer a mount without `from` with 201 if the repository has the blob (section 1.8, GCR)."""
    digest = request.parameter("mount")
    repository = provider.repositories.get(request.repository)
    if (
        request.kind != "upload_start"
        or digest is None
        or request.parameter("from") is not None
        or repository is None
    ):
        return None
    location = f"{request.origin}/v2/{request.repository}/blobs/{digest}"
    headers = [("Location", location), ("Docker-Content-Digest", digest)]
    return Response(201, headers) if digest in repository.blobs else None


def _caps(provider: Provider) -> tuple[Cap, ...]:
    """Return the caps on all requests and on writes, per minute and project."""

    def project(request: Request) -> str:
        return request.repository.partition("/")[0]

    return (Cap(60_000, 60.0, per=project), Cap(18_000, 60.0, WRITES, per=project))


def _grants(user: str | None, access: Access) -> bool:
    """Report whether a user has a permission: all with a login, pulls from `public` without."""
    return user is not None or (access.action == "pull" and access.name.startswith("public/"))


def _with_logins(host: str) -> Persona:
    """Return the row of a registry with logins.

    Tests set its `tokens.google`, which issues tokens.
    """
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
