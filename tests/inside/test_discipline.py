"""The request discipline (docs/design.md section 6), counted on the wire: what a path costs where
registries refuse, err or forget, and what it must not.

What undisturbed runs cost is in test_costs. Rules 1 (no ping, one bare request), 2 (tokens) and 3
(pages) have their files: test_tokens, test_sync, test_hostile_answers. What a broken body and a lost
answer cost (rule 16) is in test_resume, a full disk in test_errors_told. Every run is audited besides
(`tests.ends`), so that no request of a kind that was known to be unnecessary goes unnoticed.
"""

from __future__ import annotations

from typing import Any

import pytest

from _regsync.state.database import StateFile
from tests.ends import load_numbered, tags

# What a state saves.


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts of all queries that are sent to state files."""
    sent = list[str]()
    select = StateFile._select

    def noted(self: StateFile, query: str, *values: Any) -> Any:
        sent.append(query)
        return select(self, query, *values)

    monkeypatch.setattr(StateFile, "_select", noted)
    return sent


def test_unchanged_tags_are_read_from_the_state_at_once(source, queries, sync_pair):
    load_numbered(source, 20)
    mapping = {"from": "app", "tags": tags("*"), "artifacts": {"enabled": False}}
    assert sync_pair(mapping).status == 0
    queries.clear()
    assert set(sync_pair(mapping).statuses()) == {"skipped"}
    tables = sorted(query.partition(" FROM ")[2].split()[0] for query in queries)
    # Facts of both hosts, when the file was swept, all snapshots, the ages of all manifests.
    assert tables == ["fact", "fact", "manifest", "snapshot", "swept"]


def test_who_holds_a_blob_is_read_once_for_each_blob(source, queries, sync_pair):
    images = load_numbered(source, 3)
    mapping = {"from": "app", "tags": tags("*"), "artifacts": {"enabled": False}}
    ran = sync_pair(mapping)
    assert ran.status == 0
    blobs = {digest for image in images for digest in image.contents() if digest != image.top}
    assert sum("is_mountable" in query and "ORDER" in query for query in queries) == len(blobs)
