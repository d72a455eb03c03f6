"""Registries of no particular provider: strict, old, and one that redirects to object storage.

Owns: differences of registries before OCI 1.1.
May not know: sockets, any client.
Invariants: behaviour that a row does not change is strict.
Follows: docs/protocol-facts.md sections 1.8, 1.10, 1.11 and 1.13.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..messages import Request, Response, error
from .provider import Persona, Provider

__all__ = ["PERSONAS"]


def _no_large_pages(provider: Provider, request: Request) -> Response | None:
    """Refuse a large `n`. Later registries use their maximum instead (section 1.11)."""
    size = request.parameter("n")
    if request.kind == "tag_list" and size is not None and size.isdecimal() and int(size) > 100:
        return error(
            400, "PAGINATION_NUMBER_INVALID", "invalid number of results requested", {"n": size}
        )
    return None


PERSONAS: Mapping[str, Persona] = {
    "strict": Persona(source="docs/protocol-facts.md section 1", hosts={"registry": "strict.test"}),
    "old": Persona(
        source="docs/protocol-facts.md sections 1.8 (202 for a mount), 1.10 (no referrers), 1.11 (pages)",
        hosts={"registry": "old.test"},
        options={
            "referrers_api": False,
            "single_post": False,
            "resumable": False,
            "page_size": 100,
        },
        mount="never",
        before=(_no_large_pages,),
    ),
    "redirecting": Persona(
        source="docs/protocol-facts.md sections 1.2, 1.13; R1 and R4 of 9.2",
        hosts={"registry": "redirecting.test", "storage": "storage.test"},
    ),
}
