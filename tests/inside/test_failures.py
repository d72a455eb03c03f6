"""What goes wrong at night: registries that hang, drop answers or ask for hours, and a stop in
between.

Each test says how far the failure reaches, what it costs in requests, and what the operator is
told.
"""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from _regsync.errors import ContentError, SyncError
from _regsync.oci.manifest import Manifest
from _regsync.state import RepositoryKey
from _regsync.sync import discovery
from _regsync.sync.once import Once
from conformance.content.images import Image, Seed
from conformance.server.sockets import Server
from tests.ends import held, sync, tags


@pytest.fixture
def image(source: Server) -> Image:
    return Seed(11).image().load_into(source.app, "app", tag="v1")


def test_a_run_keeps_a_bounded_number_of_manifests(source, target, monkeypatch):
    kept: list[int] = []
    look_up = discovery.Discovery.look_up

    async def watched(
        self: discovery.Discovery, *arguments: Any, **more: Any
    ) -> discovery.TagLookup:
        found = await look_up(self, *arguments, **more)
        kept.append(len(self._manifests._weights))
        return found

    monkeypatch.setattr(discovery, "_MANIFEST_BUDGET", 3 * 8192)
    monkeypatch.setattr(discovery.Discovery, "look_up", watched)
    names = [f"v{n}" for n in range(6)]
    indexes = [
        Seed(20 + n).index().load_into(source.app, "app", tag=name) for n, name in enumerate(names)
    ]
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags(*names)})
    assert ran.statuses() == ["synced"] * 6
    assert all(held(target, "app", index) for index in indexes)
    assert max(kept) == 3


async def test_what_fails_is_asked_once_by_all_that_want_it():
    once = Once[int]()
    asked: list[str] = []
    errors: list[SyncError] = []

    async def ask() -> int:
        asked.append("")
        await anyio.lowlevel.checkpoint()
        raise ContentError("no such thing")

    async def want() -> None:
        try:
            await once.get(ask)
        except SyncError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(want)
    assert (len(asked), len(errors)) == (1, 3)


def test_manifests_are_kept_as_far_as_their_budget_goes():
    kept = discovery._ManifestCache()
    place = RepositoryKey("registry.example", "app")
    manifests = [Manifest("image", f"sha256:{number:064x}", bytes(4 << 20)) for number in range(12)]
    for manifest in manifests:
        kept.record_use(place, manifest.digest, manifest)
    assert [kept.get(place, manifest.digest) for manifest in manifests] == [None] * 4 + manifests[
        4:
    ]
