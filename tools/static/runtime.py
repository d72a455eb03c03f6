"""The runtime: CPython, AWS-LC or OpenSSL, SQLite and zlib in one static executable, with no program behind it.

It is built in parts. A part has a directory of its own, beside the others, and a recipe, a short
shell script that runs there (recipes/). The directory's name ends with a hash of the recipe, of the
files that it reads and of the names of the parts that it uses; so whatever changes, exactly the parts
below it are built again, and what is there already is right.

    zig -> toolchain -> zlib, sqlite, aws-lc or openssl -> python -> runtime
           toolchain -> build_python                    -> python

Owns: which part is made of what; where a runtime is.
May not know: the program.
Invariants: the same sources give the same bytes, whatever the directory, the user and the clock
(docs/install.md). Recipes name each other's directories relatively, and the compiler cuts the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.build_zipapp import BuildError
from tools.static.sources import CPYTHON, SQLITE, ZIG, ZLIB, Source, Variant, fetch

__all__ = ["ARCHITECTURES", "build_runtime", "runtime_of"]

ARCHITECTURES = ("x86_64", "aarch64")
BUILD_MACHINE = "x86_64"  # of which the pinned wheel of the compiler is, and which configure asks

FOLDER = Path(__file__).resolve().parent
# What a build takes of the machine, and what the one of the FIPS module takes beside that.
PROGRAMS = ("perl", "make", "readelf", "tar", "xz", "{arch}-linux-gnu-strip")
FIPS_PROGRAMS = ("cmake", "ninja", "go", "{arch}-linux-gnu-gcc")

# 1980, the earliest date of the zip format, as everywhere else.
SOURCE_DATE_EPOCH = "315532800"


@dataclass(frozen=True, eq=False)  # a part is one object, however many others use it
class Part:
    """One step of the build: a recipe, and what it is given."""

    name: str
    recipe: str  # a file of recipes/
    uses: Mapping[str, Part] = field(default_factory=dict)  # by the variable for its directory
    files: tuple[str, ...] = ()  # what it reads in this folder
    source: Source | None = None  # the archive that it unpacks
    settings: Mapping[str, str] = field(default_factory=dict)  # variables that lead nowhere

    @property
    def directory(self) -> str:
        """The name of the part's directory."""
        texts = [(FOLDER / name).read_text(encoding="utf-8") for name in self.files]
        texts.append((FOLDER / "recipes" / self.recipe).read_text(encoding="utf-8"))
        parts = [(variable, part.directory) for variable, part in self.uses.items()]
        archive = self.source.sha256 if self.source else ""
        facts = json.dumps([list(self.settings.items()), parts, texts, archive])
        return f"{self.name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def runtime(variant: Variant, arch: str) -> Part:
    """Return the last part of a variant for an architecture, with all that it uses."""
    library = variant.library
    unpacked = {source: unpacked_source(source) for source in variant.sources}
    zig = Part("zig", "zig.sh", source=ZIG)
    tools = {"TOOLCHAIN": Part("toolchain", "toolchain.sh", {"ZIG": zig})}
    texts = {"SOURCE": unpacked[CPYTHON]}
    build_python = Part("build_python", "build_python.sh", {**texts, **tools})

    def for_arch(recipe: str, uses: Mapping[str, Part], *files: str, **settings: str) -> Part:
        name = f"{recipe}-{arch}"
        settings["ARCH"] = arch
        return Part(name, f"{recipe}.sh", {**uses, **tools}, files, settings=settings)

    used = {
        **texts,
        "BUILD_PYTHON": build_python,
        "CRYPTO": for_arch(library.name.lower(), {"SOURCE": unpacked[library]}),
        "SQLITE": for_arch("sqlite", {"SOURCE": unpacked[SQLITE]}),
        "ZLIB": for_arch("zlib", {"SOURCE": unpacked[ZLIB]}),
    }
    used["PYTHON"] = for_arch("python", used, "Setup.local", "tls.h")
    used |= {"SQLITE_SOURCE": unpacked[SQLITE], "ZLIB_SOURCE": unpacked[ZLIB], "ZIG": zig}
    return for_arch("link", used, "main.c", "freeze.py", "modules.txt", LIBRARY=library.name)


def unpacked_source(source: Source) -> Part:
    """Return the part that is nothing but an unpacked archive."""
    return Part(f"source-{source.name.lower()}-{source.version}", "unpack.sh", source=source)


def runtime_of(variant: Variant, arch: str, work: Path) -> Path | None:
    """Return the directory of a runtime if it has been built.

    It has the file `runtime`, its table of symbols, and the folder `licenses`.
    """
    directory = work / runtime(variant, arch).directory
    return directory if (directory / "complete").exists() else None


def build_runtime(variant: Variant, arch: str, work: Path, sources: Path) -> Path:
    """Build what is not there yet, and return the directory of the runtime, as `runtime_of` does.

    BuildError says what is missing or where the log is.
    """
    if built := runtime_of(variant, arch, work):
        return built
    if platform.machine() != BUILD_MACHINE:
        raise BuildError(
            f"this machine is {platform.machine()}; the compiler that is pinned runs on {BUILD_MACHINE}"
        )
    names = PROGRAMS + FIPS_PROGRAMS if variant.is_fips else PROGRAMS
    programs = [name.format(arch=arch) for name in names]
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise BuildError(f"to compile the runtime, install {', '.join(missing)}")

    last = runtime(variant, arch)
    for part in in_order(last):
        build_part(part, work, sources)
    return work / last.directory


def in_order(last: Part) -> list[Part]:
    """Return a part and all that it uses, each once, what is used first."""
    ordered: dict[Part, None] = {}
    for part in last.uses.values():
        ordered.update(dict.fromkeys(in_order(part)))
    ordered[last] = None
    return list(ordered)


def build_part(part: Part, work: Path, sources: Path) -> None:
    """Build one part unless it is there."""
    directory = work / part.directory
    if (directory / "complete").exists():
        return
    places = {"WORK": str(work), "FOLDER": str(FOLDER), "JOBS": str(os.cpu_count() or 1)}
    if part.source:
        places["ARCHIVE"] = str(fetch(part.source, sources))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)

    print(f"{part.name} ...", flush=True)
    began = time.monotonic()
    log = work / f"{part.directory}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            ["sh", "-eux", str(FOLDER / "recipes" / part.recipe)],
            cwd=directory,
            env=environment(part, work, places),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise BuildError(f"{part.name} could not be built: see {log}")
    (directory / "complete").touch()
    print(f"{part.name}: {time.monotonic() - began:.0f} s", flush=True)


def environment(part: Part, work: Path, places: Mapping[str, str]) -> dict[str, str]:
    """Return all variables that a recipe sees; nothing else of this process reaches it."""
    used = {variable: other.directory for variable, other in part.uses.items()}
    path = os.environ.get("PATH", os.defpath)
    if "TOOLCHAIN" in used:
        path = f"{work / used['TOOLCHAIN'] / 'bin'}{os.pathsep}{path}"
    return {
        "PATH": path,
        "HOME": str(work),
        "LC_ALL": "C",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
        "ZIG_GLOBAL_CACHE_DIR": str(work / "zig-cache"),
        "ZIG_LOCAL_CACHE_DIR": str(work / "zig-cache"),
        **part.settings,
        **used,
        **places,
    }
