"""The journal of a server: every exchange in the order of arrival, and assertions about exchanges.

Invariants: an entry is made when a request's head has arrived. It is completed later and never
removed, so that a request that breaks off is counted too; its status stays None. Only the server's
thread writes a journal. Any thread may read it.

Assertions read like sentences:

    journal.matching("POST", repository="app/web").exactly(1)
    journal.matching("HEAD", "blob").none()
    journal.matching("PUT", "upload").before(journal.matching("PUT", "manifest"))
"""

from __future__ import annotations

import base64
import binascii
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple
from urllib.parse import parse_qsl

import anyio

from .messages import Request

__all__ = ["KINDS", "Authorization", "Entries", "Entry", "Journal", "Selector", "before", "clock"]

# Kinds of paths. `messages.Request` recognises all of them except `token` and `storage`, which are
# set by those services.
KINDS = (
    *("ping", "upload_start", "upload", "blob", "manifest", "tag_list", "referrers"),
    *("token", "storage", "other"),
)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT")
# Fields of token requests that hold secrets (docs/protocol-facts.md sections 2.4, 4.5, 5.4, 6.1).
_SECRET_FIELDS = (
    *("password", "refresh_token", "access_token"),
    *("client_secret", "assertion", "client_assertion"),
)
_SHOWN = 20  # entries that the message of a failed assertion lists

# Numbers that order the events of all journals, so that answers can be compared with requests at
# other servers.
_ORDER = itertools.count(1)


def clock() -> float:
    """Return the event loop's time in seconds, or the machine's if no event loop is running.

    A virtual clock of the event loop may jump.
    """
    try:
        return anyio.current_time()
    except anyio.NoEventLoopError:
        return time.monotonic()


class Authorization(NamedTuple):
    """The parts of an Authorization header."""

    scheme: str  # in lower case
    value: str


@dataclass(eq=False)
class Entry:
    """One exchange."""

    number: int  # in this journal, from 1
    connection: int  # number of the connection
    method: str
    target: str
    kind: str  # one of KINDS
    repository: str
    reference: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # of the request, names in lower case
    scheme: str = "http"
    time: float = 0.0  # when the head had arrived, in seconds of `clock`
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
    # Values of secret fields of the request's form.
    secrets: list[str] = field(default_factory=list)

    @property
    def authorization(self) -> Authorization:
        """The credential that was sent. Both parts are empty if no credential was sent."""
        scheme, _, value = self.header("authorization").partition(" ")
        return Authorization(scheme.lower(), value)

    @property
    def origin(self) -> str:
        """The origin by the scheme of the connection and the Host header."""
        return f"{self.scheme}://{self.header('host')}"

    def header(self, name: str) -> str:
        """Return a request header, or an empty string if it was absent."""
        return self.headers.get(name.lower(), "")

    def sent_secrets(self) -> list[str]:
        """Return every secret of the request: passwords, tokens, other credentials and cookies."""
        secrets = list(self.secrets)
        for name in ("authorization", "proxy-authorization"):
            scheme, _, value = self.header(name).partition(" ")
            secrets.append(_password(value) if scheme.lower() == "basic" else value or scheme)
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


def _password(value: str) -> str:
    """Return the password of a Basic credential. Returns `value` if it is malformed."""
    try:
        pair = base64.b64decode(value, validate=True).decode("latin-1")
    except (binascii.Error, ValueError):
        return value
    user, _, password = pair.partition(":")
    return password or user


def before(first: Entry, second: Entry) -> bool:
    """Report whether an exchange was answered before another one began, also at another server."""
    return first.ended is not None and first.ended < second.begun


class Selector:
    """A condition on exchanges. An empty field matches every exchange.

    Several methods or kinds are separated by spaces. `header` and `query` have globs for the values
    of headers and parameters that must be present. The other arguments are globs for `repository`,
    `reference`, `host` and `path`. In globs, `*` matches slashes too. Raises ValueError if a method
    or kind is unknown.
    """

    def __init__(
        self,
        method: str | None = None,
        kind: str | None = None,
        *,
        header: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        **globs: str | None,
    ) -> None:
        self.methods = (method or "").split()
        self.kinds = (kind or "").split()
        for name, words, known in (("method", self.methods, _METHODS), ("kind", self.kinds, KINDS)):
            unknown = sorted({*words} - {*known})
            if unknown:
                raise ValueError(f"no {name} {unknown[0]}: one of {' '.join(known)}")

        self._globs = {name: glob for name, glob in globs.items() if glob is not None}
        self._header = {name.lower(): glob for name, glob in (header or {}).items()}
        self._query = query or {}

    def matches(self, subject: Entry | Request) -> bool:
        """Report whether an exchange, or the request of an exchange, satisfies the condition."""
        if self.methods and subject.method not in self.methods:
            return False
        if self.kinds and subject.kind not in self.kinds:
            return False

        query = dict(subject.query)
        values: list[tuple[str | None, str]] = [
            *((_value(subject, name), glob) for name, glob in self._globs.items()),
            *((subject.header(name) or None, glob) for name, glob in self._header.items()),
            *((query.get(name), glob) for name, glob in self._query.items()),
        ]
        return all(value is not None and fnmatchcase(value, glob) for value, glob in values)

    def __str__(self) -> str:
        words = [*self.methods, *self.kinds]
        words += [f"{name}={glob}" for name, glob in self._globs.items()]
        words += [f"header.{name}={glob}" for name, glob in self._header.items()]
        words += [f"query.{name}={glob}" for name, glob in self._query.items()]
        return " ".join(words) or "any"


def _value(subject: Entry | Request, name: str) -> str:
    if name == "host":
        return subject.header("host")
    if name == "path":
        return subject.target.partition("?")[0]
    return str(getattr(subject, name))


class Entries(list[Entry]):
    """Some exchanges of a journal, with assertions about them.

    `meant` says in words which they are. An assertion that does not hold raises AssertionError,
    whose message lists the exchanges, or counts `others` if there are none.
    """

    def __init__(self, entries: Iterable[Entry], meant: str, others: Iterable[Entry] = ()) -> None:
        super().__init__(entries)
        self.meant = meant
        self._others = others

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
        pairs = [*itertools.product(self, others)]
        late = [pair for pair in pairs if not before(*pair)]
        if late or not pairs:
            listed = [f"    {one}\n  was not answered before\n    {other}" for one, other in late]
            text = "\n".join(listed[:_SHOWN])
            raise AssertionError(f"{self.meant} before others, of {len(pairs)} pairs:\n{text}")
        return self

    def bytes_in(self) -> int:
        """Count the bytes of request bodies."""
        return sum(entry.request_bytes for entry in self)

    def gaps(self) -> list[float]:
        """Return the seconds between the beginnings of consecutive exchanges."""
        return [second.time - first.time for first, second in itertools.pairwise(self)]

    def _claim(self, holds: bool, claim: str) -> Entries:
        if holds:
            return self
        lines = [f"{claim} of {self.meant} expected, there are {len(self)}:"]
        lines += [f"    {entry}" for entry in self[:_SHOWN]]
        if len(self) > _SHOWN:
            lines.append(f"    and {len(self) - _SHOWN} more")
        if not self:
            counts = ", ".join(f"{count} {name}" for name, count in _summary(self._others).items())
            lines.append(f"  all there was: {counts}")
        raise AssertionError("\n".join(lines))


def _summary(entries: Iterable[Entry]) -> dict[str, int]:
    return dict(sorted(Counter(f"{entry.method} {entry.kind}" for entry in entries).items()))


class Journal:
    """The exchanges of one server."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        # Number of TLS greetings on a port without TLS. A client that sends one guesses the scheme
        # (docs/protocol-facts.md R9).
        self.hellos = 0
        # Descriptions of requests that the site has refused because no correct client sends them.
        self.violations: list[str] = []

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
            headers={name: request.header(name) for name, _ in request.headers},
            scheme=request.scheme,
            time=clock(),
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
        entry.ended_time = clock()

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
        selector = Selector(method, kind, header=header, query=query, **globs)
        entries = tuple(self.entries)
        matching = [
            entry for entry in entries if selector.matches(entry) and status in (None, entry.status)
        ]
        meant = str(selector) + (f" -> {status}" if status is not None else "")
        return Entries(matching, meant, entries)

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
        return _summary(tuple(self.entries))

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
        listed = "\n".join(self.violations)
        assert not self.violations, f"requests that no correct client sends:\n{listed}"
