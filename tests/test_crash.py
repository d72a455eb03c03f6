"""Syncs between real registries that are killed at any byte and run again (tools/crash.py does more
of them).
"""

from __future__ import annotations

import pytest

from tools.crash import MOST, rounds


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.thorough)])
def test_whatever_the_instant_tags_are_old_or_whole_and_the_next_run_completes_them(
    count: int,
) -> None:
    done = list(rounds(count, seed=2, in_memory=count < 10))
    killed = [each for each in done if each.was_killed]
    assert len(killed) >= 0.8 * count, "an instant behind the last byte is rare"
    assert any(0 < each.new < each.tags for each in killed)
    assert all(each.kept for each in killed if each.new), "what was answered was in the state"
    assert all(1 + each.lost <= MOST for each in done)
