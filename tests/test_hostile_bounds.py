"""Everything that others can make large is bounded (R14): memory, work, tasks, connections, threads.

Each test is an attack. It may fail its own image; everything else goes on as if it were not there.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from conformance.content.images import Seed
from conformance.messages import Response
from conformance.registry.storage import OCI_MANIFEST
from tests.ends import document, only, run_regsync, sync, tags

# Bombs: a small answer that names much more, or is large in memory.


@pytest.mark.rule("R14")
@pytest.mark.parametrize(
    "body", [b'{"a":[' + b"[]," * 500_000 + b"[]]}", b'{"a":[' + b"0," * 500_000 + b"0]}"]
)
def test_a_manifest_of_too_many_values_is_refused_unread(source, target, body):
    source.app.intercept = lambda request: (
        Response(200, [("Content-Type", OCI_MANIFEST)], body)
        if request.kind == "manifest"
        else None
    )
    ran = sync({"source": source, "t": target}, {"from": "app", "tags": tags("v1")})
    assert "more than 300000 values" in only(ran.failed)
    assert source.journal.count("GET", "manifest") == 1


@pytest.mark.rule("R14")
def test_a_listing_of_lists_is_refused_unread(source, target):
    body = b'{"tags":[' + b"[]," * 300_000 + b"[]]}"
    source.app.intercept = lambda request: (
        Response(200, [], body) if request.kind == "tag_list" else None
    )
    ran = sync({"source": source, "t": target}, {"from": "app"})
    assert "is not a list of names" in only(ran.failed)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_no_failed_image_keeps_the_body_that_it_failed_on(world):
    names = [f"v{number}" for number in range(60)]
    source, target = world.registry("source.test"), world.registry("target.test")
    body = b"\xff" * 2**20
    source.app.intercept = lambda request: (
        Response(200, [], body) if request.kind == "manifest" else None
    )
    tracemalloc.start()
    try:
        ran = await world.sync(
            {"source": source, "t": target}, {"from": "app", "tags": tags(*names)}
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ran.statuses() == ["failed"] * 60
    # Fewer are in flight, and each is there twice at most.
    assert peak < 30 * 2**20


# Tasks, connections and threads.


def test_blobs_that_wait_for_their_source_hold_no_connection_to_the_targets(serve):
    source, *targets = serve(), serve(), serve()
    Seed(1).image(sizes=range(100, 130)).load_into(source.app, "app", tag="v1")
    ends: dict[str, Any] = {"source": {"url": source.url, "max_concurrent": 1}}
    ends |= {
        name: {"url": each.url, "max_concurrent": 3}
        for name, each in zip("tu", targets, strict=True)
    }
    text = document(ends, {"from": "app", "tags": tags("v1")})
    ran = run_regsync("sync", "--json", "-q", "-c", "-", stdin=text)
    assert ran.statuses() == ["synced", "synced"]
    assert [each.journal.connections() <= 3 for each in targets] == [True, True]
