"""When the artifacts of an image that a target holds are searched for again: a look.

Invariants: pure functions of records and time. If a target is not known to hold all artifacts, they
are searched for in every run.
Follows: docs/design.md section 8, "Late signatures".
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from _regsync.state import ArtifactCheck, hashed_key

# The bounds of the pause between two looks, in seconds. It begins short because pipelines push an
# image and sign it soon after.
SHORTEST_PAUSE = 5 * 60
LONGEST_PAUSE = 7 * 86400

_QUARTER_OF_A_DAY = 6 * 3600  # seconds

# Bytes of `ArtifactCheck.listing_hash`. The hash only detects changes of a list.
_HASH_BYTES = 8


class SearchDepth(enum.IntEnum):
    """Which manifests of an image have their artifacts searched for."""

    NONE = 0
    TOP = 1  # only the image's own manifest or index
    DEEP = 2  # also the manifests below it


def decide_depth(
    checks: Sequence[ArtifactCheck], listed_tag_bits: int, now: float | None
) -> SearchDepth:
    """Decide how deep to search for the artifacts of an image that all targets hold.

    `checks` has the record of the last search for each target. `listed_tag_bits` are the tags with
    artifacts that the source's listing shows now. `now` is in seconds since 1970, or None if no
    look may be due.

    Returns DEEP if a last search did not find or copy all artifacts. Returns TOP if a look is due,
    or if the source lists tags that it did not list at a last search, and otherwise NONE.
    """
    if not all(check.is_complete for check in checks):
        return SearchDepth.DEEP
    has_new_tags = any(listed_tag_bits & ~check.listed_tag_bits for check in checks)
    is_look_due = now is not None and is_due(checks, now)
    return SearchDepth.TOP if has_new_tags or is_look_due else SearchDepth.NONE


def is_due(checks: Sequence[ArtifactCheck], now: float) -> bool:
    """Report whether it is time to look again, at all targets at once: when an image is twice as old
    as it was at the last look.

    `checks` has the record of the last search for each target. `now` is in seconds since 1970.
    """
    # The target that was looked at the longest ago decides.
    last = min(check.last for check in checks)
    first = max(check.first for check in checks)
    # The pause grows with age, because an old image is less likely to get a new signature.
    pause = min(max(SHORTEST_PAUSE, last - first), LONGEST_PAUSE)
    return now >= last + pause


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


def hash_of_list(digests: Iterable[str]) -> str:
    """Hash the digests in a source's list of referrers for `ArtifactCheck.listing_hash`."""
    return hashed_key(*sorted(digests))[:_HASH_BYTES].hex()
