"""Files, folders, disk errors and the directory lock of an image layout.

Owns: how a file or folder is created and synced to the disk, the lock of a directory.
May not know: the files and folders of a layout.
Invariants: no link is followed.
Follows: docs/design.md section 13 ("Written in groups", "Power cuts").
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from io import FileIO

from _regsync.errors import Side, SyncError
from _regsync.files import PARTIAL_SUFFIX, WRITE_FLAGS, lock, remove_if_possible, sync_folder
from _regsync.text import printable, reason_of

# The modes of folders and files, whatever the umask is. Other users must be able to read a layout.
_FOLDER_MODE = 0o755
_FILE_MODE = 0o644

# Hints for system errors, by errno.
REMEDIES = {
    errno.EACCES: "let this user write there, or name another directory",
    errno.EFBIG: "FAT32 holds no file above 4 GiB: format the device with exFAT, ext4 or NTFS",
    errno.EIO: "check the device, and whether it is still there; then run again",
    errno.ENOSPC: "free space on the device, or copy to a larger one",
    errno.EROFS: "mount the device for writing, or copy to another one",
}


class LayoutError(SyncError):
    """A layout cannot be read or written."""

    @property
    def code(self) -> str:  # type: ignore[override]
        return "SOURCE_ERROR" if self.side is Side.SOURCE else "TARGET_ERROR"


@contextlib.contextmanager
def disk_errors(directory: str) -> Iterator[None]:
    """Convert OSErrors that are raised in the block to LayoutErrors with a hint.

    `directory` is named if an error has no path.
    """
    try:
        yield
    except OSError as error:
        path = printable(str(error.filename or directory))
        hint = REMEDIES.get(error.errno or 0)
        raise LayoutError(f"{path}: {reason_of(error)}", hint=hint) from error


class DirectoryLock:
    """The lock of a directory. At most one process writes to a locked directory."""

    def __init__(self, path: str) -> None:
        """Lock a directory. Raises LayoutError if another process has locked it.

        If the system cannot lock directories, no error is raised, and `is_held` is False.
        """
        # Whether the directory is locked.
        self.is_held = False
        # The suffix of the names of partial files. Without the lock it is random, because another
        # process may write partial files of the same blobs.
        self.suffix = f".{os.urandom(6).hex()}{PARTIAL_SUFFIX}"
        # The file descriptor of the directory. The directory itself is locked, because a lock file
        # would stay on the disk. None if the directory is not open.
        self._descriptor: int | None = None

        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return  # Windows cannot open directories
        try:
            lock(self._descriptor)
        except BlockingIOError as error:
            self.release()
            raise LayoutError(
                f"another process is writing {printable(path)}",
                hint="wait until it has ended, or copy to another directory",
            ) from error
        except OSError:
            return  # the file system has no locks
        self.is_held = True
        self.suffix = PARTIAL_SUFFIX

    def release(self) -> None:
        """Unlock the directory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lstat_or_none(path: str) -> os.stat_result | None:
    """Return the status of a file, folder or link. Returns None if the path does not exist."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def make_folder(path: str) -> None:
    """Create a folder that all users may read, unless it exists, and sync its name to the disk.

    The parent must exist. If it does not, the disk is probably not mounted.
    """
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    with contextlib.suppress(OSError):  # FAT has no modes
        os.chmod(path, _FOLDER_MODE)
    sync_folder(os.path.dirname(path))


def create_file(path: str) -> FileIO:
    """Create a file that all users may read. A file or link at the path is removed first."""
    remove_if_possible(path)
    # O_EXCL, because another process may create a link at the path at this moment.
    descriptor = os.open(path, WRITE_FLAGS | os.O_EXCL, _FILE_MODE)
    if hasattr(os, "fchmod"):
        with contextlib.suppress(OSError):  # FAT has no modes
            os.fchmod(descriptor, _FILE_MODE)
    return FileIO(descriptor, "w")


def write_file(path: str, body: bytes) -> None:
    """Create a file with these bytes. A power cut may lose them until `sync_file` is called."""
    with create_file(path) as stream:
        remaining = memoryview(body)
        while remaining:  # a write may be partial
            remaining = remaining[stream.write(remaining) :]


def replace_file(path: str, body: bytes, suffix: str) -> None:
    """Replace the file at `path`. The new file is first written to `path` + `suffix`."""
    write_file(path + suffix, body)
    put_in_place(path + suffix, path)


def put_in_place(partial: str, path: str) -> None:
    """Sync a complete file to the disk, then rename it to `path`."""
    sync_file(partial)
    os.replace(partial, path)
    sync_folder(os.path.dirname(path))


def sync_file(path: str) -> None:
    """Sync the bytes of a file to the disk."""
    descriptor = os.open(path, os.O_RDWR)  # Windows syncs only files that are open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
