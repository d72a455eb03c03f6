"""The built file: same bytes everywhere, bytecode used, all that it needs inside, no compiled part."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.builds import TREE, WHEELS, copy_sources, interpreter, run
from tests.ends import ROOT
from tests.thinning import thorough
from tools import build_zipapp, old_python


def newer_pythons(first: int) -> list[Any]:
    """Return other interpreters' names, from 3.`first`; one of them is enough for an ordinary run."""
    minors = [minor for minor in range(first, 14) if minor != sys.version_info[1]]
    return [f"python3.{minors[0]}", *(thorough(pytest.param(f"python3.{n}")) for n in minors[1:])]


@pytest.mark.slow
@pytest.mark.parametrize("name", newer_pythons(10))
def test_a_build_elsewhere_by_another_python_gives_the_same_bytes(pyz, tmp_path, name):
    """Another place, other dates of the sources, another umask, time zone and seed of hashes."""
    python = interpreter(name) or sys.executable
    checkout = copy_sources(tmp_path / "a deeper" / "checkout")
    for path in [checkout, *checkout.rglob("*")]:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    out = tmp_path / "out"
    command = [python, checkout / "tools" / "build_zipapp.py", "--python", sys.executable]
    before = os.umask(0o077)
    try:
        elsewhere = {"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "12345"}
        done = run(*command, "--out", out, "--cache", WHEELS, **elsewhere)
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    for built in ("regsync.pyz", "regsync-nofips.pyz", "SHA256SUMS"):
        assert (out / built).read_bytes() == (pyz.parent / built).read_bytes()


def test_builds_differ_in_one_constant(pyz):
    with zipfile.ZipFile(pyz) as nofips, zipfile.ZipFile(pyz.with_name("regsync.pyz")) as fips:
        assert nofips.namelist() == fips.namelist()
        differing = {name for name in fips.namelist() if fips.read(name) != nofips.read(name)}
        assert differing == {f"{tree}_regsync/__init__.{end}" for tree, end in DIFFERING}
        assert b"FIPS_BUILD = True\n" in fips.read("_regsync/__init__.py")
        assert fips.read("_regsync/__init__.py").replace(b"= True", b"= False") == nofips.read(
            "_regsync/__init__.py"
        )


DIFFERING = [("", "py"), (f"{TREE}/", "pyc")]


def test_both_builds_say_which_they_are(pyz):
    assert json.loads(run(sys.executable, pyz, "version", "--json").stdout)["build"] == "nofips"
    default = run(sys.executable, pyz.with_name("regsync.pyz"), "version", "--json")
    assert json.loads(default.stdout)["build"] == "fips"


@pytest.mark.parametrize(
    "options", [[], ["-I"], ["-S"], ["-OO"], ["-I", "-S", "-OO"], ["-W", "error"]], ids="".join
)
def test_runs_from_the_root_directory(pyz, options):
    done = run(sys.executable, *options, pyz, "version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"regsync \S+ \(.+\), CPython 3\.\d+\.\d+, \S.*\n", done.stdout)


def test_runs_by_its_own_first_line(pyz):
    assert pyz.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    assert stat.S_IMODE(pyz.stat().st_mode) == 0o755
    assert run(pyz, "--version").returncode == 0


def test_runs_by_a_relative_name(pyz):
    assert run(sys.executable, pyz.name, "version", cwd=str(pyz.parent)).returncode == 0


REPORT = """
import json
origins = {name: getattr(module, "__spec__", None) for name, module in sys.modules.items()}
print(json.dumps({name: str(spec.origin) for name, spec in origins.items() if spec}))
"""


def loaded_by(pyz: Path, code: str) -> dict[str, str]:
    """Run `code` on the file's modules as `__main__.py` does; return the origins of all loaded
    modules.
    """
    start = (
        f"import sys\nsys.path[:0] = [{str(pyz / TREE)!r}, {str(pyz)!r}]\nimport tree_importer\n"
    )
    done = run(sys.executable, "-I", "-S", "-c", start + code + REPORT)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_bytecode_is_what_runs(pyz):
    loaded = loaded_by(
        pyz, "import anyio.abc, anyio._backends._asyncio, h11, regsync, truststore, yaml"
    )
    ours = {name: origin for name, origin in loaded.items() if origin.startswith(str(pyz))}
    assert {
        "anyio.abc",
        "h11._connection",
        "regsync",
        "_regsync",
        "yaml.scanner",
        "truststore",
    } <= set(ours)
    assert {os.path.splitext(origin)[1] for origin in ours.values()} == {".pyc"}


def test_bytecode_is_used_without_comparing_dates(pyz):
    """zipimport compiles a source whose date differs; the unchecked-hash kind (PEP 552) cannot
    differ.
    """
    with zipfile.ZipFile(pyz) as archive:
        codes = [archive.read(name) for name in archive.namelist() if name.endswith(".pyc")]
    assert len(codes) > 50
    assert {code[4:8] for code in codes} == {b"\x01\0\0\0"}


COUNT = """
import sys
seen = []
sys.addaudithook(lambda event, args: event == "compile" and seen.append(str(args[1])))
import anyio, anyio._backends._asyncio, h11, yaml, truststore, regsync
anyio.create_task_group
import json
print(json.dumps(seen))
"""


def test_start_compiles_nothing(pyz):
    """The measurement behind the trees, without a clock: which sources does a start compile?"""
    in_tree = f"import tree_importer{COUNT}"
    with_tree = run(sys.executable, "-S", "-c", in_tree, PYTHONPATH=f"{pyz / TREE}:{pyz}")
    without = run(sys.executable, "-S", "-c", COUNT, PYTHONPATH=str(pyz))
    compiled = [name for name in json.loads(with_tree.stdout) if str(pyz) in name]
    # anyio parses the sources of two packages of its own to import the rest lazily.
    assert {name.partition(f"{TREE}/")[2].removesuffix("c") for name in compiled} <= {
        "anyio/__init__.py",
        "anyio/abc/__init__.py",
    }
    assert len([name for name in json.loads(without.stdout) if str(pyz) in name]) > 40


READS = """
import json, sys
seen = []
if len(sys.argv) > 1:
    import tree_importer
sys.addaudithook(lambda event, args: event == "open" and seen.append(str(args[0])))
before = set(sys.modules)
import h11, regsync, yaml
files = [str(getattr(sys.modules[name], "__file__", "")) for name in set(sys.modules) - before]
print(json.dumps([len([name for name in files if ".pyz" in name]), len([name for name in seen if ".pyz" in name])]))
"""


def test_each_module_is_read_once(pyz):
    """zipimport reads and unmarshals a module to name its file, and again to run it."""
    for options, times in ((["once"], 1), ([], 2)):
        done = run(sys.executable, "-S", "-c", READS, *options, PYTHONPATH=f"{pyz / TREE}:{pyz}")
        modules, reads = json.loads(done.stdout)
        assert modules > 20
        assert reads == times * modules


def test_modules_have_the_names_that_zipimport_gives_them(pyz):
    code = "import h11, h11._state, regsync, json\n"
    code += "told = [[m.__file__, m.__cached__, m.__spec__.origin,"
    code += " m.__spec__.submodule_search_locations, m.__package__]"
    code += " for m in (h11, h11._state, regsync)]\nprint(json.dumps(told), type(h11.__loader__).__name__)"
    path = f"{pyz / TREE}:{pyz}"
    with_it, without = (
        run(sys.executable, "-S", "-c", first + code, PYTHONPATH=path).stdout
        for first in ("import tree_importer\n", "")
    )
    assert with_it.replace("TreeImporter", "zipimporter") == without
    assert "TreeImporter" in with_it


def test_anyio_stays_lazy(pyz):
    """Without its source anyio would import all of itself."""
    loaded = loaded_by(pyz, "import anyio\nanyio.create_task_group")
    assert "anyio._core._tasks" in loaded
    assert "anyio._core._fileio" not in loaded


def test_dependencies_import_from_the_root_without_a_tree(pyz):
    code = "import anyio, h11, yaml, truststore, regsync; print(anyio.__file__)"
    done = run(sys.executable, "-S", "-c", code, PYTHONPATH=str(pyz))
    assert done.stdout.strip() == str(pyz / "anyio" / "__init__.py")


def test_tracebacks_show_source_lines(pyz):
    """The interpreter's own printer looks for files; the traceback module asks the importer."""
    code = "import tree_importer, h11, traceback\ntry: h11.Request()\nexcept Exception: traceback.print_exc()"
    code = code.replace("Request()", "Request(method='GET', target='/', headers=[])")
    done = run(sys.executable, "-S", "-c", code, PYTHONPATH=f"{pyz / TREE}:{pyz}")
    assert re.search(
        r'h11/_events\.py", line \d+, in __init__\n    raise LocalProtocolError', done.stderr
    )


def test_nothing_is_compiled_for_one_platform(pyz):
    with zipfile.ZipFile(pyz) as archive:
        ends = {
            os.path.splitext(name)[1]
            for name in archive.namelist()
            if not name.startswith("licenses/")
        }
        assert ends == {".py", ".pyc", ".json"}
        assert not [name for name in archive.namelist() if "_yaml" in name or "cyaml" in name]


def test_each_package_has_its_licence_inside(pyz):
    with zipfile.ZipFile(pyz) as archive:
        licensed = {
            name.split("/")[1] for name in archive.namelist() if name.startswith("licenses/")
        }
        own = archive.read("licenses/regsync/LICENSE")
    assert licensed == {"regsync", *(wheel.name for wheel in build_zipapp.BUNDLE)}
    assert own == (ROOT / "LICENSE").read_bytes()


def test_entries_are_stored_sorted_and_without_a_time(pyz):
    with zipfile.ZipFile(pyz) as archive:
        entries = archive.infolist()
    assert [entry.filename for entry in entries] == sorted(entry.filename for entry in entries)
    assert {
        (entry.compress_type, entry.date_time, entry.external_attr >> 16) for entry in entries
    } == {(zipfile.ZIP_STORED, (1980, 1, 1, 0, 0, 0), 0o100644)}


def test_the_file_says_what_it_was_made_of(pyz):
    with zipfile.ZipFile(pyz) as archive:
        told = json.loads(archive.read("build.json"))
    assert told["trees"] == {TREE: "CPython {}.{}.{}".format(*sys.version_info)}
    assert told["packages"]["h11"]["version"] == "0.16.0"


def test_the_sums_are_those_of_the_files(pyz):
    done = run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=str(pyz.parent))
    assert done.stdout == "regsync.pyz: OK\nregsync-nofips.pyz: OK\n"


def test_the_inventory_is_valid_and_names_what_is_inside(pyz):
    shown = run(sys.executable, pyz, "version", "--sbom")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(shown.stdout) is None
    told = json.loads(shown.stdout)
    assert told["metadata"]["component"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    with zipfile.ZipFile(pyz) as archive:
        assert archive.read("sbom.cdx.json").decode() == shown.stdout
        packages = {name.split("/")[0].removesuffix(".py") for name in archive.namelist()} - {
            TREE,
            "licenses",
        }
    named = {{"PyYAML": "yaml"}.get(each["name"], each["name"]) for each in told["components"]}
    ours = {"__main__", "_regsync", "old_python", "regsync", "build.json", "sbom.cdx.json"}
    assert packages - ours == named
    for each, wheel in zip(told["components"], build_zipapp.BUNDLE, strict=True):
        [distribution] = each["externalReferences"]
        assert distribution["hashes"] == [{"alg": "SHA-256", "content": wheel.sha256}]
        assert {entry["value"] for entry in each.get("properties", [])} == set(wheel.dropped)


def test_sources_have_no_inventory_and_say_so():
    done = run(
        sys.executable,
        ROOT / "regsync.py",
        "version",
        "--sbom",
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(
        "error: CONFIG_ERROR: --sbom: a checkout has no inventory, only a built file has one"
    )


def test_bundle_has_the_versions_of_the_metadata():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = re.findall(
        r'"([^"]+)"', text.partition("\ndependencies = [")[2].partition("]")[0]
    )
    bundled = [f"{wheel.name}=={wheel.version}" for wheel in build_zipapp.BUNDLE]
    assert bundled[: len(dependencies)] == dependencies


@pytest.mark.parametrize("version", [(2, 7), (3, 6)])
def test_start_parses_on_old_pythons(version):
    """Old grammars are a subset here: no annotations, f-strings, keyword-only marks."""
    text = build_zipapp.MAIN + build_zipapp.own_tool("old_python.py").decode()
    tree = ast.parse(text, feature_version=(3, max(4, version[1])))
    newer = (
        ast.JoinedStr,
        ast.AnnAssign,
        ast.NamedExpr,
        ast.AsyncFunctionDef,
        ast.Nonlocal,
        ast.Starred,
    )
    assert not [node for node in ast.walk(tree) if isinstance(node, newer)]


OLD = [
    "python2.7",
    "python3.6",
    "python3.9",
    *map(thorough, map(pytest.param, ("python3.7", "python3.8"))),
]


@pytest.mark.parametrize("name", OLD)
def test_old_python_is_told_what_is_needed(pyz, name):
    path = interpreter(name)
    if path is None:
        pytest.skip(f"{name} is not on this machine")
    done = run(path, pyz, "version", PATH="/nonexistent")
    assert done.returncode == 3
    error, hint, *more = done.stderr.splitlines()
    assert error.startswith(
        "error: CONFIG_ERROR: regsync needs Python 3.10 or newer; this is Python "
    )
    assert hint.startswith("hint: ")
    assert hint.endswith(f"the file regsync-linux-{platform.machine()} needs none")
    assert more == []


@pytest.mark.parametrize("name", OLD)
def test_old_python_hands_over_to_a_newer_one(pyz, tmp_path, name):
    """Names of newer Pythons that do not start one are passed over: a version manager's are such."""
    path = interpreter(name)
    if path is None:
        pytest.skip(f"{name} is not on this machine")
    (tmp_path / "python3.14").mkdir()
    false = tmp_path / "python3.13"
    false.write_text("#!/bin/sh\necho no such version >&2\nexit 127\n", encoding="ascii")
    false.chmod(0o755)
    (tmp_path / "python3.10").symlink_to(sys.executable)
    done = run(path, pyz, "version", "--json", PATH=f":relative:{tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["python"] == f"CPython {platform.python_version()}"

    isolated = run(path, "-E", "-S", pyz, "version", "-v", PATH=tmp_path, PYTHONVERBOSE="1")
    assert (isolated.returncode, isolated.stderr) == (0, "")


RED_HAT = 'NAME="AlmaLinux"\nVERSION_ID="8.10"\nID="almalinux"\nID_LIKE="rhel centos fedora"\n'
SUSE = "ID=sles\nID_LIKE='suse'\nVERSION_ID=15.6\nPRETTY_NAME=SUSE\n"
DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 11 (bullseye)"\nID=debian\nVERSION_ID="11"\n'


@pytest.mark.parametrize(
    ("release", "words"),
    [
        (RED_HAT, "`dnf install python3.12` brings one beside it; "),
        (SUSE, "`zypper install python311` brings one beside it; "),
        (DEBIAN, "Debian GNU/Linux 11 (bullseye) has no package of one; "),
        ("", ""),
        (None, ""),
    ],
)
def test_advice_is_for_the_distribution(tmp_path, release, words):
    file = tmp_path / "os-release"
    if release is not None:
        file.write_text(release, encoding="ascii")
    needs_none = f"the file regsync-linux-{platform.machine()} needs none"
    assert old_python.advice(str(file)) == words + needs_none


@pytest.mark.slow
@pytest.mark.parametrize("name", newer_pythons(12))
def test_one_file_serves_several_interpreters(pyz, tmp_path, name):
    other = interpreter(name)
    if other is None:
        pytest.skip(f"{name} is not on this machine")
    pythons = {TREE: sys.executable, name.replace("python3.", "cp3"): other}
    options = [part for path in pythons.values() for part in ("--python", path)]
    built = run(sys.executable, ROOT / "tools" / "build_zipapp.py", "--out", tmp_path, *options)
    assert built.returncode == 0, built.stderr
    for name, path in pythons.items():
        tree = f"{tmp_path}/regsync.pyz/{name}"
        shown = run(path, "-v", tmp_path / "regsync.pyz", "version")
        assert shown.returncode == 0
        assert f"import 'regsync' # <zipimporter object \"{tree}/\">" in shown.stderr
        code = f"import sys; sys.path.insert(0, '{tree}'); import regsync, h11; "
        code += "print(regsync.__spec__.origin, h11.__spec__.origin)"
        assert run(path, "-S", "-c", code).stdout.count(".pyc") == 2


def test_no_pip_is_said_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(build_zipapp.BuildError, match="install python3-pip"):
        build_zipapp.fetch(build_zipapp.BUNDLE[0], str(tmp_path))


def test_pip_reasons_become_one_line():
    reason = build_zipapp.why_pip_failed
    offline = "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\nERROR: No matching\n"
    assert "cannot be reached" in reason(offline)
    assert "another sha256" in reason("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM ...")
    assert (
        reason("x\nERROR: No matching distribution found for h11\n")
        == "No matching distribution found for h11"
    )
