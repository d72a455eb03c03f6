"""What the file is made of, for somebody who trusts nobody: each byte accounted for, each hash
pinned, built again.

That two builds in different directories, at different times, under different umasks and by
different Pythons give the same bytes, that the inventory is valid, and the sums, is in
test_zipapp.py; here is what a third party does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.builds import NOBODY, TREE, WHEELS, copy_sources, run
from tests.ends import ROOT
from tools import build_zipapp
from tools.build_zipapp import BUNDLE, BuildError

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/"}
TEXTS = {
    "MIT": "Permission is hereby granted, free of charge",
    "BSD-3-Clause": "Redistribution and use in source and binary forms",
    "PSF-2.0": "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
}


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert len(set(archive.namelist())) == len(archive.namelist())
        return {name: archive.read(name) for name in archive.namelist()}


def altered(wheel: build_zipapp.Wheel, folder: Path) -> Path:
    """Write a wheel in which one bit is another."""
    data = bytearray((WHEELS / wheel.file).read_bytes())
    data[len(data) // 2] ^= 1
    path = folder / wheel.file
    path.write_bytes(data)
    return path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="supply-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_every_entry_is_a_source_of_ours_a_file_of_a_wheel_or_generated(pyz):
    held = contents(pyz)
    known = {
        "__main__.py": build_zipapp.MAIN.encode(),
        "old_python.py": (ROOT / "tools" / "old_python.py").read_bytes(),
        "sbom.cdx.json": build_zipapp.sbom(),
    }
    ours = (ROOT / "_regsync").rglob("*")
    for path in [ROOT / "regsync.py", *(each for each in ours if each.suffix in (".py", ".json"))]:
        known[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    root_alone = {"__main__.py", "old_python.py"}
    for wheel in BUNDLE:
        with zipfile.ZipFile(WHEELS / wheel.file) as archive:
            files = {
                name: archive.read(name) for name in archive.namelist() if name.endswith(".py")
            }
        known |= {name: data for name, data in files.items() if name in held}
        if wheel.newest < sys.version_info[:2]:
            root_alone |= files.keys()
        assert {name for name in files if name not in held and "/tests/" not in name} == set(
            wheel.dropped
        )
    root = {
        name: data for name, data in held.items() if not name.startswith((f"{TREE}/", "licenses/"))
    }
    assert root.pop("build.json")
    assert root == known
    tree = {
        name.removeprefix(f"{TREE}/"): data
        for name, data in held.items()
        if name.startswith(f"{TREE}/")
    }
    # Its source is in no other place: it finds the other modules of its tree.
    assert tree.pop("tree_importer.py") == (ROOT / "tools" / "tree_importer.py").read_bytes()
    compiled = {name for name in known if name.endswith(".py")} - root_alone | {"tree_importer.py"}
    assert {name for name in tree if name.endswith(".pyc")} == {f"{name}c" for name in compiled}
    documents = {name: data for name, data in tree.items() if not name.endswith(".pyc")}
    assert documents == {
        name: data
        for name, data in known.items()
        if name.endswith(".json") and name != "sbom.cdx.json"
    }


@pytest.mark.parametrize("wheel", BUNDLE, ids=lambda wheel: wheel.name)
def test_the_licence_inside_is_the_one_of_the_inventory(pyz, wheel):
    texts = [
        data.decode()
        for name, data in contents(pyz).items()
        if name.startswith(f"licenses/{wheel.name}/")
    ]
    assert {name for name, words in TEXTS.items() if words in "\n".join(texts)} == set(
        wheel.licence.split(" AND ")
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can be another user")
def test_another_user_with_another_release_of_python_builds_the_same(pyz, open_folder):
    """In a directory of theirs, without HOME or network, under their umask. Another patch release may
    compile a few modules differently.
    """
    folder = copy_sources(open_folder / "source")
    shutil.copytree(WHEELS, folder / "wheels")
    shutil.copyfile(pyz, folder / "theirs.pyz")
    command = ["tools/build_zipapp.py", "--check", "theirs.pyz", "--cache", "wheels"]
    theirs: Any = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "umask": 0o027}
    for python in (sys.executable, "/usr/bin/python{}.{}".format(*sys.version_info)):
        try:
            done = subprocess.run(
                [python, *command],
                cwd=folder,
                env=OFFLINE,
                capture_output=True,
                text=True,
                check=False,
                **theirs,
            )
        except (PermissionError, FileNotFoundError):
            continue
        if done.returncode:
            assert run(python, "-V").stdout != run(sys.executable, "-V").stdout
            assert "theirs.pyz has the sources of this checkout" in done.stderr
        else:
            assert done.stdout.startswith(
                "theirs.pyz is regsync-nofips.pyz of this source, byte for byte"
            )
        return
    pytest.skip("no interpreter of this version can be run by another user")


def section(page: str, title: str) -> str:
    """Return the text of a page between a heading and the next one of its kind."""
    text = (ROOT / page).read_text(encoding="utf-8")
    _, found, rest = text.partition(f"## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


# What is done beside the file, then what is done in a checkout.
BESIDE_THE_FILE = section("docs/verify.md", "Check the copy") + section("docs/verify.md", "Read it")
IN_A_CHECKOUT = section("docs/verify.md", "Build it again") + section(
    "docs/install.md", "Build without a network"
)


@pytest.mark.slow
def test_the_recipe_for_a_third_party_works_without_a_network(pyz, tmp_path):
    folder = copy_sources(tmp_path / "source")
    shutil.copytree(pyz.parent, folder / "dist")
    shutil.copytree(WHEELS, folder / "wheels")
    (folder / "build").mkdir()
    (folder / "build" / "wheels").symlink_to(folder / "wheels")
    lines = [
        (line, place)
        for text, place in ((BESIDE_THE_FILE, folder / "dist"), (IN_A_CHECKOUT, folder))
        for block in re.findall(r"(?ms)^```\n(.*?)^```$", text)
        for line in block.splitlines()
    ]
    assert len(lines) == 6
    for line, place in lines:
        command = re.sub(r"\bpython3(\.\d+)?\b", sys.executable, line)
        command = command.replace("/media/usb", str(folder / "dist"))
        done = run("sh", "-c", command, cwd=str(place), **OFFLINE)
        assert (done.returncode, done.stderr) == (0, ""), line
        if "--check /media" in line:
            told = "regsync-nofips.pyz is regsync-nofips.pyz of this source, byte for byte"
            assert done.stdout == f"{folder}/dist/{told}\n"
    for name in ("regsync.pyz", "regsync-nofips.pyz", "SHA256SUMS"):
        assert (folder / "dist" / name).read_bytes() == (pyz.parent / name).read_bytes()


class TestAnAlteredWheel:
    """One bit, in a wheel that is otherwise the real one."""

    def test_in_the_cache_is_refused(self, tmp_path):
        altered(BUNDLE[1], tmp_path)
        with pytest.raises(
            BuildError, match=f"has sha256 [0-9a-f]*, not {BUNDLE[1].sha256} as pinned"
        ):
            build_zipapp.fetch(BUNDLE[1], str(tmp_path))

    def test_of_the_index_is_refused(self, tmp_path, monkeypatch):
        altered(BUNDLE[1], tmp_path)
        self.offer(tmp_path, monkeypatch)
        with pytest.raises(BuildError, match="the index offers a file with another sha256"):
            build_zipapp.fetch(BUNDLE[1], str(tmp_path / "cache"))
        assert not list((tmp_path / "cache").iterdir())

    def test_unaltered_it_is_taken(self, tmp_path, monkeypatch):
        self.offer(WHEELS, monkeypatch)
        path = Path(build_zipapp.fetch(BUNDLE[1], str(tmp_path)))
        assert path.read_bytes() == (WHEELS / BUNDLE[1].file).read_bytes()

    @staticmethod
    def offer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


class TestCheck:
    """`--check` against files that somebody changed; what is built again is `pyz` itself here."""

    @pytest.fixture(autouse=True)
    def built(self, pyz: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = [
            str(pyz.with_name(name)) for name in ("regsync.pyz", "regsync-nofips.pyz", "SHA256SUMS")
        ]
        monkeypatch.setattr(build_zipapp, "build", lambda *_, **__: files)

    def refused(self, path: Path) -> str:
        with pytest.raises(BuildError) as caught:
            build_zipapp.check(str(path), cache="", pythons=[sys.executable])
        return str(caught.value).replace(str(path), "it")

    def changed(self, pyz: Path, tmp_path: Path, entries: Mapping[str, bytes]) -> Path:
        path = tmp_path / "changed.pyz"
        build_zipapp.write(str(path), {**contents(pyz), **entries})
        return path

    def test_what_is_the_same_is_said(self, pyz):
        for name in ("regsync.pyz", "regsync-nofips.pyz"):
            said = build_zipapp.check(str(pyz.with_name(name)), cache="", pythons=[sys.executable])
            assert said.endswith(f"is {name} of this source, byte for byte")

    def test_the_build_without_the_gate_is_not_taken_for_the_other(self, pyz, tmp_path):
        for own, other in (
            ("regsync-nofips.pyz", "regsync.pyz"),
            ("regsync.pyz", "regsync-nofips.pyz"),
        ):
            shutil.copy(pyz.with_name(own), tmp_path / other)
            assert (
                self.refused(tmp_path / other)
                == f"it has the name of another build: it is {own} of this source"
            )
        installed = shutil.copy(pyz.with_name("regsync.pyz"), tmp_path / "regsync")
        said = build_zipapp.check(str(installed), cache="", pythons=[sys.executable])
        assert said.endswith("is regsync.pyz of this source, byte for byte")

    def test_an_entry_that_was_changed_is_named(self, pyz, tmp_path):
        path = self.changed(pyz, tmp_path, {"h11/_events.py": b"import os\n"})
        assert self.refused(path) == "it is not built from this source: h11/_events.py differ"

    def test_bytecode_of_another_patch_release_is_told_from_another_source(
        self, pyz, tmp_path, monkeypatch
    ):
        """`build` takes the releases that are recorded in the file."""
        record = json.loads(contents(pyz)["build.json"])
        release = "CPython {}.{}.99".format(*sys.version_info)
        again = tmp_path / "regsync.pyz"
        theirs = {"build.json": json.dumps({**record, "trees": {TREE: release}}).encode()}
        build_zipapp.write(str(again), {**contents(pyz), **theirs})
        monkeypatch.setattr(build_zipapp, "build", lambda *_, **__: [str(again), "SHA256SUMS"])

        assert release in build_zipapp.trees_of(str(again)).values()
        theirs[f"{TREE}/h11/_events.pyc"] = b"otherwise"
        assert self.refused(self.changed(pyz, tmp_path, theirs)) == (
            f"it has the sources of this checkout, but {TREE}/h11/_events.pyc differ; it says that"
            f" {release} compiled them: give that release as --python"
        )
        theirs["h11/_events.py"] = b"import os"
        refused = self.refused(self.changed(pyz, tmp_path, theirs))
        assert refused.startswith("it is not built from this source: ")

    def test_an_entry_that_was_added_is_named(self, pyz, tmp_path):
        assert "source: sitecustomize.py differ" in self.refused(
            self.changed(pyz, tmp_path, {"sitecustomize.py": b""})
        )

    def test_many_are_counted(self, pyz, tmp_path):
        path = self.changed(pyz, tmp_path, {f"more{number}": b"" for number in range(7)})
        assert "more4 and 2 more differ" in self.refused(path)

    def test_bytes_between_entries_are_noticed(self, pyz, tmp_path):
        path = tmp_path / "longer.pyz"
        path.write_bytes(b"#!/bin/sh\n" + pyz.read_bytes())
        assert "bytes outside of its entries differ" in self.refused(path)

    def test_other_interpreters_are_asked_for(self, pyz, tmp_path):
        path = self.changed(
            pyz, tmp_path, {"build.json": b'{"trees": {"cp399": "CPython 3.99.1"}}'}
        )
        assert (
            self.refused(path)
            == "it has trees of CPython 3.99.1: give these as --python, each once"
        )

    @pytest.mark.parametrize("data", [b"", b"#!/bin/sh\n", b"PK\5\6" + bytes(18)])
    def test_what_is_no_such_file_is_refused(self, tmp_path, data):
        path = tmp_path / "odd.pyz"
        path.write_bytes(data)
        assert self.refused(path).startswith("it is no file that this builds: ")

    @pytest.mark.parametrize(
        "told", [b"[]", b"{}", b'{"trees": []}', b'{"trees": {"cp311": "\\u001b[2J"}}', b"\xff"]
    )
    def test_what_records_nothing_is_refused(self, pyz, tmp_path, told):
        path = self.changed(pyz, tmp_path, {"build.json": told})
        assert self.refused(path).startswith("it is no file that this builds: ")
