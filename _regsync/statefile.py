"""Disk: the state of earlier runs, its journal and its lock.

Owns: `state.bin`, `state.journal` and `state.lock` in the cache directory. May not know: what is in them. Invariants:
nothing here fails a run (one warning, then it goes on without state); `state.bin` is replaced whole or not at all; a
journal counts only for the file that it was begun beside: no crash loses or repeats anything. Follows design.md 8."""
from __future__ import annotations
import contextlib
import os
import zlib
from collections.abc import Callable
from _regsync.archive import EMPTY, Archive, Damaged, folded, unframe
from _regsync.errors import clean
__all__ = ["StateFile"]

_JOURNAL, _LARGEST = b"regsyncj", 1 << 30
_WRITE = os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)

class StateFile:
    """The state on disk between `load` and `close`, nothing noted after `save`; `warn(event, message)` tells of it."""
    def __init__(self, cache_dir: str | None, warn: Callable[[str, str], None]) -> None:
        self._directory, self._warn, self._shown = cache_dir, warn, clean(cache_dir or "")
        self._path, self._journal_path = (os.path.join(cache_dir or "", f"state.{end}") for end in ("bin", "journal"))
        self._lock: int | None = None
        self._journal: int | None = None
        self._header, self._end = b"", 0  # what our journal begins with, where an earlier one's whole records end
    @property
    def is_kept(self) -> bool:
        """Say whether this run's findings are to be kept: the lock is ours."""
        return self._lock is not None
    def load(self, *, keep: bool = True) -> Archive:
        """Take the lock, where findings are to be kept, and read; empty where nothing can be used."""
        if self._directory is None: return EMPTY
        try:
            if keep:
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
                self._lock = os.open(os.path.join(self._directory, "state.lock"), _WRITE, 0o600)
                _lock(self._lock)
        except BlockingIOError:
            self.close()
            self._warn("state_locked", f"another run uses {self._shown}: this one leaves no state behind")
        except OSError as error:
            self._say(f"no state is kept: {self._shown}", error)
            self.close()
            return EMPTY
        try: return self._read()
        except Damaged as error:
            self._header = b""  # what this run notes counts repositories anew: it belongs to no file that is there
            self._warn("state", f"the state in {self._shown} is not used: {error}")
        except OSError as error: self._say(f"{self._shown} cannot be read", error)
        return EMPTY
    def _say(self, problem: str, error: OSError) -> None:
        self._warn("state", f"{problem}: {clean(error.strerror or str(error))}")
    def _read(self) -> Archive:
        whole = _content(self._path)
        self._header = _JOURNAL + zlib.crc32(whole or b"").to_bytes(4, "big")
        base, journal = Archive(whole), _content(self._journal_path) or b""
        if journal.startswith(self._header):
            records, end = unframe(journal[len(self._header) :])
            base, self._end = folded(base, records), len(self._header) + end
        return base
    def note(self, record: bytes) -> None:
        """Append one record to the journal: after a `kill -9` it is all that is left."""
        if self._lock is None: return
        try:
            if self._journal is None:
                self._journal = os.open(self._journal_path, _WRITE, 0o600)
                os.ftruncate(self._journal, self._end)
                os.lseek(self._journal, 0, os.SEEK_END)
                record = record if self._end else self._header + record
            os.write(self._journal, record)
        except OSError as error:
            self._say(f"no state is kept: {self._shown}", error)
            self.close()
    def save(self, image: bytes | None) -> None:
        """Replace the state file, and let go of the journal that is folded into it."""
        if self._lock is None or image is None: return
        partial = f"{self._path}.{os.urandom(6).hex()}.partial"
        try:
            with open(os.open(partial, _WRITE | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(image)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, self._path)
            if self._journal is not None:
                os.close(self._journal)
                self._journal = None
            with contextlib.suppress(FileNotFoundError): os.unlink(self._journal_path)
        except OSError as error:
            self._say(f"the state in {self._shown} is not saved", error)
            with contextlib.suppress(OSError): os.unlink(partial)
    def close(self) -> None:
        """Give the lock back."""
        for descriptor in (self._journal, self._lock):
            if descriptor is not None: os.close(descriptor)
        self._journal = self._lock = None

def _lock(descriptor: int) -> None:
    """Lock a file for this process alone; BlockingIOError when another one has it."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:
        import msvcrt  # Windows
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error: raise BlockingIOError(str(error)) from error
    else: flock(descriptor, LOCK_EX | LOCK_NB)

def _content(path: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size  # `read` makes room for as much as it is asked for
        if size > _LARGEST: raise Damaged(f"it is larger than {_LARGEST} bytes")
        return stream.read(size)
    return None
