"""Runs that are killed, that overlap, or that have as few permits as are allowed: nothing hangs or
is sent twice.

What a run costs otherwise is in test_costs and test_discipline, what waiting does to it in
test_discipline_time.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, error
from conformance.server.sockets import Server
from tests.ends import Ran, document, held, run_regsync, started, tags

LARGE = 70_000


def written(
    directory: Path, registries: Mapping[str, Any], *mappings: Mapping[str, Any], **top: Any
) -> str:
    """Write a configuration beside which there is to be state; return its path."""
    file = directory / "mirror.yaml"
    file.write_text(document(registries, *mappings, **top))
    return str(file)


def sync(file: str) -> Ran:
    return run_regsync("sync", "--json", "-q", "-c", file)


def uploads(target: Server) -> Counter[tuple[str, str]]:
    """Count how often each blob's bytes were taken, by repository and digest."""
    taken = [*target.journal.matching("PUT", "upload", status=201)]
    taken += target.journal.matching("POST", "upload_start", status=201, query={"digest": "*"})
    return Counter((each.repository, each.query["digest"]) for each in taken)


# kill -9.


def family(source: Server) -> dict[str, dict[str, Image]]:
    seed = Seed(31)
    base = [seed.layer(LARGE) for _ in range(3)]
    images = {
        f"app-{number}": {
            f"v{tag}": seed.image(layers=[*base, seed.layer(LARGE)]) for tag in range(3)
        }
        for number in range(4)
    }
    for name, tagged in images.items():
        for tag, image in tagged.items():
            image.load_into(source.app, name, tag=tag)
    return images


def kill_at(target: Server, running: list[subprocess.Popen[str]], request: int) -> None:
    """Kill the program after the target's n-th request; from that on it carries out nothing.

    Until the kill passes the half second in which a run may have notes that are not written yet.
    """
    counted = [0]

    def intercept(_: Request) -> Answer | None:
        counted[0] += 1
        if counted[0] == request:
            time.sleep(0.7)
            os.kill(running[0].pid, signal.SIGKILL)
        return error(503, "UNAVAILABLE", "too late") if counted[0] >= request else None

    target.app.intercept = intercept


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_after_a_kill_at_any_instant_the_next_run_brings_the_rest(tmp_path, serve, number):
    source, target = serve(), serve()
    images = family(source)
    file = written(
        tmp_path,
        {"source": source, "target": target},
        *({"from": name, "tags": tags("*")} for name in images),
        **{"global": {"max_concurrent_transfers": 2}},
    )
    # 4 listings, 15 + 12 blobs by two requests, 9 x 3 mounts, 12 manifests.
    instant = random.Random(number).randrange(12, 85)
    running: list[subprocess.Popen[str]] = []
    kill_at(target, running, instant)
    running.append(started("sync", "-q", "-c", file))
    running[0].communicate()
    assert running[0].returncode == -signal.SIGKILL
    for server in (source, target):
        server.wait_until_idle()
    target.app.intercept = None
    before = {digest for _, digest in uploads(target)}
    tagged = {name: target.app.tags(name) for name in images}
    # What stands there is whole (I11).
    for name, there in tagged.items():
        assert all(held(target, name, images[name][tag]) for tag in there)
    for server in (source, target):
        server.journal.clear()
    ran = sync(file)
    assert (ran.status, ran.failed) == (0, [])
    assert all(held(target, name, each) for name in images for each in images[name].values())
    # What the first run was told had arrived is not sent again; what was under way may be, and into
    # another repository, as the second run may begin with another image.
    sent = uploads(target)
    again = sum(count for (_, digest), count in sent.items() if digest in before)
    assert again <= 2 * 5, "more than two images' blobs were under way"
    assert sum(sent.values()) - again <= 15 + 12 - len(before)
    # Tags that the journal knows are asked for by one HEAD at each side, and nothing of theirs is
    # fetched.
    whole = sum(len(there) for there in tagged.values())
    source.journal.matching("HEAD", "manifest").at_least(max(0, whole - 2))


@pytest.mark.process
@pytest.mark.slow
def test_a_kill_before_the_last_manifest_loses_nothing(tmp_path, serve):
    """All that was answered half a second before is in the state, though the run never ended."""
    source, target = serve(), serve()
    image = Seed(32).image(sizes=(LARGE, LARGE, LARGE)).load_into(source.app, "app", tag="v1")
    file = written(
        tmp_path, {"source": source, "target": target}, {"from": "app", "tags": tags("v1")}
    )
    running: list[subprocess.Popen[str]] = []
    kill_at(target, running, 1 + 4 * 2 + 1)
    running.append(started("sync", "-q", "-c", file))
    running[0].communicate()
    target.app.intercept = None
    target.journal.matching("PUT", "manifest", status=201).none()
    assert sum(uploads(target).values()) == 4
    for server in (source, target):
        server.journal.clear()
    assert sync(file).statuses() == ["synced"]
    assert held(target, "app", image)
    assert source.journal.summary() == {"GET manifest": 1}
    assert target.journal.summary() == {"HEAD manifest": 1, "PUT manifest": 1}


# Two processes at once.


@pytest.mark.process
@pytest.mark.slow
def test_a_second_run_beside_the_first_says_so_and_spoils_nothing(tmp_path, serve):
    source, target = serve(), serve()
    images = family(source)
    held_up = source.app.faults.on("GET", "blob").first()
    held_up.stall(after=100)
    file = written(
        tmp_path,
        {"source": source, "target": target},
        *({"from": name, "tags": tags("*")} for name in images),
    )
    first = started("sync", "--json", "-q", "-c", file)
    held_up.wait()
    second = started("sync", "--json", "--no-progress", "-c", file)
    _, told = second.communicate()
    assert second.returncode == 0
    assert told.count("another run") == 1
    held_up.release()
    _, complaints = first.communicate()
    assert (first.returncode, complaints) == (0, "")
    assert all(held(target, name, each) for name in images for each in images[name].values())
    for server in (source, target):
        server.journal.clear()
    # The first one's state was saved, whatever the second did.
    assert set(sync(file).statuses()) == {"skipped"}
    assert target.journal.summary() == {"HEAD manifest": 12}


# The smallest permits.


SMALLEST = {"max_concurrent": 2}


def once_each(*targets: Server) -> None:
    """Claim that no blob's bytes came twice to a registry that mounts."""
    for target in targets:
        taken = Counter(
            digest for (_, digest), count in uploads(target).items() for _ in range(count)
        )
        assert [digest for digest, count in taken.items() if count > 1] == []


@pytest.mark.parametrize("slots", [1, 2, 50])
def test_opposite_mappings_between_two_hosts_end(tmp_path, serve, slots):
    one, two = serve(), serve()
    seed = Seed(33)
    base = seed.layer(LARGE)
    for server, name in ((one, "a"), (two, "b")):
        for number in range(4):
            seed.image(layers=[base, seed.layer(LARGE)]).load_into(
                server.app, f"{name}-{number}", tag="v1"
            )
    ends = {"source": {"url": one.url, **SMALLEST}, "two": {"url": two.url, **SMALLEST}}
    mappings = [
        {"from": f"a-{number}", "tags": tags("v1"), "targets": ["two"]} for number in range(4)
    ]
    mappings += [
        {"from": f"b-{number}", "tags": tags("v1"), "source": "two", "targets": ["source"]}
        for number in range(4)
    ]
    ran = sync(
        written(tmp_path, ends, *mappings, **{"global": {"max_concurrent_transfers": slots}})
    )
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 8)
    once_each(one, two)


@pytest.mark.parametrize("slots", [1, 50])
def test_mappings_within_one_host_end_and_send_nothing(tmp_path, serve, slots):
    server = serve()
    seed = Seed(34)
    base = seed.layer(LARGE)
    for number in range(4):
        seed.image(layers=[base, seed.layer(LARGE)]).load_into(server.app, f"a-{number}", tag="v1")
    ends = {"source": {"url": server.url, **SMALLEST}, "again": {"url": server.url, **SMALLEST}}
    mappings = [
        {"from": f"a-{number}", "to": f"b-{(number + 1) % 4}", "tags": tags("v1")}
        for number in range(4)
    ]
    ran = sync(
        written(tmp_path, ends, *mappings, **{"global": {"max_concurrent_transfers": slots}})
    )
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 4)
    server.journal.matching("GET", "blob").none()
    server.journal.matching("PUT", "upload").none()
    server.journal.matching("POST", "upload_start", status=201).exactly(12)


# Who waits for a turn has decided before: the 202 of a refused mount is its session all the same.
@pytest.mark.provokes("mount_refused_again")
@pytest.mark.parametrize("mounts", [True, False], ids=["mounts", "no mounts"])
@pytest.mark.parametrize("slots", [1, 3, 50])
def test_eight_images_that_need_each_others_layers_end(tmp_path, serve, slots, mounts):
    source, target = serve(), serve(mounts=mounts)
    seed = Seed(35)
    layers = [seed.layer(LARGE) for _ in range(8)]
    images = {}
    for number in range(8):
        # Each has three of the others' layers, in another order.
        chosen = [layers[(number * step + offset) % 8] for step, offset in ((1, 0), (3, 1), (5, 4))]
        images[f"app-{number}"] = seed.image(layers=chosen).load_into(
            source.app, f"app-{number}", tag="v1"
        )
    ends = {"source": {"url": source.url, **SMALLEST}, "target": {"url": target.url, **SMALLEST}}
    mappings = [{"from": name, "tags": tags("v1")} for name in images]
    ran = sync(
        written(tmp_path, ends, *mappings, **{"global": {"max_concurrent_transfers": slots}})
    )
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 8)
    assert all(held(target, name, image) for name, image in images.items())
    if mounts:
        once_each(target)
        source.journal.matching("GET", "blob").exactly(8 + 8)
    else:
        assert max(uploads(target).values()) == 1
