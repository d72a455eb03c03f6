"""Files in directories where others may write too.

Owns: how a file is opened, locked, hashed, replaced and removed; by what one sees that somebody has
    changed it; when a worker thread waits for a disk, and how long it is kept.
May not know: what a file holds.
Invariants: no link is followed, and no pipe is waited for. A file appears whole or not at all.
Follows: docs/protocol-facts.md section 9.2 (R16).
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

if TYPE_CHECKING:
    from hashlib import _Hash

_T = TypeVar("_T")

# The end of a name of a file that is still being written.
PARTIAL_SUFFIX = ".partial"

# A name that another user has put there may be a link, or a pipe that an open would wait for.
_SAFE = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

# Seconds after which a worker thread that moves or hashes many bytes is given back. Nobody can stop it
# before, and whoever is cancelled waits for it (docs/bodies.md section 9).
LONGEST_VISIT = 0.05

# Seconds for one piece after which a disk is slow (`DiskPace`).
_SLOW_PIECE = 0.02

# Bytes that are hashed at once.
_PIECE = 256 * 1024

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | _SAFE


def open_safely(path: str, flags: int) -> int:
    """Open a file without following a link. Serves `open` and `FileIO` as their `opener`."""
    return os.open(path, flags | _SAFE)


class Stamp(NamedTuple):
    """The parts of a file's status that change when it is written to or replaced."""

    device: int
    inode: int
    size: int  # bytes
    modified: int  # nanoseconds


def stamp_of(file: int | str) -> Stamp:
    """Return the stamp of an open file, or of the file at a path."""
    status = os.stat(file)
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def is_own_folder(folder: str) -> bool:
    """Return whether a folder is where it seems to be: neither it nor its parent is a link."""
    return not (os.path.islink(folder) or os.path.islink(os.path.dirname(folder)))


def remove_if_possible(path: str) -> None:
    """Remove a file if it is there and may be removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)


async def hash_rest(file: io.FileIO, running: _Hash) -> int:
    """Hash a file from its present position to its end, in worker threads; return how many bytes that
    was.
    """
    import anyio.to_thread  # most commands hash no file

    total = 0
    while count := await anyio.to_thread.run_sync(_hash_for_a_while, file, running):
        total += count
    return total


def _hash_for_a_while(file: io.FileIO, running: _Hash) -> int:
    """Hash the next bytes of a file until `LONGEST_VISIT` has passed; return how many, 0 at the end."""
    until = time.monotonic() + LONGEST_VISIT
    count = 0
    while piece := file.read(_PIECE):
        running.update(piece)
        count += len(piece)
        if time.monotonic() >= until:
            break
    return count


class DiskPace:
    """How fast a disk has been. After a slow piece a worker thread reads or writes the next one, so that
    the event loop does not wait for the disk.

    Usually the system has a piece in memory. To read it there costs less than the way to a thread.
    """

    def __init__(self) -> None:
        self.is_slow = False  # of the last piece

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Note whether reading or writing a piece, in the block, is slow."""
        import anyio  # most commands need no disk

        began = anyio.current_time()
        yield
        self.is_slow = anyio.current_time() - began > _SLOW_PIECE

    async def run(self, act: Callable[[memoryview], _T], piece: memoryview) -> _T:
        """Read or write a piece by `act`, in a worker thread after a slow one."""
        import anyio.to_thread

        began = anyio.current_time()
        if self.is_slow:
            result = await anyio.to_thread.run_sync(act, piece)
        else:
            result = act(piece)
        self.is_slow = anyio.current_time() - began > _SLOW_PIECE
        return result


class _Nothing(io.RawIOBase):
    """What /dev/null is, which not every root has: empty, and takes everything."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        return 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def empty_input() -> TextIO:
    """Return a stream that has ended."""
    return io.TextIOWrapper(io.BufferedReader(_Nothing()))


def lost_output() -> TextIO:
    """Return a stream that takes everything and keeps nothing."""
    return io.TextIOWrapper(io.BufferedWriter(_Nothing()), encoding="utf-8")


def lock(descriptor: int) -> None:
    """Lock a file for this process alone; BlockingIOError when another one has it."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:
        import msvcrt  # Windows

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            # It has no error of its own for a file that is locked.
            raise BlockingIOError(str(error)) from error
    else:
        flock(descriptor, LOCK_EX | LOCK_NB)


@contextlib.contextmanager
def replacing(path: str, mode: int = 0o600) -> Iterator[int]:
    """Give the block the descriptor of a new file, which replaces the one at `path` when the block ends
    well. When it fails, nothing has changed at `path`.

    The block has to close the descriptor. `mode` is what the file permits, whatever the umask.
    """
    # Two runs may write the same file, so each has a name of its own. O_EXCL follows no link.
    partial = f"{path}.{os.urandom(6).hex()}{PARTIAL_SUFFIX}"
    descriptor = os.open(partial, WRITE_FLAGS | os.O_EXCL, 0o600)
    try:
        if mode != 0o600:
            os.chmod(partial, mode)
        yield descriptor
        os.replace(partial, path)
    finally:
        remove_if_possible(partial)
