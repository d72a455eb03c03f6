"""Access to files in directories that other users or programs may write to.

Owns: opening, locking, replacing and removing files.
May not know: the content of files.
Invariants: no symbolic link is followed, and opening a named pipe does not block. A new file
    appears at its path with its whole content, or does not appear.
Follows: docs/protocol-facts.md section 9.2 (R16).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# The suffix of a file that is still being written.
PARTIAL_SUFFIX = ".partial"

# Flags for os.open. Another user may have put a symbolic link there, or a named pipe.
SAFE_FLAGS = (
    getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
)

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | SAFE_FLAGS

# The permissions of a new file: only its owner may read and write the file.
_OWNER_ONLY = 0o600


def open_safely(path: str, flags: int) -> int:
    """Open a file without following a symbolic link.

    It can be the `opener` of `open` and `FileIO`.
    """
    return os.open(path, flags | SAFE_FLAGS)


def is_link_free(folder: str) -> bool:
    """Report whether neither a folder nor its parent is a symbolic link."""
    return not (os.path.islink(folder) or os.path.islink(os.path.dirname(folder)))


def remove_if_possible(path: str) -> None:
    """Remove a file. Do nothing if it does not exist or cannot be removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def free_bytes(path: str) -> int:
    """Return how many bytes are free on the disk of a path; very many if its file system, one in
    memory, does not tell.
    """
    import shutil  # most runs do not ask

    usage = shutil.disk_usage(path)
    return usage.free if usage.total else 2**63


def sync_folder(path: str) -> None:
    """Sync the names in a folder to the disk. Does nothing on Windows, which cannot do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock(descriptor: int) -> None:
    """Take an exclusive lock on a file. Raises BlockingIOError if another process has locked it."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:
        import msvcrt  # Windows

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            # msvcrt raises the same error if the file is locked and if locking fails.
            raise BlockingIOError(str(error)) from error
    else:
        flock(descriptor, LOCK_EX | LOCK_NB)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files and directories that are created in the block accessible to the user only."""
    umask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(umask)


@contextlib.contextmanager
def replacing(path: str, mode: int = _OWNER_ONLY) -> Iterator[int]:
    """Create a temporary file that replaces the file at `path` if the block succeeds.

    Yields the descriptor of the temporary file. The block must write the file and close the
    descriptor. If the block raises an exception, the file at `path` is unchanged. `mode` is the
    file's permissions, regardless of the umask.
    """
    # The name is random, because two runs may write the same file. O_EXCL does not follow links.
    partial = f"{path}.{os.urandom(6).hex()}{PARTIAL_SUFFIX}"
    descriptor = os.open(partial, WRITE_FLAGS | os.O_EXCL, _OWNER_ONLY)
    try:
        if mode != _OWNER_ONLY:
            os.chmod(partial, mode)
        yield descriptor
        os.replace(partial, path)
    finally:
        remove_if_possible(partial)  # does nothing after `os.replace`
