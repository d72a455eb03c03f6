"""What goes over the wire in a copy or a sync, counted exactly, and how far a failure reaches.

The lower bounds of docs/design.md section 6 for open registries, then the isolation and the
repetition of failures. Every test looks at the target as well as at the counts, and at what must
not have been asked.
"""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from _regsync.errors import ProtocolBroken
from _regsync.registry import upload
from _regsync.sync.transfer import BlobTransfer
from conformance.content.images import Seed
from conformance.messages import Answer, Request, digest_of
from tests.ends import Virtual, copy, only, tags
from tools.benches.place import app_of


@pytest.fixture
def seed() -> Seed:
    return Seed(7)


# Blobs.


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_small_blob_is_staged_in_memory_also_when_the_disk_has_failed(
    world: Virtual, seed, monkeypatch
):
    make = BlobTransfer.__init__

    def make_without_disk(self: BlobTransfer, *arguments: Any) -> None:
        make(self, *arguments)
        self._has_disk_failed = True

    async def delay_two(request: Request) -> Answer | None:
        # That the blob is shared is known when the second and the third image are copied.
        if request.kind == "manifest" and request.repository in ("b", "c"):
            await anyio.sleep(5)
        return None

    monkeypatch.setattr(BlobTransfer, "__init__", make_without_disk)
    source = world.registry("source.test")
    ends = {"source": source, "one": world.registry("one.test"), "two": world.registry("two.test")}
    shared = seed.layer(3000)
    for name in ("a", "b", "c"):
        seed.image(layers=[shared, seed.layer(9)]).load_into(app_of(source), name, tag="v1")
    app_of(source).intercept = delay_two
    targets = {"a": "one", "b": "two", "c": "three"}
    ends = {name: {"url": world.registry(f"{name}.test").url} for name in targets.values()}
    ran = await world.sync(
        {"source": source, **ends},
        *(
            {"from": name, "tags": tags("v1"), "targets": [target]}
            for name, target in targets.items()
        ),
    )
    assert ran.statuses() == ["synced"] * 3
    reads = [read.reference for read in source.journal.matching("GET", "blob")]
    assert reads.count(digest_of(shared)) == 2  # for the first image, and once for the memory


# Repetition.


def test_a_session_at_a_refused_location_gets_no_request(source, target, seed):
    seed.image(sizes=()).load_into(source.app, "app", tag="v1")

    def refuse(*_: Any) -> None:
        raise ProtocolBroken("refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "check_foreign", refuse)
        ran = copy(source, target)
    assert "refused" in only(ran.failed)
    assert only(ran.images)["error"]["retries"] == 0
    assert target.journal.count("DELETE") == target.journal.count("PUT") == 0
