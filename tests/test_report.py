"""Exit statuses, totals, the JSON report and its schema, and the words for sizes and durations."""

from __future__ import annotations

import pytest

from conformance.content.images import Seed, encode
from conformance.server.sockets import Server
from tests.ends import document as written
from tests.ends import run_regsync, tags
from tests.published import check, mixed_run

# The published schema, against what is really written.


def test_a_run_of_every_outcome_is_as_published_and_retries_are_real(
    source: Server, target: Server
) -> None:
    ran = mixed_run(source, target)
    check("report", ran.report)
    found = {each["target"].partition("/")[2]: each for each in ran.images}
    statuses = {name: each["status"] for name, each in found.items()}
    assert statuses == {
        "app:v1": "skipped",
        "ill:v1": "failed",
        "multi:v1": "synced",
        "none:*": "failed",
        "part:v1": "synced",
    }
    assert (found["app:v1"]["reason"], found["multi:v1"]["reason"]) == ("unchanged", None)
    mappings = {each["to"]: each for each in ran.report["mappings"]}
    assert list(mappings) == ["app", "multi", "ill", "none", "part"]
    assert mappings["none"]["error"] == found["none:*"]["error"]
    assert (mappings["none"]["selected"], mappings["none"]["dropped"]) == (0, {})
    assert [name for name, each in mappings.items() if "error" in each] == ["none"]
    assert found["ill:v1"]["error"] == {
        "code": "TARGET_ERROR",
        "message": found["ill:v1"]["error"]["message"],
        "hint": found["ill:v1"]["error"]["hint"],
        "status": 500,
        "side": "target",
        "retries": 4,
    }
    assert target.journal.count("POST", "upload_start", status=500) >= 5
    assert (
        found["part:v1"]["source_digest"]
        == found["multi:v1"]["digest"]
        != found["part:v1"]["digest"]
    )
    assert "source_digest" not in found["multi:v1"]
    assert all(sum(each["artifacts"].values()) == 0 for each in ran.images)
    for image in ran.images:
        assert 0 <= image["started_s"] <= image["started_s"] + image["duration_s"]
        assert image["started_s"] + image["duration_s"] <= ran.report["duration_s"] + 0.01


def test_bytes_that_need_not_be_sent_count_once_for_each_target_repository(
    source: Server, target: Server
) -> None:
    image = Seed(1).image()
    for name in ("first", "second"):
        image.load_into(source.app, name, tag="v1")
    config = written(
        {"source": source, "target": target},
        {"from": "first", "tags": tags("v1")},
        {"from": "second", "tags": tags("v1")},
    )
    cold = run_regsync("sync", "--json", "-q", "-c", "-", stdin=config).totals
    assert (cold["bytes"], cold["saved"]) == (image.size, {"present": 0, "mounted": image.size})

    # Two tags of the first repository name blobs that are there.
    again = image.with_manifest(
        encode({**image.document, "annotations": {"made": "again"}}), image.media_type
    )
    again.load_into(source.app, "first", "v2", "v3")
    config = written({"source": source, "target": target}, {"from": "first", "tags": tags("v*")})
    warm = run_regsync("sync", "--json", "-q", "-c", "-", stdin=config).totals
    assert (warm["bytes"], warm["saved"]) == (0, {"present": image.size, "mounted": 0})


def test_the_number_of_requests_in_the_report_is_that_of_the_journal(
    source: Server, target: Server
) -> None:
    Seed(1).image().load_into(source.app, "app", tag="v1")
    ran = run_regsync("copy", "--json", f"{source.address}/app:v1", f"{target.address}/app")
    for server in (source, target):
        told = sum(ran.totals["requests"][server.address].values())
        assert told == len(server.journal.entries)
    check("report", ran.report)


@pytest.mark.parametrize(
    ("words", "stdin"),
    [
        (("copy", "--json", "x"), ""),
        (("copy", "--json", "a/B", "c"), ""),
        (("sync", "--json", "-c", "-"), "mappings: [{from: A}]\nregistrys: {}\n"),
        (("sync", "--json", "-c", "/nowhere"), ""),
        (("tags", "--json", "a:v1"), ""),
    ],
)
def test_what_is_not_attempted_is_said_as_published(words: tuple[str, ...], stdin: str) -> None:
    ran = run_regsync(*words, stdin=stdin)
    assert ran.status == 3
    check("error", ran.report)
    assert ran.report["error"]["code"] == "CONFIG_ERROR"
    assert bool(ran.report["problems"]) is bool(stdin)


def test_what_a_run_would_do_and_cost_is_as_published(source: Server, target: Server) -> None:
    Seed(1).image().load_into(source.app, "app", tag="v1")
    run_regsync(
        "copy", f"{source.address}/app:v1", f"{target.address}/app:v1", "--no-artifacts", "-q"
    )
    Seed(4).image().load_into(source.app, "app", "v2", "v3")
    config = written({"source": source, "target": target}, {"from": "app", "tags": tags("v*")})
    planned = run_regsync("sync", "--dry-run", "--json", "-q", "-c", "-", stdin=config).report
    check("report", planned)
    assert planned["dry_run"] is True
    assert sorted(each["status"] for each in planned["images"]) == [
        "skipped",
        "would_sync",
        "would_sync",
    ]


def test_tags_and_version_are_as_published(source: Server) -> None:
    Seed(1).image().load_into(source.app, "app", "v1", "v2", "latest")
    ran = run_regsync("tags", "--json", f"{source.address}/app", "--glob", "v*", "--semver", "^2")
    check("tags", ran.report)
    assert ran.report["dropped"] == {"latest": "glob", "v1": "semver"}
    check("version", run_regsync("version", "--json").report)
