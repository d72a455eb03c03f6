"""Registries that behave as providers do: a row per provider.

Owns: what differs from the strict registry, by row: host names, caps, mounts, quirks of requests
and answers, token services, places where blobs come from.
May not know: sockets (see `names` and `server`), any client.
Invariants: a row holds behaviour that docs/protocol-facts.md says, by section; what a row leaves
out is strict.

A new provider is a row and, where options do not say it, a few functions of the kinds that a row
takes: `rewrites` (what the registry makes of a request), `before` (an answer instead), `judges` (an
answer to a manifest that has been read), `after` (another answer).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ..clouds.azure import CLOUDS, Cloud, Directory, Exchange
from ..clouds.google import GoogleTokens
from ..content.images import Seed
from ..journal import Journal
from ..messages import Access, Request, Response, error
from ..server.exchange import Site
from ..server.names import Names
from ..server.sockets import Server, run_in_thread
from . import dialects
from .distribution import AFTER, BEFORE, JUDGES, REWRITES, REWRITES_3
from .provider import Before, Persona, Provider, Role
from .rates import Cap
from .referrers import late, led_to_a_page, no_api, none_is_unknown, page, refusal, unannounced

__all__ = ["PERSONAS", "Persona", "Provider", "Running", "imitate", "persona"]

# Docker Hub, section 7.2.

_HUB_WINDOW = 21600.0


def _hub_caps(provider: Provider) -> tuple[Cap, Cap]:
    """100 manifests in six hours for the anonymous, 200 for each account; HEADs are free."""

    def anonymous(request: Request) -> str | None:
        return "" if provider.user(request) is None else None

    gets = frozenset({"manifest_get"})
    return (
        Cap(100, _HUB_WINDOW, gets, per=anonymous),
        Cap(200, _HUB_WINDOW, gets, per=provider.user),
    )


def _hub_quota(provider: Provider, request: Request, answer: Response) -> Response:
    """Tell on GET and HEAD of a manifest how many more there may be, and whose they are."""
    if (
        request.kind != "manifest"
        or request.method not in ("GET", "HEAD")
        or answer.status in (401, 403)
    ):
        return answer

    user = provider.user(request)
    of_the_anonymous, of_accounts = provider.rates.caps
    cap = of_the_anonymous if user is None else of_accounts
    as_get = Request("GET", request.target, request.headers)
    window = f"w={cap.seconds:.0f}"
    answer.headers += [
        ("ratelimit-limit", f"{cap.requests};{window}"),
        ("ratelimit-remaining", f"{provider.rates.remaining(cap, as_get)};{window}"),
        ("docker-ratelimit-source", "192.0.2.1" if user is None else f"account-of-{user}"),
    ]
    return answer


def _hub_grants(user: str | None, access: Access) -> bool:
    """One-component names are clients' shorthand: the registry knows them with `library/` only."""
    return "/" in access.name and (access.action == "pull" or user is not None)


def _hub_preview(provider: Provider) -> None:
    """Hold the image whose HEAD shows the counters."""
    Seed(0).image(sizes=(1,)).load_into(provider, "ratelimitpreview/test", tag="latest")


# Azure, sections 6.1 and 6.2: one registry in each cloud.


def _acr(cloud: Cloud) -> Persona:
    """Describe a registry with its cloud's directory; who logs in may do all, nobody else anything."""

    def directory(provider: Provider) -> Mapping[Role, Site]:
        assert isinstance(provider.tokens, Exchange)
        provider.tokens.directory = Directory(cloud, wall=provider.tokens.wall)
        return {"authority": provider.tokens.directory}

    host = f"name.{cloud.suffix}"
    return Persona(
        source="docs/protocol-facts.md sections 6.1 to 6.5",
        hosts={"registry": host, "authority": cloud.authority},
        tokens={"service": host, "anonymous": False},
        service=Exchange,
        parts=directory,
        caps=dialects.acr_caps,
        before=(dialects.acr_chunks,),
    )


# Google, sections 5.1 and 5.2: everybody may pull from the project `public`.


def _google_grants(user: str | None, access: Access) -> bool:
    return user is not None or (access.action == "pull" and access.name.startswith("public/"))


def _google(host: str) -> Persona:
    """Describe a registry of Google's; `tokens.google` is to be who gives access tokens."""
    return Persona(
        source="docs/protocol-facts.md sections 5.1, 5.2, 5.5",
        hosts={"registry": host},
        tokens={"service": host, "path": "/v2/token", "grants": _google_grants},
        service=GoogleTokens,
        before=(dialects.no_chunks,),
    )


# Registries before OCI 1.1.


def _no_large_pages(provider: Provider, request: Request) -> Response | None:
    """Section 1.11: more than the configured maximum was an error before it was clamped."""
    size = request.parameter("n")
    if request.kind == "tag_list" and size is not None and size.isdecimal() and int(size) > 100:
        return error(
            400, "PAGINATION_NUMBER_INVALID", "invalid number of results requested", {"n": size}
        )
    return None


# Registries that are strict but for referrers; those that begin with `unknown` have no API.

_NO_API = {"referrers_api": False}
_REFERRERS: Mapping[str, Mapping[str, Any]] = {
    "referrers-in-pages": {"options": {"referrers_page": 2}},
    "referrers-unfiltered": {"options": {"referrers_page": 3, "referrers_filter": False}},
    "referrers-unannounced": {"after": (unannounced,)},
    "referrers-late": {"after": (late,)},
    "referrers-or-unknown": {"after": (none_is_unknown,)},
    "unknown-referrers-announced": {"before": (no_api,)},
    "unknown-404": {"options": _NO_API, "before": (refusal(404),)},
    "unknown-405": {"options": _NO_API, "before": (refusal(405),)},
    "unknown-501": {"options": _NO_API, "before": (refusal(501),)},
    "unknown-404-in-html": {"options": _NO_API, "before": (page(404),)},
    "unknown-404-in-text": {
        "options": _NO_API,
        "before": (page(404, "text/plain; charset=utf-8"),),
    },
    "unknown-200-in-html": {"options": _NO_API, "before": (page(200),)},
    "unknown-redirected": {"options": _NO_API, "before": (led_to_a_page,)},
}


# Clouds. None documents a POST with the whole blob; the bytes of a broken body are lost.
_CLOUD: Mapping[str, Any] = {"single_post": False, "resumable": False}
_ECR_ACCOUNTS: Sequence[tuple[str, str, Literal["committed", "never"]]] = (
    ("ecr", "123456789012", "never"),
    ("ecr_mounting", "210987654321", "committed"),
)
_GHCR_FORMS: Sequence[tuple[str, str, Sequence[Before]]] = (
    ("ghcr", "ghcr.io", ()),
    ("ghcr_405", "ghcr-405.test", (dialects.no_whole_put(405),)),
    ("ghcr_416", "ghcr-416.test", (dialects.no_whole_put(416, "REQUESTED_RANGE_NOT_SATISFIABLE"),)),
)


PERSONAS: Mapping[str, Persona] = MappingProxyType(
    {
        **{
            name: Persona(
                source="docs/protocol-facts.md sections 1.10, 7.9",
                hosts={"registry": f"{name}.test"},
                **row,
            )
            for name, row in _REFERRERS.items()
        },
        "strict": Persona(
            source="docs/protocol-facts.md section 1", hosts={"registry": "strict.test"}
        ),
        "distribution": Persona(
            # As Debian's docker-registry 2.8.2; tests ask both the same.
            source="docs/protocol-facts.md sections 1.2, 1.7 to 1.12",
            hosts={"registry": "distribution.test"},
            options={
                "referrers_api": False,
                "single_post": False,
                "resumable": False,
                "sha512": True,
            },
            rewrites=REWRITES,
            before=BEFORE,
            judges=JUDGES,
            after=AFTER,
        ),
        "distribution3": Persona(
            # It keeps the bytes of a broken body: a GET on the old Location says how many, a PUT
            # brings the rest.
            source="docs/protocol-facts.md sections 1.7 (Content-Range), 1.9 (resuming), 7.7 (no referrers)",
            hosts={"registry": "distribution3.test"},
            options={"referrers_api": False, "single_post": False, "resumable": True},
            rewrites=REWRITES_3,
        ),
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
        "dockerhub": Persona(
            source="docs/protocol-facts.md sections 2.1, 7.2",
            hosts={"registry": "registry-1.docker.io", "token": "auth.docker.io"},
            tokens={"service": "registry.docker.io", "expires_in": 300, "grants": _hub_grants},
            caps=_hub_caps,
            retry_after=None,
            throttled="You have reached your pull rate limit. You may increase the limit by authenticating.",
            seed=_hub_preview,
            after=(_hub_quota,),
        ),
        **{f"acr-{key}": _acr(cloud) for key, cloud in CLOUDS.items()},
        "gar": _google("europe-docker.pkg.dev"),
        "gcr": _google("gcr.io"),
        # Of the clouds: how they take blobs. Nobody has to log in, unless a test says `auth`.
        **{
            name: Persona(
                source="docs/protocol-facts.md sections 4.7 to 4.9",
                hosts={"registry": f"{account}.dkr.ecr.eu-west-1.amazonaws.com"},
                options=_CLOUD,
                mount=mount,  # BLOB_MOUNTING is a setting of the account
                caps=dialects.ecr_caps,
                throttled="Rate exceeded",
                before=(dialects.absent_repository, dialects.unreferenced),
                after=(dialects.worded_as_ecr, dialects.seen_late),
            )
            for name, account, mount in _ECR_ACCOUNTS
        },
        "ecr_public": Persona(
            source="docs/protocol-facts.md sections 4.7, 4.8 (ECR Public), 4.9",
            hosts={"registry": "public.ecr.aws"},
            options=_CLOUD,
            mount="never",
            caps=dialects.ecr_public_caps,
            throttled="Rate exceeded",
            before=(dialects.absent_repository, dialects.unreferenced),
            after=(dialects.worded_as_ecr, dialects.seen_late),
        ),
        "gar_open": Persona(
            source="docs/protocol-facts.md section 5.5 (uploads, mounts)",
            hosts={"registry": "europe-west1-docker.pkg.dev"},
            options=_CLOUD,
            mount="never",
            caps=dialects.google_caps,
            rewrites=(dialects.from_elsewhere,),
            before=(dialects.no_chunks,),
            after=(dialects.elsewhere,),
        ),
        "gcr_open": Persona(
            source="docs/protocol-facts.md sections 1.8 (mount without from), 5.5 (uploads)",
            hosts={"registry": "eu.gcr.io"},
            options=_CLOUD,
            caps=dialects.google_caps,
            rewrites=(dialects.from_elsewhere,),
            before=(dialects.no_chunks, dialects.bare_mount),
            after=(dialects.elsewhere,),
        ),
        **{
            name: Persona(
                source="docs/protocol-facts.md sections 7.1 (upload, referrers, rate), 7.9 (what is refused)",
                hosts={"registry": host},
                options={**_CLOUD, "referrers_api": False},
                caps=lambda provider: (Cap(2000, 60.0),),
                before=(dialects.ghcr_chunks, *refuses),
            )
            for name, host, refuses in _GHCR_FORMS
        },
        "acr": Persona(
            source="docs/protocol-facts.md section 6.5",
            hosts={"registry": "team.azurecr.io"},
            options=_CLOUD,
            caps=dialects.acr_caps,
            before=(dialects.acr_chunks,),
        ),
        "redirecting": Persona(
            source="docs/protocol-facts.md sections 1.2, 1.13; R1 and R4 of 9.2",
            hosts={"registry": "redirecting.test", "storage": "storage.test"},
        ),
    }
)


@dataclass(frozen=True)
class Running:
    """A provider that is being served; `url` and `address` are its registry's."""

    provider: Provider
    url: str
    servers: Mapping[Role, Server]

    @property
    def app(self) -> Provider:
        return self.provider

    @property
    def address(self) -> str:
        return self.url.partition("://")[2]

    @property
    def journal(self) -> Journal:
        return self.provider.journal

    def check(self) -> None:
        """Raise AssertionError when any part was sent what no correct client sends."""
        for site in self.provider.sites.values():
            site.journal.check()


def imitate(name: str, **options: Any) -> Provider:
    """Make a provider without serving it, to be asked in memory or to listen in a `Network`.

    `users`, `now` and `wall` are Provider's; other options are App's and come before the row's.
    """
    return Provider(PERSONAS[name], **options)


@contextlib.contextmanager
def persona(
    name: str, *, names: Names | None = None, port: int = 0, **options: Any
) -> Iterator[Running]:
    """Serve a provider while the block runs, each part in a thread of its own.

    Without `names` each part is at a port of 127.0.0.1, over plain HTTP. With `names` it answers
    under the row's host names, over TLS, for clients that use `names.environ`. `port` is the
    registry's own.
    """
    provider = imitate(name, **options)
    hosts = provider.row.hosts
    context = None if names is None else names.context(sorted(hosts.values()))
    with contextlib.ExitStack() as stack:
        servers = {
            role: stack.enter_context(
                run_in_thread(site, port=port if role == "registry" else 0, ssl_context=context)
            )
            for role, site in provider.sites.items()
        }
        origins = {role: server.url for role, server in servers.items()}
        if names is not None:
            origins = {role: f"https://{hosts[role]}" for role in servers}
            for role, server in servers.items():
                stack.enter_context(names.known(hosts[role], server.port))
        provider.place(origins)
        yield Running(provider, origins["registry"], servers)
