"""A blob for which a disk has too little room is not begun (docs/design.md section 13)."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from _regsync.layout.directory import Layout
from _regsync.layout.disk import LayoutError
from _regsync.oci import Descriptor
from tests.layouts import blob_path, digest_of, files_of, make_layout


class Disk:
    """A disk of some bytes: what is free on it is what the layout's files leave."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.path = directory / "disk"
        self.size = size
        self.least = size
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=self.free()))

    def free(self) -> int:
        used = sum((self.path / name).stat().st_size for name in files_of(self.path))
        self.least = min(self.least, self.size - used)
        return self.size - used


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk of a megabyte, on which the layout lies."""
    return Disk(tmp_path, monkeypatch, 1_000_000)


async def test_a_leftover_needs_room_for_its_rest_alone(tmp_path, monkeypatch):
    body = b"x" * 900
    blob = Descriptor("a/b", digest_of(body), len(body))
    disk = make_layout(tmp_path / "disk", {})
    partial = blob_path(disk, blob.digest).with_suffix(".partial")
    partial.write_bytes(body[:600])
    index_size = (disk / "index.json").stat().st_size  # a second one is written beside it
    layout = Layout(str(tmp_path / "disk"), lambda *_: None)
    monkeypatch.setattr(layout, "free_bytes", lambda: 299 + index_size)
    with pytest.raises(LayoutError, match="room for 299 B, the blob needs 300 B"):
        await layout.begin_blob(blob)
    layout.close(remove_partials=False)
    assert partial.read_bytes() == body[:600], "a larger disk goes on with it"
    layout = Layout(str(tmp_path / "disk"), lambda *_: None)
    monkeypatch.setattr(layout, "free_bytes", lambda: 300 + index_size)
    file = await layout.begin_blob(blob)
    await file.write(memoryview(body)[600:])
    file.finish()
    await layout.commit()
    layout.close()
