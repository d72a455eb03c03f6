"""The registries that behave as providers, by name, and servers for them.

Owns: the table of all rows.
May not know: the content of any row (the modules of the providers).
Invariants: the behaviour of a row is documented in docs/protocol-facts.md, by section. Behaviour
that a row does not change is strict.

A new provider is a row in a module of its own. Behaviour for which there is no option is added by
functions: `rewrites` change a request, `before` answers instead of the registry, `judges` answer to
a received manifest, `after` changes an answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..journal import Journal
from ..server.names import Names
from ..server.sockets import Server, run_in_thread
from . import acr, distribution, dockerhub, ecr, general, ghcr, google, referrers
from .provider import Persona, Provider, Role

__all__ = ["PERSONAS", "Persona", "Provider", "Running", "imitate", "persona"]

PERSONAS: Mapping[str, Persona] = MappingProxyType(
    {
        **referrers.PERSONAS,
        **general.PERSONAS,
        **distribution.PERSONAS,
        **dockerhub.PERSONAS,
        **ecr.PERSONAS,
        **google.PERSONAS,
        **ghcr.PERSONAS,
        **acr.PERSONAS,
    }
)


@dataclass(frozen=True)
class Running:
    """A provider that is being served."""

    provider: Provider
    url: str  # of the registry
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
        """Raise AssertionError if any part got a request that no correct client sends."""
        for site in self.provider.sites.values():
            site.journal.check()


def imitate(name: str, **options: Any) -> Provider:
    """Return a provider that is not served. It can answer in memory or listen in a `Network`.

    `users`, `now` and `wall` are options of Provider. Other options are App's, and override the
    row's.
    """
    return Provider(PERSONAS[name], **options)


@contextlib.contextmanager
def persona(
    name: str, *, names: Names | None = None, port: int = 0, **options: Any
) -> Iterator[Running]:
    """Serve a provider while the block runs, each part in a thread of its own.

    Without `names`, each part is at a port of 127.0.0.1, over plain HTTP. With `names`, each part
    is at its host name, over TLS, for clients that use `names.environ`. `port` is the port of the
    registry; 0 means any free port.
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
