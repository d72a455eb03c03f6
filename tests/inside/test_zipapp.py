"""The built file: same bytes everywhere, bytecode used, all that it needs inside, no compiled part."""

from __future__ import annotations

import sys
import zipfile

import pytest

from tests.builds import TREE, WHEELS, copy_sources, run

# Prints where a module of a sub-package was found, and what its document says, read in both ways.
READ_DOCUMENT = """
import importlib.resources, pkgutil
import _regsync.scratch.inner.module as module
print(module.__file__, module.__name__, type(module.__loader__).__name__)
print(pkgutil.get_data("_regsync.scratch.inner", "schema.json").decode())
print((importlib.resources.files("_regsync.scratch.inner") / "schema.json").read_text())
"""


@pytest.mark.slow
def test_sub_packages_and_their_documents_are_carried(pyz, tmp_path):
    copy_sources(tmp_path)
    inner = tmp_path / "_regsync" / "scratch" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (inner / "module.py").write_text("from _regsync.scratch import inner\n")
    (inner / "schema.json").write_text('{"type": "object"}')
    (inner / "notes.txt").write_text("stays at home")

    command = [sys.executable, tmp_path / "tools" / "build_zipapp.py"]
    done = run(*command, "--cache", WHEELS)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "dist" / "regsync-nofips.pyz"
    with zipfile.ZipFile(built) as archive, zipfile.ZipFile(pyz) as before:
        added = {name for name in archive.namelist() if "scratch" in name}
        assert set(archive.namelist()) - added == set(before.namelist())
    package = "_regsync/scratch"
    modules = [f"{package}/{name}.py" for name in ("__init__", "inner/__init__", "inner/module")]
    documents = [f"{package}/inner/schema.json"]
    assert added == {
        *modules,
        *documents,
        *(f"{TREE}/{name}" for name in documents),
        *(f"{TREE}/{name}c" for name in modules),
    }

    told = '{"type": "object"}\n' * 2
    tree = f"{built / TREE}:{built}"
    shown = run(sys.executable, "-S", "-c", f"import tree_importer{READ_DOCUMENT}", PYTHONPATH=tree)
    place = f"{built / TREE}/{package}/inner/module.pyc _regsync.scratch.inner.module"
    assert (shown.stderr, shown.stdout) == ("", f"{place} TreeImporter\n{told}")
    shown = run(sys.executable, "-S", "-c", READ_DOCUMENT, PYTHONPATH=str(built))
    place = f"{built}/{package}/inner/module.py _regsync.scratch.inner.module"
    assert (shown.stderr, shown.stdout) == ("", f"{place} zipimporter\n{told}")

    (inner / "__init__.py").unlink()
    refused = run(*command, "--cache", WHEELS)
    assert refused.stderr == f"error: {package}/inner has modules and no __init__.py\n"
