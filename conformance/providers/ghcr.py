"""GitHub's registry: differences in uploads.

Owns: its quirks of uploads, its rate.
May not know: sockets, logins, any client.
Invariants: all other behaviour is the strict registry's.
Follows: docs/protocol-facts.md sections 7.1 and 7.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..messages import Content, Request, Response, error
from .provider import CLOUD_OPTIONS, Before, Persona, Provider
from .rates import Cap

__all__ = ["PERSONAS"]

_CHUNK_LIMIT = 4 << 20  # bytes (section 7.1)


def _chunks(provider: Provider, request: Request) -> Response | None:
    """Refuse a large chunk with Content-Range. Keep only the last of several chunks."""
    if request.kind != "upload" or request.method != "PATCH":
        return None
    if request.header("content-range") and (request.length() or 0) > _CHUNK_LIMIT:
        text = "the body exceeds 4.00 MiB"
        return error(416, "REQUESTED_RANGE_NOT_SATISFIABLE", text)
    repository = provider.repositories.get(request.repository)
    upload = repository.uploads.get(request.reference) if repository else None
    if upload is not None and upload.content.size:
        upload.content = Content()
    return None


def _no_whole_put(status: int, code: str = "UNSUPPORTED") -> Before:
    """Return a function that refuses a PUT with a body (section 7.9)."""

    def answer(provider: Provider, request: Request) -> Response | None:
        if request.kind != "upload" or request.method != "PUT" or not request.has_body:
            return None
        return replace(error(status, code, "not by this way"), early=True)

    return answer


def _ghcr(host: str, *refusals: Before) -> Persona:
    return Persona(
        source="docs/protocol-facts.md sections 7.1 (upload, referrers, rate), 7.9 (what is refused)",
        hosts={"registry": host},
        options={**CLOUD_OPTIONS, "referrers_api": False},
        caps=lambda provider: (Cap(2000, 60.0),),
        before=(_chunks, *refusals),
    )


PERSONAS: Mapping[str, Persona] = {
    "ghcr": _ghcr("ghcr.io"),
    "ghcr_405": _ghcr("ghcr-405.test", _no_whole_put(405)),
    "ghcr_416": _ghcr("ghcr-416.test", _no_whole_put(416, "REQUESTED_RANGE_NOT_SATISFIABLE")),
}
