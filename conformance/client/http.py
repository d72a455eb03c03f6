"""An HTTP client of one registry, for the checks. It is simple rather than fast.

Owns: connections, redirects of downloads, Basic and the token service, waits that a registry asks
for.
May not know: which answer is right.
Invariants: an answer is returned unchanged with any status, except a 401 or 429 that the client can
handle. Credentials are sent only to the registry's origin and to the realm that it names. Only
http.client is used.
Follows: RFC 9110 and the distribution project's token specification (docs/protocol-facts.md section
2).
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urljoin, urlsplit

__all__ = [
    "Client",
    "Connections",
    "NoAnswer",
    "Reply",
    "Send",
    "next_page",
    "resolve",
    "with_query",
]

# A parameter of a challenge: its name, and its value with or without quotes.
_PARAMETER = re.compile(r"([A-Za-z_]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s,\"]+))")
_REPOSITORY = re.compile(r"/v2/(.+)/(?:blobs|manifests|tags|referrers)/")
_NEXT = re.compile(r"<([^>]*)>\s*;(?:[^,]*;)?\s*rel=\"?next\"?", re.IGNORECASE)
_REDIRECTS = (301, 302, 303, 307, 308)
_TIMEOUT = 60.0  # seconds for one read or write
_PATIENCE = 60  # maximum seconds of Retry-After that the client waits


class NoAnswer(Exception):
    """A request got no HTTP answer, or an answer with a malformed URL to follow."""


class Reply(NamedTuple):
    """An answer."""

    method: str  # of the request
    url: str  # of the request
    status: int
    headers: Mapping[str, str]  # names in lower case; repeated headers are joined by commas
    body: bytes

    def header(self, name: str) -> str:
        return self.headers.get(name.lower(), "")

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        # States of upload sessions are long.
        query = re.sub(r"=([^&]{24})[^&]+", r"=\1...", parts.query)
        return f"{self.method} {parts.path}{f'?{query}' if query else ''} answered {self.status}"


# Sends one request. The arguments are method, URL, headers and body.
Send: TypeAlias = "Callable[[str, str, Mapping[str, str], bytes | None], Reply]"


class _Origin(NamedTuple):
    """The key of a kept connection."""

    scheme: str
    netloc: str


class Connections:
    """A `Send` that keeps one connection for each origin."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self._kept: dict[_Origin, http.client.HTTPConnection] = {}

    def close(self) -> None:
        for connection in self._kept.values():
            connection.close()
        self._kept.clear()

    def __call__(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Reply:
        parts = urlsplit(url)
        if _Origin(parts.scheme, parts.netloc) in self._kept:
            # The server may have closed the kept connection: retry on a new connection.
            with suppress(NoAnswer):
                return self._exchange(method, url, headers, body)
        return self._exchange(method, url, headers, body)

    def _connection(self, origin: _Origin) -> http.client.HTTPConnection:
        connection = self._kept.get(origin)
        if connection is None:
            if origin.scheme == "https":
                connection = http.client.HTTPSConnection(
                    origin.netloc, timeout=_TIMEOUT, context=self._context
                )
            else:
                connection = http.client.HTTPConnection(origin.netloc, timeout=_TIMEOUT)
            self._kept[origin] = connection
        return connection

    def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Reply:
        parts = urlsplit(url)
        origin = _Origin(parts.scheme, parts.netloc)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection = self._connection(origin)
            # The registry may refuse the request and close while the body is still being sent.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, body, dict(headers))
            answer = connection.getresponse()
            try:
                data = answer.read()
            except http.client.IncompleteRead as short:
                data = short.partial  # distribution's 416 declares the blob's length
                self._drop(origin)
        except (OSError, http.client.HTTPException, ValueError) as problem:
            self._drop(origin)
            why = str(problem) or type(problem).__name__
            raise NoAnswer(f"{method} {url}: {why}") from problem

        if answer.will_close:
            self._drop(origin)

        lines: dict[str, str] = {}
        for name, value in answer.getheaders():
            lower = name.lower()
            lines[lower] = f"{lines[lower]}, {value}" if lower in lines else value
        return Reply(method, url, answer.status, lines, data)

    def _drop(self, origin: _Origin) -> None:
        connection = self._kept.pop(origin, None)
        if connection is not None:
            connection.close()


class _Scope(NamedTuple):
    """The permissions that a request needs, as the key of an authorization."""

    is_read: bool
    repository: str
    source: str  # the repository of a mount; empty otherwise


class Client:
    """Requests to one registry, with its authentication."""

    def __init__(
        self,
        origin: str,
        send: Send,
        credentials: tuple[str, str] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.origin = origin
        self._deliver = send
        self._sleep = sleep
        self._basic = None
        if credentials is not None:
            self._basic = "Basic " + base64.b64encode(":".join(credentials).encode()).decode()
        # Values of Authorization that were obtained for a challenge.
        self._authorizations: dict[_Scope, str] = {}

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Reply:
        """Send one request. `target` is a path or a URL. Raises NoAnswer if there is no answer."""
        url = urljoin(self.origin, target)
        scope = _scope(method, url)
        is_own_origin = url.startswith(self.origin + "/")
        sent = {"User-Agent": "conformance-check", **(headers or {})}
        if is_own_origin and scope in self._authorizations:
            sent["Authorization"] = self._authorizations[scope]

        reply = self._send(method, url, sent, body)
        if reply.status == 401 and is_own_origin:
            authorization = self._authorize(reply)
            if authorization is not None:
                sent["Authorization"] = authorization
                self._authorizations[scope] = authorization
                reply = self._send(method, url, sent, body)

        return self._follow(reply, sent) if method in ("GET", "HEAD") else reply

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Reply:
        """Send a request, and repeat it after a 429 with a Retry-After of at most a minute."""
        for _ in range(5):
            reply = self._deliver(method, url, headers, body)
            seconds = reply.header("Retry-After")
            if reply.status != 429 or not seconds.isdigit() or int(seconds) > _PATIENCE:
                break
            self._sleep(int(seconds))
        return reply

    def _follow(self, reply: Reply, headers: Mapping[str, str]) -> Reply:
        """Follow the redirects of a download. Credentials are not sent to other origins."""
        for _ in range(5):
            if reply.status not in _REDIRECTS or not reply.header("Location"):
                break
            url = resolve(reply, reply.header("Location"))
            sent = dict(headers)
            if not url.startswith(self.origin + "/"):
                sent.pop("Authorization", None)
            reply = self._send(reply.method, url, sent, None)
        return reply

    def _authorize(self, refusal: Reply) -> str | None:
        """Return the value of Authorization for a challenge, or None if there is no usable one."""
        header = refusal.header("WWW-Authenticate")
        bearer = re.search(r"\bbearer\s", header, re.IGNORECASE)
        if bearer is not None:
            token = self._fetch_token(refusal, _parameters(header[bearer.end() :]))
            return f"Bearer {token}" if token else None
        return self._basic if re.search(r"\bbasic\b", header, re.IGNORECASE) else None

    def _fetch_token(self, refusal: Reply, challenge: Mapping[str, str]) -> str | None:
        """Return a token of the service that a challenge names, or None if it gives none."""
        query = [("service", challenge["service"])] if challenge.get("service") else []
        query += [("scope", scope) for scope in challenge.get("scope", "").split()]
        realm = resolve(refusal, challenge.get("realm") or "/")
        url = realm + ("&" if "?" in realm else "?") + urlencode(query)
        answer = self._send("GET", url, {"Authorization": self._basic} if self._basic else {}, None)
        if answer.status != 200:
            return None

        try:
            document = json.loads(answer.body)
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError):
            return None

        return token if isinstance(token, str) else None

    def pages(self, target: str, headers: Mapping[str, str] | None = None) -> Iterator[Reply]:
        """Yield the pages of a list by Link. At most 1,000, in case a Link leads back."""
        for _ in range(1000):
            reply = self.ask("GET", target, headers)
            yield reply
            following = next_page(reply)
            if following is None:
                return
            target = following


def _parameters(challenge: str) -> dict[str, str]:
    """Return the parameters of a challenge by name in lower case. The first of a name counts."""
    parameters: dict[str, str] = {}
    for name, quoted, bare in _PARAMETER.findall(challenge):
        parameters.setdefault(name.lower(), re.sub(r"\\(.)", r"\1", quoted) or bare)
    return parameters


def _scope(method: str, url: str) -> _Scope:
    parts = urlsplit(url)
    match = _REPOSITORY.match(parts.path)
    return _Scope(
        is_read=method in ("GET", "HEAD"),
        repository=match[1] if match else "",
        source=dict(parse_qsl(parts.query)).get("from", ""),
    )


def resolve(reply: Reply, reference: str) -> str:
    """Return the absolute URL of a reference in an answer. Raises NoAnswer if it is malformed."""
    try:
        return urljoin(reply.url, reference)
    except ValueError as problem:
        raise NoAnswer(f"{reply} with the URL {reference!r}: {problem}") from None


def next_page(reply: Reply) -> str | None:
    """Return the URL of the next page from a Link with rel=next, or None."""
    match = _NEXT.search(reply.header("Link"))
    return resolve(reply, match[1]) if match else None


def with_query(target: str, **parameters: str) -> str:
    """Return a Location with further query parameters. Its own query stays unchanged."""
    added = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
    return target + ("&" if "?" in target else "?") + added
