"""Exit statuses, totals, the JSON report, and the words for sizes and durations."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from _regsync.app.environment import report_document
from _regsync.errors import AuthError, ContentError, RegistryError, RegsyncError, Side
from _regsync.sync.report import MappingSelection, Outcome, Report
from _regsync.text import duration_text, size_text
from tests.program import report_schema
from tests.published import check

AUTH = AuthError("refused")
DENIED = RegistryError("denied", status=403)
FORBIDDEN = DENIED.add_context(Side.TARGET, "push blob", "t.example/r:v1")
MISSING = RegistryError("no such tag", status=404)
SOURCE = MISSING.add_context(Side.SOURCE, "look up", "s.example/r:1")
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
        pytest.param((AUTH, FORBIDDEN), 4, id="all refused"),
        pytest.param(("synced", INTERNAL), 2, id="an unclassified error among successes"),
        pytest.param((AUTH, INTERNAL), 2, id="an unclassified error among refusals"),
    ],
)
def test_exit_status(found, status):
    assert report(*found).exit_status() == status


def test_the_lines_of_an_image_are_the_specifications():
    done = outcome("synced", bytes=31_500_000, duration=133.0)
    assert done.line() == "synced s.example/app:1 -> t.example/app:1 (31.5 MB, 2m13s)"
    assert outcome("failed", SOURCE).line() == (
        "failed s.example/app:1 -> t.example/app:1: SOURCE_ERROR: look up s.example/r:1: no such tag"
    )


def filled() -> Report:
    made = report("skipped", "skipped", SOURCE)
    made.interrupted = False
    first = outcome("synced", transferred=("a", "b"), mounted=3, skipped=1, bytes=1500)
    made.outcomes.append(first._replace(duration=1.23456))
    made.outcomes.append(outcome("synced", transferred=("b",), mounted=1, bytes=500))
    made.outcomes.append(outcome("failed", AUTH, transferred=("c",), bytes=50))
    return made


def test_the_summary_is_the_specifications():
    assert filled().summary(0.31) == [
        "Images: 2 synced, 2 skipped, 2 failed",
        "Layers: 4 transferred (3 unique references), 4 mounted",
        "Data: 2.0 KB transferred",
        "Time: 0.3s elapsed",
    ]


def written(made: Report) -> dict[str, Any]:
    transport: Any = SimpleNamespace(
        requests={"t": {"manifest_put": 2, "blob_head": 1}, "s": {"blob_get": 4}},
        throttled={"t": 3},
    )
    found: dict[str, Any] = report_document(made, "2026-01-02T03:04:05Z", 12.34567, transport)
    assert json.loads(json.dumps(found)) == found
    return found


def test_the_json_report_has_the_published_shape():
    made = filled()
    # In the order of the configuration: listings end in any order (I10).
    made.selections[1] = MappingSelection("s/lib", "lib", 2, {})
    made.selections[0] = MappingSelection("s/app", "app", 1, {"glob": 2})
    made.saved = {"present": 40, "mounted": 7}
    found = written(made)
    images = found.pop("images")
    assert len(found.pop("run_id")) == 16
    assert found == {
        "schema": 1,
        "started_at": "2026-01-02T03:04:05Z",
        "duration_s": 12.346,
        "interrupted": False,
        "dry_run": False,
        "mappings": [
            {"from": "s/app", "to": "app", "selected": 1, "dropped": {"glob": 2}},
            {"from": "s/lib", "to": "lib", "selected": 2, "dropped": {}},
        ],
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
    assert len(images) == 6
    assert images[3] == {
        "source": "s.example/app:1",
        "target": "t.example/app:1",
        "digest": None,
        "status": "synced",
        "reason": None,
        "error": None,
        "bytes": 1500,
        "duration_s": 1.235,
        "blobs": {"transferred": 2, "mounted": 3, "skipped": 1},
        "artifacts": {"synced": 0, "skipped": 0, "failed": 0, "stripped": 0},
    }
    empty = written(Report())
    assert empty.keys() == {*found, "images", "run_id"}
    assert empty["totals"].keys() == found["totals"].keys()
    assert empty["totals"]["images"] == {"synced": 0, "skipped": 0, "failed": 0}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: told.update(schema=2),
        lambda told: told["images"][0].update(status="done"),
        lambda told: told["images"][0]["blobs"].pop("mounted"),
        lambda told: told["totals"]["requests"].update(host={"head": "many"}),
        lambda told: told["mappings"][0]["dropped"].update(glob=1.5),
    ],
)
def test_the_schema_refuses_what_is_not_so(spoil):
    made = report(FORBIDDEN)
    made.selections[0] = MappingSelection("s/app", "app", 1, {"glob": 2})
    told = written(made)
    check("report", told)
    spoil(told)
    assert not Draft202012Validator(report_schema()).is_valid(told)


# Sizes and durations.


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1051, "1.1 KB"),
        (999_949, "999.9 KB"),
        (999_950, "1.0 MB"),
        (31_500_000, "31.5 MB"),
        (999_950_000_000, "1.0 TB"),
        (12_345_600_000_000_000, "12345.6 TB"),
    ],
)
def test_a_size_has_one_decimal_and_never_a_thousand_of_a_unit(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.95, "10s"),
        (59.4, "59s"),
        (59.5, "1m00s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (7199.0, "1h59m"),
        (360_000.0, "100h00m"),
    ],
)
def test_a_duration_never_shows_sixty_of_a_unit(seconds, text):
    assert duration_text(seconds) == text
