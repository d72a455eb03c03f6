"""What a state on disk holds, as SQLite itself reads it, without the program."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

# Entries that a registry confirmed; the rest are facts of hosts and one moment.
TABLES = ("blob", "manifest", "snapshot", "look")


def rows(directory: Path) -> Mapping[str, list[tuple[object, ...]]]:
    """Return the rows of each table; none where there is no state."""
    path = directory / "state.db"
    if not path.exists():
        return {}
    uri = f"file:{quote(str(path))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        return {
            table: database.execute(f"SELECT * FROM {table}").fetchall()
            for table in (*TABLES, "fact", "swept")
        }


def entries(directory: Path) -> int:
    """Return how many blobs, manifests, tags and looks a state knows."""
    found = rows(directory)
    return sum(len(found.get(table, ())) for table in TABLES)
