"""Exit statuses, totals, the JSON report, and the words for sizes and durations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from _regsync.errors import AuthError, ContentError, RegistryError, RegsyncError, Side, TimedOut
from _regsync.report import Outcome, Report, duration_text, size_text


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
FORBIDDEN = RegistryError("denied", status=403).located(Side.TARGET, "push blob", "t.example/r")
SOURCE = RegistryError("no such tag", status=404).located(Side.SOURCE, "look up", "s.example/r:1")
CONTENT = ContentError("wrong digest")
INTERNAL = RegsyncError("this should not happen")


def outcome(status: str, error: RegsyncError | None = None, **details: Any) -> Outcome:
    source, target = "s.example/app:1", "t.example/app:1"
    return Outcome(source=source, target=target, status=status, error=error, **details)


def report(*found: str | RegsyncError) -> Report:
    made = Report()
    for each in found:
        made.add(outcome(each) if isinstance(each, str) else outcome("failed", each))
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
    made.add(outcome("synced", transferred=("a", "b"), mounted=3, skipped=1, bytes=1500, duration=1.23456))
    made.add(outcome("synced", transferred=("b",), mounted=1, bytes=500))
    made.add(outcome("failed", AUTH, transferred=("c",), bytes=50))
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
    assert json.loads(json.dumps(found)) == found
    return found


def test_the_json_report_has_the_published_shape() -> None:
    made = filled()
    made.mappings[0] = {"from": "s/app", "to": "app", "selected": 1, "dropped": {"glob": 2}}
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
        "duration_s": 1.235,
        "blobs": {"transferred": 2, "mounted": 3, "skipped": 1},
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
    assert outcome("failed", late.located(Side.SOURCE, "fetch blob", "s/r")).as_json()["error"] == {
        "code": "NETWORK_ERROR",
        "message": "fetch blob s/r: no answer (tried 5 times)",
        "status": None,
        "side": "source",
        "retries": 4,
    }
    assert outcome("failed", FORBIDDEN).as_json()["error"] == {
        "code": "AUTH_ERROR",
        "message": "push blob t.example/r: denied",
        "status": 403,
        "side": "target",
        "retries": 0,
    }
    assert outcome("failed", INTERNAL).as_json()["error"] == {
        "code": "INTERNAL_ERROR",
        "message": "this should not happen",
        "status": None,
        "side": None,
        "retries": 0,
    }


def test_mappings_are_told_in_the_order_of_the_configuration() -> None:
    """Listings end in any order (I10)."""
    made = Report()
    made.mappings[1], made.mappings[0] = {"from": "second"}, {"from": "first"}
    told = made.as_json(run_id="r", started_at="t", elapsed=0.0, requests={}, throttled={})
    assert [each["from"] for each in told["mappings"]] == ["first", "second"]
