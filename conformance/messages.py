"""Requests, answers and bodies as values.

Owns: `Request` (with its path read once), `Response`, `Content` (bytes kept in pieces, hashed as
they arrive), the grammar of names, the shape of error bodies, values as the text of rules has them.
May not know: sockets, h11, time, what a registry holds.
Invariants: the bytes of a blob are never joined or copied on their way in or out; only manifests,
which are at most 4 MiB, are ever one object.
Follows: the OCI distribution specification 1.1.1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = [
    "ALGORITHMS",
    "Access",
    "Answer",
    "Content",
    "Headers",
    "Intercept",
    "Request",
    "Response",
    "as_rule_text",
    "digest_of",
    "error",
    "errors",
    "is_digest",
    "is_name",
    "is_tag",
]

Headers = Sequence[tuple[str, str]]

# docs/protocol-facts.md section 1.1; `\Z` because `$` would let a newline through.
_NAME = re.compile(
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*\Z"
)
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}\Z")
ALGORITHMS: Mapping[str, int] = {"sha256": 64, "sha512": 128}
_HEX = re.compile(r"[a-f0-9]+\Z")

# Bytes of one piece of a stored body: so many that calls do not dominate hashing and receiving, so
# few that a wrong Content-Length cannot make the harness claim gigabytes.
PIECE = 1 << 20


def is_name(text: str) -> bool:
    """Ask whether `text` is a repository name."""
    return len(text) <= 255 and _NAME.match(text) is not None


def is_tag(text: str) -> bool:
    """Ask whether `text` is a tag."""
    return _TAG.match(text) is not None


def is_digest(text: str) -> bool:
    """Ask whether `text` is a digest that this registry can verify."""
    algorithm, _, encoded = text.partition(":")
    return len(encoded) == ALGORITHMS.get(algorithm, -1) and _HEX.match(encoded) is not None


def digest_of(data: bytes, algorithm: str = "sha256") -> str:
    """Return the digest of `data`."""
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


class Content:
    """Bytes in pieces with a running sha256; grows at its end only.

    It is filled through `room` and `advance` (received in place) or through `feed` (kept as given).
    """

    def __init__(self, data: bytes = b"") -> None:
        self.size = 0
        self._pieces: list[memoryview] = []
        self._open: bytearray | None = None
        self._used = 0
        self._hash: _Hash = hashlib.sha256()
        if data:
            self.feed(data)

    def room(self, expected: int) -> memoryview:
        """Return where to receive the next bytes; `expected` is how many are still to come."""
        if self._open is None or self._used == len(self._open):
            self._seal()
            self._open = bytearray(max(1, min(expected, PIECE)))
        return memoryview(self._open)[self._used :]

    def advance(self, count: int) -> None:
        """Take `count` bytes that were written into `room`."""
        assert self._open is not None
        self._hash.update(memoryview(self._open)[self._used : self._used + count])
        self._used += count
        self.size += count

    def feed(self, data: bytes) -> None:
        """Append `data`, which must not change afterwards."""
        self._seal()
        self._hash.update(data)
        self._pieces.append(memoryview(data))
        self.size += len(data)

    def _seal(self) -> None:
        if self._open is not None and self._used:
            self._pieces.append(memoryview(self._open)[: self._used])
        self._open = None
        self._used = 0

    def digest(self, algorithm: str = "sha256") -> str:
        """Return the digest of everything so far; only sha256 is known without reading again."""
        if algorithm == "sha256":
            return f"sha256:{self._hash.hexdigest()}"
        other = hashlib.new(algorithm)
        for piece in self.pieces():
            other.update(piece)
        return f"{algorithm}:{other.hexdigest()}"

    def pieces(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return the bytes from `start` to `stop` as views, without a copy."""
        stop = self.size if stop is None else stop
        views: list[memoryview] = []
        offset = 0
        tail = [memoryview(self._open)[: self._used]] if self._open is not None else []
        for piece in [*self._pieces, *tail]:
            begin = max(start - offset, 0)
            end = min(stop - offset, len(piece))
            if begin < end:
                views.append(piece[begin:end])
            offset += len(piece)
        return views

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())


class Access(NamedTuple):
    """One permission: `repository:<name>:<action>`."""

    type: str
    name: str
    action: str


# Tried in this order: a name may itself hold a segment called `blobs` or `manifests`.
_ROUTES = (
    ("ping", re.compile(r"/v2/\Z")),
    ("catalog", re.compile(r"/v2/_catalog\Z")),
    ("upload_start", re.compile(r"/v2/(?P<name>.+)/blobs/uploads/\Z")),
    ("upload", re.compile(r"/v2/(?P<name>.+)/blobs/uploads/(?P<reference>[^/]+)\Z")),
    ("blob", re.compile(r"/v2/(?P<name>.+)/blobs/(?P<reference>[^/]+)\Z")),
    ("manifest", re.compile(r"/v2/(?P<name>.+)/manifests/(?P<reference>[^/]+)\Z")),
    ("tag_list", re.compile(r"/v2/(?P<name>.+)/tags/list\Z")),
    ("referrers", re.compile(r"/v2/(?P<name>.+)/referrers/(?P<reference>[^/]+)\Z")),
)


@dataclass
class Request:
    """One request's head, with its path read; `body` is only for callers that have no server."""

    method: str
    target: str
    headers: Headers = ()
    body: bytes = b""
    scheme: str = "http"
    connection: int = 0
    path: str = field(init=False)
    query: list[tuple[str, str]] = field(init=False)
    kind: str = field(init=False, default="other")
    repository: str = field(init=False, default="")
    reference: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.headers = [(name.lower(), value) for name, value in self.headers]
        path, _, query = self.target.partition("?")
        self.path = unquote(path)
        self.query = parse_qsl(query, keep_blank_values=True)
        for kind, route in _ROUTES:
            match = route.match(self.path)
            if match:
                named = match.groupdict()
                self.kind = kind
                self.repository = named.get("name") or ""
                self.reference = named.get("reference") or ""
                break

    def header(self, name: str, default: str = "") -> str:
        """Return a header's value; several lines of it joined by commas."""
        values = [value for key, value in self.headers if key == name]
        return ", ".join(values) if values else default

    def parameter(self, name: str) -> str | None:
        """Return the first value of a query parameter."""
        return next((value for key, value in self.query if key == name), None)

    def length(self) -> int | None:
        """Return the declared length of the body, None when none is declared or it is chunked."""
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
    """One answer.

    `early` True: it is given before the request's body is read; False: after all of it; None: as
    Go's servers do, which read bodies up to 256 KiB first (docs/protocol-facts.md section 1.12).
    `close` ends the connection behind the answer.
    """

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes | Sequence[memoryview] = b""
    early: bool | None = None
    close: bool = False

    def pieces(self) -> Sequence[memoryview]:
        return (memoryview(self.body),) if isinstance(self.body, bytes) else self.body

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces())

    @property
    def data(self) -> bytes:
        """The whole body as one object, for tests."""
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


# Bytes instead of a Response are written verbatim, and the connection is closed behind them.
Answer: TypeAlias = "Response | bytes"
Intercept: TypeAlias = "Callable[[Request], Answer | Awaitable[Answer | None] | None]"


def errors(
    status: int, entries: Iterable[tuple[str, str, object]], headers: Headers = ()
) -> Response:
    """Make an error answer from (code, message, detail) entries in the specification's form."""
    listed = []
    for code, message, detail in entries:
        entry: dict[str, object] = {"code": code, "message": message}
        if detail is not None:
            entry["detail"] = detail
        listed.append(entry)
    body = json.dumps({"errors": listed}).encode()
    return Response(status, [("Content-Type", "application/json"), *headers], body)


def error(
    status: int, code: str, message: str, detail: object = None, headers: Headers = ()
) -> Response:
    """Make an error answer with one entry."""
    return errors(status, [(code, message, detail)], headers)


def as_rule_text(value: object) -> str:
    """Write a value as the text of rules has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}s"
    if value is None:
        return "-"
    if isinstance(value, datetime):
        value = format_datetime(value, usegmt=True)
    if isinstance(value, tuple):
        return ",".join(map(as_rule_text, value))
    if isinstance(value, bytes):
        value = value.decode("latin-1")

    text = str(value)
    if (
        text
        and text != "-"
        and text[-1] != ":"
        and all((c.isascii() and c.isalnum()) or c in "-._/:*?&@%+[]!<>" for c in text)
    ):
        return text

    for plain, escaped in (
        ("\\", "\\\\"),
        ('"', '\\"'),
        ("\r", "\\r"),
        ("\n", "\\n"),
        ("\t", "\\t"),
    ):
        text = text.replace(plain, escaped)

    return '"' + "".join(c if " " <= c <= "~" else f"\\x{ord(c):02x}" for c in text) + '"'
