"""Answers that are sent piece by piece, because they are streamed, delayed or broken.

Owns: `Wire`, a sequence of bytes and waits; `Streamed`, an answer with a body from another source;
`Dropped`, the end of a connection; heads and chunked coding as bytes.
May not know: sockets, what a registry is, why an answer is late or wrong.
Invariants: a piece is counted in the journal's entry before it is sent. Framing is not counted. A
server only sends the pieces of a Wire in order.
Follows: RFC 9112.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from http.client import responses
from typing import TypeAlias

from ..journal import Entry
from ..messages import Headers, Response

__all__ = [
    "Dropped",
    "Pieces",
    "Streamed",
    "Wire",
    "as_wire",
    "bodiless",
    "head_of",
    "pieces_of",
    "size_of",
    "with_framing",
]

Pieces: TypeAlias = "AsyncGenerator[bytes | memoryview, None]"


class Dropped(Exception):
    """The connection ends here without an answer. It is reset if `reset`, else closed."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__("reset" if reset else "closed")
        self.reset = reset


@dataclass
class Streamed(Response):
    """An answer with a body from another source. `headers` determine its framing.

    With `Transfer-Encoding: chunked`, the pieces are sent in that coding. Without it and without
    `Content-Length`, the end of the connection ends the body. `stream` is None if the answer has no
    body (to HEAD, 204, 304).
    """

    stream: Pieces | None = None


@dataclass
class Wire:
    """A whole answer as it is sent."""

    pieces: Pieces  # head, body and framing
    close: bool = False  # whether the connection is closed afterwards


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
    has_known_size = not isinstance(answer, Streamed) and answer.status not in (204, 304)
    if has_known_size and not names & {"content-length", "transfer-encoding"}:
        headers.append(("Content-Length", str(answer.size)))
    if answer.close and "connection" not in names:
        headers.append(("Connection", "close"))
    return headers


def size_of(answer: Response) -> int | None:
    """Return the size of a body in bytes, or None if it is not known in advance."""
    if not isinstance(answer, Streamed):
        return answer.size
    length = answer.header("content-length")
    return int(length) if length.isdigit() else None


async def pieces_of(answer: Response) -> Pieces:
    """Yield the pieces of an answer's body."""
    if isinstance(answer, Streamed):
        if answer.stream is not None:
            async with aclosing(answer.stream):
                async for piece in answer.stream:
                    yield piece
        return
    for piece_of_memory in answer.pieces():
        yield piece_of_memory


async def chunk_coding(pieces: Pieces) -> Pieces:
    """Yield pieces in chunked coding, with the last chunk."""
    async with aclosing(pieces):
        async for piece in pieces:
            if piece:
                yield b"%x\r\n" % len(piece)
                yield piece
                yield b"\r\n"
    yield b"0\r\n\r\n"


async def count_bytes(pieces: Pieces, entry: Entry) -> Pieces:
    """Yield the pieces of a body, and count each in the journal's entry before it is sent."""
    async with aclosing(pieces):
        async for piece in pieces:
            entry.response_bytes += len(piece)
            yield piece


def as_wire(
    answer: Response,
    method: str,
    entry: Entry,
    shape: Callable[[Pieces], Pieces] = lambda pieces: pieces,
) -> Wire:
    """Return an answer as a Wire.

    `shape` may change the pieces of the body before they are counted.
    """
    headers = with_framing(answer)
    fields = {name.lower(): value for name, value in headers}
    is_chunked = "chunked" in fields.get("transfer-encoding", "").lower()
    has_length = "content-length" in fields or bodiless(method, answer.status)

    async def pieces() -> Pieces:
        yield head_of(answer.status, headers)
        if not bodiless(method, answer.status):
            body = count_bytes(shape(pieces_of(answer)), entry)
            async with aclosing(chunk_coding(body) if is_chunked else body) as sent:
                async for piece in sent:
                    yield piece

    return Wire(pieces(), answer.close or not (is_chunked or has_length))
