"""Answers that go over the wire piece by piece: streamed, delayed or broken ones.

Owns: `Wire` (bytes and waits in their order), `Streamed` (a body that comes from elsewhere),
`Dropped` (the connection ends), heads and chunked coding as bytes.
May not know: sockets, what a registry is, why an answer is late or wrong.
Invariants: a piece is counted in the journal's entry before it is sent; framing is not counted. The
sender of a Wire does nothing but send its pieces in order.
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
    """The connection ends here, without a word; by a reset when `reset`, otherwise closed."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__("reset" if reset else "closed")
        self.reset = reset


@dataclass
class Streamed(Response):
    """An answer whose body comes from elsewhere; its framing is what `headers` say.

    With `Transfer-Encoding: chunked` the pieces are coded, with neither that nor a `Content-Length`
    the body ends with the connection. `stream` is None for an answer that has no body (to HEAD,
    204, 304).
    """

    stream: Pieces | None = None


@dataclass
class Wire:
    """What is sent: `pieces` in their order, then the connection is kept or closed."""

    pieces: Pieces
    close: bool = False


def head_of(status: int, headers: Headers) -> bytes:
    """Write a head; an unknown status has the phrase `Status`."""
    lines = [
        f"HTTP/1.1 {status} {responses.get(status, 'Status')}",
        *(f"{name}: {value}" for name, value in headers),
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


def bodiless(method: str, status: int) -> bool:
    """Ask whether an answer has no body, whatever its head says."""
    return method == "HEAD" or status in (204, 304) or 100 <= status < 200


def with_framing(answer: Response) -> list[tuple[str, str]]:
    """Return the headers of an answer, with the framing where a held body has none."""
    headers = list(answer.headers)
    names = {name.lower() for name, _ in headers}
    is_held = not isinstance(answer, Streamed) and answer.status not in (204, 304)
    if is_held and not names & {"content-length", "transfer-encoding"}:
        headers.append(("Content-Length", str(answer.size)))
    if answer.close and "connection" not in names:
        headers.append(("Connection", "close"))
    return headers


def size_of(answer: Response) -> int | None:
    """Return the size of a body in bytes; None when it is not known before its end."""
    if not isinstance(answer, Streamed):
        return answer.size
    length = answer.header("content-length")
    return int(length) if length.isdigit() else None


async def pieces_of(answer: Response) -> Pieces:
    """Give the body of an answer, wherever it is."""
    if isinstance(answer, Streamed):
        if answer.stream is not None:
            async with aclosing(answer.stream):
                async for piece in answer.stream:
                    yield piece
        return
    for piece_of_memory in answer.pieces():
        yield piece_of_memory


async def chunk_coding(pieces: Pieces) -> Pieces:
    """Write pieces in chunked coding, with its end."""
    async with aclosing(pieces):
        async for piece in pieces:
            if piece:
                yield b"%x\r\n" % len(piece)
                yield piece
                yield b"\r\n"
    yield b"0\r\n\r\n"


async def count_bytes(pieces: Pieces, entry: Entry) -> Pieces:
    """Count a body's bytes in the journal's entry before they leave."""
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
    """Make an answer a Wire; `shape` may change the body's pieces before framing and counting."""
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
