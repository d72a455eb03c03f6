"""The faults of one exchange: the places at which verbs may act, and the verbs that struck it.

Owns: `Effect`, with a method for each place of an exchange; `Injection`, which calls all verbs at
each place; `Gate`, for which a stalled exchange waits.
May not know: sockets, what each verb does (verbs.py), which exchange is struck (rules.py).
Invariants: verbs that wait act before a verb that ends the exchange. Each effect records that it
has taken effect, so that a fault without effect is detected.
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
    """An event for which stalled exchanges wait. Any thread may open it. It stays open."""

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        # For each waiting task: its thread, its event loop, and the event that wakes it.
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
        """End all waits, and prevent further ones."""
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
    """One verb. A rule holds it as a pattern. Each exchange that is struck gets a copy."""

    verb: ClassVar[str]  # the name of the verb
    took_place: bool = field(default=False, init=False)
    # Called when the verb takes effect.
    on_effect: Callable[[Effect], None] | None = field(default=None, init=False, repr=False)

    @property
    def ends_exchange(self) -> bool:
        """Whether the verb answers the request or ends the connection."""
        return False

    def copy_for(self, request: Request, on_effect: Callable[[Effect], None]) -> Effect:
        """Return a copy of this pattern for one exchange."""
        copy = replace(self)
        copy.on_effect = on_effect
        copy.prepare(request)
        return copy

    def prepare(self, request: Request) -> None:
        """Initialise the copy for the exchange of `request`."""

    def record(self) -> None:
        """Record that the verb has taken effect. Later calls do nothing."""
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

    # The places at which a verb may act, in the order of an exchange.

    async def on_head(self, request: Request) -> Answer | None:
        """Called when the head has arrived. An answer replaces the registry's."""
        return None

    def limit(self, received: int) -> int | None:
        """Return the maximum number of bytes to receive before `pace` is awaited again.

        `received` is the number of bytes of the request's body so far. None means no maximum.
        """
        return None

    def alter(self, data: memoryview, offset: int) -> None:
        """Change bytes of the request's body in place.

        `offset` is the position of the first byte.
        """

    def check(self, received: int) -> None:
        """Raise Dropped if the connection ends after `received` bytes of the request's body."""

    async def pace(self, count: int, received: int) -> None:
        """Called when `count` more bytes of the request's body have arrived. May raise Dropped."""

    def on_carried_out(self, request: Request, answer: Answer) -> Answer:
        """Called when the request has been carried out. The result replaces the answer."""
        return answer

    async def on_answer(self, request: Request, answer: Answer) -> Answer:
        """Called before the answer is sent. The result replaces it. May wait, or raise Dropped."""
        return answer

    def is_shaping(self, request: Request) -> bool:
        """Report whether `stream` or `surround` change the bytes of the answer."""
        return False

    def stream(self, pieces: Pieces, size: int | None) -> Pieces:
        """Return the body of the answer as it is to be sent.

        `size` is in bytes, or None if unknown.
        """
        return pieces

    def surround(self, pieces: Pieces) -> Pieces:
        """Return the whole answer as it is to be sent, with its head and framing."""
        return pieces


def require_one_of(name: str, value: object, known: Sequence[object]) -> None:
    """Raise ValueError unless the value of the parameter `name` is one of `known`."""
    if value not in known:
        choices = ", ".join(str(choice) for choice in known if choice)
        raise ValueError(f"{name} is one of {choices}, not {value}")


class Injection:
    """The verbs that struck one exchange, in the order in which their rules were written."""

    def __init__(self, request: Request, effects: Sequence[Effect], entry: Entry) -> None:
        self.effects = effects
        self._request = request
        self._entry = entry
        self._received = 0  # bytes of the request's body at the last `pace`
        # Verbs that wait act first, then the verbs that end the exchange.
        self._waiting_first = sorted(effects, key=lambda effect: effect.ends_exchange)

    async def before(self) -> Answer | None:
        """Let verbs act before the request is carried out. An answer replaces the registry's."""
        for effect in self._waiting_first:
            answer = await effect.on_head(self._request)
            if answer is not None:
                return answer
        return None

    def limit(self, received: int) -> int | None:
        """Return the maximum number of bytes to receive before `pace` is awaited, or None."""
        limits = [effect.limit(received) for effect in self.effects]
        finite = [limit for limit in limits if limit is not None]
        return max(1, min(finite)) if finite else None

    def alter(self, data: memoryview, offset: int) -> None:
        """Change bytes of the request's body in place."""
        for effect in self.effects:
            effect.alter(data, offset)

    def check(self, received: int) -> None:
        """Raise Dropped if the connection ends after `received` bytes of the request's body."""
        for effect in self.effects:
            effect.check(received)

    async def pace(self, received: int) -> None:
        """Let verbs act after bytes of the request's body have arrived. May raise Dropped."""
        count = received - self._received
        self._received = received
        for effect in self._waiting_first:
            await effect.pace(count, received)

    async def after(self, answer: Answer) -> tuple[Answer, Answer | Wire]:
        """Let verbs act on the answer. Returns the answer, and the form in which it is sent."""
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
