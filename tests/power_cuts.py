"""What a disk may hold after a power cut, by the calls of a real run.

A run is recorded: each call that names, renames, removes or syncs a file below a folder, and what
each file held at that moment. A cut may come between any two calls. Then the disk holds for certain
what was synced: the bytes of a file that was synced itself, the names in a folder that was synced.
Of the rest POSIX promises nothing: names are there or not, one without the other; bytes are there,
or some, or zeros, or none. `os.sync` is no promise here, because POSIX lets it return early.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

# A file by the order in which it was seen; a folder is None.
File = int | None


class Bytes(enum.Enum):
    """What a cut leaves of bytes that were written and not synced."""

    ALL = enum.auto()
    HALF = enum.auto()
    ZEROS = enum.auto()
    NONE = enum.auto()


@dataclass(frozen=True)
class Naming:
    """One change of names in a folder."""

    folder: str
    added: Mapping[str, File]
    removed: tuple[str, ...]


@dataclass
class Moment:
    """The disk between two calls."""

    root: str
    # What is certain.
    names: dict[str, File]
    synced: dict[int, bytes]
    # What is not: changes of names in their order, and what files hold as long as all goes well.
    pending: list[Naming]
    written: dict[int, bytes]


@dataclass
class Recording:
    """The moments of a run below a folder, from its beginning on."""

    root: str
    moments: list[Moment] = field(default_factory=list)
    names: dict[str, File] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)
    pending: list[Naming] = field(default_factory=list)
    # All names as the program sees them.
    seen: dict[str, File] = field(default_factory=dict)
    count: int = 0

    def begin(self) -> None:
        """Take what is there as synced."""
        for folder, folders, files in os.walk(self.root):
            for name in folders:
                self.names[os.path.join(folder, name)] = None
            for name in files:
                self.count += 1
                path = os.path.join(folder, name)
                self.names[path] = self.count
                self.synced[self.count] = Path(path).read_bytes()
        self.seen = dict(self.names)
        self.note()

    def note(self) -> None:
        """Keep the present moment."""
        written = dict[int, bytes]()
        for path, file in self.seen.items():
            if file is not None:
                with contextlib.suppress(FileNotFoundError):
                    written[file] = Path(path).read_bytes()
        moment = Moment(self.root, dict(self.names), dict(self.synced), list(self.pending), written)
        self.moments.append(moment)

    def change(self, added: dict[str, File], *removed: str) -> None:
        """Note a change of names, all in one folder."""
        path = next(iter([*added, *removed]))
        self.pending.append(Naming(os.path.dirname(path), added, removed))
        for name in removed:
            self.seen.pop(name, None)
        self.seen.update(added)
        self.note()

    def sync_file(self, path: str) -> None:
        file = self.seen[path]
        assert file is not None
        self.synced[file] = Path(path).read_bytes()
        self.note()

    def sync_folder(self, path: str) -> None:
        for change in [change for change in self.pending if change.folder == path]:
            self.pending.remove(change)
            _apply(change, self.names)
        self.note()


def _apply(change: Naming, names: dict[str, File]) -> None:
    for name in change.removed:
        names.pop(name, None)
    names.update(change.added)


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recording]:
    """Record what the block does below a folder."""
    record = Recording(str(root))
    real = {name: getattr(os, name) for name in ("open", "replace", "mkdir", "unlink", "fsync")}

    def is_below(path: Any) -> bool:
        return str(path).startswith(f"{record.root}{os.sep}")

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        is_new = is_below(path) and bool(flags & os.O_CREAT) and not os.path.lexists(path)
        descriptor: int = real["open"](path, flags, *more, **named)
        if is_new:
            record.count += 1
            record.change({str(path): record.count})
        return descriptor

    def replace(old: Any, new: Any, **named: Any) -> None:
        real["replace"](old, new, **named)
        if is_below(new):
            record.change({str(new): record.seen[str(old)]}, str(old))

    def mkdir(path: Any, *more: Any, **named: Any) -> None:
        real["mkdir"](path, *more, **named)
        if is_below(path):
            record.change({str(path): None})

    def unlink(path: Any, **named: Any) -> None:
        real["unlink"](path, **named)
        if is_below(path):
            record.change({}, str(path))

    def fsync(descriptor: int) -> None:
        real["fsync"](descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if is_below(f"{path}{os.sep}"):
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            (record.sync_folder if is_folder else record.sync_file)(path)

    doubles = {"open": open_, "replace": replace, "mkdir": mkdir, "unlink": unlink, "fsync": fsync}
    record.begin()
    with contextlib.ExitStack() as patches:
        for name, double in doubles.items():
            patches.enter_context(mock.patch.object(os, name, double))
        yield record


# A disk after a cut: the bytes of each file by its path, None for a folder.
After = Mapping[str, bytes | None]


def after_a_cut(moment: Moment) -> Iterator[After]:
    """Give the disks that a cut at a moment may leave, within reason: of the changes of names that
    were not synced all, none, the first ones, all but one, and one alone.
    """
    changes = moment.pending
    places = range(len(changes))
    chosen = [
        changes,
        *(changes[:place] for place in places),
        *(changes[:place] + changes[place + 1 :] for place in places),
        *([changes[place]] for place in places),
    ]
    for some in chosen:
        names = dict(moment.names)
        for change in some:
            _apply(change, names)
        for left in Bytes:
            yield {
                path: None if file is None else _left(moment, file, left)
                for path, file in names.items()
                if _can_be_reached(path, names, moment.root)
            }


def _can_be_reached(path: str, names: Mapping[str, File], root: str) -> bool:
    """Say whether all folders above a name have names too."""
    parent = os.path.dirname(path)
    return parent == root or (parent in names and _can_be_reached(parent, names, root))


def _left(moment: Moment, file: int, left: Bytes) -> bytes:
    synced = moment.synced.get(file, b"")
    written = moment.written.get(file, synced)
    if written == synced:
        return synced
    kept: dict[Bytes, Callable[[], bytes]] = {
        Bytes.ALL: lambda: written,
        Bytes.HALF: lambda: written[: len(written) // 2],
        Bytes.ZEROS: lambda: bytes(len(written)),
        Bytes.NONE: lambda: synced,
    }
    return kept[left]()


def write_out(after: After, root: Path) -> None:
    """Make a folder hold what a cut has left."""
    shutil.rmtree(root)
    root.mkdir()
    for path, body in sorted(after.items()):
        if body is None:
            Path(path).mkdir()
        else:
            Path(path).write_bytes(body)
