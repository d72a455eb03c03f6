"""The pages that are for users, and the others in `docs/`, which are for developers."""

from __future__ import annotations

from tests.ends import ROOT

FOR_USERS = (
    *("install", "configuration", "recipes", "operations", "comparison", "security"),
    *("contributing", "changes"),
)
PAGES_FOR_USERS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in FOR_USERS)]

# They are read for blocks of code alone: their sentences name commands in part.
OTHER_PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page not in PAGES_FOR_USERS]
