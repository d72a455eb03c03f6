"""What a layout asks of its disk: room, folders, files that are safe from a power cut, errors in words.

Owns: how a file or folder is made and brought to the disk, how much of the free room is spoken for,
    the lock of a directory.
May not know: what a layout is made of.
Invariants: no link is followed. Room that two images need for one blob is counted once.
Follows: docs/design.md section 13 ("Written in groups", "Power cuts", "Room").
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from io import FileIO

from _regsync.errors import Side, SyncError
from _regsync.files import PARTIAL_SUFFIX, WRITE_FLAGS, lock, remove_if_possible
from _regsync.text import printable

# The modes of what is made, whatever the umask is: others read what is carried to them.
_FOLDER_MODE = 0o755
_FILE_MODE = 0o644

# What to do about errors of the system.
REMEDIES = {
    errno.EACCES: "let this user write there, or name another directory",
    errno.EFBIG: "format the device with another file system: exFAT, ext4, NTFS",
    errno.EIO: "check the device, and whether it is still there; then run again",
    errno.ENOSPC: "free space on the device, or copy to a larger one",
    errno.EROFS: "mount the device for writing, or copy to another one",
}


class LayoutError(SyncError):
    """A layout cannot be read or written."""

    @property
    def code(self) -> str:  # type: ignore[override]
        return "SOURCE_ERROR" if self.side is Side.SOURCE else "TARGET_ERROR"


class DirectoryLock:
    """The lock of a directory, which lets one process write there at a time.

    Some file systems have no locks. There `is_held` is false: another process may write the same
    files, so the names of this one's partial files end with a `suffix` of its own.
    """

    def __init__(self, path: str) -> None:
        """Lock a directory; LayoutError where another process has locked it."""
        self.is_held = False
        self.suffix = f".{os.urandom(6).hex()}{PARTIAL_SUFFIX}"
        self._path = path
        # The open directory. It is locked itself, because a file for the lock would stay on the disk.
        self._folder: int | None = None

        try:
            self._folder = os.open(path, os.O_RDONLY)
        except OSError:
            return  # Windows opens no directories
        try:
            lock(self._folder)
        except BlockingIOError as error:
            self.release()
            busy = LayoutError(f"another process is writing {printable(path)}")
            busy.hint = "wait until it has ended, or copy to another directory"
            raise busy from error
        except OSError:
            return  # the file system has no locks
        self.is_held = True
        self.suffix = PARTIAL_SUFFIX

    def check_path(self) -> None:
        """Raise LayoutError where the path leads to another directory than the locked one: the disk was
        removed, and the path is now the empty folder that it was mounted on.
        """
        if self._folder is None:
            return
        if not os.path.samestat(os.fstat(self._folder), os.stat(self._path)):
            gone = LayoutError(
                f"the disk of {printable(self._path)} was removed while it was written"
            )
            gone.hint = REMEDIES[errno.EIO]
            raise gone

    def release(self) -> None:
        """Let other processes write."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


class Reserved:
    """The bytes that images under way and open files are still to write, by the digests of these.

    Each image reserves all that it lacks, and each open file its own blob. So a digest may have
    several owners, but its bytes count once.
    """

    def __init__(self) -> None:
        self._rest = dict[str, int]()
        self._owners = Counter[str]()

    @property
    def total(self) -> int:
        return sum(self._rest.values())

    def add(self, sizes: Mapping[str, int]) -> None:
        """Become an owner of these digests. The sizes count for those that have no owner yet."""
        self._owners.update(sizes.keys())
        for digest, size in sizes.items():
            self._rest.setdefault(digest, size)

    def remove(self, digests: Iterable[str]) -> None:
        """Stop being an owner of these digests; one without an owner needs no room."""
        for digest in digests:
            self._owners[digest] -= 1
            if not self._owners[digest]:
                del self._owners[digest]
                del self._rest[digest]

    def set_rest(self, digest: str, rest: int) -> None:
        """Note how many bytes of a reserved digest are still to be written."""
        self._rest[digest] = rest

    def rest_of(self, digest: str) -> int:
        """Return the bytes that are still to be written of a digest, 0 where it is not reserved."""
        return self._rest.get(digest, 0)

    def __contains__(self, digest: str) -> bool:
        return digest in self._rest


def status_of(path: str) -> os.stat_result | None:
    """Return the status of a file, folder or link itself; None where nothing has this name."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def make_folder(path: str) -> None:
    """Make a folder that others may read, where there is none, and bring its name to the disk. Its
    parent has to be there: else a disk is not mounted.
    """
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    with contextlib.suppress(OSError):  # FAT has no modes
        os.chmod(path, _FOLDER_MODE)
    sync_folder(os.path.dirname(path))


def create_file(path: str) -> FileIO:
    """Create a file that others may read; what was there under its name is removed."""
    remove_if_possible(path)
    # O_EXCL: somebody else may put a link there just now.
    descriptor = os.open(path, WRITE_FLAGS | os.O_EXCL, _FILE_MODE)
    if hasattr(os, "fchmod"):
        with contextlib.suppress(OSError):  # FAT has no modes
            os.fchmod(descriptor, _FILE_MODE)
    return FileIO(descriptor, "w")


def write_file(path: str, body: bytes) -> None:
    """Create a file with these bytes. Nothing is on the disk for certain before `sync_file`."""
    with create_file(path) as stream:
        rest = memoryview(body)
        while rest:  # one write may take a part only
            rest = rest[stream.write(rest) :]


def replace_file(path: str, body: bytes, suffix: str, *, old_path: str | None = None) -> None:
    """Write a file, under a name with `suffix`, and let it take the place of the one at `path`.

    With `old_path` the file that was there is kept at that path. For a file system that does not
    replace in one step (FAT): at each instant one of the two paths has a whole file.
    """
    partial = path + suffix
    folder = os.path.dirname(path)
    write_file(partial, body)
    sync_file(partial)
    if old_path is not None and os.path.lexists(path):
        os.replace(path, old_path)
        sync_folder(folder)
    os.replace(partial, path)
    sync_folder(folder)


def has_hard_links(path: str) -> bool:
    """Say whether the file at a path can get a second name: file systems where it cannot (FAT) do not
    replace a file in one step either.
    """
    link = path + PARTIAL_SUFFIX
    remove_if_possible(link)
    try:
        os.link(path, link)
    except OSError:
        return False
    os.unlink(link)
    return True


def sync_file(path: str) -> None:
    """Bring the bytes of a file to the disk."""
    descriptor = os.open(path, os.O_RDWR)  # Windows syncs only what is open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: str) -> None:
    """Bring the names in a folder to the disk, where the system can: Windows cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
