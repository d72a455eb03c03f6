"""Push, fetch and compare whole graphs over plain HTTP, with the standard library's client.

Owns: reading the content of a registry independently of the program under test.
May not know: tokens, except a fixed Authorization value; retries, concurrency.
Invariants: every returned body has the digest by which it was requested.
Follows: docs/protocol-facts.md sections 1.3 to 1.7.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urljoin, urlsplit

from ..content.images import Image
from ..messages import digest_of, has_digest
from ..registry.storage import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    INDEXES,
    OCI_INDEX,
    OCI_MANIFEST,
    is_foreign,
)

if TYPE_CHECKING:  # the demo pushes and fetches with the standard library alone
    from ..server.exchange import Site

__all__ = ["ACCEPT", "Client", "Reply", "fetch_http", "identical", "push_http"]

ACCEPT = ", ".join((OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST))
_NEXT = re.compile(r"<([^>]*)>\s*;(?:[^,]*;)?\s*rel=\"?next\"?", re.IGNORECASE)
_TIMEOUT = 60.0  # seconds for one read or write


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
        return f"{self.method} {urlsplit(self.url).path} answered {self.status}"


class Client:
    """Requests to one registry: a Site in memory, or one that listens at HOST:PORT.

    With a `context` it is asked by HTTPS. There is one connection for each origin.
    """

    def __init__(
        self,
        at: Site | str,
        authorization: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._site = None if isinstance(at, str) else at
        address = at if isinstance(at, str) else "registry.test"
        self._origin = f"{'http' if context is None else 'https'}://{address}"
        # Headers of every request to the registry's own origin.
        self._always = {"Authorization": authorization} if authorization else {}
        self._context = context
        self._connections: dict[str, http.client.HTTPConnection] = {}

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def ask(
        self,
        method: str,
        target: str,
        statuses: tuple[int, ...] = (),
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one request, and follow the redirects of a download.

        Raises AssertionError if the status is not in `statuses`, unless these are empty.
        """
        reply = self._send(method, urljoin(self._origin, target), body, headers or {})
        for _ in range(5):
            if method not in ("GET", "HEAD") or not 300 < reply.status < 400:
                break
            reply = self._send(
                method, urljoin(reply.url, reply.header("Location")), body, headers or {}
            )
        assert not statuses or reply.status in statuses, f"{reply}: {reply.body[:500]!r}"
        return reply

    def pages(self, target: str, headers: Mapping[str, str] | None = None) -> Iterator[Reply]:
        """Yield the pages of a list by Link."""
        following: str | None = target
        while following is not None:
            reply = self.ask("GET", following, headers=headers)
            yield reply
            following = next_page(reply)

    def _send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        sent = dict(headers)
        if url.startswith(self._origin + "/"):
            sent |= self._always
        if self._site is not None:
            fields = [("host", parts.netloc), *sent.items()]
            given = self._site.request(method, target, fields, body)
            return Reply(method, url, given.status, _joined(given.headers), given.data)

        connection = self._connection(parts.scheme, parts.netloc)
        connection.request(method, target, body, sent)
        answer = connection.getresponse()
        return Reply(method, url, answer.status, _joined(answer.getheaders()), answer.read())

    def _connection(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        if netloc not in self._connections:
            self._connections[netloc] = (
                http.client.HTTPSConnection(netloc, timeout=_TIMEOUT, context=self._context)
                if scheme == "https"
                else http.client.HTTPConnection(netloc, timeout=_TIMEOUT)
            )
        return self._connections[netloc]


def _joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    lines: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        lines[lower] = f"{lines[lower]}, {value}" if lower in lines else value
    return lines


def next_page(reply: Reply) -> str | None:
    """Return the URL of the next page from a Link with rel=next, or None."""
    match = _NEXT.search(reply.header("Link"))
    return urljoin(reply.url, match[1]) if match else None


def push_http(
    image: Image,
    address: str,
    repository: str,
    *tags: str,
    authorization: str | None = None,
    context: ssl.SSLContext | None = None,
) -> Image:
    """Push the whole graph, children first, then the top under all tags, or by its digest."""
    with closing(Client(address, authorization, context)) as client:
        base = f"/v2/{repository}"
        for digest, data in image.blobs.items():
            if client.ask("HEAD", f"{base}/blobs/{digest}", (200, 404)).status == 200:
                continue
            opened = client.ask("POST", f"{base}/blobs/uploads/", (202,), b"")
            location = urljoin(opened.url, opened.header("Location"))
            target = f"{location}{'&' if '?' in location else '?'}digest={digest}"
            client.ask("PUT", target, (201,), data, {"Content-Type": "application/octet-stream"})
        for digest, (media_type, body) in image.manifests.items():
            references = tags if tags and digest == image.top else (digest,)
            for reference in references:
                target = f"{base}/manifests/{reference}"
                client.ask("PUT", target, (201,), body, {"Content-Type": media_type})

    return image


def fetch_http(
    address: str,
    repository: str,
    reference: str,
    *,
    authorization: str | None = None,
    context: ssl.SSLContext | None = None,
    referrers: bool = False,
) -> dict[str, bytes]:
    """Fetch the graph below `reference`. Returns the verified bytes by digest.

    Foreign layers that are absent are left out. With `referrers`, all referrers of manifests of the
    graph are fetched too, by the API or the fallback tag.
    """
    contents: dict[str, bytes] = {}
    with closing(Client(address, authorization, context)) as client:
        waiting = [reference]
        while waiting:
            next_reference = waiting.pop()
            if next_reference in contents:
                continue
            digest, body = _fetch_manifest(client, repository, next_reference)
            contents[digest] = body
            document = json.loads(body)
            waiting += [child["digest"] for child in document.get("manifests", [])]
            for part in [document.get("config"), *document.get("layers", [])]:
                if part is not None and part["digest"] not in contents:
                    _fetch_blob(client, repository, part, contents)
            if referrers:
                waiting += _referrers(client, repository, digest)

    return contents


def _fetch_manifest(client: Client, repository: str, reference: str) -> tuple[str, bytes]:
    """Return the digest and the bytes of a manifest. Asserts that its digest and type are right."""
    target = f"/v2/{repository}/manifests/{reference}"
    answer = client.ask("GET", target, (200,), headers={"Accept": ACCEPT})
    body = answer.body
    digest = reference if ":" in reference else digest_of(body)
    assert has_digest(body, digest), f"{target}: other bytes"
    header_digest = answer.header("Docker-Content-Digest")
    assert header_digest in ("", digest), f"{target}: {digest} is called {header_digest}"
    is_index = answer.header("Content-Type") in INDEXES
    assert is_index == ("manifests" in json.loads(body)), target
    return digest, body


def _fetch_blob(
    client: Client, repository: str, part: Mapping[str, str], contents: dict[str, bytes]
) -> None:
    """Add a blob to `contents`, unless it is an absent foreign layer."""
    digest = part["digest"]
    statuses = (200, 404) if is_foreign(part["mediaType"]) else (200,)
    answer = client.ask("GET", f"/v2/{repository}/blobs/{digest}", statuses)
    if answer.status == 200:
        assert has_digest(answer.body, digest), f"blob {digest}: other bytes"
        contents[digest] = answer.body


def _referrers(client: Client, repository: str, digest: str) -> list[str]:
    """Return the digests of a manifest's referrers, by the API or the fallback tag."""
    first = client.ask("GET", f"/v2/{repository}/referrers/{digest}", (200, 404))
    if first.status == 404:
        target = f"/v2/{repository}/manifests/{digest.replace(':', '-')}"
        first = client.ask("GET", target, (200, 404), headers={"Accept": ACCEPT})
        if first.status == 404:
            return []

    pages = [first]
    while following := next_page(pages[-1]):
        pages.append(client.ask("GET", following, (200,)))
    return [entry["digest"] for page in pages for entry in json.loads(page.body)["manifests"]]


def identical(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> bool:
    """Assert that two fetched graphs are equal byte for byte. Returns True."""
    missing = sorted(one.keys() - other.keys())
    added = sorted(other.keys() - one.keys())
    assert not missing, f"only on the first side: {missing}"
    assert not added, f"only on the second side: {added}"
    different = [digest for digest, data in one.items() if other[digest] != data]
    assert not different, f"other bytes: {different}"
    return True
