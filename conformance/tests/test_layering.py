"""The law about who imports whom in `conformance/`: downwards only, as its README draws the folders.

That it imports nothing of the program is tested in test_commands.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
README = (PACKAGE / "README.md").read_text(encoding="utf-8")

# `FOLDER/ MODULE MODULE ...`, from the ground up: a module imports from folders above its own line,
# and from modules before it in its own line.
DRAWING = README.partition("```folders\n")[2].partition("```")[0].splitlines()


def modules_of(line: str) -> list[str]:
    """Return the modules of a line of the drawing: `server/  exchange` has `server.exchange`."""
    folder, *modules = line.split()
    prefix = "" if folder == "conformance/" else folder.replace("/", ".")
    return [f"{prefix}{module}" for module in modules]


ORDER = [*(module for line in DRAWING for module in modules_of(line)), "__main__"]
PATHS = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py" and path.parent.name != "tests"
}


def imports(module: str, source: str) -> Iterator[str]:
    """Give the modules that a source imports anywhere: in functions and for types too.

    `from ..server import sockets` gives `server` and `server.sockets`.
    """
    package = ["conformance", *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            parent = ".".join([*above, *filter(None, [node.module])])
            names = [parent, *(f"{parent}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (
            name.removeprefix("conformance.") for name in names if name.startswith("conformance.")
        )


def breaches(module: str, source: str) -> list[str]:
    """Return the modules that `module` may not import and does."""
    below = set(ORDER[: ORDER.index(module)])
    return sorted((set(imports(module, source)) & {*ORDER, *PATHS}) - below)


def test_the_drawing_has_every_module_once() -> None:
    assert sorted(ORDER) == sorted(PATHS)


@pytest.mark.parametrize("module", PATHS)
def test_imports_run_downwards(module: str) -> None:
    assert breaches(module, PATHS[module].read_text(encoding="utf-8")) == []
