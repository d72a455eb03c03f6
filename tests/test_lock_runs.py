"""Runs from a lock, elsewhere than in one `sync` in memory: cycles, ages, Debian's docker-registry."""

from __future__ import annotations

import itertools
import json
from datetime import datetime, timezone
from typing import Any

import anyio
import pytest

from conformance.client.attachments import FAMILIES, family, referrers_tag
from conformance.client.copies import fetch_http, identical, push_http
from conformance.content.images import Seed
from tests.attached import Scene
from tests.ends import Ran, only, run_regsync, tags
from tests.mirrors import LockedMirror
from tests.states import rows
from tests.thinning import thinned
from tests.watching import Scene as Watched
from tests.watching import lines

HOUR = 3600.0
# Cycles.


async def locks(stage: Watched) -> tuple[str, str]:
    """Return a lock, and one in which v1 has moved; the source has moved on from both."""
    stage.write({"from": "app", "tags": tags("v*")}, **{"global": {}})
    texts = []
    for _ in range(2):
        stage.load("v1")
        ran = await stage.world.run("lock", "-q", "-c", str(stage.file))
        assert ran.status == 0, ran.err
        texts.append(stage.file.with_suffix(".lock").read_text())
    stage.load("v1")
    stage.source.journal.clear()
    return texts[0], texts[1]


async def test_a_watch_reads_the_lock_before_each_cycle(stage):
    stage.load("v2")
    first, second = await locks(stage)
    lock = stage.file.with_suffix(".lock")
    lock.write_text(first)

    def moved() -> None:
        lock.write_text(second)

    def broken() -> None:
        lock.write_text(first + "<<<<<<< HEAD\n")

    def gone() -> None:
        lock.unlink()

    def mended() -> None:
        lock.write_text(first)

    ran = await stage.watch(None, moved, broken, gone, mended, more=("--locked",))
    assert ran.status == 0
    copied, quiet, moved_on, kept, still_kept, back = stage.asked
    assert copied[0] == {"GET manifest": 2, "GET blob": copied[0]["GET blob"]}
    assert quiet == ({}, {"HEAD manifest": 2})
    assert moved_on[0]["GET manifest"] == 1
    assert kept == still_kept == quiet
    assert back[1]["PUT manifest"] == 1
    assert lines(ran, "info: now in force: 1 mappings, 2 locked images")
    assert lines(ran, "CONFIG_ERROR", "conflict marks", "in force")
    assert lines(ran, "mirror.lock does not exist")
    for source, _ in stage.asked:
        assert source.keys() <= {"GET manifest", "GET blob"}
    tag = stage.target.app.repositories["app"].tags["v1"]
    assert tag in first


async def test_a_configuration_that_the_lock_is_not_for_leaves_the_last_good_one(stage):
    stage.load("v2")
    await locks(stage)

    def change() -> None:
        stage.write({"from": "app", "tags": tags("*")}, **{"global": {}})

    ran = await stage.watch(change, more=("--locked",))
    assert lines(ran, "has changed", "in force")
    assert stage.asked[1] == ({}, {"HEAD manifest": 2})


# Ages.


async def test_a_lock_tells_ages_where_nothing_is_kept(world, tmp_path):
    """A job without a directory that stays: what the lock has seen three days ago is old enough."""
    mirror = LockedMirror(world, tmp_path)
    old = mirror.push("v1")
    mapping = {"from": "app", "tags": tags("v*"), "min_age": "3d"}
    mirror.write(mapping, **{"global": {}})
    await mirror.succeed("lock")
    await anyio.sleep(72 * HOUR)
    mirror.push("v2")
    await mirror.succeed("lock")

    text = mirror.file.read_text()
    ran = await world.run(
        *("sync", "--json", "-q", "--lock", str(mirror.lock), "-c", "-"), stdin=text
    )
    assert ran.status == 0, ran.err
    assert {each["source"]: each["status"] for each in ran.images} == {
        "source.test/app:v1": "synced",
        "source.test/app:v2": "skipped",
    }
    assert mirror.held() == {"v1": old.top}
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert ran.status == 3
    assert "keeps nothing" in ran.err


async def test_a_lock_takes_the_times_that_runs_have_seen(world, tmp_path):
    mirror = LockedMirror(world, tmp_path)
    mirror.push("v1")
    mapping = {"from": "app", "tags": tags("v*"), "min_age": "3d"}
    mirror.write(mapping)
    ran = await mirror.run("sync")
    (held,) = ran.images
    assert held["reason"] == "min_age"
    await anyio.sleep(HOUR)
    await mirror.succeed("lock")
    (line,) = mirror.lines().values()
    ((_, times, _),) = rows(mirror.cache)["seen"]
    (seen,) = json.loads(times)
    assert line["first_seen"] == datetime.fromtimestamp(seen, timezone.utc).strftime("%FT%TZ")
    await mirror.skip_all(1)


# Artifacts of every form, between registries with and without the referrers API.


class LockedScene(Scene):
    """Each run writes a lock first, and is from it."""

    async def run(self, **top: Any) -> Ran:
        ran = await super().run("lock", "--recheck", **top)
        assert ran.status == 0, ran.err
        assert self.target.journal.summary() == {}
        ran = await super().run("sync", "--locked", **top)
        assert {entry.kind for entry in self.source.journal.entries} <= {"manifest", "blob"}
        assert all(":" in str(entry.reference) for entry in self.source.journal.entries)
        return ran


CELLS = itertools.product(("strict", "distribution"), ("strict", "distribution"), FAMILIES)


@pytest.mark.parametrize(("source", "target", "name"), thinned(CELLS))
async def test_what_hangs_on_an_image_comes_from_a_lock_as_it_comes_without(
    world, source, target, name, tmp_path
):
    stage = LockedScene(world, tmp_path, family(name), source, target)
    ran = await stage.succeed()
    stage.check_order()
    stage.check()
    told = only(ran.images)["artifacts"]
    assert (told["synced"], told["failed"]) == (len(stage.made.travelling), 0)
    await stage.settle()
    assert stage.source.journal.summary() == {}
    assert stage.target.journal.summary() == {"HEAD manifest": 1}


# Debian's docker-registry, which has no referrers API.


@pytest.mark.slow
def test_from_one_docker_registry_to_another(docker_registries, tmp_path):
    source, target = docker_registries(), docker_registries()
    seed = Seed(29)
    index = seed.index(platforms=("linux/amd64", "linux/arm64/v8"))
    image = seed.image()
    cosign = seed.image()
    push_http(index, source, "multi", "v1")
    push_http(image, source, "app", "v1", "latest")
    push_http(cosign, source, "app", f"{referrers_tag(image.top)}.sig")
    file = tmp_path / "mirror.yaml"
    config = {
        "registries": {"s": {"url": source}, "t": {"url": target}},
        "defaults": {"source": "s", "targets": ["t"]},
        "mappings": [
            {"from": "app", "tags": {"glob": "*"}},
            {"from": "multi", "tags": {"glob": "v*"}, "platforms": ["linux/amd64"]},
        ],
    }
    file.write_text(json.dumps(config))
    where = ("--json", "-c", str(file))

    first = run_regsync("lock", *where)
    assert (first.status, first.err) == (0, "")
    assert len(first.report["changes"]) == 3
    same = run_regsync("lock", *where)
    assert (same.status, same.report["changes"], same.report["written"]) == (0, [], False)
    assert same.report["requests"] == {source: {"tag_list": 2, "manifest_head": 3}}

    push_http(seed.image(), source, "app", "v1")
    push_http(seed.image(), source, "app", f"{referrers_tag(image.top)}.sig")
    copied = run_regsync("sync", "--locked", *where)
    assert copied.status == 0, copied.err
    assert copied.totals["images"]["synced"] == 3
    assert copied.totals["requests"][source].keys() == {"manifest_get", "blob_get"}
    assert identical(fetch_http(target, "app", "v1"), image.contents())
    signed = fetch_http(target, "app", f"{referrers_tag(image.top)}.sig")
    assert identical(signed, cosign.contents())

    unchanged = run_regsync("sync", "--locked", *where)
    assert unchanged.totals["requests"] == {target: {"manifest_head": 3}}
    assert unchanged.totals["images"]["skipped"] == 3

    moved = run_regsync("lock", *where)
    assert only(moved.report["changes"])["source"] == f"{source}/app:v1"
    # The new image, and one question that shows that there is no referrers API.
    assert moved.report["requests"] == {
        source: {"tag_list": 2, "manifest_head": 3, "manifest_get": 2}
    }
