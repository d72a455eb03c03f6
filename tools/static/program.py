"""The program behind the runtime: one executable file, made without a compiler in a few seconds.

    the runtime              ELF (runtime.py)
    a zip archive            read by it from its own file, as build_zipapp.py's but for one interpreter:
      h11/ anyio/ ... _regsync/ regsync.py     sources, and beside each module its bytecode
      tree_importer.py       finds them
      build.json sbom.cdx.json licenses/

The bytecode has to be of the CPython inside. The runtime itself compiles it: behind a copy of it goes
another program, COMPILER.

Owns: what travels in the archive, the inventory of the static file.
May not know: how a runtime is made.
Invariants: the same runtime and sources give the same bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools import build_zipapp
from tools.build_zipapp import BuildError, Component, Wheel
from tools.static.sources import CPYTHON, ZIG, Source, Variant

__all__ = ["append", "run_in"]

PYTHON = (3, 13)  # the minor version of the CPython inside
MUSL = "1.2.5"  # whose source is in the compiler's wheel, with its start files and compiler-rt
MIMALLOC = "2.1.2"  # whose source is in CPython's

# Runs in the runtime, in place of the program. In: JSON object of sources by their names. Out: the magic
# number of the bytecode, then each code object, marshalled, as hexadecimal lines.
COMPILER = b"""\
import json, marshal, sys
from _frozen_importlib_external import MAGIC_NUMBER

def main():
    print(MAGIC_NUMBER.hex())
    for name, source in json.load(sys.stdin).items():
        print(marshal.dumps(compile(source, name, "exec", 0, True, 0)).hex())
    return 0
"""

# Advisories about AWS-LC FIPS 3.1.0, and why they do not concern this program. docs/security.md has the
# rule by which a release would give up the certificate for a fix.
ADVISORIES = {
    "CVE-2026-3337": "AES-CCM's timing: TLS offers AES-GCM alone, and nothing else encrypts",
    "CVE-2026-4428": "the scope of revocation lists: checking such lists is never turned on",
}


def append(
    variant: Variant, arch: str, runtime: Path, compiler: Path, out: Path, cache: str
) -> Path:
    """Write the program behind a runtime, and return the path of the file.

    `runtime` and `compiler` are directories of runtimes; the second one's can be run here. `cache` has
    the wheels, or gets them.
    """
    wheels = wheels_inside(cache)
    sources = sources_of_program(wheels, variant)
    files = {
        **sources,
        **compiled(sources, compiler / "runtime"),
        **licences(runtime),
        "build.json": record(variant, arch, list(wheels)),
        "sbom.cdx.json": inventory(variant, list(wheels)),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{variant.name}-{arch}"
    build_zipapp.write(str(path), files, head=(runtime / "runtime").read_bytes())
    return path


def wheels_inside(cache: str) -> dict[Wheel, str]:
    """Return the packages that the CPython inside needs, with the paths of their wheels."""
    needed = [
        wheel
        for wheel in build_zipapp.BUNDLE
        if wheel.newest >= PYTHON or wheel.newest == build_zipapp.NO_PYTHON
    ]
    return {wheel: build_zipapp.fetch(wheel, cache) for wheel in needed}


def sources_of_program(wheels: Mapping[Wheel, str], variant: Variant) -> dict[str, bytes]:
    """Return the sources of the program and its packages, with their licences."""
    sources = build_zipapp.sources_of(wheels)
    constants = build_zipapp.CONSTANTS
    sources[constants] = build_zipapp.with_constant(sources[constants], fips=variant.is_fips)
    sources["tree_importer.py"] = build_zipapp.own_tool("tree_importer.py")
    return sources


def compiled(sources: Mapping[str, bytes], runtime: Path) -> dict[str, bytes]:
    """Return the bytecode of all modules, by the names that it has beside them."""
    modules = {name: sources[name].decode() for name in sorted(sources) if name.endswith(".py")}
    magic, *codes = run_in(runtime, COMPILER, json.dumps(modules).encode()).decode().splitlines()
    header = bytes.fromhex(magic) + build_zipapp.UNCHECKED_HASH
    return {
        f"{name}c": header + bytes.fromhex(code) for name, code in zip(modules, codes, strict=True)
    }


def run_in(runtime: Path, program: bytes, data: bytes) -> bytes:
    """Run a program in a runtime; `data` is its standard input, what is returned its standard output."""
    modules = {"regsync.py": program, "tree_importer.py": b""}
    with tempfile.TemporaryDirectory() as directory:
        executable = os.path.join(directory, "program")
        build_zipapp.write(executable, modules, head=runtime.read_bytes())
        try:
            done = subprocess.run(
                [executable], input=data, capture_output=True, env={}, check=False
            )
        except OSError as error:
            raise BuildError(
                f"the runtime {runtime} cannot be run here: {error.strerror}"
            ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise BuildError(f"the runtime failed: {lines[-1]}")
    return done.stdout


def licences(runtime: Path) -> dict[str, bytes]:
    """Return the licences of what is compiled into a runtime."""
    files = sorted((runtime / "licenses").iterdir())
    return {f"licenses/{file.name}/LICENSE": file.read_bytes() for file in files}


def record(variant: Variant, arch: str, wheels: list[Wheel]) -> bytes:
    """Say, inside the file, what it was made of."""
    packages = {wheel.name: {"version": wheel.version, "sha256": wheel.sha256} for wheel in wheels}
    compiled_in = {
        source.name: {"version": source.version, "sha256": source.sha256}
        for source in (*variant.sources, ZIG)
    }
    document = {
        "regsync": build_zipapp.our_version(),
        "architecture": arch,
        "packages": packages,
        "runtime": compiled_in,
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def inventory(variant: Variant, wheels: list[Wheel]) -> bytes:
    """Return the SBOM of a static file, with a statement on each advisory about the FIPS module."""
    document = json.loads(
        build_zipapp.sbom(wheels, [*map(component, variant.sources), *from_others()])
    )
    if variant.is_fips:
        affects = [{"ref": component(variant.library)["bom-ref"]}]
        document["vulnerabilities"] = [
            {
                "id": name,
                "affects": affects,
                "analysis": {
                    "state": "not_affected",
                    "justification": "code_not_reachable",
                    "detail": detail,
                },
            }
            for name, detail in ADVISORIES.items()
        ]
    return json.dumps(document, indent=1).encode() + b"\n"


def component(source: Source) -> Component:
    """Return an archive's entry in the inventory."""
    return entry(source.name, source.version, source.licence, source, cpe=source.cpe)


def from_others() -> list[Component]:
    """Return the entries for what comes with other archives: the C library, the allocator."""
    return [
        entry("musl", MUSL, "MIT", ZIG, cpe="musl-libc:musl"),
        entry("compiler-rt", ZIG.version, "MIT", ZIG),
        entry("mimalloc", MIMALLOC, "MIT", CPYTHON),
    ]


def entry(name: str, version: str, licence: str, source: Source, cpe: str = "") -> Component:
    """Return an entry of the inventory; `source` is the archive that its source text is in."""
    package_url = f"pkg:generic/{name.lower()}@{version}"
    hashes = [{"alg": "SHA-256", "content": source.sha256}]
    known: Component = {
        "type": "library",
        "bom-ref": package_url,
        "name": name,
        "version": version,
        "purl": package_url,
        "licenses": [{"expression": licence} if " " in licence else {"license": {"id": licence}}],
        "externalReferences": [{"type": "distribution", "url": source.file, "hashes": hashes}],
    }
    if cpe:
        known["cpe"] = f"cpe:2.3:a:{cpe}:{version}:*:*:*:*:*:*:*"
    return known
