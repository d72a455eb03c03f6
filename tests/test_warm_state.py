"""What a run asks of the state on disk: few queries, however many tags there are."""

from __future__ import annotations

from typing import Any

import pytest

from _regsync.state.database import StateFile
from tests.ends import tags
from tests.test_warm import load


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
    load(source, "app", 20)
    mapping = {"from": "app", "tags": tags("*"), "artifacts": {"enabled": False}}
    assert sync_pair(mapping).status == 0
    queries.clear()
    assert set(sync_pair(mapping).statuses()) == {"skipped"}
    tables = sorted(query.partition(" FROM ")[2].split()[0] for query in queries)
    # Facts of both hosts, when the file was swept, all snapshots, the ages of all manifests.
    assert tables == ["fact", "fact", "manifest", "snapshot", "swept"]


def test_who_holds_a_blob_is_read_once_for_each_blob(source, queries, sync_pair):
    images = load(source, "app", 3)
    mapping = {"from": "app", "tags": tags("*"), "artifacts": {"enabled": False}}
    ran = sync_pair(mapping)
    assert ran.status == 0
    blobs = {digest for image in images for digest in image.contents() if digest != image.top}
    assert sum("is_mountable" in query and "ORDER" in query for query in queries) == len(blobs)
