"""What needs no compiler of tools/build_static.py: the list of modules, the program behind a runtime,
the inventory, the image, the names of the parts.

A stand-in for the runtime is a shell script that starts this Python as the runtime does: on the archive
behind it. The real one is used where build/static has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tools import build_static, build_zipapp, check
from tools.static import modules, program, runtime, sources
from tools.static.image import CERTIFICATES

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "wheels"
WORK = ROOT / "build" / "static"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in runtime.ARCHITECTURES,
    reason="static executables are Linux's",
)

STAND_IN = f"""\
#!/bin/sh
exec {sys.executable} -I -S -c '
import sys
sys.path.insert(0, sys.argv.pop(1))
import tree_importer, regsync
sys.exit(regsync.main())' "$0" "$@"
"""


def put_stand_in(work: Path, arch: str) -> None:
    """Put a runtime where a build would have left it."""
    directory = work / runtime.runtime(arch).directory
    (directory / "licenses").mkdir(parents=True)
    for source in sources.SOURCES:
        (directory / "licenses" / source.name).write_text(f"of {source.name}\n", encoding="ascii")
    (directory / "runtime").write_text(STAND_IN, encoding="utf-8")
    (directory / "complete").touch()


def build(work: Path, out: Path, *more: str) -> int:
    where = ["--work", str(work), "--out", str(out), "--cache", str(WHEELS)]
    return build_static.main(["--cached", *where, *more])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build everything on two stand-ins; return the directory."""
    work = tmp_path_factory.mktemp("work")
    for arch in runtime.ARCHITECTURES:
        put_stand_in(work, arch)
    out = tmp_path_factory.mktemp("dist")
    assert build(work, out) == 0
    return out


# --- The standard modules


def program_texts() -> dict[str, str]:
    held = program.sources_of_program(program.wheels_inside(str(WHEELS)))
    return {name: data.decode() for name, data in held.items() if name.endswith(".py")}


def test_every_standard_module_that_the_program_names_is_in_the_executable():
    assert modules.unlisted(program_texts(), sys.stdlib_module_names) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("import wave", ["wave"]),
        ("def f():\n    from wave import open", ["wave", "wave.open"]),
        ("import json.tool", []),  # its package is there; the whole list is by the closure
        ("from . import wave", []),
        ("import multiprocessing.pool", []),
        ("import anyio", []),
    ],
)
def test_a_module_that_is_not_in_the_executable_is_found(text, missing):
    assert modules.unlisted({"_regsync/new.py": text}, sys.stdlib_module_names) == missing


def test_nothing_is_both_listed_and_left_out():
    assert [name for name in modules.listed() if modules.is_left_out(name)] == []
    assert modules.listed() == sorted(modules.listed())
    assert set(modules.BY_NAME) <= set(modules.listed())
    assert not modules.compiled_in() & set(modules.listed())


def test_the_list_follows_imports_of_imports(tmp_path):
    files = {
        "first.py": "def late():\n    from second.part import thing\n",
        "second/__init__.py": "from . import other\n",
        "second/part.py": "from ..nowhere import x\nimport third, multiprocessing\n",
        "second/other.py": "",
        "second/unused.py": "import never\n",
        "third.py": "import first\n",
        "never.py": "",
        "multiprocessing/__init__.py": "import never\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="ascii")
    found = modules.closure({"regsync.py": "import first\n", "a.json": "{}"}, tmp_path)
    assert found == ["first", "second", "second.other", "second.part", "third"]


# --- The program behind a runtime


def test_the_program_runs_behind_a_runtime(built, tmp_path):
    moved = tmp_path / "another name"
    moved.write_bytes((built / f"regsync-linux-{platform.machine()}").read_bytes())
    moved.chmod(0o755)
    shown = subprocess.run([moved, "version", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["version"] == build_zipapp.our_version()
    assert shown.stderr == ""


def test_each_module_has_its_bytecode_and_the_runtime_is_unchanged(built):
    for arch in runtime.ARCHITECTURES:
        path = built / f"regsync-linux-{arch}"
        assert path.read_bytes().startswith(STAND_IN.encode())
        assert path.stat().st_mode & 0o777 == 0o755
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            recorded = json.loads(archive.read("build.json"))
            licence = archive.read("licenses/OpenSSL/LICENSE")
        texts = {name for name in names if name.endswith(".py")}
        assert {f"{name}c" for name in texts} == {name for name in names if name.endswith(".pyc")}
        assert {"regsync.py", "tree_importer.py", "_regsync/__init__.py", "idna/core.py"} <= texts
        assert recorded["architecture"] == arch
        assert recorded["runtime"]["CPython"]["version"].startswith("3.13.")
        assert licence == b"of OpenSSL\n"


def test_two_builds_give_the_same_bytes(built, tmp_path):
    for arch in runtime.ARCHITECTURES:
        put_stand_in(tmp_path / "work", arch)
    assert build(tmp_path / "work", tmp_path / "dist") == 0
    names = sorted(path.name for path in built.iterdir())
    assert names == [
        "SHA256SUMS",
        "regsync-linux-aarch64",
        "regsync-linux-x86_64",
        "regsync-linux.oci.tar",
    ]
    for name in names:
        assert (built / name).read_bytes() == (tmp_path / "dist" / name).read_bytes(), name


def test_sums_are_of_all_that_is_there(built):
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=built, capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK\n") == 3


def test_the_inventory_names_what_is_compiled_in(built):
    with zipfile.ZipFile(built / "regsync-linux-aarch64") as archive:
        text = archive.read("sbom.cdx.json").decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    told = {each["name"]: each for each in json.loads(text)["components"]}
    compiled = {"CPython", "OpenSSL", "SQLite", "zlib", "musl", "compiler-rt", "mimalloc"}
    assert compiled <= told.keys()
    assert {"anyio", "h11", "PyYAML"} <= told.keys()
    assert "exceptiongroup" not in told
    assert told["OpenSSL"]["cpe"].startswith("cpe:2.3:a:openssl:openssl:3.5.")


# --- The image


def read_layout(path: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the blobs of an image layout by digest, and its index of manifests."""
    with tarfile.open(path) as tar:
        files = {
            member.name: file.read()
            for member in tar.getmembers()
            if (file := tar.extractfile(member)) is not None
        }
    assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    (named,) = json.loads(files.pop("index.json"))["manifests"]
    blobs = {name.removeprefix("blobs/").replace("/", ":"): data for name, data in files.items()}
    for digest, data in blobs.items():
        assert digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    return blobs, json.loads(blobs[named["digest"]])


def test_the_image_has_the_executable_users_and_authorities_and_no_more(built):
    blobs, index = read_layout(built / "regsync-linux.oci.tar")
    platforms = {each["platform"]["architecture"]: each for each in index["manifests"]}
    assert platforms.keys() == {"amd64", "arm64"}
    for name, arch in (("amd64", "x86_64"), ("arm64", "aarch64")):
        manifest = json.loads(blobs[platforms[name]["digest"]])
        config = json.loads(blobs[manifest["config"]["digest"]])
        assert (config["architecture"], config["os"]) == (name, "linux")
        assert config["config"]["User"] == "65532:65532"
        assert config["config"]["Entrypoint"] == ["/usr/bin/regsync"]
        assert config["config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert not [each for each in config["config"]["Env"] if each.startswith("SSL_CERT")]

        held = {}
        for layer, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
            packed = blobs[layer["digest"]]
            assert len(packed) == layer["size"]
            held |= unpack(packed, diff_id)
        executable = held.pop("usr/bin/regsync")
        assert executable == (built / f"regsync-linux-{arch}").read_bytes()
        assert held.keys() == {"etc/group", "etc/passwd", "etc/ssl/cert.pem"}
        with zipfile.ZipFile(WHEELS / CERTIFICATES.file) as wheel:
            assert held["etc/ssl/cert.pem"] == wheel.read("certifi/cacert.pem")


def unpack(packed: bytes, diff_id: str) -> dict[str, bytes]:
    """Return the files of a layer, all of which are root's."""
    import gzip
    import io

    unpacked = gzip.decompress(packed)
    assert diff_id == f"sha256:{hashlib.sha256(unpacked).hexdigest()}"
    held = {}
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as tar:
        for member in tar.getmembers():
            assert (member.uid, member.gid, member.mtime) == (0, 0, 0)
            file = tar.extractfile(member)
            if file is not None:
                held[member.name] = file.read()
    return held


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_another_client_reads_the_image(built, arch):
    place = f"oci-archive:{built / 'regsync-linux.oci.tar'}"
    command = ["skopeo", "inspect", "--override-arch", arch, "--override-os", "linux", place]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    assert (shown["Architecture"], len(shown["Layers"])) == (arch, 2)


# --- The parts of the runtime


def test_a_change_builds_again_what_is_below_it_and_nothing_else(tmp_path, monkeypatch):
    def names() -> dict[str, str]:
        parts = [
            part
            for arch in runtime.ARCHITECTURES
            for part in runtime.in_order(runtime.runtime(arch))
        ]
        return {part.name: part.directory for part in parts}

    def changed(file: str) -> set[str]:
        before = names()
        path = folder / file
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        after = names()
        return {name for name in before if before[name] != after[name]}

    folder = tmp_path / "static"
    (folder / "recipes").mkdir(parents=True)
    for path in (*runtime.FOLDER.glob("*.*"), *runtime.FOLDER.glob("recipes/*")):
        (folder / path.relative_to(runtime.FOLDER)).write_bytes(path.read_bytes())
    monkeypatch.setattr(runtime, "FOLDER", folder)

    runtimes = {f"runtime-{arch}" for arch in runtime.ARCHITECTURES}
    pythons = {f"python-{arch}" for arch in runtime.ARCHITECTURES}
    assert changed("main.c") == changed("modules.txt") == changed("recipes/link.sh") == runtimes
    assert changed("Setup.local") == pythons | runtimes
    openssls = {f"openssl-{arch}" for arch in runtime.ARCHITECTURES}
    assert changed("recipes/openssl.sh") == openssls | pythons | runtimes
    assert changed("recipes/toolchain.sh") == {
        name for name in names() if not name.startswith(("source-", "zig"))
    }
    assert changed("image.py") == set()


def test_where_there_is_no_runtime_nothing_is_compiled(tmp_path, capsys):
    assert build(tmp_path, tmp_path / "dist") == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: no runtime for {platform.machine()} of this source is in ")
    assert told.count("\n") == 1


def test_a_missing_program_is_named_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "BUILD_MACHINE", platform.machine())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build_zipapp.BuildError, match="install perl, make, readelf, tar, xz"):
        runtime.build_runtime("x86_64", tmp_path / "work", tmp_path)
    monkeypatch.setattr(runtime, "BUILD_MACHINE", "another")
    with pytest.raises(
        build_zipapp.BuildError, match="the compiler that is pinned runs on another"
    ):
        runtime.build_runtime("x86_64", tmp_path / "work", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_taken_by_its_hash(tmp_path, monkeypatch):
    def unreachable(source: sources.Source, work: Path) -> None:
        raise build_zipapp.BuildError("nobody answers")

    for way in ("from_site", "from_debian", "from_index"):
        monkeypatch.setattr(sources, way, unreachable)
    source = sources.Source(
        "thing", "1", "thing.tar", hashlib.sha256(b"thing").hexdigest(), "MIT", ""
    )
    with pytest.raises(
        build_zipapp.BuildError, match=f"thing.tar .sha256 {source.sha256}. is not in"
    ):
        sources.fetch(source, tmp_path)
    (tmp_path / "thing.tar").write_bytes(b"thing")
    assert sources.fetch(source, tmp_path) == tmp_path / "thing.tar"
    (tmp_path / "thing.tar").write_bytes(b"another")
    with pytest.raises(build_zipapp.BuildError, match="as pinned: remove it and look why"):
        sources.fetch(source, tmp_path)


# --- The check of a file


def test_the_file_that_is_checked_is_one_word_and_has_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["-x", "--file", "dist/regsync-linux-x86_64", "-k", "names"]
    assert check.for_pytest(words) == ["-x", f"--file={tmp_path}/{words[2]}", "-k", "names"]
    assert check.for_pytest(["-x", "--file"]) == ["-x", "--file"]


# --- The real one


def test_the_program_runs_behind_the_runtime_that_was_compiled(tmp_path):
    arch = platform.machine()
    if runtime.runtime_of(arch, WORK) is None:
        pytest.skip("no runtime of this source has been compiled (tools/build_static.py)")
    assert build(WORK, tmp_path, "--arch", arch) == 0
    path = tmp_path / f"regsync-linux-{arch}"
    assert path.stat().st_size < 25_000_000
    environment = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
    shown = subprocess.run(
        [path, "version", "--json"], capture_output=True, text=True, env=environment, check=True
    )
    told = json.loads(shown.stdout)
    assert (told["build"], "no FIPS" in told["gate"]) == ("static", True)
