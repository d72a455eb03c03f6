"""Faults: what goes wrong with exchanges, in front of a registry of any kind.

A rule says which exchanges it strikes, at which occurrences, and what its verbs do to them:

    faults.on("PATCH", "upload", repository="app/web").nth(2).drop(after=64 * 1024)
    faults.on("GET", "blob").first(2).delay(30).status(503, retry_after=5)
    faults.on("GET HEAD", "manifest").chance(0.1).lie("Docker-Content-Digest")

All rules that match an exchange take effect in the order in which they were written, up to and
including the first one that ends the exchange, by an answer in the registry's place or by dropping
the connection. Later rules do not count that exchange. So two rules for the first answer apply to
the first two answers. At one place of an exchange, verbs that wait act before one that ends it.

Invariants: the same seed, rules and requests give the same faults, also if requests of different
names arrive in another order. Only anyio waits, so that waits take no time on a virtual clock. A
verb that cannot be applied to an exchange leaves it unchanged. `check` reports a rule that never
struck, and a verb that never took effect. Bytes of a body are counted in the journal's entry before
they are sent; framing is not counted.
Follows: RFC 9110 (Retry-After, redirection, challenges), RFC 9112 (framing) and
docs/protocol-facts.md sections 1.7 to 1.13 and 2.1.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from functools import partial
from http.client import responses
from typing import Any, Literal, NamedTuple, TypeAlias

import anyio
import anyio.from_thread
import anyio.lowlevel

# The function is imported itself, so that faults still wait if a test replaces `anyio.sleep`.
from anyio import sleep

from .journal import Entry, Selector
from .messages import Answer, Headers, Request, Response
from .messages import error as error_answer

__all__ = ["Dropped", "Faults", "Injection", "Rule", "Wire", "bodiless", "head_of", "with_framing"]

# Whose body.
Side: TypeAlias = "Literal['request', 'response']"
# A place of an exchange: nothing has been carried out, all has been but the answer is not sent, or
# half of the answer's head is sent.
At: TypeAlias = "Literal['request', 'answer', 'head']"

# Default error codes, by status (docs/protocol-facts.md section 1.12).
_CODES = {
    401: "UNAUTHORIZED",
    403: "DENIED",
    405: "UNSUPPORTED",
    429: "TOOMANYREQUESTS",
    503: "UNAVAILABLE",
}
_PIECES_PER_SECOND = 10  # of a throttled body
_ON_THE_WAY = ("before", "head", "response body", "after")  # places in the bytes of an answer
_SMALLEST_PIECE = 16  # bytes of a throttled body, even if that makes fewer pieces per second


# An answer as it is sent.


class Dropped(Exception):
    """The connection ends here without an answer. It is reset if `reset`, else closed."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__("reset" if reset else "closed")
        self.reset = reset


class Wire(NamedTuple):
    """A whole answer that is sent in pieces: head, body and framing."""

    pieces: AsyncGenerator[bytes | memoryview, None]
    close: bool  # whether the connection is closed afterwards


def head_of(status: int, headers: Headers) -> bytes:
    """Return the bytes of a head. The reason phrase of an unknown status is `Status`."""
    lines = [
        f"HTTP/1.1 {status} {responses.get(status, 'Status')}",
        *(f"{name}: {value}" for name, value in headers),
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


def bodiless(method: str, status: int) -> bool:
    """Report whether an answer has no body, regardless of its headers."""
    return method == "HEAD" or status in (204, 304) or 100 <= status < 200


def with_framing(answer: Response) -> list[tuple[str, str]]:
    """Return the headers of an answer. Framing headers are added if they are missing."""
    headers = list(answer.headers)
    names = {name.lower() for name, _ in headers}
    if answer.status not in (204, 304) and not names & {"content-length", "transfer-encoding"}:
        headers.append(("Content-Length", str(answer.size)))
    if answer.close and "connection" not in names:
        headers.append(("Connection", "close"))
    return headers


# A part of an answer on its way: bytes of the body (memoryview), other bytes, or something that
# happens at this point and may say bytes of its own.
_Step: TypeAlias = "memoryview | bytes | Callable[[], Awaitable[Answer | None]]"


async def _play(steps: Sequence[_Step], entry: Entry) -> AsyncGenerator[bytes | memoryview, None]:
    for step in steps:
        if isinstance(step, memoryview):
            entry.response_bytes += len(step)
            yield step
        elif isinstance(step, bytes):
            yield step
        else:
            said = await step()
            if isinstance(said, bytes):
                yield said


def _cut(steps: list[_Step], after: int) -> tuple[list[_Step], list[_Step]] | None:
    """Divide steps after some bytes, and after what happens there. None if there are fewer."""
    for number, step in enumerate(steps):
        if not isinstance(step, (memoryview, bytes)):
            continue
        if len(step) > after:
            return [*steps[:number], step[:after]], [step[after:], *steps[number + 1 :]]
        after -= len(step)
    return (steps, []) if after == 0 else None


def _in_chunks(body: list[_Step]) -> list[_Step]:
    """Return a body in chunked coding, with the last chunk."""
    coded: list[_Step] = []
    for step in body:
        if isinstance(step, memoryview) and step:
            coded += [b"%x\r\n" % len(step), step, b"\r\n"]
        elif not isinstance(step, memoryview):
            coded.append(step)
    return [*coded, b"0\r\n\r\n"]


# Verbs, and what they do to one exchange.


class Gate:
    """An event for which stalled exchanges wait. Any thread may open it. It stays open."""

    def __init__(self) -> None:
        self._is_open = False
        # For each waiting task: its thread, its event loop, and the event that wakes it.
        self._waiting: list[tuple[int, anyio.lowlevel.EventLoopToken, anyio.Event]] = []

    async def wait(self) -> None:
        waiter = (threading.get_ident(), anyio.lowlevel.current_token(), anyio.Event())
        # `open` may run in between: it finds the waiter, or the waiter finds it open.
        self._waiting.append(waiter)
        try:
            if not self._is_open:
                await waiter[2].wait()
        finally:
            self._waiting.remove(waiter)

    def open(self) -> None:
        """End all waits, and prevent further ones."""
        self._is_open = True
        for thread, token, event in tuple(self._waiting):
            if thread == threading.get_ident():
                event.set()
            else:
                anyio.from_thread.run_sync(event.set, token=token)


@dataclass(eq=False, kw_only=True)
class Effect:
    """One verb of a rule: where it acts, and what it does there."""

    text: str  # the verb in words
    # Where: at an `At`; "before" or "after" the whole answer; in its "headers"; or, if `after` is
    # set, behind so many bytes of the body of a side. The side None is the request for POST, PUT
    # and PATCH, else the response.
    at: str = "request"
    after: int | None = None
    of: Side | None = None

    # What happens there, in this order: a wait, the end of the connection, an answer.
    seconds: float = 0.0
    gate: Gate | None = None
    reset: bool | None = None  # whether the end is a reset. None: the connection does not end
    answer: Callable[[Request], Answer] | None = None
    # Or what it does to a body: end it, move so many bytes a second, or change bytes in place. The
    # arguments are the bytes, the position of the first and the size of the body if it is known;
    # the result is whether something changed.
    ends_body: bool = False
    rate: int | None = None
    change: Callable[[memoryview, int, int | None], bool] | None = None
    # Changes the headers of an answer. Returns whether the verb has taken effect by that.
    amend: Callable[[Request, Response], bool] | None = None

    @property
    def ends_exchange(self) -> bool:
        """Whether the verb answers the request or ends the connection."""
        answers = self.answer is not None and self.at in ("request", "answer")
        return answers or self.reset is not None

    def __str__(self) -> str:
        return self.text


class Strike:
    """A verb in one exchange."""

    def __init__(self, rule: Rule, effect: Effect, request: Request, entry: Entry) -> None:
        self.effect = effect
        own = "request" if request.method in ("POST", "PUT", "PATCH") else "response"
        self.place = effect.at if effect.after is None else f"{effect.of or own} body"
        self.offset = effect.after or 0  # in that body, in bytes
        self.took_place = False
        self._rule = rule
        self._request = request
        self._entry = entry

    def record(self) -> None:
        """Record that the verb has taken effect. Later calls do nothing."""
        if not self.took_place:
            self.took_place = True
            self._rule.record(self.effect, self._entry)

    def drop(self) -> None:
        """Raise Dropped if the verb ends the connection."""
        if self.effect.reset is not None:
            self.record()
            raise Dropped(reset=self.effect.reset)

    async def act(self) -> Answer | None:
        """Wait, end the connection by raising Dropped, or return an answer."""
        self.record()
        if self.effect.seconds:
            await sleep(self.effect.seconds)
        if self.effect.gate is not None:
            await self.effect.gate.wait()
        self.drop()
        return None if self.effect.answer is None else self.effect.answer(self._request)

    def alter(self, data: memoryview, offset: int, size: int | None = None) -> bool:
        """Change bytes of a body in place. Returns whether any was changed."""
        is_changed = self.effect.change is not None and self.effect.change(data, offset, size)
        if is_changed:
            self.record()
        return is_changed

    def amend(self, answer: Response) -> None:
        if self.effect.amend is not None and self.effect.amend(self._request, answer):
            self.record()

    @property
    def piece(self) -> int:
        """The number of bytes that are sent or received at once."""
        return max(_SMALLEST_PIECE, (self.effect.rate or 0) // _PIECES_PER_SECOND)

    async def pause(self, count: int) -> None:
        """Wait for as long as `count` bytes take."""
        if self.effect.rate and count:
            self.record()
            await sleep(count / self.effect.rate)

    async def reach(self, received: int, count: int) -> None:
        """Act when `received` bytes of the request's body are here, `count` of them new."""
        await self.pause(count)
        acts = self.effect.rate is None and self.effect.change is None
        if acts and received >= self.offset and not self.took_place:
            await self.act()

    def shape(self, body: list[_Step]) -> list[_Step]:
        """Return the body of an answer as it is to be sent."""
        if self.effect.rate is not None:
            return self._paced(body)
        if self.effect.change is not None:
            return self._changed(body)
        parts = _cut(body, self.offset)
        if parts is None:
            return body

        first, rest = parts
        if not self.effect.ends_body:
            return [*first, self.act, *rest]
        if rest:
            self.record()
        return first

    def _paced(self, body: list[_Step]) -> list[_Step]:
        paced: list[_Step] = []
        for step in body:
            if not isinstance(step, (memoryview, bytes)):
                paced.append(step)
                continue
            for start in range(0, len(step), self.piece):
                part = step[start : start + self.piece]
                paced += [partial(self.pause, len(part)), part]
        return paced

    def _changed(self, body: list[_Step]) -> list[_Step]:
        size = sum(len(step) for step in body if isinstance(step, (memoryview, bytes)))
        offset = 0
        changed: list[_Step] = []
        for step in body:
            sent = step
            if isinstance(step, (memoryview, bytes)):
                copy = bytearray(step)
                if self.alter(memoryview(copy), offset, size):
                    sent = type(step)(copy)
                offset += len(step)
            changed.append(sent)
        return changed


class Injection:
    """The verbs that struck one exchange."""

    def __init__(self, strikes: Sequence[Strike], request: Request, entry: Entry) -> None:
        # Verbs that wait, then those that end the exchange.
        self._strikes = sorted(strikes, key=lambda strike: strike.effect.ends_exchange)
        self._request = request
        self._entry = entry
        self._received = 0  # bytes of the request's body at the last `pace`

    def _at(self, place: str) -> list[Strike]:
        return [strike for strike in self._strikes if strike.place == place]

    async def before(self) -> Answer | None:
        """Let verbs act before the request is carried out. An answer replaces the registry's."""
        for strike in self._at("request"):
            answer = await strike.act()
            if answer is not None:
                return answer
        return None

    def limit(self, received: int) -> int | None:
        """Return the maximum number of bytes to receive before `pace` is awaited, or None."""
        strikes = self._at("request body")
        limits = [strike.piece for strike in strikes if strike.effect.rate]
        limits += [strike.offset - received for strike in strikes if strike.offset > received]
        return min(limits, default=None)

    def alter(self, data: memoryview, offset: int) -> None:
        """Change bytes of the request's body in place. `offset` is the position of the first."""
        for strike in self._at("request body"):
            strike.alter(data, offset)

    async def pace(self, received: int) -> None:
        """Let verbs act after bytes of the request's body have arrived. May raise Dropped."""
        count = received - self._received
        self._received = received
        for strike in self._at("request body"):
            await strike.reach(received, count)

    async def after(self, answer: Answer) -> tuple[Answer, Answer | Wire]:
        """Let verbs act on the answer. Returns the answer, and the form in which it is sent."""
        for strike in self._at("answer"):
            said = await strike.act()
            answer = answer if said is None else said

        if isinstance(answer, Response):
            for strike in self._strikes:
                strike.amend(answer)

        if not any(strike.place in _ON_THE_WAY for strike in self._strikes):
            return answer, answer
        return answer, as_wire(answer, self._request.method, self._entry, self._strikes)


def as_wire(answer: Answer, method: str, entry: Entry, strikes: Sequence[Strike] = ()) -> Wire:
    """Return an answer as it is sent, with what verbs do on the way."""
    head: list[_Step] = []
    body: list[_Step] = []
    behind: list[_Step] = []
    is_chunked = False
    if isinstance(answer, bytes):
        body = [answer]
    else:
        head = [head_of(answer.status, with_framing(answer))]
        if not bodiless(method, answer.status):
            body = [*answer.pieces()]
            is_chunked = "chunked" in answer.header("transfer-encoding").lower()

    for strike in strikes:
        if strike.place == "before":
            head.insert(0, strike.act)
        elif strike.place == "head":
            size = sum(len(step) for step in head if isinstance(step, bytes))
            first, rest = _cut(head, size // 2) or (head, [])
            head = [*first, strike.act, *rest]
        elif strike.place == "response body":
            body = strike.shape(body)
        elif strike.place == "after":
            behind.append(strike.act)

    steps = [*head, *(_in_chunks(body) if is_chunked else body), *behind]
    return Wire(_play(steps, entry), isinstance(answer, bytes) or answer.close)


# Rules.


def _name(request: Request) -> tuple[str, ...]:
    """Return the parts of a request that are the same in every run, without sessions and ports."""
    stable = [value for key, value in request.query if key in ("digest", "mount", "last", "scope")]
    reference = "" if request.kind == "upload" else request.reference or request.path
    return (request.method, request.kind, request.repository, reference, *stable)


def _wrong_value(name: str, value: str) -> str:
    """Return a wrong but well-formed value for a header."""
    if name == "content-type":
        return "text/html" if value != "text/html" else "application/json"
    if value.isdigit():
        return str(int(value) + 1)
    return value[:-1] + ("1" if value.endswith("0") else "0")


class Rule:
    """Which exchanges to strike, at which occurrences, with which verbs.

    The methods that set a condition or add a verb return the rule, so that calls can be chained.
    """

    def __init__(
        self, selector: Selector, number: int, seed: int, where: Callable[[Request], bool] | None
    ) -> None:
        self.selector = selector
        self.effects: list[Effect] = []
        self.matched = 0  # number of exchanges that the selector matched
        # The exchanges that were struck.
        self.struck: list[Entry] = []
        # The verbs that took effect, each with its exchange.
        self.done: list[tuple[Effect, Entry]] = []
        self._number = number  # among the rules of the server, from 1
        self._seed = seed
        self._where = where  # a condition in addition to the selector
        # Reports whether an occurrence is struck. None: all occurrences.
        self._occurrence: Callable[[int], bool] | None = None
        self._chance = 1.0  # probability of a strike
        self._is_optional = False  # whether `check` passes if the rule never strikes
        # The conditions in words, for `str`.
        self._words: list[str] = []
        # Number of random numbers drawn, by the name of the request.
        self._draws: Counter[tuple[str, ...]] = Counter()
        # Upload sessions that `forget` has struck.
        self._forgotten: set[str] = set()
        # Notified when a verb takes effect. Guards `done`.
        self._changed = threading.Condition()

    # Which occurrence.

    def nth(self, *numbers: int) -> Rule:
        """Strike these occurrences, counted from 1."""
        return self._set_occurrence("nth", numbers, lambda n: n in numbers)

    def first(self, number: int = 1) -> Rule:
        """Strike the first `number` occurrences."""
        return self._set_occurrence("first", [number], lambda n: n <= number)

    def since(self, number: int) -> Rule:
        """Strike the `number`th occurrence and all later ones."""
        return self._set_occurrence("since", [number], lambda n: n >= number)

    def _set_occurrence(
        self, word: str, numbers: Sequence[int], occurrence: Callable[[int], bool]
    ) -> Rule:
        if not numbers or min(numbers) < 1:
            raise ValueError("occurrences are counted from 1")
        if self._occurrence is not None:
            raise ValueError(f"{self}: which occurrence was said already, now {word}")
        self._occurrence = occurrence
        self._words.append(f"{word}={','.join(map(str, numbers))}")
        return self

    def chance(self, probability: float) -> Rule:
        """Strike with a probability.

        Each decision depends on the seed, the name of the request and the number of earlier
        decisions for that name. So it does not depend on the order of different requests.
        """
        if not 0 < probability <= 1:
            raise ValueError("a probability is above 0 and at most 1")
        self._chance = probability
        self._words.append(f"chance={probability:g}")
        return self

    def optional(self) -> Rule:
        """Make `check` pass even if the rule never strikes or a verb never takes effect."""
        self._is_optional = True
        self._words.append("optional")
        return self

    def strikes(self, request: Request, entry: Entry) -> bool:
        """Count an exchange if it matches, and report whether it is struck."""
        if request.kind == "upload" and request.reference in self._forgotten:
            return True
        if not self.selector.matches(request):
            return False
        if self._where is not None and not self._where(request):
            return False

        self.matched += 1
        if self._occurrence is not None and not self._occurrence(self.matched):
            return False
        if self._chance < 1 and self._draw(_name(request)) >= self._chance:
            return False
        self.struck.append(entry)
        return True

    def _draw(self, name: tuple[str, ...]) -> float:
        """Return a pseudo-random number in [0, 1) for a name, another one at each call."""
        self._draws[name] += 1
        text = "\n".join(map(str, (self._seed, self._number, *name, self._draws[name])))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64

    # What happens: verbs that answer instead of the registry.

    def status(
        self,
        code: int,
        error: str | None = None,
        retry_after: float | datetime | str | None = None,
        body: bytes | None = None,
        at: At = "request",
        early: bool | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Rule:
        """Answer with a status, and with `body` or an error body with the code `error`.

        `retry_after` is in seconds, a time, or the text of the header. For `early` see
        `Response.early`. At "answer" the registry has carried out the request.
        """
        if not 200 <= code <= 999:
            raise ValueError(f"{code} is no final status")
        sent = list((headers or {}).items())
        if isinstance(retry_after, datetime):
            retry_after = format_datetime(retry_after, usegmt=True)
        elif isinstance(retry_after, (int, float)):
            retry_after = str(math.ceil(retry_after))
        if retry_after is not None:
            sent.append(("Retry-After", retry_after))

        def answer(request: Request) -> Answer:
            if body is None and code >= 400:
                named = error or _CODES.get(code, "UNKNOWN")
                given = error_answer(code, named, "as the test wants it", headers=sent)
            else:
                given = Response(code, list(sent), body or b"")
            given.early = early
            return given

        return self._add(f"status {code}", at=at, answer=answer)

    def redirect(self, to: str = "", code: int = 307) -> Rule:
        """Redirect to an origin (with the same path), a path (at the same origin) or a URL.

        Without `to` the client is redirected to the same URL.
        """
        is_origin = re.fullmatch(r"(?:https?://[^/?#]*)?", to) is not None

        def answer(request: Request) -> Answer:
            return Response(code, [("Location", to + request.target if is_origin else to)])

        return self._add(f"redirect {to}", answer=answer)

    def challenge(
        self, words: str = "", *, realm: str = "", service: str = "", error: str = ""
    ) -> Rule:
        """Answer 401 with a challenge: `words`, or one for a bearer token that is made of the rest."""
        if bool(words) == bool(realm):
            raise ValueError("a challenge is words or a realm")
        named = {"realm": realm, "service": service, "error": error}
        made = ",".join(f'{name}="{value}"' for name, value in named.items() if value)
        return self.status(401, headers={"WWW-Authenticate": words or f"Bearer {made}"})

    def forget(self) -> Rule:
        """Lose an upload session: answer 404 to this and all later requests of the session."""
        if self.selector.kinds != ["upload"]:
            raise ValueError("only an upload can be forgotten: on(..., 'upload')")

        def answer(request: Request) -> Answer:
            self._forgotten.add(request.reference)
            return error_answer(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")

        return self._add("forget", answer=answer)

    def raw(self, data: bytes, where: Literal["instead", "before", "after"] = "instead") -> Rule:
        """Send literal bytes before or after the answer, or instead of it and close."""
        at = "request" if where == "instead" else where
        return self._add(f"raw {where}", at=at, answer=lambda request: data)

    # Verbs that wait or end the connection: at a place, or after so many bytes of a body.

    def delay(
        self, seconds: float, after: int | None = None, of: Side | None = None, at: At = "request"
    ) -> Rule:
        """Wait for `seconds`."""
        return self._add_at("delay", after, of, at, seconds=float(seconds))

    def stall(self, after: int | None = None, of: Side | None = None, at: At = "request") -> Rule:
        """Wait until the rule is released."""
        return self._add_at("stall", after, of, at, gate=Gate())

    def drop(
        self,
        after: int | None = None,
        of: Side | None = None,
        at: At = "request",
        *,
        reset: bool = False,
    ) -> Rule:
        """Close the connection, or reset it.

        The system also resets a connection that is closed while bytes of the request are unread.
        """
        return self._add_at("drop", after, of, at, reset=reset)

    def _add_at(self, verb: str, after: int | None, of: Side | None, at: At, **what: Any) -> Rule:
        if after is not None and at != "request":
            raise ValueError("either after bytes or at a place")
        if of is not None and after is None:
            raise ValueError("of needs after: how many bytes of it")
        where = at if after is None else after
        return self._add(f"{verb} {where}", at=at, after=after, of=of, **what)

    # Verbs that make bodies and headers slow or wrong.

    def throttle(self, rate: int, of: Side | None = None) -> Rule:
        """Move a body at `rate` bytes a second."""
        if rate < 1:
            raise ValueError("throttle to at least one byte a second")
        return self._add(f"throttle {rate}", after=0, of=of, rate=rate)

    def truncate(self, at: int, framing: Literal["length", "chunked"] = "length") -> Rule:
        """End the response's body after `at` bytes, with correct framing for the shorter body.

        `framing` is "length" for Content-Length or "chunked" for chunked coding. `drop` makes a
        body that is shorter than its Content-Length.
        """

        def amend(request: Request, answer: Response) -> bool:
            if bodiless(request.method, answer.status):
                return False
            names = ("content-length", "transfer-encoding")
            headers = [each for each in answer.headers if each[0].lower() not in names]
            length = ("Content-Length", str(min(at, answer.size)))
            coding = ("Transfer-Encoding", "chunked")
            answer.headers = [*headers, length if framing == "length" else coding]
            return False

        text = f"truncate {at} {framing}"
        return self._add(text, after=at, of="response", ends_body=True, amend=amend)

    def corrupt(self, at: int = 0, of: Side | None = None, *, whole: bool = False) -> Rule:
        """Change one bit of the byte at position `at`, or with `whole` all bytes to zero.

        A negative position is counted from the end, which is known of responses only.
        """

        def change(data: memoryview, offset: int, size: int | None) -> bool:
            if whole:
                data[:] = bytes(len(data))
                return len(data) > 0
            place = (at if at >= 0 or size is None else at + size) - offset
            if not 0 <= place < len(data):
                return False
            data[place] ^= 1
            return True

        return self._add(
            "corrupt whole" if whole else f"corrupt {at}", after=at, of=of, change=change
        )

    def lie(self, name: str = "", *, headers: Mapping[str, str | None] | None = None) -> Rule:
        """Send wrong headers.

        The header `name` gets a wrong but well-formed value if the answer has it. `headers` has
        values by name. A value of None removes the header.
        """
        if not name and not headers:
            raise ValueError("about which header?")

        def amend(request: Request, answer: Response) -> bool:
            told = with_framing(answer)
            lies = {key.lower(): (key, value) for key, value in (headers or {}).items()}
            for key, value in told:
                if key.lower() == name.lower():
                    lies[key.lower()] = (key, _wrong_value(key.lower(), value))
            if not lies:
                return False

            true = [each for each in told if each[0].lower() not in lies]
            false = [(key, value) for key, value in lies.values() if value is not None]
            answer.headers = [*true, *false]
            # Without its length, the client cannot find the start of the next answer.
            answer.close |= "content-length" in lies
            return True

        listed = ", ".join([*filter(None, [name]), *(headers or {})])
        return self._add(f"lie {listed}", at="headers", amend=amend)

    def _add(self, text: str, **what: Any) -> Rule:
        effect = Effect(text=text, **what)
        if effect.ends_exchange and self.ends_exchange:
            raise ValueError(f"{self}: an exchange ends once; also {effect}")
        self.effects.append(effect)
        return self

    @property
    def ends_exchange(self) -> bool:
        """Whether a strike ends the exchange, so that later rules do not apply to it."""
        return any(effect.ends_exchange for effect in self.effects)

    # What has happened.

    def record(self, effect: Effect, entry: Entry) -> None:
        """Record that a verb has taken effect in an exchange."""
        with self._changed:
            self.done.append((effect, entry))
            entry.faults.append(str(effect))
            self._changed.notify_all()

    def wait(self, timeout: float = 30.0) -> None:
        """Block this thread until a verb has taken effect.

        Raises AssertionError after `timeout` seconds.
        """
        with self._changed:
            is_done = self._changed.wait_for(lambda: bool(self.done), timeout)
        assert is_done, f"in {timeout:g} s: {self.report()}"

    def release(self) -> None:
        """End all stalls of this rule, and prevent further ones."""
        for effect in self.effects:
            if effect.gate is not None:
                effect.gate.open()

    def problems(self) -> list[str]:
        """Return descriptions of the faults that did not happen."""
        if not self.effects:
            return [f"no verb: {self}"]
        if self._is_optional:
            return []
        if not self.struck:
            return [f"never struck: {self.report()}"]
        done = [effect for effect, _ in self.done]
        return [
            f"struck and did not take place: {effect} in {self}"
            for effect in self.effects
            if effect not in done
        ]

    def report(self) -> str:
        """Describe the strikes of this rule and their exchanges."""
        lines = [f"{self}: {self.matched} matched, {len(self.struck)} struck"]
        for entry in tuple(self.struck):
            done = [str(effect) for effect, hit in tuple(self.done) if hit is entry]
            lines.append(f"    {', '.join(done) or 'nothing took place'}: {entry}")
        return "\n".join(lines)

    def __str__(self) -> str:
        conditions = " ".join([str(self.selector), *self._words])
        return f"{conditions}: {', '.join(map(str, self.effects))}"


class Faults:
    """The rules of one server."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.rules: list[Rule] = []

    def on(
        self,
        method: str | None = None,
        kind: str | None = None,
        *,
        repository: str | None = None,
        reference: str | None = None,
        host: str | None = None,
        path: str | None = None,
        header: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        where: Callable[[Request], bool] | None = None,
    ) -> Rule:
        """Add a rule for the requests that satisfy all conditions (see `Selector`).

        `where` is a predicate on the request.
        """
        globs = {"repository": repository, "reference": reference, "host": host, "path": path}
        selector = Selector(method, kind, header=header, query=query, **globs)
        rule = Rule(selector, len(self.rules) + 1, self.seed, where)
        self.rules.append(rule)
        return rule

    def injection(self, request: Request, entry: Entry) -> Injection | None:
        """Return the verbs that strike an exchange, or None if no rule strikes it."""
        strikes: list[Strike] = []
        for rule in tuple(self.rules):
            if rule.effects and rule.strikes(request, entry):
                strikes += [Strike(rule, effect, request, entry) for effect in rule.effects]
                if rule.ends_exchange:
                    break
        return Injection(strikes, request, entry) if strikes else None

    def release(self) -> None:
        """End all stalls, and prevent further ones."""
        for rule in self.rules:
            rule.release()

    def clear(self) -> None:
        """Remove all rules, and end their stalls."""
        self.release()
        self.rules.clear()

    def report(self) -> str:
        """Describe the strikes of all rules."""
        return "\n".join(rule.report() for rule in self.rules)

    def check(self) -> None:
        """Raise AssertionError if a rule never struck, or if one of its verbs never took effect."""
        problems = [problem for rule in self.rules for problem in rule.problems()]
        listed = "\n".join(problems)
        assert not problems, f"faults that were asked for:\n{listed}"
