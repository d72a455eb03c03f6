"""What needs no compiler of tools/build_static.py: the program behind a runtime, the inventory, the names
of the parts.

A stand-in for the runtime is a shell script that starts this Python as the runtime does: on the archive
behind it. The real ones are used where build/static has them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.builds import WHEELS, contents, run
from tests.program import ROOT
from tools import build_static, build_zipapp
from tools.build_zipapp import BuildError
from tools.static import runtime, sources
from tools.static.sources import VARIANTS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in runtime.ARCHITECTURES,
    reason="static executables are Linux's",
)

WORK = ROOT / "build" / "static"
EXECUTABLES = {
    f"{variant.name}-{arch}": (variant, arch)
    for variant in VARIANTS
    for arch in runtime.ARCHITECTURES
}
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
    for variant, arch in EXECUTABLES.values():
        directory = work / runtime.runtime(variant, arch).directory
        (directory / "licenses").mkdir(parents=True)
        for source in variant.sources:
            (directory / "licenses" / source.name).write_text(f"of {source.name}\n")
        (directory / "runtime").write_text(STAND_IN, encoding="utf-8")
        (directory / "complete").touch()
    return work


@pytest.fixture(scope="module")
def built(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build everything on stand-ins; return the directory."""
    out = tmp_path_factory.mktemp("dist")
    assert build(work, out) == 0
    return out


# The program behind a runtime.


def test_the_program_runs_behind_a_runtime_with_its_bytecode(built, tmp_path):
    moved = tmp_path / "another name"
    moved.write_bytes((built / f"regsync-nofips-linux-{platform.machine()}").read_bytes())
    moved.chmod(0o755)
    shown = run(moved, "version", "--json")
    told = json.loads(shown.stdout)
    assert (shown.stderr, told["version"]) == ("", build_zipapp.our_version())
    assert told["build"] == "nofips"  # the stand-in has no module of its own

    for name, (variant, arch) in EXECUTABLES.items():
        path = built / name
        assert path.read_bytes().startswith(STAND_IN.encode())
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        held = contents(path)
        texts = {name for name in held if name.endswith(".py")}
        assert {f"{name}c" for name in texts} == {name for name in held if name.endswith(".pyc")}
        assert {"regsync.py", "tree_importer.py", "_regsync/__init__.py", "idna/core.py"} <= texts
        assert b"\nFIPS_BUILD = %a\n" % variant.is_fips in held["_regsync/__init__.py"]
        recorded = json.loads(held["build.json"])
        assert recorded["architecture"] == arch
        assert recorded["runtime"]["CPython"]["version"].startswith("3.13.")
        library = variant.library.name
        assert held[f"licenses/{library}/LICENSE"] == f"of {library}\n".encode()


@pytest.mark.slow
def test_two_builds_give_the_same_bytes_with_sums_of_all_that_is_there(built, work, tmp_path):
    own, other = runtime.ARCHITECTURES
    for name in EXECUTABLES:
        if name.endswith(other):
            (tmp_path / name).write_bytes((built / name).read_bytes())
    assert build(work, tmp_path, "--arch", own) == 0
    names = ["SHA256SUMS", *sorted(EXECUTABLES)]
    assert sorted(path.name for path in built.iterdir()) == names
    for name in names:
        assert (built / name).read_bytes() == (tmp_path / name).read_bytes(), name
    done = run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=str(built))
    assert done.stdout.count(": OK\n") == len(EXECUTABLES)


def test_the_inventory_names_what_is_compiled_in(built):
    """And says of each advisory about the FIPS module why it does not concern the program."""
    for name, library in (
        ("regsync-linux-aarch64", "AWS-LC"),
        ("regsync-nofips-linux-aarch64", "OpenSSL"),
    ):
        text = contents(built / name)["sbom.cdx.json"].decode()
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
        document = json.loads(text)
        told = {each["name"]: each for each in document["components"]}
        compiled = {"CPython", "SQLite", "zlib", "musl", "compiler-rt", "mimalloc"}
        assert compiled | {"anyio", "h11", "PyYAML"} <= told.keys()
        assert {"AWS-LC", "OpenSSL", "exceptiongroup"} & told.keys() == {library}
        judged = {each["id"]: each for each in document.get("vulnerabilities", [])}
        expected = {"CVE-2026-3337", "CVE-2026-4428"} if library == "AWS-LC" else set()
        assert judged.keys() == expected
        assert {each["affects"][0]["ref"] for each in judged.values()} <= {told[library]["bom-ref"]}
    assert told["OpenSSL"]["cpe"].startswith("cpe:2.3:a:openssl:openssl:3.5.")


# The parts of the runtime.


def test_a_change_builds_again_what_is_below_it_and_nothing_else(tmp_path, monkeypatch):
    def changed(file: str) -> set[str]:
        """Change a file; return the parts whose directories have another name then."""
        names = []
        for text in ("", "\n"):
            with (tmp_path / file).open("a", encoding="utf-8") as opened:
                opened.write(text)
            parts = runtime.in_order(runtime.runtime(sources.DEFAULT, "x86_64"))
            names.append({part.name: part.directory for part in parts})
        return {name for name in names[0] if names[0][name] != names[1][name]}

    (tmp_path / "recipes").mkdir()
    for path in (*runtime.FOLDER.glob("*.*"), *runtime.FOLDER.glob("recipes/*")):
        (tmp_path / path.relative_to(runtime.FOLDER)).write_bytes(path.read_bytes())
    monkeypatch.setattr(runtime, "FOLDER", tmp_path)
    assert changed("main.c") == changed("recipes/link.sh") == {"link-x86_64"}
    assert changed("Setup.local") == changed("tls.h") == {"python-x86_64", "link-x86_64"}
    above = {"aws-lc-x86_64", "python-x86_64", "link-x86_64"}
    assert changed("recipes/aws-lc.sh") == above
    assert changed("recipes/toolchain.sh") > above
    assert changed("recipes/openssl.sh") == set()


def test_an_archive_is_taken_by_its_hash(tmp_path, monkeypatch):
    def unreachable(source: sources.Source, work: Path) -> None:
        raise BuildError("nobody answers")

    for way in ("from_site", "from_debian", "from_cargo", "from_index"):
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


# The runtimes that were compiled.


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name)
def compiled(request: pytest.FixtureRequest) -> Path:
    """Return the directory of each runtime of this machine that is there."""
    directory = runtime.runtime_of(request.param, platform.machine(), WORK)
    if directory is None:
        pytest.skip("no runtime of this source has been compiled (tools/build_static.py)")
    return directory


IMPORT_ALL = b"""\
import hashlib, importlib, sys

def main():
    for name in sys.stdin.read().split():
        importlib.import_module(name)
    print(sorted({"_md5", "_sha1", "_sha2", "_sha3", "_blake2"} & {*sys.builtin_module_names}))
    return 0
"""


def test_the_runtime_has_all_that_the_program_imports_and_no_hash_of_cpythons_own(
    compiled, built, tmp_path
):
    """What it imports later, the tests of the built file show."""
    held = contents(built / f"regsync-linux-{platform.machine()}")
    modules = [name for name in held if name.startswith("_regsync/") and name.endswith(".py")]
    names = [name[:-3].replace("/", ".").removesuffix(".__init__") for name in modules]
    del held["regsync.pyc"]
    held["regsync.py"] = IMPORT_ALL
    path = tmp_path / "importing"
    build_zipapp.write(str(path), held, head=(compiled / "runtime").read_bytes())
    done = subprocess.run([path], input=" ".join(names).encode(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[]\n", b"")


# What the program computes: each function that does it is in the FIPS module, by its address.
COMPUTED = (
    "AES_encrypt",
    "CRYPTO_tls1_prf",
    "CTR_DRBG_generate",
    "ECDH_compute_shared_secret",
    "ECDSA_do_sign",
    "ECDSA_do_verify",
    "EVP_AEAD_CTX_seal",
    "EVP_DigestSign",
    "EVP_DigestVerify",
    "HKDF_expand",
    "HKDF_extract",
    "HMAC_Update",
    "RAND_bytes",
    "RSA_sign",
    "RSA_verify",
    "RSA_verify_pss_mgf1",
    "SHA1_Update",
    "SHA256_Update",
    "SHA512_Update",
    "aes_hw_encrypt",
    "aesni_gcm_encrypt" if platform.machine() == "x86_64" else "aes_gcm_enc_kernel",
)


def addresses_of(directory: Path) -> dict[str, int]:
    """Return where each symbol of a runtime is, or skip the test where it has no FIPS module."""
    rows = re.findall(r"(?m)^ *\d+: ([0-9a-f]+) .* (\w+)$", (directory / "symbols").read_text())
    addresses = {name: int(address, 16) for address, name in rows}
    if "OSSL_PROVIDER_load" in addresses:
        pytest.skip("OpenSSL's, which has no module")
    return addresses


def test_all_that_computes_is_inside_the_module(compiled):
    """Its beginning and its end are symbols of its own; the table is the linked executable's."""
    addresses = addresses_of(compiled)
    module = range(addresses["BORINGSSL_bcm_text_start"], addresses["BORINGSSL_bcm_text_end"])
    assert [name for name in COMPUTED if addresses.get(name, 0) not in module] == []
    assert [name for name in addresses if "Hacl_Hash" in name] == []  # CPython's own


def test_one_changed_bit_of_the_module_ends_the_process_before_it_begins(compiled, tmp_path):
    data = bytearray((compiled / "runtime").read_bytes())
    data[file_offset(data, addresses_of(compiled)["RSA_sign"])] ^= 1
    changed = tmp_path / "changed"
    changed.write_bytes(data)
    changed.chmod(0o755)
    done = subprocess.run([changed, "version"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, b"")


def file_offset(elf: bytes, address: int) -> int:
    """Return where in an ELF file the byte of an address is (elf(5), PT_LOAD)."""
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    for number in range(count):
        kind, _, offset, start, _, length = struct.unpack_from(
            "<IIQQQQ", elf, table + number * size
        )
        if kind == 1 and start <= address < start + length:
            return offset + address - start
    raise ValueError(f"{address:#x} is in no segment")
