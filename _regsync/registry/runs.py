"""The registries of a run: their clients, their limits, what is counted, how they are reached.

A `Transport` serves all registries of a run, or of all runs of a watch. Only requests of the same
client share its tokens and show its client certificate.

May not know: when a request is sent and what it is for.
Invariants: a client certificate is shown to its own registry only (I6); metadata services are never
reached by proxy (R20).
Follows: docs/design.md sections 6 and 9, docs/protocol-facts.md sections 8.2 and 9.2.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection
from functools import cache, partial

import anyio

from _regsync import edge
from _regsync.addresses import Origin
from _regsync.auth.cloud import Access, CloudLogin, CloudModule, Clouds
from _regsync.auth.credentials import Credential
from _regsync.config import Registry
from _regsync.errors import AuthError, ConfigError, ConnectFailed
from _regsync.net.dial import open_stream
from _regsync.net.proxies import Proxy, proxy_for
from _regsync.net.trust import find_certs_d, make_context
from _regsync.net.wire import Pool
from _regsync.providers import DIALECTS, api_host
from _regsync.registry.client import Machine, RegistryClient, Run, origin_of
from _regsync.registry.limits import DEFAULT_CONCURRENCY, HostLimits

# What the requests of one client have in common: host:port, login, why there is none, trust, proxy.
_ClientKey = tuple[str | Credential | CloudLogin | None, ...]


class Dialer:
    """Connects to origins as the configuration of a registry prescribes. What it has read of files
    it keeps.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.read = cache(machine.read)
        self._contexts = cache(make_context)
        self._certs_d = cache(find_certs_d)

    def prepare(self, registry: Registry) -> None:
        """Read the files that the configuration of a registry names. Raises ConfigError if a file,
        or the URL of the proxy, cannot be used.
        """
        if registry.is_layout:
            return
        if registry.scheme == "https":
            self._context(registry)
        host, environ = api_host(registry.host), edge.current().environ
        proxy_for(registry.scheme, host, registry.port, environ, registry.proxy)

    async def dial(self, origin: Origin, registry_there: Registry | None) -> edge.Stream:
        """Connect to an origin. Raises ConnectFailed if that fails.

        `registry_there` is the registry of this run at that origin, if there is one. If another
        registry led to the origin, no client certificate is shown, not even to `registry_there`.
        """
        is_foreign = origin.via is not None and origin.address != origin_of(origin.via).address
        # The registry whose proxy and authorities are used.
        registry = registry_there if is_foreign and registry_there else origin.via
        # NO_PROXY does not exempt a registry from the proxy of its own configuration.
        proxy = proxy_for(
            origin.scheme,
            origin.host,
            origin.port,
            edge.current().environ,
            registry.proxy if registry else None,
            heeds_exemptions=registry_there is None,
        )
        is_metadata_service = origin.scheme == "http" and not registry_there and not is_foreign
        if is_metadata_service:
            proxy = None  # whatever its name is (R20)
        via_proxy = f" through {proxy}" if proxy else ""
        self._machine.log("debug", "connect", f"connecting to {origin}{via_proxy}")

        context = None
        if origin.scheme == "https":
            context = self._context(registry, has_certificate=not is_foreign)
        try:
            return await open_stream(
                origin, context=context, timeouts=self._machine.timeouts, proxy=proxy
            )
        except ConnectFailed as error:
            if proxy:
                _name_proxy(error, proxy)
            raise

    def _context(
        self, registry: Registry | None, *, has_certificate: bool = True
    ) -> ssl.SSLContext:
        """Return the TLS context for a registry's configuration, with or without its client
        certificate. If `registry` is None, the context trusts the system's authorities only.
        """
        # With equal arguments, so that all who need the same context share one (`cache`).
        if registry is None:
            return self._contexts(None, None, None, ())
        # Certificates of authorities (.crt), client certificates (.cert) and their keys (.key).
        files = self._certs_d(edge.home(), registry.authority, registry.port)
        if has_certificate:
            pair = registry.client_cert, registry.client_key
            return self._contexts(registry.ca_file, *pair, files)
        authorities = tuple(file for file in files if file.endswith(".crt"))
        return self._contexts(registry.ca_file, None, None, authorities)


def _name_proxy(error: ConnectFailed, proxy: Proxy) -> None:
    """Add to an error the proxy that was used, and a hint that names its setting."""
    if str(proxy) not in error.message:
        error.message = f"through the proxy {proxy}: {error.message}"
    if error.hint is None or "_PROXY" in error.hint:
        error.hint = f"check the proxy, which {proxy.setting} names"


def _cloud(name: str) -> CloudModule:
    """Import the login of a cloud, which most runs do not need."""
    if name == "aws":
        from _regsync.auth import aws

        return aws
    if name == "azure":
        from _regsync.auth import azure

        return azure
    from _regsync.auth import google

    return google


class Transport(Run):
    """The way to all registries, for a run or for all runs of a watch."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, Pool(self._dial, machine.timeouts))
        self.dialer = Dialer(machine)
        self._clients: dict[_ClientKey, RegistryClient] = {}  # of this run

        # Bytes of blobs in this run that were read from sources and that were sent to targets.
        self.blob_bytes = 0
        self.bytes_sent = 0

        # Files with logins are read each time, because other programs rewrite them.
        access = Access(machine.read, partial(self.fetch, None))
        self._clouds = Clouds(access, _cloud)

    # The life of a run.

    def close(self) -> None:
        self.pool.close()

    def read_again(self, registries: Collection[Registry]) -> None:
        """Read the files that a configuration names again. Raises ConfigError if one cannot be
        used; then what was read before stays in use.
        """
        dialer = Dialer(self.machine)
        for registry in registries:
            dialer.prepare(registry)
        self.dialer = dialer

    def begin_run(self, registries: Collection[Registry]) -> None:
        """Begin another run with new counts. `registries` are those of its configuration.

        A client is kept, with its tokens, if the configuration of all registries at its address is
        unchanged and the last run has used it.
        """
        self.blob_bytes = self.bytes_sent = 0
        self.requests.clear()
        self.throttled.clear()
        self._clouds.reload()  # identities of clouds are searched for again

        earlier_clients = self._clients
        self._clients = {}
        self.clients_at.clear()
        # Where a registry's configuration was changed or removed, all at its address begin anew: they
        # share the host and its connections.
        clients = earlier_clients.values()
        changed = {each.origin.address for each in clients if each.registry not in registries}
        for address in changed:
            self.hosts.pop(address, None)
        for key, client in earlier_clients.items():
            if client.origin.address in changed:
                self.pool.close(origin=client.origin)
            elif client.is_used:  # an unused one is not looked up again: its login has changed
                client.begin_run()
                self._add_client(key, client)
        for host in self.hosts.values():
            host.begin_run()

    # What is counted.

    def count_read(self, count: int) -> None:
        """Count bytes of a blob that came from a source."""
        self.last_progress = anyio.current_time()
        self.blob_bytes += count

    def count_sent(self, count: int) -> None:
        """Count bytes of a blob that went to a target."""
        self.last_progress = anyio.current_time()
        self.bytes_sent += count

    # The registries.

    def client(self, registry: Registry, repository: str | None = None) -> RegistryClient:
        """Return the client of a registry that logs in with the credential of a repository. Creates
        the client on first use.

        If that credential cannot be obtained, all requests of the returned client fail with the
        reason. Repositories with another credential are still copied.
        """
        credential: Credential | CloudLogin | None = None
        failure: AuthError | None = None
        try:
            credential = self._clouds.find(registry, repository, self.dialer.read)
        except AuthError as error:
            failure = error

        reason = failure.message if failure is not None else ""
        trust = (registry.ca_file, registry.client_cert, registry.client_key, registry.proxy)
        key = (registry.authority, credential, reason, *trust)
        limits = self._limits_of(registry)
        client = self._clients.get(key)
        if client is None:
            client = RegistryClient(registry, credential, self, limits)
            self._add_client(key, client)
        client.is_used = True  # `begin_run` keeps it for the next run
        if failure is not None:
            client.stop(failure)
        return client

    def _add_client(self, key: _ClientKey, client: RegistryClient) -> None:
        self._clients[key] = client
        self.clients_at.setdefault(client.origin.address, client)

    def _limits_of(self, registry: Registry) -> HostLimits:
        """Return the limits of a registry's host:port. If several registries of the configuration
        have the same host:port, the smallest `max_concurrent` applies.
        """
        cap = registry.max_concurrent or DEFAULT_CONCURRENCY
        origin = origin_of(registry)
        limits = self.hosts.get(origin.address)
        if limits is None or not limits.has_lanes:  # it was another registry's storage so far
            groups = DIALECTS[registry.kind].limits
            limits = self.new_host(registry.authority, origin, cap=cap, groups=groups)
            self.hosts[origin.address] = limits
        elif registry.max_concurrent:  # the default does not reduce what another alias has set
            limits.cap = min(limits.cap, cap)
        return limits

    async def _dial(self, origin: Origin) -> edge.Stream:
        client = self.clients_at.get(origin.address)
        registry = client.registry if client else None
        try:
            return await self.dialer.dial(origin, registry)
        except ConfigError as error:
            # What is needed for this host alone, to which a registry has led, nobody has looked at
            # before (`prepare`). It fails what leads there, and not the run.
            failure = ConnectFailed(error.message, hint=error.hint)
            failure.retryable = False
            raise failure from error
