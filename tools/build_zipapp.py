#!/usr/bin/env python3
"""Build dist/regsync.pyz and dist/regsync-nofips.pyz: the program and all that it needs, in one
file.

    python3 tools/build_zipapp.py [--python EXE ...] [--out dist] [--cache build/wheels]
    python3 tools/build_zipapp.py --check FILE [--python EXE ...]

The second form builds again and says whether a file that somebody else built comes from this source
(docs/verify.md).

Owns: which files of which packages travel, and how the archive is laid out (docs/design.md section
11):

    __main__.py               chooses the tree of the running interpreter; parses on Python 2.7
    build.json                versions: ours, the packages', the interpreters' of the trees
    sbom.cdx.json             the same for inventories: CycloneDX 1.6, with the wheels' hashes and licences
    licenses/<package>/...    their licences
    h11/ anyio/ ... _regsync/ regsync.py     sources, importable with PYTHONPATH=regsync.pyz
    cp311/...                 the same files again, beside each module its bytecode, and tools/tree_importer.py

Bytecode is what makes a start take 70 ms instead of 180. zipimport looks for `X.pyc` first and
takes it whatever the dates say when it is of the unchecked-hash kind; it has one place per module,
hence one tree per CPython minor version. Sources stay beside it because anyio reads its own to
import lazily, and because tracebacks show them. An interpreter without a tree runs from the
sources.

Invariant: the same sources and the same interpreters give the same bytes, whatever the directory,
the user, the umask and the clock (tests/test_zipapp.py builds twice). That is why bytecode is
compiled in a fresh process that sees neither paths nor the environment: marshal marks an object as
shared by its reference count, so a name that merely happens to be alive in the process would change
the bytes.
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
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that the format can say


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
    newest: tuple[int, int] = (
        99,
        0,
    )  # the newest CPython whose tree has it; later ones have the source


# The run-time packages of pyproject.toml, then what those need on 3.10 to 3.13. Left out: what
# needs trio, pytest or a subprocess, command lines, and the compiled half of PyYAML with its shims
# (the wheel is one platform's only because of that half; the Python files are the same in all of
# them).
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
        newest=(0, 0),  # half a megabyte a tree, imported for host names beyond ASCII only
    ),
    Wheel(
        "typing_extensions",
        "4.16.0",
        "typing_extensions-4.16.0-py3-none-any.whl",
        "481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8",
        "PSF-2.0",
    ),
)

# Parsed by Python 2.7 and 3.6 too. Status 3: nothing was attempted (docs/design.md section 2).
MAIN = '''\
"""Start regsync on the modules compiled for this interpreter, where the file has them."""
import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "error: CONFIG_ERROR: regsync needs Python 3.10 or newer; this is Python %d.%d (%s)\\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
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
    given = {"cache": options.cache, "pythons": options.python or [sys.executable]}
    try:
        if options.check is not None:
            print(check(options.check, **given))
            return 0
        for path in build(options.out, **given):
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
    interpreters = sorted((probe(python) for python in pythons), key=lambda known: known.version)
    minors = [known.version[:2] for known in interpreters]
    if len(set(minors)) < len(minors):
        raise BuildError(
            "two interpreters of the same minor version were given; the file has room for one"
        )
    ours = our_sources()
    root: dict[str, bytes] = dict(ours)
    newest: dict[str, tuple[int, int]] = {}
    for wheel, path in wheels.items():
        for name, data in unpack(wheel, path):
            root[name] = data
            newest[name] = wheel.newest
    common = {
        **root,
        "__main__.py": MAIN.encode(),
        "build.json": record(interpreters, patches),
        "sbom.cdx.json": sbom(),
    }
    variants: dict[bool, dict[str, bytes]] = {True: {}, False: {}}
    for known in interpreters:
        chosen = {
            name: data
            for name, data in root.items()
            if known.version[:2] <= newest.get(name, known.version[:2])
            and not name.startswith("licenses/")
        }
        common.update(compiled_tree(known, {**chosen, "tree_importer.py": tree_importer()}))
    for fips, files in variants.items():
        constants = {CONSTANTS: with_constant(ours[CONSTANTS], fips)}
        files.update(constants)
        for known in interpreters:
            files.update(compiled_tree(known, constants))
    os.makedirs(out, exist_ok=True)
    paths = [
        write(os.path.join(out, name), {**common, **variants[fips]})
        for name, fips in (("regsync.pyz", True), ("regsync-nofips.pyz", False))
    ]
    return [*paths, write_sums(os.path.join(out, "SHA256SUMS"), paths)]


def check(path: str, *, cache: str, pythons: Sequence[str]) -> str:
    """Build again; return in what words `path` is built from this source; BuildError says where it
    is not.

    A release of the same minor version compiles the same: which one it was is only recorded, and
    taken from the file.
    """
    recorded = trees_of(path)
    ours = {known.tree: "CPython {}.{}.{}".format(*known.version) for known in map(probe, pythons)}
    if ours.keys() != recorded.keys():
        raise BuildError(
            f"{path} has trees of {', '.join(recorded.values())}: give these as --python, each once"
        )
    with tempfile.TemporaryDirectory() as out:
        *built, _ = build(out, cache=cache, pythons=pythons, patches=recorded)
        for again in built:
            with open(path, "rb") as theirs, open(again, "rb") as mine:
                if theirs.read() == mine.read():
                    is_it = os.path.basename(again)
                    named = os.path.basename(path)
                    if is_it != named and named in map(os.path.basename, built):
                        raise BuildError(
                            f"{path} has the name of another build: it is {is_it} of this source"
                        )
                    told = (
                        ""
                        if ours == recorded
                        else f" (compiled by {', '.join(ours.values())} here)"
                    )
                    return f"{path} is {is_it} of this source, byte for byte{told}"
        differing = min((differences(path, again) for again in built), key=len)
    shown = ", ".join(differing[:5]) + (
        f" and {len(differing) - 5} more" if len(differing) > 5 else ""
    )
    raise BuildError(
        f"{path} is not built from this source: {shown or 'bytes outside of its entries'} differ"
    )


def trees_of(path: str) -> dict[str, str]:
    """Read from a built file which interpreters compiled it."""
    try:
        with zipfile.ZipFile(path) as archive:
            told = json.loads(archive.read("build.json"))["trees"]
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise BuildError(f"{path} is no file that this builds: {error}") from None
    if not isinstance(told, dict) or not all(
        re.fullmatch(r"CPython \d+\.\d+\.\d+", str(each)) for each in told.values()
    ):
        raise BuildError(
            f"{path} is no file that this builds: its build.json names no interpreters"
        )
    return told


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
    with open(path, "rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found != wheel.sha256:
        raise BuildError(
            f"{path} has sha256 {found}, not {wheel.sha256} as pinned: remove it and look why"
        )
    return path


def download(wheel: Wheel, cache: str) -> None:
    """Let pip fetch one wheel from wherever it is set up to look, for the one platform that is
    pinned.
    """
    if importlib.util.find_spec("pip") is None:
        raise BuildError(
            f"pip is needed to fetch {wheel.file} and {sys.executable} has none: install python3-pip, run "
            f"this with .venv/bin/python (tools/check.py makes it), or put the file into {cache}"
        )
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=cache
    ) as directory:  # another build may be fetching the same
        requirements = os.path.join(directory, "requirements.txt")
        with open(requirements, "w", encoding="utf-8") as file:
            file.write(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
        ]
        command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
        command += ["--implementation", "cp", "--python-version", "3.11", "--abi", "cp311"]
        command += [
            "--platform",
            "manylinux2014_x86_64",
            "--dest",
            directory,
            "--requirement",
            requirements,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = os.path.join(directory, wheel.file)
        if os.path.exists(fetched):
            os.replace(fetched, os.path.join(cache, wheel.file))
    if done.returncode:
        raise BuildError(
            f"cannot fetch {wheel.name} {wheel.version}: {why_pip_failed(done.stderr)}"
        )


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
                if re.match(r"(licenses/.*|LICEN[CS]E[^/]*|NOTICE[^/]*)(?<!/)$", rest):
                    yield (
                        f"licenses/{wheel.name}/{rest.removeprefix('licenses/')}",
                        archive.read(name),
                    )
            elif name.endswith(".py") and "/tests/" not in name:
                yield name, archive.read(name)
    if left_out:
        raise BuildError(f"{wheel.file} has no {', '.join(sorted(left_out))} to leave out")


# ---------------------------------------------------------------- our own files

CONSTANTS = "_regsync/__init__.py"


def our_sources() -> dict[str, bytes]:
    """Read `regsync.py`, and the modules and JSON files of `_regsync` and its sub-packages."""
    names = ["regsync.py", *package_files("_regsync")]
    sources = {}
    for name in names:
        with open(os.path.join(ROOT, name), "rb") as file:
            sources[name] = file.read()
    return sources


def package_files(package: str) -> list[str]:
    """Return the modules and JSON files below a package, with the names that they have in an
    archive.
    """
    names = []
    for folder, _, files in os.walk(os.path.join(ROOT, package)):
        place = os.path.relpath(folder, ROOT).replace(os.sep, "/")
        modules = [name for name in files if name.endswith(".py")]
        documents = [name for name in files if name.endswith(".json")]

        # zipimport knows no packages without this file: the modules would not be found.
        if modules and "__init__.py" not in modules:
            raise BuildError(f"{place} has modules and no __init__.py")
        names += [f"{place}/{name}" for name in (*modules, *documents)]
    return sorted(names)


def tree_importer() -> bytes:
    """Read the module that each tree has beside the packages."""
    with open(os.path.join(ROOT, "tools", "tree_importer.py"), "rb") as file:
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
    found = re.search(r'(?m)^__version__ = "([^"]+)"$', our_sources()[CONSTANTS].decode())
    if found is None:
        raise BuildError(f"{CONSTANTS} does not say __version__")
    return found[1]


# ---------------------------------------------------------------- bytecode


@dataclass(frozen=True)
class Interpreter:
    """A CPython that gets a tree."""

    executable: str
    version: tuple[int, int, int]
    magic: bytes

    @property
    def tree(self) -> str:
        """Return the directory that `__main__.py` looks for."""
        return "cp{}{}".format(*self.version)


def run_isolated(executable: str, code: str, given: str = "") -> str:
    """Run `code` where nothing but `given` and the interpreter itself can have an influence.

    `-I` would ignore PYTHONHASHSEED, which orders frozensets in 3.10's marshal; hence an empty
    environment, an empty current directory, and `-s -S` instead.
    """
    environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
    for kept in ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
        if kept in os.environ:
            environment[kept] = os.environ[kept]
    command = [executable, "-s", "-S", "-B", "-c", code]
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                command,
                input=given,
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


def probe(executable: str) -> Interpreter:
    """Ask an interpreter what it is; refuse what cannot run the program."""
    try:
        name, version, magic = json.loads(run_isolated(executable, PROBE))
    except ValueError:
        raise BuildError(f"{executable} does not answer like a Python") from None
    if name != "cpython" or tuple(version[:2]) < OLDEST_PYTHON or version[3] != "final":
        shown = ".".join(map(str, version[:3]))
        raise BuildError(
            f"{executable} is {name} {shown} ({version[3]}); a released CPython 3.10 or newer is needed"
        )
    return Interpreter(executable, (version[0], version[1], version[2]), bytes.fromhex(magic))


def compiled_tree(known: Interpreter, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tree of one interpreter: its files, and beside each module its bytecode."""
    tree = {f"{known.tree}/{name}": data for name, data in sources.items()}
    names = sorted(name for name in tree if name.endswith(".py"))
    given = json.dumps([[name, tree[name].decode()] for name in names])
    _, *lines = run_isolated(known.executable, COMPILER, given).splitlines()
    header = known.magic + (0b01).to_bytes(
        4, "little"
    )  # PEP 552: by hash, unchecked; the hash stays 0
    for name, line in zip(names, lines, strict=True):
        tree[f"{name}c"] = header + bytes(8) + bytes.fromhex(line)
    return tree


# ---------------------------------------------------------------- the archive


def record(interpreters: Sequence[Interpreter], patches: Mapping[str, str] | None = None) -> bytes:
    """Say, inside the file, what it was made of."""
    trees = {known.tree: "CPython {}.{}.{}".format(*known.version) for known in interpreters}
    told = {
        "regsync": our_version(),
        "packages": {
            wheel.name: {"version": wheel.version, "sha256": wheel.sha256} for wheel in BUNDLE
        },
        "trees": {**trees, **(patches or {})},
    }
    return json.dumps(told, indent=1).encode() + b"\n"


def sbom() -> bytes:
    """Return the inventory of the file (CycloneDX 1.6): no time and no serial number, which no two
    builds share.
    """
    components: list[dict[str, object]] = []
    for wheel in BUNDLE:
        purl = f"pkg:pypi/{wheel.name.lower().replace('_', '-')}@{wheel.version}"
        hashes = [{"alg": "SHA-256", "content": wheel.sha256}]
        component = {
            **{
                "type": "library",
                "bom-ref": purl,
                "name": wheel.name,
                "version": wheel.version,
                "purl": purl,
            },
            "licenses": [
                {"expression": wheel.licence}
                if " " in wheel.licence
                else {"license": {"id": wheel.licence}}
            ],
            "externalReferences": [{"type": "distribution", "url": wheel.file, "hashes": hashes}],
            "properties": [{"name": "regsync:left-out", "value": name} for name in wheel.dropped],
        }
        components.append({key: value for key, value in component.items() if value})
    this = {
        "type": "application",
        "bom-ref": "regsync",
        "name": "regsync",
        "version": our_version(),
    }
    told = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": this},
        "components": components,
        "dependencies": [{"ref": "regsync", "dependsOn": [each["bom-ref"] for each in components]}],
    }
    return json.dumps(told, indent=1).encode() + b"\n"


def write_sums(path: str, files: Sequence[str]) -> str:
    """Write what `sha256sum --check` reads, with names only, beside the files; return `path`."""
    lines = []
    for name in files:
        with open(name, "rb") as file:
            lines.append(f"{hashlib.sha256(file.read()).hexdigest()}  {os.path.basename(name)}\n")
    with open(path, "w", encoding="ascii", newline="\n") as file:
        file.writelines(lines)
    return path


def write(path: str, files: Mapping[str, bytes]) -> str:
    """Write the archive beside `path`, then move it into place; return `path`."""
    handle, unfinished = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".regsync-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(SHEBANG)
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
