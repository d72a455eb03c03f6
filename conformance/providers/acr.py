"""Azure's registries: limits of bodies, the form of chunks, a registry in each cloud.

Owns: refusals of uploads, rates.
May not know: sockets, logins (`clouds.azure`), any client.
Invariants: all other behaviour is the strict registry's.
Follows: docs/protocol-facts.md sections 6.1, 6.2 and 6.5.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..clouds.azure import CLOUDS, Cloud, Exchange
from ..messages import Request, Response, error
from ..server.exchange import Site
from .provider import CLOUD_OPTIONS, Persona, Provider, Role
from .rates import READS, WRITES, Cap

__all__ = ["PERSONAS"]

_BODY_LIMIT = 20_000_000  # bytes; "above about 20 MB" (section 6.5)


def _uploads(provider: Provider, request: Request) -> Response | None:
    """Refuse bodies that are too long, chunked coding, and the unit `bytes` in Content-Range."""
    is_upload = request.kind == "upload" and request.method in ("PUT", "PATCH")
    if not is_upload or not request.has_body:
        return None
    if request.is_chunked:
        return error(400, "CONTENT_LENGTH_INVALID", "the Content-Length header is missing")

    is_limited = request.method == "PUT" or bool(request.header("content-range"))
    if is_limited and (request.length() or 0) > _BODY_LIMIT:
        page = b"<html><head><title>413 Request Entity Too Large</title></head></html>"
        headers = [("Content-Type", "text/html"), ("Server", "AzureContainerRegistry")]
        return Response(413, headers, page, early=True)
    if request.header("content-range").startswith("bytes "):
        return error(400, "BLOB_UPLOAD_INVALID", "the Content-Range header format is invalid")
    return None


def _caps(provider: Provider) -> tuple[Cap, ...]:
    """Return the caps of Premium registries on reads and writes per minute."""
    return (Cap(10_000, 60.0, READS), Cap(2000, 60.0, WRITES))


def _in_cloud(cloud: Cloud) -> Persona:
    """Return the row of a registry with its cloud's directory. Every user has all permissions."""

    def directory(provider: Provider) -> Mapping[Role, Site]:
        assert isinstance(provider.tokens, Exchange)
        assert provider.tokens.directory is not None
        return {"authority": provider.tokens.directory}

    host = f"name.{cloud.suffix}"
    return Persona(
        source="docs/protocol-facts.md sections 6.1 to 6.5",
        hosts={"registry": host, "authority": cloud.authority},
        tokens={"service": host, "anonymous": False, "cloud": cloud},
        service=Exchange,
        parts=directory,
        caps=_caps,
        before=(_uploads,),
    )


PERSONAS: Mapping[str, Persona] = {
    **{f"acr-{key}": _in_cloud(cloud) for key, cloud in CLOUDS.items()},
    # Without logins.
    "acr": Persona(
        source="docs/protocol-facts.md section 6.5",
        hosts={"registry": "team.azurecr.io"},
        options=CLOUD_OPTIONS,
        caps=_caps,
        before=(_uploads,),
    ),
}
