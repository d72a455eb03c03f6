"""Who may use what in the program: imports run downwards only, and no other program is started.

`breaches` reads one module's syntax tree and returns what it does against that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [
    path
    for path in sorted((ROOT / "_regsync").rglob("*.py"))
    if path.name != "__init__.py" or path.parent.name == "_regsync"
]

# The rooms from the ground up, as docs/design.md begins with them: a module imports from rooms above
# its own line, and from modules before it in its own line. `_regsync/` is the root.
DRAWING = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
ROOMS = DRAWING.partition("```rooms\n")[2].partition("```")[0].splitlines()

# Modules of the standard library, and who may import them: nobody what starts programs or hides
# what is imported, and digests and MACs have one door (docs/design.md section 11).
RESERVED = {
    **dict.fromkeys(("subprocess", "multiprocessing", "concurrent", "pty", "webbrowser"), ()),
    **dict.fromkeys(("asyncio", "importlib"), ()),
    **dict.fromkeys(("hashlib", "hmac", "secrets", "_hashlib"), ("fips", "crypto")),
}
PROGRAM_CALLS = {
    *("system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile"),
    *("run_process", "open_process", "to_process", "to_interpreter"),
    *("__import__", "eval", "exec"),
    *(
        f"{way}{end}"
        for way in ("exec", "spawn")
        for end in ["l", "le", "lp", "lpe", "v", "ve", "vp", "vpe"]
    ),
}


def modules_of(line: str) -> list[str]:
    """Return the modules of `net/  tls proxy`: `net.tls`, `net.proxy`."""
    room, *modules = line.split()
    prefix = "" if room == "_regsync/" else room.replace("/", ".")
    return [f"{prefix}{module}" for module in modules]


ORDER = ["__init__", *(module for line in ROOMS for module in modules_of(line))]


def module_name(path: Path) -> str:
    """Return `sync.run` for _regsync/sync/run.py."""
    return ".".join(path.relative_to(ROOT / "_regsync").with_suffix("").parts)


def imports(node: ast.AST) -> Iterator[str]:
    """Give the absolute names that a statement imports; `from a import b` gives `a` and `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = ".".join(
            part for part in ("_regsync" * bool(node.level), node.module or "") if part
        )
        yield package
        yield from (f"{package}.{alias.name}" for alias in node.names)


def word(node: ast.AST) -> str:
    """Return the name that a node uses, by itself or of a module; "" for what is no name."""
    match node:
        case ast.Name(id=name) | ast.alias(name=name) | ast.Attribute(value=ast.Name(), attr=name):
            return name
    return ""


def breaches(name: str, source: str) -> Iterator[str]:
    """Give every breach in module `name`, as `LINE: what`."""
    tree = ast.parse(source)
    for_types_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    place = ORDER.index(name)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for imported in imports(node):
            top, _, rest = imported.partition(".")
            if top == "regsync":
                yield f"{line}: the program imports its own face"
            if top == "_regsync" and rest in ORDER and ORDER.index(rest) >= max(place, 1):
                yield f"{line}: {name} may not import {rest}"
            if name not in RESERVED.get(top, (name,)) and node not in for_types_only:
                yield f"{line}: {name} may not import {top}"
        if word(node) in PROGRAM_CALLS:
            yield f"{line}: {word(node)} runs another program or hidden code"


@pytest.mark.parametrize("path", PROGRAM, ids=module_name)
def test_module_keeps_to_its_layer(path: Path) -> None:
    assert [*breaches(module_name(path), path.read_text(encoding="utf-8"))] == []


def test_the_drawing_names_each_module_once() -> None:
    assert sorted(ORDER) == sorted(map(module_name, PROGRAM))


# The tests that judge any program. The first lets those of the inside have the edge of this process.
BOUNDARY = [
    path
    for path in sorted((ROOT / "tests").glob("*.py"))
    if path.name not in ("conftest.py", "test_layering.py")
]
INSIDE = re.compile(r"^_regsync\.|(?:from|import) _regsync\b")


@pytest.mark.parametrize("path", BOUNDARY, ids=lambda path: path.stem)
def test_the_boundary_knows_nothing_of_the_inside(path: Path) -> None:
    """Neither by an import nor by the text of a name that is patched, or of code that is run."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not [name for name in imports(node) if name.partition(".")[0] == "_regsync"]
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        assert not (is_text and INSIDE.search(node.value)), node.lineno


@pytest.mark.parametrize(
    "line",
    [
        "from _regsync.sync import run",
        "from _regsync.net.wire import Pool",
        "import regsync",
        "import subprocess",
        "from hashlib import sha256",
        "os.execv('/bin/true', [])",
        "from os import system",
    ],
)
def test_a_breach_is_seen(line: str) -> None:
    assert [*breaches("net.wire", line)]
