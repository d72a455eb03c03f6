"""Configurations that are wrong, hostile or unreadable: exit status 3, every problem placed,
nothing attempted.
"""

from __future__ import annotations

import pytest

from _regsync.app import commands
from tests.ends import Ran, run_regsync

PROBLEM = "error: CONFIG_ERROR: "


def refused(ran: Ran) -> list[str]:
    """Return the lines of a refusal, without what every one begins with."""
    assert ran.status == 3
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert lines
    assert all(line.startswith((PROBLEM, "hint: ")) and line.isprintable() for line in lines)
    return [line.removeprefix(PROBLEM) for line in lines if line.startswith(PROBLEM)]


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.in_process
def test_an_endless_file_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "LARGEST_CONFIG", 1000)
    (line,) = refused(run_regsync("validate", "-", stdin=b"#" * 1001))
    assert "is larger than 1000 bytes" in line
