"""Registries that behave as providers do, by name, and servers made of them.

Owns: the table of all rows.
May not know: what any row says (the modules of the providers).
Invariants: a row holds behaviour that docs/protocol-facts.md says, by section; what a row leaves
out is strict.

A new provider is a row in a module of its own and, where options do not say it, a few functions of
the kinds that a row takes: `rewrites` (what the registry makes of a request), `before` (an answer
instead), `judges` (an answer to a manifest that has been read), `after` (another answer).
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
