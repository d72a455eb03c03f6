"""One exchange, from a request's head to its answer, without a socket.

Owns: the order of the steps (journal, faults, intercept, decision on the head, body, answer, amend,
faults again); the destination of a body.
May not know: sockets, what a registry holds.
Invariants: a body is never needed as one object. The server receives its next bytes into the buffer
that `room` returns, calls `advance`, and awaits `pace` unless it is None.

The server runs an Exchange over a stream. `Site.handle` runs it in memory.
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

__all__ = [
    "DRAINED",
    "Body",
    "Dropped",
    "Exchange",
    "Reception",
    "Site",
    "Streamed",
    "Wire",
    "receive_whole",
]

# Maximum number of bytes of a refused body that are read before the answer, as in Go's net/http
# (docs/protocol-facts.md section 1.12).
DRAINED = 256 << 10
_FORM = "application/x-www-form-urlencoded"

# The decision on a head: an answer, or a Reception if the body must be received first.
Decision: TypeAlias = "Answer | Reception"


def _substance(answer: Answer) -> object:
    """Return a value that changes with an answer's status or body, but not its headers."""
    return answer if isinstance(answer, bytes) else (answer.status, id(answer.body))


def _codes(answer: Response) -> tuple[str, ...]:
    """Return the codes of an error body, or no codes if a hook has given a body of another form."""
    if answer.status < 400:
        return ()
    try:
        return tuple(str(code) for code in answer.codes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ()


class Body(Protocol):
    """The destination of a body, such as `messages.Content`, which has the same methods."""

    def room(self, expected: int) -> memoryview: ...

    def advance(self, count: int) -> None: ...

    def feed(self, data: bytes) -> None: ...


@dataclass
class Reception:
    """A decision to receive the body before answering."""

    content: Body  # receives the bytes
    # Returns the answer after a complete body. The argument is the number of bytes received.
    finish: Callable[[int], Response | Awaitable[Answer]]
    abort: Callable[[], None] | None = None  # called if the body breaks off
    limit: int | None = None  # bytes after this number are counted and dropped
    # Awaited whenever bytes have arrived, so that a slower destination can take them.
    flush: Callable[[], Awaitable[None]] | None = None


def receive_whole(answer: Callable[[bytes], Response], limit: int = 1 << 16) -> Reception:
    """Return a decision to receive a body as one object, and to call `answer` with it.

    `answer` gets at least `limit` bytes of a body that is longer. Others are dropped.
    """
    content = Content()
    return Reception(content, lambda _: answer(bytes(content)), limit=limit)


class Exchange:
    """The processing of one request.

    The server calls `ask_hooks`, then `start`, then `room` and `advance` (or `feed`) for the body,
    then `finish`, or `abort` if the body breaks off. Every await may raise `Dropped`, which ends
    the connection.
    """

    def __init__(self, site: Site, request: Request) -> None:
        self.request = request
        self.entry: Entry = site.journal.open(request)
        self.received = 0  # bytes of the body
        # Must be awaited after bytes of the body have arrived. None if there is nothing to await.
        self.pace: Callable[[], Awaitable[None]] | None = None
        self._site = site
        # The decision of `start`: one of the two is set.
        self._reception: Reception | None = None
        self._answer: Answer | None = None
        # Buffer for bytes that are dropped. None until it is needed.
        self._scratch: bytearray | None = None
        # The buffer that `room` returned last, for faults that alter the body.
        self._room: memoryview | None = None
        # The faults that apply to this exchange. None if the site has no fault rules.
        self._injection: Injection | None = None
        if site.faults.rules:
            request.kind = self.entry.kind = site.kind_of(request)
            self._injection = site.faults.injection(request, self.entry)

    def ask_hooks(self) -> Decision | Awaitable[Decision | None] | None:
        """Return the decision of faults or the intercept. None leaves the decision to the site.

        The result may be an awaitable.
        """
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
        """Decide on the head. `override` is the decision of `ask_hooks`, which has precedence."""
        decided = self._site.start(self.request) if override is None else override
        if self._site.start_later is None:
            self.entry.tampered = override is not None
        self.entry.kind = self.request.kind  # a token service changes it for its own path
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
        """Whether the answer is sent before the body is read."""
        answer = self._answer
        if not isinstance(answer, Response) or answer.early is False:
            return False
        length = self.request.length()
        is_long = self.request.is_chunked or (length is not None and length > DRAINED)
        return bool(answer.early) or is_long

    @property
    def _destination(self) -> Body | None:
        """The destination of the next bytes of the body. None if they are counted and dropped."""
        reception = self._reception
        if reception is None or (reception.limit is not None and self.received >= reception.limit):
            return None
        return reception.content

    def room(self, expected: int) -> memoryview:
        """Return a buffer for the next bytes of the body.

        `expected` is the number still to come.
        """
        destination = self._destination
        if destination is None:
            if self._scratch is None:
                self._scratch = bytearray(1 << 18)
            room = memoryview(self._scratch)
        else:
            room = destination.room(expected)
        if self._injection is not None:
            room = self._room = room[: self._injection.limit(self.received)]
        return room

    def advance(self, count: int) -> None:
        """Process the first `count` bytes of the buffer that `room` returned."""
        if self._injection is not None and self._room is not None:
            self._injection.alter(self._room[:count], self.received)
        destination = self._destination
        if destination is not None:
            destination.advance(count)
        self.received += count
        self.entry.request_bytes = self.received

    def feed(self, data: bytes) -> None:
        """Process bytes of the body that were not received into the buffer of `room`.

        Raises Dropped if a fault ends the connection at one of these bytes.
        """
        while data and self._injection is not None:
            part = bytearray(data[: self._injection.limit(self.received)])
            data = data[len(part) :]
            self._injection.alter(memoryview(part), self.received)
            self._take(bytes(part))
            self._injection.check(self.received)
        if data:
            self._take(data)

    def _take(self, data: bytes) -> None:
        destination = self._destination
        if destination is not None:
            destination.feed(data)
        self.received += len(data)
        self.entry.request_bytes = self.received

    def finish(self) -> Answer | Awaitable[Answer | Wire]:
        """Return the answer. The body is complete, or the answer does not need it."""
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
        """End the exchange without an answer, because the body broke off."""
        if self._reception is not None and self._reception.abort is not None:
            self._reception.abort()
        self._reception = None


class Site:
    """An HTTP service that a server can serve."""

    # An asynchronous replacement for `start`. A subclass may define it.
    start_later: Callable[[Request], Awaitable[Decision]] | None = None

    def __init__(self) -> None:
        self.journal = Journal()
        # Applied before all else to requests, and after all else to answers.
        self.faults = Faults()
        # Called with each request that no fault has answered. It may answer instead of `start`, and
        # may be asynchronous.
        self.intercept: Intercept | None = None
        # Called with each answer. It returns the answer to send.
        self.amend: Callable[[Request, Answer], Answer] | None = None

    def start(self, request: Request) -> Decision:
        """Decide on a request's head: answer it, or receive the body first."""
        raise NotImplementedError

    def kind_of(self, request: Request) -> str:
        """Return the kind of a request's path. A token service recognises its own path."""
        return request.kind

    def open(self, request: Request) -> Exchange:
        """Begin an exchange."""
        return Exchange(self, request)

    def handle(self, request: Request) -> Answer:
        """Run a whole exchange in memory, with `request.body` as the body.

        Raises TypeError if the exchange would have to wait or to break a connection, which needs a
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
        response = _at_once(answer) if inspect.isawaitable(answer) else answer
        if isinstance(response, Response):
            if request.method != "HEAD":
                exchange.entry.response_bytes = response.size
            return response
        if isinstance(response, bytes):
            return response
        raise TypeError("an answer in pieces needs a server")

    def request(
        self, method: str, target: str, headers: Headers = (), body: bytes | None = None
    ) -> Response:
        """Return the answer to a request without a server.

        Host and Content-Length are added unless `headers` has them.
        """
        names: Sequence[str] = [name.lower() for name, _ in headers]
        added = [("host", "registry.test")] if "host" not in names else []
        has_body = body is not None or method in ("POST", "PUT", "PATCH")
        if has_body and "content-length" not in names and "transfer-encoding" not in names:
            added.append(("content-length", str(len(body or b""))))
        answer = self.handle(Request(method, target, [*added, *headers], body or b""))
        assert isinstance(answer, Response), "this request is answered with raw bytes: use a server"
        return answer


def _at_once(waiting: Awaitable[Any]) -> Any:
    """Return the result of a coroutine that ends without waiting. Raises TypeError if it waits."""
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
