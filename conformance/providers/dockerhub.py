"""Docker Hub: its token service, its names, its limit of pulls in six hours.

Owns: its counters and their headers, its permissions.
May not know: sockets, any client.
Invariants: all other behaviour is the strict registry's.
Follows: docs/protocol-facts.md sections 2.1 and 7.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..content.images import Seed
from ..messages import Access, Request, Response
from .provider import Persona, Provider
from .rates import Cap

__all__ = ["PERSONAS"]

_WINDOW = 21600.0  # seconds


def _caps(provider: Provider) -> tuple[Cap, Cap]:
    """Return the caps in six hours: 100 manifests without a login, 200 for each account.

    A HEAD does not count.
    """

    def anonymous(request: Request) -> str | None:
        return "" if provider.user(request) is None else None

    gets = frozenset({"manifest_get"})
    return (Cap(100, _WINDOW, gets, per=anonymous), Cap(200, _WINDOW, gets, per=provider.user))


def _add_quota_headers(provider: Provider, request: Request, answer: Response) -> Response:
    """Add the headers with the remaining quota to answers to GET and HEAD of a manifest."""
    is_read = request.kind == "manifest" and request.method in ("GET", "HEAD")
    if not is_read or answer.status in (401, 403):
        return answer

    user = provider.user(request)
    anonymous_cap, account_cap = provider.rates.caps
    cap = anonymous_cap if user is None else account_cap
    as_get = Request("GET", request.target, request.headers)  # a HEAD would not be counted
    window = f"w={cap.seconds:.0f}"
    answer.headers += [
        ("ratelimit-limit", f"{cap.requests};{window}"),
        ("ratelimit-remaining", f"{provider.rates.remaining(cap, as_get)};{window}"),
        ("docker-ratelimit-source", "192.0.2.1" if user is None else f"account-of-{user}"),
    ]
    return answer


def _grants(user: str | None, access: Access) -> bool:
    """Report whether a user has a permission.

    Names of one component have none: clients abbreviate names that begin with `library/` at the
    registry.
    """
    return "/" in access.name and (access.action == "pull" or user is not None)


def _store_preview(provider: Provider) -> None:
    """Store the image whose HEAD clients use to read the counters."""
    Seed(0).image(sizes=(1,)).load_into(provider, "ratelimitpreview/test", tag="latest")


PERSONAS: Mapping[str, Persona] = {
    "dockerhub": Persona(
        source="docs/protocol-facts.md sections 2.1, 7.2",
        hosts={"registry": "registry-1.docker.io", "token": "auth.docker.io"},
        tokens={"service": "registry.docker.io", "expires_in": 300, "grants": _grants},
        caps=_caps,
        has_retry_after=False,
        throttled="You have reached your pull rate limit. You may increase the limit by authenticating.",
        seed=_store_preview,
        after=(_add_quota_headers,),
    )
}
