"""What goes wrong at night: registries that hang, drop answers or ask for hours, and a stop in
between.

Each test says how far the failure reaches, what it costs in requests, and what the operator is
told.
"""

from __future__ import annotations

import json
import resource
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from _regsync.errors import ContentError, RegistryError, Side, SyncError
from _regsync.oci.manifest import Manifest
from _regsync.state.archive import RepositoryKey
from _regsync.sync import discovery
from _regsync.sync.once import Once
from conformance.content.images import Image, Seed
from conformance.messages import Request
from conformance.server.sockets import Server
from tests.ends import Peer, copy, document, held, only, run_regsync, stopped_at, sync, tags


@pytest.fixture
def image(source: Server) -> Image:
    return Seed(11).image().load_into(source.app, "app", tag="v1")


@pytest.mark.parametrize("command", ["copy", "sync"])
async def test_a_look_up_that_does_not_end_in_time_after_a_signal_is_work_left_undone(
    world, image, tmp_path, command
):
    source, target = world.registry("source.test"), world.registry("target.test")
    image.load_into(source.app, "app", tag="v1")
    source.app.faults.on().stall()
    configuration = tmp_path / "x.yaml"
    configuration.write_text(document({"source": source, "target": target}, {"from": "app"}))
    where = {
        "copy": ["--no-artifacts", f"{source.address}/app:v1", f"{target.address}/app"],
        "sync": [],
    }
    async with stopped_at(1.0):
        ran = await world.run(command, "--json", "-c", str(configuration), *where[command])
    assert ran.status == 143
    assert ran.report["interrupted"] is True
    assert ran.seconds <= 26.1


def test_a_registry_that_takes_connections_and_never_answers_stops_for_itself_only(
    speaker, serve, source, image
):
    for n in range(8):
        image.load_into(source.app, f"r{n}", tag="v1")
    asked: list[bytes] = []
    up = serve()

    async def silent(peer: Peer) -> None:
        asked.append(await peer.head())
        await peer.receive()

    config = document(
        {"source": source, "up": up, "hangs": speaker(silent)},
        *({"from": f"r{n}", "targets": ["up", "hangs"], "tags": tags("v1")} for n in range(8)),
    )
    ran = run_regsync("sync", "--json", "-q", "-c", "-", stdin=config)
    assert ran.status == 1
    assert all(held(up, f"r{n}", image) for n in range(8))
    assert len(ran.failed) == 8
    assert all("NETWORK_ERROR" in line and "no answer" in line for line in ran.failed)
    assert len(asked) < 8, "a first contact and its probes, for all images"


def test_a_registry_that_asks_for_hours_is_not_asked_again(source, target, image):
    image.load_into(source.app, "app", "v2", "v3")
    source.app.faults.on().status(429, "TOOMANYREQUESTS", retry_after=7200)
    # The first contact is one request that the others wait for.
    ran = sync(
        {"source": source, "target": target}, {"from": "app", "tags": tags("v1", "v2", "v3")}
    )
    assert len(ran.failed) == 3
    assert all("TOOMANYREQUESTS" in line and "2h00m" in line for line in ran.failed)
    assert source.journal.count("GET", "manifest") == 1


def test_a_lost_answer_is_asked_for_until_the_registry_is_well_again(source, target, image):
    def is_lost(request: Request) -> bool:
        return request.reference in [entry.query["digest"] for entry in lost.struck]

    lost = target.app.faults.on("PUT", "upload").first().drop(at="answer")
    ill = target.app.faults.on(kind="blob", where=is_lost).first(2).status(503)
    ran = copy(source, target)
    assert ran.status == 0
    assert held(target, "app", image)
    assert len(ill.struck) == 2
    assert target.journal.count("PUT", "upload", status=201) == len(image.blobs) - 1, (
        "none arrived twice"
    )


def test_an_upload_start_has_the_attempts_that_every_request_has(source, target, image):
    target.app.faults.on("POST", "upload_start").first(4).status(503)
    single = Seed(12).image(sizes=()).load_into(source.app, "small", tag="v1")
    assert copy(source, target, "small:v1").status == 0
    assert held(target, "small", single)


def test_a_copy_within_a_registry_that_allows_one_request_is_refused(source, image, tmp_path):
    config = tmp_path / "one.yaml"
    config.write_text(
        json.dumps({"registries": {"r": {"url": source.url, "max_concurrent": 1}}, "mappings": []})
    )
    where = [f"{source.address}/app:v1", f"{source.address}/other:v1"]
    ran = run_regsync("copy", "--no-artifacts", "-c", str(config), *where)
    assert ran.status == 3
    assert "max_concurrent is 1" in only(
        [line for line in ran.err.splitlines() if line.startswith("error")]
    )
    assert not source.journal.entries


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


def test_an_error_that_is_raised_again_elsewhere_has_another_place_and_no_retries():
    error = RegistryError("status 503", status=503)
    error.add_context(Side.SOURCE, "fetch blob", "a.test/app@sha256:00")
    error.retries = 4
    copy = error.copy_without_context()
    assert str(copy) == "status 503"
    assert (copy.side, copy.retries) == (None, 0)
    assert str(error) == "fetch blob a.test/app@sha256:00: status 503 (tried 5 times)"


@pytest.mark.parametrize(("hard", "raised"), [(4096, 4096), (1 << 20, 65536)])
def test_as_many_files_are_opened_as_the_system_lets_us(
    hard, raised, source, target, image, monkeypatch
):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert copy(source, target).status == 0
    assert asked == [(raised, hard)]
