"""Docker Hub: its token service, its names, its pulls in six hours.

Owns: what it counts and tells in headers, who may do what.
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
    """100 manifests in six hours for the anonymous, 200 for each account; HEADs are free."""

    def anonymous(request: Request) -> str | None:
        return "" if provider.user(request) is None else None

    gets = frozenset({"manifest_get"})
    return (Cap(100, _WINDOW, gets, per=anonymous), Cap(200, _WINDOW, gets, per=provider.user))


def _tell_quota(provider: Provider, request: Request, answer: Response) -> Response:
    """Tell on GET and HEAD of a manifest how many more there may be, and whose they are."""
    is_read = request.kind == "manifest" and request.method in ("GET", "HEAD")
    if not is_read or answer.status in (401, 403):
        return answer

    user = provider.user(request)
    of_the_anonymous, of_accounts = provider.rates.caps
    cap = of_the_anonymous if user is None else of_accounts
    as_get = Request("GET", request.target, request.headers)  # HEADs are not counted
    window = f"w={cap.seconds:.0f}"
    answer.headers += [
        ("ratelimit-limit", f"{cap.requests};{window}"),
        ("ratelimit-remaining", f"{provider.rates.remaining(cap, as_get)};{window}"),
        ("docker-ratelimit-source", "192.0.2.1" if user is None else f"account-of-{user}"),
    ]
    return answer


def _grants(user: str | None, access: Access) -> bool:
    """One-component names are clients' shorthand: the registry knows them with `library/` only."""
    return "/" in access.name and (access.action == "pull" or user is not None)


def _hold_preview(provider: Provider) -> None:
    """Hold the image whose HEAD shows the counters."""
    Seed(0).image(sizes=(1,)).load_into(provider, "ratelimitpreview/test", tag="latest")


PERSONAS: Mapping[str, Persona] = {
    "dockerhub": Persona(
        source="docs/protocol-facts.md sections 2.1, 7.2",
        hosts={"registry": "registry-1.docker.io", "token": "auth.docker.io"},
        tokens={"service": "registry.docker.io", "expires_in": 300, "grants": _grants},
        caps=_caps,
        retry_after=None,
        throttled="You have reached your pull rate limit. You may increase the limit by authenticating.",
        seed=_hold_preview,
        after=(_tell_quota,),
    )
}
