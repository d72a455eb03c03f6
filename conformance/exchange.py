"""One exchange between a request's head and its answer, without a socket.

Owns: the order of things (journal, intercept, decision on the head, body, answer, amend) and where a
body goes. May not know: sockets, what a registry holds. Invariant: a body is never needed as one
object; whoever receives it asks `room` where to put the next bytes and says how many came. The server
drives an Exchange over a socket, `Site.handle` drives the same one in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .journal import Entry, Journal
from .messages import Answer, Content, Headers, Intercept, Request, Response

__all__ = ["DRAINED", "Exchange", "Reception", "Site"]

DRAINED = 256 << 10  # Go's net/http reads so much of a refused body before it answers (section 1.12)


def _told(answer: Answer) -> object:
    """Return what an amendment must not change without being noted: another header is no lie."""
    return answer if isinstance(answer, bytes) else (answer.status, id(answer.body))


def _codes(answer: Response) -> tuple[str, ...]:
    """Read the codes of an error body; a hook may have given anything."""
    if answer.status < 400:
        return ()
    try:
        return tuple(str(code) for code in answer.codes)
    except (ValueError, LookupError, TypeError, AttributeError):
        return ()


@dataclass
class Reception:
    """A decision to take the body first: where it goes, what follows, what a broken one means.

    Bytes beyond `limit` are counted and dropped; `finish` sees them as `Exchange.received`.
    """

    content: Content
    finish: Callable[[int], Response]
    abort: Callable[[], None] | None = None
    limit: int | None = None


class Exchange:
    """One request on its way to an answer."""

    def __init__(self, site: Site, request: Request) -> None:
        self.request = request
        self.entry: Entry = site.journal.open(request)
        self.received = 0
        self._site = site
        self._reception: Reception | None = None
        self._answer: Answer | None = None
        self._scratch: bytearray | None = None

    def asked(self) -> Answer | Awaitable[Answer | None] | None:
        """Ask the intercept, which may be asynchronous."""
        return None if self._site.intercept is None else self._site.intercept(self.request)

    def start(self, asked: Answer | None) -> None:
        """Decide on the head: an intercept's answer, an answer at once, or a body to receive."""
        decided = self._site.start(self.request) if asked is None else asked
        self.entry.tampered = asked is not None
        self.entry.kind = self.request.kind  # a token service knows its own path
        if isinstance(decided, Reception):
            self._reception = decided
        else:
            self._answer = decided

    @property
    def is_early(self) -> bool:
        """Ask whether the answer is to be given before the body is read."""
        answer = self._answer
        if not isinstance(answer, Response) or answer.early is False:
            return False
        length = self.request.length()
        return bool(answer.early) or self.request.chunked or (length is not None and length > DRAINED)

    def room(self, expected: int) -> memoryview:
        """Return where the next bytes of the body go; `expected` is how many are still to come."""
        reception = self._reception
        if reception is None or (reception.limit is not None and self.received >= reception.limit):
            if self._scratch is None:
                self._scratch = bytearray(1 << 18)
            return memoryview(self._scratch)
        return reception.content.room(expected)

    def advance(self, count: int) -> None:
        """Take `count` bytes that were put into `room`."""
        reception = self._reception
        if reception is not None and (reception.limit is None or self.received < reception.limit):
            reception.content.advance(count)
        self.received += count
        self.entry.request_bytes = self.received

    def feed(self, data: bytes) -> None:
        """Take bytes that were received elsewhere."""
        reception = self._reception
        if reception is not None and (reception.limit is None or self.received < reception.limit):
            reception.content.feed(data)
        self.received += len(data)
        self.entry.request_bytes = self.received

    def finish(self) -> Answer:
        """Give the answer; the body is complete, or is not wanted."""
        if self._reception is not None:
            self._answer = self._reception.finish(self.received)
            self._reception = None
        answer = self._answer
        assert answer is not None
        if self._site.amend is not None:
            before = _told(answer)
            answer = self._site.amend(self.request, answer)
            self.entry.tampered |= _told(answer) != before
        if isinstance(answer, Response):
            self.entry.codes = _codes(answer)
            kept = {name.lower(): value for name, value in answer.headers}
            self._site.journal.close(self.entry, answer.status, kept)
        return answer

    def abort(self) -> None:
        """The body broke: nobody will read an answer."""
        if self._reception is not None and self._reception.abort is not None:
            self._reception.abort()
        self._reception = None


class Site:
    """What a server can serve: a journal, two hooks, and `start`.

    `intercept` is asked first and may answer instead (or wait, when asynchronous); `amend` sees every
    answer last and may return another one.
    """

    def __init__(self) -> None:
        self.journal = Journal()
        self.intercept: Intercept | None = None
        self.amend: Callable[[Request, Answer], Answer] | None = None

    def start(self, request: Request) -> Answer | Reception:
        """Decide on a request's head."""
        raise NotImplementedError

    def open(self, request: Request) -> Exchange:
        """Begin an exchange."""
        return Exchange(self, request)

    def handle(self, request: Request) -> Answer:
        """Carry out a whole exchange in memory, with `request.body` as the body."""
        exchange = self.open(request)
        asked = exchange.asked()
        if inspect.isawaitable(asked):
            raise TypeError("an asynchronous intercept needs a server")
        exchange.start(asked)
        if request.body and not exchange.is_early:
            exchange.feed(request.body)
        answer = exchange.finish()
        if isinstance(answer, Response) and request.method != "HEAD":
            exchange.entry.response_bytes = answer.size
        return answer

    def request(self, method: str, target: str, headers: Headers = (), body: bytes | None = None) -> Response:
        """Ask without a server: framing headers are added unless `headers` has its own."""
        given: Sequence[str] = [name.lower() for name, _ in headers]
        own = [("host", "registry.test")] if "host" not in given else []
        bodied = body is not None or method in ("POST", "PUT", "PATCH")
        if bodied and "content-length" not in given and "transfer-encoding" not in given:
            own.append(("content-length", str(len(body or b""))))
        answer = self.handle(Request(method, target, [*own, *headers], body or b""))
        assert isinstance(answer, Response), "this request is answered with raw bytes: use a server"
        return answer
