"""Exit statuses, totals, the JSON report and its schema, and the words for sizes and durations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from _regsync.errors import AuthError, ContentError, RegistryError, RegsyncError, Side, TimedOut
from _regsync.sync.report import MappingSelection, Outcome, Report, general_message, shared_causes
from tests.program import report_schema
from tests.published import check

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
    assert shared_causes(made.failures) == [
        ("CONTENT_ERROR: wrong digest", 3),
        ("INTERNAL_ERROR: this should not happen", 2),
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
    assert shared_causes(made.failures) == [
        ("AUTH_ERROR t.example: status 404: the repository with name '...' does not exist", 3),
        ("AUTH_ERROR t.example: x/d/a d/ab", 2),
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
