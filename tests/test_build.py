"""The built file: the same bytes everywhere, each of them accounted for; it starts on any Python, and
says what is wrong with one that is too old.

What a start imports is in tests/unit/test_start.py.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import stat
import sys
import zipfile
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.builds import TREE, WHEELS, contents, copy_sources, find_python, python, run
from tests.program import ROOT
from tools import build_zipapp
from tools.build_zipapp import BUNDLE, BuildError

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/"}
BUILT = ("regsync.pyz", "regsync-nofips.pyz", "SHA256SUMS")

# The same bytes.


@pytest.mark.slow
def test_a_build_elsewhere_by_another_python_gives_the_same_bytes(pyz, tmp_path):
    """Another place, other dates of the sources, another umask, time zone and seed of hashes."""
    checkout = copy_sources(tmp_path / "a deeper" / "checkout")
    for path in [checkout, *checkout.rglob("*")]:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    command = [find_python("python3.10") or sys.executable, checkout / "tools" / "build_zipapp.py"]
    command += ["--python", sys.executable, "--out", tmp_path / "out", "--cache", WHEELS]
    before = os.umask(0o077)
    try:
        done = run(*command, TZ="Pacific/Kiritimati", PYTHONHASHSEED="12345")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    for name in BUILT:
        assert (tmp_path / "out" / name).read_bytes() == (pyz.parent / name).read_bytes()


def commands_of(page: str, *titles: str) -> list[str]:
    """Return the commands in sections of a page, down to the next heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    sections = [re.split("\n#+ ", text.partition(f"# {title}\n")[2])[0] for title in titles]
    blocks = re.findall(r"(?ms)^```\n(.*?)^```$", "\n".join(sections))
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_the_recipe_for_a_third_party_works_without_a_network(pyz, tmp_path):
    folder = copy_sources(tmp_path / "source")
    shutil.copytree(pyz.parent, folder / "dist")
    shutil.copytree(WHEELS, folder / "build" / "wheels")
    shutil.copytree(WHEELS, folder / "wheels")
    page = "docs/install.md"
    compare = commands_of(page, "Install it on another host")[0]
    beside_the_file = [compare, *commands_of(page, "Read it")[:3]]
    in_a_checkout = commands_of(page, "Build it again")[:2]
    in_a_checkout += commands_of(page, "Build without a network")
    assert (len(beside_the_file), len(in_a_checkout)) == (4, 3)
    for line in (*beside_the_file, *in_a_checkout):
        place = folder / "dist" if line in beside_the_file else folder
        command = re.sub(r"\bpython3(\.\d+)?\b", sys.executable, line)
        command = command.replace("/media/usb", str(folder / "dist"))
        done = run("sh", "-c", command, cwd=str(place), **OFFLINE)
        assert (done.returncode, done.stderr) == (0, ""), line
    for name in BUILT:
        assert (folder / "dist" / name).read_bytes() == (pyz.parent / name).read_bytes()


# What is inside.


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
        files = {
            name: data
            for name, data in contents(WHEELS / wheel.file).items()
            if name.endswith(".py") and "/tests/" not in name
        }
        known |= {name: data for name, data in files.items() if name in held}
        assert files.keys() - held.keys() == set(wheel.dropped)
        if wheel.newest < sys.version_info[:2]:
            root_alone |= files.keys()

    others = (f"{TREE}/", "licenses/", "build.json")
    assert {name: data for name, data in held.items() if not name.startswith(others)} == known
    tree = {
        name.removeprefix(f"{TREE}/"): data for name, data in held.items() if name.startswith(TREE)
    }
    # Its source is in no other place: it finds the other modules of its tree.
    assert tree.pop("tree_importer.py") == (ROOT / "tools" / "tree_importer.py").read_bytes()
    compiled = {name for name in known if name.endswith(".py")} - root_alone | {"tree_importer.py"}
    documents = {
        name: data
        for name, data in known.items()
        if name.endswith(".json") and name != "sbom.cdx.json"
    }
    assert tree.keys() == {f"{name}c" for name in compiled} | documents.keys()
    assert tree.items() >= documents.items()


LICENCES = {
    "MIT": "Permission is hereby granted, free of charge",
    "BSD-3-Clause": "Redistribution and use in source and binary forms",
    "PSF-2.0": "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
}


def test_each_package_has_the_licence_of_the_inventory_inside(pyz):
    texts: dict[str, str] = {}
    for name, data in contents(pyz).items():
        if name.startswith("licenses/"):
            package = name.split("/")[1]
            texts[package] = texts.get(package, "") + data.decode()
    assert texts.pop("regsync") == (ROOT / "LICENSE").read_text()
    found = {
        package: {name for name, words in LICENCES.items() if words in text}
        for package, text in texts.items()
    }
    assert found == {wheel.name: set(wheel.licence.split(" AND ")) for wheel in BUNDLE}


def test_entries_are_sorted_without_a_time_and_bytecode_needs_no_date(pyz):
    """zipimport compiles a source whose date differs; the unchecked-hash kind (PEP 552) cannot
    differ.
    """
    with zipfile.ZipFile(pyz) as archive:
        entries = archive.infolist()
        codes = [archive.read(name) for name in archive.namelist() if name.endswith(".pyc")]
        told = json.loads(archive.read("build.json"))
    assert [entry.filename for entry in entries] == sorted(entry.filename for entry in entries)
    assert {
        (entry.compress_type, entry.date_time, entry.external_attr >> 16) for entry in entries
    } == {(zipfile.ZIP_STORED, (1980, 1, 1, 0, 0, 0), 0o100644)}
    assert len(codes) > 50
    assert {code[4:8] for code in codes} == {b"\x01\0\0\0"}
    assert told["trees"] == {TREE: "CPython {}.{}.{}".format(*sys.version_info)}
    assert told["packages"]["h11"]["version"] == "0.16.0"


def test_the_builds_differ_in_one_constant_and_say_which_they_are(pyz):
    nofips, fips = contents(pyz), contents(pyz.with_name("regsync.pyz"))
    constant = "_regsync/__init__.py"
    assert nofips.keys() == fips.keys()
    differing = {name for name in fips if fips[name] != nofips[name]}
    assert differing == {constant, f"{TREE}/{constant}c"}
    assert b"FIPS_BUILD = True\n" in fips[constant]
    assert fips[constant].replace(b"= True", b"= False") == nofips[constant]
    for path, build in ((pyz, "nofips"), (pyz.with_name("regsync.pyz"), "fips")):
        assert json.loads(run(sys.executable, path, "version", "--json").stdout)["build"] == build
    done = run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=str(pyz.parent))
    assert done.stdout == "regsync.pyz: OK\nregsync-nofips.pyz: OK\n"


def test_the_inventory_is_valid_and_names_what_is_inside(pyz):
    text = contents(pyz)["sbom.cdx.json"].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    told = json.loads(text)
    assert told["metadata"]["component"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    for each, wheel in zip(told["components"], BUNDLE, strict=True):
        [distribution] = each["externalReferences"]
        assert (each["name"], each["version"]) == (wheel.name, wheel.version)
        assert distribution["hashes"] == [{"alg": "SHA-256", "content": wheel.sha256}]
        assert {entry["value"] for entry in each.get("properties", [])} == set(wheel.dropped)


def test_bundle_has_the_versions_of_the_metadata():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = re.findall(
        r'"([^"]+)"', text.partition("\ndependencies = [")[2].partition("]")[0]
    )
    bundled = [f"{wheel.name}=={wheel.version}" for wheel in BUNDLE]
    assert bundled[: len(dependencies)] == dependencies


# How it starts.


def test_it_runs_from_any_directory_and_by_its_own_first_line(pyz):
    assert pyz.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    assert stat.S_IMODE(pyz.stat().st_mode) == 0o755
    for command, folder in (
        ([sys.executable, pyz], "/"),
        ([sys.executable, "-I", "-S", "-OO", pyz], "/"),
        ([sys.executable, "-W", "error", pyz], "/"),
        ([sys.executable, pyz.name], pyz.parent),
        ([pyz], "/"),
    ):
        done = run(*command, "version", cwd=str(folder))
        assert (done.returncode, done.stderr) == (0, ""), command
        assert re.fullmatch(r"regsync \S+ \(.+\), CPython 3\.\d+\.\d+, \S.*\n", done.stdout)


# On a Python that is too old.


def test_start_parses_on_old_pythons():
    """Old grammars are a subset here: no annotations, f-strings, keyword-only marks."""
    text = build_zipapp.MAIN + build_zipapp.own_tool("old_python.py").decode()
    tree = ast.parse(text, feature_version=(3, 6))
    newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef, ast.Nonlocal)
    assert not [node for node in ast.walk(tree) if isinstance(node, (*newer, ast.Starred))]


@pytest.mark.parametrize("name", ["python2.7", "python3.6", "python3.9"])
def test_old_python_hands_over_to_a_newer_one_or_says_what_is_needed(pyz, tmp_path, name):
    """Names of newer Pythons that do not start one are passed over: a version manager's are such."""
    old = python(name)
    done = run(old, pyz, "version", PATH="/nonexistent")
    assert done.returncode == 3
    error, hint = done.stderr.splitlines()
    assert error.startswith(
        "error: CONFIG_ERROR: regsync needs Python 3.10 or newer; this is Python "
    )
    assert hint.startswith("hint: ")
    assert hint.endswith(f"the file regsync-linux-{platform.machine()} needs none")

    (tmp_path / "python3.14").mkdir()
    (tmp_path / "python3.13").write_text("#!/bin/sh\necho no such version >&2\nexit 127\n")
    (tmp_path / "python3.13").chmod(0o755)
    (tmp_path / "python3.10").symlink_to(sys.executable)
    done = run(old, pyz, "version", "--json", PATH=f":relative:{tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["python"] == f"CPython {platform.python_version()}"
    options = ["-E", "-S", pyz, "version", "-v"]
    isolated = run(old, *options, PATH=str(tmp_path), PYTHONVERBOSE="1")
    assert (isolated.returncode, isolated.stderr) == (0, "")


# What is refused: wheels that are not the pinned ones.


def alter(folder: Path) -> None:
    """Write a wheel in which one bit is another."""
    data = bytearray((WHEELS / BUNDLE[1].file).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / BUNDLE[1].file).write_bytes(data)


def test_an_altered_wheel_in_the_cache_is_refused(tmp_path):
    alter(tmp_path)
    with pytest.raises(BuildError, match=f"has sha256 [0-9a-f]*, not {BUNDLE[1].sha256} as pinned"):
        build_zipapp.fetch(BUNDLE[1], str(tmp_path))


@pytest.mark.slow
def test_an_altered_wheel_of_the_index_is_refused_and_the_pinned_one_taken(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    alter(tmp_path)
    with pytest.raises(BuildError, match="pip could not fetch"):
        build_zipapp.fetch(BUNDLE[1], str(tmp_path / "cache"))
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setenv("PIP_FIND_LINKS", str(WHEELS))
    path = Path(build_zipapp.fetch(BUNDLE[1], str(tmp_path / "cache")))
    assert path.read_bytes() == (WHEELS / BUNDLE[1].file).read_bytes()
