"""."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_PARTIAL = ".partial"


# In a directory where others can write, a name may be a link, or a pipe that would be waited for.
_SAFE = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


_WRITE = os.O_WRONLY | os.O_CREAT | _SAFE


def _safely(path: str, flags: int) -> int:
    return os.open(path, flags | _SAFE)


def _is_own(folder: str) -> bool:
    return not (os.path.islink(folder) or os.path.islink(os.path.dirname(folder)))


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[int]:
    """Give the descriptor of a file that stands at `path` once it was written, else nowhere."""
    # A name of its own, and O_EXCL, which follows no link: two runs may write the same.
    partial = f"{path}.{os.urandom(6).hex()}{_PARTIAL}"
    descriptor = os.open(partial, _WRITE | os.O_EXCL, 0o600)
    try:
        yield descriptor
        os.replace(partial, path)
    finally:
        _remove(partial)
