"""Registries that are strict except for referrers.

Owns: answers of registries without the referrers API, and answers about a subject.
May not know: sockets, other quirks of a provider.
Invariants: answers about manifests, blobs and tags are the strict registry's. Only unknown paths,
`OCI-Subject` and lists of referrers differ.
Follows: docs/protocol-facts.md sections 1.10 and 7.9, and rule 15 of docs/design.md section 6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..messages import Request, Response, error
from .provider import Before, Persona, Provider

__all__ = ["LATE", "PERSONAS"]

LATE = 60.0  # seconds until a new referrer is listed
_UNKNOWN = ("referrers", "other")  # kinds of paths that are unknown to a registry without the API


def _page(provider: Provider, request: Request) -> Response | None:
    """Answer unknown paths with a page, as a success."""
    if request.kind not in _UNKNOWN:
        return None
    html = ("Content-Type", "text/html; charset=utf-8")
    return Response(200, [html], b"<!doctype html><title>Registry</title>\n")


def _refusal(status: int) -> Before:
    """Return a function that answers unknown paths with an error body."""

    def answer(provider: Provider, request: Request) -> Response | None:
        if request.kind not in _UNKNOWN:
            return None
        return error(status, "UNSUPPORTED", "the operation is unsupported")

    return answer


def _no_api(provider: Provider, request: Request) -> Response | None:
    """Refuse the referrers API although subjects are announced, as ECR did in June 2024."""
    if request.kind != "referrers":
        return None
    return error(404, "UNSUPPORTED", "the referrers API is not here")


def _none_is_unknown(provider: Provider, request: Request, answer: Response) -> Response:
    """Answer 404 instead of an empty list of referrers."""
    if request.kind == "referrers" and answer.status == 200 and not answer.json()["manifests"]:
        return error(404, "MANIFEST_UNKNOWN", "manifest unknown", {"digest": request.reference})
    return answer


def _unannounced(provider: Provider, request: Request, answer: Response) -> Response:
    """Remove OCI-Subject from answers, although there is a referrers API."""
    answer.headers = [
        (name, value) for name, value in answer.headers if name.lower() != "oci-subject"
    ]
    return answer


def _late(provider: Provider, request: Request, answer: Response) -> Response:
    """List a referrer only LATE seconds after it was put.

    Content loaded by tests counts as older.
    """
    if request.kind == "manifest" and request.method == "PUT" and answer.status == 201:
        provider.notes.setdefault(("put", answer.header("Docker-Content-Digest")), provider.now())
    if request.kind == "referrers" and answer.status == 200:
        document = answer.json()
        now = provider.now()
        entries = document["manifests"]
        document["manifests"] = [
            entry
            for entry in entries
            if provider.notes.get(("put", entry["digest"]), now - LATE) + LATE <= now
        ]
        return replace(answer, body=json.dumps(document).encode())
    return answer


# Rows whose names begin with `unknown` have no referrers API.
_NO_API = {"referrers_api": False}
_ROWS: Mapping[str, Mapping[str, Any]] = {
    "referrers-in-pages": {"options": {"referrers_page": 2}},
    "referrers-unfiltered": {"options": {"referrers_page": 3, "referrers_filter": False}},
    "referrers-unannounced": {"after": (_unannounced,)},
    "referrers-late": {"after": (_late,)},
    "referrers-or-unknown": {"after": (_none_is_unknown,)},
    "unknown-referrers-announced": {"before": (_no_api,)},
    "unknown-404": {"options": _NO_API, "before": (_refusal(404),)},
    "unknown-405": {"options": _NO_API, "before": (_refusal(405),)},
    "unknown-200-in-html": {"options": _NO_API, "before": (_page,)},
}

PERSONAS: Mapping[str, Persona] = {
    name: Persona(
        source="docs/protocol-facts.md sections 1.10, 7.9",
        hosts={"registry": f"{name}.test"},
        **row,
    )
    for name, row in _ROWS.items()
}
