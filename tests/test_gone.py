"""Old commands and options: each is an error of status 3, whose one line names what to do instead."""

from __future__ import annotations

import pytest

from tests.ends import run_regsync


@pytest.mark.new
def test_a_value_may_follow_an_equals_sign() -> None:
    ran = run_regsync("audit", "--read=20", "-c", "-", stdin="mappings: []")
    assert (ran.status, "is gone" in ran.err) == (3, True)


@pytest.mark.parametrize("line", ["audit --read -c -", "audit -c - --read --no-progress"])
def test_what_is_still_there_is_not_gone(line: str) -> None:
    ran = run_regsync(*line.split(), stdin="{registries: {}, mappings: []}")
    assert "is gone" not in ran.err
