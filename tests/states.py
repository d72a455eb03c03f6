"""What a state on disk holds, as SQLite itself reads it, without the program."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

# Entries that a registry confirmed; the rest are facts of hosts, first-seen times and one moment.
KINDS = ("held", "tag", "look")


def rows(directory: Path) -> Mapping[str, list[tuple[object, ...]]]:
    """Return what repositories hold, and the notes of each kind; none where there is no state."""
    path = directory / "state.db"
    if not path.exists():
        return {}
    uri = f"file:{quote(str(path))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        notes = database.execute("SELECT * FROM note").fetchall()
        kinds = {
            kind: [note for note in notes if note[0].startswith(f"{kind} ".encode())]
            for kind in ("tag", "look", "fact", "seen")
        }
        return {"held": database.execute("SELECT * FROM held").fetchall(), **kinds}


def entries(directory: Path) -> int:
    """Return how many entries a state has of repositories, tags and looks."""
    found = rows(directory)
    return sum(len(found.get(kind, ())) for kind in KINDS)
