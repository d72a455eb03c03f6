"""The journal of a server: every exchange in the order of arrival, and assertions about exchanges.

Owns: the fields that are kept of an exchange; which exchanges a `Selector` matches; which secret
was sent where.
May not know: what the registry holds, why it gave an answer.
Invariants: an entry is made when a request's head has arrived. It is completed later and never
removed, so that a request that breaks off is counted too; its status stays None. Only the server's
thread writes a journal. Any thread may read it.

Assertions read like sentences:

    journal.matching("POST", repository="app/web").exactly(1)
    journal.matching("HEAD", "blob").none()
    journal.matching("PUT", "upload").before(journal.matching("PUT", "manifest"))
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple
from urllib.parse import parse_qsl

import anyio

from .messages import Request, as_rule_text

__all__ = [
    "KINDS",
    "METHODS",
    "Authorization",
    "Entries",
    "Entry",
    "Journal",
    "Selector",
    "Sent",
    "before",
    "clock",
    "credentials",
]

# The request headers that are kept. Authorization is kept with its credential, because tests assert
# which credential was sent where.
_KEPT = frozenset(
    {
        *("accept", "accept-encoding", "authorization", "connection", "content-length"),
        *("content-range", "content-type", "cookie", "expect", "host", "if-match"),
        *("if-none-match", "proxy-authorization", "range", "transfer-encoding", "user-agent"),
    }
)

# Kinds of paths. `messages.Request` recognises all of them except `token` and `storage`, which are
# set by those services.
KINDS = (
    *("ping", "upload_start", "upload", "blob", "manifest", "tag_list", "referrers"),
    *("token", "storage", "other"),
)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT"})
_WILDCARD = re.compile(r"[*?[]")
# Fields of token requests that hold secrets (docs/protocol-facts.md sections 2.4, 4.5, 5.4, 6.1).
_SECRET_FIELDS = (
    "password",
    "refresh_token",
    "access_token",
    "client_secret",
    "assertion",
    "client_assertion",
)

# Numbers that order the events of all journals, so that answers can be compared with requests at
# other servers.
_ORDER = itertools.count(1)


def clock() -> float:
    """Return the event loop's time in seconds, or the machine's if no event loop is running.

    A virtual clock of the event loop may jump.
    """
    try:
        # The same result as `anyio.current_time`, ten times faster.
        return asyncio.get_running_loop().time()
    except RuntimeError:
        pass
    try:
        return anyio.current_time()
    except RuntimeError:
        return time.monotonic()


class Sent(NamedTuple):
    """Where a secret was sent."""

    origin: str  # as the client names it
    repository: str
    kind: str  # one of KINDS


class Authorization(NamedTuple):
    """The parts of an Authorization header."""

    scheme: str  # in lower case
    value: str


@dataclass
class Entry:
    """One exchange."""

    number: int  # in this journal, from 1
    connection: int  # number of the connection
    method: str
    target: str
    kind: str
    repository: str
    reference: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # the request headers that are kept, names in lower case
    scheme: str = "http"
    time: float = 0.0  # when the head had arrived, in seconds of the journal's clock
    status: int | None = None  # None until answered
    ended_time: float | None = None  # when it was answered, in seconds; None until answered
    request_bytes: int = 0  # of the body
    response_bytes: int = 0  # of the body
    response_headers: Mapping[str, str] = field(default_factory=dict)
    # Places of the request and of the answer in the order of all journals of the process. `ended`
    # is None until answered.
    begun: int = field(default_factory=lambda: next(_ORDER))
    ended: int | None = None
    # Whether a hook or a fault has given the answer, or changed its status or body. Such an answer
    # is no evidence against a client.
    tampered: bool = False
    codes: tuple[str, ...] = ()  # of an error body
    # The fault verbs that took effect, and "lost" if a connection in memory broke before the client
    # had read the answer.
    faults: list[str] = field(default_factory=list)
    secrets: list[str] = field(
        default_factory=list
    )  # values of secret fields of the request's form

    @property
    def authorization(self) -> Authorization:
        """The credential that was sent. Both parts are empty if no credential was sent."""
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        return Authorization(scheme.lower(), value)

    @property
    def origin(self) -> str:
        """The origin by the scheme of the connection and the Host header."""
        return f"{self.scheme}://{self.headers.get('host', '')}"

    def header(self, name: str) -> str:
        """Return a request header, or an empty string if it was absent or is not kept."""
        return self.headers.get(name.lower(), "")

    def sent_secrets(self) -> list[str]:
        """Return every secret of the request: passwords, tokens, other credentials and cookies."""
        secrets = list(self.secrets)
        for name in ("authorization", "proxy-authorization"):
            scheme, _, value = self.header(name).partition(" ")
            secrets += _password(value) if scheme.lower() == "basic" else [value or scheme]
        secrets.append(self.header("cookie"))
        secrets += [value for name, value in self.query.items() if name in _SECRET_FIELDS]
        return [secret for secret in secrets if secret]

    def note_form(self, body: bytes) -> None:
        """Add the secret fields of the form that was sent to `secrets`."""
        fields = parse_qsl(body.decode("latin-1"))
        self.secrets += [value for name, value in fields if name in _SECRET_FIELDS]

    def __str__(self) -> str:
        text = f"{self.number}. [{self.connection}] {self.method} {self.target} -> {self.status}"
        return f"{text} ({'; '.join(self.faults)})" if self.faults else text


def _password(value: str) -> list[str]:
    """Return the password of a Basic credential. Returns `value` if it is malformed."""
    try:
        pair = base64.b64decode(value, validate=True).decode("latin-1")
    except (binascii.Error, ValueError):
        return [value]
    user, _, password = pair.partition(":")
    return [password or user]


class Selector(NamedTuple):
    """A condition on exchanges. An empty field matches every exchange.

    In globs, `*` matches slashes too.
    """

    methods: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    globs: Mapping[str, str] = {}  # keys: `repository`, `reference`, `host` and `path`
    header: Mapping[str, str] = {}  # globs of values, by header name in lower case
    query: Mapping[str, str] = {}  # globs of values, by parameter

    @classmethod
    def of(
        cls,
        method: str | None = None,
        kind: str | None = None,
        *,
        header: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        **globs: str | None,
    ) -> Selector:
        """Make a selector. Several methods or kinds are separated by spaces.

        Raises ValueError if a method or kind is unknown.
        """
        methods = frozenset((method or "").split())
        kinds = frozenset((kind or "").split())
        if not methods <= METHODS:
            unknown = min(methods - METHODS)
            raise ValueError(f"no method {unknown}: one of {' '.join(sorted(METHODS))}")

        if not kinds <= set(KINDS):
            unknown = min(kinds - set(KINDS))
            raise ValueError(f"no kind {unknown}: one of {' '.join(KINDS)}")

        set_globs = {name: glob for name, glob in globs.items() if glob is not None}
        headers = {name.lower(): glob for name, glob in (header or {}).items()}
        return cls(methods, kinds, set_globs, headers, dict(query or {}))

    def matches(self, subject: Entry | Request) -> bool:
        """Report whether an exchange, or the request of an exchange, satisfies the condition."""
        if self.methods and subject.method not in self.methods:
            return False
        if self.kinds and subject.kind not in self.kinds:
            return False

        for name, glob in self.globs.items():
            if name == "host":
                value = subject.header("host")
            elif name == "path":
                value = subject.target.partition("?")[0]
            else:
                value = getattr(subject, name)
            if not _fits_glob(value, glob):
                return False

        for name, glob in self.header.items():
            value = subject.header(name)
            if not value or not _fits_glob(value, glob):
                return False

        query = dict(subject.query)
        return all(
            name in query and _fits_glob(query[name], glob) for name, glob in self.query.items()
        )

    def __str__(self) -> str:
        words = [" ".join(sorted(self.methods)), " ".join(sorted(self.kinds))]
        words += [f"{name}={as_rule_text(glob)}" for name, glob in self.globs.items()]
        words += [f"header.{name}={as_rule_text(glob)}" for name, glob in self.header.items()]
        words += [f"query.{name}={as_rule_text(glob)}" for name, glob in self.query.items()]
        return " ".join(word for word in words if word) or "any"


def _fits_glob(value: str, glob: str) -> bool:
    return fnmatchcase(value, glob) if _WILDCARD.search(glob) else value == glob


class Entries(list[Entry]):
    """Some exchanges of a journal, with assertions about them.

    An assertion that does not hold raises AssertionError, whose message lists the exchanges.
    """

    def __init__(
        self, entries: Iterable[Entry], meant: str, journal: Journal | None = None
    ) -> None:
        super().__init__(entries)
        # The selector as text, for messages.
        self.meant = meant
        self._journal = journal

    def exactly(self, number: int) -> Entries:
        """Assert that there are exactly `number` entries."""
        return self._claim(len(self) == number, f"exactly {number}")

    def none(self) -> Entries:
        """Assert that there are no entries."""
        return self._claim(not self, "none")

    def at_most(self, number: int) -> Entries:
        """Assert that there are at most `number` entries."""
        return self._claim(len(self) <= number, f"at most {number}")

    def at_least(self, number: int) -> Entries:
        """Assert that there are at least `number` entries."""
        return self._claim(len(self) >= number, f"at least {number}")

    def before(self, others: Iterable[Entry]) -> Entries:
        """Assert that each of these exchanges was answered before any of `others` began.

        The assertion fails if either side is empty.
        """
        others = list(others)
        late = [(entry, other) for entry in self for other in others if not before(entry, other)]
        if late or not self or not others:
            pairs = "\n".join(
                f"    {entry}\n  was not answered before\n    {other}" for entry, other in late[:5]
            )
            raise AssertionError(
                f"{self.meant or 'any'} before others ({len(self)} and {len(others)}):\n{pairs}"
            )
        return self

    def connections(self) -> int:
        """Count the connections of these requests."""
        return len({entry.connection for entry in self})

    def bytes_in(self) -> int:
        """Count the bytes of request bodies."""
        return sum(entry.request_bytes for entry in self)

    def bytes_out(self) -> int:
        """Count the bytes of response bodies."""
        return sum(entry.response_bytes for entry in self)

    def gaps(self) -> list[float]:
        """Return the seconds between the beginnings of consecutive exchanges."""
        return [second.time - first.time for first, second in itertools.pairwise(self)]

    def _claim(self, holds: bool, claim: str) -> Entries:
        if holds:
            return self
        lines = [f"{claim} of {self.meant or 'all exchanges'} expected, there are {len(self)}:"]
        lines += [f"    {entry}" for entry in self[:20]]
        if len(self) > 20:
            lines.append(f"    and {len(self) - 20} more")
        if not self and self._journal is not None:
            summary = self._journal.summary()
            lines.append(
                f"  all there was: {', '.join(f'{n} {name}' for name, n in summary.items())}"
            )
        raise AssertionError("\n".join(lines))


class Journal:
    """The exchanges of one server."""

    def __init__(self, now: Callable[[], float] = clock) -> None:
        self.entries: list[Entry] = []
        # Number of TLS greetings on a port without TLS. A client that sends one guesses the scheme
        # (docs/protocol-facts.md R9).
        self.hellos = 0
        # Descriptions of requests that no correct client sends (`Uploads._refuse_mistake`).
        self.violations: list[str] = []
        self._now = now

    def open(self, request: Request) -> Entry:
        """Add an entry for a request whose head has arrived."""
        entry = Entry(
            number=len(self.entries) + 1,
            connection=request.connection,
            method=request.method,
            target=request.target,
            kind=request.kind,
            repository=request.repository,
            reference=request.reference,
            query=dict(request.query),
            headers={name: request.header(name) for name, _ in request.headers if name in _KEPT},
            scheme=request.scheme,
            time=self._now(),
        )
        self.entries.append(entry)
        return entry

    def close(self, entry: Entry, status: int, headers: Mapping[str, str]) -> None:
        """Record the answer to a request.

        `response_bytes` is counted later, as the body is sent.
        """
        entry.status = status
        entry.response_headers = headers
        entry.ended = next(_ORDER)
        entry.ended_time = self._now()

    def matching(
        self,
        method: str | None = None,
        kind: str | None = None,
        repository: str | None = None,
        status: int | None = None,
        reference: str | None = None,
        *,
        host: str | None = None,
        path: str | None = None,
        header: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Entries:
        """Return the entries that satisfy all conditions (see `Selector`)."""
        globs = {"repository": repository, "reference": reference, "host": host, "path": path}
        selector = Selector.of(method, kind, header=header, query=query, **globs)
        entries = [
            entry
            for entry in tuple(self.entries)
            if selector.matches(entry) and status in (None, entry.status)
        ]
        meant = str(selector) + (f" -> {status}" if status is not None else "")
        return Entries(entries, meant, self)

    def count(
        self,
        method: str | None = None,
        kind: str | None = None,
        repository: str | None = None,
        status: int | None = None,
        reference: str | None = None,
    ) -> int:
        """Count the entries that satisfy all conditions."""
        return len(self.matching(method, kind, repository, status, reference))

    def summary(self) -> dict[str, int]:
        """Count the entries by method and kind, as in {"GET manifest": 1}."""
        return dict(
            sorted(Counter(f"{entry.method} {entry.kind}" for entry in tuple(self.entries)).items())
        )

    def connections(self) -> int:
        """Count the connections that carried at least one request."""
        return len({entry.connection for entry in tuple(self.entries)})

    def bytes_in(self) -> int:
        """Count the bytes of request bodies."""
        return sum(entry.request_bytes for entry in tuple(self.entries))

    def bytes_out(self) -> int:
        """Count the bytes of response bodies."""
        return sum(entry.response_bytes for entry in tuple(self.entries))

    def clear(self) -> None:
        """Remove all entries. The lists stay the same objects, which other code may hold."""
        self.entries.clear()
        self.violations.clear()
        self.hellos = 0

    def check(self) -> None:
        """Raise AssertionError if a client has sent a request that no correct client sends."""
        if self.violations:
            raise AssertionError(
                "requests that no correct client sends:\n" + "\n".join(self.violations)
            )

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))


def before(first: Entry, second: Entry) -> bool:
    """Report whether an exchange was answered before another one began, also at another server."""
    return first.ended is not None and first.ended < second.begun


def credentials(*journals: Journal) -> dict[str, set[Sent]]:
    """Return the places to which each secret was sent at these servers, by secret."""
    places: dict[str, set[Sent]] = {}
    for journal in journals:
        for entry in tuple(journal.entries):
            place = Sent(entry.origin, entry.repository, entry.kind)
            for secret in entry.sent_secrets():
                places.setdefault(secret, set()).add(place)
    return places
