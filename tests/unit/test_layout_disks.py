"""A disk that fails while a layout gives its files their names."""

from __future__ import annotations

from typing import Any

import pytest

from _regsync.layout import Layout
from tests.layouts import check_layout, names_of
from tests.test_layout_disks import Scene, mounted

pytestmark = [pytest.mark.slow]


def test_a_disk_that_fails_loses_no_image_that_was_reported(tmp_path, monkeypatch):
    with mounted(tmp_path) as disk:
        scene = Scene(tmp_path, disk.layout)
        assert scene.sync().status == 0
        before = dict(scene.tops())
        scene.images["app:v1"] = scene.seed.image()
        scene.images["app:v3"] = scene.seed.image(sizes=(2_000_000,))
        scene.write()
        write_names = Layout._write_names

        def fails_meanwhile(layout: Layout, *given: Any) -> None:
            disk.shut_down()
            write_names(layout, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Layout, "_write_names", fails_meanwhile)
            ran = scene.sync()
        assert ran.statuses() == ["failed", "skipped", "failed"], ran.err
        error = next(each["error"] for each in ran.images if each["error"])
        assert "Input/output error" in error["message"]
        assert error["hint"]

        disk.umount()
        disk.mount()
        assert names_of(disk.layout) == before
        check_layout(disk.layout)
        assert scene.sync().status == 0
        assert names_of(disk.layout) == scene.tops()
        check_layout(disk.layout)
