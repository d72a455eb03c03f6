"""One registry as this run knows it: its login, whether it may still be asked, its errors.

Owns: the circuit breaker, first contact, how an answer becomes an error.
May not know: when a request is sent, and what it asks for.
Invariants: R10 and R18 (no error shows a secret, or what a terminal would obey).
Follows: docs/design.md sections 6 and 9, docs/protocol-facts.md section 9.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import anyio

from _regsync.addresses import Origin
from _regsync.auth.challenge import parse_error_body
from _regsync.auth.cloud import Answer, CloudLogin
from _regsync.auth.credentials import Credential
from _regsync.auth.tokens import Authenticator
from _regsync.config.model import Registry
from _regsync.errors import AuthError, ConnectFailed, RegistryError, SyncError, TimedOut, WireError
from _regsync.net.http1 import Response, parse_retry_after
from _regsync.net.tls import CLIENT_CERT_HINT
from _regsync.providers import api_host
from _regsync.text import one_line

# How many failed connections without an answer between them stop a registry.
_UNREACHABLE_AFTER = 3

# The part of a URL or a path that may hold signatures; it matches in linear time.
_QUERY = r"\?\S+"


class RegistryClient:
    """A registry as this run knows it under one credential; shared by all aliases of one host:port."""

    def __init__(
        self,
        registry: Registry,
        credential: Credential | CloudLogin | None,
        *,
        fetch: Callable[..., Awaitable[Answer]],
        wall: Callable[[], float],
    ) -> None:
        self.registry = registry
        self.key = registry.authority
        self.origin = Origin(registry.scheme, api_host(registry.host), registry.port, registry)
        self.authenticator = Authenticator(
            origin=self.origin,
            credential=credential,
            fetch=partial(fetch, self),
            now=anyio.current_time,
            wall=wall,
        )

        # Whether a run has used it since the last one began.
        self.used = True

        # Why it is asked nothing more in this run (docs/design.md section 9), and when a later run
        # may ask again.
        self.stopped: SyncError | None = None
        self.reopens = -math.inf

        # Rule 1: one request goes first, and the others wait for its answer.
        self.has_answered = False
        self.first_contact = anyio.Lock()

        # What could not be asked since the last answer. Repetitions of one request are one failure.
        self._failed_connects = 0
        self._failed_paths: set[str] = set()

        # Rule 16: until a question about the session of a broken upload fails.
        self.resumes = True

        # What to say where a registry by http may speak https only.
        self.https_hint: str | None = None
        if registry.scheme == "http":
            secure = self.origin._replace(scheme="https")
            self.https_hint = f"if it serves HTTPS, write {secure} as its url"

    @contextmanager
    def stopping_on_fatal_auth(self) -> Iterator[None]:
        """Stop this registry at once when an error in the block says that its login is beyond use:
        accounts get locked.
        """
        try:
            yield
        except AuthError as error:
            if error.fatal:
                self.stopped = error.without_place()
            raise

    def record_answer(self) -> None:
        self.has_answered = True
        self._failed_connects = 0
        self._failed_paths.clear()

    def record_failure(self, path: str, error: WireError) -> None:
        """Count what could not be asked, and stop this registry after three in a row. A host that
        takes connections and has never answered is as good as one that takes none.
        """
        is_silent = isinstance(error, TimedOut) and not self.has_answered
        if not is_silent and not isinstance(error, ConnectFailed):
            if not self.has_answered:
                error.hint = self.https_hint or error.hint
            return
        if self.has_answered and path in self._failed_paths:
            return
        self._failed_paths.add(path)
        self._failed_connects += 1
        if self._failed_connects >= _UNREACHABLE_AFTER:
            self.stopped = error.without_place()

    def reopen(self) -> None:
        """Let it be tried again: by a first contact, after which one failure stops it anew."""
        self.stopped = None
        self.has_answered = False
        self._failed_paths.clear()
        self._failed_connects = _UNREACHABLE_AFTER - 1

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
            return f"who logs in may ask more often: {login.login_hint}"
        if answer.status in (401, 403):
            return login.denied_hint
        if answer.status == 400 and b"SSL certificate" in body:
            return CLIENT_CERT_HINT  # as nginx words it
        if answer.status == 400 and (not body or b"HTTPS" in body):
            return self.https_hint  # as Go and nginx word it; the answer to a HEAD has no words
        return None
