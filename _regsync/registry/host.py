"""One registry as this run knows it: how it is connected to, its login, its errors.

Owns: the files that a configuration names, each read once a run; one TLS context for all who trust
and show the same; why it is asked nothing more, first contact, how an answer becomes an error.
May not know: when a request is sent, and what it asks for; which connections there are.
Invariants: a client certificate goes to its own registry only (I6); no error shows a secret, or
what a terminal would obey (R10, R18); metadata services are asked without a proxy (R20).
Follows: docs/design.md sections 6 and 9, docs/protocol-facts.md sections 8.1, 8.2 and 9.2.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cache, partial
from typing import Protocol

import anyio

from _regsync.addresses import Origin
from _regsync.auth.challenge import parse_error_body
from _regsync.auth.cloud import Answer, CloudLogin
from _regsync.auth.credentials import Credential
from _regsync.auth.tokens import Authenticator
from _regsync.config.model import Registry
from _regsync.errors import ConfigError, ConnectFailed, RegistryError, SyncError
from _regsync.net.http1 import Response, parse_retry_after
from _regsync.net.pool import open_stream
from _regsync.net.proxy import Proxy, proxy_for
from _regsync.net.streams import Stream, Timeouts
from _regsync.net.tls import CLIENT_CERT_HINT, find_certs_d, make_context
from _regsync.providers import api_host
from _regsync.registry.recovery import Peer
from _regsync.text import Secrets, one_line

# The part of a URL or a path that may hold signatures; it matches in linear time.
_QUERY = r"\?\S+"


class Host(Protocol):
    """Where repositories are, as this run knows it: a registry or a layout."""

    # Why it is asked nothing more in this run.
    stop_error: SyncError | None

    # Whether it can be asked how much of a broken upload it has (rule 16).
    can_resume: bool

    @property
    def key(self) -> str:
        """How reports name it: `host:port`."""

    @property
    def registry(self) -> Registry: ...

    @property
    def origin(self) -> Origin: ...

    @property
    def peer(self) -> object:
        """What an outage of it is noted with (`SyncError.unreachable_peer`)."""

    @property
    def secrets(self) -> Secrets:
        """What no text may show."""

    def redact(self, text: str) -> str:
        """Return a text on one line without its secrets."""

    def stop(self, error: SyncError, until: float = -math.inf) -> None:
        """Let all further requests of this run fail with an error. A later run asks again, after a
        time on the clock of `anyio.current_time`.
        """


class RegistryClient:
    """A registry as this run knows it under one credential; shared by all aliases of one host:port."""

    def __init__(
        self,
        registry: Registry,
        credential: Credential | CloudLogin | None,
        *,
        peers: Callable[[Origin], Peer],
        fetch: Callable[..., Awaitable[Answer]],
        wall: Callable[[], float],
    ) -> None:
        self.registry = registry
        self.key = registry.authority
        self.origin = Origin(registry.scheme, api_host(registry.host), registry.port, registry)

        # Whether the registry can be reached, and the service that was last asked for its tokens.
        self.peer = peers(self.origin)
        self.token_peer: Peer | None = None

        self.authenticator = Authenticator(
            origin=self.origin,
            credential=credential,
            fetch=partial(fetch, self),
            now=anyio.current_time,
            wall=wall,
        )

        # Whether this run has asked for it.
        self.is_used = True

        # Why it is asked nothing more in this run (docs/design.md section 9), and until when later
        # runs ask nothing either.
        self.stop_error: SyncError | None = None
        self._stopped_until = -math.inf

        # Rule 1: one request goes first, and the others wait for its outcome. The host is met when
        # that is known.
        self.has_answered = False
        self.is_first_contact_done = False
        self.first_contact = anyio.Lock()

        # Whether broken uploads are resumed (rule 16). False after the registry refused that once.
        self.can_resume = True

        # What to say where a registry by http may speak https only.
        self.https_hint: str | None = None
        if registry.scheme == "http":
            secure = self.origin._replace(scheme="https")
            self.https_hint = f"write {secure} if it serves HTTPS"

    @property
    def secrets(self) -> Secrets:
        """What no text may show."""
        return self.authenticator.secrets

    def redact(self, text: str) -> str:
        """Return a text on one line without its secrets."""
        return self.authenticator.redact(text)

    def stop(self, error: SyncError, until: float = -math.inf) -> None:
        """Let all further requests of this run fail with an error. A later run asks again, after a
        time on the clock of `anyio.current_time`.
        """
        self.stop_error = error.without_place()
        # A failure of what was under way does not shorten the time that the registry has asked for.
        self._stopped_until = max(self._stopped_until, until)

    def begin_run(self, now: float) -> None:
        """Let another run begin. A registry that was stopped is tried again, by a first contact, where
        it may be asked by now.
        """
        self.is_used = False
        self.authenticator.begin()
        is_stopped = self.stop_error is not None or self.peer.outage.is_stopped
        if is_stopped and self._stopped_until <= now:
            self.stop_error = None
            self.has_answered = False
            self.is_first_contact_done = False

    def error_of(self, answer: Response, wall_now: float) -> RegistryError:
        """Turn an answer, whose body has been read, into an error with the registry's own words,
        cleaned (R18).
        """
        status = answer.status
        codes, said = parse_error_body(answer.body)
        # Some servers repeat the request: our secrets go, and what follows a URL's `?` (R10).
        said = one_line(re.sub(_QUERY, "?...", self.authenticator.redact(said)))
        digests = re.findall("sha(?:256|512):[0-9a-f]{64,128}", answer.body.decode("latin-1"))
        error = RegistryError(
            f"status {status}: {said}" if said else f"status {status}",
            status=status,
            codes=codes,
            digests=frozenset(digests),
            retry_after=parse_retry_after(answer.headers.get("retry-after"), wall_now),
        )
        error.paced = status == 429
        error.hint = self._hint(answer)
        return error

    def _hint(self, answer: Response) -> str | None:
        """Say what may help against a refusal, where its status tells."""
        login = self.authenticator
        body = answer.body
        if answer.status == 429 and login.is_anonymous:
            return f"{login.login_hint}, for a higher limit"
        if answer.status in (401, 403):
            return login.denied_hint
        if answer.status == 400 and b"SSL certificate" in body:
            return CLIENT_CERT_HINT  # as nginx words it
        if answer.status == 400 and (not body or b"HTTPS" in body):
            return self.https_hint  # as Go and nginx word it; the answer to a HEAD has no words
        return None


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
        self._certs_d = cache(find_certs_d)

    def prepare(self, registry: Registry) -> None:
        """Read what the configuration names for a registry; ConfigError when it is unusable."""
        if registry.is_layout:
            return
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
        self._certs_d = cache(find_certs_d)
        try:
            for registry in registries:
                self.prepare(registry)
        except ConfigError:
            self._contexts = contexts
            self._certs_d = directories
            raise

    async def dial(self, origin: Origin, known: Registry | None, *, is_foreign: bool) -> Stream:
        """Connect to an origin; ConnectFailed when that fails.

        `known` is the registry of this run that answers there, if one does. `is_foreign`: another
        registry has sent us there, so that no client certificate is shown, not even to `known`.
        """
        registry: Registry | None = known if known is not None and is_foreign else origin.via
        override = registry.proxy if registry else None
        proxy, reason = proxy_for(
            origin.scheme,
            origin.host,
            origin.port,
            self._environ,
            override,
            heeds_exemptions=known is None,
        )
        # A metadata service is asked without a proxy, whatever its name is (R20).
        if origin.scheme == "http" and known is None and not is_foreign:
            proxy = None
        via_proxy = f" through {proxy}" if proxy else ""
        self._log("debug", "connect", f"connecting to {origin}{via_proxy} ({reason})")

        context = None
        if origin.scheme == "https":
            context = self._context(registry, has_certificate=not is_foreign)
        proxy_context = None
        if proxy and proxy.scheme == "https":
            proxy_context = self._context(registry, has_certificate=False)
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

    def _context(
        self, registry: Registry | None, *, has_certificate: bool = True
    ) -> ssl.SSLContext:
        """Return what a registry's configuration trusts, with its client certificate or without."""
        if registry is None:
            return self._contexts()
        files = self._certs_d(self._home, registry.authority, registry.port)
        if not has_certificate:
            authorities = tuple(file for file in files if file.endswith(".crt"))
            return self._contexts(registry.ca_file, certs_d=authorities)
        return self._contexts(registry.ca_file, registry.client_cert, registry.client_key, files)


def _name_proxy(error: ConnectFailed, proxy: Proxy, reason: str, *, is_configured: bool) -> None:
    """Say in an error through which proxy it came, and what named that proxy."""
    if str(proxy) not in error.message:
        error.message = f"through the proxy {proxy}: {error.message}"
    if error.hint is None or "HTTPS_PROXY" in error.hint:
        error.hint = f"check the proxy, which {reason} names"
        if not is_configured:
            error.hint += "; list hosts to reach without it in NO_PROXY"
