"""What `sync --retry-from` takes for a report: anything else is an error before any request
(docs/design.md section 2, "Retry").
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.ends import document, run_regsync, tags

ENDS = {"source": "http://127.0.0.1:9", "target": "http://127.0.0.1:19"}


def refused(directory: Path, report: bytes) -> str:
    """Return the error for what is no report; nothing is attempted."""
    config, file = directory / "mirror.yaml", directory / "report.json"
    config.write_text(document(ENDS, {"from": "app", "tags": tags("v1")}))
    file.write_bytes(report)
    ran = run_regsync("sync", "-q", "-c", str(config), "--retry-from", str(file))
    assert (ran.status, ran.out) == (3, "")
    line, *_ = ran.err.splitlines()
    assert line.startswith(f"error: CONFIG_ERROR: {file}")
    return line


def test_what_is_no_report_is_an_error(tmp_path: Path) -> None:
    """All that is none is in test_report_forms.py, which shows reports."""
    refused(tmp_path, b"synced a -> b")


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


def test_names_that_no_mapping_has_are_told_safely_and_never_asked_for(tmp_path: Path) -> None:
    image = {"status": "undone"}
    undone = [{**image, "source": name, "target": name.replace("9", "19")} for name in HOSTILE]
    totals = {"images": {}, "bytes": 0, "requests": {}, "throttled": {}}
    layers = {"transferred": 0, "unique": 0, "mounted": 0, "skipped": 0}
    report = {
        **{"schema": 1, "run_id": "r", "started_at": "t", "duration_s": 0},
        **{"interrupted": True, "dry_run": False, "images": [], "undone": undone, "mappings": []},
        "totals": {**totals, "layers": layers},
    }
    config, file = tmp_path / "mirror.yaml", tmp_path / "report.json"
    config.write_text(document(ENDS, {"from": "app", "tags": tags("*")}))
    file.write_text(json.dumps(report))
    ran = run_regsync("sync", "--json", "-c", str(config), "--retry-from", str(file))
    assert (ran.status, ran.images, ran.totals["requests"]) == (1, [], {})
    assert "\x1b" not in ran.err
    assert ran.err.count("\n") == 2
