"""The folders keep the laws of laws.py."""

from __future__ import annotations

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
