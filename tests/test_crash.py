"""Syncs between real registries that are killed at any byte and run again (tools/crash.py does more
of them).
"""

from __future__ import annotations

import pytest

from tools.crash import MOST, rounds


# What holds after a kill at any instant is in test_discipline_runs.py, for an ordinary run.
@pytest.mark.thorough
def test_whatever_the_instant_tags_are_old_or_whole_and_the_next_run_completes_them() -> None:
    done = list(rounds(10, seed=2))
    killed = [each for each in done if each.was_killed]
    assert len(killed) >= 8, "an instant behind the last byte is rare"
    assert any(0 < each.new < each.tags for each in killed)
    assert all(each.kept for each in killed if each.new), "what was answered was in the state"
    assert all(1 + each.lost <= MOST for each in done)
