"""Runs that are killed, that overlap, or that have as few permits as are allowed: nothing hangs or
is sent twice.

What a run costs otherwise is in test_costs and test_discipline, what waiting does to it in
test_discipline_time.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _regsync.state.archive import RepositoryKey, key_of
from _regsync.state.database import StateFile
from conformance.content.images import Seed
from tests.ends import Ran, document, run_regsync, tags


def written(
    directory: Path, registries: Mapping[str, Any], *mappings: Mapping[str, Any], **top: Any
) -> str:
    """Write a configuration beside which there is to be state; return its path."""
    file = directory / "mirror.yaml"
    file.write_text(document(registries, *mappings, **top))
    return str(file)


def sync(file: str) -> Ran:
    return run_regsync("sync", "--json", "-q", "-c", file)


# kill -9.


def test_reading_the_state_takes_no_more_memory_than_there_is_to_read(tmp_path, serve):
    source, target = serve(), serve()
    image = Seed(36).image().load_into(source.app, "app", tag="v1")
    file = written(
        tmp_path, {"source": source, "target": target}, {"from": "app", "tags": tags("v1")}
    )
    assert sync(file).status == 0
    tracemalloc.start()
    try:
        state = StateFile(str(tmp_path / ".regsync"), print)
        state.load(may_write=False)
        where = RepositoryKey(target.url.partition("//")[2], "app")
        assert state.manifest(where, key_of(image.top)) is not None
        state.close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
