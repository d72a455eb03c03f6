"""Faults as one exchange feels them: what may be done where, and the verbs that struck it.

Owns: `Effect` with the places of an exchange at which a verb may act, `Injection`, which calls all
verbs at each place, and `Gate`, which a stalled exchange waits for.
May not know: sockets, what each verb does (verbs.py), which exchange is struck (rules.py).
Invariants: waits come before the end of an exchange. Every effect says when it takes place, so that
one that did not is found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import anyio
import anyio.from_thread
import anyio.lowlevel

from ..journal import Entry
from ..messages import Answer, Request, as_rule_text
from .wire import Pieces, Wire, as_wire, size_of

__all__ = ["Effect", "Gate", "Injection", "require_one_of"]


class Gate:
    """A stalled exchange waits for it; any thread may open it, once, and it stays open."""

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, anyio.lowlevel.EventLoopToken, anyio.Event]] = []

    async def wait(self) -> None:
        event = anyio.Event()
        with self._lock:
            if self.is_open:
                return
            waiter = (threading.get_ident(), anyio.lowlevel.current_token(), event)
            self._waiting.append(waiter)
        try:
            await event.wait()
        finally:
            with self._lock, suppress(ValueError):
                self._waiting.remove(waiter)

    def open(self) -> None:
        """Let everything go on that waits now or will."""
        with self._lock:
            self.is_open = True
            waiting = self._waiting
            self._waiting = []
        for thread, token, event in waiting:
            if thread == threading.get_ident():
                event.set()
            else:
                anyio.from_thread.run_sync(event.set, token=token)


@dataclass
class Effect:
    """One verb. A rule holds one as a pattern, each exchange that is struck gets a copy.

    `on_effect` is called when it takes place.
    """

    verb: ClassVar[str]
    took_place: bool = field(default=False, init=False)
    on_effect: Callable[[Effect], None] | None = field(default=None, init=False, repr=False)

    @property
    def ends_exchange(self) -> bool:
        """Ask whether this is an exchange's answer, or its end."""
        return False

    def copy_for(self, request: Request, on_effect: Callable[[Effect], None]) -> Effect:
        """Return what strikes one exchange: a copy of this pattern."""
        copy = replace(self)
        copy.on_effect = on_effect
        copy.prepare(request)
        return copy

    def prepare(self, request: Request) -> None:
        """Learn which exchange this is for."""

    def record(self) -> None:
        """Note that this took place; later calls change nothing."""
        if not self.took_place:
            self.took_place = True
            if self.on_effect is not None:
                self.on_effect(self)

    def __str__(self) -> str:
        return " ".join([self.verb, *self._arguments()])

    def _arguments(self) -> Iterator[str]:
        parameters = [field for field in fields(self) if field.init and field.repr]
        for number, parameter in enumerate(parameters):
            value = getattr(self, parameter.name)
            if isinstance(value, Mapping):
                yield from (f"header.{name}={as_rule_text(text)}" for name, text in value.items())
            elif value != parameter.default:
                # The first parameter is written without its name.
                name = f"{parameter.name.replace('_', '-')}=" if number else ""
                yield name + as_rule_text(value)

    # Where it may act, in the order of an exchange.

    async def on_head(self, request: Request) -> Answer | None:
        """The head is here; an answer given now is instead of the registry's."""
        return None

    def limit(self, received: int) -> int | None:
        """Return how many bytes of the request's body may come before `pace` is awaited again."""
        return None

    def alter(self, data: memoryview, offset: int) -> None:
        """Change bytes of the request's body in place; the first is number `offset`."""

    def check(self, received: int) -> None:
        """Raise Dropped when the request's body may not go on."""

    async def pace(self, count: int, received: int) -> None:
        """Wait, or raise Dropped: `count` more bytes of the request's body have come."""

    def on_carried_out(self, request: Request, answer: Answer) -> Answer:
        """The request is carried out and not answered yet; the answer returned is given for it."""
        return answer

    async def on_answer(self, request: Request, answer: Answer) -> Answer:
        """The answer is known: wait, end it, or change it."""
        return answer

    def is_shaping(self, request: Request) -> bool:
        """Ask whether `stream` or `surround` change the bytes of the answer."""
        return False

    def stream(self, pieces: Pieces, size: int | None) -> Pieces:
        """Return the response's body as it is to be sent; `size` in bytes when it is known."""
        return pieces

    def surround(self, pieces: Pieces) -> Pieces:
        """Return the whole answer as it is to be sent: the head first, framing included."""
        return pieces


def require_one_of(name: str, value: object, known: Sequence[object]) -> None:
    """Raise ValueError unless a parameter has one of the values that it may have."""
    if value not in known:
        choices = ", ".join(str(choice) for choice in known if choice)
        raise ValueError(f"{name} is one of {choices}, not {value}")


class Injection:
    """The verbs that struck one exchange, in the order in which their rules were written."""

    def __init__(self, request: Request, effects: Sequence[Effect], entry: Entry) -> None:
        self.effects = effects
        self._request = request
        self._entry = entry
        self._received = 0
        # Waits come before what ends an exchange, wherever they are written.
        self._waiting_first = sorted(effects, key=lambda effect: effect.ends_exchange)

    async def before(self) -> Answer | None:
        """Act before the request is carried out."""
        for effect in self._waiting_first:
            answer = await effect.on_head(self._request)
            if answer is not None:
                return answer
        return None

    def limit(self, received: int) -> int | None:
        """Return how many bytes of the request's body may be taken before `pace` is awaited."""
        limits = [effect.limit(received) for effect in self.effects]
        finite = [limit for limit in limits if limit is not None]
        return max(1, min(finite)) if finite else None

    def alter(self, data: memoryview, offset: int) -> None:
        """Change bytes of the request's body in place."""
        for effect in self.effects:
            effect.alter(data, offset)

    def check(self, received: int) -> None:
        """Raise Dropped when no more of the request's body may be taken."""
        for effect in self.effects:
            effect.check(received)

    async def pace(self, received: int) -> None:
        """Wait as the request's body comes in; Dropped ends it."""
        count = received - self._received
        self._received = received
        for effect in self._waiting_first:
            await effect.pace(count, received)

    async def after(self, answer: Answer) -> tuple[Answer, Answer | Wire]:
        """Act before the first byte; return the answer and the form in which it is sent."""
        for effect in self.effects:
            answer = effect.on_carried_out(self._request, answer)

        for effect in self._waiting_first:
            answer = await effect.on_answer(self._request, answer)

        shaping = [effect for effect in self.effects if effect.is_shaping(self._request)]
        if not shaping:
            return answer, answer

        if isinstance(answer, bytes):
            pieces = _reshape(_in_one_piece(answer), shaping, len(answer))
            close = True
        else:
            size = size_of(answer)
            framed = as_wire(
                answer,
                self._request.method,
                self._entry,
                lambda body: _reshape(body, shaping, size),
            )
            pieces = framed.pieces
            close = framed.close

        for effect in shaping:
            pieces = effect.surround(pieces)
        return answer, Wire(pieces, close)


def _reshape(pieces: Pieces, effects: Sequence[Effect], size: int | None) -> Pieces:
    for effect in effects:
        pieces = effect.stream(pieces, size)
    return pieces


async def _in_one_piece(data: bytes) -> Pieces:
    yield data
