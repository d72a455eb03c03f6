"""The law about who imports whom in `conformance/`: there is no circle.

That it imports nothing of the program is tested in test_conformance.py.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]


def siblings_imported(source: str, siblings: frozenset[str]) -> Iterator[str]:
    """Give the modules beside it that a source imports anywhere: in functions and for types too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from siblings.intersection(names)


def circle(sources: Mapping[str, str]) -> list[str]:
    """Return one circle of imports among modules; empty when there is none."""
    siblings = frozenset(sources)
    graph = {module: set(siblings_imported(text, siblings)) for module, text in sources.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_circle() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in PACKAGE.glob("*.py")}

    assert circle(sources) == []


@pytest.mark.parametrize(
    "late",
    [
        "from .first import x",
        "from . import first",
        "def f():\n    from .first import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .first import x",
    ],
)
def test_a_circle_is_caught(late: str) -> None:
    found = circle({"first": "from .second import y", "second": late, "third": "import json"})

    assert set(found) == {"first", "second"}


def test_what_only_looks_like_a_circle_passes() -> None:
    assert circle({"first": "from . import second", "second": "import first"}) == []
