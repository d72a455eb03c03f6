#!/usr/bin/env python3
"""Build dist/regsync.pyz and dist/regsync-nofips.pyz: the program with all that it needs.

    python3 tools/build_zipapp.py [--python EXE ...] [--out dist] [--cache build/wheels]

The archive is laid out like this:

    __main__.py               chooses the tree of the running interpreter; parses on Python 2.7
    old_python.py             for it, where that is too old: looks for another
    build.json                versions: ours, the packages', the interpreters' of the trees
    sbom.cdx.json             the same for inventories: CycloneDX 1.6, with the wheels' hashes and licences
    licenses/<package>/...    their licences
    h11/ anyio/ ... _regsync/ regsync.py     sources, importable with PYTHONPATH=regsync.pyz
    cp311/...                 the same modules again, as bytecode, and tools/tree_importer.py

Bytecode makes a start take 70 ms instead of 180. zipimport looks for `X.pyc` first. It takes the
unchecked-hash kind (PEP 552) whatever the dates say. It has one place per module, hence one tree
per CPython minor version. A tree has no sources: the interpreter reads the names of all entries at
each start, 3 us a name. anyio reads its own source to import lazily, and tracebacks show sources:
`tree_importer` takes them from the root. An interpreter without a tree runs from the sources.

Bytecode is compiled in a fresh process that sees neither paths nor the environment. marshal marks
an object as shared by its reference count, so a name that happens to be alive in the process would
change the bytes.

Owns: which files of which packages travel, and how the archive is laid out.
May not know: what the modules do.
Invariants: the same sources and the same interpreters give the same bytes, whatever the directory,
the user, the umask and the clock (tests/test_build.py builds twice).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["BUNDLE", "BuildError", "build", "main"]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST_PYTHON = (3, 10)
SHEBANG = b"#!/usr/bin/env python3\n"
LICENCE = "Apache-2.0"  # our own; SPDX's short name
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date of the zip format
NO_PYTHON = (0, 0)
ANY_PYTHON = (99, 0)
IMPORTER = "tree_importer.py"  # whose source is in each tree, and not at the root

# What a build may leave in its directory, in the order of SHA256SUMS (tools/build_static.py makes the
# last four).
RELEASE = (
    "regsync.pyz",
    "regsync-nofips.pyz",
    "regsync-linux-x86_64",
    "regsync-linux-aarch64",
    "regsync-nofips-linux-x86_64",
    "regsync-nofips-linux-aarch64",
)

Component = dict[str, object]  # an entry of the inventory


class BuildError(Exception):
    """Why there is no build, on one line."""


@dataclass(frozen=True)
class Wheel:
    """One pinned package: the file that every machine takes, and what of it stays out."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str  # SPDX's short name, or an expression of several
    dropped: tuple[str, ...] = ()
    newest: tuple[int, int] = ANY_PYTHON  # the last CPython whose tree has it; later: the source


# The run-time packages of pyproject.toml, then those that they need on 3.10 to 3.13. Left out are
# modules that need trio, pytest or a subprocess, command lines, and the compiled half of PyYAML
# with its shims. Only that half makes its wheel one platform's; the Python files are the same in
# all of them.
BUNDLE = (
    Wheel(
        "anyio",
        "4.16.0",
        "anyio-4.16.0-py3-none-any.whl",
        "c66ae634e0b8228396b801741beb3294326d4b6102f7bba4041c0dfb58c29026",
        "MIT",
        (
            "anyio/_backends/_trio.py",
            "anyio/pytest_plugin.py",
            "anyio/to_interpreter.py",
            "anyio/to_process.py",
        ),
    ),
    Wheel(
        "h11",
        "0.16.0",
        "h11-0.16.0-py3-none-any.whl",
        "63cf8bbe7522de3bf65932fda1d9c2772064ffb3dae62d55932da54b31cb6c86",
        "MIT",
    ),
    Wheel(
        "PyYAML",
        "6.0.3",
        "pyyaml-6.0.3-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl",
        "b8bb0864c5a28024fac8a632c443c87c5aa6f215c0b126c449ae1a150412f31d",
        "MIT",
        ("_yaml/__init__.py", "yaml/cyaml.py"),
    ),
    Wheel(
        "truststore",
        "0.10.5",
        "truststore-0.10.5-py3-none-any.whl",
        "9aaaedaefaf06d8b206278cf8b5012bc897f485a874503501e12d776df78951c",
        "MIT",
    ),
    Wheel(
        "exceptiongroup",
        "1.3.1",
        "exceptiongroup-1.3.1-py3-none-any.whl",
        "a7a39a3bd276781e98394987d3a5701d0c4edffb633bb7a5144577f82c773598",
        "MIT AND PSF-2.0",
        newest=(3, 10),
    ),
    Wheel(
        "idna",
        "3.20",
        "idna-3.20-py3-none-any.whl",
        "ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c",
        "BSD-3-Clause",
        ("idna/__main__.py", "idna/cli.py"),
        newest=NO_PYTHON,  # half a megabyte a tree, imported for host names beyond ASCII only
    ),
    Wheel(
        "typing_extensions",
        "4.16.0",
        "typing_extensions-4.16.0-py3-none-any.whl",
        "481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8",
        "PSF-2.0",
    ),
)

# Parsed by Python 2.7 and 3.6 too. Status 3 says that nothing was attempted (docs/operations.md, exit
# statuses).
MAIN = '''\
"""Start regsync on the modules compiled for this interpreter, where the file has them."""
import sys

if sys.version_info < (3, 10):
    import platform

    import old_python

    old_python.start_newer()
    sys.stderr.write(
        "error: CONFIG_ERROR: regsync needs Python 3.10 or newer; this is Python %d.%d (%s)\\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    if sys.platform.startswith("linux"):
        sys.stderr.write("hint: the file regsync-linux-%s needs none\\n" % platform.machine())
    sys.exit(3)

if sys.implementation.name == "cpython":
    sys.path.insert(0, "%s/cp%d%d" % ((sys.path[0],) + sys.version_info[:2]))
    try:
        import tree_importer
    except ImportError:
        pass  # no tree for this interpreter

import regsync

sys.exit(regsync.main())
'''

# Runs in the interpreter that a tree is for. In: JSON list of [name in the archive, source].
# Out: each code object, marshalled, as hexadecimal lines.
COMPILER = """\
import json, marshal, sys
for name, source in json.load(sys.stdin):
    print(marshal.dumps(compile(source, name, "exec", 0, True, 0)).hex())
"""

PROBE = """\
import importlib.util, json, sys
print(json.dumps([sys.implementation.name, list(sys.version_info), importlib.util.MAGIC_NUMBER.hex()]))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Build both files, say where they are, and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python",
        action="append",
        metavar="EXE",
        help="compile a tree for this CPython; may be repeated (default: the interpreter that runs this)",
    )
    parser.add_argument("--out", default=os.path.join(ROOT, "dist"), metavar="DIR")
    parser.add_argument("--cache", default=os.path.join(ROOT, "build", "wheels"), metavar="DIR")
    options = parser.parse_args(argv)
    pythons = options.python or [sys.executable]
    try:
        for path in build(options.out, cache=options.cache, pythons=pythons):
            print(f"{path}: {os.path.getsize(path)} bytes")
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or 'output'}: {error.strerror}\n")
        return 1
    return 0


def build(out: str, *, cache: str, pythons: Sequence[str]) -> list[str]:
    """Write both files into `out`, and `SHA256SUMS`; return the paths, the default build's first."""
    wheels = {wheel: fetch(wheel, cache) for wheel in BUNDLE}
    interpreters = probe_all(pythons)
    os.makedirs(out, exist_ok=True)
    paths = []
    for name, fips in (("regsync.pyz", True), ("regsync-nofips.pyz", False)):
        files = files_of_build(wheels, interpreters, fips=fips)
        paths.append(write(os.path.join(out, name), files))
    return [*paths, write_sums(out)]


def files_of_build(
    wheels: Mapping[Wheel, str], interpreters: Sequence[Interpreter], *, fips: bool
) -> dict[str, bytes]:
    """Return all files of an archive, by name."""
    files = {
        **sources_of_build(wheels, fips=fips),
        "__main__.py": MAIN.encode(),
        "old_python.py": own_tool("old_python.py"),
        "build.json": record(interpreters),
        "sbom.cdx.json": sbom(),
    }
    for interpreter in interpreters:
        minor = interpreter.version[:2]
        chosen = {wheel: path for wheel, path in wheels.items() if minor <= wheel.newest}
        sources = sources_of_build(chosen, fips=fips)
        sources[IMPORTER] = own_tool(IMPORTER)
        files.update(compile_tree(interpreter, sources))
        # At the root `__main__.py` would take it for that of a tree.
        files[f"{interpreter.tree}/{IMPORTER}"] = own_tool(IMPORTER)
    return files


def sources_of_build(wheels: Mapping[Wheel, str], *, fips: bool) -> dict[str, bytes]:
    """Return the sources of one of the two builds."""
    sources = sources_of(wheels)
    sources[CONSTANTS] = with_constant(sources[CONSTANTS], fips)
    return sources


def sources_of(wheels: Mapping[Wheel, str]) -> dict[str, bytes]:
    """Return our own files and those of the wheels, with their licences."""
    sources = our_sources()
    with open(os.path.join(ROOT, "LICENSE"), "rb") as file:
        sources["licenses/regsync/LICENSE"] = file.read()
    for wheel, path in wheels.items():
        sources.update(unpack(wheel, path))
    return sources


# ---------------------------------------------------------------- packages


def fetch(wheel: Wheel, cache: str) -> str:
    """Return the path of a verified wheel, taken from `cache` or downloaded into it."""
    path = os.path.join(cache, wheel.file)
    if not os.path.exists(path):
        download(wheel, cache)
    return verified(path, wheel.sha256)


def verified(path: str, sha256: str) -> str:
    """Return the path of a file that has the pinned hash; BuildError if it has another one."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if digest != sha256:
        raise BuildError(
            f"{path} has sha256 {digest}, not {sha256} as pinned: remove it and look why"
        )
    return path


def download(wheel: Wheel, cache: str) -> None:
    """Let pip fetch one wheel, for the one platform that is pinned, from the index it is set up for.

    BuildError when it cannot, and has said why on standard error.
    """
    os.makedirs(cache, exist_ok=True)
    # Another build may be fetching the same file: each has a directory of its own.
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        requirements = os.path.join(directory, "requirements.txt")
        with open(requirements, "w", encoding="utf-8") as file:
            file.write(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet"]
        command += ["--disable-pip-version-check", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--implementation", "cp"]
        command += ["--python-version", "3.11", "--abi", "cp311"]
        command += ["--platform", "manylinux2014_x86_64"]
        command += ["--dest", directory, "--requirement", requirements]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        fetched = os.path.join(directory, wheel.file)
        if not os.path.exists(fetched):
            raise BuildError(
                f"pip could not fetch {wheel.file}: without pip or a package index, put it into {cache}"
            )
        os.replace(fetched, os.path.join(cache, wheel.file))


def unpack(wheel: Wheel, path: str) -> Iterator[tuple[str, bytes]]:
    """Give the Python files and licences of a wheel with their names in our archive."""
    left_out = set(wheel.dropped)
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            top, _, rest = name.partition("/")
            if name in left_out:
                left_out.discard(name)
            elif top.endswith(".dist-info"):
                if re.match(r"(licenses/.*|LICEN[CS]E[^/]*|NOTICE[^/]*)(?<!/)$", rest):
                    licence = rest.removeprefix("licenses/")
                    yield f"licenses/{wheel.name}/{licence}", archive.read(name)
            elif name.endswith(".py") and "/tests/" not in name:
                yield name, archive.read(name)
    if left_out:
        raise BuildError(f"{wheel.file} has no {', '.join(sorted(left_out))} to leave out")


# ---------------------------------------------------------------- our own files

CONSTANTS = "_regsync/__init__.py"  # the one module in which the builds differ


def our_sources() -> dict[str, bytes]:
    """Read `regsync.py`, and the modules and JSON files of `_regsync` and its sub-packages."""
    paths = [os.path.join(ROOT, "regsync.py")]
    for folder, _, files in os.walk(os.path.join(ROOT, "_regsync")):
        paths += [os.path.join(folder, name) for name in files if name.endswith((".py", ".json"))]
    sources = {}
    for path in sorted(paths):
        with open(path, "rb") as file:
            sources[os.path.relpath(path, ROOT).replace(os.sep, "/")] = file.read()
    return sources


def own_tool(name: str) -> bytes:
    """Read a module beside this one that travels too."""
    with open(os.path.join(ROOT, "tools", name), "rb") as file:
        return file.read()


def with_constant(source: bytes, fips: bool) -> bytes:
    """Write the one constant in which the builds differ."""
    changed, times = re.subn(rb"(?m)^FIPS_BUILD = (True|False)$", b"FIPS_BUILD = %a" % fips, source)
    if times != 1:
        raise BuildError(
            f"{CONSTANTS} must hold the line 'FIPS_BUILD = False' once, not {times} times"
        )
    return changed


def our_version() -> str:
    """Read `__version__` without importing the program."""
    line = re.search(r'(?m)^__version__ = "([^"]+)"$', our_sources()[CONSTANTS].decode())
    if line is None:
        raise BuildError(f"{CONSTANTS} does not say __version__")
    return line[1]


# ---------------------------------------------------------------- bytecode


# What follows the magic number (PEP 552): by hash, unchecked; then the hash, which nobody reads.
UNCHECKED_HASH = b"\x01\0\0\0" + bytes(8)


@dataclass(frozen=True)
class Interpreter:
    """A CPython that gets a tree."""

    executable: str
    version: tuple[int, int, int]
    magic: bytes

    @property
    def tree(self) -> str:
        """The directory that `__main__.py` looks for."""
        return "cp{}{}".format(*self.version)


def run_isolated(executable: str, code: str, stdin: str = "") -> str:
    """Run `code` where nothing but `stdin` and the interpreter itself can have an influence.

    `-I` would ignore PYTHONHASHSEED, which orders frozensets in 3.10's marshal; hence an empty
    environment, an empty current directory, and `-s -S` instead.
    """
    environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
    for name in ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
        if name in os.environ:
            environment[name] = os.environ[name]
    command = [executable, "-s", "-S", "-B", "-c", code]
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                encoding="utf-8",
                env=environment,
                cwd=empty,
                check=False,
            )
        except OSError as error:
            raise BuildError(f"cannot run {executable}: {error.strerror}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(f"{executable} failed: {last}")
    return done.stdout


def probe_all(executables: Sequence[str]) -> list[Interpreter]:
    """Ask all interpreters what they are; return them by version."""
    interpreters = sorted(map(probe, executables), key=lambda known: known.version)
    if len({known.tree for known in interpreters}) < len(interpreters):
        raise BuildError(
            "two interpreters of the same minor version were given; the file has room for one"
        )
    return interpreters


def probe(executable: str) -> Interpreter:
    """Ask an interpreter what it is; refuse one that cannot run the program."""
    name, version, magic = json.loads(run_isolated(executable, PROBE))
    major, minor, patch, stage, _ = version
    if name != "cpython" or (major, minor) < OLDEST_PYTHON or stage != "final":
        raise BuildError(
            f"{executable} is {name} {major}.{minor}.{patch} ({stage}); "
            "a released CPython 3.10 or newer is needed"
        )
    return Interpreter(executable, (major, minor, patch), bytes.fromhex(magic))


def compile_tree(interpreter: Interpreter, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tree of one interpreter: the bytecode of its modules, and their documents."""
    tree = {
        f"{interpreter.tree}/{name}": data
        for name, data in sources.items()
        if not name.startswith("licenses/")
    }
    names = sorted(name for name in tree if name.endswith(".py"))
    modules = json.dumps([[name, tree.pop(name).decode()] for name in names])
    lines = run_isolated(interpreter.executable, COMPILER, modules).splitlines()
    header = interpreter.magic + UNCHECKED_HASH
    for name, line in zip(names, lines, strict=True):
        tree[f"{name}c"] = header + bytes.fromhex(line)
    return tree


# ---------------------------------------------------------------- the archive


def record(interpreters: Sequence[Interpreter]) -> bytes:
    """Say, inside the file, what it was made of."""
    packages = {wheel.name: {"version": wheel.version, "sha256": wheel.sha256} for wheel in BUNDLE}
    document = {
        "regsync": our_version(),
        "packages": packages,
        "trees": {known.tree: "CPython {}.{}.{}".format(*known.version) for known in interpreters},
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def sbom(wheels: Sequence[Wheel] = BUNDLE, others: Sequence[Component] = ()) -> bytes:
    """Return the inventory of a file (CycloneDX 1.6): its packages, and what else is in it.

    It has no time and no serial number, which no two builds share.
    """
    components = [*map(component, wheels), *others]
    program = {
        "type": "application",
        "bom-ref": "regsync",
        "name": "regsync",
        "version": our_version(),
        "licenses": [{"license": {"id": LICENCE}}],
    }
    needed = {"ref": "regsync", "dependsOn": [each["bom-ref"] for each in components]}
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": program},
        "components": components,
        "dependencies": [needed],
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def component(wheel: Wheel) -> Component:
    """Return one wheel's entry in the inventory."""
    licence: dict[str, object] = {"license": {"id": wheel.licence}}
    if " " in wheel.licence:
        licence = {"expression": wheel.licence}
    hashes = [{"alg": "SHA-256", "content": wheel.sha256}]
    entry: Component = {
        "type": "library",
        "bom-ref": package_url(wheel),
        "name": wheel.name,
        "version": wheel.version,
        "purl": package_url(wheel),
        "licenses": [licence],
        "externalReferences": [{"type": "distribution", "url": wheel.file, "hashes": hashes}],
    }
    if wheel.dropped:
        entry["properties"] = [
            {"name": "regsync:left-out", "value": name} for name in wheel.dropped
        ]
    return entry


def package_url(wheel: Wheel) -> str:
    """Return the name of a package for inventories (https://github.com/package-url/purl-spec)."""
    return f"pkg:pypi/{wheel.name.lower().replace('_', '-')}@{wheel.version}"


def write_sums(out: str) -> str:
    """Write `SHA256SUMS` for the files of RELEASE that are in `out`; return its path.

    `sha256sum --check` reads it.
    """
    lines = []
    for name in RELEASE:
        path = os.path.join(out, name)
        if os.path.exists(path):
            with open(path, "rb") as file:
                lines.append(f"{hashlib.sha256(file.read()).hexdigest()}  {name}\n")
    sums = os.path.join(out, "SHA256SUMS")
    with open(sums, "w", encoding="ascii", newline="\n") as file:
        file.writelines(lines)
    return sums


def write(path: str, files: Mapping[str, bytes], head: bytes = SHEBANG) -> str:
    """Write `head` and the archive behind it beside `path`, then move it into place; return `path`."""
    handle, unfinished = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".regsync-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(head)
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name in sorted(files):
                    entry = zipfile.ZipInfo(name, EPOCH)
                    entry.create_system = 3  # Unix, also when built elsewhere
                    entry.external_attr = (stat.S_IFREG | 0o644) << 16
                    archive.writestr(entry, files[name])
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return path


if __name__ == "__main__":
    sys.exit(main())
