"""The request discipline where time matters: the age of the state, providers by their names, who
waits for whom.

Registries and the program share one loop on a clock that jumps (`ends.virtual`), so that a day
costs nothing and the order of things is the same each time. What needs no clock is in
test_discipline.
"""

from __future__ import annotations

import pytest

from _regsync.sync import schedule
from conformance.content.images import Seed
from tests.ends import tags


@pytest.fixture
def seed() -> Seed:
    return Seed(61)


# Who waits for whom.


async def test_blobs_go_by_the_number_of_images_that_name_them(world, seed, monkeypatch):
    """docs/specification.md section 1.1, "Blob order": over all images that are discovered when a
    blob's turn comes. A first image holds the only slot until the others are discovered. Blobs go
    one by one here, so that their order shows.
    """
    monkeypatch.setattr(schedule, "_MAX_BLOB_TASKS", 1)
    source, target = world.registry("source.test"), world.registry("target.test")
    seed.image().load_into(source.app, "first", tag="v1")
    layers = [seed.layer(900) for _ in range(8)]
    for number in range(8):
        # The last layer is in all of them, the first one in the last of them only.
        image = seed.image(layers=layers[7 - number :])
        image.load_into(source.app, "app", tag=f"v{number}")
    source.app.faults.on("GET", "blob", repository="first").delay(20)
    ran = await world.sync(
        {"source": source, "target": target},
        {"from": "first", "tags": tags("v1")},
        {"from": "app", "tags": tags("*")},
        **{"global": {"max_concurrent_transfers": 1}},
    )
    assert (ran.status, ran.failed) == (0, [])
    by_count = [each["digest"] for each in reversed(image.document["layers"])]
    read = [each.reference for each in source.journal.matching("GET", "blob", "app")]
    assert [digest for digest in read if digest in by_count] == by_count
