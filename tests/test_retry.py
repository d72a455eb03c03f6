"""`sync --retry-from REPORT`: what failed or was left undone in that report, and nothing else
(docs/design.md section 2, "Retry").
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conformance.images import Image
from conformance.memory import Place
from tests.ends import Ran, Virtual, document, held, run_regsync, stopped_at, tags
from tests.mirrors import Mirror
from tests.thinning import thorough


class Retried(Mirror):
    """A source and another, two targets; the report of a run is kept in a file."""

    def __init__(self, world: Virtual, directory: Path) -> None:
        super().__init__(world, directory, "east", "west")
        self.other = world.registry("other.test")
        self.east, self.west = self.targets.values()
        self.report = directory / "report.json"

    def hold(self, repository: str, *names: str) -> Image:
        return self.seed.image().load_into(self.source.app, repository, *names)

    def write(self, *mappings: Any, **top: Any) -> None:
        plain = {"targets": ["east", "west"], "artifacts": {"enabled": False}}
        super().write(*mappings, registries={"other": self.other}, defaults=plain)

    async def first(self, *options: str) -> Ran:
        """Run what was written, keep the report, and count what is asked from now on."""
        ran = await self.world.run("sync", "--json", *options, "-c", str(self.file))
        self.report.write_text(ran.out)
        self.clear()
        return ran

    async def retry(self, *options: str) -> Ran:
        words = ("sync", "--json", "--retry-from", str(self.report))
        return await self.world.run(*words, *options, "-c", str(self.file))

    def forgive(self) -> None:
        """Let no registry fail any more."""
        for place in (self.source, self.other, *self.targets.values()):
            place.app.faults.clear()


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> Retried:
    return Retried(world, tmp_path)


def asked(place: Place) -> dict[str, int]:
    """Count what a place was asked for, each request by its repository."""
    entries = place.journal.entries
    return dict(Counter(f"{each.method} {each.kind} {each.repository}" for each in entries))


def names(ran: Ran) -> list[tuple[str, str]]:
    """Return the images of a run with their statuses, by target."""
    return sorted((each["target"], each["status"]) for each in ran.images)


EAST = {"targets": ["east"]}


async def test_a_password_that_is_one_of_our_words_spoils_no_report(mirror):
    mirror.hold("a", "v1")
    login = {"auth_type": "basic", "credentials": {"username": "u", "password": "sync"}}
    west = {"west": {"url": "http://west.test", **login}}
    mirror.file.write_text(mirror.text({"from": "a", "tags": tags("v1", "v2")}, registries=west))
    first = await mirror.first("--summary", str(mirror.directory / "summary.md"))
    assert (first.status, first.statuses()) == (1, ["synced", "failed"] * 2)
    assert (await mirror.retry()).statuses() == ["failed"] * 2


async def test_the_images_that_failed_are_asked_for_and_no_others(mirror):
    mirror.hold("a", "v1", "v2")
    mirror.hold("b", "v1")
    mirror.write(
        {"from": "a", "tags": tags("v*", sort="alpha", latest=5)},
        {"from": "b", "tags": tags("v1", "v2"), **EAST},
    )
    first = await mirror.first()
    assert (first.status, first.totals["images"]["failed"]) == (1, 1)

    image = mirror.hold("b", "v2")
    assert names(await mirror.retry("--dry-run")) == [("east.test/b:v2", "would_sync")]
    mirror.clear()
    ran = await mirror.retry()
    assert (ran.status, names(ran)) == (0, [("east.test/b:v2", "synced")])
    assert [each["selected"] for each in ran.report["mappings"]] == [2]
    blobs = len(image.blobs)
    assert asked(mirror.source) == {"GET manifest b": 1, "GET blob b": blobs}
    sent = {"POST upload_start b": blobs, "PUT upload b": blobs, "PUT manifest b": 1}
    assert asked(mirror.east) == {"HEAD manifest b": 1, **sent}
    assert asked(mirror.west) == {}
    assert held(mirror.east, "b", image)

    # A report without failures leaves nothing to do.
    mirror.report.write_text(ran.out)
    again = await mirror.retry()
    assert (again.status, again.images) == (0, [])
    assert "nothing to retry" not in again.err


async def test_each_target_is_asked_for_its_own_failures(mirror):
    image = mirror.hold("a", "v1", "v2", "v3")
    mirror.write({"from": "a", "tags": tags("v*")})
    mirror.east.app.faults.on("PUT", "manifest", reference="v1").status(403)
    mirror.west.app.faults.on("PUT", "manifest", reference="v3").status(403)
    assert (await mirror.first()).totals["images"]["failed"] == 2
    mirror.forgive()
    ran = await mirror.retry()
    assert names(ran) == [("east.test/a:v1", "synced"), ("west.test/a:v3", "synced")]
    one = {"HEAD manifest a": 1, "PUT manifest a": 1}
    assert asked(mirror.east) == asked(mirror.west) == one
    assert held(mirror.west, "a", image)


async def test_a_mapping_that_could_not_be_listed_is_asked_for_as_a_whole(mirror):
    mirror.hold("a", "v1", "v2", "w1")
    mirror.hold("b", "v1")
    mirror.write(*({"from": name, "tags": tags("v*"), **EAST} for name in "ab"))
    mirror.source.app.faults.on("GET", "tag_list", repository="a").status(403)
    assert ("east.test/a:*", "failed") in names(await mirror.first())
    mirror.forgive()
    ran = await mirror.retry()
    assert names(ran) == [("east.test/a:v1", "synced"), ("east.test/a:v2", "synced")]
    assert asked(mirror.source)["GET tag_list a"] == 1
    for place in (mirror.source, mirror.east):
        assert not [what for what in asked(place) if what.endswith(" b")]
    assert asked(mirror.west) == {}


async def test_what_an_interrupted_run_left_undone_is_asked_for(mirror):
    mirror.hold("a", "v1")
    mirror.hold("b", "v1")
    mirror.seed.image().load_into(mirror.other.app, "c", "v1")
    rule = {"tags": tags("v*"), **EAST}
    mirror.write(
        {"from": "a", **rule}, {"from": "b", **rule}, {"from": "c", "source": "other", **rule}
    )
    mirror.source.app.faults.on("GET", "manifest", repository="b").delay(50)
    mirror.other.app.faults.on("GET", "tag_list").delay(50)
    async with stopped_at(10):
        first = await mirror.first()
    assert (first.status, names(first)) == (143, [("east.test/a:v1", "synced")])
    undone = sorted(first.report["undone"], key=str)
    assert [(each["source"], each["target"]) for each in undone] == [
        ("other.test/c:*", "east.test/c:*"),
        ("source.test/b:v1", "east.test/b:v1"),
    ]
    mirror.forgive()
    ran = await mirror.retry()
    assert names(ran) == [("east.test/b:v1", "synced"), ("east.test/c:v1", "synced")]
    for place in (mirror.source, mirror.east):
        assert not [what for what in asked(place) if what.endswith(" a")]


async def test_what_is_no_longer_selected_is_not_asked_for(mirror):
    mirror.hold("a", "v1")
    mirror.write(
        {"from": "a", "tags": tags("v1", "v6", "v7", "v8", "v9")},
        {"from": "b", "tags": tags("v1"), **EAST},
    )
    assert (await mirror.first()).totals["images"]["failed"] == 9
    mirror.hold("a", "v6", "v7", "v8", "v9")
    rule = tags("v*", exclude=["v8"], sort="alpha", latest=2)
    mirror.write({"from": "a", "tags": rule, "targets": ["west"]})
    ran = await mirror.retry()
    assert (ran.status, "retry" in ran.err) == (0, False)
    assert names(ran) == [("west.test/a:v7", "synced"), ("west.test/a:v9", "synced")]
    assert asked(mirror.source)["GET manifest a"] == 2
    assert asked(mirror.east) == {}


async def test_a_report_of_another_configuration_is_a_warning(mirror):
    mirror.write({"from": "a", "tags": tags("v1")})
    await mirror.first()
    mirror.write({"from": "b", "tags": tags("v1")})
    ran = await mirror.retry()
    assert (ran.status, ran.images, ran.totals["requests"]) == (0, [], {})
    assert f"warning: {mirror.report}: nothing to retry: no image of these mappings" in ran.err


async def test_a_shard_asks_for_its_own_and_says_nothing_of_the_others(mirror):
    mirror.write(*({"from": name, "tags": tags("v1")} for name in "abcd"))
    await mirror.first()
    for name in "abcd":
        mirror.hold(name, "v1")
    found = set[tuple[str, str]]()
    for shard in ("0/2", "1/2"):
        ran = await mirror.retry("--shard", shard)
        assert (len(ran.images), "retry" in ran.err) == (4, False)
        found |= {*names(ran)}
    assert len(found) == 8


# Two mappings of which the first owns a tag of the second (I10).

OTHER = {"from": "b", "to": "c", "tags": tags("v1", "w1"), **EAST}


def owning(*globs: str) -> dict[str, Any]:
    return {"from": "a", "to": "c", "tags": tags(*globs), **EAST}


@pytest.mark.parametrize(("owner", "listings"), [("v1", {}), ("v*", {"GET tag_list a": 1})])
async def test_a_conflict_of_mappings_stays_one(mirror, owner, listings):
    """The second mapping alone is in the report. It must not take the tag from the first."""
    ours = mirror.hold("a", "v1")
    mirror.hold("b", "v1", "w1")
    mirror.write(owning(owner), OTHER)
    assert names(await mirror.first()) == [
        ("east.test/c:v1", "failed"),
        ("east.test/c:v1", "synced"),
        ("east.test/c:w1", "synced"),
    ]
    ran = await mirror.retry()
    assert (ran.status, names(ran)) == (2, [("east.test/c:v1", "failed")])
    assert "mappings[0] writes this tag too" in ran.images[0]["error"]["message"]
    assert mirror.east.app.tags("c")["v1"] == ours.top
    assert (asked(mirror.source), asked(mirror.east)) == (listings, {})


async def test_an_owner_that_cannot_be_listed_is_no_failure_of_the_retry(mirror):
    mirror.hold("a", "v9")
    image = mirror.hold("b", "w1")
    mirror.write(owning("v*"), OTHER)
    assert ("east.test/c:v1", "failed") in names(await mirror.first())
    mirror.hold("b", "v1")
    mirror.source.app.faults.on("GET", "tag_list").status(403)
    ran = await mirror.retry()
    assert (ran.status, names(ran)) == (0, [("east.test/c:v1", "synced")])
    assert held(mirror.east, "c", image)


async def test_an_interrupted_retry_leaves_undone_what_it_wanted_and_not_whole_mappings(mirror):
    mirror.hold("a", "v9")
    mirror.hold("b", "w1")
    mirror.write(owning("v*"), OTHER)
    await mirror.first()
    mirror.source.app.faults.on("GET", "tag_list").delay(50)
    async with stopped_at(10):
        ran = await mirror.retry()
    ends = {"source": "source.test/b:v1", "target": "east.test/c:v1"}
    [undone] = ran.report["undone"]
    assert (ran.status, undone.items() >= {**ends, "status": "undone"}.items()) == (143, True)


# With a lock, a layout, an age.


async def test_with_a_lock_no_source_is_asked_what_a_tag_names(mirror):
    image = mirror.hold("a", "v1", "v2")
    mirror.write({"from": "a", "tags": tags("v*"), **EAST})
    assert (await mirror.run("lock")).status == 0
    mirror.east.app.faults.on("PUT", "manifest", reference="v2").status(403)
    assert (await mirror.first("--locked")).totals["images"]["failed"] == 1
    mirror.forgive()
    mirror.hold("a", "v2")
    ran = await mirror.retry("--locked")
    assert names(ran) == [("east.test/a:v2", "synced")]
    assert ran.images[0]["digest"] == image.top
    assert "HEAD manifest a" not in asked(mirror.source)
    assert {entry.reference for entry in mirror.source.journal.entries} <= set(image.contents())
    assert asked(mirror.east) == {"HEAD manifest a": 1, "PUT manifest a": 1}


async def test_an_image_layout_is_a_target_like_others(mirror, tmp_path):
    mirror.hold("a", "v1")
    layout = f"oci-layout:{tmp_path / 'layout'}"
    mapping = {"from": "a", "tags": tags("v1", "v2")}
    mirror.file.write_text(document({"source": mirror.source, "disk": layout}, mapping))
    assert (await mirror.first()).statuses() == ["synced", "failed"]
    mirror.hold("a", "v2")
    assert names(await mirror.retry()) == [(f"{layout}//a:v2", "synced")]


async def test_a_digest_that_is_too_young_waits_in_a_retry_too(mirror):
    mirror.write({"from": "a", "tags": tags("v1"), **EAST, "min_age": "1d"})
    assert (await mirror.first()).status == 2
    mirror.hold("a", "v1")
    assert (await mirror.retry()).images[0]["reason"] == "min_age"
    # What was held back did not fail.
    await mirror.first()
    assert (await mirror.retry()).images == []


# What is taken for a report: anything else is an error before any request. What else is none is in
# test_reports.py, which shows reports.

# Nobody answers there.
ENDS = {"source": "http://127.0.0.1:9", "target": "http://127.0.0.1:19"}


@pytest.mark.parametrize(
    ("size", "words"), [(0, "JSON"), thorough(pytest.param((256 << 20) + 1, "268435456 bytes"))]
)
def test_what_is_no_report_is_an_error_before_any_request(tmp_path, size, words):
    config, file = tmp_path / "mirror.yaml", tmp_path / "report.json"
    config.write_text(document(ENDS, {"from": "app", "tags": tags("v1")}))
    file.touch()
    os.truncate(file, size)
    ran = run_regsync("sync", "-q", "-c", str(config), "--retry-from", str(file))
    assert (ran.status, ran.out) == (3, "")
    line, *_ = ran.err.splitlines()
    assert line.startswith(f"error: CONFIG_ERROR: {file}")
    assert words in line


def test_configuration_and_report_cannot_both_come_from_standard_input():
    text = document(ENDS, {"from": "app"})
    ran = run_regsync("sync", "-c", "-", "--retry-from", "-", stdin=text)
    assert ran.status == 3
    assert "configuration and report cannot both come from standard input" in ran.err


HOSTILE = [
    "source/app:v1",
    "",
    ":",
    "127.0.0.1:9/app",
    "127.0.0.1:9/app:" + "v" * 5000,
    "127.0.0.1:9/app:[ab]{c,d}",
    "127.0.0.1:9/app:../../etc\x1b[31m\n",
    "127.0.0.1:9/app@sha256:" + "0" * 64,
    "127.0.0.1:9/app:\ud800",
]


def test_names_that_no_mapping_has_are_never_asked_for(tmp_path):
    undone = [
        {"status": "undone", "source": name, "target": name.replace("9", "19")} for name in HOSTILE
    ]
    layers = {"transferred": 0, "unique": 0, "mounted": 0, "skipped": 0}
    totals = {"images": {}, "bytes": 0, "requests": {}, "throttled": {}, "layers": layers}
    report = {
        **{"schema": 1, "run_id": "r", "started_at": "t", "duration_s": 0, "totals": totals},
        **{"interrupted": True, "dry_run": False, "images": [], "undone": undone, "mappings": []},
    }
    config, file = tmp_path / "mirror.yaml", tmp_path / "report.json"
    config.write_text(document(ENDS, {"from": "app", "tags": tags("v1")}))
    file.write_text(json.dumps(report))
    ran = run_regsync("sync", "--json", "-c", str(config), "--retry-from", str(file))
    assert (ran.status, ran.images, ran.totals["requests"]) == (0, [], {})
    assert "\x1b" not in ran.err
    assert ran.err.count("\n") == 1
