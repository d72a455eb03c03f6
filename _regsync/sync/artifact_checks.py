"""When the artifacts of an image that a target holds are looked at again.

Owns: the schedule of docs/design.md section 8, "Late signatures", and what is remembered of a look.
May not know: how artifacts are asked for or copied, clocks, the form of the state.
Invariants: artifacts that are not known to be complete are always looked at.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

# What is remembered of a look, one bit each, above the bits of `referrers.Referrers.shown`: there
# are artifacts; all are at the target; the image was copied, not found there.
HAS_ARTIFACTS = 16
COMPLETE = 32
COPIED = 64

# Seconds after an image was copied: pipelines push, then sign.
FIRST_LOOKS = (5 * 60, 15 * 60, 30 * 60)

# Seconds between two later looks; in between, this part of the time since the first one.
SHORTEST_PAUSE = 3600
LONGEST_PAUSE = 7 * 86400
PAUSE_SHARE = 1 / 4

# Seconds.
_QUARTER_OF_A_DAY = 6 * 3600


class Look(enum.IntEnum):
    """How much of an image is looked at for artifacts."""

    NONE = 0
    # what refers to the image itself
    TOP = 1
    # also what refers to the manifests below it
    DEEP = 2


class ArtifactCheck(NamedTuple):
    """What is remembered of the looks at the artifacts of an image at one target.

    Times are seconds since 1970, 0 where nobody has looked; `listing_hash` stands for the digests
    that the source listed.
    """

    last: int
    first: int
    flags: int
    listing_hash: bytes

    @property
    def is_complete(self) -> bool:
        return bool(self.flags & COMPLETE)

    @property
    def has_artifacts(self) -> bool:
        return bool(self.flags & HAS_ARTIFACTS)

    @property
    def was_copied(self) -> bool:
        return bool(self.flags & COPIED)


def decide_artifact_check(
    checks: Sequence[ArtifactCheck], shown: int, now: float, *, required: bool
) -> Look:
    """Decide on an image that all targets hold.

    `checks` has one entry for each target, and one look serves all; `shown` are the tags of
    artifacts in the source's listing (`referrers.Referrers.shown`); `required` artifacts have to be
    there.
    """
    look = max(look_for_news(check, shown, required=required) for check in checks)
    if look is Look.NONE and is_due(checks, now):
        return Look.TOP
    return look


def look_for_news(check: ArtifactCheck, shown: int, *, required: bool) -> Look:
    """Decide by what is known, whatever the time."""
    if not check.is_complete:
        return Look.DEEP
    if required and not check.has_artifacts:
        return Look.DEEP
    if shown & ~check.flags:
        return Look.TOP
    return Look.NONE


def is_due(checks: Sequence[ArtifactCheck], now: float) -> bool:
    """Say whether it is time to look again: by the oldest look, at the target that came last."""
    last = min(check.last for check in checks)

    copied = max((check.first for check in checks if check.was_copied), default=None)
    if copied is not None and any(last < copied + pause <= now for pause in FIRST_LOOKS):
        return True

    first = max(check.first for check in checks)
    pause = min(max(SHORTEST_PAUSE, (now - first) * PAUSE_SHARE), LONGEST_PAUSE)
    return now >= last + pause


def is_due_without_state(digest: str, now: float) -> bool:
    """Spread the looks at unchanged images over the runs of jobs that remember nothing.

    An image has one quarter of each day, the next day another one, all four in four days. So a job
    that runs every 6, 12 or 24 hours looks at each image in at least one of five runs, and a job
    with other hours, at each of them in one of four days: on average in one of four runs.
    """
    quarter = int(now) // _QUARTER_OF_A_DAY
    day = quarter // 4
    return (int(digest[-6:], 16) + quarter - day) % 4 == 0
