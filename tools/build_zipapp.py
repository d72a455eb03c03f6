#!/usr/bin/env python3
"""Build dist/regsync.pyz and dist/regsync-nofips.pyz: the program with all that it needs.

    python3 tools/build_zipapp.py [--python EXE ...] [--out dist] [--cache build/wheels]
    python3 tools/build_zipapp.py --check FILE [--python EXE ...]

The second form builds again and says whether a file that somebody else built comes from this source
(docs/install.md).

The archive is laid out like this:

    __main__.py               chooses the tree of the running interpreter; parses on Python 2.7
    old_python.py             for it, where that is too old: looks for another, or advises
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
import importlib.util
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
# last three).
RELEASE = (
    "regsync.pyz",
    "regsync-nofips.pyz",
    "regsync-linux-x86_64",
    "regsync-linux-aarch64",
    "regsync-linux.oci.tar",
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
    import old_python

    old_python.start_newer()
    sys.stderr.write(
        "error: CONFIG_ERROR: regsync needs Python 3.10 or newer; this is Python %d.%d (%s)\\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    if old_python.advice():
        sys.stderr.write("hint: %s\\n" % old_python.advice())
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
# Out: its version, then each code object, marshalled, as hexadecimal lines.
COMPILER = """\
import json, marshal, sys
modules = json.load(sys.stdin)
print("%s %d.%d.%d %s" % ((sys.implementation.name,) + sys.version_info[:4]))
for name, source in modules:
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
    parser.add_argument(
        "--check", metavar="FILE", help="say whether FILE is built from this source; write nothing"
    )
    options = parser.parse_args(argv)
    pythons = options.python or [sys.executable]
    try:
        if options.check is not None:
            print(check(options.check, cache=options.cache, pythons=pythons))
            return 0
        for path in build(options.out, cache=options.cache, pythons=pythons):
            print(f"{path}: {os.path.getsize(path)} bytes")
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or 'output'}: {error.strerror}\n")
        return 1
    return 0


def build(
    out: str, *, cache: str, pythons: Sequence[str], patches: Mapping[str, str] | None = None
) -> list[str]:
    """Write both files into `out`, and `SHA256SUMS`; return the paths, the default build's first.

    `patches` are trees' interpreters to be recorded in place of those that compile.
    """
    wheels = {wheel: fetch(wheel, cache) for wheel in BUNDLE}
    interpreters = probe_all(pythons)
    files = {
        **sources_of(wheels),
        "__main__.py": MAIN.encode(),
        "old_python.py": own_tool("old_python.py"),
        "build.json": record(interpreters, patches),
        "sbom.cdx.json": sbom(),
    }
    for interpreter in interpreters:
        files.update(compile_tree(interpreter, sources_for(interpreter, wheels)))
        # At the root `__main__.py` would take it for that of a tree.
        files[f"{interpreter.tree}/{IMPORTER}"] = own_tool(IMPORTER)

    os.makedirs(out, exist_ok=True)
    paths = []
    for name, fips in (("regsync.pyz", True), ("regsync-nofips.pyz", False)):
        differing = files_of_build(interpreters, fips=fips)
        paths.append(write(os.path.join(out, name), {**files, **differing}))
    return [*paths, write_sums(out)]


def sources_of(wheels: Mapping[Wheel, str]) -> dict[str, bytes]:
    """Return our own files and those of the wheels, with their licences."""
    sources = our_sources()
    with open(os.path.join(ROOT, "LICENSE"), "rb") as file:
        sources["licenses/regsync/LICENSE"] = file.read()
    for wheel, path in wheels.items():
        sources.update(unpack(wheel, path))
    return sources


def sources_for(interpreter: Interpreter, wheels: Mapping[Wheel, str]) -> dict[str, bytes]:
    """Return the files of one interpreter's tree."""
    minor = interpreter.version[:2]
    chosen = {wheel: path for wheel, path in wheels.items() if minor <= wheel.newest}
    sources = {
        name: data for name, data in sources_of(chosen).items() if not name.startswith("licenses/")
    }
    sources[IMPORTER] = own_tool(IMPORTER)
    return sources


def files_of_build(interpreters: Sequence[Interpreter], *, fips: bool) -> dict[str, bytes]:
    """Return the files in which one build differs from the other."""
    constants = {CONSTANTS: with_constant(our_sources()[CONSTANTS], fips)}
    files = dict(constants)
    for interpreter in interpreters:
        files.update(compile_tree(interpreter, constants))
    return files


def check(path: str, *, cache: str, pythons: Sequence[str]) -> str:
    """Build again and compare; return which build of this source `path` is, else raise BuildError.

    A release of the same minor version nearly always compiles the same: which one it was is only
    recorded, and taken from the file. Where a module is compiled differently, the error says so.
    """
    recorded = trees_of(path)
    ours = names_of(probe_all(pythons))
    if ours.keys() != recorded.keys():
        wanted = ", ".join(recorded.values())
        raise BuildError(f"{path} has trees of {wanted}: give these as --python, each once")
    with tempfile.TemporaryDirectory() as out:
        *built, _ = build(out, cache=cache, pythons=pythons, patches=recorded)
        same = [again for again in built if is_same_file(path, again)]
        if not same:
            raise not_this_source(path, built, recorded, ours)
    build_name = os.path.basename(same[0])
    own_name = os.path.basename(path)
    if own_name != build_name and own_name in map(os.path.basename, built):
        raise BuildError(f"{path} has the name of another build: it is {build_name} of this source")
    note = "" if ours == recorded else f" (compiled by {', '.join(ours.values())} here)"
    return f"{path} is {build_name} of this source, byte for byte{note}"


def not_this_source(
    path: str, built: Sequence[str], recorded: Mapping[str, str], ours: Mapping[str, str]
) -> BuildError:
    """Return the error for a file that is none of the builds.

    `recorded` and `ours` say which interpreter compiled each tree, in the file and here.
    """
    differing = min((differences(path, again) for again in built), key=len)
    others = {tree: name for tree, name in recorded.items() if name != ours[tree]}
    if differing and all(is_bytecode_of(others, name) for name in differing):
        return BuildError(
            f"{path} has the sources of this checkout, but {listed(differing)} differ; it says that"
            f" {', '.join(others.values())} compiled them: give that release as --python"
        )
    return BuildError(f"{path} is not built from this source: {listed(differing)} differ")


def is_bytecode_of(trees: Mapping[str, str], name: str) -> bool:
    """Tell whether an entry is the bytecode of a module in one of these trees."""
    tree, _, module = name.partition("/")
    return tree in trees and module.endswith(".pyc")


def is_same_file(first: str, second: str) -> bool:
    """Tell whether two files have the same bytes."""
    with open(first, "rb") as one, open(second, "rb") as other:
        return one.read() == other.read()


def listed(names: Sequence[str]) -> str:
    """Write the first of these names for a message."""
    shown = ", ".join(names[:5])
    if len(names) > 5:
        shown += f" and {len(names) - 5} more"
    return shown or "bytes outside of its entries"


def trees_of(path: str) -> dict[str, str]:
    """Read from a built file which interpreters compiled it."""
    try:
        with zipfile.ZipFile(path) as archive:
            trees = json.loads(archive.read("build.json"))["trees"]
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise BuildError(f"{path} is no file that this builds: {error}") from None
    if not isinstance(trees, dict) or not all(map(is_interpreter_name, trees.values())):
        message = "its build.json names no interpreters"
        raise BuildError(f"{path} is no file that this builds: {message}")
    return trees


def is_interpreter_name(value: object) -> bool:
    """Tell whether a value of build.json may be shown."""
    return re.fullmatch(r"CPython \d+\.\d+\.\d+", str(value)) is not None


def differences(*paths: str) -> list[str]:
    """Return the names of entries that are not the same in two files."""
    contents = []
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    first, second = contents
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


# ---------------------------------------------------------------- packages


def fetch(wheel: Wheel, cache: str) -> str:
    """Return the path of a verified wheel, taken from `cache` or downloaded into it."""
    path = os.path.join(cache, wheel.file)
    if not os.path.exists(path):
        download(wheel, cache)
    if not os.path.exists(path):
        raise BuildError(
            f"pip fetched another file than {wheel.file} for {wheel.name} {wheel.version}"
        )
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
    """Let pip fetch one wheel, for the one platform that is pinned, from the index it is set up for."""
    if importlib.util.find_spec("pip") is None:
        raise BuildError(
            f"pip is needed to fetch {wheel.file} and {sys.executable} has none: install python3-pip, run "
            f"this with .venv/bin/python (tools/check.py makes it), or put the file into {cache}"
        )
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
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = os.path.join(directory, wheel.file)
        if os.path.exists(fetched):
            os.replace(fetched, os.path.join(cache, wheel.file))
    if done.returncode:
        reason = why_pip_failed(done.stderr)
        raise BuildError(f"cannot fetch {wheel.name} {wheel.version}: {reason}")


def why_pip_failed(stderr: str) -> str:
    """Choose the one line of pip's many that says what to do."""
    if "DO NOT MATCH THE HASHES" in stderr:
        return "the index offers a file with another sha256 than the pinned one"
    if re.search(
        r"NewConnectionError|NameResolutionError|ConnectTimeout|Connection (refused|reset)", stderr
    ):
        return "the package index cannot be reached; a filled cache directory builds offline"
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return lines[-1].removeprefix("ERROR: ") if lines else "pip failed without saying why"


def unpack(wheel: Wheel, path: str) -> Iterator[tuple[str, bytes]]:
    """Give the Python files and licences of a wheel with their names in our archive."""
    left_out = set(wheel.dropped)
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            top, _, rest = name.partition("/")
            if name in left_out:
                left_out.discard(name)
            elif top.endswith(".dist-info"):
                if is_licence(rest):
                    licence = rest.removeprefix("licenses/")
                    yield f"licenses/{wheel.name}/{licence}", archive.read(name)
            elif name.endswith(".py") and "/tests/" not in name:
                yield name, archive.read(name)
    if left_out:
        raise BuildError(f"{wheel.file} has no {', '.join(sorted(left_out))} to leave out")


def is_licence(name: str) -> bool:
    """Tell whether a file of a wheel's .dist-info is one of its licences."""
    return re.match(r"(licenses/.*|LICEN[CS]E[^/]*|NOTICE[^/]*)(?<!/)$", name) is not None


# ---------------------------------------------------------------- our own files

CONSTANTS = "_regsync/__init__.py"  # the one module in which the builds differ


def our_sources() -> dict[str, bytes]:
    """Read `regsync.py`, and the modules and JSON files of `_regsync` and its sub-packages."""
    sources = {}
    for name in ("regsync.py", *package_files()):
        with open(os.path.join(ROOT, name), "rb") as file:
            sources[name] = file.read()
    return sources


def package_files() -> list[str]:
    """Return the modules and JSON files of `_regsync`, with the names that they have in an archive."""
    names = []
    for folder, _, files in os.walk(os.path.join(ROOT, "_regsync")):
        place = os.path.relpath(folder, ROOT).replace(os.sep, "/")
        modules = [name for name in files if name.endswith(".py")]
        documents = [name for name in files if name.endswith(".json")]

        # zipimport knows no packages without this file: the modules would not be found.
        if modules and "__init__.py" not in modules:
            raise BuildError(f"{place} has modules and no __init__.py")
        names += [f"{place}/{name}" for name in (*modules, *documents)]
    return sorted(names)


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


def names_of(interpreters: Sequence[Interpreter]) -> dict[str, str]:
    """Return how build.json names the interpreter of each tree."""
    return {known.tree: "CPython {}.{}.{}".format(*known.version) for known in interpreters}


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
    try:
        name, version, magic = json.loads(run_isolated(executable, PROBE))
    except ValueError:
        raise BuildError(f"{executable} does not answer like a Python") from None
    major, minor, patch, stage, _ = version
    if name != "cpython" or (major, minor) < OLDEST_PYTHON or stage != "final":
        raise BuildError(
            f"{executable} is {name} {major}.{minor}.{patch} ({stage}); "
            "a released CPython 3.10 or newer is needed"
        )
    return Interpreter(executable, (major, minor, patch), bytes.fromhex(magic))


def compile_tree(interpreter: Interpreter, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tree of one interpreter: the bytecode of its modules, and other files."""
    tree = {f"{interpreter.tree}/{name}": data for name, data in sources.items()}
    names = sorted(name for name in tree if name.endswith(".py"))
    modules = json.dumps([[name, tree.pop(name).decode()] for name in names])
    _, *lines = run_isolated(interpreter.executable, COMPILER, modules).splitlines()
    header = interpreter.magic + UNCHECKED_HASH
    for name, line in zip(names, lines, strict=True):
        tree[f"{name}c"] = header + bytes.fromhex(line)
    return tree


# ---------------------------------------------------------------- the archive


def record(interpreters: Sequence[Interpreter], patches: Mapping[str, str] | None = None) -> bytes:
    """Say, inside the file, what it was made of."""
    packages = {wheel.name: {"version": wheel.version, "sha256": wheel.sha256} for wheel in BUNDLE}
    document = {
        "regsync": our_version(),
        "packages": packages,
        "trees": {**names_of(interpreters), **(patches or {})},
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
