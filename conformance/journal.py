"""Every exchange in the order in which it arrived, and the questions tests ask about them.

Owns: what is remembered of an exchange. May not know: what the registry holds or why it answered so.
Invariant: an entry is made when a request's head has arrived and is only ever completed, never dropped,
so a request that broke in the middle is counted too (its status stays None). Written by the server's
thread, read by any.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .messages import Request

__all__ = ["Entry", "Journal"]

# What tests ask about. Authorization is kept whole on purpose: which credential went where is a claim.
_KEPT = """
    accept accept-encoding authorization connection content-length content-range content-type cookie expect
    host if-match if-none-match proxy-authorization range transfer-encoding user-agent
"""

# One order over all journals: what a client knew before it asked is what had been answered by then.
_ORDER = itertools.count(1)


@dataclass
class Entry:
    """One exchange.

    `begun` and `ended` are places in one order over all journals of the process. `tampered` says that a
    hook gave the answer, or gave it another status or body: then it proves nothing against a client.
    `codes` are those of an error body.
    """

    number: int
    connection: int
    method: str
    target: str
    kind: str
    repository: str
    reference: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    status: int | None = None
    answered: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    response_headers: Mapping[str, str] = field(default_factory=dict)
    begun: int = field(default_factory=lambda: next(_ORDER))
    ended: int | None = None
    tampered: bool = False
    codes: tuple[str, ...] = ()

    @property
    def authorization(self) -> tuple[str, str]:
        """The scheme in lower case and the value, two empty strings when none was sent."""
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        return scheme.lower(), value

    def __str__(self) -> str:
        return f"{self.number}. [{self.connection}] {self.method} {self.target} -> {self.status}"


class Journal:
    """The exchanges of one server."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        # TLS greetings on a port without TLS: a client that guesses the scheme (protocol-facts.md R9).
        self.hellos = 0
        # What no correct client would ever send, in words; see App._wrong.
        self.violations: list[str] = []
        self._answered = 0

    def open(self, request: Request) -> Entry:
        """Note a request whose head has arrived."""
        kept = _KEPT.split()
        entry = Entry(
            number=len(self.entries) + 1,
            connection=request.connection,
            method=request.method,
            target=request.target,
            kind=request.kind,
            repository=request.repository,
            reference=request.reference,
            query=dict(request.query),
            headers={name: request.header(name) for name, _ in request.headers if name in kept},
        )
        self.entries.append(entry)
        return entry

    def close(self, entry: Entry, status: int, headers: Mapping[str, str]) -> None:
        """Note the answer to a request; its bytes are counted as they leave."""
        self._answered += 1
        entry.status, entry.answered, entry.response_headers = status, self._answered, headers
        entry.ended = next(_ORDER)

    def matching(
        self,
        method: str | None = None,
        kind: str | None = None,
        repository: str | None = None,
        status: int | None = None,
        reference: str | None = None,
    ) -> list[Entry]:
        """Return the entries that agree with everything that is given."""
        return [
            entry
            for entry in tuple(self.entries)
            if method in (None, entry.method)
            and kind in (None, entry.kind)
            and repository in (None, entry.repository)
            and status in (None, entry.status)
            and reference in (None, entry.reference)
        ]

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
        return dict(sorted(Counter(f"{entry.method} {entry.kind}" for entry in tuple(self.entries)).items()))

    def connections(self) -> int:
        """Count the connections on which at least one request came."""
        return len({entry.connection for entry in tuple(self.entries)})

    def bytes_in(self) -> int:
        """Count the bytes of request bodies."""
        return sum(entry.request_bytes for entry in tuple(self.entries))

    def bytes_out(self) -> int:
        """Count the bytes of response bodies."""
        return sum(entry.response_bytes for entry in tuple(self.entries))

    def clear(self) -> None:
        """Forget the exchanges so far (in place, so that holders of the journal see it)."""
        self.entries.clear()
        self.violations.clear()
        self.hellos = 0

    def check(self) -> None:
        """Raise AssertionError when a client sent what no correct client sends."""
        if self.violations:
            raise AssertionError("requests that no correct client sends:\n" + "\n".join(self.violations))

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))
