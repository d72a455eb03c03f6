"""What needs no compiler of tools/build_static.py: the list of modules, the program behind a runtime,
the inventory, the image, the names of the parts.

A stand-in for the runtime is a shell script that starts this Python as the runtime does: on the archive
behind it. The real one is used where build/static has it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import stat
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.builds import WHEELS, contents, run
from tests.program import ROOT
from tools import build_static, build_zipapp
from tools.build_zipapp import BuildError
from tools.static import modules, program, runtime, sources
from tools.static.image import CERTIFICATES

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in runtime.ARCHITECTURES,
    reason="static executables are Linux's",
)

WORK = ROOT / "build" / "static"
STAND_IN = f"""\
#!/bin/sh
exec {sys.executable} -I -S -c '
import sys
sys.path.insert(0, sys.argv.pop(1))
import tree_importer, regsync
sys.exit(regsync.main())' "$0" "$@"
"""


def build(work: Path, out: Path, *more: str) -> int:
    where = ["--work", str(work), "--out", str(out), "--cache", str(WHEELS)]
    return build_static.main(["--cached", *where, *more])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Put a stand-in where a build would have left each runtime."""
    work = tmp_path_factory.mktemp("work")
    for arch in runtime.ARCHITECTURES:
        directory = work / runtime.runtime(arch).directory
        (directory / "licenses").mkdir(parents=True)
        for source in sources.SOURCES:
            (directory / "licenses" / source.name).write_text(f"of {source.name}\n")
        (directory / "runtime").write_text(STAND_IN, encoding="utf-8")
        (directory / "complete").touch()
    return work


@pytest.fixture(scope="module")
def built(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build everything on two stand-ins; return the directory."""
    out = tmp_path_factory.mktemp("dist")
    assert build(work, out) == 0
    return out


# The standard modules.


def test_every_standard_module_that_the_program_names_is_in_the_executable():
    held = program.sources_of_program(program.wheels_inside(str(WHEELS)))
    texts = {name: data.decode() for name, data in held.items() if name.endswith(".py")}
    assert modules.unlisted(texts, sys.stdlib_module_names) == []
    assert modules.listed() == sorted(modules.listed())
    assert [name for name in modules.listed() if modules.is_left_out(name)] == []
    assert set(modules.BY_NAME) <= set(modules.listed())
    assert not modules.compiled_in() & set(modules.listed())

    for text, missing in (
        ("import wave", ["wave"]),
        ("def f():\n    from wave import open", ["wave", "wave.open"]),
        ("from . import wave\nimport anyio, json.tool, multiprocessing.pool", []),
    ):
        assert modules.unlisted({"_regsync/new.py": text}, sys.stdlib_module_names) == missing


# The program behind a runtime.


def test_the_program_runs_behind_a_runtime_with_its_bytecode(built, tmp_path):
    moved = tmp_path / "another name"
    moved.write_bytes((built / f"regsync-linux-{platform.machine()}").read_bytes())
    moved.chmod(0o755)
    shown = run(moved, "version", "--json")
    assert (shown.stderr, json.loads(shown.stdout)["version"]) == ("", build_zipapp.our_version())

    for arch in runtime.ARCHITECTURES:
        path = built / f"regsync-linux-{arch}"
        assert path.read_bytes().startswith(STAND_IN.encode())
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        held = contents(path)
        texts = {name for name in held if name.endswith(".py")}
        assert {f"{name}c" for name in texts} == {name for name in held if name.endswith(".pyc")}
        assert {"regsync.py", "tree_importer.py", "_regsync/__init__.py", "idna/core.py"} <= texts
        recorded = json.loads(held["build.json"])
        assert recorded["architecture"] == arch
        assert recorded["runtime"]["CPython"]["version"].startswith("3.13.")
        assert held["licenses/OpenSSL/LICENSE"] == b"of OpenSSL\n"


@pytest.mark.slow
def test_two_builds_give_the_same_bytes_with_sums_of_all_that_is_there(built, work, tmp_path):
    own, other = (f"regsync-linux-{arch}" for arch in runtime.ARCHITECTURES)
    (tmp_path / other).write_bytes((built / other).read_bytes())
    assert build(work, tmp_path, "--arch", runtime.ARCHITECTURES[0]) == 0
    names = ["SHA256SUMS", other, own, "regsync-linux.oci.tar"]
    assert sorted(path.name for path in built.iterdir()) == names
    for name in names:
        assert (built / name).read_bytes() == (tmp_path / name).read_bytes(), name
    done = run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=str(built))
    assert done.stdout.count(": OK\n") == 3


def test_the_inventory_names_what_is_compiled_in(built):
    text = contents(built / "regsync-linux-aarch64")["sbom.cdx.json"].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    told = {each["name"]: each for each in json.loads(text)["components"]}
    compiled = {"CPython", "OpenSSL", "SQLite", "zlib", "musl", "compiler-rt", "mimalloc"}
    assert compiled | {"anyio", "h11", "PyYAML"} <= told.keys()
    assert "exceptiongroup" not in told
    assert told["OpenSSL"]["cpe"].startswith("cpe:2.3:a:openssl:openssl:3.5.")


# The image.


def read_tar(packed: bytes) -> dict[str, bytes]:
    """Return the files of a tar, all of which are root's and have no time."""
    held = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar.getmembers():
            assert (member.uid, member.gid, member.mtime) == (0, 0, 0)
            file = tar.extractfile(member)
            if file is not None:
                held[member.name] = file.read()
    return held


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_the_image_has_the_executable_users_and_authorities_and_no_more(built):
    files = read_tar((built / "regsync-linux.oci.tar").read_bytes())
    assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    (named,) = json.loads(files.pop("index.json"))["manifests"]
    blobs = {name.removeprefix("blobs/").replace("/", ":"): data for name, data in files.items()}
    assert all(digest == digest_of(data) for digest, data in blobs.items())

    def document(descriptor: dict[str, Any]) -> Any:
        return json.loads(blobs[descriptor["digest"]])

    manifests = document(named)["manifests"]
    platforms = ("amd64", "arm64")
    for described, arch, name in zip(manifests, runtime.ARCHITECTURES, platforms, strict=True):
        manifest = document(described)
        config = document(manifest["config"])
        assert described["platform"]["architecture"] == name
        assert (config["architecture"], config["os"]) == (name, "linux")
        assert config["config"]["User"] == "65532:65532"
        assert config["config"]["Entrypoint"] == ["/usr/bin/regsync"]
        assert config["config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert not [each for each in config["config"]["Env"] if each.startswith("SSL_CERT")]
        held = {}
        for layer, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
            packed = blobs[layer["digest"]]
            assert (len(packed), digest_of(gzip.decompress(packed))) == (layer["size"], diff_id)
            held |= read_tar(gzip.decompress(packed))
        assert held.pop("usr/bin/regsync") == (built / f"regsync-linux-{arch}").read_bytes()
        assert held.keys() == {"etc/group", "etc/passwd", "etc/ssl/cert.pem"}
        authorities = contents(WHEELS / CERTIFICATES.file)["certifi/cacert.pem"]
        assert held["etc/ssl/cert.pem"] == authorities


def test_another_client_reads_the_image(built):
    place = f"oci-archive:{built / 'regsync-linux.oci.tar'}"
    done = run("skopeo", "inspect", "--override-arch", "arm64", "--override-os", "linux", place)
    shown = json.loads(done.stdout)
    assert (shown["Architecture"], len(shown["Layers"])) == ("arm64", 2)


# The parts of the runtime.


def test_a_change_builds_again_what_is_below_it_and_nothing_else(tmp_path, monkeypatch):
    def changed(file: str) -> set[str]:
        """Change a file; return the parts whose directories have another name then."""
        names = []
        for text in ("", "\n"):
            with (tmp_path / file).open("a", encoding="utf-8") as opened:
                opened.write(text)
            parts = runtime.in_order(runtime.runtime("x86_64"))
            names.append({part.name: part.directory for part in parts})
        return {name for name in names[0] if names[0][name] != names[1][name]}

    (tmp_path / "recipes").mkdir()
    for path in (*runtime.FOLDER.glob("*.*"), *runtime.FOLDER.glob("recipes/*")):
        (tmp_path / path.relative_to(runtime.FOLDER)).write_bytes(path.read_bytes())
    monkeypatch.setattr(runtime, "FOLDER", tmp_path)
    assert changed("main.c") == changed("recipes/link.sh") == {"runtime-x86_64"}
    assert changed("Setup.local") == {"python-x86_64", "runtime-x86_64"}
    above = {"openssl-x86_64", "python-x86_64", "runtime-x86_64"}
    assert changed("recipes/openssl.sh") == above
    assert changed("recipes/toolchain.sh") > above
    assert changed("image.py") == set()


def test_where_a_runtime_or_a_program_is_missing_nothing_is_done(tmp_path, capsys, monkeypatch):
    assert build(tmp_path / "work", tmp_path / "dist") == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: no runtime for {platform.machine()} of this source is in ")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(runtime, "BUILD_MACHINE", platform.machine())
    with pytest.raises(BuildError, match="install perl, make, readelf, tar, xz"):
        runtime.build_runtime("x86_64", tmp_path / "work", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_taken_by_its_hash(tmp_path, monkeypatch):
    def unreachable(source: sources.Source, work: Path) -> None:
        raise BuildError("nobody answers")

    for way in ("from_site", "from_debian", "from_index"):
        monkeypatch.setattr(sources, way, unreachable)
    sha256 = hashlib.sha256(b"thing").hexdigest()
    source = sources.Source("thing", "1", "thing.tar", sha256, "MIT", "")
    with pytest.raises(BuildError, match=f"thing.tar .sha256 {sha256}. is not in"):
        sources.fetch(source, tmp_path)
    (tmp_path / "thing.tar").write_bytes(b"thing")
    assert sources.fetch(source, tmp_path) == tmp_path / "thing.tar"
    (tmp_path / "thing.tar").write_bytes(b"another")
    with pytest.raises(BuildError, match="as pinned: remove it and look why"):
        sources.fetch(source, tmp_path)


def test_the_program_runs_behind_the_runtime_that_was_compiled(tmp_path):
    arch = platform.machine()
    if runtime.runtime_of(arch, WORK) is None:
        pytest.skip("no runtime of this source has been compiled (tools/build_static.py)")
    assert build(WORK, tmp_path, "--arch", arch) == 0
    path = tmp_path / f"regsync-linux-{arch}"
    assert path.stat().st_size < 25_000_000
    told = json.loads(run(path, "version", "--json").stdout)
    assert (told["build"], "no FIPS" in told["gate"]) == ("static", True)
