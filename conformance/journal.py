"""Every exchange in the order in which it arrived, and the questions tests ask about them.

Owns: what is remembered of an exchange, which exchanges a description means (`Selector`), and which
secret was sent where.
May not know: what the registry holds or why it answered so.
Invariants: an entry is made when a request's head has arrived. It is completed later and never
dropped, so that a request that broke in the middle is counted too (its status stays None). The
server's thread writes, any thread reads.

A test reads as a sentence:

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

# The request headers that are kept, for the questions of tests. Authorization is kept whole on
# purpose: tests claim which credential went where.
_KEPT = """
    accept accept-encoding authorization connection content-length content-range content-type cookie expect
    host if-match if-none-match proxy-authorization range transfer-encoding user-agent
"""

# Kinds of paths. messages.Request knows all but `token` and `storage`, which those services know.
KINDS = (
    *("ping", "catalog", "upload_start", "upload", "blob", "manifest", "tag_list", "referrers"),
    *("token", "storage", "other"),
)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT"})
_WILD = re.compile(r"[*?[]")
# The fields of token requests that are secrets (docs/protocol-facts.md sections 2.4, 4.5, 5.4,
# 6.1).
_SECRET_FIELDS = (
    "password",
    "refresh_token",
    "access_token",
    "client_secret",
    "assertion",
    "client_assertion",
)

# One order over all journals, so that it can be said which answers came before a request.
_ORDER = itertools.count(1)


def clock() -> float:
    """Return the event loop's time in seconds, which may jump; outside a loop the machine's."""
    try:
        return asyncio.get_running_loop().time()  # what anyio would say, at a tenth of its cost
    except RuntimeError:
        pass
    try:
        return anyio.current_time()
    except RuntimeError:
        return time.monotonic()


class Sent(NamedTuple):
    """Where a secret was sent: the origin as the client names it, the repository, the kind of path."""

    origin: str
    repository: str
    kind: str


class Authorization(NamedTuple):
    """What an Authorization header says; the scheme is in lower case."""

    scheme: str
    value: str


@dataclass
class Entry:
    """One exchange.

    `begun` and `ended` are places in one order over all journals of the process.
    """

    number: int  # in this journal, from 1
    connection: int
    method: str
    target: str
    kind: str
    repository: str
    reference: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # those of the request that are kept
    scheme: str = "http"
    time: float = 0.0  # seconds by the journal's clock, when the head had arrived
    status: int | None = None  # None: not answered
    answered: int | None = None  # place among the answers of this journal
    ended_time: float | None = None  # seconds by the journal's clock
    request_bytes: int = 0
    response_bytes: int = 0
    response_headers: Mapping[str, str] = field(default_factory=dict)
    begun: int = field(default_factory=lambda: next(_ORDER))
    ended: int | None = None
    # A hook or a fault gave the answer, or changed its status or body: it proves nothing against a
    # client.
    tampered: bool = False
    codes: tuple[str, ...] = ()  # those of an error body
    # The verbs that took place, and "lost" where a connection in memory broke before the client had
    # read the answer.
    faults: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)  # the secret fields of the request's form

    @property
    def authorization(self) -> Authorization:
        """The credential that was sent; empty strings when none was."""
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        return Authorization(scheme.lower(), value)

    @property
    def origin(self) -> str:
        """The origin as the client names it."""
        return f"{self.scheme}://{self.headers.get('host', '')}"

    def header(self, name: str) -> str:
        """Return a request header that was kept."""
        return self.headers.get(name.lower(), "")

    def sent_secrets(self) -> list[str]:
        """Return every secret of the request: passwords, tokens, values of other schemes, cookies."""
        secrets = list(self.secrets)
        for name in ("authorization", "proxy-authorization"):
            scheme, _, value = self.header(name).partition(" ")
            secrets += _password(value) if scheme.lower() == "basic" else [value or scheme]
        secrets.append(self.header("cookie"))
        secrets += [value for name, value in self.query.items() if name in _SECRET_FIELDS]
        return [secret for secret in secrets if secret]

    def note_form(self, body: bytes) -> None:
        """Note the secrets of a form that was sent."""
        fields = parse_qsl(body.decode("latin-1"))
        self.secrets += [value for name, value in fields if name in _SECRET_FIELDS]

    def __str__(self) -> str:
        text = f"{self.number}. [{self.connection}] {self.method} {self.target} -> {self.status}"
        return f"{text} ({'; '.join(self.faults)})" if self.faults else text


def _password(value: str) -> list[str]:
    """Return the password of a Basic value, the value itself when it is none."""
    try:
        pair = base64.b64decode(value, validate=True).decode("latin-1")
    except (binascii.Error, ValueError):
        return [value]
    user, _, password = pair.partition(":")
    return [password or user]


class Selector(NamedTuple):
    """Which exchanges are meant; None or empty means any.

    `repository`, `reference`, `host` and `path` are globs, in which `*` goes over slashes too, and
    so are the values of `header` and `query`.
    """

    methods: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    globs: Mapping[str, str] = {}
    header: Mapping[str, str] = {}
    query: Mapping[str, str] = {}

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
        """Read methods and kinds, several with spaces between; ValueError for unknown ones."""
        methods = frozenset((method or "").split())
        kinds = frozenset((kind or "").split())
        for unknown in sorted(methods - METHODS):
            raise ValueError(f"no method {unknown}: one of {' '.join(sorted(METHODS))}")

        for unknown in sorted(kinds - set(KINDS)):
            raise ValueError(f"no kind {unknown}: one of {' '.join(KINDS)}")

        set_globs = {name: glob for name, glob in globs.items() if glob is not None}
        headers = {name.lower(): glob for name, glob in (header or {}).items()}
        return cls(methods, kinds, set_globs, headers, dict(query or {}))

    def matches(self, subject: Entry | Request) -> bool:
        """Ask whether an exchange, or a request that begins one, is meant."""
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
    return fnmatchcase(value, glob) if _WILD.search(glob) else value == glob


class Entries(list[Entry]):
    """Some exchanges of a journal; a false claim about them raises AssertionError, which lists them."""

    def __init__(
        self, entries: Iterable[Entry], meant: str, journal: Journal | None = None
    ) -> None:
        super().__init__(entries)
        self.meant = meant
        self._journal = journal

    def exactly(self, number: int) -> Entries:
        """Claim how many there are; AssertionError otherwise."""
        return self._claim(len(self) == number, f"exactly {number}")

    def none(self) -> Entries:
        """Claim that there are none."""
        return self._claim(not self, "none")

    def at_most(self, number: int) -> Entries:
        """Claim that there are no more than so many."""
        return self._claim(len(self) <= number, f"at most {number}")

    def at_least(self, number: int) -> Entries:
        """Claim that there are no fewer than so many."""
        return self._claim(len(self) >= number, f"at least {number}")

    def before(self, others: Iterable[Entry]) -> Entries:
        """Claim that each of these was answered before any of the others arrived.

        The claim is false when there are none of these, or none of the others.
        """
        others = list(others)
        late = [(entry, other) for entry in self for other in others if not before(entry, other)]
        if late or not self or not others:
            listed = "\n".join(
                f"    {entry}\n  was not answered before\n    {other}" for entry, other in late[:5]
            )
            raise AssertionError(
                f"{self.meant or 'any'} before others ({len(self)} and {len(others)}):\n{listed}"
            )
        return self

    def on_one_connection(self) -> Entries:
        """Claim that all of these came on one connection."""
        return self._claim(self.connections() == 1, "all on one connection")

    def connections(self) -> int:
        """Count the connections on which these came."""
        return len({entry.connection for entry in self})

    def bytes_in(self) -> int:
        """Count the bytes of request bodies."""
        return sum(entry.request_bytes for entry in self)

    def bytes_out(self) -> int:
        """Count the bytes of response bodies."""
        return sum(entry.response_bytes for entry in self)

    def gaps(self) -> list[float]:
        """Return the seconds between one's beginning and the next's."""
        return [then.time - first.time for first, then in itertools.pairwise(self)]

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
        # TLS greetings on a port without TLS: such a client guesses the scheme
        # (docs/protocol-facts.md R9).
        self.hellos = 0
        # Requests that no correct client sends, in words; see Uploads._refuse_mistake.
        self.violations: list[str] = []
        self._answered = 0
        self._now = now

    def open(self, request: Request) -> Entry:
        """Note a request whose head has arrived."""
        names = _KEPT.split()
        entry = Entry(
            number=len(self.entries) + 1,
            connection=request.connection,
            method=request.method,
            target=request.target,
            kind=request.kind,
            repository=request.repository,
            reference=request.reference,
            query=dict(request.query),
            headers={name: request.header(name) for name, _ in request.headers if name in names},
            scheme=request.scheme,
            time=self._now(),
        )
        self.entries.append(entry)
        return entry

    def close(self, entry: Entry, status: int, headers: Mapping[str, str]) -> None:
        """Note the answer to a request; its bytes are counted as they leave."""
        self._answered += 1
        entry.status = status
        entry.answered = self._answered
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
        """Return the entries that agree with everything that is given (see Selector)."""
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
        """Count the entries that agree with everything that is given."""
        return len(self.matching(method, kind, repository, status, reference))

    def summary(self) -> dict[str, int]:
        """Count by method and kind, as in {"GET manifest": 1}."""
        return dict(
            sorted(Counter(f"{entry.method} {entry.kind}" for entry in tuple(self.entries)).items())
        )

    def connections(self) -> int:
        """Count the connections on which at least one request came."""
        return len({entry.connection for entry in tuple(self.entries)})

    def bytes_in(self) -> int:
        """Count the bytes of request bodies."""
        return sum(entry.request_bytes for entry in tuple(self.entries))

    def bytes_out(self) -> int:
        """Count the bytes of response bodies."""
        return sum(entry.response_bytes for entry in tuple(self.entries))

    def credentials(self) -> dict[str, set[Sent]]:
        """Return each secret that was seen and where it was sent."""
        return credentials(self)

    def clear(self) -> None:
        """Forget the exchanges so far (in place, so that holders of the journal see it)."""
        self.entries.clear()
        self.violations.clear()
        self.hellos = 0

    def check(self) -> None:
        """Raise AssertionError when a client sent what no correct client sends."""
        if self.violations:
            raise AssertionError(
                "requests that no correct client sends:\n" + "\n".join(self.violations)
            )

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))


def before(first: Entry, then: Entry) -> bool:
    """Ask whether one exchange was answered before the other arrived, at whatever servers."""
    return first.ended is not None and first.ended < then.begun


def credentials(*journals: Journal) -> dict[str, set[Sent]]:
    """Return each secret that these servers saw and where it was sent."""
    places: dict[str, set[Sent]] = {}
    for journal in journals:
        for entry in tuple(journal.entries):
            place = Sent(entry.origin, entry.repository, entry.kind)
            for secret in entry.sent_secrets():
                places.setdefault(secret, set()).add(place)
    return places
