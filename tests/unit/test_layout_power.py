"""Power cuts while a layout is written: what was not synced is lost, or torn (I11).

A run is recorded: each call that names, renames, removes or syncs a file below a folder, and what each
file held at that moment. A cut may come between any two calls. Then the disk holds for certain what was
synced: the bytes of a file that was synced itself, the names in a folder that was synced. Of the rest
POSIX promises nothing: names are there or not, one without the other; bytes are there, or some, or zeros,
or none. (`os.sync` is no promise, because POSIX lets it return early.) A kill is the kindest of these cuts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from _regsync.layout import Index
from conformance.images import Seed
from tests.ends import document, run_regsync
from tests.layouts import NAME, check_layout, files_of, make_layout, names_of
from tests.mirrors import SBOM
from tests.thinning import thorough

# Names, each with the number of its file; a folder is None.
Names = dict[str, int | None]
# A disk after a cut: the bytes of each file by its path, None for a folder.
After = Mapping[str, bytes | None]

# What a cut leaves of bytes that were written: all, half, zeros, or what was synced.
LEFT = (
    lambda written, synced: written,
    lambda written, synced: written[: len(written) // 2],
    lambda written, synced: bytes(len(written)),
    lambda written, synced: synced,
)


class Change(NamedTuple):
    """One change of names in a folder."""

    folder: str
    added: Names
    removed: tuple[str, ...]

    def apply(self, names: Names) -> None:
        for name in self.removed:
            names.pop(name, None)
        names.update(self.added)


class Moment(NamedTuple):
    """The disk between two calls."""

    # What is certain.
    names: Names
    synced: dict[int, bytes]
    # What is not: changes of names in their order, and what files hold as long as all goes well.
    pending: list[Change]
    written: dict[int, bytes]


class Recording:
    """The moments of a run below a folder, of which all that is there at first counts as synced."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.moments = list[Moment]()
        self.pending = list[Change]()
        self.synced = dict[int, bytes]()
        self.count = 0
        self.seen: Names = {}  # as the program sees them
        for path in root.rglob("*"):
            self.seen[str(path)] = None if path.is_dir() else self.new_file()
            if path.is_file():
                self.synced[self.count] = path.read_bytes()
        self.names = dict(self.seen)
        self.note()

    def new_file(self) -> int:
        self.count += 1
        return self.count

    def note(self) -> None:
        """Keep the present moment."""
        written = dict[int, bytes]()
        for path, file in self.seen.items():
            if file is not None and os.path.exists(path):
                written[file] = Path(path).read_bytes()
        kept = (dict(self.names), dict(self.synced), list(self.pending), written)
        self.moments.append(Moment(*kept))

    def change(self, added: Names, *removed: str) -> None:
        """Note a change of names, all in one folder."""
        change = Change(os.path.dirname([*added, *removed][0]), added, removed)
        self.pending.append(change)
        change.apply(self.seen)
        self.note()

    def sync(self, path: str, *, is_folder: bool) -> None:
        if is_folder:
            for change in [each for each in self.pending if each.folder == path]:
                self.pending.remove(change)
                change.apply(self.names)
        else:
            self.synced[self.seen[path] or 0] = Path(path).read_bytes()
        self.note()


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recording]:
    """Record what the block does below a folder."""
    record = Recording(root)
    real = {name: getattr(os, name) for name in ("open", "replace", "mkdir", "unlink")}

    def is_below(path: Any) -> bool:
        return str(path).startswith(f"{record.root}{os.sep}")

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        is_new = is_below(path) and bool(flags & os.O_CREAT) and not os.path.lexists(path)
        descriptor: int = real["open"](path, flags, *more, **named)
        if is_new:
            record.change({str(path): record.new_file()})
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
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if is_below(f"{path}{os.sep}"):
            record.sync(path, is_folder=stat.S_ISDIR(os.fstat(descriptor).st_mode))

    doubles = {"open": open_, "replace": replace, "mkdir": mkdir, "unlink": unlink, "fsync": fsync}
    with contextlib.ExitStack() as patches:
        for name, double in doubles.items():
            patches.enter_context(mock.patch.object(os, name, double))
        yield record


def after_a_cut(moment: Moment, root: Path) -> Iterator[After]:
    """Give the disks that a cut at a moment may leave, within reason: of the changes of names that were
    not synced all, none, the first ones, all but one, and one alone.
    """
    places = [*range(len(moment.pending))]
    chosen = [
        places,
        *(places[:place] for place in places),
        *(places[:place] + places[place + 1 :] for place in places),
        *([place] for place in places),
    ]
    for some in {tuple(each): None for each in chosen}:
        names = dict(moment.names)
        for place in some:
            moment.pending[place].apply(names)
        # A name is there if its folder is.
        there: Names = {}
        for path in sorted(names):
            folder = os.path.dirname(path)
            if folder == str(root) or folder in there:
                there[path] = names[path]
        bodies = {
            path: (moment.written.get(file), moment.synced.get(file, b""))
            for path, file in there.items()
            if file is not None
        }
        is_torn = any(written not in (None, synced) for written, synced in bodies.values())
        for left in LEFT if is_torn else LEFT[:1]:
            after: dict[str, bytes | None] = dict.fromkeys(there)
            for path, (written, synced) in bodies.items():
                is_certain = written is None or written == synced
                after[path] = synced if is_certain else left(written, synced)
            yield after


class Scene:
    """A layout as source, a folder `usb` with the layout to be written, and what that may name."""

    def __init__(self, directory: Path, beginning: str) -> None:
        seed = Seed(78)
        self.usb = directory / "usb"
        self.disk = self.usb / "disk"
        self.usb.mkdir()
        shared = seed.layer(9_000)
        v1 = seed.image(layers=[shared, seed.layer(300)])
        new = {
            "app:v1": v1,
            "app:v2": seed.index(platforms=("linux/amd64", "linux/arm64")),
            "app:latest": seed.image(layers=[shared]),
            "": seed.artifact(v1, SBOM),
        }
        old = {"app:v1": seed.image(), "app:latest": seed.image()} if beginning == "old" else {}
        self.was_there = beginning != "nothing"
        if self.was_there:
            make_layout(self.disk, old)
        make_layout(directory / "source", new)
        self.tops = {
            name: {images[name].top for images in (old, new) if name in images}
            for name in new
            if name
        }
        self.config = directory / "mirror.yaml"
        mapping = {"from": "app", "source": "source", "targets": ["disk"]}
        ends = {"source": "oci-layout:source", "disk": "oci-layout:usb/disk"}
        self.config.write_text(document(ends, mapping, defaults={"artifacts": {}}))

    def sync(self) -> int:
        return run_regsync("sync", "-q", "-c", str(self.config)).status

    def write(self, after: After) -> None:
        """Hold what a cut has left."""
        shutil.rmtree(self.usb)
        self.usb.mkdir()
        for path, body in sorted(after.items()):
            if body is None:
                Path(path).mkdir()
            else:
                Path(path).write_bytes(body)

    def lose(self, moment: Moment) -> None:
        """Hold what was synced, and nothing else."""
        self.write(next(after_a_cut(moment._replace(pending=[], written={}), self.usb)))

    def check_cut(self) -> None:
        """What a reader finds is old or new, and whole. A layout that was there is not gone."""
        index = self.disk / "index.json"
        if not index.exists():
            assert not self.was_there
            try:
                json.loads((self.disk / "index.json.partial").read_bytes())
            except (FileNotFoundError, ValueError):
                return
            (self.disk / "index.json.partial").rename(index)
        entries = Index(index.read_bytes()).entries.values()
        assert all(entry.label(NAME) in {*self.tops, ""} for entry in entries)
        assert all(top in self.tops[name] for name, top in names_of(self.disk).items())
        check_layout(self.disk)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut off from the disk of the tests: what is synced is recorded alone."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Share(NamedTuple):
    """Which cuts are tried: each `every`-th from `first` on. Of those, each `continued`-th is followed by
    another run.
    """

    first: int
    every: int
    continued: int = 1


# A few in an ordinary run, all in eight tests of a thorough one.
SHARES = [Share(4, 15, 16), *(thorough(pytest.param(Share(first, 8))) for first in range(8))]


@pytest.mark.slow
@pytest.mark.parametrize("beginning", ["nothing", "empty", "old"])
@pytest.mark.parametrize("share", SHARES)
def test_a_layout_is_whole_after_a_power_cut_and_the_next_run_completes_it(
    tmp_path, beginning, share
):
    scene = Scene(tmp_path, beginning)
    with recording(scene.usb) as record:
        assert scene.sync() == 0
    complete = (scene.disk / "index.json").read_bytes()
    files = files_of(scene.disk)

    scene.lose(record.moments[-1])
    assert (scene.disk / "index.json").read_bytes() == complete, "what was reported is lost"
    check_layout(scene.disk)
    assert files_of(scene.disk) >= files

    every = {
        frozenset(after.items()): None
        for moment in record.moments
        for after in after_a_cut(moment, scene.usb)
    }
    cuts = [dict(each) for each in [*every][share.first :: share.every]]
    assert len(cuts) * share.every > 100
    for number, after in enumerate(cuts, 1):
        scene.write(after)
        scene.check_cut()
        if number % share.continued == 0:
            scene.write(after)
            assert scene.sync() == 0
            check_layout(scene.disk)
            assert (scene.disk / "index.json").read_bytes() == complete
            assert files_of(scene.disk) == files


def test_names_that_an_earlier_run_has_not_synced_are_synced_before_the_index_is_replaced(
    tmp_path, monkeypatch
):
    """Earlier runs have renamed all files and could not sync their folder."""
    scene = Scene(tmp_path, "empty")

    def fail(folder: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    with recording(scene.usb) as record:
        with monkeypatch.context() as patch:
            patch.setattr("_regsync.layout.sync_folder", fail)
            for _ in range(3):
                assert scene.sync() != 0
        assert files_of(scene.disk) - {"index.json", "oci-layout"}, "nothing was renamed"
        assert scene.sync() == 0
    scene.lose(record.moments[-1])
    check_layout(scene.disk)
    assert names_of(scene.disk).keys() == scene.tops.keys()
