"""An answer as it goes over the wire, piece by piece, for those that are not simply held and sent.

Owns: `Wire` (bytes and waits in their order), `Streamed` (a body that comes from elsewhere),
`Dropped` (no more bytes, not even these), heads and chunked coding as bytes. May not know: sockets,
what a registry is, why an answer is late or wrong. Invariant: a piece is counted in the journal's
entry before it is sent, framing is not. Whoever sends a Wire does nothing but send its pieces in
order. Follows RFC 9112.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

from .journal import Entry
from .messages import Headers, Response

__all__ = [
    "Dropped",
    "Pieces",
    "Streamed",
    "Wire",
    "bodiless",
    "framed",
    "head_of",
    "pieces_of",
    "size_of",
    "wire",
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
    known = HTTPStatus._value2member_map_
    phrase = HTTPStatus(status).phrase if status in known else "Status"
    lines = [
        f"HTTP/1.1 {status} {phrase}",
        *(f"{name}: {value}" for name, value in headers),
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


def bodiless(method: str, status: int) -> bool:
    """Ask whether an answer has no body, whatever its head says."""
    return method == "HEAD" or status in (204, 304) or 100 <= status < 200


def framed(answer: Response, method: str) -> list[tuple[str, str]]:
    """Return the headers of an answer, with the framing that a held body needs and says nowhere."""
    headers = list(answer.headers)
    said = {name.lower() for name, _ in headers}
    held = not isinstance(answer, Streamed) and answer.status not in (204, 304)
    if held and not said & {"content-length", "transfer-encoding"}:
        headers.append(("Content-Length", str(answer.size)))
    if answer.close and "connection" not in said:
        headers.append(("Connection", "close"))
    return headers


def size_of(answer: Response) -> int | None:
    """Return the size of a body in bytes, None when only its end will tell."""
    if not isinstance(answer, Streamed):
        return answer.size
    said = answer.header("content-length")
    return int(said) if said.isdigit() else None


async def pieces_of(answer: Response) -> Pieces:
    """Give the body of an answer, wherever it is."""
    if isinstance(answer, Streamed):
        if answer.stream is not None:
            async with aclosing(answer.stream):
                async for piece in answer.stream:
                    yield piece
        return
    for held in answer.pieces():
        yield held


async def chunked(pieces: Pieces) -> Pieces:
    """Write pieces in chunked coding, with its end."""
    async with aclosing(pieces):
        async for piece in pieces:
            if piece:
                yield b"%x\r\n" % len(piece)
                yield piece
                yield b"\r\n"
    yield b"0\r\n\r\n"


async def counted(pieces: Pieces, entry: Entry) -> Pieces:
    """Count a body's bytes in the journal's entry before they leave."""
    async with aclosing(pieces):
        async for piece in pieces:
            entry.response_bytes += len(piece)
            yield piece


def wire(
    answer: Response,
    method: str,
    entry: Entry,
    shape: Callable[[Pieces], Pieces] = lambda pieces: pieces,
) -> Wire:
    """Make an answer a Wire; `shape` may change the body's pieces before they are framed and
    counted.
    """
    headers = framed(answer, method)
    said = {name.lower(): value for name, value in headers}
    coded = "chunked" in said.get("transfer-encoding", "").lower()
    ends = coded or "content-length" in said or bodiless(method, answer.status)

    async def pieces() -> Pieces:
        yield head_of(answer.status, headers)
        if not bodiless(method, answer.status):
            body = counted(shape(pieces_of(answer)), entry)
            async with aclosing(chunked(body) if coded else body) as sent:
                async for piece in sent:
                    yield piece

    return Wire(pieces(), answer.close or not ends)
