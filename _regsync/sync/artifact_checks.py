"""Decide when to search again for the artifacts of an image that a target already holds.

Owns: the schedule of docs/design.md section 8, "Late signatures", and the flags that a copy records
for the next search.
May not know: how artifacts are searched for or copied, clocks, files.
Invariants: if a target is not known to hold all artifacts, they are always searched for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from _regsync.state import COMPLETE, COPIED, ArtifactCheck, hashed_key
from _regsync.sync.image import ImageCopy

# Seconds after an image was copied at which searches are due. They are early because pipelines push
# an image and sign it soon after.
FIRST_SEARCHES = (5 * 60, 15 * 60, 30 * 60)

# The pause between two later searches, as a share of the time since the first search.
PAUSE_SHARE = 1 / 4
# Bounds of that pause, in seconds.
SHORTEST_PAUSE = 3600
LONGEST_PAUSE = 7 * 86400

_QUARTER_OF_A_DAY = 6 * 3600  # seconds

# The length of `ArtifactCheck.listing_hash` in bytes. The hash only detects changes of a list.
_HASH_BYTES = 8


class SearchDepth(enum.IntEnum):
    """Which manifests of an image have their artifacts searched for."""

    NONE = 0
    TOP = 1  # only the image's own manifest or index
    DEEP = 2  # also the manifests below it


def decide_depth(checks: Sequence[ArtifactCheck], listed_tag_bits: int, now: float) -> SearchDepth:
    """Decide how deep to search for the artifacts of an image that all targets hold.

    `checks` has the record of the last search for each target. `listed_tag_bits` is the result of
    `Referrers.listed_tag_bits`. `now` is in seconds since 1970. The depth is the largest that any
    target needs (`depth_without_schedule`), and at least TOP when a search is due.
    """
    depth = max(depth_without_schedule(check, listed_tag_bits) for check in checks)
    if depth is SearchDepth.NONE and is_due(checks, now):
        return SearchDepth.TOP
    return depth


def depth_without_schedule(check: ArtifactCheck, listed_tag_bits: int) -> SearchDepth:
    """Decide how deep to search for artifacts that one target may lack, if no search is due by the
    schedule.

    Returns DEEP if the last search did not find or copy all artifacts. Returns TOP if the source
    lists tags with artifacts that it did not list at the last search, and otherwise NONE. Both
    arguments have a bit for each such tag.
    """
    if not check.is_complete:
        return SearchDepth.DEEP
    new_tag_bits = listed_tag_bits & ~check.listed_tag_bits
    return SearchDepth.TOP if new_tag_bits else SearchDepth.NONE


def is_due(checks: Sequence[ArtifactCheck], now: float) -> bool:
    """Report whether it is time to search again for at least one target.

    `checks` has the record of the last search for each target. `now` is in seconds since 1970.
    """
    # The target whose last search is the oldest decides.
    last_search = min(check.last for check in checks)

    # A search is due at each of the times of FIRST_SEARCHES after the image was copied. An image
    # that a run copied was first searched at that time.
    copied_at = max((check.first for check in checks if check.was_copied), default=None)
    if copied_at is not None:
        due_times = [copied_at + pause for pause in FIRST_SEARCHES]
        if any(last_search < due_time <= now for due_time in due_times):
            return True

    # Later, the pause grows with age, because an old image is less likely to get a new signature.
    # The target with the youngest image decides.
    age = now - max(check.first for check in checks)
    pause = min(max(SHORTEST_PAUSE, age * PAUSE_SHARE), LONGEST_PAUSE)
    return now >= last_search + pause


def is_due_without_state(digest: str, now: float) -> bool:
    """Report whether a run without state searches for the artifacts of an unchanged image now.

    An image is due in one quarter of each day, and on the next day in another quarter. A job that
    runs every 6, 12 or 24 hours therefore searches for each image in at least one of five runs. A
    job with other hours does so on average in one of four runs.
    """
    quarter = int(now) // _QUARTER_OF_A_DAY
    day = quarter // 4
    # The last six hex digits of the digest spread the images evenly over the four quarters. The day
    # is subtracted so that the quarter of an image moves from day to day.
    return (int(digest[-6:], 16) + quarter - day) % 4 == 0


def hash_of_list(digests: Iterable[str]) -> bytes:
    """Hash the digests in a source's referrers list for `ArtifactCheck.listing_hash`."""
    return hashed_key(*sorted(digests))[:_HASH_BYTES]


def found_no_referrers(check: ArtifactCheck) -> bool:
    """Report whether the source's referrers list for the image was empty at the last search."""
    return check.listing_hash == hash_of_list(())


def found_no_tags(check: ArtifactCheck, listed_tag_bits: int) -> bool:
    """Report whether the last search found no tags with artifacts of the image.

    `listed_tag_bits` is the result of `Referrers.listed_tag_bits` in this run. If it is 0, the
    source may not be listed in any run. The last search may then have found tags without a listing,
    so the result is False.
    """
    return listed_tag_bits != 0 and check.listed_tag_bits == 0


def flags_after(copy: ImageCopy) -> int:
    """Return the flags to record in the state after a copy has ended.

    After a failure the flags lack COMPLETE, so that the next run searches for all artifacts.
    """
    was_copied_before = copy.artifact_search.last_check.was_copied
    flags = COPIED if copy.is_copied or was_copied_before else 0
    if copy.error is not None:
        return flags
    return flags | copy.artifact_search.listed_tag_bits | COMPLETE
