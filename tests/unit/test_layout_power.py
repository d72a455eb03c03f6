"""Power cuts while a layout is written: what was not synced is lost, or torn (I11)."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from _regsync.layout import Index
from conformance.client.attachments import SBOM
from conformance.content.images import Seed
from tests.ends import document, run_regsync
from tests.layouts import NAME, blob_path, check_layout, files_of, make_layout, names_of
from tests.power_cuts import After, Moment, Recording, after_a_cut, recording, write_out
from tests.thinning import thorough


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
        if beginning == "half":
            digest = max(v1.blobs, key=lambda each: len(v1.blobs[each]))
            half = v1.blobs[digest][: len(v1.blobs[digest]) // 2]
            blob_path(self.disk, digest).with_suffix(".partial").write_bytes(half)
        make_layout(directory / "source", new)
        self.tops = {
            name: {images[name].top for images in (old, new) if name in images}
            for name in new
            if name
        }
        registries = {
            "source": {"url": "oci-layout:source"},
            "disk": {"url": "oci-layout:usb/disk"},
        }
        self.config = directory / "mirror.yaml"
        mapping = {"from": "app", "source": "source", "targets": ["disk"]}
        self.config.write_text(document(registries, mapping))

    def sync(self) -> Any:
        return run_regsync("sync", "-q", "-c", str(self.config))

    def record(self) -> Recording:
        with recording(self.usb) as record:
            assert self.sync().status == 0
        return record

    def check_cut(self) -> None:
        """What a reader finds is old or new, and whole. A layout that was there is not gone."""
        if not (self.disk / "index.json").exists():
            assert not self.was_there
            new_index = self.disk / "index.json.partial"
            if not is_readable(new_index):
                return
            new_index.rename(self.disk / "index.json")
        index = Index((self.disk / "index.json").read_bytes())
        assert all(entry.label(NAME) in {*self.tops, ""} for entry in index.entries.values())
        names = names_of(self.disk)
        assert all(names[name] in self.tops[name] for name in names)
        check_layout(self.disk)


def is_readable(index: Path) -> bool:
    try:
        json.loads(index.read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return True


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut off from the disk of the tests: what is synced is recorded alone."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def _cuts(record: Recording) -> Iterator[After]:
    """Give each disk once."""
    seen = set[frozenset[tuple[str, bytes | None]]]()
    for moment in record.moments:
        for after in after_a_cut(moment):
            key = frozenset(after.items())
            if key not in seen:
                seen.add(key)
                yield after


def _lost(moment: Moment) -> After:
    """Return the disk on which nothing is that was not synced."""
    return next(after_a_cut(dataclasses.replace(moment, pending=[], written={})))


def test_names_that_an_earlier_run_has_not_synced_are_synced_before_the_index_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier run has renamed its files and could not sync their folder."""
    scene = Scene(tmp_path, "empty")

    def fail(folder: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    with recording(scene.usb) as record:
        with monkeypatch.context() as patch:
            patch.setattr("_regsync.layout.sync_folder", fail)
            assert scene.sync().status != 0
        assert files_of(scene.disk) - {"index.json", "oci-layout"}, "nothing was renamed"
        assert scene.sync().status == 0
    write_out(_lost(record.moments[-1]), scene.usb)
    check_layout(scene.disk)
    assert names_of(scene.disk).keys() == scene.tops.keys()


class Share(NamedTuple):
    """Which cuts are tried: each `every`-th from `first` on. Of those, each `continued`-th is followed
    by another run.
    """

    first: int
    every: int
    continued: int = 1


# A few in an ordinary run, all in eight tests of a thorough one.
SHARES = [Share(4, 5, 15), *(thorough(pytest.param(Share(first, 8))) for first in range(8))]


def _try_cuts(scene: Scene, share: Share) -> None:
    record = scene.record()
    complete = (scene.disk / "index.json").read_bytes()
    files = files_of(scene.disk)

    write_out(_lost(record.moments[-1]), scene.usb)
    assert (scene.disk / "index.json").read_bytes() == complete, "what was reported is lost"
    check_layout(scene.disk)
    assert files_of(scene.disk) >= files

    cuts = list(itertools.islice(_cuts(record), share.first, None, share.every))
    assert len(cuts) * share.every > 100
    for number, after in enumerate(cuts, 1):
        write_out(after, scene.usb)
        scene.check_cut()
        if number % share.continued == 0:
            write_out(after, scene.usb)
            ran = scene.sync()
            assert ran.status == 0, ran.err
            check_layout(scene.disk)
            assert (scene.disk / "index.json").read_bytes() == complete
            assert files_of(scene.disk) == files


@pytest.mark.slow
@pytest.mark.parametrize("beginning", ["nothing", "empty", "old", "half"])
@pytest.mark.parametrize("share", SHARES)
def test_a_layout_is_whole_after_a_power_cut_and_the_next_run_completes_it(
    tmp_path, beginning, share
):
    _try_cuts(Scene(tmp_path, beginning), share)
