"""Which standard modules the executable has: those that its program can import, and no others.

`modules.txt` names them, one a line, so that a change is seen and judged. The names come from the
text: each import statement of the program and its packages, then of each standard module that these
name, wherever the statement stands. What is named and cannot be needed is in LEFT_OUT.

Owns: reading imports, the two lists of exceptions.
May not know: how modules get into the executable.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["LEFT_OUT", "closure", "compiled_in", "imported_names", "listed"]

FOLDER = Path(__file__).resolve().parent

# Imported by no statement: codecs are found by their names, the pools by attribute access.
BY_NAME = (
    "concurrent.futures.thread",
    "encodings.aliases",
    "encodings.ascii",
    "encodings.cp437",
    "encodings.hex_codec",
    "encodings.idna",
    "encodings.latin_1",
    "encodings.punycode",
    "encodings.raw_unicode_escape",
    "encodings.unicode_escape",
    "encodings.utf_16",
    "encodings.utf_16_be",
    "encodings.utf_16_le",
    "encodings.utf_32",
    "encodings.utf_8",
    "encodings.utf_8_sig",
)

# Named in the text of what is imported, and never reached on Linux by this program: other systems,
# debuggers and tests, pure Python twins of compiled modules, processes, mail, archives in formats that
# nothing reads. With a name goes what is below it.
LEFT_OUT = frozenset(
    {
        "_aix_support",
        "_osx_support",
        "_pydatetime",
        "_pydecimal",
        "_pyio",
        "_pyrepl",
        "_pytest",
        "asyncio.windows_events",
        "asyncio.windows_utils",
        "bdb",
        "bz2",
        "cmd",
        "code",
        "compileall",
        "concurrent.futures.process",
        "ctypes",
        "ctypes.wintypes",
        "curses",
        "dbm",
        "decimal",
        "doctest",
        "ensurepip",
        "exceptiongroup",
        "fractions",
        "ftplib",
        "idlelib",
        "lzma",
        "msvcrt",
        "multiprocessing",
        "nturl2path",
        "pdb",
        "pydoc",
        "pydoc_data",
        "pytest",
        "readline",
        "rlcompleter",
        "setuptools",
        "shelve",
        "smtplib",
        "statistics",
        "sysconfig",
        "test",
        "tkinter",
        "trio",
        "tty",
        "turtle",
        "unittest",
        "uvloop",
        "venv",
        "winloop",
        "winreg",
        "wsgiref",
        "xml",
        "xmlrpc",
        "zipapp",
    }
)

# Part of every CPython: Modules/Setup.bootstrap.in, and what the interpreter itself registers.
ALWAYS_COMPILED_IN = frozenset(
    {
        "_abc",
        "_ast",
        "_codecs",
        "_collections",
        "_functools",
        "_imp",
        "_io",
        "_locale",
        "_operator",
        "_signal",
        "_sre",
        "_stat",
        "_string",
        "_suggestions",
        "_symtable",
        "_sysconfig",
        "_thread",
        "_tokenize",
        "_tracemalloc",
        "_typing",
        "_warnings",
        "_weakref",
        "atexit",
        "builtins",
        "errno",
        "faulthandler",
        "gc",
        "itertools",
        "marshal",
        "posix",
        "pwd",
        "sys",
        "time",
    }
)


def listed() -> list[str]:
    """Return the names of modules.txt."""
    return (FOLDER / "modules.txt").read_text(encoding="ascii").split()


def compiled_in() -> set[str]:
    """Return the names of the modules in C: those that Setup.local adds, and those that are always there."""
    lines = (FOLDER / "Setup.local").read_text(encoding="utf-8").splitlines()
    added = {line.split()[0] for line in lines if line and line[0] not in "#*"}
    return added | ALWAYS_COMPILED_IN


def is_left_out(name: str) -> bool:
    """Tell whether a module, or a package that it is in, is in LEFT_OUT."""
    parts = name.split(".")
    return any(".".join(parts[: length + 1]) in LEFT_OUT for length in range(len(parts)))


def imported_names(source: str, module: str, *, is_package: bool) -> set[str]:
    """Return the full names in the import statements of one module.

    `from a import b` gives `a` and `a.b`: whether the second is a module is not known here.
    """
    package = module if is_package else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                kept = above[: len(above) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def closure(program: Mapping[str, str], lib: Path) -> list[str]:
    """Return the names of all modules below `lib` that the program can import, sorted.

    `program` has the sources of the program and its packages by their paths in the archive.
    """
    wanted = set(BY_NAME)
    for place, source in program.items():
        if place.endswith(".py"):
            module, is_package = module_of(place)
            wanted |= imported_names(source, module, is_package=is_package)

    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        path = path_of(name, lib)
        if name in found or is_left_out(name) or path is None:
            continue
        found.add(name)
        is_package = path.name == "__init__.py"
        wanted |= imported_names(path.read_text(encoding="utf-8"), name, is_package=is_package)
        if "." in name:
            wanted.add(name.rpartition(".")[0])
    return sorted(found)


def unlisted(program: Mapping[str, str], standard: Iterable[str]) -> list[str]:
    """Return the standard modules that the program names and the executable would not have.

    `standard` are the names of the top-level modules of the library (sys.stdlib_module_names).
    """
    there = {*listed(), *compiled_in()}
    tops = set(standard)
    missing = set()
    for path, source in program.items():
        if not path.endswith(".py"):
            continue
        name, is_package = module_of(path)
        for wanted in imported_names(source, name, is_package=is_package):
            top = wanted.partition(".")[0]
            if top in tops and top not in there and not is_left_out(wanted):
                missing.add(wanted)
    return sorted(missing)


def module_of(path: str) -> tuple[str, bool]:
    """Return a module's name, and whether it is a package, by its path in the archive."""
    stem = path.removesuffix(".py")
    is_package = stem.endswith("/__init__")
    return stem.removesuffix("/__init__").replace("/", "."), is_package


def path_of(name: str, lib: Path) -> Path | None:
    """Return the file of a standard module, None where there is none of that name."""
    path = lib.joinpath(*name.split("."))
    for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if file.is_file():
            return file
    return None


if __name__ == "__main__":
    # Runs in the CPython whose library it reads: an older one cannot parse it.
    sys.stdout.write("\n".join(closure(json.load(sys.stdin), Path(sys.argv[1]))) + "\n")
