"""One exchange between a request's head and its answer, without a socket.

Owns: the order of the steps (journal, faults, intercept, decision on the head, body, answer, amend,
faults again) and where a body goes.
May not know: sockets, what a registry holds.
Invariants: a body is never needed as one object. Its receiver asks `room` where to put the next
bytes, says how many came, and awaits `pace` when there is one.

The server drives an Exchange over a stream, `Site.handle` drives the same one in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import anyio

from ..faults.injection import Injection
from ..faults.rules import Faults
from ..faults.wire import Dropped, Streamed, Wire, as_wire
from ..journal import Entry, Journal
from ..messages import Answer, Content, Headers, Intercept, Request, Response

__all__ = ["DRAINED", "Body", "Dropped", "Exchange", "Reception", "Site", "Streamed", "Wire"]

# Go's net/http reads so many bytes of a refused body before it answers (section 1.12).
DRAINED = 256 << 10
_FORM = "application/x-www-form-urlencoded"

# What is decided on a head: an answer at once, or to receive the body first.
Decision: TypeAlias = "Answer | Reception"


def _substance(answer: Answer) -> object:
    """Return the part of an answer whose change makes an exchange tampered; headers do not count."""
    return answer if isinstance(answer, bytes) else (answer.status, id(answer.body))


def _codes(answer: Response) -> tuple[str, ...]:
    """Read the codes of an error body; a hook may have given anything."""
    if answer.status < 400:
        return ()
    try:
        return tuple(str(code) for code in answer.codes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ()


class Body(Protocol):
    """Where a body goes: `messages.Content` keeps it."""

    def room(self, expected: int) -> memoryview: ...

    def advance(self, count: int) -> None: ...

    def feed(self, data: bytes) -> None: ...


@dataclass
class Reception:
    """A decision to receive the body first.

    `content` takes the bytes; those beyond `limit` are counted and dropped. `finish` gives the
    answer to a whole body and is told how many bytes came, `abort` is called for a broken one.
    `flush` is awaited whenever bytes have come, so that a body can go on to somewhere slower.
    """

    content: Body
    finish: Callable[[int], Response | Awaitable[Answer]]
    abort: Callable[[], None] | None = None
    limit: int | None = None
    flush: Callable[[], Awaitable[None]] | None = None


class Exchange:
    """One request on its way to an answer.

    `pace`, when there is one, is to be awaited after bytes of the body came. Every await may raise
    `Dropped`, which ends the connection.
    """

    def __init__(self, site: Site, request: Request) -> None:
        self.request = request
        self.entry: Entry = site.journal.open(request)
        self.received = 0
        self.pace: Callable[[], Awaitable[None]] | None = None
        self._site = site
        self._reception: Reception | None = None
        self._answer: Answer | None = None
        self._scratch: bytearray | None = None
        self._room: memoryview | None = None
        self._injection: Injection | None = None
        if site.faults.rules:
            request.kind = self.entry.kind = site.kind_of(request)
            self._injection = site.faults.injection(request, self.entry)

    def ask_hooks(self) -> Decision | Awaitable[Decision | None] | None:
        """Ask the faults and the intercept, which may be asynchronous."""
        if self._injection is not None or self._site.start_later is not None:
            return self._ask_hooks_in_turn()
        return None if self._site.intercept is None else self._site.intercept(self.request)

    async def _ask_hooks_in_turn(self) -> Decision | None:
        decided: Decision | None = None
        if self._injection is not None:
            decided = await self._injection.before()
        if decided is None and self._site.intercept is not None:
            intercepted = self._site.intercept(self.request)
            decided = await intercepted if inspect.isawaitable(intercepted) else intercepted
        self.entry.tampered = decided is not None
        if decided is None and self._site.start_later is not None:
            decided = await self._site.start_later(self.request)
        return decided

    def start(self, override: Decision | None) -> None:
        """Decide on the head; `override` is what faults or the intercept decided."""
        decided = self._site.start(self.request) if override is None else override
        if self._site.start_later is None:
            self.entry.tampered = override is not None
        self.entry.kind = self.request.kind  # a token service knows its own path
        if isinstance(decided, Reception):
            self._reception = decided
        else:
            self._answer = decided
        if self._injection is not None or (self._reception is not None and self._reception.flush):
            self.pace = self._pace

    async def _pace(self) -> None:
        if self._injection is not None:
            await self._injection.pace(self.received)
        if self._reception is not None and self._reception.flush is not None:
            await self._reception.flush()

    @property
    def is_early(self) -> bool:
        """Ask whether the answer is to be given before the body is read."""
        answer = self._answer
        if not isinstance(answer, Response) or answer.early is False:
            return False
        length = self.request.length()
        return (
            bool(answer.early)
            or self.request.is_chunked
            or (length is not None and length > DRAINED)
        )

    def room(self, expected: int) -> memoryview:
        """Return where the next bytes of the body go; `expected` is how many are still to come."""
        reception = self._reception
        if reception is None or (reception.limit is not None and self.received >= reception.limit):
            if self._scratch is None:
                self._scratch = bytearray(1 << 18)
            room = memoryview(self._scratch)
        else:
            room = reception.content.room(expected)
        if self._injection is not None:
            room = self._room = room[: self._injection.limit(self.received)]
        return room

    def advance(self, count: int) -> None:
        """Take `count` bytes that were put into `room`."""
        if self._injection is not None and self._room is not None:
            self._injection.alter(self._room[:count], self.received)
        reception = self._reception
        if reception is not None and (reception.limit is None or self.received < reception.limit):
            reception.content.advance(count)
        self.received += count
        self.entry.request_bytes = self.received

    def feed(self, data: bytes) -> None:
        """Take bytes that were received elsewhere; `Dropped` may end the connection among them."""
        while data and self._injection is not None:
            part = bytearray(data[: self._injection.limit(self.received)])
            data = data[len(part) :]
            self._injection.alter(memoryview(part), self.received)
            self._take(bytes(part))
            self._injection.check(self.received)
        if data:
            self._take(data)

    def _take(self, data: bytes) -> None:
        reception = self._reception
        if reception is not None and (reception.limit is None or self.received < reception.limit):
            reception.content.feed(data)
        self.received += len(data)
        self.entry.request_bytes = self.received

    def finish(self) -> Answer | Awaitable[Answer | Wire]:
        """Give the answer; the body is complete, or is not wanted."""
        reception = self._reception
        answer: Answer | Awaitable[Answer] | None = self._answer
        if reception is not None:
            content = reception.content
            if isinstance(content, Content) and self.request.header("content-type").startswith(
                _FORM
            ):
                self.entry.note_form(bytes(content))
            answer = reception.finish(self.received)
            self._reception = None
        assert answer is not None
        if self._injection is not None or not isinstance(answer, (Response, bytes)):
            return self._finish(answer)
        return self._note(self._amend(answer))

    async def _finish(self, answer: Answer | Awaitable[Answer]) -> Answer | Wire:
        response = self._amend(answer if isinstance(answer, (Response, bytes)) else await answer)
        shaped: Answer | Wire = response
        if self._injection is not None:
            before = _substance(response)
            response, shaped = await self._injection.after(response)
            self.entry.tampered |= isinstance(shaped, Wire) or _substance(response) != before
        if isinstance(shaped, Streamed):
            shaped = as_wire(shaped, self.request.method, self.entry)
        self._note(response)
        return shaped

    def _amend(self, answer: Answer) -> Answer:
        if self._site.amend is None:
            return answer
        before = _substance(answer)
        amended = self._site.amend(self.request, answer)
        self.entry.tampered |= _substance(amended) != before
        return amended

    def _note(self, answer: Answer) -> Answer:
        if isinstance(answer, Response):
            self.entry.codes = _codes(answer)
            headers = {name.lower(): value for name, value in answer.headers}
            self._site.journal.close(self.entry, answer.status, headers)
        return answer

    def abort(self) -> None:
        """The body broke: nobody will read an answer."""
        if self._reception is not None and self._reception.abort is not None:
            self._reception.abort()
        self._reception = None


class Site:
    """What a server can serve: a journal, faults, two hooks, and `start`.

    `faults` come first and last. `intercept` is asked next and may answer instead (or wait, when
    asynchronous); `amend` sees every answer and may return another one. `start_later`, where
    a subclass has it, decides on heads instead of `start`, and may wait.
    """

    start_later: Callable[[Request], Awaitable[Decision]] | None = None

    def __init__(self) -> None:
        self.journal = Journal()
        self.faults = Faults()
        self.intercept: Intercept | None = None
        self.amend: Callable[[Request, Answer], Answer] | None = None

    def start(self, request: Request) -> Decision:
        """Decide on a request's head."""
        raise NotImplementedError

    def kind_of(self, request: Request) -> str:
        """Name a request's kind of path; a token service knows its own."""
        return request.kind

    def open(self, request: Request) -> Exchange:
        """Begin an exchange."""
        return Exchange(self, request)

    def handle(self, request: Request) -> Answer:
        """Carry out a whole exchange in memory, with `request.body` as the body.

        Raises TypeError where something would have to wait or to break a connection: that needs a
        server.
        """
        exchange = self.open(request)
        override = exchange.ask_hooks()
        exchange.start(_at_once(override) if inspect.isawaitable(override) else override)
        if request.body and not exchange.is_early:
            exchange.feed(request.body)
            if exchange.pace is not None:
                _at_once(exchange.pace())
        answer = exchange.finish()
        made = _at_once(answer) if inspect.isawaitable(answer) else answer
        if isinstance(made, Response):
            if request.method != "HEAD":
                exchange.entry.response_bytes = made.size
            return made
        if isinstance(made, bytes):
            return made
        raise TypeError("an answer in pieces needs a server")

    def request(
        self, method: str, target: str, headers: Headers = (), body: bytes | None = None
    ) -> Response:
        """Ask without a server: framing headers are added unless `headers` has its own."""
        names: Sequence[str] = [name.lower() for name, _ in headers]
        own = [("host", "registry.test")] if "host" not in names else []
        bodied = body is not None or method in ("POST", "PUT", "PATCH")
        if bodied and "content-length" not in names and "transfer-encoding" not in names:
            own.append(("content-length", str(len(body or b""))))
        answer = self.handle(Request(method, target, [*own, *headers], body or b""))
        assert isinstance(answer, Response), "this request is answered with raw bytes: use a server"
        return answer


def _at_once(waiting: Awaitable[Any]) -> Any:
    """Return what an awaitable gives when it need not wait."""
    if not isinstance(waiting, Coroutine):
        raise TypeError("an asynchronous intercept needs a server")
    try:
        waiting.send(None)
    except StopIteration as done:
        return done.value
    except Dropped as problem:
        raise TypeError("a dropped connection needs a server") from problem
    except anyio.NoEventLoopError:
        pass
    waiting.close()
    raise TypeError("an asynchronous intercept or a fault that waits needs a server")
