"""What `sync --retry-from` takes for a report: anything else is an error before any request
(docs/design.md section 2, "Retry").
"""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_a_report_that_is_too_large_or_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("_regsync.app.pages.LARGEST_REPORT", 1000)
    assert "1000 bytes" in refused(tmp_path, b" " * 1001)
    config = tmp_path / "mirror.yaml"
    ran = run_regsync("sync", "-c", str(config), "--retry-from", str(tmp_path / "none.json"))
    assert (ran.status, "No such file" in ran.err) == (3, True)
    assert str(tmp_path / "none.json") in ran.err
    ran = run_regsync("sync", "-c", "-", "--retry-from", "-", stdin=config.read_text())
    assert "configuration and report cannot both come from standard input" in ran.err
