"""What goes wrong at night: registries that hang, drop answers or ask for hours, and a stop in
between.

Each test says how far the failure reaches, what it costs in requests, and what the operator is
told.
"""

from __future__ import annotations

import json
import resource

import pytest

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


@pytest.mark.parametrize(("hard", "raised"), [(4096, 4096), (1 << 20, 65536)])
def test_as_many_files_are_opened_as_the_system_lets_us(
    hard, raised, source, target, image, monkeypatch
):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert copy(source, target).status == 0
    assert asked == [(raised, hard)]
