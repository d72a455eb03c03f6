"""The client of one registry: its connections, its login, its errors.

Owns: the parts of the machine that a run uses; the files that a configuration names, each read once
per run; TLS contexts, shared by all registries with the same certificates; first contact; the error
that stops a registry; the conversion of an answer into an error.
May not know: when a request is sent and what it is for; the open connections.
Invariants: a client certificate is shown to its own registry only (I6); no error contains a secret
or a terminal's control characters (R10, R18); metadata services are never reached by proxy (R20).
Follows: docs/design.md sections 6 and 9, docs/protocol-facts.md sections 8.1, 8.2 and 9.2.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cache, partial
from typing import NamedTuple, Protocol

import anyio

from _regsync import edge
from _regsync.addresses import Origin
from _regsync.auth.challenge import parse_error_body
from _regsync.auth.cloud import Answer, CloudLogin
from _regsync.auth.credentials import Credential
from _regsync.auth.tokens import Authenticator
from _regsync.config import Registry
from _regsync.errors import ConfigError, ConnectFailed, RegistryError, SyncError
from _regsync.net.dial import open_stream
from _regsync.net.proxies import IN_CONFIGURATION, Proxy, proxy_for
from _regsync.net.trust import CLIENT_CERT_HINT, find_certs_d, make_context
from _regsync.net.wire import Response, Timeouts, parse_retry_after
from _regsync.providers import api_host
from _regsync.registry.limits import HostLimits
from _regsync.text import one_line, printable

# The number of characters of a registry's explanation that are searched for URLs.
_MOST_EXPLAINED = 4000

# Matches the query of a URL, which may contain a signature, in linear time.
_QUERY = r"\?\S+"


class Machine(NamedTuple):
    """The parts of the machine that a run uses. Tests replace them."""

    environ: Mapping[str, str]
    home: str | None  # the user's home directory
    read: Callable[[str], bytes | None]  # read a file by its path; None if there is no such file
    chance: Callable[[], float]  # a random number from 0 to 1
    wall: Callable[[], float]  # seconds since 1970
    log: Callable[..., None]
    timeouts: Timeouts = Timeouts()
    open_files: int = 65536  # how many files the process may open, which bounds the permits
    traces: bool = True  # whether `log` shows the level "trace", which has one line per request

    def __repr__(self) -> str:
        return "<Machine>"  # it holds secrets


class Host(Protocol):
    """The host of repositories, as this run uses it: a registry or an image layout."""

    # The lanes, streams and reachability of the host.
    limits: HostLimits

    # Whether an upload session can report how many bytes it has received (rule 16).
    can_resume: bool

    @property
    def key(self) -> str:
        """The name of the host in reports: HOST:PORT."""

    @property
    def registry(self) -> Registry: ...

    @property
    def origin(self) -> Origin: ...


class RegistryClient:
    """A registry under one credential. All aliases of one HOST:PORT share the client."""

    def __init__(
        self,
        registry: Registry,
        credential: Credential | CloudLogin | None,
        *,
        limits: HostLimits,
        fetch: Callable[..., Awaitable[Answer]],
        wall: Callable[[], float],
    ) -> None:
        self.registry = registry
        self.key = registry.authority
        self.origin = Origin(registry.scheme, api_host(registry.host), registry.port, registry)

        self.limits = limits  # of HOST:PORT, whatever the credential
        self.authenticator = Authenticator(
            origin=self.origin,
            credential=credential,
            fetch=partial(fetch, self),
            now=anyio.current_time,
            wall=wall,
        )

        # Whether this run uses the client. A client that a run did not use is dropped.
        self.is_used = True

        # The error with which all further requests with this credential fail in this run.
        self._stop_error: SyncError | None = None

        # Whether broken uploads are resumed (rule 16). Set to False when the registry refuses that.
        self.can_resume = True

        # The hint if the registry is configured with http, but may serve only https.
        self.https_hint: str | None = None
        if registry.scheme == "http":
            secure = self.origin._replace(scheme="https")
            self.https_hint = f"write {secure} if it serves HTTPS"

    def stop(self, error: SyncError) -> None:
        """Make all further requests with this credential fail with an error in this run."""
        self._stop_error = error.copy_without_context()
        self.limits.wake()

    def raise_if_stopped(self) -> None:
        """Raise the error of requests that must not be sent in this run."""
        if self._stop_error is not None:
            raise self._stop_error.copy_without_context()
        self.limits.raise_if_stopped(0.0)

    def begin_run(self) -> None:
        """Prepare for another run, which tries the credential again."""
        self.is_used = False
        self.authenticator.begin()
        self._stop_error = None

    def error_of(self, answer: Response, wall_now: float) -> RegistryError:
        """Convert an answer, whose body has been read, into an error with the cleaned text of the
        registry (R18).
        """
        status = answer.status
        codes, text = parse_error_body(answer.body)
        # Some servers repeat the request in the error, so the queries of URLs are removed (R10).
        text = one_line(re.sub(_QUERY, "?...", printable(text, _MOST_EXPLAINED)))
        digests = re.findall("sha(?:256|512):[0-9a-f]{64,128}", answer.body.decode("latin-1"))
        error = RegistryError(
            f"status {status}: {text}" if text else f"status {status}",
            status=status,
            codes=codes,
            digests=frozenset(digests),
            retry_after=parse_retry_after(answer.headers.get("retry-after"), wall_now),
        )
        error.hint = self._hint(answer)
        return error

    def _hint(self, answer: Response) -> str | None:
        """Return a hint for a refusal, or None if no hint is known for its status and body."""
        login = self.authenticator
        body = answer.body  # its beginning
        if answer.status == 429 and login.is_anonymous:
            return f"{login.login_hint}, for a higher limit"
        if answer.status in (401, 403):
            return login.denied_hint
        # nginx writes this if it requires a client certificate.
        if answer.status == 400 and b"SSL certificate" in body:
            return CLIENT_CERT_HINT
        # Go and nginx write this if a request with http arrives at a port for https. The answer to
        # a HEAD has no text.
        if answer.status == 400 and (not body or b"HTTPS" in body):
            return self.https_hint
        return None


class Dialer:
    """Connects to origins as the configuration of a registry prescribes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

        # Files, TLS contexts and names of certificate files, each read once until `renew`.
        self.read = cache(machine.read)
        self._contexts = cache(partial(make_context, environ=machine.environ))
        self._certs_d = cache(find_certs_d)

    def prepare(self, registry: Registry) -> None:
        """Read the files that the configuration of a registry names. Raises ConfigError if a file,
        or the URL of the proxy, cannot be used.
        """
        if registry.is_layout:
            return
        if registry.scheme == "https":
            self._context(registry)
        host = api_host(registry.host)
        proxy_for(registry.scheme, host, registry.port, self._machine.environ, registry.proxy)

    def renew(self, registries: Collection[Registry]) -> None:
        """Read the files that the configuration names again.

        Raises ConfigError if a file cannot be used. The previous contexts stay in use then.
        """
        self.read.cache_clear()
        previous_contexts = self._contexts
        previous_certs_d = self._certs_d
        self._contexts = cache(partial(make_context, environ=self._machine.environ))
        self._certs_d = cache(find_certs_d)
        try:
            for registry in registries:
                self.prepare(registry)
        except ConfigError:
            self._contexts = previous_contexts
            self._certs_d = previous_certs_d
            raise

    async def dial(
        self, origin: Origin, registry_there: Registry | None, *, is_foreign: bool
    ) -> edge.Stream:
        """Connect to an origin. Raises ConnectFailed if that fails.

        `registry_there` is the registry of this run at that origin, if there is one. `is_foreign`
        means that another registry has named the origin: no client certificate is shown then, not
        even to `registry_there`.
        """
        # The registry whose proxy and authorities are used. `via` is the registry that led to the
        # origin.
        registry = registry_there if is_foreign and registry_there else origin.via
        # NO_PROXY does not exempt a registry from the proxy of its own configuration.
        proxy = proxy_for(
            origin.scheme,
            origin.host,
            origin.port,
            self._machine.environ,
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
        if registry is None:
            return self._contexts()
        # Certificates of authorities (.crt), client certificates (.cert) and their keys (.key).
        files = self._certs_d(self._machine.home, registry.authority, registry.port)
        if not has_certificate:
            authorities = tuple(file for file in files if file.endswith(".crt"))
            return self._contexts(registry.ca_file, certs_d=authorities)
        return self._contexts(registry.ca_file, registry.client_cert, registry.client_key, files)


def _name_proxy(error: ConnectFailed, proxy: Proxy) -> None:
    """Add to an error the proxy that was used, and a hint that names its setting."""
    if str(proxy) not in error.message:
        error.message = f"through the proxy {proxy}: {error.message}"
    if error.hint is None or "HTTPS_PROXY" in error.hint:
        error.hint = f"check the proxy, which {proxy.setting} names"
        if proxy.setting != IN_CONFIGURATION:
            error.hint += "; list hosts to reach without it in NO_PROXY"
