"""The verbs of fault rules.

Owns: a class for each verb.
May not know: sockets, which exchange is struck (rules.py), what a registry holds.
Invariants: only anyio waits, so that waits take no time on a virtual clock. A verb that cannot be
applied to an exchange leaves it unchanged and does not call `record`.
Follows: RFC 9110 (Retry-After, redirection, challenges), RFC 9112 (framing) and
docs/protocol-facts.md sections 1.7 to 1.13 and 2.1.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import format_datetime
from typing import ClassVar, Literal, TypeAlias

# The function is imported itself, so that faults still wait if a test replaces `anyio.sleep`.
from anyio import sleep

from ..messages import Answer, Request, Response, error
from .injection import Effect, Gate, require_one_of
from .wire import Dropped, Pieces, Streamed, bodiless, pieces_of, size_of, with_framing

__all__ = [
    "Challenge",
    "Corrupt",
    "Delay",
    "Drop",
    "Forget",
    "Lie",
    "Raw",
    "Redirect",
    "Stall",
    "Status",
    "Throttle",
    "Truncate",
]

# Whose body.
Side: TypeAlias = "Literal['request', 'response']"
# A place of an exchange (see `_Answering` and `_Placed`).
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
_SMALLEST_PIECE = 16  # bytes of a throttled body, even if that makes fewer pieces per second


# Verbs that answer instead of the registry.


class _Answering(Effect):
    """A verb that answers instead of the registry.

    If `at` is "request", the registry does not carry out the request. If `at` is "answer", the
    registry carries it out, and the verb's answer replaces the registry's.
    """

    at: At = "request"
    early: bool | None = None  # see `Response.early`

    @property
    def ends_exchange(self) -> bool:
        return True

    def answer(self, request: Request) -> Answer:
        raise NotImplementedError

    def _take_effect(self, request: Request) -> Answer:
        self.record()
        answer = self.answer(request)
        if isinstance(answer, Response):
            answer.early = self.early
        return answer

    def _is_at(self, place: str) -> bool:
        return self.at == place

    async def on_head(self, request: Request) -> Answer | None:
        return self._take_effect(request) if self._is_at("request") else None

    def on_carried_out(self, request: Request, answer: Answer) -> Answer:
        return self._take_effect(request) if self._is_at("answer") else answer


@dataclass
class Status(_Answering):
    """Answer with a status, and with `body` or an error body with the code `error`.

    `retry_after` is in seconds, a time, or the text of the header. For `early` see
    `Response.early`.
    """

    verb: ClassVar[str] = "status"
    code: int
    error: str | None = None
    retry_after: float | datetime | str | None = None
    body: bytes | None = None
    at: At = "request"
    early: bool | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_one_of("at", self.at, ("request", "answer"))
        if not 200 <= self.code <= 999:
            raise ValueError(f"{self.code} is no final status")

    def answer(self, request: Request) -> Answer:
        headers = list(self.headers.items())
        if isinstance(self.retry_after, datetime):
            headers.append(("Retry-After", format_datetime(self.retry_after, usegmt=True)))
        elif isinstance(self.retry_after, (int, float)):
            headers.append(("Retry-After", str(math.ceil(self.retry_after))))
        elif self.retry_after is not None:
            headers.append(("Retry-After", self.retry_after))

        if self.body is not None or self.code < 400:
            answer = Response(self.code, headers, self.body or b"")
        else:
            code = self.error or _CODES.get(self.code, "UNKNOWN")
            answer = error(self.code, code, "as the test wants it", headers=headers)
        return answer


@dataclass
class Redirect(_Answering):
    """Redirect the client to an origin (with the same path), a path (at the same origin) or a URL.

    Without `to` the client is redirected to the same URL.
    """

    verb: ClassVar[str] = "redirect"
    to: str = ""
    code: int = 307

    def __post_init__(self) -> None:
        require_one_of("code", self.code, (301, 302, 303, 307, 308))

    def answer(self, request: Request) -> Answer:
        is_origin_or_empty = re.fullmatch(r"(?:https?://[^/?#]*)?", self.to) is not None
        target = self.to + request.target if is_origin_or_empty else self.to
        return Response(self.code, [("Location", target)])


@dataclass
class Challenge(_Answering):
    """Answer with a challenge. Each string of `words` is the value of a WWW-Authenticate header.

    Without `words`, a Bearer challenge is made from `realm`, `service` and `error`.
    """

    verb: ClassVar[str] = "challenge"
    words: str | tuple[str, ...] = ()
    realm: str = ""
    service: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        if bool(self.words) == bool(self.realm):
            raise ValueError("a challenge is words or a realm")

    def answer(self, request: Request) -> Answer:
        words = (self.words,) if isinstance(self.words, str) else self.words
        if not words:
            named = ("realm", "service", "error")
            listed = [f'{name}="{getattr(self, name)}"' for name in named if getattr(self, name)]
            words = (f"Bearer {','.join(listed)}",)
        headers = [("WWW-Authenticate", line) for line in words]
        return error(401, "UNAUTHORIZED", "authentication required", headers=headers)


@dataclass
class Forget(_Answering):
    """Lose an upload session: answer 404 to this and all later requests of the session."""

    verb: ClassVar[str] = "forget"

    def answer(self, request: Request) -> Answer:
        return error(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")


@dataclass
class Raw(_Answering):
    """Send literal bytes before or after the answer, or instead of it and close the connection."""

    verb: ClassVar[str] = "raw"
    data: bytes
    where: Literal["instead", "before", "after"] = "instead"

    def __post_init__(self) -> None:
        require_one_of("where", self.where, ("instead", "before", "after"))

    @property
    def ends_exchange(self) -> bool:
        return self.where == "instead"

    def _is_at(self, place: str) -> bool:
        return self.ends_exchange and self.at == place

    def answer(self, request: Request) -> Answer:
        return self.data

    def is_shaping(self, request: Request) -> bool:
        return self.where != "instead"

    async def surround(self, pieces: Pieces) -> Pieces:
        self.record()
        if self.where == "before":
            yield self.data
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
        if self.where == "after":
            yield self.data


# Verbs that wait, or end the connection, at a place of the exchange.


class _Placed(Effect):
    """A verb that acts at one place of an exchange."""

    # Act after this number of bytes of a body.
    after: int | None
    # Whose body. None: the request's for POST, PUT and PATCH, else the response's.
    of: Side | None
    # Without `after`: act when the request's head has arrived and nothing has been carried out
    # ("request"), when the request has been carried out but not answered ("answer"), or in the
    # middle of the answer's head ("head").
    at: At

    # Set by `prepare`. The place in the exchange: "request", "request body", "answer", "head" or
    # "response body".
    place: str
    # The number of bytes of that body after which the verb acts.
    offset: int

    async def strike(self) -> None:
        """Wait, or raise Dropped."""
        raise NotImplementedError

    def _check_place(self) -> None:
        """Raise ValueError if the parameters of the place contradict each other."""
        require_one_of("at", self.at, ("request", "answer", "head"))
        require_one_of("of", self.of, (None, "request", "response"))
        if self.after is not None and self.after < 0:
            raise ValueError("after is a number of bytes")
        if self.of is not None and self.after is None:
            raise ValueError("of needs after: how many bytes of it")
        if self.at != "request" and self.after is not None:
            raise ValueError("either after bytes or at a place")

    def prepare(self, request: Request) -> None:
        own = "request" if request.method in ("POST", "PUT", "PATCH") else "response"
        self.place = f"{self.of or own} body" if self.after is not None else str(self.at)
        self.offset = self.after or 0

    async def on_head(self, request: Request) -> Answer | None:
        if self.place == "request":
            await self.strike()
        return None

    def limit(self, received: int) -> int | None:
        if self.place == "request body" and self.offset > received:
            return self.offset - received
        return None

    async def pace(self, count: int, received: int) -> None:
        if self.place == "request body" and received >= self.offset and not self.took_place:
            await self.strike()

    async def on_answer(self, request: Request, answer: Answer) -> Answer:
        if self.place == "answer":
            await self.strike()
        return answer

    def is_shaping(self, request: Request) -> bool:
        return self.place in ("head", "response body")

    async def _strike_in_body(self, pieces: Pieces) -> Pieces:
        sent = 0
        async with aclosing(pieces):
            async for piece in pieces:
                rest = memoryview(piece)
                if sent + len(rest) >= self.offset and not self.took_place:
                    if self.offset > sent:
                        yield rest[: self.offset - sent]
                        rest = rest[self.offset - sent :]
                        sent = self.offset
                    await self.strike()
                if rest:
                    yield rest
                    sent += len(rest)

    def stream(self, pieces: Pieces, size: int | None) -> Pieces:
        return self._strike_in_body(pieces) if self.place == "response body" else pieces

    async def _strike_in_head(self, pieces: Pieces) -> Pieces:
        async with aclosing(pieces):
            async for piece in pieces:
                if not self.took_place:
                    yield piece[: len(piece) // 2]
                    await self.strike()
                    piece = piece[len(piece) // 2 :]
                yield piece

    def surround(self, pieces: Pieces) -> Pieces:
        return self._strike_in_head(pieces) if self.place == "head" else pieces


@dataclass
class Delay(_Placed):
    """Wait for `seconds`."""

    verb: ClassVar[str] = "delay"
    seconds: float
    after: int | None = None
    of: Side | None = None
    at: At = "request"

    def __post_init__(self) -> None:
        self._check_place()
        self.seconds = float(self.seconds)

    async def strike(self) -> None:
        self.record()
        await sleep(self.seconds)


@dataclass
class Stall(_Placed):
    """Wait until the gate `until` is open (`Faults.release`)."""

    verb: ClassVar[str] = "stall"
    after: int | None = None
    of: Side | None = None
    at: At = "request"
    until: Gate = field(default_factory=Gate, repr=False)

    def __post_init__(self) -> None:
        self._check_place()

    async def strike(self) -> None:
        self.record()
        await self.until.wait()


@dataclass
class Drop(_Placed):
    """Close the connection, or reset it if `reset`.

    The system also resets a connection that is closed while bytes of the request are unread.
    """

    verb: ClassVar[str] = "drop"
    after: int | None = None
    of: Side | None = None
    at: At = "request"
    reset: bool = False

    def __post_init__(self) -> None:
        self._check_place()

    @property
    def ends_exchange(self) -> bool:
        return True

    async def strike(self) -> None:
        self.record()
        raise Dropped(reset=self.reset)

    def check(self, received: int) -> None:
        if self.place == "request body" and received >= self.offset:
            self.record()
            raise Dropped(reset=self.reset)


# Verbs that make bodies and heads slow or wrong.


@dataclass
class Throttle(Effect):
    """Limit a body to `rate` bytes a second, or answer 429 after `requests` in `seconds`."""

    verb: ClassVar[str] = "throttle"
    rate: int | None = None
    of: Side | None = None
    requests: int | None = None
    seconds: float = 1.0
    # Seconds for Retry-After. The pattern sets it, and the copies for refused exchanges inherit it.
    wait: float = field(default=0.0, repr=False)
    # When requests were admitted within the last `seconds`. Only the pattern of a rule uses it.
    _admitted: deque[float] = field(default_factory=deque, init=False, repr=False)

    def __post_init__(self) -> None:
        require_one_of("of", self.of, (None, "request", "response"))
        if (self.rate is None) == (self.requests is None):
            raise ValueError("throttle takes a rate in bytes a second or a number of requests")
        if (self.rate or self.requests or 0) < 1 or self.seconds <= 0:
            raise ValueError("throttle to at least one")
        self.seconds = float(self.seconds)

    @property
    def ends_exchange(self) -> bool:
        return self.requests is not None

    async def on_head(self, request: Request) -> Answer | None:
        if self.requests is None:
            return None
        self.record()
        after = [("Retry-After", str(math.ceil(self.wait)))]
        return error(429, "TOOMANYREQUESTS", "too many requests", headers=after)

    def try_admit(self, now: float) -> bool:
        """Report whether one more request is admitted, and count it if so.

        Sets `wait` otherwise.
        """
        if self.requests is None:
            return False
        while self._admitted and self._admitted[0] <= now - self.seconds:
            self._admitted.popleft()
        if len(self._admitted) < self.requests:
            self._admitted.append(now)
            return True
        self.wait = self._admitted[0] + self.seconds - now
        return False

    @property
    def _piece(self) -> int:
        """The number of bytes that are sent or received at once."""
        return max(_SMALLEST_PIECE, (self.rate or 0) // _PIECES_PER_SECOND)

    def limit(self, received: int) -> int | None:
        return self._piece if self.rate and self.of != "response" else None

    async def pace(self, count: int, received: int) -> None:
        if self.rate and self.of != "response" and count:
            self.record()
            await sleep(count / self.rate)

    def is_shaping(self, request: Request) -> bool:
        return self.rate is not None and self.of != "request"

    def stream(self, pieces: Pieces, size: int | None) -> Pieces:
        return self._slow(pieces, self.rate) if self.rate and self.of != "request" else pieces

    async def _slow(self, pieces: Pieces, rate: int) -> Pieces:
        async with aclosing(pieces):
            async for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    self.record()
                    await sleep(min(self._piece, len(rest)) / rate)
                    yield rest[: self._piece]
                    rest = rest[self._piece :]


@dataclass
class Truncate(Effect):
    """End the response's body after `at` bytes, with correct framing for the shorter body.

    `framing` is "length" for Content-Length, "chunked" for chunked coding, or "close" to end the
    body with the connection. `drop` makes a body that is shorter than its Content-Length.
    """

    verb: ClassVar[str] = "truncate"
    at: int
    framing: Literal["length", "chunked", "close"] = "length"

    def __post_init__(self) -> None:
        require_one_of("framing", self.framing, ("length", "chunked", "close"))
        if self.at < 0:
            raise ValueError("at is a number of bytes")

    async def on_answer(self, request: Request, answer: Answer) -> Answer:
        if not isinstance(answer, Response) or bodiless(request.method, answer.status):
            return answer

        framing = ("content-length", "transfer-encoding", "connection")
        headers = [(name, value) for name, value in answer.headers if name.lower() not in framing]
        if self.framing == "close":
            return Streamed(answer.status, headers, close=True, stream=pieces_of(answer))
        if self.framing == "chunked":
            headers.append(("Transfer-Encoding", "chunked"))
        else:
            size = size_of(answer)
            cut = self.at if size is None else min(self.at, size)
            headers.append(("Content-Length", str(cut)))

        answer.headers = headers
        return answer

    def is_shaping(self, request: Request) -> bool:
        return True

    async def stream(self, pieces: Pieces, size: int | None) -> Pieces:
        left = self.at
        async with aclosing(pieces):
            async for piece in pieces:
                if len(piece) > left:
                    self.record()
                if left:
                    yield piece[:left]
                left -= min(left, len(piece))


@dataclass
class Corrupt(Effect):
    """Change one bit of the byte at position `at`, or with `whole` all bytes to zero.

    A negative position is counted from the end.
    """

    verb: ClassVar[str] = "corrupt"
    at: int = 0
    of: Side = "response"
    whole: bool = False

    def __post_init__(self) -> None:
        require_one_of("of", self.of, ("request", "response"))
        if self.at < 0 and self.of == "request":
            raise ValueError("the end of a request's body is not known before it is there")

    def _change(self, data: memoryview, offset: int, at: int) -> bytearray | None:
        """Return a changed copy of `data`, or None if nothing changes.

        `offset` is the position of its first byte, `at` that of the byte to change.
        """
        if self.whole and data:
            return bytearray(len(data))
        if not offset <= at < offset + len(data):
            return None
        changed = bytearray(data)
        changed[at - offset] ^= 1
        return changed

    def alter(self, data: memoryview, offset: int) -> None:
        changed = self._change(data, offset, self.at) if self.of == "request" else None
        if changed is not None:
            self.record()
            data[:] = changed

    def is_shaping(self, request: Request) -> bool:
        return self.of == "response"

    def stream(self, pieces: Pieces, size: int | None) -> Pieces:
        return self._corrupt(pieces, size) if self.of == "response" else pieces

    async def _corrupt(self, pieces: Pieces, size: int | None) -> Pieces:
        at = self.at if self.at >= 0 or size is None else self.at + size
        offset = 0
        async with aclosing(pieces):
            async for piece in pieces:
                changed = self._change(memoryview(piece), offset, at)
                offset += len(piece)
                if changed is not None:
                    self.record()
                yield piece if changed is None else bytes(changed)


@dataclass
class Lie(Effect):
    """Send wrong headers.

    Headers in `names` get a wrong but well-formed value if the answer has them. `headers` has
    values by name. A value of None removes the header.
    """

    verb: ClassVar[str] = "lie"
    names: str | tuple[str, ...] = ()
    headers: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.names and not self.headers:
            raise ValueError("about which header?")

    async def on_answer(self, request: Request, answer: Answer) -> Answer:
        if not isinstance(answer, Response):
            return answer

        headers = with_framing(answer)
        lies = {name.lower(): (name, value) for name, value in self.headers.items()}
        names = (self.names,) if isinstance(self.names, str) else self.names
        for name in names:
            value = next((value for key, value in headers if key.lower() == name.lower()), None)
            if value is not None:
                lies[name.lower()] = (name, _wrong_value(name.lower(), value))

        if lies:
            self.record()
            true = [(name, value) for name, value in headers if name.lower() not in lies]
            false = [(name, value) for name, value in lies.values() if value is not None]
            answer.headers = [*true, *false]
            if not {"content-length", "transfer-encoding"}.isdisjoint(lies):
                answer.close = True  # the client cannot find the start of the next answer

        return answer


def _wrong_value(name: str, value: str) -> str:
    """Return a wrong but well-formed value for a header."""
    if name == "content-length" and value.isdigit():
        return str(int(value) + 1)
    if name in ("docker-content-digest", "etag") and "sha" in value:
        digest = value.rstrip('"')
        quote = value[len(digest) :]
        return digest[:-1] + ("1" if digest.endswith("0") else "0") + quote
    if name == "content-type":
        return "text/html" if value != "text/html" else "application/json"
    if name == "range":
        first, _, last = value.partition("-")
        return f"{first}-{int(last) + 1}" if last.isdigit() else value + "0"
    if name in ("location", "link"):
        return value.replace("/v2/", "/v2/lie/", 1) if "/v2/" in value else value + "/lie"
    return value + "0" if value.isdigit() else f"not {value}"
