"""What the program takes from the world around it: connections, the environment, the time of day,
chance, and threads for calls that block.

Standard streams, files and signals are the process's own. Whoever calls `regsync.run` gives another
edge, such as a network in memory.

Invariant: a run opens connections, reads the environment and the time of day, decides by chance and
calls threads through its edge alone. The FIPS gate, which comes before any run, reads the
environment itself, as Python does for `~` in a path, and the ages of files are compared with the
clock that the disk has. Sleeping is anyio's.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import ssl


# What a stream returns if it would block: what to wait for.
WANT_READ = -1
WANT_WRITE = -2


class Stream(Protocol):
    """A connection. Only `wait` blocks.

    `recv_into` and `send_now` return a number of bytes, or WANT_READ (-1) if reading and WANT_WRITE
    (-2) if writing would have to be waited for; `wait` takes that number. `recv_into` returns 0 at
    the end. All raise OSError if the connection is broken, and `wait` if it is closed meanwhile.
    """

    def recv_into(self, buffer: memoryview) -> int: ...
    def send_now(self, data: memoryview) -> int: ...
    async def wait(self, want: int) -> None: ...
    def close(self) -> None: ...


class Edge(NamedTuple):
    """The world of one run."""

    # Connect to a port of a host. Raises socket.gaierror or ValueError if the name has no address,
    # and OSError if there is no connection. The caller limits the time.
    connect: Callable[[str, int], Awaitable[Any]]

    # Perform a TLS handshake on a stream, with a context, for a host's name. Returns the stream
    # that encrypts. Raises OSError, and ValueError for a name that no certificate can have.
    start_tls: Callable[[Any, ssl.SSLContext, str], Awaitable[Any]]

    wall: Callable[[], float]  # the time of day, in seconds since 1970
    chance: Callable[[], float]  # a random number from 0 to 1, without 1

    # Call a function with arguments in a worker thread, and return its result.
    in_thread: Callable[..., Awaitable[Any]]

    environ: Mapping[str, str]


_current: ContextVar[Edge] = ContextVar("edge")

current = _current.get  # the edge of the run that the caller belongs to


def variable(name: str) -> str | None:
    """Return a variable of the environment, or None if it is not set."""
    return current().environ.get(name)


def home() -> str | None:
    """Return the user's home directory. Returns None if it is unknown."""
    configured = variable("HOME")
    if configured and os.name == "posix":
        return configured
    found = os.path.expanduser("~")  # still "~" if the home directory is unknown
    return None if found == "~" else found


@contextmanager
def using(edge: Any) -> Iterator[None]:
    """Let `edge` be the edge of what runs in the block. It has the fields of `Edge`."""
    token = _current.set(edge)
    try:
        yield
    finally:
        _current.reset(token)
