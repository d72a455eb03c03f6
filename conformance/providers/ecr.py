"""Amazon ECR and ECR Public: which content they take and give, and how fast.

Owns: repositories that have to be made first, blobs that are seen late, ECR's words, its rates.
May not know: sockets, logins (`clouds.aws`), any client.
Invariants: all other behaviour is the strict registry's.
Follows: docs/protocol-facts.md sections 4.7 to 4.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..messages import Request, Response, error
from .provider import CLOUD_OPTIONS, Mount, Persona, Provider
from .rates import Cap

__all__ = ["LAG", "PERSONAS"]

# Under this key of `Provider.notes` a test says for how many seconds a fresh blob is not seen.
LAG = "lag"


def _absent_repository(provider: Provider, request: Request) -> Response | None:
    """Know only repositories that were created (tests do it): a push creates none."""
    name = request.repository
    if not name or name in provider.repositories:
        return None
    registry = request.header("host").partition(".")[0]
    text = f"The repository with name '{name}' does not exist in the registry with id '{registry}'"
    return error(404, "NAME_UNKNOWN", text)


def _unreferenced(provider: Provider, request: Request) -> Response | None:
    """Give no blob that no manifest names: download URLs are for layers of images."""
    repository = provider.repositories.get(request.repository)
    if request.kind != "blob" or request.method != "GET" or repository is None:
        return None
    if any(
        blob["digest"] == request.reference
        for manifest in repository.manifests.values()
        for blob in manifest.blobs
    ):
        return None
    return error(404, "BLOB_UNKNOWN", "blob unknown to registry", {"digest": request.reference})


def _seen_late(provider: Provider, request: Request, answer: Response) -> Response:
    """Refuse a manifest that names a blob which arrived less than `LAG` seconds ago."""
    lag = provider.notes.get(LAG, 0.0)
    now = provider.now()
    digest = request.parameter("digest")
    if request.kind == "upload" and answer.status == 201 and digest:
        provider.notes["arrived", request.repository, digest] = now

    is_put = request.kind == "manifest" and request.method == "PUT" and answer.status == 201
    if not (is_put and lag):
        return answer

    stored = provider.manifest(request.repository, answer.header("Docker-Content-Digest"))
    assert stored is not None
    fresh = []
    for blob in stored.blobs:
        arrived = provider.notes.get(("arrived", request.repository, blob["digest"]))
        if arrived is not None and now - arrived < lag:
            fresh.append(blob["digest"])
    if not fresh:
        return answer

    repository = provider.repositories[request.repository]
    del repository.manifests[stored.digest]
    for tag in [tag for tag, there in repository.tags.items() if there == stored.digest]:
        del repository.tags[tag]

    text = f"Images with digests '{fresh}' required for pushing image into repository do not exist"
    return error(400, "MANIFEST_BLOB_UNKNOWN", text)


def _worded_as_ecr(provider: Provider, request: Request, answer: Response) -> Response:
    """Say of an immutable tag what ECR says, and answer some PATCHes with 201."""
    if answer.status == 400 and request.kind == "manifest" and answer.codes == ["TAG_INVALID"]:
        name = request.repository
        tag = request.reference
        text = f"The image tag '{tag}' already exists in the '{name}' repository and cannot be overwritten"
        return error(400, "TAG_INVALID", f"{text} because the repository is immutable.")
    if request.method == "PATCH" and answer.status == 202:
        return replace(answer, status=201)
    return answer


def _caps(provider: Provider) -> tuple[Cap, ...]:
    """Count each API for itself (section 4.8); the numbers are requests a second."""
    counts = {"blob_head": 1000, "manifest_head": 2000, "manifest_get": 2000, "blob_get": 3000}
    counts |= {"upload_start": 100, "upload_body": 500, "upload_finish": 100, "manifest_put": 10}
    return tuple(Cap(count, actions=frozenset({action})) for action, count in counts.items())


def _public_caps(provider: Provider) -> tuple[Cap, ...]:
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


def _private(account: str, mount: Mount) -> Persona:
    """Describe a registry of an account; BLOB_MOUNTING is a setting of the account."""
    return Persona(
        source="docs/protocol-facts.md sections 4.7 to 4.9",
        hosts={"registry": f"{account}.dkr.ecr.eu-west-1.amazonaws.com"},
        options=CLOUD_OPTIONS,
        mount=mount,
        caps=_caps,
        throttled="Rate exceeded",
        before=(_absent_repository, _unreferenced),
        after=(_worded_as_ecr, _seen_late),
    )


PERSONAS: Mapping[str, Persona] = {
    "ecr": _private("123456789012", "never"),
    "ecr_mounting": _private("210987654321", "committed"),
    "ecr_public": Persona(
        source="docs/protocol-facts.md sections 4.7, 4.8 (ECR Public), 4.9",
        hosts={"registry": "public.ecr.aws"},
        options=CLOUD_OPTIONS,
        mount="never",
        caps=_public_caps,
        throttled="Rate exceeded",
        before=(_absent_repository, _unreferenced),
        after=(_worded_as_ecr, _seen_late),
    ),
}
