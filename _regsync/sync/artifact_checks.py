"""When the artifacts of an image that a target holds are looked at again.

Owns: the schedule of docs/design.md section 8, "Late signatures", and what a copy leaves for the next
look.
May not know: how artifacts are asked for or copied, clocks, files.
Invariants: artifacts that are not known to be complete are always looked at.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from _regsync.state.archive import COMPLETE, COPIED, ArtifactCheck, hashed_key
from _regsync.sync.image import ImageCopy

# Seconds after an image was copied: pipelines push, then sign.
FIRST_LOOKS = (5 * 60, 15 * 60, 30 * 60)

# The pause between two later looks is this share of the time since the first look.
PAUSE_SHARE = 1 / 4
# Bounds of that pause, in seconds.
SHORTEST_PAUSE = 3600
LONGEST_PAUSE = 7 * 86400

_QUARTER_OF_A_DAY = 6 * 3600  # seconds


class SearchDepth(enum.IntEnum):
    """How much of an image is looked at for artifacts."""

    NONE = 0
    TOP = 1  # what refers to the image itself
    DEEP = 2  # also what refers to the manifests below it


def decide_depth(checks: Sequence[ArtifactCheck], listed_tag_bits: int, now: float) -> SearchDepth:
    """Decide on an image that all targets hold; the one look serves all of them.

    `checks` has one entry for each target. `listed_tag_bits` are bits (`Referrers.listed_tag_bits`).
    """
    depth = max(depth_without_schedule(check, listed_tag_bits) for check in checks)
    if depth is SearchDepth.NONE and is_due(checks, now):
        return SearchDepth.TOP
    return depth


def depth_without_schedule(check: ArtifactCheck, listed_tag_bits: int) -> SearchDepth:
    """Decide by what is known of one target, whatever the time."""
    if not check.is_complete:
        return SearchDepth.DEEP
    has_new_tags = listed_tag_bits & ~check.flags != 0
    return SearchDepth.TOP if has_new_tags else SearchDepth.NONE


def is_due(checks: Sequence[ArtifactCheck], now: float) -> bool:
    """Say whether it is time to look again, at one target at least."""
    last = min(check.last for check in checks)

    # The first look at an image that a run has copied was made with the copy.
    copied = max((check.first for check in checks if check.was_copied), default=None)
    if copied is not None and any(last < copied + pause <= now for pause in FIRST_LOOKS):
        return True

    # The older an image is, the less likely is a new signature.
    first = max(check.first for check in checks)
    pause = min(max(SHORTEST_PAUSE, (now - first) * PAUSE_SHARE), LONGEST_PAUSE)
    return now >= last + pause


def is_due_without_state(digest: str, now: float) -> bool:
    """Say whether a job that remembers nothing looks at an unchanged image now.

    An image is due in one quarter of each day, each day in the next quarter. So a job that runs every
    6, 12 or 24 hours looks at each image in at least one of five runs, and a job with other hours on
    average in one of four runs.
    """
    quarter = int(now) // _QUARTER_OF_A_DAY
    day = quarter // 4
    # Some digits of the digest spread the images evenly over the quarters.
    return (int(digest[-6:], 16) + quarter - day) % 4 == 0


def hash_of_list(digests: Iterable[str]) -> bytes:
    """Return what a check keeps of a source's list of artifacts (`ArtifactCheck.listing_hash`)."""
    return hashed_key(*sorted(digests))[:8]


def found_no_referrers(check: ArtifactCheck) -> bool:
    """Say whether the source's list for the image itself was empty at the last look."""
    return check.listing_hash == hash_of_list(())


def found_no_tags(check: ArtifactCheck, listed_tag_bits: int) -> bool:
    """Say whether tags with artifacts have come to the source since the last look.

    `listed_tag_bits` are those that its listing shows now (`Referrers.listed_tag_bits`). Where it shows none,
    it may not have been listed at the last look either, and that look may have found some.
    """
    showed_some = check.flags & ~(COMPLETE | COPIED) != 0
    return listed_tag_bits != 0 and not showed_some


def flags_after(copy: ImageCopy) -> int:
    """Return the flags that the state keeps of the look at a copy that has ended.

    After a failure they are without COMPLETE, so that the next run looks at all artifacts.
    """
    flags = COPIED if copy.is_copied or copy.artifact_search.last_check.was_copied else 0
    if copy.error is not None:
        return flags
    return flags | copy.artifact_search.listed_tag_bits | COMPLETE
