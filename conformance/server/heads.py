"""The heads of requests: the ones that every client sends, read at once; h11 judges all others.

Owns: a subset of HTTP/1.1 heads that is plain enough to be read by one pattern.
May not know: sockets, what a request means.
Invariants: h11 accepts every head that `read_plain_head` accepts, with the same result, so that h11
alone decides what is an error. Tests compare the two on heads of every kind.
Follows: RFC 9112 sections 3 to 6.

This exists because h11 took a third of the time of a small request.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["PlainHead", "read_plain_head"]

# One space or none before a value, nothing behind it; no tabs, no folded lines, ASCII only.
_PLAIN = re.compile(
    rb"(GET|HEAD|POST|PUT|PATCH|DELETE) ([!-~]+) HTTP/1\.1\r\n"
    rb"((?:[-!#$%&'*+.^_`|~0-9A-Za-z]+:(?: ?[!-~](?:[ -~]*[!-~])?)?\r\n)+)\r\n"
)
# Headers that change how the rest of the connection is read: heads with them are left to h11.
_LEFT_TO_H11 = frozenset({"transfer-encoding", "upgrade"})
_DIGITS = 20  # h11 takes no longer Content-Length


class PlainHead(NamedTuple):
    """A request's head; names in lower case, `length` in bytes with the empty line."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    length: int


def read_plain_head(data: bytes) -> PlainHead | None:
    """Read the head that `data` begins with; None when it is incomplete or not plain."""
    match = _PLAIN.match(data)
    if match is None:
        return None
    method, target, lines = match.groups()
    headers = []
    for line in lines.decode("ascii").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        headers.append((name.lower(), value[1:] if value[:1] == " " else value))
    names = [name for name, _ in headers]
    if names.count("host") != 1 or not _LEFT_TO_H11.isdisjoint(names):
        return None
    if "content-length" in names:
        length = dict(headers)["content-length"]
        if names.count("content-length") != 1 or not length.isdigit() or len(length) > _DIGITS:
            return None
    return PlainHead(method.decode("ascii"), target.decode("ascii"), headers, match.end())
