"""When the artifacts of images that are there are looked at again (docs/design.md section 8, "Late
signatures").
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from _regsync.state import ArtifactCheck
from _regsync.sync.image import ImageCopy
from _regsync.sync.looks import SearchDepth, decide_depth, is_due_without_state

MINUTE, HOUR, DAY = 60, 3600, 86400

# What a check says, beside the bits of the tags that were listed.
COMPLETE = 32


def check(last: float, first: float, flags: int) -> ArtifactCheck:
    return ArtifactCheck(int(last), int(first), bool(flags & COMPLETE), flags & 15)


@pytest.mark.parametrize(
    ("last", "first", "flags", "shown", "now", "depth"),
    [
        (0, 0, 0, 0, 0, SearchDepth.DEEP),
        (0, 0, COMPLETE, 0, 10, SearchDepth.NONE),
        (0, 0, COMPLETE | 1, 1, 10, SearchDepth.NONE),
        (0, 0, COMPLETE | 1, 3, 10, SearchDepth.TOP),
        (3 * MINUTE, 0, COMPLETE, 0, 8 * MINUTE - 1, SearchDepth.NONE),
        (3 * MINUTE, 0, COMPLETE, 0, 8 * MINUTE, SearchDepth.TOP),
        # A clock that went back.
        (40 * MINUTE, 40 * MINUTE, COMPLETE, 0, 0, SearchDepth.NONE),
    ],
)
def test_when_an_unchanged_image_is_looked_at_again(last, first, flags, shown, now, depth):
    one = check(last, first, flags)
    assert decide_depth([one], shown, now) is depth


def looks(checks: list[ArtifactCheck], runs: Iterable[int]) -> list[int]:
    """Return at which of these runs an image is looked at, for all its targets at once."""
    times = []
    for now in runs:
        if decide_depth(checks, 0, now):
            times.append(now)
            checks = [each._replace(last=now + number) for number, each in enumerate(checks)]
    return times


def test_an_image_is_looked_at_when_it_is_twice_as_old():
    found = looks([check(0, 0, COMPLETE)], range(MINUTE, 21 * DAY, MINUTE))
    doubled = [5 * 2**number * MINUTE for number in range(12)]
    assert found == [*doubled, doubled[-1] + 7 * DAY]
    assert len([each for each in found if each <= 7 * DAY]) == 11


def test_a_target_that_comes_later_has_early_looks():
    old, new = check(DAY - 60, 0, COMPLETE), check(DAY, DAY, COMPLETE)
    runs = range(DAY + MINUTE, DAY + HOUR // 2, MINUTE)
    # The one whose look is oldest decides when the first is.
    assert looks([old, new], runs) == [DAY + each * MINUTE for each in (4, 9, 18)]
    assert looks([old], runs) == []
    assert decide_depth([old, check(0, 0, 0)], 0, DAY) is SearchDepth.DEEP


DIGESTS = [f"sha256:{number:064x}" for number in range(48)]


def looked_at(digest: str, hours: Iterable[int]) -> int:
    """Return at how many of these hours an image is looked at without a state."""
    return sum(1 for hour in hours if is_due_without_state(digest, hour * HOUR + 59 * MINUTE))


def test_without_state_four_runs_spread_over_a_day_look_at_each_image_once():
    for digest in DIGESTS[:8]:
        for day in range(9):
            for first in range(24 * day, 24 * day + 6):
                assert looked_at(digest, range(first, first + 24, 6)) == 1


@pytest.mark.parametrize("hours", [6, 12, 24])
def test_without_state_one_of_five_runs_looks_at_each_image(hours):
    for digest in DIGESTS[:8]:
        for first in range(9 * 24):
            assert looked_at(digest, range(first, first + 5 * hours, hours)) >= 1
        assert looked_at(digest, range(0, 16 * 24 * hours, hours)) == 4 * 24


def test_without_state_each_hour_of_the_day_sees_each_image_in_one_of_four_days():
    """So a job that runs once a day looks in one of any four runs, whatever its hour is."""
    for digest in DIGESTS[:8]:
        for first in range(9 * 24):
            assert looked_at(digest, range(first, first + 4 * 24, 24)) == 1


def test_without_state_images_are_spread_evenly():
    for hour in range(9 * 24):
        assert sum(looked_at(digest, [hour]) for digest in DIGESTS) == len(DIGESTS) // 4


@pytest.mark.parametrize(
    ("is_complete", "bits", "flags"), [(True, 0, COMPLETE), (True, 3, COMPLETE | 3), (False, 3, 0)]
)
def test_what_is_remembered_of_a_look(is_complete, bits, flags):
    nobody: Any = None
    copy = ImageCopy(nobody, nobody, "1", "1", "sha256:a", "sha256:a", 0.0, False, None)
    copy.check = check(0, 1, COMPLETE | bits)
    assert copy.check_after(is_complete=is_complete) == check(0, 1, flags)
