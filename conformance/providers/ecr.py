"""Amazon ECR and ECR Public: differences in content, messages and rates.

Owns: repositories that must be created first; blobs that are visible late; ECR's messages; its
rates.
May not know: sockets, logins (`clouds.aws`), any client.
Invariants: all other behaviour is the strict registry's.
Follows: docs/protocol-facts.md sections 4.7 to 4.9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..messages import Request, Response, error
from ..registry.storage import Invalid, read_manifest
from .provider import CLOUD_OPTIONS, Persona, Provider
from .rates import Cap

__all__ = ["LAG", "PERSONAS"]

# Key of `Provider.notes` under which tests set the seconds for which a new blob is not visible.
LAG = "lag"


def _absent_repository(provider: Provider, request: Request) -> Response | None:
    """Refuse unknown repositories. Tests create repositories; a push does not."""
    name = request.repository
    if not name or name in provider.repositories:
        return None
    registry = request.header("host").partition(".")[0]
    text = f"The repository with name '{name}' does not exist in the registry with id '{registry}'"
    return error(404, "NAME_UNKNOWN", text)


def _unreferenced(provider: Provider, request: Request) -> Response | None:
    """Refuse to serve a blob that no manifest names.

    ECR has download URLs only for layers of images.
    """
    repository = provider.repositories.get(request.repository)
    if request.kind != "blob" or request.method != "GET" or repository is None:
        return None
    if repository.naming(request.reference):
        return None
    return error(404, "BLOB_UNKNOWN", "blob unknown to registry", {"digest": request.reference})


def _seen_late(provider: Provider, request: Request, body: bytes) -> Response | None:
    """Refuse a manifest that names a blob which was uploaded less than LAG seconds ago."""
    media_type = request.header("content-type").partition(";")[0].strip()
    try:
        stored = read_manifest(body, media_type, "", any_type=provider.any_manifest_type)
    except Invalid:
        return None

    visible_since = provider.now() - provider.notes.get(LAG, 0.0)
    fresh = [
        blob["digest"]
        for blob in stored.blobs
        if provider.notes.get(("arrived", request.repository, blob["digest"]), -math.inf)
        > visible_since
    ]
    if not fresh:
        return None
    text = f"Images with digests '{fresh}' required for pushing image into repository do not exist"
    return error(400, "MANIFEST_BLOB_UNKNOWN", text)


def _note_arrival(provider: Provider, request: Request, answer: Response) -> Response:
    """Record when a blob was uploaded."""
    if request.kind == "upload" and answer.status == 201:
        provider.notes["arrived", request.repository, request.parameter("digest")] = provider.now()
    return answer


def _worded_as_ecr(provider: Provider, request: Request, answer: Response) -> Response:
    """Use ECR's message for an immutable tag, and answer a PATCH with 201."""
    if answer.status == 400 and request.kind == "manifest" and answer.codes == ["TAG_INVALID"]:
        name = request.repository
        tag = request.reference
        text = f"The image tag '{tag}' already exists in the '{name}' repository and cannot be overwritten"
        return error(400, "TAG_INVALID", f"{text} because the repository is immutable.")
    if request.method == "PATCH" and answer.status == 202:
        return replace(answer, status=201)
    return answer


def _by_action(**counts: int) -> tuple[Cap, ...]:
    """Return a cap in requests per second for each action."""
    return tuple(Cap(count, actions=frozenset({action})) for action, count in counts.items())


def _caps(provider: Provider) -> tuple[Cap, ...]:
    """Return a cap for each API (section 4.8)."""
    return _by_action(
        blob_head=1000,
        manifest_head=2000,
        manifest_get=2000,
        blob_get=3000,
        upload_start=100,
        upload_body=500,
        upload_finish=100,
        manifest_put=10,
    )


def _public_caps(provider: Provider) -> tuple[Cap, ...]:
    """Return ECR Public's caps for clients with a login (section 4.8)."""
    pulls = Cap(10, actions=frozenset({"manifest_head", "manifest_get", "blob_get"}))
    others = _by_action(
        blob_head=200, upload_start=10, upload_body=260, upload_finish=10, manifest_put=10
    )
    return (pulls, *others)


# The registry of an account whose setting BLOB_MOUNTING is off.
_PRIVATE = Persona(
    source="docs/protocol-facts.md sections 4.7 to 4.9",
    hosts={"registry": "123456789012.dkr.ecr.eu-west-1.amazonaws.com"},
    options=CLOUD_OPTIONS,
    mount="never",
    caps=_caps,
    throttled="Rate exceeded",
    before=(_absent_repository, _unreferenced),
    judges=(_seen_late,),
    after=(_note_arrival, _worded_as_ecr),
)

PERSONAS: Mapping[str, Persona] = {
    "ecr": _PRIVATE,
    "ecr_mounting": replace(
        _PRIVATE,
        hosts={"registry": "210987654321.dkr.ecr.eu-west-1.amazonaws.com"},
        mount="committed",
    ),
    "ecr_public": replace(
        _PRIVATE,
        source="docs/protocol-facts.md sections 4.7, 4.8 (ECR Public), 4.9",
        hosts={"registry": "public.ecr.aws"},
        caps=_public_caps,
    ),
}
