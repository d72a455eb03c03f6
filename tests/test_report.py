"""Exit statuses, totals, the JSON report and its schema, and the words for sizes and durations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from _regsync.errors import AuthError, ContentError, RegistryError, RegsyncError, Side, TimedOut
from _regsync.sync.report import MappingSelection, Outcome, Report, general_message
from _regsync.text import duration_text, size_text
from conformance.content.images import Seed, encode
from conformance.server.sockets import Server
from tests.ends import document as written
from tests.ends import run_regsync, tags
from tests.program import report_schema
from tests.published import check, mixed_run


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1049, "1.0 KB"),
        (1051, "1.1 KB"),
        (999_949, "999.9 KB"),
        (999_950, "1.0 MB"),
        (999_999, "1.0 MB"),
        (31_500_000, "31.5 MB"),
        (999_949_999, "999.9 MB"),
        (999_950_000, "1.0 GB"),
        (999_949_999_999, "999.9 GB"),
        (999_950_000_000, "1.0 TB"),
        (12_345_600_000_000_000, "12345.6 TB"),
    ],
)
def test_a_size_has_one_decimal_and_never_a_thousand_of_a_unit(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0s"),
        (0.04, "0.0s"),
        (0.3, "0.3s"),
        (9.94, "9.9s"),
        (9.95, "10s"),
        (10.4, "10s"),
        (47.0, "47s"),
        (59.4, "59s"),
        (59.5, "1m00s"),
        (60.0, "1m00s"),
        (133.0, "2m13s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (5400.0, "1h30m"),
        (7199.0, "1h59m"),
        (360_000.0, "100h00m"),
    ],
)
def test_a_duration_never_shows_sixty_of_a_unit(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


AUTH = AuthError("refused")
FORBIDDEN = RegistryError("denied", status=403).add_context(Side.TARGET, "push blob", "t.example/r")
SOURCE = RegistryError("no such tag", status=404).add_context(
    Side.SOURCE, "look up", "s.example/r:1"
)
CONTENT = ContentError("wrong digest")
INTERNAL = RegsyncError("this should not happen")


def outcome(status: str, error: RegsyncError | None = None, **details: Any) -> Outcome:
    source, target = "s.example/app:1", "t.example/app:1"
    return Outcome(source=source, target=target, status=status, error=error, **details)


def report(*found: str | RegsyncError) -> Report:
    made = Report()
    for each in found:
        made.outcomes.append(outcome(each) if isinstance(each, str) else outcome("failed", each))
    return made


@pytest.mark.parametrize(
    ("found", "status"),
    [
        pytest.param((), 0, id="nothing to do"),
        pytest.param(("skipped", "skipped"), 0, id="all skipped"),
        pytest.param(("synced", "skipped"), 0, id="synced"),
        pytest.param(("synced", SOURCE), 1, id="some failed"),
        pytest.param(("skipped", SOURCE), 1, id="the rest was skipped"),
        pytest.param(("synced", AUTH), 1, id="some refused"),
        pytest.param((SOURCE,), 2, id="the only one failed"),
        pytest.param((SOURCE, CONTENT), 2, id="all failed"),
        pytest.param((SOURCE, AUTH), 2, id="all failed, not all of them refused"),
        pytest.param((AUTH,), 4, id="the only one refused"),
        pytest.param((AUTH, FORBIDDEN), 4, id="all refused"),
        pytest.param(("synced", INTERNAL), 2, id="an unclassified error among successes"),
        pytest.param((AUTH, INTERNAL), 2, id="an unclassified error among refusals"),
    ],
)
def test_exit_status(found: tuple[str | RegsyncError, ...], status: int) -> None:
    assert report(*found).exit_status() == status


def test_the_lines_of_an_image_are_the_specifications() -> None:
    done = outcome("synced", bytes=31_500_000, duration=133.0)
    assert done.line() == "synced s.example/app:1 -> t.example/app:1 (31.5 MB, 2m13s)"
    assert outcome("failed", SOURCE).line() == (
        "failed s.example/app:1 -> t.example/app:1: SOURCE_ERROR: look up s.example/r:1: no such tag"
    )


def filled() -> Report:
    made = report("skipped", "skipped", SOURCE)
    made.interrupted = False
    made.outcomes.append(
        outcome(
            "synced",
            transferred=("a", "b"),
            mounted=3,
            skipped=1,
            bytes=1500,
            started=0.5,
            duration=1.23456,
        )
    )
    made.outcomes.append(outcome("synced", transferred=("b",), mounted=1, bytes=500))
    made.outcomes.append(outcome("failed", AUTH, transferred=("c",), bytes=50))
    return made


def test_the_summary_is_the_specifications() -> None:
    assert filled().summary(0.31) == [
        "Images: 2 synced, 2 skipped, 2 failed",
        "Layers: 4 transferred (3 unique references), 4 mounted",
        "Data: 2.0 KB transferred",
        "Time: 0.3s elapsed",
    ]


def document(made: Report) -> dict[str, Any]:
    found = made.as_json(
        run_id="r1",
        started_at="2026-01-02T03:04:05Z",
        elapsed=12.34567,
        requests={"t": {"manifest_put": 2, "blob_head": 1}, "s": {"blob_get": 4}},
        throttled={"t": 3},
    )
    found["images"] = list(found["images"])
    assert json.loads(json.dumps(found)) == found
    return found


def test_the_json_report_has_the_published_shape() -> None:
    made = filled()
    made.selections[0] = MappingSelection("s/app", "app", 1, {"glob": 2})
    made.saved = {"present": 40, "mounted": 7}
    found = document(made)
    assert {key: value for key, value in found.items() if key != "images"} == {
        "schema": 1,
        "run_id": "r1",
        "started_at": "2026-01-02T03:04:05Z",
        "duration_s": 12.346,
        "interrupted": False,
        "dry_run": False,
        "mappings": [{"from": "s/app", "to": "app", "selected": 1, "dropped": {"glob": 2}}],
        "totals": {
            "images": {"synced": 2, "skipped": 2, "failed": 2},
            "layers": {"transferred": 4, "unique": 3, "mounted": 4, "skipped": 1},
            "bytes": 2050,
            "saved": {"present": 40, "mounted": 7},
            "requests": {"s": {"blob_get": 4}, "t": {"blob_head": 1, "manifest_put": 2}},
            "throttled": {"t": 3},
        },
    }
    assert list(found["totals"]["requests"]) == ["s", "t"]
    assert list(found["totals"]["requests"]["t"]) == ["blob_head", "manifest_put"]
    assert len(found["images"]) == 6
    assert found["images"][3] == {
        "source": "s.example/app:1",
        "target": "t.example/app:1",
        "digest": None,
        "status": "synced",
        "reason": None,
        "error": None,
        "bytes": 1500,
        "started_s": 0.5,
        "duration_s": 1.235,
        "blobs": {"transferred": 2, "mounted": 3, "skipped": 1},
        "artifacts": {"synced": 0, "skipped": 0, "failed": 0, "stripped": 0},
    }


def test_an_empty_report_has_the_same_shape() -> None:
    empty, full = document(Report()), document(filled())
    assert empty.keys() == full.keys()
    assert empty["totals"].keys() == full["totals"].keys()
    assert empty["totals"]["images"] == {"synced": 0, "skipped": 0, "failed": 0}


def test_the_source_digest_shows_only_where_it_differs() -> None:
    same = outcome("synced", digest="sha256:a", source_digest="sha256:a").as_json()
    trimmed = outcome("synced", digest="sha256:a", source_digest="sha256:b").as_json()
    assert "source_digest" not in same
    assert (trimmed["digest"], trimmed["source_digest"]) == ("sha256:a", "sha256:b")


def test_an_error_says_what_is_known_of_it() -> None:
    late = TimedOut("no answer")
    late.retries = 4
    assert outcome("failed", late.add_context(Side.SOURCE, "fetch blob", "s/r")).as_json()[
        "error"
    ] == {
        "code": "NETWORK_ERROR",
        "message": "fetch blob s/r: no answer (tried 5 times)",
        "hint": None,
        "status": None,
        "side": "source",
        "retries": 4,
    }
    assert outcome("failed", FORBIDDEN).as_json()["error"] == {
        "code": "AUTH_ERROR",
        "message": "push blob t.example/r: denied",
        "hint": FORBIDDEN.hint,
        "status": 403,
        "side": "target",
        "retries": 0,
    }
    assert outcome("failed", INTERNAL).as_json()["error"] == {
        "code": "INTERNAL_ERROR",
        "message": "this should not happen",
        "hint": None,
        "status": None,
        "side": None,
        "retries": 0,
    }


def test_mappings_are_told_in_the_order_of_the_configuration() -> None:
    """Listings end in any order (I10)."""
    made = Report()
    made.selections[1] = MappingSelection("second", "app", 1, {})
    made.selections[0] = MappingSelection("first", "app", 1, {})
    told = made.as_json(run_id="r", started_at="t", elapsed=0.0, requests={}, throttled={})
    assert [each["from"] for each in told["mappings"]] == ["first", "second"]


# Causes that images share.


def refused(repository: str, message: str, host: str = "t.example") -> RegistryError:
    error = RegistryError(message, status=403)
    error.add_context(Side.TARGET, "push blob", f"{host}/{repository}:v1")
    return error


def test_what_fails_alike_is_counted_once_and_what_fails_alone_is_not() -> None:
    made = report("synced", "skipped", AUTH, CONTENT, CONTENT, CONTENT, SOURCE, INTERNAL, INTERNAL)
    assert made.causes() == [
        (3, "CONTENT_ERROR: wrong digest"),
        (2, "INTERNAL_ERROR: this should not happen"),
    ]


def test_causes_are_told_apart_by_code_host_and_words_and_not_by_the_repositorys_name() -> None:
    words = "status 404: the repository with name '{}' does not exist"
    made = report(*(refused(name, words.format(name)) for name in ("team/a", "team/b", "c")))
    others: list[RegsyncError] = [
        refused("a", "a denial at a"),
        refused("b", "a denial at b"),
        refused("d/a", "x/d/a d/ab"),
    ]
    others += [refused("c", "denied"), refused("c", "denied", "u.example"), AuthError("denied")]
    for other in [*others, refused("e", "x/d/a d/ab")]:
        made.outcomes.append(outcome("failed", other))
    assert made.causes() == [
        (3, "AUTH_ERROR t.example: status 404: the repository with name '...' does not exist"),
        (2, "AUTH_ERROR t.example: x/d/a d/ab"),
    ]


@pytest.mark.parametrize(
    ("message", "general"),
    [
        ("push blob t.example/team/app:v1: denied", "push blob t.example/...: denied"),
        ("read team/app@sha256:0123456789abcdef", "read ..."),
        ("get t.example:5000/team/app: denied", "get t.example:5000/team/app: denied"),
        ("x/team/app team/app-2 my-team/app", "x/team/app team/app-2 my-team/app"),
        ("blob sha256:0123456789abcdef is gone", "blob sha256:... is gone"),
        ("write oci-layout:/a//b//team/app:v1", "write oci-layout:/a//b//..."),
    ],
)
def test_a_cause_is_told_without_the_image_that_it_befell(message: str, general: str) -> None:
    references = ("t.example/team/app:v1", "oci-layout:/a//b//team/app:v1")
    assert general_message(message, *references) == general


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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: told.pop("run_id"),
        lambda told: told.update(schema=2),
        lambda told: told["images"][0].update(status="done"),
        lambda told: told["images"][0].update(digest=5),
        lambda told: told["images"][0]["error"].update(code="ERROR"),
        lambda told: told["images"][0]["error"].update(side="middle"),
        lambda told: told["images"][0]["blobs"].pop("mounted"),
        lambda told: told["totals"]["requests"].update(host={"head": "many"}),
        lambda told: told["mappings"][0]["dropped"].update(glob=1.5),
    ],
)
def test_the_schema_refuses_what_is_not_so(spoil: Callable[[dict[str, Any]], None]) -> None:
    made = report(FORBIDDEN)
    made.selections[0] = MappingSelection("s/app", "app", 1, {"glob": 2})
    told = document(made)
    check("report", told)
    spoil(told)
    assert not Draft202012Validator(report_schema()).is_valid(told)
