"""The pages that are for users; the others in `docs/` are for developers."""

from __future__ import annotations

from tests.ends import ROOT

FOR_USERS = (
    "install",
    "glossary",
    "configuration",
    "tags",
    "recipes",
    "operations",
    "comparison",
    "security",
    "contributing",
    "changes",
)
PAGES_FOR_USERS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in FOR_USERS)]
