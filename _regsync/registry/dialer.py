"""How a connection is made: whom to trust, which certificate to show, through which proxy.

Owns: the files that a configuration names, each read once a run; one TLS context for all who trust
and show the same; the words of an error about a proxy.
May not know: requests, logins, which connections there are.
Invariants: I6 (a client certificate goes to its own registry only: a stranger is shown none), R20
(metadata services are asked without a proxy).
Follows: docs/design.md section 9 ("CA"), docs/protocol-facts.md sections 8.1, 8.2 and 9.2.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial

from _regsync.addresses import Origin
from _regsync.config.model import Registry
from _regsync.errors import ConfigError, ConnectFailed
from _regsync.net.pool import open_stream
from _regsync.net.proxy import Proxy, proxy_for
from _regsync.net.streams import Stream, Timeouts
from _regsync.net.tls import certs_d, make_context
from _regsync.providers import api_host


class Dialer:
    """Opens connections as the configuration of a registry wants it."""

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        home: str | None,
        read: Callable[[str], bytes | None],
        log: Callable[..., None],
        timeouts: Timeouts,
    ) -> None:
        self._environ = environ
        self._home = home
        self._log = log
        self._timeouts = timeouts

        self.read = cache(read)
        self._contexts = cache(partial(make_context, environ=environ))
        self._certs_d = cache(certs_d)

    def prepare(self, registry: Registry) -> None:
        """Read what the configuration names for a registry; ConfigError when it is unusable."""
        if registry.scheme == "https":
            self._context(registry)
        host = api_host(registry.host)
        proxy_for(registry.scheme, host, registry.port, self._environ, registry.proxy)

    def renew(self, registries: Collection[Registry]) -> None:
        """Read again what the configuration names; ConfigError when that is unusable: what was read
        before stays.
        """
        self.read.cache_clear()
        contexts = self._contexts
        directories = self._certs_d
        self._contexts = cache(partial(make_context, environ=self._environ))
        self._certs_d = cache(certs_d)
        try:
            for registry in registries:
                self.prepare(registry)
        except ConfigError:
            self._contexts = contexts
            self._certs_d = directories
            raise

    async def dial(self, origin: Origin, known: Registry | None, *, abroad: bool) -> Stream:
        """Connect to an origin; ConnectFailed when that fails.

        `known` is the registry that answers there, if it is one of this run's. `abroad` means that
        another registry has sent us: then even one of ours takes us for a stranger.
        """
        registry: Registry | None = known if known is not None and abroad else origin.via
        proxy, reason = self._proxy(origin, known, registry, abroad=abroad)
        way = f" through {proxy}" if proxy else ""
        self._log("debug", "connect", f"connecting to {origin}{way} ({reason})")

        context = None
        if origin.scheme == "https":
            context = self._context(registry, stranger=abroad)
        proxy_context = None
        if proxy and proxy.scheme == "https":
            proxy_context = self._context(registry, stranger=True)
        try:
            return await open_stream(
                origin,
                context=context,
                timeouts=self._timeouts,
                proxy=proxy,
                proxy_context=proxy_context,
            )
        except ConnectFailed as error:
            if proxy:
                is_configured = registry is not None and bool(registry.proxy)
                _name_proxy(error, proxy, reason, is_configured=is_configured)
            raise

    def _proxy(
        self, origin: Origin, known: Registry | None, registry: Registry | None, *, abroad: bool
    ) -> tuple[Proxy | None, str]:
        """Return the proxy (None: none), and what decided."""
        override = registry.proxy if registry else None
        proxy, reason = proxy_for(
            origin.scheme, origin.host, origin.port, self._environ, override, listed=known is None
        )
        is_metadata = origin.scheme == "http" and known is None and not abroad
        return (None if is_metadata else proxy), reason  # R20: whatever the service's name is

    def _context(self, registry: Registry | None, *, stranger: bool = False) -> ssl.SSLContext:
        """Return what a registry's configuration trusts; a stranger is shown no client certificate."""
        if registry is None:
            return self._contexts()
        files = self._certs_d(self._home, registry.authority, registry.port)
        if stranger:
            authorities = tuple(file for file in files if file.endswith(".crt"))
            return self._contexts(registry.ca_file, certs_d=authorities)
        return self._contexts(registry.ca_file, registry.client_cert, registry.client_key, files)


def _name_proxy(error: ConnectFailed, proxy: Proxy, reason: str, *, is_configured: bool) -> None:
    """Say in an error through which proxy it came, and what named that proxy."""
    if str(proxy) not in error.message:
        error.message = f"through the proxy {proxy}: {error.message}"
    if error.hint is None or "HTTPS_PROXY" in error.hint:
        error.hint = f"this proxy is named by {reason}"
        if not is_configured:
            error.hint += "; NO_PROXY names hosts to reach without it"
