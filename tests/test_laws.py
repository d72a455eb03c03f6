"""The folders keep the laws of laws.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.laws import breaches

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("_regsync", "conformance", "tools")  # the folders whose modules are held to the laws
MODULES = [
    path
    for folder in KEPT
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent != ROOT / "conformance" / "tests"
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_keeps_the_laws(path: Path) -> None:
    assert breaches(path.read_text(encoding="utf-8"), path.stem) == []


def test_no_file_of_tests_imports_another() -> None:
    """What two of them share has a module that says what it is."""
    importing = [
        path.name
        for path in sorted((ROOT / "tests").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("tests.test_")
    ]
    assert importing == []
