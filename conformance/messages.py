"""Requests, answers and bodies as values; the grammar of names; the form of error bodies.

The bytes of a blob are kept in the pieces in which they arrive, and never joined: only manifests,
which are at most 4 MiB, are ever one object. Follows the OCI distribution specification 1.1.1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote

__all__ = [
    "Access",
    "Answer",
    "Content",
    "Headers",
    "Request",
    "Response",
    "digest_of",
    "error",
    "errors",
    "has_digest",
    "is_digest",
    "is_name",
    "is_tag",
]

Headers = Sequence[tuple[str, str]]

# Repository names, tags, and digests that this registry can verify (docs/protocol-facts.md
# section 1.1).
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(f"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[a-f0-9]{64}|sha512:[a-f0-9]{128}")


def is_name(text: str) -> bool:
    """Report whether `text` is a valid repository name."""
    return len(text) <= 255 and _NAME.fullmatch(text) is not None


def is_tag(text: str) -> bool:
    """Report whether `text` is a valid tag."""
    return _TAG.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Report whether `text` is a digest with an algorithm that this registry can verify."""
    return _DIGEST.fullmatch(text) is not None


def digest_of(data: bytes, algorithm: str = "sha256") -> str:
    """Return the digest of `data`, with the algorithm as its prefix."""
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


def has_digest(data: bytes, digest: str) -> bool:
    """Report whether `data` has a digest, of any algorithm."""
    return digest_of(data, digest.partition(":")[0]) == digest


class Content:
    """A sequence of bytes, kept in pieces, with a running sha256. Bytes can only be appended."""

    def __init__(self, data: bytes = b"") -> None:
        self.size = 0  # bytes
        self._pieces: list[memoryview] = []
        self._hash = hashlib.sha256()
        if data:
            self.feed(data)

    def feed(self, data: bytes) -> None:
        """Append `data`, which must not change afterwards."""
        self._hash.update(data)
        self._pieces.append(memoryview(data))
        self.size += len(data)

    def digest(self, algorithm: str = "sha256") -> str:
        """Return the digest of all bytes so far. For sha256 the bytes need not be hashed again."""
        if algorithm == "sha256":
            return f"sha256:{self._hash.hexdigest()}"
        other = hashlib.new(algorithm)
        for piece in self._pieces:
            other.update(piece)
        return f"{algorithm}:{other.hexdigest()}"

    def pieces(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return views of the bytes from `start` to `stop`, without copying them."""
        stop = self.size if stop is None else stop
        views: list[memoryview] = []
        offset = 0
        for piece in self._pieces:
            begin = max(start - offset, 0)
            end = min(stop - offset, len(piece))
            if begin < end:
                views.append(piece[begin:end])
            offset += len(piece)
        return views

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())


class Access(NamedTuple):
    """One permission, as in the scope `repository:<name>:<action>`."""

    type: str
    name: str
    action: str


# The kinds of paths. They are tried in this order, because a repository name may contain a segment
# `blobs` or `manifests`.
_ROUTES = {
    "ping": re.compile("/v2/"),
    "upload_start": re.compile("/v2/(?P<repository>.+)/blobs/uploads/"),
    "upload": re.compile("/v2/(?P<repository>.+)/blobs/uploads/(?P<reference>[^/]+)"),
    "blob": re.compile("/v2/(?P<repository>.+)/blobs/(?P<reference>[^/]+)"),
    "manifest": re.compile("/v2/(?P<repository>.+)/manifests/(?P<reference>[^/]+)"),
    "tag_list": re.compile("/v2/(?P<repository>.+)/tags/list"),
    "referrers": re.compile("/v2/(?P<repository>.+)/referrers/(?P<reference>[^/]+)"),
}


@dataclass
class Request:
    """The head of one request, with its parsed path."""

    method: str
    target: str  # path and query, as sent
    headers: Headers = ()  # names in lower case after `__post_init__`
    body: bytes = b""  # only set by callers that have no server
    scheme: str = "http"
    connection: int = 0  # number of the connection

    # Parsed from `target`.
    path: str = field(init=False)  # without percent encoding
    query: list[tuple[str, str]] = field(init=False)
    kind: str = field(init=False, default="other")  # a kind of `_ROUTES`, or "other"
    repository: str = field(init=False, default="")
    reference: str = field(init=False, default="")  # tag, digest or upload session

    def __post_init__(self) -> None:
        self.headers = [(name.lower(), value) for name, value in self.headers]
        path, _, query = self.target.partition("?")
        self.path = unquote(path)
        self.query = parse_qsl(query, keep_blank_values=True)
        for kind, route in _ROUTES.items():
            match = route.fullmatch(self.path)
            if match:
                found = match.groupdict()
                self.kind = kind
                self.repository = found.get("repository", "")
                self.reference = found.get("reference", "")
                break

    def header(self, name: str, default: str = "") -> str:
        """Return the value of a header.

        `name` is in lower case. Repeated headers are joined by commas.
        """
        values = [value for key, value in self.headers if key == name]
        return ", ".join(values) if values else default

    def parameter(self, name: str) -> str | None:
        """Return the first value of a query parameter, or None if it is absent."""
        return next((value for key, value in self.query if key == name), None)

    def length(self) -> int | None:
        """Return the value of Content-Length.

        Returns None if the header is absent or not a number.
        """
        text = self.header("content-length")
        return int(text) if text.isascii() and text.isdigit() else None

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.header("transfer-encoding").lower()

    @property
    def has_body(self) -> bool:
        return self.is_chunked or bool(self.length())

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.header('host', 'localhost')}"


@dataclass
class Response:
    """One answer."""

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes | Sequence[memoryview] = b""
    # Whether the answer is sent before the request's body is read (True) or after it (False). None
    # means as in Go's servers, which first read bodies up to 256 KiB (docs/protocol-facts.md
    # section 1.12).
    early: bool | None = None
    # Whether the connection is closed after the answer.
    close: bool = False

    def pieces(self) -> Sequence[memoryview]:
        return (memoryview(self.body),) if isinstance(self.body, bytes) else self.body

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces())

    @property
    def data(self) -> bytes:
        """The whole body as one object. Only tests need it."""
        return self.body if isinstance(self.body, bytes) else b"".join(self.body)

    def header(self, name: str, default: str = "") -> str:
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        return ", ".join(values) if values else default

    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def codes(self) -> list[str]:
        """The error codes of an error body, in order."""
        return [entry["code"] for entry in self.json()["errors"]]


# Bytes are sent as they are, and the connection is closed after them.
Answer: TypeAlias = "Response | bytes"


def errors(
    status: int, entries: Iterable[tuple[str, str, object]], headers: Headers = ()
) -> Response:
    """Return an answer with the specification's error body.

    `entries` are tuples of code, message and detail. A detail of None is left out.
    """
    listed = [
        {"code": code, "message": message, **({} if detail is None else {"detail": detail})}
        for code, message, detail in entries
    ]
    body = json.dumps({"errors": listed}).encode()
    return Response(status, [("Content-Type", "application/json"), *headers], body)


def error(
    status: int, code: str, message: str, detail: object = None, headers: Headers = ()
) -> Response:
    """Return an answer with an error body of one entry."""
    return errors(status, [(code, message, detail)], headers)
