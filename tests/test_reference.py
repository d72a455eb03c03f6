"""The reference of the configuration in docs/configuration.md, held to the table that validates."""

from __future__ import annotations

import pytest

from tools import reference

PAGE = reference.PAGE.read_text(encoding="utf-8")


def test_the_readme_has_the_reference_of_now() -> None:
    assert reference.updated(PAGE) == PAGE, "run python3 tools/reference.py"


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match="reference: begin"):
        reference.updated("# title\n")
